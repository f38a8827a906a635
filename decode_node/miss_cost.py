"""Estimates by how much misses lengthen a step, for plans that choose between dense and hisparse. Pure.

``StepLine`` asks ``MissCosts`` for a ``MissCost`` from time to time, and ``NextPlan`` plans with the last.
What a hisparse request misses in a step comes from the host pool over one link, the items of a position, in
all layers, in ``miss_secs``. With a hot buffer of ``c`` entries for a sequence of ``s`` tokens it misses
``w / c - w / s`` positions: in long sequences misses halve with each doubling (docs/decisions.md), and where
all tokens have an entry there are none; ``w`` is ``missed_entries``. Hot buffers miss least together if they
share their device slots evenly: ``h`` of them in ``r`` slots miss up to ``h * w / (r / h)``.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hisparse_pd.decode_node.request import Request

FIRST_MISSES: Final = 0.5
"""The share of selected positions that a hot buffer of twice as many entries is taken to miss in a long
sequence before any was seen. Published shares are 13 and 33%. The first request with a hot buffer shows the
true one. Until then too many dense requests cost less than too many that miss."""
STALE_AFTER: Final = 350
"""Estimates without a hot buffer after which what was missed before may not hold any more. The request that
shows whether it does may be slower than dense ones to its end, and is to be rare."""
NEW_WEIGHT: Final = 0.2
"""Weight of a new value against the mean of those before it."""
MOST_MISSES: Final = 0.25
"""The largest part of a step in which misses may cross the link if the rest is to count as its time without
misses."""
LEAST_ROOM: Final = 0.25
"""The smallest part of a sequence that must be outside a hot buffer if its misses are to count: in a larger
one they are few, whichever positions are selected, and say little."""


@dataclass(frozen=True)
class MissCost:
    """The present cost of misses. By default there is none."""

    missed_entries: float = 0.0
    """Positions that a request misses in a step, times the entries of its hot buffer, in a sequence without
    end."""
    miss_secs: float = 0.0
    """Seconds in which the items of a position, in all layers, come from the host pool. 0 if not known."""
    request_secs: float = float("inf")
    """Seconds of a step for each of its requests, without those by which a request makes it longer even if it
    misses nothing; infinite if not known."""
    fixed_secs: float = 0.0
    """Seconds of a step that it takes for any number of requests. 0 if not known."""
    growth_secs: float = 0.0
    """Seconds by which a request makes a step longer if it misses nothing."""
    is_stale: bool = False
    """Whether nobody has had a hot buffer for long, or ever."""

    def num_missed(self, num_hot: int, num_slots: int, most: int, seq_len: float = math.inf) -> float:
        """Return the positions that ``num_hot`` hot buffers miss in a step if they share ``num_slots`` device
        slots, and have no more than ``most`` entries each. ``seq_len``: the mean length of their
        sequences."""
        if num_hot == 0:
            return 0.0
        entries = max(1.0, min(most, num_slots / num_hot))
        return num_hot * self.missed_entries * max(0.0, 1 / entries - 1 / seq_len)

    def secs_of(self, hot_capacity: int) -> float:
        """Return the seconds by which a request with ``hot_capacity`` entries makes a step longer."""
        return self.miss_secs * self.missed_entries / hot_capacity

    @property
    def tells_speed(self) -> bool:
        """Whether ``tokens_per_sec`` is known, and misses cost something, as with a GPU."""
        return self.fixed_secs > 0 and self.miss_secs > 0

    def tokens_per_sec(self, num_reqs: int, num_missed: float) -> float:
        """Return the tokens a second of steps of ``num_reqs`` requests that miss ``num_missed`` positions
        together; 0 if the time of steps is not known."""
        step_secs = self.fixed_secs + self.growth_secs * num_reqs + self.miss_secs * num_missed
        return num_reqs / step_secs if self.fixed_secs > 0 else 0.0

    def most_hot(self, num_slots: int) -> float:
        """Return how many hot buffers that share ``num_slots`` device slots make most tokens a second: with
        that many, what is missed takes as long as what a step takes for any number of requests."""
        num_missed = self.missed_entries / max(1, num_slots)  # of a hot buffer that is alone
        miss_secs = self.miss_secs * num_missed
        return math.sqrt(self.fixed_secs / miss_secs) if miss_secs > 0 else math.inf

    def pays(self, num_missed: float) -> bool:
        """Return whether one more request in each step is worth ``num_missed`` more misses."""
        return num_missed * self.miss_secs < self.request_secs


CHEAP: Final = MissCost()
"""The cost of misses without a GPU as long as none was seen."""


class MissCosts:
    """Follows what requests miss, and how long steps take."""

    def __init__(
        self, index_topk: int, miss_secs: float, step_secs: Mapping[int, float] | None = None
    ) -> None:
        """``index_topk``: the positions that a step selects. ``miss_secs``: see ``MissCost``. ``step_secs``:
        seconds of steps that miss nothing, by their number of requests, as measured at the node's start."""
        self._index_topk = index_topk
        self._miss_secs = miss_secs
        first_entries = FIRST_MISSES * index_topk * 2 * index_topk
        self._missed_entries = first_entries if miss_secs else 0.0
        self._num_unseen = STALE_AFTER
        """Estimates since the last that saw what a hot buffer misses."""
        self._by_size = {_size(num): (float(num), secs) for num, secs in (step_secs or {}).items()}
        """The mean number of requests of a step, and its mean seconds without misses. Steps of up to the same
        power of two are alike."""
        self._is_clear = set(self._by_size)
        """The sizes of which there were steps that missed little, or nothing."""

    def estimate(self, batch: Sequence[Request], step_secs: float | None) -> MissCost:
        """Return the present cost. ``batch``: the requests of a step that takes ``step_secs``, which is None
        if that is not known. Among those with hot buffers, the ones that have selected most count most."""
        num_selected, weighted, num_missed = 0, 0.0, 0.0
        for request in batch:
            if request.hot_capacity:
                counters = request.row_counters
                num_missed += self._index_topk * counters.miss_share
                room = 1 - request.hot_capacity / request.next_seq_len
                if room >= LEAST_ROOM:
                    num_selected += counters.hits + counters.misses
                    weighted += counters.misses * request.hot_capacity / room
        self._num_unseen += 1
        if num_selected:
            self._missed_entries = self._index_topk * weighted / num_selected
            self._num_unseen = 0
        if step_secs is None:
            return self.present()
        self._note_step(len(batch), step_secs, num_missed * self._miss_secs)
        return self.present(len(batch), step_secs)

    def present(self, num_reqs: int = 0, step_secs: float = math.inf) -> MissCost:
        """Return the cost as it is known by now, where a step of ``num_reqs`` requests takes ``step_secs``.
        Without them, the largest steps that are known say what any step takes."""
        growth = fixed = 0.0
        if self._by_size:
            growth, fixed = self._line(_size(num_reqs) if num_reqs else max(self._by_size))
        return MissCost(
            missed_entries=self._missed_entries,
            miss_secs=self._miss_secs,
            request_secs=max(0.0, step_secs / max(1, num_reqs) - growth),
            fixed_secs=fixed,
            growth_secs=growth,
            is_stale=self._num_unseen >= STALE_AFTER,
        )

    def link_share(self, num_missed: float, step_secs: float | None) -> float:
        """Return the share of a step of ``step_secs`` in which ``num_missed`` positions come from the host
        pool; 0 while it is not known, as without a GPU."""
        return min(1.0, num_missed * self._miss_secs / step_secs) if step_secs else 0.0

    def _note_step(self, num_reqs: int, step_secs: float, of_misses: float) -> None:
        """Note that a step of ``num_reqs`` requests takes ``step_secs``, ``of_misses`` of it for misses. What
        it takes without them is a poor guess where they take long, and counts for want of a better one."""
        size = _size(num_reqs)
        if of_misses <= MOST_MISSES * step_secs:
            self._is_clear.add(size)
        elif size in self._is_clear:
            return
        secs = max(step_secs / 2, step_secs - of_misses)
        mean_reqs, mean_secs = self._by_size.get(size, (float(num_reqs), secs))
        mean_reqs += NEW_WEIGHT * (num_reqs - mean_reqs)
        mean_secs += NEW_WEIGHT * (secs - mean_secs)
        self._by_size[size] = mean_reqs, mean_secs

    def _line(self, size: int) -> tuple[float, float]:
        """Return by how many seconds one more request makes a step of about that size longer, misses apart,
        and what it takes for any number. It is compared with the largest of at most half as many requests, or
        else with the smallest of at least twice as many."""
        reqs, secs = self._by_size[size]
        points = sorted(self._by_size.values())
        fewer = [point for point in points if 2 * point[0] <= reqs]
        more = [point for point in points if point[0] >= 2 * reqs]
        if not (fewer or more):
            return 0.0, secs
        other_reqs, other_secs = fewer[-1] if fewer else more[0]
        growth = max(0.0, (secs - other_secs) / (reqs - other_reqs))
        return growth, max(0.0, secs - growth * reqs)


def _size(num_reqs: int) -> int:
    """Return a number that is the same for steps of up to the same power of two."""
    return (num_reqs - 1).bit_length()
