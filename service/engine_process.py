"""The start of an engine's process, the same on both nodes.

What can be known to fail is tried before the model is loaded, which may take minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from kernels.attention import AttentionBackendError
from kernels.device_memory import DeviceMemoryError, DeviceMissingError, check_devices, use_device
from kernels.gpu_sizes import KernelSizeError
from kernels.host_memory import HostMemoryError
from kernels.row_math import fix_arithmetic
from model.attention_kernels import AttentionKernels
from model.dsa import DsaModel
from model.loader import load_model
from model.spec import ModelSpec, spec_of
from service.engine_messages import EngineLoading
from service.engine_sockets import EngineSocket
from service.process import die_with_parent, setup_logging, start_errors
from service.settings import NodeSettings
from transfer.engine import TransferSetupError, quiet_mooncake_logs
from transfer.transport import Transport
from vocabulary import CheckpointError

START_ERRORS = (
    AttentionBackendError,
    CheckpointError,
    DeviceMemoryError,
    DeviceMissingError,
    HostMemoryError,
    KernelSizeError,
    TransferSetupError,
)


class Engine(Protocol):
    def run(self) -> None:
        """Serve until the front says Shutdown or is gone."""

    def close(self) -> None: ...


def run_engine_process(
    settings: NodeSettings,
    ipc_path: str,
    *,
    role: str,
    settings_error: type[Exception],
    choose_transport: Callable[[ModelSpec], Transport],
    make: Callable[[ModelSpec, DsaModel, EngineSocket, Transport], Engine],
) -> None:
    """Load everything, telling the front of it, and serve.

    ``choose_transport`` also checks what else the node needs of this machine. Raises StartError for what
    ``START_ERRORS`` and ``settings_error`` say.
    """
    die_with_parent()
    setup_logging(settings.log_level, f"{role}-engine:{settings.port}")
    quiet_mooncake_logs()
    if settings.num_threads > 0:
        torch.set_num_threads(settings.num_threads)
    if settings.device == "cpu":
        fix_arithmetic()
    front = EngineSocket(ipc_path)
    try:
        with start_errors(*START_ERRORS, settings_error):
            check_devices((settings.device, *settings.expert_devices))
            use_device(settings.device)
            spec = spec_of(settings)
            AttentionKernels.check(spec, torch.device(settings.device), settings.attention_backend)
            transport = choose_transport(spec)
            model = load_model(
                settings.model_path,
                spec,
                settings.device,
                settings.expert_devices,
                lambda done, total: front.send(EngineLoading("weights", done, total)),
            )
            front.send(EngineLoading("pools and kernels"))
            engine = make(spec, model, front, transport)
        try:
            engine.run()
        finally:
            engine.close()
    finally:
        front.close()
