"""The MTP layer: against a plain reference, beside the model that it guesses for, and in checkpoints."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.core.model.spec import load_spec
from tests.checkpoint_edits import edit_config, edit_weights
from tests.fp8_checkpoints import write_fp8_checkpoint
from tests.unit.model.loading import joined, load_ours
from tests.unit.model.paged_model import PagedModel
from tests.unit.model.plain_mtp import PlainMtp
from tools.checkpoints.make_tiny import GLM_INDEXERS, INDEX_TOPK, NUM_LAYERS, VOCAB_SIZE, write_checkpoint
from tools.checkpoints.oracle import load as load_oracle

PAGE_SIZE = 64
NUM_PAGES = 16
PROMPT = torch.randint(32, 127, (300,), generator=torch.Generator().manual_seed(0)).tolist()
LAYERS = {"v32": NUM_LAYERS, "glm": len(GLM_INDEXERS)}
"""Layers of the model before the MTP layer."""
FIRST = f"model.layers.{NUM_LAYERS}."
"""Begins the names of V3.2's MTP layer."""


class Drafter(PagedModel):
    """A model with its MTP layer."""

    def __init__(
        self, path: Path, num_draft_layers: int | None = None, ranks: RankGroup | None = None
    ) -> None:
        spec = load_spec(path, num_draft_layers=num_draft_layers)
        super().__init__(spec, load_model(path, spec, ranks=ranks), NUM_PAGES, PAGE_SIZE)

    def kv_of(self, start: int, num_tokens: int) -> PagedKv:
        return self.kv(PagedRequest(self.free_pages, start, num_tokens))

    def forward(self, tokens: list[int], start: int = 0) -> tuple[Tensor, Tensor]:
        kv = self.kv_of(start, len(tokens))
        rows = torch.arange(len(tokens))
        return self.model.forward_with_hidden(torch.tensor(tokens), kv.positions, kv, rows)

    def draft(self, next_tokens: list[int], hidden: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        kv = self.kv_of(start, len(next_tokens))
        rows = torch.arange(len(next_tokens))
        return self.model.draft(torch.tensor(next_tokens), hidden, kv.positions, kv, rows)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("draft")
    for variant in ("v32", "glm"):
        write_checkpoint(root / variant, variant, draft_gain=1.0)
    return {variant: root / variant for variant in ("v32", "glm")}


@pytest.fixture(scope="module", params=["v32", "glm"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def drafter(variant: str, checkpoints: dict[str, Path]) -> Drafter:
    return Drafter(checkpoints[variant])


def test_logits_and_hidden_states_are_those_of_a_plain_reference(
    variant: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Hidden states of transformers behind its final norm, then a chain of drafts.

    Norms have weights of their own: with ones a state is the same before and behind the next norm.
    """
    path = tmp_path / variant
    edited(checkpoints[variant], path, weigh_norms)
    drafter, plain = Drafter(path), PlainMtp(path)
    with torch.no_grad():
        theirs = load_oracle(path).model(torch.tensor([PROMPT])).last_hidden_state[0]
    logits, hidden = drafter.forward(PROMPT)
    # What little the edges of the selections carry, where other rounding chooses otherwise.
    tolerance: dict[str, Any] = {"rtol": 1e-2, "atol": 5e-2}
    torch.testing.assert_close(hidden, theirs, **tolerance)
    assert len(PROMPT) > 4 * INDEX_TOPK
    tokens = [*PROMPT[1:], int(logits[-1].argmax())]
    guesses, states = drafter.draft(tokens, hidden)
    for _ in range(3):
        expected_guesses, expected_states = plain.run(torch.tensor(tokens), hidden)
        torch.testing.assert_close(guesses, expected_guesses[-len(guesses) :].float(), **tolerance)
        torch.testing.assert_close(states, expected_states[-len(states) :].float(), **tolerance)
        hidden = torch.cat((hidden, states[-1:]))
        tokens.append(int(guesses[-1].argmax()))
        guesses, states = drafter.draft(tokens[-1:], hidden[-1:], len(tokens) - 1)


@pytest.mark.I5
def test_chunks_write_the_bytes_of_one_pass(drafter: Drafter) -> None:
    _, hidden = drafter.forward(PROMPT)
    tokens = [*PROMPT[1:], 65]
    whole = drafter.draft(tokens, hidden)
    pools = drafter.device_pool.clone(), drafter.index_pool.clone()
    drafter.device_pool[-1], drafter.index_pool[-1] = 0, 0
    parts = [drafter.draft(tokens[i : i + 70], hidden[i : i + 70], i) for i in range(0, len(tokens), 70)]
    for in_chunks, at_once in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(in_chunks), at_once)
    slots = drafter.kv_of(0, len(tokens)).rows.slots
    for pool, expected in zip((drafter.device_pool, drafter.index_pool), pools, strict=True):
        assert torch.equal(pool[-1, slots], expected[-1, slots])


def test_a_draft_writes_its_own_layer_alone(drafter: Drafter) -> None:
    _, hidden = drafter.forward(PROMPT[:2])
    before = drafter.device_pool.clone(), drafter.index_pool.clone()
    drafter.draft([66, 67], hidden)
    for pool, old in zip((drafter.device_pool, drafter.index_pool), before, strict=True):
        changed = (pool != old).any(dim=2).nonzero().tolist()
        slots = drafter.kv_of(0, 2).rows.slots.tolist()
        assert changed == sorted([len(pool) - 1, slot] for slot in slots)


def test_the_hint_has_the_draft_layers_selection_last(drafter: Drafter) -> None:
    kv = drafter.kv_of(0, len(PROMPT))
    inputs = (torch.tensor(PROMPT), kv.positions, kv, kv.last_rows)
    _, hidden = drafter.model.forward_with_hidden(*inputs)
    (hint,) = kv.hints
    assert hint.shape == (drafter.spec.num_index_layers + 1, INDEX_TOPK)
    assert (hint[-1] == -1).all()
    of_model = hint[:-1].clone()
    drafter.model.draft(torch.tensor([*PROMPT[1:], 65]), hidden, kv.positions, kv, kv.last_rows)
    assert hint[-1].min() >= 0
    assert torch.equal(hint[:-1], of_model)


@pytest.mark.I5
def test_the_model_computes_the_same_bits_beside_a_draft_layer(
    variant: str, checkpoints: dict[str, Path], drafter: Drafter
) -> None:
    alone = Drafter(checkpoints[variant], num_draft_layers=0)
    kv = alone.kv_of(0, len(PROMPT))
    rows = torch.arange(len(PROMPT))
    expected = alone.model.forward(torch.tensor(PROMPT), kv.positions, kv, rows)
    logits, _ = drafter.forward(PROMPT)
    assert torch.equal(logits, expected)
    written = drafter.device_pool[: LAYERS[variant], drafter.kv_of(0, len(PROMPT)).rows.slots]
    assert torch.equal(written, alone.device_pool[:, kv.rows.slots])
    with pytest.raises(ValueError, match="num_draft_layers of its model is 0"):
        alone.model.draft(torch.tensor(PROMPT), logits, kv.positions, kv, rows)


def test_main_weights_are_those_of_the_checkpoint_without(
    tiny_checkpoint: Callable[[str], Path], variant: str, checkpoints: dict[str, Path]
) -> None:
    from safetensors.torch import load_file

    without = load_file(tiny_checkpoint(variant) / "model.safetensors")
    having = load_file(checkpoints[variant] / "model.safetensors")
    assert all(torch.equal(having[name], tensor) for name, tensor in without.items())
    assert all(name.startswith(f"model.layers.{LAYERS[variant]}.") for name in having.keys() - without.keys())


def test_spec_of_a_node_with_a_draft_layer_and_without(checkpoints: dict[str, Path]) -> None:
    glm, alone = load_spec(checkpoints["glm"]), load_spec(checkpoints["glm"], num_draft_layers=0)
    assert load_spec(checkpoints["glm"], num_draft_layers=1) == glm
    assert (glm.num_layers, glm.num_draft_layers, glm.num_kv_layers) == (4, 1, 5)
    assert (glm.num_index_layers, glm.num_index_groups) == (2, 3)
    assert glm.index_group_of_layer == (0, 0, 1, 1, 2)
    assert glm.layers_of_group == ((0, 1), (2, 3), (4,))
    assert (alone.num_kv_layers, alone.num_index_groups) == (4, 2)
    assert alone.fingerprint == glm.fingerprint
    ours, theirs = glm.geometry(64), alone.geometry(64)
    assert (ours.num_draft_layers, ours.num_kv_layers, ours.num_index_groups) == (1, 5, 3)
    assert (theirs.num_layers, theirs.num_index_layers, theirs.num_draft_layers) == (4, 2, 0)


def test_a_layer_shares_its_first_drafts_selection_where_the_configuration_says_so(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoints["glm"], tmp_path / "shared")
    edit_config(tmp_path / "shared", index_share_for_mtp_iteration=True)
    assert load_spec(tmp_path / "shared").shares_draft_selection
    assert not load_spec(checkpoints["glm"]).shares_draft_selection


def test_a_checkpoint_without_the_layer_drafts_nothing(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    assert load_spec(tiny_checkpoint("v32")).num_draft_layers == 0
    with pytest.raises(CheckpointError, match=r"no MTP layer .*num_nextn_predict_layers is 0.*num-steps 0"):
        load_spec(tiny_checkpoint("v32"), num_draft_layers=1)
    shutil.copytree(tiny_checkpoint("v32"), tmp_path / "declared")
    edit_config(tmp_path / "declared", num_nextn_predict_layers=1)
    assert load_spec(tmp_path / "declared").num_draft_layers == 0
    with pytest.raises(CheckpointError, match=r"there is no model\.layers\.3\.eh_proj\.weight"):
        load_spec(tmp_path / "declared", num_draft_layers=1)
    with pytest.raises(CheckpointError, match="num_draft_layers is 2; expected 0 or 1"):
        load_spec(tiny_checkpoint("v32"), num_draft_layers=2)


def test_of_several_layers_the_first_is_used(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    def add_second(tensors: dict[str, Tensor]) -> None:
        more = {n.replace(FIRST, f"model.layers.{NUM_LAYERS + 1}."): t * 2 for n, t in tensors.items()}
        tensors |= {name: tensor for name, tensor in more.items() if name not in tensors}

    edited(checkpoints["v32"], tmp_path / "two", add_second)
    edit_config(tmp_path / "two", num_nextn_predict_layers=2)
    assert load_spec(tmp_path / "two").num_kv_layers == NUM_LAYERS + 1
    assert_same_drafts(Drafter(tmp_path / "two"), Drafter(checkpoints["v32"]))


def test_embedding_and_head_are_the_models_unless_they_differ(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Published checkpoints repeat them, which would take gigabytes of a GPU again."""

    def repeat(tensors: dict[str, Tensor]) -> None:
        tensors[f"{FIRST}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{FIRST}shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    def change(tensors: dict[str, Tensor]) -> None:
        repeat(tensors)
        tensors[f"{FIRST}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
        tensors[f"{FIRST}shared_head.head.weight"][-1, -1] += 1

    edited(checkpoints["v32"], tmp_path / "repeated", repeat)
    edited(checkpoints["v32"], tmp_path / "other", change)
    shared, repeated, other = (
        Drafter(path) for path in (checkpoints["v32"], tmp_path / "repeated", tmp_path / "other")
    )
    assert_same_drafts(repeated, shared)
    layer = repeated.model.draft_layer
    assert layer is not None
    assert (layer.embed, layer.lm_head) == (repeated.model.embed, repeated.model.lm_head)
    _, hidden = shared.forward(PROMPT)
    theirs, _ = other.draft([VOCAB_SIZE - 1 - token for token in PROMPT], hidden)
    ours, _ = shared.draft(PROMPT, hidden)
    assert torch.equal(theirs[:, :-1], ours[:, :-1])
    assert not torch.equal(theirs[:, -1], ours[:, -1])


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_layer_is_loaded_as_any_other(tmp_path: Path, variant: str, num_ranks: int) -> None:
    """transformers is told of one more layer and loads the same weights, in fp8 and with experts spread,
    too."""
    from transformers import AutoModelForCausalLM

    in_fp8, in_float32 = write_fp8_checkpoint(tmp_path, variant, draft_gain=1.0)
    types = {"indexer_types": [*GLM_INDEXERS, "full"]} if variant == "glm" else {}
    edit_config(in_float32, num_hidden_layers=LAYERS[variant] + 1, num_nextn_predict_layers=0, **types)
    theirs = AutoModelForCausalLM.from_pretrained(in_float32, dtype=torch.float32).model.layers[-1]
    spec = load_spec(in_fp8)
    ours = [model.model.layers[LAYERS[variant]] for model in load_ours(in_fp8, spec, num_ranks)]
    wanted = {n: t for n, t in theirs.state_dict().items() if not n.startswith("mlp.experts.")}
    for of_rank in ours:
        found = of_rank.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert set(found) - set(wanted) == {
            f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        }
    whole = joined([of_rank.mlp.experts for of_rank in ours])
    down = torch.cat([whole.down.of(expert, torch.float32) for expert in whole.experts])
    assert torch.equal(down, theirs.mlp.experts.down_proj)


class ThreadRank(RankGroup):
    """A rank whose others are threads; ``shared``: what each gives to the others, between two barriers."""

    def __init__(self, rank: int, shared: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.step_tokens = rank, len(shared), 0
        self._shared, self._barrier = shared, barrier

    def gather(self, x: Tensor) -> Tensor:
        return self._exchanged(x, torch.cat)

    def sum_own(self, x: Tensor) -> Tensor:
        return self._exchanged(x, lambda parts: torch.stack(parts).sum(0)).chunk(self.size)[self.rank]

    def _exchanged(self, x: Tensor, joined: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self._shared[self.rank] = x
        self._barrier.wait()
        result = joined(self._shared)
        self._barrier.wait()
        return result


@pytest.mark.I5
def test_ranks_draft_what_one_drafts_to_the_last_bit(drafter: Drafter, variant: str, tmp_path: Path) -> None:
    """The other rank has half of the experts of each layer, and no row of its own."""
    write_checkpoint(tmp_path, variant, draft_gain=1.0)
    shared, barrier = [torch.empty(0)] * 2, threading.Barrier(2, timeout=60)
    ranks = [ThreadRank(rank, shared, barrier) for rank in range(2)]
    spread = [Drafter(tmp_path, ranks=rank) for rank in ranks]
    for rank in ranks:
        rank.step_tokens = len(PROMPT)

    def take_part() -> None:
        spread[1].model.join_forward()
        spread[1].model.join_draft()

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(take_part)
        logits, hidden = spread[0].forward(PROMPT)
        drafts = spread[0].draft([*PROMPT[1:], 65], hidden)
        other.result()
    expected_logits, expected_hidden = drafter.forward(PROMPT)
    assert torch.equal(logits, expected_logits)
    for found, expected in zip(drafts, drafter.draft([*PROMPT[1:], 65], expected_hidden), strict=True):
        assert torch.equal(found, expected)


def assert_same_drafts(one: Drafter, other: Drafter) -> None:
    (_, hidden), (_, same) = one.forward(PROMPT), other.forward(PROMPT)
    assert torch.equal(hidden, same)
    for found, expected in zip(one.draft(PROMPT, hidden), other.draft(PROMPT, hidden), strict=True):
        assert torch.equal(found, expected)


def edited(path: Path, copy: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """A checkpoint with other weights."""
    shutil.copytree(path, copy)
    edit_weights(copy, edit)


def weigh_norms(tensors: dict[str, Tensor]) -> None:
    """Draw the weights of the norms of the model's ends and of the MTP layer, which is the last layer."""
    generator = torch.Generator().manual_seed(1)
    last = f"model.layers.{sum(name.endswith('.input_layernorm.weight') for name in tensors) - 1}."
    for name in sorted(tensors):
        if name == "model.norm.weight" or (name.startswith(last) and name.endswith("norm.weight")):
            tensors[name] = 0.5 + torch.rand(tensors[name].shape, generator=generator)
