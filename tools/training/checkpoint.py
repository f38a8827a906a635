"""Files of a training run: the checkpoint that is served, and the state that a run resumes from.

The checkpoint is a Hugging Face directory in bfloat16. The state is the float32 weights, the optimizers'
moments in bfloat16, and a JSON file that is written last and names the step, so that a run that was stopped
while it saved goes on from the save before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.training.draft import DraftLayer
from tools.training.network import Network
from tools.training.shape import NetworkShape
from tools.training.task import CONTEXT_LENGTH
from tools.training.vocabulary import BOS_ID, EOS_ID, PAD_ID, write_tokenizer

_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
STATE_FILE = "state.json"
DRAFT_FILE = "mtp.safetensors"
"""Beside model.safetensors, which transformers reads alone."""


def write_checkpoint(network: Network, out_dir: Path) -> None:
    """Write configuration, weights and tokenizer to ``out_dir``, made when missing."""
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "config.json").write_text(json.dumps(network.shape.hf_config(), indent=2) + "\n")
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    (out_dir / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
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


def save_state(
    out_dir: Path, network: Network, optimizers: Mapping[str, torch.optim.Optimizer], progress: dict[str, Any]
) -> None:
    """Save what ``load_state`` needs. ``progress``: JSON-able, given back as it is."""
    out_dir.mkdir(parents=True, exist_ok=True)
    step = int(progress["step"])
    weights = {name: value.detach().float().cpu() for name, value in network.state_dict().items()}
    moments = {}
    for name, optimizer in optimizers.items():
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                exact = torch.float32 if value.dim() == 0 else torch.bfloat16
                moments[f"{name}.{number}.{key}"] = value.detach().to("cpu", exact).contiguous()
    save_file(weights, out_dir / f"state-{step}-weights.safetensors")
    save_file(moments, out_dir / f"state-{step}-moments.safetensors")
    scratch = out_dir / f"{STATE_FILE}.new"
    scratch.write_text(json.dumps({**progress, "shape": vars(network.shape)}, indent=2) + "\n")
    os.replace(scratch, out_dir / STATE_FILE)
    for old in out_dir.glob("state-*.safetensors"):
        if not old.name.startswith(f"state-{step}-"):
            old.unlink()


def load_state(
    out_dir: Path, network: Network, optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, Any] | None:
    """Restore the last save in ``out_dir`` and return its progress, or None when there is none."""
    file = out_dir / STATE_FILE
    if not file.exists():
        return None
    progress: dict[str, Any] = json.loads(file.read_text())
    if NetworkShape(**progress.pop("shape")) != network.shape:
        raise ValueError(f"{file}: saved by a run of another network shape; choose another directory")
    step = progress["step"]
    network.load_state_dict(load_file(out_dir / f"state-{step}-weights.safetensors"))
    moments = load_file(out_dir / f"state-{step}-moments.safetensors")
    for name, optimizer in optimizers.items():
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in moments.items():
            owner, number, what = key.split(".")
            if owner == name:
                state.setdefault(int(number), {})[what] = value.float()
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return progress
