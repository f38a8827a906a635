"""The start of an engine's process, the same on both nodes: from settings to a loop that serves.

Each rank of a node is a process that runs ``run_engine_process``, which the nodes' ``server.py`` calls.
Everything that can be checked early is checked before the model is loaded, because loading may take minutes.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Sequence

import torch

from hisparse_pd.base.node_settings import NodeSettings
from hisparse_pd.base.process import die_with_parent, setup_logging, share_interpreter
from hisparse_pd.base.settings import STARTUP_TIMEOUT_SECS
from hisparse_pd.base.vocabulary import VERSION, RankPlace
from hisparse_pd.core.memory.device import check_devices, use_device
from hisparse_pd.core.memory.free import check_host_memory
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.memory.numa import Placement, place_ranks, with_pools
from hisparse_pd.core.memory.numa_binding import bind_threads, with_allowed_policy
from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.rank_group import RankGroup, RankGroupError
from hisparse_pd.core.model.spec import ModelSpec, load_spec
from hisparse_pd.engine.loop import EngineLoop, SettingsT
from hisparse_pd.engine.messages import EngineLoading
from hisparse_pd.engine.sockets import Crossing, EngineSocket, FrontGone
from hisparse_pd.kernels.row_math import fix_arithmetic
from hisparse_pd.kernels.row_trial import try_products
from hisparse_pd.protocol.channels import allow_many_peers
from hisparse_pd.transfer.engine import quiet_mooncake_logs
from hisparse_pd.transfer.transport import Transport, choose_transport

log = logging.getLogger(__name__)


def run_engine_process(
    engine_class: type[EngineLoop[SettingsT]],
    settings: SettingsT,
    endpoints: Sequence[str],
    place: RankPlace,
) -> None:
    """Load everything, tell the fronts at ``endpoints`` of the progress, and serve until they send Shutdown.

    ``settings.device`` is this rank's. Raises StartError, also from the engine.
    """
    placement = _prepare_process(engine_class.role, settings, place)
    socket = EngineSocket(endpoints, Crossing.of(settings) if settings.node_rank > 0 else None)
    ranks: RankGroup | None = None
    try:
        spec = _check_model(settings)
        # Free memory is read before the ranks meet, and so before any of them makes its pools.
        sized = engine_class.with_host_sizes(settings, spec, placement, Machine())
        num_host_bytes = engine_class.registered_host_bytes(sized, spec)
        num_other_bytes = engine_class.other_host_bytes(sized, spec)
        transport = transport_of(sized, num_host_bytes, placement.nics, num_other_bytes)
        placement = with_allowed_policy(with_pools(placement, num_host_bytes + num_other_bytes, Machine()))
        log.log(logging.WARNING if placement.remedy else logging.INFO, "NUMA: %s", placement)
        ranks = _meet_ranks(settings, spec, place) if place.size > 1 else None
        model = load_model(
            settings.model_path,
            spec,
            settings.device,
            ranks,
            lambda done, total: socket.send(EngineLoading("weights", done, total)),
        )
        socket.send(EngineLoading("pools and kernels"))
        if ranks is not None:
            ranks.meet("loaded")  # from here on the model runs, and waits for another rank only briefly
        engine = engine_class(sized, spec, model, socket, transport, placement)
        gc.freeze()  # else each full collection visits all of torch and transformers: 0.2 s without a step
        _serve(engine)
    finally:
        socket.close()
    if ranks is not None:
        ranks.leave()


def _prepare_process(role: str, settings: NodeSettings, place: RankPlace) -> Placement:
    """Set up the process's log, threads and arithmetic. Returns its place on the machine."""
    die_with_parent()
    rank = f" rank {place.rank}" if place.size > 1 else ""
    setup_logging(settings.log_level, f"{role}-engine:{settings.port}{rank}")
    quiet_mooncake_logs()
    allow_many_peers()
    share_interpreter()  # with the threads that send and receive
    placements = place_ranks(settings.numa, settings.devices_here(place.rank), Machine())
    placement = placements[settings.ranks_here.index(place.rank)]
    bind_threads(placement)  # early: later threads inherit the CPUs, and pools' pages follow the threads
    if settings.num_threads > 0:
        torch.set_num_threads(settings.num_threads)
    elif placement.cpus:
        torch.set_num_threads(min(torch.get_num_threads(), len(placement.cpus)))
    if settings.device == "cpu":
        fix_arithmetic()
    return placement


def _check_model(settings: NodeSettings) -> ModelSpec:
    """Check that this rank's device can run the model. Returns the model's spec, without its weights."""
    if settings.device == "cpu":
        try_products()
    check_devices((settings.device,))
    use_device(settings.device)
    spec = load_spec(
        settings.model_path,
        settings.dtype,
        settings.kv_cache_dtype,
        settings.context_length,
        device=settings.device,
        indexer_cache_dtype=settings.indexer_cache_dtype,
        num_draft_layers=settings.num_draft_layers,
        load_format=settings.load_format,
        has_row_checks=settings.verify_rows,
    )
    gc.freeze()
    gc.enable()  # collections were off from the process's start on (``first_front.py``), for the imports
    AttentionKernels.check(spec, torch.device(settings.device), settings.attention_backend)
    return spec


def _meet_ranks(settings: NodeSettings, spec: ModelSpec, place: RankPlace) -> RankGroup:
    """Connect to the node's other ranks, and check that all have the same settings."""
    ranks = RankGroup(
        place,
        torch.device(settings.device),
        agree_secs=settings.heartbeat_timeout_secs,
        forward_secs=max(settings.health_timeout_secs, settings.heartbeat_timeout_secs),
        start_secs=STARTUP_TIMEOUT_SECS,
        over_memory=settings.rank_exchange == "auto",
    )
    ranks.check_same({"release": VERSION, "checkpoint": spec.fingerprint, **settings.of_all_machines})
    return ranks


def _serve(engine: EngineLoop[SettingsT]) -> None:
    """Run the loop to its end. The process ends here if another rank or the front is lost."""
    try:
        engine.run()
    except (RankGroupError, FrontGone) as error:
        log.error("%s", error)
        os._exit(1)  # without close(), which would wait for a step that may never end
    finally:
        engine.close()


def transport_of(
    settings: NodeSettings, num_host_bytes: int, near: Sequence[str] = (), num_other_bytes: int = 0
) -> Transport:
    """Return the transport of a rank that registers ``num_host_bytes`` of main memory, and takes
    ``num_other_bytes`` beside. ``near``: RDMA devices near the rank, which are preferred.

    Raises StartError, also if free memory is too small for the pools of all ranks on this machine together:
    all ranks check this before any allocates its own.
    """
    check_host_memory((num_host_bytes + num_other_bytes) * len(settings.ranks_here))
    return choose_transport(settings, num_host_bytes, near=near)
