"""Tiny checkpoints with experts in four bits, and the same weights in float32 for code that reads no such."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from hisparse_pd.kernels.block_fp8 import dequantize
from tools.checkpoints.make_tiny import write_checkpoint
from tools.checkpoints.quantize_int4 import StoredForm, quantize_checkpoint

GROUP = 32
"""The columns of a group: an expert of the tiny checkpoints has no more inside."""
FORMS = {
    "compressed": StoredForm(group_size=GROUP, scale_dtype=torch.bfloat16),
    "compressed with zeros": StoredForm(group_size=GROUP, has_zeros=True, scale_dtype=torch.float32),
    "compressed, fp8 activations": StoredForm(group_size=GROUP, rounds_tokens=True),
    "compressed beside fp8": StoredForm(group_size=GROUP, has_fp8=True),
    "awq": StoredForm("awq", GROUP, has_zeros=True, scale_dtype=torch.float16),
    "gptq": StoredForm("gptq", GROUP, scale_dtype=torch.float16),
    "gptq with zeros": StoredForm("gptq", GROUP, has_zeros=True, scale_dtype=torch.float16),
}
"""Every format that is read."""


def write_int4_checkpoint(
    directory: Path, variant: str, form: StoredForm, draft_gain: float | None = None
) -> tuple[Path, Path]:
    """Write a checkpoint with experts in ``form`` and its equal in float32 below ``directory``; return
    both."""
    from safetensors.torch import load_file, save_file

    original, in_int4, in_float32 = (directory / name for name in ("original", "int4", "float32"))
    write_checkpoint(original, variant, draft_gain)
    quantize_checkpoint(original, in_int4, form)
    shutil.copytree(original, in_float32)
    tensors = load_file(in_int4 / "model.safetensors")
    save_file(dequantized(tensors, form), in_float32 / "model.safetensors", metadata={"format": "pt"})
    return in_int4, in_float32


_BESIDE = ("weight_scale", "weight_shape", "weight_zero_point", "qzeros", "scales", "g_idx")
"""The ends of the names of tensors that belong to packed numbers or to a matrix in fp8."""


def dequantized(tensors: dict[str, Tensor], form: StoredForm) -> dict[str, Tensor]:
    """Return the weights that stored tensors stand for, by the formats' own definitions."""
    found = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            scales = tensors[f"{module}.weight_scale"].float()
            zeros = tensors.get(f"{module}.weight_zero_point")
            of_rows = None if zeros is None else nibbles(zeros.t(), range(8)).t()
            found[f"{module}.weight"] = _weights(nibbles(tensor, range(8)), scales, of_rows)
        elif kind == "qweight":
            scales = tensors[f"{module}.scales"].float().t()
            is_awq = form.method == "awq"
            order = (0, 2, 4, 6, 1, 3, 5, 7) if is_awq else range(8)
            zeros = nibbles(tensors[f"{module}.qzeros"], order).t()
            values = nibbles(tensor, order).t() if is_awq else nibbles(tensor.t(), order)
            found[f"{module}.weight"] = _weights(values, scales, zeros if is_awq else (zeros + 1) % 16)
        elif kind == "weight" and tensor.dtype == torch.float8_e4m3fn:
            found[name] = dequantize(tensor, tensors[f"{name}_scale"], torch.float32)
        elif kind not in _BESIDE:
            found[name] = tensor
    return found


def nibbles(words: Tensor, order: range | tuple[int, ...]) -> Tensor:
    """Return the numbers of int32 [m, n], float32 [m, 8 * n]; the bits from 4 * i on are those of number
    ``order[i]`` of eight."""
    found = torch.zeros((*words.shape, 8))
    for number, place in enumerate(order):
        found[..., place] = (words >> 4 * number & 15).float()
    return found.flatten(1)


def _weights(values: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return (values - zeros) * scales; ``scales`` and ``zeros``: [rows, groups]."""
    group_size = values.shape[1] // scales.shape[1]
    of_columns = 8.0 if zeros is None else zeros.repeat_interleave(group_size, 1)
    return ((values - of_columns) * scales.repeat_interleave(group_size, 1)).contiguous()
