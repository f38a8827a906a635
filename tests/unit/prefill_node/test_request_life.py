"""What rooms share, and which rooms are not admitted while much waits to be sent to their decode node.

``PrefillLife``, the plans and the send queue are the product's. Nothing is read or written: addresses are
made up.
"""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from hisparse_pd.prefill_node import arrivals
from hisparse_pd.prefill_node.arrivals import Arrivals
from hisparse_pd.prefill_node.bootstrap_checks import BootstrapChecks
from hisparse_pd.prefill_node.copies_up import RowChecks
from hisparse_pd.prefill_node.part_reads import ReadMemory, Reads
from hisparse_pd.prefill_node.prompt_pages import PromptPages
from hisparse_pd.prefill_node.push import PENDING_DIVISOR, WRITE_TIMEOUT_SECS, Pusher, SourceRegions
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.request_life import PrefillLife
from hisparse_pd.prefill_node.requests import PrefillRequests, PrefillState
from hisparse_pd.prefill_node.scheduler import StepLimits
from hisparse_pd.protocol.messages import (
    AbortRoom,
    RegionKind,
    Room,
    RoomFailed,
    RoomQuiet,
    RoomScores,
    ToDecode,
)
from hisparse_pd.transfer.plan import SLICE_BYTES, RegionView
from hisparse_pd.transfer.send_queue import Completion, Outcome, SendQueue
from tests.unit.prefill_node.support import bootstrap_of

pytestmark = [pytest.mark.I1, pytest.mark.I8]

PAGE_SIZE, NUM_PAGES = 16, 256
NUM_SLOTS = PAGE_SIZE * NUM_PAGES
ITEM_BYTES, NUM_LAYERS = 64 << 10, 4
TOKEN_BYTES = (NUM_LAYERS + 1) * ITEM_BYTES
SHORT = SLICE_BYTES // TOKEN_BYTES
MAX_QUEUED = 20
MAX_PENDING = NUM_SLOTS // PENDING_DIVISOR
"""Tokens of long prompts that may be pending for a node before the next has to wait."""


class QueuedSender:
    """A transport that writes when it is told to."""

    def __init__(self) -> None:
        self.queue = SendQueue()
        self.submit = self.queue.submit
        self.num_pending = self.queue.num_pending
        self.num_bytes_pending = self.queue.num_bytes_pending
        self.cancel = self.queue.cancel

    def poll(self) -> list[Completion]:
        return self.queue.take_completions(0.0)

    def write(self, session: str) -> None:
        """Write all that is queued for a peer."""
        while (taken := self.queue.next(session, 0.0)) is not None:
            self.queue.finish(taken, Outcome())


def view(base: int, num_layers: int, item_bytes: int) -> RegionView:
    return RegionView(base, num_layers * NUM_SLOTS * item_bytes, num_layers, NUM_SLOTS, item_bytes)


def regions(base: int) -> dict[RegionKind, RegionView]:
    return {
        RegionKind.KV_HOST: view(base, NUM_LAYERS, ITEM_BYTES),
        RegionKind.INDEX: view(base + (1 << 40), 1, ITEM_BYTES),
        RegionKind.AUX: view(base + (2 << 40), 1, 64),
    }


class Node:
    """A prefill node's rooms, and two decode nodes."""

    def __init__(self) -> None:
        self.sender = QueuedSender()
        self.told: list[ToDecode] = []
        self.is_heard = True
        source = regions(1 << 50)
        self.peers = [
            Peer(name, name, b"", PAGE_SIZE, regions(1 << shift), 0.0)
            for name, shift in (("a", 51), ("b", 52))
        ]
        kv, index, aux = (source[kind] for kind in (RegionKind.KV_HOST, RegionKind.INDEX, RegionKind.AUX))
        sources = SourceRegions(kv, index, aux, tuple(range(NUM_LAYERS)), (0,) * NUM_LAYERS)
        self.pusher = Pusher(self.sender, sources, PAGE_SIZE)  # type: ignore[arg-type]
        limits = StepLimits(NUM_SLOTS, 0, 8, PAGE_SIZE, NUM_PAGES)
        checks = Mock(spec=RowChecks)  # nothing is read back here
        pages = PromptPages(
            limits,
            num_aux_slots=16,
            checks=checks,
            use_prefix_cache=True,
            held_reads=Mock(spec=Reads),
            read_memory=Mock(spec=ReadMemory),
        )
        self.life = PrefillLife(pages, self.pusher, self.tell, room_timeout_secs=300.0, grace_secs=10.0)
        self.arrivals = Arrivals(self.life, BootstrapChecks(limits, NUM_SLOTS, vocab_size=1000), MAX_QUEUED)

    def tell(self, peer: Peer, message: ToDecode) -> bool:
        self.told.append(message)
        return self.is_heard

    def arrive(
        self, room: int, peer: int, num_tokens: int, family: int = 0, num_resumed: int = 0, now: float = 0.0
    ) -> None:
        """Receive a Bootstrap with so many tokens to compute. Prompts of one family begin alike."""
        tokens = (*[family or room] * (num_tokens - 1), room, 5)
        message = bootstrap_of(room, tokens, num_resumed_tokens=num_resumed)
        self.arrivals.bootstrap(self.peers[peer], message, now)

    def compute(self, room: int) -> None:
        """Admit a room and compute its prompt, which is then queued at the sender as a whole."""
        request = self.life.requests.live(Room(room))
        self.life.admit([request], 0.0)
        stop = request.num_computed_tokens
        push = self.pusher.plan(request, request.num_ready_tokens, stop)
        for layer in range(NUM_LAYERS):
            self.pusher.layer_written([push], layer)
        self.life.note_computed(request, stop)
        self.life.start_sending(request, 0.0)

    def candidates(self) -> list[int]:
        return [waiting.room for waiting in self.life.candidates(may_be_arriving=True)]


