"""Tiny checkpoints in fp8, and the same weights in float32 for code that reads no fp8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from hisparse_pd.kernels.block_fp8 import dequantize
from tools.checkpoints.make_tiny import write_checkpoint
from tools.checkpoints.quantize_fp8 import quantize_checkpoint


def write_fp8_checkpoint(directory: Path, variant: str, draft_gain: float | None = None) -> tuple[Path, Path]:
    """Write a checkpoint in fp8 and its equal in float32 below ``directory``; return both."""
    from safetensors.torch import load_file, save_file

    original, in_fp8, in_float32 = (directory / name for name in ("original", "fp8", "float32"))
    write_checkpoint(original, variant, draft_gain)
    quantize_checkpoint(original, in_fp8)
    shutil.copytree(original, in_float32)
    tensors = load_file(in_fp8 / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scales = tensors.pop(name)
        matrix = name.removesuffix("_scale_inv")
        tensors[matrix] = dequantize(tensors[matrix], scales, torch.float32)
    save_file(tensors, in_float32 / "model.safetensors", metadata={"format": "pt"})
    return in_fp8, in_float32


def in_two_files(checkpoint: Path) -> None:
    """Move all scales to a second file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    files = {
        "model-00001-of-00002.safetensors": [name for name in tensors if not name.endswith("_scale_inv")],
        "model-00002-of-00002.safetensors": [name for name in tensors if name.endswith("_scale_inv")],
    }
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, checkpoint / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
