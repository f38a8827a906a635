"""``/status``: what the live page shows of the deployment, as one JSON document.

Health comes from the router's own table, the rest from each node's ``/status``. One round over all nodes
serves every viewer that asks within ``MAX_AGE_SECS``. A node that is silent, or says something else, has no
numbers and a ``trouble`` of its own; the others are shown as ever. Nothing here changes which nodes get
requests, nor the drain, of which it tells.
"""

from __future__ import annotations

import asyncio
import math
import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.router.drain import Drain
from hisparse_pd.router.metrics import RouterMetrics
from hisparse_pd.router.node_calls import NodeCalls, NodeDocumentError
from hisparse_pd.router.nodes import Node, NodePool
from hisparse_pd.serving.http.node_load import NodeLoad

MAX_AGE_SECS = 1.0
"""How old an answer may be, so that many viewers cost one round."""

NODE_TIMEOUT_SECS = 2.0
"""For one node's answer, from connecting to the last byte."""

_LOAD_DECODER: TypedDecoder[NodeLoad] = TypedDecoder.json(NodeLoad)


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

    async def _ask_all(self) -> dict[str, object]:
        """``at``: seconds since the epoch when the round ended. ``answers``: this router's, by HTTP status.
        ``ready``: as ``/readiness`` has it, a pair is healthy and the router is not ``draining``."""
        nodes = await asyncio.gather(*(self._ask(node) for node in self._pool.nodes))
        return {
            "at": time.time(),
            "ready": self._pool.has_pair() and not self._drain.is_draining,
            "draining": self._drain.is_draining,
            "policy": self._policy,
            "answers": self._metrics.answers(),
            "retries": self._metrics.num_retries(),
            "resumes": self._metrics.num_resumes(),
            "nodes": nodes,
        }

    async def _ask(self, node: Node) -> dict[str, object]:
        """``healthy`` and ``trouble``: the router's judgement. ``load_trouble``: why there is no ``load``."""
        load, load_trouble = None, ""
        try:
            load = await self._calls.get_document(node, "/status", NODE_TIMEOUT_SECS, _LOAD_DECODER)
            if load.role != node.kind:
                load, load_trouble = None, f"/status: it is no {node.kind} node"
        except NodeDocumentError as error:
            load_trouble = str(error)
        return {
            "url": node.url,
            "kind": node.kind,
            "healthy": node.healthy,
            "trouble": node.trouble,
            "in_flight": node.num_in_flight,
            "load": load,
            "load_trouble": load_trouble,
        }
