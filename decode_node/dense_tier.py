"""The tier below the device pool: pages that dense requests have left, kept in the host pool, too.

A prefix of dense requests has its KV in the device pool, and one of hisparse requests in the host pool; both
are in one ``PrefixTree``. When a dense request ends, ``LiveRequests`` calls ``store``, and ``poll`` begins to
copy down what the host pool lacks of its prefix, beside steps: KV to the host pool, indexer keys and row
checks to their places in main memory (``KeyPages``). The copy is a prefix of hisparse requests that has moved
down (``prefix_tree.py``): it takes host slots and nothing on the device. Requests of either mode therefore
find what a dense one has left, also when the device has given it up.

In the other direction, a dense request gets device pages for what only the host pool has of its prompt:
``fetch`` puts these pages into the tree at once, as pages that are arriving, and begins to copy. The request
is FETCHING until they are there. Its rows are verified when it starts, as those of every dense request. All
that main memory has whole can be fetched (``held_matches.py``), whichever mode left it.

A dense request that leaves its pages while it runs uses what the host pool has of them (``use_host_copy``).

``DenseTier`` owns the copies under way. Each uses the prefix that it reads, and that in front of what it
writes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.model.side_stream import CopyFailed, is_over
from hisparse_pd.core.paging.extents import slice_extents
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import Prefix, end_of, is_on_its_way
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.decode_node.held_matches import stored_beginning
from hisparse_pd.decode_node.held_tier import PageCopies
from hisparse_pd.decode_node.request import KV_POOLS
from hisparse_pd.protocol.messages import Extent, Room

log = logging.getLogger(__name__)

DENSE: Final = KV_POOLS[Mode.DENSE]
HISPARSE: Final = KV_POOLS[Mode.HISPARSE]
MAX_QUEUED: Final = 256
"""Most ended requests whose pages wait to be copied down. Beyond that, the first are not copied."""
MOST_BEGUN: Final = 8
"""Most ended requests that one turn of the loop begins to copy. The books of each take 0.1 ms, and the launch
of its copy comes on top; many requests may end with one step."""
MOST_TAKEN: Final = 0.5
"""The largest part of the available host slots that a copy may take. Nobody can give these up while the copy
is under way, and running requests need some to grow."""


class _Left(NamedTuple):
    """Pages that an ended request has left on the device."""

    room: Room
    keys: Sequence[PageKey]
    token_ids: bytes | None
    """See ``PrefixTree.hold``."""


@dataclass(eq=False, slots=True)
class _CopyDown:
    """A copy of the pages of ``keys`` behind those of ``before``."""

    left: _Left
    source: Prefix
    """The prefix on the device, which is read; in use."""
    before: Prefix | None
    """The prefix in the host pool in front of what is written; in use, too."""
    holding: Holding
    """The host slots that are written."""
    is_behind: torch.cuda.Event | None
    """The copy's end; None: it is over."""


@dataclass(eq=False, slots=True)
class _CopyUp:
    """A copy to the pages of ``prefix`` that are arriving."""

    source: Prefix
    """The prefix in the host pool, which is read; in use."""
    prefix: Prefix
    """The prefix on the device, whose last pages are written; in use, too."""
    is_behind: torch.cuda.Event | None


