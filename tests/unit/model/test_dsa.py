"""The model against transformers' own generate, and the spec of a checkpoint."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model import loader
from hisparse_pd.core.model.block_linear import BlockLinear
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest, PagedRows
from hisparse_pd.core.model.spec import ModelSpec, load_spec
from hisparse_pd.kernels.attention import TorchAttention
from hisparse_pd.kernels.fp8_rows import Activations
from hisparse_pd.kernels.hadamard import hadamard_matrix
from hisparse_pd.kernels.latents import finish_latents
from hisparse_pd.kernels.rope import rotate
from tests.checkpoint_edits import edit_config, edit_weights
from tests.fp8_checkpoints import write_fp8_checkpoint
from tests.unit.model.loading import load_ours
from tests.unit.model.paged_model import PagedModel
from tests.unit.model.rank_stand_in import RankStandIn
from tools.checkpoints.make_tiny import CONTEXT_LENGTH, EOS_ID, INDEX_TOPK, VARIANTS, write_checkpoint
from tools.checkpoints.oracle import continues_with, generate
from tools.checkpoints.oracle import load as load_oracle

PAGE_SIZE = 64
NUM_PAGES = 48
NUM_OUTPUT = 10
PROMPT_LENGTHS = (1, PAGE_SIZE - 1, PAGE_SIZE, INDEX_TOPK + 1, 200, 360)

Tokens = list[int]
TinyCheckpoint = Callable[[str], Path]


class Runner(PagedModel):
    def __init__(self, path: Path) -> None:
        spec = load_spec(path)
        super().__init__(spec, load_model(path, spec), NUM_PAGES, PAGE_SIZE)

    def pages(self, lengths: list[int]) -> list[Tensor]:
        counts = [-(-(length + NUM_OUTPUT) // PAGE_SIZE) for length in lengths]
        return list(self.free_pages[: sum(counts)].split(counts))

    def generate(
        self, prompts: list[Tokens], chunk: int, on_decode: Callable[[], None] | None = None
    ) -> list[Tokens]:
        """Greedy: prompts chunk by chunk in one batch, then all of them decode together."""
        pages = self.pages([len(prompt) for prompt in prompts])
        outputs: list[Tokens] = [[] for _ in prompts]
        done = [0] * len(prompts)
        while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
            waiting = [number for number, prompt in enumerate(prompts) if done[number] < len(prompt)]
            parts = [
                (pages[number], done[number], prompts[number][done[number] : done[number] + chunk])
                for number in waiting
            ]
            logits, _ = self.extend(parts)
            for number, (_, _, tokens), row in zip(waiting, parts, logits, strict=True):
                done[number] += len(tokens)
                outputs[number] = [int(row.argmax())]
        if on_decode is not None:
            on_decode()
        while len(outputs[0]) < NUM_OUTPUT:
            parts = [
                (pages[number], len(prompts[number]) + len(output) - 1, output[-1:])
                for number, output in enumerate(outputs)
            ]
            for output, row in zip(outputs, self.extend(parts)[0], strict=True):
                output.append(int(row.argmax()))
        return outputs


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runner(variant: str, tiny_checkpoint: TinyCheckpoint) -> Runner:
    return Runner(tiny_checkpoint(variant))


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    text = Path(__file__).read_bytes()
    return [list(text[start : start + length]) for start, length in enumerate(PROMPT_LENGTHS)]


@pytest.fixture(scope="module")
def batched(runner: Runner, prompts: list[Tokens]) -> list[Tokens]:
    """Our tokens of all prompts in one batch, in chunks."""
    return runner.generate(prompts, 129)


@pytest.fixture(scope="module")
def expected(
    variant: str, tiny_checkpoint: TinyCheckpoint, prompts: list[Tokens], batched: list[Tokens]
) -> list[Tokens]:
    """transformers' own tokens. If they are those that we generate, one forward each is enough to see it."""
    theirs = load_oracle(tiny_checkpoint(variant))
    if all(map(functools.partial(continues_with, theirs), prompts, batched)):
        return batched
    return list(generate(theirs, prompts, NUM_OUTPUT, ignore_eos=True))


