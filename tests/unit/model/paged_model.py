"""A model over paged pools, as a node has it, without a node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.spec import ModelSpec

Part = tuple[Tensor, int, Sequence[int]]
"""A request's part of a forward: its page ids, the tokens before, and its new tokens."""


class PagedModel:
    """A model over paged pools whose free slots hold garbage."""

    def __init__(self, spec: ModelSpec, model: DsaModel, num_pages: int, page_size: int) -> None:
        self.spec, self.model, self.page_size = spec, model, page_size
        generator = torch.Generator().manual_seed(page_size)
        self.device_pool, self.index_pool = (
            torch.rand((num_layers, num_pages * page_size, num_bytes // 4), generator=generator).view(
                torch.uint8
            )
            for num_layers, num_bytes in (
                (spec.num_kv_layers, spec.item_bytes),
                (spec.num_index_groups, spec.index_item_bytes),
            )
        )
        self.free_pages = torch.randperm(num_pages, generator=generator)

    def kv(self, *requests: PagedRequest) -> PagedKv:
        return PagedKv(self.spec, self.device_pool, self.index_pool, self.page_size, requests)

    def extend(self, parts: Sequence[Part]) -> tuple[Tensor, PagedKv]:
        """The logits behind each of ``parts``, in one forward."""
        kv = self.kv(*(PagedRequest(pages, start, len(tokens)) for pages, start, tokens in parts))
        token_ids = torch.tensor([token_id for _, _, tokens in parts for token_id in tokens])
        return self.model.forward(token_ids, kv.positions, kv, kv.last_rows), kv
