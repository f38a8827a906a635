"""Finds live requests: by room and id, by state, by prefill node, and by deadline.

``LiveRequests`` is a ``RequestIndex`` that knows slots, too. It alone adds requests, moves them on and
forgets them. Thousands may wait: requests are found without a look at all of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.protocol.messages import Room

_NO_PEER: Final = PeerAddress("", 0)
"""Stands for the prefill node of local requests, which wait in one queue."""


class DuplicateRoom(Exception):
    """The room or the request id belongs to a live request, or the room is in quarantine."""


class RequestIndex:
    """All requests between their arrival and their end. Times are those of ``time.monotonic``."""

    def __init__(self) -> None:
        self.num_queue_changes = 0
        """How often a request has entered or left WAITING."""
        self._by_room: dict[Room, Request] = {}
        self._by_request_id: dict[str, Request] = {}
        self._queues: dict[RequestState, dict[PeerAddress, dict[Request, None]]] = {
            RequestState.CONNECTING: {},
            RequestState.WAITING: {},
        }
        """Requests that own nothing yet, by state and prefill node; local ones are under ``_NO_PEER``. No
        queue is empty; those in ``_unsorted`` are out of order, the others are in order of arrival."""
        self._unsorted: set[tuple[RequestState, PeerAddress]] = set()
        """State and prefill node of queues that are sorted when they are next read."""
        self._admitted: dict[RequestState, dict[Request, None]] = {
            RequestState.LANDING: {},
            RequestState.FETCHING: {},
            RequestState.RUNNING: {},
            RequestState.ENDING: {},
        }
        self._next_deadline = float("inf")
        """A time before which no live request's deadline is over. It may be too early: it stays when the
        request that had this deadline gets a later one, or ends."""
        self._num_opened = 0
        """The next ``Request.arrived_seq``."""

    def __len__(self) -> int:
        # Requests that are ENDING have given up their rooms: they are not in ``_by_room``.
        return len(self._by_room) + len(self._admitted[RequestState.ENDING])

    def get(self, room: int) -> Request | None:
        return self._by_room.get(Room(room))

    def get_by_id(self, request_id: str) -> Request | None:
        return self._by_request_id.get(request_id)

    def all(self) -> list[Request]:
        return list(self._by_room.values())

    def select(self, *states: RequestState) -> list[Request]:
        """Return live requests, state by state; those that wait are in order of arrival."""
        found: list[Request] = []
        for state in states:
            found += self._admitted[state] if state in self._admitted else self._in_order(state)
        return found

    def waiting(self) -> Iterator[Request]:
        """Iterate over the admission queue in order of arrival. It must not change meanwhile."""
        return self._in_order(RequestState.WAITING)

    def _in_order(self, state: RequestState) -> Iterator[Request]:
        return heapq.merge(*(self.queued(state, peer) for peer in self._queues[state]), key=_arrival)

    def queued_at(self, state: RequestState) -> list[PeerAddress]:
        """Return the prefill nodes for which requests are in ``state``: CONNECTING or WAITING."""
        return [peer for peer in self._queues[state] if peer != _NO_PEER]

    def queued(self, state: RequestState, peer: PeerAddress) -> Collection[Request]:
        """Return the requests of one prefill node that are CONNECTING or WAITING, in order of arrival."""
        queues = self._queues[state]
        if (state, peer) in self._unsorted and peer in queues:
            queues[peer] = dict.fromkeys(sorted(queues[peer], key=_arrival))
        self._unsorted.discard((state, peer))
        return queues.get(peer, {}).keys()

    def num_queued(self) -> Counter[HisparseFlag]:
        """Count the requests that own nothing yet, by the mode that they ask for."""
        queues = [queue for queues in self._queues.values() for queue in queues.values()]
        return Counter(request.flag for queue in queues for request in queue)

    def of_peer(self, peer: PeerAddress) -> list[Request]:
        """Return the requests of a prefill node, without local ones."""
        queued = [request for state in self._queues for request in self.queued(state, peer)]
        admitted = self.select(RequestState.LANDING, RequestState.RUNNING)
        return queued + [request for request in admitted if request.peer == peer]

    def expired(self, now: float) -> list[Request]:
        """Return live requests whose deadline is over. The caller ends them or sets a new deadline."""
        if now < self._next_deadline:
            return []
        requests = self._by_room.values()
        later = (request.deadline for request in requests if request.deadline > now)
        self._next_deadline = min(later, default=float("inf"))
        return [request for request in requests if request.deadline <= now]

    # --- the moves --------------------------------------------------------------------------------

    def queue(
        self,
        request: Request,
        state: RequestState,
        deadline: float,
        peer: PeerAddress | None = None,
        *,
        is_local: bool = False,
    ) -> None:
        """Move a request to CONNECTING or WAITING. ``peer``: its new rank of the prefill node, if any.
        ``is_local``: see ``Request``."""
        self._leave(request)
        request.peer, request.is_local = peer or request.peer, is_local
        request.move(state)
        self._enter(request, deadline)

    def _add(self, request: Request) -> None:
        """Take a new request in. Raises DuplicateRoom, and then the request that has the room stays."""
        if request.room in self._by_room:
            raise DuplicateRoom(f"bootstrap_room {request.room} is in use on this node; send another room")
        if request.request_id in self._by_request_id:
            raise DuplicateRoom(f"request id {request.request_id} is in use on this node")
        self._by_room[request.room] = request
        self._by_request_id[request.request_id] = request
        request.arrived_seq = self._num_opened
        self._num_opened += 1
        self._enter(request, request.deadline)

    def _forget(self, request: Request) -> None:
        """Free the request's room and id for other requests."""
        del self._by_room[request.room]
        del self._by_request_id[request.request_id]

    def _move(self, request: Request, state: RequestState, deadline: float = float("inf")) -> None:
        self._leave(request)
        request.move(state)
        self._enter(request, deadline)

    def _leave(self, request: Request) -> None:
        if (queues := self._queues.get(request.state)) is None:
            del self._admitted[request.state][request]
            return
        self.num_queue_changes += request.state is RequestState.WAITING
        peer = _queue_of(request)
        del queues[peer][request]
        if not queues[peer]:
            del queues[peer]
            self._unsorted.discard((request.state, peer))

    def _enter(self, request: Request, deadline: float) -> None:
        if (queues := self._queues.get(request.state)) is not None:
            peer = _queue_of(request)
            queue = queues.setdefault(peer, {})
            if queue and _arrival(next(reversed(queue))) > _arrival(request):
                self._unsorted.add((request.state, peer))
            queue[request] = None
            self.num_queue_changes += request.state is RequestState.WAITING
        elif request.state is not RequestState.ENDED:
            self._admitted[request.state][request] = None
        request.deadline = deadline
        self._next_deadline = min(self._next_deadline, deadline)


def _queue_of(request: Request) -> PeerAddress:
    return _NO_PEER if request.is_local else request.peer


def _arrival(request: Request) -> int:
    return request.arrived_seq
