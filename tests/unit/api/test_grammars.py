"""Grammars admit answers of the format asked for, and calls that our own parser reads back."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.protocol.decoding import MAX_NESTING
from hisparse_pd.serving.api.call_rules import CallRule
from hisparse_pd.serving.api.chat_format import (
    DSML,
    MARKUPS,
    V31,
    ReasoningStart,
    ToolMarkup,
)
from hisparse_pd.serving.api.chat_message import MessageParser
from hisparse_pd.serving.api.constraints import AnswerFormat, Constraint, FormatKind, schema_text
from hisparse_pd.serving.api.grammars import write_grammar
from hisparse_pd.serving.api.json_schemas import MAX_STEPS, Steps
from hisparse_pd.serving.api.tool_schemas import ToolSchemas
from hisparse_pd.serving.http.http_errors import ApiError
from tests.unit.api.grammar_walks import Walk, admits, error_of, matcher, token_ids, tokenizer
from tests.unit.api.joined_parts import Call, joined
from tests.unit.api.markups import MARKS, TOKENS, chat_format, think_of

NAMES = ("get_weather", "get", "set_all", "no_arguments")


def tool(parameters: dict[str, Any] | None, *, name: str = "f", strict: bool = True) -> dict[str, Any]:
    described = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "strict": strict, **described}}


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of an object with these properties alone."""
    shape = {"type": "object", "properties": properties, "required": list(required)}
    return shape | {"additionalProperties": False}


