"""The CUDA side of ``kernels/swap_in.py``: compiles ``csrc/swap_in.cu`` at run time and launches it.

Owns the compiled modules and, for every state, the workspace through which the blocks of one launch
synchronise and hand copies to each other. ``kernels/swap_in.py`` has checked the arguments; checks that only
matter on a GPU are here. Every launch goes to torch's current stream of the state's device. A CUDA graph can
capture it, except for the first ``swap_in`` of a state or of a larger batch, which allocates the workspace.
Launches of one state must follow each other in one stream or be ordered by events.

cupy is imported, and the code compiled, on the first launch.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError, check_range, check_tensor
from hisparse_pd.kernels.cuda_launch import (
    HOPPER,
    cupy_module,
    launch,
    max_block_shared_bytes,
    num_multiprocessors,
    translation_unit,
)
from hisparse_pd.kernels.hot_state import HotBufferState, ReadAt, StepRequests
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.reference import Pools, WarmUp

MAIN_SOURCE = "swap_in.cu"

NUM_PLANNERS = 512
"""Threads of a ``swap_in`` block that work on positions."""
NUM_FETCHERS = 3
"""Warps of a block that fetch items before their destination is known."""
MAX_EARLY = 3 * NUM_FETCHERS
NUM_THREADS = NUM_PLANNERS + 32 + 32 * NUM_FETCHERS
MAX_TOP_K = 4096
MAX_NEW = 32
MAX_POSITIONS = 32 * NUM_PLANNERS
"""Most positions that one request selects: one block must be able to take them."""
MAX_CAPACITY = 32768
MAX_BLOCKS = 160
ENTRIES_PER_ROUND = 8 * NUM_PLANNERS
ROUND_HEADER_BYTES = 3 * 128 + 2 * 4 * MAX_BLOCKS + 128 * (MAX_BLOCKS // 2)
WIDEST_VECTOR_BYTES = 16
"""The constants from NUM_PLANNERS to here are the same as in csrc/*.cuh."""
MAX_EARLY_ITEM_BYTES = 4 * 32 * 16 - 128
"""One round of csrc/copy.cuh's EarlyItem, less the part of a line before the first byte."""

MAX_SELECTED = 1 << 24
"""Bound on the selected positions of a whole batch."""
MIN_SLICE_LEN = 32
"""Fewest positions of a block's slice."""
MANY_POSITIONS = 256
"""Slices of this many positions or more make a block read and write a row's tables in order."""
MAX_READ_AHEAD = 128
"""Slices of up to this many positions have their misses fetched as they are seen, before duplicates are
removed. Not where several new positions select: they share many positions, which would be fetched more than
once."""
SLICES_THAT_FILL_PCIE = 8
"""This many blocks of a request read from the host at full rate, so that no other blocks need to help."""
MAX_SLICES_IN_PLACE = 2
"""Requests of up to this many blocks stay on their multiprocessors from launch to launch."""
COPY_THREADS = 256
COPY_BLOCKS_PER_SM = 4
CHECK_BLOCKS_PER_SM = 8
FILL_BLOCKS = 12
"""Multiprocessors that the warm-up of a row takes from concurrent steps; these few already fill PCIe."""
ANY_PAGE_SIZE = 64
"""Page size for kernels that read no pages: the usual one, for which the code is compiled anyway."""

_PINNED = 1
"""cudaMemoryTypeHost"""

_POINTER = np.dtype(np.uint64)
_INT = np.dtype(np.int32)
_LONG = np.dtype(np.int64)


def _struct(**fields: Any) -> np.dtype[Any]:
    return np.dtype(list(fields.items()), align=True)


# The structs of csrc/params.cuh, field by field.
_POOL = _struct(
    host=_POINTER, dev=_POINTER, host_layer_bytes=_LONG, host_slot_bytes=_LONG,
    dev_layer_bytes=_LONG, dev_slot_bytes=_LONG, item_bytes=_INT, vector_bytes=_INT,
)  # fmt: skip
_TABLES = _struct(
    lookup_to_hot=_POINTER, hot_to_lookup=_POINTER, stamps=_POINTER, step=_POINTER,
    hot_slots=_POINTER, capacity=_POINTER, page_table=_POINTER, host_pages=_POINTER, lookup_pages=_POINTER,
    counters=_POINTER, error_flags=_POINTER, num_rows=_INT, max_context=_INT, max_capacity=_INT,
    max_pages=_INT,
)  # fmt: skip
_REQUESTS = _struct(
    seq_lens=_POINTER, req_rows=_POINTER, num_real_reqs=_POINTER, num_reqs=_INT, seq_lens_are_64=_INT,
    req_rows_are_64=_INT, num_new=_INT,
)  # fmt: skip
_PLAN = _struct(
    src_host_slots=_POINTER, dst_device_slots=_POINTER, req_rows=_POINTER, positions=_POINTER,
    num_misses=_POINTER,
)  # fmt: skip
_CHECKS = _struct(
    row_checks=_POINTER, index_pages=_POINTER, wrong_rows=_POINTER, error_flags=_POINTER, num_slots=_LONG,
    max_pages=_INT, read_at=_INT,
)  # fmt: skip
_SWAP_IN = _struct(
    tables=_TABLES, requests=_REQUESTS, plan=_PLAN, pool=_POOL, checks=_CHECKS, selected=_POINTER,
    out=_POINTER, num_launches=_POINTER, rounds=_POINTER, left=_POINTER, round_bytes=_INT,
    left_per_block=_INT, num_selected=_INT, num_units=_INT, num_slices=_INT, slice_reciprocal=_INT,
    stride=_INT, slice_len=_INT, layer=_INT, hot_slots_in_shared=_INT, max_early=_INT, reads_ahead=_INT,
    spreads=_INT, keeps_place=_INT,
)  # fmt: skip
_COPY = _struct(plan=_PLAN, pool=_POOL, checks=_CHECKS, layer=_INT, padding=_INT)
_FILL = _struct(
    tables=_TABLES, pool=_POOL, checks=_CHECKS, staged=_POINTER, hot_slots=_POINTER, host_pages=_POINTER,
    lookup_pages=_POINTER, index_pages=_POINTER, capacity=_POINTER, group_lookup_slots=_LONG,
    group_entries=_LONG, row=_INT, num_hot_slots=_INT, num_host_pages=_INT, num_index_pages=_INT,
    num_layers=_INT, num_groups=_INT, max_warm=_INT, num_hints=_INT,
)  # fmt: skip
_BACKUP = _struct(
    tables=_TABLES, requests=_REQUESTS, pool=_POOL, num_newest=_POINTER, num_layers=_INT, padding=_INT
)  # fmt: skip
_CHECK_ROWS = _struct(
    pool=_POOL, slots=_POINTER, positions=_POINTER, out_slots=_POINTER, out=_POINTER, layer_out=_LONG,
    num_items=_LONG, first_layer=_INT, padding=_INT,
)  # fmt: skip
_CHECK_DENSE_ROW = _struct(tables=_TABLES, pool=_POOL, checks=_CHECKS, row=_INT, num_tokens=_INT)
_NEWEST_SLOTS = _struct(tables=_TABLES, requests=_REQUESTS, out=_POINTER)


def swap_in(
    selected: Tensor,
    requests: StepRequests,
    group: int,
    layer: int,
    pools: Pools | None,
    out: Tensor,
    miss_plan: MissPlan | None,
) -> None:
    """Fill ``out``, update the tables and copy the misses, in one launch; see ``kernels.swap_in.swap_in``.
    Without ``pools`` nothing is copied.

    This differs from the reference in two ways. When misses exceed the entries, any of the missing positions
    may be served. A row or a seq_len out of range turns its request into padding instead of raising an
    exception (with BAD_POSITION when the row is valid).
    """
    state, num_new = requests.state, requests.num_new
    num_reqs, top_k = requests.num_reqs, selected.shape[1]
    if num_reqs == 0 or top_k == 0:
        if miss_plan is not None:
            miss_plan.num_misses.zero_()
        return
    check_range("top_k", top_k, 1, MAX_TOP_K + 1)
    num_selected = num_new * top_k
    check_range("state.max_new", state.max_new, 1, MAX_NEW + 1)
    check_range("num_new * top_k", num_selected, 1, MAX_POSITIONS + 1)
    check_range("num_reqs * num_new * top_k", num_reqs * num_selected, 1, MAX_SELECTED)
    check_range("state.max_capacity", state.max_capacity, 1, MAX_CAPACITY + 1)
    if miss_plan is not None:
        for name, dtype, shape in (
            ("src_host_slots", torch.int64, (None,)),
            ("dst_device_slots", torch.int64, (None,)),
            ("req_rows", torch.int32, (None,)),
            ("positions", torch.int32, (None,)),
            ("num_misses", torch.int32, (1,)),
        ):
            tensor = getattr(miss_plan, name)
            check_tensor(f"miss_plan.{name}", tensor, dtypes=(dtype,), shape=shape, device=state.device)
    split = _Split.of(num_reqs, num_selected, num_multiprocessors(state.device), copies=pools is not None)
    workspace = _workspace(state)
    positions_per_thread = split.positions_per_thread
    capacity = _round_up(state.max_capacity, ENTRIES_PER_ROUND)
    pool = _pool(pools)
    is_wide = pools is None or _is_wide(pool)
    kernel = _kernel("swap_in", positions_per_thread, is_wide, state.page_size, state.max_new)
    max_slice = NUM_PLANNERS * positions_per_thread
    shared_bytes = capacity + 2 * max_slice
    max_shared_bytes = max_block_shared_bytes(state.device) - kernel.shared_size_bytes
    # A block with many positions reads the row's slots in order, not one by one.
    hot_slots_in_shared = (
        split.slice_len >= MANY_POSITIONS and shared_bytes + 4 * capacity <= max_shared_bytes
    )
    if hot_slots_in_shared:
        shared_bytes += 4 * capacity
    if shared_bytes > kernel.max_dynamic_shared_size_bytes:
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    parameters = np.zeros((), _SWAP_IN)
    parameters["tables"] = _tables(state, group)
    parameters["requests"] = _requests(requests)
    if miss_plan is not None:
        parameters["plan"] = _plan(miss_plan)
    parameters["pool"] = pool
    if pools is not None and is_wide and pools[1].shape[2] <= MAX_EARLY_ITEM_BYTES:
        parameters["max_early"] = MAX_EARLY
        parameters["reads_ahead"] = split.slice_len <= MAX_READ_AHEAD and num_new == 1
    if pools is not None:
        parameters["checks"] = _checks(state, ReadAt.SWAP_IN)
    parameters["selected"] = selected.data_ptr()
    parameters["out"] = out.data_ptr()
    parameters["num_launches"] = workspace.num_launches.data_ptr()
    parameters["rounds"] = workspace.rounds.data_ptr()
    parameters["left"] = workspace.left(split.num_blocks * split.left_per_block).data_ptr()
    parameters["round_bytes"] = workspace.rounds.shape[1]
    parameters["left_per_block"] = split.left_per_block
    parameters["num_selected"] = num_selected
    parameters["num_units"] = split.num_units
    parameters["num_slices"] = split.num_slices
    parameters["slice_reciprocal"] = -(-(1 << 16) // split.num_slices)
    parameters["stride"] = split.num_units // split.num_slices
    parameters["slice_len"] = split.slice_len
    parameters["spreads"] = split.copies and split.num_slices < SLICES_THAT_FILL_PCIE
    parameters["keeps_place"] = split.keeps_place
    parameters["layer"] = layer
    parameters["hot_slots_in_shared"] = hot_slots_in_shared
    launch(kernel, state.device, split.num_blocks, NUM_THREADS, parameters, shared_bytes)


def replay_misses(
    miss_plan: MissPlan, layer: int, pools: Pools, max_blocks: int | None, state: HotBufferState | None
) -> None:
    """See ``kernels.swap_in.replay_misses``."""
    if miss_plan.max_misses == 0:
        return
    device = miss_plan.num_misses.device
    parameters = np.zeros((), _COPY)
    parameters["plan"] = _plan(miss_plan)
    parameters["pool"] = pool = _pool(pools)
    parameters["layer"] = layer
    page_size = ANY_PAGE_SIZE
    if state is not None and state.row_checks is not None:
        page_size = state.page_size
        parameters["checks"] = _checks(state, ReadAt.SWAP_IN)
    kernel = _kernel("copy_planned", only_wide_items=_is_wide(pool), page_size=page_size)
    if max_blocks is not None and max_blocks < num_multiprocessors(device):
        _launch_copies(kernel, device, parameters, max_blocks)
    else:
        num_blocks = COPY_BLOCKS_PER_SM * num_multiprocessors(device)
        launch(kernel, device, num_blocks, COPY_THREADS, parameters)


def start_row(
    state: HotBufferState,
    row: int,
    hot_slots: Tensor,
    host_pages: Tensor,
    lookup_pages: Tensor,
    index_pages: Tensor,
    warm_up: WarmUp,
    layers: Sequence[tuple[int, int, int]],
    pools: Pools,
) -> None:
    """Run one slice of ``kernels.swap_in.RowStart``: one copy of the host's data to the device, and one
    launch.

    ``layers``: the layers whose items are copied, each with its group and whether the group's tables are
    filled with it.
    """
    pages = (host_pages, lookup_pages, index_pages)
    parts = (hot_slots, *pages, np.array(layers), warm_up.num_warm, warm_up.positions)
    host_staged = torch.empty(
        sum(math.prod(part.shape) for part in parts), dtype=torch.int32, pin_memory=True
    )  # torch keeps it alive until the copy from it is done
    np.concatenate(
        [np.asarray(part).reshape(-1) for part in parts], out=host_staged.numpy(), casting="same_kind"
    )
    staged = host_staged.to(state.device, non_blocking=True)
    parameters = np.zeros((), _FILL)
    parameters["tables"] = _tables(state, 0)
    parameters["pool"] = pool = _pool(pools)
    parameters["checks"] = _checks(state, ReadAt.START)
    parameters["staged"] = staged.data_ptr()
    for name in ("hot_slots", "host_pages", "lookup_pages", "index_pages", "capacity"):
        parameters[name] = getattr(state, name)[row].data_ptr()
    parameters["group_lookup_slots"] = state.lookup_to_hot.stride(0)
    parameters["group_entries"] = state.hot_to_lookup.stride(0)
    parameters["row"] = row
    parameters["num_hot_slots"] = hot_slots.shape[0]
    parameters["num_host_pages"] = host_pages.shape[0]
    parameters["num_index_pages"] = index_pages.shape[0]
    parameters["num_layers"] = len(layers)
    parameters["num_groups"] = state.num_groups
    parameters["num_hints"], parameters["max_warm"] = warm_up.positions.shape
    kernel = _kernel(
        "fill_row", only_wide_items=_is_wide(pool), page_size=state.page_size, max_new=state.max_new
    )
    num_blocks = min(FILL_BLOCKS, num_multiprocessors(state.device))
    _launch_copies(kernel, state.device, parameters, num_blocks)


def backup_newest(requests: StepRequests, pools: Pools, num_newest: Tensor | None) -> None:
    """See ``kernels.swap_in.backup_newest``; one launch for all requests, positions and layers. Values of
    ``num_newest`` out of range are clamped to it.
    """
    state, num_layers = requests.state, pools[1].shape[0]
    num_items = requests.num_reqs * num_layers * (1 if num_newest is None else state.max_new)
    if num_items == 0:
        return
    parameters = np.zeros((), _BACKUP)
    parameters["tables"] = _tables(state, 0)
    parameters["requests"] = _requests(requests)
    parameters["pool"] = _pool(pools)
    parameters["num_newest"] = 0 if num_newest is None else num_newest.data_ptr()
    parameters["num_layers"] = num_layers
    warps_per_block = COPY_THREADS // 32
    num_blocks = min(-(-num_items // warps_per_block), COPY_BLOCKS_PER_SM * num_multiprocessors(state.device))
    launch(
        _kernel("backup_newest", page_size=state.page_size, max_new=state.max_new),
        state.device,
        num_blocks,
        COPY_THREADS,
        parameters,
    )


def row_checks(
    pool: Tensor, slots: Tensor, positions: Tensor, first_layer: int, out: Tensor, out_slots: Tensor | None
) -> None:
    """Fill ``out``, int32 [num_layers, n], or only its columns ``out_slots`` (int64 [n]), in one launch; see
    ``kernels.row_check``.
    """
    device, num_items, num_layers = slots.device, slots.shape[0], pool.shape[0]
    parameters = np.zeros((), _CHECK_ROWS)
    parameters["pool"] = one_pool = _one_pool(pool)
    parameters["slots"] = slots.data_ptr()
    parameters["positions"] = positions.data_ptr()
    parameters["out_slots"] = 0 if out_slots is None else out_slots.data_ptr()
    parameters["out"] = out.data_ptr()
    parameters["layer_out"] = out.stride(0)
    parameters["num_items"] = num_items
    parameters["first_layer"] = first_layer
    most_blocks = CHECK_BLOCKS_PER_SM * num_multiprocessors(device)
    num_blocks = min(-(-num_items // (COPY_THREADS // 32)), most_blocks)
    kernel = _kernel("check_rows", only_wide_items=_is_wide(one_pool))
    launch(kernel, device, num_blocks, COPY_THREADS, parameters, num_blocks_y=num_layers)


def check_dense_row(state: HotBufferState, row: int, pool: Tensor, num_tokens: int) -> None:
    """See ``kernels.row_check.check_dense_row``; one launch."""
    parameters = np.zeros((), _CHECK_DENSE_ROW)
    parameters["tables"] = _tables(state, 0)
    parameters["pool"] = one_pool = _one_pool(pool)
    parameters["checks"] = _checks(state, ReadAt.START)
    parameters["row"], parameters["num_tokens"] = row, num_tokens
    most_blocks = CHECK_BLOCKS_PER_SM * num_multiprocessors(state.device)
    num_blocks = min(-(-num_tokens // (COPY_THREADS // 32)), most_blocks)
    kernel = _kernel("check_dense_row", only_wide_items=_is_wide(one_pool), page_size=state.page_size)
    launch(kernel, state.device, num_blocks, COPY_THREADS, parameters, num_blocks_y=pool.shape[0])


def newest_slots(requests: StepRequests, out: Tensor) -> None:
    """See ``kernels.swap_in.newest_slots``."""
    state, num_slots = requests.state, out.shape[0]
    if num_slots == 0:
        return
    parameters = np.zeros((), _NEWEST_SLOTS)
    parameters["tables"] = _tables(state, 0)
    parameters["requests"] = _requests(requests)
    parameters["out"] = out.data_ptr()
    kernel = _kernel("newest_slots", page_size=state.page_size, max_new=state.max_new)
    launch(kernel, state.device, -(-num_slots // 128), 128, parameters)


def source() -> str:
    """Return the whole translation unit: ``csrc/swap_in.cu`` with its own headers."""
    return translation_unit(MAIN_SOURCE)


def compile_options(
    positions_per_thread: int, only_wide_items: bool, page_size: int, max_new: int
) -> tuple[str, ...]:
    """Return the compiler's options without the architecture.

    ``positions_per_thread``: 1, 2, 4, 8, 16 or 32. ``only_wide_items``: both pools allow 16-byte vectors, so
    that code for other widths, and its registers, are left out. ``page_size``: the state's, a constant
    because every position is divided by it. ``max_new``: the state's, a constant so that drafts cost nothing
    where there are none.
    """
    return (
        "-std=c++17",
        "-lineinfo",
        f"-DNUM_PLANNERS={NUM_PLANNERS}",
        f"-DPOSITIONS_PER_THREAD={positions_per_thread}",
        f"-DONLY_WIDE_ITEMS={int(only_wide_items)}",
        f"-DPAGE_SIZE={page_size}",
        f"-DMAX_NEW={max_new}",
    )


@dataclass(frozen=True)
class _Split:
    """How the blocks of one ``swap_in`` share its requests."""

    num_blocks: int
    num_units: int
    """Blocks that have a slice."""
    num_slices: int
    """Blocks that share one request; with more than one, each block has a single request."""
    slice_len: int
    left_per_block: int
    """Copies that a block can leave for later."""
    keeps_place: bool
    """Whether a request stays on its multiprocessors from launch to launch."""
    copies: bool
    """Whether the launch copies items; otherwise blocks neither share copies nor keep their place."""

    @classmethod
    def of(cls, num_reqs: int, num_selected: int, num_sms: int, *, copies: bool) -> _Split:
        """Return the split for requests that select ``num_selected`` positions each."""
        num_sms = min(num_sms, MAX_BLOCKS)
        most_slices = max(1, min(num_sms // num_reqs, -(-num_selected // MIN_SLICE_LEN)))
        slice_len = -(-num_selected // most_slices)
        num_slices = -(-num_selected // slice_len)
        num_units = min(num_reqs * num_slices, num_sms)
        keeps_place = copies and num_slices <= MAX_SLICES_IN_PLACE and 2 * num_units > num_sms
        return cls(
            num_blocks=num_sms if keeps_place else num_units,
            num_units=num_units,
            num_slices=num_slices,
            slice_len=slice_len,
            left_per_block=-(-num_reqs * num_slices // num_units) * slice_len,
            keeps_place=keeps_place,
            copies=copies,
        )

    @property
    def positions_per_thread(self) -> int:
        """The constant with which the kernel is compiled: 1, 2, 4, 8, 16 or 32."""
        return 1 << (-(-self.slice_len // NUM_PLANNERS) - 1).bit_length()


@dataclass
class _Workspace:
    """Memory that the launches of one state share. It lives as long as the state: graphs hold its
    addresses."""

    num_launches: Tensor
    """int32 [1]"""
    rounds: Tensor
    """uint8 [2, round_bytes]: the struct Round and the bits behind it."""
    _left: list[Tensor] = field(default_factory=list)

    @classmethod
    def create(cls, state: HotBufferState) -> _Workspace:
        most_split_requests = min(num_multiprocessors(state.device), MAX_BLOCKS) // 2
        bit_bytes = 4 * most_split_requests * -(-state.max_capacity // 32)
        round_bytes = _round_up(ROUND_HEADER_BYTES + bit_bytes, 16)
        return cls(
            num_launches=torch.zeros(1, dtype=torch.int32, device=state.device),
            rounds=torch.zeros((2, round_bytes), dtype=torch.uint8, device=state.device),
        )

    def left(self, num_copies: int) -> Tensor:
        """Return int32 [>= num_copies, 4], room for copies that blocks leave for later."""
        if not self._left or self._left[-1].shape[0] < num_copies:
            _refuse_in_capture("a batch larger than any before")
            device = self.rounds.device
            self._left.append(torch.zeros((num_copies, 4), dtype=torch.int32, device=device))
            torch.cuda.synchronize(device)
        return self._left[-1]


_workspaces: dict[int, _Workspace] = {}
"""Workspaces by the id of their state."""


def _workspace(state: HotBufferState) -> _Workspace:
    workspace = _workspaces.get(id(state))
    if workspace is None:
        _refuse_in_capture("a state that was not used before")
        workspace = _Workspace.create(state)
        torch.cuda.synchronize(state.device)
        _workspaces[id(state)] = workspace
        weakref.finalize(state, _workspaces.pop, id(state), None)
    return workspace


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _refuse_in_capture(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise KernelArgumentError(f"state: expected a call before the graph capture, got {what}")


def _launch_copies(kernel: Any, device: torch.device, parameters: npt.NDArray[Any], num_blocks: int) -> None:
    """Launch ``num_blocks`` blocks with as many warps as a multiprocessor holds; each warp moves one item."""
    num_threads = kernel.max_threads_per_block // 32 * 32
    # Pairs of neighbours, because blocks of many other kernels come in pairs and need both multiprocessors.
    in_pairs = num_blocks % 2 == 0 and torch.cuda.get_device_capability(device) >= HOPPER
    launch(kernel, device, num_blocks, num_threads, parameters, cluster_size=2 if in_pairs else 1)


def _tables(state: HotBufferState, group: int) -> tuple[int, ...]:
    grouped = (
        tensor.data_ptr() + group * tensor.stride(0) * tensor.element_size()
        for tensor in (state.lookup_to_hot, state.hot_to_lookup, state.stamps, state.step)
    )
    shared = (
        tensor.data_ptr()
        for tensor in (
            state.hot_slots,
            state.capacity,
            state.page_table,
            state.host_pages,
            state.lookup_pages,
            state.counters,
            state.error_flags,
        )
    )
    sizes = (state.num_rows, state.max_context, state.max_capacity, state.max_pages)
    return (*grouped, *shared, *sizes)


def _requests(requests: StepRequests) -> tuple[int, ...]:
    return (
        requests.seq_lens.data_ptr(),
        requests.req_rows.data_ptr(),
        requests.num_real_reqs.data_ptr(),
        requests.num_reqs,
        int(requests.seq_lens.dtype == torch.int64),
        int(requests.req_rows.dtype == torch.int64),
        requests.num_new,
    )


def _plan(plan: MissPlan) -> tuple[int, ...]:
    tensors = (plan.src_host_slots, plan.dst_device_slots, plan.req_rows, plan.positions, plan.num_misses)
    return tuple(tensor.data_ptr() for tensor in tensors)


def _checks(state: HotBufferState, read_at: ReadAt) -> npt.NDArray[Any]:
    """Return a _CHECKS, all zero when items are not verified."""
    result = np.zeros((), _CHECKS)
    if state.row_checks is not None:
        tensors = (state.row_checks, state.index_pages, state.wrong_rows, state.error_flags)
        addresses = (tensor.data_ptr() for tensor in tensors)
        result[()] = (*addresses, state.row_checks.shape[1], state.max_pages, read_at)
    return result


def _pool(pools: Pools | None) -> npt.NDArray[Any]:
    """Return a _POOL, all zero without ``pools``."""
    result = np.zeros((), _POOL)
    if pools is not None:
        host, dev = pools
        host_address = _mapped_address("k_host", host)
        strides = (host.stride(0), host.stride(1), dev.stride(0), dev.stride(1))
        item_bytes = dev.shape[2]
        vector_bytes = math.gcd(16, item_bytes, host_address, dev.data_ptr(), *strides)
        result[()] = (host_address, dev.data_ptr(), *strides, item_bytes, vector_bytes)
    return result


def _one_pool(pool: Tensor) -> npt.NDArray[Any]:
    """Return a _POOL with only its device part set: ``pool``, which may lie in host memory."""
    result = np.zeros((), _POOL)
    address = pool.data_ptr() if pool.device.type == "cuda" else _mapped_address("pool", pool)
    item_bytes = pool.shape[2]
    result["dev"], result["item_bytes"] = address, item_bytes
    result["dev_layer_bytes"], result["dev_slot_bytes"] = pool.stride(0), pool.stride(1)
    result["vector_bytes"] = math.gcd(16, item_bytes, address, pool.stride(0), pool.stride(1))
    return result


def _is_wide(pool: npt.NDArray[Any]) -> bool:
    return int(pool["vector_bytes"]) == WIDEST_VECTOR_BYTES


def _mapped_address(name: str, host: Tensor) -> int:
    """Return the address at which the GPU reads ``host``, which must be pinned or registered memory."""
    attributes = cupy_module().cuda.runtime.pointerGetAttributes(host.data_ptr())
    if attributes.type != _PINNED or not attributes.devicePointer:
        raise KernelArgumentError(
            f"{name}: expected pinned host memory (pin_memory=True or cudaHostRegister), got pageable memory"
        )
    return int(attributes.devicePointer)


@functools.cache
def _kernel(
    name: str,
    positions_per_thread: int = 1,
    only_wide_items: bool = False,
    page_size: int = ANY_PAGE_SIZE,
    max_new: int = 1,
) -> Any:
    return _module(positions_per_thread, only_wide_items, page_size, max_new).get_function(name)


@functools.cache
def _module(positions_per_thread: int, only_wide_items: bool, page_size: int, max_new: int) -> Any:
    options = compile_options(positions_per_thread, only_wide_items, page_size, max_new)
    return cupy_module().RawModule(code=source(), options=options, backend="nvrtc")
