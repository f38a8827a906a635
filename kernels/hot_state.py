"""The tables behind the hot buffers: which position is where, for every request and index group.

An index group is a layer with its own indexer and the shared-index layers behind it: they select the same
positions, so one set of tables serves them all. A hot buffer is a list of device slots that one request owns;
entry ``i`` is a hot_index, and the slot behind it is the same in every layer because pools are layer-major.

Rules that every writer of the tables keeps:

- ``position_to_hot`` and ``hot_to_position`` are inverse to each other in every group and row.
- While ``seq_len <= capacity`` position ``p`` lives at hot_index ``p``.
- From then on the newest position lives at hot_index ``capacity - 1``, and the others anywhere below it.
- An entry that has to make room is of the oldest age class there is; free entries are older than any, and
  those of one class go in the order of their hot_index.
- A row of capacity 0 is dense: its positions are found through ``page_table``.

The tensors live on the model's device with fixed addresses, so that a CUDA graph can hold them; the CPU
reference works on the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch
from torch import Tensor

from kernels.checks import KernelArgumentError, check_at_least, check_range, check_tensor

ABSENT = -1
"""No position, no hot_index, no slot: the sentinel of every table."""

HITS, MISSES, EVICTIONS = range(3)
"""Columns of ``counters``."""


class HotBufferError(IntFlag):
    """Bits of ``error_flags``. A set bit means that the row's output of that step has missing slots."""

    NONE = 0
    TOO_MANY_MISSES = 1
    """More misses than entries that may be evicted: the capacity is below top_k + 1."""
    BAD_POSITION = 2
    """A selected position outside [0, seq_len)."""
    NO_HOST_SLOT = 4
    """A miss on a position that has no host slot."""


