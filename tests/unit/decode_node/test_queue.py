"""What a turn of the decode node's loop costs while many requests wait, in requests that it looks at."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
from msgspec import structs

from hisparse_pd.base.decode_settings import HisparsePolicy
from hisparse_pd.base.vocabulary import HisparseFlag, Mode, SamplingParams
from hisparse_pd.core.paging.pools import Pools, SlotCounts
from hisparse_pd.core.paging.prompt_keys import KEY_BYTES, PromptKeys
from hisparse_pd.decode_node import plan_draft
from hisparse_pd.decode_node.end_moves import EndMoves
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.making_room import MAX_ONE_BY_ONE
from hisparse_pd.decode_node.metrics import Metrics
from hisparse_pd.decode_node.next_plan import NextPlan
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.prefill_peers import PrefillPeers
from hisparse_pd.decode_node.queue_moves import QueueMoves
from hisparse_pd.decode_node.request import KV_POOLS, Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.reserve import Reserve, order_ends
from hisparse_pd.decode_node.scheduler import MAX_ADMITTED, MAX_LOOKED_AT, MAX_ORDERS
from hisparse_pd.decode_node.step_plan import Admission, StepPlan
from hisparse_pd.engine.messages import Generate, RequestFailed, pack_token_ids
from hisparse_pd.protocol.messages import Room
from tests.books import carry_out, end, enqueue, make_request
from tests.identities import ROOT
from tests.unit.decode_node.peers_support import FakePeers

NUM_WAITING = 3000
NUM_RUNNING = 8
LIMITS = Limits(
    totals=SlotCounts(host=4000, device=2048, index=6000, lookup=8000, aux=32, req_row=NUM_RUNNING),
    page_size=16,
    max_context=300,
    index_topk=20,
    device_buffer_size=64,
    growth_tokens=16,
)
PEERS = [PeerAddress("prefill", port) for port in (1, 2, 3)]


class Node:
    """The parts of a turn that look at requests, without the model."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.rooms = LiveRequests(Pools(limits.totals, limits.page_size), 60.0)
        self.next_plan = NextPlan(limits, self.rooms)
        self.peers = FakePeers(LIMITS.page_size)
        self.sent: list[Any] = []
        peers = cast(PrefillPeers, self.peers)
        ends = EndMoves(self.rooms, cast(RequestTables, None), peers, Metrics(), self.sent.append)
        self.queue_moves = QueueMoves(limits, HisparsePolicy.ALWAYS, 300.0, self.rooms, peers, ends)

    def arrive(self, number: int, now: float = 0.0, max_new_tokens: int = 200) -> None:
        peer = PEERS[number % len(PEERS)]
        sampling = SamplingParams(max_new_tokens=max_new_tokens)
        message = Generate(f"id-{number}", number, 20, sampling, *peer.node, HisparseFlag.TRUE)
        self.queue_moves.generate(message, ROOT, pack_token_ids(range(20)), now)

    def turn(self, now: float) -> None:
        self.queue_moves.expire(now)
        self.queue_moves.refresh(now)
        plan = self.next_plan.make(now)
        carry_out(self.rooms, plan, now + 300.0)
        for admission in plan.admissions:
            self.rooms.start(admission.request)
            admission.request.output_token_ids.append(0)

    def queue(self) -> list[int]:
        return [int(request.room) for request in self.rooms.waiting()]


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Collect the ids of the requests of which anything is read."""
    found: set[str] = set()
    read = object.__getattribute__

    def note(request: Request, name: str) -> Any:
        found.add(read(request, "request_id"))
        return read(request, name)

    monkeypatch.setattr(Request, "__getattribute__", note)
    return found


def _lose_most(node: Node) -> None:
    """Let a room whose prefill node is gone keep most slots, so that a life of 219 tokens finds none."""
    node.arrive(0)
    node.queue_moves.refresh(0.0)
    (lost,) = node.rooms.waiting()
    most = SlotCounts(host=LIMITS.totals.host - 100, index=224, aux=1)
    node.rooms.reserve(Admission(lost, Mode.HISPARSE, most, 0), "run", 300.0)
    end(node.rooms, lost)


def _crowd() -> Node:
    node = Node()
    for number in range(NUM_RUNNING + NUM_WAITING):
        node.arrive(number)
    node.turn(0.0)
    assert len(node.rooms.select(RequestState.RUNNING)) == NUM_RUNNING
    return node


@pytest.mark.I8
def test_a_turn_looks_at_those_that_run_and_the_first_that_wait(touched: set[str]) -> None:
    node = _crowd()
    for now in (1.0, 2.0):
        touched.clear()
        node.turn(now)
        assert len(touched) <= NUM_RUNNING + 2 * len(PEERS)
    end(node.rooms, node.rooms.select(RequestState.RUNNING)[0], 3.0)
    touched.clear()
    node.turn(3.0)
    assert len(node.rooms.select(RequestState.RUNNING)) == NUM_RUNNING, "one more was admitted"
    assert len(touched) <= NUM_RUNNING + 3 * len(PEERS)


@pytest.mark.I8
def test_whoever_cannot_be_admitted_is_looked_at_again_when_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slots are there, but the first request may come to need them, which only a look at all tells."""
    looks: list[object] = []

    class CountedReserve(Reserve):
        def __init__(self, *args: Any) -> None:
            looks.append(args)
            super().__init__(*args)

    monkeypatch.setattr(plan_draft, "Reserve", CountedReserve)
    node = Node(replace(LIMITS, totals=structs.replace(LIMITS.totals, host=256)))
    node.arrive(0)
    node.arrive(1)
    node.turn(0.0)
    (first,) = node.rooms.select(RequestState.RUNNING)
    looks.clear()
    while first.has_next_step:
        first.output_token_ids.append(0)
        node.turn(0.0)
    assert 0 < len(looks) < first.sampling.max_new_tokens / 4
    assert node.queue() == [1]
    end(node.rooms, first)
    node.turn(0.0)
    assert node.queue() == []


