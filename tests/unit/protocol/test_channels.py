"""The control channel over real ZMQ sockets."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from hisparse_pd.base.access import PeerList
from hisparse_pd.protocol import messages
from hisparse_pd.protocol.channels import (
    ControlAddressError,
    ControlClient,
    ControlKeyError,
    ControlKeys,
    ControlServer,
    Heartbeats,
)
from hisparse_pd.protocol.messages import Bootstrap, Extent, Heartbeat, HeartbeatAck, ToPrefill
from hisparse_pd.protocol.polling import Poller, Wakeup
from hisparse_pd.protocol.zap import FOREIGN_ADDRESS, FOREIGN_KEY
from tests.identities import ROOT
from tests.unit.endless import Endless
from tests.unit.relay import Relay
from tests.waiting import WAIT_SECS, wait_until


def receive_one(channel: ControlServer | ControlClient) -> Any:
    """Return the next message that decodes; for a server with the sender's identity."""
    poller = Poller()
    poller.register(channel)
    while poller.wait(WAIT_SECS):
        for received in channel.receive():
            return received
    raise AssertionError("nothing arrived")


def test_a_process_may_have_more_sockets_than_zmq_allows_by_itself() -> None:
    """In a process of its own, because no socket may have been made before."""
    code = """
import resource
import zmq
from hisparse_pd.protocol import channels

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
channels.allow_many_peers()
sockets = [zmq.Context.instance().socket(zmq.PAIR) for _ in range(1100)]
print(len(sockets))
zmq.Context.instance().destroy(linger=0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECS)
    assert done.stdout == "1100\n", done.stderr


@pytest.fixture
def make_server() -> Iterator[Callable[..., ControlServer]]:
    servers: list[ControlServer] = []

    def make(keys: ControlKeys | None = None, allowed: Sequence[str] = ()) -> ControlServer:
        servers.append(ControlServer("127.0.0.1", 0, keys, PeerList.parse(allowed)))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def make_client() -> Iterator[Callable[..., ControlClient]]:
    clients: list[ControlClient] = []

    def make(server: ControlServer, keys: ControlKeys | None = None, source: str = "") -> ControlClient:
        """Make a client that connects from the address ``source``."""
        port = f"127.0.0.1:{server.port}"
        clients.append(ControlClient(f"tcp://{source}:0;{port}" if source else f"tcp://{port}", keys))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


Make = Callable[..., ControlServer]
MakeClient = Callable[..., ControlClient]


@pytest.mark.I7
def test_malformed_frames_are_counted_and_the_next_message_arrives(
    make_server: Make, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Frames that make a plain decoder fail are counted too. Only one of many is logged."""
    server = make_server()
    client = make_client(server)
    no_utf8 = b"\x93\x04\x03\xa2\xff\xfe"  # as the reason of an AbortRoom
    nested = b"\x93\x02\x09" + b"\x91" * 100_000 + b"\xc0"  # as an unknown field of a Heartbeat
    for frames in ([b"\xc1garbage"], [b"two", b"frames"], [b""], [no_utf8], [nested]):
        client.socket.send_multipart(frames)
    client.send(Heartbeat(2))
    assert receive_one(server)[1] == Heartbeat(2)
    assert server.dropped["malformed"] == 5
    assert len(caplog.records) == 1
    for frame in (no_utf8, nested):
        server.socket.send_multipart([_identity(server, client), frame])
    server.send(_identity(server, client), HeartbeatAck(2, "inst"))
    assert receive_one(client) == HeartbeatAck(2, "inst")
    assert client.dropped["malformed"] == 2


def _identity(server: ControlServer, client: ControlClient) -> bytes:
    client.send(Heartbeat(1))
    identity: bytes = receive_one(server)[0]
    return identity


