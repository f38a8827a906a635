"""Held prefixes whose indexer keys and row checks move to main memory and back: books, bytes, an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
import torch

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PromptKeys
from hisparse_pd.decode_node.held_matches import HeldMatches
from hisparse_pd.decode_node.key_pages import KeyPages
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.memory import DecodeMemory, slots_tensor
from hisparse_pd.decode_node.peer_events import PeerReady
from hisparse_pd.decode_node.request import KV_POOLS, Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import Bootstrap, Extent
from tests.books import end, fail_to_land, land, make_request
from tests.slow_copies import SlowCopies
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    Prompt,
    computed,
    raising,
    random_prompt,
)

CHECKPOINT = "tied"
HISPARSE = KV_POOLS[Mode.HISPARSE]
PAGE = 16
NODE = {
    "disable_prefix_cache": False,
    "page_size": PAGE,
    "host_pool_tokens": 1024,
    "index_pool_tokens": 256,
    "device_pool_tokens": 768,
    "device_buffer_size": 48,
}
NUM_NEW = 12


# --- the books ------------------------------------------------------------------------------------------


class Books:
    """Live requests without an engine, with pages of 4 tokens: 10 in the index pool, 24 in the host pool."""

    def __init__(self, num_index_slots: int = 40) -> None:
        totals = SlotCounts(host=96, device=64, index=num_index_slots, lookup=96, aux=4, req_row=4)
        self.copies = SlowCopies()
        self.rooms = LiveRequests(Pools(totals, 4), quarantine_secs=5.0, copies=self.copies)
        self._num_rooms = 0

    def land(self, prompt: Prompt) -> Request:
        self._num_rooms += 1
        keys = PromptKeys.of(NO_ISOLATION, pack_token_ids(prompt), 4)
        request = make_request(self._num_rooms, len(prompt), prompt_keys=keys)
        land(self.rooms, request, Mode.HISPARSE, len(prompt) + 3)
        self.rooms.check_integrity()
        slots = extents_to_slots(request.extents(PoolKind.INDEX)).tolist()
        for position in range(request.held_prefix_tokens, len(slots)):
            self.copies.index[slots[position]] = prompt[: position + 1]
        return request

    def start(self, request: Request) -> bool:
        """Returns whether it runs; if not, it waits for its prefix."""
        waits = self.rooms.await_fetch(request, 9.0)
        if not waits:
            self.run(request)
        self.rooms.check_integrity()
        return not waits

    def run(self, request: Request, prompt: Prompt = ()) -> None:
        """``prompt``: the request's, if all of its keys are to be there."""
        self.rooms.start(request)
        slots = extents_to_slots(request.extents(PoolKind.INDEX)).tolist()
        for position in range(len(prompt)):
            assert self.copies.index[slots[position]] == prompt[: position + 1]

    def hold(self, prompt: Prompt) -> None:
        """The whole pages of a prompt are held and stored."""
        request = self.land(prompt)
        assert self.start(request)
        request.output_token_ids += [7]
        end(self.rooms, request, is_sound=True)
        self.copied()

    def copied(self) -> list[Request]:
        """Copies under way are over. Returns the requests that may start."""
        self.copies.finish()
        fetched = self.rooms.fetched()
        self.rooms.check_integrity()
        return fetched

    def run_of(self, prompt: Prompt) -> Prefix:
        keys = PromptKeys.of(NO_ISOLATION, pack_token_ids(prompt), 4).keys
        found = self.rooms.held.find(keys, HISPARSE)
        assert found is not None
        return found.prefix


FIRST, SECOND, THIRD = ((number,) * 17 for number in (1, 2, 3))


