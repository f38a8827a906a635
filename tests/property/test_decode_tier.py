"""Reads from decode nodes against a plain model: they take any time, fail, lie, and end after their requests.

A decode node writes over what it held as soon as a room is over. Whatever such bytes are, they have right row
checks: nothing but the order of events keeps them from being taken for the prompt's.

In a second kind of histories the GPU copies what the decode node holds, and requests begin meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from hisparse_pd.core.paging.prefix import Prefix, end_of, is_on_its_way
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey, page_keys, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import PageRows, WrongItem
from hisparse_pd.prefill_node import decode_tier
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS, CopiesUp, Wanted
from hisparse_pd.prefill_node.decode_tier import (
    LEAST_WAIT_SECS,
    DecodeTier,
)
from hisparse_pd.prefill_node.fresh_pages import FreshPages
from hisparse_pd.prefill_node.pace import Pace
from hisparse_pd.prefill_node.part_reads import ReadMemory
from hisparse_pd.prefill_node.peer_pauses import PAUSE_SECS
from hisparse_pd.prefill_node.pins import Pins
from hisparse_pd.prefill_node.push import SourceRegions
from hisparse_pd.prefill_node.read_quarantine import QUARANTINE_SECS
from hisparse_pd.protocol.messages import Extent, HeldKv, RegionKind, Room
from hisparse_pd.transfer.plan import Descriptors, RegionView
from hisparse_pd.transfer.sender import Completion, WriteBatch
from tests.examples import num_examples

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I9]

PAGE_SIZE = 2
NUM_PAGES = 16
NUM_HELD_PAGES = 4096
WRONG = b"wrong"
KV, INDEX, THEIR_KV, THEIR_INDEX = (
    RegionView(base, num_slots, 1, num_slots, 1)
    for base, num_slots in (
        (1 << 20, NUM_PAGES * PAGE_SIZE),
        (1 << 21, NUM_PAGES * PAGE_SIZE),
        (1 << 22, NUM_HELD_PAGES * PAGE_SIZE),
        (1 << 23, NUM_HELD_PAGES * PAGE_SIZE),
    )
)

prompts = st.builds(
    lambda family, length, last: (*[family] * (length - 1), last),
    st.integers(0, 2),
    st.integers(2, 6),
    st.integers(0, 2),
)


def keys_of(pages: Sequence[int]) -> list[PageKey]:
    return page_keys(
        root_of(None), pack_token_ids([page for page in pages for _ in range(PAGE_SIZE)]), PAGE_SIZE
    )


@dataclass(eq=False)
class Request:
    """In place of a ``PrefillRequest``, with what a ``DecodeTier`` asks of one."""

    room: Room
    keys: list[PageKey]
    bootstrap: Any
    held_pages: list[int]
    num_readable_tokens: int
    peer: Any = field(
        default_factory=lambda: SimpleNamespace(
            session="decode",
            node_id="decode",
            regions={RegionKind.KV_HOST: THEIR_KV, RegionKind.INDEX: THEIR_INDEX},
        )
    )
    holding: Holding | None = None
    prefix: Prefix | None = None
    has_ended: bool = False

    def reusable_keys(self, page_size: int) -> tuple[PageKey, ...]:
        return tuple(self.keys)


Moves = list[tuple[int, int]]
"""Pages of the decode node, and those here that they go to."""


def moves_of(writes: Descriptors) -> Moves:
    """Return the whole pages of KV that descriptors read."""
    moves = []
    for src, dst, length in zip(*(column.tolist() for column in writes), strict=True):
        if THEIR_KV.base_addr <= src < THEIR_INDEX.base_addr:
            moves += [
                ((src - THEIR_KV.base_addr + slot) // PAGE_SIZE, (dst - KV.base_addr + slot) // PAGE_SIZE)
                for slot in range(length)
                if (dst - KV.base_addr + slot) % PAGE_SIZE == 0
            ]
    return moves


@dataclass
class Part:
    batch: WriteBatch
    moves: Moves
    is_started: bool = False


class Transport:
    """In place of a ``Sender``: parts of a room are carried out in order, by the test."""

    def __init__(self) -> None:
        self.parts: dict[Room, deque[Part]] = {}
        self.over: list[Completion] = []

    def submit(self, session: str, batch: WriteBatch) -> None:
        moves = [move for writes in batch.slices for move in moves_of(writes)]
        self.parts.setdefault(batch.room, deque()).append(Part(batch, moves))

    def cancel(self, room: Room) -> bool:
        parts = list(self.parts.get(room, ()))
        started = [part for part in parts if part.is_started]
        for part in parts[len(started) :]:
            self.end(part, error="cancelled")
        return bool(started)

    def end(self, part: Part, *, error: str = "", may_still_land: bool = False) -> None:
        batch = part.batch
        self.parts[batch.room].remove(part)
        if not self.parts[batch.room]:
            del self.parts[batch.room]
        self.over.append(
            Completion(
                batch.room,
                batch.tag,
                ok=not error,
                error=error,
                num_bytes=0 if error else batch.num_bytes,
                secs=0.0,
                may_still_land=may_still_land,
            )
        )


class Reads(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._patch = patch.object(decode_tier, "LEAST_SECS", 0.0)
        self._patch.start()
        self.now = 0.0
        self.device: dict[int, bytes] = {}
        """What each page here holds: the key of the page that was written there, or WRONG."""
        self.held: dict[int, bytes] = {}
        """The same of the decode node's pages."""
        self.late: list[int] = []
        """Pages here in which bytes of a failed read may still land."""
        self.transport = Transport()
        self.pools = Pools(SlotCounts(device=NUM_PAGES * PAGE_SIZE), PAGE_SIZE)
        self.prefixes = PrefixTree(self.pools)
        self.set_aside = SetAside(self.pools, self.prefixes, "prefill")
        self.pins = Pins(self.prefixes)
        fresh, checks = FreshPages(NUM_PAGES, lambda: self.now), SimpleNamespace()
        checks.begin_check, checks.wrong_items = self._begin_check, self._wrong_items
        self.copies_up = CopiesUp(self.pools, self.prefixes, checks, fresh, self.pins, 4 * PAGE_SIZE)
        self.tier = DecodeTier(
            self.transport,
            ReadMemory(
                SourceRegions(KV, INDEX, INDEX, (0,), (0,)),
                self._void,
                self._wrong_items,
                lambda session: 4 * PAGE_SIZE,  # two pages, of KV and keys of a byte a token
                *self._lane(),
            ),
            "all",
            self.pools,
            self.prefixes,
            self.set_aside,
            self.copies_up,
            self.pins,
            Pace(),
            fresh,
            lambda: self.now,
        )
        self.waiting: list[Request] = []
        self.computing: list[Request] = []
        self.num_rooms = 0

    def _lane(self) -> tuple[Any, Any]:
        """Return ``pinned`` and ``arrivals`` of the ``ReadMemory``."""
        return lambda session: None, None

    def _begin_check(self, rows: PageRows, page_size: int) -> torch.Tensor:
        raise AssertionError("nothing is copied")

    def _void(self, page_ids: Sequence[int]) -> None:
        self.device.update(dict.fromkeys(page_ids, WRONG))

    def _wrong_items(self, rows: PageRows, page_size: int) -> list[WrongItem]:
        return [
            WrongItem(0, int(position), int(page) * page_size, 0, 1)
            for page, position, _ in rows
            if self.device[int(page)] == WRONG
        ]

    # --- what the nodes do ---------------------------------------------------------------------------

    @rule(pages=prompts, num_held=st.integers(0, 6))
    def arrive(self, pages: tuple[int, ...], num_held: int) -> None:
        """A request comes, and its decode node holds the first pages of its prompt, anywhere."""
        self.num_rooms += 1
        keys = keys_of(pages)
        held_pages = [len(self.held) + 2 * number for number in range(min(num_held, len(keys)))]
        for page, key in zip(held_pages, keys, strict=False):
            self.held[page], self.held[page + 1] = key, WRONG
        extents = tuple(Extent(page * PAGE_SIZE, PAGE_SIZE) for page in held_pages)
        num_held_tokens = len(extents) * PAGE_SIZE
        held = HeldKv(extents, extents, num_held_tokens) if extents else None
        bootstrap = SimpleNamespace(held=held, hisparse=True)
        self.waiting.append(Request(Room(self.num_rooms), keys, bootstrap, held_pages, num_held_tokens))

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def plan(self, data: st.DataObject) -> None:
        self._begin(data.draw(st.sampled_from(self.waiting), "request"))

    def _begin(self, request: Request) -> None:
        """Begin a waiting request if nothing holds it back."""
        asked: Any = request
        if self.tier.fetch(asked, len(request.keys)):
            return
        found = self.prefixes.find(request.keys, CACHE_POOLS)
        num_cached = 0 if found is None else found.num_pages
        prefix = self.prefixes.use(request.keys[:num_cached], CACHE_POOLS) if num_cached else None
        need = SlotCounts(device=(len(request.keys) - num_cached) * PAGE_SIZE)
        if not need.fits_in(self.pools.free + self.prefixes.unused):
            if prefix is not None:
                self.prefixes.let_go(prefix)
            return
        request.prefix = prefix
        self._release(request)
        self.prefixes.make_room(need)
        request.holding = self.pools.reserve(request.room, need, Stage.RUNNING)
        own = extents_to_pages(request.holding[PoolKind.DEVICE], PAGE_SIZE)
        self.device.update(zip(own, request.keys[num_cached:], strict=True))
        self.waiting.remove(request)
        self.computing.append(request)
        if is_on_its_way(prefix):
            self._await_prefix(request)

    def _await_prefix(self, request: Request) -> None:
        raise AssertionError("nothing is copied")

    def _release(self, request: Request) -> None:
        self.tier.release(request.room)
        self.pins.release(request.room)

    @rule(data=st.data())
    @precondition(lambda self: self.computing)
    def finish(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from(self.computing), "request"))

    def _finish(self, request: Request) -> None:
        assert request.holding is not None
        if request.prefix is None or not request.prefix.is_dropped:  # else the node fails it
            request.prefix = self.prefixes.share(
                request.holding, request.keys, CACHE_POOLS, request.prefix, keeps_copies=True
            )
        self._end(request)

    @rule(data=st.data())
    @precondition(lambda self: self.waiting or self.computing)
    def abort(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(self.waiting + self.computing), "request"))

    def _end(self, request: Request) -> None:
        """The room is over, and the decode node gives its pages to others at once."""
        if request.prefix is not None:
            self.prefixes.let_go(request.prefix)
        self._release(request)
        if request.holding is not None:
            self.pools.release(request.holding)
        (self.waiting if request in self.waiting else self.computing).remove(request)
        request.has_ended = True
        self.held.update(dict.fromkeys(request.held_pages, b"another's, with right checks"))

    @rule(is_now=st.sampled_from([False] * 3 + [True]))
    def flush(self, is_now: bool) -> None:
        if is_now:
            self.prefixes.flush()

    @rule()
    @precondition(lambda self: not self.tier.parts.is_awaited and not self.copies_up)
    def unpin(self) -> None:
        self.pins.let_go_all()

    # --- what happens to reads -----------------------------------------------------------------------

    @rule(data=st.data(), num_parts=st.integers(1, 3), error=st.sampled_from(["", "", "", "lost", "unsaid"]))
    @precondition(lambda self: self.transport.parts)
    def end_parts(self, data: st.DataObject, num_parts: int, error: str) -> None:
        """Parts of a room arrive, the last one perhaps in part, which the transport may not say."""
        room = data.draw(st.sampled_from(sorted(self.transport.parts)), "room")
        for number in range(num_parts):
            if room in self.transport.parts:
                self._end_part(room, error if number == num_parts - 1 else "")

    def _end_part(self, room: Room, error: str = "") -> None:
        part = self.transport.parts[room][0]
        num_landed = len(part.moves) // 2 if error else len(part.moves)
        for from_, to in part.moves[:num_landed]:
            self.device[to] = self.held[from_]
        if error == "lost":
            self.late += [to for _, to in part.moves]
        if error == "unsaid":
            error = ""
        self.transport.end(part, error=error, may_still_land=bool(error))
        if error and room in self.transport.parts:
            self.transport.cancel(room)

    @rule(data=st.data())
    @precondition(lambda self: self.transport.parts)
    def start_part(self, data: st.DataObject) -> None:
        """From now on the part cannot be cancelled."""
        room = data.draw(st.sampled_from(sorted(self.transport.parts)), "room")
        self.transport.parts[room][0].is_started = True

    @rule()
    def poll(self) -> None:
        self.copies_up.end()
        over, self.transport.over = self.transport.over, []
        for completion in over:
            self.tier.parts.returned(completion)
        self.tier.parts.poll()

    @rule()
    @precondition(lambda self: self.late)
    def bytes_land_late(self) -> None:
        self.device.update(dict.fromkeys(self.late, b"late"))

    @rule(
        pages=prompts,
        what=st.sampled_from(["right", "damaged", "unsaid", "lost", "aborted", "late", "dropped"]),
        number=st.integers(0, 2),
    )
    def read(self, pages: tuple[int, ...], what: str, number: int) -> None:
        """Parts of a read arrive, in the course of which something happens."""
        self.tier.pauses._until.clear()
        self.arrive(pages, 6)
        request = self.waiting[-1]
        self._begin(request)
        for _ in range(number):
            if request.room in self.transport.parts:
                self._end_part(request.room)
        self.poll()
        if request.room not in self.transport.parts:
            return
        self.transport.parts[request.room][0].is_started = True
        match what:
            case "damaged":
                self.held[request.held_pages[-1]] = WRONG
            case "aborted":
                self._end(request)
            case "late":
                self.now += LEAST_WAIT_SECS
                self._begin(request)
            case "dropped":
                for run in [run for run in self.prefixes if not run.is_dropped and run.parent is None]:
                    self.prefixes.drop(PoolKind.DEVICE, run.holding[PoolKind.DEVICE][0].start)
        self._end_part(request.room, what if what in ("lost", "unsaid") else "")
        self.poll()
        if what == "lost":  # the bytes land when others could have the slots
            self.now += PAUSE_SECS
            self.poll()
            for family in (3, 4):
                self.arrive((family, *[5] * 5), 0)
                other = self.waiting[-1]
                self._begin(other)
                if other in self.computing and self.late:
                    self.bytes_land_late()
                    self._finish(other)

    @rule(data=st.data())
    @precondition(lambda self: any(not run.is_dropped for run in self.prefixes))
    def drop(self, data: st.DataObject) -> None:
        """A row of a page here is found wrong."""
        runs = [run for run in self.prefixes if not run.is_dropped]
        run = data.draw(st.sampled_from(runs), "run")
        self.prefixes.drop(PoolKind.DEVICE, run.holding[PoolKind.DEVICE][0].start)

    @rule(data=st.data())
    @precondition(lambda self: any(request.held_pages for request in self.waiting))
    def damage(self, data: st.DataObject) -> None:
        pages = [page for request in self.waiting for page in request.held_pages]
        self.held[data.draw(st.sampled_from(pages), "page")] = WRONG

    @rule(secs=st.sampled_from([0.3, LEAST_WAIT_SECS, PAUSE_SECS, QUARANTINE_SECS]))
    def time_passes(self, secs: float) -> None:
        self.now += secs
        if secs == QUARANTINE_SECS:  # what lands late has landed by then
            self.late.clear()

    # --- what must hold ------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_twice(self) -> None:
        self.pools.check_integrity(
            {
                Stage.LANDING: len(self.tier.parts),
                Stage.RUNNING: len(self.computing),
                Stage.QUARANTINED: self.tier.parts.num_quarantined,
                Stage.HELD: len(self.prefixes),
            }
        )
        users = [request.prefix for request in self.computing if request.prefix is not None]
        self.prefixes.check_integrity([*users, *self.pins.users(), *self.copies_up.users()])

    @invariant()
    def pages_hold_what_their_keys_say(self) -> None:
        for run in self.prefixes:
            pages = extents_to_pages(run.holding[PoolKind.DEVICE], PAGE_SIZE)
            is_found = not run.is_dropped and not run.is_arriving
            assert not is_found or [self.device[page] for page in pages] == run.keys

    @invariant()
    def requests_compute_behind_what_is_right(self) -> None:
        for request in self.computing:
            if request.prefix is not None and not request.prefix.is_dropped:
                pages = extents_to_pages(request.prefix.extents(PoolKind.DEVICE), PAGE_SIZE)
                assert [self.device[page] for page in pages] == request.keys[: len(pages)]

    def teardown(self) -> None:
        """All requests come to their end, though reads may be over long after them."""
        for _ in range(4 * (len(self.waiting) + len(self.computing)) + 8):
            self.poll()
            for request in list(self.computing):
                self._end(request)
            for request in list(self.waiting):
                self._begin(request)
            if not self.computing and not self.tier.parts.is_awaited:
                self.pins.let_go_all()
            self.now += LEAST_WAIT_SECS
            if not self.waiting:
                break
            self.now += QUARANTINE_SECS
            self.late.clear()
            for room in sorted(self.transport.parts):
                self._end_part(room)
        assert not self.waiting, "a request waits for ever"
        for request in list(self.computing):
            self._end(request)
        while self.transport.parts:
            self._end_part(min(self.transport.parts))
        self.poll()
        self.now += QUARANTINE_SECS
        self.poll()
        self._patch.stop()
        self.prefixes.flush()
        assert self.pools.free == self.pools.totals


