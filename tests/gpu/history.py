"""Random histories of one state from a seed, with every step checked against the CPU reference.

A history has admissions, warm-ups, steps, hot buffers that change their size, and releases. Checked are the
tables (``support.check_step``), every byte that the model could read (I3) and every byte on the host (I4).
Without a GPU the same code runs on tables of the CPU.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.kernels.hot_entries import resize_hot_buffer
from hisparse_pd.kernels.hot_state import ABSENT, HotBufferState
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.reference import newest_slots as expected_newest_slots
from hisparse_pd.kernels.reference_check import reference_checks
from hisparse_pd.kernels.row_check import wrong_row
from hisparse_pd.kernels.row_errors import HotBufferError
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import (
    RowStart,
    backup_newest,
    newest_slots,
    plan_misses,
    replay_misses,
    start_dense_row,
    swap_in,
)
from tests.gpu.support import (
    DEVICE,
    POISON,
    assert_same_tables,
    check_step,
    on_host,
    padded,
    requests_on_host,
)
from tests.unit.kernels.table_rules import check_consistency

GUARD = 64
"""Guard elements around ``out`` that must not be written."""
UNTOUCHED = -7
PAGE_SIZE = 16
BOTH_GROUPS = ((0, 1), (2,))
ONE_LAYER = ((0,),)


@dataclass
class Request:
    seq_len: int
    """Tokens of the prompt, and accepted tokens."""
    capacity: int
    """Capacity of the hot buffer; 0 for a dense request."""
    truth: Tensor
    """uint8 [num_layers, max_context, item_bytes]: the right bytes, of the last step's drafts too."""
    host_slots: Tensor
    """Host slots of all positions; the row has only the first ``num_host_pages`` pages."""
    host_pages: Tensor
    lookup_pages: Tensor
    num_host_pages: int
    device_slots: list[int]
    """All device slots of the request, those of ``pages``; the first ``capacity`` are its hot buffer."""
    pages: list[int]
    lost_pages: set[int] = field(default_factory=set)
    """Numbers of pages without host and lookup page."""
    has_stepped: bool = False
    """Whether it was in a step since its hot buffer has its size."""
    new: range = range(0)
    """New positions of the last step that have a page."""
    last: Tensor | None = None
    """The last selection."""
    hints: list[np.ndarray] | None = None
    """Hints of a warm start."""