@dataclass(frozen=True)
class HotBufferState:
    """Per-request tables on one device; all int32 unless said otherwise, ABSENT where empty.

    A request's row is its req_row. Counters and flags accumulate until ``reset_row``.
    """

    position_to_hot: Tensor
    """[num_groups, num_rows, max_context] hot_index of a position."""
    hot_to_position: Tensor
    """[num_groups, num_rows, max_capacity] position at a hot_index."""
    stamps: Tensor
    """[num_groups, num_rows, max_capacity] step in which the entry was last used; ABSENT where free."""
    step: Tensor
    """[num_groups, num_rows] swap-ins of the row so far."""
    hot_slots: Tensor
    """[num_rows, max_capacity] device slot of a hot_index below ``capacity``."""
    capacity: Tensor
    """[num_rows] entries of the hot buffer; 0 for a dense row."""
    page_table: Tensor
    """[num_rows, max_pages] device page_id of each page of a dense row."""
    host_slots: Tensor
    """[num_rows, max_context] int64, host slot of each position of a hisparse row."""
    counters: Tensor
    """[num_rows, 3] int64: distinct selected positions that were hot, that were not, and evicted entries."""
    error_flags: Tensor
    """[num_rows] HotBufferError bits."""
    page_size: int

    @classmethod
    def create(
        cls,
        num_groups: int,
        num_rows: int,
        max_context: int,
        max_capacity: int,
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> HotBufferState:
        """Empty tables: every row is dense and has no pages."""
        for name, value in (
            ("num_groups", num_groups),
            ("num_rows", num_rows),
            ("max_context", max_context),
            ("max_capacity", max_capacity),
            ("page_size", page_size),
        ):
            check_at_least(name, value, 1)
        max_pages = -(-max_context // page_size)

        def table(*shape: int, fill: int = ABSENT, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=device)

        return cls(
            position_to_hot=table(num_groups, num_rows, max_context),
            hot_to_position=table(num_groups, num_rows, max_capacity),
            stamps=table(num_groups, num_rows, max_capacity),
            step=table(num_groups, num_rows, fill=0),
            hot_slots=table(num_rows, max_capacity),
            capacity=table(num_rows, fill=0),
            page_table=table(num_rows, max_pages),
            host_slots=table(num_rows, max_context, dtype=torch.int64),
            counters=table(num_rows, 3, fill=0, dtype=torch.int64),
            error_flags=table(num_rows, fill=0),
            page_size=page_size,
        )

    @property
    def num_groups(self) -> int:
        return self.position_to_hot.shape[0]

    @property
    def num_rows(self) -> int:
        return self.position_to_hot.shape[1]

    @property
    def max_context(self) -> int:
        return self.position_to_hot.shape[2]

    @property
    def max_capacity(self) -> int:
        return self.hot_to_position.shape[2]

    @property
    def max_pages(self) -> int:
        return self.page_table.shape[1]

    @property
    def device(self) -> torch.device:
        return self.position_to_hot.device

    def reset_row(self, row: int) -> None:
        """Forget everything about ``row``; it is dense, without pages, afterwards."""
        check_range("row", row, 0, self.num_rows)
        self.position_to_hot[:, row] = ABSENT
        self.hot_to_position[:, row] = ABSENT
        self.stamps[:, row] = ABSENT
        self.step[:, row] = 0
        self.hot_slots[row] = ABSENT
        self.capacity[row] = 0
        self.page_table[row] = ABSENT
        self.host_slots[row] = ABSENT
        self.counters[row] = 0
        self.error_flags[row] = 0

    def assign_row(self, row: int, capacity: int, hot_slots: Tensor, host_slots: Tensor) -> None:
        """Make ``row`` a hisparse row with an empty hot buffer.

        ``hot_slots``: integer [capacity], the device slots that the request owns.
        ``host_slots``: integer [n], n <= max_context, host slots of positions [0, n): its whole life.
        """
        check_range("row", row, 0, self.num_rows)
        check_range("capacity", capacity, 1, self.max_capacity + 1)
        integers = (torch.int32, torch.int64)
        check_tensor("hot_slots", hot_slots, dtypes=integers, shape=(capacity,))
        check_tensor("host_slots", host_slots, dtypes=integers, shape=(None,))
        check_range("host_slots length", host_slots.shape[0], 0, self.max_context + 1)
        self.reset_row(row)
        self.hot_slots[row, :capacity] = hot_slots.to(self.hot_slots)
        self.host_slots[row, : host_slots.shape[0]] = host_slots.to(self.host_slots)
        self.capacity[row] = capacity

    def resize_row(self, row: int, capacity: int, hot_slots: Tensor, seq_len: int) -> None:
        """Give a hisparse row another capacity between two of its steps; what stays hot is not copied again.

        ``hot_slots``: integer [capacity]. An entry that the row keeps must keep its device slot too.
        ``seq_len``: tokens in the row's last step; before its first one, the ``num_tokens`` of ``preload``.

        Must come after ``backup_newest`` of the last step and before ``newest_slots`` of the next, because
        both take the newest position to be at hot_index ``capacity - 1``: the last step's newest position
        becomes one like any other, which may be forgotten only when its bytes are on the host.

        Forgotten in every group: what lived at a hot_index from ``capacity`` on, whose device slots may be
        given away, and, when the row fits the new buffer (``seq_len <= capacity``), what is not at its own
        hot_index. It comes back by a miss, and is not counted as an eviction.

        Synchronises with the device. Raises KernelArgumentError, and has changed nothing then.
        """
        check_range("row", row, 0, self.num_rows)
        check_range("capacity", capacity, 1, self.max_capacity + 1)
        check_tensor("hot_slots", hot_slots, dtypes=(torch.int32, torch.int64), shape=(capacity,))
        check_range("seq_len", seq_len, 0, self.max_context + 1)
        old_capacity = int(self.capacity[row])
        if old_capacity == 0:
            raise KernelArgumentError(f"row: expected a hisparse row, got row {row}, which is dense")
        num_kept = min(old_capacity, capacity)
        old_slots, new_slots = self.hot_slots[row, :num_kept].cpu(), hot_slots[:num_kept].cpu()
        moved = torch.nonzero(old_slots != new_slots).flatten()
        if moved.numel():
            entry = int(moved[0])
            raise KernelArgumentError(
                f"hot_slots: expected the first {num_kept} as they were, "
                f"got {int(new_slots[entry])} for {int(old_slots[entry])} at hot_index {entry}"
            )
        hot_indices, positions = self.position_to_hot[:, row], self.hot_to_position[:, row]
        entries = torch.arange(self.max_capacity, device=self.device)
        is_lost, is_freed = hot_indices >= num_kept, entries >= num_kept
        if seq_len <= capacity:
            is_lost = is_lost | (hot_indices != torch.arange(self.max_context, device=self.device))
            is_freed = is_freed | (positions != entries)
        hot_indices.masked_fill_(is_lost, ABSENT)
        positions.masked_fill_(is_freed, ABSENT)
        self.stamps[:, row].masked_fill_(is_freed, ABSENT)
        self.hot_slots[row, :capacity] = hot_slots.to(self.hot_slots)
        self.hot_slots[row, capacity:] = ABSENT
        self.capacity[row] = capacity

    def assign_dense_row(self, row: int, page_ids: Tensor) -> None:
        """Make ``row`` a dense row whose first pages are ``page_ids`` (integer [n])."""
        self.reset_row(row)
        self.set_pages(row, 0, page_ids)

    def set_pages(self, row: int, first_page: int, page_ids: Tensor) -> None:
        """Set the page ids of a dense row from its page number ``first_page`` on: how it grows."""
        check_range("row", row, 0, self.num_rows)
        check_tensor("page_ids", page_ids, dtypes=(torch.int32, torch.int64), shape=(None,))
        end_page = first_page + page_ids.shape[0]
        check_at_least("first_page", first_page, 0)
        check_range("first_page + number of page_ids", end_page, 0, self.max_pages + 1)
        self.page_table[row, first_page:end_page] = page_ids.to(self.page_table)

    def check_consistency(self, seq_lens: dict[int, int] | None = None) -> None:
        """Verify the rules above for every row; with ``seq_lens`` (of a row's last step) placement too.

        Synchronises with the device. Raises RuntimeError with group, row, hot_index and both values.
        """
        capacities = self.capacity.tolist()
        for group in range(self.num_groups):
            self._check_dense_rows(group)
            for row, capacity in enumerate(capacities):
                if capacity:
                    self._check_row(group, row, capacity, (seq_lens or {}).get(row))

    def _check_dense_rows(self, group: int) -> None:
        is_used = (self.hot_to_position[group] != ABSENT).any(1) | (
            self.position_to_hot[group] != ABSENT
        ).any(1)
        wrong = torch.nonzero(is_used & (self.capacity == 0)).flatten()
        if wrong.numel():
            raise RuntimeError(f"group {group}, row {int(wrong[0])}: entries in use, but its capacity is 0")

    def _check_row(self, group: int, row: int, capacity: int, seq_len: int | None) -> None:
        where = f"group {group}, row {row}"
        forward = self.position_to_hot[group, row].cpu()
        backward = self.hot_to_position[group, row].cpu()
        stamps = self.stamps[group, row].cpu()
        step = int(self.step[group, row])
        positions = torch.nonzero(forward != ABSENT).flatten()
        entries = torch.nonzero(backward != ABSENT).flatten()
        if positions.numel() != entries.numel():
            raise RuntimeError(f"{where}: {positions.numel()} hot positions, {entries.numel()} used entries")
        if entries.numel() and int(entries[-1]) >= capacity:
            raise RuntimeError(f"{where}: hot_index {int(entries[-1])} in use, capacity is {capacity}")
        hot_indices = forward[positions].long()
        is_lost = backward[hot_indices.clamp(0, capacity - 1)] != positions
        if is_lost.any():
            position, hot_index = int(positions[is_lost][0]), int(hot_indices[is_lost][0])
            raise RuntimeError(
                f"{where}: position {position} maps to hot_index {hot_index}, which is another's"
            )
        mismatched = torch.nonzero((stamps == ABSENT) != (backward == ABSENT)).flatten()
        if mismatched.numel():
            entry = int(mismatched[0])
            raise RuntimeError(
                f"{where}: hot_index {entry} has stamp {int(stamps[entry])} "
                f"and position {int(backward[entry])}"
            )
        if int(stamps.max()) > step:
            raise RuntimeError(f"{where}: stamp {int(stamps.max())} after step {step}")
        if seq_len is None or step == 0:
            return
        if seq_len <= capacity:
            is_moved = hot_indices != positions
            if is_moved.any():
                position, hot_index = int(positions[is_moved][0]), int(hot_indices[is_moved][0])
                raise RuntimeError(
                    f"{where}: position {position} is at hot_index {hot_index}, not at its own"
                )
        elif int(backward[capacity - 1]) != seq_len - 1:
            raise RuntimeError(
                f"{where}: hot_index {capacity - 1} holds position {int(backward[capacity - 1])}, "
                f"not the newest one, {seq_len - 1}"
            )
