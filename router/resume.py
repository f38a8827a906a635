"""What bounds the way of one request when its decode nodes are lost: how many may be, and for how long
another pair is looked for."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from hisparse_pd.router.errors import RouterError

MAX_LOSSES = 3
"""Decode nodes that one request may lose; a node that leaves in order is not lost."""

_FIRST_PAUSES_SECS = (0.0, 0.1, 0.2, 0.4)
_LAST_PAUSE_SECS = 0.8
"""Pauses between two looks for a pair that goes on with a request."""


@dataclass
class Losses:
    """The decode nodes that were lost with one request."""

    nodes: list[str] = field(default_factory=list)
    _num_records: int = -1
    """Records that the journal had when the last one was lost."""

    def add(self, node: str, num_records: int) -> str:
        """Note another loss. Returns why the request goes to no further node, or nothing."""
        self.nodes.append(node)
        in_a_row = num_records == self._num_records
        self._num_records = num_records
        if in_a_row:
            return f"{self.nodes[-2]} and {node} were lost with this request, one after the other"
        if len(self.nodes) > MAX_LOSSES:
            return f"{len(self.nodes)} decode nodes were lost with this request"
        return ""


class Search:
    """The search for another pair, since a decode node was lost or left; ``error`` says which, and why."""

    def __init__(self, reason: str, timeout_secs: float, error: RouterError) -> None:
        self.reason = reason
        self.error = error
        self.began_at = asyncio.get_running_loop().time()
        self._ends_at = self.began_at + timeout_secs
        self._pauses = itertools.chain(_FIRST_PAUSES_SECS, itertools.repeat(_LAST_PAUSE_SECS))

    @property
    def is_late(self) -> bool:
        return asyncio.get_running_loop().time() >= self._ends_at

    async def pause(self) -> None:
        await asyncio.sleep(next(self._pauses))
