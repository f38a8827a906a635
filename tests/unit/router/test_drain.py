"""What SIGTERM does: requests in flight finish, new ones get a 503, and the exit is clean and bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from hisparse_pd.engine.messages import Generate
from hisparse_pd.http.engine_link import EngineLink, LinkState
from hisparse_pd.ports import free_port
from router import supervisor
from router.supervisor import Child, Supervisor
from tests.unit.api import support
from tests.unit.api.scripted_engine import say
from tests.unit.api.support import BODY
from tests.unit.api.tiny_tokenizer import write_checkpoint
from tests.unit.router.cluster import FakeNode, delivers, in_two_steps, never, serving
from tests.waiting import WAIT_SECS, until, wait_until

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
    prefill_node, decode_node = FakeNode(delivers), FakeNode(decode)  # type: ignore[arg-type]
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


async def test_a_stopping_router_finishes_what_it_has_and_refuses_the_rest() -> None:
    async with router_process() as router:
        async with router.client.stream("POST", "/generate", json={"text": "a"}) as answer:
            chunks = answer.aiter_raw()
            assert await anext(chunks) == b"data: 1\n\n"
            router.process.send_signal(signal.SIGTERM)
            await router.until_draining()
            assert (await router.client.get("/health")).status_code == 503
            late = await router.client.post("/generate", json={"text": "b"})
            assert late.status_code == 503
            assert "shutting down; send the request again" in late.json()["error"]["message"]
            assert len(router.decode.requests) == 1
            router.decode.release.set()
            assert b"".join([chunk async for chunk in chunks]) == b"data: 2\n\n"
        assert await router.exit_status() == 0


@pytest.mark.parametrize("options", [["--drain-timeout-secs", "0.2"], []], ids=["timeout", "second signal"])
async def test_what_does_not_finish_in_time_ends_with_an_error(options: list[str]) -> None:
    async with router_process(*options) as router:
        async with router.client.stream("POST", "/generate", json={"text": "a"}) as answer:
            chunks = answer.aiter_raw()
            await anext(chunks)
            router.process.send_signal(signal.SIGTERM)
            if not options:
                await router.until_draining()
                router.process.send_signal(signal.SIGTERM)
            event = b"".join([chunk async for chunk in chunks])
        message = json.loads(event.removeprefix(b"data: "))["error"]["message"]
        assert "the router is shutting down" in message
        await asyncio.wait_for(router.decode.client_left.wait(), WAIT_SECS)
        assert await router.exit_status() == 0


async def test_a_request_without_an_answer_yet_gets_a_503() -> None:
    async with router_process("--drain-timeout-secs", "0.2", decode=never) as router:
        asking = asyncio.create_task(router.client.post("/generate", json={"text": "a"}))
        await until(lambda: bool(router.decode.requests), "the node has the request")
        router.process.send_signal(signal.SIGTERM)
        answer = await asking
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "the router is shutting down" in answer.json()["error"]["message"]
        assert await router.exit_status() == 0


# --- a node --------------------------------------------------------------------------------------------


async def test_a_stopping_node_refuses_new_requests_and_finishes_its_own(tmp_path: Path) -> None:
    async with support.serving(say("abcde", delay_secs=0.05), tmp_path) as node:
        async with node.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            node.link.stop_accepting()
            late = await node.post("/v1/completions", **BODY)
            assert late.status_code == 503
            assert str(LinkState.STOPPING) in late.json()["error"]["message"]
            assert (await node.client.get("/health")).status_code == 503
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert len(node.engine.generates) == 1


async def test_a_request_that_waits_while_the_node_stops_is_not_taken_for_stuck(tmp_path: Path) -> None:
    def waits(generate: Generate) -> Iterator[object]:
        yield 0.5  # longer than health_timeout_secs
        yield from say("ab")(generate)

    async with support.serving(waits, tmp_path, health_timeout_secs=0.2) as node:
        asking = asyncio.create_task(node.post("/v1/completions", **BODY))
        await until(lambda: node.link.num_in_flight == 1, "the request is with the engine")
        node.link.stop_accepting()
        assert (await asking).status_code == 200


def test_only_a_live_engine_is_asked_while_the_node_stops(tmp_path: Path) -> None:
    link = EngineLink([str(tmp_path / "engine.ipc")], 30.0)
    link.engine_died()
    assert link.stall() == str(LinkState.GONE)
    link.stop_accepting()
    assert link.state is LinkState.GONE


FRONT = """
    import sys
    from pathlib import Path
    from hisparse_pd.settings import DecodeSettings
    from tests.unit.api.scripted_engine import run_slow_engine

    if __name__ == "__main__":
        from decode_node.server import create_decode_app
        from hisparse_pd.api.node import run_front
        from hisparse_pd.http.engine_link import least_loaded

        settings = DecodeSettings(
            model_path=Path(sys.argv[1]),
            port=int(sys.argv[2]),
            served_model_name="tiny",
            drain_timeout_secs=float(sys.argv[3]),
        )
        sys.exit(run_front(
            settings, role="decode", engine=run_slow_engine, holds_output=True, choose_rank=least_loaded,
            ports=(settings.port,), apps=lambda front: (create_decode_app(front),),
        ))
"""


def test_a_node_gives_up_when_the_time_is_up_and_still_exits_cleanly(tmp_path: Path) -> None:
    script = tmp_path / "front_process.py"
    script.write_text(textwrap.dedent(FRONT))
    model_path = write_checkpoint(tmp_path / "tiny")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryDirectory() as scratch,  # short: the path of an ipc socket may have 107 characters
        subprocess.Popen(
            [sys.executable, str(script), str(model_path), str(port), "0.1"],
            env={**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": scratch},
        ) as process,
    ):
        try:
            wait_until(lambda: _is_healthy(url))
            body = {**BODY, "max_tokens": 8, "stream": True}
            with httpx.stream(
                "POST", url + "/v1/completions", json=body, timeout=WAIT_SECS, trust_env=False
            ) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                last = [line for line in lines if line][-1]
            assert process.wait(WAIT_SECS) == 0
        finally:
            process.kill()
        assert list(Path(scratch).iterdir()) == []
    assert "the node is shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=WAIT_SECS, trust_env=False).is_success
    except httpx.TransportError:
        return False


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
    child = Child("decode", command, f"http://127.0.0.1:{port}/health", drain_timeout_secs=WAIT_SECS)
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
