"""The prefill node's view of its pools in one forward, which extends several requests.

``prefill_node/compute.py`` makes a ``PagedKv`` for each forward and passes it to the model (``dsa.py``),
which calls ``write``, ``select`` and ``attend`` in each layer (``KvAccess``). ``PagedRows`` has the forward's
requests and tokens as tensors; for CUDA graphs they stay in place and are filled anew.

A request's last new tokens may be stepped: their attention is split as in a decode node's steps, which may
compute the same tokens and must give the same bits.

Some kernels for prompts are faster over whole contexts in adjacent rows: for them, each layer first unpacks
the requests' pages (``unpacked.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.layer_arrivals import LayerArrivals
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.model.unpacked import ContextPages
from hisparse_pd.kernels.paged_indexer import paged_index_topk
from hisparse_pd.kernels.row_check import store_row_checks
from hisparse_pd.kernels.step_rows import slots_of

QUERIES_AT_ONCE: Final = 128
"""Most stepped tokens in one call of attention. Steps' attention divides the selected positions of each query
into splits, and takes memory for the result of each split."""


@dataclass(frozen=True)
class PagedRequest:
    """One request's part of a forward: positions [prefix_len, prefix_len + num_new_tokens) are new."""

    page_ids: Tensor
    """The request's pages in position order, at least as many as its whole length needs; on the host, or it
    is copied there."""
    prefix_len: int
    num_new_tokens: int
    num_stepped: int = 0
    """How many of the new tokens, the last ones, are stepped: a decode node may compute their KV, too, in its
    steps (``messages.first_stepped``). Their attention is split as in steps, so that the bits of their KV do
    not depend on the node."""

    @property
    def seq_len(self) -> int:
        return self.prefix_len + self.num_new_tokens


@dataclass(frozen=True)
class PagedRows:
    """The requests of a forward and their new tokens, which are concatenated in order."""

    page_table: Tensor
    """Pages of each request, padded with 0: int32 [num_requests, max_pages]."""
    request_of_token: Tensor
    """Number of each token's request: int64 [num_tokens]."""
    positions: Tensor
    """int64 [num_tokens]"""
    slots: Tensor
    """Token slots at which the tokens' rows are stored: int64 [num_tokens]."""
    num_tokens: Tensor
    """Number of tokens without padding: int32 [1]."""
    last_rows: Tensor
    """Each request's last new token among the forward's tokens: int64 [num_requests]."""
    is_stepped: Tensor
    """Whether each token is stepped (``PagedRequest.num_stepped``): bool [num_tokens], on the host."""
    max_len: int
    """A bound on the requests' lengths."""
    stepped_tokens: Tensor | None = None
    """The rows of the stepped tokens, int64 [most stepped tokens], in rows for a CUDA graph that takes
    stepped tokens beside others: in a tensor, because ``fill`` changes them. The last one is repeated to the
    end, as in [5, 6, 6, 6] for rows 5 and 6; if no token is stepped, all name a row of padding. None in other
    rows, where ``is_stepped`` is enough: those that ``of`` makes, and those for a graph that takes stepped
    tokens alone."""

    @property
    def num_stepped(self) -> int:
        return int(self.is_stepped.sum())

    @classmethod
    def of(cls, requests: Sequence[PagedRequest], page_size: int, device: torch.device) -> PagedRows:
        """Return the rows of ``requests``. Raises ValueError for a request without new tokens, or with more
        than its pages hold."""
        _check(requests, page_size)
        # All is made on the host: on a GPU each of these small operations would be a launch.
        max_pages = max((request.page_ids.shape[0] for request in requests), default=1)
        page_table = torch.zeros((len(requests), max_pages), dtype=torch.int32)
        for number, request in enumerate(requests):
            page_table[number, : request.page_ids.shape[0]] = request.page_ids
        num_tokens = sum(request.num_new_tokens for request in requests)
        lengths = torch.tensor([request.num_new_tokens for request in requests])
        request_of_token = torch.repeat_interleave(lengths, output_size=num_tokens)
        positions = torch.cat([torch.arange(request.prefix_len, request.seq_len) for request in requests])
        slots = slots_of(page_table, page_size, request_of_token, positions[:, None].int())[:, 0]
        return cls(
            page_table=page_table.to(device),
            request_of_token=request_of_token.to(device),
            positions=positions.to(device),
            slots=slots.long().to(device),
            num_tokens=torch.tensor([num_tokens], dtype=torch.int32).to(device),
            last_rows=(lengths.cumsum(0) - 1).to(device),
            is_stepped=torch.cat(
                [
                    torch.arange(request.num_new_tokens) >= request.num_new_tokens - request.num_stepped
                    for request in requests
                ]
            ),
            max_len=max((request.seq_len for request in requests), default=0),
        )

    @classmethod
    def padding(
        cls,
        num_requests: int,
        max_pages: int,
        num_tokens: int,
        num_stepped: int,
        scratch_slot: int,
        device: torch.device,
        max_len: int,
    ) -> PagedRows:
        """Return rows of padding, which are stored at ``scratch_slot``, for ``fill`` to overwrite.

        ``num_stepped``: the most stepped tokens that may fill it; if it is ``num_tokens``, no others may.
        ``max_len``: a bound on the lengths of the requests that it may hold.
        """
        is_stepped = num_stepped == num_tokens
        stepped_tokens = torch.full((num_stepped,), num_tokens - 1, device=device)
        nothing = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        return cls(
            page_table=torch.zeros((num_requests, max_pages), dtype=torch.int32, device=device),
            request_of_token=nothing,
            positions=nothing.clone(),
            slots=nothing + scratch_slot,
            num_tokens=torch.zeros(1, dtype=torch.int32, device=device),
            last_rows=torch.zeros(num_requests, dtype=torch.int64, device=device),
            is_stepped=torch.full((num_tokens,), is_stepped),
            max_len=max_len,
            stepped_tokens=None if is_stepped else stepped_tokens,
        )

    def fill(self, others: PagedRows, scratch_slot: int) -> None:
        """Copy ``others`` into this object's tensors, with padding behind them.

        ``others`` must not have more tokens, requests or pages, nor longer requests. If ``stepped_tokens`` is
        None here, all tokens of ``others`` must be stepped. Otherwise ``others`` may have as many stepped
        tokens as ``stepped_tokens`` has room for; if it has none, it must have fewer tokens than this object,
        so that there is a row of padding to name. ``ShortForwards.run`` chooses a graph accordingly
        (``sizing.GraphSize.takes``).
        """
        if self.stepped_tokens is not None:
            stepped = others.is_stepped.nonzero().flatten()
            filler = stepped[-1] if len(stepped) else len(self.positions) - 1
            filled = torch.full(self.stepped_tokens.shape, int(filler))
            filled[: len(stepped)] = stepped
            self.stepped_tokens.copy_(filled)
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
        self.positions[num_tokens:] = 0  # padding then attends to one position, not to a former prompt
        self.num_tokens.copy_(others.num_tokens)


