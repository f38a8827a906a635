"""What roundings of the indexer and of activations cost: normal numbers of DeepSeek-V3.2's sizes, on a CPU.

    python -m tools.bench.rounding

The error of scores is relative to their spread over the positions of a query, and the overlap is that of the
selections: both against the same scores without the rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.block_fp8 import dequantize, quantize
from kernels.block_linear import block_linear
from kernels.hadamard import hadamard_matrix
from kernels.indexer import index_logits
from kernels.kv_format import FP8_E4M3, IndexKeyFormat
from kernels.selection import select_topk

HEAD_DIM, NUM_HEADS, HIDDEN, TOP_K = 128, 64, 7168, 2048
NUM_LARGE, LARGER = 4, 8.0
"""Channels of queries and keys that are larger than the others, and how much."""


def index_key_error(
    rotates: bool, *, num_positions: int = 16384, num_queries: int = 8, top_k: int = TOP_K
) -> tuple[float, float]:
    """Error and overlap of scores of keys in fp8, with the rotation before they are rounded or without."""
    generator = torch.Generator().manual_seed(0)
    channels = torch.ones(HEAD_DIM)
    channels[:NUM_LARGE] = LARGER
    keys = torch.randn((num_positions, HEAD_DIM), generator=generator) * channels
    queries = torch.randn((num_queries, NUM_HEADS, HEAD_DIM), generator=generator) * channels
    weights = torch.randn((num_queries, NUM_HEADS), generator=generator).abs()
    exact = index_logits(queries, weights, keys)
    if rotates:
        matrix = hadamard_matrix(HEAD_DIM, torch.float32)
        queries, keys = linear(queries, matrix), linear(keys, matrix)
    key_format = IndexKeyFormat(FP8_E4M3, HEAD_DIM)
    pool = torch.zeros((num_positions, key_format.item_bytes), dtype=torch.uint8)
    key_format.store(pool, torch.arange(num_positions), keys)
    return _error_and_overlap(index_logits(queries, weights, key_format.load(pool)), exact, top_k)


def head_weight_error(
    *, num_positions: int = 16384, num_queries: int = 8, top_k: int = TOP_K
) -> tuple[float, float]:
    """Error and overlap of scores whose heads' weights were computed in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn((num_positions, HEAD_DIM), generator=generator)
    queries = torch.randn((num_queries, NUM_HEADS, HEAD_DIM), generator=generator)
    hidden = torch.randn((num_queries, HIDDEN), generator=generator).bfloat16()
    matrix = (torch.randn((NUM_HEADS, HIDDEN), generator=generator) / HIDDEN**0.5).bfloat16()
    exact = index_logits(queries, linear(hidden.float(), matrix.float()), keys)
    return _error_and_overlap(index_logits(queries, linear(hidden, matrix).float(), keys), exact, top_k)


def activation_error(ue8m0: bool, *, num_tokens: int = 64, num_rows: int = 512) -> float:
    """Of a product with a matrix in fp8, by rounding what it multiplies; relative to the product's norm."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((num_tokens, HIDDEN), generator=generator)
    x *= torch.exp2(torch.linspace(0, 1, num_tokens))[:, None]  # peaks everywhere between two powers of two
    values, scales = quantize(torch.randn((num_rows, HIDDEN), generator=generator) / HIDDEN**0.5)
    exact = linear(x, dequantize(values, scales, torch.float32))
    found = block_linear(x, values, scales, ue8m0=ue8m0)
    return float(((found - exact).norm(dim=1) / exact.norm(dim=1)).mean())


def _error_and_overlap(found: Tensor, exact: Tensor, top_k: int) -> tuple[float, float]:
    """Of scores [num_queries, num_positions]."""
    spread = exact - exact.mean(dim=1, keepdim=True)
    error = ((found - exact).norm(dim=1) / spread.norm(dim=1)).mean()
    num_seen = torch.full((len(exact),), exact.shape[1])
    selections = [select_topk(scores, num_seen, top_k).long() for scores in (found, exact)]
    is_selected = [torch.zeros(exact.shape).scatter_(1, selected, 1.0) for selected in selections]
    return float(error), float((is_selected[0] * is_selected[1]).sum() / (len(exact) * top_k))


def main() -> None:
    print(f"index keys in fp8, {NUM_LARGE} of {HEAD_DIM} channels {LARGER:g} times larger:")
    for rotates in (False, True):
        error, overlap = index_key_error(rotates)
        name = "rotated" if rotates else "as they are"
        print(f"  {name:>12}: error {100 * error:.2f}%, overlap of top-{TOP_K} {100 * overlap:.2f}%")
    error, overlap = head_weight_error()
    print(f"head weights in bfloat16: error {100 * error:.2f}%, overlap of top-{TOP_K} {100 * overlap:.2f}%")
    print("activations in fp8, error of a product:")
    for ue8m0 in (False, True):
        print(f"  {'ue8m0' if ue8m0 else 'float32'} scales: {100 * activation_error(ue8m0):.2f}%")


if __name__ == "__main__":
    main()
