"""The sender: its threads, failures, deadlines and stuck peers. The queue's tests cover order and turns.

A scripted writer stands in for the transport where a failure must happen at a given moment; the last tests
run the real Mooncake.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from hisparse_pd.protocol.messages import Room
from hisparse_pd.transfer.engine import TransferEngine, TransferError
from hisparse_pd.transfer.plan import Descriptors, Writes
from hisparse_pd.transfer.sender import Completion, Sender, WriteBatch
from tests.unit.transfer.peer import Peer
from tests.waiting import WAIT_SECS, wait_until

PEER, OTHER_PEER = "10.0.0.1:1", "10.0.0.2:2"


class ScriptedWriter:
    """A writer that records writes by their first source address. Sessions in ``stuck`` block, addresses in
    ``bad`` fail, and addresses that are in ``refused`` too fail before anything is sent."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []
        self.bad: set[int] = set()
        self.refused: set[int] = set()
        self.num_attempts: Counter[int] = Counter()
        self.stuck: dict[str, threading.Event] = {}
        self.started = threading.Semaphore(0)

    def write(self, session: str, writes: Writes, stop: Callable[[], str] | None = None) -> None:
        addr = int(np.asarray(writes[0])[0])
        self.num_attempts[addr] += 1
        gate = self.stuck.get(session)
        self.started.release()
        if gate is not None:
            assert gate.wait(WAIT_SECS)
        if addr in self.bad:
            raise TransferError(f"cannot write {addr}", may_still_land=addr not in self.refused)
        if stop is not None and (reason := stop()):
            raise TransferError(f"stopped: {reason}")
        self.written.append((session, addr))

    def block(self, session: str) -> threading.Event:
        """Make writes to ``session`` hang until the event is set."""
        self.stuck[session] = threading.Event()
        return self.stuck[session]

    def wait_for_start(self) -> None:
        assert self.started.acquire(timeout=WAIT_SECS)


@pytest.fixture
def writer() -> ScriptedWriter:
    return ScriptedWriter()


@pytest.fixture
def sender(writer: ScriptedWriter) -> Iterator[Sender]:
    sender = Sender(writer)
    yield sender
    for event in writer.stuck.values():
        event.set()
    assert sender.close(WAIT_SECS)


def ranges(addrs: Sequence[int], lengths: Sequence[int]) -> Descriptors:
    return Descriptors(np.array(addrs), np.array(addrs), np.array(lengths))


def batch(room: int, addr: int, timeout_secs: float = 60.0) -> WriteBatch:
    deadline = time.monotonic() + timeout_secs
    return WriteBatch(Room(room), f"tag {addr}", [ranges([addr], [100])], 100, deadline)


def collect(sender: Sender, num_completions: int) -> list[Completion]:
    completions: list[Completion] = []

    def are_there() -> bool:
        completions.extend(sender.poll())
        return len(completions) >= num_completions

    wait_until(are_there)
    assert len(completions) == num_completions
    return completions


def test_a_completion_says_what_was_written(sender: Sender) -> None:
    slices = [ranges([1, 2], [10, 15]), ranges([3], [5])]
    sender.submit(PEER, WriteBatch(Room(7), ("kv", 3), slices, 30))
    (completion,) = collect(sender, 1)
    assert (completion.room, completion.tag) == (7, ("kv", 3))
    assert (completion.ok, completion.error, completion.may_still_land) == (True, "", False)
    assert completion.num_bytes == 30
    assert 0 <= completion.secs < WAIT_SECS
    assert sender.poll() == []


@pytest.mark.I7
def test_a_stuck_peer_does_not_delay_another(sender: Sender, writer: ScriptedWriter) -> None:
    gate = writer.block(PEER)
    sender.submit(PEER, batch(1, 1))
    writer.wait_for_start()
    sender.submit(OTHER_PEER, batch(2, 2))
    (completion,) = collect(sender, 1)
    assert completion.room == 2
    assert sender.num_pending(Room(1)) > 0
    gate.set()
    assert collect(sender, 1)[0].room == 1
    assert sender.num_pending(Room(1)) == 0


