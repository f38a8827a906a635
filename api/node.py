"""Starts a node: its engines in processes of their own, and the HTTP API in this one.

``run_front`` is all that a node calls. What the API needs and lacks is said before the engine starts to load.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from starlette.types import ASGIApp

from api.app import Front
from api.detokenizer import TokenizerUnsupported
from api.keys import load_api_keys
from api.sampling_defaults import SamplingDefaults
from api.text_codec import TextCodec
from protocol.access import KeyFileError
from protocol.channels import load_control_keys
from service.descriptors import raise_limit
from service.engine_link import EngineLink, LinkState, QueueLimits, RankChoice
from service.front import EngineProcesses, EngineTarget, serve
from service.listening import Listener
from service.metrics import FrontMetrics
from service.process import setup_logging
from service.settings import NodeSettings
from vocabulary import CheckpointError

log = logging.getLogger(__name__)

S = TypeVar("S", bound=NodeSettings)


def run_front(
    settings: S,
    *,
    role: str,
    engine: EngineTarget[S],
    holds_output: bool,
    choose_rank: RankChoice,
    ports: Sequence[int],
    apps: Callable[[Front], Sequence[ASGIApp]],
) -> int:
    """Start the engines and serve ``apps``, one a port, until the node ends. Returns the exit status.

    ``holds_output``: the node's pools hold what is generated as well, not only prompts. ``choose_rank``: says
    whose a sample is.
    """
    setup_logging(settings.log_level, role)
    raise_limit()
    try:
        if not settings.model_path.is_dir():
            raise CheckpointError(f"model_path {settings.model_path}: no such directory")
        sampling_defaults = SamplingDefaults.of(settings)
        api_keys = load_api_keys(settings.api_key_file)
        control_keys = load_control_keys(settings.control_key_file)
        listeners = [Listener(settings.host, port) for port in ports]
    except (OSError, CheckpointError, KeyFileError) as error:
        log.error("%s", error)
        return 1
    if settings.exposure is not None:
        log.warning("%s", settings.exposure)
    metrics = FrontMetrics(settings.dp_size)
    engines = EngineProcesses(engine, settings, f"{role}-engine")
    link = EngineLink(
        engines.ipc_paths,
        settings.health_timeout_secs,
        metrics.update,
        engines.remove_directory,
        settings.startup_timeout_secs,
        QueueLimits.of(settings),
        choose_rank,
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # while the tokenizer loads; serve() takes them over
        signal.signal(number, _exit)
    try:
        engines.start()
        codec = TextCodec.load(settings.model_path)
        gc.freeze()  # else each full collection looks at all of transformers, 30 ms in which nobody is served
        front = Front(
            role, settings, codec, link, metrics, holds_output, api_keys, control_keys, sampling_defaults
        )
        addresses = ", ".join(f"http://{settings.host}:{listener.port}" for listener in listeners)
        log.info("serving %s on %s", settings.model_name, addresses)
        if defaults := str(sampling_defaults):
            log.info("requests that do not say are drawn as generation_config.json has it: %s", defaults)
        return asyncio.run(serve(link, engines, listeners, apps(front), settings.drain_timeout_secs))
    except (OSError, CheckpointError, TokenizerUnsupported) as error:
        log.error("%s", error)
        return 1
    finally:
        for listener in listeners:
            listener.socket.close()
        engines.stop(graceful=link.ready is not None and link.state is not LinkState.GONE)


def _exit(number: int, frame: object) -> NoReturn:
    log.info("%s: not serving yet, nothing to finish", signal.Signals(number).name)
    raise SystemExit(0)
