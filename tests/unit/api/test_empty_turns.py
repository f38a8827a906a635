"""Turns and results in which nothing was said, as agents send them back: empty texts, on every API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.serving.api.bodies import Endpoint
from tests.unit.api.recording_codec import RecordingCodec
from tests.unit.api.scripted_engine import stops_after
from tests.unit.api.support import ROOM, parse, serving

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("codec")]

ASKED, GOES_ON = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
EMPTY = "[user]a[assistant][user]b[assistant]"
REFUSED = "[user]a[assistant]no[user]b[assistant]"
REFUSAL = {"type": "refusal", "refusal": "no"}
TURNS: list[tuple[Endpoint, dict[str, Any], str]] = [
    (Endpoint.CHAT, {}, EMPTY),
    (Endpoint.CHAT, {"content": None}, EMPTY),
    (Endpoint.CHAT, {"content": None, "tool_calls": []}, EMPTY),
    (Endpoint.CHAT, {"content": None, "tool_calls": None, "refusal": None}, EMPTY),
    (Endpoint.CHAT, {"content": ""}, EMPTY),
    (Endpoint.CHAT, {"content": []}, EMPTY),
    (Endpoint.CHAT, {"content": None, "reasoning_content": "T"}, "[user]a[assistant]T[user]b[assistant]"),
    (Endpoint.CHAT, {"content": None, "refusal": "no"}, REFUSED),
    (Endpoint.CHAT, {"content": [REFUSAL]}, REFUSED),
    (Endpoint.MESSAGES, {"content": None}, EMPTY),
    (Endpoint.MESSAGES, {"content": ""}, EMPTY),
    (Endpoint.MESSAGES, {"content": []}, EMPTY),
    (Endpoint.MESSAGES, {"content": [{"type": "text", "text": ""}]}, EMPTY),
    (Endpoint.MESSAGES, {"content": [{"type": "redacted_thinking", "data": "x"}]}, EMPTY),
    (Endpoint.RESPONSES, {"content": None}, EMPTY),
    (Endpoint.RESPONSES, {"content": ""}, EMPTY),
    (Endpoint.RESPONSES, {"content": []}, EMPTY),
    (Endpoint.RESPONSES, {"content": [REFUSAL]}, REFUSED),
]
FIELDS = {Endpoint.CHAT: "messages", Endpoint.MESSAGES: "messages", Endpoint.RESPONSES: "input"}


@pytest.mark.parametrize(("endpoint", "said", "prompt"), TURNS)
async def test_an_empty_turn_is_an_empty_text(
    codec: RecordingCodec, endpoint: Endpoint, said: dict[str, Any], prompt: str
) -> None:
    turns = [ASKED, {"role": "assistant", **said}, GOES_ON]
    assert await codec.written(parse(endpoint, **{FIELDS[endpoint]: turns})) == prompt


@pytest.mark.parametrize("endpoint", FIELDS)
async def test_an_empty_message_of_a_user_is_an_empty_text(codec: RecordingCodec, endpoint: Endpoint) -> None:
    turns = [{"role": "user", "content": []}]
    assert await codec.written(parse(endpoint, **{FIELDS[endpoint]: turns})) == "[user][assistant]"


@pytest.mark.parametrize("result", [{"content": None}, {"content": ""}, {"content": []}, {}])
@pytest.mark.parametrize("endpoint", FIELDS)
async def test_an_empty_result_is_an_empty_text(
    codec: RecordingCodec, endpoint: Endpoint, result: dict[str, Any]
) -> None:
    turns: list[dict[str, Any]]
    match endpoint:
        case Endpoint.CHAT:
            call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            turns = [
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "t1", **result},
            ]
        case Endpoint.MESSAGES:
            use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
            given = {"type": "tool_result", "tool_use_id": "t1", **result}
            turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [given]}]
        case _:
            output = {"output": result["content"]} if result else {}
            turns = [
                {"type": "function_call", "call_id": "t1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "t1", **output},
            ]
    written = await codec.written(parse(endpoint, **{FIELDS[endpoint]: [ASKED, *turns]}))
    assert written == "[user]a[assistant]<t1 f {}>[toolt1][assistant]"


async def test_a_session_goes_on_behind_empty_turns(tmp_path: Path, codec: RecordingCodec) -> None:
    """The empty answers are as the APIs' own clients send them back."""
    silent: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "incomplete", "content": []}
    async with serving(stops_after("ok"), tmp_path) as node:
        chat = await node.answer("/v1/chat/completions", messages=[ASKED, silent, GOES_ON], **ROOM)
        assert (chat["choices"][0]["message"]["content"], codec.prompt) == ("ok", EMPTY)
        turn = {"role": "assistant", "content": []}
        await node.answer("/v1/messages", messages=[ASKED, turn, GOES_ON], max_tokens=9, **ROOM)
        assert codec.prompt == EMPTY
        await node.answer("/v1/responses", input=[ASKED, item, GOES_ON], **ROOM)
        assert codec.prompt == EMPTY
