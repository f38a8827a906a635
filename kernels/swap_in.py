"""Swap-in: page selected positions that are not hot from the host pool into the hot buffers.

The public wrappers. They check every argument that needs no synchronisation, then dispatch by the device of
the state's tables: ``cpu`` runs ``kernels/reference.py``, ``cuda`` runs ``kernels/cuda.py``, whose host pools
have to be pinned or registered. Nothing here allocates per-request state; outputs and plans may be given, so
that a CUDA graph can capture a call.

Common arguments:

- ``num_new``: new positions of each request in this step, 1 to ``state.max_new``: the newest token's and its
  drafts'. It may be another one in every step.
- ``seq_lens``: int32 or int64 [num_reqs], tokens of each request including the last new one, so that its new
  positions are [seq_len - num_new, seq_len). The first of them is in the context; others may be behind it, or
  behind the pages that the request has: such a draft has no slot (-1), and changes nothing.
- ``req_rows``: int32 or int64 [num_reqs], distinct rows of the tables, all in [0, num_rows).
- ``num_real_reqs``: int32 [1]; requests from this index on are padding and are ignored.
- ``k_host``, ``k_dev``: uint8 [num_layers, num_slots, item_bytes]; the slot counts may differ. Each may have
  layer and slot strides of its own, layers outside slots or slots outside layers, as long as an item's bytes
  are contiguous and no two items overlap; 16-byte aligned addresses, strides and items move fastest.
  A second pair ``v_host``, ``v_dev`` with its own item size may be given for models that keep V apart.

All run on the current stream of their device and do not synchronise; on the CPU they are done on return.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import reference
from kernels.checks import KernelArgumentError, check_at_least, check_pool, check_range, check_tensor
from kernels.hot_state import MAX_LOOKUP_SLOTS, HotBufferState, check_page_ids
from kernels.miss_plan import MissPlan

INTEGERS = (torch.int32, torch.int64)


class KernelUnavailableError(RuntimeError):
    """No implementation for the device."""


def swap_in(
    selected: Tensor,
    seq_lens: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    state: HotBufferState,
    *,
    group: int,
    layer: int,
    k_host: Tensor,
    k_dev: Tensor,
    v_host: Tensor | None = None,
    v_dev: Tensor | None = None,
    out: Tensor | None = None,
    miss_plan: MissPlan | None = None,
    num_new: int = 1,
) -> Tensor:
    """Make the selected positions of every request readable in the device pool and say where they are.

    ``selected``: int32 [num_reqs * num_new, top_k], positions in [0, seq_len) in any order, -1 for none,
    duplicates allowed. The rows of one request are next to each other in the order of its new positions, and
    count as one selection: what several of them select is fetched once, and counted once.
    Returns ``out``, int32 [num_reqs * num_new, top_k] (made when None): the device slot of each selected
    position, -1 where ``selected`` is -1, in padding rows, and for a draft that has no slot.

    A dense row is resolved through its page table. In a hisparse row the new positions take the entries that
    ``hot_state.ring_entries`` says, whether they are selected or not; their bytes are written there by the
    model and never copied from host. While the row fits (``seq_len - num_new + max_new <= capacity``) a
    missing position goes to its own hot_index and nothing is evicted. Otherwise misses take the entries below
    ``capacity - max_new`` that this step does not use: free ones first, then the least recently used by age
    class (``reference.age_classes``), those of one class in the order of their hot_index. Which of the misses
    takes which of these entries is not specified. All of them find one when ``capacity`` is at least
    ``num_new * top_k + max_new``.

    A hisparse row whose first new position has no host page, here and in the functions below, is left out
    like padding and gets HotBufferError.NO_HOST_SLOT: its token could not be backed up.

    Mutates the tables of ``group``, the counters and flags, ``k_dev[layer]`` (and ``v_dev[layer]``), and
    ``miss_plan``, which then holds this call's copies. A request whose selection cannot be served in full
    (HotBufferError says why) gets -1 in the places concerned and a bit in ``error_flags``; its tables stay
    consistent.

    On a GPU ``num_reqs * num_new * top_k`` is below 2**24, ``top_k`` at most 4096, ``num_new * top_k`` at
    most 16384 and ``state.max_capacity`` at most 32768. Raises KernelArgumentError, KernelUnavailableError.
    """
    pools = _check_pools(k_host, k_dev, v_host, v_dev, state)
    check_range("layer", layer, 0, k_dev.shape[0])
    return _resolve(
        selected, seq_lens, req_rows, num_real_reqs, state, group, layer, pools, out, miss_plan, num_new
    )


def plan_misses(
    selected: Tensor,
    seq_lens: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    state: HotBufferState,
    *,
    group: int,
    miss_plan: MissPlan,
    out: Tensor | None = None,
    num_new: int = 1,
) -> Tensor:
    """``swap_in`` without its copies, which ``replay_misses`` makes later in each of the group's layers.

    So the copies, which need PCIe and little else, can be a launch of their own, beside kernels that compute.
    """
    return _resolve(selected, seq_lens, req_rows, num_real_reqs, state, group, 0, (), out, miss_plan, num_new)


def _resolve(
    selected: Tensor,
    seq_lens: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    state: HotBufferState,
    group: int,
    layer: int,
    pools: reference.Pools,
    out: Tensor | None,
    miss_plan: MissPlan | None,
    num_new: int,
) -> Tensor:
    """``swap_in`` with copies between ``pools``, of which there may be none."""
    check_tensor("selected", selected, dtypes=(torch.int32,), shape=(None, None), device=state.device)
    check_range("num_new", num_new, 1, state.max_new + 1)
    num_rows, top_k = selected.shape
    if num_rows % num_new:
        raise KernelArgumentError(f"selected: expected {num_new} rows a request, got {num_rows} rows")
    _check_requests(seq_lens, req_rows, num_real_reqs, num_rows // num_new, state)
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
        cuda.swap_in(
            selected, seq_lens, req_rows, num_real_reqs, state, group, layer, pools, out, miss_plan, num_new
        )
        return out
    src_host_slots, dst_device_slots = reference.resolve(
        selected, seq_lens, req_rows, num_real_reqs, state, group, out, num_new
    )
    reference.copy_items(pools, layer, src_host_slots, dst_device_slots)
    if miss_plan is not None:
        num_misses = len(src_host_slots)
        miss_plan.src_host_slots[:num_misses] = torch.from_numpy(src_host_slots)
        miss_plan.dst_device_slots[:num_misses] = torch.from_numpy(dst_device_slots)
        miss_plan.num_misses[0] = num_misses
    return out


def replay_misses(
    miss_plan: MissPlan,
    layer: int,
    k_host: Tensor,
    k_dev: Tensor,
    v_host: Tensor | None = None,
    v_dev: Tensor | None = None,
    max_blocks: int | None = None,
) -> None:
    """Copy what ``miss_plan`` recorded in another layer of the same group; the device slots are the same.

    ``max_blocks``: multiprocessors that it may take up on a GPU, at least 1; None: all.
    """
    pools = _check_pools(k_host, k_dev, v_host, v_dev, None)
    check_range("layer", layer, 0, k_dev.shape[0])
    if max_blocks is not None:
        check_at_least("max_blocks", max_blocks, 1)
    if (cuda := _cuda_kernels("replay_misses", miss_plan.num_misses.device)) is not None:
        cuda.replay_misses(miss_plan, layer, pools, max_blocks)
        return
    num_misses = int(miss_plan.num_misses)
    reference.copy_items(
        pools,
        layer,
        miss_plan.src_host_slots[:num_misses].numpy(),
        miss_plan.dst_device_slots[:num_misses].numpy(),
    )


def start_row(
    state: HotBufferState,
    row: int,
    *,
    hot_slots: Tensor,
    host_pages: Tensor,
    lookup_pages: Tensor,
    index_pages: Tensor,
    num_tokens: int,
    hints: Sequence[NDArray[np.int32]],
    layers_of_group: Sequence[Sequence[int]],
    k_host: Tensor,
    k_dev: Tensor,
    v_host: Tensor | None = None,
    v_dev: Tensor | None = None,
) -> list[int]:
    """Make ``row`` a hisparse row, its hot buffer warm in every group; returns how many positions of each.

    ``hot_slots``: integer [capacity], the device slots that the request owns. ``host_pages`` and
    ``index_pages``: integer [n], ids of its first pages in the host and the index pool. ``lookup_pages``: as
    many as ``host_pages``, of no other row. All on the CPU.
    ``num_tokens``: positions [0, num_tokens) are in the host pool. When they leave room for the next ones
    (``num_tokens + max_new <= capacity``) all of them go to their own hot_index, and ``hints`` are not
    looked at: such a request misses nothing until it outgrows the buffer. Otherwise a group's hint (int32
    [n]; -1 and duplicates allowed) fills the buffer from hot_index 0, with its first ``capacity - max_new``
    distinct positions.
    ``hints``: one for each group, or one for all.
    ``layers_of_group``: at least one each, all copied.

    The row must be empty, as ``create`` and ``reset_row`` leave it. On a GPU that is one copy to the device
    and one launch, on the current stream, which may be a side stream: no other row is touched. Nothing is
    waited for; pages may be added to the row meanwhile. Raises KernelArgumentError before it changes
    anything.
    """
    row_start = RowStart(
        state,
        row,
        hot_slots=hot_slots,
        host_pages=host_pages,
        lookup_pages=lookup_pages,
        index_pages=index_pages,
        num_tokens=num_tokens,
        hints=hints,
        layers_of_group=layers_of_group,
        k_host=k_host,
        k_dev=k_dev,
        v_host=v_host,
        v_dev=v_dev,
    )
    while row_start.num_left_bytes is not None:
        row_start.launch_slice(None)
    return row_start.num_warm


class RowStart:
    """``start_row`` in slices, so that steps of others beside it need not share PCIe with all of it at once.

    Arguments as of ``start_row``, and what it raises. The row may be used when ``num_left_bytes`` is None and
    the last launch is over.
    """

    def __init__(
        self,
        state: HotBufferState,
        row: int,
        *,
        hot_slots: Tensor,
        host_pages: Tensor,
        lookup_pages: Tensor,
        index_pages: Tensor,
        num_tokens: int,
        hints: Sequence[NDArray[np.int32]],
        layers_of_group: Sequence[Sequence[int]],
        k_host: Tensor,
        k_dev: Tensor,
        v_host: Tensor | None = None,
        v_dev: Tensor | None = None,
    ) -> None:
        pools = _check_pools(k_host, k_dev, v_host, v_dev, state)
        cpu = torch.device("cpu")
        given = {"host_pages": host_pages, "lookup_pages": lookup_pages, "index_pages": index_pages}
        for name, tensor in ({"hot_slots": hot_slots} | given).items():
            check_tensor(name, tensor, dtypes=INTEGERS, shape=(None,), device=cpu)
        state.check_hisparse(row, hot_slots, host_pages, lookup_pages)
        check_range("k_host slots", k_host.shape[1], 0, MAX_LOOKUP_SLOTS + 1)
        check_page_ids("host_pages", host_pages, k_host.shape[1] // state.page_size)
        state.check_pages("index_pages", 0, index_pages)
        most_tokens = min(state.max_context, host_pages.shape[0] * state.page_size)
        check_range("num_tokens", num_tokens, 0, most_tokens + 1)
        if len(layers_of_group) != state.num_groups:
            raise KernelArgumentError(
                f"layers_of_group: expected {state.num_groups} groups, got {len(layers_of_group)}"
            )
        for layers in layers_of_group:
            check_at_least("layers_of_group: layers of a group", len(layers), 1)
            for layer in layers:
                check_range("layers_of_group", layer, 0, k_dev.shape[0])
        warm_up = reference.plan_warm_up(
            state.num_groups, hot_slots.shape[0], state.max_new, num_tokens, hints
        )
        self._state, self._row, self._pools = state, row, pools
        self._hot_slots = hot_slots
        self._pages = host_pages, lookup_pages, index_pages
        self._warm_up = warm_up
        self._layers = [
            (layer, group, int(layer == layers[0]))
            for group, layers in enumerate(layers_of_group)
            for layer in layers
        ]
        """Those still to be copied: layer, group, and whether the group's tables are entered with it."""
        self._item_bytes = sum(dev.shape[2] for _, dev in pools)
        self._is_begun = False
        self.num_warm: list[int] = warm_up.num_warm.tolist()
        """How many positions of each group are hot afterwards."""

    @property
    def num_left_bytes(self) -> int | None:
        """Of items that are still to be copied; None when all that there is to do was launched."""
        return sum(map(self._num_bytes, self._layers)) if self._layers else None

    def _num_bytes(self, layer: tuple[int, int, int]) -> int:
        return self.num_warm[layer[1]] * self._item_bytes

    def launch_slice(self, most_bytes: int | None) -> int:
        """Copy some layers more, of ``most_bytes`` in all if one has no more, or all; returns the bytes.

        The first slice fills the row's tables of pages and slots, too.
        """
        num_layers = num_bytes = 0
        for entry in self._layers:
            of_layer = self._num_bytes(entry)
            if num_layers and most_bytes is not None and num_bytes + of_layer > most_bytes:
                break
            num_layers += 1
            num_bytes += of_layer
        some, self._layers = self._layers[:num_layers], self._layers[num_layers:]
        state, row = self._state, self._row
        if (cuda := _cuda_kernels("start_row", state.device)) is not None:
            cuda.start_row(state, row, self._hot_slots, *self._pages, self._warm_up, some, self._pools)
            return num_bytes
        host_pages, lookup_pages, index_pages = self._pages
        if not self._is_begun:
            state.assign_row(row, self._hot_slots, host_pages, lookup_pages)
            state.set_index_pages(row, 0, index_pages)
        self._is_begun = True
        for layer, group, is_first in some:
            positions = self._warm_up.of_group(group)
            if is_first:
                reference.enter(state, group, row, positions)
            reference.copy_items(self._pools, layer, *reference.slots_of(state, row, positions))
        return num_bytes


