"""The prefill node's engine: it computes prompts in chunks and pushes their KV to decode nodes.

``PrefillEngine`` builds the parts of one rank; ``EngineLoop`` calls it. Each turn receives (``_receive``:
returned batches, control messages, fronts) and makes one step (``prompt_steps.py``).

The loop's thread does everything but the writes, which the sender's threads do while the next layers compute.
A forward of one chunk must therefore take well under ``health_timeout_secs``, after which the front and the
decode nodes take this engine for lost.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter

import msgspec
import numpy as np
import torch

from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.vocabulary import VERSION, StartError
from hisparse_pd.core.memory.device import DeviceMemory
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.memory.numa import Placement
from hisparse_pd.core.memory.peer import GpuWriter
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.engine.loop import EngineLoop
from hisparse_pd.engine.messages import EngineLoading, EngineReady, EngineStats, PeerLane
from hisparse_pd.prefill_node.arrivals import Arrivals
from hisparse_pd.prefill_node.bootstrap_checks import BootstrapChecks
from hisparse_pd.prefill_node.compute import PromptRunner
from hisparse_pd.prefill_node.decode_events import DecodeEvents
from hisparse_pd.prefill_node.host_pages import HostPages
from hisparse_pd.prefill_node.memory import PrefillMemory, num_host_bytes
from hisparse_pd.prefill_node.metrics import engine_stats
from hisparse_pd.prefill_node.page_objects import PageObjects, namespace_of
from hisparse_pd.prefill_node.part_reads import ReadMemory
from hisparse_pd.prefill_node.prompt_pages import PromptPages
from hisparse_pd.prefill_node.prompt_steps import PromptSteps
from hisparse_pd.prefill_node.push import Pusher
from hisparse_pd.prefill_node.registrations import Peer, Registrations
from hisparse_pd.prefill_node.request_life import PrefillLife
from hisparse_pd.prefill_node.scheduler import StepLimits
from hisparse_pd.prefill_node.sizing import (
    MOST_GRAPH_REQUESTS,
    MOST_GRAPH_TOKENS,
    host_cache_bytes,
    size_host_cache,
    size_kv_pool,
)
from hisparse_pd.prefill_node.store_threads import StoreThreads
from hisparse_pd.protocol.channels import ControlServer
from hisparse_pd.protocol.messages import ToDecode
from hisparse_pd.transfer.lane import LaneReader, Lanes
from hisparse_pd.transfer.page_store import MooncakeStore
from hisparse_pd.transfer.sender import Sender

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECS = 5.0
"""Limit for writes in flight when the engine closes."""

SHORT_DIVISOR = 4
"""A prompt too long for one step leaves up to 1 / SHORT_DIVISOR of the step to later, short prompts that end
in it (``scheduler.py``)."""

AUX_SLOTS_PER_REQUEST = 2
"""Aux slots for each running request: requests that send or drain keep their slots while others compute."""


class PrefillEngine(EngineLoop[PrefillSettings]):
    """Builds one prefill engine and passes messages between its parts; ``PrefillLife`` moves requests."""

    role = "prefill"

    def _build(self, model: DsaModel) -> None:
        settings, spec = self._settings, self._spec
        self.instance_id = secrets.token_hex(8)
        device = torch.device(settings.device)

        # How large everything is.
        gpu_memory = DeviceMemory.read(device) if device.type == "cuda" else None
        num_pages = size_kv_pool(settings, spec, gpu_memory) // settings.page_size
        num_aux_slots = _num_aux_slots(settings)
        self._limits = StepLimits(
            chunk_tokens=settings.chunked_prefill_size,
            short_tokens=settings.chunked_prefill_size // SHORT_DIVISOR,
            max_requests=settings.max_running_requests,
            page_size=settings.page_size,
            num_pages=num_pages,
            graph_tokens=MOST_GRAPH_TOKENS,
            graph_requests=MOST_GRAPH_REQUESTS,
        )

        # Memory, and the threads that write from it.
        self.memory = PrefillMemory(
            spec, num_slots=num_pages * settings.page_size, num_aux_slots=num_aux_slots, device=device
        )
        self.memory.register(self.transfer)
        self.lanes = Lanes(
            self.transfer,
            self.transfer.transport.protocol,
            self.instance_id,
            why_off="--same-host-lane is off" if settings.same_host_lane == "off" else "",
            directory=settings.same_host_dir,
            on_decided=self._wakeup.set,
            gpu=GpuWriter(device, self.memory.sent) if device.type == "cuda" else None,
        )
        self.sender = Sender(self.lanes, self._wakeup.set)
        self._held_reads = Sender(LaneReader(self.lanes), self._wakeup.set)

        # The forward, which waits for what is copied up from lower tiers.
        layer_arrivals = None
        if settings.num_host_cache_tokens or settings.read_held != "off":
            layer_arrivals = self.memory.layer_arrivals()
        self._host_pages: HostPages | None = None
        if num_host_pages := settings.num_host_cache_tokens // settings.page_size:
            num_slots = num_host_pages * settings.page_size
            self._host_pages = HostPages(self.memory, num_slots, layer_arrivals, placement=self._placement)
        self.runner = PromptRunner(
            model,
            self.memory,
            settings.page_size,
            settings.attention_backend,
            settings.chunked_prefill_size,
            settings.attention_split_tile_size,
            arrivals=layer_arrivals,
        )

        # Decode nodes.
        self.control = ControlServer(
            settings.host, settings.control_port, self._control_keys, self._allowed, self._heartbeats
        )
        self.poller.register(self.control)
        self.peers = Registrations(self.geometry, self.transfer.transport.protocol, self._allowed)

        # Requests.
        pusher = Pusher(
            self.sender, self.memory.regions, settings.page_size, slice_bytes=self.lanes.write_bytes
        )
        self._store_threads = self._start_store() if settings.kv_store else None
        pages = PromptPages(
            self._limits,
            num_aux_slots,
            checks=self.memory,
            use_prefix_cache=not settings.disable_prefix_cache,
            host_pages=self._host_pages,
            store_orders=self._store_threads,
            held_reads=self._held_reads,
            read_memory=ReadMemory(
                self.memory.regions,
                void=lambda page_ids: self.memory.void_before_read(page_ids, settings.page_size),
                wrong_items=self.memory.wrong_items,
                part_bytes=self.lanes.read_bytes,
                pinned=self.lanes.pinned,
                arrivals=layer_arrivals,
            ),
            which_held=settings.read_held,
            clock=lambda: time.monotonic(),
        )
        self.life = PrefillLife(
            pages,
            pusher,
            self._tell_peer,
            room_timeout_secs=settings.room_timeout_secs,
            # A request is kept this much longer than its decode node waits for it, so that clients get the
            # decode node's error. A decode node that was silent for this long is lost anyway.
            grace_secs=settings.heartbeat_timeout_secs,
        )
        arrivals = Arrivals(
            self.life,
            BootstrapChecks(self._limits, spec.context_length, spec.vocab_size),
            max_queued=settings.max_running_requests + settings.max_queued_requests,
        )
        self._decode_events = DecodeEvents(
            self.control,
            self.peers,
            self.life,
            arrivals,
            self.lanes,
            self.transfer,
            instance_id=self.instance_id,
            geometry=self.geometry,
            heartbeat_timeout_secs=settings.heartbeat_timeout_secs,
            heartbeat_interval_secs=settings.heartbeat_interval_secs,
        )
        self.steps = PromptSteps(
            self._limits,
            self.life,
            self.memory,
            self.runner,
            self._lockstep,
            read_ahead=self._decode_events.read_ahead,
        )
        # While it is idle, the loop checks ``life`` and verifies rows of its prefixes; it flushes these on
        # demand.
        kv, row_checks = {PoolKind.DEVICE: self.memory.kv}, {PoolKind.DEVICE: self.memory.row_checks}
        if self._host_pages is not None:
            kv[PoolKind.HOST], row_checks[PoolKind.HOST] = self._host_pages.kv, self._host_pages.row_checks
        verified = {kind: checks for kind, checks in row_checks.items() if checks is not None}
        self._set_live_record(self.life, pages.prefixes, kv, verified)

        if device.type == "cuda":
            self._warm_up(device)
        self._num_steps = 0
        log.info(
            "control port %d, KV pool of %d pages of %d tokens",
            self.control.port,
            num_pages,
            settings.page_size,
        )

    @staticmethod
    def with_host_sizes(
        settings: PrefillSettings, spec: ModelSpec, placement: Placement, machine: Machine
    ) -> PrefillSettings:
        if settings.host_cache_tokens != "auto":
            return settings
        without = settings.model_copy(update={"host_cache_tokens": 0})
        num_own_bytes = PrefillEngine.registered_host_bytes(without, spec)
        num_tokens = size_host_cache(settings, spec, num_own_bytes, placement, machine)
        return settings.model_copy(update={"host_cache_tokens": num_tokens})

    @staticmethod
    def registered_host_bytes(settings: PrefillSettings, spec: ModelSpec) -> int:
        # kv_pool_tokens is 0, for a size yet to be chosen, only on a GPU, whose pool takes no main memory.
        num_slots = settings.kv_pool_tokens // settings.page_size * settings.page_size
        num_aux_slots, device = _num_aux_slots(settings), torch.device(settings.device)
        num_bytes = num_host_bytes(spec, num_slots=num_slots, num_aux_slots=num_aux_slots, device=device)
        if settings.kv_store:
            num_bytes += host_cache_bytes(settings, spec) + settings.kv_store_bytes
        return num_bytes

    @staticmethod
    def other_host_bytes(settings: PrefillSettings, spec: ModelSpec) -> int:
        return 0 if settings.kv_store else host_cache_bytes(settings, spec)

    def _start_store(self) -> StoreThreads:
        """Start the threads that talk to the cluster's store. They connect to it while the node serves."""
        settings, spec = self._settings, self._spec
        assert self._host_pages is not None, "settings that name a store have a host tier"
        device = torch.device(settings.device)
        arithmetic = (
            *(VERSION, str(torch.__version__), str(spec.dtype)),
            *(settings.attention_backend, str(settings.dp_size)),
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        )
        objects = PageObjects(self._host_pages, settings.page_size, namespace_of(self.geometry, arithmetic))
        store = MooncakeStore(
            settings.kv_store,
            settings.reachable_host,
            memory=objects.memory,
            lent_bytes=settings.kv_store_bytes,
            transport=self.transfer.transport,
            allowed=self._allowed,
        )
        return StoreThreads(store, objects, self._wakeup.set)

    def _warm_up(self, device: torch.device) -> None:
        started = time.monotonic()
        num_pool_tokens = self._limits.num_pages * self._limits.page_size
        most_tokens = min(self._limits.chunk_tokens, num_pool_tokens, self._spec.context_length)

        def say_size(size: int) -> None:
            self.socket.send(EngineLoading(f"kernels, with forwards of {size} tokens"))

        try:
            self.runner.warm_up(most_tokens, say_size)
            # Compiles for this page size; what it finds, in rows that nobody has written, means nothing.
            one_row = np.array([[0, 0, 1]], np.int32)  # one of ``PageRows``: page 0, from position 0, one row
            self.memory.wrong_items(one_row, self._limits.page_size)
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"forwards of up to {most_tokens} tokens do not fit beside the KV pool on {device}; "
                f"lower --chunked-prefill-size or --kv-pool-tokens ({error})"
            ) from error
        log.info("forwards of up to %d tokens warmed up in %.1f s", most_tokens, time.monotonic() - started)

    def _ready(self) -> EngineReady:
        return EngineReady(
            context_length=self._spec.context_length,
            # A prompt that exceeds the pool is refused by ``BootstrapChecks``, which names the exact bound.
            max_total_tokens_hisparse=self._spec.context_length,
            max_total_tokens_dense=self._spec.context_length,
            control_endpoint=f"{self._settings.reachable_host}:{self.control.port}",
            instance_id=self.instance_id,
            geometry=msgspec.msgpack.encode(self.geometry),
        )

    def close(self) -> None:
        """Fail every request, wait for copies under way, and a bounded time for writes in flight, and release
        sockets and memory."""
        super().close()
        now_secs = time.monotonic()
        for request in list(self.life.requests):
            self.life.fail(request, 503, f"room {request.room}: the prefill node is shutting down", now_secs)
        is_quiet = self.sender.close(CLOSE_TIMEOUT_SECS)
        is_quiet &= self._held_reads.close(CLOSE_TIMEOUT_SECS)
        for completion in self.sender.poll():
            self.life.batch_returned(completion, now_secs)
        self.life.pages.settle()  # copies use decode nodes' memory and this node's, which are closed below
        is_store_quiet = self._store_threads is None or self._store_threads.close(CLOSE_TIMEOUT_SECS)
        self.control.close()
        self._wakeup.close()
        if is_quiet:  # else a write may still use what would be closed
            self.lanes.close()
            self.transfer.close()
        if self._host_pages is not None and is_store_quiet:
            self._host_pages.close()
        log.info("stopped")

    # --- receive -------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        self.life.pages.poll()
        for completion in self._held_reads.poll():
            self.life.pages.decode_tier.parts.returned(completion)
        self.life.fail_overdue(self.sender.overdue(), now)
        for completion in self.sender.poll():
            self.life.batch_returned(completion, now)
        self._decode_events.answer_decided()
        self._decode_events.receive(now)
        self._receive_from_fronts(now)
        self._decode_events.fail_silent(now)
        self.life.fail_expired(now)

    def _flush(self) -> None:
        self.life.pages.settle()
        super()._flush()

    def _tell_peer(self, peer: Peer, message: ToDecode) -> bool:
        return self.control.send(self.peers.current(peer).identity, message)

    # --- step and statistics -------------------------------------------------------------------------

    def _step(self) -> bool:
        step = self.steps.advance(is_stopping=self._is_stopping)
        self._has_stopped = step.is_last
        if len(self.life):  # even if they only send: without a step the front would call the engine stalled
            self._num_steps += 1
        # While pages are on their way to or from the device, the loop looks again at once.
        return step.num_tokens > 0 or self.life.pages.num_copies > 0

    @property
    def _num_dropped(self) -> Counter[str]:
        return self.life.dropped + self.control.dropped

    def _stats(self, now: float) -> EngineStats:
        lanes = tuple(
            PeerLane(peer.session, lane.kind, lane.reason)
            for peer in self.peers
            if (lane := self.lanes.lane(peer.session)) is not None
        )
        return engine_stats(
            self.life, self._limits, num_peers=len(self.peers), lanes=lanes, step=self._num_steps
        )


def _num_aux_slots(settings: PrefillSettings) -> int:
    return AUX_SLOTS_PER_REQUEST * settings.max_running_requests
