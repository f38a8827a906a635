"""The checkpoint that a training run writes: a Hugging Face directory in bfloat16."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.checkpoints.files import write_config
from tools.training.draft import DraftLayer
from tools.training.network import Network
from tools.training.task import CONTEXT_LENGTH
from tools.training.vocabulary import write_tokenizer

_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
DRAFT_FILE = "mtp.safetensors"
"""Beside model.safetensors, which transformers reads alone."""


def write_checkpoint(network: Network, out_dir: Path) -> None:
    """Write configuration, weights and tokenizer to ``out_dir``, made when missing."""
    write_config(out_dir, network.shape.hf_config())
    write_tokenizer(out_dir, CONTEXT_LENGTH)
    save_file(hf_weights(network), out_dir / "model.safetensors", metadata={"format": "pt"})


def hf_weights(network: Network) -> dict[str, Tensor]:
    """The weights under their names in a checkpoint, bfloat16 but for the routers' correction biases."""
    return _stored(
        {
            name if name.startswith("lm_head") else f"model.{name}": value
            for name, value in network.state_dict().items()
        }
    )


def draft_weights(draft: DraftLayer, num_layers: int) -> dict[str, Tensor]:
    """Those of the MTP layer behind ``num_layers`` layers, likewise."""
    return _stored({f"model.layers.{num_layers}.{name}": value for name, value in draft.state_dict().items()})


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
    weights = draft_weights(draft, config["num_hidden_layers"])
    save_file(weights, out_dir / DRAFT_FILE, metadata={"format": "pt"})
    (out_dir / DRAFT_FILE).chmod(0o644)  # safetensors writes for the owner alone, containers read it too


def _stored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for full, value in weights.items():
        if full.endswith("e_score_correction_bias"):
            found[full] = value.float()
            continue
        value = value.detach().to("cpu", torch.bfloat16)
        if ".experts." not in full:
            found[full] = value.contiguous()
            continue
        base = full.rpartition(".")[0]
        for expert, weight in enumerate(value):
            if full.endswith("down_proj"):
                found[f"{base}.{expert}.down_proj.weight"] = weight.contiguous()
            else:
                gate, up = weight.chunk(2)
                found[f"{base}.{expert}.gate_proj.weight"] = gate.contiguous()
                found[f"{base}.{expert}.up_proj.weight"] = up.contiguous()
    return {name: value.cpu() for name, value in found.items()}


def load_hf_weights(network: Network, weights: Mapping[str, Tensor]) -> None:
    """The reverse of ``hf_weights``: fill ``network`` from a checkpoint's weights."""
    own = {}
    for name in network.state_dict():
        full = name if name.startswith("lm_head") else f"model.{name}"
        if ".experts." not in name:
            own[name] = weights[full]
            continue
        base, _, part = full.rpartition(".")
        experts = range(network.shape.num_experts)
        if part == "down_proj":
            own[name] = torch.stack([weights[f"{base}.{e}.down_proj.weight"] for e in experts])
        else:
            both = [[weights[f"{base}.{e}.{half}.weight"] for half in _EXPERT_PARTS[:2]] for e in experts]
            own[name] = torch.stack([torch.cat(halves) for halves in both])
    network.load_state_dict(own)
