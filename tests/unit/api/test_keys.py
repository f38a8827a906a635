"""API keys: the file, its changes under load, and the gate before an application."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from hisparse_pd.api.keys import MAX_KEYS, ApiKeys, RequireKey, load_api_keys
from protocol.access import KeyFileError

KEY = "correct-horse-battery-staple"
OTHER = "another-key-of-someone-else"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "hisparse_pd.api.keys"
    path.write_text(f"# the web application\n{KEY}\n\n  {OTHER}  \n")
    return path


def test_every_key_of_the_file_is_permitted_and_nothing_else_in_it(path: Path) -> None:
    keys = ApiKeys(path)
    assert keys.first == KEY
    assert keys.permits(KEY.encode())
    assert keys.permits(OTHER.encode())
    for wrong in (b"", b"#", b"# the web application", KEY.encode()[:-1], KEY.encode() + b"x", b"\xff"):
        assert not keys.permits(wrong)


def test_without_a_file_there_are_no_keys() -> None:
    assert load_api_keys(None) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["No such file"]),
        (b"", ["0 keys", "keygen --api"]),
        (b"# only a comment\n", ["0 keys"]),
        (b"# first\nshort\n", ["line 2", "16 to 512"]),
        (b"a key that has spaces in it\n", ["line 1"]),
        ("schl\u00fcssel-der-nicht-ascii-ist\n".encode(), ["line 1"]),
        (b"x" * 513, ["line 1"]),
        (b"\xff" * 32, ["UTF-8"]),
        (b"".join(b"key-number-%08d\n" % number for number in range(MAX_KEYS + 1)), [f"{MAX_KEYS + 1} keys"]),
    ],
)
def test_a_bad_file_is_named_and_not_shown(tmp_path: Path, content: bytes | None, words: list[str]) -> None:
    path = tmp_path / "hisparse_pd.api.keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KeyFileError) as caught:
        ApiKeys(path)
    message = str(caught.value)
    for word in [str(path), *words]:
        assert word in message
    for line in (content or b"").decode("latin-1").splitlines():
        assert line in ("", "# first") or line not in message


def test_keys_are_rotated_without_a_restart(path: Path) -> None:
    keys = ApiKeys(path)
    path.write_text(f"{OTHER}\nthe-key-of-the-day-after\n")
    assert keys.permits(b"the-key-of-the-day-after")
    assert keys.first == OTHER
    assert not keys.permits(KEY.encode())


@pytest.mark.parametrize("content", [None, b"", b"\xff\xff", b"short\n"])
def test_a_file_that_breaks_leaves_the_keys_as_they_were(
    path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(path)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    for _ in range(3):
        assert keys.permits(KEY.encode())
    assert caplog.text.count("stay as they were") == 1
    path.write_text("the-key-of-the-day-after\n")
    assert keys.permits(b"the-key-of-the-day-after")
    assert not keys.permits(KEY.encode())


# --- the gate ------------------------------------------------------------------------------------------


def ask(path: Path, target: str, headers: Any) -> tuple[httpx.Response, int, list[str]]:
    """The answer, how many requests were refused, and which reached the application."""
    reached: list[str] = []
    num_refused = 0

    def note_refusal() -> None:
        nonlocal num_refused
        num_refused += 1

    async def endpoint(request: Request) -> PlainTextResponse:
        reached.append(request.url.path)
        return PlainTextResponse("in")

    inner = Starlette(
        routes=[Route(name, endpoint, methods=["GET", "POST"]) for name in ("/work", "/health")]
    )
    app = RequireKey(inner, ApiKeys(path), frozenset(("/health",)), note_refusal)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            return await client.post(target, headers=headers, content=b"{}")

    return asyncio.run(send()), num_refused, reached


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_key_gets_through(path: Path, scheme: str) -> None:
    answer, num_refused, reached = ask(path, "/work", {"authorization": f"{scheme} {OTHER}"})
    assert (answer.status_code, num_refused, reached) == (200, 0, ["/work"])


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY} {OTHER}"},
        {"authorization": f"Bearer {KEY}, Bearer {OTHER}"},
        [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
        {"x-api-key": f"{KEY}x"},
        {"x-api-key": KEY, "authorization": f"Bearer {KEY}x"},
        [("x-api-key", KEY), ("x-api-key", KEY)],
    ],
    ids=str,
)
def test_anything_else_is_answered_401_in_openais_shape(
    path: Path, headers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answer, num_refused, reached = ask(path, "/work", headers)
    assert (answer.status_code, num_refused, reached) == (401, 1, [])
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "invalid_api_key",
        None,
    )
    assert "Authorization: Bearer KEY" in error["message"]
    for told in (answer.text, caplog.text):
        assert KEY not in told
        assert OTHER not in told


def test_what_the_client_wrote_cannot_forge_a_line_of_the_log(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hisparse_pd.api.keys")
    ask(path, "/work%0aINFO%20forged", {})
    (record,) = [record for record in caplog.records if record.name == "hisparse_pd.api.keys"]
    assert "\n" not in record.getMessage()
    assert json.dumps("/work\nINFO forged") in record.getMessage()


@pytest.mark.parametrize(("target", "status"), [("/health", 200), ("/health/", 401), ("/nowhere", 401)])
def test_open_paths_are_exactly_those_and_unknown_ones_are_not_told(
    path: Path, target: str, status: int
) -> None:
    assert ask(path, target, {})[0].status_code == status
