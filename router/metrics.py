"""The router's Prometheus metrics, with the prefix ``hisparse_pd:router_``.

``server.py`` and the relay count requests, retries and resumes into one ``RouterMetrics``. Gauges about nodes
are read from the pool when they are scraped, so the pool stays their only owner. ``status.py`` reads totals
for the live page.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hisparse_pd.router.nodes import NodePool
from hisparse_pd.router.route import Failure
from hisparse_pd.router.stream_journal import JournalBudget

_PREFIX = "hisparse_pd:router_"
_SECS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


class RouterMetrics:
    """The router's counters and histograms, and the text of ``/metrics``.

    ``ttft`` is measured from the complete request body to the first bytes of the decode node's answer.
    """

    def __init__(self, pool: NodePool, journals: JournalBudget) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_NodeCollector(pool, journals))
        self.requests = self._counter(
            "requests", "Requests by endpoint and HTTP status; 499: the client left", "endpoint", "status"
        )
        self.retries = self._counter(
            "retries", "Requests sent to another pair: a node could not be reached, was not ready, or failed"
        )
        self.prefill_retries = self._counter(
            "prefill_retries",
            "Retries because a prefill node failed, also those of streams that the client has begun to get",
        )
        self._resumes = self._counter(
            "resumes",
            "Requests that went on at another decode node; lost: their node failed; moved: it shut down",
            "reason",
        )
        for reason in ("lost", "moved"):  # made here to begin at 0: alerts on increases need a value before
            self._resumes.labels(reason)
        self._resume_secs = self._histogram(
            "resume", "From the loss of a request's decode node to the first bytes of the next one's answer"
        )
        self.truncated = self._counter(
            "truncated_answers", "Answers that the decode node broke off after their first byte"
        )
        self.unauthorized = self._counter(
            "unauthorized_requests", "Requests without a valid API key, answered 401"
        )
        self._trace_spans = self._counter(
            "trace_spans",
            "Spans of traces; failed: the collector did not take them; dropped: too many waited for it",
            "outcome",
        )
        self.ttft = self._histogram(
            "time_to_first_token",
            "From the request to the first bytes of a successful answer; streamed requests' TTFT",
            "endpoint",
        )
        self.duration = self._histogram(
            "e2e_request_latency", "From the request to the end of its answer", "endpoint"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}{name}_total", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        name = f"{_PREFIX}{name}_seconds"
        return Histogram(name, text, labels, buckets=_SECS_BUCKETS, registry=self._registry)

    def count_spans(self, outcome: str, num: int) -> None:
        self._trace_spans.labels(outcome).inc(num)

    def count_retry(self, failure: Failure) -> None:
        """Count a request that goes to another pair because of ``failure``."""
        self.retries.inc()
        if failure in (Failure.PREFILL_FAILED, Failure.TRANSFER_FAILED):
            self.prefill_retries.inc()

    def count_resume(self, reason: str, secs: float) -> None:
        self._resumes.labels(reason).inc()
        self._resume_secs.observe(secs)

    def answers(self) -> dict[str, int]:
        """Return the number of answers by HTTP status."""
        num: Counts[str] = Counts()
        for labels, count in _series(self.requests):
            num[labels["status"]] += count
        return dict(num)

    def num_retries(self) -> int:
        return sum(count for _, count in _series(self.retries))

    def num_resumes(self) -> int:
        return sum(count for _, count in _series(self._resumes))

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _series(counter: Counter) -> Iterator[tuple[dict[str, str], int]]:
    """Yield labels and value of each series, without its time of creation."""
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield sample.labels, round(sample.value)


class _NodeCollector(Collector):
    """Collects the metrics that the pool and the journals' budget have already."""

    def __init__(self, pool: NodePool, journals: JournalBudget) -> None:
        self._pool = pool
        self._journals = journals

    def describe(self) -> Iterator[Metric]:
        return iter(())  # or registration would call collect

    def collect(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            _PREFIX + "inflight_requests", "Requests that a node works on", labels=("node", "kind")
        )
        healthy = GaugeMetricFamily(
            _PREFIX + "node_healthy", "1: requests go to the node", labels=("node", "kind")
        )
        known = GaugeMetricFamily(
            _PREFIX + "known_pages", "Pages of KV that a node has, by its KV events", labels=("node", "kind")
        )
        for node in self._pool.nodes:
            known.add_metric((node.url, node.kind), self._pool.known.num_pages(node))
            in_flight.add_metric((node.url, node.kind), node.num_in_flight)
            healthy.add_metric((node.url, node.kind), float(node.healthy))
        yield in_flight
        yield healthy
        yield known
        yield GaugeMetricFamily(
            _PREFIX + "journal_bytes",
            "Bytes of the journals of streams in flight, from which another node can resume them",
            self._journals.num_bytes,
        )
        yield CounterMetricFamily(
            _PREFIX + "dropped_journals",
            "Journals given up for lack of room; their streams end with their decode node",
            self._journals.num_dropped,
        )
