"""What a tool's JSON schema says of an argument that comes as bare text: is it a string, or JSON?

No validation: of a schema its ``argument_forms`` count. What it does not say, or in more steps than
``_MAX_STEPS``, is not known. So what a text is depends on the schema and the text alone.
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
"""For one parameter, once: some milliseconds, in which the front does nothing else."""


@dataclass(frozen=True)
class _Values:
    """What a parameter may be: any string or one of ``texts``, and what ``schemas`` say.

    Nothing is known where it may be nothing.
    """

    any_string: bool = False
    texts: frozenset[str] = frozenset()
    schemas: tuple[Mapping[str, object], ...] = ()

    @classmethod
    def of(cls, found: Sequence[Forms]) -> _Values:
        """``found``: all that is said of the parameter."""
        return cls(
            any(schema is not ANY_STRING for forms in found for schema in forms.strings),
            frozenset(text for forms in found for text in forms.texts),
            tuple(schema for forms in found for schema in forms.schemas if schema is not ANY_OTHER),
        )

    def take(self, value: object) -> bool:
        """``value``: an object, an array or null."""
        name = "null" if value is None else "object" if isinstance(value, dict) else "array"
        return any(
            value in listed(schema["enum"]) if "enum" in schema else name in types_of(schema)
            for schema in self.schemas
        )

    @property
    def json_beginnings(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of texts that ``to_json`` may take for JSON: the characters, and the words that they begin with."""
        if not self.any_string:
            return tuple('{["-0123456789'), ("null", "true", "false")
        return (tuple("{["), ("null",)) if self.schemas else ((), ())


class ToolSchemas:
    """The parameters of the tools of one request."""

    def __init__(self, tools: Sequence[Mapping[str, object]], steps: Steps | None = None) -> None:
        """``steps``: what questions are paid from; None: each is short, and an answer asks few of them."""
        self._steps = steps
        self._parameters: dict[str, Mapping[str, object]] = {}
        self._values: dict[tuple[str, str], _Values] = {}
        """By tool and parameter, of those that were asked for."""
        for tool in tools:
            match tool:
                case {"function": {"name": str(name), "parameters": dict(parameters)}}:
                    self._parameters[name] = parameters

    def to_json(self, tool: str, parameter: str, text: str) -> str:
        """The argument ``text`` as JSON text.

        A string where the schema allows one; but a whole object or array, or ``null``, is itself where the
        schema allows that too. Where no string is allowed, or nothing is known, what it is as JSON. A text
        that is no JSON is a string in any case.
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
        """Whether an argument that begins with ``head`` may be something else than a string for ``to_json``.

        False is certain, whatever follows. ``head``: without white space before it.
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
