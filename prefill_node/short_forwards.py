"""Forwards of few tokens as CUDA graphs, because the host launches such kernels more slowly than they run.

``PromptRunner`` calls ``capture`` once all kernels are compiled, and tries ``run`` before each forward. A
graph is captured for one number of tokens, over tensors of its own. Before a replay the wanted forward's
tokens are copied into these; the rest is padding, whose rows are stored in the pools' scratch slots.

A graph attends to a fixed number of stepped tokens (those from a prompt's ``first_stepped`` on) as decode
steps do. One in which all are stepped leaves out the attention that the other tokens of prompts have.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.layer_arrivals import LayerArrivals
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRows
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.sizing import GRAPH_SIZES, MOST_GRAPH_REQUESTS, ONE_CONTEXT_TOKENS, GraphSize

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Captured:
    """A graph, its inputs ``token_ids`` and ``kv``, and its output ``hidden``."""

    graph: torch.cuda.CUDAGraph
    token_ids: Tensor
    kv: PagedKv
    hidden: Tensor


class ShortForwards:
    """Computes the hidden states of ``DsaModel.forward_with_hidden`` for forwards that fit into a graph.
    There are no graphs before ``capture``."""

    def __init__(
        self,
        model: DsaModel,
        memory: PrefillMemory,
        page_size: int,
        kernels: AttentionKernels,
        arrivals: LayerArrivals | None = None,
    ) -> None:
        """``arrivals``: see ``PagedKv``."""
        self._model, self._memory, self._page_size, self._kernels = model, memory, page_size, kernels
        self._arrivals = arrivals
        self._captured: dict[GraphSize, _Captured] = {}
        """The graphs, smallest first."""

    @torch.inference_mode()
    def capture(self, most_tokens: int) -> None:
        """Capture graphs for forwards of up to ``most_tokens``. All kernels must have been compiled."""
        started = time.monotonic()
        stream = torch.cuda.Stream()
        captured: dict[GraphSize, _Captured] = {}
        pool = None  # CUDA memory that all graphs share, so the largest one comes first
        for size in GRAPH_SIZES:
            if size.num_tokens > most_tokens:
                continue
            token_ids, kv = self._padding(size)
            stream.wait_stream(torch.cuda.current_stream())  # the current stream makes the padding
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                self._forward(token_ids, kv)  # allocates and compiles what these shapes need
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                hidden = self._forward(token_ids, kv)
            pool = graph.pool()
            captured[size] = _Captured(graph, token_ids, kv, hidden)
        self._captured = dict(reversed(captured.items()))
        log.info("captured %d CUDA graphs in %.1f s", len(captured), time.monotonic() - started)

    @torch.inference_mode()
    def run(self, token_ids: Tensor, kv: PagedKv) -> Tensor | None:
        """Return the hidden states, [num_tokens, hidden_size], which are valid until the next call, and write
        the hints to ``kv``. Return None when there are too many tokens, stepped tokens, requests or pages for
        any graph.

        A graph does not call the layer hook of ``kv``; the caller must call it for every layer.
        """
        num_tokens, num_requests, num_stepped = len(token_ids), len(kv.last_rows), kv.rows.num_stepped
        if num_requests > MOST_GRAPH_REQUESTS:
            return None
        fitting = (
            captured
            for size, captured in self._captured.items()
            if size.takes(num_tokens, num_stepped) and captured.kv.fits(kv)
        )
        if (captured := next(fitting, None)) is None:
            return None
        captured.token_ids[:num_tokens] = token_ids
        captured.kv.fill(kv, self._memory.scratch_slot)
        captured.graph.replay()
        kv.hints.copy_(captured.kv.hints[:num_requests])
        return captured.hidden[:num_tokens]

    def _forward(self, token_ids: Tensor, kv: PagedKv) -> Tensor:
        """Return the hidden states. No logits are computed, since no rows are named for them."""
        return self._model.forward_with_hidden(token_ids, kv.positions, kv, kv.last_rows[:0])[1]

    def _padding(self, size: GraphSize) -> tuple[Tensor, PagedKv]:
        """Return a graph's inputs, token ids and KV, with nothing but padding in them."""
        memory, spec = self._memory, self._model.spec
        max_pages = -(-spec.context_length // self._page_size)
        rows = PagedRows.padding(
            num_requests=MOST_GRAPH_REQUESTS,
            max_pages=max_pages,
            num_tokens=size.num_tokens,
            num_stepped=size.num_stepped,
            scratch_slot=memory.scratch_slot,
            device=self._model.device,
            max_len=spec.context_length,
        )
        # A graph looks at all pages that it may unpack, even at padding. Small graphs therefore have room for
        # the pages of one context only, and ``run`` takes a larger one for requests with more pages.
        most_pages = max_pages if size.num_tokens <= ONE_CONTEXT_TOKENS else None
        pools = memory.kv, memory.index, self._page_size
        kv = PagedKv(
            spec,
            *pools,
            rows,
            kernels=self._kernels,
            row_checks=memory.row_checks,
            most_pages=most_pages,
            arrivals=self._arrivals,
        )
        return torch.zeros(size.num_tokens, dtype=torch.int64, device=self._model.device), kv
