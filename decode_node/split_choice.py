"""Measures at a node's start the number of requests from which hisparse batches are split, and in which way.

``Forwards`` calls ``choose_splits`` with a function that times the steps of one batch size, with
``TrialRequests`` in the still empty pools.

In a split batch one half copies its misses while the other computes. There are two ways to split. In parts,
only selection and attention of each layer are split: they alone hide copies, and weights are read once. In
micro-batches, the whole forward is split: everything hides copies, and every matrix and expert is read twice.
Which is faster depends on the model, on how many GPUs share its experts, and on the machine. So all ways are
timed, with requests that miss as many positions as published traces do. A request's tokens do not depend on
the choice. With requests that miss nothing ``Forwards`` measures how long steps take (``miss_cost.py``).

Slots and tables are those of ``kernels/hot_state.py``, whose docstring has an example.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import torch

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.decode_node.drafting import smallest_buffer
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.step_buffers import StepInputs
from hisparse_pd.kernels.hot_state import ABSENT


class Split(Enum):
    """How a step runs; the values are for the log."""

    WHOLE = "whole"
    PARTS = "in parts"
    MICRO_BATCHES = "in micro-batches"


SPLITS: Final = (Split.PARTS, Split.MICRO_BATCHES)
"""The ways to split a batch."""
MIN_REQS: Final = 32
"""Fewest requests of a batch that is split. Smaller ones have too little to copy: 16 of V3.2's size lost 3%
on an H200."""
MIN_GAIN: Final = 1.02
"""The least factor by which a whole step must take longer than a split one for batches to be split."""
NUM_STEPS: Final = 5
"""Steps of each kind that are timed, by turns."""
MISS_SHARE: Final = 0.134
"""The share of selected positions that miss: GLM-5.1 on LongBench v2 with hot buffers of 4,096 (the HiSparse
paper)."""
MOST_CONTEXT: Final = 32768
"""The context of a trial's requests, if pools and model allow as much."""
_KEYS_AT_ONCE: Final = 1 << 16
"""Indexer keys that are drawn once and stored again and again."""

Secs = Mapping[Split, float]
"""Seconds of a step of one size, by how it runs."""


class SplitChoice(NamedTuple):
    """How batches are split, by their sizes."""

    chosen: dict[int, Split]
    measured: dict[int, Secs]


def choose_splits(sizes: Sequence[int], measure: Callable[[int], Secs | None]) -> SplitChoice:
    """Return how to split batches of those ``sizes`` that gain by it, and what was measured.

    ``measure`` returns None for a size that cannot occur. Sizes are measured from the largest down, until one
    does not gain.
    """
    chosen: dict[int, Split] = {}
    measured: dict[int, Secs] = {}
    for size in sorted((size for size in sizes if size >= MIN_REQS), reverse=True):
        secs = measure(size)
        if secs is None:
            continue
        measured[size] = secs
        best = fastest(secs)
        if secs[Split.WHOLE] < MIN_GAIN * secs[best]:
            break
        chosen[size] = best
    return SplitChoice(chosen, measured)


def fastest(secs: Secs) -> Split:
    """Return the fastest of the ways to split."""
    return min(SPLITS, key=lambda split: secs[split])


