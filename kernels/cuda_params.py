"""The parameter structs of the swap-in kernels, as ``csrc/params.cuh`` declares them, and how to fill them.

``kernels/cuda.py`` fills one struct for each launch. A struct holds addresses and sizes, and no tensor: the
caller keeps the tensors alive until the launch is over. Field names and order are those of the CUDA code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError
from hisparse_pd.kernels.cuda_launch import cupy_module
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.reference import Pools
from hisparse_pd.kernels.row_errors import ReadAt
from hisparse_pd.kernels.step_requests import StepRequests

WIDEST_VECTOR_BYTES = 16
"""Bytes that one thread moves at once if addresses, strides and the item's size are multiples of them."""

_PINNED = 1
"""cudaMemoryTypeHost"""

_POINTER = np.dtype(np.uint64)
_INT = np.dtype(np.int32)
_LONG = np.dtype(np.int64)


def _struct(**fields: Any) -> np.dtype[Any]:
    return np.dtype(list(fields.items()), align=True)


POOL = _struct(
    host=_POINTER, dev=_POINTER, host_layer_bytes=_LONG, host_slot_bytes=_LONG,
    dev_layer_bytes=_LONG, dev_slot_bytes=_LONG, item_bytes=_INT, vector_bytes=_INT,
)  # fmt: skip
TABLES = _struct(
    lookup_to_hot=_POINTER, hot_to_lookup=_POINTER, stamps=_POINTER, step=_POINTER,
    hot_pages=_POINTER, capacity=_POINTER, page_table=_POINTER, host_pages=_POINTER, lookup_pages=_POINTER,
    counters=_POINTER, error_flags=_POINTER, num_rows=_INT, max_context=_INT, max_capacity=_INT,
    max_pages=_INT,
)  # fmt: skip
REQUESTS = _struct(
    seq_lens=_POINTER, req_rows=_POINTER, num_real_reqs=_POINTER, num_reqs=_INT, seq_lens_are_64=_INT,
    req_rows_are_64=_INT, num_new=_INT,
)  # fmt: skip
PLAN = _struct(
    src_host_slots=_POINTER, dst_device_slots=_POINTER, req_rows=_POINTER, positions=_POINTER,
    num_misses=_POINTER,
)  # fmt: skip
CHECKS = _struct(
    row_checks=_POINTER, index_pages=_POINTER, wrong_rows=_POINTER, error_flags=_POINTER, num_slots=_LONG,
    max_pages=_INT, read_at=_INT,
)  # fmt: skip
SWAP_IN = _struct(
    tables=TABLES, requests=REQUESTS, plan=PLAN, pool=POOL, checks=CHECKS, selected=_POINTER,
    out=_POINTER, num_launches=_POINTER, rounds=_POINTER, left=_POINTER, round_bytes=_INT,
    left_per_block=_INT, num_selected=_INT, num_units=_INT, num_slices=_INT, slice_reciprocal=_INT,
    stride=_INT, slice_len=_INT, layer=_INT, stamps_in_order=_INT, max_early=_INT, reads_ahead=_INT,
    spreads=_INT, keeps_place=_INT,
)  # fmt: skip
COPY = _struct(plan=PLAN, pool=POOL, checks=CHECKS, layer=_INT, padding=_INT)
FILL = _struct(
    tables=TABLES, pool=POOL, checks=CHECKS, staged=_POINTER, hot_pages=_POINTER, host_pages=_POINTER,
    lookup_pages=_POINTER, index_pages=_POINTER, capacity=_POINTER, group_lookup_slots=_LONG,
    group_device_slots=_LONG, row=_INT, num_entries=_INT, num_host_pages=_INT, num_index_pages=_INT,
    num_layers=_INT, num_groups=_INT, max_warm=_INT, num_hints=_INT,
)  # fmt: skip
BACKUP = _struct(
    tables=TABLES, requests=REQUESTS, pool=POOL, num_newest=_POINTER, num_layers=_INT, padding=_INT
)  # fmt: skip
CHECK_ROWS = _struct(
    pool=POOL, slots=_POINTER, positions=_POINTER, out_slots=_POINTER, out=_POINTER, layer_out=_LONG,
    num_items=_LONG, first_layer=_INT, padding=_INT,
)  # fmt: skip
CHECK_DENSE_ROW = _struct(tables=TABLES, pool=POOL, checks=CHECKS, row=_INT, num_tokens=_INT)
CHECK_PAGES = _struct(
    pool=POOL, row_checks=_POINTER, pages=_POINTER, is_wrong=_POINTER, num_slots=_LONG, num_pages=_INT,
    padding=_INT,
)  # fmt: skip
NEWEST_SLOTS = _struct(tables=TABLES, requests=REQUESTS, out=_POINTER)


