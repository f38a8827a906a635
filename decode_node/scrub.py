"""Verifies rows that nobody reads just now, where they lie: in hot buffers, and in held prefixes.

Every few steps one request's hot buffer is gone through in one index group, before a step that the request is
in: what is wrong comes with that step's results. In an idle turn it is a stretch of the held prefixes. So a
fault of the memory is found before somebody needs the row, and one of ours with the request that it is of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from decode_node.hot_buffers import HotBuffers
from decode_node.memory import slots_tensor
from decode_node.request import Request
from hisparse_pd.paging.extents import slice_extents
from hisparse_pd.paging.pools import PoolKind
from hisparse_pd.paging.prefix_tree import Prefix, PrefixTree
from hisparse_pd.vocabulary import Mode
from kernels.row_check import row_checks_of

STEPS_BETWEEN: Final = 32
STRETCH_BYTES: Final = 1 << 20
"""Of a held prefix, in an idle turn of the engine's loop."""

Found = Callable[[PoolKind, int, int, int, int, int], None]
"""Called with pool, slot, layer, position, expected and actual check of a wrong row of a held prefix."""


class Scrubber:
    """``found``: keeps a wrong row's page and prefix from everybody. Without checks nothing is done."""

    def __init__(self, hot_buffers: HotBuffers, held: PrefixTree, found: Found) -> None:
        self._hot_buffers = hot_buffers
        self._held = held
        self._found = found
        self._num_steps = 0
        self._stretches: Iterator[tuple[Prefix, int, int]] = iter(())

    def before_step(self, batch: Sequence[Request]) -> None:
        """Now and then, launch a look at one hot buffer of ``batch``, which the next step is made for."""
        self._num_steps += 1
        hisparse = [request for request in batch if request.mode is Mode.HISPARSE]
        if self._hot_buffers.memory.row_checks is None or not hisparse or self._num_steps % STEPS_BETWEEN:
            return
        turn = self._num_steps // STEPS_BETWEEN
        request = hisparse[turn % len(hisparse)]
        self._hot_buffers.check_hot(request, turn // len(hisparse) % self._hot_buffers.spec.num_hot_groups)

    def when_idle(self) -> None:
        """Verify the next stretch of what is held. Waits for the device."""
        memory, row_checks = self._hot_buffers.memory, self._hot_buffers.memory.row_checks
        if row_checks is None or not len(self._held):
            return
        stretch = next(self._stretches, None)
        if stretch is None:
            self._stretches = self._all_stretches()
            return
        prefix, start, stop = stretch
        page_size = self._hot_buffers.page_size
        first, end = prefix.start_page * page_size, prefix.end_page * page_size
        is_held = not prefix.is_dropped and any(each is prefix for each in self._held)
        if not is_held or start < first or stop > end:
            return  # it was given up, or is another run by now
        kind, _ = prefix.kinds
        pool = memory.k_host if kind is PoolKind.HOST else memory.k_dev
        slots, check_slots = (
            slots_tensor(slice_extents(prefix.holding[of], start - first, stop - first)).to(row_checks.device)
            for of in prefix.kinds
        )
        positions = torch.arange(start, stop, device=row_checks.device)
        actual, expected = row_checks_of(pool, slots, positions), row_checks[:, check_slots]
        for layer, i in torch.nonzero(actual != expected)[:1].tolist():
            checks = [int(values[layer, i]) & 0xFFFFFFFF for values in (expected, actual)]
            self._found(kind, int(slots[i]), layer, start + i, *checks)

    def _all_stretches(self) -> Iterator[tuple[Prefix, int, int]]:
        """Of all that is held now: a prefix, and positions of it."""
        spec, page_size = self._hot_buffers.spec, self._hot_buffers.page_size
        num_tokens = max(1, STRETCH_BYTES // (spec.item_bytes * spec.num_kv_layers))
        for prefix in list(self._held):
            stop = prefix.end_page * page_size
            for start in range(prefix.start_page * page_size, stop, num_tokens):
                yield prefix, start, min(start + num_tokens, stop)
