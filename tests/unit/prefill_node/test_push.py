"""The pusher alone: what leaves with which layer, how often it plans, and how many batches it has pending.

The sender here copies at the moment of submission, so a layer that is submitted before it was written lands
as the poison that was there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import Holding, PoolKind, Stage
from hisparse_pd.prefill_node import push as push_module
from hisparse_pd.prefill_node.push import MAX_PENDING_BATCHES, ChunkPush, Pusher, SourceRegions
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.protocol.messages import Extent, RegionKind, Room
from hisparse_pd.transfer.plan import Descriptors, RegionView, RunPlan, join_descriptors, plan_writes
from hisparse_pd.transfer.sender import Ready, WriteBatch
from tests.slot_plans import expand_pages
from tests.unit.prefill_node.support import bootstrap_of, prompt

PAGE_SIZE = 4
NUM_SLOTS = 64
GROUPS = (0, 0, 1, 2, 2)
SHARING = (0, 0, 1, 2, 1, 3, 4, 0), (0, 1, 1, 1, 2, 2, 2, 2)
"""KV and index layers of a model in which three layers attend to other layers' KV."""
NUM_LAYERS, NUM_INDEX_LAYERS = len(GROUPS), 3
ITEM_BYTES, INDEX_BYTES = 6, 3
POISON = 0xEE


class CopyingSender:
    """A sender that copies at submission, and says that each room has ``num_waiting`` batches pending."""

    def __init__(self) -> None:
        self.batches: list[WriteBatch] = []
        self.num_waiting = 0
        self.num_waiting_bytes = 0

    def submit(self, session: str, batch: WriteBatch) -> None:
        assert session == "host:1"
        self.batches.append(batch)
        writes = whole(batch)
        assert batch.num_bytes == writes.num_bytes
        for src, dst, length in zip(*(column.tolist() for column in writes), strict=True):
            ctypes.memmove(dst, src, length)

    def num_pending(self, room: Room) -> int:
        return self.num_waiting

    def num_bytes_pending(self, session: str) -> int:
        return self.num_waiting_bytes

    @property
    def tags(self) -> list[str]:
        return [batch.tag for batch in self.batches]


def whole(batch: WriteBatch) -> Descriptors:
    return join_descriptors(list(batch.slices))


def poisoned(num_layers: int, item_bytes: int) -> np.ndarray:
    return np.full((num_layers, NUM_SLOTS, item_bytes), POISON, np.uint8)


def view(memory: np.ndarray) -> RegionView:
    return RegionView(memory.ctypes.data, memory.nbytes, *memory.shape)


@dataclass
class World:
    """One room between two pools, and a pusher that moves its bytes."""

    min_batch_bytes: int = 0
    of_layers: tuple[tuple[int, ...], tuple[int, ...]] = (tuple(range(NUM_LAYERS)), GROUPS)
    """The layers of ``kv`` and ``index`` that each of the model's layers reads."""

    def __post_init__(self) -> None:
        self.sender = CopyingSender()
        self.kv, self.index = poisoned(NUM_LAYERS, ITEM_BYTES), poisoned(NUM_INDEX_LAYERS, INDEX_BYTES)
        self.kv_dst, self.index_dst = np.zeros_like(self.kv), np.zeros_like(self.index)
        self.aux = np.full((1, 1, 8), 7, np.uint8)
        self.aux_dst = np.zeros_like(self.aux)
        source = SourceRegions(view(self.kv), view(self.index), view(self.aux), *self.of_layers)
        self.pusher = Pusher(
            self.sender,  # type: ignore[arg-type]
            source,
            PAGE_SIZE,
            self.min_batch_bytes,
        )
        self.request = self.room(Room(1), [3, 4, 9], Extent(10, 7), Extent(40, 5))

    def room(self, room: Room, page_ids: list[int], *extents: Extent) -> PrefillRequest:
        regions = {
            RegionKind.KV_HOST: view(self.kv_dst),
            RegionKind.INDEX: view(self.index_dst),
            RegionKind.AUX: view(self.aux_dst),
        }
        num_tokens = sum(extent.length for extent in extents)
        bootstrap = bootstrap_of(room, prompt(room, num_tokens + 1), kv=extents, index=extents[::-1])
        peer = Peer("node", "host:1", b"", PAGE_SIZE, regions, 0.0)
        request = PrefillRequest(peer, bootstrap, 0.0, page_ids=page_ids)
        request.holding = Holding(room, Stage.RUNNING, {PoolKind.AUX: (Extent(0, 1),)})
        return request

    def write(self, pushes: Sequence[ChunkPush], layer: int, ready: Ready | None = None) -> None:
        """Do what a forward does with a layer: store its rows, then tell the pusher."""
        for push in pushes:
            slots = expand_pages(push.request.page_ids, PAGE_SIZE, push.start, push.stop)
            for memory, of_layer in zip((self.kv, self.index), self.of_layers, strict=True):
                if (number := of_layer[layer]) not in of_layer[:layer]:
                    memory[number, slots] = np.arange(1, len(slots) + 1)[:, None] + 16 * number
        self.pusher.layer_written(pushes, layer, ready)

    def forward(self, *pushes: ChunkPush) -> None:
        for layer in range(len(self.of_layers[0])):
            self.write(pushes, layer)

    def assert_landed(self, push: ChunkPush) -> None:
        bootstrap = push.request.bootstrap
        src = expand_pages(push.request.page_ids, PAGE_SIZE, push.start, push.stop)
        for source, target, extents in (
            (self.kv, self.kv_dst, bootstrap.kv_extents),
            (self.index, self.index_dst, bootstrap.index_extents),
        ):
            dst = extents_to_slots(extents)[push.start : push.stop]
            assert not (source[:, src] == POISON).any()
            np.testing.assert_array_equal(target[:, dst], source[:, src])


