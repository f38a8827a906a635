"""What is known of fp8_e4m3, in which KV, indexer keys, weights and activations may be, and of its scales."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

FP8_CAPABILITY: Final = (8, 9)
"""The first architecture of GPUs that converts it."""
FP8_MAX: Final = 448.0
"""Its largest number."""

_MANTISSA_MASK: Final = (1 << 23) - 1


def next_power_of_two(values: Tensor) -> Tensor:
    """The smallest powers of two that are not below ``values``, float32, not negative; 0 for 0."""
    return ((values.view(torch.int32) + _MANTISSA_MASK) & ~_MANTISSA_MASK).view(torch.float32)
