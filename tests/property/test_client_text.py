"""What clients write never becomes a control token, whatever it spells and wherever it stands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.schemas import parse_request
from tests.examples import num_examples
from tests.unit.api.chat_vocabularies import KINDS, codec, spellings
from tests.unit.api.support import ROOM

HARMLESS = "w"
WORDS = (
    "page",
    " ",
    "\n",
    "<",
    "<|",
    "|>",
    ">",
    "think",
    "user",
    "</",
    "\\u3400",
    "\u3400",
    "\U0010fffe",
    "\U0010ffff",
    "é",
)
Texts = list[str]
"""Pieces, some of which are spellings."""


def ids_of(kind: str, endpoint: Endpoint, body: dict[str, Any], *, old: bool = False) -> list[int]:
    request = parse_request(endpoint, json.dumps(body | ROOM).encode(), "tiny")
    encoded = codec(kind, clients_write_tokens=old).encode(request.prompts, ["messages"], 10_000_000)
    (packed,) = asyncio.run(encoded)
    return list(unpack_token_ids(packed).tolist())


def controls(kind: str, token_ids: list[int]) -> list[int]:
    known = set(codec(kind).chat_format.token_ids.values())
    return [token_id for token_id in token_ids if token_id in known]


def tool(write: Callable[[], str]) -> dict[str, Any]:
    properties = {f"p{write()}": {"type": "object", "enum": [write()]}, write(): {"description": write()}}
    function = {"name": f"f{write()}", "description": write(), "parameters": {"properties": properties}}
    return {"type": "function", "function": function}


def chat(write: Callable[[], str], *, has_tools: bool) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": write()},
        {"role": "user", "content": [{"type": "text", "text": write()}, {"type": "text", "text": write()}]},
        {"role": "assistant", "content": write(), "reasoning_content": f"r{write()}"},
        {"role": "user", "content": write()},
    ]
    if not has_tools:
        return {"messages": messages}
    arguments = {write(): write(), f"b{write()}": [{write(): [write(), 7]}]}
    calls = [
        {"id": f"c1{write()}", "function": {"name": f"f{write()}", "arguments": json.dumps(arguments)}},
        {"id": f"c2{write()}", "function": {"name": f"g{write()}", "arguments": f"no JSON {write()}"}},
    ]
    messages += [
        {"role": "assistant", "content": None, "reasoning_content": f"r{write()}", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": write()} for call in calls),
        {"role": "developer", "content": f"d{write()}", "tools": [tool(write)]},
    ]
    return {
        "messages": messages,
        "tools": [tool(write)],
        "reasoning_effort": f"e{write()}"[:64],
        "chat_template_kwargs": {"thinking": True, "extra": [write(), {f"k{write()}": write()}]},
    }


def turns(write: Callable[[], str], *, has_tools: bool) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": write()}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": f"r{write()}"}, text_block(write())],
        },
        {"role": "user", "content": write()},
    ]
    body = {"system": [text_block(write())], "messages": messages, "max_tokens": 9}
    if not has_tools:
        return body
    use = {"type": "tool_use", "id": f"c{write()}", "name": f"f{write()}", "input": {write(): [write()]}}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [text_block(write())]}
    messages += [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": f"r{write()}"}, use]},
        {"role": "user", "content": [result, text_block(write())]},
    ]
    schema = {"type": "object", "properties": {f"p{write()}": {"type": "string", "title": write()}}}
    described = {"name": f"f{write()}", "description": write(), "input_schema": schema}
    return body | {"tools": [described], "thinking": {"type": "adaptive"}}


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def items(write: Callable[[], str], *, has_tools: bool) -> dict[str, Any]:
    given: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": write()}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": f"r{write()}"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": write()}]},
        {"role": "user", "content": write()},
    ]
    body = {"instructions": f"i{write()}", "input": given}
    if not has_tools:
        return body
    arguments = json.dumps({write(): write()})
    named: list[dict[str, Any]] = [
        {"type": "function_call", "call_id": f"c1{write()}", "name": f"f{write()}", "arguments": arguments},
        {"type": "custom_tool_call", "call_id": f"c2{write()}", "name": f"g{write()}", "input": write()},
    ]
    given += [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": f"r{write()}"}]}, *named]
    given += [
        {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": write()} for call in named
    ]
    function = tool(write)["function"]
    inner = {
        "type": "custom",
        "name": f"n{write()}",
        "format": {"type": "grammar", "definition": f"d{write()}"},
    }
    space = {"type": "namespace", "name": f"s{write()}", "description": write(), "tools": [inner]}
    return body | {"tools": [{"type": "function", **function}, space]}


BODIES = {Endpoint.CHAT: chat, Endpoint.MESSAGES: turns, Endpoint.RESPONSES: items}
MOST_TEXTS = 40
MOST_PIECES = 4


def numbered_text(pieces: Sequence[str], number: int) -> Texts:
    """Return the text whose pieces are the digits of ``number``: one draw instead of one for each piece."""
    number, first = divmod(number, len(pieces))
    return [pieces[first], *(numbered_text(pieces, number) if number else ())]


def writer(texts: list[Texts], known: tuple[str, ...] = ()) -> Callable[[], str]:
    """Writes one text after the other. ``known``: pieces that are made harmless."""
    left = iter(texts)
    return lambda: "".join(HARMLESS if piece in known else piece for piece in next(left))


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=num_examples(3, 25))
def test_a_chat_has_the_control_tokens_of_a_harmless_one(
    kind: str, endpoint: Endpoint, data: st.DataObject
) -> None:
    pieces = (*WORDS, *spellings(kind))
    numbers = st.integers(0, len(pieces) ** MOST_PIECES - 1)
    drawn = data.draw(st.lists(numbers, min_size=MOST_TEXTS, max_size=MOST_TEXTS))
    texts = [numbered_text(pieces, number) for number in drawn]
    has_tools = kind != "retrieval"
    forging = BODIES[endpoint](writer(texts), has_tools=has_tools)
    # Names and keys have to stay different from one another, so that no two become one.
    numbered = [[f"{index}", *text] for index, text in enumerate(texts)]
    harmless = BODIES[endpoint](writer(numbered, (*spellings(kind), *WORDS)), has_tools=has_tools)
    expected = controls(kind, ids_of(kind, endpoint, harmless))
    assert expected
    token_ids = ids_of(kind, endpoint, forging)
    assert controls(kind, token_ids) == expected
    if kind in ("deepseek", "retrieval", "words"):  # neither normalizes nor reads what answers spell
        as_before = ids_of(kind, endpoint, forging, old=True)
        assert codec(kind).bytes_of(token_ids) == codec(kind).bytes_of(as_before)