@pytest.mark.I8
def test_beside_stuck_slots_a_bounded_number_is_passed_over(touched: set[str]) -> None:
    node = Node()
    _lose_most(node)
    for number in range(1, NUM_WAITING):
        node.arrive(number)  # each with a life of 219
    node.turn(60.0)
    touched.clear()
    node.turn(61.0)
    assert len(touched) <= MAX_LOOKED_AT + 2 * len(PEERS)
    assert not node.rooms.select(RequestState.RUNNING)


@pytest.mark.I7
def test_who_fits_beside_stuck_slots_overtakes_who_does_not_whenever_it_arrives() -> None:
    node = Node()
    _lose_most(node)
    node.arrive(1, 60.0)
    node.turn(60.0)
    node.turn(61.0)
    assert node.queue() == [1]
    node.arrive(2, 62.0, max_new_tokens=20)
    node.turn(62.0)
    assert [request.room for request in node.rooms.select(RequestState.RUNNING)] == [2]
    assert node.queue() == [1]


CROWD = replace(
    LIMITS,
    totals=SlotCounts(host=400_000, device=100_000, index=500_000, lookup=400_000, aux=1200, req_row=600),
    largest_hot_buffer=128,
)
"""Limits under which many requests run, and the device pool has room for many more."""


def _waiting_behind(
    num_running: int, num_waiting: int, flag: HisparseFlag, limits: Limits = CROWD
) -> tuple[LiveRequests, NextPlan]:
    """Return a node at which dense requests of ``auto`` run, and more of ``flag`` wait."""
    rooms = LiveRequests(Pools(limits.totals, limits.page_size), 60.0)
    plans = NextPlan(limits, rooms)
    for number in range(num_running):
        enqueue(rooms, make_request(number, 240, 17, HisparseFlag.AUTO))
    while len(rooms.select(RequestState.RUNNING)) < num_running:
        plan = plans.make(0.0)
        carry_out(rooms, plan)
        for admission in plan.admissions:
            rooms.start(admission.request)
    for number in range(num_running, num_running + num_waiting):
        enqueue(rooms, make_request(number, 240, 17, flag))
    return rooms, plans


