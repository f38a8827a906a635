"""What the fronts of a node tell each other, in memory that they share.

Each place has one front that writes it, so there is no lock that a killed front could keep.
"""

from __future__ import annotations

import multiprocessing
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

MAX_METRICS_BYTES = 1 << 18
"""Of a front; 12 kB are usual."""

_METRICS_HEAD = struct.Struct("=II")
"""Bytes of the metrics and their checksum: who reads them while they are written finds it wrong."""


class Word(IntEnum):
    """What the first front says to the others."""

    SERVE = 0
    STOP_ACCEPTING = 1
    """New requests are refused, those in flight go on."""
    LEAVE = 2
    """End what is in flight, tell the engines, and exit."""
    ENGINE_DIED = 3
    FRONT_DIED = 4
    """The same, and why."""


class Board:
    """It is handed to the fronts when they are spawned. A node of one front shares nothing."""

    def __init__(self, num_columns: int, num_fronts: int = 1) -> None:
        """``num_columns``: of numbers that each front has, and that are added up."""
        self.num_fronts = num_fronts
        self._num_columns = num_columns
        size = 1 + num_fronts * num_columns
        self._numbers = multiprocessing.RawArray("q", size) if num_fronts > 1 else [0] * size
        """The word, and then a row a front."""
        places = num_fronts if num_fronts > 1 else 0
        self._metrics: list[Any] = [
            multiprocessing.RawArray("B", _METRICS_HEAD.size + MAX_METRICS_BYTES) for _ in range(places)
        ]
        self._read = [b""] * places

    def sum(self, column: int) -> int:
        return sum(self._numbers[1 + column :: self._num_columns])

    def add(self, front: int, column: int, num: int) -> None:
        self._numbers[1 + front * self._num_columns + column] += num

    @property
    def word(self) -> Word:
        return Word(self._numbers[0])

    def say(self, word: Word) -> None:
        """By the first front."""
        self._numbers[0] = word

    def write_metrics(self, front: int, packed: bytes) -> None:
        """Raises ValueError for more than MAX_METRICS_BYTES."""
        if len(packed) > MAX_METRICS_BYTES:
            raise ValueError(f"front {front}: {len(packed)} bytes of metrics; {MAX_METRICS_BYTES} have room")
        head = _METRICS_HEAD.pack(len(packed), zlib.crc32(packed))
        memoryview(self._metrics[front]).cast("B")[: len(head) + len(packed)] = head + packed

    def metrics(self) -> Sequence[bytes]:
        """Those of all fronts, as each wrote them last; none of a node of one front."""
        for front, place in enumerate(self._metrics):
            num_bytes, checksum = _METRICS_HEAD.unpack_from(place)
            start = _METRICS_HEAD.size
            packed = bytes(memoryview(place).cast("B")[start : start + num_bytes])
            if zlib.crc32(packed) == checksum:
                self._read[front] = packed
        return [packed for packed in self._read if packed]
