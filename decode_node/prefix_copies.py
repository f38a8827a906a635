"""Owns the copies of held prefixes to requests of the other mode: from host to device for dense, and back.

A request that begins like what one of the other mode left needs the KV in the other pool, and indexer keys of
its own beside it: its first slots are filled from the prefix's, its ``source`` meanwhile. That is done
a slice in a turn of the engine's loop, while the rest of the prompt is computed and sent, so that no step
waits for more than a slice. On a GPU a slice runs in a stream of its own beside the step, and the next one
follows when it is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from decode_node.held_prefixes import KV_POOL
from decode_node.memory import DecodeMemory
from decode_node.pools import PoolKind
from decode_node.request import Request
from transfer.extents import extents_to_slots
from transfer.plan import plan_writes

SLICE_BYTES: Final = 32 << 20
"""0.7 ms of PCIe beside a step."""
SLICE_COPIES: Final = 256
"""Of ranges that lie apart: some 4 us of the engine's thread each."""


class PrefixCopies:
    """One copy after the other, each of a request that has a ``source``."""

    def __init__(self, memory: DecodeMemory, slice_bytes: int = SLICE_BYTES) -> None:
        self.slice_bytes = slice_bytes
        self._memory = memory
        self._pending: dict[Request, Iterator[None]] = {}
        device = memory.k_dev.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._slice_done: torch.cuda.Event | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    def start(self, request: Request) -> None:
        """Begin to fill the first slots of ``request`` from its source; ``turn`` goes on with it."""
        self._pending[request] = self._slices(request)

    def turn(self) -> Request | None:
        """The next slice of whoever is first, once the last one is over. Whose copy is complete by that."""
        if not self._pending or (self._slice_done is not None and not self._slice_done.query()):  # type: ignore[no-untyped-call]
            return None
        request, slices = next(iter(self._pending.items()))
        if self._copy_slice(slices):
            return None
        del self._pending[request]
        return request

    def finish(self, request: Request) -> None:
        """Wait until all of it is copied."""
        slices = self._pending.pop(request)
        while self._copy_slice(slices):
            pass
        self._wait()

    def drop(self, request: Request) -> None:
        """Copy no more of it; its slots and its source are read and written no more."""
        if self._pending.pop(request, None) is not None:
            self._wait()

    def _copy_slice(self, slices: Iterator[None]) -> bool:
        """False: there was none left, and all before are over or in order before what follows."""
        if self._stream is None:
            return next(slices, self) is not self
        self._stream.wait_stream(torch.cuda.current_stream(self._memory.k_dev.device))
        with torch.cuda.stream(self._stream):
            if next(slices, self) is self:
                return False
            self._slice_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._slice_done.record()
        return True

    def _wait(self) -> None:
        if self._slice_done is not None:
            self._slice_done.synchronize()

    def _slices(self, request: Request) -> Iterator[None]:
        """Enqueues a slice for each time that it is asked."""
        left_bytes, left_copies = self.slice_bytes, SLICE_COPIES
        for src, dst, src_start, dst_start, length in self._ranges(request):
            item_bytes, done = src.shape[1], 0
            while done < length:
                if left_bytes <= 0 or not left_copies:
                    yield
                    left_bytes, left_copies = self.slice_bytes, SLICE_COPIES
                num = min(length - done, max(1, left_bytes // item_bytes))
                at, to = src_start + done, dst_start + done
                dst[to : to + num].copy_(src[at : at + num], non_blocking=True)
                left_bytes -= num * item_bytes
                left_copies -= 1
                done += num
        yield

    def _ranges(self, request: Request) -> Iterator[tuple[Tensor, Tensor, int, int, int]]:
        """Of every layer, [num_slots, item_bytes]: from where to where, and how many slots that follow."""
        memory, source = self._memory, request.source
        if source is None:
            raise RuntimeError(f"room {request.room} has no source to copy a held prefix from")
        pools = {PoolKind.HOST: memory.k_host, PoolKind.DEVICE: memory.k_dev, PoolKind.INDEX: memory.index}
        for src_kind, dst_kind in (
            (KV_POOL[source.mode], KV_POOL[request.mode]),
            (PoolKind.INDEX, PoolKind.INDEX),
        ):
            src_slots = extents_to_slots(source.extents(src_kind))
            runs = plan_writes(src_slots, extents_to_slots(request.owned[dst_kind])[: len(src_slots)])
            columns = (runs.src_start.tolist(), runs.dst_start.tolist(), runs.length.tolist())
            for src_layer, dst_layer in zip(pools[src_kind], pools[dst_kind], strict=True):
                for src_start, dst_start, length in zip(*columns, strict=True):
                    yield src_layer, dst_layer, src_start, dst_start, length