@pytest.mark.I8
@pytest.mark.parametrize("flag", [HisparseFlag.AUTO, HisparseFlag.TRUE])
def test_the_work_of_a_plan_grows_as_the_number_of_requests(
    flag: HisparseFlag, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times as many requests run, and four times as many wait, which one plan must not multiply."""
    num_reads = 0
    read = object.__getattribute__

    def count(request: Request, name: str) -> Any:
        nonlocal num_reads
        num_reads += 1
        return read(request, name)

    reads_of = []
    for num_requests in (64, 256):
        _, plans = _waiting_behind(num_requests, num_requests, flag)
        num_reads = 0
        with monkeypatch.context() as context:
            context.setattr(Request, "__getattribute__", count)
            plan = plans.make(0.0)
        assert len(plan.admissions) == MAX_ADMITTED
        reads_of.append(num_reads)
    assert 0 < reads_of[0] < reads_of[1] < 4.5 * reads_of[0]


@pytest.mark.I8
def test_a_plan_puts_all_requests_in_order_a_few_times_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who must be dense takes the pages of two, and those that leave them must be able to end without."""
    num_orders = 0

    def counted(*args: Any) -> Any:
        nonlocal num_orders
        num_orders += 1
        return order_ends(*args)

    monkeypatch.setattr(plan_draft, "order_ends", counted)
    limits = replace(CROWD, totals=structs.replace(CROWD.totals, device=200 * 256 + 1024))
    rooms, plans = _waiting_behind(200, 100, HisparseFlag.FALSE, limits)
    most_orders, made = 0, list[StepPlan]()
    while not made or made[-1].admissions:
        num_orders = 0
        made.append(plans.make(0.0))
        most_orders = max(most_orders, num_orders)
        carry_out(rooms, made[-1])
        for admission in made[-1].admissions:
            rooms.start(admission.request)
    assert sum(len(plan.exchanges) for plan in made) >= 30
    assert 0 < most_orders <= MAX_ORDERS + 1 + 2 * MAX_ONE_BY_ONE
    assert [plan.is_cut for plan in made[:-2]] == [True] * (len(made) - 2)
    assert len(made) > 4


def test_the_queue_is_in_order_of_arrival_whatever_becomes_of_its_prefill_nodes() -> None:
    node = Node()
    for number in range(9):
        node.arrive(number)
    node.queue_moves.refresh(0.0)
    assert node.queue() == list(range(9))
    node.peers.away = {PEERS[1]}
    node.arrive(9)
    node.arrive(10)
    node.queue_moves.refresh(1.0)
    assert node.queue() == [0, 2, 3, 5, 6, 8, 9]
    node.peers.away = set()
    node.arrive(11)
    node.queue_moves.refresh(2.0)
    assert node.queue() == list(range(12))
    assert Counter(r.state for r in node.rooms.all()) == {RequestState.WAITING: 12}


@pytest.mark.I7
def test_everybody_who_waits_too_long_is_told_once_and_nobody_else() -> None:
    node = Node()
    for number, now in ((0, 0.0), (1, 5.0), (2, 0.0)):
        node.arrive(number, now)
    node.queue_moves.refresh(5.0)
    for now in (6.0, 7.0):  # away and back: the deadlines are as they were
        node.peers.away = {PEERS[0]}
        node.queue_moves.refresh(now)
        node.peers.away = set()
        node.queue_moves.refresh(now)
    node.queue_moves.expire(299.0)
    assert node.sent == []
    node.queue_moves.expire(300.0)
    assert [(failed.request_id, failed.status) for failed in node.sent] == [("id-0", 503), ("id-2", 503)]
    assert all("the pools had no room" in failed.error for failed in node.sent)
    assert [phase.name for phase in node.sent[0].phases] == ["queue"]
    node.queue_moves.expire(305.0)
    assert [failed.request_id for failed in node.sent[2:]] == ["id-1"]
    assert len(node.rooms) == 0
    assert node.rooms.num_queued().total() == 0


@pytest.mark.I8
def test_nothing_is_kept_of_a_queue_that_ends_out_of_order() -> None:
    """A client may name any number of prefill nodes, at which nobody is."""
    rooms = LiveRequests(Pools(LIMITS.totals, LIMITS.page_size), 60.0)
    early, late = (make_request(number, 20, 1, HisparseFlag.TRUE, PEERS[0]) for number in (1, 2))
    rooms.open(early)
    rooms.queue(early, RequestState.WAITING, 9.0, is_local=True)
    rooms.open(late)
    rooms.queue(early, RequestState.CONNECTING, 9.0, PEERS[0])
    for request in (early, late):
        rooms.release(request, 9.0)
    assert rooms._unsorted == set()


@pytest.mark.I7
def test_who_goes_to_another_rank_gets_no_more_time_for_slots() -> None:
    node = Node()
    node.arrive(0)
    node.queue_moves.refresh(0.0)
    node.peers.rank, node.peers.away = 1, {PEERS[0]._replace(rank=1)}
    node.queue_moves.readdress(PEERS[0].node, 299.0)
    node.queue_moves.expire(299.5)
    assert node.sent == []
    node.queue_moves.expire(300.0)
    assert [(failed.request_id, failed.status) for failed in node.sent] == [("id-0", 503)]


def test_pages_of_an_earlier_run_rule_nothing_out() -> None:
    """The prefill node is started again, with other pages, while a request waits for slots."""
    node = Node()
    node.peers.tokens_per_page = 2 * LIMITS.page_size
    sampling = SamplingParams(max_new_tokens=200)
    message = Generate("id-1", 1, 20, sampling, *PEERS[1].node, HisparseFlag.AUTO)
    request = node.queue_moves.generate(message, ROOT, pack_token_ids(range(20)), 0.0)
    assert request is not None
    node.queue_moves.refresh(0.0)
    assert "dense needs equal pages" in request.dense_refusal
    node.peers.away = {PEERS[1]}
    node.queue_moves.refresh(1.0)
    node.peers.away, node.peers.tokens_per_page = set(), LIMITS.page_size
    node.queue_moves.refresh(2.0)
    assert request.state is RequestState.WAITING
    assert request.dense_refusal == ""


@pytest.mark.I7
def test_who_is_local_only_with_slots_that_are_stuck_fails_in_time_if_its_node_is_down() -> None:
    """All of its prompt is held for hisparse, and beside the stuck slots it fits as a dense request alone. So
    it waits without a node and for it by turns."""
    node = Node()
    prompt = pack_token_ids(range(17))
    keys = PromptKeys.of(ROOT, prompt, LIMITS.page_size)
    node.rooms.held.hold(
        node.rooms.pools.reserve(Room(9), SlotCounts(host=16, index=16)), keys.keys, KV_POOLS[Mode.HISPARSE]
    )
    _lose_most(node)
    node.peers.away = set(PEERS)
    sampling = SamplingParams(max_new_tokens=200)
    message = Generate("id-1", 1, 17, sampling, *PEERS[1].node, HisparseFlag.AUTO)
    request = node.queue_moves.generate(message, ROOT, prompt, 100.0, keys)
    assert request is not None
    found = set()
    for now in range(100, 402):
        node.queue_moves.expire(now)
        node.queue_moves.refresh(now)
        found.add((request.state, request.is_local))
        for each in node.next_plan.make(now).no_longer_local:
            node.queue_moves.wait_for_node(each, now)
    assert found >= {(RequestState.WAITING, True), (RequestState.CONNECTING, False)}
    assert request.state is RequestState.ENDED
    assert [(failed.request_id, failed.status) for failed in node.sent] == [("id-1", 503)]


@pytest.mark.I7
def test_a_sample_waits_past_its_deadline_while_the_first_one_lands() -> None:
    node = Node()
    node.arrive(0)
    node.arrive(1)
    first, second = node.rooms.all()
    second.first_sample = first
    first.prompt_keys = second.prompt_keys = PromptKeys.of(ROOT, first.prompt, LIMITS.page_size)
    node.queue_moves.refresh(0.0)
    carry_out(node.rooms, node.next_plan.make(0.0), 400.0)
    assert (first.state, second.state) == (RequestState.LANDING, RequestState.WAITING)
    node.queue_moves.expire(300.0)
    assert node.sent == []
    assert (second.state, second.deadline) == (RequestState.WAITING, 400.0)


@pytest.mark.I7
@pytest.mark.parametrize("num_keys", [0, 1, 3])
def test_a_prompt_comes_with_a_key_for_each_of_its_pages(num_keys: int) -> None:
    node, prompt = Node(), pack_token_ids(range(40))
    message = Generate("id-0", 0, 40, SamplingParams(8), *PEERS[0].node, HisparseFlag.TRUE)
    keys = PromptKeys.with_keys(ROOT, (b"k" * KEY_BYTES,) * num_keys, prompt, LIMITS.page_size)
    assert node.queue_moves.generate(message, ROOT, prompt, 0.0, keys) is None
    error = f"{num_keys} keys have come for the prompt's 2 pages"
    assert node.sent == [RequestFailed("id-0", 400, error)]
    assert node.queue_moves.generate(message, ROOT, prompt, 0.0, PromptKeys.of(ROOT, prompt, 16)) is not None
