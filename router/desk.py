"""Where a router of several processes decides: one has the desk, the others ask it.

The first process owns the pool: health, loads, prefixes and what is in flight. A worker asks it once for each
pair, and tells it what it sends where and whom it cannot reach. Of the nodes' health it keeps a copy. What is
about the whole router (``/health``, ``/metrics``, ``/status``) the first process answers for all.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import assert_never

from msgspec import Struct
from msgspec.msgpack import Encoder
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from hisparse_pd.http import metric_sums
from hisparse_pd.http.channel import Channel, ChannelClosed
from hisparse_pd.http.workers import Workers
from hisparse_pd.settings import RouterSettings
from protocol.decoding import TypedDecoder
from router.drain import Drain, ShuttingDown
from router.errors import RouterError
from router.metrics import NodeCollector, RouterMetrics
from router.nodes import Alone, Node, NodeKind, NodePool, Pair

# --- from a worker: nodes are numbered in the order of the settings -------------------------------------


class Pick(Struct, frozen=True, tag="pick"):
    """The pair for a request; ``keys``: of its prompt's blocks. Answered with Picked."""

    excluded: tuple[int, ...]
    keys: tuple[bytes, ...]
    is_alone: bool = False
    """A prefill node is enough."""


class GetPage(Struct, frozen=True, tag="get_page"):
    """Answered with Page."""

    path: str


class Sent(Struct, frozen=True, tag="sent"):
    """A node works on a request from now on; ``leg`` is the worker's number of that."""

    leg: int
    node: int
    room: int


class Ended(Struct, frozen=True, tag="ended"):
    leg: int


class Serving(Struct, frozen=True, tag="serving"):
    """The worker takes requests."""


class Unreachable(Struct, frozen=True, tag="unreachable"):
    node: int
    trouble: str


# --- to a worker ----------------------------------------------------------------------------------------


class Picked(Struct, frozen=True):
    """``refusal``: in place of a pair."""

    prefill: int = 0
    decode: int = 0
    room: int = 0
    refusal: str = ""
    status: int = 0


class Page(Struct, frozen=True):
    status: int
    content_type: str
    body: bytes


class Health(Struct, frozen=True, tag="health"):
    """Of each node: whether it is healthy, and its trouble."""

    nodes: tuple[tuple[bool, str], ...]


class Finish(Struct, frozen=True, tag="finish"):
    """Take no new request, and leave when none is in flight, or when the time is up. A second one: now."""

    timeout_secs: float


FromWorker = Sent | Ended | Serving | Unreachable

_encode = Encoder().encode
_question_decoder: TypedDecoder[Pick | GetPage] = TypedDecoder(Pick | GetPage)
_note_decoder: TypedDecoder[FromWorker] = TypedDecoder(FromWorker)
_picked_decoder: TypedDecoder[Picked] = TypedDecoder(Picked)
_page_decoder: TypedDecoder[Page] = TypedDecoder(Page)
_to_worker_decoder: TypedDecoder[Health | Finish] = TypedDecoder(Health | Finish)

Pages = Mapping[str, Callable[[], Awaitable[Response]]]


class Desk:
    """The first process's side."""

    def __init__(self, pool: NodePool, workers: Workers) -> None:
        self.pool = pool
        self.metrics = RouterMetrics()
        self.workers = workers
        self.pages: Pages = {}
        """What workers may ask for."""
        self._num_starting = 0
        self._legs: dict[tuple[int, int], ExitStack] = {}
        """Of the workers' requests in flight, by worker and its number."""

    async def open(self) -> None:
        await self.workers.connect(self._on_note, self._on_question)
        self._num_starting = len(self.workers.channels)

    @property
    def are_serving(self) -> bool:
        """Whether all processes do."""
        return self._num_starting == 0

    def publish(self) -> None:
        """The nodes' health to all workers, now and whenever it changes."""
        self.pool.on_change = self._publish
        self._publish()

    async def sum_metrics(self) -> list[Metric]:
        """Of all processes."""
        return list(metric_sums.summed((self.metrics.pack(), *await self.workers.collect())))

    async def render_metrics(self) -> bytes:
        """The Prometheus text format."""
        packed = (self.metrics.pack(), *await self.workers.collect())
        return metric_sums.render(NodeCollector(self.pool), packed)

    def _publish(self) -> None:
        nodes = tuple((node.healthy, node.trouble) for node in self.pool.nodes)
        self.workers.tell(_encode(Health(nodes)))

    @property
    def num_in_flight(self) -> int:
        """Requests of all processes."""
        return sum(node.num_in_flight for node in self.pool.of_kind(NodeKind.DECODE))

    def finish(self, timeout_secs: float) -> None:
        """The workers. May be called again with less time."""
        self.workers.tell(_encode(Finish(timeout_secs)))

    def _on_note(self, worker: int, body: bytes) -> None:
        match note := _note_decoder.decode(body):
            case Sent():
                leg = self._legs[worker, note.leg] = ExitStack()
                leg.enter_context(self.pool.working(self.pool.nodes[note.node], note.room))
            case Ended():
                self._legs.pop((worker, note.leg)).close()
            case Serving():
                self._num_starting -= 1
            case Unreachable():
                self.pool.mark_unhealthy(self.pool.nodes[note.node], note.trouble)
            case _:
                assert_never(note)

    async def _on_question(self, worker: int, body: bytes) -> bytes:
        match question := _question_decoder.decode(body):
            case Pick():
                return _encode(self._pick(question))
            case GetPage():
                response = await self.pages[question.path]()
                content_type = response.headers.get("content-type", "")
                return _encode(Page(response.status_code, content_type, bytes(response.body)))
            case _:
                assert_never(question)

    def _pick(self, question: Pick) -> Picked:
        nodes = self.pool.nodes
        try:
            excluded = {nodes[number] for number in question.excluded}
            if question.is_alone:
                alone = self.pool.pick_alone_by(excluded, question.keys)
                return Picked(nodes.index(alone.prefill), room=alone.room)
            pair = self.pool.pick_by(excluded, question.keys)
        except RouterError as error:
            return Picked(refusal=str(error), status=error.status)
        return Picked(nodes.index(pair.prefill), nodes.index(pair.decode), pair.room)


