"""Write a checkpoint's matrices in fp8 with a scale for each block of 128 x 128.

    python -m tools.checkpoints.quantize_fp8 DIR OUT_DIR [--device cuda]

The layout is that of DeepSeek-V3.2's and GLM-5's fp8 checkpoints, so that tests and benchmarks can load other
models in the same way; tests call ``quantize_checkpoint``, and ``make_synthetic`` quantizes as it writes.
Embeddings, the LM head, norms, the router's weights and the indexer's head weights stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hisparse_pd.core.model.stored_weights import INDEX_NAME, SUFFIX, weight_files
from hisparse_pd.kernels.block_fp8 import BLOCK, quantize

_KEPT = re.compile(r"norm|embed|lm_head|output|\.gate\.|weights_proj")
"""Names of weights that stay as they are. Mistral's LM head is called ``output``."""
QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}
"""The entry of config.json that declares the format."""


def quantize_checkpoint(directory: Path, out_dir: Path, device: str = "cpu") -> None:
    """Write the checkpoint in ``directory`` to ``out_dir`` in fp8. Raises CheckpointError when weights are
    missing."""

    def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return quantized(name, tensor.to(device)) if is_quantized(name, tensor) else {name: tensor}

    convert_checkpoint(directory, out_dir, convert, QUANTIZATION)


def convert_checkpoint(
    directory: Path,
    out_dir: Path,
    convert: Callable[[str, Tensor], dict[str, Tensor]],
    quantization: dict[str, Any],
) -> None:
    """Write the checkpoint in ``directory`` to ``out_dir``, file by file. ``convert`` returns what is stored
    instead of a tensor, by names; ``quantization`` is the entry of config.json that declares this. Raises
    CheckpointError when weights are missing."""
    from safetensors.torch import load_file, save_file

    out_dir.mkdir(parents=True, exist_ok=True)
    files = weight_files(directory)
    for other in directory.iterdir():
        if other.is_file() and other.suffix != SUFFIX and other.name != INDEX_NAME:
            shutil.copy(other, out_dir)
    for file in files:
        converted: dict[str, Tensor] = {}
        for name, tensor in load_file(file.path).items():
            if name in file.tensors:  # else the index places it in another file, and it is read from there
                converted |= convert(name, tensor)
        save_file(converted, out_dir / file.path.name, metadata={"format": "pt"})
    config_file = out_dir / "config.json"
    config = json.loads(config_file.read_text()) | {"quantization_config": quantization}
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def is_quantized(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and _KEPT.search(name) is None


def quantized(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the matrix in fp8, and its float32 scales [rows / 128, columns / 128], rounded up, by their
    names in a checkpoint. Both are in main memory."""
    values, scales = quantize(tensor)
    return {name: values.cpu(), f"{name}_scale_inv": scales.cpu()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint's matrices in fp8.")
    parser.add_argument("directory", type=Path, help="checkpoint to read")
    parser.add_argument("out_dir", type=Path, help="directory to write, made when missing")
    parser.add_argument("--device", default="cpu", help="torch device that converts them")
    arguments = parser.parse_args()
    quantize_checkpoint(arguments.directory, arguments.out_dir, arguments.device)


if __name__ == "__main__":
    main()
