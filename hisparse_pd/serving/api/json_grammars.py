"""Grammars of the JSON that a schema describes, with numbers spelled as the client wrote them.

``json_value`` is called for an answer's format (``grammars.py``) and for arguments of calls
(``call_grammars.py``). llguidance reads schemas, but keeps numbers as doubles: it would make a model
write 9007199254740992 for ``{"const": 9007199254740993}``. A ``const`` or ``enum`` with such a number is
therefore written here as a rule of its literals, and so are the objects, arrays, alternatives and definitions
that contain it. All other parts are left to llguidance (``%json``). A bound that llguidance would shift is
refused (``SchemaNumbers``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from hisparse_pd.serving.api.argument_forms import SchemaReader
from hisparse_pd.serving.api.exact_numbers import (
    BOUNDS,
    exact,
    is_number,
    is_spelled_alike,
    spelling,
    spelling_by_llguidance,
    spelling_for_llguidance,
    write_json,
)
from hisparse_pd.serving.api.json_schemas import (
    ANNOTATIONS,
    InexactNumber,
    NotWritable,
    Steps,
    as_list,
    types_of,
)
from hisparse_pd.serving.api.lark import Lark, fault_of_pattern, literal, one_of, sequence
from hisparse_pd.serving.api.schema_numbers import (
    DEFINITIONS,
    KEYWORDS_OF_LISTS,
    KEYWORDS_OF_NAMES,
    KEYWORDS_OF_ONE,
    Schema,
    SchemaNumbers,
    numbers_in,
)

_WHITESPACE: Final = "[ \\n\\r\\t]{1,64}"
"""White space between the parts of a JSON value, bounded because a model may otherwise write it for ever."""

_OBJECT_KEYWORDS = {"properties", "required", "additionalProperties"}
_ARRAY_KEYWORDS = {"items", "prefixItems", "minItems", "maxItems"}
_SCALAR_KEYWORDS = {*BOUNDS, "minLength", "maxLength", "pattern", "format"}
_TYPES = ("null", "boolean", "number", "string", "array", "object")

_ENFORCED = {
    *("const", "enum", "$ref", "anyOf", "oneOf", "allOf", "patternProperties", "additionalItems"),
    *("minProperties", "maxProperties"),
    *_OBJECT_KEYWORDS,
    *_ARRAY_KEYWORDS,
    *_SCALAR_KEYWORDS,
}
"""Keywords that llguidance enforces. Even a lenient grammar must not leave them out: a schema with one that
the rules written here cannot enforce is NotWritable, and ``json_value`` decides what becomes of it."""

_DIALECTS: Final = {
    "",
    *(f"http://json-schema.org/draft-0{number}/schema" for number in (4, 6, 7)),
    *(f"https://json-schema.org/draft/{date}/schema" for date in ("2019-09", "2020-12")),
}
"""Values of ``$schema`` that llguidance knows; they may end with ``#``."""

_MAX_DEPTH: Final = 100
"""Most schemas within each other."""


def json_value(lark: Lark, schema: Schema, steps: Steps, *, is_lenient: bool = False) -> str:
    """Return the expression of the JSON that ``schema`` describes.

    ``is_lenient``: ignore keywords that cannot be enforced, instead of an error. Raises InexactNumber,
    TooManySteps and TooLarge.
    """
    numbers = SchemaNumbers(schema, steps)
    if not numbers.need_spelling:
        return _by_llguidance(schema, is_lenient)
    try:
        return _Writer(lark, schema, numbers, steps, is_lenient=is_lenient).rule_of(schema, "#")
    except NotWritable as error:
        if numbers.exceed_doubles:
            raise InexactNumber(str(error)) from error
        # llguidance spells some numbers in another way than the client, but their values are the same.
        return _by_llguidance(schema, is_lenient)


