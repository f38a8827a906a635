"""Free ports for processes that are yet to be started."""

from __future__ import annotations

import socket

import pytest
from starlette.applications import Starlette

from hisparse_pd.base import ports
from hisparse_pd.base.ports import free_port
from hisparse_pd.serving.http import descriptors
from hisparse_pd.serving.http.listening import Listener


def test_a_port_is_kept_for_the_server_it_was_given_out_for(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", port))
    monkeypatch.setattr(ports, "FREE_PORTS", range(port, port + 1))
    with pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
        free_port()
    listener = Listener("127.0.0.1", port)
    listener.socket.close()
    assert listener.port == port


def test_no_outgoing_connection_takes_a_port_that_is_given_out() -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first_of_connections = int(file.read().split()[0])
    assert ports.FREE_PORTS.stop <= first_of_connections


def test_a_taken_address_is_named() -> None:
    with (
        Listener("127.0.0.1", 0).socket as taken,
        pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{taken.getsockname()[1]}: Address already"),
    ):
        Listener("127.0.0.1", taken.getsockname()[1])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_two_colons_take_both_kinds_of_clients(host: str) -> None:
    with Listener("::", 0).socket as listening, socket.create_connection((host, listening.getsockname()[1])):
        accepted, _ = listening.accept()
        accepted.close()


@pytest.mark.parametrize("num_processes", [1, 2])
def test_connections_send_small_writes_at_once(num_processes: int) -> None:
    listener = Listener("127.0.0.1", 0)
    listener.share(num_processes)
    listener.server(Starlette())
    with listener.socket, socket.create_connection(("127.0.0.1", listener.port)):
        accepted, _ = listener.socket.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(("num_descriptors", "level"), [(300, "WARNING"), (4096, "INFO")])
def test_a_low_limit_of_descriptors_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_descriptors: int, level: str
) -> None:
    monkeypatch.setattr(descriptors, "limit", lambda: num_descriptors)
    listener = Listener("127.0.0.1", 0)
    with caplog.at_level("INFO"), listener.socket:
        listener.server(Starlette())
    (record,) = caplog.records
    assert (record.levelname, "ulimit -n" in record.getMessage()) == (level, level == "WARNING")
