"""What the ranks of a node have in common: links to the host used at once, collectives, agreements."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hisparse_pd.bench.facts import spread
from hisparse_pd.model.rank_group import RankGroup
from tools.bench.decode_step import synchronize
from tools.bench.gpu_timing import graph_us

LINK_REPEATS = 8
LAYERS = 20
"""Exchanges that are timed together."""
AGREEMENTS = 200


def measure_links(ranks: RankGroup, device: torch.device, num_bytes: int) -> list[dict[str, Any]]:
    """GB/s of every rank's copies from pinned memory and back, while the others rest and while all copy."""
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    dev = torch.empty_like(host, device=device, pin_memory=False)

    def copies(target: torch.Tensor, source: torch.Tensor) -> int:
        """MB/s"""
        started = time.perf_counter()
        for _ in range(LINK_REPEATS):
            target.copy_(source, non_blocking=True)
        synchronize(device)
        return round(LINK_REPEATS * num_bytes / (time.perf_counter() - started) / 1e6)

    rows: list[dict[str, Any]] = [{"rank": rank} for rank in range(ranks.size)]
    for name, target, source in (("to_device", dev, host), ("to_host", host, dev)):
        copies(target, source)
        for active in (*range(ranks.size), None):
            ranks.agree(0)
            mb_s = copies(target, source) if active in (ranks.rank, None) else 0
            for row, (found,) in zip(rows, ranks.agree(mb_s), strict=True):
                if active in (row["rank"], None):
                    row[f"{name}_{'all' if active is None else 'alone'}_gb_s"] = found / 1e3
    return rows


def measure_collectives(
    ranks: RankGroup, device: torch.device, hidden_size: int, by_tokens: Sequence[int]
) -> list[dict[str, Any]]:
    """us of a layer's exchange: ``num_tokens`` rows of every rank to all, and the sums back."""
    rows = []
    for num_tokens in by_tokens:
        x = torch.ones((num_tokens, hidden_size), dtype=torch.bfloat16, device=device)
        calls = [lambda x=x: ranks.sum_own(ranks.gather(x))] * LAYERS
        us = graph_us(calls) if device.type == "cuda" else host_us(calls)
        rows.append({"tokens_a_rank": num_tokens, "gather_and_sum_us": us})
    return rows


def measure_agreement(ranks: RankGroup) -> dict[str, Any]:
    us = host_us([lambda: ranks.agree(1, 0, 0, 1)] * AGREEMENTS)
    return {"median_us": us["median"], "p99_us": float(np.percentile(us["values"], 99)), "max_us": us["max"]}


def host_us(calls: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """us of each of ``calls`` by the host's clock."""
    found = []
    for call in calls:
        started = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - started))
    return spread(found)
