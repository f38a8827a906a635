"""Prompts that this node has nowhere come back from the decode node that holds them.

Engines and decode nodes are real, on CPUs; a decode node holds what it got of an earlier prompt. Reads that
take any time are those of ``tests/property/test_decode_tier.py``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from hisparse_pd.core.model.layer_arrivals import layers_of_part
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.core.paging.extents import extents_to_pages, extents_to_slots, slice_extents
from hisparse_pd.core.paging.pools import PoolKind, Stage
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, page_keys, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.prefill_node import decode_tier
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS
from hisparse_pd.prefill_node.read_quarantine import QUARANTINE_SECS
from hisparse_pd.protocol.messages import (
    AbortRoom,
    Bootstrap,
    Extent,
    FetchedTokens,
    HeldKv,
    RoomDone,
    RoomFailed,
    RoomQuiet,
)
from hisparse_pd.transfer.errors import TransferError
from hisparse_pd.transfer.lane_copy import copy_ranges
from hisparse_pd.transfer.plan import MOST_LONG, Descriptors
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    all_delivered,
    assert_hint,
    computed_alone,
    decode_peer,
    engine_thread,
    next_room,
    prompt,
)
from tests.waiting import WAIT_SECS
from tools.checkpoints.make_tiny import write_checkpoint

pytestmark = [pytest.mark.I1, pytest.mark.I5, pytest.mark.I9]

PAGE = 16
SCATTERED = (Extent(64, 40), Extent(0, 8), Extent(512, 112))
"""Slots of a landing zone, whose parts do not begin where pages of the prefill node do."""


@pytest.fixture(autouse=True)
def eager(engine: EngineThread) -> Iterator[None]:
    """Nothing is computed too soon to be read, or because a busy machine reads slowly, and earlier errors are
    forgotten."""
    engine.life.pages.decode_tier.pauses._until.clear()
    with patch.multiple(decode_tier, LEAST_SECS=0.0, LEAST_WAIT_SECS=decode_tier.LONGEST_WAIT_SECS):
        yield


@pytest.fixture(params=["tcp", "shm"])
def either(engine: EngineThread, request: pytest.FixtureRequest) -> Iterator[DecodePeer]:
    """A decode node that is read from over the network, or over shared memory."""
    with decode_peer(engine, f"decode-{request.param}") as peer:
        lane = peer.lane_host.offer if request.param == "shm" else None
        assert peer.register(lane=lane).lane == request.param
        yield peer
        engine.wait_until_idle()


def land(peer: DecodePeer, tokens: Sequence[int], *, keeps: bool = True, **changes: Any) -> Bootstrap:
    """Let a prompt land at the decode node, which then holds it, unless it ``keeps`` another one. Returns its
    Bootstrap."""
    num_landing = len(tokens) - 1
    kv = slice_extents(SCATTERED, 0, num_landing) if keeps else (Extent(200, num_landing),)
    index = Extent(40 * PAGE if keeps else 0, -(-num_landing // PAGE) * PAGE)
    message = peer.bootstrap(next_room(), tokens, kv=kv, index=(index,), **changes)
    assert peer.expect(RoomDone).room == message.room
    return message


def held_elsewhere(
    engine: EngineThread, peer: DecodePeer, tokens: Sequence[int], **changes: Any
) -> Bootstrap:
    """Let a prompt land, and the prefill node forget it."""
    before = land(peer, tokens, **changes)
    engine.wait_until_idle()
    engine.flush()
    return before


def next_turn(
    peer: DecodePeer, before: Bootstrap, tokens: Sequence[int], num_held: int, **changes: Any
) -> Bootstrap:
    """Send the Bootstrap of a prompt whose first tokens the decode node holds of ``before``."""
    num_landing = len(tokens) - 1 - num_held
    return peer.bootstrap(
        next_room(),
        tokens,
        kv=(Extent(800, num_landing),),
        index=(Extent(912, num_landing),),
        num_held_tokens=num_held,
        **{
            "hisparse": before.hisparse,
            "held": HeldKv(
                slice_extents(before.kv_extents, 0, num_held),
                slice_extents(before.index_extents, 0, num_held),
                num_held,
            ),
            **changes,
        },
    )


def deliver_turn(
    engine: EngineThread,
    peer: DecodePeer,
    before: Bootstrap,
    tokens: Sequence[int],
    num_held: int,
    **changes: Any,
) -> RoomDone:
    """Deliver a next turn, and compare all that is in the node's pools then with what is computed alone."""
    message = next_turn(peer, before, tokens, num_held, **changes)
    done = peer.expect(RoomDone)
    assert done.room == message.room
    assert engine.computed[message.room][0][0] == done.num_cached_tokens
    peer.assert_has(message)
    assert_hint(engine, peer, message, tokens)
    expected = computed_alone(engine, tokens)
    slots = engine.slots(message.room, len(tokens) - 1)
    for name, pool, other in (
        ("KV", engine.memory.kv, expected.kv),
        ("indexer keys", engine.memory.index, expected.index),
    ):
        assert torch.equal(pool[:, slots], other[:, : len(slots)]), name
    return done


