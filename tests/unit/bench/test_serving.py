"""The load generator against scripted endpoints, and the figures that it makes of known records."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hisparse_pd.commands import cli
from hisparse_pd.commands.bench import serving, serving_load
from hisparse_pd.commands.bench.serving import make_points
from hisparse_pd.commands.bench.serving_load import (
    Client,
    EndpointError,
    Point,
    Record,
    Workload,
    run_point,
    warm_up,
)
from hisparse_pd.commands.bench.serving_report import (
    distribution,
    full_load,
    notes,
    plot,
    print_report,
    summarize,
)
from hisparse_pd.commands.bench.settings import ServingSettings
from tests.unit.router.cluster import Behaviour, FakeNode, answer, says, start, write
from tests.unit.router.cluster import serving as serving_app
from tests.waiting import WAIT_SECS, until

pytestmark = pytest.mark.anyio


def workload_of(**settings: Any) -> Workload:
    return Workload("tiny", ServingSettings(**{"input_tokens": 5, "output_tokens": 4, **settings}))


WORKLOAD = workload_of()


# --- endpoints on loopback -----------------------------------------------------------------------------


Send = Callable[[Any], Awaitable[None]]


@dataclass
class Endpoint(FakeNode):
    """A node that has counters, and counts how many requests it had at once."""

    metrics: list[str] = field(default_factory=list)
    """Answers of /metrics, in order."""
    num_inside: int = 0
    most_inside: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["path"] == "/metrics":
            await answer(send, self.metrics.pop(0).encode(), content_type="text/plain")
            return
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.num_inside -= 1

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(content) for _, _, content in self.requests]

    async def until_asked(self, num_requests: int) -> None:
        await until(lambda: len(self.requests) >= num_requests, f"{num_requests} requests")


@asynccontextmanager
async def running(endpoint: Endpoint) -> AsyncIterator[str]:
    """The URL, with /v1, of the served endpoint."""
    async with serving_app(endpoint) as url:
        yield f"{url}/v1"


def event(text: str = "", finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "usage": None} | more).encode() + b"\n\n"


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 2},
    "hisparse": {"mode": "hisparse", "hits": 30, "misses": 10},
}
DONE = b"data: [DONE]\n\n"


async def scripted(_: Endpoint, send: Send) -> None:
    """Four tokens in two chunks, the first of which comes in two pieces."""
    await start(send)
    first = event("a")
    await write(send, b": a comment\n\n" + first[:20])
    await write(send, first[20:])
    await write(send, event("bcd") + event("", "length") + event(choices=[], usage=USAGE) + DONE, more=False)


# --- one request -----------------------------------------------------------------------------------------


async def test_a_request_is_recorded_with_tokens_by_usage() -> None:
    endpoint = Endpoint(scripted)
    async with running(endpoint) as url, Client(url, WAIT_SECS) as client:
        assert await client.first_model() == "tiny"
        record = await client.send(WORKLOAD.content(0, 0, True, 4))
    assert (record.error_class, record.error) == ("", "")
    assert (record.num_output_tokens, len(record.arrivals)) == (4, 2)
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (5, 2)
    assert (record.mode, record.hits, record.misses) == ("hisparse", 30, 10)
    assert record.started < record.arrivals[0] <= record.arrivals[1] <= record.ended
    assert record.tpot_secs == pytest.approx((record.arrivals[1] - record.arrivals[0]) / 3)


async def record_of(behaviour: Behaviour, timeout_secs: float = WAIT_SECS) -> Record:
    async with running(Endpoint(behaviour)) as url, Client(url, timeout_secs) as client:
        return await client.send(WORKLOAD.content(0, 0, None, 4))


async def test_chunks_are_tokens_where_no_usage_comes() -> None:
    record = await record_of(says(event("a") + event("b") + event("c", "stop")))  # and no [DONE]
    assert (record.error_class, record.has_usage, record.num_output_tokens) == ("", False, 3)


async def never(endpoint: Endpoint, send: Send) -> None:
    """One chunk, and then nothing for ever."""
    await start(send)
    await write(send, event("a"))
    await asyncio.Event().wait()


async def dropping(_: Endpoint, send: Send) -> None:
    await start(send)
    await write(send, event("a"))
    raise ConnectionResetError  # uvicorn cuts the connection in the middle of the answer


@pytest.mark.parametrize(
    ("behaviour", "error_class", "words"),
    [
        (says(b'{"error": "full"}', 503), "HTTP 503", "full"),
        (says(b"no route", 404), "HTTP 404", "no route"),
        (says(event("a") + b'data: {"error": {"message": "peer died"}}\n\n'), "error event", "peer died"),
        (says(event("a")), "cut", "ended early, after 1 chunks"),
        (says(b""), "cut", "ended early, after 0 chunks"),
        (dropping, "cut", "RemoteProtocolError"),
        (says(b"data: nonsense\n\n"), "malformed", "nonsense"),
        (says(b'data: {"choices": 3}\n\n'), "malformed", "choices"),
        (says(event("", "stop") + DONE), "empty", "no text"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_failures_are_told_apart(behaviour: Behaviour, error_class: str, words: str) -> None:
    record = await record_of(behaviour)
    assert record.error_class == error_class
    assert words in record.error


async def test_a_request_has_a_timeout() -> None:
    record = await record_of(never, timeout_secs=0.2)
    assert (record.error_class, record.error) == ("timeout", "not finished after 0.2 s")
    assert len(record.arrivals) == 1


async def test_an_endpoint_that_is_not_there_is_a_connect_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    async with Client(url, WAIT_SECS) as client:
        record = await client.send(WORKLOAD.content(0, 0, None, 4))
        with pytest.raises(EndpointError, match="or give its URL with --url, and --model"):
            await client.first_model()
        with pytest.raises(EndpointError, match="warm-up: connect"):
            await warm_up(client, WORKLOAD, Point(concurrency=1, num_requests=1), 2, 4)
    assert record.error_class == "connect"


# --- loops -----------------------------------------------------------------------------------------------


async def test_a_closed_loop_keeps_exactly_its_concurrency_busy() -> None:
    async def when_three_are_there(endpoint: Endpoint, send: Send) -> None:
        if len(endpoint.bodies) <= 3:
            await endpoint.until_asked(3)
        await scripted(endpoint, send)

    endpoint = Endpoint(when_three_are_there)
    done: list[None] = []
    async with running(endpoint) as url, Client(url, WAIT_SECS) as client:
        point = Point(True, concurrency=3, num_requests=10)
        records = await run_point(client, WORKLOAD, point, lambda: done.append(None))
    assert [record.error_class for record in records] == [""] * 10
    assert len(done) == 10
    assert endpoint.most_inside == 3
    assert [record.started for record in records] == sorted(record.started for record in records)


async def test_an_open_loop_waits_for_no_answer_and_follows_its_seed() -> None:
    async def when_all_are_there(endpoint: Endpoint, send: Send) -> None:
        await endpoint.until_asked(12)
        await scripted(endpoint, send)

    endpoint = Endpoint(when_all_are_there)
    async with running(endpoint) as url, Client(url, WAIT_SECS) as client:
        point = Point(request_rate=400.0, num_requests=12, stream=2)
        records = await run_point(client, WORKLOAD, point)
    assert [record.error_class for record in records] == [""] * 12
    assert endpoint.most_inside == 12
    gaps = np.random.default_rng((WORKLOAD.settings.seed, 2, 1)).exponential(1 / 400.0, 12)
    assert np.diff([record.started for record in records]) == pytest.approx(gaps[1:], abs=1e-6)


async def test_a_duration_starts_no_more_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(serving_load, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    async def fifth_takes_a_minute(endpoint: Endpoint, send: Send) -> None:
        if len(endpoint.bodies) == 5:
            clock.now += 60
        await scripted(endpoint, send)

    endpoint = Endpoint(fifth_takes_a_minute)
    async with running(endpoint) as url, Client(url, WAIT_SECS) as client:
        records = await run_point(client, WORKLOAD, Point(concurrency=1, duration_secs=30))
        assert len(records) == len(endpoint.bodies) == 5
        clock.now = 0.0
        endpoint.requests.clear()
        point = Point(request_rate=1000.0, duration_secs=0.004)
        monkeypatch.setattr(asyncio, "sleep", advancing(clock))
        due = np.cumsum(np.random.default_rng((0, 0, 1)).exponential(1 / 1000.0, 50))
        assert len(await run_point(client, WORKLOAD, point)) == (due < 0.004).sum() > 0


def advancing(clock: SimpleNamespace) -> Callable[[float], Awaitable[None]]:
    sleep = asyncio.sleep

    async def advance(secs: float) -> None:
        clock.now += secs
        await sleep(0)

    return advance


async def test_bodies_ask_for_what_the_workload_says() -> None:
    endpoint = Endpoint(scripted)
    drawn = {"input_tokens": 6, "token_range": (10, 20)}
    workload = workload_of(**drawn, seed=7, temperature=0.5, extra_body={"top_p": 0.9})
    async with running(endpoint) as url, Client(url, WAIT_SECS) as client:
        for stream, hisparse in enumerate((True, False, "auto", None)):
            point = Point(hisparse, concurrency=1, num_requests=2, stream=stream)
            await warm_up(client, workload, point, 1, 2)
            await run_point(client, workload, point)
    bodies = endpoint.bodies
    prompts = [tuple(body.pop("prompt")) for body in bodies]
    assert len(set(prompts)) == 12  # no prefix cache helps
    assert all(len(prompt) == 6 and set(prompt) <= set(range(10, 20)) for prompt in prompts)
    assert [body.pop("max_tokens") for body in bodies] == [2, 4, 4] * 4
    flags = [body.pop("hisparse", "absent") for body in bodies]
    assert flags == [True] * 3 + [False] * 3 + ["auto"] * 3 + ["absent"] * 3
    shared = {
        "model": "tiny",
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_p": 0.9,
    }
    assert bodies == [shared] * 12
    assert prompts[1] == tuple(workload_of(**drawn, seed=7).prompt(0, 0))
    assert prompts[1] != tuple(workload_of(**drawn, seed=8).prompt(0, 0))


async def test_distinct_prompts_are_sent_in_turns_in_every_point() -> None:
    endpoint = Endpoint(scripted)
    workload = workload_of(input_tokens=6, distinct_prompts=2, prompt_format="text", ignore_eos=False)
    async with running(endpoint) as url, Client(url, WAIT_SECS) as client:
        for stream in range(2):
            await run_point(client, workload, Point(concurrency=1, num_requests=3, stream=stream))
    prompts = [body["prompt"] for body in endpoint.bodies]
    assert all(len(prompt.split()) == 6 for prompt in prompts)
    assert prompts == [prompts[0], prompts[1], prompts[0]] * 2
    assert prompts[0] != prompts[1]
    assert "ignore_eos" not in endpoint.bodies[0]


@pytest.mark.parametrize("prepared_bytes", [1, serving_load.PREPARED_BYTES])
async def test_prompts_are_the_same_whether_prepared_or_not(
    monkeypatch: pytest.MonkeyPatch, prepared_bytes: int
) -> None:
    monkeypatch.setattr(serving_load, "PREPARED_BYTES", prepared_bytes)
    endpoint = Endpoint(scripted)
    async with running(endpoint) as url, Client(url, WAIT_SECS) as client:
        await run_point(client, WORKLOAD, Point(concurrency=1, num_requests=4))
    assert [body["prompt"] for body in endpoint.bodies] == [WORKLOAD.prompt(0, number) for number in range(4)]


# --- figures ---------------------------------------------------------------------------------------------


def record(started: float, *arrivals: float, tokens: int = 0, error: str = "", **more: Any) -> Record:
    return Record(
        started=started,
        ended=arrivals[-1] if arrivals else started + 1,
        arrivals=list(arrivals),
        num_output_tokens=tokens or len(arrivals),
        has_usage=True,
        error_class=error,
        error=error and "why",
        **more,
    )


def test_the_figures_of_a_point() -> None:
    records = [
        record(0.0, 1.0, 2.0, 4.0, tokens=6, mode="hisparse", hits=3, misses=1),
        record(0.0, 2.0, 2.5, 3.0, tokens=6, mode="hisparse", hits=0, misses=4),
        record(3.0, 5.0, tokens=2, error="cut"),
        record(4.0, error="HTTP 503"),
    ]
    found = summarize(Point(True, concurrency=2, num_requests=4), records, None)
    assert (found["series"], found["num_requests"], found["num_ok"]) == ("hisparse true", 4, 2)
    assert found["errors"] == {"cut": 1, "HTTP 503": 1}
    assert found["wall_secs"] == 5.0
    assert found["requests_per_sec"] == pytest.approx(2 / 5)
    assert found["output_tokens_per_sec"] == pytest.approx(14 / 5)
    assert found["ttft_secs"] == {"mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": 1.99, "max": 2.0, "count": 2}
    assert (found["itl_secs"]["mean"], found["itl_secs"]["p50"]) == (1.0, 0.75)
    assert found["itl_secs"]["count"] == 4
    assert found["tpot_secs"]["max"] == pytest.approx(3 / 5)
    assert found["e2e_secs"]["mean"] == 3.5
    assert found["mean_tokens_per_chunk"] == 2
    assert found["modes"] == {"hisparse": 2}
    assert found["hit_rate"] == pytest.approx(3 / 8)
    # Two requests were under way from the later first token, at 2, until both last ones ended, at 5.
    assert found["full_load"] == {"secs": 3.0, "output_tokens_per_sec": pytest.approx((2 + 4 + 2) / 3)}


def test_full_load_is_unknown_where_the_clients_were_never_all_generating() -> None:
    point = Point(concurrency=2, num_requests=2)
    assert full_load(point, [record(0.0, 1.0, 2.0), record(0.0, 3.0, 4.0)]) is None
    assert full_load(point, [record(0.0, 1.0, 2.0)]) is None
    assert full_load(Point(request_rate=1.0, num_requests=1), [record(0.0, 1.0, 2.0)]) is None


def test_counters_of_the_nodes_win_over_those_of_the_answers() -> None:
    records = [record(0.0, 1.0, 2.0, hits=1, misses=1)]
    counters = {"swap_in_hits_total": 9.0, "swap_in_misses_total": 1.0, "swap_in_bytes_total": 4000.0}
    found = summarize(Point("auto", concurrency=1, num_requests=1), records, counters)
    assert found["hit_rate"] == 0.9
    assert found["nodes"]["swap_in_bytes_per_sec"] == 2000.0
    dense = summarize(
        Point(False, concurrency=1, num_requests=1), [record(0.0, 1.0)], {"swap_in_hits_total": 0}
    )
    assert dense["hit_rate"] is None


def test_a_point_without_a_success_has_no_latencies() -> None:
    for records in ([], [record(0.0, error="connect")]):
        found = summarize(Point(concurrency=1, num_requests=1), records, None)
        assert [found[name] for name in ("ttft_secs", "itl_secs", "tpot_secs", "e2e_secs")] == [None] * 4
        assert found["output_tokens_per_sec"] == 0
    assert distribution([]) is None


def report_of(*points: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "tiny",
        "facts": {"date": "2026-11-21T00:00:00", "commit": "0" * 40},
        "settings": {"input_tokens": 5, "output_tokens": 4},
        "points": [{"client_cpu_share": 0.1, **point} for point in points],
    }


def test_a_reader_is_told_what_distorts_the_figures() -> None:
    point = Point(concurrency=1, num_requests=1)
    good = summarize(point, [record(0.0, 1.0, 2.0, tokens=4)], None)
    assert notes(report_of(good)) == []
    short = summarize(point, [record(0.0, 1.0, 2.0, tokens=3)], None)
    uncounted = record(0.0, 1.0, 2.0, tokens=4)
    uncounted.has_usage = False
    busy = {**good, "client_cpu_share": 0.95}
    found = notes(report_of(short, summarize(point, [uncounted], None), busy))
    for words in ("shorter than 4", "no usage", "95%"):
        assert any(words in note for note in found)


def test_tables_and_pictures_take_points_without_figures(tmp_path: Path) -> None:
    points = [
        summarize(Point(value, request_rate=rate, num_requests=1), records, None)
        for value, rate, records in (
            (None, 0.5, [record(0.0, 1.0, 2.0)]),
            (None, 2.0, [record(0.0, error="timeout")]),
            (False, 0.5, [record(0.0, 1.0, 2.0)]),
        )
    ]
    console = Console(record=True, width=170, file=(tmp_path / "console").open("w"))
    with console.file:
        print_report(report_of(*points), console)
    text = console.export_text()
    assert "req/s due" in text
    assert "1 of 1" in text
    assert "endpoint, 2: 1 x timeout: why" in text
    plot(report_of(*points), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


# --- command line ----------------------------------------------------------------------------------------


def main(*arguments: str) -> int:
    return cli.main(["bench", "serve", *arguments])


async def main_beside(*arguments: str) -> int:
    """In a thread, for it has an event loop of its own."""
    return await asyncio.to_thread(main, *arguments)


def metrics(hits: int, misses: int, num_bytes: int) -> str:
    return (
        f'hisparse_pd:swap_in_hits_total{{dp_rank="0"}} {hits // 2}\n'
        f'hisparse_pd:swap_in_hits_total{{dp_rank="1"}} {hits - hits // 2}\n'
        f"hisparse_pd:swap_in_misses_total {misses}\n"
        f"hisparse_pd:swap_in_bytes_total {num_bytes}\nhisparse_pd:token_usage 0.5\n"
    )


async def test_main_measures_all_series_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "METRICS_SETTLE_SECS", 0.0)

    async def sometimes_full(endpoint: Endpoint, send: Send) -> None:
        if endpoint.bodies[-1]["hisparse"] is False and endpoint.bodies[-1]["max_tokens"] == 40:
            await answer(send, b"full", 503)
        else:
            await scripted(endpoint, send)

    pages = [metrics(100, 50, 1000), metrics(130, 60, 5000)] * 4
    endpoint = Endpoint(sometimes_full, metrics=pages)
    async with running(endpoint) as url:
        arguments = ["--url", url, "--metrics-url", url.replace("/v1", "/metrics"), "--concurrency", "1", "2"]
        arguments += ["--hisparse", "true", "false", "--num-requests", "3", "--input-tokens", "7"]
        arguments += ["--output-tokens", "40", "--warmup", "1", "--out", str(tmp_path / "made" / "run-0.5")]
        monkeypatch.setenv("OPENAI_API_KEY", "a-secret")
        assert await main_beside(*arguments) == 1  # for the 503
    assert len(endpoint.bodies) == 4 * (1 + 3)
    assert not endpoint.metrics
    report = json.loads((tmp_path / "made" / "run-0.5.json").read_text())
    assert (tmp_path / "made" / "run-0.5.png").read_bytes().startswith(b"\x89PNG")
    assert report["model"] == "tiny"
    assert report["facts"]["command"].startswith("hisparse-pd bench serve --url http")
    assert report["settings"]["input_tokens"] == 7
    assert "a-secret" not in json.dumps(report)
    points = report["points"]
    loads = [(point["series"], point["concurrency"], point["num_ok"]) for point in points]
    assert loads == [
        (f"hisparse {name}", c, 3 * (name == "true")) for c in (1, 2) for name in ("true", "false")
    ]
    counters = points[0]["nodes"]["counters"]
    assert counters["swap_in_hits_total"] == 30, "the sum over both ranks"
    assert counters["retractions_total"] == 0, "which the node has not got"
    assert points[0]["hit_rate"] == 0.75
    assert points[1]["errors"] == {"HTTP 503": 3}
    assert [len(rows) for rows in report["requests"]] == [3] * 4
    assert report["requests"][0][0]["num_output_tokens"] == 4
    out = capsys.readouterr().out
    assert "hisparse true, 2 clients: 3 requests, 6 chunks" in out
    assert "HTTP 503: full" in out
    assert "shorter than 40 tokens" in out


async def test_main_stops_when_the_endpoint_or_its_metrics_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "METRICS_SETTLE_SECS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        gone = f"http://127.0.0.1:{sock.getsockname()[1]}"
    assert await main_beside("--url", f"{gone}/v1", "--out", str(tmp_path / "none")) == 1
    async with running(Endpoint(scripted)) as url:
        arguments = ["--url", url, "--metrics-url", f"{gone}/metrics", "--out", str(tmp_path / "none")]
        assert await main_beside(*arguments) == 1
    out = capsys.readouterr().out
    assert f"{gone}/v1/models" in out
    assert f"--metrics-url {gone}/metrics: ConnectError" in out
    assert list(tmp_path.iterdir()) == []


def test_points_are_all_series_of_a_load_and_then_the_next_load() -> None:
    points = make_points(ServingSettings(concurrency=(1, 16), hisparse=("true", "none")))
    found = [(p.concurrency, p.hisparse, p.num_requests) for p in points]
    assert found == [(1, True, 8), (1, None, 8), (16, True, 64), (16, None, 64)]
    assert [p.stream for p in points] == [0, 1, 2, 3]
    settings = ServingSettings(request_rate=(0.5,), duration_secs=60)
    assert make_points(settings) == [Point(None, None, 0.5, None, 60.0)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "0"], "--concurrency: '0': Input should be greater than or equal to 1"),
        (["--request-rate", "0"], "greater than 0"),
        (["-c", "x"], "valid integer"),
        (["--concurrency", "1", "--request-rate", "1"], "exclude each other"),
        (["--num-requests", "1", "--duration-secs", "1"], "exclude each other"),
        (["--start-pair", ".", "--url", "http://a/v1"], "exclude each other"),
        (["--pair-options", "--page-size 64"], "needs --start-pair"),
        (["--token-range", "9", "9"], "--token-range 9 9 has no token"),
        (["--url", "127.0.0.1:8000"], "expected http://HOST:PORT/v1"),
        (["--extra-body", "[1]"], "valid dictionary"),
        (["--hisparse", "yes"], "'true', 'false', 'auto' or 'none'"),
        (["--unknown"], "--unknown"),
    ],
)
def test_wrong_options_exit_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(*arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
