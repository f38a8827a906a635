"""The line of the log that names the kernels in use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.kernels import flashmla, inventory
from hisparse_pd.kernels.attention import FLASHMLA_KV, TorchAttention
from hisparse_pd.kernels.inventory import kernels_in_use
from hisparse_pd.kernels.kv_format import FP8_E4M3, KvFormat
from tools.checkpoints.make_tiny import write_checkpoint

FP8 = KvFormat(FP8_E4M3, 512, 64)


def test_a_gpus_kernels_come_with_their_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "installed", {"sglang-kernel": "0.4.5", "triton": "3.6.0"}.get)
    gpu = torch.device("cuda")
    attention = flashmla.create(FLASHMLA_KV, FP8, "auto on cuda")
    line = kernels_in_use(gpu, attention, has_fp8_matrices=True)
    assert line.startswith(
        f"torch {torch.__version__}; attention flashmla_kv by sglang-kernel 0.4.5 (auto on cuda); "
    )
    dense = "dense products of few rows and in parts ours, others torch's"
    assert f"ours, triton 3.6.0; {dense}, fp8 by scaled_mm" in line
    fallback = TorchAttention(FP8, "auto on cuda; not flashmla_kv: sgl_kernel.flash_mla cannot be imported")
    line = kernels_in_use(gpu, fallback, has_fp8_matrices=False)
    assert f"attention torch by torch {torch.__version__} (auto on cuda; not flashmla_kv: " in line
    assert line.endswith(dense)


def test_a_node_says_it_at_its_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, "v32")
    with caplog.at_level("INFO"):
        AttentionKernels.choose(load_model(tmp_path, load_spec(tmp_path)), "auto", scratch_tokens=1)
    (said,) = [text for text in caplog.messages if text.startswith("kernels for ")]
    assert said == (
        f"kernels for float32 items: torch {torch.__version__} on the cpu; attention torch (auto on cpu); "
        "all others in torch"
    )
