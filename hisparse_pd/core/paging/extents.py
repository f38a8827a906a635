"""Arithmetic on extents and token slots: pure functions, no state.

Pools, messages and requests keep slots as extents, ``(start, length)`` of contiguous token slots in the order
of positions. Transfers are planned over the same ranges in two arrays (``SlotRanges``), which can also be
made of pages. Kernels take the int64 array with one token slot for each position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hisparse_pd.protocol.messages import Extent

SlotArray: TypeAlias = NDArray[np.int64]
"""Token slots, one for each position: int64 [num_tokens]."""


class SlotRanges(NamedTuple):
    """Token slots in the order of positions, as ranges: int64 [num_ranges] each, ``lengths[i]`` slots from
    ``starts[i]`` on."""

    starts: SlotArray
    lengths: SlotArray

    @classmethod
    def of_slots(cls, slots: ArrayLike) -> SlotRanges:
        """Return a range for each of ``slots``, integers [num_slots]."""
        starts = as_slots(slots)
        return cls(starts, np.ones_like(starts))

    @classmethod
    def of_extents(cls, extents: Sequence[Extent]) -> SlotRanges:
        num_extents = len(extents)
        return cls(
            np.fromiter(map(attrgetter("start"), extents), np.int64, num_extents),
            np.fromiter(map(attrgetter("length"), extents), np.int64, num_extents),
        )

    @classmethod
    def of_pages(cls, page_ids: ArrayLike, page_size: int, start_token: int, stop_token: int) -> SlotRanges:
        """Return a range for each page that positions ``[start_token, stop_token)`` of a request touch.

        ``page_ids``: the request's pages, integers [num_pages], in position order; the first and the last
        page may be partial. Raises ValueError when the range is reversed or reaches past the pages.
        """
        pages = as_slots(page_ids)
        if page_size < 1:
            raise ValueError(f"pages of {page_size} tokens: a page has at least 1")
        if not 0 <= start_token <= stop_token:
            raise ValueError(f"positions [{start_token}, {stop_token}) are not a range from 0 on")
        if stop_token > pages.size * page_size:
            raise ValueError(
                f"positions [{start_token}, {stop_token}) reach past {pages.size} pages of {page_size} tokens"
            )
        if start_token == stop_token:
            return cls.of_slots([])
        touched = slice(start_token // page_size, -(-stop_token // page_size))
        first_positions = np.arange(pages.size, dtype=np.int64)[touched] * page_size
        skipped = np.maximum(start_token - first_positions, 0)  # of each page, at its beginning
        stops = np.minimum(stop_token - first_positions, page_size)
        return cls(pages[touched] * page_size + skipped, stops - skipped)


def total_length(extents: Iterable[Extent]) -> int:
    """Return the number of token slots in all ``extents`` together."""
    return sum(extent.length for extent in extents)


def has_slot(extents: Iterable[Extent], slot: int) -> bool:
    return any(extent.start <= slot < extent.end for extent in extents)


def extents_to_slots(extents: Sequence[Extent]) -> SlotArray:
    """Return every token slot of ``extents``, in order: int64 [total_length]."""
    return ranges_to_slots(*SlotRanges.of_extents(extents))


def extents_to_pages(extents: Sequence[Extent], page_size: int) -> list[int]:
    """Return the pages of ``extents``, in order; the extents must be whole pages."""
    pages: list[int] = extents_to_page_ids(extents, page_size).tolist()
    return pages


def extents_to_page_ids(extents: Sequence[Extent], page_size: int) -> SlotArray:
    """Return the pages of ``extents`` as ``extents_to_pages`` does, int64 [num_pages]; for many of them."""
    starts, lengths = SlotRanges.of_extents(extents)
    return ranges_to_slots(starts // page_size, lengths // page_size)


def ranges_to_slots(starts: SlotArray, lengths: SlotArray) -> SlotArray:
    """Return ``lengths[i]`` slots from ``starts[i]`` on, for one i after the other: int64 [lengths.sum()]."""
    # Slot k of the result is k more than its range's start less all slots of earlier ranges: starts (7, 20)
    # and lengths (2, 2) give (7, 7, 18, 18) + (0, 1, 2, 3).
    ends = np.cumsum(lengths)
    num_slots = int(ends[-1]) if ends.size else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(num_slots, dtype=np.int64)


def joined(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    """Return the same slots in the same order, in as few extents as possible."""
    result: list[Extent] = []
    for extent in extents:
        if result and result[-1].end == extent.start:
            result[-1] = Extent(result[-1].start, result[-1].length + extent.length)
        else:
            result.append(extent)
    return tuple(result)


def slice_extents(extents: Iterable[Extent], start: int, stop: int) -> tuple[Extent, ...]:
    """Return the token slots of positions ``[start, stop)``, counted from the first slot of ``extents``.

    Raises ValueError when the range is reversed or reaches past the end.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"positions [{start}, {stop}) are not a range from 0 on")
    sliced = []
    offset = 0
    for extent in extents:
        if offset >= stop:
            break
        first = max(start - offset, 0)
        last = min(stop - offset, extent.length)
        if first < last:
            sliced.append(Extent(extent.start + first, last - first))
        offset += extent.length
    if offset < stop:
        raise ValueError(f"positions [{start}, {stop}) reach past the {offset} token slots of the extents")
    return tuple(sliced)


def as_slots(values: ArrayLike) -> SlotArray:
    """Return ``values`` as a one-dimensional int64 array. Raises ValueError for anything but integers."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"expected a list of integers, got shape {array.shape}, dtype {array.dtype}")
    return array.astype(np.int64, copy=False)


def ranges_around(starts: SlotArray, ends: SlotArray, addrs: SlotArray, num_bytes: SlotArray) -> SlotArray:
    """Return for each interval ``[addrs[i], addrs[i] + num_bytes[i])`` the number of the range ``[starts[n],
    ends[n])`` that contains it.

    ``starts`` is sorted, and the ranges do not overlap. The number is -1 for an empty interval, and for one
    that no single range contains.
    """
    if starts.size == 0:
        return np.full(addrs.size, -1, np.int64)
    nearest = np.searchsorted(starts, addrs, side="right") - 1
    # Lengths are compared instead of ends, because ``addrs + num_bytes`` could overflow, which numpy ignores.
    is_inside = (nearest >= 0) & (num_bytes >= 1) & (num_bytes <= ends[nearest] - addrs)
    return np.where(is_inside, nearest, -1)
