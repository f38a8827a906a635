"""Runs the Triton attention kernels in Triton's interpreter and compares them with the reference.

A program of its own, because Triton reads ``TRITON_INTERPRET`` when it is imported. Queries are float32: the
interpreter multiplies the bits of bfloat16 matrices as integers.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from kernels import triton_attention
from kernels.attention import TorchAttention
from kernels.kv_format import BFLOAT16, FLOAT32, FP8_E4M3, KvFormat

NUM_SLOTS = 90
CASES = [
    (FLOAT32, 96, 16, 3, 40),
    (FLOAT32, 33, 0, 17, 1),
    (BFLOAT16, 96, 16, 2, 40),
    (FP8_E4M3, 300, 16, 2, 40),
    (FP8_E4M3, 33, 7, 5, 40),
]
"""Format, kv_lora_rank, rope_dim, num_heads, top_k."""


def compare(num_splits: int) -> None:
    triton_attention.num_splits_for = lambda programs, num_blocks, places: min(num_blocks, num_splits)
    generator = torch.Generator().manual_seed(num_splits)
    for name, rank, rope, num_heads, top_k in CASES:
        kv_format = KvFormat(name, rank, rope)
        # The bytes of slot 0, which nobody selects, are NaN in every format.
        pool = torch.full((NUM_SLOTS, kv_format.item_bytes), 0xFF, dtype=torch.uint8)
        items = torch.randn((NUM_SLOTS - 1, kv_format.item_dim), generator=generator)
        kv_format.store(pool, torch.arange(1, NUM_SLOTS), items)
        q = torch.randn((3, num_heads, kv_format.item_dim), generator=generator)
        slots = torch.randint(1, NUM_SLOTS, (3, top_k), dtype=torch.int32, generator=generator)
        slots[torch.rand(slots.shape, generator=generator) < 0.3] = -1
        slots[1] = -1
        slots[2, max(1, top_k // 3) :] = -1
        expected = TorchAttention(kv_format).attend(q, pool, slots, 0.2)
        actual = triton_attention.TritonAttention(kv_format).attend(q, pool, slots, 0.2)
        assert not actual[1].any(), f"{name}: nothing is selected, but the result is not zero"
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    compare(num_splits=1)
    compare(num_splits=3)
    print("same")
