"""Loads a checkpoint's weights onto one device, with only this rank's share of the routed experts.

An engine of either node calls ``load_model`` once, at its start. transformers makes the modules without
memory. Their tensors are allocated here, on the device. Then they are read and converted to the model's dtype
(``weight_reader.py``), or dummy weights are drawn in place (``dummy_weights.py``). No weight for a GPU is
ever whole in main memory. Routed experts become modules of our own, which keep the checkpoint's fp8 or four
bits; so do all other fp8 matrices if ``keeps_fp8``. All other matrices in four bits are converted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model.block_linear import BlockLinear
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.dummy_weights import INT4_SCALES, INT4_VALUES, draw
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.int4_config import packed_name
from hisparse_pd.core.model.int4_weights import Int4Source
from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.model.stored_formats import SCALES, WEIGHT, StoredFormats
from hisparse_pd.core.model.stored_weights import weight_files
from hisparse_pd.core.model.weight_reader import (
    Placement,
    Progress,
    StoredTensor,
    WeightFiles,
    is_same,
    read_weights,
)
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.block_fp8 import scales_shape
from hisparse_pd.kernels.block_linear import takes_device, takes_matrix
from hisparse_pd.kernels.expert_routing import ExpertMatrices
from hisparse_pd.kernels.fp8 import FP8_CAPABILITY
from hisparse_pd.kernels.int4 import MIDDLE, Int4Form, Int4Matrices
from hisparse_pd.kernels.row_math import RowLinear

ABSORBED = "kv_b_proj"
"""The matrix that MLA absorbs into queries and results, split by head. This needs it in the model's dtype."""
HEAD_WEIGHTS = "weights_proj"
"""The matrix of the indexer's head weights; it is in float32, whatever its dtype in the checkpoint."""
IN_FLOAT32 = (".indexer.k_norm.", f".indexer.{HEAD_WEIGHTS}.")
"""Parts of the names of weights that are always in float32, as in DeepSeek's reference."""
NEVER_IN_FP8 = (ABSORBED, HEAD_WEIGHTS, "fc1", "fc2")
"""Linear layers whose matrices are always converted from fp8. The last two belong to a norm's gate, whose 16
rows or columns are too few for blocks."""
PUBLISHED_DENSE = ("lm_head", "eh_proj")
"""Linear layers that fp8 checkpoints have in bfloat16; dummy weights follow them."""


def load_model(
    model_path: Path | str,
    spec: ModelSpec,
    device: torch.device | str = "cpu",
    ranks: RankGroup | None = None,
    on_progress: Progress = lambda done, total: None,
    draw_weight: Callable[[str, Tensor], None] = draw,
) -> DsaModel:
    """Load the weights onto ``device`` in ``spec.dtype``, with only this rank's routed experts.

    ``on_progress`` is called by the calling thread. ``draw_weight`` fills a tensor of dummy weights,
    given its name. Raises CheckpointError when weights are missing or cannot be used on the device.
    """
    device = with_index(device)
    _check_device(spec, device)
    loader = Loader(
        Path(model_path), spec, device, ranks, keeps_fp8=keeps_fp8(spec, device), draw_weight=draw_weight
    )
    return DsaModel(spec, loader.load(on_progress), ranks)


def keeps_fp8(spec: ModelSpec, device: torch.device) -> bool:
    """Whether fp8 linear layers stay in fp8, in half the memory, instead of being converted to the model's
    dtype.

    They stay in fp8 where the model runs in bfloat16 on a GPU. Products with fp8 weights round activations to
    fp8, too, which runs in float32 or on a CPU must not do; there the weights are converted.
    """
    is_wanted = spec.weights_are_fp8 and device.type == "cuda" and spec.dtype == torch.bfloat16
    return is_wanted and takes_device(device)


