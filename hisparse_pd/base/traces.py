"""Opens this process's traces, if it makes any. What needs opentelemetry is in ``tracing.py``."""

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
    # Imported here: a process without traces does not pay for the import.
    from hisparse_pd.base.tracing import Tracer

    return Tracer(endpoint, service_name, instance, count, follows=follows)
