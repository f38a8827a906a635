"""The row check in torch: what a CPU computes, and the oracle of ``csrc/row_check.cuh``.

``docs/kv-layout.md`` defines the function; ``row_check.py`` has its users.
"""

from __future__ import annotations

import functools
from typing import Final

import torch
from torch import Tensor

WORD_FACTOR: Final = 0x9E3779B1
PLACE_FACTOR: Final = 0x85EBCA6B
POSITION_BITS: Final = 22
"""Bits of a position. With positions below 2**22 and up to 512 layers, each layer and position has a
``place`` of its own in 32 bits. The factors and this are the same in csrc/row_check.cuh."""


def reference_checks(rows: Tensor, layer: int, positions: Tensor) -> Tensor:
    """Return the checks, int32 [n], of items ``rows``, uint8 [n, item_bytes]. Products wrap around.

    ``positions``: int64 [n] on the device of ``rows``.
    """
    num_bytes = rows.shape[1]
    padded = torch.nn.functional.pad(rows, (0, -num_bytes % 4))
    words = padded.contiguous().view(torch.int32)
    sums = (words * _word_factors(words.shape[1], rows.device)).sum(dim=1, dtype=torch.int32)
    place = ((layer << POSITION_BITS) + positions) * 2 + 1
    return sums + _wrapped(place * PLACE_FACTOR)


@functools.cache
def _word_factors(num_words: int, device: torch.device) -> Tensor:
    """Return the factors of an item's words, int32 [num_words]: odd and distinct."""
    mixed = (torch.arange(1, num_words + 1) * WORD_FACTOR) & 0xFFFFFFFF
    return _wrapped(mixed ^ (mixed >> 15) | 1).to(device)


def _wrapped(values: Tensor) -> Tensor:
    """Return the low 32 bits of int64 ``values``, as int32."""
    low = values & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
