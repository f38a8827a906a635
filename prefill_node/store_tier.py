"""The cluster's store below the host tier: it has pages that any prefill node has computed, also before a
restart.

``HostTier`` calls ``put`` for pages that it has copied to main memory, ``fetch`` for a waiting request before
it looks for copies of its own, and ``poll`` in each turn of the loop. The store's threads
(``store_threads.py``) write pages through, look up what main memory lacks of a prompt, and read what is found
into main memory, where the host tier then finds it like any other page.

No request depends on the store. A request waits for it as long as computing the same tokens would take, and
then goes on with what has arrived. After an error or a late answer the store is left alone for a while
(``store_backoff.py``), and pages that cannot be put are dropped.

``StoreTier`` owns the slots that the store reads into (Stage.LANDING) and those that it may still write to
after an error (Stage.QUARANTINED), and knows which pages nobody has verified since they came. What is on its
way to the store is ``StoreWrites``'s.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from hisparse_pd.core.paging.extents import extents_to_pages, slice_extents
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.prefill_node.pace import Pace
from hisparse_pd.prefill_node.read_quarantine import ReadQuarantine
from hisparse_pd.prefill_node.store_backoff import StoreBackoff
from hisparse_pd.prefill_node.store_threads import Get, LookUp, Order, Put, Remove
from hisparse_pd.prefill_node.store_writes import HOST_POOLS, StoreWrites
from hisparse_pd.protocol.messages import Extent, Room

MAX_WAITS: Final = 64
"""Most requests that wait for the store; the prompts of others are not looked up."""
READ_SHARE: Final = 2
"""At most one in so many pages of main memory waits to be read from the store."""
FIRST_WAIT_SECS: Final = 1.0
"""Longest wait for the store before this node has computed anything."""
LEAST_WAIT_SECS: Final = 0.02
"""A prompt that is computed sooner than this is not looked up: the answer would hardly come in time."""
LONGEST_WAIT_SECS: Final = 30.0
"""Longest wait for an answer, however long computing would take."""
OPERATIONS: Final = ("look_up", "get", "put", "full", "remove")
"""Labels of ``store_failures_total``; full: a page for which the store had no space."""


class Orders(Protocol):
    """Carries out orders to the store, as ``StoreThreads`` does."""

    @property
    def object_bytes(self) -> int:
        """Bytes of a page in the store."""

    def submit(self, order: Order) -> None:
        """Take an order, without waiting."""

    def poll(self) -> list[Order]:
        """Return the orders that are over since the last call."""


@dataclass(eq=False, slots=True)
class _Landing:
    """Pages on their way from the store to main memory: those of ``keys`` behind ``num_before``."""

    keys: Sequence[PageKey]
    num_before: int
    """Pages of ``keys`` that main memory has; it grows as pages arrive."""
    order: Get
    holding: Holding
    """The slots of the pages that have not arrived."""
    before: Prefix | None
    """The prefix that main memory has, in use until the order is over."""
    token_ids: bytes | None
    """See ``PrefixTree.hold``."""
    num_taken: int = 0
    """Pages of the order that have gone from the holding to the tree."""
    is_lost: bool = False
    """Whether what is still to come can no longer be found, because the pages before it are gone."""

    def brings(self, keys: Sequence[PageKey], number: int) -> bool:
        """Whether page ``number`` of ``keys`` is among the pages."""
        return self.num_before <= number < len(self.keys) and self.keys[number] == keys[number]


@dataclass(eq=False, slots=True)
class _Wait:
    """A waiting request whose prompt is looked up, once."""

    keys: Sequence[PageKey]
    num_before: int
    """Pages that main memory had when the store was asked for those behind them."""
    num_cached: int
    """Pages that the device had then."""
    deadline_secs: float
    look_up: LookUp | None
    """The question, until it is answered."""
    token_ids: bytes | None
    """See ``PrefixTree.hold``."""
    landing: _Landing | None = None
    """The pages that it waits for once that is answered: its own, or those of another request with the same
    keys."""
    first_brought: int | None = None
    """Number of the first page that came while it waited; None if none has come."""
    is_over: bool = False


class StoreTier:
    """The store of one engine, which shares it with others. Times are those of ``clock``."""

    def __init__(
        self,
        orders: Orders,
        pools: Pools,
        prefixes: PrefixTree,
        set_aside: SetAside,
        clock: Callable[[], float] = time.monotonic,
        pace: Pace | None = None,
    ) -> None:
        self._orders = orders
        self._pace = pace or Pace()
        self._pools = pools
        self._prefixes = prefixes
        self._set_aside = set_aside
        self._clock = clock
        self._waits: dict[Room, _Wait] = {}
        """Waiting requests that were looked up; each is looked up once."""
        self._landings: list[_Landing] = []
        self.writes = StoreWrites(prefixes, set_aside, pools.page_size)
        self._quarantine = ReadQuarantine(pools)
        self._unverified: set[int] = set()
        """Pages of main memory that came from the store, until the host tier has verified their rows."""
        self._backoff = StoreBackoff()
        self.is_connected = False
        """Whether the last order went well."""
        self.num_got_tokens = 0
        self.num_late = 0
        """Requests that stopped waiting for the store."""
        self.num_failures: Counter[str] = Counter()
        """Orders that ended in an error, by operation (``OPERATIONS``)."""
        self._orders.submit(LookUp(()))  # connects

    # --- what others need to know ----------------------------------------------------------------------

    @property
    def num_landing(self) -> int:
        """Holdings in Stage.LANDING."""
        return len(self._landings)

    @property
    def num_quarantined(self) -> int:
        """Holdings in Stage.QUARANTINED."""
        return len(self._quarantine)

    @property
    def gauges(self) -> dict[str, float]:
        """Metrics that go up and down, by name."""
        return {
            "store_connected": float(self.is_connected),
            "store_queued_pages": float(self.writes.num_queued_pages),
            "store_waiting_reqs": float(self._num_waits),
        }

    @property
    def counters(self) -> dict[str, float]:
        """Monotone metrics, by name."""
        page_bytes = self._orders.object_bytes / self._pools.page_size
        counters = {
            "store_put_tokens_total": float(self.writes.num_put_tokens),
            "store_got_tokens_total": float(self.num_got_tokens),
            'store_bytes_total{direction="put"}': self.writes.num_put_tokens * page_bytes,
            'store_bytes_total{direction="get"}': self.num_got_tokens * page_bytes,
            "store_late_total": float(self.num_late),
            "store_dropped_pages_total": float(self.writes.num_dropped_pages),
        }
        for operation in OPERATIONS:
            name = f'store_failures_total{{operation="{operation}"}}'
            counters[name] = float(self.num_failures[operation])
        return counters

    @property
    def _num_waits(self) -> int:
        return sum(not wait.is_over for wait in self._waits.values())

    def users(self) -> Iterator[Prefix]:
        """Yield the prefixes that reads and writes use, once for each use."""
        yield from (landing.before for landing in self._landings if landing.before is not None)
        yield from self.writes.users()

    # --- to the store ----------------------------------------------------------------------------------

    def put(self, keys: Sequence[PageKey], num_before: int) -> None:
        """Write the pages of ``keys`` behind ``num_before``, which main memory has, as far as
        ``StoreWrites`` takes them."""
        order = self.writes.put(keys, num_before, is_paused=self._backoff.is_paused(self._clock()))
        if order is not None:
            self._orders.submit(order)

    # --- from the store --------------------------------------------------------------------------------

    def fetch(
        self, room: Room, keys: Sequence[PageKey], num_cached: int, token_ids: bytes | None = None
    ) -> bool:
        """Look a waiting request's prompt up, if the store may have more of it than the device and main
        memory. Returns whether the request should wait for the store.

        ``num_cached``: pages of ``keys`` that the device has. ``token_ids``: see ``PrefixTree.hold``.
        """
        wait = self._waits.get(room)
        if wait is None:
            wait = self._begin_wait(room, keys, num_cached, token_ids)
        if wait is None or wait.is_over:
            return False
        if self._clock() >= wait.deadline_secs:
            self.num_late += 1
            self._backoff.pause(self._clock())
            self._end_wait(wait)
            return False
        return True

    def first_brought(self, room: Room) -> int | None:
        """Return the number of the first page of a request's prompt that the store brought while it waited;
        None if it brought none."""
        wait = self._waits.get(room)
        return None if wait is None else wait.first_brought

    def release(self, room: Room) -> None:
        """Forget a request that begins or ends. What is being read for it is read no further."""
        wait = self._waits.pop(room, None)
        if wait is not None:
            self._end_wait(wait)

    def _begin_wait(
        self, room: Room, keys: Sequence[PageKey], num_cached: int, token_ids: bytes | None
    ) -> _Wait | None:
        if self._backoff.is_paused(self._clock()) or self._num_waits >= MAX_WAITS:
            return None
        num_stored = self._prefixes.num_found(keys, HOST_POOLS)
        num_missing = len(keys) - max(num_cached, num_stored)
        wait_secs = self._wait_secs(num_missing)
        if num_missing <= 0 or wait_secs < LEAST_WAIT_SECS:
            return None
        order = LookUp(keys[num_stored:])
        deadline_secs = self._clock() + wait_secs
        wait = self._waits[room] = _Wait(keys, num_stored, num_cached, deadline_secs, order, token_ids)
        self._orders.submit(order)
        return wait

    def _end_wait(self, wait: _Wait) -> None:
        """End a wait, and cancel what is read for it unless another request waits for the same."""
        wait.is_over, wait.look_up, landing = True, None, wait.landing
        wait.landing = None
        if landing is not None and all(other.landing is not landing for other in self._waits.values()):
            landing.order.is_cancelled = True

    def _wait_secs(self, num_pages: int) -> float:
        """Return how long to wait for so many pages: the time that computing them would take."""
        secs = self._pace.secs_for(num_pages * self._pools.page_size)
        return FIRST_WAIT_SECS if secs is None else min(secs, LONGEST_WAIT_SECS)

    # --- answers ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what the store's threads have done."""
        for order in self._orders.poll():
            self.is_connected = not order.error
            if order.error:
                self._backoff.pause(self._clock())
            match order:
                case LookUp():
                    self._looked_up(order)
                case Get():
                    self._read(order)
                case Put():
                    self._written(order)
                case Remove():
                    self.num_failures["remove"] += bool(order.error)
                case _:
                    assert_never(order)
        for landing in self._landings:
            self._take_arrived(landing)
        self._quarantine.free_due(self._clock())

    def _looked_up(self, order: LookUp) -> None:
        self.num_failures["look_up"] += bool(order.error)
        for room, wait in self._waits.items():
            if wait.look_up is order:
                wait.look_up = None
                if order.error or not self._begin_read(room, wait, order.num_found):
                    self._end_wait(wait)
                    self._resume(order)

    def _begin_read(self, room: Room, wait: _Wait, num_found: int) -> bool:
        """Begin to read what the store has of a waiting request's prompt, as far as main memory has room.
        Returns whether the request waits for that, or for another one's pages."""
        keys, page_size = wait.keys, self._pools.page_size
        num_stored, end = self._prefixes.num_found(keys, HOST_POOLS), wait.num_before + num_found
        if num_stored < wait.num_before or end <= max(num_stored, wait.num_cached):
            return False
        wait.deadline_secs = self._clock() + self._wait_secs(end - num_stored)
        wait.landing = next((each for each in self._landings if each.brings(keys, num_stored)), None)
        if wait.landing is not None:
            return True
        num_reading = sum(landing.holding.num_slots(PoolKind.HOST) for landing in self._landings) // page_size
        most = self._set_aside.num_usable_pages(PoolKind.HOST) // READ_SHARE - num_reading
        num_pages = min(end - num_stored, most)
        before = self._prefixes.use_if_any(keys[:num_stored], HOST_POOLS)
        self._prefixes.make_room(SlotCounts(host=max(num_pages, 0) * page_size))
        num_pages = min(num_pages, self._pools.free.host // page_size)
        if num_pages <= 0:
            self._prefixes.let_go(before)
            return False
        holding = self._pools.reserve(room, SlotCounts(host=num_pages * page_size))
        page_ids = extents_to_pages(holding[PoolKind.HOST], page_size)
        self.forget(page_ids)
        keys = keys[: num_stored + num_pages]
        order = Get(keys[num_stored:], page_ids)
        wait.landing = _Landing(keys, num_stored, order, holding, before, wait.token_ids)
        self._landings.append(wait.landing)
        self._orders.submit(wait.landing.order)
        return True

    def _take_arrived(self, landing: _Landing) -> None:
        """Put the pages that have arrived since the last time into the tree."""
        num_right = landing.order.num_right  # read once: the thread counts on
        num_new = num_right - landing.num_taken
        if landing.is_lost or num_new == 0:
            return
        end = landing.num_before + num_new
        page_ids = self._page_ids(landing.holding[PoolKind.HOST], 0, num_new)
        is_dropped = landing.before is not None and landing.before.is_dropped
        if is_dropped or end > self._prefixes.hold(
            landing.holding,
            landing.keys[:end],
            HOST_POOLS,
            landing.num_before,
            token_ids=landing.token_ids,
        ):
            landing.is_lost = landing.order.is_cancelled = True
            return
        self._unverified.update(page_ids)
        for wait in self._waits.values():
            if wait.landing is landing and wait.first_brought is None:
                wait.first_brought = landing.num_before
        before = landing.before
        landing.before = self._prefixes.use(landing.keys[:end], HOST_POOLS)
        self._prefixes.let_go(before)
        landing.num_before, landing.num_taken = end, num_right
        self.num_got_tokens += num_new * self._pools.page_size

    def _read(self, order: Get) -> None:
        """Account for a read that is over."""
        self.num_failures["get"] += bool(order.error)
        (landing,) = [landing for landing in self._landings if landing.order is order]
        self._take_arrived(landing)
        self._landings.remove(landing)
        self._prefixes.let_go(landing.before)
        if order.may_still_land:
            self._quarantine.add(landing.holding, self._clock())
        else:
            self._pools.release(landing.holding)
        if order.wrong:
            key = order.keys[order.num_right]
            self._set_aside.count_wrong("store", f"the store's object of page {key.hex()}: {order.wrong}")
            self.remove((key,))
        for wait in self._waits.values():
            if wait.landing is landing:
                self._end_wait(wait)
                self._resume(order)

    def _written(self, order: Put) -> None:
        """Account for a write that is over."""
        self.num_failures["put"] += bool(order.error)
        self.num_failures["full"] += bool(order.num_full)
        self.writes.written(order)

    def _resume(self, order: LookUp | Get) -> None:
        """Forget earlier pauses if the order, for which a request has waited, came without an error."""
        if not order.error:
            self._backoff.reset()

    # --- wrong pages -----------------------------------------------------------------------------------

    def is_unverified(self, page_id: int) -> bool:
        """Whether a page of main memory came from the store and was not verified since."""
        return page_id in self._unverified

    def forget(self, page_ids: Sequence[int]) -> None:
        """Note that pages of main memory have been verified, or are to be written anew."""
        self._unverified.difference_update(page_ids)

    def remove(self, keys: Sequence[PageKey]) -> None:
        """Remove the objects of pages that are not what was written."""
        self._orders.submit(Remove(keys))

    # --- pools and tree --------------------------------------------------------------------------------

    def _page_ids(self, extents: Sequence[Extent], start: int, stop: int) -> list[int]:
        """Return the pages of the slots ``extents`` from page ``start`` to page ``stop``."""
        page_size = self._pools.page_size
        return extents_to_pages(slice_extents(extents, start * page_size, stop * page_size), page_size)
