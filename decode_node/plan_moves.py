"""Carries out the scheduler's plans: admits and starts requests, gives them slots, fills rows and pages.

Each move has up to three parts, which one method does together: the books (``LiveRequests``), the memory and
tables (``RequestTables``), and a message to the prefill node. Before each step ``StepLine`` calls
``carry_out``, then ``fill_rows``. ``PrefillEvents`` calls ``start`` when the KV of a request has landed, and
the engine ``go_on_with_fetched`` in each turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED, Mode
from hisparse_pd.core.model.side_stream import CopyFailed
from hisparse_pd.core.paging.extents import slice_extents
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import is_on_its_way
from hisparse_pd.decode_node.end_moves import EndMoves
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.local_kv import copy_source, steps_compute_tail
from hisparse_pd.decode_node.metrics import Metrics
from hisparse_pd.decode_node.prefill_peers import PrefillPeers
from hisparse_pd.decode_node.queue_moves import QueueMoves
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.step_plan import Admission, Exchange, Fill, Growth, StepPlan
from hisparse_pd.protocol.messages import TOKEN_BYTES, Bootstrap, HeldKv

log = logging.getLogger(__name__)


class _SlotsKept(Exception):
    """A request for which an exchange has failed keeps its slots, because its row cannot be emptied now."""


class _Landing(NamedTuple):
    """An admitted request. Its landing zone is not prepared yet, and nobody knows of it."""

    request: Request
    source: Request | None
    """The sample from which it copies what is missing behind its first ``num_held`` tokens, if any."""
    num_held: int


@dataclass
class PlanMoves:
    """The moves that the scheduler decides. Times are those of ``time.monotonic``."""

    limits: Limits
    requests: LiveRequests
    tables: RequestTables
    peers: PrefillPeers
    metrics: Metrics
    queue: QueueMoves
    ends: EndMoves
    _unsent: list[Request] = field(default_factory=list)
    """Requests whose Bootstrap waits for the keys of their held prefix, which the prefill node may read."""

    def carry_out(self, plan: StepPlan, now: float) -> None:
        """Do what the scheduler has planned. If an exchange fails and its request keeps its slots, the next
        plan does the rest, and does not count on these slots."""
        landings: list[_Landing | None] = []
        try:
            plan.carry_out(
                wait_for_node=lambda request: self.queue.wait_for_node(request, now),
                use_held=self.requests.use_held,
                use_resident=self.requests.use_resident,
                exchange_slots=lambda exchange: self._exchange(exchange, now),
                begin_fill=lambda fill: self._begin_fill(fill, now),
                grow=lambda growth: self._grow(growth, now),
                admit=lambda admission: landings.append(self.reserve(admission, now)),
            )
        except _SlotsKept:  # no fill or admission has begun
            for admission in plan.admissions:
                self.requests.give_back_held(admission.request)
            for fill in plan.fills:
                self.requests.give_back_resident(fill.request)
        self._begin_landings([landing for landing in landings if landing is not None], now)

    def reserve(self, admission: Admission, now: float) -> _Landing | None:
        """Reserve slots for a waiting request. Returns None if it is not admitted after all.

        What is missing behind its held pages, which ``use_held`` has noted in it, may be copied from the
        first sample, or computed by its steps.
        """
        request, num_held = admission.request, admission.request.held_prefix_tokens
        source = copy_source(request, admission.mode, num_held, self.limits.page_size)
        if source is not None:
            request.held_prefix_tokens = request.num_landing_tokens
        elif steps_compute_tail(request, num_held, self.limits):
            request.num_tail_tokens = request.num_landing_tokens - num_held
        if request.is_local and request.needs_prefill_node:
            # The plan counted on a copy from the first sample, which an exchange of this plan has ended or
            # made hisparse.
            self.requests.give_back_held(request)
            self.queue.wait_for_node(request, now)
            return None
        instance_id = self.peers.instance_id(request.peer) if request.needs_prefill_node else ""
        try:
            self.requests.reserve(admission, instance_id, now + self.queue.room_timeout_secs)
        except CopyFailed as error:
            log.error("the held prefix of room %d cannot be brought to the device", request.room)
            self.requests.give_back_held(request)
            self.ends.fail(request, 500, f"the request cannot be admitted: {error}", now)
            return None
        return _Landing(request, source, num_held)

    def _begin_landings(self, landings: Sequence[_Landing], now: float) -> None:
        """Prepare the landing zones of admitted requests, all at once because the host waits for that, and
        send their Bootstraps. Those that need no prefill node start."""
        if not landings:
            return
        requests = [landing.request for landing in landings]
        is_prepared = self._do_or_fail(self.tables.prepare_landing, "admitted", now, *requests)
        for request, source, num_held in landings:
            copy = partial(self._copy_prompt, source=source, num_held=num_held)
            if not (is_prepared and self._do_or_fail(copy, "admitted", now, request)):
                # No peer knows of it.
                self.requests.quarantine.quiet(request.room, batch_failed=False, now=now)
                continue
            request.phases.end(now)
            self.metrics.add("requests_total", mode=request.mode)
            if not request.needs_prefill_node:
                self.start(request, now)
            elif is_on_its_way(request.prefix):
                self._unsent.append(request)
            else:
                self._send_bootstrap(request, now)

    def is_unsent(self, request: Request) -> bool:
        """Return whether the Bootstrap of a request waits for keys, so that nobody can write to its slots."""
        return request in self._unsent

    def _copy_prompt(self, request: Request, source: Request | None, num_held: int) -> None:
        """Copy from the sample ``source``, if there is one, what is missing behind the first ``num_held``
        tokens."""
        if source is not None:
            self.tables.copy_prompt(source, request, num_held)
            request.hot_positions = source.landed_hint

    def _send_bootstrap(self, request: Request, now: float) -> None:
        if not self.peers.send(request.peer, bootstrap_of(request)):
            error = f"prefill node {request.peer} takes no messages; try again"
            self.ends.fail(request, 503, error, now, PREFILL_NODE_FAILED)
            self.requests.quarantine.quiet(request.room, batch_failed=False, now=now)  # the peer never got it

    def start(self, request: Request, now: float) -> None:
        """Start a request, once all of its held prefix is on the device. All its KV is here but what its
        steps compute: that of the last token, and of a short tail."""
        if not self.requests.await_fetch(request, now + self.queue.room_timeout_secs):
            self._run(request, now)

    def go_on_with_fetched(self, now: float) -> None:
        """Start the requests whose held prefixes have come from main memory, and send the Bootstraps that
        waited for them."""
        for request in self.requests.fetched():
            self._run(request, now)
        unsent, self._unsent = self._unsent, []
        for request in unsent:
            if request.state is not RequestState.LANDING:  # it has ended, and nobody writes to its zone
                self.requests.quarantine.quiet(request.room, batch_failed=False, now=now)
            elif is_on_its_way(request.prefix):
                self._unsent.append(request)
            else:
                self._send_bootstrap(request, now)

    def _run(self, request: Request, now: float) -> None:
        """Move a request to RUNNING, and begin to fill its row."""
        self.metrics.add("prompt_tokens_total", request.num_prompt_tokens)
        for tier, num_tokens in request.cached_tokens.by_tier().items():
            self.metrics.add("cached_tier_tokens_total", num_tokens, tier=tier)
        self.metrics.add("held_tokens_total", request.held_prefix_tokens)
        self.metrics.add("held_hits_total", request.held_prefix_tokens > 0)
        request.phases.end(now)
        if not self.requests.publishes(request):
            request.prompt = request.prompt[-(1 + request.num_tail_tokens) * TOKEN_BYTES :]
        self.requests.start(request)
        self._fill_row(request, now)

    def _exchange(self, exchange: Exchange, now: float) -> None:
        """Give a running request, which must be in no step, a hot buffer for its device slots. Raises
        _SlotsKept."""
        request = exchange.request
        if request.num_in_flight:
            raise RuntimeError(f"room {request.room}: it is in a step, which uses its device slots")
        num_before = request.num_retractions  # a larger hot buffer is no retraction
        self.requests.grow_for_exchange(exchange)
        change = self._resize if request.hot_capacity else self._leave_pages
        if change(exchange, now):
            self.metrics.add("retractions_total", request.num_retractions - num_before)
        elif request.state is not RequestState.ENDED:
            raise _SlotsKept

    def _resize(self, exchange: Exchange, now: float) -> bool:
        """Give a hot buffer another size in place. Returns whether that worked; if not, the request fails."""
        request, capacity = exchange.request, exchange.hot_capacity
        if request.num_page_slots:
            self.tables.stop_pages(request)
        num_before = request.hot_capacity
        resize = partial(self.tables.resize, num_before=num_before, capacity=capacity)
        # Slots that it gives up are its own until its items have left them.
        is_done = capacity >= num_before or self._do_or_fail(resize, "retracted", now, request)
        if is_done:
            self.requests.replace_device_slots(exchange)
            is_done = self._do_or_fail(self.tables.grow, "given another hot buffer", now, request)
        if is_done and capacity > num_before:
            return self._do_or_fail(resize, "given a larger hot buffer", now, request)
        return is_done

    def _leave_pages(self, exchange: Exchange, now: float) -> bool:
        """Give a dense or resident request a hot buffer for its pages, in which the items of its last
        positions stay where they are. Returns whether that worked; if not, the request fails."""
        request = exchange.request
        if not self._do_or_fail(self.tables.retract, "retracted", now, request):
            return False
        first_kept = self.limits.first_kept(request, exchange.hot_capacity)
        if first_kept is None:
            if not self._do_or_fail(self.tables.release, "retracted", now, request):
                return False
            self.requests.replace_device_slots(exchange)
            self._fill_row(request, now)
            return True
        self.requests.replace_device_slots(exchange, first_kept)
        enter = partial(self.tables.enter_hot_buffer, first_position=first_kept)
        return all(self._do_or_fail(move, "retracted", now, request) for move in (self.tables.grow, enter))

    def _begin_fill(self, fill: Fill, now: float) -> None:
        """Give a request pages to become resident in; ``fill_rows`` goes on with them."""
        self.requests.begin_fill(fill)
        self._do_or_fail(self.tables.start_pages, "made resident", now, fill.request)

    def _grow(self, growth: Growth, now: float) -> None:
        """Give a running request more slots."""
        if growth.request.state is RequestState.RUNNING:  # an exchange or a fill may have failed it
            self.requests.grow(growth.request, growth.need)
            self._do_or_fail(self.tables.grow, "given more slots", now, growth.request)

    def _fill_row(self, request: Request, now: float) -> None:
        """Begin to fill the request's row of the tables and its hot buffer; ``fill_rows`` goes on with it."""
        request.is_filling = True
        self._do_or_fail(self.tables.start, "started", now, request)

    def enter_pages(self, now: float) -> set[Request]:
        """Make requests resident whose pages are filled. Returns those that are in the step in flight: they
        do not become resident yet."""
        with_pages = (r for r in self.requests.select(RequestState.RUNNING) if r.num_page_slots > 0)
        filled = [r for r in with_pages if r.has_next_step and self.tables.is_ready(r)]
        for request in filled:
            if not request.num_in_flight and self._do_or_fail(
                self.tables.enter_pages, "made resident", now, request
            ):
                self.requests.end_fill(request)
        return {request for request in filled if request.num_in_flight}

    def fill_rows(self, now: float, link_share: float = 0.0) -> None:
        """Launch the next slices of rows and pages that are being filled, and note which rows are filled.
        Residents whose first step behind that is read share their pages. ``link_share``: the part of the link
        to the host that misses take."""
        failed = self.tables.go_on(link_share)
        for request in self.requests.select(RequestState.RUNNING):
            if (error := failed.get(request.req_row)) is not None:
                log.error("the row of room %d cannot be filled", request.room, exc_info=error)
                what = "started" if request.is_filling else "made resident"
                self.ends.fail(request, 500, f"the request cannot be {what}: {error}", now)
            elif request.is_filling:
                request.is_filling = not self.tables.is_ready(request)
            elif request.shares_from is not None and len(request.output_token_ids) >= request.shares_from:
                min_own = self.limits.in_pages(self.limits.min_capacity(request))
                self.requests.share_resident(request, min_own)

    def _do_or_fail(
        self, action: Callable[..., None], participle: str, now: float, *requests: Request
    ) -> bool:
        """Apply ``action`` to admitted requests, and return whether that worked.

        If not, they fail and, if they run, their slots are freed at once, because the rest of the plan counts
        on them. ``participle``: the action's name in error texts. Raises torch.AcceleratorError when the
        device is lost.
        """
        try:
            action(*requests)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            for request in requests:
                log.exception("room %d cannot be %s", request.room, participle)
                self.ends.fail(request, 500, f"the request cannot be {participle}: {error}", now)
            self.ends.release_ended(now, waits=True)
            return False
        return True


def bootstrap_of(request: Request) -> Bootstrap:
    """Return the message that says which KV of the prompt is missing and where it is to land, and where the
    rest is."""
    start, stop = request.held_prefix_tokens, request.num_landing_tokens
    held: HeldKv | None = None
    if start:
        kv, index = (
            slice_extents(request.extents(kind), 0, start) for kind in (request.kv_pools[0], PoolKind.INDEX)
        )
        held = HeldKv(kv, index, request.num_prefilled_tokens)
    return Bootstrap(
        room=request.room,
        kv_extents=slice_extents(request.extents(request.kv_pools[0]), start, stop),
        index_extents=slice_extents(request.extents(PoolKind.INDEX), start, stop),
        aux_slot=request.owned.only_slot(PoolKind.AUX),
        prompt=request.prompt,
        root=request.root,
        attempt=request.attempt,
        num_held_tokens=start,
        num_resumed_tokens=request.sampling.num_resumed_tokens,
        scores=request.scores,
        held=held,
        hisparse=request.mode is Mode.HISPARSE,
    )
