"""The decode node's engine: it builds the parts, and each turn of its loop calls them in order.

``EngineLoop`` calls ``_receive`` (front messages, what prefill nodes say, deadlines, compiled grammars), then
``_step`` (carry out the scheduler's plan, launch a step, hand out the tokens of the one before).
Look-ups of prefill nodes and their writes into the registered pools go on beside the loop's thread.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from functools import partial
from typing import assert_never

import numpy as np
import torch

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.core.grammar.compiler import Compiler
from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.grammar.token_trie import TokenTrie
from hisparse_pd.core.memory.device import DeviceMemory
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.pools import PoolKind, Pools
from hisparse_pd.core.paging.prompt_keys import PromptKeys
from hisparse_pd.decode_node.end_moves import EndMoves
from hisparse_pd.decode_node.key_pages import KeyPages
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.memory import DecodeMemory, num_host_bytes
from hisparse_pd.decode_node.metrics import Metrics
from hisparse_pd.decode_node.miss_cost import MissCosts
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.plan_moves import PlanMoves
from hisparse_pd.decode_node.prefill_events import PrefillEvents
from hisparse_pd.decode_node.prefill_peers import PrefillPeers
from hisparse_pd.decode_node.queue_moves import QueueMoves
from hisparse_pd.decode_node.request_states import RequestState, RunStage
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.runner import make_runner
from hisparse_pd.decode_node.scrub import Scrubber
from hisparse_pd.decode_node.sizing import (
    check_swap_in,
    drafts_without_room,
    key_bytes,
    make_limits,
    max_hot_capacity,
    size_device_pool,
)
from hisparse_pd.decode_node.step_line import StepLine
from hisparse_pd.decode_node.step_masks import GrammarLate, ask_for_grammar, take_matcher
from hisparse_pd.engine.loop import EngineLoop
from hisparse_pd.engine.messages import (
    Abort,
    EngineLoading,
    EngineReady,
    EngineStats,
    GenerateGroup,
    ReleaseQuarantine,
    unpack_token_ids,
)
from hisparse_pd.transfer.lane_host import LaneHost

log = logging.getLogger(__name__)

MAX_TURN_SECS = 1.0
"""Most time of a turn that counts for quarantines. In a longer turn the process may have been stopped, and
the time beyond this is added to each quarantine."""


class DecodeEngine(EngineLoop[DecodeSettings]):
    """The parts of one decode engine; ``QueueMoves``, ``PlanMoves`` and ``EndMoves`` move the requests."""

    role = "decode"

    def _build(self, model: DsaModel) -> None:
        settings, spec, send = self._settings, self._spec, self.socket.send
        self.metrics = Metrics()

        # How large everything is.
        device = torch.device(settings.device)
        gpu_memory = DeviceMemory.read(device) if device.type == "cuda" else None
        self.limits = make_limits(settings, spec, size_device_pool(settings, spec, gpu_memory))
        if fault := drafts_without_room(settings, spec):
            log.warning("%s", fault)
        pools = Pools(self.limits.totals, settings.page_size)

        # Memory, the books of it, and the tables over it.
        send(EngineLoading("pools"))
        self.memory = DecodeMemory(
            spec,
            pools.totals,
            settings.page_size,
            device,
            shared=settings.same_host_lane == "auto",
            placement=self._placement,
        )
        self._key_pages: KeyPages | None = None
        if settings.keeps_idle_keys:
            self._key_pages = KeyPages(self.memory, placement=self._placement)
        self.requests = LiveRequests(pools, settings.quarantine_secs, self._key_pages)
        self.tables = RequestTables(
            spec,
            self.memory,
            num_rows=settings.max_running_requests,
            num_lookup_slots=self.limits.totals.lookup,
            max_capacity=max_hot_capacity(settings, spec),
            page_size=settings.page_size,
            max_new=settings.speculative_num_steps + 1,
            ranks=model.ranks,
        )
        # While it is idle, the loop checks the books and verifies the rows of held prefixes. It flushes these
        # prefixes on demand.
        kv = {PoolKind.HOST: self.memory.k_host, PoolKind.DEVICE: self.memory.k_dev}
        checks = self.memory.row_checks
        row_checks = {} if checks is None else {PoolKind.INDEX: checks}
        stored = None if checks is None or self._key_pages is None else self._key_pages.row_checks
        self._set_live_record(self.requests, self.requests.held, kv, row_checks, stored)

        # Prefill nodes, and what else goes on beside the loop's thread.
        shared = self.memory.shared_memory()  # for prefill nodes of this machine
        self._lane_host = (
            LaneHost(shared, directory=settings.same_host_dir, wakeup=self._wakeup.set) if shared else None
        )
        self.grammars = Compiler(
            partial(TokenTrie.load, settings.model_path, spec.vocab_size, spec.eos_token_ids),
            self._wakeup.set,
        )
        self.peers = PrefillPeers(
            node_id=f"decode-{uuid.uuid4().hex}",
            session=self.transfer.session,
            transfer_protocol=self.transfer.transport.protocol,
            geometry=self.geometry,
            regions=self.memory.register(self.transfer),
            heartbeats=self._heartbeats,
            health_timeout_secs=settings.health_timeout_secs,
            poller=self.poller,
            keys=self._control_keys,
            allowed=self._allowed,
            lane_host=self._lane_host,
        )

        # The moves of requests.
        self.end_moves = EndMoves(
            self.requests, self.tables, self.peers, self.metrics, send, settings.stream_interval
        )
        self.queue_moves = QueueMoves(
            limits=self.limits,
            policy=settings.hisparse,
            room_timeout_secs=settings.room_timeout_secs,
            requests=self.requests,
            peers=self.peers,
            ends=self.end_moves,
        )
        self.plan_moves = PlanMoves(
            limits=self.limits,
            requests=self.requests,
            tables=self.tables,
            peers=self.peers,
            metrics=self.metrics,
            queue=self.queue_moves,
            ends=self.end_moves,
        )
        self.prefill_events = PrefillEvents(self.queue_moves, self.plan_moves)

        # Steps. CUDA graphs are captured from forwards of padding alone, so before any request has slots.
        send(EngineLoading("kernels and CUDA graphs"))
        runner = make_runner(settings, model, self.tables)
        self.steps = StepLine(
            runner,
            self._lockstep,
            self.requests,
            self.tables,
            self.plan_moves,
            most_drafts=settings.speculative_num_steps,
            scrubber=Scrubber(self.tables),
            miss_costs=MissCosts(spec.index_topk, self._miss_secs(), runner.step_secs),
        )
        self._last_turn_at = float("inf")  # no time lies between the start and the first turn

    def _miss_secs(self) -> float:
        """Return the seconds in which a position's items come from the host pool, by the link's rate; 0.0
        without a GPU."""
        self.host_link_rate = self.memory.measure_host_link()
        position_bytes = self._spec.item_bytes * self._spec.num_kv_layers
        return position_bytes / self.host_link_rate if self.host_link_rate else 0.0

    @staticmethod
    def registered_host_bytes(settings: DecodeSettings, spec: ModelSpec) -> int:
        # ``engine/start.py`` calls this before the model is loaded.
        check_swap_in(settings, spec)
        # A device pool whose size is not known yet is on a GPU and takes no main memory.
        totals = make_limits(settings, spec, settings.device_pool_tokens).totals
        return num_host_bytes(spec, totals, settings.page_size, torch.device(settings.device))

    @staticmethod
    def other_host_bytes(settings: DecodeSettings, spec: ModelSpec) -> int:
        if not settings.keeps_idle_keys:
            return 0
        return settings.host_pool_tokens // settings.page_size * settings.page_size * key_bytes(spec)

    def _ready(self) -> EngineReady:
        return EngineReady(
            context_length=self._spec.context_length,
            max_total_tokens_hisparse=min(self._spec.context_length, self.limits.max_life_hisparse),
            max_total_tokens_dense=min(self._spec.context_length, self.limits.max_life_dense),
        )

    def close(self) -> None:
        """Fail the requests that are still live, and close all parts."""
        super().close()
        self.steps.settle()
        now = time.monotonic()
        for request in self.requests.all():
            self.end_moves.fail(request, 503, "the decode node is shutting down", now)
        self.end_moves.release_ended(now, waits=True)
        self.peers.close()
        if self._lane_host is not None:
            self._lane_host.close()
        self.grammars.close()
        self._wakeup.close()
        self.transfer.close()
        if self._key_pages is not None:
            self._key_pages.close()
        self.memory.close()

    # --- receive ------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        if (pause_secs := now - self._last_turn_at - MAX_TURN_SECS) > 0:
            self.requests.quarantine.postpone(pause_secs)
        self._last_turn_at = now
        self._receive_from_fronts(now)
        for event in self.peers.poll(now, self._wanted_peers()):
            self.prefill_events.handle(event, now)
        self.end_moves.release_ended(now)
        self.prefill_events.expire_quarantine(now)
        self.plan_moves.go_on_with_fetched(now)
        self.queue_moves.expire(now)
        self.queue_moves.refresh(now)
        self._follow_grammars(now)

    def _flush(self) -> None:
        self.requests.settle_copies()
        super()._flush()

    def _on_request_message(self, message: GenerateGroup | Abort | ReleaseQuarantine, now: float) -> None:
        match message:
            case GenerateGroup():
                self._generate(message, now)
            case Abort():
                self.end_moves.abort(message.request_id, now, has_finished=message.has_finished)
            case ReleaseQuarantine():
                self.prefill_events.release_quarantine(message.instance_id, now)
            case _:
                assert_never(message)

    def _generate(self, message: GenerateGroup, now: float) -> None:
        """Take in all samples of a prompt; they share its keys."""
        prompt_keys = None
        if not self._settings.disable_prefix_cache:
            prompt_keys = PromptKeys.with_keys(
                message.root, message.page_keys, message.prompt, self.limits.page_size
            )

        prompt_token_ids = None  # the distinct ids, then the resumed ones: see ``Request``
        if any(sample.sampling.needs_prompt for sample in message.samples):
            prompt = unpack_token_ids(message.prompt)
            num_resumed = message.samples[0].sampling.num_resumed_tokens
            distinct = np.flatnonzero(np.bincount(prompt)).astype(np.int32)
            prompt_token_ids = np.concatenate([distinct, prompt[len(prompt) - num_resumed :]])

        first_sample = None
        for sample in message.samples:
            request = self.queue_moves.generate(
                sample, message.root, message.prompt, now, prompt_keys, prompt_token_ids, first_sample
            )
            first_sample = first_sample or request  # the first one that is not refused

    def _follow_grammars(self, now: float) -> None:
        """Give compiled grammars to the running requests that wait for them."""
        for request in self.requests.select(RequestState.LANDING, RequestState.FETCHING):
            ask_for_grammar(request, self.grammars, now)
        for request in self.requests.select(RequestState.RUNNING):
            if request.run_stage is RunStage.AWAITS_GRAMMAR:
                try:
                    take_matcher(request, self.grammars, now)
                except GrammarError as error:
                    self.end_moves.grammar_failed(request, error, now)
                except GrammarLate as error:
                    self.end_moves.fail(request, 503, str(error), now)

    def _wanted_peers(self) -> set[PeerAddress]:
        """Return the prefill nodes that a request or a quarantined room waits for."""
        wanted = {request.peer for request in self.requests.select(RequestState.LANDING)}
        for state in (RequestState.CONNECTING, RequestState.WAITING):
            wanted.update(self.requests.queued_at(state))
        return wanted | {entry.peer for entry in self.requests.quarantine if entry.is_unacknowledged}

    # --- step and statistics ----------------------------------------------------------------------

    def _step(self) -> bool:
        self.steps.carry_out_plan(time.monotonic())
        if not self.steps.advance(is_stopping=self._is_stopping):
            self._has_stopped = True
        # The next turn comes at once: after a step, which brings tokens and may free slots for requests that
        # sat it out, while the queue has more to admit, and while a request ends, is filled or can go on, or
        # a held prefix is copied.
        return (
            self.steps.has_launched
            or self.steps.is_plan_cut
            or bool(self.requests.select(RequestState.ENDING))
            or self.requests.num_copies > 0
            or any(
                request.run_stage in (RunStage.FILLING, RunStage.READY)
                for request in self.requests.select(RequestState.RUNNING)
            )
        )

    @property
    def _num_dropped(self) -> Counter[str]:
        return self.metrics.num_dropped + self.peers.num_dropped

    def _stats(self, now: float) -> EngineStats:
        live = self.requests.select(RequestState.RUNNING, RequestState.ENDING)
        return self.metrics.stats(
            self.requests,
            swap_ins=self.tables.totals(live),
            bytes_per_miss=self.tables.bytes_per_miss,
            num_peers=self.peers.num_registered,
            lanes=self.peers.lanes,
            step=self.steps.num_launched,
            now=now,
            host_link_rate=self.host_link_rate,
            miss_cost=self.steps.next_plan.miss_cost,
            hot_capacity=self.limits.device_buffer_size,
        )
