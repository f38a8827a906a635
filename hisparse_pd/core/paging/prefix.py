"""A prefix, which is a run of pages in the tree of ``prefix_tree.py``, and the match of a prompt with one.

Only ``PrefixTree`` and its ``RunTree`` change a ``Prefix``; schedulers and requests read them. A
``PageListener`` is told which pages the tree has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from hisparse_pd.core.paging.pools import Holding, PoolKind
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.protocol.messages import Extent

Kinds: TypeAlias = tuple[PoolKind, ...]
"""The pools that a prefix has slots in, equally many in each."""


@dataclass(eq=False, slots=True)
class Prefix:
    """A run of pages with ``keys``, in order, which continues ``parent``."""

    kinds: Kinds
    parent: Prefix | None
    end_page: int
    """Number of pages from the start of the sequence to the end of this run."""
    keys: list[PageKey]
    holding: Holding
    num_users: int = 0
    """Requests that use this run; each of them uses all ancestors, too."""
    last_used: int = 0
    """The tree's event count when pages of this run were last added, or a user last let go of it."""
    children: set[Prefix] = field(default_factory=set)
    is_dropped: bool = False
    """Whether its pages, and those of its descendants, can no longer be found."""
    is_reported: bool = False
    """Whether the tree's listener has been told of its pages."""
    is_stored: bool = False
    """Whether main memory, beside its slots of the host pool, has a copy of what it has in other pools: it
    may move down, which gives those up."""
    is_arriving: bool = False
    """Whether it has moved up, and the copies that bring its bytes back are under way."""

    @property
    def pools(self) -> Kinds:
        """Those of ``kinds`` in which it has slots now."""
        return tuple(kind for kind in self.kinds if kind in self.holding.extents)

    @property
    def is_down(self) -> bool:
        """Whether it has moved down: it has no slots but those of the host pool."""
        return len(self.holding.extents) < len(self.kinds)

    @property
    def start_page(self) -> int:
        return self.end_page - len(self.keys)

    def chain(self) -> Iterator[Prefix]:
        """Yield this run and then its ancestors, up to the start of the sequence."""
        prefix: Prefix | None = self
        while prefix is not None:
            yield prefix
            prefix = prefix.parent

    def extents(self, kind: PoolKind) -> tuple[Extent, ...]:
        """Return the extents of the first ``end_page`` pages of the sequence, in order. No run of the chain
        may have moved down."""
        parts = [prefix.holding[kind] for prefix in self.chain()]
        return tuple(extent for part in reversed(parts) for extent in part)

    def is_mergeable_with_parent(self) -> bool:
        """Whether the parent has the same users and last use as this run, and all else that a run has as one.

        ``RunTree`` then merges the two if this run is the parent's only child, which it checks itself.
        A user of a run uses its parent too, so equally many users are the same users.
        """
        return self.parent is not None and self.parent._as_one() == self._as_one()

    def _as_one(self) -> tuple[int, ...]:
        is_what = self.is_dropped, self.is_reported, self.is_stored, self.is_down, self.is_arriving
        return self.num_users, self.last_used, *is_what


class Match(NamedTuple):
    """The longest beginning of a sequence in the tree: ``num_pages`` pages, the last one in ``prefix``."""

    prefix: Prefix
    num_pages: int

    def parts(self) -> Iterator[tuple[Prefix, int]]:
        """Yield each prefix of the match, the last one first, with the number of its pages that match."""
        end_page = self.num_pages
        for prefix in self.prefix.chain():
            yield prefix, end_page - prefix.start_page
            end_page = prefix.start_page


class PageListener(Protocol):
    """Is told which pages can be found in a ``PrefixTree``. It must not change the tree."""

    def stored(self, kinds: Kinds, parent: PageKey | None, keys: Sequence[PageKey], token_ids: bytes) -> None:
        """Note that pages can be found from now on: those of ``keys``, which follow the page ``parent``, or
        None at the start of a sequence. ``token_ids``: packed, those of these pages."""

    def removed(self, kinds: Kinds, keys: Sequence[PageKey]) -> None:
        """Note that reported pages can no longer be found."""

    def emptied(self) -> None:
        """Note that nothing can be found any more. Pages of which the listener knew were removed before."""


def end_of(prefix: Prefix | None) -> int:
    """Return the number of pages up to the end of ``prefix``; 0 for none."""
    return 0 if prefix is None else prefix.end_page


def is_on_its_way(prefix: Prefix | None) -> bool:
    """Return whether a run of the chain of ``prefix`` is arriving; False for none."""
    return prefix is not None and any(run.is_arriving for run in prefix.chain())
