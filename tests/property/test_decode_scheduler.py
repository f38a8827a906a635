"""Requests through admission, growth, exchange, finish, abort and every way a transfer or a peer can fail.

The machine plays the front, the prefill nodes and the clock against the real books and the real planner.
Whoever fits beside slots that may never come back overtakes those who do not.
After each step every pool is whole (I2), no slot that a prefill node may still write to belongs to anybody
else (I1), everybody can still end, somebody comes nearer to it, and nobody has lost a slot of what it
computed. Answers mostly end long before their max_new_tokens, which nobody knows beforehand.

In some histories the index pool is always short, and held prefixes move to main memory and back, by copies
that take their time, and so do pages that dense requests leave. What a pool has of a held page is always what
was written there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.extents import extents_to_slots, slice_extents
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import is_on_its_way
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, PromptKeys
from hisparse_pd.decode_node import scheduler
from hisparse_pd.decode_node.held_matches import num_shareable_pages
from hisparse_pd.decode_node.limits import Limits, refusal
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.local_kv import copy_source, local_modes
from hisparse_pd.decode_node.miss_cost import CHEAP, MissCost
from hisparse_pd.decode_node.next_plan import NextPlan
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.plan_draft import PlanDraft
from hisparse_pd.decode_node.quarantine import Quarantined
from hisparse_pd.decode_node.request import KV_POOLS, Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.reserve import Claim, Reserve, order_ends
from hisparse_pd.decode_node.step_plan import Exchange, StepPlan
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import Extent, Room
from tests.books import carry_out, end, enqueue, make_request
from tests.examples import num_examples
from tests.slow_copies import SlowCopies

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I4, pytest.mark.I6, pytest.mark.I7]

PAGE_SIZE = 4
QUARANTINE_SECS = 10.0
INDEX_TOPK = 6
TOTALS = SlotCounts(host=90, device=48, index=112, lookup=132, aux=12, req_row=6)
ROOMY = structs.replace(TOTALS, host=240, device=128, index=300, lookup=360)
"""Pools in which several requests become resident beside others."""
LIMITS = Limits(
    totals=TOTALS,
    page_size=PAGE_SIZE,
    max_context=64,
    index_topk=INDEX_TOPK,
    device_buffer_size=16,
    growth_tokens=6,
)
PRESENT_COST = MissCost(missed_entries=500.0, miss_secs=1.0, request_secs=200.0)
"""A cost at which hisparse pays while hot buffers have some entries."""
HIGH_COST = MissCost(missed_entries=500.0, miss_secs=1.0, request_secs=1.0)
"""A cost at which it never pays."""
STEPS_COST = MissCost(
    missed_entries=500.0, miss_secs=0.1, request_secs=200.0, fixed_secs=2.0, growth_secs=0.1
)
"""A cost at which it pays, and few dense requests make more tokens than many hisparse ones."""
STALE_COST = replace(STEPS_COST, is_stale=True)
"""A cost that is not known any more: the first request that lacks room for pages gets a hot buffer."""
PEERS = [PeerAddress("prefill", 1), PeerAddress("prefill", 2)]
Arrival = tuple[HisparseFlag, int, int, int, PeerAddress, str, int | None, int]
ARRIVALS = st.tuples(
    st.sampled_from([HisparseFlag.FALSE, *HisparseFlag]),
    st.sampled_from([1, 3, 4, 5, 9, 16, 17, 22]),
    st.sampled_from([1, 2, 8, 16, 23, 68]),
    st.sampled_from([1, 2, 5, 12, 30, 68]),
    st.sampled_from(PEERS),
    st.sampled_from(["", "", "page sizes differ"]),
    st.sampled_from([None, 0, 0, 1]),
    st.sampled_from([1, 1, 2, 3]),
)
NUM_FAMILY_PAGES = 4
"""Pages that the prompts of one family share where requests leave them while others come."""
SlotsByKind = dict[PoolKind, tuple[Extent, ...]]


def remote_slots(request: Request) -> SlotsByKind:
    """Return the slots behind the held beginning of the request's prompt."""
    start, stop = request.held_prefix_tokens, request.num_prompt_tokens
    behind = {kind: slice_extents(request.extents(kind), start, stop) for kind in request.kv_pools}
    return {**behind, PoolKind.AUX: request.owned[PoolKind.AUX]}


def slots_of(request: Request) -> dict[PoolKind, list[int]]:
    """Return the slots of every position, in the pools of its KV and its indexer keys."""
    return {kind: extents_to_slots(request.extents(kind)).tolist() for kind in request.kv_pools}


def names_of(keys: Sequence[PageKey]) -> list[tuple[PageKey, int]]:
    """Return names for the bytes of the tokens of pages, which are the same wherever these lie."""
    return [(key, number) for key in keys for number in range(PAGE_SIZE)]


class Loss(Enum):
    """What becomes of held pages."""

    FLUSHED = auto()
    """What is unused is evicted: requests that lacked nothing may lack it now."""
    WRONG = auto()
    """A row is found wrong, and nobody finds its page any more, or those behind it."""


class DecodeNodeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.copies = SlowCopies()
        self.choose(0, keeps_residents=False)
        self.now = 0.0
        self.num_arrived = 0
        self.writable: dict[Room, SlotsByKind] = {}
        """What prefill nodes, or bytes that are still in the transport, may write."""
        self.lands_until: dict[Room, float] = {}
        """Rooms that are over for the prefill node, and when their last bytes may land."""
        self.failed_batches: set[Room] = set()
        self.resident_items: dict[int, tuple[object, int]] = {}
        """By device slot the item that a request has there in its pages: of which prompt, or room, and
        where."""
        self.filled: dict[Request, int] = {}
        """The positions, from 0 on, that are in the pages of requests that become resident."""
        self.stops_after: dict[Room, int] = {}
        """Output tokens, of which the last one is a stop token, unless max_new_tokens come first."""

    @initialize(
        max_drafts=st.sampled_from([0, 3]),
        keeps_residents=st.booleans(),
        largest_hot_buffer=st.sampled_from([0, 24]),
        num_index_slots=st.sampled_from([0, 40, 60, 100]),
        miss_cost=st.sampled_from([CHEAP, PRESENT_COST, HIGH_COST, STEPS_COST, STALE_COST]),
        fill_tokens=st.sampled_from([0, 40]),
        totals=st.sampled_from([TOTALS, ROOMY]),
    )
    def choose(
        self,
        max_drafts: int,
        *,
        keeps_residents: bool,
        largest_hot_buffer: int = 0,
        num_index_slots: int = 0,
        miss_cost: MissCost = CHEAP,
        fill_tokens: int = 0,
        totals: SlotCounts = TOTALS,
    ) -> None:
        """With drafts, the steps of requests verify some, where these have slots. Requests may get more of
        what is free than hot buffers of the full size. ``num_index_slots``: of an index pool that is short,
        with main memory below it; 0: it is not, and has none below."""
        totals = structs.replace(totals, index=num_index_slots or totals.index)
        copies = self.copies if num_index_slots else None
        self.rooms = LiveRequests(Pools(totals, PAGE_SIZE), QUARANTINE_SECS, copies)
        self.limits = replace(
            LIMITS,
            totals=totals,
            max_drafts=max_drafts,
            keeps_residents=keeps_residents,
            fill_tokens=fill_tokens,
            largest_hot_buffer=largest_hot_buffer,
        )
        self.miss_cost = miss_cost
        self.next_plan = self._new_plans()

    def _new_plans(self) -> NextPlan:
        plans = NextPlan(self.limits, self.rooms)
        plans.miss_cost = self.miss_cost
        return plans

    # --- front ------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=6))
    def arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self._arrive(*arrival)
        self.step()

    def _arrive(
        self,
        flag: HisparseFlag,
        num_prompt_tokens: int,
        max_new_tokens: int,
        stops_after: int,
        peer: PeerAddress,
        dense_refusal: str,
        family: int | None,
        num_samples: int,
    ) -> None:
        """``family``: of its prompt, the tokens of one are all alike; None: nothing is held for it."""
        prompt = None if family is None else pack_token_ids([family] * num_prompt_tokens)
        first = None
        for _ in range(num_samples):
            self.num_arrived += 1
            over = [each.room for each in self.rooms.select(RequestState.ENDING)]
            room = next((room for room in over if self.rooms.get(room) is None), Room(self.num_arrived))
            request = make_request(
                room,
                num_prompt_tokens,
                min(max_new_tokens, self.limits.max_context + 1 - num_prompt_tokens),
                flag,
                peer,
                self.now,
                request_id=str(self.num_arrived),
                dense_refusal=dense_refusal,
                prompt_keys=None if prompt is None else PromptKeys.of(NO_ISOLATION, prompt, PAGE_SIZE),
                first_sample=first,
            )
            if not refusal(self.limits, request):
                is_local = bool(self._local_modes(request))
                if is_local:
                    request.dense_refusal = ""  # as ``QueueMoves.wait_locally`` does
                enqueue(self.rooms, request, float("inf"), is_local=is_local)
                self.stops_after[request.room] = stops_after
                if first is not None:
                    first.has_further_samples = True
                first = first or request

    def _local_modes(self, request: Request) -> list[Mode]:
        def num_held(mode: Mode) -> int:
            return num_shareable_pages(self.rooms.held, request.usable_keys, mode) * PAGE_SIZE

        return local_modes(request, self.limits, num_held)

    @precondition(lambda self: self.limits.totals.index < TOTALS.index)
    @rule(
        families=st.lists(st.integers(0, 4), min_size=2, max_size=6),
        flags=st.lists(st.sampled_from([HisparseFlag.TRUE, *HisparseFlag]), min_size=6, max_size=6),
    )
    def turns_of_conversations(self, families: list[int], flags: list[HisparseFlag]) -> None:
        """One after the other, so that held prefixes move down and are asked for again, in either mode."""
        for family, flag in zip(families, flags, strict=False):
            self._arrive(flag, 17, 2, 2, PEERS[0], "", family, 1)
            self.steps_and_deliveries(3)

    @precondition(lambda self: self.limits.totals.index < TOTALS.index)
    @rule(
        families=st.permutations(range(5)),
        num_copied=st.sampled_from([0, 1, None, None]),
        of_family=st.sampled_from([None, 0, 0, 1]),
        late=st.lists(ARRIVALS, max_size=2),
    )
    def leave_what_main_memory_has(
        self, families: list[int], num_copied: int | None, of_family: int | None, late: list[Arrival]
    ) -> None:
        """Dense requests, whose conversations' last turns are in the host pool or on their way there, have
        filled the device pool when others come, which may share these turns."""
        for request in self.rooms.select(RequestState.RUNNING):
            self.end(request)
        for family in families:
            if self.rooms.available.device >= 24:
                self._arrive(HisparseFlag.FALSE, 17, 2, 2, PEERS[0], "", family, 1)
                self.steps_and_deliveries(2)
                self.copies.finish(num_copied)
                self._arrive(HisparseFlag.AUTO, 17, 8, 8, PEERS[0], "", family, 1)
                self.steps_and_deliveries(1)
        others = None if of_family is None else families[of_family]
        self._arrive(HisparseFlag.TRUE, 22, 8, 8, PEERS[0], "", others, 1)
        self.arrive(late) if late else self.step()

    @rule(family=st.integers(0, 4), loss=st.sampled_from(Loss))
    def lose_copies(self, family: int, loss: Loss) -> None:
        """Held pages of a conversation are lost while requests share them."""
        if loss is Loss.FLUSHED:
            self.rooms.held.flush()
            return
        tokens = pack_token_ids([family] * 2 * PAGE_SIZE)
        self.rooms.held.drop_copies(PromptKeys.of(NO_ISOLATION, tokens, PAGE_SIZE).keys[1])

    @precondition(lambda self: self.copies.under_way)
    @rule(most=st.integers(1, 4))
    def end_copies(self, most: int) -> None:
        self.copies.finish(most)

    @precondition(lambda self: self.landing())
    @rule(first=st.lists(ARRIVALS, min_size=1, max_size=3), later=ARRIVALS)
    def arrive_beside_stuck_slots(self, first: list[Arrival], later: Arrival) -> None:
        """Rooms are lost for good, and then some wait when another comes, with no change between."""
        for request in self.landing():
            self.end(request)
        self.pass_time(QUARANTINE_SECS)
        for request in self.rooms.select(RequestState.RUNNING):
            self.end(request)
        self.arrive(first)
        self.step()
        self.arrive([later])

    @rule(
        lengths=st.lists(st.sampled_from([16, 22, 40]), min_size=1, max_size=3),
        late=st.lists(ARRIVALS, min_size=1, max_size=3),
    )
    def fill_with_auto(self, lengths: list[int], late: list[Arrival]) -> None:
        """Nothing but requests of ``auto`` runs, which are dense as far as they fit, when others come."""
        for request in self.rooms.select(RequestState.RUNNING):
            self.end(request)
        for length in lengths:
            self._arrive(HisparseFlag.AUTO, length, 8, 8, PEERS[0], "", None, 1)
        self.step()
        for request in self.landing():
            self._start(request)
        self.arrive(late)

    @precondition(lambda self: self.limits.keeps_residents)
    @rule(
        families=st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=3),
        num_steps=st.integers(2, 14),
        late=st.lists(ARRIVALS, max_size=3),
    )
    def become_resident(self, families: list[int | None], num_steps: int, late: list[Arrival]) -> None:
        """Nothing but hisparse requests with much to draw runs, and their pages are filled, when others come
        or one of them ends."""
        for request in self.rooms.select(RequestState.RUNNING):
            self.end(request)
        for family in families:
            self._arrive(HisparseFlag.TRUE, 22, 30, 30, PEERS[0], "", family, 1)
        self.steps_and_deliveries(num_steps)
        filling = [r for r in self.rooms.select(RequestState.RUNNING) if r.num_page_slots]
        if late:
            self.arrive(late)
        elif filling:
            self.end(filling[0], is_sound=True)

    @precondition(lambda self: self.rooms.all())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.rooms.all())))

    # --- engine -----------------------------------------------------------------------------------

    @rule()
    def step(self) -> None:
        self.copies.finish(1)
        for request in self.rooms.fetched():
            self._run_first(request)
        self._end_fills()
        ending = self.rooms.select(RequestState.ENDING)
        waiting = [r for r in self.rooms.waiting() if not self._is_passed_over(r)]
        were_local = {request for request in waiting if request.is_local}
        plan, planned = self._make_plan()
        if waiting and plan == StepPlan():
            assert self._new_plans().make(self.now) == plan, "somebody who fits is forgotten"
        # Those that turn out not to be local leave the queue before anything else is done.
        waiting = [request for request in waiting if request not in plan.no_longer_local]
        before = {
            r.room: (r.mode, r.num_shared_pages * PAGE_SIZE, slots_of(r))
            for r in self.rooms.select(RequestState.RUNNING)
        }
        for exchange in plan.exchanges:
            assert exchange.request.mode is Mode.HISPARSE or exchange.request.may_leave_pages
            if exchange.request.mode is Mode.DENSE and exchange.request.has_slots_for_next:
                assert exchange.request.flag is HisparseFlag.AUTO
                is_for_others = self.miss_cost != CHEAP and not waiting
                assert plan.admissions or is_for_others, "it leaves its pages, and nobody comes"
            is_larger = 0 < exchange.request.hot_capacity < exchange.hot_capacity
            assert not (is_larger and waiting), "a hot buffer grows while somebody waits"
        for fill in plan.fills:
            assert not waiting, "one becomes resident while somebody waits"
            assert self.limits.keeps_residents
            assert fill.request.hot_capacity > 0
        kept = {exchange.request: self._kept_slots(exchange) for exchange in plan.exchanges}
        leaving = [each.request for each in plan.exchanges if each.request.mode is Mode.DENSE]
        for request in leaving:
            self._write_keys(request)
        carry_out(self.rooms, plan, float("inf"), self.limits, self.copies.retract)
        # Nothing counts on the copies that requests find in the host pool, for which they leave their pages.
        found_copies = any(request.prefix is not None for request in leaving)
        assert planned == self.rooms.available or (found_copies and planned.fits_in(self.rooms.available))
        for request in leaving:
            self._check_has_its_bytes(request)
        for request, slots in kept.items():
            assert extents_to_slots(request.owned[PoolKind.DEVICE]).tolist()[: len(slots)] == slots
        for fill in plan.fills:
            self.filled[fill.request] = fill.num_resident_pages * PAGE_SIZE
        admitted = [admission.request for admission in plan.admissions]
        sources = {
            request: copy_source(request, request.mode, request.held_prefix_tokens, PAGE_SIZE)
            for request in admitted
        }
        for request, source in sources.items():
            if source is None:
                self.writable[request.room] = remote_slots(request)
            else:
                self._check_can_copy(source, request)
        for request in were_local:
            if request in admitted:
                is_copied = sources[request] is not None
                assert is_copied or request.held_prefix_tokens == request.num_landing_tokens
        in_order = [r for r in waiting if r in admitted or not self._waits_for_first(r)]
        assert admitted == in_order[: len(admitted)]
        self._check_nothing_is_lost(before)
        for request, source in sources.items():
            if source is not None:
                self._start(request)
        if not (waiting or ending or plan.exchanges):  # what these give up is seen by the next plan
            self._check_hot_buffers_are_large()
        self._run_step(admitted=bool(plan.admissions))
        for request in ending:  # the step that was in flight is read
            self._write_keys(request)
            self.rooms.release(request, self.now)

    def _make_plan(self) -> tuple[StepPlan, SlotCounts]:
        """Return the next plan, and the slots that it leaves free."""
        drafts: list[PlanDraft] = []

        def note(*args: Any) -> PlanDraft:
            drafts.append(PlanDraft(*args))
            return drafts[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "PlanDraft", note)
            plan = self.next_plan.make(self.now)
        return plan, drafts[-1].available

    def _check_has_its_bytes(self, request: Request) -> None:
        """It reads nothing but what it had before it left its pages."""
        names = names_of(request.kept_keys(request.num_kv_tokens))
        for kind, slots in slots_of(request).items():
            assert [self.copies.of(kind).get(slot) for slot in slots[: len(names)]] == names, kind

    def _kept_slots(self, exchange: Exchange) -> list[int]:
        """Return the device slots that a request keeps, in the order of its hot buffer: the first ones that
        this has, or those of its last positions in its pages."""
        request, capacity = exchange.request, exchange.hot_capacity
        most = self.limits.in_pages(capacity)
        if request.hot_capacity:
            slots: list[int] = extents_to_slots(request.owned[PoolKind.DEVICE]).tolist()
            return slots[: min(most, request.num_device_slots - request.num_page_slots)]
        first = self.limits.first_kept(request, capacity)
        if first is None:
            assert request.num_shared_device_pages
            return []
        assert request.num_kv_tokens - first <= capacity - self.limits.max_drafts - 1
        slots = extents_to_slots(request.extents(PoolKind.DEVICE)).tolist()
        return slots[first : first + most]

    def _is_passed_over(self, request: Request) -> bool:
        """Whether it does not fit beside slots that may never be free again."""
        stuck = self.rooms.stuck(self.now)
        usable = replace(self.limits, totals=self.limits.totals - stuck)
        return stuck != SlotCounts() and bool(refusal(usable, request))

    def _waits_for_first(self, request: Request) -> bool:
        first = request.first_sample
        return first is not None and first.state in (RequestState.LANDING, RequestState.FETCHING)

    def _check_can_copy(self, source: Request, request: Request) -> None:
        """Both have slots for what is copied, each of its own, and nobody may write to either."""
        start, stop = request.held_prefix_tokens, request.num_landing_tokens
        for kind in request.kv_pools:
            src, dst = (slots_of(each)[kind][start:stop] for each in (source, request))
            assert len(src) == len(dst) == stop - start > 0
            assert not set(src) & set(dst)
            written = [extents_to_slots(slots.get(kind, ())).tolist() for slots in self.writable.values()]
            assert not {*src, *dst} & {*chain(*written)}

    def _check_nothing_is_lost(self, before: dict[Room, tuple[Mode, int, dict[PoolKind, list[int]]]]) -> None:
        for request in self.rooms.select(RequestState.RUNNING):
            mode, num_shared, slots = before[request.room]
            for kind, now in slots_of(request).items():
                if kind in slots and (request.mode is mode or kind is PoolKind.INDEX):
                    # One that has left its pages has slots of its own for copies of the shared ones' keys.
                    first, before_it = 0 if request.mode is mode else num_shared, slots[kind]
                    assert now[first : len(before_it)] == before_it[first:], "a position has lost its slot"
                    assert not set(now[:first]) & set(before_it), "keys are copied to slots that have some"

    def _check_hot_buffers_are_large(self) -> None:
        """As far as a hot buffer's slots stay free, and no page is wanted by dense requests."""
        running = [r for r in self.rooms.select(RequestState.RUNNING) if r.has_next_step]
        coming = self.rooms.select(RequestState.LANDING, RequestState.FETCHING)
        if any(r.mode is Mode.DENSE or not r.has_slots_for_next for r in (*running, *coming)):
            return
        spare = self.rooms.available.device - self.limits.in_pages(self.limits.device_buffer_size)
        for request in running:
            if 0 < request.hot_capacity < request.next_seq_len and not request.num_page_slots:
                gain = self.limits.in_pages(self.limits.max_capacity(request)) - request.num_device_slots
                assert gain <= 0 or spare < gain, "a hot buffer misses beside free slots"

    def _run_step(self, admitted: bool) -> None:
        running = [r for r in self.rooms.select(RequestState.RUNNING) if r.has_next_step]
        paused = [r for r in running if not r.has_slots_for_next]
        assert not (paused and admitted), "somebody is admitted to slots that another waits for"
        is_for_a_while = self.returning() or self.rooms.select(RequestState.ENDING) or self.copies.under_way
        assert not paused or len(paused) < len(running) or is_for_a_while, "nobody comes nearer to its end"
        for request in running:
            if request in paused:
                continue
            self._check_can_run(request)
            num_before = request.num_kv_tokens
            self._run(request)
            if request.state is not RequestState.RUNNING:
                continue
            if request.is_resident:
                self._fill_pages(request, num_before, request.num_kv_tokens)
                if request.room % 3:
                    min_own = self.limits.in_pages(self.limits.min_capacity(request))
                    self.rooms.share_resident(request, min_own)
            elif request.num_page_slots:  # a piece beside the step
                start = self.filled[request]
                self.filled[request] = min(start + 1 + 5 * (request.room % 4), request.num_filled_tokens)
                self._fill_pages(request, start, self.filled[request])

    def _end_fills(self) -> None:
        """Requests whose pages are filled become resident, with what their steps have written meanwhile."""
        for request in self.rooms.select(RequestState.RUNNING):
            if request.num_page_slots and self.filled[request] == request.num_filled_tokens:
                self._fill_pages(request, request.num_filled_tokens, request.num_kv_tokens)
                self.rooms.end_fill(request)

    def _fill_pages(self, request: Request, start: int, stop: int) -> None:
        """Write the items of the positions [start, stop) to a request's device pages."""
        slots = extents_to_slots(request.page_extents).tolist()
        for position in range(start, stop):
            self.resident_items[slots[position]] = self._item(request, position)

    def _item(self, request: Request, position: int) -> tuple[object, int]:
        keys = request.usable_keys
        page = position // PAGE_SIZE
        return (keys[page] if page < len(keys) else request.room), position

    def _run(self, request: Request) -> None:
        """A step, in which some of the drafts that have slots are accepted."""
        num_slots = min(request.reserved_tokens, self.limits.max_context) - request.next_seq_len
        num_drafts = min(self.limits.max_drafts, num_slots)
        for _ in range(1 + (request.room + len(request.output_token_ids)) % (1 + num_drafts)):
            request.output_token_ids.append(0)
            self._end_if_last(request)
            if request.state is not RequestState.RUNNING:
                return

    def returning(self) -> list[Quarantined]:
        """Slots that time alone frees: somebody may have counted on them before they were quarantined."""
        return [entry for entry in self.rooms.quarantine if not entry.is_unacknowledged]

    def being_copied(self) -> list[Holding]:
        """Slots of prefixes that copies alone use, which end by themselves."""
        users = chain(self.rooms.held_tier.users(), self.rooms.dense_tier.users())
        by_copies = Counter(run for prefix in users for run in prefix.chain())
        unused = [run.holding for run, num_users in by_copies.items() if run.num_users == num_users]
        return unused + self.rooms.dense_tier.landing

    def _end_if_last(self, request: Request) -> None:
        num_tokens = len(request.output_token_ids)
        if num_tokens >= min(request.sampling.max_new_tokens, self.stops_after[request.room]):
            self.end(request, is_sound=True)

    @precondition(lambda self: self.rooms.select(RequestState.RUNNING))
    @rule(num_steps=st.integers(2, 12))
    def steps_and_deliveries(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
            for request in self.landing():
                self._start(request)

    def _check_can_run(self, request: Request) -> None:
        num_slots = {kind: len(extents_to_slots(request.extents(kind))) for kind in PoolKind}
        assert num_slots[PoolKind.INDEX] >= request.next_seq_len
        if request.mode is Mode.DENSE:
            assert num_slots[PoolKind.DEVICE] >= request.next_seq_len
        else:
            assert num_slots[PoolKind.HOST] >= request.next_seq_len
            assert num_slots[PoolKind.LOOKUP] >= request.next_seq_len
            entries = request.hot_capacity or num_slots[PoolKind.DEVICE]
            assert num_slots[PoolKind.DEVICE] >= entries >= self.limits.min_capacity(request)
            if request.num_page_slots:
                assert num_slots[PoolKind.DEVICE] >= entries + request.num_page_slots
                assert self.limits.page_tokens(request) >= request.next_seq_len
            if request.is_resident:
                assert num_slots[PoolKind.DEVICE] >= request.next_seq_len
                slots = extents_to_slots(request.extents(PoolKind.DEVICE)).tolist()
                for position in range(request.num_kv_tokens):
                    assert self.resident_items[slots[position]] == self._item(request, position)

    # --- prefill nodes ----------------------------------------------------------------------------

    def landing(self) -> list[Request]:
        return self.rooms.select(RequestState.LANDING)

    @precondition(lambda self: self.landing())
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        self._start(data.draw(st.sampled_from(self.landing())))

    def _start(self, request: Request) -> None:
        self.over(request.room, batch_failed=False)
        if not self.rooms.await_fetch(request, float("inf")):
            self._run_first(request)

    def _run_first(self, request: Request) -> None:
        self._write_keys(request)
        self.rooms.start(request)
        request.row_counters = SwapCounts(hits=1, misses=request.room % 4)
        request.output_token_ids.append(0)
        if request.is_resident:
            assert request.is_local
            self._fill_pages(request, 0, request.num_kv_tokens)
        self._end_if_last(request)

    @precondition(lambda self: self.landing())
    @rule(data=st.data(), is_quiet=st.booleans(), batch_failed=st.booleans())
    def fail_room(self, data: st.DataObject, is_quiet: bool, batch_failed: bool) -> None:
        request = data.draw(st.sampled_from(self.landing()))
        self.end(request)
        if batch_failed:
            self.failed_batches.add(request.room)
            self.rooms.quarantine.failed(request.room)
        if is_quiet:
            self._quiet(request.room, batch_failed)

    @precondition(lambda self: len(self.rooms.quarantine) > 0)
    @rule(data=st.data(), batch_failed=st.booleans())
    def go_quiet(self, data: st.DataObject, batch_failed: bool) -> None:
        unresolved = [entry.room for entry in self.rooms.quarantine if entry.is_unacknowledged]
        if unresolved:
            self._quiet(data.draw(st.sampled_from(unresolved)), batch_failed)

    def _quiet(self, room: Room, batch_failed: bool) -> None:
        self.over(room, batch_failed or room in self.failed_batches)
        self.rooms.quarantine.quiet(room, batch_failed, self.now)

    @precondition(lambda self: bool(self.landing() or len(self.rooms.quarantine)))
    @rule(peer=st.sampled_from(PEERS), is_gone=st.booleans())
    def lose_peer(self, peer: PeerAddress, is_gone: bool) -> None:
        for request in self.rooms.of_peer(peer):
            if request.state is RequestState.LANDING:
                self.end(request)
        if is_gone:
            for entry in self.rooms.quarantine:
                if entry.peer == peer:
                    self.over(entry.room, batch_failed=True)
            self.rooms.quarantine.instance_gone(f"run of {peer}", self.now)

    @precondition(lambda self: len(self.rooms.quarantine) > 0)
    @rule(secs=st.sampled_from([1.0, QUARANTINE_SECS / 2, QUARANTINE_SECS]))
    def pass_time(self, secs: float) -> None:
        self.now += secs
        for room, until in tuple(self.lands_until.items()):
            if until <= self.now:
                del self.lands_until[room], self.writable[room]
        self.rooms.quarantine.expire(self.now)

    # --- both -------------------------------------------------------------------------------------

    def _write_keys(self, request: Request) -> None:
        """What the request's own slots have before it leaves its pages, or lets others use them."""
        keys, start = request.kept_keys(request.num_kv_tokens), request.num_shared_pages * PAGE_SIZE
        names = names_of(keys)[start:]
        for kind in request.kv_pools:
            slots = extents_to_slots(request.owned[kind]).tolist()
            self.copies.of(kind).update(dict.fromkeys(slots) | dict(zip(slots, names, strict=False)))

    def end(self, request: Request, *, is_sound: bool = False) -> None:
        if request.state is RequestState.RUNNING:
            self._write_keys(request)
        if request.state is RequestState.RUNNING and self.num_arrived % 3:
            self.rooms.start_ending(request, is_sound=is_sound)  # it is in a step in flight
        else:
            end(self.rooms, request, self.now, is_sound=is_sound)

    def over(self, room: Room, batch_failed: bool) -> None:
        """The prefill node writes no more; what it handed to the transport may still land."""
        if not batch_failed:
            self.writable.pop(room, None)
            self.lands_until.pop(room, None)
        elif room in self.writable:
            self.lands_until.setdefault(room, self.now + QUARANTINE_SECS)

    @invariant()
    def pools_are_whole(self) -> None:
        self.rooms.check_integrity()

    @invariant()
    def held_pages_have_their_bytes(self) -> None:
        for run in self.rooms.held:
            names = names_of(run.keys)
            if run.kinds in KV_POOLS.values() and not run.is_arriving:
                for kind in run.pools:
                    slots = extents_to_slots(run.holding[kind]).tolist()
                    assert [self.copies.of(kind).get(slot) for slot in slots] == names, kind
            if run.is_stored:
                slots = extents_to_slots(run.holding[PoolKind.HOST]).tolist()
                assert [self.copies.places.get(slot) for slot in slots] == names

    @invariant()
    def steps_read_what_is_there(self) -> None:
        for request in self.rooms.select(RequestState.RUNNING):
            assert not is_on_its_way(request.prefix)

    @invariant()
    def everybody_can_end(self) -> None:
        def claim(request: Request) -> Claim:
            shared_pages = request.num_shared_pages
            return self.limits.claim(request, request.mode, request.owned_slots, shared_pages)

        running = self.rooms.select(RequestState.RUNNING)
        ends = [
            (request, claim(request)._replace(ways=((0, 0, 0, 0),)))
            for request in self.rooms.select(RequestState.ENDING)
        ]
        returning = [entry.holding for entry in self.returning()]
        free = self.rooms.available + self.rooms.pools.owned_by([*returning, *self.being_copied()])
        landing = self.rooms.select(RequestState.LANDING, RequestState.FETCHING)
        shared = [request.prefix for request in landing if request.prefix]
        pinned = {part: len(part.keys) for prefix in shared for part in prefix.chain()}
        claims = [(request, claim(request)) for request in running] + ends
        order = order_ends(free, claims, pinned, PAGE_SIZE)
        assert Reserve(order, [claim(request) for request in landing]).is_safe

    @invariant()
    def what_may_be_written_is_nobody_elses(self) -> None:
        for room, slots in self.writable.items():
            request, entry = self.rooms.get(room), self.rooms.quarantine.get(room)
            if request is None:
                request = next((r for r in self.rooms.select(RequestState.ENDING) if r.room == room), None)
            holding = request.holding if request is not None else entry.holding if entry else None
            assert holding is not None, f"room {room} may still be written to, and its slots are free"
            for kind, extents in slots.items():
                held = set(extents_to_slots(holding[kind]).tolist())  # with what a running request grew by
                zone = set(extents_to_slots(extents).tolist())
                assert zone <= held, f"room {room}: {kind} slots may still be written to"

    def teardown(self) -> None:
        """Everybody who is left gets served, and then the pools are whole."""
        for entry in self.rooms.quarantine:
            self.over(entry.room, batch_failed=False)
            self.rooms.quarantine.instance_gone(entry.instance_id, self.now)
        self.pass_time(QUARANTINE_SECS)
        for _ in range(200):
            if len(self.rooms):
                self.steps_and_deliveries(10)
        assert not self.rooms.all(), "somebody starves"
        self.rooms.settle_copies()
        assert self.rooms.available == self.rooms.pools.totals
        self.rooms.held.flush()
        assert self.rooms.pools.free == self.rooms.pools.totals


SOME_HISTORIES = settings(
    derandomize=True,
    max_examples=num_examples(10, 200),
    suppress_health_check=[HealthCheck.too_slow],
)
"""How many histories of one kind are tried."""


@SOME_HISTORIES
@given(
    max_drafts=st.sampled_from([0, 3]),
    fill_tokens=st.sampled_from([0, 40]),
    totals=st.sampled_from([ROOMY, structs.replace(ROOMY, device=72)]),
    turns=st.lists(
        st.tuples(
            st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=3),
            st.integers(1, 8),
            st.lists(ARRIVALS, max_size=6),
            st.integers(1, 30),
        ),
        min_size=2,
        max_size=4,
    ),
)
def test_pages_that_are_filled_while_others_come_and_go(
    max_drafts: int,
    fill_tokens: int,
    totals: SlotCounts,
    turns: list[tuple[list[int | None], int, list[Arrival], int]],
) -> None:
    """``turns``: requests that become resident, steps that they have for it, others that come, and steps
    behind that."""
    machine = DecodeNodeMachine()
    machine.choose(max_drafts, keeps_residents=True, fill_tokens=fill_tokens, totals=totals)
    for families, num_steps, late, num_later in turns:
        machine.become_resident(families, num_steps, late)
        for _ in range(num_later):
            machine.steps_and_deliveries(1)
            machine.pools_are_whole()
            machine.everybody_can_end()
    machine.teardown()


