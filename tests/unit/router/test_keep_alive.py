"""Answers may take longer than ``--request-timeout-secs``, which limits a node's silence and not its work."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.vocabulary import FinishReason
from hisparse_pd.engine.messages import FromEngine, Generate, Tokens
from hisparse_pd.router.relay import DECODE_SILENCE_SECS
from hisparse_pd.router.server import create_app
from hisparse_pd.serving.api import frame
from tests.unit.api import support
from tests.unit.router.cluster import FakeNode, computes, error_of, serving
from tests.unit.router.silence import Silence
from tests.waiting import WAIT_SECS, until

pytestmark = pytest.mark.anyio
TIMEOUT_SECS = 90.0
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 5}


@asynccontextmanager
async def routed(decode: str) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a real router before the decode node at this URL."""
    async with serving(FakeNode(computes)) as prefill:
        settings = RouterSettings(
            prefill=((prefill, 7000),),
            decode=(decode,),
            request_timeout_secs=TIMEOUT_SECS,
            resume_timeout_secs=0,
            policy="round_robin",
        )
        async with (
            serving(create_app(settings)) as url,
            httpx.AsyncClient(base_url=url, timeout=WAIT_SECS, trust_env=False) as client,
        ):
            yield client


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_may_take_long_while_its_node_makes_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silence: Silence, stream: bool
) -> None:
    """The engine is silent for longer than any limit before its first token, and again before its last."""
    monkeypatch.setattr(frame, "PING_SECS", 0.02)
    may_speak = [threading.Event(), threading.Event()]

    def script(generate: Generate) -> Iterator[FromEngine | float]:
        for event, token, reason in zip(may_speak, b"ab", (None, FinishReason.STOP), strict=True):
            while not event.is_set():
                yield 0.001
            yield Tokens(generate.request_id, (token,), (), reason)

    async with (
        support.serving(script, tmp_path) as node,
        routed(f"http://127.0.0.1:{node.port}") as client,
    ):
        asking = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": stream}))
        for event in may_speak:
            for _ in range(4):
                await silence.waited_for_again()
                silence.advance(0.8 * DECODE_SILENCE_SECS)
            event.set()
        answer = await asking
        assert answer.status_code == 200
        if stream:
            assert ": ping\n\n" in answer.text
            events = support.decode_events(answer.text.replace(": ping\n\n", ""))
            assert "".join(event["choices"][0]["text"] for event in events) == "ab"
        else:
            assert answer.json()["choices"][0]["text"] == "ab"


@pytest.mark.I7
@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n: ping\n\n"], ids=["", "stream"]
)
async def test_a_node_that_says_so_no_more_is_given_up(said: bytes, silence: Silence) -> None:
    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET "):  # its health
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        else:
            for part in filter(None, (*[b"HTTP/1.1 102 Processing\r\n\r\n"] * 3, said)):
                writer.write(part)
                await silence.waited_for_again()
            silence.advance(DECODE_SILENCE_SECS)
        await reader.read()  # until the router closes the connection
        writer.close()

    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    async with server, routed(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        answer = await client.post("/v1/completions", json=BODY)
        told = f"did not answer within {DECODE_SILENCE_SECS:g} s"
        if said:
            assert told in answer.text.partition(": ping\n\n")[2]
        else:
            assert answer.status_code == 504
            assert told in error_of(answer)


async def test_only_a_client_that_says_so_gets_interim_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every client skips them."""
    monkeypatch.setattr(frame, "PING_SECS", 0.02)
    may_speak = threading.Event()

    def script(generate: Generate) -> Iterator[FromEngine | float]:
        while not may_speak.is_set():
            yield 0.001
        yield Tokens(generate.request_id, (ord("a"),), (), FinishReason.STOP)

    body = json.dumps(support.BODY).encode()
    async with support.serving(script, tmp_path) as node:

        async def ask(header: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
            writer.write(head.encode() + body)
            return reader, writer

        asked = [await ask(""), await ask("x-hisparse-pd-interim: 1\r\n")]
        await until(lambda: len(node.engine.generates) == 2, "both requests are with the engine")
        for _ in range(3):
            assert await asked[1][0].readuntil(b"\r\n\r\n") == b"HTTP/1.1 102 Processing\r\n\r\n"
        may_speak.set()
        for (reader, writer), is_told in zip(asked, (False, True), strict=True):
            rest = await reader.read()
            writer.close()
            assert is_told or rest.startswith(b"HTTP/1.1 200 ")
            assert rest.count(b"HTTP/1.1 200 OK") == 1
