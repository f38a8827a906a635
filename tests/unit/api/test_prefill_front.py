"""The prefill node's front: empty answers to requests, status, administration, the bootstrap endpoint."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.settings import MAX_BODY_BYTES
from hisparse_pd.protocol.bootstrap import BootstrapInfo, look_up
from hisparse_pd.serving.api.bodies import Endpoint
from tests.unit.api.scripted_engine import say
from tests.unit.api.support import BODY, MINIMAL, serving
from tests.waiting import WAIT_SECS

pytestmark = pytest.mark.anyio

NOTHING: dict[str, Any] = {"meta_info": {"input_token_logprobs": []}}
"""The answer in which routers find no logprob to put before the decode node's."""
HOSTILE = [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"{}" * 1000, b"x" * MAX_BODY_BYTES]


@pytest.mark.I8
@pytest.mark.parametrize("endpoint", Endpoint)
async def test_every_request_has_an_empty_answer(tmp_path: Path, endpoint: Endpoint) -> None:
    async with serving(say("x"), tmp_path, role="prefill") as node:
        for stream in (False, True):
            answer = await node.post(endpoint, **MINIMAL[endpoint], stream=stream)
            assert (answer.status_code, answer.json()) == (200, NOTHING)
            assert answer.headers["content-type"] == "application/json"
        for body in HOSTILE:
            headers = {"content-encoding": "gzip", "content-type": "text/plain"}
            answer = await node.client.post(endpoint, content=body, headers=headers)
            assert (answer.status_code, answer.json()) == (200, NOTHING)
        counted = f'hisparse_pd:num_requests_total{{endpoint="{endpoint}",status="200"}}'
        assert await node.metric(counted) == 2 + len(HOSTILE)
        assert node.engine.received == []


@pytest.mark.I8
async def test_a_body_is_read_as_far_as_bodies_may_go(tmp_path: Path) -> None:
    """The connection of a body without end ends with the answer; other connections go on."""
    num_sent = 0

    def read_answer(port: int) -> bytes:
        nonlocal num_sent
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECS) as connection:
            connection.sendall(b"POST /generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
            piece = b"%x\r\n%b\r\n" % (1 << 20, bytes(1 << 20))
            try:
                while True:
                    connection.sendall(piece)
                    num_sent += 1
            except OSError:
                return b""

    async with serving(say("x"), tmp_path, role="prefill") as node:
        await asyncio.to_thread(read_answer, node.port)
        assert MAX_BODY_BYTES >> 20 <= num_sent < 3 * (MAX_BODY_BYTES >> 20)
        counted = 'hisparse_pd:num_requests_total{endpoint="/generate",status="200"}'
        assert await node.metric(counted) == 1


async def test_a_connection_goes_on_behind_a_body(tmp_path: Path) -> None:
    def talk(port: int) -> list[bytes]:
        answers = []
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECS) as connection:
            for size in (10, 1 << 20, 10):
                head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size
                connection.sendall(head + b"x" * size)
                answer = b""
                while not answer.endswith(b"[]}}"):
                    received = connection.recv(4096)
                    assert received, answer
                    answer += received
                answers.append(answer)
        return answers

    async with serving(say("x"), tmp_path, role="prefill") as node:
        for answer in await asyncio.to_thread(talk, node.port):
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"connection: close" not in answer


@pytest.mark.I7
async def test_a_client_that_leaves_amid_its_body_does_no_harm(tmp_path: Path) -> None:
    async def breaks_off() -> AsyncIterator[bytes]:
        yield b"{"
        raise ConnectionError

    async with serving(say("x"), tmp_path, role="prefill") as node:
        with pytest.raises(ConnectionError):
            await node.client.post("/generate", content=breaks_off())
        assert (await node.post("/v1/completions", **BODY)).status_code == 200


@pytest.mark.I7
async def test_a_node_that_does_not_serve_says_so_to_its_routers(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path, role="prefill") as node:
        node.link.stop_accepting()
        answer = await node.post("/v1/completions", **BODY)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert "shutting down" in answer.json()["error"]["message"]


async def test_what_needs_a_tokenizer_is_not_there(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path, role="prefill") as node:
        for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
            assert (await node.post(path, prompt="a")).status_code == 404
        assert (await node.client.get("/tokenizer_info")).status_code == 404
        info = (await node.client.get("/model_info")).json()
        assert info == {"served_model_name": "tiny", "is_generation": True, "context_length": 256}


@pytest.mark.I7
async def test_bootstrap_endpoint(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path, role="prefill") as node:
        info = await asyncio.to_thread(look_up, "127.0.0.1", node.bootstrap_port)
        assert isinstance(info, BootstrapInfo)
        assert info.control_endpoint("10.1.1.1") == "tcp://127.0.0.1:4711", "an address, where it answered"
        assert (info.instance_id, info.geometry.num_layers, info.curve) == ("instance-1", 4, False)
        url = f"http://127.0.0.1:{node.bootstrap_port}/bootstrap"
        assert (await node.client.put(url, json={})).status_code == 405

        async def status() -> int:
            return (await node.client.get(url)).status_code

        node.link.stop_accepting()  # requests that it has already taken may still need it
        assert await status() == 200
        node.link.health_timeout_secs = -1.0  # no engine is as fast: it counts as hung
        assert await status() == 503
        node.link.health_timeout_secs = 60.0
        assert await status() == 200
        node.link.engine_died()
        assert await status() == 503


def test_its_process_has_no_tokenizer() -> None:
    """The process of the test makes the front's applications."""
    code = """
import sys
from pathlib import Path
from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.prefill_node import server
from hisparse_pd.serving.api.node_app import NodeContext
from hisparse_pd.serving.http.engine_link import EngineLink
from hisparse_pd.serving.http.metrics import FrontMetrics

settings = PrefillSettings(model_path=Path("/nowhere"))
front = NodeContext("prefill", settings, EngineLink(["ipc://unused"], 5.0), FrontMetrics())
with server.apps(front) as served:
    assert len(served) == 2
loaded = {name.split(".")[0] for name in sys.modules}
assert not loaded & {"transformers", "tokenizers", "jinja2", "llguidance", "torch"}, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECS)
    assert done.returncode == 0, done.stderr


def test_it_has_no_options_for_what_it_does_not_do() -> None:
    gone = {"api_server_count", "chat_control_tokens", "default_max_tokens", "sampling_defaults"}
    assert not (gone | {"otlp_traces_endpoint"}) & set(PrefillSettings.model_fields)
