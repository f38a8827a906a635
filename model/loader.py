"""Loads a checkpoint's weights onto one device, or its routed experts onto others.

transformers loads what fits on one device in the model's dtype. A checkpoint in fp8, or one whose experts are
to be spread, is read here, tensor by tensor: the routed experts keep the checkpoint's fp8, all other weights
are converted to the model's dtype. Nothing is ever whole in main memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.block_fp8 import DTYPE as FP8
from kernels.block_fp8 import dequantize, scales_shape
from kernels.experts import ExpertMatrices
from kernels.kv_format import FP8_CAPABILITY
from model.dsa import DsaModel
from model.experts import DeviceQueue, ExpertShard, RoutedExperts, split_evenly
from model.spec import CheckpointError, ModelSpec, weight_files

log = logging.getLogger(__name__)

SCALES = "_scale_inv"
"""Behind the name of a matrix in fp8: the name of its scales."""
KEY_NORM = ".indexer.k_norm."
"""In the names of weights that are in float32 whatever the model's dtype is."""
REPORT_INTERVAL_SECS = 10.0


def load_model(
    model_path: Path | str,
    spec: ModelSpec,
    device: torch.device | str = "cpu",
    expert_devices: Sequence[torch.device | str] = (),
) -> DsaModel:
    """Load the weights in ``spec.dtype`` onto ``device``, the routed experts onto ``expert_devices``.

    Without ``expert_devices`` all are on ``device``. Raises CheckpointError when some are missing, or cannot
    be used there.
    """
    path, home = Path(model_path), _with_index(device)
    if not spec.weights_are_fp8 and not expert_devices:
        return DsaModel(spec, _load_by_transformers(path, spec, home))
    of_experts = [_with_index(name) for name in expert_devices] or [home]
    _check_devices(spec, of_experts)
    _warn_of_detours(home, of_experts)
    return DsaModel(spec, _Loader(path, spec, home, of_experts).load())


def _with_index(device: torch.device | str) -> torch.device:
    """So that ``cuda`` and ``cuda:0`` are the same device."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _load_by_transformers(path: Path, spec: ModelSpec, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    placement: dict[str, Any] = {} if device.type == "cpu" else {"device_map": str(device)}
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        hf_model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=spec.dtype,
            attn_implementation="eager",
            experts_implementation=experts_implementation(config, device, spec.dtype),
            local_files_only=True,
            output_loading_info=True,
            **placement,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_loaded(path, error) from error
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"model_path {path}: {len(missing)} weights are missing, first {missing[0]}")
    if spec.dtype != torch.float32:
        _restore_key_norms(path, hf_model)
    return hf_model.eval()


def _restore_key_norms(path: Path, hf_model: Any) -> None:
    """Give the indexers' key norms the checkpoint's own values, which transformers rounded to the dtype."""
    from safetensors import safe_open

    for file_path in weight_files(path):
        with safe_open(file_path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if KEY_NORM in name:
                    parameter = hf_model.get_parameter(name)
                    parameter.data = file.get_tensor(name).to(parameter.device, torch.float32)


def _not_loaded(path: Path, error: Exception) -> CheckpointError:
    remedy = ""
    if isinstance(error, torch.OutOfMemoryError):
        remedy = "; spread the routed experts over other GPUs with --expert-devices"
    return CheckpointError(f"model_path {path}: the weights cannot be loaded: {error}{remedy}")


def experts_implementation(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Which of transformers' implementations of the routed experts to use.

    ``grouped_mm`` is the fastest at every batch size, by a factor of 2 at 16 tokens on the CPU. Its kernel on
    a GPU is of bfloat16 alone; in its place comes a loop that asks the GPU for lengths, which no CUDA graph
    can hold. Nor does it take rows that are no multiple of 16 bytes; on the CPU transformers' loop does.
    """
    row_bytes = (config.hidden_size * dtype.itemsize, config.moe_intermediate_size * dtype.itemsize)
    fits = not any(num_bytes % 16 for num_bytes in row_bytes)
    if device.type == "cuda":
        return "grouped_mm" if fits and dtype == torch.bfloat16 else "batched_mm"
    return "grouped_mm" if fits else "eager"


