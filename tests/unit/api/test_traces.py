"""The spans and times of requests to a node's front, whose engine does what a script says."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hisparse_pd.base import tracing
from hisparse_pd.base.tracing import Tracer
from hisparse_pd.base.vocabulary import FinishReason, Mode, StartError
from hisparse_pd.engine.messages import (
    CachedTokens,
    FromEngine,
    Generate,
    RequestFailed,
    RequestStats,
    Tokens,
)
from hisparse_pd.engine.phases import Phase, wall_clock_ahead
from hisparse_pd.protocol.messages import PrefillTimes
from hisparse_pd.serving.api import timing
from tests.otlp_receiver import Receiver, Span, receiving
from tests.unit.api.scripted_engine import Script, plays, say
from tests.unit.api.support import BODY, Node, serving
from tests.waiting import until

pytestmark = pytest.mark.anyio

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
FOREVER = 1000.0


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as started:
        yield started


def phases(*lasting: tuple[str, float], started_at: float) -> tuple[Phase, ...]:
    """Return phases that follow each other."""
    found = []
    for name, secs in lasting:
        found.append(Phase(name, started_at, started_at + secs))
        started_at += secs
    return tuple(found)


LANDED = RequestStats(Mode.HISPARSE, cached=CachedTokens(device=64), num_held_tokens=32, transfer_bytes=4096)
OF_PREFILL_NODE = ("prefill_queue", "prefill", "transfer")


def lands(*others: Any) -> Script:
    """Sends an answer's first two tokens, the first with phases that were over before, and ``others``."""

    def script(generate: Generate) -> Iterable[FromEngine | float]:
        ago = time.time() - 0.4
        before = phases(("queue", 0.1), ("landing", 0.2), ("first_step", 0.05), started_at=ago)
        prefill = PrefillTimes(0.01, 0.02, 0.03)
        first = Tokens("", tuple(b"a"), stats=LANDED, phases=before, prefill=prefill)
        second = Tokens("", tuple(b"b"), stats=LANDED)
        return plays(first, second, *others)(generate)

    return script


answers = lands(Tokens("", tuple(b"c"), (), FinishReason.LENGTH))
starts = lands(FOREVER)
breaks_off = lands(RequestFailed("", 500, "the hot buffer burst"))


def fails_in_landing(generate: Generate) -> Iterable[FromEngine | float]:
    told = phases(("queue", 0.1), ("landing", 0.2), started_at=time.time() - 1)
    yield RequestFailed(generate.request_id, 502, "the prefill node is gone", phases=told)


async def spans_of(
    receiver: Receiver, tmp_path: Path, script: Script, status: int = 200, **body: Any
) -> list[Span]:
    """Return the spans of one request, in its client's trace, to a node whose engine plays ``script``."""
    async with serving(script, tmp_path, collector=receiver.url) as node:
        response = await node.client.post("/v1/completions", json=BODY | body, headers=TRACEPARENT)
        assert response.status_code == status
    return receiver.of_trace(TRACE_ID)


