"""Names the kernels in use and the releases of their libraries in one line of a node's log.

``AttentionKernels.choose`` logs it, because measurements depend on both.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from hisparse_pd.kernels import flashmla
from hisparse_pd.kernels.attention import TORCH, AttentionBackend


def kernels_in_use(
    device: torch.device,
    attention: AttentionBackend,
    *,
    has_fp8_matrices: bool,
    has_int4_experts: bool = False,
) -> str:
    """Return the line of the log. ``has_fp8_matrices``: whether fp8 weights stay in fp8 for products;
    ``has_int4_experts``: whether routed experts are in four bits."""
    torch_release = f"torch {torch.__version__}"
    why = f" ({attention.reason})" if attention.reason else ""
    if device.type != "cuda":
        return f"{torch_release} on the {device.type}; attention {attention.name}{why}; all others in torch"
    triton_release = f"triton {installed('triton')}"
    attention_by = torch_release if attention.name == TORCH else triton_release
    if attention.name in flashmla.FORMAT:
        attention_by = f"sglang-kernel {installed('sglang-kernel')}"
    dense = ", fp8 by scaled_mm" if has_fp8_matrices else ""
    parts = (
        torch_release,
        f"attention {attention.name} by {attention_by}{why}",
        f"indexer ours, {triton_release}",
        f"swap-in and top-k ours, CUDA C by cupy {installed('cupy-cuda13x')}",
        f"routed experts ours{' in four bits, CUDA C by cupy' if has_int4_experts else ''}, {triton_release}",
        f"dense products of few rows and in parts ours, others torch's{dense}",
    )
    return "; ".join(parts)


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
