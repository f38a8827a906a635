"""Owns the memory behind a decode engine's pools, and registers it with the transport.

Which slots belong to whom is decided elsewhere (``core/paging/pools.py``); here are the bytes:

==========  ===================================================  ======================
pool        layout                                               written by
==========  ===================================================  ======================
host        uint8 [num_kv_layers, num_slots, item_bytes]         prefill nodes, backup
device      uint8 [num_kv_layers, num_slots, item_bytes]         prefill nodes, model
index       uint8 [num_index_groups, num_slots, index bytes]     prefill nodes, model
row checks  int32 [num_kv_layers, slots of the index pool]       prefill nodes, model
aux         uint8 [num_slots, aux slot bytes]                    prefill nodes
==========  ===================================================  ======================

The engine makes one ``DecodeMemory`` and registers it. ``RequestTables`` copies rows and gives the tensors to
kernels, and ``PrefillEvents`` takes the aux records.

Remote writes land at any time in slots of landing and quarantined rooms, and nowhere else. There are row
checks only where the spec has ``has_row_checks``. The device and the index pool end with a page that the
allocators do not know: the scratch page, where padding of a batch writes.

Prefill nodes of this machine may map main memory through memfds (``transfer/lane.py``). With a GPU the host
pool and the aux slots are pinned. At shutdown the transport unregisters the memory first, then ``close``
unregisters it with CUDA; it is unmapped when no tensor is left on it.
"""

from __future__ import annotations

import logging
import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from hisparse_pd.core.memory.host import HostPool, Pinning, allocate_host
from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.core.memory.peer import ipc_handle
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.extents import (
    SlotRanges,
    extents_to_page_ids,
    extents_to_slots,
    slice_extents,
)
from hisparse_pd.core.paging.pools import PoolKind, SlotCounts
from hisparse_pd.protocol.messages import ROW_CHECK_BYTES, Extent, Region, RegionKind, Room
from hisparse_pd.transfer.aux_record import AuxLayout, AuxRecord
from hisparse_pd.transfer.engine import TransferEngine
from hisparse_pd.transfer.lane_host import SharedMemory
from hisparse_pd.transfer.plan import plan_writes

log = logging.getLogger(__name__)

LINK_TRIAL_BYTES: Final = 32 << 20
"""Most bytes of a copy that measures the link from the host pool to the device."""
LINK_TRIAL_COPIES: Final = 4
"""Copies that are timed together."""

_ROWS_OF: Final[dict[PoolKind, tuple[RegionKind, ...]]] = {
    PoolKind.HOST: (RegionKind.KV_HOST,),
    PoolKind.DEVICE: (RegionKind.KV_DEVICE,),
    PoolKind.INDEX: (RegionKind.INDEX, RegionKind.ROW_CHECKS),
}
"""The regions that have a row for each slot of a pool, so that a copy of slots copies all of them."""


