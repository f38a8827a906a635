"""Requests to a node's front that fail: bad input, engines that fail, clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from hisparse_pd.base.settings import MAX_BODY_BYTES
from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED
from hisparse_pd.decode_node.server import create_decode_app
from hisparse_pd.engine.messages import Abort, FromEngine, Generate, RequestFailed, Tokens
from hisparse_pd.serving.api.app import Work, create_app
from hisparse_pd.serving.api.frame import HttpAnswer
from hisparse_pd.serving.http import engine_reports
from hisparse_pd.serving.http.engine_link import EngineLink
from tests.unit.api.scripted_engine import plays, say
from tests.unit.api.support import BODY, NATIVE, call_app, serving, socketless_context
from tests.waiting import WAIT_SECS, until

pytestmark = pytest.mark.anyio


async def test_a_sample_that_fails_fails_the_request(tmp_path: Path) -> None:
    fails = plays(RequestFailed("", 503, "room 7: the prefill node is gone", PREFILL_NODE_FAILED))

    def script(generate: Generate) -> Iterable[FromEngine | float]:
        return fails(generate) if generate.room == 7 else [60.0]

    async with serving(script, tmp_path) as node:
        response = await node.post("/v1/completions", **BODY, n=2)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json()["error"]["message"] == "room 7: the prefill node is gone"
        other = node.engine.generates[1].request_id
        await until(lambda: node.engine.aborts == [other], "the other sample was aborted")


async def test_a_failure_before_the_first_token_has_a_status(tmp_path: Path) -> None:
    what = "room 7: no prefill node at 10.0.0.1:8998"
    async with serving(plays(RequestFailed("", 503, what, PREFILL_NODE_FAILED)), tmp_path) as node:
        for stream in (False, True):
            response = await node.post("/v1/completions", **BODY, stream=stream)
            assert response.status_code == 503
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", PREFILL_NODE_FAILED)
            assert error["message"] == what
        counted = 'hisparse_pd:num_requests_total{endpoint="/v1/completions",status="503"}'
        assert await node.metric(counted) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_a_failure_in_a_stream_is_its_last_event(tmp_path: Path, path: str) -> None:
    breaks = plays(Tokens("", (97,)), RequestFailed("", 500, "the pool broke"))
    async with serving(breaks, tmp_path) as node:
        response = await node.post(path, **(BODY if path != "/generate" else NATIVE), stream=True)
        assert response.status_code == 200
        first, last, end = response.text.split("\n\n")
        assert end == ""
        assert "error" not in json.loads(first.removeprefix("data: "))
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the pool broke"


@pytest.mark.I7
@pytest.mark.I8
async def test_bad_input_reaches_no_engine(tmp_path: Path) -> None:
    async def without_a_length() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield b" " * (MAX_BODY_BYTES // 2 + 1)

    async with serving(say("x"), tmp_path) as node:
        bad: list[tuple[Any, int]] = [
            (b"{", 400),
            (b"\xff\xfe", 400),
            (b"[" * 4000, 400),
            (json.dumps({**BODY, "max_tokens": -1}).encode(), 400),
            (json.dumps({**BODY, "prompt": "x" * 300}).encode(), 400),
            (json.dumps({**BODY, "model": "other"}).encode(), 404),
            (json.dumps({**BODY, "bootstrap_room": None}).encode(), 400),
            (without_a_length(), 413),
            (b" " * (MAX_BODY_BYTES + 1), 413),
        ]
        for content, status in bad:
            response = await node.client.post("/v1/completions", content=content)
            assert response.status_code == status, response.text
            assert response.headers["content-type"] == "application/json"
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert f"{MAX_BODY_BYTES} bytes" in response.json()["error"]["message"]
        assert node.engine.received == []
        missing = await node.client.get("/v2/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert (await node.client.get("/generate")).status_code == 405
        long = await node.client.get("/" + "x" * 60_000)
        assert (long.status_code, len(long.content) < 300) == (404, True)
        packed = await node.client.post("/generate", content=b"x", headers={"content-encoding": "gzip"})
        assert (packed.status_code, "Content-Encoding" in packed.text) == (415, True)


@pytest.mark.I8
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_samples(tmp_path: Path, stream: bool) -> None:
    script = plays(*[Tokens("", (97,))] * stream, 60.0)
    async with serving(script, tmp_path) as node:

        async def ask() -> None:
            body = {**BODY, "n": 2, "stream": stream}
            async with node.client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_bytes())

        asking = asyncio.create_task(ask())
        await until(lambda: len(node.engine.generates) == 2, "both samples are with the engine")
        if not stream:
            asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: len(node.engine.aborts) == 2, "both samples were aborted")
        assert set(node.engine.aborts) == {generate.request_id for generate in node.engine.generates}
        assert not any(m.has_finished for m in node.engine.received if isinstance(m, Abort))
        assert node.link.num_in_flight == 0
        name = 'hisparse_pd:num_requests_total{endpoint="/v1/completions",status="499"}'
        while await node.metric(name) != 1:
            await asyncio.sleep(0.01)


@pytest.mark.I8
async def test_a_backlog_is_not_worked_off_for_a_client_that_left(tmp_path: Path) -> None:
    """Nothing in such a stream ever waits: neither the tokens, nor writing to a connection that is gone."""

    async def backlog() -> AsyncGenerator[bytes, None]:
        for _ in range(10_000):
            yield b"data: {}\n\n"

    async def answer(work: Work) -> HttpAnswer:
        return HttpAnswer(b"data: {}\n\n", backlog())

    front = socketless_context(tmp_path, EngineLink([str(tmp_path / "unused.ipc")], 5.0))
    sent = await call_app(create_app(front, answer), "/v1/completions", BODY, leaves=True)
    assert sent[0]["status"] == 200
    assert len(sent) < 100


def test_a_client_that_leaves_amid_its_body_is_counted_and_not_answered(tmp_path: Path) -> None:
    messages = iter(
        ({"type": "http.request", "body": b'{"prompt"', "more_body": True}, {"type": "http.disconnect"})
    )
    sent: list[Message] = []

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        sent.append(message)

    front = socketless_context(tmp_path, EngineLink([str(tmp_path / "unused.ipc")], 5.0))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(create_decode_app(front)(scope, receive, send))
    assert sent == []
    counted = b'hisparse_pd:num_requests_total{endpoint="/v1/completions",status="499"} 1.0'
    assert counted in front.metrics.render()


@pytest.mark.I7
async def test_an_engine_that_dies_fails_what_is_in_flight(tmp_path: Path) -> None:
    async with serving(lambda generate: [60.0], tmp_path) as node:
        answer = asyncio.create_task(node.post("/v1/completions", **BODY))
        await until(lambda: node.link.num_in_flight == 1, "the request is in flight")
        node.link.engine_died()
        response = await answer
        assert response.status_code == 503
        assert "engine has died" in response.json()["error"]["message"]
        assert (await node.client.get("/health")).status_code == 503
        assert (await node.post("/v1/completions", **BODY)).status_code == 503


@pytest.mark.I7
async def test_an_engine_that_hangs_does_not_hang_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances with each message of statistics, so that an engine is not silent for being slow."""
    now = time.monotonic()
    monkeypatch.setattr(engine_reports, "time", SimpleNamespace(monotonic=lambda: now))
    async with serving(lambda generate: [60.0], tmp_path, health_timeout_secs=0.2) as node:
        node.engine.num_running = 1  # stats come, steps do not
        asking = asyncio.create_task(node.post("/v1/completions", **BODY))
        await until(lambda: node.link.num_in_flight == 1, "the request is in flight")
        while not asking.done():
            last = node.link.ranks[0].reports.stats
            await until(lambda last=last: node.link.ranks[0].reports.stats is not last, "stats")  # type: ignore[misc]
            now += 0.15
        response = await asking
        assert response.status_code == 503
        assert "no progress" in response.json()["error"]["message"]


async def test_an_h2c_preface_is_turned_away_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def talk(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECS) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            return connection.recv(4096)

    async with serving(say("x"), tmp_path) as node:
        with caplog.at_level(logging.INFO):
            answer = await asyncio.to_thread(talk, node.port)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
        assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []
        assert (await node.client.get("/health")).status_code == 200