@SOME_HISTORIES
@given(
    max_drafts=st.sampled_from([0, 3]),
    keeps_residents=st.booleans(),
    totals=st.sampled_from([TOTALS, structs.replace(ROOMY, device=64)]),
    num_index_slots=st.sampled_from([80, 100, 110]),
    miss_cost=st.sampled_from([CHEAP, PRESENT_COST, STEPS_COST]),
    turns=st.lists(
        st.tuples(
            st.permutations(range(5)),
            st.sampled_from([0, 1, None, None]),
            st.sampled_from([None, 0, 0, 1]),
            st.lists(ARRIVALS, max_size=2),
            st.integers(1, 12),
            st.sampled_from([None, None, *Loss]),
        ),
        min_size=2,
        max_size=4,
    ),
)
def test_pages_that_are_left_for_what_main_memory_has(
    max_drafts: int,
    keeps_residents: bool,
    totals: SlotCounts,
    num_index_slots: int,
    miss_cost: MissCost,
    turns: list[tuple[list[int], int | None, int | None, list[Arrival], int, Loss | None]],
) -> None:
    """``turns``: what leaves and for whom, steps behind that, and what becomes of the copies."""
    machine = DecodeNodeMachine()
    machine.choose(
        max_drafts,
        keeps_residents=keeps_residents,
        num_index_slots=num_index_slots,
        miss_cost=miss_cost,
        totals=totals,
    )
    for families, num_copied, of_family, late, num_later, loss in turns:
        machine.leave_what_main_memory_has(families, num_copied, of_family, late)
        for number in range(num_later):
            if number == 1 and loss is not None:
                machine.lose_copies(families[0], loss)
            machine.steps_and_deliveries(1)
            for invariant_of in (
                machine.pools_are_whole,
                machine.held_pages_have_their_bytes,
                machine.steps_read_what_is_there,
                machine.everybody_can_end,
            ):
                invariant_of()
    machine.teardown()


