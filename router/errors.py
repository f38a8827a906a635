"""Errors of the router, in the JSON shape that the nodes use too.

Exception tree::

    ApiError
    +-- RouterError             has an HTTP status and a message for the client
        +-- NodeUnreachable     no connection to a node: the request goes to another pair
        +-- NodeFailed          a node broke off, timed out or answered nonsense
        +-- NodeRefused         a node answered with an HTTP error
        +-- LocalFault          this machine could not even try; nothing is known of the node
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from service.http_errors import ApiError


class RouterError(ApiError):
    """Ends a request with ``status``; the message is for the client.

    ``node_headers`` names the pair that had the request, once one was chosen.
    """

    node_headers: Mapping[str, str] = MappingProxyType({})


class NodeUnreachable(RouterError):
    """The connection to a node could not be made. Nothing of the request reached it."""


class NodeFailed(RouterError):
    """A node closed the connection early, fell silent, or answered with something that is no HTTP answer."""


class LocalFault(RouterError):
    """This machine lacks what a connection takes: descriptors, ports, memory."""

    def __init__(self, fault: str) -> None:
        super().__init__(503, f"{fault}; send the request again later")


class NodeRefused(RouterError):
    """A node answered with an error status; what it said is passed on as it is when it has OpenAI's shape."""

    def __init__(self, status: int, message: str, node_body: bytes) -> None:
        super().__init__(status, message)
        self._node_body = node_body
        error = _openai_error(node_body)
        self._is_openai_error = error is not None
        self.node_code = error.get("code") if error else None
        """What the node calls its error."""

    def body(self) -> bytes:
        return self._node_body if self._is_openai_error else super().body()


def _openai_error(body: bytes) -> dict[str, object] | None:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    error = decoded.get("error") if isinstance(decoded, dict) else None
    return error if isinstance(error, dict) else None
