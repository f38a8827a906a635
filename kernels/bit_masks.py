"""Logits under masks of bits: int32 words, a bit for each token, token 0 the lowest of the first."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import check_tensor


def allowed_logits(logits: Tensor, masks: Tensor) -> Tensor:
    """float32 [num_rows, vocab_size]: ``logits``, which stay as they are, or -inf where no bit is set.

    ``masks``: int32 [num_rows, num_words], enough words for the vocabulary, on the same device. Does not wait
    for a GPU. Raises KernelArgumentError.
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
