"""The CUDA side of ``kernels/swap_in.py``: compiles ``csrc/swap_in.cu`` at run time and launches it.

Owns the compiled modules and, for every state, the launch workspace: how the blocks of one launch meet, and
the miss plan of calls that give none. Arguments were checked by ``kernels/swap_in.py``; what only matters on
a GPU is checked here. Every launch goes to torch's current stream of the state's device and can be captured
in a CUDA graph; the first ``swap_in`` of a state (and of a larger batch) makes its workspace and cannot.

cupy is imported, and the code compiled, on the first launch.
"""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.checks import KernelArgumentError, check_range, check_tensor
from kernels.hot_state import HotBufferState
from kernels.reference import Pools, warm_positions
from kernels.swap_in import MissPlan

CSRC = Path(__file__).parent / "csrc"
MAIN_SOURCE = "swap_in.cu"

NUM_THREADS = 1024
"""Threads of a ``swap_in`` block: one block resolves one request."""
ENTRIES_PER_THREAD = 4
MAX_TOP_K = 4096
MAX_CAPACITY = 32768
"""As in csrc/plan.cuh."""
COPY_THREADS = 256
COPY_BLOCKS_PER_SM = 4
MEETING_BYTES = 384

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
_POOLS = np.dtype((_POOL, (2,)))
_TABLES = _struct(
    position_to_hot=_POINTER, hot_to_position=_POINTER, stamps=_POINTER, step=_POINTER,
    hot_slots=_POINTER, capacity=_POINTER, page_table=_POINTER, host_slots=_POINTER, counters=_POINTER,
    error_flags=_POINTER, num_rows=_INT, max_context=_INT, max_capacity=_INT, max_pages=_INT, page_size=_INT,
    padding=_INT,
)  # fmt: skip
_REQUESTS = _struct(
    seq_lens=_POINTER, req_rows=_POINTER, num_real_reqs=_POINTER, num_reqs=_INT, seq_lens_are_64=_INT,
    req_rows_are_64=_INT, padding=_INT,
)  # fmt: skip
_PLAN = _struct(src_host_slots=_POINTER, dst_device_slots=_POINTER, num_misses=_POINTER)
_SWAP_IN = _struct(
    tables=_TABLES, requests=_REQUESTS, plan=_PLAN, pools=_POOLS, selected=_POINTER, out=_POINTER,
    meeting=_POINTER, top_k=_INT, layer=_INT, hot_slots_in_shared=_INT, padding=_INT,
)  # fmt: skip
_COPY = _struct(plan=_PLAN, pools=_POOLS, layers=_POINTER, num_layers=_INT, first_layer=_INT)
_BACKUP = _struct(tables=_TABLES, requests=_REQUESTS, pools=_POOLS, num_layers=_INT, padding=_INT)
_NEWEST_SLOTS = _struct(tables=_TABLES, requests=_REQUESTS, out=_POINTER)


