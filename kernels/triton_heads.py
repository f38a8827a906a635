# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``latent_queries`` and ``lift_values`` of ``kernels.latents`` on a GPU for few tokens, and
``index_queries`` for any number, each in one launch.

``kernels.latents`` calls the three functions ``..._triton``. Inputs with the dimension ``parts`` are sums of
as many tensors, which are added up as they are read (``sum_parts``). Each head's matrix is the wide operand
of the tensor cores, and the tokens are the narrow one. In the kernels ``m`` are tokens, ``n`` columns of the
result and ``k`` the dimension that is summed over.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from hisparse_pd.kernels.block_fp8 import BLOCK, SMALLEST_PEAK
from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.fp8_rows import Activations, Rounded, Rounding
from hisparse_pd.kernels.latent_vectors import IndexVectors, Rotation
from hisparse_pd.kernels.triton_fp8 import round_blocks, sum_parts
from hisparse_pd.kernels.triton_latents import rotated
from hisparse_pd.kernels.triton_launch import begin, launch_options, prefetch

TILE_TOKENS = (16, 32, 64)
"""Tokens of a program; 16 is the tensor cores' smallest width."""
ROWS_OF_ROPE = 16
ROWS_OF_INDEX = 64
"""Vectors that a program rotates, of queries and of index queries; each belongs to one token and one head."""


def tile_of(num_tokens: int) -> int:
    """Return the smallest tile that holds all tokens, or the largest tile."""
    return next((tile for tile in TILE_TOKENS if tile >= num_tokens), TILE_TOKENS[-1])


