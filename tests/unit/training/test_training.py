"""The retrieval model's task, network, schedule and files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.training.networks import SMALL, small_network
from tools.training import run as run_module
from tools.training import vocabulary
from tools.training.checkpoint import load_hf_weights, write_checkpoint
from tools.training.evaluate import held_out, score
from tools.training.indexing import Selection
from tools.training.network import Network
from tools.training.run import Run
from tools.training.schedule import Schedule
from tools.training.task import Batch, Shape, TaskGenerator
from tools.training.train import Trainer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    from transformers import PreTrainedTokenizerFast

    out_dir = tmp_path_factory.mktemp("tokenizer")
    vocabulary.write_tokenizer(out_dir, 8192)
    return PreTrainedTokenizerFast.from_pretrained(out_dir)


def real_tokens(batch: Batch, row: int) -> list[int]:
    tokens = batch.tokens[row]
    return tokens[tokens != vocabulary.PAD_ID].tolist()


class TestTokenizer:
    @pytest.mark.parametrize(
        "text", ["The badge of amber falcon is 58213.", "héllo\n\n  w0rld 1234567 ☃", ""]
    )
    def test_any_text_round_trips(self, tokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text

    def test_words_and_pairs_of_digits_are_single_tokens(self, tokenizer) -> None:
        ids = tokenizer.encode(" amber falcon is 58213.", add_special_tokens=False)
        assert [tokenizer.decode([i]) for i in ids] == [" amber", " falcon", " is 58", "21", "3", "."]

    def test_the_chat_template_gives_what_is_trained(self, tokenizer) -> None:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Notes: it was so.\nQuestion: amber falcon?"}],
            tokenize=False,
            add_generation_prompt=True,
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids[:2] == [vocabulary.BOS_ID, vocabulary.USER_ID]
        assert ids[-1] == vocabulary.ASSISTANT_ID
        assert len(tokenizer) == vocabulary.VOCAB_SIZE


class TestTask:
    @pytest.mark.parametrize("shape", [Shape(16, 128, 5), Shape(4, 1024, 24, repeats=True), Shape(4, 600, 8)])
    def test_text_of_a_batch_encodes_to_its_tokens(self, tokenizer, shape: Shape) -> None:
        batch = TaskGenerator("cpu", 1).batch(shape)
        for row in range(shape.batch):
            ids = real_tokens(batch, row)
            assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids

    @pytest.mark.parametrize("held_out", [False, True])
    def test_answers_are_what_the_document_says(self, tokenizer, held_out: bool) -> None:
        batch = TaskGenerator("cpu", 2).batch(Shape(16, 512, 8, repeats=not held_out, held_out=held_out))
        for row in range(16):
            document, _, rest = tokenizer.decode(real_tokens(batch, row)).partition("\nQuestion:")
            questions, _, answers = rest.partition("Answer:")
            assert answers.endswith("<eos>") or len(real_tokens(batch, row)) == 512
            told = [answer.strip() for answer in answers.removesuffix("<eos>").split(".")[:-1]]
            asked = questions.split("?")[0].split(",")
            keys, numbers = zip(*(answer.split(" is ") for answer in told), strict=True)
            assert list(keys) == [key.strip() for key in asked]
            assert len(told) == batch.num_questions[row]
            for question, (key, number) in enumerate(zip(keys, numbers, strict=True)):
                assert f" of {key} is {number}." in document
                at = int(batch.fact_at[row, question])
                assert f" is {number}".startswith(tokenizer.decode(batch.tokens[row, at : at + 2]))

    def test_a_prompt_ends_before_its_answers(self, tokenizer) -> None:
        batch = TaskGenerator("cpu", 3).batch(Shape(4, 400, 4, held_out=True))
        for row, length in enumerate(batch.prompt_tokens.tolist()):
            assert batch.tokens[row, length - 1] == vocabulary.ASSISTANT_ID
            targets = batch.targets[row][batch.is_answer[row]]
            assert tokenizer.decode(targets).startswith("Answer:")

    def test_equal_seeds_give_equal_batches(self) -> None:
        shape = Shape(4, 256, 8, jumps=True, repeats=True)
        first, second = TaskGenerator("cpu", 5), TaskGenerator("cpu", 6)
        second.seed(5)
        for one, other in zip(
            vars(first.batch(shape)).values(), vars(second.batch(shape)).values(), strict=True
        ):
            assert torch.equal(one, other)

    def test_training_leaves_out_the_held_out_pairs(self) -> None:
        tasks = TaskGenerator("cpu", 7)
        assert not tasks._is_held_out[tasks._keys(64, 200, held_out=False)].any()
        assert tasks._is_held_out[tasks._keys(64, 200, held_out=True)].any()

    def test_jumps_grow_and_stay_in_the_context(self) -> None:
        batch = TaskGenerator("cpu", 8).batch(Shape(64, 256, 8, jumps=True))
        steps = batch.positions.diff(dim=1)
        assert (steps >= 1).all()
        assert (steps > 1).any()
        assert batch.positions.max() < 8192


class TestNetwork:
    def test_logits_with_selection_are_those_of_transformers(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        network = small_network().eval()
        for layer in network.blocks[1:]:
            layer.mlp.gate.e_score_correction_bias.normal_(0, 0.1)
        write_checkpoint(network, tmp_path)
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, attn_implementation="eager"
        )
        network.lm_head.weight.data = theirs.lm_head.weight.data
        batch = TaskGenerator("cpu", 3).batch(Shape(2, 200, 4, held_out=True))
        with torch.no_grad():
            expected = theirs.eval()(input_ids=batch.tokens).logits
            got, _ = network(batch.tokens, batch.positions, Selection.INDEXER)
            dense, _ = network(batch.tokens, batch.positions)
        # In a network without training some scores at the edge of the selection are equal to the last bit.
        wrong_rows = ((got - expected).abs().amax(-1) > 1e-3).float().mean()
        assert wrong_rows < 0.02
        assert (dense - expected).abs().amax(-1).max() > 0.1


def test_a_run_goes_through_its_stages_and_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 5.0)
    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    run = Run(tmp_path, "cpu", seed=1, tokens_per_batch=256)
    trainer = Trainer(run, SMALL, Schedule(total_secs=60.0, seed=1, max_width=256), eval_prompts=1)
    trainer.train()
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    evaluated = [entry["evaluated_after"] for entry in entries if "evaluated_after" in entry]
    assert evaluated == ["dense", "warmup", "warmup", "sparse", "sparse"]
    other = Network(SMALL)
    load_hf_weights(other, load_file(tmp_path / "checkpoint" / "model.safetensors"))
    for name, value in trainer.network.state_dict().items():
        expected = value if name.endswith("correction_bias") else value.bfloat16().float()
        assert torch.equal(other.state_dict()[name], expected)


def test_a_network_that_knows_the_answers_scores_full_marks() -> None:
    batch = held_out(512, 4)

    class Oracle(Network):
        def forward(self, tokens, positions, selection=Selection.ALL, rows=None):  # type: ignore[no-untyped-def]
            rows = [int((batch.tokens == row).all(1).nonzero()[0, 0]) for row in tokens]
            return torch.nn.functional.one_hot(batch.targets[rows], vocabulary.VOCAB_SIZE).float() * 5, None

    found = score(Oracle(SMALL), batch, 512, Selection.ALL, rows_at_once=3)
    assert found.num_right == found.num_answers == int(batch.num_questions.sum())
    assert found.num_perfect == found.num_prompts == 4
    assert batch.prompt_tokens.max() <= 512
