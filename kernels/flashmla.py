"""Sparse attention by FlashMLA's kernels, from the ``sglang-kernel`` wheel, for the sizes that they support.

``kernels.attention_backends`` asks for an ``obstacle`` and makes a backend with ``create``. There are two:
``flash_mla_sparse_fwd`` reads bfloat16 items, ``flash_mla_with_kvcache`` fp8 items. Both skip a slot of -1
and return zeros where nothing is selected.

The library spreads the work of the fp8 kernel by a schedule, a table with one row for each part of the GPU
that works by itself: which queries it takes, and which blocks of 64 slots of them. The library's own
schedules depend on the whole batch, so this module writes its own (``spread``).
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from hisparse_pd.kernels.attention import FLASHMLA_KV, FLASHMLA_SPARSE, AttentionBackend, check_attend
from hisparse_pd.kernels.cuda_launch import num_multiprocessors
from hisparse_pd.kernels.kv_format import BFLOAT16, FP8_E4M3, KvFormat

log = logging.getLogger(__name__)

KV_LORA_RANK: Final = 512
ROPE_DIM: Final = 64
NUM_HEADS: Final = (64, 128)
ARCHITECTURES: Final = (9, 10)
"""Major compute capabilities for which the wheel has kernels: Hopper and Blackwell."""

FORMAT: Final = {FLASHMLA_SPARSE: BFLOAT16, FLASHMLA_KV: FP8_E4M3}
TOP_K_MULTIPLE: Final = {FLASHMLA_SPARSE: 128, FLASHMLA_KV: 64}
"""Slots that a kernel takes in one round; it does not check for an incomplete round."""

MAX_PAGE_SIZE: Final = 64
MAX_SPLITS_PER_CALL: Final = 528
"""Most splits in one call of the fp8 kernel, which keeps float32 sums of the whole call, 256 KiB a split at
128 heads. With one split a query, each of an H200's 66 parts takes eight queries."""


def obstacle(name: str, device: torch.device, kv_format: KvFormat, num_heads: int, top_k: int) -> str | None:
    """Return why ``name``, one of FlashMLA's backends, cannot work here; None when it can."""
    if kv_format.name != FORMAT[name]:
        return f"it reads {FORMAT[name]} items, not {kv_format.name}"
    if (kv_format.kv_lora_rank, kv_format.rope_dim) != (KV_LORA_RANK, ROPE_DIM):
        return (
            f"it reads items of {KV_LORA_RANK} + {ROPE_DIM} numbers, not {kv_format.kv_lora_rank} + "
            f"{kv_format.rope_dim}"
        )
    if num_heads not in NUM_HEADS:
        return f"it takes {' or '.join(map(str, NUM_HEADS))} heads, not {num_heads}"
    if top_k < 1 or top_k % TOP_K_MULTIPLE[name]:
        return f"it takes a top_k that is a multiple of {TOP_K_MULTIPLE[name]}, not {top_k}"
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if (major := torch.cuda.get_device_capability(device)[0]) not in ARCHITECTURES:
        return f"it needs compute capability 9 or 10, not {major}"
    module = flash_mla()
    return module if isinstance(module, str) else None


def create(name: str, kv_format: KvFormat, reason: str, split_slots: int = 0) -> AttentionBackend:
    """Return the backend ``name``, which must have no ``obstacle``."""
    if name == FLASHMLA_SPARSE:
        return FlashMlaSparseAttention(kv_format, reason, split_slots)
    return FlashMlaKvAttention(kv_format, reason, split_slots)