@pytest.mark.I1
@pytest.mark.parametrize("is_refused", [False, True])
def test_after_a_failed_batch_nothing_of_the_room_is_sent(
    sender: Sender, writer: ScriptedWriter, is_refused: bool
) -> None:
    """The batch is not written again either: it may have landed in part, unless it was refused."""
    writer.bad.add(2)
    writer.refused |= {2} if is_refused else set()
    gate = writer.block(PEER)
    for addr in (1, 2, 3):
        sender.submit(PEER, batch(1, addr))
    sender.submit(PEER, batch(2, 9))
    gate.set()
    completions = {completion.tag: completion for completion in collect(sender, 4)}
    assert writer.written == [(PEER, 1), (PEER, 9)]
    assert completions["tag 1"].ok
    assert completions["tag 9"].ok
    failed, behind = completions["tag 2"], completions["tag 3"]
    assert (failed.ok, failed.error, failed.may_still_land) == (False, "cannot write 2", not is_refused)
    assert writer.num_attempts[2] == 1
    assert not behind.ok
    assert "an earlier batch of the room failed: cannot write 2" in behind.error
    assert not behind.may_still_land
    assert (failed.num_bytes, behind.num_bytes) == (0, 0)


def test_an_unexpected_exception_ends_the_batch_and_not_the_thread(
    sender: Sender, writer: ScriptedWriter
) -> None:
    sender.submit(PEER, WriteBatch(Room(1), "bad", [ranges([], [])], 0))  # the writer needs an address
    (completion,) = collect(sender, 1)
    assert not completion.ok
    assert completion.may_still_land
    assert completion.error.startswith("IndexError")
    sender.submit(PEER, batch(2, 2))
    assert collect(sender, 1)[0].ok


def test_cancel_drops_what_waits_and_reports_what_flies(sender: Sender, writer: ScriptedWriter) -> None:
    gate = writer.block(PEER)
    for addr in (1, 2):
        sender.submit(PEER, batch(1, addr))
    sender.submit(PEER, batch(2, 5))
    writer.wait_for_start()
    assert sender.num_pending(Room(1)) == 2
    assert sender.cancel(Room(1))
    assert not sender.cancel(Room(2))
    assert not sender.cancel(Room(3))
    assert [completion.tag for completion in collect(sender, 2)] == ["tag 2", "tag 5"]
    assert sender.num_pending(Room(1)) > 0
    gate.set()
    (in_flight,) = collect(sender, 1)
    assert (in_flight.tag, in_flight.ok, in_flight.may_still_land) == ("tag 1", False, False)
    assert "the room was cancelled" in in_flight.error
    assert sender.num_pending(Room(1)) == 0
    assert writer.written == []


@pytest.mark.I7
def test_an_overdue_batch_is_reported_once_and_still_completes(
    sender: Sender, writer: ScriptedWriter
) -> None:
    gate = writer.block(PEER)
    sender.submit(PEER, replace(batch(1, 1), timeout_secs=0.0))
    sender.submit(PEER, batch(1, 2))
    writer.wait_for_start()
    assert wait_until(sender.overdue) == [1]
    assert sender.overdue() == []
    assert collect(sender, 1)[0].tag == "tag 2"
    assert sender.num_pending(Room(1)) > 0
    gate.set()
    assert collect(sender, 1)[0].tag == "tag 1"
    assert writer.written == []


def test_a_batch_waits_for_its_source_bytes(sender: Sender, writer: ScriptedWriter) -> None:
    is_there = threading.Event()
    is_asked = threading.Event()

    class Event:
        def query(self) -> bool:
            return is_there.is_set()

        def synchronize(self) -> None:
            is_asked.set()
            assert is_there.wait(WAIT_SECS)

    sender.submit(PEER, replace(batch(1, 1), ready=Event()))
    sender.submit(PEER, batch(1, 2))
    sender.submit(OTHER_PEER, batch(2, 9))
    assert is_asked.wait(WAIT_SECS)
    assert collect(sender, 1)[0].room == 2
    assert writer.written == [(OTHER_PEER, 9)]
    is_there.set()
    assert [completion.tag for completion in collect(sender, 2)] == ["tag 1", "tag 2"]


def test_source_bytes_that_never_come_fail_the_batch(sender: Sender, writer: ScriptedWriter) -> None:
    class Event:
        def query(self) -> bool:
            raise RuntimeError("the device is lost")

        def synchronize(self) -> None:
            raise RuntimeError("the device is lost")

    sender.submit(PEER, replace(batch(1, 1), ready=Event()))
    sender.submit(PEER, batch(1, 2))
    failed, behind = collect(sender, 2)
    assert (failed.ok, failed.error) == (False, "RuntimeError: the device is lost")
    assert not behind.ok
    assert writer.written == []


