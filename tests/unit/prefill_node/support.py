"""What the prefill engine's tests use: an engine in a thread, and decode nodes that want KV from it.

The parts of a decode node that meet the prefill node are real: control client, Mooncake engine, registered
memory.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import torch
import zmq

from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.core.memory.host import HostPool, allocate_host
from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.spec import ModelSpec, load_spec
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey
from hisparse_pd.engine import messages as engine_messages
from hisparse_pd.engine.messages import (
    EngineReady,
    EngineStats,
    FlushCache,
    Flushed,
    Shutdown,
    ToEngine,
    pack_token_ids,
)
from hisparse_pd.engine.sockets import EngineSocket
from hisparse_pd.kernels.row_check import row_checks_of
from hisparse_pd.prefill_node.compute import Computed, LayerWritten
from hisparse_pd.prefill_node.engine import PrefillEngine
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.request_life import PrefillLife
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.prefill_node.scheduler import Chunk
from hisparse_pd.protocol.channels import ControlClient
from hisparse_pd.protocol.messages import (
    PROTOCOL_VERSION,
    ROW_CHECK_BYTES,
    Bootstrap,
    Extent,
    Heartbeat,
    HeartbeatAck,
    HeldKv,
    Region,
    RegionKind,
    Register,
    Registered,
    Room,
    RoomDone,
)
from hisparse_pd.protocol.polling import Poller
from hisparse_pd.protocol.prompt_scores import WantedScores
from hisparse_pd.transfer.aux_record import AuxLayout, AuxRecord
from hisparse_pd.transfer.lane_host import LaneHost, SharedMemory
from hisparse_pd.transfer.sender import Ready, WriteBatch
from hisparse_pd.transfer.transport import TCP
from tests.slot_plans import expand_pages
from tests.unit.kept_engines import kept_engine, kept_engines
from tests.unit.prefilled import Pools, prefilled
from tests.waiting import WAIT_MS, WAIT_SECS, wait_until

T = TypeVar("T")


@lru_cache
def checkpoint(path: Path, num_draft_layers: int | None) -> tuple[ModelSpec, DsaModel]:
    spec = load_spec(path, num_draft_layers=num_draft_layers)
    return spec, load_model(path, spec)


@dataclass(frozen=True)
class Submission:
    """A batch that the sender got, with its source bytes at that moment."""

    batch: WriteBatch
    source: bytes

    @classmethod
    def now(cls, batch: WriteBatch) -> Submission:
        return cls(batch, cls.bytes_of(batch))

    @staticmethod
    def bytes_of(batch: WriteBatch) -> bytes:
        """Return the bytes at the source addresses now; the memory must still exist."""
        return b"".join(
            ctypes.string_at(addr, length)
            for writes in batch.slices
            for addr, length in zip(writes.src_addrs.tolist(), writes.lengths.tolist(), strict=True)
        )


class Listener:
    """Waits for messages, and keeps those that no test has asked for yet."""

    def __init__(self) -> None:
        self.inbox: list[Any] = []

    def hear(self, timeout_secs: float) -> None:
        raise NotImplementedError

    def expect(self, kind: type[T], which: Callable[[T], bool] = lambda _: True) -> T:
        """Wait for the first message of a kind and return it; other messages stay for later."""
        deadline = time.monotonic() + WAIT_SECS
        while True:
            for position, message in enumerate(self.inbox):
                if isinstance(message, kind) and which(message):
                    del self.inbox[position]
                    return message
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"no {kind.__name__} in {WAIT_SECS} s, only {self.inbox}"
            self.hear(min(remaining, 0.2))

    def forget(self) -> None:
        """Clear messages that earlier tests left."""
        self.hear(0)
        self.inbox.clear()


class EngineThread(Listener):
    """A real PrefillEngine that serves in a thread, and its front's end of the ipc socket.

    Tests replace ``before_run``, which is called with the batch before each forward, and ``after_layer``,
    which is called after the node's own hook for each written layer. Both may look, wait or raise.
    """

    def __init__(
        self, path: Path, ipc_path: Path, *, placement: Placement = ANYWHERE, **overrides: Any
    ) -> None:
        options: dict[str, Any] = {
            "page_size": 16,
            "chunked_prefill_size": 48,
            "kv_pool_tokens": 1024,
            "max_running_requests": 4,
            "num_threads": 1,
            "debug_checks": True,
            "heartbeat_interval_secs": 30.0,  # nobody is silent for being slow
        }
        super().__init__()
        self.settings = PrefillSettings(model_path=path, **{**options, **overrides})
        self.placement = placement
        self.spec, self.model = checkpoint(path, self.settings.num_draft_layers)
        self.before_run: Callable[[Sequence[tuple[PrefillRequest, Chunk]]], None] = lambda batch: None
        self.after_layer: Callable[[int], None] = lambda layer: None
        self.computed: dict[int, list[tuple[int, int]]] = {}
        """The chunks that were computed, by room."""
        self.page_ids: dict[int, list[int]] = {}
        """The pages of the prompt, by room."""
        self.submitted: dict[int, list[Submission]] = {}
        """What the sender got, in order, by room."""
        self.stats: EngineStats | None = None
        self._front: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._front.setsockopt(zmq.LINGER, 0)
        self._front.bind(f"ipc://{ipc_path}")
        self._endpoint = f"ipc://{ipc_path}"
        self._error: BaseException | None = None
        self._looks: deque[Callable[[], None]] = deque()
        """What the loop's thread calls once its turn is over."""
        self._thread = threading.Thread(target=self._serve, name="prefill engine")
        self._thread.start()
        self.ready = self.expect(EngineReady)

    def _serve(self) -> None:
        front = EngineSocket([self._endpoint])
        try:
            with kept_engines():
                self.engine = PrefillEngine(self.settings, self.spec, self.model, front, TCP, self.placement)
            run, submit = self.engine.runner.run, self.engine.sender.submit

            def observed(
                batch: Sequence[tuple[PrefillRequest, Chunk]],
                on_written: LayerWritten | None = None,
                meanwhile: Callable[[], None] = lambda: None,
            ) -> Computed:
                def layer_written(layer: int, ready: Ready | None) -> None:
                    if on_written is not None:
                        on_written(layer, ready)
                    self.after_layer(layer)

                for request, _ in batch:
                    self.page_ids[request.room] = list(request.page_ids)
                self.before_run(batch)
                result = run(batch, layer_written, meanwhile)
                for request, chunk in batch:
                    self.computed.setdefault(request.room, []).append((chunk.start, chunk.stop))
                return result

            def recorded(session: str, batch: WriteBatch) -> None:
                self.submitted.setdefault(batch.room, []).append(Submission.now(batch))
                submit(session, batch)

            turn = self.engine.turn

            def turn_and_show() -> None:
                turn()
                while self._looks:
                    self._looks.popleft()()

            self.engine.turn = turn_and_show  # type: ignore[method-assign, assignment]
            self.engine.runner.run = observed  # type: ignore[method-assign]
            self.engine.sender.submit = recorded  # type: ignore[method-assign]
            try:
                self.engine.run()
            finally:
                self.engine.close()
        except BaseException as error:
            self._error = error
            raise
        finally:
            front.close()

    @property
    def memory(self) -> PrefillMemory:
        return self.engine.memory

    @property
    def life(self) -> PrefillLife:
        return self.engine.life

    def has_room(self, room: int) -> bool:
        return self.between_turns(lambda: self.life.requests.get(Room(room))) is not None

    def between_turns(self, look: Callable[[], T]) -> T:
        """Return what ``look`` returns between two turns of the loop, whose thread calls it.

        A turn writes one thing after the other, and sends messages in between; here all of it is written. A
        test that keeps a turn from ending cannot look this way.
        """
        if threading.current_thread() is self._thread:
            return look()
        seen: Future[T] = Future()

        def show() -> None:
            try:
                seen.set_result(look())
            except BaseException as error:
                seen.set_exception(error)

        self._looks.append(show)
        self.engine._wakeup.set()
        deadline = time.monotonic() + WAIT_SECS
        while not wait_for_futures([seen], timeout=0.2).done:
            assert self._thread.is_alive(), f"the engine died: {self._error!r}"
            assert time.monotonic() < deadline, f"the turn is not over in {WAIT_SECS} s"
        return seen.result()

    def wait_until(self, condition: Callable[[], T], what: str) -> T:
        """Wait until ``condition`` is true between two turns, and return its value."""
        return wait_until(lambda: self.between_turns(condition), what)

    def counters(self) -> dict[str, float]:
        """Return what the engine's life has counted."""
        return self.between_turns(lambda: dict(self.life.counters))

    def settle(self) -> None:
        """Wait for the end of the turn, which may still write after its last message."""
        self.between_turns(lambda: None)

    def wait_until_silent_nodes_are_lost(self) -> None:
        """Let the time pass in which registered decode nodes may be silent, until all are lost."""

        def are_lost() -> bool:
            peers = list(self.engine.peers)
            for peer in peers:
                peer.last_heard_secs = -math.inf
            return not peers

        self.wait_until(are_lost, "silent nodes to be lost")

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: len(self.life.requests) == 0, "the rooms to end")

    def pause_until_message(self, chunk_start: int) -> threading.Event:
        """Make the engine pause before the forward of a chunk until a message arrives. Return an event that
        is set once it pauses."""
        has_paused = threading.Event()

        def wait(batch: Sequence[tuple[PrefillRequest, Chunk]]) -> None:
            if any(chunk.start == chunk_start for _, chunk in batch):
                has_paused.set()
                self.wait_for_message()

        self.before_run = wait
        return has_paused

    def wait_for_message(self) -> None:
        assert self.engine.control.socket.poll(WAIT_MS)

    @contextmanager
    def admission_paused(self) -> Iterator[None]:
        """Keep rooms from being admitted inside the block, while the loop goes on."""
        pusher = self.life.pusher
        pusher.may_start = lambda request, num_bytes_pending: False  # type: ignore[method-assign]
        try:
            yield
        finally:
            del pusher.may_start

    def send(self, message: ToEngine) -> None:
        self._front.send(engine_messages.encoder.encode(message))

    def flush(self) -> None:
        """Empty the cache of an idle engine, and wait for it: a Bootstrap that is sent afterwards on the
        control connection could overtake the front's message."""
        self.send(FlushCache("00"))
        self.expect(Flushed)
        assert self.num_cached_pages == 0

    def hear(self, timeout_secs: float) -> None:
        """Wait for a message, then take in all that have come. Statistics go to ``stats``."""
        assert self._error is None, f"the engine died: {self._error!r}"
        while self._front.poll(int(timeout_secs * 1000)):
            timeout_secs = 0.0
            message = engine_messages.from_engine_decoder.decode(self._front.recv())
            if isinstance(message, EngineStats):
                self.stats = message
            else:
                self.inbox.append(message)

    def next_stats(self) -> EngineStats:
        """Return statistics from after this call: the second that arrive, as the first may be older."""
        for _ in range(2):
            self.stats = None
            deadline = time.monotonic() + WAIT_SECS
            while self.stats is None:
                assert time.monotonic() < deadline, "the engine sends no statistics"
                self.hear(0.2)
        stats: EngineStats | None = self.stats
        assert stats is not None
        return stats

    def num_dropped(self, reason: str) -> int:
        return self.between_turns(lambda: (self.life.dropped + self.engine.control.dropped)[reason])

    @property
    def num_used_pages(self) -> int:
        """Pages that rooms use, cached ones included."""
        num_available = self.between_turns(lambda: self.life.pages.num_available_pages)
        return self.life.pages.pools.totals.device // self.settings.page_size - num_available

    @property
    def num_cached_pages(self) -> int:
        """Cached pages, in use or not."""
        return self.between_turns(lambda: self.life.pages.prefixes.num_tokens) // self.settings.page_size

    def assert_whole(self) -> None:
        """Assert that an engine without rooms has nothing in use."""

        def look() -> None:
            life = self.life
            life.check_integrity()
            assert life.pages.pools.free + life.pages.prefixes.unused == life.pages.pools.totals

        self.between_turns(look)

    def slots(self, room: int, num_tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return expand_pages(np.array(self.page_ids[room]), self.settings.page_size, 0, num_tokens)

    def close(self) -> None:
        if self._thread.is_alive():
            with suppress(zmq.Again):  # an engine that is ending may have closed its socket
                self._front.send(engine_messages.encoder.encode(Shutdown()), zmq.NOBLOCK)
        self._thread.join(WAIT_SECS)
        self._front.close()
        assert not self._thread.is_alive(), "the engine did not stop"
        assert self._error is None, f"the engine died: {self._error!r}"


class StuckTransport:
    """Makes writes wait for ``release``, and counts those that began."""

    def __init__(self, engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.started = threading.Event()
        self.num_started = 0
        self._write = engine.engine.transfer.write
        monkeypatch.setattr(engine.engine.transfer, "write", self.write)

    def write(self, *args: Any, **options: Any) -> None:
        self.num_started += 1
        self.started.set()
        assert self.release.wait(4 * WAIT_SECS)  # longer than anything that the test waits for
        self._write(*args, **options)


def bootstrap_of(
    room: int,
    tokens: Sequence[int],
    *,
    kv: tuple[Extent, ...] | None = None,
    index: tuple[Extent, ...] | None = None,
    aux_slot: int = 0,
    hisparse: bool = True,
    num_held_tokens: int = 0,
    num_resumed_tokens: int = 0,
    scores: WantedScores | None = None,
    root: PageKey = NO_ISOLATION,
    attempt: int = 0,
    held: HeldKv | None = None,
) -> Bootstrap:
    """Return a Bootstrap, whose landing zones start at slot 0 unless they are given."""
    num_landing = len(tokens) - 1 - num_held_tokens
    landing = (Extent(0, num_landing),) if num_landing > 0 else ()
    return Bootstrap(
        room,
        landing if kv is None else kv,
        landing if index is None else index,
        aux_slot,
        pack_token_ids(tokens),
        root,
        attempt=attempt,
        num_held_tokens=num_held_tokens,
        num_resumed_tokens=num_resumed_tokens,
        scores=scores,
        held=held,
        hisparse=hisparse,
    )


class ControlPeer(Listener):
    """A decode node's control connection, without memory behind it."""

    def __init__(self, engine: EngineThread) -> None:
        super().__init__()
        self.engine = engine
        self._connect()

    def reconnect(self) -> None:
        self.client.close()
        self._connect()

    def _connect(self) -> None:
        self.client = ControlClient(f"tcp://{self.engine.ready.control_endpoint}")
        self._poller = Poller()
        self._poller.register(self.client)

    def hear(self, timeout_secs: float) -> None:
        self._poller.wait(timeout_secs)
        self.inbox.extend(self.client.receive())

    def assert_nothing_more(self) -> None:
        """Assert that no other message came: an answered heartbeat proves that all earlier ones have."""
        self.heartbeat()
        asked = HeartbeatAck(
            0, self.engine.ready.instance_id
        )  # the engine asks whether a silent node is there
        others = [message for message in self.inbox if message != asked]
        assert others == [], others

    def heartbeat(self, seq: int = 1) -> HeartbeatAck:
        self.client.send(Heartbeat(seq))
        return self.expect(HeartbeatAck, lambda ack: ack.seq == seq)

    def bootstrap(self, room: int, tokens: Sequence[int], **changes: Any) -> Bootstrap:
        """Send a Bootstrap and return it."""
        message = bootstrap_of(room, tokens, **changes)
        self.client.send(message)
        return message

    def close(self) -> None:
        self.client.close()


class DecodePeer(ControlPeer):
    """A decode node: registered memory, a control connection, and landing zones that the test chooses.

    ``registration(lane=peer.lane_host.offer)`` lets the prefill node map all of its memory.
    """

    NUM_SLOTS = 1024
    NUM_AUX_SLOTS = 8

    def __init__(
        self,
        engine: EngineThread,
        node_id: str = "decode-0",
        page_size: int = 16,
        *,
        takes_drafts: bool = True,
    ) -> None:
        spec = engine.spec if takes_drafts else without_drafts(engine.spec)
        super().__init__(engine)
        self.node_id = node_id
        self.geometry = spec.geometry(page_size)
        self.layout = AuxLayout(spec.num_index_groups, spec.index_topk)
        self._pools: list[HostPool] = []
        self.kv_host = self._zeros(spec.num_kv_layers, self.NUM_SLOTS, spec.item_bytes)
        self.kv_device = self._zeros(spec.num_kv_layers, self.NUM_SLOTS, spec.item_bytes)
        self.index = self._zeros(spec.num_index_groups, self.NUM_SLOTS, spec.index_item_bytes)
        self.row_checks = self._zeros(spec.num_kv_layers, self.NUM_SLOTS, ROW_CHECK_BYTES)
        self.aux = self._zeros(self.NUM_AUX_SLOTS, self.layout.slot_bytes)
        self.lane_host = LaneHost(
            [
                SharedMemory(pool.tensor.data_ptr(), pool.num_bytes, pool.shared_fd)
                for pool in self._pools
                if pool.shared_fd is not None
            ],
        )
        self.transfer = kept_engine("127.0.0.1")
        for memory in (self.kv_host, self.kv_device, self.index, self.row_checks, self.aux):
            self.transfer.register(memory)

    def _zeros(self, *shape: int) -> torch.Tensor:
        self._pools.append(allocate_host(math.prod(shape), pinned=False, shared=True))
        return self._pools[-1].tensor.view(shape)

    def bootstrap_side_by_side(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, Bootstrap]:
        """Ask for several prompts, by room, each with a landing zone of its own. Returns their Bootstraps."""
        slots_of_one = self.NUM_SLOTS // len(prompts) // 16 * 16
        bootstraps = {}
        for place, (room, tokens) in enumerate(prompts.items()):
            landing = (Extent(slots_of_one * place, len(tokens) - 1),)
            bootstraps[room] = self.bootstrap(room, tokens, kv=landing, index=landing, aux_slot=place)
        return bootstraps

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(
            Region(kind, memory.data_ptr(), memory.nbytes, num_slots)
            for kind, memory, num_slots in (
                (RegionKind.KV_HOST, self.kv_host, self.NUM_SLOTS),
                (RegionKind.KV_DEVICE, self.kv_device, self.NUM_SLOTS),
                (RegionKind.INDEX, self.index, self.NUM_SLOTS),
                (RegionKind.ROW_CHECKS, self.row_checks, self.NUM_SLOTS),
                (RegionKind.AUX, self.aux, self.NUM_AUX_SLOTS),
            )
        )

    def registration(self, **changes: Any) -> Register:
        session = self.transfer.session
        register = Register(PROTOCOL_VERSION, self.node_id, session, self.geometry, self.regions)
        return msgspec.structs.replace(register, **changes)

    def forget(self) -> None:
        """Clear the memory and the messages that earlier tests left."""
        for memory in (self.kv_host, self.kv_device, self.index, self.row_checks, self.aux):
            memory.zero_()
        super().forget()

    def register(self, **changes: Any) -> Registered:
        self.client.send(self.registration(**changes))
        return self.expect(Registered)

    def aux_record(self, bootstrap: Bootstrap) -> AuxRecord:
        return self.layout.unpack(self.aux[bootstrap.aux_slot].numpy(), bootstrap.room)

    def assert_has(self, bootstrap: Bootstrap) -> None:
        """Assert that KV, indexer keys and row checks of the room are bitwise those of the prefill node's
        pools, and that the checks match the items."""
        num_tokens = bootstrap.num_computed_tokens
        src_slots = self.engine.slots(bootstrap.room, num_tokens)[bootstrap.num_held_tokens :]
        kv = self.kv_host if bootstrap.hisparse else self.kv_device
        assert self.engine.memory.row_checks is not None
        checks = self.engine.memory.row_checks[:, :, None].view(torch.uint8)
        for name, source, target, extents in (
            ("KV", self.engine.memory.kv, kv, bootstrap.kv_extents),
            ("indexer keys", self.engine.memory.index, self.index, bootstrap.index_extents),
            ("row checks", checks, self.row_checks, bootstrap.index_extents),
        ):
            slots = extents_to_slots(extents)[: len(src_slots)]
            sent, landed = source[: len(target), src_slots], target[:, slots]
            assert sent.any(dim=-1).all(), f"{name}: the source has items of zeros"
            differing = torch.nonzero(sent != landed)
            where = differing[:1].tolist()
            assert where == [], f"{name}: first difference at [layer, position, byte] {where}"
        first, num_landed = bootstrap.num_held_tokens, len(src_slots)
        kv_slots, check_slots = (
            torch.from_numpy(extents_to_slots(extents)[:num_landed])
            for extents in (bootstrap.kv_extents, bootstrap.index_extents)
        )
        expected = row_checks_of(kv, kv_slots, torch.arange(first, first + num_landed))
        assert torch.equal(self.row_checks.view(torch.int32)[:, check_slots, 0], expected)

    def close(self) -> None:
        super().close()
        self.lane_host.close()
        self.transfer.close()


def engine_thread(path: Path, ipc_path: Path, **overrides: Any) -> closing[EngineThread]:
    return closing(EngineThread(path, ipc_path, **overrides))


def decode_peer(
    engine: EngineThread, node_id: str = "decode-0", page_size: int = 16, *, takes_drafts: bool = True
) -> closing[DecodePeer]:
    return closing(DecodePeer(engine, node_id, page_size, takes_drafts=takes_drafts))


_rooms = itertools.count(1000)


def next_room() -> int:
    """Return a room that no other test of this process has."""
    return next(_rooms)


def prompt(seed: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (num_tokens,), generator=generator).tolist()


def without_drafts(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the same model on a node that runs no MTP layer."""
    groups = spec.index_group_of_layer[: spec.num_layers]
    return replace(spec, num_draft_layers=0, index_group_of_layer=groups)


def computed_alone(engine: EngineThread, tokens: Sequence[int]) -> Pools:
    """Return what one forward of the whole prompt leaves; nobody writes to it."""
    return _computed_alone(engine.settings.model_path, engine.settings.num_draft_layers, tuple(tokens))


@lru_cache(maxsize=256)
def _computed_alone(path: Path, num_draft_layers: int | None, tokens: tuple[int, ...]) -> Pools:
    return prefilled(*checkpoint(path, num_draft_layers), tokens)


def all_delivered(peer: DecodePeer, num_rooms: int = 1) -> dict[int, RoomDone]:
    """Wait until so many rooms are delivered. Return their messages by room."""
    return {done.room: done for done in (peer.expect(RoomDone) for _ in range(num_rooms))}


def deliver(
    engine: EngineThread, peer: DecodePeer, room: int, tokens: Sequence[int], **changes: Any
) -> RoomDone:
    """Deliver one room, and check what was sent and what arrived."""
    bootstrap = peer.bootstrap(room, tokens, **changes)
    done = peer.expect(RoomDone)
    assert done.room == room
    per_token = sum(len(pool) * pool.shape[2] for pool in (peer.kv_host, peer.index, peer.row_checks))
    num_sent = len(tokens) - 1 - bootstrap.num_held_tokens
    assert done.num_bytes == num_sent * per_token + peer.layout.slot_bytes
    engine.settle()
    assert done.times is not None
    assert min(done.times.queue_secs, done.times.prefill_secs, done.times.transfer_secs) > 0
    assert engine.computed[room][0][0] == done.num_cached_tokens
    assert engine.computed[room][-1][1] == len(tokens) - 1
    peer.assert_has(bootstrap)
    assert_hint(engine, peer, bootstrap, tokens)
    return done


def assert_hint(engine: EngineThread, peer: DecodePeer, bootstrap: Bootstrap, tokens: Sequence[int]) -> None:
    """Assert that the aux record has what the last computed token selected."""
    hint = peer.aux_record(bootstrap).hint
    assert hint is not None
    expected = computed_alone(engine, tokens).hint.tolist()
    for ours, theirs in zip(hint.tolist(), expected[: len(peer.index)], strict=True):
        assert set(ours) == set(theirs)
