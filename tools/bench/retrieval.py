"""Retrieval tasks: long prompts with known right answers, how an answer is judged, and files of such tasks.

The built-in tasks are the held-out documents of ``tools.training.task``: keys, numbers and pairings that no
training saw. A file has one JSON object a line, for tasks of any other benchmark:

    {"messages": [{"role": "user", "content": "..."}], "length": 4096,
     "answers": [{"value": "58213", "after": "amber falcon", "depth": 0.31}]}

``prompt``, a text, may stand for ``messages``. ``after``, ``depth`` (where in the prompt the answer is
found, 0 to 1) and ``length`` (of the prompt in tokens, for the table) may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hisparse_pd.bench.facts import ROOT
from tools.training.evaluate import held_out
from tools.training.vocabulary import text_of

RETRIEVAL_MODEL = ROOT / "tools" / "checkpoints" / "retrieval"
LENGTHS = (512, 1024, 2048, 4096, 8000)
NUM_DEPTHS = 5
_ANSWER = re.compile(r" ?(\w+ \w+) is (\d+)\.")


class Answer(msgspec.Struct, frozen=True):
    """One right answer. Where ``after`` is given, the answer is what follows it in the response."""

    value: str
    after: str = ""
    depth: float | None = None


class Task(msgspec.Struct, frozen=True):
    """One prompt and its right answers."""

    answers: tuple[Answer, ...]
    messages: tuple[dict[str, Any], ...] = ()
    prompt: str = ""
    length: int = 0


@dataclass(frozen=True)
class Retrieval:
    """A built-in task, and the same prompt in tokens of the retrieval model, chat template included."""

    task: Task
    token_ids: tuple[int, ...]


def retrievals(length: int, count: int, instruction: str = "") -> list[Retrieval]:
    """``count`` tasks of about ``length`` tokens, the same on every machine.

    ``instruction`` goes before the document, for models that were not trained on the task; ``token_ids`` are
    without it.
    """
    batch = held_out(length, count)
    found = []
    for row in range(count):
        num_prompt = int(batch.prompt_tokens[row])
        token_ids = batch.tokens[row, :num_prompt].tolist()
        said = _ANSWER.findall(text_of(batch.targets[row][batch.is_answer[row]].tolist()))
        depths = (batch.fact_at[row] / num_prompt).tolist()
        answers = tuple(Answer(value, key, depth) for (key, value), depth in zip(said, depths, strict=False))
        if len(answers) != int(batch.num_questions[row]):
            raise ValueError(f"{len(answers)} answers to {int(batch.num_questions[row])} questions: {said}")
        content = "\n\n".join(part for part in (instruction, text_of(token_ids)) if part)
        task = Task(answers, ({"role": "user", "content": content},), length=length)
        found.append(Retrieval(task, tuple(token_ids)))
    return found


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file. Raises ValueError with the line that is wrong, OSError."""
    tasks = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = msgspec.json.decode(line, type=Task)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if bool(task.messages) == bool(task.prompt) or not task.answers:
            raise ValueError(f"{path}, line {number}: expected messages or prompt, and at least one answer")
        tasks.append(
            task
            if task.messages
            else msgspec.structs.replace(task, messages=({"role": "user", "content": task.prompt},))
        )
    if not tasks:
        raise ValueError(f"{path}: no tasks in it")
    return tasks


def judge(response: str, answers: Sequence[Answer]) -> list[bool]:
    """Which answers ``response`` gives exactly.

    An answer with ``after`` is right when the first number or word behind the first mention of that, an "is"
    or punctuation left out, is its value; one without, when its value stands somewhere as a whole word.
    """
    return [_is_right(response, answer) for answer in answers]


def _is_right(response: str, answer: Answer) -> bool:
    value = rf"(?<!\w){re.escape(answer.value)}(?!\w)(?!,\d|\.\d)"
    if not answer.after:
        return re.search(value, response, re.IGNORECASE) is not None
    _, found, rest = response.lower().partition(answer.after.lower())
    return bool(found) and re.match(rf"\W*(?:is\b\W*)?{value}", rest, re.IGNORECASE) is not None
