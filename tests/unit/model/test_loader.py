"""Loading weights: routed experts as transformers has them; in fp8, or spread over ranks, as we have them."""

from __future__ import annotations

import json
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
from hisparse_pd.core.model.spec import ModelSpec, load_spec
from hisparse_pd.core.model.stored_formats import SCALES
from hisparse_pd.kernels.block_fp8 import BLOCK
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.block_linear import takes_matrix
from tests.checkpoint_edits import edit_config, edit_weights
from tests.fp8_checkpoints import in_two_files, write_fp8_checkpoint
from tests.unit.model.loading import CPU, joined, load_ours
from tests.unit.model.model_specs import make_spec
from tests.unit.model.rank_stand_in import RankStandIn
from tools.checkpoints.make_tiny import write_checkpoint

EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
ATTENTION = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module", params=["v32", "glm"])
def checkpoints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    return write_fp8_checkpoint(tmp_path_factory.mktemp("fp8"), request.param)


def load_theirs(path: Path, spec: ModelSpec) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=spec.dtype, attn_implementation="eager", experts_implementation="grouped_mm"
    ).eval()


def assert_same_model(ours: list[Any], expected: Any) -> None:
    """Weights and buffers bit for bit, and of the experts, which are kept otherwise, what they compute."""
    wanted = dict(expected.state_dict()) | dict(expected.named_buffers())
    for of_rank in ours:
        found = dict(of_rank.state_dict()) | dict(of_rank.named_buffers())
        assert set(found) == {name for name in wanted if ".mlp.experts." not in name}
        for name, tensor in found.items():
            in_float32 = any(part in name for part in loader.IN_FLOAT32)
            dtype = torch.float32 if in_float32 else wanted[name].dtype
            assert tensor.dtype == dtype, name
            assert torch.equal(tensor, wanted[name].to(dtype)), name
    for layer, module in enumerate(expected.model.layers):
        if (experts := getattr(module.mlp, "experts", None)) is not None:
            mlp = ours[0].model.layers[layer].mlp
            mlp.experts = whole = joined([of_rank.model.layers[layer].mlp.experts for of_rank in ours])
            dtype = experts.down_proj.dtype
            gate_up = [whole.gate_up.of(expert, dtype) for expert in whole.experts]
            down = [whole.down.of(expert, dtype) for expert in whole.experts]
            assert torch.equal(torch.stack(gate_up).flatten(1, 2), experts.gate_up_proj)
            assert torch.equal(torch.cat(down), experts.down_proj)
            x = torch.randn(9, down[0].shape[1], dtype=dtype)
            result, theirs = mlp(x[None]), module.mlp(x[None])
            tolerance: dict[str, Any] = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(result, theirs, **tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_that_transformers_loads(checkpoints: tuple[Path, Path], dtype: str) -> None:
    _, path = checkpoints
    spec = load_spec(path, dtype)
    assert_same_model(load_ours(path, spec, 3), load_theirs(path, spec))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_fp8_weights_are_what_their_scales_make_of_them(
    checkpoints: tuple[Path, Path], num_ranks: int
) -> None:
    in_fp8, in_float32 = checkpoints
    spec = load_spec(in_fp8)
    assert spec.weights_are_fp8
    expected = load_theirs(in_float32, load_spec(in_float32))
    assert_same_model(load_ours(in_fp8, spec, num_ranks), expected)


@pytest.mark.parametrize(
    ("has_fp8", "device", "dtype", "expected"),
    [
        (True, "cuda:1", torch.bfloat16, True),
        (True, "cuda:1", torch.float32, False),
        (True, "cpu", torch.bfloat16, False),
        (False, "cuda:1", torch.bfloat16, False),
    ],
)
def test_linear_layers_stay_in_fp8_where_bfloat16_meets_them_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, has_fp8: bool, device: str, dtype: torch.dtype, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    spec = make_spec(weights_are_fp8=has_fp8, dtype=dtype)
    assert loader.keeps_fp8(spec, torch.device(device)) is expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert not loader.keeps_fp8(spec, torch.device(device))


@pytest.mark.parametrize("takes_all", [False, True])
def test_what_stays_in_fp8(
    checkpoints: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, takes_all: bool
) -> None:
    """The matrices in fp8 of shapes that a GPU takes, bit for bit, but the one that attention absorbs."""
    from safetensors.torch import load_file

    takes = (lambda rows, columns: True) if takes_all else takes_matrix
    monkeypatch.setattr(loader, "takes_matrix", takes)
    in_fp8, _ = checkpoints
    stored = load_file(in_fp8 / "model.safetensors")
    spec = load_spec(in_fp8, "bfloat16")
    found = load_ours(in_fp8, spec, 1, keeps_fp8=True)[0].state_dict()
    of_linears = {name for name, tensor in stored.items() if tensor.dtype == FP8 and ".experts." not in name}
    expected = {name for name in of_linears if "kv_b_proj" not in name and takes(*stored[name].shape)}
    assert takes_all == (expected == {name for name in of_linears if "kv_b_proj" not in name})
    assert {name.removesuffix(SCALES) for name in found if name.endswith(SCALES)} == expected
    for name in expected:
        for kept in (name, f"{name}{SCALES}"):
            assert found[kept].dtype == stored[kept].dtype
            assert torch.equal(found[kept].float(), stored[kept].float()), kept
    for name, tensor in load_ours(in_fp8, spec, 1)[0].state_dict().items():
        assert name in expected or torch.equal(found[name], tensor), name


def test_transformers_reads_the_same_from_blocks_that_are_whole(checkpoints: tuple[Path, Path]) -> None:
    """It has another view of those at the edges, which DeepSeek's own conversion does not share."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    in_fp8, _ = checkpoints
    theirs = AutoModelForCausalLM.from_pretrained(
        in_fp8, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    ).state_dict()
    (model,) = load_ours(in_fp8, load_spec(in_fp8), 1)
    ours = model.state_dict()
    of_whole_blocks = [
        name
        for name, weight in ours.items()
        if name in theirs and weight.ndim == 2 and all(size <= BLOCK for size in weight.shape)
    ]
    assert len(of_whole_blocks) > 20
    for name in of_whole_blocks:
        assert torch.equal(ours[name], theirs[name]), name


def test_scales_may_be_in_another_file_than_their_matrix(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    in_fp8, in_float32 = checkpoints
    split = tmp_path / "split"
    shutil.copytree(in_fp8, split)
    in_two_files(split)
    expected = load_theirs(in_float32, load_spec(in_float32))
    assert_same_model(load_ours(split, load_spec(split), 2), expected)


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [EXPERT, f"{EXPERT}_scale_inv", ATTENTION, f"{ATTENTION}_scale_inv"])
def test_what_is_missing_or_of_another_shape_is_named(tmp_path: Path, name: str) -> None:
    """A tensor is not broadcast to a larger one, as a copy of torch's would be."""
    in_fp8, _ = write_fp8_checkpoint(tmp_path, "v32")
    edit_weights(in_fp8, lambda tensors: tensors.update({name: torch.cat([tensors[name]] * 2)}))
    with pytest.raises(CheckpointError, match=rf"{name.removesuffix('_scale_inv')}.*\["):
        load_model(in_fp8, load_spec(in_fp8))
    edit_weights(in_fp8, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"{name} is missing$"):
        load_model(in_fp8, load_spec(in_fp8))


def test_an_expert_in_another_format_is_named(tmp_path: Path) -> None:
    in_fp8, _ = write_fp8_checkpoint(tmp_path, "v32")
    edit_weights(in_fp8, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.bfloat16)}))
    with pytest.raises(CheckpointError, match=rf"{EXPERT} is in torch\.bfloat16; .* in torch\.float8_e4m3fn"):
        load_model(in_fp8, load_spec(in_fp8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4'; supported are 'fp8', 'compressed-tensors'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'; supported is 'e4m3'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]; supported is \[128, 128\]"),
        ({"weight_block_size": None}, r"weight_block_size is None; supported is \[128, 128\]"),
        ({"scale_fmt": "e5m2"}, "scale_fmt is 'e5m2'; supported is 'ue8m0'"),
    ],
)
def test_other_quantizations_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    in_fp8, _ = write_fp8_checkpoint(tmp_path, "v32")
    edit_quantization(in_fp8, **change)
    with pytest.raises(CheckpointError, match=message):
        load_spec(in_fp8)


