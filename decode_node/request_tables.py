"""Owns the tables that kernels read: each request's row, with its pages and, if it has one, its hot buffer.

``live_requests.py`` decides who owns which slots. The moves of requests enter that here:

- ``prepare_landing`` when requests are admitted;
- ``start`` to fill its row and warm its hot buffer up, then ``go_on`` in each turn until ``is_ready``;
- ``start_pages``, ``go_on`` until ``is_ready``, then ``enter_pages``, to use pages instead of a hot buffer;
- ``grow`` after it was given slots, and ``resize`` after its hot buffer was given another size;
- ``retract`` before its pages are taken away, then ``enter_hot_buffer``, or ``release`` and ``start``;
- ``release`` at its end.

``row_fills.py`` fills rows beside steps, in a stream of its own. A request takes part in no step before its
row is filled. It takes part in all steps while its pages are filled.

A hisparse request has a **lookup slot** for each of its positions, in pages like those of a pool. A table of
each hot group (``kernels/hot_state.py``) says for a lookup slot where its position is in the hot buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.model.rank_group import RankGroup
from hisparse_pd.core.model.side_stream import SideStream, wait_for
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.extents import slice_extents, total_length
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prefix import Prefix, end_of
from hisparse_pd.decode_node.drafting import max_verifiable
from hisparse_pd.decode_node.memory import DecodeMemory, pages_tensor
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.row_fills import RowFills
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.kernels.hot_entries import enter_hot_buffer, positions_of, resize_hot_buffer
from hisparse_pd.kernels.hot_state import ABSENT, HotBufferState
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.page_fill import PageFill
from hisparse_pd.kernels.row_check import (
    WrongRow,
    check_dense_row,
    check_in_place,
    void_row_checks,
    wrong_row,
)
from hisparse_pd.kernels.row_errors import ReadAt
from hisparse_pd.kernels.step_tokens import row_results
from hisparse_pd.kernels.swap_in import RowStart, start_dense_row
from hisparse_pd.protocol.messages import Extent


class RequestTables:
    """Tables for ``num_rows`` requests of up to a whole context, over the pools of ``memory``."""

    def __init__(
        self,
        spec: ModelSpec,
        memory: DecodeMemory,
        *,
        num_rows: int,
        num_lookup_slots: int,
        max_capacity: int,
        page_size: int,
        max_new: int = 1,
        ranks: RankGroup | None = None,
    ) -> None:
        """``max_capacity``: the most entries of a hot buffer. ``max_new``: the most new positions that a step
        has of a request. ``ranks``: those of the node."""
        self.spec = spec
        self.memory = memory
        self.page_size = page_size
        self.device = memory.k_dev.device
        self.state = HotBufferState.create(
            spec.num_hot_groups,
            num_rows,
            spec.context_length,
            max_capacity,
            page_size,
            num_lookup_slots,
            memory.scratch_device_slot,  # its number is that of the slots before it
            self.device,
            max_new=max_new,
            row_checks=memory.row_checks,
        )
        self.miss_plan = MissPlan.create(num_rows * max_new, spec.index_topk, self.device)
        self.fills = RowFills(self.device, ranks)
        self._awaited_stream = SideStream(self.device, priority=-1)
        """For what the host waits for: landing zones, and slots that change hands."""
        self._before_step: torch.cuda.Event | None = None
        """What was enqueued before the last call of ``note_launch``."""
        self._ended_counters = SwapCounts()
        """Counts of all rows that have been emptied."""
        self.max_verifiable = partial(
            max_verifiable, top_k=spec.index_topk, max_new=max_new, max_context=spec.context_length
        )
        """``drafting.max_verifiable`` with the sizes of this node: takes a request and a number of drafts."""

    # --- before a request runs ------------------------------------------------------------------------------

    def prepare_landing(self, *requests: Request) -> None:
        """Void the row checks of landing zones, which are their last owners', before anything lands there.

        Waits for the device, but not for its steps: none of them uses these pages.
        """
        row_checks = self.state.row_checks
        if row_checks is None:
            return
        extents = chain.from_iterable(request.owned[PoolKind.INDEX] for request in requests)
        pages = pages_tensor(tuple(extents), self.page_size)
        with self._awaited():
            void_row_checks(row_checks, pages.to(self.device), self.page_size)

    def copy_prompt(self, source: Request, request: Request, start: int) -> None:
        """Copy the prompt's rows from position ``start`` on from another sample of it, in the same mode.

        Waits for the device, but not for its steps: none writes to these rows. When it returns, nothing reads
        the rows of ``source`` any more.
        """
        with self._awaited():
            copy_prompt(self.memory, source, request, start)

    def by_hot_group(self, hint: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """Return the positions to warm each hot group with, the most useful first.

        ``hint``: [num_index_groups, index_topk], the best position of each index group first. A hot group
        takes the best of each of its index groups, then the second best of each, and so on: of [5, 9] and
        [7, 5] it takes 5, 7, 9, 5.
        """
        hot_groups = np.array(self.spec.hot_group_of_index_group)
        return [hint[hot_groups == group].T.ravel() for group in range(self.spec.num_hot_groups)]

    # --- filling --------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Begin to fill the row of a request, and to warm its hot buffer up or fill its pages: when it
        becomes RUNNING, and again after ``retract`` and ``release``, with other device slots.

        A dense row, which has page ids and its items' checks, takes one launch. A hisparse one is filled in
        slices: the first one is launched here if no other row is being filled, the others by ``go_on``.
        """
        if request.mode is Mode.DENSE:
            with self.fills.beside_steps(request.req_row, is_first=True):
                pages, index_pages = (
                    self._pages(request, kind) for kind in (PoolKind.DEVICE, PoolKind.INDEX)
                )
                start_dense_row(self.state, request.req_row, pages=pages, index_pages=index_pages)
                if self.state.row_checks is not None:
                    check_dense_row(self.state, request.req_row, self.memory.k_dev, request.num_kv_tokens)
            return
        if request.is_resident:
            self.fills.begin(request.req_row, self._page_fill(request, request.num_kv_tokens))
        else:
            self.fills.begin(request.req_row, self._row_start(request))

    def start_pages(self, request: Request) -> None:
        """Begin to fill the pages of a request beside its steps; ``go_on`` launches the copies."""
        self.fills.begin_pages(request.req_row, self._page_fill(request, request.num_filled_tokens))

    def go_on(self, link_share: float = 0.0) -> dict[int, Exception]:
        """Launch the next slices of rows and pages that are being filled (``RowFills.go_on``)."""
        return self.fills.go_on(link_share)

    def is_ready(self, request: Request) -> bool:
        """Return whether the row of a RUNNING or ENDING request and its pages are filled, or their filling
        has stopped."""
        return self.fills.is_ready(request.req_row)

    def stop_filling(self, request: Request) -> None:
        """Launch nothing more to fill a request's row or its pages (``RowFills.stop``)."""
        self.fills.stop(request.req_row)

    def enter_pages(self, request: Request) -> None:
        """Let steps find the items of a request in its pages, and no more in its hot buffer, once
        ``is_ready`` says that the pages are filled. The request is in no step. What is new since the fill
        began is copied before the next step."""
        fill = self._page_fill(request, request.num_kv_tokens, request.num_filled_tokens)
        with self._noted(request):
            fill.launch_slice(None)
        self.state.drop_hot_buffer(request.req_row)

    def stop_pages(self, request: Request) -> None:
        """Fill no more of a request's pages, which are about to be given up. Waits for copies under way."""
        self.fills.stop_pages(request.req_row)
        self.state.drop_pages(request.req_row)

    # --- while a request runs -------------------------------------------------------------------------------

    def grow(self, request: Request) -> None:
        """Enter all pages of a running request into its row, after it was given more. No step in flight looks
        at the new ones, and the filling of a row under way writes the same ids."""
        row, first_page = request.req_row, 0
        if request.mode is Mode.DENSE or request.is_resident:  # others get their pages with the fill
            self.state.set_pages(row, first_page, self._pages(request, PoolKind.DEVICE))
        if request.mode is Mode.HISPARSE:
            pages = (self._pages(request, kind) for kind in (PoolKind.HOST, PoolKind.LOOKUP))
            self.state.set_host_pages(row, first_page, *pages)
        self.state.set_index_pages(row, first_page, self._pages(request, PoolKind.INDEX))

    def resize(self, request: Request, num_before: int, capacity: int) -> None:
        """Give the hot buffer of a request, which is in no step, another ``capacity``, and keep what is hot
        as far as that has room. Its device pages begin with those of the smaller size.

        Where it gives slots up, this waits for the device, but not for a step in flight: they may be written
        to then. New ones may still have words of their last owner, which leave them in the steps' stream.
        """
        self.fills.finish(request.req_row)
        with self._awaited() if capacity < num_before else self._noted(request):
            resize_hot_buffer(
                self.state,
                request.req_row,
                num_before=num_before,
                capacity=capacity,
                hot_pages=self._hot_pages(request, capacity),
                num_tokens=request.num_kv_tokens,
                layers_of_group=self.spec.kv_layers_of_hot_group,
                k_dev=self.memory.k_dev,
            )
            self._restart_counts(request)

    def retract(self, request: Request) -> None:
        """Bring all KV of a dense or resident request, which is in no step, to the host, before it leaves its
        pages. Waits for the device, but not for a step in flight.

        A dense request also needs the indexer keys of the pages that it shares. They are copied to those runs
        of its copy in the host pool that have none yet, and behind the copy's end to slots of its own.
        """
        self.fills.finish(request.req_row)
        # If it is resident, the host is up to date: every step ends with the backup of its newest tokens.
        if request.mode is Mode.DENSE:
            num_there = end_of(request.host_prefix) * self.page_size
            on_device = slice_extents(request.extents(PoolKind.DEVICE), num_there, request.num_kv_tokens)
            with self._awaited():  # whoever gets the pages next may write there at once
                if request.prefix is not None:
                    self._copy_shared_keys(request.prefix, request.host_prefix, request.owned[PoolKind.INDEX])
                self.memory.spill(on_device, request.owned[PoolKind.HOST], total_length(on_device))

    def enter_hot_buffer(self, request: Request, first_position: int) -> None:
        """Let steps find the items of a request in its hot buffer, and no more in pages. The first device
        slots have those from ``first_position`` on, which are hot. ``grow`` has entered its pages."""
        num_tokens = request.num_kv_tokens
        enter_hot_buffer(
            self.state,
            request.req_row,
            capacity=request.hot_capacity,
            hot_pages=self._hot_pages(request, request.hot_capacity),
            first_position=min(first_position, num_tokens),
            num_tokens=num_tokens,
        )
        self._restart_counts(request)

    def check_hot(self, request: Request, group: int) -> None:
        """Enqueue a check of the rows in a request's hot buffer, in all layers of one hot group.

        The next row results say whether one is wrong. Drafts that were not accepted are left out.
        """
        state, row = self.state, request.req_row
        slots = state.entry_slots(row)
        positions = positions_of(state, row, state.hot_to_lookup[group, slots])
        is_there = (positions != ABSENT) & (positions < request.num_kv_tokens)
        slots = torch.where(is_there, slots, 0)
        positions = torch.where(is_there, positions, 0)
        for layer in self.spec.kv_layers_of_hot_group[group]:
            items = self.memory.k_dev[layer : layer + 1]
            check_in_place(
                state, row, items, slots, positions, is_there, read_at=ReadAt.SCRUB, first_layer=layer
            )

    def release(self, *requests: Request) -> None:
        """Empty the rows of ``requests``, and add their counters, as of the last step that was read, to those
        of the requests."""
        rows = [request.req_row for request in requests]
        for request, row in zip(requests, rows, strict=True):
            self.fills.stop(row)
            self.fills.wait(row)  # filling reads host slots that are about to be given up
            self._close_counts(request)
        self.state.reset_rows(*rows)

    # --- what steps and metrics read ------------------------------------------------------------------------

    def row_results(self, req_rows: Tensor) -> Tensor:
        """Return the error flags, hits, misses and evictions of the rows so far: int64 [num_reqs, 4], on the
        device."""
        return row_results(self.state.error_flags, self.state.counters, req_rows)

    def wrong_row(self, request: Request) -> WrongRow:
        """Return the first wrong row of a request, after a step said that it has one. Waits for the
        device."""
        if (filled := self.fills.ends.get(request.req_row)) is not None:
            filled.synchronize()  # the copy that found it sets the flag before it writes the rest
        return wrong_row(self.state, request.req_row)

    def totals(self, running: Collection[Request]) -> SwapCounts:
        """Return the counts of all requests since the start. ``running``: the requests that have rows, whose
        counts are as of the last step that was read."""
        total = self._ended_counters
        for request in running:
            total = total.plus(request.row_counters)
        return total

    @property
    def bytes_per_miss(self) -> float:
        """Bytes that a miss brings from the host, on average: an item in each KV layer of its hot group."""
        return self.spec.item_bytes * self.spec.num_kv_layers / self.spec.num_hot_groups

    # --- what the moves above share -------------------------------------------------------------------------

    def note_launch(self) -> None:
        """Note that the work of ``_awaited`` need not wait for what is enqueued next: a step, if there is
        one."""
        if self.device.type == "cuda":
            self._before_step = torch.cuda.current_stream(self.device).record_event()

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """Send work to a stream that does not wait for the step in flight, and wait for it, also after an
        error. That step uses none of the memory of this work; those before it are over."""
        with self._awaited_stream.use():
            wait_for(self._before_step)
            try:
                yield
            finally:
                self._awaited_stream.synchronize()

    @contextmanager
    def _noted(self, request: Request) -> Iterator[None]:
        """Send copies to a request's slots to the steps' stream, and note their end, also after an error. A
        step of others may be before them: until they are over, nobody else may get the slots."""
        try:
            yield
        finally:
            self.fills.note_end(request.req_row)

    def _row_start(self, request: Request) -> RowStart:
        hints, request.hot_positions = request.hot_positions, None
        return RowStart(
            self.state,
            request.req_row,
            capacity=request.hot_capacity,
            hot_pages=self._hot_pages(request, request.hot_capacity),
            host_pages=self._pages(request, PoolKind.HOST),
            lookup_pages=self._pages(request, PoolKind.LOOKUP),
            index_pages=self._pages(request, PoolKind.INDEX),
            num_tokens=request.num_kv_tokens,
            hints=hints,
            layers_of_group=self.spec.kv_layers_of_hot_group,
            k_host=self.memory.k_host,
            k_dev=self.memory.k_dev,
        )

    def _page_fill(self, request: Request, num_tokens: int, num_filled: int = 0) -> PageFill:
        """Return the fill of a request's pages with its first ``num_tokens`` items, of which the first
        ``num_filled``, and those that it shares, are there."""
        return PageFill(
            self.state,
            request.req_row,
            pages=pages_tensor(request.page_extents, self.page_size),
            host_pages=self._pages(request, PoolKind.HOST),
            lookup_pages=self._pages(request, PoolKind.LOOKUP),
            index_pages=self._pages(request, PoolKind.INDEX),
            num_tokens=num_tokens,
            num_filled=max(num_filled, request.num_resident_pages * self.page_size),
            k_host=self.memory.k_host,
            k_dev=self.memory.k_dev,
        )

    def _copy_shared_keys(self, shared: Prefix, on_host: Prefix | None, own: tuple[Extent, ...]) -> None:
        """Copy the indexer keys and row checks of ``shared`` to the runs of ``on_host`` that are arriving,
        and those behind its end to the slots ``own``."""
        extents, page_size = shared.extents(PoolKind.INDEX), self.page_size
        for run in on_host.chain() if on_host is not None else ():
            if run.is_arriving:
                src = slice_extents(extents, run.start_page * page_size, run.end_page * page_size)
                self.memory.copy_rows(PoolKind.INDEX, src, run.holding[PoolKind.INDEX])
        src = slice_extents(extents, end_of(on_host) * page_size, total_length(extents))
        self.memory.copy_rows(PoolKind.INDEX, src, slice_extents(own, 0, total_length(src)))

    def _pages(self, request: Request, kind: PoolKind) -> Tensor:
        return pages_tensor(request.extents(kind), self.page_size)

    def _hot_pages(self, request: Request, capacity: int) -> Tensor:
        """Return the page ids of a hot buffer of ``capacity`` entries in the request's first device slots."""
        num_pages = -(-capacity // self.page_size)
        return pages_tensor(request.owned[PoolKind.DEVICE], self.page_size)[:num_pages]

    def _restart_counts(self, request: Request) -> None:
        """Let a row that changes between two steps count from 0 on."""
        self._close_counts(request)
        self.state.counters[request.req_row].fill_(0)

    def _close_counts(self, request: Request) -> None:
        """Add the counters of a request's row, as of the last step that was read, to those of before."""
        request.earlier_counters = request.earlier_counters.plus(request.row_counters)
        self._ended_counters = self._ended_counters.plus(request.row_counters)
        request.row_counters = SwapCounts()


def copy_prompt(memory: DecodeMemory, source: Request, request: Request, start: int) -> None:
    """Copy KV, indexer keys and row checks of the prompt's positions from ``start`` up to its last token from
    the slots of ``source`` to those of ``request``, which is in the same mode."""
    for kind in request.kv_pools:
        src, dst = (
            slice_extents(sample.extents(kind), start, request.num_landing_tokens)
            for sample in (source, request)
        )
        memory.copy_rows(kind, src, dst)
