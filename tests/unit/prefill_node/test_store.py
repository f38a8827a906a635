"""What a prefill node has computed comes back from the cluster's store: on another node, and after a restart.

The engines are real, the store is ``MemoryStore``: it lies, is full, loses objects, stops. Mooncake Store
itself is in ``tests/integration/test_store.py``, and histories are in ``tests/property/test_host_tier.py``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias
from unittest.mock import patch

import msgspec
import pytest

from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind, Stage
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, page_keys, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.prefill_node.host_tier import HOST_POOLS
from hisparse_pd.prefill_node.page_objects import LAYOUT, namespace_of
from hisparse_pd.prefill_node.read_quarantine import QUARANTINE_SECS
from hisparse_pd.prefill_node.store_tier import StoreTier
from hisparse_pd.protocol.messages import FetchedTokens
from tests.unit.prefill_node.memory_store import MemoryStore
from tests.unit.prefill_node.support import (
    DecodePeer,
    EngineThread,
    decode_peer,
    deliver,
    engine_thread,
    next_room,
    prompt,
)
from tests.waiting import NEVER_SECS

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I5]

PAGE = 16


class Node:
    """A prefill engine on the store, with a decode node that is registered."""

    def __init__(self, engine: EngineThread, peer: DecodePeer) -> None:
        self.engine = engine
        self.peer = peer
        peer.register()

    @property
    def tier(self) -> StoreTier:
        tier = self.engine.life.pages.tier.store_tier
        assert tier is not None
        return tier

    def deliver(self, tokens: Sequence[int]) -> int:
        """Deliver a prompt, compare all that arrives, and return how many tokens were not computed."""
        done = deliver(self.engine, self.peer, next_room(), tokens)
        self.engine.wait_until_idle()
        self.engine.wait_until(lambda: self.num_under_way == 0, "the pages to be written")
        return done.num_cached_tokens

    @property
    def num_under_way(self) -> int:
        """Copies, reads and pages to be written."""
        return self.engine.life.pages.tier.num_landing + self.tier.writes.num_queued_pages

    def forget(self) -> None:
        """Flush all that this node has, as a restart would."""
        self.engine.wait_until_idle()
        self.engine.wait_until(lambda: self.num_under_way == 0, "the store's threads")
        self.engine.flush()

    def begin_anew(self) -> None:
        """Forget everything, counters and pauses too."""
        self.forget()
        tier, set_aside = self.tier, self.engine.life.set_aside
        tier.writes.num_put_tokens = tier.num_got_tokens = tier.num_late = tier.writes.num_dropped_pages = 0
        tier.num_failures.clear()
        tier._backoff.reset()
        tier._clock = time.monotonic
        set_aside.num_found.update(dict.fromkeys(set_aside.num_found, 0))


Start: TypeAlias = Callable[..., Node]


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Nodes wait for the store as long as it takes, and leave it alone for good after an error."""
    with (
        patch.object(StoreTier, "_wait_secs", lambda self, num_pages: NEVER_SECS),
        patch("hisparse_pd.prefill_node.store_backoff.FIRST_PAUSE_SECS", NEVER_SECS),
        patch("hisparse_pd.prefill_node.store_backoff.LONGEST_PAUSE_SECS", NEVER_SECS),
    ):
        yield


@pytest.fixture(scope="module")
def start(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, store: MemoryStore, patient: None
) -> Iterator[Start]:
    """Return a function that starts a node on the store."""
    directory = tmp_path_factory.mktemp("store")
    numbers = itertools.count()
    with ExitStack() as nodes:

        def begin(**options: object) -> Node:
            settings = {"host_cache_tokens": 60 * PAGE, "kv_store": "127.0.0.1:1", **options}
            with patch("hisparse_pd.prefill_node.engine.MooncakeStore", lambda *_, **__: store):
                engine = nodes.enter_context(engine_thread(tiny, directory / f"{next(numbers)}", **settings))
            return Node(engine, nodes.enter_context(decode_peer(engine)))

        yield begin


@pytest.fixture(scope="module")
def both(start: Start) -> tuple[Node, Node]:
    return start(), start()


