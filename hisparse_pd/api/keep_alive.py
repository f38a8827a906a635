"""Says that a request is still at work, where its answer has been silent: proxies cut what says nothing, by
default after a minute, and the router after ``--request-timeout-secs``.

In a stream that has begun it is said by a comment, or by an event that the API has for it. Before an answer
begins nothing of it can be sent without fixing its status; but an interim response can, to clients that say
that they read over those, as the router does. A request of an engine that stands still ends by itself
(``hisparse_pd.http.engine_link``), so what is said here is true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starlette.types import Scope

from hisparse_pd.http.connections import INTERIM, TAKES_INTERIM
from hisparse_pd.http.http_errors import ErrorShape
from hisparse_pd.http.patience import Patience

PING_SECS = 15.0

_COMMENT = b": ping\n\n"
_PINGS = {
    ErrorShape.OPENAI: _COMMENT,
    ErrorShape.RESPONSES: _COMMENT,
    ErrorShape.ANTHROPIC: b'event: ping\ndata: {"type": "ping"}\n\n',
}


class KeepAlive:
    """Of one reply. ``send_piece`` sends a piece of its body."""

    def __init__(
        self,
        scope: Scope,
        shape: ErrorShape,
        send_piece: Callable[[bytes], Coroutine[Any, Any, None]],
    ) -> None:
        self._send_piece = send_piece
        self._ping = _PINGS[shape]
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        takes_interim = (TAKES_INTERIM, b"1") in headers
        self._interim: Callable[[], None] | None = (
            scope.get("extensions", {}).get(INTERIM) if takes_interim else None
        )
        self._has_begun = False
        self._sending: asyncio.Task[None] | None = None
        self._silence = Patience(PING_SECS, self._break)
        self._silence.begin()

    def note_piece(self) -> None:
        """A piece of a stream is sent."""
        self._has_begun = True
        self._silence.begin()

    def close(self) -> None:
        """The rest of the answer is sent now, or nothing is any more."""
        self._silence.close()
        if self._sending is not None:
            self._sending.cancel()

    def _break(self) -> None:
        if not self._has_begun:
            if self._interim is not None:
                self._interim()
        elif self._sending is None or self._sending.done():  # else the client does not read
            self._sending = asyncio.create_task(self._send_piece(self._ping))
        self._silence.begin()