class TrialRequests:
    """Hisparse requests with noise for tokens and keys, in pools and tables that have to be empty. After
    ``end`` they are empty again, but for noise in free slots.

    ``fits`` says whether each of ``num_reqs`` requests gets the smallest hot buffer, and a context that
    exceeds it. If not, nothing was filled.
    """

    def __init__(
        self,
        tables: RequestTables,
        kernels: AttentionKernels,
        inputs: StepInputs,
        num_reqs: int,
        *,
        miss_share: float = MISS_SHARE,
    ) -> None:
        """``miss_share``: the share of selected positions that miss in each step behind the first."""
        self._tables, self._num_reqs, self._miss_share = tables, num_reqs, miss_share
        spec, memory, state = tables.spec, tables.memory, tables.state
        page_size = tables.page_size
        # All requests share the slots of the host pool and of the index pool, which ends with a scratch page,
        # and the lookup slots, through which positions are found in hot buffers.
        most_tokens = min(memory.k_host.shape[1], memory.index.shape[1] - page_size, state.num_lookup_slots)
        num_pages = min(MOST_CONTEXT, state.max_context, most_tokens // num_reqs) // page_size
        # A hot buffer has whole pages of the device pool.
        capacity = min(state.max_capacity, state.num_device_slots // page_size // num_reqs * page_size)
        max_drafts = state.max_new - 1  # the other new position is the newest token's
        smallest = smallest_buffer(max_drafts, spec.index_topk)
        self.fits = num_pages * page_size > smallest and capacity >= smallest
        if not self.fits:
            return
        self._inputs = inputs
        self._generator = torch.Generator(tables.device).manual_seed(0)
        self._assign_rows(num_pages, capacity)
        self._store_keys(kernels, num_reqs * num_pages * page_size)
        self._fill_inputs(num_pages * page_size)

    def _assign_rows(self, num_pages: int, capacity: int) -> None:
        """Give each request a row with pages and a hot buffer of its own."""
        num_reqs, state = self._num_reqs, self._tables.state
        pages = torch.arange(num_reqs * num_pages).view(num_reqs, num_pages)
        num_hot_pages = -(-capacity // state.page_size)
        hot_pages = torch.arange(num_reqs * num_hot_pages).view(num_reqs, num_hot_pages)
        self._num_device_slots = num_reqs * num_hot_pages * state.page_size
        for row in range(num_reqs):
            state.assign_row(row, capacity, hot_pages[row], host_pages=pages[row], lookup_pages=pages[row])
            state.set_index_pages(row, 0, pages[row])

    def _store_keys(self, kernels: AttentionKernels, num_slots: int) -> None:
        """Store random indexer keys in the first ``num_slots`` slots, so that selections differ."""
        spec, device = self._tables.spec, self._tables.device
        keys = torch.randn(
            (min(num_slots, _KEYS_AT_ONCE), spec.index_head_dim), generator=self._generator, device=device
        )
        for pool in self._tables.memory.index:
            for first in range(0, num_slots, _KEYS_AT_ONCE):
                some = torch.arange(first, min(first + _KEYS_AT_ONCE, num_slots), device=device)
                kernels.index_format.store(pool, some, keys[: len(some)].to(spec.dtype))

    def _fill_inputs(self, seq_len: int) -> None:
        """Write the inputs of a step of all requests, each with random tokens and ``seq_len``."""
        num_reqs, inputs, device = self._num_reqs, self._inputs, self._tables.device
        num_tokens = num_reqs * self._tables.state.max_new
        inputs.tokens[:num_tokens] = torch.randint(
            self._tables.spec.vocab_size, (num_tokens,), generator=self._generator, device=device
        )
        inputs.seq_lens[:num_reqs] = seq_len
        inputs.req_rows[:num_reqs] = torch.arange(num_reqs, device=device)
        inputs.num_real.fill_(num_reqs)

    def drop_entries(self) -> None:
        """Free a share ``miss_share`` of the hot buffers' entries, at random, so that the next step misses as
        large a share of what it selects. All three tables that have entries forget them."""
        if not self._miss_share:
            return
        state = self._tables.state
        lookup_slots = state.hot_to_lookup[:, : self._num_device_slots]
        random = torch.rand(lookup_slots.shape, generator=self._generator, device=lookup_slots.device)
        is_lost = (random < self._miss_share) & (lookup_slots != ABSENT)
        # A scatter writes for every entry: those that are not lost write to the last lookup slot, unused.
        lost = torch.where(is_lost, lookup_slots, state.num_lookup_slots).long()
        state.lookup_to_hot.scatter_(1, lost, ABSENT)
        lookup_slots.masked_fill_(is_lost, ABSENT)
        state.stamps[:, : self._num_device_slots].masked_fill_(is_lost, ABSENT)

    def end(self) -> None:
        """Empty the rows. This also clears the errors that row checks reported: the items were noise."""
        if not self.fits:
            return
        self._inputs.num_real.zero_()
        self._tables.state.reset_rows(*range(self._num_reqs))


def time_by_turns(
    steps: Mapping[Split, Callable[[], object]], requests: TrialRequests, ranks: RankGroup | None
) -> Secs:
    """Return the median of NUM_STEPS steps of each kind, on the slowest rank. A first step of each kind is
    not counted."""
    secs: dict[Split, list[float]] = {split: [] for split in steps}
    for turn in range(NUM_STEPS + 1):
        for split, step in steps.items():
            requests.drop_entries()
            start, end = _event(), _event()
            start.record()
            step()
            end.record()
            end.synchronize()
            if turn > 0:
                secs[split].append(start.elapsed_time(end) / 1e3)
    own_ns = [round(1e9 * statistics.median(of_split)) for of_split in secs.values()]
    ns_of_ranks = [tuple(own_ns)] if ranks is None else ranks.agree(*own_ns)  # which takes integers
    slowest = [max(ns) / 1e9 for ns in zip(*ns_of_ranks, strict=True)]
    return dict(zip(steps, slowest, strict=True))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)
