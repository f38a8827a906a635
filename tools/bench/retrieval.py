"""Retrieval tasks: long prompts of the retrieval model with known answers, and the judging of responses.

The demo, ``accuracy`` and tests send them. ``documents.py`` makes the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tools.bench.documents import documents

LENGTHS = (512, 1024, 2048, 4096, 8000)
"""Lengths of prompts, in tokens, of the usual measurement."""
NUM_DEPTHS = 5
"""Parts of a prompt by which answers are counted."""


@dataclass(frozen=True)
class Answer:
    """One right answer. ``depth``: its place in the prompt, from 0 to 1."""

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
    """Return ``count`` tasks, which are the same on every machine."""
    found = []
    for document in documents(length, count):
        at = torch.tensor([fact.number_at for fact in document.asked])
        depths = (at / len(document.token_ids)).tolist()  # float32, as reports have them
        answers = tuple(
            Answer(fact.key, fact.number, depth) for fact, depth in zip(document.asked, depths, strict=True)
        )
        found.append(Retrieval(length, document.content, document.token_ids, answers))
    return found


def judge(response: str, answers: Sequence[Answer]) -> list[bool]:
    """Return for each of ``answers`` whether ``response`` gives it, in the words that the model was trained
    to write."""
    return [f"{answer.key} is {answer.value}." in response for answer in answers]
