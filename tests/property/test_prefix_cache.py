"""The prefix cache against a plain model of it: a set of cached prefixes and the leases on them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.paging.prompt_keys import PageKey, page_keys, root_of
from prefill_node.kv_pool import IntegrityError, PageId, PagePool
from prefill_node.prefix_cache import Lease, PrefixCache, PrefixMatch

pytestmark = [pytest.mark.I2, pytest.mark.I5]

PAGE_SIZE = 2
NUM_PAGES = 24


class Prompt(NamedTuple):
    """Its pages are all of one token, and few prompts have a salt."""

    salt: str
    pages: tuple[int, ...]

    @property
    def keys(self) -> tuple[PageKey, ...]:
        token_ids = [page for page in self.pages for _ in range(PAGE_SIZE)]
        return tuple(page_keys(root_of(self.salt or None), pack_token_ids(token_ids), PAGE_SIZE))

    def start(self, num_pages: int) -> Prompt:
        return self._replace(pages=self.pages[:num_pages])


prompts = st.builds(
    Prompt,
    st.sampled_from(["", "", "salt"]),
    st.lists(st.integers(0, 1), min_size=0, max_size=8).map(tuple),
)


def fill(cache: PrefixCache, pool: PagePool, keys: tuple[PageKey, ...]) -> tuple[Lease, list[PageId]]:
    """Compute ``keys`` as a room does; returns its lease and the pages that stayed its own."""
    lease = cache.acquire(keys)
    owned = pool.allocate(len(keys) - len(lease.page_ids))
    lease, taken = cache.insert(keys, [*lease.page_ids, *owned], lease)
    return lease, [page_id for page_id in owned if page_id not in taken]


class PrefixCacheMachine(RuleBasedStateMachine):
    """Rooms come with prompts over a tiny alphabet, so that prefixes meet, split and outlive each other."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE)
        self.cache = PrefixCache(self.pool)
        self.leases: list[tuple[Prompt, Lease]] = []
        self.computing: list[tuple[Prompt, Lease, list[PageId]]] = []
        self.page_of: dict[Prompt, PageId] = {}  # a cached prefix -> its last page

    @rule(prompt=prompts)
    def start(self, prompt: Prompt) -> None:
        lease = self.cache.acquire(prompt.keys)
        known = 0
        while known < len(prompt.pages) and prompt.start(known + 1) in self.page_of:
            known += 1
        assert lease.page_ids == tuple(self.page_of[prompt.start(n + 1)] for n in range(known))
        num_needed = len(prompt.pages) - known
        shortage = num_needed - self.pool.num_free
        if shortage > self.cache.num_evictable:
            self.cache.release(lease)
            return
        self.evict(max(0, shortage))
        self.computing.append((prompt, lease, self.pool.allocate(num_needed)))

    @precondition(lambda self: self.computing)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        prompt, lease, owned = self.computing.pop(data.draw(st.integers(0, len(self.computing) - 1)))
        page_ids = [*lease.page_ids, *owned]
        extended, taken = self.cache.insert(prompt.keys, page_ids, lease)
        for n, page_id in enumerate(page_ids):
            known = self.page_of.setdefault(prompt.start(n + 1), page_id)
            assert (page_id in taken) == (page_id in owned and known == page_id)
        assert extended.page_ids == tuple(self.page_of[prompt.start(n + 1)] for n in range(len(page_ids)))
        self.pool.free([page_id for page_id in owned if page_id not in taken])
        self.leases.append((prompt, extended))

    @precondition(lambda self: self.computing)
    @rule()
    def abort(self) -> None:
        _, lease, owned = self.computing.pop()
        self.cache.release(lease)
        self.pool.free(owned)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.cache.release(lease)
        with pytest.raises(KeyError):
            self.cache.release(lease)

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def evict(self, num_pages: int) -> None:
        num_evictable = self.cache.num_evictable
        assert self.cache.evict(num_pages) == min(num_pages, num_evictable)
        kept = set(self.cache.page_ids())
        self.page_of = {prefix: page_id for prefix, page_id in self.page_of.items() if page_id in kept}
        for prefix in self.page_of:
            before = prefix.start(len(prefix.pages) - 1)
            assert not before.pages or before in self.page_of, "a page outlived the page before it"

    @rule(prompt=prompts)
    def match(self, prompt: Prompt) -> None:
        leased = self.leased_pages()
        pages = []
        for n in range(len(prompt.pages)):
            if prompt.start(n + 1) not in self.page_of:
                break
            pages.append(self.page_of[prompt.start(n + 1)])
        assert self.cache.match(prompt.keys) == PrefixMatch(len(pages), len(set(pages) - leased))

    def leased_pages(self) -> set[PageId]:
        leases = [lease for _, lease in self.leases] + [lease for _, lease, _ in self.computing]
        return {page_id for lease in leases for page_id in lease.page_ids}

    @invariant()
    def whole(self) -> None:
        self.cache.check_integrity()
        owned = [page_id for _, _, pages in self.computing for page_id in pages]
        self.pool.check_integrity(owned=owned, cached=list(self.page_of.values()), in_flight=[])
        assert len(self.cache._leases) == len(self.leases) + len(self.computing), "a lease leaked"
        assert self.leased_pages() <= set(self.page_of.values())
        assert self.cache.num_evictable == len(self.page_of) - len(self.leased_pages())


