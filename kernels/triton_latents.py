# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.latents.finish_latents`` on a GPU, in one launch with four programs for each token.

Inputs are in parts, which are added up in order as they are read (``sum_parts``).

The programs of a token are independent: one makes its query latent, one its KV item, one its index key, and
one its head weights. A program whose result is not wanted returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import BLOCK, SMALLEST_PEAK
from hisparse_pd.kernels.fp8 import FP8_MAX
from hisparse_pd.kernels.fp8_rows import Activations, Rounded, Rounding, padded, row_multiple
from hisparse_pd.kernels.latent_vectors import IndexVectors, LatentNorms, Latents, Rotation
from hisparse_pd.kernels.triton_fp8 import part_strides, round_blocks, sum_parts
from hisparse_pd.kernels.triton_launch import begin, launch_options


def finish_latents_triton(
    q_a: Tensor | None,
    kv_a: Tensor | None,
    norms: LatentNorms,
    rotation: Rotation,
    rounding: Rounding | None,
    index_keys: Tensor | None,
    vectors: IndexVectors | None,
    head_weights: Tensor | None,
    *,
    keeps_raw: bool = False,
) -> Latents:
    """See ``kernels.latents.finish_latents``."""
    cos, sin = rotation
    num_tokens, device, dtype = len(cos), cos.device, norms.dtype
    if q_a is None:
        rounding = None  # it is for the query latent only
    q_rank = 0 if q_a is None else q_a.shape[2]
    # Index keys are rotated too, so ``item_dim - latent`` is the rotary size also where there is no item.
    latent, item_dim = 0, 2 * cos.shape[1]
    if kv_a is not None and norms.kv_weight is not None:
        latent, item_dim = len(norms.kv_weight), kv_a.shape[2]

    # The results.
    item = torch.empty((num_tokens, item_dim), dtype=dtype, device=device)
    dense = torch.empty((num_tokens, q_rank * (1 + keeps_raw)), dtype=dtype, device=device)
    num_rows = num_tokens if rounding is None else padded(num_tokens, row_multiple(num_tokens, device))
    rounded = None if rounding is None else Rounded.empty(num_rows, q_rank, device)
    keys = weights = None
    if index_keys is not None:
        keys = torch.empty((num_tokens, index_keys.shape[2]), dtype=dtype, device=device)
    if head_weights is not None:
        weights = torch.empty(head_weights.shape[1:], dtype=torch.float32, device=device)

    # A kernel takes no None: ``item`` stands for absent tensors, and sizes of 0 say that they are absent.
    nothing = item[None]
    q_parts, kv_parts = (nothing if parts is None else parts for parts in (q_a, kv_a))
    key_parts = nothing if index_keys is None else index_keys
    head_parts = nothing if head_weights is None else head_weights
    key_weight, key_bias, key_eps = item, item, 0.0
    if vectors is not None:
        key_weight, key_bias, key_eps = vectors.key_weight, vectors.key_bias, vectors.key_eps
    hadamard = None if vectors is None else vectors.hadamard
    if num_rows:
        with torch.cuda.device_of(cos):
            finish_latents_kernel[(num_rows, 4)](
                q=q_parts,
                kv=kv_parts,
                key=key_parts,
                head=head_parts,
                q_weight=item if norms.q_weight is None else norms.q_weight,
                kv_weight=item if norms.kv_weight is None else norms.kv_weight,
                key_weight=key_weight,
                key_bias=key_bias,
                cos=cos,
                sin=sin,
                hadamard=item if hadamard is None else hadamard,
                q_out=dense,
                values=item if rounded is None else rounded.values,
                scales=item if rounded is None else rounded.scales,
                item_out=item,
                key_out=item if keys is None else keys,
                heads_out=item if weights is None else weights,
                num_tokens=num_tokens,
                num_rows=num_rows,
                **part_strides("q", q_parts),
                **part_strides("kv", kv_parts),
                **part_strides("key", key_parts),
                **part_strides("head", head_parts),
                cos_stride=cos.stride(0),
                sin_stride=sin.stride(0),
                q_eps=norms.q_eps,
                kv_eps=norms.kv_eps,
                key_eps=key_eps,
                head_scale=head_parts.shape[2] ** -0.5,
                Q_RANK=q_rank,
                LATENT=latent,
                ROPE=item_dim - latent,
                KEY_DIM=0 if keys is None else keys.shape[1],
                HEADS=0 if weights is None else weights.shape[1],
                Q_PARTS=len(q_parts),
                KV_PARTS=len(kv_parts),
                KEY_PARTS=len(key_parts),
                HEAD_PARTS=len(head_parts),
                IS_INTERLEAVED=vectors is not None and vectors.is_interleaved,
                HAS_HADAMARD=hadamard is not None,
                KEEPS_RAW=keeps_raw,
                ROUNDS=rounding is not None,
                UE8M0=rounding is not None and rounding.ue8m0,
                BLOCK=BLOCK,
                Q_BLOCKS=triton.next_power_of_2(max(triton.cdiv(q_rank, BLOCK), 1)),
                BLOCK_LATENT=triton.next_power_of_2(max(latent, 1)),
                BLOCK_HALF=triton.next_power_of_2((item_dim - latent) // 2),
                BLOCK_KEY=triton.next_power_of_2(key_parts.shape[2]),
                BLOCK_HEADS=triton.next_power_of_2(head_parts.shape[2]),
                LARGEST=FP8_MAX,
                SMALLEST_PEAK=SMALLEST_PEAK,
                num_warps=4,
                **launch_options(device),
            )
    q = None if q_a is None else Activations(dense, rounded)
    return Latents(q, None if kv_a is None else item, keys, weights)


@triton.jit
def rotated(
    source,
    part_stride,
    cos,
    sin,
    mask,
    pair,
    HALF: tl.constexpr,
    PARTS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return both halves of rotated vectors, rounded to ``dtype``. ``pair``: the numbers of the pairs;
    ``IS_INTERLEAVED``: whether a pair is two neighbours (``kernels.rope``)."""
    if IS_INTERLEAVED:
        a = sum_parts(source, part_stride, 2 * pair, mask, PARTS)
        b = sum_parts(source, part_stride, 2 * pair + 1, mask, PARTS)
    else:
        a = sum_parts(source, part_stride, pair, mask, PARTS)
        b = sum_parts(source, part_stride, HALF + pair, mask, PARTS)
    a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def finish_latents_kernel(
    q,
    kv,
    key,
    head,
    q_weight,
    kv_weight,
    key_weight,
    key_bias,
    cos,
    sin,
    hadamard,
    q_out,
    values,
    scales,
    item_out,
    key_out,
    heads_out,
    num_tokens,
    num_rows,
    q_part_stride,
    q_row_stride,
    kv_part_stride,
    kv_row_stride,
    key_part_stride,
    key_row_stride,
    head_part_stride,
    head_row_stride,
    cos_stride,
    sin_stride,
    q_eps,
    kv_eps,
    key_eps,
    head_scale,
    Q_RANK: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    Q_PARTS: tl.constexpr,
    KV_PARTS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    HEAD_PARTS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_HADAMARD: tl.constexpr,
    KEEPS_RAW: tl.constexpr,
    ROUNDS: tl.constexpr,
    UE8M0: tl.constexpr,
    BLOCK: tl.constexpr,
    Q_BLOCKS: tl.constexpr,
    BLOCK_LATENT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_PEAK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Make one of a token's four results. The program's second number says which: 0 is the query latent, 1 is
    the KV item, 2 is the index key, 3 is the head weights.

    ``q``, ``kv``, ``key``, ``head``: [parts, num_tokens, size]; results are contiguous, ``scales`` [blocks,
    num_rows]. Rows from ``num_tokens`` to ``num_rows`` are padding of the rounded query latent; they become
    zeros.
    """
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    dtype: tl.constexpr = item_out.dtype.element_ty
    if which == 0:
        if Q_RANK > 0:
            block = tl.arange(0, Q_BLOCKS)[:, None]
            at = block * BLOCK + tl.arange(0, BLOCK)[None, :]
            is_there = at < Q_RANK
            is_given = is_there & (row < num_tokens)
            source = q + row * q_row_stride
            normed = normed_row(source, q_part_stride, at, is_given, q_weight, is_there,
                                q_eps, Q_RANK, Q_PARTS, dtype)  # fmt: skip
            if ROUNDS:
                rounded, scale = round_blocks(normed.to(tl.float32), 1, LARGEST, SMALLEST_PEAK, UE8M0)
                tl.store(values + row * Q_RANK + at, rounded, mask=is_there)
                tl.store(scales + block.to(tl.int64) * num_rows + row, scale, mask=block * BLOCK < Q_RANK)
            row_size: tl.constexpr = 2 * Q_RANK if KEEPS_RAW else Q_RANK
            tl.store(q_out + row * row_size + at, normed, mask=is_given)
            if KEEPS_RAW:
                raw = sum_parts(source, q_part_stride, at, is_given, Q_PARTS)
                tl.store(q_out + row * row_size + Q_RANK + at, raw, mask=is_given)
        return
    if row >= num_tokens:
        return
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < ROPE // 2
    c = tl.load(cos + row * cos_stride + pair, mask=is_pair, other=0.0)
    s = tl.load(sin + row * sin_stride + pair, mask=is_pair, other=0.0)
    if which == 1:
        if LATENT > 0:
            at = tl.arange(0, BLOCK_LATENT)
            source = kv + row * kv_row_stride
            latent = normed_row(source, kv_part_stride, at, at < LATENT, kv_weight, at < LATENT,
                                kv_eps, LATENT, KV_PARTS, dtype)  # fmt: skip
            # True: keys pair neighbours (``IS_INTERLEAVED``) in all models.
            first, second = rotated(source + LATENT, kv_part_stride, c, s, is_pair, pair, ROPE // 2,
                                    KV_PARTS, True, dtype)  # fmt: skip
            target = item_out + row * (LATENT + ROPE)
            tl.store(target + at, latent, mask=at < LATENT)
            tl.store(target + LATENT + pair, first, mask=is_pair)
            tl.store(target + LATENT + ROPE // 2 + pair, second, mask=is_pair)
    elif which == 2:
        if KEY_DIM > 0:
            at = tl.arange(0, BLOCK_KEY)
            is_there = at < KEY_DIM
            source = key + row * key_row_stride
            x = sum_parts(source, key_part_stride, at, is_there, KEY_PARTS).to(dtype).to(tl.float32)
            mean = tl.sum(x) / KEY_DIM
            centered = tl.where(is_there, x - mean, 0.0)
            factor = tl.rsqrt(tl.sum(centered * centered) / KEY_DIM + key_eps)
            normed = centered * factor * tl.load(key_weight + at, mask=is_there, other=0.0)
            normed = (normed + tl.load(key_bias + at, mask=is_there, other=0.0)).to(dtype)
            # Rotation pairs elements that different threads have: they are exchanged through the result's own
            # memory, with barriers between writing and reading.
            target = key_out + row * KEY_DIM
            tl.store(target + at, normed, mask=is_there)
            tl.debug_barrier()
            first, second = rotated(target, 0, c, s, is_pair, pair, ROPE // 2, 1, IS_INTERLEAVED, dtype)
            tl.debug_barrier()
            tl.store(target + pair, first, mask=is_pair)
            tl.store(target + ROPE // 2 + pair, second, mask=is_pair)
            if HAS_HADAMARD:
                tl.debug_barrier()
                column = at[:, None]
                is_element = is_there[:, None] & is_there[None, :]
                matrix = tl.load(hadamard + column * KEY_DIM + at[None, :], mask=is_element, other=0.0)
                vector = tl.load(target + at, mask=is_there, other=0.0).to(tl.float32)
                product = tl.sum(vector[:, None] * matrix.to(tl.float32), axis=0)
                tl.debug_barrier()
                tl.store(target + at, product, mask=is_there)
    elif HEADS > 0:
        number = tl.arange(0, BLOCK_HEADS)
        is_head = number < HEADS
        total = sum_parts(head + row * head_row_stride, head_part_stride, number, is_head, HEAD_PARTS)
        tl.store(heads_out + row * HEADS + number, total * head_scale, mask=is_head)


@triton.jit
def normed_row(
    source, part_stride, at, is_given, weight, is_weight, eps, SIZE: tl.constexpr, PARTS: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Return the RMS norm of a row, which is the sum of its parts rounded to ``dtype``. ``at``: columns;
    ``is_given``: those to read, none in a row of padding; ``is_weight``: those that have a weight."""
    x = sum_parts(source, part_stride, at, is_given, PARTS).to(dtype).to(tl.float32)
    factor = tl.load(weight + at, mask=is_weight, other=0.0).to(tl.float32)
    return (x * tl.rsqrt(tl.sum(x * x) / SIZE + eps) * factor).to(dtype)
