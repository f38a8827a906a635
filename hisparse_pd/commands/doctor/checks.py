"""Checks of what a machine needs before a node is deployed on it, one in each function.

``command.py`` makes all checks and prints them. A check gets facts, or the ``Machine`` from which it reads
them, and returns what it found. FAIL means that the given settings cannot work; WARN, that they work worse
than they could, or perhaps not at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from hisparse_pd.base.access import is_loopback
from hisparse_pd.base.settings import TransportSettings
from hisparse_pd.core.memory.free import free_memory, memory_fault
from hisparse_pd.core.memory.machine import (
    Fault,
    Machine,
    gpu_direct,
    gpu_direct_fault,
    may_lock_anything,
    memlock_fault,
    read_text,
    show_bytes,
    verbs_library_fault,
)
from hisparse_pd.serving.http.descriptors import PER_ROUTED_REQUEST, max_connections
from hisparse_pd.transfer.errors import TransferSetupError
from hisparse_pd.transfer.rdma import (
    RdmaDevice,
    device_fault,
    missing_device_fault,
    no_device_fault,
    read_devices,
    wanted_devices,
)
from hisparse_pd.transfer.transport import (
    AskedProtocol,
    Transport,
    address_fault,
    addresses_of,
    choose_transport,
    environment_fault,
    select_devices,
)

_MOONCAKE_PACKAGE = "mooncake-transfer-engine"
_PIN_TEST_BYTES = 64 << 20
_MANY_CONNECTIONS = 1000
"""Connections that a router should be able to have; with fewer, the check of descriptors warns."""


class Status(StrEnum):
    OK = "ok"
    INFO = "info"
    """A fact that the given settings do not depend on."""
    WARN = "warn"
    FAIL = "fail"


_RDMA_STATUS: dict[AskedProtocol, Status] = {"tcp": Status.INFO, "auto": Status.WARN, "rdma": Status.FAIL}
"""Status of a check that finds something missing for RDMA, by the protocol that is asked for."""


@dataclass(frozen=True)
class Check:
    """One line of the report. ``remedy`` is empty when there is nothing to do."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    @classmethod
    def of(cls, name: str, fault: Fault, status: Status) -> Check:
        """Make a check of a fault. Its remedy is left out if the status says that it is not needed."""
        return cls(name, status, fault.what, "" if status is Status.INFO else fault.remedy)


@dataclass(frozen=True)
class CudaFacts:
    """Facts about CUDA, as torch tells them."""

    torch_version: str = ""
    """Empty if torch cannot be imported."""
    cuda_version: str = ""
    devices: tuple[str, ...] = ()
    """Name and memory of each CUDA device."""
    error: str = ""
    """Why there is no torch or no device."""
    pin_error: str = ""
    """Why 64 MiB cannot be pinned."""


def failed(name: str, error: Exception, consequence: str = "") -> Check:
    """Make a failed check of an error whose message ends with "; " and the remedy. ``consequence``: words
    about what the error prevents, which are shown before it."""
    what, _, remedy = str(error).partition("; ")
    return Check(name, Status.FAIL, f"{consequence}{what}", remedy)


# --- facts that take an import ----------------------------------------------------------------------------


def mooncake_version() -> str:
    """Import Mooncake. Returns its package and version. Raises ImportError."""
    import mooncake.engine  # noqa: F401

    for package in metadata.packages_distributions().get("mooncake", ()):
        if package.startswith(_MOONCAKE_PACKAGE):
            return f"{package} {metadata.version(package)}"
    return "of unknown version"


def cuda_facts() -> CudaFacts:
    """Ask torch for the facts. Never raises: whatever goes wrong is the ``error``."""
    try:
        import torch
    except Exception as error:
        return CudaFacts(error=f"{type(error).__name__}: {error}")
    version, cuda_version = torch.__version__, torch.version.cuda or ""
    try:
        if not torch.cuda.is_available():
            why = "torch sees no CUDA device" if cuda_version else "this build of torch has no CUDA"
            return CudaFacts(version, cuda_version, error=why)
        properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        devices = tuple(f"{entry.name} ({show_bytes(entry.total_memory)})" for entry in properties)
    except Exception as error:
        return CudaFacts(version, cuda_version, error=f"{type(error).__name__}: {error}")
    try:
        torch.empty(_PIN_TEST_BYTES, dtype=torch.uint8, pin_memory=True)
    except Exception as error:
        return CudaFacts(version, cuda_version, devices, pin_error=f"{type(error).__name__}: {error}")
    return CudaFacts(version, cuda_version, devices)


