"""The checkpoint that a training run writes: a Hugging Face directory in bfloat16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tools.checkpoints.files import write_config
from tools.training.draft import DraftLayer
from tools.training.network import Network
from tools.training.task import CONTEXT_LENGTH
from tools.training.vocabulary import write_tokenizer

DRAFT_FILE = "mtp.safetensors"
"""Beside model.safetensors, which transformers reads alone."""


def write_checkpoint(network: Network, out_dir: Path) -> None:
    """Write configuration, weights and tokenizer to ``out_dir``, made when missing."""
    write_config(out_dir, network.shape.hf_config())
    write_tokenizer(out_dir, CONTEXT_LENGTH)
    save_file(hf_weights(network), out_dir / "model.safetensors", metadata={"format": "pt"})


def hf_weights(network: Network) -> dict[str, Tensor]:
    """The weights under their names in a checkpoint, bfloat16 but for the routers' correction biases."""
    return _stored(network, "model.")


def load_hf_weights(network: Network, weights: Mapping[str, Tensor]) -> None:
    """The reverse of ``hf_weights``: fill ``network`` from a checkpoint's weights."""
    for name, part in _parts(network, "model."):
        part.copy_(weights[name])


def write_with_draft(checkpoint: Path, draft: DraftLayer, out_dir: Path) -> None:
    """Write ``checkpoint`` with an MTP layer to ``out_dir``, made when missing. Its own weights' file is
    copied as it is; ``out_dir`` may be ``checkpoint``."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.is_file() and file.resolve().parent != out_dir.resolve():
            shutil.copyfile(file, out_dir / file.name)
    config_file = out_dir / "config.json"
    config = json.loads(config_file.read_text()) | {"num_nextn_predict_layers": 1}
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    weights = _stored(draft, f"model.layers.{config['num_hidden_layers']}.")
    save_file(weights, out_dir / DRAFT_FILE, metadata={"format": "pt"})
    (out_dir / DRAFT_FILE).chmod(0o644)  # safetensors writes for the owner alone, containers read it too


def _stored(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {
        name: part.to(
            "cpu", torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        ).contiguous()
        for name, part in _parts(module, prefix)
    }


def _parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """What the module's tensors are in a checkpoint, by name; views of them."""
    for name, value in module.state_dict().items():
        yield from _stored_parts(name if name.startswith("lm_head") else prefix + name, value)


def _stored_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a tensor of the network's modules is in a checkpoint: itself, or a view for each expert."""
    prefix, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        for expert, matrices in enumerate(tensor):
            gate, up = matrices.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up
    elif last == "down_proj":
        for expert, down in enumerate(tensor):
            yield f"{prefix}.{expert}.down_proj.weight", down
    else:
        yield name, tensor
