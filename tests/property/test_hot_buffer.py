"""The hot buffers against a naive model: arbitrary histories of admissions, steps, resizes and releases.

The naive model keeps Python lists and dicts; every step compares slots, counters and every byte (I3, I4).
Steps have up to ``max_new`` new positions of a request, of which any number from 1 on is accepted; a position
gets other bytes whenever it is new again, so that a rejected draft that is found later is seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from kernels.hot_state import HotBufferError, HotBufferState
from kernels.miss_plan import MissPlan
from kernels.swap_in import backup_newest, newest_slots, replay_misses, start_dense_row, start_row, swap_in

GROUP_LAYERS = ((0, 1), (2,))
NUM_LAYERS = 3
NUM_ROWS = 4
MAX_CONTEXT = 40
MAX_CAPACITY = 12
PAGE_SIZE = 4
TOP_K = 6
MAX_PADDING = 2
NUM_PAGES = 24
NUM_HOST_PAGES = NUM_ROWS * MAX_CONTEXT // PAGE_SIZE - 5


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

    def resize(self, capacity: int, seq_len: int) -> None:
        num_added = max(0, capacity - len(self.entries))
        self.entries = self.entries[:capacity] + [None] * num_added
        self.last_used = self.last_used[:capacity] + [-1] * num_added
        fits = seq_len + self.max_new - 1 <= capacity
        for entry, position in enumerate(self.entries):
            if position is not None and (position >= seq_len or (fits and position != entry)):
                self.entries[entry], self.last_used[entry] = None, -1

    def entry_of_new(self, position: int) -> int:
        capacity = len(self.entries)
        while position >= capacity:
            position -= self.max_new
        return position

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


@pytest.mark.I3
@dataclass
class NaiveRequest:
    seq_len: int
    """Tokens that stand: those of the prompt, and what was accepted."""
    capacity: int
    """0: dense."""
    truth: Tensor
    """uint8 [num_layers, max_context, item_bytes] of both pools side by side; the last step's drafts too."""
    owned_slots: list[int] = field(default_factory=list)
    """The hot buffer is made of the first ``capacity``."""
    host_pages: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    groups: list[NaiveGroup] = field(default_factory=list)
    counters: list[int] = field(default_factory=lambda: [0, 0, 0])
    flags: int = 0
    never_misses: bool = False
    last_new: range = range(0)
    """New positions of the last step, if its capacity was what it is; those that have a page."""
    former_len: int = -1
    """``seq_len`` before the last step."""

    def fits(self, max_new: int) -> bool:
        """In a step that begins now."""
        return self.seq_len + max_new <= self.capacity

    def host_slot(self, position: int) -> int:
        return self.host_pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE

    def naive_slot(self, group: int, position: int) -> int:
        if not self.capacity:
            return self.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        entries = self.groups[group].entries
        return self.owned_slots[entries.index(position)] if position in entries else -1


