"""Prompts that the prefix cache on the device had no room for come back from main memory.

The engines here are real and on a CPU, where a copy is over at once. Copies that take a while are those of
``tests/property/test_host_tier.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, page_keys
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.engine.prefix_scrub import PrefixScrub
from hisparse_pd.kernels.row_check import PageRows
from hisparse_pd.prefill_node import host_pages
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS
from hisparse_pd.prefill_node.fresh_pages import FRESH_SECS
from hisparse_pd.prefill_node.host_tier import HOST_POOLS
from hisparse_pd.prefill_node.requests import PrefillRequest, PrefillState
from hisparse_pd.protocol.messages import RoomDone
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    StuckTransport,
    all_delivered,
    decode_peer,
    deliver,
    engine_thread,
    next_room,
    prompt,
)

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I5]

PAGE = 16
NUM_PAGES = 12
NUM_HOST_PAGES = 60


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineThread]:
    """An engine whose device has room for little more than one prompt."""
    with engine_thread(
        tiny,
        tmp_path_factory.mktemp("prefill") / "front",
        kv_pool_tokens=NUM_PAGES * PAGE,
        host_cache_tokens=NUM_HOST_PAGES * PAGE + 5,
    ) as engine:
        yield engine


def num_found(engine: EngineThread, tokens: Sequence[int], kinds: tuple[PoolKind, ...]) -> int:
    """Return how many tokens of a prompt are in the cache of ``kinds``."""
    keys = page_keys(NO_ISOLATION, pack_token_ids(tokens), PAGE)
    found = engine.between_turns(lambda: engine.life.pages.prefixes.find(keys, kinds))
    return 0 if found is None else found.num_pages * PAGE


def evict_from_device(engine: EngineThread, peer: DecodePeer, tokens: Sequence[int]) -> None:
    """Let other prompts take the device's pages of ``tokens``."""
    for seed in (90, 91):
        deliver(engine, peer, next_room(), prompt(seed, NUM_PAGES * PAGE - 20))
    assert num_found(engine, tokens, CACHE_POOLS) == 0


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("1 MiB wanted")


def test_what_the_device_has_evicted_is_not_computed_again(engine: EngineThread, peer: DecodePeer) -> None:
    """``deliver`` compares what arrives, bit by bit, and what is computed."""
    tokens = prompt(1, 130)
    deliver(engine, peer, next_room(), tokens)
    evict_from_device(engine, peer, tokens)
    before = engine.life.pages.tier.num_fetched_tokens
    done = deliver(engine, peer, next_room(), tokens)
    assert (done.num_cached_tokens, done.fetched.host) == (128, 128)
    assert engine.life.pages.tier.num_fetched_tokens == before + 128
    longer = tokens[:120] + prompt(2, 50)
    done = deliver(engine, peer, next_room(), longer)
    assert (done.num_cached_tokens, done.fetched.host) == (112, 0), "it is on the device now"
    assert engine.life.pages.tier.num_fetched_tokens == before + 128


