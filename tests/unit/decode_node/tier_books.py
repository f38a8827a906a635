"""Live requests whose held pages move between the device and main memory, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, PromptKeys
from hisparse_pd.decode_node.held_matches import HeldMatches
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.request import KV_POOLS, Request
from hisparse_pd.decode_node.step_plan import Admission, StepPlan
from hisparse_pd.engine.messages import pack_token_ids
from tests.books import carry_out, end, enqueue, make_request
from tests.slow_copies import SlowCopies
from tests.unit.decode_node.support import Prompt

DENSE, HISPARSE = KV_POOLS[Mode.DENSE], KV_POOLS[Mode.HISPARSE]


def keys_of(prompt: Prompt) -> Sequence[PageKey]:
    return PromptKeys.of(NO_ISOLATION, pack_token_ids(prompt), 4).keys


class Books:
    """Live requests without an engine, with pages of 4 tokens: 10 in the device pool, 24 in the host pool."""

    def __init__(self, num_host_slots: int = 96) -> None:
        totals = SlotCounts(host=num_host_slots, device=40, index=64, lookup=96, aux=4, req_row=4)
        self.copies = SlowCopies()
        self.rooms = LiveRequests(Pools(totals, 4), quarantine_secs=5.0, copies=self.copies)
        self._num_rooms = 0

    def land(self, prompt: Prompt, mode: Mode = Mode.DENSE) -> Request:
        """Admit a request as a plan does, with what it can share, and deliver its KV."""
        self._num_rooms += 1
        keys = PromptKeys.of(NO_ISOLATION, pack_token_ids(prompt), 4)
        request = make_request(self._num_rooms, len(prompt), prompt_keys=keys)
        enqueue(self.rooms, request)
        match = HeldMatches(self.rooms.held, (), 4).find(request, mode)
        num_own = len(prompt) + 3 - 4 * match.num_pages
        need = SlotCounts.of(KV_POOLS[mode], num_own) + SlotCounts(aux=1, req_row=1)
        hot_capacity = 0
        if mode is Mode.HISPARSE:
            hot_capacity, need = 8, need + SlotCounts(device=8, lookup=len(prompt) + 3)
        free_before = self.rooms.available
        admission = Admission(request, mode, need, hot_capacity, match.num_pages)
        carry_out(self.rooms, StepPlan(admissions=(admission,)))
        taken = self.rooms.pools.rounded(need) + match.taken
        assert self.rooms.available == free_before - taken, "a plan takes what it says"
        self.rooms.check_integrity()
        for kind in KV_POOLS[mode]:
            slots = extents_to_slots(request.extents(kind)).tolist()
            for position in range(request.held_prefix_tokens, len(prompt)):
                self.copies.of(kind)[slots[position]] = prompt[: position + 1]
        return request

    def run(self, request: Request, prompt: Prompt) -> None:
        """Start a request, all of whose KV and keys are to be there."""
        assert not self.rooms.await_fetch(request, 9.0)
        self.rooms.start(request)
        for kind in request.kv_pools:
            slots = extents_to_slots(request.extents(kind)).tolist()
            for position in range(len(prompt)):
                assert self.copies.of(kind)[slots[position]] == prompt[: position + 1], kind
        request.output_token_ids += [7]
        self.rooms.check_integrity()

    def leave(self, prompt: Prompt, mode: Mode = Mode.DENSE) -> None:
        """A request runs and ends, and its pages are copied to main memory."""
        request = self.land(prompt, mode)
        self.run(request, prompt)
        end(self.rooms, request, is_sound=True)
        self.copied()

    def copied(self) -> list[Request]:
        """Copies that wait begin, and end. Returns the requests that may start."""
        self.rooms.fetched()
        self.copies.finish()
        fetched = self.rooms.fetched()
        self.rooms.check_integrity()
        return fetched

    def num_found(self, prompt: Prompt) -> tuple[int, int]:
        """Pages of a prompt on the device, and in the host pool."""
        held, keys = self.rooms.held, keys_of(prompt)
        return held.num_found(keys, DENSE), held.num_found(keys, HISPARSE)

    def run_of(self, prompt: Prompt, kinds: tuple[PoolKind, ...] = HISPARSE) -> Prefix:
        found = self.rooms.held.find(keys_of(prompt), kinds)
        assert found is not None
        return found.prefix

    def empty_device(self) -> None:
        self.rooms.held.make_room(SlotCounts(device=40))
        self.rooms.check_integrity()


FIRST, SECOND, THIRD = ((number,) * 17 for number in (1, 2, 3))
