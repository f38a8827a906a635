"""A forward begins while its prefix comes up from main memory: layers wait, and nothing is sent too early.

On a CPU copies are over at once. Here they are made layer by layer, each when a forward waits for it, and the
rest when the engine waits for their end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, page_keys
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.engine.prefix_scrub import PrefixScrub
from hisparse_pd.kernels.row_check import PageRows
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS
from hisparse_pd.prefill_node.host_tier import HOST_POOLS
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.prefill_node.scheduler import Chunk
from hisparse_pd.protocol.messages import Extent, RoomDone
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    all_delivered,
    assert_hint,
    deliver,
    engine_thread,
    next_room,
    prompt,
)

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I5]

PAGE = 16
NUM_PAGES = 28


class Copy:
    """A copy of token slots in all pools, with a verification behind it, and its end."""

    def __init__(self, pools: Sequence[tuple[Tensor, Tensor]], src_slots: Tensor, dst_slots: Tensor) -> None:
        self._pools, self._src_slots, self._dst_slots = pools, src_slots, dst_slots
        self.verify: Callable[[], object] = lambda: None
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        for src, dst in self._pools:
            dst[:, self._dst_slots] = src[:, self._src_slots]
        self.verify()
        self.is_over = True

    def bring(self, layer: int, num_layers: int) -> None:
        """Copy a layer of the pools that have ``num_layers``."""
        for src, dst in self._pools:
            if len(src) == num_layers:
                dst[layer, self._dst_slots] = src[layer, self._src_slots]


class SlowCopies:
    """Stands in for ``HostPages.copy_up``, for the verification behind it, and for ``LayerArrivals``."""

    def __init__(self, engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
        host = engine.engine._host_pages
        assert host is not None
        self._pools = tuple(zip(host.tensors, engine.memory.sent, strict=True))
        self._begin_check = engine.memory.begin_check
        self.copies: list[Copy] = []
        self._begins: Copy | None = None
        self.waits: list[tuple[int, int]] = []
        """The layers for which forwards have waited, each with the number of layers of its pool."""
        monkeypatch.setattr(host, "copy_up", self.copy_up)
        monkeypatch.setattr(engine.memory, "begin_check", self.begin_check)
        monkeypatch.setattr(engine.engine.runner, "_arrivals", self)

    def copy_up(
        self, host: Sequence[Extent], device: Sequence[Extent], *, behind: Callable[[], object]
    ) -> Copy:
        src_slots, dst_slots = (torch.from_numpy(extents_to_slots(tuple(slots))) for slots in (host, device))
        for _, pool in self._pools:
            pool[:, dst_slots] = 77  # what a forward reads that does not wait
        self._begins = Copy(self._pools, src_slots, dst_slots)
        behind()
        self.copies.append(self._begins)
        self._begins = None
        return self.copies[-1]

    def begin_check(self, rows: PageRows, page_size: int) -> Tensor:
        if self._begins is None:
            return self._begin_check(rows, page_size)
        found = torch.zeros(1, dtype=torch.int32)
        self._begins.verify = lambda: found.copy_(self._begin_check(rows, page_size))
        return found

    def wait(self, layer: int, num_layers: int) -> None:
        for copy in self.copies:
            if not copy.is_over:
                self.waits.append((layer, num_layers))
                copy.bring(layer, num_layers)


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineThread]:
    """An engine whose device has room for two prompts."""
    with engine_thread(
        tiny,
        tmp_path_factory.mktemp("prefill") / "front",
        kv_pool_tokens=NUM_PAGES * PAGE,
        host_cache_tokens=200 * PAGE,
    ) as engine:
        yield engine


def in_main_memory(engine: EngineThread, peer: DecodePeer, seed: int) -> list[int]:
    """Return a prompt whose 128 reusable tokens are in main memory alone."""
    tokens = prompt(seed, 130)
    deliver(engine, peer, next_room(), tokens)
    for other in (90, 91):
        deliver(engine, peer, next_room(), prompt(other, NUM_PAGES * PAGE - 20))
    prefixes, keys = engine.life.pages.prefixes, keys_of(tokens)
    engine.wait_until(lambda: prefixes.num_found(keys, HOST_POOLS) == 8, "the prompt to go down")
    assert engine.between_turns(lambda: prefixes.num_found(keys, CACHE_POOLS)) == 0
    return tokens


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    return page_keys(NO_ISOLATION, pack_token_ids(tokens), PAGE)


def test_a_forward_begins_while_its_prefix_arrives(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``deliver`` compares what arrives, bit by bit, and what is computed."""
    tokens = in_main_memory(engine, peer, 1)
    copies = SlowCopies(engine, monkeypatch)
    done = deliver(engine, peer, next_room(), tokens[:129] + prompt(2, 20))
    assert (done.num_cached_tokens, done.fetched.host) == (128, 128)
    kv, index = engine.memory.kv, engine.memory.index
    assert set(copies.waits) == {(layer, len(pool)) for pool in (kv, index) for layer in range(len(pool))}
    done = deliver(engine, peer, next_room(), tokens)
    assert (done.num_cached_tokens, done.fetched.host) == (128, 0)
    assert len(copies.copies) == 1


