"""How the blocks of one ``swap_in`` launch divide the work, and the memory through which they cooperate.

``kernels/cuda.py`` asks for a ``BlockSplit`` for each launch and for the ``Workspace`` of the state that it
works on. Each block looks up a slice of one request's selected positions, and afterwards blocks help each
other with the copies. On 132 multiprocessors, one request of 2,048 positions is cut into 64 slices of 32, one
block each, while each of 128 such requests has one block that looks up all its positions.

Workspaces are kept here, one for each state. The blocks of a launch talk to each other through an area of
device memory, a Round (``csrc/params.cuh`` describes its content), which has to be zero when the launch
begins. A workspace has two of them, which launches use in turn: each launch clears the one of the next.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.cuda_launch import num_multiprocessors
from hisparse_pd.kernels.hot_state import HotBufferState

NUM_PLANNERS = 512
"""Threads of a block that work on positions."""
MAX_BLOCKS = 160
"""Most blocks of one launch."""
ROUND_HEADER_BYTES = 3 * 128 + 2 * 4 * MAX_BLOCKS + 128 * (MAX_BLOCKS // 2)
"""Bytes of csrc/params.cuh's Round: three words with a line of 128 bytes each, two words for each block, and
a line for each request that is split. NUM_PLANNERS and MAX_BLOCKS are the same in csrc/."""

MIN_SLICE_LEN = 32
"""Fewest positions of a block's slice."""
MAX_SLICES_IN_PLACE = 2
"""Requests of up to this many blocks stay on their multiprocessors from launch to launch: these then cache
the address translations for the requests' host rows."""


@dataclass(frozen=True)
class BlockSplit:
    """How the blocks of one launch share its requests. A unit is one slice of one request's positions."""

    num_blocks: int
    num_units: int
    """Units that are worked on at a time, one block each."""
    num_slices: int
    """Slices of one request. Where there are several, all units of the batch are worked on at once."""
    slice_len: int
    """Positions of a slice; a request's last slice may be shorter."""
    left_per_block: int
    """Most copies that one block can leave in ``Workspace.left``, to be made by any block once all have
    planned."""
    keeps_place: bool
    """Whether a request stays on its multiprocessors from launch to launch; there is then one block for each
    multiprocessor, and a block may have no unit."""
    copies: bool
    """Whether the launch copies items; otherwise blocks neither share copies nor keep their place."""

    @classmethod
    def of(cls, num_reqs: int, num_selected: int, num_sms: int, *, copies: bool) -> BlockSplit:
        """Return the split for ``num_reqs`` requests that select ``num_selected`` positions each, on a GPU
        with ``num_sms`` multiprocessors."""
        num_sms = min(num_sms, MAX_BLOCKS)
        # Each request gets as many blocks as the GPU has for it, but no block gets too short a slice.
        most_slices = max(1, min(num_sms // num_reqs, -(-num_selected // MIN_SLICE_LEN)))
        slice_len = -(-num_selected // most_slices)
        num_slices = -(-num_selected // slice_len)
        num_units = min(num_reqs * num_slices, num_sms)
        # Place matters for large batches, which take more than half of the multiprocessors: one cannot cache
        # the address translations for all their requests, but can for those that it has in every launch.
        keeps_place = copies and num_slices <= MAX_SLICES_IN_PLACE and 2 * num_units > num_sms
        return cls(
            num_blocks=num_sms if keeps_place else num_units,
            num_units=num_units,
            num_slices=num_slices,
            slice_len=slice_len,
            left_per_block=-(-num_reqs * num_slices // num_units) * slice_len,
            keeps_place=keeps_place,
            copies=copies,
        )

    @property
    def positions_per_thread(self) -> int:
        """Most positions that one planner thread works on, rounded up to a power of two (1 to 32): a constant
        with which the kernel is compiled."""
        return 1 << (-(-self.slice_len // NUM_PLANNERS) - 1).bit_length()


@dataclass
class Workspace:
    """Memory that the launches on one state share. It lives as long as the state, because captured graphs
    hold its addresses."""

    num_launches: Tensor
    """int32 [1]; its lowest bit says which of the rounds a launch uses."""
    rounds: Tensor
    """uint8 [2, round_bytes]: the struct Round, and bits for the hot buffer entries of split requests."""
    _left: list[Tensor] = field(default_factory=list)
    """All buffers that ``left`` has returned, the largest last: graphs may hold the addresses of each."""

    @classmethod
    def create(cls, state: HotBufferState) -> Workspace:
        most_split_requests = min(num_multiprocessors(state.device), MAX_BLOCKS) // 2
        bit_bytes = 4 * most_split_requests * -(-state.max_capacity // 32)
        round_bytes = round_up(ROUND_HEADER_BYTES + bit_bytes, 16)
        return cls(
            num_launches=torch.zeros(1, dtype=torch.int32, device=state.device),
            rounds=torch.zeros((2, round_bytes), dtype=torch.uint8, device=state.device),
        )

    def left(self, num_copies: int) -> Tensor:
        """Return int32 [>= num_copies, 4]: a buffer for the copies that blocks leave to any block."""
        if not self._left or self._left[-1].shape[0] < num_copies:
            _refuse_in_capture("a batch larger than any before")
            device = self.rounds.device
            self._left.append(torch.zeros((num_copies, 4), dtype=torch.int32, device=device))
            torch.cuda.synchronize(device)  # launches in any stream need the zeros
        return self._left[-1]


_workspaces: dict[int, Workspace] = {}
"""Workspaces by the id of their state."""


def workspace_of(state: HotBufferState) -> Workspace:
    """Return the workspace of ``state``. The first call makes it, and raises KernelArgumentError during a
    graph capture."""
    workspace = _workspaces.get(id(state))
    if workspace is None:
        _refuse_in_capture("a state that was not used before")
        workspace = Workspace.create(state)
        torch.cuda.synchronize(state.device)  # launches in any stream need the zeros
        _workspaces[id(state)] = workspace
        weakref.finalize(state, _workspaces.pop, id(state), None)
    return workspace


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _refuse_in_capture(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise KernelArgumentError(f"state: expected a call before the graph capture, got {what}")
