"""Queries and paged keys for the indexer's tests, in scattered pages and with poison after every row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hisparse_pd.kernels.kv_format import IndexKeyFormat
from hisparse_pd.kernels.paged_indexer import (
    IndexerScratch,
    gather_keys,
    paged_index_topk,
    paged_index_topk_reference,
)

POISON = 0xFF
"""Every byte that must not be read; NaN in every format."""


def stored_keys(keys: Tensor, key_format: str) -> Tensor:
    """Return keys as stored, uint8 [num, index_item_bytes], from float32 [num, dim]."""
    if key_format == "fp8_e4m3":
        scales = keys.abs().amax(1, keepdim=True).clamp(min=1e-4) / 448
        values = (keys / scales).to(torch.float8_e4m3fn)
        return torch.cat((values.view(torch.uint8), scales.view(torch.uint8)), dim=1)
    dtype = torch.float32 if key_format == "float32" else torch.bfloat16
    return keys.to(dtype).view(torch.uint8)


class Batch:
    """One query for each of ``lens`` positions, each in its own row; the seed determines all numbers."""

    def __init__(
        self,
        seed: int,
        key_format: str,
        *,
        num_heads: int,
        head_dim: int,
        page_size: int,
        lens: Sequence[int],
        top_k: int,
        q_dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        max_pages: int | None = None,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.key_format, self.page_size, self.top_k, self.head_dim = key_format, page_size, top_k, head_dim
        num_tokens = len(lens)
        used_pages = [-(-length // page_size) for length in lens]
        max_pages = max_pages or max(used_pages)
        num_pages = sum(used_pages) + 1
        keys = torch.randn(num_pages * page_size, head_dim, generator=generator, device=device)
        self.index_pool = stored_keys(keys, key_format)
        # A row's pages are followed by ids of pages that do not exist, so that reading them would fail.
        self.page_table = torch.full((num_tokens, max_pages), 1 << 30, dtype=torch.int32, device=device)
        order = torch.randperm(num_pages, generator=generator, device=device).int()
        start = 0
        for row, (length, count) in enumerate(zip(lens, used_pages, strict=True)):
            self.page_table[row, :count] = order[start : start + count]
            start += count
            if count:
                tail = count * page_size - length
                last_slot = (int(order[start - 1]) + 1) * page_size
                self.index_pool[last_slot - tail : last_slot] = POISON
        self.q_index = torch.randn(num_tokens, num_heads, head_dim, generator=generator, device=device).to(
            q_dtype
        )
        self.weights = torch.randn(num_tokens, num_heads, generator=generator, device=device)
        self.req_rows = torch.arange(num_tokens, device=device)
        self.query_positions = torch.tensor(lens, dtype=torch.int64, device=device) - 1
        self.num_real = torch.tensor([num_tokens], dtype=torch.int32, device=device)

    @property
    def rows(self) -> list[int]:
        return list(self.req_rows.tolist())

    def with_queries(self, rows: list[int], positions: list[int]) -> Batch:
        """Return a batch with the same keys, whose queries differ slightly from the first query of this
        one."""
        device = self.q_index.device
        other = copy.copy(self)
        other.q_index = torch.stack(
            [self.q_index[0].roll(i, dims=1) for i in range(len(rows))]
        ) if rows else self.q_index[:0]  # fmt: skip
        other.weights = self.weights[:1].expand(len(rows), -1).contiguous()
        other.req_rows = torch.tensor(rows, dtype=torch.int64, device=device)
        other.query_positions = torch.tensor(positions, dtype=torch.int64, device=device)
        other.num_real = torch.tensor([len(rows)], dtype=torch.int32, device=device)
        return other

    def with_only(self, token: int) -> Batch:
        other = copy.copy(self)
        one = slice(token, token + 1)
        other.q_index, other.weights = self.q_index[one], self.weights[one]
        other.req_rows, other.query_positions = self.req_rows[one], self.query_positions[one]
        other.num_real = torch.ones_like(self.num_real)
        return other

    def arguments(self) -> dict[str, Any]:
        names = ["q_index", "weights", "index_pool", "page_table", "req_rows", "query_positions", "num_real"]
        names += ["page_size", "top_k", "key_format"]
        return {name: getattr(self, name) for name in names}

    def call(self, scratch: IndexerScratch | None = None, max_len: int | None = None) -> Tensor:
        return paged_index_topk(**self.arguments(), scratch=scratch, max_len=max_len)

    def expected(self) -> Tensor:
        return paged_index_topk_reference(**self.arguments())

    def query(self, token: int) -> Tensor:
        """Return a token's query as it is multiplied with keys, [1, num_heads, head_dim]."""
        return IndexKeyFormat(self.key_format, self.head_dim).round_queries(self.q_index[token : token + 1])

    def keys(self, row: int, seq_len: int) -> Tensor:
        """Return a row's keys, float32 [seq_len, head_dim]."""
        return gather_keys(
            self.index_pool, self.page_table[row], self.page_size, seq_len, self.head_dim, self.key_format
        ).float()
