"""Reads tool calls from an answer's text as it comes: shows the name at once, then arguments as JSON text.

``MessageParser`` (``chat_message.py``) makes a ``CallReader`` at each mark that opens calls and drives its
``read``, a generator. Calls go into the answer's ``BlockList``. GLM's
``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>`` opens a block of the name ``f`` at
``<arg_key>``. The block grows by ``{"x": `` at ``<arg_value>``, by ``1`` at ``</arg_value>``, and by ``}`` at
``</tool_call>``.

- What has been shown is never taken back. An argument is therefore withheld as long as it may be JSON or a
  string, until its end decides.
- A call has a name; markup around a text without one is shown as content.
- From a fault on, the rest of a call is shown in its arguments as it stands, with the mark that ends the
  call. The arguments are no JSON then, so that no client takes them for what the model meant.
- A call that is cut off keeps the arguments that were certain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from hisparse_pd.protocol.decoding import TypedDecoder, decode_json
from hisparse_pd.serving.api.answer_blocks import BlockKind, BlockList
from hisparse_pd.serving.api.chat_format import STRING_ATTRIBUTE, Markup
from hisparse_pd.serving.api.tool_schemas import ToolSchemas

T = TypeVar("T")
Marks = tuple[str, ...]


class Piece(NamedTuple):
    """A part of an answer: one of the marks that were looked for, or text without any of them."""

    text: str
    is_mark: bool = False


Reading: TypeAlias = Generator[Marks, Piece, T]
"""A generator that yields the marks to look for, and is sent the next piece. Between two marks the text may
come in any number of pieces."""


class CallsEnd(NamedTuple):
    """How the reading of calls ended."""

    is_whole: bool
    """Whether the calls were read to their end. If not, the unshown text is no call."""
    mark: str
    """The mark that the caller has to read next, such as another opening; "" if there is none."""


_MAX_NAME_CHARS = 512
"""Longest name with the white space around it; a tool's name has 256 characters at most."""

_HEAD_CHARS = 8
"""Characters at the beginning of a value, behind white space, that tell a text from a word of JSON, of which
"false" is the longest."""


