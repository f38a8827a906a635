"""The CUDA side of ``kernels/swap_in.py``: compiles ``csrc/swap_in.cu`` at run time and launches it.

Each function fills the parameters of one kernel (``cuda_params.py``) and launches it; this module keeps only
the compiled modules. ``kernels/swap_in.py`` and ``kernels/row_check.py`` call it with checked arguments;
checks that only matter on a GPU are here. A slice is what one block of a swap-in takes of a request's
selected positions (``swap_in_blocks.py``). Every launch goes to torch's current stream of the state's device.
A CUDA graph can capture those of a step, except for the first ``swap_in`` of a state or of a larger batch,
which allocates memory. Launches on one state must follow each other in one stream or be ordered by events.

cupy is imported, and the code compiled, on the first launch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
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
from hisparse_pd.kernels.cuda_params import (
    BACKUP,
    CHECK_DENSE_ROW,
    CHECK_PAGES,
    CHECK_ROWS,
    COPY,
    FILL,
    NEWEST_SLOTS,
    SWAP_IN,
    checks_of,
    device_pool_of,
    is_wide,
    plan_of,
    pool_of,
    requests_of,
    tables_of,
)
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.reference import Pools
from hisparse_pd.kernels.row_errors import ReadAt
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.swap_in_blocks import NUM_PLANNERS, BlockSplit, Workspace, round_up, workspace_of
from hisparse_pd.kernels.warm_up import FILL_BLOCKS, FilledLayer, WarmUp

MAIN_SOURCE = "swap_in.cu"

# The constants from here to MAX_CAPACITY are the same in csrc/*.cuh.
NUM_FETCHERS = 3
"""Warps of a block that fetch missing items from the host before their entries are chosen."""
MAX_EARLY = 3 * NUM_FETCHERS
"""Most items that a block's fetchers hold at a time."""
NUM_THREADS = NUM_PLANNERS + 32 + 32 * NUM_FETCHERS
"""Planners, one warp that communicates with other blocks, and fetchers."""
ENTRIES_PER_ROUND = 8 * NUM_PLANNERS
"""Entries of a hot buffer whose ages a block reads at a time."""
MAX_TOP_K = 4096
"""Most positions that one new position of a request selects."""
MAX_NEW = 32
"""Most new positions of a request: each is one lane of a warp."""
MAX_POSITIONS = 32 * NUM_PLANNERS
"""Most positions that one request selects: one block must be able to take them."""
MAX_CAPACITY = 32768
"""Most entries of a hot buffer."""
MAX_EARLY_ITEM_BYTES = 4 * 32 * 16 - 128
"""Most bytes of an item that is fetched early: one round of csrc/copy.cuh's EarlyItem, less the part of a
line before the first byte."""

