"""OpenAI's ``/v1/responses`` at a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.engine.messages import RequestFailed, Tokens
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.call_rules import CallRule
from hisparse_pd.serving.api.constraints import Constraint
from hisparse_pd.serving.http.http_errors import ApiError
from tests.stream_events import named_events
from tests.unit.api.recording_codec import RecordingCodec
from tests.unit.api.scripted_engine import plays, say, stops_after
from tests.unit.api.streams import whole_and_streamed
from tests.unit.api.support import ROOM, parse, serving

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("codec")]

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


async def test_a_whole_answer(tmp_path: Path) -> None:
    async with serving(say("abcdef"), tmp_path) as node:
        body = BODY | {"max_output_tokens": 3, "temperature": 0.5, "metadata": {"hisparse": "true"}}
        answer = await node.answer(PATH, **body, instructions="S", reasoning={"effort": "low"})
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
                "input_tokens_details": {
                    "cached_tokens": 2,
                    "cached_tokens_details": {"device": 0, "host": 2, "storage": 0, "decode": 0},
                    "cache_write_tokens": 0,
                    "held_tokens": 1,
                },
                "output_tokens": 3,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": generate.num_prompt_tokens + 3,
                "hisparse": {"mode": "dense", "hits": 10, "misses": 4},
            },
        }


async def test_items_of_an_answer(tmp_path: Path) -> None:
    async with serving(stops_after(f"<think>hm</think>Look:\n{CALL}"), tmp_path) as node:
        whole, streamed = await whole_and_streamed(node, PATH, BODY | {"tools": [TOOL]})
        assert streamed == whole
        reasoning, message, call = whole["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
        assert reasoning["summary"] == []
        assert message["content"][0]["text"] == "Look:\n"
        assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
        assert json.loads(call["arguments"]) == {"city": "7"}
        assert (whole["status"], whole["tools"]) == ("completed", [TOOL])
        num_reasoning_tokens = len("<think>hm</think>")
        assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": num_reasoning_tokens}


def call_item(name: str, call_id: str, arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def output_item(call_id: str, output: Any, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": output}


def reasoning_item(*texts: str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **fields}


def input_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


ANSWERED = {"type": "output_text", "text": "c", "annotations": []}
ITEMS = [
    {"role": "user", "content": [input_text("a"), input_text("b")]},
    reasoning_item("T"),
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [ANSWERED]},
    call_item("weather", "t1", '{"city": "x"}', id="fc_1"),
    call_item("weather", "t2"),
    output_item("t1", "sun"),
    output_item("t2", [input_text("rain")]),
    {"role": "assistant", "content": "d"},
    {"type": "reasoning", "id": "rs_2", "summary": []},
    {"role": "assistant", "content": "e"},
    {"type": "message", "role": "user", "content": "f"},
]
IMAGE = {"type": "input_image", "image_url": "http://x/y.png"}
PATCH = "*** Begin Patch\n*** End Patch\n"
CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Of helpers.",
    "tools": [TOOL | {"name": "spawn"}, TOOL | {"name": "wait", "description": None}, CUSTOM],
}
SEARCH = {"type": "web_search", "external_web_access": True}
AGENTS_ITEMS = [
    {"type": "additional_tools", "role": "developer", "tools": [CUSTOM | {"name": "exec"}, SEARCH]},
    {"role": "user", "content": "a"},
    reasoning_item(content=None, encrypted_content="gAAAAB"),
    call_item("spawn", "t1", namespace="agents", status="completed"),
    {"type": "custom_tool_call", "call_id": "t2", "name": "apply_patch", "input": "P"},
    output_item("t1", [IMAGE, input_text("b")]),
    output_item("t2", "done", "custom_tool_call_output"),
    {"role": "assistant", "content": "c", "phase": "final_answer"},
    {"role": "user", "content": "d"},
]
SHOWN = (
    '[user]ab[assistant]Tc<t1 weather {"city": "x"}><t2 weather {}>[toolt1]sun[toolt2]rain'
    "[assistant]d[assistant]e[user]f[assistant]"
)


NO_MORE_THAN_HINTS: dict[str, Any] = {
    **{"store": False, "reasoning": {"summary": "detailed"}, "text": {"verbosity": "low"}},
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
}


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "[user]hi[assistant]"),
        (NO_MORE_THAN_HINTS, "[user]hi[assistant]"),
        ({"input": ITEMS}, SHOWN),
        ({"instructions": "S"}, "[system]S[user]hi[assistant]"),
        ({"instructions": ""}, "[user]hi[assistant]"),
        ({"input": [{"role": "assistant", "content": "a"}]}, "[assistant]a[assistant]"),
        ({"tools": [TOOL]}, "[tools]weather[user]hi[assistant]"),
        ({"tools": [TOOL], "tool_choice": "none"}, "[user]hi[assistant]"),
        ({"tools": [TOOL | {"defer_loading": True}, SEARCH]}, "[tools]weather[user]hi[assistant]"),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, "[user]hi[assistant](high)"),
        (
            {"tools": [TOOL, NAMESPACE, CUSTOM]},
            "[tools]weather,agents.spawn,agents.wait,agents.apply_patch,apply_patch[user]hi[assistant]",
        ),
        (
            {"input": AGENTS_ITEMS, "tools": [NAMESPACE]},
            "[tools]agents.spawn,agents.wait,agents.apply_patch,exec[user]a[assistant]"
            '<t1 agents.spawn {}><t2 apply_patch {"input": "P"}>[toolt1][image]b[toolt2]done[assistant]c'
            "[user]d[assistant]",
        ),
    ],
)
async def test_the_prompt(codec: RecordingCodec, options: dict[str, Any], prompt: str) -> None:
    assert await codec.written(parse(Endpoint.RESPONSES, **{**BODY, **options})) == prompt


def reference_to(item_id: str) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


async def test_an_item_is_shown_once_at_the_first_of_its_places(codec: RecordingCodec) -> None:
    call = call_item("weather", "t1") | {"id": "fc_1"}
    thought = reasoning_item("T") | {"id": "rs_1"}
    asked, result = {"role": "user", "content": "a"}, output_item("t1", "sun")
    for items in (
        [asked, thought, call, result],
        [asked, thought, reference_to("rs_1"), call, reference_to("fc_1"), result],
        [asked, reference_to("rs_1"), reference_to("fc_1"), result, thought, call],
    ):
        written = await codec.written(parse(Endpoint.RESPONSES, input=items))
        assert written == "[user]a[assistant]T<t1 weather {}>[toolt1]sun[assistant]"


def test_a_reference_to_what_is_not_there_says_what_to_do() -> None:
    items = [{"role": "user", "content": "a", "id": "msg_1"}, reference_to("msg_2")]
    with pytest.raises(ApiError) as error:
        parse(Endpoint.RESPONSES, input=items)
    assert (error.value.status, error.value.param) == (400, "input[1].id")
    for said in ('"msg_2"', "store: false", "whole item"):
        assert said in error.value.message


def call_of(name: str, key: str, value: str) -> str:
    return f"<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("weather", {"type": "function_call", "name": "weather"}),
        ("agents.spawn", {"type": "function_call", "name": "spawn", "namespace": "agents"}),
        ("spawn", {"type": "function_call", "name": "spawn", "namespace": "agents"}),
        ("exec", {"type": "custom_tool_call", "name": "exec"}),
        ("agents.apply_patch", {"type": "custom_tool_call", "name": "apply_patch", "namespace": "agents"}),
        ("apply_patch", {"type": "custom_tool_call", "name": "apply_patch"}),
        ("unknown", {"type": "function_call", "name": "unknown"}),
    ],
)
async def test_calls_are_the_clients_own(tmp_path: Path, name: str, shown: dict[str, Any]) -> None:
    """The model calls a function by the name that it was shown, the client sees its tool."""
    is_custom = shown["type"] == "custom_tool_call"
    key, value = ("input", PATCH) if is_custom else ("city", "Rome")
    async with serving(stops_after(call_of(name, key, value)), tmp_path) as node:
        tools = [TOOL, NAMESPACE, CUSTOM, CUSTOM | {"name": "exec"}, SEARCH]
        answer = await node.post(PATH, **BODY, tools=tools)
        assert answer.headers["x-hisparse-pd-left-out"] == "tools[4] (web_search)"
        (item,) = answer.json()["output"]
        assert answer.json()["tools"] == tools[:-1]
        given = item.pop("input") if is_custom else json.loads(item.pop("arguments"))
        assert given == (PATCH if is_custom else {key: value})
        assert item.pop("id").startswith("ctc_" if is_custom else "fc_")
        assert item.pop("call_id").startswith("call_")
        assert item == shown | {"status": "completed"}
        whole, streamed = await whole_and_streamed(node, PATH, BODY | {"tools": tools})
        assert streamed == whole


async def test_a_custom_call_that_is_cut_off_has_what_was_written(tmp_path: Path) -> None:
    text = call_of("apply_patch", "input", PATCH)
    async with serving(say(text), tmp_path) as node:
        body = BODY | {"max_output_tokens": len(text) - 40, "tools": [CUSTOM]}
        answer = await node.answer(PATH, **body)
        (item,) = answer["output"]
        assert (item["status"], answer["status"]) == ("incomplete", "incomplete")
        assert PATCH.startswith(item["input"])
        assert item["input"]


SPAWN, WAIT = {"type": "function", "name": "spawn"}, {"type": "function", "name": "wait"}
EDIT = {"type": "custom", "name": "apply_patch"}


@pytest.mark.parametrize(
    ("choice", "called"),
    [
        (SPAWN, "agents.spawn"),
        (SPAWN | {"namespace": "agents"}, "agents.spawn"),
        (EDIT, "apply_patch"),
        (EDIT | {"namespace": "agents"}, "agents.apply_patch"),
        ({"type": "allowed_tools", "mode": "required", "tools": [WAIT]}, "agents.wait"),
    ],
)
def test_tools_of_namespaces_are_chosen(choice: dict[str, Any], called: str) -> None:
    (options,) = parse(Endpoint.RESPONSES, tools=[TOOL, NAMESPACE, CUSTOM], tool_choice=choice).options
    rule = CallRule("tool_choice", (called,), is_forced=True, at_most_one="tools" not in choice)
    assert options.constraint == Constraint(calls=rule)


def test_a_namespace_and_a_format_are_told_to_the_model() -> None:
    chat = parse(Endpoint.RESPONSES, tools=[NAMESPACE]).chat
    assert chat is not None
    spawn, wait, patch = (cast("dict[str, object]", tool["function"]) for tool in chat.tools)
    assert spawn["description"] == "agents: Of helpers.\n\nof a city"
    assert wait["description"] is None
    rule = {"type": "string", "description": "Follows this lark:\nstart: /.+/"}
    takes_text = {"type": "object", "properties": {"input": rule}, "required": ["input"]}
    assert patch == {
        "name": "agents.apply_patch",
        "description": "Edits files.",
        "parameters": takes_text | {"additionalProperties": False},
    }


ASKING_FOR_MORE: dict[str, Any] = {
    **{"previous_response_id": "resp_1", "conversation": "conv_1", "background": True, "store": True},
    **{"prompt": {"id": "p"}, "truncation": "auto", "top_logprobs": 3, "n": 2},
}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    *(({field: value}, field, "is not supported") for field, value in ASKING_FOR_MORE.items()),
    ({"include": ["message.output_text.logprobs"]}, "include[0]", "is not supported"),
    ({"input": None}, "input", "is needed"),
    ({"input": []}, "input", "must be a list with at least one message"),
    ({"input": 7}, "input", "must be a list"),
    *(
        ({"input": [item]}, f"input[0]{place}", said)
        for item, place, said in (
            (7, "", "must be an object"),
            ({"role": "user", "content": [IMAGE]}, ".content[0].type", '"input_image"'),
            ({"role": "user", "content": 7}, ".content", "must be `str | array`"),
            ({"role": "tool", "content": "x"}, ".role", 'must be "developer", "system" or "user"'),
            ({"type": "item_reference", "id": "x"}, ".id", '"x" is no item of this input'),
            ({"type": "item_reference"}, ".id", "is needed"),
            ({"type": "web_search_call"}, ".type", "is not supported"),
            (call_item("f", "c", {}), ".arguments", "must be `str | null`"),
        )
    ),
    (
        {"input": [*AGENTS_ITEMS[:5], output_item("t1", [IMAGE])]},
        "input[5].output[0].type",
        "could not process image",
    ),
    ({"instructions": 7}, "instructions", "must be `str | null`"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", 'must be "none"'),
    ({"tools": [NAMESPACE], "tool_choice": {**SPAWN, "name": "stop"}}, "tool_choice.name", "is none"),
    ({"tools": [SEARCH]}, "tools[0].type", "no server runs it here"),
    ({"tools": [TOOL, {"type": "local_shell"}]}, "tools[1].type", 'must be "function", "custom" or "name'),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "is needed"),
    ({"tools": [NAMESPACE | {"tools": [SEARCH]}]}, "tools[0].tools[0].type", 'must be "function" or'),
    ({"tools": [NAMESPACE | {"tools": [TOOL] * 257}]}, "tools[0].tools", "at most 256"),
    ({"tools": [NAMESPACE | {"tools": [TOOL] * 200}] * 2}, "tools[1].tools[56]", "256 tools"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "must be a JSON schema"),
    ({"text": {"verbosity": "mute"}}, "text.verbosity", 'must be "high", "low" or "medium"'),
    ({"reasoning": {"summary": "none"}}, "reasoning.summary", 'must be "auto", "concise" or "detailed"'),
    ({"max_output_tokens": 0}, "max_output_tokens", "must be `int` >= 1"),
]


@pytest.mark.parametrize(("options", "param", "said"), REFUSED)
def test_what_is_refused_is_named(options: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(Endpoint.RESPONSES, **options)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(param)
    assert said in refused.value.message


async def test_a_failure_midway_is_an_event_of_its_own(tmp_path: Path) -> None:
    script = plays(Tokens("", tuple(b"ab")), RequestFailed("", 502, "the pool burst"))
    async with serving(script, tmp_path) as node:
        events = named_events((await node.post(PATH, **BODY, stream=True)).text)
        name, event = events[-1]
        assert name == "response.failed"
        assert event["sequence_number"] == len(events) - 1
        assert event["response"]["status"] == "failed"
        assert event["response"]["error"] == {"code": "server_error", "message": "the pool burst"}
        assert event["response"]["completed_at"] is None
