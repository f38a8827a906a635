"""A ``cache_aware`` router follows the KV events of its nodes, and sends prompts to where their pages are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import islice

import msgspec
import pytest
from starlette.types import Send

from hisparse_pd.base.kv_events_config import KvEventsConfig
from hisparse_pd.base.ports import free_port
from hisparse_pd.protocol.kv_event_sockets import KvEventPublisher
from hisparse_pd.protocol.kv_events import BlockRemoved, BlockStored, KvEvent, encode_batch
from hisparse_pd.router import kv_follower
from hisparse_pd.router.known_pages import KnownPages
from hisparse_pd.router.kv_follower import (
    FIRST_PAUSE_SECS,
    MAX_PAUSE_SECS,
    KvFollower,
    _feed,
    _pauses_secs,
)
from hisparse_pd.router.node_calls import NodeCalls
from hisparse_pd.router.nodes import Node, NodeKind
from hisparse_pd.serving.http.page_names import PAGES_HEADER, PageNames
from hisparse_pd.serving.http.prefixes import BLOCK_BYTES
from tests.unit.router.cluster import Cluster, FakeNode, answer, cluster, computes, serving
from tests.waiting import WAIT_SECS

pytestmark = pytest.mark.anyio

PAGE = 64
NUM_NODES = 2
NAMES = PageNames(PAGE, 8 * PAGE, ((1, 101), (2, 102), (4, 104), (8, 108)))
PROMPT = "x" * 4 * BLOCK_BYTES


async def named(node: FakeNode, send: Send) -> None:
    """Behaviour of a decode node that names the prompt's pages."""
    await answer(send, b"{}", x_hisparse_pd_pages=msgspec.json.encode(NAMES).decode())


async def misnamed(node: FakeNode, send: Send) -> None:
    await answer(send, b"{}", x_hisparse_pd_pages="none")


class Rank:
    """What one rank publishes."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._publisher = KvEventPublisher(config)
        self._ts = 1.0

    def publish(self, *events: KvEvent) -> None:
        self._ts += 1
        payload = encode_batch(self._ts, events, 0)
        self._publisher.publish(lambda: payload)

    def store(self, *hashes: int) -> None:
        self.publish(BlockStored(list(hashes), None, [1] * len(hashes), 1, medium="GPU"))

    def close(self) -> None:
        self._publisher.close()


@pytest.fixture
def configs() -> list[KvEventsConfig]:
    return [
        KvEventsConfig(
            publisher="zmq",
            endpoint=f"tcp://*:{free_port()}",
            replay_endpoint=f"tcp://*:{free_port()}",
            topic="kv",
        )
        for _ in range(NUM_NODES)
    ]


@pytest.fixture
def ranks(configs: Sequence[KvEventsConfig]) -> Iterator[list[Rank]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Rank(config))) for config in configs]


def info(config: KvEventsConfig) -> bytes:
    """What a node's /server_info says."""
    node_settings = {"page_size": PAGE, "kv_events_config": config.model_dump_json(), "port": 1}
    return json.dumps({"dp_size": 1, "settings": node_settings}).encode()


async def ask(pair: Cluster, prompt: str) -> int:
    """Send a prompt. Returns the number of its prefill node."""
    response = await pair.client.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 200
    assert PAGES_HEADER.decode() not in response.headers
    return pair.prefill.index(pair.prefill_of(pair.decode[0].body()))


async def until_known(pair: Cluster, number: int, num_pages: int) -> None:
    url = pair.prefill[number].url
    await pair.until_counted(f'hisparse_pd:router_known_pages{{kind="prefill",node="{url}"}} {num_pages:.1f}')


async def test_prompts_go_where_events_say_that_their_pages_are(
    configs: list[KvEventsConfig], ranks: list[Rank]
) -> None:
    async with cluster(
        [computes] * NUM_NODES, named, prefill_says=list(map(info, configs)), policy="cache_aware"
    ) as pair:
        first = await ask(pair, PROMPT)
        other = 1 - first
        assert pair.decode[0].requests[-1][1][PAGES_HEADER.decode()] == "1"
        ranks[first].store(101, 102, 104, 108)
        await until_known(pair, first, 4)
        assert [await ask(pair, PROMPT + "a" * number) for number in range(3)] == [first] * 3
        ranks[other].store(101, 102, 104, 108)
        ranks[first].publish(BlockRemoved([101, 102, 104, 108], "GPU"))
        await until_known(pair, other, 4)
        await until_known(pair, first, 0)
        assert [await ask(pair, PROMPT + "b" * number) for number in range(3)] == [other] * 3


async def test_what_was_published_before_the_router_started_is_known(
    configs: list[KvEventsConfig], ranks: list[Rank]
) -> None:
    ranks[1].store(101, 102)
    async with cluster(
        [computes] * NUM_NODES, named, prefill_says=list(map(info, configs)), policy="cache_aware"
    ) as pair:
        await until_known(pair, 1, 2)


