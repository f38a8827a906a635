"""Opens the tracer of a decode node's front or of the router, if traces are on.

It is apart from ``tracing.py``, which imports opentelemetry, so that processes without traces do not.
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
    """Make a ``Tracer``, which takes the same arguments; None without an ``endpoint``. Raises StartError."""
    if not endpoint:
        return None
    # Imported here so that a process without traces does not pay for it.
    from hisparse_pd.base.tracing import Tracer

    return Tracer(endpoint, service_name, instance, count, follows=follows)
