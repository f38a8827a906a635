"""Splits the schema of a call's argument into its forms: strings, written as bare text, and the rest, as
JSON.

Markups of calls write strings without quotes and everything else as JSON. A schema's keywords about strings
therefore become a regular expression of the bare text, and the rest stays a schema. The schema
``{"type": ["string", "null"], "maxLength": 3}`` has the forms of bare texts of up to three characters, and of
the JSON ``null``. ``call_grammars.py`` writes the forms into a grammar (strict or lenient),
``tool_schemas.py`` reads calls by them (lenient), and ``json_grammars.py`` follows references with this
module's ``SchemaReader``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hisparse_pd.serving.api.json_schemas import (
    ANNOTATIONS,
    MAX_DEPTH,
    NotWritable,
    Steps,
    as_list,
    is_integer,
    reference_path,
    types_of,
)
from hisparse_pd.serving.api.lark import ANY, literal, search_regex

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
"""Values of an ``enum`` that cost one step of the budget (``Steps``)."""
ANY_STRING: Mapping[str, object] = {}
ANY_OTHER: Mapping[str, object] = {"type": ["null", "boolean", "integer", "number", "object", "array"]}
"""Schemas of any string (among ``Forms.strings``), and of any other value."""

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


@dataclass
class Forms:
    """The values that a schema describes, by the form in which a call writes them."""

    texts: list[str] = field(default_factory=list)
    """Single strings, which are written bare."""
    strings: list[Mapping[str, object]] = field(default_factory=list)
    """Schemas of further strings, which are written bare."""
    schemas: list[Mapping[str, object]] = field(default_factory=list)
    """Schemas of values that are no strings."""
    is_one_of: bool = False
    """Whether exactly one of ``schemas`` may hold, as for ``oneOf``."""
    whole: Mapping[str, object] | None = None
    """The schema itself where its strings cannot be separated from the rest; then strings are in quotes."""
    is_anything: bool = False
    """Whether the schema allows every value."""

    def structures(self) -> Forms:
        """Return only the forms of objects and arrays, for markup in which other values beside strings would
        be read as strings."""
        return Forms(
            schemas=[kept for schema in self.schemas if (kept := _structures_of(schema)) is not None],
            is_one_of=self.is_one_of,
        )

    @property
    def takes_null(self) -> bool:
        """Whether ``null`` is among the values."""
        return any(
            "null" in types_of(schema) or None in as_list(schema.get("enum")) for schema in self.schemas
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
        """``root``: the schema of all parameters. ``is_lenient``: leave out what cannot be enforced of bare
        strings, and make no form ``whole``."""
        self._root = root
        self._steps = steps
        self._is_lenient = is_lenient
        self._targets: dict[str, object] = {}
        """Schemas by the reference to them; None for a reference to nothing."""
        self._keywords_by_id: dict[int, tuple[object, frozenset[str]]] = {}
        """Each schema that was looked at and its keywords, by the schema's id. It keeps the schema alive."""
        self._forms_by_id: dict[int, tuple[object, Forms]] = {}
        """Each schema and its forms, in the same way."""

    def target_of(self, schema: object) -> object:
        """Follow ``schema`` if it is nothing but a reference to a definition. Returns the schema at the end.
        A lenient reader also follows references with keywords beside them, and to anywhere in the
        document."""
        for _ in range(MAX_DEPTH):
            self._steps.spend(1)
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            if self._value_keywords(schema) != {"$ref"} and not self._is_lenient:
                return schema
            schema = self._resolve(schema["$ref"], is_definition=not self._is_lenient)
        raise NotWritable("refers to itself")

    def forms_of_parameter(self, name: str) -> list[Forms]:
        """Return the forms of the parameter ``name``, for each schema that the root and its branches (as of
        ``anyOf``) have for it; if none has one, for the root's ``additionalProperties``."""
        root = self._root
        found = list(self._property_schemas(name, root))
        if not found and "additionalProperties" in root:
            found = [root["additionalProperties"]]
        return [self.forms(schema) for schema in found]

    def _property_schemas(self, name: str, schema: object, depth: int = 0) -> Iterator[object]:
        """Yield the schemas of the property ``name`` in an object's ``schema`` and its branches."""
        schema = self.target_of(schema)
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        for combiner in _COMBINERS:
            for branch in as_list(schema.get(combiner)):
                yield from self._property_schemas(name, branch, depth + 1)

    def forms(self, schema: object, depth: int = 0) -> Forms:
        """Return the forms of a schema. A schema that several others refer to is read once."""
        if depth > MAX_DEPTH:
            raise NotWritable("is nested too deeply")
        schema = self.target_of(schema)
        if (entry := self._forms_by_id.get(id(schema))) is None:
            entry = self._forms_by_id[id(schema)] = schema, self._forms_of(schema, depth)
        return entry[1]

    def _forms_of(self, schema: object, depth: int) -> Forms:
        """Return the forms of a schema that is no reference. Keywords decide, from the most specific on.

        A lenient reader goes by the first keyword that it knows, and passes over those beside it.
        """
        if schema is False:
            return Forms()
        if schema is True or (isinstance(schema, dict) and not self._value_keywords(schema)):
            return _anything()
        if not isinstance(schema, dict):
            raise NotWritable("is no JSON schema")
        keywords = self._value_keywords(schema)
        return (
            self._forms_of_listed(schema, keywords)
            or self._forms_of_combined(schema, keywords, depth)
            or self._forms_of_types(schema, keywords)
        )

    def _forms_of_listed(self, schema: Mapping[str, object], keywords: frozenset[str]) -> Forms | None:
        """Return the forms of a schema that lists its values; None for another one."""
        if "const" in schema and (keywords <= {"const", "type"} or self._is_lenient):
            return _forms_of_values([schema["const"]], schema)
        if isinstance(enum := schema.get("enum"), list) and (
            keywords <= {"enum", "type"} or self._is_lenient
        ):
            self._steps.spend(1 + len(enum) // _VALUES_A_STEP)
            return _forms_of_values(enum, schema)
        return None

    def _forms_of_combined(
        self, schema: Mapping[str, object], keywords: frozenset[str], depth: int
    ) -> Forms | None:
        """Return the forms of a schema that combines others; None for another one."""
        for combiner in _COMBINERS:
            branches = as_list(schema.get(combiner))
            if branches and (keywords == {combiner} or self._is_lenient):
                combined = self._combine(schema, combiner, branches, depth)
                # A lenient reader may have found ``type`` beside the combiner. It says more than branches
                # that allow any string, such as those with nothing but ``required``.
                if keywords == {combiner} or ANY_STRING not in combined.strings or not types_of(schema):
                    return combined
        return None

    def _forms_of_types(self, schema: Mapping[str, object], keywords: frozenset[str]) -> Forms:
        """Return the forms of a schema of types, of which strings are split from the others."""
        types = types_of(schema)
        known = {"type", "nullable"} | _STRING_KEYWORDS | _OTHER_KEYWORDS
        # Without types, or with keywords that are not known, it is not known what is about strings.
        if not self._is_lenient and (not types or ("string" in types and not keywords <= known)):
            return Forms(whole=schema)
        if not types:
            return _anything()
        forms = Forms()
        if "string" in types:
            forms.strings.append(schema)
        if others := [name for name in types if name != "string"]:
            rest = {keyword: value for keyword, value in schema.items() if keyword not in _STRING_KEYWORDS}
            forms.schemas.append({**rest, "type": others[0] if len(others) == 1 else others})
        return forms

    def _combine(
        self, schema: Mapping[str, object], combiner: str, branches: Sequence[object], depth: int
    ) -> Forms:
        """Return the forms of a schema that is an ``anyOf``, ``oneOf`` or ``allOf`` of ``branches``."""
        if combiner == "allOf" and len(branches) > 1:
            return self._merged_forms(branches, depth) if self._is_lenient else Forms(whole=schema)
        all_forms = [self.forms(branch, depth + 1) for branch in branches]
        num_with_strings = sum(bool(forms.texts or forms.strings) for forms in all_forms)
        is_one_of = combiner == "oneOf"
        # One list of strings and one of schemas no longer say which of their values are of the same branch,
        # on which ``oneOf`` depends.
        has_several = num_with_strings > 1 or any(len(forms.schemas) > 1 for forms in all_forms)
        if any(forms.whole is not None for forms in all_forms) or (is_one_of and has_several):
            if not self._is_lenient:
                return Forms(whole=schema)
            is_one_of = False
        # A schema that several branches refer to is written once, except for oneOf, where the number counts.
        distinct = all_forms if is_one_of else list({id(forms): forms for forms in all_forms}.values())
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

    def _merged_forms(self, branches: Sequence[object], depth: int) -> Forms:
        """Return the forms of an ``allOf`` for a lenient reader: of one schema with the keywords of all
        ``branches``, in which a later branch's keyword replaces an earlier one's."""
        merged: dict[str, object] = {}
        for branch in map(self.target_of, branches):
            if isinstance(branch, dict):
                self._steps.spend(1 + len(branch))
                merged |= branch
        return self.forms(merged, depth + 1)

    def regexes(self, forms: Forms) -> list[str]:
        """Return the regular expressions of the schemas in ``forms.strings``."""
        return list(dict.fromkeys(map(self._string_regex, forms.strings)))

    def _string_regex(self, schema: Mapping[str, object]) -> str:
        """Return the regular expression of one schema of strings: its lengths, pattern and format together,
        as in ``ANY & /(?s:.){0,3}/ & (pattern)``."""
        parts: list[str] = []
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        is_bounded = is_integer(high) and is_integer(low) and high >= low
        if not is_integer(low) or low < 0 or not (high is None or is_bounded):
            raise NotWritable("has bounds of lengths that no string can have")
        if low or high is not None:
            parts.append(f"/(?s:.){{{low},{'' if high is None else high}}}/")
        if isinstance(pattern := schema.get("pattern"), str):
            try:
                parts.append(f"({search_regex(pattern)})")
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

    def document(self, schema: Mapping[str, object]) -> Mapping[str, object]:
        """Return the schema as a document of its own, with all definitions that it refers to."""
        found: dict[str, dict[str, object]] = {}
        open_schemas: list[object] = [schema]
        while open_schemas:
            self._steps.spend(1)
            match open_schemas.pop():
                case dict() as keywords:
                    open_schemas += keywords.values()
                    if isinstance(reference := keywords.get("$ref"), str):
                        target = self._resolve(reference, is_definition=True)
                        _, holder, name = reference_path(reference)  # such as "#", "$defs", "Color"
                        if name not in found.setdefault(holder, {}):
                            found[holder][name] = target
                            open_schemas.append(target)
                case list() as items:
                    open_schemas += items
        return {**schema, **found}

    def _resolve(self, reference: object, *, is_definition: bool) -> object:
        """Return the schema at ``reference``. Raises NotWritable where there is none.

        ``is_definition``: look only in ``$defs`` and ``definitions``, not anywhere in the document.
        """
        if isinstance(reference, str) and (not is_definition or _DEFINITION.fullmatch(reference)):
            found = self._look_up(reference)
            if found is not None:
                return found
        raise NotWritable(f"has the reference {reference!r}; only #/$defs/… and #/definitions/… are followed")

    def _look_up(self, reference: str) -> object:
        """Return what the document has at ``reference``; None for nothing or another document."""
        if reference not in self._targets:
            self._steps.spend(1 + len(reference) // 8)
            found: object = self._root if reference.startswith("#") else None
            for name in reference_path(reference)[1:]:
                found = found.get(name) if isinstance(found, dict) else None
            self._targets[reference] = found
        return self._targets[reference]

    def _value_keywords(self, schema: Mapping[str, object]) -> frozenset[str]:
        """Return the keywords of a schema that are about values."""
        if (entry := self._keywords_by_id.get(id(schema))) is None:
            self._steps.spend(1 + len(schema) // 8)
            entry = self._keywords_by_id[id(schema)] = schema, frozenset(schema.keys() - ANNOTATIONS)
        return entry[1]


def _anything() -> Forms:
    return Forms(strings=[ANY_STRING], schemas=[ANY_OTHER], is_anything=True)


def _forms_of_values(values: Sequence[object], schema: Mapping[str, object]) -> Forms:
    """Return the forms of the values of a ``const`` or ``enum``, without those that ``schema``'s type
    excludes."""
    typed = {"type": schema["type"]} if "type" in schema else {}
    takes_strings = not typed or "string" in types_of(schema)
    texts = [value for value in values if isinstance(value, str)] if takes_strings else []
    others = [value for value in values if not isinstance(value, str)]
    takes_others = typed.get("type") not in ("string", ["string"])
    return Forms(texts=texts, schemas=[{"enum": others, **typed}] if others and takes_others else [])


def _structures_of(schema: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the schema of the objects and arrays among a schema's values; None for none."""
    if "enum" in schema:
        kept = [value for value in as_list(schema["enum"]) if isinstance(value, dict | list)]
        return {**schema, "enum": kept} if kept else None
    types = [name for name in types_of(schema) if name in ("object", "array")]
    return {**schema, "type": types} if types else None


def bare_texts(texts: Sequence[str], strings: Sequence[str]) -> str:
    """Return the expression of any one of ``texts``, which are literal, and ``strings``, which are
    expressions; "" where there are none."""
    written = [*(literal(text) or '""' for text in texts), *(f"({string})" for string in strings)]
    return f"({' | '.join(written)})" if written else ""
