"""The router's process: it serves until a signal, then finishes the requests in flight.

``hisparse-pd router`` calls ``run``.
"""

from __future__ import annotations

import asyncio
import logging

from hisparse_pd.base.process import setup_logging, stop_signals
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.router.drain import Drain
from hisparse_pd.router.server import create_app
from hisparse_pd.serving.http import descriptors
from hisparse_pd.serving.http.certificates import Certificate
from hisparse_pd.serving.http.listening import HttpServer, Listener

log = logging.getLogger(__name__)


def run(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status of the process."""
    setup_logging(settings.log_level, "router")
    descriptors.raise_limit()
    drain = Drain()
    try:
        app = create_app(settings, drain)
    except StartError as error:
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
    server = listener.server(app, lifespan="on", num_descriptors_each=descriptors.PER_ROUTED_REQUEST)
    try:
        asyncio.run(_serve(server, listener, drain, settings.drain_timeout_secs))
    except SystemExit:  # uvicorn could not start, and has logged why
        return 1
    return 0 if server.started else 1


async def _serve(server: HttpServer, listener: Listener, drain: Drain, drain_timeout_secs: float) -> None:
    """Serve until a signal, then let requests in flight finish. A second signal ends that wait."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[str] = asyncio.Queue()
    for number in stop_signals():
        loop.add_signal_handler(number, signals.put_nowait, number.name)
    log.info("serving on %s://%s:%d", listener.scheme, *listener.socket.getsockname()[:2])
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
    stop = asyncio.create_task(signals.get())
    await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        log.info("%s: shutting down with %d requests in flight", stop.result(), drain.num_in_flight)
        await drain.finish(drain_timeout_secs, is_hurried=lambda: not signals.empty())
        server.should_exit = True
    stop.cancel()
    await serving
