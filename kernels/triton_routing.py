# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""The choice of experts on a GPU, in one launch each: the router's logits (``narrow_parts``), the choice
(``choose_triton``) and ``Routing.plan`` (``plan_triton``).

They are called in this order in every layer with experts, through ``kernels.expert_choice`` and
``kernels.expert_routing``. Each function is followed by its kernel.

A kernel may start while the preceding one still runs (``kernels.triton_launch``). Before ``begin`` it
therefore reads only weights, which no kernel writes.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.routing_tables import RoutingTables
from hisparse_pd.kernels.triton_fp8 import sum_parts
from hisparse_pd.kernels.triton_launch import begin, launch_options, prefetch

PART_BYTES: Final = 1024
"""Bytes of a matrix's row in one part of ``narrow_parts``; half of it for rows of at most FEW_PARTS parts."""
FEW_PARTS: Final = 8
FEW_TOKENS: Final = 2048
"""Up to this many tokens, each part has its own program; the parts of more would need too much memory."""
STEP_BYTES: Final = 256
"""Bytes of a matrix's row that a program multiplies at a time."""
LINE_BYTES: Final = 128
"""Bytes of a line of the L2 cache."""
TILES: Final = ((16, 32), (32, 32), (64, 32))
"""(tokens, outputs) of a program: the first pair whose tokens are enough for the batch; see ``_tiles``."""
CHUNK_ROWS: Final = 8
"""Rows that a program of ``plan_triton`` sorts."""


def narrow_parts(x: Tensor, matrix: Tensor) -> Tensor:
    """Return parts whose sum is ``x @ matrix.T``, float32 [parts, num_tokens, outputs], for ``choose_kernel``
    to add up; see ``kernels.expert_choice.narrow_product``.

    A part is the product of some columns, the same ones for any number of tokens, so that a row's bits depend
    on the row alone. For more than FEW_TOKENS tokens, a program adds up all parts in the same order, and
    returns one.
    """
    num_tokens, columns = x.shape
    outputs = matrix.shape[0]
    row_bytes = columns * matrix.itemsize
    part_bytes = PART_BYTES if row_bytes > FEW_PARTS * PART_BYTES else PART_BYTES // 2
    part, parts = part_bytes // matrix.itemsize, triton.cdiv(row_bytes, part_bytes)
    programs = parts if num_tokens <= FEW_TOKENS else 1
    out = torch.empty((programs, num_tokens, outputs), dtype=torch.float32, device=x.device)
    tile, block_outputs, stages = _tiles(num_tokens, outputs, matrix.dtype)
    if num_tokens:
        with torch.cuda.device_of(x):
            narrow_kernel[(triton.cdiv(outputs, block_outputs), programs, triton.cdiv(num_tokens, tile))](
                x,
                matrix,
                out,
                num_tokens,
                x.stride(0),
                OUTPUTS=outputs,
                COLUMNS=columns,
                PART=part,
                PARTS_PER_PROGRAM=parts // programs,
                STEP=STEP_BYTES // matrix.itemsize,
                LINE=LINE_BYTES // matrix.itemsize,
                TILE=tile,
                BLOCK_OUTPUTS=block_outputs,
                num_warps=4,
                num_stages=stages,
                **launch_options(x.device),
            )
    return out


