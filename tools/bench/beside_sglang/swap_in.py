"""SGLang's swap-in kernel beside ours, on the same selections of one layer, on one GPU.

    PYTHONPATH=/tmp/sglang/_ours python3 -m tools.bench.beside_sglang.swap_in --guest /tmp/sglang --full \\
        --context 65536 --item 656 --capacity 8192 16384 32768 --batch 1 8 32 64 --miss 0 2 10 30 --repeat 3

The cells and how they are timed are those of ``tools/bench/swap_in.py``: the calls of ours, verified and not,
and of SGLang's kernel with 960 threads, its default, and with 1,024. Each repetition builds all of them anew,
one after the other, and compares the bytes in the slots that each returned last with the host's. The ratio is
SGLang's better time over ours, verified. SGLang's kernel is compiled first; the command runs itself again
with the guest's packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tools.bench.beside_sglang.environment import GuestMissing, check_guest, guest_command, guest_environment
from tools.bench.beside_sglang.prewarm import SWAP_IN_THREADS
from tools.bench.facts import OUT, gpus, spread
from tools.bench.report import make_console, table_of, write_report
from tools.bench.swap_in import (
    NUM_TOKENS,
    NUM_WARM_TOKENS,
    PAGE_SIZE,
    POOL_BYTES,
    TOP_K,
    Calls,
    Cell,
    add_options,
    calls_behind_filling,
    pinned_pool,
    selections,
    us_of_calls,
)

THREADS: Final = (SWAP_IN_THREADS, 1024)
COMPILE_SECS: Final = 240.0
"""Longest time that compiling SGLang's kernel takes, all variants at once."""


