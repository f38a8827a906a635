"""API keys: the file, its changes under load, and the gate before an application."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from hisparse_pd.base.access import KeyFileError
from hisparse_pd.serving.api.keys import MAX_KEYS, ApiKeys, RequireKey, load_api_keys

KEY = "correct-horse-battery-staple"
OTHER = "another-key-of-someone-else"


CONTENT = f"# the web application\n{KEY}\n\n  {OTHER}  \n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(CONTENT)
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
        (None, ["No such file", "keygen --api /"]),
        (b"", ["0 keys", "keygen --api NEW_FILE"]),
        (b"# only a comment\n", ["0 keys"]),
        (b"# first\nshort\n", ["line 2", "16 to 512"]),
        (b"a key that has spaces in it\n", ["line 1", "keygen --api NEW_FILE"]),
        ("schl\u00fcssel-der-nicht-ascii-ist\n".encode(), ["line 1"]),
        (b"x" * 513, ["line 1"]),
        (b"\xff" * 32, ["UTF-8"]),
        (b"# comment\n" * 200_000, ["more than 1048576 bytes"]),
        (b"".join(b"key-number-%08d\n" % number for number in range(MAX_KEYS + 1)), [f"{MAX_KEYS + 1} keys"]),
    ],
)
def test_a_bad_file_is_named_and_not_shown(tmp_path: Path, content: bytes | None, words: list[str]) -> None:
    path = tmp_path / "keys"
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


HEADERS = list[tuple[bytes, bytes]]


@dataclass
class Gate:
    """The middleware before an application, with what it lets through."""

    keys: ApiKeys
    num_refused: int = 0
    num_reached: int = 0

    def ask(self, target: str, headers: HEADERS) -> tuple[int, dict[bytes, bytes], bytes]:
        """Return the status, headers and body of the answer. Nothing of it waits, and no body is read."""
        sent: list[Message] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            self.num_reached += 1
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            raise AssertionError("the body was read")

        scope = {"type": "http", "path": target, "headers": headers, "client": ("10.0.0.9", 1)}
        gate = RequireKey(app, self.keys, frozenset(("/health",)), self.refuse)
        with pytest.raises(StopIteration):
            gate(scope, receive, send).send(None)
        start, *bodies = sent
        return start["status"], dict(start["headers"]), b"".join(message["body"] for message in bodies)

    def refuse(self) -> None:
        self.num_refused += 1


@pytest.fixture
def gate(path: Path) -> Gate:
    return Gate(ApiKeys(path))


def bearer(value: str | bytes) -> HEADERS:
    return [(b"authorization", value.encode() if isinstance(value, str) else value)]


X_API_KEY = [(b"x-api-key", KEY.encode())]


@pytest.mark.parametrize(
    "headers", [*(bearer(f"{scheme} {OTHER}") for scheme in ("Bearer", "bearer", "BEARER")), X_API_KEY]
)
def test_a_key_gets_through(gate: Gate, headers: HEADERS) -> None:
    status, _, _ = gate.ask("/work", headers)
    assert (status, gate.num_refused, gate.num_reached) == (200, 0, 1)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(b"Bearer \xff\x00"),
        bearer(f"Bearer {KEY},"),
        *map(
            bearer, ("", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY} {OTHER}")
        ),
        bearer(f"Bearer {KEY}, Bearer {OTHER}"),
        bearer(f"Bearer {KEY}") * 2,
        [(b"x-api-key", f"{KEY}x".encode())],
        X_API_KEY + bearer(f"Bearer {KEY}x"),
        X_API_KEY * 2,
    ],
    ids=str,
)
def test_anything_else_is_answered_401_in_openais_shape(
    gate: Gate, headers: HEADERS, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    status, shown, body = gate.ask("/work", headers)
    assert (status, gate.num_refused, gate.num_reached) == (401, 1, 0)
    assert (shown[b"www-authenticate"], shown[b"content-type"]) == (b"Bearer", b"application/json")
    error = json.loads(body)["error"]
    told = (error["type"], error["code"], error["param"])
    assert told == ("invalid_request_error", "invalid_api_key", None)
    assert "Authorization: Bearer KEY" in error["message"]
    for text in (body.decode(), caplog.text):
        assert KEY not in text
        assert OTHER not in text
    _, _, body = gate.ask("/v1/messages", headers)
    assert json.loads(body)["error"]["type"] == "authentication_error"


def test_what_the_client_wrote_cannot_forge_a_line_of_the_log(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hisparse_pd.serving.api.keys")
    gate.ask("/work\nINFO forged", [])
    (record,) = [record for record in caplog.records if record.name == "hisparse_pd.serving.api.keys"]
    assert "\n" not in record.getMessage()
    assert json.dumps("/work\nINFO forged") in record.getMessage()


def test_an_open_path_is_open_as_it_is_written_alone(gate: Gate) -> None:
    assert gate.ask("/health", bearer("Bearer wrong"))[0] == 200
    for target in ("/health/", "//health", "/HEALTH", "/health\0", "", "/v1/models"):
        assert gate.ask(target, [])[0] == 401, target
