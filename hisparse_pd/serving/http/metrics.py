"""``/metrics`` of a node: the engines' latest numbers and the fronts' own histograms.

Each front owns one ``FrontMetrics``. Handlers count into it, ``EngineLink`` passes on the engines' stats, and
``render`` answers ``/metrics`` for all fronts of the node. Every name has the prefix ``hisparse_pd:``.
Engines name their gauges and counters themselves, with labels as in ``requests_total{mode="dense"}``.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hisparse_pd.engine.messages import EngineStats

PREFIX = "hisparse_pd:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.5, 1, 2, 5, 10)
_PHASE_BUCKETS = (0.001, 0.002, 0.005, *_TTFT_BUCKETS)
_E2E_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280)

_SampleKey: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and its labels, each with its value."""

_LABELLED = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)(?:\{(.*)\})?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')

_HELP = {
    "engine_steps_total": "loop iterations that did work",
    "num_running_reqs": "requests in the running batch",
    "running_reqs": "requests in the running batch, by mode",
    "num_resident_reqs": "running hisparse requests that have all of their tokens on the device",
    "resident_shared_tokens": "device slots of a common beginning that these requests have once",
    "num_paused_reqs": "running requests that sit steps out until there are slots for their next token",
    "num_queue_reqs": "requests that wait for admission or prefill",
    "queue_reqs": "requests that wait for admission, by the hisparse flag that they have",
    "num_transfer_queue_reqs": "requests whose KV is being transferred",
    "token_usage": "share of the busiest pool in use, 0 to 1",
    "pool_used_tokens": "token slots in use, without those of held prefixes",
    "pool_held_tokens": "token slots of held prefixes, which are evicted when others need them",
    "pool_total_tokens": "token slots of the pool",
    "quarantined_tokens": "token slots that a remote write may still reach",
    "stuck_rooms": "quarantined rooms of which their prefill node has said nothing for --quarantine-secs",
    "set_aside_tokens": "token slots that nobody gets, because a row there was not what was written",
    "kv_rows_corrupt_total": "rows of KV that were not what was written, by where that was found",
    "aux_slots_used": "aux records in use or quarantined",
    "aux_slots_total": "all aux records",
    "cache_hit_rate": "share of prompt tokens found in the prefix cache",
    "num_registered_peers": "peers with a live registration",
    "gen_throughput": "generated tokens a second",
    "requests_total": "requests admitted",
    "retractions_total": "requests that gave up their device slots under pressure",
    "kv_transfer_bytes_total": "KV bytes moved",
    "kv_transfer_seconds_total": "seconds in KV transfers",
    "kv_transfer_failures_total": "KV transfers that failed",
    "transfer_info": "always 1; the labels say what the KV transport runs on, and why",
    "lane_info": "always 1; the labels say how KV goes between this node and a registered peer, and why",
    "host_link_bytes_per_second": "rate of copies from the host pool to the GPU at its start; 0 without one",
    "step_seconds_per_req": "most seconds that misses of one more request may add to a step; 0 if not known",
    "miss_seconds_per_req": "seconds by which misses of a hot buffer of the full size make a step longer",
    "swap_in_hits_total": "selected entries found in the hot buffer",
    "swap_in_misses_total": "selected entries paged in from the host pool",
    "swap_in_bytes_total": "KV bytes that misses brought from the host pool",
    "swap_in_evictions_total": "hot-buffer entries that were replaced",
    "prompt_tokens_total": "prompt tokens",
    "cached_tokens_total": "prompt tokens found in the prefix cache",
    "cached_tier_tokens_total": "prompt tokens that were not computed, by the tier that had their KV",
    "host_stored_tokens_total": "tokens of computed prompts that were copied to main memory",
    "host_fetched_tokens_total": "tokens that were copied back from main memory into the prefix cache",
    "held_read_tokens_total": "tokens that were read from decode nodes into the prefix cache",
    "held_read_bytes_total": "bytes that were read from decode nodes",
    "held_read_late_total": "requests that stopped waiting for what their decode node holds",
    "held_read_failures_total": "reads of what decode nodes hold that ended in an error",
    "store_connected": "1 if the store answered the last order without an error",
    "store_queued_pages": "pages that wait to be written to the store, or are being written",
    "store_waiting_reqs": "waiting requests whose prompts the store is asked for",
    "store_put_tokens_total": "tokens that were written to the store",
    "store_got_tokens_total": "tokens that were read from the store into main memory",
    "store_bytes_total": "bytes of the objects that were written and read",
    "store_failures_total": "orders to the store that ended in an error, by operation",
    "store_late_total": "requests that stopped waiting for the store",
    "store_dropped_pages_total": "pages that were not written to the store, because too many waited",
    "held_tokens_total": "prompt tokens whose KV the decode node held, so that it was not sent",
    "held_hits_total": "delivered requests that began with a held prefix",
    "held_evicted_tokens_total": "tokens of held prefixes that were evicted because others needed the slots",
    "held_moved_down_tokens_total": "tokens of held prefixes whose indexer keys have left the index pool",
    "held_fetched_tokens_total": "tokens of held prefixes whose indexer keys, and KV of dense requests, came "
    "back from main memory",
    "held_stored_dense_tokens_total": "tokens that dense requests left and the host pool has got",
    "generation_tokens_total": "generated tokens",
    "verifying_steps_total": "times that a step verified drafts of a request",
    "drafted_tokens_total": "tokens of the draft layer that steps verified",
    "accepted_draft_tokens_total": "tokens of the draft layer that became output",
    "spec_accept_length": "mean number of tokens that a request got from a step that verified its drafts",
    "kv_event_batches_total": "batches of KV events, dropped ones included",
    "kv_event_batches_dropped_total": "batches of KV events that nobody got, because too many waited",
    "control_messages_dropped_total": "control messages dropped, by reason",
    "aborted_requests_total": "requests aborted by their client or by the decode node",
    "failed_requests_total": "requests that ended in an error",
}


