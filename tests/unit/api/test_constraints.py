"""Which fields ask for what: each API's own words for a format of the answer and for calls of tools."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from hisparse_pd.api.call_rules import CallRule
from hisparse_pd.api.constraints import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_GBNF_CHARS,
    MAX_GBNF_RULES,
    MAX_LARK_CHARS,
    MAX_REGEX_CHARS,
    MAX_SCHEMA_BYTES,
    AnswerFormat,
    Constraint,
    FormatKind,
)
from hisparse_pd.api.schemas import ApiRequest, Endpoint, parse_request
from hisparse_pd.http.http_errors import ApiError

SCHEMA = {"type": "object", "properties": {"b": {"type": "number"}, "a": {"const": 1.0}}}
TEXT = '{"type":"object","properties":{"b":{"type":"number"},"a":{"const":1.0}}}'
ANY_OBJECT = '{"type":"object"}'
ROOM = {"bootstrap_host": "10.0.0.1", "bootstrap_room": 7}
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.COMPLETIONS: {"prompt": "x"},
    Endpoint.CHAT: {"messages": [{"role": "user", "content": "x"}]},
    Endpoint.GENERATE: {"text": "x"},
    Endpoint.MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    Endpoint.RESPONSES: {"input": "x"},
}
CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES = (
    *(Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.GENERATE, Endpoint.MESSAGES, Endpoint.RESPONSES),
)


def parse(endpoint: Endpoint, **changes: Any) -> ApiRequest:
    return parse_request(endpoint, msgspec.json.encode(BODIES[endpoint] | ROOM | changes), "tiny")


def constraint_of(endpoint: Endpoint, **changes: Any) -> Constraint | None:
    return parse(endpoint, **changes).options[0].constraint


# --- formats -----------------------------------------------------------------------------------------

OPENAI_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
ANTHROPIC_FORMAT = {"type": "json_schema", "schema": SCHEMA}
RESPONSES_FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
LARK = 'start: "a" | "b"'
GBNF = 'root ::= "a" | "b"'

OWN_FORMATS: list[tuple[Endpoint, dict[str, Any], str, str]] = [
    *(
        (endpoint, {"response_format": given}, f"response_format.{field}", text)
        for endpoint in (CHAT, COMPLETIONS)
        for given, field, text in (
            ({"type": "json_object"}, "type", ANY_OBJECT),
            (OPENAI_FORMAT, "json_schema.schema", TEXT),
        )
    ),
    (RESPONSES, {"text": {"format": RESPONSES_FORMAT}}, "text.format.schema", TEXT),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format.type", ANY_OBJECT),
    (MESSAGES, {"output_config": {"format": ANTHROPIC_FORMAT}}, "output_config.format.schema", TEXT),
    (MESSAGES, {"output_format": ANTHROPIC_FORMAT}, "output_format.schema", TEXT),
]
OTHER_FORMATS: list[tuple[dict[str, Any], AnswerFormat]] = [
    (
        {"structured_outputs": {"json": SCHEMA}},
        AnswerFormat("structured_outputs.json", FormatKind.JSON, TEXT),
    ),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        AnswerFormat("structured_outputs.json", FormatKind.JSON, TEXT),
    ),
    (
        {"structured_outputs": {"json_object": True}},
        AnswerFormat("structured_outputs.json_object", FormatKind.JSON, ANY_OBJECT),
    ),
    (
        {"structured_outputs": {"regex": "a+"}},
        AnswerFormat("structured_outputs.regex", FormatKind.REGEX, "a+"),
    ),
    (
        {"structured_outputs": {"choice": ["b", "a", "b"]}},
        AnswerFormat("structured_outputs.choice", FormatKind.CHOICE, choices=("b", "a")),
    ),
    (
        {"structured_outputs": {"grammar": LARK}},
        AnswerFormat("structured_outputs.grammar", FormatKind.LARK, LARK),
    ),
    ({"guided_json": SCHEMA}, AnswerFormat("guided_json", FormatKind.JSON, TEXT)),
    ({"guided_regex": "a+"}, AnswerFormat("guided_regex", FormatKind.REGEX, "a+")),
    ({"guided_choice": ["a"]}, AnswerFormat("guided_choice", FormatKind.CHOICE, choices=("a",))),
    ({"guided_grammar": GBNF}, AnswerFormat("guided_grammar", FormatKind.GBNF, GBNF)),
    ({"json_schema": TEXT}, AnswerFormat("json_schema", FormatKind.JSON, TEXT)),
    ({"json_schema": "$$ANY$$"}, AnswerFormat("json_schema", FormatKind.JSON, ANY_OBJECT)),
    ({"regex": "a+"}, AnswerFormat("regex", FormatKind.REGEX, "a+")),
    ({"ebnf": GBNF}, AnswerFormat("ebnf", FormatKind.GBNF, GBNF)),
    (
        {"ebnf": f"%llguidance {{}}\n{LARK}"},
        AnswerFormat("ebnf", FormatKind.LARK, f"%llguidance {{}}\n{LARK}"),
    ),
]


@pytest.mark.parametrize(("endpoint", "changes", "field", "text"), OWN_FORMATS)
def test_each_api_names_a_format_in_its_own_words(
    endpoint: Endpoint, changes: dict[str, Any], field: str, text: str
) -> None:
    assert constraint_of(endpoint, **changes) == Constraint(AnswerFormat(field, FormatKind.JSON, text))


@pytest.mark.parametrize(("changes", "answer"), OTHER_FORMATS)
@pytest.mark.parametrize("endpoint", Endpoint)
def test_vllms_and_sglangs_words_are_taken_everywhere(
    endpoint: Endpoint, changes: dict[str, Any], answer: AnswerFormat
) -> None:
    if endpoint is not Endpoint.GENERATE:
        assert constraint_of(endpoint, **changes) == Constraint(answer)
        return
    expected = replace(answer, field=f"sampling_params.{answer.field}")
    assert constraint_of(endpoint, sampling_params=changes) == Constraint(expected)
    with pytest.raises(ApiError, match="belongs into sampling_params") as caught:
        constraint_of(endpoint, **changes)
    assert caught.value.param == answer.field


HARMLESS: list[dict[str, Any]] = [
    {},
    {"structured_outputs": {}},
    {"structured_outputs": {"json_object": False, "regex": None, "disable_fallback": True}},
    {"guided_choice": [], "guided_json": None, "regex": None},
]


@pytest.mark.parametrize("changes", HARMLESS)
@pytest.mark.parametrize("endpoint", Endpoint)
def test_what_asks_for_nothing_is_no_constraint(endpoint: Endpoint, changes: dict[str, Any]) -> None:
    given = {"sampling_params": changes} if endpoint is Endpoint.GENERATE else changes
    assert constraint_of(endpoint, **given) is None
    if endpoint in (CHAT, COMPLETIONS):
        assert constraint_of(endpoint, **given, response_format={"type": "text"}) is None
    if endpoint is RESPONSES:
        assert constraint_of(endpoint, **given, text={"format": {"type": "text"}}) is None


def test_each_prompt_of_generate_has_its_own() -> None:
    request = parse(GENERATE, text=["a", "b"], sampling_params=[{"regex": "a"}, {}])
    assert [options.constraint is None for options in request.options] == [False, True]


# --- calls -------------------------------------------------------------------------------------------


def tool(endpoint: Endpoint, name: str, *, strict: bool | None = None) -> dict[str, Any]:
    described: dict[str, Any] = {"name": name, **({} if strict is None else {"strict": strict})}
    match endpoint:
        case Endpoint.MESSAGES:
            return described | {"input_schema": {"type": "object"}}
        case Endpoint.RESPONSES:
            return described | {"type": "function", "parameters": {"type": "object"}}
        case _:
            return {"type": "function", "function": described | {"parameters": {"type": "object"}}}


def named(endpoint: Endpoint, name: str) -> dict[str, Any]:
    match endpoint:
        case Endpoint.MESSAGES:
            return {"type": "tool", "name": name}
        case Endpoint.RESPONSES:
            return {"type": "function", "name": name}
        case _:
            return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named(CHAT, name) for name in names]},
    }


BOTH = ("f", "g")
WITH_TOOLS = pytest.mark.parametrize("endpoint", [CHAT, RESPONSES, MESSAGES])


def calls_of(endpoint: Endpoint, *, strict: bool | None = None, **changes: Any) -> CallRule | None:
    tools = [tool(endpoint, "f", strict=strict), tool(endpoint, "g")]
    found = constraint_of(endpoint, tools=tools, **changes)
    return None if found is None else found.calls


def anthropic_or(endpoint: Endpoint, choice: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {"tool_choice": choice} if endpoint is MESSAGES else changes


@WITH_TOOLS
def test_tool_choice(endpoint: Endpoint) -> None:
    field = "tool_choice.type" if endpoint is MESSAGES else "tool_choice"
    any_of = anthropic_or(endpoint, {"type": "any"}, {"tool_choice": "required"})
    assert calls_of(endpoint, **any_of) == CallRule(field, BOTH, is_forced=True, at_most_one=False)
    one = calls_of(endpoint, tool_choice=named(endpoint, "g"))
    assert one == CallRule(field, ("g",), is_forced=True, at_most_one=endpoint is not MESSAGES)
    for choice, word in (({"type": "auto"}, "auto"), ({"type": "none"}, "none")):
        changes = anthropic_or(endpoint, choice, {"tool_choice": word})
        assert calls_of(endpoint, **changes) is None
    with pytest.raises(ApiError, match='name: "h" is none of the tools'):
        calls_of(endpoint, tool_choice=named(endpoint, "h"))


@WITH_TOOLS
def test_one_call_at_a_time(endpoint: Endpoint) -> None:
    serial = anthropic_or(
        endpoint, {"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}
    )
    found = calls_of(endpoint, **serial)
    assert found is not None
    assert (found.names, found.is_forced, found.at_most_one) == (BOTH, False, True)
    assert found.field.endswith(("parallel_tool_calls", "disable_parallel_tool_use"))
    forced = anthropic_or(
        endpoint,
        {"type": "any", "disable_parallel_tool_use": True},
        {"tool_choice": "required", "parallel_tool_calls": False},
    )
    found = calls_of(endpoint, **forced)
    assert found is not None
    assert (found.is_forced, found.at_most_one) == (True, True)
    assert constraint_of(endpoint, **({} if endpoint is MESSAGES else serial)) is None


@WITH_TOOLS
def test_strict_tools(endpoint: Endpoint) -> None:
    assert calls_of(endpoint, strict=True) == CallRule("tools", BOTH, is_forced=False, at_most_one=False)
    assert calls_of(endpoint, strict=False) is None
    none: Any = {"type": "none"} if endpoint is MESSAGES else "none"
    assert calls_of(endpoint, strict=True, tool_choice=none) is None


def test_allowed_tools() -> None:
    assert calls_of(CHAT, tool_choice=allowed("auto", "g")) == CallRule("tool_choice", ("g",), False, False)
    assert calls_of(CHAT, tool_choice=allowed("required", "g", "g")) == CallRule(
        "tool_choice", ("g",), True, False
    )
    of_responses = {"type": "allowed_tools", "mode": "required", "tools": [named(RESPONSES, "f")]}
    assert calls_of(RESPONSES, tool_choice=of_responses) == CallRule("tool_choice", ("f",), True, False)


def test_a_format_beside_tools_lets_either_come() -> None:
    """As agents ask for it: tools until the answer is found, and the answer in its format."""
    found = constraint_of(CHAT, tools=[tool(CHAT, "f")], response_format=OPENAI_FORMAT)
    assert found is not None
    assert found.answer is not None
    assert found.calls == CallRule("tools", ("f",), is_forced=False, at_most_one=False)


# --- what is refused ---------------------------------------------------------------------------------

PREFILLED = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]
CONFLICTS: list[tuple[Endpoint, dict[str, Any], tuple[str, str]]] = [
    (CHAT, {"response_format": OPENAI_FORMAT, "regex": "a"}, ("response_format.json_schema.schema", "regex")),
    (COMPLETIONS, {"guided_json": {}, "structured_outputs": {"regex": "a"}}, ("structured", "guided_json")),
    (CHAT, {"structured_outputs": {"json": {}, "choice": ["a"]}}, ("outputs.json", "outputs.choice")),
    (GENERATE, {"sampling_params": {"ebnf": GBNF, "regex": "a"}}, ("params.regex", "params.ebnf")),
    (RESPONSES, {"text": {"format": RESPONSES_FORMAT}, "regex": "a"}, ("text.format.schema", "regex")),
    (
        MESSAGES,
        {"output_config": {"format": ANTHROPIC_FORMAT}, "output_format": ANTHROPIC_FORMAT},
        ("output_config.format.schema", "output_format.schema"),
    ),
    (
        CHAT,
        {"messages": PREFILLED, "continue_final_message": True, "response_format": {"type": "json_object"}},
        ("response_format", "continue_final_message"),
    ),
    (
        CHAT,
        {
            "messages": PREFILLED,
            "continue_final_message": True,
            "tools": [tool(CHAT, "f")],
            "tool_choice": "required",
        },
        ("tool_choice", "continue_final_message"),
    ),
    (MESSAGES, {"messages": PREFILLED, "output_format": ANTHROPIC_FORMAT}, ("output_format", "messages")),
]


@pytest.mark.parametrize(("endpoint", "changes", "fields"), CONFLICTS)
def test_two_rules_for_one_answer_are_refused_and_both_named(
    endpoint: Endpoint, changes: dict[str, Any], fields: tuple[str, str]
) -> None:
    with pytest.raises(ApiError, match="leave one of them out") as caught:
        constraint_of(endpoint, **changes)
    assert caught.value.status == 400
    assert all(field in caught.value.message for field in fields)


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES, MESSAGES])
def test_a_forced_call_leaves_no_text_for_a_format(endpoint: Endpoint) -> None:
    """Agents send both: the format is for the turn after the calls."""
    forced = {"tools": [tool(endpoint, "f")], "tool_choice": named(endpoint, "f")}
    assert constraint_of(endpoint, **forced, regex="a") == constraint_of(endpoint, **forced)


def lines(number: int) -> str:
    return "\n".join(f'r{index} ::= "a"' for index in range(number))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object with a schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "is needed",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        "response_format.json_schema.schema",
        "must be a JSON schema",
    ),
    (
        {"response_format": {"type": "structural_tag"}},
        "response_format.type",
        'must be "json_object", "json_schema"',
    ),
    ({"guided_json": True}, "guided_json", "must be a JSON schema"),
    ({"guided_json": "{"}, "guided_json", "is not valid JSON"),
    ({"json_schema": "[1]"}, "json_schema", "must be a JSON schema"),
    ({"guided_json": {"x-guidance": {}}}, "guided_json", "x-guidance"),
    (
        {"guided_json": {"a": "x" * MAX_SCHEMA_BYTES}},
        "guided_json",
        f"{MAX_SCHEMA_BYTES} are the most",
    ),
    ({"guided_json": "x" * (MAX_SCHEMA_BYTES + 1)}, "guided_json", f"1 to {MAX_SCHEMA_BYTES} characters"),
    ({"regex": "a" * (MAX_REGEX_CHARS + 1)}, "regex", f"length <= {MAX_REGEX_CHARS}"),
    ({"regex": ""}, "regex", "length >= 1"),
    ({"guided_choice": ["a"] * (MAX_CHOICES + 1)}, "guided_choice", f"length <= {MAX_CHOICES}"),
    ({"guided_choice": ["a" * (MAX_CHOICE_CHARS + 1)]}, "guided_choice", f"{MAX_CHOICE_CHARS} are the most"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]", "length >= 1"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]", "must be `str`"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one string"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not"),
    ({"structured_outputs": []}, "structured_outputs", "must be `object | null`"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    ({"ebnf": f"start: {'a' * MAX_LARK_CHARS}"}, "ebnf", f"length <= {MAX_LARK_CHARS}"),
    ({"ebnf": f"root ::= {'a' * MAX_GBNF_CHARS}"}, "ebnf", f"1 to {MAX_GBNF_CHARS} characters"),
    ({"ebnf": lines(MAX_GBNF_RULES + 1)}, "ebnf", f"{MAX_GBNF_RULES} are the most"),
    ({"structural_tag": "x"}, "structural_tag", "not supported"),
    ({"tool_choice": "any"}, "tool_choice", 'must be "none"'),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "is needed"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "is needed"),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}},
        "tool_choice.allowed_tools.mode",
        'must be "auto" or "required"',
    ),
]


@pytest.mark.parametrize(("changes", "param", "rule"), REFUSED)
def test_errors_name_field_and_bound(changes: dict[str, Any], param: str, rule: str) -> None:
    with pytest.raises(ApiError) as caught:
        constraint_of(CHAT, **changes)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert rule in caught.value.message
