"""Anthropic's ``/v1/messages`` and ``count_tokens`` at a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.api.bodies import Endpoint
from hisparse_pd.engine.messages import Generate, RequestFailed
from hisparse_pd.http.http_errors import ApiError
from hisparse_pd.vocabulary import HisparseFlag
from tests.unit.api.recording_codec import RecordingCodec
from tests.unit.api.scripted_engine import Script, say, stops_after
from tests.unit.api.streams import whole_and_streamed
from tests.unit.api.support import ROOM, named_events, parse, serving

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("codec")]

PATH = "/v1/messages"
TOOL = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>7</arg_value></tool_call>"
BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hi"}],
    **ROOM,
}


async def test_a_whole_answer(tmp_path: Path) -> None:
    async with serving(say("abcdef"), tmp_path) as node:
        answer = (await node.post(PATH, **{**BODY, "max_tokens": 3}, hisparse=True)).json()
        assert answer.pop("id").startswith("msg_")
        assert answer == {
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [{"type": "text", "text": "abc", "citations": None}],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": {
                "input_tokens": answer["usage"]["input_tokens"],
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 2,
                "output_tokens": 3,
                "output_tokens_details": {"thinking_tokens": 0},
                "held_tokens": 1,
                "hisparse": {"mode": "dense", "hits": 10, "misses": 4},
            },
        }
        (generate,) = node.engine.generates
        assert answer["usage"]["input_tokens"] + 2 == generate.num_prompt_tokens
        assert generate.hisparse is HisparseFlag.TRUE
        counted = await node.post(PATH + "/count_tokens", model="tiny", messages=BODY["messages"])
        assert counted.json() == {"input_tokens": generate.num_prompt_tokens}


async def test_a_whole_answer_with_thinking_and_a_call(tmp_path: Path) -> None:
    async with serving(stops_after(f"<think>so</think>{CALL}"), tmp_path) as node:
        answer = (await node.post(PATH, **BODY, tools=[TOOL])).json()
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


TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "T", "signature": "s"},
            {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "x"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
            {"type": "text", "text": "d"},
        ],
    },
]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
LARGE_IMAGE = {"type": "image", "source": {"type": "base64", "data": "A" * (2 << 20)}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}


def result(*content: Any) -> dict[str, Any]:
    told = {"type": "tool_result", "tool_use_id": "t1", "content": list(content)}
    return {"role": "user", "content": [told]}


def thought(text: str, *others: Any) -> dict[str, Any]:
    thinking = {"type": "thinking", "thinking": text, "signature": ""}
    return {"role": "assistant", "content": [thinking, *others]}


CALLED = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
THOUGHTS = [
    {"role": "user", "content": "a"},
    thought("T", {"type": "text", "text": "b"}),
    {"role": "user", "content": "c"},
    thought("U", CALLED),
    result({"type": "text", "text": "d"}),
    thought("V", {"type": "text", "text": "e"}),
    {"role": "user", "content": "f"},
]


def cleared(**edit: Any) -> dict[str, Any]:
    edits = [{"type": "clear_thinking_20251015", **edit}]
    return {"messages": THOUGHTS, "context_management": {"edits": edits}}


def shown_thoughts(first: str, second: str) -> str:
    """Of the two turns before the last question."""
    u, v = second or ("", "")
    return (
        f"[user]a[assistant]{first}b[user]c"
        f"[assistant]{u}<t1 weather {{}}>[toolt1]d[assistant]{v}e[user]f[assistant]"
    )


SHOWN_TURNS = '[user]ab[assistant]Tc<t1 weather {"city": "x"}>[toolt1]sun[toolt2][user]d'


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "[user]hi[assistant]"),
        ({"messages": TURNS}, SHOWN_TURNS + "[assistant]"),
        ({"system": "S"}, "[system]S[user]hi[assistant]"),
        (
            {"system": [{"type": "text", "text": "S"}, {"type": "text", "text": "R"}]},
            "[system]SR[user]hi[assistant]",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]},
            "[user]a[assistant]It is",
        ),
        ({"tools": [TOOL]}, "[tools]weather[user]hi[assistant]"),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "[user]hi[assistant]"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, "[tools]weather[user]hi[assistant]"),
        ({"thinking": {"type": "adaptive"}}, "[user]hi[assistant]<think>\n"),
        ({"thinking": {"type": "disabled"}}, "[user]hi[assistant]"),
        ({"output_config": {"effort": "low"}}, "[user]hi[assistant](low)"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, "[user]hi[assistant]<think>\n"),
        ({"thinking": {"type": "between_tools"}}, "[user]hi[assistant]<think>\n"),
        ({"context_management": {"edits": []}}, "[user]hi[assistant]"),
        (cleared(keep="all"), shown_thoughts("T", "UV")),
        (cleared(keep={"type": "all"}), shown_thoughts("T", "UV")),
        (cleared(keep={"type": "thinking_turns", "value": 2}), shown_thoughts("T", "UV")),
        (cleared(keep={"type": "thinking_turns", "value": 1}), shown_thoughts("", "UV")),
        (cleared(), shown_thoughts("", "UV")),
        (
            {"messages": [*THOUGHTS[:4], result(IMAGE, {"type": "text", "text": "d"}, PDF), *THOUGHTS[5:]]},
            shown_thoughts("T", "UV").replace("]d", "][image]d[document]"),
        ),
        (
            {"messages": [*THOUGHTS[:4], result({"type": "tool_reference", "tool_name": "weather"})]},
            "[user]a[assistant]Tb[user]c[assistant]U<t1 weather {}>[toolt1][weather][assistant]",
        ),
        (
            {
                "messages": [
                    *THOUGHTS[:1],
                    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, CALLED]},
                    result(),
                ]
            },
            "[user]a[assistant]<t1 weather {}>[toolt1][assistant]",
        ),
        (
            {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
            "[tools]weather[user]hi[assistant]",
        ),
        ({"tools": [TOOL | {"defer_loading": True}]}, "[tools]weather[user]hi[assistant]"),
        (
            {"messages": [*THOUGHTS[:4], result(*[LARGE_IMAGE] * 2), *THOUGHTS[5:]]},
            shown_thoughts("T", "UV").replace("]d", "][image][image]"),
        ),
    ],
)
async def test_the_prompt(codec: RecordingCodec, options: dict[str, Any], prompt: str) -> None:
    request = parse(Endpoint.MESSAGES, **{**BODY, **options})
    await codec.encode(request.prompts, ["prompt"], 10_000_000)
    assert codec.prompt == prompt


async def test_omitted_thinking_is_in_its_signature(tmp_path: Path, codec: RecordingCodec) -> None:
    """The client does not see it, and the model sees it again when the block comes back."""
    async with serving(stops_after("hm, hm</think>Look"), tmp_path) as node:
        body = BODY | {"thinking": {"type": "adaptive", "display": "omitted"}, "max_tokens": 100}
        whole, streamed = await whole_and_streamed(node, PATH, body)
        assert streamed == whole
        thinking, text = whole["content"]
        assert (thinking["thinking"], text["text"]) == ("", "Look")
        for signature, shown in ((thinking["signature"], "hm, hm"), ("EqQBCgYIARgCIkA", ""), (None, "")):
            block = {"type": "thinking", "thinking": "", "signature": signature}
            turns = [*BODY["messages"], {"role": "assistant", "content": [block, CALLED]}, result()]
            assert (await node.post(PATH, **BODY | {"messages": turns})).status_code == 200
            assert codec.prompt == f"[user]hi[assistant]{shown}<t1 weather {{}}>[toolt1][assistant]"


async def test_tools_that_are_left_out_are_named_in_a_header(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path) as node:
        search = {"type": "web_search_20250305", "name": "web_search"}
        for is_streamed in (False, True):
            answer = await node.post(PATH, **BODY, tools=[TOOL, search], stream=is_streamed)
            assert answer.headers["x-hisparse-pd-left-out"] == "tools[1] (web_search_20250305)"
            answer = await node.post(PATH, **BODY, tools=[TOOL], stream=is_streamed)
            assert "x-hisparse-pd-left-out" not in answer.headers


def user(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


def assistant(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(content)}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: a list with 0 entries must be a list with at least one message"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (user(IMAGE), 'messages[0].content[0].type: "image" is not supported: could not process image'),
    (user(PDF), 'messages[0].content[0].type: "document" is not supported: could not process pdf'),
    (user({"type": "audio"}), 'messages[0].content[0].type: "audio" must be "text", "tool_result"'),
    (user({"type": "text", "text": 1}), "messages[0].content[0].text: 1 must be `str`"),
    (
        user({"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}),
        'messages[0].content[0].content[0].type: "image"',
    ),
    (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
    (user(7), "messages[0].content[0]: 7 must be `object`"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content: 7 must be `str | array`"),
    (
        {"messages": [*THOUGHTS[:4], result({"type": "text", "text": "d"}, IMAGE)]},
        'messages[4].content[0].content[1].type: "image" is not supported: could not process image',
    ),
    (assistant({"type": "server_tool_use"}), '"server_tool_use" must be "text", "thinking"'),
    (assistant({"type": "tool_use", "id": "t", "name": "n", "input": []}), "messages[0].content[0].input"),
    (assistant({"type": "tool_use", "id": "t", "name": "n", "input": {}}), "must not end with a tool_use"),
    ({"system": [IMAGE]}, "system[0].type"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        'tools[0].type: "web_search_20250305" is not supported: no server runs it here',
    ),
    ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}, 'tools[1].type: "bash_20250124"'),
    ({"tools": [{"name": "n"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "all"}}, 'tool_choice.type: "all"'),
    ({"thinking": {"type": "always"}}, 'thinking.type: "always"'),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: 0"),
    ({"thinking": {"type": "adaptive", "display": "hidden"}}, "thinking.display"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        'context_management.edits[0].type: "clear_tool_uses_20250919" must be "clear_thinking_20251015"',
    ),
    (cleared(keep={"type": "thinking_turns"}), "context_management.edits.keep.value"),
    (cleared(keep="some"), "context_management.edits[0].keep"),
    ({"max_tokens": None}, "max_tokens: null must be `int`"),
    ({"temperature": 1.5}, "temperature: 1.5 must be `float` <= 1"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"n": 2}, "n: 2 is not supported"),
    ({"return_token_ids": True}, "return_token_ids"),
    (
        {
            "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        'tool_choice.name: "web_search" is none of the tools',
    ),
]


@pytest.mark.parametrize(("options", "said"), REFUSED)
def test_what_is_refused_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse(Endpoint.MESSAGES, **options)
    assert refused.value.status == 400
    assert said in refused.value.message


async def test_errors_have_anthropics_shape(tmp_path: Path) -> None:
    def fails(num_before: int) -> Script:
        def script(generate: Generate) -> Any:
            yield from list(say("abcdef")(generate))[:num_before]
            yield RequestFailed(generate.request_id, 502, "the pool burst", "prefill_node_failed")

        return script

    async with serving(fails(0), tmp_path) as node:
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
    async with serving(fails(2), tmp_path) as node:
        events = named_events((await node.post(PATH, **BODY, stream=True)).text)
        name, event = events[-1]
        assert (name, event["type"]) == ("error", "error")
        assert event["error"]["message"] == "the pool burst"
        assert events[0][0] == "message_start"
