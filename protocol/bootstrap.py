"""Discovery: what a prefill node says at its bootstrap endpoint, and the decode node's look-up of it.

The endpoint is HTTP and read-only: ``GET /bootstrap`` tells where the control socket is. Registration goes
over the control socket, which authenticates the peer; nothing can be written at the endpoint.
"""

from __future__ import annotations

import httpx
import msgspec

from protocol.messages import PROTOCOL_VERSION, Geometry

BOOTSTRAP_PATH = "/bootstrap"
LOOKUP_TIMEOUT_SECS = 5.0
_WILDCARD_HOSTS = ("0.0.0.0", "::", "*")


class BootstrapInfo(msgspec.Struct, frozen=True):
    """The body of ``GET /bootstrap``. ``control_host`` may be a wildcard: then the caller knows the host."""

    protocol_version: int
    instance_id: str
    control_host: str
    control_port: int
    geometry: Geometry
    curve: bool

    def control_endpoint(self, bootstrap_host: str) -> str:
        host = bootstrap_host if self.control_host in _WILDCARD_HOSTS else self.control_host
        return f"tcp://[{host}]:{self.control_port}" if ":" in host else f"tcp://{host}:{self.control_port}"


class BootstrapLookupError(Exception):
    """The bootstrap endpoint could not be used. ``refused``: nothing listens there, the node is gone."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def look_up(bootstrap_host: str, bootstrap_port: int) -> BootstrapInfo:
    """Ask a prefill node for its control address; blocks up to LOOKUP_TIMEOUT_SECS, so call it in a thread.

    Raises BootstrapLookupError, with what was asked and what came.
    """
    host = f"[{bootstrap_host}]" if ":" in bootstrap_host else bootstrap_host
    url = f"http://{host}:{bootstrap_port}{BOOTSTRAP_PATH}"
    try:
        answer = httpx.get(url, timeout=LOOKUP_TIMEOUT_SECS, trust_env=False)
        answer.raise_for_status()
        info = msgspec.json.decode(answer.content, type=BootstrapInfo)
    except httpx.ConnectError as error:
        refused = "refused" in str(error).lower()
        raise BootstrapLookupError(f"{url}: cannot connect ({error})", refused=refused) from error
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError, UnicodeError) as error:
        raise BootstrapLookupError(f"{url}: {type(error).__name__}: {error}") from error
    if info.protocol_version != PROTOCOL_VERSION:
        raise BootstrapLookupError(
            f"{url}: protocol version {info.protocol_version}, this node speaks {PROTOCOL_VERSION}; "
            "run the same release on both nodes"
        )
    return info