async def test_a_node_that_is_gone_is_known_for_nothing_and_followed_anew(
    configs: list[KvEventsConfig], ranks: list[Rank]
) -> None:
    async with cluster(
        [computes] * NUM_NODES,
        named,
        prefill_says=list(map(info, configs)),
        policy="cache_aware",
        health_interval_secs=0.05,
    ) as pair:
        ranks[0].store(1, 2, 3)
        await until_known(pair, 0, 3)
        pair.prefill[0].healthy = False
        await until_known(pair, 0, 0)
        ranks[0].store(4)
        pair.prefill[0].healthy = True
        await until_known(pair, 0, 4)


async def test_a_node_that_does_not_say_at_first_where_it_publishes_is_asked_again(
    configs: list[KvEventsConfig], ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_follower, "FIRST_PAUSE_SECS", 0.01)
    async with cluster(
        [computes] * NUM_NODES,
        named,
        prefill_says=list(map(info, configs)),
        policy="cache_aware",
        health_interval_secs=0.05,
    ) as pair:
        ranks[0].store(1, 2, 3)
        await until_known(pair, 0, 3)
        pair.prefill[0].healthy = False
        await until_known(pair, 0, 0)
        pair.prefill[0].num_without_info = 3
        pair.prefill[0].healthy = True
        await until_known(pair, 0, 3)
        assert pair.prefill[0].num_without_info == 0


async def test_a_node_that_is_unhealthy_or_followed_anew_is_not_asked_by_an_earlier_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_follower, "FIRST_PAUSE_SECS", 0.01)
    fake = FakeNode(computes, num_without_info=1 << 30)
    async with serving(fake) as url, asyncio.timeout(WAIT_SECS):
        node = Node.from_url(NodeKind.PREFILL, url)
        with closing(KvFollower(KnownPages(), NodeCalls(WAIT_SECS))) as follower:
            await follower.follow(node)
            assert [path for path, _ in fake.asked] == ["/server_info"]
            (of_unhealthy,) = follower._asking.values()
            await of_unhealthy  # it ends by itself
            assert len(fake.asked) == 1
            node.healthy = True
            await follower.follow(node)
            (earlier,) = follower._asking.values()
            await follower.follow(node)
            (last,) = follower._asking.values()
            await asyncio.wait((earlier,))
            assert earlier.cancelled()
            assert not last.done()
        await asyncio.wait((last,))
        assert last.cancelled()


def test_a_node_without_the_document_is_asked_ever_less_often() -> None:
    pauses = list(islice(_pauses_secs(), 20))
    assert pauses[:3] == [FIRST_PAUSE_SECS, 2 * FIRST_PAUSE_SECS, 4 * FIRST_PAUSE_SECS]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_SECS


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b'{"settings": {}}',
        b'{"settings": {"kv_events_config": "{"}}',
        b'{"settings": {"kv_events_config": "{\\"publisher\\": \\"null\\"}"}}',
        b'{"settings": {"kv_events_config": "{\\"publisher\\": \\"zmq\\", \\"endpoint\\": \\"tcp://a:1\\"}"}}',
        json.dumps(
            {"dp_size": 2, "settings": {"kv_events_config": '{"publisher": "zmq", "endpoint": "ipc:///a"}'}}
        ).encode(),
    ],
)
async def test_other_nodes_are_guessed_at(text: bytes) -> None:
    """Among them one whose socket connects to a subscriber elsewhere, and one whose ranks share a socket."""
    async with cluster([computes] * 2, named, prefill_says=[text] * 2, policy="cache_aware") as pair:
        first = await ask(pair, PROMPT)
        assert PAGES_HEADER.decode() not in pair.decode[0].requests[-1][1]
        assert [await ask(pair, PROMPT) for _ in range(3)] == [first] * 3


async def test_a_client_never_gets_the_names(configs: list[KvEventsConfig], ranks: list[Rank]) -> None:
    async with cluster(computes, misnamed, prefill_says=[info(configs[0])], policy="cache_aware") as pair:
        await ask(pair, PROMPT)


async def test_only_cache_aware_asks_for_events(configs: list[KvEventsConfig], ranks: list[Rank]) -> None:
    async with cluster(
        [computes] * NUM_NODES, named, prefill_says=list(map(info, configs)), policy="least_loaded"
    ) as pair:
        assert not any(path == "/server_info" for path, _ in pair.prefill[0].asked)


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.1", "tcp://10.0.0.1:5559"),
        ("tcp://[::]:5557", "fd00::1", "tcp://[fd00::1]:5559"),
        ("tcp://*:5557", "node-1", "tcp://node-1:5559"),
    ],
)
def test_a_wildcard_is_the_nodes_host(endpoint: str, host: str, expected: str) -> None:
    config = KvEventsConfig(publisher="zmq", endpoint=endpoint, replay_endpoint="tcp://*:5600", topic="kv")
    feed = _feed(config.of_rank(2), host)
    assert (feed.endpoint, feed.topic) == (expected, "kv")
    assert feed.replay_endpoint == expected.replace("5559", "5602")
