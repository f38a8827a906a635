"""Swap-in: page selected positions that are not hot from the host pool into the hot buffers.

These are the functions that the decode node calls. When a request starts, ``RowStart`` or ``start_dense_row``
fills its row of the tables (``hot_state.py``). Each forward of a step then calls ``newest_slots`` once,
``swap_in`` or ``plan_misses`` in the first layer of every index group, and ``replay_misses`` in the group's
other layers. ``backup_newest`` follows once the last layer has written its items and, with drafts, once it
is known which are accepted.

Every check that needs no synchronisation is made here. Then the device of the state's tables decides: ``cpu``
runs ``kernels/reference.py``, ``cuda`` runs ``kernels/cuda.py``, whose host pools must be pinned or
registered. The only state is that of the tables. Callers may pass outputs and plans, so that a CUDA graph can
capture a call.

``k_host``, ``k_dev``: uint8 [num_layers, num_slots, item_bytes], contiguous; the slot counts may differ.
Copies are fastest with 16-byte aligned addresses and items.

All functions run on the current stream of their device and do not synchronise; on the CPU they are done on
return.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hisparse_pd.kernels import reference
from hisparse_pd.kernels.checks import (
    KernelArgumentError,
    check_at_least,
    check_page_ids,
    check_range,
    check_tensor,
)
from hisparse_pd.kernels.hot_state import INTEGERS, MAX_LOOKUP_SLOTS, HotBufferState
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.row_errors import ReadAt
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.warm_up import FilledLayer, plan_warm_up


class KernelUnavailableError(RuntimeError):
    """There is no kernel for the device."""


def swap_in(
    selected: Tensor,
    requests: StepRequests,
    *,
    group: int,
    layer: int,
    k_host: Tensor,
    k_dev: Tensor,
    out: Tensor | None = None,
    miss_plan: MissPlan | None = None,
) -> Tensor:
    """Make the selected positions of every request readable in the device pool, and return their device
    slots.

    ``selected``: int32 [num_reqs * num_new, top_k], positions in [0, seq_len) in any order, -1 for none,
    duplicates allowed. The rows of one request are adjacent, in the order of its new positions, and count as
    one selection: a position that several of them select is fetched once and counted once.
    ``out``: int32 [num_reqs * num_new, top_k], made when None and returned: the device slot of each selected
    position, -1 where ``selected`` is -1, in padding rows, and for a draft that has no slot.
    ``miss_plan``: afterwards it holds this call's copies, for ``replay_misses``.

    The new positions of a hisparse row take the entries of ``step_requests.ring_entries``, whether they are
    selected or not; the model writes their bytes there, and they are never copied from the host. In a row
    that fits, a missing position goes to its own hot_index and nothing is evicted. Otherwise misses take
    entries below the ring that this step does not use, the oldest first (``HotBufferState.stamps``). Which
    miss takes which of these entries is not specified. All misses find one when ``capacity`` is at least
    ``num_new * top_k + max_new``.

    A request whose selection cannot be served in full gets -1 in the places concerned and a bit of
    HotBufferError in ``error_flags``; its tables stay consistent. The tables of ``group``, counters, flags
    and ``k_dev[layer]`` are changed.

    A GPU takes sizes up to the bounds in ``kernels/cuda.py``. Raises KernelArgumentError,
    KernelUnavailableError.
    """
    pools = _check_pools(k_host, k_dev, requests.state.device)
    check_range("layer", layer, 0, k_dev.shape[0])
    return _resolve(selected, requests, group, layer, pools, out, miss_plan)


def plan_misses(selected: Tensor, requests: StepRequests, *, group: int, miss_plan: MissPlan) -> Tensor:
    """Run ``swap_in`` without its copies; ``replay_misses`` makes them later in each of the group's layers.

    The copies, which need PCIe and little else, can thus be separate launches beside kernels that compute.
    """
    return _resolve(selected, requests, group, layer=0, pools=None, out=None, miss_plan=miss_plan)


def _resolve(
    selected: Tensor,
    requests: StepRequests,
    group: int,
    layer: int,
    pools: reference.Pools | None,
    out: Tensor | None,
    miss_plan: MissPlan | None,
) -> Tensor:
    """Run ``swap_in``. ``pools``: copy in their ``layer``; None: copy nothing, as in ``plan_misses``."""
    state, num_new = requests.state, requests.num_new
    check_tensor("selected", selected, dtypes=(torch.int32,), shape=(None, None), device=state.device)
    num_rows, top_k = selected.shape
    if num_rows != requests.num_reqs * num_new:
        raise KernelArgumentError(
            f"selected: expected {num_new} rows for each of {requests.num_reqs} requests, got {num_rows} rows"
        )
    check_range("group", group, 0, state.num_groups)
    if out is None:
        out = torch.empty_like(selected)
    else:
        check_tensor("out", out, dtypes=(torch.int32,), shape=(num_rows, top_k), device=state.device)
    if miss_plan is not None and miss_plan.max_misses < selected.numel():
        raise KernelArgumentError(
            f"miss_plan: expected room for {selected.numel()} misses, got {miss_plan.max_misses}"
        )
    if (cuda := _cuda_kernels("swap_in", state.device)) is not None:
        cuda.swap_in(selected, requests, group, layer, pools, out, miss_plan)
        return out
    copies = reference.resolve(selected, requests, group, out)
    if pools is not None:
        reference.copy_items(pools, layer, copies, state, ReadAt.SWAP_IN)
    if miss_plan is not None:
        num_misses = len(copies.positions)
        for name, values in copies._asdict().items():
            getattr(miss_plan, name)[:num_misses] = torch.from_numpy(values)
        miss_plan.num_misses[0] = num_misses
    return out


def replay_misses(
    miss_plan: MissPlan,
    layer: int,
    k_host: Tensor,
    k_dev: Tensor,
    max_blocks: int | None = None,
    *,
    state: HotBufferState | None = None,
) -> None:
    """Make the copies of ``miss_plan`` in another layer of the same group; the slots are the same.

    ``state``: the state of the recorded swap-in, whose ``row_checks`` verify the items; None: they are not
    verified. ``max_blocks``: most multiprocessors to use on a GPU, at least 1; None: all.
    """
    pools = _check_pools(k_host, k_dev, None)
    check_range("layer", layer, 0, k_dev.shape[0])
    if max_blocks is not None:
        check_at_least("max_blocks", max_blocks, 1)
    if (cuda := _cuda_kernels("replay_misses", miss_plan.num_misses.device)) is not None:
        cuda.replay_misses(miss_plan, layer, pools, max_blocks, state)
        return
    num_misses = int(miss_plan.num_misses)
    copies = reference.Copies(
        *(getattr(miss_plan, name)[:num_misses].numpy().astype(np.int64) for name in reference.Copies._fields)
    )
    reference.copy_items(pools, layer, copies, state, ReadAt.SWAP_IN)


class RowStart:
    """Makes ``row`` a hisparse row with a warm hot buffer in every group, in slices, so that other requests'
    steps do not compete for PCIe with all of it at once.

    The caller calls ``launch_slice`` between steps until ``num_left_bytes`` is None. The row may be used when
    the last launch is over.

    The row must be empty, as ``create`` and ``reset_rows`` leave it. On a GPU a slice is one copy to the
    device and one launch, on the current stream, which may be a side stream: no other row is touched. Nothing
    waits for the device; pages may be added to the row meanwhile. Raises KernelArgumentError before it
    changes anything.
    """

    def __init__(
        self,
        state: HotBufferState,
        row: int,
        *,
        capacity: int,
        hot_pages: Tensor,
        host_pages: Tensor,
        lookup_pages: Tensor,
        index_pages: Tensor,
        num_tokens: int,
        hints: Sequence[NDArray[np.int32]] | None,
        layers_of_group: Sequence[Sequence[int]],
        k_host: Tensor,
        k_dev: Tensor,
    ) -> None:
        """``capacity``: the entries of the hot buffer. ``hot_pages``: integer [pages of capacity], ids of the
        device pages that the request owns. ``host_pages``, ``index_pages``: integer [n], ids of its first
        pages in the host and the index pool. ``lookup_pages``: as many as ``host_pages``, and of no other
        row. All are on the CPU.
        ``num_tokens``: positions [0, num_tokens) are in the host pool. When they leave room for the next
        positions (``num_tokens + max_new <= capacity``), all of them go to their own hot_index, and such a
        request misses nothing until it outgrows the buffer.
        ``hints``: one for each group, or one for all, int32 [n]; -1 and duplicates allowed. None: the latest
        positions, the last one first. When there is no such room, the first ``capacity - max_new`` distinct
        positions of a group's hint fill the buffer from hot_index 0 on.
        ``layers_of_group``: the layers of each group, at least one, all of which are copied.
        """
        # Check everything, before anything is changed.
        pools = _check_pools(k_host, k_dev, state.device)
        cpu = torch.device("cpu")
        lists = {"host_pages": host_pages, "lookup_pages": lookup_pages, "index_pages": index_pages}
        for name, tensor in ({"hot_pages": hot_pages} | lists).items():
            check_tensor(name, tensor, dtypes=INTEGERS, shape=(None,), device=cpu)
        state.check_hisparse(row, capacity, hot_pages, host_pages, lookup_pages)
        check_range("k_host slots", k_host.shape[1], 0, MAX_LOOKUP_SLOTS + 1)
        check_page_ids("host_pages", host_pages, k_host.shape[1] // state.page_size)
        state.check_pages("index_pages", 0, index_pages)
        most_tokens = min(state.max_context, host_pages.shape[0] * state.page_size)
        check_range("num_tokens", num_tokens, 0, most_tokens + 1)
        if state.row_checks is not None:
            check_at_least("number of index_pages", index_pages.shape[0], -(-num_tokens // state.page_size))
        if len(layers_of_group) != state.num_groups:
            raise KernelArgumentError(
                f"layers_of_group: expected {state.num_groups} groups, got {len(layers_of_group)}"
            )
        for layers in layers_of_group:
            check_at_least("layers_of_group: layers of a group", len(layers), 1)
            for layer in layers:
                check_range("layers_of_group", layer, 0, k_dev.shape[0])

        warm_up = plan_warm_up(state.num_groups, capacity, state.max_new, num_tokens, hints)
        self._state, self._row, self._pools = state, row, pools
        self._capacity = capacity
        self._pages = hot_pages, host_pages, lookup_pages, index_pages
        self._warm_up = warm_up
        self._layers = [
            FilledLayer(layer, group, int(layer == layers[0]))
            for group, layers in enumerate(layers_of_group)
            for layer in layers
        ]
        """Layers that are not copied yet."""
        self._item_bytes = k_dev.shape[2]
        self._is_begun = False
        self.num_warm: list[int] = warm_up.num_warm.tolist()
        """Number of positions of each group that are hot afterwards."""

    @property
    def num_left_bytes(self) -> int | None:
        """Bytes of items that are not copied yet; None when everything was launched."""
        return sum(map(self._num_bytes, self._layers)) if self._layers else None

    def _num_bytes(self, filled: FilledLayer) -> int:
        """Return the bytes of a layer's warm items."""
        return self.num_warm[filled.group] * self._item_bytes

    def launch_slice(self, most_bytes: int | None) -> int:
        """Copy the next layers, at most ``most_bytes`` but at least one layer; None: all. Returns the bytes.

        The first slice also fills the row's tables of pages; on a GPU each slice writes the same
        values again.
        """
        num_layers = num_bytes = 0
        for filled in self._layers:
            layer_bytes = self._num_bytes(filled)
            if num_layers and most_bytes is not None and num_bytes + layer_bytes > most_bytes:
                break
            num_layers += 1
            num_bytes += layer_bytes
        layers, self._layers = self._layers[:num_layers], self._layers[num_layers:]

        state, row = self._state, self._row
        if (cuda := _cuda_kernels("start_row", state.device)) is not None:
            cuda.start_row(state, row, self._capacity, *self._pages, self._warm_up, layers, self._pools)
            return num_bytes

        hot_pages, host_pages, lookup_pages, index_pages = self._pages
        if not self._is_begun:
            state.set_hot_pages(row, self._capacity, hot_pages)
            state.set_host_pages(row, 0, host_pages, lookup_pages)
            state.set_index_pages(row, 0, index_pages)
        self._is_begun = True
        for layer, group, enters in layers:
            positions = self._warm_up.positions_of(group)
            if enters:
                reference.enter_warm_positions(state, group, row, positions)
            copies = reference.copies_of(state, row, positions, np.arange(len(positions)))
            reference.copy_items(self._pools, layer, copies, state, ReadAt.START)
        return num_bytes


