"""Requests whose device slots change beside a step that they skip: who is in which step, and tokens.

The runner is on the CPU, where a step is over when it is launched; the order of calls is a GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

import pytest

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.runner import Launched
from hisparse_pd.decode_node.step_plan import Exchange, Fill, StepPlan
from hisparse_pd.engine.lockstep import NodeStep
from tests.unit.decode_node.speculation_support import HOT_BUFFER, MAX_DRAFTS, PROMPTS, TOP_K, drafts, harness
from tests.unit.decode_node.support import Answer, Checkpoint, EngineHarness, Prompt

NUM_NEW = 20
CHECKPOINT = "drafting"
SMALL = TOP_K + 16
LONG = PROMPTS[-3:]


@pytest.fixture(params=[0, pytest.param(MAX_DRAFTS, id="drafts")])
def node(request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path: Path) -> Iterator[EngineHarness]:
    """A node whose steps verify no drafts, or as many as they may."""
    with closing(harness(checkpoint, tmp_path)) as node, drafts(node, request.param):
        yield node


@dataclass
class Change:
    """A request whose device slots changed, and what was in flight then."""

    request: Request
    in_flight: tuple[Request, ...] | None
    """The requests of the step in flight; None if there was none."""


@dataclass
class Watched:
    """A node whose plans have the exchanges of ``wanted`` and no others, and what became of them."""

    node: EngineHarness
    patch: pytest.MonkeyPatch
    wanted: Callable[[], Sequence[Exchange]] = tuple
    """Returns the exchanges of the next plan."""
    changes: list[Change] = field(default_factory=list)
    left_out: list[set[Request]] = field(default_factory=list)
    """For each turn, the running requests with a next token that were not in its step."""

    def __post_init__(self) -> None:
        engine = self.node.engine
        steps, rooms, make = engine.steps, engine.requests, engine.steps.next_plan.make
        replace_slots, end_fill, launch = rooms.replace_device_slots, rooms.end_fill, steps.launch

        def planned(now: float) -> StepPlan:
            return replace(make(now), exchanges=tuple(self.wanted()))

        def note(request: Request) -> None:
            flying = steps.in_flight
            self.changes.append(Change(request, None if flying is None else tuple(flying.batch)))

        def noted_exchange(exchange: Exchange, *first_kept: int) -> None:
            note(exchange.request)
            replace_slots(exchange, *first_kept)

        def noted_end(request: Request) -> None:
            note(request)
            end_fill(request)

        def noted_launch(batch: list[Request], step: NodeStep) -> Launched | None:
            ready = {r for r in self.running() if r.has_next_step and not r.is_filling}
            self.left_out.append(ready - set(batch))
            return launch(batch, step)

        self.patch.setattr(steps.next_plan, "make", planned)
        self.patch.setattr(rooms, "replace_device_slots", noted_exchange)
        self.patch.setattr(rooms, "end_fill", noted_end)
        self.patch.setattr(steps, "launch", noted_launch)

    def want(self, of: Request, capacity: int) -> None:
        """Let all further plans give a request a hot buffer of ``capacity``, while it has another."""
        self.wanted = lambda: [Exchange(of, capacity)] if of.hot_capacity != capacity else []

    def running(self) -> Sequence[Request]:
        return self.node.engine.requests.select(RequestState.RUNNING)

    def begin(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Start answers, and return them once all are in the step in flight."""
        answers = [self.node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in prompts]
        self.node.begin_together(answers)
        self.node.turn_until(lambda: self.node.engine.steps.in_flight is not None)
        self.left_out.clear()
        return answers


@pytest.fixture
def watched(node: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(node, monkeypatch)


@pytest.mark.I1
@pytest.mark.I5
@pytest.mark.parametrize("sizes", [(SMALL,), (SMALL, 2 * TOP_K, HOT_BUFFER)])
def test_a_request_skips_one_step_while_its_hot_buffer_changes(
    expected: dict[Prompt, list[int]], watched: Watched, sizes: tuple[int, ...]
) -> None:
    answers = watched.begin(LONG)
    for size in sizes:
        of = watched.running()[1]
        watched.want(of, size)
        watched.node.turn_until(lambda: of.hot_capacity == size)  # noqa: B023
        change = watched.changes[-1]
        assert change.request is of
        assert change.in_flight is not None
        assert of not in change.in_flight
        assert len(change.in_flight) == len(LONG) - 1
    watched.node.finish(answers, expected)
    assert [len(out) for out in watched.left_out if out] == [1] * len(sizes)
    assert len(watched.changes) == len(sizes)


@pytest.mark.I5
def test_one_that_is_alone_changes_behind_its_step(
    expected: dict[Prompt, list[int]], watched: Watched
) -> None:
    """If it skipped the next step, that would have no request."""
    (answer,) = watched.begin(LONG[:1])
    (of,) = watched.running()
    watched.want(of, SMALL)
    watched.node.finish([answer], expected)
    assert [(change.request, change.in_flight) for change in watched.changes] == [(of, None)]
    assert not any(watched.left_out)


@pytest.mark.I5
def test_a_plan_is_put_off_once(expected: dict[Prompt, list[int]], watched: Watched) -> None:
    """The next plan wants to change others: the step in flight is read first, so that nobody waits long."""
    answers = watched.begin(LONG)
    turns = cycle(watched.running())

    def another() -> list[Exchange]:
        of = next(turns)
        return [Exchange(of, SMALL)] if of.hot_capacity != SMALL and of.has_next_step else []

    watched.wanted = another
    watched.node.turn_until(lambda: len(watched.changes) == 1)
    assert watched.changes[0].in_flight is None
    assert len([out for out in watched.left_out if out]) == 1
    watched.wanted = tuple
    watched.node.finish(answers, expected)


@pytest.mark.I1
@pytest.mark.I5
def test_a_request_skips_one_step_when_it_becomes_resident(
    expected: dict[Prompt, list[int]], watched: Watched
) -> None:
    answers = watched.begin(LONG)
    engine, of = watched.node.engine, watched.running()[0]
    engine.steps.settle()
    fill = Fill(of, engine.limits.in_pages(of.reserved_tokens), num_resident_pages=0)
    engine.plan_moves.carry_out(StepPlan(fills=(fill,)), 0.0)
    watched.node.turn_until(lambda: of.is_resident)
    (change,) = watched.changes
    assert change.in_flight is not None
    assert of not in change.in_flight
    watched.node.finish(answers, expected)
    assert [out for out in watched.left_out if out] == [{of}]


@pytest.mark.I1
def test_where_no_step_is_launched_the_work_of_the_turn_counts_as_before(watched: Watched) -> None:
    """``RequestTables`` lets work that the host waits for overtake nothing but a step in flight."""
    engine, num_notes = watched.node.engine, 0
    note_launch = engine.tables.note_launch

    def noted() -> None:
        nonlocal num_notes
        num_notes += 1
        note_launch()

    watched.patch.setattr(engine.tables, "note_launch", noted)
    watched.begin(LONG[:1])
    (of,) = watched.running()
    engine.steps.settle()
    of.is_filling = True  # it is in no step
    watched.patch.setattr(engine.tables, "is_ready", lambda request: False)
    num_before, num_launched = num_notes, engine.steps.num_launched
    watched.node.turn()
    assert (num_notes, engine.steps.num_launched) == (num_before + 1, num_launched)
