"""What a tool's JSON schema says of an argument that comes as bare text: is it a string, or JSON?

No validation: a schema is followed as far as types, enums and references to itself go. What it does not
say, or says in more than ``_MAX_LOOKS`` schemas or ``MAX_DEPTH`` levels, is not known. So what a text is
depends on the schema and the text alone, not on what was asked before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from hisparse_pd.api.schema_document import MAX_DEPTH, SchemaDocument, Steps
from protocol.decoding import decode_json

_MAX_LOOKS = 1024
"""At schemas, for one question: a millisecond, in which the front does nothing else."""

_NO_BOUND = 1 << 62
"""For what a document finds out once: it takes fewer steps than the body has bytes."""

_COMBINERS = ("anyOf", "oneOf", "allOf")


class _Strings(Enum):
    """Which ones a parameter may be."""

    ALL = auto()
    SOME = auto()
    """Those that are listed, if any."""
    NONE = auto()
    """Or it is not known."""


@dataclass(frozen=True)
class _Values:
    """What a parameter may be. ``structures``: some object or array, or null."""

    strings: _Strings
    structures: bool

    @property
    def json_beginnings(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of texts that ``to_json`` may take for JSON: the characters, and the words that they begin with."""
        if self.strings is not _Strings.ALL:
            return tuple('{["-0123456789'), ("null", "true", "false")
        return (tuple("{["), ("null",)) if self.structures else ((), ())


_ANYTHING = _Values(_Strings.NONE, structures=True)


class ToolSchemas:
    """The parameters of the tools of one request."""

    def __init__(self, tools: Sequence[Mapping[str, object]], steps: Steps | None = None) -> None:
        """``steps``: what questions are paid from; None: each is short, and an answer asks few of them."""
        self._steps = steps
        self._documents: dict[str, SchemaDocument] = {}
        self._values: dict[tuple[str, str], _Values] = {}
        """By tool and parameter, of those that were asked for."""
        for tool in tools:
            match tool:
                case {"function": {"name": str(name), "parameters": dict(parameters)}}:
                    self._documents[name] = SchemaDocument(parameters, steps or Steps(_NO_BOUND))

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
        is_structure = value is None or isinstance(value, dict | list)
        if allowed.strings is _Strings.NONE or (
            allowed.strings is _Strings.SOME and not self._permits(tool, parameter, text)
        ):
            return text.strip()
        if is_structure and allowed.structures and self._permits(tool, parameter, value):
            return text.strip()
        return as_string

    def may_be_json(self, tool: str, parameter: str, head: str) -> bool:
        """Whether an argument that begins with ``head`` may be something else than a string for ``to_json``.

        False is certain, whatever follows. ``head``: without white space before it.
        """
        firsts, words = self._values_of(tool, parameter).json_beginnings
        return head.startswith(firsts) or any(word.startswith(head.rstrip()) for word in words)

    def _values_of(self, tool: str, parameter: str) -> _Values:
        key = (tool, parameter)
        if (values := self._values.get(key)) is None:
            values = _ANYTHING
            if tool in self._documents:
                strings = _Strings.NONE
                if self._permits(tool, parameter, _ANY_STRING):
                    strings = _Strings.ALL
                elif self._permits(tool, parameter, _LISTED_STRING):
                    strings = _Strings.SOME
                takes_both = strings is not _Strings.NONE and self._permits(tool, parameter, _ANY_STRUCTURE)
                values = _Values(strings, bool(takes_both))
            self._values[key] = values
        return values

    def _permits(self, tool: str, parameter: str, value: object) -> bool | None:
        question = _Question(self._documents[tool], value)
        verdict = question.permits(parameter)
        if self._steps is not None:
            self._steps.spend(question.num_looks)
        return verdict


class _AnyString(str):
    """A string that no schema lists: what permits it permits every string."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class _ListedString(str):
    """A string that every schema lists that lists one: what does not permit it permits no string."""

    __slots__ = ()


class _AnyStructure:
    """Equal to whatever a schema lists: what does not permit it permits no object, no array and no null."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


_ANY_STRING, _LISTED_STRING, _ANY_STRUCTURE = _AnyString(), _ListedString(), _AnyStructure()