class WorkerPool(NodePool):
    """The pool as a worker sees it: the nodes' health is a copy, and pairs are asked for."""

    def __init__(self, settings: RouterSettings, channel: Channel) -> None:
        """Raises NodeUrlError."""
        pool = NodePool.from_settings(settings)
        super().__init__(pool.of_kind(NodeKind.PREFILL), pool.of_kind(NodeKind.DECODE), settings.policy)
        self._channel = channel
        self._numbers = {node: number for number, node in enumerate(self.nodes)}
        self._legs = itertools.count()

    async def choose(self, excluded: Collection[Node], prompt: bytes | memoryview) -> Pair:
        picked = await self._ask(excluded, prompt, is_alone=False)
        return Pair(self.nodes[picked.prefill], self.nodes[picked.decode], picked.room)

    async def choose_alone(self, excluded: Collection[Node], prompt: bytes | memoryview) -> Alone:
        picked = await self._ask(excluded, prompt, is_alone=True)
        return Alone(self.nodes[picked.prefill], picked.room)

    async def _ask(self, excluded: Collection[Node], prompt: bytes | memoryview, *, is_alone: bool) -> Picked:
        numbers = tuple(self._numbers[node] for node in excluded)
        try:
            answer = await self._channel.ask(_encode(Pick(numbers, tuple(self.keys_of(prompt)), is_alone)))
        except ChannelClosed:
            raise ShuttingDown from None
        picked = _picked_decoder.decode(answer)
        if picked.refusal:
            raise RouterError(picked.status, picked.refusal)
        return picked

    @contextmanager
    def working(self, node: Node, room: int) -> Iterator[None]:
        leg = next(self._legs)
        self._channel.tell(_encode(Sent(leg, self._numbers[node], room)))
        try:
            yield
        finally:
            self._channel.tell(_encode(Ended(leg)))

    def mark_unhealthy(self, node: Node, trouble: str) -> None:
        node.healthy, node.trouble = False, trouble
        self._channel.tell(_encode(Unreachable(self._numbers[node], trouble)))

    def take_over(self, health: Health) -> None:
        for node, (healthy, trouble) in zip(self.nodes, health.nodes, strict=True):
            node.healthy, node.trouble = healthy, trouble


class Worker:
    """A further process's side: its pool, and what the first process tells it."""

    def __init__(self, settings: RouterSettings, drain: Drain, sock: socket.socket) -> None:
        """Raises NodeUrlError."""
        self._channel = Channel(sock, self._on_note, self._on_question)
        self.pool = WorkerPool(settings, self._channel)
        self.metrics = RouterMetrics()
        self._drain = drain
        self._knows_health = asyncio.Event()
        self._finish: asyncio.Queue[float] = asyncio.Queue()
        """Seconds, of each Finish."""

    async def open(self) -> None:
        """Until there is a table of the nodes to serve by."""
        await self._channel.open()
        await self._knows_health.wait()

    def is_serving(self) -> None:
        """To be told to the first process."""
        self._channel.tell(_encode(Serving()))

    async def finished(self) -> None:
        """Until the first process said Finish and requests in flight have ended."""
        timeout_secs = await self._finish.get()
        await self._drain.finish(timeout_secs, is_hurried=lambda: not self._finish.empty())

    async def close(self) -> None:
        await self._channel.close()

    async def page(self, request: Request) -> Response:
        """The first process's answer to a GET."""
        try:
            page = _page_decoder.decode(await self._channel.ask(_encode(GetPage(request.url.path))))
        except ChannelClosed:
            return ShuttingDown().response()
        headers = {"content-type": page.content_type, "cache-control": "no-store"}
        return Response(page.body, page.status, headers)

    def _on_note(self, body: bytes) -> None:
        match note := _to_worker_decoder.decode(body):
            case Health():
                self.pool.take_over(note)
                self._knows_health.set()
            case Finish():
                self._finish.put_nowait(note.timeout_secs)
            case _:
                assert_never(note)

    async def _on_question(self, body: bytes) -> bytes:
        return self.metrics.pack()
