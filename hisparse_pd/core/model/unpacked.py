"""Unpacked items of a forward's requests, for a kernel that is faster over whole contexts than over a pool.

Attention of prompts may use a kernel for bfloat16 though the pool has fp8 items. For it, each layer unpacks
all pages of the requests next to one another once it has written its new rows. If the memory for that is too
small for all requests, they take turns, some requests in each. A query's bits do not depend on its turn.

A prefill node has one ``UnpackedMemory``, as a part of its ``AttentionKernels``. Each ``PagedKv``
(``paged_kv.py``) has the ``ContextPages`` of its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.kernels.kv_format import FP8_E4M3

UNPACKED_TOKENS: Final = 1 << 19
"""Tokens that the memory holds, unless one context is longer or MOST_CONTEXTS whole contexts are shorter:
those of 16 prompts of 32,768 tokens, in 0.7 GB of DeepSeek-V3.2's rows."""
MOST_CONTEXTS: Final = 16


@dataclass(frozen=True)
class UnpackedMemory:
    """Memory for the unpacked rows of one layer, which all layers use in turn."""

    items: Tensor
    """bfloat16 [num_tokens, item_dim]"""

    @classmethod
    def create(cls, spec: ModelSpec, device: torch.device, page_size: int) -> UnpackedMemory:
        shape = unpacked_tokens(spec, page_size), spec.item_format.item_dim
        return cls(torch.empty(shape, dtype=torch.bfloat16, device=device))


def unpacked_tokens(spec: ModelSpec, page_size: int) -> int:
    """Return how many tokens are unpacked at a time, in whole pages: those of one context at least."""
    context = -(-spec.context_length // page_size) * page_size
    return max(context, min(UNPACKED_TOKENS // page_size * page_size, MOST_CONTEXTS * context))


def unpacked_bytes(spec: ModelSpec, page_size: int) -> int:
    """Return the most bytes of an ``UnpackedMemory`` on any device."""
    item_bytes = 2 * spec.item_format.item_dim if spec.item_format.name == FP8_E4M3 else 0
    return unpacked_tokens(spec, page_size) * item_bytes


class Turn(NamedTuple):
    """Requests that are computed together: their new tokens among those of the forward, and their pages in
    ``ContextPages.page_ids``."""

    tokens: slice
    pages: slice

    @property
    def num_pages(self) -> int:
        return int(self.pages.stop - self.pages.start)

    def with_request(self, num_tokens: int, num_pages: int) -> Turn:
        """Return the turn with one more request at its end."""
        tokens, pages = self.tokens, self.pages
        return Turn(slice(tokens.start, tokens.stop + num_tokens), slice(pages.start, pages.stop + num_pages))

    def next(self) -> Turn:
        """Return an empty turn behind this one."""
        return Turn(slice(self.tokens.stop, self.tokens.stop), slice(self.pages.stop, self.pages.stop))


class ContextPages:
    """Which pages are unpacked for a forward, and where their rows lie then.

    A CUDA graph is captured with ``padding``; before each replay, ``fill`` copies a forward's pages there.
    """

    def __init__(self, page_ids: Tensor, page_table: Tensor, turns: Sequence[Turn]) -> None:
        self.page_ids = page_ids
        """int32 [n]: the pages of one request after the other, up to its last new position; -1 in padding."""
        self.page_table = page_table
        """int32 [num_requests, max_pages]: the page table of the unpacked rows, in which a page's id is its
        number within its turn; 0 behind the request's last page."""
        self.turns = turns

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
        page_table = np.zeros((len(page_ids), max_pages), np.int32)
        turns = [Turn(slice(0, 0), slice(0, 0))]
        for row, ids, num_tokens in zip(page_table, page_ids, num_new_tokens, strict=True):
            if turns[-1].num_pages + len(ids) > most_pages:
                turns.append(turns[-1].next())
            row[: len(ids)] = turns[-1].num_pages + np.arange(len(ids))  # behind those of earlier requests
            turns[-1] = turns[-1].with_request(num_tokens, len(ids))
        all_ids = torch.cat([ids.to(torch.int32) for ids in page_ids]).to(device)
        return cls(all_ids, torch.from_numpy(page_table).to(device), turns)

    @classmethod
    def padding(
        cls, num_requests: int, max_pages: int, num_tokens: int, most_pages: int, device: torch.device
    ) -> ContextPages:
        """Return one turn of padding with ``num_tokens`` new tokens, to be filled by ``fill``."""
        return cls(
            torch.full((most_pages,), -1, dtype=torch.int32, device=device),
            torch.zeros((num_requests, max_pages), dtype=torch.int32, device=device),
            [Turn(slice(0, num_tokens), slice(0, most_pages))],
        )

    def fits(self, others: ContextPages) -> bool:
        """Return whether ``fill`` can take ``others``: one turn of no more pages than are here."""
        return len(others.turns) == 1 and len(others.page_ids) <= len(self.page_ids)

    def fill(self, others: ContextPages) -> None:
        """Copy ``others``, which must fit, into this object's tensors. The rest of ``page_ids`` becomes
        padding; the rest of ``page_table`` stays as it was."""
        num_pages = len(others.page_ids)
        self.page_ids[:num_pages] = others.page_ids
        self.page_ids[num_pages:] = -1
        num_requests, max_pages = others.page_table.shape
        self.page_table[:num_requests, :max_pages] = others.page_table
