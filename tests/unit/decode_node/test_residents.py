"""Hisparse requests that are resident while device slots are free, and dense ones of ``auto`` that make room:
bytes, tokens and wrong rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import PoolKind, Stage
from hisparse_pd.decode_node import step_line
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import Exchange, StepPlan
from hisparse_pd.kernels import page_fill
from tests.unit.decode_node.residents_support import automatic, residents
from tests.unit.decode_node.speculation_support import (
    HOT_BUFFER,
    MAX_DRAFTS,
    NUM_NEW,
    PROMPTS,
    TOP_K,
    by_turns,
    drafts,
    harness,
)
from tests.unit.decode_node.support import Answer, Checkpoint, EngineHarness, Prompt, random_prompt

CHECKPOINT = "drafting"
LONG = PROMPTS[-2:]
"""Prompts of 387 and 700 tokens, longer than a hot buffer."""


@pytest.fixture
def node(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHarness]:
    with closing(automatic(checkpoint, tmp_path, monkeypatch)) as node:
        yield node


MakeNode: TypeAlias = Callable[..., EngineHarness]


@pytest.fixture
def short_node(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNode]:
    """A function that makes a node with few device slots, whose steps verify these numbers of drafts in turn.
    ``largest``: the most entries of a hot buffer."""
    pools = {"host_pool_tokens": 4096, "max_running_requests": 10, "growth_pages": 1}
    with ExitStack() as stack:

        def make(
            num_device_slots: int, *num_drafts: int, largest: int = HOT_BUFFER, **settings: Any
        ) -> EngineHarness:
            settings |= pools | {"device_pool_tokens": num_device_slots}
            node = automatic(checkpoint, tmp_path, monkeypatch, largest, **settings)
            stack.enter_context(closing(node))
            stack.enter_context(drafts(node, *num_drafts))
            return node

        yield make


class Exchanges:
    """How often a node's requests have become resident, left their pages, or given them up before they were
    filled."""

    def __init__(self, node: EngineHarness, patch: pytest.MonkeyPatch) -> None:
        self.num_pages_given = self.num_pages_left = self.num_fills_ended = 0
        requests = node.engine.requests
        replace, end_fill = requests.replace_device_slots, requests.end_fill

        def counted(exchange: Exchange, *first_kept: int) -> None:
            self.num_pages_left += exchange.request.is_resident
            self.num_fills_ended += exchange.request.num_page_slots > 0
            replace(exchange, *first_kept)

        def counted_end(request: Request) -> None:
            self.num_pages_given += 1
            end_fill(request)

        patch.setattr(requests, "replace_device_slots", counted)
        patch.setattr(requests, "end_fill", counted_end)


def dense_tokens(node: EngineHarness, prompts: Sequence[Prompt], num_new: int) -> list[list[int]]:
    """Return the tokens that dense requests get, and let go of the prefixes that are held of them."""
    answers = [node.generate(prompt, num_new, HisparseFlag.FALSE) for prompt in prompts]
    tokens = [node.tokens_of(answer) for answer in answers]
    node.turn_until(lambda: not node.engine.requests)
    node.engine.requests.held.flush()
    return tokens


def hisparse_answers(node: EngineHarness, prompts: Sequence[Prompt], num_new: int) -> list[Answer]:
    return [node.generate(prompt, num_new, HisparseFlag.TRUE) for prompt in prompts]


def checked_turns(node: EngineHarness, answers: Sequence[Answer]) -> Iterator[list[Request]]:
    """Turn until ``answers`` are over. After each turn, yield the residents, whose two copies are equal."""
    while not all(answer.is_over for answer in answers):
        node.turn()
        node.engine.steps.settle()
        running = residents(node)
        for request in running:
            check_both_copies(node, request)
        yield running


def check_both_copies(node: EngineHarness, request: Request) -> None:
    """Check that all items of a resident request are the same in both pools."""
    memory, num_tokens = node.engine.tables.memory, request.num_kv_tokens
    host, device = (
        slots_tensor(request.extents(kind))[:num_tokens] for kind in (PoolKind.HOST, PoolKind.DEVICE)
    )
    assert len(host) == len(device) == num_tokens
    assert torch.equal(memory.k_host[:, host], memory.k_dev[:, device])


@pytest.mark.I3
@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.parametrize("num_drafts", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_resident_has_every_item_in_both_pools(
    expected: dict[Prompt, list[int]], node: EngineHarness, num_drafts: int
) -> None:
    """Also those of tokens that it has drawn since: with drafts the accepted ones alone."""
    with drafts(node, num_drafts):
        answers = hisparse_answers(node, LONG, NUM_NEW)
        checked = set(chain.from_iterable(checked_turns(node, answers)))
        node.finish(answers, expected)
    assert len(checked) == len(LONG)
    for answer in answers:
        assert answer.stats.num_retractions == 0


@pytest.mark.I3
@pytest.mark.I5
@pytest.mark.parametrize("num_drafts", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_prompt_that_is_held_whole_is_resident_from_its_first_step_on(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """Its pages are filled before, and found by the next one that begins alike."""
    prompt, num_new = LONG[1][:657], 16
    with (
        closing(automatic(checkpoint, tmp_path, monkeypatch, disable_prefix_cache=False)) as node,
        drafts(node, num_drafts),
    ):
        (expected,) = dense_tokens(node, [prompt], num_new)
        (first,) = hisparse_answers(node, [prompt], num_new)
        assert node.tokens_of(first) == expected
        answers = [node.generate(prompt, num_new, HisparseFlag.TRUE)]
        node.turn_until(lambda: len(answers[0].token_ids) > 1)
        answers.append(node.generate(prompt, num_new, HisparseFlag.AUTO))
        most_sharing = 0
        for running in checked_turns(node, answers):
            most_sharing = max(most_sharing, len([r for r in running if r.num_resident_pages]))
        assert [answer.token_ids for answer in answers] == [expected] * 2
        assert [answer.stats.num_held_tokens for answer in answers] == [656] * 2
        assert answers[0].stats.hits + answers[0].stats.misses == 0, "it had no hot buffer"
        assert answers[1].stats.mode is Mode.HISPARSE
        assert most_sharing == 2
        node.turn_until(lambda: not node.engine.requests.select(RequestState.ENDING))
        node.engine.requests.check_integrity()


def slowly(node: EngineHarness, patch: pytest.MonkeyPatch, chunk_tokens: int) -> None:
    """Let each turn fill no more than ``chunk_tokens`` positions of a layer."""
    patch.setattr(page_fill, "CHUNK_TOKENS", chunk_tokens)
    node.engine.tables.fills.slice_bytes = 1


def filling(node: EngineHarness) -> list[Request]:
    running = node.engine.requests.select(RequestState.RUNNING)
    return [request for request in running if request.num_page_slots]


@pytest.mark.I3
@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.parametrize("num_drafts", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_pages_of_several_requests_are_filled_beside_their_steps(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """What is drawn meanwhile is in the pages, too, which grow while they are filled."""
    num_new = 30 + 20 * num_drafts
    prompts = [*LONG, random_prompt(77, 350)]
    with drafts(node, num_drafts):
        expected = dense_tokens(node, prompts, num_new)
        slowly(node, monkeypatch, 300)
        answers = hisparse_answers(node, prompts, num_new)
        num_drawn, most_filling = {len(prompt): 0 for prompt in prompts}, 0
        checked: set[Request] = set()
        before: dict[Request, int] = {}
        for running in checked_turns(node, answers):
            checked.update(running)
            for request in filling(node):
                assert request.hot_capacity > 0
                num_new_kv = request.num_kv_tokens - before.get(request, request.num_kv_tokens)
                num_drawn[request.num_prompt_tokens] += num_new_kv
            most_filling = max(most_filling, len(filling(node)))
            before = {request: request.num_kv_tokens for request in filling(node)}
    assert [answer.token_ids for answer in answers] == expected
    assert len(checked) == most_filling == len(prompts)
    assert min(num_drawn.values()) > 2, "nobody sits steps out"
    node.engine.requests.check_integrity()


@pytest.mark.I2
@pytest.mark.I5
@pytest.mark.parametrize("num_drafts", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_tokens_equal_the_oracle_when_pages_are_given_up_before_they_are_filled(
    short_node: MakeNode,
    expected: dict[Prompt, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    num_drafts: int,
) -> None:
    """Others come and go, and hot buffers stay as they are; what was copied meanwhile is nobody's."""
    node = short_node(2400, num_drafts)
    exchanges = Exchanges(node, monkeypatch)
    slowly(node, monkeypatch, 60)
    answers = hisparse_answers(node, LONG, NUM_NEW)
    node.begin_together(answers)
    node.turn_until(lambda: filling(node))
    others = [node.generate(prompt, NUM_NEW, by_turns(n)) for n, prompt in enumerate(PROMPTS[3:9])]
    with monkeypatch.context() as held_back:  # else the first ones may have ended when the others come
        held_back.setattr(node.engine, "_step", lambda: False)
        node.turn_until(lambda: len(node.engine.requests.select(RequestState.WAITING)) == len(others))
    node.finish([*answers, *others], expected)
    assert exchanges.num_fills_ended > 0
    node.turn_until(lambda: not node.engine.requests.select(RequestState.ENDING))
    assert node.engine.requests.available == node.engine.limits.totals