@pytest.fixture
def pair(both: tuple[Node, Node], store: MemoryStore) -> Iterator[tuple[Node, Node]]:
    """Two nodes that know nothing, on an empty store."""
    store.reset()
    for node in both:
        node.begin_anew()
    yield both
    store.goes_on.set()
    for node in both:
        node.forget()
        node.engine.assert_whole()


@pytest.fixture
def node(start: Start, store: MemoryStore) -> Iterator[Node]:
    """A node of its own for a test that leaves traces: its main memory has 20 pages, its device 12."""
    store.reset()
    node = start(host_cache_tokens=20 * PAGE, kv_pool_tokens=12 * PAGE)
    yield node
    store.goes_on.set()
    node.engine.close()
    assert node.engine.life.pages.tier.store_tier is not None


def names(node: Node, tokens: Sequence[int]) -> list[str]:
    threads = node.engine.engine._store_threads
    assert threads is not None
    keys = page_keys(NO_ISOLATION, pack_token_ids(tokens), PAGE)
    return [threads._objects.name(key) for key in keys]


def test_one_node_has_what_another_one_computed(pair: tuple[Node, Node], store: MemoryStore) -> None:
    """``deliver`` compares KV, indexer keys and checks with what is computed, bit by bit."""
    first, second = pair
    tokens = prompt(1, 150)
    assert first.deliver(tokens) == 0
    assert len(store.objects) == 9
    assert second.deliver(tokens) == 144
    assert second.tier.num_got_tokens == 144
    assert second.deliver(tokens[:100] + prompt(2, 60)) == 96, "it is on the device now"
    assert second.tier.num_got_tokens == 144
    assert second.engine.life.set_aside.num_found["store"] == 0
    counters = second.engine.next_stats().counters
    assert counters["store_got_tokens_total"] == 144
    assert counters['store_bytes_total{direction="get"}'] == 9 * len(next(iter(store.objects.values())))


def test_a_node_that_forgot_everything_is_warm(pair: tuple[Node, Node], store: MemoryStore) -> None:
    """Flushing empties the node's own tiers; the store keeps its objects."""
    node, _ = pair
    tokens = prompt(3, 150)
    node.deliver(tokens)
    node.forget()
    assert node.deliver(tokens) == 144
    assert node.tier.writes.num_put_tokens == 144, "nothing is written twice"


def test_the_beginning_is_here_and_the_rest_in_the_store(pair: tuple[Node, Node]) -> None:
    first, second = pair
    tokens = prompt(4, 150)
    second.deliver(tokens[:70])
    first.deliver(tokens)
    done = deliver(second.engine, second.peer, next_room(), tokens)
    assert (done.num_cached_tokens, done.fetched) == (144, FetchedTokens(host=0, storage=144 - 64))
    assert second.tier.num_got_tokens == 144 - 64


def test_the_beginning_is_in_main_memory_and_the_rest_in_the_store(
    both: tuple[Node, Node], node: Node
) -> None:
    """The node's device has room for one of both prompts."""
    tokens = prompt(7, 150)
    node.deliver(tokens[:70])
    both[0].begin_anew()
    both[0].deliver(tokens)
    node.deliver(prompt(8, 180))
    done = deliver(node.engine, node.peer, next_room(), tokens)
    assert (done.num_cached_tokens, done.fetched) == (144, FetchedTokens(host=64, storage=144 - 64))
    node.engine.wait_until_idle()
    both[0].begin_anew()


def test_isolated_prompts_share_nothing_in_the_store(pair: tuple[Node, Node]) -> None:
    first, second = pair
    tokens = prompt(5, 100)
    first.deliver(tokens)
    done = deliver(second.engine, second.peer, next_room(), tokens, root=root_of("a tenant's"))
    assert done.num_cached_tokens == 0


