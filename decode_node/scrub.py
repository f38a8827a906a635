"""Verifies rows of hot buffers in place, whether or not a step reads them.

``StepLine`` calls ``before_step``. Every ``STEPS_BETWEEN`` steps one request's hot buffer is verified in one
hot group, before a step that the request is in, and that step's results report wrong rows. By turns, all
requests and hot groups get verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hisparse_pd.base.vocabulary import Mode
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
        hisparse = [request for request in batch if request.mode is Mode.HISPARSE]
        if self._tables.memory.row_checks is None or not hisparse or self._num_steps % STEPS_BETWEEN:
            return
        turn = self._num_steps // STEPS_BETWEEN
        request = hisparse[turn % len(hisparse)]
        self._tables.check_hot(request, turn // len(hisparse) % self._tables.spec.num_hot_groups)
