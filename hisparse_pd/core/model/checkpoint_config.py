"""Reads a checkpoint's configuration for ``load_spec``, and checks that the model can be served.

All functions but ``fingerprinted`` raise CheckpointError, which names the file, the value and what was
expected. ``config``: as ``read_config`` returns it; ``path``: the checkpoint's directory.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model.families import FAMILIES
from hisparse_pd.core.model.int4_config import INT4_METHODS, Int4Config, int4_config_of, packed_name
from hisparse_pd.core.model.stored_weights import WeightFile
from hisparse_pd.kernels.block_fp8 import BLOCK
from hisparse_pd.kernels.kv_format import FORMAT_NAMES
from hisparse_pd.protocol.messages import MAX_LAYERS

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

UE8M0 = "ue8m0"
"""The ``scale_fmt`` of scales that are only an exponent, which makes them powers of two."""
_PARTS = ("text_config", "vision_config")
"""Nested configurations of models that also take images."""
_CHANGING_ROPE_TYPES = ("dynamic", "longrope")
"""Kinds of rope whose angles depend on the longest request of a batch."""
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version")
"""Values that may differ between two nodes of the same model."""


def read_config(path: Path) -> dict[str, Any]:
    """Return all values of config.json, with the defaults of transformers' class for it."""
    if not path.is_dir():
        raise CheckpointError(f"--model-path {path}: no such directory; give a local Hugging Face checkpoint")
    config_file = path / "config.json"
    try:
        config = json.loads(config_file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"--model-path {path}: there is no config.json in it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{config_file}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{config_file}: expected a JSON object, got {type(config).__name__}")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise CheckpointError(f"{config_file}: model_type is {model_type!r}; supported are {supported}")
    _check_quantization(config, config_file)
    _check_num_layers(config, config_file)
    # A checkpoint may leave out values that are defaults of the configuration class.
    from transformers import AutoConfig

    try:
        resolved = AutoConfig.from_pretrained(path, local_files_only=True)
        text_config = resolved.get_text_config().to_dict()
    except Exception as error:
        raise CheckpointError(f"{config_file}: transformers refuses it: {str(error) or error!r}") from error
    _check_rope(text_config.get("rope_parameters"), config_file)
    _check_experts(text_config, config_file)
    # A model that also takes images has the text's values in a part of their own.
    of_text = {key: value for key, value in text_config.items() if value is not None}
    of_all = {key: value for key, value in resolved.to_dict().items() if key not in _PARTS}
    return {**of_all, **of_text, "model_type": model_type}


def _check_num_layers(config: dict[str, Any], config_file: Path) -> None:
    """Raise CheckpointError for too many layers, before transformers makes lists of that length."""
    for part in (config, config.get("text_config")):
        num_layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(num_layers, int) and num_layers > MAX_LAYERS:
            raise CheckpointError(
                f"{config_file}: num_hidden_layers is {num_layers}; {MAX_LAYERS} are the most"
            )


def _check_rope(parameters: object, config_file: Path) -> None:
    """Raise CheckpointError unless angles depend on positions alone (invariant I5), in each kind of layer."""
    if not isinstance(parameters, dict):
        return
    # Some models have such a dict for each kind of layer; other values are no dicts, and pass.
    for of_layers in parameters.values():
        _check_rope(of_layers, config_file)
    kind = parameters.get("rope_type")
    if kind in _CHANGING_ROPE_TYPES:
        raise CheckpointError(
            f"{config_file}: rope_type is {kind!r}, whose angles follow the longest request of a batch, so "
            "that a request's tokens would depend on others; supported are those that follow the position "
            "alone, such as 'default' and 'yarn'"
        )


def _check_experts(config: dict[str, Any], config_file: Path) -> None:
    """Raise CheckpointError if a token's groups have fewer experts than it must get."""
    num_experts, num_chosen = config.get("n_routed_experts"), config.get("num_experts_per_tok")
    num_groups, num_chosen_groups = config.get("n_group") or 1, config.get("topk_group") or 1
    if isinstance(num_experts, int) and isinstance(num_chosen, int):
        most = num_experts * min(num_chosen_groups, num_groups) // num_groups
        if not 0 < num_chosen <= most:
            raise CheckpointError(
                f"{config_file}: num_experts_per_tok is {num_chosen}; a token chooses among {most}: "
                f"n_routed_experts {num_experts}, {num_chosen_groups} of {num_groups} groups"
            )


def _check_quantization(config: dict[str, Any], config_file: Path) -> None:
    """Raise CheckpointError for weights in other formats than the model's dtype, fp8 in blocks, and four bits
    in groups."""
    quantization = config.get("quantization_config")
    if not quantization:
        return
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{config_file}: quantization_config is {quantization!r}; expected an object")
    if (method := quantization.get("quant_method")) in INT4_METHODS:
        int4_config_of(quantization, str(config_file))
        return
    if method != "fp8":
        supported = ", ".join(repr(each) for each in ("fp8", *INT4_METHODS))
        raise CheckpointError(
            f"{config_file}: quantization_config: quant_method is {method!r}; supported are {supported}; "
            "convert the checkpoint to bfloat16"
        )
    expected: dict[str, tuple[object, ...]] = {
        "fmt": ("e4m3", None),
        "weight_block_size": ([BLOCK, BLOCK],),
        "scale_fmt": (UE8M0, None),
    }
    for key, allowed in expected.items():
        if quantization.get(key) not in allowed:
            raise CheckpointError(
                f"{config_file}: quantization_config: {key} is {quantization.get(key)!r}; supported is "
                f"{allowed[0]!r}; convert the checkpoint to bfloat16"
            )


def positive_integer(config: dict[str, Any], path: Path, key: str) -> int:
    """Return what ``config`` has at ``key``, or raise CheckpointError. ``path``: the checkpoint's folder."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path / 'config.json'}: {key} is {value!r}; expected a positive integer")
    return value


def int4_of(config: dict[str, Any], path: Path) -> Int4Config | None:
    """Return the packing of weights in four bits; None where no weights are."""
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") not in INT4_METHODS:
        return None
    where = path / "config.json"
    found = int4_config_of(quantization, str(where))
    for key in ("hidden_size", "moe_intermediate_size"):
        if (size := positive_integer(config, path, key)) % found.group_size:
            raise CheckpointError(
                f"{where}: {key} is {size}; experts in four bits need a multiple of group_size "
                f"{found.group_size}; quantize the checkpoint again with another group_size"
            )
    return found


def index_groups_of(config: dict[str, Any], path: Path, num_layers: int) -> tuple[int, ...]:
    """Return the index group of each layer: every layer with an indexer ("full") begins a new one."""
    types = config.get("indexer_types") or ["full"] * num_layers
    where = f"{path / 'config.json'}: indexer_types"
    if len(types) != num_layers:
        raise CheckpointError(
            f"{where} has {len(types)} entries; expected one of each of {num_layers} layers"
        )
    if unknown := sorted(set(types) - {"full", "shared"}):
        raise CheckpointError(f"{where} has {unknown[0]!r}; expected 'full' or 'shared'")
    if types[0] != "full":
        raise CheckpointError(f"{where}: the first layer is 'shared'; it has no selection to share")
    num_indexers = accumulate(int(kind == "full") for kind in types)  # up to each layer
    return tuple(number - 1 for number in num_indexers)


def kv_source_layers_of(config: dict[str, Any], path: Path, num_layers: int) -> tuple[int, ...]:
    """Return the layer whose KV each layer attends to.

    transformers has checked that each is an earlier layer with KV of its own, or the layer itself.
    """
    sources = tuple(config.get("kv_source_layers") or range(num_layers))
    with_rope = config.get("no_rope_layers") or [1] * num_layers  # 1 where there is rope
    for layer, source in enumerate(sources):
        if bool(with_rope[layer]) != bool(with_rope[source]):
            raise CheckpointError(
                f"{path / 'config.json'}: kv_source_layers: layer {layer} attends to the KV of layer "
                f"{source}, but only one of them has rope in no_rope_layers; expected both or none"
            )
    return sources


def num_draft_layers_of(
    config: dict[str, Any], path: Path, files: list[WeightFile] | None, wanted: int | None
) -> int:
    """Return ``wanted``, or 1 where ``wanted`` is None and the checkpoint has an MTP layer.

    The weights are looked for, because exports may leave them out and still declare them. ``files``: None
    where random weights take the place of the checkpoint's.
    """
    if wanted not in (None, 0, 1):
        raise CheckpointError(f"num_draft_layers is {wanted}; expected 0 or 1")
    if wanted == 0:
        return 0
    declared = config.get("num_nextn_predict_layers") or 0
    if not isinstance(declared, int):
        raise CheckpointError(
            f"--model-path {path}: num_nextn_predict_layers is {declared!r}; expected a number"
        )
    name = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    names = {name, *(packed_name(method, name.removesuffix(".weight")) for method in INT4_METHODS)}
    is_there = declared > 0 and (files is None or any(names & file.tensors.keys() for file in files))
    if wanted and not is_there:
        raise CheckpointError(
            f"--model-path {path}: no MTP layer to draft tokens with (num_nextn_predict_layers is {declared}"
            f"{', but there is no ' + name if declared else ''}); use --speculative-num-steps 0"
        )
    return int(is_there)


def eos_token_ids_of(config: dict[str, Any], path: Path) -> tuple[int, ...]:
    """Return the ids that generation_config.json names, as transformers' generate does, else
    config.json's."""
    generation_file = path / "generation_config.json"
    eos = config.get("eos_token_id")
    if generation_file.exists():
        try:
            eos = json.loads(generation_file.read_bytes()).get("eos_token_id", eos)
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{generation_file}: cannot be read: {error}") from error
    ids = eos if isinstance(eos, list) else [eos] if eos is not None else []
    if not all(type(token) is int and 0 <= token < config["vocab_size"] for token in ids):
        raise CheckpointError(f"--model-path {path}: eos_token_id is {eos!r}; expected ids of the vocabulary")
    return tuple(ids)


def compute_dtype_of(config: dict[str, Any], dtype: str, device: str) -> torch.dtype:
    """Return the dtype of weights and activations; "auto" is float32 on a CPU, else the checkpoint's."""
    if dtype != "auto":
        return _named_dtype("dtype", dtype)
    if torch.device(device).type == "cpu":
        return torch.float32
    own = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return _named_dtype("dtype of the checkpoint", own)


def _named_dtype(name: str, value: str) -> torch.dtype:
    if value not in DTYPES:
        raise CheckpointError(f"{name} is {value!r}; supported are {', '.join(DTYPES)}")
    return DTYPES[value]


def cache_format_of(name: str, value: str, auto: str) -> str:
    """Return ``value``, or ``auto`` where it is "auto"."""
    if value not in ("auto", *FORMAT_NAMES):
        raise CheckpointError(f"{name} is {value!r}; supported are auto, {', '.join(FORMAT_NAMES)}")
    return auto if value == "auto" else value


def fingerprinted(config: dict[str, Any]) -> dict[str, Any]:
    """Return the values of ``config`` that must be the same on two nodes, for the model's fingerprint."""
    return {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
