"""Decides when the ranks of a node make a forward together, and how large it is.

The engine's loop calls ``read_rings`` and ``agree`` in every turn. While any rank has work, all agree before
every forward, because each must take part in it. When none has work, each waits for its own messages. The
first that gets work rings for the others (``rank_bells.py``) and waits for them in the agreement. A ring
carries the agreement's number: one that arrives after that agreement is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparse_pd.core.model.rank_group import RankGroup


@dataclass(frozen=True)
class NodeStep:
    """The forward that all ranks make next. ``num_tokens``: as in ``agree``, the most of any rank; 0: there
    is no forward."""

    num_tokens: int
    is_split: bool = False
    """Whether the batch is split in two, so that one half copies misses while the other computes."""
    is_last: bool = False
    """Whether a rank was told to stop. All stop, and none waits for another any more."""
    num_new: int = 1
    """Positions of each request: its newest token and the drafts that are verified behind it."""


class Lockstep:
    """One rank's part in the agreements; ``ranks`` is None in a node of one rank, which decides alone."""

    def __init__(self, ranks: RankGroup | None) -> None:
        self._ranks = ranks
        self._number = 0
        """Number of the next agreement."""
        self._is_rung = False
        """Whether another rank has rung for the next agreement."""
        self.is_together = False
        """Whether the last agreement was a forward, after which the next is due without a ring."""

    def ends_engine(self, error: Exception) -> bool:
        """Return whether an error in a step ends the engine, and not only the step's requests: the device is
        lost, or other ranks wait for this one in the middle of the model."""
        return self._ranks is not None or isinstance(error, torch.AcceleratorError)

    def read_rings(self) -> None:
        """Read the rings of other ranks. Call it before ``is_due`` and ``agree``."""
        if self._ranks is not None:
            self._is_rung |= self._number in self._ranks.bells.heard()

    @property
    def is_due(self) -> bool:
        """Whether other ranks wait for this one, or soon will."""
        return self.is_together or self._is_rung

    def agree(
        self, num_tokens: int, *, is_split: bool = False, is_stopping: bool = False, num_new: int = 1
    ) -> NodeStep:
        """Agree with the other ranks on the next step; waits for them, unless this rank has no work and
        is not due.

        ``num_tokens``: the requests of a decode rank's step, or the tokens of a prefill rank's. ``is_split``:
        whether this rank wants the step split. ``num_new``: the positions of a request that it wants; all
        ranks take the most. Raises RankGroupError.
        """
        if self._ranks is None:
            return NodeStep(num_tokens, is_split, is_stopping, num_new)
        if not self.is_due:
            if num_tokens == 0 and not is_stopping:
                return NodeStep(0)
            self._ranks.bells.ring(self._number)
        values_of_ranks = self._ranks.agree(num_tokens, is_split, is_stopping, num_new)
        self._number += 1
        self._is_rung = False
        most, any_split, any_stops, num_new = (max(column) for column in zip(*values_of_ranks, strict=True))
        self.is_together = most > 0 and not any_stops
        self._ranks.step_tokens = most  # to which ranks pad theirs where they exchange tokens for experts
        return NodeStep(0 if any_stops else most, bool(any_split), bool(any_stops), num_new)
