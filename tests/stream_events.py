"""Streams of all APIs as what they say, whatever the pieces: what two streams must have in common."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

Json = dict[str, Any]

_NAMES = {"id", "item_id", "call_id"}
"""Drawn for each answer; what counts is where the same one comes again."""
_VOLATILE = {
    "created",
    "created_at",
    "completed_at",
    "e2e_latency",
    "hisparse",
    "cached_tokens",
    "held_tokens",
}
_VOLATILE |= {"cache_read_input_tokens", "input_tokens", "completion_tokens_details"}
_VOLATILE |= {"spec_draft_token_num", "spec_accept_token_num"}
"""Of how an answer was served; where the prompt was cached and where not differs between two of them."""


def events_in(text: str) -> list[Json]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def said_in(path: str, text: str) -> Any:
    """What the stream ``text`` of ``path`` says; also checked: one name and time, and numbers in a row."""
    assert ":journal" not in text
    events = [event for event in events_in(text) if event.get("type") != "ping"]  # of a time without tokens
    assert not [event for event in events if event.get("error")], events[-1]
    match path:
        case "/generate":
            return _last_of_each(events)
        case "/v1/completions" | "/v1/chat/completions":
            assert text.endswith("data: [DONE]\n\n")
            assert len({(event["id"], event["created"]) for event in events}) == 1
            return _choices(events)
        case "/v1/responses":
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return _joined(events)


def _last_of_each(events: list[Json]) -> list[Json]:
    """Events of ``/generate`` have all that those before them had."""
    last: dict[int, Json] = {}
    for event in events:
        index = event.get("index", 0)
        if index in last:
            before = last[index]["output_ids"]
            assert event["output_ids"][: len(before)] == before
            assert len(event["output_ids"]) > len(before)
        last[index] = event
    return [_settled(last[index], {}) for index in sorted(last)]


def _choices(events: list[Json]) -> Json:
    said: defaultdict[int, Json] = defaultdict(dict)
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            _merge(said[choice["index"]], choice)
    return {"choices": dict(said), "usage": _settled(usage, {})}


def _merge(said: Json, new: Json) -> None:
    """Strings and lists go on, calls by their index; anything else is said once."""
    for name, value in new.items():
        if name == "id" and value is not None:
            assert "id" not in said, "one call has one name, said once"
            said["id"] = ""
        elif name == "tool_calls":
            calls = said.setdefault("tool_calls", {})
            for call in value:
                _merge(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, dict):
            _merge(said.setdefault(name, {}) or said[name], value)
        elif isinstance(value, str | list):
            kind = type(value)
            said[name] = (said.get(name) or kind()) + value
        elif value is not None:
            said[name] = value


def _joined(events: list[Json]) -> list[Json]:
    """Events of blocks, deltas of one block in a row as one."""
    names: dict[str, int] = {}
    said: list[Json] = []
    for event in events:
        event = _settled({key: value for key, value in event.items() if key != "sequence_number"}, names)
        before = said[-1] if said else {}
        if event["type"].endswith("delta") and before.get("type") == event["type"] != "message_delta":
            old, new = before["delta"], event["delta"]
            if isinstance(old, str):
                before["delta"] = old + new
                continue
            (field,) = new.keys() - {"type"}
            if old["type"] == new["type"]:
                old[field] += new[field]
                continue
        said.append(event)
    return said


def _settled(value: Any, names: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {
            key: names.setdefault(of_key, len(names)) if key in _NAMES else _settled(of_key, names)
            for key, of_key in value.items()
            if key not in _VOLATILE
        }
    return [_settled(entry, names) for entry in value] if isinstance(value, list) else value
