"""The whole answers that clients of all APIs get by their streams, however these are cut into events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pydantic_core

Json = dict[str, Any]

EACH_TIME_ANEW = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "e2e_latency"}
_OF_SERVING = {
    *("hisparse", "cached_tokens", "cached_tokens_details", "held_tokens", "cache_read_input_tokens"),
    *("input_tokens", "completion_tokens_details", "spec_draft_token_num", "spec_accept_token_num"),
}
"""Fields that say how an answer was served; they may differ between two equal answers."""

_GROWS = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""Name that events have for the text of each type of item of a response."""


def events_in(text: str) -> list[Json]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def named_events(text: str) -> list[tuple[str, Json]]:
    """Return the events, with their names, of a stream that has no [DONE]."""
    *events, end = text.split("\n\n")
    assert end == ""
    found = []
    for event in events:
        if not event.startswith(":"):
            name, data = event.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def said_in(path: str, text: str) -> Any:
    """Return what any two streams of ``path`` with the same answer have in common."""
    assert ":journal" not in text
    return without(answer_in(path, text), EACH_TIME_ANEW | _OF_SERVING)


def answer_in(path: str, text: str) -> Any:
    """Return the answer of the stream ``text`` of ``path``; check that its events are in order."""
    failed = [event for event in events_in(text) if event.get("error")]
    assert not failed, failed
    match path:
        case "/v1/messages":
            return _message([(name, event) for name, event in named_events(text) if name != "ping"])
        case "/v1/responses":
            return _response(named_events(text))
    assert text.endswith("data: [DONE]\n\n")
    return _last_of_each(events_in(text)) if path == "/generate" else _choices(events_in(text))


def without(value: Any, names: set[str]) -> Any:
    if isinstance(value, list):
        return [without(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: without(item, names) for name, item in value.items() if name not in names}


def _last_of_each(events: Sequence[Json]) -> list[Json]:
    """The last event of each sample of ``/generate``; each event has all tokens of those before it."""
    last: dict[int, Json] = {}
    for event in events:
        index = event.pop("index", 0)
        before = last[index]["output_ids"] if index in last else []
        assert event["output_ids"][: len(before)] == before
        assert len(event["output_ids"]) > len(before) or event["meta_info"]["finish_reason"]
        last[index] = event
    return [last[index] for index in sorted(last)]


def _grow(held: Json, piece: Json) -> None:
    """Add a piece to ``held``: texts and lists are appended, objects grow by field, the rest is replaced."""
    for name, value in piece.items():
        if isinstance(value, dict) and isinstance(held.get(name), dict):
            _grow(held[name], value)
        elif isinstance(value, str | list) and held.get(name) is not None and name != "role":
            held[name] = held[name] + value
        elif value is not None or name not in held:
            held[name] = value


def _choices(chunks: Sequence[Json]) -> Json:
    """The answer of a stream of completions or chats."""
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    answer: Json = {"choices": {}}
    for chunk in chunks:
        if "usage" in chunk:
            answer["usage"] = chunk["usage"]
        about_prompt = chunk.keys() & {"prompt_token_ids", "prompt_logprobs"}
        _grow(answer, {name: chunk[name] for name in about_prompt})
        for choice in chunk["choices"]:
            held = answer["choices"].setdefault(choice["index"], {"index": choice["index"]})
            if (message := choice.pop("delta", None)) is not None:
                for call in message.pop("tool_calls", ()):
                    calls = held["message"].setdefault("tool_calls", [])
                    if call["index"] == len(calls):
                        assert call["type"] == "function"
                        calls.append(call)
                    else:
                        assert call.keys() == {"index", "function"}, "a call has one name, said once"
                        _grow(calls[call["index"]], {"function": call["function"]})
                choice["message"] = message | ({"refusal": None} if "role" in message else {})
            _grow(held, {name: value for name, value in choice.items() if name != "index"})
    answer["choices"] = [answer["choices"][index] for index in range(len(answer["choices"]))]
    for message in (choice["message"] for choice in answer["choices"] if "message" in choice):
        if "tool_calls" in message and not message["content"]:
            message["content"] = None
    return answer


def _message(events: Sequence[tuple[str, Json]]) -> Json:
    """The answer of a stream of Anthropic's API; arguments of calls are read as its client reads them."""
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
            block["input"] = input_in(block.pop("partial_json", "") or "{}")
    return answer


def input_in(written: str) -> Json:
    """Return the input of a call of Anthropic's API, as far as it is written."""
    with suppress(ValueError):
        found = pydantic_core.from_json(written, allow_partial=True)
        if isinstance(found, dict):
            return found
    return {"INVALID_JSON": written}


def _response(events: Sequence[tuple[str, Json]]) -> Json:
    """The answer of a stream of OpenAI's responses.

    Each item is opened, grows and is closed; the last event has all items as they were closed.
    """
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
