"""The prefill engine end to end: a real model, real control messages, real Mooncake writes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hisparse_pd.core.paging.prompt_keys import root_of
from hisparse_pd.engine.messages import FlushCache, Flushed
from hisparse_pd.protocol.messages import AbortRoom, Extent, RoomFailed, RoomQuiet
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    StuckTransport,
    all_delivered,
    assert_hint,
    deliver,
    next_room,
    prompt,
)
from tests.waiting import WAIT_SECS, wait_until

# --- delivery -------------------------------------------------------------------------------------------


@pytest.mark.I6
@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 18, 48, 49, 50, 100])
def test_delivers_prompts_of_every_shape(
    engine: EngineThread, peer: DecodePeer, room: int, num_tokens: int
) -> None:
    assert deliver(engine, peer, room, prompt(num_tokens, num_tokens)).num_cached_tokens == 0
    chunks = engine.computed[room]
    assert chunks[0][0] == 0
    assert chunks[-1][1] == num_tokens - 1, "the last token is the decode node's"
    assert all(stop - start <= 48 for start, stop in chunks)


def test_lands_in_scattered_host_slots_and_index_pages(
    engine: EngineThread, peer: DecodePeer, room: int
) -> None:
    kv = (Extent(700, 3), Extent(5, 50), Extent(300, 1), Extent(100, 46))
    index = (Extent(512, 64), Extent(64, 32), Extent(0, 16))
    deliver(engine, peer, room, prompt(1, 101), kv=kv, index=index, aux_slot=5)
    untouched = torch.ones(peer.NUM_SLOTS, dtype=torch.bool)
    for extent in kv:
        untouched[extent.start : extent.end] = False
    assert not peer.kv_host[:, untouched].any(), "bytes landed outside the landing zone"
    assert not peer.kv_device.any()


@pytest.mark.I1
@pytest.mark.parametrize(
    ("num_held", "hisparse"),
    [
        # Each length in one mode; in `make test-full` in both.
        *((16, True), (40, False), (64, False), (98, True)),
        *(
            pytest.param(num_held, hisparse, marks=pytest.mark.slow)
            for num_held, hisparse in ((16, False), (40, True), (64, True), (98, False))
        ),
    ],
)
def test_what_the_decode_node_holds_is_computed_and_not_sent(
    engine: EngineThread, peer: DecodePeer, room: int, num_held: int, hisparse: bool
) -> None:
    """Held tokens need not be whole pages. They include up to two whole chunks of 48; the second room finds
    all pages in the cache."""
    tokens = prompt(600 + num_held + 100 * hisparse, 100)
    rest = 99 - num_held
    landing = {
        "kv": (Extent(100, rest),),
        "index": (Extent(512, rest),),
        "num_held_tokens": num_held,
        "hisparse": hisparse,
    }
    for each, num_cached in ((room, 0), (next_room(), 96)):
        peer.forget()
        assert deliver(engine, peer, each, tokens, **landing).num_cached_tokens == num_cached
        landed = (peer.kv_host if hisparse else peer.kv_device).any(dim=-1).any(dim=0)
        assert landed.nonzero().flatten().tolist() == list(range(100, 100 + rest))
        assert peer.index.any(dim=-1).any(dim=0).sum() == rest


@pytest.mark.I5
def test_a_prefix_is_cached_for_requests_with_its_isolation_key_only(
    engine: EngineThread, peer: DecodePeer
) -> None:
    tokens = prompt(14, 50)

    def num_cached(*isolation_key: str) -> int:
        return deliver(engine, peer, next_room(), tokens, root=root_of(*isolation_key)).num_cached_tokens

    keys: list[tuple[str, ...]] = [(), ("a",), ("b",), ("a", "b"), ("ab",)]
    assert [num_cached(*key) for key in keys] == [0] * len(keys)
    assert [num_cached(*key) for key in keys] == [48] * len(keys)


@pytest.mark.I5
def test_a_cached_prefix_is_sent_but_not_computed_again(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(4, 100)
    first, second, longer, exact, whole = (next_room() for _ in range(5))
    deliver(engine, peer, first, tokens)
    done = deliver(engine, peer, second, tokens, kv=(Extent(500, 99),))
    assert done.num_cached_tokens == 96
    assert engine.computed[second] == [(96, 99)]
    done = deliver(engine, peer, longer, tokens[:70] + prompt(5, 60))
    assert done.num_cached_tokens == 64
    assert engine.computed[longer][0][0] == 64
    done = deliver(engine, peer, exact, tokens[:97])  # the last token that is computed is always computed
    assert done.num_cached_tokens == 80
    assert deliver(engine, peer, whole, tokens[:98]).num_cached_tokens == 96
    stats = engine.next_stats()
    assert stats.gauges["cache_hit_rate"] > 0
    assert stats.counters["cached_tokens_total"] >= 96 + 64 + 80 + 96


def test_equal_prompts_at_once_are_computed_once(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(6, 41)
    rooms = [next_room() for _ in range(3)]
    is_complete = threading.Event()
    engine.before_run = lambda batch: None if is_complete.wait(WAIT_SECS) else pytest.fail("not released")
    for number, room in enumerate(rooms):
        peer.bootstrap(room, tokens, kv=(Extent(100 * number, 40),), aux_slot=number)
    is_complete.set()
    done = all_delivered(peer, len(rooms))
    assert sorted(message.num_cached_tokens for message in done.values()) == [0, 32, 32]


def test_many_prompts_share_forwards_and_a_pool_for_few(engine: EngineThread, peer: DecodePeer) -> None:
    sizes = [30, 200, 17, 300, 5, 120, 250, 64]  # 1024 tokens of pages are not enough for them all
    rooms = [next_room() for _ in sizes]
    bootstraps = {}
    for number, (room, size) in enumerate(zip(rooms, sizes, strict=True)):
        landing = (Extent(sum(sizes[:number]), size - 1),)
        bootstraps[room] = peer.bootstrap(room, prompt(100 + number, size), kv=landing, aux_slot=number)
    all_delivered(peer, len(rooms))
    for number, (room, size) in enumerate(zip(rooms, sizes, strict=True)):
        assert_hint(engine, peer, bootstraps[room], prompt(100 + number, size))


def test_no_logits_are_computed(
    engine: EngineThread, peer: DecodePeer, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_wanted(*_: object) -> None:
        raise AssertionError("the LM head was asked")

    with monkeypatch.context() as patched:
        patched.setattr("hisparse_pd.core.model.dsa.product_of", not_wanted)
        peer.bootstrap(room, prompt(7, 100))
        all_delivered(peer)


# --- ends without delivery ------------------------------------------------------------------------------


@pytest.mark.I7
def test_the_decode_node_aborts_midway(engine: EngineThread, peer: DecodePeer, room: int) -> None:
    has_paused = engine.pause_until_message(48)
    before = engine.counters()
    peer.bootstrap(room, prompt(8, 200))
    assert has_paused.wait(WAIT_SECS)
    peer.client.send(AbortRoom(room, "client gone"))
    assert peer.expect(RoomQuiet) == RoomQuiet(room, batch_failed=False)
    counters = engine.next_stats().counters
    assert counters["aborted_requests_total"] == before["aborted_requests_total"] + 1
    assert counters["failed_requests_total"] == before["failed_requests_total"], "counted as both"
    assert engine.computed[room] == [(0, 48), (48, 96)], "computed on after the abort"
    peer.assert_nothing_more()
    peer.bootstrap(room, prompt(8, 200))
    late = peer.expect(RoomFailed)
    assert (late.room, late.status, late.quiet) == (room, 503, True)
    assert "client gone" in late.error


@pytest.mark.I7
def test_a_room_that_waits_is_given_up_at_once(engine: EngineThread, peer: DecodePeer, room: int) -> None:
    with engine.admission_paused():
        peer.bootstrap(room, prompt(9, 200))
        peer.heartbeat()
        assert engine.has_room(room)
        peer.client.send(AbortRoom(room, "bored"))
        assert peer.expect(RoomQuiet) == RoomQuiet(room, batch_failed=False)
        assert not engine.has_room(room)
    peer.assert_nothing_more()
    assert room not in engine.computed


@pytest.mark.I7
def test_a_forward_that_fails_ends_its_batch_only(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(10, 20)
    doomed, spared = next_room(), next_room()

    def out_of_memory(batch: Sequence[Any]) -> None:
        if any(request.room == doomed for request, _ in batch):
            raise torch.OutOfMemoryError("no memory for 1 GiB")

    engine.before_run = out_of_memory
    peer.bootstrap(doomed, tokens)
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status, failed.quiet, failed.batch_failed) == (doomed, 500, True, False)
    assert "OutOfMemoryError: no memory for 1 GiB" in failed.error
    done = deliver(engine, peer, spared, tokens)
    assert done.num_cached_tokens == 0, "pages of a failed forward must not be cached"


@pytest.mark.I1
@pytest.mark.I7
def test_pages_stay_until_a_stuck_write_returns(
    engine: EngineThread, peer: DecodePeer, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = StuckTransport(engine, monkeypatch)
    monkeypatch.setattr(engine.life.pusher, "write_timeout_secs", 0.2)
    peer.bootstrap(room, prompt(11, 40))
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status, failed.quiet) == (room, 504, False)
    engine.send(FlushCache("00"))
    engine.expect(Flushed)
    wait_until(lambda: engine.next_stats().gauges["num_transfer_queue_reqs"] == 1, "the room to drain")
    assert engine.num_used_pages == 3, "cached pages in the transport were evicted"
    peer.assert_nothing_more()
    transport.release.set()
    assert peer.expect(RoomQuiet) == RoomQuiet(room, batch_failed=False)


@pytest.mark.I1
def test_a_failed_batch_is_reported_as_such(engine: EngineThread, peer: DecodePeer, room: int) -> None:
    peer.register(session="127.0.0.1:9")  # nobody listens there
    peer.bootstrap(room, prompt(12, 40))
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status, failed.batch_failed) == (room, 502, True)
    if not failed.quiet:
        assert peer.expect(RoomQuiet).batch_failed
    assert "decode-0" in failed.error
    peer.register()
    peer.bootstrap(room, prompt(12, 40))
    late = peer.expect(RoomFailed)
    assert (late.room, late.quiet, late.batch_failed) == (room, True, True), "the failed batch is forgotten"
    deliver(engine, peer, next_room(), prompt(12, 40))


def test_a_room_can_be_used_once(engine: EngineThread, peer: DecodePeer, room: int) -> None:
    peer.bootstrap(room, [5, 6, 7])
    all_delivered(peer)
    peer.bootstrap(room, [5, 6, 7])
    failed = peer.expect(RoomFailed)
    assert failed.status == 400
    assert "served before" in failed.error
