"""The hot buffers against a naive model, through seeded histories of admissions, steps and releases.

``tests.gpu.history`` draws them, and checks every byte (I3, I4); the naive model, of Python lists, says which
slot each position has, and what is counted and flagged. Steps have up to ``max_new`` new positions of a
request, of which any number from 1 on is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from torch import Tensor

from hisparse_pd.kernels.row_errors import HotBufferError
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import newest_slots
from tests.examples import num_examples
from tests.gpu.history import History, Request
from tests.gpu.support import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU may give misses other ones of their entries")

NUM_HISTORIES = num_examples(2, 10)
NUM_STEPS = 15
"""Number of ages of entries that are told apart."""


class NaiveGroup:
    """One request's hot buffer in one index group, as a list of positions."""

    def __init__(self, capacity: int, max_new: int) -> None:
        self.max_new = max_new
        self.entries: list[int | None] = [None] * capacity
        self.last_used = [-1] * capacity
        self.now = 0

    def preload(self, positions: list[int]) -> None:
        for entry, position in enumerate(positions):
            self.entries[entry] = position
            self.last_used[entry] = 0

    def entry_of_new(self, position: int) -> int:
        capacity = len(self.entries)
        while position >= capacity:
            position -= self.max_new
        return position

    def resize(self, capacity: int, seq_len: int) -> None:
        """What is hot stays in its place, unless the buffer has this no more or now holds all positions."""
        ring = capacity - self.max_new
        hot = [
            (used, -entry, position)
            for entry, (position, used) in enumerate(zip(self.entries, self.last_used, strict=True))
            if position is not None and position < seq_len
        ]
        self.entries, self.last_used = [None] * capacity, [-1] * capacity
        latest = sorted(sorted(hot, reverse=True)[:ring], key=lambda each: -each[1])
        for used, at, position in latest:
            entry = position if seq_len <= ring else -at
            if entry < ring:
                self.entries[entry], self.last_used[entry] = position, used
        for used, _, position in latest:
            if position not in self.entries:
                entry = self.entries.index(None)
                self.entries[entry], self.last_used[entry] = position, used

    def step(self, new: range, selected: list[int]) -> tuple[int, int, int, bool]:
        """Returns hits, misses, evictions and whether all misses found an entry."""
        capacity = len(self.entries)
        self.now += 1
        evictions = 0
        for position in new:
            entry = self.entry_of_new(position)
            evictions += self.entries[entry] not in (None, position)
            assert position not in self.entries[:entry] + self.entries[entry + 1 :], "a draft was left"
            self.entries[entry] = position
            self.last_used[entry] = self.now
        wanted = sorted({position for position in selected if position in range(new.stop)})
        missing = [position for position in wanted if position not in self.entries]
        for position in wanted:
            if position in self.entries:
                self.last_used[self.entries.index(position)] = self.now
        if new.start + self.max_new <= capacity:
            targets = list(missing)
        else:
            ring = capacity - self.max_new
            movable = [entry for entry in range(ring) if self.last_used[entry] < self.now]
            movable.sort(key=lambda entry: (self.last_used[entry], entry))
            targets = movable[: len(missing)]
        for position, entry in zip(missing, targets, strict=False):
            evictions += self.entries[entry] is not None
            self.entries[entry] = position
            self.last_used[entry] = self.now
        return len(wanted) - len(missing), len(missing), evictions, len(targets) == len(missing)


@dataclass
class Twin:
    """What the naive model has of a request; no groups: it is dense."""

    groups: list[NaiveGroup]
    counters: list[int] = field(default_factory=lambda: [0, 0, 0])
    flags: int = 0
    never_misses: bool = False


