"""The nodes behind the router: which are healthy, how loaded each is, and which pair serves next.

``NodePool`` owns all of it. It runs no I/O; ``router.health`` reports what the nodes answer, and the
relay what happened to its requests.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from hisparse_pd.base.access import is_host
from hisparse_pd.base.settings import RouterPolicy, RouterSettings
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.router.errors import RouterError
from hisparse_pd.serving.http.prefixes import LOAD_BOUND, PrefixIndex, block_keys

log = logging.getLogger(__name__)

NUM_ROOMS = 1 << 63
LOAD_SLACK = 2
"""Requests beyond that: where there are few, a short wait costs less than computing a long prompt again."""

LEAVING = "it is shutting down"
"""The trouble of a node whose requests go on at another one of its kind, as soon as there is one."""


def draw_room(rank: int = 0, num_ranks: int = 1) -> int:
    """A random room of ``rank``, which is ``room % num_ranks``. All of them are equally likely."""
    return secrets.randbelow(NUM_ROOMS // num_ranks) * num_ranks + rank


class NodeKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def header(self) -> str:
        """Of an answer: it names the node of this kind that had the request."""
        return f"x-hisparse-pd-{self}"


@dataclass(eq=False)
class Node:
    """One node. Changed only by the pool that holds it."""

    kind: NodeKind
    url: str
    host: str
    bootstrap_port: int | None = None
    healthy: bool = False
    trouble: str = "not checked yet"
    num_in_flight: int = 0
    """Requests of this router that the node works on."""
    last_picked: int = field(default=-1, repr=False)
    moves: set[Callable[[], None]] = field(default_factory=set, repr=False)
    """What takes requests away that the node works on."""
    ranks: list[Rank] = field(init=False, repr=False)
    """What the pool chooses between: a prefill node's ranks under ``cache_aware``, else one for the node."""

    def __post_init__(self) -> None:
        self.ranks = [Rank(self, 0)]

    @classmethod
    def from_url(cls, kind: NodeKind, url: str, bootstrap_port: int | None = None) -> Node:
        """Raises StartError."""
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and is_host(parts.hostname or "") and parts.port != 0
            valid = valid and not (
                parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
            )
        except ValueError:
            valid = False
        if not valid:
            raise StartError(f"{kind} node {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        return cls(kind, url.rstrip("/"), parts.hostname or "", bootstrap_port)

    @property
    def name(self) -> str:
        return f"{self.kind} node {self.url}"


@dataclass(eq=False)
class Rank:
    """One of a node's engines, each with a prefix cache of its own. Changed only by the pool."""

    node: Node
    number: int
    num_in_flight: int = 0
    """Requests of this router that the rank works on, by their first room."""
    num_foreign: int = 0
    """Requests that it had beyond ours when its node last told its load."""
    last_picked: int = -1

    def draw_room(self) -> int:
        return draw_room(self.number, len(self.node.ranks))


@dataclass(frozen=True)
class Pair:
    """The nodes of a request. ``room``: its first prompt's, one of the rank that the pool chose."""

    prefill: Node
    decode: Node
    room: int

    @property
    def urls(self) -> dict[NodeKind, str]:
        return {node.kind: node.url for node in (self.prefill, self.decode)}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer, error or not, that tell an operator which nodes had the request."""
        return {kind.header: url for kind, url in self.urls.items()}


class NodePool:
    """All nodes of one router."""

    def __init__(self, prefill: list[Node], decode: list[Node], policy: RouterPolicy) -> None:
        self.nodes = [*prefill, *decode]
        self._policy = policy
        self._pick_number = itertools.count()
        self._prefixes: dict[NodeKind, PrefixIndex[Rank]] = {kind: PrefixIndex() for kind in NodeKind}
        """Where a prompt's beginning is: in a prefill rank's prefix cache, held by a decode node."""

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> NodePool:
        """Raises StartError."""
        prefill = [Node.from_url(NodeKind.PREFILL, url, port) for url, port in settings.prefill]
        decode = [Node.from_url(NodeKind.DECODE, url) for url in settings.decode]
        for name, times in Counter(node.name for node in (*prefill, *decode)).items():
            if times > 1:  # as the other node, to which what it has goes on when it leaves
                raise StartError(f"{name} is given {times} times; give it once")
        return cls(prefill, decode, settings.policy)

    def of_kind(self, kind: NodeKind) -> list[Node]:
        return [node for node in self.nodes if node.kind is kind]

    def healthy(self, kind: NodeKind) -> list[Node]:
        return [node for node in self.of_kind(kind) if node.healthy]

    def pick(self, excluded: Collection[Node] = (), prompt: bytes | memoryview = b"") -> Pair:
        """The nodes for the next request, ``prompt`` in any spelling that begins alike for like beginnings.

        Raises RouterError 503 when one of the kinds has no healthy node left.
        """
        keys = block_keys(prompt) if self._policy == "cache_aware" else []
        ranks = {kind: self._pick(kind, excluded, self._prefixes[kind].find(keys)) for kind in NodeKind}
        for kind, rank in ranks.items():
            self._prefixes[kind].note(keys, rank)
        prefill = ranks[NodeKind.PREFILL]
        return Pair(prefill.node, ranks[NodeKind.DECODE].node, prefill.draw_room())

    def has(self, kind: NodeKind, excluded: Collection[Node] = ()) -> bool:
        """Whether there is a healthy node of this kind."""
        return bool(self._candidates(kind, excluded))

    def has_pair(self, excluded: Collection[Node] = ()) -> bool:
        return all(self.has(kind, excluded) for kind in NodeKind)

    def no_healthy(self, kind: NodeKind) -> RouterError:
        """The error of a request that needs a node of this kind, where none is left for it."""
        states = "; ".join(f"{node.url}: {node.trouble or 'just failed'}" for node in self.of_kind(kind))
        return RouterError(503, f"no healthy {kind} node ({states}); try again later")

    @contextmanager
    def working(self, node: Node, room: int, move: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Counts a request of ours on ``node`` as long as it lasts; ``room``: its first prompt's.

        ``move``: called where the node leaves and there is another one, whenever either becomes known.
        """
        rank = node.ranks[room % len(node.ranks)]
        node.num_in_flight += 1
        rank.num_in_flight += 1
        node.moves.add(move)
        try:
            yield
        finally:
            node.moves.discard(move)
            node.num_in_flight -= 1
            rank.num_in_flight -= 1

    def mark_healthy(self, node: Node) -> None:
        if node.healthy:
            return
        log.info("%s is healthy", node.name)
        node.healthy, node.trouble = True, ""
        self._move_requests(node.kind)

    def mark_unhealthy(self, node: Node, trouble: str) -> None:
        if not node.healthy and node.trouble == trouble:
            return
        log.warning("%s is unhealthy: %s", node.name, trouble)
        if node.healthy:
            self._prefixes[node.kind].forget(node.ranks)
        node.healthy, node.trouble = False, trouble
        self._move_requests(node.kind)

    def report_load(self, node: Node, num_requests: Sequence[int]) -> None:
        """``num_requests``: running and waiting on each rank of the node, ours included."""
        if self._policy != "cache_aware" or node.kind is NodeKind.DECODE:
            num_requests = [sum(num_requests)]  # the node spreads them itself
        if len(num_requests) != len(node.ranks):
            self._prefixes[node.kind].forget(node.ranks)
            node.ranks = [Rank(node, number) for number in range(len(num_requests))]
        for rank, num in zip(node.ranks, num_requests, strict=True):
            rank.num_foreign = max(0, num - rank.num_in_flight)

    def _move_requests(self, kind: NodeKind) -> None:
        leaving = [node for node in self.of_kind(kind) if node.trouble == LEAVING]
        for node in leaving if self.has(kind) else ():
            for move in tuple(node.moves):
                move()

    def _candidates(self, kind: NodeKind, excluded: Collection[Node]) -> list[Node]:
        return [node for node in self.healthy(kind) if node not in excluded]

    def _pick(self, kind: NodeKind, excluded: Collection[Node], preferred: Rank | None = None) -> Rank:
        ranks = [rank for node in self._candidates(kind, excluded) for rank in node.ranks]
        if not ranks:
            raise self.no_healthy(kind)
        # Least recently picked is round-robin that survives nodes coming and going; it also breaks ties.
        picked = min(ranks, key=lambda rank: (self._load(rank), rank.node.last_picked, rank.last_picked))
        if preferred in ranks:
            mean = (sum(map(self._load, ranks)) + 1) / len(ranks)
            if self._load(preferred) < LOAD_BOUND * mean + LOAD_SLACK:
                picked = preferred
        picked.last_picked = picked.node.last_picked = next(self._pick_number)
        return picked

    def _load(self, rank: Rank) -> int:
        return 0 if self._policy == "round_robin" else rank.num_in_flight + rank.num_foreign