class _Question:
    """Whether an argument may be ``value``. Each schema is looked at once, by whichever way it is reached."""

    def __init__(self, document: SchemaDocument, value: object) -> None:
        self._document = document
        self._value = value
        self._verdicts: dict[int, bool | None] = {}
        """By schema: all are the document's, and live as long."""
        self.num_looks = 0

    def permits(self, parameter: str) -> bool | None:
        """Whether ``parameter`` may be the value; None: nothing is said."""
        root = self._document.root
        found = list(self._of(root, parameter))
        if not found and "additionalProperties" in root:
            found = [root["additionalProperties"]]
        return _either(self._permits(schema) for schema in found)

    def _of(self, schema: object, parameter: str, depth: int = 0) -> Iterator[object]:
        """All that is said of ``parameter`` in the schema of an object."""
        schema = self._resolved(schema, depth)
        if not isinstance(schema, dict):
            return
        properties = schema.get("properties")
        if isinstance(properties, dict) and parameter in properties:
            yield properties[parameter]
        for combiner in _COMBINERS:
            for branch in _entries(schema, combiner):
                if not self._look():
                    return
                yield from self._of(branch, parameter, depth + 1)

    def _permits(self, schema: object, depth: int = 0) -> bool | None:
        if id(schema) not in self._verdicts:
            self._verdicts[id(schema)] = self._verdict(self._resolved(schema, depth), depth)
        return self._verdicts[id(schema)]

    def _verdict(self, schema: object, depth: int) -> bool | None:
        if not isinstance(schema, dict):
            return False if schema is False else None
        verdicts = [_either(self._is_of_type(name) for name in _types(schema))]
        if "const" in schema:
            const = schema["const"]
            verdicts.append(isinstance(const, str) if self._value is _LISTED_STRING else self._value == const)
        if isinstance(enum := schema.get("enum"), list):
            verdicts.append(self._is_one_of(enum))
        verdicts += (self._either_of(_entries(schema, combiner), depth) for combiner in ("anyOf", "oneOf"))
        verdicts += self._branches(_entries(schema, "allOf"), depth)
        # Behind the steps: they are as many for every value.
        return True if schema.get("nullable") is True and self._is_of_type("null") else _all(verdicts)

    def _either_of(self, branches: list[object], depth: int) -> bool | None:
        return _either(self._branches(branches, depth))

    def _branches(self, branches: list[object], depth: int) -> Iterator[bool | None]:
        """The verdicts of as many as can be looked at; of the others None."""
        for branch in branches:
            if not self._look():
                yield None
                return
            yield self._permits(branch, depth + 1)

    def _is_one_of(self, values: list[object]) -> bool:
        strings, others = self._document.listed(values)
        if self._value is _LISTED_STRING:
            return bool(strings)
        if isinstance(self._value, str):
            return self._value in strings
        return self._value in others

    def _is_of_type(self, name: object) -> bool | None:
        """None for a name that is none of JSON schema's."""
        value = self._value
        match name:
            case "string":
                return isinstance(value, str)
            case "null":
                return value is None or value is _ANY_STRUCTURE
            case "object":
                return isinstance(value, dict | _AnyStructure)
            case "array":
                return isinstance(value, list | _AnyStructure)
            case "boolean" | "integer" | "number":
                return False  # nobody asks for one of these
            case _:
                return None

    def _resolved(self, schema: object, depth: int) -> object:
        """What ``schema`` refers to, or itself; None for what is not known."""
        while depth <= MAX_DEPTH and self._look():
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            reference = schema["$ref"]
            schema = self._document.at(reference) if isinstance(reference, str) else None
        return None

    def _look(self) -> bool:
        self.num_looks += 1
        return self.num_looks <= _MAX_LOOKS


def _types(schema: dict[str, object]) -> list[object]:
    """The names that the schema gives, or that follow from its other words."""
    match schema.get("type"):
        case str(name):
            return [name]
        case [*names]:
            return names
    if "properties" in schema:
        return ["object"]
    return ["array"] if "items" in schema else []


def _entries(schema: dict[str, object], combiner: str) -> list[object]:
    found = schema.get(combiner)
    return found if isinstance(found, list) else []


def _either(verdicts: Iterator[bool | None]) -> bool | None:
    """One of them must hold. None: none does for sure, and one may, or there are none at all."""
    known = list(verdicts)
    if any(known):
        return True
    return None if not known or None in known else False


def _all(verdicts: Sequence[bool | None]) -> bool | None:
    """All of them must hold. None: nobody says anything."""
    if False in verdicts:
        return False
    return True if any(verdicts) else None
