"""Exact match of held-out answers by length, under teacher forcing.

An answer counts as right when each of its tokens is the most probable one after the right tokens before it.
If all answers of a prompt are right in this sense, greedy decoding gives exactly them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.training.indexing import Selection
from tools.training.network import Network
from tools.training.task import ANSWER_WIDTH, Batch, Shape, TaskGenerator

LENGTHS = (256, 512, 1024, 2048, 4096, 8000)
QUESTIONS = 8
SEED = 90_000
"""Of the evaluation's documents; training seeds stay far below the generator's use of it."""


@dataclass(frozen=True)
class Score:
    """Result at one prompt length."""

    length: int
    selection: Selection
    num_answers: int
    num_right: int
    num_prompts: int
    num_perfect: int
    """Prompts with all answers right."""


def held_out(length: int, count: int, device: torch.device | str = "cpu") -> Batch:
    """``count`` prompts of about ``length`` tokens, the same on every machine."""
    generator = TaskGenerator("cpu", SEED + length)
    answers = 2 + ANSWER_WIDTH * QUESTIONS + 1
    batch = generator.batch(Shape(count, length + answers, QUESTIONS, held_out=True))
    return Batch(**{name: value.to(device) for name, value in vars(batch).items()})


@torch.no_grad()
def score(
    network: Network,
    batch: Batch,
    length: int,
    selection: Selection,
    rows_at_once: int,
) -> Score:
    """Run ``batch`` in parts of ``rows_at_once`` prompts."""
    network.eval()
    parts = []
    for start in range(0, batch.tokens.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        logits, _ = network(batch.tokens[rows], batch.positions[rows], selection)
        parts.append(logits.argmax(dim=-1) == batch.targets[rows])
    network.train()
    is_right = torch.cat(parts)
    right = _right_answers(batch, is_right)
    asked = torch.arange(right.shape[1], device=right.device) < batch.num_questions[:, None]
    right &= asked
    perfect = (is_right | ~batch.is_answer).all(1)
    return Score(
        length=length,
        selection=selection,
        num_answers=int(asked.sum()),
        num_right=int(right.sum()),
        num_prompts=len(perfect),
        num_perfect=int(perfect.sum()),
    )


def _right_answers(batch: Batch, is_right: Tensor) -> Tensor:
    """bool [batch, questions]: all tokens of the answer are right."""
    wrong = (batch.question >= 0) & ~is_right
    count = torch.zeros_like(batch.fact_at)
    count.scatter_add_(1, batch.question.clamp(min=0), wrong.long())
    return count == 0
