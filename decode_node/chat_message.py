"""A chat answer's text, taken apart as it comes: reasoning, content, tool calls.

Models write all three as one text with markup, each family its own (``MARKUPS``). What may yet turn out to be
markup is held back, so parts do not depend on how the text was cut into deltas. A call is shown once it is
complete; one that never is, or that cannot be read, stays content: nothing that was generated is lost.
"""

from __future__ import annotations

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


def _read_glm(text: str, schemas: Schemas) -> tuple[str, dict[str, object]] | None:
    """``name<arg_key>key</arg_key><arg_value>value</arg_value>...``, with line breaks between or without.

    Strings are written bare, everything else as JSON, and the tool's schema tells them apart.
    """
    name, *_ = text.partition("<arg_key>")
    of_parameters = schemas.get(name.strip(), {})
    arguments: dict[str, object] = {}
    at = len(name)
    while (found := _between(text, at, "<arg_key>", "</arg_key>")) is not None:
        key, at = found[0].strip(), found[1]
        found = _between(text, at, "<arg_value>", "</arg_value>")
        if found is None:
            return None
        value, at = found
        schema = of_parameters.get(key)
        is_text = isinstance(schema, dict) and schema.get("type") == "string"
        arguments[key] = value if is_text else _from_json(value)
    return (name.strip(), arguments) if name.strip() and not text[at:].strip() else None


# --- DeepSeek-V3.2 ----------------------------------------------------------------------------------------

_DSML = "\N{FULLWIDTH VERTICAL LINE}DSML\N{FULLWIDTH VERTICAL LINE}"


def _read_dsml(text: str, schemas: Schemas) -> tuple[str, dict[str, object]] | None:
    """``<invoke name="..."><parameter name="..." string="true|false">value</parameter>``, with prefixes."""
    call = _between(text, 0, f'<{_DSML}invoke name="', '">')
    if call is None:
        return None
    name, at = call
    arguments: dict[str, object] = {}
    while (found := _between(text, at, f'<{_DSML}parameter name="', ">")) is not None:
        (key, _, attributes), at = found[0].partition('"'), found[1]
        end = text.find(f"</{_DSML}parameter>", at)
        if end < 0:
            return None
        value = text[at:end]
        arguments[key] = value if 'string="true"' in attributes else _from_json(value)
        at = end + len(f"</{_DSML}parameter>")
    return (name, arguments) if name and not text[at:].strip() else None


def _between(text: str, at: int, opening: str, closing: str) -> tuple[str, int] | None:
    """What is between the two that stand next behind ``at``, and where they end. White space may precede.

    By searching, not by regular expressions: a model can be made to write a megabyte of openings.
    """
    start = text.find(opening, at)
    if start < 0 or text[at:start].strip():
        return None
    start += len(opening)
    end = text.find(closing, start)
    return None if end < 0 else (text[start:end], end + len(closing))


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
        self._searched: list[str] = []
        """What precedes it of the calls that are being read: no marker begins in it."""
        self._at_start = separates_reasoning and not in_reasoning
        """Nothing but white space has come: reasoning may still begin."""
        self._skips_space = in_reasoning
        """White space beside markup is part of it."""
        self._opening = ""
        """What the calls that are being read began with, until the first of them is complete."""
        self._is_broken = False
        """One of them is shown as text; so is their end."""
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
                self._show(shown, parts)
        if is_last:
            self._show_held(parts)
        return parts

    def _show_held(self, parts: Parts) -> None:
        """What was held back: it is no markup after all, or a call without its end."""
        if self._state is _State.CALLS:
            self._state, self._skips_space = _State.CONTENT, not self._opening
            self._text = self._opening + "".join((*self._searched, self._text))
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
        found = [(at, marker) for marker in markers if (at := self._text.find(marker)) >= 0]
        found = [(at, marker) for at, marker in found if marker != THINK or not self._text[:at].strip()]
        if not found:
            if self._state is _State.CALLS:  # long ones come in many pieces: none is looked at twice
                num_kept = max(map(len, markers)) - 1
                self._searched.append(self._text[:-num_kept])
                self._text = self._text[-num_kept:]
            return None
        at, marker = min(found)
        before, self._text = "".join((*self._searched, self._text[:at])), self._text[at + len(marker) :]
        self._searched.clear()
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
                    self._state, self._opening, self._is_broken = _State.CALLS, marker, False
        self._at_start, self._skips_space = False, True

    def _end_call(self, before: str, marker: str, parts: Parts) -> None:
        markup = self._markup
        assert markup is not None
        read = markup.read(before, self._schemas) if marker == markup.call_end else None
        if read is not None:
            name, arguments = read
            parts.calls.append(ToolCall(self._num_calls, name, msgspec.json.encode(arguments).decode()))
            self._num_calls += 1
        elif before.strip() or self._is_broken:
            self._is_broken = True
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
