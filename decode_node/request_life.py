"""Moves requests through their states as things happen: front messages, peer events, deadlines, plans.

Each handler does the three parts of a move together: the books (``LiveRequests``), the memory and tables
(``RequestTables``), and the message to the front or the prefill node. A request that ends in the middle of a
step stays ENDING until that step is over; no handler waits for a step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from hisparse_pd.base.settings import HisparsePolicy
from hisparse_pd.base.vocabulary import (
    KV_ROW_CORRUPT,
    PREFILL_NODE_FAILED,
    FinishReason,
    HisparseFlag,
    Mode,
    TokenLogprob,
)
from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.model.sampling import finish_reason
from hisparse_pd.core.paging.extents import slice_extents
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prompt_keys import PageKey, PromptKeys
from hisparse_pd.decode_node.live_requests import DuplicateRoom, LiveRequests
from hisparse_pd.decode_node.metrics import Metrics
from hisparse_pd.decode_node.prefill_peers import (
    InstanceGone,
    PeerEvent,
    PeerLost,
    PeerReady,
    PeerRefused,
    PrefillPeers,
    RanksChanged,
    RoomMessage,
    WriterGone,
)
from hisparse_pd.decode_node.quarantine import Quarantined
from hisparse_pd.decode_node.request import Request, RequestState
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.scheduler import Admission, Exchange, Limits, StepPlan, refusal
from hisparse_pd.engine.messages import (
    FromEngine,
    Generate,
    PromptScores,
    RequestFailed,
    Tokens,
    num_packed_tokens,
)
from hisparse_pd.kernels.hot_state import ReadAt
from hisparse_pd.kernels.row_check import WrongRow
from hisparse_pd.protocol.messages import (
    MAX_TEXT_CHARS,
    TOKEN_BYTES,
    AbortRoom,
    Bootstrap,
    Room,
    RoomDone,
    RoomFailed,
    RoomQuiet,
    RoomScores,
)
from hisparse_pd.protocol.prompt_scores import score_dtype
from hisparse_pd.transfer.aux_record import AuxMismatch

log = logging.getLogger(__name__)

CONTACT_TIMEOUT_SECS = 10.0
"""Longest time that a request waits for its prefill node to be found and registered with."""

_OTHERS_MAY_DO_BETTER = (429, 502, 503)
"""Statuses of failed rooms that another prefill node may serve: this one is full, cut off or stopping."""

_DEFAULT_FLAG = {
    HisparsePolicy.AUTO: HisparseFlag.AUTO,
    HisparsePolicy.ALWAYS: HisparseFlag.TRUE,
    HisparsePolicy.NEVER: HisparseFlag.FALSE,
}


@dataclass
class RequestLife:
    """Handlers of what happens to requests. Times are those of ``time.monotonic``.

    ``send`` takes messages to the front.
    """

    limits: Limits
    policy: HisparsePolicy
    room_timeout_secs: float
    requests: LiveRequests
    tables: RequestTables
    peers: PrefillPeers
    metrics: Metrics
    send: Callable[[FromEngine], None]
    contact_timeout_secs: float = CONTACT_TIMEOUT_SECS
    stream_interval: int = 1
    """Tokens in a message to the front; a request's first and last tokens are sent at once."""

    # --- from the front ---------------------------------------------------------------------------

    def generate(
        self,
        message: Generate,
        root: PageKey,
        prompt: bytes,
        now: float,
        prompt_keys: PromptKeys | None = None,
        prompt_token_ids: NDArray[np.int32] | None = None,
        first_sample: Request | None = None,
    ) -> Request | None:
        """Take a request in and return it, or send the error that refuses it.

        ``root``, ``prompt``: see ``GenerateGroup``; the other arguments: see ``Request``.
        """
        num_prompt_tokens = message.num_prompt_tokens
        # The last output token may be the one past the context's end: its KV is never computed.
        max_new_tokens = min(message.sampling.max_new_tokens, self.limits.max_context + 1 - num_prompt_tokens)
        request = Request(
            request_id=message.request_id,
            room=Room(message.room),
            num_prompt_tokens=num_prompt_tokens,
            sampling=replace(message.sampling, max_new_tokens=max_new_tokens),
            flag=message.hisparse or _DEFAULT_FLAG[self.policy],
            peer=self.peers.address_for(message.bootstrap_host, message.bootstrap_port, message.room),
            arrived_at=now,
            deadline=now + self.contact_timeout_secs,
            prompt=prompt,
            root=root,
            scores=message.scores if message.scores and message.scores.first < num_prompt_tokens else None,
            prompt_keys=prompt_keys,
            is_speculative=message.is_speculative,
            prompt_token_ids=prompt_token_ids if message.sampling.needs_prompt else None,
            first_sample=first_sample,
        )
        error = ""
        if not 1 <= num_prompt_tokens <= self.limits.max_context:
            error = f"the prompt has {num_prompt_tokens} tokens; allowed are 1 to {self.limits.max_context}"
        elif num_prompt_tokens != num_packed_tokens(prompt):
            error = f"{num_packed_tokens(prompt)} of the prompt's {num_prompt_tokens} tokens have come"
        elif max_new_tokens < 1:
            error = f"max_new_tokens is {max_new_tokens}; it must be at least 1"
        error = error or refusal(self.limits, request)
        try:
            if not error:
                self.requests.open(request)
        except DuplicateRoom as duplicate:
            error = str(duplicate)
        if error:
            self.metrics.add("failed_requests_total")
            self.send(RequestFailed(request.request_id, 400, error))
            return None
        self.peers.use(request.peer, now)
        return request

    def abort(self, request_id: str, now: float, *, has_finished: bool = False) -> None:
        """End a request whose client is gone or has its answer. Unknown ids are those of ended requests."""
        request = self.requests.get_by_id(request_id)
        if request is not None:
            if not has_finished:
                self.metrics.add("aborted_requests_total")
            self._tell_peer(request, "the client is gone")
            self._end(request, now, is_sound=True)

    def release_quarantine(self, instance_id: str, now: float) -> None:
        """Release the rooms of a run that an operator declares over, unless that run still answers."""
        peers = {entry.peer for entry in self.requests.quarantine if entry.instance_id == instance_id}
        for peer in peers:
            if self.peers.may_entrust(peer) and self.peers.instance_id(peer) == instance_id:
                log.error("run %s of prefill node %s answers: nothing is released", instance_id, peer)
                return
        log.warning("run %s of %s is over, says an operator", instance_id, ", ".join(map(str, peers)) or "-")
        self.requests.quarantine.instance_gone(instance_id, now)

    # --- from the prefill nodes -------------------------------------------------------------------

    def peer_event(self, event: PeerEvent, now: float) -> None:
        match event:
            case PeerReady():
                self._repeat_messages(event)
            case PeerRefused():
                for request in self.requests.of_peer(event.address):
                    if request.state in (RequestState.CONNECTING, RequestState.WAITING):
                        self.fail(request, 502, event.error, now, PREFILL_NODE_FAILED)
            case PeerLost():
                self._peer_lost(event, now)
            case InstanceGone():
                self.requests.quarantine.instance_gone(event.instance_id, now)
            case WriterGone():
                self.requests.quarantine.writer_gone(event.instance_id)
            case RanksChanged():
                self._readdress(event, now)
            case RoomMessage():
                self._room_message(event, now)
            case _:
                assert_never(event)

    def _readdress(self, event: RanksChanged, now: float) -> None:
        """Move requests that no rank has been given yet to the rank that serves their room now."""
        for request in self.requests.select(RequestState.CONNECTING, RequestState.WAITING):
            if request.peer.node != event.node:
                continue
            address = self.peers.address_for(*event.node, request.room)
            if address != request.peer:
                until = now + self.contact_timeout_secs
                self.requests.queue(request, RequestState.CONNECTING, until, address)
                self.peers.use(address, now)

    def _repeat_messages(self, event: PeerReady) -> None:
        """Repeat what the same run may have missed before it registered this node; repetition is harmless."""
        for request in self.requests.of_peer(event.address):
            if request.state is RequestState.LANDING and request.instance_id == event.instance_id:
                self.peers.send(event.address, _bootstrap(request))
        for entry in self.requests.quarantine:
            if (
                entry.peer == event.address
                and entry.instance_id == event.instance_id
                and entry.is_unacknowledged
            ):
                self.peers.send(event.address, AbortRoom(entry.room, "the request has ended"))

    def _peer_lost(self, event: PeerLost, now: float) -> None:
        """Fail the requests that need the lost peer. Running ones do not; those that came after its last word
        go on waiting for it."""
        for request in self.requests.of_peer(event.address):
            match request.state:
                case RequestState.LANDING:
                    if request.instance_id == event.instance_id:
                        self.metrics.add("kv_transfer_failures_total")
                        self.fail(request, 502, event.error, now, PREFILL_NODE_FAILED)
                case RequestState.CONNECTING | RequestState.WAITING:
                    if request.arrived_at <= event.last_heard_at:
                        self.fail(request, 502, event.error, now, PREFILL_NODE_FAILED)
                case RequestState.RUNNING | RequestState.ENDING | RequestState.ENDED:
                    pass
                case _:
                    assert_never(request.state)

    def _room_message(self, event: RoomMessage, now: float) -> None:
        """Take a message only from the run that was given the room: its successor knows nothing of writes in
        flight."""
        message = event.message
        room = Room(message.room)
        request = self.requests.get(room)
        sender = (event.address, event.instance_id)
        was_landing = False
        if (
            request is not None
            and (request.peer, request.instance_id) == sender
            and request.state is RequestState.LANDING
        ):
            was_landing = True
            match message:
                case RoomScores():
                    self._scored(request, message, now)
                case RoomDone():
                    self._landed(request, message, now)
                case RoomFailed():
                    self.metrics.add("kv_transfer_failures_total")
                    code = PREFILL_NODE_FAILED if message.status in _OTHERS_MAY_DO_BETTER else ""
                    self.fail(request, message.status, message.error, now, code)
                case RoomQuiet():
                    self.metrics.drop("late")
                case _:
                    assert_never(message)
        entry = self.requests.quarantine.get(room)  # just entered if the message has ended the request
        if entry is not None and (entry.peer, entry.instance_id) == sender:
            self._quarantined_message(entry, message, now)
        elif not was_landing:
            self.metrics.drop("late" if request is not None else "unknown_room")

    def _quarantined_message(
        self, entry: Quarantined, message: RoomDone | RoomFailed | RoomQuiet | RoomScores, now: float
    ) -> None:
        match message:
            case RoomScores():
                pass  # nobody waits for them any more
            case RoomDone():
                self.requests.quarantine.quiet(entry.room, batch_failed=False, now=now)
            case RoomQuiet():
                self.requests.quarantine.quiet(entry.room, message.batch_failed, now)
            case RoomFailed():
                if message.batch_failed:
                    self.requests.quarantine.failed(entry.room)
                if message.quiet:
                    self.requests.quarantine.quiet(entry.room, message.batch_failed, now)
            case _:
                assert_never(message)

    def _scored(self, request: Request, message: RoomScores, now: float) -> None:
        """Pass logprobs of prompt tokens on to the front."""
        row_bytes = score_dtype(message.num_top).itemsize
        wanted = request.scores
        if (
            wanted is None
            or message.first != wanted.first + request.num_scored
            or message.num_top > wanted.num_top
            or len(message.rows) % row_bytes
        ):
            error = f"scores of its prompt from position {message.first} on, which it does not wait for"
            self._scores_wrong(request, error, now)
            return
        request.num_scored += len(message.rows) // row_bytes
        self.send(PromptScores(request.request_id, message.num_top, message.rows))

    def _scores_wrong(self, request: Request, error: str, now: float) -> None:
        self.metrics.add("kv_transfer_failures_total")
        self._tell_peer(request, error)
        self.fail(request, 502, f"prefill node {request.peer} sent {error}", now, PREFILL_NODE_FAILED)

    def _landed(self, request: Request, message: RoomDone, now: float) -> None:
        """Take the aux record of a request all of whose KV is here, and start it."""
        if request.scores is not None:
            num_wanted = max(0, request.num_prompt_tokens - request.scores.first)
            if request.num_scored != num_wanted:
                error = f"the scores of {request.num_scored} of {num_wanted} positions; the others are lost"
                self._scores_wrong(request, error, now)
                return
        self.metrics.add("kv_transfer_bytes_total", message.num_bytes)
        self.metrics.add("kv_transfer_seconds_total", message.transfer_secs)
        try:
            aux_slot = request.owned.only_slot(PoolKind.AUX)
            record = self.tables.memory.take_aux(aux_slot, request.room)
        except AuxMismatch as error:
            self.metrics.add("kv_transfer_failures_total")
            unusable = f"the transfer from {request.peer} is unusable: {error}"
            self.fail(request, 500, unusable, now)
            return
        self.metrics.add("cached_tokens_total", message.num_cached_tokens)
        request.delivery = message
        if record.hint is not None:
            request.hot_positions = self.tables.by_hot_group(record.hint)
        self._start(request, now)

    def _start(self, request: Request, now: float) -> None:
        """Start a request: all its KV is here but the last token's, which its first step computes."""
        self.metrics.add("prompt_tokens_total", request.num_prompt_tokens)
        self.metrics.add("held_tokens_total", request.held_prefix_tokens)
        self.metrics.add("held_hits_total", request.held_prefix_tokens > 0)
        request.phases.end(now)
        request.prompt = request.prompt[-TOKEN_BYTES:]
        self.requests.start(request)
        self._fill_row(request, now)

    # --- deadlines --------------------------------------------------------------------------------

    def refresh_queue(self, now: float) -> None:
        """Queue the requests whose prefill node may be entrusted with a room, and only those."""
        for peer in self.requests.queued_at(RequestState.WAITING):
            if not self.peers.may_entrust(peer):
                for request in tuple(self.requests.queued(RequestState.WAITING, peer)):
                    self.requests.queue(
                        request, RequestState.CONNECTING, self._contact_deadline(request, now)
                    )
        for peer in self.requests.queued_at(RequestState.CONNECTING):
            if self.peers.may_entrust(peer):
                for request in tuple(self.requests.queued(RequestState.CONNECTING, peer)):
                    self._may_be_admitted(request, now)

    def _contact_deadline(self, request: Request, now: float) -> float:
        return min(now + self.contact_timeout_secs, request.arrived_at + self.room_timeout_secs)

    def _may_be_admitted(self, request: Request, now: float) -> None:
        page_size = self.peers.page_size(request.peer)
        if page_size != self.limits.page_size:
            request.dense_refusal = (
                f"dense needs equal pages: page_size is {page_size} on prefill node {request.peer}, "
                f"{self.limits.page_size} here; use hisparse or equal page sizes"
            )
        self.requests.queue(request, RequestState.WAITING, request.arrived_at + self.room_timeout_secs)
        if error := refusal(self.limits, request):
            self._tell_peer(request, error)
            self.fail(request, 400, error, now)

    def expire(self, now: float) -> None:
        """End requests that have taken too long, and free slots that nothing uses any more."""
        self.release_ended(now)
        self.requests.quarantine.expire(now)
        self._report_stuck(now)
        for request in self.requests.expired(now):
            secs, code = self.room_timeout_secs, ""
            match request.state:
                case RequestState.CONNECTING:
                    latest = self._contact_deadline(request, now)
                    if latest > now and self.peers.is_opening(request.peer, now):
                        self.requests.queue(request, RequestState.CONNECTING, latest)
                        continue
                    status, error = 503, f"no contact with prefill node {request.peer}: "
                    error += self.peers.last_error(request.peer)
                    code = PREFILL_NODE_FAILED
                case RequestState.WAITING:
                    first = request.first_sample
                    if first is not None and first.state is RequestState.LANDING and first.deadline > now:
                        self.requests.queue(request, RequestState.WAITING, first.deadline)
                        continue
                    status, error = 503, f"the pools had no room for this request within {secs:g} s"
                case RequestState.LANDING:
                    status, error = 504, f"prefill node {request.peer} delivered no KV within {secs:g} s"
                    self.metrics.add("kv_transfer_failures_total")
                case RequestState.RUNNING | RequestState.ENDING | RequestState.ENDED:
                    continue
                case _:
                    assert_never(request.state)
            self._tell_peer(request, error)
            self.fail(request, status, error, now, code)

    def _report_stuck(self, now: float) -> None:
        stuck = self.requests.quarantine.newly_stuck(now)
        for (peer, instance_id), num_rooms in Counter((e.peer, e.instance_id) for e in stuck).items():
            log.warning(
                "prefill node %s (run %s) has not said of %d rooms that nothing lands there any more; their "
                "slots serve nobody until it does, until another run answers in its place, or until you "
                "declare it dead: POST /release_quarantine?instance_id=%s",
                peer,
                instance_id,
                num_rooms,
                instance_id,
            )

    # --- from the scheduler -----------------------------------------------------------------------

    def carry_out(self, plan: StepPlan, now: float) -> None:
        for admission in plan.admissions:
            self.requests.use_held(admission)
        for exchange in plan.exchanges:
            self._exchange(exchange, now)
        for growth in plan.growths:
            self.requests.grow(growth.request, growth.need)
            self.tables.grow(growth.request)
        for admission in plan.admissions:
            self._admit(admission, now)

    def _admit(self, admission: Admission, now: float) -> None:
        request = admission.request
        instance_id = "" if request.lacks_nothing else self.peers.instance_id(request.peer)
        self.requests.reserve(admission, instance_id, now + self.room_timeout_secs)
        self.tables.prepare_landing(request)
        request.phases.end(now)
        self.metrics.add("requests_total", mode=admission.mode)
        if request.lacks_nothing:
            self._start(request, now)
        elif not self.peers.send(request.peer, _bootstrap(request)):
            error = f"prefill node {request.peer} takes no messages; try again"
            self.fail(request, 503, error, now, PREFILL_NODE_FAILED)
            self.requests.quarantine.quiet(request.room, batch_failed=False, now=now)  # it never got the room

    def _exchange(self, exchange: Exchange, now: float) -> None:
        """Exchange the device slots of a running request, which must be in no step."""
        request = exchange.request
        if request.num_in_flight:
            raise RuntimeError(f"room {request.room}: it is in a step, which uses its device slots")
        num_before = request.num_retractions
        self.requests.grow(request, exchange.need)
        if self._on_device(self.tables.retract, request, "retracted", now):
            self.requests.replace_device_slots(exchange)
            self.metrics.add("retractions_total", request.num_retractions - num_before)
            self._fill_row(request, now)

    def _fill_row(self, request: Request, now: float) -> None:
        request.is_filling = True
        self._on_device(self.tables.start, request, "started", now)

    def fill_rows(self, now: float) -> None:
        """Launch the next slices of rows that are being filled, and note which rows are filled."""
        failed = self.tables.go_on()
        for request in self.requests.select(RequestState.RUNNING):
            if not request.is_filling:
                continue
            if (error := failed.get(request.req_row)) is not None:
                log.error("room %d cannot be started", request.room, exc_info=error)
                self.fail(request, 500, f"the request cannot be started: {error}", now)
            else:
                request.is_filling = not self.tables.is_ready(request)

    def _on_device(
        self, action: Callable[[Request], None], request: Request, participle: str, now: float
    ) -> bool:
        """Apply ``action`` to a running request, and return whether that worked.

        If not, the request fails and its slots are freed at once, as the rest of the plan needs them.
        """
        try:
            action(request)
        except Exception as error:
            log.exception("room %d cannot be %s", request.room, participle)
            self.fail(request, 500, f"the request cannot be {participle}: {error}", now)
            self.release_ended(now, waits=True)
            return False
        return True

    # --- the ways out -----------------------------------------------------------------------------

    def emit(
        self, request: Request, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], now: float
    ) -> None:
        """Give a request's next tokens to its client, up to the one that ends it if there is one."""
        is_first = not request.output_token_ids
        if is_first:
            request.phases.end(now)
        reason, matched = None, None
        num_emitted = 0
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            if request.matcher is not None:
                try:
                    request.matcher.advance(token_id)
                except GrammarError as error:
                    self.grammar_failed(request, error, now)
                    return
            num_emitted += 1
            request.output_token_ids.append(token_id)
            request.unsent_token_ids.append(token_id)
            if logprob is not None:
                request.unsent_logprobs.append(logprob)
            reason, matched = finish_reason(
                token_id,
                len(request.output_token_ids),
                request.sampling,
                self.tables.spec.eos_token_ids,
            )
            if reason is not None:
                break
        self.metrics.generated(request.mode, num_emitted)
        if num_emitted > 1:
            request.num_accepted += num_emitted - 1
            self.metrics.add("accepted_draft_tokens_total", num_emitted - 1)
        if reason is not None:
            self._end(request, now, is_sound=True)
        if reason is not None or is_first or len(request.unsent_token_ids) >= self.stream_interval:
            self._send_tokens(request, reason, matched)

    def _send_tokens(self, request: Request, reason: FinishReason | None, matched: int | None) -> None:
        is_first = len(request.unsent_token_ids) == len(request.output_token_ids)
        self.send(
            Tokens(
                request_id=request.request_id,
                token_ids=tuple(request.unsent_token_ids),
                logprobs=tuple(request.unsent_logprobs),
                finish_reason=reason,
                matched_stop_token=matched,
                stats=request.stats(),
                phases=request.phases.take(),
                prefill=request.delivery.times if is_first and request.delivery is not None else None,
            )
        )
        request.unsent_token_ids.clear()
        request.unsent_logprobs.clear()

    def row_is_wrong(self, request: Request, now: float) -> None:
        """Stop using the KV of a request for which a row was read that is not what was written.

        Its tokens until then are right.
        """
        wrong = self.tables.wrong_row(request)
        kind = wrong_row_kind(wrong, request.num_landing_tokens)
        pool = PoolKind.HOST if wrong.is_on_host else PoolKind.DEVICE
        error = self.requests.set_aside.record_wrong_row(kind, pool, wrong.item)
        if request.state is RequestState.RUNNING:
            self.fail(request, 500, error, now, KV_ROW_CORRUPT)
        else:
            request.is_sound = False

    def grammar_failed(self, request: Request, error: GrammarError | str, now: float) -> None:
        """Fail a request whose grammar cannot tell the next tokens, as when it gets too complex."""
        self.fail(request, 400, f"the output cannot follow its grammar: {error}", now)

    def fail(self, request: Request, status: int, error: str, now: float, code: str = "") -> None:
        """End the request with an error for its client; ``code``: see ``RequestFailed``."""
        log.warning("room %d (%s) failed with %d: %s", request.room, request.state, status, error)
        self.metrics.add("failed_requests_total")
        if request.unsent_token_ids:
            self._send_tokens(request, None, None)
        self._end(request, now)
        request.phases.end(now)
        self.send(RequestFailed(request.request_id, status, error, code, request.phases.take()))

    def _end(self, request: Request, now: float, *, is_sound: bool = False) -> None:
        """Take a request out of steps, tables and books: the one way out of every state."""
        request.grammar = None  # no other request may need it
        if request.state is not RequestState.RUNNING:
            self.requests.release(request, now)
            return
        self.tables.stop_filling(request)
        self.requests.start_ending(request, is_sound=is_sound)
        self._let_go(request, now)

    def _let_go(self, request: Request, now: float, *, waits: bool = False) -> None:
        """Release what an ENDING request owns, unless a step in flight or the filling of its row uses any of
        it (I1). ``waits``: wait for the filling to end; a step is never waited for."""
        if not request.num_in_flight and (waits or self.tables.is_ready(request)):
            self.tables.release(request)
            self.requests.release(request, now)

    def release_ended(self, now: float, *, waits: bool = False) -> None:
        """Release what ENDING requests own, where nothing uses it any more. ``waits``: see ``_let_go``."""
        for request in self.requests.select(RequestState.ENDING):
            self._let_go(request, now, waits=waits)

    def _tell_peer(self, request: Request, reason: str) -> None:
        """Tell the prefill node of a LANDING request that the room ends, so that it stops its work."""
        if request.state is RequestState.LANDING:
            self.peers.send(request.peer, AbortRoom(request.room, reason[:MAX_TEXT_CHARS]))


def wrong_row_kind(wrong: WrongRow, num_landing_tokens: int) -> str:
    """Return one of ``ROW_KINDS``, by where the row came from and where it was read.

    ``num_landing_tokens``: the end of the positions that a prefill node computes.
    """
    if wrong.read_at is ReadAt.SCRUB:
        return "scrub"
    if wrong.item.position >= num_landing_tokens:
        return "newest"
    return "landing" if wrong.read_at is ReadAt.START else "page-in"


def _bootstrap(request: Request) -> Bootstrap:
    """Return the message that says which KV of the prompt is missing, and where it is to land."""
    start, stop = request.held_prefix_tokens, request.num_landing_tokens
    return Bootstrap(
        room=request.room,
        kv_extents=slice_extents(request.extents(request.kv_pools[0]), start, stop),
        index_extents=slice_extents(request.extents(PoolKind.INDEX), start, stop),
        aux_slot=request.owned.only_slot(PoolKind.AUX),
        prompt=request.prompt,
        root=request.root,
        attempt=1 + request.admitted_seq,
        num_held_tokens=start,
        num_resumed_tokens=request.sampling.num_resumed_tokens,
        scores=request.scores,
        hisparse=request.mode is Mode.HISPARSE,
    )
