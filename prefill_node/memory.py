"""The prefill node's memory: owns the tensors of the KV pool, the index pool, the row checks and the aux
staging memory.

The forward writes KV, indexer keys and row checks (``compute.py``), and the engine stages aux records. All of
it is registered with the transport, which sends from it in place (``push.py``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse_pd.core.model.layer_arrivals import LayerArrivals
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.kernels.row_check import (
    PageRows,
    WrongItem,
    begin_check,
    items_of_pages,
    void_row_checks,
    wrong_items,
)
from hisparse_pd.prefill_node.push import SourceRegions
from hisparse_pd.transfer.aux_record import AuxLayout
from hisparse_pd.transfer.engine import TransferEngine
from hisparse_pd.transfer.plan import RegionView

log = logging.getLogger(__name__)

VERIFIED_AT_A_TIME = 1 << 16
"""Token slots among which wrong ones are looked for together; with 61 layers, computed and stored checks take
32 MB."""
NUM_SCRATCH_SLOTS = 64
"""Slots after those of pages, for rows of padding. One would do; 64 keep all layers aligned."""


class PrefillMemory:
    """The pools: ``num_slots`` slots of pages, and from ``scratch_slot`` on those that take rows of padding,
    which nobody reads. "Slots" in the shapes are both together.

    On ``device``: ``kv``, uint8 [num_kv_layers, slots, item_bytes]; ``index``, uint8 [num_index_groups,
    slots, index_item_bytes]; ``row_checks``, int32 [num_kv_layers, slots], or None if the node computes none.
    On the host: ``aux``, uint8 [num_aux_slots, aux slot bytes].
    """

    def __init__(
        self, spec: ModelSpec, *, num_slots: int, num_aux_slots: int, device: torch.device | str
    ) -> None:
        self._kv_layer_of_layer = spec.kv_layer_of_layer
        self._index_group_of_layer = spec.index_group_of_layer
        self._index_topk = spec.index_topk
        self.scratch_slot = num_slots
        shapes = _shapes(spec, num_slots, num_aux_slots)
        self.row_checks: Tensor | None = None
        if spec.has_row_checks:
            self.row_checks = torch.zeros(shapes.kv_pool[:2], dtype=torch.int32, device=device)
        self.kv = torch.zeros(shapes.kv_pool, dtype=torch.uint8, device=device)
        self.index = torch.zeros(shapes.index_pool, dtype=torch.uint8, device=device)
        self.aux = torch.zeros(shapes.aux, dtype=torch.uint8)
        log.info(
            "pools: kv %d tokens of %d layers, %.2f GiB, index %.2f GiB, aux %d records, %.2f GiB",
            num_slots,
            spec.num_kv_layers,
            self.kv.nbytes / (1 << 30),
            self.index.nbytes / (1 << 30),
            num_aux_slots,
            self.aux.nbytes / (1 << 30),
        )

    def register(self, engine: TransferEngine) -> None:
        """Register all tensors with the transport, which reads them. Raises TransferError."""
        for tensor in (*self.sent, self.aux):
            engine.register(tensor)

    @property
    def sent(self) -> tuple[Tensor, ...]:
        """The tensors that tokens' bytes are sent from."""
        return (self.kv, self.index, *([] if self.row_checks is None else [self.row_checks]))

    def layer_arrivals(self) -> LayerArrivals | None:
        """Return what a forward waits for while copies bring the pools layer after layer; None on a CPU,
        where copies are over when they return."""
        if self.kv.device.type != "cuda":
            return None
        return LayerArrivals(tuple(pool.shape[0] for pool in self.sent), self.kv.device)

    @property
    def regions(self) -> SourceRegions:
        """The regions from which ``push.py`` plans writes: where each tensor lies, and which of its layers a
        model layer has."""
        return SourceRegions(
            _view_of(self.kv),
            _view_of(self.index),
            _view_of(self.aux[None]),
            self._kv_layer_of_layer,
            self._index_group_of_layer,
            None if self.row_checks is None else _view_of(self.row_checks[:, :, None].view(torch.uint8)),
        )

    def void_checks(self, page_ids: Sequence[int], page_size: int) -> None:
        """Invalidate the checks of pages, in stream order, until new items are written: items of a page's
        former owner that are sent too early then match no check."""
        if self.row_checks is not None and page_ids:
            void_row_checks(self.row_checks, torch.tensor(page_ids, device=self.kv.device), page_size)

    def void_before_read(self, page_ids: Sequence[int], page_size: int) -> torch.cuda.Event | None:
        """Invalidate the checks of pages in which another node's bytes are to land: where none come, the old
        bytes match no check. Returns the event after which they may land; None: at once."""
        self.void_checks(page_ids, page_size)
        if self.kv.device.type != "cuda":
            return None
        voided = torch.cuda.Event(blocking=True)  # a sender's thread waits for it and must not spin
        voided.record()
        return voided

    def begin_check(self, pages: PageRows, page_size: int) -> Tensor:
        """Enqueue the comparison of the KV items in ``pages`` with their checks. Returns int32 [1], which is
        not 0 if one is wrong, once the current stream's work is over. Without checks none is."""
        if self.row_checks is None:
            return torch.zeros(1, dtype=torch.int32)
        return begin_check(self.kv, self.row_checks, pages, page_size)

    def wrong_items(self, pages: PageRows, page_size: int) -> list[WrongItem]:
        """Return the KV items in ``pages`` that are not as they were written, at most one for each slot: that
        of the first layer in which its item is wrong.

        Returns nothing when the node computes no checks. Waits for the device.
        """
        if self.row_checks is None or not self.begin_check(pages, page_size).item():
            return []
        slots, positions = map(torch.from_numpy, items_of_pages(pages, page_size))
        found: list[WrongItem] = []
        for start in range(0, len(slots), VERIFIED_AT_A_TIME):
            part = slice(start, start + VERIFIED_AT_A_TIME)
            slots_dev, positions_dev = slots[part].to(self.kv.device), positions[part].to(self.kv.device)
            found += wrong_items(self.kv, slots_dev, self.row_checks, slots_dev, positions_dev)
        return found

    def stage_aux(self, slot: int, room: int, hint: Tensor) -> None:
        """Write a request's aux record to its slot. ``hint``: int32 [the peer's index groups, index_topk], on
        the host, padded with -1."""
        layout = AuxLayout(len(hint), self._index_topk)
        layout.pack_into(self.aux[slot].numpy(), room, hint.numpy())


