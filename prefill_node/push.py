"""Pushes a room's bytes to its landing zone: owns nothing but the plan of the moment.

Page ids become token slots, token slots and extents become runs that are contiguous on both sides, runs
become addresses in every layer. A batch carries the KV and the indexer keys of one range of positions; the
aux record is a batch of its own, submitted last: the sender keeps a room's batches in order and starts none
behind a failed one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from prefill_node.peers import Peer, kv_region_of
from prefill_node.rooms import RoomRecord
from protocol.messages import Bootstrap, RegionKind, Room
from transfer.extents import expand_pages, extents_to_slots, slice_extents
from transfer.plan import Descriptors, RegionView, descriptors, join_descriptors, plan_writes
from transfer.sender import Completion, WriteBatch


class BatchSender(Protocol):
    """What the node needs of a ``transfer.sender.Sender``."""

    def submit(self, session: str, batch: WriteBatch) -> None: ...

    def cancel(self, room: Room) -> bool: ...

    def poll(self) -> list[Completion]: ...

    def overdue(self) -> list[Room]: ...


@dataclass(frozen=True, slots=True)
class SourceRegions:
    """This node's registered memory. ``aux`` is one layer with a slot per room that owns pages."""

    kv: RegionView
    index: RegionView
    aux: RegionView


class Pusher:
    """Plans and submits. Source memory must stand until each batch's completion: the caller counts them."""

    def __init__(
        self, sender: BatchSender, source: SourceRegions, page_size: int, transfer_timeout_secs: float
    ) -> None:
        self._sender = sender
        self._source = source
        self._page_size = page_size
        self._transfer_timeout_secs = transfer_timeout_secs

    def push_tokens(self, record: RoomRecord, start: int, stop: int) -> None:
        """Submit KV and indexer keys of positions ``[start, stop)``, which are computed. Empty: no batch."""
        if start == stop:
            return
        peer, bootstrap = landing_of(record)
        src_slots = expand_pages(np.asarray(record.page_ids, np.int64), self._page_size, start, stop)
        parts = []
        for source, kind, extents in (
            (self._source.kv, kv_region_of(bootstrap), bootstrap.kv_extents),
            (self._source.index, RegionKind.INDEX, bootstrap.index_extents),
        ):
            runs = plan_writes(src_slots, extents_to_slots(slice_extents(extents, start, stop)))
            parts.append(descriptors(runs, source, peer.regions[kind], range(source.num_layers)))
        self._submit(record, peer, f"positions [{start}, {stop})", join_descriptors(parts))

    def push_aux(self, record: RoomRecord) -> None:
        """Submit the aux record, which stands in the room's slot of the aux staging memory."""
        if record.aux_slot_src is None:
            raise ValueError(f"room {record.room} has no aux slot to send its aux record from")
        peer, bootstrap = landing_of(record)
        runs = plan_writes([record.aux_slot_src], [bootstrap.aux_slot])
        self._submit(
            record,
            peer,
            "aux record",
            descriptors(runs, self._source.aux, peer.regions[RegionKind.AUX], range(1)),
        )

    def cancel(self, record: RoomRecord) -> None:
        """Start none of the room's waiting batches; every batch still has its completion."""
        self._sender.cancel(record.room)

    def _submit(self, record: RoomRecord, peer: Peer, tag: str, writes: Descriptors) -> None:
        deadline = time.monotonic() + self._transfer_timeout_secs
        self._sender.submit(peer.session, WriteBatch(record.room, tag, *writes, deadline))
        record.num_writes_pending += 1


def landing_of(record: RoomRecord) -> tuple[Peer, Bootstrap]:
    """The decode node's half of a room that has both. Raises ValueError when it has not."""
    if record.peer is None or record.bootstrap is None:
        raise ValueError(f"room {record.room} has not been bootstrapped, there is nowhere to write")
    return record.peer, record.bootstrap
