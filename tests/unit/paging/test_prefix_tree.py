"""The tree of prefixes: what is found, shared, given up and joined, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hisparse_pd.core.paging.allocator import PoolIntegrityError
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.core.paging.prefix import Kinds, Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, page_keys
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import Room

pytestmark = pytest.mark.I2

PAGE = 4
HOST: Kinds = (PoolKind.HOST, PoolKind.INDEX)
DEVICE: Kinds = (PoolKind.DEVICE,)
Keys = tuple[PageKey, ...]


def keys_of(*token_ids: int) -> Keys:
    return tuple(page_keys(NO_ISOLATION, pack_token_ids(token_ids), PAGE))


def pages(*numbers: int) -> Keys:
    """The keys of pages whose tokens are all the same number."""
    return keys_of(*(number for number in numbers for _ in range(PAGE)))


class Node:
    """Pools and the tree over them. ``kinds``: where prefixes are."""

    def __init__(self, kinds: Kinds = HOST) -> None:
        self.kinds = kinds
        self.pools = Pools(SlotCounts(host=40, device=40, index=80, aux=2), PAGE)
        self.tree = PrefixTree(self.pools)

    def hold(self, keys: Keys, num_before: int = 0, users: Sequence[Prefix] = ()) -> None:
        """The pages of ``keys`` behind the first ``num_before``, which are held."""
        need = SlotCounts.of(self.kinds, (len(keys) - num_before) * PAGE)
        holding = self.pools.reserve(Room(1), need)
        self.tree.hold(holding, keys, self.kinds, num_before)
        self.pools.release(holding)
        self.tree.check_integrity(users)

    def num_held(self, keys: Keys) -> int:
        found = self.tree.find(keys, self.kinds)
        return found.num_pages if found else 0

    @property
    def taken(self) -> SlotCounts:
        return self.pools.totals - self.pools.free


@pytest.fixture(params=[HOST, DEVICE], ids=["host", "device"])
def node(request: pytest.FixtureRequest) -> Node:
    return Node(request.param)


@pytest.mark.I8
def test_neighbours_are_one_run_unless_something_tells_them_apart(node: Node) -> None:
    tree, kind, keys = node.tree, node.kinds[0], pages(*range(8))
    for num_pages in range(1, 9):  # a page a turn
        node.hold(keys[:num_pages], num_pages - 1)
        assert len(tree) == 1
    slots = extents_to_slots(tree.use(keys, node.kinds).extents(kind)).tolist()
    assert len(set(slots)) == 8 * PAGE
    part = tree.use(keys[:3], node.kinds)
    assert len(tree) == 2, "one uses the first part alone"
    whole = tree.use(keys, node.kinds)
    assert extents_to_slots(part.extents(kind)).tolist() == slots[: 3 * PAGE]
    tree.let_go(part)
    assert len(tree) == 2, "the first part was used later"
    for _ in range(2):
        tree.let_go(whole)
    assert len(tree) == 1
    tree.check_integrity([])
    assert extents_to_slots(tree.use(keys, node.kinds).extents(kind)).tolist() == slots
    tree.let_go(whole)
    node.hold((*keys[:5], b"another"), 5)
    assert len(tree) == 3, "two are behind the first part"
    tree.flush()
    tree.check_integrity([])
    assert (len(tree), node.pools.free) == (0, node.pools.totals)


@pytest.mark.I8
def test_what_was_left_beside_a_long_sequence_is_given_up_when_it_has_too_many_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hisparse_pd.core.paging.prefix_tree.MAX_RUNS", 4)
    node, keys = Node(), pages(*range(9))
    sides = [(*keys[:number], b"side %d" % number) for number in range(9)]
    for number in range(1, 7):  # an answer is left behind at the end of each page
        node.hold(keys[:number], number - 1)
        node.hold(sides[number], number)
        match = node.tree.find(keys[:number], HOST)
        assert match is not None
        assert match.num_pages == number
        assert len(list(match.prefix.chain())) <= 4
    left = [number for number in range(1, 7) if node.num_held(sides[number]) == number + 1]
    assert left == [4, 5, 6], "those left the longest ago are gone"
    users = [node.tree.use(sides[number], HOST) for number in (4, 5, 6)]
    holding = node.pools.reserve(Room(2), SlotCounts.of(HOST, PAGE))
    assert node.tree.hold(holding, keys[:7], HOST, 6) == 6, "somebody uses what is beside it"
    assert holding.num_slots(PoolKind.HOST) == PAGE
    assert [node.num_held(sides[number]) for number in (4, 5, 6)] == [5, 6, 7]
    node.tree.check_integrity(users)
    for user in users:
        node.tree.let_go(user)
    node.tree.check_integrity([])


def test_pages_behind_what_is_not_held_are_refused() -> None:
    node = Node()
    holding = node.pools.reserve(Room(2), SlotCounts(host=4, index=4))
    with pytest.raises(PoolIntegrityError, match="the pages before its own are not held"):
        node.tree.hold(holding, pages(9, 9), HOST, 1)
    with pytest.raises(ValueError, match="reach past the 4 token slots"):
        node.tree.hold(holding, pages(9, 9), HOST)


def test_the_least_recently_used_go_first_and_from_their_ends() -> None:
    node = Node()
    one, two = pages(1, 1, 1), pages(2, 2, 2)
    node.hold(one)
    node.hold(two)
    node.tree.make_room(node.pools.free + SlotCounts(host=PAGE))
    assert [node.num_held(keys) for keys in (one, two)] == [2, 3]
    node.tree.let_go(node.tree.use(one[:2], HOST))  # what is left of it is the more recent now
    node.tree.make_room(node.pools.free + SlotCounts(host=4 * PAGE))
    assert [node.num_held(keys) for keys in (one, two)] == [1, 0]
    assert (node.tree.num_evicted_tokens, len(node.tree)) == (20, 1)
    node.tree.check_integrity([])
    node.tree.flush()
    assert (node.pools.free, node.tree.num_evicted_tokens) == (node.pools.totals, 20)


def test_integrity_notices_a_user_that_was_lost() -> None:
    node = Node()
    node.hold(pages(1))
    prefix = node.tree.use(pages(1), HOST)
    node.tree.check_integrity([prefix])
    with pytest.raises(PoolIntegrityError, match="1 users counted, 0 known"):
        node.tree.check_integrity([])


def test_runs_that_become_one_while_room_is_made_for_them_are_brought_up_whole() -> None:
    """What is evicted for the first of two runs was all that kept it apart from the second."""
    node = Node()
    beside, read, other = pages(1, 2), pages(1, 3), pages(4)
    for keys, num_before in ((beside, 0), (read, 1), (other, 0)):
        node.hold(keys, num_before)
    prefix = node.tree.use(read, HOST)
    node.tree.mark_stored(prefix, 0)
    node.tree.let_go(prefix)
    node.tree.let_go(node.tree.use_stored(read, HOST))
    assert [run.is_down for run in prefix.chain()] == [True, True]
    node.tree.let_go(node.tree.use(other, HOST))
    rest = node.pools.reserve(Room(2), SlotCounts(index=node.pools.free.index))
    prefix = node.tree.use(read, HOST)
    (run,) = node.tree.bring_up(prefix)
    assert (run.pools, len(run.keys)) == (HOST, 2)
    assert (node.num_held(beside), node.num_held(other)) == (1, 0)
    node.tree.check_integrity([prefix])
    node.pools.release(rest)
    node.pools.check_integrity()


@pytest.mark.I9
def test_what_is_dropped_is_found_by_nobody_and_free_when_its_users_have_ended(node: Node) -> None:
    """Descendants are dropped with a prefix; ancestors and siblings are not."""
    kind = node.kinds[0]
    start, middle, end, beside = pages(1, 2), pages(1, 2, 3), pages(1, 2, 3, 4), pages(1, 2, 5)
    node.hold(start)
    first = node.tree.use(start, node.kinds)
    for keys in (middle, end, beside):
        node.hold(keys, 2, [first])
    used = node.tree.use(end, node.kinds)
    node.tree.drop(kind, node.tree.find(middle, node.kinds).prefix.extents(kind)[-1].start)  # type: ignore[union-attr]
    node.tree.check_integrity([first, used])
    assert [node.num_held(keys) for keys in (middle, end, beside)] == [2, 2, 3]
    assert used.is_dropped
    assert not first.is_dropped
    node.hold(middle, 2, [first, used])
    assert node.num_held(middle) == 3, "held anew, by who has it right"
    taken = node.taken
    node.tree.let_go(used)
    node.tree.check_integrity([first])
    assert (taken - node.taken)[kind] == 2 * PAGE
    node.tree.let_go(first)
    node.tree.drop(kind, 39)
    node.tree.flush()
    node.tree.check_integrity([])
    assert node.pools.free == node.pools.totals


def test_copies_of_held_pages_stay_with_the_request_whose_writes_read_them() -> None:
    node, keys = Node(DEVICE), pages(1, 2, 3)
    node.hold(keys[:2])
    holding = node.pools.reserve(Room(2), SlotCounts.of(DEVICE, 3 * PAGE))
    own = extents_to_slots(holding[PoolKind.DEVICE]).tolist()
    assert node.tree.hold(holding, keys, DEVICE, keeps_copies=True) == 3
    assert extents_to_slots(holding[PoolKind.DEVICE]).tolist() == own[: 2 * PAGE]
    node.pools.check_integrity({Stage.LANDING: 1, Stage.HELD: len(node.tree)})
