"""In which forms an argument may be written that a schema describes: as bare text, or as JSON.

Markups of calls write strings without quotes and everything else as JSON. So what a schema says of a string
becomes a regular expression of the bare text, and the rest stays a schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from api.lark import ANY, literal, searched

_MAX_DEPTH = 32
_MAX_STEPS = 4096
"""Schemas looked at for one tool: references can multiply without end."""

_ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id", "$defs", "definitions", "x-guidance"),
}
_STRING_KEYWORDS = {"minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"}
_OTHER_KEYWORDS = {
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    *("contains", "minContains", "maxContains"),
}
"""Of one type each, and none of them of strings."""
_TYPES = ("null", "boolean", "integer", "number", "object", "array")

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET = "(25[0-5]|(2[0-4]|1[0-9]|[1-9])?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[a-zA-Z0-9_+\-]+(\.[a-zA-Z0-9_+\-]+)*@[a-zA-Z0-9\-]+(\.[a-zA-Z0-9\-]+)+",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
}
"""Of bare strings: dates up to the 28th, so that every month has them."""


class NotWritable(ValueError):
    """The schema says what a grammar of bare texts cannot. The message says what."""


@dataclass
class Forms:
    """``texts``: values that are strings, to be written bare. ``strings``: regular expressions of more such.

    ``schemas``: of values that are no strings. ``is_one_of``: exactly one of them may hold.
    ``whole``: the schema itself, where its parts cannot be told apart: its strings are written in quotes.
    ``is_anything``: nothing is said of the value.
    """

    texts: list[str] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)
    schemas: list[Mapping[str, object]] = field(default_factory=list)
    is_one_of: bool = False
    whole: Mapping[str, object] | None = None
    is_anything: bool = False

    def structures(self) -> Forms:
        """Without the strings, and of the rest only objects and arrays."""
        return Forms(
            schemas=[kept for schema in self.schemas if (kept := _structure(schema)) is not None],
            is_one_of=self.is_one_of,
        )

    @property
    def takes_null(self) -> bool:
        return any("null" in _types(schema) or None in _listed(schema.get("enum")) for schema in self.schemas)

    @property
    def schema(self) -> Mapping[str, object] | None:
        """Of what is written as JSON."""
        if self.whole is not None or not self.schemas:
            return self.whole
        if len(self.schemas) == 1:
            return self.schemas[0]
        return {"oneOf" if self.is_one_of else "anyOf": self.schemas}


class SchemaReader:
    """Reads the schemas of the parameters of one tool. ``root``: of all of them."""

    def __init__(self, root: Mapping[str, object], *, is_lenient: bool) -> None:
        """``is_lenient``: what cannot be enforced for a bare string is left out."""
        self._root = root
        self._is_lenient = is_lenient
        self._steps_left = _MAX_STEPS

    def resolved(self, schema: object) -> object:
        """What a schema refers to that says nothing else. Raises NotWritable."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema or _words(schema) != {"$ref"}:
                return schema
            schema = self._at(schema["$ref"])
        raise NotWritable("refers to itself")

    def forms(self, schema: object, depth: int = 0) -> Forms:
        """Raises NotWritable."""
        self._steps_left -= 1
        if depth > _MAX_DEPTH or self._steps_left < 0:
            raise NotWritable("is nested too deeply, or too large")
        schema = self.resolved(schema)
        if schema is False:
            return Forms()
        if schema is True or (isinstance(schema, dict) and not _words(schema)):
            return Forms(strings=[ANY], schemas=[{"type": list(_TYPES)}], is_anything=True)
        if not isinstance(schema, dict):
            raise NotWritable("is no JSON schema")
        words = _words(schema)
        if "const" in schema and words <= {"const", "type"}:
            return _values([schema["const"]], schema)
        if isinstance(enum := schema.get("enum"), list) and words <= {"enum", "type"}:
            return _values(enum, schema)
        for combiner in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(combiner)
            if words == {combiner} and isinstance(branches, list) and branches:
                return self._combined(schema, combiner, branches, depth)
        types = _types(schema)
        known = {"type"} | _STRING_KEYWORDS | _OTHER_KEYWORDS
        if not types or ("string" in types and not words <= known):
            return Forms(whole=schema)
        forms = Forms()
        if "string" in types:
            forms.strings.append(self._string(schema))
        if others := [name for name in types if name != "string"]:
            rest = {word: value for word, value in schema.items() if word not in _STRING_KEYWORDS}
            forms.schemas.append({**rest, "type": others[0] if len(others) == 1 else others})
        return forms

    def document(self, schema: Mapping[str, object]) -> Mapping[str, object]:
        """The schema with all that it refers to. Raises NotWritable."""
        found: dict[str, dict[str, object]] = {}
        open_schemas: list[object] = [schema]
        while open_schemas:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise NotWritable("is too large")
            match open_schemas.pop():
                case dict() as held:
                    open_schemas += held.values()
                    if isinstance(reference := held.get("$ref"), str):
                        target = self._at(reference)
                        _, holder, name = _unescaped(reference)
                        if name not in found.setdefault(holder, {}):
                            found[holder][name] = target
                            open_schemas.append(target)
                case list() as items:
                    open_schemas += items
        return {**schema, **found}

    def _at(self, reference: object) -> object:
        """``#/$defs/name`` or ``#/definitions/name``."""
        parts = _unescaped(reference) if isinstance(reference, str) else []
        if len(parts) == 3 and parts[0] == "#" and parts[1] in ("$defs", "definitions"):
            holder = self._root.get(parts[1])
            if isinstance(holder, dict) and parts[2] in holder:
                return holder[parts[2]]
        raise NotWritable(f"has the reference {reference!r}; only #/$defs/… and #/definitions/… are followed")

    def _combined(
        self, schema: Mapping[str, object], combiner: str, branches: Sequence[object], depth: int
    ) -> Forms:
        if combiner == "allOf":
            return self.forms(branches[0], depth + 1) if len(branches) == 1 else Forms(whole=schema)
        of_branches = [self.forms(branch, depth + 1) for branch in branches]
        has_strings = [forms for forms in of_branches if forms.texts or forms.strings]
        if any(forms.whole is not None for forms in of_branches) or (
            combiner == "oneOf"
            and (len(has_strings) > 1 or any(len(forms.schemas) > 1 for forms in of_branches))
        ):
            return Forms(whole=schema)
        return Forms(
            texts=[text for forms in of_branches for text in forms.texts],
            strings=[string for forms in of_branches for string in forms.strings],
            schemas=[each for forms in of_branches for each in forms.schemas],
            is_one_of=combiner == "oneOf",
        )

    def _string(self, schema: Mapping[str, object]) -> str:
        """The regular expression of the bare string."""
        parts: list[str] = []
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        is_bounded = is_integer(high) and is_integer(low) and high >= low
        if not is_integer(low) or low < 0 or not (high is None or is_bounded):
            raise NotWritable("has lengths of strings that no string has")
        if low or high is not None:
            parts.append(f"/(?s:.){{{low},{'' if high is None else high}}}/")
        if isinstance(pattern := schema.get("pattern"), str):
            try:
                parts.append(f"({searched(pattern)})")
            except ValueError as error:
                raise NotWritable(f"has a pattern that {error}") from error
        if isinstance(name := schema.get("format"), str):
            if name in _FORMATS:
                parts.append(f"/{_FORMATS[name]}/")
            elif not self._is_lenient:
                known = ", ".join(_FORMATS)
                raise NotWritable(
                    f"has the format {name!r}; of strings that are written bare, there are {known}"
                )
        return " & ".join([ANY, *parts])


