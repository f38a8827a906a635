"""Dense requests that leave their pages for what the host pool has of them: books, bytes, an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.core.paging.extents import extents_to_slots, total_length
from hisparse_pd.core.paging.pools import PoolKind, SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.decode_node import step_line
from hisparse_pd.decode_node.growth import exchanges_of_pages
from hisparse_pd.decode_node.held_matches import HeldMatches
from hisparse_pd.decode_node.key_pages import KeyPages
from hisparse_pd.decode_node.memory import DecodeMemory, slots_tensor
from hisparse_pd.decode_node.miss_cost import CHEAP
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import Exchange, StepPlan
from hisparse_pd.engine import host_copies
from hisparse_pd.engine.host_copies import SlotCopy
from hisparse_pd.protocol.messages import Extent
from tests.books import carry_out, end
from tests.unit.decode_node.plan_node import LIMITS
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    Prompt,
    raising,
    random_prompt,
)
from tests.unit.decode_node.tier_books import FIRST, HISPARSE, Books, keys_of

CHECKPOINT = "tied"
PAGE = 16
NODE = {
    "disable_prefix_cache": False,
    "page_size": PAGE,
    "host_pool_tokens": 2048,
    "index_pool_tokens": 640,
    "device_pool_tokens": 288,
    "device_buffer_size": 48,
}
NUM_NEW = 12
SMALL = replace(LIMITS, page_size=4, growth_tokens=1)
TURN = (*FIRST[:16], 8, 9)
"""A prompt that begins with the pages of FIRST."""


# --- the books ------------------------------------------------------------------------------------------


def _shares(books: Books, prompt: Prompt) -> Request:
    """Let a dense request of a prompt run that shares the pages of FIRST, which main memory has, too."""
    books.leave(FIRST)
    request = books.land(prompt)
    books.run(request, prompt)
    return request


def _leave_pages(books: Books, request: Request, prompt: Prompt) -> None:
    """Let a dense request leave its pages for a hot buffer of 8 entries, as a plan does."""
    num_kv = request.num_kv_tokens
    exchange, given = next(exchanges_of_pages(SMALL, request, 8))
    available = books.rooms.available
    freed = HeldMatches(books.rooms.held, (), 4).freed_without(request)
    plan = StepPlan(exchanges=(exchange,))
    carry_out(books.rooms, plan, limits=SMALL, retract=books.copies.retract)
    books.rooms.check_integrity()
    assert (available + freed - given).fits_in(books.rooms.available), "it takes no more than is planned"
    assert request.mode is Mode.HISPARSE
    for kind in request.kv_pools:
        slots = extents_to_slots(request.extents(kind)).tolist()
        names = [books.copies.of(kind)[slot] for slot in slots[:num_kv]]
        assert names == [prompt[: position + 1] for position in range(num_kv)], kind


@pytest.mark.I2
@pytest.mark.I5
@pytest.mark.parametrize("while_used", [False, True])
def test_a_dense_request_that_leaves_its_pages_uses_the_copy_in_the_host_pool(while_used: bool) -> None:
    """It gets host slots for the tokens behind. If nobody uses the copy, its keys come from the device."""
    books = Books()
    request = _shares(books, TURN)
    other = books.land(FIRST, Mode.HISPARSE) if while_used else None
    books.copied()
    below = books.run_of(FIRST)
    assert below.is_down != while_used
    free = books.rooms.pools.free
    _leave_pages(books, request, TURN)
    assert request.prefix is books.run_of(FIRST)
    assert (request.num_shared_pages, request.prefix.num_users) == (4, 1 + while_used)
    assert request.owned_slots == SlotCounts(host=4, device=8, index=8, lookup=20)
    taken = free - books.rooms.pools.free
    assert (taken.host, taken.index) == (4, 0 if while_used else 16)
    end(books.rooms, request, is_sound=True)
    if other is not None:
        end(books.rooms, other)
        books.rooms.quarantine.quiet(other.room, batch_failed=False, now=0.0)
    books.copied()
    assert books.num_found(TURN) == (4, 4)
    assert books.rooms.available == books.rooms.pools.totals


@pytest.mark.I2
@pytest.mark.I5
@pytest.mark.parametrize("num_same", [0, 5, 8, 16])
def test_a_copy_with_other_bits_serves_up_to_its_first_page_with_another_row(num_same: int) -> None:
    books = Books()
    request = _shares(books, TURN)
    for slot in extents_to_slots(books.run_of(FIRST).holding[PoolKind.HOST]).tolist()[num_same:]:
        books.copies.places[slot] = books.copies.host[slot] = "rounded otherwise"
    _leave_pages(books, request, TURN)
    assert request.num_shared_pages == num_same // 4
    assert request.owned_slots.host == 20 - num_same // 4 * 4


@pytest.mark.I1
@pytest.mark.I2
@pytest.mark.parametrize(
    "case", ["evicted", "its device pages are wrong", "its copy is wrong", "arriving", "not compared"]
)
def test_what_cannot_serve_is_copied_as_if_it_was_not_there(case: str) -> None:
    books = Books()
    request = _shares(books, TURN)
    below, held = books.run_of(FIRST), books.rooms.held
    if case == "evicted":
        held.make_room(SlotCounts(host=96))
    elif case == "its copy is wrong":
        held.drop(PoolKind.HOST, below.holding[PoolKind.HOST][0].start)
    elif case == "its device pages are wrong":
        assert request.prefix is not None
        held.drop(PoolKind.DEVICE, request.prefix.extents(PoolKind.DEVICE)[0].start)
    elif case == "not compared":
        books.copies.can_begin = False
    else:
        books.land((*FIRST[:16], 3), Mode.HISPARSE)
        assert below.is_arriving
    _leave_pages(books, request, TURN)
    assert (request.prefix, request.owned_slots.host) == (None, 20)
    assert (request.prompt_keys is None) == (case == "its device pages are wrong")


@pytest.mark.I2
def test_two_that_leave_share_the_copy_and_its_end_is_that_of_the_last() -> None:
    books = Books()
    prompts = (TURN, (*FIRST[:16], 5, 6))
    requests = [_shares(books, prompts[0])]
    requests.append(books.land(prompts[1]))
    books.run(requests[1], prompts[1])
    for request, prompt in zip(requests, prompts, strict=True):
        _leave_pages(books, request, prompt)
    below = books.run_of(FIRST)
    assert below.num_users == 2
    assert books.rooms.pools.free.host == 96 - 16 - 2 * 4
    end(books.rooms, requests[0])
    books.rooms.held.flush()
    assert books.num_found(FIRST) == (0, 4)
    end(books.rooms, requests[1])
    books.rooms.held.flush()
    assert books.rooms.pools.free == books.rooms.pools.totals


@pytest.mark.I1
@pytest.mark.I2
def test_a_copy_that_is_found_wrong_later_is_held_no_more_and_nothing_behind_it() -> None:
    books = Books()
    request = _shares(books, TURN)
    _leave_pages(books, request, TURN)
    books.rooms.held.drop_copies(keys_of(FIRST)[2])
    books.rooms.check_integrity()
    end(books.rooms, request, is_sound=True)
    books.copied()
    assert len(books.rooms.held) == 0
    assert books.rooms.pools.free == books.rooms.pools.totals


@pytest.mark.I2
@pytest.mark.I7
def test_who_fails_to_leave_gives_the_copy_back_without_keys() -> None:
    books = Books()
    request = _shares(books, TURN)
    exchange, _ = next(exchanges_of_pages(SMALL, request, 8))
    books.rooms.grow_for_exchange(exchange)
    books.rooms.check_integrity()
    below = books.run_of(FIRST)
    assert (below.is_arriving, below.num_users) == (True, 1)
    end(books.rooms, request)
    books.rooms.check_integrity()
    assert (below.is_arriving, below.is_down, below.num_users) == (False, True, 0)
    assert books.rooms.available == books.rooms.pools.totals
    again = books.land(TURN, Mode.HISPARSE)
    books.copied()
    books.run(again, TURN)


# --- the bytes ------------------------------------------------------------------------------------------


@pytest.mark.I8
@pytest.mark.parametrize("num_at_once", [7, 3 * PAGE])
def test_rows_are_the_same_up_to_the_first_with_another_check_in_any_layer(
    checkpoint: Checkpoint, num_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compared piece by piece, and no piece takes more device memory than is reserved."""
    row_bytes = 4 * checkpoint.spec.num_kv_layers
    monkeypatch.setattr(host_copies, "COMPARED_BYTES", num_at_once * (3 * row_bytes + 32))
    num_staged, real_copy = list[int](), host_copies.copy_slots

    def copy_slots(copies: Sequence[SlotCopy], device: torch.device) -> None:
        num_staged.extend(total_length(copy.dst_slots) for copy in copies)
        real_copy(copies, device)

    totals = SlotCounts(host=8 * PAGE, device=PAGE, index=8 * PAGE, aux=1)
    memory = DecodeMemory(checkpoint.spec, totals, PAGE, torch.device("cpu"))
    assert memory.row_checks is not None
    memory.row_checks.random_()
    index, host = (
        (Extent(PAGE, 2 * PAGE), Extent(6 * PAGE, PAGE)),
        (Extent(0, PAGE), Extent(5 * PAGE, 2 * PAGE)),
    )
    with closing(KeyPages(memory)) as pages:
        pages.copy_down(index, host)
        monkeypatch.setattr(host_copies, "copy_slots", copy_slots)
        assert pages.num_same(index, host) == 3 * PAGE
        assert sum(num_staged) == 3 * PAGE
        assert max(num_staged) == num_at_once
        for layer, position in ((0, 40), (checkpoint.spec.num_kv_layers - 1, 20)):
            memory.row_checks[layer, slots_tensor(index)[position]] ^= 1
            assert pages.num_same(index, host) == position
        assert pages.num_same(index, host[::-1]) == 0


