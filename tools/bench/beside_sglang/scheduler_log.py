"""Reads SGLang's step times and prefill rates out of its scheduler's log.

``__main__.py`` reads the log of each of SGLang's turns with it, and ``comparison.py`` takes step times and
prefill rates. The log is written by the guest (``guest.py``), a process that runs SGLang's engine.

A cell is one measurement: decode steps of one batch size. The guest marks with lines of JSON where each cell
begins and ends. Between two marks stand the scheduler's lines, each with the rate since the line before. Only
lines of full batches count: the scheduler may admit fewer requests than a cell has, and their rate is no
figure of that cell.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

CELL: Final = "BESIDE-CELL "
"""Begins the line of the guest that names the cell which follows, as JSON."""
DONE: Final = "BESIDE-DONE "
"""Begins the line of the guest, behind a cell, that has what it measured itself, as JSON."""
MIN_LINES: Final = 3
"""Lines of full batches that a cell needs, after the first, whose interval reaches back into the prefill."""
_DECODE = re.compile(
    r"Decode batch.*?#running-req: (\d+)(?:.*?accept len: ([\d.]+))?.*?gen throughput \(token/s\): ([\d.]+)"
)
_PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+).*?input throughput \(token/s\): ([\d.]+)")


@dataclass
class CellLog:
    """The scheduler's lines of one cell."""

    batch: int
    decode: list[tuple[int, float, float]] = field(default_factory=list)
    """Running requests, tokens a second, and tokens of a request in a step, of each decode line."""
    prefill: list[tuple[int, float]] = field(default_factory=list)
    """New tokens, and tokens a second, of each prefill line."""
    measured: dict[str, Any] | None = None
    """The guest's own measurement; None for a cell that did not end."""

    @property
    def full_rates(self) -> list[float]:
        """Tokens a second of full batches, without the first line of them."""
        return [rate for rate, _ in self._full_lines]

    @property
    def _full_lines(self) -> list[tuple[float, float]]:
        return [(rate, tokens) for running, rate, tokens in self.decode if running == self.batch][1:]

    @property
    def problem(self) -> str:
        """Why this is no figure of its batch, or an empty string."""
        if len(self.full_rates) >= MIN_LINES:
            return ""
        most = max((running for running, _, _ in self.decode), default=0)
        if most < self.batch:
            return f"at most {most} of {self.batch} requests ran at once"
        return f"{len(self.full_rates)} lines of full batches, fewer than {MIN_LINES}"

    @property
    def tokens_a_step(self) -> float:
        """Tokens of a request that a step of a full batch makes on average. ``problem`` must be empty."""
        return statistics.fmean(tokens for _, tokens in self._full_lines)

    def step_ms(self) -> float:
        """Return the median step of the full batches. ``problem`` must be empty."""
        return statistics.median(1e3 * self.batch * tokens / rate for rate, tokens in self._full_lines)


def read_cells(lines: Iterable[str]) -> list[CellLog]:
    """Return the cells of a guest's log, also the last one that did not end."""
    cells: list[CellLog] = []
    for line in lines:
        if line.startswith(CELL):
            cells.append(CellLog(json.loads(line.removeprefix(CELL))["batch"]))
        elif not cells:
            continue
        elif line.startswith(DONE):
            cells[-1].measured = json.loads(line.removeprefix(DONE))
        elif found := _DECODE.search(line):
            cells[-1].decode.append((int(found[1]), float(found[3]), float(found[2] or 1)))
        elif found := _PREFILL.search(line):
            cells[-1].prefill.append((int(found[1]), float(found[2])))
    return cells


def prefill_rate(cells: Iterable[CellLog], chunk: int) -> float | None:
    """Return the median tokens a second of whole chunks without the first, or None without any."""
    rates = [rate for cell in cells for num_tokens, rate in cell.prefill if num_tokens == chunk]
    return statistics.median(rates[1:]) if len(rates) > 1 else None
