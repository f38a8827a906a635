"""A chat answer's text, taken apart as it comes: reasoning, content, tool calls.

What may yet turn out to be markup is held back, so blocks do not depend on how the text was cut into deltas.
Every character is searched once, and those that a marker may begin with once more: the work for a piece of
text follows its own length, whatever came before it.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import cache

from hisparse_pd.api.answer_blocks import Block, BlockKind, BlockList, Change
from hisparse_pd.api.call_reader import CallReader
from hisparse_pd.api.chat_format import THINK, Markup, ThinkMarks
from hisparse_pd.api.detokenizer import overlap
from hisparse_pd.api.tool_schemas import ToolSchemas
from hisparse_pd.vocabulary import FinishReason


class _State(Enum):
    START = auto()
    """Nothing but white space and what opens reasoning has come; models repeat the opening of the prompt."""
    REASONING = auto()
    CONTENT = auto()
    CALLS = auto()


class MessageParser:
    """One answer, of which all text is fed.

    ``in_reasoning``: the prompt ended within reasoning. ``separates_reasoning``: otherwise it is content like
    the rest. ``markup``: None when no tools were offered, and what looks like a call is content. ``think``:
    the marks of reasoning.
    """

    def __init__(
        self,
        *,
        in_reasoning: bool,
        markup: Markup | None,
        schemas: ToolSchemas,
        separates_reasoning: bool = True,
        think: ThinkMarks = THINK,
    ) -> None:
        self._state = _State.START if separates_reasoning else _State.CONTENT
        self._behind_start = _State.REASONING if in_reasoning else _State.CONTENT
        self._markup = markup
        self._think = think
        self._schemas = schemas
        self._list = BlockList()
        self._space: list[str] = []
        """White space at the start, which is content unless reasoning follows."""
        self._withheld = ""
        """Behind what was read: it may be the beginning of a marker."""
        self._skips_space = False
        """White space beside markup is part of it."""
        self._calls: CallReader | None = None
        """The calls that are read, or the last ones."""
        self._interrupts = False
        """The calls stand in reasoning, which they end."""
        self._is_reasoning_open = False
        """Calls came before the end of reasoning."""
        self.has_calls = False

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._calls is not None and self._calls.is_in_call

    @property
    def blocks(self) -> list[Block]:
        return self._list.blocks

    def feed(self, text: str, finish: FinishReason | None = None) -> list[tuple[Change, Block, str]]:
        """What ``text`` changes, as of ``BlockList.take``. ``finish``: nothing follows, for this reason."""
        text, self._withheld = self._withheld + text, ""
        unread = self._begin(text) if self._state is _State.START else text
        if unread is not None:
            self._read(unread)
        if finish is not None:
            self._finish(is_cut=finish is FinishReason.LENGTH)
            self._list.end(is_cut=finish is FinishReason.LENGTH)
        return self._list.take()

    def _begin(self, text: str) -> str | None:
        """What is to be read, once it is known what the answer begins with; None before."""
        openings = _match_openings(text, self._think)
        if self._think.opening in openings:
            self._space.clear()
            self._behind_start = _State.REASONING
        else:
            self._space.append(openings)
        begun = text[len(openings) :]
        if self._think.opening.startswith(begun):
            self._withheld = begun
            return None
        return self._leave_start() + begun

    def _leave_start(self) -> str:
        """The white space of the start, which is to be read next."""
        self._state = self._behind_start
        self._skips_space = self._state is _State.REASONING
        space = "".join(self._space)
        self._space.clear()
        return space

    def _read(self, text: str) -> None:
        at = 0
        while (found := _search(self._marks(), text, at)) is not None:
            self._take(text[at : found.start()], found.group())
            at = found.end()
        marks = self._marks()
        tail = text[max(at, len(text) - max(map(len, marks), default=0)) :]
        end = len(text) - max((overlap(tail, mark) for mark in marks), default=0)
        self._withheld = text[end:]
        self._grow(text[at:end])

    def _marks(self) -> tuple[str, ...]:
        markup, calls, end_of_think = self._markup, self._calls, self._think.closing
        if self._state is _State.REASONING and (markup is None or not markup.ends_reasoning):
            return (end_of_think,)
        if markup is None:
            return ()
        if self._state is _State.REASONING:
            return (end_of_think, *markup.openings)
        if self._state is _State.CALLS and calls is not None:
            return (*calls.marks, *((end_of_think,) if self._is_reasoning_open and calls.is_in_name else ()))
        # A second end of the same calls, which GLM writes at times, is no content.
        return (
            *markup.openings,
            *((markup.closing,) if self.has_calls else ()),
            *((end_of_think,) if self._is_reasoning_open else ()),
        )

    def _take(self, before: str, mark: str) -> None:
        """``before``: what stands between the last marker and this one."""
        self._grow(before)
        if mark not in self._marks():  # what came before it says that it is none
            self._grow(mark)
            return
        markup, calls = self._markup, self._calls
        is_opening = markup is not None and mark in markup.openings
        if self._state is _State.CALLS and calls is not None:
            if calls.is_in_call or (not is_opening and mark != self._think.closing):
                calls.meet(mark)
                self.has_calls |= calls.num_calls > 0
                if calls.is_over:
                    self._state, self._skips_space = _State.CONTENT, True
                if not (calls.is_over and is_opening):  # otherwise it opens the next call, too
                    return
            else:
                self._give_up()
        if markup is not None and is_opening:
            self._interrupts = self._state is _State.REASONING
            self._is_reasoning_open |= self._interrupts
            self._calls = CallReader(markup, self._schemas, mark, self._list)
            self._state = _State.CALLS
        else:
            self._is_reasoning_open &= mark != self._think.closing
            self._state, self._skips_space = _State.CONTENT, True

    def _grow(self, text: str) -> None:
        if self._state is _State.CALLS and self._calls is not None:
            self._calls.grow(text)
            if self._calls.is_no_call:
                self._give_up()
        else:
            self._show(text)

    def _give_up(self) -> None:
        """What was taken for a call, and is none, belongs to what came before it."""
        assert self._calls is not None
        self._state = _State.REASONING if self._interrupts else _State.CONTENT
        self._is_reasoning_open &= not self._interrupts
        self._skips_space = self._calls.num_calls > 0
        self._show(self._calls.unshown())
        self._calls = None

    def _show(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if text:
            self._skips_space = False
            is_reasoning = self._state is _State.REASONING
            self._list.add(BlockKind.REASONING if is_reasoning else BlockKind.TEXT, text)

    def _finish(self, *, is_cut: bool) -> None:
        """Show what was held back and is no markup after all.

        ``is_cut``: the answer would have gone on, so what may be markup is taken for it.
        """
        withheld, self._withheld = self._withheld, ""
        if self._state is _State.START:
            withheld = self._leave_start() + withheld
        elif self._state is _State.CALLS and self._calls is not None:
            if is_cut or self._calls.is_in_call:
                if self._markup is not None and self._markup.ends_with_answer and not is_cut:
                    self._calls.meet(self._markup.call_end)
                return
            self._give_up()
        elif is_cut and self._markup is not None and self._markup.sign in withheld:
            return
        self._show(withheld)


def _match_openings(text: str, think: ThinkMarks) -> str:
    found = re.match(rf"\s*({re.escape(think.opening)}\s*)*", text)
    return found.group() if found is not None else ""


def _search(marks: tuple[str, ...], text: str, at: int) -> re.Match[str] | None:
    return _pattern(marks).search(text, at) if marks else None


@cache
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))
