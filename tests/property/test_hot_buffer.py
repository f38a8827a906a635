"""The hot buffers against a naive model: arbitrary histories of admissions, steps and releases.

The naive model keeps Python lists and dicts; every step compares slots, counters and every byte (I3, I4).
Steps have up to ``max_new`` new positions of a request, of which any number from 1 on is accepted; a position
gets other bytes whenever it is new again, so that a rejected draft that is found later is seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from kernels.hot_state import HotBufferError, HotBufferState, StepRequests
from kernels.miss_plan import MissPlan
from kernels.swap_in import RowStart, backup_newest, newest_slots, replay_misses, start_dense_row, swap_in
from tests.unit.kernels.table_rules import check_consistency

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
NUM_LOOKUP_PAGES = NUM_HOST_PAGES + 3


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
class NaiveRequest:
    seq_len: int
    """Tokens that stand: those of the prompt, and what was accepted."""
    capacity: int
    """0: dense."""
    truth: Tensor
    """uint8 [num_layers, max_context, item_bytes]; the last step's drafts too."""
    owned_slots: list[int] = field(default_factory=list)
    """The hot buffer is made of the first ``capacity``."""
    host_pages: list[int] = field(default_factory=list)
    """The first of which other requests may have too."""
    lookup_pages: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    groups: list[NaiveGroup] = field(default_factory=list)
    counters: list[int] = field(default_factory=lambda: [0, 0, 0])
    flags: int = 0
    never_misses: bool = False
    last_new: range = range(0)
    """New positions of the last step that have a page."""

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
    item_bytes = 7
    max_new = 1

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.state = HotBufferState.create(
            len(GROUP_LAYERS), NUM_ROWS, MAX_CONTEXT, MAX_CAPACITY, PAGE_SIZE, NUM_LOOKUP_PAGES * PAGE_SIZE,
            max_new=self.max_new,
        )  # fmt: skip
        self.host = self.noise(NUM_HOST_PAGES * PAGE_SIZE)
        self.dev = self.noise(NUM_PAGES * PAGE_SIZE)
        self.plan = MissPlan.create((NUM_ROWS + MAX_PADDING) * self.max_new, TOP_K)
        self.free_pages = list(range(NUM_PAGES))
        self.free_host = list(range(NUM_HOST_PAGES))
        self.num_users = [0] * NUM_HOST_PAGES
        self.free_lookup = list(range(NUM_LOOKUP_PAGES))
        self.random.shuffle(self.free_pages)
        self.random.shuffle(self.free_host)
        self.random.shuffle(self.free_lookup)
        self.requests: dict[int, NaiveRequest] = {}

    def noise(self, num_slots: int) -> Tensor:
        """A pool full of other requests' bytes."""
        shape = (NUM_LAYERS, num_slots, self.item_bytes)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator)

    def pools(self) -> dict[str, Tensor]:
        return {"k_host": self.host, "k_dev": self.dev}

    def free_row(self) -> int | None:
        return next((row for row in range(NUM_ROWS) if row not in self.requests), None)

    @rule(
        capacity=st.integers(1, MAX_CAPACITY),
        prompt=st.integers(1, MAX_CAPACITY) | st.integers(1, MAX_CONTEXT - 1),
        warmth=st.sampled_from(["full", "hint", "cold"]),
        shared=st.none() | st.integers(0, NUM_ROWS - 1),
    )
    def admit_hisparse(self, capacity: int, prompt: int, warmth: str, shared: int | None) -> None:
        capacity = max(capacity, self.max_new)
        row = self.free_row()
        truth = self.noise(MAX_CONTEXT)
        request = NaiveRequest(prompt, capacity, truth)
        num_pages = -(-prompt // PAGE_SIZE)
        other = None if shared is None else self.requests.get(shared)
        num_shared = 0 if other is None else min(prompt - 1, other.seq_len - 1) // PAGE_SIZE
        if other is None or not other.capacity:
            num_shared = 0
        if (
            row is None
            or len(self.free_host) < num_pages - num_shared
            or len(self.free_lookup) < num_pages
            or not self.own_slots(request, capacity)
        ):
            return
        if other is not None:
            truth[:, : num_shared * PAGE_SIZE] = other.truth[:, : num_shared * PAGE_SIZE]
            for page in other.host_pages[:num_shared]:
                request.host_pages.append(page)
                request.lookup_pages.append(self.free_lookup.pop())
                self.num_users[page] += 1
        while len(request.host_pages) < num_pages:
            self.add_host_page(request)
        self.host[:, [request.host_slot(p) for p in range(prompt)]] = truth[:, :prompt]
        hot_slots = torch.tensor(request.owned_slots[:capacity])
        request.groups = [NaiveGroup(capacity, self.max_new) for _ in GROUP_LAYERS]
        self.requests[row] = request
        if warmth == "cold":
            self.state.assign_row(
                row, hot_slots, torch.tensor(request.host_pages), torch.tensor(request.lookup_pages)
            )
            return
        request.never_misses = request.fits(self.max_new)
        hints = [
            [-1, *(self.random.randrange(prompt) for _ in range(TOP_K)), -1] if warmth == "hint" else [-1]
            for _ in GROUP_LAYERS
        ]
        row_start = RowStart(
            self.state,
            row,
            hot_slots=hot_slots,
            host_pages=torch.tensor(request.host_pages),
            lookup_pages=torch.tensor(request.lookup_pages),
            index_pages=torch.tensor([row, row + 1]),
            num_tokens=prompt,
            hints=[np.array(hint, np.int32) for hint in hints],
            layers_of_group=GROUP_LAYERS,
            **self.pools(),
        )
        row_start.launch_slice(None)
        for naive, hint, num in zip(request.groups, hints, row_start.num_warm, strict=True):
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

    @rule(prompt=st.integers(1, MAX_CONTEXT - 1))
    def admit_dense(self, prompt: int) -> None:
        row = self.free_row()
        num_pages = -(-(prompt + 1) // PAGE_SIZE)
        if row is None or num_pages > len(self.free_pages):
            return
        request = NaiveRequest(prompt, 0, self.noise(MAX_CONTEXT))
        request.pages = [self.free_pages.pop() for _ in range(num_pages)]
        slots = [request.naive_slot(0, position) for position in range(prompt)]
        self.dev[:, slots] = request.truth[:, :prompt]
        start_dense_row(
            self.state, row, pages=torch.tensor(request.pages), index_pages=torch.tensor(request.pages)
        )
        self.requests[row] = request

    def grow(self, row: int, request: NaiveRequest, num_wanted: int) -> int:
        """Give a request the pages of its next ``num_wanted`` tokens; returns how many have one, which are
        fewer when the pool is empty or the context ends.
        """
        pages = request.host_pages if request.capacity else request.pages
        while min(request.seq_len + num_wanted, MAX_CONTEXT) > len(pages) * PAGE_SIZE:
            if not (self.free_host and self.free_lookup if request.capacity else self.free_pages):
                break
            if request.capacity:
                self.add_host_page(request)
                last = torch.tensor(request.host_pages[-1:]), torch.tensor(request.lookup_pages[-1:])
                self.state.set_host_pages(row, len(pages) - 1, *last)
            else:
                pages.append(self.free_pages.pop())
                self.state.set_pages(row, len(pages) - 1, torch.tensor(pages[-1:]))
        return max(0, min(len(pages) * PAGE_SIZE, MAX_CONTEXT) - request.seq_len)

    def add_host_page(self, request: NaiveRequest) -> None:
        request.host_pages.append(self.free_host.pop())
        request.lookup_pages.append(self.free_lookup.pop())
        self.num_users[request.host_pages[-1]] += 1

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
        requests = StepRequests(self.state, seq_lens, rows, num_real, num_new)
        slots = newest_slots(requests).view(-1, num_new)
        assert (slots[len(batch) :] == -1).all()
        for (_, request), new_slots in zip(batch, slots.tolist(), strict=False):
            new = request.last_new
            assert new_slots[len(new) :] == [-1] * (num_new - len(new)), "a draft without a page has a slot"
            request.truth[:, new.start : new.stop] = self.noise(len(new))
            for position, slot in zip(new, new_slots, strict=False):
                expected = (
                    request.owned_slots[request.groups[0].entry_of_new(position)]
                    if request.capacity
                    else request.naive_slot(0, position)
                )
                assert slot == expected
                self.dev[:, slot] = request.truth[:, position]
        for group, (layers, mood) in enumerate(zip(GROUP_LAYERS, moods, strict=True)):
            self.swap_in_group(group, layers, mood, batch, requests)
        self.accept(batch, requests, num_padding)

    def accept(self, batch: list[tuple[int, NaiveRequest]], requests: StepRequests, num_padding: int) -> None:
        """Some of the new positions of each request, and back these up, alone."""
        accepted = [self.random.randint(1, len(request.last_new)) for _, request in batch]
        for (_, request), num in zip(batch, accepted, strict=True):
            request.seq_len += num
        lens = [request.seq_len for _, request in batch]
        seq_lens = torch.tensor(lens + [0] * num_padding, dtype=torch.int64)
        is_one_each = self.max_new == 1 or max(accepted, default=1) == 1
        num_newest = None if is_one_each else torch.tensor(accepted + [9] * num_padding, dtype=torch.int32)
        expected = self.host.clone()
        for _, request in batch:
            if request.capacity:
                newest = range(request.last_new.start, request.seq_len)
                host_slots = [request.host_slot(position) for position in newest]
                expected[:, host_slots] = request.truth[:, newest.start : newest.stop]
        requests = replace(requests, seq_lens=seq_lens, num_new=1)
        backup_newest(requests, **self.pools(), num_newest=num_newest)
        assert torch.equal(self.host, expected), "I4: the accepted ones on the host, and nothing else"

    def swap_in_group(
        self,
        group: int,
        layers: tuple[int, ...],
        mood: str,
        batch: list[tuple[int, NaiveRequest]],
        requests: StepRequests,
    ) -> None:
        num_new, num_reqs = requests.num_new, requests.num_reqs
        chosen = [
            [p for i in range(num_new) for p in self.selection(request.seq_len + i + 1, mood)]
            for _, request in batch
        ]
        num_padding = num_reqs - len(batch)
        selected = torch.tensor(chosen + [[0] * TOP_K * num_new] * num_padding, dtype=torch.int32).reshape(
            num_reqs * num_new, TOP_K
        )
        out = torch.full_like(selected, -7)
        swap_in(
            selected, requests,
            group=group, layer=layers[0], out=out, miss_plan=self.plan, **self.pools(),
        )  # fmt: skip
        for layer in layers[1:]:
            replay_misses(self.plan, layer, **self.pools())
        out = out.view(num_reqs, num_new * TOP_K)
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
                items = self.dev[layer, [slot for _, slot in placed]]
                truth = request.truth[layer, [p for p, _ in placed]]
                assert torch.equal(items, truth), f"I3: wrong bytes in layer {layer}"

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, NUM_ROWS - 1))
    def release(self, choice: int) -> None:
        row = sorted(self.requests)[choice % len(self.requests)]
        request = self.requests.pop(row)
        self.free_pages += request.pages
        self.free_lookup += request.lookup_pages
        for page in request.host_pages:
            self.num_users[page] -= 1
            if not self.num_users[page]:
                self.free_host.append(page)
        self.state.reset_row(row)

    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "state"):
            return
        check_consistency(
            self.state,
            {row: request.last_new.stop for row, request in self.requests.items() if request.last_new},
            {row: len(request.last_new) for row, request in self.requests.items()},
        )
        for row in range(NUM_ROWS):
            request = self.requests.get(row)
            counters = request.counters if request else [0, 0, 0]
            assert self.state.counters[row].tolist() == counters
            assert int(self.state.error_flags[row]) == (request.flags if request else 0)


@pytest.mark.I2
@pytest.mark.I3
@pytest.mark.I4
@pytest.mark.parametrize(("item_bytes", "max_new"), [(1, 1), (7, 1), (656, 2), (10, 3), (1152, 4)])
def test_any_history(item_bytes: int, max_new: int) -> None:
    class Machine(HotBufferMachine):
        pass

    Machine.item_bytes, Machine.max_new = item_bytes, max_new
    case = Machine.TestCase
    case.settings = settings(
        max_examples=15,
        stateful_step_count=30,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()
