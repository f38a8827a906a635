"""Which kernels serve, in one line of a node's log: figures are of kernels and of releases."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from hisparse_pd.kernels import flashmla
from hisparse_pd.kernels.attention import TORCH, AttentionBackend


def kernels_in_use(device: torch.device, attention: AttentionBackend, *, has_fp8_matrices: bool) -> str:
    """``has_fp8_matrices``: they stay in fp8 for products."""
    of_torch = f"torch {torch.__version__}"
    why = f" ({attention.reason})" if attention.reason else ""
    if device.type != "cuda":
        return f"{of_torch} on the {device.type}; attention {attention.name}{why}; all others in torch"
    of_triton = f"triton {_version('triton')}"
    attention_by = of_torch if attention.name == TORCH else of_triton
    if attention.name in flashmla.FORMAT:
        attention_by = f"sglang-kernel {_version('sglang-kernel')}"
    dense = ", fp8 by scaled_mm" if has_fp8_matrices else ""
    parts = (
        of_torch,
        f"attention {attention.name} by {attention_by}{why}",
        f"indexer ours, {of_triton}",
        f"swap-in and top-k ours, CUDA C by cupy {_version('cupy-cuda13x')}",
        f"routed experts ours, {of_triton}",
        f"dense products of few rows and in parts ours, others torch's{dense}",
    )
    return "; ".join(parts)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