def by_name(spans: Iterable[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


async def test_spans_that_wait_are_sent_at_the_end(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    spans = by_name(await spans_of(receiver, tmp_path, answers))
    of_engine = {"queue", "landing", "first_step", "decode"}
    assert set(spans) == {"POST /v1/completions", "tokenize", *of_engine, *OF_PREFILL_NODE}
    of_node = spans.pop("POST /v1/completions")
    assert of_node.parent_id == SPAN_ID
    assert {span.parent_id for span in spans.values()} == {of_node.span_id}
    assert spans["landing"].attributes["gen_ai.usage.cache_read.input_tokens"] == 64
    assert spans["landing"].attributes["hisparse_pd.held_tokens"] == 32
    assert spans["decode"].attributes["gen_ai.usage.output_tokens"] == 3
    assert of_node.attributes["gen_ai.response.finish_reasons"] == ["length"]


async def test_a_request_that_fails_ends_the_phase_in_which_it_did(
    tmp_path: Path, receiver: Receiver
) -> None:
    spans = await spans_of(receiver, tmp_path, fails_in_landing, 502)
    assert {span.name: span.error for span in spans} == {
        "POST /v1/completions": "the prefill node is gone",
        "tokenize": None,
        "queue": None,
        "landing": "the prefill node is gone",
    }


async def test_a_stream_that_breaks_off_is_an_error(tmp_path: Path, receiver: Receiver) -> None:
    spans = by_name(await spans_of(receiver, tmp_path, breaks_off, stream=True))
    assert spans["POST /v1/completions"].attributes["http.response.status_code"] == 200
    for name in ("POST /v1/completions", "decode"):
        assert spans[name].error == "the hot buffer burst"


async def test_a_client_that_leaves_ends_its_spans(tmp_path: Path, receiver: Receiver) -> None:
    async with serving(starts, tmp_path, collector=receiver.url) as node:
        has_read = asyncio.Event()

        async def ask() -> None:
            options: dict[str, Any] = {"json": {**BODY, "stream": True}, "headers": TRACEPARENT}
            async with node.client.stream("POST", "/v1/completions", **options) as answer:
                async for line in answer.aiter_lines():
                    if '"b"' in line:
                        has_read.set()

        asking = asyncio.create_task(ask())
        await until(lambda: bool(node.engine.generates), "the engine has it")
        await has_read.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: bool(node.engine.aborts), "the engine hears of it")
    spans = by_name(receiver.of_trace(TRACE_ID))
    of_node = spans["POST /v1/completions"]
    assert (of_node.attributes["http.response.status_code"], of_node.error) == (499, "the client is gone")
    assert spans["decode"].error == "the request was aborted"


@pytest.fixture
def began_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests be checked before the first of the phases that the engine reports."""
    monkeypatch.setattr(timing, "wall_clock_ahead", lambda: wall_clock_ahead() - 1.0)


@pytest.mark.usefixtures("began_before")
async def test_the_prefill_nodes_phases_end_with_the_landing(tmp_path: Path, receiver: Receiver) -> None:
    """The decode node makes one trace of both nodes."""
    spans = by_name(await spans_of(receiver, tmp_path, answers))
    landing = spans["landing"]
    lasted = {name: (spans[name].end - spans[name].start) / 1e9 for name in OF_PREFILL_NODE}
    assert lasted == pytest.approx({"prefill_queue": 0.01, "prefill": 0.02, "transfer": 0.03}, abs=1e-5)
    until_then = landing.start
    for name in OF_PREFILL_NODE:
        assert spans[name].parent_id == landing.parent_id
        assert until_then <= spans[name].start + 1000
        until_then = spans[name].end
    assert until_then == landing.end
    expected = {"room": 7, "mode": "hisparse", "transfer_bytes": 4096}
    assert {name: spans["prefill"].attributes[f"hisparse_pd.{name}"] for name in expected} == expected


@pytest.mark.usefixtures("began_before")
async def test_phases_that_took_longer_than_the_landing_begin_with_it(
    tmp_path: Path, receiver: Receiver
) -> None:
    """The clocks of two nodes need not agree."""

    def lands_fast(generate: Generate) -> Iterable[FromEngine | float]:
        for message in answers(generate):
            assert isinstance(message, Tokens)
            long = message.prefill and PrefillTimes(5.0, 0.3, 0.1)
            yield msgspec.structs.replace(message, prefill=long)

    spans = by_name(await spans_of(receiver, tmp_path, lands_fast))
    landing = spans["landing"]
    assert spans["prefill_queue"].start == spans["prefill_queue"].end == landing.start
    assert spans["prefill"].start == landing.start < spans["prefill"].end == spans["transfer"].start
    assert spans["transfer"].end == landing.end


async def test_a_sample_of_which_no_prefill_node_heard(tmp_path: Path, receiver: Receiver) -> None:
    def holds_all(generate: Generate) -> Iterable[FromEngine | float]:
        for message in answers(generate):
            assert isinstance(message, Tokens)
            yield msgspec.structs.replace(message, prefill=None)

    assert not set(OF_PREFILL_NODE) & set(by_name(await spans_of(receiver, tmp_path, holds_all)))


@pytest.mark.parametrize("ahead_secs", [-3600.0, 3600.0])
async def test_clocks_of_other_machines_do_not_tear_a_request_apart(
    tmp_path: Path, receiver: Receiver, ahead_secs: float
) -> None:
    def answers_elsewhere(generate: Generate) -> Iterable[FromEngine | float]:
        for message in answers(generate):
            assert isinstance(message, Tokens)
            moved = (
                Phase(phase.name, phase.started_at + ahead_secs, phase.ended_at + ahead_secs)
                for phase in message.phases
            )
            yield msgspec.structs.replace(message, phases=tuple(moved))

    spans = by_name(await spans_of(receiver, tmp_path, answers_elsewhere))
    until_now = spans["tokenize"].end
    for name in ("queue", "landing", "first_step", "decode"):
        assert until_now <= spans[name].start <= spans[name].end <= spans["POST /v1/completions"].end
        until_now = spans[name].end


@pytest.mark.I8
async def test_of_many_samples_a_few_are_traced(tmp_path: Path, receiver: Receiver) -> None:
    spans = await spans_of(receiver, tmp_path, answers, n=20)
    assert len([span for span in spans if span.name == "landing"]) == 16
    (of_node,) = [span for span in spans if span.parent_id == SPAN_ID]
    assert of_node.attributes["hisparse_pd.samples"] == 20
    assert len(of_node.attributes["gen_ai.response.finish_reasons"]) == 16
    assert of_node.attributes["gen_ai.usage.output_tokens"] == 60


@pytest.mark.I7
@pytest.mark.parametrize(
    "headers",
    [
        [(b"traceparent", TRACEPARENT["traceparent"].encode())] * 2,
        [(b"traceparent", b"\xff\xfe")],
        [(b"traceparent", b"00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01")],
        [(b"traceparent", TRACEPARENT["traceparent"].encode() * 100), (b"tracestate", b"a=b")],
        [(b"traceparent", TRACEPARENT["traceparent"].upper().encode())],
        [(b"tracestate", b"caf\xe9")],
        [],
    ],
    ids=str,
)
async def test_a_trace_that_cannot_be_continued_begins_anew(
    tmp_path: Path, receiver: Receiver, headers: list[tuple[bytes, bytes]]
) -> None:
    async with serving(answers, tmp_path, collector=receiver.url) as node:
        response = await node.client.post("/v1/completions", json=BODY, headers=headers)
        assert response.status_code == 200
    (of_node,) = [span for span in receiver.spans if span.parent_id == ""]
    assert of_node.trace_id != TRACE_ID
    assert len(receiver.of_trace(of_node.trace_id)) == 9


# --- a collector in trouble ------------------------------------------------------------------------------


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize("trouble", ["hangs", "refuses", "away"])
async def test_no_request_waits_for_a_collector(
    tmp_path: Path,
    receiver: Receiver,
    trouble: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Twelve spans may wait, and each request has nine."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "12")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    monkeypatch.setattr(tracing, "FLUSH_SECS", 0.01)
    if trouble == "hangs":
        receiver.may_answer.clear()
    receiver.status = 400

    async def outcome(node: Node, name: str) -> float:
        return await node.metric(f'hisparse_pd:trace_spans_total{{outcome="{name}"}}') or 0

    async with serving(
        answers, tmp_path, collector="http://127.0.0.1:9" if trouble == "away" else receiver.url
    ) as node:
        num_requests = 0
        while await outcome(node, "failed" if trouble == "refuses" else "dropped") < 24:
            response = await node.client.post("/v1/completions", json=BODY)
            assert response.status_code == 200
            num_requests += 1
        if trouble == "hangs":  # a batch is under way, twelve wait, the last request may not be quite over
            assert await outcome(node, "dropped") >= 9 * num_requests - 4 - 12 - 9
            assert await outcome(node, "exported") == await outcome(node, "failed") == 0
    assert receiver.spans == []
    assert len([record for record in caplog.records if record.name.startswith("opentelemetry")]) <= 1


def make_tracer(url: str = "http://127.0.0.1:9") -> Tracer:
    return Tracer(url, "hisparse-pd-decode", "host:1", lambda outcome, num: None)


@pytest.mark.parametrize("value", ["0", "-5", "many"])
def test_a_queue_that_cannot_be_is_an_error_of_the_start(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", value)
    with pytest.raises(StartError, match="OTEL_"):
        make_tracer()


def test_the_end_of_a_process_waits_for_a_known_time_only(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_SECS", 0.05)
    receiver.may_answer.clear()
    tracer = make_tracer(receiver.url)
    tracer.request("/generate", []).end(200)
    tracer.close()  # it would wait for ever
    assert not receiver.may_answer.is_set()
    assert "1 spans are lost" in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [("", "/v1/traces"), ("/", "/v1/traces"), ("/v1/traces", "/v1/traces"), ("/otlp/in", "/otlp/in")],
)
def test_where_spans_go(receiver: Receiver, endpoint: str, path: str) -> None:
    tracer = make_tracer(receiver.url + endpoint)
    tracer.request("/generate", []).end(200)
    tracer.close()
    assert receiver.paths == {path}


def test_the_variables_of_opentelemetry_hold(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    tracer = make_tracer(receiver.url)
    tracer.request("/generate", []).end(200)
    tracer.close()
    assert receiver.resources["ours"]["service.instance.id"] == "host:1"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracer = make_tracer(receiver.url)
    other = (b"x-a", b"1")
    span = tracer.request("/generate", [other, (b"Traceparent", TRACEPARENT["traceparent"].encode())])
    (passed, (name, value)) = span.passed_on([other, (b"Traceparent", b"whatever")])
    assert (passed, name) == (other, b"traceparent")
    assert (value[3:35].decode(), value[-2:]) == (TRACE_ID, b"00"), "nobody behind it is to record it either"
    span.end(200)
    tracer.close()
    assert len(receiver.spans) == 1


def test_without_the_option_nothing_of_opentelemetry_is_imported() -> None:
    """The process of the test imports the modules of fronts, router and command line."""
    code = """
import sys, threading
from hisparse_pd.commands import cli
from hisparse_pd.decode_node import server as decode_server
from hisparse_pd.prefill_node import server as prefill_server
from hisparse_pd.router import process
from hisparse_pd.serving.api import node
from hisparse_pd.router.server import create_app
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.traces import open_tracer

create_app(RouterSettings(prefill=(("http://127.0.0.1:1", 1),), decode=("http://127.0.0.1:2",)))
assert open_tracer("", "hisparse-pd-decode", "a:1", print) is None
assert not [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]
assert threading.enumerate() == [threading.main_thread()]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# --- server-timing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_how_long_it_took_if_asked(tmp_path: Path, stream: bool) -> None:
    async with serving(answers, tmp_path) as node:
        body = {**BODY, "stream": stream}
        for headers in ({}, {"x-request-timing": "0"}):
            response = await node.client.post("/v1/completions", json=body, headers=headers)
            assert "server-timing" not in response.headers, headers
        response = await node.client.post("/v1/completions", json=body, headers={"x-request-timing": "1"})
        told = dict(entry.split(";dur=") for entry in response.headers["server-timing"].split(", "))
        known = ["tokenize", "queue", "landing", "prefill_queue", "prefill", "transfer", "first_step", "ttft"]
        assert list(told)[: len(known)] == known
        shown = {name: round(float(told[name])) for name in known[1:-2]}
        assert shown == {"queue": 100, "landing": 200, "prefill_queue": 10, "prefill": 20, "transfer": 30}
        assert ("decode" in told) >= (not stream)
        assert float(told["ttft"]) <= float(told["total"])


async def test_phases_are_counted(tmp_path: Path) -> None:
    async with serving(answers, tmp_path) as node:
        await node.post("/v1/completions", **BODY)
        for phase in ("tokenize", "queue", "landing", *OF_PREFILL_NODE, "first_step", "decode"):
            assert await node.metric(f'hisparse_pd:request_phase_seconds_count{{phase="{phase}"}}') == 1
        for phase, secs in (("landing", 0.2), ("prefill", 0.02)):
            total = await node.metric(f'hisparse_pd:request_phase_seconds_sum{{phase="{phase}"}}')
            assert total == pytest.approx(secs, abs=1e-4)


async def test_an_engine_that_tells_of_no_phases(tmp_path: Path, receiver: Receiver) -> None:
    spans = await spans_of(receiver, tmp_path, say("hello"))
    assert {span.name for span in spans} == {"POST /v1/completions", "tokenize"}
