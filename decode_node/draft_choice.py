"""Decides how many drafts a step verifies: the number that has brought most tokens a second. Pure.

Measured are the seconds of a step by size of the batch and number of drafts, and for each place in the chain
how often a draft was right when those before it were. Numbers that a size of batch has not tried come first,
and neighbours of the best one again from time to time. What a place was worth is forgotten while no step
tries it, so that text without use for drafts does not rule for good. None of this changes a token, only when
it comes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_STEPS = 6
"""Of a number of drafts at a size of batch, before it is judged."""
PROBE_EVERY = 400
"""Steps at a size of batch between two trials of another number than the best."""
PROBE_STEPS = 4
"""Of a trial: the first has no drafts to verify when the best number was 0."""
MIN_GAIN = 1.03
"""By which a larger number has to be better than the present one: two that are alike do not take turns."""
_OLD_SHARE = 0.9
"""Of an average, what the next value leaves of it."""
_MAX_JUMP = 1.25
"""A step counts as so many averages at most, and as an average divided by it at least: one that was longer
did something else too, during which the next one ran. So neither decides anything alone."""
_CLOCK_SECS = 1e-6
"""No step is shorter."""
_OLD_TRIES = 0.999
"""Of what is known of a place, what the next try leaves of it."""
_UNTRIED = 0.995
"""Of the same, what a step leaves of it in which nobody tries."""
_FIRST_GUESS = 0.7
"""How often a draft is right, as long as nobody knows: it counts as one try."""


def expected_tokens(rates: Sequence[float], num_drafts: int) -> float:
    """Of a request's step that verifies ``num_drafts``. ``rates``: how often a draft is right where those
    before it are."""
    tokens = all_right = 1.0
    for rate in rates[:num_drafts]:
        all_right *= rate
        tokens += all_right
    return tokens


def best_num_drafts(rates: Sequence[float], secs: Sequence[float], present: int) -> int:
    """The number of drafts with most tokens a second; ``present``, if that is smaller and as good. ``secs``:
    of a step, by its number of drafts."""
    speeds = [expected_tokens(rates, number) / of_step for number, of_step in enumerate(secs)]
    best = max(range(len(speeds)), key=lambda number: speeds[number])
    return best if best < present or speeds[best] > MIN_GAIN * speeds[present] else present


@dataclass
class _Size:
    """What is known of batches of about one size."""

    secs: list[float]
    """Of a step, by number of drafts."""
    first_secs: list[list[float]]
    """Of the first FIRST_STEPS of each."""
    present: int
    until_probe: int = PROBE_EVERY
    probe: int = 0
    probe_steps: int = 0
    probes_up: bool = False


class DraftChoice:
    """``max_drafts``: those that a step can verify."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._sizes: dict[int, _Size] = {}
        self._tries = [0.0] * max_drafts
        self._rights = [0.0] * max_drafts
        self._last: tuple[int, int] | None = None
        """Requests and drafts of the step that ended at ``_last_at``."""
        self._last_at = 0.0

    @property
    def rates(self) -> list[float]:
        """How often the draft at each place was right when those before it were, lately."""
        return [
            (right + _FIRST_GUESS) / (tries + 1)
            for right, tries in zip(self._rights, self._tries, strict=True)
        ]

    def choose(self, num_reqs: int, most: int) -> int:
        """Drafts for the next step, of ``num_reqs`` requests none of which can verify more than ``most``."""
        if most == 0:
            return 0
        number = self._choose(num_reqs, most)
        for place in range(number, self._max_drafts):
            self._tries[place] *= _UNTRIED
            self._rights[place] *= _UNTRIED
        return number

    def _choose(self, num_reqs: int, most: int) -> int:
        size = self._size(num_reqs)
        for number in range(most, -1, -1):
            if len(size.first_secs[number]) < FIRST_STEPS:
                return number
        if size.probe_steps:
            size.probe_steps -= 1
            return min(size.probe, most)
        size.present = best_num_drafts(self.rates, size.secs[: most + 1], min(size.present, most))
        size.until_probe -= 1
        if size.until_probe <= 0:
            size.until_probe = PROBE_EVERY
            size.probes_up = not size.probes_up
            other = size.present + (1 if size.probes_up else -1)
            if 0 <= other <= most:
                size.probe, size.probe_steps = other, PROBE_STEPS
        return size.present

    def turn(self, num_reqs: int, num_drafts: int, now: float) -> None:
        """A turn with a step of ``num_reqs`` requests, 0 for none, is over. A step may be read a turn after
        its launch: what counts is the time between the ends of two turns with steps alike."""
        step = (num_reqs, num_drafts) if num_reqs else None
        if step is not None and step == self._last:
            self.took(num_reqs, num_drafts, now - self._last_at)
        self._last, self._last_at = step, now

    def took(self, num_reqs: int, num_drafts: int, secs: float) -> None:
        """A step of ``num_reqs`` requests with ``num_drafts`` drafts took ``secs``."""
        size, secs = self._size(num_reqs), max(secs, _CLOCK_SECS)
        average, first = size.secs[num_drafts], size.first_secs[num_drafts]
        if len(first) < FIRST_STEPS:  # one of which may have compiled something
            first.append(secs)
            size.secs[num_drafts] = statistics.median(first)
        else:
            usual = min(max(secs, average / _MAX_JUMP), average * _MAX_JUMP)
            size.secs[num_drafts] = _OLD_SHARE * average + (1 - _OLD_SHARE) * usual

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Of ``num_drafts`` that a step had place for, a request accepted ``num_accepted``."""
        for place in range(min(num_drafts, num_accepted + 1)):
            self._tries[place] = _OLD_TRIES * self._tries[place] + 1
            self._rights[place] = _OLD_TRIES * self._rights[place] + (place < num_accepted)

    def _size(self, num_reqs: int) -> _Size:
        """Batches of the next larger power of two are alike."""
        bits = (max(1, num_reqs) - 1).bit_length()
        if bits not in self._sizes:
            count = self._max_drafts + 1
            first_secs: list[list[float]] = [[] for _ in range(count)]
            self._sizes[bits] = _Size([0.0] * count, first_secs, present=self._max_drafts)
        return self._sizes[bits]
