"""Moves a prefill node's requests from state to state, with the pages and messages that go with each move.

``PrefillLife`` owns the table of requests and the counters; their pages are those of ``PromptPages``.
``arrivals.py`` opens requests. For each of them ``PromptSteps`` calls ``candidates`` and ``admit``, for each
chunk ``send_scores`` and ``note_computed``, and after the last chunk ``start_sending``; for one whose prefix
came up wrong it calls ``begin_anew``. The engine calls ``batch_returned`` for each write that the sender is
done with, and ``DecodeEvents`` ends the rooms that a decode node gives up.

``fail`` ends a request early, and a request fails with the first of its writes that fails. Writes read the
request's pages, so a failed request drains: ``_end``, the one release path, waits until none of its writes is
in the transport. The room is then quiet. Its decode node, which keeps the landing zone in quarantine until
then, is told so by RoomFailed with ``quiet`` or by RoomQuiet.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from hisparse_pd.core.paging.allocator import PoolIntegrityError
from hisparse_pd.engine.phases import PREFILL_PHASES
from hisparse_pd.prefill_node.prompt_pages import PromptPages
from hisparse_pd.prefill_node.push import Pusher
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.requests import Delivery, PrefillRequest, PrefillRequests, PrefillState
from hisparse_pd.prefill_node.scheduler import Running, Waiting
from hisparse_pd.protocol.messages import (
    MAX_TEXT_CHARS,
    AbortRoom,
    Bootstrap,
    PrefillTimes,
    Room,
    RoomDone,
    RoomFailed,
    RoomQuiet,
    RoomScores,
    ToDecode,
)
from hisparse_pd.transfer.sender import Completion

log = logging.getLogger(__name__)

# Totals that begin at 0, so that an alert sees the first event, too.
_COUNTERS = (
    "prompt_tokens_total",
    "cached_tokens_total",
    "kv_transfer_bytes_total",
    "kv_transfer_seconds_total",
    "kv_transfer_failures_total",
    "aborted_requests_total",
    "failed_requests_total",
)


class PrefillLife:
    """The requests of one prefill engine. Times are those of one monotone clock."""

    def __init__(
        self,
        pages: PromptPages,
        pusher: Pusher,
        tell_peer: Callable[[Peer, ToDecode], bool],
        *,
        room_timeout_secs: float,
        grace_secs: float,
    ) -> None:
        """``tell_peer`` sends a message without waiting and returns whether it is on its way.
        ``room_timeout_secs``: how long a decode node waits for anything about a room; this node keeps the
        request ``grace_secs`` longer, so that clients get the decode node's error."""
        self.requests = PrefillRequests()
        self.counters: defaultdict[str, float] = defaultdict(float, dict.fromkeys(_COUNTERS, 0.0))
        """Monotone totals, by metric name."""
        self.dropped: Counter[str] = Counter()
        """Control messages without effect, by reason."""
        self.pages = pages
        self.set_aside = pages.set_aside
        self.pusher = pusher
        self.tell_peer = tell_peer
        self._room_timeout_secs = room_timeout_secs
        self._grace_secs = grace_secs

    @property
    def keep_secs(self) -> float:
        """How long a request is kept that waits to be begun."""
        return self._room_timeout_secs + self._grace_secs

    def __len__(self) -> int:
        return len(self.requests)

    # --- computing -----------------------------------------------------------------------------------

    def running(self) -> list[Running]:
        """Return the requests in COMPUTING for the scheduler, in order of admission, with all their
        keys: a waiting prompt that begins with the same ones waits until these pages are cached."""
        return [
            Running(request.room, request.num_computed_tokens, request.num_ready_tokens, request.keys)
            for request in self.requests.in_state(PrefillState.COMPUTING)
        ]

    def waiting(self) -> list[PrefillRequest]:
        """Return the requests in QUEUED, in order of arrival."""
        return list(self.requests.in_state(PrefillState.QUEUED))

    def candidates(self, *, may_be_arriving: bool) -> Iterator[Waiting]:
        """Yield the waiting requests in order of arrival, without those whose decode node has too many bytes
        pending, and those whose pages are on their way from the store or from their decode node. Cached
        prefixes of earlier candidates count as pending, because admission sends them.

        ``may_be_arriving``: whether to yield those whose pages are on their way up, too. Their layers wait
        for the copies, and so does the whole forward."""
        num_bytes_pending: dict[str, int] = {}
        for request in self.waiting():
            session = request.peer.session
            if session not in num_bytes_pending:
                num_bytes_pending[session] = self.pusher.num_bytes_pending(request.peer)
            if not self.pusher.may_start(request, num_bytes_pending[session]):
                continue
            waiting = self.pages.look_up(request)
            if self.pages.fetch(request, waiting) or (waiting.is_arriving and not may_be_arriving):
                continue
            num_cached_tokens = waiting.num_cached_pages * self.pages.page_size
            num_to_send = max(0, num_cached_tokens - request.bootstrap.num_held_tokens)
            num_bytes_pending[session] += self.pusher.num_bytes(num_to_send)
            yield waiting

    def admit(self, requests: Sequence[PrefillRequest], now_secs: float) -> None:
        """Move the requests of a plan from QUEUED to COMPUTING: reserve all their pages and an aux slot each.
        All cached prefixes are in use before the first page is reserved, because that may evict unused
        ones."""
        for request in requests:
            self.pages.use_cached(request)
        for request in requests:
            self.pages.reserve(request)
            self.requests.move(request, PrefillState.COMPUTING, now_secs)
            self.counters["prompt_tokens_total"] += request.num_computed_tokens
            self.counters["cached_tokens_total"] += request.num_cached_tokens

    def begin_anew(self, request: PrefillRequest, now_secs: float) -> None:
        """Move a request back from COMPUTING to QUEUED, as if it had not been admitted: a row of its prefix
        was wrong. Nothing of it may have been sent."""
        if request.num_writes_pending:
            raise PoolIntegrityError(
                f"room {request.room} begins anew with {request.num_writes_pending} writes in flight"
            )
        self.counters["prompt_tokens_total"] -= request.num_computed_tokens
        self.counters["cached_tokens_total"] -= request.num_cached_tokens
        self.pages.take_back(request)
        self.requests.move(request, PrefillState.QUEUED, now_secs)

    def send_scores(self, request: PrefillRequest, pieces: Sequence[RoomScores], now_secs: float) -> bool:
        """Send the decode node the scores that a forward computed. Return False when not all are on their
        way; the request has then failed."""
        if all(self.tell_peer(request.peer, piece) for piece in pieces):
            return True
        error = (
            f"room {request.room}: logprobs of the prompt could not be sent to decode node "
            f"{request.peer.node_id}: its connection is gone, or its queue is full"
        )
        self.fail(request, 502, error, now_secs)
        return False

    def note_computed(self, request: PrefillRequest, stop: int) -> None:
        """Note that all layers up to position ``stop`` are in the pool."""
        request.num_ready_tokens = stop

    def start_sending(self, request: PrefillRequest, now_secs: float) -> None:
        """Move a request whose last chunk is computed from COMPUTING to SENDING, and send its staged aux
        record. Its pages go into the cache while the record is on its way."""
        self.requests.move(request, PrefillState.SENDING, now_secs)
        self.pusher.push_aux(request)
        self.pages.cache(request)

    def batch_returned(self, completion: Completion, now_secs: float) -> None:
        """Account for a batch that came back from the sender, and end its request if it was the last or
        failed."""
        request = self.requests.get(completion.room)
        if request is None:
            raise PoolIntegrityError(
                f"room {completion.room} was released before its batch {completion.tag} came back"
            )
        request.num_writes_pending -= 1
        request.num_bytes_sent += completion.num_bytes
        request.transfer_secs += completion.secs
        # ``batch_failed`` tells the decode node that bytes may still land, which not every failure means.
        request.batch_failed |= completion.may_still_land
        self.counters["kv_transfer_bytes_total"] += completion.num_bytes
        self.counters["kv_transfer_seconds_total"] += completion.secs
        if request.is_draining:
            if request.num_writes_pending == 0:
                attempt = request.bootstrap.attempt
                self.tell_peer(request.peer, RoomQuiet(request.room, request.batch_failed, attempt))
                self._end(request, PrefillState.FAILED, now_secs)
        elif not completion.ok:
            self.counters["kv_transfer_failures_total"] += 1
            what = f"sending {completion.tag} to decode node {request.peer.node_id}"
            error = f"room {request.room}: {what}: {completion.error}"
            self.fail(request, 502, error, now_secs)
        elif request.state is PrefillState.SENDING and request.num_writes_pending == 0:
            self._deliver(request, now_secs)

    def _deliver(self, request: PrefillRequest, now_secs: float) -> None:
        """Tell the decode node that all bytes have landed, and end the request in DONE."""
        request.phases.end(now_secs)
        done = RoomDone(
            request.room,
            request.num_bytes_sent,
            request.num_cached_tokens,
            request.transfer_secs,
            PrefillTimes(*map(request.phases.secs, PREFILL_PHASES)),
            request.fetched,
        )
        request.delivery = Delivery(request.peer.node_id, request.bootstrap.attempt, done)
        self.tell_peer(request.peer, done)
        self._end(request, PrefillState.DONE, now_secs)

    # --- ends without delivery -----------------------------------------------------------------------

    def fail(
        self,
        request: PrefillRequest,
        status: int,
        error: str,
        now_secs: float,
        *,
        tell_peer: bool = True,
        is_abort: bool = False,
    ) -> None:
        """End a request early and tell its decode node. With writes in flight the request drains first, and
        the decode node is told again when it is quiet. One that drains already stays as it is.

        ``is_abort``: the request is no longer wanted, which counts as aborted and not as failed.
        """
        if request.is_draining:
            return
        log.info("room %d failed in %s: %d %s", request.room, request.state.name, status, error)
        request.end_status, request.end_error = status, error
        self.pusher.cancel(request)
        is_quiet = request.num_writes_pending == 0
        self.counters["aborted_requests_total" if is_abort else "failed_requests_total"] += 1
        if tell_peer:
            failed = room_failed(
                request.bootstrap, status, error, quiet=is_quiet, batch_failed=request.batch_failed
            )
            self.tell_peer(request.peer, failed)
        if is_quiet:
            self._end(request, PrefillState.FAILED, now_secs)
        else:
            self.pages.drain(request)
            self.requests.move(request, PrefillState.DRAINING, now_secs)

    def abort_room(self, peer: Peer, message: AbortRoom, now_secs: float) -> None:
        """End a request that its decode node gave up. Answers RoomQuiet, at once or after the last write.

        An AbortRoom of another attempt than the live one came late over an earlier connection. It ends
        nothing, and of its own attempt nothing is in flight."""
        room = Room(message.room)
        request = self.requests.get(room)
        if request is None or request.peer.node_id != peer.node_id:
            ended = self.requests.ended(room)
            self.dropped["unknown_room" if ended is None else "late"] += 1
            batch_failed = ended is not None and ended.batch_failed
            self.requests.note_given_up(room, peer.session, message.attempt)
            self.tell_peer(peer, RoomQuiet(room, batch_failed, message.attempt))
            return
        if message.attempt not in (0, request.bootstrap.attempt):
            self.dropped["late"] += 1
            self.tell_peer(peer, RoomQuiet(room, batch_failed=False, attempt=message.attempt))
            return
        if request.is_draining:  # RoomQuiet follows its last write
            return
        error = f"room {room}: decode node {peer.node_id} gave it up: {message.reason}"
        self.fail(request, 503, error, now_secs, tell_peer=False, is_abort=True)
        if not request.is_draining:
            self.tell_peer(peer, RoomQuiet(room, request.batch_failed, message.attempt))

    def fail_requests_of(self, peer: Peer, error: str, now_secs: float) -> int:
        """Fail the requests of a decode node that is lost; writes in flight to it drain. Return their
        number."""
        requests = [request for request in self.requests if request.peer is peer]
        for request in requests:
            reason = f"room {request.room}: decode node {peer.node_id} {error}"
            self.fail(request, 502, reason, now_secs)
        return len(requests)

    def fail_overdue(self, rooms: Sequence[Room], now_secs: float) -> None:
        """Fail requests with a write that was in flight for longer than its limit."""
        for room in rooms:
            request = self.requests.get(room)
            if request is not None:
                self.counters["kv_transfer_failures_total"] += 1
                limit_secs = self.pusher.write_timeout_secs
                error = f"room {room}: a write to the decode node took longer than {limit_secs:g} s"
                self.fail(request, 504, error, now_secs)

    def fail_expired(self, now_secs: float) -> None:
        """Fail the requests that waited until their deadline; their decode node has given them up by then."""
        queued = self.requests.in_state(PrefillState.QUEUED)
        # All waits are equally long, so the first to arrive are the first to expire.
        late = takewhile(lambda request: request.deadline_secs < now_secs, queued)
        for request in list(late):
            error = (
                f"room {request.room}: it was not begun within {self.keep_secs:g} s (--room-timeout-secs "
                f"{self._room_timeout_secs:g}, and {self._grace_secs:g} s in which the decode node would "
                "have given it up); this prefill node has too much to do"
            )
            self.fail(request, 504, error, now_secs)

    def _end(self, request: PrefillRequest, state: PrefillState, now_secs: float) -> None:
        """Release all that the request owns, of which nothing may be in flight. This is the one release
        path."""
        if request.num_writes_pending:
            raise PoolIntegrityError(
                f"room {request.room} is released with {request.num_writes_pending} writes in flight"
            )
        self.pages.release(request)
        self.requests.move(request, state, now_secs)

    # --- accounts ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless every slot is free, cached, set aside or owned by exactly one
        request."""
        self.pages.check_integrity(self.requests)
        for request in self.waiting():
            if request.holding is not None or request.prefix is not None or request.num_writes_pending:
                raise PoolIntegrityError(
                    f"room {request.room} owns pages or writes in state {request.state.name}"
                )


def room_failed(
    bootstrap: Bootstrap, status: int, error: str, *, quiet: bool, batch_failed: bool
) -> RoomFailed:
    """Return the RoomFailed that answers a Bootstrap, with as much of the error as a message may have."""
    text = error[:MAX_TEXT_CHARS]
    return RoomFailed(bootstrap.room, status, text, quiet, batch_failed, bootstrap.attempt)
