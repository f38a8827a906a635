"""Follows the KV events of nodes that publish them, for ``cache_aware``.

``health.py`` calls ``KvFollower.follow`` with each node that has become healthy. The node's /server_info says
where it publishes; a node that does not say so, or whose sockets the router cannot reach, is not followed.
What the subscriber's thread receives goes to the pool's ``KnownPages`` on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
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

    async def follow(self, node: Node) -> None:
        """Begin to follow a node, or begin anew, if it publishes events."""
        self._leave(node)
        try:
            info = await self._calls.get_document(node, "/server_info", INFO_TIMEOUT_SECS, _INFO_DECODER)
            config = KvEventsConfig.from_json(info.settings.kv_events_config)
            config.check_ranks(info.dp_size)
        except (NodeDocumentError, ValueError) as error:
            log.debug("%s does not say where it publishes KV events: %s", node.name, error)
            return
        if not config.is_on or not config.binds:
            return
        self._pages.follow(node, info.settings.page_size)
        self._followed[node] = [Place(node, rank) for rank in range(info.dp_size)]
        for place in self._followed[node]:
            self._subscriber.follow(place, _feed(config.of_rank(place.rank), node.host))
        log.info("following the KV events of %s", node.name)

    def close(self) -> None:
        self._subscriber.close()

    def _leave(self, node: Node) -> None:
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