class FrontMetrics:
    """A front's own histograms and counters, and the engines' latest numbers, which every front gets.

    In a node of several ranks, the engines' numbers have the label ``dp_rank``.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineCollector(num_ranks)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "from the request's arrival to its first token", _TTFT_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "between two tokens of a sample", _ITL_BUCKETS
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "from the request's arrival to the end of its answer", _E2E_BUCKETS
        )
        self._phases = self._histogram(
            "request_phase_seconds",
            "phases of a request, which follow each other; those of its prefill node (prefill_queue, "
            "prefill, transfer) end when its KV has landed",
            _PHASE_BUCKETS,
            "phase",
        )
        self._requests = self._counter(
            "num_requests", "HTTP requests by endpoint and status; 499: the client left", "endpoint", "status"
        )
        self.unauthorized = self._counter(
            "unauthorized_requests", "HTTP requests without a valid API key, answered 401"
        )
        self.bootstrap_refusals = self._counter(
            "bootstrap_refusals", "callers that the bootstrap endpoint turned away, by reason", "reason"
        )
        self._trace_spans = self._counter(
            "trace_spans",
            "spans of traces; failed: the collector did not take them; dropped: too many waited for it",
            "outcome",
        )

    def phase_secs(self, phase: str) -> Histogram:
        return self._phases.labels(phase)

    def count_spans(self, outcome: str, num: int) -> None:
        self._trace_spans.labels(outcome).inc(num)

    def count_request(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def update(self, rank: int, stats: EngineStats) -> None:
        """Take in the latest numbers of a rank's engine."""
        self._engine.stats[rank] = stats

    def pack(self) -> bytes:
        """Return this front's own numbers, for the front that renders those of all."""
        return pack_numbers(self.registry)

    def render(self, packed_fronts: Sequence[bytes] = ()) -> bytes:
        """Return the node's Prometheus text. ``packed_fronts``: each front's ``pack``, if several."""
        return render_text(self._engine, packed_fronts or (self.pack(),))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """Collects the latest EngineStats of each rank as metric families."""

    def __init__(self, num_ranks: int) -> None:
        self.stats: dict[int, EngineStats] = {}
        self._num_ranks = num_ranks

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: the engine names its metrics later."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for rank, stats in self.stats.items():
            rank_label = {"dp_rank": str(rank)} if self._num_ranks > 1 else {}
            for family_type, values in (
                (GaugeMetricFamily, stats.gauges),
                (CounterMetricFamily, {"engine_steps_total": stats.step, **stats.counters}),
            ):
                for labelled_name, value in values.items():
                    name, labels = split_labels(labelled_name)
                    labels |= rank_label
                    if name not in families:
                        text = _HELP.get(name, name.replace("_", " "))
                        families[name] = family_type(PREFIX + name, text, labels=list(labels))
                    families[name].add_metric(list(labels.values()), value)
        yield from families.values()


def split_labels(labelled_name: str) -> tuple[str, dict[str, str]]:
    """Split ``name{label="value"}`` into name and labels. Raises ValueError."""
    match = _LABELLED.fullmatch(labelled_name)
    if match is None:
        raise ValueError(f'metric {labelled_name!r}: expected name or name{{label="value"}}')
    return match[1], dict(_LABEL.findall(match[2] or ""))


# --- numbers of several processes --------------------------------------------------------------------


def pack_numbers(registry: CollectorRegistry) -> bytes:
    """Return the present numbers of this process, for another process of the same program."""
    return pickle.dumps(list(registry.collect()))


def render_text(collector: Collector, packed: Sequence[bytes]) -> bytes:
    """Return Prometheus text of one collector, and of the sums of all ``packed`` numbers."""
    registry = CollectorRegistry()
    registry.register(collector)
    registry.register(_Sums(packed))
    return generate_latest(registry)


class _Sums(Collector):
    """Collects the sums of the numbers of several processes."""

    def __init__(self, packed: Sequence[bytes]) -> None:
        self._packed = packed

    def describe(self) -> Iterator[Metric]:
        """Describe nothing, or registration would collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the families of all processes. A sample is the sum, and ``_created`` the earliest time."""
        families: dict[str, Metric] = {}
        # A sample's values in all processes, by the name of its family.
        values: defaultdict[str, defaultdict[_SampleKey, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for packed in self._packed:
            for family in pickle.loads(packed):
                families.setdefault(family.name, family)
                for sample in family.samples:
                    key = sample.name, tuple(sorted(sample.labels.items()))
                    values[family.name][key].append(sample.value)
        for name, family in families.items():
            metric = Metric(name, family.documentation, family.type)
            for (sample_name, labels), each in values[name].items():
                is_time = sample_name.endswith("_created")
                metric.add_sample(sample_name, dict(labels), min(each) if is_time else sum(each))
            yield metric
