"""What goes wrong with the rows of the hot buffers' tables: the bits and columns in which kernels report it.

``HotBufferState`` (``hot_state.py``) has ``error_flags`` and ``wrong_rows`` on the device. Kernels on the GPU
and the CPU reference write these values there, and a decode node reads them with the results of each step.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag


class HotBufferError(IntFlag):
    """Bits of ``error_flags``. A set bit means that the row's output of that step has missing slots."""

    NONE = 0
    TOO_MANY_MISSES = 1
    """There were more misses than entries to evict: the capacity is below num_new * top_k + max_new."""
    BAD_POSITION = 2
    """A selected position was outside [0, seq_len)."""
    NO_HOST_SLOT = 4
    """A selected position other than a draft had no host slot, or a new item of a resident row no device
    slot. If it was the first new one, whose item could not be backed up, the row was left out like
    padding."""
    WRONG_ROW = 8
    """An item that was read is not the one that was written for its layer and position: ``wrong_rows`` has
    the first such item. No result computed from it may be used."""


class ReadAt(IntEnum):
    """The reads at which items are checked; the values of ``WrongRowField.READ_AT``."""

    START = 0
    """The fill of a row's tables: warm-up of its hot buffer, or a check of its dense pages."""
    SWAP_IN = 1
    """A copy of a miss."""
    SCRUB = 2
    """A check of an item in place, in the device pool."""


class WrongRowField(IntEnum):
    """Columns of ``wrong_rows``."""

    READ_AT = 0
    """A ``ReadAt``."""
    LAYER = 1
    POSITION = 2
    SLOT = 3
    EXPECTED = 4
    """The row check that was stored when the item was written."""
    ACTUAL = 5
    """The row check of the bytes that were read."""
