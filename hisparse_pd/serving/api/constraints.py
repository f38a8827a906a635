"""Reads from a body what its answer must be: a format, or calls of tools.

``schemas.py`` calls the function of each endpoint. The fields of OpenAI's, Anthropic's, vLLM's and SGLang's
clients all make a ``Constraint``, which does not depend on the checkpoint: ``grammars.py`` later writes it as
a grammar for the prompt and the model's markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec

from hisparse_pd.protocol.decoding import check_nesting
from hisparse_pd.serving.api.bodies import (
    ChatBody,
    CompletionsBody,
    MessagesBody,
    OpenAI,
    ResponsesBody,
    SamplingParams,
    SglangFormat,
    VllmFormat,
)
from hisparse_pd.serving.api.body_parts import StructuredOutputs
from hisparse_pd.serving.api.call_rules import CallRule, anthropic_calls, names_of_tools, openai_calls
from hisparse_pd.serving.api.declared_decoding import decode
from hisparse_pd.serving.api.exact_numbers import read_json, write_json
from hisparse_pd.serving.api.openai_parts import ResponseFormat
from hisparse_pd.serving.api.prompts import ChatPrompt
from hisparse_pd.serving.api.responses_parts import TextFormat
from hisparse_pd.serving.http.http_errors import ApiError, FieldRefused, InvalidField

MAX_SCHEMA_BYTES = 128 << 10
MAX_GBNF_CHARS = 16 << 10
MAX_GBNF_RULES = 128
"""Most rules of a grammar in GBNF. Its conversion takes time proportional to its rules times its length, a
quarter of a second at these bounds."""
MAX_CHOICE_CHARS = 64 << 10
"""Most characters of all choices together."""

ANY_JSON_OBJECT = "$$ANY$$"
"""SGLang's value for a schema that every object matches."""

# A rule ``start``, or llguidance's own directive, at the beginning of a line shows Lark's notation.
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|[?!]?start\s*(?:\[[^\]\n]*\]\s*)?:(?!:))", re.MULTILINE)


class FormatKind(Enum):
    JSON = auto()
    """JSON of the schema ``text``."""
    REGEX = auto()
    """Text that as a whole matches ``text``."""
    CHOICE = auto()
    """One of ``choices``."""
    LARK = auto()
    """A grammar in llguidance's notation."""
    GBNF = auto()
    """A grammar in llama.cpp's notation, which SGLang and vLLM call EBNF."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format that the text of an answer must have."""

    field: str
    """Path of the field that asks for the format, for errors."""
    kind: FormatKind
    text: str = ""
    """The schema, regular expression or grammar that ``kind`` names."""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """The rules for an answer. With both, it either has the format or calls tools."""

    answer: AnswerFormat | None = None
    calls: CallRule | None = None

    @property
    def field(self) -> str:
        """Path of the field that asks for the constraint, for errors; with both, that of the format."""
        asking = self.answer or self.calls
        return asking.field if asking is not None else ""


def completion_constraint(body: CompletionsBody) -> Constraint | None:
    """Return the constraint of a body of ``/v1/completions``."""
    answer = _openai_format(body)
    return None if answer is None else Constraint(answer)


def generate_constraint(params: SamplingParams, name: str) -> Constraint | None:
    """Return the constraint of the ``sampling_params`` of ``/generate`` at the path ``name``."""
    answer = _only_format([*_sglang_formats(params, f"{name}.")])
    return None if answer is None else Constraint(answer)


def chat_constraint(body: ChatBody, prompt: ChatPrompt) -> Constraint | None:
    """Return the constraint of a body of ``/v1/chat/completions``."""
    answer = _openai_format(body)
    calls = openai_calls(body.tool_choice, body.parallel_tool_calls, prompt, is_chat=True)
    return _constraint(answer, calls, prompt, "continue_final_message")


def responses_constraint(body: ResponsesBody, prompt: ChatPrompt) -> Constraint | None:
    """Return the constraint of a body of ``/v1/responses``."""
    own: Sequence[AnswerFormat] = []
    name = "text.format"
    if body.text is not None and body.text.format is not None:
        chosen = decode(TextFormat, body.text.format, name)
        own = _typed_format(f"{name}.type", chosen.type, f"{name}.schema", chosen.schema)
    answer = _only_format([*own, *_vllm_formats(body)])
    calls = openai_calls(body.tool_choice, body.parallel_tool_calls, prompt, is_chat=False)
    return _constraint(answer, calls, prompt, "input")


def messages_constraint(body: MessagesBody, prompt: ChatPrompt) -> Constraint | None:
    """Return the constraint of a body of ``/v1/messages``."""
    formats = {"output_format": body.output_format}
    if body.output_config is not None:
        formats = {"output_config.format": body.output_config.format} | formats
    own = [
        _json_format(f"{name}.schema", chosen.schema)
        for name, chosen in formats.items()
        if chosen is not None
    ]
    return _constraint(_only_format(own), anthropic_calls(body.tool_choice, prompt), prompt, "messages")


def _constraint(
    answer: AnswerFormat | None, calls: CallRule | None, prompt: ChatPrompt, continued_by: str
) -> Constraint | None:
    """Return the constraint of a chat, None for none. ``continued_by``: the field by which a client has
    the answer continue a message of the assistant. Raises ApiError, which names that field, if the answer
    does so and is asked for a format or calls."""
    is_forced = calls is not None and calls.is_forced
    if is_forced:
        # An answer of calls has no text to format. Agents send the format for the turn after the calls.
        answer = None
    if answer is None and calls is None:
        return None
    asking = answer or (calls if is_forced else None)  # calls that are only allowed ask for nothing
    if asking is not None and prompt.continue_final_message:
        raise _conflict(asking.field, continued_by, "a continued message of the assistant has no format")
    # No rule for calls means that the model may call any tool. A format's grammar would exclude that, so a
    # rule that allows all tools goes with it.
    if answer is not None and calls is None and (names := names_of_tools(prompt)):
        calls = CallRule("tools", names, is_forced=False, at_most_one=False)
    return Constraint(answer, calls)


