"""The retrieval model's task, network, schedule and files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.unit.training.networks import SMALL, small_network
from tools.training import vocabulary
from tools.training.checkpoint import hf_weights, load_hf_weights, load_state, save_state, write_checkpoint
from tools.training.evaluate import held_out, score
from tools.training.indexing import Selection
from tools.training.network import Network
from tools.training.optimizer import Muon, orthogonal
from tools.training.schedule import SHARES, WIDTHS, Schedule, Stage
from tools.training.task import Batch, Shape, TaskGenerator


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

    def test_a_narrow_sequence_is_dense(self) -> None:
        network = small_network().eval()
        tokens = torch.arange(SMALL.index_topk)[None]
        with torch.no_grad():
            assert torch.equal(
                network(tokens, tokens, Selection.INDEXER)[0].argmax(-1),
                network(tokens, tokens, Selection.ALL)[0].argmax(-1),
            )

    @pytest.mark.parametrize("selection", list(Selection))
    def test_the_indexer_loss_trains_the_indexer_alone(self, selection: Selection) -> None:
        network = small_network()
        batch = TaskGenerator("cpu", 4).batch(Shape(2, 128, 4))
        rows = torch.randint(100, (2, 16))
        _, run = network(batch.tokens, batch.positions, selection, rows)
        torch.stack(run.index_losses).sum().backward()
        index = {id(parameter) for parameter in network.index_parameters()}
        for parameter in network.parameters():
            assert (parameter.grad is not None) == (id(parameter) in index)
        assert all(0 <= float(share) <= 1.001 for share in run.coverages)

    def test_the_indexer_learns_to_follow_attention(self) -> None:
        network = small_network()
        optimizer = torch.optim.AdamW(network.index_parameters(), lr=5e-3)
        batch = TaskGenerator("cpu", 4).batch(Shape(4, 160, 4))
        rows = torch.randint(150, (4, 64))
        losses = []
        for _ in range(30):
            _, run = network(batch.tokens, batch.positions, Selection.ALL, rows)
            loss = torch.stack(run.index_losses).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.5 * losses[0]

    def test_experts_are_balanced_against_their_load(self) -> None:
        network = small_network()
        batch = TaskGenerator("cpu", 4).batch(Shape(2, 128, 4))
        network(batch.tokens, batch.positions)
        moe = network.blocks[1].mlp
        busiest, idlest = moe.load.argmax(), moe.load.argmin()
        network.balance_experts(0.01)
        assert moe.gate.e_score_correction_bias[busiest] < 0 < moe.gate.e_score_correction_bias[idlest]
        assert not moe.load.any()


class TestOptimizer:
    @pytest.mark.parametrize("shape", [(8, 24), (24, 8), (3, 16, 8)])
    def test_updates_are_about_orthogonal(self, shape: tuple[int, ...]) -> None:
        singular = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert singular.min() > 0.3
        assert singular.max() < 1.4

    def test_parameters_without_gradient_stay(self) -> None:
        weight, other = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
        weight.grad = torch.randn(4, 4)
        Muon([weight, other], lr=0.1).step()
        assert torch.equal(other, torch.ones(4, 4))
        assert not torch.equal(weight, torch.ones(4, 4))


class TestSchedule:
    def test_stages_follow_the_clock(self) -> None:
        schedule = Schedule(total_secs=100.0, seed=1)
        stages = []
        while not schedule.is_done:
            stages.append(schedule.stage)
            schedule.advance(1.0)
        assert [stages.count(stage) for stage in Stage] == [round(100 * SHARES[stage]) for stage in Stage]
        assert schedule.main_rate() == 0.0

    def test_every_width_is_reached_without_success(self) -> None:
        schedule = Schedule(total_secs=100.0, seed=1)
        while schedule.stage is Stage.DENSE:
            schedule.advance(0.1)
        assert schedule.level == len(WIDTHS) - 1

    def test_success_brings_the_next_width(self) -> None:
        schedule = Schedule(total_secs=1e6, seed=1)
        schedule.record(WIDTHS[0], 0.99)
        schedule.advance(1.0)
        schedule.advance(1.0)
        assert schedule.level == 1
        assert {schedule.width() for schedule.step in range(200)} == set(WIDTHS[:2])

    def test_progress_resumes(self) -> None:
        schedule = Schedule(total_secs=100.0, seed=1)
        schedule.record(WIDTHS[0], 0.5)
        schedule.advance(60.0)
        other = Schedule(total_secs=100.0, seed=1)
        other.resume(schedule.progress())
        assert other == schedule


class TestFiles:
    def test_weights_survive_the_checkpoint(self) -> None:
        network, other = small_network(0), small_network(1)
        load_hf_weights(other, hf_weights(network))
        for name, value in network.state_dict().items():
            expected = value if name.endswith("correction_bias") else value.bfloat16().float()
            assert torch.equal(other.state_dict()[name], expected)

    def test_a_run_goes_on_from_its_state(self, tmp_path: Path) -> None:
        network, other = small_network(0), small_network(1)
        batch = TaskGenerator("cpu", 4).batch(Shape(2, 128, 4))
        optimizers = {
            "muon": Muon([network.blocks[0].mlp.up_proj.weight], lr=0.01),
            "adam": torch.optim.AdamW([network.lm_head.weight], lr=0.01),
        }
        network(batch.tokens, batch.positions)[0].logsumexp(-1).mean().backward()
        for optimizer in optimizers.values():
            optimizer.step()
        for step in (1, 2):
            save_state(tmp_path, network, optimizers, {"step": step, "more": "x"})
        restored = {
            "muon": Muon([other.blocks[0].mlp.up_proj.weight], lr=0.01),
            "adam": torch.optim.AdamW([other.lm_head.weight], lr=0.01),
        }
        assert load_state(tmp_path, other, restored) == {"step": 2, "more": "x"}
        assert len(list(tmp_path.glob("state-*"))) == 2
        for one, two in zip(network.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(one, two)
        momentum = next(iter(restored["muon"].state.values()))["momentum"]
        saved = next(iter(optimizers["muon"].state.values()))["momentum"]
        torch.testing.assert_close(momentum, saved, rtol=1e-2, atol=1e-6)
        changed = dataclasses.replace(SMALL, index_topk=16)
        with pytest.raises(ValueError, match="another network shape"):
            load_state(tmp_path, Network(changed), restored)
        assert load_state(tmp_path / "none", other, restored) is None


def test_a_network_that_knows_the_answers_scores_full_marks() -> None:
    batch = held_out(512, 4)

    class Oracle(Network):
        def forward(self, tokens, positions, selection=Selection.ALL, rows=None):  # type: ignore[no-untyped-def]
            rows = [int((batch.tokens == row).all(1).nonzero()[0, 0]) for row in tokens]
            return torch.nn.functional.one_hot(batch.targets[rows], vocabulary.VOCAB_SIZE).float() * 5, None

    found = score(Oracle(SMALL), batch, 512, Selection.ALL, rows_at_once=3)
    assert found.num_right == found.num_answers == int(batch.num_questions.sum())
    assert found.num_perfect == found.num_prompts == 4
    assert sum(total for _, total in found.right_by_depth) == found.num_answers
    assert found.min_margin == 5.0
    assert batch.prompt_tokens.max() <= 512
