"""Starts a node: its engines and further fronts in processes of their own, its first front in this one.

The nodes' own modules (``prefill_node/server.py``, ``decode_node/server.py``) call ``run_front`` with their
engine and their applications. It checks what the API needs before an engine starts to load, and then lets
``first_front.py`` serve; further fronts are made from the same ``_NodePlan``.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from starlette.types import ASGIApp

from hisparse_pd.base.node_settings import NodeSettings
from hisparse_pd.base.process import setup_logging, stop_signals
from hisparse_pd.base.vocabulary import CheckpointError, StartError
from hisparse_pd.engine.sockets import Crossing
from hisparse_pd.protocol.channels import load_control_keys
from hisparse_pd.serving.api.keys import load_api_keys
from hisparse_pd.serving.api.node_app import NodeContext
from hisparse_pd.serving.http.board import Board
from hisparse_pd.serving.http.certificates import Certificate
from hisparse_pd.serving.http.descriptors import raise_limit
from hisparse_pd.serving.http.engine_link import EngineLink, LinkState, samples_at_work
from hisparse_pd.serving.http.first_front import EngineProcesses, EngineTarget, serve
from hisparse_pd.serving.http.follower import follow
from hisparse_pd.serving.http.fronts import Fronts, serve_further
from hisparse_pd.serving.http.listening import Listener
from hisparse_pd.serving.http.metrics import FrontMetrics
from hisparse_pd.serving.http.queue_limits import QueueLimits
from hisparse_pd.serving.http.rank_choice import RankChoice, least_loaded

log = logging.getLogger(__name__)

S = TypeVar("S", bound=NodeSettings)

Apps = Callable[[NodeContext], AbstractContextManager[Sequence[ASGIApp]]]
"""Makes a front's applications, in a context manager that closes what they use. Raises StartError,
OSError."""


@dataclass(frozen=True)
class _NodePlan(Generic[S]):
    """Everything that a front is made from. The first front passes it to the fronts that it spawns."""

    settings: S
    role: str
    choose_rank: RankChoice
    apps: Apps
    board: Board
    """Memory that all fronts share: requests in flight, metrics, the instruction to leave."""
    started_at: int

    def metrics(self) -> FrontMetrics:
        return FrontMetrics(self.settings.dp_size)

    def link(
        self,
        front_number: int,
        endpoints: Sequence[str],
        metrics: FrontMetrics,
        on_connected: Callable[[], None] = lambda: None,
    ) -> EngineLink:
        return EngineLink(
            endpoints,
            self.settings.health_timeout_secs,
            metrics.update,
            on_connected,
            QueueLimits.of(self.settings),
            self.choose_rank,
            self.board,
            front_number,
            Crossing.of(self.settings),
        )

    def open(self, link: EngineLink, metrics: FrontMetrics) -> AbstractContextManager[Sequence[ASGIApp]]:
        """Make the applications of one front. Raises StartError and OSError."""
        return self.apps(
            NodeContext(
                self.role,
                self.settings,
                link,
                metrics,
                load_api_keys(self.settings.api_key_file),
                load_control_keys(self.settings.control_key_file),
                self.started_at,
                self.board.metrics,
            )
        )


def run_front(
    settings: S,
    *,
    role: str,
    engine: EngineTarget[S],
    ports: Sequence[int],
    apps: Apps,
    choose_rank: RankChoice = least_loaded,
    check: Callable[[S], object] = lambda settings: None,
    num_at_work: Callable[[EngineLink], int] = samples_at_work,
) -> int:
    """Start the engines and serve ``apps``, one a port, until the node ends. Returns the exit status.

    All fronts serve the first port, with TLS if the settings have a certificate; this front alone serves the
    others. Further machines of the node only run engines. ``choose_rank``: assigns a sample to a rank.
    ``check``: raises StartError for settings that ``apps`` cannot serve, before an engine starts.
    ``num_at_work``: counts the work that a leaving node waits for. All of these are functions of a module:
    further fronts are spawned, and pickle passes a function by its name.
    """
    raise_limit()
    if settings.node_rank > 0:
        return follow(settings, role, engine)
    setup_logging(settings.log_level, role)
    try:
        _check_start(settings, check)
        listeners = _listeners(settings, ports)
        engines = EngineProcesses(engine, settings, f"{role}-engine")
    except (OSError, StartError) as error:
        log.error("%s", error)
        return 1
    if settings.exposure is not None:
        log.warning("%s", settings.exposure)
    # What this front shares with the others, and its own part.
    num_fronts = settings.num_fronts
    listeners[0].share(num_fronts)
    board = Board(settings.dp_size, num_fronts)
    plan = _NodePlan(settings, role, choose_rank, apps, board, int(time.time()))
    metrics = plan.metrics()
    # Once all engines are connected, nobody needs the sockets' files: a kill then leaves none behind.
    link = plan.link(0, engines.endpoints_of(0), metrics, on_connected=engines.remove_directory)
    endpoints = [engines.endpoints_of(number) for number in range(num_fronts)]
    fronts = Fronts(board, metrics)
    for number in stop_signals():  # until serve() installs handlers of its own
        signal.signal(number, _exit)
    try:
        engines.start()
        fronts.start(f"{role}-front", _run_further, plan, endpoints, listeners[0])
        with plan.open(link, metrics) as served:
            addresses = ", ".join(f"{each.scheme}://{settings.host}:{each.port}" for each in listeners)
            log.info("serving %s on %s, fronts: %d", settings.model_name, addresses, num_fronts)
            return asyncio.run(
                serve(link, engines, fronts, listeners, served, settings.drain_timeout_secs, num_at_work)
            )
    except (OSError, StartError) as error:
        log.error("%s", error)
        return 1
    finally:
        for listener in listeners:
            listener.socket.close()
        fronts.kill()
        # ``serve`` has told the engines to shut down if they had become ready, and none of them and no front
        # had died.
        were_told = link.ready is not None and link.state is not LinkState.GONE
        engines.stop(graceful=were_told)


def _check_start(settings: S, check: Callable[[S], object]) -> None:
    """Try what can fail before anything slow begins: checkpoint, settings, keys. Raises StartError."""
    if not settings.model_path.is_dir():
        raise CheckpointError(
            f"--model-path {settings.model_path}: no such directory; give a local Hugging Face checkpoint"
        )
    check(settings)
    load_api_keys(settings.api_key_file)
    load_control_keys(settings.control_key_file)


def _listeners(settings: NodeSettings, ports: Sequence[int]) -> list[Listener]:
    """Listen on all ports, on the first one with TLS if the settings have a certificate. Raises OSError."""
    certfile, keyfile = settings.ssl_certfile, settings.ssl_keyfile
    certificate = Certificate(certfile, keyfile) if certfile else None
    return [
        Listener(settings.host, port, certificate if index == 0 else None) for index, port in enumerate(ports)
    ]


def _run_further(
    number: int, plan: _NodePlan[Any], endpoints: Sequence[Sequence[str]], listener: Listener
) -> None:
    """Run front ``number``. Raises SystemExit(1) when it cannot start."""
    setup_logging(plan.settings.log_level, f"{plan.role}-front {number}")
    metrics = plan.metrics()
    link = plan.link(number, endpoints[number], metrics)
    try:
        with plan.open(link, metrics) as (app, *_):
            asyncio.run(serve_further(number, link, metrics, plan.board, listener, app))
    except (OSError, StartError) as error:
        log.error("%s", error)
        raise SystemExit(1) from None


def _exit(number: int, frame: object) -> NoReturn:
    log.info("%s: not serving yet, nothing to finish", signal.Signals(number).name)
    raise SystemExit(0)
