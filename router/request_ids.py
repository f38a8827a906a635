"""Gives each request an id, its client's or a new one, which its answer, the log and the nodes get.

``server.py`` wraps the application in ``RequestIds``, and logs and traces ``request_id``. A client's id that
must not stand in a log is still what the nodes get; the answer and the log have a new one.

OpenAI's clients show ``x-request-id`` of an answer or error, Anthropic's show ``request-id``.
"""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"
ANSWERED_HEADERS = ("x-request-id", "request-id")
_ANSWERED = tuple(name.encode() for name in ANSWERED_HEADERS)
_LOGGABLE = re.compile(rb"[!-~]{1,128}")
"""Ids that may stand in a log: up to 128 printable ASCII characters without blanks."""
_SCOPE_KEY = "hisparse_pd.request_id"
"""Key of the id in the ASGI scope."""


class RequestIds:
    """ASGI middleware that gives each request its id. It runs before keys are checked, so a refusal has
    one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), None)
        is_loggable = given is not None and _LOGGABLE.fullmatch(given) is not None
        id_ = given if given is not None and is_loggable else b"req_" + secrets.token_hex(12).encode()
        headers = scope["headers"] if given is not None else [*scope["headers"], (_HEADER, id_)]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message.get("headers", ()) if pair[0].lower() not in _ANSWERED]
                message = {**message, "headers": [*kept, *((header, id_) for header in _ANSWERED)]}
            await send(message)

        await self._app({**scope, "headers": headers, _SCOPE_KEY: id_.decode()}, receive, send_with_id)


def request_id(scope: Scope) -> str:
    """Return the id of a request that came through ``RequestIds``."""
    id_: str = scope[_SCOPE_KEY]
    return id_