@pytest.mark.I2
def test_a_prefix_that_moved_down_costs_no_index_slots_and_comes_back() -> None:
    books = Books()
    books.hold(FIRST)
    first = books.run_of(FIRST)
    assert first.is_stored
    assert books.rooms.available == books.rooms.pools.totals
    books.hold(SECOND)
    books.hold(THIRD)
    assert [books.run_of(each).is_down for each in (FIRST, SECOND, THIRD)] == [True, False, False]
    assert books.rooms.held.num_tokens == 48
    assert books.rooms.held.num_evicted_tokens == 0
    again = books.land(FIRST)
    assert again.held_prefix_tokens == 16
    assert again.reserved_tokens == 20
    assert not books.start(again)
    assert again.state is RequestState.FETCHING
    assert books.rooms.fetched() == []
    assert books.copied() == [again]
    books.run(again, FIRST)
    end(books.rooms, again, is_sound=True)
    books.copied()
    assert books.rooms.available == books.rooms.pools.totals


@pytest.mark.I2
def test_a_prefix_that_cannot_be_brought_up_stays_where_it_is() -> None:
    books = Books()
    for prompt in (FIRST, SECOND, THIRD):
        books.hold(prompt)
    available = books.rooms.available
    books.copies.can_begin = False
    fail_to_land(books.rooms, lambda: books.land(FIRST))
    assert books.run_of(FIRST).is_down
    assert books.rooms.available == available
    books.copies.can_begin = True
    again = books.land(FIRST)
    assert not books.start(again)
    assert books.copied() == [again]
    books.run(again, FIRST)


@pytest.mark.I2
def test_keys_that_cannot_be_copied_down_stay_in_the_index_pool() -> None:
    books = Books()
    books.copies.can_begin = False
    books.hold(FIRST)
    assert not books.run_of(FIRST).is_stored
    books.copies.can_begin = True
    books.hold((*FIRST[:16], *SECOND))
    assert books.run_of((*FIRST[:16], *SECOND)).is_stored, "with those before them"
    assert books.run_of(FIRST).is_stored


@pytest.mark.I2
def test_nothing_moves_down_before_it_is_stored() -> None:
    """Nor is it given up: others wait for the copy."""
    books = Books()
    request = books.land(FIRST)
    books.start(request)
    end(books.rooms, request, is_sound=True)
    assert books.rooms.available.index == 24
    assert books.rooms.held_tier.num_copies == 1
    books.rooms.held.make_room(SlotCounts(index=40))
    assert not books.run_of(FIRST).is_down
    assert books.rooms.held.num_tokens == 16
    books.copied()
    assert books.rooms.available.index == 40
    books.rooms.held.make_room(SlotCounts(index=40))
    assert books.run_of(FIRST).is_down


def test_what_the_host_pool_needs_is_given_up_from_what_was_used_longest_ago() -> None:
    books = Books()
    prompts = [(number,) * 17 for number in range(5)]
    for prompt in prompts:
        books.hold(prompt)
    assert [books.run_of(prompt).is_down for prompt in prompts] == [True] * 3 + [False] * 2
    books.hold((77,) * 17)  # 20 slots, of which 16 are free
    num_left = [len(books.run_of(prompt).keys) for prompt in prompts]
    assert num_left == [3, 4, 4, 4, 4]
    assert books.rooms.held.num_evicted_tokens == 4


@pytest.mark.I1
@pytest.mark.I2
def test_a_request_that_ends_while_its_prefix_comes_up_leaves_that_whole() -> None:
    books = Books()
    for prompt in (FIRST, SECOND, THIRD):
        books.hold(prompt)
    request = books.land(FIRST)
    assert not books.start(request)
    end(books.rooms, request)
    books.rooms.check_integrity()
    assert len(books.rooms.quarantine) == 0, "nobody may write to it any more"
    assert books.run_of(FIRST).is_arriving
    books.rooms.held.flush()
    assert books.run_of(FIRST).is_arriving, "the copy uses it"
    second = books.land((*FIRST[:16], 5, 6))
    assert not books.start(second), "it waits for the same copy"
    assert books.rooms.held_tier.num_copies == 1
    assert books.copied() == [second]
    books.run(second, (*FIRST[:16], 5, 6))


