"""Asks bootstrap endpoints where prefill nodes are, in threads.

An answer is as old as its question. It says nothing of a run that was registered with since.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from hisparse_pd.base.access import PeerList
from hisparse_pd.decode_node.request import PeerAddress
from hisparse_pd.protocol.bootstrap import BootstrapInfo, BootstrapLookupError, look_up
from hisparse_pd.protocol.channels import ControlKeys

LOOKUP_RETRY_SECS = 0.5
_MAX_THREADS = 16
"""A host that drops packets holds one for seconds, again and again while it is wanted."""


@dataclass(frozen=True)
class Answer:
    """What an endpoint said, or why it did not."""

    instance_id: str
    """The run that was registered with when it was asked; empty: none."""
    info: BootstrapInfo | BootstrapLookupError


class Discovery:
    """The threads of all look-ups. ``on_answer`` is called in one of them whenever one is done."""

    def __init__(
        self, keys: ControlKeys | None, allowed: PeerList | None, on_answer: Callable[[], None]
    ) -> None:
        self._keys = keys
        self._allowed = allowed
        self._on_answer = on_answer
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="bootstrap-lookup")

    def ask(self, address: PeerAddress) -> Future[BootstrapInfo]:
        """The future raises BootstrapLookupError."""
        asked = self._threads.submit(look_up, *address.node, self._keys, self._allowed)
        asked.add_done_callback(lambda _: self._on_answer())
        return asked

    def close(self) -> None:
        """Without waiting for look-ups that are under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class LookUps:
    """The look-ups of one endpoint, with ``LOOKUP_RETRY_SECS`` between two."""

    def __init__(self, discovery: Discovery, address: PeerAddress) -> None:
        self._discovery = discovery
        self._address = address
        self._future: Future[BootstrapInfo] | None = None
        self._instance_id = ""
        self._next_at = 0.0

    @property
    def is_under_way(self) -> bool:
        """Until its answer is taken."""
        return self._future is not None

    def ask(self, now: float, instance_id: str) -> None:
        """Unless one is under way, or the last one was just now."""
        if self._future is None and now >= self._next_at:
            self._instance_id = instance_id
            self._future = self._discovery.ask(self._address)

    def take(self, now: float) -> Answer | None:
        """The answer, once, when it is there."""
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        self._next_at = now + LOOKUP_RETRY_SECS
        try:
            info: BootstrapInfo | BootstrapLookupError = future.result()
        except BootstrapLookupError as error:
            info = error
        return Answer(self._instance_id, info)