class GuestCell:
    """Requests with empty hot buffers of SGLang's, over one host pool.

    ``host``: uint8 [1, num_slots, item_bytes], pinned. The rows of a request lie together, followed by those
    of the next.
    """

    def __init__(self, host: Tensor, batch: int, context: int, capacity: int, num_threads: int) -> None:
        from sglang.kernels.ops.kvcache.hisparse import load_cache_to_device_buffer_mla

        self._swap_in = load_cache_to_device_buffer_mla
        self._threads, self._capacity, self._item_bytes = num_threads, capacity, host.shape[2]
        self._host = host[0]
        self._slots_each = -(-context // PAGE_SIZE) * PAGE_SIZE
        entries = capacity + PAGE_SIZE  # behind the entries lies a page for the newest token
        self._dev = torch.zeros((batch * entries, host.shape[2]), dtype=torch.uint8, device="cuda")
        self._positions = torch.full((batch, entries), -1, dtype=torch.int32, device="cuda")
        self._slots = torch.arange(batch * entries, dtype=torch.int32, device="cuda").view(batch, entries)
        self._ages = torch.arange(capacity, dtype=torch.int16, device="cuda").repeat(batch, 1)
        slots = torch.arange(batch * self._slots_each, device="cuda")
        self._host_slots = slots.view(batch, self._slots_each)
        self._rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        self._num_real = torch.zeros(1, dtype=torch.int32, device="cuda")

    def prepare(self, selected: Tensor, seq_lens: Tensor, out: Tensor) -> None:
        self.call(selected, seq_lens, out)
        self._num_real.fill_(len(self._rows))

    def call(self, selected: Tensor, seq_lens: Tensor, out: Tensor) -> None:
        self._swap_in(
            top_k_tokens=selected,
            device_buffer_tokens=self._positions,
            host_cache_locs=self._host_slots,
            device_buffer_locs=self._slots,
            host_cache=self._host,
            device_buffer=self._dev,
            top_k_device_locs=out,
            req_pool_indices=self._rows,
            seq_lens=seq_lens,
            lru_slots=self._ages,
            item_size_bytes=self._item_bytes,
            num_top_k=TOP_K,
            hot_buffer_size=self._capacity,
            page_size=1,
            block_size=self._threads,
            num_real_reqs=self._num_real,
        )

    def forget_counts(self) -> None:
        """Do nothing: SGLang's kernel counts nothing."""

    def verify(self, selected: Tensor, out: Tensor) -> None:
        for row, (positions, slots) in enumerate(zip(selected.cpu(), out.long(), strict=True)):
            wanted = self._host[positions.long() + row * self._slots_each]
            if not torch.equal(self._dev[slots].cpu(), wanted):
                raise RuntimeError(f"SGLang's kernel, row {row}: a returned slot holds other bytes")


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each cell: its settings, the us of each kernel, and the ratio."""
    pool = pinned_pool()
    for item_bytes, batch, miss in itertools.product(options.item, options.batch, options.miss):
        num_slots = POOL_BYTES // item_bytes
        host = pool[: num_slots * item_bytes].view(1, num_slots, item_bytes)
        tokens = selections(NUM_TOKENS, batch, miss, options.seed, context=options.context)
        for capacity in options.capacity:
            row = {"item_bytes": item_bytes, "batch": batch, "miss_percent": miss, "capacity": capacity}
            yield row | measure(host, tokens, capacity, options)


def measure(host: Tensor, tokens: Tensor, capacity: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell, the kernels by turns. ``tokens``: see ``tools.bench.swap_in.measure``."""
    batch, context = tokens.shape[1], options.context
    calls, num_filling = calls_behind_filling(tokens, 1, capacity, options)
    num_warm = NUM_WARM_TOKENS + num_filling
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    out = torch.empty_like(calls[0])
    found: dict[str, list[float]] = {}
    for _ in range(options.repeat):
        for name in ("ours", "ours_verified", *(f"sglang_{threads}" for threads in THREADS)):
            cell: Calls
            if name.startswith("ours"):
                cell = Cell(host, batch, context, capacity, "cuda", verifies=name == "ours_verified")
            else:
                cell = GuestCell(host, batch, context, capacity, int(name.rpartition("_")[2]))
            found.setdefault(name, []).append(us_of_calls(cell, calls, num_warm, seq_lens, out))
            del cell
    figures: dict[str, Any] = {name: spread(values) for name, values in found.items()}
    guest = min(figures[f"sglang_{threads}"]["median"] for threads in THREADS)
    return figures | {"ratio": guest / figures["ours_verified"]["median"]}


def compile_guest(options: argparse.Namespace) -> None:
    """Compile SGLang's kernel for all cells, each variant in a process of its own. What fails is compiled
    again where it is called, which raises then."""
    kinds = itertools.product(options.item, THREADS, options.capacity)
    processes = [
        subprocess.Popen(guest_command("prewarm", "--jobs", json.dumps([job])))
        for item_bytes, threads, capacity in kinds
        for job in [
            ("jit", "kvcache.hisparse", "_jit_sparse_module", item_bytes, threads, TOP_K, capacity, True)
        ]
    ]
    for process in processes:
        process.wait(COMPILE_SECS)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.beside_sglang.swap_in",
        description="SGLang's swap-in kernel beside ours, on the same selections.",
    )
    parser.add_argument("--guest", type=Path, required=True, help="folder with SGLang and what it needs")
    add_options(parser)
    parser.add_argument("--out", type=Path, default=OUT / "beside_sglang_swap_in.json", help="JSON file")
    options = parser.parse_args(words)
    if options.new != [1] or options.verify_rows:
        parser.error(
            "--new and --verify-rows: one new position, with checks and without, is what is compared"
        )
    return options


def main(words: list[str]) -> int:
    options = parse(words)
    if importlib.util.find_spec("sglang") is None:
        try:
            check_guest(options.guest)
        except GuestMissing as missing:
            print(missing, file=sys.stderr)
            return 1
        environment = guest_environment(options.guest, options.guest / "_cache")
        os.execve(sys.executable, guest_command("swap_in", *words), environment)
    compile_guest(options)
    console, found = make_console(), []
    for row in cells(options):
        found.append(row)
        write_report(options.out, {"gpus": gpus(), "cells": found})
    console.print(table_of(f"Swap-in beside SGLang's on {torch.cuda.get_device_name()}, us a call", found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
