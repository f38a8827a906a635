"""Sparse attention on one GPU: time of one layer's attention for each backend, KV format and batch.

DeepSeek-V3.2's sizes: 128 heads, 512 + 64 numbers, top-k 2048, bfloat16 queries. Each token's slots lie
scattered over a pool of a million. Calls with other slots each are captured in one CUDA graph that is
replayed between two events: us = time / calls, the median of the replays. TFLOP/s counts both products.

    python bench/attention.py [--batch 1 8 32 64 128 256] [--format bfloat16 fp8_e4m3]

``--tune`` times the Triton kernel at other tilings and numbers of splits instead. Writes JSON to --out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, run_facts, spread
from bench.gpu_timing import graph_us
from kernels.attention import BACKEND_NAMES, TRITON, AttentionBackend, AttentionBackendError
from kernels.attention_backends import choose_backend
from kernels.kv_format import BFLOAT16, FORMAT_NAMES, FP8_E4M3, KvFormat

RANK, ROPE, TOP_K = 512, 64, 2048
NUM_SLOTS = 1 << 20
NUM_CALLS = 8
SKIPPED = ("torch",)
"""Backends that are too slow to be of interest here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--format", nargs="+", default=[BFLOAT16, FP8_E4M3], choices=FORMAT_NAMES)
    parser.add_argument(
        "--tune", action="store_true", help="time other tilings and splits of the Triton kernel"
    )
    parser.add_argument("--out", type=Path, default=OUT / "attention.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: only the torch backend runs without one")
    report: dict[str, Any] = {
        "facts": run_facts(),
        "gpu": torch.cuda.get_device_name(),
        "shape": {"heads": arguments.heads, "rank": RANK, "rope": ROPE, "top_k": TOP_K},
        "cells": [],
    }
    print(report["gpu"])
    print(f"{'format':>9} {'batch':>5} {'backend':>16} {'us':>8} {'TFLOP/s':>8}  settings")
    for format_name in arguments.format:
        kv_format = KvFormat(format_name, RANK, ROPE)
        pool = torch.zeros((NUM_SLOTS, kv_format.item_bytes), dtype=torch.uint8, device="cuda")
        for start in range(0, NUM_SLOTS, 1 << 17):
            slots = torch.arange(start, start + (1 << 17), device="cuda")
            kv_format.store(pool, slots, torch.randn((len(slots), RANK + ROPE), device="cuda"))
        for batch in arguments.batch:
            for name, setting, backend in variants(kv_format, arguments.heads, batch, arguments.tune):
                us = measure(backend, pool, arguments.heads, batch, setting)
                flops = 2 * batch * arguments.heads * TOP_K * (2 * RANK + ROPE)
                report["cells"].append(
                    {
                        "format": format_name,
                        "batch": batch,
                        "backend": name,
                        "setting": str(setting),
                        "us": us,
                    }
                )
                print(
                    f"{format_name:>9} {batch:>5} {name:>16} {us['median']:>8.1f} "
                    f"{flops / us['median'] / 1e6:>8.0f}  {setting or ''}",
                    flush=True,
                )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))


def variants(
    kv_format: KvFormat, num_heads: int, batch: int, tune: bool
) -> list[tuple[str, tuple[Any, int] | None, AttentionBackend]]:
    """Name, setting (a tiling and a number of splits, or None) and backend of what is measured."""
    result: list[tuple[str, tuple[Any, int] | None, AttentionBackend]] = []
    for name in (TRITON,) if tune else BACKEND_NAMES:
        if name in SKIPPED:
            continue
        try:
            backend = choose_backend(
                name, device=torch.device("cuda"), kv_format=kv_format, num_heads=num_heads, top_k=TOP_K
            )
        except AttentionBackendError:
            continue
        if not tune:
            result.append((name, None, backend))
            continue
        from kernels.triton_attention import Tiling

        tilings = [
            Tiling(64, 64, 8, 3), Tiling(64, 32, 8, 3), Tiling(64, 32, 8, 5), Tiling(32, 64, 8, 3),
            Tiling(32, 32, 8, 5), Tiling(16, 64, 8, 3), Tiling(16, 32, 4, 5),
        ]  # fmt: skip
        splits = (8, 16, 32) if batch <= 2 else (2, 4, 8) if batch <= 16 else (1, 2)
        result += [(name, setting, backend) for setting in itertools.product(tilings, splits)]
    return result


def measure(
    backend: AttentionBackend, pool: torch.Tensor, num_heads: int, batch: int, setting: tuple[Any, int] | None
) -> dict[str, Any]:
    """us of one call."""
    generator = torch.Generator("cuda").manual_seed(batch)
    q = torch.randn((batch, num_heads, RANK + ROPE), device="cuda", generator=generator).bfloat16()
    slots = [
        torch.randint(0, NUM_SLOTS, (batch, TOP_K), dtype=torch.int32, device="cuda", generator=generator)
        for _ in range(NUM_CALLS)
    ]
    if setting is not None:
        from kernels import triton_attention

        tiling, num_splits = setting
        backend._tilings[(q.device, num_heads, False)] = tiling  # type: ignore[attr-defined]
        triton_attention.num_splits_for = lambda *sizes: num_splits  # type: ignore[assignment]
    try:
        return graph_us([partial(backend.attend, q, pool, call_slots, 0.04) for call_slots in slots])
    except Exception as error:
        if setting is None:
            raise
        print(f"{type(error).__name__}: {error}"[:100])
        return spread([float("nan")])


if __name__ == "__main__":
    main()