def _check(requests: Sequence[PagedRequest], page_size: int) -> None:
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


class PagedKv:
    """The ``KvAccess`` of one forward over some requests.

    It writes new rows of ``device_pool``, uint8 [num_kv_layers, num_slots, item_bytes], of ``index_pool``,
    uint8 [num_index_groups, num_slots, index_item_bytes], and of ``row_checks``, int32 [num_kv_layers,
    num_slots], if they are given.

    ``requests``: those of the forward, or, where a CUDA graph is captured, the rows of padding that are
    filled before each replay. ``on_written(layer)`` is called in the forward, layer after layer, once the
    layer's rows in both pools are written: on the CPU the bytes are there, on a GPU the kernels that store
    them are in the current stream.
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
        most_pages: int | None = None,
        arrivals: LayerArrivals | None = None,
    ) -> None:
        """``most_pages``: the most pages that a CUDA graph unpacks; by default as many as the memory for
        unpacked rows holds, and never more. ``arrivals``: what layers wait for before they read the pools,
        if copies into them may be under way."""
        device = device_pool.device
        self.rows = requests if isinstance(requests, PagedRows) else PagedRows.of(requests, page_size, device)
        self._spec = spec
        self._kernels = kernels or AttentionKernels.reference(spec)
        self._device_pool = device_pool
        self._index_pool = index_pool
        self._row_checks = row_checks
        self._page_size = page_size
        self._on_written = on_written
        self._arrivals = arrivals
        self._selected: Tensor | None = None
        """The positions that the layers of the present index group attend to."""
        self._slots: dict[int, Tensor] = {}
        """The slots of ``_selected``, by the id of the page table in which they were looked up."""
        self.contexts: ContextPages | None = None
        """The pages to unpack. If the memory for unpacked rows is too small for all requests, they take
        turns. None where prompts read the pools themselves."""
        if (unpacked := self._kernels.unpacked) is not None:
            most_pages = most_pages or len(unpacked.items) // page_size
            self.contexts = _context_pages(requests, self.rows, page_size, most_pages)
        self._num_columns = (self.rows.positions + 1).clamp_(max=spec.index_topk).int()
        """How many positions each token selects: int32 [num_tokens]."""
        self._stepped_pieces = _stepped_pieces(self.rows) if self._kernels.has_own_step_attention else []
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

    def fits(self, others: PagedKv) -> bool:
        """Return whether this object's CUDA graph unpacks enough pages at once for all of ``others``."""
        return self.contexts is None or others.contexts is None or self.contexts.fits(others.contexts)

    def fill(self, others: PagedKv, scratch_slot: int) -> None:
        """Do ``PagedRows.fill`` and ``ContextPages.fill``, for the next replay of a CUDA graph."""
        self.rows.fill(others.rows, scratch_slot)
        self._num_columns[: len(others.positions)] = others._num_columns
        if self.contexts is not None and others.contexts is not None:
            self.contexts.fill(others.contexts)

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
        if self._arrivals is not None:
            self._arrivals.wait(group, len(self._index_pool))
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
            max_len=self.rows.max_len,
            is_prompt=True,
        )
        torch.index_select(selected, 0, self.rows.last_rows, out=self._hints[group])
        return selected

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        """Do ``KvAccess.attend``: as a prompt, and then again as steps do for the tokens that are stepped."""
        kv_layer = self._spec.kv_layer_of_layer[layer]
        if self._arrivals is not None:
            self._arrivals.wait(kv_layer, len(self._device_pool))
        items = self._device_pool[kv_layer]
        if self._stepped_pieces and self.rows.is_stepped.all():  # steps' attention fills all of ``out``
            out = q.new_empty((*q.shape[:2], self._spec.kv_lora_rank))
        else:
            out = self._attend_as_prompt(items, q, positions, scale)
        for tokens in self._stepped_pieces:
            slots = self._slots_in(self.rows.page_table, positions)[tokens]
            out[tokens] = self._kernels.step_attention.attend(q[tokens], items, slots, scale)
        return out

    def _attend_as_prompt(self, items: Tensor, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        """Return the attention of all new tokens as a prompt has it, stepped ones included."""
        attention, contexts, unpacked = self._kernels.attention, self.contexts, self._kernels.unpacked
        if contexts is None or unpacked is None:
            return attention.attend(q, items, self._slots_in(self.rows.page_table, positions), scale)
        slots = self._slots_in(contexts.page_table, positions)
        results = []
        for turn in contexts.turns:
            tokens, page_ids = turn.tokens, contexts.page_ids[turn.pages]
            self._kernels.kv_format.unpack(items, page_ids, self._page_size, unpacked.items)
            pool, num_columns = unpacked.items.view(torch.uint8), self._num_columns[tokens]
            results.append(attention.attend(q[tokens], pool, slots[tokens], scale, num_columns))
        return results[0] if len(results) == 1 else torch.cat(results)

    def _slots_in(self, page_table: Tensor, positions: Tensor) -> Tensor:
        """Return the slots of ``positions`` by ``page_table``, int32 [num_tokens, index_topk]."""
        # All layers of an index group get the same tensor, so its identity shows a new selection.
        if self._selected is not positions:
            self._selected = positions
            self._slots.clear()
        if (slots := self._slots.get(id(page_table))) is None:
            slots = slots_of(page_table, self._page_size, self.rows.request_of_token, positions)
            self._slots[id(page_table)] = slots
        return slots


def _context_pages(
    requests: Sequence[PagedRequest] | PagedRows, rows: PagedRows, page_size: int, most_pages: int
) -> ContextPages:
    """Return the pages that the forward unpacks; for PagedRows, padding to be filled before each replay."""
    num_requests, max_pages = rows.page_table.shape
    device = rows.page_table.device
    if isinstance(requests, PagedRows):
        return ContextPages.padding(num_requests, max_pages, len(rows.positions), most_pages, device)
    page_ids = [request.page_ids[: -(-request.seq_len // page_size)] for request in requests]
    num_new_tokens = [request.num_new_tokens for request in requests]
    return ContextPages.of(page_ids, num_new_tokens, max_pages, most_pages, device)


def _stepped_pieces(rows: PagedRows) -> list[Tensor | slice]:
    """Return the stepped tokens of a forward in pieces of up to QUERIES_AT_ONCE: as a slice, which takes no
    copy of the queries, where they are next to each other."""
    if rows.stepped_tokens is not None:  # the pieces are views, which ``fill`` changes before each replay
        return list(rows.stepped_tokens.split(QUERIES_AT_ONCE))
    tokens = rows.is_stepped.nonzero().flatten()
    pieces: list[Tensor | slice] = []
    for piece in tokens.split(QUERIES_AT_ONCE) if len(tokens) else ():
        first, last = int(piece[0]), int(piece[-1])
        is_run = last - first == len(piece) - 1
        pieces.append(slice(first, last + 1) if is_run else piece.to(rows.positions.device))
    return pieces
