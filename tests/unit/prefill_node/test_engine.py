"""The prefill engine end to end: a real model, real control messages, real Mooncake writes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse_pd.base.vocabulary import SamplingParams, pack_logit_bias
from hisparse_pd.core.memory.numa import Placement
from hisparse_pd.core.paging.prompt_keys import root_of
from hisparse_pd.engine.messages import (
    Abort,
    FlushCache,
    Generate,
    GenerateGroup,
    RequestFailed,
    pack_token_ids,
)
from hisparse_pd.protocol.messages import AbortRoom, Extent, RoomFailed, RoomQuiet
from tests.identities import ANY, identity_of
from tests.unit.prefill_node.support import (
    GREEDY,
    TIMEOUT_SECS,
    DecodePeer,
    EngineThread,
    StuckTransport,
    all_delivered,
    deliver,
    engine_thread,
    next_room,
    prompt,
    reference,
    wait_for,
)

# --- delivery -------------------------------------------------------------------------------------------


@pytest.mark.I6
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 48, 49, 100])
def test_delivers_prompts_of_every_shape(
    engine: EngineThread, peer: DecodePeer, room: int, num_tokens: int
) -> None:
    assert deliver(engine, peer, room, prompt(num_tokens, num_tokens)).num_cached_tokens == 0
    chunks = engine.computed[room]
    assert chunks[0][0] == 0
    assert chunks[-1][1] == num_tokens
    assert all(stop - start <= 48 for start, stop in chunks)


def test_lands_in_scattered_host_slots_and_index_pages(
    engine: EngineThread, peer: DecodePeer, room: int
) -> None:
    kv = (Extent(700, 3), Extent(5, 50), Extent(300, 1), Extent(100, 46))
    index = (Extent(512, 64), Extent(64, 32), Extent(0, 16))
    deliver(engine, peer, room, prompt(1, 100), kv=kv, index=index, aux_slot=5)
    untouched = torch.ones(peer.NUM_SLOTS, dtype=torch.bool)
    for extent in kv:
        untouched[extent.start : extent.end] = False
    assert not peer.kv_host[:, untouched].any(), "bytes landed outside the landing zone"
    assert not peer.kv_device.any()


@pytest.mark.I1
@pytest.mark.parametrize("num_held", [16, 40, 64, 99])
@pytest.mark.parametrize("hisparse", [True, False])
def test_what_the_decode_node_holds_is_computed_and_not_sent(
    engine: EngineThread, peer: DecodePeer, room: int, num_held: int, hisparse: bool
) -> None:
    """Whatever its pages are, in chunks of 48 of which it holds one or two whole; and when all is cached."""
    tokens = prompt(600 + num_held + 100 * hisparse, 100)
    rest = 100 - num_held
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
    tokens = prompt(14, 100)

    def num_cached(*isolation_key: str) -> int:
        identity = identity_of(tokens, root_of(*isolation_key))
        room = next_room()
        bootstrap = peer.bootstrap(room, len(tokens), digest=identity.digest)
        engine.generate(room, tokens, identity=identity)
        done = all_delivered(engine, peer)[room]
        peer.assert_has(bootstrap)
        return done.num_cached_tokens

    keys: list[tuple[str, ...]] = [(), ("a",), ("b",), ("a", "b"), ("ab",)]
    assert [num_cached(*key) for key in keys] == [0] * len(keys)
    assert [num_cached(*key) for key in keys] == [96] * len(keys)


@pytest.mark.I5
def test_a_cached_prefix_is_sent_but_not_computed_again(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(4, 100)
    first, second, longer, exact = (next_room() for _ in range(4))
    deliver(engine, peer, first, tokens)
    done = deliver(engine, peer, second, tokens, kv=(Extent(500, 100),))
    assert done.num_cached_tokens == 96
    assert engine.computed[second] == [(96, 100)]
    done = deliver(engine, peer, longer, tokens[:70] + prompt(5, 60))
    assert done.num_cached_tokens == 64
    assert engine.computed[longer][0][0] == 64
    done = deliver(engine, peer, exact, tokens[:96])  # the last token is always computed
    assert done.num_cached_tokens == 80
    stats = engine.next_stats()
    assert stats.gauges["cache_hit_rate"] > 0
    assert stats.counters["cached_tokens_total"] >= 96 + 64 + 80


def test_equal_prompts_at_once_are_computed_once(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(6, 40)
    rooms = [next_room() for _ in range(3)]
    is_complete = threading.Event()
    engine.before_run = lambda batch: None if is_complete.wait(TIMEOUT_SECS) else pytest.fail("not released")
    for number, room in enumerate(rooms):
        peer.bootstrap(room, 40, kv=(Extent(100 * number, 40),), aux_slot=number)
        engine.generate(room, tokens)
    is_complete.set()
    done = all_delivered(engine, peer, len(rooms))
    assert sorted(message.num_cached_tokens for message in done.values()) == [0, 32, 32]


def test_many_prompts_share_forwards_and_a_pool_for_few(engine: EngineThread, peer: DecodePeer) -> None:
    sizes = [30, 200, 17, 300, 5, 120, 250, 64]  # 1024 tokens of pages are not enough for them all
    rooms = [next_room() for _ in sizes]
    bootstraps = {}
    for number, (room, size) in enumerate(zip(rooms, sizes, strict=True)):
        bootstraps[room] = peer.bootstrap(
            room, size, kv=(Extent(sum(sizes[:number]), size),), aux_slot=number
        )
    for number, (room, size) in enumerate(zip(rooms, sizes, strict=True)):
        engine.generate(room, prompt(100 + number, size))
    all_delivered(engine, peer, len(rooms))
    for number, (room, size) in enumerate(zip(rooms, sizes, strict=True)):
        first_token, _ = reference(engine, prompt(100 + number, size))
        assert peer.aux_record(bootstraps[room]).first_token == first_token


@pytest.mark.I5
def test_first_tokens_are_drawn_with_penalties_and_biases_beside_plain_ones(
    engine: EngineThread, peer: DecodePeer
) -> None:
    """What is the likeliest is banned, or another one forced, or so much divided that it is no more."""
    prompts = [prompt(300 + number, 11) for number in range(4)]
    likeliest = [reference(engine, tokens)[0] for tokens in prompts]
    seen = prompts[3]
    settings: list[dict[str, Any]] = [
        {
            "logit_bias": pack_logit_bias([(likeliest[0], -100.0)]),
            "frequency_penalty": 2.0,
            "presence_penalty": 2.0,
        },
        {"presence_penalty": 2.0},
        {"logit_bias": pack_logit_bias([(5, 100.0)])},
        {"repetition_penalty": 0.01},
    ]
    rooms = [next_room() for _ in prompts]
    bootstraps = [
        peer.bootstrap(room, 11, kv=(Extent(11 * number, 11),), aux_slot=number)
        for number, room in enumerate(rooms)
    ]
    for room, tokens, setting in zip(rooms, prompts, settings, strict=True):
        engine.generate(room, tokens, SamplingParams(4, temperature=0.0, **setting))
    all_delivered(engine, peer, len(rooms))
    first = [peer.aux_record(bootstrap).first_token for bootstrap in bootstraps]
    assert first[0] != likeliest[0]
    assert first[1] == likeliest[1], "there is no output yet"
    assert first[2] == 5
    assert first[3] in seen
    assert likeliest[3] not in seen


def test_logprobs_travel_in_the_aux_record(engine: EngineThread, peer: DecodePeer, room: int) -> None:
    bootstrap = peer.bootstrap(room, 20)
    engine.generate(room, prompt(7, 20), SamplingParams(4, temperature=0.0, num_logprobs=3))
    all_delivered(engine, peer)
    record = peer.aux_record(bootstrap)
    assert record.logprob is not None
    assert record.logprob.token_id == record.first_token == record.logprob.top[0][0]
    assert len(record.logprob.top) == 3
    assert record.logprob.logprob < 0


# --- ends that are no delivery --------------------------------------------------------------------------


@pytest.mark.I7
def test_the_decode_node_aborts_midway(engine: EngineThread, peer: DecodePeer, room: int) -> None:
    has_paused = engine.pause_until_message(48, "control")
    before = dict(engine.life.counters)
    peer.bootstrap(room, 200)
    request_id = engine.generate(room, prompt(8, 200))
    assert has_paused.wait(TIMEOUT_SECS)
    peer.client.send(AbortRoom(room, "client gone"))
    assert peer.expect(RoomQuiet) == RoomQuiet(room, batch_failed=False)
    failed = engine.expect(RequestFailed)
    assert (failed.request_id, failed.status) == (request_id, 503)
    assert "client gone" in failed.error
    counters = engine.next_stats().counters
    assert counters["aborted_requests_total"] == before["aborted_requests_total"] + 1
    assert counters["failed_requests_total"] == before["failed_requests_total"], "counted as both"
    assert engine.computed[room] == [(0, 48), (48, 96)], "computed on after the abort"
    peer.assert_nothing_more()
    peer.bootstrap(room, 200)
    late = peer.expect(RoomFailed)
    assert (late.room, late.status, late.quiet) == (room, 503, True)


def test_the_front_aborts_midway(engine: EngineThread, peer: DecodePeer, room: int) -> None:
    has_paused = engine.pause_until_message(48, "front")
    peer.bootstrap(room, 200)
    request_id = engine.generate(room, prompt(9, 200))
    assert has_paused.wait(TIMEOUT_SECS)
    engine.send(Abort(request_id))
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status) == (room, 499)
    if not failed.quiet:
        peer.expect(RoomQuiet)
    peer.assert_nothing_more()
    engine.send(Abort(request_id))  # unknown by now: ignored


@pytest.mark.I7
def test_a_forward_that_fails_ends_its_batch_only(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(10, 20)
    doomed, spared = next_room(), next_room()

    def out_of_memory(batch: Sequence[Any]) -> None:
        if any(record.room == doomed for record, _ in batch):
            raise torch.OutOfMemoryError("no memory for 1 GiB")

    engine.before_run = out_of_memory
    peer.bootstrap(doomed, 20)
    engine.generate(doomed, tokens)
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status, failed.quiet, failed.batch_failed) == (doomed, 500, True, False)
    assert "OutOfMemoryError: no memory for 1 GiB" in engine.expect(RequestFailed).error
    done = deliver(engine, peer, spared, tokens)
    assert done.num_cached_tokens == 0, "pages of a failed forward must not be cached"


@pytest.mark.I1
@pytest.mark.I7
def test_pages_stay_until_a_stuck_write_returns(
    engine: EngineThread, peer: DecodePeer, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = StuckTransport(engine, monkeypatch)
    monkeypatch.setattr(engine.life._pusher, "write_timeout_secs", 0.2)
    peer.bootstrap(room, 40)
    engine.generate(room, prompt(11, 40))
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status, failed.quiet) == (room, 504, False)
    assert engine.expect(RequestFailed).status == 504
    engine.send(FlushCache())
    wait_for(lambda: engine.next_stats().gauges["num_transfer_queue_reqs"] == 1, "the room to drain")
    assert engine.num_used_pages == 3, "cached pages in the transport were evicted"
    peer.assert_nothing_more()
    transport.release.set()
    assert peer.expect(RoomQuiet) == RoomQuiet(room, batch_failed=False)


@pytest.mark.I1
def test_a_failed_batch_is_reported_as_such(engine: EngineThread, peer: DecodePeer, room: int) -> None:
    peer.register(session="127.0.0.1:9")  # nobody listens there
    peer.bootstrap(room, 40)
    engine.generate(room, prompt(12, 40))
    failed = peer.expect(RoomFailed)
    assert (failed.room, failed.status, failed.batch_failed) == (room, 502, True)
    if not failed.quiet:
        assert peer.expect(RoomQuiet).batch_failed
    assert "decode-0" in engine.expect(RequestFailed).error
    peer.register()
    peer.bootstrap(room, 40)
    late = peer.expect(RoomFailed)
    assert (late.room, late.quiet, late.batch_failed) == (room, True, True), "the failed batch is forgotten"
    deliver(engine, peer, next_room(), prompt(12, 40))


@pytest.mark.parametrize(
    ("tokens", "sampling", "error"),
    [
        ([], None, "empty"),
        ([5, 100_000], None, "token id 100000 is not in"),
        ([5, -1], None, "token id -1 is not in"),
        ([5] * 1025, None, "needs 65 pages"),
        ([5] * 8193, None, "context of 8192"),
        ([5], SamplingParams(4, num_logprobs=21), "at most 20"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_at_once(
    engine: EngineThread,
    peer: DecodePeer,
    room: int,
    tokens: list[int],
    sampling: SamplingParams | None,
    error: str,
) -> None:
    engine.generate(room, tokens, sampling or SamplingParams(4))
    failed = engine.expect(RequestFailed)
    assert failed.status == 400
    assert error in failed.error
    peer.bootstrap(room, max(len(tokens), 1) if len(tokens) < 1000 else 10)
    told = peer.expect(RoomFailed)
    assert (told.status, told.quiet) == (400, True)
    assert error in told.error


def test_a_room_can_be_used_once(engine: EngineThread, peer: DecodePeer, room: int) -> None:
    engine.generate(room, [5, 6, 7])
    another = Generate("another", room, 3, GREEDY, "127.0.0.1", 1)
    engine.send(GenerateGroup((another,), ANY, pack_token_ids((5, 6, 7))))
    failed = engine.expect(RequestFailed)
    assert (failed.request_id, failed.status) == ("another", 400)
    assert "in use" in failed.error
    peer.bootstrap(room, 3)
    all_delivered(engine, peer)
    engine.generate(room, [5, 6, 7])
    assert "served before" in engine.expect(RequestFailed).error


def test_the_front_hears_where_the_engine_is(engine: EngineThread, tiny: Path, tmp_path: Path) -> None:
    assert (engine.ready.numa_node, engine.ready.numa_placement) == (None, "anywhere, nothing is placed")
    placement = Placement("a test's", 1, (2, 3))
    with engine_thread(tiny, tmp_path / "front", placement=placement) as placed:
        assert (placed.ready.numa_node, placed.ready.numa_placement) == (1, str(placement))
