"""Computes how large a decode node's pools are, from settings, model and free GPU memory. Pure.

The engine calls this module at its start: ``make_limits`` once before the model is loaded, to count main
memory for the choice of the transport, and again with the size of the device pool. The host's sizes follow
from settings alone; the device pool may get what the model leaves of the GPU (``size_device_pool``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.settings import flag
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.core.memory.device import DeviceMemory, PoolDemand
from hisparse_pd.core.memory.gpu_copies import STAGED_BYTES
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.model.token_counts import TokenCounts
from hisparse_pd.core.paging.pools import SlotCounts, round_up
from hisparse_pd.decode_node.attention_parts import NUM_PARTS
from hisparse_pd.decode_node.drafting import drafts_with_room, full_buffer, smallest_buffer
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.split_choice import MIN_REQS
from hisparse_pd.engine.host_copies import COMPARED_BYTES
from hisparse_pd.kernels.gpu_sizes import check_swap_in_sizes
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.miss_plan import MissPlan

DEFAULT_BUFFER = 4096
"""Entries of a hot buffer when no number is given, unless drafts need more: published hit rates are for this
size, and for one twice as large."""

MOST_ENTRIES = 16384
"""Most entries of a hot buffer without a number: of V3.2's items at 32k, 65% hits become 95%."""

AUX_SLOTS_PER_ROW = 4
"""Aux slots for each req_row: more than one, since a room in quarantine, into which a write may still land,
keeps its aux slot while its row is free."""

LOOKUPS_PER_HOST_TOKEN = 2
"""Lookup slots, which say where a position is in a hot buffer, for each host slot. A request needs its own
even for host pages that it shares: with two for each host slot, all hisparse requests together may be twice
as long as the host pool."""

GROWTH_PAGES = 16
"""Pages that a request gets beyond its prompt at its admission, and again whenever it has used them: 1,024
tokens with the default page size."""

FILL_BYTES = 128 << 20
"""Bytes of items up to which the pages of several requests that become resident are filled at once: four
slices (``row_fills.py``), so that short fills do not wait for one another's end."""

MAX_TAIL_STEPS = 4
"""Most steps in which a request computes what its prompt lacks; each takes as many tokens as a step with all
drafts. A trip to an idle prefill node takes longer: as long as nine steps of a model with five layers,
or some six of one with 61."""

BASE_RESERVE_BYTES = 1 << 30
"""Bytes for activations: workspaces of libraries, buffers of the layers, and CUDA graphs."""
LOGIT_COPIES = 6
"""Float32 rows of the vocabulary's size that sampling needs at once for each row of logits."""


def make_limits(settings: DecodeSettings, spec: ModelSpec, device_pool_tokens: int) -> Limits:
    """Return the sizes of all pools. ``device_pool_tokens``: 0 while the device pool has no size yet. Raises
    StartError when nothing could ever be served with them."""
    _check_sizes(settings, spec, device_pool_tokens)
    page_size = settings.page_size
    num_drafts = settings.speculative_num_steps
    index_tokens = settings.index_pool_tokens or round_up(
        settings.host_pool_tokens + device_pool_tokens, page_size
    )
    lookup_tokens = LOOKUPS_PER_HOST_TOKEN * settings.host_pool_tokens
    if settings.keeps_idle_keys:  # most of the host pool may be idle, and running requests need index slots
        lookup_tokens = LOOKUPS_PER_HOST_TOKEN * min(settings.host_pool_tokens, index_tokens)
    return Limits(
        totals=SlotCounts(
            host=settings.host_pool_tokens // page_size * page_size,
            device=device_pool_tokens // page_size * page_size,
            index=index_tokens // page_size * page_size,
            lookup=lookup_tokens // page_size * page_size,
            aux=settings.max_running_requests * AUX_SLOTS_PER_ROW,
            req_row=settings.max_running_requests,
        ),
        page_size=page_size,
        max_context=spec.context_length,
        index_topk=spec.index_topk,
        device_buffer_size=hot_buffer_tokens(settings, spec),
        growth_tokens=GROWTH_PAGES * page_size,
        max_drafts=num_drafts,
        max_tail_tokens=MAX_TAIL_STEPS * (num_drafts + 1),
        largest_hot_buffer=largest_hot_buffer(settings, spec),
        keeps_residents=not settings.device_buffer_size,
        fill_tokens=FILL_BYTES // (spec.item_bytes * spec.num_kv_layers),
    )


