"""KV access of a forward that extends several requests over one paged pool: the prefill node's side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from hisparse_pd.model.attention_kernels import AttentionKernels
from hisparse_pd.model.spec import ModelSpec
from kernels.paged_indexer import paged_index_topk
from kernels.row_check import store_row_checks


@dataclass(frozen=True)
class PagedRequest:
    """One request's part of a forward: positions [prefix_len, prefix_len + num_new_tokens) are new."""

    page_ids: Tensor
    """Integer [>= pages of the whole length], in position order."""
    prefix_len: int
    num_new_tokens: int
    want_hint: bool = False
    """Keep the last new token's selection of every index group."""

    @property
    def seq_len(self) -> int:
        return self.prefix_len + self.num_new_tokens


class PagedKv:
    """The ``KvAccess`` of one forward over ``requests``, whose new tokens are concatenated in order.

    ``device_pool``: uint8 [num_kv_layers, num_slots, item_bytes]; ``index_pool``: uint8 [num_index_groups,
    num_slots, index_item_bytes]; new rows of both are written, and of ``row_checks``, int32 [num_kv_layers,
    num_slots], if there are any. After the forward ``hints[i]`` is int32
    [num_index_groups, index_topk], the hint of ``requests[i]``, or None when it was not wanted.

    ``on_written(layer)`` is called in the forward, layer after layer, once what it has in both pools is
    written: on the CPU the bytes are there, on a GPU the kernels that store them are in the current stream.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device_pool: Tensor,
        index_pool: Tensor,
        page_size: int,
        requests: Sequence[PagedRequest],
        on_written: Callable[[int], None] | None = None,
        kernels: AttentionKernels | None = None,
        row_checks: Tensor | None = None,
    ) -> None:
        for number, request in enumerate(requests):
            if request.num_new_tokens < 1 or request.prefix_len < 0:
                raise ValueError(
                    f"request {number}: prefix_len {request.prefix_len} and num_new_tokens "
                    f"{request.num_new_tokens}; expected at least 0 and 1"
                )
            if request.seq_len > request.page_ids.shape[0] * page_size:
                raise ValueError(
                    f"request {number}: {request.seq_len} tokens do not fit in {request.page_ids.shape[0]} "
                    f"pages of {page_size}"
                )
        self._spec = spec
        self._kernels = kernels or AttentionKernels.reference(spec)
        self._device_pool = device_pool
        self._index_pool = index_pool
        self._row_checks = row_checks
        self._page_size = page_size
        self._on_written = on_written
        device = device_pool.device
        max_pages = max((request.page_ids.shape[0] for request in requests), default=1)
        self._page_table = torch.zeros((len(requests), max_pages), dtype=torch.int32, device=device)
        for number, request in enumerate(requests):
            self._page_table[number, : request.page_ids.shape[0]] = request.page_ids
        lengths = torch.tensor([request.num_new_tokens for request in requests], device=device)
        self._request_of_token = torch.repeat_interleave(lengths)
        self.positions = torch.cat(
            [torch.arange(request.prefix_len, request.seq_len, device=device) for request in requests]
        )
        """int64 [num_tokens]: the positions that the forward needs."""
        self._num_tokens = torch.tensor(
            [sum(request.num_new_tokens for request in requests)], dtype=torch.int32, device=device
        )
        self._last_row_of = [total - 1 for total in accumulate(r.num_new_tokens for r in requests)]
        self.last_rows = lengths.cumsum(0) - 1
        """int64 [num_requests]: each request's last new token among the forward's tokens."""
        self._new_slots = self._slots(self.positions[:, None])[:, 0]
        self._resolved: tuple[Tensor, Tensor] | None = None
        self.hints: list[Tensor | None] = [
            torch.full((spec.num_index_groups, spec.index_topk), -1, dtype=torch.int32, device=device)
            if request.want_hint
            else None
            for request in requests
        ]

    def write(self, layer: int, kv: Tensor | None, index_keys: Tensor | None) -> None:
        slots, pool = self._new_slots, self._device_pool
        if kv is not None:
            kv_layer = self._spec.kv_layer_of_layer[layer]
            self._kernels.kv_format.store(pool[kv_layer], slots, kv)
            if self._row_checks is not None:
                layers = range(kv_layer, kv_layer + 1)
                store_row_checks(self._row_checks, slots, pool, slots, self.positions, layers)
        if index_keys is not None:
            group = self._spec.index_group_of_layer[layer]
            self._kernels.index_format.store(self._index_pool[group], slots, index_keys)
        if self._on_written is not None:
            self._on_written(layer)

    def select(self, group: int, q_index: Tensor, weights: Tensor) -> Tensor:
        selected = paged_index_topk(
            q_index,
            weights,
            self._index_pool[group],
            self._page_table,
            self._request_of_token,
            self.positions,
            self._num_tokens,
            page_size=self._page_size,
            top_k=self._spec.index_topk,
            key_format=self._kernels.index_format.name,
            scratch=self._kernels.indexer_scratch,
        )
        for number, hint in enumerate(self.hints):
            if hint is not None:
                hint[group] = selected[self._last_row_of[number]]
        return selected

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        # Shared-index layers attend to the very tensor of their group's first layer.
        if self._resolved is None or self._resolved[0] is not positions:
            self._resolved = (positions, self._slots(positions).int())
        items = self._device_pool[self._spec.kv_layer_of_layer[layer]]
        return self._kernels.attention.attend(q, items, self._resolved[1], scale)

    def _slots(self, positions: Tensor) -> Tensor:
        """Device slots, int64 [num_tokens, n], of ``positions`` of each token's request; -1 where -1."""
        known = positions.clamp(min=0).long()
        page_ids = self._page_table[self._request_of_token[:, None], known // self._page_size].long()
        return (page_ids * self._page_size + known % self._page_size).masked_fill_(positions < 0, -1)