def layers_of(tags: Sequence[str]) -> list[str]:
    return [tag.partition(" of layers ")[2] for tag in tags]


@pytest.mark.I1
@pytest.mark.parametrize(
    ("layers_per_batch", "layers"),
    [
        (1, ["[0, 1)", "[1, 2)", "[2, 3)", "[3, 4)", "[4, 5)"]),
        (2, ["[0, 2)", "[2, 4)", "[4, 5)"]),
        (5, ["[0, 5)"]),
        (61, ["[0, 5)"]),
    ],
)
def test_layers_leave_once_and_only_when_written(layers_per_batch: int, layers: list[str]) -> None:
    world = World(layers_per_batch * 9 * ITEM_BYTES)
    push = world.pusher.plan(world.request, 2, 11)
    world.forward(push)
    assert layers_of(world.sender.tags) == layers
    assert world.sender.tags[0].startswith("positions [2, 11) ")
    world.assert_landed(push)
    assert world.request.num_writes_pending == len(layers)
    num_bytes = sum(batch.num_bytes for batch in world.sender.batches)
    assert num_bytes == 9 * (NUM_LAYERS * ITEM_BYTES + NUM_INDEX_LAYERS * INDEX_BYTES), "something left twice"


def test_index_keys_leave_with_the_first_layer_of_their_group() -> None:
    world = World()
    world.forward(world.pusher.plan(world.request, 0, 4))
    landed = [
        {
            layer
            for layer in range(NUM_INDEX_LAYERS)
            for addr in whole(batch).dst_addrs.tolist()
            if 0 <= addr - world.index_dst[layer].ctypes.data < world.index_dst[layer].nbytes
        }
        for batch in world.sender.batches
    ]
    assert landed == [{0}, set(), {1}, {2}, set()]


@pytest.mark.I1
@pytest.mark.parametrize(
    ("layers_per_batch", "layers"),
    [(1, ["[0, 1)", "[1, 3)", "[3, 4)", "[4, 6)", "[6, 7)"]), (2, ["[0, 3)", "[3, 6)", "[6, 7)"])],
)
def test_layers_without_kv_of_their_own_send_none(layers_per_batch: int, layers: list[str]) -> None:
    """Their indexer keys leave with the next KV. Nothing leaves for the last layer, which has neither."""
    world = World(layers_per_batch * 9 * ITEM_BYTES, SHARING)
    push = world.pusher.plan(world.request, 2, 11)
    world.forward(push)
    assert layers_of(world.sender.tags) == layers
    world.assert_landed(push)
    num_bytes = sum(batch.num_bytes for batch in world.sender.batches)
    assert num_bytes == 9 * (NUM_LAYERS * ITEM_BYTES + NUM_INDEX_LAYERS * INDEX_BYTES), "something left twice"


