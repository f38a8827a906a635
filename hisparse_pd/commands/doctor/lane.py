"""The shared-memory lane between two nodes of one machine: checks that it works, and opens one to measure it.

``command.py`` makes the checks, ``bandwidth.py`` opens the lane to another doctor. The check does what nodes
do: it hands memory over a Unix socket, maps it and writes to it.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from hisparse_pd.commands.doctor.checks import Check, Status, failed
from hisparse_pd.core.memory.machine import Machine, read_text
from hisparse_pd.protocol.lane import LaneOffer
from hisparse_pd.transfer.engine import TransferEngine
from hisparse_pd.transfer.errors import TransferSetupError
from hisparse_pd.transfer.lane import Lane, Lanes
from hisparse_pd.transfer.lane_host import LaneHost, SharedMemory
from hisparse_pd.transfer.lane_memory import LaneError, Mapping
from hisparse_pd.transfer.plan import as_descriptors

if TYPE_CHECKING:
    from hisparse_pd.core.memory.peer import GpuWriter

OPEN_SECS = 30.0
"""Limit for opening the other doctor's memory and registering it with CUDA, whose first use takes seconds."""
_TRIAL_BYTES = 4096
"""Size of the memory that the check hands over."""
_REGISTER_BYTES_PER_SEC = 1.5e9
"""Speed at which CUDA registers shared memory with pages of 4 KiB."""
_HUGE = ("always", "within_size", "advise", "force")
"""Values of ``shmem_enabled`` with which shared memory gets the huge pages that it asks for."""


def check_lane(directory: str) -> Check:
    """Check the lane: hand memory from one end to the other, with the socket in ``directory``, and write to
    it."""
    from hisparse_pd.core.memory.host import HostMemoryError, allocate_host

    name, where = "same-host lane", f"sockets in {directory}" if directory else "abstract names"
    sent = np.arange(_TRIAL_BYTES, dtype=np.int64).astype(np.uint8)
    try:
        with closing(allocate_host(_TRIAL_BYTES, pinned=False, shared=True, name=name)) as pool:
            assert pool.mapping is not None, "the pool is open"
            received = np.frombuffer(pool.mapping, dtype=np.uint8, count=_TRIAL_BYTES)  # needs no torch
            memory = SharedMemory(received.ctypes.data, received.nbytes, pool.shared_fd)
            with (
                closing(LaneHost([memory], directory=directory)) as host,
                closing(Mapping(host.offer, "doctor", directory)) as mapping,
            ):
                mapping.write(as_descriptors(([sent.ctypes.data], [memory.addr], [sent.nbytes])))
            arrived = np.array_equal(received, sent)
    except (HostMemoryError, TransferSetupError) as error:
        return failed(name, error, "a decode node would not start: ")
    except LaneError as error:
        remedy = "look at what confines the process (seccomp, LSM), or set --same-host-lane off"
        return Check(name, Status.WARN, f"nodes of this machine would use the network: {error}", remedy)
    if not arrived:
        return Check(name, Status.FAIL, "the written bytes did not arrive", "set --same-host-lane off")
    return Check(name, Status.OK, f"memory passes between processes of this machine, by {where}")


def check_shared_pages(device: str, num_bytes: int, machine: Machine) -> Check:
    """Check whether a shared pool of ``num_bytes`` gets huge pages; 0: its size is not known."""
    path = machine.sys / "kernel/mm/transparent_hugepage/shmem_enabled"
    name, is_needed = "pages of shared memory", device.startswith("cuda")
    match = re.search(r"\[(\w+)\]", read_text(path))
    setting = match[1] if match else "not there"
    if setting in _HUGE:
        status = Status.OK if is_needed else Status.INFO
        return Check(name, status, f"shmem_enabled is {setting}: pools get huge pages")
    found = f"shmem_enabled is {setting}: pools have pages of 4 KiB"
    if not is_needed:
        return Check(name, Status.INFO, found)
    found += f", which CUDA registers at some {_REGISTER_BYTES_PER_SEC / 1e9:g} GB/s"
    if num_bytes:
        found += f", {num_bytes / _REGISTER_BYTES_PER_SEC:.0f} s for --host-pool-gib"
    remedy = f"as root: echo advise > {path}; or --same-host-lane off where a node is alone on its machine"
    return Check(name, Status.WARN, found, remedy)


@contextmanager
def lane_to(
    offer: LaneOffer | None,
    session: str,
    region: tuple[int, int],
    engine: TransferEngine,
    directory: str,
    gpu: GpuWriter | None,
) -> Iterator[tuple[Lanes, Lane]]:
    """Open the lane to the doctor at ``session``, whose memory is ``region`` (address and bytes).

    ``offer``: how to map that memory; None if it cannot be. ``gpu``: copies from this doctor's GPU, None if
    its bytes are in main memory. Yields the ``Lanes``, through which to write, and the lane: its ``kind`` is
    shm, or the network's, and its ``reason`` says why.
    """
    decided = threading.Event()
    lanes = Lanes(
        engine,
        engine.transport.protocol,
        f"doctor-{secrets.token_hex(4)}",
        directory=directory,
        on_decided=decided.set,
        gpu=gpu,
    )
    with closing(lanes):
        lane = lanes.register(session, offer, [region])  # None while the memory is being opened
        if offer is not None:
            decided.wait(OPEN_SECS)
            lane = lanes.lane(session)
        yield lanes, lane or Lane(engine.transport.protocol, f"not decided within {OPEN_SECS:g} s")
