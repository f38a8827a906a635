"""Sources and launches of the CUDA C++ kernels in ``csrc/``, for the Python module that each of them has.

A module compiles its ``translation_unit`` with cupy, fills a struct of parameters and calls ``launch``. cupy
and the CUDA driver's bindings are imported on first use, so that modules can be imported on a machine without
a GPU.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

CSRC = Path(__file__).parent / "csrc"

HOPPER = (9, 0)
"""The first compute capability with programmatic dependent launch and clusters of blocks."""


def translation_unit(name: str) -> str:
    """Return ``csrc/name`` with the project's headers in place of their includes.

    It is one string so that every cache of compiled code sees a change of a header. ``#line`` directives keep
    the files' own line numbers in errors.
    """
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (CSRC / name).read_text().replace("#pragma once\n", "\n")
        return re.sub(
            r'^#include "(.+)"$',
            lambda match: f'#line 1 "{match[1]}"\n{expand(match[1])}',
            f'#line 1 "{name}"\n{text}',
            flags=re.MULTILINE,
        )

    return expand(name)


def launch(
    kernel: Any,
    device: torch.device,
    num_blocks: int,
    num_threads: int,
    parameters: npt.NDArray[Any],
    shared_bytes: int = 0,
    cluster_size: int = 1,
    num_blocks_y: int = 1,
) -> None:
    """Launch a kernel on torch's current stream. Where the GPU supports it, the blocks may become resident
    while the preceding kernel still runs; they wait for its end before they read anything.

    There are ``num_blocks`` x ``num_blocks_y`` blocks. ``parameters``: the struct that is the kernel's only
    argument. ``shared_bytes``: dynamic shared memory of a block. ``cluster_size``: blocks that run together
    and share their memory; more than 1 on Hopper and later only.
    """
    driver = _driver()
    config = _config(device, num_blocks, num_threads, shared_bytes, cluster_size)
    config.gridDimY = num_blocks_y
    addresses = np.array([parameters.ctypes.data], dtype=np.uint64)
    with torch.cuda.device(device):
        (error,) = driver.cuLaunchKernelEx(config, kernel.kernel.ptr, addresses.ctypes.data, 0)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"{kernel.name}: {error.name} from a launch of {num_blocks} blocks of {num_threads} threads "
            f"with {shared_bytes} bytes of shared memory each"
        )


def max_resident_clusters(
    kernel: Any, device: torch.device, num_threads: int, shared_bytes: int, cluster_size: int
) -> int:
    """Return how many clusters an idle GPU runs at a time. They are fewer than multiprocessors /
    cluster_size, because each cluster must lie within one part of the GPU (a GPC)."""
    driver = _driver()
    config = _config(device, cluster_size, num_threads, shared_bytes, cluster_size)
    with torch.cuda.device(device):
        error, num_clusters = driver.cuOccupancyMaxActiveClusters(kernel.kernel.ptr, config)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{kernel.name}: {error.name} for clusters of {cluster_size} blocks")
    return int(num_clusters)


def _config(
    device: torch.device, num_blocks: int, num_threads: int, shared_bytes: int, cluster_size: int
) -> Any:
    """Return the driver's description of a launch, which on Hopper and later may begin before the preceding
    kernel ends."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = num_blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = torch.cuda.current_stream(device).cuda_stream
    attributes = []
    if torch.cuda.get_device_capability(device) >= HOPPER:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster_size > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = cluster_size, 1, 1
        attribute.value.clusterDim = dimension
        attributes.append(attribute)
    if attributes:
        config.attrs = attributes
        config.numAttrs = len(attributes)
    return config


@functools.cache
def cupy_module() -> Any:
    import cupy

    return cupy


def hopper_module(source: str, options: tuple[str, ...]) -> Any:
    """Return cupy's module of code that uses Hopper's own instructions, which cupy's compiler does not let
    it: those of the architecture sm_90a. Each process compiles it anew."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "unit.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, "-arch=sm_90a"))
        compiled = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC: {error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled)
        file.flush()
        module = cupy_module().RawModule(path=file.name)
        module.compile()  # reads the file
    return module


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def max_block_shared_bytes(device: torch.device) -> int:
    """Return the most shared memory that a block may use."""
    with torch.cuda.device(device):
        return int(cupy_module().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver
