"""Prefill nodes of several ranks: a room makes the rank compute a prompt that has its beginning."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse_pd.settings import RouterPolicy
from hisparse_pd.vocabulary import MAX_RANKS
from router.health import HealthWatch
from router.node_calls import NodeCalls
from router.nodes import Node, NodeKind, NodePool, Pair
from router.rooms import NUM_ROOMS, draw_room
from tests.unit.router.cluster import FakeNode, cluster, delivers, says

pytestmark = pytest.mark.anyio

A, B, C, D, E = (bytes([letter]) * 2048 for letter in b"abcde")


def pool_of(num_ranks: int, num_prefill: int = 1, policy: RouterPolicy = "cache_aware") -> NodePool:
    prefill = [Node.from_url(NodeKind.PREFILL, f"http://p:{i}") for i in range(1, num_prefill + 1)]
    pool = NodePool(prefill, [Node.from_url(NodeKind.DECODE, "http://d:1")], policy)
    for node in pool.nodes:
        pool.mark_healthy(node)
        pool.report_load(node, [0] * num_ranks)
    return pool


def place(pair: Pair, num_ranks: int) -> tuple[str, int]:
    return pair.prefill.url, pair.room % num_ranks


@given(num_ranks=st.integers(1, MAX_RANKS), data=st.data())
def test_a_room_is_its_ranks_and_in_the_range_of_the_contract(num_ranks: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, num_ranks - 1))
    room = draw_room(rank, num_ranks)
    assert 0 <= room < NUM_ROOMS
    assert room % num_ranks == rank


async def test_a_conversation_stays_at_its_rank() -> None:
    async with cluster([delivers] * 2, says(b"{}"), num_ranks=4, policy="cache_aware") as pair:
        talks: list[list[dict[str, str]]] = [[] for _ in range(6)]
        for turn in range(4):
            for number, talk in enumerate(talks):
                talk.append({"role": "user", "content": f"{number} asks {turn}: " + "please " * 100})
                body = {"messages": talk, "model": "tiny"}
                assert (await pair.client.post("/v1/chat/completions", json=body)).status_code == 200
        heard: Counter[tuple[str, int, str]] = Counter()
        for node in pair.prefill:
            for number in range(len(node.requests)):
                sent = node.body(number)
                heard[node.url, sent["bootstrap_room"] % 4, sent["messages"][0]["content"]] += 1
        assert set(heard.values()) == {4}, "each conversation has one rank"
        assert len({(url, rank) for url, rank, _ in heard}) == len(talks), "and each rank at most one"


async def test_the_first_prompt_of_a_list_goes_to_the_rank_that_has_it() -> None:
    async with cluster(decode=says(b"{}"), num_ranks=8, policy="cache_aware") as pair:
        for _ in range(8):
            prompts = [A.decode(), *map(str, range(20))]
            await pair.client.post("/v1/completions", json={"prompt": prompts})
        (node,) = pair.prefill
        rooms = [node.body(number)["bootstrap_room"] for number in range(8)]
        assert len({first % 8 for first, *_ in rooms}) == 1
        assert len({room % 8 for _, *others in rooms for room in others}) == 8, "the others spread"


def test_what_no_rank_has_goes_in_turns() -> None:
    pool = pool_of(2, num_prefill=2)
    places = [place(pool.pick(prompt=prompt), 2) for prompt in (A, B, C, D)]
    assert places == [("http://p:1", 0), ("http://p:2", 0), ("http://p:1", 1), ("http://p:2", 1)]
    assert [place(pool.pick(prompt=prompt), 2) for prompt in (D, B, A, C)] == [
        places[number] for number in (3, 1, 0, 2)
    ]


def test_what_no_rank_has_goes_by_load() -> None:
    """By our own requests, and by what the node says that it has beyond them."""
    pool = pool_of(3)
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
    pool = pool_of(2)
    (node,) = pool.of_kind(NodeKind.PREFILL)
    assert pool.pick(prompt=A).room % 2 == 0
    pool.report_load(node, [7, 0])
    assert pool.pick(prompt=A).room % 2 == 1  # 7 are over 1.25 times the mean of 8 on 2 ranks, and 2
    pool.report_load(node, [0, 0])
    assert pool.pick(prompt=A).room % 2 == 1, "it has it now"


def test_a_retry_gets_a_room_of_the_other_node() -> None:
    pool = pool_of(4, num_prefill=2)
    for prompt in (A, B, C):
        pool.pick(prompt=prompt)
    first = pool.pick(prompt=C)
    again = pool.pick(excluded={first.prefill}, prompt=C)
    assert again.prefill is not first.prefill
    assert again.room != first.room
    assert place(pool.pick(prompt=C), 4) == place(again, 4), "it was tried there last"


def test_a_node_that_comes_back_with_other_ranks_has_nothing_cached() -> None:
    pool = pool_of(2, num_prefill=2)
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
    pool = pool_of(4, policy=policy)
    (node,) = pool.of_kind(NodeKind.PREFILL)
    pool.report_load(node, [3, 0, 0, 0])
    assert [rank.num_foreign for rank in node.ranks] == [3]
    assert {pool.pick(prompt=A).room % 4 for _ in range(400)} == {0, 1, 2, 3}


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
    ],
    ids=["one", "two", "no list", "no ranks", "twice", "a hole", "too many", "none", "no number", "no load"],
)
async def test_what_a_node_says_of_its_ranks(said: object, num_requests: list[int]) -> None:
    """What makes no sense as ranks counts as one; what makes none at all was not said."""

    class Calls(NodeCalls):
        async def get(self, *asked: object) -> tuple[int, bytes]:
            return 200, json.dumps(said).encode()

    pool = pool_of(1)
    await HealthWatch(pool, Calls(1.0, 1.0), 1.0, 1.0, with_load=True).check(pool.nodes[0])
    assert [rank.num_foreign for rank in pool.nodes[0].ranks] == num_requests


@pytest.mark.parametrize(("policy", "is_asked"), [("round_robin", False), ("cache_aware", True)])
async def test_loads_are_asked_for_when_the_policy_looks_at_them(policy: str, is_asked: bool) -> None:
    async with cluster(policy=policy) as pair:
        nodes: list[FakeNode] = [*pair.prefill, *pair.decode]
        assert [("/get_load", None) in node.asked for node in nodes] == [is_asked] * 2
