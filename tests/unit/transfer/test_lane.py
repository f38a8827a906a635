"""Lanes of shared memory: bytes land where they belong, callers are checked, a writer's end is noticed."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hisparse_pd.transfer.lane
import hisparse_pd.transfer.lane_memory
from hisparse_pd.core.memory.host import allocate_host
from hisparse_pd.core.paging.extents import SlotArray
from hisparse_pd.protocol.lane import SOCKET_PREFIX, LaneOffer, LaneWelcome, Window, encoder
from hisparse_pd.transfer.errors import TransferError, TransferSetupError
from hisparse_pd.transfer.lane import Lane
from hisparse_pd.transfer.lane_copy import SHORT_BYTES, copy_ranges
from hisparse_pd.transfer.lane_host import LaneHost, SharedMemory, remove_stale
from hisparse_pd.transfer.lane_memory import LaneError, Mapping
from hisparse_pd.transfer.plan import LayerWrites, RegionView, SlicedWrites
from hisparse_pd.transfer.sender import Sender, WriteBatch
from tests.slot_plans import plan_slots
from tests.unit.transfer.lane_pair import POOL_BYTES, SESSION, Pair, pair_of
from tests.unit.transfer.lane_writer import LaneWriter
from tests.waiting import WAIT_SECS, wait_until


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_of() as made:
        yield made


# --- bytes ------------------------------------------------------------------------------------------------

ITEM_BYTES = st.sampled_from([1, 3, 17, 64, 132, 200, 656, 1152, SHORT_BYTES + 1])


@given(st.data())
@settings(max_examples=60)
def test_ranges_are_copied_and_nothing_else(data: st.DataObject) -> None:
    item_bytes = data.draw(ITEM_BYTES)
    num_slots = max(8, min(200, (1 << 19) // item_bytes))
    slots = st.integers(0, num_slots - 1)
    dst_slots = data.draw(st.lists(slots, unique=True, max_size=60))
    src_slots = data.draw(st.lists(slots, min_size=len(dst_slots), max_size=len(dst_slots)))
    if data.draw(st.booleans()):
        src_slots = list(range(len(dst_slots)))
    runs = plan_slots(src_slots, sorted(dst_slots) if data.draw(st.booleans()) else dst_slots)
    source = np.random.default_rng(1).integers(0, 256, num_slots * item_bytes, np.uint8)
    target = np.full(num_slots * item_bytes + 2, 7, np.uint8)
    expected = target.copy()
    src, dst, lengths = (array * item_bytes for array in (runs.src_start, runs.dst_start, runs.length))
    for start, to, length in zip(src, dst, lengths, strict=True):
        expected[1 + to : 1 + to + length] = source[start : start + length]
    copy_ranges(src + source.ctypes.data, dst + 1 + target.ctypes.data, lengths)
    assert np.array_equal(target, expected)


def test_ranges_of_lengths_without_a_common_row_are_copied() -> None:
    source = np.arange(4000, dtype=np.uint8)
    target = np.zeros(4000, np.uint8)
    src, dst, lengths = np.array([0, 1001, 17]), np.array([5, 2001, 3003]), np.array([1000, 13, 611])
    expected = target.copy()
    for start, to, length in zip(src, dst, lengths, strict=True):
        expected[to : to + length] = source[start : start + length]
    copy_ranges(src + source.ctypes.data, dst + target.ctypes.data, lengths)
    assert np.array_equal(target, expected)


def test_what_the_decode_node_has_is_read(pair: Pair) -> None:
    assert pair.register().kind == "shm"
    pair.memory[0][:] = np.arange(pair.memory[0].size) % 251
    expected = pair.network.source.copy()
    expected[7:5007], expected[6000:6020] = pair.memory[0][30:5030], pair.memory[0][9:29]
    pair.read([30, 9], [7, 6000], [5000, 20])
    assert np.array_equal(pair.network.source, expected)
    with pytest.raises(
        TransferError, match=r"source of 20 bytes .* is not within the decode node's memory; nothing was read"
    ):
        pair.read([POOL_BYTES[0] - 5], [0], [20])
    with pytest.raises(TransferError, match="not in registered memory"):
        pair.read([0], [pair.network.source.nbytes - 5], [20])
    assert np.array_equal(pair.network.source, expected)
    assert pair.network.read_from == []


def test_what_the_decode_node_does_not_share_is_read_over_the_network() -> None:
    with pair_of(covers_all=False) as pair:
        pair.register()
        elsewhere = pair.regions[1][0]
        pair.memory[0][:] = 9
        pair.lanes.read(
            SESSION, ([elsewhere, pair.regions[0][0]], [pair.network.addr, pair.network.addr + 50], [10, 10])
        )
        assert pair.network.read_from == [(SESSION, [elsewhere])]
        assert (pair.network.source[50:60] == 9).all()
    with pair_of(why_off="off") as pair:
        pair.register()
        pair.read([0], [0], [10])
        assert pair.network.read_from == [(SESSION, [pair.regions[0][0]])]
    with pytest.raises(TransferError, match="has no lane"):
        pair.read([0], [0], [10])


def test_a_room_lands_over_the_sender_as_planned(pair: Pair) -> None:
    """Slots in any order and several layers are written in slices, as the prefill node does."""
    assert pair.register() == Lane("shm", "both see the same memory")
    item_bytes, num_layers = 132, 5
    num_slots = 200_000 // (item_bytes * num_layers)
    addr, num_bytes = pair.regions[0]
    src = RegionView(pair.network.addr, pair.network.source.nbytes, num_layers, num_slots, item_bytes)
    dst = RegionView(addr, num_bytes, num_layers, num_slots, item_bytes)
    rng = np.random.default_rng(2)
    src_slots, dst_slots = (rng.permutation(num_slots)[:150] for _ in range(2))
    src_slots[:40] = np.arange(40)
    dst_slots[:40] = np.setdiff1d(np.arange(num_slots), dst_slots[40:])[:40]
    writes = SlicedWrites((LayerWrites(plan_slots(src_slots, dst_slots), src, dst, 0, num_layers),), 1 << 16)
    sender = Sender(pair.lanes)
    sender.submit(SESSION, WriteBatch(1, "tag", writes, writes.num_bytes))  # type: ignore[arg-type]
    wait_until(sender.poll, "the batch has landed")
    assert sender.close(WAIT_SECS)
    expected = np.zeros_like(pair.memory[0])
    shape = (num_layers, num_slots, item_bytes)
    size = num_layers * num_slots * item_bytes
    expected[:size].reshape(shape)[:, dst_slots] = pair.network.source[:size].reshape(shape)[:, src_slots]
    assert np.array_equal(pair.memory[0], expected)
    assert pair.network.sent == []


@pytest.mark.I1
def test_a_wrong_plan_fails_and_writes_nothing(pair: Pair) -> None:
    pair.register()
    size = POOL_BYTES[0]
    ends = mmap.PAGESIZE * -(-size // mmap.PAGESIZE)  # the next pool may begin after the last page
    for dst, length in ((size, 1), (size - 3, 4), (-1, 1), (-5, 10), (0, size + 1), (ends + (1 << 40), 5)):
        with pytest.raises(TransferError, match=r"nothing was written|not in registered memory") as caught:
            pair.write([0, 0], [10, dst], [5, length])
        assert not caught.value.may_still_land
    with pytest.raises(TransferError, match="not in registered memory"):
        pair.write([pair.network.source.nbytes - 2], [0], [3])
    with pytest.raises(TransferError, match="2 sources, 1 destinations"):
        pair.write([0, 1], [0], [3])
    assert not pair.memory[0].any()
    assert pair.network.sent == []


def test_what_is_not_shared_goes_over_the_network() -> None:
    with pair_of(covers_all=False) as pair:
        assert pair.register() == Lane("shm", "both see the same memory; the rest of it over tcp")
        other = pair.regions[1][0]
        src, dst = [pair.network.addr, pair.network.addr + 50], [pair.regions[0][0] + 9, other]
        pair.lanes.write(SESSION, (src, dst, [40, 40]))
        assert np.array_equal(pair.memory[0][9:49], pair.network.source[:40])
        assert pair.network.sent == [(SESSION, [other])]
        with pytest.raises(TransferError, match="not within the decode node's memory"):
            pair.write([0], [POOL_BYTES[0] - 1], [2])


# --- which lane, and why ----------------------------------------------------------------------------------


def test_the_network_is_taken_where_shared_memory_is_not_wanted() -> None:
    with pair_of(why_off="--same-host-lane is off") as pair:
        assert pair.register() == Lane("tcp", "--same-host-lane is off")
        pair.write([0], [0], [10])
        assert len(pair.network.sent) == 1


def test_without_a_network_all_memory_must_be_shared() -> None:
    with pair_of(network_fault="no Mooncake") as pair:
        assert pair.register() == Lane("shm", "both see the same memory")
    with pair_of(network_fault="no Mooncake", covers_all=False) as pair:
        assert pair.register().refusal == "the decode node shares a part of its memory only; no Mooncake"
    with pair_of(network_fault="no Mooncake") as pair:
        lane = pair.register(None)
        assert lane.refusal == "the decode node offers no shared memory; no Mooncake"


def test_the_network_is_taken_for_a_node_of_another_machine_or_without_the_token(pair: Pair) -> None:
    elsewhere = f"{SOCKET_PREFIX}{'0' * 16}"
    for socket_name, why in (
        (elsewhere, f"{elsewhere} is not among this machine's abstract names"),
        (pair.host.offer.socket, "the token is not that of this decode node's registrations"),
    ):
        lane = pair.register(LaneOffer(socket_name, bytes(32)))
        assert lane.kind == "tcp"
        assert why in lane.reason


@contextmanager
def answering(name: str, packet: bytes | None, descriptors: list[int]) -> Iterator[None]:
    """Listen on a socket and answer one connection with ``packet``, or not at all."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def answer() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                if packet is not None:
                    socket.send_fds(sock, [packet], descriptors)
                sock.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        thread.join(WAIT_SECS)