SCHEMA = closed(
    {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "maximum": 9}}, "city", "days"
)
WEATHER = closed(
    {
        "city": {"type": "string"},
        "short": {"type": "string", "minLength": 2, "maxLength": 4},
        "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
        "kind": {"enum": ["null", "1", "day night", 3, None]},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "days": {"type": "integer", "minimum": 1, "maximum": 31},
        "exact": {"type": "boolean"},
    },
    *("city", "kind", "days"),
)
INNER = {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}
PLACE = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/Place"},
        "either": {"type": ["string", "array"], "items": {"type": "integer"}},
        "at": {"type": "string", "format": "date-time"},
        "const": {"const": "a<b"},
    },
    "required": ["place"],
    "$defs": {"Place": closed({"name": {"type": "string"}, "inner": INNER}, "name", "inner")},
}
ANYTHING = {
    "type": "object",
    "properties": {
        "anything": {},
        "number": {"minimum": 5, "type": "number"},
        "listed": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["anything", "number"],
}
TOOLS = [
    tool(WEATHER, name="get_weather"),
    tool(PLACE, name="get"),
    tool(ANYTHING, name="set_all", strict=False),
    tool(None, name="no_arguments", strict=False),
]


def forced(*names: str, at_most_one: bool = False) -> Constraint:
    return Constraint(calls=CallRule("tool_choice", names, is_forced=True, at_most_one=at_most_one))


def free(*names: str, at_most_one: bool = False) -> Constraint:
    return Constraint(calls=CallRule("tools", names, is_forced=False, at_most_one=at_most_one))


def answers(kind: FormatKind, text: str = "", *choices: str) -> Constraint:
    return Constraint(AnswerFormat("response_format", kind, text, choices))


def read(
    text: str, markup: ToolMarkup | None, *, in_reasoning: bool = False, separates: bool = True
) -> tuple[str, str, list[Call]]:
    """Return the reasoning, content and calls that an answer shows."""
    parser = MessageParser(
        in_reasoning=in_reasoning,
        markup=MARKUPS[markup] if markup is not None else None,
        schemas=ToolSchemas(TOOLS),
        separates_reasoning=separates,
        think=think_of(markup),
    )
    found = joined(parser.feed(text, FinishReason.STOP))
    return found.reasoning, found.content, found.calls


def check_calls(calls: list[Call], names: tuple[str, ...]) -> None:
    of_name = {tool["function"]["name"]: tool["function"].get("parameters") for tool in TOOLS}
    for call in calls:
        assert call.name in names
        arguments = json.loads(call.arguments)
        schema = of_name[call.name] or {"type": "object", "maxProperties": 0}
        jsonschema.Draft202012Validator(schema).validate(arguments)


# --- calls -------------------------------------------------------------------------------------------


def walk_of(grammar: str, markup: ToolMarkup, tokens_are_special: bool | None) -> Walk:
    """``tokens_are_special`` is None where marks are spelled."""
    tokens = () if tokens_are_special is None else TOKENS[markup]
    return Walk(grammar, MARKS[markup], tokens, are_special=bool(tokens_are_special))


SPELLED = ("spelled", ReasoningStart.BEGUN)
TOKENIZERS = {"spelled": None, "tokens": False, "special": True}
"""How a tokenizer has the marks of a markup: not at all, as tokens, or as special tokens."""
of_each_tokenizer = pytest.mark.parametrize(
    "are_special",
    [
        pytest.param(are_special, id=name, marks=pytest.mark.slow if name == "tokens" else ())
        for name, are_special in TOKENIZERS.items()
    ],
)
of_each_tokenizer_and_start = pytest.mark.parametrize(
    ("are_special", "start"),
    [
        # In `make test` special tokens meet each start, and spelled marks one.
        pytest.param(
            are_special,
            start,
            id=f"{name}-{start.name}",
            marks=() if are_special or (name, start) == SPELLED else pytest.mark.slow,
        )
        for name, are_special in TOKENIZERS.items()
        for start in ReasoningStart
    ],
)


@of_each_tokenizer_and_start
@pytest.mark.parametrize("markup", ToolMarkup)
def test_forced_calls_are_read_back_and_validate(
    markup: ToolMarkup, are_special: bool | None, start: ReasoningStart
) -> None:
    written = chat_format(markup, has_tokens=are_special is not None)
    walk = walk_of(write_grammar(forced(*NAMES), written, start, TOOLS), markup, are_special)
    for seed in range(2):
        text = walk.answer(seed)
        _, content, calls = read(text, markup, in_reasoning=start is ReasoningStart.BEGUN)
        assert (content, bool(calls)) == ("", True), text
        check_calls(calls, NAMES)


@of_each_tokenizer_and_start
@pytest.mark.parametrize("markup", ToolMarkup)
def test_where_calls_are_free_text_may_come_before_them_or_alone(
    markup: ToolMarkup, are_special: bool | None, start: ReasoningStart
) -> None:
    written = chat_format(markup, has_tokens=are_special is not None)
    grammar = write_grammar(free(*NAMES, at_most_one=True), written, start, TOOLS)
    walk = walk_of(grammar, markup, are_special)
    opening = MARKUPS[markup].openings[-1]
    for seed in range(2):
        text = walk.answer(seed, end_chance=0)  # so with its call
        _, content, calls = read(text, markup, in_reasoning=start is ReasoningStart.BEGUN)
        assert opening not in content
        assert len(calls) == 1, text
        check_calls(calls, NAMES)
    said = think_of(markup).closing * (start is ReasoningStart.BEGUN) + "Hello."
    made = matcher(walk.grammar, walk.over)
    ids = walk.encode(said)
    assert made.try_consume_tokens(ids) == len(ids)
    assert made.is_accepting()


@pytest.mark.parametrize("markup", ToolMarkup)
@pytest.mark.parametrize("allow", [forced, free])
def test_one_call_of_the_named_tool_at_most(allow: Callable[..., Constraint], markup: ToolMarkup) -> None:
    grammar = write_grammar(allow("get", at_most_one=True), chat_format(markup), tools=TOOLS)
    walk = walk_of(grammar, markup, None)
    for seed in range(5):
        _, _, calls = read(walk.answer(seed), markup)
        check_calls(calls, ("get",))
        assert len(calls) == 1 or (not calls and allow is free)


def test_calls_as_models_write_them() -> None:
    def grammar(markup: ToolMarkup, *names: str) -> str:
        return write_grammar(forced(*names), chat_format(markup), tools=TOOLS)

    glm = grammar(ToolMarkup.GLM, "get_weather", "no_arguments")
    arguments = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in (("city", "Rome"), ("kind", "3"), ("days", "3"))
    )
    call = f"<tool_call>get_weather\n{arguments}</tool_call>"
    assert admits(glm, call)
    assert admits(glm, call.replace("\n", ""))
    assert admits(glm, f"{call}\n<tool_call>no_arguments\n</tool_call>")
    assert not admits(glm, f"{call} And so.")
    assert not admits(glm, call.replace("get_weather", "weather"))
    assert not admits(glm, call.replace("<arg_value>3", "<arg_value>32"))
    dsml = grammar(ToolMarkup.DSML, "get_weather", "no_arguments")
    parameters = "".join(
        f'<{DSML}parameter name="{name}" string="{is_string}">{value}</{DSML}parameter>\n'
        for name, is_string, value in (
            ("city", "true", "Rome"),
            ("kind", "false", "null"),
            ("days", "false", "3"),
        )
    )
    invokes = f'<{DSML}invoke name="get_weather">\n{parameters}</{DSML}invoke>\n'
    none = f'<{DSML}invoke name="no_arguments">\n\n</{DSML}invoke>\n'
    assert admits(dsml, f"\n\n<{DSML}function_calls>\n{invokes}{none}</{DSML}function_calls>")
    assert not admits(dsml, f"\n\n<{DSML}function_calls>\n</{DSML}function_calls>")
    call = f'{V31.CALL}set_all{V31.SEPARATOR}{{"anything": [1], "number": 5.5}}{V31.END_OF_CALL}'
    assert admits(grammar(ToolMarkup.DEEPSEEK_V31, "set_all"), f"{V31.CALLS}{call}{call}{V31.END_OF_CALLS}")
    mistral = grammar(ToolMarkup.MISTRAL, "set_all")
    call = '[TOOL_CALLS]set_all[ARGS]{"anything": [1], "number": 5.5}'
    assert admits(mistral, call + call)
    assert not admits(mistral, f"{call}[TOOL_CALLS]")