def _by_llguidance(schema: Schema, is_lenient: bool) -> str:
    """Return the expression that leaves a whole schema to llguidance."""
    options: dict[str, object] = {"whitespace_pattern": _WHITESPACE}
    if is_lenient:
        options["lenient"] = True
    readable = _readable(schema, is_lenient)
    return "%json " + write_json({**readable, "x-guidance": options}, spelling_for_llguidance)


def _readable(schema: Schema, is_lenient: bool) -> Schema:
    """Return the schema without what makes llguidance refuse it all: the name of a dialect that it does not
    know and, if ``is_lenient``, patterns that no grammar can enforce."""

    def part(value: object) -> object:
        return _readable(value, is_lenient) if isinstance(value, dict) else value

    kept: dict[str, object] = {}
    for keyword, value in schema.items():
        if keyword == "$schema" and isinstance(value, str) and value.removesuffix("#") not in _DIALECTS:
            continue
        if is_lenient and keyword == "pattern" and isinstance(value, str) and fault_of_pattern(value):
            continue
        if keyword in (*KEYWORDS_OF_NAMES, *DEFINITIONS) and isinstance(value, dict):
            kept[keyword] = {name: part(each) for name, each in value.items()}
        elif keyword in KEYWORDS_OF_LISTS and isinstance(value, list):
            kept[keyword] = list(map(part, value))
        else:
            kept[keyword] = part(value) if keyword in KEYWORDS_OF_ONE else value
    return kept


