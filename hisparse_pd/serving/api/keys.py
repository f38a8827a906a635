"""API keys of nodes and the router: their file, and the middleware that refuses requests without a key.

Nodes (``node_app.py``) and the router put ``RequireKey`` before their endpoints. No key appears in a command
line, a log or an error; messages name the file and the line.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from hisparse_pd.base.access import KeyFileError
from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.serving.http.certificates import stamp_of
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape, shown

log = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 512
MAX_KEYS = 64
_MAX_FILE_BYTES = 1 << 20
"""Most bytes read, since the path may name a device or weights, and the file is read under load."""

_KEY = re.compile(r"[!-~]+")
_SCHEME = b"bearer "


class ApiKeys:
    """The keys of one file, one a line; empty lines and lines that begin with # are skipped.

    The file is read again when it has changed, so keys can be added and removed under load. A file that has
    become unusable is reported once, and the keys read last stay valid.
    """

    def __init__(self, path: Path) -> None:
        """Raises KeyFileError."""
        self._path = path
        self._stamp = stamp_of(path)
        self._keys = _read(path)

    @property
    def first(self) -> str:
        """The key that a router sends to its nodes if this is its file of node keys."""
        self._refresh()
        return self._keys[0].decode()

    def permits(self, key: bytes) -> bool:
        """Whether ``key`` is one of them. The comparison takes the same time however much of it is right."""
        self._refresh()
        return sum(hmac.compare_digest(key, known) for known in self._keys) > 0

    def _refresh(self) -> None:
        if (stamp := stamp_of(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = _read(self._path)
            log.info("%s has changed and holds %d keys now", self._path, len(self._keys))
        except KeyFileError as error:
            log.error("the API keys in use stay as they were: %s", error)


class RequireKey:
    """ASGI middleware that answers 401 to a request without a valid key, except on ``open_paths``, and calls
    ``on_refused`` for each such answer."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str], on_refused: Callable[[], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._on_refused = on_refused
        self._logged = LogLimiter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            return await self._app(scope, receive, send)
        trouble = self._why_refused(scope["headers"])
        if trouble is None:
            return await self._app(scope, receive, send)
        self._on_refused()
        client = (scope.get("client") or ("unknown",))[0]
        if self._logged.permits(client):
            log.info("refused a request for %s from %s: %s", shown(scope["path"]), client, trouble)
        error = ApiError(401, f"{trouble}; send the header Authorization: Bearer KEY", code="invalid_api_key")
        shape = ErrorShape.of_path(scope["path"])
        await error.response({"www-authenticate": "Bearer"}, shape)(scope, receive, send)

    def _why_refused(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        given = [value for name, value in headers if name == b"authorization"]
        bare = [value for name, value in headers if name == b"x-api-key"]
        if not given and len(bare) == 1:  # as Anthropic's clients send it
            return None if self._keys.permits(bare[0].strip(b" ")) else "the API key is wrong"
        if not given:  # several x-api-key headers count as none
            return "an API key is needed, and the request has none"
        if len(given) > 1 or given[0][: len(_SCHEME)].lower() != _SCHEME:
            return "the Authorization header has no Bearer key"
        key = given[0][len(_SCHEME) :].strip(b" ")
        return None if self._keys.permits(key) else "the API key is wrong"


def load_api_keys(path: Path | None) -> ApiKeys | None:
    """Load the keys; None without a file. Raises KeyFileError."""
    return None if path is None else ApiKeys(path)


def _read(path: Path) -> tuple[bytes, ...]:
    """Read the keys of a file. Raises KeyFileError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        lines = content.decode().splitlines()
    except FileNotFoundError as error:
        raise KeyFileError(
            f"API key file {path}: {_reason(error)}; make it with `hisparse-pd keygen --api {path}`"
        ) from None
    except (OSError, UnicodeError) as error:
        raise KeyFileError(f"API key file {path}: {_reason(error)}") from None
    if len(content) > _MAX_FILE_BYTES:
        raise KeyFileError(
            f"API key file {path}: more than {_MAX_FILE_BYTES} bytes; name the file of the keys"
        )
    keys: list[bytes] = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key) or not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS:
            raise KeyFileError(
                f"API key file {path}: line {number} is no key: expected {MIN_KEY_CHARS} to {MAX_KEY_CHARS} "
                "printable ASCII characters without spaces; make one with `hisparse-pd keygen --api NEW_FILE`"
            )
        keys.append(key.encode())
    if not 1 <= len(keys) <= MAX_KEYS:
        raise KeyFileError(
            f"API key file {path}: it holds {len(keys)} keys, expected 1 to {MAX_KEYS}, one a line; make one "
            "with `hisparse-pd keygen --api NEW_FILE`"
        )
    return tuple(keys)


def _reason(error: OSError | UnicodeError) -> str:
    """Say why a read failed. A decoding error's own text would show the file's bytes."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "it is not UTF-8 text"
