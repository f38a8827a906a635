"""The lightning indexer over paged keys: every query scores all positions that it sees and keeps the best.

The forwards of both nodes call ``paged_index_topk`` in each layer that has an indexer. This module owns the
checks of the arguments, the memory that the launches share, and the reference in plain torch, which also runs
on CPUs. On a GPU ``kernels/triton_indexer.py`` writes the logits, [tokens, positions] and never [tokens,
heads, positions], and ``kernels/topk.py`` selects. On Hopper ``paged_logits.py`` and ``prompt_logits.py``
write them faster, with the same bits.

A score is ``sum_h weights[h] * relu(dot(q[h], key) * head_dim ** -0.5)`` in float32, in that order. fp8 keys
on a GPU differ: scales of queries are in the weights, and the key's own (never negative) comes after the sum
over heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from hisparse_pd.kernels.checks import KernelArgumentError, check_at_least, check_range, check_tensor
from hisparse_pd.kernels.indexer import BLOCK_BYTES, gather_pages, index_products, index_topk, weigh
from hisparse_pd.kernels.kv_format import IndexKeyFormat
from hisparse_pd.kernels.row_math import BLOCK_KEYS
from hisparse_pd.kernels.selection import ABSENT, select_topk

MAX_TOP_K = 4096
MAX_HEADS = 128
MAX_HEAD_DIM = 256
MAX_CONTEXT = 1 << 20
"""Bounds on the sizes that the GPU's kernels take."""
MAX_TOKENS_OF_A_BLOCK = 65535
"""Most queries of a block, which one launch scores: the bound of a grid's second dimension."""

_OWN_SCRATCH_BYTES = 256 << 20
"""Most bytes of the scratch that a call makes for itself if it gets none."""
_ALIGNMENT = 64
"""Multiple of positions in a row of logits, so that rows start on lines of 256 bytes."""


