"""Plans which engine has the GPU when, and for how long.

For each context and mode the guest has its turn, then ours, so that a machine's drift affects both. A turn is
one process with all cells of its context and mode. Turns end at their limits, and all of them before
``--seconds`` is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Engine = Literal["sglang", "ours"]
Mode = Literal["dense", "hisparse"]
ENGINES: Final[tuple[Engine, ...]] = ("sglang", "ours")
LEAST_SECS: Final = 30.0
"""A turn that would have less time does not begin: neither engine starts in it."""


@dataclass(frozen=True)
class Turn:
    """One process that has the GPU."""

    engine: Engine
    mode: Mode
    context: int
    batches: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.mode}-{self.context}"


def plan(contexts: Sequence[int], batches: Mapping[Mode, Sequence[int]]) -> list[Turn]:
    """Return the turns in order; a mode without batches has none."""
    return [
        Turn(engine, mode, context, tuple(sorted(batches[mode])))
        for context in contexts
        for mode in batches
        if batches[mode]
        for engine in ENGINES
    ]


def limits(
    turns: Sequence[Turn], most_secs: Mapping[Engine, float], secs_left: float
) -> Iterator[tuple[Turn, float]]:
    """Yield the turns with their limits where each takes all of its own.

    A turn of SGLang leaves later turns of ours their time, so that what it measures has something beside it.
    """
    for number, turn in enumerate(turns):
        reserved = sum(most_secs["ours"] for later in turns[number + 1 :] if later.engine == "ours")
        limit = min(most_secs[turn.engine], secs_left - reserved)
        limit = limit if limit >= LEAST_SECS else 0.0
        yield turn, limit
        secs_left -= limit
