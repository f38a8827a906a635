"""In which forms an argument may be written that a schema describes: as bare text, or as JSON.

Markups of calls write strings without quotes and everything else as JSON. So what a schema says of a string
becomes a regular expression of the bare text, and the rest stays a schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from hisparse_pd.api.lark import ANY, literal, searched
from hisparse_pd.api.schema_document import MAX_DEPTH, SchemaDocument, Steps, path_of

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
    """Reads the schemas of the parameters of one tool. ``root``: of all of them.

    Its methods raise NotWritable, and TooManySteps.
    """

    def __init__(self, root: Mapping[str, object], steps: Steps, *, is_lenient: bool) -> None:
        """``is_lenient``: what cannot be enforced for a bare string is left out."""
        self._document = SchemaDocument(root, steps)
        self._is_lenient = is_lenient
        self._forms: dict[int, tuple[object, Forms]] = {}
        """With the schema that they are of."""

    def resolved(self, schema: object) -> object:
        """What a schema refers to that says nothing else."""
        for _ in range(MAX_DEPTH):
            self._document.steps.spend(1)
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if self._document.words(schema) != {"$ref"}:
                return schema
            schema = self._at(schema["$ref"])
        raise NotWritable("refers to itself")

    def forms(self, schema: object, depth: int = 0) -> Forms:
        if depth > MAX_DEPTH:
            raise NotWritable("is nested too deeply")
        schema = self.resolved(schema)
        kept = self._forms.get(id(schema))
        if kept is None:
            kept = self._forms[id(schema)] = schema, self._forms_of(schema, depth)
        return kept[1]

    def _forms_of(self, schema: object, depth: int) -> Forms:
        if schema is False:
            return Forms()
        if schema is True or (isinstance(schema, dict) and not self._document.words(schema)):
            return Forms(strings=[ANY], schemas=[{"type": list(_TYPES)}], is_anything=True)
        if not isinstance(schema, dict):
            raise NotWritable("is no JSON schema")
        words = self._document.words(schema)
        if "const" in schema and words <= {"const", "type"}:
            return _values([schema["const"]], schema)
        if isinstance(enum := schema.get("enum"), list) and words <= {"enum", "type"}:
            self._document.steps.spend(len(enum))
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
        """The schema with all that it refers to."""
        found: dict[str, dict[str, object]] = {}
        open_schemas: list[object] = [schema]
        while open_schemas:
            self._document.steps.spend(1)
            match open_schemas.pop():
                case dict() as held:
                    open_schemas += held.values()
                    if isinstance(reference := held.get("$ref"), str):
                        target = self._at(reference)
                        _, holder, name = path_of(reference)
                        if name not in found.setdefault(holder, {}):
                            found[holder][name] = target
                            open_schemas.append(target)
                case list() as items:
                    open_schemas += items
        return {**schema, **found}

    def _at(self, reference: object) -> object:
        """``#/$defs/name`` or ``#/definitions/name``."""
        if isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/")):
            found = self._document.at(reference)
            if found is not None and reference.count("/") == 2:
                return found
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
        # What several branches refer to is written once, as oneOf has it only where the branches are none.
        distinct = (
            of_branches if combiner == "oneOf" else list({id(forms): forms for forms in of_branches}.values())
        )
        num_parts = sum(len(forms.texts) + len(forms.strings) + len(forms.schemas) for forms in distinct)
        self._document.steps.spend(num_parts)
        schemas = [each for forms in distinct for each in forms.schemas]
        if combiner == "anyOf":
            schemas = list({id(schema): schema for schema in schemas}.values())
        return Forms(
            texts=list(dict.fromkeys(text for forms in distinct for text in forms.texts)),
            strings=list(dict.fromkeys(string for forms in distinct for string in forms.strings)),
            schemas=schemas,
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
