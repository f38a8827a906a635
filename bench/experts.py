"""Routed experts of one layer on one GPU: time by batch, and how near it is to reading the weights.

DeepSeek-V3.2's sizes: 256 experts of 7168 x 2048, 8 for each token, weights in fp8 with scales of blocks or
in bfloat16. Tokens choose at random, so that a large batch reads nearly all experts. Calls with other choices
each are captured in one CUDA graph that is replayed between two events: us = time / calls, the median of the
replays. TB/s is of the chosen experts' weights.

    python bench/experts.py [--tokens 1 8 32 128 512 4096] [--weights fp8 bfloat16]

``--tune`` times other tilings. Writes JSON to --out.
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, run_facts, spread
from bench.gpu_timing import graph_us
from kernels.block_fp8 import DTYPE as FP8
from model.experts import RoutedExperts

HOME = "cuda:0"
NUM_CALLS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 4096])
    parser.add_argument("--weights", nargs="+", default=["fp8"], choices=["fp8", "bfloat16"])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tune", action="store_true", help="time other tilings")
    parser.add_argument("--out", type=Path, default=OUT / "experts.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the kernel runs on NVIDIA GPUs only")
    report: dict[str, Any] = {
        "facts": run_facts(),
        "gpu": torch.cuda.get_device_name(),
        "shape": {name: getattr(arguments, name) for name in ("experts", "hidden", "inner", "top_k")},
        "cells": [],
    }
    print(report["gpu"])
    print(f"{'weights':>8} {'tokens':>6} {'us':>9} {'TB/s':>6} {'TFLOP/s':>8}  setting")
    for weights in arguments.weights:
        experts = make_experts(arguments, FP8 if weights == "fp8" else torch.bfloat16)
        for num_tokens in arguments.tokens:
            inputs = [draw(arguments, num_tokens, seed) for seed in range(NUM_CALLS)]
            num_read = sum(len(expert_ids.unique()) for _, expert_ids, _ in inputs) / NUM_CALLS
            matrices = 3 * arguments.hidden * arguments.inner
            num_bytes = num_read * matrices * (1 if weights == "fp8" else 2)
            flops = 2 * num_tokens * arguments.top_k * matrices
            for setting in tilings() if arguments.tune else [None]:
                us = measure(experts, inputs, setting)
                report["cells"].append(
                    {"weights": weights, "tokens": num_tokens, "setting": str(setting), "us": us}
                )
                terabytes, teraflops = num_bytes / us["median"] / 1e6, flops / us["median"] / 1e6
                print(
                    f"{weights:>8} {num_tokens:>6} {us['median']:>9.1f} {terabytes:>6.2f} {teraflops:>8.0f}  "
                    f"{setting or ''}",
                    flush=True,
                )
        del experts
        torch.cuda.empty_cache()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))


def make_experts(arguments: argparse.Namespace, dtype: torch.dtype) -> RoutedExperts:
    """With random weights: how long a product takes does not depend on them."""
    experts = RoutedExperts(arguments.experts, arguments.hidden, arguments.inner, dtype, torch.device(HOME))
    for matrices in (experts.gate_up, experts.down):
        for values in matrices.values:
            values.copy_(torch.randn(values.shape, device=HOME) / 64)
        if matrices.scales is not None:
            matrices.scales.fill_(1.0)
    return experts


def draw(arguments: argparse.Namespace, num_tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and the experts' weights."""
    generator = torch.Generator(HOME).manual_seed(seed)
    hidden = torch.randn((num_tokens, arguments.hidden), device=HOME, generator=generator).bfloat16()
    scores = torch.rand((num_tokens, arguments.experts), device=HOME, generator=generator)
    weights, expert_ids = scores.topk(arguments.top_k)
    return hidden, expert_ids, weights


def tilings() -> list[Any]:
    from kernels.triton_experts import Tiling

    shapes = itertools.product((64, 128), (64, 128), (4, 8), (3, 4, 5))
    return [Tiling(*shape) for shape in shapes]


@torch.inference_mode()
def measure(
    experts: RoutedExperts, inputs: list[tuple[Tensor, Tensor, Tensor]], tiling: Any
) -> dict[str, Any]:
    """us of one call."""
    if tiling is not None:
        from kernels import triton_experts

        triton_experts.TILINGS = dict.fromkeys(triton_experts.TILINGS, tiling)  # type: ignore[misc]
        triton_experts.ROUNDED_TILING = tiling  # type: ignore[misc]
    try:
        return graph_us([partial(experts, *call) for call in inputs])
    except Exception as error:
        if tiling is None:
            raise
        print(f"{type(error).__name__}: {error}"[:100])
        return spread([float("nan")])


if __name__ == "__main__":
    main()