@pytest.fixture
def node() -> Node:
    return Node()


def test_a_node_that_is_behind_keeps_long_prompts_waiting_and_no_others(node: Node) -> None:
    node.arrive(1, 0, MAX_PENDING + PAGE_SIZE)
    assert node.candidates() == [1], "with nothing pending any prompt is taken"
    node.compute(1)
    for room, peer, num_tokens in ((2, 0, SHORT + 1), (3, 0, SHORT), (4, 1, SHORT + 1), (5, 0, 1000)):
        node.arrive(room, peer, num_tokens)
    assert node.candidates() == [3, 4]
    taken = node.sender.queue.next("a", 0.0)
    while node.sender.num_bytes_pending("a") > MAX_PENDING * TOKEN_BYTES:
        assert node.candidates() == [3, 4]
        assert taken is not None
        node.sender.queue.finish(taken, Outcome())
        taken = node.sender.queue.next("a", 0.0)
    assert node.candidates() == [2, 3, 4, 5], "in order of arrival"


def test_an_abort_makes_place_at_once(node: Node) -> None:
    node.arrive(1, 0, MAX_PENDING + PAGE_SIZE)
    node.compute(1)
    node.arrive(2, 0, 1000)
    in_flight = node.sender.queue.next("a", 0.0)
    assert in_flight is not None
    assert node.candidates() == []
    node.life.abort_room(node.peers[0], AbortRoom(1, "bored"), 0.0)
    assert node.sender.num_pending(Room(1)) == 1
    node.sender.queue.finish(in_flight, Outcome())
    assert node.sender.num_bytes_pending("a") == 0
    assert node.candidates() == [2]


def test_cached_prefixes_of_one_turn_count_before_they_are_sent(node: Node) -> None:
    num_cached = MAX_PENDING // 2 + PAGE_SIZE
    node.arrive(1, 1, num_cached + 1, family=7)
    node.compute(1)
    node.sender.write("b")
    for room in (2, 3, 4):
        node.arrive(room, 0, num_cached + PAGE_SIZE, family=7)
    assert node.candidates() == [2, 3], "the third waits until the first two have been sent"


def test_a_long_prefix_is_one_batch_that_has_the_rooms_time(node: Node) -> None:
    node.arrive(1, 1, 1025, family=7)
    node.compute(1)
    node.sender.write("b")
    node.arrive(2, 0, 1030, family=7)
    request = node.life.requests.live(Room(2))
    node.life.admit([request], 250.0)
    node.life.pusher.push_cached(request)
    assert node.sender.num_pending(Room(2)) == 1
    assert node.sender.num_bytes_pending("a") == 1024 * TOKEN_BYTES
    taken = node.sender.queue.next("a", 290.0)
    assert taken is not None
    assert taken.writes.num_bytes == SLICE_BYTES
    assert taken.deadline == 310.0, "the room's own, since its Bootstrap"
    node.sender.queue.finish(taken, Outcome())
    taken = node.sender.queue.next("a", 240.0)
    assert taken is not None
    assert taken.deadline == 240.0 + WRITE_TIMEOUT_SECS


