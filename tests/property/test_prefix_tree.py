"""The tree of prefixes against a plain model of it: the pages that are held, and who uses which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse_pd.core.paging.extents import extents_to_pages
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.core.paging.prefix import Kinds, Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey, page_keys, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import Room
from tests.event_follower import TreeFollower
from tests.property.examples import num_examples

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I5]

PAGE_SIZE = 2
NUM_PAGES = 24
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


prompts = st.builds(
    Prompt,
    st.sampled_from([DEVICE, DEVICE, HOST]),
    st.sampled_from(["", "", "salt"]),
    st.lists(st.integers(0, 1), min_size=0, max_size=8).map(tuple),
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


class PrefixTreeMachine(RuleBasedStateMachine):
    """Prompts over a tiny alphabet, so that prefixes meet, split, join and outlive each other."""

    def __init__(self) -> None:
        super().__init__()
        num_slots = NUM_PAGES * PAGE_SIZE
        self.pools = Pools(SlotCounts(host=num_slots, device=num_slots, index=num_slots), PAGE_SIZE)
        self.tree = PrefixTree(self.pools)
        self.follower = TreeFollower(self.tree, PAGE_SIZE)
        self.users: list[User] = []
        self.page_of: dict[Prompt, int] = {}
        """A prompt that is held -> its last page."""
        self.arriving: list[Prefix] = []
        """The ends of what copies bring up; each copy uses it."""

    def known(self, prompt: Prompt) -> list[Prompt]:
        """The longest start of a prompt that is held, page by page."""
        starts = prompt.starts()
        num = next((n for n, start in enumerate(starts) if start not in self.page_of), len(starts))
        return starts[:num]

    def used(self, kinds: Kinds) -> set[int]:
        by_users = {page for user in self.users if user.prompt.kinds == kinds for page in user.shared_pages()}
        copied = {run for prefix in self.arriving for run in prefix.chain() if run.kinds == kinds}
        return by_users.union(*(extents_to_pages(run.holding[kinds[0]], PAGE_SIZE) for run in copied))

    def forget(self, num_gone: int) -> None:
        """What was given up, ``num_gone`` pages, or fewer where runs could move down instead."""
        left = {
            prompt: page
            for prompt, page in self.page_of.items()
            if (found := self.tree.find(prompt.keys, prompt.kinds)) and found.num_pages == len(prompt.pages)
        }
        for prompt in left:
            assert set(prompt.starts()) <= left.keys(), "a page outlived the page before it"
        for prompt, page in self.page_of.items() - left.items():
            assert page not in self.used(prompt.kinds), "what is used was given up"
        num_stored = sum(len(run.keys) for run in self.tree if run.is_stored)
        assert num_gone - num_stored <= len(self.page_of) - len(left) <= num_gone
        self.page_of = left

    @rule(prompt=prompts)
    def start(self, prompt: Prompt) -> None:
        known = self.known(prompt)
        found = self.tree.find(prompt.keys, prompt.kinds)
        assert (found.num_pages if found else 0) == len(known)
        if found:
            num_unused = sum(num_pages for part, num_pages in found.parts() if not part.num_users)
            assert num_unused == len({self.page_of[start] for start in known} - self.used(prompt.kinds))
        prefix = self.tree.use(prompt.keys[: len(known)], prompt.kinds) if known else None
        need = SlotCounts.of(prompt.kinds, (len(prompt.pages) - len(known)) * PAGE_SIZE)
        down = [run for run in (prefix.chain() if prefix else ()) if run.is_down]
        num_down = sum(len(run.keys) for run in down)
        if not (need + SlotCounts(index=num_down * PAGE_SIZE)).fits_in(self.pools.free + self.tree.unused):
            if prefix is not None:
                self.tree.let_go(prefix)
            return
        self.users.append(user := User(prompt, Holding(Room(0), Stage.LANDING), prefix))
        assert user.shared_pages() == [self.page_of[start] for start in known]
        wanted = need + SlotCounts(index=num_down * PAGE_SIZE)
        missing = max((wanted[kind] - self.pools.free[kind] for kind in prompt.kinds), default=0)
        self.tree.make_room(need)
        user.holding = self.pools.reserve(Room(len(self.users)), need)
        if prefix is not None and num_down:
            assert set(self.tree.bring_up(prefix)) == set(down)
            self.tree.use_run(prefix)
            self.arriving.append(prefix)
        self.forget(max(0, missing) // PAGE_SIZE)

    @precondition(lambda self: self.arriving)
    @rule()
    def arrive(self) -> None:
        """Copies end in the order in which they began."""
        prefix = self.arriving.pop(0)
        self.tree.mark_arrived(prefix)
        self.tree.let_go(prefix)

    @precondition(lambda self: any(run.kinds == HOST for run in self.tree))
    @rule(data=st.data(), num_free=st.integers(0, NUM_PAGES))
    def store(self, data: st.DataObject, num_free: int) -> None:
        """Main memory gets a copy of what one sequence has in the index pool, which is short afterwards."""
        runs = [run for run in self.tree if run.kinds == HOST]
        self.tree.mark_stored(data.draw(st.sampled_from(runs)), 0)
        missing = max(0, num_free - self.pools.free.index // PAGE_SIZE)
        may_be_lost = any(not (run.num_users or run.is_down or run.is_stored) for run in runs)
        self.tree.make_room(SlotCounts(index=num_free * PAGE_SIZE))
        self.forget(missing if may_be_lost else 0)

    @rule(prompt=prompts.map(lambda prompt: prompt._replace(kinds=HOST)))
    def hold_down(self, prompt: Prompt) -> None:
        """Main memory gets pages that others have left elsewhere: they take host slots alone."""
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
        self.arriving.append(self.tree.use(prompt.keys, DEVICE))
        self.page_of.update(zip(prompt.starts()[num_before:], pages, strict=True))
        for run in self.arriving[-1].chain():
            assert run.is_arriving or run.end_page <= num_before
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
        prefix = self.tree.use_stored(keys, HOST)
        assert prefix.end_page == len(keys)
        users = {part for user in self.users if user.prefix is not None for part in user.prefix.chain()}
        users |= {part for each in self.arriving for part in each.chain()}
        assert all(part.is_down for part in prefix.chain() if part not in users)
        if num_left:
            self.arriving.append(prefix)
        else:
            self.tree.let_go(prefix)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), keeps_copies=st.booleans())
    def share(self, data: st.DataObject, keeps_copies: bool) -> None:
        """Nothing is shared where equal pages, which main memory has got meanwhile, are not on the device."""
        user = data.draw(st.sampled_from(self.users))
        if user.is_computed or not self.tree.is_up(user.prompt.keys, user.prompt.kinds):
            return
        user.is_computed = True
        own, num_shared = user.own_pages(), len(user.shared_pages())
        keys, kinds = user.prompt.keys, user.prompt.kinds
        user.prefix = self.tree.share(
            user.holding,
            keys,
            kinds,
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

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(self.users))
        self.users.remove(user)
        if user.prefix is not None:
            self.tree.let_go(user.prefix)
        self.pools.release(user.holding)

    @rule(kinds=st.sampled_from([DEVICE, HOST]), num_pages=st.integers(0, NUM_PAGES))
    def make_room(self, kinds: Kinds, num_pages: int) -> None:
        unused, free = (counts[kinds[0]] // PAGE_SIZE for counts in (self.tree.unused, self.pools.free))
        self.tree.make_room(SlotCounts.of(kinds, num_pages * PAGE_SIZE))
        self.forget(min(unused, max(0, num_pages - free)))

    @rule(dice=st.integers(0, 4))
    def flush(self, dice: int) -> None:
        if dice == 0:
            num_unused = len(self.page_of) - len(self.used(DEVICE)) - len(self.used(HOST))
            self.tree.flush()
            self.forget(num_unused)
            assert self.tree.unused == SlotCounts()

    @invariant()
    def a_subscriber_knows_the_pages_without_a_salt(self) -> None:
        public = [prompt for prompt in self.page_of if not prompt.salt]
        self.follower.check((prompt.kinds, prompt.keys[-1]) for prompt in public)

    @invariant()
    def whole(self) -> None:
        using = [user.prefix for user in self.users if user.prefix is not None]
        self.tree.check_integrity([*using, *self.arriving])
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
    derandomize=True, max_examples=num_examples(20, 60), stateful_step_count=30
)
TestPrefixTreeMachine = PrefixTreeMachine.TestCase
