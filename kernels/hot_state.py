"""The tables of the hot buffers: where each position is, for every request and index group.

An index group is a layer with its own indexer and the shared-index layers behind it. They select the same
positions, so one set of tables serves them all. A hot buffer is a list of device pages that one request owns;
entry ``i`` is a hot_index, and its slot is the same in every layer because pools are layer-major. What an
entry holds stands at its device slot: a slot belongs to one request at a time, so the tables of entries grow
with the device pool and not with the rows times the largest buffer.

A selected position of a hisparse row is found through four tables. With pages of 64, position 130 is token 2
of the row's page 2::

    lookup_pages[row, 2]              7: the page has the lookup slots from 7 * 64 on
    lookup_to_hot[group, 7 * 64 + 2]  40: the position's hot_index; ABSENT means a miss
    hot_pages[row, 0]                 5: entry 40 is the device slot 5 * 64 + 40, which the model reads
    host_pages[row, 2]                the page of the host pool from which a miss is copied

In a dense row ``page_table[row, 2]`` is the position's page in the device pool, and there are no misses. A
resident row is found in the same way; it has host pages, too, to which its newest items are backed up.

The rules that every writer of the tables keeps stand with the tables (``HotBufferState``), and with
``ring_entries`` those for the new positions of a step.

A decode engine has one state. Its request tables fill, extend and reset rows (the methods below,
``swap_in.RowStart`` and ``hot_entries.py``), and each step reads and updates them in ``swap_in``.

The tensors live on the model's device with fixed addresses, so that a CUDA graph can hold them; the CPU
reference works on the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError, check_at_least, check_range, check_tensor

INTEGERS = (torch.int32, torch.int64)

ABSENT = -1
"""The sentinel of every table: no position, no hot_index, no slot."""

HITS, MISSES, EVICTIONS = range(3)
"""Columns of ``HotBufferState.counters``."""

MAX_TABLE_SLOTS = 2**31 - 1
"""Most slots of a pool that a table has, with those that stay unused: slots are int32 on the device."""
MAX_LOOKUP_SLOTS = MAX_TABLE_SLOTS - 1
"""Most lookup slots, of which the tables have one more, and most host slots: both are int32 on the device."""


class HotBufferError(IntFlag):
    """Bits of ``error_flags``. A set bit means that the row's output of that step has missing slots."""

    NONE = 0
    TOO_MANY_MISSES = 1
    """There were more misses than entries to evict: the capacity is below num_new * top_k + max_new."""
    BAD_POSITION = 2
    """A selected position was outside [0, seq_len)."""
    NO_HOST_SLOT = 4
    """A selected position other than a draft had no host slot, or a new item of a resident row no device
    slot. If it was the first new one, whose item could not be backed up, the row was left out like
    padding."""
    WRONG_ROW = 8
    """An item that was read is not the one that was written for its layer and position: ``wrong_rows`` has
    the first such item. No result computed from it may be used."""


class ReadAt(IntEnum):
    """The reads at which items are checked; the values of ``WrongRowField.READ_AT``."""

    START = 0
    """The fill of a row's tables: warm-up of its hot buffer, or a check of its dense pages."""
    SWAP_IN = 1
    """A copy of a miss."""
    SCRUB = 2
    """A check of an item in place, in the device pool."""


class WrongRowField(IntEnum):
    """Columns of ``wrong_rows``."""

    READ_AT = 0
    """A ``ReadAt``."""
    LAYER = 1
    POSITION = 2
    SLOT = 3
    EXPECTED = 4
    """The row check that was stored when the item was written."""
    ACTUAL = 5
    """The row check of the bytes that were read."""


