"""Decides by a tool's JSON schema whether an argument that a call has as bare text is a string or JSON.

A call writes ``5`` for the string "5" as well as for the number. ``call_reader.py`` asks for each argument of
an answer which one it is. ``call_grammars.py`` asks how the texts would be read that a grammar is to admit,
and leaves out those that would be read wrongly. Arguments are not validated. ``argument_forms.py`` reads a
parameter's schema and sorts the values that it allows into ``Forms``: single strings (``texts``), other
strings (``strings``), and values that are no strings (``schemas``). Nothing else of the schema counts. A
parameter whose forms take more than ``_MAX_STEPS`` to read counts as unknown. The result depends on the
schema and the text alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from hisparse_pd.protocol.decoding import decode_json
from hisparse_pd.serving.api.argument_forms import ANY_OTHER, ANY_STRING, Forms, SchemaReader
from hisparse_pd.serving.api.json_schemas import NotWritable, Steps, TooManySteps, as_list, types_of

_MAX_STEPS = 2048
"""Most parts of a schema that are read for one parameter. Each parameter is read once, in some milliseconds
in which the front does nothing else."""


class _Beginnings(NamedTuple):
    """The beginnings of texts that are read as JSON: first characters, and whole words."""

    chars: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class _Values:
    """Values of a parameter: any string, one of ``texts``, or a value of one of ``schemas``.

    Without any of these, nothing is known about the parameter.
    """

    any_string: bool = False
    texts: frozenset[str] = frozenset()
    schemas: tuple[Mapping[str, object], ...] = ()

    @classmethod
    def of(cls, found: Sequence[Forms]) -> _Values:
        """Return the values of all forms in ``found``. The two forms of a schema that allows every value,
        ANY_STRING and ANY_OTHER, tell nothing about the parameter and are left out."""
        return cls(
            any(schema is not ANY_STRING for forms in found for schema in forms.strings),
            frozenset(text for forms in found for text in forms.texts),
            tuple(schema for forms in found for schema in forms.schemas if schema is not ANY_OTHER),
        )

    def take(self, value: object) -> bool:
        """Whether one of ``schemas`` takes ``value``, which is an object, an array or null."""
        name = "null" if value is None else "object" if isinstance(value, dict) else "array"
        return any(
            value in as_list(schema["enum"]) if "enum" in schema else name in types_of(schema)
            for schema in self.schemas
        )

    @property
    def json_beginnings(self) -> _Beginnings:
        """The beginnings of texts that ``to_json`` may leave as JSON. Where any string is allowed, these are
        objects, arrays and null if other values are allowed, too, and none if not. Elsewhere all JSON is
        left."""
        if not self.any_string:
            return _Beginnings(tuple('{["-0123456789'), ("null", "true", "false"))
        return _Beginnings(tuple("{["), ("null",)) if self.schemas else _Beginnings((), ())


class ToolSchemas:
    """The parameters of the tools of one request."""

    def __init__(self, tools: Sequence[Mapping[str, object]], steps: Steps | None = None) -> None:
        """``steps``: budget for reading schemas; None if only an answer's few parameters are read."""
        self._steps = steps
        self._parameters: dict[str, Mapping[str, object]] = {}
        self._values: dict[tuple[str, str], _Values] = {}
        """Values of the parameters that were looked up, by tool and parameter."""
        for tool in tools:
            match tool:
                case {"function": {"name": str(name), "parameters": dict(parameters)}}:
                    self._parameters[name] = parameters

    def to_json(self, tool: str, parameter: str, text: str) -> str:
        """Return the argument ``text`` as JSON text.

        A text that is no JSON always becomes a string. JSON becomes one where the schema allows the text as a
        string, unless it is an object, an array or ``null``, and the schema allows this, too. All other JSON
        stays as it is, also where nothing is known about the parameter.
        """
        as_string = json.dumps(text, ensure_ascii=False)
        try:
            value = decode_json(text)
        except msgspec.DecodeError:
            return as_string
        allowed = self._values_of(tool, parameter)
        is_string = allowed.any_string or text in allowed.texts
        if is_string and not (isinstance(value, dict | list | None) and allowed.take(value)):
            return as_string
        return text.strip()

    def may_be_json(self, tool: str, parameter: str, head: str) -> bool:
        """Whether an argument that begins with ``head`` may turn out to be JSON that is no string.

        ``head`` begins behind white space. False is final, whatever follows.
        """
        known = self._values_of(tool, parameter).json_beginnings
        return head.startswith(known.chars) or any(word.startswith(head.rstrip()) for word in known.words)

    def _values_of(self, tool: str, parameter: str) -> _Values:
        key = (tool, parameter)
        if key not in self._values:
            steps = Steps(_MAX_STEPS)
            try:
                reader = SchemaReader(self._parameters.get(tool, {}), steps, is_lenient=True)
                self._values[key] = _Values.of(reader.forms_of_parameter(parameter))
            except (NotWritable, TooManySteps):
                self._values[key] = _Values()
            if self._steps is not None:
                self._steps.spend(_MAX_STEPS - max(0, steps.num_left))
        return self._values[key]
