"""Takes a chat answer's text apart as it comes: into reasoning, content and tool calls.

Each answer to a chat has a ``MessageParser`` (``chat_reading.py``), which is fed with each piece of text and
returns what it changes in the answer's blocks. A generator (``Reading``) yields the marks to look for, and is
sent each mark that is found and the text between them; calls are read by a ``CallReader``. Text that may be
the beginning of a mark is withheld, so blocks do not depend on how the text was cut into deltas. Every
character is searched once, and those that may begin a mark once more: the work for a piece of text is
proportional to its length, whatever came before it.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import cache

from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.serving.api.answer_blocks import Block, BlockChange, BlockKind, BlockList
from hisparse_pd.serving.api.call_reader import CallReader, Marks, Piece, Reading
from hisparse_pd.serving.api.chat_format import THINK, Markup, ThinkMarks
from hisparse_pd.serving.api.raw_json import is_object
from hisparse_pd.serving.api.tool_schemas import ToolSchemas


class _Reasoning(Enum):
    """Where the text that comes next stands: within reasoning or behind it."""

    OPEN = auto()
    INTERRUPTED = auto()
    """Calls came before reasoning was closed. Text is content, and the closing mark may still come."""
    CLOSED = auto()


class MessageParser:
    """Parses one answer."""

    def __init__(
        self,
        *,
        in_reasoning: bool,
        markup: Markup | None,
        schemas: ToolSchemas,
        separates_reasoning: bool = True,
        think: ThinkMarks = THINK,
    ) -> None:
        """``in_reasoning``: the prompt ended within reasoning. ``markup`` is None if no tools are offered:
        text that looks like a call is content then. Without ``separates_reasoning``, reasoning is content.
        """
        self._reasoning = _Reasoning.OPEN if in_reasoning and separates_reasoning else _Reasoning.CLOSED
        self._markup = markup
        self._openings = markup.openings if markup is not None else ()
        self._think = think
        self._schemas = schemas
        self._blocks = BlockList()
        self._is_at_start = separates_reasoning
        """Whether only white space and opening marks of reasoning have come. Where the prompt ends with such
        a mark, models repeat it."""
        self._space: list[str] = []
        """White space at the start, which is content unless reasoning follows."""
        self._withheld = ""
        """Text that may be the beginning of a mark; it is read with the next text."""
        self._skips_space = False
        """Whether white space that comes next belongs to the markup before it and is dropped."""
        self._calls: CallReader | None = None
        """The reader of the calls that have begun; None outside of calls."""
        self._reading = self._read_message()
        self._marks: Marks = () if self._is_at_start else next(self._reading)
        """The marks to look for next; the answer's start is read without the generator (``_read_start``)."""

    @property
    def has_calls(self) -> bool:
        return self._blocks.num_of[BlockKind.CALL] > 0

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._calls is not None and self._calls.is_in_call

    @property
    def blocks(self) -> list[Block]:
        return self._blocks.blocks

    def feed(
        self, text: str, finish: FinishReason | None = None, *, at_stop_string: bool = False
    ) -> list[BlockChange]:
        """Take in ``text``, and return what it changes (``BlockList.take``). ``finish``: why the answer ends
        with this text; None if it goes on. ``at_stop_string``: whether one of the client's stop strings ended
        it, which may be anywhere."""
        text, self._withheld = self._withheld + text, ""
        is_cut = finish is FinishReason.LENGTH
        unread = self._read_start(text) if self._is_at_start else text
        if unread is not None:
            self._read(unread)
        if finish is not None:
            self._finish(is_cut=is_cut, at_stop_string=at_stop_string)
            self._blocks.end(is_cut=is_cut)
        return self._blocks.take()

    def _read_start(self, text: str) -> str | None:
        """Read ``text`` at the answer's start, as far as it is white space or opening marks of reasoning.
        Returns the text from which on the message is to be read, with the start's white space before it; None
        while the start goes on."""
        openings = _match_openings(text, self._think)
        if self._think.opening in openings:
            self._space.clear()
            self._reasoning = _Reasoning.OPEN
        else:
            self._space.append(openings)
        begun = text[len(openings) :]
        if self._think.opening.startswith(begun):  # empty, or the beginning of what may be another mark
            self._withheld = begun
            return None
        return self._leave_start() + begun

    def _leave_start(self) -> str:
        """Leave the answer's start, and begin to read the message. Returns the start's white space, which is
        to be read next."""
        self._is_at_start = False
        self._skips_space = self._reasoning is _Reasoning.OPEN
        self._marks = next(self._reading)
        space = "".join(self._space)
        self._space.clear()
        return space

    def _read(self, text: str) -> None:
        """Split ``text`` at marks, and withhold its end if a mark may begin there."""
        # Whole marks.
        at = 0
        while (found := search(self._marks, text, at)) is not None:
            self._send(text[at : found.start()])
            # The text before the mark may have changed which marks count.
            self._send(found.group(), is_mark=found.group() in self._marks)
            at = found.end()
        # The rest, up to what may begin a mark.
        tail = text[max(at, len(text) - max(map(len, self._marks), default=0)) :]
        end = len(text) - max((_overlap(tail, mark) for mark in self._marks), default=0)
        self._withheld = text[end:]
        self._send(text[at:end])

    def _send(self, text: str, *, is_mark: bool = False) -> None:
        if text:
            self._marks = self._reading.send(Piece(text, is_mark))

    def _read_message(self) -> Reading[None]:
        """Read the message as a generator of the marks to look for: reasoning, text, and calls by a
        CallReader."""
        while True:
            text, is_mark = yield self._message_marks()
            if not is_mark:
                self._show(text)
                continue
            while text in self._openings and self._markup is not None:
                text = yield from self._read_calls(self._markup, text)
            if text:  # the mark that ends reasoning, or a second one that ends calls
                self._skips_space = True
                if text == self._think.closing:
                    self._reasoning = _Reasoning.CLOSED

    def _read_calls(self, markup: Markup, opening: str) -> Reading[str]:
        """Read calls behind their ``opening``. Returns the mark that ended them, if it is not theirs and is
        to be read next; else an empty string."""
        calls = self._calls = CallReader(markup, self._schemas, opening, self._blocks)
        is_closed = self._reasoning is _Reasoning.CLOSED
        end = yield from calls.read(() if is_closed else (self._think.closing,))
        if not end.is_whole:
            self._show_as_text(calls)
            return end.mark
        self._skips_space = True
        self._calls = None
        if not is_closed:
            self._reasoning = _Reasoning.INTERRUPTED
        return end.mark

    def _message_marks(self) -> Marks:
        """Return the marks to look for outside of calls."""
        closing, markup = self._think.closing, self._markup
        if self._reasoning is _Reasoning.OPEN:
            return (closing, *(self._openings if markup is not None and markup.ends_reasoning else ()))
        if markup is None:
            return ()
        marks = [*self._openings]
        if self.has_calls:  # GLM sometimes writes the mark that ends calls twice; the second is no content
            marks.append(markup.closing)
        if self._reasoning is _Reasoning.INTERRUPTED:
            marks.append(closing)
        return tuple(marks)

    def _show_as_text(self, calls: CallReader) -> None:
        """Show what ``calls`` has read and not shown: it is no call, and belongs to the text before it."""
        self._skips_space = calls.num_calls > 0  # white space behind a call belongs to the markup
        self._show(calls.unshown)
        self._calls = None

    def _show(self, text: str) -> None:
        if self._skips_space:
            text = text.lstrip()
        if text:
            self._skips_space = False
            is_reasoning = self._reasoning is _Reasoning.OPEN
            self._blocks.add(BlockKind.REASONING if is_reasoning else BlockKind.TEXT, text)

    def _finish(self, *, is_cut: bool, at_stop_string: bool) -> None:
        """Show the withheld text unless it is markup. Where the answer ``is_cut``, a possible beginning of
        markup is taken for markup. Within a call that has not ended, the withheld text is dropped."""
        markup, calls = self._markup, self._calls
        withheld, self._withheld = self._withheld, ""
        if self._is_at_start:
            self._show(self._leave_start() + withheld)
        elif markup is None or calls is None:
            if not (is_cut and markup is not None and markup.sign in withheld):
                self._show(withheld)
        elif not is_cut and not calls.is_in_call:  # no call followed the opening
            self._show_as_text(calls)
            self._show(withheld)
        elif not is_cut and markup.ends_with_answer and self._is_call_over(at_stop_string):
            self._send(markup.call_end, is_mark=True)

    def _is_call_over(self, at_stop_string: bool) -> bool:
        """Whether the end of the answer is the end of the open call. A stop string may end the answer within
        a call, whose arguments are then no whole object."""
        return not at_stop_string or is_object(self.blocks[-1].text)


def _match_openings(text: str, think: ThinkMarks) -> str:
    """Return the white space and opening marks of reasoning that ``text`` begins with."""
    found = re.match(rf"\s*({re.escape(think.opening)}\s*)*", text)
    return found.group() if found is not None else ""


def search(marks: Marks, text: str, at: int) -> re.Match[str] | None:
    """Return the first match of any of ``marks`` in ``text`` from index ``at`` on; None without one."""
    return _pattern(marks).search(text, at) if marks else None


@cache
def _pattern(marks: Marks) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of ``text`` with which ``mark`` begins; all of ``mark`` does not
    count."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
