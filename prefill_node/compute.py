"""One forward over chunks of several prompts: batch in, first tokens and scores out. Keeps no state between
forwards.

The model's MTP layer, when the node runs it, comes last: the row of a prompt's last token needs the first one
that was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import SamplingParams, TokenLogprob
from hisparse_pd.core.grammar.matcher import ALL_ALLOWED
from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.prompt_scores import ScoredRows, score_rows
from hisparse_pd.core.model.sampling import sample
from hisparse_pd.core.model.token_counts import CountedRows, TokenCounts
from hisparse_pd.engine.messages import Generate, PromptScores, WantedScores, score_dtype
from hisparse_pd.kernels.bit_masks import allowed_logits
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.rooms import RoomRecord, RoomState
from hisparse_pd.prefill_node.scheduler import Chunk
from hisparse_pd.prefill_node.short_forwards import ShortForwards
from hisparse_pd.protocol.messages import Room
from hisparse_pd.transfer.sender import Ready

_SCRATCH_BYTES = 512 << 20
"""Logits of the indexer on a GPU that a forward holds at a time at most."""

LayerWritten = Callable[[int, Ready | None], None]
"""Called with a layer whose KV and indexer keys are written, and what to wait for before they are read."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What a whole prompt yields. ``hint``: int32 [num_index_groups, index_topk], as the last token chose."""

    token_id: int
    logprob: TokenLogprob | None
    hint: Tensor


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward yields: of the rooms whose prompt is whole now, and of those whose scores are wanted."""

    first_tokens: dict[Room, FirstToken]
    scores: list[PromptScores]


class PromptRunner:
    """Runs chunks through the model and leaves their KV and indexer keys in ``memory``."""

    def __init__(
        self,
        model: DsaModel,
        memory: PrefillMemory,
        page_size: int,
        attention_backend: str = "auto",
        chunk_tokens: int = 1,
        split_slots: int | None = None,
    ) -> None:
        """``chunk_tokens``: in a forward at most. ``split_slots``: of decode steps, see
        ``kernels.attention_backends.choose_backend``. Raises AttentionBackendError."""
        self._model = model
        self._memory = memory
        self._page_size = page_size
        most_rows = max(1, _SCRATCH_BYTES // (4 * model.spec.context_length))
        self.kernels = AttentionKernels.choose(
            model,
            attention_backend,
            scratch_tokens=min(chunk_tokens, most_rows),
            split_slots=split_slots,
        )
        self._short = ShortForwards(model, memory, page_size, self.kernels)

    def run(
        self, batch: Sequence[tuple[RoomRecord, Chunk]], on_written: LayerWritten | None = None
    ) -> Computed:
        """Compute the chunks; their bytes are in memory when this returns. ``on_written`` is called while it
        computes, layer after layer. Raises whatever the model or ``on_written`` raises, out of memory
        included; then the chunks count as not computed."""
        memory, hook = self._memory, layer_hook(on_written, self._model.device)
        pools = memory.kv, memory.index, self._page_size
        requests = [self._paged(record, chunk) for record, chunk in batch]
        kv = PagedKv(self._model.spec, *pools, requests, hook, self.kernels, memory.row_checks)
        token_ids = torch.cat(
            [
                torch.from_numpy(record.token_ids[chunk.start : chunk.stop].astype(np.int64))
                for record, chunk in batch
            ]
        ).to(self._model.device)
        whole = [
            number for number, (record, chunk) in enumerate(batch) if chunk.stop == record.num_prompt_tokens
        ]
        records = [batch[number][0] for number in whole]
        whole_requests = torch.tensor(whole, dtype=torch.int64).to(self._model.device)
        logit_rows = kv.last_rows[whole_requests]
        if (short := self._short.run(token_ids, kv)) is not None:
            logits, hidden = short[0][whole_requests], short[1]
            if hook is not None:
                for layer in range(self._model.spec.num_layers):
                    hook(layer)
        else:
            logits, hidden = self._model.forward_with_hidden(token_ids, kv.positions, kv, logit_rows)
        tokens, logprobs = sample(
            logits,
            [record.sampling for record in records],
            [0] * len(records),
            self._model.spec.eos_token_ids,
            counts=_counts(records, logits),
            masks=_first_masks(records, self._model.spec.vocab_size, logits.device),
        )
        scores = self._score(hidden, _scored_rows(batch))
        if self._model.spec.num_draft_layers:
            next_ids = _next_tokens(batch, tokens).to(self._model.device)
            self._model.draft(next_ids, hidden, kv.positions, kv, logit_rows[:0])
        self._wait()
        return Computed(
            {
                record.room: FirstToken(token_id, logprob, kv.hints[number])
                for number, record, token_id, logprob in zip(whole, records, tokens, logprobs, strict=True)
            },
            scores,
        )

    def warm_up(self, most_tokens: int, on_size: Callable[[int], None] = lambda size: None) -> None:
        """Run forwards of many sizes up to ``most_tokens``, before anything is in ``memory``: kernels are
        compiled on their first launch, for tens of seconds. Other ranks run their own meanwhile. ``on_size``
        is called before the two of each size, one with resumed tokens."""
        ranks, device, vocab_size = self._model.ranks, self._model.device, self._model.spec.vocab_size
        powers = [1 << exponent for exponent in range(most_tokens.bit_length())]
        sizes = {most_tokens, *powers, *(power + 1 for power in powers)}
        with nullcontext() if ranks is None else ranks.rehearsal():
            for size in sorted(size for size in sizes if size <= most_tokens):
                on_size(size)
                self._model.expect_tokens(size)
                for num_resumed in (0, size - 1):
                    record = self._warm_up_record(size, num_resumed)
                    self.run([(record, Chunk(Room(0), 0, size, admits=True))])
            allowed_logits(
                torch.zeros((1, vocab_size), device=device),
                torch.full((1, -(-vocab_size // 32)), ALL_ALLOWED, dtype=torch.int32, device=device),
            )
        self._model.expect_tokens(0)
        if ranks is None and device.type == "cuda":
            self._short.capture(most_tokens)

    def _warm_up_record(self, num_tokens: int, num_resumed: int) -> RoomRecord:
        """A prompt of zeros in the first pages, with logprobs of its own tokens and a drawn first one."""
        sampling = SamplingParams(max_new_tokens=1, seed=0, num_logprobs=1, num_resumed_tokens=num_resumed)
        scores = WantedScores(1, 1) if num_tokens > 1 else None
        request = Generate("warm-up", 0, num_tokens, sampling, "", 0, scores=scores)
        record = RoomRecord(Room(0), RoomState.COMPUTING, 0.0, request)
        record.token_ids = np.zeros(num_tokens, np.int32)
        record.page_ids = list(range(-(-num_tokens // self._page_size)))
        return record

    def _score(self, hidden: Tensor, scored: Sequence[_Scored]) -> list[PromptScores]:
        """All rows together: the LM head is read once a slice, however short the prompts are."""
        if not scored:
            return []
        device = hidden.device
        rows = torch.cat([torch.arange(part.start, part.stop) for part in scored]).to(device)
        behind = torch.from_numpy(np.concatenate([part.token_ids for part in scored])).to(device)
        num_top = max(part.num_top for part in scored)
        vocab_size = self._model.spec.vocab_size
        return _packed(score_rows(self._model.logits, hidden[rows], behind, num_top, vocab_size), scored)

    def run_of_others(self) -> None:
        """A forward that other ranks of the node make, with no token of this one."""
        self._model.forward_of_others()
        self._model.draft_of_others()
        self._wait()

    def _wait(self) -> None:
        """Until the device is done."""
        if self._model.device.type == "cuda":
            with self._model.ranks.bounded_wait() if self._model.ranks else nullcontext():
                torch.cuda.synchronize(self._model.device)

    def _paged(self, record: RoomRecord, chunk: Chunk) -> PagedRequest:
        page_ids = torch.tensor(record.page_ids, dtype=torch.int64, device=self._memory.kv.device)
        num_resumed = max(0, chunk.stop - max(chunk.start, record.first_resumed))
        return PagedRequest(page_ids, chunk.start, chunk.stop - chunk.start, num_resumed)


@dataclass(frozen=True, slots=True)
class _Scored:
    """Rows [start, stop) of a forward, whose next tokens' logprobs are wanted: int64 ``token_ids``."""

    request_id: str
    num_top: int
    start: int
    stop: int
    token_ids: npt.NDArray[np.int64]


