"""Watches the nodes: asks each for its health, and for its load where the policy needs it.

``server.py`` starts and stops one ``HealthWatch`` with the application; the relay calls ``check`` when a
request needs news of a node. Outcomes go to the ``NodePool``. A node that does not answer is asked more often
than a healthy one, so that it is soon used again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.base.vocabulary import MAX_RANKS
from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.router.kv_follower import KvFollower
from hisparse_pd.router.local_faults import local_fault
from hisparse_pd.router.node_calls import NodeCalls, NodeDocumentError
from hisparse_pd.router.nodes import LEAVING, LEFT, Node, NodePool

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_SECS = 5.0
RECOVERY_INTERVAL_SECS = 1.0
"""Interval of the checks of an unhealthy node, unless healthy ones are checked more often."""
TIMEOUTS_BEFORE_UNHEALTHY = 2
"""Timeouts in a row after which a node is unhealthy: one slow answer on a busy machine must not take it
out. A row is of successive checks of the node that all timed out. Any other outcome ends it, also a fault of
the router's own machine: what is short there may have been the cause of the timeout before it."""
LOADS_MISSED_BEFORE_UNKNOWN = 2
"""Healthy checks in a row without a load after which a node's last load counts no more. Otherwise a node that
stops reporting would be avoided for ever because of what it had then."""

LOADING = "it loads its model"
"""The ``trouble`` of a node that will become healthy by itself."""
_TROUBLES = {"loading": LOADING, "leaving": LEAVING}
"""A node's trouble, by the ``status`` in its unhealthy answer."""


class _Health(msgspec.Struct):
    status: str = ""
    role: str = ""
    """Kind of a healthy node; empty for a release that does not say it."""


class _Load(msgspec.Struct):
    num_reqs: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """Bounded, because no mean can be computed with an integer of any size."""
    dp_rank: int | None = None


_LOAD_DECODER: TypedDecoder[list[_Load] | _Load] = TypedDecoder.json(list[_Load] | _Load)
_HEALTH_DECODER: TypedDecoder[_Health] = TypedDecoder.json(_Health)


class HealthWatch:
    """Checks each node in a task of its own. ``start`` returns after the first round of checks."""

    def __init__(
        self,
        pool: NodePool,
        calls: NodeCalls,
        interval_secs: float,
        *,
        with_load: bool,
        follows_events: bool = False,
    ) -> None:
        """``follows_events``: whether the nodes' KV events are followed, from ``start`` on."""
        self._pool = pool
        self._follows_events = follows_events
        self._follower: KvFollower | None = None
        self._calls = calls
        self._interval_secs = interval_secs
        self._with_load = with_load
        self._num_timeouts: Counter[Node] = Counter()
        """Health checks in a row that timed out."""
        self._num_loads_missed: Counter[Node] = Counter()
        """Healthy checks in a row without a load."""
        self._tasks: list[asyncio.Task[None]] = []
        self._logged = LogLimiter()

    async def start(self) -> None:
        if self._follows_events:
            self._follower = KvFollower(self._pool.known, self._calls)
        await asyncio.gather(*(self.check(node) for node in self._pool.nodes))
        self._tasks = [asyncio.create_task(self._watch(node)) for node in self._pool.nodes]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._follower is not None:
            self._follower.close()

    async def check(self, node: Node) -> None:
        """Check one node, and report the outcome to the pool. Several checks of a node may run at a time."""
        num_before = self._num_timeouts[node]
        try:
            status, body = await self._calls.get(node, "/health", HEALTH_TIMEOUT_SECS)
        except TimeoutError:
            num_timeouts = _add_to_row(self._num_timeouts, node, num_before)
            # A node that is unhealthy already gets this as its newest trouble.
            if num_timeouts >= TIMEOUTS_BEFORE_UNHEALTHY or not node.healthy:
                self._pool.mark_unhealthy(node, f"no answer to /health in {HEALTH_TIMEOUT_SECS:g} s")
            return
        except OSError as error:
            self._num_timeouts[node] = 0
            if (fault := local_fault(error)) is not None:  # the router is to blame, not the node
                log.warning("%s was not asked for its health: %s", node.name, fault)
            else:
                has_left = node.trouble in (LEAVING, LEFT)
                trouble = LEFT if has_left else f"/health: {error or type(error).__name__}"
                self._pool.mark_unhealthy(node, trouble)
            return
        self._num_timeouts[node] = 0
        health = _decode_health(body)
        if not 200 <= status < 300:
            self._pool.mark_unhealthy(node, _TROUBLES.get(health.status, f"/health answered {status}"))
            return
        if health.role not in ("", node.kind):
            self._pool.mark_unhealthy(node, f"it is a {health.role} node: name it with --{health.role}")
            return
        was_healthy = node.healthy
        self._pool.mark_healthy(node)
        if self._follower is not None and not was_healthy:
            await self._follower.follow(node)
        if self._with_load:
            await self._ask_load(node)

    async def _ask_load(self, node: Node) -> None:
        num_before = self._num_loads_missed[node]
        try:
            load = await self._calls.get_document(node, "/get_load", HEALTH_TIMEOUT_SECS, _LOAD_DECODER)
        except NodeDocumentError as error:
            log.debug("%s did not report its load: %s", node.name, error)
            if _add_to_row(self._num_loads_missed, node, num_before) >= LOADS_MISSED_BEFORE_UNKNOWN:
                self._pool.forget_load(node)
            return
        self._num_loads_missed[node] = 0
        self._pool.report_load(node, _by_rank(load if isinstance(load, list) else [load]))

    async def _watch(self, node: Node) -> None:
        while True:
            recovery_secs = min(self._interval_secs, RECOVERY_INTERVAL_SECS)
            await asyncio.sleep(self._interval_secs if node.healthy else recovery_secs)
            try:
                await self.check(node)
            except Exception:  # the router's own fault; without this task nobody would check the node again
                self._num_timeouts[node] = 0
                if self._logged.permits(node):
                    log.exception(
                        "the health check of %s failed in the router itself; the node stays %s until a check "
                        "succeeds. If this line comes again, report it and restart the router",
                        node.name,
                        "healthy" if node.healthy else "unhealthy",
                    )


def _add_to_row(nums: Counter[Node], node: Node, num_before: int) -> int:
    """Count a failed check of a node, and return how many there are in a row.

    ``num_before``: the count when the check began. Checks at the same time are one in the row, and a success
    of any of them has ended the row.
    """
    nums[node] = min(num_before, nums[node]) + 1
    return nums[node]


def _by_rank(loads: Sequence[_Load]) -> list[int]:
    """Return the requests of each rank. A node whose entries do not name ranks 0, 1, … counts as one rank."""
    num_by_rank = {load.dp_rank: load.num_reqs for load in loads}
    if 0 < len(loads) <= MAX_RANKS and set(num_by_rank) == set(range(len(loads))):
        return [num_by_rank[rank] for rank in range(len(loads))]
    return [sum(load.num_reqs for load in loads)]


def _decode_health(body: bytes) -> _Health:
    try:
        return _HEALTH_DECODER.decode(body)
    except msgspec.MsgspecError:
        return _Health()
