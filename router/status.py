"""``/status``: what the live page shows of the deployment, as one JSON document.

Health comes from the router's own table, the rest from each node's ``/metrics``. One round over all nodes
serves every viewer that asks within ``MAX_AGE_SECS``. A node that is silent, or says something else than
metrics, has no numbers and a ``trouble`` of its own; the others are shown as ever. Nothing here changes which
nodes get requests, nor the drain, of which it tells.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable

import httpx
import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response

from router.drain import Drain
from router.metrics import RouterMetrics
from router.nodes import Node, NodeKind, NodePool
from service.metrics import PREFIX

MAX_AGE_SECS = 1.0
"""How old an answer may be, so that many viewers cost one round."""

NODE_TIMEOUT_SECS = 2.0
"""For one node's metrics, from connecting to the last byte."""

MAX_METRICS_BYTES = 1 << 20

Samples = dict[str, dict[tuple[str, ...], float]]
"""Metric name without prefix, then the values of its labels in the order of their names."""


class MetricsError(Exception):
    """A node's metrics cannot be used; the message says why, without the node's name."""


class PoolUse(msgspec.Struct, frozen=True):
    """Token slots."""

    used: int
    total: int


class SwapIns(msgspec.Struct, frozen=True):
    """Totals since the node's start; ``num_bytes`` were read from the host pool."""

    hits: int
    misses: int
    num_bytes: int


class Transfers(msgspec.Struct, frozen=True):
    """KV transfers since the node's start."""

    num_bytes: int
    secs: float
    failures: int


class NodeLoad(msgspec.Struct, frozen=True):
    """What a node's metrics say. Totals are since its start; ``swap_ins`` is None for a prefill node."""

    running: int
    queued: int
    transferring: int
    running_by_mode: dict[str, int]
    requests_by_mode: dict[str, int]
    pools: dict[str, PoolUse]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    transfers: Transfers
    swap_ins: SwapIns | None


class NodeStatus(msgspec.Struct, frozen=True):
    """``healthy`` and ``trouble``: the router's judgement. ``load_trouble``: why there is no ``load``."""

    url: str
    kind: NodeKind
    healthy: bool
    trouble: str
    in_flight: int
    load: NodeLoad | None
    load_trouble: str


class Status(msgspec.Struct, frozen=True):
    """``at``: seconds since the epoch at the end of the round; ``answers``: this router's, by HTTP status.

    ``ready`` as ``/readiness`` has it: a pair is healthy and the router is not ``draining``.
    """

    at: float
    ready: bool
    draining: bool
    policy: str
    answers: dict[str, int]
    retries: int
    nodes: tuple[NodeStatus, ...]