class NaiveHistory(History):
    def __init__(self, seed: int, item_bytes: int, max_new: int) -> None:
        super().__init__(
            seed,
            item_bytes,
            top_k=6,
            num_rows=4,
            max_context=70,
            capacities=tuple(size for size in (1, 2, 4, 7, 12, 25, 60) if size >= max_new),
            max_new=max_new,
            has_faults=True,
        )
        self.twins: dict[int, Twin] = {}

    def admit(self, **given: Any) -> int | None:
        row = super().admit(**given)
        if row is None:
            return None
        request = self.requests[row]
        groups = [NaiveGroup(request.capacity, self.max_new) for _ in self.group_layers if request.capacity]
        self.twins[row] = twin = Twin(groups)
        twin.never_misses = request.hints is not None and self.fits(request)
        hints = request.hints or []
        for group, naive in enumerate(groups if hints else ()):
            hint = hints[group if len(hints) > 1 else 0].tolist()
            distinct = list(dict.fromkeys(position for position in hint if position >= 0))
            warm = distinct[: request.capacity - self.max_new]
            naive.preload(list(range(request.seq_len)) if twin.never_misses else warm)
        return row

    def fits(self, request: Request) -> bool:
        """In a step that begins now."""
        return request.seq_len + self.max_new <= request.capacity

    def lose_host_pages(self, row: int, request: Request) -> None:
        """The naive model knows no lost ones."""

    def check_resized(self, row: int, request: Request, capacity: int) -> None:
        super().check_resized(row, request, capacity)
        twin = self.twins[row]
        for group, naive in enumerate(twin.groups):
            naive.resize(capacity, request.seq_len)
            slots = request.device_slots[:capacity]
            assert self.state.stamps[group, slots].tolist() == naive.last_used
        twin.never_misses &= self.fits(request) and self.fits(replace(request, capacity=capacity))

    def slot(self, row: int, group: int, position: int) -> int:
        request, groups = self.requests[row], self.twins[row].groups
        if not groups:
            return request.device_slots[position]
        entries = groups[group].entries
        return request.device_slots[entries.index(position)] if position in entries else -1

    def write_newest(self, batch: list[tuple[int, Request]], requests: StepRequests) -> None:
        super().write_newest(batch, requests)
        slots = newest_slots(requests).view(-1, requests.num_new).tolist()
        for (row, request), found in zip(batch, slots, strict=False):
            groups = self.twins[row].groups
            entries = [groups[0].entry_of_new(position) if groups else position for position in request.new]
            wanted = [request.device_slots[entry] for entry in entries]
            assert found == wanted + [-1] * (requests.num_new - len(wanted)), (
                "a draft without a page has a slot"
            )
        assert all(slot == -1 for found in slots[len(batch) :] for slot in found)

    def swap_in_group(
        self, group: int, batch: list[tuple[int, Request]], selected: Tensor, requests: StepRequests
    ) -> Tensor:
        out = super().swap_in_group(group, batch, selected, requests)
        assert (out[len(batch) :] == -1).all()
        for (row, request), positions, slots in zip(
            batch, selected.view(out.shape).tolist(), out.tolist(), strict=False
        ):
            twin, new = self.twins[row], request.new
            if any(
                position != -1 and position not in range(new.start + requests.num_new)
                for position in positions
            ):
                twin.flags |= HotBufferError.BAD_POSITION
            if twin.groups:
                *counts, served = twin.groups[group].step(new, positions)
                twin.counters = [sum(both) for both in zip(twin.counters, counts, strict=True)]
                twin.flags |= 0 if served else HotBufferError.TOO_MANY_MISSES
                twin.never_misses &= self.fits(request)
                _, misses, evictions = counts
                assert not (self.fits(request) and evictions)
                assert not (twin.never_misses and misses), "a request that fits missed"
            assert slots == [self.slot(row, group, p) if p in range(new.stop) else -1 for p in positions]
        return out

    def step(self, *args: Any, **given: Any) -> Tensor:
        out = super().step(*args, **given)
        for row in range(self.state.num_rows):
            twin = self.twins[row] if row in self.requests else Twin([])
            assert self.state.counters[row].tolist() == twin.counters
            assert int(self.state.error_flags[row]) == twin.flags
        return out


@pytest.mark.I2
@pytest.mark.I3
@pytest.mark.I4
@pytest.mark.parametrize(("item_bytes", "max_new"), [(1, 1), (7, 1), (656, 2), (10, 3), (1152, 4)])
def test_any_history(item_bytes: int, max_new: int) -> None:
    for seed in range(NUM_HISTORIES):
        NaiveHistory(seed, item_bytes, max_new).run(NUM_STEPS)
