"""Checks a node's devices, and computes how much of a GPU's memory its pools may take.

At the start, after the weights are loaded, a node describes its pools as a ``PoolDemand`` and gets the number
of tokens that fit into the ``DeviceMemory`` that is left.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from hisparse_pd.base.vocabulary import StartError

_GIB = 1 << 30


def check_devices(names: Iterable[str]) -> None:
    """Raise StartError unless all devices, such as ``cpu``, ``cuda`` and ``cuda:1``, are there."""
    for name in names:
        device = torch.device(name)
        if device.type != "cuda":
            continue
        if torch.version.cuda is None:
            raise StartError(
                f"device {name}: torch {torch.__version__} is built without CUDA; install another build, or "
                "give --device cpu"
            )
        num_devices = torch.cuda.device_count()
        if num_devices <= (device.index or 0):
            raise StartError(
                f"device {name}: this process sees {num_devices} CUDA devices; check nvidia-smi and "
                "CUDA_VISIBLE_DEVICES"
            )


def use_device(name: str) -> None:
    """Make ``name`` the current device of this thread: kernels are compiled for it and launched on it, and
    streams, events and graphs belong to it unless they name another.

    Called once in a process, by the thread that launches, before any other use of CUDA.
    """
    if torch.device(name).type == "cuda":
        torch.cuda.set_device(torch.device(name).index or 0)


@dataclass(frozen=True)
class DeviceMemory:
    """The use of a GPU's memory; ``used_bytes`` includes weights, the CUDA context and other processes."""

    total_bytes: int
    used_bytes: int

    @classmethod
    def read(cls, device: torch.device) -> DeviceMemory:
        """Return the current state, after Python has freed what only reference cycles keep, and torch the
        memory that it caches. A loaded model leaves such cycles: an exception within transformers keeps the
        frames of the load, with all of its modules and tensors."""
        gc.collect()
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return cls(total_bytes, total_bytes - free_bytes)

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    def budget(self, fraction: float) -> int:
        """Return the bytes left of ``fraction`` of the device; negative if more is in use already."""
        return int(fraction * self.total_bytes) - self.used_bytes


@dataclass(frozen=True)
class PoolDemand:
    """The memory that a node's pools need: ``fixed`` bytes, by their purpose, and bytes for each token
    of the pool.

    ``option`` sets the number of tokens, which come in pages of ``page_size``. ``remedy``: another setting to
    change, named in errors.
    """

    option: str
    fixed: Mapping[str, int]
    bytes_per_token: int
    page_size: int
    remedy: str

    def num_bytes(self, num_tokens: int) -> int:
        return sum(self.fixed.values()) + num_tokens * self.bytes_per_token

    def num_tokens(self, wanted: int, memory: DeviceMemory | None, fraction: float, min_tokens: int) -> int:
        """Return the pool's tokens: ``wanted``, checked against ``memory``, or if ``wanted`` is 0, as many
        whole pages as fit into ``fraction`` of the device.

        ``memory``: None without a GPU, where the settings refuse 0. ``min_tokens``: the least that a node can
        work with. Raises StartError when ``wanted``, which may take all free memory, or ``min_tokens`` do
        not fit.
        """
        if memory is None:
            return wanted
        if wanted:
            self._check_fits(memory, wanted)
            return wanted
        budget = memory.budget(fraction)
        num_pages = (budget - self.num_bytes(0)) // (self.bytes_per_token * self.page_size)
        if num_pages * self.page_size < min_tokens:
            there = (
                f"{_show(budget)} are there: {fraction:g} of {_show(memory.total_bytes)} less "
                f"{_show(memory.used_bytes)} in use"
            )
            raise StartError(
                f"{self.option} 0: {self._needs(min_tokens)}, but {there}; raise --mem-fraction-static, "
                f"{self.remedy}"
            )
        return num_pages * self.page_size

    def _check_fits(self, memory: DeviceMemory, num_tokens: int) -> None:
        """Raise StartError unless ``num_tokens`` fit into the free memory."""
        if self.num_bytes(num_tokens) > memory.free_bytes:
            raise StartError(
                f"{self.option} {num_tokens}: {self._needs(num_tokens)}, but {_show(memory.free_bytes)} of "
                f"{_show(memory.total_bytes)} are free; lower {self.option}, {self.remedy}"
            )

    def _needs(self, num_tokens: int) -> str:
        parts = [f"{what} {_show(num_bytes)}" for what, num_bytes in self.fixed.items() if num_bytes]
        parts.append(f"{num_tokens} tokens {_show(num_tokens * self.bytes_per_token)}")
        return f"{_show(self.num_bytes(num_tokens))} of GPU memory are needed ({', '.join(parts)})"


def _show(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / _GIB:.2f} GiB)"
