"""The checks of ``tests/gpu`` on the CPU, where they pass too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.decoder import Decoder
from tests.gpu.history import History, live_from_nothing
from tests.gpu.support import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu runs them where there is a GPU")


def test_a_history_without_verified_rows() -> None:
    """Other histories are those of ``tests/property/test_hot_buffer.py``."""
    History(1, 24, verifies=False).run(30)


@pytest.mark.I6
@pytest.mark.parametrize("max_new", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_requests_begin_with_nothing(max_new: int) -> None:
    live_from_nothing(24, max_new)


@pytest.mark.parametrize(
    ("num_steps", "options"),
    [
        pytest.param(40, {"max_new": 3}, id="drafts"),
        pytest.param(120, {"copy_blocks": 2}, id="planned", marks=pytest.mark.slow),
    ],
)
def test_wrong_rows_are_found(num_steps: int, options: dict[str, Any]) -> None:
    history = History(
        2,
        9,
        wrong_rows=1.0,
        has_dense=False,
        capacities=(75, 90, 120),
        max_context=200,
        **options,
    )
    history.run(num_steps)
    assert history.num_found > 5


@pytest.mark.parametrize(("max_new", "capacity"), [(1, 20), (3, 53)])
def test_decoder(max_new: int, capacity: int) -> None:
    decoder = Decoder(1, (3, 9), top_k=16, capacity=capacity, max_context=100, max_new=max_new)
    for step in range(12):
        size = (3, 9)[step % 2]
        decoder.prepare(size, 1 + step % max_new)
        decoder.replay(size)
        decoder.check()
    decoder.finish()
