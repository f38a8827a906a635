"""Writes token ids as JSON lists, long ones piece by piece in a thread, and reads plain lists with numpy.

``tokens.py`` answers with such lists, and ``openai_answers.py`` writes the ids of prompts.
``plain_prompts.py`` reads prompts with ``read_list``.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from msgspec import Raw

from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.serving.http.off_loop import off_loop

TOKENS_A_PIECE = 1 << 14
"""Tokens that are encoded as JSON at a time, which takes some 5 ms in which no other thread runs."""
_MAX_INLINE_TOKENS = TOKENS_A_PIECE // 16
"""Most tokens that are encoded in the event loop, in some 0.3 ms; more of them go to a thread."""

_WORD_BYTES = 8
"""Most digits of an id that ``read_list`` reads."""
_DIGIT_VALUES = np.array(
    [(0x0F0F0F0F0F0F0F0F << 8 * (_WORD_BYTES - n)) % 2**64 for n in range(_WORD_BYTES + 1)], np.uint64
)
"""Bits of a word that are values of digits, by the number of digits, which are the word's last characters."""
_LEAST_ID = np.array([0, 0, *(10**n for n in range(1, _WORD_BYTES))], np.uint64)
"""The least integer that JSON writes with so many digits."""


async def json_list(packed: bytes, show: Callable[[list[int]], object] = list) -> Raw:
    """Return the JSON of the list that ``show`` makes of packed token ids, encoded piece by piece."""
    token_ids = unpack_token_ids(packed)

    def encoded(start: int) -> bytes:
        return msgspec.json.encode(show(token_ids[start : start + TOKENS_A_PIECE].tolist()))[1:-1]

    if len(token_ids) <= _MAX_INLINE_TOKENS:
        return Raw(b"[%b]" % encoded(0))
    pieces = [await off_loop(encoded, start) for start in range(0, len(token_ids), TOKENS_A_PIECE)]
    return Raw(b"[%b]" % b",".join(pieces))


def read_list(entries: bytes) -> bytes | None:
    """Return the packed token ids of a JSON list, of which the text between the brackets is given.

    None if a decoder has to look at it: only integers of up to eight digits are read, between which is a
    comma, or a comma and a space. For a long list that takes half the time of a decoder, which makes an
    object of each.
    """
    # In front are so many characters that eight end with any id.
    chars = np.frombuffer(b"%b,%b," % (b" " * (_WORD_BYTES - 1), entries), np.uint8)
    commas = np.flatnonzero(chars == ord(","))
    begins, ends = commas[:-1] + 1, commas[1:]
    if b" " in entries:
        begins += chars[begins] == ord(" ")
    num_digits = ends - begins
    if num_digits.min() < 1 or num_digits.max() > _WORD_BYTES:
        return None
    if num_digits.sum() != np.count_nonzero(chars - np.uint8(ord("0")) < 10):
        return None  # something else than digits is between two commas
    # A word has the eight characters that end with an id, the first one lowest, and then its digits' values.
    # Neighbours are put together: digits to numbers below 100, these to numbers below 10,000, and these.
    words = np.ndarray(chars.size - _WORD_BYTES + 1, "<u8", chars, strides=(1,))[ends - _WORD_BYTES]
    words &= _DIGIT_VALUES[num_digits]
    for width, lanes in ((1, 0x00FF00FF00FF00FF), (2, 0x0000FFFF0000FFFF), (4, 0x00000000FFFFFFFF)):
        words = (words * 10**width + (words >> 8 * width)) & lanes
    if (words < _LEAST_ID[num_digits]).any():
        return None  # a zero before other digits, which JSON does not have
    return words.astype("<i4").tobytes()
