"""Pages of dense requests that move to the host pool and back: books, bytes, an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind, SlotCounts
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PromptKeys
from hisparse_pd.decode_node import dense_tier, held_matches
from hisparse_pd.decode_node.held_matches import HeldMatches, num_shareable_pages
from hisparse_pd.decode_node.key_pages import KeyPages
from hisparse_pd.decode_node.memory import DecodeMemory, slots_tensor
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import Admission, StepPlan
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import Extent, Room
from tests.books import carry_out, end, enqueue, fail_to_land, make_request
from tests.slow_copies import SlowCopies
from tests.unit.decode_node.plan_node import LIMITS, Node
from tests.unit.decode_node.support import Answer, Checkpoint, EngineHarness, Prompt, random_prompt
from tests.unit.decode_node.tier_books import DENSE, FIRST, SECOND, THIRD, Books, keys_of

CHECKPOINT = "tied"
PAGE = 16
NODE = {
    "disable_prefix_cache": False,
    "page_size": PAGE,
    "host_pool_tokens": 2048,
    "index_pool_tokens": 384,
    "device_pool_tokens": 256,
    "device_buffer_size": 48,
}
NUM_NEW = 8


# --- the books ------------------------------------------------------------------------------------------


@pytest.mark.I2
def test_what_a_dense_request_leaves_is_copied_down_and_takes_host_slots_alone() -> None:
    books = Books()
    books.leave(FIRST)
    assert books.num_found(FIRST) == (4, 4)
    below = books.run_of(FIRST)
    assert below.is_down
    assert below.is_stored
    assert books.rooms.pools.free == books.rooms.pools.totals - SlotCounts(host=16, device=16, index=16)
    assert books.rooms.available == books.rooms.pools.totals
    slots = extents_to_slots(below.holding[PoolKind.HOST]).tolist()
    for table in (books.copies.host, books.copies.places):
        assert [table[slot] for slot in slots] == [FIRST[: position + 1] for position in range(16)]
    assert books.rooms.dense_tier.num_stored_tokens == 16


@pytest.mark.I2
@pytest.mark.parametrize("mode", Mode)
def test_requests_of_both_modes_find_what_the_device_has_given_up(mode: Mode) -> None:
    books = Books()
    books.leave(FIRST)
    books.empty_device()
    assert books.num_found(FIRST) == (0, 4)
    request = books.land((*FIRST, 8, 9), mode)
    assert request.held_prefix_tokens == 16
    assert books.rooms.await_fetch(request, 9.0)
    assert request.state is RequestState.FETCHING
    assert books.rooms.fetched() == []
    assert books.copied() == [request]
    books.run(request, (*FIRST, 8, 9))
    assert books.rooms.dense_tier.num_fetched_tokens == (16 if mode is Mode.DENSE else 0)


@pytest.mark.I2
def test_a_dense_request_finds_what_a_hisparse_one_has_left() -> None:
    """Its keys leave the index pool for that: the copy reads those in main memory."""
    books = Books()
    books.leave(FIRST, Mode.HISPARSE)
    assert books.num_found(FIRST) == (0, 4)
    assert not books.run_of(FIRST).is_down
    request = books.land(FIRST)
    assert books.run_of(FIRST).is_down
    assert books.rooms.await_fetch(request, 9.0)
    assert books.copied() == [request]
    books.run(request, FIRST)
    end(books.rooms, request, is_sound=True)
    books.copied()
    assert books.num_found(FIRST) == (4, 4)
    assert books.rooms.dense_tier.num_stored_tokens == 0, "main memory has it"


@pytest.mark.I1
@pytest.mark.I2
def test_only_what_the_device_lacks_is_brought_up_and_only_what_main_memory_lacks_goes_down() -> None:
    books = Books()
    longer = (*FIRST[:16], *SECOND)
    books.leave(FIRST)
    books.leave(longer)
    assert books.rooms.dense_tier.num_stored_tokens == 32
    books.rooms.held.make_room(SlotCounts(device=24))
    assert books.num_found(longer) == (4, 8)
    request = books.land(longer)
    books.copied()
    books.run(request, longer)
    end(books.rooms, request, is_sound=True)
    books.copied()
    assert books.rooms.dense_tier.num_fetched_tokens == 16
    assert books.rooms.dense_tier.num_stored_tokens == 32
    assert books.num_found(longer) == (8, 8)


@pytest.mark.I2
def test_two_requests_share_one_copy_up() -> None:
    books = Books()
    books.leave(FIRST)
    books.empty_device()
    first = books.land(FIRST)
    second = books.land((*FIRST[:16], 5, 6))
    assert len(books.copies.under_way) == 1
    assert books.rooms.await_fetch(first, 9.0)
    assert books.rooms.await_fetch(second, 9.0)
    assert books.copied() == [first, second]
    books.run(first, FIRST)
    books.run(second, (*FIRST[:16], 5, 6))
    assert first.extents(PoolKind.DEVICE)[0].start == second.extents(PoolKind.DEVICE)[0].start


@pytest.mark.I2
def test_admissions_of_one_plan_share_a_copy_up() -> None:
    books = Books()
    books.leave(FIRST)
    books.empty_device()
    matches, planned = HeldMatches(books.rooms.held, (), 4), books.rooms.available
    admissions = []
    for room, tail in ((11, (5,)), (12, (6,)), (13, (7,))):
        prompt = (*FIRST[:16], *tail)
        keys = PromptKeys.of(NO_ISOLATION, pack_token_ids(prompt), 4)
        request = enqueue(books.rooms, make_request(room, len(prompt), prompt_keys=keys))
        match = matches.find(request, Mode.DENSE)
        matches.take(match)
        need = SlotCounts(device=4, index=4, aux=1, req_row=1)
        planned -= need + match.taken
        admissions.append(Admission(request, Mode.DENSE, need, 0, match.num_pages))
    carry_out(books.rooms, StepPlan(admissions=tuple(admissions)))
    books.rooms.check_integrity()
    assert len(books.copies.under_way) == 1
    assert books.rooms.pools.free.device == 40 - 16 - 12
    assert books.rooms.available == planned, "the plan counts what comes up once"
    requests = [admission.request for admission in admissions]
    assert all(books.rooms.await_fetch(request, 9.0) for request in requests)
    assert books.copied() == requests


@pytest.mark.I2
def test_a_hisparse_request_behind_a_dense_one_of_the_same_plan_pays_for_thekeys_of() -> None:
    """These leave the index pool for the copy to the device, though they were in it when it was planned."""
    books = Books()
    books.leave(FIRST, Mode.HISPARSE)
    keys = PromptKeys.of(NO_ISOLATION, pack_token_ids(FIRST), 4)
    request = make_request(9, 17, prompt_keys=keys)
    matches = HeldMatches(books.rooms.held, (), 4)
    assert matches.find(request, Mode.HISPARSE).taken == SlotCounts(host=16, index=16)
    dense = matches.find(request, Mode.DENSE)
    assert dense.taken == SlotCounts(host=16, device=16, index=16)
    assert dense.num_copied == 4
    matches.take(dense)
    hisparse = matches.find(request, Mode.HISPARSE)
    assert hisparse.taken == SlotCounts(index=16)
    matches.take(hisparse)
    assert matches.find(request, Mode.HISPARSE).taken == SlotCounts()


@pytest.mark.I2
def test_keys_that_leave_for_a_copy_of_some_pages_are_those_of_these_pages() -> None:
    """The dense request of the plan has 2 of the 4 pages, and the hisparse one behind it has all."""
    books = Books()
    books.leave(FIRST, Mode.HISPARSE)
    matches, available = HeldMatches(books.rooms.held, (), 4), books.rooms.available
    admissions = []
    for room, prompt, mode in ((8, (*FIRST[:8], 5), Mode.DENSE), (9, FIRST, Mode.HISPARSE)):
        keys = PromptKeys.of(NO_ISOLATION, pack_token_ids(prompt), 4)
        request = enqueue(books.rooms, make_request(room, len(prompt), prompt_keys=keys))
        match = matches.find(request, mode)
        matches.take(match)
        available -= match.taken
        admissions.append(Admission(request, mode, SlotCounts(aux=1, req_row=1), 0, match.num_pages))
    assert match.taken == SlotCounts(host=8, index=8) + SlotCounts(index=8)
    carry_out(books.rooms, StepPlan(admissions=tuple(admissions)))
    assert books.rooms.available == available - SlotCounts(aux=2, req_row=2)


@pytest.mark.I1
@pytest.mark.I2
def test_a_request_that_ends_while_its_pages_come_up_leaves_them_whole() -> None:
    books = Books()
    books.leave(FIRST)
    books.empty_device()
    request = books.land(FIRST)
    assert books.rooms.await_fetch(request, 9.0)
    end(books.rooms, request)
    books.rooms.check_integrity()
    assert books.run_of(FIRST, DENSE).is_arriving
    books.rooms.held.flush()
    assert books.num_found(FIRST) == (4, 4), "the copy uses both"
    books.copied()
    books.leave(FIRST)
    assert books.rooms.dense_tier.num_fetched_tokens == 16


@pytest.mark.I1
@pytest.mark.I2
def test_pages_that_are_copied_down_are_not_given_up_before() -> None:
    books = Books()
    request = books.land(FIRST)
    books.run(request, FIRST)
    end(books.rooms, request, is_sound=True)
    books.rooms.fetched()  # begins the copy
    books.rooms.check_integrity()
    books.rooms.held.flush()
    assert books.num_found(FIRST) == (4, 0)
    assert books.rooms.available == books.rooms.pools.totals - SlotCounts(host=16, device=16, index=16)
    books.copied()
    assert books.num_found(FIRST) == (4, 4)


def test_a_longer_turn_that_ends_beside_the_copy_of_the_one_before_is_copied_behind_it() -> None:
    books = Books()
    for prompt in (FIRST, (*FIRST[:16], *SECOND)):
        request = books.land(prompt)
        books.run(request, prompt)
        end(books.rooms, request, is_sound=True)
        books.rooms.fetched()
    assert len(books.copies.under_way) == 1
    books.copied()
    assert books.num_found((*FIRST[:16], *SECOND)) == (8, 4)
    books.copied()
    assert books.num_found((*FIRST[:16], *SECOND)) == (8, 8)


@pytest.mark.I8
def test_a_turn_begins_few_copies_and_the_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_tier, "MOST_BEGUN", 2)
    books, prompts = Books(), [(number,) * 5 for number in range(1, 6)]
    for prompt in prompts:
        request = books.land(prompt)
        books.run(request, prompt)
        end(books.rooms, request, is_sound=True)
    num_begun = []
    for _ in range(3):
        books.rooms.fetched()
        num_begun.append(len(books.copies.under_way))
        books.copies.finish()
    books.copied()
    assert num_begun == [2, 2, 1]
    assert [books.num_found(prompt) for prompt in prompts] == [(1, 1)] * 5


@pytest.mark.I2
def test_a_copy_down_takes_half_of_the_host_slots_that_others_can_get() -> None:
    """What was used longest ago makes room. A host pool in use gets nothing."""
    books = Books(num_host_slots=24)
    books.leave(FIRST)
    assert books.num_found(FIRST) == (4, 3)
    books.leave(SECOND)
    assert (books.num_found(FIRST), books.num_found(SECOND)) == ((4, 3), (4, 3))
    books.leave(THIRD)
    assert (books.num_found(FIRST)[1], books.num_found(SECOND)[1], books.num_found(THIRD)[1]) == (0, 3, 3)
    user = books.land((9,) * 21, Mode.HISPARSE)
    assert books.rooms.available.host == 0
    books.rooms.held.flush()
    books.leave(FIRST)
    assert books.num_found(FIRST) == (4, 0)
    end(books.rooms, user)


@pytest.mark.I2
@pytest.mark.parametrize("while_copied", [False, True])
def test_a_wrong_row_drops_the_copies_of_its_page(while_copied: bool) -> None:
    books = Books()
    books.leave(FIRST)
    books.empty_device()
    request = books.land((*FIRST[:16], *SECOND))
    if not while_copied:
        assert books.rooms.await_fetch(request, 9.0)
        books.copied()
    books.rooms.held.drop_copies(keys_of(FIRST)[1])
    books.rooms.check_integrity()
    assert books.num_found(FIRST) == (0, 0)
    books.copied()
    end(books.rooms, request)
    books.rooms.quarantine.quiet(request.room, batch_failed=False, now=0.0)
    books.rooms.check_integrity()
    assert len(books.rooms.held) == 0


@pytest.mark.I2
def test_what_is_found_wrong_while_it_goes_down_is_not_kept() -> None:
    books = Books()
    request = books.land(FIRST)
    books.run(request, FIRST)
    end(books.rooms, request, is_sound=True)
    books.rooms.fetched()
    slot = int(extents_to_slots(books.run_of(FIRST, DENSE).holding[PoolKind.DEVICE])[5])
    books.rooms.held.drop(PoolKind.DEVICE, slot)
    books.copied()
    assert len(books.rooms.held) == 0
    assert books.rooms.pools.free == books.rooms.pools.totals


@pytest.mark.I2
def test_what_goes_down_behind_pages_that_are_found_wrong_is_not_kept() -> None:
    books = Books()
    books.leave(FIRST)
    longer = (*FIRST[:16], *[9] * 9)
    request = books.land(longer)
    books.run(request, longer)
    end(books.rooms, request, is_sound=True)
    books.rooms.fetched()
    assert len(books.rooms.dense_tier.landing) == 1
    books.rooms.held.drop(PoolKind.HOST, books.run_of(FIRST).holding[PoolKind.HOST][0].start)
    books.copied()
    assert books.num_found(longer) == (6, 0)


@pytest.mark.I9
def test_what_is_coming_up_does_not_go_down() -> None:
    """The page in main memory that it comes from was found wrong, so that main memory lacks it now."""
    books = Books()
    books.leave(FIRST)
    books.empty_device()
    request = books.land(FIRST)
    books.rooms.held.drop(PoolKind.HOST, books.run_of(FIRST).holding[PoolKind.HOST][0].start)
    books.rooms.dense_tier.store(Room(9), keys_of(FIRST), None)
    books.rooms.dense_tier.poll()
    assert books.rooms.dense_tier.landing == []
    books.copied()
    end(books.rooms, request)
    books.rooms.quarantine.quiet(request.room, batch_failed=False, now=0.0)
    books.rooms.check_integrity()


@pytest.mark.I2
@pytest.mark.I9
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("is_running", [False, True])
def test_nothing_is_held_behind_a_page_that_was_found_wrong(mode: Mode, is_running: bool) -> None:
    """A request that shares it goes on with it, and what it leaves is free."""
    books = Books()
    books.leave(FIRST, mode)
    longer = (*FIRST[:16], *[9] * 9)
    request = books.land(longer, mode)
    assert request.num_shared_pages == 4
    if is_running:
        books.run(request, longer)
    books.rooms.held.drop_copies(keys_of(FIRST)[1])
    if not is_running:
        books.run(request, longer)
    end(books.rooms, request, is_sound=True)
    books.copied()
    assert books.num_found(longer) == (0, 0)
    assert books.rooms.pools.free == books.rooms.pools.totals


@pytest.mark.I3
def test_a_request_starts_with_its_own_pages_where_equal_ones_have_moved_down() -> None:
    """They are found, but have no indexer keys on the device."""
    books = Books()
    request, other = (books.land(FIRST, Mode.HISPARSE) for _ in range(2))
    books.run(other, FIRST)
    end(books.rooms, other, is_sound=True)
    books.copied()
    books.rooms.held.make_room(SlotCounts(index=64))
    assert books.run_of(FIRST).is_down
    books.run(request, FIRST)
    assert request.prefix is None
    end(books.rooms, request, is_sound=True)
    books.copied()


def test_what_main_memory_has_not_whole_is_not_brought_up() -> None:
    books = Books()
    request = books.land(FIRST, Mode.HISPARSE)
    books.run(request, FIRST)
    end(books.rooms, request, is_sound=True)
    assert num_shareable_pages(books.rooms.held, keys_of(FIRST), Mode.DENSE) == 0, "the keys are being copied"
    books.copied()
    assert num_shareable_pages(books.rooms.held, keys_of(FIRST), Mode.DENSE) == 4


@pytest.mark.I2
def test_pages_that_cannot_be_copied_down_are_the_devices_alone() -> None:
    books = Books()
    books.copies.can_begin = False
    books.leave(FIRST)
    assert books.num_found(FIRST) == (4, 0)
    assert books.rooms.pools.free.host == books.rooms.pools.totals.host
    books.copies.can_begin = True
    books.leave(FIRST)
    assert books.num_found(FIRST) == (4, 4)


@pytest.mark.I2
def test_pages_that_cannot_be_brought_up_leave_everything_as_it_was() -> None:
    books = Books()
    books.leave(FIRST)
    books.rooms.held.make_room(SlotCounts(device=32))
    assert books.num_found(FIRST) == (2, 4)
    available = books.rooms.available
    books.copies.can_begin = False
    fail_to_land(books.rooms, lambda: books.land(FIRST))
    assert books.num_found(FIRST) == (2, 4)
    assert books.rooms.available == available
    books.copies.can_begin = True
    again = books.land(FIRST)
    assert books.copied() == []
    books.run(again, FIRST)


@pytest.mark.I2
def test_what_is_behind_a_run_that_cannot_move_down_is_given_up_with_it() -> None:
    """Pages of a dense request are below those of a hisparse one whose keys could not be copied."""
    books = Books()
    books.copies.can_begin = False
    books.leave(FIRST, Mode.HISPARSE)
    books.copies.can_begin = True
    longer = (*FIRST[:16], *SECOND[:9])
    books.leave(longer)
    assert (books.run_of(FIRST).is_stored, books.run_of(longer).is_down) == (False, True)
    assert books.rooms.available == books.rooms.pools.totals
    books.rooms.held.make_room(SlotCounts(index=64))
    books.rooms.check_integrity()
    assert books.rooms.pools.free.index == 64


def test_nothing_is_brought_up_behind_many_runs_and_nobody_counts_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    books = Books()
    books.leave(FIRST)
    books.leave((*FIRST[:8], *SECOND[:9]))
    books.rooms.held.make_room(SlotCounts(device=20))
    assert books.num_found(FIRST) == (3, 4)
    assert num_shareable_pages(books.rooms.held, keys_of(FIRST), Mode.DENSE) == 4
    monkeypatch.setattr(held_matches, "MAX_RUNS_BEFORE", 1)
    request = make_request(9, 17, prompt_keys=PromptKeys.of(NO_ISOLATION, pack_token_ids(FIRST), 4))
    assert HeldMatches(books.rooms.held, (), 4).find(request, Mode.DENSE).num_pages == 3
    assert num_shareable_pages(books.rooms.held, keys_of(FIRST), Mode.DENSE) == 3


def test_a_flush_begins_no_copy() -> None:
    books = Books()
    request = books.land(FIRST)
    books.run(request, FIRST)
    end(books.rooms, request, is_sound=True)
    books.rooms.dense_tier.settle()
    books.rooms.held.flush()
    assert not books.copies.under_way
    assert books.rooms.pools.free == books.rooms.pools.totals


@pytest.mark.parametrize(
    ("flag", "num_prompt_tokens", "keeps_residents", "mode"),
    [
        (HisparseFlag.AUTO, 60, True, Mode.HISPARSE),  # it begins at once, and gets pages beside its steps
        (HisparseFlag.AUTO, 60, False, Mode.DENSE),
        (HisparseFlag.AUTO, 95, True, Mode.HISPARSE),
        (HisparseFlag.AUTO, 96, True, Mode.DENSE),  # more than half is not held
        (HisparseFlag.FALSE, 60, True, Mode.DENSE),
        (HisparseFlag.TRUE, 96, True, Mode.HISPARSE),
    ],
)
def test_auto_is_hisparse_behind_what_is_mostly_in_the_host_pool(
    flag: HisparseFlag, num_prompt_tokens: int, keeps_residents: bool, mode: Mode
) -> None:
    copies = SlowCopies()
    node = Node(replace(LIMITS, keeps_residents=keeps_residents), copies)
    first = node.arrive(HisparseFlag.FALSE, 60, family=1)
    node.step()
    end(node.rooms, first, is_sound=True)
    node.rooms.fetched()
    copies.finish()
    node.rooms.fetched()
    node.rooms.held.make_room(SlotCounts(device=node.rooms.pools.totals.device))
    node.arrive(flag, num_prompt_tokens, family=1)
    (admission,) = node.plan().admissions
    assert (admission.mode, admission.num_shared_pages) == (mode, 3)


# --- the bytes ------------------------------------------------------------------------------------------


def test_kv_goes_down_and_up_with_itskeys_of(checkpoint: Checkpoint) -> None:
    """To other slots, and from pages that are not adjacent; nothing else changes."""
    totals = SlotCounts(host=40 * PAGE, device=24 * PAGE, index=24 * PAGE, aux=1)
    memory = DecodeMemory(checkpoint.spec, totals, PAGE, torch.device("cpu"))
    assert memory.row_checks is not None
    on_device = (memory.k_dev, memory.index, memory.row_checks)
    for pool in on_device:
        pool.random_()
    before = [pool.clone() for pool in on_device]
    index, device, host, up, up_device = (
        tuple(Extent(first * PAGE, num * PAGE) for first, num in runs)
        for runs in (
            ((5, 3), (0, 2), (11, 1)),
            ((7, 1), (1, 4), (20, 1)),
            ((38, 1), (2, 4), (0, 1)),
            ((14, 6),),
            ((2, 2), (9, 4)),
        )
    )
    with closing(KeyPages(memory)) as pages:
        pages.copy_down(index, host, device)
        kv = torch.zeros_like(memory.k_host)
        kv[:, slots_tensor(host)] = before[0][:, slots_tensor(device)]
        assert memory.k_host.equal(kv)
        for pool in on_device:
            pool.zero_()
        pages.copy_up(host, up, up_device)
    wanted = ((up_device, device), (up, index), (up, index))
    for pool, was, (to, origin) in zip(on_device, before, wanted, strict=True):
        expected = torch.zeros_like(was)
        expected[:, slots_tensor(to)] = was[:, slots_tensor(origin)]
        assert pool.equal(expected)


# --- the engine -----------------------------------------------------------------------------------------


@pytest.fixture
def node(shared_node: EngineHarness) -> Iterator[EngineHarness]:
    shared_node.flush()
    yield shared_node
    shared_node.come_to_rest()


@pytest.fixture(scope="module")
def cold_node(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHarness]:
    """A node that holds nothing."""
    with closing(EngineHarness(checkpoint, tmp_path_factory.mktemp("cold"), page_size=PAGE)) as node:
        yield node


def at_rest(node: EngineHarness) -> None:
    node.turn_until(lambda: node.engine.requests.num_copies == 0)


def ask(node: EngineHarness, prompt: Prompt, flag: HisparseFlag) -> Answer:
    answer = node.ask(prompt, NUM_NEW, flag)
    at_rest(node)
    return answer


@pytest.mark.I5
def test_turns_in_any_mode_are_computed_once_and_have_the_tokens_of_a_cold_node(
    node: EngineHarness, cold_node: EngineHarness
) -> None:
    """Four conversations of up to 100 tokens, of which the device pool holds two."""
    conversations = [random_prompt(seed, 60 + seed) for seed in range(4)]
    flags = [HisparseFlag.FALSE, HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.FALSE]
    num_held = [0] * len(conversations)
    requests = node.engine.requests
    for turn in range(2):
        of_cold = [
            cold_node.generate(prompt, NUM_NEW, flags[(number + turn) % len(flags)])
            for number, prompt in enumerate(conversations)
        ]
        for number, prompt in enumerate(conversations):
            answer = ask(node, prompt, flags[(number + turn) % len(flags)])
            assert answer.stats.num_held_tokens == num_held[number], (turn, number)
            assert answer.token_ids == cold_node.tokens_of(of_cold[number])
            num_held[number] = (len(prompt) + NUM_NEW - 1) // PAGE * PAGE
            conversations[number] += (*node.tokens_of(answer), *random_prompt(number, 5))
    assert sum(num_held) > requests.pools.totals.device
    assert requests.dense_tier.num_fetched_tokens > 0
    node.turn_until(lambda: node.stats is not None and node.stats.counters["held_stored_dense_tokens_total"])


def test_turns_do_not_wait_while_pages_are_copied(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop asks whether the copy is over as often as it can."""
    copies = SlowCopies()
    monkeypatch.setattr(KeyPages, "copy_down", lambda _, *extents: copies.copy_down(*extents))
    node.ask(random_prompt(3, 40), 2, HisparseFlag.FALSE)
    node.turn_until(lambda: len(copies.under_way) > 0)
    waits: list[float] = []
    wait = node.engine.poller.wait

    def noted(secs: float) -> object:
        waits.append(secs)
        return wait(secs)

    monkeypatch.setattr(node.engine.poller, "wait", noted)
    for _ in range(3):
        node.turn()
    assert waits == [0.0] * 3
    copies.finish()
    at_rest(node)


@pytest.mark.I7
def test_a_wrong_row_in_main_memory_ends_one_dense_request_and_is_then_computed(
    node: EngineHarness, cold_node: EngineHarness
) -> None:
    prompt = random_prompt(5, 85)
    ask(node, prompt, HisparseFlag.FALSE)
    requests, memory = node.engine.requests, node.engine.tables.memory
    requests.held.make_room(SlotCounts(device=requests.pools.totals.device))
    (run,) = requests.held
    slot = int(extents_to_slots(run.holding[PoolKind.HOST])[40])
    memory.k_host[0, slot, 3] ^= 1
    wrong = node.generate(prompt, NUM_NEW, HisparseFlag.FALSE)
    node.failure_of(wrong, status=500, error="is not what was written (landing)")
    assert node.ask(prompt, NUM_NEW, HisparseFlag.FALSE).token_ids == (
        cold_node.ask(prompt, NUM_NEW, HisparseFlag.FALSE).token_ids
    )
    for page in requests.set_aside.shown():
        requests.set_aside.give_back(PoolKind(page.pool), page.start)
