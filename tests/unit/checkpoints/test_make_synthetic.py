"""The synthetic checkpoint: it loads whole, its text shows every token, and its selections have locality."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.kernels.indexer import index_topk
from hisparse_pd.kernels.int4 import Int4Matrices
from tests.unit.model.loading import load_ours
from tools.checkpoints.files import NUM_BYTES, SPECIAL_TOKENS
from tools.checkpoints.make_synthetic import SyntheticShape, main, write_synthetic
from tools.checkpoints.quantize_fp8 import quantize_checkpoint

TOP_K = 64
CONTEXT = 1024
SMALL = SyntheticShape(
    num_layers=2,
    num_experts=4,
    hidden_size=128,
    vocab_size=5000,
    context_length=4096,
    jitter=0.03,
    num_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
    index_n_heads=16,
    index_head_dim=128,
    index_topk=TOP_K,
)
EOS_ID = SMALL.vocab_size - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index("<eos>")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("synthetic")
    write_synthetic(directory, SMALL, seed=3)
    return directory


class WholeContext:
    """Keys and values of one request in plain tensors; keeps what each layer selects."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions
        self._items: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}
        self.selected: list[Tensor] = []

    def write(self, layer: int, kv: Tensor | None, index_keys: Tensor | None) -> None:
        assert kv is not None
        assert index_keys is not None
        self._items[layer] = kv
        self._keys[layer] = index_keys

    def select(self, group: int, q_index: Tensor, weights: Tensor) -> Tensor:
        self.selected.append(index_topk(q_index, weights, self._keys[group], self._positions, TOP_K))
        return self.selected[-1]

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        items = self._items[layer][positions.clamp_min(0).long()]  # [num_tokens, top_k, item_dim]
        logits = torch.einsum("thd,tkd->thk", q.float(), items.float()) * scale
        logits.masked_fill_((positions < 0)[:, None, :], float("-inf"))
        values = items[..., : SMALL.kv_lora_rank].float()
        return torch.einsum("thk,tkd->thd", logits.softmax(-1), values).to(q.dtype)


