"""The errors that a node's HTTP front answers with, in OpenAI's shape.

Exception tree::

    ApiError                    an HTTP status, a message for the client, the field and a code
    +-- InvalidField            400: one field of the body; names the field, its value and the bound
    +-- NodeUnavailable         503: the engine is not ready, not healthy or gone
    +-- QueueFull               429: as much is in flight as this node takes
    +-- RequestFailedError      the status that the engine gave, for a request that it ended
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response

_MAX_SHOWN_CHARS = 80


class ApiError(Exception):
    """Ends a request with ``status``. ``param`` is the field at fault, when there is one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _status_name(status)

    def to_dict(self) -> dict[str, object]:
        """OpenAI's error object, ``{"error": {...}}``."""
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def body(self) -> bytes:
        return msgspec.json.encode(self.to_dict())

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The whole answer, an ASGI application; ``headers`` beside those of its body."""
        return Response(self.body(), self.status, headers, media_type="application/json")


class InvalidField(ApiError):
    """``field`` holds ``value``, which breaks ``rule``."""

    def __init__(self, field: str, value: object, rule: str, *, code: str = "invalid_value") -> None:
        super().__init__(400, f"{field}: {shown(value)} {rule}", param=field, code=code)


class NodeUnavailable(ApiError):
    """This node cannot serve now; another one may."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, reason)


class QueueFull(ApiError):
    """This node has as much to do as it takes; later, or on another one, there is a place."""

    def __init__(self, reason: str) -> None:
        super().__init__(429, reason)


class RequestFailedError(ApiError):
    """The engine ended the request with an error."""


def shown(value: object) -> str:
    """A JSON value as it appears in an error message: short, whatever its size."""
    match value:
        case dict():
            return f"an object with {len(value)} fields"
        case list():
            return f"a list with {len(value)} entries"
        case str():  # cut first: a prompt of megabytes is not encoded to show its start
            text = json.dumps(value[: _MAX_SHOWN_CHARS + 1], ensure_ascii=False)
        case _:
            text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def _status_name(status: int) -> str:
    try:
        return HTTPStatus(status).name.lower()
    except ValueError:
        return f"status_{status}"
