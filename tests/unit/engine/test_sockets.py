"""The channels between fronts and engines, over real ZMQ sockets, on one machine and across two."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import zmq

from hisparse_pd.base.access import PeerList
from hisparse_pd.base.ports import free_port
from hisparse_pd.base.vocabulary import SamplingParams
from hisparse_pd.engine.messages import (
    Abort,
    EngineStats,
    FlushCache,
    FromEngine,
    Generate,
    GenerateGroup,
    RequestFailed,
    Shutdown,
    ToEngine,
    Tokens,
    encoder,
    from_engine_decoder,
    front_number_of,
    request_prefix,
)
from hisparse_pd.engine.sockets import Crossing, EngineSocket, FrontGone, FrontSocket
from hisparse_pd.protocol.channels import ControlKeys, Heartbeats
from hisparse_pd.protocol.polling import Poller
from tests.identities import ROOT
from tests.port_scan import VISITS, visit
from tests.unit.endless import Endless
from tests.unit.relay import Relay
from tests.waiting import WAIT_MS, WAIT_SECS, wait_until

STATS = EngineStats({}, {}, 0, 0, 0, 1)
FAILED = RequestFailed("r1", 503, "full")


def heard(front: FrontSocket, num: int) -> list[FromEngine]:
    """Return the next ``num`` messages of a front's engine."""
    poller = Poller()
    poller.register(front)
    messages: list[FromEngine] = []
    while len(messages) < num and poller.wait(WAIT_SECS):
        messages += front.receive()
    return messages


@contextmanager
def on_one_machine(directory: Path, num_fronts: int) -> Iterator[tuple[EngineSocket, list[FrontSocket]]]:
    endpoints = [f"ipc://{directory}/{front}" for front in range(num_fronts)]
    fronts = [FrontSocket(endpoint) for endpoint in endpoints]
    engine = EngineSocket(endpoints)
    yield engine, fronts
    engine.close()
    for front in fronts:
        front.close()


def test_a_request_id_names_its_front() -> None:
    assert [front_number_of(request_prefix(front)) for front in (0, 1, 63, 255)] == [0, 1, 63, 255]
    assert request_prefix(1) != request_prefix(1)


def test_what_is_about_a_request_goes_to_its_front_and_the_rest_to_all(tmp_path: Path) -> None:
    with on_one_machine(tmp_path, 3) as (engine, fronts):
        ids = [request_prefix(front) + "-0" for front in range(3)]
        messages: list[FromEngine] = [
            Tokens(ids[2], (1,)),
            RequestFailed(ids[0], 503, "full"),
            Tokens(ids[2], (2,)),
        ]
        for message in (*messages, STATS):
            engine.send(message)
        assert heard(fronts[0], 2) == [messages[1], STATS]
        assert heard(fronts[1], 1) == [STATS]
        assert heard(fronts[2], 3) == [messages[0], messages[2], STATS]


def test_an_engine_hears_all_fronts_and_leaves_when_all_have_said_so(tmp_path: Path) -> None:
    with on_one_machine(tmp_path, 2) as (engine, fronts):
        poller = Poller()
        for channel in engine.channels:
            poller.register(channel)
        received: list[ToEngine] = []

        def hear(num: int) -> None:
            while len(received) < num and poller.wait(WAIT_SECS):
                received.extend(engine.receive())

        engine.send(STATS)
        assert [heard(front, 1) for front in fronts] == [[STATS], [STATS]], "they are connected"
        for front, message in ((0, Shutdown(0)), (0, Shutdown(0)), (1, FlushCache("01"))):
            assert fronts[front].send(message)
        hear(1)
        assert received == [FlushCache("01")]
        assert fronts[1].send(Abort("x"))
        assert fronts[1].send(Shutdown(1))
        hear(3)
        assert received == [FlushCache("01"), Abort("x"), Shutdown(1)]


# --- what a turn takes in ----------------------------------------------------------------------------

_SAMPLES = tuple(Generate(f"r{i}", i, 3, SamplingParams(1), "127.0.0.1", 1) for i in range(100))


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize(
    ("message", "most"),
    [
        (Abort("r"), 256),
        (GenerateGroup(_SAMPLES[:1], ROOT, b"\0" * (1 << 20)), 4),
        (GenerateGroup(_SAMPLES, ROOT, b""), 3),
    ],
    ids=["messages", "bytes", "samples"],
)
def test_an_engine_takes_in_a_burst_of_its_fronts_messages_between_two_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: ToEngine, most: int
) -> None:
    """Two fronts that flood the engine get a turn each: neither keeps it from hearing the other."""
    with on_one_machine(tmp_path, 2) as (engine, _), monkeypatch.context() as patch:
        floods = [Endless(encoder.encode(message)) for _ in engine.channels]
        for channel, flood in zip(engine.channels, floods, strict=True):
            patch.setattr(channel, "socket", flood)
        for _ in range(4):
            assert len(list(engine.receive())) == most
        assert [flood.num_received for flood in floods] == [2 * most] * 2


@pytest.mark.I7
@pytest.mark.I8
def test_a_slow_front_neither_blocks_its_engine_nor_loses_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        num_free = 2

        def __init__(self) -> None:
            self.sent: list[bytes] = []

        def send(self, frame: bytes, flags: int) -> None:
            assert flags == zmq.NOBLOCK
            if not self.num_free:
                raise zmq.Again
            self.num_free -= 1
            self.sent.append(frame)

        def recv_multipart(self, flags: int) -> list[bytes]:
            raise zmq.Again

    failures = [RequestFailed(f"r{i}", 503, "full") for i in range(10)]
    with on_one_machine(tmp_path, 1) as (engine, _), monkeypatch.context() as patch:
        full = Full()
        patch.setattr(engine.channels[0], "socket", full)
        for failure in failures:
            engine.send(failure)
            engine.send(STATS)
        assert len(full.sent) == 2
        assert len(engine.channels[0].backlog) == 9, "statistics do not pile up"
        full.num_free = 100
        assert not list(engine.receive())
        assert not engine.channels[0].backlog
        decoded = [from_engine_decoder.decode(frame) for frame in full.sent]
        assert [message for message in decoded if message != STATS] == failures