# --- software ---------------------------------------------------------------------------------------------


def without_network(host: str) -> Status:
    """Return the status of a check by which KV cannot go over a network. Nodes on loopback need none."""
    return Status.WARN if is_loopback(host) else Status.FAIL


def check_mooncake(host: str, version: Callable[[], str]) -> Check:
    try:
        return Check("Mooncake", Status.OK, version())
    except ImportError as error:
        return Check(
            "Mooncake",
            without_network(host),
            f"cannot be imported ({error}): KV goes to nodes of this machine alone",
            f"pip install {_MOONCAKE_PACKAGE}-cuda13 (or -non-cuda), apt-get install libibverbs1 libnuma1",
        )


def check_verbs(host: str, machine: Machine) -> Check:
    """Check libibverbs, without which Mooncake does not load, not even for TCP."""
    if (fault := verbs_library_fault(machine)) is not None:
        return Check.of("libibverbs", fault, without_network(host))
    devices = ", ".join(machine.verbs_devices()) or "none"
    return Check("libibverbs", Status.OK, f"loads, devices with a driver: {devices}")


def _gpu_statuses(device: str) -> tuple[Status, Status]:
    """Return the status of a check of GPUs that succeeds, and of one that fails, for a node on ``device``."""
    return (Status.OK, Status.FAIL) if device.startswith("cuda") else (Status.INFO, Status.INFO)


def check_cuda(device: str, facts: CudaFacts, machine: Machine) -> Check:
    if not facts.torch_version:  # a node on a CPU needs it, too
        return Check("CUDA", Status.FAIL, f"torch cannot be imported: {facts.error}", "install torch again")
    good, bad = _gpu_statuses(device)
    driver = _driver_version(machine)
    if facts.devices:
        found = f"{', '.join(facts.devices)}; driver {driver}, torch {facts.torch_version}"
        return Check("CUDA", good, f"{found}, CUDA {facts.cuda_version}")
    remedy = "install the NVIDIA driver and a CUDA build of torch, or use --device cpu"
    return Check.of("CUDA", Fault(f"{facts.error or 'no device'}; driver {driver}", remedy), bad)


def _driver_version(machine: Machine) -> str:
    text = read_text(machine.proc / "driver" / "nvidia" / "version")
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else "none"


def check_pinned(device: str, facts: CudaFacts) -> Check:
    """Check whether the driver pins main memory for the GPU."""
    name, shown = "pinned memory", show_bytes(_PIN_TEST_BYTES)
    good, bad = _gpu_statuses(device)
    if facts.pin_error:
        remedy = "raise the memory limit of the container, look at the kernel log (dmesg)"
        return Check.of(name, Fault(f"{shown} cannot be pinned: {facts.pin_error}", remedy), bad)
    if not facts.devices:
        return Check(name, Status.INFO, "not needed: there is no CUDA device")
    return Check(name, good, f"{shown} can be pinned")


# --- memory -----------------------------------------------------------------------------------------------


def check_memory(num_bytes: int, machine: Machine) -> Check:
    """Check whether ``num_bytes`` are free in the machine and in this process's control group; 0: only
    report."""
    free = free_memory(machine)
    if free is None:
        return Check("free memory", Status.WARN, f"{machine.proc / 'meminfo'} does not say how much")
    if num_bytes == 0:
        return Check("free memory", Status.INFO, f"{free}; give --host-pool-gib to check a pool's size")
    if (fault := memory_fault(num_bytes, machine)) is not None:
        return Check.of("free memory", fault, Status.FAIL)
    return Check("free memory", Status.OK, f"{free}, {show_bytes(num_bytes)} asked for")


def check_memlock(num_bytes: int, num_devices: int, asked: AskedProtocol, machine: Machine) -> Check:
    """Check whether ``num_bytes`` of main memory may be registered with each of ``num_devices``, at least
    one."""
    limit = machine.memlock_bytes()
    if (fault := memlock_fault(num_bytes, max(num_devices, 1), machine)) is not None:
        return Check.of("locked memory", fault, _RDMA_STATUS[asked])
    shown = "no limit" if limit is None else f"limit {show_bytes(limit)}"
    if limit is not None and may_lock_anything(machine):
        shown += ", which CAP_IPC_LOCK removes"
    return Check("locked memory", Status.INFO if asked == "tcp" else Status.OK, shown)