@pytest.mark.I2
def test_part_of_a_prefix_comes_up_and_what_others_bring_is_waited_for() -> None:
    books = Books()
    books.hold((*FIRST[:16], *SECOND))  # 8 pages
    books.rooms.held.make_room(SlotCounts(index=40))
    short = books.land(FIRST)
    assert not books.start(short)
    assert books.rooms.pools.free.index == 20, "four pages for the prefix, one of its own"
    longer = books.land((*FIRST[:16], *SECOND[:5]))
    assert not books.start(longer)
    assert books.rooms.held_tier.num_copies == 2
    books.copies.finish(1)
    assert books.rooms.fetched() == [short]
    assert books.copied() == [short, longer]
    books.run(short, FIRST)
    books.run(longer, (*FIRST[:16], *SECOND[:5]))


@pytest.mark.I2
def test_a_request_keeps_its_own_pages_where_equal_ones_have_moved_down() -> None:
    """They were left by another that began and ended while it landed."""
    books = Books()
    late = books.land(FIRST)
    books.hold(FIRST)
    books.rooms.held.make_room(SlotCounts(index=20))
    assert books.run_of(FIRST).is_down
    assert books.start(late)
    assert late.prefix is None
    end(books.rooms, late, is_sound=True)
    books.copied()
    assert books.rooms.held.num_tokens == 16
    assert books.rooms.available == books.rooms.pools.totals


@pytest.mark.I2
def test_pages_that_a_copy_uses_take_slots_if_they_have_moved_down() -> None:
    """They are used, and yet a request that shares them has to bring them up."""
    books = Books(num_index_slots=48)
    late = books.land((*FIRST[:16], 5, 6, 7, 8, 9))
    books.hold(FIRST)
    books.rooms.held.make_room(SlotCounts(index=24))
    assert books.start(late)
    end(books.rooms, late, is_sound=True)
    assert books.rooms.held_tier.num_copies == 1, "of the page behind those that have moved down"
    down = books.run_of(FIRST)
    assert down.is_down
    assert down.num_users == 1
    again = make_request(9, 21, prompt_keys=late.prompt_keys)
    match = HeldMatches(books.rooms.held, (), 4).find(again, Mode.HISPARSE)
    assert match.num_pages == 5
    assert match.taken == SlotCounts(index=16)


@pytest.mark.I2
def test_a_wrong_row_drops_a_prefix_that_moved_down_or_is_arriving() -> None:
    books = Books()
    for prompt in (FIRST, SECOND, THIRD):
        books.hold(prompt)
    slot = extents_to_slots(books.run_of(FIRST).holding[PoolKind.HOST])[3]
    request = books.land(FIRST)
    assert not books.start(request)
    books.rooms.held.drop(PoolKind.HOST, int(slot))
    assert books.rooms.held.find(_keys(FIRST), HISPARSE) is None
    assert books.copied() == [request]
    end(books.rooms, request)
    books.rooms.check_integrity()
    books.rooms.held.make_room(SlotCounts(index=40))
    down = books.run_of(SECOND)
    assert down.is_down
    books.rooms.held.drop(PoolKind.HOST, int(extents_to_slots(down.holding[PoolKind.HOST])[0]))
    books.rooms.check_integrity()
    assert books.rooms.held.num_tokens == 16


def _keys(prompt: Prompt) -> Sequence[bytes]:
    return PromptKeys.of(NO_ISOLATION, pack_token_ids(prompt), 4).keys


