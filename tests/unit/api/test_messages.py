"""Anthropic's ``/v1/messages`` and ``count_tokens`` at a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.engine.messages import RequestFailed, Tokens
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.http.http_errors import ApiError
from tests.stream_events import named_events
from tests.unit.api.recording_codec import RecordingCodec
from tests.unit.api.scripted_engine import plays, say, stops_after
from tests.unit.api.streams import whole_and_streamed
from tests.unit.api.support import MESSAGES, ROOM, parse, serving

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("codec")]

PATH = "/v1/messages"
TOOL = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>7</arg_value></tool_call>"
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": MESSAGES, **ROOM}


async def test_a_whole_answer(tmp_path: Path) -> None:
    async with serving(say("abcdef"), tmp_path) as node:
        answer = await node.answer(PATH, **{**BODY, "max_tokens": 3}, hisparse=True)
        (generate,) = node.engine.generates
        assert generate.hisparse is HisparseFlag.TRUE
        assert answer.pop("id").startswith("msg_")
        assert answer == {
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [{"type": "text", "text": "abc", "citations": None}],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": {
                "input_tokens": generate.num_prompt_tokens - 2,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 2,
                "output_tokens": 3,
                "output_tokens_details": {"thinking_tokens": 0},
                "cached_tokens_details": {"device": 0, "host": 2, "storage": 0, "decode": 0},
                "held_tokens": 1,
                "hisparse": {"mode": "dense", "hits": 10, "misses": 4},
            },
        }
        counted = await node.post(PATH + "/count_tokens", model="tiny", messages=MESSAGES)
        assert counted.json() == {"input_tokens": generate.num_prompt_tokens}


async def test_a_whole_answer_with_thinking_and_a_call(tmp_path: Path) -> None:
    async with serving(stops_after(f"<think>so</think>{CALL}"), tmp_path) as node:
        answer = await node.answer(PATH, **BODY, tools=[TOOL])
        call = answer["content"].pop()
        assert call.pop("id").startswith("toolu_")
        assert call == {"type": "tool_use", "name": "weather", "input": {"city": "7"}}
        assert answer["content"] == [{"type": "thinking", "thinking": "so", "signature": ""}]
        assert answer["stop_reason"] == "tool_use"
        assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": len("<think>so</think>")}


@pytest.mark.parametrize(
    ("text", "options", "stop_reason", "stop_sequence"),
    [
        ("abcd", {"stop_sequences": ["x", "c"]}, "stop_sequence", "c"),
        ("abcd", {}, "end_turn", None),
        ("abcd", {"max_tokens": 4}, "max_tokens", None),
    ],
)
async def test_stop_reasons(
    tmp_path: Path, text: str, options: dict[str, Any], stop_reason: str, stop_sequence: str | None
) -> None:
    async with serving(say(text) if "max_tokens" in options else stops_after(text), tmp_path) as node:
        whole, streamed = await whole_and_streamed(node, PATH, BODY | options)
        assert (whole["stop_reason"], whole["stop_sequence"]) == (stop_reason, stop_sequence)
        assert streamed == whole


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def thinking(said: str, signature: str | None = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": signature}


def given(*content: Any, call_id: str = "t1", **fields: Any) -> dict[str, Any]:
    """The result of a call."""
    return {"type": "tool_result", "tool_use_id": call_id, "content": list(content), **fields}


def called(**arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t1", "name": "weather", "input": arguments}


TURNS = [
    user(text("a"), text("b")),
    assistant(thinking("T", "s"), text("c") | {"cache_control": {"type": "ephemeral"}}, called(city="x")),
    user(given(text("sun")), {"type": "tool_result", "tool_use_id": "t2", "is_error": True}, text("d")),
]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
LARGE_IMAGE = {"type": "image", "source": {"type": "base64", "data": "A" * (2 << 20)}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
THOUGHTS = [
    {"role": "user", "content": "a"},
    assistant(thinking("T"), text("b")),
    user(text("c")),
    assistant(thinking("U"), called()),
    user(given(text("d"))),
    assistant(thinking("V"), text("e")),
    user(text("f")),
]


def with_result(*content: Any) -> dict[str, Any]:
    """Return the conversation of thoughts with this result instead of its own."""
    return {"messages": [*THOUGHTS[:4], user(given(*content)), *THOUGHTS[5:]]}


def cleared(**edit: Any) -> dict[str, Any]:
    edits = [{"type": "clear_thinking_20251015"} | edit]
    return {"messages": THOUGHTS, "context_management": {"edits": edits}}


def shown_thoughts(first: str, second: str) -> str:
    """Return the thoughts shown of the two turns before the last question."""
    u, v = list(second) or ["", ""]
    return (
        f"[user]a[assistant]{first}b[user]c"
        f"[assistant]{u}<t1 weather {{}}>[toolt1]d[assistant]{v}e[user]f[assistant]"
    )


SHOWN_TURNS = '[user]ab[assistant]Tc<t1 weather {"city": "x"}>[toolt1]sun[toolt2][user]d'


PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({}, "[user]hi[assistant]"),
    ({"messages": TURNS}, SHOWN_TURNS + "[assistant]"),
    ({"system": "S"}, "[system]S[user]hi[assistant]"),
    ({"system": [text("S"), text("R")]}, "[system]SR[user]hi[assistant]"),
    ({"messages": [*MESSAGES, {"role": "assistant", "content": "It is"}]}, "[user]hi[assistant]It is"),
    ({"tools": [TOOL]}, "[tools]weather[user]hi[assistant]"),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "[user]hi[assistant]"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, "[tools]weather[user]hi[assistant]"),
    ({"tools": [TOOL, SEARCH]}, "[tools]weather[user]hi[assistant]"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "[tools]weather[user]hi[assistant]"),
    ({"thinking": {"type": "adaptive"}}, "[user]hi[assistant]<think>\n"),
    ({"thinking": {"type": "disabled"}}, "[user]hi[assistant]"),
    ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, "[user]hi[assistant]<think>\n"),
    ({"thinking": {"type": "between_tools"}}, "[user]hi[assistant]<think>\n"),
    ({"output_config": {"effort": "low"}}, "[user]hi[assistant](low)"),
    ({"context_management": {"edits": []}}, "[user]hi[assistant]"),
    (cleared(keep="all"), shown_thoughts("T", "UV")),
    (cleared(keep={"type": "all"}), shown_thoughts("T", "UV")),
    (cleared(keep={"type": "thinking_turns", "value": 2}), shown_thoughts("T", "UV")),
    (cleared(keep={"type": "thinking_turns", "value": 1}), shown_thoughts("", "UV")),
    (cleared(), shown_thoughts("", "UV")),
    (with_result(IMAGE, text("d"), PDF), shown_thoughts("T", "UV").replace("]d", "][image]d[document]")),
    (with_result(*[LARGE_IMAGE] * 2), shown_thoughts("T", "UV").replace("]d", "][image][image]")),
    (
        {"messages": [*THOUGHTS[:4], user(given({"type": "tool_reference", "tool_name": "weather"}))]},
        "[user]a[assistant]Tb[user]c[assistant]U<t1 weather {}>[toolt1][weather][assistant]",
    ),
    (
        {"messages": [user(text("a")), assistant({"type": "redacted_thinking"}, called()), user(given())]},
        "[user]a[assistant]<t1 weather {}>[toolt1][assistant]",
    ),
]


@pytest.mark.parametrize(("options", "prompt"), PROMPTS)
async def test_the_prompt(codec: RecordingCodec, options: dict[str, Any], prompt: str) -> None:
    assert await codec.written(parse(Endpoint.MESSAGES, **{**BODY, **options})) == prompt


async def test_omitted_thinking_is_in_its_signature(tmp_path: Path, codec: RecordingCodec) -> None:
    """The client does not see it, and the model sees it again when the block comes back."""
    async with serving(stops_after("hm, hm</think>Look"), tmp_path) as node:
        body = BODY | {"thinking": {"type": "adaptive", "display": "omitted"}, "max_tokens": 100}
        whole, streamed = await whole_and_streamed(node, PATH, body)
        assert streamed == whole
        omitted, said = whole["content"]
        assert (omitted["thinking"], said["text"]) == ("", "Look")
    for signature, shown in ((omitted["signature"], "hm, hm"), ("EqQBCgYIARgCIkA", ""), (None, "")):
        turns = [*MESSAGES, assistant(thinking("", signature), called()), user(given())]
        prompt = await codec.written(parse(Endpoint.MESSAGES, messages=turns))
        assert prompt == f"[user]hi[assistant]{shown}<t1 weather {{}}>[toolt1][assistant]"


async def test_tools_that_are_left_out_are_named_in_a_header(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path) as node:
        for is_streamed in (False, True):
            answer = await node.post(PATH, **BODY, tools=[TOOL, SEARCH], stream=is_streamed)
            assert answer.headers["x-hisparse-pd-left-out"] == "tools[1] (web_search_20250305)"
            answer = await node.post(PATH, **BODY, tools=[TOOL], stream=is_streamed)
            assert "x-hisparse-pd-left-out" not in answer.headers


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: a list with 0 entries must be a list with at least one message"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content: 7 must be `str | array`"),
    *(
        ({"messages": [message]}, f"messages[0].content[0]{said}")
        for message, said in (
            (user(IMAGE), '.type: "image" is not supported: could not process image'),
            (user(PDF), '.type: "document" is not supported: could not process pdf'),
            (user({"type": "audio"}), '.type: "audio" must be "text", "tool_result"'),
            (user({"type": "text", "text": 1}), ".text: 1 must be `str`"),
            (user(given(IMAGE)), '.content[0].type: "image"'),
            (user({"type": "tool_result", "content": "x"}), ".tool_use_id"),
            (user(7), ": 7 must be `object`"),
            (assistant({"type": "server_tool_use"}), '.type: "server_tool_use" must be "text", "thinking"'),
            (assistant(called() | {"input": []}), ".input"),
        )
    ),
    (
        {"messages": [*THOUGHTS[:4], user(given(text("d"), IMAGE))]},
        'messages[4].content[0].content[1].type: "image" is not supported: could not process image',
    ),
    ({"messages": [assistant(called())]}, "must not end with a tool_use"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"tools": [SEARCH]}, 'tools[0].type: "web_search_20250305" is not supported: no server runs it here'),
    ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, 'tools[1].type: "bash_20250124"'),
    ({"tools": [{"name": "n"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "all"}}, 'tool_choice.type: "all"'),
    (
        {"tools": [TOOL, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        'tool_choice.name: "web_search" is none of the tools',
    ),
    ({"thinking": {"type": "always"}}, 'thinking.type: "always"'),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: 0"),
    ({"thinking": {"type": "adaptive", "display": "hidden"}}, "thinking.display"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    (
        cleared(type="clear_tool_uses_20250919"),
        'context_management.edits[0].type: "clear_tool_uses_20250919" must be "clear_thinking_20251015"',
    ),
    (cleared(keep={"type": "thinking_turns"}), "context_management.edits.keep.value"),
    (cleared(keep="some"), "context_management.edits[0].keep"),
    ({"max_tokens": None}, "max_tokens: null must be `int`"),
    ({"temperature": 1.5}, "temperature: 1.5 must be `float` <= 1"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"n": 2}, "n: 2 is not supported"),
    ({"return_token_ids": True}, "return_token_ids"),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_is_refused_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(Endpoint.MESSAGES, **options)
    assert refused.value.status == 400
    assert said in refused.value.message


async def test_errors_have_anthropics_shape(tmp_path: Path) -> None:
    burst = RequestFailed("", 502, "the pool burst", "prefill_node_failed")
    async with serving(plays(burst), tmp_path) as node:
        answer = await node.post(PATH, **{**BODY, "model": "other"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        answer = await node.client.get(PATH)
        assert (answer.status_code, answer.json()["type"]) == (405, "error")
        for path in (PATH, PATH + "/count_tokens"):
            answer = await node.post(path, **{**BODY, "messages": []})
            assert (answer.status_code, answer.json()["type"]) == (400, "error")
            assert answer.json()["error"]["type"] == "invalid_request_error"
        for is_streamed in (False, True):
            answer = await node.post(PATH, **BODY, stream=is_streamed)
            assert answer.status_code == 502
            error = {"type": "api_error", "message": "the pool burst", "code": "prefill_node_failed"}
            assert answer.json() == {"type": "error", "error": error}
    directory = tmp_path / "midway"
    directory.mkdir()
    async with serving(plays(Tokens("", tuple(b"ab")), burst), directory) as node:
        events = named_events((await node.post(PATH, **BODY, stream=True)).text)
        name, event = events[-1]
        assert (name, event["type"]) == ("error", "error")
        assert event["error"]["message"] == "the pool burst"
        assert events[0][0] == "message_start"
