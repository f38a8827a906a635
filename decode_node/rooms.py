"""Owns the live requests, by room, and their way through the states. Pure: no tensors, no sockets.

Every way out of the node ends in ``end``, the one release path: it decides whether slots are free at once or
quarantined. What a move needs done to memory and tables is the engine's business, around the call.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto

from decode_node.pools import PoolKind, Pools, SlotCounts, Stage
from decode_node.quarantine import Quarantine, Quarantined
from decode_node.request import PeerAddress, Request, RequestState
from decode_node.scheduler import Admission, Growth, Resumption
from protocol.engine_messages import Mode
from protocol.messages import Room

_REMOTELY_WRITTEN = {
    Mode.HISPARSE: frozenset({PoolKind.HOST, PoolKind.INDEX, PoolKind.AUX}),
    Mode.DENSE: frozenset({PoolKind.DEVICE, PoolKind.INDEX, PoolKind.AUX}),
}
"""The pools in which the prefill node writes a landing request; the rest of its slots is never remote."""


class Landing(Enum):
    """What is known of a room's remote writes when its request ends."""

    QUIET = auto()
    """None is in flight."""
    QUIET_AFTER_FAILURE = auto()
    """None is in flight at the prefill node, but a batch failed, so bytes may sit in the transport."""
    IN_FLIGHT = auto()
    """Some may be, or may still start."""
    IN_FLIGHT_AFTER_FAILURE = auto()
    """Some may be, and a batch failed already."""


class DuplicateRoom(Exception):
    """The room, or the request id, belongs to a live request, or to a quarantined one."""


