"""The forms in which an argument of a given schema may be written: as bare text, or as JSON.

Markups of calls write strings without quotes and everything else as JSON. A schema's words about strings
therefore become a regular expression of the bare text, and the rest stays a schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeGuard

from hisparse_pd.serving.api.lark import ANY, literal, searched

_STRING_KEYWORDS = {"minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"}
_OTHER_KEYWORDS = {
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    *("contains", "minContains", "maxContains"),
}
"""Keywords about values of one type, other than strings."""
_COMBINERS = ("anyOf", "oneOf", "allOf")
_DEFINITION = re.compile(r"#/(\$defs|definitions)/[^/]*")
_VALUES_A_STEP = 64
ANY_STRING: Mapping[str, object] = {}
ANY_OTHER: Mapping[str, object] = {"type": ["null", "boolean", "integer", "number", "object", "array"]}
"""Schemas of strings and of other values about which nothing is said."""

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
"""Regular expressions of formats of bare strings. Dates go up to the 28th, which every month has."""


class NotWritable(ValueError):
    """A grammar of bare texts cannot enforce the schema. The message says why."""


class InexactNumber(NotWritable):
    """The schema has a number that would be enforced as another one. Lenient readers raise this, too."""


# --- the document and what reading it costs -----------------------------------------------------------

MAX_STEPS: Final = 1 << 17
"""Most steps of one request, half a second. Each parameter and each listed value of a tool takes a few."""
MAX_DEPTH: Final = 32

ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id", "$defs", "definitions", "x-guidance"),
}


class TooManySteps(ValueError):
    """The tools take more steps than a request has. The message is about the field that brings them."""


class Steps:
    """What reading schemas may still cost, in steps of some microseconds. All tools of a request share them.

    The bound is needed because references in a client's schemas can multiply without end.
    """

    def __init__(self, most: int = MAX_STEPS) -> None:
        self._most = self.num_left = most

    def spend(self, num_steps: int) -> None:
        """Spend steps. Raises TooManySteps where none are left, and from then on always."""
        self.num_left -= num_steps
        if self.num_left < 0:
            raise TooManySteps(
                f"the schemas of all tools take more than {self._most} steps to read: use smaller or simpler "
                "ones, or fewer tools"
            )


def path_of(reference: str) -> list[str]:
    """Return the names in a reference, the document's first."""
    return [part.replace("~1", "/").replace("~0", "~") for part in reference.split("/")]


@dataclass
class Forms:
    """The forms of the values that a schema describes."""

    texts: list[str] = field(default_factory=list)
    """Single strings, which are written bare."""
    strings: list[Mapping[str, object]] = field(default_factory=list)
    """Schemas of further strings, which are written bare."""
    schemas: list[Mapping[str, object]] = field(default_factory=list)
    """Schemas of values that are no strings."""
    is_one_of: bool = False
    """Exactly one of ``schemas`` may hold."""
    whole: Mapping[str, object] | None = None
    """The schema itself where its strings cannot be told from the rest; they are written in quotes then."""
    is_anything: bool = False
    """Nothing is said of the value."""

    def structures(self) -> Forms:
        """Return the forms of objects and arrays alone."""
        return Forms(
            schemas=[kept for schema in self.schemas if (kept := _structure(schema)) is not None],
            is_one_of=self.is_one_of,
        )

    @property
    def takes_null(self) -> bool:
        return any(
            "null" in types_of(schema) or None in listed(schema.get("enum")) for schema in self.schemas
        )

    @property
    def schema(self) -> Mapping[str, object] | None:
        """The schema of the values that are written as JSON; None for none."""
        if self.whole is not None or not self.schemas:
            return self.whole
        if len(self.schemas) == 1:
            return self.schemas[0]
        return {"oneOf" if self.is_one_of else "anyOf": self.schemas}


