"""Measures how long work takes on a GPU, by events around it: once (``timed_us``), or the calls of a CUDA
graph (``graph_us``). The benchmarks of kernels, swap-in and exchanges use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from tools.bench.facts import spread

NUM_REPLAYS: Final = 11
"""Timed replays of a graph."""
_LAUNCHING_CYCLES: Final = 1_000_000
"""Cycles that the GPU waits first, so that the host has launched everything before the work begins."""


def timed_us(run: Callable[[], object], before: Callable[[], object] | None = None) -> float:
    """Return the us of what ``run`` launches, after what ``before`` launches."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(_LAUNCHING_CYCLES)
    if before is not None:
        before()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def graph_us(
    calls: Sequence[Callable[[], object]], before: Callable[[], object] | None = None
) -> dict[str, Any]:
    """Return the ``spread``, over NUM_REPLAYS replays, of the us of a call.

    All ``calls`` are captured in one graph; a call's us are a replay's divided by their number. Each call is
    made once before the capture. What ``before`` launches comes before each replay and is not timed.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    timed_us(graph.replay, before)
    return spread([timed_us(graph.replay, before) / len(calls) for _ in range(NUM_REPLAYS)])
