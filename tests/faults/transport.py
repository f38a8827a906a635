"""A faulty Mooncake, put in where the product calls its extension, and slow copies to shared memory.

Mooncake does what a network may do, and no more. A write that returns 0 has landed completely. One that
returns an error has not landed, has landed in part, or lands later. The descriptors of one write have no
order. Copies to shared memory are slow at most: one that has returned has landed completely.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch

import hisparse_pd.transfer.engine
import hisparse_pd.transfer.lane_memory
from hisparse_pd.core.paging.extents import SlotArray
from hisparse_pd.transfer.lane_copy import copy_ranges

log = logging.getLogger(__name__)

FAILED = -1


@dataclass(frozen=True)
class FaultRates:
    """Shares of all writes, in [0, 1], which add up to 1 at most; the rest is written as it should be.

    ``dropped``: fails, and nothing lands. ``partial``: fails after some descriptors. ``late``: fails, and
    lands up to ``late_secs`` after that. ``slow``: takes up to ``slow_secs`` longer. ``twice``: written two
    times. ``shuffled``: descriptors go out in any order, in several calls.
    """

    report: str
    seed: int = 0
    dropped: float = 0.0
    partial: float = 0.0
    late: float = 0.0
    slow: float = 0.0
    twice: float = 0.0
    shuffled: float = 0.0
    late_secs: float = 2.0
    slow_secs: float = 0.5

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def choose(self, generator: random.Random) -> str:
        point = generator.random()
        for name in ("dropped", "partial", "late", "slow", "twice", "shuffled"):
            point -= getattr(self, name)
            if point < 0:
                return name
        return ""


class FaultyMooncake:
    """Stands in for ``mooncake.engine.TransferEngine``; all calls but writes go to the real one."""

    def __init__(self, mooncake: Any, rates: FaultRates) -> None:
        self._mooncake = mooncake
        self._rates = rates
        self._random = random.Random(rates.seed or None)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mooncake, name)

    def batch_transfer_sync_write(
        self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]
    ) -> int:
        with self._lock:
            fault = self._rates.choose(self._random)
            share, seed = self._random.random(), self._random.random()
        if fault:
            self._report(fault)
        writes = list(zip(src, dst, lengths, strict=True))
        match fault:
            case "dropped":
                return FAILED
            case "partial":
                self._write(session, writes[: int(share * len(writes))])
                return FAILED
            case "late":
                self._write_later(session, writes, share * self._rates.late_secs)
                return FAILED
            case "slow":
                time.sleep(share * self._rates.slow_secs)
            case "twice":
                self._write(session, writes)
            case "shuffled":
                random.Random(seed).shuffle(writes)
                middle = len(writes) // 2
                return self._write(session, writes[:middle]) or self._write(session, writes[middle:])
        return self._write(session, writes)

    def _write(self, session: str, writes: Sequence[tuple[int, int, int]]) -> int:
        if not writes:
            return 0
        src, dst, lengths = map(list, zip(*writes, strict=True))
        return int(self._mooncake.batch_transfer_sync_write(session, src, dst, lengths))

    def _write_later(self, session: str, writes: Sequence[tuple[int, int, int]], secs: float) -> None:
        """Land the bytes ``secs`` later as they are now, like bytes that wait in a socket."""
        lengths = [length for _, _, length in writes]
        content = b"".join(_read(src, length) for src, _, length in writes)
        held = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        starts = [held.data_ptr() + sum(lengths[:number]) for number in range(len(lengths))]
        moved = list(zip(starts, [dst for _, dst, _ in writes], lengths, strict=True))

        def land() -> None:
            self._mooncake.register_memory(held.data_ptr(), held.nbytes)
            code = self._write(session, moved)
            self._mooncake.unregister_memory(held.data_ptr())
            self._report("landed late" if code == 0 else "late and lost")

        threading.Timer(secs, land).start()

    def _report(self, fault: str) -> None:
        report(self._rates, fault)


def report(rates: FaultRates, fault: str) -> None:
    """Write a line for a fault, which lasts even if this process is killed at once."""
    descriptor = os.open(rates.report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{fault}\n".encode())
    os.close(descriptor)


def _read(address: int, num_bytes: int) -> bytes:
    """Bytes of main memory, or of a GPU's where CUDA is in use."""
    if not torch.cuda.is_initialized():
        return ctypes.string_at(address, num_bytes)
    from cupy.cuda import runtime

    content = ctypes.create_string_buffer(num_bytes)
    runtime.memcpy(ctypes.addressof(content), address, num_bytes, runtime.memcpyDefault)
    return content.raw


def break_transport(rates_json: str) -> None:
    """Give this process's further ``TransferEngine``s a ``FaultyMooncake``, and slow its copies."""
    rates = FaultRates(**json.loads(rates_json))
    make = hisparse_pd.transfer.engine.new_mooncake_engine
    hisparse_pd.transfer.engine.new_mooncake_engine = lambda: FaultyMooncake(make(), rates)
    patch("hisparse_pd.transfer.lane_memory.copy_ranges", SlowCopies(rates)).start()


class SlowCopies:
    """Stands in for ``transfer.lane_copy.copy_ranges``; the second half of some copies is up to ``slow_secs``
    late.
    """

    def __init__(self, rates: FaultRates) -> None:
        self._rates = rates
        self._random = random.Random(rates.seed or None)

    def __call__(self, src: SlotArray, dst: SlotArray, lengths: SlotArray) -> None:
        middle = lengths.size // 2
        copy_ranges(src[:middle], dst[:middle], lengths[:middle])
        if self._random.random() < self._rates.slow:
            report(self._rates, "slow copy")
            time.sleep(self._random.random() * self._rates.slow_secs)
        copy_ranges(src[middle:], dst[middle:], lengths[middle:])
