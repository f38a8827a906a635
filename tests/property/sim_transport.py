"""The KV transport in the test's hands, in place of Mooncake and the sender's threads."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np
import torch

from protocol.messages import Room
from transfer.sender import Completion, WriteBatch
from transfer.transport import TCP


class SafetyViolation(AssertionError):
    """Bytes landed where they must not, or a request runs on bytes that are not its own."""


class WriteFate(Enum):
    WRITTEN = auto()
    SLOW = auto()
    """A part lands, and no answer comes yet."""
    FAILED = auto()
    FAILED_MIDWAY = auto()
    REPEATED = auto()
    """Fails, is written once more, and that goes well."""


@dataclass(frozen=True)
class Piece:
    """The bytes of one descriptor. ``src_addr``: read only when they land; None: ``content`` was read before.

    ``sender``: whose they are. ``was_repeated``: the same bytes have landed before these may.
    """

    sender: SimSender
    room: Room
    session: str
    src_addr: int | None
    dst_addr: int
    content: bytes
    was_repeated: bool = False
    lands_until: float = float("inf")

    def read(self) -> bytes:
        return self.content if self.src_addr is None else ctypes.string_at(self.src_addr, len(self.content))

    def in_socket(self) -> Piece:
        """The same, read by now: all that is left of them when their sender dies."""
        return replace(self, src_addr=None, content=self.read())


class SimTransfer:
    """In place of a ``TransferEngine``: names a session and remembers what was registered."""

    transport = TCP

    def __init__(self, session: str) -> None:
        self.session = session

    def register(self, memory: torch.Tensor) -> int:
        return memory.data_ptr()

    def is_reachable(self, session: str) -> bool:
        raise AssertionError("asked in a thread, of which there are none here")

    def close(self) -> None:
        pass


class SimSender:
    """In place of a ``Sender``: its promises about order, refusals and completions, without threads.

    A write is in flight from ``start`` to ``finish``, which only the test calls.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.waiting: dict[Room, deque[tuple[str, WriteBatch, list[bytes]]]] = {}
        self.in_flight: dict[Room, tuple[str, WriteBatch, list[bytes]]] = {}
        self._completions: list[Completion] = []
        self._refused: set[Room] = set()
        self._reported: set[Room] = set()

    def submit(self, session: str, batch: WriteBatch) -> None:
        self.waiting.setdefault(batch.room, deque()).append((session, batch, _read(batch)))
        if batch.room in self._refused:
            self._refuse(batch.room)

    def cancel(self, room: Room) -> bool:
        if self.num_pending(room):
            self._refuse(room)
        return room in self.in_flight

    def num_pending(self, room: Room) -> int:
        return len(self.waiting.get(room, ())) + (room in self.in_flight)

    def poll(self) -> list[Completion]:
        now = self._clock()
        for room, batches in list(self.waiting.items()):
            if batches[0][1].deadline < now:
                self._refuse(room)
        completions, self._completions = self._completions, []
        self._refused = {room for room in self._refused if self.num_pending(room)}
        return completions

    def overdue(self) -> list[Room]:
        now = self._clock()
        overdue = [room for room, (_, batch, _) in self.in_flight.items() if batch.deadline < now]
        news = [room for room in overdue if room not in self._reported]
        for room in news:
            self._reported.add(room)
            self._refuse(room)
        return news

    def close(self, timeout_secs: float) -> bool:
        for room in list(self.waiting):
            self._refuse(room)
        return not self.in_flight

    def start(self) -> None:
        for room in [room for room in self.waiting if room not in self.in_flight]:
            self.in_flight[room] = self.waiting[room].popleft()
            if not self.waiting[room]:
                del self.waiting[room]

    def pieces(self, room: Room) -> list[Piece]:
        """Of the write in flight."""
        session, batch, as_submitted = self.in_flight[room]
        now_read = _read(batch)
        if now_read != as_submitted:
            raise SafetyViolation(f"room {room}: source of {batch.tag} was changed under the transport")
        addrs = (np.asarray(addrs).tolist() for addrs in (batch.src_addrs, batch.dst_addrs))
        return [
            Piece(self, room, session, src_addr, dst_addr, content)
            for src_addr, dst_addr, content in zip(*addrs, now_read, strict=True)
        ]

    def finish(self, room: Room, *, ok: bool, was_repeated: bool = False) -> None:
        _, batch, _ = self.in_flight.pop(room)
        self._reported.discard(room)
        num_bytes = int(np.sum(batch.lengths)) if ok else 0
        error = "" if ok else "the transport failed"
        self._completions.append(
            Completion(room, batch.tag, ok, error, num_bytes, 0.0, may_still_land=not ok or was_repeated)
        )
        if not ok:
            self._refuse(room)

    def _refuse(self, room: Room) -> None:
        self._refused.add(room)
        for _, batch, _ in self.waiting.pop(room, ()):
            self._completions.append(Completion(room, batch.tag, False, "an earlier one failed", 0, 0.0))


def _read(batch: WriteBatch) -> list[bytes]:
    lists = (np.asarray(values).tolist() for values in (batch.src_addrs, batch.lengths))
    return [ctypes.string_at(addr, length) for addr, length in zip(*lists, strict=True)]
