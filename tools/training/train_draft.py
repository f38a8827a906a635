"""Train an MTP layer for a trained retrieval model, whose own weights stay as they are.

    python -m tools.training.train_draft --out DIR --device cuda --minutes 5

``DIR/checkpoint`` is the model with the layer in a file of its own, ``DIR/log.jsonl`` the run's record.

The layer starts as a copy of the model's last. Each step, the frozen model runs over a batch of its task, and
the layer makes ``PASSES`` drafts in a row behind every position, from its own results as a decode node makes
them. In the first part of the time it attends to all positions, then to its indexer's selection; the indexer
learns from the layer's attention as those of the model did. What its drafts are worth says
``tools.bench.accuracy --model-path DIR/checkpoint --no-oracle --speculative-num-steps 1 2 3``.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tools.training.checkpoint import load_hf_weights, write_with_draft
from tools.training.draft import DraftLayer, chain
from tools.training.indexing import Selection
from tools.training.network import Network
from tools.training.run import Optimizers, Run, losses, make_parser, some_rows
from tools.training.schedule import WIDTHS
from tools.training.shape import NetworkShape

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


class DraftTrainer:
    """The layer of one checkpoint on its way through a run of ``secs``."""

    def __init__(
        self, run: Run, checkpoint: Path, shape: NetworkShape, secs: float, max_width: int, seed: int
    ) -> None:
        self._run = run
        self._checkpoint = checkpoint
        self._secs = secs
        self._max_width = max_width
        self._pick = random.Random(seed)
        self.network = Network(shape)
        load_hf_weights(self.network, load_file(checkpoint / "model.safetensors"))
        self.draft = DraftLayer(shape)
        self.draft.start_from(self.network)
        self.network.to(run.device).eval().requires_grad_(False)
        self.draft.to(run.device).train()
        self._optimizers = Optimizers(self.draft, MUON_RATE, ADAM_RATE, INDEX_RATE)
        self._num_steps = 0

    def train(self) -> None:
        write_with_draft(self._checkpoint, self.draft, self._run.checkpoint)  # what cannot be, fails now
        self._run.loop(self._secs, self.step)
        write_with_draft(self._checkpoint, self.draft, self._run.checkpoint)

    def step(self, spent_secs: float) -> dict[str, Any]:
        """One step of training; its figures are those of each pass."""
        part = spent_secs / self._secs
        widths = SHORT_WIDTHS if part < SHORT_SHARE else WIDTHS[1:]
        width = self._pick.choice(
            [width for width in widths if width <= self._max_width] or [self._max_width]
        )
        batch = self._run.batch(width, self._num_steps)
        selection = Selection.ALL if part < DENSE_SHARE else Selection.INDEXER
        with self._run.autocast():
            with torch.no_grad():
                hidden, _ = self.network.hidden(batch.tokens, batch.positions, Selection.INDEXER)
            made = self.network.start(batch.positions, selection, some_rows(batch))
            states = chain(self.network, self.draft, made, batch.targets, hidden, PASSES)
            logits = [self.network.lm_head(state) for state in states]
        by_pass = [losses(each[:, number:-1], batch, number + 1) for number, each in enumerate(logits)]
        weighted = [weight * loss for weight, (loss, _) in zip(PASS_WEIGHTS, by_pass, strict=True)]
        (torch.stack(weighted).sum() + made.index_losses[0]).backward()  # type: ignore[no-untyped-call]
        factor = min(1.0, (self._num_steps + 1) / RAMP_STEPS, 1.25 * (1.0 - part))
        self._optimizers.step(factor, factor)
        self.draft.balance_experts(BALANCE_RATE * factor)
        self._num_steps += 1
        figures = {name: [found[name] for _, found in by_pass] for name in by_pass[0][1]}
        return {"width": width, **figures, "index_loss": made.index_losses[0], "coverage": made.coverages[0]}


def main() -> int:
    parser = make_parser("train_draft", __doc__, minutes=5.0)
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("tools/checkpoints/retrieval"), help="to train for"
    )
    given = parser.parse_args()
    # Other documents than those that the model was trained on.
    run = Run(given.out, given.device, given.seed, given.tokens_per_batch, documents=500)
    secs = given.minutes * 60
    DraftTrainer(run, given.checkpoint, NetworkShape(), secs, given.max_width, given.seed).train()
    return 0


if __name__ == "__main__":
    sys.exit(main())
