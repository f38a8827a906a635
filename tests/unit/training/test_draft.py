"""The MTP layer of the retrieval model: its training form is what is served, and the model stays as it is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.spec import load_spec
from tests.unit.model.paged_model import PagedModel
from tests.unit.training.networks import SMALL, small_network
from tools.training.checkpoint import DRAFT_FILE, write_checkpoint, write_with_draft
from tools.training.draft import DraftLayer, chain
from tools.training.indexing import Selection
from tools.training.network import Network
from tools.training.run import Run
from tools.training.task import Shape, TaskGenerator
from tools.training.train_draft import DraftTrainer

WIDTH = 96


@pytest.fixture(scope="module")
def network() -> Network:
    return small_network().eval()


@pytest.fixture(scope="module")
def draft(network: Network) -> DraftLayer:
    torch.manual_seed(2)
    draft = DraftLayer(SMALL).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            parameter.copy_(parameter.bfloat16().float())
    return draft


@pytest.fixture(scope="module")
def checkpoint(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("network")
    write_checkpoint(network, directory)
    return directory


@torch.no_grad()
def test_a_chain_in_training_is_what_is_served(network: Network, draft: DraftLayer, tmp_path: Path) -> None:
    """Three drafts behind some positions. All is selected: scores of what has not learned are often equal."""
    wide = Network(dataclasses.replace(SMALL, index_topk=2 * WIDTH)).eval()
    wide.load_state_dict(network.state_dict())
    network = wide
    write_checkpoint(network, tmp_path)
    write_with_draft(tmp_path, draft, tmp_path)
    spec = load_spec(tmp_path)
    model = load_model(tmp_path, spec)
    batch = TaskGenerator("cpu", 3).batch(Shape(1, WIDTH, 4, held_out=True))
    hidden, _ = network.hidden(batch.tokens, batch.positions)
    run = network.start(batch.positions, Selection.ALL, None)
    states = chain(network, draft, run, batch.targets, hidden, 3)

    tokens, next_tokens = batch.tokens[0].tolist(), batch.targets[0].tolist()
    paged = PagedModel(spec, model, num_pages=2, page_size=64)

    def kv(start: int, num_tokens: int) -> PagedKv:
        return paged.kv(PagedRequest(torch.arange(2), start, num_tokens))

    whole = kv(0, len(tokens))
    served = model.forward_with_hidden(torch.tensor(tokens), whole.positions, whole, whole.last_rows)[1]
    torch.testing.assert_close(served, hidden[0], rtol=1e-3, atol=1e-3)
    # From the last on: what a chain writes is behind all that those before it read.
    for start in range(len(tokens) - 3, 0, -31):
        first = kv(0, start + 1)
        ids = torch.tensor(next_tokens[: start + 1])
        _, state = model.draft(ids, served[: start + 1], first.positions, first, first.last_rows)
        torch.testing.assert_close(state[-1], states[0][0, start], rtol=1e-3, atol=1e-3)
        for number in range(1, 3):
            row = kv(start + number, 1)
            ids = torch.tensor(next_tokens[start + number : start + number + 1])
            _, state = model.draft(ids, state[-1:], row.positions, row, row.last_rows)
            expected = states[number][0, start + number]
            torch.testing.assert_close(state[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("selection", [Selection.ALL, Selection.INDEXER])
def test_a_chain_reads_true_rows_up_to_its_start(
    network: Network, draft: DraftLayer, selection: Selection
) -> None:
    """A later token than a chain's own changes nothing of it; an earlier one does."""
    batch = TaskGenerator("cpu", 3).batch(Shape(1, WIDTH, 4, held_out=True))
    hidden = torch.randn(1, batch.tokens.shape[1], SMALL.hidden)

    def states(hidden: torch.Tensor) -> list[torch.Tensor]:
        run = network.start(batch.positions, selection, None)
        return chain(network, draft, run, batch.targets, hidden, 3)

    changed = hidden.clone()
    changed[0, 50] += 1
    for number, (before, after) in enumerate(zip(states(hidden), states(changed), strict=True)):
        differs = (before != after).any(dim=-1)[0].nonzero().flatten()
        assert int(differs[0]) == 50 + number


@pytest.mark.slow
def test_training_changes_the_layer_alone(checkpoint: Path, tmp_path: Path) -> None:
    trainer = DraftTrainer(Run(tmp_path, "cpu", 1, 512), checkpoint, SMALL, 1.0, 128, seed=1)
    before = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    started = {name: value.detach().clone() for name, value in trainer.draft.named_parameters()}
    losses = [sum(map(float, trainer.step(0.3)["answer_loss"])) for _ in range(40)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert trainer.step(0.9)["coverage"] <= 1.001
    assert all(torch.equal(before[name], value) for name, value in trainer.network.state_dict().items())
    assert all(not torch.equal(started[name], value) for name, value in trainer.draft.named_parameters())


def test_a_run_leaves_a_checkpoint_that_drafts(checkpoint: Path, tmp_path: Path) -> None:
    DraftTrainer(Run(tmp_path, "cpu", 1, 256), checkpoint, SMALL, 0.01, 256, seed=1).train()
    model = load_model(tmp_path / "checkpoint", load_spec(tmp_path / "checkpoint", num_draft_layers=1))
    assert model.spec.num_kv_layers == SMALL.num_layers + 1
    first, *_ = (tmp_path / "log.jsonl").read_text().splitlines()
    assert len(json.loads(first)["answer_accuracy"]) == 3


def test_the_files_of_the_model_stay_as_they_are(draft: DraftLayer, checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    before = (checkpoint / "model.safetensors").read_bytes()
    for source in (checkpoint, tmp_path):  # the second time in place
        write_with_draft(source, draft, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == json.loads((checkpoint / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    weights = load_file(tmp_path / DRAFT_FILE)
    assert all(name.startswith(f"model.layers.{SMALL.num_layers}.") for name in weights)
    assert load_spec(tmp_path).num_draft_layers == 1
    assert load_spec(checkpoint).num_draft_layers == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(model.model.layers) == SMALL.num_layers