MAX_SELECTED = 1 << 24
"""Bound on the selected positions of a whole batch."""
MANY_POSITIONS = 256
"""Slices of this many positions or more make a block write a row's stamps in the order of its entries."""
MAX_READ_AHEAD = 128
"""Slices of up to this many positions have their misses fetched as they are seen, before duplicates are
removed. This is off for several new positions, which share many selected ones: those would be fetched more
than once."""
SLICES_THAT_FILL_PCIE = 8
"""This many blocks of a request read from the host at full rate, so that no other blocks need to help."""
COPY_THREADS = 256
"""Threads of a block that copies or checks items, one warp for each item."""
COPY_BLOCKS_PER_SM = 4
CHECK_BLOCKS_PER_SM = 8
"""Most blocks for each multiprocessor, in a launch that copies items and in one that checks them."""
ANY_PAGE_SIZE = 64
"""Page size for kernels that read no pages: the usual one, for which the code is compiled anyway."""


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

    The result differs from the reference in two ways. When misses exceed the entries, any of the missing
    positions may be served. A row or a seq_len out of range turns its request into padding instead of raising
    an exception (with BAD_POSITION when the row is valid).
    """
    state, num_new = requests.state, requests.num_new
    num_reqs, top_k = requests.num_reqs, selected.shape[1]
    if num_reqs == 0 or top_k == 0:
        if miss_plan is not None:
            miss_plan.num_misses.zero_()
        return
    num_selected = num_new * top_k
    _check_sizes(state, num_reqs, num_new, top_k)
    if miss_plan is not None:
        _check_miss_plan(miss_plan, state.device)

    # How the blocks share the work, and the kernel that is compiled for it.
    split = BlockSplit.of(num_reqs, num_selected, num_multiprocessors(state.device), copies=pools is not None)
    workspace = workspace_of(state)
    pool = pool_of(pools)
    allows_wide = pools is None or is_wide(pool)
    kernel = compiled("swap_in", split.positions_per_thread, allows_wide, state.page_size, state.max_new)
    shared_bytes = _swap_in_shared_bytes(kernel, state, split)
    if shared_bytes > kernel.max_dynamic_shared_size_bytes:  # the kernel's present limit
        kernel.max_dynamic_shared_size_bytes = shared_bytes

    parameters = np.zeros((), SWAP_IN)
    parameters["tables"] = tables_of(state, group)
    parameters["requests"] = requests_of(requests)
    if miss_plan is not None:
        parameters["plan"] = plan_of(miss_plan)
    parameters["pool"] = pool
    if pools is not None and allows_wide and pools.dev.shape[2] <= MAX_EARLY_ITEM_BYTES:
        parameters["max_early"] = MAX_EARLY
        parameters["reads_ahead"] = split.slice_len <= MAX_READ_AHEAD and num_new == 1
    if pools is not None:
        parameters["checks"] = checks_of(state, ReadAt.SWAP_IN)
    parameters["selected"] = selected.data_ptr()
    parameters["out"] = out.data_ptr()
    parameters["num_selected"] = num_selected
    parameters["layer"] = layer
    parameters["stamps_in_order"] = split.slice_len >= MANY_POSITIONS
    _put_split(parameters, split, workspace)
    launch(kernel, state.device, split.num_blocks, NUM_THREADS, parameters, shared_bytes)


def _put_split(parameters: npt.NDArray[Any], split: BlockSplit, workspace: Workspace) -> None:
    """Set how the blocks share the work, and the memory through which they cooperate, in a SWAP_IN.

    ``BlockSplit`` and ``Workspace`` explain the fields; a unit is one slice of one request's positions.
    """
    parameters["num_launches"] = workspace.num_launches.data_ptr()
    parameters["rounds"] = workspace.rounds.data_ptr()
    parameters["left"] = workspace.left(split.num_blocks * split.left_per_block).data_ptr()
    parameters["round_bytes"] = workspace.rounds.shape[1]
    parameters["left_per_block"] = split.left_per_block
    parameters["num_units"] = split.num_units
    parameters["num_slices"] = split.num_slices
    # The kernel multiplies by this instead of dividing by num_slices.
    parameters["slice_reciprocal"] = -(-(1 << 16) // split.num_slices)
    # Requests that are worked on at a time: how far the next request of a unit is from its present one.
    parameters["stride"] = split.num_units // split.num_slices
    parameters["slice_len"] = split.slice_len
    # Whether blocks make each other's copies.
    parameters["spreads"] = split.copies and split.num_slices < SLICES_THAT_FILL_PCIE
    parameters["keeps_place"] = split.keeps_place


def _check_sizes(state: HotBufferState, num_reqs: int, num_new: int, top_k: int) -> None:
    """Raise KernelArgumentError for sizes that the kernel does not take."""
    check_range("top_k", top_k, 1, MAX_TOP_K + 1)
    check_range("state.max_new", state.max_new, 1, MAX_NEW + 1)
    check_range("num_new * top_k", num_new * top_k, 1, MAX_POSITIONS + 1)
    check_range("num_reqs * num_new * top_k", num_reqs * num_new * top_k, 1, MAX_SELECTED)
    check_range("state.max_capacity", state.max_capacity, 1, MAX_CAPACITY + 1)


def _check_miss_plan(miss_plan: MissPlan, device: torch.device) -> None:
    for name, dtype, shape in (
        ("src_host_slots", torch.int64, (None,)),
        ("dst_device_slots", torch.int64, (None,)),
        ("req_rows", torch.int32, (None,)),
        ("positions", torch.int32, (None,)),
        ("num_misses", torch.int32, (1,)),
    ):
        tensor = getattr(miss_plan, name)
        check_tensor(f"miss_plan.{name}", tensor, dtypes=(dtype,), shape=shape, device=device)


def _swap_in_shared_bytes(kernel: Any, state: HotBufferState, split: BlockSplit) -> int:
    """Return the bytes of shared memory of a block whose size the launch sets.

    Each page of the row's hot buffer takes four bytes for its id, each entry a byte for its age, and each
    position of a slice two bytes for its entry. Raises KernelArgumentError where a block has fewer.
    """
    page_bytes = 4 * round_up(state.hot_pages.shape[1], 4)
    age_bytes = round_up(state.max_capacity, ENTRIES_PER_ROUND)
    num_bytes = page_bytes + age_bytes + 2 * NUM_PLANNERS * split.positions_per_thread
    most_bytes = max_block_shared_bytes(state.device) - kernel.shared_size_bytes
    if num_bytes > most_bytes:
        raise KernelArgumentError(
            f"state.max_capacity: {state.max_capacity} entries in pages of {state.page_size} take {num_bytes}"
            f" bytes of shared memory, and a block has {most_bytes}; use fewer entries or larger pages"
        )
    return num_bytes


def replay_misses(
    miss_plan: MissPlan, layer: int, pools: Pools, max_blocks: int | None, state: HotBufferState | None
) -> None:
    """See ``kernels.swap_in.replay_misses``."""
    parameters = np.zeros((), COPY)
    parameters["plan"] = plan_of(miss_plan)
    parameters["pool"] = pool_of(pools)
    parameters["layer"] = layer
    page_size, max_new = ANY_PAGE_SIZE, 1
    if state is not None:
        page_size, max_new = state.page_size, state.max_new  # those of fill_row, which is compiled
        if state.row_checks is not None:
            parameters["checks"] = checks_of(state, ReadAt.SWAP_IN)
    if miss_plan.max_misses == 0:
        return
    device, is_wide_pool = miss_plan.num_misses.device, is_wide(parameters["pool"])
    kernel = compiled("copy_planned", only_wide_items=is_wide_pool, page_size=page_size, max_new=max_new)
    if max_blocks is not None and max_blocks < num_multiprocessors(device):  # few, so each gets many warps
        _launch_copies(kernel, device, parameters, max_blocks)
    else:
        num_blocks = COPY_BLOCKS_PER_SM * num_multiprocessors(device)
        launch(kernel, device, num_blocks, COPY_THREADS, parameters)


def start_row(
    state: HotBufferState,
    row: int,
    capacity: int,
    hot_pages: Tensor,
    host_pages: Tensor,
    lookup_pages: Tensor,
    index_pages: Tensor,
    warm_up: WarmUp,
    layers: Sequence[FilledLayer],
    pools: Pools,
) -> None:
    """Do one ``launch_slice`` of ``kernels.swap_in.RowStart``, which fills the row's tables and copies the
    items of ``layers``: one copy of the host's data to the device, and one launch.
    """
    pages = (hot_pages, host_pages, lookup_pages, index_pages)
    # All that the kernel needs from the host goes to the device in one buffer, one part behind the other, in
    # the order in which FillParams (csrc/params.cuh) reads them.
    parts = (*pages, np.array(layers), warm_up.num_warm, warm_up.positions)
    num_values = sum(math.prod(part.shape) for part in parts)
    # torch keeps this alive until the copy from it is done.
    host_staged = torch.empty(num_values, dtype=torch.int32, pin_memory=True)
    np.concatenate(
        [np.asarray(part).reshape(-1) for part in parts], out=host_staged.numpy(), casting="same_kind"
    )
    staged = host_staged.to(state.device, non_blocking=True)

    parameters = np.zeros((), FILL)
    parameters["tables"] = tables_of(state, 0)
    parameters["pool"] = pool = pool_of(pools)
    parameters["checks"] = checks_of(state, ReadAt.START)
    parameters["staged"] = staged.data_ptr()
    for name in ("hot_pages", "host_pages", "lookup_pages", "index_pages", "capacity"):
        parameters[name] = getattr(state, name)[row].data_ptr()
    # The distances from one group's table to the next one's, in elements.
    parameters["group_lookup_slots"] = state.lookup_to_hot.stride(0)
    parameters["group_device_slots"] = state.hot_to_lookup.stride(0)
    parameters["row"] = row
    parameters["num_entries"] = capacity
    parameters["num_host_pages"] = host_pages.shape[0]
    parameters["num_index_pages"] = index_pages.shape[0]
    parameters["num_layers"] = len(layers)
    parameters["num_groups"] = state.num_groups
    parameters["num_hints"], parameters["max_warm"] = warm_up.positions.shape
    kernel = compiled(
        "fill_row", only_wide_items=is_wide(pool), page_size=state.page_size, max_new=state.max_new
    )
    num_blocks = min(FILL_BLOCKS, num_multiprocessors(state.device))
    _launch_copies(kernel, state.device, parameters, num_blocks)


def backup_newest(requests: StepRequests, pools: Pools, num_newest: Tensor | None) -> None:
    """See ``kernels.swap_in.backup_newest``; one launch for all requests, positions and layers. Values of
    ``num_newest`` out of their range are clamped into it.
    """
    state, num_layers = requests.state, pools.dev.shape[0]
    num_items = requests.num_reqs * num_layers * (1 if num_newest is None else state.max_new)
    if num_items == 0:
        return
    parameters = np.zeros((), BACKUP)
    parameters["tables"] = tables_of(state, 0)
    parameters["requests"] = requests_of(requests)
    parameters["pool"] = pool_of(pools)
    parameters["num_newest"] = 0 if num_newest is None else num_newest.data_ptr()
    parameters["num_layers"] = num_layers
    warps_per_block = COPY_THREADS // 32
    num_blocks = min(-(-num_items // warps_per_block), COPY_BLOCKS_PER_SM * num_multiprocessors(state.device))
    launch(
        compiled("backup_newest", page_size=state.page_size, max_new=state.max_new),
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
    parameters = np.zeros((), CHECK_ROWS)
    parameters["pool"] = one_pool = device_pool_of(pool)
    parameters["slots"] = slots.data_ptr()
    parameters["positions"] = positions.data_ptr()
    parameters["out_slots"] = 0 if out_slots is None else out_slots.data_ptr()
    parameters["out"] = out.data_ptr()
    parameters["layer_out"] = out.stride(0)
    parameters["num_items"] = num_items
    parameters["first_layer"] = first_layer
    num_blocks = _check_blocks(num_items, device)
    kernel = compiled("check_rows", only_wide_items=is_wide(one_pool))
    launch(kernel, device, num_blocks, COPY_THREADS, parameters, num_blocks_y=num_layers)


def check_dense_row(state: HotBufferState, row: int, pool: Tensor, num_tokens: int) -> None:
    """See ``kernels.row_check.check_dense_row``; one launch."""
    parameters = np.zeros((), CHECK_DENSE_ROW)
    parameters["tables"] = tables_of(state, 0)
    parameters["pool"] = one_pool = device_pool_of(pool)
    parameters["checks"] = checks_of(state, ReadAt.START)
    parameters["row"], parameters["num_tokens"] = row, num_tokens
    num_blocks = _check_blocks(num_tokens, state.device)
    kernel = compiled("check_dense_row", only_wide_items=is_wide(one_pool), page_size=state.page_size)
    launch(kernel, state.device, num_blocks, COPY_THREADS, parameters, num_blocks_y=pool.shape[0])


def begin_check(pool: Tensor, row_checks: Tensor, pages: npt.NDArray[np.int32], page_size: int) -> Tensor:
    """See ``kernels.row_check.begin_check``; one launch."""
    device = row_checks.device
    # Pinned, because this may come behind copies that are under way, and must not wait for them.
    pages_dev = torch.from_numpy(pages).pin_memory().to(device, non_blocking=True)
    is_wrong = torch.zeros(1, dtype=torch.int32, device=device)
    parameters = np.zeros((), CHECK_PAGES)
    parameters["pool"] = one_pool = device_pool_of(pool)
    parameters["row_checks"], parameters["num_slots"] = row_checks.data_ptr(), row_checks.stride(0)
    parameters["pages"], parameters["num_pages"] = pages_dev.data_ptr(), len(pages)
    parameters["is_wrong"] = is_wrong.data_ptr()
    num_blocks = _check_blocks(len(pages) * page_size, device)
    kernel = compiled("check_pages", only_wide_items=is_wide(one_pool), page_size=page_size)
    launch(kernel, device, num_blocks, COPY_THREADS, parameters, num_blocks_y=pool.shape[0])
    return is_wrong


def _check_blocks(num_items: int, device: torch.device) -> int:
    """Return how many blocks check items of one layer, each of whose warps takes one item at a time."""
    num_needed = -(-num_items // (COPY_THREADS // 32))
    return min(num_needed, CHECK_BLOCKS_PER_SM * num_multiprocessors(device))


def newest_slots(requests: StepRequests, out: Tensor) -> None:
    """See ``kernels.swap_in.newest_slots``."""
    state, num_slots = requests.state, out.shape[0]
    if num_slots == 0:
        return
    parameters = np.zeros((), NEWEST_SLOTS)
    parameters["tables"] = tables_of(state, 0)
    parameters["requests"] = requests_of(requests)
    parameters["out"] = out.data_ptr()
    kernel = compiled("newest_slots", page_size=state.page_size, max_new=state.max_new)
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


def _launch_copies(kernel: Any, device: torch.device, parameters: npt.NDArray[Any], num_blocks: int) -> None:
    """Launch ``num_blocks`` blocks with as many warps as a multiprocessor holds; each warp moves one item."""
    num_threads = kernel.max_threads_per_block // 32 * 32
    # Clusters of two neighbours are used because blocks of many other kernels come in pairs and need both
    # multiprocessors.
    in_pairs = num_blocks % 2 == 0 and torch.cuda.get_device_capability(device) >= HOPPER
    launch(kernel, device, num_blocks, num_threads, parameters, cluster_size=2 if in_pairs else 1)


@functools.cache
def compiled(
    name: str,
    positions_per_thread: int = 1,
    only_wide_items: bool = False,
    page_size: int = ANY_PAGE_SIZE,
    max_new: int = 1,
) -> Any:
    """Return the kernel ``name``, compiled with ``compile_options``; kernels that do not depend on one of
    these constants take its default."""
    return _module(positions_per_thread, only_wide_items, page_size, max_new).get_function(name)


@functools.cache
def _module(positions_per_thread: int, only_wide_items: bool, page_size: int, max_new: int) -> Any:
    options = compile_options(positions_per_thread, only_wide_items, page_size, max_new)
    return cupy_module().RawModule(code=source(), options=options, backend="nvrtc")
