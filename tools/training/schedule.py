"""When a run does what: its stages, the width of each batch, and the learning rates.

    stage    attention   trains                                    loss
    dense    all         everything but the indexer                next token, answers above all
    warmup   all         the indexer alone                         divergence from attention, all positions
    sparse   selected    everything, the indexer by its own loss   next token; divergence, selected positions

The stages are those of the DeepSeek-V3.2 report. They follow the clock, because what a run may cost is known
in minutes and a GPU's speed is not. Sequences grow: the next width is taken up when the answers at the
widest so far are right, or when its time has come.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum

WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
PROMOTION_ACCURACY = 0.97
"""Share of right answer tokens at the widest batches that brings the next width."""
MOST_QUESTIONS = 24
RAMP_STEPS = 100
SETTLED_RATE, SPARSE_RATE = 0.2, 0.3


class Stage(Enum):
    DENSE = "dense"
    WARMUP = "warmup"
    SPARSE = "sparse"


SHARES = {Stage.DENSE: 0.5, Stage.WARMUP: 0.12, Stage.SPARSE: 0.38}
"""Of the run's time."""


@dataclass
class Schedule:
    """Where a run of ``total_secs`` stands. Whoever turns it sets ``secs``, what is over of them."""

    total_secs: float
    seed: int
    max_width: int = WIDTHS[-1]
    secs: float = 0.0
    step: int = 0
    stage: Stage = Stage.DENSE
    stage_step: int = 0
    level: int = 0
    """Index of the widest batches so far in ``WIDTHS``."""
    accuracy: dict[int, float] = field(default_factory=dict)
    """Running share of right answer tokens by width."""

    def stage_at(self, secs: float) -> Stage:
        """The stage after ``secs`` of the run."""
        end = 0.0
        for stage, share in SHARES.items():
            end += share * self.total_secs
            if secs < end:
                return stage
        return Stage.SPARSE

    @property
    def stage_part(self) -> float:
        """How much of the stage's time is over, in [0, 1]."""
        start = sum(SHARES[stage] for stage in list(Stage)[: list(Stage).index(self.stage)])
        return min(1.0, max(0.0, (self.secs / self.total_secs - start) / SHARES[self.stage]))

    def begin(self, stage: Stage) -> None:
        self.stage, self.stage_step = stage, 0

    def advance(self) -> None:
        """Count a step."""
        self.step, self.stage_step = self.step + 1, self.stage_step + 1
        if self.stage is Stage.DENSE:
            self._maybe_promote()

    def width(self) -> int:
        """Of the next batch. In the dense stage half of them are as wide as they get."""
        widths = [width for width in WIDTHS if width <= self.max_width]
        draw = random.Random(self.seed * 7919 + self.step)
        if self.stage is Stage.DENSE:
            widths = widths[: self.level + 1]
            return widths[-1] if draw.random() < 0.5 else draw.choice(widths)
        # All as likely: a short batch asks many more questions in its time than a long one.
        return draw.choice(widths[1:] or widths)

    def record(self, width: int, accuracy: float) -> None:
        """Take note of the share of right answer tokens in one batch of ``width``."""
        before = self.accuracy.get(width, accuracy)
        self.accuracy[width] = 0.7 * before + 0.3 * accuracy

    def main_rate(self) -> float:
        """Factor of the main model's learning rates.

        A ramp, constant, and down to ``SETTLED_RATE`` in the dense stage; from ``SPARSE_RATE`` to zero in the
        sparse.
        """
        if self.stage is Stage.SPARSE:
            return SPARSE_RATE * min(1.0, 1.2 * (1.0 - self.stage_part))
        settling = max(0.0, self.stage_part - 0.5) / 0.5
        return min(1.0, (self.stage_step + 1) / RAMP_STEPS, 1.0 - (1.0 - SETTLED_RATE) * settling)

    def index_rate(self) -> float:
        """Factor of the indexer's learning rate: a ramp, constant, in the sparse stage linear to zero."""
        if self.stage is Stage.SPARSE:
            return min(1.0, 1.2 * (1.0 - self.stage_part))
        return min(1.0, (self.stage_step + 1) / RAMP_STEPS)

    def _maybe_promote(self) -> None:
        widths = [width for width in WIDTHS if width <= self.max_width]
        if self.level == len(widths) - 1:
            return
        is_right = self.accuracy.get(widths[self.level], 0.0) > PROMOTION_ACCURACY
        # The first width takes longest: until the model has found out how to look up anything at all.
        is_late = self.stage_part > 0.4 + 0.5 * self.level / len(widths)
        if is_right or is_late:
            self.level += 1


def num_questions(width: int) -> int:
    """Most questions of a sequence in training."""
    return min(MOST_QUESTIONS, max(2, width // 24))
