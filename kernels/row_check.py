"""The row check: 32 bits over an item's bytes, its layer and its position.

A check detects items that were damaged or exchanged. It is computed where an item is written, travels with
indexer keys and not with the item, and is compared wherever an item is read. It always detects a change
within one 32-bit word, and an intact item with its check at the wrong layer or position; any other error is
missed once in 2**32. ``docs/kv-layout.md`` has the function with fixed vectors.

Both nodes store checks beside the pools (``store_row_checks``, ``void_row_checks``); scrubbing and a start of
a dense row compare items in place (``check_in_place``); swap-in compares each copied item by itself.

``pool``: uint8 [num_layers, num_slots, item_bytes], contiguous. Checks are int32, the bits of an unsigned
number. On a GPU ``kernels/cuda.py`` computes the same numbers, also for a pool in pinned host memory. Only
functions that say so wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import check_range, check_tensor
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.reference_check import reference_checks
from hisparse_pd.kernels.row_errors import HotBufferError, ReadAt, WrongRowField

PageRows: TypeAlias = npt.NDArray[np.int32]
"""Items to verify, int32 [n, 3]: page id, position of the page's first item, and how many items from it on
count."""


class WrongItem(NamedTuple):
    """An item that differs from what was written: where it was found, and the two checks."""

    layer: int
    position: int
    slot: int
    expected: int
    actual: int


class WrongRow(NamedTuple):
    """A request's first wrong item, as ``wrong_row`` reads it."""

    read_at: ReadAt
    item: WrongItem
    is_on_host: bool
    """Whether the item's slot belongs to the host pool, not to the device pool."""


def row_checks_of(pool: Tensor, slots: Tensor, positions: Tensor, first_layer: int = 0) -> Tensor:
    """Return the checks, int32 [num_layers, n], of the items at ``slots`` in each layer of ``pool``.

    ``slots``, ``positions``: int64 [n] on one device: the pool's, or a GPU that reads a pool on the host.
    ``first_layer``: number of the pool's first layer. Raises KernelArgumentError.
    """
    out = torch.empty((pool.shape[0], slots.shape[0]), dtype=torch.int32, device=slots.device)
    _compute(pool, slots, positions, first_layer, out, None)
    return out


def store_row_checks(
    row_checks: Tensor, check_slots: Tensor, pool: Tensor, slots: Tensor, positions: Tensor, layers: range
) -> None:
    """Write the checks of items that were just stored in ``layers`` to ``row_checks``.

    ``row_checks``: int32 [num_layers, num_check_slots]; ``pool``: has as many layers; ``check_slots``,
    ``slots``, ``positions``: int64 [n]; all are on one device. A duplicate check slot may hold anything
    afterwards. Raises KernelArgumentError.
    """
    check_tensor("row_checks", row_checks, dtypes=(torch.int32,), shape=(pool.shape[0], None))
    check_range("first layer", layers.start, 0, pool.shape[0])
    check_range("end of the layers", layers.stop, layers.start + 1, pool.shape[0] + 1)
    only = slice(layers.start, layers.stop)
    _compute(pool[only], slots, positions, layers.start, row_checks[only], check_slots)


