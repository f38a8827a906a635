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
from collections import defaultdict
from collections.abc import Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response

from hisparse_pd.http.metrics import PREFIX
from router.drain import Drain
from router.metrics import RouterMetrics
from router.node_calls import NodeCalls
from router.nodes import Node, NodeKind, NodePool

MAX_AGE_SECS = 1.0
"""How old an answer may be, so that many viewers cost one round."""

NODE_TIMEOUT_SECS = 2.0
"""For one node's metrics, from connecting to the last byte."""

RANK_LABEL = "dp_rank"


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


class Drafts(msgspec.Struct, frozen=True):
    """Totals since the node's start. ``steps``: of requests, each with one draft to verify at least."""

    steps: int
    verified: int
    accepted: int


class Transfers(msgspec.Struct, frozen=True):
    """KV transfers since the node's start."""

    num_bytes: int
    secs: float
    failures: int


class RankLoad(msgspec.Struct, frozen=True):
    """One rank of a node that has several."""

    rank: int
    running: int
    queued: int
    pools: dict[str, PoolUse]


class NodeLoad(msgspec.Struct, frozen=True):
    """What a node's metrics say, summed over its ranks, which are listed when there are several.

    Totals are since its start; ``swap_ins`` and ``drafts`` are None for a prefill node.
    """

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
    drafts: Drafts | None
    ranks: tuple[RankLoad, ...] = ()


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
    """Owns the latest answer. ``calls``: to the nodes."""

    def __init__(
        self,
        pool: NodePool,
        drain: Drain,
        calls: NodeCalls,
        metrics: RouterMetrics,
        policy: str,
    ) -> None:
        self._pool = pool
        self._drain = drain
        self._calls = calls
        self._metrics = metrics
        self._policy = policy
        self._lock = asyncio.Lock()
        self._body = b""
        self._asked_at = -math.inf

    async def answer(self, request: Request) -> Response:
        async with self._lock:  # who comes during a round gets its result
            if time.monotonic() - self._asked_at >= MAX_AGE_SECS:
                status = await self._ask_all()
                self._body, self._asked_at = msgspec.json.encode(status), time.monotonic()
        return Response(self._body, media_type="application/json", headers={"cache-control": "no-store"})

    async def _ask_all(self) -> Status:
        nodes = await asyncio.gather(*(self._ask(node) for node in self._pool.nodes))
        return Status(
            at=time.time(),
            ready=self._pool.ready and not self._drain.is_draining,
            draining=self._drain.is_draining,
            policy=self._policy,
            answers=self._metrics.answers(),
            retries=self._metrics.num_retries(),
            nodes=tuple(nodes),
        )

    async def _ask(self, node: Node) -> NodeStatus:
        load, load_trouble = None, ""
        try:
            status, body = await self._calls.get(node, "/metrics", NODE_TIMEOUT_SECS)
            if not 200 <= status < 300:
                raise MetricsError(f"answered {status}")
            load = parse_load(body.decode(errors="replace"), node.kind)
        except TimeoutError:
            load_trouble = f"no answer to /metrics in {NODE_TIMEOUT_SECS:g} s"
        except (OSError, MetricsError) as error:
            load_trouble = f"/metrics: {error or type(error).__name__}"
        return NodeStatus(
            node.url, node.kind, node.healthy, node.trouble, node.num_in_flight, load, load_trouble
        )


def parse_load(text: str, kind: NodeKind) -> NodeLoad:
    """The numbers in a node's Prometheus text. Raises MetricsError when one that no node lacks is missing."""
    node, ranks = _parse(text)
    swap_ins, drafts = None, None
    if kind is NodeKind.DECODE:
        swap_ins = SwapIns(
            node.one("swap_in_hits_total"), node.one("swap_in_misses_total"), node.one("swap_in_bytes_total")
        )
        drafts = Drafts(
            node.one("verifying_steps_total"),
            node.one("drafted_tokens_total"),
            node.one("accepted_draft_tokens_total"),
        )
    return NodeLoad(
        running=node.one("num_running_reqs"),
        queued=node.one("num_queue_reqs"),
        transferring=node.one("num_transfer_queue_reqs"),
        running_by_mode=node.by_label("running_reqs"),
        requests_by_mode=node.by_label("requests_total"),
        pools=node.pools(),
        prompt_tokens=round(node.counted("prompt_tokens_total")),
        cached_tokens=round(node.counted("cached_tokens_total")),
        generated_tokens=sum(node.by_label("generation_tokens_total").values()),
        transfers=Transfers(
            round(node.counted("kv_transfer_bytes_total")),
            node.counted("kv_transfer_seconds_total"),
            round(node.counted("kv_transfer_failures_total")),
        ),
        swap_ins=swap_ins,
        drafts=drafts,
        ranks=tuple(
            RankLoad(number, rank.one("num_running_reqs"), rank.one("num_queue_reqs"), rank.pools())
            for number, rank in sorted(ranks.items())
        ),
    )


class _Samples:
    """Of a node or a rank: by name without prefix, then by the values of the labels in their names' order."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """To what is there under this name and labels. Raises MetricsError for what is no number."""
        series = self._by_name[name.removeprefix(PREFIX)]
        values = tuple(labels[label] for label in sorted(labels))
        series[values] = series.get(values, 0.0) + value
        if not math.isfinite(series[values]):
            raise MetricsError(f"{name} is {series[values]}")

    def one(self, name: str) -> int:
        try:
            return round(self._by_name[name][()])
        except KeyError:
            raise MetricsError(f"no {PREFIX}{name}") from None

    def counted(self, name: str) -> float:
        """A total that a prefill node has from the first event on."""
        return self._by_name[name].get((), 0.0) if name in self._by_name else 0.0

    def by_label(self, name: str) -> dict[str, int]:
        series = self._by_name.get(name, {}).items()
        return {values[0]: round(value) for values, value in series if len(values) == 1}

    def pools(self) -> dict[str, PoolUse]:
        used, total = self.by_label("pool_used_tokens"), self.by_label("pool_total_tokens")
        return {pool: PoolUse(used.get(pool, 0), size) for pool, size in total.items()}


def _parse(text: str) -> tuple[_Samples, dict[int, _Samples]]:
    """Our samples, summed over the ranks, and those of each where there are several. Raises MetricsError.

    Without the buckets, of which there are many and none is shown.
    """
    ours = (line for line in text.splitlines() if line.startswith(PREFIX) and "_bucket{" not in line)
    node = _Samples()
    ranks: defaultdict[int, _Samples] = defaultdict(_Samples)
    try:
        for family in text_string_to_metric_families("\n".join(ours) + "\n"):
            for sample in family.samples:
                rank = sample.labels.pop(RANK_LABEL, None)
                node.add(sample.name, sample.labels, sample.value)
                if rank is not None:
                    ranks[int(rank)].add(sample.name, sample.labels, sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsError(f"no Prometheus text: {error}") from error
    return node, ranks