def tables_of(state: HotBufferState, group: int) -> tuple[int, ...]:
    """Return the values of a TABLES: addresses of the group's tables and of those that all groups share."""
    grouped = (
        tensor.data_ptr() + group * tensor.stride(0) * tensor.element_size()
        for tensor in (state.lookup_to_hot, state.hot_to_lookup, state.stamps, state.step)
    )
    shared = (
        tensor.data_ptr()
        for tensor in (
            state.hot_pages,
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


def requests_of(requests: StepRequests) -> tuple[int, ...]:
    """Return the values of a REQUESTS."""
    return (
        requests.seq_lens.data_ptr(),
        requests.req_rows.data_ptr(),
        requests.num_real_reqs.data_ptr(),
        requests.num_reqs,
        int(requests.seq_lens.dtype == torch.int64),
        int(requests.req_rows.dtype == torch.int64),
        requests.num_new,
    )


def plan_of(plan: MissPlan) -> tuple[int, ...]:
    """Return the values of a PLAN."""
    tensors = (plan.src_host_slots, plan.dst_device_slots, plan.req_rows, plan.positions, plan.num_misses)
    return tuple(tensor.data_ptr() for tensor in tensors)


def checks_of(state: HotBufferState, read_at: ReadAt) -> npt.NDArray[Any]:
    """Return a CHECKS; all zero if items are not verified. ``read_at`` is recorded with a wrong item."""
    result = np.zeros((), CHECKS)
    if state.row_checks is not None:
        tensors = (state.row_checks, state.index_pages, state.wrong_rows, state.error_flags)
        addresses = (tensor.data_ptr() for tensor in tensors)
        result[()] = (*addresses, state.row_checks.shape[1], state.max_pages, read_at)
    return result


def pool_of(pools: Pools | None) -> npt.NDArray[Any]:
    """Return a POOL; all zero, so that nothing is copied, without ``pools``."""
    result = np.zeros((), POOL)
    if pools is not None:
        host, dev = pools
        host_address = mapped_address("k_host", host)
        strides = (host.stride(0), host.stride(1), dev.stride(0), dev.stride(1))
        item_bytes = dev.shape[2]
        vector_bytes = math.gcd(WIDEST_VECTOR_BYTES, item_bytes, host_address, dev.data_ptr(), *strides)
        result[()] = (host_address, dev.data_ptr(), *strides, item_bytes, vector_bytes)
    return result


def device_pool_of(pool: Tensor) -> npt.NDArray[Any]:
    """Return a POOL with only its device part set: ``pool``, which may lie in host memory."""
    result = np.zeros((), POOL)
    address = pool.data_ptr() if pool.device.type == "cuda" else mapped_address("pool", pool)
    item_bytes = pool.shape[2]
    result["dev"], result["item_bytes"] = address, item_bytes
    result["dev_layer_bytes"], result["dev_slot_bytes"] = pool.stride(0), pool.stride(1)
    result["vector_bytes"] = math.gcd(
        WIDEST_VECTOR_BYTES, item_bytes, address, pool.stride(0), pool.stride(1)
    )
    return result


def is_wide(pool: npt.NDArray[Any]) -> bool:
    """Return whether a POOL allows vectors of WIDEST_VECTOR_BYTES."""
    return int(pool["vector_bytes"]) == WIDEST_VECTOR_BYTES


def mapped_address(name: str, host: Tensor) -> int:
    """Return the address at which the GPU reads ``host``, which must be pinned or registered memory."""
    attributes = cupy_module().cuda.runtime.pointerGetAttributes(host.data_ptr())
    if attributes.type != _PINNED or not attributes.devicePointer:
        raise KernelArgumentError(
            f"{name}: expected pinned host memory (pin_memory=True or cudaHostRegister), got pageable memory"
        )
    return int(attributes.devicePointer)
