"""What a client has put together at the end of a stream: what the whole answer says, in each API."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pydantic_core

from tests.unit.api.support import Node, decode_events, named_events

Json = dict[str, Any]
_EACH_TIME_ANEW = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "e2e_latency"}

_GROWS = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""What events call the text of an item of responses."""


async def whole_and_streamed(node: Node, path: str, body: Json) -> tuple[Any, Any]:
    """Both answers without what is anew in each; of the whole one what a stream has too."""
    whole = await node.answer(path, **body)
    if path in ("/v1/completions", "/v1/chat/completions"):
        body = {**body, "stream_options": {"include_usage": True}}
    text = (await node.post(path, **body, stream=True)).text
    match path:
        case "/v1/messages":
            streamed: Any = _message(named_events(text))
        case "/v1/responses":
            streamed = _response(named_events(text))
        case "/generate":
            last = {event.pop("index", 0): event for event in decode_events(text)}
            streamed = list(last.values()) if isinstance(whole, list) else last[0]
        case _:
            streamed = _choices(decode_events(text))
            whole = {name: value for name, value in whole.items() if name in streamed}
    return _lasting(whole), _lasting(streamed)


def _lasting(value: Any) -> Any:
    if isinstance(value, list):
        return [_lasting(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _lasting(item) for name, item in value.items() if name not in _EACH_TIME_ANEW}


def _grow(held: Json, piece: Json) -> None:
    """Texts and lists go on, objects by their fields; what else there is comes last."""
    for name, value in piece.items():
        if isinstance(value, dict) and isinstance(held.get(name), dict):
            _grow(held[name], value)
        elif isinstance(value, str | list) and held.get(name) is not None and name != "role":
            held[name] = held[name] + value
        elif value is not None or name not in held:
            held[name] = value


def _choices(chunks: Sequence[Json]) -> Json:
    """Of completions and chats."""
    answer: Json = {"choices": {}}
    for chunk in chunks:
        answer |= {name: chunk[name] for name in ("usage", "prompt_token_ids") if name in chunk}
        for choice in chunk["choices"]:
            held = answer["choices"].setdefault(choice["index"], {"index": choice["index"]})
            if (message := choice.pop("delta", None)) is not None:
                for call in message.pop("tool_calls", ()):
                    calls = held["message"].setdefault("tool_calls", [])
                    if call["index"] == len(calls):
                        assert call["type"] == "function"
                        calls.append(call)
                    else:
                        _grow(calls[call["index"]], {"function": call["function"]})
                choice["message"] = message | ({"refusal": None} if "role" in message else {})
            _grow(held, {name: value for name, value in choice.items() if name != "index"})
    answer["choices"] = [answer["choices"][index] for index in range(len(answer["choices"]))]
    for message in (choice["message"] for choice in answer["choices"] if "message" in choice):
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
    return answer


def _message(events: Sequence[tuple[str, Json]]) -> Json:
    """Of Anthropic's; the arguments of calls are read as its client reads them."""
    assert all(name == event["type"] for name, event in events)
    answer: Json = {}
    open_blocks: list[int] = []
    for name, event in events:
        match name:
            case "message_start":
                answer = event["message"]
                assert (answer["content"], answer["stop_reason"]) == ([], None)
            case "content_block_start":
                assert (event["index"], open_blocks) == (len(answer["content"]), [])
                answer["content"].append(event["content_block"])
                open_blocks.append(event["index"])
            case "content_block_delta":
                assert open_blocks == [event["index"]]
                delta = {name: piece for name, piece in event["delta"].items() if name != "type"}
                _grow(answer["content"][event["index"]], delta)
            case "content_block_stop":
                assert open_blocks.pop() == event["index"]
            case "message_delta":
                answer |= event["delta"] | {"usage": event["usage"]}
            case _:
                assert (name, event) == ("message_stop", events[-1][1])
    for block in answer["content"]:
        if block["type"] == "tool_use":
            written, block["input"] = block.pop("partial_json", "") or "{}", None
            with suppress(ValueError):
                block["input"] = pydantic_core.from_json(written, allow_partial=True)
            if not isinstance(block["input"], dict):
                block["input"] = {"INVALID_JSON": written}
    return answer


def _response(events: Sequence[tuple[str, Json]]) -> Json:
    """Of OpenAI's: each item is opened, grows and is closed; the last event has all as they were closed."""
    assert all(name == event["type"] for name, event in events)
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    for _, event in events[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
    done: list[Json] = []
    kinds: dict[str, None] = {}
    grown = ""
    added: Json = {}
    for name, event in events[2:-1]:
        assert event["output_index"] == len(done)
        kind = name.removeprefix("response.")
        if kind == "output_item.added":
            added, grown, kinds = event["item"], "", {}
            assert added["status"] == "in_progress"
        kinds[kind] = None
        if kind.endswith(".delta"):
            assert (event["item_id"], "logprobs" in event) == (added["id"], kind.startswith("output_text"))
            grown += event["delta"]
        elif kind == "content_part.done":
            assert event["part"]["text"] == grown
        elif kind == "output_item.done":
            item = event["item"]
            assert (item["id"], item["type"], item.keys()) == (added["id"], added["type"], added.keys())
            grows = _GROWS[item["type"]]
            inner = [f"{grows}.delta"] * bool(grown) + [f"{grows}.done"]
            if not item["type"].endswith("_call"):
                inner = ["content_part.added", *inner, "content_part.done"]
            assert list(kinds) == ["output_item.added", *inner, "output_item.done"]
            done.append(item)
        elif kind.endswith(".done"):
            assert event.get("text", event.get("arguments", event.get("input"))) == grown
    last = events[-1][1]["response"]
    assert events[-1][0] == f"response.{last['status']}"
    assert (last["id"], last["output"]) == (events[0][1]["response"]["id"], done)
    return dict(last)
