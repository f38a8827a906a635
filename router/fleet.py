"""Endpoints that the router answers by asking its nodes: models, versions, tokenizer, each node's settings.

``server.py`` gives the methods of one ``Fleet`` their paths.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from hisparse_pd.base.vocabulary import VERSION
from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.router.node_calls import NodeCalls, NodeDocumentError
from hisparse_pd.router.nodes import Node, NodeKind, NodePool
from hisparse_pd.serving.api.models import MODELS_PATH, json_response, show_models
from hisparse_pd.serving.http.http_errors import ApiError

log = logging.getLogger(__name__)

ASK_TIMEOUT_SECS = 5.0
_Answer: TypeAlias = dict[str, object] | str
"""The JSON object that a node answered, or as text the reason why there is none."""
_OBJECT_DECODER: TypedDecoder[dict[str, object]] = TypedDecoder.json(dict[str, object])


class Fleet:
    """Endpoints about the nodes, which are asked concurrently, each for at most ``ASK_TIMEOUT_SECS``."""

    def __init__(self, pool: NodePool, calls: NodeCalls) -> None:
        self._pool = pool
        self._calls = calls

    async def models(self, request: Request) -> Response:
        """Answer with the models of all healthy decode nodes, each once, or with the one that the path
        names."""
        answers = await self._ask_all(self._pool.healthy(NodeKind.DECODE), MODELS_PATH)
        lists = [None if isinstance(answer, str) else _models_in(answer) for answer in answers]
        if not any(models is not None for models in lists):
            return self._no_answer(MODELS_PATH)
        by_id = {model["id"]: model for models in lists for model in models or ()}
        return show_models(request, list(by_id.values()))

    async def server_info(self, request: Request) -> Response:
        """Answer with what each node says of itself, or with the reason why it says nothing, by kind."""
        nodes = self._pool.nodes
        answers = await self._ask_all(nodes, "/server_info")
        by_kind: dict[str, list[dict[str, object]]] = {kind: [] for kind in NodeKind}
        for node, answer in zip(nodes, answers, strict=True):
            said = {"trouble": answer} if isinstance(answer, str) else answer
            by_kind[node.kind].append({"url": node.url, **said})
        return json_response({"version": VERSION, **by_kind})

    async def model_info(self, request: Request) -> Response:
        """Answer with the model as a decode node describes it; all nodes serve the same one."""
        return await self._first_answer("/model_info")

    async def tokenizer_info(self, request: Request) -> Response:
        """Answer with the tokenizer as a decode node describes it; prefill nodes have none."""
        return await self._first_answer("/tokenizer_info")

    async def _first_answer(self, path: str) -> Response:
        """Answer with what the first healthy decode node says that answers."""
        for node in self._pool.healthy(NodeKind.DECODE):
            if not isinstance(answer := await self._ask(node, path), str):
                return json_response(answer)
        return self._no_answer(path)

    async def _ask_all(self, nodes: Sequence[Node], path: str) -> list[_Answer]:
        return await asyncio.gather(*(self._ask(node, path) for node in nodes))

    async def _ask(self, node: Node, path: str) -> _Answer:
        try:
            return await self._calls.get_document(node, path, ASK_TIMEOUT_SECS, _OBJECT_DECODER)
        except NodeDocumentError as error:
            log.warning("%s: %s", node.name, error)
            return str(error)

    def _no_answer(self, path: str) -> Response:
        states = "; ".join(f"{node.url}: {node.trouble}" for node in self._pool.of_kind(NodeKind.DECODE))
        return ApiError(503, f"{path}: no decode node answered ({states}); try again later").response()


def _models_in(listing: dict[str, object]) -> list[dict[str, object]] | None:
    models = listing.get("data")
    if not isinstance(models, list):
        return None
    return [model for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)]
