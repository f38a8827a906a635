"""The CUDA code of swap-in, top-k, logits and experts compiles for every architecture that it is for, also on
machines without a GPU, and reads its parameters at the offsets at which the host writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse_pd.kernels import (
    cuda,
    cuda_params,
    index_logits,
    int4_experts,
    paged_logits,
    prompt_logits,
    topk,
)
from hisparse_pd.kernels.cuda_launch import translation_unit
from hisparse_pd.kernels.int4 import Int4Form
from tests.unit.kernels.cuda_here import ARCHITECTURES, EACH_ARCHITECTURE, compile_cuda, layout_checks

ENTRIES = {
    "swap_in",
    "copy_planned",
    "check_dense_row",
    "check_pages",
    "check_rows",
    "fill_row",
    "backup_newest",
    "newest_slots",
}
PARAMETERS = {
    "SwapInParams": cuda_params.SWAP_IN,
    "CopyParams": cuda_params.COPY,
    "FillParams": cuda_params.FILL,
    "BackupParams": cuda_params.BACKUP,
    "NewestSlotsParams": cuda_params.NEWEST_SLOTS,
    "CheckDenseRowParams": cuda_params.CHECK_DENSE_ROW,
    "CheckPagesParams": cuda_params.CHECK_PAGES,
    "CheckRowsParams": cuda_params.CHECK_ROWS,
    "RowChecks": cuda_params.CHECKS,
    "Pool": cuda_params.POOL,
    "Tables": cuda_params.TABLES,
    "Requests": cuda_params.REQUESTS,
    "Plan": cuda_params.PLAN,
}
VARIANTS = [
    *((1, True, 64, 1), (2, True, 1, 1), (4, False, 48, 2), (2, True, 64, 8)),
    *((8, False, 48, 2), (32, True, 64, 8)),
]
"""Positions of a thread, only wide items, page size, most new positions."""
NUM_HEADS = [pytest.param(index_logits.NUM_HEADS[0], marks=pytest.mark.slow), *index_logits.NUM_HEADS[1:]]
SAMPLE = (ARCHITECTURES[0], VARIANTS[0])
"""The default run: the oldest architecture. The last variants take the longest."""


@pytest.mark.parametrize(
    ("arch", "variant"),
    [
        SAMPLE,
        *(
            pytest.param(arch, variant, marks=pytest.mark.slow)
            for arch in ARCHITECTURES
            for variant in (VARIANTS[0], VARIANTS[-1])
            if (arch, variant) != SAMPLE
        ),
    ],
)
def test_compiles(arch: int, variant: tuple[int, bool, int, int], tmp_path: Path) -> None:
    compile_cuda(
        cuda.source() + layout_checks(PARAMETERS),
        arch,
        cuda.compile_options(*variant),
        tmp_path,
        ENTRIES,
    )


@pytest.mark.parametrize(
    "num_threads", [topk.NUM_THREADS, pytest.param(topk.NUM_THREADS_OF_MANY, marks=pytest.mark.slow)]
)
@EACH_ARCHITECTURE
def test_top_k_compiles(arch: int, num_threads: int, tmp_path: Path) -> None:
    source = topk.source() + layout_checks({"TopkParams": topk.PARAMS})
    source += f"static_assert(NUM_THREADS == {num_threads});\n"
    source += f"static_assert(MAX_RANKS == {max(topk.CLUSTER_SIZES)});\n"
    source += f"static_assert(MIN_SHARED_LEN == {topk.MIN_SHARED_LEN});\n"
    log = compile_cuda(source, arch, topk.compile_options(num_threads), tmp_path, {"topk"})
    if log is not None:
        assert int(re.findall(r"Used (\d+) registers", log)[0]) <= 64, "1024 threads share 65536 registers"
        assert " 0 bytes spill stores" in log


def logits_source(module: Any) -> str:
    """Return the unit of one of the kernels of the indexer's logits, checked against its host side."""
    source = translation_unit(f"{module.NAME}.cu") + layout_checks({"LogitsParams": index_logits.PARAMS})
    source += f"static_assert(NUM_THREADS == {module.NUM_THREADS});\n"
    source += f"static_assert(TILE_BYTES == {index_logits.TILE_BYTES});\n"
    return source + f"static_assert(SWIZZLE == {index_logits.ALIGNMENT});\n"


