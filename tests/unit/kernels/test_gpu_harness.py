"""The checks of ``tests/gpu`` on the CPU: they pass there, and notice a swap-in that is not the oracle's."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from kernels import reference
from kernels.hot_state import HITS, HotBufferState, StepRequests
from tests.gpu.decoder import Decoder
from tests.gpu.history import History
from tests.gpu.pools import Layout
from tests.gpu.support import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu runs them where there is a GPU")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"has_faults": True, "capacities": (2, 10, 25, 60)},
        {"host_layout": Layout(is_slot_major=True, gap=3), "dev_layout": Layout(gap=5, offset=1)},
        {"max_new": 4, "capacities": (100, 101, 130), "max_context": 200},
        {"max_new": 3, "has_faults": True, "capacities": (3, 10, 25, 60)},
    ],
    ids=["plain", "faults", "strided", "drafts", "drafts and faults"],
)
def test_history(options: dict[str, Any]) -> None:
    History(1, 24, **options).run(60)


@pytest.mark.parametrize(("max_new", "capacity"), [(1, 20), (3, 53)])
def test_decoder(max_new: int, capacity: int) -> None:
    decoder = Decoder(1, (3, 9), top_k=16, capacity=capacity, max_context=100, max_new=max_new)
    for step in range(12):
        size = (3, 9)[step % 2]
        decoder.prepare(size, 1 + step % max_new)
        decoder.replay(size)
        decoder.check()
    decoder.finish()


def spoil(table: str, state: HotBufferState, out: Tensor, copies: tuple[Any, Any]) -> tuple[Any, Any]:
    match table:
        case "stamps":
            state.stamps[state.stamps > 0] -= 1
        case "counters":
            state.counters[:, HITS] += 1
        case "lookup_to_hot":
            state.lookup_to_hot[0, -2] = 0
        case "hot_to_lookup":
            state.hot_to_lookup[0, :, :2] = state.hot_to_lookup[0, :, :2].flip(1)
        case "out":
            out[out >= 0] += 1
        case "copies":
            return copies[0][:-1], copies[1][:-1]
    return copies


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("stamps", "stamps"),
        ("counters", "counters"),
        ("lookup_to_hot", "lookup_to_hot is not the inverse"),
        ("hot_to_lookup", "hot_to_lookup|inverse"),
        ("out", "device slots"),
        ("copies", "planned copies"),
    ],
)
def test_a_difference_is_noticed(table: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(selected: Tensor, requests: StepRequests, group: int, out: Tensor) -> tuple[Any, Any]:
        return spoil(table, requests.state, out, original(selected, requests, group, out))

    original = reference.resolve
    monkeypatch.setattr(reference, "resolve", resolve)
    with pytest.raises(AssertionError, match=message):
        History(1, 24, has_dense=False).run(20)
