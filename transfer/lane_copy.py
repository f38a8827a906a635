"""Copies byte ranges within this process's memory on the CPU: long ones one by one, short ones as array rows.

A ``Mapping`` writes to a decode node of the same machine with ``copy_ranges``. One call of memmove from
Python costs 0.5 us, in which a core moves some 5 KB. Ranges shorter than ``SHORT_BYTES`` that are multiples
of one length are therefore copied as rows of two arrays, in two passes. A thousand items of 656 bytes, spread
over two pools, are a thousand rows of 656 bytes: numpy gathers them into staging memory and scatters them
from there.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from hisparse_pd.core.paging.extents import SlotArray, ranges_to_slots

SHORT_BYTES = 16 << 10
"""Shortest range that gets a memmove of its own."""
MIN_ROW_BYTES = 64
"""Fewest bytes of a row. Each row costs several indices of 8 bytes, for its places at the source and at the
destination, which would outweigh shorter rows."""
MAX_ROWS = 8192
"""Most rows of one call, so that its staged rows stay in the cache."""


def copy_ranges(src_addrs: SlotArray, dst_addrs: SlotArray, lengths: SlotArray) -> None:
    """Copy ``lengths[i]`` bytes from ``src_addrs[i]`` to ``dst_addrs[i]``, int64 [num_ranges] each.

    The caller guarantees that all of it is memory of this process, that destinations are distinct, and that
    no source is a destination.
    """
    src, dst, num_bytes = _coalesced(src_addrs, dst_addrs, lengths)
    is_short = num_bytes < SHORT_BYTES
    row_bytes = _common_row(src[is_short], dst[is_short], num_bytes[is_short])
    if row_bytes < MIN_ROW_BYTES:
        is_short = np.zeros_like(is_short)
    else:
        _copy_rows(src[is_short], dst[is_short], num_bytes[is_short], row_bytes)
    is_long = ~is_short
    for dst_addr, src_addr, length in zip(
        dst[is_long].tolist(), src[is_long].tolist(), num_bytes[is_long].tolist(), strict=True
    ):
        ctypes.memmove(dst_addr, src_addr, length)


def _coalesced(
    src: SlotArray, dst: SlotArray, num_bytes: SlotArray
) -> tuple[SlotArray, SlotArray, SlotArray]:
    """Join ranges that continue the one before them on both sides."""
    if src.size < 2:
        return src, dst, num_bytes
    goes_on = (src[1:] == src[:-1] + num_bytes[:-1]) & (dst[1:] == dst[:-1] + num_bytes[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return src[first], dst[first], np.add.reduceat(num_bytes, first)


def _common_row(src: SlotArray, dst: SlotArray, num_bytes: SlotArray) -> int:
    """Return the longest row length that divides all lengths and offsets; 0 for fewer than two ranges."""
    if src.size < 2:
        return 0
    return int(np.gcd.reduce(np.concatenate((num_bytes, src - src.min(), dst - dst.min()))))


def _copy_rows(src: SlotArray, dst: SlotArray, num_bytes: SlotArray, row_bytes: int) -> None:
    """Copy ranges as rows of two arrays: out of the one into staging, and from there into the other."""
    src_rows, dst_rows = (
        _Rows(int(addrs.min()), int((addrs + num_bytes).max()), row_bytes) for addrs in (src, dst)
    )
    num_rows = num_bytes // row_bytes
    from_row = ranges_to_slots((src - src_rows.start) // row_bytes, num_rows)
    to_row = ranges_to_slots((dst - dst_rows.start) // row_bytes, num_rows)
    source, target = np.asarray(src_rows), np.asarray(dst_rows)
    for first in range(0, from_row.size, MAX_ROWS):
        part = slice(first, first + MAX_ROWS)
        target[to_row[part]] = source.take(from_row[part], axis=0)


@dataclass(frozen=True)
class _Rows:
    """Memory ``[start, stop)``, which ``numpy.asarray`` turns into uint8 [num_rows, row_bytes].

    Memory between the ranges may be anyone's or unmapped: only indexed rows are touched.
    """

    start: int
    stop: int
    row_bytes: int

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.start, False),
            "shape": ((self.stop - self.start) // self.row_bytes, self.row_bytes),
            "typestr": "|u1",
            "version": 3,
        }