# --- the bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 3])
def test_pages_come_back_as_they_went(checkpoint: Checkpoint, page_size: int) -> None:
    """To other slots, and from pages that are not adjacent."""
    memory = DecodeMemory(
        checkpoint.spec,
        SlotCounts(host=40 * page_size, device=page_size, index=24 * page_size, aux=1),
        page_size,
        torch.device("cpu"),
    )
    assert memory.row_checks is not None
    pools = (memory.index, memory.row_checks)
    memory.index.random_()
    memory.row_checks.random_()
    before = [pool.clone() for pool in pools]
    down, host, up = (
        tuple(Extent(first * page_size, num * page_size) for first, num in runs)
        for runs in (((5, 3), (0, 2), (11, 1)), ((38, 1), (2, 4), (0, 1)), ((14, 6),))
    )
    with closing(KeyPages(memory)) as pages:
        assert pages.copy_down(down, host) is None
        for pool in pools:
            pool.zero_()
        stored = pages.row_checks(slots_tensor(host))
        assert stored.equal(before[1][:, slots_tensor(down)])
        assert pages.copy_up(host, up) is None
        for pool, was in zip(pools, before, strict=True):
            expected = torch.zeros_like(was)
            expected[:, slots_tensor(up)] = was[:, slots_tensor(down)]
            assert pool.equal(expected)


# --- the engine -----------------------------------------------------------------------------------------


@pytest.fixture
def node(resting_node: EngineHarness) -> EngineHarness:
    resting_node.flush()
    return resting_node


@pytest.fixture(scope="module")
def cold_node(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHarness]:
    """A node that holds nothing."""
    with closing(EngineHarness(checkpoint, tmp_path_factory.mktemp("cold"), page_size=PAGE)) as node:
        yield node


def next_turns(node: EngineHarness, conversations: list[Prompt]) -> list[Answer]:
    """Ask for the next answer of each conversation, three at a time, and append it and a question to it."""
    answers = []
    for start in range(0, len(conversations), 3):
        some = [node.generate(each, NUM_NEW, HisparseFlag.TRUE) for each in conversations[start : start + 3]]
        for number, answer in enumerate(some, start):
            conversations[number] += (*node.tokens_of(answer), *random_prompt(number, 5))
        answers += some
    return answers


