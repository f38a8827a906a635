"""Every metric that an alert or the dashboard asks for is shown by a real pair, with the labels it needs."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.harness import Deployment, wait_until
from tests.monitoring_files import SCRAPE_LABELS, all_queries
from tests.waiting import WAIT_SECS

PROMPT = "What is watched is there. " * 12
OF_A_REQUEST = 'hisparse_pd:generation_tokens_total{mode="hisparse"}'
COUNTED = 'hisparse_pd:router_requests_total{endpoint="/generate",status="200"}'


@pytest.fixture(scope="module")
def shown(pair: Deployment) -> dict[str, set[str]]:
    """Sample names of all services, with their labels, after one request."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4}
    body = {"text": PROMPT, "sampling_params": sampling, "hisparse": True}
    httpx.post(f"{pair.url}/generate", json=body, timeout=60).raise_for_status()
    wait_until(lambda: pair.decode[0].metrics()[OF_A_REQUEST] >= 4, "the engine's numbers")
    wait_until(lambda: COUNTED in pair.router.metrics(), "the router's count")
    samples: dict[str, set[str]] = {}
    for service in pair.services:
        text = httpx.get(f"{service.url}/metrics", timeout=WAIT_SECS).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def test_the_metrics_of_all_queries_exist(shown: dict[str, set[str]]) -> None:
    asked = [(query.where, *asked) for query in all_queries() for asked in query.metrics.items()]
    missing = [
        (where, name, labels - shown.get(name, set()) - SCRAPE_LABELS)
        for where, name, labels in asked
        if name not in shown or labels - shown[name] - SCRAPE_LABELS
    ]
    assert not missing, "no service shows these metrics, or not with these labels"


def test_what_queries_name_is_shown_where_they_look(pair: Deployment, shown: dict[str, set[str]]) -> None:
    """Every phase, pool and kind that a query names is shown by a node of the job that it asks."""
    found: set[tuple[str, str, str, str]] = set()
    for service in pair.services:
        job = service.name.partition("-")[0]
        for family in text_string_to_metric_families(
            httpx.get(f"{service.url}/metrics", timeout=WAIT_SECS).text
        ):
            for sample in family.samples:
                labels = [("", ""), *sample.labels.items()]
                found |= {(of, sample.name, *label) for label in labels for of in ("", job)}
    missing = [(query.where, words) for query in all_queries() for words in {*query.words} - found]
    assert not missing, "no service shows these"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_counters_that_alerts_watch_are_there_before_the_first_event(role: str, pair: Deployment) -> None:
    (node,) = getattr(pair, role)
    metrics = node.metrics()
    for name in (
        "kv_transfer_failures_total",
        "engine_steps_total",
        "failed_requests_total",
        'control_messages_dropped_total{reason="malformed"}',
    ):
        assert f"hisparse_pd:{name}" in metrics


def test_status_tells_of_the_pair(pair: Deployment, shown: dict[str, set[str]]) -> None:
    """The document of the live page has the numbers of real nodes, once both engines have reported them."""

    def told() -> dict[str, Any] | None:
        status: dict[str, Any] = httpx.get(f"{pair.url}/status", timeout=WAIT_SECS).json()
        if any(node["load_trouble"] for node in status["nodes"]):
            return None  # on a busy machine a node may answer too late for one round
        prefilled, decoded = (node["load"]["ranks"][0]["numbers"] for node in status["nodes"])
        is_counted = prefilled["kv_transfer_bytes_total"][""] and decoded["requests_total"]["hisparse"]
        return status if is_counted else None

    status = wait_until(told, "the numbers of both nodes")
    assert status is not None
    assert status["ready"] is True
    prefilled, decoded = (node["load"]["ranks"][0]["numbers"] for node in status["nodes"])
    assert prefilled["pool_total_tokens"].keys() == {"kv"}
    assert decoded["pool_total_tokens"].keys() == {"host", "device", "index", "lookup"}
    assert decoded["requests_total"]["hisparse"] >= 1
    assert sum(decoded["generation_tokens_total"].values()) >= 4
    assert prefilled["prompt_tokens_total"][""] > 0
    assert decoded["prompt_tokens_total"][""] > 0
    assert prefilled["kv_transfer_bytes_total"][""] > 0
    script = (files("hisparse_pd.router") / "page" / "page.js").read_text(encoding="utf-8")
    asked = set(re.findall(r'"((?:num_\w+_reqs|\w+_total|running_reqs))"', script))
    assert len(asked) > 10
    assert asked <= prefilled.keys() | decoded.keys(), "the page asks for metrics that no node has"