Reads.TestCase.settings = settings(
    derandomize=True, max_examples=num_examples(16, 400), stateful_step_count=50
)
TestReads = Reads.TestCase


class Event:
    """The end of a copy, at which it is made: the decode node may have written over its source until then."""

    def __init__(self, machine: Copies) -> None:
        self._machine = machine
        self.moves: Moves = []
        self.checks: list[tuple[PageRows, torch.Tensor]] = []
        """Verifications behind the copy, with where their results go."""
        self.is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        while not self.is_over:
            self._machine.end_a_copy()

    def finish(self) -> None:
        for from_, to in self.moves:
            self._machine.device[to] = self._machine.held[from_]
        for rows, found in self.checks:
            found.fill_(len(self._machine._wrong_items(rows, PAGE_SIZE)))
        self.is_over = True


class Copies(Reads):
    """The same node with a GPU that reaches the decode node's memory."""

    def _lane(self) -> tuple[Any, Any]:
        self.events: list[Event] = []
        """Copies under way, in the order in which they end."""
        self.begun = Event(self)
        """What the copy that begins enqueues."""
        self.num_pinned = 0

        @contextmanager
        def copying() -> Iterator[None]:
            self.begun = Event(self)
            yield

        def record() -> Event:
            self.events.append(self.begun)
            return self.begun

        arrivals = SimpleNamespace(
            num_parts=1,
            layers=lambda part, num_layers: range(num_layers),
            record=lambda part: None,
            stream=SimpleNamespace(copying=copying, record=record),
        )
        return self._pinned, arrivals

    def _pinned(self, session: str) -> Any:
        def enqueue_reads(reads: Descriptors, most_long: int) -> None:
            self.begun.moves += moves_of(reads)

        def unpin() -> None:
            self.num_pinned -= 1

        self.num_pinned += 1
        return SimpleNamespace(enqueue_reads=enqueue_reads, unpin=unpin)

    def _begin_check(self, rows: PageRows, page_size: int) -> torch.Tensor:
        found = torch.zeros(1, dtype=torch.int32)
        self.begun.checks.append((rows, found))
        return found

    def _await_prefix(self, request: Request) -> None:
        """End the copies, behind which the forward computes. If its prefix came wrong, the request waits
        again, and the next plan comes at once."""
        self.copies_up.wait()
        assert request.prefix is not None
        assert request.holding is not None
        if request.prefix.is_dropped:
            self.prefixes.let_go(request.prefix)
            self._release(request)
            self.pools.release(request.holding)
            self.computing.remove(request)
            request.prefix = request.holding = None
            self.waiting.append(request)
            self._begin(request)

    @rule()
    @precondition(lambda self: self.events)
    def end_a_copy(self) -> None:
        self.events.pop(0).finish()

    @rule(pages=prompts, what=st.sampled_from(["right", "damaged", "aborted", "dropped", "shared"]))
    def copy(self, pages: tuple[int, ...], what: str) -> None:
        """A copy is under way, in the course of which something happens."""
        self.tier.pauses._until.clear()
        self.arrive(pages, 6)
        request = self.waiting[-1]
        asked: Any = request
        self.tier.fetch(asked, len(request.keys))
        if not self.events:
            return
        match what:
            case "damaged":
                self.held[request.held_pages[-1]] = WRONG
            case "aborted":
                self._end(request)
            case "dropped":
                for run in [run for run in self.prefixes if not run.is_dropped and run.parent is None]:
                    self.prefixes.drop(PoolKind.DEVICE, run.holding[PoolKind.DEVICE][0].start)
            case "shared":  # with a request that goes on behind it
                self.arrive(pages, 0)
                other: Any = self.waiting[-1]
                self._end(request)
                self._begin(other)
        while self.events:
            self.end_a_copy()
        self.poll()

    @invariant()
    def memory_is_pinned_by_copies_alone(self) -> None:
        assert self.num_pinned == len(self.copies_up)

    def teardown(self) -> None:
        while self.events:
            self.end_a_copy()
        self.poll()
        super().teardown()


