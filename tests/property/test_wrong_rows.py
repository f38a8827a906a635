"""Any history of a decode node whose memory is damaged: no token is made of a row that is not what was
written, nobody else is harmed, and nobody gets the page again.

Damaged are rows of the host pool, whoever has them; rows that land, before their request begins; pages of
held prefixes; hot buffers and dense pages in use. The last two are verified now and then, or once: there a
wrong token may come, and only for those who read such a row.
"""

from __future__ import annotations

import random
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from hisparse_pd.base.vocabulary import KV_ROW_CORRUPT, HisparseFlag, Mode
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.pools import PoolKind, SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.decode_node import scrub
from hisparse_pd.decode_node.memory import pages_tensor, slots_tensor
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState, RunStage
from hisparse_pd.decode_node.step_plan import Exchange, Fill, StepPlan
from hisparse_pd.engine.messages import RequestFailed, Tokens
from tests.examples import num_examples
from tests.property.row_reader import (
    CONTEXT,
    PAGE_SIZE,
    WRONG,
    Node,
    need_of_exchange,
    right_tokens,
    spec_of,
)

pytestmark = [pytest.mark.I2, pytest.mark.I9]

PLACE = re.compile(r"layer (\d+), position (\d+), in slot (\d+) of the (host|device) pool")
LAYER = st.integers(0, 2)
HOW = st.sampled_from(["bit", "zeros", "stale", "swapped", "half", "layer"])
MAX_TURNS = 300
"""Most turns until all requests have ended, once all pages are good."""


