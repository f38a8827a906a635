"""One forward over chunks of several prompts: it takes a batch, returns hints and scores, and keeps no state.

``PromptSteps`` calls ``PromptRunner.run`` with the chunks that the scheduler planned. A run is the layers (as
a CUDA graph if the tokens are few), the scores that rooms want, and the model's MTP layer if the node runs
it. No token is drawn here, so only wanted scores need logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.layer_arrivals import LayerArrivals
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.prompt_scores import ScoredRows, score_rows
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.prefill_node.scheduler import Chunk
from hisparse_pd.prefill_node.short_forwards import ShortForwards
from hisparse_pd.protocol.messages import Bootstrap, Room, RoomScores
from hisparse_pd.protocol.prompt_scores import MAX_ROWS_BYTES, WantedScores, score_dtype
from hisparse_pd.transfer.sender import Ready

_SCRATCH_BYTES = 512 << 20
"""Most bytes of indexer logits that a forward on a GPU holds at a time."""
_LOGIT_BYTES = 4

Batch = Sequence[tuple[PrefillRequest, Chunk]]
"""The chunks of a forward, each with its request."""

LayerWritten = Callable[[int, Ready | None], None]
"""A function that is called with a layer once this and all before it are written, and with what to wait for
before their bytes are read. Layers that are written together may have one call, with the last of them."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of a forward."""

    hints: dict[Room, Tensor]
    """The hint of each room whose prompt is now computed whole, int32 [num_index_groups, index_topk]: the
    positions that its last computed token selected."""
    scores: dict[Room, list[RoomScores]]
    """Scores of the computed tokens for each room that wants some, in pieces and in order."""


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
        arrivals: LayerArrivals | None = None,
    ) -> None:
        """``chunk_tokens``: most tokens of a forward. ``split_slots``: how decode steps split attention (see
        ``kernels.attention_backends.choose_backend``); the attention of stepped tokens, those from a prompt's
        ``first_stepped`` on, is split alike. ``arrivals``: see ``PagedKv``. Raises AttentionBackendError."""
        self._model = model
        self._memory = memory
        self._page_size = page_size
        self._arrivals = arrivals
        most_rows = max(1, _SCRATCH_BYTES // (_LOGIT_BYTES * model.spec.context_length))
        self.kernels = AttentionKernels.choose(
            model,
            attention_backend,
            scratch_tokens=min(chunk_tokens, most_rows),
            split_slots=split_slots,
            page_size=page_size,
        )
        self.short = ShortForwards(model, memory, page_size, self.kernels, arrivals)
        """The CUDA graphs of forwards of few tokens; there are none before ``warm_up``."""

    def run(
        self,
        batch: Batch,
        on_written: LayerWritten | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Computed:
        """Compute the chunks; their bytes are in memory when this returns. ``on_written`` is called during
        the forward, and ``meanwhile`` when all is launched and the device computes. Raises whatever the model
        or the functions raise, out of memory included; the chunks then count as not computed."""
        memory, hook = self._memory, layer_hook(on_written, self._model.device)
        paged = [self._paged(request, chunk) for request, chunk in batch]
        kv = PagedKv(
            self._model.spec,
            memory.kv,
            memory.index,
            self._page_size,
            paged,
            on_written=hook,
            kernels=self.kernels,
            row_checks=memory.row_checks,
            arrivals=self._arrivals,
        )
        no_logits = kv.last_rows[:0]  # a forward takes the rows whose logits it is to return: none here

        token_ids = _token_ids(batch).to(self._model.device)
        # None: there is no graph for these tokens.
        if (hidden := self.short.run(token_ids, kv)) is not None:
            if hook is not None:  # a graph calls no hook
                hook(self._model.spec.num_layers - 1)
        else:
            _, hidden = self._model.forward_with_hidden(token_ids, kv.positions, kv, no_logits)

        wanted = _wanted_rows(batch)
        rows = self._score(hidden, wanted)
        if self._model.spec.num_draft_layers:
            next_ids = _token_ids(batch, ahead=1).to(self._model.device)
            # Nothing is guessed here: the layer's KV is what the decode node's drafts need.
            self._model.draft(next_ids, hidden, kv.positions, kv, no_logits)

        is_on_gpu = self._model.device.type == "cuda"
        all_hints = torch.empty(kv.hints.shape, dtype=kv.hints.dtype, pin_memory=is_on_gpu)
        all_hints.copy_(kv.hints, non_blocking=True)
        meanwhile()
        self._wait()
        hints = {
            request.room: all_hints[number]
            for number, (request, chunk) in enumerate(batch)
            if chunk.stop == request.num_computed_tokens  # this is the prompt's last chunk
        }
        return Computed(hints, {} if rows is None else _packed(rows, wanted))

    def run_of_others(self) -> None:
        """Take part in a forward that other ranks of the node make, without a token of this rank."""
        self._model.join_forward()
        self._model.join_draft()
        self._wait()

    def warm_up(self, most_tokens: int, on_size: Callable[[int], None] = lambda size: None) -> None:
        """Run forwards of many sizes up to ``most_tokens``: kernels take tens of seconds to compile on their
        first launch. Nothing may be in ``memory`` yet. Each rank rehearses alone, with its own tensors in the
        place of other ranks', and at the end all meet. A GPU without other ranks captures graphs last.
        ``on_size`` is called before the two forwards of each size, one of which has stepped tokens."""
        ranks = self._model.ranks
        # Kernels choose their variants by the size, and most of the limits are powers of two.
        powers = [1 << exponent for exponent in range(most_tokens.bit_length())]
        sizes = {most_tokens, *powers, *(power + 1 for power in powers)}
        with nullcontext() if ranks is None else ranks.rehearsal():
            for size in sorted(size for size in sizes if size <= most_tokens):
                on_size(size)
                self._model.expect_tokens(size)  # the most tokens of any rank; 0 below: no padding
                for num_stepped in (0, size - 1):
                    request = self._warm_up_request(size, num_stepped)
                    self.run([(request, Chunk(Room(0), 0, size, admits=True))])
        self._model.expect_tokens(0)
        if ranks is None and self._model.device.type == "cuda":
            self.short.capture(most_tokens)

    def _warm_up_request(self, num_tokens: int, num_stepped: int) -> PrefillRequest:
        """Return a room in the first pages that wants ``num_tokens`` zeros computed and scored, the last
        ``num_stepped`` of them as in steps."""
        bootstrap = Bootstrap(
            room=0,
            kv_extents=(),
            index_extents=(),
            aux_slot=0,
            prompt=pack_token_ids([0] * (num_tokens + 1)),
            root=b"",
            num_resumed_tokens=num_stepped,
            scores=WantedScores(1, 1),
        )
        # With a peer whose pages have one token, no tokens but the resumed ones are stepped.
        nobody = Peer(node_id="", session="", identity=b"", page_size=1, regions={}, last_heard_secs=0.0)
        pages = list(range(-(-num_tokens // self._page_size)))
        return PrefillRequest(nobody, bootstrap, 0.0, page_ids=pages)

    def _score(self, hidden: Tensor, wanted: Sequence[_WantedRows]) -> ScoredRows | None:
        """Return the scores of all rooms, or None when none are wanted. They are complete once the device is
        done. Rows are scored together, so that the LM head is not read anew for each short prompt."""
        if not wanted:
            return None
        device = hidden.device
        rows = torch.cat([torch.arange(part.start, part.stop) for part in wanted]).to(device)
        next_ids = torch.from_numpy(np.concatenate([part.next_ids for part in wanted])).to(device)
        num_top = max(part.num_top for part in wanted)
        return score_rows(self._model.logits, hidden[rows], next_ids, num_top, self._model.spec.vocab_size)

    def _wait(self) -> None:
        """Wait until the forward is done, but not for copies of other rooms, which other streams make. If
        another rank of the node does not finish its part in time, this process ends."""
        if self._model.device.type == "cuda":
            with self._model.ranks.bounded_wait() if self._model.ranks else nullcontext():
                torch.cuda.current_stream(self._model.device).synchronize()

    def _paged(self, request: PrefillRequest, chunk: Chunk) -> PagedRequest:
        page_ids = torch.tensor(request.page_ids, dtype=torch.int64)
        num_stepped = max(0, chunk.stop - max(chunk.start, request.first_stepped))
        return PagedRequest(page_ids, chunk.start, chunk.stop - chunk.start, num_stepped)


def _token_ids(batch: Batch, ahead: int = 0) -> Tensor:
    """Return the tokens ``ahead`` positions after those of the chunks, int64 [num_tokens]."""
    parts = [request.token_ids[chunk.start + ahead : chunk.stop + ahead] for request, chunk in batch]
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


@dataclass(frozen=True, slots=True)
class _WantedRows:
    """Rows [start, stop) of a forward, whose next tokens' logprobs a room wants."""

    room: Room
    num_top: int
    start: int
    stop: int
    first: int
    """Position of the first of the next tokens."""
    next_ids: npt.NDArray[np.int64]
    """The prompt's token after each row: int64 [stop - start]."""


def _wanted_rows(batch: Batch) -> list[_WantedRows]:
    """Return the rows to score; the row of a position says how likely the token after it is."""
    found = []
    first_row = 0  # the chunk's first row in the forward
    for request, chunk in batch:
        scores = request.bootstrap.scores
        if scores is not None:
            start, stop = max(chunk.start, scores.first - 1), chunk.stop  # positions
            if start < stop:
                to_row = first_row - chunk.start  # from a position of the chunk to its row
                found.append(
                    _WantedRows(
                        request.room,
                        scores.num_top,
                        start=to_row + start,
                        stop=to_row + stop,
                        first=start + 1,
                        next_ids=request.token_ids[start + 1 : stop + 1].astype(np.int64),
                    )
                )
        first_row += chunk.stop - chunk.start
    return found


def _packed(rows: ScoredRows, wanted: Sequence[_WantedRows]) -> dict[Room, list[RoomScores]]:
    """Return the messages of each room. ``rows`` has the scores of all rooms in order, with as many top
    tokens as any room wants."""
    pieces = {}
    start = 0
    for part in wanted:
        stop = start + part.stop - part.start
        num_top = min(part.num_top, rows.top_ids.shape[1])
        packed = np.empty(stop - start, score_dtype(num_top))
        packed["logprob"] = rows.logprobs[start:stop].numpy()
        packed["rank"] = rows.ranks[start:stop].numpy()
        packed["top_ids"] = rows.top_ids[start:stop, :num_top].numpy()
        packed["top_logprobs"] = rows.top_logprobs[start:stop, :num_top].numpy()
        most = MAX_ROWS_BYTES // packed.itemsize
        pieces[part.room] = [
            RoomScores(part.room, part.first + row, num_top, packed[row : row + most].tobytes())
            for row in range(0, len(packed), most)
        ]
        start = stop
    return pieces


def layer_hook(on_written: LayerWritten | None, device: torch.device) -> Callable[[int], None] | None:
    """Return what the KV access calls with each layer that it wrote; on a GPU it adds an event to wait
    for."""
    if on_written is None:
        return None
    if device.type == "cpu":
        return lambda layer: on_written(layer, None)

    def written(layer: int) -> None:
        # A sender's thread waits for this event and must not spin.
        stored = torch.cuda.Event(blocking=True)
        stored.record()
        on_written(layer, stored)

    return written
