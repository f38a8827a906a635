"""Retries of one request: which nodes it avoids after a failure, how often and for how long it tries others.

Each ``RelayedRequest`` (``relay.py``) owns a ``Route``, and reports to it every failure and the success that
ends a search. The relay makes the tries; this module only decides.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from hisparse_pd.base.vocabulary import ENGINE_LOST, MOVED, PREFILL_NODE_FAILED
from hisparse_pd.router.errors import NodeFailed, NodeRefused, NodeUnreachable, RouterError, StreamEnded
from hisparse_pd.router.nodes import LEAVING, Node, NodePool, Pair

MAX_LOSSES = 3
"""Decode nodes that one request may lose; a node that leaves in order is not lost."""

_FIRST_PAUSES_SECS = (0.0, 0.1, 0.2, 0.4)
"""Pauses after the first tries of a search."""
_LAST_PAUSE_SECS = 0.8
"""Pause after each further try."""

_QUEUE_FULL, _SERVER_ERROR, _BAD_GATEWAY, _UNAVAILABLE = 429, 500, 502, 503


class Failure(Enum):
    """The meaning of a pair's error for its nodes."""

    DECODE_LOST = auto()
    """The decode node died, broke off, fell silent or failed."""
    DECODE_LEAVING = auto()
    """The decode node shuts down, and its requests move to another one."""
    DECODE_UNREACHABLE = auto()
    """No connection to the decode node could be made."""
    DECODE_BUSY = auto()
    """The decode node is not ready, or its queue is full."""
    PREFILL_FAILED = auto()
    TRANSFER_FAILED = auto()
    """The prefill node could not write its KV; the connection alone may be at fault."""
    NOT_THE_PAIR = auto()
    """Another pair would answer the same, or could not be asked either."""

    @classmethod
    def of(cls, error: RouterError) -> Failure:
        """Classify an error of the relay."""
        match error:
            case NodeUnreachable():
                return cls.DECODE_UNREACHABLE
            case StreamEnded() if error.node_code == PREFILL_NODE_FAILED:
                return cls.PREFILL_FAILED
            case NodeFailed():
                return cls.DECODE_LOST
            case NodeRefused():
                return cls._of_refusal(error.status, error.node_code)
        return cls.NOT_THE_PAIR

    @classmethod
    def _of_refusal(cls, status: int, code: object) -> Failure:
        """Classify a decode node's answer with an error ``status`` and the error's ``code``."""
        if status == _BAD_GATEWAY:
            return cls.TRANSFER_FAILED
        if code == PREFILL_NODE_FAILED:
            return cls.PREFILL_FAILED
        if code == MOVED:
            return cls.DECODE_LEAVING
        if code == ENGINE_LOST or status == _SERVER_ERROR:
            return cls.DECODE_LOST
        return cls.DECODE_BUSY if status in (_UNAVAILABLE, _QUEUE_FULL) else cls.NOT_THE_PAIR


@dataclass
class Losses:
    """The decode nodes that were lost with one request."""

    nodes: list[str] = field(default_factory=list)
    _num_records: int = -1
    """Records that the journal had when the last node was lost; -1 before."""

    def add(self, node: str, num_records: int) -> str:
        """Record a lost node. Returns why not to retry, or an empty string."""
        self.nodes.append(node)
        was_without_progress = num_records == self._num_records
        self._num_records = num_records
        if was_without_progress:  # the request itself may kill nodes
            return f"{self.nodes[-2]} and {node} were lost with this request, one after the other"
        if len(self.nodes) > MAX_LOSSES:
            return f"{len(self.nodes)} decode nodes were lost with this request"
        return ""


class Search:
    """The search for another pair after a decode node was lost or left; ``error`` says which, and why."""

    def __init__(self, reason: str, timeout_secs: float, error: RouterError) -> None:
        """``reason``: "lost" or "moved", as the metrics count it."""
        self.reason = reason
        self.error = error
        self.began_at = asyncio.get_running_loop().time()
        self._ends_at = self.began_at + timeout_secs
        self._pauses = itertools.chain(_FIRST_PAUSES_SECS, itertools.repeat(_LAST_PAUSE_SECS))

    @property
    def is_late(self) -> bool:
        """Whether the time for the search is over."""
        return asyncio.get_running_loop().time() >= self._ends_at

    async def pause(self) -> None:
        await asyncio.sleep(next(self._pauses))


class Route:
    """Decides whether one request goes to another pair after a failure, and which nodes it avoids there.

    A request is retried at most ``max_retries`` times. After the loss of a decode node it searches for
    another pair for ``resume_timeout_secs`` instead, with as many tries as fit into that time. A pair that
    fails behind that time is retried as any other. The relay calls ``leave_decode_node`` for ``DECODE_LOST``
    and ``DECODE_LEAVING``, and ``retry`` for other failures.
    """

    def __init__(self, pool: NodePool, max_retries: int, resume_timeout_secs: float) -> None:
        self.avoided: Collection[Node] = frozenset()
        """Nodes that failed with this request, since it last left a decode node or ended a search."""
        self.num_retries = 0
        """Calls of ``retry`` that allowed another try. Those within a search count, too: they use up
        ``max_retries`` for failures after it."""
        self.search: Search | None = None
        """The search under way."""
        self._num_ended_searches = 0
        self._losses = Losses()
        self._pool = pool
        self._max_retries = max_retries
        self._resume_timeout_secs = resume_timeout_secs

    @property
    def num_resumes(self) -> int:
        """How often another decode node took the request over, or is to take it over now."""
        return self._num_ended_searches + (self.search is not None)

    def retry(self, error: RouterError, failure: Failure, pair: Pair) -> None:
        """Avoid the node that failed from now on. Raises ``error`` if the request must not be sent again."""
        match failure:
            case Failure.DECODE_UNREACHABLE:
                self._pool.mark_unreachable(pair.decode, str(error))
                avoided = {*self.avoided, pair.decode}
            case Failure.DECODE_BUSY:
                avoided = {*self.avoided, pair.decode}
            case Failure.PREFILL_FAILED | Failure.TRANSFER_FAILED:
                avoided = {*self.avoided, pair.prefill}
            case _:
                raise error
        # If there is no other prefill node, the same one may try a failed write again.
        if failure is not Failure.TRANSFER_FAILED or self._pool.has_pair(avoided):
            self.avoided = avoided
        # A pair may compute for longer than a search may take, and fail then: this is no longer the search.
        is_searching = self.search is not None and not self.search.is_late
        may_retry = self.num_retries < self._max_retries and self._pool.has_pair(self.avoided)
        if not (is_searching or may_retry):
            raise error
        self.num_retries += 1

    def leave_decode_node(
        self, error: RouterError, node: Node, *, is_leaving: bool, num_records: int
    ) -> None:
        """Search for another pair, since ``node`` is lost or shuts down.

        ``num_records``: how many records the request's journal has. Raises RouterError if the request ends.
        """
        if is_leaving:
            self._pool.mark_unhealthy(node, LEAVING)
        elif why := self._losses.add(node.url, num_records):
            raise RouterError(502, f"{why}; it is not sent to another one: {error}") from error
        if not self._resume_timeout_secs:
            raise error
        self.avoided = {node}
        if self.search is None:
            self.search = Search("moved" if is_leaving else "lost", self._resume_timeout_secs, error)

    def end_search(self) -> Search | None:
        """End the search, since a pair has answered. Returns it, or None if there was none."""
        ended = self.search
        if ended is not None:
            self.search, self.avoided = None, frozenset()
            self._num_ended_searches += 1
        return ended
