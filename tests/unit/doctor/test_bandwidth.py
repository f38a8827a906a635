"""Two doctors over real sockets and the real Mooncake on loopback: bytes, refusals, malformed messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from hisparse_pd.commands.doctor import bandwidth
from hisparse_pd.commands.doctor.bandwidth import Buffer, measure, serve
from hisparse_pd.commands.doctor.channel import (
    DOCTOR_VERSION,
    MAX_MESSAGE_BYTES,
    DoctorClient,
    DoctorError,
    DoctorServer,
    Offer,
    Question,
    QuestionRefused,
)
from hisparse_pd.transfer.engine import TransferEngine, TransferError
from hisparse_pd.transfer.lane import Lane, Lanes
from hisparse_pd.transfer.lane_host import LaneHost

BUFFER_BYTES = 1 << 20
TIMEOUT_SECS = 60.0
Engines = tuple[TransferEngine, TransferEngine]
"""The engine that measures and the engine that serves."""


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    patch = pytest.MonkeyPatch()
    patch.setenv("MC_LOG_LEVEL", "ERROR")
    pair = TransferEngine("127.0.0.1"), TransferEngine("127.0.0.1")
    yield pair
    for engine in pair:
        engine.close()
    patch.undo()


@pytest.fixture
def buffer(engines: Engines) -> Iterator[Buffer]:
    buffer = Buffer(engines[1], BUFFER_BYTES)
    yield buffer
    buffer.close()


ServeIn = Callable[[DoctorServer, Callable[[], bool]], None]


@contextmanager
def serving(serve_in: ServeIn) -> Iterator[DoctorClient]:
    """Run a server in a thread; yield its client."""
    server = DoctorServer("127.0.0.1", 0)
    stopped = threading.Event()
    thread = threading.Thread(target=serve_in, args=(server, stopped.is_set))
    thread.start()
    try:
        with closing(DoctorClient("127.0.0.1", server.port, TIMEOUT_SECS)) as client:
            yield client
    finally:
        stopped.set()
        thread.join(TIMEOUT_SECS)
        server.close()


@pytest.fixture
def client(engines: Engines, buffer: Buffer) -> Iterator[DoctorClient]:
    """Client of a doctor that serves ``buffer``."""

    def run(server: DoctorServer, is_stopped: Callable[[], bool]) -> None:
        serve(server, engines[1], buffer, time.monotonic() + 60, is_stopped)

    with serving(run) as client:
        yield client


@pytest.fixture
def port(client: DoctorClient) -> int:
    return int(client.endpoint.rpartition(":")[2])


# --- measuring --------------------------------------------------------------------------------------------


def test_every_size_is_measured_and_the_bytes_arrive(
    engines: Engines, buffer: Buffer, client: DoctorClient
) -> None:
    before = dict(engines[0].registered)
    rates, lane = measure(client, engines[0], [64, 1152, 65536], 0.001)
    assert engines[0].registered == before, "the source is unregistered"
    assert lane == Lane("tcp", "the decode node offers no shared memory")
    assert {rate.over for rate in rates} == {"tcp"}
    assert [rate.message_bytes for rate in rates] == [64, 1152, 65536]
    assert [rate.num_messages % size for rate, size in zip(rates, (512, 512, 16), strict=True)] == [0, 0, 0]
    assert all(rate.num_messages > 0 and rate.secs > 0 and rate.bytes_per_sec > 0 for rate in rates)
    sent = np.random.default_rng(bandwidth.SEED).integers(0, 256, BUFFER_BYTES, np.uint8)
    assert np.array_equal(buffer.memory, sent)


def test_a_message_may_fill_the_whole_buffer_and_no_more(engines: Engines, client: DoctorClient) -> None:
    (rate,), _ = measure(client, engines[0], [BUFFER_BYTES], 1e-6)
    assert rate.num_messages >= 1
    with pytest.raises(DoctorError, match=f"offers {BUFFER_BYTES} bytes.*{BUFFER_BYTES + 1}"):
        measure(client, engines[0], [BUFFER_BYTES + 1], 0.001)


def test_bytes_that_did_not_arrive_are_noticed(
    engines: Engines, client: DoctorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines[0], "write", lambda *_: None)
    with pytest.raises(DoctorError, match="arrived with checksum"):
        measure(client, engines[0], [64], 0.001)


def test_a_connection_that_does_not_come_up_at_once_is_tried_again(
    client: DoctorClient, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a node's sender it tries again, but not twice in a row, nor what was refused on its own side."""
    write, failures = engines[0].write, [True, False, False, True]

    def failing(*arguments: Any) -> None:
        if failures and failures.pop(0):
            raise TransferError("code -1", may_still_land=True)
        write(*arguments)

    monkeypatch.setattr(engines[0], "write", failing)
    rates, _ = measure(client, engines[0], [64, 1152], 1e-6)
    assert [rate.message_bytes for rate in rates] == [64, 1152]
    assert not failures
    failures += [True, True]
    with pytest.raises(TransferError, match="in 2 attempts: code -1"):
        measure(client, engines[0], [64], 1e-6)
    attempts: list[object] = []

    def refusing(*arguments: Any) -> None:
        attempts.append(arguments)
        raise TransferError("not in registered memory")

    monkeypatch.setattr(engines[0], "write", refusing)
    with pytest.raises(TransferError, match=r"^not in registered memory$"):
        measure(client, engines[0], [64], 1e-6)
    assert len(attempts) == 1


def test_a_doctor_on_another_transport_is_refused_with_both(
    engines: Engines, client: DoctorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines[0], "transport", replace(engines[0].transport, protocol="rdma"))
    with pytest.raises(DoctorError, match="you are on 'rdma', this doctor on 'tcp'"):
        measure(client, engines[0], [64], 0.001)