def num_splits_of(top_k: int, split_slots: int, multiple: int) -> int:
    """Return the number of splits of equal length, each of whole rounds of ``multiple`` slots, and of
    ``split_slots`` where that is possible, else longer. 2048 slots in splits of 512 make four; 640 slots in
    rounds of 128 make one. It is 1 if ``split_slots`` is 0."""
    return math.gcd(max(1, top_k // split_slots), top_k // multiple) if split_slots else 1


@dataclass(frozen=True)
class FlashMlaSparseAttention:
    """Attention over bfloat16 items: one program for each query and 64 heads.

    To keep more of a GPU busy with few queries, slots are cut into splits, each of which is a query to the
    library; another kernel combines their results.
    """

    kv_format: KvFormat
    reason: str = ""
    split_slots: int = 0
    """Slots in one split of a query; 0: queries are not split."""
    name: str = FLASHMLA_SPARSE

    def attend(
        self,
        q: Tensor,
        layer_pool: Tensor,
        device_slots: Tensor,
        scale: float,
        num_columns: Tensor | None = None,
    ) -> Tensor:
        """See ``AttentionBackend.attend``; a float32 ``q`` is rounded to bfloat16."""
        check_attend(self.kv_format, q, layer_pool, device_slots)
        num_tokens, num_heads, _ = q.shape
        if num_tokens == 0:
            return q.new_zeros((0, num_heads, KV_LORA_RANK))
        top_k = device_slots.shape[1]
        num_splits = num_splits_of(top_k, self.split_slots, TOP_K_MULTIPLE[FLASHMLA_SPARSE])
        queries = q.to(torch.bfloat16).contiguous()
        results, _, log_sums = flash_mla().flash_mla_sparse_fwd(
            queries if num_splits == 1 else _repeated(queries, num_splits),
            layer_pool.view(torch.bfloat16)[:, None, :],
            device_slots.view(num_tokens * num_splits, 1, -1),
            scale,
            KV_LORA_RANK,
            topk_length=num_columns if num_splits == 1 else None,  # it counts a whole query's columns
        )
        if num_splits == 1:
            result: Tensor = results.to(q.dtype)
            return result
        from hisparse_pd.kernels.triton_attention import combine

        return combine(
            results.view(num_tokens, num_splits, num_heads, -1),
            log_sums.view(num_tokens, num_splits, num_heads),
            torch.empty((num_tokens, num_heads, KV_LORA_RANK), dtype=q.dtype, device=q.device),
        )


def _repeated(queries: Tensor, times: int) -> Tensor:
    """Return bfloat16 ``queries`` [num_tokens, num_heads, dim], contiguous, each ``times`` times in a row."""
    num_tokens, num_heads, dim = queries.shape
    words = queries.view(torch.int64)  # torch copies an element at a time: four numbers are one of these
    copies = words[:, None].expand(num_tokens, times, num_heads, words.shape[2]).contiguous()
    return copies.view(torch.bfloat16).view(num_tokens * times, num_heads, dim)


@dataclass(frozen=True)
class FlashMlaKvAttention:
    """Attention over fp8 items. The kernel converts them to bfloat16 exactly: their scales are powers of two.

    Slots are cut into splits of ``split_slots`` whatever the batch is, and another kernel combines their
    results, so that a query's bits depend on the query alone. A query is a request to the library, and its
    splits are the queries of that request. The library's own schedules cut requests so that parts have equal
    length in the batch, and are not used.
    """

    kv_format: KvFormat
    reason: str = ""
    split_slots: int = 0
    """Slots in one split of a query; 0: queries are not split."""
    name: str = FLASHMLA_KV
    taken_sms: int = 0
    """Multiprocessors that other work holds meanwhile. Blocks of the kernel that find no free multiprocessor
    would begin when others end and double its time, so the work is spread over the free ones only.
    """
    _schedules: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False, repr=False)
    """Schedules by the shape of a call: how its work is spread over the GPU."""

    def attend(
        self,
        q: Tensor,
        layer_pool: Tensor,
        device_slots: Tensor,
        scale: float,
        num_columns: Tensor | None = None,
    ) -> Tensor:
        """See ``AttentionBackend.attend``; a float32 ``q`` is rounded to bfloat16."""
        check_attend(self.kv_format, q, layer_pool, device_slots)
        num_tokens, num_heads, _ = q.shape
        out = torch.empty((num_tokens, num_heads, KV_LORA_RANK), dtype=q.dtype, device=q.device)
        num_splits = num_splits_of(device_slots.shape[1], self.split_slots, TOP_K_MULTIPLE[FLASHMLA_KV])
        tokens_per_call = MAX_SPLITS_PER_CALL // num_splits
        for start in range(0, num_tokens, tokens_per_call):
            tokens = slice(start, start + tokens_per_call)
            self._attend(q[tokens], layer_pool, device_slots[tokens], scale, num_splits, out[tokens])
        return out

    def beside(self, taken_sms: int) -> FlashMlaKvAttention:
        """Return the same backend for a GPU on which other work takes ``taken_sms`` multiprocessors."""
        return replace(self, taken_sms=taken_sms, _schedules={})

    def _attend(
        self, q: Tensor, layer_pool: Tensor, device_slots: Tensor, scale: float, num_splits: int, out: Tensor
    ) -> None:
        num_tokens, num_heads, dim = q.shape
        # The kernel addresses slots by page. Any page size is right: take the largest that divides the pool.
        page_size = math.gcd(layer_pool.shape[0], MAX_PAGE_SIZE)
        device_index = -1 if q.device.index is None else q.device.index
        key = (*q.shape, device_slots.shape[1], page_size, device_index)
        queries = q.to(torch.bfloat16).contiguous()[:, None].expand(num_tokens, num_splits, num_heads, dim)

        def run(schedule: Any) -> tuple[Tensor, Tensor]:
            results, log_sums = flash_mla().flash_mla_with_kvcache(
                q=queries,
                k_cache=layer_pool.view(torch.float8_e4m3fn).view(-1, page_size, 1, layer_pool.shape[1]),
                block_table=None,
                cache_seqlens=None,
                head_dim_v=KV_LORA_RANK,
                tile_scheduler_metadata=schedule,
                softmax_scale=scale,
                is_fp8_kvcache=True,
                indices=device_slots.view(num_tokens, num_splits, -1),
            )
            return results, log_sums

        schedule = self._schedules.get(key)
        if schedule is None:
            schedule, _ = flash_mla().get_mla_metadata()
            run(schedule)  # the library fills the schedule in; the result is not used
            self._rewrite(schedule, num_tokens, device_slots.shape[1] // num_splits)
            # Values computed in a capture exist only once its graph is replayed: no other call may use them.
            if not torch.cuda.is_current_stream_capturing():
                self._schedules[key] = schedule
        results, log_sums = run(schedule)
        if num_splits == 1:
            out.copy_(results[:, 0])
            return
        from hisparse_pd.kernels.triton_attention import LOG2_E, combine

        # This kernel's logarithms are natural ones; the bfloat16 kernel's have base 2.
        combine(results, log_sums.transpose(1, 2), out, LOG2_E)

    def _rewrite(self, schedule: Any, num_queries: int, num_slots: int) -> None:
        """Rewrite a schedule of the library so that its parts have whole queries."""
        table, starts = schedule.tile_scheduler_metadata, schedule.num_splits
        num_blocks = num_slots // TOP_K_MULTIPLE[FLASHMLA_KV]
        # Only a table that adds up to all blocks has the columns that ``spread`` writes.
        if (
            not torch.cuda.is_current_stream_capturing()
            and num_scheduled_blocks(table.cpu(), num_queries, num_blocks) != num_queries * num_blocks
        ):
            log.warning(
                "this version of FlashMLA has another schedule: other requests may change how a request's "
                "attention is rounded, and attention may wait for copies"
            )
            return
        num_sms = num_multiprocessors(table.device)
        num_parts = max(1, len(table) * (num_sms - self.taken_sms) // num_sms)
        table.copy_(spread(num_queries, num_blocks, num_parts, len(table), table.device))
        torch.arange(num_queries + 1, out=starts)  # each query has one result: it is cut nowhere


def spread(
    num_queries: int, num_blocks: int, num_parts: int, num_rows: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return a schedule of the fp8 kernel that spreads whole queries of ``num_blocks`` blocks evenly over
    parts.

    The schedule is int32 [num_rows, 8] with one part a row: first and last query, first block of the first
    and end block of the last; the other columns only matter for queries that are cut, and are 0. Rows from
    ``num_parts`` on have no work.
    """
    num_parts = min(num_parts, num_rows, num_queries)
    bounds = torch.arange(num_parts + 1, device=device) * num_queries // num_parts
    table = torch.zeros((num_rows, 8), dtype=torch.int32, device=device)
    table[:, 0] = num_queries
    table[:num_parts, 0] = bounds[:-1]
    table[:num_parts, 1] = bounds[1:] - 1
    table[:num_parts, 3] = num_blocks
    return table


def num_scheduled_blocks(table: Tensor, num_queries: int, num_blocks: int) -> int:
    """Return the number of blocks in all parts of a schedule such as ``spread``'s."""
    first_query, last_query, begin, end = table[table[:, 0] < num_queries, :4].long().unbind(dim=1)
    return int(((last_query - first_query) * num_blocks + end - begin).sum())


@functools.cache
def flash_mla() -> Any:
    """Return the module ``sgl_kernel.flash_mla``, or a string that says why it cannot be used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from sgl_kernel import flash_mla
    except Exception as error:  # a wheel for another torch or driver fails in many ways
        return f"sgl_kernel.flash_mla cannot be imported ({type(error).__name__}: {error})"
    if (cause := flash_mla._flashmla_import_error) is not None:
        return f"sgl_kernel.flashmla_ops cannot be loaded ({type(cause).__name__}: {cause})"
    return flash_mla