@pytest.mark.I9
@pytest.mark.parametrize(
    "what",
    ["kv", "seal", *(pytest.param(each, marks=pytest.mark.slow) for each in ("row check", "indexer key"))],
)
def test_a_lie_of_the_store_is_computed_anew_and_removed(
    pair: tuple[Node, Node], store: MemoryStore, what: str
) -> None:
    first, second = pair
    tokens = prompt(6, 150)
    first.deliver(tokens)
    name = names(first, tokens)[4]
    spec = first.engine.spec
    kv_bytes = spec.num_kv_layers * PAGE * spec.item_bytes
    offset = {"seal": 0, "kv": 20, "indexer key": 20 + kv_bytes, "row check": -1}[what]
    lie = bytearray(store.objects[name])
    lie[offset] ^= 4
    store.objects[name] = bytes(lie)
    assert second.deliver(tokens) == 64, "the pages before it are used"
    assert second.engine.life.set_aside.num_found == {
        "cached": 0,
        "host": 0,
        "store": 1,
        "decode": 0,
        "scrub": 0,
    }
    assert not second.engine.life.set_aside.shown(), "the memory here is not to blame"
    assert store.removed == [name]
    assert store.objects[name] != bytes(lie), "what was computed anew is there"
    second.forget()
    assert second.deliver(tokens) == 144


@pytest.mark.I9
def test_the_page_of_another_prompt_is_not_taken_for_this_one(
    pair: tuple[Node, Node], store: MemoryStore
) -> None:
    """Its row checks match: layer and position are the same."""
    first, second = pair
    tokens, other = prompt(7, 100), prompt(8, 100)
    first.deliver(tokens)
    first.deliver(other)
    store.objects[names(first, tokens)[1]] = store.objects[names(first, other)[1]]
    assert second.deliver(tokens) == PAGE
    assert second.engine.life.set_aside.num_found["store"] == 1


@pytest.mark.I9
def test_a_read_that_brings_nothing_is_not_taken_for_a_page(node: Node, store: MemoryStore) -> None:
    """Main memory still has the former rows of the slots, whose checks would match."""
    tokens = prompt(9, 100)
    node.deliver(tokens)
    node.forget()
    for name in names(node, tokens):
        store.objects[name] = b""
    assert node.deliver(tokens) == 0
    assert node.engine.life.set_aside.num_found["store"] == 1


def test_objects_that_are_lost_after_they_were_found_are_computed(
    pair: tuple[Node, Node], store: MemoryStore
) -> None:
    first, second = pair
    tokens = prompt(10, 150)
    first.deliver(tokens)
    store.before_get = lambda keys: store.objects.clear()
    assert second.deliver(tokens) == 0
    assert sum(second.tier.num_failures.values()) == 0
    assert second.tier.num_quarantined == 0


@pytest.mark.I7
def test_slots_of_a_failed_read_are_not_used_until_nothing_can_land(
    pair: tuple[Node, Node], node: Node, store: MemoryStore
) -> None:
    pair[0].deliver(prompt(11, 150))
    store.fails_get = True
    assert node.deliver(prompt(11, 150)) == 0
    assert (node.tier.num_failures["get"], node.tier.num_quarantined) == (1, 1)
    life = node.engine.life
    assert life.pages.pools.used(Stage.QUARANTINED).host == 144
    assert (life.pages.pools.free + life.pages.prefixes.unused).host == life.pages.pools.totals.host - 144
    node.tier._clock = lambda: time.monotonic() + QUARANTINE_SECS
    node.engine.wait_until(lambda: node.tier.num_quarantined == 0, "the slots to be free")


@pytest.mark.I7
def test_a_full_store_costs_hits_alone(pair: tuple[Node, Node], store: MemoryStore) -> None:
    node, _ = pair
    store.is_full = True
    node.deliver(prompt(12, 150))
    assert (node.tier.writes.num_put_tokens, node.tier.num_failures["full"]) == (0, 1)
    store.is_full = False
    node.deliver(prompt(13, 150))
    assert node.tier.writes.num_put_tokens == 144


@pytest.mark.I7
def test_a_lost_store_is_left_alone_for_a_while(pair: tuple[Node, Node], store: MemoryStore) -> None:
    node, _ = pair
    store.is_lost = True
    tokens = prompt(14, 150)
    assert node.deliver(tokens) == 0
    assert node.tier.num_failures["look_up"] == 1
    assert node.tier.writes.num_dropped_pages == 9, "they are not written, either"
    assert node.engine.next_stats().gauges["store_connected"] == 0
    store.is_lost = False
    node.tier._clock = lambda: time.monotonic() + NEVER_SECS
    assert node.deliver(prompt(15, 150)) == 0
    assert node.tier.writes.num_put_tokens == 144
    assert node.engine.next_stats().gauges["store_connected"] == 1


