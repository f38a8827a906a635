"""The aux record: a prefill node's last write for a room, into one slot of the decode node's AUX region.

The record carries the hint, and never lands without the room's earlier writes. ``prefill_node/memory.py``
packs it, and ``decode_node/memory.py`` unpacks it after RoomDone. Its layout is little-endian and has a fixed
size:

=====================  ======================================================================
bytes                  content
=====================  ======================================================================
4                      magic ``HPDA``
2, 2                   version, flags (bit 0: has a hint)
8                      room
4                      CRC-32 of the whole record with this field zero
12                     padding
groups x top-k x 4     hint: int32 positions, [num_index_groups][index_topk], padded with -1
=====================  ======================================================================

An old or torn record must never pass for a new one: room and checksum are verified on every read.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hisparse_pd.protocol.messages import Room

MAGIC = b"HPDA"
VERSION = 2

BytesBuffer: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Contiguous bytes; ``.numpy()`` of a torch CPU tensor is one."""

_HEADER = struct.Struct("<4sHHQI12x")
_CRC_OFFSET = 16
_HINT_ENTRY = np.dtype("<i4")
_HAS_HINT = 1
_SLOT_ALIGNMENT = 64


class AuxMismatch(Exception):
    """The bytes are not this room's aux record: never written, another room's, or damaged."""


@dataclass(frozen=True)
class AuxRecord:
    """A decoded record. ``hint``: int32 [num_index_groups, index_topk], padded with -1, if there is one."""

    room: Room
    hint: NDArray[np.int32] | None


@dataclass(frozen=True)
class AuxLayout:
    """Size and encoding of the aux records of one geometry; both nodes build it from the same numbers."""

    num_index_groups: int
    index_topk: int

    @property
    def record_bytes(self) -> int:
        return _HEADER.size + self.num_index_groups * self.index_topk * _HINT_ENTRY.itemsize

    @property
    def slot_bytes(self) -> int:
        """Size of a slot: ``record_bytes``, rounded up so that slots do not share a cache line."""
        return -(-self.record_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT

    def pack_into(
        self,
        buffer: bytearray | memoryview | NDArray[np.uint8],
        room: int,
        hint: ArrayLike | None = None,
    ) -> None:
        """Write a record over the first ``record_bytes`` of ``buffer``; the rest stays as it is.

        ``hint``: integers [num_index_groups, index_topk]. Raises ValueError for a value that does not fit.
        """
        view = self._view(buffer)
        view[:] = bytes(self.record_bytes)
        _HEADER.pack_into(view, 0, MAGIC, VERSION, _HAS_HINT if hint is not None else 0, room, 0)
        if hint is not None:
            hint_array = np.asarray(hint)
            if hint_array.shape != (self.num_index_groups, self.index_topk):
                raise ValueError(
                    f"hint has shape {hint_array.shape}, expected {(self.num_index_groups, self.index_topk)}"
                )
            np.frombuffer(view, _HINT_ENTRY, offset=_HEADER.size)[:] = hint_array.reshape(-1)
        struct.pack_into("<I", view, _CRC_OFFSET, zlib.crc32(view))

    def unpack(self, buffer: BytesBuffer, expected_room: int) -> AuxRecord:
        """Return a copy of the record in ``buffer``.

        Raises AuxMismatch unless the record is whole and belongs to ``expected_room``.
        """
        record = bytearray(self._view(buffer))
        magic, version, flags, room, crc = _HEADER.unpack_from(record)
        if magic != MAGIC:
            raise AuxMismatch(f"no aux record of room {expected_room}: magic {magic!r} instead of {MAGIC!r}")
        if version != VERSION:
            raise AuxMismatch(
                f"aux record version {version}, this node reads {VERSION}: run the same release on both nodes"
            )
        if room != expected_room:
            raise AuxMismatch(f"expected the aux record of room {expected_room}, found that of room {room}")
        struct.pack_into("<I", record, _CRC_OFFSET, 0)
        if zlib.crc32(record) != crc:
            raise AuxMismatch(
                f"aux record of room {room} is damaged: CRC {zlib.crc32(record):#x}, not {crc:#x}"
            )
        hint = None
        if flags & _HAS_HINT:
            flat = np.frombuffer(record, _HINT_ENTRY, offset=_HEADER.size)
            hint = flat.reshape(self.num_index_groups, self.index_topk).astype(np.int32)
        return AuxRecord(Room(room), hint)

    def clear(self, buffer: bytearray | memoryview | NDArray[np.uint8]) -> None:
        """Erase the header in ``buffer``, so that it holds no record."""
        self._view(buffer)[: _HEADER.size] = bytes(_HEADER.size)

    def _view(self, buffer: BytesBuffer) -> memoryview:
        view = memoryview(buffer if not isinstance(buffer, np.ndarray) else buffer.data).cast("B")
        if view.nbytes < self.record_bytes:
            raise ValueError(f"aux slot of {view.nbytes} bytes, a record has {self.record_bytes}")
        return view[: self.record_bytes]
