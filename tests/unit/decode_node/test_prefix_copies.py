"""Copies of held prefixes from pool to pool, a slice a turn, and nothing beside them."""

from __future__ import annotations

import pytest

from tests.unit.decode_node.copies_support import (
    NUM_LAYERS,
    Copying,
    check_finish_and_drop,
    check_turns,
    empty_pools,
)
from vocabulary import Mode


@pytest.mark.parametrize("mode", list(Mode))
def test_a_prefix_is_copied_in_slices(mode: Mode) -> None:
    # 40 tokens of three layers, five in a turn, and half as large indexer keys of two. A turn may end early
    # where the extents of one of the two end.
    num_turns = NUM_LAYERS * 40 // 5 + (NUM_LAYERS - 1) * 40 // 10
    assert num_turns < check_turns(Copying(mode, *empty_pools())) <= num_turns + 2


@pytest.mark.parametrize("mode", list(Mode))
def test_what_is_left_is_copied_at_once_or_not_at_all(mode: Mode) -> None:
    check_finish_and_drop(Copying(mode, *empty_pools()))