def _conflict(first: str, second: str, why: str) -> ApiError:
    return ApiError(400, f"{first} and {second}: {why}; leave one of them out", param=first)


# --- formats -----------------------------------------------------------------------------------------


def _only_format(answers: Sequence[AnswerFormat]) -> AnswerFormat | None:
    """Return the only format that was asked for; None for none. Raises ApiError for several."""
    if len(answers) > 1:
        raise _conflict(answers[0].field, answers[1].field, "only one of them can say what the answer is")
    return answers[0] if answers else None


def _openai_format(body: OpenAI) -> AnswerFormat | None:
    return _only_format(
        [*_response_format(body.response_format), *_vllm_formats(body), *_sglang_formats(body)]
    )


def _response_format(chosen: ResponseFormat | None) -> Sequence[AnswerFormat]:
    if chosen is None:
        return []
    name, described = "response_format.json_schema", chosen.json_schema
    if chosen.type == "json_schema" and described is None:
        raise InvalidField(name, None, "must be an object with a schema")
    schema = None if described is None else described.schema
    return _typed_format("response_format.type", chosen.type, f"{name}.schema", schema)


def _typed_format(
    type_name: str, kind: str, schema_name: str, schema: dict[str, Any] | str | None
) -> Sequence[AnswerFormat]:
    """Return the format of OpenAI's type ``kind``; nothing for "text". The names are the fields' paths."""
    if kind == "text":
        return []
    return [_any_object(type_name) if kind == "json_object" else _json_format(schema_name, schema)]


def _sglang_formats(fields: SglangFormat, path: str = "") -> Iterator[AnswerFormat]:
    if fields.json_schema == ANY_JSON_OBJECT:
        yield _any_object(f"{path}json_schema")
    elif fields.json_schema is not None:
        yield _json_format(f"{path}json_schema", fields.json_schema)
    yield from _text_formats(path, fields.regex, ebnf=fields.ebnf)


def _vllm_formats(body: VllmFormat) -> Iterator[AnswerFormat]:
    fields, path = body.structured_outputs or StructuredOutputs(), "structured_outputs."
    if fields.json is not None:
        yield _json_format(f"{path}json", fields.json)
    if fields.choice is not None:
        yield _choice_format(f"{path}choice", fields.choice)
    if fields.json_object:
        yield _any_object(f"{path}json_object")
    yield from _text_formats(path, fields.regex, grammar=fields.grammar)


def _text_formats(path: str, regex: str | None, **grammars: str | None) -> Iterator[AnswerFormat]:
    """Yield the formats of a regex and of ``grammars``, which are named as the fields are."""
    if regex is not None:
        yield AnswerFormat(f"{path}regex", FormatKind.REGEX, regex)
    for name, text in grammars.items():
        if text is not None:
            yield _grammar_format(f"{path}{name}", text)


def _any_object(name: str) -> AnswerFormat:
    """Return the format of any JSON object."""
    return AnswerFormat(name, FormatKind.JSON, '{"type":"object"}')


def _json_format(name: str, given: dict[str, Any] | str | None) -> AnswerFormat:
    schema: object = given
    if isinstance(given, str):
        try:
            check_nesting(given.encode())
            schema = read_json(given)
        except (ValueError, msgspec.DecodeError) as error:
            raise InvalidField(name, given, f"is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidField(name, schema, "must be a JSON schema, an object")
    if "x-guidance" in schema:
        rule = "must not have x-guidance: clients cannot set how schemas are enforced"
        raise InvalidField(name, schema, rule)
    return AnswerFormat(name, FormatKind.JSON, schema_text(name, schema))


def schema_text(name: str, schema: object) -> str:
    """Return the schema as JSON, with its numbers as spelled. Raises ApiError if it is too long."""
    # json.dumps is fast, so that write_json, which is not, gets a bounded schema.
    _check_length(name, json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
    text = write_json(schema)
    _check_length(name, text)
    return text


def _check_length(name: str, text: str) -> None:
    if (num_bytes := len(text.encode())) > MAX_SCHEMA_BYTES:
        raise FieldRefused(
            name, f"has {num_bytes} bytes of JSON; {MAX_SCHEMA_BYTES} are the most for a schema"
        )


def _choice_format(name: str, choices: Sequence[str]) -> AnswerFormat:
    if not choices:
        raise InvalidField(name, [], "must be a list with at least one string")
    found = tuple(dict.fromkeys(choices))
    if (num_chars := sum(map(len, found))) > MAX_CHOICE_CHARS:
        raise FieldRefused(name, f"has {num_chars} characters; {MAX_CHOICE_CHARS} are the most")
    return AnswerFormat(name, FormatKind.CHOICE, choices=found)


def _grammar_format(name: str, text: str) -> AnswerFormat:
    """Return the format of a grammar: in Lark's notation if it has a rule ``start``, else in GBNF, whose
    first rule is ``root``."""
    if _LARK.search(text):
        return AnswerFormat(name, FormatKind.LARK, text)
    if len(text) > MAX_GBNF_CHARS:
        raise InvalidField(name, text, f"must be a string of 1 to {MAX_GBNF_CHARS} characters")
    if (num_rules := text.count("::=")) > MAX_GBNF_RULES:
        raise FieldRefused(name, f"has {num_rules} rules; {MAX_GBNF_RULES} are the most")
    return AnswerFormat(name, FormatKind.GBNF, text)
