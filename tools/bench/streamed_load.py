"""Puts load on an OpenAI-compatible endpoint by streamed ``/v1/completions``, and computes figures of the
records.

``tools.bench.serve`` and ``replay`` make the requests' bodies and have ``closed_loop`` or ``open_loop`` send
them; ``distribution`` and ``full_load`` make figures of the records. Times are taken when bytes arrive,
before they are parsed. A chunk may carry several tokens, so tokens are counted by the answer's usage, which
requests ask for.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np

from tools.bench.served import Served, served

CONNECT_TIMEOUT_SECS = 10.0
MESSAGE_CHARS = 300
"""Characters of an endpoint's error that a record keeps."""
PERCENTILES = (50, 90, 99)


@dataclass
class Record:
    """One request. Times are seconds of ``time.perf_counter``; ``arrivals`` are those of chunks with text."""

    started: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    served: Served | None = None
    """None where the answer had no usage."""
    token_ids: list[int] = field(default_factory=list)
    """The answer's tokens, where the body has ``return_token_ids``."""
    phase_secs: dict[str, float] = field(default_factory=dict)
    """Seconds of the phases up to the first token, where the client asks for them and the endpoint tells."""
    error_class: str = ""
    """A word for how it failed, such as "timeout" or "HTTP 503"; empty if it succeeded."""
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Output tokens; without usage, the number of chunks."""
        return self.served.num_output_tokens if self.served is not None else len(self.arrivals)

    @property
    def ttft_secs(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def e2e_secs(self) -> float:
        return self.ended - self.started

    @property
    def itl_secs(self) -> list[float]:
        """Times between consecutive chunks with text."""
        return [after - before for before, after in itertools.pairwise(self.arrivals)]

    @property
    def tpot_secs(self) -> float | None:
        """Mean time of an output token after the first one; None with fewer than two."""
        if self.num_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)


_TIMING = "server-timing"
_PHASE = re.compile(r"(\w+);dur=([0-9.]+)")
"""A phase in that header, with its milliseconds."""


class EndpointError(Exception):
    """A request failed; ``error_class`` says how."""

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class


class _Choice(msgspec.Struct):
    text: str | None = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


class Client:
    """An async context manager that sends requests to one endpoint; ``url`` includes /v1. With
    ``asks_phases`` it asks how long their phases took (``server-timing``)."""

    def __init__(
        self, url: str, timeout_secs: float, api_key: str = "", *, asks_phases: bool = False
    ) -> None:
        self._url = url.rstrip("/")
        self._asked = {"x-request-timing": "1"} if asks_phases else {}
        self._timeout_secs = timeout_secs
        is_local = httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")
        self._make_http = functools.partial(
            httpx.AsyncClient,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECS),
            trust_env=not is_local,  # the environment's proxies
            verify=httpx.create_ssl_context(),
        )
        self._idle: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for http in self._idle:
            await http.aclose()

    @contextmanager
    def _connection(self) -> Iterator[httpx.AsyncClient]:
        """Yield an HTTP client of which no other request uses the connection.

        In one client for all, a request looks at each idle connection for each other one: with 128
        requests, many of which end together, some would be sent seconds late.
        """
        http = self._idle.pop() if self._idle else self._make_http()
        try:
            yield http
        finally:
            self._idle.append(http)

    async def first_model(self) -> str:
        """Return the endpoint's first model. Raises EndpointError."""
        try:
            with self._connection() as http:
                answer = await http.get(f"{self._url}/models", timeout=CONNECT_TIMEOUT_SECS)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise EndpointError(
                "models",
                f"{self._url}/models: {type(error).__name__}: {error}; start it, or give its URL with "
                "--url, and --model where it lists none",
            ) from error

    async def status(self) -> Any:
        """Return the document of the router's /status. Raises EndpointError."""
        url = f"{self._url.removesuffix('/v1')}/status"
        try:
            with self._connection() as http:
                answer = await http.get(url, timeout=CONNECT_TIMEOUT_SECS)
            return answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise EndpointError("status", f"{url}: {type(error).__name__}: {error}") from error

    async def send(self, content: bytes) -> Record:
        """Send one request with this body. Returns its record when it has ended or failed."""
        record = Record(time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_secs):
                with self._connection() as http:
                    await self._stream(http, content, record)
        except TimeoutError:
            record.error_class, record.error = "timeout", f"not finished after {self._timeout_secs:g} s"
        except EndpointError as error:
            record.error_class, record.error = error.error_class, str(error)
        except httpx.HTTPError as error:
            is_connect = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            record.error_class = "connect" if is_connect else "cut"
            record.error = f"{type(error).__name__}: {error}"
        record.ended = time.perf_counter()
        return record

    async def _stream(self, http: httpx.AsyncClient, content: bytes, record: Record) -> None:
        url, headers = f"{self._url}/completions", {"content-type": "application/json", **self._asked}
        is_finished = False
        async with http.stream("POST", url, content=content, headers=headers) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise EndpointError(f"HTTP {response.status_code}", text[:MESSAGE_CHARS])
            record.phase_secs = {
                name: float(millis) / 1e3
                for name, millis in _PHASE.findall(response.headers.get(_TIMING, ""))
            }
            async for arrived, data in _events(response):
                is_finished |= data == b"[DONE]" or _take(record, data, arrived)
        if not is_finished:
            raise EndpointError("cut", f"the stream ended early, after {len(record.arrivals)} chunks")
        if not record.arrivals:
            raise EndpointError("empty", "the answer has no text")
        if record.served is None:
            raise EndpointError("no usage", "the answer does not say how many tokens it has")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """Yield ``(arrival, data)`` of each server-sent event."""
    rest = b""
    async for piece in response.aiter_bytes():
        arrived = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield arrived, line[5:].strip()