def test_a_message_that_the_peer_would_not_take_is_not_sent(
    make_server: Make, make_client: MakeClient
) -> None:
    server = make_server()
    client = make_client(server)
    extents = tuple(Extent(2**40 + number, 2**40) for number in range(messages.MAX_EXTENTS))
    assert not client.send(Bootstrap(1, extents, extents, 0, bytes(4 << 20), ROOT))
    assert client.dropped["oversized"] == 1
    client.send(Heartbeat(2))
    assert receive_one(server)[1] == Heartbeat(2), "the connection is as it was"


@pytest.mark.parametrize("endpoint", ["tcp://a b:1", "tcp://127.0.0.1", "http://a:1"])
def test_an_address_that_is_none_is_an_error_of_its_own(endpoint: str) -> None:
    with pytest.raises(ControlAddressError) as caught:
        ControlClient(endpoint)
    assert repr(endpoint) in str(caught.value)


@pytest.mark.I7
@pytest.mark.I8
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


with_and_without_key = pytest.mark.parametrize(
    "keys", [None, ControlKeys.generate()], ids=["plain", "with a key"]
)


@pytest.mark.I7
@with_and_without_key
@pytest.mark.parametrize("asker", ["client", "server"])
def test_an_end_that_is_busy_answers_heartbeats(keys: ControlKeys | None, asker: str) -> None:
    """Only the other end sends heartbeats, so that all that passes from the busy one are its answers."""
    heartbeats = Heartbeats(0.02, WAIT_SECS)
    of_server, of_client = (heartbeats if asker == each else None for each in ("server", "client"))
    with (
        closing(ControlServer("127.0.0.1", 0, keys, heartbeats=of_server)) as server,
        closing(Relay(server.port)) as relay,
        closing(ControlClient(relay.endpoint, keys, of_client)) as client,
    ):
        client.send(Heartbeat(1))
        identity, _ = receive_one(server)
        relay.wait_for_pieces(20, from_client=asker == "server")  # while the owners of both sockets are busy
        assert not client.take_loss()
        assert server.send(identity, HeartbeatAck(1, "inst"))
        assert receive_one(client) == HeartbeatAck(1, "inst")


@pytest.mark.I7
@with_and_without_key
def test_both_ends_hear_of_silence(keys: ControlKeys | None) -> None:
    """A slow relay is silent, too: until it is cut, the client connects again and asks again."""
    heartbeats = Heartbeats.within(0.5, 1.0)
    with (
        closing(ControlServer("127.0.0.1", 0, keys, heartbeats=heartbeats)) as server,
        closing(Relay(server.port)) as relay,
        closing(ControlClient(relay.endpoint, keys, heartbeats)) as client,
    ):

        def are_connected() -> bytes | None:
            client.take_loss()
            client.send(Heartbeat(1))
            found = [identity for identity, _ in server.receive()]
            return found[-1] if found and server.send(found[-1], HeartbeatAck(1, "inst")) else None

        identity = wait_until(are_connected)
        assert identity is not None
        relay.is_cut.set()
        wait_until(client.take_loss)
        wait_until(lambda: not server.send(identity, HeartbeatAck(2, "inst")))


def test_with_keys_only_a_holder_of_the_key_gets_through(make_server: Make, make_client: MakeClient) -> None:
    keys = ControlKeys.generate()
    server = make_server(keys)
    stranger_public, stranger_secret = zmq.curve_keypair()
    stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
    stranger.setsockopt(zmq.CURVE_PUBLICKEY, stranger_public)
    stranger.setsockopt(zmq.CURVE_SECRETKEY, stranger_secret)
    stranger.connect(f"tcp://127.0.0.1:{server.port}")
    with suppress(zmq.Again):  # the server may have refused it already, and then there is no peer
        stranger.send(messages.encoder.encode(Heartbeat(666)), zmq.NOBLOCK)
    plain = make_client(server)
    plain.send(Heartbeat(667))
    member = make_client(server, keys)
    member.send(Heartbeat(4))
    try:
        assert receive_one(server)[1] == Heartbeat(4)
        poller = Poller()
        poller.register(server)
        assert not poller.wait(0.3), "a peer without the key was let in"
        wait_until(lambda: server.dropped[FOREIGN_KEY] > 0)
    finally:
        stranger.close()


