"""Opens the tracer of a decode node's front or of the router, if traces are on.

``hisparse_pd/serving/api/app.py`` and ``router/server.py`` call ``open_tracer`` once. This module is apart
from ``tracing.py`` so that only processes with traces import opentelemetry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hisparse_pd.base.tracing import Tracer


def open_tracer(
    endpoint: str,
    service_name: str,
    instance: str,
    count: Callable[[str, int], None],
    *,
    follows: bool = True,
) -> Tracer | None:
    """Make a ``Tracer``; None without an ``endpoint``. Raises StartError.

    ``count`` is called with an outcome of spans and their number. ``follows``: whether a caller's decision to
    record a trace counts; false where callers are clients. ``Tracer`` explains all arguments.
    """
    if not endpoint:
        return None
    from hisparse_pd.base.tracing import Tracer

    return Tracer(endpoint, service_name, instance, count, follows=follows)