def _take(record: Record, data: bytes, arrived: float) -> bool:
    """Enter one event into the record. Returns whether the answer is finished."""
    try:
        chunk = _CHUNKS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = data[:MESSAGE_CHARS].decode(errors="replace")
        raise EndpointError("malformed", f"an event is no completion chunk: {error}: {shown}") from error
    if chunk.error is not None:
        raise EndpointError("error event", msgspec.json.encode(chunk.error).decode()[:MESSAGE_CHARS])
    if chunk.usage is not None:
        record.served = served(chunk.usage)
    record.token_ids += [token_id for choice in chunk.choices for token_id in choice.token_ids or ()]
    if any(choice.text for choice in chunk.choices):
        record.arrivals.append(arrived)
    return any(choice.finish_reason for choice in chunk.choices)


async def closed_loop(
    client: Client, contents: Iterable[bytes], num_clients: int, on_done: Callable[[], None] = lambda: None
) -> list[Record]:
    """Send a request for each body in ``contents``, each client the next one when its last one has ended.
    Returns their records in the order in which they started; ``on_done`` is called after each."""
    waiting = iter(contents)
    records: list[Record] = []

    async def work() -> None:
        for content in waiting:
            records.append(await client.send(content))
            on_done()

    await asyncio.gather(*(work() for _ in range(num_clients)))
    return sorted(records, key=lambda record: record.started)


async def open_loop(
    client: Client,
    contents: Iterable[bytes],
    starts_secs: Iterable[float],
    on_done: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Send a request for each body in ``contents`` at its time in ``starts_secs``, which only grow, in
    seconds from now, whether others have ended or not. Returns their records in this order; ``on_done`` is
    called after each."""
    begun = time.perf_counter()

    async def send(content: bytes) -> Record:
        record = await client.send(content)
        on_done()
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for content, start_secs in zip(contents, starts_secs, strict=True):
            await asyncio.sleep(begun + start_secs - time.perf_counter())
            tasks.append(group.create_task(send(content)))
    return [task.result() for task in tasks]


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Return mean, percentiles, the largest and the number of ``values``, or None without any."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return None
    points = np.percentile(array, PERCENTILES)
    return {
        "mean": float(array.mean()),
        **{f"p{rank}": float(value) for rank, value in zip(PERCENTILES, points, strict=True)},
        "max": float(array.max()),
        "count": int(array.size),
    }


def full_load(num_clients: int, records: Sequence[Record]) -> dict[str, float] | None:
    """Return tokens a second while all clients were busy and had their first token, without ramp-up and tail;
    None if that never happened. ``records``: as ``closed_loop`` returns them."""
    if len(records) < num_clients:
        return None
    # All clients are busy once the first request of each has its first token, and until one of them finds no
    # further request: the others, one fewer than the clients, then have their last requests in flight.
    begin = max(r.arrivals[0] if r.arrivals else r.ended for r in records[:num_clients])
    end = sorted(r.ended for r in records)[len(records) - num_clients]
    if end <= begin:
        return None
    tokens = 0.0
    for record in records:
        # Each chunk counts with the mean number of tokens of its answer's chunks.
        if inside := sum(begin < arrival <= end for arrival in record.arrivals):
            tokens += inside * record.num_tokens / len(record.arrivals)
    return {"secs": end - begin, "output_tokens_per_sec": tokens / (end - begin)}