class DecodeMemory:
    """Holds the tensors of all pools. Raises HostMemoryError.

    ``totals``: the slots that allocators hand out, whole pages in the device and the index pool. ``pinning``:
    CUDA's when not given. ``shared``: whether other processes can map main memory. ``placement``: the NUMA
    node of main memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        totals: SlotCounts,
        page_size: int,
        device: torch.device,
        pinning: Pinning | None = None,
        *,
        shared: bool = False,
        placement: Placement = ANYWHERE,
    ) -> None:
        self.aux_layout = AuxLayout(spec.num_index_groups, spec.index_topk)
        self.scratch_device_slot = totals.device
        """The first slot of the device pool's scratch page."""
        self.scratch_index_slot = totals.index
        """The first slot of the index pool's scratch page."""
        self._host_pools: list[HostPool] = []
        pools: dict[RegionKind, Tensor] = {}
        for kind, pool in _pools(spec, totals, page_size, device).items():
            if kind in (RegionKind.KV_HOST, RegionKind.AUX) or (shared and pool.device.type == "cpu"):
                # Without a GPU, pages are allocated when they are first written (``touch``): the machine may
                # have less memory than the pool's size.
                host_pool = allocate_host(
                    pool.num_bytes,
                    pinned=device.type == "cuda",
                    touch=device.type == "cuda",
                    shared=shared,
                    name=f"pool {kind}",
                    pinning=pinning,
                    placement=placement,
                )
                self._host_pools.append(host_pool)
                pools[kind] = host_pool.tensor.view(pool.shape)
            else:
                pools[kind] = torch.zeros(pool.shape, dtype=torch.uint8, device=pool.device)

        self.k_host = pools[RegionKind.KV_HOST]
        self.k_dev = pools[RegionKind.KV_DEVICE]
        self.index = pools[RegionKind.INDEX]
        self.row_checks: Tensor | None = None
        if (checks := pools.get(RegionKind.ROW_CHECKS)) is not None:
            self.row_checks = checks.view(torch.int32)[:, :, 0]
        self.aux = pools[RegionKind.AUX][0]
        self._by_kind = pools
        log.info("pools: %s", ", ".join(_describe(kind, pool) for kind, pool in self._by_kind.items()))

    def register(self, engine: TransferEngine) -> tuple[Region, ...]:
        """Register all pools, so that peers can write to them. Raises TransferError."""
        return tuple(
            Region(kind, engine.register(pool), pool.nbytes, num_slots=pool.shape[1])
            for kind, pool in self._by_kind.items()
        )

    def shared_memory(self) -> tuple[SharedMemory, ...]:
        """Return the memory that other processes can map, or open if it is a GPU's; empty unless
        ``shared``."""
        shared = [
            SharedMemory(pool.tensor.data_ptr(), pool.num_bytes, pool.shared_fd)
            for pool in self._host_pools
            if pool.shared_fd is not None
        ]
        if not shared or self.k_dev.device.type != "cuda":
            return tuple(shared)
        for pool in (pool for pool in self._by_kind.values() if pool.device.type == "cuda"):
            try:
                handle, offset = ipc_handle(pool)
            except Exception as error:  # then prefill nodes write there over the network
                log.warning("the pools of the GPU cannot be opened by other processes: %s", error)
                break
            shared.append(SharedMemory(pool.data_ptr(), pool.nbytes, None, handle, offset))
        return tuple(shared)

    def measure_host_link(self) -> float:
        """Return how many bytes a second a copy from the host pool to the device takes along, measured now;
        0.0 without a GPU or a host pool. Waits for the device, for some milliseconds."""
        if self.k_dev.device.type != "cuda" or not self.k_host.numel():
            return 0.0
        src_host = self.k_host[0].view(-1)[:LINK_TRIAL_BYTES]
        dst_dev = torch.empty_like(src_host, device=self.k_dev.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dst_dev.copy_(src_host, non_blocking=True)  # the first copy is not timed
        start.record()
        for _ in range(LINK_TRIAL_COPIES):
            dst_dev.copy_(src_host, non_blocking=True)
        end.record()
        end.synchronize()
        secs: float = start.elapsed_time(end) / 1e3
        rate = LINK_TRIAL_COPIES * src_host.nbytes / secs
        log.info("copies from the host pool to the device: %.1f GB/s", rate / 1e9)
        return rate

    def close(self) -> None:
        """Unpin main memory and let go of it. The transport must have unregistered it, and no step may be in
        flight. ``k_host`` and ``aux`` are empty afterwards. Where other pools lie in main memory too, as on a
        CPU, that is unmapped when their tensors are gone. May be called again."""
        self.k_host = self.k_host[:, :0].clone()
        self.aux = self.aux[:0].clone()
        self._by_kind.clear()
        for pool in self._host_pools:
            pool.close()

    def take_aux(self, aux_slot: int, room: Room) -> AuxRecord:
        """Read the record of ``room`` and blank the slot. Raises AuxMismatch, with the slot blanked too."""
        record_bytes = self.aux[aux_slot].numpy()
        try:
            return self.aux_layout.unpack(record_bytes, room)
        finally:
            self.aux_layout.clear(record_bytes)

    def copy_rows(self, kind: PoolKind, src: tuple[Extent, ...], dst: tuple[Extent, ...]) -> None:
        """Copy rows of a KV pool or of the index pool from slots ``src`` to as many slots ``dst`` of the same
        pool, in all layers. Rows of the index pool take their row checks with them."""
        pools = [self._by_kind[region] for region in _ROWS_OF[kind] if region in self._by_kind]
        runs = plan_writes(SlotRanges.of_extents(src), SlotRanges.of_extents(dst))
        for run in zip(runs.src_start.tolist(), runs.dst_start.tolist(), runs.length.tolist(), strict=True):
            src_start, dst_start, length = run
            for pool in pools:
                pool[:, dst_start : dst_start + length] = pool[:, src_start : src_start + length]

    def spill(self, device: tuple[Extent, ...], host: tuple[Extent, ...], num_tokens: int) -> None:
        """Copy the items of positions [0, num_tokens), in all layers, from device to host slots. On a GPU the
        copies are launched on the current stream: ``RequestTables.retract``, which calls it for a dense
        request that gives up its device slots, waits for them."""
        src_device_slots = slots_tensor(device)[:num_tokens].to(self.k_dev.device)
        runs = _host_runs(host, num_tokens)
        for layer_dev, layer_host in zip(self.k_dev, self.k_host, strict=True):
            items = layer_dev[src_device_slots]
            for start, dst_host in runs:
                # No wait between layers: the next ``items`` may get this one's memory, but the stream makes
                # these copies before it writes there.
                layer_host[dst_host].copy_(
                    items[start : start + dst_host.stop - dst_host.start], non_blocking=True
                )


def num_host_bytes(spec: ModelSpec, totals: SlotCounts, page_size: int, device: torch.device) -> int:
    """Return the bytes of main memory that a DecodeMemory of these sizes registers."""
    pools = _pools(spec, totals, page_size, device).values()
    return sum(pool.num_bytes for pool in pools if pool.device.type == "cpu")


def _host_runs(host: tuple[Extent, ...], num_tokens: int) -> list[tuple[int, slice]]:
    """Return the first position and the host slots of each extent, up to position ``num_tokens``."""
    runs, start = [], 0
    for extent in slice_extents(host, 0, num_tokens):
        runs.append((start, slice(extent.start, extent.start + extent.length)))
        start += extent.length
    return runs


class _Pool(NamedTuple):
    """The form of a pool's tensor: uint8 of this shape, on this device."""

    shape: tuple[int, int, int]
    """Layers, slots (those of the scratch page included) and item bytes."""
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape)


