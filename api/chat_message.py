"""A chat answer's text, taken apart as it comes: reasoning, content, tool calls.

Models write all three as one text with markup, each family its own (``tool_markup``). What may yet turn out
to be markup is held back, so parts do not depend on how the text was cut into deltas. A call is shown once it
is complete; one that never is, or that cannot be read, stays content: nothing that was generated is lost.

Every character is searched once, and those that a marker may begin with once more: the work for a piece of
text follows its own length, whatever came before it. A call's text is read once more at its end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache

from api.chat_format import END_OF_THINK, THINK
from api.detokenizer import overlap
from api.tool_markup import Markup
from api.tool_schemas import ToolSchemas


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


class _State(Enum):
    START = auto()
    """Nothing but white space has come: reasoning may still begin."""
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()
    VALUE = auto()
    """Of a call: nothing in it is markup."""


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
        schemas: ToolSchemas,
        separates_reasoning: bool = True,
    ) -> None:
        self._state = _State.START if separates_reasoning else _State.CONTENT
        if separates_reasoning and in_reasoning:
            self._state = _State.REASONING
        self._markup = markup
        self._schemas = schemas
        self._pending: list[str] = []
        """Of a call that is being read, or of white space at the start: pieces that hold no marker."""
        self._held = ""
        """Behind them, or behind what was shown: it may be the beginning of a marker."""
        self._skips_space = self._state is _State.REASONING
        """White space beside markup is part of it."""
        self._opening = ""
        """What the calls that are being read began with, until the first of them is complete."""
        self._is_broken = False
        """One of them is shown as text; so is their end."""
        self._num_calls = 0
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str, *, is_last: bool = False) -> Parts:
        text, self._held = self._held + text, ""
        at = self._begin(text) if self._state is _State.START else 0
        if at is not None:
            if self._pending and self._state is _State.CONTENT:  # no reasoning came behind the white space
                text = "".join((*self._pending, text))
                self._pending.clear()
            self._read(text, at)
        if is_last:
            self._show_held()
        parts = Parts("".join(self._reasoning), "".join(self._content), self._calls)
        self._reasoning, self._content, self._calls = [], [], []
        return parts

    def _begin(self, text: str) -> int | None:
        """Where to read on once it is known what the answer begins with; None before."""
        begun = text.lstrip()
        if begun.startswith(THINK):
            self._pending.clear()
            self._state, self._skips_space = _State.REASONING, True
            return len(text) - len(begun) + len(THINK)
        if THINK.startswith(begun):  # or nothing but white space
            self._pending.append(text[: len(text) - len(begun)])
            self._held = begun
            return None
        self._state = _State.CONTENT
        return 0

    def _read(self, text: str, at: int) -> None:
        while (found := _search(self._marks(), text, at)) is not None:
            self._take(text[at : found.start()], found.group())
            at = found.end()
        marks = self._marks()
        tail = text[max(at, len(text) - max(map(len, marks), default=0)) :]
        end = len(text) - max((overlap(tail, mark) for mark in marks), default=0)
        self._held = text[end:]
        if self._state in (_State.CALLS, _State.VALUE):
            self._pending.append(text[at:end])
        else:
            self._show(text[at:end])

    def _marks(self) -> tuple[str, ...]:
        """What is markup here."""
        markup = self._markup
        if self._state is _State.REASONING:
            return (END_OF_THINK,)
        if markup is None:
            return ()
        value = markup.value
        if self._state is _State.VALUE and value is not None:
            return value[1:]
        if self._state is _State.CALLS:
            return (markup.call_end, markup.closing, *(value[:1] if value is not None else ()))
        # A second end of the same calls, which GLM writes at times, is no content.
        return (*markup.openings, *((markup.closing,) if self.has_calls else ()))

    def _take(self, before: str, mark: str) -> None:
        """``before``: what stands between the last marker and this one."""
        markup = self._markup
        match self._state:
            case _State.CALLS | _State.VALUE:
                assert markup is not None
                self._pending.append(before)
                if mark in (markup.call_end, markup.closing):
                    self._end_call(markup, mark)
                else:
                    self._pending.append(mark)
                    self._state = _State.VALUE if self._state is _State.CALLS else _State.CALLS
                return
            case _State.REASONING:
                self._show(before)
                self._state = _State.CONTENT
            case _:
                self._show(before)
                if markup is not None and mark in markup.openings:
                    self._state, self._opening, self._is_broken = _State.CALLS, mark, False
        self._skips_space = True

    def _end_call(self, markup: Markup, mark: str) -> None:
        text = "".join(self._pending)
        self._pending.clear()
        call = markup.read(text, self._schemas) if mark == markup.call_end else None
        if call is not None:
            self._calls.append(ToolCall(self._num_calls, *call))
            self._num_calls += 1
        elif text.strip() or self._is_broken:
            self._is_broken = True
            self._content += (self._opening, text, mark)
        self._opening = ""
        if mark == markup.closing:
            self._state, self._skips_space = _State.CONTENT, True

    def _show(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if not text:
            return
        self._skips_space = False
        (self._reasoning if self._state is _State.REASONING else self._content).append(text)

    def _show_held(self) -> None:
        """What was held back: it is no markup after all, or a call without its end."""
        if self._state in (_State.CALLS, _State.VALUE):
            self._state, self._skips_space = _State.CONTENT, not self._opening
            self._pending.insert(0, self._opening)
        self._show("".join((*self._pending, self._held)))
        self._pending.clear()
        self._held = ""


def _search(marks: tuple[str, ...], text: str, at: int) -> re.Match[str] | None:
    """The first of ``marks`` from ``at`` on."""
    return _pattern(marks).search(text, at) if marks else None


@cache
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))
