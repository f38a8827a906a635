"""Operators see the quarantine, and release slots."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette

from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.engine.messages import (
    EngineReady,
    EngineStats,
    QuarantinedRun,
    ReleasePage,
    ReleaseQuarantine,
    SetAsidePage,
)
from hisparse_pd.serving.api.models import json_response
from hisparse_pd.serving.api.quarantine_routes import quarantine_routes
from hisparse_pd.serving.http.engine_link import EngineLink, LinkState
from hisparse_pd.serving.http.http_errors import ApiError

PAGE = SetAsidePage(PoolKind.HOST, 128, 64, False, "wrong", 5.0)
RUN = QuarantinedRun("10.0.0.1:8998", "run-1", 64, 60, 300.0, 640, 0, 4096, 64)


def serving(trouble: str = "") -> EngineLink:
    link = EngineLink(["unused"], health_timeout_secs=60.0)
    link.handle(link.ranks[0], EngineReady(100, 100, 50))
    link.handle(
        link.ranks[0], EngineStats({}, {}, 0, 0, 0, 0, trouble=trouble, quarantine=(RUN,), set_aside=(PAGE,))
    )
    return link


def ask(link: EngineLink, method: str, path: str) -> httpx.Response:
    def answer_error(request: object, error: Exception) -> object:
        assert isinstance(error, ApiError)
        return json_response(error.to_dict(), error.status)

    app = Starlette(routes=quarantine_routes(link), exception_handlers={ApiError: answer_error})  # type: ignore[dict-item]

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://decode") as client:
            return await client.request(method, path)

    return asyncio.run(send())


def sent(link: EngineLink) -> list[object]:
    return [message for message, _ in link.ranks[0].outbox]


def test_what_is_kept_is_shown_by_run() -> None:
    document = ask(serving(), "GET", "/quarantine").json()
    (shown,) = document["runs"]
    assert document["pages"] == [
        {
            "rank": 0,
            "pool": "host",
            "start": 128,
            "num_slots": 64,
            "is_in_use": False,
            "error": "wrong",
            "at": 5.0,
        }
    ]
    assert shown["prefill_node"] == "10.0.0.1:8998"
    assert (shown["instance_id"], shown["num_rooms"], shown["aux_slots"]) == ("run-1", 64, 64)


def test_a_run_is_declared_dead_by_its_id() -> None:
    link = serving()
    answer = ask(link, "POST", "/release_quarantine?instance_id=run-1")
    assert (answer.status_code, answer.json()["released"]["num_rooms"]) == (200, 64)
    assert sent(link) == [ReleaseQuarantine("run-1")]


def test_a_page_is_declared_good_by_its_pool_and_slot() -> None:
    link = serving()
    answer = ask(link, "POST", "/release_quarantine?pool=host&slot=128&rank=0")
    assert (answer.status_code, answer.json()["released"]["num_slots"]) == (200, 64)
    assert sent(link) == [ReleasePage(PoolKind.HOST, 128)]


@pytest.mark.parametrize(
    ("method", "query", "status"),
    [
        *(("POST", f"?pool=host&slot={slot}", 404) for slot in ("129", "", "x")),
        ("POST", "?pool=device&slot=128", 404),
        ("POST", "?pool=host&slot=128&rank=1", 404),
        ("POST", "", 400),
        ("POST", "?instance_id=run-2", 404),
        ("GET", "?instance_id=run-1", 405),
    ],
)
def test_what_is_no_declaration_releases_nothing(method: str, query: str, status: int) -> None:
    link = serving()
    assert ask(link, method, f"/release_quarantine{query}").status_code == status
    assert sent(link) == []


def test_a_node_whose_engine_can_admit_nobody_is_not_healthy() -> None:
    assert serving().trouble() is None
    assert serving("all slots of the aux pool are kept").trouble() == "all slots of the aux pool are kept"
    stopping = serving("all slots of the aux pool are kept")
    stopping.state = LinkState.STOPPING
    assert stopping.trouble() == str(LinkState.STOPPING)