def test_a_mark_is_its_token_where_the_tokenizer_has_one() -> None:
    has_tokens = chat_format(ToolMarkup.GLM, has_tokens=True)
    grammar = write_grammar(forced("no_arguments"), has_tokens, ReasoningStart.BEGUN, TOOLS)
    ids = token_ids(TOKENS[ToolMarkup.GLM])
    for are_special in (False, True):
        made = matcher(grammar, tokenizer(TOKENS[ToolMarkup.GLM], are_special=are_special))
        assert made.try_consume_tokens([*b"so ", ids["</think>"], ids["<tool_call>"]]) == 5
        made.reset()
        spelled = [*b"so </think>"]
        assert made.try_consume_tokens(spelled) < len(spelled)


def test_a_bare_string_is_none_that_would_be_read_as_something_else() -> None:
    schema = {"type": ["string", "array", "null"], "items": {"type": "integer"}}
    grammar = write_grammar(forced("f"), chat_format(ToolMarkup.GLM), tools=[tool(of_one(schema))])
    value = "<tool_call>f<arg_key>p</arg_key><arg_value>{}</arg_value></tool_call>"
    for text in ("", "null", "5", "a [1]", "[1, 2]", "[]", '"x"'):
        assert admits(grammar, value.format(text)), text
    for text in ('["a"]', " [1.5]", '{"a": 1}', "[", "a</tool_call>"):
        assert not admits(grammar, value.format(text)), text


PATTERN_TEXTS = ("a", "b", "ab", "ax", "xa", "xb", "bx", "xax", "a|b", "x")


@pytest.mark.parametrize(
    "pattern", ["a", "^a", "b$", "^a$", "a|b", "^a|b$", "^a|b", "a|^b$", "^(a|b)$", "[|]|^b", "a\\|b$"]
)
def test_a_bare_string_has_its_pattern_as_json_schema_finds_it(pattern: str) -> None:
    schema = of_one({"type": "string", "pattern": pattern})
    grammar = write_grammar(forced("f"), chat_format(ToolMarkup.GLM), tools=[tool(schema)])
    for text in PATTERN_TEXTS:
        call = f"<tool_call>f<arg_key>p</arg_key><arg_value>{text}</arg_value></tool_call>"
        assert admits(grammar, call) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize("start", [ReasoningStart.NONE, ReasoningStart.MAY_BEGIN])
