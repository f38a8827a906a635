"""What a node's front says of itself and of its engine: health, routes of information, metrics."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import VERSION
from hisparse_pd.engine.messages import EngineLoading, FlushCache
from hisparse_pd.serving.http import engine_reports
from hisparse_pd.serving.http.metrics import FrontMetrics
from tests.unit.api.scripted_engine import say, stats
from tests.unit.api.support import BODY, TOKENIZER, Node, serving
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_health_follows_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still between two requests."""
    now = time.monotonic()
    monkeypatch.setattr(engine_reports, "time", SimpleNamespace(monotonic=lambda: now))

    async def status(node: Node) -> tuple[int, str]:
        response = await node.client.get("/health")
        return response.status_code, response.json().get("reason", "")

    async def becomes(node: Node, status_code: int, reason: str) -> None:
        while (shown := await status(node))[0] != status_code or reason not in shown[1]:
            await asyncio.sleep(0.01)

    async with serving(say("x"), tmp_path, is_ready=False, health_timeout_secs=30.0) as node:
        assert await status(node) == (503, "the engine is loading")
        assert (await node.post("/v1/completions", **BODY)).status_code == 503
        assert (await node.client.get("/server_info")).status_code == 200
        assert (await node.client.get("/liveness")).status_code == 200
        node.engine.is_ready = True
        await until(lambda: node.link.ready is not None, "the engine is ready")
        rank = node.link.ranks[0].reports
        await becomes(node, 200, "")
        now += 31.0
        await becomes(node, 200, "")  # idle is healthy
        node.engine.num_running = 1
        await until(lambda: rank.stats is not None and rank.stats.num_running == 1, "it has work")
        now += 31.0
        await becomes(node, 503, "no progress")
        node.engine.step += 1
        await becomes(node, 200, "")
        node.engine.is_silent = True
        while (await status(node))[0] == 200:  # what it has said already may yet come
            now += 31.0
        assert "silent" in (await status(node))[1]
        assert (await node.client.get("/liveness")).status_code == 503
        node.engine.is_silent = False
        node.engine.num_running = 0
        await becomes(node, 200, "")


async def test_loading_shows_how_far_it_is_and_that_it_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(say("x"), tmp_path, is_ready=False) as node:
        now = time.monotonic()
        monkeypatch.setattr(engine_reports, "time", SimpleNamespace(monotonic=lambda: now))

        def tell(stage: str, num_done: int = 0, num_bytes: int = 0) -> None:
            node.link.handle(node.link.ranks[0], EngineLoading(stage, num_done, num_bytes))

        async def told(path: str) -> tuple[int, Any]:
            answer = await node.client.get(path)
            return answer.status_code, answer.json()

        tell("weights", 250_000_000, 1_000_000_000)
        loading = {"stage": "weights", "num_done": 250_000_000, "num_bytes": 1_000_000_000}
        reason = "the engine is loading: weights, 0.2 of 1.0 GB"
        assert await told("/health") == (503, {"status": "loading", "reason": reason, "loading": loading})
        now += 899
        tell("weights", 250_000_001, 1_000_000_000)
        now += 899  # 1,798 since the first, 899 since the last progress
        assert (await told("/liveness"))[0] == 200
        assert (await told("/health"))[1]["status"] == "loading"
        tell("weights", 250_000_001, 1_000_000_000)  # the same again
        now += 2
        reason = "loading has stood still for 901 s, at: weights, 0.3 of 1.0 GB"
        stands_still = {"status": "unavailable", "reason": reason}
        assert await told("/liveness") == await told("/health") == (503, stands_still)
        tell("pools")
        assert (await told("/liveness"))[0] == 200
        assert (await told("/health"))[1]["reason"] == "the engine is loading: pools"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_information(role: str, tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path, role=role) as node:
        for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            response = await node.client.get(path)
            assert response.status_code == 200
            assert "model_path" not in response.text  # a router would load a tokenizer from it
            assert str(tmp_path) not in response.text
            assert response.json()["served_model_name"] == "tiny"
            assert response.json()["context_length"] == 256
        assert (await node.client.get("/version")).json() == {"version": VERSION}
        info = (await node.client.get("/server_info")).json()
        assert info["disaggregation_mode"] == role
        assert (info["transfer_protocol"], info["transfer_devices"]) == ("rdma", ["mlx5_0", "mlx5_1"])
        assert info["transfer_reason"] == "RDMA devices usable"
        (rank,) = info["ranks"]
        assert (rank["numa_node"], rank["numa_placement"]) == (1, "node 1, that of cuda:5")
        await until(lambda: node.link.ranks[0].reports.stats is not None, "stats")
        metrics = await node.client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert 'hisparse_pd:requests_total{mode="dense"} 3.0' in metrics.text.splitlines()
        load = (await node.client.get("/get_load")).json()
        assert load == [{"dp_rank": 0, "num_reqs": 1, "num_waiting_reqs": 1, "num_tokens": 17}]
        status = (await node.client.get("/status")).json()
        assert (status["role"], [rank["dp_rank"] for rank in status["ranks"]]) == (role, [0])
        assert status["ranks"][0]["numbers"]["requests_total"] == {"dense": 3}
        models = (await node.client.get("/v1/models")).json()
        assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("tiny", 256)]
        assert (await node.client.get("/v1/models/tiny")).json() == models["data"][0]
        missing = await node.client.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await node.client.post("/flush_cache")).status_code == 200
        assert any(isinstance(message, FlushCache) for message in node.engine.received)