def _tiles(num_tokens: int, outputs: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the tokens and outputs of a program, and the stages of its pipeline. No bit depends on them."""
    for tile, block_outputs in TILES:
        if num_tokens <= tile:
            return tile, block_outputs, 1
    if outputs > 64:
        return 128, 64, 1
    return 64, 64, 3 if dtype == torch.float32 else 1  # three stages of bfloat16 exceed shared memory


@triton.jit(do_not_specialize=["num_tokens"])
def narrow_kernel(
    x,
    matrix,
    out,
    num_tokens,
    x_stride,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PARTS_PER_PROGRAM: tl.constexpr,
    STEP: tl.constexpr,
    LINE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute some outputs of a tile of tokens from one part of the columns, or the sum of all parts.

    With bfloat16 tokens, a float32 matrix is split into three bfloat16 matrices whose sum it equals exactly,
    so that the products use tensor cores. The smallest terms are added first.
    """
    n = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    part = tl.program_id(1)
    is_n = (n < OUTPUTS)[:, None]
    matrix_rows = matrix + n[:, None] * COLUMNS
    if OVERLAPS:
        line = part * PART + tl.arange(0, PART // LINE) * LINE
        prefetch(matrix_rows + tl.minimum(line, COLUMNS - 1)[None, :], OVERLAPS)
    begin(OVERLAPS)
    m = tl.program_id(2) * TILE + tl.arange(0, TILE)
    is_token = (m < num_tokens)[None, :]
    token_rows = x + m.to(tl.int64)[None, :] * x_stride
    whole = tl.zeros((BLOCK_OUTPUTS, TILE), dtype=tl.float32)
    for number in range(PARTS_PER_PROGRAM):
        first = (part * PARTS_PER_PROGRAM + number) * PART
        total = tl.zeros((BLOCK_OUTPUTS, TILE), dtype=tl.float32)
        for start in tl.static_range(0, PART, STEP):
            k = first + start + tl.arange(0, STEP)
            weights = tl.load(matrix_rows + k[None, :], mask=is_n & (k < COLUMNS)[None, :], other=0.0)
            tokens = tl.load(token_rows + k[:, None], mask=is_token & (k < COLUMNS)[:, None], other=0.0)
            if weights.dtype == tokens.dtype:
                total = tl.dot(weights, tokens, total, input_precision="ieee")
            elif tokens.dtype == tl.float32:
                total = tl.dot(weights.to(tl.float32), tokens, total, input_precision="ieee")
            else:
                high = weights.to(tokens.dtype)
                rest = weights - high.to(tl.float32)
                middle = rest.to(tokens.dtype)
                low = (rest - middle.to(tl.float32)).to(tokens.dtype)
                total = tl.dot(high, tokens, tl.dot(middle, tokens, tl.dot(low, tokens, total)))
        whole += total
    target = out + (part * num_tokens + m)[None, :] * OUTPUTS + n[:, None]
    tl.store(target, whole, mask=is_token & (n < OUTPUTS)[:, None])


def choose_triton(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    *,
    num_groups: int,
    num_chosen_groups: int,
    normalizes: bool,
    scale: float,
    score_outside: float,
    is_softmax: bool = False,
    has_shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """See ``kernels.expert_choice.ExpertChoice``; the best expert comes first."""
    parts, num_tokens, num_experts = logits.shape
    shape = num_tokens, top_k + has_shared
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    if num_tokens:
        size = num_experts // num_groups
        with torch.cuda.device_of(logits):
            choose_kernel[(num_tokens,)](
                logits,
                bias,
                weights,
                ids,
                logits.stride(0),
                scale,
                score_outside,
                EXPERTS=num_experts,
                PARTS=parts,
                TOP_K=top_k,
                HAS_SHARED=has_shared,
                GROUP=size,
                GROUPS=num_groups,
                CHOSEN_GROUPS=num_chosen_groups,
                NORMALIZES=normalizes,
                IS_SOFTMAX=is_softmax,
                BLOCK_GROUP=triton.next_power_of_2(size),
                BLOCK_GROUPS=triton.next_power_of_2(num_groups),
                BLOCK_K=triton.next_power_of_2(top_k + has_shared),
                num_warps=1,
                **launch_options(logits.device),
            )
    return weights, ids


NO_KEY: tl.constexpr = tl.constexpr(-(2**63))
"""A key below all of ``order_key``."""


@triton.jit
def order_key(number, index):
    """Return int64 keys that order as ``number``, with NaN above all; among equal numbers the lowest
    ``index`` is the largest."""
    number = tl.where(number == 0.0, 0.0, number).to(tl.float32)  # -0.0 equals 0.0
    bits = number.to(tl.int32, bitcast=True)
    bits = tl.where(number == number, bits, 0x7FFFFFFF)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def choose_kernel(
    logits,
    bias,
    weights,
    ids,
    part_stride,
    scale,
    score_outside,
    EXPERTS: tl.constexpr,
    PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    NORMALIZES: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Choose the experts of one token. Whatever the logits are, the ids are distinct experts.

    Stages: scores; keys that order experts by score plus bias; the choice of groups, after which experts of
    other groups get keys of ``score_outside``; the TOP_K largest keys, one after the other; weights.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    within = tl.arange(0, BLOCK_GROUP)[None, :]
    expert = group[:, None] * GROUP + within
    is_expert = (group < GROUPS)[:, None] & (within < GROUP)
    offset = tl.load(bias + expert, mask=is_expert, other=0.0).to(tl.float32)
    begin(OVERLAPS)

    logit = sum_parts(logits + token * EXPERTS, part_stride, expert, is_expert, PARTS)
    if IS_SOFTMAX:
        largest_logit = tl.max(tl.max(tl.where(is_expert, logit, float("-inf")), axis=1), axis=0)
        power = tl.where(is_expert, tl.exp(logit - largest_logit), 0.0)
        score = power / tl.sum(tl.sum(power, axis=1), axis=0)
    else:
        score = 1.0 / (1.0 + tl.exp(-logit))

    choice = score + offset
    key = tl.where(is_expert, order_key(choice, expert), NO_KEY)

    if CHOSEN_GROUPS < GROUPS:
        best = tl.max(key, axis=1)
        second = tl.max(tl.where(key == best[:, None], NO_KEY, key), axis=1)
        first_choice = tl.sum(tl.where(key == best[:, None], choice, 0.0), axis=1)
        second_choice = tl.sum(tl.where(key == second[:, None], choice, 0.0), axis=1)
        group_key = tl.where(group < GROUPS, order_key(first_choice + second_choice, group), NO_KEY)
        is_open = group < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            largest = tl.max(group_key, axis=0)
            is_open = is_open | (group_key == largest)
            group_key = tl.where(group_key == largest, NO_KEY, group_key)
        outside = tl.where(is_expert, order_key(score_outside, expert), NO_KEY)
        key = tl.where(is_open[:, None], key, outside)

    k = tl.arange(0, BLOCK_K)
    chosen_ids = tl.zeros((BLOCK_K,), dtype=tl.int32)
    chosen_scores = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for number in tl.static_range(TOP_K):
        largest = tl.max(tl.max(key, axis=1), axis=0)
        value = tl.sum(tl.sum(tl.where(key == largest, score, 0.0), axis=1), axis=0)
        chosen_ids = tl.where(k == number, 0x7FFFFFFF - (largest & 0x7FFFFFFF).to(tl.int32), chosen_ids)
        chosen_scores = tl.where(k == number, value, chosen_scores)
        key = tl.where(key == largest, NO_KEY, key)

    if NORMALIZES:
        chosen_scores = tl.div_rn(chosen_scores, tl.sum(chosen_scores, axis=0) + 1e-20)
    chosen_scores = chosen_scores * scale
    if HAS_SHARED:  # as one more expert behind the routed ones
        chosen_ids = tl.where(k == TOP_K, EXPERTS, chosen_ids)
        chosen_scores = tl.where(k == TOP_K, 1.0, chosen_scores)
    num_chosen: tl.constexpr = TOP_K + 1 if HAS_SHARED else TOP_K
    at = token * num_chosen + k
    tl.store(weights + at, chosen_scores, mask=k < num_chosen)
    tl.store(ids + at, chosen_ids.to(tl.int64), mask=k < num_chosen)


def plan_triton(expert_ids: Tensor, num_experts: int, tile_rows: int, num_tiles: int) -> RoutingTables:
    """Return where each expert's rows and tiles are; ``kernels.expert_routing`` has an example.

    ``expert_ids``: int [num_tokens, top_k], contiguous, at least one and at most FEW_ROWS of
    ``kernels.expert_routing``, because each program holds all of them. They are in [0, num_experts];
    ``num_experts`` is the id of padding, whose rows come last and have no tiles.
    ``num_tiles``: the most tiles that there can be.
    """
    num_rows = expert_ids.numel()
    device = expert_ids.device
    sizes = (num_rows, num_experts + 1, num_experts + 1, num_tiles)
    order, starts, tile_starts, tile_experts = (
        torch.empty(size, dtype=torch.int32, device=device) for size in sizes
    )
    with torch.cuda.device_of(expert_ids):
        plan_kernel[(triton.cdiv(num_rows, CHUNK_ROWS),)](
            expert_ids,
            order,
            starts,
            tile_starts,
            tile_experts,
            num_rows,
            num_tiles,
            EXPERTS=num_experts,
            TILE_ROWS=tile_rows,
            CHUNK=CHUNK_ROWS,
            BLOCK_ROWS=triton.next_power_of_2(num_rows),
            BLOCK_EXPERTS=triton.next_power_of_2(num_experts + 1),
            BLOCK_TILES=triton.next_power_of_2(num_tiles + 1),
            num_warps=4,
            **launch_options(device),
        )
    return RoutingTables(order, starts, tile_starts, tile_experts)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def plan_kernel(
    ids,
    order,
    starts,
    tile_starts,
    tile_experts,
    num_rows,
    num_tiles,
    EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sort CHUNK rows by expert: a row's place is the number of rows before it. The first program also
    computes the tables of experts and tiles."""
    begin(OVERLAPS)
    rows = tl.arange(0, BLOCK_ROWS)
    row_ids = tl.load(ids + rows, mask=rows < num_rows, other=EXPERTS + 1).to(tl.int32)
    own = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    own_ids = tl.load(ids + own, mask=own < num_rows, other=EXPERTS + 1).to(tl.int32)
    is_before = (row_ids[None, :] < own_ids[:, None]) | (
        (row_ids[None, :] == own_ids[:, None]) & (rows[None, :] < own[:, None])
    )
    place = tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(order + place, own, mask=own < num_rows)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, BLOCK_EXPERTS)
        counts = tl.histogram(tl.minimum(row_ids, BLOCK_EXPERTS - 1), BLOCK_EXPERTS)
        counts = tl.where(expert < EXPERTS, counts, 0)
        tl.store(starts + expert, tl.cumsum(counts, axis=0) - counts, mask=expert <= EXPERTS)
        tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
        ends = tl.cumsum(tiles, axis=0)
        tl.store(tile_starts + expert, ends - tiles, mask=expert <= EXPERTS)
        tile = tl.arange(0, BLOCK_TILES)
        # A tile's expert is the number of experts whose tiles all lie before it; EXPERTS behind the last.
        is_expert = expert < EXPERTS
        ended = tl.histogram(tl.minimum(ends, BLOCK_TILES - 1), BLOCK_TILES, mask=is_expert)
        tl.store(tile_experts + tile, tl.cumsum(ended, axis=0), mask=tile < num_tiles)