def start_dense_row(state: HotBufferState, row: int, *, pages: Tensor, index_pages: Tensor) -> None:
    """Make an empty ``row`` a dense row. ``pages``, ``index_pages``: integer [n] on the CPU, the page ids of
    its first pages in the device and the index pool. This never waits for the device.
    """
    state.set_pages(row, 0, pages)
    state.set_index_pages(row, 0, index_pages)


def backup_newest(
    requests: StepRequests, *, k_host: Tensor, k_dev: Tensor, num_newest: Tensor | None = None
) -> None:
    """Copy the newest items of every hisparse row, in all layers, to their host slots; dense rows, which have
    no host pages, are skipped.

    ``requests``: the step's requests, with seq_lens that count no rejected draft and a ``num_new`` of 1.
    ``num_newest``: int32 [num_reqs], 0 to ``min(seq_len, max_new)``: positions
    [seq_len - num_newest, seq_len) are copied, which must have been new in the last step. None: one of each.

    Call when all layers have written their items, and before the next step's ``swap_in``, which may give the
    slots away.
    """
    device, shape = requests.state.device, (requests.num_reqs,)
    check_range("num_new", requests.num_new, 1, 2)  # exactly 1
    if num_newest is not None:
        check_tensor("num_newest", num_newest, dtypes=(torch.int32,), shape=shape, device=device)
    pools = _check_pools(k_host, k_dev, device)
    kernels = _cuda_kernels("backup_newest", device) or reference
    kernels.backup_newest(requests, pools, num_newest)


