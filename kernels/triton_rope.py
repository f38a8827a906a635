# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.rope`` on a GPU (``rotate``), and cos and sin of positions (``angles``), in one launch each.

The model's forward (``hisparse_pd.core.model.dsa``) calls ``angles`` once, before the layers. In torch each
would be some ten launches, none of which fills the GPU. ``launch_options`` gives each kernel its
``OVERLAPS``: whether it starts while the one before it still runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse_pd.kernels.triton_launch import begin, launch_options

HEADS_PER_PROGRAM = 16
TOKENS_PER_PROGRAM = 4


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, out: Tensor) -> None:
    """See ``kernels.rope.rotate``, which has checked the arguments."""
    num_tokens, num_heads, dim = x.shape
    if num_tokens == 0 or num_heads == 0:
        return
    half = cos.shape[1]
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    with torch.cuda.device_of(x):
        rotate_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            sin.stride(0),
            out.stride(0),
            out.stride(1),
            num_heads,
            HALF=half,
            REST=dim - 2 * half,
            IS_INTERLEAVED=is_interleaved,
            BLOCK_HEADS=heads,
            BLOCK_HALF=triton.next_power_of_2(half),
            BLOCK_REST=triton.next_power_of_2(max(1, dim - 2 * half)),
            **launch_options(x.device),
        )


def angles(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of ``positions`` times frequencies, times ``scaling``: float32 [num_tokens, half]
    each.

    ``positions``: integer [num_tokens]; ``inv_freq``: float32 [half], on the same device.
    """
    num_tokens, half = len(positions), len(inv_freq)
    cos, sin = torch.empty((2, num_tokens, half), dtype=torch.float32, device=positions.device)
    if num_tokens:
        with torch.cuda.device_of(positions):
            angles_kernel[(triton.cdiv(num_tokens, TOKENS_PER_PROGRAM),)](
                positions,
                inv_freq,
                cos,
                sin,
                num_tokens,
                scaling,
                HALF=half,
                TOKENS=TOKENS_PER_PROGRAM,
                BLOCK_HALF=triton.next_power_of_2(half),
                num_warps=2,
                **launch_options(positions.device),
            )
    return cos, sin


@triton.jit(do_not_specialize=["num_tokens"])
def angles_kernel(
    positions,
    inv_freq,
    cos,
    sin,
    num_tokens,
    scaling,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute cos and sin of TOKENS positions."""
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    # ``begin`` waits until earlier kernels are over. None of them writes ``inv_freq``, so it is loaded first.
    frequency = tl.load(inv_freq + pair, mask=pair < HALF, other=0.0)
    begin(OVERLAPS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    position = tl.load(positions + token, mask=token < num_tokens, other=0).to(tl.float32)
    angle = position * frequency
    mask = (token < num_tokens) & (pair < HALF)
    tl.store(cos + token * HALF + pair, tl.cos(angle) * scaling, mask=mask)
    tl.store(sin + token * HALF + pair, tl.sin(angle) * scaling, mask=mask)


@triton.jit
def rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_token_stride,
    x_head_stride,
    cos_stride,
    sin_stride,
    out_token_stride,
    out_head_stride,
    num_heads,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Rotate BLOCK_HEADS heads of a token."""
    begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    is_head = heads < num_heads
    x_heads = x_ptr + token * x_token_stride + heads.to(tl.int64) * x_head_stride
    out_heads = out_ptr + token * out_token_stride + heads.to(tl.int64) * out_head_stride

    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pairs < HALF
    cos = tl.load(cos_ptr + token * cos_stride + pairs, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + token * sin_stride + pairs, mask=is_pair, other=0.0)
    is_here = is_head & is_pair
    if IS_INTERLEAVED:
        first_at, second_at = 2 * pairs, 2 * pairs + 1
    else:
        first_at, second_at = pairs, HALF + pairs
    first = tl.load(x_heads + first_at, mask=is_here, other=0.0).to(tl.float32)
    second = tl.load(x_heads + second_at, mask=is_here, other=0.0).to(tl.float32)
    # The result is never interleaved: the first elements of all pairs, then the second ones.
    tl.store(out_heads + pairs, first * cos - second * sin, mask=is_here)
    tl.store(out_heads + HALF + pairs, second * cos + first * sin, mask=is_here)

    if REST > 0:
        rest = tl.arange(0, BLOCK_REST)[None, :]
        is_rest = is_head & (rest < REST)
        values = tl.load(x_heads + 2 * HALF + rest, mask=is_rest)
        tl.store(out_heads + 2 * HALF + rest, values, mask=is_rest)
