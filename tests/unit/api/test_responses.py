"""OpenAI's ``/v1/responses`` at a node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.engine_messages import Generate, RequestFailed
from tests.unit.api import support
from tests.unit.api.recording_codec import RecordingCodec
from tests.unit.api.scripted_engine import deliver, say, stops_after
from tests.unit.api.support import ROOM, Node, OnNode, named_events
from vocabulary import HisparseFlag

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>7</arg_value></tool_call>"
BODY: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 100, **ROOM}


@pytest.fixture(autouse=True)
def codec(monkeypatch: pytest.MonkeyPatch) -> RecordingCodec:
    codec = RecordingCodec.make()
    monkeypatch.setattr(support, "CODEC", codec)
    return codec


def test_a_whole_answer(on_node: OnNode) -> None:
    async def check(node: Node) -> None:
        body = BODY | {"max_output_tokens": 3, "temperature": 0.5, "metadata": {"hisparse": "true"}}
        answer = (await node.post(PATH, **body, instructions="S", reasoning={"effort": "low"})).json()
        assert answer.pop("id").startswith("resp_")
        assert isinstance(answer.pop("created_at"), int)
        (item,) = answer.pop("output")
        assert item.pop("id").startswith("msg_")
        assert item == {
            "type": "message",
            "role": "assistant",
            "status": "incomplete",
            "content": [{"type": "output_text", "text": "abc", "annotations": [], "logprobs": []}],
        }
        (generate,) = node.engine.generates
        assert generate.hisparse is HisparseFlag.TRUE
        assert answer == {
            "object": "response",
            "completed_at": None,
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
            "error": None,
            "background": False,
            "model": "tiny",
            "instructions": "S",
            "metadata": {"hisparse": "true"},
            "max_output_tokens": 3,
            "max_tool_calls": None,
            "user": None,
            "safety_identifier": None,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": "low", "summary": None},
            "store": False,
            "temperature": 0.5,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": {
                "input_tokens": generate.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0, "held_tokens": 1},
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": generate.num_prompt_tokens + 3,
                "hisparse": {"mode": "dense", "hits": 10, "misses": 4},
            },
        }

    on_node(say("abcdef"), check)


def test_the_events_of_a_stream(on_node: OnNode) -> None:
    """Each item is opened, grows, and is closed; the last event has all of them as they were closed."""

    async def check(node: Node) -> None:
        answer = await node.post(PATH, **BODY, stream=True, tools=[TOOL])
        events = named_events(answer.text)
        assert all(name == event["type"] for name, event in events)
        assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
        names = [name.removeprefix("response.") for name, _ in events]
        assert [name for index, name in enumerate(names) if name != names[index - 1]] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
        for _, event in events[:2]:
            assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
        done: list[dict[str, Any]] = []
        grown = ""
        for name, event in events[2:-1]:
            assert event["output_index"] == len(done)
            match name.rpartition(".")[2], name:
                case "added", "response.output_item.added":
                    added, grown = event["item"], ""
                    assert added["status"] == "in_progress"
                case "delta", _:
                    assert event["item_id"] == added["id"]
                    grown += event["delta"]
                case "done", "response.output_item.done":
                    assert event["item"]["id"] == added["id"]
                    done.append(event["item"])
                case "done", "response.content_part.done":
                    assert event["part"]["text"] == grown
                case "done", _:
                    assert event.get("text", event.get("arguments")) == grown
        reasoning, message, call = done
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert reasoning["summary"] == []
        assert message["content"][0]["text"] == "Look:\n"
        assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
        assert json.loads(call["arguments"]) == {"city": "7"}
        assert call["call_id"].startswith("call_")
        last = events[-1][1]["response"]
        assert (last["status"], last["output"], last["tools"]) == ("completed", done, [TOOL])
        assert last["id"] == events[0][1]["response"]["id"]
        num_reasoning_tokens = len("<think>hm</think>")
        assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": num_reasoning_tokens}
        whole = (await node.post(PATH, **BODY, tools=[TOOL])).json()
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
        assert (whole["status"], whole["usage"]) == ("completed", last["usage"])

    on_node(stops_after(f"<think>hm</think>Look:\n{CALL}"), check)


def test_a_stream_that_is_cut_is_incomplete(on_node: OnNode) -> None:
    async def check(node: Node) -> None:
        body = BODY | {"max_output_tokens": 3}
        *_, (_, item_done), (name, last) = named_events((await node.post(PATH, **body, stream=True)).text)
        assert name == "response.incomplete"
        assert item_done["item"]["status"] == "incomplete"
        assert last["response"]["output"] == [item_done["item"]]
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}

    on_node(say("abcdef"), check)


ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "c", "annotations": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "t1", "name": "weather", "arguments": '{"city": "x"}'},
    {"type": "function_call", "call_id": "t2", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "t1", "output": "sun"},
    {"type": "function_call_output", "call_id": "t2", "output": [{"type": "input_text", "text": "rain"}]},
    {"role": "assistant", "content": "d"},
    {"type": "reasoning", "id": "rs_2", "summary": []},
    {"role": "assistant", "content": "e"},
    {"type": "message", "role": "user", "content": "f"},
]
SHOWN = (
    '[user]ab[assistant]Tc<t1 weather {"city": "x"}><t2 weather {}>[toolt1]sun[toolt2]rain'
    "[assistant]d[assistant]e[user]f[assistant]"
)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "[user]hi[assistant]"),
        ({"input": ITEMS}, SHOWN),
        ({"instructions": "S"}, "[system]S[user]hi[assistant]"),
        ({"instructions": ""}, "[user]hi[assistant]"),
        ({"input": [{"role": "assistant", "content": "a"}]}, "[assistant]a[assistant]"),
        ({"tools": [TOOL]}, "[tools]weather[user]hi[assistant]"),
        ({"tools": [TOOL], "tool_choice": "none"}, "[user]hi[assistant]"),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "[user]hi[assistant](high)"),
        ({"store": False, "include": ["reasoning.encrypted_content"]}, "[user]hi[assistant]"),
    ],
)
def test_the_prompt(on_node: OnNode, codec: RecordingCodec, options: dict[str, Any], prompt: str) -> None:
    async def check(node: Node) -> None:
        answer = await node.post(PATH, **{**BODY, "max_output_tokens": 5, **options})
        assert answer.status_code == 200, answer.text
        assert codec.prompt == prompt

    on_node(say("abcdef"), check)


IMAGE = {"type": "input_image", "image_url": "http://x/y.png"}


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({"input": None}, "input", "is needed"),
        ({"input": []}, "input", "must be a list with at least one message"),
        ({"input": 7}, "input", "must be a list"),
        ({"input": [7]}, "input[0]", "must be an object"),
        ({"instructions": 7}, "instructions", "must be a string"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", '"input_image"'),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content", "must be a string"),
        (
            {"input": [{"role": "tool", "content": "x"}]},
            "input[0].role",
            'must be "developer", "system" or "user"',
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "is not supported"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "is not supported"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]},
            "input[0].arguments",
            "must be a string",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
            "is not supported",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "is not supported"),
        ({"conversation": "conv_1"}, "conversation", "is not supported"),
        ({"background": True}, "background", "is not supported"),
        ({"store": True}, "store", "is not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "is not supported"),
        ({"truncation": "auto"}, "truncation", "is not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "is not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]", "is not supported"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", 'must be "none"'),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", 'must be "function"'),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is needed"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "must be a JSON schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "is not supported"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "is not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"n": 2}, "n", "is not supported"),
    ],
)
def test_what_is_refused_is_named(on_node: OnNode, options: dict[str, Any], param: str, said: str) -> None:
    async def check(node: Node) -> None:
        answer = await node.post(PATH, **{**BODY, **options})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(param)
        assert said in error["message"]

    on_node(say("x"), check)


def test_a_failure_midway_is_an_event_of_its_own(on_node: OnNode) -> None:
    def script(generate: Generate) -> Any:
        yield from list(say("abcdef")(generate))[:2]
        yield RequestFailed(generate.request_id, 502, "the pool burst")

    async def check(node: Node) -> None:
        events = named_events((await node.post(PATH, **BODY, stream=True)).text)
        name, event = events[-1]
        assert name == "response.failed"
        assert event["sequence_number"] == len(events) - 1
        assert event["response"]["status"] == "failed"
        assert event["response"]["error"] == {"code": "server_error", "message": "the pool burst"}
        assert event["response"]["completed_at"] is None

    on_node(script, check)


def test_a_prefill_node_takes_the_same_body(on_node: OnNode, codec: RecordingCodec) -> None:
    async def check(node: Node) -> None:
        for is_streamed in (False, True):
            assert (await node.post(PATH, **BODY, stream=is_streamed)).status_code == 200
            assert codec.prompt == "[user]hi[assistant]"

    on_node(deliver, check, role="prefill")
