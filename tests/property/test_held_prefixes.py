"""What a decode node holds, through any history of requests: nothing leaks, and what is shared was left so.

Every slot has a content here: the salt and the tokens up to it, or what a write left that should not have
landed there.
Any number of requests share what is held, from the time when it has landed.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_node.live_requests import LiveRequests
from decode_node.request import KV_POOLS, Request, RequestState
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.paging import prefix_tree
from hisparse_pd.paging.extents import extents_to_slots, slice_extents
from hisparse_pd.paging.pools import PoolKind, Pools, SlotCounts
from hisparse_pd.paging.prompt_keys import PageKey, PromptKeys, root_of
from hisparse_pd.vocabulary import Mode
from protocol.messages import Extent
from tests.books import admission_of, end, land, make_request

pytestmark = pytest.mark.I2

PAGE_SIZE = 4
TOTALS = SlotCounts(host=60, device=48, index=84, lookup=100, aux=6, req_row=6)
QUARANTINE_SECS = 3.0
MAX_RUNS = 3

Said = tuple[str, tuple[int, ...]]
"""A salt, and tokens behind it."""


class HeldMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.few_runs = patch.object(prefix_tree, "MAX_RUNS", MAX_RUNS)
        self.few_runs.start()
        self.rooms = LiveRequests(Pools(TOTALS, PAGE_SIZE), QUARANTINE_SECS)
        self.content: dict[tuple[PoolKind, int], Any] = {}
        self.prompts: dict[Request, tuple[int, ...]] = {}
        self.salts: dict[Request, str] = {}
        self.said: list[tuple[int, ...]] = [()]
        self.content_of_key: dict[PageKey, Said] = {}
        self.now = 0.0
        self.landing_zones: dict[Request, list[tuple[PoolKind, int]]] = {}
        """What the prefill node may write to."""

    def slots(self, extents: tuple[Extent, ...]) -> list[int]:
        slots: list[int] = extents_to_slots(extents).tolist()
        return slots

    def tokens(self, request: Request) -> tuple[int, ...]:
        return (*self.prompts[request], *request.output_token_ids)

    def write(self, request: Request, kinds: tuple[PoolKind, ...], start: int, stop: int) -> None:
        tokens = self.tokens(request)
        for kind in kinds:
            own = set(self.slots(request.owned[kind]))
            for position, slot in enumerate(self.slots(request.extents(kind))[:stop]):
                if position >= start:
                    assert slot in own, "what is shared is written to"
                    self.content[kind, slot] = self.salts[request], tokens[: position + 1]

    def check(
        self, request: Request, extents: tuple[Extent, ...], kind: PoolKind, start: int, stop: int
    ) -> None:
        tokens, slots = self.tokens(request), self.slots(extents)
        for position in range(start, stop):
            found = self.content[kind, slots[position]]
            expected = self.salts[request], tokens[: position + 1]
            assert found == expected, f"{kind} position {position} of {request.room}: {found}"

    @rule(
        before=st.integers(0, 5),
        num_new=st.integers(1, 9),
        family=st.integers(0, 2),
        mode=st.sampled_from(Mode),
        extra=st.sampled_from([0, 4, 12]),
        salt=st.sampled_from(["", "", "", "salt"]),
    )
    def arrive(self, before: int, num_new: int, family: int, mode: Mode, extra: int, salt: str) -> None:
        prompt = (*self.said[-1 - before % len(self.said)], *[family] * num_new)[:24]
        number = len(self.prompts)
        keys = PromptKeys.of(root_of(salt), pack_token_ids(prompt), PAGE_SIZE)
        request = make_request(number, len(prompt), 12, arrived_at=self.now, prompt_keys=keys)
        admission = admission_of(self.rooms, request, mode, len(prompt) + extra)
        num_pages = admission.num_shared_pages
        unused = num_pages * PAGE_SIZE  # at most
        need = self.rooms.pools.rounded(admission.need)
        if not (need + SlotCounts(unused, unused, 2 * unused)).fits_in(self.rooms.available):
            return
        self.prompts[request], self.salts[request] = prompt, salt
        land(self.rooms, request, mode, len(prompt) + extra)
        num_held = request.held_prefix_tokens
        assert num_held == num_pages * PAGE_SIZE < len(prompt), "the last token is always computed"
        self.landing_zones[request] = [
            (kind, slot)
            for kind in KV_POOLS[mode]
            for slot in self.slots(slice_extents(request.extents(kind), num_held, len(prompt)))
        ]
        for kind in KV_POOLS[mode]:
            self.check(request, request.extents(kind), kind, 0, num_held)

    def of(self, *states: RequestState) -> list[Request]:
        return self.rooms.select(*states)

    @precondition(lambda self: self.of(RequestState.LANDING))
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.of(RequestState.LANDING)))
        kinds = request.kv_pools
        self.write(request, kinds, request.held_prefix_tokens, request.num_prompt_tokens)
        del self.landing_zones[request]
        self.note(self.salts[request], self.prompts[request])
        self.rooms.start(request)
        request.output_token_ids.append(7)

    @precondition(lambda self: self.of(RequestState.RUNNING))
    @rule(data=st.data(), num_steps=st.integers(1, 6))
    def step(self, data: st.DataObject, num_steps: int) -> None:
        request = data.draw(st.sampled_from(self.of(RequestState.RUNNING)))
        for _ in range(num_steps):
            if not request.has_next_step:
                return
            if not request.has_slots_for_next:
                kv = SlotCounts(host=4, lookup=4)
                need = (kv if request.mode is Mode.HISPARSE else SlotCounts(device=4)) + SlotCounts(index=4)
                if not need.fits_in(self.rooms.available):
                    return
                self.rooms.grow(request, need)
            kinds = request.kv_pools
            self.write(request, kinds, request.num_kv_tokens, request.num_kv_tokens + 1)
            request.output_token_ids.append(len(request.output_token_ids) % 3)

    @precondition(lambda self: self.of(RequestState.LANDING, RequestState.RUNNING))
    @rule(data=st.data(), is_quiet=st.booleans(), is_sound=st.sampled_from([True, True, False]))
    def end(self, data: st.DataObject, is_quiet: bool, is_sound: bool) -> None:
        request = data.draw(st.sampled_from(self.of(RequestState.LANDING, RequestState.RUNNING)))
        if request.state is RequestState.RUNNING:
            for kind in request.kv_pools:
                self.check(request, request.extents(kind), kind, 0, request.num_kv_tokens)
        self.said.append(self.tokens(request))
        self.note(self.salts[request], self.tokens(request))
        end(self.rooms, request, self.now, is_sound=is_sound)
        if is_quiet:
            self.rooms.quarantine.quiet(request.room, False, self.now)
        zone = self.landing_zones.pop(request, [])
        for entry in self.rooms.quarantine:  # whose writes may land until they are over
            if entry.room == request.room:
                self.content |= dict.fromkeys(zone, ("of room", entry.room))

    def note(self, salt: str, tokens: tuple[int, ...]) -> None:
        keys = PromptKeys.of(root_of(salt), pack_token_ids(tokens), PAGE_SIZE).keys
        for number, key in enumerate(keys):
            self.content_of_key[key] = salt, tokens[: (number + 1) * PAGE_SIZE]

    @rule(secs=st.sampled_from([1.0, QUARANTINE_SECS]), is_quiet=st.booleans())
    def pass_time(self, secs: float, is_quiet: bool) -> None:
        self.now += secs
        if is_quiet:
            for entry in self.rooms.quarantine:
                self.rooms.quarantine.quiet(entry.room, False, self.now)
        self.rooms.quarantine.expire(self.now)

    @rule(dice=st.integers(0, 5))
    def flush(self, dice: int) -> None:
        if dice == 0:
            self.rooms.held.flush()
            assert self.rooms.held.unused == SlotCounts()

    @invariant()
    def is_whole(self) -> None:
        self.rooms.check_integrity()

    @invariant()
    def holds_what_its_keys_say(self) -> None:
        for prefix in self.rooms.held:
            salt, tokens = self.content_of_key[prefix.keys[-1]]
            for kind in prefix.holding.extents:
                found = [self.content.get((kind, slot)) for slot in self.slots(prefix.extents(kind))]
                assert found == [(salt, tokens[: position + 1]) for position in range(len(tokens))]

    @invariant()
    def nothing_lands_in_what_is_shared(self) -> None:
        held = {
            (kind, slot)
            for prefix in self.rooms.held
            for kind in prefix.holding.extents
            for slot in self.slots(prefix.holding[kind])
        }
        for request, zone in self.landing_zones.items():
            assert held.isdisjoint(zone), f"room {request.room} may write to what is held"

    @invariant()
    def no_sequence_has_many_runs(self) -> None:
        """Beyond the bound only those who use a part of one cut it."""
        num_users = len(self.of(RequestState.LANDING, RequestState.RUNNING))
        for prefix in self.rooms.held:
            assert len(list(prefix.chain())) <= MAX_RUNS + num_users

    def teardown(self) -> None:
        self.few_runs.stop()
        for request in self.rooms.all():
            end(self.rooms, request, self.now, is_sound=True)
        self.pass_time(2 * QUARANTINE_SECS, True)
        self.pass_time(2 * QUARANTINE_SECS, True)
        assert self.rooms.available == self.rooms.pools.totals
        self.rooms.held.flush()
        assert self.rooms.pools.free == self.rooms.pools.totals


TestHeld = HeldMachine.TestCase
TestHeld.settings = settings(
    derandomize=True,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
