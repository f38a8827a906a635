"""The choice of nodes and ranks: in turn, by load, and by the prefixes that they have."""

from __future__ import annotations

import asyncio
import errno
import json
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse_pd.base.router_settings import RouterPolicy, RouterSettings
from hisparse_pd.base.vocabulary import MAX_RANKS, StartError
from hisparse_pd.router.errors import RouterError
from hisparse_pd.router.health import HealthWatch
from hisparse_pd.router.node_calls import NodeCalls
from hisparse_pd.router.nodes import LEAVING, LEFT, NUM_ROOMS, Node, NodeKind, NodePool, Pair, draw_room
from tests.unit.router.cluster import OK, cluster, computes
from tests.waiting import NEVER_SECS, until

pytestmark = pytest.mark.anyio

A, B, C, D, E = (bytes([letter]) * 2048 for letter in b"abcde")
of_each_kind = pytest.mark.parametrize("kind", list(NodeKind))


def pool_of(
    num_prefill: int = 1, num_decode: int = 1, policy: RouterPolicy = "cache_aware", num_ranks: int = 1
) -> NodePool:
    """Make a pool of healthy nodes with ``num_ranks`` each."""
    prefill = [Node.from_url(NodeKind.PREFILL, f"http://p:{i}") for i in range(1, num_prefill + 1)]
    decode = [Node.from_url(NodeKind.DECODE, f"http://d:{i}") for i in range(1, num_decode + 1)]
    pool = NodePool(prefill, decode, policy)
    for node in pool.nodes:
        pool.mark_healthy(node)
        pool.report_load(node, [0] * num_ranks)
    return pool


def place(pair: Pair, num_ranks: int) -> tuple[str, int]:
    return pair.prefill.url, pair.room % num_ranks


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:1", "ftp://a:1", "http://", "http://a:1/v1", "http://a:x", "http://a:1?q"),
        *("http://user:secret@a:1", "http://a b:1"),
    ],
)
def test_a_bad_node_url_is_named(url: str) -> None:
    with pytest.raises(StartError, match="decode node"):
        Node.from_url(NodeKind.DECODE, url)


def test_a_node_is_given_once() -> None:
    urls = ("http://d:1", "http://d:2", "http://d:1/")
    settings = RouterSettings(prefill=(("http://p:1", None),), decode=urls)
    with pytest.raises(StartError, match=r"decode node http://d:1 is given 2 times; give it once"):
        NodePool.from_settings(settings)


@of_each_kind
def test_a_pair_needs_a_node_of_each_kind(kind: NodeKind) -> None:
    pool = pool_of()
    assert pool.has_pair()
    assert not pool.has_pair(pool.of_kind(kind))
    with pytest.raises(RouterError, match=rf"no healthy {kind} node \(http://{kind[0]}:1: just failed\)"):
        pool.pick(pool.of_kind(kind))
    pool.mark_unhealthy(pool.of_kind(kind)[0], "gone")
    assert [pool.has(each) for each in NodeKind] == [each is not kind for each in NodeKind]
    with pytest.raises(RouterError, match=f"no healthy {kind} node"):
        pool.pick()


# --- turns and loads ---------------------------------------------------------------------------------


async def test_round_robin_takes_turns() -> None:
    async with cluster([computes] * 2, [OK] * 3) as pair:
        for _ in range(6):
            await pair.client.post("/generate", json={})
        bodies = [node.body(number) for node in pair.decode for number in range(len(node.requests))]
        assert [len(node.requests) for node in pair.decode] == [2, 2, 2]
        assert Counter(pair.prefill_of(body).url for body in bodies) == {node.url: 3 for node in pair.prefill}


def test_an_unhealthy_node_does_not_disturb_the_turns_of_the_others() -> None:
    pool = pool_of(num_decode=3, policy="round_robin")
    pool.mark_unhealthy(pool.of_kind(NodeKind.DECODE)[1], "gone")
    assert [pool.pick().decode.url for _ in range(4)] == ["http://d:1", "http://d:3"] * 2


