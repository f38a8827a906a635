"""Constants of fp8_e4m3, the dtype that KV, indexer keys, weights and activations may have, and the rounding
of scales to powers of two."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

FP8_CAPABILITY: Final = (8, 9)
"""The first compute capability that converts fp8."""
FP8_MAX: Final = 448.0
"""The largest fp8 number."""

_MANTISSA_MASK: Final = (1 << 23) - 1


def next_power_of_two(values: Tensor) -> Tensor:
    """Round ``values``, float32 and not negative, up to powers of two; 0 stays 0."""
    return ((values.view(torch.int32) + _MANTISSA_MASK) & ~_MANTISSA_MASK).view(torch.float32)