def void_row_checks(row_checks: Tensor, page_ids: Tensor, page_size: int) -> None:
    """Invalidate the checks of whole pages, so that they do not match former items if neither a new item nor
    its check arrives.

    ``row_checks``: int32 [num_layers, num_slots], in which slots after the last whole page are unused;
    ``page_ids``: int64 [n] on its device. Their checks become 0, which is the check of one item in 2**32.
    """
    num_layers, num_slots = row_checks.shape
    pages = row_checks[:, : num_slots // page_size * page_size].view(num_layers, -1, page_size)
    pages.index_fill_(1, page_ids, 0)


def wrong_items(
    pool: Tensor, slots: Tensor, row_checks: Tensor, check_slots: Tensor, positions: Tensor
) -> list[WrongItem]:
    """Return, for each slot with a wrong item, the first layer whose item does not match its check.

    ``pool`` and ``row_checks``: have equally many layers; ``slots``, ``check_slots``, ``positions``: int64
    [n] on the device of the checks. Waits for the device. Raises KernelArgumentError.
    """
    actual, expected = row_checks_of(pool, slots, positions), row_checks[:, check_slots]
    is_wrong = actual != expected
    if not is_wrong.any():  # as nearly always: nothing else is launched then
        return []
    wrong = is_wrong.any(dim=0).nonzero()[:, 0]
    layers = is_wrong[:, wrong].int().argmax(dim=0)
    checks = (values[layers, wrong].long() & 0xFFFFFFFF for values in (expected, actual))
    columns = (layers, positions[wrong], slots[wrong], *checks)
    return [WrongItem(*values) for values in torch.stack(columns, dim=1).tolist()]


def begin_check(pool: Tensor, row_checks: Tensor, pages: PageRows, page_size: int) -> Tensor:
    """Compare the items of ``pages`` with their checks. Returns int32 [1], which is not 0 if one is wrong in
    some layer, once the current stream's work is over; ``wrong_items`` then says which.

    ``row_checks``: int32 [num_layers, num_slots], with the layers and slots of ``pool``, on its device.
    Raises KernelArgumentError.
    """
    check_tensor("pool", pool, dtypes=(torch.uint8,), shape=(None, None, None), device=row_checks.device)
    check_tensor("row_checks", row_checks, dtypes=(torch.int32,), shape=pool.shape[:2])
    if len(pages) == 0:
        return torch.zeros(1, dtype=torch.int32, device=pool.device)
    if pool.device.type == "cuda":
        from hisparse_pd.kernels import cuda

        return cuda.begin_check(pool, row_checks, pages, page_size)
    slots, positions = map(torch.from_numpy, items_of_pages(pages, page_size))
    is_wrong = row_checks_of(pool, slots, positions) != row_checks[:, slots]
    return is_wrong.any().int().view(1)


class PageItems(NamedTuple):
    """Slots and positions of items, int64 [num_items] each."""

    slots: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]


def rows_of_pages(
    page_ids: Sequence[int] | npt.NDArray[np.int64], page_size: int, first: int, stop: int
) -> PageRows:
    """Return the items at positions ``[first, stop)`` of a request for verification. ``page_ids``: its pages
    from position ``first`` on, where a page begins; the last one may be partial."""
    positions = np.arange(first, stop, page_size)
    num_items = np.minimum(stop - positions, page_size)
    return np.stack((page_ids[: len(positions)], positions, num_items), axis=1).astype(np.int32)


def items_of_pages(pages: PageRows, page_size: int) -> PageItems:
    """Return the items that count in ``pages``."""
    page_ids, first_positions, num_items = pages.astype(np.int64).T[:, :, None]
    in_page = np.arange(page_size)
    counts = in_page < num_items
    return PageItems((page_ids * page_size + in_page)[counts], (first_positions + in_page)[counts])


