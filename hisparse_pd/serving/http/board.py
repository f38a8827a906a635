"""Memory that a node's fronts (its HTTP processes) share: their counts, their metrics, and the first front's
instruction to the others.

The first front makes the ``Board`` and passes it to the fronts that it spawns. Each number has one front that
writes it, so there is no lock that a killed front could keep. ``InFlightCounts`` is a front's access to the
counts: it adds a request to its own row before it reads the sum of all rows. Two fronts that do this at once
may both find the node full, but never both find the last place free.
"""

from __future__ import annotations

import multiprocessing
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

MAX_METRICS_BYTES = 1 << 18
"""Limit for a front's metrics; 12 kB are usual."""

_METRICS_HEAD = struct.Struct("=II")
"""Length and checksum of the metrics. The checksum is wrong for whoever reads them while they are written."""

_IS_READY, _SAMPLES, _PROMPT_TOKENS, _FIRST_RANK_COLUMN = range(4)
"""Columns of a front's row. From ``_FIRST_RANK_COLUMN`` on each rank has two: the prompt tokens of the
samples that it has, and the number of samples that it was ever given."""


def _tokens_column(rank: int) -> int:
    return _FIRST_RANK_COLUMN + 2 * rank


def _given_column(rank: int) -> int:
    return _FIRST_RANK_COLUMN + 2 * rank + 1


class Instruction(IntEnum):
    """An order of the first front to the others."""

    SERVE = 0
    STOP_ACCEPTING = 1
    """Refuse new requests; those in flight go on."""
    LEAVE = 2
    """End the requests in flight, tell the engines, and exit."""
    ENGINE_DIED = 3
    """Exit: an engine has died."""
    FRONT_DIED = 4
    """Exit: a front has died."""


class Board:
    """A row of numbers and a region for metrics for each front; in shared memory if there are several."""

    def __init__(self, num_ranks: int, num_fronts: int = 1) -> None:
        self.num_fronts = num_fronts
        self._num_columns = _FIRST_RANK_COLUMN + 2 * num_ranks
        size = 1 + num_fronts * self._num_columns
        self._numbers = multiprocessing.RawArray("q", size) if num_fronts > 1 else [0] * size
        """The instruction, then a row for each front."""
        num_regions = num_fronts if num_fronts > 1 else 0
        self.metrics_of_fronts: list[Any] = [
            multiprocessing.RawArray("B", _METRICS_HEAD.size + MAX_METRICS_BYTES) for _ in range(num_regions)
        ]
        self._last_metrics = [b""] * num_regions
        """Each front's metrics as they were last read complete."""

    def sum(self, column: int) -> int:
        """Return the sum of a column over all fronts."""
        return sum(self._numbers[1 + column :: self._num_columns])

    def add(self, front_number: int, column: int, num: int) -> None:
        self._numbers[1 + front_number * self._num_columns + column] += num

    @property
    def instruction(self) -> Instruction:
        return Instruction(self._numbers[0])

    def instruct(self, instruction: Instruction) -> None:
        """Tell the other fronts what to do. Only the first front may call this."""
        self._numbers[0] = instruction

    def write_metrics(self, front_number: int, packed: bytes) -> None:
        """Publish a front's metrics, in a node of several fronts. Raises ValueError for more than
        MAX_METRICS_BYTES."""
        if len(packed) > MAX_METRICS_BYTES:
            raise ValueError(
                f"front {front_number}: {len(packed)} bytes of metrics; {MAX_METRICS_BYTES} have room"
            )
        head = _METRICS_HEAD.pack(len(packed), zlib.crc32(packed))
        memoryview(self.metrics_of_fronts[front_number]).cast("B")[: len(head) + len(packed)] = head + packed

    def metrics(self) -> Sequence[bytes]:
        """Return what each front wrote last; nothing in a node of one front."""
        for number, region in enumerate(self.metrics_of_fronts):
            num_bytes, checksum = _METRICS_HEAD.unpack_from(region)
            start = _METRICS_HEAD.size
            packed = bytes(memoryview(region).cast("B")[start : start + num_bytes])
            if zlib.crc32(packed) == checksum:
                self._last_metrics[number] = packed
        return [packed for packed in self._last_metrics if packed]


class InFlightCounts:
    """Samples and prompt tokens in flight. A front reads sums over all fronts, and changes its own row."""

    def __init__(self, board: Board, front_number: int) -> None:
        self._board = board
        self._front_number = front_number

    @property
    def num_samples(self) -> int:
        """Samples in flight, those included whose abort has not gone to their engine yet."""
        return self._board.sum(_SAMPLES)

    @property
    def are_ready(self) -> bool:
        """Whether all fronts are connected to all engines."""
        return self._board.sum(_IS_READY) == self._board.num_fronts

    @property
    def are_partly_ready(self) -> bool:
        """Whether some fronts are connected to all engines, and others are not yet."""
        return 0 < self._board.sum(_IS_READY) < self._board.num_fronts

    def set_ready(self) -> None:
        """Note that this front is connected to all engines."""
        self._board.add(self._front_number, _IS_READY, 1)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens in flight. A prompt counts once on each rank that has samples of it;
        ``num_prompt_tokens_of`` counts it for each of its samples."""
        return self._board.sum(_PROMPT_TOKENS)

    def add(self, num_samples: int, num_prompt_tokens: int = 0) -> None:
        self._board.add(self._front_number, _SAMPLES, num_samples)
        self._board.add(self._front_number, _PROMPT_TOKENS, num_prompt_tokens)

    def num_prompt_tokens_of(self, rank: int) -> int:
        """Return the prompt tokens of the samples that the rank has."""
        return self._board.sum(_tokens_column(rank))

    def num_samples_given_to(self, rank: int) -> int:
        """Return how many samples the rank was ever given."""
        return self._board.sum(_given_column(rank))

    def assign(self, rank: int, num_tokens: int) -> None:
        """Count a sample of ``num_tokens`` prompt tokens that is given to the rank."""
        self._board.add(self._front_number, _tokens_column(rank), num_tokens)
        self._board.add(self._front_number, _given_column(rank), 1)

    def unassign(self, rank: int, num_tokens: int) -> None:
        """Undo the count of a sample that has ended on the rank, or was not sent after all."""
        self._board.add(self._front_number, _tokens_column(rank), -num_tokens)
