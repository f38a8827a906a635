"""The command that containers check their health with: it waits while a node loads."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from hisparse_pd.serving.http.certificates import Certificate
from tests.tls_files import make_tls_files, needs_openssl
from tests.unit.router.cluster import answer
from tests.unit.servers import serving
from tests.waiting import WAIT_SECS

pytestmark = pytest.mark.anyio

HEALTHCHECK = Path(__file__).resolve().parents[3] / "deploy" / "healthcheck.py"
HEALTHY = (200, {"status": "ok"})
LOADING = (503, {"status": "loading", "reason": "the engine is loading: weights, 1 of 9 GB"})
STALLED = (503, {"status": "unavailable", "reason": "loading has stood still for 301 s"})


class Service:
    """A service that gives one answer after the other, the last one again and again."""

    def __init__(self, *answers: tuple[int, object]) -> None:
        self._answers = answers
        self.num_asked = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, body = self._answers[min(self.num_asked, len(self._answers) - 1)]
        self.num_asked += 1
        await answer(send, json.dumps(body).encode(), status)


async def check(url: str, monkeypatch: pytest.MonkeyPatch) -> int:
    command = run_path(str(HEALTHCHECK))
    command["main"].__globals__.update(INTERVAL_SECS=0.0, TIMEOUT_SECS=WAIT_SECS)
    monkeypatch.setattr("sys.argv", ["healthcheck", url])
    status: int = await asyncio.to_thread(command["main"])
    return status


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([HEALTHY], 0),
        ([LOADING, LOADING, LOADING, HEALTHY], 0),
        ([LOADING, LOADING, STALLED], 1),
        ([(503, {"status": "unavailable", "reason": "the engine has died"})], 1),
        ([(503, ["loading"])], 1),
    ],
)
async def test_it_waits_while_a_node_loads_and_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, object]], status: int
) -> None:
    service = Service(*answers)
    async with serving(service) as (_, port):
        assert await check(f"http://127.0.0.1:{port}/health", monkeypatch) == status
    assert service.num_asked == len(answers)


@needs_openssl
async def test_a_certificate_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, files = Service(HEALTHY), make_tls_files(tmp_path / "tls")
    async with serving(service, Certificate(files.cert, files.key)) as (_, port):
        assert await check(f"https://127.0.0.1:{port}/health", monkeypatch) == 0
    assert service.num_asked == 1


async def test_a_service_that_does_not_answer_is_not_healthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await check("http://127.0.0.1:1/health", monkeypatch) == 1
    assert "127.0.0.1:1" in capsys.readouterr().out
