"""The loop of an engine's process: ``EngineLoop``, from which both nodes derive their engines.

One turn is receive -> step -> report, all in one thread. ``start.py`` makes the engine and calls ``run``. The
derived class defines what it receives beside the fronts' messages, its step and its statistics. Before a step
all ranks of the node agree (``lockstep.py``).
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar

from msgspec.structs import replace
from torch import Tensor

from hisparse_pd.base.access import PeerList
from hisparse_pd.base.node_settings import NodeSettings
from hisparse_pd.base.process import parent_is_alive
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.engine.kv_events import KvEvents
from hisparse_pd.engine.lockstep import Lockstep
from hisparse_pd.engine.messages import (
    Abort,
    EngineReady,
    EngineStats,
    FlushCache,
    Flushed,
    GenerateGroup,
    ReleasePage,
    ReleaseQuarantine,
    Shutdown,
)
from hisparse_pd.engine.prefix_scrub import PrefixScrub
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.engine.sockets import EngineSocket
from hisparse_pd.protocol.channels import Heartbeats, load_control_keys
from hisparse_pd.protocol.kv_event_sockets import KvEventPublisher
from hisparse_pd.protocol.messages import DROP_REASONS
from hisparse_pd.protocol.polling import Poller, Wakeup
from hisparse_pd.transfer.engine import TransferEngine
from hisparse_pd.transfer.listeners import guarded_listeners
from hisparse_pd.transfer.transport import Transport

log = logging.getLogger(__name__)

IDLE_WAIT_SECS = 0.05
"""Longest wait for a message in one turn: statistics and timeouts are looked after at least this often."""
STATS_INTERVAL_SECS = 0.4
"""Time between two EngineStats, which fronts expect at least twice a second."""
IDLE_CHECK_INTERVAL_SECS = 5.0
"""Time between two checks of the pools' integrity while no request is live."""

SettingsT = TypeVar("SettingsT", bound=NodeSettings)


