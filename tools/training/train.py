"""Train the retrieval model.

    python -m tools.training.train --out DIR --device cuda --minutes 7

``DIR/checkpoint`` is what is served; ``DIR/log.jsonl`` and ``DIR/curves.png`` are the run's record; the state
files are for ``--resume``, which goes on where a stopped run was saved, at most a minute before it stopped.

Without a GPU: ``--device cpu --minutes 80 --tokens-per-batch 8192 --eval-prompts 12``, on two cores; or
``--small --max-width 256``, a miniature that one core trains in about half an hour.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn import functional as F

from tools.training.checkpoint import STATE_FILE, load_state, save_state, write_checkpoint
from tools.training.evaluate import LENGTHS, Score, held_out, score
from tools.training.indexing import Selection
from tools.training.network import Network
from tools.training.optimizer import Muon
from tools.training.plot import plot
from tools.training.schedule import Schedule, Stage, num_questions
from tools.training.shape import NetworkShape
from tools.training.task import Batch, Shape, TaskGenerator

SMALL = NetworkShape(
    hidden=128, num_heads=6, q_lora=64, kv_lora=64, dense_dim=192, expert_dim=32, index_topk=32
)
MUON_RATE = 0.008
ADAM_RATE = 3e-3
INDEX_RATE = 2e-3
TEXT_WEIGHT = 0.1
"""Of what is not determined, filler text above all, in the loss."""
INDEX_ROWS = 256
"""Queries of a sequence that the indexer learns from in a step."""
MOST_REPEATING_WIDTH = 512
"""Of batches in which facts are told again: to begin with, that gives more to look up than questions do."""
BALANCE_RATE = 1e-3
LOG_STEPS = 10
SAVE_SECS = 60.0
PRINT_SECS = 10.0
EVAL_PROMPTS = 100
"""Of each length at the end of a run; a third of that at the end of a stage."""


class Trainer:
    """One run: the network, its optimizers, and the files of the run."""

    def __init__(
        self,
        out_dir: Path,
        device: str,
        shape: NetworkShape,
        schedule: Schedule,
        eval_prompts: int = EVAL_PROMPTS,
    ) -> None:
        torch.manual_seed(schedule.seed)
        self._out_dir = out_dir
        self._eval_prompts = eval_prompts
        self._device = torch.device(device)
        self._schedule = schedule
        self._network = Network(shape).to(self._device).train()
        self._tasks = TaskGenerator(self._device, schedule.seed)
        self._main, self._index, self._optimizers = _optimizers(self._network)
        self._base_rates = {name: o.param_groups[0]["lr"] for name, o in self._optimizers.items()}
        self._console = Console()
        self._log_path = out_dir / "log.jsonl"

    def resume(self) -> None:
        saved = load_state(self._out_dir, self._network, self._optimizers)
        if saved is not None:
            self._schedule.resume(saved)
            self._console.print(f"resumed at step {self._schedule.step}, {self._schedule.secs:.0f} s")

    def run(self) -> list[Score]:
        """Train to the end of the schedule, evaluate, and write the checkpoint."""
        num_weights = sum(parameter.numel() for parameter in self._network.parameters())
        self._console.print(f"{num_weights:,} weights on {_device_name(self._device)}")
        self._log(
            {
                "device": _device_name(self._device),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "num_weights": num_weights,
                "shape": vars(self._network.shape),
                "total_secs": self._schedule.total_secs,
                "seed": self._schedule.seed,
                "max_width": self._schedule.max_width,
                "tokens_per_batch": self._schedule.tokens_per_batch,
                "starts_at_step": self._schedule.step,
            }
        )
        bar = Progress(
            TextColumn("{task.fields[note]}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        write_checkpoint(self._network, self._out_dir / "checkpoint")  # what cannot be written fails now
        with bar:
            task = bar.add_task("training", total=self._schedule.total_secs, note="")
            last_saved = last_printed = time.monotonic()
            while not self._schedule.is_done:
                stage = self._schedule.stage
                started = time.monotonic()
                note = self._step()
                is_stage_end = self._schedule.advance(time.monotonic() - started)
                now = time.monotonic()
                if is_stage_end or now - last_saved > SAVE_SECS:
                    self._save()
                    last_saved = now
                if is_stage_end and not self._schedule.is_done:
                    self.evaluate(max(1, self._eval_prompts // 3), after=stage)
                if note:
                    bar.update(task, completed=self._schedule.secs, note=note)
                    if not self._console.is_terminal and now - last_printed > PRINT_SECS:
                        self._console.print(note, soft_wrap=True)
                        last_printed = now
        scores = self.evaluate(self._eval_prompts, after=Stage.SPARSE)
        write_checkpoint(self._network, self._out_dir / "checkpoint")
        plot(self._log_path, self._out_dir / "curves.png")
        return scores

    def save(self) -> None:
        self._save()

    def evaluate(self, num_prompts: int, after: Stage) -> list[Score]:
        """Exact match on held-out prompts, weights (on a GPU activations too) in bfloat16, as served."""
        selections = [Selection.ALL] if after is Stage.DENSE else list(Selection)
        served = Network(self._network.shape).to(self._device)
        served.load_state_dict(self._network.state_dict())
        for parameter in served.parameters():
            parameter.data = parameter.data.bfloat16()
            if self._device.type == "cpu":  # which serves in float32
                parameter.data = parameter.data.float()
        scores = []
        for length in LENGTHS:
            if length > self._schedule.max_width:
                break
            batch = held_out(length, num_prompts, self._device)
            for selection in selections:
                rows = max(1, self._schedule.tokens_per_batch // length)
                found = score(served, batch, length, selection, rows)
                scores.append(found)
                self._console.print(f"after {after.value}: {found}", soft_wrap=True, highlight=False)
                self._log({"evaluated_after": after.value, **asdict(found), "selection": selection.value})
        return scores

    def _step(self) -> str:
        """One step of training; now and then a line that says how it goes."""
        schedule = self._schedule
        width = schedule.width()
        rows = max(1, schedule.tokens_per_batch // width)
        self._tasks.seed(schedule.seed * 1_000_003 + schedule.step)
        shape = Shape(rows, width, num_questions(width), jumps=True, repeats=width <= MOST_REPEATING_WIDTH)
        batch = self._tasks.batch(shape)
        trains_main = schedule.stage is not Stage.WARMUP
        for parameter in self._main:
            parameter.requires_grad_(trains_main)
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._device.type == "cuda"):
            logits, run = self._network(
                batch.tokens,
                batch.positions,
                Selection.INDEXER if schedule.stage is Stage.SPARSE else Selection.ALL,
                None if schedule.stage is Stage.DENSE else some_rows(batch, INDEX_ROWS),
            )
        losses = _losses(logits, batch)
        index_loss = torch.stack(run.index_losses).sum() if run.index_losses else torch.zeros(())
        loss = index_loss.to(self._device)
        if trains_main:
            loss = loss + losses["answer_loss"] + TEXT_WEIGHT * losses["text_loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        self._update(trains_main)
        if schedule.step % LOG_STEPS != 0:
            return ""
        values = {name: round(float(value.detach()), 5) for name, value in losses.items()}
        schedule.record(width, values["answer_accuracy"])
        self._log(
            {
                "step": schedule.step,
                "secs": round(schedule.secs, 2),
                "stage": schedule.stage.value,
                "width": width,
                **values,
                "index_losses": [round(float(value.detach()), 5) for value in run.index_losses],
                "coverages": [round(float(value), 5) for value in run.coverages],
            }
        )
        return _note(schedule, width, values, run.index_losses, run.coverages)

    def _update(self, trains_main: bool) -> None:
        schedule = self._schedule
        factors = {"muon": schedule.main_rate(), "adam": schedule.main_rate(), "index": schedule.index_rate()}
        for parameters in (self._main, self._index):
            nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 1.0)
        for name, optimizer in self._optimizers.items():
            optimizer.param_groups[0]["lr"] = self._base_rates[name] * factors[name]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._network.balance_experts(BALANCE_RATE * schedule.main_rate() if trains_main else 0.0)

    def _save(self) -> None:
        save_state(self._out_dir, self._network, self._optimizers, self._schedule.progress())
        write_checkpoint(self._network, self._out_dir / "checkpoint")

    def _log(self, entry: dict[str, Any]) -> None:
        with self._log_path.open("a") as log:
            log.write(json.dumps(entry) + "\n")


def _optimizers(
    network: Network,
) -> tuple[list[nn.Parameter], list[nn.Parameter], dict[str, torch.optim.Optimizer]]:
    """Parameters of the main model and of the indexer, and the optimizers by name."""
    index = network.index_parameters()
    of_index = {id(parameter) for parameter in index}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if id(parameter) in of_index:
            continue
        is_matrix = name.startswith("layers.") and parameter.dim() >= 2 and ".gate.weight" not in name
        (matrices if is_matrix else others).append(parameter)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "muon": Muon(matrices, MUON_RATE),
        "adam": torch.optim.AdamW(others, ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        "index": torch.optim.AdamW(index, INDEX_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    }
    return [*matrices, *others], index, optimizers


def some_rows(batch: Batch, count: int) -> Tensor:
    """Queries for the indexer's loss, int64 [batch, count]: half anywhere, half in the answers."""
    is_text, is_answer = batch.is_text.float(), batch.is_answer.float()
    weights = is_text / is_text.sum(1, keepdim=True) + is_answer / is_answer.sum(1, keepdim=True).clamp(min=1)
    return torch.multinomial(weights, count, replacement=True)


