"""What a request asks an answer to be: a format, or calls of tools.

The fields of OpenAI's, Anthropic's, vLLM's and SGLang's clients in, a ``Constraint`` out. It says nothing of
a checkpoint: ``grammars.py`` writes it as a grammar once the prompt and the model's way of calling are known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from api.call_rules import CallRule, anthropic_calls, names_of_tools, openai_calls
from api.json_fields import JsonFields
from api.prompts import ChatPrompt
from service.http_errors import ApiError, InvalidField

MAX_SCHEMA_BYTES = 128 << 10
MAX_REGEX_CHARS = 16 << 10
MAX_LARK_CHARS = 64 << 10
MAX_GBNF_CHARS = 16 << 10
MAX_GBNF_RULES = 128
"""Converting a grammar takes time that grows with its rules times its length: a quarter of a second."""
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 64 << 10
"""Of all choices together."""

ANY_JSON_OBJECT = "$$ANY$$"
"""SGLang's word for a schema that lets every object pass."""

_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|[?!]?start\s*(?:\[[^\]\n]*\]\s*)?:(?!:))", re.MULTILINE)

_VLLM_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class FormatKind(Enum):
    JSON = auto()
    """``text``: a JSON schema."""
    REGEX = auto()
    """``text``: what the whole answer matches."""
    CHOICE = auto()
    LARK = auto()
    GBNF = auto()
    """llama.cpp's notation, which SGLang and vLLM call EBNF."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the text of an answer is. ``field``: what asks for it, as errors call it."""

    field: str
    kind: FormatKind
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """With both, the answer is either of that format or calls tools."""

    answer: AnswerFormat | None = None
    calls: CallRule | None = None


def completion_constraint(fields: JsonFields) -> Constraint | None:
    """Of ``/v1/completions``."""
    answer = _one_of([*_response_format(fields), *_other_formats(fields)])
    return None if answer is None else Constraint(answer)


def generate_constraint(fields: JsonFields) -> Constraint | None:
    """Of ``sampling_params`` of ``/generate``."""
    answer = _one_of([*_other_formats(fields)])
    return None if answer is None else Constraint(answer)


def refuse_formats(fields: JsonFields) -> None:
    """At the top level of ``/generate``, which has them in ``sampling_params``."""
    for answer in _other_formats(fields):
        raise ApiError(400, f"{answer.field}: belongs into sampling_params here", param=answer.field)


def chat_constraint(fields: JsonFields, prompt: ChatPrompt) -> Constraint | None:
    """Of ``/v1/chat/completions``."""
    answer = _one_of([*_response_format(fields), *_other_formats(fields)])
    calls = openai_calls(fields, prompt, in_function=True)
    return _constraint(answer, calls, prompt, "continue_final_message")


def responses_constraint(fields: JsonFields, prompt: ChatPrompt) -> Constraint | None:
    """Of ``/v1/responses``."""
    text = fields.nested("text")
    chosen = text.nested("format") if text is not None else None
    own = [] if chosen is None else _typed_format(chosen, chosen)
    answer = _one_of([*own, *_other_formats(fields)])
    calls = openai_calls(fields, prompt, in_function=False)
    return _constraint(answer, calls, prompt, "input")


def messages_constraint(fields: JsonFields, prompt: ChatPrompt) -> Constraint | None:
    """Of ``/v1/messages``."""
    config = fields.nested("output_config")
    formats = [config.nested("format") if config is not None else None, fields.nested("output_format")]
    own = [
        answer
        for chosen in formats
        if chosen is not None
        for answer in _typed_format(chosen, chosen, types=("json_schema",))
    ]
    answer = _one_of([*own, *_other_formats(fields)])
    return _constraint(answer, anthropic_calls(fields, prompt), prompt, "messages")


def _constraint(
    answer: AnswerFormat | None, calls: CallRule | None, prompt: ChatPrompt, continued_by: str
) -> Constraint | None:
    if answer is None and calls is None:
        return None
    is_forced = calls is not None and calls.is_forced
    if answer is not None and calls is not None and is_forced:
        raise _conflict(calls.field, answer.field, "an answer that only calls tools has no text")
    asking = answer or (calls if is_forced else None)
    if asking is not None and prompt.continue_final_message:
        raise _conflict(asking.field, continued_by, "what continues a message of the assistant has no format")
    if answer is not None and calls is None and (names := names_of_tools(prompt)):
        calls = CallRule("tools", names, is_forced=False, at_most_one=False)
    return Constraint(answer, calls)


def _conflict(first: str, second: str, why: str) -> ApiError:
    return ApiError(400, f"{first} and {second}: {why}; leave one of them out", param=first)


# --- formats -----------------------------------------------------------------------------------------


def _one_of(answers: Sequence[AnswerFormat]) -> AnswerFormat | None:
    if len(answers) > 1:
        raise _conflict(answers[0].field, answers[1].field, "one of them can say what the answer is")
    return answers[0] if answers else None


def _response_format(fields: JsonFields) -> Sequence[AnswerFormat]:
    chosen = fields.nested("response_format")
    if chosen is None:
        return []
    holder = chosen
    if chosen.raw("type") == "json_schema":
        described = chosen.nested("json_schema")
        if described is None:
            raise chosen.invalid("json_schema", "must be an object with a schema")
        holder = described
    return _typed_format(chosen, holder)


