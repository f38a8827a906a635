"""Applies what prefill nodes say, and what becomes of them, to requests and quarantined rooms.

The engine gives ``PrefillEvents`` every event that ``PrefillPeers.poll`` returns. It owns no state: requests
are moved by ``QueueMoves``, ``PlanMoves`` and ``EndMoves``, and quarantined slots belong to ``Quarantine``. A
message about a room counts only if it comes from the run (one process, with an ``instance_id``) of the
prefill node that was given the room; a later run of the same node knows nothing of the writes in flight.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import assert_never

from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node.peer_events import (
    AboutRoom,
    InstanceGone,
    PeerEvent,
    PeerLost,
    PeerReady,
    PeerRefused,
    RanksChanged,
    RoomMessage,
    WriterGone,
)
from hisparse_pd.decode_node.plan_moves import PlanMoves, bootstrap_of
from hisparse_pd.decode_node.quarantine import Quarantined
from hisparse_pd.decode_node.queue_moves import QueueMoves
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.engine.messages import PromptScores
from hisparse_pd.protocol.messages import AbortRoom, Room, RoomDone, RoomFailed, RoomQuiet, RoomScores
from hisparse_pd.protocol.prompt_scores import score_dtype
from hisparse_pd.transfer.aux_record import AuxMismatch

log = logging.getLogger(__name__)

_RETRYABLE_STATUSES = (429, 500, 502, 503)
"""Statuses of failed rooms that another prefill node may serve: this one is full, its forward failed, or it
is cut off or stopping."""


class PrefillEvents:
    """Handlers of the events of all prefill nodes, and of what an operator says of them."""

    def __init__(self, queue: QueueMoves, plans: PlanMoves) -> None:
        self.queue = queue
        self.plans = plans
        self.ends = plans.ends
        self.requests = plans.requests
        self.peers = plans.peers
        self.metrics = plans.metrics

    def handle(self, event: PeerEvent, now: float) -> None:
        quarantine = self.requests.quarantine
        match event:
            case PeerReady():
                self._repeat_messages(event)
            case PeerRefused():
                for request in self.requests.of_peer(event.address):
                    if request.state in (RequestState.CONNECTING, RequestState.WAITING):
                        self._fail_waiting(request, event.error, now)
            case PeerLost():
                self._fail_requests_of(event, now)
            case InstanceGone():  # it starts no more writes, but one may still land
                quarantine.instance_gone(event.instance_id, now)
            case WriterGone():  # it has let go of shared memory: nothing lands any more
                quarantine.writer_gone(event.instance_id)
            case RanksChanged():
                self.queue.readdress(event.node, now)
            case RoomMessage():
                self._take_room_message(event, now)
            case _:
                assert_never(event)

    def _repeat_messages(self, event: PeerReady) -> None:
        """Repeat the Bootstraps and AbortRooms that the same run may have missed while this node was not
        registered with it. Repetition is harmless. Bootstraps that were not sent yet are left out: they would
        let the prefill node read keys that are still on their way from main memory, and if they cannot be
        sent later, their slots are free at once."""
        for request in self.requests.of_peer(event.address):
            is_landing = request.state is RequestState.LANDING and request.instance_id == event.instance_id
            if is_landing and not self.plans.is_unsent(request):
                self.peers.send(event.address, bootstrap_of(request))
        for entry in self.requests.quarantine:
            if (
                entry.peer == event.address
                and entry.instance_id == event.instance_id
                and entry.is_unacknowledged
            ):
                abort = AbortRoom(entry.room, "the request has ended", entry.attempt)
                self.peers.send(event.address, abort)

    def _fail_requests_of(self, event: PeerLost, now: float) -> None:
        """Fail the requests that need the lost peer. Running ones do not need it. Those that arrived after
        its last message go on waiting for it."""
        for request in self.requests.of_peer(event.address):
            match request.state:
                case RequestState.LANDING:
                    if request.instance_id == event.instance_id:
                        self._fail_transfer(request, 502, event.error, now, PREFILL_NODE_FAILED)
                case RequestState.CONNECTING | RequestState.WAITING:
                    if request.arrived_at <= event.last_heard_at:
                        self._fail_waiting(request, event.error, now)
                case RequestState.FETCHING | RequestState.RUNNING | RequestState.ENDING | RequestState.ENDED:
                    pass
                case _:
                    assert_never(request.state)

    def _fail_waiting(self, request: Request, error: str, now: float) -> None:
        """Fail a request that owns nothing yet, unless it can do without its prefill node by now."""
        if not self.queue.wait_locally(request):
            self.ends.fail(request, 502, error, now, PREFILL_NODE_FAILED)

    def _fail_transfer(self, request: Request, status: int, error: str, now: float, code: str = "") -> None:
        self.metrics.add("kv_transfer_failures_total")
        self.ends.fail(request, status, error, now, code)

    def _take_room_message(self, event: RoomMessage, now: float) -> None:
        """Apply a message to the room's landing request, its quarantined slots, or both: a RoomFailed ends
        the request, which quarantines its slots, and may also say that these are safe."""
        room = Room(event.message.room)
        request = self.requests.get(room)
        sender = (event.address, event.instance_id)
        was_landing = (
            request is not None
            and (request.peer, request.instance_id) == sender
            and request.state is RequestState.LANDING
            and _is_about(event.message, request.attempt)
        )
        if request is not None and was_landing:
            self._handle_for_landing(request, event.message, now)
        entry = self.requests.quarantine.get(room)
        is_of_sender = entry is not None and (entry.peer, entry.instance_id) == sender
        if entry is not None and is_of_sender and _is_about(event.message, entry.attempt):
            self._handle_for_quarantined(entry, event.message, now)
        elif not was_landing:
            self.metrics.drop("late" if request is not None or is_of_sender else "unknown_room")

    def _handle_for_landing(self, request: Request, message: AboutRoom, now: float) -> None:
        match message:
            case RoomScores():
                self._pass_scores_on(request, message, now)
            case RoomDone():
                self.take_kv(request, message, now)
            case RoomFailed():
                code = PREFILL_NODE_FAILED if message.status in _RETRYABLE_STATUSES else ""
                self._fail_transfer(request, message.status, message.error, now, code)
            case RoomQuiet():  # of a node that says no attempt
                # It answers an AbortRoom that was sent again for an earlier request with this room.
                self.metrics.drop("late")
            case _:
                assert_never(message)

    def _handle_for_quarantined(self, entry: Quarantined, message: AboutRoom, now: float) -> None:
        quarantine = self.requests.quarantine
        match message:
            case RoomScores():
                pass  # their request has ended
            case RoomDone():
                quarantine.quiet(entry.room, batch_failed=False, now=now)
            case RoomQuiet():
                quarantine.quiet(entry.room, message.batch_failed, now)
            case RoomFailed():
                if message.quiet:  # it writes no more
                    quarantine.quiet(entry.room, message.batch_failed, now)
                elif message.batch_failed:  # remembered until the room is quiet
                    quarantine.failed(entry.room)
            case _:
                assert_never(message)

    def _pass_scores_on(self, request: Request, message: RoomScores, now: float) -> None:
        """Pass logprobs of prompt tokens on to the front. Messages out of order, or not as wanted, fail the
        request."""
        row_bytes = score_dtype(message.num_top).itemsize
        wanted = request.scores
        if (
            wanted is None
            or message.first != wanted.first + request.num_scored
            or message.num_top > wanted.num_top
            or len(message.rows) % row_bytes
        ):
            error = f"scores of its prompt from position {message.first} on, which it does not wait for"
            self._fail_wrong_scores(request, error, now)
            return
        request.num_scored += len(message.rows) // row_bytes
        self.ends.send(PromptScores(request.request_id, message.num_top, message.rows))

    def _fail_wrong_scores(self, request: Request, error: str, now: float) -> None:
        self.ends.abort_at_peer(request, error)
        text = f"prefill node {request.peer} sent {error}"
        self._fail_transfer(request, 502, text, now, PREFILL_NODE_FAILED)

    def take_kv(self, request: Request, message: RoomDone, now: float) -> None:
        """Take the aux record of a request all of whose KV has landed, and start the request."""
        if request.scores is not None:
            num_wanted = max(0, request.num_prompt_tokens - request.scores.first)
            if request.num_scored != num_wanted:
                error = f"the scores of {request.num_scored} of {num_wanted} positions; the others are lost"
                self._fail_wrong_scores(request, error, now)
                return
        self.metrics.add("kv_transfer_bytes_total", message.num_bytes)
        self.metrics.add("kv_transfer_seconds_total", message.transfer_secs)
        try:
            aux_slot = request.owned.only_slot(PoolKind.AUX)
            record = self.plans.tables.memory.take_aux(aux_slot, request.room)
        except AuxMismatch as error:
            unusable = f"the transfer from {request.peer} is unusable: {error}"
            self._fail_transfer(request, 500, unusable, now)
            return
        self.metrics.add("cached_tokens_total", message.num_cached_tokens)
        request.delivery = message
        if record.hint is not None:
            request.hot_positions = self.plans.tables.by_hot_group(record.hint)
            # Further samples of the prompt copy its KV when they are admitted, and begin with the same hint.
            request.landed_hint = request.hot_positions if request.has_further_samples else None
        self.plans.start(request, now)

    # --- quarantine -------------------------------------------------------------------------------

    def release_quarantine(self, instance_id: str, now: float) -> None:
        """Release the rooms of a run that an operator declares over, unless that run still answers."""
        peers = {entry.peer for entry in self.requests.quarantine if entry.instance_id == instance_id}
        for peer in peers:
            if self.peers.is_registered(peer) and self.peers.instance_id(peer) == instance_id:
                log.error("run %s of prefill node %s answers: nothing is released", instance_id, peer)
                return
        log.warning("run %s of %s is over, says an operator", instance_id, ", ".join(map(str, peers)) or "-")
        self.requests.quarantine.instance_gone(instance_id, now)

    def expire_quarantine(self, now: float) -> None:
        """Free quarantined slots that are safe to reuse. Log, once, which prefill nodes do not let go of
        theirs, and the remedy."""
        self.requests.quarantine.expire(now)
        stuck = self.requests.quarantine.newly_stuck(now)
        num_rooms_of = Counter((entry.peer, entry.instance_id) for entry in stuck)
        for (peer, instance_id), num_rooms in num_rooms_of.items():
            log.warning(
                "prefill node %s (run %s) has not said of %d rooms that nothing lands there any more; their "
                "slots serve nobody until it does, until another run answers in its place, or until you "
                "declare it dead: POST /release_quarantine?instance_id=%s",
                peer,
                instance_id,
                num_rooms,
                instance_id,
            )


def _is_about(message: AboutRoom, attempt: int) -> bool:
    """Whether a message is about this attempt of its room. An answer that was said twice, as to an AbortRoom
    that was sent again, may come when another request has the room: it says nothing of that one's writes."""
    match message:
        case RoomFailed() | RoomQuiet():
            return message.attempt in (0, attempt)
    return True
