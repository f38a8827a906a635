"""The live page at ``/``: a few static files, the same for everybody, which need no API key.

The page asks ``/status`` once a second and sends prompts to ``/v1/chat/completions``. Both need a key if the
router has keys; the page keeps it in memory only. Nothing is loaded from other servers, and the
Content-Security-Policy lets the browser load nothing from them.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/prompt.js": ("prompt.js", "text/javascript; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The file of each path in the folder ``page``, and its media type."""

PAGE_PATHS = frozenset(_FILES)
"""Paths that ``server.py`` serves without an API key."""

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return one route for each file. The files are read here, once."""
    return [_route(path, name, media_type) for path, (name, media_type) in _FILES.items()]


def _route(path: str, name: str, media_type: str) -> Route:
    content = (files("hisparse_pd.router") / "page" / name).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return Route(path, serve, methods=["GET"])
