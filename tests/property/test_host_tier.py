"""The host tier against a plain model: copies take any time, requests come, begin and end in any order.

Below it there is a store in half of the histories, whose answers take any time, too, and may fail or lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse_pd.core.paging.extents import extents_to_pages
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey, page_keys, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import PageRows, WrongItem
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS, CopiesUp, Wanted
from hisparse_pd.prefill_node.fresh_pages import FreshPages
from hisparse_pd.prefill_node.host_tier import HOST_POOLS, HostTier
from hisparse_pd.prefill_node.pins import Pins
from hisparse_pd.prefill_node.read_quarantine import QUARANTINE_SECS
from hisparse_pd.prefill_node.store_threads import Get, LookUp, Order, Put, Remove
from hisparse_pd.prefill_node.store_tier import FIRST_WAIT_SECS, StoreTier
from hisparse_pd.protocol.messages import Extent, Room
from tests.event_follower import TreeFollower
from tests.examples import num_examples

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I9]

PAGE_SIZE = 2
NUM_DEVICE_PAGES, NUM_HOST_PAGES = 8, 16
WRONG = b"wrong"

prompts = st.builds(
    lambda family, length, last: (*[family] * (length - 1), last),
    st.integers(0, 2),
    st.integers(3, 5),
    st.integers(0, 2),
)
"""Few conversations, of which the device holds one or two."""


def token_ids_of(pages: Sequence[int]) -> bytes:
    return pack_token_ids([page for page in pages for _ in range(PAGE_SIZE)])


def keys_of(pages: Sequence[int]) -> list[PageKey]:
    return page_keys(root_of(None), token_ids_of(pages), PAGE_SIZE)


class Event:
    """The end of a copy, at which it is made; the source may have changed until then if it was not kept."""

    def __init__(
        self, memory: Memory, moves: list[tuple[dict[int, bytes], int, dict[int, bytes], int]], *, is_up: bool
    ) -> None:
        self._memory = memory
        self._moves = moves
        self.is_up = is_up
        self.is_over = False
        self.checks: list[tuple[PageRows, torch.Tensor]] = []
        """Verifications behind the copy, with where their results go."""

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self._memory.finish_up_to(self)

    def finish(self) -> None:
        for source, from_page, target, to_page in self._moves:
            target[to_page] = source[from_page]
        for rows, found in self.checks:
            found.fill_(len(self._memory.wrong_items(rows, PAGE_SIZE)))
        self.is_over = True


class Memory:
    """What each page holds: the key of the page that was written there, or WRONG."""

    num_slots = NUM_HOST_PAGES * PAGE_SIZE

    def __init__(self) -> None:
        self.device: dict[int, bytes] = {}
        self.host: dict[int, bytes] = {}
        self.events: list[Event] = []
        """Copies under way; those in one direction end in this order."""
        self._checks: list[tuple[PageRows, torch.Tensor]] = []

    def copy_down(self, device: Sequence[Extent], host: Sequence[Extent]) -> Event:
        pairs = zip(*(extents_to_pages(extents, PAGE_SIZE) for extents in (device, host)), strict=True)
        moves = [(self.device, from_, self.host, to) for from_, to in pairs]
        self.events.append(Event(self, moves, is_up=False))
        return self.events[-1]

    def copy_up(
        self, host: Sequence[Extent], device: Sequence[Extent], behind: Callable[[], object]
    ) -> Event:
        pairs = zip(*(extents_to_pages(extents, PAGE_SIZE) for extents in (host, device)), strict=True)
        event = Event(self, [(self.host, from_, self.device, to) for from_, to in pairs], is_up=True)
        self.events.append(event)
        behind()
        event.checks, self._checks = self._checks, []
        return event

    def settle(self) -> None:
        while self.events:
            self.events.pop(0).finish()

    def finish_up_to(self, last: Event) -> None:
        """End a copy, and those in front of it in its direction."""
        for event in [event for event in self.events if event.is_up == last.is_up]:
            if not last.is_over:
                self.events.remove(event)
                event.finish()

    def begin_check(self, rows: PageRows, page_size: int) -> torch.Tensor:
        found = torch.zeros(1, dtype=torch.int32)
        self._checks.append((rows, found))
        return found

    def wrong_items(self, rows: PageRows, page_size: int) -> list[WrongItem]:
        return [
            WrongItem(0, int(position), int(page) * page_size, 0, 1)
            for page, position, _ in rows
            if self.device[int(page)] == WRONG
        ]


@dataclass(eq=False)
class Request:
    room: Room
    keys: list[PageKey]
    token_ids: bytes
    holding: Holding | None = None
    prefix: Prefix | None = None


class Tier(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.memory = Memory()
        totals = SlotCounts(host=self.memory.num_slots, device=NUM_DEVICE_PAGES * PAGE_SIZE)
        self.pools = Pools(totals, PAGE_SIZE)
        self.prefixes = PrefixTree(self.pools)
        self.follower = TreeFollower(self.prefixes, PAGE_SIZE)
        self.set_aside = SetAside(self.pools, self.prefixes, "prefill")
        pages: Any = self.memory
        self.fresh = FreshPages(NUM_DEVICE_PAGES, lambda: self.now)
        self.pins = Pins(self.prefixes)
        self.copies_up = CopiesUp(
            self.pools, self.prefixes, self.memory, self.fresh, self.pins, 2 * PAGE_SIZE
        )
        self.tier = HostTier(
            pages,
            self.pools,
            self.prefixes,
            self.set_aside,
            self.copies_up,
            self.pins,
            self._store_tier(),
        )
        self.waiting: list[Request] = []
        self.computing: list[Request] = []
        self.num_rooms = 0

    def _store_tier(self) -> StoreTier | None:
        return None

    # --- what the node does --------------------------------------------------------------------------

    @rule(pages=prompts)
    def arrive(self, pages: tuple[int, ...]) -> None:
        self.num_rooms += 1
        self.waiting.append(Request(Room(self.num_rooms), keys_of(pages), token_ids_of(pages)))

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def plan(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.waiting), "request")
        self._begin(request, may_be_arriving=data.draw(st.booleans(), "while its prefix arrives"))

    def _begin(self, request: Request, *, may_be_arriving: bool = True) -> None:
        """Begin a waiting request if nothing holds it back. If its prefix comes up wrong meanwhile, it waits
        again."""
        if self.tier.fetch(request.room, request.keys, len(request.keys), request.token_ids):
            return
        found = self.prefixes.find(request.keys, CACHE_POOLS)
        is_arriving = found is not None and any(prefix.is_arriving for prefix, _ in found.parts())
        if is_arriving and not may_be_arriving:
            return
        num_cached = 0 if found is None else found.num_pages
        if found is not None:
            request.prefix = self.prefixes.use(request.keys[:num_cached], CACHE_POOLS)
        need = SlotCounts(device=(len(request.keys) - num_cached) * PAGE_SIZE)
        if not need.fits_in(self.pools.free + self.prefixes.unused):
            if request.prefix is not None:
                self.prefixes.let_go(request.prefix)
                request.prefix = None
            return
        self._release(request)
        self.prefixes.make_room(need)
        request.holding = self.pools.reserve(request.room, need, Stage.RUNNING)
        own = extents_to_pages(request.holding[PoolKind.DEVICE], PAGE_SIZE)
        self.memory.device.update(zip(own, request.keys[num_cached:], strict=True))
        self.fresh.forget(own)
        self.waiting.remove(request)
        self.computing.append(request)
        if request.prefix is not None and any(prefix.is_arriving for prefix in request.prefix.chain()):
            self.copies_up.wait()
            if request.prefix.is_dropped:
                self._end(request)
                request.prefix = request.holding = None
                self.waiting.append(request)

    @rule(data=st.data())
    @precondition(lambda self: self.computing)
    def finish(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from(self.computing), "request"))

    def _finish(self, request: Request) -> None:
        assert request.holding is not None
        request.prefix = self.prefixes.share(
            request.holding, request.keys, CACHE_POOLS, request.prefix, token_ids=request.token_ids
        )
        self.tier.store(request.room, request.keys, request.token_ids)
        self._end(request)

    @rule(data=st.data())
    @precondition(lambda self: self.waiting or self.computing)
    def abort(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(self.waiting + self.computing), "request"))

    def _end(self, request: Request) -> None:
        if request.prefix is not None:
            self.prefixes.let_go(request.prefix)
        self._release(request)
        if request.holding is not None:
            self.pools.release(request.holding)
        (self.waiting if request in self.waiting else self.computing).remove(request)

    def _release(self, request: Request) -> None:
        self.tier.release(request.room)
        self.pins.release(request.room)

    @rule(pages=prompts)
    def serve(self, pages: tuple[int, ...]) -> None:
        """Serve a request at once, with its copies, if nothing holds it back."""
        self._serve(pages)

    def _serve(self, pages: tuple[int, ...]) -> None:
        self.arrive(pages)
        request = self.waiting[-1]
        for _ in range(2):
            if request in self.waiting:
                self._begin(request)
                self._end_all_copies()
        if request in self.computing:
            self._finish(request)
            self._end_all_copies()

    def _end_all_copies(self) -> None:
        self.memory.settle()
        self._poll()

    def _poll(self) -> None:
        self.copies_up.end()
        self.tier.poll()

    # --- what happens to it --------------------------------------------------------------------------

    @rule(data=st.data())
    @precondition(lambda self: self.memory.events)
    def end_a_copy(self, data: st.DataObject) -> None:
        firsts = {event.is_up: event for event in reversed(self.memory.events)}
        self.memory.finish_up_to(firsts[data.draw(st.sampled_from(sorted(firsts)), "up")])

    @rule()
    def poll(self) -> None:
        self._poll()
        assert len(self.copies_up) + self.tier.num_copies_down == len(self.memory.events)

    @rule(data=st.data(), is_found=st.booleans())
    @precondition(lambda self: any(run.kinds == HOST_POOLS and not run.is_dropped for run in self.prefixes))
    def damage(self, data: st.DataObject, is_found: bool) -> None:
        """A page in main memory changes. The scrub finds it at once, or a fetch does."""
        runs = [run for run in self.prefixes if run.kinds == HOST_POOLS and not run.is_dropped]
        run = data.draw(st.sampled_from(runs), "run")
        page = data.draw(st.sampled_from(extents_to_pages(run.holding[PoolKind.HOST], PAGE_SIZE)), "page")
        self.memory.host[page] = WRONG
        if is_found:
            item = WrongItem(0, 0, page * PAGE_SIZE, 0, 1)
            self.set_aside.record_wrong_row("scrub", PoolKind.HOST, item)

    @rule(is_now=st.sampled_from([False] * 7 + [True]))
    def flush(self, is_now: bool) -> None:
        if is_now:
            self.prefixes.flush()

    @rule()
    def release_pages(self) -> None:
        for page in self.set_aside.shown():
            self.set_aside.give_back(PoolKind(page.pool), page.start)

    # --- what must hold ------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_twice(self) -> None:
        expected = {
            Stage.LANDING: self.tier.num_landing,
            Stage.RUNNING: len(self.computing),
            Stage.QUARANTINED: self.tier.num_quarantined,
            Stage.HELD: len(self.prefixes),
            Stage.SET_ASIDE: self.pools.num_set_aside,
        }
        self.pools.check_integrity(expected)
        users = [request.prefix for request in self.computing if request.prefix is not None]
        copied = *self.tier.users(), *self.copies_up.users(), *self.pins.users()
        self.prefixes.check_integrity([*users, *copied])

    @invariant()
    def a_subscriber_knows_what_each_level_has(self) -> None:
        found = (run for run in self.prefixes if not run.is_dropped)
        self.follower.check((run.kinds, key) for run in found for key in run.keys)

    @invariant()
    def pages_hold_what_their_keys_say(self) -> None:
        for run in self.prefixes:
            kind = run.kinds[0]
            if kind is PoolKind.DEVICE and (run.is_arriving or run.is_dropped):
                continue
            memory = self.memory.device if kind is PoolKind.DEVICE else self.memory.host
            held = [memory[page] for page in extents_to_pages(run.holding[kind], PAGE_SIZE)]
            damaged = (WRONG,) if kind is PoolKind.HOST else ()
            assert all(found == key or found in damaged for found, key in zip(held, run.keys, strict=True))

    @invariant()
    def requests_compute_behind_what_is_right(self) -> None:
        for request in self.computing:
            if request.prefix is not None:
                pages = extents_to_pages(request.prefix.extents(PoolKind.DEVICE), PAGE_SIZE)
                assert [self.memory.device[page] for page in pages] == request.keys[: len(pages)]

    def teardown(self) -> None:
        """All requests come to their end, whatever waits for what."""
        for _ in range(4 * (len(self.waiting) + len(self.computing)) + 8):
            self._end_all_copies()
            for request in list(self.computing):
                self._end(request)
            if self.waiting:
                for request in list(self.waiting):  # those behind one that waits go ahead
                    self._begin(request)
                if not self.computing and not self.memory.events:
                    self.pins.let_go_all()  # as the engine does when nothing can be computed
                self.now += FIRST_WAIT_SECS  # for the store, which says nothing more
        assert not self.waiting, "a request waits for ever"


Tier.TestCase.settings = settings(
    derandomize=True, max_examples=num_examples(18, 300), stateful_step_count=40
)
TestHostTier = Tier.TestCase


class Store:
    """The store, and the orders that it has not answered yet. What an object has is the key of a page, or
    WRONG."""

    object_bytes = 1

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.objects: dict[bytes, bytes] = {}
        self.orders: list[Order] = []
        self.over: list[Order] = []
        self.landing_late: list[int] = []
        """Pages in which bytes of a failed read may still land."""

    def submit(self, order: Order) -> None:
        self.orders.append(order)

    def poll(self) -> list[Order]:
        over, self.over = self.over, []
        return over

    def end(self, order: Order, *, error: str = "") -> None:
        order.error = error
        self.orders.remove(order)
        self.over.append(order)


class TierOnStore(Tier):
    """The same node with a store below it."""

    def _store_tier(self) -> StoreTier:
        self.store = Store(self.memory)
        self.store_tier = StoreTier(self.store, self.pools, self.prefixes, self.set_aside, lambda: self.now)
        return self.store_tier

    def _serve(self, pages: tuple[int, ...]) -> None:
        """Serve a request without asking the store: its prompt is computed too soon."""
        with patch.object(self.store_tier, "_wait_secs", lambda num_pages: 0.0):
            super()._serve(pages)

    @rule(pages=prompts)
    def begin_to_read(self, pages: tuple[int, ...]) -> None:
        """A request arrives for what another node has computed, and the store begins to give it."""
        self.another_node_computes(pages)
        self.store_tier._backoff._paused_until = 0.0  # earlier errors are forgotten
        self.arrive(pages)
        self._begin(self.waiting[-1])
        for order in [order for order in self.store.orders if isinstance(order, LookUp)]:
            self._answer(order, None)
        self._poll()

    @rule()
    @precondition(lambda self: self.waiting)
    def give_up(self) -> None:
        """The store is too slow for those who wait."""
        self.now += FIRST_WAIT_SECS
        for request in list(self.waiting):
            self._begin(request)

    @rule(secs=st.sampled_from([*[0.1, FIRST_WAIT_SECS] * 3, QUARANTINE_SECS]))
    def time_passes(self, secs: float) -> None:
        self.now += secs
        if secs == QUARANTINE_SECS:  # what lands late has landed by then
            self.store.landing_late.clear()

    @rule(data=st.data(), is_well=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.store.orders)
    def answer(self, data: st.DataObject, is_well: bool) -> None:
        order = data.draw(st.sampled_from(self.store.orders), "order")
        self._answer(order, None if is_well else data)

    def _answer(self, order: Order, data: st.DataObject | None) -> None:
        """Carry out an order to its end. ``data`` chooses what goes wrong, if anything is to."""
        error = "" if data is None or data.draw(st.booleans(), "only pages go wrong") else "lost"
        match order:
            case LookUp() if not error:
                exist = [key in self.store.objects for key in order.keys]
                order.num_found = exist.index(False) if False in exist else len(exist)
            case Get():
                while order.num_right < len(order.keys) and not order.is_cancelled:
                    if data is not None and data.draw(st.booleans(), "this page goes wrong"):
                        order.wrong = "" if error else data.draw(st.sampled_from(["", "a lie"]), "wrong")
                        break
                    if not self._read_page(order):
                        break
                if error:
                    self._fail_read(order)
            case Put():
                for key, page in zip(order.keys, order.page_ids, strict=True):
                    assert self.memory.host[page] in (key, WRONG), "it changed before it was written"
                    if error or (data is not None and data.draw(st.booleans(), "the store is full")):
                        order.num_full += not error
                        break
                    order.num_put += key not in self.store.objects
                    self.store.objects.setdefault(key, self.memory.host[page])
            case Remove() if not error:
                for key in order.keys:
                    self.store.objects.pop(key, None)
        self.store.end(order, error=error)

    def _read_page(self, order: Get) -> bool:
        """Read the next page of an order. Returns whether the store has it."""
        key, page = order.keys[order.num_right], order.page_ids[order.num_right]
        if key not in self.store.objects:
            return False
        self.memory.host[page] = self.store.objects[key]
        order.num_right += 1
        return True

    @rule(data=st.data())
    @precondition(lambda self: self._reads)
    def read_a_page(self, data: st.DataObject) -> None:
        """A page of an order arrives, or a part of it, and the order goes on."""
        order = data.draw(st.sampled_from(self._reads), "order")
        if order.num_right == len(order.keys):
            return
        if data.draw(st.booleans(), "all of the page"):
            self._read_page(order)
        else:
            self.memory.host[order.page_ids[order.num_right]] = b"a part"

    def _fail_read(self, order: Get) -> None:
        order.may_still_land = True
        self.store.landing_late += order.page_ids[order.num_right :]

    @rule(pages=prompts)
    def fail_to_read(self, pages: tuple[int, ...]) -> None:
        self.begin_to_read(pages)
        for order in self._reads:
            self._fail_read(order)
            self.store.end(order, error="lost")
        self._poll()

    @property
    def _reads(self) -> list[Get]:
        return [order for order in self.store.orders if isinstance(order, Get)]

    @rule(data=st.data())
    @precondition(lambda self: self.store.landing_late)
    def bytes_land_late(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.store.landing_late), "page")
        self.memory.host[page] = b"late"

    @rule(data=st.data(), is_lost=st.booleans())
    @precondition(lambda self: self.store.objects)
    def the_store_changes(self, data: st.DataObject, is_lost: bool) -> None:
        """An object is evicted, or becomes wrong."""
        key = data.draw(st.sampled_from(sorted(self.store.objects)), "key")
        if is_lost:
            del self.store.objects[key]
        else:
            self.store.objects[key] = WRONG

    @rule(pages=prompts)
    def another_node_computes(self, pages: tuple[int, ...]) -> None:
        self.store.objects.update((key, key) for key in keys_of(pages))

    @rule(pages=prompts)
    def serve_from_store(self, pages: tuple[int, ...]) -> None:
        """Serve a request at once, with all that the store says, if nothing holds it back."""
        self.arrive(pages)
        request = self.waiting[-1]
        for _ in range(4):
            if request in self.waiting:
                self._begin(request)
                self._answer_all()
        if request in self.computing:
            self._finish(request)
            self._answer_all()

    def _answer_all(self) -> None:
        while self.store.orders:
            self._answer(self.store.orders[0], None)
        self._end_all_copies()

    @invariant()
    def reads_own_their_slots(self) -> None:
        num_over = sum(isinstance(order, Get) for order in self.store.over)
        assert self.store_tier.num_landing == len(self._reads) + num_over

    def teardown(self) -> None:
        """All requests end while the store says nothing more, and then nothing is left of them."""
        super().teardown()
        self.now += QUARANTINE_SECS
        for _ in range(3):  # a page that comes down at last is written through
            self._answer_all()
        self.now += QUARANTINE_SECS
        self._poll()
        assert self.store_tier.num_landing + self.store_tier.num_quarantined == 0
        assert self.store_tier.writes.num_queued_pages == 0
        self.nothing_is_lost_or_twice()


TierOnStore.TestCase.settings = settings(
    derandomize=True, max_examples=num_examples(16, 400), stateful_step_count=40
)
TestStoreTier = TierOnStore.TestCase


def test_pages_behind_one_that_is_found_wrong_during_their_copy_are_not_kept() -> None:
    machine = Tier()
    machine.serve((0, 0, 0))
    machine.arrive((0, 0, 0, 0, 1))
    (request,) = machine.waiting
    machine._begin(request)
    machine._finish(request)
    assert machine.tier.num_copies_down == 1
    (stored,) = [run for run in machine.prefixes if run.kinds == HOST_POOLS]
    slot = stored.holding[PoolKind.HOST][0].start
    machine.set_aside.record_wrong_row("scrub", PoolKind.HOST, WrongItem(0, 0, slot, 0, 1))
    machine._end_all_copies()
    machine.nothing_is_lost_or_twice()
    assert machine.prefixes.find(request.keys, HOST_POOLS) is None
    assert machine.pools.free.host == machine.memory.num_slots - PAGE_SIZE, "all but the page set aside"


def test_pages_behind_one_that_is_found_wrong_while_they_are_read_are_not_kept() -> None:
    machine = TierOnStore()
    machine._serve((0, 0, 0))
    machine.begin_to_read((0, 0, 0, 0, 1))
    (order,) = machine._reads
    assert len(order.keys) == 2, "main memory has three pages of the prompt"
    (stored,) = [run for run in machine.prefixes if run.kinds == HOST_POOLS and run.start_page == 0]
    slot = stored.holding[PoolKind.HOST][0].start
    machine.set_aside.record_wrong_row("scrub", PoolKind.HOST, WrongItem(0, 0, slot, 0, 1))
    machine._answer_all()
    machine.nothing_is_lost_or_twice()
    assert machine.prefixes.find(order.keys, HOST_POOLS) is None
    assert machine.store_tier.num_landing == 0


def test_pages_that_are_found_wrong_on_the_device_during_their_copy_down_are_not_kept() -> None:
    """They may have been wrong before they were copied, and their checks, too."""
    machine = Tier()
    machine.arrive((0, 0, 1))
    (request,) = machine.waiting
    machine._begin(request)
    machine._finish(request)
    assert machine.tier.num_copies_down == 1
    (cached,) = machine.prefixes
    machine.prefixes.drop(PoolKind.DEVICE, cached.holding[PoolKind.DEVICE][0].start)
    machine._end_all_copies()
    machine.nothing_is_lost_or_twice()
    assert machine.prefixes.find(request.keys, HOST_POOLS) is None
    assert machine.pools.free == machine.pools.totals


def test_pages_that_are_arriving_are_not_copied_down() -> None:
    """Until their bytes are there, the device has those of another prompt, with checks that are right."""
    machine = Tier()
    machine.arrive((0, 0, 1))
    (request,) = machine.waiting
    source = decode_node_source(machine, request.keys)
    machine.copies_up.begin(source, Wanted(request.room, 3, 0, None), request.keys, 0)
    other = Room(2)
    machine.tier.store(other, request.keys)
    assert machine.tier.num_copies_down == 0
    machine._end_all_copies()
    machine.tier.store(other, request.keys)
    machine._end_all_copies()
    assert machine.prefixes.num_found(request.keys, HOST_POOLS) == 3
    machine.nothing_is_lost_or_twice()


def decode_node_source(machine: Tier, keys: Sequence[PageKey]) -> Any:
    """Return a source of a copy up that is not in main memory here, in place of a ``LaneSource``."""
    memory, held = machine.memory, dict(enumerate(keys))

    def copy(dst: Sequence[Extent], verify: Callable[[], object]) -> Event:
        pages = enumerate(extents_to_pages(dst, PAGE_SIZE))
        event = Event(memory, [(held, number, memory.device, page) for number, page in pages], is_up=True)
        verify()
        event.checks, memory._checks = memory._checks, []
        memory.events.append(event)
        return event

    return SimpleNamespace(copy=copy, is_kept=True, users=lambda: iter(()), end=lambda num_right: None)


def test_pages_of_the_store_are_unverified_no_longer_than_they_are_kept() -> None:
    """A wrong row in a page that has come down since is the memory's fault, and its page is set aside."""
    machine = TierOnStore()
    machine.begin_to_read((0, 0, 1))
    machine._answer_all()
    machine._end(machine.waiting[-1])
    (brought,) = machine.prefixes
    pages = extents_to_pages(brought.holding[PoolKind.HOST], PAGE_SIZE)
    assert all(map(machine.store_tier.is_unverified, pages))
    machine.prefixes.flush()
    machine._serve((1, 1, 2))
    (stored,) = [run for run in machine.prefixes if run.kinds == HOST_POOLS]
    assert extents_to_pages(stored.holding[PoolKind.HOST], PAGE_SIZE) == pages
    assert not any(map(machine.store_tier.is_unverified, pages))
