"""Tool calls out of an answer's text as it comes: the name at once, then arguments as JSON text.

What has been shown is never taken back: an argument of which only its end tells whether it is a string is
held back until then. A text without a name is no call, but content. What cannot be read of a call that has
begun follows in its arguments as it stands, with the mark that ends the call: they are no JSON then, and no
client takes them for what the model meant. A call that is cut off keeps the arguments that were certain.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache

import msgspec

from hisparse_pd.api.answer_blocks import BlockKind, BlockList
from hisparse_pd.api.chat_format import STRING_ATTRIBUTE, Markup
from hisparse_pd.api.tool_schemas import ToolSchemas
from protocol.decoding import TypedDecoder, decode_json


class _At(Enum):
    """Where in the calls the text is."""

    BETWEEN = auto()
    """Two calls, or the opening and the first one."""
    TEXT = auto()
    """The same, where something stands there."""
    NAME = auto()
    NO_CALL = auto()
    """Up to the next end: what should have a name and has none."""
    BODY = auto()
    """Behind the name or an argument."""
    KEY = auto()
    GAP = auto()
    """A key and its value."""
    VALUE = auto()
    JSON = auto()
    """Arguments that are written as they are."""
    FAULT = auto()
    """Behind what cannot be read of a call."""


_BEFORE_CALL = (_At.BETWEEN, _At.TEXT, _At.NAME, _At.NO_CALL)

_MAX_NAME_CHARS = 512
"""With the white space round it: tools have names of 256 characters at most."""


@dataclass(slots=True)
class _Call:
    """The call that is read. ``keys``: of the arguments that have begun."""

    name: str
    keys: set[str] = field(default_factory=set)
    key: str = ""
    """Of the present argument."""
    is_string: bool = False
    """Its value is one for sure."""
    head: str = ""
    """The beginning of its value, without white space."""
    has_json: bool = False
    """Some of its arguments were shown as they are written."""
    json_space: list[str] = field(default_factory=list)
    """Behind them."""


class _JsonCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_JSON_CALLS: TypedDecoder[_JsonCall] = TypedDecoder.json(_JsonCall)


def _json_call(text: str) -> _JsonCall | None:
    """A call that is JSON as a whole; None where it is none."""
    try:
        call = _JSON_CALLS.decode(text.encode())
    except msgspec.MsgspecError:
        return None
    return call if call.name else None


class CallReader:
    """The calls behind one ``opening``, which show themselves in ``blocks``.

    Whoever has the text searches it for ``marks``, gives what is before the next one to ``grow`` and the mark
    to ``meet``, until ``is_over``. Another opening in a name, and ``is_no_call``, say that this one was none.
    """

    def __init__(self, markup: Markup, schemas: ToolSchemas, opening: str, blocks: BlockList) -> None:
        self._markup = markup
        self._schemas = schemas
        self._blocks = blocks
        self._at = _At.BETWEEN if markup.call else _At.NAME
        self._unshown = [opening]
        """Text and marks that have been read and not been shown yet."""
        self._num_before = 1
        """Entries of them up to the last mark, with it."""
        self._num_name_chars = 0
        self._call = _Call("")
        self._shows_end = False
        """Something between opening and closing was content; so is the closing."""
        self.num_calls = 0
        self.is_over = False

    @property
    def marks(self) -> tuple[str, ...]:
        """What is markup here."""
        return _marks(self._markup, self._at)

    @property
    def is_in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._at not in _BEFORE_CALL and not self.is_over

    @property
    def is_in_name(self) -> bool:
        return self._at is _At.NAME

    @property
    def is_no_call(self) -> bool:
        """Whether the opening, which begins a call, was none: no name is as long as what follows it."""
        begins_call = not self._markup.call and not self._markup.is_json
        return self._at is _At.NAME and begins_call and self._num_name_chars > _MAX_NAME_CHARS

    def unshown(self) -> str:
        """What was read and is no call so far, with the opening unless a call followed it."""
        return "".join(self._unshown)

    def grow(self, text: str) -> None:
        """``text`` comes next, and has none of ``marks`` in it."""
        if not text:
            return
        match self._at:
            case _At.BETWEEN:
                self._unshown.append(text)
                if text.strip():
                    self._at = _At.TEXT
                    self._show_content()
            case _At.NAME:
                self._unshown.append(text)
                self._num_name_chars += len(text)
                if self._markup.call and self._num_name_chars > _MAX_NAME_CHARS:
                    self._at = _At.NO_CALL
                    self._show_content()
            case _At.KEY:
                self._unshown.append(text)
            case _At.BODY | _At.GAP:
                self._unshown.append(text)
                if text.strip():
                    self._meet_text()
            case _At.VALUE:
                self._grow_value(text)
            case _At.JSON:
                self._grow_json(text)
            case _At.FAULT:
                self._show(text)
            case _At.TEXT | _At.NO_CALL:
                self._blocks.add(BlockKind.TEXT, text)

    def meet(self, mark: str) -> None:
        """``mark``, one of ``marks``, comes next."""
        markup = self._markup
        match self._at:
            case _At.BETWEEN | _At.TEXT:
                self._leave_gap(mark)
            case _At.NAME:
                self._end_name(mark)
            case _At.NO_CALL:
                self._end_no_call(mark)
            case _At.KEY if mark == markup.end_of_key:
                self._end_key()
            case _At.GAP if mark == markup.value:
                self._begin_value()
            case _At.VALUE if mark == markup.end_of_value:
                self._show('"' if self._call.is_string else self._value_as_json())
                self._go(_At.BODY)
            case _At.BODY if mark == markup.key:
                self._go(_At.KEY, mark)
            case _At.BODY if mark == markup.call_end:
                self._end_call("}" if self._call.keys else "{}", mark)
            case _At.JSON:
                self._end_call("" if self._call.has_json else "{}", mark)
            case _:  # the call ends too early, or behind a fault
                self._end_call(self._open_end() + mark, mark)

    # --- before a call --------------------------------------------------------------------------------

    def _leave_gap(self, mark: str) -> None:
        if mark != self._markup.closing:
            self._num_name_chars = 0
            self._go(_At.NAME, mark)
            return
        if self._shows_end:
            self._show_content(mark)
        self.is_over = True

    def _end_name(self, mark: str) -> None:
        markup = self._markup
        name = self._since_mark().strip()
        ends_call = mark in markup.ends
        if markup.is_json and ends_call and (whole := _json_call(name)) is not None:
            self._begin_call(whole.name)
            self._end_call(bytes(whole.arguments).decode(), mark)
            return
        if not name and ends_call and not markup.end_of_name:  # an opening and its closing, and nothing else
            self.is_over = True
        elif not name or markup.is_json or (ends_call and markup.end_of_name):
            self._end_no_call(mark)
        else:
            self._begin_call(name)
            if ends_call:
                self._end_call("{}", mark)
            elif mark == markup.key:
                self._go(_At.KEY, mark)

    def _end_no_call(self, mark: str) -> None:
        """``mark`` ends what is no call, or its empty name."""
        self._show_content(mark)
        self.is_over = mark == self._markup.closing
        self._go(_At.BETWEEN if mark in self._markup.ends else _At.NO_CALL)

    def _show_content(self, mark: str = "") -> None:
        self._blocks.add(BlockKind.TEXT, self.unshown() + mark)
        self._unshown.clear()
        self._shows_end = True

    # --- a call ---------------------------------------------------------------------------------------

    def _begin_call(self, name: str) -> None:
        self.num_calls += 1
        self._call = _Call(name)
        self._unshown.clear()
        self._blocks.begin(BlockKind.CALL, name)
        self._go(_At.BODY if self._markup.key else _At.JSON)

    def _end_call(self, text: str, mark: str) -> None:
        self._blocks.grow(text)
        self._blocks.close()
        self._unshown.clear()
        self._go(_At.BETWEEN)
        self.is_over = mark == self._markup.closing

    def _meet_text(self) -> None:
        """Text stands where only white space may: JSON in place of all arguments, or a fault."""
        if self._at is _At.BODY and not self._call.keys:
            self._at, text = _At.JSON, self.unshown()
            self._unshown.clear()
            self._grow_json(text)
        else:
            self._fail()

    def _fail(self) -> None:
        self._at = _At.FAULT
        self._show(self.unshown())

    def _open_end(self) -> str:
        """What has still to be shown of a call that ends too early."""
        return '"' if self._at is _At.VALUE and self._call.is_string else self.unshown()

    def _grow_json(self, text: str) -> None:
        """Without the white space round it."""
        call = self._call
        shown = text.rstrip() if call.has_json else text.strip()
        if shown:
            self._show("".join((*call.json_space, shown)))
            call.has_json = True
            call.json_space.clear()
        if call.has_json:
            call.json_space.append(text[len(text.rstrip()) :])

    # --- an argument ----------------------------------------------------------------------------------

    def _end_key(self) -> None:
        markup, call = self._markup, self._call
        key, is_string = self._since_mark(), ""
        if markup.says_type:
            key, _, is_string = key.partition(STRING_ATTRIBUTE)
        else:
            key = key.strip()
        call.key, call.is_string, call.head = key, is_string == "true", ""
        self._go(_At.GAP, markup.end_of_key)
        if key in call.keys and not markup.takes_repeated_keys:
            self._fail()
        elif not markup.value:
            self._begin_value()

    def _begin_value(self) -> None:
        call = self._call
        self._show(("{" if not call.keys else ", ") + f"{_string(call.key)}: ")
        call.keys.add(call.key)
        self._go(_At.VALUE)
        if call.is_string:
            self._show('"')
        else:
            self._grow_value("")

    def _grow_value(self, text: str) -> None:
        call = self._call
        if call.is_string:
            self._show(_string(text)[1:-1])
            return
        self._unshown.append(text)
        if self._markup.says_type:
            return  # it says that it is JSON, which it may still fail to be
        call.head = (call.head + text).lstrip()[:_HEAD_CHARS]
        if not self._schemas.may_be_json(call.name, call.key, call.head):
            call.is_string = True
            self._show(_string(self.unshown())[:-1])

    def _value_as_json(self) -> str:
        text = self.unshown()
        if not self._markup.says_type:
            return self._schemas.to_json(self._call.name, self._call.key, text)
        try:
            decode_json(text)
        except msgspec.DecodeError:
            return _string(text)
        return text.strip()  # as it stands: 1.0 stays 1.0

    # --- the text -------------------------------------------------------------------------------------

    def _go(self, at: _At, mark: str = "") -> None:
        """``mark``: what is behind it begins ``at``; it is shown if that cannot be read."""
        self._at = at
        if mark:
            self._unshown.append(mark)
        self._num_before = len(self._unshown)

    def _since_mark(self) -> str:
        return "".join(self._unshown[self._num_before :])

    def _show(self, arguments: str) -> None:
        self._blocks.grow(arguments)
        self._unshown.clear()


_HEAD_CHARS = 8
"""Of a value, behind white space: enough to tell text from any word of JSON."""


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@lru_cache
def _marks(markup: Markup, at: _At) -> tuple[str, ...]:
    ends = markup.ends
    match at:
        case _At.BETWEEN | _At.TEXT:
            return (markup.call, markup.closing)
        case _At.NAME:
            before = markup.end_of_name or markup.key
            return (*([before] if before else []), *ends, *(() if markup.call else markup.openings))
        case _At.BODY:
            return (markup.key, *ends)
        case _At.KEY:
            return (markup.end_of_key, *ends)
        case _At.GAP:
            return (markup.value, *ends)
        case _At.VALUE:
            return (markup.end_of_value, *(() if markup.values_hide_marks else ends))
        case _At.JSON | _At.FAULT | _At.NO_CALL:
            return ends
