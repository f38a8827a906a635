"""Forwards of few tokens as CUDA graphs, because the host launches such kernels more slowly than they run.

``PromptRunner`` calls ``capture`` once all kernels are compiled, and tries ``run`` before each forward. A
graph is captured for one number of tokens, over tensors of its own. Before a replay the wanted forward's
tokens are copied into these; the rest is padding, whose rows are stored in the pools' scratch slots.

Where only the tail of a prompt is missing, all tokens are stepped (``first_stepped``). Graphs of their own
leave out the attention that the other tokens of prompts have.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.paged_kv import QUERIES_AT_ONCE, PagedKv, PagedRows
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.sizing import GRAPH_TOKENS, STEPPED_GRAPH_TOKENS

MOST_REQUESTS: Final = 8
"""Most requests in a graph's forward."""

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
        self, model: DsaModel, memory: PrefillMemory, page_size: int, kernels: AttentionKernels
    ) -> None:
        self._model, self._memory, self._page_size, self._kernels = model, memory, page_size, kernels
        self._captured: dict[bool, dict[int, _Captured]] = {False: {}, True: {}}
        """Graphs by whether all their tokens are stepped, and by number of tokens, smallest first."""

    @torch.inference_mode()
    def capture(self, most_tokens: int) -> None:
        """Capture graphs for forwards of up to ``most_tokens``. All kernels must have been compiled."""
        started = time.monotonic()
        stream = torch.cuda.Stream()
        captured: dict[bool, dict[int, _Captured]] = {False: {}, True: {}}
        pool = None  # CUDA memory that all graphs share, so the largest one comes first
        wanted = [(False, size) for size in GRAPH_TOKENS]
        if self._kernels.has_own_step_attention:
            wanted += [(True, size) for size in STEPPED_GRAPH_TOKENS]
        for is_stepped, size in wanted:
            if size > most_tokens:
                continue
            token_ids, kv = self._padding(size, is_stepped=is_stepped)
            stream.wait_stream(torch.cuda.current_stream())  # the current stream makes the padding
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                self._forward(token_ids, kv)  # allocates and compiles what these shapes need
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                hidden = self._forward(token_ids, kv)
            pool = graph.pool()
            captured[is_stepped][size] = _Captured(graph, token_ids, kv, hidden)
        self._captured = {kind: dict(sorted(graphs.items())) for kind, graphs in captured.items()}
        sizes = [list(graphs) for graphs in self._captured.values()]
        secs = time.monotonic() - started
        log.info("captured CUDA graphs of %s tokens, and of %s stepped ones, in %.1f s", *sizes, secs)

    @torch.inference_mode()
    def run(self, token_ids: Tensor, kv: PagedKv) -> Tensor | None:
        """Return the hidden states, [num_tokens, hidden_size], which are valid until the next call, and write
        the hints to ``kv``. Return None when there are too many tokens, stepped tokens, requests or pages for
        any graph.

        A graph does not call the layer hook of ``kv``; the caller must call it for every layer.
        """
        num_tokens, num_requests, num_stepped = len(token_ids), len(kv.last_rows), kv.rows.num_stepped
        if num_requests > MOST_REQUESTS or num_stepped > QUERIES_AT_ONCE:
            return None
        if kv.contexts is not None and len(kv.contexts.groups) > 1:  # pages are unpacked in several passes
            return None
        if (captured := self._smallest_fitting(num_tokens, num_stepped)) is None:
            return None
        captured.token_ids[:num_tokens] = token_ids
        captured.kv.fill(kv, self._memory.scratch_slot)
        captured.graph.replay()
        kv.hints.copy_(captured.kv.hints[:num_requests])
        return captured.hidden[:num_tokens]

    def _smallest_fitting(self, num_tokens: int, num_stepped: int) -> _Captured | None:
        """Return the smallest graph for these tokens, one of stepped tokens alone if there is one."""
        if num_stepped == num_tokens:
            for size, captured in self._captured[True].items():
                if size >= num_tokens:
                    return captured
        # A graph of both kinds of tokens has a stepped row, which is padding if no token is stepped.
        num_rows = num_tokens + (num_stepped == 0)
        for size, captured in self._captured[False].items():
            if size >= num_rows:
                return captured
        return None

    def _forward(self, token_ids: Tensor, kv: PagedKv) -> Tensor:
        return self._model.forward_with_hidden(token_ids, kv.positions, kv, kv.last_rows[:0])[1]

    def _padding(self, size: int, *, is_stepped: bool = False) -> tuple[Tensor, PagedKv]:
        memory, spec = self._memory, self._model.spec
        max_pages = -(-spec.context_length // self._page_size)
        rows = PagedRows.padding(
            MOST_REQUESTS,
            max_pages,
            size,
            memory.scratch_slot,
            self._model.device,
            spec.context_length,
            is_stepped=is_stepped,
        )
        pools = memory.kv, memory.index, self._page_size
        kv = PagedKv(spec, *pools, rows, None, self._kernels, memory.row_checks)
        return torch.zeros(size, dtype=torch.int64, device=self._model.device), kv
