"""One prompt with its KV, as a prefill node has it, for benchmarks of decode steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.pools import round_up
from hisparse_pd.kernels.row_check import row_checks_of
from hisparse_pd.prefill_node.compute import PromptRunner
from hisparse_pd.prefill_node.memory import PrefillMemory

PAGE_SIZE = 64


@dataclass(frozen=True)
class Prefilled:
    """The KV of one prompt of ``context`` tokens, as a prefill node has it; on the device unless said
    otherwise."""

    kv: Tensor
    """KV: uint8 [num_kv_layers, context, item_bytes]."""
    kv_host: Tensor
    """A copy of ``kv`` in main memory."""
    index: Tensor
    """Indexer keys: uint8 [num_index_groups, context, index_item_bytes]."""
    row_checks: Tensor | None
    """Row checks: int32 [num_kv_layers, context]; None where rows are not verified."""
    hints: Tensor
    """The hint, in main memory: the positions that the last token selected, int32 [num_index_groups,
    index_topk]."""
    hints_at: Mapping[int, Tensor]
    """Hints of this prompt and of shorter ones with which it begins, by their number of tokens."""
    tokens_a_second: float
    """Rate at which the prompt was computed."""

    def up_to(self, context: int) -> Prefilled:
        """Return the prompt's first ``context`` tokens, one of the ``cuts`` of ``prefill`` or all of them."""
        return self._with_rows(lambda rows: rows[:, :context], hints=self.hints_at[context])

    def repeated(self, num_times: int) -> Prefilled:
        """Return a prompt that repeats this one's tokens, with this one's hint."""
        cuts = range(self.kv.shape[1], num_times * self.kv.shape[1] + 1, self.kv.shape[1])
        hints_at = {**self.hints_at, **dict.fromkeys(cuts, self.hints)}
        whole = self._with_rows(lambda rows: torch.cat([rows] * num_times, dim=1), hints_at=hints_at)
        if self.row_checks is None:
            return whole
        positions = torch.arange(whole.kv.shape[1], device=whole.kv.device)
        return replace(whole, row_checks=row_checks_of(whole.kv, positions, positions))

    def _with_rows(self, change: Callable[[Tensor], Tensor], **others: Any) -> Prefilled:
        rows = {name: getattr(self, name) for name in ("kv", "kv_host", "index", "row_checks")}
        changed: dict[str, Any] = {
            name: change(of_all) for name, of_all in rows.items() if of_all is not None
        }
        return replace(self, **changed, **others)


def prefill(
    spec: ModelSpec,
    model: DsaModel,
    settings: DecodeSettings,
    chunk: int,
    context: int,
    cuts: Collection[int] = (),
) -> Prefilled:
    """Prefill a random prompt chunk by chunk, as the prefill node does.

    It is computed twice, because kernels are compiled in the first pass; the rate is that of the second.
    ``cuts``: further lengths at which the prompt can end (``Prefilled.up_to``), multiples of ``chunk``.
    """
    device = model.device
    memory = PrefillMemory(spec, num_slots=round_up(context, PAGE_SIZE), num_aux_slots=1, device=device)
    kernels = PromptRunner(
        model, memory, PAGE_SIZE, settings.attention_backend, chunk, settings.attention_split_tile_size
    ).kernels
    tokens = random_tokens(spec, context)
    pages = torch.arange(round_up(context, PAGE_SIZE) // PAGE_SIZE, device=device)
    hints: dict[int, Tensor] = {}
    secs = 0.0
    for _ in range(2):  # the first pass compiles
        synchronize(device)
        started = time.perf_counter()
        for start in range(0, context, chunk):
            stop = min(start + chunk, context)
            request = PagedRequest(pages, start, stop - start)
            kv = PagedKv(
                spec,
                memory.kv,
                memory.index,
                PAGE_SIZE,
                [request],
                kernels=kernels,
                row_checks=memory.row_checks,
            )
            inputs = tokens[start:stop].to(device), kv.positions, kv, kv.last_rows
            if spec.num_draft_layers:
                _, hidden = model.forward_with_hidden(*inputs)
                following = tokens.roll(-1)[start:stop].to(device)
                model.draft(following, hidden, kv.positions, kv, kv.last_rows)
            else:
                model.forward(*inputs)
            if stop in (*cuts, context):
                hints[stop] = kv.hints[0].cpu()
        synchronize(device)
        secs = time.perf_counter() - started
    kv_all = memory.kv[:, :context]
    return Prefilled(
        kv=kv_all,
        kv_host=kv_all.cpu(),
        index=memory.index[:, :context],
        row_checks=None if memory.row_checks is None else memory.row_checks[:, :context],
        hints=hints[context],
        hints_at=hints,
        tokens_a_second=context / secs,
    )


def random_tokens(spec: ModelSpec, num_tokens: int) -> Tensor:
    """Return random tokens, int64 [num_tokens], from the middle of the vocabulary, without special tokens."""
    quarter = spec.vocab_size // 4
    return torch.randint(quarter, 3 * quarter, (num_tokens,), generator=torch.Generator().manual_seed(1))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
