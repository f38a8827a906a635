"""Tells failures to reach a node whose cause is this machine from those whose cause is the node.

Health checks and calls ask ``local_fault`` before they blame a node. A router without a free descriptor can
connect to nobody. If it took its nodes for dead, a fault that passes in a moment would end the service until
the next health checks.
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from hisparse_pd.serving.http import descriptors

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def local_fault(error: OSError) -> str | None:
    """Return what this machine lacks, with the bound and the remedy; None if ``error`` is about the other
    end."""
    # ``Call`` raises a ConnectionError without a number when a connection is lost; its cause has the number.
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else None
    for number in (error.errno, cause and cause.errno):
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


def _port_range() -> str:
    try:
        return " to ".join(_PORT_RANGE.read_text().split())
    except OSError:
        return "not known"
