"""Applies what prefill nodes say, and what becomes of them, to requests and quarantined rooms.

The engine gives ``PrefillEvents`` every event that ``PrefillPeers.poll`` returns. It owns no state: requests
are moved by ``RequestLife``, and quarantined slots belong to ``Quarantine``. A message about a room counts
only if it comes from the run of the prefill node that was given the room; its successor knows nothing of
writes in flight.
"""

from __future__ import annotations

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
from hisparse_pd.decode_node.quarantine import Quarantined
from hisparse_pd.decode_node.request import Request, RequestState
from hisparse_pd.decode_node.request_life import RequestLife, bootstrap_of
from hisparse_pd.engine.messages import PromptScores
from hisparse_pd.protocol.messages import AbortRoom, Room, RoomDone, RoomFailed, RoomQuiet, RoomScores
from hisparse_pd.protocol.prompt_scores import score_dtype
from hisparse_pd.transfer.aux_record import AuxMismatch

_RETRYABLE_STATUSES = (429, 500, 502, 503)
"""Statuses of failed rooms that another prefill node may serve: this one is full, its forward failed, or it
is cut off or stopping."""


class PrefillEvents:
    """Handlers of the events of all prefill nodes."""

    def __init__(self, life: RequestLife) -> None:
        self.life = life

    def handle(self, event: PeerEvent, now: float) -> None:
        quarantine = self.life.requests.quarantine
        match event:
            case PeerReady():
                self._repeat_messages(event)
            case PeerRefused():
                for request in self.life.requests.of_peer(event.address):
                    if request.state in (RequestState.CONNECTING, RequestState.WAITING):
                        self._fail_waiting(request, event.error, now)
            case PeerLost():
                self._fail_requests_of(event, now)
            case InstanceGone():
                quarantine.instance_gone(event.instance_id, now)
            case WriterGone():
                quarantine.writer_gone(event.instance_id)
            case RanksChanged():
                self._readdress(event, now)
            case RoomMessage():
                self._take_room_message(event, now)
            case _:
                assert_never(event)

    def _readdress(self, event: RanksChanged, now: float) -> None:
        """Move requests that no rank has been given yet to the rank that serves their room now."""
        life = self.life
        for request in life.requests.select(RequestState.CONNECTING, RequestState.WAITING):
            if request.peer.node != event.node or request.is_local:
                continue
            address = life.peers.address_for(*event.node, request.room)
            if address != request.peer:
                until = now + life.contact_timeout_secs
                life.requests.queue(request, RequestState.CONNECTING, until, address)
                life.peers.use(address, now)

    def _repeat_messages(self, event: PeerReady) -> None:
        """Repeat what the same run may have missed before it registered this node; repetition is harmless."""
        life = self.life
        for request in life.requests.of_peer(event.address):
            if request.state is RequestState.LANDING and request.instance_id == event.instance_id:
                life.peers.send(event.address, bootstrap_of(request))
        for entry in life.requests.quarantine:
            if (
                entry.peer == event.address
                and entry.instance_id == event.instance_id
                and entry.is_unacknowledged
            ):
                life.peers.send(event.address, AbortRoom(entry.room, "the request has ended"))

    def _fail_requests_of(self, event: PeerLost, now: float) -> None:
        """Fail the requests that need the lost peer. Running ones do not need it. Those that arrived after
        its last message go on waiting for it."""
        for request in self.life.requests.of_peer(event.address):
            match request.state:
                case RequestState.LANDING:
                    if request.instance_id == event.instance_id:
                        self._fail_transfer(request, 502, event.error, now, PREFILL_NODE_FAILED)
                case RequestState.CONNECTING | RequestState.WAITING:
                    if request.arrived_at <= event.last_heard_at:
                        self._fail_waiting(request, event.error, now)
                case RequestState.RUNNING | RequestState.ENDING | RequestState.ENDED:
                    pass
                case _:
                    assert_never(request.state)

    def _fail_waiting(self, request: Request, error: str, now: float) -> None:
        """Fail a request that owns nothing yet, unless it can do without its prefill node by now."""
        if not self.life.wait_locally(request):
            self.life.fail(request, 502, error, now, PREFILL_NODE_FAILED)

    def _fail_transfer(self, request: Request, status: int, error: str, now: float, code: str = "") -> None:
        self.life.metrics.add("kv_transfer_failures_total")
        self.life.fail(request, status, error, now, code)

    def _take_room_message(self, event: RoomMessage, now: float) -> None:
        requests, metrics = self.life.requests, self.life.metrics
        room = Room(event.message.room)
        request = requests.get(room)
        sender = (event.address, event.instance_id)
        was_landing = (
            request is not None
            and (request.peer, request.instance_id) == sender
            and request.state is RequestState.LANDING
        )
        if request is not None and was_landing:
            self._take_of_landing(request, event.message, now)
        entry = requests.quarantine.get(room)  # just entered if the message has ended the request
        if entry is not None and (entry.peer, entry.instance_id) == sender:
            self._take_of_quarantined(entry, event.message, now)
        elif not was_landing:
            metrics.drop("late" if request is not None else "unknown_room")

    def _take_of_landing(self, request: Request, message: AboutRoom, now: float) -> None:
        match message:
            case RoomScores():
                self._pass_scores_on(request, message, now)
            case RoomDone():
                self.take_kv(request, message, now)
            case RoomFailed():
                code = PREFILL_NODE_FAILED if message.status in _RETRYABLE_STATUSES else ""
                self._fail_transfer(request, message.status, message.error, now, code)
            case RoomQuiet():
                self.life.metrics.drop("late")
            case _:
                assert_never(message)

    def _take_of_quarantined(self, entry: Quarantined, message: AboutRoom, now: float) -> None:
        quarantine = self.life.requests.quarantine
        match message:
            case RoomScores():
                pass  # their request has ended
            case RoomDone():
                quarantine.quiet(entry.room, batch_failed=False, now=now)
            case RoomQuiet():
                quarantine.quiet(entry.room, message.batch_failed, now)
            case RoomFailed():
                if message.batch_failed:
                    quarantine.failed(entry.room)
                if message.quiet:
                    quarantine.quiet(entry.room, message.batch_failed, now)
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
        self.life.send(PromptScores(request.request_id, message.num_top, message.rows))

    def _fail_wrong_scores(self, request: Request, error: str, now: float) -> None:
        self.life.abort_at_peer(request, error)
        text = f"prefill node {request.peer} sent {error}"
        self._fail_transfer(request, 502, text, now, PREFILL_NODE_FAILED)

    def take_kv(self, request: Request, message: RoomDone, now: float) -> None:
        """Take the aux record of a request all of whose KV has landed, and start the request."""
        life = self.life
        if request.scores is not None:
            num_wanted = max(0, request.num_prompt_tokens - request.scores.first)
            if request.num_scored != num_wanted:
                error = f"the scores of {request.num_scored} of {num_wanted} positions; the others are lost"
                self._fail_wrong_scores(request, error, now)
                return
        life.metrics.add("kv_transfer_bytes_total", message.num_bytes)
        life.metrics.add("kv_transfer_seconds_total", message.transfer_secs)
        try:
            aux_slot = request.owned.only_slot(PoolKind.AUX)
            record = life.tables.memory.take_aux(aux_slot, request.room)
        except AuxMismatch as error:
            unusable = f"the transfer from {request.peer} is unusable: {error}"
            self._fail_transfer(request, 500, unusable, now)
            return
        life.metrics.add("cached_tokens_total", message.num_cached_tokens)
        request.delivery = message
        if record.hint is not None:
            request.hot_positions = life.tables.by_hot_group(record.hint)
            request.landed_hint = request.hot_positions if request.has_further_samples else None
        life.start(request, now)
