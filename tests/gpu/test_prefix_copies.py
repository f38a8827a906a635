"""Copies of held prefixes between registered main memory and a GPU, beside what its stream does."""

from __future__ import annotations

import pytest

from kernels.host_memory import allocate_host
from tests.gpu.support import DEVICE, needs_gpu
from tests.unit.decode_node.copies_support import Copying, check_finish_and_drop, check_turns, empty_pools
from vocabulary import Mode

pytestmark = needs_gpu


@pytest.mark.I1
@pytest.mark.parametrize("mode", list(Mode))
def test_a_prefix_crosses_in_slices(mode: Mode) -> None:
    like, k_dev = empty_pools(device=DEVICE)
    pool = allocate_host(like.nbytes, pinned=True, name="pool")
    try:
        check_turns(Copying(mode, pool.tensor[: like.nbytes].view(like.shape), k_dev))
    finally:
        pool.close()


@pytest.mark.I1
@pytest.mark.parametrize("mode", list(Mode))
def test_after_a_drop_nothing_is_copied_any_more(mode: Mode) -> None:
    like, k_dev = empty_pools(device=DEVICE)
    pool = allocate_host(like.nbytes, pinned=True, name="pool")
    try:
        check_finish_and_drop(Copying(mode, pool.tensor[: like.nbytes].view(like.shape), k_dev))
    finally:
        pool.close()