def _scored_rows(batch: Sequence[tuple[RoomRecord, Chunk]]) -> list[_Scored]:
    """The row of a position says how likely the token behind it is; that of the prompt's last is drawn."""
    scored = []
    first_row = 0
    for record, chunk in batch:
        request = record.request
        if request is not None and request.scores is not None:
            start = max(chunk.start, request.scores.first - 1)
            stop = min(chunk.stop, record.num_prompt_tokens - 1)
            if start < stop:
                offset = first_row - chunk.start
                behind = record.token_ids[start + 1 : stop + 1].astype(np.int64)
                num_top = request.scores.num_top
                scored.append(_Scored(request.request_id, num_top, offset + start, offset + stop, behind))
        first_row += chunk.stop - chunk.start
    return scored


def _packed(rows: ScoredRows, scored: Sequence[_Scored]) -> list[PromptScores]:
    """One a room, of ``rows``, which has those of all in order and as many of the best as any wants."""
    messages = []
    start = 0
    for part in scored:
        stop = start + part.stop - part.start
        num_top = min(part.num_top, rows.top_ids.shape[1])
        packed = np.empty(stop - start, score_dtype(num_top))
        packed["logprob"] = rows.logprobs[start:stop].numpy()
        packed["rank"] = rows.ranks[start:stop].numpy()
        packed["top_ids"] = rows.top_ids[start:stop, :num_top].numpy()
        packed["top_logprobs"] = rows.top_logprobs[start:stop, :num_top].numpy()
        messages.append(PromptScores(part.request_id, num_top, packed.tobytes()))
        start = stop
    return messages


