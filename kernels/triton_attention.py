# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""Sparse MLA attention in Triton: any NVIDIA GPU, any sizes, all KV formats.

``kernels.attention_backends`` makes a ``TritonAttention`` if there is no ``obstacle``; ``kernels.flashmla``
uses ``combine`` alone.

A program takes one token, a tile of its heads and a part of its slots (a split). It keeps a running softmax
over blocks of gathered items, which are in shared memory once for use as keys and as values. Where a token's
slots are split over several programs, a second kernel weighs their results by their log-sum-exp. The backend
sets the number of splits whatever the batch is, so that a token's bits depend on the token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from hisparse_pd.kernels.attention import TRITON, check_attend
from hisparse_pd.kernels.fp8 import FP8_CAPABILITY
from hisparse_pd.kernels.kv_format import FLOAT32, FP8_E4M3, SCALE_TILE, KvFormat
from hisparse_pd.kernels.triton_launch import begin, launch_options

LOG2_E: Final = 1.4426950408889634
SMALLEST_DOT: Final = 16
"""Smallest side of a product of tiles."""

COMBINED_ELEMENTS: Final = 1024
"""Elements of one token's result that a program of the second kernel writes: 8 for each of its threads."""


@dataclass(frozen=True)
class Tiling:
    """The tile that one program holds, and how the kernel is compiled."""

    block_heads: int
    block_slots: int
    num_warps: int
    num_stages: int
    """Stages of the pipeline: three where shared memory allows, to prefetch slots and then their items."""


BFLOAT16_TILINGS: Final = (
    Tiling(64, 64, 8, 3),
    Tiling(64, 32, 8, 3),
    Tiling(32, 64, 8, 3),
    Tiling(32, 32, 8, 3),
    Tiling(16, 64, 4, 3),
    Tiling(16, 32, 4, 3),
    Tiling(16, 16, 4, 2),
    Tiling(16, 16, 4, 1),
)
"""Tilings from the one that moves the fewest bytes to the one that needs the least shared memory."""
SHORT_TILING: Final = Tiling(32, 128, 4, 2)
"""Tiling that is tried first for latents of up to SHORT_RANK numbers: with these a block's time is mostly its
softmax, so that moving the fewest bytes is not the fastest."""
SHORT_RANK: Final = 128
FLOAT32_TILINGS: Final = (Tiling(16, 16, 8, 2), Tiling(16, 16, 8, 1))
"""Tilings for float32 products, which do not use tensor cores."""


MAX_DIM: Final = 1024
"""Most numbers of a latent, padded to a power of two: a tile's results for twice as many exceed the
registers."""


def obstacle(device: torch.device, kv_format: KvFormat) -> str | None:
    """Return why this backend cannot work on a CUDA device; None when it can."""
    capability = torch.cuda.get_device_capability(device)
    if kv_format.name == FP8_E4M3 and capability < FP8_CAPABILITY:
        return f"fp8 items need compute capability 8.9, not {capability[0]}.{capability[1]}"
    if (widest := max(kv_format.kv_lora_rank, kv_format.rope_dim)) > MAX_DIM:
        return f"it holds latents and rotary keys of up to {MAX_DIM} numbers, not {widest}"
    return None


class _PoolViews(NamedTuple):
    """One layer's pool as numbers of each dtype that its items' parts have: [num_slots, numbers of an
    item]."""

    latents: Tensor
    scales: Tensor
    ropes: Tensor


def _pool_views(kv_format: KvFormat, layer_pool: Tensor) -> _PoolViews:
    if kv_format.name == FP8_E4M3:
        return _PoolViews(layer_pool, layer_pool.view(torch.float32), layer_pool.view(torch.bfloat16))
    numbers = layer_pool.view(kv_format.dtype)
    return _PoolViews(numbers, numbers, numbers)


