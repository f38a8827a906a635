"""A GPU gets the same weights as a CPU: through pinned buffers, in pieces, converted on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.core.model import loader, weight_reader
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.spec import load_spec
from tests.fp8_checkpoints import write_fp8_checkpoint
from tests.gpu.support import needs_gpu
from tests.unit.model.rank_stand_in import RankStandIn

pytestmark = needs_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def weights(hf_model: Any) -> dict[str, Tensor]:
    """Return the weights of transformers' modules and of ours, on the CPU."""
    found = dict(hf_model.state_dict())
    for number, layer in enumerate(hf_model.model.layers):
        experts = getattr(layer.mlp, "experts", None)
        if isinstance(experts, RoutedExperts):
            for name, matrices in (("gate_up", experts.gate_up), ("down", experts.down)):
                num_routed = len(experts.experts)  # a place for the shared expert may follow
                found[f"{number}.{name}"] = matrices.values[:num_routed]
                if matrices.scales is not None:
                    found[f"{number}.{name}.scales"] = matrices.scales[:num_routed]
    return {name: tensor.cpu() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("kind", "dtype", "num_ranks"),
    [("fp8", "bfloat16", 1), ("fp8", "float32", 2), ("float32", "bfloat16", 1), ("float32", "float32", 2)],
)
def test_a_gpu_gets_the_weights_that_a_cpu_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, num_ranks: int
) -> None:
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 4096)
    in_fp8, in_float32 = write_fp8_checkpoint(tmp_path, "v32")
    path = in_fp8 if kind == "fp8" else in_float32
    spec = load_spec(path, dtype)
    # the tiny matrices do not fit otherwise
    monkeypatch.setattr(loader, "takes_matrix", lambda rows, columns: True)
    kept = loader.keeps_fp8(spec, GPU)
    assert kept == (kind == "fp8" and dtype == "bfloat16")
    ranks = RankStandIn(1, num_ranks) if num_ranks > 1 else None
    expected = weights(loader.Loader(path, spec, CPU, ranks, keeps_fp8=kept).load())
    found = weights(loader.Loader(path, spec, GPU, ranks, keeps_fp8=kept).load())
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor.view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8)), name
