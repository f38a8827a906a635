"""Numbers of schemas, whatever their size and spelling: what a grammar admits is valid with exact numbers."""

from __future__ import annotations

import json
from decimal import Context, Decimal, localcontext
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.serving.api.bodies import ChatBody
from hisparse_pd.serving.api.chat_format import MARKUPS, ToolMarkup
from hisparse_pd.serving.api.chat_message import MessageParser
from hisparse_pd.serving.api.constraints import chat_constraint
from hisparse_pd.serving.api.declared_decoding import decode_body
from hisparse_pd.serving.api.grammars import write_grammar
from hisparse_pd.serving.api.openai_chat import parse_chat_prompt
from hisparse_pd.serving.api.tool_schemas import ToolSchemas
from hisparse_pd.serving.http.http_errors import FieldRefused
from tests.examples import num_examples
from tests.unit.api.grammar_walks import Walk, admits, error_of
from tests.unit.api.joined_parts import joined
from tests.unit.api.markups import MARKS, chat_format, think_of

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MULTIPLES = ("1", "2", "3.0", "0.5", "50e-2", "9007199254740993", "0.30000000000000001")
"""Those that are taken are met by chance: random digits would hardly come to a multiple of 100."""


class Spelled(int):
    """A number of a test's schema, by the text that stands for it."""

    text: str


def spelled(text: str) -> Spelled:
    number = Spelled()
    number.text = text
    return number