PrefixCacheMachine.TestCase.settings = settings(derandomize=True, max_examples=60, stateful_step_count=30)
TestPrefixCacheMachine = PrefixCacheMachine.TestCase


def test_evicts_the_least_recently_used_prefix_first_and_from_its_end() -> None:
    pool = PagePool(8, PAGE_SIZE)
    cache = PrefixCache(pool)
    old, new = (b"a", b"b", b"c"), (b"x", b"y")
    for keys in (old, new):
        lease, _ = fill(cache, pool, keys)
        cache.release(lease)
    assert cache.evict(1) == 1
    assert cache.match(old).num_pages == 2
    assert cache.match(new).num_pages == 2
    cache.release(cache.acquire(old))  # the remains of the old one are the more recent now
    assert cache.evict(2) == 2
    assert cache.match(old).num_pages == 2
    assert cache.match(new).num_pages == 0


def test_a_split_keeps_the_leases_on_both_parts() -> None:
    pool = PagePool(8, PAGE_SIZE)
    cache = PrefixCache(pool)
    long_lease, _ = fill(cache, pool, (b"a", b"b", b"c"))
    short_lease = cache.acquire((b"a", b"z"))
    assert short_lease.page_ids == long_lease.page_ids[:1]
    cache.check_integrity()
    cache.release(long_lease)
    assert cache.evict(8) == 2
    assert cache.match((b"a", b"b")) == PrefixMatch(num_pages=1, num_unleased=0)
    cache.release(short_lease)
    assert cache.evict(8) == 1
    cache.check_integrity()


def test_the_same_prompt_computed_twice_keeps_the_first_pages() -> None:
    pool = PagePool(8, PAGE_SIZE)
    cache = PrefixCache(pool)
    keys = (b"a", b"b")
    first, second = cache.acquire(keys), cache.acquire(keys)
    pages_one, pages_two = pool.allocate(2), pool.allocate(2)
    first, taken_one = cache.insert(keys, pages_one, first)
    second, taken_two = cache.insert(keys, pages_two, second)
    assert (taken_one, taken_two) == (frozenset(pages_one), frozenset())
    assert second.page_ids == tuple(pages_one)
    pool.check_integrity(owned=pages_two, cached=pages_one, in_flight=[])


def test_integrity_notices_a_lease_that_was_lost() -> None:
    pool = PagePool(4, PAGE_SIZE)
    cache = PrefixCache(pool)
    lease, _ = fill(cache, pool, (b"a",))
    cache._leases.clear()
    with pytest.raises(IntegrityError, match="1 leases counted, 0 exist"):
        cache.check_integrity()
    assert lease.page_ids == (0,)