def test_what_a_slow_front_had_no_room_for_still_reaches_it_when_the_engine_leaves(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/front"
    with closing(FrontSocket(endpoint)) as front:
        with closing(EngineSocket([endpoint])) as engine:
            sent: list[FromEngine] = []
            while len(engine.channels[0].backlog) < 3:
                sent.append(RequestFailed(f"r{len(sent)}", 503, "full"))
                engine.send(sent[-1])
            received = heard(front, len(sent) - 3)
            assert received == sent[:-3]
        assert heard(front, 3) == sent[-3:]


# --- on two machines ---------------------------------------------------------------------------------

PATIENT = Heartbeats(30.0, 60.0)
with_and_without_key = pytest.mark.parametrize(
    "keys", [None, ControlKeys.generate()], ids=["plain", "with a key"]
)


def across(
    front_keys: ControlKeys | None,
    engine_keys: ControlKeys | None,
    allowed: str = "127.0.0.1",
    heartbeats: Heartbeats = PATIENT,
) -> tuple[closing[FrontSocket], closing[EngineSocket]]:
    """Make a front and an engine on another machine."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    front = FrontSocket(endpoint, Crossing(front_keys, PeerList.parse([allowed]), heartbeats))
    engine = EngineSocket([endpoint], Crossing(engine_keys, PeerList(), heartbeats))
    return closing(front), closing(engine)


@with_and_without_key
def test_an_engine_on_another_machine_notices_the_end_of_its_front(keys: ControlKeys | None) -> None:
    """The engine still hears what came before."""
    of_front, of_engine = across(keys, keys)
    with of_engine as engine:
        with of_front as front:
            assert front.socket.poll(WAIT_MS, zmq.POLLOUT)
            assert front.send(Abort("r1"))
            assert engine.channels[0].socket.poll(WAIT_MS)
        assert list(engine.receive()) == [Abort("r1")]

        def listen() -> None:
            while True:
                assert list(engine.receive()) == []

        with pytest.raises(FrontGone, match=r"the front at tcp://127\.0\.0\.1:\d+ is gone"):
            listen()


@pytest.mark.I7
@with_and_without_key
def test_a_front_notices_the_end_of_its_engine_and_of_nobody_else(keys: ControlKeys | None) -> None:
    """Strangers come and go before an engine is there and while it is; only the engine's end is a loss."""
    of_front, of_engine = across(keys, keys)
    with of_front as front:
        with of_engine as engine:
            address = ("127.0.0.1", int(engine.channels[0].endpoint.rsplit(":", 1)[1]))
            for data in VISITS:
                visit(address, data, reset=False)
                assert list(front.receive()) == []
            engine.send(FAILED)
            assert heard(front, 1) == [FAILED]
            for data in VISITS:
                visit(address, data, reset=True)
            assert not front.take_loss()
            engine.send(FAILED)
            assert heard(front, 1) == [FAILED]
            assert not front.take_loss()
        while not front.take_loss():
            assert front.loss_fileno is not None
            assert select.select([front.loss_fileno], [], [], WAIT_SECS)[0]


@pytest.mark.I7
def test_an_engine_that_is_busy_is_not_lost_however_much_it_has_to_read() -> None:
    """Only the front sends heartbeats, so that all that passes from the engine are its answers to them."""
    port = free_port()
    here = PeerList.parse(["127.0.0.1"])
    asks, only_answers = Heartbeats(0.05, WAIT_SECS), Heartbeats(0.0, WAIT_SECS)
    with (
        closing(FrontSocket(f"tcp://127.0.0.1:{port}", Crossing(None, here, asks))) as front,
        closing(Relay(port)) as relay,
        closing(EngineSocket([relay.endpoint], Crossing(None, PeerList(), only_answers))) as engine,
    ):
        engine.send(FAILED)
        assert heard(front, 1) == [FAILED]
        aborts = [Abort(f"r{number}") for number in range(1000)]
        for abort in aborts:
            wait_until(partial(front.send, abort))
        relay.wait_for_pieces(20, from_client=True)
        assert not front.take_loss()
        assert not engine.channels[0].is_lost
        received: list[object] = []

        def all_have_come() -> bool:
            received.extend(engine.receive())
            return len(received) == len(aborts)

        wait_until(all_have_come)
        assert received == aborts


@pytest.mark.parametrize(
    ("keys", "allowed"),
    [(ControlKeys.generate(), "127.0.0.1"), (None, "192.0.2.0/24")],
    ids=["key", "address"],
)
def test_nobody_else_is_connected_to_a_front(keys: ControlKeys | None, allowed: str) -> None:
    of_front, of_stranger = across(ControlKeys.generate() if keys else None, keys, allowed)
    with of_front as front, of_stranger as stranger:
        stranger.send(FAILED)
        assert not front.socket.poll(200, zmq.POLLIN | zmq.POLLOUT)


def test_a_taken_port_is_an_error_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at tcp://127.0.0.1:{port} for engines"):
            FrontSocket(f"tcp://127.0.0.1:{port}", Crossing(None, PeerList(), PATIENT))


def test_a_socket_path_that_is_too_long_is_an_error_with_a_remedy() -> None:
    with pytest.raises(OSError, match="set TMPDIR to a shorter path"):
        FrontSocket(f"ipc:///tmp/{'x' * 100}/engine.ipc")
