"""The prefill node's view of its pools in one forward, which extends several requests.

``prefill_node/compute.py`` makes a ``PagedKv`` for each forward and passes it to the model (``dsa.py``),
which calls ``write``, ``select`` and ``attend`` in each layer (``KvAccess``). ``PagedRows`` has the forward's
requests and tokens as tensors; for CUDA graphs they stay in place and are filled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.kernels.attention import AttentionBackend
from hisparse_pd.kernels.paged_indexer import paged_index_topk
from hisparse_pd.kernels.row_check import store_row_checks
from hisparse_pd.kernels.step_rows import slots_of

QUERIES_AT_ONCE: Final = 128
"""Most queries of one call of attention in a forward with resumed tokens. Their attention is split, and each
split of a query takes memory for its result."""


@dataclass(frozen=True)
class PagedRequest:
    """One request's part of a forward: positions [prefix_len, prefix_len + num_new_tokens) are new."""

    page_ids: Tensor
    """The request's pages in position order, at least as many as its whole length needs."""
    prefix_len: int
    num_new_tokens: int
    num_resumed: int = 0
    """How many of the new tokens, the last ones, were computed before by steps of a decode node. Their
    attention is split as in those steps, so that their rows have the same bits."""

    @property
    def seq_len(self) -> int:
        return self.prefix_len + self.num_new_tokens


@dataclass(frozen=True)
class PagedRows:
    """The requests of a forward and their new tokens, which are concatenated in order."""

    page_table: Tensor
    """Pages of each request, padded with 0: int32 [num_requests, max_pages]."""
    request_of_token: Tensor
    """Number of each token's request: int64 [num_tokens], as are ``positions`` and ``slots``, the token slots
    at which rows are stored."""
    positions: Tensor
    slots: Tensor
    num_tokens: Tensor
    """Number of tokens without padding: int32 [1]."""
    last_rows: Tensor
    """Each request's last new token among the forward's tokens: int64 [num_requests]."""
    is_resumed: Tensor
    """Whether each token is resumed (``PagedRequest.num_resumed``): bool [num_tokens], on the host."""

    @property
    def has_resumed(self) -> bool:
        return bool(self.is_resumed.any())

    @classmethod
    def of(cls, requests: Sequence[PagedRequest], page_size: int, device: torch.device) -> PagedRows:
        """Return the rows of ``requests``. Raises ValueError for a request without new tokens, or with more
        than its pages hold."""
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
        max_pages = max((request.page_ids.shape[0] for request in requests), default=1)
        page_table = torch.zeros((len(requests), max_pages), dtype=torch.int32, device=device)
        for number, request in enumerate(requests):
            page_table[number, : request.page_ids.shape[0]] = request.page_ids
        num_tokens = sum(request.num_new_tokens for request in requests)
        lengths = torch.tensor([request.num_new_tokens for request in requests], device=device)
        request_of_token = torch.repeat_interleave(lengths, output_size=num_tokens)
        positions = torch.cat(
            [torch.arange(request.prefix_len, request.seq_len, device=device) for request in requests]
        )
        return cls(
            page_table,
            request_of_token,
            positions,
            slots_of(page_table, page_size, request_of_token, positions[:, None].int())[:, 0].long(),
            torch.tensor([num_tokens], dtype=torch.int32, device=device),
            lengths.cumsum(0) - 1,
            torch.cat(
                [
                    torch.arange(request.num_new_tokens) >= request.num_new_tokens - request.num_resumed
                    for request in requests
                ]
            ),
        )

    @classmethod
    def padding(
        cls, num_requests: int, max_pages: int, num_tokens: int, scratch_slot: int, device: torch.device
    ) -> PagedRows:
        """Return rows that are all padding, stored at ``scratch_slot``; ``fill`` puts requests into them."""
        nothing = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        return cls(
            torch.zeros((num_requests, max_pages), dtype=torch.int32, device=device),
            nothing,
            nothing.clone(),
            nothing + scratch_slot,
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(num_requests, dtype=torch.int64, device=device),
            torch.zeros(num_tokens, dtype=torch.bool),
        )

    def fill(self, others: PagedRows, scratch_slot: int) -> None:
        """Copy ``others`` into this object's tensors, with padding behind them.

        ``others`` must not have more tokens, requests or pages, nor resumed tokens.
        """
        num_requests, max_pages = others.page_table.shape
        num_tokens = len(others.positions)
        self.page_table[:num_requests, :max_pages] = others.page_table
        for target, source in (
            (self.request_of_token, others.request_of_token),
            (self.positions, others.positions),
            (self.slots, others.slots),
            (self.last_rows, others.last_rows),
        ):
            target[: len(source)] = source
        self.slots[num_tokens:] = scratch_slot
        self.num_tokens.copy_(others.num_tokens)


