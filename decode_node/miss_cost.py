"""Estimates by how much misses lengthen a step, for plans that choose between dense and hisparse. Pure.

``StepLine`` asks ``MissCosts`` for a ``MissCost`` from time to time, and ``NextPlan`` plans with the last.
What a hisparse request misses in a step comes from the host pool over one link, the items of a position, in
all layers, in ``miss_secs``. With a hot buffer of ``c`` entries it misses ``w / c`` positions, since misses
halve with each doubling (docs/decisions.md); ``w`` is ``missed_entries``. Hot buffers miss least together if
they share their device slots evenly: ``h`` of them in ``r`` slots miss ``h * w / (r / h)``.

A step of ``n`` requests that takes ``t`` seconds yields ``n / t`` tokens a second. One more request makes
that more if it adds less than ``t / n`` seconds: then (n + 1) / (t + added) > n / t. It adds ``g`` seconds of
computing, by what steps of fewer requests take, and the time of all that is missed more with it. So a
hisparse request pays if the latter is less than ``request_secs``, which is ``t / n - g``.

A step takes ``f`` seconds for any number of requests (``fixed_secs``), and ``f + n * g`` for ``n`` that miss
nothing. ``n`` hot buffers that share ``r`` device slots miss ``n * n * w / r`` positions. Their tokens a
second are most with as many hot buffers as miss for ``f`` seconds. If the dense requests whose pages fit into
``r`` slots make more, hisparse ones cost more than they bring, however many run.

Example: A.X-K2-Light misses 67% of 2,048 positions, in 48 layers of 320 bytes: 21 MB, or 0.38 ms at 55 GB/s.
A step of 61 dense requests takes 16.4 ms, 0.27 a request, ``g`` included: one more hisparse request does not
pay. A step of one takes 4.5 ms, and one more dense request makes it 0.2 ms longer: there it pays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hisparse_pd.decode_node.request import Request

FADE: Final = 0.998
"""Factor of ``missed_entries`` at each estimate without a hot buffer, so that one high figure does not rule
hisparse out for good: it is half after 346 estimates. Those that show then whether it still holds may be
slower than dense ones to their end, and are to be few."""
NEW_WEIGHT: Final = 0.2
"""Weight of a new value against the mean of those before it."""


@dataclass(frozen=True)
class MissCost:
    """What misses cost at present. By default that is nothing."""

    missed_entries: float = 0.0
    """Positions that a request misses in a step, times the entries of its hot buffer. 0 before any was
    seen."""
    miss_secs: float = 0.0
    """Seconds in which the items of a position, in all layers, come from the host pool. 0 if not known."""
    request_secs: float = float("inf")
    """Seconds of a step for each of its requests, without those by which a request makes it longer even if it
    misses nothing; infinite if not known."""
    fixed_secs: float = 0.0
    """Seconds of a step that it takes for any number of requests. 0 if not known."""
    growth_secs: float = 0.0
    """Seconds by which a request makes a step longer if it misses nothing."""

    def num_missed(self, num_hot: int, num_slots: int, most: int) -> float:
        """Return the positions that ``num_hot`` hot buffers miss in a step if they share ``num_slots`` device
        slots, and have no more than ``most`` entries each."""
        if num_hot == 0:
            return 0.0
        return num_hot * self.missed_entries / max(1.0, min(most, num_slots / num_hot))

    def secs_of(self, hot_capacity: int) -> float:
        """Return the seconds by which a request with ``hot_capacity`` entries makes a step longer."""
        return self.miss_secs * self.missed_entries / hot_capacity

    def tokens_per_sec(self, num_reqs: int, num_missed: float) -> float:
        """Return the tokens a second of steps of ``num_reqs`` requests that miss ``num_missed`` positions
        together; 0 if the time of steps is not known."""
        step_secs = self.fixed_secs + self.growth_secs * num_reqs + self.miss_secs * num_missed
        return num_reqs / step_secs if self.fixed_secs > 0 else 0.0

    def most_hot(self, num_slots: int) -> float:
        """Return how many hot buffers that share ``num_slots`` device slots make most tokens a second: with
        that many, what is missed takes as long as what a step takes for any number of requests."""
        num_missed = self.missed_entries / max(1, num_slots)  # by one, if there is one
        miss_secs = self.miss_secs * num_missed
        return math.sqrt(self.fixed_secs / miss_secs) if miss_secs > 0 else math.inf

    def pays(self, num_missed: float) -> bool:
        """Return whether one more request in each step is worth ``num_missed`` more misses."""
        return num_missed * self.miss_secs < self.request_secs


CHEAP: Final = MissCost()
"""What misses are taken to cost before any was seen."""


class MissCosts:
    """Follows what requests miss. ``index_topk``: the positions that a step selects; ``miss_secs``: see
    ``MissCost``."""

    def __init__(self, index_topk: int, miss_secs: float) -> None:
        self._index_topk = index_topk
        self._miss_secs = miss_secs
        self._missed_entries = 0.0
        self._by_size: dict[int, tuple[float, float]] = {}
        """The mean number of requests of a step, and its mean seconds without misses. Steps of up to the same
        power of two are alike."""

    def estimate(self, batch: Sequence[Request], step_secs: float | None) -> MissCost:
        """Return the present cost. ``batch``: the requests of a step that takes ``step_secs``. Of those with
        hot buffers these count most that have selected most."""
        num_selected, weighted, num_missed = 0, 0.0, 0.0
        for request in batch:
            if request.hot_capacity:
                counters = request.row_counters
                num_selected += counters.hits + counters.misses
                weighted += counters.misses * request.hot_capacity
                num_missed += self._index_topk * counters.miss_share
        if num_selected:
            self._missed_entries = self._index_topk * weighted / num_selected
        else:
            self._missed_entries *= FADE
        if step_secs is None:
            return MissCost(self._missed_entries, self._miss_secs)
        without_misses = max(step_secs / 2, step_secs - num_missed * self._miss_secs)
        growth = self._growth(len(batch), without_misses)
        return MissCost(
            missed_entries=self._missed_entries,
            miss_secs=self._miss_secs,
            request_secs=step_secs / len(batch) - growth,
            fixed_secs=max(0.0, without_misses - growth * len(batch)),
            growth_secs=growth,
        )

    def link_share(self, num_missed: float, step_secs: float | None) -> float:
        """Return the share of a step of ``step_secs`` in which ``num_missed`` positions come from the host
        pool; 0 while it is not known, as without a GPU."""
        return min(1.0, num_missed * self._miss_secs / step_secs) if step_secs else 0.0

    def _growth(self, num_reqs: int, secs: float) -> float:
        """Return by how many seconds one more request makes a step longer, misses apart, as far as steps of
        fewer requests are known. ``secs``: those of a step of ``num_reqs``."""
        size = (num_reqs - 1).bit_length()
        mean_reqs, mean_secs = self._by_size.get(size, (float(num_reqs), secs))
        mean_reqs += NEW_WEIGHT * (num_reqs - mean_reqs)
        mean_secs += NEW_WEIGHT * (secs - mean_secs)
        self._by_size[size] = mean_reqs, mean_secs
        smaller = max((other for other in self._by_size if other < size), default=None)
        if smaller is None:
            return 0.0
        fewer_reqs, fewer_secs = self._by_size[smaller]
        return max(0.0, (mean_secs - fewer_secs) / (mean_reqs - fewer_reqs))
