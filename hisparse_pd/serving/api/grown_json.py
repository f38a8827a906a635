"""Joins the pieces of JSON that the events of a stream carry into the JSON of a whole answer.

``openai_answers.py`` and ``generate_answers.py`` keep a ``GrownObject`` for each sample of a whole answer.
The pieces ``{"text": "a", "ids": [1], "end": null}`` and ``{"text": "b", "ids": [2], "end": "stop"}`` make
``{"text": "ab", "ids": [1, 2], "end": "stop"}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

_TEXTS = ("text", "content", "reasoning_content", "arguments")
"""Strings of choices that grow; other strings come once."""


class GrownObject:
    """An object joined from pieces as clients join them: texts and lists are concatenated, objects joined by
    field, and of anything else the first value that is not null counts. Lists are kept encoded, which takes
    less memory."""

    def __init__(self) -> None:
        self._fields: dict[Any, Any] = {}

    def add(self, piece: Mapping[Any, object]) -> None:
        """Join ``piece`` to what came before."""
        fields = self._fields
        for name, value in piece.items():
            match value:
                case dict():
                    # An object may have been null in earlier pieces; texts and lists never are.
                    fields[name] = fields.get(name) or GrownObject()
                    fields[name].add(value)
                case list() if name == "tool_calls":  # a call's pieces have the same index
                    fields.setdefault(name, GrownObject()).add({call["index"]: call for call in value})
                case list():
                    pieces = fields.setdefault(name, [])
                    if value:
                        pieces.append(msgspec.json.encode(value)[1:-1])
                case str() if name in _TEXTS:
                    fields.setdefault(name, []).append(value)
                case _ if fields.get(name) is None:
                    fields[name] = value

    def show(self) -> dict[str, Any]:
        """Return the joined object, with ``tool_calls`` as an object by index.

        Pieces are replaced by what they were joined to, so that they do not take memory beside it.
        """
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
