"""The life of a node's front process: the engines that it starts, and serving HTTP until one of them ends.

An engine, one a rank, runs in a spawned child; their ipc sockets are in a private directory until they are
connected. When one dies, the requests in flight fail and the front ends the others and exits with status 1,
for a supervisor to start all of them again.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias, TypeVar

from starlette.types import ASGIApp

from service.engine_link import EngineLink
from service.listening import Listener
from service.process import StartError, die_with_parent, setup_logging
from service.settings import NodeSettings
from vocabulary import RankPlace

log = logging.getLogger(__name__)

S = TypeVar("S", bound=NodeSettings)
EngineTarget: TypeAlias = Callable[[S, str, RankPlace], None]

_ENGINE_EXIT_SECS = 5.0


class EngineProcesses:
    """The engines of all ranks in child processes, and the directory of the front's sockets to them."""

    def __init__(self, target: EngineTarget[S], settings: S, name: str) -> None:
        """``target(settings, ipc_path, place)`` runs an engine; it is imported by name in the child."""
        self._directory = Path(tempfile.mkdtemp(prefix="hisparse-pd-"))  # mode 0700
        size = settings.dp_size
        self.ipc_paths = [str(self._directory / f"engine-{rank}.ipc") for rank in range(size)]
        names = [name if size == 1 else f"{name} rank {rank}" for rank in range(size)]
        self._processes = [
            multiprocessing.get_context("spawn").Process(
                target=_run_engine,
                args=(
                    target,
                    settings.of_rank(rank),
                    self.ipc_paths[rank],
                    RankPlace(rank, size, str(self._directory / "ranks")),
                    names[rank],
                ),
                name=names[rank],
            )
            for rank in range(size)
        ]

    def start(self) -> None:
        """From the main thread: the kernel ends the children when the thread that started them ends."""
        for process in self._processes:
            process.start()

    def remove_directory(self) -> None:
        """Once nobody connects any more, so that a kill leaves nothing behind. May be called again."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def sentinels(self) -> list[int]:
        """File descriptors each of which becomes readable when an engine has exited."""
        return [process.sentinel for process in self._processes]

    def exits(self) -> str:
        """Which engines have exited, and how; a sentinel says so a moment before the status can be read."""
        ready = multiprocessing.connection.wait(self.sentinels, timeout=0)
        exited = [process for process in self._processes if process.sentinel in ready]
        _join(exited, _ENGINE_EXIT_SECS)
        return ", ".join(f"{process.name} exited with status {process.exitcode}" for process in exited)

    def stop(self, *, graceful: bool) -> None:
        """End the engines. ``graceful``: they were told to shut down, so wait for that."""
        try:
            started = [process for process in self._processes if process.pid is not None]
            _join(started, _ENGINE_EXIT_SECS if graceful else 0)
            for end in ("terminate", "kill"):
                for process in (alive := [process for process in started if process.is_alive()]):
                    log.info("%s still runs: %s", process.name, end)
                    getattr(process, end)()
                _join(alive, _ENGINE_EXIT_SECS)
        finally:
            self.remove_directory()


def _join(processes: Sequence[BaseProcess], timeout_secs: float) -> None:
    """Until all have ended, or the time is up."""
    deadline = time.monotonic() + timeout_secs
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))


async def serve(
    link: EngineLink,
    engines: EngineProcesses,
    listeners: Sequence[Listener],
    apps: Sequence[ASGIApp],
    drain_timeout_secs: float,
) -> int:
    """Serve until a signal or an engine's death. Returns the exit status: 0 after a signal, else 1.

    After a signal new requests are refused with 503, and those in flight have ``drain_timeout_secs`` to
    finish. A second signal ends the wait.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[str] = asyncio.Queue()
    engine_exited = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    for sentinel in engines.sentinels:
        loop.add_reader(sentinel, _note_exit, loop, sentinel, engine_exited)
    link.start()
    servers = [
        listener.server(app, num_servers=len(listeners))
        for listener, app in zip(listeners, apps, strict=True)
    ]
    running = [
        asyncio.create_task(server.serve(sockets=[listener.socket]))
        for server, listener in zip(servers, listeners, strict=True)
    ]
    stop = asyncio.create_task(signals.get())
    died = asyncio.create_task(engine_exited.wait())
    try:
        await asyncio.wait([stop, died, *running], return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            log.info("%s: shutting down with %d requests in flight", stop.result(), link.num_in_flight)
            link.stop_accepting()
            await _drain(link, drain_timeout_secs, signals, died)
        status = 0 if stop.done() and not died.done() else 1  # from here on the engine exits in any case
        if died.done():
            log.error("%s", engines.exits())
            link.engine_died()
        else:
            link.fail_all(503, "the node is shutting down; send the request again")
            await link.shut_engines_down()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*running)
        return status
    finally:
        for task in (stop, died, *running):
            task.cancel()
        await asyncio.gather(stop, died, *running, return_exceptions=True)
        await link.close()


def _note_exit(loop: asyncio.AbstractEventLoop, sentinel: int, engine_exited: asyncio.Event) -> None:
    loop.remove_reader(sentinel)  # it stays readable
    engine_exited.set()


async def _drain(
    link: EngineLink, timeout_secs: float, signals: asyncio.Queue[str], died: asyncio.Task[bool]
) -> None:
    """Let requests in flight finish: until there are none, the time is up, or nothing is left to wait for."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_secs
    while link.num_in_flight and signals.empty() and not died.done() and loop.time() < deadline:
        await asyncio.sleep(0.05)


def _run_engine(target: EngineTarget[S], settings: S, ipc_path: str, place: RankPlace, name: str) -> None:
    die_with_parent()
    setup_logging(settings.log_level, name)
    try:
        target(settings, ipc_path, place)
    except StartError as error:
        log.error("cannot start: %s", error)
        raise SystemExit(1) from None
    except Exception:
        log.exception("the engine failed")
        raise SystemExit(1) from None
