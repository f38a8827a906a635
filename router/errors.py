"""Errors of the router, in the JSON shapes of the nodes' errors.

``node_calls.py`` turns failures of the network and answers of nodes into them; ``route.py`` decides by their
class and code whether a request is retried; ``server.py`` sends them to clients.

Exception tree::

    ApiError
    +-- RouterError             has an HTTP status and a message for the client
        +-- NodeUnreachable     no connection to a node: the request goes to another pair
        +-- NodeFailed          a node broke off, timed out or answered nonsense
        |   +-- StreamEnded     a decode node ended a stream early
        +-- NodeRefused         a node answered with an HTTP error
        +-- LocalFault          this machine could not make a connection; the node is not at fault
        +-- ShuttingDown        the router stops (``drain.py``)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from hisparse_pd.protocol.decoding import decode_json
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape


class RouterError(ApiError):
    """Ends a request with ``status``; the message is for the client.

    ``node_headers`` names the pair that had the request, once one was chosen.
    """

    node_headers: Mapping[str, str] = MappingProxyType({})

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, **self.node_headers}


class NodeUnreachable(RouterError):
    """No connection to a node could be made. Nothing of the request reached it."""


class NodeFailed(RouterError):
    """A node closed the connection early, fell silent, or sent something that is no HTTP answer."""


class StreamEnded(NodeFailed):
    """A decode node ended a stream early."""

    def __init__(self, last_words: bytes) -> None:
        """``last_words``: the last event, which is an error if the node ended the stream by itself."""
        error = _object_in(last_words.partition(b"data: ")[2]).get("error")
        why = f": {error.get('message')}" if isinstance(error, dict) else ""
        super().__init__(502, f"the decode node ended the stream before its end{why}")
        self.last_words = last_words
        self.node_code = error.get("code") if isinstance(error, dict) else None
        """The ``code`` in the node's error, as in ``base/vocabulary.py``."""


class LocalFault(RouterError):
    """This machine has no descriptors, ports or memory left for a connection."""

    def __init__(self, fault: str) -> None:
        super().__init__(503, f"{fault}; send the request again later")


class NodeRefused(RouterError):
    """A node answered with an error status. Its body is passed on unchanged if it has the client's shape."""

    def __init__(self, status: int, message: str, node_body: bytes) -> None:
        super().__init__(status, message)
        self._node_body = node_body
        decoded = _object_in(node_body)
        error = decoded.get("error")
        self._shape = None
        """Shape of the node's error; None if the body has no ``error`` object."""
        if isinstance(error, dict):
            self._shape = ErrorShape.ANTHROPIC if decoded.get("type") == "error" else ErrorShape.OPENAI
        self.node_code = error.get("code") if isinstance(error, dict) else None
        """The ``code`` in the node's error, as in ``base/vocabulary.py``."""

    def body(self, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
        # A node's error to a Responses request has OpenAI's shape.
        expected = ErrorShape.OPENAI if shape is ErrorShape.RESPONSES else shape
        return self._node_body if self._shape is expected else super().body(shape)


def _object_in(body: bytes) -> dict[str, object]:
    try:
        decoded = decode_json(body)
    except (msgspec.MsgspecError, UnicodeError):
        return {}
    return decoded if isinstance(decoded, dict) else {}
