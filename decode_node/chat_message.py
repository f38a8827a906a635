"""A chat answer's text, taken apart as it comes: reasoning, content, tool calls.

Models write all three as one text with markup, each family its own (``MARKUPS``). What may yet turn out to be
markup is held back, so parts do not depend on how the text was cut into deltas. A call is shown once it is
complete; one that never is, or that cannot be read, stays content: nothing that was generated is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import msgspec

from protocol.detokenizer import overlap

THINK, END_OF_THINK = "<think>", "</think>"

Schemas = Mapping[str, Mapping[str, object]]
"""The JSON schemas of a tool's parameters, by the tool's name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``index``: among the calls of the answer. ``arguments``: a JSON object as text."""

    index: int
    name: str
    arguments: str


@dataclass(slots=True)
class Parts:
    """What a piece of text added."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass(frozen=True)
class Markup:
    """How a family of models writes tool calls: ``opening``, calls that end in ``call_end``, ``closing``.

    ``read(text, schemas)``: name and arguments of the one call before a ``call_end``; None for no call.
    """

    opening: str
    call_end: str
    closing: str
    read: Callable[[str, Schemas], tuple[str, dict[str, object]] | None]


# --- GLM --------------------------------------------------------------------------------------------------

_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_glm(text: str, schemas: Schemas) -> tuple[str, dict[str, object]] | None:
    """``name<arg_key>key</arg_key><arg_value>value</arg_value>...``, with line breaks between or without.

    Strings are written bare, everything else as JSON, and the tool's schema tells them apart.
    """
    name = text.partition("<arg_key>")[0].strip()
    if not name:
        return None
    of_parameters = schemas.get(name, {})
    arguments: dict[str, object] = {}
    for key, value in _GLM_ARGUMENT.findall(text):
        schema = of_parameters.get(key.strip())
        is_text = isinstance(schema, dict) and schema.get("type") == "string"
        arguments[key.strip()] = value if is_text else _from_json(value)
    return name, arguments


# --- DeepSeek-V3.2 ----------------------------------------------------------------------------------------

_DSML = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"
_DSML_CALL = re.compile(rf'<{_DSML}invoke name="([^"]+)">(.*)\Z', re.DOTALL)
_DSML_ARGUMENT = re.compile(
    rf'<{_DSML}parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</{_DSML}parameter>', re.DOTALL
)


def _read_dsml(text: str, schemas: Schemas) -> tuple[str, dict[str, object]] | None:
    """``<invoke name="..."><parameter name="..." string="true|false">value</parameter>``, with prefixes."""
    call = _DSML_CALL.search(text)
    if call is None:
        return None
    arguments = {
        key: value if is_text == "true" else _from_json(value)
        for key, is_text, value in _DSML_ARGUMENT.findall(call[2])
    }
    return call[1], arguments


def _from_json(text: str) -> object:
    """The value, or the text itself where it is no JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


MARKUPS: Final[Mapping[str, Markup]] = {
    "glm_moe_dsa": Markup("<tool_call>", "</tool_call>", "</tool_call>", _read_glm),
    "deepseek_v32": Markup(
        f"<{_DSML}function_calls>", f"</{_DSML}invoke>", f"</{_DSML}function_calls>", _read_dsml
    ),
}
"""By ``model_type``."""


# --- the parser -------------------------------------------------------------------------------------------


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()


class MessageParser:
    """One answer, of which all text is fed.

    ``in_reasoning``: the prompt ended within reasoning. ``separates_reasoning``: otherwise it is content like
    the rest. ``markup``: None when no tools were offered, and what looks like a call is content.
    """

    def __init__(
        self,
        *,
        in_reasoning: bool,
        markup: Markup | None,
        schemas: Schemas,
        separates_reasoning: bool = True,
    ) -> None:
        in_reasoning &= separates_reasoning
        self._state = _State.REASONING if in_reasoning else _State.CONTENT
        self._markup = markup
        self._schemas = schemas
        self._text = ""
        """Not shown yet."""
        self._num_searched = 0
        """Characters of it in which no marker begins."""
        self._at_start = separates_reasoning and not in_reasoning
        """Nothing but white space has come: reasoning may still begin."""
        self._skips_space = in_reasoning
        """White space beside markup is part of it."""
        self._opening = ""
        """What the calls that are being read began with, until the first of them is complete."""
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str, *, is_last: bool = False) -> Parts:
        self._text += text
        parts = Parts()
        while (found := self._next_marker()) is not None:
            self._take(*found, parts)
        if self._state is not _State.CALLS:
            num_shown = len(self._text) - max((overlap(self._text, m) for m in self._markers()), default=0)
            if not (self._at_start and self._text[:num_shown].isspace()):
                shown, self._text = self._text[:num_shown], self._text[num_shown:]
                self._num_searched = 0
                self._show(shown, parts)
        if is_last:
            self._show_held(parts)
        return parts

    def _show_held(self, parts: Parts) -> None:
        """What was held back: it is no markup after all, or a call without its end."""
        if self._state is _State.CALLS:
            self._state, self._skips_space = _State.CONTENT, not self._opening
            self._text = self._opening + self._text
        self._show(self._text, parts)
        self._text = ""

    def _markers(self) -> tuple[str, ...]:
        markup = self._markup
        if self._state is _State.REASONING:
            return (END_OF_THINK,)
        thinking = (THINK,) if self._at_start else ()
        if markup is None:
            return thinking
        if self._state is _State.CALLS:
            return (markup.call_end, markup.closing)
        # A second end of the same calls, which GLM writes at times, is no content.
        return (*thinking, markup.opening, *((markup.closing,) if self.has_calls else ()))

    def _next_marker(self) -> tuple[str, str] | None:
        """The text before the first marker, and the marker; both are taken from the text."""
        markers = self._markers()
        found = [
            (at, marker) for marker in markers if (at := self._text.find(marker, self._num_searched)) >= 0
        ]
        found = [(at, marker) for at, marker in found if marker != THINK or not self._text[:at].strip()]
        if not found:
            longest = max(map(len, markers), default=1)
            self._num_searched = max(0, len(self._text) - longest + 1)
            return None
        at, marker = min(found)
        before, self._text = self._text[:at], self._text[at + len(marker) :]
        self._num_searched = 0
        return before, marker

    def _take(self, before: str, marker: str, parts: Parts) -> None:
        match self._state:
            case _State.CALLS:
                self._end_call(before, marker, parts)
                return
            case _State.REASONING:
                self._show(before, parts)
                self._state = _State.CONTENT
            case _State.CONTENT if marker == THINK:
                self._state = _State.REASONING
            case _State.CONTENT:
                self._show(before, parts)
                if self._markup is not None and marker == self._markup.opening:
                    self._state, self._opening = _State.CALLS, marker
        self._at_start, self._skips_space = False, True

    def _end_call(self, before: str, marker: str, parts: Parts) -> None:
        markup = self._markup
        assert markup is not None
        read = markup.read(before, self._schemas) if marker == markup.call_end else None
        if read is not None:
            name, arguments = read
            parts.calls.append(ToolCall(self._num_calls, name, msgspec.json.encode(arguments).decode()))
            self._num_calls += 1
        elif before.strip():
            self._skips_space = False
            parts.content += self._opening + before + marker
        self._opening = ""
        if marker == markup.closing:
            self._state, self._skips_space = _State.CONTENT, True

    def _show(self, text: str, parts: Parts) -> None:
        if self._skips_space:
            text = text.lstrip()
        if not text:
            return
        self._skips_space = self._at_start = False
        if self._state is _State.REASONING:
            parts.reasoning += text
        else:
            parts.content += text