Copies.TestCase.settings = settings(
    derandomize=True, max_examples=num_examples(16, 400), stateful_step_count=50
)
TestCopies = Copies.TestCase


def test_a_request_begins_while_its_pages_are_copied() -> None:
    machine = Copies()
    machine.arrive((0, 0, 0, 0, 1), 4)
    (request,) = machine.waiting
    machine._begin(request)
    assert request in machine.computing
    assert not machine.transport.parts
    assert machine.tier.counts.num_tokens == 4 * PAGE_SIZE
    machine.nothing_is_lost_or_twice()
    machine.pages_hold_what_their_keys_say()
    machine.teardown()


def test_a_copy_that_is_not_kept_may_end_behind_pages_that_were_dropped() -> None:
    """Nobody finds any more what is before its pages."""
    machine = Copies()
    machine.arrive((0, 0, 1), 0)
    (first,) = machine.waiting
    machine._begin(first)
    machine._finish(first)
    machine.arrive((0, 0, 0, 0, 1), 4)
    (request,) = machine.waiting
    asked: Any = request
    assert not machine.tier.fetch(asked, 5)
    (root,) = [run for run in machine.prefixes if run.parent is None]
    machine.prefixes.drop(PoolKind.DEVICE, root.holding[PoolKind.DEVICE][0].start)
    machine._end(request)
    machine.end_a_copy()
    machine.poll()
    machine.nothing_is_lost_or_twice()
    assert len(machine.prefixes) == 0
    machine.teardown()


