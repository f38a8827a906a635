"""Streams that are silent for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.engine.messages import FromEngine, Generate, Tokens
from hisparse_pd.serving.api import frame
from tests.stream_events import answer_in
from tests.unit.api.support import (
    BODY,
    MESSAGES,
    NATIVE,
    ROOM,
    serving,
)

pytestmark = pytest.mark.anyio

COMMENT = b": ping\n\n"
CHAT = {"model": "tiny", "max_tokens": 5, **ROOM, "messages": MESSAGES}
STREAMS: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/completions": (BODY, COMMENT),
    "/v1/chat/completions": (CHAT, COMMENT),
    "/generate": (NATIVE, COMMENT),
    "/v1/responses": ({"model": "tiny", "input": "hi", **ROOM}, COMMENT),
    "/v1/messages": (CHAT, b'event: ping\ndata: {"type": "ping"}\n\n'),
}


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_is_not_silent_for_long(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model goes on once the client has seen two pings; all else comes as without pings."""
    monkeypatch.setattr(frame, "PING_SECS", 0.02)
    body, ping = STREAMS[path]
    is_seen = threading.Event()

    def script(generate: Generate) -> Iterator[FromEngine | float]:
        yield Tokens(generate.request_id, tuple(b"on"))
        while not is_seen.is_set():
            yield 0.001
        yield Tokens(generate.request_id, tuple(b"e"), (), FinishReason.STOP)

    async with serving(script, tmp_path) as node:
        received = b""
        async with node.client.stream("POST", path, json=body | {"stream": True}) as answer:
            async for chunk in answer.aiter_bytes():
                received += chunk
                if received.count(ping) >= 2:
                    is_seen.set()
        text = received.replace(ping, b"").decode()
        assert "ping" not in text
        assert answer_in(path, text)
    assert is_seen.is_set()
