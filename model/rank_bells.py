"""How the ranks of a node wake each other up: a datagram a ring, straight from engine to engine.

Neither who rings nor who hears waits, and nobody is between them. The sockets have names in the directory
where the ranks meet, which may be gone once they are connected.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from vocabulary import RankPlace

_NUMBER = struct.Struct("<q")


class RankBells:
    """One rank's bell, which others ring, and what it rings theirs by."""

    def __init__(self, place: RankPlace) -> None:
        """To be heard, once ``connect`` was called in the others. Raises OSError."""
        self._place = place
        self._own = _bell()
        self._own.bind(_path(place, place.rank))
        self._others: list[socket.socket] = []

    def connect(self) -> None:
        """Once all ranks have their bells. Raises OSError."""
        for rank in range(self._place.size):
            if rank != self._place.rank:
                self._others.append(_bell())
                self._others[-1].connect(_path(self._place, rank))

    def fileno(self) -> int:
        """Readable when another rank has rung."""
        return self._own.fileno()

    def ring(self, number: int) -> None:
        """Have the other ranks hear ``number``; one that is gone hears nothing."""
        for bell in self._others:
            with suppress(OSError):
                bell.send(_NUMBER.pack(number))

    def heard(self) -> list[int]:
        """What other ranks have rung since the last call."""
        numbers: list[int] = []
        with suppress(BlockingIOError):
            while True:
                numbers += _NUMBER.unpack(self._own.recv(_NUMBER.size))
        return numbers

    def close(self) -> None:
        for bell in (self._own, *self._others):
            bell.close()


def _bell() -> socket.socket:
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.setblocking(False)
    return bell


def _path(place: RankPlace, rank: int) -> str:
    return f"{place.meeting_path}-bell-{rank}"
