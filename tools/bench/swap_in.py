"""Measures swap-in on one GPU: us a call by batch, item, share of misses and new positions of a request.

``tools.bench.kernels`` prints what ``swap_ins`` yields. Every request's rows lie together in an 8 GiB pinned
pool, and its hot buffer is empty at first. The calls after the first tokens' are captured in one CUDA graph,
which is replayed once between two events: us per call = time / calls. Nothing is allocated or freed
between the capture and the replay, because the GPU would forget its translations of host addresses, which the
first calls have loaded. With ``--repeat N`` a cell is built and measured N times; each time the bytes in the
slots that the last call returned are compared with the pool. Single calls are timed, too.

With ``--full`` the hot buffers are full when the calls begin, of positions that none of them selects.

With ``--new 1 2 3 4`` a call swaps in the selections of 1, 2, 3 or 4 positions of each request, as a step
that verifies drafts does. Each number runs over the same tokens, as if all drafts were accepted: each token
is in one call, so that ``us_a_token`` of the numbers can be compared. Each number is measured with code
compiled for the largest one (``max_new``), and 1 also with the code without drafts. All hot buffers then have
room for the selections of four positions.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.kernels.hot_state import HITS, MISSES, HotBufferState
from hisparse_pd.kernels.row_check import row_checks_of
from hisparse_pd.kernels.row_errors import HotBufferError
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in import swap_in
from tools.bench.facts import spread
from tools.bench.gpu_timing import timed_us

TOP_K = 2048
CAPACITY = 4096
"""Hot buffer entries of a request with one token a step, unless others are asked for."""
CONTEXT = 32768
PAGE_SIZE = 64
POOL_BYTES = 8 << 30
"""Bytes of the host pool, which all cells share."""
NUM_TOKENS, NUM_WARM_TOKENS = 30, 3
"""Tokens of a request with one token a step; the warm ones run before the clock and the counters start."""
MOST_NEW = 4
"""Most positions of a request in a call: the newest token and three drafts."""
NUM_DRAFTED_TOKENS, NUM_WARM_DRAFTED_TOKENS = 120, 12
"""Tokens of a request with several a step; both are multiples of 1, 2, 3 and 4."""
DRAFTS_CAPACITY = MOST_NEW * TOP_K + PAGE_SIZE
"""Hot buffer entries for the union of any four selections and their new positions."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--item", type=int, nargs="+", default=[1152, 656], help="bytes of an item")
    parser.add_argument(
        "--miss", type=int, nargs="+", default=[0, 2, 10, 30, 100], help="misses in %% of a selection"
    )
    parser.add_argument("--new", type=int, nargs="+", default=[1], choices=range(1, MOST_NEW + 1))
    parser.add_argument(
        "--union",
        type=float,
        default=1.9,
        help="size of the union of four drafted selections, relative to one selection",
    )
    parser.add_argument(
        "--capacity", type=int, nargs="+", default=[CAPACITY], help="hot buffer entries of a request"
    )
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a request")
    parser.add_argument("--full", action="store_true", help="fill the hot buffers before the first call")
    parser.add_argument("--repeat", type=int, default=1, help="how often a cell is built and measured")
    parser.add_argument("--verify-rows", action="store_true", help="compare the row check of each item")
    parser.add_argument("--seed", type=int, default=0)


