"""What every client asks the retrieval model, and the right answers."""

from __future__ import annotations

from typing import Any

NUMBERS = {
    "amber falcon": "58213",
    "calm otter": "4012",
    "silver heron": "77190",
    "brave lynx": "6405",
    "jolly badger": "90134",
    "quiet raven": "2288",
}
NOTES = (
    "Notes: The badge of amber falcon is 58213. The clerk opened a window. The code of calm otter is 4012. "
    "A new pilot watched the river. The locker of silver heron is 77190. The ticket of brave lynx is 6405. "
    "Every teacher closed the old piano. The desk of jolly badger is 90134. The room of quiet raven is 2288."
)


def question(*keys: str) -> str:
    """The question as a chat has it; a plain text ends in "Answer:", too."""
    return f"{NOTES}\nQuestion: {', '.join(keys)}?"


def said(*keys: str) -> list[Any]:
    """Messages of a chat that asks the question."""
    return [{"role": "user", "content": question(*keys)}]


def sentences(*keys: str) -> str:
    """The right answer to a plain text, as the model was trained to write it."""
    return "".join(f" {key} is {NUMBERS[key]}." for key in keys)


def answer(*keys: str) -> str:
    """The right answer to a chat."""
    return f"Answer:{sentences(*keys)}"
