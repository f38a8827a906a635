"""Load on an OpenAI-compatible endpoint: prompts, one streamed request, and the closed and open loops.

A ``Client`` sends ``/v1/completions`` requests with ``stream`` and keeps of each one a ``Record``. Times are
taken when bytes arrive, before they are parsed. A chunk may carry several tokens, so tokens are counted by
the endpoint's usage where it sends one, and by chunks with text otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np

from hisparse_pd.commands.bench.settings import ServingSettings

CONNECT_TIMEOUT_SECS = 10.0
MESSAGE_CHARS = 300
"""Of an endpoint's error that are kept."""

PREPARED_BYTES = 256 << 20
"""Of request bodies that are encoded before a point begins; the others are encoded when they are due."""
PREPARED_REQUESTS = 1024
"""Where a duration and not a number of requests is given."""

_WORDS = ("time", "people", "year", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")

HisparseValue = bool | str | None
"""Of the request's field ``hisparse``; None: the field is left out."""


# --- what is asked --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """What every request of a measurement has in common: its model, and what the settings say of requests."""

    model: str
    settings: ServingSettings

    def prompt(self, stream: int, number: int) -> list[int] | str:
        """Prompt ``number`` of ``stream``; different streams have different prompts, unless there are only
        so many distinct ones."""
        settings = self.settings
        if settings.distinct_prompts:
            rng = np.random.default_rng((settings.seed, 0, number % settings.distinct_prompts))
        else:
            rng = np.random.default_rng((settings.seed, stream + 1, number))
        if settings.prompt_format == "text":
            return " ".join(_WORDS[at] for at in rng.integers(0, len(_WORDS), settings.input_tokens))
        ids: list[int] = rng.integers(*settings.token_range, settings.input_tokens).tolist()
        return ids

    def content(self, stream: int, number: int, hisparse: HisparseValue, max_tokens: int) -> bytes:
        """The body of a request, encoded."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": self.prompt(stream, number),
            "max_tokens": max_tokens,
            "temperature": self.settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.settings.ignore_eos:
            body["ignore_eos"] = True
        if hisparse is not None:
            body["hisparse"] = hisparse
        return msgspec.json.encode(body | self.settings.extra_body)


@dataclass(frozen=True)
class Point:
    """One point of a sweep: a closed loop of ``concurrency`` clients, or an open loop at ``request_rate``.

    Ends after ``num_requests``, or starts none after ``duration_secs``; what has started is always finished.
    """

    hisparse: HisparseValue = None
    concurrency: int | None = None
    request_rate: float | None = None
    num_requests: int | None = None
    duration_secs: float | None = None
    stream: int = 0
    """Of prompts and of arrivals."""


# --- what came back -------------------------------------------------------------------------------------


@dataclass
class Record:
    """One request. Times are seconds of ``time.perf_counter``; ``started`` is when it should have started."""

    started: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Of the chunks with text."""
    num_output_tokens: int = 0
    has_usage: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_held_tokens: int = 0
    mode: str = ""
    """As the endpoint says that it served it."""
    hits: int = 0
    misses: int = 0
    error_class: str = ""
    """Empty: it succeeded."""
    error: str = ""

    @property
    def ttft_secs(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def e2e_secs(self) -> float:
        return self.ended - self.started

    @property
    def itl_secs(self) -> list[float]:
        """Between consecutive chunks with text."""
        return [after - before for before, after in itertools.pairwise(self.arrivals)]

    @property
    def tpot_secs(self) -> float | None:
        """Mean time of an output token after the first; None with fewer than two."""
        if self.num_output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output_tokens - 1)


class EndpointError(Exception):
    """The request failed; ``error_class`` says how."""

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class


class _Served(msgspec.Struct):
    mode: str = ""
    hits: int = 0
    misses: int = 0


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
    held_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None
    hisparse: _Served | None = None


class _Choice(msgspec.Struct):
    text: str | None = ""
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


class Client:
    """Sends requests to one endpoint; ``url`` goes up to and with /v1. An async context manager."""

    def __init__(self, url: str, timeout_secs: float, api_key: str = "") -> None:
        self._url = url.rstrip("/")
        self._timeout_secs = timeout_secs
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_SECS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=not _is_loopback(url),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def first_model(self) -> str:
        """The endpoint's first model. Raises EndpointError."""
        try:
            answer = await self._http.get(f"{self._url}/models", timeout=CONNECT_TIMEOUT_SECS)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise EndpointError(
                "models",
                f"{self._url}/models: {type(error).__name__}: {error}; start it, or give its URL with "
                "--url, and --model where it lists none",
            ) from error

    async def send(self, content: bytes, started: float | None = None) -> Record:
        """One request to its end, which an error is too."""
        record = Record(time.perf_counter() if started is None else started)
        try:
            async with asyncio.timeout(self._timeout_secs):
                await self._stream(content, record)
        except TimeoutError:
            _fail(record, "timeout", f"not finished after {self._timeout_secs:g} s")
        except EndpointError as error:
            _fail(record, error.error_class, str(error))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            _fail(record, "connect", f"{type(error).__name__}: {error}")
        except httpx.HTTPError as error:
            _fail(record, "cut", f"{type(error).__name__}: {error}")
        record.ended = time.perf_counter()
        return record

    async def _stream(self, content: bytes, record: Record) -> None:
        headers = {"content-type": "application/json"}
        is_finished = False
        async with self._http.stream(
            "POST", f"{self._url}/completions", content=content, headers=headers
        ) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise EndpointError(f"HTTP {response.status_code}", text[:MESSAGE_CHARS])
            async for arrived, data in _events(response):
                if data == b"[DONE]":
                    is_finished = True
                    continue
                is_finished |= _take(record, data, arrived)
        if not is_finished:
            raise EndpointError("cut", f"the stream ended early, after {len(record.arrivals)} chunks")
        if not record.arrivals:
            raise EndpointError("empty", "the answer has no text")
        if not record.has_usage:
            record.num_output_tokens = len(record.arrivals)


def _is_loopback(url: str) -> bool:
    """A proxy of the environment has no business there."""
    return httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[float, bytes]]:
    """``(arrival, data)`` of each server-sent event."""
    rest = b""
    async for piece in response.aiter_bytes():
        arrived = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield arrived, line[5:].strip()