def run(directory: Path) -> tuple[Tensor, list[Tensor]]:
    """Logits of the last token and each layer's selections for CONTEXT random tokens."""
    spec = load_spec(directory)
    token_ids = torch.randint(0, SMALL.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(CONTEXT)
    kv = WholeContext(positions)
    logits = load_model(directory, spec).forward(token_ids, positions, kv, torch.tensor([CONTEXT - 1]))
    return logits, kv.selected


def overlap(selected: Tensor, lag: int) -> float:
    """Share of a selection that is in the one ``lag`` steps later, over the last 100 steps."""
    steps = [set(row.tolist()) for row in selected[-100 - lag :]]
    shares = [len(now & later) / TOP_K for now, later in zip(steps, steps[lag:], strict=False)]
    return sum(shares) / len(shares)


def test_it_loads_whole_and_runs(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = load_spec(checkpoint, device="cuda")
    assert spec.dtype == torch.bfloat16
    assert (spec.num_layers, spec.num_index_layers, spec.context_length) == (2, 2, 4096)
    assert spec.eos_token_ids == (EOS_ID,)
    assert "UNEXPECTED" not in caplog.text
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    sizes = [file.stat().st_size for file in checkpoint.glob("*.safetensors")]
    assert len(sizes) == 3
    assert 0 <= sum(sizes) - index["metadata"]["total_size"] < 16 << 10  # headers

    logits, _ = run(checkpoint)
    assert logits.isfinite().all()
    # Whatever the input, the next token is a word: bytes and special tokens are out of reach.
    words = slice(NUM_BYTES, SMALL.vocab_size - len(SPECIAL_TOKENS))
    others = torch.cat((logits[0, : words.start], logits[0, words.stop :]))
    assert float(others.max()) < float(logits[0, words].max()) - 10


@pytest.mark.parametrize("num_dense_layers", [1, 2])
def test_transformers_finds_no_weight_missing_or_left_over(
    checkpoint: Path, tmp_path: Path, num_dense_layers: int
) -> None:
    from transformers import AutoModelForCausalLM

    if num_dense_layers != SMALL.num_dense_layers:
        checkpoint = tmp_path
        write_synthetic(checkpoint, replace(SMALL, num_dense_layers=num_dense_layers), seed=3)
    _, report = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, local_files_only=True, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]


@pytest.mark.slow
def test_consecutive_selections_overlap_as_the_jitter_says(checkpoint: Path, tmp_path: Path) -> None:
    _, with_locality = run(checkpoint)
    shape = replace(SMALL, jitter=1.0)
    write_synthetic(tmp_path, shape, seed=3)
    _, without = run(tmp_path)
    by_chance = TOP_K / CONTEXT
    for layer in range(SMALL.num_layers):
        assert overlap(with_locality[layer], 1) > 0.7
        assert overlap(without[layer], 1) < 3 * by_chance
        # The drifting part: far apart, selections share less than next to one another.
        assert overlap(with_locality[layer], 200) < overlap(with_locality[layer], 1) - 0.05


def test_every_token_of_a_word_shows_text(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    assert len(tokenizer) == SMALL.vocab_size
    assert tokenizer.eos_token_id == EOS_ID
    words = [tokenizer.decode([token_id]) for token_id in range(NUM_BYTES, SMALL.vocab_size - 6)]
    assert all(word.isascii() and word.isprintable() and len(word) >= 2 for word in words)
    assert len(set(words)) == len(words)
    ids = tokenizer.encode("abc 12", add_special_tokens=False)
    assert tokenizer.decode(ids) == "abc 12"


def test_the_seed_decides(checkpoint: Path, tmp_path: Path) -> None:
    first = load_spec(checkpoint).fingerprint
    for directory, seed in (("same", 3), ("other", 4)):
        write_synthetic(tmp_path / directory, SMALL, seed=seed)
    assert load_spec(tmp_path / "same").fingerprint == first
    assert load_spec(tmp_path / "other").fingerprint != first


def test_stale_weights_and_impossible_shapes_are_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="exists already"):
        write_synthetic(checkpoint, SMALL)
    with pytest.raises(ValueError, match="vocab_size is 100; expected at least 262"):
        SyntheticShape(vocab_size=100)
    with pytest.raises(ValueError, match=r"draft_agreement is 1\.5; expected a share"):
        SyntheticShape(draft_agreement=1.5)
    with pytest.raises(ValueError, match="num_dense_layers is 5; expected at most the 4 of num_layers"):
        SyntheticShape(num_dense_layers=5)
    with pytest.raises(SystemExit):
        main(["--out", "unused", "--jitter", "2"])
    assert "jitter is 2.0; expected a share" in capsys.readouterr().err


def test_experts_in_fp8_are_those_that_the_quantizer_makes(tmp_path: Path) -> None:
    shape = replace(SMALL, expert_size=48, experts_per_token=3)
    write_synthetic(tmp_path / "bf16", shape, seed=3)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "quantized")
    write_synthetic(tmp_path / "fp8", shape, seed=3, in_fp8=True)
    spec = load_spec(tmp_path / "fp8", "float32")
    assert spec.weights_are_fp8
    ours, expected = (
        load_ours(tmp_path / name, spec, 1)[0].model.layers[1].mlp for name in ("fp8", "quantized")
    )
    experts, wanted = ours.experts, expected.experts
    assert tuple(experts.gate_up.values.shape) == (4, 2, 48, 128)
    assert ours.gate.top_k == 3
    # Drawn in float32, which only the other one rounds to bfloat16 before: one step of e4m3 at most.
    difference = experts.gate_up.of(1, torch.float32) - wanted.gate_up.of(1, torch.float32)
    assert float(difference.abs().max()) < 0.08 * float(wanted.gate_up.of(1, torch.float32).abs().max())


