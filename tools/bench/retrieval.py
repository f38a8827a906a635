"""Retrieval tasks: long prompts of the retrieval model with known right answers, and how an answer is judged.

They are the held-out documents of ``tools.training.task``: keys, numbers and pairings that no training saw.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.facts import ROOT
from tools.training.evaluate import held_out
from tools.training.vocabulary import text_of

RETRIEVAL_MODEL = ROOT / "tools" / "checkpoints" / "retrieval"
LENGTHS = (512, 1024, 2048, 4096, 8000)
NUM_DEPTHS = 5
_ANSWER = re.compile(r" ?(\w+ \w+) is (\d+)\.")


@dataclass(frozen=True)
class Answer:
    """One right answer. ``depth``: where in the prompt it is found, 0 to 1."""

    key: str
    value: str
    depth: float


@dataclass(frozen=True)
class Retrieval:
    """One prompt of about ``length`` tokens, as a message and in tokens, chat template included."""

    length: int
    content: str
    token_ids: tuple[int, ...]
    answers: tuple[Answer, ...]


def retrievals(length: int, count: int) -> list[Retrieval]:
    """``count`` tasks, the same on every machine."""
    batch = held_out(length, count)
    found = []
    for row in range(count):
        num_prompt = int(batch.prompt_tokens[row])
        token_ids = batch.tokens[row, :num_prompt].tolist()
        said = _ANSWER.findall(text_of(batch.targets[row][batch.is_answer[row]].tolist()))
        depths = (batch.fact_at[row] / num_prompt).tolist()
        answers = tuple(Answer(key, value, depth) for (key, value), depth in zip(said, depths, strict=False))
        if len(answers) != int(batch.num_questions[row]):
            raise ValueError(f"{len(answers)} answers to {int(batch.num_questions[row])} questions: {said}")
        found.append(Retrieval(length, text_of(token_ids), tuple(token_ids), answers))
    return found


def judge(response: str, answers: Sequence[Answer]) -> list[bool]:
    """Which answers ``response`` gives, in the words that the model was trained to write."""
    return [f"{answer.key} is {answer.value}." in response for answer in answers]