def _typed_format(
    chosen: JsonFields, holder: JsonFields, types: tuple[str, ...] = ("text", "json_object", "json_schema")
) -> Sequence[AnswerFormat]:
    """OpenAI's and Anthropic's formats; ``holder``: what has the schema."""
    match chosen.raw("type"):
        case "text" if "text" in types:
            return []
        case "json_object" if "json_object" in types:
            return [_any_object(chosen.name("type"))]
        case "json_schema":
            return [_json_format(holder, "schema")]
        case _:
            names = ", ".join(f'"{name}"' for name in types)
            raise chosen.invalid("type", f"must be {'one of ' if len(types) > 1 else ''}{names}")


def _other_formats(fields: JsonFields) -> Iterator[AnswerFormat]:
    """vLLM's, as they are called now and as they were, and SGLang's."""
    fields.require_unset("structural_tag")
    fields.require_unset("guided_whitespace_pattern")
    if (structured := fields.nested("structured_outputs")) is not None:
        yield from _structured_outputs(structured)
    if fields.present("guided_json"):
        yield _json_format(fields, "guided_json")
    if fields.present("json_schema"):
        if fields.raw("json_schema") == ANY_JSON_OBJECT:
            yield _any_object(fields.name("json_schema"))
        else:
            yield _json_format(fields, "json_schema")
    for field in ("guided_regex", "regex"):
        if fields.present(field):
            yield _regex_format(fields, field)
    if fields.present("guided_choice") and fields.raw("guided_choice") != []:
        yield _choice_format(fields, "guided_choice")
    for field in ("guided_grammar", "ebnf"):
        if fields.present(field):
            yield _grammar_format(fields, field)


def _structured_outputs(fields: JsonFields) -> Iterator[AnswerFormat]:
    for field in ("disable_any_whitespace", "disable_additional_properties"):
        fields.require_unset(field, False)
    fields.require_unset("whitespace_pattern")
    for field in _VLLM_KINDS:
        if not fields.present(field):
            continue
        match field:
            case "json":
                yield _json_format(fields, field)
            case "regex":
                yield _regex_format(fields, field)
            case "choice":
                yield _choice_format(fields, field)
            case "grammar":
                yield _grammar_format(fields, field)
            case "json_object":
                if fields.flag(field):
                    yield _any_object(fields.name(field))
            case _:
                fields.require_unset(field)


def _any_object(name: str) -> AnswerFormat:
    return AnswerFormat(name, FormatKind.JSON, '{"type":"object"}')


def _json_format(fields: JsonFields, field: str) -> AnswerFormat:
    """A schema, as an object or as its text."""
    schema = fields.raw(field)
    if isinstance(schema, str):
        text = fields.needed_text(field, MAX_SCHEMA_BYTES)
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise fields.invalid(field, f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise fields.invalid(field, "must be a JSON schema, an object")
    if "x-guidance" in schema:
        raise fields.invalid(field, "must not have x-guidance: how schemas are enforced is not the client's")
    return AnswerFormat(fields.name(field), FormatKind.JSON, schema_text(fields.name(field), schema))


def schema_text(name: str, schema: object) -> str:
    """The schema as JSON. Raises ApiError for one that is too long."""
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise ApiError(400, f"{name}: is nested too deeply", param=name) from error
    if (num_bytes := len(text.encode())) > MAX_SCHEMA_BYTES:
        raise ApiError(
            400,
            f"{name}: has {num_bytes} bytes of JSON; {MAX_SCHEMA_BYTES} are the most for a schema",
            param=name,
        )
    return text


def _regex_format(fields: JsonFields, field: str) -> AnswerFormat:
    return AnswerFormat(fields.name(field), FormatKind.REGEX, fields.needed_text(field, MAX_REGEX_CHARS))


def _choice_format(fields: JsonFields, field: str) -> AnswerFormat:
    choices = fields.items(field, MAX_CHOICES)
    if not choices:
        raise fields.invalid(field, "must be a list with at least one string")
    found: dict[str, None] = {}
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise InvalidField(f"{fields.name(field)}[{index}]", choice, "must be a string that is not empty")
        found[choice] = None
    if (num_chars := sum(map(len, found))) > MAX_CHOICE_CHARS:
        name = fields.name(field)
        raise ApiError(
            400, f"{name}: has {num_chars} characters; {MAX_CHOICE_CHARS} are the most", param=name
        )
    return AnswerFormat(fields.name(field), FormatKind.CHOICE, choices=tuple(found))


def _grammar_format(fields: JsonFields, field: str) -> AnswerFormat:
    """In Lark's notation when it has a rule ``start``, else in GBNF, whose first rule is ``root``."""
    text = fields.needed_text(field, MAX_LARK_CHARS)
    if _LARK.search(text):
        return AnswerFormat(fields.name(field), FormatKind.LARK, text)
    fields.needed_text(field, MAX_GBNF_CHARS)
    if (num_rules := text.count("::=")) > MAX_GBNF_RULES:
        name = fields.name(field)
        raise ApiError(400, f"{name}: has {num_rules} rules; {MAX_GBNF_RULES} are the most", param=name)
    return AnswerFormat(fields.name(field), FormatKind.GBNF, text)