def edit_quantization(checkpoint: Path, **change: object) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    edit_config(checkpoint, quantization_config=config["quantization_config"] | change)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_activations_are_rounded_with_the_scales_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale_fmt: str | None
) -> None:
    """This holds for every product with a matrix that stays in fp8, also of routed experts and joined
    layers."""
    monkeypatch.setattr(loader, "takes_matrix", lambda rows, columns: columns % BLOCK == 0)
    in_fp8, _ = write_fp8_checkpoint(tmp_path, "v32", draft_gain=1.0)
    edit_quantization(in_fp8, scale_fmt=scale_fmt)
    spec = load_spec(in_fp8, "bfloat16")
    (hf_model,) = load_ours(in_fp8, spec, 1, keeps_fp8=True)
    DsaModel(spec, hf_model)
    modules = list(hf_model.modules())
    linears = [module for module in modules if isinstance(module, BlockLinear)]
    experts = [module for module in modules if isinstance(module, RoutedExperts)]
    assert len(linears) > spec.num_kv_layers
    assert len(experts) == spec.num_kv_layers - 1
    kept: list[Any] = [*linears, *(part for each in experts for part in (each.gate_up, each.down))]
    assert {part.ue8m0 for part in kept} == {scale_fmt == "ue8m0"}


def test_a_gpu_that_converts_no_fp8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    in_fp8, _ = write_fp8_checkpoint(tmp_path, "v32")
    with pytest.raises(
        CheckpointError, match=r"in fp8, which cuda:0 cannot convert: it has compute capability 8\.0"
    ):
        load_model(in_fp8, load_spec(in_fp8), "cuda:0")


@pytest.mark.parametrize("ranks", [None, RankStandIn(1, 2)])
def test_weights_larger_than_the_device_get_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: RankStandIn | None
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    write_checkpoint(tmp_path, "v32")
    monkeypatch.setattr(loader, "read_weights", no_room)
    with pytest.raises(CheckpointError, match=r"CUDA out of memory; spread .* with --dp-size"):
        load_model(tmp_path, load_spec(tmp_path), "cpu", ranks)


def test_experts_of_another_activation_and_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "v32")
    with pytest.raises(CheckpointError, match=r"--dp-size 65 must be at most the model's \d+ routed experts"):
        load_model(tmp_path, load_spec(tmp_path), "cpu", RankStandIn(0, 65))
    edit_config(tmp_path, hidden_act="gelu")
    with pytest.raises(
        CheckpointError, match=r"config\.json: hidden_act is 'gelu'; only 'silu' is supported"
    ):
        load_model(tmp_path, load_spec(tmp_path), "cpu")
    edit_config(tmp_path, hidden_act="silu", pad_token_id=10**9)
    with pytest.raises(CheckpointError, match=r"config\.json: transformers makes no model of it: "):
        load_model(tmp_path, load_spec(tmp_path), "cpu")


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have the device with its number, so that the two compare equal."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert loader.with_index("cuda") == torch.device("cuda:2")
    assert loader.with_index("cuda:1") == torch.device("cuda:1")
    assert loader.with_index("cpu") == CPU
