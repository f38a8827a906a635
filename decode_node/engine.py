"""The decode engine's process: wires the parts together and turns the loop.

One turn is receive → plan → launch → commit: take in what the front and the prefill nodes sent, let the
scheduler decide, and let the line of steps (``step_line.py``) run one forward and hand out its tokens. All of
it runs in one thread; look-ups of prefill nodes and writes into the registered pools run beside it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import assert_never

import numpy as np
import torch

from hisparse_pd.base.access import PeerList
from hisparse_pd.base.process import parent_is_alive
from hisparse_pd.base.settings import DecodeSettings
from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.core.grammar.compiler import Compiler
from hisparse_pd.core.grammar.matcher import GrammarError
from hisparse_pd.core.grammar.token_trie import TokenTrie
from hisparse_pd.core.memory.device import DeviceMemory
from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.pools import Pools
from hisparse_pd.core.paging.prompt_keys import PromptKeys
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.memory import DecodeMemory, num_host_bytes
from hisparse_pd.decode_node.metrics import Metrics
from hisparse_pd.decode_node.prefill_peers import PrefillPeers
from hisparse_pd.decode_node.request import PeerAddress, RequestState, RunStage
from hisparse_pd.decode_node.request_life import RequestLife
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.runner import make_runner
from hisparse_pd.decode_node.scrub import Scrubber
from hisparse_pd.decode_node.sizing import (
    check_swap_in,
    drafts_without_room,
    make_limits,
    max_hot_capacity,
    size_device_pool,
)
from hisparse_pd.decode_node.step_line import StepLine
from hisparse_pd.decode_node.step_masks import GrammarLate, ask_for_grammar, follow
from hisparse_pd.engine.lockstep import Lockstep
from hisparse_pd.engine.messages import (
    Abort,
    EngineLoading,
    EngineReady,
    FlushCache,
    GenerateGroup,
    ReleasePage,
    ReleaseQuarantine,
    Shutdown,
    unpack_token_ids,
)
from hisparse_pd.engine.sockets import EngineSocket
from hisparse_pd.engine.start import run_engine_process
from hisparse_pd.protocol.channels import Heartbeats, load_control_keys
from hisparse_pd.protocol.polling import Poller, Wakeup
from hisparse_pd.transfer.engine import TransferEngine
from hisparse_pd.transfer.lane_host import LaneHost
from hisparse_pd.transfer.listeners import guarded_listeners
from hisparse_pd.transfer.transport import Transport

log = logging.getLogger(__name__)

IDLE_WAIT_SECS = 0.05
MAX_TURN_SECS = 1.0
"""A longer turn may have been a stop of the process: quarantines do not count what it took beyond this."""
STATS_INTERVAL_SECS = 0.4
IDLE_CHECK_INTERVAL_SECS = 5.0


def run_engine(settings: DecodeSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    """The engine process: load everything, say EngineReady to the fronts, serve until they say Shutdown."""
    run_engine_process(
        settings,
        endpoints,
        place,
        role="decode",
        num_host_bytes=partial(registered_host_bytes, settings),
        make=partial(DecodeEngine, settings),
    )


class DecodeEngine:
    """All parts of one decode node's engine. Raises TransferError, and StartError, also when pools do not
    fit."""

    def __init__(
        self,
        settings: DecodeSettings,
        spec: ModelSpec,
        model: DsaModel,
        front: EngineSocket,
        transport: Transport,
        placement: Placement = ANYWHERE,
    ) -> None:
        self._settings = settings
        self._placement = placement
        self._spec = spec
        self._front = front
        self._metrics = Metrics()
        self._poller = Poller()
        for channel in front.fronts:
            self._poller.register(channel)
        device = torch.device(settings.device)
        gpu_memory = DeviceMemory.read(device) if device.type == "cuda" else None
        self.limits = make_limits(settings, spec, size_device_pool(settings, spec, gpu_memory))
        if fault := drafts_without_room(settings, spec):
            log.warning("%s", fault)
        self.requests = LiveRequests(Pools(self.limits.totals, settings.page_size), settings.quarantine_secs)
        front.send(EngineLoading("pools"))
        self._memory = DecodeMemory(
            spec,
            self.requests.pools.totals,
            settings.page_size,
            device,
            shared=settings.same_host_lane == "auto",
            placement=placement,
        )
        self.tables = RequestTables(
            spec,
            self._memory,
            num_rows=settings.max_running_requests,
            num_lookup_slots=self.limits.totals.lookup,
            max_capacity=max_hot_capacity(settings, spec),
            page_size=settings.page_size,
            max_new=settings.speculative_num_steps + 1,
        )
        geometry = spec.geometry(settings.page_size, settings.attention_split_tile_size)
        allowed = PeerList.parse(settings.allowed_peers)
        with guarded_listeners(settings.reachable_host, allowed):
            self._transfer = TransferEngine(
                settings.reachable_host, transport, needs_network=settings.same_host_lane == "off"
            )
        self._wakeup = Wakeup()
        self._poller.register(self._wakeup)
        shared = self._memory.shared_memory()  # with prefill nodes of this machine
        self._lane_host = (
            LaneHost(shared, directory=settings.same_host_dir, wakeup=self._wakeup.set) if shared else None
        )
        self._grammars = Compiler(
            partial(TokenTrie.load, settings.model_path, spec.vocab_size, spec.eos_token_ids),
            self._wakeup.set,
        )
        self.peers = PrefillPeers(
            node_id=f"decode-{uuid.uuid4().hex}",
            session=self._transfer.session,
            transfer_protocol=transport.protocol,
            geometry=geometry,
            regions=self._memory.register(self._transfer),
            heartbeats=Heartbeats.within(settings.heartbeat_interval_secs, settings.heartbeat_timeout_secs),
            health_timeout_secs=settings.health_timeout_secs,
            poller=self._poller,
            keys=load_control_keys(settings.control_key_file),
            allowed=allowed,
            lane_host=self._lane_host,
        )
        self.lifecycle = RequestLife(
            limits=self.limits,
            policy=settings.hisparse,
            room_timeout_secs=settings.room_timeout_secs,
            requests=self.requests,
            tables=self.tables,
            peers=self.peers,
            metrics=self._metrics,
            send=front.send,
            stream_interval=settings.stream_interval,
        )
        front.send(EngineLoading("kernels and CUDA graphs"))
        self._lockstep = Lockstep(model.ranks)
        if model.ranks is not None:
            self._poller.register(model.ranks.bells)
        self._scrubber = Scrubber(self.tables, self.requests.held, self.lifecycle.held_row_is_wrong)
        self.steps = StepLine(
            make_runner(settings, model, self.tables),
            self._lockstep,
            self.requests,
            self.tables,
            self.lifecycle,
            most_drafts=settings.speculative_num_steps,
            scrubber=self._scrubber,
        )
        self._is_stopping = self._has_stopped = False
        self._last_turn_at = float("inf")
        self._next_stats_at = 0.0
        self._next_check_at = 0.0

    def run(self) -> None:
        """Serve until Shutdown, or until the front is gone."""
        self._front.send(
            EngineReady(
                context_length=self._spec.context_length,
                max_total_tokens_hisparse=min(self._spec.context_length, self.limits.max_life_hisparse),
                max_total_tokens_dense=min(self._spec.context_length, self.limits.max_life_dense),
                transfer_protocol=self._transfer.transport.protocol,
                transfer_devices=self._transfer.transport.devices,
                transfer_reason=self._transfer.transport.reason,
                numa_node=self._placement.node,
                numa_placement=str(self._placement),
            )
        )
        log.info("ready, session %s", self._transfer.session)
        while not self._has_stopped:
            self.turn()

    def turn(self, max_wait_secs: float = IDLE_WAIT_SECS) -> None:
        """One turn of the loop. Without work it waits for messages, ``max_wait_secs`` at most."""
        # After a step there are tokens to follow, or slots for those who sat it out.
        has_work = (
            self.steps.has_launched
            or self._lockstep.is_due
            or bool(self.requests.select(RequestState.ENDING))
            or any(
                request.run_stage in (RunStage.FILLING, RunStage.READY)
                for request in self.requests.select(RequestState.RUNNING)
            )
        )
        self._poller.wait(0.0 if has_work else max_wait_secs)
        self._wakeup.clear()
        now = time.monotonic()
        if (pause_secs := now - self._last_turn_at - MAX_TURN_SECS) > 0:
            self.requests.quarantine.postpone(pause_secs)
        self._last_turn_at = now
        self._receive(now)
        self._follow_grammars(now)
        self.steps.carry_out_plan(now)
        if not self.steps.advance(is_stopping=self._is_stopping):
            self._has_stopped = True
            return
        if not self.requests:
            self._scrubber.when_idle()
        self._check(is_idle=not self.requests)
        self._report(time.monotonic())

    def close(self) -> None:
        """End what is still live, say so, and leave."""
        self.steps.settle()
        now = time.monotonic()
        for request in self.requests.all():
            self.lifecycle.fail(request, 503, "the decode node is shutting down", now)
        self.lifecycle.release_ended(now, waits=True)
        self.peers.close()
        if self._lane_host is not None:
            self._lane_host.close()
        self._grammars.close()
        self._wakeup.close()
        self._transfer.close()
        self._memory.close()

    # --- receive ------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        for message in self._front.receive():
            match message:
                case GenerateGroup():
                    self._generate(message, now)
                case Abort():
                    self.lifecycle.abort(message.request_id, now, has_finished=message.has_finished)
                case FlushCache():
                    self.requests.held.flush()
                case ReleaseQuarantine():
                    self.lifecycle.release_quarantine(message.instance_id, now)
                case ReleasePage():
                    self.lifecycle.release_page(message.pool, message.start)
                case Shutdown():
                    self._is_stopping = True
                case _:
                    assert_never(message)
        self._lockstep.hear()
        for event in self.peers.poll(now, self._wanted_peers()):
            self.lifecycle.peer_event(event, now)
        self.lifecycle.expire(now)
        self.lifecycle.refresh_queue(now)

    def _generate(self, message: GenerateGroup, now: float) -> None:
        """All samples of a prompt, which share its keys."""
        prompt_keys = None
        if not self._settings.disable_prefix_cache:
            prompt_keys = PromptKeys.of(message.root, message.prompt, self.limits.page_size)
        token_ids = None
        if any(sample.sampling.needs_prompt for sample in message.samples):
            prompt = unpack_token_ids(message.prompt)
            num_resumed = message.samples[0].sampling.num_resumed_tokens
            token_ids = np.flatnonzero(np.bincount(prompt)).astype(np.int32)
            token_ids = np.concatenate([token_ids, prompt[len(prompt) - num_resumed :]])
        first = None
        for sample in message.samples:
            request = self.lifecycle.generate(
                sample, message.root, message.prompt, now, prompt_keys, token_ids, first
            )
            first = first or request

    def _follow_grammars(self, now: float) -> None:
        """Of those that run and wait for theirs to be compiled. Nobody else waits for that."""
        for request in self.requests.select(RequestState.LANDING):
            ask_for_grammar(request, self._grammars, now)
        for request in self.requests.select(RequestState.RUNNING):
            if request.run_stage is RunStage.AWAITS_GRAMMAR:
                try:
                    follow(request, self._grammars, now)
                except GrammarError as error:
                    self.lifecycle.grammar_failed(request, error, now)
                except GrammarLate as error:
                    self.lifecycle.fail(request, 503, str(error), now)

    # --- beside the work --------------------------------------------------------------------------

    def _wanted_peers(self) -> set[PeerAddress]:
        """Peers that somebody waits for: requests on their way, and slots that wait for quiet rooms."""
        wanted = {request.peer for request in self.requests.select(RequestState.LANDING)}
        for state in (RequestState.CONNECTING, RequestState.WAITING):
            wanted.update(self.requests.queued_at(state))
        return wanted | {entry.peer for entry in self.requests.quarantine if entry.is_unacknowledged}

    def _check(self, is_idle: bool) -> None:
        now = time.monotonic()
        if self._settings.debug_checks or (is_idle and now >= self._next_check_at):
            self._next_check_at = now + IDLE_CHECK_INTERVAL_SECS
            self.requests.check_integrity()

    def _report(self, now: float) -> None:
        if now < self._next_stats_at:
            return
        self._next_stats_at = now + STATS_INTERVAL_SECS
        self._front.send(
            self._metrics.stats(
                self.requests,
                swap_ins=self.tables.totals(self.requests.select(RequestState.RUNNING, RequestState.ENDING)),
                bytes_per_miss=self.tables.bytes_per_miss,
                num_dropped=self.peers.num_dropped,
                num_peers=self.peers.num_registered,
                transfer_info=self._transfer.transport.info_metric,
                lanes=self.peers.lanes,
                step=self.steps.num_launched,
                now=now,
            )
        )
        if not parent_is_alive():
            log.error("the front process is gone, leaving")
            self._has_stopped = True  # and the other ranks, whose front it is too


def registered_host_bytes(settings: DecodeSettings, spec: ModelSpec) -> int:
    """Main memory that a rank of the node registers. Raises StartError for what the swap-in cannot take."""
    check_swap_in(settings, spec)
    # A device pool whose size is not known yet is on a GPU, and takes no main memory.
    totals = make_limits(settings, spec, settings.device_pool_tokens).totals
    return num_host_bytes(spec, totals, settings.page_size, torch.device(settings.device))
