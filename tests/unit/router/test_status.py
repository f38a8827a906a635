"""``/status`` and the live page, with nodes that are healthy, away, slow, or answer nonsense."""

from __future__ import annotations

import asyncio
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import Send

from hisparse_pd.engine.messages import EngineStats
from hisparse_pd.router import status
from hisparse_pd.router.drain import Drain
from hisparse_pd.router.live_page import PAGE_PATHS
from hisparse_pd.router.node_calls import MAX_DOCUMENT_BYTES
from hisparse_pd.serving.http.node_load import NodeLoad
from tests.unit.router.cluster import Behaviour, FakeNode, cluster, never, says, start, streams, write
from tests.waiting import NEVER_SECS

pytestmark = pytest.mark.anyio

REPO = Path(__file__).resolve().parents[3]
PAGE_DIR = REPO / "router" / "page"
MAX_PAGE_BYTES = 48 << 10


def stats(num_running: int = 1) -> EngineStats:
    gauges = {"num_running_reqs": float(num_running), 'pool_used_tokens{pool="kv"}': 128.0}
    counters = {'requests_total{mode="dense"}': 1.0, 'requests_total{mode="hisparse"}': 2.0}
    return EngineStats(gauges, counters | {"swap_in_bytes_total": 11520}, 4, 2, 128, 5)


