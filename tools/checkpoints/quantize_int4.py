"""Write a checkpoint's routed experts in four bits, in each of the published formats.

    python -m tools.checkpoints.quantize_int4 DIR OUT_DIR [--method compressed-tensors|awq|gptq]
        [--group-size 128] [--zeros] [--fp8-activations] [--fp8] [--device cuda]

Numbers are rounded to the nearest, without calibration, so this is for tests and measurements, not for models
that people use. Experts of all layers are quantized, also of an MTP layer. With ``--fp8`` all matrices that
``tools.checkpoints.quantize_fp8`` would write in fp8 are in fp8 blocks beside them; otherwise all others stay
as they are. Tests call ``quantize_checkpoint``; ``make_synthetic`` quantizes as it writes.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hisparse_pd.core.model.int4_config import AWQ, COMPRESSED_TENSORS, GPTQ, INT4_METHODS
from hisparse_pd.core.model.int4_weights import AWQ_ORDER, IN_ORDER
from hisparse_pd.kernels.block_fp8 import BLOCK
from hisparse_pd.kernels.block_fp8 import quantize as quantize_blocks
from hisparse_pd.kernels.int4 import GROUP_SIZES, MIDDLE, Int4Form, quantize
from tools.checkpoints.quantize_fp8 import convert_checkpoint
from tools.checkpoints.quantize_fp8 import is_quantized as is_quantized_to_fp8

_EXPERT = re.compile(r"(?:^|\.)experts\.\d+\.\w+\.weight$")
_EXPERTS_PATTERN = r"re:.*\.experts\.\d+\..*"
_KEPT_PATTERNS = [
    "lm_head",
    r"re:.*(self_attn|attention)\..*",
    r"re:.*shared_experts\..*",
    r"re:.*mlp\.(gate|gate_proj|up_proj|down_proj)$",
    r"re:.*feed_forward\..*",
    r"re:.*eh_proj$",
    "output",
]
"""What compressed-tensors is to leave as it is, in names of transformers and of Mistral."""
_KEPT_PARTS = [
    "attention",
    "self_attn",
    "shared_experts",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
    "lm_head",
    "eh_proj",
]
"""The same as parts of names, for awq and gptq."""


@dataclass(frozen=True)
class StoredForm:
    """How experts are stored. ``has_zeros``: always so with awq; ``rounds_tokens`` and ``has_fp8``: with
    compressed-tensors alone."""

    method: str = COMPRESSED_TENSORS
    group_size: int = 128
    has_zeros: bool = False
    rounds_tokens: bool = False
    has_fp8: bool = False
    scale_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.method == AWQ and not self.has_zeros:
            raise ValueError("awq has zeros; give --zeros")
        if self.method != COMPRESSED_TENSORS and (self.rounds_tokens or self.has_fp8):
            raise ValueError(f"{self.method} has neither --fp8-activations nor --fp8")

    @property
    def of_kernel(self) -> Int4Form:
        return Int4Form(self.group_size, self.has_zeros, self.scale_dtype, self.rounds_tokens)


def quantize_checkpoint(directory: Path, out_dir: Path, form: StoredForm, device: str = "cpu") -> None:
    """Write the checkpoint in ``directory`` to ``out_dir`` with experts in ``form``. Raises CheckpointError
    when weights are missing, and ValueError for experts whose columns are no whole groups."""

    def convert(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return (
            quantized(name, tensor.to(device), form) if is_quantized(name, tensor, form) else {name: tensor}
        )

    convert_checkpoint(directory, out_dir, convert, quantization_of(form))


def is_quantized(name: str, tensor: Tensor, form: StoredForm) -> bool:
    return _EXPERT.search(name) is not None or (form.has_fp8 and is_quantized_to_fp8(name, tensor))


def quantized(name: str, tensor: Tensor, form: StoredForm) -> dict[str, Tensor]:
    """Return what is stored of the matrix ``name`` instead of it, by names, in main memory."""
    if _EXPERT.search(name) is None:
        values, scales = quantize_blocks(tensor)
        return {name: values.cpu(), f"{name}_scale": scales.cpu()}
    if tensor.shape[1] % form.group_size:
        raise ValueError(f"{name} has {tensor.shape[1]} columns, no multiple of group_size {form.group_size}")
    module = name.removesuffix(".weight")
    stored = _stored(form, *quantize(tensor, form.of_kernel))
    return {f"{module}.{key}": part.contiguous().cpu() for key, part in stored.items()}


def _stored(form: StoredForm, values: Tensor, scales: Tensor, zeros: Tensor | None) -> dict[str, Tensor]:
    """Return a matrix's tensors by the ends of their names. ``values``: uint8 [rows, columns]; ``scales``,
    ``zeros``: [groups, rows]."""
    rows, columns = values.shape
    if form.method == COMPRESSED_TENSORS:
        stored = {
            "weight_packed": _words(values),
            "weight_scale": scales.t(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        return stored if zeros is None else stored | {"weight_zero_point": _words(zeros).t()}
    of_groups = torch.full(scales.shape, MIDDLE, dtype=torch.uint8) if zeros is None else zeros
    if form.method == AWQ:
        qweight, qzeros = _words(values.t(), AWQ_ORDER), _words(of_groups, AWQ_ORDER)
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    groups = torch.arange(columns, dtype=torch.int32) // form.group_size
    qzeros = _words((of_groups - 1) & 15)  # gptq's first format stores one less
    return {"qweight": _words(values).t(), "qzeros": qzeros, "scales": scales, "g_idx": groups}


def _words(values: Tensor, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """Return numbers, uint8 [m, 8 * n], as int32 [m, n]: of each eight the one at ``order[0]`` has the lowest
    bits, and so on."""
    eights = values.reshape(len(values), -1, 8)[..., order]
    return (eights[..., 0::2] | eights[..., 1::2] << 4).contiguous().view(torch.int32)[..., 0]


def quantization_of(form: StoredForm) -> dict[str, Any]:
    """Return the entry of config.json that declares ``form``."""
    if form.method == COMPRESSED_TENSORS:
        return _compressed_quantization(form)
    common = {"bits": 4, "group_size": form.group_size, "quant_method": form.method}
    if form.method == AWQ:
        awq = {"version": "gemm", "zero_point": True, "modules_to_not_convert": _KEPT_PARTS}
        return common | awq
    kept: dict[str, Any] = {f"-:.*{re.escape(part)}": {} for part in _KEPT_PARTS}
    return common | {
        "checkpoint_format": "gptq",
        "desc_act": False,
        "sym": not form.has_zeros,
        "pack_dtype": "int32",
        "dynamic": kept,
    }


def _compressed_quantization(form: StoredForm) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": not form.has_zeros,
        "strategy": "group",
        "group_size": form.group_size,
        "actorder": None,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    experts = {
        "targets": [_EXPERTS_PATTERN] if form.has_fp8 else ["Linear"],
        "weights": weights,
        "input_activations": inputs if form.rounds_tokens else None,
        "output_activations": None,
        "format": "pack-quantized",
    }
    groups = {"group_0": experts}
    kept = _KEPT_PATTERNS
    if form.has_fp8:
        of_blocks = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
        groups["group_1"] = {
            "targets": ["Linear"],
            "weights": of_blocks | {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
            "input_activations": inputs | {"strategy": "group", "group_size": BLOCK},
            "output_activations": None,
            "format": "float-quantized",
        }
        kept = ["lm_head", "output", r"re:.*\.gate$", r"re:.*weights_proj$"]
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": "mixed-precision" if form.has_fp8 else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": kept,
        "kv_cache_scheme": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint's routed experts in four bits.")
    parser.add_argument("directory", type=Path, help="checkpoint to read")
    parser.add_argument("out_dir", type=Path, help="directory to write, made when missing")
    parser.add_argument("--method", default=COMPRESSED_TENSORS, choices=INT4_METHODS, help="format to write")
    parser.add_argument("--group-size", type=int, default=128, choices=GROUP_SIZES, help="columns of a group")
    parser.add_argument(
        "--zeros", action="store_true", help="give each group a zero of its own; awq needs it"
    )
    parser.add_argument(
        "--fp8-activations", action="store_true", help="declare that experts' inputs are rounded to fp8"
    )
    parser.add_argument("--fp8", action="store_true", help="write the other matrices in fp8 blocks")
    parser.add_argument("--device", default="cpu", help="torch device that converts them")
    arguments = parser.parse_args()
    try:
        form = StoredForm(
            arguments.method,
            arguments.group_size,
            arguments.zeros,
            arguments.fp8_activations,
            arguments.fp8,
            torch.float16 if arguments.method in (AWQ, GPTQ) else torch.bfloat16,
        )
        quantize_checkpoint(arguments.directory, arguments.out_dir, form, arguments.device)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
