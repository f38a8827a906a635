"""A rank's place among others that are not there."""

from __future__ import annotations

from torch import Tensor

from hisparse_pd.core.model.rank_group import RankGroup


class RankStandIn(RankGroup):
    """Has its share of the experts as a rank of ``size`` has; only one of one can compute, with itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.step_tokens = rank, size, 0

    def gather(self, x: Tensor) -> Tensor:
        assert self.size == 1
        return x

    def sum_own(self, x: Tensor) -> Tensor:
        assert self.size == 1
        return x