def newest_slots(requests: StepRequests) -> Tensor:
    """Return the device slots, int32 [num_reqs * num_new], to which the model writes each request's new
    items, in the order of their positions.

    The slot is -1 for padding, for a position of a dense row without a page or of a hisparse row without a
    host page, and for a position beyond the context.
    """
    device = requests.state.device
    out = torch.empty(requests.num_reqs * requests.num_new, dtype=torch.int32, device=device)
    kernels = _cuda_kernels("newest_slots", device) or reference
    kernels.newest_slots(requests, out)
    return out


def _cuda_kernels(name: str, device: torch.device) -> ModuleType | None:
    """Return ``kernels.cuda`` for CUDA and None for the CPU; raises KernelUnavailableError for others."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        from hisparse_pd.kernels import cuda

        return cuda
    raise KernelUnavailableError(
        f"{name}: no kernel for device {str(device)!r}; the supported devices are 'cpu' and 'cuda'"
    )


def _check_pools(k_host: Tensor, k_dev: Tensor, device: torch.device | None) -> reference.Pools:
    """Check both pools, and return them."""
    check_tensor("k_dev", k_dev, dtypes=(torch.uint8,), shape=(None, None, None), device=device)
    shape = (k_dev.shape[0], None, k_dev.shape[2])
    check_tensor("k_host", k_host, dtypes=(torch.uint8,), shape=shape)
    if k_host.device.type != "cpu":
        raise KernelArgumentError(f"k_host: expected a tensor in host memory, got device {k_host.device}")
    return reference.Pools(k_host, k_dev)
