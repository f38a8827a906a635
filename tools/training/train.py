"""Train the retrieval model.

    python -m tools.training.train --out DIR --device cuda --minutes 7

``DIR/checkpoint`` is what is served, as it was at the end of the last stage; ``DIR/log.jsonl`` is the run's
record. Without a GPU: ``--device cpu --minutes 80 --tokens-per-batch 8192 --eval-prompts 12``, on two cores.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from typing import Any

import torch

from tools.training.checkpoint import write_checkpoint
from tools.training.evaluate import LENGTHS, held_out, score
from tools.training.indexing import Selection
from tools.training.network import Network
from tools.training.run import LOG_STEPS, Optimizers, Run, losses, make_parser, some_rows
from tools.training.schedule import Schedule, Stage
from tools.training.shape import NetworkShape

MUON_RATE = 0.008
ADAM_RATE = 3e-3
INDEX_RATE = 2e-3
BALANCE_RATE = 1e-3
EVAL_PROMPTS = 100
"""Of each length at the end of a run; a third of that at the end of a stage."""


class Trainer:
    """The network and its optimizers, on their way through the schedule of a run."""

    def __init__(self, run: Run, shape: NetworkShape, schedule: Schedule, eval_prompts: int) -> None:
        self.network = Network(shape).to(run.device).train()
        self._run = run
        self._schedule = schedule
        self._eval_prompts = eval_prompts
        self._optimizers = Optimizers(self.network, MUON_RATE, ADAM_RATE, INDEX_RATE)

    def train(self) -> None:
        """Train to the end of the schedule, evaluate, and write the checkpoint."""
        run, schedule = self._run, self._schedule
        name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else str(run.device)
        run.log(
            {
                "device": name,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "num_weights": sum(parameter.numel() for parameter in self.network.parameters()),
                "shape": vars(self.network.shape),
                "total_secs": schedule.total_secs,
                "seed": schedule.seed,
                "max_width": schedule.max_width,
                "tokens_per_batch": run.tokens_per_batch,
            }
        )
        write_checkpoint(self.network, run.checkpoint)  # what cannot be written fails now
        run.loop(schedule.total_secs, self.step)
        self._end_stage(self._eval_prompts)

    def step(self, spent_secs: float) -> dict[str, Any] | None:
        """One step of training, or the end of a stage, which takes none of the run's time."""
        schedule = self._schedule
        if schedule.stage is not (ended := schedule.stage_at(spent_secs)):
            self._end_stage(max(1, self._eval_prompts // 3))
            schedule.begin(ended)
            return None
        schedule.secs = spent_secs
        width = schedule.width()
        batch = self._run.batch(width, schedule.step)
        trains_main = schedule.stage is not Stage.WARMUP
        for parameter in self._optimizers.main:
            parameter.requires_grad_(trains_main)
        with self._run.autocast():
            logits, made = self.network(
                batch.tokens,
                batch.positions,
                Selection.INDEXER if schedule.stage is Stage.SPARSE else Selection.ALL,
                None if schedule.stage is Stage.DENSE else some_rows(batch),
            )
        main_loss, figures = losses(logits, batch)
        parts = [*made.index_losses, *([main_loss] if trains_main else [])]
        torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
        main_rate = schedule.main_rate() if trains_main else 0.0
        self._optimizers.step(main_rate, schedule.index_rate())
        self.network.balance_experts(BALANCE_RATE * main_rate)
        if schedule.step % LOG_STEPS == 0:
            schedule.record(width, float(figures["answer_accuracy"]))
        schedule.advance()
        index = {"index_losses": made.index_losses, "coverages": made.coverages}
        return {"stage": schedule.stage.value, "width": width, **figures, **index}

    @torch.no_grad()
    def _end_stage(self, num_prompts: int) -> None:
        """Write the checkpoint, and evaluate it on held-out prompts: weights (on a GPU activations too) in
        bfloat16, as served.
        """
        run, stage = self._run, self._schedule.stage
        write_checkpoint(self.network, run.checkpoint)
        served = Network(self.network.shape).to(run.device)
        served.load_state_dict(self.network.state_dict())
        for parameter in served.parameters():
            parameter.data = parameter.data.bfloat16()
            if run.device.type == "cpu":  # which serves in float32
                parameter.data = parameter.data.float()
        for length in (length for length in LENGTHS if length <= self._schedule.max_width):
            batch = held_out(length, num_prompts, run.device)
            for selection in [Selection.ALL] if stage is Stage.DENSE else Selection:
                found = score(served, batch, length, selection, max(1, run.tokens_per_batch // length))
                run.log({"evaluated_after": stage.value, **asdict(found), "selection": selection.value})


def main() -> int:
    parser = make_parser("train", __doc__, minutes=7.0)
    parser.add_argument("--eval-prompts", type=int, default=EVAL_PROMPTS, help="of each length in the end")
    arguments = parser.parse_args()
    run = Run(arguments.out, arguments.device, arguments.seed, arguments.tokens_per_batch)
    schedule = Schedule(arguments.minutes * 60, arguments.seed, arguments.max_width)
    Trainer(run, NetworkShape(), schedule, arguments.eval_prompts).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