@pytest.mark.I7
def test_a_store_that_stopped_is_not_waited_for(pair: tuple[Node, Node], store: MemoryStore) -> None:
    """The request goes on at its deadline, later ones do not ask, and what comes late does no harm."""
    first, node = pair
    tokens = prompt(16, 150)
    first.deliver(tokens)
    store.goes_on.clear()
    with patch.object(StoreTier, "_wait_secs", lambda self, num_pages: 0.1):
        done = deliver(node.engine, node.peer, next_room(), tokens)
        assert done.num_cached_tokens == 0
        assert node.tier.num_late == 1
        deliver(node.engine, node.peer, next_room(), prompt(17, 150))
        assert node.tier.num_late == 1
    node.engine.wait_until_idle()
    store.goes_on.set()
    node.engine.wait_until(
        lambda: node.tier.num_landing + node.tier.writes.num_queued_pages == 0, "the late answers"
    )
    node.engine.between_turns(node.engine.life.check_integrity)


def test_more_than_the_bound_is_not_written(node: Node, store: MemoryStore) -> None:
    store.goes_on.clear()
    tokens = prompt(18, 150)
    with patch.object(StoreTier, "_wait_secs", lambda self, num_pages: 0.0):
        deliver(node.engine, node.peer, next_room(), tokens)
        node.engine.wait_until(
            lambda: node.tier.writes.num_queued_pages, "the prompt to come from the device"
        )
    assert (node.tier.writes.num_queued_pages, node.tier.writes.num_dropped_pages) == (5, 4)
    store.goes_on.set()
    node.engine.wait_until(lambda: node.tier.writes.num_put_tokens == 5 * PAGE, "the others to be written")
    assert sorted(store.objects) == sorted(names(node, tokens)[:5])


def test_an_engine_that_ends_takes_its_memory_back(node: Node, store: MemoryStore) -> None:
    node.deliver(prompt(19, 150))
    node.engine.close()
    assert store.num_closed == 1


def test_a_page_that_was_not_verified_yet_is_not_held_against_its_memory(
    pair: tuple[Node, Node], node: Node, store: MemoryStore
) -> None:
    """A row that changes in main memory after a page of the store was verified is counted as the memory's."""
    first, second = pair[0], node
    tokens = prompt(20, 150)
    first.deliver(tokens)
    assert second.deliver(tokens) == 144
    for seed in (21, 22):
        second.deliver(prompt(seed, 150))
    keys = page_keys(NO_ISOLATION, pack_token_ids(tokens), PAGE)
    found = second.engine.life.pages.prefixes.find(keys, HOST_POOLS)
    pages = second.engine.engine._host_pages
    assert found is not None
    assert pages is not None
    with patch("hisparse_pd.engine.prefix_scrub.PrefixScrub.verify_next"):  # it would find the row first
        pages.kv[1, int(extents_to_slots(found.prefix.extents(PoolKind.HOST))[3]), 0] ^= 1
        assert second.deliver(tokens) == 0
    assert second.engine.life.set_aside.num_found["host"] == 1
    assert store.removed == []


def test_keys_name_everything_that_bytes_depend_on(pair: tuple[Node, Node]) -> None:
    node = pair[0]
    geometry = node.engine.engine.geometry
    names_of = {
        namespace_of(geometry, ["cpu"]),
        namespace_of(geometry, ["NVIDIA H200"]),
        *(
            namespace_of(changed, ["cpu"])
            for changed in (
                msgspec.structs.replace(geometry, **{field: other})
                for field, other in (
                    ("model_fingerprint", "another"),
                    ("dtype", "fp8_e4m3"),
                    ("num_layers", geometry.num_layers + 1),
                    ("item_bytes", geometry.item_bytes + 4),
                    ("index_item_bytes", geometry.index_item_bytes + 4),
                    ("page_size", geometry.page_size * 2),
                    ("num_draft_layers", 1 - geometry.num_draft_layers),
                    ("has_row_checks", not geometry.has_row_checks),
                )
            )
        ),
    }
    with patch("hisparse_pd.prefill_node.page_objects.LAYOUT", LAYOUT + 1):
        names_of.add(namespace_of(geometry, ["cpu"]))
    assert len(names_of) == 11
    (name,) = {name.rpartition("/")[0] for name in names(node, prompt(23, 40))}
    assert name.startswith("hisparse-pd/")
