"""Middleware that protects nodes and the router from web pages, for instance in a browser on the same
machine.

Nodes (``node_app.py``) and the router put ``GuardFromPages`` before their endpoints. A browser sends a page's
POST to any address if its content type is a form's or plain text. The page cannot read the answer, but the
request has its effect. Only before it sends JSON to another origin does a browser ask the service whether the
page may (a CORS preflight). A page whose host name resolves to the service's address counts as the same
origin, and the browser does not ask: paths that change a node's state are therefore closed to all pages.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from hisparse_pd.serving.http.http_errors import ApiError, ErrorShape, shown

_SENT_BY_BROWSERS = (b"origin", b"sec-fetch-site")
"""Headers that browsers add to every POST, and that pages cannot leave out. Programs send neither."""


class GuardFromPages:
    """ASGI middleware that answers a page's POST with 415 if it is not JSON, and with 403 on
    ``closed_paths``."""

    def __init__(self, app: ASGIApp, closed_paths: Collection[str] = ()) -> None:
        self._app = app
        self._closed_paths = closed_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and (error := self._why_refused(scope)):
            return await error.response(shape=ErrorShape.of_path(scope["path"]))(scope, receive, send)
        return await self._app(scope, receive, send)

    def _why_refused(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        if not any(name in headers for name in _SENT_BY_BROWSERS):
            return None
        if scope["path"] in self._closed_paths:
            origin = shown(headers.get(b"origin", b"").decode("latin-1"))
            return ApiError(
                403,
                f"a page in a browser asks for {scope['path']} (origin {origin}), which pages may not; "
                "use a program, such as curl, that sends neither Origin nor Sec-Fetch-Site",
            )
        content_type = headers.get(b"content-type", b"").decode("latin-1")
        if content_type.partition(";")[0].strip().lower() == "application/json":
            return None
        return ApiError(
            415,
            f"content-type: {shown(content_type)} comes from a page in a browser, whose requests must have "
            "application/json, so that the browser asks whether the page may send them",
        )