@pytest.mark.parametrize(
    ("either", "hisparse"),
    [
        # Each transport and each mode; in `make test-full` any two meet.
        *(("tcp", True), ("shm", False)),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in (("tcp", False), ("shm", True))),
    ],
    indirect=["either"],
)
def test_what_the_decode_node_holds_is_not_computed_again(
    engine: EngineThread, either: DecodePeer, hisparse: bool
) -> None:
    tokens = prompt(1, 140)
    before = held_elsewhere(engine, either, tokens, hisparse=hisparse)
    tier = engine.life.pages.decode_tier
    num_read, num_bytes = tier.counts.num_tokens, tier.counts.num_bytes
    done = deliver_turn(engine, either, before, tokens[:132] + prompt(2, 30), num_held=128)
    assert (done.num_cached_tokens, done.fetched) == (128, FetchedTokens(decode=128))
    assert tier.counts.num_tokens == num_read + 128
    per_token = sum(len(pool) * pool.shape[2] for pool in (either.kv_host, either.index, either.row_checks))
    assert engine.life.pages.decode_tier.counts.num_bytes == num_bytes + 128 * per_token
    done = deliver_turn(engine, either, before, tokens[:132] + prompt(3, 30), num_held=128)
    assert (done.num_cached_tokens, done.fetched) == (128, FetchedTokens()), "it is on the device now"


class CopiedByGpu:
    """Stands in for the memory of a decode node that a GPU reaches, and for its stream; copies are over at
    once."""

    num_parts = 3
    stream = SideStream(torch.device("cpu"))

    def __init__(self) -> None:
        self.num_pinned = 0
        self.recorded: list[int] = []
        """By part, the ranges that were read before it was recorded."""
        self.most_calls = 0
        self._num_read = 0

    def pinned(self, session: str) -> CopiedByGpu:
        self.num_pinned += 1
        return self

    def unpin(self) -> None:
        self.num_pinned -= 1

    def enqueue_reads(self, reads: Descriptors, most_long: int) -> None:
        copy_ranges(*reads)
        self.most_calls += most_long
        self._num_read += reads.lengths.size

    def layers(self, part: int, num_layers: int) -> range:
        return layers_of_part(part, self.num_parts, num_layers)

    def record(self, part: int) -> None:
        assert part == len(self.recorded)
        self.recorded.append(self._num_read)


@pytest.mark.parametrize("hisparse", [False, True])
def test_a_gpu_copies_what_the_decode_node_holds_layer_by_layer(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch, hisparse: bool
) -> None:
    tokens = prompt(18, 140)
    before = held_elsewhere(engine, peer, tokens, hisparse=hisparse)
    tier, gpu = engine.life.pages.decode_tier, CopiedByGpu()
    of_gpu: Any = {"pinned": gpu.pinned, "arrivals": gpu}
    monkeypatch.setattr(tier, "_memory", tier._memory._replace(**of_gpu))
    num_read, num_bytes = tier.counts.num_tokens, tier.counts.num_bytes
    done = deliver_turn(engine, peer, before, tokens[:132] + prompt(19, 30), num_held=128)
    assert (done.num_cached_tokens, done.fetched) == (128, FetchedTokens(decode=128))
    assert tier.counts.num_tokens == num_read + 128
    per_token = sum(len(pool) * pool.shape[2] for pool in (peer.kv_host, peer.index, peer.row_checks))
    assert tier.counts.num_bytes == num_bytes + 128 * per_token
    assert sorted(set(gpu.recorded)) == gpu.recorded, "each part has layers"
    assert len(gpu.recorded) == gpu.num_parts
    assert 0 < gpu.most_calls <= MOST_LONG
    assert gpu.num_pinned == 0


