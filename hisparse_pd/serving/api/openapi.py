"""Makes the OpenAPI document of the endpoints that take a body, from the bodies' declarations.

Decode nodes (``app.py``) and the router serve the same document: a router passes bodies on, with the
bootstrap fields added.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hisparse_pd.base.vocabulary import VERSION
from hisparse_pd.serving.api import anthropic_parts, bodies, body_parts, openai_parts, responses_parts
from hisparse_pd.serving.api.bodies import BODIES
from hisparse_pd.serving.http.http_errors import ErrorShape

OPENAPI_PATH = "/openapi.json"

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["message", "type", "code"],
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"], "description": "The path to the field at fault."},
        "code": {"type": "string"},
    },
}
_ERRORS = {
    "Error": {"type": "object", "required": ["error"], "properties": {"error": _ERROR}},
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {"type": {"const": "error"}, "error": _ERROR},
    },
}


@cache
def openapi_document() -> bytes:
    """Return the document, OpenAPI 3.1, as JSON."""
    modules = (bodies, body_parts, openai_parts, anthropic_parts, responses_parts)
    found = [value for module in modules for value in vars(module).values()]
    declared = {kind for kind in found if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
    in_order = sorted(declared, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(in_order, ref_template="#/components/schemas/{name}")
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "hisparse-pd",
            "version": VERSION,
            "description": "Fields that are not listed are ignored; null is the same as absent. Deprecated "
            "fields are not supported: values other than those listed are refused.",
        },
        "paths": {path: {"post": _operation(path, body.__name__)} for path, body in BODIES.items()},
        "components": {"schemas": schemas | _ERRORS},
    }
    return msgspec.json.encode(document)


async def show_openapi(request: Request) -> Response:
    """Answer with the document."""
    return Response(openapi_document(), media_type="application/json")


def _operation(path: str, body: str) -> dict[str, Any]:
    error = "AnthropicError" if ErrorShape.of_path(path) is ErrorShape.ANTHROPIC else "Error"
    return {
        "operationId": path.removeprefix("/").replace("/", "_"),
        "requestBody": {"required": True, "content": _json(body)},
        "responses": {
            "200": {
                "description": "The answer; with stream: true, as server-sent events.",
                "content": {"application/json": {}, "text/event-stream": {}},
            },
            "4XX": {
                "description": "The request is at fault: the message says where.",
                "content": _json(error),
            },
            "5XX": {"description": "The service is at fault.", "content": _json(error)},
        },
    }


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
