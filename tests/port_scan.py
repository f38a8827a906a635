"""A port scan: finds listening ports of processes; strangers connect and hang up at once or send garbage."""

from __future__ import annotations

import itertools
import os
import random
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

Address = tuple[str, int]

_CONNECT_SECS = 2.0
_ANSWER_SECS = 0.05
"""Wait before hanging up; in most cases the peer has read by then what was sent."""
_LISTENS = "0A"
_RESET = struct.pack("ii", 1, 0)

_drawn = random.Random(5)
_ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_ZMTP_READY = b"\x04\x1a\x05READY\x0bSocket-Type" + struct.pack(">I", 4) + b"PAIR"
_TLS_HELLO = bytes.fromhex("16030100f1010000ed0303") + _drawn.randbytes(232)
_STORE_GREETING = b"\0" + struct.pack("<I", 0x3C85F7CE)

VISITS = (
    b"",
    b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999\r\n\r\n",
    b"\r\n\r\n",
    b"\0",
    bytes(512),
    b"\xff" * 512,
    _drawn.randbytes(512),
    struct.pack("<Q", 1 << 62) * 8,
    struct.pack(">Q", 1 << 40) * 8,
    _ZMTP_GREETING[:11],
    _ZMTP_GREETING + b"\xff" * 100,
    _ZMTP_GREETING.replace(b"NULL", b"WHAT") + _ZMTP_READY,
    _ZMTP_GREETING + _ZMTP_READY + b"\x00\x07garbage",
    _TLS_HELLO,
    _TLS_HELLO[:7],
    _STORE_GREETING,
    _STORE_GREETING + b"\x01" + b"\xff" * 16,
    b"SSH-2.0-scanner\r\n",
)
"""What strangers send: meant for HTTP, ZMQ, TLS, the store of torch.distributed, or for nothing."""


def visit(address: Address, data: bytes, *, reset: bool) -> None:
    """Connect, send ``data`` and hang up, with a TCP reset if ``reset``."""
    with suppress(OSError), socket.create_connection(address, _CONNECT_SECS) as sock:
        if data:
            sock.settimeout(_ANSWER_SECS)
            with suppress(OSError):
                sock.sendall(data)
                sock.recv(1000)
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def scan(addresses: Iterable[Address]) -> None:
    """Make every visit to every address, closed and reset; for a wildcard address, to loopback."""
    for host, port in addresses:
        address = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host.removeprefix("::ffff:")), port
        for data in VISITS:
            visit(address, data, reset=False)
            visit(address, data, reset=True)


def listening(pids: Iterable[int]) -> list[Address]:
    """Return where these processes and their descendants listen for TCP (Linux)."""
    sockets = set[str]()
    for pid in itertools.chain.from_iterable(map(_descendants, pids)):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(link))
    found = set[Address]()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets:
                host, port = fields[1].split(":")
                found.add((_address(host), int(port, 16)))
    return sorted(found)


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += _descendants(int(child))
    return found


def _address(digits: str) -> str:
    """The IP address that the kernel's tables write as ``digits``."""
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
