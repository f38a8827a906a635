"""Argument checks of the kernel wrappers. Each error names the argument, the expected and the actual value.

No check synchronises with a device.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KernelArgumentError(ValueError):
    """An argument of a kernel wrapper has the wrong shape, dtype, device, layout or value."""


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
    contiguous: bool = True,
) -> None:
    """Raise KernelArgumentError unless ``tensor`` matches; None in ``shape`` matches any extent."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise KernelArgumentError(f"{name}: expected dtype {wanted}, got {tensor.dtype}")
    actual = tuple(tensor.shape)
    if len(actual) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, actual, strict=True)
    ):
        wanted = ", ".join("*" if extent is None else str(extent) for extent in shape)
        raise KernelArgumentError(f"{name}: expected shape [{wanted}], got {list(actual)}")
    if device is not None and tensor.device != device:
        raise KernelArgumentError(f"{name}: expected device {device}, got {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise KernelArgumentError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def check_range(name: str, value: int, start: int, stop: int) -> None:
    """Raise KernelArgumentError unless ``start <= value < stop``."""
    if not start <= value < stop:
        raise KernelArgumentError(f"{name}: expected a value in [{start}, {stop}), got {value}")


def check_at_least(name: str, value: int, bound: int) -> None:
    """Raise KernelArgumentError unless ``value >= bound``."""
    if value < bound:
        raise KernelArgumentError(f"{name}: expected at least {bound}, got {value}")


def check_page_ids(name: str, page_ids: Tensor, num_pages: int) -> None:
    """Raise KernelArgumentError if ``page_ids`` are on the CPU and not all in [0, num_pages)."""
    if page_ids.device.type == "cpu" and page_ids.numel():
        lowest, highest = page_ids.aminmax()
        check_range(f"{name} lowest", int(lowest), 0, num_pages)
        check_range(f"{name} highest", int(highest), 0, num_pages)
