"""What a pair with default settings opens to other machines: nothing."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from protocol.access import parse_address
from tests.integration.harness import Deployment, Service

pytestmark = [pytest.mark.I1, pytest.mark.I7]

_LISTENING = "0A"


def listening(service: Service) -> list[tuple[str, int]]:
    """Address and port of each TCP socket on which a process of the service listens."""
    inodes = set()
    for process in _processes(service.pid):
        for descriptor in (process / "fd").iterdir():
            try:
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
            except FileNotFoundError:  # closed meanwhile
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{service.pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING and words[9] in inodes:
                address, port = words[1].split(":")
                found.append((_decoded(address), int(port, 16)))
    return found


def _processes(group: int) -> list[Path]:
    """Of a service: front and engine are one process group."""
    paths = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, ProcessLookupError):  # no process, or one that has just ended
            if os.getpgid(int(path.name)) == group:
                paths.append(path)
    return paths


def _decoded(address: str) -> str:
    """The kernel shows addresses as 32-bit words in the machine's byte order."""
    words = [int(address[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))


@pytest.fixture
def other_address() -> str:
    """An address of this machine that is not loopback; what comes from it is as foreign as from elsewhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing, but chooses a source address
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(sock.getsockname()[0])


def test_nothing_is_open_to_other_machines_by_default(pair: Deployment, other_address: str) -> None:
    num_filtered = 0
    for service in pair.services:
        ports = listening(service)
        assert {port for _, port in ports} >= {service.port}
        for address, port in ports:
            parsed = parse_address(address)
            assert parsed is not None
            if parsed.is_loopback:
                continue
            with pytest.raises(TimeoutError):
                socket.create_connection((other_address, port), 0.2, (other_address, 0)).close()
            socket.create_connection(("127.0.0.1", port), 10).close()
            num_filtered += 1
    assert num_filtered > 0, "Mooncake binds all interfaces; if it does no more, the filter can go"