def _losses(logits: Tensor, batch: Batch) -> dict[str, Tensor]:
    each = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="none")
    each = each.view_as(batch.targets)
    is_answer, is_other = batch.is_answer.float(), (batch.is_text & ~batch.is_answer).float()
    is_asked = batch.question >= 0
    is_right = (logits.detach().argmax(-1) == batch.targets) & is_asked
    return {
        "answer_loss": (each * is_answer).sum() / is_answer.sum(),
        "text_loss": (each * is_other).sum() / is_other.sum(),
        "answer_accuracy": is_right.sum() / is_asked.sum(),
    }


def _note(
    schedule: Schedule, width: int, values: dict[str, float], losses: list[Tensor], coverages: list[Tensor]
) -> str:
    note = (
        f"{schedule.stage.value:6} step {schedule.step:5} {schedule.secs:5.0f} s width {width:4} "
        f"answers {values['answer_loss']:.4f} ({values['answer_accuracy']:.3f} right)"
    )
    if losses:
        note += " index " + " ".join(f"{float(value.detach()):.3f}" for value in losses)
        note += " keeps " + " ".join(f"{float(value):.3f}" for value in coverages)
    return note


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.training.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="directory of the run, made when missing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=7.0, help="of training; evaluation comes on top")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, if there is one")
    parser.add_argument("--max-width", type=int, default=8192, help="tokens of the longest sequences")
    parser.add_argument("--tokens-per-batch", type=int, default=32768)
    parser.add_argument("--eval-prompts", type=int, default=EVAL_PROMPTS, help="of each length in the end")
    parser.add_argument("--small", action="store_true", help="a miniature of the network")
    arguments = parser.parse_args()
    out_dir: Path = arguments.out
    if (out_dir / STATE_FILE).exists() and not arguments.resume:
        parser.error(f"there is a run in {out_dir}: give --resume, or another directory")
    out_dir.mkdir(parents=True, exist_ok=True)
    if arguments.device.startswith("cuda"):
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cuda.enable_cudnn_sdp(False)  # of the kernels that take a mask, the least proven
    schedule = Schedule(
        total_secs=arguments.minutes * 60,
        seed=arguments.seed,
        max_width=arguments.max_width,
        tokens_per_batch=arguments.tokens_per_batch,
    )
    shape = SMALL if arguments.small else NetworkShape()
    trainer = Trainer(out_dir, arguments.device, shape, schedule, arguments.eval_prompts)
    if arguments.resume:
        trainer.resume()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        trainer.run()
    except KeyboardInterrupt:
        trainer.save()
        print("stopped and saved; --resume goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
