# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False, disallow_untyped_decorators=False
# mypy: disallow_untyped_calls=False
"""Programmatic dependent launch for small Triton kernels: the next kernel becomes resident, and prefetches
weights into the L2 cache, while the preceding one still runs.

The kernels of a model's layers use it. A kernel that is launched with ``launch_options`` has the constant
``OVERLAPS`` and calls ``begin`` before it reads or writes anything but weights, which no kernel writes.
``begin`` lets the next kernel start, and waits for the end of the preceding one, and so of all kernels before
that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from hisparse_pd.kernels.cuda_launch import HOPPER


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Return whether kernels can start early: on GPUs from Hopper on, not in Triton's interpreter."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def launch_options(device: torch.device) -> dict[str, Any]:
    """Return the launch options of a kernel that has the constant ``OVERLAPS`` and calls ``begin``."""
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps(device) else {"OVERLAPS": False}


@triton.jit
def begin(OVERLAPS: tl.constexpr):
    """Let the next kernel start, and wait until all kernels before this one are over."""
    if OVERLAPS:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def prefetch(addresses, OVERLAPS: tl.constexpr):
    """Bring the cache lines at ``addresses``, which must be weights, into the L2 cache."""
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [addresses],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