def start_dense_row(state: HotBufferState, row: int, *, pages: Tensor, index_pages: Tensor) -> None:
    """Make an empty ``row`` a dense row. ``pages``, ``index_pages``: integer [n] on the CPU, the page ids of
    its first pages in the device and the index pool. Waits for nothing, as ``start_row``.
    """
    state.set_pages(row, 0, pages)
    state.set_index_pages(row, 0, index_pages)


def backup_newest(
    seq_lens: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    state: HotBufferState,
    *,
    k_host: Tensor,
    k_dev: Tensor,
    v_host: Tensor | None = None,
    v_dev: Tensor | None = None,
    num_newest: Tensor | None = None,
) -> None:
    """Copy the newest items of every hisparse row, in all layers, to their host slots; dense rows are left
    alone.

    ``seq_lens``: here without the drafts that were not accepted, so in [1, max_context].
    ``num_newest``: int32 [num_reqs], 0 to ``min(seq_len, max_new)``: positions
    [seq_len - num_newest, seq_len) are copied, which must have been new in the last step. None: one of each.

    To be called after the model's forward and before the next step's ``swap_in``, which may give the
    slots away.
    """
    num_reqs = seq_lens.shape[0]
    _check_requests(seq_lens, req_rows, num_real_reqs, num_reqs, state)
    if num_newest is not None:
        check_tensor("num_newest", num_newest, dtypes=(torch.int32,), shape=(num_reqs,), device=state.device)
    pools = _check_pools(k_host, k_dev, v_host, v_dev, state)
    if (cuda := _cuda_kernels("backup_newest", state.device)) is not None:
        cuda.backup_newest(seq_lens, req_rows, num_real_reqs, state, pools, num_newest)
        return
    reference.backup_newest(seq_lens, req_rows, num_real_reqs, state, pools, num_newest)