class PagedKv:
    """The ``KvAccess`` of one forward over some requests.

    It writes new rows of ``device_pool``, uint8 [num_kv_layers, num_slots, item_bytes], of ``index_pool``,
    uint8 [num_index_groups, num_slots, index_item_bytes], and of ``row_checks``, int32 [num_kv_layers,
    num_slots], if they are given.

    ``on_written(layer)`` is called in the forward, layer after layer, once the layer's rows in both pools are
    written: on the CPU the bytes are there, on a GPU the kernels that store them are in the current stream.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device_pool: Tensor,
        index_pool: Tensor,
        page_size: int,
        requests: Sequence[PagedRequest] | PagedRows,
        on_written: Callable[[int], None] | None = None,
        kernels: AttentionKernels | None = None,
        row_checks: Tensor | None = None,
    ) -> None:
        device = device_pool.device
        self.rows = requests if isinstance(requests, PagedRows) else PagedRows.of(requests, page_size, device)
        self._spec = spec
        self._kernels = kernels or AttentionKernels.reference(spec)
        self._device_pool = device_pool
        self._index_pool = index_pool
        self._row_checks = row_checks
        self._page_size = page_size
        self._on_written = on_written
        self._resolved: tuple[Tensor, Tensor] | None = None
        """The last selected positions and their token slots, which layers that share a selection share."""
        self._pieces = _pieces(self.rows, self._kernels) if self.rows.has_resumed else []
        shape = (spec.num_index_groups, len(self.rows.last_rows), spec.index_topk)
        self._hints = torch.full(shape, -1, dtype=torch.int32, device=device)

    @property
    def positions(self) -> Tensor:
        """The positions of the forward's tokens: int64 [num_tokens]."""
        return self.rows.positions

    @property
    def last_rows(self) -> Tensor:
        """Each request's last new token among the forward's tokens: int64 [num_requests]."""
        return self.rows.last_rows

    @property
    def hints(self) -> Tensor:
        """Return what each request's last new token selected, after the forward: int32 [num_requests,
        num_index_groups, index_topk]."""
        return self._hints.transpose(0, 1)

    def write(self, layer: int, kv: Tensor | None, index_keys: Tensor | None) -> None:
        """Do ``KvAccess.write``: store the new rows, and their row checks."""
        slots, pool = self.rows.slots, self._device_pool
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
        """Do ``KvAccess.select``, and keep what each request's last token selects."""
        selected = paged_index_topk(
            q_index,
            weights,
            self._index_pool[group],
            self.rows.page_table,
            self.rows.request_of_token,
            self.rows.positions,
            self.rows.num_tokens,
            page_size=self._page_size,
            top_k=self._spec.index_topk,
            key_format=self._kernels.index_format.name,
            scratch=self._kernels.indexer_scratch,
        )
        torch.index_select(selected, 0, self.rows.last_rows, out=self._hints[group])
        return selected

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        """Do ``KvAccess.attend``."""
        # Layers that share a selection pass the same tensor object.
        if self._resolved is None or self._resolved[0] is not positions:
            rows = self.rows
            slots = slots_of(rows.page_table, self._page_size, rows.request_of_token, positions)
            self._resolved = (positions, slots)
        items = self._device_pool[self._spec.kv_layer_of_layer[layer]]
        slots = self._resolved[1]
        if not self._pieces:
            return self._kernels.attention.attend(q, items, slots, scale)
        out = q.new_empty((*q.shape[:2], self._spec.kv_lora_rank))
        for tokens, attention in self._pieces:
            out[tokens] = attention.attend(q[tokens], items, slots[tokens], scale)
        return out


def _pieces(rows: PagedRows, kernels: AttentionKernels) -> list[tuple[Tensor, AttentionBackend]]:
    """Cut a forward's tokens into pieces, int64 [up to QUERIES_AT_ONCE] each, with each piece's attention."""
    pieces = []
    backends = (~rows.is_resumed, kernels.attention), (rows.is_resumed, kernels.step_attention)
    for is_computed_by, attention in backends:
        tokens = is_computed_by.nonzero().flatten().to(rows.positions.device)
        for start in range(0, len(tokens), QUERIES_AT_ONCE):
            pieces.append((tokens[start : start + QUERIES_AT_ONCE], attention))
    return pieces