class HotBufferMachine(RuleBasedStateMachine):
    k_bytes = 7
    v_bytes = 0
    max_new = 1

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.state = HotBufferState.create(
            len(GROUP_LAYERS), NUM_ROWS, MAX_CONTEXT, MAX_CAPACITY, PAGE_SIZE, NUM_HOST_PAGES * PAGE_SIZE,
            max_new=self.max_new,
        )  # fmt: skip
        self.host = self.noise(NUM_HOST_PAGES * PAGE_SIZE)
        self.dev = self.noise(NUM_PAGES * PAGE_SIZE)
        self.plan = MissPlan.create((NUM_ROWS + MAX_PADDING) * self.max_new, TOP_K)
        self.free_pages = list(range(NUM_PAGES))
        self.free_host = list(range(NUM_HOST_PAGES))
        self.random.shuffle(self.free_pages)
        self.random.shuffle(self.free_host)
        self.requests: dict[int, NaiveRequest] = {}

    def noise(self, num_slots: int) -> list[Tensor]:
        """A K pool and perhaps a V pool full of other requests' bytes."""
        return [
            torch.randint(
                0, 256, (NUM_LAYERS, num_slots, item_bytes), dtype=torch.uint8, generator=self.generator
            )
            for item_bytes in (self.k_bytes, self.v_bytes)
            if item_bytes
        ]

    def pools(self) -> dict[str, Tensor]:
        names = ("k", "v")[: len(self.host)]
        return {f"{name}_host": pool for name, pool in zip(names, self.host, strict=True)} | {
            f"{name}_dev": pool for name, pool in zip(names, self.dev, strict=True)
        }

    def write(self, pools: list[Tensor], slots: int | list[int], items: Tensor) -> None:
        parts = items.split([pool.shape[2] for pool in pools], dim=-1)
        for pool, part in zip(pools, parts, strict=True):
            pool[:, slots] = part

    def read(self, pools: list[Tensor], layer: int, slots: list[int]) -> Tensor:
        return torch.cat([pool[layer, slots] for pool in pools], dim=-1)

    def free_row(self) -> int | None:
        return next((row for row in range(NUM_ROWS) if row not in self.requests), None)

    @rule(
        capacity=st.integers(1, MAX_CAPACITY),
        prompt=st.integers(1, MAX_CAPACITY) | st.integers(1, MAX_CONTEXT - 1),
        warmth=st.sampled_from(["full", "hint", "cold"]),
    )
    def admit_hisparse(self, capacity: int, prompt: int, warmth: str) -> None:
        capacity = max(capacity, self.max_new)
        row = self.free_row()
        truth = torch.cat(self.noise(MAX_CONTEXT), dim=-1)
        request = NaiveRequest(prompt, capacity, truth)
        if (
            row is None
            or len(self.free_host) < -(-prompt // PAGE_SIZE)
            or not self.own_slots(request, capacity)
        ):
            return
        request.host_pages = [self.free_host.pop() for _ in range(-(-prompt // PAGE_SIZE))]
        self.write(self.host, [request.host_slot(p) for p in range(prompt)], truth[:, :prompt])
        hot_slots = torch.tensor(request.owned_slots[:capacity])
        request.groups = [NaiveGroup(capacity, self.max_new) for _ in GROUP_LAYERS]
        self.requests[row] = request
        if warmth == "cold":
            self.state.assign_row(row, hot_slots, torch.tensor(request.host_pages))
            return
        request.never_misses = request.fits(self.max_new)
        hints = [
            [-1, *(self.random.randrange(prompt) for _ in range(TOP_K)), -1] if warmth == "hint" else [-1]
            for _ in GROUP_LAYERS
        ]
        num_warm = start_row(
            self.state,
            row,
            hot_slots=hot_slots,
            host_pages=torch.tensor(request.host_pages),
            index_pages=torch.tensor([row, row + 1]),
            num_tokens=prompt,
            hints=[np.array(hint, np.int32) for hint in hints],
            layers_of_group=GROUP_LAYERS,
            **self.pools(),
        )
        for naive, hint, num in zip(request.groups, hints, num_warm, strict=True):
            distinct = list(dict.fromkeys(p for p in hint if p >= 0))
            expected = list(range(prompt)) if request.never_misses else distinct[: capacity - self.max_new]
            naive.preload(expected)
            assert num == len(expected)

    def own_slots(self, request: NaiveRequest, num_slots: int) -> bool:
        """Give a hisparse request pages for ``num_slots`` slots; False when there are too few."""
        num_pages = -(-max(0, num_slots - len(request.owned_slots)) // PAGE_SIZE)
        if num_pages > len(self.free_pages):
            return False
        pages = [self.free_pages.pop() for _ in range(num_pages)]
        slots = [page * PAGE_SIZE + offset for page in pages for offset in range(PAGE_SIZE)]
        self.random.shuffle(slots)
        request.pages += pages
        request.owned_slots += slots
        return True

    @precondition(lambda self: any(request.capacity for request in self.requests.values()))
    @rule(
        choice=st.integers(0, NUM_ROWS - 1),
        capacity=st.integers(1, MAX_CAPACITY),
        room_left=st.none() | st.integers(-1, 4),
        is_behind=st.booleans(),
    )
    def resize(self, choice: int, capacity: int, room_left: int | None, is_behind: bool) -> None:
        """To any capacity, or to one around the boundary at which the request fits; also by one who does not
        know yet what the last step accepted.
        """
        rows = sorted(row for row, request in self.requests.items() if request.capacity)
        row = rows[choice % len(rows)]
        request = self.requests[row]
        if room_left is not None and 1 <= request.seq_len + room_left <= MAX_CAPACITY:
            capacity = request.seq_len + room_left
        capacity = max(capacity, self.max_new)
        is_behind &= self.max_new > 1 and request.former_len >= 0
        seq_len = request.former_len if is_behind else request.seq_len
        if not self.own_slots(request, capacity):
            return
        old, new = (torch.tensor(request.owned_slots[:size]) for size in (request.capacity, capacity))
        self.state.resize_row(row, old, new, seq_len)
        given_up = request.owned_slots[capacity:]
        for pool, noise in zip(self.dev, self.noise(len(given_up)), strict=True):
            pool[:, given_up] = noise
        for group in request.groups:
            group.resize(capacity, seq_len)
        request.never_misses &= seq_len == request.seq_len <= capacity
        request.capacity = capacity
        request.last_new = range(0)

    @rule(prompt=st.integers(1, MAX_CONTEXT - 1))
    def admit_dense(self, prompt: int) -> None:
        row = self.free_row()
        num_pages = -(-(prompt + 1) // PAGE_SIZE)
        if row is None or num_pages > len(self.free_pages):
            return
        request = NaiveRequest(prompt, 0, torch.cat(self.noise(MAX_CONTEXT), dim=-1))
        request.pages = [self.free_pages.pop() for _ in range(num_pages)]
        slots = [request.naive_slot(0, position) for position in range(prompt)]
        self.write(self.dev, slots, request.truth[:, :prompt])
        start_dense_row(
            self.state, row, pages=torch.tensor(request.pages), index_pages=torch.tensor(request.pages)
        )
        self.requests[row] = request

    def grow(self, row: int, request: NaiveRequest, num_wanted: int) -> int:
        """Give a request the pages of its next ``num_wanted`` tokens; returns how many have one, which are
        fewer when the pool is empty or the context ends.
        """
        free, pages, enter = (
            (self.free_host, request.host_pages, self.state.set_host_pages)
            if request.capacity
            else (self.free_pages, request.pages, self.state.set_pages)
        )
        while min(request.seq_len + num_wanted, MAX_CONTEXT) > len(pages) * PAGE_SIZE and free:
            pages.append(free.pop())
            enter(row, len(pages) - 1, torch.tensor(pages[-1:]))
        return max(0, min(len(pages) * PAGE_SIZE, MAX_CONTEXT) - request.seq_len)

    def selection(self, seq_len: int, mood: str) -> list[int]:
        """Of a row whose position is ``seq_len - 1``."""
        match mood:
            case "recent":
                chosen = list(range(max(0, seq_len - TOP_K), seq_len))
            case "fixed":
                chosen = list(range(min(TOP_K // 2, seq_len)))
            case "duplicates":
                chosen = [self.random.randrange(seq_len)] * TOP_K
            case "nothing":
                chosen = []
            case _:
                chosen = [self.random.randrange(seq_len) for _ in range(TOP_K)]
        chosen = chosen + [-1] * (TOP_K - len(chosen))
        self.random.shuffle(chosen)
        return chosen

    @precondition(lambda self: self.requests)
    @rule(
        moods=st.lists(
            st.sampled_from(["random", "recent", "fixed", "duplicates", "nothing"]), min_size=2, max_size=2
        ),
        num_padding=st.integers(0, MAX_PADDING),
        skipped=st.sets(st.integers(0, NUM_ROWS - 1), max_size=2),
        num_new=st.integers(1, 4),
    )
    def step(self, moods: list[str], num_padding: int, skipped: set[int], num_new: int) -> None:
        num_new = min(num_new, self.max_new)
        batch = []
        for row, request in self.requests.items():
            if row in skipped:
                continue
            num_there = min(self.grow(row, request, self.random.randint(1, num_new)), num_new)
            if num_there:
                request.last_new = range(request.seq_len, request.seq_len + num_there)
                request.never_misses &= request.fits(self.max_new)
                batch.append((row, request))
        self.random.shuffle(batch)
        rows = torch.tensor([row for row, _ in batch] + [0] * num_padding, dtype=torch.int64)
        seq_lens = torch.tensor(
            [request.seq_len + num_new for _, request in batch] + [0] * num_padding, dtype=torch.int32
        )
        num_real = torch.tensor([len(batch)], dtype=torch.int32)
        slots = newest_slots(seq_lens, rows, num_real, self.state, num_new=num_new).view(-1, num_new)
        assert (slots[len(batch) :] == -1).all()
        for (_, request), new_slots in zip(batch, slots.tolist(), strict=False):
            new = request.last_new
            assert new_slots[len(new) :] == [-1] * (num_new - len(new)), "a draft without a page has a slot"
            request.truth[:, new.start : new.stop] = torch.cat(self.noise(len(new)), dim=-1)
            for position, slot in zip(new, new_slots, strict=False):
                expected = (
                    request.owned_slots[request.groups[0].entry_of_new(position)]
                    if request.capacity
                    else request.naive_slot(0, position)
                )
                assert slot == expected
                self.write(self.dev, slot, request.truth[:, position])
        for group, (layers, mood) in enumerate(zip(GROUP_LAYERS, moods, strict=True)):
            self.swap_in_group(group, layers, mood, batch, seq_lens, rows, num_real, num_new)
        self.accept(batch, rows, num_real, num_padding)

    def accept(
        self, batch: list[tuple[int, NaiveRequest]], rows: Tensor, num_real: Tensor, num_padding: int
    ) -> None:
        """Some of the new positions of each request, and back these up, alone."""
        accepted = [self.random.randint(1, len(request.last_new)) for _, request in batch]
        for (_, request), num in zip(batch, accepted, strict=True):
            request.former_len = request.seq_len
            request.seq_len += num
        lens = [request.seq_len for _, request in batch]
        seq_lens = torch.tensor(lens + [0] * num_padding, dtype=torch.int64)
        is_one_each = self.max_new == 1 or max(accepted, default=1) == 1
        num_newest = None if is_one_each else torch.tensor(accepted + [9] * num_padding, dtype=torch.int32)
        expected = [pool.clone() for pool in self.host]
        for _, request in batch:
            if request.capacity:
                newest = range(request.former_len, request.seq_len)
                host_slots = [request.host_slot(position) for position in newest]
                self.write(expected, host_slots, request.truth[:, newest.start : newest.stop])
        backup_newest(seq_lens, rows, num_real, self.state, **self.pools(), num_newest=num_newest)
        for pool, one in zip(self.host, expected, strict=True):
            assert torch.equal(pool, one), "I4: the accepted ones on the host, and nothing else"

    def swap_in_group(
        self,
        group: int,
        layers: tuple[int, ...],
        mood: str,
        batch: list[tuple[int, NaiveRequest]],
        seq_lens: Tensor,
        rows: Tensor,
        num_real: Tensor,
        num_new: int,
    ) -> None:
        chosen = [
            [p for i in range(num_new) for p in self.selection(request.seq_len + i + 1, mood)]
            for _, request in batch
        ]
        num_padding = len(rows) - len(batch)
        selected = torch.tensor(chosen + [[0] * TOP_K * num_new] * num_padding, dtype=torch.int32).reshape(
            len(rows) * num_new, TOP_K
        )
        out = torch.full_like(selected, -7)
        swap_in(
            selected, seq_lens, rows, num_real, self.state,
            group=group, layer=layers[0], out=out, miss_plan=self.plan, num_new=num_new, **self.pools(),
        )  # fmt: skip
        for layer in layers[1:]:
            replay_misses(self.plan, layer, **self.pools())
        out = out.view(len(rows), num_new * TOP_K)
        assert (out[len(batch) :] == -1).all()
        for (_, request), positions, slots in zip(batch, chosen, out.tolist(), strict=False):
            new = request.last_new
            if request.capacity:
                hits, misses, evictions, served = request.groups[group].step(new, positions)
                for column, count in enumerate((hits, misses, evictions)):
                    request.counters[column] += count
                if not served:
                    request.flags |= HotBufferError.TOO_MANY_MISSES
                if request.fits(self.max_new):
                    assert not evictions
                    assert not (misses and request.never_misses), "a request that fits missed"
            expected = [request.naive_slot(group, p) if 0 <= p < new.stop else -1 for p in positions]
            assert slots == expected
            placed = [(p, slot) for p, slot in zip(positions, slots, strict=True) if slot >= 0]
            for layer in layers:
                items = self.read(self.dev, layer, [slot for _, slot in placed])
                truth = request.truth[layer, [p for p, _ in placed]]
                assert torch.equal(items, truth), f"I3: wrong bytes in layer {layer}"

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, NUM_ROWS - 1))
    def release(self, choice: int) -> None:
        row = sorted(self.requests)[choice % len(self.requests)]
        request = self.requests.pop(row)
        self.free_pages += request.pages
        self.free_host += request.host_pages
        self.state.reset_row(row)

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "state"):
            return
        self.state.check_consistency(
            {row: request.last_new.stop for row, request in self.requests.items() if request.last_new},
            {row: len(request.last_new) for row, request in self.requests.items()},
        )
        for row in range(NUM_ROWS):
            request = self.requests.get(row)
            counters = request.counters if request else [0, 0, 0]
            assert self.state.counters[row].tolist() == counters
            assert int(self.state.error_flags[row]) == (request.flags if request else 0)


@pytest.mark.parametrize(
    ("k_bytes", "v_bytes", "max_new"), [(1, 0, 1), (7, 3, 1), (656, 0, 2), (7, 3, 3), (1152, 0, 4)]
)
def test_any_history(k_bytes: int, v_bytes: int, max_new: int) -> None:
    class Machine(HotBufferMachine):
        pass

    Machine.k_bytes, Machine.v_bytes, Machine.max_new = k_bytes, v_bytes, max_new
    case = Machine.TestCase
    case.settings = settings(
        max_examples=25,
        stateful_step_count=30,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()
