"""The Mooncake wrapper, with the real Mooncake over TCP on loopback and a peer in its own process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import numpy as np
import pytest
import torch

from hisparse_pd.transfer import engine as engine_module
from hisparse_pd.transfer.engine import (
    MAX_BATCH_DESCRIPTORS,
    MAX_READ_DESCRIPTORS,
    TransferEngine,
    TransferError,
    TransferSetupError,
    quiet_mooncake_logs,
)
from hisparse_pd.transfer.plan import MAX_DESCRIPTOR_BYTES, as_descriptors
from hisparse_pd.transfer.transport import TCP, Transport
from tests.unit.transfer.peer import Peer, has_ipv6

PEER_BYTES = 12 << 20
SOURCE_BYTES = 10 << 20


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer(PEER_BYTES) as started:
        yield started


@pytest.fixture(scope="module")
def engine() -> Iterator[TransferEngine]:
    patch = pytest.MonkeyPatch()
    patch.setenv("MC_LOG_LEVEL", "ERROR")
    started = TransferEngine("127.0.0.1")
    yield started
    started.close()
    patch.undo()


@pytest.fixture
def source(engine: TransferEngine) -> Iterator[torch.Tensor]:
    """Random bytes in registered memory."""
    memory = torch.randint(
        0, 256, (SOURCE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    addr = engine.register(memory)
    yield memory
    engine.unregister(addr)


def test_bytes_land_in_the_other_process(engine: TransferEngine, peer: Peer, source: torch.Tensor) -> None:
    engine.write(
        peer.session,
        ([source.data_ptr() + 100, source.data_ptr()], [peer.base_addr, peer.base_addr + 1000], [50, 7]),
    )
    assert peer.read(0, 50) == source[100:150].numpy().tobytes()
    assert peer.read(1000, 1007) == source[:7].numpy().tobytes()
    assert not any(peer.read(50, 1000))


def test_a_long_range_and_many_short_ones_arrive_whole(
    engine: TransferEngine, peer: Peer, source: torch.Tensor
) -> None:
    """The write has more descriptors than one batch of Mooncake, and one descriptor that must be cut."""
    num_items, item_bytes = 3 * MAX_BATCH_DESCRIPTORS + 5, 64
    long_bytes = 2 * MAX_DESCRIPTOR_BYTES + 13
    starts = np.random.default_rng(0).permutation(num_items) * item_bytes
    src = np.concatenate((starts, [0])) + source.data_ptr()
    dst = np.concatenate((starts[::-1], [PEER_BYTES - long_bytes])) + peer.base_addr
    engine.write(peer.session, (src, dst, np.array([item_bytes] * num_items + [long_bytes])))

    items = source[: num_items * item_bytes].numpy().reshape(num_items, item_bytes)
    expected = np.empty_like(items)
    expected[starts[::-1] // item_bytes] = items[starts // item_bytes]
    assert peer.read(0, num_items * item_bytes) == expected.tobytes()
    assert peer.read(PEER_BYTES - long_bytes, PEER_BYTES) == source[:long_bytes].numpy().tobytes()


def test_a_read_is_a_write_the_other_way_round(
    engine: TransferEngine, peer: Peer, source: torch.Tensor
) -> None:
    """It has more descriptors than one batch of Mooncake, too, and one that must be cut."""
    long_bytes = 2 * MAX_DESCRIPTOR_BYTES + 13
    engine.write(peer.session, ([source.data_ptr()], [peer.base_addr], [long_bytes]))
    before = source.clone()
    source.zero_()
    num_items, item_bytes = 2 * MAX_READ_DESCRIPTORS + 5, 64
    starts = np.random.default_rng(0).permutation(num_items) * item_bytes
    engine.read(
        peer.session,
        (starts + peer.base_addr, starts[::-1] + source.data_ptr(), np.full(num_items, item_bytes)),
    )
    items, read = (
        tensor[: num_items * item_bytes].view(num_items, item_bytes) for tensor in (before, source)
    )
    assert torch.equal(read[(starts[::-1] // item_bytes).copy()], items[starts // item_bytes])
    assert not source[num_items * item_bytes :].any()
    engine.read(peer.session, ([peer.base_addr], [source.data_ptr()], [long_bytes]))
    assert torch.equal(source[:long_bytes], before[:long_bytes])
    with pytest.raises(TransferError, match=r"destination of 9 bytes.*is not in registered memory") as error:
        engine.read(peer.session, ([peer.base_addr], [source.data_ptr() + SOURCE_BYTES - 4], [9]))
    assert not error.value.may_still_land
    with pytest.raises(
        TransferError, match=r"read of 9 bytes from session .* registered the source"
    ) as error:
        engine.read(peer.session, ([peer.base_addr + (1 << 40)], [source.data_ptr()], [9]))
    assert error.value.may_still_land
    engine.read(peer.session, ([peer.base_addr], [source.data_ptr()], [9]))


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(-1, 4), (SOURCE_BYTES - 3, 4), (1 << 30, 4), (0, SOURCE_BYTES + 1), (0, 0), (0, 2**62)],
)
def test_an_unregistered_source_is_refused_before_anything_is_sent(
    engine: TransferEngine, peer: Peer, source: torch.Tensor, offset: int, num_bytes: int
) -> None:
    before = peer.read(2000, 2064)
    with pytest.raises(TransferError, match=r"descriptor 1 of 2.*nothing was sent") as error:
        engine.write(
            peer.session,
            ([source.data_ptr(), source.data_ptr() + offset], [peer.base_addr + 2000] * 2, [64, num_bytes]),
        )
    assert not error.value.may_still_land
    assert peer.read(2000, 2064) == before


def test_a_source_across_two_registered_pieces_is_refused(engine: TransferEngine, peer: Peer) -> None:
    memory = torch.zeros(128, dtype=torch.uint8)
    low, high = engine.register(memory[:64]), engine.register(memory[64:])
    try:
        with pytest.raises(TransferError, match="not in registered memory"):
            engine.write(peer.session, ([low], [peer.base_addr], [128]))
    finally:
        engine.unregister(low)
        engine.unregister(high)


@pytest.mark.I1
def test_a_destination_outside_the_peers_memory_fails_and_the_session_lives(
    engine: TransferEngine, peer: Peer, source: torch.Tensor
) -> None:
    with pytest.raises(
        TransferError, match=rf"{peer.session} failed with code -1 after 0 bytes, \d+\.\d s into"
    ) as error:
        engine.write(peer.session, ([source.data_ptr()], [peer.base_addr + PEER_BYTES], [64]))
    assert error.value.may_still_land
    engine.write(peer.session, ([source.data_ptr() + 5], [peer.base_addr], [64]))
    assert peer.read(0, 64) == source[5:69].numpy().tobytes()


def test_a_peer_that_is_gone_fails_the_write_at_once(engine: TransferEngine, source: torch.Tensor) -> None:
    with Peer(1 << 20) as gone:
        engine.write(gone.session, ([source.data_ptr()], [gone.base_addr], [64]))
        assert engine.is_reachable(gone.session)
        gone.kill()
        gone.process.wait(60)
        with pytest.raises(TransferError, match="the peer is gone"):
            engine.write(gone.session, ([source.data_ptr()], [gone.base_addr], [64]))
        assert not engine.is_reachable(gone.session)


class Forwarder:
    """A session whose process can change: a port that forwards connections to ``behind``."""

    def __init__(self, session: str) -> None:
        self.behind = session
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.session = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                host, port = self.behind.split(":")
                server = socket.create_connection((host, int(port)))
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError), source:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


def test_another_process_behind_a_session_is_written_to_once_it_is_renewed(
    engine: TransferEngine, peer: Peer, source: torch.Tensor
) -> None:
    """The second process has other memory and another data port than the first."""
    with Peer(1 << 20) as first, closing(Forwarder(first.session)) as forwarder:
        engine.renew(forwarder.session, "first")
        engine.write(forwarder.session, ([source.data_ptr()], [first.base_addr], [64]))
        assert first.read(0, 64) == source[:64].numpy().tobytes()
        for run, second in (("second", peer), ("third", first)):
            forwarder.behind = second.session
            engine.renew(forwarder.session, run)
            engine.write(forwarder.session, ([source.data_ptr() + 9], [second.base_addr], [64]))
            assert second.read(0, 64) == source[9:73].numpy().tobytes()


def test_a_write_stops_between_its_parts(engine: TransferEngine, peer: Peer, source: torch.Tensor) -> None:
    answers = iter(["", "nobody wants it"])
    offsets = np.arange(2 * MAX_BATCH_DESCRIPTORS)
    with pytest.raises(TransferError, match=f"stopped after {MAX_BATCH_DESCRIPTORS} bytes: nobody") as error:
        engine.write(
            peer.session,
            (offsets + source.data_ptr(), offsets + peer.base_addr, np.ones_like(offsets)),
            stop=lambda: next(answers),
        )
    assert not error.value.may_still_land


def test_nothing_to_write_is_no_error(engine: TransferEngine) -> None:
    engine.write("127.0.0.1:1", ([], [], []))


def test_registration_is_checked(engine: TransferEngine, source: torch.Tensor) -> None:
    for overlapping in (source, source[:2], source[100:]):
        with pytest.raises(TransferError, match="overlaps the registered"):
            engine.register(overlapping)
    with pytest.raises(TransferError, match="is not registered"):
        engine.unregister(source.data_ptr() + 1)
    for unfit in (torch.zeros(4, 4).t(), torch.zeros(0)):
        with pytest.raises(TransferError, match="empty or not contiguous"):
            engine.register(unfit)


def test_unregistered_memory_is_no_source_any_more(engine: TransferEngine, peer: Peer) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    addr = engine.register(memory)
    engine.write(peer.session, ([addr], [peer.base_addr], [64]))
    engine.unregister(addr)
    with pytest.raises(TransferError, match="not in registered memory"):
        engine.write(peer.session, ([addr], [peer.base_addr], [64]))


@pytest.mark.parametrize(
    ("host", "words"),
    [
        *((host, "--advertise-host") for host in ("", "0.0.0.0", "::")),
        *((host, "without a port") for host in ("127.0.0.1:5000", "[::1]:5000")),
    ],
)
def test_what_peers_cannot_reach_is_no_host(host: str, words: str) -> None:
    with pytest.raises(TransferSetupError, match=words):
        TransferEngine(host)


def test_the_session_is_the_host_that_was_asked_for_and_answers() -> None:
    for host, shown in (("localhost", "localhost"), ("127.0.0.2", "127.0.0.2")):
        started = TransferEngine(host)
        assert started.session.rpartition(":")[0] == shown
        assert started.is_reachable(started.session)
        assert started.transport == TCP
        started.close()


def test_an_ipv6_host_is_reached_at_its_session() -> None:
    """The engine has its own process, because Mooncake decides once per process whether it listens on
    IPv6."""
    code = (
        "import os; from hisparse_pd.transfer.engine import *; "
        "print(TransferEngine('::1').session, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if not has_ipv6():
        assert "does not answer" in done.stderr
        return
    assert done.stdout.startswith("[::1]:"), done.stderr


def test_an_engine_that_does_not_answer_at_its_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferEngine, "is_reachable", lambda self, session: False)
    with pytest.raises(TransferSetupError, match=r"does not answer at 127\.0\.0\.1:\d+.*--advertise-host"):
        TransferEngine("127.0.0.1")


def test_a_foreign_address_may_be_advertised(caplog: pytest.LogCaptureFixture) -> None:
    """Behind a NAT, no interface of this machine has the advertised address."""
    started = TransferEngine("203.0.113.77")
    assert started.session.startswith("203.0.113.77:")
    assert "203.0.113.77 belongs to no network interface" in caplog.text
    started.close()


def test_rdma_without_a_device_that_mooncake_can_open_does_not_fall_back_to_tcp() -> None:
    with pytest.raises(TransferSetupError, match="protocol rdma on nothing_0: code -1; `hisparse-pd doctor"):
        TransferEngine("127.0.0.1", Transport("rdma", ("nothing_0",)))


@pytest.mark.parametrize(
    ("transport", "inside"),
    [(TCP, {"MC_FORCE_TCP": "1"}), (Transport("rdma", ("mlx5_0",)), {"MC_FORCE_HCA": "1"})],
)
def test_mooncake_is_held_to_the_transport_by_its_environment(
    monkeypatch: pytest.MonkeyPatch, transport: Transport, inside: dict[str, str]
) -> None:
    seen: dict[str, str] = {}

    class Mooncake:
        def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
            seen.update({name: os.environ[name] for name in NAMES if name in os.environ})
            seen.update(protocol=protocol, devices=devices)
            return 0

        def get_rpc_port(self) -> int:
            return 1

        def send_probe(self, session: str) -> int:
            return 0

    NAMES = ("MC_FORCE_TCP", "MC_FORCE_HCA")
    monkeypatch.setenv("MC_FORCE_TCP", "kept")
    monkeypatch.delenv("MC_FORCE_HCA", raising=False)
    monkeypatch.setattr(engine_module, "new_mooncake_engine", Mooncake)
    TransferEngine("127.0.0.1", transport)
    assert seen == {**inside, "protocol": transport.protocol, "devices": ",".join(transport.devices)}
    assert os.environ["MC_FORCE_TCP"] == "kept"
    assert "MC_FORCE_HCA" not in os.environ


def test_a_node_on_loopback_starts_without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise TransferSetupError("Mooncake cannot be imported; install it")

    monkeypatch.setattr(engine_module, "new_mooncake_engine", missing)
    one, other = (TransferEngine("127.0.0.1", needs_network=False) for _ in range(2))
    assert one.session != other.session
    memory = torch.zeros(8, dtype=torch.uint8)
    addr = one.register(memory)
    one.check_sources(as_descriptors(([addr], [1], [8])))
    with pytest.raises(TransferError, match=r"nodes of this machine.*install it; nothing was sent"):
        one.write(other.session, ([addr], [1], [8]))
    one.unregister(addr)
    for engine in (one, other):
        engine.close()
    for needs_network, host, transport in (
        (True, "127.0.0.1", TCP),
        (False, "192.0.2.1", TCP),
        (False, "127.0.0.1", Transport("rdma", ("mlx5_0",))),
    ):
        with pytest.raises(TransferSetupError, match="install it"):
            TransferEngine(host, transport, needs_network=needs_network)


@pytest.mark.I1
def test_the_tcp_protocol_without_acknowledgements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(TransferSetupError, match="MC_TCP_PROTO"):
        TransferEngine("127.0.0.1")


def test_quieting_keeps_a_level_that_the_operator_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    quiet_mooncake_logs()
    assert os.environ["MC_LOG_LEVEL"] == "INFO"
