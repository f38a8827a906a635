"""The fields of each API that ask for a format of the answer, or for calls of tools."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.call_rules import CallRule
from hisparse_pd.serving.api.constraints import (
    MAX_CHOICE_CHARS,
    MAX_GBNF_CHARS,
    MAX_GBNF_RULES,
    MAX_SCHEMA_BYTES,
    AnswerFormat,
    Constraint,
    FormatKind,
)
from hisparse_pd.serving.http.http_errors import ApiError
from tests.unit.api.support import parse

SCHEMA = {"type": "object", "properties": {"b": {"type": "number"}, "a": {"const": 1.0}}}
TEXT = '{"type":"object","properties":{"b":{"type":"number"},"a":{"const":1.0}}}'
ANY_OBJECT = '{"type":"object"}'
CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES = (
    *(Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.GENERATE, Endpoint.MESSAGES, Endpoint.RESPONSES),
)


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
VLLM_FORMATS: list[tuple[dict[str, Any], AnswerFormat]] = [
    ({"json": SCHEMA}, AnswerFormat("json", FormatKind.JSON, TEXT)),
    ({"json": json.dumps(SCHEMA)}, AnswerFormat("json", FormatKind.JSON, TEXT)),
    ({"json_object": True}, AnswerFormat("json_object", FormatKind.JSON, ANY_OBJECT)),
    ({"regex": "a+"}, AnswerFormat("regex", FormatKind.REGEX, "a+")),
    ({"choice": ["b", "a", "b"]}, AnswerFormat("choice", FormatKind.CHOICE, choices=("b", "a"))),
    ({"grammar": LARK}, AnswerFormat("grammar", FormatKind.LARK, LARK)),
]
GUIDED = f"%llguidance {{}}\n{LARK}"
SGLANG_FORMATS: list[tuple[dict[str, Any], AnswerFormat]] = [
    ({"json_schema": TEXT}, AnswerFormat("json_schema", FormatKind.JSON, TEXT)),
    ({"json_schema": "$$ANY$$"}, AnswerFormat("json_schema", FormatKind.JSON, ANY_OBJECT)),
    ({"regex": "a+"}, AnswerFormat("regex", FormatKind.REGEX, "a+")),
    ({"ebnf": GBNF}, AnswerFormat("ebnf", FormatKind.GBNF, GBNF)),
    ({"ebnf": GUIDED}, AnswerFormat("ebnf", FormatKind.LARK, GUIDED)),
]


@pytest.mark.parametrize(("endpoint", "changes", "field", "text"), OWN_FORMATS)
def test_each_api_names_a_format_in_its_own_words(
    endpoint: Endpoint, changes: dict[str, Any], field: str, text: str
) -> None:
    assert constraint_of(endpoint, **changes) == Constraint(AnswerFormat(field, FormatKind.JSON, text))


@pytest.mark.parametrize(("fields", "answer"), VLLM_FORMATS)
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, RESPONSES])
def test_vllms_words(endpoint: Endpoint, fields: dict[str, Any], answer: AnswerFormat) -> None:
    expected = replace(answer, field=f"structured_outputs.{answer.field}")
    assert constraint_of(endpoint, structured_outputs=fields) == Constraint(expected)


@pytest.mark.parametrize(("fields", "answer"), SGLANG_FORMATS)
def test_sglangs_words(fields: dict[str, Any], answer: AnswerFormat) -> None:
    assert constraint_of(CHAT, **fields) == constraint_of(COMPLETIONS, **fields) == Constraint(answer)
    expected = replace(answer, field=f"sampling_params.{answer.field}")
    assert constraint_of(GENERATE, sampling_params=fields) == Constraint(expected)


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        *((endpoint, {"structured_outputs": {"regex": "a"}}) for endpoint in (GENERATE, MESSAGES)),
        *((endpoint, {"regex": "a"}) for endpoint in (GENERATE, MESSAGES, RESPONSES)),
    ],
)
def test_words_of_other_servers_are_refused(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="is not supported here: completions and chats take it") as caught:
        constraint_of(endpoint, **fields)
    assert caught.value.param == next(iter(fields))


def test_what_asks_for_nothing_is_no_constraint() -> None:
    harmless: dict[str, Any] = {"json_object": False, "regex": None, "disable_fallback": True}
    for endpoint in (CHAT, COMPLETIONS):
        nothing: list[dict[str, Any]] = [{"structured_outputs": {}}, {"structured_outputs": harmless}]
        for fields in (*nothing, {}, {"regex": None}):
            assert constraint_of(endpoint, **fields) is None
            assert constraint_of(endpoint, **fields, response_format={"type": "text"}) is None
    assert constraint_of(RESPONSES, text={"format": {"type": "text"}}) is None
    assert constraint_of(GENERATE, sampling_params={"regex": None}) is None
    assert constraint_of(MESSAGES) is None


def test_each_prompt_of_generate_has_its_own() -> None:
    request = parse(GENERATE, text=["a", "b"], sampling_params=[{"regex": "a"}, {}])
    assert [options.constraint is None for options in request.options] == [False, True]


# --- calls -------------------------------------------------------------------------------------------


def tool(endpoint: Endpoint, name: str, *, strict: bool | None = None) -> dict[str, Any]:
    described: dict[str, Any] = {"name": name, **({} if strict is None else {"strict": strict})}
    schema = {"type": "object"}
    if endpoint is MESSAGES:
        return described | {"input_schema": schema}
    described["parameters"] = schema
    return {"type": "function", **(described if endpoint is RESPONSES else {"function": described})}


def named(endpoint: Endpoint, name: str) -> dict[str, Any]:
    kind = "tool" if endpoint is MESSAGES else "function"
    return {"type": kind, **({"function": {"name": name}} if endpoint is CHAT else {"name": name})}


BOTH = ("f", "g")
WITH_TOOLS = pytest.mark.parametrize("endpoint", [CHAT, RESPONSES, MESSAGES])


def calls_of(endpoint: Endpoint, *, strict: bool | None = None, **changes: Any) -> CallRule | None:
    tools = [tool(endpoint, "f", strict=strict), tool(endpoint, "g")]
    found = constraint_of(endpoint, tools=tools, **changes)
    return None if found is None else found.calls


def choosing(endpoint: Endpoint, word: str, *, is_serial: bool = False) -> dict[str, Any]:
    """``word`` is OpenAI's value of tool_choice."""
    if endpoint is MESSAGES:
        serial = {"disable_parallel_tool_use": True} if is_serial else {}
        return {"tool_choice": {"type": "any" if word == "required" else word, **serial}}
    return {"tool_choice": word, **({"parallel_tool_calls": False} if is_serial else {})}


