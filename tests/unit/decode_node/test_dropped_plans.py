"""Plans in which an exchange fails, and its request's row cannot be emptied. The rest of the plan counts on
the request's slots; it is dropped, and no other request notices: I2, I7."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.growth import exchanges_of_pages
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import Admission, Exchange, Fill, Growth, StepPlan
from tests.unit.decode_node.failures_support import NUM_NEW
from tests.unit.decode_node.residents_support import automatic, residents
from tests.unit.decode_node.support import Checkpoint, EngineHarness, raising, random_prompt

CHECKPOINT = "drafting"
NODE = {"page_size": 16, "host_pool_tokens": 2048, "device_pool_tokens": 1024, "disable_prefix_cache": False}
PROMPT = random_prompt(7, 300)


@pytest.fixture
def node(resting_node: EngineHarness) -> EngineHarness:
    return resting_node


def fail_exchange(node: EngineHarness, doomed: Request, rest: StepPlan, num_failures: int = 2) -> None:
    """Carry out a plan whose first order, to let the dense request ``doomed`` leave its pages, fails, as do
    the first ``num_failures`` attempts to empty its row."""
    tables = node.engine.tables
    release, errors = tables.release, [torch.OutOfMemoryError("36 MiB wanted")] * num_failures

    def out_of_memory(*requests: Request) -> None:
        if errors:
            raise errors.pop()
        release(*requests)

    limits = node.engine.limits
    exchange, _ = next(exchanges_of_pages(limits, doomed, limits.max_capacity(doomed)))
    plan = StepPlan((), (exchange, *rest.exchanges), rest.fills, rest.growths, rest.admissions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "release", out_of_memory)
        with pytest.MonkeyPatch.context() as retraction:
            retraction.setattr(tables, "retract", raising(torch.OutOfMemoryError("150 MiB wanted")))
            node.engine.plan_moves.carry_out(plan, 0.0)
        assert doomed.state is RequestState.ENDING
        node.engine.requests.check_integrity()
        node.turn_until(lambda: doomed.state is RequestState.ENDED)
    assert not errors


def rest_of_plan(kind: str, running: Request, waiting: Request, num_slots: int) -> StepPlan:
    """Return the rest of a plan: an order that takes ``num_slots`` device slots."""
    match kind:
        case "exchange":
            return StepPlan(exchanges=(Exchange(running, running.hot_capacity + num_slots),))
        case "fill":
            return StepPlan(fills=(Fill(running, num_slots, num_resident_pages=0),))
        case "growth":
            return StepPlan(growths=(Growth(running, SlotCounts(device=num_slots, index=16)),))
        case _:
            need = SlotCounts(device=num_slots, index=16, aux=1, req_row=1)
            return StepPlan(admissions=(Admission(waiting, Mode.DENSE, need, 0, num_shared_pages=3),))


@pytest.mark.I2
@pytest.mark.I7
@pytest.mark.parametrize(
    ("kind", "flag"),
    [
        ("exchange", HisparseFlag.TRUE),
        ("fill", HisparseFlag.TRUE),
        ("growth", HisparseFlag.FALSE),
        ("admission", HisparseFlag.FALSE),
    ],
)
def test_what_counts_on_slots_that_are_not_free_is_planned_anew(
    node: EngineHarness, kind: str, flag: HisparseFlag
) -> None:
    """A waiting request that was to share held pages can share them all the same."""
    beginning = random_prompt(3, 50)
    node.ask(beginning, NUM_NEW, HisparseFlag.FALSE)
    doomed = node.generate(PROMPT, NUM_NEW, HisparseFlag.FALSE)
    spared = node.generate(random_prompt(8, 100), NUM_NEW, flag)
    node.begin_together([doomed, spared])
    running = {request.num_prompt_tokens: request for request in node.engine.requests.all()}
    requests = node.engine.requests
    with pytest.MonkeyPatch.context() as held_back:
        held_back.setattr(node.engine, "_step", lambda: False)
        late = node.generate((*beginning, *random_prompt(9, 30)), NUM_NEW, HisparseFlag.FALSE)
        node.turn_until(lambda: list(requests.waiting()))
    (waiting,) = requests.waiting()
    too_many = requests.available.device + 16
    fail_exchange(node, running[300], rest_of_plan(kind, running[100], waiting, too_many))
    node.failure_of(doomed, status=500, error="cannot be retracted: 150 MiB wanted")
    assert [len(node.tokens_of(answer)) for answer in (spared, late)] == [NUM_NEW] * 2
    assert late.stats.num_held_tokens == 48


@pytest.mark.I2
def test_pages_of_residents_that_a_fill_was_to_share_are_free_once_they_end(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beginning = random_prompt(4, 320)
    with closing(automatic(checkpoint, tmp_path, monkeypatch, disable_prefix_cache=False)) as node:
        requests = node.engine.requests
        answers = [node.generate((*beginning, 40), 40, HisparseFlag.TRUE)]
        node.turn_until(lambda: any(request.num_resident_pages for request in residents(node)))
        answers.append(node.generate((*beginning, 41, 42), NUM_NEW, HisparseFlag.TRUE))
        doomed = node.generate(PROMPT, NUM_NEW, HisparseFlag.FALSE)
        node.begin_together([*answers, doomed])
        node.engine.steps.settle()
        running = {request.num_prompt_tokens: request for request in requests.all()}
        fill = Fill(running[322], 32, num_resident_pages=running[321].num_resident_pages)
        fail_exchange(node, running[300], StepPlan(fills=(fill,)))
        node.failure_of(doomed, status=500, error="cannot be retracted: 150 MiB wanted")
        assert [len(node.tokens_of(answer)) for answer in answers] == [40, NUM_NEW]
        node.come_to_rest()
        assert requests.pools.free == requests.pools.totals
