"""Owns the step in flight: who gets a token next, and when a launched step is drawn and read.

In each turn the engine calls ``carry_out_plan``, then ``advance``. Where ``may_follow`` allows it, a step is
launched before the previous one is read, so that the device does not wait for the host. With a grammar, the
draws of a launched step depend on the tokens of the step before: they are enqueued once those have been read.
Between two turns at most one step is in flight.

The device slots of a request change while it is in no step. If it is in the step in flight, it skips the next
one, which the others take: its slots change beside that step, and the device need not wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

import torch

from hisparse_pd.decode_node.draft_choice import DraftChoice
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.miss_cost import MissCosts
from hisparse_pd.decode_node.next_plan import NextPlan
from hisparse_pd.decode_node.plan_moves import PlanMoves
from hisparse_pd.decode_node.request import Request, admission_order
from hisparse_pd.decode_node.request_states import RequestState, RunStage
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.runner import DeviceRunner, Launched
from hisparse_pd.decode_node.scrub import Scrubber
from hisparse_pd.decode_node.step_masks import has_grammar
from hisparse_pd.decode_node.step_results import StepResult
from hisparse_pd.engine.lockstep import Lockstep, NodeStep

log = logging.getLogger(__name__)

STEPS_BETWEEN_ESTIMATES: Final = 16
"""Steps between two estimates of what misses cost. Each makes the next plan look at the queue again."""


class StepLine:
    """Runs the steps of one engine, one behind the other."""

    def __init__(
        self,
        runner: DeviceRunner,
        lockstep: Lockstep,
        requests: LiveRequests,
        tables: RequestTables,
        plan_moves: PlanMoves,
        *,
        most_drafts: int,
        scrubber: Scrubber,
        miss_costs: MissCosts,
    ) -> None:
        """``most_drafts``: the most drafts of a request that a step may verify. ``scrubber``: verifies one
        request's hot buffer from time to time, before a step. ``miss_costs``: estimates for plans what misses
        cost."""
        self.runner = runner
        self.in_flight: Launched | None = None
        """The step that is launched and not read."""
        self.has_launched = False
        """Whether the last turn launched a step."""
        self.num_launched = 0
        self.is_plan_cut = False
        """Whether the last plan was cut: the next one may admit more."""
        self._skipping: set[Request] = set()
        """Requests that are in the step in flight and skip the next one, beside which their device slots
        change."""
        self._is_put_off = False
        """Whether the last plan waits until those whose device slots it changes have skipped a step."""
        self._lockstep = lockstep
        self._requests = requests
        self._tables = tables
        self._plan_moves = plan_moves
        self._ends = plan_moves.ends
        self._scrubber = scrubber
        self._miss_costs = miss_costs
        self._most_drafts = most_drafts
        self._link_share = 0.0
        """The share of the last step in which its misses took the link to the host."""
        self.draft_choice = DraftChoice(most_drafts)
        self.next_plan = NextPlan(plan_moves.limits, requests)
        self.next_plan.miss_cost = miss_costs.present()

    def carry_out_plan(self, now: float) -> None:
        """Carry out the scheduler's plan for the next step, before ``advance`` launches that.

        A plan that changes the device slots of requests in flight is put off once: they skip the next step.
        The step in flight is committed first where the next one may not follow it unread or would have no
        request, or where the plan was put off before and now changes the slots of others.
        """
        if not self.may_follow():
            self.settle()
        self._skipping = set()
        filled = self._plan_moves.enter_pages(now)
        plan = self.next_plan.make(now)
        changing = {exchange.request for exchange in plan.exchanges if exchange.request.num_in_flight}
        leaving = filled | changing
        if (changing and self._is_put_off) or (leaving and leaving.issuperset(self.next_batch())):
            self.settle()
            self._plan_moves.enter_pages(now)
            plan, changing, leaving = self.next_plan.make(now), set(), set()
        self._skipping, self._is_put_off = leaving, bool(changing)
        if not self._is_put_off:
            self._plan_moves.carry_out(plan, now)
            self.is_plan_cut = plan.is_cut

    def advance(self, *, is_stopping: bool) -> bool:
        """Launch the next step of the node, if a request has one, and commit the previous one. Returns False
        when all ranks are stopping.

        Raises torch.AcceleratorError when the device is lost, and any error when other ranks are in the step.
        """
        self._plan_moves.fill_rows(time.monotonic(), self._link_share)
        batch = self.next_batch()
        step = self._lockstep.agree(
            len(batch),
            is_split=self.runner.would_split(batch),
            is_stopping=is_stopping,
            num_new=1 + self._num_drafts(batch),
        )
        if step.is_last:
            return False

        launched = self.launch(batch, step)
        self.has_launched = launched is not None
        previous, self.in_flight = self.in_flight, launched
        if previous is not None:
            self._commit(previous)  # while the device computes the step just launched
        if launched is not None:
            self._draw(launched)  # with the grammars behind the tokens just committed
        # On a CPU, or after a step with both drafts and draws, the device alone cannot feed the next step:
        # its launch needs this step's results.
        if self.in_flight is not None and not self.in_flight.feeds_next:
            self.settle()
        self.draft_choice.note_turn(len(batch), step.num_new - 1, time.monotonic())
        if self.num_launched % STEPS_BETWEEN_ESTIMATES == 0 and batch:
            step_secs = self.draft_choice.step_secs(len(batch))
            self.next_plan.miss_cost = self._miss_costs.estimate(batch, step_secs)
        return True

    def may_follow(self) -> bool:
        """Whether a step may be launched before the one in flight, if there is one, is read.

        After a step with drafts only the device knows the lengths. The next step may then follow if every
        request takes just the likeliest tokens, so that no draw depends on the number of accepted drafts,
        and goes on whatever this number is. Where steps may verify drafts, none follows while a request has a
        grammar: the host makes masks for its drafts, and must have read them before the launch.
        """
        if (launched := self.in_flight) is None:
            return True
        running = self._requests.select(RequestState.RUNNING)
        if self._most_drafts and has_grammar(running):
            return False
        if launched.num_new == 1:
            return True
        return all(_goes_on_unread(request) for request in running if request.has_next_step)

    def settle(self) -> None:
        """Commit the step in flight, if there is one. No step uses any request's memory then."""
        if (previous := self.in_flight) is not None:
            self.in_flight = None
            self._commit(previous)

    def next_batch(self) -> list[Request]:
        """Return the requests that get a token in the next step, in order of admission."""
        running = self._requests.select(RequestState.RUNNING)
        ready = (request for request in running if request.run_stage is RunStage.READY)
        taking_part = (request for request in ready if request not in self._skipping)
        return sorted(taking_part, key=admission_order)

    def _num_drafts(self, batch: Sequence[Request]) -> int:
        """Choose how many drafts of a request the next step verifies at most."""
        most = self._most_drafts
        if most:
            most = max((self._tables.max_verifiable(request, most) for request in batch), default=0)
        return self.draft_choice.choose(len(batch), most)

    def launch(self, batch: list[Request], step: NodeStep) -> Launched | None:
        """Enqueue one step; an error in it ends the requests of its batch. Raises what ``advance`` raises."""
        self._tables.note_launch()
        if step.num_tokens == 0:
            return None
        self.num_launched += 1
        try:
            self._scrubber.before_step(batch)
            return self.runner.launch(batch, step)
        except Exception as error:
            if self._lockstep.ends_engine(error):
                raise
            self.runner.wait()  # for the part of the step that was enqueued before the error
            self.settle()
            self._fail_step(batch, error)
            return None

    def _draw(self, launched: Launched) -> None:
        """Enqueue the draws of a step whose previous one has been read. Fail requests whose grammars cannot
        say which tokens are allowed. An error fails all requests of the step, unless ``advance`` raises it.
        """
        try:
            launched.draw()
        except Exception as error:
            if self._lockstep.ends_engine(error):
                raise
            launched.wait()
            self.in_flight = None
            launched.take_requests_out()
            self._fail_step(launched.batch, error)
            return
        for request in launched.batch:
            is_running = request.state is RequestState.RUNNING
            if is_running and request.matcher is not None and request.matcher.error:
                self._ends.grammar_failed(request, request.matcher.error, time.monotonic())

    def _commit(self, launched: Launched) -> None:
        """Hand out the tokens of a step, and end the requests for which they are the last. A request that is
        already in the next step keeps its slots until that is read."""
        launched.take_requests_out()  # its positions count as in flight no longer
        try:
            results = launched.result()
        except torch.AcceleratorError:
            raise
        except Exception as error:
            launched.wait()
            self._fail_step(launched.batch, error)
            return
        now = time.monotonic()
        num_missed = 0
        for request, of_step in zip(launched.batch, results, strict=True):
            num_missed += of_step.counters.misses - request.row_counters.misses
            request.row_counters = of_step.counters
            if of_step.has_wrong_row:
                self._ends.row_is_wrong(request, now)
            elif request.state is RequestState.RUNNING:  # else it ended while the step ran
                self._hand_out(request, of_step, now)
        self._ends.release_ended(now)
        step_secs = self.draft_choice.step_secs(len(results))
        num_groups = self._tables.spec.num_hot_groups
        self._link_share = self._miss_costs.link_share(num_missed / num_groups, step_secs)

    def _hand_out(self, request: Request, of_step: StepResult, now: float) -> None:
        """Take what a step has for a running request into it, and send its tokens."""
        # A next step that is launched already has taken these drafts, on the device.
        request.draft_token_ids = [] if request.num_in_flight else of_step.drafts
        # Tokens of the prompt that took the place of drawn ones: so much less of its tail is left.
        request.num_tail_tokens -= of_step.num_known
        request.num_drafted += of_step.num_drafted
        if of_step.num_drafted:
            self._ends.metrics.drafted(of_step.num_drafted)
            self.draft_choice.note_verified(of_step.num_drafted, len(of_step.token_ids) - 1)
        if of_step.error:
            message = f"the hot buffer reported {of_step.error}"
            self._ends.fail(request, 500, message, now)
        elif of_step.token_ids:  # none while the prompt goes on
            self._ends.emit(request, of_step.token_ids, of_step.logprobs, now)

    def _fail_step(self, batch: Sequence[Request], error: Exception) -> None:
        """Fail the requests of a step that nothing on the device runs any more."""
        log.error("a decode step of %d requests failed", len(batch), exc_info=error)
        message = f"the decode step failed: {type(error).__name__}: {error}"
        for request in batch:
            if request.state is RequestState.RUNNING:
                self._ends.fail(request, 500, message, time.monotonic())
        self._ends.release_ended(time.monotonic())


def _goes_on_unread(request: Request) -> bool:
    """Return whether the request goes on with the likeliest token, however many drafts of the step in flight
    are right. If it is not in that step, its next token is certain."""
    is_sure = request.is_sure_of_next or not request.num_in_flight
    return request.is_plain_greedy and is_sure