def _take(record: Record, data: bytes, arrived: float) -> bool:
    """Enter one event into the record; whether it says that the answer is finished."""
    try:
        chunk = _CHUNKS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = data[:MESSAGE_CHARS].decode(errors="replace")
        raise EndpointError("malformed", f"an event is no completion chunk: {error}: {shown}") from error
    if chunk.error is not None:
        shown = msgspec.json.encode(chunk.error).decode()
        raise EndpointError("error event", shown[:MESSAGE_CHARS])
    if usage := chunk.usage:
        record.has_usage = True
        record.num_output_tokens = usage.completion_tokens or 0
        record.num_prompt_tokens = usage.prompt_tokens or 0
        if usage.prompt_tokens_details:
            record.num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
            record.num_held_tokens = usage.prompt_tokens_details.held_tokens or 0
        if served := usage.hisparse:
            record.mode, record.hits, record.misses = served.mode, served.hits, served.misses
    if any(choice.text for choice in chunk.choices):
        record.arrivals.append(arrived)
    return any(choice.finish_reason for choice in chunk.choices)


def _fail(record: Record, error_class: str, message: str) -> None:
    record.error_class, record.error = error_class, message


# --- loops ----------------------------------------------------------------------------------------------


async def warm_up(
    client: Client, workload: Workload, point: Point, num_requests: int, output_tokens: int
) -> None:
    """Requests like the point's, of ``output_tokens``, as many at a time; what comes back is dropped.

    Raises EndpointError when all of them fail: the point would too.
    """
    limit = asyncio.Semaphore(point.concurrency or num_requests)

    async def ask(number: int) -> Record:
        async with limit:
            return await client.send(
                workload.content(2 * point.stream + 1, number, point.hisparse, output_tokens)
            )

    records = await asyncio.gather(*(ask(number) for number in range(num_requests)))
    if records and all(record.error_class for record in records):
        raise EndpointError(records[0].error_class, f"warm-up: {records[0].error_class}: {records[0].error}")


async def run_point(
    client: Client, workload: Workload, point: Point, on_done: Callable[[], None] = lambda: None
) -> list[Record]:
    """All requests of one point, in the order in which they started."""
    settings = workload.settings

    def content(number: int) -> bytes:
        return workload.content(2 * point.stream, number, point.hisparse, settings.output_tokens)

    # A long prompt takes milliseconds to encode, in which no arrival is seen.
    num_prepared = point.num_requests or PREPARED_REQUESTS
    if settings.distinct_prompts:
        num_prepared = min(num_prepared, settings.distinct_prompts)
    prepared: list[bytes] = []
    num_bytes = 0
    while len(prepared) < num_prepared and num_bytes < PREPARED_BYTES:
        prepared.append(content(len(prepared)))
        num_bytes += len(prepared[-1])

    async def ask(number: int, started: float | None = None) -> Record:
        at = number % settings.distinct_prompts if settings.distinct_prompts else number
        body = prepared[at] if at < len(prepared) else content(number)
        record = await client.send(body, started)
        on_done()
        return record

    if point.concurrency is not None:
        records = await _closed_loop(point, point.concurrency, ask)
    else:
        records = await _open_loop(point, settings.seed, ask)
    return sorted(records, key=lambda record: record.started)


async def _closed_loop(point: Point, concurrency: int, ask: Callable[..., Any]) -> list[Record]:
    """``concurrency`` clients, each of which sends its next request when its last one has ended."""
    numbers = _numbers(point, time.perf_counter())
    records: list[Record] = []

    async def client() -> None:
        for number in numbers:
            records.append(await ask(number))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return records


async def _open_loop(point: Point, seed: int, ask: Callable[..., Any]) -> list[Record]:
    """Requests at Poisson arrivals, however many are under way. Each counts from its due time, so that a late
    client makes the figures worse and not better.
    """
    assert point.request_rate is not None
    rng = np.random.default_rng((seed, point.stream, 1))
    due = time.perf_counter()
    end = due + point.duration_secs if point.duration_secs is not None else None
    tasks: list[asyncio.Task[Record]] = []
    for number in itertools.count() if point.num_requests is None else range(point.num_requests):
        due += float(rng.exponential(1 / point.request_rate))
        if end is not None and due >= end:
            break
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(number, due)))
    return list(await asyncio.gather(*tasks))


def _numbers(point: Point, begun: float) -> Iterator[int]:
    """Shared by the clients of a closed loop."""
    if point.num_requests is not None:
        yield from range(point.num_requests)
        return
    assert point.duration_secs is not None
    for number in itertools.count():
        if time.perf_counter() >= begun + point.duration_secs:
            return
        yield number