def _check_sizes(settings: DecodeSettings, spec: ModelSpec, device_pool_tokens: int) -> None:
    """Raise StartError for a hot buffer that is too small for any step, or a pool of less than a page."""
    num_drafts, page_size = settings.speculative_num_steps, settings.page_size
    smallest, buffer = smallest_buffer(num_drafts, spec.index_topk), hot_buffer_tokens(settings, spec)
    if buffer < smallest:
        with_drafts = f" and {num_drafts} drafts" if num_drafts else ""
        raise StartError(
            f"--device-buffer-size {buffer}: a hot buffer holds the {spec.index_topk} "
            f"positions of a top-k and the newest token{with_drafts}; give at least {smallest}"
        )
    for name, num_tokens in (
        ("host_pool_tokens", settings.host_pool_tokens),
        ("device_pool_tokens", device_pool_tokens),
        ("index_pool_tokens", settings.index_pool_tokens),
    ):
        if 0 < num_tokens < page_size:
            raise StartError(f"{flag(name)} {num_tokens}: less than one page of {page_size} tokens")


def hot_buffer_tokens(settings: DecodeSettings, spec: ModelSpec) -> int:
    """Return the most entries of a hot buffer: the number given, or else the default with room for all
    drafts."""
    needed = full_buffer(settings.speculative_num_steps, spec.index_topk)
    return settings.device_buffer_size or max(DEFAULT_BUFFER, needed)


def largest_hot_buffer(settings: DecodeSettings, spec: ModelSpec) -> int:
    """Return the most entries of a hot buffer where device slots are free: the number given, or else
    MOST_ENTRIES, or the default if that is more."""
    full_size = hot_buffer_tokens(settings, spec)
    return full_size if settings.device_buffer_size else max(full_size, MOST_ENTRIES)


def max_hot_capacity(settings: DecodeSettings, spec: ModelSpec) -> int:
    """Return the most entries that a hot buffer needs: no more than a whole context, and drafts behind its
    end."""
    return min(largest_hot_buffer(settings, spec), spec.context_length + settings.speculative_num_steps)


def drafts_without_room(settings: DecodeSettings, spec: ModelSpec) -> str:
    """Return a warning if hot buffers have no room for all drafts of requests that are longer than a buffer;
    else an empty string."""
    num_drafts, top_k = settings.speculative_num_steps, spec.index_topk
    needed, buffer = full_buffer(num_drafts, top_k), hot_buffer_tokens(settings, spec)
    # A buffer for a whole context and its drafts is enough, since no request is longer.
    if num_drafts == 0 or buffer >= min(needed, spec.context_length + num_drafts):
        return ""
    possible = max(0, drafts_with_room(buffer, top_k=top_k, max_new=num_drafts + 1))
    return (
        f"--device-buffer-size {buffer} has room for {possible} of {num_drafts} drafts of "
        f"a hisparse request that is longer than this; give --device-buffer-size {needed} for all of them"
    )


def check_swap_in(settings: DecodeSettings, spec: ModelSpec) -> None:
    """Raise StartError for sizes that the swap-in of a GPU cannot take, if the node is on one."""
    if settings.device != "cpu":
        check_swap_in_sizes(
            top_k=spec.index_topk,
            max_running_requests=settings.max_running_requests,
            capacity=max_hot_capacity(settings, spec),
            num_new=settings.speculative_num_steps + 1,
        )


def size_device_pool(settings: DecodeSettings, spec: ModelSpec, memory: DeviceMemory | None) -> int:
    """Return the tokens of the device pool, from ``PoolDemand.num_tokens``. Raises StartError."""
    num_drafts = settings.speculative_num_steps
    smallest = min(smallest_buffer(num_drafts, spec.index_topk), spec.context_length + num_drafts)
    return device_demand(settings, spec).num_tokens(
        settings.device_pool_tokens,
        memory,
        settings.mem_fraction_static,
        round_up(smallest, settings.page_size),
    )


