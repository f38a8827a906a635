"""The device work of a decode step in two halves: the model's forward, and what follows the draws.

``DeviceRunner`` calls ``launch``, which runs the model over the new positions of all requests. Then tokens
other than the likeliest may be drawn (``step_draws.py``), and ``follow`` runs the second half. On a GPU both
halves are CUDA graphs, captured for several numbers of requests; a step takes the next larger one.

A step without drafts has one new position for each request; its second half writes the draft layer's KV, if
there is a draft layer. A step that verifies drafts has more positions; its second half accepts drafts, backs
up KV and makes the next drafts. What the following step needs also stays on the device (``RowOutcomes``).

A step without drafts may be split, so that the copies of some requests hide behind the computing of others:
in parts within each layer, or in micro-batches that run through all layers (``split_choice.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.decode_node.attention_parts import AttentionParts, MissCopies, StepInParts
from hisparse_pd.decode_node.device_step import DeviceStep, NewPositions
from hisparse_pd.decode_node.draft_chain import draft_chain
from hisparse_pd.decode_node.drafting import NO_DRAFT
from hisparse_pd.decode_node.forward_results import Forward, KeptResults, Verified
from hisparse_pd.decode_node.micro_batches import MicroBatches
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.row_outcomes import RowOutcomes
from hisparse_pd.decode_node.split_choice import (
    MIN_REQS,
    MISS_SHARE,
    SPLITS,
    Secs,
    Split,
    SplitChoice,
    TrialRequests,
    choose_splits,
    fastest,
    time_by_turns,
)
from hisparse_pd.decode_node.step_buffers import StepInputs
from hisparse_pd.decode_node.step_results import TOKEN_COLUMN, join_plain, join_verified

log = logging.getLogger(__name__)
UNMEASURED_SPLIT = Split.PARTS
"""The split of batches where none was measured: without CUDA graphs, or in pools too small for a trial."""


class _GraphKind(NamedTuple):
    """A kind of first half, which is captured for several batch sizes."""

    num_new: int
    """New positions of each request."""
    is_split: bool


_PLAIN_WHOLE = _GraphKind(num_new=1, is_split=False)
_PLAIN_SPLIT = _GraphKind(num_new=1, is_split=True)


class _FirstHalf(NamedTuple):
    """One first half that can be run or captured."""

    num_reqs: int
    num_new: int
    """New positions of each request; a step with more than one is never split."""
    split: Split


class CapturedForward(NamedTuple):
    """A captured first half. Replaying ``graph`` writes the tensors of ``forward`` again."""

    graph: torch.cuda.CUDAGraph
    forward: Forward


class _CapturedFollow(NamedTuple):
    """A captured second half. Replaying ``graph`` writes ``results``, which the host reads, again."""

    graph: torch.cuda.CUDAGraph
    results: Tensor


class Forwards:
    """Runs both halves of steps, for the requests in ``inputs``.

    Batches of at least ``min_split_reqs`` requests may be split. If it is None, ``capture`` measures from how
    many requests on splitting is faster. In either case ``capture`` measures which way to split is fastest.
    """

    def __init__(
        self,
        model: DsaModel,
        tables: RequestTables,
        kernels: AttentionKernels,
        inputs: StepInputs,
        outcomes: RowOutcomes,
        *,
        max_reqs: int,
        min_split_reqs: int | None,
    ) -> None:
        self._model = model
        self._tables = tables
        self._kernels = kernels
        self._inputs = inputs
        self._outcomes = outcomes
        self._max_new = tables.state.max_new
        self._measures_split = min_split_reqs is None
        self.min_split_reqs = max_reqs + 1 if min_split_reqs is None else min_split_reqs
        self._backup = SideStream(tables.device)
        self._parts: AttentionParts | None = None
        self._micro_batches: MicroBatches | None = None
        fewest_to_split = MIN_REQS if min_split_reqs is None else min_split_reqs
        if fewest_to_split <= max_reqs:
            copies = MissCopies(tables, max_reqs)
            self._parts = AttentionParts(kernels, copies)
            self._micro_batches = MicroBatches(model, tables, kernels, copies, self._backup)
        self._kept = KeptResults.create(model, max_reqs * self._max_new) if self._max_new > 1 else None
        """Results of a first half that the second half reads; None in a node without a draft layer."""
        self.graphs: dict[_GraphKind, dict[int, CapturedForward]] = {}
        """First halves by kind, then by batch size, smallest first."""
        self.step_secs: dict[int, float] = {}
        """Seconds of steps of hisparse requests that miss nothing, by their number. ``capture`` measures them
        for powers of two, as far as the pools hold that many."""
        self._graph_pool: Any = None
        """The memory pool that all graphs share."""
        self._following: dict[tuple[int, int], _CapturedFollow] = {}
        """Second halves by number of new positions and batch size."""

    def launch(self, num_reqs: int, num_new: int, *, is_split: bool) -> Forward:
        """Run a step's first half. ``num_reqs``: the most requests that any rank has in the step."""
        is_split = is_split and num_new == 1  # steps that verify drafts are not split
        captured = self.graphs.get(_GraphKind(num_new, is_split), {})
        size = next((size for size in captured if size >= num_reqs), None)
        if size is None:
            split = UNMEASURED_SPLIT if is_split else Split.WHOLE
            return self._forward(_FirstHalf(num_reqs, num_new, split))
        captured[size].graph.replay()
        return captured[size].forward

    def follow(self, forward: Forward) -> Tensor:
        """Run a step's second half, after the draws into ``forward.token_ids``. Returns the tensor that the
        host reads (``step_results.py``)."""
        captured = self._following.get((forward.num_new, forward.num_reqs))
        if captured is None:
            return self._follow(forward)
        captured.graph.replay()
        # Whole and split first halves of one size share this graph. ``captured.results`` belongs to the first
        # half with which the graph was captured. Steps with drafts have only one; after a step without
        # drafts, the results of the first half that has run are in ``forward``.
        return captured.results if forward.results is None else forward.results

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Capture graphs of each of ``sizes``, which are largest first so that graphs can share memory.

        Each forward first runs once without a graph, so that kernels allocate and compile what they need.
        Meanwhile all requests must be padding.
        """
        started = time.monotonic()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        fewest = MIN_REQS if self._measures_split else self.min_split_reqs
        sizes_to_split = [size for size in sizes if size >= fewest]
        # Steps without drafts come first, then those with the most drafts; of each kind, the largest size.
        whole = [
            _FirstHalf(size, num_new, Split.WHOLE)
            for num_new in (1, *range(self._max_new, 1, -1))
            for size in sizes
        ]
        in_parts = [_FirstHalf(size, 1, split) for size in sizes_to_split for split in SPLITS]

        ranks = self._model.ranks
        with torch.cuda.stream(stream):
            # A forward waits for other ranks, but not for as long as one may compile. Each rank therefore
            # compiles in a rehearsal first, in which its forwards wait for nobody.
            if ranks is not None:
                with ranks.rehearsal():
                    self._warm_up(whole + in_parts)
            self._warm_up(whole + in_parts)
        stream.synchronize()

        for half in whole:
            of_kind = self.graphs.setdefault(_GraphKind(half.num_new, is_split=False), {})
            of_kind[half.num_reqs] = self._capture(half, stream)
        self._time_whole([size for size in sizes if size.bit_count() == 1])
        measured = self._capture_split(sizes_to_split, stream)
        self.graphs = {kind: dict(sorted(graphs.items())) for kind, graphs in self.graphs.items()}
        log.info(
            "captured CUDA graphs of %s requests, with up to %d drafts, split from %d hisparse ones on%s, "
            "in %.1f s",
            list(self.graphs[_PLAIN_WHOLE]),
            self._max_new - 1,
            self.min_split_reqs,
            _times_text(measured),
            time.monotonic() - started,
        )

    def _capture(self, half: _FirstHalf, stream: torch.cuda.Stream) -> CapturedForward:
        """Capture a first half and, unless it is captured, the second half of steps of that size."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream):
            forward = self._forward(half)
        self._graph_pool = graph.pool()
        follow_key = half.num_new, half.num_reqs
        if self._max_new > 1 and follow_key not in self._following:
            following = torch.cuda.CUDAGraph()
            with torch.cuda.graph(following, pool=self._graph_pool, stream=stream):
                results = self._follow(forward)
            self._following[follow_key] = _CapturedFollow(following, results)
        return CapturedForward(graph, forward)

    def _capture_split(self, sizes: Sequence[int], stream: torch.cuda.Stream) -> dict[int, Secs]:
        """Capture a split step for each of ``sizes`` that is to be split, in the fastest way. Returns the
        measured times, by size."""
        tried: dict[tuple[int, Split], CapturedForward] = {}

        def measure(size: int) -> Secs | None:
            return self._time_trial(size, stream, tried)

        if self._measures_split:
            choice = choose_splits(sizes, measure)
            self.min_split_reqs = min(choice.chosen, default=self.min_split_reqs)
        else:
            times = {size: measure(size) for size in sizes}
            choice = SplitChoice(
                {size: UNMEASURED_SPLIT if secs is None else fastest(secs) for size, secs in times.items()},
                {size: secs for size, secs in times.items() if secs is not None},
            )
        self.graphs[_PLAIN_SPLIT] = {
            size: tried.get((size, split)) or self._capture(_FirstHalf(size, 1, split), stream)
            for size, split in choice.chosen.items()
        }
        return choice.measured

    def _time_whole(self, sizes: Sequence[int]) -> None:
        """Measure ``step_secs`` for ``sizes``."""
        for size in sizes:
            secs = self._time(size, partial(self._whole_step, size), miss_share=0.0)
            if secs is not None:
                self.step_secs[size] = secs[Split.WHOLE]

    def _time_trial(
        self, size: int, stream: torch.cuda.Stream, tried: dict[tuple[int, Split], CapturedForward]
    ) -> Secs | None:
        """Time a step of ``size`` requests in each way to run; None if the pools of some rank are too small.
        Adds the first halves that it captures to ``tried``."""

        def steps() -> dict[Split, Callable[[], object]]:
            found = self._whole_step(size)
            for split in SPLITS:
                captured = tried[size, split] = self._capture(_FirstHalf(size, 1, split), stream)
                found[split] = captured.graph.replay
            return found

        return self._time(size, steps, miss_share=MISS_SHARE)

    def _whole_step(self, size: int) -> dict[Split, Callable[[], object]]:
        return {Split.WHOLE: self.graphs[_PLAIN_WHOLE][size].graph.replay}

    def _time(
        self, size: int, make_steps: Callable[[], Mapping[Split, Callable[[], object]]], *, miss_share: float
    ) -> Secs | None:
        """Time steps of ``size`` requests that miss ``miss_share``; None if the pools of some rank are too
        small. ``make_steps`` is called while the requests are in the pools."""
        ranks = self._model.ranks
        requests = TrialRequests(self._tables, self._kernels, self._inputs, size, miss_share=miss_share)
        try:
            fits_here = int(requests.fits)
            fits_by_rank = [(fits_here,)] if ranks is None else ranks.agree(fits_here)
            if (0,) in fits_by_rank:
                return None
            return time_by_turns(make_steps(), requests, ranks)
        finally:
            requests.end()

    def _warm_up(self, halves: Sequence[_FirstHalf]) -> None:
        for half in halves:
            self._follow(self._forward(half))

    def _forward(self, half: _FirstHalf) -> Forward:
        if half.num_new > 1:
            return self._verify(half.num_reqs, half.num_new)
        return self._plain(half.num_reqs, half.split)

    def _follow(self, forward: Forward) -> Tensor:
        if forward.results is None:
            return self._accept_and_draft(forward)
        if self._kept is not None:
            self._write_draft_kv(forward.num_reqs, self._kept.hidden)
        return forward.results

    def _plain(self, num_reqs: int, split: Split) -> Forward:
        """Run the model over the newest position of each request, and back this position up (I4)."""
        inputs = self._inputs
        req_rows = inputs.req_rows[:num_reqs]
        token_ids = self._outcomes.newest_tokens(inputs.tokens[:num_reqs], req_rows)
        new = NewPositions(self._outcomes.lengths(inputs, num_reqs), req_rows, inputs.num_real_reqs)
        logits, hidden = self._run_model(token_ids, new, split)
        if self._kept is not None and hidden is not None:
            self._kept.hidden[:num_reqs] = hidden
        likeliest = _or_known(logits.argmax(dim=-1), inputs.known_next[:num_reqs])
        self._outcomes.put_plain(inputs, likeliest)
        results = join_plain(self._tables.row_results(req_rows), likeliest)
        # Draws replace the likeliest tokens in place: the column is a view of ``results``.
        return Forward(num_reqs, 1, logits, results[:, TOKEN_COLUMN], results)

    def _run_model(self, token_ids: Tensor, new: NewPositions, split: Split) -> tuple[Tensor, Tensor | None]:
        """Run the model over one position of each request, and back this position up. Returns logits, and
        hidden states if there is a draft layer."""
        if split is Split.MICRO_BATCHES and self._micro_batches is not None:
            return self._micro_batches.forward(token_ids, new)
        if split is Split.PARTS and self._parts is not None:
            step: DeviceStep = StepInParts(self._tables, self._kernels, new, self._parts, backup=self._backup)
        else:
            step = DeviceStep(self._tables, self._kernels, new, backup=self._backup)
        hidden: Tensor | None = None
        if self._kept is None:
            logits = self._model.forward(token_ids, step.positions, step, None)
        else:
            logits, hidden = self._model.forward_with_hidden(token_ids, step.positions, step, None)
        self._backup.join()
        return logits, hidden

    def _write_draft_kv(self, num_reqs: int, hidden: Tensor) -> None:
        """Write the draft layer's KV for a step without drafts: a position without it would make the next
        guesses worse."""
        inputs = self._inputs
        req_rows = inputs.req_rows[:num_reqs]
        new = NewPositions(self._outcomes.lengths(inputs, num_reqs), req_rows, inputs.num_real_reqs)
        access = DeviceStep(self._tables, self._kernels, new)
        access.write_draft_kv(self._model, self._outcomes.tokens[req_rows], hidden[:num_reqs])

    def _verify(self, num_reqs: int, num_new: int) -> Forward:
        """Run the model over the newest token of each request and ``num_new - 1`` drafts behind it. The
        results are put into ``_kept``."""
        kept, inputs = self._kept, self._inputs
        assert kept is not None
        req_rows = inputs.req_rows[:num_reqs]
        num_rows = num_reqs * num_new
        seq_lens = self._outcomes.lengths(inputs, num_reqs)
        drafts = self._outcomes.drafts_to_verify(inputs, seq_lens, num_new)
        newest = self._outcomes.newest_tokens(inputs.tokens[:num_rows:num_new], req_rows)
        token_ids = torch.cat((newest[:, None], drafts.token_ids.clamp(min=0)), dim=1).flatten()
        new = NewPositions(
            seq_lens + num_new - 1,
            req_rows,
            inputs.num_real_reqs,
            num_new=num_new,
            ends=seq_lens + drafts.counts,
        )
        access = DeviceStep(self._tables, self._kernels, new)
        logits, hidden = self._model.forward_with_hidden(token_ids, access.positions, access, None)

        kept.logits[:num_rows] = logits
        kept.hidden[:num_rows] = hidden
        kept.token_ids[:num_rows] = _or_known(logits.argmax(dim=-1), inputs.known_next[:num_rows])
        verified = Verified(access, seq_lens, drafts)
        return Forward(
            num_reqs, num_new, kept.logits[:num_rows], kept.token_ids[:num_rows], verified=verified
        )

    def _accept_and_draft(self, forward: Forward) -> Tensor:
        """Accept drafts up to the first one that differs from the drawn token, back up the accepted
        positions, and make the next drafts.

        Returns the tensor that the host reads (``join_verified``).
        """
        kept, verified, inputs = self._kept, forward.verified, self._inputs
        assert kept is not None
        assert verified is not None
        num_reqs, num_new, access = forward.num_reqs, forward.num_new, verified.access
        req_rows = inputs.req_rows[:num_reqs]
        token_ids = forward.token_ids.view(num_reqs, num_new)
        is_right = verified.drafts.token_ids == token_ids[:, :-1]
        accepted = is_right.long().cumprod(dim=1).sum(dim=1)  # the number before the first wrong one
        reqs = torch.arange(num_reqs, device=accepted.device)
        newest_rows = reqs * num_new + accepted

        # The draft layer's KV must be there before the backup, which copies all layers.
        logits, hidden = self._model.draft(
            forward.token_ids, kept.hidden[: num_reqs * num_new], access.positions, access, newest_rows
        )
        seq_lens = verified.seq_lens + accepted
        access.back_up(seq_lens, (accepted + 1).to(torch.int32))

        def step_of(number: int) -> DeviceStep:
            """Return the KV access of the forward that makes a draft behind ``number`` others of this step.

            It has one row for each request: the last of the positions of these drafts. The forwards before
            have written the others.
            """
            new = NewPositions(
                seq_lens + number,
                req_rows,
                inputs.num_real_reqs,
                num_new=number,
                first_row=number - 1,
                ends=inputs.slot_ends[:num_reqs],
            )
            return DeviceStep(self._tables, self._kernels, new)

        next_drafts = draft_chain(
            self._model, access, newest_rows, logits, hidden, seq_lens, num_new - 1, step_of
        )
        newest_tokens = forward.token_ids[newest_rows]
        self._outcomes.put_verified(inputs, newest_tokens, seq_lens + 1, next_drafts)
        row_results = self._tables.row_results(req_rows)
        return join_verified(row_results, verified.drafts.counts, accepted, token_ids, next_drafts)


def _or_known(likeliest: Tensor, known: Tensor) -> Tensor:
    """Return the token behind each position: the prompt's own where ``known`` has one, not NO_DRAFT, and
    else the likeliest."""
    return torch.where(known == NO_DRAFT, likeliest, known)


def _times_text(measured: Mapping[int, Secs]) -> str:
    """Return the times of steps for the log, such as "; 64: 9.10 ms whole, 8.20 ms in parts"."""
    return "".join(
        f"; {size}: "
        + ", ".join(f"{1e3 * step_secs:.2f} ms {split.value}" for split, step_secs in secs.items())
        for size, secs in measured.items()
    )