def test_a_device_that_is_not_there_is_told(engines: Engines, client: DoctorClient) -> None:
    with pytest.raises(DoctorError, match="64 bytes on device nonsense cannot be allocated"):
        Buffer(engines[0], 64, "nonsense")
    with pytest.raises(DoctorError, match="nonsense"):
        measure(client, engines[0], [64], 0.001, "nonsense")


# --- the lane of one machine ------------------------------------------------------------------------------


@pytest.fixture
def shared(engines: Engines) -> Iterator[Buffer]:
    buffer = Buffer(engines[1], BUFFER_BYTES, shared=True)
    yield buffer
    buffer.close()


@pytest.fixture
def neighbour(engines: Engines, shared: Buffer, tmp_path: Path) -> Iterator[DoctorClient]:
    """Client of a doctor that also offers ``shared`` to its machine, by a socket in ``tmp_path``."""

    def run(server: DoctorServer, is_stopped: Callable[[], bool]) -> None:
        serve(server, engines[1], shared, time.monotonic() + 60, is_stopped, host.offer)

    with closing(LaneHost(shared.shared_memory, directory=str(tmp_path))) as host, serving(run) as client:
        yield client


def test_the_lane_is_measured_beside_the_network_and_its_bytes_arrive(
    engines: Engines, shared: Buffer, neighbour: DoctorClient, tmp_path: Path
) -> None:
    rates, lane = measure(neighbour, engines[0], [64, 65536], 0.001, directory=str(tmp_path))
    assert lane == Lane("shm", "both see the same memory")
    assert [(rate.over, rate.message_bytes) for rate in rates] == [
        (over, size) for over in ("tcp", "shm") for size in (64, 65536)
    ]
    drawn = np.random.default_rng(bandwidth.SEED)
    sent_each = [drawn.integers(0, 256, BUFFER_BYTES, np.uint8) for _ in range(2)]
    assert np.array_equal(shared.memory, sent_each[1]), "what the lane has written, last"


def test_bytes_that_the_lane_did_not_write_are_noticed(
    engines: Engines, neighbour: DoctorClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lanes, "write", lambda *_: None)
    with pytest.raises(DoctorError, match="arrived with checksum"):
        measure(neighbour, engines[0], [64], 0.001, directory=str(tmp_path))


def test_a_socket_that_cannot_be_seen_leaves_the_network_and_the_reason(
    engines: Engines, neighbour: DoctorClient
) -> None:
    rates, lane = measure(neighbour, engines[0], [64], 0.001)
    assert [rate.over for rate in rates] == ["tcp"]
    assert lane.kind == "tcp"
    assert "without a common --same-host-dir" in lane.reason


# --- questions and answers --------------------------------------------------------------------------------


def test_another_version_is_refused_with_both(client: DoctorClient) -> None:
    answer = client.ask(Question(99, "tcp"))
    assert isinstance(answer, QuestionRefused)
    assert f"you speak 99, this doctor {DOCTOR_VERSION}" in answer.error


def test_a_checksum_of_more_than_there_is_is_refused(client: DoctorClient) -> None:
    answer = client.ask(Question(DOCTOR_VERSION, "tcp", BUFFER_BYTES + 1))
    assert isinstance(answer, QuestionRefused)
    assert str(BUFFER_BYTES) in answer.error
    assert isinstance(client.ask(Question(DOCTOR_VERSION, "tcp", BUFFER_BYTES)), Offer)


@pytest.mark.parametrize(
    "frames", [[b""], [b"\xc1"], [b"\x80\x04pickle"], [msgspec.msgpack.encode([9, 1])], [b"a", b"b"]]
)
def test_a_malformed_question_is_refused_and_the_next_one_answered(port: int, frames: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send_multipart(frames)
        assert socket.poll(int(TIMEOUT_SECS * 1000))
        answer = msgspec.msgpack.decode(socket.recv(), type=Offer | QuestionRefused)
        assert isinstance(answer, QuestionRefused)
        assert "malformed question" in answer.error
        socket.send(msgspec.msgpack.encode(Question(DOCTOR_VERSION, "tcp")))
        assert socket.poll(int(TIMEOUT_SECS * 1000))
        assert isinstance(msgspec.msgpack.decode(socket.recv(), type=Offer | QuestionRefused), Offer)


def test_an_oversized_question_costs_only_its_sender_the_connection(port: int, client: DoctorClient) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(bytes(MAX_MESSAGE_BYTES + 1))
        assert monitor.poll(int(TIMEOUT_SECS * 1000)), "the connection stands"
        socket.disable_monitor()
        monitor.close()
    assert isinstance(client.ask(Question(DOCTOR_VERSION, "tcp")), Offer)


def test_an_answer_that_is_none_is_an_error() -> None:
    def answer_nonsense(server: DoctorServer, is_stopped: Callable[[], bool]) -> None:
        while not is_stopped():
            server.serve_one(lambda question: Offer("s", -1, 5), 0.02)

    with serving(answer_nonsense) as client, pytest.raises(DoctorError, match="sent a malformed answer"):
        client.ask(Question(DOCTOR_VERSION, "tcp"))


def test_an_address_that_is_none() -> None:
    with pytest.raises(DoctorError, match="cannot connect"):
        DoctorClient("no host", 1, 0.05)


def test_a_taken_port_is_told(port: int) -> None:
    with pytest.raises(DoctorError, match=f"cannot listen on tcp://127.0.0.1:{port}"):
        DoctorServer("127.0.0.1", port)


def test_serving_ends_in_time(engines: Engines, buffer: Buffer) -> None:
    server = DoctorServer("127.0.0.1", 0)
    serve(server, engines[1], buffer, time.monotonic() + 0.01, lambda: False)
    server.close()