def test_a_text_that_would_be_read_as_reasoning_is_none(start: ReasoningStart) -> None:
    call = "<tool_call>no_arguments</tool_call>"
    grammar = write_grammar(free("no_arguments"), chat_format(ToolMarkup.GLM), start, TOOLS)
    assert admits(grammar, f"So <think> {call}")
    assert not admits(grammar, "<think>")
    assert admits(grammar, f"\n <think> {call}") is (start is ReasoningStart.MAY_BEGIN)
    either = Constraint(answers(FormatKind.REGEX, "(?s:.*)").answer, free("no_arguments").calls)
    grammar = write_grammar(either, chat_format(ToolMarkup.GLM), start, TOOLS)
    assert admits(grammar, "a <think>")
    assert not admits(grammar, " <think>a")


# --- formats -----------------------------------------------------------------------------------------

FORMATS = [
    (answers(FormatKind.JSON, json.dumps(SCHEMA)), '{"city": "Rome", "days": 3}', '{"city": "Rome"}'),
    (answers(FormatKind.REGEX, r"^[a-z]+/\d{2,3}$"), "ab/12", "ab/1"),
    (answers(FormatKind.CHOICE, "", "yes", 'no "never"\n', "yes and no"), 'no "never"\n', "no"),
    (answers(FormatKind.LARK, '%ignore / /\nstart: A ("," A)*\nA: "}" | "b"'), "b , }", "b }"),
    (answers(FormatKind.GBNF, 'root ::= "\\u00e9" rest*\n # the rest\nrest ::= [0-9]\n | "x"'), "é0x1", "x"),
]


@pytest.mark.parametrize(("constraint", "good", "bad"), FORMATS, ids=[kind.name for kind in FormatKind])
@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("start", ReasoningStart)
def test_an_answer_of_a_format_stands_behind_its_reasoning(
    start: ReasoningStart, has_tools: bool, constraint: Constraint, good: str, bad: str
) -> None:
    """With tools a call may come instead."""
    markup = ToolMarkup.GLM if has_tools else None
    if has_tools:
        constraint = Constraint(constraint.answer, free("no_arguments").calls)
    grammar = write_grammar(constraint, chat_format(markup), start, TOOLS)
    thoughts = {
        ReasoningStart.NONE: [""],
        ReasoningStart.MAY_BEGIN: ["", "<think>Let { me.</think>", "\n<think>\nx\n</think>\n\n"],
        ReasoningStart.BEGUN: ["</think>", "Let { me.</think>", "\nx\n</think>\n\n"],
    }[start]
    for before in thoughts:
        assert admits(grammar, before + good)
        assert not admits(grammar, before + bad)
        if before:
            in_reasoning = start is ReasoningStart.BEGUN
            assert read(before + good, markup, in_reasoning=in_reasoning)[1] == good
        assert admits(grammar, f"{before}<tool_call>no_arguments</tool_call>") is has_tools
    if start is not ReasoningStart.NONE:
        assert not admits(grammar, "<think>x")
    if start is ReasoningStart.BEGUN:
        assert not admits(grammar, good)


def test_white_space_in_json_is_bounded() -> None:
    grammar = write_grammar(answers(FormatKind.JSON, '{"type":"object"}'), chat_format(None))
    assert admits(grammar, '{\n    "a": 1\n}')
    assert not admits(grammar, "{" + " " * 65 + "}")


def test_reasoning_that_is_content_has_no_calls_in_it() -> None:
    """Where reasoning is content, text in it that looks like a call would be read as one."""
    call = CALLS[ToolMarkup.DEEPSEEK_V31]
    asked = forced("no_arguments"), chat_format(ToolMarkup.DEEPSEEK_V31), ReasoningStart.BEGUN, TOOLS
    for separates in (True, False):
        grammar = write_grammar(*asked, separates_reasoning=separates)
        assert admits(grammar, f"I think</think>{call}")
        assert admits(grammar, f"I think {call}</think>{call}") is separates


