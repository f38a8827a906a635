"""Verifies rows of hot buffers that nobody reads just now, where they lie.

Every few steps one request's hot buffer is gone through in one index group, before a step that the request is
in: what is wrong comes with that step's results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.decode_node.hot_buffers import HotBuffers
from hisparse_pd.decode_node.request import Request

STEPS_BETWEEN: Final = 32


class Scrubber:
    """Does nothing where the node has no row checks."""

    def __init__(self, hot_buffers: HotBuffers) -> None:
        self._hot_buffers = hot_buffers
        self._num_steps = 0

    def before_step(self, batch: Sequence[Request]) -> None:
        """Now and then, launch a look at one hot buffer of ``batch``, which the next step is made for."""
        self._num_steps += 1
        hisparse = [request for request in batch if request.mode is Mode.HISPARSE]
        if self._hot_buffers.memory.row_checks is None or not hisparse or self._num_steps % STEPS_BETWEEN:
            return
        turn = self._num_steps // STEPS_BETWEEN
        request = hisparse[turn % len(hisparse)]
        self._hot_buffers.check_hot(request, turn // len(hisparse) % self._hot_buffers.spec.num_hot_groups)
