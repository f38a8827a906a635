"""Runs decode steps, on a GPU in CUDA graphs.

A step has two halves (``step_halves.py``). ``DeviceRunner`` calls ``launch`` for the first one, the model's
forward over the new positions of all requests. Then tokens other than the likeliest may be drawn
(``step_draws.py``), and ``follow`` runs the second half. ``capture`` captures both halves for several numbers
of requests, of which a step takes the next larger one. It also measures which batches are faster when they
are split, and how (``split_choice.py``).
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
from hisparse_pd.decode_node.forward_results import Forward
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
from hisparse_pd.decode_node.step_halves import FirstHalf, StepHalves

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
        self._max_new = tables.state.max_new
        self._measures_split = min_split_reqs is None
        self.min_split_reqs = max_reqs + 1 if min_split_reqs is None else min_split_reqs
        fewest_to_split = MIN_REQS if min_split_reqs is None else min_split_reqs
        may_split = fewest_to_split <= max_reqs
        self._halves = StepHalves(
            model, tables, kernels, inputs, outcomes, max_reqs=max_reqs, may_split=may_split
        )
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
            return self._halves.forward(FirstHalf(num_reqs, num_new, split))
        captured[size].graph.replay()
        return captured[size].forward

    def follow(self, forward: Forward) -> Tensor:
        """Run a step's second half, after the draws into ``forward.token_ids``. Returns the tensor that the
        host reads (``step_results.py``)."""
        captured = self._following.get((forward.num_new, forward.num_reqs))
        if captured is None:
            return self._halves.follow(forward)
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
            FirstHalf(size, num_new, Split.WHOLE)
            for num_new in (1, *range(self._max_new, 1, -1))
            for size in sizes
        ]
        in_parts = [FirstHalf(size, 1, split) for size in sizes_to_split for split in SPLITS]

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

    def _capture(self, half: FirstHalf, stream: torch.cuda.Stream) -> CapturedForward:
        """Capture a first half and, unless it is captured, the second half of steps of that size."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream):
            forward = self._halves.forward(half)
        self._graph_pool = graph.pool()
        follow_key = half.num_new, half.num_reqs
        if self._max_new > 1 and follow_key not in self._following:
            following = torch.cuda.CUDAGraph()
            with torch.cuda.graph(following, pool=self._graph_pool, stream=stream):
                results = self._halves.follow(forward)
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
            size: tried.get((size, split)) or self._capture(FirstHalf(size, 1, split), stream)
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
                captured = tried[size, split] = self._capture(FirstHalf(size, 1, split), stream)
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

    def _warm_up(self, halves: Sequence[FirstHalf]) -> None:
        for half in halves:
            self._halves.follow(self._halves.forward(half))


def _times_text(measured: Mapping[int, Secs]) -> str:
    """Return the times of steps for the log, such as "; 64: 9.10 ms whole, 8.20 ms in parts"."""
    return "".join(
        f"; {size}: "
        + ", ".join(f"{1e3 * step_secs:.2f} ms {split.value}" for split, step_secs in secs.items())
        for size, secs in measured.items()
    )
