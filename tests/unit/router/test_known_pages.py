"""What the router knows of pages: from the nodes' events, and from the names in decode nodes' answers."""

from __future__ import annotations

import msgspec
import pytest

from hisparse_pd.protocol.kv_events import (
    AllBlocksCleared,
    BlockChange,
    BlockRemoved,
    BlockStored,
    block_changes_decoder,
    encode_batch,
)
from hisparse_pd.router import known_pages
from hisparse_pd.router.known_pages import KnownPages, PageName, Place
from hisparse_pd.router.nodes import Node, NodeKind, NodePool, Pair
from hisparse_pd.serving.http.page_names import PageNames
from hisparse_pd.serving.http.prefixes import BLOCK_BYTES

GPU, CPU = "GPU", "CPU_PINNED"
PAGE = 64


def stored(*hashes: int, medium: str = GPU) -> list[BlockChange]:
    event = BlockStored(list(hashes), None, [1] * len(hashes), 1, medium=medium)
    return block_changes_decoder.decode(encode_batch(1.0, [event], 0)).events


def removed(*hashes: int, medium: str = GPU) -> list[BlockChange]:
    return [BlockRemoved(list(hashes), medium)]


# --- the table -----------------------------------------------------------------------------------------


@pytest.fixture
def known() -> KnownPages[str]:
    known: KnownPages[str] = KnownPages()
    known.follow("a", PAGE)
    known.follow("b", PAGE)
    return known


def holders(known: KnownPages[str], block: int) -> list[tuple[str, int]]:
    return [(node, rank) for node, rank in known.holders(PageName(PAGE, block))]


def test_pages_are_on_the_ranks_that_say_so(known: KnownPages[str]) -> None:
    known.change(Place("a", 0), stored(1, 2))
    known.change(Place("a", 1), stored(2, 3))
    known.change(Place("b", 0), stored(2))
    assert holders(known, 2) == [("a", 0), ("a", 1), ("b", 0)]
    known.change(Place("a", 1), removed(2, 9))
    assert holders(known, 2) == [("a", 0), ("b", 0)]
    known.change(Place("a", 0), [AllBlocksCleared()])
    assert (holders(known, 1), holders(known, 3)) == ([], [("a", 1)])
    known.forget(Place("b", 0))
    assert holders(known, 2) == []
    assert (known.num_pages("a"), known.num_pages("b")) == (1, 0)


def test_a_page_is_there_until_its_last_tier_lets_go(known: KnownPages[str]) -> None:
    known.change(Place("a", 0), stored(1) + stored(1, medium=CPU))
    known.change(Place("a", 0), removed(1))
    assert holders(known, 1) == [("a", 0)]
    known.change(Place("a", 0), removed(1))
    assert holders(known, 1) == [("a", 0)]
    known.change(Place("a", 0), removed(1, medium=CPU))
    assert holders(known, 1) == []


def test_a_node_that_invents_tiers_costs_little(known: KnownPages[str]) -> None:
    known.change(Place("a", 0), [event for n in range(1000) for event in stored(1, medium=f"{n}")])
    assert len(known._pages[Place("a", 0)][1]) == known_pages.MAX_TIERS
    for medium in ("0", "1", "2", "3"):
        assert holders(known, 1) == [("a", 0)]
        known.change(Place("a", 0), removed(1, medium=medium))
    assert holders(known, 1) == []
    with pytest.raises(msgspec.ValidationError, match=r"length <= 64"):
        stored(1, medium="x" * 65)


def test_what_a_node_says_late_is_nothing(known: KnownPages[str]) -> None:
    known.change(Place("a", 0), stored(1))
    known.leave("a")
    known.change(Place("a", 0), stored(2))
    assert (holders(known, 1), holders(known, 2)) == ([], [])
    assert known.are_wanted
    known.leave("b")
    assert not known.are_wanted


