"""Verifies rows where they lie, in hot buffers and in held prefixes, whether or not a step reads them.

Every few steps one request's hot buffer is verified in one hot group, before a step that the request is in:
wrong rows come with that step's results. An idle turn verifies a stretch of the held prefixes. A fault of the
memory is found before a request needs the row, and an error of ours while the request that it belongs to is
here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.engine.held_rows import HeldRows
from hisparse_pd.kernels.row_check import WrongItem

STEPS_BETWEEN: Final = 32


class Scrubber:
    """Verifies a little at a time; without row checks nothing.

    ``found``: takes a wrong row's page and prefix out of use.
    """

    def __init__(
        self, tables: RequestTables, held: PrefixTree, found: Callable[[PoolKind, WrongItem], None]
    ) -> None:
        memory = tables.memory
        self._tables = tables
        self._num_steps = 0
        self._held_rows: HeldRows | None = None
        if memory.row_checks is not None:
            kv = {PoolKind.HOST: memory.k_host, PoolKind.DEVICE: memory.k_dev}
            self._held_rows = HeldRows(held, tables.page_size, kv, memory.row_checks, found)

    def before_step(self, batch: Sequence[Request]) -> None:
        """Every STEPS_BETWEEN steps, enqueue a check of one hot buffer of the next step's ``batch``."""
        self._num_steps += 1
        hisparse = [request for request in batch if request.mode is Mode.HISPARSE]
        if self._held_rows is None or not hisparse or self._num_steps % STEPS_BETWEEN:
            return
        turn = self._num_steps // STEPS_BETWEEN
        request = hisparse[turn % len(hisparse)]
        self._tables.check_hot(request, turn // len(hisparse) % self._tables.spec.num_hot_groups)

    def when_idle(self) -> None:
        """Verify the next stretch of held prefixes. Waits for the device."""
        if self._held_rows is not None:
            self._held_rows.verify_next()