def with_index(device: torch.device | str) -> torch.device:
    """Return the device with its number, which makes ``cuda`` equal to ``cuda:0``."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _not_loaded(path: Path, error: Exception) -> CheckpointError:
    remedy = ""
    if isinstance(error, torch.OutOfMemoryError):
        remedy = "; spread the routed experts over more GPUs with --dp-size"
    return CheckpointError(f"--model-path {path}: the weights cannot be loaded: {error}{remedy}")


def _check_device(spec: ModelSpec, device: torch.device) -> None:
    rounds_tokens = spec.int4 is not None and spec.int4.rounds_tokens
    if device.type != "cuda" or not (spec.weights_are_fp8 or rounds_tokens):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise CheckpointError(
            f"the {'weights' if spec.weights_are_fp8 else 'activations'} are in fp8, which {device} cannot "
            "convert: it has compute capability "
            f"{capability[0]}.{capability[1]}, not 8.9; convert the checkpoint to bfloat16"
        )


class Loader:
    """One load of a checkpoint: all modules are made, and routed experts with them, which allocate their own
    tensors; then all other tensors are allocated; then all are read at once."""

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        device: torch.device,
        ranks: RankGroup | None,
        *,
        keeps_fp8: bool = False,
        draw_weight: Callable[[str, Tensor], None] = draw,
    ) -> None:
        self._path = path
        self._spec = spec
        self._formats = StoredFormats(spec)
        self._device = device
        self._ranks = ranks
        self._keeps_fp8 = keeps_fp8
        self._draw_weight = draw_weight
        self._placements: list[Placement] = []
        """The tensors that ``load`` reads in the end."""

    def load(self, on_progress: Progress = lambda done, total: None) -> Any:
        """Return transformers' modules with our own in places, filled. Raises CheckpointError."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._path, local_files_only=True).get_text_config()
        hf_model = self._modules_without_memory(config)
        try:
            with WeightFiles([] if self._spec.weights_are_dummy else weight_files(self._path)) as files:
                self._put_own_modules(files, hf_model)
                state = self._allocate_tensors(files, hf_model)
                read_weights(self._placements, self._device, on_progress)
        except (OSError, RuntimeError) as error:
            raise _not_loaded(self._path, error) from error
        hf_model.load_state_dict(state, assign=True)
        # Rotary frequencies are computed from the configuration, which on the device ``meta`` gave no values:
        # the module is made again. Weights that the checkpoint has for it (Mistral-Large-4's ``lerope``) are
        # taken over from the first one.
        rotary = hf_model.model.rotary_emb
        hf_model.model.rotary_emb = type(rotary)(config=config).to(self._device)
        hf_model.model.rotary_emb.load_state_dict(rotary.state_dict())
        return hf_model.eval().requires_grad_(False)

    def _modules_without_memory(self, config: Any) -> Any:
        """Return transformers' modules on the device ``meta``: shapes without memory."""
        if config.hidden_act != "silu":
            raise CheckpointError(
                f"{self._path / 'config.json'}: hidden_act is {config.hidden_act!r}; only 'silu' is supported"
            )
        try:
            with torch.device("meta"):
                return _language_model(
                    config,
                    dtype=self._spec.dtype,
                    attn_implementation="eager",
                    experts_implementation="eager",
                )
        except Exception as error:
            raise CheckpointError(
                f"{self._path / 'config.json'}: transformers makes no model of it: {error!r}"
            ) from error

    def _put_own_modules(self, files: WeightFiles, hf_model: Any) -> None:
        """Add the MTP layer, and replace experts and linear layers by modules of our own."""
        if self._spec.num_draft_layers:
            self._append_draft_layer(files, hf_model)
        for layer, module in enumerate(hf_model.model.layers):
            if (experts := getattr(module.mlp, "experts", None)) is not None:
                module.mlp.experts = self._routed_experts(files, layer, experts, module.mlp)
        if self._keeps_fp8:
            self._put_block_linears(files, hf_model)
        if self._device.type == "cpu":
            _put_row_linears(hf_model)

    def _append_draft_layer(self, files: WeightFiles, hf_model: Any) -> None:
        """Append the MTP layer, which transformers leaves out: one more decoder layer, with the modules that
        only an MTP layer has. Its modules have the checkpoint's names."""
        number = self._spec.num_layers
        name = f"model.layers.{number}"
        config = copy.deepcopy(hf_model.config)
        # With dummy weights there is no file to look into: the layer gets experts.
        is_sparse = self._spec.weights_are_dummy or files.get(f"{name}.mlp.gate.weight") is not None
        config.mlp_layer_types = [*config.mlp_layer_types[:number], "sparse" if is_sparse else "dense"]
        if getattr(config, "indexer_types", None):
            # Where layers may share an earlier one's selection, the MTP layer has its own indexer: "full".
            config.indexer_types = [*config.indexer_types[:number], "full"]
        size, eps, norm_type = config.hidden_size, config.rms_norm_eps, type(hf_model.model.norm)
        with torch.device("meta"):
            layer = type(hf_model.model.layers[0])(config, number)
            layer.enorm, layer.hnorm = norm_type(size, eps), norm_type(size, eps)
            layer.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
            layer.shared_head = torch.nn.Module()
            layer.shared_head.norm = norm_type(size, eps)
            if _has_own(files, f"{name}.embed_tokens.weight", "model.embed_tokens.weight"):
                layer.embed_tokens = torch.nn.Embedding(config.vocab_size, size)
            if _has_own(files, f"{name}.shared_head.head.weight", "lm_head.weight"):
                layer.shared_head.head = torch.nn.Linear(size, config.vocab_size, bias=False)
        hf_model.model.layers.append(layer)

    def _put_block_linears(self, files: WeightFiles, hf_model: Any) -> None:
        """Replace linear layers by ``BlockLinear`` where the matrix is in fp8 and its shape allows it."""
        for name, module in list(hf_model.named_modules()):
            parent, _, last = name.rpartition(".")
            if not isinstance(module, torch.nn.Linear) or last in NEVER_IN_FP8:
                continue
            stored = files.get(self._formats.name(f"{name}{WEIGHT}"))
            is_fp8 = stored is not None and stored.dtype == FP8
            if self._spec.weights_are_dummy:
                is_fp8 = last not in PUBLISHED_DENSE and self._formats.is_declared_fp8(name)
            if is_fp8 and takes_matrix(module.out_features, module.in_features):
                with torch.device("meta"):
                    linear = BlockLinear(
                        module.in_features, module.out_features, ue8m0=self._spec.scales_are_ue8m0
                    )
                setattr(hf_model.get_submodule(parent), last, linear)

    def _allocate_tensors(self, files: WeightFiles, hf_model: Any) -> dict[str, Tensor]:
        """Allocate all tensors of the modules, each in the dtype in which the model uses it, and plan to fill
        them. Returns them by transformers' names. RoutedExperts allocate their own, in no state dict."""
        state: dict[str, Tensor] = {}
        for name, weight in hf_model.state_dict().items():
            if name == "lm_head.weight" and hf_model.config.tie_word_embeddings and files.get(name) is None:
                state[name] = state["model.embed_tokens.weight"]
                continue
            in_float32 = any(part in name for part in (*hf_model._keep_in_fp32_modules_strict, *IN_FLOAT32))
            dtype = torch.float32 if in_float32 or name.endswith(SCALES) else self._spec.dtype
            dtype = FP8 if weight.dtype == FP8 else dtype
            state[name] = torch.empty(weight.shape, dtype=dtype, device=self._device)
            self._plan(files, self._formats.name(name), state[name])
        return state

    def _plan(self, files: WeightFiles, name: str, target: Tensor) -> None:
        """Plan to fill ``target`` with the tensor ``name``, converted to its dtype.

        Dummy weights are drawn at once.
        """
        if self._spec.weights_are_dummy:
            self._draw_weight(name, target)
            return
        int4, module = self._spec.int4, name.removesuffix(WEIGHT)
        if int4 is not None and files.get(name) is None and files.get(packed_name(int4.method, module)):
            source = Int4Source.find(
                int4, module, target.shape[0], target.shape[1], partial(self._find, files)
            )
            self._placements.append(source.dense_placement(target))
            return
        stored = self._find_weight(files, name, target.shape)
        scales = None
        if stored.dtype == FP8 and target.dtype != FP8:
            scales = self._find(files, self._formats.scales_of(name), scales_shape(*target.shape))
        self._placements.append(Placement(stored, target, scales))

    def _routed_experts(self, files: WeightFiles, layer: int, module: Any, mlp: Any) -> RoutedExperts:
        """Return our module of a layer's experts, with memory for this rank's share, and plan to fill it.

        ``module``: transformers' module of the experts; ``mlp``: the block that it belongs to. On a GPU
        without other ranks there is also memory for a copy of the shared expert, which
        ``RoutedExperts.take_shared`` fills later, if it has the experts' form: one launch then computes both.
        """
        num_experts, hidden_size, inner_size = module.down_proj.shape
        shared = getattr(mlp, "shared_experts", None)
        shared_has_form = shared is not None and shared.down_proj.in_features == inner_size
        if self._ranks is not None and self._ranks.size > num_experts:
            raise CheckpointError(
                f"--dp-size {self._ranks.size} must be at most the model's {num_experts} routed experts"
            )
        dtype = self._formats.experts_dtype(files, layer)
        routed = RoutedExperts(
            num_experts,
            hidden_size,
            inner_size,
            dtype,
            self._device,
            self._ranks,
            ue8m0=self._spec.scales_are_ue8m0,
            has_room=shared_has_form
            and self._ranks is None
            and self._device.type == "cuda"
            and not isinstance(dtype, Int4Form),
        )
        for place, expert in enumerate(routed.experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            self._plan_expert_matrix(files, f"{prefix}.gate_proj.weight", routed.gate_up, place, number=0)
            self._plan_expert_matrix(files, f"{prefix}.up_proj.weight", routed.gate_up, place, number=1)
            self._plan_expert_matrix(files, f"{prefix}.down_proj.weight", routed.down, place, number=0)
        return routed

    def _plan_int4_matrix(
        self, files: WeightFiles, module: str, matrices: Int4Matrices, place: int, number: int
    ) -> None:
        """Plan to fill one of an expert's matrices in four bits, as ``_plan_expert_matrix`` does."""
        int4 = self._spec.int4
        assert int4 is not None, "matrices in four bits without their configuration"
        if not self._spec.weights_are_dummy:
            source = Int4Source.find(
                int4, module, matrices.rows, matrices.columns, partial(self._find, files)
            )
            self._placements += source.placements(matrices, place, number)
            return
        scales = matrices.scales[place, number]
        self._draw_weight(f"{module}{INT4_VALUES}", matrices.values[place, number])
        self._draw_weight(f"{module}{INT4_SCALES}", scales)
        scales *= int4.group_size**-0.5
        if matrices.zeros is not None:
            matrices.zeros[place, number].fill_(MIDDLE)

    def _plan_expert_matrix(
        self,
        files: WeightFiles,
        name: str,
        matrices: ExpertMatrices | Int4Matrices,
        place: int,
        number: int,
    ) -> None:
        """Plan to fill one of an expert's matrices, without conversion from or to fp8, and its scales.

        Dummy weights are drawn at once. ``place``: the expert's place among this rank's; ``number``: the
        matrix's number among those of one expert in ``matrices``.
        """
        name = self._spec.family.stored_name(name)
        if isinstance(matrices, Int4Matrices):
            self._plan_int4_matrix(files, name.removesuffix(WEIGHT), matrices, place, number)
            return
        target = matrices.values[place, number]
        if self._spec.weights_are_dummy:
            self._draw_weight(name, target)
            if matrices.scales is not None:
                self._draw_weight(name + SCALES, matrices.scales[place, number])
            return
        stored = self._find_weight(files, name, target.shape)
        if stored.dtype != target.dtype and FP8 in (stored.dtype, target.dtype):
            raise CheckpointError(
                f"--model-path {self._path}: {name} is in {stored.dtype}; with the quantization_config of "
                f"config.json all experts are expected in {target.dtype}"
            )
        self._placements.append(Placement(stored, target))
        if matrices.scales is not None:
            scales = matrices.scales[place, number]
            stored_scales = self._find(files, self._formats.scales_of(name), scales.shape)
            self._placements.append(Placement(stored_scales, scales))

    def _find_weight(self, files: WeightFiles, name: str, shape: Sequence[int]) -> StoredTensor:
        """Do ``_find`` for weights that are not packed."""
        stored = self._find(files, name, shape)
        if not stored.dtype.is_floating_point:
            raise CheckpointError(f"--model-path {self._path}: {name} is in {stored.dtype}; expected floats")
        return stored

    def _find(self, files: WeightFiles, name: str, shape: Sequence[int]) -> StoredTensor:
        stored = files.get(name)
        if stored is None:
            raise CheckpointError(f"--model-path {self._path}: {name} is missing")
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"--model-path {self._path}: {name} is {list(stored.shape)}; expected {list(shape)}"
            )
        return stored


def _language_model(config: Any, **options: Any) -> Any:
    """Return transformers' modules. If transformers has no class with an LM head for the configuration, a
    head is added beside the text model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM.from_config(config, **options)
    model: Any = AutoModel.from_config(config, **options)
    whole: Any = torch.nn.Module()
    whole.model, whole.config = model, config
    whole.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    whole._keep_in_fp32_modules_strict = model._keep_in_fp32_modules_strict
    return whole


def _has_own(files: WeightFiles, name: str, model_name: str) -> bool:
    """Whether the MTP layer has a matrix that differs from the model's; most checkpoints repeat the model's,
    gigabytes of it."""
    own, shared = files.get(name), files.get(model_name)
    return own is not None and (shared is None or not is_same(own, shared))


def _put_row_linears(hf_model: Any) -> None:
    """Replace all remaining linear layers by ones that give a row the same bits alone and among others."""
    for name, module in list(hf_model.named_modules()):
        if type(module) is torch.nn.Linear:
            parent, _, last = name.rpartition(".")
            with torch.device("meta"):
                linear = RowLinear(module.in_features, module.out_features, bias=module.bias is not None)
            setattr(hf_model.get_submodule(parent), last, linear)
