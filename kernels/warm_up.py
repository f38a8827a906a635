"""Plans which positions ``swap_in.RowStart`` puts into a new row's hot buffers (``plan_warm_up``).

``RowStart`` then copies them layer by layer (``FilledLayer``). A row that fits gets all of its tokens;
otherwise the hint says which tokens the next step will probably select. Numpy alone; both the
CPU reference and the CUDA kernel carry the plan out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.hot_state import ABSENT

FILL_BLOCKS = 12
"""Most blocks of a launch that fills a row. Each takes a multiprocessor from concurrent steps, and so few
already fill PCIe."""


class FilledLayer(NamedTuple):
    """A KV layer into which ``swap_in.RowStart`` copies the items of warm positions. csrc/params.cuh has the
    same struct."""

    layer: int
    group: int
    enters: int
    """1 for the first layer of its group, with which the group's tables are filled; otherwise 0."""


@dataclass(frozen=True)
class WarmUp:
    """The positions that ``RowStart`` puts at hot_index 0, 1, … of every group."""

    num_warm: npt.NDArray[np.int32]
    """[num_groups]: how many positions of each group are warm."""
    positions: npt.NDArray[np.int32]
    """[num_groups, n], or [1, n] when all groups share them; of each row the first ``num_warm`` count."""

    def positions_of(self, group: int) -> npt.NDArray[np.int64]:
        """Return the positions of ``group``, in the order of their hot_index."""
        warm = self.positions[group if len(self.positions) > 1 else 0]
        chosen: npt.NDArray[np.int64] = warm[: self.num_warm[group]].astype(np.int64)
        return chosen


def plan_warm_up(
    num_groups: int,
    capacity: int,
    max_new: int,
    num_tokens: int,
    hints: Sequence[npt.NDArray[np.int32]] | None,
) -> WarmUp:
    """Return the positions to warm up; see ``kernels.swap_in.RowStart``. Raises KernelArgumentError.

    A hint without duplicates and ABSENT, the usual case, is taken as it is.
    """
    if num_tokens + max_new <= capacity:
        everything = np.arange(num_tokens, dtype=np.int32)
        return WarmUp(np.full(num_groups, num_tokens, np.int32), everything[None])
    if hints is None:
        num_warm = capacity - max_new
        latest = np.arange(num_tokens - 1, num_tokens - 1 - num_warm, -1, dtype=np.int32)
        return WarmUp(np.full(num_groups, num_warm, np.int32), latest[None])
    if len(hints) not in (1, num_groups):
        raise KernelArgumentError(f"hints: expected one, or one for each of {num_groups}, got {len(hints)}")
    chosen = [_first_distinct(hint, num_tokens)[: capacity - max_new] for hint in hints]
    nums_warm = np.array([len(of_group) for of_group in chosen], np.int32)
    positions = np.zeros((len(chosen), max(nums_warm)), np.int32)
    for padded, of_group in zip(positions, chosen, strict=True):
        padded[: len(of_group)] = of_group
    return WarmUp(np.broadcast_to(nums_warm, (num_groups,)).copy(), positions)


def _first_distinct(hint: npt.NDArray[np.int32], num_tokens: int) -> npt.NDArray[np.int32]:
    """Return ``hint`` without ABSENT and later duplicates. Raises KernelArgumentError for a position outside
    [0, num_tokens)."""
    ordered = np.sort(hint)
    if len(ordered) and (ordered[0] < ABSENT or ordered[-1] >= num_tokens):
        lowest = int(hint[hint != ABSENT].min())
        raise KernelArgumentError(
            f"hints: expected values in [0, {num_tokens}), got {lowest} to {int(ordered[-1])}"
        )
    if len(ordered) == 0 or (ordered[0] >= 0 and (ordered[1:] != ordered[:-1]).all()):
        return hint
    hint = hint[hint != ABSENT]
    _, first_seen = np.unique(hint, return_index=True)
    distinct: npt.NDArray[np.int32] = hint[np.sort(first_seen)]
    return distinct