class SlowCopy:
    """The event behind a copy that is over once somebody waits for it."""

    is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


class SlowStream(SideStream):
    """A stream on which copies are over once somebody waits for them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.copies: list[SlowCopy] = []

    def record(self) -> torch.cuda.Event:
        self.copies.append(SlowCopy())
        return cast(torch.cuda.Event, self.copies[-1])


def test_an_engine_that_closes_waits_for_copies_from_a_decode_node(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only then is the decode node's memory unmapped. The request of the copy has failed before."""

    def out_of_memory(batch: object) -> None:
        raise torch.OutOfMemoryError("4 GiB wanted")

    with engine_thread(tiny, tmp_path / "front") as engine, decode_peer(engine) as peer:
        assert peer.register(lane=peer.lane_host.offer).lane == "shm"
        mapping = engine.engine.lanes.pairs[peer.transfer.session].mapping
        assert mapping is not None
        tokens, gpu = prompt(18, 140), CopiedByGpu()
        before = held_elsewhere(engine, peer, tokens)
        monkeypatch.setattr(gpu, "stream", stream := SlowStream())
        monkeypatch.setattr(gpu, "unpin", mapping.unpin)

        def pinned(session: str) -> CopiedByGpu:
            mapping.pin()
            return gpu

        tier = engine.life.pages.decode_tier
        of_gpu: Any = {"pinned": pinned, "arrivals": gpu}
        monkeypatch.setattr(tier, "_memory", tier._memory._replace(**of_gpu))
        engine.before_run = out_of_memory
        next_turn(peer, before, tokens[:132] + prompt(19, 30), num_held=128)
        assert "4 GiB wanted" in peer.expect(RoomFailed).error
        (copy,) = stream.copies
        assert not copy.is_over
        engine.close()
        assert copy.is_over
        assert all(mapped.closed for mapped in mapping.maps)


def test_requests_share_pages_under_their_own_root_only(engine: EngineThread, peer: DecodePeer) -> None:
    tokens, root = prompt(4, 140), root_of("salt")
    before = held_elsewhere(engine, peer, tokens, root=root)
    longer = tokens[:132] + prompt(5, 30)
    assert deliver_turn(engine, peer, before, longer, num_held=128, root=root).fetched.decode == 128
    prefixes = engine.life.pages.prefixes
    with_root, without = (page_keys(each, pack_token_ids(longer), PAGE) for each in (root, NO_ISOLATION))
    assert prefixes.find(with_root, CACHE_POOLS) is not None
    assert prefixes.find(without, CACHE_POOLS) is None


def test_pages_that_are_held_in_part_are_computed(engine: EngineThread) -> None:
    """The decode node's pages are of 24 tokens, of which it holds five; this node's are of 16."""
    with decode_peer(engine, "pages of 24", page_size=24) as peer:
        peer.register()
        tokens = prompt(6, 140)
        before = held_elsewhere(engine, peer, tokens)
        done = deliver_turn(engine, peer, before, tokens[:132] + prompt(7, 60), num_held=120)
        assert (done.num_cached_tokens, done.fetched.decode) == (112, 112)
        engine.wait_until_idle()