class CallReader:
    """Reads the calls behind one ``opening``, and shows them in ``blocks``.

    A call ends at one of ``markup.ends``: ``call_end``, or the list's ``closing``. If the markup has no mark
    for a call's end, the next opening stands for both.
    """

    def __init__(self, markup: Markup, schemas: ToolSchemas, opening: str, blocks: BlockList) -> None:
        self._markup = markup
        self._ends = markup.ends
        self._schemas = schemas
        self._blocks = blocks
        self._unshown = [opening]
        """Text and marks that are read and not shown yet; they may turn out to be no call."""
        self._shows_closing = False
        """Whether text between the marks was shown as content, so that the closing mark is content, too."""
        self.num_calls = 0
        self.is_in_call = False
        """Whether a call has begun and not ended."""

    @property
    def unshown(self) -> str:
        """The text that is read and not shown. It begins with the opening until a call or content is
        shown."""
        return "".join(self._unshown)

    def read(self, foreign: Marks) -> Reading[CallsEnd]:
        """Read the calls to their end. ``foreign``: marks that have no place in a call, such as the one that
        closes reasoning. Before a name is complete they show that there is no call; later they are text."""
        if self._markup.call:
            return (yield from self._read_list(foreign))
        return (yield from self._read_only_call(foreign))

    def _read_list(self, foreign: Marks) -> Reading[CallsEnd]:
        """Do ``read`` for markup in which calls with marks of their own stand between opening and closing."""
        markup, mark = self._markup, ""
        while mark != markup.closing:  # which ends an open call, too
            mark = yield from self._read_gap((markup.call, markup.closing))
            if mark == markup.closing:
                break
            self._unshown.append(mark)
            marks = (markup.end_of_name, *self._ends, *foreign)
            name, mark = yield from self._collect(marks, self._is_too_long_for_name)
            if mark in foreign:
                return CallsEnd(False, mark)
            if mark == markup.end_of_name and (name := name.strip()):
                mark = yield from self._read_call(name, mark)
            else:
                mark = yield from self._read_no_call(mark)
        return CallsEnd(True, "")

    def _read_only_call(self, foreign: Marks) -> Reading[CallsEnd]:
        """Do ``read`` for markup in which opening and closing are those of one call."""
        markup = self._markup
        marks = (markup.end_of_name or markup.key, *self._ends, *markup.openings, *foreign)
        text, mark = yield from self._collect(tuple(filter(None, marks)), self._is_too_long_for_name)
        text = text.strip()  # the name, or the whole call where it is JSON
        # No call: the text is too long for a name, or an opening or a foreign mark came before the name (or
        # the whole call, where it is JSON) was complete.
        if not mark or mark in (*foreign, *markup.openings):
            return CallsEnd(False, mark)
        if markup.is_json:
            self._show_json_call(text, mark)
        elif text:
            mark = yield from self._read_call(text, mark)
        elif mark != markup.closing:  # opening and closing with nothing between are dropped
            mark = yield from self._read_no_call(mark)
        return CallsEnd(True, mark if mark in markup.openings else "")

    def _collect(
        self, marks: Marks, is_enough: Callable[[str, int], bool] = lambda text, num_chars: False
    ) -> Reading[tuple[str, str]]:
        """Read up to the next of ``marks``. Returns the text before it, which stays unshown, and the mark.

        ``is_enough``: called with each piece of text and the number of all characters so far. If it returns
        true, the piece's text is the last, and the mark is "".
        """
        parts: list[str] = []
        num_chars = 0
        while True:
            text, is_mark = yield marks
            if is_mark:
                return "".join(parts), text
            parts.append(text)
            self._unshown.append(text)
            num_chars += len(text)
            if is_enough(text, num_chars):
                return "".join(parts), ""

    # --- beside calls ---------------------------------------------------------------------------------

    def _is_too_long_for_name(self, text: str, num_chars: int) -> bool:
        return num_chars > _MAX_NAME_CHARS and not self._markup.is_json

    def _read_gap(self, marks: Marks) -> Reading[str]:
        """Read up to the next of ``marks``, which open a call or close the list. Text before it is content
        unless it is white space."""
        _, mark = yield from self._collect(marks, _is_text)
        if not mark:
            self._show_content()
            mark = yield from self._read_content(marks)
        if mark == self._markup.closing and self._shows_closing:
            self._show_content(mark)
        return mark

    def _read_content(self, marks: Marks) -> Reading[str]:
        """Show text as content up to the next of ``marks``. Returns the mark."""
        while True:
            text, is_mark = yield marks
            if is_mark:
                return text
            self._blocks.add(BlockKind.TEXT, text)

    def _read_no_call(self, mark: str) -> Reading[str]:
        """Show what has no name, and so is no call, as content: the unshown text, ``mark`` behind it, and all
        up to one of the marks that end calls. Returns that one, which is shown, too, unless it opens a
        call."""
        self._show_content(mark)
        if mark not in self._ends:
            mark = yield from self._read_content(self._ends)
            if mark not in self._markup.openings:
                self._show_content(mark)
        return mark

    def _show_json_call(self, text: str, mark: str) -> None:
        """Show a call that is JSON as a whole, or ``text`` as content if it is no call."""
        if (call := _json_call(text)) is not None:
            self._begin_call(call.name)
            self._end_call(bytes(call.arguments).decode(), mark)
        elif text:
            self._show_content(mark)

    def _show_content(self, mark: str = "") -> None:
        """Show the unshown text, and ``mark``, as content."""
        self._blocks.add(BlockKind.TEXT, self.unshown + mark)
        self._unshown.clear()
        self._shows_closing = True

    # --- a call: each method reads up to the mark that ends the call, and returns it ----------------------

    def _read_call(self, name: str, mark: str) -> Reading[str]:
        """Read a call behind its name and the ``mark`` after it, which may be the first argument's."""
        markup, keys = self._markup, set[str]()  # the keys shown so far
        self._begin_call(name)
        if mark in self._ends:
            return self._end_call("{}", mark)
        if not markup.key:
            return (yield from self._read_json(""))
        while True:
            if mark != markup.key:
                _, mark = yield from self._collect((markup.key, *self._ends), _is_text)
                if not mark:  # JSON in place of all arguments, or a fault
                    return (yield from self._read_fault() if keys else self._read_json(self.unshown))
                if mark == markup.call_end:
                    return self._end_call("}" if keys else "{}", mark)
                if mark != markup.key:
                    return self._end_early(mark)
            mark = yield from self._read_argument(name, keys)
            if mark:
                return mark

    def _read_argument(self, tool: str, keys: set[str]) -> Reading[str]:
        """Read an argument behind the mark of its key, and add the key to ``keys``. Returns "" where the call
        goes on, else the mark that has ended it."""
        markup, declared = self._markup, ""
        self._unshown.append(markup.key)
        key, mark = yield from self._collect((markup.end_of_key, *self._ends))
        if mark != markup.end_of_key:
            return self._end_early(mark)
        self._unshown.append(mark)
        if markup.says_type:
            key, _, declared = key.partition(STRING_ATTRIBUTE)
        else:
            key = key.strip()
        if key in keys and not markup.takes_repeated_keys:
            return (yield from self._read_fault())
        if markup.value:
            _, mark = yield from self._collect((markup.value, *self._ends), _is_text)
            if not mark:
                return (yield from self._read_fault())
            if mark != markup.value:
                return self._end_early(mark)
        self._show((", " if keys else "{") + f"{_string(key)}: ")
        keys.add(key)
        return (yield from self._read_value(tool, key, is_string=declared == "true"))

    def _read_value(self, tool: str, key: str, *, is_string: bool) -> Reading[str]:
        """Read an argument's value, which is a string or JSON. ``is_string``: whether it is certain already
        that it is a string. Such a value is shown as it comes; any other one is withheld until its
        beginning rules JSON out or, if it does not, until its end."""
        markup, head = self._markup, ""
        if is_string:
            self._show('"')
        marks = (markup.end_of_value, *(() if markup.values_hide_marks else self._ends))
        text, is_mark = "", False
        while not is_mark:  # at first with an empty text: some parameters take nothing but strings
            if is_string:
                self._show(_inside_string(text))
            else:
                self._unshown.append(text)
                head = (head + text).lstrip()[:_HEAD_CHARS]
                # Where the markup says that the value is JSON, only the end tells whether it is.
                is_string = not (markup.says_type or self._schemas.may_be_json(tool, key, head))
                if is_string:
                    self._show('"' + _inside_string(self.unshown))
            text, is_mark = yield marks
        if text == markup.end_of_value:
            self._show('"' if is_string else self._as_json(tool, key))
            return ""
        # The call ends within the value. Its mark behind the closing quote makes the arguments no JSON.
        return self._end_call('"' + text, text) if is_string else self._end_early(text)

    def _as_json(self, tool: str, key: str) -> str:
        """Return the unshown text, a complete value, as JSON."""
        text = self.unshown
        if not self._markup.says_type:
            return self._schemas.to_json(tool, key, text)
        try:
            decode_json(text)
        except msgspec.DecodeError:
            return _string(text)
        return text.strip()  # as it stands: 1.0 stays 1.0

    def _read_json(self, text: str) -> Reading[str]:
        """Read arguments that are JSON already, without the white space around them. ``text`` is their
        beginning."""
        self._unshown.clear()
        space: list[str] = []
        """White space behind the shown text, which is shown if more text follows."""
        has_json = is_mark = False
        while not is_mark:
            if shown := text.rstrip() if has_json else text.strip():
                self._show("".join((*space, shown)))
                has_json = True
                space.clear()
            if has_json:
                space.append(text[len(text.rstrip()) :])
            text, is_mark = yield self._ends
        return self._end_call("" if has_json else "{}", text)

    def _read_fault(self) -> Reading[str]:
        """Show the rest of a faulty call as it stands, beginning with the unshown text."""
        text, is_mark = self.unshown, False
        while not is_mark:
            self._show(text)
            text, is_mark = yield self._ends
        return self._end_early(text)

    # --- what is shown --------------------------------------------------------------------------------

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        self.is_in_call = True
        self._unshown.clear()
        self._blocks.begin(BlockKind.CALL, name)

    def _end_early(self, mark: str) -> str:
        """End a faulty or incomplete call: its rest is shown as it stands. Returns ``mark``."""
        return self._end_call(self.unshown + mark, mark)

    def _end_call(self, text: str, mark: str) -> str:
        """End the call with the last ``text`` of its arguments. Returns ``mark``."""
        self._blocks.grow(text)
        self._blocks.close()
        self._unshown.clear()
        self.is_in_call = False
        return mark

    def _show(self, arguments: str) -> None:
        """Show a piece of the call's arguments."""
        self._blocks.grow(arguments)
        self._unshown.clear()


class _JsonCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_JSON_CALLS: TypedDecoder[_JsonCall] = TypedDecoder.json(_JsonCall)


def _json_call(text: str) -> _JsonCall | None:
    """Return a call that is JSON as a whole; None if the text is none."""
    try:
        call = _JSON_CALLS.decode(text.encode())
    except msgspec.MsgspecError:
        return None
    return call if call.name else None


def _is_text(text: str, num_chars: int) -> bool:
    """Have ``_collect`` stop at the first text that is not white space."""
    return bool(text.strip())


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _inside_string(text: str) -> str:
    """Return the text as it stands between the quotes of a JSON string."""
    return _string(text)[1:-1]