def test_rooms_of_one_forward_do_not_give_up_each_others_prefixes(node: Node) -> None:
    """The first room needs pages, and the other rooms' prefixes have been unused for longest."""
    for room in range(1, 9):
        node.arrive(room, 1, NUM_SLOTS // 8 + 1 - PAGE_SIZE, family=room)
        node.compute(room)
    node.sender.write("b")
    for completion in node.sender.poll():
        node.life.batch_returned(completion, 0.0)
    num_cached = 8 * (NUM_PAGES // 8 - 1)
    assert node.life.pages.prefixes.num_tokens == num_cached * PAGE_SIZE
    assert node.life.pages.num_available_pages == NUM_PAGES
    node.arrive(11, 1, 100 * PAGE_SIZE)
    for room in (12, 13):
        node.arrive(room, 1, NUM_SLOTS // 8, family=room - 11)
    requests = [node.life.requests.live(Room(room)) for room in (11, 12, 13)]
    found = [node.life.pages.look_up(request) for request in requests]
    assert [(waiting.num_cached_pages, waiting.num_unused_pages) for waiting in found] == [
        *((0, 0), (31, 31), (31, 31))
    ]
    node.life.admit(requests, 0.0)
    again = node.life.pages.look_up(requests[1])
    assert (again.num_cached_pages, again.num_unused_pages) == (31, 0), "it uses them"
    assert [request.num_cached_tokens for request in requests] == [0, 496, 496]
    assert node.life.pages.num_available_pages == NUM_PAGES - 100 - 2 * NUM_PAGES // 8
    node.life.check_integrity()


@pytest.mark.I6
def test_a_prompt_may_fill_the_context(node: Node) -> None:
    node.arrive(1, 0, NUM_SLOTS - 1)
    assert node.told == []
    node.arrive(2, 0, NUM_SLOTS)
    (failed,) = node.told
    assert isinstance(failed, RoomFailed)
    assert (failed.room, failed.status, failed.quiet) == (2, 400, True)
    assert f"longer than the context of {NUM_SLOTS}" in failed.error
    assert node.candidates() == [1]


@pytest.mark.I7
def test_no_more_rooms_wait_than_may(node: Node) -> None:
    """Rooms that compute or send do not count as waiting. A room that was refused may come again."""
    for room in range(1, MAX_QUEUED + 1):
        node.arrive(room, 0, 20)
    assert node.told == []
    node.arrive(30, 1, 20)
    (failed,) = node.told
    assert isinstance(failed, RoomFailed)
    assert (failed.room, failed.status, failed.quiet, failed.batch_failed) == (30, 429, True, False)
    assert f"{MAX_QUEUED} rooms wait on this prefill node, and {MAX_QUEUED} may" in failed.error
    assert node.life.counters["failed_requests_total"] == 1
    node.compute(1)
    node.arrive(30, 1, 20)
    assert node.life.requests.live(Room(30)).state is PrefillState.QUEUED
    assert len(node.told) == 1


@pytest.mark.I7
def test_no_more_tokens_wait_than_may(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_QUEUED_TOKENS", 100)
    node.arrive(1, 0, 59)
    node.arrive(2, 0, 40)
    (failed,) = node.told
    assert isinstance(failed, RoomFailed)
    assert (failed.room, failed.status) == (2, 429)
    assert "prompts of 60 tokens wait on this prefill node, and 41 more would exceed 100" in failed.error
    node.arrive(3, 0, 39)
    node.life.abort_room(node.peers[0], AbortRoom(1, "bored"), 0.0)
    node.arrive(2, 0, 40)
    assert node.candidates() == [3, 2]


@pytest.mark.I7
def test_a_room_waits_until_its_deadline(node: Node) -> None:
    node.arrive(1, 0, 20, now=100.0)
    node.arrive(2, 0, 20, now=101.0)
    node.arrive(3, 0, 20, now=102.0)
    node.life.admit([node.life.requests.live(Room(1))], 103.0)
    node.life.fail_expired(411.0)
    assert node.told == []
    node.life.fail_expired(411.5)
    (failed,) = node.told
    assert isinstance(failed, RoomFailed)
    assert (failed.room, failed.status, failed.quiet) == (2, 504, True)
    assert "was not begun within 310 s (--room-timeout-secs 300, and 10 s" in failed.error
    assert node.candidates() == [3]
    assert node.life.requests.live(Room(1)).state is PrefillState.COMPUTING


@pytest.mark.I7
def test_a_room_whose_scores_cannot_be_sent_fails(node: Node) -> None:
    """No piece is silently left out: the room ends, and no later piece is sent."""
    node.arrive(1, 0, 20)
    request = node.life.requests.live(Room(1))
    node.life.admit([request], 0.0)
    pieces = [RoomScores(Room(1), first, 0, b"") for first in (1, 2, 3)]
    assert node.life.send_scores(request, pieces[:1], 0.0)
    assert request.state is PrefillState.COMPUTING
    node.is_heard = False
    assert not node.life.send_scores(request, pieces[1:], 0.0)
    assert node.told[:2] == pieces[:2], "sent on behind a lost piece"
    failed = node.told[2]
    assert isinstance(failed, RoomFailed)
    assert (failed.status, len(node.told)) == (502, 3)
    assert "logprobs of the prompt could not be sent to decode node a" in failed.error
    assert node.life.requests.get(Room(1)) is None
    node.life.check_integrity()


@pytest.mark.I7
def test_a_bootstrap_that_is_repeated_while_its_room_drains_hears_how_it_ended(node: Node) -> None:
    """A Bootstrap with another prompt or attempt is dropped."""
    message = bootstrap_of(1, [*range(5, 40)], attempt=3)
    node.arrivals.bootstrap(node.peers[0], message, 0.0)
    node.compute(1)
    taken = node.sender.queue.next("a", 0.0)
    assert taken is not None
    node.life.fail(node.life.requests.live(Room(1)), 500, "a bad kernel", 0.0)
    first = node.told.pop()
    assert isinstance(first, RoomFailed)
    assert not first.quiet
    for other in (
        bootstrap_of(1, [*range(5, 39), 9], attempt=3),
        bootstrap_of(1, [*range(5, 40)], attempt=4),
    ):
        node.arrivals.bootstrap(node.peers[0], other, 0.0)
        assert node.told == []
    node.arrivals.bootstrap(node.peers[0], bootstrap_of(1, [*range(5, 40)], attempt=3), 0.0)
    assert node.told == [first]
    node.sender.queue.finish(taken, Outcome())
    for completion in node.sender.poll():
        node.life.batch_returned(completion, 0.0)
    assert node.told[1:] == [RoomQuiet(Room(1), batch_failed=False, attempt=3)]


@pytest.mark.I7
def test_an_abort_ends_its_own_attempt_or_that_of_a_node_that_says_none(node: Node) -> None:
    for room, attempt, ends in ((1, 4, False), (1, 3, True), (2, 0, True)):
        node.told.clear()
        if node.life.requests.get(Room(room)) is None:
            node.arrivals.bootstrap(node.peers[0], bootstrap_of(room, [*range(5, 40)], attempt=3), 0.0)
        node.life.abort_room(node.peers[0], AbortRoom(room, "bored", attempt), 0.0)
        assert (node.life.requests.get(Room(room)) is None) is ends
        assert node.told == [RoomQuiet(Room(room), batch_failed=False, attempt=attempt)]


def test_what_was_given_up_is_known_by_room_node_and_attempt(node: Node) -> None:
    node.life.abort_room(node.peers[0], AbortRoom(1, "bored", 3), 0.0)
    node.life.abort_room(node.peers[0], AbortRoom(2, "bored"), 0.0)
    for room, peer, attempt, is_served in ((1, 0, 3, False), (1, 1, 3, True), (2, 0, 0, True)):
        message = bootstrap_of(room, [*range(5, 40)], attempt=attempt)
        node.arrivals.bootstrap(node.peers[peer], message, 0.0)
        assert (node.life.requests.get(Room(room)) is not None) is is_served


def test_of_what_was_given_up_the_last_is_remembered() -> None:
    requests = PrefillRequests(max_ended=2)
    for attempt in (1, 2, 3):
        requests.note_given_up(Room(1), "a", attempt)
    assert [requests.was_given_up(Room(1), "a", attempt) for attempt in (1, 2, 3)] == [False, True, True]


@pytest.mark.I1
def test_a_delivery_is_repeated_for_its_attempt(node: Node) -> None:
    message = bootstrap_of(1, [*range(5, 40)], attempt=3)
    node.arrivals.bootstrap(node.peers[0], message, 0.0)
    node.compute(1)
    node.sender.write("a")
    for completion in node.sender.poll():
        node.life.batch_returned(completion, 0.0)
    (done,) = node.told
    for peer, attempt in ((0, 3), (1, 3), (0, 4)):
        node.told.clear()
        node.arrivals.bootstrap(node.peers[peer], bootstrap_of(1, [*range(5, 40)], attempt=attempt), 0.0)
        (answer,) = node.told
        assert (answer == done) is ((peer, attempt) == (0, 3))


@pytest.mark.I5
@pytest.mark.parametrize(
    ("num_resumed", "num_cached"),
    [
        *(((0, 0), 96), ((30, 0), 64), ((0, 30), 64), ((30, 30), 64), ((0, 100), 0)),
        *(((4, 0), 96), ((5, 0), 80), ((0, 4), 96), ((0, 5), 80)),
    ],
)
def test_pages_with_resumed_tokens_come_from_nobody_and_go_to_nobody(
    node: Node, num_resumed: tuple[int, int], num_cached: int
) -> None:
    """The same holds for a page with the token before the resumed ones; earlier pages are shared. The two
    prompts differ in the last token that is computed."""
    for room, resumed in enumerate(num_resumed, start=1):
        node.arrive(room, 0, 100, family=7, num_resumed=resumed)
        node.compute(room)
    assert node.life.requests.live(Room(2)).num_cached_tokens == num_cached