@dataclass(frozen=True)
class IndexerScratch:
    """Memory for the launches of one stream. Graphs hold its addresses, so it must outlive them."""

    logits: Tensor
    """float32 [max_tokens, max_context rounded up to 64]; undefined between calls."""
    max_context: int
    taken_sms: int = 0
    """Multiprocessors that other streams' copies take meanwhile. Blocks that are all to run at once leave
    them."""

    @classmethod
    def create(cls, max_tokens: int, max_context: int, device: torch.device | str) -> IndexerScratch:
        """Return memory for blocks of ``max_tokens`` queries that see up to ``max_context`` positions."""
        check_range("max_tokens", max_tokens, 1, MAX_TOKENS_OF_A_BLOCK + 1)
        check_range("max_context", max_context, 1, MAX_CONTEXT + 1)
        num_columns = -(-max_context // _ALIGNMENT) * _ALIGNMENT
        logits = torch.empty((max_tokens, num_columns), dtype=torch.float32, device=device)
        return cls(logits, max_context)

    @property
    def max_tokens(self) -> int:
        return self.logits.shape[0]

    def blocks(self, num_tokens: int, max_len: int) -> Iterator[tuple[Tensor, dict[str, int]]]:
        """Cut ``num_tokens`` queries, which see up to ``max_len`` positions, into blocks that this memory has
        room for. Yield for each block the memory, as logits float32 [max_tokens or more, max_len rounded up
        to 64], and the arguments of its launches: ``first_token``, ``block_tokens`` and ``max_len``, which
        is at most ``max_context``."""
        max_len = min(max_len, self.max_context)
        num_columns = -(-max_len // _ALIGNMENT) * _ALIGNMENT
        num_rows = min(self.logits.numel() // num_columns, MAX_TOKENS_OF_A_BLOCK)
        logits = self.logits.view(-1)[: num_rows * num_columns].view(num_rows, num_columns)
        for first_token in range(0, num_tokens, num_rows):
            block_tokens = min(num_rows, num_tokens - first_token)
            yield logits, {"first_token": first_token, "block_tokens": block_tokens, "max_len": max_len}

    def beside(self, taken_sms: int) -> IndexerScratch:
        """Return the same memory for launches beside which ``taken_sms`` multiprocessors are taken."""
        return replace(self, taken_sms=taken_sms)

    def split(self, num_parts: int) -> list[IndexerScratch]:
        """Split this memory into ``num_parts`` scratches of equal size, one for each of as many streams."""
        check_range("num_parts", num_parts, 1, self.max_tokens + 1)
        size = self.max_tokens // num_parts
        return [
            replace(self, logits=self.logits[part * size : (part + 1) * size]) for part in range(num_parts)
        ]


def paged_index_topk(
    q_index: Tensor,
    weights: Tensor,
    index_pool: Tensor,
    page_table: Tensor,
    req_rows: Tensor,
    query_positions: Tensor,
    num_real: Tensor,
    *,
    page_size: int,
    top_k: int,
    key_format: str,
    scratch: IndexerScratch | None = None,
    max_len: int | None = None,
    is_prompt: bool = False,
) -> Tensor:
    """Return the positions that each query attends to: exactly the best, and among equal scores the lowest.

    ``q_index``: float32 or bfloat16 [num_tokens, num_index_heads, index_head_dim], up to 128 heads of up to
    256 numbers. With float32 here or in the pool, products have full float32 precision; bfloat16 queries of
    fp8 keys are rounded to fp8 (``IndexKeyFormat.round_queries``).
    ``weights``: float32 [num_tokens, num_index_heads], the heads' weights with their scale.
    ``index_pool``: uint8 [num_slots, index_item_bytes], one layer of keys, 4-byte aligned; ``key_format`` is
    "float32", "bfloat16" or "fp8_e4m3" (index_head_dim bytes, then one float32 scale).
    ``page_table``: int32 [num_rows, max_pages], page ids of each request row in position order. Pages up to
    that of a query's own position must be pages of the pool; others are not read.
    ``req_rows``, ``query_positions``: int64 [num_tokens]; query i sees positions [0, query_positions[i]] of
    its row. A row out of range or a negative position sees nothing. Positions from
    ``max_pages * page_size`` or, on a GPU, ``scratch.max_context`` on are not seen.
    ``num_real``: int32 [1]; queries from this index on are padding.
    ``top_k``: 1 to 4096.
    ``scratch``: the memory for the launches on a GPU, made for the call if None; not used on a CPU. More
    queries than it has room for are taken in blocks.
    ``max_len``: a bound on the positions that queries see, which makes room for more of them in a block.
    ``is_prompt``: whether most queries have the row of their neighbours. A GPU then reads keys once for
    several queries; no bit of a score depends on it.

    Returns int32 [num_tokens, top_k]: ascending positions, followed by -1. A query that sees at most
    ``top_k`` positions gets all of them; padding gets none. 0.0 and -0.0 are equal; NaN counts as -inf, which
    is chosen when there are too few numbers.

    All tensors are on one device and contiguous, and only ``scratch`` is changed. On a GPU everything goes to
    the current stream without a synchronisation, and nothing depends on values on the host. A CUDA graph can
    capture a call with a ``scratch`` after one call with the same shapes, which compiles. One scratch serves
    one stream.
    """
    check_tensor("q_index", q_index, dtypes=(torch.float32, torch.bfloat16), shape=(None, None, None))
    num_tokens, num_heads, head_dim = q_index.shape
    device = q_index.device
    check_range("num_index_heads", num_heads, 1, MAX_HEADS + 1)
    check_range("index_head_dim", head_dim, 1, MAX_HEAD_DIM + 1)
    item_bytes = IndexKeyFormat(key_format, head_dim).item_bytes
    for name, tensor, dtype, shape in (
        ("weights", weights, torch.float32, (num_tokens, num_heads)),
        ("index_pool", index_pool, torch.uint8, (None, item_bytes)),
        ("page_table", page_table, torch.int32, (None, None)),
        ("req_rows", req_rows, torch.int64, (num_tokens,)),
        ("query_positions", query_positions, torch.int64, (num_tokens,)),
        ("num_real", num_real, torch.int32, (1,)),
    ):
        check_tensor(name, tensor, dtypes=(dtype,), shape=shape, device=device)
    check_at_least("page_size", page_size, 1)
    check_range("top_k", top_k, 1, MAX_TOP_K + 1)
    if num_tokens == 0 or page_table.numel() == 0:
        return torch.full((num_tokens, top_k), ABSENT, dtype=torch.int32, device=device)
    if device.type == "cpu":
        return paged_index_topk_reference(
            q_index, weights, index_pool, page_table, req_rows, query_positions, num_real,
            page_size=page_size, top_k=top_k, key_format=key_format,
        )  # fmt: skip
    out = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)

    from hisparse_pd.kernels.topk import select

    num_columns = page_table.shape[1] * page_size
    max_len = num_columns if max_len is None else min(max_len, num_columns)
    scratch = scratch or _own_scratch(num_tokens, max_len, device)
    if scratch.logits.device != device:
        raise KernelArgumentError(f"scratch: expected device {device}, got {scratch.logits.device}")
    write_logits = logits_writer(
        q_index, index_pool, page_size=page_size, key_format=key_format, is_prompt=is_prompt,
        taken_sms=scratch.taken_sms,
    )  # fmt: skip
    for logits, block in scratch.blocks(num_tokens, max_len):
        write_logits(
            q_index, weights, index_pool, page_table, req_rows, query_positions, num_real, logits, **block,
            top_k=top_k,
        )  # fmt: skip
        select(logits, req_rows, query_positions, num_real, out, **block, num_rows=len(page_table))
    return out


def logits_writer(
    q_index: Tensor,
    index_pool: Tensor,
    *,
    page_size: int,
    key_format: str,
    is_prompt: bool = False,
    taken_sms: int = 0,
) -> Callable[..., None]:
    """Return the fastest kernel on a GPU that takes queries and a pool like these. It is called with the
    other arguments of ``kernels.triton_indexer.write_logits``. All kernels write the same bits.

    ``taken_sms``: see ``IndexerScratch``.
    """
    from hisparse_pd.kernels import index_logits, paged_logits, prompt_logits, triton_indexer

    if index_logits.takes(q_index, index_pool, page_size, key_format):
        if is_prompt:
            return partial(prompt_logits.write_logits, page_size=page_size)
        return partial(paged_logits.write_logits, page_size=page_size, taken_sms=taken_sms)
    return partial(
        triton_indexer.write_logits, page_size=page_size, key_format=key_format, is_prompt=is_prompt
    )


def _own_scratch(num_tokens: int, max_len: int, device: torch.device) -> IndexerScratch:
    """Return a scratch for one call with ``num_tokens`` queries that see up to ``max_len`` positions."""
    max_context = min(max_len, MAX_CONTEXT)
    max_tokens = min(num_tokens, MAX_TOKENS_OF_A_BLOCK, _OWN_SCRATCH_BYTES // (4 * max_context))
    return IndexerScratch.create(max(1, max_tokens), max_context, device)


def paged_index_topk_reference(
    q_index: Tensor,
    weights: Tensor,
    index_pool: Tensor,
    page_table: Tensor,
    req_rows: Tensor,
    query_positions: Tensor,
    num_real: Tensor,
    *,
    page_size: int,
    top_k: int,
    key_format: str,
) -> Tensor:
    """Compute ``paged_index_topk`` in plain torch on any device; this reads rows and positions on the host.

    It makes one matrix product for each run of queries of one row, as transformers does, which is the fastest
    way on a CPU. Where scores are few, as in a step, ``products`` collects the products of all queries, which
    then share one selection; otherwise (None) each run selects by itself.
    """
    num_tokens, num_heads, head_dim = q_index.shape
    num_rows, max_pages = page_table.shape
    num_seen = (query_positions + 1).clamp_(0, max_pages * page_size)
    num_seen[int(num_real) :] = 0
    num_seen.masked_fill_((req_rows < 0) | (req_rows >= num_rows), 0)
    rows, nums_seen = req_rows.tolist(), num_seen.tolist()
    out = torch.full((num_tokens, top_k), ABSENT, dtype=torch.int32, device=q_index.device)

    longest = max(nums_seen)
    is_small = 4 * num_tokens * num_heads * longest <= BLOCK_BYTES
    q_index = IndexKeyFormat(key_format, head_dim).round_queries(q_index)
    products = None
    if is_small:
        num_blocks = -(-longest // BLOCK_KEYS)
        products = weights.new_zeros((num_blocks, num_tokens, num_heads, BLOCK_KEYS))

    for row, run in groupby(range(num_tokens), key=rows.__getitem__):
        tokens = list(run)
        some = slice(tokens[0], tokens[-1] + 1)
        seq_len = max(nums_seen[some])
        # No scores are needed for rows that see nothing. The common selection needs none for up to top_k
        # positions either, because it chooses all of them.
        if seq_len <= (0 if products is None else top_k):
            continue
        keys = gather_keys(index_pool, page_table[row], page_size, seq_len, head_dim, key_format)
        if products is None:
            out[some] = index_topk(q_index[some], weights[some], keys, num_seen[some] - 1, top_k)
        else:
            row_products = index_products(q_index[some], keys.float())
            products[: len(row_products), some] = row_products

    if products is None:
        return out
    logits = weigh(products, weights, head_dim).transpose(0, 1).flatten(1)
    return select_topk(logits[:, :longest], num_seen, top_k)


def gather_keys(
    index_pool: Tensor, page_ids: Tensor, page_size: int, seq_len: int, head_dim: int, key_format: str
) -> Tensor:
    """Return the keys of the first ``seq_len`` positions of a request, [seq_len, head_dim].

    ``index_pool``: uint8 [num_slots, index_item_bytes]; ``page_ids``: integer [n], as in ``gather_pages``.
    """
    rows = gather_pages(index_pool, page_ids, page_size, seq_len)
    return IndexKeyFormat(key_format, head_dim).load(rows)