@WITH_TOOLS
def test_tool_choice(endpoint: Endpoint) -> None:
    field = "tool_choice.type" if endpoint is MESSAGES else "tool_choice"
    required = calls_of(endpoint, **choosing(endpoint, "required"))
    assert required == CallRule(field, BOTH, is_forced=True, at_most_one=False)
    one = calls_of(endpoint, tool_choice=named(endpoint, "g"))
    assert one == CallRule(field, ("g",), is_forced=True, at_most_one=endpoint is not MESSAGES)
    for word in ("auto", "none"):
        assert calls_of(endpoint, **choosing(endpoint, word)) is None
    with pytest.raises(ApiError, match='name: "h" is none of the tools'):
        calls_of(endpoint, tool_choice=named(endpoint, "h"))


@WITH_TOOLS
def test_one_call_at_a_time(endpoint: Endpoint) -> None:
    disabled = "tool_choice.disable_parallel_tool_use"
    field = disabled if endpoint is MESSAGES else "parallel_tool_calls"
    serial = choosing(endpoint, "auto", is_serial=True)
    assert calls_of(endpoint, **serial) == CallRule(field, BOTH, is_forced=False, at_most_one=True)
    found = calls_of(endpoint, **choosing(endpoint, "required", is_serial=True))
    assert found is not None
    assert (found.is_forced, found.at_most_one) == (True, True)
    assert constraint_of(endpoint, **({} if endpoint is MESSAGES else serial)) is None


@WITH_TOOLS
def test_strict_tools(endpoint: Endpoint) -> None:
    assert calls_of(endpoint, strict=True) == CallRule("tools", BOTH, is_forced=False, at_most_one=False)
    assert calls_of(endpoint, strict=False) is None
    assert calls_of(endpoint, strict=True, **choosing(endpoint, "none")) is None


def test_allowed_tools() -> None:
    def chosen(endpoint: Endpoint, mode: str, *names: str) -> CallRule | None:
        allowed: dict[str, Any] = {"mode": mode, "tools": [named(endpoint, name) for name in names]}
        within = {"allowed_tools": allowed} if endpoint is CHAT else allowed
        return calls_of(endpoint, tool_choice={"type": "allowed_tools", **within})

    assert chosen(CHAT, "auto", "g") == CallRule("tool_choice", ("g",), False, False)
    assert chosen(CHAT, "required", "g", "g") == CallRule("tool_choice", ("g",), True, False)
    assert chosen(RESPONSES, "required", "f") == CallRule("tool_choice", ("f",), True, False)


def test_a_format_beside_tools_lets_either_come() -> None:
    """Agents ask for it: tools until the answer is found, and then the answer in its format."""
    assert constraint_of(CHAT, tools=[tool(CHAT, "f")], response_format=OPENAI_FORMAT) == Constraint(
        AnswerFormat("response_format.json_schema.schema", FormatKind.JSON, TEXT),
        CallRule("tools", ("f",), is_forced=False, at_most_one=False),
    )


# --- what is refused ---------------------------------------------------------------------------------