class StatusBoard:
    """Owns the latest answer. ``client`` asks the nodes, with the router's key for them if it has one."""

    def __init__(
        self, pool: NodePool, drain: Drain, client: httpx.AsyncClient, metrics: RouterMetrics, policy: str
    ) -> None:
        self._pool = pool
        self._drain = drain
        self._client = client
        self._metrics = metrics
        self._policy = policy
        self._lock = asyncio.Lock()
        self._body = b""
        self._asked_at = -math.inf

    async def endpoint(self, request: Request) -> Response:
        async with self._lock:  # who comes during a round gets its result
            if time.monotonic() - self._asked_at >= MAX_AGE_SECS:
                status = await self._ask_all()
                self._body, self._asked_at = msgspec.json.encode(status), time.monotonic()
        return Response(self._body, media_type="application/json", headers={"cache-control": "no-store"})

    async def _ask_all(self) -> Status:
        nodes = await asyncio.gather(*(self._ask(node) for node in self._pool.nodes))
        answers: Counter[str] = Counter()
        for labels, count in _counts(self._metrics.requests.collect()):
            answers[labels["status"]] += count
        return Status(
            at=time.time(),
            ready=self._pool.ready and not self._drain.is_draining,
            draining=self._drain.is_draining,
            policy=self._policy,
            answers=dict(answers),
            retries=sum(count for _, count in _counts(self._metrics.retries.collect())),
            nodes=tuple(nodes),
        )

    async def _ask(self, node: Node) -> NodeStatus:
        load, load_trouble = None, ""
        try:
            async with asyncio.timeout(NODE_TIMEOUT_SECS):
                load = parse_load(await self._read_metrics(node), node.kind)
        except TimeoutError:
            load_trouble = f"no answer to /metrics in {NODE_TIMEOUT_SECS:g} s"
        except (httpx.HTTPError, OSError) as error:
            load_trouble = f"/metrics: {error or type(error).__name__}"
        except MetricsError as error:
            load_trouble = f"/metrics: {error}"
        return NodeStatus(
            node.url, node.kind, node.healthy, node.trouble, node.num_in_flight, load, load_trouble
        )

    async def _read_metrics(self, node: Node) -> str:
        body = bytearray()
        async with self._client.stream("GET", f"{node.url}/metrics", timeout=NODE_TIMEOUT_SECS) as answer:
            if not answer.is_success:
                raise MetricsError(f"answered {answer.status_code}")
            async for chunk in answer.aiter_bytes():
                body += chunk
                if len(body) > MAX_METRICS_BYTES:
                    raise MetricsError(f"more than {MAX_METRICS_BYTES} bytes")
        return body.decode(errors="replace")


def parse_load(text: str, kind: NodeKind) -> NodeLoad:
    """The numbers in a node's Prometheus text. Raises MetricsError when one that no node lacks is missing."""
    samples = _parse(text)

    def one(name: str) -> int:
        try:
            return round(samples[name][()])
        except KeyError:
            raise MetricsError(f"no {PREFIX}{name}") from None

    def counted(name: str) -> float:
        """A total that a prefill node has from the first event on."""
        return samples[name].get((), 0.0) if name in samples else 0.0

    def by_label(name: str) -> dict[str, int]:
        series = samples.get(name, {}).items()
        return {values[0]: round(value) for values, value in series if len(values) == 1}

    used = by_label("pool_used_tokens")
    swap_ins = None
    if kind is NodeKind.DECODE:
        swap_ins = SwapIns(one("swap_in_hits_total"), one("swap_in_misses_total"), one("swap_in_bytes_total"))
    return NodeLoad(
        running=one("num_running_reqs"),
        queued=one("num_queue_reqs"),
        transferring=one("num_transfer_queue_reqs"),
        running_by_mode=by_label("running_reqs"),
        requests_by_mode=by_label("requests_total"),
        pools={
            pool: PoolUse(used.get(pool, 0), size) for pool, size in by_label("pool_total_tokens").items()
        },
        prompt_tokens=round(counted("prompt_tokens_total")),
        cached_tokens=round(counted("cached_tokens_total")),
        generated_tokens=sum(by_label("generation_tokens_total").values()),
        transfers=Transfers(
            round(counted("kv_transfer_bytes_total")),
            counted("kv_transfer_seconds_total"),
            round(counted("kv_transfer_failures_total")),
        ),
        swap_ins=swap_ins,
    )


def _parse(text: str) -> Samples:
    """Our samples but the buckets, of which there are many and none is shown. Raises MetricsError."""
    ours = (line for line in text.splitlines() if line.startswith(PREFIX) and "_bucket{" not in line)
    samples: Samples = defaultdict(dict)
    try:
        for family in text_string_to_metric_families("\n".join(ours) + "\n"):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    raise MetricsError(f"{sample.name} is {sample.value}")
                labels = tuple(sample.labels[name] for name in sorted(sample.labels))
                samples[sample.name.removeprefix(PREFIX)][labels] = sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsError(f"no Prometheus text: {error}") from error
    return samples


def _counts(families: Iterable[Metric]) -> Iterable[tuple[dict[str, str], int]]:
    """Labels and value of each series of a counter, without the time of its creation."""
    for family in families:
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield sample.labels, round(sample.value)
