"""The router's processes: the first one, which decides for all, and workers beside it on the same port."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

from starlette.applications import Starlette

from hisparse_pd.http import descriptors
from hisparse_pd.http.certificates import Certificate
from hisparse_pd.http.listening import HttpServer, Listener
from hisparse_pd.http.workers import EXIT_SECS, Workers
from hisparse_pd.process import StartError, setup_logging
from hisparse_pd.settings import RouterSettings
from protocol.access import KeyFileError
from router.connect import CaFileError
from router.desk import Desk, Worker
from router.drain import Drain
from router.nodes import NodePool, NodeUrlError
from router.server import create_app, create_worker_app

log = logging.getLogger(__name__)


def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT; the process exit status. A worker that dies ends the router: 1."""
    setup_logging(settings.log_level, "router")
    descriptors.raise_limit()
    drain = Drain()
    workers = Workers(settings.workers - 1, _run_worker, "router worker")
    try:
        desk = Desk(NodePool.from_settings(settings), workers)
        app = create_app(settings, drain, desk)
    except (NodeUrlError, KeyFileError, CaFileError, StartError) as error:
        log.error("%s", error)
        return 2
    try:
        certificate = (
            Certificate(settings.ssl_certfile, settings.ssl_keyfile) if settings.ssl_certfile else None
        )
        listener = Listener(settings.host, settings.port, certificate)
    except OSError as error:
        log.error("%s", error)
        return 1
    if settings.exposure is not None:
        log.warning("%s", settings.exposure)
    listener.share(settings.workers)
    try:
        workers.start(settings, listener)
        server = _server(listener, app, 0)
        has_died = asyncio.run(_serve(server, listener, drain, desk, settings.drain_timeout_secs))
    except SystemExit:  # uvicorn's way to say that it could not start; it has logged why
        return 1
    finally:
        workers.stop()
    return 0 if server.started and not has_died else 1


async def _serve(
    server: HttpServer, listener: Listener, drain: Drain, desk: Desk, drain_timeout_secs: float
) -> bool:
    """Until a signal; then requests in flight may finish. A second signal ends the wait.

    Returns whether a worker has died, which ends all that is in flight.
    """
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[str] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    await desk.open()
    log.info("serving on %s://%s:%d", listener.scheme, *listener.socket.getsockname()[:2])
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    stop = asyncio.create_task(signals.get())
    died = asyncio.create_task(desk.workers.died())
    await asyncio.wait((serving, stop, died), return_when=asyncio.FIRST_COMPLETED)
    has_died = died.done()
    if stop.done() or has_died:
        if has_died:
            log.error("%s; the router ends", desk.workers.exits())
            drain_timeout_secs = 0.0
        else:
            log.info("%s: shutting down with %d requests in flight", stop.result(), desk.num_in_flight)
        hurry = asyncio.create_task(_second_signal(signals, desk))
        desk.finish(drain_timeout_secs)
        await drain.finish(drain_timeout_secs, is_hurried=hurry.done)
        await desk.workers.left(drain_timeout_secs + EXIT_SECS)  # until then they ask for pairs and pages
        hurry.cancel()
        server.should_exit = True
    for task in (stop, died):
        task.cancel()
    await serving
    await desk.workers.close()
    return has_died


async def _second_signal(signals: asyncio.Queue[str], desk: Desk) -> None:
    await signals.get()
    desk.finish(0.0)


def _server(listener: Listener, app: Starlette, process: int) -> HttpServer:
    return listener.server(app, "on", num_descriptors_each=descriptors.OF_ROUTER, process=process)


def _run_worker(number: int, sock: socket.socket, settings: RouterSettings, listener: Listener) -> None:
    """Process ``number`` of the router."""
    setup_logging(settings.log_level, f"router {number}")
    asyncio.run(_serve_as_worker(number, sock, settings, listener))


async def _serve_as_worker(
    number: int, sock: socket.socket, settings: RouterSettings, listener: Listener
) -> None:
    """Until the first process says so, and what is in flight here has ended."""
    drain = Drain()
    worker = Worker(settings, drain, sock)
    server = _server(listener, create_worker_app(settings, drain, worker), number)
    await worker.open()
    server.on_started = worker.is_serving
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    finished = asyncio.create_task(worker.finished())
    await asyncio.wait((serving, finished), return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    await worker.close()