CALLS = {
    ToolMarkup.GLM: "<tool_call>no_arguments</tool_call>",
    ToolMarkup.DSML: (
        f'<{DSML}function_calls>\n<{DSML}invoke name="no_arguments">\n</{DSML}invoke>\n'
        f"</{DSML}function_calls>"
    ),
    ToolMarkup.DEEPSEEK_V31: (
        f"{V31.CALLS}{V31.CALL}no_arguments{V31.SEPARATOR}{{}}{V31.END_OF_CALL}{V31.END_OF_CALLS}"
    ),
    ToolMarkup.HERMES: '<tool_call>\n{"name": "no_arguments", "arguments": {}}\n</tool_call>',
    ToolMarkup.MISTRAL: "[TOOL_CALLS]no_arguments[ARGS]{}",
}


@of_each_tokenizer
@pytest.mark.parametrize("separates", [True, False])
@pytest.mark.parametrize("constraint", [forced("no_arguments"), free("no_arguments"), None], ids=str)
@pytest.mark.parametrize("markup", ToolMarkup)
def test_a_call_of_glm_may_end_its_reasoning(
    markup: ToolMarkup, constraint: Constraint | None, separates: bool, are_special: bool | None
) -> None:
    """Calls of other models may not. None: the call comes in place of an answer in a format."""
    if constraint is None:
        answer = answers(FormatKind.JSON, json.dumps(SCHEMA)).answer
        constraint = Constraint(answer, free("no_arguments").calls)
    written = chat_format(markup, has_tokens=are_special is not None)
    think = think_of(markup)
    for start, opening in ((ReasoningStart.BEGUN, ""), (ReasoningStart.MAY_BEGIN, think.opening)):
        grammar = write_grammar(constraint, written, start, TOOLS, separates_reasoning=separates)
        walk = walk_of(grammar, markup, are_special)
        for text, is_admitted in (
            (f"{opening}So.{CALLS[markup]}", markup is ToolMarkup.GLM),
            (f"{opening}So.{think.closing}{CALLS[markup]}", True),
        ):
            made = matcher(walk.grammar, walk.over)
            ids = walk.encode(text)
            is_whole = made.try_consume_tokens(ids) == len(ids) and made.is_accepting()
            assert is_whole is is_admitted, text
            if is_admitted and separates:
                reasoning, content, calls = read(text, markup, in_reasoning=not opening)
                assert (reasoning, content, [call.name for call in calls]) == ("So.", "", ["no_arguments"])


# --- what cannot be written --------------------------------------------------------------------------