async def test_least_loaded_looks_at_what_nodes_tell() -> None:
    async with cluster(decode=[OK] * 2, policy="least_loaded", health_interval_secs=0.05) as pair:
        node = pair.decode[0]
        node.loads = [3]
        node.asked.clear()
        await until(lambda: len(node.asked) > 4)  # /health and /get_load, twice
        for _ in range(4):
            await pair.client.post("/generate", json={})
        assert [len(node.requests) for node in pair.decode] == [0, 4]


def test_least_loaded_counts_requests_in_flight_once() -> None:
    pool = pool_of(num_decode=2, policy="least_loaded")
    first = pool.pick().decode
    with pool.working(first, 0):
        pool.report_load(first, [1])  # the node's own count includes ours
        assert first.ranks[0].num_foreign == 0
        assert pool.pick().decode is not first
    assert first.num_in_flight == 0


@pytest.mark.parametrize(("policy", "is_asked"), [("round_robin", False), ("cache_aware", True)])
async def test_loads_are_asked_for_when_the_policy_looks_at_them(policy: str, is_asked: bool) -> None:
    async with cluster(policy=policy) as pair:
        assert [("/get_load", None) in node.asked for node in pair.nodes] == [is_asked] * 2


def load(num_reqs: int, **more: Any) -> dict[str, Any]:
    return {"num_reqs": num_reqs, **more}


@pytest.mark.parametrize(
    ("said", "num_requests"),
    [
        ([load(3, dp_rank=0)], [3]),
        ([load(3, dp_rank=1, num_tokens=7), load(4, dp_rank=0)], [4, 3]),
        (load(3), [3]),
        ([load(3), load(4)], [7]),
        ([load(3, dp_rank=0), load(4, dp_rank=0)], [7]),
        ([load(3, dp_rank=1), load(4, dp_rank=2)], [7]),
        ([load(1, dp_rank=rank) for rank in range(MAX_RANKS + 1)], [MAX_RANKS + 1]),
        ([], [0]),
        ([load(3, dp_rank="x")], [0]),
        ({"loads": 3}, [0]),
        ([load(10**400, dp_rank=0)], [0]),
    ],
    ids=[
        *("one", "two", "no list", "no ranks", "twice", "a hole", "too many", "none", "no number", "no load"),
        "beyond floats",
    ],
)
async def test_what_a_node_says_of_its_ranks(said: object, num_requests: list[int]) -> None:
    """A load whose ranks make no sense counts as one rank's; an unreadable one is ignored."""

    class Calls(NodeCalls):
        async def get(self, *asked: object) -> tuple[int, bytes]:
            return 200, json.dumps(said).encode()

    pool = pool_of()
    await HealthWatch(pool, Calls(1.0), 1.0, with_load=True).check(pool.nodes[0])
    assert [rank.num_foreign for rank in pool.nodes[0].ranks] == num_requests


async def test_a_load_that_is_not_reported_any_more_is_forgotten() -> None:
    """Otherwise a node would be avoided for ever because of what it had then."""
    loads: Iterator[int | None] = iter([7, None, 5, None, None, None, None])

    class Calls(NodeCalls):
        async def get(self, node: Node, path: str, timeout_secs: float) -> tuple[int, bytes]:
            await asyncio.sleep(0)  # checks at the same time take turns
            if path == "/health":
                return 200, b"{}"
            num = next(loads)
            return (404, b"") if num is None else (200, json.dumps(load(num)).encode())

    pool = pool_of(num_decode=2, policy="least_loaded")
    busy, idle = pool.of_kind(NodeKind.DECODE)
    watch = HealthWatch(pool, Calls(1.0), 1.0, with_load=True)
    for expected, num_checks in ((7, 1), (7, 1), (5, 1), (5, 3)):
        await asyncio.gather(*(watch.check(busy) for _ in range(num_checks)))
        assert [rank.num_foreign for rank in busy.ranks] == [expected]
        assert pool.pick().decode is idle
    await watch.check(busy)
    assert [rank.num_foreign for rank in busy.ranks] == [0]
    assert pool.pick().decode is busy


def calls_with(outcomes: Sequence[OSError | tuple[int, bytes]]) -> NodeCalls:
    """Make calls that have these outcomes, one after the other."""
    coming = iter(outcomes)

    class Calls(NodeCalls):
        async def get(self, *asked: object) -> tuple[int, bytes]:
            match next(coming):
                case OSError() as error:
                    raise error
                case answer:
                    return answer

    return Calls(1.0)


