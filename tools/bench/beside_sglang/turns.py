"""Plans which engine has the GPU when, and for how long.

``__main__.py`` takes the turns that ``plan`` returns, within ``limits``. For each context and mode SGLang's
engine has its turn, and then ours, so that a machine's drift affects both. A turn measures all cells of its
context and mode: decode steps in one process, or answers over HTTP of one server. Turns end at their limits,
and all of them before ``--seconds`` is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Engine = Literal["sglang", "ours"]
Mode = Literal["dense", "hisparse"]
MODES: Final[tuple[Mode, ...]] = ("dense", "hisparse")
ENGINES: Final[tuple[Engine, ...]] = ("sglang", "ours")
LEAST_SECS: Final = 30.0
"""A turn that would have less time does not begin: neither engine starts in it."""


@dataclass(frozen=True)
class Turn:
    """One engine that has the GPU."""

    engine: Engine
    mode: Mode
    context: int
    batches: tuple[int, ...]
    """Requests of each cell that run at once: a batch of decode steps, or clients over HTTP."""
    over_http: bool = False

    @property
    def name(self) -> str:
        return f"{'http-' if self.over_http else ''}{self.engine}-{self.mode}-{self.context}"


def plan(
    contexts: Sequence[int], batches: Mapping[Mode, Sequence[int]], *, over_http: bool = False
) -> list[Turn]:
    """Return the turns in order; a mode without batches has none."""
    return [
        Turn(engine, mode, context, tuple(sorted(batches[mode])), over_http)
        for context in contexts
        for mode in batches
        if batches[mode]
        for engine in ENGINES
    ]


def limits(
    turns: Sequence[Turn], most_secs: Callable[[Turn], float], secs_left: float
) -> Iterator[tuple[Turn, float]]:
    """Yield the turns with their limits in seconds, as if each took all of its own. 0: it does not begin.

    ``most_secs``: the most that a turn may have. Every turn leaves the later turns of our engine their time,
    so that what SGLang's turns measure has something beside it.
    """
    for number, turn in enumerate(turns):
        reserved = sum(most_secs(later) for later in turns[number + 1 :] if later.engine == "ours")
        limit = min(most_secs(turn), secs_left - reserved)
        limit = limit if limit >= LEAST_SECS else 0.0
        yield turn, limit
        secs_left -= limit