def test_a_chunk_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_plans = 0

    def counted(*args: Any) -> RunPlan:
        nonlocal num_plans
        num_plans += 1
        return plan_writes(*args)

    monkeypatch.setattr(push_module, "plan_writes", counted)
    world = World()
    world.forward(world.pusher.plan(world.request, 0, 9))
    assert num_plans == 2, "KV and indexer keys, each once"


@pytest.mark.I1
@pytest.mark.I8
def test_layers_wait_for_a_slow_transport_and_then_leave_together() -> None:
    world = World()
    pushes = [world.pusher.plan(world.request, 0, 12)]
    world.write(pushes, 0)
    world.sender.num_waiting = MAX_PENDING_BATCHES
    world.write(pushes, 1)
    world.write(pushes, 2)
    assert layers_of(world.sender.tags) == ["[0, 1)"]
    world.sender.num_waiting = MAX_PENDING_BATCHES - 1
    world.write(pushes, 3)
    assert layers_of(world.sender.tags) == ["[0, 1)", "[1, 4)"]
    world.sender.num_waiting = MAX_PENDING_BATCHES
    world.write(pushes, 4)
    assert layers_of(world.sender.tags) == ["[0, 1)", "[1, 4)", "[4, 5)"], "the chunk's last layer waits"
    world.assert_landed(pushes[0])


@pytest.mark.I1
@pytest.mark.I8
def test_what_is_under_way_is_bounded_when_nothing_is_ever_written() -> None:
    world = World()
    submit = world.sender.submit

    def stuck(session: str, batch: WriteBatch) -> None:
        submit(session, batch)
        world.sender.num_waiting += 1

    world.sender.submit = stuck  # type: ignore[method-assign]
    world.request.num_cached_tokens = 2
    world.pusher.push_cached(world.request)
    for start in range(2, 12):
        world.forward(world.pusher.plan(world.request, start, start + 1))
    world.pusher.push_aux(world.request)
    num_chunks = 10
    assert len(world.sender.batches) <= MAX_PENDING_BATCHES + num_chunks + 2
    assert world.request.num_writes_pending == len(world.sender.batches)
    assert world.sender.tags[-1] == "aux record"


def test_prompts_of_one_forward_leave_side_by_side() -> None:
    world = World()
    other = world.room(Room(2), [1, 0], Extent(30, 8))
    pushes = [world.pusher.plan(world.request, 4, 12), world.pusher.plan(other, 0, 5)]
    world.forward(*pushes)
    assert [batch.room for batch in world.sender.batches] == [1, 2] * NUM_LAYERS
    for push in pushes:
        world.assert_landed(push)


def test_positions_known_already_leave_in_one_batch() -> None:
    world = World()
    world.request.num_cached_tokens = 8
    world.pusher.push_cached(world.request)
    assert world.sender.tags == ["positions [0, 8) of layers [0, 5)"]
    world.request.num_cached_tokens = 0
    world.pusher.push_cached(world.request)
    assert len(world.sender.batches) == 1


@pytest.mark.I1
def test_layers_out_of_order_are_refused_before_anything_wrong_leaves() -> None:
    world = World()
    pushes = [world.pusher.plan(world.request, 0, 12)]
    world.write(pushes, 1)
    for layer in (0, 1, NUM_LAYERS):
        with pytest.raises(ValueError, match=f"layer {layer} was written after 2 of 5 layers"):
            world.pusher.layer_written(pushes, layer)
    assert layers_of(world.sender.tags) == ["[0, 2)"]


def test_layers_that_are_written_together_leave_together() -> None:
    """As those of a CUDA graph."""
    world = World()
    pushes = [world.pusher.plan(world.request, 0, 12)]
    world.write(pushes, NUM_LAYERS - 1)
    assert layers_of(world.sender.tags) == ["[0, 5)"]


def test_what_to_wait_for_goes_with_the_batch_that_reads_it() -> None:
    class Event:
        def query(self) -> bool:
            raise AssertionError("the pusher does not ask")

        def synchronize(self) -> None:
            raise AssertionError("the pusher does not wait")

    world = World(2 * 12 * ITEM_BYTES)
    events = [Event() for _ in range(NUM_LAYERS)]
    pushes = [world.pusher.plan(world.request, 0, 12)]
    for layer, event in enumerate(events):
        world.write(pushes, layer, event)
    world.pusher.push_aux(world.request)
    assert [batch.ready for batch in world.sender.batches] == [events[1], events[3], events[4], None]
