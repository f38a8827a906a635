"""Typed decoding of msgpack and JSON from other processes, with one kind of error whatever the bytes.

Control messages, messages between fronts and engines, and JSON of clients and nodes are decoded through it.
``TypedDecoder`` raises MsgspecError alone, ``decode_json`` that or UnicodeError.
"""

from __future__ import annotations

from typing import Any, Final, Generic, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

T = TypeVar("T")

MAX_NESTING: Final = 200
"""Most levels of lists and objects in JSON from outside. Code that walks such a value, with three calls a
level, stays below Python's limit of 1,000. The limits of decoders in C are no substitute: they differ from
release to release of Python."""

CHUNK_BYTES: Final = 1 << 16
"""Bytes of a text whose brackets and quotes numpy counts at a time; they stay in the CPU's cache."""
_BRACE_BIT: Final = np.uint8(ord("{") - ord("["))
"""The bit by which braces differ from brackets."""


class MalformedMessage(msgspec.DecodeError):
    """The bytes are no message of the expected type."""


class NestedTooDeeply(MalformedMessage):
    """JSON of more than MAX_NESTING levels."""

    def __init__(self) -> None:
        super().__init__(f"it is nested too deeply: {MAX_NESTING} levels of lists and objects are the most")


def check_nesting(text: bytes) -> None:
    """Raise NestedTooDeeply for JSON of more than MAX_NESTING levels. Call before the text is decoded.

    The depth is the number of opened minus closed brackets outside strings. Counting takes at most 20 ns a
    byte, and much less for a text with few lists and objects.
    """
    if _opens_few(text):
        return
    depth, is_in_string, cut_escape = 0, False, b""
    for start in range(0, len(text), CHUNK_BYTES):
        marks, cut_escape = _marks(cut_escape + text[start : start + CHUNK_BYTES])
        if not marks.size:
            continue
        # Every quote begins or ends a string, and brackets between two quotes count for nothing.
        is_quote = marks == ord('"')
        in_string = np.bitwise_xor.accumulate(is_quote.view(np.uint8)).view(np.bool_) ^ is_in_string
        steps = (marks & 2).astype(np.int8) - np.int8(1)  # 1 for [ and {, which have this bit, else -1
        depths = depth + np.cumsum(steps * ~(is_quote | in_string), dtype=np.int32)
        if depths.max() > MAX_NESTING:
            raise NestedTooDeeply
        depth, is_in_string = int(depths[-1]), bool(in_string[-1])


def _marks(piece: bytes) -> tuple[npt.NDArray[np.uint8], bytes]:
    """Return the brackets and quotes of a piece of JSON that are not escaped, and the backslash at its end if
    that escapes the first character of the next piece."""
    chars = np.frombuffer(piece, np.uint8)
    # In a row of backslashes, the first and every second one behind it escape what follows them.
    slashes = np.flatnonzero(chars == ord("\\"))
    numbers = np.arange(slashes.size)
    row_begins = np.maximum.accumulate(numbers * (np.diff(slashes, prepend=-2) != 1))
    escaped = slashes[(numbers - row_begins) % 2 == 0] + 1
    is_cut = bool(escaped.size) and escaped[-1] == chars.size
    folded = chars & ~_BRACE_BIT
    is_mark = (folded == ord("[")) | (folded == ord("]")) | (chars == ord('"'))
    is_mark[escaped[: escaped.size - is_cut]] = False
    return chars[is_mark], b"\\" if is_cut else b""


def _opens_few(text: bytes) -> bool:
    """Whether a text has at most MAX_NESTING opening brackets, within strings or not."""
    num_opened = 0
    for start in range(0, len(text), CHUNK_BYTES):
        chars = np.frombuffer(text, np.uint8, min(CHUNK_BYTES, len(text) - start), start)
        num_opened += int(np.count_nonzero((chars & ~_BRACE_BIT) == ord("[")))
        if num_opened > MAX_NESTING:
            return False
    return True


def decode_json(text: bytes | str) -> Any:
    """Decode JSON from outside. Raises DecodeError, and UnicodeError for bytes that are not UTF-8."""
    content = text.encode() if isinstance(text, str) else text
    check_nesting(content)
    return msgspec.json.decode(content)


class TypedDecoder(Generic[T]):
    """A decoder for one type, which may be a union: of msgpack, or of JSON if made by ``json``. Raises
    MsgspecError only.

    msgspec's own decoder also lets Python's errors through: for a string that is not UTF-8 and, with msgpack,
    for deep nesting in an unknown field.
    """

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T]
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._is_json = False

    @classmethod
    def json(cls, message_type: Any) -> Self:
        """Return a decoder of JSON, which also refuses more than MAX_NESTING levels."""
        decoder = cls(message_type)
        decoder._decoder = msgspec.json.Decoder(message_type)
        decoder._is_json = True
        return decoder

    def decode(self, frame: bytes | bytearray) -> T:
        try:
            if self._is_json:
                check_nesting(bytes(frame))
            return self._decoder.decode(frame)
        except UnicodeDecodeError as error:
            raise MalformedMessage(
                f"a string is not UTF-8: {error.reason} at its byte {error.start}"
            ) from error
        except RecursionError as error:
            raise MalformedMessage("the message is nested too deeply") from error
