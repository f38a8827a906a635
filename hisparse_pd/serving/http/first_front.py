"""A node's first process: it starts the engines, and serves HTTP until a signal or until a child dies.

``serving/api/node.py`` makes the engines and fronts and calls ``serve``. The engine of each rank runs in a
spawned child, as does each further front. Their ipc sockets are in a private directory until they are
connected. When a child dies, the requests in flight fail, and this process ends the other children and exits
with status 1, so that a supervisor starts all of them again.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from starlette.types import ASGIApp

from hisparse_pd.base.node_settings import NodeSettings
from hisparse_pd.base.process import (
    BRIEF_SPIN,
    die_with_parent,
    environment_of_children,
    openmp_wait_is_set,
    setup_logging,
    stop_signals,
)
from hisparse_pd.base.settings import STARTUP_TIMEOUT_SECS
from hisparse_pd.base.vocabulary import RankPlace, StartError
from hisparse_pd.protocol.names import resolve
from hisparse_pd.serving.http.board import Instruction
from hisparse_pd.serving.http.children import Children
from hisparse_pd.serving.http.engine_link import EngineLink
from hisparse_pd.serving.http.fronts import SHUTTING_DOWN, WHAT_DIED, Fronts
from hisparse_pd.serving.http.listening import HttpServer, Listener

log = logging.getLogger(__name__)

S = TypeVar("S", bound=NodeSettings)
EngineTarget: TypeAlias = Callable[[S, Sequence[str], RankPlace], None]
"""Runs the engine of one rank, with the endpoint of each front and the rank's place in the node."""

_RESOLVE_SECS = 5.0
_RESOLVE_AGAIN_SECS = 1.0
"""Limit for one look-up of the first machine's name, and the pause before the next one."""


class EngineProcesses(Children):
    """The engines of this machine's ranks in child processes, and the directory of their sockets."""

    def __init__(self, target: EngineTarget[S], settings: S, name: str) -> None:
        """``target(settings, endpoints, place)`` runs an engine; the child imports it by name. ``name``: the
        beginning of the children's names in logs.

        Raises StartError if the node has several machines and the first one's name has no address.
        """
        super().__init__()
        self._target: EngineTarget[Any] = target
        self._settings = settings
        self._name = name
        self._first_machine_host = _first_machine_address(settings)
        self._directory = Path(tempfile.mkdtemp(prefix="hisparse-pd-"))  # mode 0700

    def endpoints_of(self, front: int) -> list[str]:
        """Return one front's endpoint for each rank of the node."""
        return [self._endpoint(rank, front) for rank in range(self._settings.dp_size)]

    def _endpoint(self, rank: int, front: int) -> str:
        """Return where a front and the engine of a rank meet.

        Ranks of other machines come to a port of the first machine. The ports after that of
        ``dist_init_addr`` are those of the first front, one for each rank, then those of the next front.
        """
        if rank in self._settings.ranks_of(0):
            return f"ipc://{self._directory}/engine-{rank}-{front}.ipc"
        host = (
            f"[{self._first_machine_host}]" if ":" in self._first_machine_host else self._first_machine_host
        )
        _, init_port = self._settings.dist_init_host_port
        return f"tcp://{host}:{init_port + 1 + front * self._settings.dp_size + rank}"

    def _place(self, rank: int) -> RankPlace:
        """Return where the ranks of the node meet each other: in the directory, or at the first machine."""
        size = self._settings.dp_size
        if not self._first_machine_host:
            return RankPlace(rank, size, meeting_path=str(self._directory / "ranks"))
        _, init_port = self._settings.dist_init_host_port
        return RankPlace(rank, size, meeting_host=self._first_machine_host, meeting_port=init_port)

    def start(self) -> None:
        """Start the engines of this machine. Must be called from the main thread, as ``spawn``."""
        settings = self._settings
        # Engines that share cores must not keep them while they wait, unless the operator wants that.
        limits_spin = settings.device == "cpu" and not openmp_wait_is_set()
        with environment_of_children(BRIEF_SPIN if limits_spin else {}):
            for rank in settings.ranks_here:
                name = self._name if settings.dp_size == 1 else f"{self._name} rank {rank}"
                endpoints = [self._endpoint(rank, front) for front in range(settings.num_fronts)]
                of_rank = settings.of_rank(rank)
                self.spawn(name, _run_engine, self._target, of_rank, endpoints, self._place(rank), name)

    def remove_directory(self) -> None:
        """Remove the sockets' directory once all are connected, so that a kill leaves no files. May be
        repeated."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def have_succeeded(self) -> bool:
        return all(process.exitcode == 0 for process in self.processes)

    def stop(self, *, graceful: bool) -> None:
        """End the engines. ``graceful``: wait first, since they were told to shut down."""
        try:
            if graceful:
                self.wait()
            self.kill()
        finally:
            self.remove_directory()


def _first_machine_address(settings: NodeSettings) -> str:
    """Return the address of machine 0 of a node of several machines, an empty string for a node of one.

    Waits until its name has an address, which a cluster may give it only when that machine starts. Raises
    StartError.
    """
    host, _ = settings.dist_init_host_port
    deadline = time.monotonic() + STARTUP_TIMEOUT_SECS
    while host:
        try:
            return resolve(host, time.monotonic() + _RESOLVE_SECS)[0]
        except OSError as error:
            if time.monotonic() >= deadline:
                raise StartError(
                    f"--dist-init-addr {settings.dist_init_addr}: {host} has no address after "
                    f"{STARTUP_TIMEOUT_SECS:g} s: {error}"
                ) from error
            log.info("%s has no address yet: %s", host, error)
        time.sleep(_RESOLVE_AGAIN_SECS)
    return ""


async def serve(
    link: EngineLink,
    engines: EngineProcesses,
    fronts: Fronts,
    listeners: Sequence[Listener],
    apps: Sequence[ASGIApp],
    drain_timeout_secs: float,
    num_at_work: Callable[[EngineLink], int],
) -> int:
    """Serve until a signal or a child's death. Returns the exit status: 0 after a signal, else 1.

    After a signal new requests are refused with 503, and requests in flight may finish: until ``num_at_work``
    (``samples_at_work`` or ``rooms_at_work`` of ``engine_link.py``) returns 0, for ``drain_timeout_secs`` at
    most, or until a second signal. ``apps``: the application of each listener. All fronts serve the port of
    ``listeners[0]``, and this one alone those of the others.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[str] = asyncio.Queue()
    for number in stop_signals():
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    for sentinel in (*engines.sentinels, *fronts.sentinels):
        loop.add_reader(sentinel, _note_exit, loop, sentinel, link.lost)
    link.start()
    # Serve until a signal comes, a process is lost, or a server ends.
    servers = [
        listener.server(app, num_servers=len(listeners))
        for listener, app in zip(listeners, apps, strict=True)
    ]
    running = [
        asyncio.create_task(server.serve(sockets=[listener.socket]))
        for server, listener in zip(servers, listeners, strict=True)
    ]
    writing = asyncio.create_task(fronts.write_metrics())
    stop = asyncio.create_task(signals.get())
    lost = asyncio.create_task(link.lost.wait())
    try:
        await asyncio.wait([stop, lost, *running], return_when=asyncio.FIRST_COMPLETED)
        # After a signal, let requests finish.
        if stop.done():
            log.info("%s: shutting down with %d requests in flight", stop.result(), num_at_work(link))
            link.stop_accepting()
            fronts.stop_accepting()
            await _drain(lambda: num_at_work(link) == 0, drain_timeout_secs, signals, lost)
        # Fixed before the children are told to exit, after which every exit would count as a loss.
        is_lost = lost.done()
        status = 0 if stop.done() and not is_lost else 1
        await _end(link, engines, fronts, servers, running, is_lost=is_lost)
        return status
    finally:
        for task in (writing, stop, lost, *running):
            task.cancel()
        await asyncio.gather(writing, stop, lost, *running, return_exceptions=True)
        link.close()


