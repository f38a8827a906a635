"""The decode engine's process: wires the parts together and turns the loop.

One turn is receive → plan → launch → commit: take in what the front and the prefill nodes sent, let the
scheduler decide, run one forward over the running batch, hand out its tokens. Everything here runs in one
thread; look-ups of prefill nodes and the transport's writes into the registered pools run beside it.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import assert_never

import torch

from decode_node.hot_buffers import HotBuffers
from decode_node.lifecycle import Lifecycle
from decode_node.memory import DecodeMemory, num_host_bytes
from decode_node.metrics import Metrics
from decode_node.peers import Peers
from decode_node.pools import Pools, SlotCounts, round_up
from decode_node.request import PeerAddress, Request, RequestState
from decode_node.rooms import Landing, Rooms
from decode_node.scheduler import Limits, plan_step
from model.dsa import DsaModel, load_model
from model.sampling import sample
from model.spec import ModelSpec, load_spec
from protocol.access import PeerList
from protocol.channels import EngineSocket, Poller, load_control_keys
from protocol.engine_messages import Abort, EngineReady, FlushCache, Generate, Shutdown, TokenLogprob
from protocol.process import die_with_parent, parent_is_alive, setup_logging
from protocol.settings import DecodeSettings
from transfer.engine import TransferEngine, quiet_mooncake_logs
from transfer.listeners import guarded_listeners
from transfer.transport import Transport, choose_transport

log = logging.getLogger(__name__)

IDLE_WAIT_SECS = 0.05
STATS_INTERVAL_SECS = 0.4
IDLE_CHECK_INTERVAL_SECS = 5.0
_AUX_SLOTS_PER_ROW = 2
"""More than one, because a quarantined room keeps its aux slot and frees its req_row."""


class DecodeSettingsError(ValueError):
    """Settings that do not go together with each other or with the model."""


def run_engine(settings: DecodeSettings, ipc_path: str) -> None:
    """The engine process: load everything, say EngineReady to the front, serve until it says Shutdown."""
    die_with_parent()
    setup_logging(settings.log_level, "decode-engine")
    quiet_mooncake_logs()
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    front = EngineSocket(ipc_path)
    try:
        spec = load_spec(
            settings.model_path,
            settings.dtype,
            settings.kv_cache_dtype,
            settings.context_length,
            device=settings.device,
        )
        transport = _transport(settings, spec)  # before the model is loaded, which may take minutes
        model = load_model(settings.model_path, spec, settings.device)
        engine = DecodeEngine(settings, spec, model, front, transport)
        try:
            engine.run()
        finally:
            engine.close()
    finally:
        front.close()


class DecodeEngine:
    """All parts of one decode node's engine. Raises DecodeSettingsError, TransferError."""

    def __init__(
        self,
        settings: DecodeSettings,
        spec: ModelSpec,
        model: DsaModel,
        front: EngineSocket,
        transport: Transport,
    ) -> None:
        self._settings = settings
        self._model = model
        self._spec = spec
        self._front = front
        self._metrics = Metrics()
        self._poller = Poller()
        self._poller.register(front)
        self.limits = _limits(settings, spec)
        self.rooms = Rooms(Pools(self.limits.totals, settings.page_size), settings.quarantine_secs)
        memory = DecodeMemory(spec, self.rooms.pools.totals, torch.device(settings.device))
        self.hot_buffers = HotBuffers(
            spec,
            memory,
            num_rows=settings.max_running_requests,
            max_capacity=min(settings.device_buffer_size, spec.context_length),
            page_size=settings.page_size,
        )
        allowed = PeerList.parse(settings.allowed_peers)
        with guarded_listeners(settings.reachable_host, allowed):
            self._transfer = TransferEngine(settings.reachable_host, transport)
        self.peers = Peers(
            node_id=f"decode-{uuid.uuid4().hex}",
            session=self._transfer.session,
            transfer_protocol=transport.protocol,
            geometry=spec.geometry(settings.page_size),
            regions=memory.register(self._transfer),
            heartbeat_interval_secs=settings.heartbeat_interval_secs,
            heartbeat_timeout_secs=settings.heartbeat_timeout_secs,
            poller=self._poller,
            keys=load_control_keys(settings.control_key_file),
            allowed=allowed,
        )
        self.lifecycle = Lifecycle(
            limits=self.limits,
            policy=settings.hisparse,
            room_timeout_secs=settings.room_timeout_secs,
            rooms=self.rooms,
            hot_buffers=self.hot_buffers,
            peers=self.peers,
            metrics=self._metrics,
            send=front.send,
        )
        self._step = 0
        self._is_stopping = False
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
            )
        )
        log.info("ready, session %s", self._transfer.session)
        while not self._is_stopping:
            self.turn()

    def turn(self, max_wait_secs: float = IDLE_WAIT_SECS) -> None:
        """One turn of the loop. Without work it waits for messages, ``max_wait_secs`` at most."""
        has_work = bool(self.rooms.select(RequestState.RUNNING))
        self._poller.wait(0.0 if has_work else max_wait_secs)
        now = time.monotonic()
        self._receive(now)
        self._plan(now)
        batch = sorted(self.rooms.select(RequestState.RUNNING), key=lambda request: request.admitted_seq)
        if batch:
            self._step += 1
            self._forward(batch)
        self._check(is_idle=not self.rooms)
        self._report(time.monotonic())

    def close(self) -> None:
        """End what is still live, say so, and leave."""
        now = time.monotonic()
        for request in self.rooms.all():
            self.lifecycle.fail(request, 503, "the decode node is shutting down", Landing.IN_FLIGHT, now)
        self.peers.close()
        self._transfer.close()

    # --- receive → plan → launch → commit ---------------------------------------------------------

    def _receive(self, now: float) -> None:
        for message in self._front.receive():
            match message:
                case Generate():
                    self.lifecycle.generate(message, now)
                case Abort():
                    self.lifecycle.abort(message.request_id, now)
                case FlushCache():
                    pass  # There is no cache on this side.
                case Shutdown():
                    self._is_stopping = True
                case _:
                    assert_never(message)
        for event in self.peers.poll(now, self._wanted_peers()):
            self.lifecycle.peer_event(event, now)
        self.lifecycle.expire(now)
        self.lifecycle.refresh_queue(now)

    def _plan(self, now: float) -> None:
        plan = plan_step(
            self.limits,
            self.rooms.pools.free,
            self.rooms.select(RequestState.RUNNING),
            self.rooms.select(RequestState.RETRACTED),
            self.rooms.select(RequestState.WAITING),
        )
        self.lifecycle.carry_out(plan, now)

    def _forward(self, batch: list[Request]) -> None:
        """One decode step. Whatever goes wrong in it ends the requests of this batch and nothing else."""
        try:
            token_ids, logprobs, errors = self._launch(batch)
        except Exception as error:
            log.exception("a decode step of %d requests failed", len(batch))
            for request in batch:
                message = f"the decode step failed: {type(error).__name__}: {error}"
                self.lifecycle.fail(request, 500, message, Landing.QUIET, time.monotonic())
            return
        now = time.monotonic()
        for request, token_id, logprob, wrong in zip(batch, token_ids, logprobs, errors, strict=True):
            if wrong:
                self.lifecycle.fail(request, 500, f"the hot buffer reported {wrong}", Landing.QUIET, now)
            else:
                self.lifecycle.emit(request, token_id, logprob, now)

    def _launch(self, batch: list[Request]) -> tuple[list[int], list[TokenLogprob | None], list[str]]:
        """Sampled tokens, their logprobs, and what the kernels found wrong, for each request of ``batch``."""
        step = self.hot_buffers.step(batch)
        device = self.hot_buffers.device
        newest = torch.tensor([request.output_token_ids[-1] for request in batch], device=device)
        logits = self._model.forward(newest, step.positions, step, torch.arange(len(batch), device=device))
        step.finish()
        token_ids, logprobs = sample(
            logits,
            [request.sampling for request in batch],
            [len(request.output_token_ids) for request in batch],
            self._spec.eos_token_ids,
        )
        for request, counters in zip(batch, step.counters(), strict=True):
            request.row_counters = counters
        return token_ids, logprobs, step.errors()

    # --- beside the work --------------------------------------------------------------------------

    def _wanted_peers(self) -> set[PeerAddress]:
        """Peers that somebody waits for: requests on their way, and slots that wait for quiet rooms."""
        requests = self.rooms.select(RequestState.CONNECTING, RequestState.WAITING, RequestState.LANDING)
        return {request.peer for request in requests} | {
            entry.peer for entry in self.rooms.quarantine if entry.is_unresolved
        }

    def _check(self, is_idle: bool) -> None:
        now = time.monotonic()
        if self._settings.debug_checks or (is_idle and now >= self._next_check_at):
            self._next_check_at = now + IDLE_CHECK_INTERVAL_SECS
            self.rooms.check_integrity()

    def _report(self, now: float) -> None:
        if now < self._next_stats_at:
            return
        self._next_stats_at = now + STATS_INTERVAL_SECS
        self._front.send(
            self._metrics.stats(
                self.rooms,
                swap_ins=self.hot_buffers.totals,
                bytes_per_miss=self.hot_buffers.bytes_per_miss,
                num_dropped=self.peers.num_dropped,
                num_peers=self.peers.num_registered,
                transfer_info=self._transfer.transport.info_metric,
                step=self._step,
                now=now,
            )
        )
        if not parent_is_alive():
            log.error("the front process is gone, leaving")
            self._is_stopping = True


