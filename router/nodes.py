"""The nodes behind the router: which are healthy, how loaded each is, and which pair serves next.

``NodePool`` owns all of this and does no I/O. The relay picks a pair for each request and counts the request
with ``working``; ``health.py`` reports what nodes answer to checks, and the relay which nodes it could not
reach or lost.
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
from hisparse_pd.base.router_settings import RouterPolicy, RouterSettings
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.router.errors import RouterError
from hisparse_pd.router.known_pages import KnownPages
from hisparse_pd.serving.http.page_names import PageNames
from hisparse_pd.serving.http.prefixes import LOAD_BOUND, PrefixIndex, block_keys

log = logging.getLogger(__name__)

NUM_ROOMS = 1 << 63
"""Rooms are the numbers below this one."""
LOAD_SLACK = 2
"""Requests that a preferred rank may have above LOAD_BOUND times the mean load: with few requests, a short
wait costs less than computing a long prompt again."""

LEAVING = "it is shutting down"
"""The ``trouble`` of a node that shuts down: its requests move to another node of its kind once one is
healthy."""

LEFT = "it has shut down"
"""The ``trouble`` of a node that a check found gone behind LEAVING."""


def draw_room(rank: int = 0, num_ranks: int = 1) -> int:
    """Return a random room with ``room % num_ranks == rank``. All such rooms are equally likely."""
    return secrets.randbelow(NUM_ROOMS // num_ranks) * num_ranks + rank


class NodeKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def header(self) -> str:
        """Header of an answer that names the node of this kind that had the request."""
        return f"x-hisparse-pd-{self}"


@dataclass(eq=False)
class Node:
    """One node. Only its pool changes it."""

    kind: NodeKind
    url: str
    host: str
    bootstrap_port: int | None = None
    healthy: bool = False
    trouble: str = "not checked yet"
    """Why the node is not healthy; empty if it is."""
    num_in_flight: int = 0
    """Requests of this router that the node works on."""
    last_picked: int = field(default=-1, repr=False)
    """Number of the pool's last pick of this node; -1 before the first."""
    moves: set[Callable[[], None]] = field(default_factory=set, repr=False)
    """Callbacks of requests in flight that move them to another node."""
    ranks: list[Rank] = field(init=False, repr=False)
    """Units that the pool chooses from: a prefill node's ranks under ``cache_aware``, else one entry for the
    whole node."""

    def __post_init__(self) -> None:
        self.ranks = [Rank(self, 0)]

    @classmethod
    def from_url(cls, kind: NodeKind, url: str, bootstrap_port: int | None = None) -> Node:
        """Make a node from its URL. Raises StartError."""
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
    """One of a node's engines, which has its own prefix cache. Only the pool changes it."""

    node: Node
    number: int
    num_in_flight: int = 0
    """Requests of this router whose first room is the rank's."""
    num_foreign: int = 0
    """Requests of other routers that the rank had when its node last reported its load; 0 if that is not
    known."""
    last_picked: int = -1

    def draw_room(self) -> int:
        return draw_room(self.number, len(self.node.ranks))


