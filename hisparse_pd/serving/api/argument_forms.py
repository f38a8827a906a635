"""In which forms an argument may be written that a schema describes: as bare text, or as JSON.

Markups of calls write strings without quotes and everything else as JSON. So what a schema says of a string
becomes a regular expression of the bare text, and the rest stays a schema.
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
"""Of one type each, and none of them of strings."""
_COMBINERS = ("anyOf", "oneOf", "allOf")
_DEFINITION = re.compile(r"#/(\$defs|definitions)/[^/]*")
_VALUES_A_STEP = 64
ANY_STRING: Mapping[str, object] = {}
ANY_OTHER: Mapping[str, object] = {"type": ["null", "boolean", "integer", "number", "object", "array"]}
"""Where nothing is said."""

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


class InexactNumber(NotWritable):
    """The schema has a number that would be enforced as another one: an error for lenient readers, too."""


# --- the document and what reading it costs -----------------------------------------------------------

MAX_STEPS: Final = 1 << 17
"""Of one request: half a second. A tool takes a few for each of its parameters and listed values."""
MAX_DEPTH: Final = 32

ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id", "$defs", "definitions", "x-guidance"),
}


class TooManySteps(ValueError):
    """The tools take more steps than a request has. The message is about the field that asks for them."""


class Steps:
    """What reading schemas may still cost, in steps of some microseconds: all tools of a request share them.

    References in a client's schemas can multiply without end.
    """

    def __init__(self, most: int = MAX_STEPS) -> None:
        self._most = self.num_left = most

    def spend(self, num_steps: int) -> None:
        """Raises TooManySteps, from then on always."""
        self.num_left -= num_steps
        if self.num_left < 0:
            raise TooManySteps(
                f"the schemas of all tools take more than {self._most} steps to read: use smaller or simpler "
                "ones, or fewer tools"
            )


def path_of(reference: str) -> list[str]:
    """The names in it, the document's first."""
    return [part.replace("~1", "/").replace("~0", "~") for part in reference.split("/")]


@dataclass
class Forms:
    """``texts``: values that are strings, to be written bare. ``strings``: schemas of more such.

    ``schemas``: of values that are no strings. ``is_one_of``: exactly one of them may hold.
    ``whole``: the schema itself, where its parts cannot be told apart: its strings are written in quotes.
    ``is_anything``: nothing is said of the value.
    """

    texts: list[str] = field(default_factory=list)
    strings: list[Mapping[str, object]] = field(default_factory=list)
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
        return any(
            "null" in types_of(schema) or None in listed(schema.get("enum")) for schema in self.schemas
        )

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
        """``is_lenient``: what bare strings cannot be held to is left out, and no form is ``whole``."""
        self._root = root
        self._steps = steps
        self._is_lenient = is_lenient
        self._targets: dict[str, object] = {}
        """By the reference to them."""
        self._words: dict[int, tuple[object, frozenset[str]]] = {}
        """With the schema that they are of."""
        self._forms: dict[int, tuple[object, Forms]] = {}
        """With the schema that they are of."""

    def target_of(self, schema: object) -> object:
        """What a schema refers to that says nothing else."""
        for _ in range(MAX_DEPTH):
            self._steps.spend(1)
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if self._words_of(schema) != {"$ref"} and not self._is_lenient:
                return schema
            schema = self._at(schema["$ref"], is_definition=not self._is_lenient)
        raise NotWritable("refers to itself")

    def forms_of_parameter(self, name: str) -> list[Forms]:
        """Of all schemas that are said of one parameter."""
        root = self._root
        found = list(self._said_of(name, root))
        if not found and "additionalProperties" in root:
            found = [root["additionalProperties"]]
        return [self.forms(schema) for schema in found]

    def _said_of(self, name: str, schema: object, depth: int = 0) -> Iterator[object]:
        """``schema``: of an object."""
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
        """The schema with all that it refers to."""
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
        """``is_definition``: ``#/$defs/name`` or ``#/definitions/name``, else whatever is in the document."""
        if isinstance(reference, str) and (not is_definition or _DEFINITION.fullmatch(reference)):
            found = self._target(reference)
            if found is not None:
                return found
        raise NotWritable(f"has the reference {reference!r}; only #/$defs/… and #/definitions/… are followed")

    def _target(self, reference: str) -> object:
        """``#/$defs/name``; None where nothing is, as for other schemas than this one."""
        if reference not in self._targets:
            self._steps.spend(1 + len(reference) // 8)
            found: object = self._root if reference.startswith("#") else None
            for name in path_of(reference)[1:]:
                found = found.get(name) if isinstance(found, dict) else None
            self._targets[reference] = found
        return self._targets[reference]

    def _words_of(self, schema: Mapping[str, object]) -> frozenset[str]:
        """What a schema says of values."""
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
        # What several branches refer to is written once, as oneOf has it only where the branches are none.
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
        """Of what all branches say, of each word the last."""
        merged: dict[str, object] = {}
        for branch in map(self.target_of, branches):
            if isinstance(branch, dict):
                self._steps.spend(1 + len(branch))
                merged |= branch
        return self.forms(merged, depth + 1)

    def regexes(self, forms: Forms) -> list[str]:
        """Of the bare strings."""
        return list(dict.fromkeys(map(self._string, forms.strings)))

    def _string(self, schema: Mapping[str, object]) -> str:
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
                if not self._is_lenient:
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


def _anything() -> Forms:
    return Forms(strings=[ANY_STRING], schemas=[ANY_OTHER], is_anything=True)


def _values(values: Sequence[object], schema: Mapping[str, object]) -> Forms:
    """``schema``: may have a type besides."""
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
    """The names that it gives, or that follow from its other words."""
    names = schema.get("type")
    found: list[object] = [names] if isinstance(names, str) else listed(names)
    if "type" not in schema and ("properties" in schema or "items" in schema):
        found = ["object" if "properties" in schema else "array"]
    return [*found, "null"] if found and schema.get("nullable") is True else found


def listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def texts_of(texts: Sequence[str], strings: Sequence[str]) -> str:
    """The regular expression of bare forms; "" for none."""
    written = [*(literal(text) or '""' for text in texts), *(f"({string})" for string in strings)]
    return f"({' | '.join(written)})" if written else ""


def is_integer(value: object) -> TypeGuard[int]:
    """A JSON integer: true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)