@pytest.mark.I5
def test_tokens_equal_transformers_in_a_batch_of_chunks_and_one_by_one(
    runner: Runner, prompts: list[Tokens], batched: list[Tokens], expected: list[Tokens]
) -> None:
    assert batched == expected
    assert [runner.generate([prompt], 258)[0] for prompt in prompts[::4]] == expected[::4]


def test_logits_are_transformers_own(
    runner: Runner, variant: str, tiny_checkpoint: TinyCheckpoint, prompts: list[Tokens]
) -> None:
    """Also where no token depends on them, as on a cap of Mistral's."""
    prompt = prompts[2]
    logits = runner.extend([(runner.pages([len(prompt)])[0], 0, prompt)])[0]
    with torch.no_grad():
        theirs = load_oracle(tiny_checkpoint(variant))(torch.tensor([prompt])).logits[0, -1:]
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)


def test_generated_text_is_varied(expected: list[Tokens]) -> None:
    num_distinct = [len(set(tokens)) for tokens in expected]
    assert min(num_distinct) >= 4
    assert sum(num_distinct) / len(num_distinct) > NUM_OUTPUT / 2
    assert len({tuple(tokens[-4:]) for tokens in expected}) == len(expected)


@pytest.mark.parametrize("variant", ["v32"], indirect=True)
def test_wrong_kv_or_selection_changes_tokens(
    runner: Runner, prompts: list[Tokens], expected: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparisons with transformers see faults: each of these changes what long prompts generate."""
    long_prompts, tokens = prompts[-2:], expected[-2:]
    for pool in (runner.device_pool, runner.index_pool):

        def off_by_one(pool: Tensor = pool) -> None:
            pool.copy_(pool.roll(1, dims=1))

        assert runner.generate(long_prompts, 2048, off_by_one) != tokens

    attend = TorchAttention.attend

    def one_wrong_slot(self: TorchAttention, q: Tensor, pool: Tensor, slots: Tensor, scale: float) -> Tensor:
        if q.shape[0] == len(long_prompts):
            slots = slots.clone()
            slots[:, -1] = slots[:, -2]
        return attend(self, q, pool, slots, scale)

    monkeypatch.setattr(TorchAttention, "attend", one_wrong_slot)
    assert runner.generate(long_prompts, 2048) != tokens


def test_hint_is_the_last_tokens_selection(runner: Runner, prompts: list[Tokens]) -> None:
    prompt = prompts[-1]
    pages = runner.pages([len(prompt)])[0]
    whole = runner.extend([(pages, 0, prompt)])[1].hints[0]
    assert whole.shape == (runner.spec.num_index_layers, INDEX_TOPK)
    for positions in whole.tolist():
        assert len(set(positions)) == INDEX_TOPK
        assert 0 <= min(positions) <= max(positions) < len(prompt)
    last = runner.extend([(pages, len(prompt) - 1, prompt[-1:])])[1].hints[0]
    assert last.sort().values.tolist() == whole.sort().values.tolist()
    short = runner.extend([(pages, 0, prompt[:3])])[1].hints[0]
    assert short[0].tolist() == [0, 1, 2] + [-1] * (INDEX_TOPK - 3)


@pytest.mark.I5
def test_rows_of_padding_change_nothing(runner: Runner, prompts: list[Tokens]) -> None:
    """A forward over rows that were another's before, as graphs of short prompts have them."""
    parts = [(runner.free_pages[2 * number :][:2], 0, prompts[number][: 7 + number]) for number in range(2)]
    scratch_slot = int(runner.free_pages[-1]) * PAGE_SIZE
    expected, kv = runner.extend(parts)
    pools = runner.device_pool.clone(), runner.index_pool.clone()
    rows = PagedRows.padding(3, 5, 20, 1, scratch_slot, torch.device("cpu"), 5 * PAGE_SIZE)
    others = [PagedRequest(runner.free_pages[4:8], 60, 19), PagedRequest(runner.free_pages[8:9], 0, 1)]
    rows.fill(PagedRows.of(others, PAGE_SIZE, torch.device("cpu")), scratch_slot)
    rows.fill(kv.rows, scratch_slot)
    assert not rows.positions[len(kv.positions) :].any(), "padding attends to a former prompt"
    new = [*parts[0][2], *parts[1][2]]
    token_ids = torch.tensor(new + [65] * (20 - len(new)))
    padded = PagedKv(runner.spec, runner.device_pool, runner.index_pool, PAGE_SIZE, rows)
    logits = runner.model.forward(token_ids, padded.positions, padded, padded.last_rows)
    assert torch.equal(logits[:2], expected)
    assert torch.equal(padded.hints[:2], kv.hints)
    for pool, before in zip((runner.device_pool, runner.index_pool), pools, strict=True):
        changed = (pool != before).any(dim=2).any(dim=0).nonzero().flatten().tolist()
        assert changed == [scratch_slot]


def test_writes_touch_the_requests_own_new_slots_only(runner: Runner) -> None:
    page_ids = torch.tensor([7, 2])
    runner.extend([(page_ids, 0, [65] * 66)])
    before, before_index = runner.device_pool.clone(), runner.index_pool.clone()
    runner.extend([(page_ids, 66, [66, 67])])
    new_slots = [2 * PAGE_SIZE + 2, 2 * PAGE_SIZE + 3]
    for pool, old in ((runner.device_pool, before), (runner.index_pool, before_index)):
        changed = (pool != old).any(dim=2).any(dim=0).nonzero().flatten().tolist()
        assert changed == new_slots


def test_paged_kv_refuses_requests_that_do_not_fit(runner: Runner) -> None:
    pools = (runner.device_pool, runner.index_pool, PAGE_SIZE)
    with pytest.raises(ValueError, match="request 0: 65 tokens do not fit in 1 pages of 64"):
        PagedKv(runner.spec, *pools, [PagedRequest(torch.tensor([1]), 60, 5)])
    with pytest.raises(ValueError, match="prefix_len 3 and num_new_tokens 0"):
        PagedKv(runner.spec, *pools, [PagedRequest(torch.tensor([1]), 3, 0)])


@pytest.mark.parametrize(("name", "eps"), [("glm", 1e-3), ("v32", 1e-6)])
def test_latent_norms_have_glms_configured_epsilon_and_deepseeks_constant(
    tmp_path: Path, name: str, eps: float
) -> None:
    """The epsilon decides where latents are small; another one changes the output by a factor."""
    write_checkpoint(tmp_path, name)
    edit_config(tmp_path, rms_norm_eps=1e-3)
    attention = load_model(tmp_path, load_spec(tmp_path)).layers[1].attention
    theirs = load_oracle(tmp_path).model.layers[1].self_attn
    x = torch.full((1, 64), 1e-3)
    expected = x * (x.pow(2).mean() + eps).rsqrt()
    kv_a, no_turn = torch.cat((x, x.new_zeros(1, 16)), dim=1), (torch.ones(1, 8), torch.zeros(1, 8))
    ours = finish_latents(x[None], kv_a[None], attention.norms, no_turn, None)
    assert ours.q is not None
    assert ours.item is not None
    for normed in (ours.q.dense, ours.item[:, :64], theirs.q_a_layernorm(x), theirs.kv_a_layernorm(x)):
        torch.testing.assert_close(normed, expected)


@torch.inference_mode()
def test_key_norms_head_weights_and_rotary_tables_are_float32_in_a_bfloat16_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "v32")
    norm_weight = torch.linspace(1.0, 1.001, 32)  # all the same in bfloat16
    head_matrix = torch.empty(0)

    def edit(weights: dict[str, Tensor]) -> None:
        nonlocal head_matrix
        weights["model.layers.2.self_attn.indexer.k_norm.weight"] = norm_weight
        head_matrix = weights["model.layers.2.self_attn.indexer.weights_proj.weight"]
        head_matrix += torch.linspace(0, 2**-10, head_matrix.numel()).view_as(head_matrix)

    edit_weights(tmp_path, edit)
    spec = load_spec(tmp_path, dtype="bfloat16")
    tables = []

    def spy(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
        tables.append((cos, sin))
        return rotate(x, cos, sin, **options)

    monkeypatch.setattr("hisparse_pd.kernels.latents.rotate", spy)
    monkeypatch.setattr("hisparse_pd.kernels.latent_vectors.rotate", spy)
    for ranks in (None, RankStandIn(0, 1)):  # the two ways to read a checkpoint
        tiny_model = load_model(tmp_path, spec, ranks=ranks)
        attention = tiny_model.layers[2].attention
        indexer = attention.indexer
        assert indexer is not None
        x, projected = torch.randn(3, 128).bfloat16(), torch.randn(3, 32).bfloat16()
        no_turn = (torch.ones(3, 8), torch.zeros(3, 8))
        q_a, index_keys, kv_a = attention.from_hidden(Activations(x))
        latents = finish_latents(
            q_a, kv_a, attention.norms, no_turn, None, index_keys=index_keys, vectors=indexer.vectors,
            head_weights=indexer.head_weights(Activations(x)),
        )  # fmt: skip
        assert latents.head_weights is not None
        exact = x.double() @ head_matrix.double().t() * len(head_matrix) ** -0.5
        weights = latents.head_weights.double()
        torch.testing.assert_close(weights, exact, rtol=1e-5, atol=1e-6)  # bfloat16 has 4e-3
        keys = indexer.vectors.finish_keys(projected, no_turn)
        wide = projected.float()
        expected = torch.nn.functional.layer_norm(wide, (32,), norm_weight, torch.zeros(32), 1e-6)
        torch.testing.assert_close(keys, expected.bfloat16(), rtol=0, atol=0)
        del tables[:]
        positions = torch.tensor([0, 5, 4001])
        kv = _NoKv(spec)
        tiny_model.forward(torch.tensor([65, 66, 67]), positions, kv, torch.tensor([2]))
        angles = positions[:, None].float() * 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)
        for cos, sin in tables:
            torch.testing.assert_close(cos, angles.cos(), rtol=0, atol=1e-4)  # bfloat16 has 4e-3
            torch.testing.assert_close(sin, angles.sin(), rtol=0, atol=1e-4)  # bfloat16 has 4e-3
        assert len(tables) == 4 * spec.num_layers


