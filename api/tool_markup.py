"""How families of models write tool calls, and what such a call says.

Reading goes by searching, not by regular expressions: a model can be made to write a megabyte of openings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from api.chat_format import DSML, V31, ToolMarkup
from api.tool_schemas import ToolSchemas

ReadCall = Callable[[str, ToolSchemas], tuple[str, str] | None]
"""Name, and arguments as a JSON object, of the one call that a text is; None for no call."""


@dataclass(frozen=True)
class Markup:
    """Calls stand between one of ``openings`` and ``closing``, and each ends with ``call_end``.

    ``value``: what a value within a call begins and ends with, in which nothing else is markup; None where
    the family's own parsers do not look for that either.
    """

    openings: tuple[str, ...]
    call_end: str
    closing: str
    read: ReadCall
    value: tuple[str, str] | None = None


def _read_glm(text: str, schemas: ToolSchemas) -> tuple[str, str] | None:
    """``name<arg_key>key</arg_key><arg_value>value</arg_value>...``, with line breaks between or without.

    Strings are written bare, everything else as JSON, and the tool's schema tells them apart.
    """
    written_name, *_ = text.partition("<arg_key>")
    name = written_name.strip()
    arguments: dict[str, str] = {}
    at = len(written_name)
    while (found := _between(text, at, "<arg_key>", "</arg_key>")) is not None:
        key, at = found[0].strip(), found[1]
        found = _between(text, at, "<arg_value>", "</arg_value>")
        if found is None:
            return None
        value, at = found
        arguments[key] = schemas.to_json(name, key, value)
    return (name, _object(arguments)) if name and not text[at:].strip() else None


def _read_dsml(text: str, schemas: ToolSchemas) -> tuple[str, str] | None:
    """``<invoke name="..."><parameter name="..." string="true|false">value</parameter>``, with prefixes.

    A parameter that comes twice makes no call, as its authors have it.
    """
    call = _between(text, 0, f'<{DSML}invoke name="', '">')
    if call is None:
        return None
    name, at = call
    arguments: dict[str, str] = {}
    while (found := _between(text, at, f'<{DSML}parameter name="', '">')) is not None:
        (key, _, is_string), at = found[0].partition('" string="'), found[1]
        end = text.find(f"</{DSML}parameter>", at)
        if end < 0 or key in arguments:
            return None
        value = text[at:end]
        arguments[key] = _string(value) if is_string == "true" else _json_or_string(value)
        at = end + len(f"</{DSML}parameter>")
    return (name, _object(arguments)) if name and not text[at:].strip() else None


def _read_deepseek_v31(text: str, schemas: ToolSchemas) -> tuple[str, str] | None:
    """``<begin>name<sep>{...}``: the arguments are a JSON object as it stands."""
    text = text.strip()
    name, separator, arguments = text.removeprefix(V31.CALL).partition(V31.SEPARATOR)
    is_call = text.startswith(V31.CALL) and separator and name.strip()
    if not is_call or not isinstance(_from_json(arguments), dict):
        return None
    return name.strip(), arguments.strip()


def _between(text: str, at: int, opening: str, closing: str) -> tuple[str, int] | None:
    """What is between the two that stand next behind ``at``, and where they end. White space may precede."""
    start = text.find(opening, at)
    if start < 0 or text[at:start].strip():
        return None
    start += len(opening)
    end = text.find(closing, start)
    return None if end < 0 else (text[start:end], end + len(closing))


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_or_string(text: str) -> str:
    """As it stands where it is JSON: 1.0 stays 1.0."""
    return _string(text) if _from_json(text) is _NO_JSON else text.strip()


_NO_JSON: Final = object()


def _from_json(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _NO_JSON


def _object(arguments: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{_string(key)}: {value}" for key, value in arguments.items()) + "}"


MARKUPS: Final[Mapping[ToolMarkup, Markup]] = {
    ToolMarkup.GLM: Markup(("<tool_call>",), "</tool_call>", "</tool_call>", _read_glm),
    ToolMarkup.DSML: Markup(
        (f"\n\n<{DSML}function_calls>", f"<{DSML}function_calls>"),  # the empty line belongs to it
        f"</{DSML}invoke>",
        f"</{DSML}function_calls>",
        _read_dsml,
        (f"<{DSML}parameter ", f"</{DSML}parameter>"),
    ),
    ToolMarkup.DEEPSEEK_V31: Markup((V31.CALLS,), V31.END_OF_CALL, V31.END_OF_CALLS, _read_deepseek_v31),
}
