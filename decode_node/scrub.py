"""Verifies rows that nobody reads just now, where they lie: in hot buffers, and in held prefixes.

Every few steps one request's hot buffer is gone through in one index group, before a step that the request is
in: what is wrong comes with that step's results. In an idle turn it is a stretch of the held prefixes. So a
fault of the memory is found before somebody needs the row, and one of ours with the request that it is of.
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
    """``found``: keeps a wrong row's page and prefix from everybody. Without checks nothing is done."""

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
        """Now and then, launch a look at one hot buffer of ``batch``, which the next step is made for."""
        self._num_steps += 1
        hisparse = [request for request in batch if request.mode is Mode.HISPARSE]
        if self._held_rows is None or not hisparse or self._num_steps % STEPS_BETWEEN:
            return
        turn = self._num_steps // STEPS_BETWEEN
        request = hisparse[turn % len(hisparse)]
        self._tables.check_hot(request, turn // len(hisparse) % self._tables.spec.num_hot_groups)

    def when_idle(self) -> None:
        """Verify the next stretch of what is held. Waits for the device."""
        if self._held_rows is not None:
            self._held_rows.verify_next()