LATE, NO_DESCRIPTOR = TimeoutError(), OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("outcomes", "is_healthy"),
    [
        ([LATE], True),
        ([LATE, LATE], False),
        ([LATE, (200, b"{}"), LATE], True),
        ([LATE, NO_DESCRIPTOR, LATE], True),
        ([LATE, NO_DESCRIPTOR, LATE, LATE], False),
    ],
    ids=["one", "two", "an answer between", "a local fault between", "two behind a local fault"],
)
async def test_a_node_is_unhealthy_after_two_timeouts_in_a_row(
    outcomes: list[OSError | tuple[int, bytes]], is_healthy: bool
) -> None:
    """A check that this machine prevents says nothing about the node, and ends the row."""
    pool = pool_of()
    node = pool.nodes[0]
    watch = HealthWatch(pool, calls_with(outcomes), 1.0, with_load=False)
    for _ in outcomes:
        await watch.check(node)
    assert node.healthy is is_healthy


LEAVES = (503, b'{"status": "leaving"}')
GONE = ConnectionRefusedError("connection refused")


@pytest.mark.parametrize(
    ("outcomes", "trouble"),
    [
        ([LEAVES], LEAVING),
        ([LEAVES, GONE], LEFT),
        ([LEAVES, GONE, GONE], LEFT),
        ([LEAVES, GONE, LEAVES], LEAVING),
        ([LEAVES, GONE, (503, b'{"status": "loading"}'), GONE], "/health: connection refused"),
        ([LEAVES, LATE], f"no answer to /health in {NEVER_SECS:g} s"),
        ([GONE], "/health: connection refused"),
    ],
)
async def test_a_node_that_ends_in_order_is_shown_so(
    outcomes: list[OSError | tuple[int, bytes]], trouble: str
) -> None:
    pool = pool_of()
    node = pool.nodes[0]
    watch = HealthWatch(pool, calls_with(outcomes), 1.0, with_load=False)
    for _ in outcomes:
        await watch.check(node)
    assert node.trouble == trouble


@pytest.mark.parametrize("trouble", [LEAVING, LEFT])
def test_a_node_that_shuts_down_is_shown_so_when_a_request_does_not_reach_it(trouble: str) -> None:
    pool = pool_of()
    (node,) = pool.of_kind(NodeKind.DECODE)
    pool.mark_unhealthy(node, trouble)
    pool.mark_unreachable(node, "connection refused")
    assert node.trouble == trouble
    pool.mark_healthy(node)
    pool.mark_unreachable(node, "connection refused")
    assert (node.healthy, node.trouble) == (False, "connection refused")


@pytest.mark.I7
async def test_timeouts_at_the_same_time_are_one_in_the_row() -> None:
    """Requests that search for a pair check the same node while its own check is under way."""
    late: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
    coming: Iterator[Awaitable[tuple[int, bytes]]] = repeat(late)

    class Calls(NodeCalls):
        async def get(self, *asked: object) -> tuple[int, bytes]:
            return await next(coming)

    pool = pool_of()
    node = pool.nodes[0]
    watch = HealthWatch(pool, Calls(1.0), 1.0, with_load=False)
    checks = [asyncio.create_task(watch.check(node)) for _ in range(10)]
    await asyncio.sleep(0)  # each asks the node
    late.set_exception(LATE)
    await asyncio.gather(*checks)
    assert node.healthy

    answers = asyncio.get_running_loop().create_future()
    later = asyncio.get_running_loop().create_future()
    coming = iter([answers, later])
    checks = [asyncio.create_task(watch.check(node)) for _ in range(2)]
    await asyncio.sleep(0)
    answers.set_result((200, b"{}"))
    await checks[0]
    later.set_exception(TimeoutError())
    await checks[1]
    assert node.healthy, "it has answered in between"

    coming = repeat(late)
    await watch.check(node)
    assert not node.healthy