class UnderWay:
    """The event behind copies that are not over until ``is_over`` is set."""

    is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for them")


def stays_until_over(
    node: EngineHarness, request: Request, copies: UnderWay, num_slots: Callable[[], int]
) -> None:
    """Check that a request that ends keeps its slots until ``copies`` are over, and ends then."""
    node.turn_until(lambda: request.state is RequestState.ENDING)
    for _ in range(3):
        node.turn()
    assert num_slots() > 0
    assert request.state is RequestState.ENDING
    copies.is_over = True
    node.turn_until(lambda: request.state is RequestState.ENDED)


@pytest.mark.I1
@pytest.mark.I2
def test_a_request_that_ends_keeps_its_pages_until_their_copies_are_over(
    node: EngineHarness, expected: dict[Prompt, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(node, monkeypatch, 16)
    leaving = node.generate(LONG[1], NUM_NEW, HisparseFlag.TRUE)
    node.turn_until(lambda: filling(node))
    (request,) = filling(node)
    copies = UnderWay()
    node.engine.tables.fills.ends[request.req_row] = copies  # type: ignore[assignment]
    node.leave(leaving)
    stays_until_over(node, request, copies, lambda: request.num_page_slots)
    node.finish([node.generate(LONG[0], NUM_NEW, HisparseFlag.TRUE)], expected)


@pytest.mark.I1
def test_the_last_copies_to_pages_keep_them_from_others_too(
    node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is new since the fill began is copied when the pages are entered, and no step need follow."""
    fills, copies = node.engine.tables.fills, UnderWay()
    monkeypatch.setattr(fills, "note_end", lambda row: fills.ends.update({row: copies}))
    leaving = node.generate(LONG[1], NUM_NEW, HisparseFlag.TRUE)
    node.turn_until(lambda: residents(node))
    (request,) = residents(node)
    node.leave(leaving)
    stays_until_over(node, request, copies, lambda: request.num_device_slots)


@pytest.mark.I3
@pytest.mark.I5
@pytest.mark.I9
@pytest.mark.parametrize("num_drafts", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_residents_of_a_common_beginning_read_the_same_pages(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """The first fills them, and shares them once a step of its own says that all of them were right; the
    others fill what is their own, and the pages outlive the first."""
    beginning, num_new = LONG[1][:320], 12 + 5 * num_drafts
    prompts = [(*beginning, *random_prompt(50 + n, 30 + 20 * n)) for n in range(3)]
    with (
        closing(automatic(checkpoint, tmp_path, monkeypatch, disable_prefix_cache=False)) as node,
        drafts(node, num_drafts),
    ):
        expected = dense_tokens(node, prompts, num_new)
        requests = node.engine.requests
        end_fill, share_resident = requests.end_fill, requests.share_resident
        num_tokens: dict[Request, int] = {}  # when its pages were filled

        def ended(request: Request) -> None:
            num_tokens[request] = len(request.output_token_ids)
            end_fill(request)

        def shared(request: Request, min_own_slots: int) -> None:
            assert len(request.output_token_ids) > num_tokens[request]
            share_resident(request, min_own_slots)

        monkeypatch.setattr(requests, "end_fill", ended)
        monkeypatch.setattr(requests, "share_resident", shared)
        answers = hisparse_answers(node, prompts, num_new)
        most_sharing = 0
        for running in checked_turns(node, answers):
            sharing = [request for request in running if request.num_resident_pages]
            most_sharing = max(most_sharing, len(sharing))
            firsts = {int(slots_tensor(request.extents(PoolKind.DEVICE))[0]) for request in sharing}
            assert len(firsts) <= 1
        assert [answer.token_ids for answer in answers] == expected
        assert most_sharing == len(prompts)
        node.turn_until(lambda: not node.engine.requests.select(RequestState.ENDING))
        assert node.engine.requests.pools.used(Stage.HELD).device == 0
        node.engine.requests.check_integrity()


@pytest.mark.I3
@pytest.mark.I5
@pytest.mark.parametrize(
    ("capacity", "keeps"), [(HOT_BUFFER, True), pytest.param(400, False, marks=pytest.mark.slow)]
)
def test_a_resident_leaves_pages_that_it_shares(short_node: MakeNode, capacity: int, keeps: bool) -> None:
    """Its own pages stay the beginning of its hot buffer, and it is in the next step, unless the hot buffer
    holds all positions: then it is filled again."""
    node, num_new = short_node(4000, 0, 3, largest=400, disable_prefix_cache=False), 16 if keeps else 30
    prompts = [(*LONG[1][:240], *random_prompt(50 + n, 60)) for n in range(2)]
    expected = dense_tokens(node, prompts, num_new)
    answers = hisparse_answers(node, prompts, num_new)
    node.turn_until(lambda: len([r for r in residents(node) if r.num_resident_pages]) == 2)
    node.engine.steps.settle()
    request = residents(node)[0]
    own = set(slots_tensor(request.owned[PoolKind.DEVICE]).tolist())
    node.engine.plan_moves.carry_out(StepPlan(exchanges=(Exchange(request, capacity),)), 0.0)
    assert request.is_filling is not keeps
    if keeps:  # else its new slots may be any, these among them
        assert own <= set(slots_tensor(request.owned[PoolKind.DEVICE]).tolist())
    assert [answer.token_ids for answer in answers] != expected, "it has tokens to draw"
    while not all(answer.is_over for answer in answers):
        node.turn()
    assert [answer.token_ids for answer in answers] == expected
    node.engine.requests.check_integrity()


@pytest.mark.I5
@pytest.mark.parametrize("largest", [HOT_BUFFER, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpoint", ["v32", pytest.param("glm", marks=pytest.mark.slow)], indirect=True)
def test_tokens_equal_the_oracle_while_residents_come_and_go(
    short_node: MakeNode, expected: dict[Prompt, list[int]], monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    """The device pool has room for few: arrivals take pages from residents."""
    node = short_node(1600, 3, 0, 1, largest=largest)
    exchanges = Exchanges(node, monkeypatch)
    answers = hisparse_answers(node, LONG, NUM_NEW)
    node.begin_together(answers)
    node.turn_until(lambda: len(residents(node)) == len(LONG))
    with node.without_steps():
        node.turn_until(lambda: node.stats and node.stats.gauges["num_resident_reqs"] == len(LONG))
    answers += [node.generate(prompt, NUM_NEW, by_turns(n)) for n, prompt in enumerate(PROMPTS[:8])]
    with node.without_steps():
        node.turn_until(lambda: exchanges.num_pages_left)
    node.finish(answers, expected)
    assert exchanges.num_pages_given >= len(LONG)
    assert exchanges.num_pages_left > 0


@pytest.mark.I4
@pytest.mark.I5
@pytest.mark.parametrize("num_drafts", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_tokens_equal_the_oracle_when_dense_requests_of_auto_make_room(
    short_node: MakeNode, expected: dict[Prompt, list[int]], num_drafts: int
) -> None:
    """Two that fill the device pool have drawn some tokens when others come. The second leaves its pages."""
    node = short_node(1120, num_drafts)
    requests = node.engine.requests
    dense = [node.generate(prompt, NUM_NEW, HisparseFlag.AUTO) for prompt in LONG]
    node.begin_together(dense)
    assert [r.mode for r in requests.select(RequestState.RUNNING)] == [Mode.DENSE] * 2
    node.turn_until(lambda: all(answer.token_ids for answer in dense))
    late = [node.generate(LONG[0], NUM_NEW, by_turns(number)) for number in range(3)]
    with node.without_steps():
        node.turn_until(lambda: any(r.num_retractions for r in requests.select(RequestState.RUNNING)))
    node.finish([*dense, *late], expected)
    assert (dense[1].stats.num_retractions, dense[1].stats.mode) == (1, Mode.HISPARSE)


def test_plans_learn_what_hot_buffers_miss(
    node: EngineHarness, expected: dict[Prompt, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_line, "STEPS_BETWEEN_ESTIMATES", 1)
    plans = node.engine.steps.next_plan
    assert plans.miss_cost.missed_entries == 0
    with drafts(node, MAX_DRAFTS):
        node.finish([node.generate(LONG[1], NUM_NEW, HisparseFlag.TRUE)], expected)
    assert plans.miss_cost.missed_entries > 0
    assert plans.miss_cost.miss_secs == 0, "without a GPU misses cost nothing"
    node.turn_until(lambda: node.stats and node.stats.gauges["step_seconds_per_req"] > 0)
    assert node.stats is not None
    assert node.stats.gauges["host_link_bytes_per_second"] == node.stats.gauges["miss_seconds_per_req"] == 0


@pytest.mark.I3
def test_what_a_resident_has_drawn_is_found_in_the_host_pool_by_the_next_turn(
    checkpoint: Checkpoint,
    expected: dict[Prompt, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {"disable_prefix_cache": False, "page_size": 4}
    with closing(automatic(checkpoint, tmp_path, monkeypatch, **settings)) as node:
        exchanges = Exchanges(node, monkeypatch)
        first = node.ask(LONG[0], NUM_NEW, HisparseFlag.TRUE)
        assert exchanges.num_pages_given == 1
        following = node.ask((*LONG[0], *first.token_ids[: NUM_NEW - 4]), 4, HisparseFlag.TRUE)
        assert following.stats.num_held_tokens > len(LONG[0])
        assert following.token_ids == expected[LONG[0]][NUM_NEW - 4 :]


@pytest.mark.I7
def test_a_wrong_row_that_comes_up_ends_its_request_only(node: EngineHarness) -> None:
    """It is none of those that are hot before: nothing but the fill of the pages reads it."""
    doomed, spared = (node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in LONG)
    with node.without_steps():
        node.turn_until(lambda: len(node.engine.requests.select(RequestState.RUNNING)) == 2)
    request = next(r for r in node.engine.requests.all() if r.num_prompt_tokens == len(doomed.prompt))
    state = node.engine.tables.state
    lookup = slots_tensor(request.owned[PoolKind.LOOKUP])
    is_hot = (state.lookup_to_hot[:, lookup[: request.num_kv_tokens]] >= 0).any(0)
    position = int((~is_hot).nonzero()[0])
    slot = int(slots_tensor(request.extents(PoolKind.HOST))[position])
    node.engine.tables.memory.k_host[0, slot, 5] ^= 2
    failure = node.failure_of(
        doomed, status=500, error=f"layer 0, position {position}, in slot {slot} of the"
    )
    assert "host pool" in failure.error
    assert len(node.tokens_of(spared)) == NUM_NEW


@pytest.mark.I7
def test_pages_that_cannot_be_filled_end_their_request_only(
    node: EngineHarness, expected: dict[Prompt, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(fill: page_fill.PageFill, most_bytes: int | None) -> int:
        raise torch.OutOfMemoryError("150 MiB wanted")

    monkeypatch.setattr(page_fill.PageFill, "launch_slice", out_of_memory)
    doomed = node.generate(LONG[1], NUM_NEW, HisparseFlag.TRUE)
    spared = node.generate(PROMPTS[3], NUM_NEW, HisparseFlag.TRUE)  # it misses nothing
    node.failure_of(doomed, status=500, error="cannot be made resident: 150 MiB wanted")
    node.finish([spared], expected)
    node.engine.requests.check_integrity()


def test_a_bound_is_kept(checkpoint: Checkpoint, expected: dict[Prompt, list[int]], tmp_path: Path) -> None:
    """With --device-buffer-size nobody has more, however many slots are free."""
    with closing(harness(checkpoint, tmp_path, device_buffer_size=TOP_K + 4)) as node:
        answer = node.generate(LONG[0], NUM_NEW, HisparseFlag.TRUE)
        while not answer.is_over:
            node.turn()
            for request in node.engine.requests.select(RequestState.RUNNING):
                assert request.hot_capacity == TOP_K + 4
        node.finish([answer], expected)