@dataclass(frozen=True)
class Pair:
    """The nodes of a request."""

    prefill: Node
    decode: Node
    room: int
    """Room of the first prompt, which belongs to the prefill rank that the pool chose."""
    keys: Sequence[bytes] = field(default=(), repr=False)
    """Keys of the prompt's blocks, if the pool chooses by prefix."""

    @property
    def urls(self) -> dict[NodeKind, str]:
        return {node.kind: node.url for node in (self.prefill, self.decode)}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer, errors included, that tell an operator which nodes had the request."""
        return {kind.header: url for kind, url in self.urls.items()}


class NodePool:
    """All nodes of one router."""

    def __init__(self, prefill: list[Node], decode: list[Node], policy: RouterPolicy) -> None:
        self.nodes = [*prefill, *decode]
        self._policy = policy
        self._pick_number = itertools.count()
        self._prefixes: dict[NodeKind, PrefixIndex[Rank]] = {kind: PrefixIndex() for kind in NodeKind}
        """For each kind of node: which ranks had prompts that begin alike most recently, and so probably keep
        their KV."""
        self.known: KnownPages[Node] = KnownPages()
        """Pages of KV that nodes say they have."""

    @classmethod
    def from_settings(cls, settings: RouterSettings) -> NodePool:
        """Make the pool. Raises StartError."""
        prefill = [Node.from_url(NodeKind.PREFILL, url, port) for url, port in settings.prefill]
        decode = [Node.from_url(NodeKind.DECODE, url) for url in settings.decode]
        for name, times in Counter(node.name for node in (*prefill, *decode)).items():
            if times > 1:  # at its shutdown, requests would move from one entry to the other
                raise StartError(f"{name} is given {times} times; give it once")
        return cls(prefill, decode, settings.policy)

    def of_kind(self, kind: NodeKind) -> list[Node]:
        return [node for node in self.nodes if node.kind is kind]

    def healthy(self, kind: NodeKind) -> list[Node]:
        return [node for node in self.of_kind(kind) if node.healthy]

    def pick(self, excluded: Collection[Node] = (), prompt: bytes | memoryview = b"") -> Pair:
        """Choose the nodes for the next request. Raises RouterError 503 if a kind has no healthy node left.

        ``excluded``: nodes not to choose. ``prompt``: bytes that begin alike for prompts that begin alike.
        """
        keys = block_keys(prompt) if self._policy == "cache_aware" else []
        ranks = {kind: self._pick(kind, excluded, self._with_kv(kind, keys)) for kind in NodeKind}
        for kind, rank in ranks.items():
            self._prefixes[kind].note(keys, rank)
        prefill = ranks[NodeKind.PREFILL]
        return Pair(prefill.node, ranks[NodeKind.DECODE].node, prefill.draw_room(), keys)

    def learn(self, pair: Pair, prompt: bytes | memoryview, names: PageNames) -> None:
        """Note the names that a decode node gave to pages of the prompt for which ``pair`` was picked."""
        self.known.learn(pair.keys, len(prompt), names)

    def has(self, kind: NodeKind, excluded: Collection[Node] = ()) -> bool:
        """Whether there is a healthy node of this kind that is not excluded."""
        return bool(self._candidates(kind, excluded))

    def has_pair(self, excluded: Collection[Node] = ()) -> bool:
        """Whether each kind has a healthy node that is not excluded."""
        return all(self.has(kind, excluded) for kind in NodeKind)

    def no_healthy(self, kind: NodeKind) -> RouterError:
        """Return the error for a request that needs a node of this kind, when none is left for it."""
        states = "; ".join(f"{node.url}: {node.trouble or 'just failed'}" for node in self.of_kind(kind))
        return RouterError(503, f"no healthy {kind} node ({states}); try again later")

    @contextmanager
    def working(self, node: Node, room: int, move: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Count a request on ``node`` for as long as the context is open; ``room`` is its first prompt's.

        ``move`` is called when the node shuts down and another one is healthy, as soon as both are known.
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
        """Note that a node can be used. Requests of nodes that shut down may now move to it."""
        if node.healthy:
            return
        log.info("%s is healthy", node.name)
        node.healthy, node.trouble = True, ""
        self._move_requests(node.kind)

    def mark_unhealthy(self, node: Node, trouble: str) -> None:
        """Note that a node cannot be used, and why. If it shuts down, its requests move to others."""
        if not node.healthy and node.trouble == trouble:
            return
        log.warning("%s is unhealthy: %s", node.name, trouble)
        if node.healthy:
            self._prefixes[node.kind].forget(node.ranks)
            self.known.leave(node)
        node.healthy, node.trouble = False, trouble
        self._move_requests(node.kind)

    def mark_unreachable(self, node: Node, trouble: str) -> None:
        """Note that a request could not be sent to a node. One that shuts down refuses connections at last,
        which is no other trouble: its requests in flight may still move."""
        if node.trouble not in (LEAVING, LEFT):
            self.mark_unhealthy(node, trouble)

    def report_load(self, node: Node, num_requests: Sequence[int]) -> None:
        """Take in a node's load: how many requests run or wait on each of its ranks, this router's
        included."""
        if self._policy != "cache_aware" or node.kind is NodeKind.DECODE:
            num_requests = [sum(num_requests)]  # the node chooses the rank of a request itself
        if len(num_requests) != len(node.ranks):
            self._prefixes[node.kind].forget(node.ranks)
            node.ranks = [Rank(node, number) for number in range(len(num_requests))]
        for rank, num in zip(node.ranks, num_requests, strict=True):
            rank.num_foreign = max(0, num - rank.num_in_flight)

    def forget_load(self, node: Node) -> None:
        """Note that a node's requests from other routers are not known any more."""
        for rank in node.ranks:
            rank.num_foreign = 0

    def _move_requests(self, kind: NodeKind) -> None:
        leaving = [node for node in self.of_kind(kind) if node.trouble == LEAVING]
        for node in leaving if self.has(kind) else ():
            for move in tuple(node.moves):
                move()

    def _candidates(self, kind: NodeKind, excluded: Collection[Node]) -> list[Node]:
        return [node for node in self.healthy(kind) if node not in excluded]

    def _with_kv(self, kind: NodeKind, keys: Sequence[bytes]) -> list[Rank]:
        """Return the ranks that have the longest beginning of a prompt, as far as is known.

        The rank that had the prompt last has it as long as its node publishes nothing else, and while the
        prompt's pages have no names yet. Nodes' events decide about others: where they say that this rank has
        given the pages up, the ranks that still have them count, or those that have a shorter beginning.
        """
        for key in reversed(keys):
            if (last := self._prefixes[kind].rank_of(key)) is None:
                continue
            if (name := self.known.name_of(key, last.node)) is None:
                return [last]
            places = [place for place in self.known.holders(name) if place.node.kind is kind]
            holders = [place.node.ranks[place.rank % len(place.node.ranks)] for place in places]
            if last in holders:
                return [last]
            if holders:
                return holders
        return []

    def _pick(self, kind: NodeKind, excluded: Collection[Node], preferred: Collection[Rank] = ()) -> Rank:
        """Choose the least loaded rank, or the least loaded of those ``preferred``, which have KV of the
        prompt, if its load allows.

        Raises RouterError 503 if no rank is left.
        """
        ranks = [rank for node in self._candidates(kind, excluded) for rank in node.ranks]
        if not ranks:
            raise self.no_healthy(kind)
        # "Least recently picked" is round-robin that works while nodes come and go; it also breaks ties.
        picked = min(ranks, key=self._in_turn)
        if with_kv := [rank for rank in preferred if rank in ranks]:
            best = min(with_kv, key=self._in_turn)
            mean = (sum(map(self._load, ranks)) + 1) / len(ranks)  # with the request that is to be placed
            if self._load(best) < LOAD_BOUND * mean + LOAD_SLACK:
                picked = best
        picked.last_picked = picked.node.last_picked = next(self._pick_number)
        return picked

    def _in_turn(self, rank: Rank) -> tuple[int, int, int]:
        return self._load(rank), rank.node.last_picked, rank.last_picked

    def _load(self, rank: Rank) -> int:
        """Return the number of requests by which the policy compares ranks."""
        return 0 if self._policy == "round_robin" else rank.num_in_flight + rank.num_foreign