def newest_slots(
    seq_lens: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    state: HotBufferState,
    *,
    out: Tensor | None = None,
    num_new: int = 1,
) -> Tensor:
    """Device slots, int32 [num_reqs * num_new], that the model writes each request's new items to, in the
    order of their positions; -1 for padding.

    A position of a dense row whose page is not set gives -1 too, and so does one of a hisparse row whose host
    page is not, and one behind the context.
    """
    check_range("num_new", num_new, 1, state.max_new + 1)
    _check_requests(seq_lens, req_rows, num_real_reqs, seq_lens.shape[0], state)
    num_slots = seq_lens.shape[0] * num_new
    if out is None:
        out = torch.empty(num_slots, dtype=torch.int32, device=state.device)
    else:
        check_tensor("out", out, dtypes=(torch.int32,), shape=(num_slots,), device=state.device)
    if (cuda := _cuda_kernels("newest_slots", state.device)) is not None:
        cuda.newest_slots(seq_lens, req_rows, num_real_reqs, state, out, num_new)
        return out
    reference.newest_slots(seq_lens, req_rows, num_real_reqs, state, out, num_new)
    return out


def _cuda_kernels(name: str, device: torch.device) -> ModuleType | None:
    """``kernels.cuda`` for a CUDA device, None for the CPU; raises for any other."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        from kernels import cuda

        return cuda
    raise KernelUnavailableError(
        f"{name}: no kernel for device {str(device)!r}; the supported devices are 'cpu' and 'cuda'"
    )


def _check_requests(
    seq_lens: Tensor, req_rows: Tensor, num_real_reqs: Tensor, num_reqs: int, state: HotBufferState
) -> None:
    check_tensor("seq_lens", seq_lens, dtypes=INTEGERS, shape=(num_reqs,), device=state.device)
    check_tensor("req_rows", req_rows, dtypes=INTEGERS, shape=(num_reqs,), device=state.device)
    check_tensor("num_real_reqs", num_real_reqs, dtypes=(torch.int32,), shape=(1,), device=state.device)


def _check_pools(
    k_host: Tensor, k_dev: Tensor, v_host: Tensor | None, v_dev: Tensor | None, state: HotBufferState | None
) -> reference.Pools:
    """The given (host, device) pairs, after their checks."""
    device = None if state is None else state.device
    pools = [("k", k_host, k_dev)]
    if (v_host is None) != (v_dev is None):
        given, missing = ("v_dev", "v_host") if v_host is None else ("v_host", "v_dev")
        raise KernelArgumentError(f"{missing}: expected with {given}, got None")
    if v_host is not None and v_dev is not None:
        pools.append(("v", v_host, v_dev))
    for name, host, dev in pools:
        check_pool(f"{name}_dev", dev, device=device)
        check_pool(f"{name}_host", host, num_layers=dev.shape[0], item_bytes=dev.shape[2])
        if host.device.type != "cpu":
            raise KernelArgumentError(
                f"{name}_host: expected a tensor in host memory, got device {host.device}"
            )
    if len(pools) == 2 and v_dev is not None and v_dev.shape[0] != k_dev.shape[0]:
        raise KernelArgumentError(f"v_dev: expected {k_dev.shape[0]} layers like k_dev, got {v_dev.shape[0]}")
    return tuple((host, dev) for _, host, dev in pools)
