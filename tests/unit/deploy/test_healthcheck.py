"""The command that containers check their health with: it waits while a node loads."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from tests.tls_files import make_tls_files, needs_openssl

HEALTHCHECK = Path(__file__).resolve().parents[3] / "deploy" / "healthcheck.py"
LOADING = (503, {"status": "loading", "reason": "the engine is loading: weights, 1 of 9 GB"})
STALLED = (503, {"status": "unavailable", "reason": "loading has stood still for 301 s"})


class Service:
    """Gives one answer after the other, the last one again and again."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, object]] = [(200, {"status": "ok"})]
        self.num_asked = 0
        service = self

        class Health(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = service.answers[min(service.num_asked, len(service.answers) - 1)]
                service.num_asked += 1
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Health)
        self.url = f"http://127.0.0.1:{self.server.server_port}/health"


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    thread = threading.Thread(target=service.server.serve_forever, args=(0.01,))
    thread.start()
    yield service
    service.server.shutdown()
    thread.join()
    service.server.server_close()


def check(url: str, monkeypatch: pytest.MonkeyPatch) -> int:
    command = run_path(str(HEALTHCHECK))
    command["main"].__globals__["INTERVAL_SECS"] = 0.0
    monkeypatch.setattr("sys.argv", ["healthcheck", url])
    status: int = command["main"]()
    return status


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([(200, {"status": "ok"})], 0),
        ([LOADING, LOADING, LOADING, (200, {"status": "ok"})], 0),
        ([LOADING, LOADING, STALLED], 1),
        ([(503, {"status": "unavailable", "reason": "the engine has died"})], 1),
        ([(503, ["loading"])], 1),
    ],
)
def test_it_waits_while_a_node_loads_and_for_nothing_else(
    service: Service, monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, object]], status: int
) -> None:
    service.answers = answers
    assert check(service.url, monkeypatch) == status
    assert service.num_asked == len(answers)


@needs_openssl
def test_a_certificate_is_not_checked(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_tls_files(tmp_path / "tls").serving()
    service.server.socket = context.wrap_socket(service.server.socket, server_side=True)
    assert check(service.url.replace("http:", "https:"), monkeypatch) == 0
    assert service.num_asked == 1


def test_a_service_that_does_not_answer_is_not_healthy(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check("http://127.0.0.1:1/health", monkeypatch) == 1
    assert "127.0.0.1:1" in capsys.readouterr().out
