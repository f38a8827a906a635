"""After SIGTERM requests in flight finish, new ones get a 503, and the process exits cleanly in bounded
time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from hisparse_pd.base.ports import free_port
from hisparse_pd.engine.messages import FromEngine, Generate
from hisparse_pd.router import supervisor
from hisparse_pd.router.supervisor import Child, Supervisor
from hisparse_pd.serving.http import engine_reports
from hisparse_pd.serving.http.engine_link import EngineLink, LinkState
from tests.unit.api import support
from tests.unit.api.scripted_engine import say
from tests.unit.api.support import BODY
from tests.unit.router.cluster import FakeNode, at_first, computes, in_two_steps, never, serving
from tests.waiting import NEVER_SECS, WAIT_SECS, until, wait_until

pytestmark = pytest.mark.anyio

REPO = Path(__file__).resolve().parents[3]


# --- the router ----------------------------------------------------------------------------------------


@dataclass
class RouterProcess:
    process: asyncio.subprocess.Process
    client: httpx.AsyncClient
    decode: FakeNode

    async def until_draining(self) -> None:
        async with asyncio.timeout(WAIT_SECS):
            while (await self.client.get("/health")).json()["status"] != "draining":
                await asyncio.sleep(0.02)

    async def exit_status(self) -> int:
        async with asyncio.timeout(WAIT_SECS):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def router_process(
    *options: str, decode: Callable[..., object] = in_two_steps
) -> AsyncIterator[RouterProcess]:
    prefill_node, decode_node = FakeNode(computes), FakeNode(decode)  # type: ignore[arg-type]
    port = free_port()
    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        serving(prefill_node) as prefill_url,
        serving(decode_node) as decode_url,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=WAIT_SECS, trust_env=False, limits=limits
        ) as client,
    ):
        arguments = ["router", "--prefill", prefill_url, "7000", "--decode", decode_url, "--port", str(port)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hisparse_pd", *arguments, *options, cwd=REPO, stderr=subprocess.DEVNULL
        )
        try:
            async with asyncio.timeout(WAIT_SECS):
                while True:
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get("/health")).is_success:
                            break
                    await asyncio.sleep(0.05)
            yield RouterProcess(process, client, decode_node)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
async def test_a_stopping_router_finishes_what_it_has_and_refuses_the_rest(number: signal.Signals) -> None:
    async with router_process("--drain-timeout-secs", str(NEVER_SECS)) as router:
        async with router.client.stream("POST", "/generate", json={"text": "a"}) as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == b"data: 1\n\n"
            router.process.send_signal(number)
            await router.until_draining()
            assert (await router.client.get("/health")).status_code == 503
            late = await router.client.post("/generate", json={"text": "b"})
            assert late.status_code == 503
            assert "shutting down; send the request again" in late.json()["error"]["message"]
            assert len(router.decode.requests) == 1
            router.decode.release.set()
            assert b"".join([chunk async for chunk in chunks]) == b"data: 2\n\n"
        assert await router.exit_status() == 0


@pytest.mark.parametrize("timeout_secs", [0.2, NEVER_SECS], ids=["late", "second signal"])
async def test_what_does_not_finish_in_time_or_is_hurried_ends_with_an_error(timeout_secs: float) -> None:
    """A stream ends with an event, a request without an answer with a 503."""
    options = ("--drain-timeout-secs", str(timeout_secs))
    async with router_process(*options, decode=at_first(in_two_steps, never)) as router:
        async with router.client.stream("POST", "/generate", json={"text": "a"}) as answer:
            chunks = answer.aiter_raw()
            await anext(chunks)
            asking = asyncio.create_task(router.client.post("/generate", json={"text": "a"}))
            await until(lambda: len(router.decode.requests) == 2, "the node has both requests")
            router.process.send_signal(signal.SIGTERM)
            if timeout_secs == NEVER_SECS:
                await router.until_draining()
                router.process.send_signal(signal.SIGTERM)
            event = b"".join([chunk async for chunk in chunks])
            told = json.loads(event.removeprefix(b"data: "))
            assert "the router is shutting down" in told["error"]["message"]
        refused = await asking
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "the router is shutting down" in refused.json()["error"]["message"]
        await asyncio.wait_for(router.decode.client_left.wait(), WAIT_SECS)
        assert await router.exit_status() == 0


# --- a node --------------------------------------------------------------------------------------------


async def test_a_request_that_waits_while_the_node_stops_is_not_taken_for_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for longer than ``health_timeout_secs`` while stats arrive; each of these advances the
    clock."""
    may_speak, now = threading.Event(), time.monotonic()
    monkeypatch.setattr(engine_reports, "time", SimpleNamespace(monotonic=lambda: now))

    def waits(generate: Generate) -> Iterator[FromEngine | float]:
        while not may_speak.is_set():
            yield 0.005
        yield from say("ab")(generate)

    async with support.serving(waits, tmp_path, health_timeout_secs=0.2) as node:
        asking = asyncio.create_task(node.post("/v1/completions", **BODY))
        await until(lambda: node.link.num_in_flight == 1, "the request is with the engine")
        node.link.stop_accepting()
        for _ in range(8):
            last = node.link.ranks[0].reports.stats
            await until(lambda last=last: node.link.ranks[0].reports.stats is not last, "stats")  # type: ignore[misc]
            now += 0.15
        may_speak.set()
        assert (await asking).status_code == 200


def test_only_a_live_engine_is_asked_while_the_node_stops(tmp_path: Path) -> None:
    link = EngineLink([str(tmp_path / "engine.ipc")], 30.0)
    link.engine_died()
    assert link.stall() == str(LinkState.GONE)
    link.stop_accepting()
    assert link.state is LinkState.GONE


# --- a pair --------------------------------------------------------------------------------------------

SERVICE = """
import http.server, sys, signal, threading
port, first_signal = int(sys.argv[1]), sys.argv[2]
num_signals = 0
def on_signal(number, frame):
    global num_signals
    num_signals += 1
    open(first_signal, "w").close()
    if num_signals == 2:
        sys.exit(0)
signal.signal(signal.SIGTERM, on_signal)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def test_a_pair_waits_for_its_services_and_passes_a_second_signal_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_SECS", 0.0)
    script, first_signal = tmp_path / "service.py", tmp_path / "first_signal"
    script.write_text(SERVICE)
    port = free_port()
    command = [sys.executable, "-S", str(script), str(port), str(first_signal)]
    child = Child("decode", command, f"http://127.0.0.1:{port}/health", drain_timeout_secs=NEVER_SECS)
    parent = Supervisor([child], WAIT_SECS)

    def interrupt_again() -> None:
        wait_until(first_signal.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    again = threading.Thread(target=interrupt_again)

    def on_healthy() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        again.start()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        assert parent.run(on_healthy) == 0
    finally:
        again.join()
        for number, handler in before.items():
            signal.signal(number, handler)
