"""Calls in streams of all chat APIs: names at once, arguments as they come, and calls that are cut off."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.engine.messages import FromEngine, Generate, Tokens
from hisparse_pd.vocabulary import FinishReason
from tests.unit.api.scripted_engine import Script, say, stops_after
from tests.unit.api.support import MESSAGES, ROOM, decode_events, named_events, serving

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("codec")]

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}, "times": {"type": "integer"}}}
FUNCTION = {"name": "write", "parameters": PARAMETERS}
CHAT, MESSAGES_PATH, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
    MESSAGES_PATH: {
        "messages": MESSAGES,
        "max_tokens": 160,
        "tools": [{"name": "write", "input_schema": PARAMETERS}],
    },
    RESPONSES: {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
}
CALL = (
    "<tool_call>write<arg_key>text</arg_key><arg_value>one\ntwo</arg_value>"
    "<arg_key>times</arg_key><arg_value>3</arg_value></tool_call>"
)
CUT_AT = CALL.index("wo</arg_value>")
"""Within the first argument."""
ARGUMENTS = '{"text": "one\\ntwo", "times": 3}'


def body_of(path: str, **options: Any) -> dict[str, Any]:
    return {"model": "tiny", **BODIES[path], **ROOM, **options}


def events_of(path: str, text: str) -> list[dict[str, Any]]:
    return decode_events(text) if path == CHAT else [event for _, event in named_events(text)]


def name_in(event: dict[str, Any]) -> str | None:
    """Of the call that begins with the event."""
    found = event.get("content_block") or event.get("item") or {}
    for choice in event.get("choices", ()):
        for call in choice["delta"].get("tool_calls", ()):
            found = call["function"]
    begins = event.get("type") in (None, "content_block_start", "response.output_item.added")
    return found.get("name") if begins else None


def arguments_in(event: dict[str, Any]) -> str:
    """By what arguments grow with the event."""
    match event:
        case {"type": "content_block_delta", "delta": {"partial_json": piece}}:
            return str(piece)
        case {"type": "response.function_call_arguments.delta", "delta": piece}:
            return str(piece)
        case {"choices": [{"delta": {"tool_calls": [call]}}]}:
            return str(call["function"]["arguments"])
    return ""


@pytest.mark.parametrize("path", BODIES)
async def test_names_come_at_once_and_arguments_as_they_are_written(tmp_path: Path, path: str) -> None:
    """Each piece of the text is written once the client has seen what the one before it says."""
    pieces = ["<tool_call>write<arg_key>", "text</arg_key><arg_value>one", "\ntwo", CALL.partition("two")[2]]
    seen = ["write", '{"text": "one', "\\ntwo", '", "times": 3}']
    may_go_on = threading.Semaphore(1)

    def script(generate: Generate) -> Iterator[FromEngine | float]:
        for number, piece in enumerate(pieces, 1):
            while not may_go_on.acquire(blocking=False):
                yield 0.001
            finish = FinishReason.STOP if number == len(pieces) else None
            yield Tokens(generate.request_id, tuple(piece.encode()), (), finish)

    async with serving(script, tmp_path) as node:
        waits_for = iter(seen)
        expected, grown, received = next(waits_for), "", b""
        async with node.client.stream("POST", path, json=body_of(path, stream=True)) as answer:
            async for chunk in answer.aiter_bytes():
                received += chunk
                *whole, received = received.split(b"\n\n")
                for line in b"\n".join(whole).split(b"\n"):
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line.removeprefix(b"data: "))
                    grown += (name_in(event) or "") + arguments_in(event)
                    if expected and grown.endswith(expected):
                        expected = next(waits_for, "")
                        may_go_on.release()
        assert grown == "write" + ARGUMENTS


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer_has_the_arguments_of_its_stream(tmp_path: Path, path: str) -> None:
    async with serving(stops_after(CALL * 2), tmp_path) as node:
        events = events_of(path, (await node.post(path, **body_of(path, stream=True))).text)
        assert [name for event in events if (name := name_in(event))] == ["write"] * 2
        assert "".join(map(arguments_in, events)) == ARGUMENTS * 2
        whole = (await node.post(path, **body_of(path))).json()
        match path:
            case "/v1/chat/completions":
                calls = [call["function"] for call in whole["choices"][0]["message"]["tool_calls"]]
                assert [call["arguments"] for call in calls] == [ARGUMENTS] * 2
            case "/v1/messages":
                assert [block["input"] for block in whole["content"]] == [json.loads(ARGUMENTS)] * 2
            case _:
                assert [item["arguments"] for item in whole["output"]] == [ARGUMENTS] * 2


def say_with_limit(text: str) -> Script:
    """A model that would go on: the answer ends for its length."""
    return say(text, per_message=3)


class TestCut:
    """By max_tokens within the first argument: no markup, what was sure of the arguments, and the reason."""

    text = CALL[:CUT_AT]
    arguments = '{"text": "one\\nt'

    async def test_a_chat(self, tmp_path: Path) -> None:
        async with serving(say_with_limit(self.text), tmp_path) as node:
            (choice,) = (await node.post(CHAT, **body_of(CHAT))).json()["choices"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("length", None)
            (call,) = choice["message"]["tool_calls"]
            assert call["function"] == {"name": "write", "arguments": self.arguments}
            events = decode_events((await node.post(CHAT, **body_of(CHAT, stream=True))).text)
            assert "".join(map(arguments_in, events)) == self.arguments
            assert not any(event["choices"][0]["delta"].get("content") for event in events)
            assert events[-1]["choices"][0]["finish_reason"] == "length"

    async def test_messages(self, tmp_path: Path) -> None:
        async with serving(say_with_limit(self.text), tmp_path) as node:
            whole = (await node.post(MESSAGES_PATH, **body_of(MESSAGES_PATH))).json()
            (block,) = whole["content"]
            assert (block["type"], block["name"], block["input"]) == ("tool_use", "write", {})
            assert whole["stop_reason"] == "max_tokens"
            streamed = await node.post(MESSAGES_PATH, **body_of(MESSAGES_PATH, stream=True))
            events = events_of(MESSAGES_PATH, streamed.text)
            assert "".join(map(arguments_in, events)) == self.arguments
            kinds = [event["type"] for event in events]
            assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            assert events[-2]["delta"]["stop_reason"] == "max_tokens"

    async def test_of_messages_arguments_that_are_complete_stay(self, tmp_path: Path) -> None:
        async with serving(say_with_limit(CALL[: CALL.index("3<")]), tmp_path) as node:
            whole = (await node.post(MESSAGES_PATH, **body_of(MESSAGES_PATH))).json()
            assert [block["input"] for block in whole["content"]] == [{"text": "one\ntwo"}]

    async def test_responses(self, tmp_path: Path) -> None:
        async with serving(say_with_limit(self.text), tmp_path) as node:
            whole = (await node.post(RESPONSES, **body_of(RESPONSES))).json()
            (item,) = whole["output"]
            assert (item["status"], item["arguments"]) == ("incomplete", self.arguments)
            assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
            streamed = await node.post(RESPONSES, **body_of(RESPONSES, stream=True))
            *_, done, item_done, last = events_of(RESPONSES, streamed.text)
            assert (done["type"], done["arguments"]) == (
                "response.function_call_arguments.done",
                self.arguments,
            )
            assert item_done["item"]["status"] == "incomplete"
            assert last["type"] == "response.incomplete"

    @pytest.mark.parametrize("path", BODIES)
    async def test_nothing_is_shown_of_a_call_without_a_name(self, tmp_path: Path, path: str) -> None:
        async with serving(say_with_limit("So: <tool_call>wri"), tmp_path) as node:
            for is_streamed in (False, True):
                answer = (await node.post(path, **body_of(path, stream=is_streamed))).text
                assert re.search("<tool_call|wri(?!te)", answer) is None


async def test_a_call_that_cannot_be_read_is_no_json_in_any_api(tmp_path: Path) -> None:
    fault = "<tool_call>write<arg_key>text</arg_key>oops</tool_call>"
    arguments = "<arg_key>text</arg_key>oops</tool_call>"
    async with serving(stops_after(fault), tmp_path) as node:
        (choice,) = (await node.post(CHAT, **body_of(CHAT))).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == arguments
        whole = (await node.post(MESSAGES_PATH, **body_of(MESSAGES_PATH))).json()
        assert whole["content"][0]["input"] == {"INVALID_JSON": arguments}
        whole = (await node.post(RESPONSES, **body_of(RESPONSES))).json()
        assert whole["output"][0]["arguments"] == arguments


@pytest.mark.parametrize("per_message", [3, 1000])
async def test_what_stands_between_calls_keeps_its_place(tmp_path: Path, per_message: int) -> None:
    """However the answer came: an item each, in the order of the text."""
    async with serving(stops_after(f"One.{CALL}Two.{CALL}", per_message), tmp_path) as node:
        for is_streamed in (False, True):
            answer = await node.post(RESPONSES, **body_of(RESPONSES, stream=is_streamed))
            last = (
                events_of(RESPONSES, answer.text)[-1]["response"] if is_streamed else json.loads(answer.text)
            )
            kinds = [item["type"] for item in last["output"]]
            assert kinds == ["message", "function_call", "message", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_of_a_chat_tells_its_reasoning_tokens(tmp_path: Path, stream: bool) -> None:
    """Up to the mark that ends it, which of GLM may be a call's."""
    async with serving(stops_after(f"<think>hm{CALL}"), tmp_path) as node:
        options: dict[str, Any] = {"stream": stream, "n": 2}
        if stream:
            options["stream_options"] = {"include_usage": True}
        answer = await node.post(CHAT, **body_of(CHAT, **options))
        last = decode_events(answer.text)[-1] if stream else answer.json()
        num_tokens = len("<think>hm<tool_call>")
        assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * num_tokens}
