"""Prefill engines on a real Mooncake Store: what they share, a restart, and the loss of its master.

``deliver`` compares all rows that a decode node gets with those that are computed, bit by bit. What a store
does wrong is in ``tests/unit/prefill_node/test_store.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from hisparse_pd.prefill_node.store_tier import StoreTier
from hisparse_pd.transfer.page_store import MooncakeStore, Pieces, Result, StoreError
from tests.mooncake_master import Master
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    all_delivered,
    decode_peer,
    deliver,
    engine_thread,
    next_room,
    prompt,
)
from tests.waiting import NEVER_SECS, WAIT_SECS, wait_until

pytestmark = [pytest.mark.I1, pytest.mark.I5, pytest.mark.I7]

PAGE = 16
LENT_GIB = 1 / 64


class Memory:
    """Memory that a store can register."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = np.zeros(num_bytes, np.uint8)

    @property
    def nbytes(self) -> int:
        return self.bytes.nbytes

    def data_ptr(self) -> int:
        return int(self.bytes.ctypes.data)

    def is_contiguous(self) -> bool:
        return True

    def pieces(self, *sizes: int) -> Pieces:
        starts = itertools.accumulate(sizes[:-1], initial=self.data_ptr())
        return Pieces(list(starts), list(sizes))


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    master = Master(tmp_path_factory.mktemp("master"))
    yield master
    master.kill()


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Engines wait for the store as long as it takes, and try again soon after an error."""
    with (
        patch.object(StoreTier, "_wait_secs", lambda self, num_pages: NEVER_SECS),
        patch("hisparse_pd.prefill_node.store_backoff.LONGEST_PAUSE_SECS", 0.0),
        patch("hisparse_pd.transfer.page_store.ANSWER_SECS", WAIT_SECS),
    ):
        yield


class Node:
    """A prefill engine on the store, with a decode node that is registered."""

    def __init__(self, engine: EngineThread, peer: DecodePeer) -> None:
        self.engine = engine
        self.peer = peer
        self.is_closed = False
        peer.register()

    @property
    def tier(self) -> StoreTier:
        tier = self.engine.life.pages.tier.store_tier
        assert tier is not None
        return tier

    def deliver(self, seed: int, num_tokens: int) -> int:
        """Deliver a prompt. Returns how many of its tokens were not computed."""
        done = deliver(self.engine, self.peer, next_room(), prompt(seed, num_tokens))
        self.engine.wait_until_idle()
        self.engine.wait_until(lambda: self.tier.writes.num_queued_pages == 0, "the pages to be written")
        return done.num_cached_tokens

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.engine.close()
        threads = self.engine.engine._store_threads
        assert threads is not None
        store = threads._store
        assert isinstance(store, MooncakeStore)
        store._client.close()  # which the end of the process does otherwise
        self.peer.close()


@pytest.fixture(scope="module")
def start(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, master: Master
) -> Iterator[Callable[[float], Node]]:
    """Return a function that starts a node, which lends so many GiB to the store."""
    directory, numbers = tmp_path_factory.mktemp("store"), itertools.count()
    with ExitStack() as nodes:

        def begin(kv_store_gib: float) -> Node:
            engine = engine_thread(
                tiny_checkpoint("glm"),
                directory / f"{next(numbers)}",
                host_cache_tokens=60 * PAGE,
                kv_store=master.address,
                kv_store_gib=kv_store_gib,
            ).__enter__()
            node = Node(engine, decode_peer(engine).__enter__())
            nodes.callback(node.close)
            node.engine.wait_until(lambda: node.tier.is_connected, "the store's connection")
            return node

        yield begin


@pytest.mark.slow
def test_nodes_share_what_they_compute_come_back_warm_and_outlive_the_store(
    start: Callable[[float], Node], master: Master
) -> None:
    keeps, first = start(LENT_GIB), start(0)
    assert first.deliver(1, 150) == 0
    assert first.tier.writes.num_put_tokens == 144
    assert keeps.deliver(1, 150) == 144
    assert keeps.tier.num_got_tokens == 144
    assert keeps.deliver(2, 150) == 0
    first.close()
    again = start(0)
    assert again.deliver(1, 150) == 144
    assert again.deliver(2, 150) == 144
    for node in (keeps, again):
        assert sum(node.tier.num_failures.values()) == 0
        assert node.engine.life.set_aside.num_found["store"] == 0

    # The master dies while both are at work.
    again.engine.before_run = keeps.engine.before_run = lambda batch: master.kill()
    for node, seeds in ((keeps, (3, 4)), (again, (4, 5))):
        node.peer.bootstrap_side_by_side({next_room(): prompt(seed, 150) for seed in seeds})
    for node in (keeps, again):
        all_delivered(node.peer, 2)
    assert keeps.deliver(6, 150) == again.deliver(7, 150) == 0
    keeps.engine.wait_until(lambda: not keeps.tier.is_connected, "the loss to be noticed")
    again.engine.before_run = keeps.engine.before_run = lambda batch: None

    # It is started again, and knows nothing. Mooncake's clients come back by themselves.
    master.start()
    fresh = itertools.count(100)

    def is_back() -> bool:
        before = keeps.tier.writes.num_put_tokens
        keeps.deliver(next(fresh), 50)
        return keeps.tier.writes.num_put_tokens > before

    wait_until(is_back, "the store to take pages again")
    assert keeps.deliver(8, 150) == 0
    assert again.deliver(8, 150) == 144


def test_the_client_of_mooncake(master: Master) -> None:
    """Its codes are translated."""
    memory = Memory(4 << 20)
    store = MooncakeStore(master.address, "127.0.0.1", memory=[memory], lent_bytes=16 << 20)
    with pytest.raises(StoreError, match=r"not connected to the store at 127\.0\.0\.1:"):
        store.exist(["a"])
    store.connect()
    memory.bytes[:100] = 7
    object_a = memory.pieces(60, 40)
    assert store.put(["a"], [object_a]) == [Result.DONE]
    memory.bytes[:100] = 8
    assert store.put(["a"], [object_a]) == [Result.DONE], "what is there stays"
    assert store.exist(["a", "b"]) == [True, False]
    assert store.get(["a", "b"], [object_a, object_a]) == [Result.DONE, Result.ABSENT]
    assert set(memory.bytes[:100]) == {7}
    assert store.get(["a"], [memory.pieces(30)]) == [Result.FAILED], "it is longer"
    store.remove(["a", "b"])
    assert store.exist(["a"]) == [False]
    big = memory.pieces(4 << 20)
    assert Result.FULL in store.put([str(n) for n in range(8)], [big] * 8)
    store.close()
    store._client.close()


def test_a_master_that_does_not_answer_is_not_called(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's call would hold the interpreter's lock until it answers."""
    monkeypatch.setattr("hisparse_pd.transfer.page_store.ANSWER_SECS", 0.5)
    with master.stopped(), pytest.raises(StoreError, match=r"no answer from the store at .*: timed out"):
        MooncakeStore(master.address, "127.0.0.1").connect()
    with pytest.raises(StoreError, match=r"no answer from the store at 127\.0\.0\.1:1: .*refused"):
        MooncakeStore("127.0.0.1:1", "127.0.0.1").connect()
