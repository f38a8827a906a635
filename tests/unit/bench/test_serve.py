"""Dense and hisparse load in turn: on scripted endpoints, and the figures of known records."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from starlette.types import Receive, Scope, Send

from tests.unit.router.cluster import Behaviour, FakeNode, answer, says, start, write
from tests.unit.router.cluster import serving as serving_app
from tests.unit.servers import held_port
from tests.waiting import NEVER_SECS, WAIT_SECS, until
from tools.bench import serve, streamed_load
from tools.bench.serve import contents, notes, print_report, summarize, warm_up
from tools.bench.served import Served
from tools.bench.streamed_load import Client, EndpointError, Record, closed_loop, distribution, full_load

pytestmark = pytest.mark.anyio


def bodies(*words: str, hisparse: str = "none", stream: int = 0, count: int = 1) -> list[bytes]:
    options = serve.parse(["--input-tokens", "5", "--output-tokens", "4", *words])
    return contents(options, "tiny", hisparse, stream, count, options.output_tokens)


BODY = bodies(hisparse="true")[0]


# --- endpoints on loopback -----------------------------------------------------------------------------


@dataclass
class Endpoint(FakeNode):
    """A node with counters, which counts how many requests it has at once."""

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


def bodies_of(node: FakeNode) -> list[dict[str, Any]]:
    """Return the bodies of the requests that a node got."""
    return [json.loads(content) for _, _, content in node.requests]


async def until_asked(node: FakeNode, num_requests: int) -> None:
    await until(lambda: len(node.requests) >= num_requests, f"{num_requests} requests")


@asynccontextmanager
async def running(endpoint: Endpoint) -> AsyncIterator[str]:
    """Serve an endpoint; yield its URL with /v1."""
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


async def scripted(_: FakeNode, send: Send) -> None:
    """Send four tokens in two chunks, the first of which comes in two pieces."""
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
        record = await client.send(BODY)
    assert (record.error_class, record.error) == ("", "")
    assert (record.num_tokens, len(record.arrivals)) == (4, 2)
    assert record.served == Served(5, 4, 2, mode="hisparse", hits=30, misses=10)
    assert record.started < record.arrivals[0] <= record.arrivals[1] <= record.ended
    assert record.tpot_secs == pytest.approx((record.arrivals[1] - record.arrivals[0]) / 3)


async def timed(endpoint: FakeNode, send: Send) -> None:
    asked = endpoint.requests[-1][1].get("x-request-timing")
    timing = "tokenize;dur=8.042, first_step;dur=1.5" if asked == "1" else ""
    await answer(send, event("a", "stop") + event(choices=[], usage=USAGE) + DONE, server_timing=timing)


async def test_a_client_asks_for_phases_where_it_is_to() -> None:
    async with running(Endpoint(timed)) as url:
        async with Client(url, WAIT_SECS) as client:
            assert (await client.send(BODY)).phase_secs == {}
        async with Client(url, WAIT_SECS, asks_phases=True) as client:
            assert (await client.send(BODY)).phase_secs == {
                "tokenize": pytest.approx(0.008042),
                "first_step": pytest.approx(0.0015),
            }


async def record_of(behaviour: Behaviour, timeout_secs: float = WAIT_SECS) -> Record:
    async with running(Endpoint(behaviour)) as url, Client(url, timeout_secs) as client:
        return await client.send(BODY)


async def never(endpoint: FakeNode, send: Send) -> None:
    """Send one chunk, and then nothing for ever."""
    await start(send)
    await write(send, event("a"))
    await asyncio.Event().wait()


async def dropping(_: FakeNode, send: Send) -> None:
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
        (says(event("a", "stop") + DONE), "no usage", "how many tokens"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_failures_are_told_apart(behaviour: Behaviour, error_class: str, words: str) -> None:
    record = await record_of(behaviour)
    assert record.error_class == error_class
    assert words in record.error


async def test_a_request_has_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up once the first chunk is there."""
    limits: list[asyncio.Timeout] = []
    records: list[Record] = []

    def timeout(secs: float) -> asyncio.Timeout:
        limits.append(asyncio.timeout(NEVER_SECS))
        return limits[-1]

    def begin(started: float) -> Record:
        records.append(Record(started))
        return records[-1]

    monkeypatch.setattr(streamed_load, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": timeout}))
    monkeypatch.setattr(streamed_load, "Record", begin)
    sending = asyncio.create_task(record_of(never, timeout_secs=0.2))
    await until(lambda: records and records[0].arrivals, "the first chunk is there")
    limits[0].reschedule(asyncio.get_running_loop().time())
    record = await sending
    assert (record.error_class, record.error) == ("timeout", "not finished after 0.2 s")
    assert len(record.arrivals) == 1


async def test_an_endpoint_that_is_not_there_is_a_connect_error() -> None:
    with held_port() as port:
        async with Client(f"http://127.0.0.1:{port}/v1", WAIT_SECS) as client:
            record = await client.send(BODY)
            with pytest.raises(EndpointError, match="or give its URL with --url, and --model"):
                await client.first_model()
            with pytest.raises(EndpointError, match="warm-up: connect"):
                await warm_up(client, [BODY, BODY], 1)
    assert record.error_class == "connect"


# --- the loop -----------------------------------------------------------------------------------------------


async def when_three_are_there(endpoint: FakeNode, send: Send) -> None:
    """Answer the first three requests only once all three are there."""
    if len(bodies_of(endpoint)) <= 3:
        await until_asked(endpoint, 3)
    await scripted(endpoint, send)


async def test_a_closed_loop_keeps_exactly_its_concurrency_busy() -> None:
    endpoint = Endpoint(when_three_are_there)
    done: list[None] = []
    async with running(endpoint) as url, Client(url, WAIT_SECS) as client:
        records = await closed_loop(client, [BODY] * 10, 3, lambda: done.append(None))
    assert [record.error_class for record in records] == [""] * 10
    assert len(done) == 10
    assert endpoint.most_inside == 3
    assert [record.started for record in records] == sorted(record.started for record in records)


async def test_requests_at_once_have_a_connection_each_and_later_ones_take_these() -> None:
    endpoint = Endpoint(when_three_are_there)
    ports: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        ports.append(scope["client"][1])
        await endpoint(scope, receive, send)

    async with serving_app(app) as url, Client(f"{url}/v1", WAIT_SECS) as client:
        await closed_loop(client, [BODY] * 10, 3)
    assert len(ports) == 10
    assert len(set(ports)) == 3


def test_bodies_ask_for_what_the_options_say() -> None:
    words = ["--input-tokens", "6", "--token-range", "10", "20", "--temperature", "0.5"]
    words += ["--extra-body", '{"top_p": 0.9}', "--seed", "7"]
    found = [
        json.loads(body)
        for stream, hisparse in enumerate(("true", "false", "auto", "none"))
        for body in bodies(*words, hisparse=hisparse, stream=stream, count=3)
    ]
    prompts = [tuple(body.pop("prompt")) for body in found]
    assert len(set(prompts)) == 12  # no prefix cache helps
    assert all(len(prompt) == 6 and set(prompt) <= set(range(10, 20)) for prompt in prompts)
    flags = [body.pop("hisparse", "absent") for body in found]
    assert flags == [True] * 3 + [False] * 3 + ["auto"] * 3 + ["absent"] * 3
    shared = {
        "model": "tiny",
        "max_tokens": 4,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_p": 0.9,
    }
    assert found == [shared] * 12
    assert prompts[0] == tuple(json.loads(bodies(*words)[0])["prompt"])
    assert prompts[0] != tuple(json.loads(bodies(*words, "--seed", "8")[0])["prompt"])


def test_shared_tokens_begin_every_prompt() -> None:
    prompts = [json.loads(body)["prompt"] for body in bodies("--shared-tokens", "3", count=4)]
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 4
    with pytest.raises(SystemExit):
        serve.parse(["--input-tokens", "5", "--shared-tokens", "6"])


def test_distinct_prompts_are_sent_in_turns_in_every_point() -> None:
    points = [bodies("--distinct-prompts", "2", stream=stream, count=3) for stream in range(2)]
    assert points[0] == points[1] == [points[0][0], points[0][1], points[0][0]]
    assert points[0][0] != points[0][1]


# --- figures ---------------------------------------------------------------------------------------------


def record(started: float, *arrivals: float, tokens: int = 0, error: str = "", **more: Any) -> Record:
    return Record(
        started=started,
        ended=arrivals[-1] if arrivals else started + 1,
        arrivals=list(arrivals),
        served=Served(num_output_tokens=tokens or len(arrivals), **more),
        error_class=error,
        error=error and "why",
    )


def test_the_figures_of_a_point() -> None:
    records = [
        record(0.0, 1.0, 2.0, 4.0, tokens=6, mode="hisparse", hits=3, misses=1),
        record(0.0, 2.0, 2.5, 3.0, tokens=6, mode="hisparse", hits=0, misses=4),
        record(3.0, 5.0, tokens=2, error="cut"),
        record(4.0, error="HTTP 503"),
    ]
    found = summarize(2, records, {})
    assert (found["num_requests"], found["num_ok"]) == (4, 2)
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
    assert full_load(2, [record(0.0, 1.0, 2.0), record(0.0, 3.0, 4.0)]) is None
    assert full_load(2, [record(0.0, 1.0, 2.0)]) is None


def test_an_answer_that_was_cut_counts_by_its_chunks() -> None:
    cut = Record(0.0, 2.0, [1.0, 2.0], error_class="cut", error="why")
    assert summarize(1, [cut], {})["output_tokens_per_sec"] == 1.0


def test_counters_of_the_nodes_win_over_those_of_the_answers() -> None:
    records = [record(0.0, 1.0, 2.0, hits=1, misses=1)]
    counters = {"swap_in_hits_total": 9.0, "swap_in_misses_total": 1.0, "swap_in_bytes_total": 4000.0}
    found = summarize(1, records, counters)
    assert found["hit_rate"] == 0.9
    assert found["swap_in_bytes_per_sec"] == 2000.0
    assert summarize(1, records, {})["hit_rate"] == 0.5
    assert summarize(1, [record(0.0, 1.0)], dict.fromkeys(counters, 0.0))["hit_rate"] is None


def test_a_point_without_a_success_has_no_latencies() -> None:
    found = summarize(1, [record(0.0, error="connect")], {})
    assert [found[name] for name in ("ttft_secs", "itl_secs", "tpot_secs", "e2e_secs")] == [None] * 4
    assert found["output_tokens_per_sec"] == 0
    assert distribution([]) is None


def report_of(*points: dict[str, Any]) -> dict[str, Any]:
    shared = {"hisparse": "true", "concurrency": 1, "client_cpu_share": 0.1}
    options = {"input_tokens": 5, "output_tokens": 4}
    return {"model": "tiny", "options": options, "points": [shared | point for point in points]}


def test_a_reader_is_told_what_distorts_the_figures() -> None:
    good = summarize(1, [record(0.0, 1.0, 2.0, tokens=4)], {})
    assert notes(report_of(good)) == []
    short = summarize(1, [record(0.0, 1.0, 2.0, tokens=3)], {})
    found = notes(report_of(short, {**good, "client_cpu_share": 0.95}))
    for words in ("shorter than 4", "95%"):
        assert any(words in note for note in found)


def test_a_table_takes_points_without_figures(tmp_path: Path) -> None:
    points = [
        summarize(1, [record(0.0, 1.0, 2.0)], {}),
        summarize(1, [record(0.0, error="timeout")], {}) | {"hisparse": "none", "concurrency": 2},
    ]
    console = Console(record=True, width=170, file=(tmp_path / "console").open("w"))
    with console.file:
        print_report(report_of(*points), console)
    text = console.export_text()
    assert "1 of 1" in text
    assert "hisparse none, 2 clients: 1 x timeout: why" in text


# --- command line ----------------------------------------------------------------------------------------


async def main_beside(*arguments: str) -> int:
    """Run ``serve.main`` in a thread, since it has an event loop of its own."""
    return await asyncio.to_thread(serve.main, arguments)


def metrics(hits: int, misses: int, num_bytes: int) -> str:
    return (
        f'hisparse_pd:swap_in_hits_total{{dp_rank="0"}} {hits // 2}\n'
        f'hisparse_pd:swap_in_hits_total{{dp_rank="1"}} {hits - hits // 2}\n'
        f"hisparse_pd:swap_in_misses_total {misses}\n"
        f"hisparse_pd:swap_in_bytes_total {num_bytes}\nhisparse_pd:token_usage 0.5\n"
    )


async def test_main_measures_by_turns_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "METRICS_SETTLE_SECS", 0.0)

    async def sometimes_full(endpoint: FakeNode, send: Send) -> None:
        if bodies_of(endpoint)[-1]["hisparse"] is False and bodies_of(endpoint)[-1]["max_tokens"] == 40:
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
    assert len(bodies_of(endpoint)) == 4 * (1 + 3)
    assert not endpoint.metrics
    report = json.loads((tmp_path / "made" / "run-0.5.json").read_text())
    assert report["model"] == "tiny"
    assert {"commit", "cpu", "num_cpus", "gpus"} <= report["facts"].keys()
    assert report["options"]["input_tokens"] == 7
    assert "a-secret" not in json.dumps(report)
    points = report["points"]
    loads = [(point["hisparse"], point["concurrency"], point["num_ok"]) for point in points]
    assert loads == [(name, c, 3 * (name == "true")) for c in (1, 2) for name in ("true", "false")]
    counters = points[0]["counters"]
    assert counters["swap_in_hits_total"] == 30, "the sum over both ranks"
    assert counters["retractions_total"] == 0, "which the node has not got"
    assert points[0]["hit_rate"] == 0.75
    assert points[1]["errors"] == {"HTTP 503": 3}
    assert [len(rows) for rows in report["requests"]] == [3] * 4
    assert report["requests"][0][0]["num_output_tokens"] == 4
    out = capsys.readouterr().out
    assert "hisparse true, clients 2, " in out
    assert "HTTP 503: full" in out
    assert "shorter than 40 tokens" in out


