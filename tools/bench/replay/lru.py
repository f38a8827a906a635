"""Counts what an LRU of the tiers' size finds of a sequence of prompts: the measure for a prefix cache.

The lower tier has what was copied down when it was computed, so it keeps all that the upper one has while its
capacity lasts. Only leading pages of a prompt are found: the device's, then those behind them in main memory.
The pages of a prompt are used from its end to its beginning, so that the end of the prompt that was used
longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """Leading pages of a prompt, by the tier that had them."""

    device: int
    host: int


class TieredLru:
    """Two tiers of so many pages, empty at first. Requests come one after the other."""

    def __init__(self, num_device_pages: int, num_host_pages: int) -> None:
        self._device = _Lru(num_device_pages)
        self._host = _Lru(num_host_pages)

    def use(self, keys: Sequence[Hashable]) -> Found:
        """Return what is found of a prompt with these pages, which are then all the most recently used."""
        num_device = self._device.num_leading(keys, 0)
        num_host = self._host.num_leading(keys, num_device) - num_device
        for tier in (self._device, self._host):
            tier.touch(keys)
        return Found(num_device, num_host)


class _Lru:
    """Pages of one tier, the least recently used first."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: OrderedDict[Hashable, None] = OrderedDict()

    def num_leading(self, keys: Sequence[Hashable], start: int) -> int:
        """Return the end of the pages from ``start`` on that are all there."""
        end = start
        while end < len(keys) and keys[end] in self._pages:
            end += 1
        return end

    def touch(self, keys: Sequence[Hashable]) -> None:
        for key in reversed(keys):
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self._num_pages:
            self._pages.popitem(last=False)