def test_rows_are_compared_without_a_wait_for_the_step_in_flight(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense request leaves its pages beside a step of others, which may take long."""
    totals = SlotCounts(host=PAGE, device=PAGE, index=PAGE, aux=1)
    with closing(KeyPages(DecodeMemory(checkpoint.spec, totals, PAGE, torch.device("cpu")))) as pages:
        monkeypatch.setattr(SideStream, "behind_current", raising(AssertionError("behind a step")))
        assert pages.num_same((Extent(0, PAGE),), (Extent(0, PAGE),)) == PAGE


def test_rows_without_checks_are_not_known_to_be_the_same(checkpoint: Checkpoint) -> None:
    spec = replace(checkpoint.spec, has_row_checks=False)
    totals = SlotCounts(host=PAGE, device=PAGE, index=PAGE, aux=1)
    with closing(KeyPages(DecodeMemory(spec, totals, PAGE, torch.device("cpu")))) as pages:
        assert pages.num_same((Extent(0, PAGE),), (Extent(0, PAGE),)) == 0


# --- the engine -----------------------------------------------------------------------------------------


@pytest.fixture
def node(shared_node: EngineHarness) -> Iterator[EngineHarness]:
    shared_node.flush()
    yield shared_node
    shared_node.come_to_rest()


def _turn_begins(node: EngineHarness, prompt: Prompt) -> tuple[Answer, Answer, Request, Prefix]:
    """Have a prompt answered whose pages the host pool has then, too, and let it run again, in pages, up to
    its fourth token. Returns both answers, the second request and the copy."""
    first = node.ask(prompt, NUM_NEW, HisparseFlag.FALSE)
    requests = node.engine.requests
    node.turn_until(lambda: requests.num_copies == 0)
    again = node.generate(prompt, NUM_NEW, HisparseFlag.FALSE)
    node.turn_until(lambda: len(again.token_ids) > 3)
    node.engine.steps.settle()
    (request,) = (r for r in requests.select(RequestState.RUNNING) if r.mode is Mode.DENSE)
    below = requests.held.find(request.usable_keys, HISPARSE)
    assert request.prefix is not None
    assert below is not None
    assert below.num_pages == request.prefix.end_page == (len(prompt) - 1) // PAGE
    return first, again, request, below.prefix


def _leave(node: EngineHarness, request: Request) -> None:
    limits = node.engine.limits
    exchange, _ = next(exchanges_of_pages(limits, request, limits.max_capacity(request)))
    node.engine.plan_moves.carry_out(StepPlan(exchanges=(exchange,)), 0.0)
    node.engine.requests.check_integrity()


@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.parametrize(
    ("num_prompt_tokens", "while_used"),
    [
        # Alone, and beside another; in `make test-full` with every length.
        *((85, True), (65, False)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((85, False), (33, False), (33, True), (65, True))
        ),
    ],
)
def test_tokens_are_the_same_once_a_request_reads_the_copy(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch, num_prompt_tokens: int, while_used: bool
) -> None:
    """What it has left is lost at once. Of 33 tokens and the answer the hot buffer has all. Steps later it
    gets a smaller hot buffer, and what it leaves serves a last turn. If another request reads the copy
    meanwhile, its keys are not written."""
    prompt, memory = random_prompt(num_prompt_tokens, num_prompt_tokens), node.engine.tables.memory
    requests, limits = node.engine.requests, node.engine.limits
    if while_used:
        node.ask(prompt, NUM_NEW, HisparseFlag.TRUE)
        node.turn_until(lambda: requests.num_copies == 0)
        other = node.generate(prompt, 60, HisparseFlag.TRUE)
        node.turn_until(lambda: len(other.token_ids) > 0)
    first, again, request, below = _turn_begins(node, prompt)
    assert below.is_down != while_used
    shared = request.prefix
    assert shared is not None
    num_shared = shared.end_page * PAGE
    on_device = {kind: slots_tensor(shared.extents(kind)) for kind in shared.kinds}
    num_kv = request.num_kv_tokens
    spilled: list[int] = []
    written: list[int] = []
    spill, copy_rows = memory.spill, memory.copy_rows

    def note_spill(device: tuple[Extent, ...], host: tuple[Extent, ...], num_tokens: int) -> None:
        spilled.append(num_tokens)
        spill(device, host, num_tokens)

    def note_copy(kind: PoolKind, src: tuple[Extent, ...], dst: tuple[Extent, ...]) -> None:
        written.extend(extents_to_slots(dst).tolist())
        copy_rows(kind, src, dst)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "spill", note_spill)
        patch.setattr(memory, "copy_rows", note_copy)
        _leave(node, request)
    assert spilled == [num_kv - num_shared]
    assert len(written) == (0 if while_used else num_shared)
    assert request.mode is Mode.HISPARSE
    assert request.prefix is not None
    assert (request.num_shared_pages, request.prefix.num_users) == (num_shared // PAGE, 1 + while_used)
    assert request.owned_slots.host <= limits.in_pages(num_kv - num_shared + limits.growth_tokens)
    requests.held.flush()
    free = ~torch.isin(on_device[PoolKind.DEVICE], slots_tensor(request.owned[PoolKind.DEVICE]))
    memory.k_dev[:, on_device[PoolKind.DEVICE][free]] = 0xFF
    memory.index[:, on_device[PoolKind.INDEX]] = 0xFF
    assert memory.row_checks is not None
    memory.row_checks[:, on_device[PoolKind.INDEX]] = -1
    node.turn_until(lambda: len(again.token_ids) > 6)
    node.engine.steps.settle()
    smaller = Exchange(request, limits.min_capacity(request))
    node.engine.plan_moves.carry_out(StepPlan(exchanges=(smaller,)), 0.0)
    node.turn_until(lambda: again.is_over)
    assert (again.token_ids, again.stats.mode) == (first.token_ids, Mode.HISPARSE)
    if while_used:
        node.leave(other)
    node.turn_until(lambda: not requests and requests.num_copies == 0)
    for flag in (HisparseFlag.TRUE, HisparseFlag.FALSE):
        assert node.ask(prompt, NUM_NEW, flag).token_ids == first.token_ids


@pytest.mark.I7
@pytest.mark.I9
def test_a_wrong_row_in_the_copy_gives_no_token(node: EngineHarness) -> None:
    """It is read with the check of the row that the request had on the device."""
    prompt, memory = random_prompt(7, 85), node.engine.tables.memory
    first, again, request, below = _turn_begins(node, prompt)
    memory.k_host[0, slots_tensor(below.extents(PoolKind.HOST)), 3] ^= 1
    _leave(node, request)
    assert request.num_shared_pages == 5
    node.failure_of(again, status=500, error="is not what was written (page-in)")
    assert first.token_ids[: len(again.token_ids)] == again.token_ids
    assert node.ask(prompt, NUM_NEW, HisparseFlag.TRUE).token_ids == first.token_ids
    for page in node.engine.requests.set_aside.shown():
        node.engine.requests.set_aside.give_back(PoolKind(page.pool), page.start)


@pytest.mark.I2
@pytest.mark.I7
def test_who_fails_to_leave_for_a_copy_ends_alone(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompt(8, 85)
    first, again, request, below = _turn_begins(node, prompt)

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("150 MiB wanted")

    with monkeypatch.context() as patch:
        patch.setattr(node.engine.tables.memory, "spill", out_of_memory)
        _leave(node, request)
    assert (below.is_down, below.num_users) == (True, 0)
    node.failure_of(again, status=500, error="cannot be retracted: 150 MiB wanted")
    assert node.ask(prompt, NUM_NEW, HisparseFlag.TRUE).token_ids == first.token_ids


@pytest.mark.I5
def test_turns_of_auto_that_make_room_have_the_tokens_of_before(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two fill the device pool when a third comes, and the plan lets one of them leave. Misses cost nothing
    here: by the time that steps take on a busy machine, it might not pay to leave."""
    monkeypatch.setattr(step_line, "STEPS_BETWEEN_ESTIMATES", 1 << 60)
    monkeypatch.setattr(node.engine.steps.next_plan, "miss_cost", CHEAP)
    prompts = [random_prompt(seed, 97) for seed in (1, 2)]
    requests = node.engine.requests
    found: list[Prefix | None] = []
    firsts = [node.ask(prompt, 24, HisparseFlag.FALSE) for prompt in prompts]
    node.turn_until(lambda: requests.num_copies == 0)
    use = requests.dense_tier.use_host_copy

    def note(keys: Sequence[PageKey], shared: Prefix) -> Prefix | None:
        found.append(use(keys, shared))
        return found[-1]

    monkeypatch.setattr(requests.dense_tier, "use_host_copy", note)
    answers = [node.generate(prompt, 24, HisparseFlag.AUTO) for prompt in prompts]
    node.turn_until(lambda: all(len(answer.token_ids) > 1 for answer in answers))
    assert {r.mode for r in requests.select(RequestState.RUNNING)} == {Mode.DENSE}
    late = node.generate(random_prompt(3, 97), 8, HisparseFlag.TRUE)
    node.turn_until(lambda: late.is_over and all(answer.is_over for answer in answers))
    assert [answer.token_ids for answer in answers] == [first.token_ids for first in firsts]
    assert sum(answer.stats.num_retractions for answer in answers) > 0
    assert found
    assert all(prefix is not None for prefix in found)