@pytest.mark.I7
def test_a_wrong_answer_is_refused_and_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 4096)
    pool = allocate_host(4096, pinned=False, shared=True)
    assert pool.shared_fd is not None
    sealed = pool.shared_fd
    cases: list[tuple[bytes | None, list[int], str]] = [
        (None, [], "gave no answer within 0.2 s"),
        (b"\x01", [], "malformed"),
        (encoder.encode(LaneWelcome((Window(4096, 4096, 0),))), [], "descriptor 0 of 0 is missing"),
        (encoder.encode(LaneWelcome((Window(4096, 4096, 0),))), [unsealed], "not sealed"),
        (encoder.encode(LaneWelcome((Window(4096, 4097, 0),))), [sealed], "4096 bytes is said to be 4097"),
        (encoder.encode(LaneWelcome((Window(2**63 - 9, 64, 0),))), [sealed], "overlap"),
        (encoder.encode(LaneWelcome((Window(0, 64, 0), Window(63, 9, 0)))), [sealed], "overlap"),
    ]
    num_open = len(os.listdir("/proc/self/fd"))
    for number, (packet, descriptors, words) in enumerate(cases):
        offer = LaneOffer(f"{SOCKET_PREFIX}{os.getpid():014x}{number:02x}", bytes(32))
        monkeypatch.setattr(
            hisparse_pd.transfer.lane_memory, "ANSWER_SECS", 0.2 if packet is None else WAIT_SECS
        )
        with answering(offer.socket, packet, descriptors), pytest.raises(LaneError, match=words):
            Mapping(offer, "run", "")
    assert len(os.listdir("/proc/self/fd")) == num_open
    os.close(unsealed)
    pool.close()