def written(value: Any) -> str:
    """The JSON that a client sends."""
    match value:
        case Spelled():
            return value.text
        case dict():
            return "{" + ",".join(f"{json.dumps(name)}:{written(each)}" for name, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def read(text: str) -> Any:
    """JSON with exact numbers; whole ones are integers, as JSON Schema has them."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> int | Decimal:
    number = Decimal(text)
    return int(number) if number == number.to_integral_value() else number


def validate(text: str, schema: str) -> None:
    with localcontext(Context(prec=500)):
        jsonschema.Draft202012Validator(read(schema)).validate(read(text))


near_powers = st.builds(
    lambda power, step, sign: sign * (2**power + step),
    st.sampled_from((31, 32, 52, 53, 54, 60, 63, 64, 65, 200)),
    st.integers(-3, 3),
    st.sampled_from((1, -1)),
)
integers = st.one_of(st.integers(-9, 9), near_powers, st.integers(-(10**40), 10**40)).map(str)
decimals = st.one_of(
    st.builds("{}.{}".format, st.integers(-99, 10**18), st.text("0123456789", min_size=1, max_size=25)),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)
exponents = st.builds(
    "{}{}{}".format,
    st.one_of(st.integers(-99, 99).map(str), st.sampled_from(("1.0", "-2.50", "0.1", "9.75"))),
    st.sampled_from(("e", "E", "e+", "E-", "e-")),
    st.integers(0, 30),
)
numbers = st.one_of(integers, decimals, exponents).map(spelled)
literals = st.recursive(
    st.one_of(numbers, st.sampled_from((None, True, "a", "1", 'q"\\'))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(("a", "b", 'c"')), inner, max_size=2)
    ),
    max_leaves=5,
)
bounded = st.builds(
    lambda kind, bounds, multiples: {"type": kind, **bounds, **multiples},
    st.sampled_from(("integer", "number")),
    st.dictionaries(st.sampled_from(BOUNDS), numbers, max_size=2),
    st.dictionaries(st.just("multipleOf"), st.sampled_from(MULTIPLES).map(spelled), max_size=1),
)
of_values = st.one_of(
    st.builds(lambda value: {"const": value}, literals),
    st.builds(lambda values: {"enum": values}, st.lists(literals, min_size=1, max_size=4)),
)


def _closed(members: dict[str, Any], are_required: list[bool], others: Any) -> dict[str, Any]:
    required = [name for name, is_required in zip(members, are_required, strict=False) if is_required]
    return {"type": "object", "properties": members, "required": required, "additionalProperties": others}


small = st.sampled_from(({"type": "boolean"}, {"type": "string", "maxLength": 3}, {"type": "null"}))
schemas = st.recursive(
    st.one_of(of_values, of_values, bounded, small),
    lambda inner: st.one_of(
        st.builds(
            _closed,
            st.dictionaries(st.sampled_from(("a", "b", "ä")), inner, max_size=3),
            st.lists(st.booleans(), min_size=3, max_size=3),
            st.one_of(st.just(False), inner),
        ),
        st.builds(
            lambda items, least, more: {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": least + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            lambda prefix, items, least: {
                "type": "array",
                "prefixItems": prefix,
                "items": items,
                "minItems": least,
                "maxItems": 4,
            },
            st.lists(inner, min_size=1, max_size=3),
            st.one_of(st.just(False), inner),
            st.integers(0, 1),
        ),
        st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda target: {"$defs": {"T": target}, "$ref": "#/$defs/T"}, inner),
    ),
    max_leaves=5,
).filter(lambda schema: not _has_inner_definitions(schema))


def _has_inner_definitions(schema: Any, is_root: bool = True) -> bool:
    """References are of the whole document, so only its root has definitions here."""
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    found = isinstance(schema, dict) and "$defs" in schema and not is_root
    return found or any(_has_inner_definitions(part, is_root=False) for part in parts)


def grammar_of(schema: str) -> str:
    """As of a chat whose body this is; "" for a refused one. Raises no other error."""
    described = f'{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}'
    body = decode_body(
        ChatBody,
        f'{{"messages":[{{"role":"user","content":"x"}}],"response_format":{described}}}'.encode(),
    )
    constraint = chat_constraint(body, parse_chat_prompt(body))
    assert constraint is not None
    try:
        return write_grammar(constraint, chat_format(None))
    except FieldRefused:
        return ""


@settings(deadline=None, max_examples=num_examples(30, 300))
@given(schemas, st.integers(0, 99))
def test_what_a_grammar_admits_is_valid(schema: Any, seed: int) -> None:
    text = written(schema)
    grammar = grammar_of(text)
    if not grammar or error_of(grammar):  # such as bounds of which no number is
        return
    validate(Walk(grammar).answer(seed, end_chance=0.9), text)


@settings(deadline=None, max_examples=num_examples(30, 200))
@given(literals, st.sampled_from(("const", "enum", "member", "item")))
def test_a_literal_is_taken_as_it_is_spelled(value: Any, place: str) -> None:
    schema, text = {"const": value}, written(value)
    match place:
        case "enum":
            schema = {"enum": ["other", value]}
        case "member":
            schema, text = _closed({"a": {"const": value}}, [True], False), f'{{"a":{text}}}'
        case "item":
            schema, text = {"type": "array", "items": {"enum": [value]}}, f"[{text},{text}]"
    assert admits(grammar_of(written(schema)), text)


@settings(deadline=None, max_examples=num_examples(20, 100))
@given(of_values, st.booleans(), st.sampled_from(list(ToolMarkup)), st.integers(0, 99))
def test_calls_are_held_to_the_literals_of_their_tools(
    values: Any, is_strict: bool, markup: ToolMarkup, seed: int
) -> None:
    parameters = written(_closed({"value": values}, [True], False))
    function = f'{{"name":"f","strict":{json.dumps(is_strict)},"parameters":{parameters}}}'
    tool = f'{{"type":"function","function":{function}}}'
    body = decode_body(
        ChatBody,
        f'{{"messages":[{{"role":"user","content":"x"}}],"tools":[{tool}],"tool_choice":"required"}}'.encode(),
    )
    prompt = parse_chat_prompt(body)
    constraint = chat_constraint(body, prompt)
    assert constraint is not None
    try:
        grammar = write_grammar(constraint, chat_format(markup), tools=prompt.tools)
    except FieldRefused:  # such as a value that this markup cannot have
        return
    text = Walk(grammar, MARKS[markup]).answer(seed, end_chance=1.0)
    parser = MessageParser(
        in_reasoning=False,
        markup=MARKUPS[markup],
        schemas=ToolSchemas(prompt.tools),
        think=think_of(markup),
    )
    for call in joined(parser.feed(text, FinishReason.STOP)).calls:
        validate(call.arguments, parameters)
