"""Masks logits by int32 words with one bit for each token; token 0 is the lowest bit of the first word.

The masks are those of grammars (``hisparse_pd.core.grammar.matcher``); sampling applies them before each
draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import check_tensor


def allowed_logits(logits: Tensor, masks: Tensor) -> Tensor:
    """Return float32 [num_rows, vocab_size]: ``logits``, and -inf where a token's bit is not set.

    ``logits``: float32 [num_rows, vocab_size], not changed. ``masks``: int32 [num_rows, num_words] on the
    same device, with as many words as the vocabulary needs. This does not wait for a GPU. Raises
    KernelArgumentError.
    """
    check_tensor("logits", logits, dtypes=(torch.float32,), shape=(None, None))
    num_rows, vocab_size = logits.shape
    num_words = -(-vocab_size // 32)
    check_tensor("masks", masks, dtypes=(torch.int32,), shape=(num_rows, num_words), device=logits.device)
    if logits.is_cuda:
        from hisparse_pd.kernels.triton_bit_masks import allow

        return allow(logits, masks)
    shifts = torch.arange(32, dtype=torch.int32)
    bits = (masks[:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size].bool()
    return torch.where(bits, logits, float("-inf"))
