"""Failures to reach a node that are this machine's own: they say nothing of the node.

A router without a free descriptor can connect to nobody. Taking that for the nodes' death would end the
service for as long as the next health checks take, for a fault that passes in a moment.
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from hisparse_pd.http import descriptors

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MAX_CAUSES = 8


def local_fault(error: BaseException) -> str | None:
    """What this machine lacks, the bound and the remedy; None when ``error`` is about the other end.

    Looks through the errors that it was raised from: libraries wrap those of the system.
    """
    for number in _numbers(error, _MAX_CAUSES):
        match number:
            case errno.EMFILE:
                return (
                    f"the router has as many descriptors open as its limit allows, {descriptors.limit()}; "
                    "raise its hard limit (ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=), or run "
                    "more routers"
                )
            case errno.ENFILE:
                return "this machine has as many files open as fs.file-max allows; raise it with sysctl"
            case errno.EADDRNOTAVAIL:
                return (
                    f"no local port is left for a connection ({_PORT_RANGE.name}: {_port_range()}); widen it "
                    "with sysctl net.ipv4.ip_local_port_range, or run more routers"
                )
            case errno.ENOBUFS | errno.ENOMEM | socket.EAI_MEMORY:
                return "this machine has no memory left for a connection; give it more, or run more routers"
    return None


def _numbers(error: BaseException, num_left: int) -> list[int]:
    """The system's error numbers of an error and its causes."""
    found = [error.errno] if isinstance(error, OSError) and error.errno is not None else []
    if num_left:
        causes = [error.__cause__ or error.__context__, *getattr(error, "exceptions", ())]
        for cause in causes:
            if cause is not None:
                found += _numbers(cause, num_left - 1)
    return found


def _port_range() -> str:
    try:
        return " to ".join(_PORT_RANGE.read_text().split())
    except OSError:
        return "not known"
