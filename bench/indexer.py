"""The indexer on one GPU: time of the logits and of the top-k for each batch, context and key format.

Every request is one decode query at the end of its context; its keys lie in scattered pages of a pool that
holds all requests' contexts (64 heads, 128 dimensions, top-k 2048). Logits and top-k are captured apart, each
in a CUDA graph of several calls that is replayed between two events: us = time / calls, the median of the
replays. The calls of a graph take other pages each, several L2 caches full of keys before they repeat.

The memory floor is the time that one reading of the keys takes at the highest rate seen in this run: of a
device-to-device copy of 1 GiB (bytes read and written count) or of a sum over it (bytes read).

    python bench/indexer.py [--batch 1 8 64 128] [--context 4096 32768 131072] [--keys bfloat16 fp8_e4m3]

``--tune`` times the logits at other tiles, warps and stages of the kernel as well. Writes JSON to --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, run_facts, spread
from bench.gpu_timing import graph_us, timed_us
from kernels.paged_indexer import IndexerScratch, index_item_bytes
from kernels.selection import select_topk

NUM_HEADS, HEAD_DIM, TOP_K, PAGE_SIZE = 64, 128, 2048, 64
FLUSH_BYTES = 256 << 20
"""Keys that a graph goes through before it comes back to the first: several times an L2 cache."""
SETTINGS = [
    (tile, num_warps, num_stages, programs_per_sm)
    for tile, num_warps in ((64, 4), (64, 8), (128, 8))
    for num_stages in (2, 3, 4, 5)
    for programs_per_sm in (4, 8, 16)
]
"""What ``--tune`` goes through, in the order of ``kernels.triton_indexer.Tuning``."""
COPY_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument(
        "--keys", nargs="+", default=["bfloat16", "fp8_e4m3"], choices=("bfloat16", "fp8_e4m3")
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tune", action="store_true", help="time the logits kernel at other settings")
    parser.add_argument("--out", type=Path, default=OUT / "indexer.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the indexer's kernels run on NVIDIA GPUs only")
    cells = itertools.product(arguments.keys, arguments.batch, arguments.context)
    report: dict[str, Any] = {
        "facts": run_facts(),
        "gpu": torch.cuda.get_device_name(),
        "shape": {"heads": NUM_HEADS, "dim": HEAD_DIM, "top_k": TOP_K, "page_size": PAGE_SIZE},
        "memory": (memory := memory_rates()),
        "cells": [],
    }
    peak = max(rate["max"] for rate in memory.values())
    print(
        f"{report['gpu']}: " + ", ".join(f"{name} {rate['median']:.0f} GB/s" for name, rate in memory.items())
    )
    print(
        f"{'keys':>9} {'batch':>5} {'context':>7} {'MiB':>7} {'floor us':>8} {'logits us':>9} {'x floor':>7} "
        f"{'top-k us':>8} {'both us':>8}  settings"
    )
    for key_format, batch, context in cells:
        for setting in SETTINGS if arguments.tune else (None,):
            cell = measure_cell(key_format, batch, context, peak, arguments.seed, setting)
            report["cells"].append(cell)
            print_cell(cell)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))


def print_cell(cell: dict[str, Any]) -> None:
    top_k_us = cell["top_k_us"]["median"]
    logits_us = cell["logits_us"]["median"]
    print(
        f"{cell['key_format']:>9} {cell['batch']:>5} {cell['context']:>7} {cell['key_bytes'] / 2**20:>7.1f} "
        f"{cell['floor_us']:>8.1f} {logits_us:>9.1f} {logits_us / cell['floor_us']:>7.2f} "
        f"{top_k_us:>8.1f} {logits_us + top_k_us:>8.1f}  {cell['setting'] or ''}",
        flush=True,
    )


def memory_rates() -> dict[str, Any]:
    """GB/s of the GPU's memory: a copy, read and written bytes counted, and a reduction."""
    src = torch.zeros(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    dst = torch.empty_like(src)
    copy_us = [timed_us(lambda: dst.copy_(src)) for _ in range(6)][1:]
    read_us = [timed_us(lambda: src.sum()) for _ in range(6)][1:]
    return {
        "copy": spread([2 * COPY_BYTES / us / 1e3 for us in copy_us]),
        "read": spread([COPY_BYTES / us / 1e3 for us in read_us]),
    }


# --- a cell -----------------------------------------------------------------------------------------------


def noise_pool(num_slots: int, key_format: str) -> Tensor:
    """uint8 [num_slots, index_item_bytes] of normal keys, a few different ones over and over."""
    keys = torch.randn(4096, HEAD_DIM, device="cuda")
    if key_format == "fp8_e4m3":
        scales = keys.abs().amax(1, keepdim=True) / 448
        values = (keys / scales).to(torch.float8_e4m3fn).view(torch.uint8)
        items = torch.cat((values, scales.view(torch.uint8)), dim=1)
    else:
        items = keys.bfloat16().view(torch.uint8)
    pool = torch.empty((num_slots, items.shape[1]), dtype=torch.uint8, device="cuda")
    for start in range(0, num_slots, len(items)):
        part = pool[start : start + len(items)]
        part.copy_(items[: len(part)])
    return pool


def measure_cell(
    key_format: str,
    batch: int,
    context: int,
    peak_gb_s: float,
    seed: int,
    setting: tuple[int, int, int, int] | None,
) -> dict[str, Any]:
    from kernels.topk import select
    from kernels.triton_indexer import Tuning, write_logits

    torch.manual_seed(seed)
    key_bytes = batch * context * index_item_bytes(key_format, HEAD_DIM)
    num_calls = max(2, -(-FLUSH_BYTES // key_bytes))
    num_pages = context // PAGE_SIZE
    # Small batches take other pages of the pool in each call.
    pool = noise_pool(num_calls * batch * context, key_format)
    pages = (
        torch.randperm(num_calls * batch * num_pages, device="cuda").int().view(num_calls, batch, num_pages)
    )
    q_index = torch.randn(batch, NUM_HEADS, HEAD_DIM, device="cuda").bfloat16()
    weights = torch.randn(batch, NUM_HEADS, device="cuda")
    rows = torch.arange(batch, device="cuda")
    positions = torch.full((batch,), context - 1, device="cuda")
    num_real = torch.tensor([batch], dtype=torch.int32, device="cuda")
    scratch = IndexerScratch.create(batch, context, "cuda")
    out = torch.empty((batch, TOP_K), dtype=torch.int32, device="cuda")
    tuning = None if setting is None else Tuning(*setting)

    def logits(call: int) -> None:
        write_logits(
            q_index, weights, pool, pages[call], rows, positions, num_real, scratch.logits, first_token=0,
            block_tokens=batch, page_size=PAGE_SIZE, top_k=TOP_K, key_format=key_format, max_len=context,
            tuning=tuning,
        )  # fmt: skip

    def top_k() -> None:
        select(
            scratch.logits, rows, positions, num_real, out,
            first_token=0, block_tokens=batch, num_rows=batch, max_len=context,
        )  # fmt: skip

    logits_us = graph_us([lambda call=call: logits(call) for call in range(num_calls)])
    top_k_us = graph_us([top_k] * num_calls)
    seen = torch.full((batch,), context, device="cuda")
    for some in range(0, batch, 8):
        expected = select_topk(scratch.logits[some : some + 8, :context], seen[some : some + 8], TOP_K)
        if not torch.equal(out[some : some + 8], expected):
            raise RuntimeError(f"{key_format}, batch {batch}, context {context}: another top-k than torch's")
    return {
        "key_format": key_format,
        "batch": batch,
        "context": context,
        "setting": setting,
        "num_calls": num_calls,
        "key_bytes": key_bytes,
        "floor_us": key_bytes / peak_gb_s / 1e3,
        "logits_us": logits_us,
        "logits_gb_s": key_bytes / logits_us["median"] / 1e3,
        "logits_share_of_floor": key_bytes / peak_gb_s / 1e3 / logits_us["median"],
        "top_k_us": top_k_us,
    }


if __name__ == "__main__":
    main()