def check_in_place(
    state: HotBufferState,
    row: int,
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    is_there: Tensor,
    *,
    read_at: ReadAt,
    first_layer: int = 0,
) -> None:
    """Compare items of the request at ``row`` in place, in each layer of ``pool``, with their checks.

    A wrong item is recorded as in a swap-in: HotBufferError.WRONG_ROW, and the first one in ``wrong_rows``.
    ``slots``, ``positions``: int64 [n], all in range; ``is_there``: bool [n], the items to compare. This only
    launches work on the device.
    """
    if slots.shape[0] == 0:
        return
    num_layers, page_size = pool.shape[0], state.page_size
    check_slots = state.index_pages[row, positions // page_size].long() * page_size + positions % page_size
    row_checks = state.require_row_checks()
    expected = row_checks[first_layer : first_layer + num_layers, check_slots]
    actual = row_checks_of(pool, slots, positions, first_layer)
    is_wrong = ((expected != actual) & is_there).flatten()

    # The first wrong item, layer by layer. Its record is dropped below if no item is wrong or another is
    # recorded. The index keeps a dimension: torch reads an index tensor without dimensions on the host.
    first = is_wrong.int().argmax(dim=0, keepdim=True)
    item = first % slots.shape[0]
    record = torch.cat(
        (
            torch.full_like(first, read_at),
            first_layer + first // slots.shape[0],
            positions[item],
            slots[item],
            expected.flatten()[first].long(),
            actual.flatten()[first].long(),
        )
    ).int()

    flags = state.error_flags[row]
    is_new = is_wrong.any() & ((flags & HotBufferError.WRONG_ROW) == 0)
    state.wrong_rows[row] = torch.where(is_new, record, state.wrong_rows[row])
    state.error_flags[row] = torch.where(is_new, flags | HotBufferError.WRONG_ROW, flags)


def check_dense_row(state: HotBufferState, row: int, pool: Tensor, num_tokens: int) -> None:
    """Compare the items of a dense ``row``'s positions [0, num_tokens) with their checks, as they landed.

    ``pool``: the device pool, in which the row's pages are; otherwise as ``check_in_place``.
    """
    check_range("num_tokens", num_tokens, 0, state.max_context + 1)
    check_tensor("pool", pool, dtypes=(torch.uint8,), shape=(None, None, None), device=state.device)
    state.require_row_checks()
    if num_tokens == 0:
        return
    if pool.device.type == "cuda":
        from hisparse_pd.kernels import cuda

        cuda.check_dense_row(state, row, pool, num_tokens)
        return
    positions = torch.arange(num_tokens)
    pages = state.page_table[row, positions // state.page_size].long()
    slots = pages * state.page_size + positions % state.page_size
    is_there = torch.ones_like(positions, dtype=torch.bool)
    check_in_place(state, row, pool, slots, positions, is_there, read_at=ReadAt.START)


def wrong_row(state: HotBufferState, row: int) -> WrongRow:
    """Return the record in ``state`` of a row whose flags have WRONG_ROW. Waits for the device."""
    values = state.wrong_rows[row].tolist()
    read_at = ReadAt(values[WrongRowField.READ_AT])
    # Swap-in, warm-up and the fill of a resident row, whose copies count as swap-ins, read in the host pool;
    # all else is read in the device pool.
    is_warm_up = read_at is ReadAt.START and int(state.capacity[row]) > 0
    is_on_host = is_warm_up or read_at is ReadAt.SWAP_IN
    layer, position, slot, expected, actual = values[WrongRowField.LAYER : WrongRowField.ACTUAL + 1]
    item = WrongItem(layer, position, slot, expected & 0xFFFFFFFF, actual & 0xFFFFFFFF)
    return WrongRow(read_at, item, is_on_host)


def _compute(
    pool: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
    out: Tensor,
    out_slots: Tensor | None,
) -> None:
    """Fill ``out`` [num_layers, n], or only its columns ``out_slots`` [n]."""
    check_tensor("pool", pool, dtypes=(torch.uint8,), shape=(None, None, None))
    device, shape = slots.device, (slots.shape[0],)
    for name, tensor in (("slots", slots), ("positions", positions), ("out_slots", out_slots)):
        if tensor is not None:
            check_tensor(name, tensor, dtypes=(torch.int64,), shape=shape, device=device)
    if slots.shape[0] == 0:
        return
    if device.type == "cuda":
        from hisparse_pd.kernels import cuda

        cuda.row_checks(pool, slots, positions, first_layer, out, out_slots)
        return
    where = slice(None) if out_slots is None else out_slots
    for layer in range(pool.shape[0]):
        out[layer, where] = reference_checks(pool[layer][slots], first_layer + layer, positions)