@pytest.mark.parametrize(
    "variant",
    ["v32", "mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm", "axk2"))],
)
def test_layers_that_stay_in_fp8_round_and_no_more(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with the checkpoint's fp8, and the same one dequantized."""
    monkeypatch.setattr(loader, "takes_matrix", lambda rows, columns: columns % 128 == 0)
    in_fp8, _ = write_fp8_checkpoint(tmp_path, variant)
    spec = load_spec(in_fp8, dtype="bfloat16")
    logits = []
    for keeps_fp8 in (False, True):
        (hf_model,) = load_ours(in_fp8, spec, 1, keeps_fp8=keeps_fp8)
        tiny_model = DsaModel(spec, hf_model)
        assert isinstance(tiny_model.layers[0].attention.o_proj, BlockLinear) == keeps_fp8
        token_ids, rows = torch.arange(65, 97), torch.arange(32)
        logits.append(tiny_model.forward(token_ids, torch.arange(32), _NoKv(spec), rows))
    dequantized, kept = logits
    assert 0 < (kept - dequantized).norm() <= 0.1 * dequantized.norm()


@pytest.mark.I5
@pytest.mark.parametrize(
    ("variant", "index_format"),
    [
        *((name, "fp8_e4m3") for name in VARIANTS),
        ("v32", "bfloat16"),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in VARIANTS if name != "v32"),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in VARIANTS),
    ],
    indirect=["variant"],
)
@torch.inference_mode()
def test_index_queries_and_keys_are_rotated_where_keys_are_rounded_to_fp8(
    tiny_checkpoint: TinyCheckpoint, variant: str, index_format: str
) -> None:
    """Both by the same orthogonal matrix, to the same bits alone and among others; elsewhere not at all."""
    path, token_ids, positions = tiny_checkpoint(variant), torch.arange(65, 97), torch.arange(32)

    @functools.cache
    def loaded(index_format: str) -> tuple[ModelSpec, DsaModel]:
        spec = load_spec(path, indexer_cache_dtype=index_format)
        return spec, load_model(path, spec)

    def indexed(index_format: str, rows: slice) -> list[tuple[Tensor, Tensor]]:
        spec, model = loaded(index_format)
        kv = _NoKv(spec)
        some = positions[rows]
        model.forward(token_ids[rows], some, kv, torch.arange(len(some)))
        return list(zip(kv.queries, kv.keys, strict=True))

    plain, found = (indexed(name, slice(None)) for name in ("float32", index_format))
    matrix = hadamard_matrix(32, torch.float32)
    assert len(found) == len(plain) == load_spec(path).num_index_layers
    for ours, theirs in zip(found, plain, strict=True):
        for part, as_it_was in zip(ours, theirs, strict=True):
            if index_format == "fp8_e4m3":
                torch.testing.assert_close(part, as_it_was @ matrix)
            else:
                assert torch.equal(part, as_it_was)
    for row in (0, 17):
        alone = indexed(index_format, slice(row, row + 1))
        for ours, among_others in zip(alone, found, strict=True):
            for part, of_all in zip(ours, among_others, strict=True):
                assert torch.equal(part, of_all[row : row + 1])