@pytest.mark.parametrize("in_fp8", [False, True])
def test_experts_in_four_bits_are_those_of_the_configuration(tmp_path: Path, in_fp8: bool) -> None:
    shape = replace(SMALL, expert_size=128)
    write_synthetic(tmp_path / "plain", shape, seed=3)
    write_synthetic(tmp_path / "int4", shape, seed=3, in_fp8=in_fp8, in_int4=True)
    spec = load_spec(tmp_path / "int4", "float32")
    assert spec.weights_are_fp8 == in_fp8
    plain = load_ours(tmp_path / "plain", load_spec(tmp_path / "plain"), 1)[0].model.layers[1].mlp
    ours = load_ours(tmp_path / "int4", spec, 1)[0].model.layers[1].mlp
    assert isinstance(ours.experts.down, Int4Matrices)
    found, expected = (mlp.experts.down.of(1, torch.float32) for mlp in (ours, plain))
    assert 0 < (found - expected).norm() < 0.15 * expected.norm()
    shared, of_plain = ours.shared_experts.up_proj.weight, plain.shared_experts.up_proj.weight
    assert torch.equal(shared, of_plain) != in_fp8
    with pytest.raises(ValueError, match="expert_dim is 100; experts in int4 need a multiple of 128"):
        write_synthetic(tmp_path / "odd", replace(SMALL, expert_size=100), in_int4=True)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.7])
def test_as_many_drafts_are_right_as_it_was_told(tmp_path: Path, checkpoint: Path, share: float) -> None:
    """Behind any token, alone and at the end of a chain of guesses; the model without it is as it was."""
    shape = replace(SMALL, draft_agreement=share)
    write_synthetic(tmp_path, shape, seed=3)
    spec = load_spec(tmp_path)
    model = load_model(tmp_path, spec)
    positions = torch.arange(CONTEXT)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(NUM_BYTES, SMALL.vocab_size - 6, (CONTEXT + 1,), generator=generator)
    rows = torch.arange(CONTEXT)

    def guess(next_tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits, hidden = model.draft(next_tokens, hidden, positions, kv, rows)
        return logits.argmax(1), hidden

    kv = WholeContext(positions)
    logits, hidden = model.forward_with_hidden(tokens[:-1], positions, kv, rows)
    drawn = logits.argmax(1)
    first, state = guess(tokens[1:], hidden)
    agreed = (first[:-1] == drawn[1:]).float().mean()
    assert abs(float(agreed) - share) < 0.05
    second, _ = guess(first, state)
    kv = WholeContext(positions)
    again, _ = model.forward_with_hidden(first, positions, kv, rows)
    assert abs(float((second == again.argmax(1)).float().mean()) - share) < 0.07
    assert drawn.unique().numel() > CONTEXT / 2
    if share == 0:
        without = WholeContext(positions)
        expected = load_model(checkpoint, load_spec(checkpoint)).forward(
            tokens[:-1], positions, without, rows
        )
        assert torch.equal(logits, expected)


@pytest.mark.slow
def test_published_sizes_come_without_weights(tmp_path: Path) -> None:
    main(["--out", str(tmp_path), "--published", "axk2", "--int4"])
    assert not list(tmp_path.glob("*.safetensors"))
    spec = load_spec(tmp_path, load_format="dummy")
    assert (spec.model_type, spec.num_layers, spec.context_length) == ("axk2", 48, 131072)
    assert not spec.weights_are_fp8
    assert spec.int4 is not None
    assert (spec.kv_lora_rank, spec.qk_rope_head_dim, spec.index_num_heads) == (128, 32, 16)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == spec.vocab_size == 163840


@pytest.mark.slow
def test_the_first_layers_of_published_sizes_come_without_weights(tmp_path: Path) -> None:
    main(["--out", str(tmp_path), "--published", "mistral_large4", "--layers", "9", "--fp8"])
    spec = load_spec(tmp_path, load_format="dummy", dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    assert (spec.model_type, spec.num_layers, spec.context_length) == ("mistral_large4", 9, 1 << 20)
    assert (spec.num_kv_layers, spec.num_index_groups, spec.item_bytes) == (9, 9, 656)
    assert spec.weights_are_fp8
    assert spec.vocab_size == 204800
