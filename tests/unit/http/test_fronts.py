"""Several fronts of a node: the board that they share, their counts, and which one accepts a connection."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from hisparse_pd.serving.http import fronts, listening, metrics
from hisparse_pd.serving.http.board import MAX_METRICS_BYTES, Board, Instruction
from hisparse_pd.serving.http.connections import Connections
from hisparse_pd.serving.http.listening import Listener, SharedSocket
from hisparse_pd.serving.http.wait_timer import WaitTimer
from tests.waiting import WAIT_SECS

# --- the board ---------------------------------------------------------------------------------------


def _write(board: Board, packed: bytes) -> None:
    board.write_metrics(1, packed)


def test_what_a_process_writes_is_read_by_others_when_it_is_whole() -> None:
    board = Board(1, 2)
    assert board.metrics() == []
    board.write_metrics(0, b"first")
    other = multiprocessing.get_context("spawn").Process(target=_write, args=(board, b"second"))
    other.start()
    other.join(WAIT_SECS)
    assert board.metrics() == [b"first", b"second"]
    memoryview(board.metrics_of_fronts[1]).cast("B")[8:9] = b"S"  # the next write has begun
    assert board.metrics() == [b"first", b"second"]
    board.write_metrics(1, b"x" * MAX_METRICS_BYTES)
    assert board.metrics()[1] == b"x" * MAX_METRICS_BYTES
    with pytest.raises(ValueError, match=f"{MAX_METRICS_BYTES + 1} bytes"):
        board.write_metrics(1, b"x" * (MAX_METRICS_BYTES + 1))


def test_a_front_alone_shares_nothing() -> None:
    board = Board(1)
    board.instruct(Instruction.LEAVE)
    assert (board.instruction, list(board.metrics())) == (Instruction.LEAVE, [])


@pytest.mark.anyio
async def test_metrics_without_room_are_said_once_and_later_ones_are_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fronts, "METRICS_SECS", 0.0)
    board, too_many = Board(1, 2), b"x" * (MAX_METRICS_BYTES + 1)
    packed = iter([b"first", too_many, too_many])
    metrics: Any = SimpleNamespace(pack=lambda: next(packed, b"last"))
    writing = asyncio.create_task(fronts.write_metrics(board, 1, metrics))
    async with asyncio.timeout(WAIT_SECS):
        while list(board.metrics()) != [b"last"]:
            await asyncio.sleep(0)
    writing.cancel()
    assert caplog.text.count(f"front 1: {MAX_METRICS_BYTES + 1} bytes of metrics") == 1


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
    packed = [
        metrics.pack_numbers(counting(num, status)) for num, status in ((2, "200"), (3, "200"), (1, "500"))
    ]
    lines = metrics.render_text(_Gauge(), packed).decode().splitlines()
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
    summed = metrics.render_text(_Gauge(), [metrics.pack_numbers(registry)]).decode().splitlines()
    assert [line for line in summed if "running" not in line] == shown


# --- the socket --------------------------------------------------------------------------------------


class _Many(Connections):
    def __init__(self, num: int) -> None:
        super().__init__(100)
        self.live = set(range(num))  # type: ignore[arg-type]


def sockets_of_two(listener: Listener) -> list[SharedSocket]:
    """Return the listening sockets of two processes that share ``listener``."""
    num_connections = [0, 0]
    sockets = [SharedSocket(listener.socket.dup(), _Many(0), num_connections, number) for number in range(2)]
    for each in sockets:
        each.setblocking(False)
    return sockets


def test_the_process_with_the_fewest_connections_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener("127.0.0.1", 0)
    sockets = sockets_of_two(listener)
    clients: list[socket.socket] = []
    accepted: list[socket.socket] = []
    timers: list[Callable[[], None]] = []

    def connect() -> None:
        clients.append(socket.create_connection(("127.0.0.1", listener.port)))

    def accept(process: int) -> None:
        connection, _ = sockets[process].accept()
        accepted.append(connection)
        sockets[process].connections.live.add(connection)  # type: ignore[arg-type]
        sockets[process].publish()

    def is_refused(process: int) -> bool:
        with pytest.raises(BlockingIOError):
            sockets[process].accept()
        return True

    def call_later(secs: float, callback: Callable[[], None]) -> object:
        timers.append(callback)
        return callback

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
        for _ in range(3):
            connect()
        accept(0)
        assert is_refused(0)
        accept(1)
        accept(0)
        assert [len(each.connections.live) for each in sockets] == [2, 1]
        timers.pop()()  # the other process has taken what was left to it
        assert is_refused(0)
        timers.pop()()
        connect()
        assert is_refused(0)
        assert is_refused(0)
        (end,) = timers
        timers.clear()
        end()
        connect()
        accept(0)  # no other process has accepted it in time
        accept(0)
        assert is_refused(0)
        connect()
        assert is_refused(0), "it is left to the other process, too"
        assert len(timers) == 1

    with listener.socket, sockets[0], sockets[1]:
        asyncio.run(main())
        for connection in (*clients, *accepted):
            connection.close()


def test_a_process_whose_loop_is_busy_accepts_what_another_one_leaves() -> None:
    """Each turn of its loop takes longer than a connection is left to others."""
    listener = Listener("127.0.0.1", 0)
    busy, gone = sockets_of_two(listener)
    busy.connections.live.add(0)  # type: ignore[arg-type]
    busy.publish()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        accepting = asyncio.create_task(loop.sock_accept(busy))
        async with asyncio.timeout(WAIT_SECS):
            while not accepting.done():
                time.sleep(2 * listening._YIELD_SECS)
                await asyncio.sleep(0)
        accepting.result()[0].close()

    with listener.socket, busy, gone, socket.create_connection(("127.0.0.1", listener.port)):
        asyncio.run(main())


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
            timer = WaitTimer(10.0, lambda: lost.append(now))
            timer.begin()
            now = 101.0
            timer.end()
            timer.begin()
            now = 109.0
            timer.end()
            timer.begin()
            assert [when for when, _ in timers] == [110.0], "one timer for all of them"
            now = 110.0
            timers.pop()[1]()
            assert not lost
            assert [when for when, _ in timers] == [119.0]
            now = 119.0
            timers.pop()[1]()
            assert lost == [119.0]
            timer.begin()
            timer.end()
            timers.pop()[1]()
            assert not timers, "nobody waits"
            timer.begin()
            timer.close()
            assert not timers
        assert lost == [119.0]

    asyncio.run(main())