class SchemaReader:
    """Reads the schemas of one tool's parameters. Its methods raise NotWritable and TooManySteps."""

    def __init__(self, root: Mapping[str, object], steps: Steps, *, is_lenient: bool) -> None:
        """``root`` is the schema of all parameters. Where the reader ``is_lenient``, it leaves out what
        cannot be enforced of bare strings, and no form is ``whole``."""
        self._root = root
        self._steps = steps
        self._is_lenient = is_lenient
        self._targets: dict[str, object] = {}
        """Schemas by the reference to them; None for a reference to nothing."""
        self._words: dict[int, tuple[object, frozenset[str]]] = {}
        """Each schema, by its id, with its words."""
        self._forms: dict[int, tuple[object, Forms]] = {}
        """Each schema, by its id, with its forms."""

    def target_of(self, schema: object) -> object:
        """Return the schema that ``schema`` refers to, if it is nothing but a reference, else itself."""
        for _ in range(MAX_DEPTH):
            self._steps.spend(1)
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if self._words_of(schema) != {"$ref"} and not self._is_lenient:
                return schema
            schema = self._at(schema["$ref"], is_definition=not self._is_lenient)
        raise NotWritable("refers to itself")

    def forms_of_parameter(self, name: str) -> list[Forms]:
        """Return the forms of all schemas of one parameter."""
        root = self._root
        found = list(self._said_of(name, root))
        if not found and "additionalProperties" in root:
            found = [root["additionalProperties"]]
        return [self.forms(schema) for schema in found]

    def _said_of(self, name: str, schema: object, depth: int = 0) -> Iterator[object]:
        """Yield the schemas that ``schema``, of an object, has for the property ``name``."""
        schema = self.target_of(schema)
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        for combiner in _COMBINERS:
            for branch in listed(schema.get(combiner)):
                yield from self._said_of(name, branch, depth + 1)

    def forms(self, schema: object, depth: int = 0) -> Forms:
        if depth > MAX_DEPTH:
            raise NotWritable("is nested too deeply")
        schema = self.target_of(schema)
        kept = self._forms.get(id(schema))
        if kept is None:
            kept = self._forms[id(schema)] = schema, self._forms_of(schema, depth)
        return kept[1]

    def _forms_of(self, schema: object, depth: int) -> Forms:
        if schema is False:
            return Forms()
        if schema is True or (isinstance(schema, dict) and not self._words_of(schema)):
            return _anything()
        if not isinstance(schema, dict):
            raise NotWritable("is no JSON schema")
        words = self._words_of(schema)
        if "const" in schema and (words <= {"const", "type"} or self._is_lenient):
            return _values([schema["const"]], schema)
        if isinstance(enum := schema.get("enum"), list) and (words <= {"enum", "type"} or self._is_lenient):
            self._steps.spend(1 + len(enum) // _VALUES_A_STEP)
            return _values(enum, schema)
        for combiner in _COMBINERS:
            branches = listed(schema.get(combiner))
            if branches and (words == {combiner} or self._is_lenient):
                combined = self._combined(schema, combiner, branches, depth)
                if words == {combiner} or ANY_STRING not in combined.strings or not types_of(schema):
                    return combined
        types = types_of(schema)
        known = {"type", "nullable"} | _STRING_KEYWORDS | _OTHER_KEYWORDS
        if not self._is_lenient and (not types or ("string" in types and not words <= known)):
            return Forms(whole=schema)
        if not types:
            return _anything()
        forms = Forms()
        if "string" in types:
            forms.strings.append(schema)
        if others := [name for name in types if name != "string"]:
            rest = {word: value for word, value in schema.items() if word not in _STRING_KEYWORDS}
            forms.schemas.append({**rest, "type": others[0] if len(others) == 1 else others})
        return forms

    def document(self, schema: Mapping[str, object]) -> Mapping[str, object]:
        """Return the schema together with all definitions that it refers to."""
        found: dict[str, dict[str, object]] = {}
        open_schemas: list[object] = [schema]
        while open_schemas:
            self._steps.spend(1)
            match open_schemas.pop():
                case dict() as words:
                    open_schemas += words.values()
                    if isinstance(reference := words.get("$ref"), str):
                        target = self._at(reference, is_definition=True)
                        _, holder, name = path_of(reference)
                        if name not in found.setdefault(holder, {}):
                            found[holder][name] = target
                            open_schemas.append(target)
                case list() as items:
                    open_schemas += items
        return {**schema, **found}

    def _at(self, reference: object, *, is_definition: bool) -> object:
        """Return the schema at ``reference``, anywhere in the document, or in ``$defs`` and ``definitions``
        alone where it ``is_definition``. Raises NotWritable where there is none."""
        if isinstance(reference, str) and (not is_definition or _DEFINITION.fullmatch(reference)):
            found = self._target(reference)
            if found is not None:
                return found
        raise NotWritable(f"has the reference {reference!r}; only #/$defs/… and #/definitions/… are followed")

    def _target(self, reference: str) -> object:
        """Return what the document has at ``reference``; None for nothing, as for other documents."""
        if reference not in self._targets:
            self._steps.spend(1 + len(reference) // 8)
            found: object = self._root if reference.startswith("#") else None
            for name in path_of(reference)[1:]:
                found = found.get(name) if isinstance(found, dict) else None
            self._targets[reference] = found
        return self._targets[reference]

    def _words_of(self, schema: Mapping[str, object]) -> frozenset[str]:
        """Return the keywords of a schema that are about values."""
        kept = self._words.get(id(schema))
        if kept is None:
            self._steps.spend(1 + len(schema) // 8)
            kept = self._words[id(schema)] = schema, frozenset(schema.keys() - ANNOTATIONS)
        return kept[1]

    def _combined(
        self, schema: Mapping[str, object], combiner: str, branches: Sequence[object], depth: int
    ) -> Forms:
        if combiner == "allOf" and len(branches) > 1:
            return self._all_of(branches, depth) if self._is_lenient else Forms(whole=schema)
        of_branches = [self.forms(branch, depth + 1) for branch in branches]
        has_strings = [forms for forms in of_branches if forms.texts or forms.strings]
        is_one_of = combiner == "oneOf"
        overlaps = len(has_strings) > 1 or any(len(forms.schemas) > 1 for forms in of_branches)
        if any(forms.whole is not None for forms in of_branches) or (is_one_of and overlaps):
            if not self._is_lenient:
                return Forms(whole=schema)
            is_one_of = False
        # A schema that several branches refer to is written once, except for oneOf, where the number counts.
        distinct = of_branches if is_one_of else list({id(forms): forms for forms in of_branches}.values())
        num_parts = sum(len(forms.texts) + len(forms.strings) + len(forms.schemas) for forms in distinct)
        self._steps.spend(num_parts)
        schemas = [each for forms in distinct for each in forms.schemas]
        if not is_one_of:
            schemas = list({id(schema): schema for schema in schemas}.values())
        return Forms(
            texts=list(dict.fromkeys(text for forms in distinct for text in forms.texts)),
            strings=[string for forms in distinct for string in forms.strings],
            schemas=schemas,
            is_one_of=is_one_of,
            is_anything=all(forms.is_anything for forms in distinct),
        )

    def _all_of(self, branches: Sequence[object], depth: int) -> Forms:
        """Return the forms of all branches merged; of several values of a word the last one counts."""
        merged: dict[str, object] = {}
        for branch in map(self.target_of, branches):
            if isinstance(branch, dict):
                self._steps.spend(1 + len(branch))
                merged |= branch
        return self.forms(merged, depth + 1)

    def regexes(self, forms: Forms) -> list[str]:
        """Return the regular expressions of the bare strings."""
        return list(dict.fromkeys(map(self._string, forms.strings)))

    def _string(self, schema: Mapping[str, object]) -> str:
        parts: list[str] = []
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        is_bounded = is_integer(high) and is_integer(low) and high >= low
        if not is_integer(low) or low < 0 or not (high is None or is_bounded):
            raise NotWritable("has bounds of lengths that no string can have")
        if low or high is not None:
            parts.append(f"/(?s:.){{{low},{'' if high is None else high}}}/")
        if isinstance(pattern := schema.get("pattern"), str):
            try:
                parts.append(f"({searched(pattern)})")
            except ValueError as error:
                if not self._is_lenient:
                    raise NotWritable(f"has a pattern that {error}") from error
        if isinstance(name := schema.get("format"), str):
            if name in _FORMATS:
                parts.append(f"/{_FORMATS[name]}/")
            elif not self._is_lenient:
                known = ", ".join(_FORMATS)
                raise NotWritable(
                    f"has the format {name!r}; this model's calls can have strings of the formats {known}"
                )
        return " & ".join([ANY, *parts])


def _anything() -> Forms:
    return Forms(strings=[ANY_STRING], schemas=[ANY_OTHER], is_anything=True)


def _values(values: Sequence[object], schema: Mapping[str, object]) -> Forms:
    """Return the forms of listed values; those of strings are left out where ``schema`` has another type."""
    typed = {"type": schema["type"]} if "type" in schema else {}
    takes_strings = not typed or "string" in types_of(schema)
    texts = [value for value in values if isinstance(value, str)] if takes_strings else []
    others = [value for value in values if not isinstance(value, str)]
    is_mixed = others and typed.get("type") not in ("string", ["string"])
    return Forms(texts=texts, schemas=[{"enum": others, **typed}] if is_mixed else [])


def _structure(schema: Mapping[str, object]) -> Mapping[str, object] | None:
    if "enum" in schema:
        kept = [value for value in listed(schema["enum"]) if isinstance(value, dict | list)]
        return {**schema, "enum": kept} if kept else None
    types = [name for name in types_of(schema) if name in ("object", "array")]
    return {**schema, "type": types} if types else None


def types_of(schema: Mapping[str, object]) -> list[object]:
    """Return the types that the schema names, or that its other words imply."""
    names = schema.get("type")
    found: list[object] = [names] if isinstance(names, str) else listed(names)
    if "type" not in schema and ("properties" in schema or "items" in schema):
        found = ["object" if "properties" in schema else "array"]
    return [*found, "null"] if found and schema.get("nullable") is True else found


def listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def texts_of(texts: Sequence[str], strings: Sequence[str]) -> str:
    """Return the regular expression of ``texts`` and of the regular expressions ``strings``; "" for none."""
    written = [*(literal(text) or '""' for text in texts), *(f"({string})" for string in strings)]
    return f"({' | '.join(written)})" if written else ""


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is a JSON integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)
