"""JSON objects that grow by pieces, as an answer's events do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

_TEXTS = ("text", "content", "reasoning_content", "arguments")
"""Fields of choices that grow; their other strings come once."""


class GrownObject:
    """What the pieces of an object make together, as clients join them: texts and lists go on, objects by
    their fields, and anything else comes once. Lists are encoded at once, and take less memory so."""

    def __init__(self) -> None:
        self._fields: dict[Any, Any] = {}

    def add(self, piece: Mapping[Any, object]) -> None:
        fields = self._fields
        for name, value in piece.items():
            match value:
                case dict():
                    fields[name] = fields.get(name) or GrownObject()
                    fields[name].add(value)
                case list() if name == "tool_calls":
                    fields.setdefault(name, GrownObject()).add({call["index"]: call for call in value})
                case list():
                    fields.setdefault(name, []).extend(encoded(value))
                case str() if name in _TEXTS:
                    fields.setdefault(name, []).append(value)
                case _ if fields.get(name) is None:
                    fields[name] = value

    def show(self) -> dict[str, Any]:
        """All that was added; calls stand by their index."""
        shown: dict[str, Any] = {}
        for name, value in self._fields.items():
            match value:
                case GrownObject():
                    shown[name] = value.show()
                case [str(), *_]:
                    value[:] = ["".join(value)]
                    (shown[name],) = value
                case list():
                    value[:] = [b",".join(value)] if value else []
                    shown[name] = Raw(b"[%b]" % b"".join(value))
                case _:
                    shown[name] = value
        return shown


def encoded(entries: Sequence[object]) -> list[bytes]:
    """A piece of the JSON of a list, without brackets; none of no entries."""
    return [msgspec.json.encode(entries)[1:-1]] if entries else []


def shown_lists(lists: Mapping[str, Sequence[bytes]]) -> dict[str, Raw]:
    """The lists whose pieces these are."""
    return {name: Raw(b"[%b]" % b",".join(pieces)) for name, pieces in lists.items()}
