"""Which pages of KV are on which ranks, as the nodes' KV events say, and the names of prompts' pages.

``NodePool`` owns the one ``KnownPages``. ``kv_follower.py`` enters what nodes publish, and the relay what
decode nodes answer: names of a prompt's pages (``serving/http/page_names.py``). The router keeps these for
the blocks of bytes in which it cuts prompts, and looks up a later prompt that begins with the same bytes by
them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar, assert_never

from hisparse_pd.protocol.kv_events import AllBlocksCleared, BlockChange, BlockRemoved, HashesStored
from hisparse_pd.serving.http.page_names import PageNames
from hisparse_pd.serving.http.prefixes import BLOCK_BYTES, MAX_KEYS

MAX_PAGES: Final = 1 << 18
"""Limit of the known pages of one rank, over all of its tiers: 16 million tokens, some 25 MB. Further pages
are left out until others go."""

MAX_TIERS: Final = 4
"""Limit of the tiers in which a rank is known to have one page. No node has as many; further ones are left
out."""

N = TypeVar("N", bound=Hashable)


class Place(NamedTuple, Generic[N]):
    """A rank of a node."""

    node: N
    rank: int


class PageName(NamedTuple):
    """The page at which a block of a prompt's bytes ends, or one before it."""

    page_size: int
    block_hash: int


class KnownPages(Generic[N]):
    """Pages by rank, and names of pages by blocks of bytes. ``N`` is a node."""

    def __init__(self) -> None:
        self._page_size: dict[N, int] = {}
        """Tokens of a page, by the node that is followed."""
        self._pages: dict[Place[N], dict[int, frozenset[str | None]]] = {}
        """The tiers in which each rank has each page."""
        self._names: OrderedDict[bytes, PageName] = OrderedDict()

    # --- what nodes publish ------------------------------------------------------------------------------

    def follow(self, node: N, page_size: int) -> None:
        """Count on events of this node from now on."""
        self._page_size[node] = page_size

    def leave(self, node: N) -> None:
        """Forget a node, which is gone or publishes nothing."""
        self._page_size.pop(node, None)
        for place in [place for place in self._pages if place.node == node]:
            del self._pages[place]

    def forget(self, place: Place[N]) -> None:
        """Forget what a rank has."""
        self._pages.pop(place, None)

    def change(self, place: Place[N], changes: Iterable[BlockChange]) -> None:
        """Take in what a rank has published; of a node that is not followed, nothing."""
        if place.node not in self._page_size:
            return
        pages = self._pages.setdefault(place, {})
        for change in changes:
            match change:
                case HashesStored():
                    for name in change.block_hashes:
                        tiers = pages.get(name, frozenset())
                        if (tiers or len(pages) < MAX_PAGES) and len(tiers) < MAX_TIERS:
                            pages[name] = tiers | {change.medium}
                case BlockRemoved():
                    for name in change.block_hashes:
                        if tiers := pages.get(name, frozenset()) - {change.medium}:
                            pages[name] = tiers
                        else:
                            pages.pop(name, None)
                case AllBlocksCleared():
                    pages.clear()
                case _:
                    assert_never(change)

    def num_pages(self, node: N) -> int:
        """Return how many pages a node is known to have, on all of its ranks."""
        return sum(len(pages) for place, pages in self._pages.items() if place.node == node)

    # --- what prompts have -------------------------------------------------------------------------------

    @property
    def are_wanted(self) -> bool:
        """Whether names of pages are of any use: if any node publishes."""
        return bool(self._page_size)

    def learn(self, keys: Sequence[bytes], num_bytes: int, names: PageNames) -> None:
        """Note the pages at the ends of a prompt's blocks, which have ``keys``.

        The prompt has ``num_bytes`` bytes, and all of its pages count as equally long in bytes. A block may
        therefore get the name of a later page, which costs little: the page is one of the same prompt.
        """
        for number in range(len(keys), 0, -1):  # the beginning counts as used last, and is forgotten last
            name = names.after(number * BLOCK_BYTES / num_bytes * names.num_tokens)
            if name is not None:
                self._names[keys[number - 1]] = PageName(names.page_size, name)
                self._names.move_to_end(keys[number - 1])
        while len(self._names) > MAX_KEYS:
            self._names.popitem(last=False)

    def name_of(self, key: bytes, node: N) -> PageName | None:
        """Return the page that a block's key stands for, if events of ``node`` would name it."""
        name = self._names.get(key)
        return name if name is not None and self._page_size.get(node) == name.page_size else None

    def holders(self, name: PageName) -> list[Place[N]]:
        """Return the ranks that have a page."""
        return [place for place, pages in self._pages.items() if name.block_hash in pages]