class LiveRecord(Protocol):
    """A node's record of its live requests or rooms and their slots; its length is their number."""

    set_aside: SetAside

    def __len__(self) -> int: ...

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless every slot is free or has its owner."""


class EngineLoop(ABC, Generic[SettingsT]):
    """Base of both nodes' engines.

    Raises TransferError, ControlKeyError, and StartError, as when an engine's pools do not fit.
    """

    role: ClassVar[str]

    def __init__(
        self,
        settings: SettingsT,
        spec: ModelSpec,
        model: DsaModel,
        socket: EngineSocket,
        transport: Transport,
        placement: Placement = ANYWHERE,
    ) -> None:
        self._settings = settings
        self._spec = spec
        self.socket = socket
        self._placement = placement
        self.geometry = spec.geometry(settings.page_size, settings.attention_split_tile_size)
        self._allowed = PeerList.parse(settings.allowed_peers)
        self._control_keys = load_control_keys(settings.control_key_file)
        self._heartbeats = Heartbeats.within(
            settings.heartbeat_interval_secs, settings.heartbeat_timeout_secs
        )
        # Mooncake itself lets any caller read and write the registered memory.
        with guarded_listeners(settings.reachable_host, self._allowed):
            self.transfer = TransferEngine(
                settings.reachable_host, transport, needs_network=settings.same_host_lane == "off"
            )
        self._kv_events: KvEvents | None = None
        if settings.kv_events.is_on:
            rank = 0 if model.ranks is None else model.ranks.rank
            publisher = KvEventPublisher(settings.kv_events.of_rank(rank))
            self._kv_events = KvEvents(publisher, rank, settings.page_size)
        self._lockstep = Lockstep(model.ranks)
        self._wakeup = Wakeup()  # the node's threads set it when they have something for the next turn
        self.poller = Poller()
        for channel in socket.channels:
            self.poller.register(channel)
        self.poller.register(self._wakeup)
        if model.ranks is not None:
            self.poller.register(model.ranks.bells)
        self._is_stopping = False
        """Whether all fronts have sent Shutdown."""
        self._has_stopped = False
        """Whether the loop ends: all ranks have agreed to stop, or the front that started this process is
        gone."""
        self._has_work = False
        """Whether the last step left something to do, so that the next turn does not wait."""
        self._next_stats_at = self._next_check_at = 0.0
        self._build(model)

    def _set_live_record(
        self,
        live: LiveRecord,
        prefixes: PrefixTree,
        kv: Mapping[PoolKind, Tensor],
        row_checks: Mapping[PoolKind, Tensor],
        stored_checks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Set the record that the loop checks while it is idle, and the prefixes that it flushes and
        verifies.

        ``kv``, ``row_checks``, ``stored_checks``: see ``PrefixScrub``.
        """
        self._live = live
        self._prefixes = prefixes
        prefixes.listener = self._kv_events
        page_size = self._settings.page_size
        self._scrub = PrefixScrub(prefixes, live.set_aside, page_size, kv, row_checks, stored_checks)

    def run(self) -> None:
        """Tell the fronts that this engine is ready, and serve until ``_has_stopped``."""
        transport = self.transfer.transport
        self.socket.send(
            replace(
                self._ready(),
                transfer_protocol=transport.protocol,
                transfer_devices=transport.devices,
                transfer_reason=transport.reason,
                numa_node=self._placement.node,
                numa_placement=str(self._placement),
            )
        )
        log.info("serving: session %s", self.transfer.session)
        while not self._has_stopped:
            self.turn()

    def turn(self, max_wait_secs: float = IDLE_WAIT_SECS) -> None:
        """Make one turn of the loop. Without work it waits for messages, ``max_wait_secs`` at most."""
        self.poller.wait(0.0 if self._has_work or self._lockstep.is_due else max_wait_secs)
        self._wakeup.clear()
        self._receive(time.monotonic())
        self._has_work = self._step()
        if self._has_stopped:
            return
        if self._kv_events is not None:
            self._kv_events.publish()
        is_idle = not self._live
        if is_idle and not self._has_work:
            self._scrub.verify_next()
        now = time.monotonic()
        if self._settings.debug_checks or (is_idle and now >= self._next_check_at):
            self._next_check_at = now + IDLE_CHECK_INTERVAL_SECS
            self._live.check_integrity()
        if now >= self._next_stats_at:
            self._next_stats_at = now + STATS_INTERVAL_SECS
            self._report(now)

    def _receive_from_fronts(self, now: float) -> None:
        """Handle the fronts' messages and the rings of other ranks."""
        for message in self.socket.receive():
            match message:
                case FlushCache():
                    self._flush()
                    self.socket.send(Flushed(message.request_id))
                case ReleasePage():
                    self._live.set_aside.give_back(message.pool, message.start)
                case Shutdown():
                    self._is_stopping = True
                case _:
                    self._on_request_message(message, now)
        self._lockstep.read_rings()

    def _flush(self) -> None:
        """Give up all prefixes that no request uses."""
        self._prefixes.flush()

    def _report(self, now: float) -> None:
        """Send statistics to the fronts. Stop if the process that started this one is gone."""
        stats = self._stats(now)
        stats.gauges["set_aside_tokens"] = float(self._live.set_aside.num_tokens)
        stats.gauges[self.transfer.transport.info_metric] = 1.0
        for lane in stats.lanes:
            stats.gauges[lane.info_metric] = 1.0
        for kind, count in self._live.set_aside.num_found.items():
            stats.counters[f'kv_rows_corrupt_total{{kind="{kind}"}}'] = float(count)
        if self._kv_events is not None:
            stats.counters.update(self._kv_events.counters())
        dropped = self._num_dropped
        for reason in {*DROP_REASONS, *dropped}:
            stats.counters[f'control_messages_dropped_total{{reason="{reason}"}}'] = float(dropped[reason])
        self.socket.send(replace(stats, set_aside=self._live.set_aside.shown()))
        if not parent_is_alive():
            log.error("the front process is gone, leaving")
            # Without agreement: ranks of this machine see the same, and those of others lose the connection
            # to a front or to these ranks, which ends them.
            self._has_stopped = True

    def _on_request_message(self, message: GenerateGroup | Abort | ReleaseQuarantine, now: float) -> None:
        """Handle a message about requests or their landing zones, which only a decode node has."""

    # --- methods that each node defines ---------------------------------------------------------

    @staticmethod
    def with_host_sizes(
        settings: SettingsT, spec: ModelSpec, placement: Placement, machine: Machine
    ) -> SettingsT:
        """Return a rank's settings with those sizes that follow from free main memory, which is read now.
        Raises StartError where it is too little."""
        return settings

    @staticmethod
    @abstractmethod
    def registered_host_bytes(settings: SettingsT, spec: ModelSpec) -> int:
        """Return the main memory that a rank registers. Raises StartError for sizes that cannot work."""

    @staticmethod
    def other_host_bytes(settings: SettingsT, spec: ModelSpec) -> int:
        """Return the main memory that a rank takes beside this, and that no peer writes to."""
        return 0

    @abstractmethod
    def _build(self, model: DsaModel) -> None:
        """Make the node's parts: register its pools with ``transfer``, then call ``_set_live_record``."""

    @abstractmethod
    def close(self) -> None:
        """End what is still live, say so, and release sockets and memory. Calls this one first."""
        if self._kv_events is not None:
            self._kv_events.close()

    @abstractmethod
    def _ready(self) -> EngineReady:
        """Return what the node's fronts and peers need to know, without transport and placement."""

    @abstractmethod
    def _receive(self, now: float) -> None:
        """Handle all messages, with ``_receive_from_fronts``, and end what has waited for too long."""

    @abstractmethod
    def _step(self) -> bool:
        """Plan and make one step; set ``_has_stopped`` when all ranks are stopping.

        Returns whether the next turn has something to do even if no message comes.
        """

    @abstractmethod
    def _stats(self, now: float) -> EngineStats:
        """Return the node's own gauges and counters; ``_report`` adds those that both nodes have."""

    @property
    @abstractmethod
    def _num_dropped(self) -> Counter[str]:
        """The number of control messages of peers that had no effect, by reason."""