def test_every_completion_wakes_the_loop(writer: ScriptedWriter) -> None:
    wakeups = threading.Semaphore(0)
    sender = Sender(writer, wakeups.release)
    for addr in (1, 2):
        sender.submit(PEER, batch(1, addr))
        assert wakeups.acquire(timeout=WAIT_SECS)
        assert len(sender.poll()) == 1
    assert sender.close(WAIT_SECS)


@pytest.mark.I8
def test_an_idle_peers_thread_ends_and_comes_back(writer: ScriptedWriter) -> None:
    sender = Sender(writer, idle_thread_secs=0.01)
    name = f"sender {PEER}"
    for addr in (1, 2):
        sender.submit(PEER, batch(addr, addr))
        assert collect(sender, 1)[0].ok
        wait_until(lambda: all(thread.name != name for thread in threading.enumerate()), "the thread ends")
    assert sender.close(WAIT_SECS)


@pytest.mark.I7
def test_a_batch_for_which_no_thread_starts_fails_and_a_later_one_is_written(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        for addr in (1, 2):
            sender.submit(PEER, batch(1, addr))
    for completion in collect(sender, 2):
        assert (completion.ok, completion.may_still_land) == (False, False)
        assert "can't start new thread" in completion.error
    sender.submit(PEER, batch(2, 3))
    assert collect(sender, 1)[0].ok


def test_close_fails_what_waits_and_does_not_wait_for_ever(writer: ScriptedWriter) -> None:
    gate = writer.block(PEER)
    sender = Sender(writer)
    for addr in (1, 2):
        sender.submit(PEER, batch(1, addr))
    writer.wait_for_start()
    assert not sender.close(0.05)
    assert [completion.error for completion in sender.poll()] == ["the sender was closed"]
    with pytest.raises(ValueError, match="room 1: the sender is closed"):
        sender.submit(PEER, batch(1, 3))
    gate.set()
    assert sender.close(WAIT_SECS)
    assert len(sender.poll()) == 1


# --- with the real transport --------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferEngine]:
    """An engine that gives up on a silent peer after 2 seconds instead of 30."""
    monkeypatch.setenv("MC_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "2")
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "2")
    started = TransferEngine("127.0.0.1")
    yield started
    started.close()


def test_a_stopped_peer_fails_alone_and_is_served_again(engine: TransferEngine) -> None:
    """A write may fail because this process or a peer did not run for as long as a silent peer may be: such a
    try shows nothing, and is made again."""
    memory = torch.arange(4096, dtype=torch.int32).view(torch.uint8)
    src_addr = engine.register(memory)
    sender = Sender(engine)
    rooms = map(Room, itertools.count(1))
    completions: dict[Room, list[Completion]] = defaultdict(list)

    def copy(src: int, dst: int) -> Descriptors:
        return Descriptors(np.array([src]), np.array([dst]), np.array([1000]))

    def submit(peer: Peer, num_batches: int = 1) -> Room:
        """Begin to write batches of a new room."""
        room = next(rooms)
        for number in range(num_batches):
            start = number * 1000
            slices = [copy(src_addr + start, peer.base_addr + start)]
            sender.submit(peer.session, WriteBatch(room, number, slices, 1000))
        return room

    def all_of(room: Room, num_batches: int = 1) -> list[Completion]:
        """Return the completions of a room, once all are there."""

        def are_there() -> bool:
            for completion in sender.poll():
                completions[completion.room].append(completion)
            return len(completions[room]) == num_batches

        wait_until(are_there)
        return completions[room]

    def is_served(peer: Peer, num_batches: int = 1) -> bool:
        return all(completion.ok for completion in all_of(submit(peer, num_batches), num_batches))

    def is_served_while_the_other_is_stuck(healthy: Peer, stopped: Peer) -> bool:
        stuck = submit(stopped, 2)
        is_ok = is_served(healthy, 4) and not completions[stuck] and sender.num_pending(stuck) > 0
        failed = all_of(stuck, 2)
        assert [completion.ok for completion in failed] == [False, False]
        assert [completion.may_still_land for completion in failed] == [True, False]
        return is_ok

    with Peer(1 << 16) as stopped, Peer(1 << 16) as healthy:
        wait_until(partial(is_served, stopped))
        stopped.pause()
        wait_until(partial(is_served_while_the_other_is_stuck, healthy, stopped))
        assert healthy.read(0, 4000) == memory[:4000].numpy().tobytes()
        stopped.resume()
        wait_until(partial(is_served, stopped))
        assert stopped.read(0, 1000) == memory[:1000].numpy().tobytes()
    assert sender.close(WAIT_SECS)
