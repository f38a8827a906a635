"""The front of a node around a scripted engine: its own servers and sockets, and a client of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.types import Message

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.tracing import Tracer
from hisparse_pd.base.vocabulary import SamplingParams
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION
from hisparse_pd.decode_node.server import create_decode_app
from hisparse_pd.engine.messages import Generate, GenerateGroup
from hisparse_pd.prefill_node.server import create_bootstrap_app, create_prefill_app
from hisparse_pd.protocol.channels import load_control_keys
from hisparse_pd.serving.api.app import DecodeContext
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.grammar_checks import GrammarChecks
from hisparse_pd.serving.api.keys import load_api_keys
from hisparse_pd.serving.api.node_app import NodeContext
from hisparse_pd.serving.api.sampling_defaults import SamplingDefaults
from hisparse_pd.serving.api.schemas import ApiRequest, parse_request
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.http.engine_link import EngineLink, LinkState
from hisparse_pd.serving.http.listening import Listener
from hisparse_pd.serving.http.metrics import FrontMetrics
from hisparse_pd.serving.http.queue_limits import QueueLimits
from tests.unit.api.scripted_engine import Script, ScriptedEngine, ready
from tests.unit.api.tiny_tokenizer import make_tokenizer
from tests.waiting import NEVER_SECS, WAIT_SECS, until

ROOM: dict[str, Any] = {"bootstrap_host": "10.0.0.1", "bootstrap_port": None, "bootstrap_room": 7}
BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "max_tokens": 5, **ROOM}
NATIVE: dict[str, Any] = {"text": "hello", "sampling_params": {"max_new_tokens": 5}, **ROOM}
MESSAGES = [{"role": "user", "content": "hi"}]
MINIMAL: dict[Endpoint, dict[str, Any]] = {
    Endpoint.COMPLETIONS: {"prompt": "hello", **ROOM},
    Endpoint.CHAT: {"messages": MESSAGES, **ROOM},
    Endpoint.GENERATE: {"text": "hello", **ROOM},
    Endpoint.MESSAGES: {"messages": MESSAGES, "max_tokens": 9, **ROOM},
    Endpoint.RESPONSES: {"input": "hello", **ROOM},
}
"""A minimal body of each endpoint."""
TOKENIZER = make_tokenizer()


def parse(endpoint: Endpoint, **changes: Any) -> ApiRequest:
    """Parse the minimal body with ``changes``."""
    return parse_request(endpoint, json.dumps(MINIMAL[endpoint] | changes).encode(), "tiny")


class Unchecked(GrammarChecks):
    """Lets every grammar pass: those that are refused have tests of their own."""

    def __init__(self) -> None:
        pass

    async def check(self, text: str, field: str) -> None:
        pass

    def close(self) -> None:
        pass


CODEC = TextCodec(TOKENIZER, len(TOKENIZER), grammar_checks=Unchecked())


@dataclass
class Node:
    client: httpx.AsyncClient
    engine: ScriptedEngine
    link: EngineLink
    port: int
    bootstrap_port: int

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def answer(self, path: str, **body: Any) -> Any:
        """Return the decoded answer."""
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Return the decoded events of a stream, without [DONE]."""
        return decode_events((await self.post(path, stream=True, **body)).text)

    async def metric(self, name: str) -> float | None:
        for line in (await self.client.get("/metrics")).text.splitlines():
            if line.rsplit(" ", 1)[0] == name:
                return float(line.rsplit(" ", 1)[1])
        return None


