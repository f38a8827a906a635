"""Measures the bytes per second of the sender, over TCP and over shared memory.

    python -m tools.bench.transfer [--quick] [--out DIR]

The peer is a process of its own on loopback. "Sender" is the product's path from slots to completion: plan,
descriptors, queue, write; "shared memory" is the same over the lane of two nodes of one machine. "Raw" is
Mooncake alone, which writes the plan's descriptors from one thread. All are measured in turn, after a write
whose bytes are checked in the peer. "Of raw" is the median over the turns of the sender's rate divided by
that of raw Mooncake in the same turn, because a shared machine drifts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from hisparse_pd.core.memory.host import allocate_host
from hisparse_pd.core.paging.allocator import ExtentAllocator
from hisparse_pd.core.paging.extents import SlotArray, SlotRanges, extents_to_slots, ranges_to_slots
from hisparse_pd.protocol.lane import LaneOffer
from hisparse_pd.protocol.messages import Room
from hisparse_pd.transfer.engine import MAX_BATCH_DESCRIPTORS, TransferEngine, quiet_mooncake_logs
from hisparse_pd.transfer.lane import Lanes
from hisparse_pd.transfer.lane_host import LaneHost, SharedMemory
from hisparse_pd.transfer.plan import (
    Descriptors,
    LayerWrites,
    RegionView,
    RunPlan,
    SlicedWrites,
    descriptors,
    plan_writes,
)
from hisparse_pd.transfer.sender import Sender, WriteBatch
from tools.bench.facts import OUT, ROOT, spread
from tools.bench.report import make_console, table_of, write_report

PAGE_SIZE = 64
ITEM_BYTES = {"bf16": 1152, "fp8": 656}
"""Bytes of an item of DeepSeek-V3.2's KV, by its format."""
ZONES = ("fresh", "fragmented")
"""The states of the pools: empty, or full of holes of one page."""
WAIT_SECS = 120.0
"""Limit for one transfer, and for the peer's end."""
SHARED = "shared memory"
"""The name that stands for the session of the shared-memory lane."""
SEED = 20261121


@dataclass(frozen=True)
class Scale:
    """The extent of the measurements. ``zone_secs``: time after which repetitions past the second are left
    out."""

    tokens: int = 32_768
    layers: int = 4
    repetitions: int = 15
    zone_secs: float = 4.0


QUICK = Scale(2048, 2, 3, 1.0)


@dataclass(frozen=True)
class Zone:
    """The places of a request: pages at the source, token slots at the destination."""

    page_ids: NDArray[np.int64]
    dst_slots: SlotArray

    def src_slots(self) -> SlotArray:
        return ranges_to_slots(*self._src_ranges())

    def runs(self) -> RunPlan:
        return plan_writes(self._src_ranges(), SlotRanges.of_slots(self.dst_slots))

    def _src_ranges(self) -> SlotRanges:
        return SlotRanges.of_pages(self.page_ids, PAGE_SIZE, 0, self.dst_slots.size)


