"""Resolves host names to addresses, within a time limit.

The system's resolver blocks, and a caller cannot limit its time. ZMQ would call it in the one thread that
moves the messages of all connections, where a name server that does not answer stalls them all. Names of
peers are therefore resolved here, in threads, before an address is given to ZMQ (``bootstrap.look_up``).

``own_address_towards`` and ``interface_of``, which ask the kernel, tell ranks of one node on several machines
which network to use (``rank_group.py``).
"""

from __future__ import annotations

import fcntl
import ipaddress
import queue
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

from hisparse_pd.base.access import parse_address

MAX_ADDRESSES = 8
"""Most addresses of one name that are returned."""
_ANY_PORT = 9
"""A port for looking up a route; nothing is sent to it."""
_SIOCGIFADDR = 0x8915
"""Linux's request for an interface's IPv4 address."""
_MAX_THREADS = 16
_free_threads = threading.BoundedSemaphore(_MAX_THREADS)
"""A bound on resolver threads: a name server that does not answer blocks a thread for up to a minute."""


def resolve(host: str, deadline: float) -> list[str]:
    """Return the addresses of ``host``, best first, at most MAX_ADDRESSES. An address resolves to itself.

    ``deadline``: a time of ``time.monotonic``. Raises OSError, also when there is no answer by then.
    """
    if parse_address(host) is not None:
        return [host]
    late = OSError("not resolved in time; look at this machine's name servers")
    if not _free_threads.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise late
    # The thread releases the semaphore, not this caller, who may be gone by then.
    answers: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()
    thread = threading.Thread(target=_ask, args=(host, answers), name=f"resolve {host}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # this process, or its container, has as many threads as it may
        _free_threads.release()
        raise OSError(f"no thread resolves it: {error}") from error
    try:
        answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise late from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def own_address_towards(address: str) -> str:
    """Return this machine's address for connections to ``address``. Raises OSError without a route.

    This sends nothing.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface that has this IPv4 or IPv6 address; None if none is found (Linux)."""
    ip = ipaddress.ip_address(address)
    if ip.is_loopback:
        return "lo"
    if ip.version == 6:
        return _interface_with_ipv6(ip.packed.hex())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:  # in struct ifreq, behind name, family and port
                    return name
    return None


def _interface_with_ipv6(digits: str) -> str | None:
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address_digits, *_, name = line.split()
            if address_digits == digits:
                return name
    return None


def _ask(host: str, answers: queue.SimpleQueue[list[str] | Exception]) -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        answers.put(list(dict.fromkeys(str(entry[4][0]) for entry in found))[:MAX_ADDRESSES])
    except (OSError, UnicodeError) as error:
        answers.put(error if isinstance(error, OSError) else OSError(str(error)))
    finally:
        _free_threads.release()
