"""The pages of a forward's requests for attention that reads unpacked items.

Where prompts attend by a kernel for bfloat16 over a pool of fp8 items, all pages of the requests are unpacked
next to one another before each layer attends, the new rows included. The memory for that holds one context;
requests whose pages do not fit beside others' attend after those, as another group. A query's bits do not
depend on its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.kernels.kv_format import KvFormat


class Group(NamedTuple):
    """Requests that attend together: their new tokens among those of the forward, and their pages in
    ``ContextPages.page_ids``."""

    tokens: slice
    pages: slice


class ContextPages:
    """Which pages are unpacked for a forward, and where their items lie then."""

    def __init__(self, page_ids: Tensor, numbers: Tensor, groups: Sequence[Group]) -> None:
        self.page_ids = page_ids
        """int32 [n]: the pages of one request after the other, up to its last new position; -1 in padding."""
        self.numbers = numbers
        """int32 [num_requests, max_pages]: the number of each page within its group, 0 behind the request's
        last. It is the page table of the unpacked items."""
        self.groups = groups

    @classmethod
    def of(
        cls,
        page_ids: Sequence[Tensor],
        num_new_tokens: Sequence[int],
        max_pages: int,
        most_pages: int,
        device: torch.device,
    ) -> ContextPages:
        """Return the pages of requests that have ``page_ids``, integer [num_pages], and ``num_new_tokens``
        each.

        ``max_pages``: columns of the page table. ``most_pages``: pages that the memory holds, no fewer than
        any request has.
        """
        numbers = np.zeros((len(page_ids), max_pages), np.int32)
        groups = [Group(slice(0, 0), slice(0, 0))]
        for row, ids, num_tokens in zip(numbers, page_ids, num_new_tokens, strict=True):
            tokens, pages = groups[-1]
            if pages.stop - pages.start + len(ids) > most_pages:
                tokens, pages = slice(tokens.stop, tokens.stop), slice(pages.stop, pages.stop)
                groups.append(Group(tokens, pages))
            row[: len(ids)] = np.arange(len(ids)) + pages.stop - pages.start
            groups[-1] = Group(
                slice(tokens.start, tokens.stop + num_tokens), slice(pages.start, pages.stop + len(ids))
            )
        all_ids = torch.cat([ids.to(torch.int32) for ids in page_ids]).to(device)
        return cls(all_ids, torch.from_numpy(numbers).to(device), groups)

    @classmethod
    def padding(
        cls, num_requests: int, max_pages: int, num_tokens: int, most_pages: int, device: torch.device
    ) -> ContextPages:
        """Return one group of padding with ``num_tokens`` new tokens, to be filled by ``hold``."""
        return cls(
            torch.full((most_pages,), -1, dtype=torch.int32, device=device),
            torch.zeros((num_requests, max_pages), dtype=torch.int32, device=device),
            [Group(slice(0, num_tokens), slice(0, most_pages))],
        )

    def hold(self, others: ContextPages) -> None:
        """Copy ``others``, which must be one group that fits, into this object's tensors; the rest becomes
        padding."""
        num_pages = len(others.page_ids)
        self.page_ids[:num_pages] = others.page_ids
        self.page_ids[num_pages:] = -1
        num_requests, max_pages = others.numbers.shape
        self.numbers[:num_requests, :max_pages] = others.numbers

    def unpack(
        self, group: Group, layer_pool: Tensor, kv_format: KvFormat, page_size: int, out: Tensor
    ) -> Tensor:
        """Unpack a group's pages of one layer into ``out`` (``KvFormat.unpack``), and return it as a pool,
        uint8 [num_slots, item_bytes of bfloat16]."""
        kv_format.unpack(layer_pool, self.page_ids[group.pages], page_size, out)
        return out.view(torch.uint8)
