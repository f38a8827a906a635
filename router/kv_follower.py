"""Follows the KV events of nodes that publish them, for ``cache_aware``.

``health.py`` calls ``KvFollower.follow`` with each node that has become healthy. The node's /server_info says
where it publishes; a node that does not say so, or whose sockets the router cannot reach, is not followed.
A node that does not answer is asked again, as long as it is healthy. What the subscriber's thread receives
goes to the pool's ``KnownPages`` on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from msgspec import Meta, Struct, field

from hisparse_pd.base.access import in_url
from hisparse_pd.base.kv_events_config import KvEventsConfig
from hisparse_pd.base.vocabulary import MAX_RANKS
from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.protocol.kv_event_subscriber import Feed, KvEventSubscriber
from hisparse_pd.protocol.kv_events import BlockChange
from hisparse_pd.router.known_pages import KnownPages, Place
from hisparse_pd.router.node_calls import NodeCalls, NodeDocumentError
from hisparse_pd.router.nodes import Node

log = logging.getLogger(__name__)

INFO_TIMEOUT_SECS = 5.0
FIRST_PAUSE_SECS = 1.0
"""Pause before a node that did not answer is asked again; each further pause is twice as long."""
MAX_PAUSE_SECS = 64.0
"""Longest pause. A node of another release may have no such document."""


class _Settings(Struct):
    kv_events_config: str = ""
    page_size: Annotated[int, Meta(ge=1)] = 1


class _ServerInfo(Struct):
    dp_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    settings: _Settings = field(default_factory=_Settings)


_INFO_DECODER: TypedDecoder[_ServerInfo] = TypedDecoder.json(_ServerInfo)


class KvFollower:
    """Keeps ``pages`` up to date. Use it on one event loop, and close it there."""

    def __init__(self, pages: KnownPages[Node], calls: NodeCalls) -> None:
        self._pages = pages
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._subscriber: KvEventSubscriber[Place[Node]] = KvEventSubscriber(self._on_changes, self._on_lost)
        self._followed: dict[Node, list[Place[Node]]] = {}
        self._asking: dict[Node, asyncio.Task[None]] = {}
        """The task that asks each node where it publishes, until the node answers."""

    async def follow(self, node: Node) -> None:
        """Begin to follow a node, or begin anew, if it publishes events. Returns after its first answer, or
        failure to answer."""
        self._leave(node)
        is_asked = asyncio.Event()
        self._asking[node] = asyncio.create_task(self._ask_until_answer(node, is_asked))
        await is_asked.wait()

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        self._subscriber.close()

    async def _ask_until_answer(self, node: Node, is_asked: asyncio.Event) -> None:
        """Ask a node until it answers. Once it is unhealthy, ``follow`` begins anew when it recovers.
        ``is_asked``: set when the node has answered the first time, or has failed to."""
        try:
            if await self._ask(node):
                return
        finally:
            is_asked.set()
        for secs in _pauses_secs():
            await asyncio.sleep(secs)
            if not node.healthy or await self._ask(node):
                return

    async def _ask(self, node: Node) -> bool:
        """Ask a node where it publishes, and follow it if it says so. Returns whether it answered."""
        try:
            info = await self._calls.get_document(node, "/server_info", INFO_TIMEOUT_SECS, _INFO_DECODER)
        except NodeDocumentError as error:
            log.debug("%s does not say whether it publishes KV events: %s", node.name, error)
            return False
        try:
            config = KvEventsConfig.from_json(info.settings.kv_events_config)
            config.check_ranks(info.dp_size)
        except ValueError as error:
            log.debug("%s does not say where it publishes KV events: %s", node.name, error)
            return True
        if config.is_on and config.binds:
            self._follow(node, config, info)
        return True

    def _follow(self, node: Node, config: KvEventsConfig, info: _ServerInfo) -> None:
        self._pages.follow(node, info.settings.page_size)
        self._followed[node] = [Place(node, rank) for rank in range(info.dp_size)]
        for place in self._followed[node]:
            self._subscriber.follow(place, _feed(config.of_rank(place.rank), node.host))
        log.info("following the KV events of %s", node.name)

    def _leave(self, node: Node) -> None:
        if (asking := self._asking.pop(node, None)) is not None:
            asking.cancel()
        self._pages.leave(node)
        for place in self._followed.pop(node, ()):
            self._subscriber.leave(place)

    # --- the subscriber's thread -------------------------------------------------------------------------

    def _on_changes(self, place: Place[Node], changes: Sequence[BlockChange]) -> None:
        self._on_loop(lambda: self._pages.change(place, changes))

    def _on_lost(self, place: Place[Node]) -> None:
        self._on_loop(lambda: self._pages.forget(place))

    def _on_loop(self, note: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(note)
        except RuntimeError:  # the loop has ended
            return


def _pauses_secs() -> Iterator[float]:
    """Yield the pauses between two questions to a node that does not answer, without end."""
    secs = FIRST_PAUSE_SECS
    while True:
        yield secs
        secs = min(2 * secs, MAX_PAUSE_SECS)


def _feed(config: KvEventsConfig, host: str) -> Feed:
    """Return the addresses of a rank that binds its sockets, as they are from here."""
    replay = config.replay_endpoint
    return Feed(_reachable(config.endpoint, host), replay and _reachable(replay, host), config.topic)


def _reachable(endpoint: str, host: str) -> str:
    """Return an endpoint with ``host`` for a wildcard."""
    scheme, _, rest = endpoint.partition("://")
    bound, _, port = rest.rpartition(":")
    if scheme != "tcp" or bound not in ("*", "[::]", "[*]", "0.0.0.0"):
        return endpoint
    return f"tcp://{in_url(host)}:{port}"
