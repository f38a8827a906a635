"""Copies between an index pool and main memory that last as long as a test wants; bytes are names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import cast

import torch

from hisparse_pd.core.model.side_stream import CopyFailed
from hisparse_pd.core.paging.extents import extents_to_slots, slice_extents
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import end_of
from hisparse_pd.decode_node.request import Request
from hisparse_pd.protocol.messages import Extent


class Event:
    """A copy and its end."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self.copy = copy
        self.is_over = False

    def query(self) -> bool:
        return self.is_over


class SlowCopies:
    """Stands in for ``KeyPages``. A copy reads and writes when it ends, which ``finish`` makes it do."""

    def __init__(self) -> None:
        self.index: dict[int, object] = {}
        """What each slot of the index pool has, as far as a test says or a copy has brought it."""
        self.places: dict[int, object] = {}
        """What lies at the place of each slot of the host pool."""
        self.device: dict[int, object] = {}
        """The KV of each slot of the device pool."""
        self.host: dict[int, object] = {}
        """The KV of each slot of the host pool."""
        self.under_way: list[Event] = []
        """In the order in which they end."""
        self.can_begin = True

    def of(self, kind: PoolKind) -> dict[int, object]:
        """Return what the slots of a pool have."""
        return {PoolKind.INDEX: self.index, PoolKind.DEVICE: self.device, PoolKind.HOST: self.host}[kind]

    def copy_down(
        self, index: Sequence[Extent], host: Sequence[Extent], device: Sequence[Extent] = ()
    ) -> torch.cuda.Event:
        keys = _copy(self.index, index, self.places, host)
        return self._begin(keys, _copy(self.device, device, self.host, host) if device else None)

    def copy_up(
        self, host: Sequence[Extent], index: Sequence[Extent], device: Sequence[Extent] = ()
    ) -> torch.cuda.Event:
        keys = _copy(self.places, host, self.index, index)
        return self._begin(keys, _copy(self.host, host, self.device, device) if device else None)

    def num_same(self, index: Sequence[Extent], host: Sequence[Extent]) -> int:
        if not self.can_begin:
            raise CopyFailed("no memory")
        pairs = zip(extents_to_slots(index).tolist(), extents_to_slots(host).tolist(), strict=True)
        is_same = (self.index.get(slot) == self.places.get(place) is not None for slot, place in pairs)
        return sum(takewhile(bool, is_same))

    def retract(self, request: Request) -> None:
        """Copy what a dense request has to the host pool, as ``RequestTables.retract`` does."""
        page_size = request.prompt_keys.page_size if request.prompt_keys is not None else 1
        on_host, num_there = request.host_prefix, end_of(request.host_prefix) * page_size
        for run in on_host.chain() if on_host is not None else ():
            if run.is_arriving:
                part = slice_extents(
                    request.extents(PoolKind.INDEX), run.start_page * page_size, run.end_page * page_size
                )
                _copy(self.index, part, self.index, run.holding[PoolKind.INDEX])()
        num_copied = request.num_shared_pages * page_size - num_there
        if num_copied:
            part = slice_extents(request.extents(PoolKind.INDEX), num_there, num_there + num_copied)
            own = slice_extents(request.owned[PoolKind.INDEX], 0, num_copied)
            _copy(self.index, part, self.index, own)()
        if request.num_kv_tokens > num_there:
            part = slice_extents(request.extents(PoolKind.DEVICE), num_there, request.num_kv_tokens)
            own = slice_extents(request.owned[PoolKind.HOST], 0, request.num_kv_tokens - num_there)
            _copy(self.device, part, self.host, own)()

    def settle(self) -> None:
        self.finish()

    def finish(self, most: int | None = None) -> None:
        """End the first ``most`` copies under way, or all."""
        for event in self.under_way[:most]:
            event.copy()
            event.is_over = True
        del self.under_way[:most]

    def _begin(self, keys: Callable[[], None], kv: Callable[[], None] | None) -> torch.cuda.Event:
        if not self.can_begin:
            raise CopyFailed("no memory")

        def copy() -> None:
            keys()
            if kv is not None:
                kv()

        self.under_way.append(Event(copy))
        return cast(torch.cuda.Event, self.under_way[-1])


def _copy(
    src: dict[int, object],
    src_extents: Sequence[Extent],
    dst: dict[int, object],
    dst_extents: Sequence[Extent],
) -> Callable[[], None]:
    src_slots, dst_slots = (extents_to_slots(slots).tolist() for slots in (src_extents, dst_extents))
    assert len(src_slots) == len(dst_slots) == len(set(src_slots)) == len(set(dst_slots)) > 0
    return lambda: dst.update({to: src.get(slot) for slot, to in zip(src_slots, dst_slots, strict=True)})
