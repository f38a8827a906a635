"""Looks prefill nodes up at their bootstrap endpoints, in threads beside the engine's loop.

``Discovery`` gives the look-ups of one engine to its threads, which take them in the order of
``lookup_times.py``. Each peer of ``PrefillPeers`` has ``LookUps``, which asks its endpoint from time to time
and keeps at most one result. ``instance_id`` names one run of a prefill node, from its start to its end. A
result is as old as the beginning of its look-up: it says nothing about a run with which this node has
registered since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from hisparse_pd.base.access import PeerList
from hisparse_pd.base.call_threads import CallThreads
from hisparse_pd.decode_node.lookup_times import Endpoint, LookUpTimes
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.protocol.bootstrap import BootstrapInfo, BootstrapLookupError, look_up
from hisparse_pd.protocol.channels import ControlKeys

log = logging.getLogger(__name__)

LOOKUP_RETRY_SECS = 0.5
"""Time between two look-ups of one endpoint."""
MAX_THREADS = 64
"""Most look-ups at a time."""


@dataclass(frozen=True)
class LookUpResult:
    """The result of one look-up."""

    instance_id: str
    """The run with which this node was registered when the look-up began; empty for none."""
    info: BootstrapInfo | BootstrapLookupError
    """The endpoint's answer, or why there is none."""


class Discovery:
    """Owns the threads of all look-ups. ``on_answer`` wakes the engine's loop; it is called at the end of
    each look-up, in any thread."""

    def __init__(
        self, keys: ControlKeys | None, allowed: PeerList | None, on_answer: Callable[[], None]
    ) -> None:
        self._keys = keys
        self._allowed = allowed
        self._on_answer = on_answer
        self._times = LookUpTimes()
        self._threads: CallThreads[Endpoint] = CallThreads(
            MAX_THREADS, "bootstrap-lookup", self._times.fastest
        )

    def ask(self, address: PeerAddress) -> Future[BootstrapInfo]:
        """Begin a look-up. Its future raises BootstrapLookupError."""
        try:
            ask = partial(look_up, *address.node, self._keys, self._allowed)
            future = self._threads.submit(address.node, self._times.measured, address.node, ask)
        except RuntimeError as error:  # this process, or its container, has as many threads as it may
            future = Future()
            future.set_exception(BootstrapLookupError(f"no thread looks {address} up: {error}"))
        future.add_done_callback(lambda _: self._on_answer())
        return future

    def close(self) -> None:
        """End the threads, without waiting for look-ups that are under way."""
        self._threads.close(wait=False)


class LookUps:
    """Makes the look-ups of one endpoint, with ``LOOKUP_RETRY_SECS`` between two."""

    def __init__(self, discovery: Discovery, address: PeerAddress) -> None:
        self._discovery = discovery
        self._address = address
        self._future: Future[BootstrapInfo] | None = None
        """The look-up that was begun last, until its result is taken."""
        self._instance_id = ""
        """The run with which this node was registered when the look-up began."""
        self._next_at = 0.0
        """The earliest time of the next look-up."""

    def give_up(self) -> bool:
        """Drop a look-up that no thread has begun. Returns whether none is under way then."""
        if self._future is not None and self._future.cancel():
            self._future = None
        return self._future is None

    def ask(self, now: float, instance_id: str) -> None:
        """Begin a look-up, unless one is under way or the last result was taken just now. ``instance_id``:
        the run with which this node is registered, if any."""
        if self._future is None and now >= self._next_at:
            self._instance_id = instance_id
            self._future = self._discovery.ask(self._address)

    def take(self, now: float) -> LookUpResult | None:
        """Return the result of a finished look-up, once; None otherwise."""
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        self._next_at = now + LOOKUP_RETRY_SECS
        try:
            info: BootstrapInfo | BootstrapLookupError = future.result()
        except BootstrapLookupError as error:
            info = error
        except Exception as error:  # it ends this look-up, and not the engine, whose thread this is
            log.exception("the look-up of prefill node %s failed", self._address)
            info = BootstrapLookupError(f"prefill node {self._address}: {type(error).__name__}: {error}")
        return LookUpResult(self._instance_id, info)