def device_demand(settings: DecodeSettings, spec: ModelSpec) -> PoolDemand:
    """Return what the node takes of the GPU beside the weights, by the number of tokens in the device
    pool."""
    page_size = settings.page_size
    item_bytes = spec.num_kv_layers * spec.item_bytes
    token_key_bytes = key_bytes(spec)
    # Without a size of its own the index pool covers host and device pool, and grows with their tokens. The
    # device pool's part then counts for each of its tokens.
    is_index_derived = settings.index_pool_tokens == 0
    index_tokens = (
        round_up(settings.host_pool_tokens, page_size) if is_index_derived else settings.index_pool_tokens
    )
    return PoolDemand(
        option="--device-pool-tokens",
        fixed={
            "indexer keys and row checks" + (" of the host pool" if is_index_derived else ""): token_key_bytes
            * index_tokens,
            "scratch pages": page_size * (item_bytes + token_key_bytes),
            "per-request tables": table_bytes(settings, spec, 0),
            "counts of tokens": TokenCounts.num_bytes(settings.max_running_requests, spec.vocab_size),
            "reserve for activations": reserve_bytes(settings, spec),
        },
        bytes_per_token=item_bytes + entry_bytes(spec) + (token_key_bytes if is_index_derived else 0),
        page_size=page_size,
        remedy="lower --max-running-requests or --context-length (tables, reserve) or --host-pool-tokens "
        "(tables, indexer keys) or --index-pool-tokens (indexer keys), or free GPU memory",
    )


def key_bytes(spec: ModelSpec) -> int:
    """Return the bytes of one token's indexer keys and row checks, in all layers."""
    return spec.num_index_groups * spec.index_item_bytes + spec.row_check_bytes


def entry_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the tables for one device slot, which may have an entry of a hot buffer."""
    return HotBufferState.ENTRY_BYTES * spec.num_hot_groups


def table_bytes(settings: DecodeSettings, spec: ModelSpec, device_pool_tokens: int) -> int:
    """Return the bytes of ``HotBufferState`` and the miss plans. A longer context makes only the
    page tables larger: four of them have a page id for each page of each row."""
    num_rows, meta = settings.max_running_requests, torch.device("meta")  # where tensors take no memory
    state = HotBufferState.create(
        spec.num_hot_groups,
        num_rows,
        spec.context_length,
        max_hot_capacity(settings, spec),
        settings.page_size,
        make_limits(settings, spec, 0).totals.lookup,
        device_pool_tokens,
        meta,
    )
    plan_sizes = [num_rows * (settings.speculative_num_steps + 1)]
    min_split = MIN_REQS if settings.micro_batch_min_bs is None else settings.micro_batch_min_bs
    if 0 < min_split <= num_rows:
        plan_sizes += [-(-num_rows // NUM_PARTS)] * NUM_PARTS
    plans = [MissPlan.create(num_reqs, spec.index_topk, meta) for num_reqs in plan_sizes]
    values = [value for tables in (state, *plans) for value in vars(tables).values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def reserve_bytes(settings: DecodeSettings, spec: ModelSpec) -> int:
    """Return the bytes that a step computes with: a fixed part, logits, twice the indexer's scores, and what
    copies and comparisons of idle keys take, on their three streams."""
    num_new = settings.speculative_num_steps + 1
    logit_bytes, score_bytes, token_bytes = 4 * spec.vocab_size, 4 * spec.context_length, 8
    per_row = LOGIT_COPIES * logit_bytes + 2 * score_bytes
    if num_new > 1:  # logits, hidden state and token between a step's two graphs
        per_row += logit_bytes + spec.dtype.itemsize * spec.hidden_size + token_bytes
    num_rows = settings.max_running_requests * num_new
    copy_bytes = 3 * STAGED_BYTES + COMPARED_BYTES if settings.keeps_idle_keys else 0
    return BASE_RESERVE_BYTES + num_rows * per_row + copy_bytes
