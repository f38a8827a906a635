"""What is known of fp8_e4m3, in which KV, indexer keys and weights may be kept."""

from __future__ import annotations

from typing import Final

FP8_CAPABILITY: Final = (8, 9)
"""The first architecture of GPUs that converts it."""
FP8_MAX: Final = 448.0
"""Its largest number."""