class Rooms:
    """All requests between their arrival and their end. Times are of ``time.monotonic``."""

    def __init__(self, pools: Pools, quarantine_secs: float) -> None:
        self.pools = pools
        self.quarantine = Quarantine(quarantine_secs, pools.release)
        self._by_room: dict[Room, Request] = {}
        self._by_request_id: dict[str, Request] = {}
        self._num_admitted = 0

    def __len__(self) -> int:
        return len(self._by_room)

    def get(self, room: int) -> Request | None:
        return self._by_room.get(Room(room))

    def get_by_id(self, request_id: str) -> Request | None:
        return self._by_request_id.get(request_id)

    def all(self) -> list[Request]:
        return list(self._by_room.values())

    def select(self, *states: RequestState) -> list[Request]:
        """Live requests in ``states``, in order of arrival."""
        return [request for request in self._by_room.values() if request.state in states]

    def of_peer(self, peer: PeerAddress) -> list[Request]:
        return [request for request in self._by_room.values() if request.peer == peer]

    def expired(self, now: float) -> list[Request]:
        """Live requests that have been in their state for too long."""
        return [request for request in self._by_room.values() if request.deadline <= now]

    # --- the moves --------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """Take a new request in. Raises DuplicateRoom; the request that has the room stands."""
        if request.room in self._by_room or request.room in self.quarantine:
            where = "quarantined after a failed transfer" if request.room in self.quarantine else "in use"
            raise DuplicateRoom(f"bootstrap_room {request.room} is {where} on this node; send another room")
        if request.request_id in self._by_request_id:
            raise DuplicateRoom(f"request id {request.request_id} is in use on this node")
        self._by_room[request.room] = request
        self._by_request_id[request.request_id] = request

    def queue(self, request: Request, deadline: float) -> None:
        """CONNECTING → WAITING: the prefill node is registered with."""
        request.move(RequestState.WAITING)
        request.deadline = deadline

    def unqueue(self, request: Request, deadline: float) -> None:
        """WAITING → CONNECTING: the prefill node is away, but this request was not its yet."""
        request.move(RequestState.CONNECTING)
        request.deadline = deadline

    def admit(self, admission: Admission, instance_id: str, deadline: float) -> None:
        """WAITING → LANDING, with everything reserved. Raises PoolExhausted, and then nothing changed."""
        request = admission.request
        holding = self.pools.reserve(request.room, admission.need)
        request.move(RequestState.LANDING)
        request.holding = holding
        request.mode = admission.mode
        request.hot_capacity = admission.hot_capacity
        request.instance_id = instance_id
        request.deadline = deadline
        request.admitted_seq = self._num_admitted
        self._num_admitted += 1

    def start(self, request: Request, lands_until: float = 0.0) -> None:
        """LANDING → RUNNING: all bytes are here, the aux record is read.

        ``lands_until``: when a batch was repeated, how long its bytes may land once more. They are the same,
        so the request may use them; its slots serve nobody else before.
        """
        request.move(RequestState.RUNNING)
        request.deadline = float("inf")
        request.lands_until = lands_until
        if not lands_until:
            self.pools.give_up(request.owned, [PoolKind.AUX])
        self.pools.move(request.owned, Stage.RUNNING)

    def postpone(self, secs: float) -> None:
        """This node stood still for ``secs``, in which nothing could land."""
        self.quarantine.postpone(secs)
        for request in self._by_room.values():
            if request.lands_until:
                request.lands_until += secs

    def expire(self, now: float) -> None:
        """Free what nothing can land in any more."""
        self.quarantine.expire(now)
        for request in self._by_room.values():
            if 0 < request.lands_until <= now:
                request.lands_until = 0.0
                self.pools.give_up(request.owned, [PoolKind.AUX])

    def grow(self, growth: Growth) -> None:
        """More device pages for a running dense request."""
        self.pools.grow(growth.request.owned, PoolKind.DEVICE, growth.num_slots)

    def retract(self, request: Request, deadline: float) -> None:
        """RUNNING → RETRACTED. The host holds every item by now; a dense request goes on as hisparse."""
        request.move(RequestState.RETRACTED)
        request.deadline = deadline
        request.mode = Mode.HISPARSE
        request.hot_capacity = 0
        request.num_retractions += 1
        self.pools.give_up(request.owned, [PoolKind.DEVICE])
        self.pools.move(request.owned, Stage.RETRACTED)

    def resume(self, resumption: Resumption) -> None:
        """RETRACTED → RUNNING with a new hot buffer. Raises PoolExhausted, and then nothing changed."""
        request = resumption.request
        self.pools.grow(request.owned, PoolKind.DEVICE, resumption.hot_capacity)
        request.move(RequestState.RUNNING)
        request.deadline = float("inf")
        request.hot_capacity = resumption.hot_capacity
        self.pools.move(request.owned, Stage.RUNNING)

    def end(self, request: Request, landing: Landing, now: float) -> None:
        """Any state → ENDED: the one release path.

        ``landing`` matters for a LANDING request only: unless the room is quiet, what the prefill node may
        still write to goes to quarantine; everything else is free at once. So does what a repeated batch of a
        delivered room may still write to.
        """
        was_landing = request.state is RequestState.LANDING
        request.move(RequestState.ENDED)
        del self._by_room[request.room]
        del self._by_request_id[request.request_id]
        holding, request.holding = request.holding, None
        if holding is None:
            return
        may_land = landing is not Landing.QUIET if was_landing else request.lands_until > now
        if not may_land:
            self.pools.release(holding)
            return
        self.pools.give_up(holding, set(PoolKind) - _REMOTELY_WRITTEN[request.mode])
        self.pools.move(holding, Stage.QUARANTINED)
        entry = Quarantined(
            request.room, holding, request.peer, request.instance_id, batch_failed=False, since=now
        )
        self.quarantine.add(entry)
        if not was_landing:
            entry.batch_failed, entry.free_at = True, request.lands_until
            return
        entry.batch_failed = landing in (Landing.QUIET_AFTER_FAILURE, Landing.IN_FLIGHT_AFTER_FAILURE)
        if landing is Landing.QUIET_AFTER_FAILURE:
            self.quarantine.quiet(request.room, True, now)

    def stuck(self, now: float) -> SlotCounts:
        """Slots in quarantine that may never be free again: their prefill node gives no sign of life."""
        return self.pools.held_by(entry.holding for entry in self.quarantine.stuck(now))

    # --- what the node holds ----------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless every slot is free, or held by exactly the requests known here."""
        states = Counter(request.state for request in self._by_room.values())
        self.pools.check_integrity(
            {
                Stage.LANDING: states[RequestState.LANDING],
                Stage.RUNNING: states[RequestState.RUNNING],
                Stage.RETRACTED: states[RequestState.RETRACTED],
                Stage.QUARANTINED: len(self.quarantine),
            }
        )
