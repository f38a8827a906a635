"""Answers ``/version``, and ``/v1/models`` in OpenAI's form or, for Anthropic's client, in Anthropic's.

``node_app.py`` calls it on nodes, ``router/server.py`` and ``router/fleet.py`` on the router.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hisparse_pd.base.vocabulary import VERSION
from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape, cut

MODELS_PATH = "/v1/models"
MODEL_PATH = "/v1/models/{model:path}"

_ANTHROPIC_HEADER = "anthropic-version"
"""Header by which a request of Anthropic's client is told from OpenAI's, since both have the same path."""


def show_models(request: Request, models: Sequence[Mapping[str, object]]) -> Response:
    """Answer with all ``models``, which are given in OpenAI's form, or with the one that the path names; 404
    if none has that name."""
    for_anthropic = _ANTHROPIC_HEADER in request.headers
    shown = [_as_anthropic(model) for model in models] if for_anthropic else models
    name = request.path_params.get("model")
    if name is None:
        return json_response(_anthropic_page(shown) if for_anthropic else {"object": "list", "data": shown})
    for model in shown:
        if model["id"] == name:
            return json_response(model)
    served = ", ".join(repr(model["id"]) for model in shown)
    error = ApiError(
        404,
        f"model: {cut(name)!r} does not exist here; served are {served}",
        param="model",
        code="model_not_found",
    )
    return error.response(shape=ErrorShape.ANTHROPIC if for_anthropic else ErrorShape.OPENAI)


def _as_anthropic(model: Mapping[str, object]) -> Mapping[str, object]:
    created = model.get("created")
    created_at = datetime.fromtimestamp(
        created if isinstance(created, int) and 0 <= created < 1 << 32 else 0, UTC
    )
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": f"{created_at:%Y-%m-%dT%H:%M:%SZ}",
    }


def _anthropic_page(models: Sequence[Mapping[str, object]]) -> dict[str, object]:
    ids = [model["id"] for model in models]
    return {
        "data": models,
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }


async def show_version(request: Request) -> Response:
    """Answer ``/version``."""
    return json_response({"version": VERSION})


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