def _pools(
    spec: ModelSpec, totals: SlotCounts, page_size: int, device: torch.device
) -> dict[RegionKind, _Pool]:
    host = torch.device("cpu")
    aux_slot_bytes = AuxLayout(spec.num_index_groups, spec.index_topk).slot_bytes
    num_device_slots, num_index_slots = totals.device + page_size, totals.index + page_size
    pools = {
        RegionKind.KV_HOST: _Pool((spec.num_kv_layers, totals.host, spec.item_bytes), host),
        RegionKind.KV_DEVICE: _Pool((spec.num_kv_layers, num_device_slots, spec.item_bytes), device),
        RegionKind.INDEX: _Pool((spec.num_index_groups, num_index_slots, spec.index_item_bytes), device),
        RegionKind.AUX: _Pool((1, totals.aux, aux_slot_bytes), host),
    }
    if spec.has_row_checks:
        row_checks = _Pool((spec.num_kv_layers, num_index_slots, ROW_CHECK_BYTES), device)
        pools[RegionKind.ROW_CHECKS] = row_checks
    return pools


def _describe(kind: RegionKind, pool: Tensor) -> str:
    unit = "records" if kind is RegionKind.AUX else "tokens"
    return f"{kind} {pool.shape[1]} {unit} of {pool.shape[0]} layers, {pool.nbytes / (1 << 30):.2f} GiB"


def slots_tensor(extents: tuple[Extent, ...]) -> Tensor:
    """Return the token slots of ``extents`` in position order: int64 [num_tokens], on the CPU."""
    return torch.from_numpy(extents_to_slots(extents))


def pages_tensor(extents: tuple[Extent, ...], page_size: int) -> Tensor:
    """Return the page ids of ``extents``, which are whole pages, in position order: int64 [num_pages], on the
    CPU."""
    return torch.from_numpy(extents_to_page_ids(extents, page_size))
