"""``/status``: the state of the deployment that the live page shows, as one JSON document.

``server.py`` gives ``StatusBoard.answer`` its path. Health comes from the router's pool, the rest from each
node's ``/status``. One round over all nodes serves every viewer that asks within ``MAX_AGE_SECS``. A node
that does not answer properly has a ``load_trouble`` instead of numbers, and the others are shown as usual.
Nothing here changes which nodes get requests.
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
"""Age up to which an answer is given again, so that many viewers cost one round."""

NODE_TIMEOUT_SECS = 2.0
"""Limit for one node's answer, from connecting to the last byte."""

_LOAD_DECODER: TypedDecoder[NodeLoad] = TypedDecoder.json(NodeLoad)


class StatusBoard:
    """Answers ``/status``, and owns the latest answer."""

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
        """When the latest round was over, a time of ``time.monotonic``."""

    async def answer(self, request: Request) -> Response:
        async with self._lock:  # requests that come during a round get its result
            if time.monotonic() - self._asked_at >= MAX_AGE_SECS:
                status = await self._ask_all()
                self._body, self._asked_at = msgspec.json.encode(status), time.monotonic()
        return Response(self._body, media_type="application/json", headers={"cache-control": "no-store"})

    async def _ask_all(self) -> dict[str, object]:
        """Make a round over all nodes, and return the document.

        ``at``: when the round ended, in seconds since the epoch. ``answers``: this router's answers by HTTP
        status. ``ready``: whether a pair is healthy and the router is not ``draining``, as in ``/readiness``.
        """
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
        """Return the part about one node.

        ``healthy`` and ``trouble`` are the router's judgement; ``load_trouble`` says why there is no
        ``load``.
        """
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