@pytest.mark.I5
@pytest.mark.slow
def test_conversations_beyond_the_index_pool_are_computed_once(
    node: EngineHarness, cold_node: EngineHarness
) -> None:
    conversations = [random_prompt(seed, 60 + seed) for seed in range(8)]
    requests = node.engine.requests
    num_before = requests.held.num_evicted_tokens
    num_held = [0] * len(conversations)
    for _ in range(3):
        asked = list(conversations)
        answers = next_turns(node, conversations)
        assert [answer.stats.num_held_tokens for answer in answers] == num_held
        assert [answer.token_ids for answer in answers] == [
            cold_node.ask(prompt, NUM_NEW, HisparseFlag.TRUE).token_ids for prompt in asked
        ]
        num_held = [(len(prompt) + NUM_NEW - 1) // PAGE * PAGE for prompt in asked]
    assert sum(num_held) > 2 * requests.pools.totals.index
    assert requests.held.num_evicted_tokens == num_before, "the host pool has room for all"
    assert requests.held_tier.num_fetched_tokens > 0
    node.turn_until(lambda: node.stats is not None and node.stats.counters["held_fetched_tokens_total"])
    assert node.stats is not None
    assert node.stats.counters["held_moved_down_tokens_total"] > 0


@pytest.mark.I5
def test_what_comes_back_is_bit_for_bit_what_prefill_computes(
    node: EngineHarness, checkpoint: Checkpoint
) -> None:
    prompt = random_prompt(5, 85)
    node.ask(prompt, 2, HisparseFlag.TRUE)
    node.turn_until(lambda: node.engine.requests.held_tier.num_copies == 0)
    keys = PromptKeys.of(NO_ISOLATION, pack_token_ids(prompt), PAGE).keys
    held, memory = node.engine.requests.held, node.engine.tables.memory
    found = held.find(keys, HISPARSE)
    assert found is not None
    held.make_room(node.engine.requests.pools.totals - SlotCounts(host=96))
    assert found.prefix.is_down
    memory.index.random_()
    node.ask(prompt, 2, HisparseFlag.TRUE)
    alone = computed(checkpoint, prompt)
    slots = slots_tensor(found.prefix.extents(PoolKind.INDEX))
    assert memory.row_checks is not None
    assert len(slots) == 80
    assert memory.index[:, slots].equal(alone.index[:, :80])
    assert memory.row_checks[:, slots].equal(alone.row_checks[:, :80])


def test_a_scrub_verifies_what_has_moved_down(node: EngineHarness) -> None:
    prompt = random_prompt(6, 85)
    node.ask(prompt, 2, HisparseFlag.TRUE)
    node.turn_until(lambda: node.engine.requests.held_tier.num_copies == 0)
    requests, memory = node.engine.requests, node.engine.tables.memory
    requests.held.make_room(requests.pools.totals - SlotCounts(host=96))
    (run,) = requests.held
    assert run.is_down
    memory.index.random_()
    assert memory.row_checks is not None
    memory.row_checks.random_()
    for _ in range(10):
        node.turn()
    assert not len(requests.set_aside)
    slot = int(extents_to_slots(run.holding[PoolKind.HOST])[40])
    memory.k_host[0, slot, 0] ^= 1
    node.turn_until(lambda: len(requests.set_aside))
    memory.k_host[0, slot, 0] ^= 1
    assert requests.held.num_tokens == 0, "nobody finds any of its pages"
    requests.set_aside.give_back(PoolKind.HOST, slot // PAGE * PAGE)


@pytest.mark.I7
def test_a_request_whose_prefix_does_not_come_back_waits_alone_and_not_for_ever(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(8, 83)  # so that nothing is asked of the prefill node
    node.ask(prompt, 2, HisparseFlag.TRUE)
    node.turn_until(lambda: node.engine.requests.held_tier.num_copies == 0)
    requests = node.engine.requests
    requests.held.make_room(requests.pools.totals - SlotCounts(host=96))
    copies = SlowCopies()
    monkeypatch.setattr(KeyPages, "copy_up", lambda _, *extents: copies.copy_up(*extents))
    late, given_up = (node.generate(prompt, 2, HisparseFlag.TRUE) for _ in range(2))
    node.turn_until(lambda: len(requests.select(RequestState.FETCHING)) == 2)
    node.ask(random_prompt(9, 40), NUM_NEW, HisparseFlag.TRUE)
    assert len(requests.select(RequestState.FETCHING)) == 2
    node.leave(given_up)
    node.turn_until(lambda: len(requests.select(RequestState.FETCHING)) == 1)
    node.engine.queue_moves.expire(time.monotonic() + 1e6)
    node.failure_of(late, status=503, error="the held prefix did not come from main memory within")
    copies.finish()


@pytest.mark.I7
def test_a_copy_that_cannot_begin_ends_the_request_that_needs_it_alone(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(11, 85)
    requests = node.engine.requests
    out_of_memory = raising(torch.OutOfMemoryError("32 MiB wanted"))
    with monkeypatch.context() as patch:
        patch.setattr("hisparse_pd.engine.host_copies.copy_slots", out_of_memory)
        expected = node.ask(prompt, NUM_NEW, HisparseFlag.TRUE).token_ids
    assert node.ask(prompt, NUM_NEW, HisparseFlag.TRUE).stats.num_held_tokens == 80
    node.turn_until(lambda: requests.held_tier.num_copies == 0)
    requests.held.make_room(requests.pools.totals - SlotCounts(host=96))
    with monkeypatch.context() as patch:
        patch.setattr("hisparse_pd.engine.host_copies.copy_slots", out_of_memory)
        doomed = node.generate(prompt, NUM_NEW, HisparseFlag.TRUE)
        node.failure_of(doomed, status=500, error="cannot be admitted: OutOfMemoryError: 32 MiB wanted")
    again = node.ask(prompt, NUM_NEW, HisparseFlag.TRUE)
    assert (again.token_ids, again.stats.num_held_tokens) == (expected, 80)


def slow_copies_up(patch: pytest.MonkeyPatch) -> SlowCopies:
    """Let copies of keys to the device be over when the result's ``finish`` is called, and not before."""
    copies, copy_up = SlowCopies(), KeyPages.copy_up

    def slow_copy_up(pages: KeyPages, host: Sequence[Extent], index: Sequence[Extent]) -> torch.cuda.Event:
        copy_up(pages, host, index)
        return copies.copy_up(host, index)

    patch.setattr(KeyPages, "copy_up", slow_copy_up)
    return copies


@pytest.mark.I7
def test_a_prefill_node_hears_of_keys_when_they_are_there(
    node: EngineHarness, cold_node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may read them. It hears nothing of a request that ends before, whose slots are free at once."""
    prompt = random_prompt(10, 85)
    node.ask(prompt, 2, HisparseFlag.TRUE)
    node.turn_until(lambda: node.engine.requests.held_tier.num_copies == 0)
    requests = node.engine.requests
    requests.held.make_room(requests.pools.totals - SlotCounts(host=96))
    copies = slow_copies_up(monkeypatch)
    longer = (*prompt, *random_prompt(11, 40))
    answer, given_up = (node.generate(longer, 4, HisparseFlag.TRUE) for _ in range(2))
    node.turn_until(lambda: len(requests.select(RequestState.LANDING)) == 2)
    request, other = requests.select(RequestState.LANDING)
    node.engine.prefill_events.handle(PeerReady(request.peer, request.instance_id), time.monotonic())

    def bootstraps() -> list[Bootstrap]:
        """Those of other rooms may be repeated meanwhile."""
        return [each for each in node.double.bootstraps if each.room in (request.room, other.room)]

    node.leave(given_up)
    node.turn_until(lambda: other.state is RequestState.ENDED)
    node.turn_until(lambda: not len(requests.quarantine))
    assert bootstraps() == []
    assert request.state is RequestState.LANDING
    copies.finish()
    assert node.tokens_of(answer) == cold_node.ask(longer, 4, HisparseFlag.TRUE).token_ids
    bootstrap = bootstraps()[0]
    assert bootstrap.num_held_tokens == 80
    assert bootstrap.held is not None


@pytest.mark.I1
def test_a_bootstrap_that_has_not_been_sent_is_not_repeated(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush waits for the keys, and their Bootstrap follows in the same turn. If that cannot be sent, the
    slots are free at once, so the prefill node must not have got it before."""
    prompt = random_prompt(12, 85)
    node.ask(prompt, 2, HisparseFlag.TRUE)
    requests = node.engine.requests
    node.turn_until(lambda: requests.held_tier.num_copies == 0)
    requests.held.make_room(requests.pools.totals - SlotCounts(host=96))
    copies = slow_copies_up(monkeypatch)
    answer = node.generate((*prompt, *random_prompt(13, 40)), 2, HisparseFlag.TRUE)
    node.turn_until(lambda: len(requests.select(RequestState.LANDING)) == 1)
    (request,) = requests.select(RequestState.LANDING)
    copies.finish()
    requests.settle_copies()
    node.engine.prefill_events.handle(PeerReady(request.peer, request.instance_id), time.monotonic())
    node.tokens_of(answer)
    node.ask(random_prompt(14, 40), 2, HisparseFlag.TRUE)  # messages come in order
    assert [each.room for each in node.double.bootstraps].count(request.room) == 1


def test_a_flush_gives_up_what_is_being_copied(node: EngineHarness) -> None:
    node.ask(random_prompt(7, 85), 2, HisparseFlag.TRUE)
    node.flush()
    assert node.engine.requests.pools.free == node.engine.requests.pools.totals