class WrongRowsMachine(RuleBasedStateMachine):
    spec: ModelSpec

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        is_behind=st.booleans(),
        num_index_slots=st.sampled_from([None, 80]),
    )
    def start(self, seed: int, is_behind: bool, num_index_slots: int | None) -> None:
        """In some histories, checks of held prefixes move to main memory and back, because the index pool is
        short."""
        self.random = random.Random(seed)
        self.node = Node(self.spec, seed, is_behind=is_behind, num_index_slots=num_index_slots)
        self.requests, self.memory = self.node.requests, self.node.memory
        self.said: list[tuple[int, ...]] = [()]
        self.wanted: dict[str, list[int]] = {}
        self.given: dict[str, list[int]] = {}
        self.damaged: set[tuple[PoolKind, int, int]] = set()
        """Pool, layer and slot."""
        self.may_be_wrong: set[str] = set()
        """Requests that have read what is not verified whenever it is read."""
        self.owners: dict[tuple[PoolKind, int], set[Request]] = {}
        """The requests that had each page that is set aside, when its wrong row was found."""
        self.node.set_aside = self.note_owners

    def note_owners(self, kind: PoolKind, start: int) -> None:
        page = kind, start
        self.owners.setdefault(page, {each for each in self.admitted() if page in self.pages_of(each)})

    def pool(self, kind: PoolKind) -> Tensor:
        return self.memory.k_host if kind is PoolKind.HOST else self.memory.k_dev

    def of(self, *states: RequestState) -> list[Request]:
        return self.requests.select(*states)

    def next_batch(self, *modes: Mode) -> list[Request]:
        running = self.of(RequestState.RUNNING)
        return [each for each in running if each.run_stage is RunStage.READY and each.mode in modes]

    def turn(self) -> None:
        self.node.turn()
        for message in self.node.sent:
            if isinstance(message, Tokens):
                self.given[message.request_id] += message.token_ids
            elif isinstance(message, RequestFailed):
                assert message.code == KV_ROW_CORRUPT, message.error
                self.check_is_damaged(message.error, self.tokens_of[message.request_id])
        self.node.sent.clear()

    @property
    def tokens_of(self) -> dict[str, list[int]]:
        """Prompts, and what was given behind them."""
        return {key: [*self.node.prompts[int(key)], *given] for key, given in self.given.items()}

    def check_is_damaged(self, error: str, token_ids: list[int]) -> None:
        found = PLACE.search(error)
        assert found, error
        layer, position, slot = map(int, found.groups()[:3])
        kind = PoolKind(found[4])
        if (kind, layer, slot) not in self.damaged:  # a dense row that was damaged, and spilled to the host
            slots = torch.full((position + 1,), slot)
            is_right = self.node.is_right(self.pool(kind), slots, token_ids[: position + 1])
            assert not is_right[layer, position], f"{error}: that row is as it was written"

    def admitted(self) -> list[Request]:
        states = RequestState.LANDING, RequestState.FETCHING, RequestState.RUNNING, RequestState.ENDING
        return self.of(*states)

    def pages_of(self, of: Request | Prefix) -> set[tuple[PoolKind, int]]:
        kinds = of.kinds if isinstance(of, Prefix) else tuple(PoolKind)
        return {
            (kind, slot)
            for kind in kinds
            if kind in (PoolKind.HOST, PoolKind.DEVICE)
            for slot in slots_tensor(of.extents(kind)).tolist()
            if slot % PAGE_SIZE == 0
        }

    # --- requests ---------------------------------------------------------------------------------

    @rule(num=st.integers(1, 3), flag=st.sampled_from(HisparseFlag))
    def arrive(self, num: int, flag: HisparseFlag) -> None:
        for _ in range(num):
            self.ask(flag)
        self.turn()

    def ask(self, flag: HisparseFlag) -> None:
        """A prompt that may begin like an earlier one."""
        prompt = [self.random.randrange(3) for _ in range(self.random.randint(1, 20))]
        token_ids = [*self.random.choice(self.said[-3:]), *prompt][: CONTEXT - 20]
        num_new = self.random.randint(2, 16)
        wanted = right_tokens(token_ids, num_new)
        key = str(self.node.generate(token_ids, num_new, flag))
        self.wanted[key], self.given[key] = wanted, []
        self.said.append((*token_ids, *wanted))

    def awaited(self) -> list[Request]:
        """The LANDING requests that the prefill node has heard of."""
        return [r for r in self.of(RequestState.LANDING) if r.room in self.node.peers.bootstraps]

    @rule(num_turns=st.integers(2, 8))
    def run(self, num_turns: int) -> None:
        """Whoever is awaited lands."""
        for _ in range(num_turns):
            for request in self.awaited():
                self.node.write(request)
                self.node.say_done(request)
            self.turn()

    def run_to_the_end(self) -> None:
        """Run all requests to their end, and give pages back where somebody would wait for them."""
        for num_turns in range(MAX_TURNS):
            if not self.requests:
                return
            self.run(1)
            if num_turns > MAX_TURNS // 2 and self.requests.set_aside:
                self.release_page()
        raise AssertionError("somebody starves")

    @precondition(lambda self: self.awaited())
    @rule(how=st.sampled_from(["bit", "not all", "nothing", "layers", "no checks"]), layer=LAYER)
    def land_damaged(self, how: str, layer: int) -> None:
        """``layers``: those that were mixed up have checks that were mixed up alike."""
        request = self.random.choice(self.awaited())
        kind, num_layers = request.kv_pools[0], self.spec.num_kv_layers
        pool, checks = self.pool(kind), self.memory.row_checks
        before, checks_before = pool.clone(), None if checks is None else checks.clone()
        bootstrap = self.node.write(request)
        slots, check_slots = map(slots_tensor, (bootstrap.kv_extents, bootstrap.index_extents))
        first = self.random.randrange(len(slots))
        match how:
            case "bit":
                pool[layer, slots[first], first % self.spec.item_bytes] ^= 1 << first % 8
            case "not all":
                pool[layer, slots[first:]] = before[layer, slots[first:]]
            case "layers":
                pool[layer, slots] = pool[(layer + 1) % num_layers, slots]
                if checks is not None:
                    checks[layer, check_slots] = checks[(layer + 1) % num_layers, check_slots]
            case "no checks" | "nothing":
                if how == "nothing":
                    pool[:, slots[first:]] = before[:, slots[first:]]
                if checks is not None and checks_before is not None:
                    checks[:, check_slots[first:]] = checks_before[:, check_slots[first:]]
        self.damaged |= {(kind, each, slot) for slot in slots.tolist() for each in range(num_layers)}
        self.node.say_done(request)
        self.run(3)

    @precondition(lambda self: self.requests.all())
    @rule()
    def leave(self) -> None:
        request = self.random.choice(self.requests.all())
        self.node.leave(request)
        self.turn()

    @precondition(lambda self: self.of(RequestState.RUNNING))
    @rule(is_large=st.booleans())
    def exchange(self, is_large: bool) -> None:
        """Another hot buffer, or the first one of a dense request."""
        self.node.steps.settle()
        if not (running := self.next_batch(*Mode)):
            return
        request, limits = self.random.choice(running), self.node.limits
        capacity = (limits.max_capacity if is_large else limits.min_capacity)(request)
        need, room = need_of_exchange(request, capacity, limits.page_size)
        if self.requests.pools.rounded(room).fits_in(self.requests.available):
            self.node.plan_moves.carry_out(StepPlan(exchanges=(Exchange(request, capacity, need),)), 0.0)
        self.turn()

    @precondition(lambda self: self.of(RequestState.RUNNING))
    @rule(num_turns=st.integers(1, 8))
    def fill_pages(self, num_turns: int) -> None:
        """Pages for all tokens of requests with a hot buffer, which are filled beside their steps."""
        limits = self.node.limits
        for request in self.next_batch(Mode.HISPARSE):
            if request.hot_capacity and not request.num_page_slots:
                num_slots = limits.in_pages(request.next_seq_len + limits.max_drafts + limits.growth_tokens)
                if SlotCounts(device=num_slots).fits_in(self.requests.available):
                    fill = Fill(request, num_slots, num_resident_pages=0)
                    self.node.plan_moves.carry_out(StepPlan(fills=(fill,)), 0.0)
        self.run(num_turns)

    # --- damage -----------------------------------------------------------------------------------

    def damage(self, kind: PoolKind, layer: int, slots: Tensor, how: str) -> None:
        """A row of one of ``slots``."""
        pool = self.pool(kind)
        slot, other = (int(self.random.choice(slots.tolist())) for _ in range(2))
        item, num_bytes = pool[layer, slot], self.spec.item_bytes
        match how:
            case "bit":
                item[self.random.randrange(num_bytes)] ^= 1 << self.random.randrange(8)
            case "zeros":
                item.zero_()
            case "stale":
                item.copy_(pool[layer, other])
            case "swapped":
                pool[layer, [slot, other]] = pool[layer, [other, slot]]
                self.damaged.add((kind, layer, other))
            case "half":
                item[: num_bytes // 2] = pool[layer, other, : num_bytes // 2]
            case "layer":
                item.copy_(pool[(layer + 1) % len(pool), slot])
        self.damaged.add((kind, layer, slot))

    def slots_in_use(self, kind: PoolKind) -> Tensor:
        """Return the slots of running requests and held prefixes."""
        of: list[Any] = [*self.of(RequestState.RUNNING), *self.requests.held]
        parts = [slots_tensor(each.extents(kind)) for each in of if kind in getattr(each, "kinds", (kind,))]
        slots: Tensor = torch.cat([*parts, torch.empty(0, dtype=torch.int64)]).unique()
        return slots

    @precondition(lambda self: self.slots_in_use(PoolKind.HOST).numel())
    @rule(layer=LAYER, how=HOW, num=st.sampled_from([1, 5, 20]))
    def damage_host_rows(self, layer: int, how: str, num: int) -> None:
        slots = self.slots_in_use(PoolKind.HOST)
        for _ in range(num):
            self.damage(PoolKind.HOST, layer, slots, how)
        self.run(2)

    @precondition(lambda self: self.slots_in_use(PoolKind.DEVICE).numel())
    @rule(layer=LAYER, how=HOW, is_in_use=st.sampled_from([False, False, True]))
    def damage_device_rows(self, layer: int, how: str, is_in_use: bool) -> None:
        """Damage rows of an unused prefix, which the next request finds, or of rows in use.

        Dense rows in use are not verified again, hot ones are in turn.
        """
        slots = self.slots_in_use(PoolKind.DEVICE)
        used_by = {
            request: slots_tensor(request.extents(PoolKind.DEVICE))
            for request in self.of(RequestState.RUNNING, RequestState.ENDING)
        }
        if not is_in_use:
            slots = slots[~torch.isin(slots, torch.cat([*used_by.values(), slots[:0]]))]
        if not len(slots):
            return
        before = self.pool(PoolKind.DEVICE)[layer].clone()
        self.damage(PoolKind.DEVICE, layer, slots, how)
        changed = (self.pool(PoolKind.DEVICE)[layer] != before).any(dim=1).nonzero()[:, 0]
        self.may_be_wrong |= {
            request.request_id for request, its in used_by.items() if torch.isin(changed, its).any()
        }

    @rule()
    def damage_a_hot_row(self) -> None:
        """It is found in as many looks as there are hot buffers, unless another row takes its place."""
        self.ask(HisparseFlag.TRUE)
        self.run(4)
        self.node.steps.settle()
        hot = self.next_batch(Mode.HISPARSE)
        if not hot:
            return
        request, state = self.random.choice(hot), self.node.tables.state
        group = self.random.randrange(self.spec.num_hot_groups)
        page_ids = pages_tensor(request.extents(PoolKind.LOOKUP), PAGE_SIZE)
        slots = state.entry_slots(request.req_row)
        entries = state.hot_to_lookup[group, slots].tolist()
        places = {
            int(page) * PAGE_SIZE + i: number * PAGE_SIZE + i
            for number, page in enumerate(page_ids)
            for i in range(4)
        }
        standing = [e for e, at in enumerate(entries) if places.get(at, CONTEXT) < request.num_kv_tokens]
        if not standing:
            return
        entry = self.random.choice(standing)
        slot = int(slots[entry])
        layer = self.random.choice(self.spec.kv_layers_of_hot_group[group])
        self.pool(PoolKind.DEVICE)[layer, slot, 0] ^= 1
        self.damaged.add((PoolKind.DEVICE, layer, slot))
        self.may_be_wrong.add(request.request_id)
        wrong = self.pool(PoolKind.DEVICE)[layer, slot].clone()
        with patch.object(scrub, "STEPS_BETWEEN", 1):
            for _ in range(len(hot) * self.spec.num_hot_groups + 2):
                if len(self.next_batch(Mode.HISPARSE)) != len(hot):
                    return  # its turn may be another time
                self.turn()
        if request.state is RequestState.RUNNING and request.hot_capacity > entry:
            slot = int(state.entry_slots(request.req_row)[entry])
            is_same = state.hot_to_lookup[group, slot] == entries[entry]
            item = self.pool(PoolKind.DEVICE)[layer, slot]
            assert not (is_same and torch.equal(item, wrong)), "a hot row is wrong, and was not found"

    @rule()
    def go_through_what_is_held(self) -> None:
        """In idle turns, when all have ended; afterwards nobody finds a row that is wrong."""
        self.run_to_the_end()
        for _ in range(2 + 2 * len(self.requests.held)):
            self.turn()
        for prefix in self.requests.held:
            if not prefix.is_dropped:
                self.check_held(prefix)

    def check_held(self, prefix: Prefix) -> None:
        kind = prefix.kinds[0]
        slots = slots_tensor(prefix.extents(kind))
        stored = self.pool(kind)[0, slots].view(torch.float32)
        positions = torch.arange(len(slots))
        truth = self.node.model.truth[0, positions]
        token_ids = (truth == stored[:, None]).all(dim=-1).int().argmax(dim=1)
        assert self.node.is_right(self.pool(kind), slots, token_ids.tolist()).all()

    @rule(dice=st.integers(0, 3))
    def flush(self, dice: int) -> None:
        if dice == 0:
            self.requests.held.flush()

    @precondition(lambda self: self.requests.set_aside)
    @rule()
    def release_page(self) -> None:
        page = self.random.choice(self.requests.set_aside.shown())
        self.requests.set_aside.give_back(page.pool, page.start)
        del self.owners[page.pool, page.start]

    # --- what holds -------------------------------------------------------------------------------

    @invariant()
    def no_token_is_made_of_a_wrong_row(self) -> None:
        for key, given in getattr(self, "given", {}).items():
            if key not in self.may_be_wrong:
                assert WRONG not in given, f"request {key} read a wrong row"
                assert given == self.wanted[key][: len(given)]

    @invariant()
    def nobody_gets_a_page_that_is_set_aside(self) -> None:
        if not hasattr(self, "node"):
            return
        for request in self.admitted():
            for page in self.pages_of(request) & self.owners.keys():
                assert request in self.owners[page], f"room {request.room} got {page}"
        for prefix in self.requests.held:
            assert prefix.is_dropped or not self.pages_of(prefix) & self.owners.keys()

    def teardown(self) -> None:
        """With all pages given back, everybody who is left ends, and all memory is whole and good."""
        if not hasattr(self, "node"):
            return
        try:
            self.run_to_the_end()
            for page in self.requests.set_aside.shown():
                self.requests.set_aside.give_back(page.pool, page.start)
            self.requests.settle_copies()
            self.requests.held.flush()
            assert self.requests.pools.free == self.requests.pools.totals
            self.no_token_is_made_of_a_wrong_row()
        finally:
            self.node.close()


@pytest.mark.parametrize("num_draft_layers", [0, 1], ids=["plain", "drafts"])
def test_any_history_with_damage(num_draft_layers: int) -> None:
    class Machine(WrongRowsMachine):
        spec = spec_of(num_draft_layers)

    case = Machine.TestCase
    case.settings = settings(
        max_examples=num_examples(1, 12),
        stateful_step_count=25,
        derandomize=True,
        phases=[Phase.generate],  # to shrink takes minutes
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()
