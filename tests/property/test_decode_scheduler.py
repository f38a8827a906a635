"""Requests through admission, growth, retraction, finish, abort and every way a transfer or a peer can fail.

The machine plays the front, the prefill nodes and the clock against the real books and the real planner.
After each step every pool is whole (I2), and no slot that a prefill node may still write to belongs to
anybody else (I1).
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_node.pools import Holding, PoolKind, Pools, SlotCounts
from decode_node.request import PeerAddress, Request, RequestState
from decode_node.rooms import Landing, Rooms
from decode_node.scheduler import Limits, plan_step, refusal
from protocol.engine_messages import HisparseFlag, Mode, SamplingParams
from protocol.messages import Extent, Room
from transfer.extents import extents_to_slots

PAGE_SIZE = 4
QUARANTINE_SECS = 10.0
INDEX_TOPK = 6
TOTALS = SlotCounts(host=150, device=48, index=160, aux=12, req_row=6)
LIMITS = Limits(
    totals=TOTALS,
    page_size=PAGE_SIZE,
    max_context=64,
    index_topk=INDEX_TOPK,
    device_buffer_size=16,
    auto_dense_margin=0.25,
)
PEERS = [PeerAddress("prefill", 1), PeerAddress("prefill", 2)]
ARRIVALS = st.tuples(
    st.sampled_from([HisparseFlag.FALSE, *HisparseFlag]),
    st.sampled_from([1, 3, 4, 5, 9, 16, 17, 22]),
    st.sampled_from([1, 2, 8, 16, 20, 23]),
    st.sampled_from(PEERS),
    st.sampled_from(["", "", "page sizes differ"]),
)
SlotsByKind = dict[PoolKind, tuple[Extent, ...]]


def remote_slots(holding: Holding, mode: Mode) -> SlotsByKind:
    kv = PoolKind.HOST if mode is Mode.HISPARSE else PoolKind.DEVICE
    return {kind: holding[kind] for kind in (kv, PoolKind.INDEX, PoolKind.AUX)}


class DecodeNodeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rooms = Rooms(Pools(TOTALS, PAGE_SIZE), QUARANTINE_SECS)
        self.now = 0.0
        self.num_arrived = 0
        self.writable: dict[Room, SlotsByKind] = {}
        """What prefill nodes, or bytes that are still in the transport, may write."""
        self.lands_until: dict[Room, float] = {}
        """Rooms that are over for the prefill node, and when their last bytes may land."""
        self.failed_batches: set[Room] = set()

    # --- front ------------------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVALS, min_size=1, max_size=6))
    def arrive(self, arrivals: list[tuple[HisparseFlag, int, int, PeerAddress, str]]) -> None:
        for arrival in arrivals:
            self._arrive(*arrival)
        self.step()

    def _arrive(
        self,
        flag: HisparseFlag,
        num_prompt_tokens: int,
        max_new_tokens: int,
        peer: PeerAddress,
        dense_refusal: str,
    ) -> None:
        self.num_arrived += 1
        request = Request(
            request_id=str(self.num_arrived),
            room=Room(self.num_arrived),
            num_prompt_tokens=num_prompt_tokens,
            sampling=SamplingParams(max_new_tokens=max_new_tokens),
            flag=flag,
            peer=peer,
            arrived_at=self.now,
            dense_refusal=dense_refusal,
        )
        if not refusal(LIMITS, request):
            self.rooms.open(request)
            self.rooms.queue(request, float("inf"))

    @precondition(lambda self: len(self.rooms))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.rooms.all())), Landing.IN_FLIGHT)

    # --- engine -----------------------------------------------------------------------------------

    @rule()
    def step(self) -> None:
        waiting = self.rooms.select(RequestState.WAITING)
        running = self.rooms.select(RequestState.RUNNING)
        plan = plan_step(
            LIMITS, self.rooms.pools.free, running, self.rooms.select(RequestState.RETRACTED), waiting
        )
        for request in plan.retractions:
            assert request.is_retractable, "the host has room for all that the device slots hold"
            self.rooms.retract(request, float("inf"))
        for growth in plan.growths:
            self.rooms.grow(growth)
        for resumption in plan.resumptions:
            self.rooms.resume(resumption)
        for admission in plan.admissions:
            self.rooms.admit(admission, f"run of {admission.request.peer}", float("inf"))
            self.writable[admission.request.room] = remote_slots(
                admission.request.owned, admission.request.mode
            )
        assert [admission.request for admission in plan.admissions] == waiting[: len(plan.admissions)]
        for request in self.rooms.select(RequestState.RUNNING):
            if not request.has_page_for_next:  # it sits this step out, and whose pages it waits for is known
                assert request.may_grow
                assert any(self.rooms.pools.free.device < PAGE_SIZE and r.lands_until for r in running)
                continue
            self._check_can_run(request)
            request.output_token_ids.append(0)
            if len(request.output_token_ids) >= request.sampling.max_new_tokens:
                self.end(request, Landing.QUIET)

    @precondition(lambda self: self.rooms.select(RequestState.RUNNING))
    @rule(num_steps=st.integers(2, 12))
    def steps_and_deliveries(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
            for request in self.landing():
                self._start(request)

    def _check_can_run(self, request: Request) -> None:
        num_slots = request.owned.num_slots
        assert num_slots(PoolKind.INDEX) >= request.life_tokens
        if request.mode is Mode.DENSE:
            assert num_slots(PoolKind.DEVICE) >= request.next_seq_len
            is_retractable = request.is_retractable or request.lands_until
            assert num_slots(PoolKind.DEVICE) >= request.life_tokens or is_retractable
        else:
            assert num_slots(PoolKind.HOST) >= request.life_tokens
            assert num_slots(PoolKind.DEVICE) >= request.hot_capacity
            assert request.hot_capacity >= min(INDEX_TOPK + 1, request.life_tokens)

    # --- prefill nodes ----------------------------------------------------------------------------

    def landing(self) -> list[Request]:
        return self.rooms.select(RequestState.LANDING)

    @precondition(lambda self: self.landing())
    @rule(data=st.data(), is_repeated=st.booleans())
    def deliver(self, data: st.DataObject, is_repeated: bool) -> None:
        self._start(data.draw(st.sampled_from(self.landing())), is_repeated)

    def _start(self, request: Request, is_repeated: bool = False) -> None:
        """``is_repeated``: a batch of it was, so that the bytes of its first attempt may come later."""
        if is_repeated:
            self.rooms.start(request, self.rooms.quarantine.free_at(self.now))
        else:
            self.rooms.start(request)
        self.over(request.room, is_repeated)
        request.output_token_ids.append(0)
        if request.sampling.max_new_tokens == 1:
            self.end(request, Landing.QUIET)

    @precondition(lambda self: self.landing())
    @rule(data=st.data(), known=st.sampled_from(Landing))
    def fail_room(self, data: st.DataObject, known: Landing) -> None:
        self.end(data.draw(st.sampled_from(self.landing())), known)

    @precondition(lambda self: len(self.rooms.quarantine))
    @rule(data=st.data(), batch_failed=st.booleans())
    def go_quiet(self, data: st.DataObject, batch_failed: bool) -> None:
        unresolved = [entry.room for entry in self.rooms.quarantine if entry.is_unresolved]
        if unresolved:
            room = data.draw(st.sampled_from(unresolved))
            self.over(room, batch_failed or room in self.failed_batches)
            self.rooms.quarantine.quiet(room, batch_failed, self.now)

    @precondition(lambda self: self.landing() or len(self.rooms.quarantine))
    @rule(peer=st.sampled_from(PEERS), is_gone=st.booleans())
    def lose_peer(self, peer: PeerAddress, is_gone: bool) -> None:
        for request in self.rooms.of_peer(peer):
            if request.state is RequestState.LANDING:
                self.end(request, Landing.IN_FLIGHT)
        if is_gone:
            for entry in self.rooms.quarantine:
                if entry.peer == peer:
                    self.over(entry.room, batch_failed=True)
            self.rooms.quarantine.instance_gone(f"run of {peer}", self.now)

    @precondition(lambda self: len(self.rooms.quarantine))
    @rule(secs=st.sampled_from([1.0, QUARANTINE_SECS / 2, QUARANTINE_SECS]))
    def pass_time(self, secs: float) -> None:
        self.now += secs
        for room, until in tuple(self.lands_until.items()):
            if until <= self.now:
                del self.lands_until[room], self.writable[room]
        self.rooms.expire(self.now)

    # --- both -------------------------------------------------------------------------------------

    def end(self, request: Request, known: Landing) -> None:
        was_landing = request.state is RequestState.LANDING
        self.rooms.end(request, known, self.now)
        if known in (Landing.QUIET_AFTER_FAILURE, Landing.IN_FLIGHT_AFTER_FAILURE):
            self.failed_batches.add(request.room)
        if was_landing and known in (Landing.QUIET, Landing.QUIET_AFTER_FAILURE):
            self.over(request.room, batch_failed=known is Landing.QUIET_AFTER_FAILURE)

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
    def what_may_be_written_is_nobody_elses(self) -> None:
        for room, slots in self.writable.items():
            request, entry = self.rooms.get(room), self.rooms.quarantine.get(room)
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
        assert self.rooms.pools.free == self.rooms.pools.totals


TestDecodeNode = pytest.mark.timeout(60)(DecodeNodeMachine.TestCase)
TestDecodeNode.settings = settings(
    deadline=None,
    derandomize=True,
    max_examples=120,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
