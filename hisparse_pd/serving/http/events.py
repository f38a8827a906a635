"""Server-sent events, of which a streamed answer consists, such as ``data: {"text":"a"}``."""

from __future__ import annotations

import msgspec

SSE_DONE = b"data: [DONE]\n\n"


def sse(value: object, name: str = "") -> bytes:
    """Return one event with ``value`` as JSON."""
    event = b"event: %s\n" % name.encode() if name else b""
    return event + b"data: " + msgspec.json.encode(value) + b"\n\n"