def swap_in(
    selected: Tensor,
    seq_lens: Tensor,
    req_rows: Tensor,
    num_real_reqs: Tensor,
    state: HotBufferState,
    group: int,
    layer: int,
    pools: Pools,
    out: Tensor,
    miss_plan: MissPlan | None,
) -> None:
    """Fill ``out``, update the tables and copy the misses, in one launch; see ``kernels.swap_in.swap_in``.

    As the reference, but for three things. Entries with equal stamps go in the order of their hot_index (the
    clock hand stays where it is), and stamps of more than 1021 steps ago count as equal. When misses exceed
    the entries, any of the missing positions are served. A row or a seq_len out of range makes its request
    padding instead of an exception (BAD_POSITION when the row is good).
    """
    num_reqs, top_k = selected.shape
    if num_reqs == 0 or top_k == 0:
        return
    check_range("top_k", top_k, 1, MAX_TOP_K + 1)
    check_range("state.max_capacity", state.max_capacity, 1, MAX_CAPACITY + 1)
    if miss_plan is not None:
        for name, dtype, shape in (
            ("src_host_slots", torch.int64, (None,)),
            ("dst_device_slots", torch.int64, (None,)),
            ("num_misses", torch.int32, (1,)),
        ):
            tensor = getattr(miss_plan, name)
            check_tensor(f"miss_plan.{name}", tensor, dtypes=(dtype,), shape=shape, device=state.device)
    workspace = _workspace(state)
    plan = workspace.plan(num_reqs, top_k) if miss_plan is None else miss_plan
    parameters = np.zeros((), _SWAP_IN)
    parameters["tables"] = _tables(state, group)
    parameters["requests"] = _requests(seq_lens, req_rows, num_real_reqs)
    parameters["plan"] = _plan(plan)
    parameters["pools"] = _pools(pools)
    parameters["selected"] = selected.data_ptr()
    parameters["out"] = out.data_ptr()
    parameters["meeting"] = workspace.meeting.data_ptr()
    parameters["top_k"] = top_k
    parameters["layer"] = layer
    kernel = _kernel("swap_in", -(-top_k // NUM_THREADS))
    shared_bytes = 4 * max(state.max_capacity, ENTRIES_PER_THREAD * NUM_THREADS)
    if kernel.shared_size_bytes + shared_bytes > _max_shared_bytes(state.device):
        shared_bytes = 0
    if shared_bytes > kernel.max_dynamic_shared_size_bytes:
        kernel.max_dynamic_shared_size_bytes = shared_bytes
    parameters["hot_slots_in_shared"] = shared_bytes > 0
    _launch(kernel, state.device, _num_sms(state.device), NUM_THREADS, parameters, shared_bytes)


def replay_misses(miss_plan: MissPlan, layer: int, pools: Pools) -> None:
    """See ``kernels.swap_in.replay_misses``."""
    if miss_plan.max_misses == 0:
        return
    _copy_planned(miss_plan, pools, first_layer=layer)


def preload(
    state: HotBufferState,
    group: int,
    layers: Sequence[int],
    row: int,
    num_tokens: int,
    positions: Tensor,
    pools: Pools,
) -> int:
    """See ``kernels.swap_in.preload``. Everything runs on the current stream, which may be a side stream:
    no other row is touched. The copies of all layers are one launch, and may be in flight on return.
    """
    chosen = warm_positions(state, group, row, num_tokens, positions)
    if not len(chosen):
        return 0
    chosen_dev = torch.from_numpy(chosen).to(state.device)
    src_host_slots = state.host_slots[row, chosen_dev]
    lacking = chosen[(src_host_slots < 0).cpu().numpy()]
    if len(lacking):
        raise KernelArgumentError(
            f"positions: expected positions with a host slot, row {row} has none for {lacking[0]}"
        )
    num_chosen = len(chosen)
    state.position_to_hot[group, row, chosen_dev] = torch.arange(
        num_chosen, dtype=torch.int32, device=state.device
    )
    state.hot_to_position[group, row, :num_chosen] = chosen_dev.to(torch.int32)
    state.stamps[group, row, :num_chosen] = 0
    plan = MissPlan(
        src_host_slots,
        state.hot_slots[row, :num_chosen].to(torch.int64),
        torch.full((1,), num_chosen, dtype=torch.int32, device=state.device),
    )
    if layers:
        _copy_planned(plan, pools, torch.tensor(layers, dtype=torch.int32).to(state.device))
    return num_chosen


def backup_newest(
    seq_lens: Tensor, req_rows: Tensor, num_real_reqs: Tensor, state: HotBufferState, pools: Pools
) -> None:
    """See ``kernels.swap_in.backup_newest``; one launch for all requests and layers."""
    num_layers = pools[0][1].shape[0]
    num_items = seq_lens.shape[0] * num_layers
    if num_items == 0:
        return
    parameters = np.zeros((), _BACKUP)
    parameters["tables"] = _tables(state, 0)
    parameters["requests"] = _requests(seq_lens, req_rows, num_real_reqs)
    parameters["pools"] = _pools(pools)
    parameters["num_layers"] = num_layers
    warps_per_block = COPY_THREADS // 32
    num_blocks = min(-(-num_items // warps_per_block), COPY_BLOCKS_PER_SM * _num_sms(state.device))
    _launch(_kernel("backup_newest"), state.device, num_blocks, COPY_THREADS, parameters)


def newest_slots(
    seq_lens: Tensor, req_rows: Tensor, num_real_reqs: Tensor, state: HotBufferState, out: Tensor
) -> None:
    """See ``kernels.swap_in.newest_slots``."""
    num_reqs = seq_lens.shape[0]
    if num_reqs == 0:
        return
    parameters = np.zeros((), _NEWEST_SLOTS)
    parameters["tables"] = _tables(state, 0)
    parameters["requests"] = _requests(seq_lens, req_rows, num_real_reqs)
    parameters["out"] = out.data_ptr()
    _launch(_kernel("newest_slots"), state.device, -(-num_reqs // 128), 128, parameters)


def source() -> str:
    """The whole translation unit: ``csrc/swap_in.cu`` with its own headers put in place of their includes.

    One string, so that every cache of compiled code sees a change of a header.
    """
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = (CSRC / name).read_text().replace("#pragma once\n", "\n")
        return re.sub(
            r'^#include "(.+)"$',
            lambda match: f'#line 1 "{match[1]}"\n{expand(match[1])}',
            f'#line 1 "{name}"\n{text}',
            flags=re.MULTILINE,
        )

    return expand(MAIN_SOURCE)


def compile_options(positions_per_thread: int) -> tuple[str, ...]:
    """What the code is compiled with besides the architecture."""
    return (
        "-std=c++17",
        f"-DNUM_THREADS={NUM_THREADS}",
        f"-DPOSITIONS_PER_THREAD={positions_per_thread}",
    )


@dataclass
class _Workspace:
    """What the launches of one state share. Never freed while the state lives: graphs hold its addresses."""

    meeting: Tensor
    """uint8 [MEETING_BYTES], the struct Meeting."""
    plans: list[MissPlan] = field(default_factory=list)

    def plan(self, num_reqs: int, top_k: int) -> MissPlan:
        """Room for the misses of a call that gives no plan."""
        if not self.plans or self.plans[-1].max_misses < num_reqs * top_k:
            _refuse_in_capture("a batch larger than any before")
            self.plans.append(MissPlan.create(num_reqs, top_k, self.meeting.device))
            torch.cuda.synchronize(self.meeting.device)
        return self.plans[-1]


_workspaces: dict[int, _Workspace] = {}
"""By the id of the state."""


def _workspace(state: HotBufferState) -> _Workspace:
    workspace = _workspaces.get(id(state))
    if workspace is None:
        _refuse_in_capture("a state that was not used before")
        workspace = _Workspace(torch.zeros(MEETING_BYTES, dtype=torch.uint8, device=state.device))
        torch.cuda.synchronize(state.device)
        _workspaces[id(state)] = workspace
        weakref.finalize(state, _workspaces.pop, id(state), None)
    return workspace


def _refuse_in_capture(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise KernelArgumentError(f"state: expected a call before the graph capture, got {what}")


def _copy_planned(plan: MissPlan, pools: Pools, layers: Tensor | None = None, first_layer: int = 0) -> None:
    device = plan.num_misses.device
    parameters = np.zeros((), _COPY)
    parameters["plan"] = _plan(plan)
    parameters["pools"] = _pools(pools)
    parameters["layers"] = 0 if layers is None else layers.data_ptr()
    parameters["num_layers"] = 1 if layers is None else layers.shape[0]
    parameters["first_layer"] = first_layer
    num_blocks = COPY_BLOCKS_PER_SM * _num_sms(device)
    _launch(_kernel("copy_planned"), device, num_blocks, COPY_THREADS, parameters)


def _tables(state: HotBufferState, group: int) -> tuple[int, ...]:
    grouped = (
        tensor.data_ptr() + group * tensor.stride(0) * tensor.element_size()
        for tensor in (
            state.position_to_hot,
            state.hot_to_position,
            state.stamps,
            state.step,
        )
    )
    shared = (
        tensor.data_ptr()
        for tensor in (
            state.hot_slots,
            state.capacity,
            state.page_table,
            state.host_slots,
            state.counters,
            state.error_flags,
        )
    )
    sizes = (state.num_rows, state.max_context, state.max_capacity, state.max_pages, state.page_size, 0)
    return (*grouped, *shared, *sizes)


def _requests(seq_lens: Tensor, req_rows: Tensor, num_real_reqs: Tensor) -> tuple[int, ...]:
    return (
        seq_lens.data_ptr(),
        req_rows.data_ptr(),
        num_real_reqs.data_ptr(),
        seq_lens.shape[0],
        int(seq_lens.dtype == torch.int64),
        int(req_rows.dtype == torch.int64),
        0,
    )


def _plan(plan: MissPlan) -> tuple[int, ...]:
    return (plan.src_host_slots.data_ptr(), plan.dst_device_slots.data_ptr(), plan.num_misses.data_ptr())


def _pools(pools: Pools) -> npt.NDArray[Any]:
    """[2] of _POOL; the second one is zero when there is only K."""
    result = np.zeros(2, _POOL)
    for i, (name, (host, dev)) in enumerate(zip("kv", pools, strict=False)):
        host_address = _mapped_address(f"{name}_host", host)
        strides = (host.stride(0), host.stride(1), dev.stride(0), dev.stride(1))
        item_bytes = dev.shape[2]
        vector_bytes = math.gcd(16, item_bytes, host_address, dev.data_ptr(), *strides)
        result[i] = (host_address, dev.data_ptr(), *strides, item_bytes, vector_bytes)
    return result


def _mapped_address(name: str, host: Tensor) -> int:
    """The address under which the GPU reads ``host``, which must be pinned or registered memory."""
    attributes = _cupy().cuda.runtime.pointerGetAttributes(host.data_ptr())
    if attributes.type != _PINNED or not attributes.devicePointer:
        raise KernelArgumentError(
            f"{name}: expected pinned host memory (pin_memory=True or cudaHostRegister), got pageable memory"
        )
    return int(attributes.devicePointer)


def _launch(
    kernel: Any,
    device: torch.device,
    num_blocks: int,
    num_threads: int,
    parameters: npt.NDArray[Any],
    shared_bytes: int = 0,
) -> None:
    with torch.cuda.device(device), _stream(torch.cuda.current_stream(device).cuda_stream):
        kernel((num_blocks,), (num_threads,), (parameters,), shared_mem=shared_bytes)


@functools.cache
def _cupy() -> Any:
    import cupy

    return cupy


@dataclass(frozen=True)
class _TorchStream:
    """A stream's address in the form that other libraries take streams."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@functools.cache
def _stream(address: int) -> Any:
    return _cupy().cuda.Stream.from_external(_TorchStream(address))


@functools.cache
def _kernel(name: str, positions_per_thread: int = 1) -> Any:
    return _module(positions_per_thread).get_function(name)


@functools.cache
def _module(positions_per_thread: int) -> Any:
    return _cupy().RawModule(code=source(), options=compile_options(positions_per_thread), backend="nvrtc")


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _max_shared_bytes(device: torch.device) -> int:
    """Shared memory that a block may ask for."""
    with torch.cuda.device(device):
        return int(_cupy().cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])
