"""How long a prefill node waits for the cluster's store, and when it leaves the store alone."""

from __future__ import annotations

import pytest

from hisparse_pd.core.paging.pools import Pools, SlotCounts
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, page_keys
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.prefill_node.store_backoff import FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS
from hisparse_pd.prefill_node.store_threads import Get, LookUp, Order
from hisparse_pd.prefill_node.store_tier import (
    FIRST_WAIT_SECS,
    LONGEST_WAIT_SECS,
    MAX_WAITS,
    StoreTier,
)
from hisparse_pd.protocol.messages import Room

pytestmark = pytest.mark.I7

PAGE = 16
NUM_PAGES = 40


class Orders:
    """Keeps orders until the test has answered them."""

    object_bytes = 100

    def __init__(self) -> None:
        self.submitted: list[Order] = []
        self.over: list[Order] = []

    def submit(self, order: Order) -> None:
        self.submitted.append(order)

    def poll(self) -> list[Order]:
        over, self.over = self.over, []
        return over


class Tier:
    def __init__(self) -> None:
        self.now = 100.0
        pools = Pools(SlotCounts(host=NUM_PAGES * PAGE, device=NUM_PAGES * PAGE), PAGE)
        prefixes = PrefixTree(pools)
        self.orders = Orders()
        self.store = StoreTier(
            self.orders, pools, prefixes, SetAside(pools, prefixes, "prefill"), lambda: self.now
        )
        self.num_rooms = 0

    def ask(self, num_pages: int = 8) -> bool:
        """Ask for a prompt that nobody has asked for. Returns whether its request waits."""
        self.num_rooms += 1
        return self.store.fetch(Room(self.num_rooms), prompt_keys(self.num_rooms, num_pages), 0)

    def waits(self) -> bool:
        """Whether the last request still waits."""
        return self.store.fetch(Room(self.num_rooms), prompt_keys(self.num_rooms, 8), 0)

    def answer(self, num: int = 0, error: str = "", order: Order | None = None) -> None:
        """Answer an order, by default the latest: so many pages were found, or have been read."""
        order = order or self.orders.submitted[-1]
        order.error = error
        if isinstance(order, LookUp):
            order.num_found = num
        elif isinstance(order, Get):
            order.num_right = num
        self.orders.over.append(order)
        self.store.poll()


def prompt_keys(seed: int, num_pages: int) -> list[PageKey]:
    return page_keys(NO_ISOLATION, pack_token_ids([seed] * num_pages * PAGE), PAGE)


def test_a_request_waits_as_long_as_its_prompt_takes_to_compute() -> None:
    tier = Tier()
    tier.store._pace.note(1000, 1.0)
    assert tier.ask(8)
    tier.now += 8 * PAGE / 1000 - 1e-3
    assert tier.waits()
    tier.now += 2e-3
    assert not tier.waits()
    assert tier.store.num_late == 1


def test_what_is_found_is_waited_for_by_itself() -> None:
    tier = Tier()
    tier.store._pace.note(1000, 1.0)
    assert tier.ask(8)
    tier.now += 0.1
    tier.answer(2)
    tier.now += 2 * PAGE / 1000 - 1e-3
    assert tier.waits()
    tier.now += 2e-3
    assert not tier.waits()
    (order,) = [order for order in tier.orders.submitted if isinstance(order, Get)]
    assert order.is_cancelled


def test_the_wait_follows_the_latest_forwards_and_has_bounds() -> None:
    tier = Tier()
    assert tier.store._wait_secs(1000) == FIRST_WAIT_SECS
    tier.store._pace.note(1000, 10.0)
    assert tier.store._wait_secs(1000) == LONGEST_WAIT_SECS
    for _ in range(50):
        tier.store._pace.note(1000, 0.1)
    assert tier.store._wait_secs(1000) == pytest.approx(1000 * PAGE / 10_000, rel=0.01)
    tier.store._pace.note(1, 0.001)  # a forward of few tokens says little of long ones
    assert tier.store._wait_secs(1000) == pytest.approx(1000 * PAGE / 10_000, rel=0.01)
    assert not tier.ask(1), "it is computed before an answer comes"


def test_pauses_double_until_an_answer_comes_in_time() -> None:
    tier = Tier()
    tier.answer()  # it is connected
    pause_secs = FIRST_PAUSE_SECS
    for _ in range(10):
        assert tier.ask()
        tier.answer(error="lost")
        assert not tier.waits()
        assert not tier.ask()
        tier.now += pause_secs - 1e-3
        assert not tier.ask()
        tier.now += 2e-3
        pause_secs = min(2 * pause_secs, LONGEST_PAUSE_SECS)
    assert tier.ask()
    tier.answer(8)
    tier.answer(8)
    assert not tier.waits()
    assert tier.store.num_got_tokens == 8 * PAGE
    assert tier.ask()
    tier.answer(error="lost")
    tier.now += FIRST_PAUSE_SECS
    assert tier.ask(), "the pauses begin anew"


def test_a_late_answer_does_not_end_the_pause() -> None:
    tier = Tier()
    assert tier.ask()
    tier.now += FIRST_WAIT_SECS
    assert not tier.waits()
    tier.answer(8)
    assert not tier.ask()


def test_no_more_than_a_number_of_requests_wait() -> None:
    tier = Tier()
    assert all(tier.ask() for _ in range(MAX_WAITS))
    assert not tier.ask()
    tier.store.release(Room(1))
    assert tier.ask()


def test_two_requests_for_the_same_pages_read_them_once() -> None:
    tier = Tier()
    keys = prompt_keys(1, 8)
    for room in (Room(1), Room(2)):
        assert tier.store.fetch(room, keys, 0)
        tier.answer(8)
    (order,) = [order for order in tier.orders.submitted if isinstance(order, Get)]
    tier.store.release(Room(1))
    assert not order.is_cancelled, "the other one waits for it"
    tier.answer(8, order=order)
    assert not tier.store.fetch(Room(2), keys, 0)
    assert tier.store.num_got_tokens == 8 * PAGE
    assert (tier.store.first_brought(Room(1)), tier.store.first_brought(Room(2))) == (None, 0)
