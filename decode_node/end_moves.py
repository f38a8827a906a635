"""Gives requests' tokens and errors to their clients, and ends requests: the one way out of every state.

``StepLine`` brings the tokens of steps to ``emit``. Whoever finds a fault calls ``fail``, and the engine
calls ``abort`` when a client leaves. A running request that ends stays ENDING until the step that it is in is
over; the next ``release_ended`` frees what it owns. No method waits for a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.base.vocabulary import KV_ROW_CORRUPT, FinishReason, TokenLogprob
from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.model.sampling import finish_reason
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.metrics import Metrics
from hisparse_pd.decode_node.prefill_peers import PrefillPeers
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.engine.messages import FromEngine, RequestFailed, Tokens
from hisparse_pd.kernels.row_check import WrongRow
from hisparse_pd.kernels.row_errors import ReadAt
from hisparse_pd.protocol.messages import MAX_TEXT_CHARS, AbortRoom

log = logging.getLogger(__name__)


@dataclass
class EndMoves:
    """Sends clients the tokens of their requests, and ends requests. Times are those of
    ``time.monotonic``."""

    requests: LiveRequests
    tables: RequestTables
    peers: PrefillPeers
    metrics: Metrics
    send: Callable[[FromEngine], None]
    """Sends a message to the front."""
    stream_interval: int = 1
    """Tokens in a message to the front; a request's first and last tokens are sent at once."""
    _logged: LogLimiter = field(default_factory=LogLimiter)

    # --- tokens -----------------------------------------------------------------------------------

    def emit(
        self, request: Request, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], now: float
    ) -> None:
        """Give a request's next tokens to its client. If one of them ends the request, end it, and drop the
        tokens behind that one. If the grammar fails at one, the request fails without that one.

        ``token_ids``: a step's, all of which but the last are accepted drafts. ``logprobs``: one for each.
        """
        is_first = not request.output_token_ids
        if is_first:
            request.phases.end(now)  # the phase ``first_step``
        reason, matched = None, None
        failure: GrammarError | None = None
        num_emitted = 0
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            if request.matcher is not None:
                try:
                    request.matcher.advance(token_id)
                except GrammarError as error:
                    failure = error
                    break
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
        if failure is not None:  # the client gets the tokens before the one that failed
            self.grammar_failed(request, failure, now)
            return
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

    # --- errors -----------------------------------------------------------------------------------

    def refuse(self, request_id: str, error: str) -> None:
        """Refuse a request that was never taken in, because its client asks for something that is impossible
        here."""
        self.metrics.add("failed_requests_total")
        self.send(RequestFailed(request_id, 400, error))

    def fail(self, request: Request, status: int, error: str, now: float, code: str = "") -> None:
        """End the request with an error for its client; ``code``: see ``RequestFailed``."""
        log.warning("room %d (%s) failed with %d: %s", request.room, request.state, status, error)
        self.metrics.add("failed_requests_total")
        if request.unsent_token_ids:
            self._send_tokens(request, None, None)
        self._end(request, now)
        request.phases.end(now)
        self.send(RequestFailed(request.request_id, status, error, code, request.phases.take()))

    def grammar_failed(self, request: Request, error: GrammarError | str, now: float) -> None:
        """Fail a request whose grammar cannot tell the next tokens, for example because it gets too
        complex."""
        self.fail(request, 400, f"the output cannot follow its grammar: {error}", now)

    def row_is_wrong(self, request: Request, now: float) -> None:
        """Fail a request whose last step read a row that is not what was written. If it is ENDING, only keep
        its KV from being held. The tokens that it has emitted are right, because a step's results tell of a
        wrong row before the step's own tokens are emitted."""
        page, error = self._set_wrong_row_aside(request)
        for key in request.usable_keys[page : page + 1]:
            self.requests.held.drop_copies(key)
        if request.state is RequestState.RUNNING:
            self.fail(request, 500, error, now, KV_ROW_CORRUPT)
        else:
            request.is_sound = False

    def _set_wrong_row_aside(self, request: Request) -> tuple[int, str]:
        """Set the page of a request's wrong row aside. Returns its place among the request's pages, and the
        error. If nobody can read which row it is, as without memory for that, no page is set aside, and the
        place is that of the first page, behind which all others come.

        Raises torch.AcceleratorError when the device is lost.
        """
        try:
            wrong = self.tables.wrong_row(request)
        except torch.AcceleratorError:
            raise
        except Exception as cause:
            log.exception("the wrong row of room %d cannot be told; no page is set aside", request.room)
            return 0, f"a row of its KV is not what was written, and cannot be told from the others: {cause}"
        kind = wrong_row_kind(wrong, request.first_own_position)
        pool = PoolKind.HOST if wrong.is_on_host else PoolKind.DEVICE
        error = self.requests.set_aside.record_wrong_row(kind, pool, wrong.item)
        return wrong.item.position // self.tables.page_size, error

    # --- the way out --------------------------------------------------------------------------------

    def abort(self, request_id: str, now: float, *, has_finished: bool = False) -> None:
        """End a request whose client is gone, or has all that it wanted (``has_finished``), as after a stop
        string. Unknown ids are those of ended requests."""
        request = self.requests.get_by_id(request_id)
        if request is not None:
            if not has_finished:
                self.metrics.add("aborted_requests_total")
            self.abort_at_peer(request, "the client is gone")
            self._end(request, now, is_sound=True)

    def abort_at_peer(self, request: Request, reason: str) -> None:
        """Tell the prefill node of a LANDING request to stop its work; does nothing in other states."""
        if request.state is RequestState.LANDING:
            abort = AbortRoom(request.room, reason[:MAX_TEXT_CHARS], request.attempt)
            self.peers.send(request.peer, abort)

    def _end(self, request: Request, now: float, *, is_sound: bool = False) -> None:
        """Take a request out of steps, tables and books: the one way out of every state. ``is_sound``: its KV
        is right and may be held, which matters only if the request is RUNNING."""
        request.grammar = request.landed_hint = None  # frees memory that an ended request does not need
        if request.state is not RequestState.RUNNING:
            self.requests.release(request, now)
            return
        self.tables.stop_filling(request)
        self.requests.start_ending(request, is_sound=is_sound)

    def release_ended(self, now: float, *, waits: bool = False) -> None:
        """Release what ENDING requests own, unless a step in flight or the filling of a row uses any of it
        (I1). ``waits``: wait for the filling to end; a step is never waited for.

        If their rows cannot be emptied, as without memory for that, all stay ENDING until the next call.
        Raises torch.AcceleratorError when the device is lost.
        """
        unused = [
            request
            for request in self.requests.select(RequestState.ENDING)
            if not request.num_in_flight and (waits or self.tables.is_ready(request))
        ]
        if not unused:
            return
        try:
            self.tables.release(*unused)
        except torch.AcceleratorError:
            raise
        except Exception:
            if self._logged.permits():  # the next turn comes at once, and tries again
                log.exception("the rows of %d ended requests cannot be emptied now", len(unused))
            return
        for request in unused:
            self.requests.release(request, now)


def wrong_row_kind(wrong: WrongRow, first_own_position: int) -> str:
    """Return one of ``ROW_KINDS``, by where the row came from and where it was read.

    ``first_own_position``: the first position that steps of the request computed.
    """
    if wrong.read_at is ReadAt.SCRUB:
        return "scrub"
    if wrong.item.position >= first_own_position:
        return "newest"
    return "landing" if wrong.read_at is ReadAt.START else "page-in"