class _Writer:
    """Writes the schemas that contain a number to be spelled (``SchemaNumbers.concern``), each as one rule.

    ``rule_of`` writes a schema's rule, and calls itself for the schemas within it. Rules and expansions are
    texts in Lark's notation. A ``place`` is a path in the document, for errors.
    """

    def __init__(
        self, lark: Lark, root: Schema, numbers: SchemaNumbers, steps: Steps, *, is_lenient: bool
    ) -> None:
        self._lark = lark
        self._numbers = numbers
        self._steps = steps
        self._is_lenient = is_lenient
        self._reader = SchemaReader(root, steps, is_lenient=is_lenient)
        self._gap = f"{lark.terminal(f'/{_WHITESPACE}/')}?"
        self._comma = sequence(self._gap, literal(","), self._gap)
        self._depth = 0
        self._rules: dict[int, str] = {}
        """Names of rules by the schema's id; a rule is named before it is written, so that it may recur."""

    def rule_of(self, schema: object, place: str) -> str:
        """Return the rule of ``schema``, which stands at ``place``, or llguidance's expression for a schema
        without such a number. Raises NotWritable, whose message has the place."""
        if not self._numbers.concern(schema):
            return self._by_llguidance_alone(schema)
        assert isinstance(schema, dict)
        if id(schema) not in self._rules:
            self._steps.spend(1 + len(schema))
            if self._depth == _MAX_DEPTH:
                raise NotWritable(f"has more than {_MAX_DEPTH} schemas within each other at {place:.200}")
            self._depth += 1
            self._rules[id(schema)] = name = self._lark.begin_rule()
            self._lark.end_rule(name, self._expansion(schema, place))
            self._depth -= 1
        return self._rules[id(schema)]

    def _by_llguidance_alone(self, schema: object) -> str:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict):
            raise NotWritable("is no JSON schema")
        return _by_llguidance(self._reader.document(schema), self._is_lenient)

    def _expansion(self, schema: Schema, place: str) -> str:
        """Return what the rule of ``schema`` expands to. Its keywords decide which method writes it."""
        keywords = set(schema) - ANNOTATIONS - {"nullable"}
        if "const" in keywords or "enum" in keywords:
            self._check_keywords(keywords, {"const", "enum", "type"}, place)
            return self._values(schema)
        if "$ref" in keywords:
            self._check_keywords(keywords, {"$ref"}, place)
            if (target := self._numbers.target(schema["$ref"])) is None:
                raise NotWritable(
                    f"has the reference {schema['$ref']!r:.80} beside numbers of many digits; it must be the "
                    "path of a schema in this document then, such as #/$defs/…"
                )
            return self.rule_of(target, str(schema["$ref"]))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in keywords:
                return self._alternatives(schema, keywords, keyword, place)
        known = _OBJECT_KEYWORDS | _ARRAY_KEYWORDS | _SCALAR_KEYWORDS | {"type"}
        self._check_keywords(keywords, known, place)
        types = types_of(schema) if "type" in schema else list(_TYPES)
        alternatives = []
        if "object" in types:
            alternatives.append(self._object(schema, place))
        if "array" in types:
            alternatives.append(self._array(schema, place))
        if scalars := [name for name in types if name not in ("object", "array")]:
            bounds = {name: value for name, value in schema.items() if name in _SCALAR_KEYWORDS}
            alternatives.append(_by_llguidance({**bounds, "type": scalars}, self._is_lenient))
        return " | ".join(f"({alternative})" for alternative in alternatives)

    def _check_keywords(self, keywords: set[str], known: set[str], place: str) -> None:
        """Raises NotWritable for a keyword that the rules written here cannot enforce."""
        others = sorted(keywords - known)
        may_be_left_out = self._is_lenient and _ENFORCED.isdisjoint(others)
        if others and not may_be_left_out:
            raise NotWritable(
                f"has {others[0]!r:.80} at {place:.200} beside or around a const or an enum of numbers of "
                "many digits, which cannot be enforced together; leave it out, or use strings for the numbers"
            )

    # --- literals ----------------------------------------------------------------------------------------

    def _values(self, schema: Schema) -> str:
        """Return the expansion of a ``const`` or an ``enum``: all its values as literals."""
        values = as_list(schema.get("enum")) if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:  # a value has to satisfy both
            values = [value for value in values if _value_key(value) == _value_key(schema["const"])]
        types = types_of(schema) if "type" in schema else list(_TYPES)
        values = [value for value in values if _has_type(value, types)]
        if not values:
            raise NotWritable("has a const or an enum of which no value is of its type")
        self._steps.spend(1 + len(values) // 8)
        numbers = [value for value in values if is_number(value)]
        alternatives = [self._number(*numbers)] if numbers else []
        alternatives += [self._value(value) for value in values if not is_number(value)]
        return " | ".join(alternatives)

    def _value(self, value: object) -> str:
        """Return the expression of one literal. A level of nesting takes two of Python's stack frames."""
        self._steps.spend(1)
        if is_number(value):
            return self._number(value)
        if all(map(is_spelled_alike, numbers_in(value))):
            return _by_llguidance({"const": value}, is_lenient=False)
        gap = self._gap
        if isinstance(value, dict):
            members = [
                sequence(_key_literal(name), gap, literal(":"), gap, self._value(each))
                for name, each in value.items()
            ]
            return sequence(literal("{"), gap, f" {self._comma} ".join(members), gap, literal("}"))
        assert isinstance(value, list)
        items = f" {self._comma} ".join([self._value(each) for each in value])
        return sequence(literal("["), gap, items, gap, literal("]"))

    def _number(self, *values: int | float) -> str:
        """Return the terminal of numbers, each as the client spells it and, unless llguidance would change
        its value, as llguidance does."""
        texts = [
            text for value in values for text in (spelling(value), spelling_by_llguidance(value)) if text
        ]
        return self._lark.terminal(one_of(list(dict.fromkeys(texts))))

    # --- schemas that contain literals -------------------------------------------------------------------

    def _alternatives(self, schema: Schema, keywords: set[str], keyword: str, place: str) -> str:
        """Return the expansion of an ``anyOf``, ``oneOf`` or ``allOf``, which ``keyword`` is."""
        branches = as_list(schema[keyword])
        self._check_keywords(keywords, {keyword}, place)
        if keyword == "allOf" and len(branches) != 1:
            self._check_keywords(keywords, set(), place)  # raises: no rule enforces several schemas at once
        # Alternatives are an ``anyOf``, and a ``oneOf`` if no value fits two of them.
        if keyword == "oneOf" and not self._is_lenient:
            for index, branch in enumerate(branches):
                self._steps.spend(index)
                if not all(self._are_disjoint(branch, other) for other in branches[:index]):
                    raise NotWritable(f"has oneOf at {place:.200}, of which two may hold at once; use anyOf")
        alternatives = [
            self.rule_of(branch, f"{place}/{keyword}/{i}")
            for i, branch in enumerate(branches)
            if branch is not False
        ]
        if not alternatives:
            raise NotWritable(f"has {keyword} at {place:.200} without a schema")
        return " | ".join(f"({alternative})" for alternative in alternatives)

    def _are_disjoint(self, one: object, other: object) -> bool:
        """Whether it is certain that no value fits both schemas."""
        one, other = self._reader.target_of(one), self._reader.target_of(other)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        keys, other_keys = _keys_of_values(one), _keys_of_values(other)
        if keys is not None and other_keys is not None:
            return not keys & other_keys
        types, other_types = _disjoint_types(one), _disjoint_types(other)
        if types and other_types and not types & other_types:
            return True
        return any(
            self._member_is_disjoint(one, other, name)
            for name in {*required_names(one)} & {*required_names(other)}
        )

    def _member_is_disjoint(self, one: Schema, other: Schema, name: str) -> bool:
        """Whether the required member ``name`` can have no value that fits both objects' schemas."""
        if types_of(one) != ["object"] or types_of(other) != ["object"]:
            return False
        keys, other_keys = self._keys_of_member(one, name), self._keys_of_member(other, name)
        return keys is not None and other_keys is not None and not keys & other_keys

    def _keys_of_member(self, schema: Schema, name: str) -> set[object] | None:
        properties = schema.get("properties")
        member = properties.get(name) if isinstance(properties, dict) else None
        return _keys_of_values(self._reader.target_of(member))

    def _object(self, schema: Schema, place: str) -> str:
        """Return the expansion of the objects that ``schema`` describes, with members in its order.

        With a member ``a`` that is required, an optional ``b`` and no others, that is
        ``"{" a ("," b)? "}"``, apart from white space.
        """
        properties, required = schema.get("properties", {}), required_names(schema)
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, dict):
            raise NotWritable(f"has properties at {place:.200} that are no object")
        members = {**properties, **{name: others for name in required if name not in properties}}
        extra = self._extra_member(members, others, place)
        # Built from the last member to the first: ``behind`` is what may follow a member, with its comma, and
        # ``begin`` what may follow the opening brace. Members without a schema come last.
        behind = f"({self._comma} {extra})*" if extra else ""
        begin = f"({extra} {behind})?" if extra else ""
        for name in reversed(members):
            if members[name] is False and name not in required:
                continue
            value = self.rule_of(members[name], f"{place}/properties/{name}")
            member = self._lark.rule(sequence(_key_literal(name), self._gap, literal(":"), self._gap, value))
            if name in required:
                begin, behind = sequence(member, behind), sequence(self._comma, member, behind)
            else:
                first = sequence(member, behind)
                begin = f"({first} | {begin})" if begin else f"({first})?"
                behind = sequence(f"({self._comma} {member})?", behind)
            # Both contain the former ``behind``: as texts, not names of rules, they would double each time.
            begin, behind = (self._lark.rule(text) if text else "" for text in (begin, behind))
        return sequence(literal("{"), self._gap, begin, self._gap, literal("}"))

    def _extra_member(self, members: Mapping[str, object], others: object, place: str) -> str:
        """Return the rule of a member without a schema of its own; "" if there may be none. Its name has no
        escapes, since with them it could spell the name of one of ``members``."""
        if others is False:
            return ""
        name = '/"[^"\\\\\\x00-\\x1f\\x7f]*"/'
        if members:
            name += f" & ~{one_of([write_json(taken) for taken in members])}"
        value = self.rule_of(others, f"{place}/additionalProperties")
        return self._lark.rule(sequence(self._lark.terminal(name), self._gap, literal(":"), self._gap, value))

    def _array(self, schema: Schema, place: str) -> str:
        """Return the expansion of the arrays that ``schema`` describes.

        With at least one item, of which the first is ``a``, the second ``b`` and all others ``c``, that is
        ``"[" a ("," b ("," c){0,})? "]"``, apart from white space.
        """
        prefix, items, least, most = _array_form(schema, place)
        firsts = [self.rule_of(each, f"{place}/prefixItems/{i}") for i, each in enumerate(prefix[:most])]
        # Built from the last item to the first, as for objects: ``behind`` is what may follow an item.
        behind = ""
        if most is None or most > len(firsts):
            more = self.rule_of(items, f"{place}/items")
            if not firsts:
                firsts = [more]  # the first item has no comma before it
            low = max(0, least - len(firsts))
            high = "" if most is None else most - len(firsts)
            behind = f"({self._comma} {more}){{{low},{high}}}" if high != 0 else ""
        for index in range(len(firsts) - 1, 0, -1):
            alternative = sequence(self._comma, firsts[index], behind)
            behind = self._lark.rule(alternative if index < least else f"({alternative})?")
        begin = sequence(firsts[0], behind) if firsts else ""
        if begin and not least:  # the array may be empty
            begin = f"({begin})?"
        return sequence(literal("["), self._gap, begin, self._gap, literal("]"))


