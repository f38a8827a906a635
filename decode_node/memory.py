"""Owns the memory behind the pools and its registration with the transport.

==========  ===================================================  ======================
pool        layout                                               written by
==========  ===================================================  ======================
host        uint8 [num_layers, num_slots, item_bytes]            prefill nodes, backup
device      uint8 [num_layers, num_slots, item_bytes]            prefill nodes, model
index       uint8 [num_index_layers, num_slots, index bytes]     prefill nodes, model
aux         uint8 [num_slots, aux slot bytes]                    prefill nodes
==========  ===================================================  ======================

Remote writes land at any time in slots of landing and quarantined rooms, and nowhere else.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from decode_node.pools import SlotCounts
from model.spec import ModelSpec
from protocol.messages import Extent, Region, RegionKind, Room
from transfer.aux_record import AuxLayout, AuxRecord
from transfer.engine import TransferEngine
from transfer.extents import extents_to_slots

log = logging.getLogger(__name__)


class DecodeMemory:
    """The tensors of all pools, allocated and registered once. ``totals`` are the pools' sizes in slots."""

    def __init__(self, spec: ModelSpec, totals: SlotCounts, device: torch.device) -> None:
        self.aux_layout = AuxLayout(spec.num_index_layers, spec.index_topk)
        pools = {
            kind: torch.zeros(shape, dtype=torch.uint8, device=where)
            for kind, (shape, where) in _shapes(spec, totals, device).items()
        }
        self.k_host = pools[RegionKind.KV_HOST]
        self.k_dev = pools[RegionKind.KV_DEVICE]
        self.index = pools[RegionKind.INDEX]
        self.aux = pools[RegionKind.AUX][0]
        self.kv_dev = self.k_dev.view(spec.kv_dtype)
        """[num_layers, num_slots, item_dim]: the device pool as the model sees it."""
        self.index_keys = self.index.view(spec.kv_dtype)
        """[num_index_layers, num_slots, index_head_dim]"""
        self._by_kind = {
            RegionKind.KV_HOST: (self.k_host, totals.host),
            RegionKind.KV_DEVICE: (self.k_dev, totals.device),
            RegionKind.INDEX: (self.index, totals.index),
            RegionKind.AUX: (self.aux, totals.aux),
        }
        num_bytes = sum(tensor.nbytes for tensor, _ in self._by_kind.values())
        log.info("pools of %s take %.1f MiB", totals, num_bytes / (1 << 20))

    def register(self, engine: TransferEngine) -> tuple[Region, ...]:
        """Let peers write to all pools. Raises TransferError."""
        return tuple(
            Region(kind, engine.register(tensor), tensor.nbytes, num_slots)
            for kind, (tensor, num_slots) in self._by_kind.items()
        )

    def take_aux(self, aux_slot: int, room: Room) -> AuxRecord:
        """Read the record of ``room`` and blank the slot. Raises AuxMismatch, with the slot blanked too."""
        record_bytes = self.aux[aux_slot].numpy()
        try:
            return self.aux_layout.unpack(record_bytes, room)
        finally:
            self.aux_layout.clear(record_bytes)

    def spill(self, device: tuple[Extent, ...], host: tuple[Extent, ...], num_tokens: int) -> None:
        """Copy the items of positions [0, num_tokens), in all layers, from device to host slots."""
        src_device_slots = slots_tensor(device)[:num_tokens].to(self.k_dev.device)
        dst_host_slots = slots_tensor(host)[:num_tokens]
        for layer_dev, layer_host in zip(self.k_dev, self.k_host, strict=True):
            layer_host[dst_host_slots] = layer_dev[src_device_slots].cpu()


def num_host_bytes(spec: ModelSpec, totals: SlotCounts, device: torch.device) -> int:
    """Bytes of main memory that a DecodeMemory of these sizes registers."""
    shapes = _shapes(spec, totals, device).values()
    return sum(math.prod(shape) for shape, where in shapes if where.type == "cpu")


def _shapes(
    spec: ModelSpec, totals: SlotCounts, device: torch.device
) -> dict[RegionKind, tuple[tuple[int, int, int], torch.device]]:
    """Layers, slots and item bytes of each pool, and where it is."""
    host = torch.device("cpu")
    aux_slot_bytes = AuxLayout(spec.num_index_layers, spec.index_topk).slot_bytes
    return {
        RegionKind.KV_HOST: ((spec.num_layers, totals.host, spec.item_bytes), host),
        RegionKind.KV_DEVICE: ((spec.num_layers, totals.device, spec.item_bytes), device),
        RegionKind.INDEX: ((spec.num_index_layers, totals.index, spec.index_item_bytes), device),
        RegionKind.AUX: ((1, totals.aux, aux_slot_bytes), host),
    }


def slots_tensor(extents: tuple[Extent, ...]) -> Tensor:
    """Token slots of ``extents`` in position order: int64 [num_tokens], on the CPU."""
    return torch.from_numpy(extents_to_slots(extents))


def pages_tensor(extents: tuple[Extent, ...], page_size: int) -> Tensor:
    """Page ids of ``extents``, which are whole pages, in position order: int64 [num_pages], on the CPU."""
    return slots_tensor(extents)[::page_size] // page_size
