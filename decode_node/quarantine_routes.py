"""The decode node's endpoints about its quarantine: what is kept for whom, and the word that it is over.

A room that a prefill node was given keeps its slots until that run says that nothing of it is in flight, or
is known to be over. A machine that vanishes does neither, and time proves nothing: somebody has to say it.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hisparse_pd.api.models import json_response
from hisparse_pd.engine.messages import QuarantinedRun
from hisparse_pd.http.engine_link import EngineLink
from hisparse_pd.http.http_errors import ApiError


def quarantine_routes(link: EngineLink) -> list[Route]:
    """``GET /quarantine`` and ``POST /release_quarantine?instance_id=``. Raise ApiError."""

    async def show(request: Request) -> Response:
        return json_response(_runs(link))

    async def release(request: Request) -> Response:
        instance_id = request.query_params.get("instance_id", "")
        if not instance_id:
            raise ApiError(400, "instance_id: missing; /quarantine has those that slots are kept for")
        run = next((run for run in _runs(link) if run.instance_id == instance_id), None)
        if run is None:
            raise ApiError(
                404, f"instance_id: nothing is kept for run {instance_id[:100]!r}; see /quarantine"
            )
        link.release_quarantine(instance_id)
        status = "its slots are free after quarantine_secs, unless it answers: see /quarantine and the log"
        return json_response({"status": status, "released": run})

    return [
        Route("/quarantine", show, methods=["GET"]),
        Route("/release_quarantine", release, methods=["POST"]),
    ]


def _runs(link: EngineLink) -> tuple[QuarantinedRun, ...]:
    link.require_engine()
    return tuple(run for rank in link.ranks if rank.stats is not None for run in rank.stats.quarantine)