async def test_information_about_the_tokenizer(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path) as node:
        tokenizer = await node.client.get("/tokenizer_info")
        assert str(tmp_path) not in tokenizer.text
        assert tokenizer.json()["eos_token"] == TOKENIZER.eos_token
        assert tokenizer.json()["chat_template"] == TOKENIZER.chat_template
        assert (await node.client.get("/model_info")).json()["vocab_size"] == len(TOKENIZER)


async def test_models_as_anthropics_client_reads_them(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path) as node:
        node.client.headers["anthropic-version"] = "2023-06-01"
        listing = (await node.client.get("/v1/models")).json()
        (model,) = listing["data"]
        assert listing == {"data": [model], "has_more": False, "first_id": "tiny", "last_id": "tiny"}
        assert (await node.client.get("/v1/models/tiny")).json() == model
        assert datetime.fromisoformat(model.pop("created_at")) <= datetime.now(UTC)
        assert model == {"type": "model", "id": "tiny", "display_name": "tiny"}
        missing = await node.client.get("/v1/models/other")
        assert missing.status_code == 404
        assert (missing.json()["type"], missing.json()["error"]["type"]) == ("error", "not_found_error")


def test_metrics_of_the_engine() -> None:
    metrics = FrontMetrics()
    assert "engine_steps" not in metrics.render().decode()
    labelled: dict[str, Any] = {
        'requests_total{mode="hisparse"}': 5.0,
        'dropped_total{reason="late",peer="a"}': 1.0,
    }
    metrics.update(0, stats(41, **labelled))
    lines = metrics.render().decode().splitlines()
    for line in (
        *('requests_total{mode="dense"} 3.0', 'requests_total{mode="hisparse"} 5.0'),
        *("kv_transfer_bytes_total 7.0", 'pool_used_tokens{pool="host"} 42.0', "engine_steps_total 41.0"),
        'dropped_total{peer="a",reason="late"} 1.0',
    ):
        assert f"hisparse_pd:{line}" in lines
    kinds = {"requests_total": "counter", "pool_used_tokens": "gauge"}
    for name, kind in (kinds | {"time_to_first_token_seconds": "histogram"}).items():
        assert lines.count(f"# TYPE hisparse_pd:{name} {kind}") == 1
