"""Errors that an HTTP server answers with, in OpenAI's shape, and on Anthropic's paths in Anthropic's.

All code behind a request raises them. ``serving/api/frame.py``, ``serving/api/node_app.py`` and the router
make the answer, or the last event of a stream that has begun.

Exception tree::

    ApiError                    an HTTP status, a message for the client, the field and a code
    +-- FieldRefused            400: names one field of the body and what is wrong with it
    |   +-- InvalidField        the same with its value and the bound
    +-- NodeUnavailable         503: the engine is not ready, not healthy or gone
    +-- QueueFull               429: this node has as many requests in flight as it accepts
    +-- RequestFailedError      the engine ended the request, with this status
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from http import HTTPStatus

import msgspec
from msgspec import Raw
from starlette.responses import Response

from hisparse_pd.serving.http.events import sse

_MAX_SHOWN_CHARS = 80

RETRY_AFTER_SECS = 5
"""Value of ``retry-after`` when a queue is full or a node is gone. Client libraries wait that long and ask
again; without the header they ask twice within two seconds and give up."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status; others are ``invalid_request_error`` below 500, else ``api_error``."""


class ErrorShape(Enum):
    """How an error is written, as a whole answer and as the event that ends a stream."""

    OPENAI = auto()
    RESPONSES = auto()
    """OpenAI's shape on ``/v1/responses``, which differs in the event alone."""
    ANTHROPIC = auto()

    @classmethod
    def of_path(cls, path: str) -> ErrorShape:
        if path == "/v1/messages" or path.startswith("/v1/messages/"):
            return cls.ANTHROPIC
        return cls.RESPONSES if path == "/v1/responses" else cls.OPENAI


class ApiError(Exception):
    """Ends a request with ``status``. ``param`` names the field at fault, if there is one."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or _status_name(status)

    def to_dict(self, shape: ErrorShape = ErrorShape.OPENAI) -> dict[str, object]:
        """Return the error as an object. Anthropic's shape also gets a ``code``, by which a router finds the
        cause."""
        is_client_error = self.status < HTTPStatus.INTERNAL_SERVER_ERROR
        match shape:
            case ErrorShape.OPENAI | ErrorShape.RESPONSES:
                kind = "invalid_request_error" if is_client_error else "server_error"
                error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
                return {"error": error}
            case ErrorShape.ANTHROPIC:
                kind = _ANTHROPIC_TYPES.get(
                    self.status, "invalid_request_error" if is_client_error else "api_error"
                )
                return {"type": "error", "error": {"type": kind, "message": self.message, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the error adds to its answer."""
        is_temporary = self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
        return {"retry-after": str(RETRY_AFTER_SECS)} if is_temporary else {}

    def body(self, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
        return msgspec.json.encode(self.to_dict(shape))

    def event(self, shape: ErrorShape = ErrorShape.OPENAI) -> bytes:
        """Return the server-sent event that ends a stream."""
        if shape is ErrorShape.RESPONSES:  # its own fields, and the ``error`` that clients read in streams
            own = {"type": "error", "code": self.code, "message": self.message, "param": self.param}
            return sse(own | self.to_dict(), "error")
        return sse(Raw(self.body(shape)), "error" if shape is ErrorShape.ANTHROPIC else "")

    def response(
        self, headers: Mapping[str, str] | None = None, shape: ErrorShape = ErrorShape.OPENAI
    ) -> Response:
        """Return the whole answer, an ASGI application, with ``headers`` beside the error's own."""
        all_headers = {**self.headers, **(headers or {})}
        return Response(self.body(shape), self.status, all_headers, media_type="application/json")


class FieldRefused(ApiError):
    """The request is refused because of ``field``; ``why`` says what is wrong with it."""

    def __init__(self, field: str, why: str, *, code: str | None = None) -> None:
        super().__init__(400, f"{field}: {why}", param=field, code=code)


class InvalidField(FieldRefused):
    """``field`` holds ``value``, which breaks ``rule``."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(field, f"{shown(value)} {rule}", code="invalid_value")


class NodeUnavailable(ApiError):
    """This node cannot serve now; another one may."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, reason)


class QueueFull(ApiError):
    """This node accepts no more requests now; the client may try later, or on another node."""

    def __init__(self, reason: str) -> None:
        super().__init__(429, reason)


class RequestFailedError(ApiError):
    """The engine ended the request with an error."""


def shown(value: object) -> str:
    """Return a JSON value for an error message, shortened if it is long."""
    match value:
        case dict():
            return f"an object with {len(value)} fields"
        case list():
            return f"a list with {len(value)} entries"
        case str():  # cut before it is encoded: a prompt may have megabytes
            text = json.dumps(value[: _MAX_SHOWN_CHARS + 1], ensure_ascii=False)
        case _:
            text = json.dumps(value)
    return cut(text)


def cut(text: str, max_chars: int = _MAX_SHOWN_CHARS) -> str:
    """Return a text that a client chose, for a message, cut to ``max_chars``."""
    return text if len(text) <= max_chars else text[:max_chars] + "…"


def _status_name(status: int) -> str:
    try:
        return HTTPStatus(status).name.lower()
    except ValueError:
        return f"status_{status}"
