"""Carries out a ``Placement``: binds a process's threads to CPUs and its pools to a NUMA node.

An engine calls ``bind_threads`` first at its start, because threads inherit the CPUs of the thread that
starts them and pages come from the node of the CPU that touches them first. ``allocate_host`` calls
``place_memory`` for each pool. Pools are bound explicitly as well (``mbind``), because only then does a full
node give up file pages instead of the kernel taking memory of another node. Where another process maps the
pool, its pages keep this policy. No function here ends a start: what the kernel refuses is logged with its
remedy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from hisparse_pd.core.memory.machine import Fault
from hisparse_pd.core.memory.numa import Placement, PoolPolicy

log = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")
_MASK_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

MemoryBinder = Callable[[int, int, PoolPolicy, int], None]
"""The type of ``mbind``; tests pass their own. The arguments are address, bytes, policy and node."""


def mbind(addr: int, num_bytes: int, policy: PoolPolicy, node: int) -> None:
    """Set the policy for the pages of a mapping before they are touched; ``addr`` starts a page.

    Calls libnuma, which Mooncake needs as well and which knows the system call's number on each architecture.
    Raises OSError, also without libnuma.
    """
    numa = ctypes.CDLL("libnuma.so.1", use_errno=True)
    mask = (ctypes.c_ulong * (node // _MASK_BITS + 1))()
    mask[node // _MASK_BITS] = 1 << node % _MASK_BITS
    num_bits = len(mask) * _MASK_BITS + 1  # the kernel subtracts one
    numa.mbind.restype = ctypes.c_long
    numa.mbind.argtypes = [
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int),
        *(ctypes.POINTER(ctypes.c_ulong), ctypes.c_ulong, ctypes.c_uint),
    ]
    if numa.mbind(addr, num_bytes, policy, mask, num_bits, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mbind to NUMA node {node}: {os.strerror(code)}")


def bind_threads(
    placement: Placement, set_affinity: Callable[[int, Collection[int]], None] = os.sched_setaffinity
) -> None:
    """Keep all threads that this process has, and those that they start, on the CPUs of the placement."""
    if placement.node is None:
        return
    try:
        for thread in _THREADS.iterdir():  # libraries start threads when they are imported
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                set_affinity(int(thread.name), placement.cpus)
    except OSError as error:
        log.warning(
            "NUMA: threads stay where they are: CPUs of node %d cannot be set: %s; see that nothing confines "
            "sched_setaffinity, or give --numa off",
            placement.node,
            error,
        )


def policy_fault(node: int, bind: MemoryBinder = mbind) -> Fault | None:
    """Return why this process cannot bind memory to ``node``, or None; tried on one page."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        anchor = ctypes.c_char.from_buffer(page)
        try:
            bind(ctypes.addressof(anchor), mmap.PAGESIZE, PoolPolicy.PREFERRED, node)
        except OSError as error:
            remedy = "see what confines the process (seccomp)"
            if error.errno in (errno.EPERM, errno.ENOSYS):
                remedy = "give the container the capability SYS_NICE (docker: --cap-add SYS_NICE)"
            elif error.errno is None:  # the library, not the kernel, has failed
                remedy = "apt-get install libnuma1"
            return Fault(f"pools cannot be asked for from NUMA node {node} ({error})", remedy)
        finally:
            del anchor  # a reference would keep the page from being unmapped
    return None


def with_allowed_policy(placement: Placement, bind: MemoryBinder = mbind) -> Placement:
    """Return the placement, with PoolPolicy.FIRST_TOUCH where this process may not set a policy."""
    if placement.node is None or placement.policy is PoolPolicy.FIRST_TOUCH:
        return placement
    fault = policy_fault(placement.node, bind)
    if fault is None:
        return placement
    return replace(placement, policy=PoolPolicy.FIRST_TOUCH, remedy=str(fault))


def place_memory(
    addr: int, num_bytes: int, placement: Placement, name: str, bind: MemoryBinder = mbind
) -> None:
    """Set the placement's policy for a mapping, before its pages are touched. ``name``: the pool's, for the
    log."""
    if placement.node is None or placement.policy is PoolPolicy.FIRST_TOUCH:
        return
    try:
        bind(addr, num_bytes, placement.policy, placement.node)
    except OSError as error:
        log.warning("NUMA: %s is where it is touched first: %s", name, error)