def swap_ins(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each cell: its settings, what ``measure`` returns, and how near it is to plain
    copies."""
    pool = pinned_pool()
    peak = copy_peak(pool)
    most_new = max(options.new)
    # Each is a max_new, for which the code is compiled, and a num_new, the positions of a request in a call.
    kinds = [(1, 1), *((most_new, num_new) for num_new in options.new if most_new > 1)]
    for item_bytes in options.item:
        num_slots = POOL_BYTES // item_bytes
        host = pool[: num_slots * item_bytes].view(1, num_slots, item_bytes)
        for batch in options.batch:
            for miss_percent in options.miss:
                has_drafts = most_new > 1
                num_tokens = NUM_DRAFTED_TOKENS if has_drafts else NUM_TOKENS
                union = options.union if has_drafts else None
                tokens = selections(num_tokens, batch, miss_percent, options.seed, union, options.context)
                for capacity, (max_new, num_new) in itertools.product(options.capacity, kinds):
                    row = {"item_bytes": item_bytes, "batch": batch, "miss_percent": miss_percent}
                    row |= {"capacity": capacity, "max_new": max_new, "num_new": num_new}
                    row |= measure(host, tokens, capacity, max_new, num_new, options)
                    yield row | {"copy_gb_s": peak, "of_copy": f"{row['gb_s'] / peak['median']:.0%}"}


# --- what is selected ----------------------------------------------------------------------------------


def selections(
    num_tokens: int,
    batch: int,
    miss_percent: int,
    seed: int,
    union_of_four: float | None = None,
    context: int = CONTEXT,
) -> Tensor:
    """Return what the tokens of each request select one after the other, shuffled: int32 [num_tokens, batch,
    TOP_K].

    Each token replaces ``miss_percent`` of the previous selection by positions that were never selected, in
    random order (once the context is used up, by those selected longest ago).

    ``union_of_four``: the number of distinct positions that four tokens in a row select, divided by TOP_K.
    The first of the four selects TOP_K, and each of the others adds a third of the rest: it replaces so many
    positions of its predecessor. Only ``miss_percent`` of TOP_K are new ones. The others are those that were
    replaced three tokens earlier: the three tokens before have not selected them, but a buffer that holds the
    union of five tokens still has them. The first three tokens have no such positions, so all that they add
    misses. Raises ValueError when more are to miss than are replaced.
    """
    random = np.random.default_rng(seed)
    num_missed = round(TOP_K * miss_percent / 100)
    num_replaced = num_missed if union_of_four is None else round(TOP_K * (union_of_four - 1) / 3)
    if num_missed > num_replaced:
        raise ValueError(
            f"{miss_percent}% misses: a token replaces {num_replaced} of {TOP_K} positions at a union of "
            f"{union_of_four}; give fewer misses or a larger union"
        )
    steps = np.empty((num_tokens, batch, TOP_K), dtype=np.int32)
    for req in range(batch):
        order = random.permutation(context - PAGE_SIZE).astype(np.int32)  # excludes the new positions
        current = order[:TOP_K].copy()
        used = TOP_K  # positions of ``order`` that were selected so far
        replaced_by: list[np.ndarray] = []  # the positions that each token replaced, from the second one on
        steps[0, req] = current
        for step in range(1, num_tokens):
            replaced = random.choice(TOP_K, num_replaced, replace=False)
            replaced_by.append(current[replaced])
            # [-1] is what this token replaces, [-4] what the token three earlier replaced.
            known = replaced_by[-4][: num_replaced - num_missed] if len(replaced_by) > 3 else order[:0]
            num_fresh = num_replaced - len(known)
            current[replaced] = np.concatenate((known, order[(used + np.arange(num_fresh)) % len(order)]))
            used += num_fresh
            random.shuffle(current)
            steps[step, req] = current
    return torch.from_numpy(steps)


def filling(tokens: Tensor, capacity: int, context: int) -> Tensor:
    """Return selections that fill hot buffers of ``capacity`` entries with positions that ``tokens`` do not
    select: int32 [n, batch, TOP_K]. Raises ValueError where too few positions are left."""
    num_calls = -(-capacity // TOP_K)
    calls = np.empty((num_calls, tokens.shape[1], TOP_K), dtype=np.int32)
    for req in range(tokens.shape[1]):
        others = np.setdiff1d(np.arange(context - PAGE_SIZE, dtype=np.int32), tokens[:, req].numpy())
        if len(others) < num_calls * TOP_K:
            raise ValueError(
                f"--full: {len(others)} of {context} positions are not selected, and hot buffers of "
                f"{capacity} entries take {num_calls * TOP_K}; raise --context or lower --capacity or --miss"
            )
        np.random.default_rng(req).shuffle(others)
        calls[:, req] = others[: num_calls * TOP_K].reshape(num_calls, TOP_K)
    return torch.from_numpy(calls)


def calls_of(tokens: Tensor, num_new: int) -> Tensor:
    """Return ``tokens`` [num_tokens, batch, top_k] as calls: [num_tokens / num_new, batch * num_new,
    top_k]."""
    num_tokens, batch, top_k = tokens.shape
    by_call = tokens.view(num_tokens // num_new, num_new, batch, top_k).transpose(1, 2)
    return by_call.reshape(num_tokens // num_new, batch * num_new, top_k)


def calls_behind_filling(
    tokens: Tensor, num_new: int, capacity: int, options: argparse.Namespace
) -> tuple[Tensor, int]:
    """Return ``tokens`` as calls on the GPU, behind those that fill the hot buffers if ``--full`` asks for
    it, and the number of the latter. Raises ValueError as ``filling`` does."""
    calls = calls_of(tokens, num_new)
    if not options.full:
        return calls.cuda(), 0
    filled = filling(tokens, capacity, options.context).repeat_interleave(num_new, dim=1)
    return torch.cat((filled, calls)).cuda(), len(filled)


# --- what it runs on -------------------------------------------------------------------------------------


def pinned_pool() -> Tensor:
    """Return POOL_BYTES of noise in pinned memory, made once for all cells."""
    pool = torch.empty(POOL_BYTES, dtype=torch.uint8, pin_memory=True)
    chunk = torch.randint(0, 256, (1 << 26,), dtype=torch.uint8)
    for start in range(0, POOL_BYTES, len(chunk)):
        pool[start : start + len(chunk)] = chunk.roll(start // len(chunk))
    return pool


def copy_peak(pool: Tensor) -> dict[str, Any]:
    """Return the GB/s of plain copies of 1 GiB, pinned host to device."""
    num_bytes = 1 << 30
    dev = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    rates = []
    for repetition in range(6):
        src = pool[repetition * num_bytes : (repetition + 1) * num_bytes]
        us = timed_us(partial(dev.copy_, src, non_blocking=True))
        rates.append(num_bytes / us / 1e3)
    return spread(rates[1:])


class Cell:
    """Requests with empty hot buffers over one host pool, with their tables and device pool.

    ``host``: uint8 [1, num_slots, item_bytes]. The rows of a request lie together, followed by those of the
    next. Raises ValueError when they do not fit.
    """

    def __init__(
        self,
        host: Tensor,
        batch: int,
        context: int,
        capacity: int,
        device: str,
        max_new: int = 1,
        verifies: bool = False,
    ) -> None:
        _, num_slots, item_bytes = host.shape
        self.host = host
        # Zeroed, so that recycled memory cannot have the bytes that a call should bring.
        num_hot_pages = -(-capacity // PAGE_SIZE)
        num_device_slots = batch * num_hot_pages * PAGE_SIZE
        self.dev = torch.zeros((1, num_device_slots, item_bytes), dtype=torch.uint8, device=device)
        pages_each = -(-context // PAGE_SIZE)
        self.host_slots_each = pages_each * PAGE_SIZE
        if batch * self.host_slots_each > num_slots:
            raise ValueError(f"{batch} requests of {context} tokens do not fit in {num_slots} host slots")
        checks = None
        if verifies:
            slots = torch.arange(batch * self.host_slots_each, device=device)
            checks = row_checks_of(host, slots, slots % self.host_slots_each)
        num_lookup_slots = batch * self.host_slots_each
        self.state = HotBufferState.create(  # with one index group
            1, batch, context, capacity, PAGE_SIZE, num_lookup_slots, num_device_slots, device, max_new,
            row_checks=checks,
        )  # fmt: skip
        hot_pages = torch.arange(batch * num_hot_pages).view(batch, num_hot_pages)
        host_pages = torch.arange(batch * pages_each).view(batch, pages_each)
        for row in range(batch):
            # Host, look-up and index pages have the same numbers: each request has as many of each.
            self.state.assign_row(
                row, capacity, hot_pages[row], host_pages[row], lookup_pages=host_pages[row]
            )
            self.state.set_index_pages(row, 0, host_pages[row])
        self.rows = torch.arange(batch, dtype=torch.int32, device=device)
        self.num_real = torch.full((1,), batch, dtype=torch.int32, device=device)
        self.batch = batch

    def prepare(self, selected: Tensor, seq_lens: Tensor, out: Tensor) -> None:
        """Make a call in which every request is padding, to allocate what a captured call cannot."""
        self.num_real.zero_()
        self.call(selected, seq_lens, out)
        self.num_real.fill_(self.batch)

    def call(self, selected: Tensor, seq_lens: Tensor, out: Tensor) -> None:
        """Swap ``selected``, int32 [batch * num_new, top_k], in and write the slots to ``out``."""
        swap_in(
            selected,
            StepRequests(self.state, seq_lens, self.rows, self.num_real, selected.shape[0] // self.batch),
            group=0, layer=0, k_host=self.host, k_dev=self.dev, out=out,
        )  # fmt: skip

    def verify(self, selected: Tensor, out: Tensor) -> None:
        """Raise RuntimeError unless every returned slot holds its token's bytes.

        Selections must not have the newest position, whose bytes a model would write.
        """
        num_new = selected.shape[0] // self.batch
        if flags := int(self.state.error_flags.max()):
            raise RuntimeError(f"swap-ins reported {HotBufferError(flags)!r}")
        for i in range(selected.shape[0]):
            row = i // num_new
            slots = selected[i].cpu().long() + row * self.host_slots_each
            if not torch.equal(self.dev[0, out[i].long()].cpu(), self.host[0, slots]):
                raise RuntimeError(f"row {row}: a returned slot holds other bytes")

    def forget_counts(self) -> None:
        self.state.counters.zero_()

    def counted(self) -> list[int]:
        """Return the hits, misses and evictions of all rows so far."""
        counters: list[int] = self.state.counters.sum(0).tolist()
        return counters


class Calls(Protocol):
    """Requests whose selections some kernel swaps in."""

    def prepare(self, selected: Tensor, seq_lens: Tensor, out: Tensor) -> None:
        """Make a call that changes nothing, to allocate what a captured call cannot."""

    def call(self, selected: Tensor, seq_lens: Tensor, out: Tensor) -> None:
        """Swap ``selected``, int32 [rows, top_k], in and write the slots to ``out``."""

    def forget_counts(self) -> None:
        """Begin to count hits and misses anew, where they are counted."""

    def verify(self, selected: Tensor, out: Tensor) -> None:
        """Raise RuntimeError unless every returned slot holds its token's bytes."""


def us_of_calls(cell: Calls, calls: Tensor, num_warm: int, seq_lens: Tensor, out: Tensor) -> float:
    """Return the us of one of ``calls[num_warm:]``, captured in one graph that is replayed once, after the
    warm ones. ``calls``: int32 [n, rows, top_k], on the GPU. Raises RuntimeError for wrong bytes."""
    cell.prepare(calls[0], seq_lens, out)
    # A capture runs nothing: the warm calls run after it, right before the replay.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls[num_warm:]:
            cell.call(call, seq_lens, out)
    for call in calls[:num_warm]:
        cell.call(call, seq_lens, out)
    cell.forget_counts()
    us = timed_us(graph.replay) / (len(calls) - num_warm)
    cell.verify(calls[-1], out)
    return us


def measure(
    host: Tensor, tokens: Tensor, capacity: int, max_new: int, num_new: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Measure one cell. ``tokens``: int32 [num_tokens, batch, TOP_K] on the CPU, from ``selections``;
    NUM_DRAFTED_TOKENS of them mean that steps have drafts, and ``capacity`` at least DRAFTS_CAPACITY.
    ``gb_s``: of the missed items in replayed calls."""
    num_tokens, batch, _ = tokens.shape
    context = options.context
    has_drafts = num_tokens == NUM_DRAFTED_TOKENS
    capacity = max(capacity, DRAFTS_CAPACITY) if has_drafts else capacity
    num_warm = (NUM_WARM_DRAFTED_TOKENS if has_drafts else NUM_WARM_TOKENS) // num_new
    calls, num_filling = calls_behind_filling(tokens, num_new, capacity, options)
    num_warm += num_filling
    num_timed = len(calls) - num_warm
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    out = torch.empty_like(calls[0])

    graph_us = []
    for _ in range(options.repeat):
        cell = Cell(host, batch, context, capacity, "cuda", max_new, options.verify_rows)
        graph_us.append(us_of_calls(cell, calls, num_warm, seq_lens, out))
        counted = cell.counted()  # the same in each repetition
        del cell

    # Single calls, over the same tokens from the first one on, need empty hot buffers again.
    cell = Cell(host, batch, context, capacity, "cuda", max_new, options.verify_rows)
    single_us = [timed_us(partial(cell.call, call, seq_lens, out)) for call in calls]

    repeats = spread(graph_us)
    us, misses = repeats["median"], counted[MISSES]
    return {
        "us": us,
        "repeats_us": repeats,
        "single_us": spread(single_us[num_warm:]),
        "us_a_token": us / num_new,
        "union": (counted[HITS] + misses) / num_timed / batch / TOP_K,
        "misses_a_token": misses / num_timed / num_new / batch,
        "gb_s": misses / num_timed * host.shape[2] / us / 1e3,
    }