class DenseTier:
    """The copies of held pages between the device pool and the host pool. ``copies``: None if main memory
    keeps no indexer keys; then nothing is stored or fetched."""

    def __init__(self, prefixes: PrefixTree, pools: Pools, copies: PageCopies | None = None) -> None:
        self._prefixes = prefixes
        self._pools = pools
        self._copies = copies
        self._queue: deque[_Left] = deque(maxlen=MAX_QUEUED)
        """What ``poll`` is to copy down."""
        self._down: list[_CopyDown] = []
        self._up: list[_CopyUp] = []
        self.num_stored_tokens = 0
        """Tokens that were copied down since the start."""
        self.num_fetched_tokens = 0
        """Tokens that have begun to move up since the start."""

    @property
    def num_copies(self) -> int:
        """Copies under way, and those that wait to begin."""
        return len(self._down) + len(self._up) + len(self._queue)

    @property
    def landing(self) -> list[Holding]:
        """The host slots that copies down write, which are in Stage.LANDING."""
        return [down.holding for down in self._down]

    def users(self) -> Iterator[Prefix]:
        """Yield the prefixes that copies use, once for each use."""
        for down in self._down:
            yield down.source
            if down.before is not None:
                yield down.before
        for up in self._up:
            yield up.source
            yield up.prefix

    # --- down ----------------------------------------------------------------------------------------

    def store(self, room: Room, keys: Sequence[PageKey], token_ids: bytes | None) -> None:
        """Let ``poll`` copy down what the host pool lacks of the pages of ``keys``, which a request has left.
        It begins no copy here: a plan may count on the host slots. ``token_ids``: see ``PrefixTree.hold``."""
        if self._copies is not None and keys:
            self._queue.append(_Left(room, keys, token_ids))

    def _begin(self, left: _Left) -> bool:
        """Begin to copy what a request has left. Returns False if it has to wait for another copy of the same
        pages."""
        num_here = self._prefixes.num_found(left.keys, DENSE)
        keys = left.keys[:num_here]
        num_stored = self._prefixes.num_found(keys, HISPARSE)
        if num_here <= num_stored or not self._prefixes.is_up(keys, DENSE):
            return True
        next_page = slice(num_stored, num_stored + 1)
        if any(down.left.keys[next_page] == keys[next_page] for down in self._down):
            return False
        page_size = self._pools.page_size
        before = self._prefixes.use_if_any(keys[:num_stored], HISPARSE)
        available = (self._pools.free + self._prefixes.unused).host
        num_pages = min(num_here - num_stored, int(MOST_TAKEN * available) // page_size)
        self._prefixes.make_room(SlotCounts(host=num_pages * page_size))
        num_pages = min(num_pages, self._pools.free.host // page_size)
        if num_pages == 0:
            self._prefixes.let_go(before)
            return True
        keys = keys[: num_stored + num_pages]
        source = self._prefixes.use(keys, DENSE)
        holding = self._pools.reserve(left.room, SlotCounts(host=num_pages * page_size))
        assert self._copies is not None, "nothing is queued without"
        try:
            is_behind = self._copies.copy_down(
                self._behind(source, PoolKind.INDEX, num_stored),
                holding[PoolKind.HOST],
                self._behind(source, PoolKind.DEVICE, num_stored),
            )
        except CopyFailed as error:
            log.error("pages of room %d are not copied to main memory: %s", left.room, error)
            self._pools.release(holding)
            self._prefixes.let_go(source)
            self._prefixes.let_go(before)
            return True
        left = left._replace(keys=keys)
        self._down.append(_CopyDown(left, source, before, holding, is_behind))
        return True

    def _keep(self, down: _CopyDown) -> None:
        """Put the pages of a copy down that is over into the tree, unless one of them, or before them, has
        been found wrong meanwhile."""
        _, keys, token_ids = down.left
        num_before = end_of(down.before)
        if not (down.source.is_dropped or (down.before is not None and down.before.is_dropped)):
            num_held = self._prefixes.hold(
                down.holding,
                keys,
                HISPARSE,
                num_before,
                token_ids=token_ids,
                num_prefilled=self._prefixes.num_prefilled(keys, DENSE),
                is_down=True,
            )
            self.num_stored_tokens += (num_held - num_before) * self._pools.page_size
        self._pools.release(down.holding)
        self._prefixes.let_go(down.source)
        self._prefixes.let_go(down.before)

    # --- up ------------------------------------------------------------------------------------------

    def fetch(
        self,
        room: Room,
        keys: Sequence[PageKey],
        before: Prefix | None,
        source: Prefix,
        token_ids: bytes | None,
    ) -> Prefix:
        """Begin to bring the pages of ``keys`` to the device behind those of ``before``, from ``source``,
        which ends where ``keys`` end. Returns the device's prefix of all of ``keys``. The request uses that
        from now on, and ``before`` and ``source`` no more. Raises PoolExhausted, and CopyFailed, after which
        it uses both as before."""
        num_here = self._prefixes.num_found(keys, DENSE)  # others may fetch the same pages
        if num_here < len(keys):
            need = SlotCounts.of(DENSE, (len(keys) - num_here) * self._pools.page_size)
            self._prefixes.make_room(need)
            holding = self._pools.reserve(room, need)
            self._prefixes.hold(
                holding,
                keys,
                DENSE,
                num_here,
                token_ids=token_ids,
                num_prefilled=self._prefixes.num_prefilled(keys, HISPARSE),
                is_arriving=True,
            )
            self._pools.release(holding)
        prefix = self._prefixes.use(keys, DENSE)
        if num_here < len(keys):
            self._begin_up(source, prefix, num_here)
        else:
            self._prefixes.let_go(source)
        self._prefixes.let_go(before)
        return prefix

    def _begin_up(self, source: Prefix, prefix: Prefix, num_here: int) -> None:
        """Begin to copy the pages of ``prefix`` behind the first ``num_here``, which are arriving. Raises
        CopyFailed, after which these are gone and nobody uses ``prefix``."""
        assert self._copies is not None, "nothing is stored without"
        device = self._behind(prefix, PoolKind.DEVICE, num_here)
        try:
            is_behind = self._copies.copy_up(
                self._behind(source, PoolKind.HOST, num_here),
                self._behind(prefix, PoolKind.INDEX, num_here),
                device,
            )
        except CopyFailed:
            self._prefixes.drop(PoolKind.DEVICE, device[0].start)
            self._prefixes.let_go(prefix)
            raise
        self._prefixes.use_run(prefix)
        self._up.append(_CopyUp(source, prefix, is_behind))
        self.num_fetched_tokens += (prefix.end_page - num_here) * self._pools.page_size

    # --- beside ----------------------------------------------------------------------------------------

    def use_host_copy(self, keys: Sequence[PageKey], shared: Prefix) -> Prefix | None:
        """Let a dense request that leaves its pages use what the host pool has of those that it shares: the
        pages of ``keys``, which are ``shared`` on the device. Returns the host pool's prefix, or None.

        The prefix has the first of these pages, as many as have the same row checks in main memory: pages
        with equal keys have equal tokens, but their KV may be rounded differently. Runs of the prefix that
        had moved down get index slots. They are arriving until the request's indexer keys are copied there
        and the caller calls ``mark_arrived``. Raises PoolExhausted.
        """
        if self._copies is None or shared.is_dropped:
            return None
        stored = stored_beginning(self._prefixes, keys, 0, 0)
        if stored is None or is_on_its_way(stored.prefix):
            return None
        page_size = self._pools.page_size
        index, host = (
            slice_extents(prefix.extents(kind), 0, stored.num_pages * page_size)
            for prefix, kind in ((shared, PoolKind.INDEX), (stored.prefix, PoolKind.HOST))
        )
        num_pages = 0
        try:
            num_pages = self._copies.num_same(index, host) // page_size
        except CopyFailed as error:
            log.error("pages in main memory are not compared with those on the device: %s", error)
        if num_pages == 0:
            return None
        prefix = self._prefixes.use(keys[:num_pages], HISPARSE)
        self._prefixes.bring_up(prefix)
        return prefix

    # --- copies --------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Note which copies are over, and begin some of those that wait; the next calls begin the others."""
        self._finish()
        for _ in range(min(MOST_BEGUN, len(self._queue))):
            left = self._queue.popleft()
            if not self._begin(left):
                self._queue.append(left)
        self._finish()  # on a CPU copies are over when they have begun

    def _finish(self) -> None:
        for down in [down for down in self._down if is_over(down.is_behind)]:
            self._down.remove(down)
            self._keep(down)
        for up in [up for up in self._up if is_over(up.is_behind)]:
            self._up.remove(up)
            self._prefixes.mark_arrived(up.prefix)
            self._prefixes.let_go(up.source)
            self._prefixes.let_go(up.prefix)

    def settle(self) -> None:
        """Wait until all copies are over, and note it. What waits to be copied down is not copied."""
        self._queue.clear()
        if self._copies is not None and self.num_copies:
            self._copies.settle()
            self._finish()

    def _behind(self, prefix: Prefix, kind: PoolKind, first_page: int) -> tuple[Extent, ...]:
        """Return the slots of a prefix from page ``first_page`` on."""
        page_size = self._pools.page_size
        return slice_extents(prefix.extents(kind), first_page * page_size, prefix.end_page * page_size)