def _next_tokens(batch: Sequence[tuple[RoomRecord, Chunk]], first_tokens: Sequence[int]) -> Tensor:
    """int64 [num_tokens]: the token behind each of the chunks'. Of a whole prompt's last that is the first
    that was drawn, in the order of the whole prompts."""
    drawn = iter(first_tokens)
    parts = []
    for record, chunk in batch:
        behind = record.token_ids[chunk.start + 1 : chunk.stop + 1].astype(np.int64)
        if chunk.stop == record.num_prompt_tokens:
            behind = np.append(behind, next(drawn))
        parts.append(torch.from_numpy(behind))
    return torch.cat(parts)


def _first_masks(records: Sequence[RoomRecord], vocab_size: int, device: torch.device) -> Tensor | None:
    """int32 [num_records, num_words]: what may come first, as of ``sample``; None where anything may."""
    if all(record.grammar is None for record in records):
        return None
    masks = np.full((len(records), -(-vocab_size // 32)), ALL_ALLOWED, dtype=np.int32)
    for mask, record in zip(masks, records, strict=True):
        if record.grammar is not None:
            mask[:] = record.grammar.result().first_mask(ignore_eos=record.sampling.ignore_eos)
    return torch.from_numpy(masks).to(device)


def layer_hook(on_written: LayerWritten | None, device: torch.device) -> Callable[[int], None] | None:
    """What the KV access is to call with each layer that it wrote: on a GPU with an event to wait for."""
    if on_written is None:
        return None
    if device.type == "cpu":
        return lambda layer: on_written(layer, None)

    def written(layer: int) -> None:
        # A sender's thread waits for it and is not to spin.
        stored = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        stored.record()
        on_written(layer, stored)

    return written


def _counts(whole: Sequence[RoomRecord], logits: Tensor) -> CountedRows | None:
    """Counts of the prompts' tokens, for those first tokens that depend on more than logits [num_whole,
    vocab]; None where none does."""
    changing = [record for record in whole if record.sampling.changes_logits]
    if not changing:
        return None
    table = TokenCounts.create(len(changing), logits.shape[1], logits.device)
    row_of = {record.room: row for row, record in enumerate(changing)}
    for record in changing:
        table.start(row_of[record.room], record.sampling, record.token_ids)
    return CountedRows(table, [row_of.get(record.room, 0) for record in whole])