@pytest.mark.I1
@pytest.mark.I7
@pytest.mark.parametrize("with_keys", [False, True])
def test_with_a_list_only_its_addresses_get_through(
    make_server: Make, make_client: MakeClient, with_keys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ControlKeys.generate() if with_keys else None
    server = make_server(keys, ["127.0.0.2", "10.0.0.0/8"])
    stranger = make_client(server, keys, "127.0.0.3")
    stranger.send(Heartbeat(666))
    wait_until(lambda: server.dropped[FOREIGN_ADDRESS] > 0)
    member = make_client(server, keys, "127.0.0.2")
    member.send(Heartbeat(5))
    peer, message = receive_one(server)
    assert message == Heartbeat(5)
    assert server.send(peer, HeartbeatAck(5, "inst"))
    assert receive_one(member) == HeartbeatAck(5, "inst")
    assert not list(server.receive())
    (record,) = [record for record in caplog.records if record.name == "hisparse_pd.protocol.zap"]
    assert "'127.0.0.3' is not in --allowed-peers (127.0.0.2, 10.0.0.0/8)" in record.getMessage()


def test_a_signature_binds_key_purpose_and_parts() -> None:
    keys, others = ControlKeys.generate(), ControlKeys.generate()
    code = keys.sign("asking", b"ab", b"c")
    assert keys.has_signed(code, "asking", b"ab", b"c")
    for wrong in (
        keys.has_signed(code, "answering", b"ab", b"c"),
        keys.has_signed(code, "asking", b"a", b"bc"),
        keys.has_signed(code, "asking", b"ab"),
        keys.has_signed(code[:-1], "asking", b"ab", b"c"),
        keys.has_signed("\u00e4", "asking", b"ab", b"c"),
        others.has_signed(code, "asking", b"ab", b"c"),
    ):
        assert not wrong


def test_a_secret_key_is_in_no_representation() -> None:
    keys = ControlKeys.generate()
    assert keys.secret.decode() not in f"{keys} {keys!r}"


def test_a_key_survives_its_file(tmp_path: Path) -> None:
    keys = ControlKeys.generate()
    path = tmp_path / "key"
    path.write_bytes(keys.secret + b"\n")
    assert ControlKeys.load(path) == keys


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory; .*hisparse-pd keygen /"),
        (b"", "it holds 0 bytes"),
        (b"not a key", "it holds 9 bytes .*; copy the cluster's key to it"),
        (b"x" * 41, "it holds 41 bytes"),
        (b"x" * 39 + b"~", "it holds 40 bytes"),
        (b"x" * 39 + b"\xa4", "it holds 40 bytes"),
        (b"x" * 20 + b"\0" * 20, "it holds 40 bytes"),
        (b"x" * 5000, "it holds 4096 bytes"),  # only 4096 bytes are read
    ],
)
def test_a_bad_key_file_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ControlKeyError, match=f"--control-key-file .*{why}"):
        ControlKeys.load(path)


_BIG = Bootstrap(
    1,
    tuple(Extent(2**40 + i, 2**40) for i in range(50_000)),
    (Extent(0, 1),),
    0,
    bytes(8),
    ROOT,
    hisparse=True,
)


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize(("message", "most"), [(Heartbeat(1), 256), (_BIG, 5)], ids=["small", "large"])
def test_a_server_takes_in_a_burst_between_two_turns(
    make_server: Make, monkeypatch: pytest.MonkeyPatch, message: ToPrefill, most: int
) -> None:
    server = make_server()
    endless = Endless(b"peer", messages.encoder.encode(message))
    with monkeypatch.context() as patch:
        patch.setattr(server, "socket", endless)
        assert len(list(server.receive())) == endless.num_received == most


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


def test_a_thread_that_is_late_for_a_shutdown_wakes_nobody() -> None:
    wakeup = Wakeup()
    wakeup.close()
    wakeup.set()
