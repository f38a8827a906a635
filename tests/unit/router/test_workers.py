"""A router of several processes: one decides for all, and what is about the router tells of all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from hisparse_pd.http.workers import no_workers
from hisparse_pd.ports import free_port
from hisparse_pd.settings import RouterSettings
from router.desk import Desk, Worker
from router.drain import Drain
from router.errors import RouterError
from router.nodes import NodeKind, NodePool
from tests.unit.router.cluster import (
    WAIT_SECS,
    FakeNode,
    delivers,
    eventually,
    serving,
    start,
    streams,
    write,
)

pytestmark = pytest.mark.anyio

REPO = Path(__file__).parents[3]
PROMPT = b"please " * 1000


@dataclass
class Office:
    desk: Desk
    workers: list[Worker]

    async def settled(self) -> None:
        """All that workers told the desk has arrived: a question goes behind it."""
        for worker in self.workers:
            await worker.pool.choose((), b"")


@asynccontextmanager
async def office(policy: str = "cache_aware", num_workers: int = 2) -> AsyncIterator[Office]:
    settings = RouterSettings(
        prefill=(("http://p:1", 1), ("http://p:2", 2)),
        decode=("http://d:1", "http://d:2"),
        policy=policy,  # type: ignore[arg-type]
    )
    pairs = [socket.socketpair() for _ in range(num_workers)]
    others = no_workers()
    others._sockets = [ours for ours, _ in pairs]
    desk = Desk(NodePool.from_settings(settings), others)
    for node in desk.pool.nodes:
        desk.pool.mark_healthy(node)
    await desk.open()
    workers = [Worker(settings, Drain(), theirs) for _, theirs in pairs]
    opening = asyncio.gather(*(worker.open() for worker in workers))
    desk.publish()
    await opening
    try:
        yield Office(desk, workers)
    finally:
        for worker in workers:
            await worker.close()
        await others.close()


async def test_a_prompt_stays_at_its_node_whichever_process_has_the_request() -> None:
    async with office() as o:
        first = await o.workers[0].pool.choose((), PROMPT)
        for pool in (o.workers[1].pool, o.desk.pool, o.workers[0].pool):
            assert (await pool.choose((), PROMPT + b" and more")).prefill.url == first.prefill.url
        excluded = {node for node in o.workers[1].pool.nodes if node.url == first.prefill.url}
        other = await o.workers[1].pool.choose(excluded, PROMPT)
        assert other.prefill.url != first.prefill.url
        for pool in (o.workers[1].pool, o.desk.pool):
            assert (await pool.choose_alone((), PROMPT)).prefill.url == other.prefill.url


async def test_what_every_process_has_in_flight_counts() -> None:
    async with office("least_loaded") as o:
        pools = [o.workers[0].pool, o.workers[1].pool, o.desk.pool]
        works, chosen = [], []
        for number in range(8):
            pool = pools[number % 3]
            pair = await pool.choose((), b"")
            chosen.append(pair.decode.url)
            works.append(pool.working(pair.decode, pair.room))
            works[-1].__enter__()
            await o.settled()
        assert [chosen.count(url) for url in ("http://d:1", "http://d:2")] == [4, 4]
        assert o.desk.num_in_flight == 8
        for work in works[:5]:
            work.__exit__(None, None, None)
        await o.settled()
        assert o.desk.num_in_flight == 3
        for work in works[5:]:
            work.__exit__(None, None, None)
        await o.settled()
        assert [node.num_in_flight for node in o.desk.pool.nodes] == [0] * 4
        assert [node.ranks[0].num_in_flight for node in o.desk.pool.nodes] == [0] * 4


async def test_all_processes_know_whom_one_cannot_reach() -> None:
    async with office() as o:
        pool = o.workers[0].pool
        pool.mark_unhealthy(pool.healthy(NodeKind.DECODE)[0], "gone")
        assert not pool.nodes[2].healthy
        await o.settled()
        await o.settled()  # and what the desk told then has arrived, too
        for of_one in (o.desk.pool, o.workers[1].pool):
            assert [(node.url, node.trouble) for node in of_one.nodes if not node.healthy] == [
                ("http://d:1", "gone")
            ]
        o.desk.pool.mark_healthy(o.desk.pool.nodes[2])
        await o.settled()
        assert pool.nodes[2].healthy
        for node in o.desk.pool.of_kind(NodeKind.PREFILL):
            o.desk.pool.mark_unhealthy(node, "gone")
        with pytest.raises(RouterError, match=r"no healthy prefill node \(http://p:1: gone; http://p:2"):
            await pool.choose((), b"")


async def test_pages_are_the_first_processs_with_the_counts_of_all() -> None:
    async with office() as o:
        o.workers[0].metrics.retries.inc(2)
        o.workers[1].metrics.retries.inc()
        o.desk.metrics.retries.inc()

        async def metrics() -> Response:
            return Response(await o.desk.render_metrics(), 299, media_type="text/plain")

        o.desk.pages = {"/metrics": metrics}
        scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [], "query_string": b""}
        for worker in o.workers:
            page = await worker.page(Request({**scope, "server": ("r", 1), "scheme": "http"}))
            assert page.status_code == 299
            assert page.headers["content-type"].startswith("text/plain")
            assert b"hisparse_pd:router_retries_total 4.0" in bytes(page.body)


# --- processes -----------------------------------------------------------------------------------------


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    client: httpx.AsyncClient
    prefill: FakeNode
    decode: FakeNode

    def workers(self) -> list[int]:
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(c) for c in children if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]

    async def status(self) -> int:
        """Its exit status."""
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), WAIT_SECS)


@asynccontextmanager
async def running(decode: Any = streams, **options: Any) -> AsyncIterator[Running]:
    """A router of three processes, with a connection of its own for each request to it."""
    nodes = FakeNode(delivers), FakeNode(decode)
    port = free_port()
    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        serving(nodes[0]) as prefill_url,
        serving(nodes[1]) as decode_url,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=WAIT_SECS, trust_env=False, limits=limits
        ) as client,
    ):
        command = [
            sys.executable,
            "-m",
            "hisparse_pd",
            "router",
            "--port",
            str(port),
            "--workers",
            "3",
        ]
        command += ["--prefill", prefill_url, "7000", "--decode", decode_url]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        nodes[0].url, nodes[1].url = prefill_url, decode_url
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPO)})

        async def is_ready() -> bool:
            assert process.poll() is None
            try:
                return (await client.get("/readiness")).is_success
            except httpx.TransportError:
                return False

        try:
            await eventually(is_ready)
            yield Running(process, client, *nodes)
        finally:
            process.kill()
            process.wait()


async def test_three_processes_serve_and_tell_of_all_until_sigterm() -> None:
    async with running() as router:
        body = {"prompt": "x", "stream": True, "max_tokens": 3}
        pids = router.workers()
        assert len(pids) == 2
        for _ in range(5):
            answers = await asyncio.gather(
                *(router.client.post("/v1/completions", json=body) for _ in range(12))
            )
            assert {answer.text for answer in answers} == {answers[0].text}
            assert answers[0].text.endswith("data: [DONE]\n\n")
        counted = 'router_requests_total{endpoint="/v1/completions",status="200"} 60.0'
        idle = f'router_inflight_requests{{kind="decode",node="{router.decode.url}"}} 0.0'

        async def is_counted() -> bool:
            metrics = (await router.client.get("/metrics")).text
            return counted in metrics and idle in metrics

        await eventually(is_counted)
        for _ in range(6):  # whichever process is asked
            assert await is_counted()
            assert (await router.client.get("/health")).json()["nodes"][1]["in_flight"] == 0
        assert len(router.decode.requests) == len(router.prefill.requests) == 60
        assert (await router.client.get("/status")).json()["answers"] == {"200": 60}
        router.process.send_signal(signal.SIGTERM)
        assert await router.status() == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def slowly(node: FakeNode, send: Send) -> None:
    await start(send)
    await write(send, b'data: {"text": "a"}\n\n')
    await node.release.wait()
    await write(send, b"data: [DONE]\n\n", more=False)


@asynccontextmanager
async def open_streams(router: Running, num: int) -> AsyncIterator[list[AsyncIterator[bytes]]]:
    """So many that every process has some."""
    body = {"prompt": "x", "stream": True}
    request = router.client.build_request("POST", "/v1/completions", json=body)
    responses = [await router.client.send(request, stream=True) for _ in range(num)]
    chunks = [response.aiter_raw() for response in responses]
    try:
        assert [await anext(of_one) for of_one in chunks] == [b'data: {"text": "a"}\n\n'] * num
        yield chunks
    finally:
        for response in responses:
            await response.aclose()


async def rest(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


async def test_sigterm_lets_the_requests_of_all_processes_finish() -> None:
    async with running(slowly, drain_timeout_secs=WAIT_SECS) as router, open_streams(router, 9) as streams_:
        health = (await router.client.get("/health")).json()
        assert [node["in_flight"] for node in health["nodes"] if node["kind"] == "decode"] == [9]
        router.process.send_signal(signal.SIGTERM)

        async def is_draining() -> bool:
            """A process that has not heard of it takes a request, whose client leaves."""
            statuses = set()
            for _ in range(6):
                async with router.client.stream("POST", "/v1/completions", json={"prompt": "x"}) as answer:
                    statuses.add(answer.status_code)
            return statuses == {503}

        await eventually(is_draining)
        router.decode.release.set()
        assert {await rest(chunks) for chunks in streams_} == {b"data: [DONE]\n\n"}
        assert await router.status() == 0


async def test_a_second_signal_ends_the_requests_of_all_processes() -> None:
    async with running(slowly, drain_timeout_secs=WAIT_SECS) as router, open_streams(router, 6) as streams_:
        router.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_SECS):  # two signals that are pending are one
            while (await router.client.get("/readiness")).json()["status"] != "draining":
                await asyncio.sleep(0.01)
        router.process.send_signal(signal.SIGTERM)
        for chunks in streams_:
            assert b"the router is shutting down" in await rest(chunks)
        assert await router.status() == 0


async def test_a_workers_death_ends_the_router() -> None:
    async with running(slowly) as router, open_streams(router, 9) as streams_:
        pids = router.workers()
        os.kill(pids[0], signal.SIGKILL)
        ends = []
        for chunks in streams_:
            try:
                ends.append(await rest(chunks))
            except httpx.RemoteProtocolError:
                ends.append(b"broken off")
        num_lost = ends.count(b"broken off")  # those of the dead one, a third of them as a rule
        assert sum(b"the router is shutting down" in end for end in ends) == 9 - num_lost
        assert await router.status() == 1
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