@pytest.mark.I7
def test_strangers_who_say_nothing_or_nonsense_keep_nobody_out(pair: Pair) -> None:
    with contextlib.ExitStack() as strangers:
        for packet in (b"", b"\xff" * 100, b"x" * 20_000):
            sock = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.connect(f"\0{pair.host.offer.socket}")
            if packet:
                sock.send(packet)
        assert pair.register().kind == "shm"


@pytest.mark.I8
def test_a_stranger_who_says_nothing_is_left_in_time_and_a_writer_that_is_silent_later_is_not(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.register()
    monkeypatch.setattr("hisparse_pd.transfer.lane_host.HELLO_SECS", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(WAIT_SECS)
        stranger.connect(f"\0{pair.host.offer.socket}")
        assert stranger.recv(4096) == b"", "the host closes the connection"
    assert [connection.instance_id for connection in pair.host.connections] == ["run"]


@pytest.mark.I8
def test_a_flood_of_another_user_is_one_line_of_the_log(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    user = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr("hisparse_pd.transfer.lane_host.os.geteuid", lambda: user + 1)
        for _ in range(100):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.settimeout(WAIT_SECS)
                stranger.connect(f"\0{pair.host.offer.socket}")
                assert b"run both as one" in stranger.recv(4096)
    assert caplog.text.count(f"denied processes of user {user} the lane") == 1
    assert pair.register().kind == "shm"


@pytest.mark.I1
def test_a_pair_is_on_the_network_for_good_where_the_memory_was_not_open_in_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier writes over the network may still land when the prefill node's process has ended."""
    with pair.host_stands_still():
        assert pair.lanes.register(SESSION, pair.host.offer, pair.regions) is None
        monkeypatch.setattr(hisparse_pd.transfer.lane, "OPEN_SECS", 0.0)
        lane = pair.lanes.register(SESSION, pair.host.offer, pair.regions)
        assert lane == Lane("tcp", "the decode node's memory was not open within 0 s")
    wait_until(lambda: not pair.is_opening, "the memory was opened, and let go of")
    wait_until(lambda: not pair.host.connections, "the connection ends")
    assert pair.register() == lane
    assert pair.lanes.take_decided() == []
    pair.write([0], [0], [10])
    assert pair.network.sent == [(SESSION, [pair.regions[0][0]])]
    assert pair.ended_when_closed() == []


@pytest.mark.I8
def test_a_pair_on_the_network_is_forgotten_when_its_node_is_lost_and_nothing_may_land(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would be kept for every decode node that there ever was."""
    pair.register(None)
    pair.lanes.forget_all_but(())
    assert SESSION in pair.lanes.pairs, "it was used lately"
    monkeypatch.setattr(hisparse_pd.transfer.lane, "FORGET_SECS", 0.0)
    pair.lanes.forget_all_but({SESSION})
    assert SESSION in pair.lanes.pairs, "its node is registered"
    is_writing, may_end = threading.Event(), threading.Event()

    def write(*_: object) -> None:
        is_writing.set()
        assert may_end.wait(WAIT_SECS)

    monkeypatch.setattr(pair.network, "write", write)
    writer = threading.Thread(target=pair.write, args=([0], [0], [10]))
    writer.start()
    assert is_writing.wait(WAIT_SECS)
    pair.lanes.forget_all_but(())
    assert SESSION in pair.lanes.pairs, "a write is under way"
    may_end.set()
    writer.join()
    pair.lanes.forget_all_but(())
    assert pair.lanes.pairs == {}


@pytest.mark.I1
def test_a_failed_write_keeps_its_pair_on_the_network_for_a_while(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes of it may land after the end of this process, which shared memory would rule out."""
    with pair.host_stands_still(), monkeypatch.context() as patch:
        assert pair.lanes.register(SESSION, pair.host.offer, pair.regions) is None
        patch.setattr(hisparse_pd.transfer.lane, "OPEN_SECS", 0.0)
        assert pair.register().kind == "tcp"
    wait_until(lambda: not pair.is_opening, "the memory was opened, and let go of")

    def fails(*_: object) -> None:
        raise TransferError("no answer", may_still_land=True)

    monkeypatch.setattr(pair.network, "write", fails)
    registered_at = pair.lanes.pairs[SESSION].last_used_at
    with pytest.raises(TransferError, match="no answer"):
        pair.write([0], [0], [10])
    assert pair.lanes.pairs[SESSION].last_used_at > registered_at, "the time counts from the write's end"
    pair.lanes.forget_all_but(())
    assert pair.register().kind == "tcp"
    monkeypatch.setattr(hisparse_pd.transfer.lane, "FORGET_SECS", 0.0)
    pair.lanes.forget_all_but(())
    assert pair.register().kind == "shm", "nothing lands so late"


@pytest.mark.I1
@pytest.mark.I8
def test_memory_that_is_mapped_is_not_forgotten(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hisparse_pd.transfer.lane, "FORGET_SECS", 0.0)
    pair.register()
    pair.lanes.forget_all_but(())
    pair.write([0], [0], [10])
    assert np.array_equal(pair.memory[0][:10], pair.network.source[:10])


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path: the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


# --- sockets in a directory -------------------------------------------------------------------------------


def test_a_directory_has_the_socket_for_its_user_alone_and_only_while_the_node_lives(directory: Path) -> None:
    with pair_of(str(directory)) as pair:
        (path,) = directory.iterdir()
        assert path.name == pair.host.offer.socket
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert pair.register().kind == "shm"
    assert list(directory.iterdir()) == []


def test_sockets_of_nodes_that_were_killed_are_removed_and_no_others(directory: Path) -> None:
    stale = directory / f"{SOCKET_PREFIX}{'1' * 16}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(stale))
    foreign = directory / "other.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(foreign))
    with pair_of(str(directory)) as first:
        assert not stale.exists()
        remove_stale(directory)
        assert (directory / first.host.offer.socket).exists()
        assert foreign.exists()
        assert first.register().kind == "shm"


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root makes namespaces, with unshare"
)
def test_a_process_of_other_namespaces_writes_through_a_directory(directory: Path) -> None:
    """A process in another container has its own network and IPC namespaces."""
    with pair_of(str(directory)) as pair:
        with LaneWriter(pair.host.offer, str(directory), ("unshare", "--net", "--ipc")):
            wait_until(lambda: pair.memory[0].any(), "the first write")
        wait_until(lambda: pair.host.take_ended() == ["child"], "the kernel closes its connection")


def test_a_directory_that_is_not_there_ends_the_start_with_its_name(directory: Path) -> None:
    pool = allocate_host(4096, pinned=False, shared=True)
    assert pool.shared_fd is not None
    with pytest.raises(TransferSetupError, match=rf"{directory}/none.*--same-host-dir"):
        LaneHost([SharedMemory(4096, 4096, pool.shared_fd)], directory=str(directory / "none"))
    pool.close()


# --- who still writes -------------------------------------------------------------------------------------


@pytest.mark.I1
def test_a_killed_writer_is_gone_and_a_stopped_one_is_not(pair: Pair) -> None:
    """The process writes without end. Memory no longer changes once its end is noticed."""
    with LaneWriter(pair.host.offer) as writer:
        wait_until(lambda: pair.memory[0].any(), "the first write")
        writer.pause()
        assert pair.host.take_ended() == []
        assert [connection.instance_id for connection in pair.host.connections] == ["child"]
        pair.memory[0][:] = 0
        writer.resume()
        wait_until(lambda: pair.memory[0].any(), "a write after the pause")
        assert pair.host.take_ended() == []
        writer.kill()
        ended = wait_until(pair.host.take_ended, "the kernel closes its connection")
        pair.memory[0][:] = 0
        writer.close()
        assert ended == ["child"]
        assert not pair.memory[0].any()


@pytest.mark.I1
def test_a_run_that_may_write_otherwise_is_never_reported_gone() -> None:
    with pair_of(covers_all=False) as pair:
        pair.register()
        pair.lanes.close()
        assert pair.ended_when_closed() == []


@pytest.mark.I1
def test_memory_is_let_go_of_when_the_write_in_progress_is_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.register()
    mapping = pair.lanes.pairs[SESSION].mapping
    assert mapping is not None
    is_copying, may_go_on = threading.Event(), threading.Event()

    def copy(src: SlotArray, dst: SlotArray, lengths: SlotArray) -> None:
        is_copying.set()
        assert may_go_on.wait(WAIT_SECS)
        copy_ranges(src, dst, lengths)

    monkeypatch.setattr(hisparse_pd.transfer.lane_memory, "copy_ranges", copy)
    thread = threading.Thread(target=pair.write, args=([0], [0], [100]))
    thread.start()
    assert is_copying.wait(WAIT_SECS)
    pair.host.close()
    wait_until(lambda: pair.lanes.lane(SESSION) is None, "the end of the decode node is noticed")
    with pytest.raises(TransferError, match="has ended"):
        pair.write([0], [200], [10])
    assert not any(mapped.closed for mapped in mapping.maps)
    may_go_on.set()
    thread.join(WAIT_SECS)
    assert np.array_equal(pair.memory[0][:100], pair.network.source[:100])
    wait_until(lambda: all(mapped.closed for mapped in mapping.maps), "it is unmapped")
    assert pair.network.sent == []


@pytest.mark.I1
def test_a_pair_keeps_its_lane_until_the_decode_node_has_ended(pair: Pair) -> None:
    """Otherwise the end of the process would not tell that nothing lands any more."""
    pair.register()
    (connection,) = pair.host.connections
    assert pair.register().kind == "shm"
    assert pair.host.connections == {connection}
    mapping = pair.lanes.pairs[SESSION].mapping
    assert mapping is not None
    pair.host.close()
    wait_until(lambda: all(mapped.closed for mapped in mapping.maps), "its memory is given back")
    with pytest.raises(TransferError, match="has ended"):
        pair.write([0], [0], [10])
    assert pair.lanes.pairs == {}, "of a node that is gone nothing is kept"
    assert pair.register(None).kind == "tcp"  # the offer shows that it is another process
    assert pair.network.sent == []


@pytest.mark.I7
def test_memory_for_which_no_thread_starts_is_opened_at_the_next_registration(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        assert pair.lanes.register(SESSION, pair.host.offer, pair.regions) is None
    with pytest.raises(TransferError, match="has no lane"):
        pair.write([0], [0], [10])
    assert pair.register().kind == "shm"
    pair.write([0], [0], [10])
    assert np.array_equal(pair.memory[0][:10], pair.network.source[:10])


@pytest.mark.I7
def test_without_a_thread_to_unmap_memory_in_it_is_unmapped_all_the_same(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping = Mapping(pair.host.offer, "run", "")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refuse)
        mapping.close()
    assert all(mapped.closed for mapped in mapping.maps)
    wait_until(lambda: not pair.host.connections, "the connection ends")


def _refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.I1
def test_another_process_at_the_same_session_has_a_lane_of_its_own(pair: Pair) -> None:
    pair.register()
    assert pair.register(None).kind == "tcp"
    wait_until(lambda: pair.host.take_ended() == ["run"], "the memory is let go of")


@pytest.mark.I1
def test_two_connections_of_a_run_are_over_when_both_are(pair: Pair) -> None:
    first, second = (Mapping(pair.host.offer, "twice", "") for _ in range(2))
    for mapping in (first, second):
        mapping.promise_sole()
    first.close()
    wait_until(lambda: len(pair.host.connections) == 1, "the connection ends")
    assert pair.host.take_ended() == []
    second.close()
    wait_until(lambda: pair.host.take_ended() == ["twice"], "the other ends")


@pytest.mark.I1
def test_memory_that_was_opened_and_not_written_to_says_nothing_when_it_is_let_go_of(pair: Pair) -> None:
    """The pair may be on the network, for example because the memory could not be mapped."""
    Mapping(pair.host.offer, "failed", "").close()
    assert pair.ended_when_closed() == []