def decode_events(text: str) -> list[Any]:
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@contextlib.asynccontextmanager
async def serving(
    script: Script,
    tmp_path: Path,
    *,
    role: str = "decode",
    is_ready: bool = True,
    collector: str = "",
    health_timeout_secs: float = NEVER_SECS,
    **options: Any,
) -> AsyncIterator[Node]:
    """Serve a node for ``WAIT_SECS`` at most."""
    options = {"model_path": tmp_path / "model", "served_model_name": "tiny", **options}
    metrics = FrontMetrics()
    endpoints = [f"ipc://{tmp_path}/engine.ipc"]
    link = EngineLink(endpoints, health_timeout_secs, metrics.update)
    tracer = Tracer(collector, role, "tests", metrics.count_spans) if collector else None
    if role == "prefill":
        apps = prefill_apps(link, metrics, PrefillSettings(**options))
    else:
        apps = [create_decode_app(decode_context(link, metrics, DecodeSettings(**options), tracer))]
    engine = ScriptedEngine(endpoints, script, is_ready=is_ready)
    listeners = [Listener("127.0.0.1", 0), Listener("127.0.0.1", 0)]
    servers = [listener.server(app) for listener, app in zip(listeners, apps, strict=False)]
    link.start()
    engine.start()
    tasks = [
        asyncio.create_task(server.serve(sockets=[listener.socket]))
        for server, listener in zip(servers, listeners, strict=False)
    ]
    limits = httpx.Limits(max_keepalive_connections=0)
    base_url = f"http://127.0.0.1:{listeners[0].port}"
    async with httpx.AsyncClient(
        base_url=base_url, timeout=WAIT_SECS, trust_env=False, limits=limits
    ) as client:
        try:
            if is_ready:
                await until(lambda: link.ready is not None, "the engine is ready")
            async with asyncio.timeout(WAIT_SECS):
                yield Node(client, engine, link, listeners[0].port, listeners[1].port)
        finally:
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*tasks)
            await asyncio.to_thread(engine.stop)
            link.close()
            if tracer is not None:
                tracer.close()
            for listener in listeners:
                listener.socket.close()


def decode_context(
    link: EngineLink, metrics: FrontMetrics, settings: DecodeSettings, tracer: Tracer | None = None
) -> DecodeContext:
    return DecodeContext(
        role="decode",
        settings=settings,
        link=link,
        metrics=metrics,
        api_keys=load_api_keys(settings.api_key_file),
        codec=CODEC,
        sampling_defaults=SamplingDefaults.of(settings),
        tracer=tracer,
    )


def prefill_apps(link: EngineLink, metrics: FrontMetrics, settings: PrefillSettings) -> list[Starlette]:
    keys = load_api_keys(settings.api_key_file), load_control_keys(settings.control_key_file)
    context = NodeContext("prefill", settings, link, metrics, *keys)
    return [create_prefill_app(context), create_bootstrap_app(settings, context)]


def socketless_context(tmp_path: Path, link: EngineLink) -> DecodeContext:
    link.ranks[0].reports.ready, link.state = ready(), LinkState.SERVING
    return decode_context(link, FrontMetrics(), DecodeSettings(model_path=tmp_path, served_model_name="tiny"))


async def call_app(app: Starlette, path: str, body: dict[str, Any], *, leaves: bool) -> list[Message]:
    """Return what the app sends without a server; the client ``leaves`` after its body, or never."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    return sent


def group_of(num_samples: int, num_prompt_tokens: int, name: str = "r") -> GenerateGroup:
    """Return samples of one prompt, whose ids are not there."""
    return GenerateGroup(
        tuple(
            Generate(f"{name}-{i}", i, num_prompt_tokens, SamplingParams(1, temperature=0.0), "127.0.0.1", 1)
            for i in range(num_samples)
        ),
        NO_ISOLATION,
        b"",
    )


def connectionless_link(limits: QueueLimits) -> EngineLink:
    """Return a link whose engine reads nothing."""
    link = EngineLink(["unused.ipc"], 5.0, limits=limits)
    link.ranks[0].reports.ready, link.state = ready(), LinkState.SERVING
    return link


class Turns:
    """Counts the turns that the event loop takes for everybody else."""

    def __init__(self) -> None:
        self.count = 0
        self._task = asyncio.ensure_future(self._tick())

    async def _tick(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    def stop(self) -> None:
        self._task.cancel()
