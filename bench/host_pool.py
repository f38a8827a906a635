"""How long does a host pool take until it can be used: mapped, touched, registered with CUDA, by its owner
and once more by a process that writes to it?

    python -m bench.host_pool [--gib 16]

Shared and private memory, in the pages that this machine gives them: of shared memory
``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` decides that.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from rich.console import Console
from rich.table import Table

from kernels.host_memory import CudaPinning, HostPool, allocate_host

SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def huge_gib() -> float:
    """Of anonymous and shared memory, on the machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    values = dict(line.split(":") for line in lines)
    return sum(int(values[name].split()[0]) for name in ("AnonHugePages", "ShmemHugePages")) / (1 << 20)


def register_again(pool: HostPool) -> float:
    """Seconds for a second mapping of shared memory, which stands for another process's."""
    if pool.shared_fd is None:
        return float("nan")
    with mmap.mmap(pool.shared_fd, pool.num_bytes, flags=mmap.MAP_SHARED) as again:
        addr = int(np.frombuffer(again, np.uint8).ctypes.data)
        started = time.perf_counter()
        CudaPinning().register(addr, pool.num_bytes)
        secs = time.perf_counter() - started
        CudaPinning().unregister(addr)
    return secs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=int, default=16)
    args = parser.parse_args()
    table = Table(title=f"{args.gib} GiB, seconds; shmem_enabled: {SHMEM_ENABLED.read_text().strip()}")
    for column in ("memory", "huge pages, GiB", "map", "touch", "register", "register again"):
        table.add_column(column)
    for shared in (True, False):
        before = huge_gib()
        pool = allocate_host(args.gib << 30, pinned=True, shared=shared)
        secs = pool.start_secs
        table.add_row(
            "shared" if shared else "private",
            f"{huge_gib() - before:.1f}",
            *(f"{value:.2f}" for value in (secs.mapping, secs.touch, secs.pinning, register_again(pool))),
        )
        pool.close()
    Console().print(table)


if __name__ == "__main__":
    main()
