"""A decode node and prefill nodes in one process, joined by a network and a transport in the test's hands.

Both engines are real, from their constructors on: loops, lifecycles, rooms, quarantine, pools, peers,
planners and memory. What is made up lies around them: the clock, the fronts, the forwards, the connections
and the writes, which really copy bytes, and check first to whom the bytes under them belong.

``World`` holds it all. Nothing happens in it but by a call; nothing in it is random.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind, Stage
from hisparse_pd.core.paging.prompt_keys import PageKey, page_keys, root_of
from hisparse_pd.decode_node import sizing
from hisparse_pd.decode_node.engine import DecodeEngine
from hisparse_pd.decode_node.memory import DecodeMemory
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.engine.messages import Generate, GenerateGroup, pack_token_ids
from hisparse_pd.prefill_node.engine import PrefillEngine
from hisparse_pd.protocol.bootstrap import BootstrapInfo, BootstrapLookupError
from hisparse_pd.protocol.messages import PROTOCOL_VERSION, RegionKind, Room
from hisparse_pd.transfer.lane import LaneReader
from hisparse_pd.transfer.transport import TCP
from tests.property.sim_network import Lookups, Network, SimClient, SimServer
from tests.property.sim_nodes import (
    PAGE_SIZE,
    SPEC,
    NoPoller,
    NoWakeup,
    SimDecodeRunner,
    SimFront,
    SimPromptRunner,
    SimRequestTables,
)
from tests.property.sim_transport import (
    Piece,
    SafetyViolation,
    SimLaneHost,
    SimLanes,
    SimSender,
    SimTransfer,
    WriteFate,
)

QUARANTINE_SECS = 15.0
LATE_SECS = 12.0
"""How long bytes of a failed write may sit in the transport: less than the quarantine, as in the product."""
ROOM_TIMEOUT_SECS = 20.0
NO_MODEL = SimpleNamespace(ranks=None)
SLICES_A_TURN = 4
"""A batch of these worlds has up to six."""
_SHARED: dict[str, Any] = {
    "model_path": Path("none"),
    "page_size": PAGE_SIZE,
    "heartbeat_interval_secs": 2.5,
    "room_timeout_secs": ROOM_TIMEOUT_SECS,
    "debug_checks": True,
}
DECODE = DecodeSettings(
    **_SHARED,
    quarantine_secs=QUARANTINE_SECS,
    device_buffer_size=8,
    host_pool_tokens=90,
    device_pool_tokens=48,
    max_running_requests=4,
    speculative_num_steps=2,
)
PREFILL = PrefillSettings(
    **_SHARED,
    kv_pool_tokens=18 * PAGE_SIZE,
    chunked_prefill_size=10,
    max_running_requests=3,
)


@dataclass
class DecodeNode:
    engine: DecodeEngine
    front: SimFront
    session: str
    lookups: Lookups
    memory: DecodeMemory
    clients: list[SimClient] = field(default_factory=list)

    def owners(self, kind: PoolKind) -> dict[int, tuple[Room, Stage]]:
        return {
            slot: (holding.room, holding.stage)
            for holding in self.engine.requests.pools.holdings
            for slot in extents_to_slots(holding[kind]).tolist()
        }


@dataclass
class PrefillNode:
    engine: PrefillEngine
    front: SimFront
    address: PeerAddress
    sender: SimSender
    server: SimServer
    instance_id: str
    lanes: SimLanes
    reads: SimSender
    is_stopped: bool = False
    """Whether it is stopped as by SIGSTOP: it neither answers nor ends, and later goes on where it was."""
    stopped_secs: float = 0.0


@dataclass(frozen=True)
class LateRead:
    """Bytes of a failed read on their way to a prefill node."""

    node: PrefillNode
    room: Room
    dst_addr: int
    content: bytes
    lands_until: float


_POOL_OF_REGION = {
    RegionKind.KV_HOST: PoolKind.HOST,
    RegionKind.KV_DEVICE: PoolKind.DEVICE,
    RegionKind.INDEX: PoolKind.INDEX,
    RegionKind.AUX: PoolKind.AUX,
}


class World:
    """``num_prefill`` prefill nodes, started, and a decode node. Call ``close`` in the end.

    ``num_shared``: the last of them write over shared memory, the others over the network.
    ``num_index_slots``: of the decode node's index pool; few let held prefixes move to main memory and back.
    """

    def __init__(self, num_prefill: int, num_shared: int = 0, num_index_slots: int = 0) -> None:
        self._num_index_slots = num_index_slots
        self.now = 1000.0
        self.network = Network()
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.roots: dict[str, PageKey] = {}
        """The root of each request's keys, by request id, as are the prompts."""
        self.forward_fails_at: int | None = None
        self.late: list[Piece] = []
        """Bytes of failed writes, and of writers that died, which sit in the transport."""
        self.late_reads: list[LateRead] = []
        """Bytes of failed reads, which sit in the transport."""
        self.num_landed = self.num_read = 0
        self._num_runs = 0
        self._patches = ExitStack()
        self._patch()
        self.addresses = [PeerAddress("prefill", 1 + number) for number in range(num_prefill)]
        self._shared = self.addresses[num_prefill - num_shared :]
        self.lane_host = SimLaneHost()
        """The decode node's lane host."""
        self.prefill: dict[PeerAddress, PrefillNode] = {}
        for address in self.addresses:
            self.start_prefill(address)
        self.decode = self._start_decode()

    def close(self) -> None:
        self._patches.close()

    # --- processes ----------------------------------------------------------------------------------------

    def _patch(self) -> None:
        clock = SimpleNamespace(monotonic=lambda: self.now)

        def look_up(host: str, port: int, *_: Any) -> BootstrapInfo:
            return self._look_up(PeerAddress(host, port))

        replaced: dict[str, dict[str, Any]] = {
            "hisparse_pd.decode_node.prefill_peers": {
                "ControlClient": lambda endpoint, *_: SimClient(self.network, endpoint),
                "Wakeup": NoWakeup,
            },
            "hisparse_pd.decode_node.discovery": {
                "CallThreads": lambda *_: self._lookups,
                "look_up": look_up,
            },
            "hisparse_pd.engine.loop": {
                "time": clock,
                "Poller": NoPoller,
                "TransferEngine": self._new_transfer,
                "guarded_listeners": lambda *_: nullcontext(),
                "Wakeup": NoWakeup,
            },
            "hisparse_pd.decode_node.engine": {
                "time": clock,
                "MAX_TURN_SECS": float("inf"),  # the turns in the time that passes at once are left out
                "RequestTables": lambda spec, memory, **_: SimRequestTables(
                    spec, memory, self.prompts, self.roots
                ),
                "make_runner": lambda settings, model, tables: SimDecodeRunner(tables),
                "LaneHost": self._new_lane_host,
            },
            "hisparse_pd.decode_node.step_line": {"time": clock},
            "hisparse_pd.prefill_node.prompt_steps": {"time": clock},
            "hisparse_pd.prefill_node.engine": {
                "time": clock,
                "PromptRunner": lambda model, memory, *_, arrivals: SimPromptRunner(
                    memory, lambda: self.forward_fails_at
                ),
                "Sender": lambda lanes, *_: SimSender(lambda: self.now, reads=isinstance(lanes, LaneReader)),
                "Lanes": self._new_lanes,
                "ControlServer": lambda host, port, *_: SimServer(self.network, port or self._next_port()),
            },
        }
        replaced["hisparse_pd.prefill_node.decode_tier"] = {
            "LEAST_SECS": 0.0  # forwards take no time here
        }
        replaced["hisparse_pd.prefill_node.peer_pauses"] = {"PAUSE_SECS": 1.0}
        replaced["hisparse_pd.prefill_node.read_quarantine"] = {"QUARANTINE_SECS": QUARANTINE_SECS}
        for module, names in replaced.items():
            self._patches.enter_context(patch.multiple(module, **names))

    def _next_port(self) -> int:
        self._num_runs += 1
        return 20_000 + self._num_runs

    def _new_transfer(self, *_: Any, **__: Any) -> SimTransfer:
        self._num_runs += 1
        return SimTransfer(f"127.0.0.1:{10_000 + self._num_runs}")

    def _new_lane_host(self, *_: Any, **__: Any) -> SimLaneHost:
        self.lane_host = SimLaneHost()
        return self.lane_host

    def _new_lanes(self, transfer: Any, protocol: str, instance_id: str, **_: Any) -> SimLanes:
        return SimLanes(instance_id, (lambda: self.lane_host) if self._starting in self._shared else None)

    def start_prefill(self, address: PeerAddress, control_port: int = 0) -> None:
        self._starting = address
        settings = PREFILL.model_copy(update={"control_port": control_port})
        engine = PrefillEngine(settings, SPEC, NO_MODEL, SimFront(), TCP)  # type: ignore[arg-type]
        engine.life.pusher.write_timeout_secs = 6.0
        engine.life.pusher.min_batch_bytes = 0  # so that layers of short prompts leave one by one
        parts: Any = engine  # of which some are stand-ins
        self.prefill[address] = PrefillNode(
            engine,
            parts.socket,
            address,
            parts.sender,
            parts.control,
            parts.instance_id,
            parts.lanes,
            parts._held_reads,
        )

    def kill_prefill(self, address: PeerAddress) -> PrefillNode:
        """What its writes had read stays in the transport for a while; nothing of those to shared memory."""
        node = self.prefill.pop(address)
        node.lanes.die()
        for room in node.sender.in_flight if not node.lanes.is_shared else ():
            self._leave_in_transport(node.sender.pieces(room))
        self.late = [piece.in_socket() if piece.sender is node.sender else piece for piece in self.late]
        self.late_reads = [read for read in self.late_reads if read.node is not node]
        self.network.server_died(node.server)
        return node

    def _start_decode(self) -> DecodeNode:
        front = SimFront()
        self._lookups = Lookups()
        with patch.object(sizing, "GROWTH_PAGES", 1), patch.object(sizing, "MAX_TAIL_STEPS", 1):
            settings = DECODE.model_copy(update={"index_pool_tokens": self._num_index_slots})
            engine = DecodeEngine(settings, SPEC, NO_MODEL, front, TCP)  # type: ignore[arg-type]
        return DecodeNode(engine, front, engine.peers.session, self._lookups, engine.memory)

    def restart_decode(self) -> None:
        for client in list(self.network.clients):
            self.network.client_died(client)
        self.decode = self._start_decode()

    def _look_up(self, address: PeerAddress) -> BootstrapInfo:
        node = self.prefill.get(address)
        if node is None:
            raise BootstrapLookupError("connection refused", nobody_listens=True)
        if node.is_stopped:
            raise BootstrapLookupError("no answer")
        geometry = SPEC.geometry(PAGE_SIZE)
        return BootstrapInfo(
            PROTOCOL_VERSION, node.instance_id, "127.0.0.1", node.server.port, geometry, False
        )

    # --- what goes on -------------------------------------------------------------------------------------

    def turn_prefill(self, node: PrefillNode) -> None:
        if node.is_stopped:
            return
        node.engine.turn()
        node.engine.life.check_integrity()
        node.sender.start()
        node.reads.start()

    def turn_decode(self, *, answers_lookups: bool = True) -> None:
        if answers_lookups:
            self.decode.lookups.answer()
        self.decode.engine.turn()
        self.decode.engine.requests.check_integrity()

    def work(self, fates: Iterator[WriteFate], *, decode_first: bool = False) -> None:
        """Everything moves on: messages arrive, nodes turn, and writes have the next of ``fates``."""
        self.network.deliver_all()
        if decode_first:
            self.turn_decode()
            self.network.deliver_all()
        for node in self.prefill.values():
            self.turn_prefill(node)
            if not node.is_stopped:
                self._write(node, fates)
        if not decode_first:
            self.network.deliver_all()
            self.turn_decode()

    def _write(self, node: PrefillNode, fates: Iterator[WriteFate]) -> None:
        """What the transport gets done in a turn: some slices, or as far as a slow one."""
        for _ in range(SLICES_A_TURN):
            for room in list(node.sender.in_flight):
                fate = next(fates)
                self.finish_write(node, room, fate)
                if fate is WriteFate.SLOW:
                    return
            for room in list(node.reads.in_flight):
                fate = next(fates)
                self.finish_read(node, room, fate)
                if fate is WriteFate.SLOW:
                    return

    def finish_read(self, node: PrefillNode, room: Room, fate: WriteFate) -> None:
        """Ranges of a failed read may land late, but not from shared memory."""
        session, moves = node.reads.moves(room)
        if session != self.decode.session:  # that decode node is dead
            fate, moves = WriteFate.FAILED, []
        num_landed = {WriteFate.WRITTEN: len(moves), WriteFate.FAILED: 0}.get(fate, 1)
        for src_addr, dst_addr, length in moves[:num_landed]:
            self._land_read(node, room, dst_addr, ctypes.string_at(src_addr, length))
        if fate is WriteFate.SLOW:
            return
        is_shared = node.lanes.is_shared
        if fate is not WriteFate.WRITTEN and not is_shared:
            self.late_reads += [
                LateRead(node, room, dst_addr, ctypes.string_at(src_addr, length), self.now + LATE_SECS)
                for src_addr, dst_addr, length in moves[num_landed:]
            ]
        node.reads.finish(room, ok=fate is WriteFate.WRITTEN, lands_late=not is_shared)
        node.reads.start()

    def _land_read(self, node: PrefillNode, room: Room, dst_addr: int, content: bytes) -> None:
        """Raises SafetyViolation unless the slots under the bytes are kept for the read."""
        memory = node.engine.memory
        pool = next(pool for pool in memory.sent if 0 <= dst_addr - pool.data_ptr() < pool.nbytes)
        first = (dst_addr - pool.data_ptr()) // pool.shape[2] % pool.shape[1]
        owners = {
            slot: (holding.room, holding.stage)
            for holding in node.engine.life.pages.pools.holdings
            for slot in extents_to_slots(holding[PoolKind.DEVICE]).tolist()
        }
        for slot in range(first, first + len(content) // pool.shape[2]):
            owner, stage = owners.get(slot, (None, "free"))
            if owner != room or stage not in (Stage.LANDING, Stage.QUARANTINED):
                raise SafetyViolation(f"a read of room {room} landed in slot {slot}, {stage} of room {owner}")
        ctypes.memmove(dst_addr, content, len(content))
        self.num_read += 1

    def finish_write(self, node: PrefillNode, room: Room, fate: WriteFate) -> None:
        """Descriptors of a failed write may land late, but not in shared memory."""
        pieces = node.sender.pieces(room)
        is_shared = node.lanes.is_shared
        if pieces[0].session != self.decode.session and fate is not WriteFate.FAILED_MIDWAY:
            fate = WriteFate.FAILED  # that decode node is dead
        match fate:
            case WriteFate.WRITTEN:
                for piece in pieces:
                    self.land(piece)
                node.sender.finish(room, ok=True)
            case WriteFate.SLOW:
                self.land(pieces[0])
            case WriteFate.FAILED | WriteFate.FAILED_MIDWAY:
                num_landed = int(fate is WriteFate.FAILED_MIDWAY)
                for piece in pieces[:num_landed]:
                    self.land(piece)
                if not is_shared:
                    self._leave_in_transport(pieces[num_landed:])
                node.sender.finish(room, ok=False, lands_late=not is_shared)
        node.sender.start()

    def _leave_in_transport(self, pieces: Sequence[Piece]) -> None:
        self.late += [replace(piece, lands_until=self.now + LATE_SECS) for piece in pieces]

    def pass_time(self, secs: float, *, late_bytes_land: bool) -> None:
        """Whatever sits in the transport lands at the last moment, or is lost."""
        expired = [piece for piece in self.late if piece.lands_until < self.now + secs]
        self.late = [piece for piece in self.late if piece.lands_until >= self.now + secs]
        if late_bytes_land:
            for piece in expired:
                self.land(piece)
        for read in [read for read in self.late_reads if read.lands_until < self.now + secs]:
            self.late_reads.remove(read)
            if late_bytes_land:
                self._land_read(read.node, read.room, read.dst_addr, read.content)
        self.now += secs
        for node in self.prefill.values():
            node.stopped_secs = node.stopped_secs + secs if node.is_stopped else 0.0
            if node.stopped_secs >= PREFILL.heartbeat_timeout_secs:
                self.network.silence(node.server)

    def land(self, piece: Piece) -> None:
        """Raises SafetyViolation unless the slots under the bytes are kept for the room of the write."""
        if piece.session != self.decode.session:
            return
        for region in self.decode.engine.peers.regions:
            offset = piece.dst_addr - region.base_addr
            if 0 <= offset < region.num_bytes:
                break
        else:
            raise SafetyViolation(f"room {piece.room}: a write outside of all regions")
        num_layers = {RegionKind.INDEX: SPEC.num_index_layers, RegionKind.AUX: 1}.get(
            region.kind, SPEC.num_layers
        )
        item_bytes = region.num_bytes // region.num_slots // num_layers
        first = offset // item_bytes % region.num_slots
        owners = self.decode.owners(_POOL_OF_REGION[region.kind])
        for slot in range(first, first + len(piece.content) // item_bytes):
            room, stage = owners.get(slot, (None, "free"))
            if room != piece.room or stage not in (Stage.LANDING, Stage.QUARANTINED):
                raise SafetyViolation(
                    f"bytes of room {piece.room} landed in {region.kind} slot {slot}, which is "
                    f"{'free' if room is None else f'{stage} and of room {room}'}"
                )
        content = piece.read()
        ctypes.memmove(piece.dst_addr, content, len(content))
        self.num_landed += 1

    def generate(self, prompt: tuple[int, ...], *samples: Generate, salt: str = "") -> GenerateGroup:
        """Return what the decode node's front sends for ``samples`` of a prompt."""
        root = root_of(salt or None)
        for sample in samples:
            self.prompts[sample.request_id], self.roots[sample.request_id] = prompt, root
        packed = pack_token_ids(prompt)
        return GenerateGroup(samples, root, packed, tuple(page_keys(root, packed, PAGE_SIZE)))