class _NoKv:
    """Stands in for memory: every token attends to nothing."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.keys: list[Tensor] = []
        self.queries: list[Tensor] = []

    def write(self, layer: int, kv: Tensor | None, index_keys: Tensor | None) -> None:
        if index_keys is not None:
            self.keys.append(index_keys)

    def select(self, group: int, q_index: Tensor, weights: Tensor) -> Tensor:
        self.queries.append(q_index)
        return torch.full((len(q_index), self._spec.index_topk), -1, dtype=torch.int32)

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        return q.new_zeros((*q.shape[:2], self._spec.kv_lora_rank))


def test_spec_of_the_variants(tiny_checkpoint: TinyCheckpoint) -> None:
    v32, glm = load_spec(tiny_checkpoint("v32")), load_spec(tiny_checkpoint("glm"))
    assert v32.index_group_of_layer == (0, 1, 2)
    assert glm.index_group_of_layer == (0, 0, 1, 1)
    assert glm.layers_of_group == ((0, 1), (2, 3))
    assert glm.num_index_layers == 2
    assert v32.item_bytes == (64 + 16) * 4
    assert load_spec(tiny_checkpoint("v32"), kv_cache_dtype="bfloat16").item_bytes == (64 + 16) * 2
    assert v32.index_item_bytes == 32 * 4
    assert v32.context_length == CONTEXT_LENGTH
    assert v32.eos_token_ids == (EOS_ID,)
    geometry = glm.geometry(16)
    assert (geometry.page_size, geometry.num_layers, geometry.num_index_layers) == (16, 4, 2)
    assert geometry.model_fingerprint == glm.fingerprint != v32.fingerprint


def test_spec_of_layers_that_attend_to_kv_of_others(tiny_checkpoint: TinyCheckpoint) -> None:
    spec = load_spec(tiny_checkpoint("mistral"))
    assert spec.kv_layer_of_layer == (0, 1, 0, 2, 1, 1)
    assert spec.index_group_of_layer == (0, 1, 1, 2, 3, 3)
    # The first two index groups and the last attend to the same KV: an entry is hot for all three.
    assert spec.hot_group_of_index_group == (0, 0, 1, 0)
    assert spec.kv_layers_of_hot_group == ((0, 1), (2,))
    # The first and the fifth layer open a selection of which their own group does not read all KV layers.
    assert spec.kv_layers_filled_at == ((0, 1), (1,), (0,), (2,), (1, 0), ())
    geometry = spec.geometry(16)
    assert (spec.num_kv_layers, geometry.num_layers, geometry.num_kv_layers) == (3, 3, 3)
    assert (geometry.num_index_layers, spec.row_check_bytes) == (4, 3 * 4)
    with pytest.raises(CheckpointError, match="no MTP layer to draft tokens with"):
        load_spec(tiny_checkpoint("mistral"), num_draft_layers=1)


def test_kv_is_shared_among_layers_that_all_have_rope_or_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mistral")
    text_config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_config(tmp_path, text_config=text_config | {"no_rope_layers": [1, 1, 1, 1, 0, 0]})
    with pytest.raises(CheckpointError, match="layer 4 attends to the KV of layer 1, but only one of them"):
        load_spec(tmp_path)


def test_checkpoints_are_deterministic_and_fingerprints_follow_content(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "v32")
    original = load_spec(tiny_checkpoint("v32"))
    assert load_spec(tmp_path) == original
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert load_spec(tmp_path).fingerprint != original.fingerprint
    assert replace(load_spec(tmp_path), fingerprint=original.fingerprint) == original


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "llama"},
            "model_type is 'llama'; supported are deepseek_v32, glm_moe_dsa, axk2, mistral_large4",
        ),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "the first layer is 'shared'"),
        ({"indexer_types": ["full"]}, "has 1 entries; expected one of each of 4 layers"),
        ({"model_type": []}, r"model_type is \[\]; supported are"),
        ({"text_config": 5}, "transformers refuses it: .*'int' object"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type is 'dynamic', whose angles follow the longest request of a batch",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope", "rope_theta": 1e4}}},
            "rope_type is 'longrope'",
        ),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; expected a positive integer"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; 4096 are the most"),
        ({"text_config": {"num_hidden_layers": 4097}}, "num_hidden_layers is 4097; 4096 are the most"),
        ({"num_experts_per_tok": 1000}, "num_experts_per_tok is 1000; a token chooses among"),
        ({"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers is 'one'; expected a number"),
    ],
)
def test_bad_configurations_are_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    write_checkpoint(tmp_path, "glm")
    edit_config(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_spec(tmp_path)


def test_a_configuration_of_many_levels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read: .*recursion"):
        load_spec(tmp_path)


@pytest.mark.parametrize("eos", ["</s>", [EOS_ID, 10**6], {}, -1])
def test_ending_tokens_are_of_the_vocabulary(tmp_path: Path, eos: object) -> None:
    write_checkpoint(tmp_path, "v32")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(CheckpointError, match=f"eos_token_id is {re.escape(repr(eos))}; expected ids of"):
        load_spec(tmp_path)


def test_items_in_fp8_are_whole_words(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "v32")
    edit_config(tmp_path, kv_lora_rank=66)
    load_spec(tmp_path, kv_cache_dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"config\.json: kv_lora_rank.* got 66 .*--kv-cache-dtype"):
        load_spec(tmp_path, kv_cache_dtype="fp8_e4m3")


def test_index_keys_in_fp8_need_a_power_of_two(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "v32")
    edit_config(tmp_path, index_head_dim=48)
    assert load_spec(tmp_path, kv_cache_dtype="fp8_e4m3", indexer_cache_dtype="bfloat16").index_rotation == ""
    with pytest.raises(CheckpointError, match=r"index_head_dim is 48; .*powers of two .*--indexer-cache"):
        load_spec(tmp_path, kv_cache_dtype="fp8_e4m3")


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        load_spec(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        load_spec(tmp_path)
    write_checkpoint(tmp_path, "v32")
    with pytest.raises(CheckpointError, match=r"--context-length 9000: the model in .* has 8192 at most"):
        load_spec(tmp_path, context_length=9000)
    assert load_spec(tmp_path, context_length=8192).context_length == 8192
    with pytest.raises(CheckpointError, match="dtype is 'int4'; supported are float32, bfloat16"):
        load_spec(tmp_path, dtype="int4")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"1 weight files .* are missing, first 'model-1\.safetensors'"):
        load_spec(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(CheckpointError, match=r"there is no \*\.safetensors file in it; a link whose target"):
        load_spec(tmp_path)