def test_only_what_is_missing_is_read(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(8, 150)
    before = held_elsewhere(engine, peer, tokens)
    land(peer, tokens[:70], keeps=False)
    done = deliver_turn(engine, peer, before, tokens[:140], num_held=128)
    assert (done.num_cached_tokens, done.fetched.decode) == (128, 128 - 64)


def test_parts_arrive_one_after_the_other(engine: EngineThread, either: DecodePeer) -> None:
    tier = engine.life.pages.decode_tier
    tokens = prompt(9, 150)
    before = held_elsewhere(engine, either, tokens)
    with patch.object(tier.parts, "_memory", tier.parts._memory._replace(part_bytes=lambda session: 1)):
        done = deliver_turn(engine, either, before, tokens[:146] + prompt(10, 20), num_held=144)
    assert done.fetched.decode == 144


@pytest.mark.parametrize("which", ["all", "prompts"])
def test_rows_of_steps_are_read_if_the_operator_lets_them(
    engine: EngineThread, peer: DecodePeer, which: str
) -> None:
    tokens = prompt(11, 150)
    before = held_elsewhere(engine, peer, tokens)
    held = HeldKv(slice_extents(before.kv_extents, 0, 144), slice_extents(before.index_extents, 0, 144), 80)
    with patch.object(engine.life.pages.decode_tier, "_which", which):
        done = deliver_turn(engine, peer, before, tokens[:146] + prompt(12, 20), num_held=144, held=held)
    assert done.fetched.decode == {"all": 144, "prompts": 80}[which]


def test_what_is_computed_sooner_is_not_read(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(13, 150)
    before = held_elsewhere(engine, peer, tokens)
    with patch.object(decode_tier, "LEAST_SECS", 1e6):
        done = deliver_turn(engine, peer, before, tokens[:146] + prompt(14, 20), num_held=144)
    assert (done.num_cached_tokens, done.fetched.decode) == (0, 0)


def test_a_node_without_the_setting_reads_nothing(tiny: Path, tmp_path: Path) -> None:
    with engine_thread(tiny, tmp_path / "front", read_held="off") as engine, decode_peer(engine) as peer:
        peer.register()
        tokens = prompt(15, 150)
        before = held_elsewhere(engine, peer, tokens)
        longer = tokens[:146] + prompt(16, 20)
        assert deliver_turn(engine, peer, before, longer, num_held=144).num_cached_tokens == 0


def test_all_tiers_together(tiny: Path, tmp_path: Path) -> None:
    """A page is on the device, the next three in main memory, and five more at the decode node."""
    with (
        engine_thread(
            tiny, tmp_path / "front", kv_pool_tokens=12 * PAGE, host_cache_tokens=60 * PAGE
        ) as engine,
        decode_peer(engine) as peer,
    ):
        peer.register()
        tokens = prompt(17, 150)
        before = held_elsewhere(engine, peer, tokens)
        land(peer, tokens[:70], keeps=False)
        for seed in (18, 19):  # these take the device's pages
            land(peer, prompt(seed, 12 * PAGE - 20), keeps=False)
        land(peer, tokens[:20], keeps=False)
        done = deliver_turn(engine, peer, before, tokens[:146] + prompt(20, 20), num_held=144)
        assert (done.num_cached_tokens, done.fetched) == (144, FetchedTokens(host=48, decode=80))


def test_a_draft_layer_is_read_with_the_others_or_nothing_is(tmp_path: Path) -> None:
    """A decode node that does not draft has nothing of the layer that this node computes."""
    write_checkpoint(tmp_path, "glm", draft_gain=1.0)
    with (
        engine_thread(tmp_path, tmp_path / "front") as engine,
        decode_peer(engine, "drafts") as drafts,
        decode_peer(engine, "plain", takes_drafts=False) as plain,
    ):
        for peer, num_read in ((drafts, 144), (plain, 0)):
            peer.register()
            tokens = prompt(25, 150)
            before = held_elsewhere(engine, peer, tokens)
            done = deliver_turn(engine, peer, before, tokens[:146] + prompt(26, 20), num_held=144)
            assert (done.num_cached_tokens, done.fetched.decode) == (num_read, num_read)


def test_requests_that_begin_alike_wait_for_one_read(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(21, 150)
    before = held_elsewhere(engine, peer, tokens)
    num_read = engine.life.pages.decode_tier.counts.num_tokens
    with engine.admission_paused():
        for number in range(3):
            message = next_turn(peer, before, tokens[:146] + prompt(22 + number, 20), num_held=144)
        engine.wait_until(lambda: engine.has_room(message.room), "the rooms to wait")
    done = all_delivered(peer, 3)
    assert [each.num_cached_tokens for each in done.values()] == [144] * 3
    assert sorted(each.fetched.decode for each in done.values()) == [0, 0, 144]
    assert engine.life.pages.decode_tier.counts.num_tokens == num_read + 144


# --- what goes wrong ---------------------------------------------------------------------------------------


def test_a_wrong_row_is_counted_and_computed(engine: EngineThread, either: DecodePeer) -> None:
    """The pages before it are used, and the memory here is not to blame."""
    tokens = prompt(30, 150)
    before = held_elsewhere(engine, either, tokens)
    slot = int(extents_to_slots(before.kv_extents)[70])
    either.kv_host[1, slot, 7] ^= 4
    num_found = engine.life.set_aside.num_found["decode"]
    longer = tokens[:146] + prompt(31, 20)
    done = deliver_turn(engine, either, before, longer, num_held=144)
    assert (done.num_cached_tokens, done.fetched.decode) == (64, 64)
    assert engine.life.set_aside.num_found["decode"] == num_found + 1
    assert not engine.life.set_aside
    engine.wait_until_idle()
    engine.flush()
    done = deliver_turn(engine, either, before, longer, num_held=144)
    assert done.num_cached_tokens == 0, "for a while nothing is read from this node"


def test_right_rows_of_other_positions_are_wrong(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(32, 150)
    before = held_elsewhere(engine, peer, tokens)
    kv, index = before.kv_extents, before.index_extents
    lie = HeldKv(
        slice_extents(kv, 16, 144) + slice_extents(kv, 0, 16),
        slice_extents(index, 16, 144) + slice_extents(index, 0, 16),
        144,
    )
    done = deliver_turn(engine, peer, before, tokens[:146] + prompt(33, 20), num_held=144, held=lie)
    assert done.num_cached_tokens == 0


@pytest.mark.I7
@pytest.mark.parametrize(
    ("either", "may_still_land"),
    [
        *(("tcp", True), ("shm", False)),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in (("tcp", False), ("shm", True))),
    ],
    indirect=["either"],
)
def test_an_error_costs_hits_and_nothing_else(
    engine: EngineThread, either: DecodePeer, may_still_land: bool
) -> None:
    """Parts before it are used. Where bytes may still land, the slots wait."""
    tier, lanes = engine.life.pages.decode_tier, engine.engine.lanes
    tokens = prompt(34, 150)
    before = held_elsewhere(engine, either, tokens)
    read, kv = lanes.read, tier._memory.regions.kv
    page_ids: list[int] = []

    def fail_third(session: str, reads: Descriptors, *args: Any) -> None:
        if not page_ids:  # the first part: nothing has arrived yet
            (under_way,) = tier.parts._under_way.values()
            page_ids.extend(extents_to_pages(under_way.holding[PoolKind.DEVICE], PAGE))
        in_kv = reads.dst_addrs[
            (reads.dst_addrs >= kv.base_addr) & (reads.dst_addrs < kv.base_addr + kv.num_bytes)
        ]
        slots = (in_kv - kv.base_addr) // kv.item_bytes % kv.num_slots
        if page_ids[2] in slots // PAGE:
            raise TransferError("the peer is gone", may_still_land=may_still_land)
        read(session, reads, *args)

    num_failures = tier.counts.num_failures
    with (
        patch.object(tier.parts, "_memory", tier.parts._memory._replace(part_bytes=lambda session: 1)),
        patch.object(lanes, "read", fail_third),
    ):
        done = deliver_turn(engine, either, before, tokens[:146] + prompt(35, 20), num_held=144)
    assert (done.num_cached_tokens, done.fetched.decode) == (32, 32)
    assert tier.counts.num_failures == num_failures + 1
    engine.wait_until(lambda: len(tier.parts) == 0, "the read to be over")
    assert engine.life.pages.pools.used(Stage.QUARANTINED).device == (144 - 32 if may_still_land else 0)
    with patch.object(tier.parts, "_clock", lambda: time.monotonic() + QUARANTINE_SECS):
        engine.wait_until(lambda: tier.parts.num_quarantined == 0, "the slots to be free")


class StuckReads:
    """Reads that wait for ``release``."""

    def __init__(self, engine: EngineThread) -> None:
        self.started, self.release = threading.Event(), threading.Event()
        self._lanes = engine.engine.lanes
        self._read = self._lanes.read
        self._lanes.read = self.read  # type: ignore[assignment, method-assign]

    def read(self, *args: Any) -> None:
        self.started.set()
        assert self.release.wait(4 * WAIT_SECS)
        self._read(*args)

    def __enter__(self) -> StuckReads:
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        del self._lanes.read


@pytest.mark.I7
def test_a_slow_node_costs_hits_and_nothing_else(engine: EngineThread, peer: DecodePeer) -> None:
    """What arrives too late is not taken, even if its source is another's by then."""
    tier, tokens = engine.life.pages.decode_tier, prompt(36, 150)
    before = held_elsewhere(engine, peer, tokens)
    num_late = tier.counts.num_late
    longer = tokens[:146] + prompt(37, 20)
    with StuckReads(engine), patch.object(decode_tier, "LEAST_WAIT_SECS", 0.0):
        done = deliver_turn(engine, peer, before, longer, num_held=144)
        assert (done.num_cached_tokens, tier.counts.num_late) == (0, num_late + 1)
        assert engine.life.pages.pools.used(Stage.LANDING).device == 144
        peer.kv_host.zero_()
    engine.wait_until(lambda: len(tier.parts) == 0, "the read to be over")
    assert tier.parts.num_quarantined == 0
    engine.wait_until_idle()
    assert land(peer, longer, keeps=False).room in engine.computed


def test_a_room_is_quiet_though_its_read_is_not_over(engine: EngineThread, peer: DecodePeer) -> None:
    """What it brings is not taken any more, so that the decode node may use the source again."""
    tier, tokens = engine.life.pages.decode_tier, prompt(38, 150)
    before = held_elsewhere(engine, peer, tokens)
    num_read = tier.counts.num_tokens
    with StuckReads(engine) as reads:
        message = next_turn(peer, before, tokens[:146] + prompt(39, 20), num_held=144)
        assert reads.started.wait(WAIT_SECS)
        peer.client.send(AbortRoom(message.room, "the client is gone"))
        assert not peer.expect(RoomQuiet).batch_failed
        assert engine.life.pages.pools.used(Stage.LANDING).device == 144
    engine.wait_until(lambda: len(tier.parts) == 0, "the read to be over")
    assert tier.counts.num_tokens == num_read
    assert engine.num_cached_pages == 0


@pytest.mark.I7
@pytest.mark.parametrize(
    ("held", "error"),
    [
        (HeldKv((Extent(1000, 144),), (Extent(0, 144),), 144), "end at slot 1144, past the region's 1024"),
        (HeldKv((Extent(0, 144),), (Extent(1000, 144),), 144), "held index extents end at slot 1144"),
        (
            HeldKv((Extent(0, 128),), (Extent(0, 144),), 144),
            "held index extents are of 144 tokens, those of the KV of 128",
        ),
        (HeldKv((Extent(0, 144),), (), 144), "held index extents are of 0 tokens, those of the KV of 144"),
        (
            HeldKv((Extent(0, 144),), (Extent(0, 144),), 145),
            "145 of 144 held tokens are said to be prefilled",
        ),
        (
            HeldKv((Extent(0, 160),), (Extent(0, 160),), 144),
            "held extents are of 160 tokens, num_held_tokens is 144",
        ),
    ],
)
def test_what_cannot_be_held_is_refused(
    engine: EngineThread, node: DecodePeer, held: HeldKv, error: str
) -> None:
    node.register()
    node.bootstrap(next_room(), prompt(40, 160), num_held_tokens=144, held=held)
    failed = node.expect(RoomFailed)
    assert failed.status == 400
    assert error in failed.error