def of_one(schema: object, **root: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": schema}, "required": ["p"], **root}


NOT_WRITABLE = [
    (of_one({"type": "string", "format": "hostname"}), "'p' that has the format 'hostname'"),
    (of_one({"allOf": [{"type": "string"}, {"minLength": 2}]}), "'p' that mixes strings"),
    (of_one({"$ref": "#/$defs/x"}, **{"$defs": {"x": {"$ref": "#/$defs/x"}}}), "refers to itself"),
    (of_one({"$ref": "https://example.org/x"}), "only #/$defs"),
    (of_one({"const": "</arg_value>"}), "has no value"),
    (of_one({"type": "string", "pattern": "a\\"}), "ends with a backslash"),
    (
        of_one({"type": "string", "pattern": "^(?!x).*$"}),
        "a pattern that has '(?!': no grammar can look ahead",
    ),
    (of_one({"type": "string", "pattern": r"[\]]\bx"}), r"has '\\b'"),
    (of_one({"type": "string", "minLength": 3, "maxLength": 2}), "lengths"),
    ({"type": "object", "anyOf": [{}]}, "'anyOf'"),
    (of_one(False), "has no value"),
    ({"properties": {"a<b": {}}}, "'a<b'"),
]


LOOKING_AHEAD: dict[str, Any] = {"type": "array", "items": {"type": "string", "pattern": "^(?!x).*$"}}


@pytest.mark.parametrize("markup", [ToolMarkup.GLM, ToolMarkup.HERMES])
@pytest.mark.parametrize(
    "schema",
    [
        LOOKING_AHEAD,
        {"anyOf": [LOOKING_AHEAD, {"type": "null"}]},
        {"type": "object", "properties": {"pattern": LOOKING_AHEAD}},
        {"type": "object", "additionalProperties": {"$ref": "#/$defs/x"}},
    ],
)
def test_a_pattern_that_no_grammar_has_does_not_count_for_tools_that_are_not_strict(
    markup: ToolMarkup, schema: dict[str, Any]
) -> None:
    parameters = of_one(schema, **{"$defs": {"x": LOOKING_AHEAD}})
    for strict in (True, False):
        grammar = write_grammar(
            forced("f"),
            chat_format(markup),
            tools=[tool(parameters, strict=strict)],
            separates_reasoning=False,
        )
        assert bool(error_of(grammar)) == strict


def test_only_patterns_of_strings_are_left_out() -> None:
    """A value may have the name ``pattern``, and a class of characters may look like a look-ahead."""
    one = {"const": {"pattern": "(?=a)"}}
    two = {"type": "string", "pattern": r"^[(?=]\\b$"}
    parameters = {"type": "object", "properties": {"one": one, "two": two}, "required": ["one", "two"]}
    written = chat_format(ToolMarkup.HERMES, reasons=False)
    grammar = write_grammar(forced("f"), written, tools=[tool(parameters, strict=False)])
    call = '<tool_call>\n{"name": "f", "arguments": {"one": {"pattern": "%s"}, "two": "%s"}}\n</tool_call>'
    assert admits(grammar, call % ("(?=a)", r"?\\b"))
    assert not admits(grammar, call % ("a", r"?\\b"))
    assert not admits(grammar, call % ("(?=a)", "x"))


@pytest.mark.parametrize("dialect", ["https://json-schema.org/draft-07/schema#", "http://example.org/own"])
def test_an_unknown_dialect_of_schemas_is_no_reason_to_refuse_one(dialect: str) -> None:
    inner = {"$schema": dialect, "type": "integer"}
    schema = {"$schema": dialect, "type": "object", "properties": {"a": inner}, "required": ["a"]}
    grammar = write_grammar(answers(FormatKind.JSON, json.dumps(schema)), chat_format(None, reasons=False))
    assert admits(grammar, '{"a":1}')
    assert not admits(grammar, '{"a":"x"}')


@pytest.mark.parametrize(("parameters", "why"), NOT_WRITABLE)
def test_what_bare_arguments_cannot_be_held_to_is_refused_of_strict_tools_only(
    parameters: dict[str, Any], why: str
) -> None:
    written = chat_format(ToolMarkup.GLM)
    with pytest.raises(ApiError, match=r"^tools\[0\]: 'f' ") as caught:
        write_grammar(forced("f"), written, tools=[tool(parameters)])
    assert why in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, "tools[0]")
    if "a<b" in why:
        return  # a name that is markup is none for any tool
    grammar = write_grammar(forced("f"), written, tools=[tool(parameters, strict=False)])
    assert not error_of(grammar)


def test_forced_calls_need_a_known_markup_and_other_rules_do_without() -> None:
    with pytest.raises(ApiError, match="tool_choice: a call cannot be forced"):
        write_grammar(forced("get"), chat_format(None), tools=TOOLS)
    assert write_grammar(free("get"), chat_format(None), tools=TOOLS) == ""
    both = Constraint(answers(FormatKind.REGEX, "a").answer, free("get").calls)
    assert admits(write_grammar(both, chat_format(None), tools=TOOLS), "a")


def write_for(markup: ToolMarkup, parameters: Sequence[dict[str, Any]], *, strict: bool = False) -> str:
    """Return the grammar of forced calls of tools with these parameters."""
    tools = [tool(each, name=f"f{number}", strict=strict) for number, each in enumerate(parameters)]
    names = (each["function"]["name"] for each in tools)
    return write_grammar(forced(*names), chat_format(markup), tools=tools)


@pytest.mark.I8
@pytest.mark.parametrize("markup", ToolMarkup)
def test_a_grammar_is_bounded(markup: ToolMarkup) -> None:
    long = [of_one({"enum": [f"{number}" + "x" * 30_000]}) for number in range(12)]
    with pytest.raises(ApiError, match="tool_choice: makes a grammar of more than 262144 characters"):
        write_for(markup, long, strict=True)


