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

The rules that every writer of the tables keeps stand with the tables (``HotBufferState``), and in
``step_requests.py`` those for the new positions of a step.

A decode engine has one state. Its request tables fill, extend and reset rows (the methods below,
``swap_in.RowStart`` and ``hot_entries.py``), and each step reads and updates them in ``swap_in``.

The tensors live on the model's device with fixed addresses, so that a CUDA graph can hold them; the CPU
reference works on the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import (
    KernelArgumentError,
    check_at_least,
    check_page_ids,
    check_range,
    check_tensor,
)
from hisparse_pd.kernels.row_errors import WrongRowField

INTEGERS = (torch.int32, torch.int64)

ABSENT = -1
"""The sentinel of every table: no position, no hot_index, no slot."""

HITS, MISSES, EVICTIONS = range(3)
"""Columns of ``HotBufferState.counters``."""

MAX_DROPPED_ENTRIES = 1 << 21
"""Most entries, those of all groups together, that are emptied at once. Temporary tensors take 17 bytes of
each."""

MAX_TABLE_SLOTS = 2**31 - 1
"""Most slots of a pool that a table has, with those that stay unused: slots are int32 on the device."""
MAX_LOOKUP_SLOTS = MAX_TABLE_SLOTS - 1
"""Most lookup slots, of which the tables have one more, and most host slots: both are int32 on the device."""


@dataclass(frozen=True)
class HotBufferState:
    """Per-request tables on one device; all int32 unless said otherwise, ABSENT where empty.

    A request's row is its req_row. Counters and flags accumulate until ``reset_rows``.
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

    def reset_rows(self, *rows: int) -> None:
        """Empty ``rows``; afterwards they are dense and have no pages. Rows with MAX_DROPPED_ENTRIES together
        take as many launches as one."""
        most = max(1, MAX_DROPPED_ENTRIES // (self.num_groups * self.max_capacity))
        for first in range(0, len(rows), most):
            some = self._drop_hot_buffers(rows[first : first + most])
            for table in (self.page_table, self.host_pages, self.lookup_pages):
                table.index_fill_(0, some, ABSENT)
            for table in (self.index_pages, self.counters, self.error_flags):
                table.index_fill_(0, some, 0)

    def drop_hot_buffer(self, row: int) -> None:
        """Take the hot buffer of ``row`` away: steps find its positions in ``page_table`` from then on. It
        keeps its counters and flags."""
        self._drop_hot_buffers((row,))

    def _drop_hot_buffers(self, row_numbers: Sequence[int]) -> Tensor:
        """Take the hot buffers of some rows away. Returns the rows, int64 [n], on the tables' device."""
        for row in row_numbers:
            check_range("row", row, 0, self.num_rows)
        rows = torch.empty(len(row_numbers), dtype=torch.int64, device=self.device)
        _write(rows, torch.tensor(row_numbers))
        slots = self.entry_slots(rows).flatten()
        self._clear_lookups(self.hot_to_lookup[:, slots])
        self.hot_to_lookup.index_fill_(1, slots, ABSENT)
        self.stamps.index_fill_(1, slots, ABSENT)
        self.step.index_fill_(1, rows, 0)
        self.hot_pages.index_fill_(0, rows, ABSENT)
        self.capacity.index_fill_(0, rows, 0)
        return rows

    def entry_slots(self, row: int | Tensor) -> Tensor:
        """Return the device slot of each hot_index of ``row``, int64 [max_capacity], on the tables' device.
        An entry without a page has a slot of the unused page, whose words are ABSENT. Of several rows, int64
        [n] on that device, the result is [n, max_capacity]."""
        pages = self.hot_pages[row].long()
        unused_page = self.num_device_slots // self.page_size
        pages = torch.where(pages == ABSENT, unused_page, pages)
        in_page = torch.arange(self.page_size, device=self.device)
        return (pages[..., None] * self.page_size + in_page).flatten(-2)[..., : self.max_capacity]

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
        self.reset_rows(row)
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


def _write(to: Tensor, values: Tensor) -> None:
    """Write ``values`` to ``to``, a part of a table, in stream order and without waiting for a GPU."""
    values = values.to(to.dtype)
    if to.device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()
    to.copy_(values, non_blocking=True)