def make_zone(kind: str, num_tokens: int, num_slots: int) -> Zone:
    """Return a request of ``num_tokens`` in pools of ``num_slots``, which are empty or fragmented into
    pages."""
    rng = np.random.default_rng(SEED)
    num_pages = -(-num_tokens // PAGE_SIZE)
    if kind == "fresh":
        return Zone(np.arange(num_pages), np.arange(num_tokens))
    page_ids = rng.permutation(num_slots // PAGE_SIZE)[:num_pages]
    allocator = ExtentAllocator(num_slots, PAGE_SIZE)
    pages = [allocator.allocate(PAGE_SIZE) for _ in range(num_slots // PAGE_SIZE)]
    # An eighth more holes than the request needs, so that the allocator has a choice.
    for page in rng.permutation(len(pages))[: num_pages + num_pages // 8]:
        allocator.free(pages[page])
    return Zone(page_ids, extents_to_slots(allocator.allocate(num_tokens))[:num_tokens])


class Link:
    """This process's memory and engine, and the peer process, to which all measurements write."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.memory = np.random.default_rng(SEED).integers(0, 256, num_bytes, dtype=np.uint8)
        self.engine = TransferEngine("127.0.0.1")
        self.src_addr = self.engine.register(torch.from_numpy(self.memory))
        self._done = threading.Event()
        self._lanes = Lanes(self.engine, "tcp", "bench")
        self._sender = Sender(self._lanes, self._done.set)
        self._num_rooms = 0
        self._peer = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.transfer", "--peer", str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        session, addr, offer = self._ask("").split()
        self.session, self.dst_addr = session, int(addr)
        self._lanes.register(self.session, None, [(self.dst_addr, num_bytes)])
        self._lanes.register(SHARED, msgspec.json.decode(offer, type=LaneOffer), [(self.dst_addr, num_bytes)])
        while (lane := self._lanes.lane(SHARED)) is None:
            time.sleep(0.001)
        if lane.kind != "shm":
            raise RuntimeError(f"the peer's memory cannot be shared: {lane.reason}")

    def send(self, zone: Zone, src: RegionView, dst: RegionView, session: str = "") -> None:
        """Send by the product's path: plan, descriptors, queue, write, completion. ``session``: empty for
        TCP."""
        writes = SlicedWrites([LayerWrites(zone.runs(), src, dst, 0, src.num_layers)])
        self._num_rooms += 1
        self._done.clear()
        batch = WriteBatch(Room(self._num_rooms), "bench", writes, writes.num_bytes)
        self._sender.submit(session or self.session, batch)
        if not self._done.wait(WAIT_SECS):
            raise TimeoutError(f"no completion within {WAIT_SECS} s")
        (completion,) = self._sender.poll()
        if not completion.ok:
            raise RuntimeError(completion.error)

    def write_raw(self, writes: Descriptors) -> None:
        """Write by Mooncake's own batch write, in calls as large as the sender's."""
        for first in range(0, writes.lengths.size, MAX_BATCH_DESCRIPTORS):
            src, dst, lengths = (column[first : first + MAX_BATCH_DESCRIPTORS].tolist() for column in writes)
            if code := self.engine.mooncake.batch_transfer_sync_write(self.session, src, dst, lengths):
                raise RuntimeError(f"Mooncake's batch write returned {code}")

    def take_crc(self) -> int:
        """Return the CRC-32 of the peer's memory, and zero that memory."""
        return int(self._ask("crc"))

    def close(self) -> None:
        self._sender.close(WAIT_SECS)
        self._lanes.close()
        self._peer.communicate(timeout=WAIT_SECS)
        self.engine.close()

    def _ask(self, question: str) -> str:
        """Return the peer's answer: to ``crc`` the checksum, to an empty line its session, address and
        offer."""
        assert self._peer.stdin is not None
        assert self._peer.stdout is not None
        self._peer.stdin.write(f"{question}\n")
        self._peer.stdin.flush()
        return self._peer.stdout.readline()


@contextmanager
def open_link(num_bytes: int) -> Iterator[Link]:
    link = Link(num_bytes)
    try:
        yield link
    finally:
        link.close()


def run_peer(num_bytes: int) -> NoReturn:
    """Run the other process: it tells where its memory is, and answers until its input ends."""
    pool = allocate_host(num_bytes, pinned=False, shared=True)
    memory = pool.tensor.numpy()
    engine = TransferEngine("127.0.0.1")
    addr = engine.register(pool.tensor)
    host = LaneHost([SharedMemory(addr, num_bytes, pool.shared_fd)])
    for line in sys.stdin:
        if line.strip() == "crc":
            crc = zlib.crc32(memory.data)
            memory[:] = 0
            print(crc, flush=True)
        else:
            print(engine.session, addr, msgspec.json.encode(host.offer).decode(), flush=True)
    os._exit(0)  # Mooncake's own exit takes a second


def measure_zone(link: Link, dtype: str, kind: str, scale: Scale) -> dict[str, Any]:
    """Measure the GB/s into one kind of zone."""
    item_bytes, num_layers = ITEM_BYTES[dtype], scale.layers
    num_slots = 2 * scale.tokens
    zone = make_zone(kind, scale.tokens, num_slots)
    src, dst = (
        RegionView(addr, link.num_bytes, num_layers, num_slots, item_bytes)
        for addr in (link.src_addr, link.dst_addr)
    )
    for session in ("", SHARED):
        check_landed(link, zone, src, dst, session)
    writes = descriptors(zone.runs(), src, dst, range(num_layers))
    num_bytes = writes.num_bytes

    writers: dict[str, Callable[[], None]] = {
        "sender": partial(link.send, zone, src, dst),
        "shared_memory": partial(link.send, zone, src, dst, SHARED),
        "raw": partial(link.write_raw, writes),
    }
    rates = measure_in_turns(writers, scale.repetitions, num_bytes, max_secs=scale.zone_secs)
    side_by_side = [ours / theirs for ours, theirs in zip(rates["sender"], rates["raw"], strict=True)]
    return {
        "zone": kind,
        "dtype": dtype,
        "item_bytes": item_bytes,
        "num_tokens": scale.tokens,
        "num_layers": num_layers,
        "num_bytes": num_bytes,
        "num_descriptors": int(writes.lengths.size),
        **{name: spread(found) for name, found in rates.items()},
        "of_raw": spread(side_by_side),
    }


def check_landed(link: Link, zone: Zone, src: RegionView, dst: RegionView, session: str) -> None:
    """Send once, and compare all of the peer's memory with what must be there."""
    link.take_crc()  # zeroes the memory
    link.send(zone, src, dst, session)
    shape = (src.num_layers, src.num_slots, src.item_bytes)
    size = src.num_layers * src.layer_bytes
    expected = np.zeros(link.num_bytes, np.uint8)
    expected[:size].reshape(shape)[:, zone.dst_slots] = link.memory[:size].reshape(shape)[:, zone.src_slots()]
    if link.take_crc() != zlib.crc32(expected.data):
        raise RuntimeError("the bytes in the peer's memory are not those that were sent")


def measure_in_turns(
    writers: dict[str, Callable[[], None]], repetitions: int, num_bytes: int, max_secs: float
) -> dict[str, list[float]]:
    """Return the GB/s of each of ``writers``, measured in turn, in an order that rotates. ``max_secs``:
    ``Scale.zone_secs``."""
    rates: dict[str, list[float]] = {name: [] for name in writers}
    started = time.monotonic()
    for repetition in range(repetitions):
        if repetition >= 2 and time.monotonic() - started > max_secs:
            break
        names = list(writers)
        first = repetition % len(names)
        for name in names[first:] + names[:first]:
            rates[name].append(num_bytes / timed(writers[name]) / 1e9)
    return rates


def timed(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.transfer", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; the numbers mean nothing")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of transfer.json")
    parser.add_argument("--peer", type=int, metavar="NUM_BYTES", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    quiet_mooncake_logs()
    if options.peer is not None:
        run_peer(options.peer)
    started = time.monotonic()
    scale = QUICK if options.quick else Scale()
    report: dict[str, Any] = {"scale": asdict(scale)}
    num_bytes = scale.layers * 2 * scale.tokens * max(ITEM_BYTES.values())
    with open_link(num_bytes) as link:
        report["wire"] = [measure_zone(link, dtype, kind, scale) for kind in ZONES for dtype in ITEM_BYTES]
    report["total_secs"] = time.monotonic() - started

    console = make_console()
    console.print(table_of("Wire, GB/s", report["wire"]))
    write_report(options.out / "transfer", report)
    console.print(f"{report['total_secs']:.0f} s; wrote transfer.json to {options.out}")
    return report


if __name__ == "__main__":
    main()
