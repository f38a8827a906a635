"""Fronts beside a node's first one: the channel to them, their counts, who accepts a connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from hisparse_pd.http import metric_sums
from hisparse_pd.http.channel import Channel, ChannelClosed
from hisparse_pd.http.connections import Connections
from hisparse_pd.http.listening import Listener, _SharedSocket
from hisparse_pd.http.metrics import FrontMetrics
from hisparse_pd.http.patience import Patience

WAIT_SECS = 60.0


@asynccontextmanager
async def pair(**handlers: Any) -> AsyncIterator[tuple[Channel, Channel, list[bytes]]]:
    ours, theirs = socket.socketpair()
    notes: list[bytes] = []

    async def answer(question: bytes) -> bytes:
        if question == b"never":
            await asyncio.Event().wait()
        return question + f" after {len(notes)} notes".encode()

    first, second = Channel(ours, notes.append, answer), Channel(theirs, notes.append, answer)
    await first.open()
    await second.open()
    try:
        yield first, second, notes
    finally:
        await first.close()
        await second.close()


def test_questions_are_answered_whatever_others_wait_for_and_notes_keep_their_place() -> None:
    async def main() -> None:
        async with pair() as (first, second, notes):
            waiting = asyncio.create_task(first.ask(b"never"))
            for number in range(3):
                first.tell(b"x" * (1 << 20))
                assert await first.ask(b"q") == f"q after {number + 1} notes".encode()
            assert await second.ask(b"") == b" after 3 notes"
            assert len(notes) == 3
            assert not waiting.done()
            await second.close()
            with pytest.raises(ChannelClosed):
                await waiting
            with pytest.raises(ChannelClosed):
                await first.ask(b"q")
            first.tell(b"to nobody")

    asyncio.run(asyncio.wait_for(main(), WAIT_SECS))


# --- counts ------------------------------------------------------------------------------------------


def counting(num: int, status: str) -> CollectorRegistry:
    registry = CollectorRegistry()
    requests = Counter("requests", "all of them", ["status"], registry=registry)
    seconds = Histogram("seconds", "each", buckets=(1, 2), registry=registry)
    for _ in range(num):
        requests.labels(status).inc()
        seconds.observe(1.5)
    return registry


class _Gauge:
    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        return [GaugeMetricFamily("running", "now", 7)]


def test_counts_of_several_processes_are_added_up() -> None:
    packed = [metric_sums.pack(counting(2, "200")), metric_sums.NOTHING]
    packed += [metric_sums.pack(counting(3, "200")), metric_sums.pack(counting(1, "500"))]
    lines = metric_sums.render(_Gauge(), packed).decode().splitlines()  # type: ignore[arg-type]
    assert {
        "running 7.0",
        'requests_total{status="200"} 5.0',
        'requests_total{status="500"} 1.0',
        'seconds_bucket{le="1.0"} 0.0',
        'seconds_bucket{le="2.0"} 6.0',
        'seconds_bucket{le="+Inf"} 6.0',
        "seconds_count 6.0",
        "seconds_sum 9.0",
    } <= set(lines)
    assert len(lines) == len(set(lines))


def test_one_process_is_shown_as_the_library_shows_it() -> None:
    registry = counting(2, "200")
    shown = generate_latest(registry).decode().splitlines()
    summed = metric_sums.render(_Gauge(), [metric_sums.pack(registry)]).decode().splitlines()  # type: ignore[arg-type]
    assert [line for line in summed if "running" not in line] == shown


def test_the_engines_numbers_are_shown_once() -> None:
    from hisparse_pd.engine.messages import EngineStats

    fronts = [FrontMetrics(), FrontMetrics()]
    for front in fronts:
        front.update(0, EngineStats({"num_running_reqs": 3.0}, {}, 3, 0, 0, 1))
        front.count_request("/generate", 200)
    lines = fronts[0].render([fronts[1].pack()]).decode().splitlines()
    assert "hisparse_pd:num_running_reqs 3.0" in lines
    assert 'hisparse_pd:num_requests_total{endpoint="/generate",status="200"} 2.0' in lines


# --- the socket --------------------------------------------------------------------------------------


class _Many(Connections):
    def __init__(self, num: int) -> None:
        super().__init__(100)
        self.live = set(range(num))  # type: ignore[arg-type]


def test_the_process_with_the_fewest_connections_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener("127.0.0.1", 0)
    num_connections = [0, 0]
    sockets = []
    for process in range(2):
        duplicate = listener.socket.dup()
        sockets.append(_SharedSocket(duplicate, _Many(0), num_connections, process))
        sockets[-1].setblocking(True)
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with listener.socket, sockets[0], sockets[1]:
        clients = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(3)]
        accepted = []

        def accept(process: int) -> None:
            connection, _ = sockets[process].accept()
            accepted.append(connection)
            sockets[process]._connections.live.add(connection)  # type: ignore[arg-type]
            sockets[process]._publish()

        accept(0)
        with pytest.raises(BlockingIOError):
            sockets[0].accept()
        accept(1)
        accept(0)
        assert num_connections == [2, 1]
        with pytest.raises(BlockingIOError):
            sockets[0].accept()
        clients.append(socket.create_connection(("127.0.0.1", listener.port)))
        for now in (1.0, 1.003):  # noqa: B007
            with pytest.raises(BlockingIOError):
                sockets[0].accept()
        now = 1.006
        accept(0)  # nobody else did for so long
        now = 2.0
        with pytest.raises(BlockingIOError):
            sockets[0].accept()
        for connection in (*clients, *accepted):
            connection.close()


# --- waits -------------------------------------------------------------------------------------------


def test_patience_counts_the_present_wait_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        timers: list[tuple[float, Any]] = []

        class Timer:
            def cancel(self) -> None:
                timers.clear()

        def call_at(when: float, callback: Any) -> Timer:
            timers.append((when, callback))
            return Timer()

        now = 100.0
        with monkeypatch.context() as patch:
            patch.setattr(loop, "time", lambda: now)
            patch.setattr(loop, "call_at", call_at)
            patience = Patience(10.0, lambda: lost.append(now))
            patience.begin()
            now = 101.0
            patience.end()
            patience.begin()
            now = 109.0
            patience.end()
            patience.begin()
            assert [when for when, _ in timers] == [110.0], "one timer for all of them"
            now = 110.0
            timers.pop()[1]()
            assert not lost
            assert [when for when, _ in timers] == [119.0]
            now = 119.0
            timers.pop()[1]()
            assert lost == [119.0]
            patience.begin()
            patience.end()
            timers.pop()[1]()
            assert not timers, "nobody waits"
            patience.begin()
            patience.close()
            assert not timers
        assert lost == [119.0]

    asyncio.run(main())
