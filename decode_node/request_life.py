"""Moves a decode node's requests from state to state, with all that belongs to each move.

A move has up to three parts, which one method of ``RequestLife`` does together: the books (``LiveRequests``),
the memory and tables (``RequestTables``), and a message to the front or the prefill node. The engine calls it
for front messages and deadlines, ``PrefillEvents`` for what prefill nodes say, and ``StepLine`` for plans and
for the tokens of steps. In order: ``generate``, ``refresh_queue``, ``carry_out``, ``start``, ``fill_rows``,
``emit``, and ``fail`` or ``abort`` at any time.

A request that ends in the middle of a step stays ENDING until that step is over; no method waits for a step.
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

from hisparse_pd.base.decode_settings import HisparsePolicy
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
from hisparse_pd.decode_node.limits import Limits, refusal
from hisparse_pd.decode_node.live_requests import DuplicateRoom, LiveRequests
from hisparse_pd.decode_node.local_kv import copy_source, local_modes, steps_compute_tail
from hisparse_pd.decode_node.metrics import Metrics
from hisparse_pd.decode_node.prefill_peers import PrefillPeers
from hisparse_pd.decode_node.request import KV_POOLS, Request, RequestState
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.scheduler import Admission, Exchange, StepPlan
from hisparse_pd.engine.messages import (
    FromEngine,
    Generate,
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
)

log = logging.getLogger(__name__)

CONTACT_TIMEOUT_SECS = 10.0
"""Longest time that a request waits for its prefill node to be found and registered with."""

_DEFAULT_FLAG = {
    HisparsePolicy.AUTO: HisparseFlag.AUTO,
    HisparsePolicy.ALWAYS: HisparseFlag.TRUE,
    HisparsePolicy.NEVER: HisparseFlag.FALSE,
}


@dataclass
class RequestLife:
    """The moves of all requests of one engine. Times are those of ``time.monotonic``.

    ``send`` takes messages to the front.
    """

    limits: Limits
    policy: HisparsePolicy
    """The mode of requests that ask for none."""
    room_timeout_secs: float
    """Longest time that a request waits for slots, and again for its KV."""
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
        error = self._why_malformed(request) or refusal(self.limits, request)
        try:
            if not error:
                self.requests.open(request)
        except DuplicateRoom as duplicate:
            error = str(duplicate)
        if error:
            self.metrics.add("failed_requests_total")
            self.send(RequestFailed(request.request_id, 400, error))
            return None
        if first_sample is not None:
            first_sample.has_further_samples = True
        if not self.wait_locally(request):
            self.peers.use(request.peer, now)
        return request

    def _why_malformed(self, request: Request) -> str:
        num_prompt_tokens, num_packed = request.num_prompt_tokens, num_packed_tokens(request.prompt)
        if not 1 <= num_prompt_tokens <= self.limits.max_context:
            return f"the prompt has {num_prompt_tokens} tokens; allowed are 1 to {self.limits.max_context}"
        if num_prompt_tokens != num_packed:
            return f"{num_packed} of the prompt's {num_prompt_tokens} tokens have come"
        if request.sampling.max_new_tokens < 1:
            return f"max_new_tokens is {request.sampling.max_new_tokens}; it must be at least 1"
        return ""

    def abort(self, request_id: str, now: float, *, has_finished: bool = False) -> None:
        """End a request whose client is gone, or has all that it wanted (``has_finished``), as after a stop
        string. Unknown ids are those of ended requests."""
        request = self.requests.get_by_id(request_id)
        if request is not None:
            if not has_finished:
                self.metrics.add("aborted_requests_total")
            self.abort_at_peer(request, "the client is gone")
            self._end(request, now, is_sound=True)

    def release_quarantine(self, instance_id: str, now: float) -> None:
        """Release the rooms of a run that an operator declares over, unless that run still answers."""
        peers = {entry.peer for entry in self.requests.quarantine if entry.instance_id == instance_id}
        for peer in peers:
            if self.peers.is_registered(peer) and self.peers.instance_id(peer) == instance_id:
                log.error("run %s of prefill node %s answers: nothing is released", instance_id, peer)
                return
        log.warning("run %s of %s is over, says an operator", instance_id, ", ".join(map(str, peers)) or "-")
        self.requests.quarantine.instance_gone(instance_id, now)

    # --- the start ----------------------------------------------------------------------------------

    def start(self, request: Request, now: float) -> None:
        """Start a request: all its KV is here but what its steps compute, the last token's at least."""
        self.metrics.add("prompt_tokens_total", request.num_prompt_tokens)
        self.metrics.add("held_tokens_total", request.held_prefix_tokens)
        self.metrics.add("held_hits_total", request.held_prefix_tokens > 0)
        request.phases.end(now)
        request.prompt = request.prompt[-(1 + request.num_tail_tokens) * TOKEN_BYTES :]
        self.requests.start(request)
        self._fill_row(request, now)

    # --- deadlines --------------------------------------------------------------------------------

    def refresh_queue(self, now: float) -> None:
        """Queue the requests whose prefill node is registered with, and take the others out of the queue."""
        for peer in self.requests.queued_at(RequestState.WAITING):
            if not self.peers.is_registered(peer):
                for request in tuple(self.requests.queued(RequestState.WAITING, peer)):
                    if not self.wait_locally(request):
                        self.requests.queue(
                            request, RequestState.CONNECTING, self._contact_deadline(request, now)
                        )
        for peer in self.requests.queued_at(RequestState.CONNECTING):
            if self.peers.is_registered(peer):
                for request in tuple(self.requests.queued(RequestState.CONNECTING, peer)):
                    self._start_waiting(request, now)

    def wait_locally(self, request: Request) -> bool:
        """Let a request that owns nothing yet wait without its prefill node, if its steps compute all that is
        missing of its KV. Returns whether it does."""

        def num_held(mode: Mode) -> int:
            found = self.requests.held.find(request.usable_keys, KV_POOLS[mode])
            return found.num_pages * self.limits.page_size if found else 0

        if not local_modes(request, self.limits, num_held):
            return False
        request.dense_refusal = ""  # the page size of a node that it does not need
        deadline = request.arrived_at + self.room_timeout_secs
        self.requests.queue(request, RequestState.WAITING, deadline, is_local=True)
        return True

    def _wait_for_node(self, request: Request, now: float) -> None:
        """Let a local request wait for its prefill node, which it needs after all."""
        peer = self.peers.address_for(*request.peer.node, request.room)
        self.peers.use(peer, now)
        self.requests.queue(request, RequestState.CONNECTING, self._contact_deadline(request, now), peer)

    def _contact_deadline(self, request: Request, now: float) -> float:
        return min(now + self.contact_timeout_secs, request.arrived_at + self.room_timeout_secs)

    def _start_waiting(self, request: Request, now: float) -> None:
        """Move a request to WAITING, or fail it if it must be dense and the peer's page size forbids that."""
        page_size = self.peers.page_size(request.peer)
        if page_size != self.limits.page_size:
            request.dense_refusal = (
                f"dense needs equal pages: page_size is {page_size} on prefill node {request.peer}, "
                f"{self.limits.page_size} here; use hisparse or equal page sizes"
            )
        self.requests.queue(request, RequestState.WAITING, request.arrived_at + self.room_timeout_secs)
        if error := refusal(self.limits, request):
            self.abort_at_peer(request, error)
            self.fail(request, 400, error, now)

    def expire(self, now: float) -> None:
        """Fail requests that have been in their state for too long, and free slots that nothing uses any
        more. Registering with a peer and waiting for a first sample may go on past the deadline."""
        self.release_ended(now)
        self.requests.quarantine.expire(now)
        self._report_stuck(now)
        for request in self.requests.expired(now):
            secs, code = self.room_timeout_secs, ""
            match request.state:
                case RequestState.CONNECTING:
                    if self.wait_locally(request):
                        continue
                    latest = self._contact_deadline(request, now)
                    if latest > now and self.peers.is_opening(request.peer, now):  # which may take long
                        self.requests.queue(request, RequestState.CONNECTING, latest)
                        continue
                    status, error = 503, f"no contact with prefill node {request.peer}: "
                    error += self.peers.last_error(request.peer)
                    code = PREFILL_NODE_FAILED
                case RequestState.WAITING:
                    first = request.first_sample
                    if first is not None and first.state is RequestState.LANDING and first.deadline > now:
                        self.requests.queue(
                            request, RequestState.WAITING, first.deadline, is_local=request.is_local
                        )
                        continue
                    status, error = 503, f"the pools had no room for this request within {secs:g} s"
                case RequestState.LANDING:
                    status, error = 504, f"prefill node {request.peer} delivered no KV within {secs:g} s"
                    self.metrics.add("kv_transfer_failures_total")
                case RequestState.RUNNING | RequestState.ENDING | RequestState.ENDED:
                    continue
                case _:
                    assert_never(request.state)
            self.abort_at_peer(request, error)
            self.fail(request, status, error, now, code)

    def _report_stuck(self, now: float) -> None:
        """Log once which prefill nodes keep slots in quarantine, and the remedy."""
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

    # --- from the scheduler -----------------------------------------------------------------------

    def carry_out(self, plan: StepPlan, now: float) -> None:
        """Do what the scheduler has planned. Held prefixes are in use before anything else makes room by
        evicting them."""
        for request in plan.no_longer_local:
            self._wait_for_node(request, now)
        for admission in plan.admissions:
            self.requests.use_held(admission)
        for exchange in plan.exchanges:
            self._exchange(exchange, now)
        for growth in plan.growths:
            self.requests.grow(growth.request, growth.need)
            self.tables.grow(growth.request)
        for admission in plan.admissions:
            self.admit(admission, now)

    def admit(self, admission: Admission, now: float) -> None:
        """Reserve slots for a waiting request and send its Bootstrap, or start it if nothing is missing that
        its steps do not compute."""
        request, num_held = admission.request, admission.request.held_prefix_tokens
        source = copy_source(request, admission.mode, num_held, self.limits.page_size)
        if source is not None:
            request.held_prefix_tokens = request.num_landing_tokens
        elif steps_compute_tail(request, num_held, self.limits):
            request.num_tail_tokens = request.num_landing_tokens - num_held
        if request.is_local and request.needs_prefill_node:
            # The first sample, from which it was to copy, has just left its pages.
            self.requests.give_back_held(request)
            self._wait_for_node(request, now)
            return
        instance_id = self.peers.instance_id(request.peer) if request.needs_prefill_node else ""
        self.requests.reserve(admission, instance_id, now + self.room_timeout_secs)
        self.tables.prepare_landing(request)
        if source is not None:
            self.tables.copy_prompt(source, request, num_held)
            request.hot_positions = source.landed_hint
        request.phases.end(now)
        self.metrics.add("requests_total", mode=admission.mode)
        if not request.needs_prefill_node:
            self.start(request, now)
        elif not self.peers.send(request.peer, bootstrap_of(request)):
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
        if self._do_or_fail(self.tables.retract, request, "retracted", now):
            self.requests.replace_device_slots(exchange)
            self.metrics.add("retractions_total", request.num_retractions - num_before)
            self._fill_row(request, now)

    def _fill_row(self, request: Request, now: float) -> None:
        """Begin to fill the request's row of the tables and its hot buffer; ``fill_rows`` goes on with it."""
        request.is_filling = True
        self._do_or_fail(self.tables.start, request, "started", now)

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

    def _do_or_fail(
        self, action: Callable[[Request], None], request: Request, participle: str, now: float
    ) -> bool:
        """Apply ``action`` to a running request, and return whether that worked.

        If not, the request fails and its slots are freed at once, because the rest of the plan counts on
        them. ``participle``: the action's name in error texts.
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
        """Send the unsent tokens to the front. ``reason``, ``matched``: why the request ends, if it does, and
        the stop token that ended it."""
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
        """Fail a request for which a row was read that is not what was written, or keep the KV of an ENDING
        one from being held. The tokens that it has emitted are right."""
        wrong = self.tables.wrong_row(request)
        kind = wrong_row_kind(wrong, request.first_own_position)
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
        """Take a request out of steps, tables and books: the one way out of every state. ``is_sound``: its KV
        is right and may be held."""
        request.grammar = None  # no other request may need it
        request.landed_hint = None  # nor its rows
        if request.state is not RequestState.RUNNING:
            self.requests.release(request, now)
            return
        self.tables.stop_filling(request)
        self.requests.start_ending(request, is_sound=is_sound)
        self._release_if_unused(request, now)

    def _release_if_unused(self, request: Request, now: float, *, waits: bool = False) -> None:
        """Release what an ENDING request owns, unless a step in flight or the filling of its row uses any of
        it (I1). ``waits``: wait for the filling to end; a step is never waited for."""
        if not request.num_in_flight and (waits or self.tables.is_ready(request)):
            self.tables.release(request)
            self.requests.release(request, now)

    def release_ended(self, now: float, *, waits: bool = False) -> None:
        """Release what ENDING requests own, where nothing uses it any more. ``waits``: see
        ``_release_if_unused``."""
        for request in self.requests.select(RequestState.ENDING):
            self._release_if_unused(request, now, waits=waits)

    def abort_at_peer(self, request: Request, reason: str) -> None:
        """Tell the prefill node of a LANDING request to stop its work; does nothing in other states."""
        if request.state is RequestState.LANDING:
            self.peers.send(request.peer, AbortRoom(request.room, reason[:MAX_TEXT_CHARS]))


def wrong_row_kind(wrong: WrongRow, first_own_position: int) -> str:
    """Return one of ``ROW_KINDS``, by where the row came from and where it was read.

    ``first_own_position``: the first position that steps of the request computed.
    """
    if wrong.read_at is ReadAt.SCRUB:
        return "scrub"
    if wrong.item.position >= first_own_position:
        return "newest"
    return "landing" if wrong.read_at is ReadAt.START else "page-in"


def bootstrap_of(request: Request) -> Bootstrap:
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
