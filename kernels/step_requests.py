"""The requests of one step on the tables of the hot buffers, and the entries of their new positions.

``swap_in.py``'s functions take a ``StepRequests``. A request's new positions are those of its newest token
and its drafts; ``ring_entries`` fixes where each goes in the hot buffer, on the CPU as on the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import check_range, check_tensor
from hisparse_pd.kernels.hot_state import INTEGERS, HotBufferState


@dataclass(frozen=True)
class StepRequests:
    """The requests of one step on the tables of ``state``; padding comes last.

    Raises KernelArgumentError. Values in tensors are checked by the kernels: a GPU treats a request with a
    value out of range as padding, the CPU raises KernelArgumentError.
    """

    state: HotBufferState
    seq_lens: Tensor
    """int32 or int64 [num_reqs], tokens of each request including the last new one: its new positions are
    [seq_len - num_new, seq_len). The first new position must be inside the context. Others may be beyond it,
    or beyond the request's pages: such a draft has no slot (-1), and changes nothing."""
    req_rows: Tensor
    """int32 or int64 [num_reqs], distinct rows of the tables, all in [0, num_rows)."""
    num_real_reqs: Tensor
    """int32 [1]; requests from this index on are padding and are ignored."""
    num_new: int = 1
    """New positions of each request, 1 to ``state.max_new``: the newest token's and its drafts'."""

    def __post_init__(self) -> None:
        device, num_reqs = self.state.device, self.seq_lens.shape[0]
        check_tensor("seq_lens", self.seq_lens, dtypes=INTEGERS, shape=(num_reqs,), device=device)
        check_tensor("req_rows", self.req_rows, dtypes=INTEGERS, shape=(num_reqs,), device=device)
        check_tensor("num_real_reqs", self.num_real_reqs, dtypes=(torch.int32,), shape=(1,), device=device)
        check_range("num_new", self.num_new, 1, self.state.max_new + 1)

    @property
    def num_reqs(self) -> int:
        return self.seq_lens.shape[0]


def ring_entries(
    positions: npt.NDArray[np.int64], capacity: npt.NDArray[np.int64], max_new: int
) -> npt.NDArray[np.int64]:
    """Return the hot_index of ``positions`` in a step in which they are new; arguments broadcast.

    This is the position itself while that is below ``capacity``. Later positions take the last ``max_new``
    entries, the ring, in turn: with a capacity of 100 and a ``max_new`` of 4, position 99 is at hot_index 99,
    and 100, 101, 102, 103, 104 are at 96, 97, 98, 99, 96.

    A row fits while the ``max_new`` positions from its first new one on are all below ``capacity``: then any
    position is at the hot_index of its own number. Once a row does not fit, positions that are not new are
    anywhere below the ring. It must not fit again later; therefore the first new position decides, and not
    the last one, which rejected drafts move back.

    A rejected draft stays in its entry until its position is new again. No look-up finds it: until then the
    position is at or beyond every ``seq_len``, and when it is new it gets the same entry.
    """
    in_ring = capacity - max_new + (positions - capacity) % max_new
    return np.where(positions < capacity, positions, in_ring)
