"""Owns the holdings of rooms that ended while the prefill node might still write to them (I1). Pure.

The held pages of a room, from which the prefill node may read, stay in use for as long. If their slots were
used again before, the prefill node would take others' rows, whose checks are right, for the room's.

``LiveRequests.release`` adds a room; ``PrefillEvents`` and an operator report what is known of it since. A
run is a prefill node's process from its start to its end (``instance_id``); each room was given to one run.
A room's slots are free again when it is known that nothing can land there:

=====================================================  ================================================
what is known                                          the slots are free
=====================================================  ================================================
the room is quiet, all its batches went well           at once
the room is quiet, a batch of it failed                after ``quarantine_secs`` more: bytes of the failed
                                                       batch may sit in the transport until its timeouts
the room's run is over, as another run in its place    after ``quarantine_secs`` more, for the same reason
or an operator says (``instance_gone``)
the room's run wrote through shared memory alone, and  at once: nothing of it is in a transport
the kernel says that its process has let go of it
(``writer_gone``)
nothing                                                never; ``quarantined_tokens`` shows them
=====================================================  ================================================

Time in which this node itself stood still does not count: what its sockets took in meanwhile has yet to
land (``postpone``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hisparse_pd.core.paging.pools import Holding, Pools
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.engine.messages import QuarantinedRun
from hisparse_pd.protocol.messages import Room

_NEVER = float("inf")


@dataclass
class Quarantined:
    """One room's holding, and the prefill node that might still write to it."""

    room: Room
    holding: Holding
    peer: PeerAddress
    instance_id: str
    """The run of the prefill node that got the room."""
    since: float
    """When its request ended."""
    prefix: Prefix | None = None
    """The held pages that it shares, in use until the slots are free."""
    attempt: int = 0
    """See ``Bootstrap.attempt``."""
    batch_failed: bool = False
    """Whether a batch of the room failed, so that bytes of it may still sit in the transport."""
    free_at: float = _NEVER
    """When the slots are safe to reuse."""
    was_reported: bool = False
    """Whether the log has named it as stuck."""

    @property
    def is_unacknowledged(self) -> bool:
        """Whether nothing is known yet that frees the slots: the prefill node has not said that the room is
        quiet, nor is the room's run known to be over."""
        return self.free_at == _NEVER


class Quarantine:
    """Keeps holdings until their slots are safe to reuse, and hands their rooms to ``release`` then.

    Times are those of ``time.monotonic``.
    """

    def __init__(self, quarantine_secs: float, release: Callable[[Quarantined], None]) -> None:
        self._quarantine_secs = quarantine_secs
        self._release = release
        self._entries: dict[Room, Quarantined] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, room: Room) -> bool:
        return room in self._entries

    def __iter__(self) -> Iterator[Quarantined]:
        return iter(tuple(self._entries.values()))

    def get(self, room: Room) -> Quarantined | None:
        return self._entries.get(room)

    def stuck(self, now: float) -> list[Quarantined]:
        """Return rooms that have been unacknowledged for longer than a live prefill node takes to say that a
        room is quiet."""
        latest = now - self._quarantine_secs
        return [
            entry for entry in self._entries.values() if entry.is_unacknowledged and entry.since <= latest
        ]

    def newly_stuck(self, now: float) -> list[Quarantined]:
        """Return rooms that have become ``stuck`` since the last call."""
        found = [entry for entry in self.stuck(now) if not entry.was_reported]
        for entry in found:
            entry.was_reported = True
        return found

    def runs(self, pools: Pools, now: float) -> tuple[QuarantinedRun, ...]:
        """Return what is in quarantine, summed for each run of a prefill node."""
        by_run: dict[tuple[PeerAddress, str], list[Quarantined]] = {}
        for entry in self._entries.values():
            by_run.setdefault((entry.peer, entry.instance_id), []).append(entry)
        runs = []
        for (peer, instance_id), entries in by_run.items():
            owned = pools.owned_by(entry.holding for entry in entries)
            runs.append(
                QuarantinedRun(
                    prefill_node=str(peer),
                    instance_id=instance_id,
                    num_rooms=len(entries),
                    num_unacknowledged=sum(entry.is_unacknowledged for entry in entries),
                    longest_secs=max(now - entry.since for entry in entries),
                    host_slots=owned.host,
                    device_slots=owned.device,
                    index_slots=owned.index,
                    aux_slots=owned.aux,
                )
            )
        return tuple(runs)

    def add(self, entry: Quarantined) -> None:
        """Keep the slots of a room that ended. Raises ValueError when the room is here already."""
        if entry.room in self._entries:
            raise ValueError(f"room {entry.room} is quarantined already")
        self._entries[entry.room] = entry

    def failed(self, room: Room) -> None:
        """Record that a batch of ``room``, which is not quiet yet, failed."""
        self._entries[room].batch_failed = True

    def quiet(self, room: Room, batch_failed: bool, now: float) -> None:
        """Record that the prefill node writes no more to ``room``. Unknown rooms are ignored."""
        entry = self._entries.get(room)
        if entry is None:
            return
        entry.batch_failed |= batch_failed
        if entry.batch_failed:
            entry.free_at = min(entry.free_at, now + self._quarantine_secs)
        else:
            entry.free_at = now
        self.expire(now)

    def instance_gone(self, instance_id: str, now: float) -> None:
        """Record that the run ``instance_id`` of a prefill node has ended: it starts no further write."""
        for entry in self._entries.values():
            if entry.instance_id == instance_id:
                entry.free_at = min(entry.free_at, now + self._quarantine_secs)

    def writer_gone(self, instance_id: str) -> None:
        """Release what waits for the run ``instance_id``, which wrote through shared memory alone and has let
        go of it: nothing lands any more."""
        for entry in tuple(self._entries.values()):
            if entry.instance_id == instance_id:
                del self._entries[entry.room]
                self._release(entry)

    def postpone(self, secs: float) -> None:
        """Move all times by ``secs`` in which this node stood still."""
        for entry in self._entries.values():
            entry.free_at += secs
            entry.since += secs

    def expire(self, now: float) -> None:
        """Release holdings whose slots are safe to reuse by now."""
        for entry in tuple(self._entries.values()):
            if entry.free_at <= now:
                del self._entries[entry.room]
                self._release(entry)
