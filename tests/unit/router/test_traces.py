"""The router's span of a request, which has its nodes and every retry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.otlp_receiver import Receiver, Span, receiving
from tests.unit.router.cluster import (
    Behaviour,
    breaks_off,
    cluster,
    eventually,
    never,
    says,
)
from tests.waiting import until

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
PATH = "/v1/completions"

pytestmark = pytest.mark.anyio


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with receiving() as started:
        yield started


def root(receiver: Receiver) -> Span:
    """Return the only root span, once the router has ended."""
    (span,) = receiver.spans
    return span


@pytest.mark.parametrize(
    ("sampler", "flag", "num_spans"),
    [("parentbased_always_off", "01", 0), ("always_off", "01", 0), ("parentbased_always_on", "00", 1)],
)
async def test_what_is_recorded_is_not_for_clients_to_say(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, sampler: str, flag: str, num_spans: int
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    async with cluster(otlp_traces_endpoint=receiver.url) as pair:
        headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-{flag}", "tracestate": "vendor=1"}
        assert (await pair.client.post(PATH, json={"prompt": "a"}, headers=headers)).status_code == 200
        given = pair.decode[0].requests[0][1]
    assert given["traceparent"].startswith(f"00-{TRACE_ID}-"), "it is the client's trace all the same"
    assert given["traceparent"].endswith(f"-0{num_spans}"), "the node follows the router"
    assert given["tracestate"] == "vendor=1"
    assert len(receiver.spans) == num_spans


async def test_a_ratio_is_not_of_trace_ids_that_clients_choose(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.000001")
    chosen = {"traceparent": f"00-{'a' * 16}{'0' * 15}1-{SPAN_ID}-01"}  # a ratio takes the lowest ones
    async with cluster(otlp_traces_endpoint=receiver.url) as pair:
        for _ in range(5):
            assert (await pair.client.post(PATH, json={"prompt": "a"}, headers=chosen)).status_code == 200
    assert receiver.spans == []


async def test_a_retry_is_an_event(receiver: Receiver) -> None:
    full = says(b'{"error": {"message": "full"}}', 429)
    async with cluster(decode=[full, full], otlp_traces_endpoint=receiver.url) as pair:
        response = await pair.client.post(PATH, json={"prompt": "a"})
        assert response.status_code == 429
    span = root(receiver)
    for node, kind in ((pair.prefill[0], "prefill"), (pair.decode[1], "decode")):
        assert span.attributes[f"hisparse_pd.{kind}_node"] == node.url
    assert span.attributes["hisparse_pd.request_id"] == response.headers["x-request-id"]
    assert span.events == ["retry"]
    assert span.attributes["hisparse_pd.retries"] == 1
    assert span.attributes["http.response.status_code"] == 429
    assert span.error is None


@pytest.mark.parametrize(
    ("decode", "status", "error"),
    [(says(b"oh", 500), 500, "answered 500"), (breaks_off, 200, "broke off its answer")],
)
async def test_a_failure_is_an_error(receiver: Receiver, decode: Behaviour, status: int, error: str) -> None:
    async with cluster(decode=decode, otlp_traces_endpoint=receiver.url) as pair:
        assert (await pair.client.post(PATH, json={"prompt": "a"})).status_code == status
    span = root(receiver)
    assert span.attributes["http.response.status_code"] == status
    assert span.error is not None
    assert error in span.error


async def test_a_client_that_leaves(receiver: Receiver) -> None:
    async with cluster(decode=never, otlp_traces_endpoint=receiver.url) as pair:
        asking = asyncio.create_task(pair.client.post(PATH, json={"prompt": "a"}))
        await until(lambda: pair.decode[0].requests)
        asking.cancel()
        await until(lambda: pair.decode[0].client_left.is_set())
    span = root(receiver)
    assert (span.attributes["http.response.status_code"], span.error) == (499, "the client is gone")


async def test_what_is_asked_of_one_node_is_traced_too(receiver: Receiver) -> None:
    async with cluster(decode=says(b"{}"), otlp_traces_endpoint=receiver.url) as pair:
        await pair.client.post("/tokenize", json={"prompt": "a"}, headers=TRACEPARENT)
    assert pair.decode[0].requests[0][1]["traceparent"] == f"00-{TRACE_ID}-{root(receiver).span_id}-01"


async def test_what_became_of_spans_is_counted(receiver: Receiver) -> None:
    async with cluster(otlp_traces_endpoint=receiver.url) as pair:
        await pair.client.post(PATH, json={"prompt": "a"})

        async def is_counted() -> bool:
            return 'router_trace_spans_total{outcome="exported"} 1.0' in await pair.metrics()

        await eventually(is_counted)
