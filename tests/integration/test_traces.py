"""Traces of requests through a router and a pair, and the times that a client can ask for."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.harness import Deployment, deployment, wait_until
from tests.otlp_receiver import Receiver, Span, receiving

ROUTER, DECODE = "hisparse-pd-router", "hisparse-pd-decode"
PHASES = ["tokenize", "queue", "landing", "first_step", "decode"]
OF_PREFILL_NODE = ["prefill_queue", "prefill", "transfer"]
"""Spans of the prefill node's part of the landing, which the decode node's front reports."""
NUM_SPANS = 2 + len(PHASES) + len(OF_PREFILL_NODE)
PROMPT = "Where does the time go, and who has to wait for whom? " * 12
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "hisparse": True}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as started:
        yield started


@pytest.fixture(scope="module")
def traced(
    tiny_checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    receiver: Receiver,
) -> Iterator[Deployment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        options = ["--otlp-traces-endpoint", receiver.url]
        node_options = ["--served-model-name", "tiny", *options]
        with deployment(
            tiny_checkpoint("v32"),
            tmp_path_factory.mktemp("traced"),
            prefill_options=["--chunked-prefill-size", "256"],
            decode_options=[*node_options, "--device-buffer-size", "128", "--api-server-count", "2"],
            router_options=options,
        ) as started:
            yield started


class Given:
    """Headers of a client that is traced itself. ``flags``: "00" if it records nothing."""

    def __init__(self, flags: str = "01") -> None:
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.headers = {
            "traceparent": f"00-{self.trace_id}-{self.span_id}-{flags}",
            "tracestate": "vendor=of-the-client",
        }


def post(url: str, given: Given, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=BODY | fields, headers=given.headers, timeout=60)


def whole_trace(receiver: Receiver, trace_id: str, num_spans: int) -> list[Span]:
    wait_until(lambda: len(receiver.of_trace(trace_id)) >= num_spans, f"{num_spans} spans")
    return receiver.of_trace(trace_id)


def server_span(spans: list[Span], service: str) -> Span:
    (found,) = [span for span in spans if span.service == service and span.name.startswith("POST ")]
    return found


def parts_of(spans: list[Span], service: str) -> list[Span]:
    return [span for span in spans if span.service == service and not span.name.startswith("POST ")]


@pytest.mark.parametrize(("stream", "flags"), [(False, "01"), (True, "00")])
def test_all_spans_of_a_request_are_one_trace(
    traced: Deployment, receiver: Receiver, stream: bool, flags: str
) -> None:
    """A client that records nothing has the same spans: whether to record is not its decision."""
    given = Given(flags)
    response = post(traced.url, given, stream=stream)
    assert response.status_code == 200
    assert "traceparent" not in response.headers
    spans = whole_trace(receiver, given.trace_id, NUM_SPANS)

    root = server_span(spans, ROUTER)
    assert root.parent_id == given.span_id
    assert root.name == "POST /v1/completions"
    assert root.attributes["hisparse_pd.prefill_node"] == traced.prefill[0].url
    assert root.attributes["hisparse_pd.decode_node"] == traced.decode[0].url
    assert root.attributes["hisparse_pd.retries"] == 0
    assert root.attributes["http.response.status_code"] == 200
    of_node = server_span(spans, DECODE)
    assert of_node.parent_id == root.span_id
    assert root.start <= of_node.start
    by_name = {part.name: part for part in parts_of(spans, DECODE)}
    assert sorted(by_name) == sorted(PHASES + OF_PREFILL_NODE)
    assert {part.parent_id for part in by_name.values()} == {of_node.span_id}
    landing = by_name["landing"]
    for names, start, end in (
        (PHASES, of_node.start, of_node.end),
        (OF_PREFILL_NODE, landing.start, landing.end),
    ):
        for name in names:  # one after the other
            assert start <= by_name[name].start <= by_name[name].end
            start = by_name[name].end
        assert start <= end
    assert len({span.span_id for span in spans}) == len(spans) == NUM_SPANS
    assert all(span.error is None for span in spans)
    assert receiver.paths == {"/v1/traces"}


def test_spans_say_what_they_are_about(traced: Deployment, receiver: Receiver) -> None:
    given = Given()
    traced.flush_prefix_caches()
    answer = post(traced.url, given).json()
    spans = whole_trace(receiver, given.trace_id, NUM_SPANS)
    num_prompt_tokens = answer["usage"]["prompt_tokens"]
    room = server_span(spans, ROUTER).attributes["hisparse_pd.room"]
    of_node = server_span(spans, DECODE).attributes
    assert of_node["gen_ai.request.model"] == "tiny"
    assert of_node["gen_ai.operation.name"] == "text_completion"
    assert of_node["gen_ai.usage.input_tokens"] == num_prompt_tokens
    for attributes in (of_node, *(part.attributes for part in parts_of(spans, DECODE)[1:])):
        assert attributes["hisparse_pd.room"] == room
        assert attributes["hisparse_pd.dp_rank"] == 0
        assert attributes["hisparse_pd.mode"] == "hisparse"
        assert attributes["gen_ai.usage.cache_read.input_tokens"] == 0
        assert attributes["hisparse_pd.held_tokens"] == 0
    assert receiver.resources[DECODE]["deployment.environment.name"] == "test"
    assert of_node["gen_ai.usage.output_tokens"] == 8
    assert of_node["gen_ai.response.finish_reasons"] == ["length"]
    assert of_node["hisparse_pd.transfer_bytes"] > 0


# --- server-timing ---------------------------------------------------------------------------------------


def timing_of(response: httpx.Response) -> dict[str, float]:
    """Return the response's times by name, in milliseconds."""
    header = response.headers["server-timing"]
    found = re.findall(r"(\w+);dur=([\d.]+)(?:, |$)", header)
    assert ", ".join(f"{name};dur={value}" for name, value in found) == header
    return {name: float(value) for name, value in found}


UP_TO_THE_FIRST = ["tokenize", "queue", "landing", *OF_PREFILL_NODE, "first_step", "ttft"]


def test_an_answer_says_how_long_it_took_if_asked(traced: Deployment) -> None:
    asking = Given()
    asking.headers["x-request-timing"] = "1"
    timing = timing_of(post(traced.url, asking))
    assert list(timing) == [*UP_TO_THE_FIRST, "decode", "total"]
    assert timing["prefill_queue"] + timing["prefill"] + timing["transfer"] <= timing["landing"] + 1
    assert timing["tokenize"] + timing["queue"] + timing["landing"] <= timing["ttft"] + 1
    assert timing["ttft"] <= timing["total"]
    assert set(UP_TO_THE_FIRST) <= set(timing_of(post(traced.url, asking, stream=True)))
    assert "server-timing" not in post(traced.url, Given()).headers