class _ArrayForm(NamedTuple):
    """A schema's rules for an array."""

    prefix: list[object]
    """Schemas of the first items."""
    items: object
    """The schema of all items behind those."""
    least: int
    most: int | None


def _array_form(schema: Schema, place: str) -> _ArrayForm:
    prefix, items = schema.get("prefixItems", []), schema.get("items", True)
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if not isinstance(prefix, list) or isinstance(items, list) or not is_number(least):
        raise NotWritable(f"has an array at {place:.200} of another form than prefixItems and items")
    least, most = int(least), int(most) if is_number(most) else None
    if items is False:
        most = len(prefix) if most is None else min(most, len(prefix))
    if most is not None and most < least:
        raise NotWritable(f"has an array at {place:.200} of at least {least} and at most {most} items")
    return _ArrayForm(prefix, items, least, most)


def required_names(schema: Schema) -> Sequence[str]:
    """Return the names of the members that an object must have."""
    return [name for name in as_list(schema.get("required")) if isinstance(name, str)]


def _key_literal(name: str) -> str:
    return literal(write_json(name))


def _value_key(value: object) -> object:
    """Return a hashable key that is equal for equal JSON values, however their numbers are spelled."""
    match value:
        case dict():
            return ("object", frozenset((name, _value_key(each)) for name, each in value.items()))
        case list():
            return ("array", tuple(map(_value_key, value)))
        case number if is_number(number):
            return exact(number)
        case _:
            return (type(value), value)


def _keys_of_values(schema: object) -> set[object] | None:
    """Return the ``_value_key`` of each value of a const or an enum; None for another schema."""
    if isinstance(schema, dict) and "const" in schema:
        return {_value_key(schema["const"])}
    if isinstance(schema, dict) and isinstance(values := schema.get("enum"), list):
        return set(map(_value_key, values))
    return None


def _disjoint_types(schema: Schema) -> set[object]:
    """Return the schema's types, with "integer" as "number" so that different types share no value."""
    values = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
    named = [name for value in values for name in _TYPES if _has_type(value, [name])] or types_of(schema)
    return {"number" if name == "integer" else name for name in named}


def _has_type(value: object, types: Sequence[object]) -> bool:
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case str():
            return "string" in types
        case list():
            return "array" in types
        case dict():
            return "object" in types
    assert is_number(value)
    return "number" in types or ("integer" in types and exact(value) == exact(value).to_integral_value())
