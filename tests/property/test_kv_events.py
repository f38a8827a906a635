"""A subscriber of KV events knows exactly the pages that a tree has, in each tier, after any history.

``test_prefix_tree.py`` and ``test_host_tier.py`` ask the same of the histories that they make; in those here
many pages come and go.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import Kinds, Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, page_keys, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import Room
from tests.event_follower import TreeFollower
from tests.examples import num_examples

PAGE_SIZE = 2
NUM_PAGES = 16
TIERS: tuple[Kinds, ...] = ((PoolKind.DEVICE,), (PoolKind.HOST, PoolKind.INDEX))
ROOTS = (NO_ISOLATION, NO_ISOLATION, NO_ISOLATION, root_of("salt"))


class History:
    """Requests of few prompts, whose pages are in the tree while they run and when they have ended."""

    def __init__(self, drawn: random.Random) -> None:
        self._drawn = drawn
        num_slots = NUM_PAGES * PAGE_SIZE
        self._pools = Pools(SlotCounts(host=num_slots, device=num_slots, index=num_slots), PAGE_SIZE)
        self._tree = PrefixTree(self._pools)
        self._follower = TreeFollower(self._tree, PAGE_SIZE)
        self._users: list[Prefix] = []
        self._public: set[PageKey] = set()
        """Keys of pages without an isolation key."""
        self.num_gone = 0
        """Pages that went, with or without an event."""

    def play(self, num_steps: int) -> None:
        steps: list[Callable[[], None]] = [self._store] * 6 + [self._use] * 2 + [self._let_go] * 5
        steps += [self._make_room, self._make_room, self._drop, self._flush]
        for _ in range(num_steps):
            before = self._tree.num_tokens
            self._drawn.choice(steps)()
            self.num_gone += max(0, before - self._tree.num_tokens) // PAGE_SIZE
            self._check()

    def _check(self) -> None:
        self._tree.check_integrity(self._users)
        found = [(run.kinds, key) for run in self._tree if not run.is_dropped for key in run.keys]
        self._follower.check((kinds, key) for kinds, key in found if key in self._public)

    def _prompt(self) -> tuple[bytes, list[PageKey], Kinds]:
        """Return token ids, keys and tier of a prompt; many begin alike."""
        root, kinds = self._drawn.choice(ROOTS), self._drawn.choice(TIERS)
        pages = [int(self._drawn.random() < 0.2) for _ in range(self._drawn.randint(1, 7))]
        ids = pack_token_ids([page for page in pages for _ in range(PAGE_SIZE)])
        keys = page_keys(root, ids, PAGE_SIZE)
        if root == NO_ISOLATION:
            self._public.update(keys)
        return (ids if root == NO_ISOLATION else b""), keys, kinds

    def _store(self) -> None:
        ids, keys, kinds = self._prompt()
        found = self._tree.find(keys, kinds)
        num_found = self._drawn.randint(0, found.num_pages) if found else 0
        before = self._tree.use(keys[:num_found], kinds) if num_found else None
        need = SlotCounts.of(kinds, (len(keys) - num_found) * PAGE_SIZE)
        if need.fits_in(self._pools.free + self._tree.unused):
            self._tree.make_room(need)
            holding = self._pools.reserve(Room(1), need)
            after = self._tree.share(
                holding,
                keys,
                kinds,
                before,
                keeps_copies=self._drawn.random() < 0.5,
                token_ids=ids or None,
            )
            self._pools.release(holding)
            assert after is not None
            self._users.append(after)
        elif before is not None:
            self._tree.let_go(before)

    def _use(self) -> None:
        _, keys, kinds = self._prompt()
        if (found := self._tree.find(keys, kinds)) is not None:
            self._users.append(self._tree.use(keys[: self._drawn.randint(1, found.num_pages)], kinds))

    def _let_go(self) -> None:
        if self._users:
            self._tree.let_go(self._users.pop(self._drawn.randrange(len(self._users))))

    def _make_room(self) -> None:
        num_pages = self._drawn.randint(1, NUM_PAGES)
        self._tree.make_room(SlotCounts.of(self._drawn.choice(TIERS), num_pages * PAGE_SIZE))

    def _drop(self) -> None:
        if runs := [run for run in self._tree if not run.is_dropped]:
            run = self._drawn.choice(runs)
            kind = run.kinds[0]
            self._tree.drop(kind, self._drawn.choice(run.holding[kind]).start)

    def _flush(self) -> None:
        if self._drawn.random() < 0.3:
            self._tree.flush()


@pytest.mark.I2
@given(seed=st.integers(0, 1 << 32))
@settings(derandomize=True, max_examples=num_examples(25, 600))
def test_a_subscriber_knows_what_there_is(seed: int) -> None:
    History(random.Random(seed)).play(80)


def test_in_such_a_history_pages_go() -> None:
    history = History(random.Random(1))
    history.play(200)
    assert history.num_gone > 50