def _note_exit(loop: asyncio.AbstractEventLoop, sentinel: int, lost: asyncio.Event) -> None:
    loop.remove_reader(sentinel)  # it stays readable, and would call this in every turn
    lost.set()


async def _drain(
    is_idle: Callable[[], bool], timeout_secs: float, signals: asyncio.Queue[str], lost: asyncio.Task[bool]
) -> None:
    """Wait until no request is in flight, the time is up, a second signal comes or a child has died."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_secs
    while not is_idle() and signals.empty() and not lost.done() and loop.time() < deadline:
        await asyncio.sleep(0.05)


async def _end(
    link: EngineLink,
    engines: EngineProcesses,
    fronts: Fronts,
    servers: Sequence[HttpServer],
    running: Sequence[asyncio.Task[None]],
    *,
    is_lost: bool,
) -> None:
    """End all requests in flight, then the other fronts and this front's ``servers``, and tell the engines to
    exit, unless a process was lost (``is_lost``): ``serving/api/node.py`` then kills them.

    ``running``: the tasks that run the servers.
    """
    instruction = Instruction.LEAVE
    if is_lost:
        instruction = _report_loss(engines, fronts)
        link.engine_died(WHAT_DIED[instruction])
    else:
        link.fail_all(503, SHUTTING_DOWN)
    leaving = asyncio.create_task(fronts.leave(instruction))
    if instruction is Instruction.LEAVE:
        await link.shut_engines_down()
    for server in servers:
        server.should_exit = True
    await asyncio.gather(leaving, *running)


def _report_loss(engines: EngineProcesses, fronts: Fronts) -> Instruction:
    """Log which processes have exited. Returns the instruction for the fronts that are left."""
    engine_exits, front_exits = engines.exits(), fronts.exits()
    only_fronts = bool(front_exits) and not engine_exits
    instruction = Instruction.FRONT_DIED if only_fronts else Instruction.ENGINE_DIED
    log.error("%s", ", ".join(filter(None, (engine_exits, front_exits))) or WHAT_DIED[instruction])
    return instruction


def _run_engine(
    target: EngineTarget[S], settings: S, endpoints: Sequence[str], place: RankPlace, name: str
) -> None:
    gc.disable()  # the engine enables it once all is imported: collections would take a fifth of the start
    die_with_parent()
    setup_logging(settings.log_level, name)
    try:
        target(settings, endpoints, place)
    except StartError as error:
        log.error("cannot start: %s", error)
        raise SystemExit(1) from None
    except Exception:
        log.exception("the engine failed")
        raise SystemExit(1) from None
