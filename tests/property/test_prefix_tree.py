"""The tree of prefixes against a plain model of it: the pages that are held, and who uses which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse_pd.core.paging.extents import extents_to_pages
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.core.paging.prefix import Kinds, Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey, page_keys, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import Room
from tests.event_follower import TreeFollower
from tests.examples import num_examples

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I5]

PAGE_SIZE = 2
NUM_PAGES = 24
NUM_INDEX_PAGES = 12
"""Fewer, so that pages of the host pool move down before any of them is evicted."""
DEVICE, HOST = (PoolKind.DEVICE,), (PoolKind.HOST, PoolKind.INDEX)


class Prompt(NamedTuple):
    """Its pages are all of one token, and few prompts have a salt."""

    kinds: Kinds
    salt: str
    pages: tuple[int, ...]

    @property
    def token_ids(self) -> bytes:
        return pack_token_ids([page for page in self.pages for _ in range(PAGE_SIZE)])

    @property
    def keys(self) -> list[PageKey]:
        return page_keys(root_of(self.salt or None), self.token_ids, PAGE_SIZE)

    def starts(self) -> list[Prompt]:
        return [self._replace(pages=self.pages[: number + 1]) for number in range(len(self.pages))]


Page = tuple[Kinds, int]
"""A page in the first of some pools."""


def pages_of(runs: Iterable[Prefix]) -> set[Page]:
    return {
        (run.kinds, page) for run in runs for page in extents_to_pages(run.holding[run.kinds[0]], PAGE_SIZE)
    }


prompts = st.builds(
    Prompt,
    st.sampled_from([DEVICE, HOST, HOST]),
    st.sampled_from(["", "", "", "salt"]),
    st.lists(st.sampled_from([0, 0, 1]), max_size=8).map(tuple),
)


@dataclass(eq=False)
class User:
    """One request: what is its own, and what it shares."""

    prompt: Prompt
    holding: Holding
    prefix: Prefix | None
    is_computed: bool = False

    def own_pages(self) -> list[int]:
        return extents_to_pages(self.holding[self.prompt.kinds[0]], PAGE_SIZE)

    def shared_pages(self) -> list[int]:
        extents = () if self.prefix is None else self.prefix.extents(self.prompt.kinds[0])
        return extents_to_pages(extents, PAGE_SIZE)


@dataclass(frozen=True)
class Copy:
    """A copy under way, which uses a prefix: to its device pages, or from main memory to elsewhere."""

    prefix: Prefix
    pages: frozenset[Page] = frozenset()
    """What it brings up; empty where it reads main memory."""


class PrefixTreeMachine(RuleBasedStateMachine):
    """Prompts over a tiny alphabet, so that prefixes meet, split, join and outlive each other.

    Each history begins with prefixes that others have left, and main memory has copies of some of them, so
    that runs move down and up in nearly all histories.
    """

    def __init__(self) -> None:
        super().__init__()
        num_slots, num_index_slots = NUM_PAGES * PAGE_SIZE, NUM_INDEX_PAGES * PAGE_SIZE
        self.pools = Pools(SlotCounts(host=num_slots, device=num_slots, index=num_index_slots), PAGE_SIZE)
        self.tree = PrefixTree(self.pools)
        self.follower = TreeFollower(self.tree, PAGE_SIZE)
        self.users: list[User] = []
        self.page_of: dict[Prompt, int] = {}
        """A prompt that is held -> its last page."""
        self.stored: set[Page] = set()
        """Pages of which main memory has all bytes."""
        self.copies: list[Copy] = []
        """Copies under way, the one that began first ahead."""

    def known(self, prompt: Prompt) -> list[Prompt]:
        """The longest start of a prompt that is held, page by page."""
        starts = prompt.starts()
        num = next((n for n, start in enumerate(starts) if start not in self.page_of), len(starts))
        return starts[:num]

    def used(self, kinds: Kinds) -> set[int]:
        by_users = {page for user in self.users if user.prompt.kinds == kinds for page in user.shared_pages()}
        copied = {run for copy in self.copies for run in copy.prefix.chain() if run.kinds == kinds}
        return by_users.union(page for _, page in pages_of(copied))

    @contextmanager
    def making_room(self, need: SlotCounts) -> Iterator[None]:
        """Check which pages are evicted meanwhile, where ``need`` is to be free in the end."""
        missing = {kind: max(0, need[kind] - self.pools.free[kind]) // PAGE_SIZE for kind in PoolKind}
        least = {kinds: min(missing[kinds[0]], self.num_unused(kinds)) for kinds in (DEVICE, HOST)}
        most = dict(least)
        runs = [run for run in self.tree if run.kinds == HOST]
        cannot_move = any(not (run.num_users or run.is_down or run.is_stored) for run in runs)
        if missing[PoolKind.HOST] or (missing[PoolKind.INDEX] and cannot_move):
            most[HOST] = missing[PoolKind.HOST] + missing[PoolKind.INDEX]
        if missing[PoolKind.INDEX] and cannot_move:  # such a run goes after all behind it, which may be down
            most[HOST] += sum(len(run.keys) for run in runs if run.is_down or run.is_stored)
        yield
        left = {
            prompt: page
            for prompt, page in self.page_of.items()
            if (found := self.tree.find(prompt.keys, prompt.kinds)) and found.num_pages == len(prompt.pages)
        }
        for prompt in left:
            assert set(prompt.starts()) <= left.keys(), "a page outlived the page before it"
        gone = self.page_of.items() - left.items()
        for prompt, page in gone:
            assert page not in self.used(prompt.kinds), "what is used was given up"
        for kinds in (DEVICE, HOST):
            num_gone = sum(prompt.kinds == kinds for prompt, _ in gone)
            assert least[kinds] <= num_gone <= most[kinds]
        self.forget_all_but(left)

    def forget_all_but(self, left: dict[Prompt, int]) -> None:
        self.page_of = left
        self.stored &= {(prompt.kinds, page) for prompt, page in left.items()}

    def num_unused(self, kinds: Kinds) -> int:
        return sum(prompt.kinds == kinds for prompt in self.page_of) - len(self.used(kinds))

    def make_room_for(self, need: SlotCounts) -> None:
        """Do the tree's ``make_room``, which frees all that is needed and without users."""
        free, unused = self.pools.free, self.tree.unused
        with self.making_room(need):
            self.tree.make_room(need)
        for kind in PoolKind:
            assert self.pools.free[kind] >= min(need[kind], free[kind] + unused[kind])

    def admit(self, prompt: Prompt, *, copy_fails: bool = False) -> User | None:
        """Let a request begin, unless it does not fit. What has moved down is brought up for it, which may
        fail at once."""
        known = self.known(prompt)
        found = self.tree.find(prompt.keys, prompt.kinds)
        assert (found.num_pages if found else 0) == len(known)
        if found:
            num_unused = sum(num_pages for part, num_pages in found.parts() if not part.num_users)
            assert num_unused == len({self.page_of[start] for start in known} - self.used(prompt.kinds))
        prefix = self.tree.use(prompt.keys[: len(known)], prompt.kinds) if known else None
        need = SlotCounts.of(prompt.kinds, (len(prompt.pages) - len(known)) * PAGE_SIZE)
        down = [run for run in (prefix.chain() if prefix else ()) if run.is_down]
        pages_down = pages_of(down)
        need_up = SlotCounts(index=len(pages_down) * PAGE_SIZE)
        if not (need + need_up).fits_in(self.pools.free + self.tree.unused):
            if prefix is not None:
                self.tree.let_go(prefix)
            return None
        self.users.append(user := User(prompt, Holding(Room(0), Stage.LANDING), prefix))
        assert user.shared_pages() == [self.page_of[start] for start in known]
        self.make_room_for(need)
        user.holding = self.pools.reserve(Room(len(self.users)), need)
        if prefix is not None and down:
            with self.making_room(need_up):
                brought = self.tree.bring_up(prefix)
            assert pages_of(brought) == pages_down, "two runs may be one meanwhile"
            assert not self.tree.is_up(prompt.keys, prompt.kinds)
            if copy_fails:
                self.tree.take_down(brought)
                assert all(run.is_down for run in brought)
                self.leave(user)
                return None
            self.tree.use_run(prefix)
            self.copies.append(Copy(prefix, frozenset(pages_down)))
        return user

    def compute(self, user: User, *, keeps_copies: bool) -> None:
        """Let a request share its pages, which have all of their bytes now."""
        user.is_computed = True
        own, num_shared = user.own_pages(), len(user.shared_pages())
        user.prefix = self.tree.share(
            user.holding,
            user.prompt.keys,
            user.prompt.kinds,
            user.prefix,
            keeps_copies=keeps_copies,
            token_ids=None if user.prompt.salt else user.prompt.token_ids,
        )
        starts = user.prompt.starts()
        taken = {
            page
            for start, page in zip(starts[num_shared:], own, strict=True)
            if self.page_of.setdefault(start, page) == page
        }
        assert user.shared_pages() == [self.page_of[start] for start in starts]
        assert user.own_pages() == ([page for page in own if page not in taken] if keeps_copies else [])

    def finish(self, user: User, *, is_stored: bool) -> None:
        while not self.tree.is_up(user.prompt.keys, user.prompt.kinds):
            self.arrive()
        self.compute(user, keeps_copies=False)
        if is_stored and user.prompt.kinds == HOST and user.prefix is not None:
            self.mark_stored(user.prefix)
        self.leave(user)

    def mark_stored(self, prefix: Prefix) -> None:
        self.tree.mark_stored(prefix, 0)
        self.stored |= pages_of(prefix.chain())

    def leave(self, user: User) -> None:
        self.users.remove(user)
        if user.prefix is not None:
            self.tree.let_go(user.prefix)
        self.pools.release(user.holding)

    @initialize(prompts=st.lists(prompts, min_size=4, max_size=8))
    def leave_prefixes(self, prompts: list[Prompt]) -> None:
        for number, prompt in enumerate(prompts):
            self.come_and_go(prompt, is_stored=number % 3 > 0)

    @rule(prompt=prompts, copy_fails=st.booleans())
    def start(self, prompt: Prompt, copy_fails: bool) -> None:
        self.admit(prompt, copy_fails=copy_fails)

    @rule(prompt=prompts, is_stored=st.booleans())
    def come_and_go(self, prompt: Prompt, is_stored: bool) -> None:
        """A request is computed at once, and leaves its pages, of which main memory may get a copy."""
        if (user := self.admit(prompt)) is not None:
            self.finish(user, is_stored=is_stored)

    @precondition(lambda self: self.page_of)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, 1), max_size=2),
        copy_fails=st.booleans(),
        is_computed=st.booleans(),
    )
    def go_on(self, data: st.DataObject, more: list[int], copy_fails: bool, is_computed: bool) -> None:
        """A request comes whose prompt is held, up or down, at least for its most part."""
        held = data.draw(st.sampled_from(list(self.page_of)))
        prompt = held._replace(pages=(*held.pages, *more))
        user = self.admit(prompt, copy_fails=copy_fails)
        if user is not None and is_computed:
            self.finish(user, is_stored=True)

    @precondition(lambda self: self.copies)
    @rule()
    def arrive(self) -> None:
        """Copies end in the order in which they began."""
        copy = self.copies.pop(0)
        if copy.pages:
            self.tree.mark_arrived(copy.prefix)
        self.tree.let_go(copy.prefix)

    @precondition(lambda self: any(run.kinds == HOST for run in self.tree))
    @rule(data=st.data(), num_free=st.integers(0, NUM_INDEX_PAGES))
    def store(self, data: st.DataObject, num_free: int) -> None:
        """Main memory gets a copy of what one sequence has in the index pool, which is short afterwards."""
        runs = [run for run in self.tree if run.kinds == HOST]
        self.mark_stored(data.draw(st.sampled_from(runs)))
        self.make_room_for(SlotCounts(index=num_free * PAGE_SIZE))

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4))
    def hold_down(self, data: st.DataObject, more: list[int]) -> None:
        """Main memory gets pages that others have left elsewhere: they take host slots alone. Some requests
        have landed equal pages meanwhile."""
        landing = [user.prompt for user in self.users if user.prompt.kinds == HOST and not user.is_computed]
        known_prompts = [each for each in (landing, list(self.page_of)) if each]
        prompts = data.draw(st.sampled_from(known_prompts)) if known_prompts else [Prompt(HOST, "", ())]
        prompt = data.draw(st.sampled_from(prompts))
        prompt = prompt._replace(kinds=HOST, pages=(*prompt.pages, *more))
        known, need = self.known(prompt), SlotCounts(host=len(prompt.pages) * PAGE_SIZE)
        if not need.fits_in(self.pools.free):
            return
        index_before = self.pools.free.index
        holding = self.pools.reserve(Room(0), need)
        pages = extents_to_pages(holding[PoolKind.HOST], PAGE_SIZE)
        token_ids = None if prompt.salt else prompt.token_ids
        assert self.tree.hold(holding, prompt.keys, HOST, token_ids=token_ids, is_down=True) == len(pages)
        self.pools.release(holding)
        self.page_of.update(list(zip(prompt.starts(), pages, strict=True))[len(known) :])
        self.stored.update((HOST, page) for page in pages[len(known) :])
        assert self.pools.free.index == index_before

    @rule(prompt=prompts.map(lambda prompt: prompt._replace(kinds=DEVICE)))
    def bring(self, prompt: Prompt) -> None:
        """The device gets pages whose bytes are on their way."""
        known = self.known(prompt)
        need = SlotCounts(device=(len(prompt.pages) - len(known)) * PAGE_SIZE)
        if not need.device or not need.fits_in(self.pools.free):
            return
        holding = self.pools.reserve(Room(0), need)
        pages = extents_to_pages(holding[PoolKind.DEVICE], PAGE_SIZE)
        token_ids = None if prompt.salt else prompt.token_ids
        num_before = len(known)
        self.tree.hold(holding, prompt.keys, DEVICE, num_before, token_ids=token_ids, is_arriving=True)
        self.pools.release(holding)
        brought = frozenset((DEVICE, page) for page in pages)
        self.copies.append(Copy(self.tree.use(prompt.keys, DEVICE), brought))
        self.page_of.update(zip(prompt.starts()[num_before:], pages, strict=True))
        assert not self.tree.is_up(prompt.keys, DEVICE)

    @precondition(lambda self: any(run.is_stored for run in self.tree))
    @rule(data=st.data(), num_left=st.integers(0, 2))
    def read_stored(self, data: st.DataObject, num_left: int) -> None:
        """Somebody reads pages in main memory, and lets go of them at once, or after other copies."""
        runs = [r for r in self.tree if all(part.is_stored for part in r.chain()) and not r.is_dropped]
        if not runs:
            return
        run = data.draw(st.sampled_from(runs))
        keys = [key for part in reversed(tuple(run.chain())) for key in part.keys]
        keys = keys[: max(1, len(keys) - num_left)]
        num_moved = self.tree.num_moved_down_tokens
        index_before = self.pools.free.index
        prefix = self.tree.use_stored(keys, HOST)
        assert prefix.end_page == len(keys)
        used = self.used(HOST)
        assert all(
            part.is_down for part in prefix.chain() if not used & {page for _, page in pages_of([part])}
        )
        num_moved = self.tree.num_moved_down_tokens - num_moved
        assert num_moved == self.pools.free.index - index_before
        if num_left:
            self.copies.append(Copy(prefix))
        else:
            self.tree.let_go(prefix)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), keeps_copies=st.booleans())
    def share(self, data: st.DataObject, keeps_copies: bool) -> None:
        """Nothing is shared where equal pages, which main memory has got meanwhile, are not up."""
        user = data.draw(st.sampled_from(self.users))
        if not user.is_computed and self.tree.is_up(user.prompt.keys, user.prompt.kinds):
            self.compute(user, keeps_copies=keeps_copies)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.users)))

    @rule(kinds=st.sampled_from([DEVICE, DEVICE, HOST, HOST, ()]), num_pages=st.integers(0, NUM_PAGES))
    def make_room(self, kinds: Kinds, num_pages: int) -> None:
        """Some pages of a node's pools are wanted, or all pages of all pools."""
        if kinds:
            self.make_room_for(SlotCounts.of(kinds, num_pages * PAGE_SIZE))
            return
        self.tree.flush()
        used: dict[Kinds, set[int]] = {kinds: self.used(kinds) for kinds in (DEVICE, HOST)}
        self.forget_all_but(
            {prompt: page for prompt, page in self.page_of.items() if page in used[prompt.kinds]}
        )
        assert self.tree.unused == SlotCounts()

    @invariant()
    def a_subscriber_knows_the_pages_without_a_salt(self) -> None:
        public = [prompt for prompt in self.page_of if not prompt.salt]
        self.follower.check((prompt.kinds, prompt.keys[-1]) for prompt in public)

    @invariant()
    def pages_are_up_if_they_have_slots_in_all_pools_and_their_bytes(self) -> None:
        on_their_way = set[Page]().union(*(copy.pages for copy in self.copies))
        for prompt in self.page_of:
            pages = {(prompt.kinds, self.page_of[start]) for start in prompt.starts()}
            found = self.tree.find(prompt.keys, prompt.kinds)
            assert found is not None
            runs = tuple(found.prefix.chain())
            has_slots = all(run.holding[kind] for run in runs for kind in prompt.kinds)
            is_up = has_slots and not (pages_of(runs) & on_their_way)
            assert pages <= pages_of(runs)
            assert self.tree.is_up(prompt.keys, prompt.kinds) == is_up

    @invariant()
    def whole(self) -> None:
        using = [user.prefix for user in self.users if user.prefix is not None]
        self.tree.check_integrity([*using, *(copy.prefix for copy in self.copies)])
        assert pages_of(run for run in self.tree if run.is_stored) == self.stored
        arriving = pages_of(run for run in self.tree if run.is_arriving)
        assert arriving == set[Page]().union(*(copy.pages for copy in self.copies))
        assert not any(run.is_down for prefix in using for run in prefix.chain())
        self.pools.check_integrity({Stage.LANDING: len(self.users), Stage.HELD: len(self.tree)})
        assert self.tree.num_tokens == len(self.page_of) * PAGE_SIZE
        for kinds in (DEVICE, HOST):
            held = {page for prompt, page in self.page_of.items() if prompt.kinds == kinds}
            used = self.used(kinds)
            assert used <= held
            assert self.tree.unused[kinds[0]] == (len(held) - len(used)) * PAGE_SIZE
            assert held.isdisjoint(
                page for user in self.users if user.prompt.kinds == kinds for page in user.own_pages()
            )


PrefixTreeMachine.TestCase.settings = settings(
    derandomize=True, max_examples=num_examples(10, 120), stateful_step_count=30
)
TestPrefixTreeMachine = PrefixTreeMachine.TestCase