DECODE_LOAD, PREFILL_LOAD = (NodeLoad.of(role, {0: stats()}) for role in ("decode", "prefill"))
ENCODED = msgspec.json.encode(DECODE_LOAD)
DECODES = says(ENCODED)
PREFILLS = says(msgspec.json.encode(PREFILL_LOAD))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node is silent for being slow."""
    monkeypatch.setattr(status, "NODE_TIMEOUT_SECS", NEVER_SECS)


async def _status(client: httpx.AsyncClient) -> dict[str, Any]:
    response = await client.get("/status")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["cache-control"] == "no-store"
    decoded: dict[str, Any] = response.json()
    return decoded


# --- what a node says --------------------------------------------------------------------------------


def test_numbers_are_by_rank_name_and_label() -> None:
    load = NodeLoad.of("prefill", {2: stats(5), 0: stats()})
    assert [(rank.dp_rank, rank.numbers["num_running_reqs"]) for rank in load.ranks] == [
        (0, {"": 1}),
        (2, {"": 5}),
    ]
    assert load.ranks[0].numbers["requests_total"] == {"dense": 1, "hisparse": 2}
    assert load.ranks[0].numbers["pool_used_tokens"] == {"kv": 128}
    assert NodeLoad.of("decode", {}).ranks == ()


# --- the endpoint ------------------------------------------------------------------------------------


async def test_status_of_healthy_nodes() -> None:
    async with cluster(prefill=PREFILLS, decode=DECODES) as pair:
        await pair.client.post("/generate", content=b"no json")
        status = await _status(pair.client)
        assert status["ready"] is True
        assert status["policy"] == "round_robin"
        assert status["answers"] == {"400": 1}
        assert (status["retries"], status["resumes"]) == (0, 0)
        prefill, decode = status["nodes"]
        assert (prefill["url"], decode["url"]) == (pair.prefill[0].url, pair.decode[0].url)
        assert (prefill["kind"], decode["kind"]) == ("prefill", "decode")
        for node in (prefill, decode):
            assert node["healthy"] is True
            assert (node["trouble"], node["load_trouble"], node["in_flight"]) == ("", "", 0)
        assert prefill["load"] == msgspec.json.decode(msgspec.json.encode(PREFILL_LOAD))
        assert decode["load"] == msgspec.json.decode(ENCODED)


async def test_a_dead_node_is_named_and_the_others_are_shown() -> None:
    decode = [DECODES] * 2
    async with cluster(prefill=PREFILLS, decode=decode) as nodes:
        await nodes.decode[0].close()
        status = await _status(nodes.client)
        gone, alive = (node for node in status["nodes"] if node["kind"] == "decode")
        assert gone["url"] == nodes.decode[0].url
        assert gone["load"] is None
        assert "/status" in gone["load_trouble"]
        assert alive["load"]["role"] == "decode"
        assert status["ready"] is True  # only the health watch changes the pool


async def test_the_routers_judgement_is_shown() -> None:
    async with cluster(prefill=PREFILLS, decode=DECODES) as pair:
        await pair.decode[0].close()
        await pair.client.post("/generate", json={"text": "a"})
        status = await _status(pair.client)
        assert status["ready"] is False
        decode = status["nodes"][1]
        assert decode["healthy"] is False
        assert "cannot be reached" in decode["trouble"]
        assert status["answers"] == {"502": 1}


async def test_a_router_that_drains_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_AGE_SECS", 0.0)
    drain = Drain()
    async with cluster(prefill=PREFILLS, decode=DECODES, drain=drain) as pair:
        before = await _status(pair.client)
        assert (before["ready"], before["draining"]) == (True, False)
        await drain.finish(0.0, is_hurried=lambda: False)
        after = await _status(pair.client)
        assert (after["ready"], after["draining"]) == (False, True)
        assert (await pair.client.get("/readiness")).status_code == 503
        assert (await pair.client.get("/liveness")).status_code == 200
        assert [node["healthy"] for node in after["nodes"]] == [True, True]


async def _endless(node: FakeNode, send: Send) -> None:
    await start(send, content_type="text/plain")
    while True:
        await write(send, b"# nothing to see here\n" * 4096)
        await asyncio.sleep(0)  # once the router has closed, a write does not wait


@pytest.mark.parametrize(
    ("behaviour", "trouble"),
    [
        (says(b"<html>", content_type="text/html"), "malformed"),
        (says(b"\xff\xfe\x00" * 30), "malformed"),
        (says(b"[" * 100_000), "nested"),
        (says(b"{}"), "missing required field `role`"),
        (says(ENCODED.replace(b"11520", b"-1")), ">= 0"),
        (says(ENCODED.replace(b"11520", b"1e999")), "out of range"),
        (says(ENCODED.replace(b"11520", b"NaN")), "malformed"),
        (PREFILLS, "no decode node"),
        (says(b"", 500), "answered 500"),
        (says(b"", 302), "answered 302"),
        (_endless, f"more than {MAX_DOCUMENT_BYTES} bytes"),
    ],
)
async def test_a_node_that_tells_nothing_of_use_is_named(behaviour: Behaviour, trouble: str) -> None:
    async with cluster(prefill=PREFILLS, decode=behaviour) as pair:
        prefill, decode = (await _status(pair.client))["nodes"]
        assert prefill["load"]["role"] == "prefill"
        assert decode["load"] is None
        assert trouble in decode["load_trouble"]
        assert decode["healthy"] is True


@pytest.mark.I8
async def test_a_silent_node_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "NODE_TIMEOUT_SECS", 0.2)
    async with cluster(prefill=PREFILLS, decode=never) as pair:
        decode = (await _status(pair.client))["nodes"][1]
        assert (decode["load"], decode["load_trouble"]) == (None, "no answer to /status in 0.2 s")
        assert decode["healthy"] is True


@pytest.mark.I8
async def test_many_viewers_cost_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_AGE_SECS", 3600.0)
    async with cluster(prefill=PREFILLS, decode=DECODES) as pair:
        answers = await asyncio.gather(*(_status(pair.client) for _ in range(20)))
        assert [path for path, _, _ in pair.decode[0].requests] == ["/status"]
        assert len({answer["at"] for answer in answers}) == 1
        monkeypatch.setattr(status, "MAX_AGE_SECS", 0.0)
        assert (await _status(pair.client))["at"] > answers[0]["at"]
        assert len(pair.decode[0].requests) == len(pair.prefill[0].requests) == 2


@pytest.mark.I8
async def test_a_viewer_that_leaves_does_not_hold_up_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "NODE_TIMEOUT_SECS", 0.5)
    async with cluster(prefill=PREFILLS, decode=never) as pair:
        with pytest.raises(httpx.TimeoutException):
            await pair.client.get("/status", timeout=0.05)
        assert (await _status(pair.client))["nodes"][1]["load"] is None


# --- the page and the key ----------------------------------------------------------------------------


async def test_status_needs_the_key_and_the_page_does_not(tmp_path: Path) -> None:
    key = "a-key-of-the-test-0123456789"
    (tmp_path / "keys").write_text(f"{key}\n")
    async with cluster(decode=streams, api_key_file=tmp_path / "keys") as pair:
        for path in PAGE_PATHS:
            assert (await pair.client.get(path)).status_code == 200, path
        assert (await pair.client.get("/status")).status_code == 401
        assert (await pair.client.get("/page/..%2fstatus")).status_code == 401
        wrong = {"authorization": "Bearer wrong-key-0123456789"}
        assert (await pair.client.get("/status", headers=wrong)).status_code == 401
        right = {"authorization": f"Bearer {key}"}
        assert (await pair.client.get("/status", headers=right)).status_code == 200


async def test_the_page_is_served_whole_and_allows_nothing_from_elsewhere() -> None:
    async with cluster() as pair:
        page = await pair.client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        linked = set(re.findall(r'(?:src|href)="([^"]+)"', page.text))
        for path in linked:
            response = await pair.client.get(path)
            assert response.status_code == 200, path
            policy = response.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; ")
            assert "unsafe" not in policy
            assert "*" not in policy
            linked = linked | set(re.findall(r'from "([^"]+)"', response.text))
        assert linked | {"/"} == PAGE_PATHS
        assert not re.search(r"<script[^>]*>[^<]|\son\w+=|\sstyle=", page.text), (
            "the policy forbids inline code"
        )


async def test_the_pages_files_are_small_local_and_packaged() -> None:
    files = list(PAGE_DIR.iterdir())
    assert sum(file.stat().st_size for file in files) < MAX_PAGE_BYTES
    assert {file.name for file in files} == {path.rpartition("/")[2] or "index.html" for path in PAGE_PATHS}
    for file in files:
        addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+", file.read_text(encoding="utf-8")))
        assert addresses <= {"http://www.w3.org"}, f"{file}: an address of another machine"
    patterns = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for file in files:
        name = file.relative_to(REPO / "router").as_posix()
        assert any(fnmatch(name, each) for each in patterns["hisparse_pd.router"]), f"{name} is in no wheel"
