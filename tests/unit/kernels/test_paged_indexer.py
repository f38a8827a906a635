"""The indexer over paged keys: the reference, and the logits kernel, interpreted or compiled."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.indexer import index_logits, index_topk
from hisparse_pd.kernels.paged_indexer import IndexerScratch, paged_index_topk
from hisparse_pd.kernels.selection import ABSENT, select_topk
from hisparse_pd.kernels.topk import choose_cluster_size
from tests.gpu.index_batch import Batch
from tests.unit.kernels.triton_here import (
    compiled_for_hopper,
    interpreted,
    interprets_loops,
    needs_triton,
    output_of,
)

INFINITY, NAN = float("inf"), float("nan")


def chosen(scores: list[float], num_seen: int, top_k: int) -> list[int]:
    selected = select_topk(torch.tensor([scores], dtype=torch.float32), torch.tensor([num_seen]), top_k)
    assert selected.shape == (1, top_k)
    assert selected.dtype == torch.int32
    return list(selected[0].tolist())


@pytest.mark.parametrize(
    ("scores", "num_seen", "top_k", "expected"),
    [
        ([1, 5, 3, 4], 4, 2, [1, 3]),
        ([1, 5, 3, 9], 3, 2, [1, 2]),
        ([2, 2, 2, 2, 2], 5, 3, [0, 1, 2]),
        ([0, 1, 0, 7, 0, 1], 6, 4, [0, 1, 3, 5]),
        ([-0.0, 0.0, -0.0, 0.0], 4, 2, [0, 1]),
        ([0.0, -0.0, 1, 0.0], 4, 3, [0, 1, 2]),
        ([-1e-45, -0.0, 1e-45, 0.0], 4, 2, [1, 2]),
        ([-INFINITY, -3e38, -INFINITY, -5], 4, 2, [1, 3]),
        ([-INFINITY, 1, -INFINITY, -INFINITY], 4, 3, [0, 1, 2]),
        ([NAN, 1, NAN, -7, INFINITY], 5, 3, [1, 3, 4]),
        ([NAN, -INFINITY, NAN, 2], 4, 3, [0, 1, 3]),
        ([1, 2, NAN], 2, 3, [0, 1, ABSENT]),
        ([1, 2, 3], 0, 2, [ABSENT, ABSENT]),
        ([NAN, -INFINITY], 2, 2, [0, 1]),
        ([4], 1, 1, [0]),
    ],
)
def test_the_best_are_chosen_and_of_equal_ones_the_lowest(
    scores: list[float], num_seen: int, top_k: int, expected: list[int]
) -> None:
    assert chosen(scores, num_seen, top_k) == expected


@pytest.mark.parametrize(
    ("key_format", "q_dtype"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.float32),
        ("fp8_e4m3", torch.float32),
        ("fp8_e4m3", torch.bfloat16),
    ],
)
def test_paged_selection_is_that_of_contiguous_keys(key_format: str, q_dtype: torch.dtype) -> None:
    batch = Batch(
        3, key_format, num_heads=8, head_dim=16, page_size=4, lens=(40, 3, 17, 40), top_k=8, q_dtype=q_dtype
    )
    batch.weights.abs_()  # few zeros at the top, because the other side does not define their order
    selected = batch.call()
    for token, (row, position) in enumerate(zip(batch.rows, batch.query_positions.tolist(), strict=True)):
        keys = batch.keys(row, position + 1)
        expected = index_topk(
            batch.query(token).float(), batch.weights[token : token + 1], keys,
            torch.tensor([position]), batch.top_k,
        )  # fmt: skip
        assert sorted(selected[token].tolist()) == sorted(expected[0].tolist())


def test_the_queries_of_a_chunk_share_a_row() -> None:
    batch = Batch(5, "float32", num_heads=2, head_dim=16, page_size=4, lens=(30,), top_k=4)
    together = batch.with_queries(rows=[0] * 9, positions=list(range(20, 29)))
    alone = [together.with_only(token).call() for token in range(9)]
    assert torch.equal(together.call(), torch.cat(alone))


def test_padding_and_bad_rows_get_nothing() -> None:
    batch = Batch(1, "float32", num_heads=2, head_dim=16, page_size=4, lens=(9, 9, 9, 9), top_k=4)
    batch.req_rows[1] = -1
    batch.query_positions[2] = -1
    batch.num_real.fill_(3)
    out = batch.call()
    assert (out[0] >= 0).all()
    assert (out[1:] == ABSENT).all()


def test_positions_behind_the_page_table_are_not_seen() -> None:
    batch = Batch(1, "float32", num_heads=2, head_dim=16, page_size=4, lens=(12,), top_k=12)
    batch.query_positions[0] = 1000
    assert batch.call().tolist() == [list(range(12))]


def test_no_queries() -> None:
    batch = Batch(1, "float32", num_heads=2, head_dim=16, page_size=4, lens=(9,), top_k=4)
    assert batch.with_queries(rows=[], positions=[]).call().shape == (0, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_format": "int8"}, "name: expected a format of float32, bfloat16, fp8_e4m3, got 'int8'"),
        ({"key_format": "bfloat16"}, r"index_pool: expected shape \[\*, 32\], got \[\d+, 64\]"),
        ({"top_k": 4097}, r"top_k: expected a value in \[1, 4097\), got 4097"),
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
        ({"q_index": torch.zeros(1, 2, 257)}, r"index_head_dim: expected a value in \[1, 257\), got 257"),
        ({"q_index": torch.zeros(1, 129, 16)}, r"num_index_heads: expected a value in \[1, 129\), got 129"),
        ({"req_rows": torch.zeros(1, dtype=torch.int32)}, "req_rows: expected dtype torch.int64"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    batch = Batch(1, "float32", num_heads=2, head_dim=16, page_size=4, lens=(9,), top_k=4)
    with pytest.raises(KernelArgumentError, match=message):
        paged_index_topk(**(batch.arguments() | changes))


def test_scratch_is_bounded() -> None:
    scratch = IndexerScratch.create(2, 100, "cpu")
    assert scratch.logits.shape == (2, 128), "rows start on lines"
    with pytest.raises(KernelArgumentError, match="max_context"):
        IndexerScratch.create(1, (1 << 20) + 1, "cpu")


@pytest.mark.parametrize(
    ("num_tokens", "max_len", "expected"),
    [
        (1, 131072, 8),
        (14, 131072, 8),
        (15, 131072, 4),
        (66, 131072, 2),
        (67, 131072, 1),
        (1, 4096, 1),
    ],
)
def test_blocks_of_a_query(num_tokens: int, max_len: int, expected: int) -> None:
    assert choose_cluster_size(num_tokens, max_len, {2: 66, 4: 30, 8: 14}) == expected
    assert choose_cluster_size(num_tokens, max_len, {}) == 1


# --- Triton -----------------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"key_format": "float32", "num_heads": 3, "head_dim": 16, "page_size": 8, "q_dtype": "float32"},
    {"key_format": "bfloat16", "num_heads": 16, "head_dim": 32, "page_size": 32, "q_dtype": "float32"},
    {"key_format": "fp8_e4m3", "num_heads": 5, "head_dim": 48, "page_size": 64, "q_dtype": "float32"},
    {"key_format": "fp8_e4m3", "num_heads": 5, "head_dim": 48, "page_size": 5, "q_dtype": "bfloat16"},
    {"key_format": "float32", "num_heads": 5, "head_dim": 24, "page_size": 64, "q_dtype": "float32"},
    {"key_format": "bfloat16", "num_heads": 5, "head_dim": 24, "page_size": 64, "q_dtype": "float32"},
    {"key_format": "bfloat16", "num_heads": 2, "head_dim": 6, "page_size": 7, "q_dtype": "float32"},
    {"key_format": "fp8_e4m3", "num_heads": 5, "head_dim": 24, "page_size": 64, "q_dtype": "bfloat16"},
    {"key_format": "fp8_e4m3", "num_heads": 3, "head_dim": 12, "page_size": 64, "q_dtype": "float32"},
    {"key_format": "fp8_e4m3", "num_heads": 20, "head_dim": 128, "page_size": 64, "q_dtype": "bfloat16"},
]
"""No case multiplies bfloat16 by bfloat16, which the interpreter computes wrongly."""


def interpret_cases() -> None:
    """Compare the logits kernel with the reference."""
    from hisparse_pd.kernels.triton_indexer import write_logits

    for case in CASES:
        options = {name: value for name, value in case.items() if name != "q_dtype"}
        lens = (3 * 64 + 11, 1, 64, 130)
        batch = Batch(2, lens=lens, top_k=1, q_dtype=getattr(torch, case["q_dtype"]), **options)
        # The queries of this head are far from 1, so that their powers of two matter.
        batch.q_index[:, 0] *= 2.0**60
        batch.weights[:, 0] *= 2.0**-60
        batch.num_real.fill_(3)
        logits = torch.full((3, 384), NAN)
        arguments = {
            name: value
            for name, value in batch.arguments().items()
            if name not in ("out", "scratch", "top_k")
        }
        write_logits(**arguments, logits=logits, first_token=1, block_tokens=3, top_k=1, max_len=384)
        assert logits[0].isnan().all(), "a query that sees top_k positions was scored"
        assert logits[2].isnan().all(), "padding was scored"
        check_logits(batch, 2, logits[1])
        write_logits(**arguments, logits=logits, first_token=0, block_tokens=1, top_k=0, max_len=300)
        check_logits(batch, 0, logits[0], max_len=300)


def check_logits(batch: Batch, token: int, logits: Tensor, max_len: int = 384) -> None:
    num_seen = min(int(batch.query_positions[token]) + 1, max_len)
    one = slice(token, token + 1)
    keys = batch.keys(batch.rows[token], num_seen)
    expected = index_logits(batch.query(token), batch.weights[one], keys)[0]
    torch.testing.assert_close(logits[:num_seen], expected, rtol=1e-5, atol=1e-4)
    assert logits[num_seen:].isnan().all(), "positions that the query does not see were written"


@interprets_loops
def test_interpreted_logits() -> None:
    interpreted(interpret_cases)


def compile_logits_kernel() -> None:
    """Print, as JSON by key type, the compiled kernel of 64 heads and 128 dimensions on Hopper."""
    from hisparse_pd.kernels.triton_indexer import TUNING, _logits_kernel

    result = {}
    for key_format, key_type, stride in (("fp8_e4m3", "fp8e4nv", 132), ("bfloat16", "bf16", 128)):
        pointers = {
            "q_index": "*bf16", "weights": "*fp32", "keys": f"*{key_type}", "scales": "*fp32",
            "page_table": "*i32", "req_rows": "*i64", "query_positions": "*i64", "num_real": "*i32",
            "logits": "*fp32",
        }  # fmt: skip
        constants = {
            "KEY_STRIDE": stride, "SCALE_STRIDE": 33, "PAGE_SIZE": 64, "NUM_HEADS": 64, "BLOCK_HEADS": 64,
            "HEAD_DIM": 128, "BLOCK_DIM": 128, "QUERIES": 1, "TILE": TUNING[key_format].tile,
            "IS_FLOAT32": False, "IS_FP8": key_format == "fp8_e4m3", "FP8_MAX": FP8_MAX, "MIN_TILES": 4,
            "OVERLAPS": True, "NUM_STAGES": TUNING[key_format].num_stages,
        }  # fmt: skip
        result[key_format] = compiled_for_hopper(
            _logits_kernel, pointers | {"score_scale": "fp32"}, constants, [*pointers, "logits_stride"],
            num_warps=TUNING[key_format].num_warps,
        )  # fmt: skip
    print(json.dumps(result))


@needs_triton
def test_keys_reach_the_tensor_cores_without_detours(tmp_path: Path) -> None:
    """Keys are loaded by asynchronous copies as wide as their rows' alignment allows and multiplied on
    Hopper's tensor cores, fp8 keys as they are."""
    output = output_of(compile_logits_kernel, TRITON_CACHE_DIR=str(tmp_path))
    compiled = json.loads(output.splitlines()[-1])
    for key_format, width in (("fp8_e4m3", "0x4"), ("bfloat16", "0x10")):
        lines = compiled[key_format]["ptx"].splitlines()
        products = [line for line in lines if "wgmma.mma_async" in line]
        assert products, key_format
        assert all(".f32.e4m3.e4m3" in line for line in products) == (key_format == "fp8_e4m3")
        assert any("cp.async" in line and f"], {width}" in line for line in lines), key_format
        assert 2 * compiled[key_format]["shared_bytes"] <= 227 << 10, "two programs fit a multiprocessor"


def test_short_rows_leave_room_for_more_queries() -> None:
    scratch = IndexerScratch.create(3, 130, "cpu")
    assert scratch.logits.shape == (3, 192)
    for max_len, shape, num_tokens in (
        (200, (3, 192), [3, 3, 3, 1]),
        (128, (4, 128), [4, 4, 2]),
        (1, (9, 64), [9, 1]),
    ):
        blocks = list(scratch.blocks(10, max_len))
        assert {logits.shape for logits, _ in blocks} == {shape}
        assert {logits.data_ptr() for logits, _ in blocks} == {scratch.logits.data_ptr()}
        assert [block["block_tokens"] for _, block in blocks] == num_tokens
        assert [block["first_token"] for _, block in blocks] == [0, *accumulate(num_tokens[:-1])]
        assert {block["max_len"] for _, block in blocks} == {min(max_len, 130)}
