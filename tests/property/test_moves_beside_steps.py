"""Any history of a decode node whose requests get and give up slots beside steps of others: tokens are
those of a request alone, and nothing that a step in flight may use is free. Moves fail, and end one request.

Whatever is given up is another's at once: its bytes are lost. The step in flight runs before that or behind
it (``late_steps.py``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import pytest

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.core.paging.pools import PoolKind, SlotCounts
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.runner import Launched
from hisparse_pd.decode_node.step_plan import Exchange, Fill, StepPlan
from hisparse_pd.engine.lockstep import NodeStep
from hisparse_pd.engine.messages import RequestFailed, Tokens
from hisparse_pd.protocol.messages import Extent, Room
from tests.examples import num_examples
from tests.property.late_steps import LateSteps
from tests.property.row_reader import CONTEXT, PAGE_SIZE, Node, need_of_exchange, right_tokens, spec_of
from tests.unit.kernels.table_rules import check_consistency

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I5]

MAY_FAIL: Final = ("resize", "retract", "grow", "enter_hot_buffer", "enter_pages", "start_pages", "start")
TOKEN_POOLS: Final = (PoolKind.HOST, PoolKind.DEVICE, PoolKind.INDEX, PoolKind.LOOKUP)
NUM_TURNS: Final = 80
MAX_TURNS: Final = 300
"""Most turns until all requests have ended, when no more arrive."""


class History:
    """A node to which everything happens at random."""

    def __init__(self, num_draft_layers: int, seed: int) -> None:
        self.random = random.Random(seed)
        num_index_slots = self.random.choice([None, 80])
        self.has_few_index_slots = num_index_slots is not None
        self.node = Node(
            spec_of(num_draft_layers),
            seed,
            is_behind=True,
            num_index_slots=num_index_slots,
            num_device_slots=self.random.choice([64, 128]),
            more_entries=20,
        )
        self.requests, self.steps = self.node.requests, self.node.steps
        self.wanted: list[tuple[Request, float]] = []
        """Requests that the next plan gives another hot buffer of a size between 0 and 1, or pages for 1."""
        self.fails: tuple[str, bool] | None = None
        """The move that fails when it is made next, and whether it has done everything by then."""
        self.num_kept = 0
        """How often rows cannot be emptied."""
        self.failed: set[str] = set()
        self.answers: dict[str, list[int]] = {}
        self.given: dict[str, list[int]] = {}
        self.said: list[tuple[int, ...]] = [()]
        self.used_by: dict[Launched, set[tuple[PoolKind, int]]] = {}
        """The slots that each step in flight may use."""
        self.num = Counter[str]()

    @contextmanager
    def watched(self) -> Iterator[None]:
        steps, pools, plan_moves = self.steps, self.requests.pools, self.node.plan_moves
        self.make, self.launch, self.free = steps.next_plan.make, steps.launch, pools._free
        self.carry_out, self.release = plan_moves.carry_out, self.node.tables.release
        result = Launched.result

        def read(launched: Launched) -> Any:
            try:
                return result(launched)
            finally:
                del self.used_by[launched]

        late = LateSteps(steps.runner, lambda: self.random.random() < 0.7)
        try:
            with late.patches:
                for owner, name, function in (
                    (steps.next_plan, "make", self.planned),
                    (steps, "launch", self.launched),
                    (pools, "_free", self.freed),
                    (plan_moves, "carry_out", self.carried_out),
                    (Launched, "result", read),
                    (Launched, "__hash__", object.__hash__),
                    (self.node.tables, "release", self.released),
                    *((self.node.tables, name, self.failing(name)) for name in MAY_FAIL),
                ):
                    late.patches.enter_context(patch.object(owner, name, function))
                yield
            self.num["late"] += late.num_late
        finally:
            self.node.close()

    # --- what the node does, with what is watched ---------------------------------------------------

    def planned(self, now: float) -> StepPlan:
        """Add exchanges and fills to a plan that has none. Sometimes they are others than a moment ago."""
        plan, limits = self.make(now), self.node.limits
        if plan.exchanges or plan.admissions or plan.no_longer_local:
            return plan
        if self.wanted and self.random.random() < 0.2:
            self.want()
        free = self.requests.available
        for growth in plan.growths:
            free -= self.requests.pools.rounded(growth.need)
        exchanges: list[Exchange] = []
        fills: list[Fill] = []
        for request, size in self.wanted:
            if request.state is not RequestState.RUNNING or not request.has_next_step or request.is_filling:
                continue
            least, most = limits.min_capacity(request), limits.max_capacity(request)
            capacity = least + int(size * (most - least))
            fills_pages = size == 1 and request.hot_capacity and not request.num_page_slots
            if fills_pages:
                num_slots = limits.resident_slots(request, 0)
                room = SlotCounts(device=num_slots)
            elif capacity != request.hot_capacity:
                need, room = need_of_exchange(request, capacity, PAGE_SIZE)
            else:
                continue
            room = self.requests.pools.rounded(room)
            # Copies of shared keys, on which no plan has counted, could leave no way to end in a short pool.
            is_risky = not fills_pages and need.index > 0 and self.has_few_index_slots
            if is_risky or not room.fits_in(free):
                continue
            free -= room
            if fills_pages:
                fills.append(Fill(request, num_slots, num_resident_pages=0))
            else:
                exchanges.append(Exchange(request, capacity, need))
        return replace(plan, exchanges=tuple(exchanges), fills=(*plan.fills, *fills))

    def carried_out(self, plan: StepPlan, now: float) -> None:
        if plan.exchanges and self.steps.in_flight is not None:
            self.num["exchanges beside a step"] += len(plan.exchanges)
        self.num["fills"] += len(plan.fills)
        self.wanted = []
        self.carry_out(plan, now)

    def launched(self, batch: list[Request], step: NodeStep) -> Launched | None:
        launched = self.launch(batch, step)
        if launched is not None:
            self.used_by[launched] = {
                (kind, slot)
                for request in batch
                for kind in TOKEN_POOLS
                for slot in slots_tensor(request.extents(kind)).tolist()
            }
        return launched

    def freed(self, room: Room, kind: PoolKind, extents: tuple[Extent, ...]) -> None:
        """Lose what is in slots that become free, and check that no step in flight may use one."""
        slots, memory = slots_tensor(extents), self.node.memory
        for used in self.used_by.values():
            is_used = [slot for slot in slots.tolist() if (kind, slot) in used]
            assert not is_used, f"room {room} gives up {kind} slots {is_used} of a step in flight"
        if kind is PoolKind.HOST:
            memory.k_host[:, slots] = 0xFF
        elif kind is PoolKind.DEVICE:
            memory.k_dev[:, slots] = 0xFF
        elif kind is PoolKind.INDEX and memory.row_checks is not None:
            memory.row_checks[:, slots] = -1
        self.free(room, kind, extents)

    def failing(self, name: str) -> Callable[..., None]:
        """Return the move that fails if it is the one of ``fails``."""
        move = getattr(self.node.tables, name)

        def moved(request: Request, *args: Any, **options: Any) -> None:
            if self.fails is None or self.fails[0] != name:
                move(request, *args, **options)
                return
            has_done_it, self.fails = self.fails[1], None
            if has_done_it:
                move(request, *args, **options)
            self.failed.add(request.request_id)
            self.num_kept = self.random.choice([0, 0, 1, 2])
            self.num["failures beside a step"] += self.steps.in_flight is not None
            raise RuntimeError("no memory")

        return moved

    def released(self, *requests: Request) -> None:
        if self.num_kept:
            self.num_kept -= 1
            self.failed |= {each.request_id for each in requests if each.state is RequestState.RUNNING}
            raise RuntimeError("no memory")
        self.release(*requests)

    # --- what happens -------------------------------------------------------------------------------

    def want(self) -> None:
        running = self.requests.select(RequestState.RUNNING)
        some: Sequence[Request] = self.random.sample(running, min(len(running), self.random.randint(1, 3)))
        self.wanted = [(request, self.random.choice([0, self.random.random(), 1])) for request in some]

    def ask(self) -> None:
        prompt = [self.random.randrange(3) for _ in range(self.random.randint(1, 20))]
        token_ids = [*self.random.choice(self.said[-3:]), *prompt][: CONTEXT - 20]
        num_new = self.random.randint(2, 20)
        key = str(self.node.generate(token_ids, num_new, self.random.choice(list(HisparseFlag))))
        self.answers[key], self.given[key] = right_tokens(token_ids, num_new), []
        self.said.append((*token_ids, *self.answers[key]))

    def turn(self) -> None:
        for request in self.requests.select(RequestState.LANDING):
            if request.room in self.node.peers.bootstraps and self.random.random() < 0.7:
                self.node.write(request)
                self.node.say_done(request)
        self.node.turn()
        check_consistency(self.node.tables.state)
        for message in self.node.sent:
            if isinstance(message, Tokens):
                self.given[message.request_id] += message.token_ids
            elif isinstance(message, RequestFailed):
                assert message.request_id in self.failed, message.error
        self.node.sent.clear()
        for key, given in self.given.items():
            assert given == self.answers[key][: len(given)], f"request {key} read a wrong row"

    def happen(self) -> None:
        dice = self.random.random()
        if dice < 0.4 and len(self.requests.all()) < 8:
            self.ask()
        elif dice < 0.43 and (everyone := self.requests.all()):
            self.node.leave(self.random.choice(everyone))
        elif dice < 0.53:
            self.fails = self.random.choice(MAY_FAIL), self.random.random() < 0.5
        if dice > 0.3:
            self.want()
        self.turn()

    def end(self) -> None:
        """Nothing more happens: all end, and all memory is whole."""
        self.wanted, self.fails = [], None
        for _ in range(MAX_TURNS):
            if not self.requests:
                break
            self.turn()
        assert not self.requests, "somebody starves"
        self.requests.settle_copies()
        self.requests.held.flush()
        assert self.requests.pools.free == self.requests.pools.totals


@pytest.mark.parametrize("num_draft_layers", [0, 1], ids=["plain", "drafts"])
def test_any_history_of_moves_beside_steps(num_draft_layers: int) -> None:
    num = Counter[str]()
    for seed in range(num_examples(2, 60)):
        history = History(num_draft_layers, seed)
        with history.watched():
            for _ in range(NUM_TURNS):
                history.happen()
            history.end()
        num += history.num
    for what in ("late", "exchanges beside a step", "fills", "failures beside a step"):
        assert num[what] > 0, what