def test_others_go_ahead_of_a_prefix_that_arrives(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for its bytes in every layer."""
    tokens = in_main_memory(engine, peer, 3)
    copies = SlowCopies(engine, monkeypatch)
    first, second = next_room(), next_room()
    num_over: dict[int, int] = {}

    def before_run(batch: Sequence[tuple[PrefillRequest, Chunk]]) -> None:
        for request, _ in batch:
            num_over[request.room] = sum(copy.is_over for copy in copies.copies)

    monkeypatch.setattr(engine, "before_run", before_run)
    with engine.admission_paused():
        messages = peer.bootstrap_side_by_side({first: tokens, second: prompt(4, 30)})
        engine.wait_until(lambda: all(engine.has_room(room) for room in messages), "the rooms to wait")
    done = all_delivered(peer, 2)
    assert [room for room in engine.computed if room in messages] == [second, first]
    assert num_over == {second: 0, first: 0}
    assert done[first].fetched.host == 128
    peer.assert_has(messages[first])  # it may have the pages of the other one


@pytest.mark.I8
def test_a_forward_waits_for_no_more_copies_than_its_requests_need(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the prompts fills a forward, so the second one's copy begins behind the first one's forward."""
    prompts = [in_main_memory(engine, peer, 7), in_main_memory(engine, peer, 8)]
    num_chunk = engine.settings.chunked_prefill_size
    copies = SlowCopies(engine, monkeypatch)
    num_copies: dict[int, list[int]] = {}

    def before_run(batch: Sequence[tuple[PrefillRequest, Chunk]]) -> None:
        for request, _ in batch:
            num_copies.setdefault(request.room, []).append(len(copies.copies))

    monkeypatch.setattr(engine, "before_run", before_run)
    with engine.admission_paused():
        messages = peer.bootstrap_side_by_side(
            {next_room(): tokens[:128] + prompt(9, num_chunk + 1) for tokens in prompts}
        )
        first, second = messages
        engine.wait_until(lambda: all(engine.has_room(room) for room in messages), "the rooms to wait")
    done = all_delivered(peer, 2)
    assert num_copies == {first: [1], second: [2]}
    assert [done[room].fetched.host for room in messages] == [128, 128]
    peer.assert_has(messages[second])


@pytest.mark.I9
@pytest.mark.parametrize("position", [0, 70])
def test_a_request_whose_prefix_arrives_wrong_begins_anew(
    engine: EngineThread, peer: DecodePeer, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    """It sends nothing of what it computed behind the wrong row. The pages before that row are used."""
    tokens = in_main_memory(engine, peer, 5 + position)
    SlowCopies(engine, monkeypatch)
    host = engine.engine._host_pages
    assert host is not None
    room = next_room()
    num_before, num_wrong = (
        engine.life.counters["prompt_tokens_total"],
        engine.life.set_aside.num_found["host"],
    )
    with patch.object(PrefixScrub, "verify_next"):  # the scrub would find the row first
        found = engine.life.pages.prefixes.find(keys_of(tokens), HOST_POOLS)
        assert found is not None
        slot = int(extents_to_slots(found.prefix.extents(PoolKind.HOST))[position])
        host.kv[1, slot, 7] ^= 4
        message = peer.bootstrap(room, tokens)
        done = peer.expect(RoomDone)
    engine.settle()
    num_right = position // PAGE * PAGE
    assert done.num_cached_tokens == num_right
    assert engine.computed[room][0] == (128, 129)
    assert engine.computed[room][1][0] == num_right
    peer.assert_has(message)
    assert_hint(engine, peer, message, tokens)
    per_token = sum(len(pool) * pool.shape[2] for pool in (peer.kv_host, peer.index, peer.row_checks))
    assert done.num_bytes == 129 * per_token + peer.layout.slot_bytes, "each byte was sent once"
    assert engine.life.set_aside.num_found["host"] == num_wrong + 1
    (page,) = engine.life.set_aside.shown()
    assert (page.pool, page.start) == ("host", slot // PAGE * PAGE)
    assert engine.life.counters["prompt_tokens_total"] == num_before + 129
    assert done.times is not None
    assert min(done.times.queue_secs, done.times.prefill_secs) > 0
