"""Owns the copies of held prefixes to the pool of the other mode: from host to device for dense, and back.

A request that takes over what one of the other mode left has the indexer keys as they are, and needs the KV
in the other pool: its own slots are filled from the prefix's, its ``source`` meanwhile. That is done
a slice in a turn of the engine's loop, while the rest of the prompt is computed and sent, so that no step
waits for more than a slice. On a GPU a slice runs in a stream of its own beside the step, and the next one
follows when it is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from decode_node.held_prefixes import KV_POOL
from decode_node.memory import DecodeMemory
from decode_node.request import Request
from transfer.extents import extents_to_slots
from transfer.plan import plan_writes
from vocabulary import Mode

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
        memory = self._memory
        source = request.source
        if source is None:
            raise RuntimeError(f"room {request.room} has no source to copy a held prefix from")
        to_device = request.mode is Mode.DENSE
        src, dst = (memory.k_host, memory.k_dev) if to_device else (memory.k_dev, memory.k_host)
        (from_kind,) = source.extents
        num_tokens = source.num_slots(from_kind)
        dst_slots = extents_to_slots(request.owned[KV_POOL[request.mode]])[:num_tokens]
        runs = plan_writes(extents_to_slots(source[from_kind]), dst_slots)
        most_tokens = max(1, self.slice_bytes // src.shape[2])
        left_tokens, left_copies = most_tokens, SLICE_COPIES
        for src_layer, dst_layer in zip(src, dst, strict=True):
            columns = (runs.src_start.tolist(), runs.dst_start.tolist(), runs.length.tolist())
            for src_start, dst_start, length in zip(*columns, strict=True):
                done = 0
                while done < length:
                    if not left_tokens or not left_copies:
                        yield
                        left_tokens, left_copies = most_tokens, SLICE_COPIES
                    num = min(length - done, left_tokens)
                    at, to = src_start + done, dst_start + done
                    dst_layer[to : to + num].copy_(src_layer[at : at + num], non_blocking=True)
                    left_tokens, left_copies, done = left_tokens - num, left_copies - 1, done + num
        yield
