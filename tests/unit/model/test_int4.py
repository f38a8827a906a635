"""Checkpoints with weights in four bits: what is read of them, what they compute, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model import loader
from hisparse_pd.core.model.block_linear import BlockLinear
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.int4_config import FP8, INT4, Int4Config, int4_config_of
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.spec import DUMMY, ModelSpec, load_spec
from hisparse_pd.kernels.int4 import Int4Matrices
from tests.checkpoint_edits import edit_config, edit_weights
from tests.int4_checkpoints import FORMS, GROUP, dequantized, write_int4_checkpoint
from tests.unit.model.loading import load_ours
from tests.unit.model.model_specs import make_spec
from tests.unit.model.paged_model import PagedModel
from tools.checkpoints import quantize_int4
from tools.checkpoints.make_tiny import write_checkpoint
from tools.checkpoints.oracle import greedy_tokens
from tools.checkpoints.quantize_int4 import StoredForm, quantization_of, quantized

COMPRESSED = FORMS["compressed"]
EXPERT = "model.layers.1.mlp.experts.3.down_proj"
PROMPT = [(7 * n * n + 3) % 95 + 32 for n in range(150)]
NUM_NEW = 8
SAMPLED_FORMS = [
    pytest.param(form, id=name, marks=pytest.mark.slow if name in ("compressed", "gptq") else ())
    for name, form in FORMS.items()
]
"""All forms that are read; `make test` leaves out two that have less than others of the same method."""


def weights_of(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def edit_quantization(checkpoint: Path, **changes: Any) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    edit_config(checkpoint, quantization_config=config["quantization_config"] | changes)


def our_tokens(path: Path) -> list[int]:
    """Return greedy tokens behind PROMPT, each by a forward of all tokens before it."""
    spec = load_spec(path)
    paged = PagedModel(spec, load_model(path, spec), 4, 64)
    tokens = list(PROMPT)
    for _ in range(NUM_NEW):
        logits, _ = paged.extend([(paged.free_pages, 0, tokens)])
        tokens.append(int(logits[0].argmax()))
    return tokens[len(PROMPT) :]


def check_experts(spec: ModelSpec, hf_model: Any, expected: dict[str, Tensor]) -> int:
    """Compare the experts of one rank with weights by their stored names; return the number of matrices."""
    num_checked = 0
    for layer, module in enumerate(hf_model.model.layers):
        if (routed := getattr(module.mlp, "experts", None)) is None:
            continue
        assert isinstance(routed.gate_up, Int4Matrices)
        assert isinstance(routed.down, Int4Matrices)
        for place, expert in enumerate(routed.experts):
            found = [*routed.gate_up.of(place, torch.float32), *routed.down.of(place, torch.float32)]
            for name, matrix in zip(("gate_proj", "up_proj", "down_proj"), found, strict=True):
                of_theirs = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                assert torch.equal(matrix, expected[spec.family.stored_name(of_theirs)]), of_theirs
                num_checked += 1
    return num_checked


@pytest.mark.parametrize("form", SAMPLED_FORMS)
@pytest.mark.parametrize(
    ("variant", "draft_gain", "num_layers"),
    [("glm", 1.0, 4), pytest.param("mistral", None, 5, marks=pytest.mark.slow)],
)
def test_weights_are_what_the_formats_say(
    tmp_path: Path, variant: str, draft_gain: float | None, num_layers: int, form: StoredForm
) -> None:
    """Every rank has those of its experts, also in the MTP layer; all others are as without four bits."""
    in_int4, in_float32 = write_int4_checkpoint(tmp_path, variant, form, draft_gain)
    spec, expected = load_spec(in_int4), weights_of(in_float32)
    assert spec.weights_are_fp8 == form.has_fp8
    shares = load_ours(in_int4, spec, 3)
    assert sum(check_experts(spec, share, expected) for share in shares) == 3 * 8 * num_layers
    dense = load_ours(in_float32, load_spec(in_float32), 1)[0].state_dict()
    for share in shares:
        assert share.state_dict().keys() == dense.keys()
        assert all(torch.equal(tensor, dense[name]) for name, tensor in share.state_dict().items())


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(FORMS["compressed beside fp8"], id="compressed"),
        pytest.param(FORMS["awq"], id="awq", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "variant", ["v32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm", "axk2", "mistral"))]
)
def test_tokens_are_transformers_with_the_weights_that_they_stand_for(
    tmp_path: Path, variant: str, form: StoredForm
) -> None:
    in_int4, in_float32 = write_int4_checkpoint(tmp_path, variant, form)
    found = our_tokens(in_int4)
    assert [found] == greedy_tokens(in_float32, [PROMPT], NUM_NEW)
    assert len(set(found)) > 2


def test_a_dense_matrix_in_four_bits_is_converted(tmp_path: Path) -> None:
    """Published checkpoints have attention and shared experts in four bits, too."""
    dense = (
        "model.layers.1.self_attn.o_proj",
        "model.layers.2.mlp.shared_experts.up_proj",
        "model.layers.3.eh_proj",  # of the MTP layer, which is there
    )
    for number, form in enumerate((COMPRESSED, FORMS["awq"], FORMS["gptq with zeros"])):
        in_int4, in_float32 = write_int4_checkpoint(tmp_path / str(number), "v32", form, 1.0)

        def quantize(tensors: dict[str, Tensor], form: StoredForm = form) -> None:
            for module in dense:
                # A matrix is quantized as that of an expert is.
                stored = quantized("experts.0.x.weight", tensors.pop(f"{module}.weight"), form)
                tensors |= {name.replace("experts.0.x", module): part for name, part in stored.items()}

        edit_weights(in_int4, quantize)
        expected = dequantized(weights_of(in_int4), form)
        (model,) = load_ours(in_int4, load_spec(in_int4), 1)
        plain = weights_of(in_float32)
        for module in dense:
            found = model.state_dict()[f"{module}.weight"]
            assert torch.equal(found, expected[f"{module}.weight"])
            assert not torch.equal(found, plain[f"{module}.weight"])


def test_experts_of_a_layer_that_is_left_out_stay_as_they_are(tmp_path: Path) -> None:
    in_int4, in_float32 = write_int4_checkpoint(tmp_path, "v32", FORMS["awq"])
    plain = weights_of(in_float32)

    def restore(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".layers.2." in name and ".experts." in name]:
            del tensors[name]
        tensors |= {name: plain[name] for name in plain if ".layers.2." in name and ".experts." in name}

    edit_weights(in_int4, restore)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.0\.gate_proj\.qweight is missing$"):
        load_model(in_int4, load_spec(in_int4))
    edit_quantization(in_int4, modules_to_not_convert=["lm_head", "model.layers.2."])
    (model,) = load_ours(in_int4, load_spec(in_int4), 1)
    kinds = [type(layer.mlp.experts.down) for layer in model.model.layers[1:]]
    assert kinds[0] is Int4Matrices
    assert kinds[1] is not Int4Matrices
    down = model.model.layers[2].mlp.experts.down.of(4, torch.float32)[0]
    assert torch.equal(down, plain["model.layers.2.mlp.experts.4.down_proj.weight"])


def test_other_layers_stay_in_fp8_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "takes_matrix", lambda rows, columns: True)
    in_int4, _ = write_int4_checkpoint(tmp_path, "v32", FORMS["compressed beside fp8"])
    stored = weights_of(in_int4)
    for load_format in ("auto", DUMMY):
        spec = load_spec(in_int4, "bfloat16", load_format=load_format)
        (model,) = load_ours(in_int4, spec, 1, keeps_fp8=True)
        kept = {name for name, part in model.named_modules() if isinstance(part, BlockLinear)}
        assert {"model.layers.1.self_attn.o_proj", "model.layers.1.mlp.shared_experts.up_proj"} <= kept
        assert "lm_head" not in kept
        if load_format == DUMMY:
            of_dummy = model.model.layers[1].self_attn.o_proj.weight_scale_inv
            assert torch.allclose(of_dummy, torch.tensor(of_dummy.shape[1] * 128.0) ** -0.5)
        if load_format == "auto":
            linear = model.model.layers[1].self_attn.o_proj
            name = "model.layers.1.self_attn.o_proj.weight"
            assert torch.equal(linear.weight.view(torch.uint8), stored[name].view(torch.uint8))
            assert torch.equal(linear.weight_scale_inv, stored[f"{name}_scale"])


@pytest.mark.parametrize("key", ["compressed", "awq"])
def test_dummy_weights_are_in_four_bits_and_keep_the_variance(tmp_path: Path, key: str) -> None:
    in_int4, _ = write_int4_checkpoint(tmp_path, "v32", FORMS[key])
    spec = load_spec(in_int4, "bfloat16", load_format=DUMMY)
    (alone,) = load_ours(in_int4, spec, 1)
    second = load_ours(in_int4, spec, 2)[1]
    whole, half = (model.model.layers[1].mlp.experts for model in (alone, second))
    assert isinstance(whole, RoutedExperts)
    assert isinstance(whole.gate_up, Int4Matrices)
    assert torch.equal(half.gate_up.values, whole.gate_up.values[4:])
    assert (whole.gate_up.zeros is None) == (key == "compressed")
    matrices = torch.stack([whole.gate_up.of(expert, torch.float32) for expert in range(8)])
    assert 0.9 < float(matrices.square().mean()) * matrices.shape[-1] < 1.1
    assert abs(float(matrices.mean())) < 0.02 * float(matrices.std())
    logits, _ = PagedModel(spec, load_model(in_int4, spec), 4, 64).extend([(torch.arange(4), 0, PROMPT)])
    assert logits.isfinite().all()


# --- the configuration -----------------------------------------------------------------------------------


def config_of(quantization: dict[str, Any]) -> Int4Config:
    return int4_config_of(quantization, "config.json")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_modules_have_the_formats_that_the_configuration_gives_them(form: StoredForm) -> None:
    found = config_of(quantization_of(form))
    assert (found.group_size, found.has_zeros) == (GROUP, form.has_zeros)
    assert found.rounds_tokens == form.rounds_tokens
    assert found.format_of("model.layers.7.mlp.experts.12.up_proj") == INT4
    assert found.format_of("model.layers.7.mlp.experts.12.up_proj", "layers.7.experts.12.w3") == INT4
    for module in ("self_attn.o_proj", "mlp.shared_experts.down_proj", "mlp.down_proj"):
        assert found.format_of(f"model.layers.7.{module}") == (FP8 if form.has_fp8 else None)
    assert found.format_of("lm_head") is None
    assert found.format_of("model.layers.7.mlp.gate") is None


def test_a_published_list_of_parts_is_understood() -> None:
    """DeepSeek-V3.2 in awq has such parts: layers at both ends are in bfloat16."""
    parts = ["mlp.gate.", "indexer", "model.layers.0.", "model.layers.60.", "model.layers.61."]
    found = config_of(
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
        | {"modules_to_not_convert": parts}
    )
    assert found.format_of("model.layers.6.mlp.experts.0.up_proj") == INT4
    assert found.format_of("model.layers.60.mlp.experts.0.up_proj") is None


def test_names_win_over_the_class_in_any_order() -> None:
    quantization = quantization_of(FORMS["compressed beside fp8"])
    groups = quantization["config_groups"]
    swapped = quantization | {"config_groups": {"a": groups["group_1"], "b": groups["group_0"]}}
    for each in (quantization, swapped):
        assert config_of(each).format_of("model.layers.3.mlp.experts.0.up_proj") == INT4
        assert config_of(each).format_of("model.layers.3.self_attn.o_proj") == FP8


OF_AWQ = quantization_of(FORMS["awq"])
OF_GPTQ = quantization_of(FORMS["gptq"])
OF_COMPRESSED = quantization_of(FORMS["compressed, fp8 activations"])
OF_BOTH = quantization_of(FORMS["compressed beside fp8"])


@pytest.mark.parametrize(
    ("quantization", "path", "value", "message"),
    [
        (OF_AWQ, ["bits"], 8, r"bits is 8; supported is 4; quantize the checkpoint again"),
        (OF_AWQ, ["group_size"], -1, r"group_size is -1; supported are 32, 64, 128; "),
        (OF_AWQ, ["zero_point"], False, "zero_point is False; supported is True"),
        (OF_AWQ, ["version"], "gemv", "version is 'gemv'; supported are 'gemm', 'GEMM'"),
        (
            OF_AWQ,
            ["modules_to_not_convert"],
            "lm_head",
            "modules_to_not_convert is 'lm_head'; expected a list",
        ),
        (OF_GPTQ, ["desc_act"], True, "desc_act is True; supported is False"),
        (OF_GPTQ, ["sym"], None, "sym is None; supported are True, False"),
        (
            OF_GPTQ,
            ["checkpoint_format"],
            "marlin",
            "checkpoint_format is 'marlin'; supported are 'gptq', 'gptq_v2'",
        ),
        (
            OF_GPTQ,
            ["dynamic"],
            {"+:.*": {"bits": 8}},
            r"dynamic has '\+:\.\*': \{'bits': 8\}; supported are rules",
        ),
        (OF_GPTQ, ["dynamic"], {"-:(": {}}, r"'\(' is no regular expression: "),
        (
            OF_COMPRESSED,
            ["format"],
            "int-quantized",
            "format is 'int-quantized'; supported are 'pack-quantized'",
        ),
        (OF_COMPRESSED, ["transform_config"], {"a": 1}, "transform_config is {'a': 1}; none is supported"),
        (
            OF_COMPRESSED,
            ["sparsity_config"],
            {"format": "sparse-24"},
            r"sparsity_config\.format is 'sparse-24'",
        ),
        (OF_COMPRESSED, ["config_groups"], None, "config_groups is None; expected an object"),
        (OF_COMPRESSED, ["config_groups"], {}, "config_groups has no group of int4 weights"),
        (
            OF_COMPRESSED,
            ["config_groups", "group_0", "weights", "num_bits"],
            8,
            r"group_0\.weights\.num_bits is 8",
        ),
        (
            OF_COMPRESSED,
            ["config_groups", "group_0", "weights", "strategy"],
            "channel",
            "strategy is 'channel'",
        ),
        (
            OF_COMPRESSED,
            ["config_groups", "group_0", "weights", "actorder"],
            "group",
            "actorder is 'group'; ",
        ),
        (OF_COMPRESSED, ["config_groups", "group_0", "weights", "symmetric"], 1, "symmetric is 1; supported"),
        (
            OF_COMPRESSED,
            ["config_groups", "group_0", "input_activations", "strategy"],
            "tensor",
            r"group_0\.input_activations\.strategy is 'tensor'; supported is 'token'",
        ),
        (
            OF_BOTH,
            ["config_groups", "group_1", "weights", "strategy"],
            "channel",
            r"group_1\.weights\.strategy is 'channel'; supported is 'block'",
        ),
        (
            OF_BOTH,
            ["config_groups", "group_1", "weights", "type"],
            "int",
            r"group_1\.format is 'float-quantized'",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    quantization: dict[str, Any], path: list[str], value: object, message: str
) -> None:
    changed = json.loads(json.dumps(quantization))
    part = changed
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(CheckpointError, match=rf"^config\.json: quantization_config: .*{message}"):
        config_of(changed)


def test_the_command_writes_what_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "plain", "v32")
    command = ["quantize_int4", str(tmp_path / "plain"), str(tmp_path / "int4")]
    options = ["--method", "gptq", "--group-size", "32"]
    monkeypatch.setattr(sys, "argv", [*command, *options])
    quantize_int4.main()
    spec = load_spec(tmp_path / "int4")
    assert spec.int4 is not None
    assert (spec.int4.method, spec.int4.has_zeros) == ("gptq", False)
    load_model(tmp_path / "int4", spec)
    for options, message in (
        (["--method", "awq"], "awq has zeros; give --zeros"),
        (["--method", "gptq", "--fp8"], "gptq has neither --fp8-activations nor --fp8"),
        (["--group-size", "128"], r"has 32 columns, no multiple of group_size 128"),
    ):
        monkeypatch.setattr(sys, "argv", [*command, *options])
        with pytest.raises(SystemExit):
            quantize_int4.main()
        assert message in capsys.readouterr().err


def test_sizes_that_are_no_whole_groups_are_named(tmp_path: Path) -> None:
    in_int4, _ = write_int4_checkpoint(tmp_path, "v32", COMPRESSED)
    edit_config(in_int4, moe_intermediate_size=40)
    with pytest.raises(CheckpointError, match=r"moe_intermediate_size is 40; .* multiple of group_size 32"):
        load_spec(in_int4)
    with pytest.raises(ValueError, match=r"has 40 columns, no multiple of group_size 32"):
        quantized("experts.0.x.weight", torch.zeros(8, 40), COMPRESSED)


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        (
            "weight_packed",
            lambda tensor: torch.cat([tensor] * 2),
            r"weight_packed is \[256, 4\]; expected \[128, 4\]",
        ),
        (
            "weight_packed",
            lambda tensor: tensor.float(),
            r"weight_packed is in torch\.float32; expected torch\.int32",
        ),
        (
            "weight_scale",
            lambda tensor: tensor.half(),
            r"scale is in torch\.float16; expected torch\.bfloat16",
        ),
        (
            "weight_scale",
            lambda tensor: tensor.double(),
            r"scale is in torch\.float64; expected torch\.float32, ",
        ),
        ("weight_scale", None, "weight_scale is missing$"),
    ],
)
def test_tensors_of_another_form_are_named(tmp_path: Path, end: str, change: Any, message: str) -> None:
    in_int4, _ = write_int4_checkpoint(tmp_path, "v32", COMPRESSED)
    name = f"{EXPERT}.{end}"

    def edit(tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor)

    edit_weights(in_int4, edit)
    with pytest.raises(CheckpointError, match=rf"down_proj\.{message}" if end in message else message):
        load_model(in_int4, load_spec(in_int4))


def test_a_plain_weight_in_whole_numbers_is_named(tmp_path: Path) -> None:
    in_int4, _ = write_int4_checkpoint(tmp_path, "v32", COMPRESSED)
    name = "model.layers.1.self_attn.o_proj.weight"
    edit_weights(in_int4, lambda tensors: tensors.update({name: tensors[name].int()}))
    with pytest.raises(CheckpointError, match=r"o_proj\.weight is in torch\.int32; expected floats"):
        load_model(in_int4, load_spec(in_int4))


def test_a_gpu_that_rounds_nothing_to_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    spec = make_spec(int4=config_of(OF_COMPRESSED))
    with pytest.raises(CheckpointError, match=r"the activations are in fp8, which cuda:0 cannot convert"):
        load_model("missing", spec, "cuda:0")