PREFILLED = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]
GOES_ON: dict[str, Any] = {"messages": PREFILLED, "continue_final_message": True}
FORCED: dict[str, Any] = {"tools": [tool(CHAT, "f")], "tool_choice": "required"}
ANY_FORMAT = {"response_format": {"type": "json_object"}}
CONFLICTS: list[tuple[Endpoint, dict[str, Any], tuple[str, str]]] = [
    (CHAT, {"response_format": OPENAI_FORMAT, "regex": "a"}, ("response_format.json_schema.schema", "regex")),
    (COMPLETIONS, {"json_schema": {}, "structured_outputs": {"regex": "a"}}, ("structured", "json_schema")),
    (CHAT, {"structured_outputs": {"json": {}, "choice": ["a"]}}, ("outputs.json", "outputs.choice")),
    (GENERATE, {"sampling_params": {"ebnf": GBNF, "regex": "a"}}, ("params.regex", "params.ebnf")),
    (
        RESPONSES,
        {"text": {"format": RESPONSES_FORMAT}, "structured_outputs": {"regex": "a"}},
        ("text.format.schema", "structured_outputs.regex"),
    ),
    (
        MESSAGES,
        {"output_config": {"format": ANTHROPIC_FORMAT}, "output_format": ANTHROPIC_FORMAT},
        ("output_config.format.schema", "output_format.schema"),
    ),
    (CHAT, GOES_ON | ANY_FORMAT, ("response_format", "continue_final_message")),
    (CHAT, GOES_ON | FORCED, ("tool_choice", "continue_final_message")),
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


@pytest.mark.parametrize(
    ("endpoint", "chosen"),
    [
        (CHAT, {"response_format": OPENAI_FORMAT}),
        (RESPONSES, {"text": {"format": RESPONSES_FORMAT}}),
        (MESSAGES, {"output_format": ANTHROPIC_FORMAT}),
    ],
)
def test_a_forced_call_leaves_no_text_for_a_format(endpoint: Endpoint, chosen: dict[str, Any]) -> None:
    """Agents send both: the format is for the turn after the calls."""
    forced = {"tools": [tool(endpoint, "f")], "tool_choice": named(endpoint, "f")}
    assert constraint_of(endpoint, **forced, **chosen) == constraint_of(endpoint, **forced)


MANY_RULES = 'r ::= "a"\n' * (MAX_GBNF_RULES + 1)


def openai_schema(**described: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": described}}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object with a schema"),
    (openai_schema(name="n"), "response_format.json_schema.schema", "is needed"),
    (openai_schema(schema=[]), "response_format.json_schema.schema", "must be a JSON schema"),
    ({"response_format": {"type": "tag"}}, "response_format.type", 'must be "json_object", "json_schema"'),
    ({"json_schema": True}, "json_schema", "must be a JSON schema"),
    ({"json_schema": "{"}, "json_schema", "is not valid JSON"),
    ({"json_schema": "[1]"}, "json_schema", "must be a JSON schema"),
    ({"json_schema": {"x-guidance": {}}}, "json_schema", "x-guidance"),
    ({"json_schema": {"a": "x" * MAX_SCHEMA_BYTES}}, "json_schema", f"{MAX_SCHEMA_BYTES} are the most"),
    ({"json_schema": "x" * (MAX_SCHEMA_BYTES + 1)}, "json_schema", f"1 to {MAX_SCHEMA_BYTES} characters"),
    ({"regex": "a" * 16385}, "regex", "length <= 16384"),
    ({"regex": ""}, "regex", "length >= 1"),
    *(
        ({"structured_outputs": fields}, f"structured_outputs{field}", said)
        for fields, field, said in (
            ({"choice": ["a"] * 1025}, ".choice", "length <= 1024"),
            ({"choice": ["a" * (MAX_CHOICE_CHARS + 1)]}, ".choice", f"{MAX_CHOICE_CHARS} are the most"),
            ({"choice": ["a", ""]}, ".choice[1]", "length >= 1"),
            ({"choice": ["a", 1]}, ".choice[1]", "must be `str`"),
            ({"choice": []}, ".choice", "at least one string"),
            ({"structural_tag": "{}"}, ".structural_tag", "not supported"),
            ({"whitespace_pattern": " "}, ".whitespace_pattern", "not supported"),
            ([], "", "must be `object | null`"),
        )
    ),
    ({"guided_json": {}}, "guided_json", "vLLM calls it structured_outputs now"),
    ({"ebnf": f"start: {'a' * 65536}"}, "ebnf", "length <= 65536"),
    ({"ebnf": f"root ::= {'a' * MAX_GBNF_CHARS}"}, "ebnf", f"1 to {MAX_GBNF_CHARS} characters"),
    ({"ebnf": MANY_RULES}, "ebnf", f"{MAX_GBNF_RULES} are the most"),
    *(
        ({"tool_choice": choice}, f"tool_choice{field}", said)
        for choice, field, said in (
            ("any", "", 'must be "none"'),
            ({"type": "function"}, ".function", "is needed"),
            ({"type": "allowed_tools"}, ".allowed_tools", "is needed"),
            (
                {"type": "allowed_tools", "allowed_tools": {"mode": "x"}},
                ".allowed_tools.mode",
                'must be "auto" or "required"',
            ),
        )
    ),
]


@pytest.mark.parametrize(("changes", "param", "rule"), REFUSED)
def test_errors_name_field_and_bound(changes: dict[str, Any], param: str, rule: str) -> None:
    with pytest.raises(ApiError) as caught:
        constraint_of(CHAT, **changes)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert rule in caught.value.message
