"""Owns the threads that talk to the cluster's store, and the orders that wait for them.

``StoreTier`` submits orders and polls for those that are over; it never waits. One thread looks up and reads,
the other one writes and removes, so that no look-up waits for a write. A store that has stopped blocks a
call for 30 s and the loop not at all. The threads use the memory of ``PageObjects`` while an order is not
over, and never after it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol, TypeAlias, assert_never

from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.transfer.page_store import PageStore, Pieces, Result, StoreError

log = logging.getLogger(__name__)

PAGES_A_CALL: Final = 16
"""Most pages that one call moves: what has arrived can be used, and an order can be cancelled, after each."""


@dataclass(eq=False, slots=True)
class LookUp:
    """Find out how many of ``keys``, from the first one on, the store has."""

    keys: Sequence[PageKey]
    num_found: int = 0
    error: str = ""


@dataclass(eq=False, slots=True)
class Get:
    """Read the pages of ``keys`` into main memory at ``page_ids``, until one is missing or wrong."""

    keys: Sequence[PageKey]
    page_ids: Sequence[int]
    is_cancelled: bool = False
    """Set by the loop: no further call begins."""
    num_right: int = 0
    """Pages that are there, from the first one on; it grows while the order is under way."""
    wrong: str = ""
    """The fault of the page behind them; empty if that page is not there."""
    may_still_land: bool = False
    """Whether bytes may land in the pages behind ``num_right`` even after the order is over."""
    error: str = ""


@dataclass(eq=False, slots=True)
class Put:
    """Write the pages of ``keys``, which are in main memory at ``page_ids``, unless the store has them."""

    keys: Sequence[PageKey]
    page_ids: Sequence[int]
    num_put: int = 0
    """Pages that were written."""
    num_full: int = 0
    """Pages for which the store has no space."""
    error: str = ""


@dataclass(eq=False, slots=True)
class Remove:
    """Remove the object of a page whose bytes are wrong."""

    keys: Sequence[PageKey]
    error: str = ""


Order: TypeAlias = LookUp | Get | Put | Remove


class Objects(Protocol):
    """The objects of pages in main memory; ``PageObjects`` has them."""

    @property
    def object_bytes(self) -> int:
        """Bytes of an object."""

    def name(self, key: PageKey) -> str:
        """Return the key of a page's object in the store."""

    def pieces(self, page_id: int) -> Pieces:
        """Return the memory of which the page's object is made."""

    def seal(self, page_id: int, key: PageKey) -> None:
        """Complete the object of a page that is to be written."""

    def void(self, page_ids: Sequence[int]) -> None:
        """Invalidate what pages have now, so that nobody takes it for what is to be read into them."""

    def why_wrong(self, page_id: int, key: PageKey) -> str:
        """Return why what was read is not the page of ``key``, or an empty string."""


class StoreThreads:
    """Two threads over ``store``. ``wakeup`` is called, from any thread, when ``poll`` has something."""

    def __init__(self, store: PageStore, objects: Objects, wakeup: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._objects = objects
        self._wakeup = wakeup
        self._changed = threading.Condition()
        self._reads: deque[Order] = deque()
        self._writes: deque[Order] = deque()
        self._over: deque[Order] = deque()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(orders,), name=f"store {name}", daemon=True)
            for name, orders in (("reads", self._reads), ("writes", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def object_bytes(self) -> int:
        return self._objects.object_bytes

    def submit(self, order: Order) -> None:
        """Let a thread carry out the order, after those of its kind that were submitted before."""
        with self._changed:
            (self._reads if isinstance(order, LookUp | Get) else self._writes).append(order)
            self._changed.notify_all()

    def poll(self) -> list[Order]:
        """Return the orders that are over since the last call."""
        with self._changed:
            over = list(self._over)
            self._over.clear()
        return over

    def close(self, timeout_secs: float) -> bool:
        """Begin no further call, and give the store its memory back. Returns False if a thread is still in a
        call after the timeout; memory of ``Objects`` must then stay."""
        deadline = time.monotonic() + timeout_secs
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            return False
        closing = threading.Thread(target=self._store.close, name="store close", daemon=True)
        closing.start()
        closing.join(max(deadline - time.monotonic(), 0.0))
        return not closing.is_alive()

    # --- in the threads --------------------------------------------------------------------------------

    def _run(self, orders: deque[Order]) -> None:
        logged = LogLimiter()
        while (order := self._next(orders)) is not None:
            try:
                self._store.connect()
                self._carry_out(order)
            except StoreError as error:
                order.error = str(error)
            except Exception as error:  # a bad order must not end the thread, for which all others wait
                log.exception("an order to the store raised")
                order.error = f"{type(error).__name__}: {error}"
            if order.error and logged.permits():
                log.warning("%s", order.error)
            with self._changed:
                self._over.append(order)
            self._wakeup()

    def _next(self, orders: deque[Order]) -> Order | None:
        """Wait for the next of ``orders``; None when the thread should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or orders)
            return None if self._is_closed else orders.popleft()

    def _carry_out(self, order: Order) -> None:
        match order:
            case LookUp():
                exist = self._exist(order.keys)
                order.num_found = next((n for n, is_there in enumerate(exist) if not is_there), len(exist))
            case Get():
                self._get(order)
            case Put():
                self._put(order)
            case Remove():
                self._store.remove([self._objects.name(key) for key in order.keys])
            case _:
                assert_never(order)

    def _exist(self, keys: Sequence[PageKey]) -> list[bool]:
        return self._store.exist([self._objects.name(key) for key in keys]) if keys else []

    def _get(self, order: Get) -> None:
        pages = zip(order.keys, order.page_ids, strict=True)
        while (part := list(islice(pages, PAGES_A_CALL))) and not (order.is_cancelled or self._is_closed):
            self._objects.void([page_id for _, page_id in part])
            order.may_still_land = True  # until Mooncake's answer, also if the call raises
            results = self._store.get(
                [self._objects.name(key) for key, _ in part],
                [self._objects.pieces(page_id) for _, page_id in part],
            )
            order.may_still_land = Result.FAILED in results
            if order.may_still_land:
                order.error = "a page could not be read from the store"
            for result, (key, page_id) in zip(results, part, strict=True):
                if result is Result.DONE:
                    order.wrong = self._objects.why_wrong(page_id, key)
                if result is not Result.DONE or order.wrong:
                    return
                order.num_right += 1
            self._wakeup()

    def _put(self, order: Put) -> None:
        pages = zip(order.keys, order.page_ids, strict=True)
        while (part := list(islice(pages, PAGES_A_CALL))) and not self._is_closed:
            exist = self._exist([key for key, _ in part])
            part = [page for page, is_there in zip(part, exist, strict=True) if not is_there]
            if not part:
                continue
            for key, page_id in part:
                self._objects.seal(page_id, key)
            results = self._store.put(
                [self._objects.name(key) for key, _ in part],
                [self._objects.pieces(page_id) for _, page_id in part],
            )
            order.num_put += results.count(Result.DONE)
            order.num_full += results.count(Result.FULL)
            if Result.FAILED in results:
                order.error = "a page could not be written to the store"
                return
            if Result.FULL in results:
                return