SCHEMA_WORDS = (
    *("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "oneOf"),
    *("allOf", "$ref", "$defs", "minLength", "maxLength", "pattern", "format", "minimum", "x", "title"),
)
SCHEMA_VALUES = ("string", "integer", "object", "null", "#/$defs/x", "#/$defs/a~1b", "date", "^a|b$", "x", "")
schemas = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(0, 2) | st.sampled_from(SCHEMA_VALUES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(SCHEMA_WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(schema=schemas, definition=schemas, markup=st.sampled_from(ToolMarkup), strict=st.booleans())
@settings(max_examples=100, deadline=None)
def test_no_schema_breaks_the_writing_of_a_grammar(
    schema: Any, definition: Any, markup: ToolMarkup, strict: bool
) -> None:
    """The result is a grammar or a 400. Whether an engine can enforce the grammar is checked elsewhere."""
    parameters = of_one(schema, **{"$defs": {"x": definition, "a/b": schema}})
    for root in (parameters, schema if isinstance(schema, dict) else {}):
        with contextlib.suppress(ApiError):
            write_grammar(forced("f"), chat_format(markup), tools=[tool(root, strict=strict)])


@pytest.mark.parametrize("markup", ToolMarkup)
def test_a_schema_that_is_nested_as_deeply_as_a_body_may_be_is_written_or_refused(markup: ToolMarkup) -> None:
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_NESTING // 2):
        nested = {"anyOf": [nested]}
    for schema in (nested, {"type": "object", "properties": {"a": nested}}):
        with contextlib.suppress(ApiError):
            write_grammar(forced("f"), chat_format(markup), tools=[tool(of_one(schema))])
    write_grammar(answers(FormatKind.JSON, schema_text("response_format", nested)), chat_format(markup))


MULTIPLYING: dict[str, dict[str, Any]] = {
    "a long list of many parameters": {"enum": [str(number) for number in range(1500)]},
    "a fan of references for each": {
        "anyOf": [{"type": "string", "pattern": f"^{i}{'a' * 60}$"} for i in range(500)]
    },
}


@pytest.mark.I8
@pytest.mark.parametrize("shared", MULTIPLYING.values(), ids=MULTIPLYING)
@pytest.mark.parametrize("markup", [pytest.param(ToolMarkup.GLM, marks=pytest.mark.slow), ToolMarkup.DSML])
def test_what_reading_schemas_takes_is_bounded_over_all_tools_of_a_request(
    shared: dict[str, Any], markup: ToolMarkup
) -> None:
    properties = {f"p{number}": {"$ref": "#/$defs/x"} for number in range(1500)}
    parameters = {"type": "object", "properties": properties, "$defs": {"x": shared}}
    with pytest.raises(ApiError, match=rf"^tool_choice: .* more than {MAX_STEPS} steps") as caught:
        write_for(markup, [parameters] * 4)
    assert caught.value.status == 400


@pytest.mark.I8
@pytest.mark.parametrize("markup", [ToolMarkup.GLM, ToolMarkup.DSML])
def test_tools_of_many_parameters_take_a_fraction_of_the_steps(
    markup: ToolMarkup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four tools of 70 kB each."""
    described = {"type": "string", "description": "what it is for", "enum": ["one", "two", "three"]}
    parameters = {"type": "object", "properties": {f"parameter_{i}": described for i in range(700)}}
    assert len(json.dumps(parameters)) > 70_000
    steps = Steps()
    monkeypatch.setattr("hisparse_pd.serving.api.grammars.Steps", lambda *_: steps)
    write_for(markup, [parameters] * 4)
    assert 0 < MAX_STEPS - steps.num_left < MAX_STEPS // 4


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (FormatKind.REGEX, "a\\"),
        (FormatKind.GBNF, "root ::= ("),
        (FormatKind.GBNF, r'root ::= "\uD800"'),
        (FormatKind.GBNF, r'root ::= "\U00110000"'),
    ],
)
def test_a_text_that_is_no_grammar_is_refused_by_its_field(kind: FormatKind, text: str) -> None:
    with pytest.raises(ApiError, match=r"^response_format: ") as caught:
        write_grammar(answers(kind, text), chat_format(None))
    assert caught.value.status == 400
