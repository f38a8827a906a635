"""A node's endpoints about slots that are withheld: which ones and why, and their release.

``node_app.py`` adds the routes to those of every node. Slots are withheld for two reasons. First, a
prefill node may still write to the slots of a room that ended early: a decode node keeps them until the
process of the prefill node (its run) says that nothing is in flight, or is known to have ended. A machine
that vanishes does neither, so an operator has to release its slots. Second, a page in which a row went wrong
is set aside until an operator has tested the memory.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hisparse_pd.engine.messages import QuarantinedRun, SetAsidePage
from hisparse_pd.serving.api.models import json_response
from hisparse_pd.serving.http.engine_link import EngineLink
from hisparse_pd.serving.http.http_errors import ApiError


def quarantine_routes(link: EngineLink) -> list[Route]:
    """Return the routes ``GET /quarantine`` and ``POST /release_quarantine``. The latter takes
    ``?instance_id=`` for a run, or ``?pool=``, ``&slot=`` (the page's first slot, the ``start`` that
    /quarantine shows) and, on a node of several ranks, ``&rank=`` for a page. Both raise ApiError."""

    async def show(request: Request) -> Response:
        pages = [{"rank": rank, **msgspec.to_builtins(page)} for rank, page in _pages(link)]
        return json_response({"runs": _runs(link), "pages": pages})

    async def release(request: Request) -> Response:
        query = request.query_params
        if "slot" in query:
            return json_response(_release_page(link, query))
        instance_id = query.get("instance_id", "")
        if not instance_id:
            raise ApiError(400, "instance_id, or pool and slot: missing; /quarantine lists what is withheld")
        run = next((run for run in _runs(link) if run.instance_id == instance_id), None)
        if run is None:
            raise ApiError(
                404, f"instance_id: nothing is kept for run {instance_id[:100]!r}; see /quarantine"
            )
        link.release_quarantine(instance_id)
        status = "its slots are free after --quarantine-secs, unless it answers: see /quarantine and the log"
        return json_response({"status": status, "released": run})

    return [
        Route("/quarantine", show, methods=["GET"]),
        Route("/release_quarantine", release, methods=["POST"]),
    ]


def _release_page(link: EngineLink, query: Any) -> dict[str, Any]:
    asked = (query.get("rank", "0"), query.get("pool", ""), query["slot"])
    for rank, page in _pages(link):
        if asked == (str(rank), page.pool, str(page.start)):
            link.release_page(rank, page.pool, page.start)
            return {"status": "the page is given out again", "released": page}
    rank_pool_slot = "rank {}, pool {!r}, slot {!r}".format(*(value[:100] for value in asked))
    raise ApiError(404, f"{rank_pool_slot}: no page that is set aside begins there; see /quarantine")


def _runs(link: EngineLink) -> tuple[QuarantinedRun, ...]:
    link.require_engine()
    stats = [rank.reports.stats for rank in link.ranks if rank.reports.stats is not None]
    return tuple(run for each in stats for run in each.quarantine)


def _pages(link: EngineLink) -> list[tuple[int, SetAsidePage]]:
    link.require_engine()
    return [
        (number, page)
        for number, rank in enumerate(link.ranks)
        if rank.reports.stats is not None
        for page in rank.reports.stats.set_aside
    ]
