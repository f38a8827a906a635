"""One try of a request at one pair of nodes. ``relay.py`` makes one after the other until a node answers, and
further ones when a stream loses its node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

from hisparse_pd.router.connect import Call
from hisparse_pd.router.node_calls import NodeAnswer
from hisparse_pd.router.nodes import NodePool, Pair


class Attempt:
    """A request at one pair: the call to the decode node, and the request's part in that node's load.

    When the decode node shuts down, the pool calls ``_move``. It closes the call; the relay sees the call
    fail, and goes on at another pair.
    """

    answer: NodeAnswer
    """The decode node's answer; set once its first bytes are here."""

    def __init__(self, pair: Pair, call: Call, pool: NodePool, can_resume: Callable[[], bool]) -> None:
        """``can_resume``: whether another pair could go on with the request if this one ended now."""
        self.pair = pair
        self.call = call
        self.is_movable = True
        """Set by the relay: False once the client has a part of an answer that is not journaled."""
        self.was_moved = False
        """Whether the router closed the call because the decode node shuts down."""
        self._can_resume = can_resume
        self._held = ExitStack()
        """The call, and the request's part in the decode node's load; both end with the attempt."""
        self._held.enter_context(closing(call))
        self._held.enter_context(pool.working(pair.decode, pair.room, self._move))

    def close(self) -> None:
        """End the call. May be called twice."""
        self._held.close()

    def _move(self) -> None:
        """Called by the pool when the decode node shuts down and another one is healthy."""
        if self.is_movable and self._can_resume():
            self.was_moved = True
            self.call.close()
