"""Grammars of the JSON that a schema describes, with numbers spelled as the client wrote them.

llguidance reads schemas, but keeps numbers as doubles. A ``const`` or ``enum`` with numbers that a double
does not spell is written here as a rule of its literals, and so are the objects, arrays, alternatives and
definitions that contain it. All other parts are llguidance's. A bound that it would shift is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from hisparse_pd.serving.api.argument_forms import (
    ANNOTATIONS,
    InexactNumber,
    NotWritable,
    SchemaReader,
    Steps,
    listed,
    types_of,
)
from hisparse_pd.serving.api.exact_numbers import (
    BOUNDS,
    exact,
    for_doubles,
    is_number,
    is_plain,
    spelled_by_doubles,
    spelling,
    write_json,
)
from hisparse_pd.serving.api.lark import Lark, literal, one_of, sequence
from hisparse_pd.serving.api.schema_numbers import Schema, SchemaNumbers, numbers_in

_WHITESPACE: Final = "[ \\n\\r\\t]{1,64}"
"""White space between the parts of a JSON value. It is bounded, for a model may write it for ever."""

_OBJECT_WORDS = {"properties", "required", "additionalProperties"}
_ARRAY_WORDS = {"items", "prefixItems", "minItems", "maxItems"}
_SCALAR_WORDS = {*BOUNDS, "minLength", "maxLength", "pattern", "format"}
_TYPES = ("null", "boolean", "number", "string", "array", "object")

_MAX_DEPTH: Final = 100


def json_value(lark: Lark, schema: Schema, steps: Steps, *, is_lenient: bool = False) -> str:
    """Return the rule of the JSON that ``schema`` describes. Where it ``is_lenient``, what cannot be enforced
    is left out, instead of an error.

    Raises InexactNumber, TooManySteps and TooLarge.
    """
    numbers = SchemaNumbers(schema, steps)
    if not numbers.are_spelled:
        return _by_llguidance(schema, is_lenient)
    try:
        return _Writer(lark, schema, numbers, steps, is_lenient=is_lenient).written(schema, "#")
    except NotWritable as error:
        if numbers.are_inexact:
            raise InexactNumber(str(error)) from error
        return _by_llguidance(schema, is_lenient)


def _by_llguidance(schema: Schema, is_lenient: bool) -> str:
    options: dict[str, object] = {"whitespace_pattern": _WHITESPACE}
    if is_lenient:
        options["lenient"] = True
    return "%json " + write_json({**schema, "x-guidance": options}, for_doubles)


class _Writer:
    """Writes the schemas that ``numbers`` concern, each as one rule."""

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
        """Names of rules by the schema's id; a recursive rule is named before it is written."""

    def written(self, schema: object, place: str) -> str:
        """Return the rule of ``schema``. Raises NotWritable."""
        if not self._numbers.concern(schema):
            return self._plain(schema)
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

    def _plain(self, schema: object) -> str:
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict):
            raise NotWritable("is no JSON schema")
        return _by_llguidance(self._reader.document(schema), self._is_lenient)

    def _expansion(self, schema: Schema, place: str) -> str:
        words = set(schema) - ANNOTATIONS - {"nullable"}
        if "const" in words or "enum" in words:
            self._check_words(schema, words, {"const", "enum", "type"}, place)
            return self._values(schema)
        if "$ref" in words:
            self._check_words(schema, words, {"$ref"}, place)
            return self.written(self._numbers.target(schema["$ref"]), str(schema["$ref"]))
        for word in ("anyOf", "oneOf", "allOf"):
            if word in words:
                return self._alternatives(schema, words, word, place)
        known = _OBJECT_WORDS | _ARRAY_WORDS | _SCALAR_WORDS | {"type"}
        self._check_words(schema, words, known, place)
        types = types_of(schema) if "type" in schema else list(_TYPES)
        ways = []
        if "object" in types:
            ways.append(self._object(schema, place))
        if "array" in types:
            ways.append(self._array(schema, place))
        if rest := [name for name in types if name not in ("object", "array")]:
            said = {word: value for word, value in schema.items() if word in _SCALAR_WORDS}
            ways.append(_by_llguidance({**said, "type": rest}, self._is_lenient))
        return " | ".join(f"({way})" for way in ways)

    def _check_words(self, schema: Schema, words: set[str], known: set[str], place: str) -> None:
        """Raises NotWritable for a word that cannot be enforced in a rule written here."""
        others = sorted(words - known)
        if others and not (self._is_lenient and not set(others) & _ENFORCED):
            raise NotWritable(
                f"has {others[0]!r:.80} at {place:.200} beside or around a const or an enum of numbers of "
                "many digits, which cannot be enforced together; leave it out, or use strings for the numbers"
            )

    # --- literals ----------------------------------------------------------------------------------------

    def _values(self, schema: Schema) -> str:
        values = listed(schema.get("enum")) if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            values = [value for value in values if _key(value) == _key(schema["const"])]
        types = types_of(schema) if "type" in schema else list(_TYPES)
        values = [value for value in values if _is_of(value, types)]
        if not values:
            raise NotWritable("has a const or an enum of which no value is of its type")
        self._steps.spend(1 + len(values) // 8)
        numbers = [value for value in values if is_number(value)]
        ways = [self._number(*numbers)] if numbers else []
        ways += [self._value(value) for value in values if not is_number(value)]
        return " | ".join(ways)

    def _value(self, value: object) -> str:
        """Return the rule of one literal. Takes two stack frames a level."""
        self._steps.spend(1)
        if is_number(value):
            return self._number(value)
        if all(map(is_plain, numbers_in(value))):
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
        texts = [text for value in values for text in (spelling(value), spelled_by_doubles(value)) if text]
        return self._lark.terminal(one_of(list(dict.fromkeys(texts))))

    # --- schemas that contain literals -------------------------------------------------------------------

    def _alternatives(self, schema: Schema, words: set[str], word: str, place: str) -> str:
        branches = listed(schema[word])
        self._check_words(schema, words, {word}, place)
        if word == "allOf" and len(branches) != 1:
            self._check_words(schema, words, set(), place)
        if word == "oneOf" and not self._is_lenient:
            for index, branch in enumerate(branches):
                self._steps.spend(index)
                if not all(self._are_apart(branch, other) for other in branches[:index]):
                    raise NotWritable(f"has oneOf at {place:.200}, of which two may hold at once; use anyOf")
        ways = [
            self.written(branch, f"{place}/{word}/{i}")
            for i, branch in enumerate(branches)
            if branch is not False
        ]
        if not ways:
            raise NotWritable(f"has {word} at {place:.200} without a schema")
        return " | ".join(f"({way})" for way in ways)

    def _are_apart(self, one: object, other: object) -> bool:
        """Whether it is certain that no value is of both schemas."""
        one, other = self._reader.target_of(one), self._reader.target_of(other)
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        keys, other_keys = _listed_keys(one), _listed_keys(other)
        if keys is not None and other_keys is not None:
            return not keys & other_keys
        types, other_types = _apart_types(one), _apart_types(other)
        if types and other_types and not types & other_types:
            return True
        return any(
            self._tell_apart(one, other, name) for name in {*listed_names(one)} & {*listed_names(other)}
        )

    def _tell_apart(self, one: Schema, other: Schema, name: str) -> bool:
        """Whether the member ``name``, which both objects need, tells them apart."""
        if types_of(one) != ["object"] or types_of(other) != ["object"]:
            return False
        keys, other_keys = self._keys_of_member(one, name), self._keys_of_member(other, name)
        return keys is not None and other_keys is not None and not keys & other_keys

    def _keys_of_member(self, schema: Schema, name: str) -> set[object] | None:
        properties = schema.get("properties")
        member = properties.get(name) if isinstance(properties, dict) else None
        return _listed_keys(self._reader.target_of(member))

    def _object(self, schema: Schema, place: str) -> str:
        properties, required = schema.get("properties", {}), listed_names(schema)
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, dict):
            raise NotWritable(f"has properties at {place:.200} that are no object")
        members = {**properties, **{name: others for name in required if name not in properties}}
        extra = self._extra(members, others, place)
        # From the last member to the first: ``behind`` follows another member, and ``begin`` follows none.
        behind = f"({self._comma} {extra})*" if extra else ""
        begin = f"({extra} {behind})?" if extra else ""
        for name in reversed(members):
            if members[name] is False and name not in required:
                continue
            value = self.written(members[name], f"{place}/properties/{name}")
            member = self._lark.rule(sequence(_key_literal(name), self._gap, literal(":"), self._gap, value))
            if name in required:
                begin, behind = sequence(member, behind), sequence(self._comma, member, behind)
            else:
                first = sequence(member, behind)
                begin = f"({first} | {begin})" if begin else f"({first})?"
                behind = sequence(f"({self._comma} {member})?", behind)
            begin, behind = (self._lark.rule(way) if way else "" for way in (begin, behind))
        return sequence(literal("{"), self._gap, begin, self._gap, literal("}"))

    def _extra(self, members: Mapping[str, object], others: object, place: str) -> str:
        """Return the rule of a member without a schema of its own. Its name has no escapes, by which it could
        spell that of another one."""
        if others is False:
            return ""
        name = '/"[^"\\\\\\x00-\\x1f\\x7f]*"/'
        if members:
            name += f" & ~{one_of([write_json(taken) for taken in members])}"
        value = self.written(others, f"{place}/additionalProperties")
        return self._lark.rule(sequence(self._lark.terminal(name), self._gap, literal(":"), self._gap, value))

    def _array(self, schema: Schema, place: str) -> str:
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(prefix, list) or isinstance(items, list) or not is_number(least):
            raise NotWritable(f"has an array at {place:.200} of another form than prefixItems and items")
        least, most = int(least), int(most) if is_number(most) else None
        if items is False:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is not None and most < least:
            raise NotWritable(f"has an array at {place:.200} of at least {least} and at most {most} items")
        kinds = [self.written(each, f"{place}/prefixItems/{i}") for i, each in enumerate(prefix[:most])]
        behind = ""
        if most is None or most > len(kinds):
            more = self.written(items, f"{place}/items")
            if not kinds:
                kinds = [more]
            low, high = max(0, least - len(kinds)), "" if most is None else most - len(kinds)
            behind = f"({self._comma} {more}){{{low},{high}}}" if high != 0 else ""
        for index in range(len(kinds) - 1, 0, -1):
            way = sequence(self._comma, kinds[index], behind)
            behind = self._lark.rule(way if index < least else f"({way})?")
        begin = sequence(kinds[0], behind) if kinds else ""
        begin = begin if least or not begin else f"({begin})?"
        return sequence(literal("["), self._gap, begin, self._gap, literal("]"))