def latent_queries_triton(
    q: Tensor, key_up: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, num_warps: int = 4
) -> None:
    """Compute latent queries of ``q`` [parts, num_tokens, heads, nope + rope] into ``out`` [num_tokens,
    heads, latent + rope].

    ``key_up``: [heads, nope, latent], contiguous; ``cos``, ``sin``: float32 [num_tokens, rope / 2].
    """
    parts, num_tokens = q.shape[:2]
    heads, nope, latent = key_up.shape
    rope = out.shape[2] - latent
    tile = tile_of(num_tokens)
    blocks = triton.cdiv(latent, BLOCK)
    rope_programs = triton.cdiv(heads * min(tile, num_tokens), ROWS_OF_ROPE)
    with torch.cuda.device_of(q):
        latent_queries_kernel[(heads * blocks + rope_programs, triton.cdiv(num_tokens, tile))](
            q,
            key_up,
            cos,
            sin,
            out,
            num_tokens,
            *q.stride()[:3],
            cos.stride(0),
            sin.stride(0),
            HEADS=heads,
            NOPE=nope,
            LATENT=latent,
            ROPE=rope,
            PARTS=parts,
            TILE=tile,
            BLOCK=BLOCK,
            BLOCK_HALF=triton.next_power_of_2(rope // 2),
            BLOCK_NOPE=triton.next_power_of_2(nope),
            ROWS=ROWS_OF_ROPE,
            num_warps=num_warps,
            **launch_options(q.device),
        )


@triton.jit(do_not_specialize=["num_tokens"])
def latent_queries_kernel(
    q,
    key_up,
    cos,
    sin,
    out,
    num_tokens,
    q_part,
    q_stride,
    q_head_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute BLOCK columns of a head's latent query; the programs from ``HEADS * blocks`` on rotate some
    rotary parts instead."""
    blocks: tl.constexpr = (LATENT + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    first_token = tl.program_id(1) * TILE
    if program < HEADS * blocks:
        head = program // blocks
        n = program % blocks * BLOCK + tl.arange(0, BLOCK)
        m = first_token + tl.arange(0, TILE)
        is_m = m < num_tokens
        matrix = key_up + head * NOPE * LATENT + n[None, :]
        k = tl.arange(0, BLOCK_NOPE)[:, None]
        is_k = k < NOPE
        weights = tl.load(matrix + k * LATENT, mask=is_k & (n < LATENT)[None, :], other=0.0)
        begin(OVERLAPS)
        token_rows = q + m.to(tl.int64)[None, :] * q_stride + head * q_head_stride
        tokens = sum_parts(token_rows, q_part, k, is_k & is_m[None, :], PARTS)
        total = tl.dot(weights.T, tokens.to(weights.dtype))
        target = out + (m.to(tl.int64)[None, :] * HEADS + head) * (LATENT + ROPE) + n[:, None]
        tl.store(target, total, mask=is_m[None, :] & (n < LATENT)[:, None])
    else:
        begin(OVERLAPS)
        first_row = (program - HEADS * blocks) * ROWS
        rotary_part(
            q, cos, sin, out, first_row, first_token, num_tokens,
            q_part, q_stride, q_head_stride, cos_stride, sin_stride,
            HEADS, NOPE, LATENT, ROPE, PARTS, TILE, BLOCK_HALF, ROWS,
        )  # fmt: skip


@triton.jit
def rotary_part(
    q, cos, sin, out, first_row, first_token, num_tokens,
    q_part, q_stride, q_head_stride, cos_stride, sin_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate ROWS rotary parts of a tile of tokens, from ``first_row`` on; a row is one head of one token."""
    row = first_row + tl.arange(0, ROWS)
    m = (first_token + row // HEADS).to(tl.int64)
    head = row % HEADS
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_here = ((m < num_tokens) & (row < TILE * HEADS))[:, None] & (pair < ROPE // 2)
    c = tl.load(cos + m[:, None] * cos_stride + pair, mask=is_here, other=0.0)
    s = tl.load(sin + m[:, None] * sin_stride + pair, mask=is_here, other=0.0)
    source = q + (m * q_stride + head * q_head_stride + NOPE)[:, None]
    dtype: tl.constexpr = out.dtype.element_ty
    # True: queries pair neighbours (``IS_INTERLEAVED``) in all models.
    first, second = rotated(source, q_part, c, s, is_here, pair, ROPE // 2, PARTS, True, dtype)
    target = out + ((m * HEADS + head) * (LATENT + ROPE) + LATENT)[:, None] + pair
    tl.store(target, first, mask=is_here)
    tl.store(target + ROPE // 2, second, mask=is_here)


def lift_values_triton(
    attended: Tensor,
    value_up: Tensor,
    gate: Tensor | None,
    rounding: Rounding | None,
    *,
    block_latent: int = 64,
    num_warps: int = 4,
    num_stages: int = 5,
) -> Activations:
    """See ``kernels.latents.lift_values``. With ``rounding``, a head's values must be whole blocks of BLOCK
    columns. Rows are not padded."""
    num_tokens = attended.shape[0]
    heads, latent, value_dim = value_up.shape
    columns, device = heads * value_dim, attended.device
    if rounding is None:
        # The kernel takes no None: ``out`` stands for the scales, which it then does not write.
        out = scales = torch.empty((num_tokens, columns), dtype=attended.dtype, device=device)
        result = Activations(out)
    else:
        out, scales = rounded = Rounded.empty(num_tokens, columns, device)
        result = Activations(attended.new_empty((num_tokens, 0)), rounded)
    if num_tokens == 0:
        return result
    tile = tile_of(num_tokens)
    grid = (heads * triton.cdiv(value_dim, BLOCK), triton.cdiv(num_tokens, tile))
    with torch.cuda.device_of(attended):
        lift_values_kernel[grid](
            attended,
            value_up,
            attended if gate is None else gate,
            out,
            scales,
            num_tokens,
            attended.stride(0),
            attended.stride(1),
            *((0, 0, 0) if gate is None else gate.stride()[:3]),
            GATE_PARTS=0 if gate is None else len(gate),
            HEADS=heads,
            LATENT=latent,
            VALUE_DIM=value_dim,
            ROUNDS=rounding is not None,
            UE8M0=rounding is not None and rounding.ue8m0,
            TILE=tile,
            BLOCK=BLOCK,
            BLOCK_LATENT=block_latent,
            BLOCK_ALL=triton.next_power_of_2(latent),
            LARGEST=FP8_MAX,
            SMALLEST_PEAK=SMALLEST_PEAK,
            num_warps=num_warps,
            num_stages=num_stages,
            **launch_options(device),
        )
    return result


@triton.jit(do_not_specialize=["num_tokens"])
def lift_values_kernel(
    attended,
    value_up,
    gate,
    out,
    scales,
    num_tokens,
    token_stride,
    head_stride,
    gate_part,
    gate_stride,
    gate_head_stride,
    GATE_PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROUNDS: tl.constexpr,
    UE8M0: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_PEAK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute BLOCK values of a head for a tile of tokens. ``GATE_PARTS``: parts of the gate; 0 for none."""
    blocks: tl.constexpr = (VALUE_DIM + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    is_n = n < VALUE_DIM
    m = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_m = m < num_tokens
    k = tl.arange(0, BLOCK_LATENT)
    matrix = value_up + head * LATENT * VALUE_DIM + tl.program_id(0) % blocks * BLOCK
    # The BLOCK columns of a row are two cache lines of 64 bfloat16 numbers.
    all_rows = tl.minimum(tl.arange(0, BLOCK_ALL), LATENT - 1)
    prefetch(matrix + tl.arange(0, 2)[None, :] * 64 + all_rows[:, None] * VALUE_DIM, OVERLAPS)
    begin(OVERLAPS)
    head_columns = value_up + head * LATENT * VALUE_DIM + n[None, :]
    token_rows = attended + m.to(tl.int64)[None, :] * token_stride + head * head_stride
    total = tl.zeros((BLOCK, TILE), dtype=tl.float32)
    for start in range(0, LATENT, BLOCK_LATENT):
        column = start + k
        is_k = column < LATENT
        is_weight = is_k[:, None] & is_n[None, :]
        weights = tl.load(head_columns + column[:, None] * VALUE_DIM, mask=is_weight, other=0.0)
        tokens = tl.load(token_rows + column[:, None], mask=is_k[:, None] & is_m[None, :], other=0.0)
        total += tl.dot(weights.T, tokens)
    dtype: tl.constexpr = attended.dtype.element_ty
    result = total.to(dtype)
    if GATE_PARTS > 0:
        gate_rows = gate + m.to(tl.int64)[None, :] * gate_stride + head * gate_head_stride
        is_gate = is_m[None, :] & is_n[:, None]
        logits = sum_parts(gate_rows, gate_part, n[:, None], is_gate, GATE_PARTS).to(dtype).to(tl.float32)
        # These are the bits of torch's sigmoid, which computes many tokens.
        sigmoid = tl.div_rn(1.0, 1.0 + libdevice.exp(-logits))
        result = (result.to(tl.float32) * sigmoid).to(dtype)
    target = out + m.to(tl.int64)[None, :] * (HEADS * VALUE_DIM) + head * VALUE_DIM + n[:, None]
    if ROUNDS:
        rounded, scale = round_blocks(result.to(tl.float32), 0, LARGEST, SMALLEST_PEAK, UE8M0)
        tl.store(target, rounded, mask=is_m[None, :] & is_n[:, None])
        # The block's row of scales is the program's first number: blocks of all heads lie side by side.
        one_row = tl.arange(0, 1)[:, None]  # makes the addresses two-dimensional, as the scales are
        tl.store(scales + tl.program_id(0) * num_tokens + m[None, :] + one_row, scale, mask=is_m[None, :])
    else:
        tl.store(target, result, mask=is_m[None, :] & is_n[:, None])


def index_queries_triton(
    queries: Tensor, dim: int, vectors: IndexVectors, rotation: Rotation, dtype: torch.dtype
) -> Tensor:
    """See ``kernels.latents.index_queries``."""
    parts, num_tokens, size = queries.shape
    heads = size // dim
    (cos, sin), hadamard = rotation, vectors.hadamard
    half = cos.shape[1]
    out = torch.empty((num_tokens, heads, dim), dtype=dtype, device=queries.device)
    if num_tokens:
        with torch.cuda.device_of(queries):
            index_queries_kernel[(triton.cdiv(num_tokens * heads, ROWS_OF_INDEX),)](
                queries,
                cos,
                sin,
                out if hadamard is None else hadamard,
                out,
                num_tokens,
                queries.stride(0),
                queries.stride(1),
                cos.stride(0),
                sin.stride(0),
                HEADS=heads,
                DIM=dim,
                HALF=half,
                PARTS=parts,
                IS_INTERLEAVED=vectors.is_interleaved,
                HAS_HADAMARD=hadamard is not None,
                ROWS=ROWS_OF_INDEX,
                BLOCK_HALF=triton.next_power_of_2(max(16, half)),
                BLOCK_REST=triton.next_power_of_2(max(16, dim - 2 * half)),
                BLOCK_DIM=triton.next_power_of_2(dim),
                num_warps=4,
                **launch_options(queries.device),
            )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def index_queries_kernel(
    queries,
    cos,
    sin,
    hadamard,
    out,
    num_tokens,
    part_stride,
    token_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_HADAMARD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Rotate ROWS vectors, each of one token and one head, by their positions and by the Hadamard matrix.

    The product with the Hadamard matrix is made in three pieces, because the rotary halves and the rest of a
    vector are separate tensors.
    """
    begin(OVERLAPS)
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m = row // HEADS
    is_row = (m < num_tokens)[:, None]
    source = queries + (m * token_stride + row % HEADS * DIM)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = is_row & (pair < HALF)
    c = tl.load(cos + m[:, None] * cos_stride + pair, mask=is_pair, other=0.0)
    s = tl.load(sin + m[:, None] * sin_stride + pair, mask=is_pair, other=0.0)
    first, second = rotated(source, part_stride, c, s, is_pair, pair, HALF, PARTS, IS_INTERLEAVED, dtype)
    rest = tl.arange(0, BLOCK_REST)[None, :]
    is_rest = is_row & (rest < DIM - 2 * HALF)
    others = sum_parts(source, part_stride, 2 * HALF + rest, is_rest, PARTS).to(dtype)
    target = out + row[:, None] * DIM
    if HAS_HADAMARD:
        n = tl.arange(0, BLOCK_DIM)[None, :]
        k = tl.arange(0, BLOCK_HALF)[:, None]
        r = tl.arange(0, BLOCK_REST)[:, None]
        is_n = n < DIM
        first_rows = tl.load(hadamard + k * DIM + n, mask=(k < HALF) & is_n, other=0.0)
        second_rows = tl.load(hadamard + (HALF + k) * DIM + n, mask=(k < HALF) & is_n, other=0.0)
        last_rows = tl.load(hadamard + (2 * HALF + r) * DIM + n, mask=(r < DIM - 2 * HALF) & is_n, other=0.0)
        total = tl.dot(first, first_rows, input_precision="ieee")
        total = tl.dot(second, second_rows, total, input_precision="ieee")
        total = tl.dot(others, last_rows, total, input_precision="ieee")
        tl.store(target + n, total, mask=is_row & is_n)
    else:
        tl.store(target + pair, first, mask=is_pair)
        tl.store(target + HALF + pair, second, mask=is_pair)
        tl.store(target + 2 * HALF + rest, others, mask=is_rest)