@SOME_HISTORIES
@given(
    num_spare_index=st.integers(0, 5),
    num_spare_device=st.integers(0, 2),
    is_stored=st.booleans(),
    held=st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True),
    left=st.lists(st.integers(2, 4), min_size=1, max_size=3),
    num_new=st.sampled_from([1, 4, 8]),
    later=st.lists(
        st.tuples(st.sampled_from(HisparseFlag), st.integers(0, 4), st.sampled_from([1, 4, 8])), max_size=2
    ),
)
def test_no_move_of_a_plan_takes_slots_that_a_later_one_gives_back(
    num_spare_index: int,
    num_spare_device: int,
    is_stored: bool,
    held: list[int],
    left: list[int],
    num_new: int,
    later: list[tuple[HisparseFlag, int, int]],
) -> None:
    """Index slots are short, and so are device slots: what an admission shares, what copies for a request
    that leaves its pages take and what it gives back are the same few slots.

    ``held``: families whose prompts hisparse requests have left; main memory may have their keys, too.
    ``left``: families of dense requests of ``auto``, which share pages. One that shares what is held comes
    then, for ``num_new`` output tokens. ``later``: the flag, the family and the output tokens of those that
    follow. Spare slots are counted in pages.
    """
    num_dense = NUM_FAMILY_PAGES * len(set(left)) + 2 * len(left)
    totals = SlotCounts(
        host=200,
        device=PAGE_SIZE * (num_dense + num_spare_device),
        index=PAGE_SIZE * (num_dense + NUM_FAMILY_PAGES * len(held) + num_spare_index),
        lookup=300,
        aux=12,
        req_row=12,
    )
    machine = DecodeNodeMachine()
    machine.choose(0, keeps_residents=False, num_index_slots=totals.index if is_stored else 0, totals=totals)

    def arrive(flag: HisparseFlag, family: int, num_more: int, max_new_tokens: int) -> None:
        num_prompt_tokens = NUM_FAMILY_PAGES * PAGE_SIZE + num_more
        machine._arrive(flag, num_prompt_tokens, max_new_tokens, max_new_tokens, PEERS[0], "", family, 1)

    for flag, families in ((HisparseFlag.FALSE, left), (HisparseFlag.TRUE, held)):
        for family in families:
            arrive(flag, family, 1, 1)
            machine.steps_and_deliveries(2)
    machine.copies.finish()
    for family in left:
        arrive(HisparseFlag.AUTO, family, 2, 6)
    machine.steps_and_deliveries(1)
    for flag, family, max_new_tokens in ((HisparseFlag.TRUE, held[0], num_new), *later):
        arrive(flag, family, 2, max_new_tokens)
    for _ in range(4):
        machine.steps_and_deliveries(1)
        machine.pools_are_whole()
        machine.everybody_can_end()
    machine.teardown()


TestDecodeNode = DecodeNodeMachine.TestCase
TestDecodeNode.settings = settings(
    derandomize=True,
    max_examples=num_examples(5, 80),
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
