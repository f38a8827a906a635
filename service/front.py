"""The life of a node's front process: the engine that it starts, and serving HTTP until one of the two ends.

The engine runs in a spawned child; their ipc socket is in a private directory until the two are connected.
When the engine dies, the requests in flight fail and the front exits with status 1, for a supervisor to start
both again.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from starlette.types import ASGIApp

from service.engine_link import EngineLink
from service.listening import Listener
from service.process import StartError, die_with_parent, setup_logging
from service.settings import NodeSettings

log = logging.getLogger(__name__)

S = TypeVar("S", bound=NodeSettings)

_ENGINE_EXIT_SECS = 5.0


class EngineProcess:
    """The engine in a child process, and the directory of the ipc socket between it and the front."""

    def __init__(self, target: Callable[[S, str], None], settings: S, name: str) -> None:
        """``target(settings, ipc_path)`` runs the engine; it is imported by name in the child."""
        self._directory = Path(tempfile.mkdtemp(prefix="hisparse-pd-"))  # mode 0700
        self.ipc_path = str(self._directory / "engine.ipc")
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run_engine, args=(target, settings, self.ipc_path, name), name=name
        )

    def start(self) -> None:
        """From the main thread: the kernel ends the child when the thread that started it ends."""
        self._process.start()

    def remove_directory(self) -> None:
        """Once nobody connects any more, so that a kill leaves nothing behind. May be called again."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the engine has exited."""
        return self._process.sentinel

    @property
    def exit_status(self) -> int | None:
        """Of an engine that has exited; its sentinel says so a moment before its status can be read."""
        self._process.join(_ENGINE_EXIT_SECS)
        return self._process.exitcode

    def stop(self, *, graceful: bool) -> None:
        """End the engine. ``graceful``: it was told to shut down, so wait for that."""
        try:
            if self._process.pid is not None:
                self._process.join(_ENGINE_EXIT_SECS if graceful else 0)
                for end in (self._process.terminate, self._process.kill):
                    if self._process.is_alive():
                        log.info("the engine still runs: %s", end.__name__)
                        end()
                        self._process.join(_ENGINE_EXIT_SECS)
        finally:
            self.remove_directory()


async def serve(
    link: EngineLink,
    engine: EngineProcess,
    listeners: Sequence[Listener],
    apps: Sequence[ASGIApp],
    drain_timeout_secs: float,
) -> int:
    """Serve until a signal or the engine's death. Returns the exit status: 0 after a signal, else 1.

    After a signal new requests are refused with 503, and those in flight have ``drain_timeout_secs`` to
    finish. A second signal ends the wait.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[str] = asyncio.Queue()
    engine_exited = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    loop.add_reader(engine.sentinel, _note_exit, loop, engine.sentinel, engine_exited)
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
            log.error("the engine exited with status %s", engine.exit_status)
            link.engine_died()
        else:
            link.fail_all(503, "the node is shutting down; send the request again")
            await link.shut_engine_down()
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


def _run_engine(target: Callable[[S, str], None], settings: S, ipc_path: str, name: str) -> None:
    die_with_parent()
    setup_logging(settings.log_level, name)
    try:
        target(settings, ipc_path)
    except StartError as error:
        log.error("cannot start: %s", error)
        raise SystemExit(1) from None
    except Exception:
        log.exception("the engine failed")
        raise SystemExit(1) from None