def num_host_bytes(spec: ModelSpec, *, num_slots: int, num_aux_slots: int, device: torch.device) -> int:
    """Return the bytes of main memory that a PrefillMemory of these sizes registers: all of it on a CPU, aux
    staging alone on a GPU."""
    kv_bytes, index_bytes, aux_bytes = map(math.prod, _shapes(spec, num_slots, num_aux_slots))
    check_bytes = (num_slots + NUM_SCRATCH_SLOTS) * spec.row_check_bytes
    return aux_bytes + (kv_bytes + index_bytes + check_bytes if device.type == "cpu" else 0)


class _Shapes(NamedTuple):
    """Shapes of the uint8 tensors, those of the pools with their scratch slots."""

    kv_pool: tuple[int, int, int]
    index_pool: tuple[int, int, int]
    aux: tuple[int, int]


def _shapes(spec: ModelSpec, num_slots: int, num_aux_slots: int) -> _Shapes:
    num_all_slots = num_slots + NUM_SCRATCH_SLOTS
    return _Shapes(
        kv_pool=(spec.num_kv_layers, num_all_slots, spec.item_bytes),
        index_pool=(spec.num_index_groups, num_all_slots, spec.index_item_bytes),
        aux=(num_aux_slots, AuxLayout(spec.num_index_groups, spec.index_topk).slot_bytes),
    )


def _view_of(tensor: Tensor) -> RegionView:
    """Return the memory of a uint8 tensor [num_layers, num_slots, item_bytes]."""
    num_layers, num_slots, item_bytes = tensor.shape
    return RegionView(tensor.data_ptr(), tensor.nbytes, num_layers, num_slots, item_bytes)