def _check_devices(spec: ModelSpec, devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type != "cuda" or not spec.weights_are_fp8:
            continue
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise CheckpointError(
                f"the weights are in fp8, which {device} cannot convert: it has compute capability "
                f"{capability[0]}.{capability[1]}, not 8.9; convert the checkpoint to bfloat16"
            )


def _warn_of_detours(home: torch.device, devices: Sequence[torch.device]) -> None:
    """Tokens cross to the devices of experts and back in every layer."""
    for device in devices:
        if device.type == "cuda" and device != home and not torch.cuda.can_device_access_peer(home, device):
            log.warning(
                "%s and %s cannot access each other's memory: every layer's tokens take a detour through main"
                " memory; choose GPUs for --expert-devices that nvidia-smi topo -p2p r shows as OK",
                home,
                device,
            )


class _Loader:
    """One reading of a checkpoint."""

    def __init__(
        self, path: Path, spec: ModelSpec, device: torch.device, expert_devices: Sequence[torch.device]
    ) -> None:
        self._path = path
        self._spec = spec
        self._device = device
        self._expert_queues = [DeviceQueue(of_experts, device) for of_experts in expert_devices]
        self._file_of: dict[str, Any] = {}
        """The open file that has a tensor, by the tensor's name."""
        self._num_bytes = 0
        self._next_report_at = time.monotonic() + REPORT_INTERVAL_SECS

    def load(self) -> Any:
        from safetensors import SafetensorError, safe_open
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(self._path, local_files_only=True)
        if config.hidden_act != "silu":
            raise CheckpointError(
                f"{self._path / 'config.json'}: hidden_act is {config.hidden_act!r}; with fp8 weights or "
                "--expert-devices only 'silu' is supported"
            )
        with torch.device("meta"):  # shapes, and no memory
            hf_model = AutoModelForCausalLM.from_config(
                config, dtype=self._spec.dtype, attn_implementation="eager"
            )
        try:
            with ExitStack() as stack:
                for path in weight_files(self._path):
                    file = stack.enter_context(safe_open(path, framework="pt"))
                    self._file_of |= dict.fromkeys(file.keys(), file)
                for layer, module in enumerate(hf_model.model.layers):
                    if (experts := getattr(module.mlp, "experts", None)) is not None:
                        module.mlp.experts = self._routed_experts(layer, experts)
                state = {name: self._weight(name, hf_model) for name in hf_model.state_dict()}
                hf_model.load_state_dict(state, assign=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise _not_loaded(self._path, error) from error
        rotary = hf_model.model.rotary_emb  # made of the configuration, and in no checkpoint
        hf_model.model.rotary_emb = type(rotary)(config=config).to(self._device)
        return hf_model.eval()

    def _weight(self, name: str, hf_model: Any) -> Tensor:
        """A tensor of any module but the experts, as the model computes with it."""
        if name not in self._file_of and hf_model.config.tie_word_embeddings and name == "lm_head.weight":
            name = "model.embed_tokens.weight"
        values = self._read(name)
        in_float32 = any(part in name for part in (*hf_model._keep_in_fp32_modules_strict, KEY_NORM))
        dtype = torch.float32 if in_float32 else self._spec.dtype
        if values.dtype != FP8:
            return values.to(self._device, dtype)
        scales = self._read(name + SCALES, scales_shape(*values.shape))
        return dequantize(values.to(self._device), scales.to(self._device), dtype)

    def _routed_experts(self, layer: int, module: Any) -> RoutedExperts:
        num_experts, hidden_size, inner_size = module.down_proj.shape
        dtype = FP8 if self._spec.weights_are_fp8 else self._spec.dtype
        shards = []
        for experts, queue in zip(
            split_evenly(num_experts, len(self._expert_queues)), self._expert_queues, strict=True
        ):
            shard = ExpertShard(experts, hidden_size, inner_size, dtype, queue)
            for place, expert in enumerate(experts):
                prefix = f"model.layers.{layer}.mlp.experts.{expert}"
                self._fill(f"{prefix}.gate_proj.weight", shard.gate_up, place, 0)
                self._fill(f"{prefix}.up_proj.weight", shard.gate_up, place, 1)
                self._fill(f"{prefix}.down_proj.weight", shard.down, place, 0)
            shards.append(shard)
        return RoutedExperts(shards)

    def _fill(self, name: str, matrices: ExpertMatrices, expert: int, number: int) -> None:
        """Copy a matrix to where it belongs, with its scales."""
        target = matrices.values[expert, number]
        values = self._read(name, target.shape)
        if values.dtype != target.dtype and FP8 in (values.dtype, target.dtype):
            raise CheckpointError(
                f"model_path {self._path}: {name} is in {values.dtype}; with the quantization_config of "
                f"config.json all experts are expected in {target.dtype}"
            )
        target.copy_(values)
        if matrices.scales is not None:
            scales = matrices.scales[expert, number]
            scales.copy_(self._read(name + SCALES, scales.shape))

    def _read(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """On the CPU. ``shape``: checked where given."""
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"model_path {self._path}: {name} is missing")
        tensor: Tensor = file.get_tensor(name)
        if shape is not None and tensor.shape != tuple(shape):
            raise CheckpointError(
                f"model_path {self._path}: {name} is {list(tensor.shape)}; expected {list(shape)}"
            )
        self._num_bytes += tensor.nbytes
        if (now := time.monotonic()) >= self._next_report_at:
            self._next_report_at = now + REPORT_INTERVAL_SECS
            log.info("read %.0f GB of weights, now %s", self._num_bytes / 1e9, name)
        return tensor
