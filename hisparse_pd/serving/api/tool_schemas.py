"""Decides by a tool's JSON schema whether an argument that comes as bare text is a string or JSON.

This is no validation: only the ``argument_forms`` of the schema count. What they do not say, or say in more
than ``_MAX_STEPS``, is not known. The result depends on the schema and the text alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hisparse_pd.protocol.decoding import decode_json
from hisparse_pd.serving.api.argument_forms import (
    ANY_OTHER,
    ANY_STRING,
    Forms,
    NotWritable,
    SchemaReader,
    Steps,
    TooManySteps,
    listed,
    types_of,
)

_MAX_STEPS = 2048
"""Most steps for a parameter, which is read once: some milliseconds, in which the front does nothing else."""


@dataclass(frozen=True)
class _Values:
    """What a parameter may be: any string, one of ``texts``, or a value of one of ``schemas``.

    Without any of these, nothing is known of it.
    """

    any_string: bool = False
    texts: frozenset[str] = frozenset()
    schemas: tuple[Mapping[str, object], ...] = ()

    @classmethod
    def of(cls, found: Sequence[Forms]) -> _Values:
        """Return the values of all forms in ``found``."""
        return cls(
            any(schema is not ANY_STRING for forms in found for schema in forms.strings),
            frozenset(text for forms in found for text in forms.texts),
            tuple(schema for forms in found for schema in forms.schemas if schema is not ANY_OTHER),
        )

    def take(self, value: object) -> bool:
        """Whether a schema takes ``value``, an object, an array or null."""
        name = "null" if value is None else "object" if isinstance(value, dict) else "array"
        return any(
            value in listed(schema["enum"]) if "enum" in schema else name in types_of(schema)
            for schema in self.schemas
        )

    @property
    def json_beginnings(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Characters and words with which a text may begin that ``to_json`` takes for JSON."""
        if not self.any_string:
            return tuple('{["-0123456789'), ("null", "true", "false")
        return (tuple("{["), ("null",)) if self.schemas else ((), ())


class ToolSchemas:
    """The parameters of the tools of one request."""

    def __init__(self, tools: Sequence[Mapping[str, object]], steps: Steps | None = None) -> None:
        """``steps`` pays for the reading of schemas; None where an answer's few parameters are read."""
        self._steps = steps
        self._parameters: dict[str, Mapping[str, object]] = {}
        self._values: dict[tuple[str, str], _Values] = {}
        """Values of the parameters that were asked for, by tool and parameter."""
        for tool in tools:
            match tool:
                case {"function": {"name": str(name), "parameters": dict(parameters)}}:
                    self._parameters[name] = parameters

    def to_json(self, tool: str, parameter: str, text: str) -> str:
        """Return the argument ``text`` as JSON text.

        It becomes a string where the schema allows one, unless it is a whole object or array, or ``null``,
        and the schema allows this, too. Where no string is allowed or nothing is known, it stays as it is. A
        text that is no JSON always becomes a string.
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
        """Whether ``to_json`` may take an argument for something else than a string.

        ``head`` is the argument's beginning behind white space. False holds whatever follows.
        """
        firsts, words = self._values_of(tool, parameter).json_beginnings
        return head.startswith(firsts) or any(word.startswith(head.rstrip()) for word in words)

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
