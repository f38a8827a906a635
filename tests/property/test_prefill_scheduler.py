"""The prefill node's planning and the life of its rooms, driven through every order of events.

The machine stands in for the world: fronts and decode nodes that come, change their minds and vanish, and a
transport that delays, reorders between rooms and fails. After each event every pool must be whole, and no
page that the transport reads may be free or belong to another room. Layers leave while the forward goes on,
so the transport acts between them, too, and none may leave before it is written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hisparse_pd.engine.messages import (
    FromEngine,
    Generate,
    GenerateGroup,
    PrefillFinished,
    RequestFailed,
    pack_token_ids,
)
from hisparse_pd.paging.extents import expand_pages, extents_to_slots
from hisparse_pd.paging.pools import PoolKind, SlotCounts
from hisparse_pd.vocabulary import SamplingParams
from prefill_node.push import MAX_PENDING_BATCHES, ChunkPush, Pusher, SourceRegions
from prefill_node.registrations import Peer
from prefill_node.room_life import RequestLimits, RoomLife
from prefill_node.rooms import RoomState
from prefill_node.scheduler import MAX_LOOKED_AT, Running, StepLimits, Waiting, plan_step, why_never
from protocol.messages import (
    AbortRoom,
    Bootstrap,
    Extent,
    RegionKind,
    Room,
    RoomDone,
    RoomFailed,
    RoomQuiet,
    ToDecode,
)
from tests.identities import ANY, DIGEST
from transfer.plan import Descriptors, RegionView, join_descriptors
from transfer.sender import Completion, WriteBatch

pytestmark = [pytest.mark.I1, pytest.mark.I2, pytest.mark.I5, pytest.mark.I7, pytest.mark.I8]

PAGE_SIZE = 4
ITEM_BYTES = 8

# --- planning ---------------------------------------------------------------------------------------------

limits_strategy = st.builds(
    StepLimits,
    chunk_tokens=st.integers(1, 40),
    short_tokens=st.integers(0, 20),
    max_requests=st.integers(1, 6),
    page_size=st.just(PAGE_SIZE),
    num_pages=st.integers(1, 30),
)


@st.composite
def waiting_rooms(draw: st.DrawFn) -> list[Waiting]:
    rooms = []
    for number in range(draw(st.integers(0, 8))):
        num_tokens = draw(st.integers(1, 60))
        keys = tuple(
            bytes([draw(st.integers(0, 1)), *position.to_bytes(2)])
            for position in range((num_tokens - 1) // PAGE_SIZE)
        )
        num_cached = draw(st.integers(0, len(keys)))
        num_unused = draw(st.integers(0, num_cached))
        rooms.append(Waiting(Room(100 + number), num_tokens, keys, num_cached, num_unused))
    return rooms


@st.composite
def running_rooms(draw: st.DrawFn) -> list[Running]:
    rooms = []
    for number in range(draw(st.integers(0, 4))):
        num_tokens = draw(st.integers(1, 60))
        rooms.append(Running(Room(number), num_tokens, draw(st.integers(0, num_tokens - 1)), ()))
    return rooms


@settings(derandomize=True, max_examples=300)
@given(limits_strategy, running_rooms(), waiting_rooms(), st.integers(0, 30), st.integers(0, 8))
def test_a_plan_keeps_every_bound_and_the_order(
    limits: StepLimits, running: list[Running], waiting: list[Waiting], num_pages: int, num_aux_slots: int
) -> None:
    chunks = plan_step(running, waiting, limits, num_available_pages=num_pages, num_aux_slots=num_aux_slots)
    assert sum(chunk.stop - chunk.start for chunk in chunks) <= limits.chunk_tokens
    assert all(chunk.start < chunk.stop for chunk in chunks)
    assert len(chunks) <= limits.max_requests
    rooms = [chunk.room for chunk in chunks]
    assert len(set(rooms)) == len(rooms)

    admitted = [chunk for chunk in chunks if chunk.admits]
    continued = [chunk for chunk in chunks if not chunk.admits]
    order = [room.room for room in [*running, *waiting]]
    assert rooms == sorted(rooms, key=order.index)
    assert chunks == (*continued, *admitted)
    assert len(running) + len(admitted) <= max(limits.max_requests, len(running))
    assert len(admitted) <= num_aux_slots
    by_room = {room.room: room for room in waiting}
    needed = sum(
        limits.pages_for(by_room[chunk.room].num_prompt_tokens)
        - by_room[chunk.room].num_cached_pages
        + by_room[chunk.room].num_unused_pages
        for chunk in admitted
    )
    assert needed <= num_pages
    for chunk in admitted:
        assert chunk.start == by_room[chunk.room].num_cached_pages * PAGE_SIZE
    num_prompt_tokens = {room.room: room.num_prompt_tokens for room in [*running, *waiting]}
    long = [chunk for chunk in chunks if chunk.stop < num_prompt_tokens[chunk.room]]
    assert len(long) <= 1
    if long:
        assert sum(chunk.stop - chunk.start for chunk in chunks) == limits.chunk_tokens
        behind = chunks[chunks.index(long[0]) + 1 :]
        assert sum(chunk.stop - chunk.start for chunk in behind) <= limits.short_tokens
    else:
        assert [chunk.room for chunk in continued] == [room.room for room in running][: len(continued)]


def waiting(number: int, num_tokens: int, keys: tuple[bytes, ...] = (), num_cached: int = 0) -> Waiting:
    return Waiting(Room(number), num_tokens, keys, num_cached, 0)


LIMITS = StepLimits(chunk_tokens=32, short_tokens=0, max_requests=4, page_size=PAGE_SIZE, num_pages=16)


def test_a_room_that_does_not_fit_holds_back_those_behind_it() -> None:
    queue = [waiting(1, 4), waiting(2, 40), waiting(3, 4)]
    chunks = plan_step([], queue, LIMITS, num_available_pages=5, num_aux_slots=4)
    assert [chunk.room for chunk in chunks] == [1]


SHORT_TOO = replace(LIMITS, short_tokens=12)


def test_short_prompts_end_beside_a_long_one_that_gives_a_share() -> None:
    running = [Running(Room(1), 50, 3, ())]
    queue = [waiting(2, 13), waiting(3, 7), waiting(4, 6), waiting(5, 5)]
    limits = replace(SHORT_TOO, max_requests=9, num_pages=99)
    chunks = plan_step(running, queue, limits, num_available_pages=99, num_aux_slots=9)
    assert [(chunk.room, chunk.start, chunk.stop) for chunk in chunks] == [(1, 3, 23), (3, 0, 7), (5, 0, 5)]
    assert [chunk.admits for chunk in chunks] == [False, True, True]


def test_a_long_prompt_goes_on_however_many_short_ones_come() -> None:
    limits = replace(SHORT_TOO, max_requests=9, num_pages=99)
    num_computed = steps = 0
    while num_computed < 200:
        queue = [waiting(2 + number, 4) for number in range(20)]
        running = [Running(Room(1), 200, num_computed, ())]
        first, *_ = plan_step(running, queue, limits, num_available_pages=99, num_aux_slots=9)
        assert first.room == 1
        num_computed, steps = first.stop, steps + 1
    assert steps == 200 // (32 - 12)


def test_a_prompt_that_is_passed_by_keeps_its_pages() -> None:
    """Those of 2 are not there for 3, or short prompts could keep it out for ever."""
    running = [Running(Room(1), 50, 3, ())]
    queue = [waiting(2, 40), waiting(3, 4)]
    for num_pages, rooms in ((10, [1]), (11, [1, 3])):
        chunks = plan_step(running, queue, SHORT_TOO, num_available_pages=num_pages, num_aux_slots=4)
        assert [chunk.room for chunk in chunks] == rooms


def test_what_is_found_in_the_cache_counts_for_being_short() -> None:
    running = [Running(Room(1), 50, 3, ())]
    queue = [waiting(2, 42, tuple(bytes([key]) for key in range(10)), num_cached=10)]
    chunks = plan_step(running, queue, SHORT_TOO, num_available_pages=16, num_aux_slots=4)
    assert [(chunk.room, chunk.start, chunk.stop) for chunk in chunks] == [(1, 3, 33), (2, 40, 42)]


def test_a_long_queue_is_looked_at_no_further_than_its_beginning() -> None:
    looked_at = 0

    def queue() -> Iterator[Waiting]:
        nonlocal looked_at
        for number in range(1000):
            looked_at += 1
            yield waiting(number, 13)

    running = [Running(Room(1001), 50, 3, ())]
    limits = replace(SHORT_TOO, num_pages=9999)
    plan_step(running, queue(), limits, num_available_pages=9999, num_aux_slots=4)
    assert looked_at == MAX_LOOKED_AT


def test_an_equal_prompt_waits_for_the_one_that_computes_and_others_go_ahead() -> None:
    keys = (b"a", b"b")
    queue = [waiting(1, 10, keys), waiting(2, 10, keys), waiting(3, 10, (b"x", b"y"))]
    chunks = plan_step([], queue, LIMITS, num_available_pages=16, num_aux_slots=4)
    assert [chunk.room for chunk in chunks] == [1, 3]
    later = plan_step(
        [Running(Room(1), 10, 4, keys)], queue[1:2], LIMITS, num_available_pages=16, num_aux_slots=4
    )
    assert [chunk.room for chunk in later] == [1]


def test_a_prompt_that_finds_all_it_shares_in_the_cache_does_not_wait() -> None:
    running = [Running(Room(1), 12, 4, (b"a", b"b", b"c"))]
    queue = [waiting(2, 12, (b"a", b"z"), num_cached=1)]
    chunks = plan_step(running, queue, LIMITS, num_available_pages=16, num_aux_slots=4)
    assert [(chunk.room, chunk.start, chunk.stop) for chunk in chunks] == [(1, 4, 12), (2, 4, 12)]


def test_only_a_prompt_beyond_the_whole_pool_can_never_run() -> None:
    assert why_never(64, LIMITS) is None
    assert "needs 17 pages" in str(why_never(65, LIMITS))


# --- the life of rooms ------------------------------------------------------------------------------------


def whole(batch: WriteBatch) -> Descriptors:
    return join_descriptors(list(batch.slices))


@dataclass
class StubSender:
    """A transport in the hand of the test. One batch of a room is in flight at a time, as in the real one."""

    waiting: dict[Room, deque[WriteBatch]] = field(default_factory=dict)
    in_flight: dict[Room, WriteBatch] = field(default_factory=dict)
    refused: set[Room] = field(default_factory=set)
    completions: list[Completion] = field(default_factory=list)
    unwritten: set[int] = field(default_factory=set)
    """Addresses of items that the forward has still to write."""

    def submit(self, session: str, batch: WriteBatch) -> None:
        assert session
        if self.unwritten:
            writes = whole(batch)
            for address, length in zip(writes.src_addrs.tolist(), writes.lengths.tolist(), strict=True):
                early = self.unwritten & set(range(address, address + length, ITEM_BYTES))
                assert not early, f"{batch.tag} left before {len(early)} of its items were written"
        self.waiting.setdefault(batch.room, deque()).append(batch)
        if batch.room in self.refused:
            self.cancel(batch.room)

    def cancel(self, room: Room) -> bool:
        for batch in self.waiting.pop(room, ()):
            self.completions.append(Completion(room, batch.tag, False, "cancelled", 0, 0.0))
        return room in self.in_flight

    def num_pending(self, room: Room) -> int:
        return len(self.waiting.get(room, ())) + (room in self.in_flight)

    def num_bytes_pending(self, session: str) -> int:
        return 0

    def poll(self) -> list[Completion]:
        completions, self.completions = self.completions, []
        return completions

    def overdue(self) -> list[Room]:
        return []

    def start(self, room: Room) -> None:
        batch = self.waiting[room].popleft()
        if not self.waiting[room]:
            del self.waiting[room]
        self.in_flight[room] = batch

    def finish(self, room: Room, *, ok: bool) -> None:
        batch = self.in_flight.pop(room)
        num_bytes = batch.num_bytes if ok else 0
        error = "" if ok else "peer gone"
        self.completions.append(Completion(room, batch.tag, ok, error, num_bytes, 0.0, not ok))
        if not ok:
            self.refused.add(room)
            self.cancel(room)


NUM_PAGES = 12
NUM_SLOTS = NUM_PAGES * PAGE_SIZE
NUM_AUX_SLOTS = 3
ROOM_TIMEOUT_SECS, GRACE_SECS = 300.0, 10.0
NUM_LAYERS = 3
SOURCE = SourceRegions(
    kv=RegionView(0x10000, NUM_LAYERS * NUM_SLOTS * ITEM_BYTES, NUM_LAYERS, NUM_SLOTS, ITEM_BYTES),
    index=RegionView(0x20000, 2 * NUM_SLOTS * ITEM_BYTES, 2, NUM_SLOTS, ITEM_BYTES),
    aux=RegionView(0x30000, NUM_AUX_SLOTS * 64, 1, NUM_AUX_SLOTS, 64),
    index_group_of_layer=(0, 1, 1),
)
DST_SLOTS = 1000


def peer(number: int) -> Peer:
    def region(base: int, num_layers: int, item_bytes: int) -> RegionView:
        return RegionView(base, num_layers * DST_SLOTS * item_bytes, num_layers, DST_SLOTS, item_bytes)

    regions = {
        RegionKind.KV_HOST: region(0x100000, NUM_LAYERS, ITEM_BYTES),
        RegionKind.INDEX: region(0x200000, 2, ITEM_BYTES),
        RegionKind.AUX: region(0x300000, 1, 64),
    }
    return Peer(f"node-{number}", f"host:{number}", b"%d" % number, 16, regions, 0.0)


class LifecycleMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sender = StubSender()
        self.limits = StepLimits(10, 4, 3, PAGE_SIZE, NUM_PAGES)
        self.peers = [peer(0), peer(1)]
        self.front_ends: Counter[str] = Counter()
        self.num_finished = 0
        self.told_done: set[Room] = set()
        self.promised_quiet: set[Room] = set()
        self.quiet: set[Room] = set()
        self.aborted_requests: set[str] = set()
        self.accepted: set[str] = set()
        self.failed_batches: set[Room] = set()
        self.now = 0.0
        self.num_chunks: Counter[Room] = Counter()
        """Until when, and which source addresses, first attempts of delivered rooms may still read."""
        self.pusher = Pusher(self.sender, SOURCE, PAGE_SIZE, 60.0, min_batch_bytes=0)
        self.life = RoomLife(
            pusher=self.pusher,
            limits=self.limits,
            request_limits=RequestLimits(context_length=100, vocab_size=8, max_logprobs=20),
            num_aux_slots=NUM_AUX_SLOTS,
            use_prefix_cache=True,
            tell_front=self.on_front,
            tell_peer=self.on_peer,
            room_timeout_secs=ROOM_TIMEOUT_SECS,
            grace_secs=GRACE_SECS,
        )

    @initialize(min_batch_tokens=st.sampled_from([0, 0, 9, 30, 1 << 30]))
    def choose(self, min_batch_tokens: int) -> None:
        self.pusher._min_batch_bytes = min_batch_tokens * ITEM_BYTES

    # What the world is told.

    def on_front(self, message: FromEngine) -> None:
        assert isinstance(message, PrefillFinished | RequestFailed)
        self.front_ends[message.request_id] += 1
        self.num_finished += isinstance(message, PrefillFinished)
        assert self.front_ends[message.request_id] == 1, f"{message.request_id} ended twice"
        assert message.request_id not in self.aborted_requests

    def on_peer(self, peer: Peer, message: ToDecode) -> None:
        match message:
            case RoomDone():
                assert message.room not in self.sender.in_flight
                room = Room(message.room)
                self.told_done.add(room)
                assert room not in self.failed_batches
            case RoomFailed(quiet=True) | RoomQuiet():
                room = Room(message.room)
                assert room not in self.sender.in_flight, f"room {room} called quiet with a write in flight"
                assert room not in self.sender.waiting
                assert message.batch_failed == (room in self.failed_batches)
                self.quiet.add(room)
                self.promised_quiet.discard(room)
            case RoomFailed():
                self.promised_quiet.add(Room(message.room))
            case _:
                raise AssertionError(message)

    # What the world does.

    @rule(room=st.integers(0, 19), tokens=st.lists(st.integers(0, 1), min_size=0, max_size=30))
    def generate(self, room: int, tokens: list[int]) -> None:
        request_id = f"r{len(self.accepted)}"
        self.accepted.add(request_id)
        request = Generate(request_id, room, len(tokens), SamplingParams(4), "host", 1)
        self.life.accept(GenerateGroup((request,), ANY, pack_token_ids(tokens)), self.now)

    @rule(
        room=st.integers(0, 19),
        which=st.integers(0, 1),
        num_tokens=st.none() | st.integers(1, 30),
        bad=st.sampled_from([False] * 5 + [True]),
    )
    def bootstrap(self, room: int, which: int, num_tokens: int | None, bad: bool) -> None:
        record = self.life.rooms.get(Room(room))
        if num_tokens is None:
            num_tokens = record.num_prompt_tokens if record and record.num_prompt_tokens else 5
        start = DST_SLOTS - 2 if bad else 40 * room
        message = Bootstrap(
            room,
            num_tokens,
            kv_extents=(Extent(start, num_tokens),),
            index_extents=(Extent(40 * room, num_tokens),),
            aux_slot=room,
            prompt_digest=DIGEST,
            hisparse=True,
        )
        self.life.bootstrap(self.peers[which], message, self.now)

    @rule(data=st.data())
    def both_halves(self, data: st.DataObject) -> None:
        """The usual case: a new room, both halves, a prompt that often continues an earlier one."""
        room = data.draw(st.integers(10, 1000))
        size = data.draw(st.integers(1, 30))
        self.generate(room, [0] * size if data.draw(st.booleans()) else [room % 2] * size)
        self.bootstrap(room % 20, room % 2, None, False)
        if room >= 20:
            message = Bootstrap(room, size, (Extent(0, size),), (Extent(0, size),), 0, DIGEST, hisparse=True)
            self.life.bootstrap(self.peers[room % 2], message, self.now)

    @rule(
        fails_at=st.sampled_from([None] * 12 + [0, 1, 2, 3]),
        acts=st.lists(
            st.sampled_from(["none", "none", "start", "write", "fail"]),
            min_size=NUM_LAYERS + 1,
            max_size=NUM_LAYERS + 1,
        ),
    )
    def step(self, fails_at: int | None, acts: list[str]) -> None:
        """A forward that raises before layer ``fails_at``; ``acts``: of the transport after each layer."""
        self.turn(fails_at, acts[:NUM_LAYERS])
        self.act(acts[-1])

    def act(self, act: str) -> None:
        """What the transport does while nobody looks: its completions stay with the sender."""
        if act != "none":
            self.start_writes()
        if act in ("write", "fail"):
            for room in sorted(self.sender.in_flight):
                if act != "write":
                    self.failed_batches.add(room)
                self.sender.finish(room, ok=act != "fail")

    def turn(self, fails_at: int | None = None, acts: Sequence[str] = ("none",) * NUM_LAYERS) -> bool:
        life = self.life
        chunks = plan_step(
            life.running(),
            life.candidates(),
            self.limits,
            num_available_pages=life.num_available_pages,
            num_aux_slots=life.pools.free.aux,
        )
        batch = [(life.rooms.live(chunk.room), chunk) for chunk in chunks]
        life.admit([record for record, chunk in batch if chunk.admits], self.now)
        for record, chunk in batch:
            assert record.num_computed_tokens == chunk.start
            assert chunk.start < record.num_prompt_tokens, "the last prompt token must be computed"
        pushes = [self.pusher.plan(record, chunk.start, chunk.stop) for record, chunk in batch]
        self.num_chunks.update(record.room for record, _ in batch)
        for layer, act in enumerate(acts[:fails_at]):
            self.sender.unwritten = self.items(pushes, layer + 1)
            before = [self.sender.num_pending(push.record.room) for push in pushes]
            self.pusher.layer_written(pushes, layer)
            for push, num_pending in zip(pushes, before, strict=True):
                bound = max(num_pending, MAX_PENDING_BATCHES) + (layer == NUM_LAYERS - 1)
                assert self.sender.num_pending(push.record.room) <= bound
            if batch:
                self.act(act)
        self.sender.unwritten = set()
        for push in pushes:
            if fails_at is not None:
                life.fail(push.record, 500, "out of memory", self.now)
                continue
            life.computed(push.record, push.stop, push)
            if push.stop == push.record.num_prompt_tokens:
                life.prompt_computed(push.record, self.now)
        return bool(batch)

    def items(self, pushes: Sequence[ChunkPush], first_layer: int) -> set[int]:
        """Addresses of the chunks' items in the KV and index layers from ``first_layer`` of the model on."""
        addresses: set[int] = set()
        groups_written = set(SOURCE.index_group_of_layer[:first_layer])
        for push in pushes:
            slots = expand_pages(push.record.page_ids, PAGE_SIZE, push.start, push.stop)
            for region, layers in (
                (SOURCE.kv, range(first_layer, NUM_LAYERS)),
                (SOURCE.index, sorted(set(SOURCE.index_group_of_layer) - groups_written)),
            ):
                for layer in layers:
                    base = region.base_addr + layer * region.layer_bytes
                    addresses.update((base + slots * region.item_bytes).tolist())
        return addresses

    @precondition(lambda self: self.sender.waiting)
    @rule()
    def start_writes(self) -> None:
        for room in sorted(set(self.sender.waiting) - set(self.sender.in_flight)):
            self.sender.start(room)

    @precondition(lambda self: self.sender.in_flight)
    @rule(data=st.data(), ok=st.booleans())
    def finish_write(self, data: st.DataObject, ok: bool) -> None:
        room = data.draw(st.sampled_from(sorted(self.sender.in_flight)))
        if not ok:
            self.failed_batches.add(room)
        self.sender.finish(room, ok=ok)
        self.poll()

    @rule()
    def poll(self) -> None:
        for completion in self.sender.poll():
            self.life.completed(completion, self.now)

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def abort_request(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.accepted)))
        if self.front_ends[request_id] == 0:
            self.aborted_requests.add(request_id)
        self.life.abort_request(request_id, self.now)

    @rule(data=st.data(), which=st.integers(0, 1))
    def abort_room(self, data: st.DataObject, which: int) -> None:
        rooms = st.integers(0, 30)
        if known := sorted({record.room for record in self.life.rooms} | self.failed_batches):
            rooms |= st.sampled_from(known)
        room = data.draw(rooms)
        record = self.life.rooms.get(Room(room))
        was_his = record is not None and record.peer in (None, self.peers[which])
        had_writes = record is not None and record.num_writes_pending > 0
        self.quiet.discard(Room(room))
        if was_his and had_writes:
            self.promised_quiet.add(Room(room))
        if was_his or record is None:
            self.life.abort_room(self.peers[which], AbortRoom(room, "bored"), self.now)
            assert Room(room) in self.quiet or Room(room) in self.promised_quiet

    @rule(which=st.integers(0, 1))
    def lose_peer(self, which: int) -> None:
        self.life.fail_rooms_of(self.peers[which], "was silent", self.now)
        self.peers[which] = peer(which)

    @rule(secs=st.integers(0, 200))
    def pass_time(self, secs: int) -> None:
        self.now += secs
        self.life.fail_unpaired(self.now)
        for record in self.life.rooms.in_state(RoomState.WAITING_BOOTSTRAP, RoomState.WAITING_REQUEST):
            assert self.now - record.since_secs <= ROOM_TIMEOUT_SECS + GRACE_SECS

    @rule()
    def flush(self) -> None:
        self.life.prefixes.flush()
        assert self.life.prefixes.unused == SlotCounts()

    # What must hold.

    @invariant()
    def pools_are_whole(self) -> None:
        self.life.check_integrity()

    @invariant()
    def what_is_under_way_is_bounded_and_counted(self) -> None:
        unpolled = Counter(completion.room for completion in self.sender.completions)
        for record in self.life.rooms:
            num_pending = self.sender.num_pending(record.room)
            assert num_pending <= MAX_PENDING_BATCHES + self.num_chunks[record.room] + 2
            assert record.num_writes_pending == num_pending + unpolled[record.room]

    @invariant()
    def no_write_of_an_ended_room_starts(self) -> None:
        for record in self.life.rooms.in_state(RoomState.DRAINING):
            assert record.room not in self.sender.waiting

    @invariant()
    def pages_in_the_transport_are_held_by_their_room(self) -> None:
        for room, batch in [*self.sender.in_flight.items(), *self.all_waiting()]:
            record = self.life.rooms.get(room)
            assert record is not None, f"room {room} was forgotten with a write in the sender"
            num_tokens = len(record.page_ids) * PAGE_SIZE
            held = set(expand_pages(record.page_ids, PAGE_SIZE, 0, num_tokens).tolist())
            for address in whole(batch).src_addrs.tolist():
                if address >= SOURCE.aux.base_addr:
                    assert (address - SOURCE.aux.base_addr) // 64 == record.aux_slot_src
                    continue
                region = SOURCE.index if address >= SOURCE.index.base_addr else SOURCE.kv
                assert (address - region.base_addr) % region.layer_bytes // ITEM_BYTES in held
            owned = record.holding[PoolKind.DEVICE] if record.holding is not None else ()
            shared = record.prefix.extents(PoolKind.DEVICE) if record.prefix is not None else ()
            taken = set(extents_to_slots(owned + shared).tolist())  # which the pools' integrity is of
            assert held <= taken

    def all_waiting(self) -> list[tuple[Room, Any]]:
        return [(room, batch) for room, batches in self.sender.waiting.items() for batch in batches]

    def teardown(self) -> None:
        """Whatever happened, once the world calms down everything ends and every page is back."""
        for _ in range(500):
            self.now += 60.0
            worked = self.turn()
            for room in sorted(set(self.sender.waiting) - set(self.sender.in_flight)):
                self.sender.start(room)
            for room in sorted(self.sender.in_flight):
                self.sender.finish(room, ok=True)
                worked = True
            worked |= bool(self.sender.completions)
            self.poll()
            if not worked:
                break
        self.now += 1000.0
        self.life.fail_unpaired(self.now)
        assert len(self.life.rooms) == 0
        assert not self.promised_quiet
        self.life.check_integrity()
        self.flush()
        assert self.life.pools.free == self.life.pools.totals
        for request_id in self.accepted - self.aborted_requests:
            assert self.front_ends[request_id] == 1, f"{request_id} never ended"
        num_ended = self.num_finished + sum(
            self.life.counters[f"{end}_requests_total"] for end in ("aborted", "failed")
        )
        assert num_ended == len(self.accepted), "a request is counted twice or not at all"


LifecycleMachine.TestCase.settings = settings(derandomize=True, max_examples=200, stateful_step_count=50)
TestLifecycleMachine = LifecycleMachine.TestCase
