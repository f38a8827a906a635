"""The control and ipc channels over real ZMQ sockets."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from protocol import messages
from protocol.channels import (
    ControlClient,
    ControlKeyError,
    ControlKeys,
    ControlServer,
    EngineSocket,
    FrontSocket,
    Poller,
    Wakeup,
)
from protocol.engine_messages import Abort, RequestFailed
from protocol.messages import Heartbeat, HeartbeatAck, ToDecode, ToPrefill

WAIT_SECS = 10.0


def receive_one(server: ControlServer) -> tuple[bytes, ToPrefill]:
    poller = Poller()
    poller.register(server)
    assert poller.wait(WAIT_SECS), "nothing arrived"
    return next(server.receive())


def receive_answer(client: ControlClient) -> ToDecode:
    poller = Poller()
    poller.register(client)
    assert poller.wait(WAIT_SECS), "nothing arrived"
    return next(client.receive())


@pytest.fixture
def make_server() -> Iterator[Callable[..., ControlServer]]:
    servers: list[ControlServer] = []

    def make(keys: ControlKeys | None = None) -> ControlServer:
        servers.append(ControlServer("127.0.0.1", 0, keys))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def make_client() -> Iterator[Callable[..., ControlClient]]:
    clients: list[ControlClient] = []

    def make(server: ControlServer, keys: ControlKeys | None = None) -> ControlClient:
        clients.append(ControlClient(f"tcp://127.0.0.1:{server.port}", keys))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


Make = Callable[..., ControlServer]
MakeClient = Callable[..., ControlClient]


def test_a_message_and_its_answer(make_server: Make, make_client: MakeClient) -> None:
    server = make_server()
    client = make_client(server)
    assert client.send(Heartbeat(1))
    peer, message = receive_one(server)
    assert message == Heartbeat(1)
    assert server.send(peer, HeartbeatAck(1, "inst"))
    assert receive_answer(client) == HeartbeatAck(1, "inst")


def test_malformed_frames_are_counted_and_the_next_message_arrives(
    make_server: Make, make_client: MakeClient
) -> None:
    server = make_server()
    client = make_client(server)
    client.socket.send(b"\xc1garbage")
    client.socket.send_multipart([b"two", b"frames"])
    client.socket.send(b"")
    client.send(Heartbeat(2))
    seen: list[ToPrefill] = []
    poller = Poller()
    poller.register(server)
    while not seen:
        assert poller.wait(WAIT_SECS), "nothing arrived"
        seen.extend(message for _, message in server.receive())
    assert seen == [Heartbeat(2)]
    assert server.dropped["malformed"] == 3


def test_an_oversized_frame_costs_only_its_sender_the_connection(
    make_server: Make, make_client: MakeClient
) -> None:
    server = make_server()
    hostile = make_client(server)
    hostile.socket.send(bytes(messages.MAX_MESSAGE_BYTES + 1))
    client = make_client(server)
    client.send(Heartbeat(3))
    assert receive_one(server)[1] == Heartbeat(3)


def test_an_answer_to_a_peer_that_left_is_counted(make_server: Make, make_client: MakeClient) -> None:
    server = make_server()
    assert not server.send(b"nobody", HeartbeatAck(1, "inst"))
    assert server.dropped["unroutable"] == 1


def test_with_keys_only_a_holder_of_the_key_gets_through(make_server: Make, make_client: MakeClient) -> None:
    keys = ControlKeys.generate()
    server = make_server(keys)
    stranger_public, stranger_secret = zmq.curve_keypair()
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
    stranger.setsockopt(zmq.CURVE_PUBLICKEY, stranger_public)
    stranger.setsockopt(zmq.CURVE_SECRETKEY, stranger_secret)
    stranger.connect(f"tcp://127.0.0.1:{server.port}")
    stranger.send(messages.encoder.encode(Heartbeat(666)))
    plain = make_client(server)
    plain.send(Heartbeat(667))
    member = make_client(server, keys)
    member.send(Heartbeat(4))
    try:
        assert receive_one(server)[1] == Heartbeat(4)
        poller = Poller()
        poller.register(server)
        assert not poller.wait(0.3), "a peer without the key was let in"
    finally:
        stranger.close()


def test_a_key_survives_its_file(tmp_path: Path) -> None:
    keys = ControlKeys.generate()
    path = tmp_path / "key"
    path.write_bytes(keys.secret + b"\n")
    assert ControlKeys.load(path) == keys


@pytest.mark.parametrize("content", [None, b"", b"not a key", b"x" * 41])
def test_a_bad_key_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ControlKeyError, match="control_key_file"):
        ControlKeys.load(path)


def test_the_ipc_channel_carries_both_directions(tmp_path: Path) -> None:
    import asyncio

    async def talk() -> None:
        front = FrontSocket(str(tmp_path / "ipc"))
        engine = EngineSocket(str(tmp_path / "ipc"))
        try:
            await front.send(Abort("r1"))
            poller = Poller()
            poller.register(engine)
            assert await asyncio.to_thread(poller.wait, WAIT_SECS)
            assert list(engine.receive()) == [Abort("r1")]
            engine.send(RequestFailed("r1", 503, "full"))
            answer = await asyncio.wait_for(front.receive(), WAIT_SECS)
            assert answer == RequestFailed("r1", 503, "full")
        finally:
            engine.close()
            front.close()

    asyncio.run(talk())


def test_a_wakeup_ends_a_wait_and_is_cleared() -> None:
    wakeup = Wakeup()
    poller = Poller()
    poller.register(wakeup)
    try:
        assert not poller.wait(0)
        for _ in range(100_000):  # more than the pipe holds: setting must neither block nor raise
            wakeup.set()
        assert poller.wait(WAIT_SECS)
        wakeup.clear()
        assert not poller.wait(0)
    finally:
        wakeup.close()
