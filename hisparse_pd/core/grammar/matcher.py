"""Tracks an output's progress in its grammar, and fills masks of the tokens that may follow.

``TokenTrie`` compiles a grammar and makes the ``Matcher`` of each output. A decode step with grammars calls
``fill_masks`` for its rows, and ``Matcher.advance`` with each token that was drawn.

A mask is a row of int32 words with a bit for each token; token 0 is the lowest bit of the first word, and a
set bit allows the token. Ending tokens are allowed where the grammar may end; where it must end, nothing else
is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

Bits = NDArray[np.int32]
ALL_ALLOWED: Final = -1
"""A word of a mask that allows all of its tokens."""
NONE_AVOIDED: Final[tuple[int, ...]] = ()
"""The ``avoided_endings`` of a request whose output may end wherever the grammar may."""

_MAX_THREADS = 8
"""Most threads that fill masks."""
_MAX_ERROR_CHARS = 500


class GrammarError(ValueError):
    """A grammar cannot be compiled or followed; the message says why and names the limit."""


class OutputMasks(NamedTuple):
    """The masks that ``fill_masks`` fills for one output: one for its next token and one after each draft."""

    matcher: Matcher
    row: int
    """The row for the mask of the output's next token; the mask after draft i is i + 1 rows further."""
    drafts: Sequence[int]
    """Guesses of the output's next tokens."""


class Matcher:
    """The state of one output. Its methods are called by one thread at a time."""

    def __init__(self, inner: LLMatcher, avoided_endings: Sequence[int]) -> None:
        """``avoided_endings``: ending tokens that are allowed only where no other token is; those of the
        checkpoint for a request with ``ignore_eos``."""
        self._inner = inner
        self._avoided_endings = avoided_endings

    def advance(self, *token_ids: int) -> None:
        """Extend the output by these tokens. Raises GrammarError where the grammar forbids one, or gets too
        complex."""
        for token_id in token_ids:
            if not self._inner.consume_token(token_id):
                raise GrammarError(self.error or f"token {token_id} does not follow the grammar")

    @property
    def error(self) -> str:
        """Why the output has no masks any more, or an empty string."""
        return in_a_line(self._inner.get_error())

    def _correct_masks(self, masks: Bits, row: int, num_rows: int) -> None:
        """Allow everything after an error; otherwise forbid ``avoided_endings`` where another token is
        allowed."""
        if self._inner.is_error():
            masks[row : row + num_rows] = ALL_ALLOWED
        elif self._avoided_endings:
            for mask in masks[row : row + num_rows]:
                without_ending(mask, self._avoided_endings)


def fill_masks(masks: Bits, wanted: Sequence[OutputMasks]) -> None:
    """Fill the masks of some outputs in parallel, without holding the interpreter's lock.

    ``masks``: int32 [num_rows, num_words]. The mask after a forbidden draft allows everything, because no
    token that is drawn there counts. The masks of an output with an ``error`` allow everything, too.
    """
    if masks.dtype != np.int32 or not masks.flags.c_contiguous:
        raise ValueError(f"masks: {masks.dtype} of strides {masks.strides}, need contiguous int32")
    for _, row, drafts in wanted:
        if not 0 <= row <= masks.shape[0] - 1 - len(drafts):
            raise ValueError(f"masks: row {row} with {len(drafts)} drafts of {masks.shape[0]} rows")
        masks[row : row + 1 + len(drafts)] = ALL_ALLOWED
    address, num_rows, row_bytes = masks.ctypes.data, masks.shape[0], masks.strides[0]
    plain = [(matcher._inner, row) for matcher, row, drafts in wanted if not drafts]
    drafting = [(matcher._inner, row, list(drafts)) for matcher, row, drafts in wanted if drafts]
    if len(plain) == 1:  # one mask needs no other thread
        row = plain[0][1]
        plain[0][0].unsafe_compute_mask_ptr(masks[row].ctypes.data, row_bytes)
    elif plain:
        _executor().unsafe_compute_mask_ptr(plain, address, row_bytes, num_rows)
    if drafting:
        _executor().unsafe_compute_mask_ptr_with_draft_token(drafting, address, row_bytes, num_rows)
    for matcher, row, drafts in wanted:
        matcher._correct_masks(masks, row, 1 + len(drafts))


def without_ending(mask: Bits, eos_token_ids: Sequence[int]) -> Bits:
    """Forbid these tokens in ``mask``, in place, unless it allows no others. Returns ``mask``."""
    bits = mask.view(np.uint32)
    words = [token_id // 32 for token_id in eos_token_ids]
    before = bits[words]
    for token_id, word in zip(eos_token_ids, words, strict=True):
        bits[word] &= ~np.uint32(1 << token_id % 32)
    if not mask.any():
        bits[words] = before
    return mask


def in_a_line(error: str) -> str:
    """Return llguidance's message as one line of bounded length: the lines up to its first "error:", which
    tells what is wrong with a regular expression, or else its first line."""
    lines = error.splitlines() or [""]
    end = next((at for at, line in enumerate(lines) if line.startswith("error: ")), 0)
    return " ".join(line.strip() for line in lines[: end + 1] if line.strip(" ^"))[:_MAX_ERROR_CHARS]


@cache
def _executor() -> LLExecutor:
    return LLExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
