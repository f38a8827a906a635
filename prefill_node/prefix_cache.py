"""The prefix cache: owns the radix tree over the pages of prompts that were computed before.

An edge of the tree is a run of whole pages, found by their keys (``hisparse_pd/paging/prompt_keys.py``).
Rooms hold a ``Lease`` on the node where their cached prefix ends, which keeps every page on the path. Pages
without a lease stay until their memory is needed, and go least recently used first, from the leaves
upwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hisparse_pd.paging.prompt_keys import PageKey
from prefill_node.kv_pool import IntegrityError, PageId, PagePool


@dataclass(eq=False, slots=True)
class _Node:
    """A run of pages below ``parent``. ``keys`` and ``page_ids`` are parallel; only the root has none."""

    parent: _Node | None
    keys: list[PageKey]
    page_ids: list[PageId]
    children: dict[PageKey, _Node] = field(default_factory=dict)
    num_leases: int = 0
    """Leases on this node or below it."""
    last_used: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Lease:
    """A room's hold on a path of the tree. ``page_ids`` are in position order and stay until the release."""

    page_ids: tuple[PageId, ...]
    _node: _Node


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the tree has of a prompt; ``num_unleased`` of the pages could be evicted at present."""

    num_pages: int
    num_unleased: int


class PrefixCache:
    """Its pages are CACHED in ``pool``; it is the only caller of ``pool.cache`` and ``pool.evict``."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = _Node(parent=None, keys=[], page_ids=[])
        self._leases: set[Lease] = set()
        self._num_leased_pages = 0
        self._clock = 0

    @property
    def num_evictable(self) -> int:
        """Pages that no lease keeps."""
        return self._pool.num_cached - self._num_leased_pages

    def match(self, keys: Sequence[PageKey]) -> PrefixMatch:
        """How much of ``keys`` is cached. Changes nothing."""
        num_pages = num_unleased = 0
        for node, num_matched in self._walk(keys):
            num_pages += num_matched
            if node.num_leases == 0:
                num_unleased += num_matched
        return PrefixMatch(num_pages, num_unleased)

    def acquire(self, keys: Sequence[PageKey]) -> Lease:
        """Lease the longest cached prefix of ``keys``; it may be empty."""
        node = self._root
        for child, num_matched in list(self._walk(keys)):
            node = child if num_matched == len(child.keys) else self._split(child, num_matched)
        return self._lease(node)

    def insert(
        self, keys: Sequence[PageKey], page_ids: Sequence[PageId], lease: Lease
    ) -> tuple[Lease, frozenset[PageId]]:
        """Give the computed pages of a prompt to the cache.

        ``page_ids`` has the page that holds each key: first those of ``lease``, then OWNED ones. Where
        the tree has a key by now, from another room, its page stays and the caller's is not taken.
        Returns the lease that replaces ``lease``, on all of ``keys``, and the pages that the cache took.
        """
        if len(keys) != len(page_ids):
            raise ValueError(f"{len(keys)} keys for {len(page_ids)} pages")
        on_path = self.acquire(keys)
        num_known = len(on_path.page_ids)
        taken = list(page_ids[num_known:])
        if not taken:
            self.release(lease)
            return on_path, frozenset()
        self._pool.cache(taken)
        leaf = _Node(parent=on_path._node, keys=list(keys[num_known:]), page_ids=taken)
        on_path._node.children[leaf.keys[0]] = leaf
        extended = self._lease(leaf)
        self.release(on_path)
        self.release(lease)
        return extended, frozenset(taken)

    def release(self, lease: Lease) -> None:
        """The room no longer reads the pages. Raises KeyError on a second release."""
        self._leases.remove(lease)
        self._clock += 1
        for node in self._path(lease._node):
            node.num_leases -= 1
            node.last_used = self._clock
            if node.num_leases == 0:
                self._num_leased_pages -= len(node.page_ids)

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` unleased pages, least recently used leaves first, each from its end.

        Returns how many were freed. The cost is a walk of the tree's nodes, once a call.
        """
        leaves = [
            (node.last_used, id(node), node)
            for node in self._nodes()
            if not node.children and node.num_leases == 0
        ]
        heapq.heapify(leaves)
        num_freed = 0
        while leaves and num_freed < num_pages:
            _, _, leaf = heapq.heappop(leaves)
            num_kept = max(0, len(leaf.page_ids) - (num_pages - num_freed))
            num_freed += len(leaf.page_ids) - num_kept
            self._pool.evict(leaf.page_ids[num_kept:])
            if num_kept:
                del leaf.page_ids[num_kept:], leaf.keys[num_kept:]
                continue
            parent = _parent_of(leaf)
            del parent.children[leaf.keys[0]]
            if parent is not self._root and not parent.children and parent.num_leases == 0:
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        return num_freed

    def page_ids(self) -> list[PageId]:
        """All pages in the cache, in no particular order."""
        return [page_id for node in self._nodes() for page_id in node.page_ids]

    def check_integrity(self) -> None:
        """Recount leases and check links. Raises IntegrityError."""
        expected: dict[int, int] = {}
        for lease in self._leases:
            path = list(self._path(lease._node))
            for node in path:
                expected[id(node)] = expected.get(id(node), 0) + 1
            pages = tuple(page_id for node in reversed(path) for page_id in node.page_ids)
            if pages != lease.page_ids:
                raise IntegrityError(f"a lease on pages {lease.page_ids} now has a path with pages {pages}")
        num_leased_pages = 0
        for node in self._nodes():
            if node.num_leases != expected.get(id(node), 0):
                raise IntegrityError(
                    f"node of pages {node.page_ids}: {node.num_leases} leases counted, "
                    f"{expected.get(id(node), 0)} exist"
                )
            if not node.keys or len(node.keys) != len(node.page_ids):
                raise IntegrityError(f"node of pages {node.page_ids}: {len(node.keys)} keys")
            if _parent_of(node).children.get(node.keys[0]) is not node:
                raise IntegrityError(f"node of pages {node.page_ids} is not linked under its first key")
            num_leased_pages += len(node.page_ids) if node.num_leases else 0
        if num_leased_pages != self._num_leased_pages:
            raise IntegrityError(f"{num_leased_pages} leased pages, counted as {self._num_leased_pages}")

    def _walk(self, keys: Sequence[PageKey]) -> Iterator[tuple[_Node, int]]:
        """The nodes that match ``keys`` from the root, each with how many of its pages do."""
        node, num_seen = self._root, 0
        while num_seen < len(keys):
            child = node.children.get(keys[num_seen])
            if child is None:
                return
            num_matched = 0
            for ours, theirs in zip(child.keys, keys[num_seen : num_seen + len(child.keys)], strict=False):
                if ours != theirs:
                    break
                num_matched += 1
            yield child, num_matched
            if num_matched < len(child.keys):
                return
            node, num_seen = child, num_seen + num_matched

    def _split(self, node: _Node, num_upper: int) -> _Node:
        """Cut ``node`` after ``num_upper`` pages. The object stays the lower part, so leases on it hold."""
        parent = _parent_of(node)
        upper = _Node(
            parent=parent,
            keys=node.keys[:num_upper],
            page_ids=node.page_ids[:num_upper],
            num_leases=node.num_leases,
        )
        del node.keys[:num_upper], node.page_ids[:num_upper]
        upper.children[node.keys[0]] = node
        parent.children[upper.keys[0]] = upper
        node.parent = upper
        return upper

    def _lease(self, node: _Node) -> Lease:
        path = list(self._path(node))
        self._clock += 1
        for step in path:
            if step.num_leases == 0:
                self._num_leased_pages += len(step.page_ids)
            step.num_leases += 1
            step.last_used = self._clock
        lease = Lease(tuple(page_id for step in reversed(path) for page_id in step.page_ids), node)
        self._leases.add(lease)
        return lease

    def _path(self, node: _Node) -> Iterator[_Node]:
        """From ``node`` up to, and without, the root."""
        step: _Node | None = node
        while step is not None and step is not self._root:
            yield step
            step = step.parent

    def _nodes(self) -> Iterator[_Node]:
        """Every node but the root."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _parent_of(node: _Node) -> _Node:
    if node.parent is None:
        raise IntegrityError("the root of the prefix cache has no parent")
    return node.parent
