"""Owns the step in flight: who gets a token next, and when what was launched is drawn and read.

A step is launched before the one before it is read, where that may be (``may_follow``); what it draws under
grammars is enqueued when that has been. So at most one step is in flight between two turns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from hisparse_pd.decode_node.draft_choice import DraftChoice
from hisparse_pd.decode_node.hot_buffers import HotBuffers
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.next_plan import NextPlan
from hisparse_pd.decode_node.request import Request, RequestState, RunStage
from hisparse_pd.decode_node.request_life import RequestLife
from hisparse_pd.decode_node.runner import DeviceRunner, Launched
from hisparse_pd.decode_node.scrub import Scrubber
from hisparse_pd.decode_node.step_masks import has_grammar
from hisparse_pd.engine.lockstep import Lockstep, NodeStep

log = logging.getLogger(__name__)


class StepLine:
    """The steps of one engine, one behind the other."""

    def __init__(
        self,
        runner: DeviceRunner,
        lockstep: Lockstep,
        requests: LiveRequests,
        hot_buffers: HotBuffers,
        lifecycle: RequestLife,
        *,
        most_drafts: int,
        scrubber: Scrubber,
    ) -> None:
        """``most_drafts``: that a step may verify of a request."""
        self.runner = runner
        self.in_flight: Launched | None = None
        self.has_launched = False
        """In the last turn: there are tokens to follow."""
        self.num_launched = 0
        self._lockstep = lockstep
        self._requests = requests
        self._hot_buffers = hot_buffers
        self._lifecycle = lifecycle
        self._scrubber = scrubber
        self._most_drafts = most_drafts
        self._draft_choice = DraftChoice(most_drafts)
        self._next_plan = NextPlan(lifecycle.limits, requests)

    def plan(self, now: float) -> None:
        """Carry out what the scheduler wants before the next step, which is then launched behind the one in
        flight where that may be."""
        if not self.may_follow():
            self.settle()
        plan = self._next_plan.make(now)
        if plan.exchanges and self.in_flight is not None:
            self.settle()  # whoever changes its device slots may be in a step, or may be at its end
            plan = self._next_plan.make(now)
        self._lifecycle.carry_out(plan, now)

    def take(self, *, is_stopping: bool) -> bool:
        """Launch the next step of the node, if anybody has one, and read the one before. False when all ranks
        are stopping. Raises torch.AcceleratorError when the device is lost, and anything when other ranks are
        in the step."""
        self._lifecycle.fill_rows(time.monotonic())
        batch = self._next_batch()
        step = self._lockstep.agree(
            len(batch),
            is_split=self.runner.would_split(batch),
            is_stopping=is_stopping,
            num_new=1 + self._num_drafts(batch),
        )
        if step.is_last:
            return False
        launched = self._launch(batch, step)
        self.has_launched = launched is not None
        previous, self.in_flight = self.in_flight, launched
        if previous is not None:
            self._commit(previous)
        if launched is not None:
            self._draw(launched)
        if self.in_flight is not None and not self.in_flight.feeds_next:
            self.settle()
        self._draft_choice.turn(len(batch), step.num_new - 1, time.monotonic())
        return True

    def may_follow(self) -> bool:
        """Whether a step may be launched before the one in flight, if there is one, is read.

        The lengths behind drafts that are in flight are on the device. The host has to know that all requests
        go on however many are right, and that no draw depends on how many there were before it. So nobody
        may have a grammar where steps verify drafts.
        """
        if (launched := self.in_flight) is None:
            return True
        running = self._requests.select(RequestState.RUNNING)
        if self._most_drafts and has_grammar(running):
            return False
        return launched.num_new == 1 or all(
            request.is_plain_greedy and (request.is_sure_of_next or not request.num_in_flight)
            for request in running
            if request.has_next_step
        )

    def settle(self) -> None:
        """Commit what is in flight, so that no step uses anything of any request."""
        if (previous := self.in_flight) is not None:
            self.in_flight = None
            self._commit(previous)

    def _next_batch(self) -> list[Request]:
        """Who gets a token in the next step, in order of admission."""
        running = self._requests.select(RequestState.RUNNING)
        ready = (request for request in running if request.run_stage is RunStage.READY)
        return sorted(ready, key=lambda request: request.admitted_seq)

    def _num_drafts(self, batch: Sequence[Request]) -> int:
        """That the next step verifies, of any of its requests."""
        most = self._most_drafts
        if most:
            most = max((self._hot_buffers.max_verifiable(request, most) for request in batch), default=0)
        return self._draft_choice.choose(len(batch), most)

    def _launch(self, batch: list[Request], step: NodeStep) -> Launched | None:
        """Enqueue one step. What goes wrong in it ends the requests of this batch. Raises as ``take``."""
        if step.num_tokens == 0:
            return None
        self.num_launched += 1
        try:
            self._scrubber.before_step(batch)
            launched = self.runner.launch(batch, step)
        except Exception as error:
            if self._lockstep.ends_engine(error):
                raise
            self.settle()
            self._fail_step(batch, error)
            return None
        for request, most_drafts in zip(batch, launched.most_drafts, strict=True):
            request.enter_step(most_drafts)
        return launched

    def _draw(self, launched: Launched) -> None:
        """Enqueue the draws, once the step before was read, and end those whose grammars cannot say what may
        come. What goes wrong ends the requests of this batch. Raises as ``take``."""
        try:
            launched.draw()
        except Exception as error:
            if self._lockstep.ends_engine(error):
                raise
            launched.wait()
            self.in_flight = None
            for request, most_drafts in zip(launched.batch, launched.most_drafts, strict=True):
                request.leave_step(most_drafts)
            self._fail_step(launched.batch, error)
            return
        for request in launched.batch:
            is_running = request.state is RequestState.RUNNING
            if is_running and request.matcher is not None and request.matcher.error:
                self._lifecycle.grammar_failed(request, request.matcher.error, time.monotonic())

    def _commit(self, launched: Launched) -> None:
        """Hand out the tokens of a step, and end the requests for which they are the last. One that is in the
        next step already owns what it has until that is read."""
        for request, most_drafts in zip(launched.batch, launched.most_drafts, strict=True):
            request.leave_step(most_drafts)
        try:
            results = launched.result()
        except torch.AcceleratorError:
            raise
        except Exception as error:
            launched.wait()
            self._fail_step(launched.batch, error)
            return
        now = time.monotonic()
        for request, of_step in zip(launched.batch, results, strict=True):
            request.row_counters = of_step.counters
            if of_step.has_wrong_row:
                self._lifecycle.row_is_wrong(request, now)
                continue
            if request.state is not RequestState.RUNNING:
                continue  # it ended while the step ran
            # A step in flight has taken those that were made.
            request.draft_token_ids = [] if request.num_in_flight else of_step.drafts
            request.num_drafted += of_step.num_drafted
            if of_step.num_drafted:
                self._lifecycle.metrics.drafted(of_step.num_drafted)
                self._draft_choice.verified(of_step.num_drafted, len(of_step.token_ids) - 1)
            if of_step.error:
                message = f"the hot buffer reported {of_step.error}"
                self._lifecycle.fail(request, 500, message, now)
            else:
                self._lifecycle.emit(request, of_step.token_ids, of_step.logprobs, now)
        self._lifecycle.release_ended(now)

    def _fail_step(self, batch: Sequence[Request], error: Exception) -> None:
        log.error("a decode step of %d requests failed", len(batch), exc_info=error)
        message = f"the decode step failed: {type(error).__name__}: {error}"
        for request in batch:
            if request.state is RequestState.RUNNING:
                self._lifecycle.fail(request, 500, message, time.monotonic())
        self._lifecycle.release_ended(time.monotonic())