_ENFORCED = {
    *("const", "enum", "$ref", "anyOf", "oneOf", "allOf", "patternProperties", "additionalItems"),
    *("minProperties", "maxProperties"),
    *_OBJECT_WORDS,
    *_ARRAY_WORDS,
    *_SCALAR_WORDS,
}
"""Words that llguidance enforces: lenient grammars must not leave them out."""


def listed_names(schema: Schema) -> Sequence[str]:
    """Return the names of the members that an object must have."""
    return [name for name in listed(schema.get("required")) if isinstance(name, str)]


def _key_literal(name: str) -> str:
    return literal(write_json(name))


def _key(value: object) -> object:
    """Return a key that is equal for equal JSON values, however their numbers are spelled."""
    match value:
        case dict():
            return ("object", frozenset((name, _key(each)) for name, each in value.items()))
        case list():
            return ("array", tuple(map(_key, value)))
        case number if is_number(number):
            return exact(number)
        case _:
            return (type(value), value)


def _listed_keys(schema: object) -> set[object] | None:
    """Return the keys of all values of a const or an enum; None for another schema."""
    if isinstance(schema, dict) and "const" in schema:
        return {_key(schema["const"])}
    if isinstance(schema, dict) and isinstance(values := schema.get("enum"), list):
        return set(map(_key, values))
    return None


def _apart_types(schema: Schema) -> set[object]:
    """Return the schema's types as disjoint ones: an integer is a number."""
    values = [schema["const"]] if "const" in schema else listed(schema.get("enum"))
    named = [name for value in values for name in _TYPES if _is_of(value, [name])] or types_of(schema)
    return {"number" if name == "integer" else name for name in named}


def _is_of(value: object, types: Sequence[object]) -> bool:
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
