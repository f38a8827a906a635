"""The aux record: what a prefill node writes last of a room, into one slot of the decode node's AUX region.

It carries the first token with its logprobs and the hint. Layout, little-endian, fixed size:

=====================  ======================================================================
bytes                  content
=====================  ======================================================================
4                      magic ``HPDA``
2, 2                   version, flags (bit 0: has a logprob, bit 1: has a hint)
8                      room
4                      CRC-32 of the whole record with this field zero
4                      first token
8                      logprob of the first token, float64
4, 4                   number of top entries, padding
max_logprobs x 16      top entries: token id int64, logprob float64
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

from hisparse_pd.base.vocabulary import TokenLogprob
from hisparse_pd.protocol.messages import Room

MAGIC = b"HPDA"
VERSION = 1

BytesBuffer: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Contiguous bytes; a torch CPU tensor gives one with ``.numpy()``."""

_HEADER = struct.Struct("<4sHHQIidi4x")
_CRC_OFFSET = 16
_TOP_ENTRY = np.dtype([("token_id", "<i8"), ("logprob", "<f8")])
_HINT_ENTRY = np.dtype("<i4")
_HAS_LOGPROB = 1
_HAS_HINT = 2
_SLOT_ALIGNMENT = 64

MAX_LOGPROBS = 20
"""Top logprobs of the first token that a record has room for."""


class AuxMismatch(Exception):
    """The bytes are not this room's aux record: never written, of another room, or damaged."""


@dataclass(frozen=True)
class AuxRecord:
    """``hint``: int32 [num_index_groups, index_topk], padded with -1; None when the room has none."""

    room: Room
    first_token: int
    logprob: TokenLogprob | None
    hint: NDArray[np.int32] | None


@dataclass(frozen=True)
class AuxLayout:
    """Size and encoding of the aux records of one geometry; both nodes build it from the same numbers."""

    num_index_groups: int
    index_topk: int
    max_logprobs: int = MAX_LOGPROBS

    @property
    def record_bytes(self) -> int:
        return self._hint_offset + self.num_index_groups * self.index_topk * _HINT_ENTRY.itemsize

    @property
    def slot_bytes(self) -> int:
        """``record_bytes``, rounded up so that slots do not share a cache line."""
        return -(-self.record_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT

    @property
    def _hint_offset(self) -> int:
        return _HEADER.size + self.max_logprobs * _TOP_ENTRY.itemsize

    def pack_into(
        self,
        buffer: bytearray | memoryview | NDArray[np.uint8],
        room: int,
        first_token: int,
        logprob: TokenLogprob | None = None,
        hint: ArrayLike | None = None,
    ) -> None:
        """Write a record over the first ``record_bytes`` of ``buffer``; the rest stays as it is.

        ``hint``: integers [num_index_groups, index_topk]. Raises ValueError for a value that does not fit.
        """
        view = self._view(buffer)
        top = logprob.top if logprob is not None else ()
        if len(top) > self.max_logprobs:
            raise ValueError(f"{len(top)} top logprobs do not fit an aux record of {self.max_logprobs}")
        if logprob is not None and logprob.token_id != first_token:
            raise ValueError(f"logprob of token {logprob.token_id} given with first token {first_token}")
        flags = (_HAS_LOGPROB if logprob is not None else 0) | (_HAS_HINT if hint is not None else 0)
        value = logprob.logprob if logprob is not None else 0.0
        view[:] = bytes(self.record_bytes)
        _HEADER.pack_into(view, 0, MAGIC, VERSION, flags, room, 0, first_token, value, len(top))
        np.frombuffer(view, _TOP_ENTRY, len(top), _HEADER.size)[:] = np.array(list(top), _TOP_ENTRY)
        if hint is not None:
            hint_array = np.asarray(hint)
            if hint_array.shape != (self.num_index_groups, self.index_topk):
                raise ValueError(
                    f"hint has shape {hint_array.shape}, expected {(self.num_index_groups, self.index_topk)}"
                )
            np.frombuffer(view, _HINT_ENTRY, offset=self._hint_offset)[:] = hint_array.reshape(-1)
        struct.pack_into("<I", view, _CRC_OFFSET, zlib.crc32(view))

    def unpack(self, buffer: BytesBuffer, expected_room: int) -> AuxRecord:
        """The record in ``buffer``, copied out of it.

        Raises AuxMismatch unless it is whole and of ``expected_room``.
        """
        record = bytearray(self._view(buffer))
        magic, version, flags, room, crc, first_token, value, num_top = _HEADER.unpack_from(record)
        if magic != MAGIC:
            raise AuxMismatch(f"no aux record of room {expected_room}: magic {magic!r} instead of {MAGIC!r}")
        if version != VERSION:
            raise AuxMismatch(f"aux record version {version}, this node reads {VERSION}: run one release")
        if room != expected_room:
            raise AuxMismatch(f"aux record of room {room} where that of room {expected_room} is due")
        struct.pack_into("<I", record, _CRC_OFFSET, 0)
        if zlib.crc32(record) != crc:
            raise AuxMismatch(
                f"aux record of room {room} is damaged: CRC {zlib.crc32(record):#x}, not {crc:#x}"
            )
        if not 0 <= num_top <= self.max_logprobs:
            raise AuxMismatch(
                f"aux record of room {room} names {num_top} top logprobs of {self.max_logprobs}"
            )
        logprob = hint = None
        if flags & _HAS_LOGPROB:
            top = np.frombuffer(record, _TOP_ENTRY, num_top, _HEADER.size).tolist()
            logprob = TokenLogprob(first_token, value, tuple(top))
        if flags & _HAS_HINT:
            flat = np.frombuffer(record, _HINT_ENTRY, offset=self._hint_offset)
            hint = flat.reshape(self.num_index_groups, self.index_topk).astype(np.int32)
        return AuxRecord(Room(room), first_token, logprob, hint)

    def clear(self, buffer: bytearray | memoryview | NDArray[np.uint8]) -> None:
        """Make ``buffer`` one without a record, as before its first use."""
        self._view(buffer)[: _HEADER.size] = bytes(_HEADER.size)

    def _view(self, buffer: BytesBuffer) -> memoryview:
        view = memoryview(buffer if not isinstance(buffer, np.ndarray) else buffer.data).cast("B")
        if view.nbytes < self.record_bytes:
            raise ValueError(f"aux slot of {view.nbytes} bytes, a record has {self.record_bytes}")
        return view[: self.record_bytes]