def check_descriptors(limit: int) -> Check:
    """Check whether a process may open enough descriptors for many clients."""
    of_router = max_connections(limit, PER_ROUTED_REQUEST)
    found = f"limit {limit}: a router has {of_router} connections at most, a node {max_connections(limit)}"
    if of_router < _MANY_CONNECTIONS:
        remedy = "raise the hard limit: LimitNOFILE= (systemd), --ulimit nofile= (docker), ulimit -Hn"
        return Check("descriptors", Status.WARN, found, remedy)
    return Check("descriptors", Status.OK, found)


# --- RDMA and the address ---------------------------------------------------------------------------------


def check_devices(asked: AskedProtocol, ib_device: str, host: str, machine: Machine) -> list[Check]:
    """Check each RDMA device that exists or is named."""
    devices = read_devices(machine)
    if not devices:
        return [Check.of("RDMA", no_device_fault(machine), _RDMA_STATUS[asked])]
    # Where RDMA is asked for, ``check_transport`` reports the fault that is left out here.
    named, _ = wanted_devices(ib_device, machine)
    any_is_usable = bool(select_devices(ib_device, host, machine).devices)
    checks = []
    for name in dict.fromkeys((*named, *devices)):
        is_asked_for = asked != "tcp" and (not named or name in named)
        device = devices.get(name)
        fault = device_fault(device, machine) if device else missing_device_fault(name, devices, machine)
        if fault is not None:
            # All named devices must be usable; without names, one that is usable is enough.
            is_fatal = asked == "rdma" and is_asked_for and (bool(named) or not any_is_usable)
            status = Status.FAIL if is_fatal else Status.WARN if is_asked_for else Status.INFO
            checks.append(Check.of(f"RDMA {name}", fault, status))
        elif device is not None:
            status = Status.OK if is_asked_for else Status.INFO
            checks.append(Check(f"RDMA {name}", status, _describe(device, host, machine)))
    return checks


def check_gpu_direct(device: str, asked: AskedProtocol, machine: Machine) -> Check:
    """Check whether a network card can write to GPU memory, which RDMA needs on a GPU node."""
    is_needed = device.startswith("cuda") and asked != "tcp"
    if (fault := gpu_direct_fault(machine)) is not None:
        return Check.of("GPU direct", fault, _RDMA_STATUS[asked] if is_needed else Status.INFO)
    return Check("GPU direct", Status.OK if is_needed else Status.INFO, f"by {gpu_direct(machine)}")


def check_address(host: str) -> Check:
    """Check the advertised address. Loopback works for a pair on one machine only."""
    name = "advertised address"
    if (fault := address_fault(host)) is not None:
        return Check.of(name, fault, Status.WARN)
    if all(address.is_loopback for address in addresses_of(host)):
        return Check(name, Status.INFO, f"{host}: only this machine can reach it")
    return Check(name, Status.OK, f"{host} belongs to this machine")


def check_transport(
    settings: TransportSettings, num_host_bytes: int, machine: Machine, near: Sequence[str] = ()
) -> tuple[Check, Transport | None]:
    """Check the KV transport of a node that registers ``num_host_bytes`` of main memory.

    ``near``: the RDMA devices nearest to that memory, preferred where none are named. Returns the check and
    the transport that a node would have, None if it would not start.
    """
    try:
        if (fault := environment_fault(machine)) is not None:
            raise TransferSetupError(str(fault))
        transport = choose_transport(settings, num_host_bytes, machine, near)
    except TransferSetupError as error:
        return failed("KV transport", error, "a node would not start: "), None
    return Check("KV transport", Status.OK, f"{transport.protocol}: {transport.reason}"), transport


def _describe(device: RdmaDevice, host: str, machine: Machine) -> str:
    """Describe a device without fault: its state, link layer and GID, and the notes of select_devices."""
    port = device.port
    assert port is not None, "a device without a port has a fault"
    words = [f"{port.state}, {port.link_layer}"]
    _, gid = port.best_gid(addresses_of(host))
    if gid is not None:
        netdev = f" of {gid.netdev}" if gid.netdev else ""
        words.append(f"GID {gid.index} {gid.ip}{netdev}, {gid.type}")
    return "; ".join((*words, *select_devices(device.name, host, machine).notes))
