"""Verifies rows of hot buffers in place, whether or not a step reads them.

``StepLine`` calls ``before_step``. Every ``STEPS_BETWEEN`` steps one request's hot buffer is verified in one
hot group, before a step that the request is in, and that step's results report wrong rows. By turns, all
requests and hot groups get verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_tables import RequestTables

STEPS_BETWEEN: Final = 32
"""Steps from one verified hot buffer to the next."""


class Scrubber:
    """Verifies hot buffers a little at a time; does nothing without row checks."""

    def __init__(self, tables: RequestTables) -> None:
        self._tables = tables
        self._num_steps = 0

    def before_step(self, batch: Sequence[Request]) -> None:
        """Every STEPS_BETWEEN steps, enqueue a check of one hot buffer of the next step's ``batch``."""
        self._num_steps += 1
        with_buffer = [request for request in batch if request.hot_capacity]
        if self._tables.memory.row_checks is None or not with_buffer or self._num_steps % STEPS_BETWEEN:
            return
        turn = self._num_steps // STEPS_BETWEEN
        request = with_buffer[turn % len(with_buffer)]
        self._tables.check_hot(request, turn // len(with_buffer) % self._tables.spec.num_hot_groups)
