"""The send queue: turns, slices, failures and aborts in every order, and what a short room waits for.

Here time does not exist but as a number, and the transport is in the test's hands. A model says of every
batch what has gone out of it, so that order, ends and bytes can be compared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse_pd.protocol.messages import Room
from hisparse_pd.transfer.plan import DESCRIPTOR_COST_BYTES, SLICE_BYTES, Descriptors, cost
from hisparse_pd.transfer.send_queue import Completion, Outcome, SendQueue, Slice, WriteBatch
from tests.examples import num_examples

pytestmark = [pytest.mark.I1, pytest.mark.I7]

TURN = 4 * DESCRIPTOR_COST_BYTES
SESSIONS = ("a", "b")


def ranges(first_addr: int, num_ranges: int, length: int = 10) -> Descriptors:
    addrs = first_addr + np.arange(num_ranges) * length
    return Descriptors(addrs, addrs, np.full(num_ranges, length))


@dataclass
class ModelBatch:
    batch: WriteBatch
    unwritten: deque[Descriptors]
    is_started: bool = False
    may_still_land: bool = False
    has_ended: bool = False

    @property
    def is_unready(self) -> bool:
        ready = self.batch.ready
        return not self.is_started and ready is not None and not ready.query()


@dataclass
class ModelRoom:
    session: str
    deadline: float
    batches: list[ModelBatch] = field(default_factory=list)
    is_over: bool = False
    """By a failure, an abort, or its time: nothing of it may start any more."""
    num_before: dict[Room, int] | None = None
    """While it waits in line: what each other room has written since, as its cost."""

    @property
    def unwritten(self) -> list[ModelBatch]:
        """What waits or is in flight; the first may be written in part."""
        return [] if self.is_over else [batch for batch in self.batches if batch.unwritten]

    @property
    def is_unready(self) -> bool:
        return bool(self.unwritten) and self.unwritten[0].is_unready


class NotReady:
    """A source whose bytes are not there."""

    def __init__(self) -> None:
        self.is_there = False

    def query(self) -> bool:
        return self.is_there

    def synchronize(self) -> None:
        raise AssertionError("the queue does not wait")


class SendQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.num_told = 0
        self.queue = SendQueue(self.told, turn_bytes=TURN)
        self.rooms: dict[Room, ModelRoom] = {}
        self.in_flight: dict[str, Slice] = {}
        self.unready: list[NotReady] = []
        self.next_addr = 1
        self.num_batches = 0

    def told(self) -> None:
        self.num_told += 1

    # --- what happens -------------------------------------------------------------------------------------

    @rule(
        number=st.integers(0, 5),
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
        timeout_secs=st.sampled_from([2.0, 50.0]),
        room_secs=st.sampled_from([4.0, 100.0, 100.0]),
        is_ready=st.sampled_from([True, True, False]),
    )
    def submit(
        self, number: int, sizes: list[int], timeout_secs: float, room_secs: float, is_ready: bool
    ) -> None:
        """A batch of slices of so many ranges; rooms of even and odd numbers have a session each."""
        room_id, session = Room(number), SESSIONS[number % 2]
        room = self.rooms.setdefault(room_id, ModelRoom(session, self.now + room_secs))
        slices = []
        for size in sizes:
            slices.append(ranges(self.next_addr, size))
            self.next_addr += 10 * size
        num_bytes = sum(piece.num_bytes for piece in slices)
        ready = None if is_ready else NotReady()
        if ready is not None:
            self.unready.append(ready)
        tag = (room_id, self.num_batches)
        batch = WriteBatch(room_id, tag, iter(slices), num_bytes, room.deadline, timeout_secs, ready)
        self.num_batches += 1
        if not room.unwritten:
            room.num_before = {}
        room.batches.append(ModelBatch(batch, deque(slices)))
        self.queue.submit(session, batch)

    @rule(session=st.sampled_from(SESSIONS))
    def start(self, session: str) -> None:
        if session in self.in_flight:
            return
        self.expire()
        taken = self.queue.next(session, self.now)
        waiting = [room for room in self.rooms.values() if room.session == session and room.unwritten]
        if taken is None:
            assert waiting == []
            return
        self.in_flight[session] = taken
        room_id = taken.batch.room
        room = self.rooms[room_id]
        assert not room.is_over, "a slice starts behind a failure or an abort"
        assert room.session == session
        batch = room.unwritten[0]
        assert taken.batch is batch.batch, "a batch goes out before one that was submitted before it"
        np.testing.assert_array_equal(taken.writes.src_addrs, batch.unwritten[0].src_addrs)
        assert taken.deadline == min(self.now + taken.batch.timeout_secs, room.deadline)
        assert taken.ready is (None if batch.is_started else batch.batch.ready)
        if batch.is_unready:
            assert all(other.is_unready for other in waiting), "who could write waits for who cannot"
        batch.is_started = True
        room.num_before = None
        for other in waiting:
            if other.is_unready:
                other.num_before = {}  # it is passed by, and keeps its place
            elif other.num_before is not None:
                other.num_before[room_id] = other.num_before.get(room_id, 0) + cost(taken.writes)

    def expire(self) -> None:
        """Rooms whose time is up and that have more than what is in flight."""
        in_flight = {id(taken.batch) for taken in self.in_flight.values()}
        for room in self.rooms.values():
            waits = any(id(batch.batch) not in in_flight for batch in room.unwritten)
            room.is_over |= waits and room.deadline < self.now

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), error=st.sampled_from(["", "", "", "broken"]))
    def finish(self, data: st.DataObject, error: str) -> None:
        self.end_write(data.draw(st.sampled_from(sorted(self.in_flight))), error)

    def end_write(self, session: str, error: str) -> None:
        taken = self.in_flight.pop(session)
        room = self.rooms[taken.batch.room]
        batch = next(batch for batch in room.batches if batch.batch is taken.batch)
        batch.may_still_land |= bool(error)
        if error:
            room.is_over = True
        else:
            batch.unwritten.popleft()
        self.queue.finish(taken, Outcome(error, 1.0, bool(error)))
        room.num_before = {} if room.unwritten else None

    @rule(number=st.integers(0, 5))
    def cancel(self, number: int) -> None:
        room_id = Room(number)
        is_in_flight = self.queue.cancel(room_id)
        assert is_in_flight == any(taken.batch.room == room_id for taken in self.in_flight.values())
        assert self.queue.num_pending(room_id) == is_in_flight, "an abort holds what is not in flight"
        if room_id in self.rooms:
            self.rooms[room_id].is_over = True

    @precondition(lambda self: self.unready)
    @rule()
    def bytes_are_there(self) -> None:
        self.unready.pop(0).is_there = True

    @rule(secs=st.sampled_from([0.5, 3.0]))
    def pass_time(self, secs: float) -> None:
        self.now += secs
        overdue = self.queue.overdue(self.now)
        for taken in self.in_flight.values():
            if taken.deadline < self.now:
                assert taken.batch.room in overdue or self.rooms[taken.batch.room].is_over
        for room_id in overdue:
            self.rooms[room_id].is_over = True
        assert self.queue.overdue(self.now) == []

    @rule()
    def take(self) -> None:
        self.expire()
        completions = self.queue.take_completions(self.now)
        assert len(completions) == self.num_told
        self.num_told = 0
        for completion in completions:
            self.check(completion)
        for room_id, room in list(self.rooms.items()):
            if all(batch.has_ended for batch in room.batches):
                del self.rooms[room_id]

    def check(self, completion: Completion) -> None:
        room = self.rooms[completion.room]
        batch = next(batch for batch in room.batches if batch.batch.tag == completion.tag)
        assert not batch.has_ended, "two completions of one batch"
        batch.has_ended = True
        assert completion.ok == (not completion.error)
        if completion.ok:
            assert not batch.unwritten
            assert completion.num_bytes == batch.batch.num_bytes
        else:
            assert room.is_over
            assert completion.num_bytes == 0
        assert completion.may_still_land == batch.may_still_land, "a slice that failed once is forgotten"

    # --- what must hold -----------------------------------------------------------------------------------

    @invariant()
    def a_room_waits_for_one_turn_of_each_other(self) -> None:
        for room_id, room in self.rooms.items():
            for other, cost_before in (room.num_before or {}).items():
                assert cost_before <= TURN, f"room {room_id} waits for more than a turn of {other}"

    @invariant()
    def bytes_pending_are_those_that_are_not_written(self) -> None:
        for session in SESSIONS:
            in_flight = {id(taken.batch) for taken in self.in_flight.values()}
            left = sum(
                piece.num_bytes
                for room in self.rooms.values()
                if room.session == session
                for batch in room.batches
                if not room.is_over or id(batch.batch) in in_flight
                for piece in batch.unwritten
            )
            assert self.queue.num_bytes_pending(session) == left

    def teardown(self) -> None:
        """Everything ends, once, and nothing is remembered."""
        while self.unready:
            self.bytes_are_there()
        while True:
            for session in SESSIONS:
                self.start(session)
            if not self.in_flight:
                break
            for session in sorted(self.in_flight):
                self.end_write(session, "")
        self.take()
        assert self.rooms == {}
        assert self.queue.is_empty


SendQueueMachine.TestCase.settings = settings(
    derandomize=True, max_examples=num_examples(14, 100), stateful_step_count=60
)
TestSendQueue = SendQueueMachine.TestCase


# --- one by one -------------------------------------------------------------------------------------------


def batch(room: int, *sizes: int, addr: int = 0) -> WriteBatch:
    """Slices that cost as many bytes each."""
    slices = [
        Descriptors(*(np.array([value]) for value in (addr + number, addr + number, size)))
        for number, size in enumerate(sizes)
    ]
    return WriteBatch(Room(room), f"{room} at {addr}", slices, sum(sizes))


def drain(queue: SendQueue) -> list[Room]:
    """Write all there is; the rooms in the order in which their slices went out."""
    order = []
    while (taken := queue.next("a", 0.0)) is not None:
        order.append(taken.batch.room)
        queue.finish(taken, Outcome())
    return order


@pytest.mark.I8
def test_a_short_prompt_waits_for_one_slice_of_each_long_one() -> None:
    """Three prefixes of 5 GB, and a prompt of 100 tokens, in bytes and not in time."""
    queue = SendQueue()
    for room in (1, 2, 3):
        queue.submit("a", batch(room, *[SLICE_BYTES] * 150))
    in_flight = queue.next("a", 0.0)
    assert in_flight is not None
    for number in range(61):  # its layers, and the aux record, of 80 kB each
        queue.submit("a", batch(4, 80_000, addr=100 + number))
    num_bytes_before = in_flight.writes.num_bytes
    queue.finish(in_flight, Outcome())
    num_of_short = 0
    while num_of_short < 61:
        taken = queue.next("a", 0.0)
        assert taken is not None
        if taken.batch.room == 4:
            num_of_short += 1
        else:
            assert num_of_short == 0, "a long prompt goes in between"
            num_bytes_before += taken.writes.num_bytes
        queue.finish(taken, Outcome())
    assert num_bytes_before == 3 * SLICE_BYTES
    assert queue.num_bytes_pending("a") == (3 * 150 - 3) * SLICE_BYTES


@pytest.mark.I8
def test_rooms_share_a_peer_by_bytes_and_not_by_batches() -> None:
    """One has long batches and the other many short ones."""
    queue = SendQueue()
    queue.submit("a", batch(1, *[SLICE_BYTES] * 4))
    for number in range(40):
        queue.submit("a", batch(2, SLICE_BYTES // 10, addr=100 + number))
    order = drain(queue)
    assert order == [1, *[2] * 10, 1, *[2] * 10, 1, *[2] * 10, 1, *[2] * 10]


def test_a_plan_that_fails_ends_its_room_only() -> None:
    def bad() -> object:
        yield batch(1, 10).slices[0]  # type: ignore[index]
        raise ValueError("a slot outside")

    queue = SendQueue()
    queue.submit("a", WriteBatch(Room(1), "bad", bad(), 20))  # type: ignore[arg-type]
    queue.submit("a", batch(1, 10, addr=5))
    queue.submit("a", batch(2, 10))
    assert drain(queue) == [1, 2]
    ends = {end.tag: end for end in queue.take_completions(0.0)}
    assert ends["bad"].error == "ValueError: a slot outside"
    assert "an earlier batch of the room failed" in ends["1 at 5"].error
    assert ends["2 at 0"].ok
    assert queue.num_bytes_pending("a") == 0


def test_a_room_writes_to_one_session_at_a_time() -> None:
    queue = SendQueue()
    queue.submit("a", batch(1, 10))
    with pytest.raises(ValueError, match="room 1 writes to session a, not to b"):
        queue.submit("b", batch(1, 10))