async def test_main_stops_when_the_endpoint_or_its_metrics_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "METRICS_SETTLE_SECS", 0.0)
    with held_port() as port:
        gone = f"http://127.0.0.1:{port}"
        assert await main_beside("--url", f"{gone}/v1", "--out", str(tmp_path / "none")) == 1
        async with running(Endpoint(scripted)) as url:
            arguments = ["--url", url, "--metrics-url", f"{gone}/metrics", "--out", str(tmp_path / "none")]
            assert await main_beside(*arguments) == 1
    out = capsys.readouterr().out
    assert f"{gone}/v1/models" in out
    assert f"--metrics-url {gone}/metrics: ConnectError" in out
    assert list(tmp_path.iterdir()) == []


async def test_what_is_not_said_is_four_requests_a_client_and_eight_at_least(tmp_path: Path) -> None:
    endpoint = Endpoint(scripted)
    async with running(endpoint) as url:
        arguments = ["--url", url, "-c", "1", "3", "--hisparse", "none", "--warmup", "0"]
        assert await main_beside(*arguments, "--out", str(tmp_path / "run")) == 0
    assert len(bodies_of(endpoint)) == 8 + 12


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "0"], "-c/--concurrency: 0 is below 1"),
        (["-c", "x"], "'x'"),
        (["--distinct-prompts", "-1"], "--distinct-prompts: -1 is below 0"),
        (["--token-range", "9", "9"], "--token-range 9 9 has no token"),
        (["--url", "127.0.0.1:8000"], "expected http://HOST:PORT/v1"),
        (["--extra-body", "[1]"], "expected a JSON object"),
        (["--hisparse", "yes"], "'none'"),
        (["--unknown"], "--unknown"),
    ],
)
def test_wrong_options_exit_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        serve.parse(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