def _unescaped(reference: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in reference.split("/")]


def _words(schema: Mapping[str, object]) -> set[str]:
    """What a schema says of values."""
    return {word for word in schema if word not in _ANNOTATIONS}


def _values(values: Sequence[object], schema: Mapping[str, object]) -> Forms:
    """``schema``: may have a type besides."""
    typed = {"type": schema["type"]} if "type" in schema else {}
    takes_strings = not typed or "string" in _types(schema)
    texts = [value for value in values if isinstance(value, str)] if takes_strings else []
    others = [value for value in values if not isinstance(value, str)]
    is_mixed = others and typed.get("type") not in ("string", ["string"])
    return Forms(texts=texts, schemas=[{"enum": others, **typed}] if is_mixed else [])


def _structure(schema: Mapping[str, object]) -> Mapping[str, object] | None:
    """What of it is an object or an array."""
    if "enum" in schema:
        kept = [value for value in _listed(schema["enum"]) if isinstance(value, dict | list)]
        return {**schema, "enum": kept} if kept else None
    types = [name for name in _types(schema) if name in ("object", "array")]
    return {**schema, "type": types} if types else None


def _types(schema: Mapping[str, object]) -> list[object]:
    """The names that it gives."""
    names = schema.get("type")
    return [names] if isinstance(names, str) else _listed(names)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def texts_of(texts: Sequence[str], strings: Sequence[str]) -> str:
    """The regular expression of bare forms; "" for none."""
    written = [*(literal(text) or '""' for text in texts), *(f"({string})" for string in strings)]
    return f"({' | '.join(written)})" if written else ""


def is_integer(value: object) -> TypeGuard[int]:
    """A JSON integer: true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)
