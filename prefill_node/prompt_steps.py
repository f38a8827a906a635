"""The steps of a prefill rank: it plans a forward, makes it with the other ranks, and sends what it computed.

The engine calls ``PromptSteps.advance`` in each turn of its loop. A layer's KV goes to the sender while the
next layers are computed (``forward_push.py``); what has no layer of its own, scores and the hint, follows
behind the forward. A forward that fails ends the requests of its batch and no others, unless other ranks are
in it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hisparse_pd.engine.lockstep import Lockstep, NodeStep
from hisparse_pd.prefill_node.compute import Batch, Computed, PromptRunner
from hisparse_pd.prefill_node.forward_push import ForwardPush
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.request_life import PrefillLife
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.prefill_node.row_verification import RowVerification
from hisparse_pd.prefill_node.scheduler import Chunk, StepLimits, plan_step

log = logging.getLogger(__name__)


@dataclass
class PromptSteps:
    """The steps of one rank. It keeps no state between them: requests are ``life``'s."""

    limits: StepLimits
    life: PrefillLife
    memory: PrefillMemory
    runner: PromptRunner
    lockstep: Lockstep
    read_ahead: Callable[[], None]
    """Reads decode nodes' messages while the device computes."""

    def __post_init__(self) -> None:
        self._verification = RowVerification(self.life, self.limits, self.memory.wrong_items)

    def advance(self, *, is_stopping: bool) -> NodeStep:
        """Make one forward of this rank's requests, or take part in one of other ranks. Returns what the
        ranks have agreed on: no tokens if no rank has anything to compute."""
        chunks = self.plan()
        num_tokens = sum(chunk.stop - chunk.start for chunk in chunks)
        step = self.lockstep.agree(num_tokens, is_stopping=is_stopping)
        if step.num_tokens and chunks:
            self._forward([(self.life.requests.live(chunk.room), chunk) for chunk in chunks], num_tokens)
        elif step.num_tokens:
            self.runner.run_of_others()
        return step

    def plan(self) -> tuple[Chunk, ...]:
        """Return the next forward's chunks. The cached rows that they read are verified first. While one is
        wrong, its page is set aside, and the plan is made again without it.

        Fetches begin while the scheduler looks at waiting requests, and take pages that the plan may have
        given away, cached ones among them; one that fails has taken them, too. Then it is made again; each
        request is fetched for once.
        """
        pages = self.life.pages
        while True:
            # Pages that were set aside make the pool smaller: prompts that no longer fit would wait in vain.
            self._verification.fail_prompts_too_long_for_pool(time.monotonic())
            before = pages.num_available_pages, pages.prefixes.num_forgotten_pages
            chunks = self._chunks(may_be_arriving=False)
            # A forward that reads what is still arriving waits for it, and others would wait with it.
            if not chunks and pages.copies_up:
                chunks = self._chunks(may_be_arriving=True)
            if before != (pages.num_available_pages, pages.prefixes.num_forgotten_pages):
                continue
            if not chunks and pages.unpin():
                continue
            if not self._verification.set_wrong_aside(chunks, time.monotonic()):
                return chunks

    def _chunks(self, *, may_be_arriving: bool) -> tuple[Chunk, ...]:
        pages = self.life.pages
        return plan_step(
            self.life.running(),
            self.life.candidates(may_be_arriving=may_be_arriving),
            self.limits,
            num_available_pages=pages.num_available_pages,
            num_aux_slots=pages.pools.free.aux,
        )

    def _forward(self, batch: Batch, num_tokens: int) -> None:
        self._admit([request for request, chunk in batch if chunk.admits])
        push = ForwardPush(self.life.pusher, batch)

        def meanwhile() -> None:
            self.read_ahead()
            if push.has_arriving:
                self.life.pages.copies_up.wait()
                push.send_arrived()

        started_secs = time.monotonic()
        try:
            computed = self.runner.run(batch, push.layer_written, meanwhile)
        except Exception as error:  # for example out of memory: this batch fails and the node serves on
            if self.lockstep.ends_engine(error):
                raise
            self._fail_batch(batch, error)
            return
        self.life.pages.pace.note(num_tokens, time.monotonic() - started_secs)
        for request in push.lost:
            self.life.begin_anew(request, time.monotonic())
        self._commit([entry for entry in batch if entry[0] not in push.lost], computed)

    def _admit(self, requests: list[PrefillRequest]) -> None:
        self.life.admit(requests, time.monotonic())
        new_pages = [page_id for request in requests for page_id in request.own_page_ids]
        self.memory.void_checks(new_pages, self.limits.page_size)

    def _commit(self, batch: Batch, computed: Computed) -> None:
        """Send what a forward has computed beside its layers, which are with the sender already. A prompt
        that is now computed whole has a hint, which its aux record takes along."""
        now_secs = time.monotonic()
        for request, chunk in batch:
            if not self.life.send_scores(request, computed.scores.get(request.room, ()), now_secs):
                continue  # the request has failed
            self.life.note_computed(request, chunk.stop)
            if (hint := computed.hints.get(request.room)) is not None:
                assert request.aux_slot_src is not None
                # The MTP layer's index group is the last; a decode node without drafts has none for it.
                hint = hint[: request.peer.num_index_groups]
                self.memory.stage_aux(request.aux_slot_src, request.room, hint)
                self.life.start_sending(request, now_secs)

    def _fail_batch(self, batch: Batch, error: Exception) -> None:
        log.error("the forward of rooms %s failed", [request.room for request, _ in batch], exc_info=error)
        now_secs = time.monotonic()
        for request, _ in batch:
            reason = f"room {request.room}: computing the prompt failed: {type(error).__name__}: {error}"
            self.life.fail(request, 500, reason, now_secs)
        if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
            torch.cuda.empty_cache()
