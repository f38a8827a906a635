"""A model of a configuration alone, whose weights are drawn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model import loader
from hisparse_pd.core.model.block_linear import BlockLinear
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.spec import DUMMY, load_spec
from hisparse_pd.kernels.block_fp8 import BLOCK
from tests.checkpoint_edits import edit_config
from tests.unit.model.loading import load_ours
from tests.unit.model.paged_model import PagedModel
from tools.checkpoints.make_tiny import write_checkpoint
from tools.checkpoints.quantize_fp8 import QUANTIZATION


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    """A directory with nothing but config.json, of a model with an MTP layer."""
    write_checkpoint(tmp_path / "whole", "v32")
    directory = tmp_path / "configuration"
    directory.mkdir()
    shutil.copy(tmp_path / "whole/config.json", directory)
    edit_config(directory, num_nextn_predict_layers=1)
    return directory


def load(directory: Path, num_ranks: int = 1, *, keeps_fp8: bool = False) -> Any:
    """The modules of the last rank."""
    spec = load_spec(directory, "bfloat16", load_format=DUMMY)
    return load_ours(directory, spec, num_ranks, keeps_fp8=keeps_fp8)[-1]


def test_a_model_runs_from_its_configuration(configuration: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no \*\.safetensors file"):
        load_spec(configuration)
    spec = load_spec(configuration, load_format=DUMMY)
    assert spec.num_draft_layers == 1
    logits = []
    for _ in range(2):
        paged = PagedModel(spec, load_model(configuration, spec), 4, 64)
        logits.append(paged.extend([(paged.free_pages[:1], 0, range(65, 95))])[0])
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()
    assert 0.1 < float(logits[0].std()) < 10


def test_queries_that_are_scaled_by_position_stay_as_they_are(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mistral")
    scales = {
        name: weight for name, weight in load(tmp_path).state_dict().items() if "softmax_scaling" in name
    }
    assert len(scales) == 2 * (6 + 4)  # layers, and those with an indexer
    for name, weight in scales.items():
        assert weight.eq(float(name.endswith("bias"))).all(), name


def test_it_is_no_checkpoints_model(configuration: Path, tmp_path: Path) -> None:
    fingerprints = {
        load_spec(tmp_path / "whole").fingerprint,
        load_spec(tmp_path / "whole", load_format=DUMMY).fingerprint,
        load_spec(configuration, load_format=DUMMY).fingerprint,
    }
    assert len(fingerprints) == 3


def test_ranks_have_the_same_model(configuration: Path) -> None:
    edit_config(configuration, quantization_config=QUANTIZATION)
    alone, second = load(configuration), load(configuration, num_ranks=2)
    of_alone, of_second = alone.state_dict(), second.state_dict()
    assert of_alone.keys() == of_second.keys()
    for name, tensor in of_second.items():
        assert torch.equal(tensor, of_alone[name]), name
    experts = [
        [part for part in model.modules() if isinstance(part, RoutedExperts)] for model in (alone, second)
    ]
    assert len(experts[0]) == len(experts[1]) > 1
    for whole, half in zip(*experts, strict=True):
        matrices = whole.gate_up.values[half.experts.start :].view(torch.uint8)
        assert torch.equal(half.gate_up.values.view(torch.uint8), matrices)
        assert not torch.equal(matrices[0], matrices[1])


def test_matrices_are_in_fp8_as_in_published_checkpoints(
    configuration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "takes_matrix", lambda rows, columns: columns % BLOCK == 0)
    edit_config(configuration, quantization_config=QUANTIZATION)
    hf_model = load(configuration, keeps_fp8=True)
    kept = {
        name.rpartition(".")[2] for name, part in hf_model.named_modules() if isinstance(part, BlockLinear)
    }
    assert {"o_proj", "q_a_proj"} <= kept
    assert not kept & {"lm_head", "eh_proj", "kv_b_proj", "weights_proj"}
    DsaModel(load_spec(configuration, "bfloat16", load_format=DUMMY), hf_model)
