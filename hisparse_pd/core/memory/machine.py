"""Reads facts about this machine, and which of its libraries and memory a transport can use.

Engines read them at the start, and the doctor when an operator asks. Everything comes from files and from a
few functions that are fields of ``Machine``, so that tests can pass a machine of their own. Obstacles are
returned as a ``Fault``, not raised.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_CAP_IPC_LOCK = 14
"""The bit of CAP_IPC_LOCK in a set of capabilities."""
_DMA_BUF_SUPPORTED = 124
"""CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED"""
_INITIAL_UID_MAP = ["0", "0", "4294967295"]
"""The uid_map of the initial user namespace: all ids, unchanged."""


@dataclass(frozen=True)
class Fault:
    """The reason why something cannot be used, with the value found and the bound, and a remedy."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def list_verbs_devices() -> tuple[str, ...]:
    """Return the RDMA devices that libibverbs has a driver for. Raises OSError if it cannot be loaded."""
    verbs = ctypes.CDLL("libibverbs.so.1")
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    count = ctypes.c_int()
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        return ()
    names = tuple(verbs.ibv_get_device_name(devices[i]).decode() for i in range(count.value))
    verbs.ibv_free_device_list(devices)
    return names


def memlock_limit() -> int | None:
    """Return the bytes that this process may lock, or None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def list_gpu_bus_ids() -> tuple[str, ...]:
    """Return the PCI address of each GPU that this process sees, such as ``0000:1B:00.0``, in the order of
    their numbers, and an empty string for a GPU whose address is unknown; no entry without a driver. No CUDA
    context is created."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    device, count, text = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(64)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for number in range(count.value):
        has_id = cuda.cuDeviceGet(ctypes.byref(device), number) == 0
        has_id = has_id and cuda.cuDeviceGetPCIBusId(text, len(text), device) == 0
        found.append(text.value.decode() if has_id else "")
    return tuple(found)


def dma_buf_supported() -> bool:
    """Whether the driver can hand out the first GPU's memory as a dma-buf; False without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, supported = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return False
    code = cuda.cuDeviceGetAttribute(ctypes.byref(supported), _DMA_BUF_SUPPORTED, device)
    return bool(code == 0 and supported.value == 1)


@dataclass(frozen=True)
class Machine:
    """The sources of facts about this machine."""

    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    verbs_devices: Callable[[], Sequence[str]] = list_verbs_devices
    memlock_bytes: Callable[[], int | None] = memlock_limit
    has_dma_buf: Callable[[], bool] = dma_buf_supported
    gpu_bus_ids: Callable[[], Sequence[str]] = list_gpu_bus_ids
    allowed_cpus: Callable[[], Collection[int]] = lambda: os.sched_getaffinity(0)

    @property
    def infiniband(self) -> Path:
        return self.sys / "class" / "infiniband"


def verbs_library_fault(machine: Machine) -> Fault | None:
    """Return why libibverbs cannot be used, or None."""
    try:
        machine.verbs_devices()
    except OSError as error:
        return Fault(f"libibverbs cannot be loaded ({error})", "install the package libibverbs1")
    return None


def memlock_fault(num_host_bytes: int, num_devices: int, machine: Machine) -> Fault | None:
    """Return why ``num_host_bytes`` of main memory cannot be registered with each of ``num_devices``, or
    None.

    The kernel counts registered memory once for each device, and not at all for a process with CAP_IPC_LOCK
    in the initial user namespace. GPU memory does not count.
    """
    limit = machine.memlock_bytes()
    num_bytes = num_host_bytes * num_devices
    if limit is None or num_bytes <= limit or may_lock_anything(machine):
        return None
    times = f", {show_bytes(num_host_bytes)} with each of {num_devices} devices" if num_devices > 1 else ""
    return Fault(
        f"locked memory is limited to {limit} bytes ({show_bytes(limit)}), and {num_bytes} bytes "
        f"({show_bytes(num_bytes)}{times}) are to be registered",
        "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker)",
    )


def may_lock_anything(machine: Machine) -> bool:
    """Whether this process has CAP_IPC_LOCK in the initial user namespace, which is where it counts."""
    status = read_text(machine.proc / "self" / "status").splitlines()
    capabilities = next((line.split()[1] for line in status if line.startswith("CapEff:")), "0")
    is_initial = read_text(machine.proc / "self" / "uid_map").split() == _INITIAL_UID_MAP
    return is_initial and bool(int(capabilities, 16) >> _CAP_IPC_LOCK & 1)


def gpu_direct(machine: Machine) -> str:
    """Return what lets a network card reach GPU memory: nvidia_peermem, dma-buf, or an empty string."""
    if (machine.sys / "module" / "nvidia_peermem").is_dir():
        return "nvidia_peermem"
    return "dma-buf" if machine.has_dma_buf() else ""


def gpu_direct_fault(machine: Machine) -> Fault | None:
    """Return why GPU memory cannot be registered with a network card, or None."""
    if gpu_direct(machine):
        return None
    return Fault(
        "GPU memory cannot be registered: no module nvidia_peermem, and the driver offers no dma-buf",
        "modprobe nvidia_peermem, or use the open kernel modules of the NVIDIA driver on Linux 5.12 or later",
    )


def show_bytes(num_bytes: float) -> str:
    """Return a size for people to read: ``1.5 GiB``."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def read_text(path: Path) -> str:
    """Return a file's stripped text, or an empty string if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeError):
        return ""
