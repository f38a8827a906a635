"""The KV of a prompt as one forward computes it, in pools of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.spec import ModelSpec


@dataclass(frozen=True)
class Pools:
    """Pools by layer or group, then by position. ``access`` writes them."""

    access: PagedKv
    kv: Tensor
    index: Tensor
    row_checks: Tensor

    @property
    def hint(self) -> Tensor:
        """Return the selection hint of the last position, int32 [num_index_groups, index_topk]."""
        return self.access.hints[0]


def own_pools(spec: ModelSpec, num_tokens: int, page_size: int = 16) -> Pools:
    """Make pools for one forward of ``num_tokens`` tokens."""
    num_pages = -(-num_tokens // page_size)
    num_slots = num_pages * page_size
    kv = torch.zeros((spec.num_kv_layers, num_slots, spec.item_bytes), dtype=torch.uint8)
    index = torch.zeros((spec.num_index_groups, num_slots, spec.index_item_bytes), dtype=torch.uint8)
    row_checks = torch.zeros((spec.num_kv_layers, num_slots), dtype=torch.int32)
    request = PagedRequest(torch.arange(num_pages), 0, num_tokens)
    access = PagedKv(spec, kv, index, page_size, [request], row_checks=row_checks)
    return Pools(access, *(pool[:, :num_tokens] for pool in (kv, index, row_checks)))


def prefilled(spec: ModelSpec, model: DsaModel, prompt: Sequence[int]) -> Pools:
    """Compute all tokens of a prompt but the last, also by the draft layer if there is one."""
    pools = own_pools(spec, len(prompt) - 1)
    access, ids = pools.access, torch.tensor(prompt)
    _, hidden = model.forward_with_hidden(ids[:-1], access.positions, access, access.last_rows)
    if spec.num_draft_layers:
        model.draft(ids[1:], hidden, access.positions, access, access.last_rows)
    return pools
