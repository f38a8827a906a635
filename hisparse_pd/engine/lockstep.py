"""When the ranks of a node make a forward together, and how large it is.

While any rank has work, all agree before every forward, so that none is missing in it. When none has, each
waits for its own messages. The first that gets work rings for the others, and waits for them in the
agreement, whose number the ring carries: one that comes late is for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparse_pd.core.model.rank_group import RankGroup


@dataclass(frozen=True)
class NodeStep:
    """What all ranks do next. ``num_tokens``: of the rank that has most; 0: no forward."""

    num_tokens: int
    is_split: bool = False
    is_last: bool = False
    """A rank was told to stop: all do, and none waits for another any more."""
    num_new: int = 1
    """Positions of each request: its newest token, and the drafts behind it that are verified."""


class Lockstep:
    """One rank's part in it. A node of one rank agrees with itself."""

    def __init__(self, ranks: RankGroup | None) -> None:
        self._ranks = ranks
        self._number = 0
        self._is_rung = False
        self.is_together = False
        """The last agreement was a forward: the next one is due without a ring."""

    @property
    def has_others(self) -> bool:
        """Other ranks are in the middle of the model wherever this one is."""
        return self._ranks is not None

    def hear(self) -> None:
        """Take in what other ranks have rung. Before ``is_due`` and ``agree``."""
        if self._ranks is not None:
            self._is_rung |= self._number in self._ranks.bells.heard()

    @property
    def is_due(self) -> bool:
        """Others wait for this rank, or soon will."""
        return self.is_together or self._is_rung

    def agree(
        self, num_tokens: int, *, is_split: bool = False, is_stopping: bool = False, num_new: int = 1
    ) -> NodeStep:
        """``num_tokens``: requests of this rank, or the tokens that it computes. ``is_split``: it would like
        the step split. ``num_new``: positions of a request that it would like; all ranks take the most.

        Waits for the other ranks, unless nobody has work. Raises RankGroupError.
        """
        if self._ranks is None:
            return NodeStep(num_tokens, is_split, is_stopping, num_new)
        has_news = num_tokens > 0 or is_stopping
        if not self.is_due:
            if not has_news:
                return NodeStep(0)
            self._ranks.bells.ring(self._number)
        said = self._ranks.agree(num_tokens, is_split, is_stopping, num_new)
        self._number += 1
        self._is_rung = False
        most, any_split, any_stops, num_new = (max(column) for column in zip(*said, strict=True))
        self.is_together = most > 0 and not any_stops
        self._ranks.step_tokens = most
        return NodeStep(0 if any_stops else most, bool(any_split), bool(any_stops), num_new)