def test_the_histories_have_reads_that_arrive() -> None:
    machine = Reads()
    machine.arrive((0, 0, 0, 0, 1), 4)
    (request,) = machine.waiting
    machine._begin(request)
    while machine.transport.parts:
        machine._end_part(request.room)
    machine.poll()
    machine._begin(request)
    assert request in machine.computing
    assert machine.tier.counts.num_tokens == 4 * PAGE_SIZE
    machine.nothing_is_lost_or_twice()
    machine.pages_hold_what_their_keys_say()
    machine.teardown()


class Untouched(tuple[Extent, ...]):
    """Extents that nobody may go through."""

    def __iter__(self) -> Iterator[Extent]:
        raise AssertionError("a plan goes through the extents of a request that only waits")


@pytest.mark.I8
def test_a_plan_goes_through_extents_only_to_read_them() -> None:
    machine = Reads()
    machine.arrive((0, 0, 0, 0, 1), 4)
    (request,) = machine.waiting
    asked: Any = request
    held = request.bootstrap.held
    request.bootstrap.held = HeldKv(Untouched(held.kv_extents), Untouched(held.index_extents), 8)
    machine.tier.pauses.pause(request.peer)
    assert not machine.tier.fetch(asked, 5)
    request.bootstrap.held = held
    machine.now += PAUSE_SECS
    assert machine.tier.fetch(asked, 5)
    machine.teardown()


