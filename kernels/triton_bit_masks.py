# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""``kernels.bit_masks.allowed_logits`` on a GPU, in one pass over the logits, with masks that stay bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS_PER_PROGRAM = 4096


def allow(logits: Tensor, masks: Tensor) -> Tensor:
    """See ``kernels.bit_masks.allowed_logits``, which has checked the arguments."""
    num_rows, vocab_size = logits.shape
    allowed = torch.empty_like(logits)
    if num_rows == 0:
        return allowed
    with torch.cuda.device_of(logits):
        allow_kernel[(num_rows, triton.cdiv(vocab_size, TOKENS_PER_PROGRAM))](
            logits, masks, allowed, vocab_size, masks.shape[1], BLOCK=TOKENS_PER_PROGRAM
        )
    return allowed


@triton.jit
def allow_kernel(logits_ptr, masks_ptr, allowed_ptr, vocab_size, num_words, BLOCK: tl.constexpr):
    """Mask BLOCK tokens of a row."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < vocab_size
    words = tl.load(masks_ptr + row * num_words + tokens // 32, mask=is_token, other=0)
    values = tl.load(logits_ptr + row * vocab_size + tokens, mask=is_token)
    is_allowed = ((words >> (tokens % 32)) & 1) != 0
    values = tl.where(is_allowed, values, float("-inf"))
    tl.store(allowed_ptr + row * vocab_size + tokens, values, mask=is_token)
