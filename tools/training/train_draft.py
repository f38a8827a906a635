"""Train an MTP layer for a trained retrieval model, whose own weights stay as they are.

    python -m tools.training.train_draft --out DIR --device cuda --minutes 5

``DIR/checkpoint`` is the model with the layer in a file of its own, ``DIR/log.jsonl`` the run's record.

The layer starts as a copy of the model's last. Each step, the frozen model runs over a batch of its task, and
the layer makes ``PASSES`` drafts in a row behind every position, from its own results as a decode node does
it. In the first part of the time it attends to all positions, then to its indexer's selection; the indexer
learns from the layer's attention as those of the model did.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from tools.training.accept import accept_lengths
from tools.training.checkpoint import load_hf_weights, write_with_draft
from tools.training.draft import DraftLayer, chain
from tools.training.evaluate import LENGTHS
from tools.training.indexing import Selection
from tools.training.network import Network
from tools.training.optimizer import Muon
from tools.training.schedule import WIDTHS, num_questions
from tools.training.shape import NetworkShape
from tools.training.task import Batch, Shape, TaskGenerator
from tools.training.train import INDEX_ROWS, MOST_REPEATING_WIDTH, SMALL, TEXT_WEIGHT, some_rows

MUON_RATE = 0.006
ADAM_RATE = 1e-3
INDEX_RATE = 1e-3
BALANCE_RATE = 1e-3
PASSES = 3
PASS_WEIGHTS = (1.0, 0.8, 0.6)
DENSE_SHARE = 0.5
"""Of the time, in which the layer attends to all positions."""
SHORT_SHARE = 0.2
"""Of the time, in which sequences have ``SHORT_WIDTHS``: to look things up is learned where most is asked."""
SHORT_WIDTHS = WIDTHS[1:3]
RAMP_STEPS = 50
LOG_STEPS = 10
PRINT_SECS = 10.0
EVAL_PROMPTS = 8
"""Of each length: one takes a core 2 to 15 seconds."""


class DraftTrainer:
    """One run over one checkpoint."""

    def __init__(
        self, checkpoint: Path, device: str, shape: NetworkShape, seed: int, tokens_per_batch: int
    ) -> None:
        torch.manual_seed(seed)
        self._device = torch.device(device)
        self._seed = seed
        self._tokens_per_batch = tokens_per_batch
        self.network = Network(shape)
        load_hf_weights(self.network, load_file(checkpoint / "model.safetensors"))
        self.draft = DraftLayer(shape)
        self.draft.start_from(self.network)
        self.network.to(self._device).eval().requires_grad_(False)
        self.draft.to(self._device).train()
        self._tasks = TaskGenerator(self._device, seed)
        self._optimizers = _optimizers(self.draft)
        self._base_rates = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]
        self._step = 0

    def step(self, width: int, part: float) -> dict[str, Any]:
        """One step over sequences of ``width``; ``part``: of the run's time that is over, in [0, 1].

        Returns what is worth a line in the log: of each pass the loss over the answers, and the share of
        answer tokens that it guesses.
        """
        rows = max(1, self._tokens_per_batch // width)
        # Other documents than those that the model was trained on, of the same kind.
        self._tasks.seed((self._seed + 500) * 1_000_003 + self._step)
        shape = Shape(rows, width, num_questions(width), jumps=True, repeats=width <= MOST_REPEATING_WIDTH)
        batch = self._tasks.batch(shape)
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._device.type == "cuda"):
            with torch.no_grad():
                hidden, _ = self.network.hidden(batch.tokens, batch.positions, Selection.INDEXER)
            selection = Selection.ALL if part < DENSE_SHARE else Selection.INDEXER
            run = self.network.start(batch.positions, selection, some_rows(batch, INDEX_ROWS))
            states = chain(self.network, self.draft, run, batch.targets, hidden, PASSES)
            logits = [self.network.lm_head(state) for state in states]
        losses, shares = zip(*(_loss(each, batch, number) for number, each in enumerate(logits)), strict=True)
        weighted = torch.stack(losses) * torch.tensor(PASS_WEIGHTS, device=self._device)
        (weighted.sum() + run.index_losses[0]).backward()  # type: ignore[no-untyped-call]
        self._update(min(1.0, (self._step + 1) / RAMP_STEPS, 1.25 * (1.0 - part)))
        self._step += 1
        return {
            "step": self._step,
            "width": width,
            "losses": losses,
            "right": shares,
            "index_loss": run.index_losses[0],
            "coverage": run.coverages[0],
        }

    def _update(self, factor: float) -> None:
        for optimizer, rate in zip(self._optimizers, self._base_rates, strict=True):
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.draft.balance_experts(BALANCE_RATE * factor)


def _optimizers(draft: DraftLayer) -> list[torch.optim.Optimizer]:
    """Of the matrices, the indexer, and the rest."""
    parameters: dict[str, list[nn.Parameter]] = {"index": [], "matrix": [], "other": []}
    for name, parameter in draft.named_parameters():
        is_matrix = parameter.dim() >= 2 and ".gate.weight" not in name
        kind = "index" if ".indexer." in name else "matrix" if is_matrix else "other"
        parameters[kind].append(parameter)
    return [
        Muon(parameters["matrix"], MUON_RATE),
        torch.optim.AdamW(parameters["index"], INDEX_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        torch.optim.AdamW(parameters["other"], ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _loss(logits: Tensor, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    """Of a pass: the loss, and the share of answer tokens that are guessed right.

    Row i guesses the target of row i + 1. The first rows of a later pass are no chains.
    """
    logits, targets = logits[:, number:-1].float(), batch.targets[:, number + 1 :]
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    is_answer, is_text = (mask[:, number + 1 :] for mask in (batch.is_answer, batch.is_text))
    is_other = (is_text & ~is_answer).float()
    loss = (each * is_answer).sum() / is_answer.sum()
    loss = loss + TEXT_WEIGHT * (each * is_other).sum() / is_other.sum()
    is_right = (logits.detach().argmax(-1) == targets) & is_answer
    return loss, is_right.sum() / is_answer.sum()


def _values(entry: dict[str, Any]) -> dict[str, Any]:
    """``entry`` with numbers for tensors: waits for the device."""
    values: dict[str, Any] = {}
    for name, value in entry.items():
        match value:
            case Tensor():
                values[name] = round(float(value), 4)
            case tuple():
                values[name] = [round(float(part), 4) for part in value]
            case _:
                values[name] = value
    return values


def train(
    trainer: DraftTrainer,
    checkpoint: Path,
    out_dir: Path,
    *,
    secs: float,
    max_width: int,
    seed: int,
    eval_prompts: int,
) -> None:
    """Train for ``secs``, write the checkpoint, and say how many tokens a step its drafts give."""
    console = Console()
    pick = random.Random(seed)
    spent, last_printed = 0.0, 0.0
    with (out_dir / "log.jsonl").open("a") as log:
        write_with_draft(checkpoint, trainer.draft, out_dir / "checkpoint")  # what cannot be, fails now
        while spent < secs:
            started = time.monotonic()
            part = spent / secs
            widths = SHORT_WIDTHS if part < SHORT_SHARE else WIDTHS[1:]
            width = pick.choice([width for width in widths if width <= max_width] or [max_width])
            entry = trainer.step(width, part)
            if entry["step"] % LOG_STEPS == 0:
                values = {**_values(entry), "secs": round(spent, 1)}
                log.write(json.dumps(values) + "\n")
                if spent - last_printed > PRINT_SECS:
                    console.print(json.dumps(values), soft_wrap=True, highlight=False)
                    last_printed = spent
            spent += time.monotonic() - started
        write_with_draft(checkpoint, trainer.draft, out_dir / "checkpoint")
        for length in (length for length in LENGTHS if length <= max_width):
            found = accept_lengths(out_dir / "checkpoint", length, eval_prompts)
            values = {"length": length, "tokens_a_step": [round(value, 3) for value in found]}
            log.write(json.dumps(values) + "\n")
            console.print(json.dumps(values), soft_wrap=True, highlight=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.training.train_draft", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("tools/checkpoints/retrieval"), help="to train for"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the run, made when missing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training; evaluation comes on top")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-width", type=int, default=8192, help="tokens of the longest sequences")
    parser.add_argument("--tokens-per-batch", type=int, default=32768)
    parser.add_argument("--eval-prompts", type=int, default=EVAL_PROMPTS, help="of each length in the end")
    parser.add_argument(
        "--small", action="store_true", help="for a miniature, of tools.training.train --small"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.device.startswith("cuda"):
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cuda.enable_cudnn_sdp(False)  # of the kernels that take a mask, the least proven
    trainer = DraftTrainer(
        arguments.checkpoint,
        arguments.device,
        SMALL if arguments.small else NetworkShape(),
        arguments.seed,
        arguments.tokens_per_batch,
    )
    train(
        trainer,
        arguments.checkpoint,
        arguments.out,
        secs=arguments.minutes * 60,
        max_width=arguments.max_width,
        seed=arguments.seed,
        eval_prompts=arguments.eval_prompts,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
