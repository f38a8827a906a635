"""Streams of all APIs say what the whole answer says, and show calls piece by piece."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.engine.messages import FromEngine, Generate, Tokens
from tests.unit.api.scripted_engine import Script, say, stops_after
from tests.unit.api.streams import whole_and_streamed
from tests.unit.api.support import MESSAGES, ROOM, serving

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("codec")]

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "times": {"type": "integer"}}}
FUNCTION = {"name": "write", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CHAT, ANTHROPIC, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 160, **ROOM},
    ANTHROPIC: {
        **{"messages": MESSAGES, "tools": [{"name": "write", "input_schema": PARAMETERS}]},
        **{"max_tokens": 160, **ROOM},
    },
    RESPONSES: {"input": "hi", "tools": [{"type": "function", **FUNCTION}], **ROOM},
}
CALL = (
    "<tool_call>write<arg_key>text</arg_key><arg_value>one\ntwo</arg_value>"
    "<arg_key>times</arg_key><arg_value>3</arg_value></tool_call>"
)
ARGUMENTS = '{"text": "one\\ntwo", "times": 3}'
BEGUN = '{"text": "one\\nt'
"""Arguments of the call where it is cut within the first one."""
OOPS = "<arg_key>text</arg_key>oops</tool_call>"
Call = tuple[str, str]


def calls_of(path: str, whole: Any) -> list[Call]:
    match path:
        case "/v1/chat/completions":
            functions = [call["function"] for call in whole["choices"][0]["message"].get("tool_calls", ())]
            return [(function["name"], function["arguments"]) for function in functions]
        case "/v1/messages":
            blocks = [block for block in whole["content"] if block["type"] == "tool_use"]
            return [(block["name"], json.dumps(block["input"])) for block in blocks]
        case _:
            items = [item for item in whole["output"] if item["type"] == "function_call"]
            return [(item["name"], item["arguments"]) for item in items]


def end_of(path: str, whole: Any) -> str:
    if path == CHAT:
        return str(whole["choices"][0]["finish_reason"])
    return str(whole["stop_reason"] if path == ANTHROPIC else whole["status"])


STOP = {CHAT: "stop", ANTHROPIC: "end_turn", RESPONSES: "completed"}
FOR_CALLS = {CHAT: "tool_calls", ANTHROPIC: "tool_use", RESPONSES: "completed"}
LENGTH = {CHAT: "length", ANTHROPIC: "max_tokens", RESPONSES: "incomplete"}


@pytest.mark.parametrize("per_message", [3, 1000])
@pytest.mark.parametrize(
    ("text", "engine", "calls", "calls_of_messages", "ends"),
    [
        ("<think>hm</think>Yes €.", stops_after, [], None, STOP),
        (f"Look:\n{CALL}{CALL}", stops_after, [("write", ARGUMENTS)] * 2, None, FOR_CALLS),
        (f"<think>hm{CALL}", stops_after, [("write", ARGUMENTS)], None, FOR_CALLS),
        (f"One.{CALL}Two.{CALL}", stops_after, [("write", ARGUMENTS)] * 2, None, FOR_CALLS),
        (f"<tool_call>write{OOPS}", stops_after, [("write", OOPS)], {"INVALID_JSON": OOPS}, FOR_CALLS),
        # Cut off by max_tokens: no markup, and what was sure of the arguments.
        (CALL[: CALL.index("wo</arg_value>")], say, [("write", BEGUN)], {}, LENGTH),
        (CALL[: CALL.index("3<")], say, [("write", ARGUMENTS[:-2])], {"text": "one\ntwo"}, LENGTH),
        ("So: <tool_call>wri", say, [], None, LENGTH),
    ],
    ids=["reasoning", "calls", "in reasoning", "between", "fault", "cut", "one argument", "no name"],
)
async def test_a_stream_says_what_the_whole_answer_says(
    tmp_path: Path,
    text: str,
    engine: Any,
    calls: list[Call],
    calls_of_messages: Any,
    ends: dict[str, str],
    per_message: int,
) -> None:
    """The engine's text is cut in every way. Anthropic's clients see the complete arguments of a cut call."""
    script: Script = engine(text, per_message=per_message)
    async with serving(script, tmp_path) as node:
        for path, body in BODIES.items():
            whole, streamed = await whole_and_streamed(node, path, body)
            assert streamed == whole, path
            expected = calls
            if path == ANTHROPIC and calls_of_messages is not None:
                expected = [("write", json.dumps(calls_of_messages))]
            assert (calls_of(path, whole), end_of(path, whole)) == (expected, ends[path])
            assert "tool_call>wri" not in json.dumps(whole).replace(OOPS, "")


@pytest.mark.parametrize("path", BODIES)
async def test_names_come_at_once_and_arguments_as_they_are_written(tmp_path: Path, path: str) -> None:
    """Each piece of the text is written once the client has seen the one before it."""
    pieces = ["<tool_call>write<arg_key>", "text</arg_key><arg_value>one", "\ntwo", CALL.partition("two")[2]]
    arguments = ('{"text": "one', "\\ntwo", '", "times": 3}')
    seen = ['"name":"write"', *(json.dumps(piece)[1:-1] for piece in arguments)]
    may_go_on = threading.Semaphore(1)

    def script(generate: Generate) -> Iterator[FromEngine | float]:
        for number, piece in enumerate(pieces, 1):
            while not may_go_on.acquire(blocking=False):
                yield 0.001
            finish = FinishReason.STOP if number == len(pieces) else None
            yield Tokens(generate.request_id, tuple(piece.encode()), (), finish)

    async with serving(script, tmp_path) as node:
        received = ""
        async with node.client.stream("POST", path, json=BODIES[path] | {"stream": True}) as answer:
            async for chunk in answer.aiter_text():
                received += chunk
                while seen and seen[0] in received:
                    received = received.partition(seen.pop(0))[2]
                    may_go_on.release()
        assert not seen


async def test_usage_of_a_chat_tells_its_reasoning_tokens(tmp_path: Path) -> None:
    """Tokens count up to the mark that ends reasoning, which may be a call's for GLM."""
    async with serving(stops_after(f"<think>hm{CALL}"), tmp_path) as node:
        whole, streamed = await whole_and_streamed(node, CHAT, BODIES[CHAT] | {"n": 2})
        assert streamed == whole
        num_tokens = len("<think>hm<tool_call>")
        assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * num_tokens}
