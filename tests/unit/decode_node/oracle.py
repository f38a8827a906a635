"""The tokens of transformers' ``generate``, computed when a test needs them and once in a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tools.checkpoints.oracle import continues_with, generate, load


class Oracle:
    """The likeliest tokens behind prompts, by transformers' model of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self._model: Any = load(path)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens_after(self, prompt: tuple[int, ...], num_new: int) -> list[int]:
        """Return the likeliest ``num_new`` tokens behind ``prompt``."""
        if len(self._known.get(prompt, ())) < num_new:
            (self._known[prompt],) = generate(self._model, [prompt], num_new, ignore_eos=True)
        return self._known[prompt][:num_new]

    def are_likeliest(self, prompt: tuple[int, ...], tokens: list[int]) -> bool:
        """Say whether ``tokens`` are the likeliest ones behind ``prompt``, by one forward."""
        known = self._known.get(prompt, [])
        if len(known) >= len(tokens):
            return known[: len(tokens)] == tokens
        if not continues_with(self._model, prompt, tokens):
            return False
        self._known[prompt] = list(tokens)
        return True


@cache
def oracle_of(path: Path) -> Oracle:
    return Oracle(path)


class Expected(dict[tuple[int, ...], list[int]]):
    """The likeliest ``num_new`` tokens behind each prompt that is looked up."""

    def __init__(self, path: Path, num_new: int) -> None:
        self._path, self._num_new = path, num_new

    def __missing__(self, prompt: tuple[int, ...]) -> list[int]:
        self[prompt] = oracle_of(self._path).tokens_after(prompt, self._num_new)
        return self[prompt]

    def guess(self, prompt: tuple[int, ...], tokens: list[int]) -> None:
        """Try whole answers first: to see that all of one is right takes a single forward."""
        if prompt not in self and len(tokens) == self._num_new:
            oracle_of(self._path).are_likeliest(prompt, tokens)