@pytest.mark.I8
def test_the_number_of_pages_is_bounded(known: KnownPages[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_pages, "MAX_PAGES", 3)
    known.change(Place("a", 0), stored(1, 2, 3, 4))
    assert known.num_pages("a") == 3
    known.change(Place("a", 0), stored(3, medium=CPU) + removed(3) + removed(1) + stored(4))
    assert [block for block in (1, 2, 3, 4) if holders(known, block)] == [2, 3, 4]


@pytest.mark.I8
def test_the_number_of_names_is_bounded(known: KnownPages[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_pages, "MAX_KEYS", 3)
    names = PageNames(PAGE, 4 * PAGE, ((1, 11), (2, 12), (4, 14)))
    keys = [b"a", b"b", b"c", b"d"]
    known.learn(keys, 4 * BLOCK_BYTES, names)
    assert [known.name_of(key, "a") for key in keys] == [
        PageName(PAGE, 11),
        PageName(PAGE, 12),
        PageName(PAGE, 12),
        None,
    ], "the end is forgotten first"


def test_names_are_for_nodes_with_pages_of_this_size(known: KnownPages[str]) -> None:
    known.follow("other", PAGE // 2)
    known.learn([b"key"], BLOCK_BYTES, PageNames(PAGE, PAGE, ((1, 5),)))
    assert known.name_of(b"key", "a") == PageName(PAGE, 5)
    assert known.name_of(b"key", "other") is None
    assert known.name_of(b"key", "not followed") is None


# --- the choice ----------------------------------------------------------------------------------------

TURN = b"x" * 4 * BLOCK_BYTES
LONGER = TURN + b"y" * 2 * BLOCK_BYTES
NAMES = PageNames(PAGE, 8 * PAGE, ((1, 101), (2, 102), (4, 104), (8, 108)))
"""The names of TURN, which has two pages a block."""
LONGER_NAMES = PageNames(PAGE, 12 * PAGE, ((1, 101), (2, 102), (4, 104), (8, 108), (12, 112)))


def silent(num_prefill: int, num_ranks: int = 1) -> NodePool:
    """Make a pool of healthy nodes that publish nothing."""
    prefill = [Node.from_url(NodeKind.PREFILL, f"http://p:{i}") for i in range(1, num_prefill + 1)]
    pool = NodePool(prefill, [Node.from_url(NodeKind.DECODE, "http://d:1")], "cache_aware")
    for node in pool.nodes:
        pool.mark_healthy(node)
        pool.report_load(node, [0] * num_ranks)
    return pool


def following(num_prefill: int, num_ranks: int = 1) -> NodePool:
    pool = silent(num_prefill, num_ranks)
    for node in pool.of_kind(NodeKind.PREFILL):
        pool.known.follow(node, PAGE)
    return pool


def ask(pool: NodePool, prompt: bytes, names: PageNames | None = None) -> Node:
    """Place a request. Returns the prefill node; ``names`` are what the decode node answers."""
    pair = pool.pick(prompt=prompt)
    if names is not None:
        pool.learn(pair, prompt, names)
    return pair.prefill


def others(pool: NodePool, node: Node) -> list[Node]:
    return [each for each in pool.of_kind(NodeKind.PREFILL) if each is not node]


def place_of(pair: Pair, num_ranks: int) -> Place[Node]:
    return Place(pair.prefill, pair.room % num_ranks)


def test_a_prompt_goes_where_its_pages_still_are() -> None:
    pool = following(3)
    first = ask(pool, TURN, NAMES)
    pool.known.change(Place(first, 0), stored(101, 102, 104, 108))
    assert [ask(pool, LONGER) for _ in range(3)] == [first] * 3


def test_a_prompt_does_not_go_where_its_pages_were() -> None:
    """Without events it would: ``test_nodes.py``."""
    pool = following(3)
    first = ask(pool, TURN, NAMES)
    pool.known.change(Place(first, 0), stored(101, 102, 104, 108))
    pool.known.change(Place(first, 0), removed(101, 102, 104, 108))
    assert ask(pool, LONGER) is not first, "it is the next one's turn"


def test_another_node_that_has_the_pages_is_as_good() -> None:
    pool = following(3)
    first = ask(pool, TURN, NAMES)
    _, third = others(pool, first)
    pool.known.change(Place(third, 0), stored(101, 102, 104, 108))
    assert ask(pool, LONGER) is third


def test_a_shorter_beginning_is_better_than_none() -> None:
    pool = following(3)
    first = ask(pool, LONGER, LONGER_NAMES)
    _, third = others(pool, first)
    pool.known.change(Place(third, 0), stored(101, 102))
    assert ask(pool, LONGER) is third


def test_a_prompt_that_is_being_computed_counts_as_there() -> None:
    """Its pages have no names before the decode node answers."""
    pool = following(3)
    first = ask(pool, TURN)
    assert [ask(pool, TURN) for _ in range(3)] == [first] * 3


def test_nodes_that_publish_nothing_are_guessed_at() -> None:
    pool = silent(3)
    first = ask(pool, TURN, NAMES)
    pool.known.follow(others(pool, first)[0], PAGE)
    assert [ask(pool, LONGER, NAMES) for _ in range(3)] == [first] * 3


def test_load_decides_between_nodes_that_have_the_pages_and_beside_them() -> None:
    pool = following(3)
    first = ask(pool, TURN, NAMES)
    second, third = others(pool, first)
    for node in (second, third):
        pool.known.change(Place(node, 0), stored(101, 102, 104, 108))
    pool.report_load(second, [2])
    pool.report_load(third, [1])
    assert ask(pool, LONGER + b"a") is third
    for node in (second, third):
        pool.report_load(node, [50])
    assert ask(pool, LONGER + b"b") is first


def test_ranks_have_pages_of_their_own() -> None:
    pool = following(2, num_ranks=4)
    pair = pool.pick(prompt=TURN)
    pool.learn(pair, TURN, NAMES)
    other = Place(pair.prefill, (pair.room + 1) % 4)
    pool.known.change(other, stored(101, 102, 104, 108))
    assert [place_of(pool.pick(prompt=LONGER), 4) for _ in range(3)] == [other] * 3


def test_a_node_that_is_gone_has_nothing() -> None:
    pool = following(2)
    first = ask(pool, TURN, NAMES)
    pool.known.change(Place(first, 0), stored(101, 102, 104, 108))
    pool.mark_unhealthy(first, "gone")
    pool.mark_healthy(first)
    assert pool.known.num_pages(first) == 0
    pool.known.follow(first, PAGE)
    pool.report_load(first, [5])
    assert ask(pool, LONGER) is not first
