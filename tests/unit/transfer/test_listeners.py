"""The filter on Mooncake's ports, with real sockets: this machine has more than one loopback address."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from hisparse_pd.base.access import MAX_NETWORKS, PeerList
from hisparse_pd.transfer.engine import TransferSetupError
from hisparse_pd.transfer.listeners import guarded_listeners, reachable_from
from tests.unit.transfer.peer import has_ipv6
from tests.waiting import WAIT_SECS

pytestmark = [pytest.mark.I1, pytest.mark.I7]

ELSEWHERE = "192.0.2.1"


def listener(family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    address = "::" if family == socket.AF_INET6 else "0.0.0.0"
    return socket.create_server((address, 0), family=family, dualstack_ipv6=family == socket.AF_INET6)


def connect(server: socket.socket, source: str, target: str, timeout_secs: float) -> socket.socket:
    address = (target, server.getsockname()[1])
    return socket.create_connection(address, timeout_secs, source_address=(source, 0))


def assert_takes(server: socket.socket, source: str, target: str = "127.0.0.1") -> None:
    with (
        closing(connect(server, source, target, WAIT_SECS)) as client,
        closing(server.accept()[0]) as accepted,
    ):
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"


def assert_drops(server: socket.socket, source: str, target: str = "127.0.0.1") -> None:
    """Nothing answers a dropped packet, whereas an accepted connection is made at once."""
    with pytest.raises(TimeoutError):
        connect(server, source, target, 0.1)


def guarded(entries: list[str], family: socket.AddressFamily = socket.AF_INET) -> socket.socket:
    with guarded_listeners(ELSEWHERE, PeerList.parse(entries)):
        return listener(family)


@pytest.mark.parametrize(
    ("entries", "taken", "dropped"),
    [
        (["127.0.0.1"], ["127.0.0.1"], ["127.0.0.2"]),
        (["127.0.0.2/31"], ["127.0.0.2", "127.0.0.3"], ["127.0.0.1", "127.0.0.4"]),
        (["10.0.0.0/8", "127.1.0.0/16", "2001:db8::/32"], ["127.1.2.3"], ["127.0.0.1", "127.2.0.1"]),
        (["0.0.0.0/0"], ["127.0.0.1"], []),
        (["::/0"], [], ["127.0.0.1"]),
    ],
)
def test_only_the_networks_of_the_list_reach_a_guarded_port(
    entries: list[str], taken: list[str], dropped: list[str]
) -> None:
    with guarded(entries) as server:
        for source in taken:
            assert_takes(server, source)
        for source in dropped:
            assert_drops(server, source)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_a_port_for_both_versions_tells_them_apart() -> None:
    with guarded(["127.0.0.2", "::1"], socket.AF_INET6) as server:
        assert_takes(server, "::1", "::1")
        assert_takes(server, "127.0.0.2")
        assert_drops(server, "127.0.0.1")
    with guarded(["127.0.0.0/8", "::2"], socket.AF_INET6) as server:
        assert_drops(server, "::1", "::1")


def test_the_longest_list_fits_the_kernel() -> None:
    entries = [f"2001:db8::{number:x}" for number in range(MAX_NETWORKS - 1)]
    with guarded([*entries, "127.0.0.1"]) as server:
        assert_takes(server, "127.0.0.1")
        assert_drops(server, "127.0.0.2")


def test_ports_from_before_and_without_a_list_stay_open() -> None:
    with listener() as before:
        guarded([ELSEWHERE]).close()
        assert_takes(before, "127.0.0.1")
    with guarded([]) as server:
        assert_takes(server, "127.0.0.2")


def test_a_kernel_that_cannot_filter_stops_only_who_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(descriptor: int, program: bytes) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("hisparse_pd.transfer.listeners.attach", refuses)
    with (
        pytest.raises(TransferSetupError, match=r"192\.0\.2\.1.*not supported.*firewall"),
        guarded_listeners(ELSEWHERE, PeerList.parse([ELSEWHERE])),
    ):
        server = listener()
    server.close()
    with guarded_listeners("127.0.0.1", PeerList()), listener():
        pass
    assert "firewall" not in caplog.text, "a socket that is closed again needs none"
    with guarded_listeners("127.0.0.1", PeerList()):
        server = listener()
    server.close()
    assert "firewall" in caplog.text


@pytest.mark.parametrize(
    ("host", "entries", "has_peers", "inside", "outside"),
    [
        ("127.0.0.1", [], True, "127.0.0.9", "192.0.2.1"),
        ("localhost", [], True, "::1", "192.0.2.1"),
        ("192.0.2.7", ["10.0.0.0/8"], True, "192.0.2.7", "192.0.2.8"),
        ("192.0.2.7", ["10.0.0.0/8"], True, "10.9.9.9", "127.0.0.1"),
        ("192.0.2.7", [], True, "198.51.100.1", None),
        # the node itself checks whether it can be reached
        ("192.0.2.7", [], False, "192.0.2.7", "192.0.2.2"),
        ("192.0.2.7", [], False, "127.0.0.2", "192.0.2.2"),
        ("192.0.2.7", ["192.0.2.2"], False, "192.0.2.2", "127.0.0.2"),
    ],
)
def test_who_reaches_the_kv_ports(
    host: str, entries: list[str], has_peers: bool, inside: str, outside: str | None
) -> None:
    """A node that only writes to others, and has no peers, is reachable from its own machine only."""
    peers = reachable_from(host, PeerList.parse(entries), has_peers)
    assert peers.allows(inside)
    assert outside is None or not peers.allows(outside)
