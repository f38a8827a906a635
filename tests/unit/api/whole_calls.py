"""What a whole call says, read at once: the reference for the reader of streams.

Each function gives the name of one call's text, up to the mark that ends it, and the arguments as JSON text;
None for no call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

from hisparse_pd.api.chat_format import DSML, V31, ToolMarkup
from hisparse_pd.api.tool_schemas import ToolSchemas


def read_glm(text: str, schemas: ToolSchemas) -> tuple[str, str] | None:
    written_name, *_ = text.partition("<arg_key>")
    name = written_name.strip()
    arguments: list[tuple[str, str]] = []
    at = len(written_name)
    while (found := _between(text, at, "<arg_key>", "</arg_key>")) is not None:
        key, at = found[0].strip(), found[1]
        found = _between(text, at, "<arg_value>", "</arg_value>")
        if found is None:
            return None
        value, at = found
        arguments.append((key, schemas.to_json(name, key, value)))
    return (name, _object(arguments)) if name and not text[at:].strip() else None


def read_dsml(text: str, schemas: ToolSchemas) -> tuple[str, str] | None:
    call = _between(text, 0, f'<{DSML}invoke name="', '">')
    if call is None:
        return None
    name, at = call
    arguments: list[tuple[str, str]] = []
    while (found := _between(text, at, f'<{DSML}parameter name="', '">')) is not None:
        (key, _, is_string), at = found[0].partition('" string="'), found[1]
        end = text.find(f"</{DSML}parameter>", at)
        if end < 0 or key in dict(arguments):
            return None
        value = text[at:end]
        arguments.append(
            (key, _quoted(value) if is_string == "true" or not _is_json(value) else value.strip())
        )
        at = end + len(f"</{DSML}parameter>")
    return (name, _object(arguments)) if name and not text[at:].strip() else None


def read_deepseek_v31(text: str, schemas: ToolSchemas) -> tuple[str, str] | None:
    text = text.strip()
    name, separator, arguments = text.removeprefix(V31.CALL).partition(V31.SEPARATOR)
    is_call = text.startswith(V31.CALL) and separator and name.strip() and _is_json(arguments)
    return (name.strip(), arguments.strip()) if is_call else None


def _between(text: str, at: int, opening: str, closing: str) -> tuple[str, int] | None:
    start = text.find(opening, at)
    if start < 0 or text[at:start].strip():
        return None
    start += len(opening)
    end = text.find(closing, start)
    return None if end < 0 else (text[start:end], end + len(closing))


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _object(arguments: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{_quoted(key)}: {value}" for key, value in arguments) + "}"


READERS: Final[Mapping[ToolMarkup, Callable[[str, ToolSchemas], tuple[str, str] | None]]] = {
    ToolMarkup.GLM: read_glm,
    ToolMarkup.DSML: read_dsml,
    ToolMarkup.DEEPSEEK_V31: read_deepseek_v31,
}