class SlowSource:
    """Pages that main memory has, in place of a ``HostSource``."""

    is_kept = True

    def __init__(self, machine: Reads, pages: Sequence[bytes]) -> None:
        self._machine, self._pages = machine, pages
        self._dst: list[int] = []
        self.is_over = False

    def copy(self, dst: Sequence[Extent], verify: Callable[[], object]) -> Any:
        self._dst = extents_to_pages(dst, PAGE_SIZE)
        verify()
        return self

    def query(self) -> bool:
        return self.is_over

    def finish(self) -> None:
        self._machine.device.update(zip(self._dst, self._pages, strict=True))
        self.is_over = True

    def note_wrong(self, items: Sequence[WrongItem]) -> None:
        pass

    def users(self) -> Iterator[Prefix]:
        return iter(())

    def end(self, num_right: int) -> None:
        pass


def test_what_is_read_behind_a_copy_that_comes_wrong_is_dropped() -> None:
    """The request keeps the pages before the wrong one, and what its decode node sends begins behind it."""
    with patch.object(Reads, "_begin_check", lambda *_: torch.ones(1, dtype=torch.int32)):
        machine = Reads()
    machine.arrive((0, 0, 0, 0, 0, 1), 6)
    (request,) = machine.waiting
    source: Any = SlowSource(machine, [request.keys[0], WRONG])
    machine.copies_up.begin(source, Wanted(request.room, 6, 4 * PAGE_SIZE, None), request.keys[:2], 0)
    asked: Any = request
    assert machine.tier.fetch(asked, 6)
    source.finish()
    machine.poll()
    assert end_of(machine.pins.prefix(request.room)) == 1
    machine._end_part(request.room)
    machine.poll()
    machine.nothing_is_lost_or_twice()
    machine.pages_hold_what_their_keys_say()
    machine._begin(request)
    assert request.prefix is not None
    assert request.prefix.end_page == 1
    machine.teardown()


def test_a_request_that_begins_anew_reads_nothing_while_its_last_read_goes_on() -> None:
    """The transport cannot take that back, and both reads would be of one room."""
    machine = Reads()
    machine.arrive((0, 0, 0, 0, 1), 4)
    (request,) = machine.waiting
    asked: Any = request
    assert machine.tier.fetch(asked, 5)
    machine.transport.parts[request.room][0].is_started = True
    machine.now += LEAST_WAIT_SECS
    assert not machine.tier.fetch(asked, 5)
    machine._release(request)
    machine.now += PAUSE_SECS
    assert not machine.tier.fetch(asked, 5)
    machine.nothing_is_lost_or_twice()
    machine._end_part(request.room)
    machine.poll()
    machine._release(request)
    assert machine.tier.fetch(asked, 5)
    machine.teardown()
