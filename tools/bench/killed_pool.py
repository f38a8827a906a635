"""Measures how long the kernel takes to end a process that has registered a large host pool with CUDA.

    python -m tools.bench.killed_pool [--gib 60] [--repeats 3] [--out STEM]

A child allocates the pool as a decode node does (a memfd, touched by all cores, registered with CUDA), lets
the GPU read and write up to a GiB of it all the time, and is killed with SIGKILL, or ends by itself after
``close``. The time runs from the signal, or from the order to close, until the kernel reports the process's
end, which it does once the process has given its memory back.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.bench.facts import OUT, spread
from tools.bench.report import make_console, table_of, write_report

END_SECS = 300.0
"""Limit for a child's end."""
CHILD = """
import sys, threading
import torch
from hisparse_pd.core.memory.host import allocate_host

pool = allocate_host(int(float(sys.argv[1]) * 2**30), pinned=True, shared=True)
words = pool.tensor
on_gpu = torch.zeros(min(len(words), 1 << 30), dtype=torch.uint8, device="cuda")
ended = threading.Event()


def copy() -> None:
    while not ended.is_set():
        on_gpu.copy_(words[: len(on_gpu)], non_blocking=True)
        words[: len(on_gpu)].copy_(on_gpu, non_blocking=True)
        torch.cuda.synchronize()


copying = threading.Thread(target=copy)
copying.start()
print("ready", flush=True)
sys.stdin.readline()
ended.set()
copying.join()
del words
pool.close()
"""
"""The child's program, whose argument is the pool's GiB. It prints "ready", and closes at a line of input."""


def end_secs(gib: float, *, kill: bool) -> tuple[float, float]:
    """Return the seconds until the pool is ready, and from the signal or order until the process is gone."""
    started = time.perf_counter()
    command = [sys.executable, "-c", CHILD, str(gib)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if child.stdout.readline().strip() != "ready":
            raise SystemExit(f"a pool of {gib:g} GiB cannot be had here; see above")
        ready = time.perf_counter()
        if kill:
            child.send_signal(signal.SIGKILL)
        else:
            child.stdin.write("close\n")
            child.stdin.flush()
        child.wait(END_SECS)
        return ready - started, time.perf_counter() - ready


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[4.0, 60.0], help="sizes of the pool, GiB")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each kind")
    parser.add_argument("--out", type=Path, default=OUT / "killed_pool", help="stem of the JSON file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for gib in arguments.gib:
        for kill in (True, False):
            times = [end_secs(gib, kill=kill) for _ in range(arguments.repeats)]
            ready, gone = (spread(values) for values in zip(*times, strict=True))
            end = "SIGKILL" if kill else "close"
            rows.append({"gib": gib, "ended_by": end, "ready_secs": ready, "gone_secs": gone})
    write_report(arguments.out, {"cells": rows})
    make_console().print(table_of("A registered pool's end, seconds", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