def test_a_prompt_goes_down_when_its_request_has_ended(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the request's own writes need the link."""
    tokens = prompt(24, 130)
    transport = StuckTransport(engine, monkeypatch)
    peer.bootstrap(next_room(), tokens)
    engine.wait_until(lambda: engine.life.requests.count(PrefillState.SENDING), "the prompt to be computed")
    assert transport.started.is_set()
    assert num_found(engine, tokens, CACHE_POOLS) == 128
    assert engine.between_turns(lambda: engine.life.pages.num_copies) == 0
    assert num_found(engine, tokens, HOST_POOLS) == 0
    transport.release.set()
    peer.expect(RoomDone)
    engine.wait_until(lambda: num_found(engine, tokens, HOST_POOLS) == 128, "the prompt to go down")


def test_rows_that_come_up_are_verified_once(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan verifies the cached rows that it reads, unless they were verified when they came."""
    tokens = prompt(25, 130)
    deliver(engine, peer, next_room(), tokens)
    evict_from_device(engine, peer, tokens)
    now = 0.0
    fresh = engine.life.pages.fresh
    monkeypatch.setattr(fresh, "_clock", lambda: now)
    memory, verified = engine.engine.memory, Counter[int]()
    begin_check = memory.begin_check

    def counted(pages: PageRows, page_size: int) -> torch.Tensor:
        verified.update(pages[:, 1].tolist())
        return begin_check(pages, page_size)

    monkeypatch.setattr(memory, "begin_check", counted)
    every_page = dict.fromkeys(range(0, 128, PAGE), 1)
    assert deliver(engine, peer, next_room(), tokens).fetched.host == 128
    assert verified == every_page
    now += FRESH_SECS
    verified.clear()
    assert deliver(engine, peer, next_room(), tokens).num_cached_tokens == 128
    assert verified == every_page, "they have been there for a while"


def test_the_beginning_is_on_the_device_and_the_rest_in_main_memory(
    engine: EngineThread, peer: DecodePeer
) -> None:
    tokens = prompt(3, 130)
    deliver(engine, peer, next_room(), tokens)
    evict_from_device(engine, peer, tokens)
    deliver(engine, peer, next_room(), tokens[:50])
    num_cached = num_found(engine, tokens, CACHE_POOLS)
    assert 0 < num_cached < 128
    before = engine.life.pages.tier.num_fetched_tokens
    done = deliver(engine, peer, next_room(), tokens)
    assert (done.num_cached_tokens, done.fetched.host) == (128, 128 - num_cached)
    assert engine.life.pages.tier.num_fetched_tokens == before + 128 - num_cached


def test_prompts_that_do_not_fit_at_once_come_up_one_after_the_other(
    engine: EngineThread, peer: DecodePeer
) -> None:
    """Each needs most of the device's pages, and all are asked for while the engine computes something."""
    prompts = [prompt(seed, 150) for seed in (4, 5, 6)]
    for tokens in prompts:
        deliver(engine, peer, next_room(), tokens)
    evict_from_device(engine, peer, prompts[0])
    before = engine.life.pages.tier.num_fetched_tokens
    with engine.admission_paused():
        messages = peer.bootstrap_side_by_side({next_room(): tokens for tokens in prompts})
        rooms = [*messages]
        engine.wait_until(lambda: all(engine.has_room(room) for room in rooms), "the rooms to wait")
    done = all_delivered(peer, len(rooms))
    assert [done[room].num_cached_tokens for room in rooms] == [144, 144, 144]
    assert engine.life.pages.tier.num_fetched_tokens >= before + 2 * 144
    peer.assert_has(messages[rooms[-1]])


@pytest.mark.I7
def test_a_prompt_that_cannot_be_sent_holds_up_no_other_decode_node(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is brought back, and then its decode node has too many bytes pending. Both do not fit at once, so
    the other one is computed."""
    prompts = [prompt(seed, 150) for seed in (26, 27)]
    for tokens in prompts:
        deliver(engine, peer, next_room(), tokens)
    evict_from_device(engine, peer, prompts[0])
    pusher, held_up = engine.life.pusher, next_room()
    may_start, num_asked = pusher.may_start, 0

    def once(request: PrefillRequest, num_bytes_pending: int) -> bool:
        nonlocal num_asked
        num_asked += request.room == held_up
        return (request.room != held_up or num_asked == 1) and may_start(request, num_bytes_pending)

    with decode_peer(engine, "other") as other:
        other.register()
        with monkeypatch.context() as patched:
            patched.setattr(pusher, "may_start", once)
            peer.bootstrap(held_up, prompts[0])
            engine.wait_until(lambda: num_asked > 1, "the first prompt to be held up")
            message = other.bootstrap(next_room(), prompts[1])
            assert other.expect(RoomDone).room == message.room
            other.assert_has(message)
        assert peer.expect(RoomDone).room == held_up
        engine.wait_until_idle()


@pytest.mark.I8
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "front",
    [
        pytest.param(prompt(7, 100), id="new", marks=pytest.mark.slow),
        pytest.param(prompt(91, NUM_PAGES * PAGE - 20), id="cached"),
    ],
)
def test_a_fetch_takes_no_pages_that_the_plan_has_given_away(
    engine: EngineThread, peer: DecodePeer, front: list[int], fails: bool
) -> None:
    """A prompt fits until the one behind it is brought back, which takes its pages, cached ones too. A copy
    that fails leaves them free, but nobody finds any more what was cached there."""
    behind = prompt(8, 150)
    deliver(engine, peer, next_room(), behind)
    evict_from_device(engine, peer, behind)
    with patch("hisparse_pd.engine.host_copies.copy_slots", out_of_memory) if fails else nullcontext():
        with engine.admission_paused():
            messages = peer.bootstrap_side_by_side({next_room(): tokens for tokens in (front, behind)})
            rooms = [*messages]
            engine.wait_until(lambda: all(engine.has_room(room) for room in rooms), "the rooms to wait")
        done = all_delivered(peer, len(rooms))
    for room in rooms:
        assert engine.computed[room][0][0] == done[room].num_cached_tokens
    *_, last = done
    peer.assert_has(messages[last])  # the pages of the other one may be taken


def test_main_memory_keeps_what_was_used_last(engine: EngineThread, peer: DecodePeer) -> None:
    first = prompt(10, 130)
    deliver(engine, peer, next_room(), first)
    seeds = range(11, 11 + NUM_HOST_PAGES // 8 + 1)
    for seed in seeds:
        deliver(engine, peer, next_room(), prompt(seed, 150))
    assert num_found(engine, first, HOST_POOLS) < 128
    assert num_found(engine, prompt(seeds[-1], 150), HOST_POOLS) == 144
    assert engine.next_stats().gauges['pool_held_tokens{pool="host"}'] <= NUM_HOST_PAGES * PAGE


@pytest.mark.I7
def test_what_cannot_be_copied_is_computed(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(9, 130)
    with patch("hisparse_pd.engine.host_copies.copy_slots", out_of_memory):
        deliver(engine, peer, next_room(), tokens)
    assert num_found(engine, tokens, HOST_POOLS) == 0
    deliver(engine, peer, next_room(), tokens)
    assert num_found(engine, tokens, HOST_POOLS) == 128
    evict_from_device(engine, peer, tokens)
    with patch("hisparse_pd.engine.host_copies.copy_slots", out_of_memory):
        done = deliver(engine, peer, next_room(), tokens)
    assert (done.num_cached_tokens, done.fetched.host) == (0, 0)
    evict_from_device(engine, peer, tokens)
    assert deliver(engine, peer, next_room(), tokens).fetched.host == 128


@pytest.mark.I9
def test_a_row_that_changed_in_main_memory_is_computed_anew(engine: EngineThread, peer: DecodePeer) -> None:
    """The pages before it are used. Its page in main memory is set aside, and no page of the device is."""
    tokens = prompt(20, 130)
    deliver(engine, peer, next_room(), tokens)
    evict_from_device(engine, peer, tokens)
    keys = page_keys(NO_ISOLATION, pack_token_ids(tokens), PAGE)
    with patch.object(PrefixScrub, "verify_next"):  # the scrub would find the row first
        found = engine.life.pages.prefixes.find(keys, HOST_POOLS)
        assert found is not None
        slot = int(extents_to_slots(found.prefix.extents(PoolKind.HOST))[70])
        pages = engine.engine._host_pages
        assert pages is not None
        pages.kv[1, slot, 7] ^= 4
        done = deliver(engine, peer, next_room(), tokens)
        assert (done.num_cached_tokens, done.fetched.host) == (64, 64)
    assert engine.life.set_aside.num_found["host"] == 1
    (page,) = engine.life.set_aside.shown()
    assert (page.pool, page.start) == ("host", slot // PAGE * PAGE)
    assert f"layer 1, position 70, in slot {slot} of the host pool" in page.error
    assert num_found(engine, tokens, HOST_POOLS) == 128, "what was computed anew is stored again"
    evict_from_device(engine, peer, tokens)
    assert deliver(engine, peer, next_room(), tokens).num_cached_tokens == 128


@pytest.mark.I9
def test_rows_in_main_memory_are_scrubbed(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(21, 130)
    deliver(engine, peer, next_room(), tokens)
    engine.wait_until_idle()
    found = engine.life.pages.prefixes.find(page_keys(NO_ISOLATION, pack_token_ids(tokens), PAGE), HOST_POOLS)
    assert found is not None
    slot = int(extents_to_slots(found.prefix.extents(PoolKind.HOST))[10])
    pages = engine.engine._host_pages
    assert pages is not None
    pages.kv[0, slot, 0] ^= 1
    (page,) = engine.wait_until(engine.life.set_aside.shown, "the row to be found")
    assert (page.pool, page.start) == ("host", slot // PAGE * PAGE)
    assert num_found(engine, tokens, HOST_POOLS) == 0


def test_a_flush_gives_up_what_is_being_copied(engine: EngineThread, peer: DecodePeer) -> None:
    class Copy:
        def __init__(self) -> None:
            self.is_over = False

        def query(self) -> bool:
            return self.is_over

    copies: list[Copy] = []

    def begin(*_: object) -> Copy:
        copies.append(Copy())
        return copies[-1]

    def settle(_: object) -> None:
        for copy in copies:
            copy.is_over = True

    tokens = prompt(23, 130)
    with (
        patch.object(host_pages.HostPages, "copy_down", begin),
        patch.object(host_pages.HostPages, "settle", settle),
    ):
        deliver(engine, peer, next_room(), tokens)
        assert num_found(engine, tokens, CACHE_POOLS) == 128
        assert engine.life.pages.num_copies == 1
        engine.wait_until_idle()
        engine.flush()
    assert num_found(engine, tokens, CACHE_POOLS) == 0
    assert num_found(engine, tokens, HOST_POOLS) == 0


def test_flushing_empties_main_memory_too(engine: EngineThread, peer: DecodePeer) -> None:
    tokens = prompt(22, 130)
    deliver(engine, peer, next_room(), tokens)
    assert num_found(engine, tokens, HOST_POOLS) == 128
    engine.wait_until_idle()
    engine.flush()
    assert num_found(engine, tokens, HOST_POOLS) == 0
    assert deliver(engine, peer, next_room(), tokens).num_cached_tokens == 0