def _transport(settings: DecodeSettings, spec: ModelSpec) -> Transport:
    """Raises TransferSetupError."""
    device = torch.device(settings.device)
    return choose_transport(
        settings.transfer_protocol,
        settings.ib_device,
        settings.reachable_host,
        num_host_bytes=num_host_bytes(spec, _limits(settings, spec).totals, device),
        uses_gpu=device.type == "cuda",
    )


def _limits(settings: DecodeSettings, spec: ModelSpec) -> Limits:
    """The sizes of all pools. Raises DecodeSettingsError when nothing could ever be served with them."""
    page_size = settings.page_size
    if settings.device_buffer_size <= spec.index_topk:
        raise DecodeSettingsError(
            f"device_buffer_size {settings.device_buffer_size}: a hot buffer holds the {spec.index_topk} "
            f"positions of a top-k and the newest token; give at least {spec.index_topk + 1}"
        )
    for name in ("device_pool_tokens", "index_pool_tokens"):
        num_tokens = getattr(settings, name)
        if 0 < num_tokens < page_size:
            raise DecodeSettingsError(f"{name} {num_tokens}: less than one page of {page_size} tokens")
    index_tokens = settings.index_pool_tokens or round_up(
        settings.host_pool_tokens + settings.device_pool_tokens, page_size
    )
    return Limits(
        totals=SlotCounts(
            host=settings.host_pool_tokens,
            device=settings.device_pool_tokens // page_size * page_size,
            index=index_tokens // page_size * page_size,
            aux=settings.max_running_requests * _AUX_SLOTS_PER_ROW,
            req_row=settings.max_running_requests,
        ),
        page_size=page_size,
        max_context=spec.context_length,
        index_topk=spec.index_topk,
        device_buffer_size=settings.device_buffer_size,
        auto_dense_margin=settings.auto_dense_margin,
    )