@dataclass(frozen=True)
class TritonAttention:
    """The ``AttentionBackend`` of this module's kernels.

    Products are in bfloat16 with float32 sums when ``q`` is bfloat16 and items are not float32; otherwise all
    is in float32.
    """

    kv_format: KvFormat
    reason: str = ""
    """Why this backend was chosen, for a log."""
    split_slots: int = 0
    """Slots in one split, rounded up to whole blocks; 0: a token's slots are not split."""
    name: str = TRITON
    _tilings: dict[tuple[Any, ...], Tiling] = field(default_factory=dict, compare=False, repr=False)
    """The first tiling that fits, by device, number of heads and dtype of the products."""

    def attend(
        self,
        q: Tensor,
        layer_pool: Tensor,
        device_slots: Tensor,
        scale: float,
        num_columns: Tensor | None = None,
    ) -> Tensor:
        """See ``AttentionBackend.attend``. ``num_columns`` is not used: the kernel finds each token's last
        valid slot itself."""
        check_attend(self.kv_format, q, layer_pool, device_slots)
        num_tokens, num_heads, _ = q.shape
        rank = self.kv_format.kv_lora_rank
        if num_tokens == 0 or device_slots.shape[1] == 0:
            return q.new_zeros((num_tokens, num_heads, rank))
        in_float32 = q.dtype == torch.float32 or self.kv_format.name == FLOAT32
        key = (q.device, num_heads, in_float32)
        out = q.new_empty((num_tokens, num_heads, rank))
        # Take the tiling that has fitted before, or else try them from the fastest on.
        tilings: Sequence[Tiling] = [self._tilings[key]] if key in self._tilings else ()
        tilings = tilings or tilings_for(num_heads, rank, in_float32)
        for tiling in tilings:
            try:
                with torch.cuda.device_of(q):
                    self._launch(
                        tiling, q.contiguous(), layer_pool, device_slots.contiguous(), scale, out, in_float32
                    )
            except OutOfResources:
                # The GPU has too little shared memory for these items. Nothing has run; a smaller tiling may
                # fit.
                if tiling is tilings[-1]:
                    raise
                continue
            self._tilings[key] = tiling
            break
        return out

    def _launch(
        self,
        tiling: Tiling,
        q: Tensor,
        layer_pool: Tensor,
        device_slots: Tensor,
        scale: float,
        out: Tensor,
        in_float32: bool,
    ) -> None:
        """Launch the attention of all tokens, and what combines their splits if there are several."""
        kv_format = self.kv_format
        num_tokens, num_heads, _ = q.shape
        top_k = device_slots.shape[1]
        rank = kv_format.kv_lora_rank

        num_head_tiles = -(-num_heads // tiling.block_heads)
        split_blocks = -(-(self.split_slots or top_k) // tiling.block_slots)
        split_len = split_blocks * tiling.block_slots
        num_splits = -(-top_k // split_len)
        results, log_sums = out, out  # without splits the kernel writes no log_sums
        if num_splits > 1:
            results = q.new_empty((num_tokens, num_splits, num_heads, rank), dtype=torch.float32)
            log_sums = q.new_empty((num_tokens, num_splits, num_heads), dtype=torch.float32)

        pool = _pool_views(kv_format, layer_pool)
        is_fp8 = kv_format.name == FP8_E4M3
        block_rank = max(SMALLEST_DOT, triton.next_power_of_2(rank))
        attend_kernel[(num_tokens * num_head_tiles * num_splits,)](
            q,
            pool.latents,
            pool.scales,
            pool.ropes,
            device_slots,
            results,
            log_sums,
            scale * LOG2_E,
            num_heads,
            top_k,
            num_splits,
            split_len,
            RANK=rank,
            ROPE=kv_format.rope_dim,
            LATENT_ROW=pool.latents.shape[1],
            SCALES_ROW=pool.scales.shape[1],
            ROPE_ROW=pool.ropes.shape[1],
            # Offsets in bytes become numbers of 4 and of 2 bytes.
            SCALES_AT=kv_format.scales_offset // 4 if is_fp8 else 0,
            ROPE_AT=kv_format.rope_offset // 2 if is_fp8 else rank,
            IS_FP8=is_fp8,
            IN_FLOAT32=in_float32,
            IS_PARTIAL=num_splits > 1,
            BLOCK_HEADS=tiling.block_heads,
            BLOCK_SLOTS=tiling.block_slots,
            BLOCK_RANK=block_rank,
            BLOCK_ROPE=max(SMALLEST_DOT, triton.next_power_of_2(kv_format.rope_dim)),
            SCALE_TILE=min(SCALE_TILE, block_rank),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **launch_options(q.device),
        )
        if num_splits > 1:
            combine(results, log_sums, out)


def tilings_for(num_heads: int, rank: int, in_float32: bool) -> Sequence[Tiling]:
    """Return the tilings to try, in order; none has twice as many heads as needed."""
    if in_float32:
        return FLOAT32_TILINGS
    widest = max(SMALLEST_DOT, triton.next_power_of_2(num_heads))
    first = (SHORT_TILING,) if rank <= SHORT_RANK else ()
    return [tiling for tiling in (*first, *BFLOAT16_TILINGS) if tiling.block_heads <= widest]


def combine(results: Tensor, log_sums: Tensor, out: Tensor, to_log2: float = 1.0) -> Tensor:
    """Fill ``out`` [num_tokens, num_heads, rank] with the weighted sum of ``results``, and return it.

    ``results``: [num_tokens, num_splits, num_heads, rank], contiguous, the results of each token's splits.
    ``log_sums``: float32 [num_tokens, num_splits, num_heads] of any strides, the logarithms of the splits'
    sums of weights. An empty split has -inf here; +inf, as another kernel may give it, counts as -inf.
    ``to_log2``: the factor that converts them to base 2.
    """
    num_tokens, num_splits, num_heads, rank = results.shape
    block_rank = triton.next_power_of_2(rank)
    block_heads = max(1, COMBINED_ELEMENTS // block_rank)
    with torch.cuda.device_of(out):
        combine_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
            results,
            log_sums,
            out,
            *log_sums.stride(),
            to_log2,
            num_heads,
            num_splits,
            RANK=rank,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
            BLOCK_HEADS=block_heads,
            BLOCK_RANK=block_rank,
            **launch_options(out.device),
        )
    return out


@triton.jit(do_not_specialize=["num_splits"])
def attend_kernel(
    q_ptr,
    latent_ptr,
    scales_ptr,
    rope_ptr,
    slots_ptr,
    result_ptr,
    log_sum_ptr,
    scale_log2,
    num_heads,
    top_k,
    num_splits,
    split_len,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_ROW: tl.constexpr,
    SCALES_ROW: tl.constexpr,
    ROPE_ROW: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ROPE_AT: tl.constexpr,
    IS_FP8: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    SCALE_TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend to one split of one token's slots, for one tile of its heads.

    ``q``: [num_tokens, num_heads, RANK + ROPE]. ``latent``, ``scales``, ``rope``: the pool as numbers of each
    part's dtype; the row's length (``_ROW``) and the part's offset in a row (``_AT``) count such numbers. A
    scale of fp8 items belongs to SCALE_TILE numbers of the latent. ``slots``: int32 [num_tokens, top_k].
    ``result``: [num_tokens, num_splits, num_heads, RANK]; ``log_sum``, to base 2: [num_tokens, num_splits,
    num_heads], written when IS_PARTIAL, which is when a token has several splits. ``launch_options`` gives
    OVERLAPS.
    """
    begin(OVERLAPS)
    PRODUCT: tl.constexpr = tl.float32 if IN_FLOAT32 else tl.bfloat16
    num_head_tiles = tl.cdiv(num_heads, BLOCK_HEADS)
    # Programs that read the same items are adjacent, so that they find them in L2.
    program = tl.program_id(0)
    heads = program % num_head_tiles * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    split = program // num_head_tiles % num_splits
    token = (program // num_head_tiles // num_splits).to(tl.int64)
    ranks = tl.arange(0, BLOCK_RANK)[None, :]
    ropes = tl.arange(0, BLOCK_ROPE)[None, :]
    is_head = heads < num_heads

    q_rows = q_ptr + (token * num_heads + heads)[:, None] * (RANK + ROPE)
    q_latent = tl.load(q_rows + ranks, mask=is_head[:, None] & (ranks < RANK), other=0.0).to(PRODUCT)
    q_rope = tl.load(q_rows + RANK + ropes, mask=is_head[:, None] & (ropes < ROPE), other=0.0).to(PRODUCT)

    token_slots = slots_ptr + token * top_k
    first = split * split_len
    stop = tl.minimum(first + split_len, top_k)
    end = first  # the end of the valid slots: short contexts leave most of a row unused
    for start in range(first, stop, 256):
        at = start + tl.arange(0, 256)
        slots = tl.load(token_slots + at, mask=at < stop, other=-1)
        end = tl.maximum(end, tl.max(tl.where(slots >= 0, at + 1, 0)))

    # The running softmax. Its first maximum is finite, because the difference of two infinities is NaN.
    top = tl.full((BLOCK_HEADS,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    result = tl.zeros((BLOCK_HEADS, BLOCK_RANK), tl.float32)
    for start in range(first, end, BLOCK_SLOTS):
        at = start + tl.arange(0, BLOCK_SLOTS)
        slots = tl.load(token_slots + at, mask=at < end, other=-1)
        is_slot = slots >= 0
        rows = slots.to(tl.int64)[:, None]
        latent = tl.load(
            latent_ptr + rows * LATENT_ROW + ranks, mask=is_slot[:, None] & (ranks < RANK), other=0
        )
        if IS_FP8:
            tiles = tl.arange(0, BLOCK_RANK // SCALE_TILE)[None, :]
            is_scale = is_slot[:, None] & (tiles * SCALE_TILE < RANK)
            scales = tl.load(scales_ptr + rows * SCALES_ROW + SCALES_AT + tiles, mask=is_scale, other=0.0)
            # Scales are powers of two, so that the products are exact in bfloat16.
            latent = latent.to(tl.float8e4nv, bitcast=True).to(PRODUCT)
            latent = tl.reshape(latent, (BLOCK_SLOTS, BLOCK_RANK // SCALE_TILE, SCALE_TILE))
            latent = tl.reshape(latent * scales.to(PRODUCT)[:, :, None], (BLOCK_SLOTS, BLOCK_RANK))
        latent = latent.to(PRODUCT)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        if ROPE > 0:
            is_rope = is_slot[:, None] & (ropes < ROPE)
            rope = tl.load(rope_ptr + rows * ROPE_ROW + ROPE_AT + ropes, mask=is_rope, other=0.0)
            scores = tl.dot(q_rope, tl.trans(rope.to(PRODUCT)), scores, input_precision="ieee")
        scores = tl.where(is_slot[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        result = tl.dot(weights.to(PRODUCT), latent, result * fade[:, None], input_precision="ieee")
        top = new_top

    # A NaN total is not empty: NaN must reach the result.
    is_empty = total == 0.0
    result = result / tl.where(is_empty, 1.0, total)[:, None]
    row = (token * num_splits + split) * num_heads + heads
    if IS_PARTIAL:
        log_sum = tl.where(is_empty, float("-inf"), top + tl.log2(total))
        tl.store(log_sum_ptr + row, log_sum, mask=is_head)
    tl.store(
        result_ptr + row[:, None] * RANK + ranks,
        result.to(result_ptr.dtype.element_ty),
        mask=is_head[:, None] & (ranks < RANK),
    )


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    results_ptr,
    log_sums_ptr,
    out_ptr,
    token_stride,
    split_stride,
    head_stride,
    to_log2,
    num_heads,
    num_splits,
    RANK: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Combine some heads of one token; the strides are those of ``log_sums``. See ``combine``."""
    begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = heads < num_heads
    splits = tl.arange(0, BLOCK_SPLITS)
    log_sums = tl.load(
        log_sums_ptr + token * token_stride + heads[:, None] * head_stride + splits[None, :] * split_stride,
        mask=is_head[:, None] & (splits < num_splits)[None, :],
        other=float("-inf"),
    )
    log_sums = tl.where(log_sums == float("inf"), float("-inf"), log_sums) * to_log2
    top = tl.max(log_sums, 1)
    weights = tl.exp2(log_sums - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weights, 1)

    ranks = tl.arange(0, BLOCK_RANK)
    is_element = is_head[:, None] & (ranks < RANK)[None, :]
    elements = heads[:, None] * RANK + ranks[None, :]  # of one token's heads
    head_ranks = num_heads * RANK
    # Splits are added one after the other by each thread, which has the same elements of all of them.
    result = tl.zeros([BLOCK_HEADS, BLOCK_RANK], tl.float32)
    for split in tl.static_range(BLOCK_SPLITS):
        part = tl.load(
            results_ptr + (token * num_splits + split) * head_ranks + elements,
            mask=is_element & (split < num_splits),
            other=0.0,
        )
        weight = tl.sum(tl.where(splits[None, :] == split, weights, 0.0), 1)
        result += part.to(tl.float32) * weight[:, None]
    result /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + token * head_ranks + elements, result.to(out_ptr.dtype.element_ty), mask=is_element)
