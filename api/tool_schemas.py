"""What a tool's JSON schema says of an argument that comes as bare text: is it a string, or JSON?

No validation: a schema is followed as far as types, enums and references to itself go. What it does not
say, or says in more than ``_MAX_STEPS`` steps or ``_MAX_DEPTH`` levels, is not known: schemas are the
client's, and references in them can multiply without end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto

import msgspec

from protocol.decoding import decode_json

_MAX_STEPS = 4096
_MAX_DEPTH = 32

_COMBINERS = ("anyOf", "oneOf", "allOf")


class _MayBe(Enum):
    """Which texts ``to_json`` takes for JSON and not for strings."""

    NOTHING = auto()
    STRUCTURES = auto()
    """Objects, arrays and null."""
    JSON = auto()


_BEGINNINGS: Mapping[_MayBe, tuple[tuple[str, ...], tuple[str, ...]]] = {
    _MayBe.NOTHING: ((), ()),
    _MayBe.STRUCTURES: (tuple("{["), ("null",)),
    _MayBe.JSON: (tuple('{["-0123456789'), ("null", "true", "false")),
}
"""The characters and the words that they begin with."""


class ToolSchemas:
    """The parameters of the tools of one request."""

    def __init__(self, tools: Sequence[Mapping[str, object]]) -> None:
        self._parameters: dict[str, dict[str, object]] = {}
        self._may_be: dict[tuple[str, str], _MayBe] = {}
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
        if tool in self._parameters:
            schema = _Schema(self._parameters[tool])
            takes_string = schema.permits(parameter, text)
            is_structure = value is None or isinstance(value, dict | list)
            if takes_string and not (is_structure and schema.permits(parameter, value)):
                return as_string
        return text.strip()

    def may_be_json(self, tool: str, parameter: str, head: str) -> bool:
        """Whether an argument that begins with ``head`` may be something else than a string for ``to_json``.

        False is certain, whatever follows. ``head``: without white space before it.
        """
        key = (tool, parameter)
        if (may_be := self._may_be.get(key)) is None:
            may_be = self._may_be[key] = self._what_it_may_be(tool, parameter)
        firsts, words = _BEGINNINGS[may_be]
        return head.startswith(firsts) or any(word.startswith(head.rstrip()) for word in words)

    def _what_it_may_be(self, tool: str, parameter: str) -> _MayBe:
        if tool not in self._parameters:
            return _MayBe.JSON
        schema = _Schema(self._parameters[tool])
        if not schema.permits(parameter, _ANY_STRING):
            return _MayBe.JSON
        return _MayBe.STRUCTURES if schema.permits(parameter, _ANY_STRUCTURE) else _MayBe.NOTHING


class _AnyString(str):
    """A string that no schema lists: what permits it permits every string."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class _AnyStructure:
    """Equal to whatever a schema lists: what does not permit it permits no object, no array and no null."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


_ANY_STRING, _ANY_STRUCTURE = _AnyString(), _AnyStructure()


class _Schema:
    """The schema of a tool's parameters, for one argument."""

    def __init__(self, root: dict[str, object]) -> None:
        self._root = root
        self._steps_left = _MAX_STEPS

    def permits(self, parameter: str, value: object) -> bool | None:
        """Whether ``parameter`` may be ``value``; None: nothing is said."""
        found = list(self._of(self._root, parameter))
        if not found and "additionalProperties" in self._root:
            found = [self._root["additionalProperties"]]
        return _either(self._permits(schema, value) for schema in found)

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
                yield from self._of(branch, parameter, depth + 1)

    def _permits(self, schema: object, value: object, depth: int = 0) -> bool | None:
        schema = self._resolved(schema, depth)
        if not isinstance(schema, dict):
            return False if schema is False else None
        verdicts = [_either(_is_of_type(value, name) for name in _types(schema))]
        if "const" in schema:
            verdicts.append(value == schema["const"])
        if isinstance(enum := schema.get("enum"), list):
            verdicts.append(value in enum if self._spend(len(enum)) else None)
        verdicts += (
            _either(self._permits(branch, value, depth + 1) for branch in _entries(schema, combiner))
            for combiner in ("anyOf", "oneOf")
        )
        verdicts += (self._permits(branch, value, depth + 1) for branch in _entries(schema, "allOf"))
        # Behind the steps: they are as many for every value.
        return True if schema.get("nullable") is True and _is_of_type(value, "null") else _all(verdicts)

    def _resolved(self, schema: object, depth: int) -> object:
        """What ``schema`` refers to, or itself; None for what is not known."""
        while depth <= _MAX_DEPTH and self._spend(1):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            schema = self._at(schema["$ref"])
        return None

    def _at(self, reference: object) -> object:
        """``#/$defs/name``; other schemas than this one are not looked up."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: object = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _spend(self, num_steps: int) -> bool:
        self._steps_left -= num_steps
        return self._steps_left >= 0


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


def _is_of_type(value: object, name: object) -> bool | None:
    """None for a name that is none of JSON schema's."""
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
