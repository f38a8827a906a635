"""Traces of top-k selections: recorded ones, the synthetic one, and the hit rates that they give.

A trace is what the indexer of one request selects in consecutive decode steps. Its hit rate in a hot buffer
is counted twice: by the swap-in kernels (on a GPU, or the CPU reference) and by a plain simulation of exact
LRU that shares no code with them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.swap_in_workload import CONTEXT, NUM_WARM_STEPS, PAGE_SIZE, TOP_K, Cell
from kernels.hot_state import ABSENT, HITS, MISSES

NUM_SYNTHETIC_STEPS = 200
LRU_TOLERANCE_POINTS = 1.0
"""A hit rate that differs more than this from exact LRU's, in percentage points, is flagged."""


@dataclass(frozen=True)
class Trace:
    """What one request selected, step by step."""

    name: str
    selected: NDArray[np.int32]
    """[num_steps, num_index_layers, top_k] positions, -1 for none; no duplicates."""
    seq_lens: NDArray[np.int32]
    """[num_steps] with the newest token, growing by one a step."""

    def __post_init__(self) -> None:
        if self.selected.ndim != 3 or self.selected.shape[0] != len(self.seq_lens):
            raise ValueError(
                f"trace {self.name}: expected selected [num_steps, num_index_layers, top_k] of "
                f"{len(self.seq_lens)} steps, got shape {self.selected.shape}"
            )
        if (np.diff(self.seq_lens) != 1).any():
            raise ValueError(f"trace {self.name}: expected seq_lens that grow by one a step")
        if self.selected.min() < ABSENT or (self.selected >= self.seq_lens[:, None, None]).any():
            raise ValueError(f"trace {self.name}: expected positions in [0, seq_len) or {ABSENT}")

    @property
    def num_steps(self) -> int:
        return self.selected.shape[0]

    @property
    def num_layers(self) -> int:
        """Layers with an indexer of their own."""
        return self.selected.shape[1]

    @property
    def top_k(self) -> int:
        return self.selected.shape[2]

    @property
    def context(self) -> int:
        """Tokens at the end."""
        return int(self.seq_lens[-1])

    @property
    def capacities(self) -> list[int]:
        """Hot buffers to try: the smallest that works, then 1.5, 2, 3 and 4 times the selection."""
        return [self.top_k + 1, *(self.top_k * halves // 2 for halves in (3, 4, 6, 8))]

    @property
    def overlap(self) -> float:
        """Share of a step's selection that the step before selected too, averaged over steps and layers."""
        pairs = zip(
            self.selected[1:].reshape(-1, self.top_k),
            self.selected[:-1].reshape(-1, self.top_k),
            strict=True,
        )
        return float(np.mean([np.isin(now, before).mean() for now, before in pairs]))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, selected=self.selected, seq_lens=self.seq_lens)


def load_trace(path: Path) -> Trace:
    """A trace that ``save`` wrote, named after its file. Raises ValueError, OSError."""
    with np.load(path, allow_pickle=False) as arrays:
        if missing := {"selected", "seq_lens"} - set(arrays.files):
            raise ValueError(f"{path}: expected arrays selected and seq_lens, {', '.join(missing)} missing")
        return Trace(path.stem.removeprefix("trace_"), arrays["selected"], arrays["seq_lens"])


def synthetic_trace(seed: int, num_steps: int = NUM_SYNTHETIC_STEPS) -> Trace:
    """Made-up selections of TOP_K out of CONTEXT positions, of which consecutive steps share 44%.

    That share is measured: about 44% on average over layers 20 to 60 of DeepSeek-V3.2 (35 to 50% by layer,
    next to nothing in layers 0 and 1), top-k 2048, on a coding prompt of 68,665 tokens: TensorRT-LLM's tech
    blog 21, arXiv:2604.22312. The rest of the shape is invented. A position's score is the sum of

    - what it is worth at any time, and what it is worth to the present topic, which 16 neighbours share and
      which forgets a twentieth of itself a step;
    - what its distance to the newest token is worth: most nearby, and bumps further away that move on with
      the query, as rotary embeddings make them;
    - noise, whose size sets the share.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    lasting, topic = noise(CONTEXT), noise(CONTEXT // 16)
    bumps = torch.nn.functional.avg_pool1d(noise(CONTEXT)[None, None], 9, 1, 4)[0, 0] * 3
    by_distance = 3 * torch.exp(torch.arange(CONTEXT) / -400.0) + 0.5 * bumps
    selected = np.empty((num_steps, 1, TOP_K), dtype=np.int32)
    seq_lens = np.arange(CONTEXT - num_steps + 1, CONTEXT + 1, dtype=np.int32)
    for step, seq_len in enumerate(seq_lens.tolist()):
        topic = 0.95 * topic + math.sqrt(1 - 0.95**2) * noise(CONTEXT // 16)
        score = lasting + topic.repeat_interleave(16) + _NOISE * noise(CONTEXT)
        score[:seq_len] += by_distance[:seq_len].flip(0)
        selected[step, 0] = score[:seq_len].topk(TOP_K).indices
    return Trace("synthetic", selected, seq_lens)


_NOISE = 0.9
"""Of the synthetic trace, in standard deviations of its lasting part: tuned to the share of 44%."""


def kernel_hit_rate(trace: Trace, capacity: int) -> float:
    """Of the CPU reference, over all layers; the first NUM_WARM_STEPS steps do not count."""
    # The hit rate does not depend on the bytes, so there is one byte of them.
    num_slots = -(-trace.context // PAGE_SIZE) * PAGE_SIZE
    host = torch.zeros((trace.num_layers, num_slots, 1), dtype=torch.uint8)
    cell = Cell(host, 1, trace.context, capacity, "cpu")
    selected, seq_lens = torch.from_numpy(trace.selected), torch.from_numpy(trace.seq_lens)
    out = torch.empty((1, trace.top_k), dtype=torch.int32)
    for step in range(trace.num_steps):
        if step == NUM_WARM_STEPS:
            cell.state.counters.zero_()
        for layer in range(trace.num_layers):
            cell.call(selected[step, layer : layer + 1], seq_lens[step : step + 1], out, layer)
    counted = cell.counted()
    return counted[HITS] / (counted[HITS] + counted[MISSES])


def hit_rates(trace: Trace, capacity: int, hit_rate: float) -> dict[str, Any]:
    """``hit_rate`` is what the kernel under test counted."""
    lru = lru_hit_rate(trace, capacity)
    return {
        "trace": trace.name,
        "top_k": trace.top_k,
        "context": trace.context,
        "num_steps": trace.num_steps,
        "num_layers": trace.num_layers,
        "overlap": trace.overlap,
        "capacity": capacity,
        "hit_rate": hit_rate,
        "lru_hit_rate": lru,
        "points_over_lru": 100 * (hit_rate - lru),
    }


def lru_hit_rate(trace: Trace, capacity: int) -> float:
    """Of exact LRU, over all layers; the first NUM_WARM_STEPS steps do not count."""
    hits, misses = (
        sum(counts)
        for counts in zip(
            *(
                lru_counts(trace.selected[:, layer], trace.seq_lens, capacity, NUM_WARM_STEPS)
                for layer in range(trace.num_layers)
            ),
            strict=True,
        )
    )
    return hits / (hits + misses)


def lru_counts(
    selected: NDArray[np.int32], seq_lens: NDArray[np.int32], capacity: int, num_uncounted_steps: int = 0
) -> tuple[int, int]:
    """Hits and misses of one layer, ``selected`` [num_steps, top_k], in a cache of ``capacity`` positions.

    The newest token is always there, and while the whole context fits it stays. Once it does not, the newest
    token has an entry of its own, which the next one takes over. Positions of one step are all used at the
    same time; where that leaves a choice, those that are there come before those that are missing, lower ones
    before higher ones, and the newest comes last.
    """
    cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
    hits = misses = 0
    newest = ABSENT
    for step, (positions, seq_len) in enumerate(zip(selected.tolist(), seq_lens.tolist(), strict=True)):
        if seq_len > capacity:
            cached.pop(newest, None)
        newest = seq_len - 1
        cached[newest] = None
        wanted = set(positions) - {ABSENT}
        missing = wanted - cached.keys()
        for position in sorted(wanted - missing):
            cached.move_to_end(position)
        cached.update(dict.fromkeys(sorted(missing)))
        cached.move_to_end(newest)
        while len(cached) > capacity:
            cached.popitem(last=False)
        if step >= num_uncounted_steps:
            hits += len(wanted) - len(missing)
            misses += len(missing)
    return hits, misses
