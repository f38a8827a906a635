"""A whole answer, and the same answer from a stream."""

from __future__ import annotations

from typing import Any

from tests.stream_events import EACH_TIME_ANEW, answer_in, without
from tests.unit.api.support import Node


async def whole_and_streamed(node: Node, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """Return both answers without fields that differ in each request, or that a stream does not have."""
    whole = await node.answer(path, **body)
    if path in ("/v1/completions", "/v1/chat/completions"):
        body = {**body, "stream_options": {"include_usage": True}}
    streamed = answer_in(path, (await node.post(path, **body, stream=True)).text)
    if path == "/generate" and not isinstance(whole, list):
        (streamed,) = streamed
    elif path in ("/v1/completions", "/v1/chat/completions"):
        whole = {name: value for name, value in whole.items() if name in streamed}
    return without(whole, EACH_TIME_ANEW), without(streamed, EACH_TIME_ANEW)