@dataclass(frozen=True)
class HotBufferState:
    """Per-request tables on one device; all int32 unless said otherwise, ABSENT where empty.

    A request's row is its req_row. Counters and flags accumulate until ``reset_row``.
    """

    ENTRY_BYTES: ClassVar = 8
    """Bytes of the entry at a device slot in one group: a word each in ``hot_to_lookup`` and ``stamps``."""

    lookup_to_hot: Tensor
    """[num_groups, num_lookup_slots + 1] hot_index of a lookup slot; the last slot is unused and empty. A
    lookup slot is in at most one hot buffer, and those that belong to no hisparse row are empty."""
    hot_to_lookup: Tensor
    """[num_groups, num_device_slots + page_size] lookup slot that the entry at a device slot holds: with
    ``hot_pages``, the inverse of ``lookup_to_hot``. A slot that is no entry of a row has ABSENT here and in
    ``stamps``: one whose page is in no hot buffer, one behind its buffer's capacity, and those of the last
    page, which is unused. Whoever takes an entry from a hot buffer therefore empties its words, and whoever
    gives it a page finds them empty."""
    stamps: Tensor
    """[num_groups, num_device_slots + page_size] step in which the entry at a device slot was last used;
    ABSENT where free. An evicted entry is of the oldest age class present: a class has one age, or a range of
    great ages (``reference.age_classes``). Free entries are older than all others, and entries of one class
    are taken in the order of their hot_index."""
    step: Tensor
    """[num_groups, num_rows] swap-ins of the row so far."""
    hot_pages: Tensor
    """[num_rows, pages of max_capacity] device page_id of each page of a row's hot buffer, which no other row
    and no ``page_table`` has. The last page may be longer than ``capacity``."""
    capacity: Tensor
    """[num_rows] entries of the hot buffer; 0 for a dense or resident row, whose positions are found through
    ``page_table``."""
    page_table: Tensor
    """[num_rows, max_pages] device page_id of each page of a dense or resident row, and of a row with a hot
    buffer whose pages are being filled; steps do not read it there."""
    host_pages: Tensor
    """[num_rows, max_pages] host page_id of each page of a hisparse row: where the bytes are. Rows that begin
    alike may share it. Only copies of bytes read it: misses, backup and warm-up."""
    lookup_pages: Tensor
    """[num_rows, max_pages] lookup page_id of each page of a hisparse row: an index into ``lookup_to_hot``,
    without bytes of its own, which rows never share. That table therefore grows with the tokens that can be
    looked up at once, not with the rows times the longest context."""
    index_pages: Tensor
    """[num_rows, max_pages] page_id of each page of a row's indexer keys; 0 where there is none."""
    counters: Tensor
    """[num_rows, 3] int64: distinct selected positions that were hot or were missing, and evicted entries."""
    error_flags: Tensor
    """[num_rows] HotBufferError bits."""
    wrong_rows: Tensor
    """[num_rows, 6] the first wrong item of a row with WRONG_ROW, by WrongRowField; without it, anything."""
    max_context: int
    """Most positions of a row."""
    max_capacity: int
    """Most entries of a hot buffer."""
    page_size: int
    max_new: int = 1
    """Most new positions of a request in one step: its newest token's and its drafts'."""
    row_checks: Tensor | None = None
    """[num_layers, num_index_slots] the expected check of each item (``row_check.py``), found through
    ``index_pages`` as its indexer key is. The writers of items write it. Every copy from the host is verified
    by it (HotBufferError.WRONG_ROW). None: items are not verified."""

    @classmethod
    def create(
        cls,
        num_groups: int,
        num_rows: int,
        max_context: int,
        max_capacity: int,
        page_size: int,
        num_lookup_slots: int,
        num_device_slots: int,
        device: torch.device | str = "cpu",
        max_new: int = 1,
        row_checks: Tensor | None = None,
    ) -> HotBufferState:
        """Return empty tables: every row is dense and has no pages. ``num_lookup_slots``: whole pages.

        ``num_device_slots``: the slots of the device pool that hot buffers may have, whole pages.
        ``max_new``: at most ``page_size``, so that the new positions of a step are in at most two pages.
        """
        if row_checks is not None:
            check_tensor("row_checks", row_checks, dtypes=(torch.int32,), shape=(None, None))
        for name, value in (
            ("num_groups", num_groups),
            ("num_rows", num_rows),
            ("max_context", max_context),
            ("max_capacity", max_capacity),
            ("page_size", page_size),
            ("num_lookup_slots", num_lookup_slots),
        ):
            check_at_least(name, value, 1)
        check_range("num_lookup_slots", num_lookup_slots, 1, MAX_LOOKUP_SLOTS + 1)
        check_range("num_device_slots", num_device_slots, 0, MAX_TABLE_SLOTS - page_size + 1)
        check_range("max_new", max_new, 1, page_size + 1)
        for name, num_slots in (
            ("num_lookup_slots", num_lookup_slots),
            ("num_device_slots", num_device_slots),
        ):
            if num_slots % page_size:
                raise KernelArgumentError(f"{name}: expected whole pages of {page_size}, got {num_slots}")
        max_pages = -(-max_context // page_size)

        def table(*shape: int, fill: int = ABSENT, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        return cls(
            lookup_to_hot=table(num_groups, num_lookup_slots + 1),
            hot_to_lookup=table(num_groups, num_device_slots + page_size),
            stamps=table(num_groups, num_device_slots + page_size),
            step=table(num_groups, num_rows, fill=0),
            hot_pages=table(num_rows, -(-max_capacity // page_size)),
            capacity=table(num_rows, fill=0),
            page_table=table(num_rows, max_pages),
            host_pages=table(num_rows, max_pages),
            lookup_pages=table(num_rows, max_pages),
            index_pages=table(num_rows, max_pages, fill=0),
            counters=table(num_rows, 3, fill=0, dtype=torch.int64),
            error_flags=table(num_rows, fill=0),
            wrong_rows=table(num_rows, len(WrongRowField)),
            max_context=max_context,
            max_capacity=max_capacity,
            page_size=page_size,
            max_new=max_new,
            row_checks=row_checks,
        )

    @property
    def num_groups(self) -> int:
        return self.hot_to_lookup.shape[0]

    @property
    def num_rows(self) -> int:
        return self.capacity.shape[0]

    @property
    def num_device_slots(self) -> int:
        return self.hot_to_lookup.shape[1] - self.page_size

    @property
    def num_lookup_slots(self) -> int:
        return self.lookup_to_hot.shape[1] - 1

    @property
    def max_pages(self) -> int:
        return self.page_table.shape[1]

    @property
    def device(self) -> torch.device:
        return self.hot_to_lookup.device

    def require_row_checks(self) -> Tensor:
        """Return ``row_checks``. Raises KernelArgumentError when there are none."""
        if self.row_checks is None:
            raise KernelArgumentError("row_checks: expected a tensor, got None; its rows are not verified")
        return self.row_checks

    # The methods below only launch work on the current stream of the tables' device, and never wait for it.

    def reset_row(self, row: int) -> None:
        """Empty ``row``; afterwards it is dense and has no pages."""
        self.drop_hot_buffer(row)
        self.drop_pages(row)
        self.host_pages[row].fill_(ABSENT)
        self.lookup_pages[row].fill_(ABSENT)
        self.index_pages[row].fill_(0)
        self.counters[row].fill_(0)
        self.error_flags[row].fill_(0)

    def drop_hot_buffer(self, row: int) -> None:
        """Take the hot buffer of ``row`` away: steps find its positions in ``page_table`` from then on. It
        keeps its counters and flags."""
        check_range("row", row, 0, self.num_rows)
        slots = self.entry_slots(row)
        self._clear_lookups(self.hot_to_lookup[:, slots])
        self.hot_to_lookup.index_fill_(1, slots, ABSENT)
        self.stamps.index_fill_(1, slots, ABSENT)
        self.step[:, row].fill_(0)
        self.hot_pages[row].fill_(ABSENT)
        self.capacity[row].fill_(0)

    def entry_slots(self, row: int) -> Tensor:
        """Return the device slot of each hot_index of ``row``, int64 [max_capacity], on the tables' device.
        An entry without a page has a slot of the unused page, whose words are ABSENT."""
        pages = self.hot_pages[row].long()
        unused_page = self.num_device_slots // self.page_size
        pages = torch.where(pages == ABSENT, unused_page, pages)
        in_page = torch.arange(self.page_size, device=self.device)
        return (pages[:, None] * self.page_size + in_page).flatten()[: self.max_capacity]

    def drop_pages(self, row: int) -> None:
        """Empty the row's ``page_table``, which steps do not read while it has a hot buffer."""
        check_range("row", row, 0, self.num_rows)
        self.page_table[row].fill_(ABSENT)

    def assign_row(
        self, row: int, capacity: int, hot_pages: Tensor, host_pages: Tensor, lookup_pages: Tensor
    ) -> None:
        """Make ``row`` a hisparse row with an empty hot buffer, for trials and tests; the rows of requests
        start warm (``swap_in.RowStart``).

        ``capacity``: at least ``max_new``. ``hot_pages``: integer [pages of capacity], the ids of the device
        pages that the request owns. ``host_pages``, ``lookup_pages``: integer [n], the ids of its first
        pages; ``set_host_pages`` adds more.
        """
        self.check_hisparse(row, capacity, hot_pages, host_pages, lookup_pages)
        self.reset_row(row)
        self.set_hot_pages(row, capacity, hot_pages)
        self.set_host_pages(row, 0, host_pages, lookup_pages)

    def check_hisparse(
        self, row: int, capacity: int, hot_pages: Tensor, host_pages: Tensor, lookup_pages: Tensor
    ) -> None:
        """Raise KernelArgumentError unless ``assign_row`` can take the arguments."""
        self.check_hot_pages(row, capacity, hot_pages)
        self.check_pages("host_pages", 0, host_pages)
        check_tensor("lookup_pages", lookup_pages, dtypes=INTEGERS, shape=(host_pages.shape[0],))
        check_page_ids("lookup_pages", lookup_pages, self.num_lookup_slots // self.page_size)

    def check_hot_pages(self, row: int, capacity: int, hot_pages: Tensor) -> None:
        """Raise KernelArgumentError unless ``set_hot_pages`` can take the arguments."""
        check_range("row", row, 0, self.num_rows)
        check_range("capacity", capacity, self.max_new, self.max_capacity + 1)
        num_pages = -(-capacity // self.page_size)
        check_tensor("hot_pages", hot_pages, dtypes=INTEGERS, shape=(num_pages,))
        check_page_ids("hot_pages", hot_pages, self.num_device_slots // self.page_size)

    def check_pages(self, name: str, first_page: int, page_ids: Tensor) -> None:
        """Raise KernelArgumentError unless a row has room for ``page_ids`` (integer [n])."""
        check_tensor(name, page_ids, dtypes=INTEGERS, shape=(None,))
        check_at_least("first_page", first_page, 0)
        end_page = first_page + page_ids.shape[0]
        check_range(f"first_page + number of {name}", end_page, 0, self.max_pages + 1)

    def set_pages(self, row: int, first_page: int, page_ids: Tensor) -> None:
        """Set the page ids of a dense row from its page number ``first_page`` on, such as when it grows."""
        self._set_page_ids(self.page_table, row, first_page, page_ids)

    def set_host_pages(self, row: int, first_page: int, host_pages: Tensor, lookup_pages: Tensor) -> None:
        """Set the page ids of a hisparse row from its page number ``first_page`` on, such as when it grows.

        A page that the row already has may only be set to the same ids again.
        """
        check_tensor("lookup_pages", lookup_pages, dtypes=INTEGERS, shape=(host_pages.shape[0],))
        self._set_page_ids(self.host_pages, row, first_page, host_pages)
        self._set_page_ids(self.lookup_pages, row, first_page, lookup_pages)

    def set_index_pages(self, row: int, first_page: int, page_ids: Tensor) -> None:
        """Set the page ids of a row's indexer keys from its page number ``first_page`` on."""
        self._set_page_ids(self.index_pages, row, first_page, page_ids)

    def _set_page_ids(self, table: Tensor, row: int, first_page: int, page_ids: Tensor) -> None:
        check_range("row", row, 0, self.num_rows)
        self.check_pages("page_ids", first_page, page_ids)
        _write(table[row, first_page : first_page + page_ids.shape[0]], page_ids)

    def set_hot_pages(self, row: int, capacity: int, hot_pages: Tensor) -> None:
        """Set the device pages of a row's hot buffer and its capacity. The row has no hot buffer, or keeps
        those of its pages that have entries."""
        num_pages = hot_pages.shape[0]
        _write(self.hot_pages[row, :num_pages], hot_pages)
        self.hot_pages[row, num_pages:].fill_(ABSENT)
        self.capacity[row].fill_(capacity)

    def _clear_lookups(self, lookup_slots: Tensor) -> None:
        """Empty ``lookup_to_hot`` at ``lookup_slots``, [num_groups, n], of which ABSENT ones are skipped."""
        unused_slot = self.num_lookup_slots
        slots = torch.where(lookup_slots < 0, unused_slot, lookup_slots).long()
        self.lookup_to_hot.scatter_(1, slots, ABSENT)


@dataclass(frozen=True)
class StepRequests:
    """The requests of one step on the tables of ``state``; padding comes last.

    Raises KernelArgumentError. Values in tensors are checked by the kernels: a GPU treats a request with a
    value out of range as padding, the CPU raises KernelArgumentError.
    """

    state: HotBufferState
    seq_lens: Tensor
    """int32 or int64 [num_reqs], tokens of each request including the last new one: its new positions are
    [seq_len - num_new, seq_len). The first new position must be inside the context. Others may be beyond it,
    or beyond the request's pages: such a draft has no slot (-1), and changes nothing."""
    req_rows: Tensor
    """int32 or int64 [num_reqs], distinct rows of the tables, all in [0, num_rows)."""
    num_real_reqs: Tensor
    """int32 [1]; requests from this index on are padding and are ignored."""
    num_new: int = 1
    """New positions of each request, 1 to ``state.max_new``: the newest token's and its drafts'."""

    def __post_init__(self) -> None:
        device, num_reqs = self.state.device, self.seq_lens.shape[0]
        check_tensor("seq_lens", self.seq_lens, dtypes=INTEGERS, shape=(num_reqs,), device=device)
        check_tensor("req_rows", self.req_rows, dtypes=INTEGERS, shape=(num_reqs,), device=device)
        check_tensor("num_real_reqs", self.num_real_reqs, dtypes=(torch.int32,), shape=(1,), device=device)
        check_range("num_new", self.num_new, 1, self.state.max_new + 1)

    @property
    def num_reqs(self) -> int:
        return self.seq_lens.shape[0]


def ring_entries(
    positions: npt.NDArray[np.int64], capacity: npt.NDArray[np.int64], max_new: int
) -> npt.NDArray[np.int64]:
    """Return the hot_index of ``positions`` in a step in which they are new; arguments broadcast.

    This is the position itself while that is below ``capacity``. Later positions take the last ``max_new``
    entries, the ring, in turn: with a capacity of 100 and a ``max_new`` of 4, position 99 is at hot_index 99,
    and 100, 101, 102, 103, 104 are at 96, 97, 98, 99, 96.

    A row fits while the ``max_new`` positions from its first new one on are all below ``capacity``: then any
    position is at the hot_index of its own number. Once a row does not fit, positions that are not new are
    anywhere below the ring. It must not fit again later; therefore the first new position decides, and not
    the last one, which rejected drafts move back.

    A rejected draft stays in its entry until its position is new again. No look-up finds it: until then the
    position is at or beyond every ``seq_len``, and when it is new it gets the same entry.
    """
    in_ring = capacity - max_new + (positions - capacity) % max_new
    return np.where(positions < capacity, positions, in_ring)


def _write(to: Tensor, values: Tensor) -> None:
    """Write ``values`` to ``to``, a part of a table, in stream order and without waiting for a GPU."""
    values = values.to(to.dtype)
    if to.device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    to.copy_(values, non_blocking=True)


def check_page_ids(name: str, page_ids: Tensor, num_pages: int) -> None:
    """Raise KernelArgumentError if ``page_ids`` are on the CPU and not all in [0, num_pages)."""
    if page_ids.device.type == "cpu" and page_ids.numel():
        check_range(f"{name} lowest", int(page_ids.min()), 0, num_pages)
        check_range(f"{name} highest", int(page_ids.max()), 0, num_pages)