@pytest.mark.parametrize("num_heads", NUM_HEADS)
def test_logits_of_prompts_compile_for_hopper(num_heads: int, tmp_path: Path) -> None:
    source = logits_source(prompt_logits)
    source += f"static_assert(QUERIES_OF_BLOCK * NUM_HEADS == {prompt_logits.COLUMNS});\n"
    options = prompt_logits.compile_options(num_heads, 64)
    log = compile_cuda(source, "90a", options, tmp_path, {"prompt_logits"})
    if log is not None:
        assert " 0 bytes spill stores" in log
        assert "serialized" not in log, "the tensor cores would wait for each product"
        assert "setmaxnreg" not in log, "warps would keep the registers that they begin with"
        static = int(re.findall(r"(\d+) bytes smem", log)[0])
        assert static + prompt_logits.SHARED_BYTES <= 227 << 10


def test_splits_of_prompts_fill_the_gpu() -> None:
    choose = prompt_logits.choose_num_splits
    assert choose(20 * 132, 2048, 132) == 1, "many groups need no splits"
    assert 120 <= choose(1, 4096, 132) <= 132, "all multiprocessors score one group"
    assert choose(3, 47, 132) * 3 <= 132
    assert choose(1, 1, 132) == 1
    # 133 groups would run twice as long as 132 if they were not split.
    num_splits = choose(133, 1000, 132)
    assert 1 < num_splits <= prompt_logits.MAX_SPLITS
    assert -(-133 * num_splits // 132) / num_splits < 1.2


@pytest.mark.parametrize("num_heads", NUM_HEADS)
def test_logits_compile_for_hopper(num_heads: int, tmp_path: Path) -> None:
    options = paged_logits.compile_options(num_heads, 64)
    log = compile_cuda(logits_source(paged_logits), "90a", options, tmp_path, {"paged_logits"})
    if log is not None:
        assert " 0 bytes spill stores" in log
        assert "serialized" not in log, "the tensor cores would wait for each product"
        resident = paged_logits.BLOCKS_PER_SM
        registers = int(re.findall(r"Used (\d+) registers", log)[0])
        assert resident * paged_logits.NUM_THREADS * (-(-registers // 8) * 8) <= 65536
        assert "bytes smem" not in log, "queries lie where dynamic shared memory begins"
        assert resident * (1024 + paged_logits.shared_bytes(num_heads)) <= 228 << 10


INT4_VARIANTS = [
    (16, 1, Int4Form(128, has_zeros=True), False, 16),
    *(
        (tile_rows, teams, Int4Form(128, has_zeros=False), False, 16)
        for tile_rows, teams in int4_experts.TEAMS.items()
    ),
    (128, 2, Int4Form(32, has_zeros=True, scale_dtype=torch.float32), True, 4),
    (64, 4, Int4Form(64, has_zeros=False, scale_dtype=torch.float16), True, 16),
]
"""Rows of a tile, teams, form, whether activations are in fp8, bytes of scales that a thread copies."""
MOST_SHARED_BYTES = 227 << 10


@pytest.mark.parametrize(
    "variant", [INT4_VARIANTS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in INT4_VARIANTS[1:])]
)
def test_experts_compile_for_hopper(variant: tuple[int, int, Int4Form, bool, int], tmp_path: Path) -> None:
    tile_rows, teams, form, is_rounded, _ = variant
    source = int4_experts.source() + layout_checks({"Int4Params": int4_experts.PARAMS})
    source += f"static_assert(NUM_THREADS == {(teams + 1) * int4_experts.TEAM_THREADS});\n"
    source += f"static_assert(STAGE_COLUMNS == {int4_experts.STAGE_COLUMNS});\n"
    options = int4_experts.compile_options(*variant, MOST_SHARED_BYTES)
    log = compile_cuda(source, "90a", options, tmp_path, {"int4_experts"})
    if log is not None:
        assert "serialized" not in log, "the tensor cores would wait for each product"
        static = int(re.findall(r"(\d+) bytes smem", log)[0])
        assert static <= int4_experts.STATIC_BYTES
        dynamic = int4_experts.shared_bytes(tile_rows, teams, form, is_rounded, MOST_SHARED_BYTES)
        resident = int4_experts.FEW_BLOCKS_PER_SM if teams == int4_experts.FEW_TEAMS else 1
        assert resident * (1024 + static + dynamic) <= 228 << 10
        registers = int(re.findall(r"Used (\d+) registers", log)[0])
        assert resident * (teams + 1) * int4_experts.TEAM_THREADS * (-(-registers // 8) * 8) <= 65536


def test_source_is_one_unit() -> None:
    for source, struct in (
        (cuda.source(), "struct SwapInParams"),
        (topk.source(), "struct TopkParams"),
        (translation_unit("paged_logits.cu"), "struct LogitsParams"),
        (translation_unit("prompt_logits.cu"), "struct LogitsParams"),
        (int4_experts.source(), "struct Int4Params"),
    ):
        assert '#include "' not in source
        assert source.count(struct) == 1
