"""What a node's front lets strangers do: keys, browsers, headers that are no text, a second drain."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.unit.api.scripted_engine import say
from tests.unit.api.support import BODY, Node, serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_a_key_only_probes_and_metrics_are_answered(role: str, tmp_path: Path) -> None:
    key = "the-key-of-the-router"
    path = tmp_path / "keys"
    path.write_text(f"{key}\n")

    async with serving(say("hello"), tmp_path, role=role, api_key_file=path) as node:
        for target in ("/health", "/health_generate", "/metrics"):
            assert (await node.client.get(target)).status_code == 200, target
        closed = ["/server_info", "/model_info", "/get_load", "/v1/models", "/flush_cache", "/nowhere"]
        for target in closed:
            assert (await node.client.get(target)).status_code == 401, target
        for target in ("/v1/completions", "/v1/chat/completions", "/generate", "/flush_cache"):
            response = await node.post(target, **BODY)
            assert response.status_code == 401, target
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert node.engine.received == []
        assert await node.metric("hisparse_pd:unauthorized_requests_total") == 10
        node.client.headers["authorization"] = f"Bearer {key}"
        info = await node.client.get("/server_info")
        assert info.status_code == 200
        assert key not in info.text
        assert str(path) not in info.text
        assert (await node.post("/v1/completions", **BODY)).status_code == 200


@pytest.mark.parametrize("sent_by_browsers", [{"origin": "null"}, {"sec-fetch-site": "same-origin"}])
async def test_pages_in_browsers_may_not_do_what_operators_do(
    sent_by_browsers: dict[str, str], tmp_path: Path
) -> None:
    async with serving(say("hello"), tmp_path) as node:
        from_page = {"content-type": "application/json", **sent_by_browsers}
        for path in ("/flush_cache", "/drain", "/release_quarantine?instance_id=a"):
            refused = await node.client.post(path, headers=from_page)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden"), path
        assert node.engine.received == []
        picture = await node.client.get("/flush_cache")  # as a page asks for one
        assert picture.status_code == 405
        assert (await node.client.post("/v1/completions", json=BODY, headers=from_page)).status_code == 200


async def test_a_drain_that_is_asked_for_again_is_no_second_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    node: Node

    def kill(pid: int, number: int) -> None:
        sent.append(number)
        node.link.stop_accepting()

    monkeypatch.setattr(os, "kill", kill)
    async with serving(say("hello"), tmp_path) as node:
        for _ in range(2):
            assert (await node.client.post("/drain")).status_code == 200
    assert sent == [signal.SIGTERM]


@pytest.mark.I7
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_headers_that_are_no_text_do_no_harm(role: str, tmp_path: Path) -> None:
    names = (b"x-request-id", b"x-correlation-id", b"traceparent", b"tracestate", b"content-type")
    key = "k" * 32
    (tmp_path / "keys").write_text(key)
    async with serving(say("hello"), tmp_path, role=role, api_key_file=tmp_path / "keys") as node:
        for value in (b"caf\xe9", b"\xff\xfe", b"a\x01b"):
            given = [(name, value) for name in names]
            keyed = [*given, (b"authorization", b"Bearer " + key.encode())]
            wrong = [*given, (b"authorization", b"Bearer " + value)]
            body = json.dumps(BODY).encode()
            response = await node.client.post("/v1/completions", content=body, headers=keyed)
            assert (response.status_code, "error" in response.json()) == (200, False)
            response = await node.client.post("/v1/completions", content=body, headers=wrong)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            response = await node.client.get("/nowhere", headers=keyed)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
