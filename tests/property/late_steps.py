"""Steps that a CPU runs as late as a GPU may: behind all that the host does while they are in flight.

A step in flight has run by the time when the next one is launched, or when it is read. What the host does
meanwhile is done before it or behind it, and must not matter to it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hisparse_pd.decode_node.runner import DeviceRunner
from hisparse_pd.decode_node.step_buffers import StepBuffers


class LateSteps:
    """Makes the steps of ``runner`` late, as long as ``patches`` are there: those for which ``is_late``
    returns true. They draw the likeliest tokens, and nothing else."""

    def __init__(self, runner: DeviceRunner, is_late: Callable[[], bool]) -> None:
        self.patches = ExitStack()
        self.num_late = 0
        self._forwards: Any = runner._forwards
        self._is_late = is_late
        self._waiting: Callable[[], None] | None = None
        """Runs the step in flight; None: it has run."""
        runner._forwards = self  # type: ignore[assignment]
        self._send, self._receive, self._wait = StepBuffers.send, StepBuffers.receive, StepBuffers.wait
        for name in ("send", "receive", "wait"):
            late = getattr(self, f"_late_{name}")
            self.patches.enter_context(patch.object(StepBuffers, name, _method(late)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forwards, name)

    def launch(self, num_reqs: int, num_new: int, *, is_split: bool) -> _LateForward:
        return _LateForward(lambda: self._forwards.launch(num_reqs, num_new, is_split=is_split))

    def follow(self, forward: _LateForward) -> _LateResults:
        return _LateResults(lambda: self._forwards.follow(forward.run()))

    def run(self) -> None:
        """Run the step in flight, unless it has run."""
        if (waiting := self._waiting) is not None:
            self._waiting = None
            with torch.inference_mode():
                waiting()

    def _late_send(self, buffers: StepBuffers, *args: Any) -> None:
        self.run()  # before the next step's inputs take the place of its own
        self._send(buffers, *args)

    def _late_receive(self, buffers: StepBuffers, results: _LateResults) -> None:
        self._waiting = lambda: self._receive(buffers, results.run())
        if self._is_late():
            self.num_late += 1
        else:
            self.run()

    def _late_wait(self, buffers: StepBuffers) -> None:
        self.run()
        self._wait(buffers)


class _LateForward:
    """A step's first half."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run


class _LateResults:
    """What a step's second half will have computed."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run = run

    def __getitem__(self, rows: slice) -> _LateResults:
        return _LateResults(lambda: self.run()[rows])


def _method(late: Callable[..., None]) -> Callable[..., None]:
    """Return ``late`` as a function, to which an instance is given as the first argument."""
    return lambda *args: late(*args)