async def test_a_fault_of_the_router_does_not_end_the_checks_of_a_node(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The node keeps its health until a check succeeds, and the log says so once."""
    num_faults, has_started = 0, False

    class Calls(NodeCalls):
        async def get(self, node: Node, *asked: object) -> tuple[int, bytes]:
            nonlocal num_faults
            if not has_started:
                return 200, b"{}"
            if node is watched and num_faults < 3:
                num_faults += 1
                assert node.healthy
                raise ValueError("label too long")
            return 503, b"{}"

    pool = pool_of()
    watched = pool.nodes[0]
    watch = HealthWatch(pool, Calls(1.0), 0.001, with_load=False)
    await watch.start()
    has_started = True
    await until(lambda: not watched.healthy)
    await watch.stop()
    assert (num_faults, watched.trouble) == (3, "/health answered 503")
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert f"{watched.name} failed in the router itself; the node stays healthy" in record.getMessage()
    assert record.exc_info is not None


# --- what nodes have of a prompt ---------------------------------------------------------------------


async def test_a_conversation_stays_at_its_rank_and_its_decode_node() -> None:
    """Each turn contains the turns before it; all share a system prompt that is shorter than a block."""
    async with cluster([computes] * 2, [OK] * 2, num_ranks=4, policy="cache_aware") as pair:
        talks = [[{"role": "system", "content": "Be kind."}] for _ in range(6)]
        for turn in range(4):
            for number, talk in enumerate(talks):
                talk.append({"role": "user", "content": f"{number} asks {turn}: " + "please " * 100})
                body = {"messages": talk, "model": "tiny"}
                assert (await pair.client.post("/v1/chat/completions", json=body)).status_code == 200
        for kind, num_ranks, num_talks in (("prefill", 4, 1), ("decode", 1, 3)):
            heard: Counter[tuple[str, int, str]] = Counter()
            for node in pair.decode:
                for sent in map(node.body, range(len(node.requests))):
                    place = node if kind == "decode" else pair.prefill_of(sent)
                    rank = sent["bootstrap_room"] % num_ranks
                    heard[place.url, rank, sent["messages"][1]["content"]] += 1
            assert list(heard.values()) == [4] * 6, "each conversation has one place"
            talks_of = Counter((url, rank) for url, rank, _ in heard)
            assert max(talks_of.values()) == num_talks, "and the places have equally many"


@of_each_kind
def test_what_no_node_has_goes_by_load(kind: NodeKind) -> None:
    pool = pool_of(2, 2)
    first = getattr(pool.pick(prompt=A), kind)
    with pool.working(first, 0):
        for prompt in (B, b"short", b""):
            assert getattr(pool.pick(prompt=prompt), kind) is not first


@of_each_kind
def test_a_busy_node_gives_up_what_it_has_cached(kind: NodeKind) -> None:
    pool = pool_of(3, 3)
    first = getattr(pool.pick(prompt=A), kind)
    with ExitStack() as stack:
        for _ in range(5):
            assert getattr(pool.pick(prompt=A), kind) is first
            stack.enter_context(pool.working(first, 0))
        # 5 are 2.5 more than 1.25 times the mean of 6 on 3 nodes
        other = getattr(pool.pick(prompt=A), kind)
        assert other is not first
    assert getattr(pool.pick(prompt=A), kind) is other


@of_each_kind
def test_a_node_that_failed_is_not_preferred(kind: NodeKind) -> None:
    pool = pool_of(2, 2)
    first = getattr(pool.pick(prompt=A), kind)
    assert getattr(pool.pick(excluded={first}, prompt=A), kind) is not first
    second = getattr(pool.pick(prompt=A), kind)
    assert second is not first, "it was tried there last"
    pool.mark_unhealthy(second, "gone")
    assert getattr(pool.pick(prompt=A), kind) is first


@of_each_kind
def test_a_node_that_was_gone_has_nothing_cached(kind: NodeKind) -> None:
    pool = pool_of(2, 2)
    first = getattr(pool.pick(prompt=A), kind)
    pool.mark_unhealthy(first, "gone")
    pool.mark_healthy(first)
    with pool.working(first, 0):
        assert getattr(pool.pick(prompt=A), kind) is not first


# --- ranks of prefill nodes --------------------------------------------------------------------------


@given(num_ranks=st.integers(1, MAX_RANKS), data=st.data())
def test_a_room_is_its_ranks_and_in_the_range_of_the_contract(num_ranks: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, num_ranks - 1))
    room = draw_room(rank, num_ranks)
    assert 0 <= room < NUM_ROOMS
    assert room % num_ranks == rank


async def test_the_first_prompt_of_a_list_goes_to_the_rank_that_has_it() -> None:
    async with cluster(decode=OK, num_ranks=8, policy="cache_aware") as pair:
        for _ in range(8):
            prompts = [A.decode(), *map(str, range(20))]
            await pair.client.post("/v1/completions", json={"prompt": prompts})
        rooms = [pair.decode[0].body(number)["bootstrap_room"] for number in range(8)]
        assert len({first % 8 for first, *_ in rooms}) == 1
        assert len({room % 8 for _, *others in rooms for room in others}) == 8, "the others spread"


def test_what_no_rank_has_goes_in_turns() -> None:
    pool = pool_of(2, num_ranks=2)
    places = [place(pool.pick(prompt=prompt), 2) for prompt in (A, B, C, D)]
    assert places == [("http://p:1", 0), ("http://p:2", 0), ("http://p:1", 1), ("http://p:2", 1)]
    again = [place(pool.pick(prompt=prompt), 2) for prompt in (D, B, A, C)]
    assert again == [places[number] for number in (3, 1, 0, 2)]


def test_what_no_rank_has_goes_by_load() -> None:
    """The load is this router's own requests and those of others that the node reports."""
    pool = pool_of(num_ranks=3)
    (node,) = pool.of_kind(NodeKind.PREFILL)
    rooms = [pool.pick(prompt=prompt).room for prompt in (A, B)]
    assert [room % 3 for room in rooms] == [0, 1]
    with pool.working(node, rooms[1]):
        pool.report_load(node, [1, 1, 2])
        assert [rank.num_foreign for rank in node.ranks] == [1, 0, 2]
        assert [pool.pick(prompt=prompt).room % 3 for prompt in (C, D)] == [0, 1]  # 1, 1 and 2 to do
    assert pool.pick(prompt=E).room % 3 == 1  # 1, 0 and 2 to do
    assert node.num_in_flight == 0


def test_a_busy_rank_gives_up_what_it_has_cached() -> None:
    pool = pool_of(num_ranks=2)
    (node,) = pool.of_kind(NodeKind.PREFILL)
    assert pool.pick(prompt=A).room % 2 == 0
    pool.report_load(node, [7, 0])
    assert pool.pick(prompt=A).room % 2 == 1  # 7 are over 1.25 times the mean of 8 on 2 ranks, and 2
    pool.report_load(node, [0, 0])
    assert pool.pick(prompt=A).room % 2 == 1, "it has it now"


def test_a_retry_gets_a_room_of_the_other_node() -> None:
    pool = pool_of(num_prefill=2, num_ranks=4)
    for prompt in (A, B, C):
        pool.pick(prompt=prompt)
    first = pool.pick(prompt=C)
    again = pool.pick(excluded={first.prefill}, prompt=C)
    assert again.prefill is not first.prefill
    assert again.room != first.room
    assert place(pool.pick(prompt=C), 4) == place(again, 4), "it was tried there last"


def test_a_node_that_comes_back_with_other_ranks_has_nothing_cached() -> None:
    pool = pool_of(2, num_ranks=2)
    first, second = pool.of_kind(NodeKind.PREFILL)
    assert pool.pick(prompt=A + B).prefill is first
    with pool.working(first, 0):
        pool.report_load(first, [0, 0, 0])
        assert pool.pick(prompt=A).prefill is second
        assert first.num_in_flight == 1
    assert first.num_in_flight == 0
    assert [rank.num_in_flight for rank in first.ranks] == [0, 0, 0]
    assert pool.pick(prompt=A + B).prefill is second, "which has its beginning"


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
def test_other_policies_spread_rooms_over_the_ranks(policy: RouterPolicy) -> None:
    pool = pool_of(policy=policy, num_ranks=4)
    (node,) = pool.of_kind(NodeKind.PREFILL)
    pool.report_load(node, [3, 0, 0, 0])
    assert [rank.num_foreign for rank in node.ranks] == [3]
    assert {pool.pick(prompt=A).room % 4 for _ in range(400)} == {0, 1, 2, 3}
