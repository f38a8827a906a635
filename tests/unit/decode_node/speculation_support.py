"""A decode node whose steps verify drafts: prompts, runners, and control of how many it verifies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest

import hisparse_pd.decode_node.engine
from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.runner import DeviceRunner, Launched
from hisparse_pd.decode_node.step_plan import Exchange, Fill, StepPlan
from hisparse_pd.decode_node.step_results import StepResult
from tests.unit.decode_node.support import Answer, Checkpoint, EngineHarness, Prompt, random_prompt

NUM_NEW = 10
TOP_K = 64
MAX_DRAFTS = 3
HOT_BUFFER = (MAX_DRAFTS + 1) * TOP_K + MAX_DRAFTS + 1
"""Hot buffer in which all positions of a step find what they select."""
LENGTHS = [1, 63, 64, 65, HOT_BUFFER - 22, HOT_BUFFER - 3, HOT_BUFFER - 1, HOT_BUFFER, 387, 700]
PROMPTS: list[Prompt] = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]


def make_behind(settings: DecodeSettings, model: DsaModel, tables: RequestTables) -> DeviceRunner:
    """Make a runner with a GPU's order of steps, the host one behind, without graphs."""
    return DeviceRunner(
        model,
        tables,
        AttentionKernels.reference(model.spec),
        max_reqs=settings.max_running_requests,
        graph_batches=(),
        min_split_reqs=3,
        is_behind=True,
    )


def harness(
    checkpoint: Checkpoint, ipc_dir: Path, make: Callable[..., DeviceRunner] = make_behind, **settings: Any
) -> EngineHarness:
    settings = {"device_buffer_size": HOT_BUFFER, "speculative_num_steps": MAX_DRAFTS, **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hisparse_pd.decode_node.engine, "make_runner", make)
        return EngineHarness(checkpoint, ipc_dir, **settings)


@contextmanager
def drafts(node: EngineHarness, *numbers: int) -> Iterator[None]:
    """Let steps verify these numbers of drafts in turn, where their requests can."""
    in_turn = cycle(numbers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            node.engine.steps.draft_choice, "choose", lambda num_reqs, most: min(next(in_turn), most)
        )
        yield


def num_drafts(*answers: Answer) -> tuple[int, int]:
    """Return how many drafts of all ``answers`` together were verified, and how many accepted."""
    every = [answer.stats for answer in answers]
    return sum(stats.num_drafted for stats in every), sum(stats.num_accepted for stats in every)


def by_turns(number: int) -> HisparseFlag:
    return [HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.AUTO][number % 3]


def fill_pages(node: EngineHarness, request: Request, *, at_once: bool) -> None:
    """Begin to fill the pages of a request, unless that is under way. ``at_once``: it is resident then. No
    step may be in flight."""
    engine = node.engine
    if not request.num_page_slots:
        fill = Fill(request, engine.limits.in_pages(request.reserved_tokens), num_resident_pages=0)
        engine.plan_moves.carry_out(StepPlan(fills=(fill,)), 0.0)
    if at_once:
        while not engine.tables.is_ready(request):
            engine.tables.go_on()
        engine.plan_moves.enter_pages(0.0)


def exchange_in_every_step(
    node: EngineHarness, answers: Sequence[Answer], sizes: Iterator[int], patch: pytest.MonkeyPatch
) -> int:
    """Give every running request a hot buffer of the next of ``sizes`` after each step, up to its end; 0
    makes it resident, at once or some steps later.

    What it gives up is lost with all that it held, as if another request had its slots. Returns the number of
    exchanges and fills.
    """
    rooms, tables = node.engine.requests, node.engine.tables
    replace_device_slots, end_fill = rooms.replace_device_slots, rooms.end_fill
    num_exchanges = 0

    def slots_of(request: Request) -> set[int]:
        return set(slots_tensor(request.owned[PoolKind.DEVICE]).tolist())

    def replace_and_lose(exchange: Exchange, first_kept: int | None = None) -> None:
        nonlocal num_exchanges
        request, before = exchange.request, slots_of(exchange.request)
        keeps = request.hot_capacity or first_kept is not None
        replace_device_slots(exchange, first_kept)
        num_exchanges += 1
        tables.memory.k_dev[:, sorted(before - slots_of(request) if keeps else before)] = 0xFF

    def end_fill_and_lose(request: Request) -> None:
        nonlocal num_exchanges
        before = slots_of(request)
        end_fill(request)
        num_exchanges += 1
        tables.memory.k_dev[:, sorted(before - slots_of(request))] = 0xFF

    patch.setattr(rooms, "replace_device_slots", replace_and_lose)
    patch.setattr(rooms, "end_fill", end_fill_and_lose)
    at_once = cycle((True, False, False))
    while not all(answer.is_over for answer in answers):
        node.turn()
        node.engine.steps.settle()
        with_sizes = {request: next(sizes) for request in rooms.select(RequestState.RUNNING)}
        exchanges = tuple(Exchange(request, size) for request, size in with_sizes.items() if size)
        node.engine.plan_moves.carry_out(StepPlan(exchanges=exchanges), 0.0)
        for request, size in with_sizes.items():
            if not size and request.hot_capacity and not request.is_filling:
                fill_pages(node, request, at_once=next(at_once))
    return num_exchanges


@dataclass
class Calls:
    """What was done with a node's steps and requests, in order."""

    all: list[tuple[str, Any]] = field(default_factory=list)
    results: dict[int, list[StepResult]] = field(default_factory=dict)
    """Results by id of the step."""

    def watch(self, patch: pytest.MonkeyPatch, owner: Any, method: str, what: str) -> None:
        """Record calls of ``owner.method`` as ``what``, with their first argument, or the launched step."""
        call = getattr(owner, method)

        def watched(*args: Any, **options: Any) -> Any:
            if what != "launch":
                self.all.append((what, args[0]))
            result = call(*args, **options)
            if what == "launch":
                self.all.append((what, result))
            if what == "read":
                self.results[id(args[0])] = result
            return result

        patch.setattr(owner, method, watched)

    @property
    def steps(self) -> list[Launched]:
        return [of for what, of in self.all if what == "launch"]

    def at(self, what: str, of: object) -> int:
        """Return the place of the first such call in ``all``."""
        return next(at for at, (was, it) in enumerate(self.all) if was == what and it is of)

    def are_ahead(self) -> list[bool]:
        """Return for each step but the last whether the next one was launched before it was read."""
        return [self.at("launch", two) < self.at("read", one) for one, two in pairwise(self.steps)]
