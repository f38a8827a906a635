"""Linear layers of DeepSeek-V3.2 on a GPU: time by rows, with weights in bfloat16 and in fp8.

Both are one product; with fp8 a launch before it rounds the activations, and is part of the time. Joined
matrices are of the same input (``model.block_linear``). Calls over several copies of a matrix, so that none
is in the L2 cache, are captured in one CUDA graph that is replayed between two events: us = time / calls, the
median of the replays. TFLOP/s are of the fp8 product.

    python bench/block_linear.py [--tokens 1 16 64 128 512 4096] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.facts import OUT, run_facts
from bench.gpu_timing import graph_us
from kernels.block_fp8 import DTYPE, scales_shape
from kernels.block_linear import ROW_MULTIPLE, block_linear
from kernels.fp8_rows import quantize_rows

HOME = "cuda:0"
MATRICES = {
    "q_a": (1536, 7168),
    "wk": (128, 7168),
    "kv_a": (576, 7168),
    "q_a, wk, kv_a joined": (2240, 7168),
    "q_b": (24576, 1536),
    "wq_b": (8192, 1536),
    "q_b, wq_b joined": (32768, 1536),
    "o": (7168, 16384),
    "dense gate, up joined": (36864, 7168),
    "dense down": (7168, 18432),
    "shared gate": (2048, 7168),
    "shared gate, up joined": (4096, 7168),
    "shared down": (7168, 2048),
}
"""Rows and columns."""
COLD_BYTES = 200 << 20
MAX_COPIES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 128, 512, 4096])
    parser.add_argument("--out", type=Path, default=OUT / "block-linear.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the products run on NVIDIA GPUs only")
    report: dict[str, Any] = {"facts": run_facts(), "gpu": torch.cuda.get_device_name(), "cells": []}
    print(report["gpu"])
    print(f"{'matrix':>22} {'tokens':>6} {'bf16 us':>8} {'fp8 us':>8} {'rounding':>8} {'TFLOP/s':>8}")
    for name, (rows, columns) in MATRICES.items():
        for num_tokens in arguments.tokens:
            cell = measure(rows, columns, num_tokens)
            report["cells"].append({"matrix": name, "shape": (rows, columns), "tokens": num_tokens, **cell})
            bf16, fp8, rounding = (cell[key]["median"] for key in ("bf16", "fp8", "rounding"))
            teraflops = 2 * num_tokens * rows * columns / fp8 / 1e6
            print(
                f"{name:>22} {num_tokens:>6} {bf16:>8.1f} {fp8:>8.1f} {rounding:>8.1f} {teraflops:>8.0f}",
                flush=True,
            )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1))


@torch.inference_mode()
def measure(rows: int, columns: int, num_tokens: int) -> dict[str, Any]:
    """us of one call, by kind."""
    copies = max(1, min(MAX_COPIES, -(-COLD_BYTES // (rows * columns))))
    generator = torch.Generator(HOME).manual_seed(rows + num_tokens)
    x = torch.randn((num_tokens, columns), device=HOME, generator=generator).bfloat16()
    random = torch.randn((rows, columns), device=HOME, generator=generator).bfloat16()
    scales = torch.rand(scales_shape(rows, columns), device=HOME, generator=generator)
    in_fp8 = [(random * 40).to(DTYPE) for _ in range(copies)]
    in_bf16 = [random.clone() for _ in range(copies)]
    return {
        "bf16": graph_us([partial(linear, x, matrix) for matrix in in_bf16]),
        "fp8": graph_us([partial(block_linear, x, matrix, scales) for matrix in in_fp8]),
        "rounding": graph_us([partial(quantize_rows, x, ROW_MULTIPLE)] * copies),
    }


if __name__ == "__main__":
    main()
