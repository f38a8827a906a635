"""Decides how many drafts a step verifies: the number that has brought most tokens a second. Pure.

More drafts bring more tokens if they are right, and make a step longer. Both are measured while the node
serves: ``StepLine`` calls ``choose`` before it launches a step, ``note_verified`` for each request of a step
that it has read, and ``note_turn`` at the end of each turn. ``DraftChoice`` thus knows two things:

- the seconds of a step, by size of the batch and number of drafts. Numbers that a size of batch has not tried
  come first, and from time to time a neighbour of the best one is tried again (a probe).
- for each place in the chain of drafts, the rate: how often the draft there was right when those before it
  were. It is forgotten while no step tries the place, so that one text with bad drafts does not decide for
  good.

The choice changes when tokens come, and never which tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FIRST_STEPS = 6
"""Steps with a number of drafts, at a size of batch, before that number is judged."""
PROBE_EVERY = 400
"""Steps at a size of batch between two probes, which try another number than the best."""
PROBE_STEPS = 4
"""Steps of a probe, more than one: when the best number is 0, the step before the probe makes no drafts for
the first one to verify."""
MIN_GAIN = 1.03
"""How many times as fast as the present number a larger one has to be, so that two that are alike do not
alternate."""
_OLD_WEIGHT = 0.9
"""Weight of the old average of a step's seconds against the next value."""
_MAX_JUMP = 1.25
"""Most by which one step's seconds count as longer or shorter than their average: a turn that did other work
looks long, and the next one looks short."""
_MIN_STEP_SECS = 1e-6
"""Lower bound of a step's seconds, above 0 since speeds are divided by it."""
_TRY_FACTOR = 0.999
"""Factor of a place's counts at each try, so that recent tries count most."""
_IDLE_FACTOR = 0.995
"""Factor of a place's counts at each step without a try, so that its rate goes back to the first guess."""
_FIRST_GUESS = 0.7
"""Rate of a place before any try; it counts as one try."""


def expected_tokens(rates: Sequence[float], num_drafts: int) -> float:
    """Return the tokens that a step with ``num_drafts`` is expected to bring a request. ``rates``: how often
    the draft at each place is right when those before it are."""
    tokens = all_right = 1.0
    for rate in rates[:num_drafts]:
        all_right *= rate
        tokens += all_right
    return tokens


def best_num_drafts(rates: Sequence[float], secs: Sequence[float], present: int) -> int:
    """Return the number of drafts with most tokens a second, or ``present`` if that is smaller and about as
    fast. ``secs``: seconds of a step, by its number of drafts."""
    speeds = [expected_tokens(rates, number) / step_secs for number, step_secs in enumerate(secs)]
    best = max(range(len(speeds)), key=lambda number: speeds[number])
    return best if best < present or speeds[best] > MIN_GAIN * speeds[present] else present


@dataclass
class _Size:
    """Measurements and choices for batches of about one size."""

    secs: list[float]
    """Average seconds of a step, by number of drafts."""
    first_secs: list[list[float]]
    """Seconds of the first FIRST_STEPS steps, by number of drafts."""
    present: int
    """The number of drafts that is chosen outside probes."""
    until_probe: int = PROBE_EVERY
    """Steps until the next probe."""
    probe: int = 0
    """The number of drafts that the probe under way tries."""
    probe_steps: int = 0
    """Steps that are left of the probe; 0 without one."""
    probes_up: bool = False
    """Whether the last probe that was due was to try a larger number. Probes go up and down by turns; one
    that would try less than 0, or more than a step can verify, is left out."""


class _TurnStep(NamedTuple):
    """The step of a turn; two that are equal are like steps."""

    num_reqs: int
    num_drafts: int


class DraftChoice:
    """Chooses numbers of drafts up to ``max_drafts``, which a step can verify."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._sizes: dict[int, _Size] = {}
        self._tries = [0.0] * max_drafts
        """Verified drafts at each place, if all before it were right; old ones count less."""
        self._rights = [0.0] * max_drafts
        """How many of ``_tries`` were right."""
        self._last: _TurnStep | None = None
        """The step of the last turn, which ended at ``_last_at``; None if it had none."""
        self._last_at = 0.0

    @property
    def rates(self) -> list[float]:
        """How often, lately, the draft at each place was right when those before it were."""
        return [
            (right + _FIRST_GUESS) / (tries + 1)
            for right, tries in zip(self._rights, self._tries, strict=True)
        ]

    def choose(self, num_reqs: int, most: int) -> int:
        """Choose the number of drafts of the next step. None of its ``num_reqs`` requests can verify more
        than ``most``."""
        if most == 0:
            return 0
        number = self._choose(num_reqs, most)
        for place in range(number, self._max_drafts):
            self._tries[place] *= _IDLE_FACTOR
            self._rights[place] *= _IDLE_FACTOR
        return number

    def _choose(self, num_reqs: int, most: int) -> int:
        size = self._size(num_reqs)
        for number in range(most, -1, -1):  # numbers that cannot be judged yet come first
            if len(size.first_secs[number]) < FIRST_STEPS:
                return number

        if size.probe_steps:  # a probe is under way
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

    def note_turn(self, num_reqs: int, num_drafts: int, now: float) -> None:
        """Record the end of a turn with a step of ``num_reqs`` requests; 0: without one.

        A step may be read a turn after its launch, so what counts is the time between the ends of two turns
        with like steps.
        """
        step = _TurnStep(num_reqs, num_drafts) if num_reqs else None
        if step is not None and step == self._last:
            self.note_secs(num_reqs, num_drafts, now - self._last_at)
        self._last, self._last_at = step, now

    def note_secs(self, num_reqs: int, num_drafts: int, secs: float) -> None:
        """Record that a step of ``num_reqs`` requests with ``num_drafts`` drafts took ``secs``."""
        size, secs = self._size(num_reqs), max(secs, _MIN_STEP_SECS)
        average, first = size.secs[num_drafts], size.first_secs[num_drafts]
        if len(first) < FIRST_STEPS:  # the median leaves out one that compiled something
            first.append(secs)
            size.secs[num_drafts] = statistics.median(first)
        else:
            bounded = min(max(secs, average / _MAX_JUMP), average * _MAX_JUMP)
            size.secs[num_drafts] = _OLD_WEIGHT * average + (1 - _OLD_WEIGHT) * bounded

    def step_secs(self, num_reqs: int) -> float | None:
        """Return the average seconds of a step of about ``num_reqs`` requests with the number of drafts that
        is chosen at present; None before one was measured."""
        size = self._size(num_reqs)
        return size.secs[size.present] or None

    def note_verified(self, num_drafts: int, num_accepted: int) -> None:
        """Record that ``num_accepted`` of a request's ``num_drafts`` were accepted."""
        for place in range(min(num_drafts, num_accepted + 1)):
            self._tries[place] = _TRY_FACTOR * self._tries[place] + 1
            self._rights[place] = _TRY_FACTOR * self._rights[place] + (place < num_accepted)

    def _size(self, num_reqs: int) -> _Size:
        """Return what is known of a batch's size; batches up to the same power of two are alike."""
        bits = (max(1, num_reqs) - 1).bit_length()
        if bits not in self._sizes:
            count = self._max_drafts + 1
            first_secs: list[list[float]] = [[] for _ in range(count)]
            self._sizes[bits] = _Size([0.0] * count, first_secs, present=self._max_drafts)
        return self._sizes[bits]