class History:
    """Requests on one GPU whose every step is checked; ``seed`` determines all random choices."""

    def __init__(
        self,
        seed: int,
        item_bytes: int,
        *,
        top_k: int = 24,
        num_rows: int = 6,
        max_context: int = 300,
        capacities: tuple[int, ...] = (25, 31, 48, 90),
        group_layers: tuple[tuple[int, ...], ...] = BOTH_GROUPS,
        lens_dtype: torch.dtype = torch.int32,
        rows_dtype: torch.dtype = torch.int64,
        churns: tuple[float, ...] = (0.0, 0.02, 0.1, 0.5, 1.0),
        has_dense: bool = True,
        has_faults: bool = False,
        is_pinned: bool = True,
        copy_blocks: int | None = None,
        max_new: int = 1,
        verifies: bool = True,
        wrong_rows: float = 0.0,
    ) -> None:
        """``churns``: shares of a selection that may change in a step. ``has_faults``: selections larger than
        the buffer, positions out of range, and positions without a host slot. ``copy_blocks``: half of the
        swap-ins only plan, and leave the copies to this many blocks. ``max_new``: most new positions of a
        request in one step. Their number and the number of accepted ones are random, and a position gets
        other bytes whenever it is new again. ``verifies``: copied items are verified. ``wrong_rows``: share
        of the steps before which a bit of the host pool flips.
        """
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.top_k, self.max_context, self.item_bytes = top_k, max_context, item_bytes
        self.capacities, self.churns = capacities, churns
        self.has_dense, self.has_faults = has_dense, has_faults
        self.lens_dtype, self.rows_dtype = lens_dtype, rows_dtype
        self.group_layers = group_layers
        self.copy_blocks = copy_blocks
        self.max_new = max_new
        self.num_layers = sum(map(len, group_layers))
        self.span = max(max(capacities), max_context if has_dense else 0)
        """Most device slots of a request."""
        self.pages_each = -(-max_context // PAGE_SIZE)
        self.wrong_rows, self.num_found = wrong_rows, 0
        num_check_pages = num_rows * self.pages_each
        self.index_pages = torch.randperm(num_check_pages, generator=self.generator).view(num_rows, -1)
        self.row_checks = torch.zeros(
            (self.num_layers, num_check_pages * PAGE_SIZE), dtype=torch.int32, device=DEVICE
        )
        num_host = (num_rows * self.pages_each + 1) * PAGE_SIZE
        num_lookup = num_host + 3 * PAGE_SIZE
        num_pages = num_rows * -(-self.span // PAGE_SIZE)
        self.num_dev = num_pages * PAGE_SIZE
        self.state = HotBufferState.create(
            len(group_layers), num_rows, max_context, max(capacities), PAGE_SIZE, num_lookup, self.num_dev,
            DEVICE, max_new, self.row_checks if verifies else None,
        )  # fmt: skip
        self.plan = MissPlan.create((num_rows + 2) * max_new, top_k, DEVICE)
        is_pinned = is_pinned and DEVICE == "cuda"
        host, dev = ((self.num_layers, num, item_bytes) for num in (num_host, self.num_dev))
        self.host = torch.full(host, POISON, dtype=torch.uint8, pin_memory=is_pinned)
        self.dev = torch.full(dev, POISON, dtype=torch.uint8, device=DEVICE)
        self.expected_host = self.host.clone()
        self.is_owned = torch.zeros(self.num_dev, dtype=torch.bool)
        self.free_host = torch.randperm(num_host // PAGE_SIZE, generator=self.generator)
        self.free_lookup = torch.randperm(num_lookup // PAGE_SIZE, generator=self.generator)
        self.num_users = torch.zeros(num_host // PAGE_SIZE, dtype=torch.int64)
        """Number of users of each host page."""
        self.free_pages = list(range(num_pages))
        self.random.shuffle(self.free_pages)
        self.free_rows = list(range(num_rows))
        self.requests: dict[int, Request] = {}

    def run(self, num_steps: int, num_started: int = 3) -> None:
        for _ in range(num_started):
            self.admit()
        for _ in range(num_steps):
            match self.random.random():
                case x if x < 0.08:
                    self.admit()
                case x if x < 0.14:
                    self.release()
                case x if x < 0.3:
                    self.resize()
                case _:
                    pass
            if all(q.seq_len >= self.max_context for q in self.requests.values()):
                self.release()
                self.admit()
            self.step()
        self.finish()

    def finish(self) -> None:
        """Check that memory of no request is untouched, and that the host pool holds the expected bytes."""
        assert torch.equal(self.host, self.expected_host), "the host pool holds something else (I4)"
        assert (self.dev.cpu()[:, ~self.is_owned] == POISON).all(), "a device slot of nobody changed"

    def pools(self) -> dict[str, Any]:
        return {"k_host": self.host, "k_dev": self.dev}

    def admit(
        self, *, capacity: int | None = None, prompt: int | None = None, is_warm: bool | None = None
    ) -> int | None:
        """Start a request, as given or random. Returns its row, or None when all rows are taken.

        ``prompt``: the number of prompt tokens with items; with 0, the first step's token is the first.
        """
        if not self.free_rows:
            return None
        row = self.free_rows.pop(self.random.randrange(len(self.free_rows)))
        if capacity is None:
            is_dense = self.has_dense and self.random.random() < 0.25
            capacity = 0 if is_dense else self.random.choice(self.capacities)
        if prompt is None:
            longest = max(1, self.max_context - 40)
            prompt = self.random.randint(1, self.random.choice([longest, min(longest, max(self.capacities))]))
        shape = (self.num_layers, self.max_context, self.item_bytes)
        truth = torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator)
        pages = [self.free_pages.pop() for _ in range(-(-self.span // PAGE_SIZE))]
        slots = [page * PAGE_SIZE + i for page in pages for i in range(PAGE_SIZE)]
        if capacity == 0:
            none = torch.empty(0, dtype=torch.int64)
            request = Request(prompt, 0, truth, none, none, none, 0, slots, pages)
            self.is_owned[slots] = True
            some_pages = torch.tensor(pages[: self.state.max_pages])
            start_dense_row(self.state, row, pages=some_pages, index_pages=self.index_pages[row])
            self.dev[:, torch.tensor(slots[:prompt], dtype=torch.int64).to(DEVICE)] = truth[:, :prompt].to(
                DEVICE
            )
        else:
            num_shared, shared_pages = self.share(prompt, truth)
            own_pages, self.free_host = self.free_host.tensor_split([self.pages_each - num_shared])
            host_pages = torch.cat((shared_pages, own_pages))
            self.num_users[host_pages] += 1
            lookup_pages, self.free_lookup = self.free_lookup.tensor_split([self.pages_each])
            host_slots = (host_pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
            num_host_pages = -(-prompt // PAGE_SIZE)
            request = Request(
                prompt, capacity, truth, host_slots, host_pages, lookup_pages, num_host_pages, slots, pages
            )
            self.is_owned[slots[:capacity]] = True
            for host in (self.host, self.expected_host):
                host[:, host_slots[:prompt]] = truth[:, :prompt]
            self.write_checks(row, request, range(prompt))
            self.flip_bits()
            if self.random.random() < 0.6 if is_warm is None else is_warm:
                self.start_warm(row, request)
            else:
                self.state.assign_row(
                    row,
                    capacity,
                    hot_pages(pages, capacity),
                    host_pages[:num_host_pages],
                    lookup_pages[:num_host_pages],
                )
                self.state.set_index_pages(row, 0, self.index_pages[row])
            if self.has_faults and self.random.random() < 0.3:
                self.lose_host_pages(row, request)
        self.requests[row] = request
        return row

    def write_checks(self, row: int, request: Request, positions: range) -> None:
        """Write the checks of new items, as the model does."""
        at = torch.tensor(positions, dtype=torch.int64)
        slots = self.index_pages[row, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
        for layer in range(self.num_layers):
            checks = reference_checks(request.truth[layer, at], layer, at)
            self.row_checks[layer, slots.to(DEVICE)] = checks.to(DEVICE)

    def flip_bits(self) -> None:
        """Flip one bit, at times, of an item in the host pool that a request may read."""
        hisparse = [request for request in self.requests.values() if request.capacity]
        if not hisparse or self.random.random() >= self.wrong_rows:
            return
        request = self.random.choice(hisparse)
        slot = request.host_slots[self.random.randrange(request.seq_len)]
        layer, byte = self.random.randrange(self.num_layers), self.random.randrange(self.item_bytes)
        bit = 1 << self.random.randrange(8)
        for host in (self.host, self.expected_host):
            host[layer, slot, byte] ^= bit

    def end_wrong(self) -> None:
        """End the requests with a wrong row, after checking that the record is right."""
        flags = self.state.error_flags.cpu()
        wrong = [row for row in self.requests if flags[row] & HotBufferError.WRONG_ROW]
        for row in wrong:
            request, found = self.requests[row], wrong_row(self.state, row).item
            layer, position = found.layer, found.position
            truth, host = request.truth[layer, position], self.host[layer, found.slot]
            assert found.slot == int(request.host_slots[position])
            assert not torch.equal(truth, host), f"row {row}: {found} is as it was written"
            at = torch.tensor([position])
            checks = [int(reference_checks(item[None], layer, at)) & 0xFFFFFFFF for item in (truth, host)]
            assert [found.expected, found.actual] == checks
        self.num_found += len(wrong)
        for row in wrong:  # only after all checks: a new request overwrites the pages that it shares
            self.release(row)
            self.admit()

    def share(self, prompt: int, truth: Tensor) -> tuple[int, Tensor]:
        """Share, often, some first pages of another request, whose bytes the new request then has."""
        others = [other for other in self.requests.values() if other.capacity]
        if not others or self.random.random() < 0.5:
            return 0, torch.empty(0, dtype=torch.int64)
        other = self.random.choice(others)
        num_pages = self.random.randint(0, max(0, min(prompt, other.seq_len) - 1) // PAGE_SIZE)
        truth[:, : num_pages * PAGE_SIZE] = other.truth[:, : num_pages * PAGE_SIZE]
        return num_pages, other.host_pages[:num_pages]

    def start_warm(self, row: int, request: Request) -> None:
        """Start a warm row on a side stream, and check that the CPU fills the tables in the same way."""
        num_hints = self.random.choice((1, len(self.group_layers)))
        draw = self.random.choice((self.hint_with_duplicates, self.hint_as_usual))
        request.hints = [draw(request.seq_len) for _ in range(num_hints)]
        arguments: dict[str, Any] = {
            "capacity": request.capacity,
            "hot_pages": hot_pages(request.pages, request.capacity),
            "host_pages": request.host_pages[: request.num_host_pages],
            "lookup_pages": request.lookup_pages[: request.num_host_pages],
            "index_pages": self.index_pages[row],
            "num_tokens": request.seq_len,
            "hints": request.hints,
            "layers_of_group": self.group_layers,
        }
        expected = on_host(self.state)
        pools = {name: pool.cpu().clone() for name, pool in self.pools().items()}
        start_expected = RowStart(expected, row, **arguments, **pools)
        start_expected.launch_slice(None)
        with contextlib.ExitStack() as stack:
            if DEVICE == "cuda":
                main, side = torch.cuda.current_stream(), torch.cuda.Stream()
                side.wait_stream(main)
                stack.callback(main.wait_stream, side)
                stack.enter_context(torch.cuda.stream(side))
            row_start = RowStart(self.state, row, **arguments, **self.pools())
            row_start.launch_slice(None)
        assert row_start.num_warm == start_expected.num_warm
        assert_same_tables(self.state, expected)
        for name, pool in self.pools().items():
            assert torch.equal(pool.cpu(), pools[name]), f"{name} differs"

    def hint_with_duplicates(self, seq_len: int) -> np.ndarray:
        return np.array([self.random.randrange(-1, seq_len) for _ in range(self.top_k)], np.int32)

    def hint_as_usual(self, seq_len: int) -> np.ndarray:
        return torch.randperm(seq_len, generator=self.generator)[: self.top_k].int().numpy()

    def lose_host_pages(self, row: int, request: Request) -> None:
        """Remove some host pages of a cold row, but not its last one."""
        hot_to_lookup = self.state.hot_to_lookup[:, self.state.entry_slots(row)]
        if bool((hot_to_lookup >= 0).any()) or request.num_host_pages < 2:
            return
        lost = torch.randperm(request.num_host_pages - 1, generator=self.generator)
        lost = lost[: 1 + request.num_host_pages // 10]
        request.lost_pages = set(lost.tolist())
        for pages in (self.state.host_pages, self.state.lookup_pages):
            pages[row, lost.to(DEVICE)] = ABSENT

    def release(self, row: int | None = None) -> None:
        if not self.requests:
            return
        row = self.random.choice(list(self.requests)) if row is None else row
        request = self.requests.pop(row)
        self.state.reset_rows(row)
        self.free_rows.append(row)
        self.num_users[request.host_pages] -= 1
        unused = request.host_pages[self.num_users[request.host_pages] == 0]
        self.free_host = torch.cat((self.free_host, unused))
        self.free_lookup = torch.cat((self.free_lookup, request.lookup_pages))
        self.free_pages += request.pages
        self.give_up(request.device_slots)
        slots = (unused[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
        for host in (self.host, self.expected_host):
            host[:, slots] = POISON

    def resize(self) -> None:
        """Give one request a hot buffer of another size, and check that the CPU does the same. The slots that
        it gives up are lost at once, as if another request had them. Requests that have found a wrong row
        since the last step are left out: they end behind the next one."""
        flags = self.state.error_flags.cpu()
        right = [row for row in self.requests if not flags[row] & HotBufferError.WRONG_ROW]
        hisparse = [row for row in right if self.requests[row].capacity]
        if not hisparse:
            return
        row, capacity = self.random.choice(hisparse), self.random.choice(self.capacities)
        request = self.requests[row]
        arguments: dict[str, Any] = {
            "num_before": request.capacity,
            "capacity": capacity,
            "hot_pages": hot_pages(request.pages, capacity),
            "num_tokens": request.seq_len,
            "layers_of_group": self.group_layers,
        }
        expected, expected_dev = on_host(self.state), self.dev.cpu().clone()
        resize_hot_buffer(expected, row, k_dev=expected_dev, **arguments)
        resize_hot_buffer(self.state, row, k_dev=self.dev, **arguments)
        assert_same_tables(self.state, expected)
        assert torch.equal(self.dev.cpu(), expected_dev), "the device pool differs"
        check_consistency(expected)
        self.is_owned[request.device_slots[:capacity]] = True
        self.give_up(request.device_slots[capacity : request.capacity])
        self.check_resized(row, request, capacity)
        request.capacity, request.has_stepped = capacity, False

    def check_resized(self, row: int, request: Request, capacity: int) -> None:
        """Check the bytes of all that is hot in a row whose hot buffer has ``capacity`` entries now, of
        ``request.capacity`` before."""
        slots = torch.tensor(request.device_slots)
        page_at = request.lookup_pages.argsort()  # lookup pages are distinct, and in no order
        for group, layers in enumerate(self.group_layers):
            lookup_slots = self.state.hot_to_lookup[group, self.state.entry_slots(row)].cpu().long()
            entries = torch.nonzero(lookup_slots != ABSENT).flatten()
            page_ids, offsets = lookup_slots[entries] // PAGE_SIZE, lookup_slots[entries] % PAGE_SIZE
            pages = page_at[torch.searchsorted(request.lookup_pages[page_at], page_ids)]
            positions = pages * PAGE_SIZE + offsets
            assert (positions < request.seq_len).all(), "a draft was left"
            if request.seq_len + self.max_new <= capacity:
                assert torch.equal(positions, entries)
            for layer in layers:
                items = self.dev[layer, slots[entries].to(DEVICE)].cpu()
                assert torch.equal(items, request.truth[layer, positions]), "I3: one is in another's place"

    def give_up(self, device_slots: list[int]) -> None:
        slots = torch.tensor(device_slots, dtype=torch.int64)
        self.is_owned[slots] = False
        self.dev[:, slots.to(DEVICE)] = POISON

    def grow(self, row: int, request: Request, num_new: int) -> None:
        """Add a host page if the newest token needs one; sometimes several, and sometimes none for its
        drafts."""
        num_wanted = self.random.choice((1, num_new))
        if request.capacity and request.seq_len + num_wanted > request.num_host_pages * PAGE_SIZE:
            first = request.num_host_pages
            end = min(first + self.random.choice((1, 1, 3)), self.pages_each)
            self.state.set_host_pages(
                row, first, request.host_pages[first:end], request.lookup_pages[first:end]
            )
            request.num_host_pages = end
        num_there = request.num_host_pages * PAGE_SIZE if request.capacity else self.max_context
        end = min(request.seq_len + num_new, num_there, self.max_context)
        request.new = range(request.seq_len, end)
        request.has_stepped = True
        if self.max_new > 1:
            new = request.truth[:, request.new.start : request.new.stop]
            new.copy_(torch.randint(0, 256, new.shape, dtype=torch.uint8, generator=self.generator))
        self.write_checks(row, request, request.new)

    def selection(self, request: Request, num_new: int) -> Tensor:
        """Draw a selection, [num_new, top_k]: some of the last one and some other positions, mixed with
        absent ones and duplicates. The new positions have much of it in common."""
        seq_len, top_k = request.new.start + 1, self.top_k
        is_bounded = request.capacity > 0 and not self.has_faults
        num_wanted = min(
            seq_len, num_new * top_k, request.capacity - self.max_new if is_bounded else num_new * top_k
        )
        churn = self.random.choice(self.churns)
        fresh = torch.randperm(seq_len, generator=self.generator)[:num_wanted]
        if (kept := request.last) is not None:
            num_kept = int(len(kept) * (1 - churn))
            kept = kept[torch.randperm(len(kept), generator=self.generator)[:num_kept]]
            fresh = torch.cat([kept, fresh[~torch.isin(fresh, kept)]])[:num_wanted]
        request.last = fresh
        return torch.stack([self.selection_of_one(fresh, seq_len + i) for i in range(num_new)])

    def selection_of_one(self, fresh: Tensor, seq_len: int) -> Tensor:
        """Draw the selection of the position ``seq_len - 1``."""
        top_k = self.top_k
        fresh = fresh[torch.randperm(len(fresh), generator=self.generator)[:top_k]]
        if self.random.random() < 0.5 and len(fresh):
            fresh[-1] = seq_len - 1  # may be a duplicate
        row = torch.full((top_k,), ABSENT)
        row[: len(fresh)] = fresh
        if 0 < len(fresh) < top_k and self.random.random() < 0.5:
            num_duplicates = self.random.randint(0, top_k - len(fresh))
            row[len(fresh) : len(fresh) + num_duplicates] = fresh[0]
        if self.has_faults and self.random.random() < 0.1:
            row[0] = self.random.choice((-2, seq_len + 4, seq_len + 9, -(2**31), 2**31 - 1))
        return row[torch.randperm(top_k, generator=self.generator)].to(torch.int32)

    def step(
        self,
        selections: Mapping[int, Sequence[int]] | None = None,
        *,
        num_padding: int | None = None,
        num_new: int | None = None,
    ) -> Tensor:
        """Run one decode step of the rows in ``selections``, by default of all or some with random
        selections. Given selections are those of ``num_new`` positions one after the other, ``top_k`` each.

        Returns the device slots of the last group's swap-in, [num_reqs, num_new * top_k] on the CPU.
        """
        if num_new is None:
            num_new = self.random.randint(1, self.max_new) if selections is None else 1
        if selections is None:
            batch = [(r, q) for r, q in self.requests.items() if q.seq_len < self.max_context]
            self.random.shuffle(batch)
            if self.random.random() < 0.3:
                batch = batch[: self.random.randint(0, len(batch))]
        else:
            batch = [(row, self.requests[row]) for row in selections]
        if num_padding is None:
            num_padding = self.random.randint(0, 2)
        self.flip_bits()
        for row, request in batch:
            self.grow(row, request, num_new)
        rows = torch.tensor([r for r, _ in batch] + [0] * num_padding, dtype=self.rows_dtype)
        lens = [q.seq_len + num_new for _, q in batch]
        seq_lens = torch.tensor(lens + [0] * num_padding, dtype=self.lens_dtype)
        num_real = torch.tensor([len(batch)], dtype=torch.int32)
        requests = StepRequests(
            self.state, seq_lens.to(DEVICE), rows.to(DEVICE), num_real.to(DEVICE), num_new
        )
        self.write_newest(batch, requests)
        out = torch.empty(0, dtype=torch.int32)
        for group in range(len(self.group_layers)):
            selected = torch.zeros((len(rows), num_new, self.top_k), dtype=torch.int32)
            for i, (row, request) in enumerate(batch):
                selected[i] = (
                    self.selection(request, num_new)
                    if selections is None
                    else padded(selections[row], num_new * self.top_k).view(num_new, self.top_k)
                )
            out = self.swap_in_group(group, batch, selected.flatten(0, 1), requests)
        self.accept(batch, requests, num_padding)
        check_consistency(
            on_host(self.state),
            {r: q.new.stop for r, q in self.requests.items() if q.has_stepped},
            {r: len(q.new) for r, q in self.requests.items()},
        )
        self.end_wrong()
        return out

    def accept(self, batch: list[tuple[int, Request]], requests: StepRequests, num_padding: int) -> None:
        """Accept some of the new positions of each request, and back them up."""
        accepted = [self.random.randint(1, len(request.new)) for _, request in batch]
        for (_, request), num in zip(batch, accepted, strict=True):
            request.seq_len += num
            newest = torch.arange(request.new.start, request.seq_len)
            newest = newest[[int(p) // PAGE_SIZE not in request.lost_pages for p in newest]]
            if request.capacity:
                self.expected_host[:, request.host_slots[newest]] = request.truth[:, newest]
        lens = [request.seq_len for _, request in batch]
        seq_lens = torch.tensor(lens + [0] * num_padding, dtype=self.lens_dtype)
        nums = torch.tensor(accepted + [9] * num_padding, dtype=torch.int32)
        backup_newest(
            replace(requests, seq_lens=seq_lens.to(DEVICE), num_new=1), **self.pools(),
            num_newest=None if self.max_new == 1 else nums.to(DEVICE),
        )  # fmt: skip
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def write_newest(self, batch: list[tuple[int, Request]], requests: StepRequests) -> None:
        """Write the new items before the swap-ins, as the model does."""
        slots = newest_slots(requests).cpu()
        expected = torch.empty_like(slots)
        expected_newest_slots(requests_on_host(requests, on_host(self.state)), expected)
        assert torch.equal(slots, expected), "newest_slots"
        if batch:
            items = torch.cat([q.truth[:, q.new.start : q.new.stop] for _, q in batch], dim=1)
            self.dev[:, slots[slots >= 0].long().to(DEVICE)] = items.to(DEVICE)

    def swap_in_group(
        self,
        group: int,
        batch: list[tuple[int, Request]],
        selected: Tensor,
        requests: StepRequests,
    ) -> Tensor:
        layers = self.group_layers[group]
        plan = self.plan if len(layers) > 1 or self.random.random() < 0.5 else None
        guarded = torch.full((selected.numel() + 2 * GUARD,), UNTOUCHED, dtype=torch.int32, device=DEVICE)
        out_dev = guarded[GUARD:-GUARD].view(selected.shape)
        before = on_host(self.state)
        if self.copy_blocks is not None and self.random.random() < 0.5:
            plan = self.plan
            out_dev = plan_misses(selected.to(DEVICE), requests, group=group, miss_plan=plan)
            for layer in layers:
                replay_misses(plan, layer, **self.pools(), max_blocks=self.copy_blocks, state=self.state)
        else:
            swap_in(
                selected.to(DEVICE), requests,
                group=group, layer=layers[0], out=out_dev, miss_plan=plan, **self.pools(),
            )  # fmt: skip
            for layer in layers[1:]:
                replay_misses(self.plan, layer, **self.pools(), state=self.state)
        guards = torch.cat((guarded[:GUARD], guarded[-GUARD:]))
        assert (guards == UNTOUCHED).all(), "written outside of out"
        out = out_dev.cpu()
        check_step(before, selected, requests, out, group=group, miss_plan=plan)
        selected, out = (
            table.view(requests.num_reqs, requests.num_new * self.top_k) for table in (selected, out)
        )
        slots = [out[i][out[i] >= 0].long() for i in range(len(batch))]
        positions = [selected[i][out[i] >= 0].long() for i in range(len(batch))]
        for layer in layers if batch else ():
            got = self.dev[layer, torch.cat(slots).to(DEVICE)].cpu().split([len(s) for s in slots])
            flags = self.state.error_flags.cpu()
            for items, (row, request), read in zip(got, batch, positions, strict=True):
                if flags[row] & HotBufferError.WRONG_ROW:
                    continue  # the model's result is not used
                assert torch.equal(items, request.truth[layer, read]), f"I3: wrong bytes in row {row}"
        return out


def hot_pages(pages: list[int], capacity: int) -> Tensor:
    """Return the first of ``pages`` that a hot buffer of ``capacity`` entries takes."""
    return torch.tensor(pages[: -(-capacity // PAGE_SIZE)])


def live_from_nothing(item_bytes: int, max_new: int) -> None:
    """Let requests live whose first step has the very first token, as prompts of one token do: a dense one,
    and ones with buffers that are warmed up or only assigned, until they have outgrown these."""
    small, large = (25 * max_new + more for more in (6, 65))
    history = History(item_bytes, item_bytes, max_new=max_new, capacities=(small, large), churns=(0.1, 0.5))
    for capacity, is_warm in ((0, False), (small, True), (small, False), (large, True)):
        assert history.admit(capacity=capacity, prompt=0, is_warm=is_warm) is not None
    while any(request.seq_len <= small for request in history.requests.values()):
        history.step()
    history.finish()
