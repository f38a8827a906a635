"""The model's view of the pools in one decode forward, dense and hisparse together: the new positions of each
request, which are its newest token's and its drafts'. To the model each of them is a row of its own.

All of it is device work that a CUDA graph can capture. Everything about the batch that changes from step to
step (rows, lengths, how many requests are real) is in tensors with fixed addresses. Requests from
``num_real_reqs`` on are padding, which writes to the scratch slots at the ends of the pools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.decode_node.attention_parts import AttentionParts, MissCopies, Part
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.kernels.hot_state import ABSENT, StepRequests
from hisparse_pd.kernels.miss_plan import MissPlan
from hisparse_pd.kernels.paged_indexer import paged_index_topk
from hisparse_pd.kernels.row_check import store_row_checks
from hisparse_pd.kernels.step_rows import place_rows
from hisparse_pd.kernels.swap_in import backup_newest, newest_slots, plan_misses, replay_misses, swap_in


@dataclass
class InOrder:
    """Lets streams of ``device`` do something one after the other, in the order in which they ask."""

    device: torch.device
    _last: torch.cuda.Event | None = field(default=None, init=False)

    @contextmanager
    def next(self) -> Iterator[None]:
        """Around what the current stream does behind those that asked before it."""
        if self.device.type != "cuda":  # where everything happens in order
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last is not None:
            stream.wait_event(self._last)
        yield
        self._last = stream.record_event()


class MicroBatchOrder:
    """What the micro-batches of one step do not do at the same time: the ``planning`` of swap-ins, whose
    launches share a workspace, and ``copies``."""

    def __init__(self, device: torch.device, copies: MissCopies) -> None:
        self.planning = InOrder(device)
        self.copies = copies


class DeviceStep:
    """The ``KvAccess`` of one decode forward.

    ``seq_lens`` and ``req_rows``: int64 [num_reqs], with values that may be used as indices in padding too;
    ``num_real_reqs``: int32 [1]. ``backup_stream``: where newest items are copied to the host while the last
    layer computes; None: the current stream. A micro-batch has a ``miss_plan`` of its own, and its ``order``
    among the others of its step. ``parts``: selection, swap-in and attention go by parts of the batch, for
    steps without drafts.

    With drafts ``num_new`` positions of each request are new, and ``seq_lens`` ends with the last of them.
    The forward has rows for those from ``first_row`` on, a request's next to each other; the others were
    written by forwards before it. ``ends``: int64 [num_reqs], where each request's positions end that have
    slots and room in the hot buffer; rows from there on leave no trace and give nothing that is used. What is
    to reach the host is not known before the draws: ``back_up`` says it.
    """

    def __init__(
        self,
        tables: RequestTables,
        kernels: AttentionKernels,
        seq_lens: Tensor,
        req_rows: Tensor,
        num_real_reqs: Tensor,
        backup_stream: torch.cuda.Stream | None = None,
        *,
        miss_plan: MissPlan | None = None,
        order: MicroBatchOrder | None = None,
        parts: AttentionParts | None = None,
        num_new: int = 1,
        first_row: int = 0,
        ends: Tensor | None = None,
    ) -> None:
        self._spec = tables.spec
        self._memory = tables.memory
        self._miss_plan = tables.miss_plan if miss_plan is None else miss_plan
        self._index_page_table = tables.state.index_pages
        self._page_size = tables.page_size
        self._kernels = kernels
        self._backup_stream = backup_stream
        self._order = order
        self._num_new = num_new
        self._first_row = first_row
        self._has_drafts = ends is not None
        state = tables.state
        # The kernels want a slot for a request's first new position, even if no row is there.
        with_slots = seq_lens if ends is None else torch.minimum(seq_lens, ends - 1 + num_new)
        self._requests = StepRequests(state, with_slots, req_rows, num_real_reqs, num_new)
        self._rows = place_rows(
            seq_lens, req_rows, num_real_reqs, ends, newest_slots(self._requests), state.index_pages,
            num_new=num_new, first_row=first_row, page_size=self._page_size,
            scratch_device_slot=self._memory.scratch_device_slot,
            scratch_index_slot=self._memory.scratch_index_slot,
        )  # fmt: skip
        self._num_real_rows = num_real_reqs
        if num_new - first_row > 1:
            self._num_real_rows = num_real_reqs * (num_new - first_row)
        self._device_slots: Tensor | None = None
        self._parts = None if parts is None else parts.of(self._requests)

    @property
    def positions(self) -> Tensor:
        """int64 [num_rows], ``num_new - first_row`` rows for each request."""
        return self._rows.positions

    def write(self, layer: int, kv: Tensor | None, index_keys: Tensor | None) -> None:
        """See ``hisparse_pd.core.model.attention.KvAccess``; so below."""
        memory, rows, num_layers = self._memory, self._rows, self._spec.num_layers
        kv_layer = self._spec.kv_layer_of_layer[layer]
        if kv is not None:
            self._kernels.kv_format.store(memory.k_dev[kv_layer], rows.device_slots, kv)
        if index_keys is not None:
            group = self._spec.index_group_of_layer[layer]
            self._kernels.index_format.store(memory.index[group], rows.index_slots, index_keys)
        if layer >= num_layers:  # the draft layer
            self._store_checks(range(kv_layer, kv_layer + 1))
        elif layer == num_layers - 1 and not self._has_drafts:
            self._start_backup()
        elif layer == num_layers - 1:
            self._store_checks(self._model_layers)

    @property
    def _model_layers(self) -> range:
        """Of the KV pools, those that are not the draft layer's."""
        return range(self._spec.num_kv_layers - self._spec.num_draft_layers)

    def _store_checks(self, layers: range) -> None:
        """Of the new rows in ``layers`` of the pools, which are written: a launch for all of them. Nothing
        before the next step looks at these."""
        memory, rows = self._memory, self._rows
        if memory.row_checks is not None:
            at = rows.device_slots, rows.positions
            store_row_checks(memory.row_checks, rows.index_slots, memory.k_dev, *at, layers)

    def select(self, group: int, q_index: Tensor, weights: Tensor) -> Tensor:
        if self._parts is None:
            return self._select(group, q_index, weights, slice(None), self._num_real_rows)
        spec, selected = self._spec, []
        hot_group, layer = spec.hot_group_of_index_group[group], spec.layers_of_group[group][0]
        for part in self._parts:
            positions = self._select(group, q_index, weights, part.rows, part.requests.num_real_reqs)
            part.plan(hot_group, positions)
            part.begin_copy(spec.kv_layers_filled_at[layer])
            selected.append(positions)
        return torch.cat(selected)

    def _select(self, group: int, q_index: Tensor, weights: Tensor, rows: slice, num_real: Tensor) -> Tensor:
        return paged_index_topk(
            q_index[rows],
            weights[rows],
            self._memory.index[group],
            self._index_page_table,
            self._rows.req_rows[rows],
            self._rows.select_at[rows],
            num_real,
            page_size=self._page_size,
            top_k=self._spec.index_topk,
            key_format=self._kernels.index_format.name,
            scratch=self._kernels.indexer_scratch,
        )

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        if self._parts is not None:
            return self._attend_by_parts(self._parts, layer, q, scale)
        if self._order is None:
            self._swap_in(layer, positions)
        else:
            self._swap_in_beside_others(layer, positions, self._order)
        return self.attend_at(layer, q, self.device_slots, scale)

    def _attend_by_parts(self, parts: Sequence[Part], layer: int, q: Tensor, scale: float) -> Tensor:
        spec = self._spec
        if layer != spec.layers_of_group[spec.index_group_of_layer[layer]][0]:
            for part in parts:
                part.begin_copy(spec.kv_layers_filled_at[layer])
        items = self._memory.k_dev[spec.kv_layer_of_layer[layer]]
        out = q.new_empty((*q.shape[:2], spec.kv_lora_rank))
        for part in parts:
            out[part.rows] = part.attend(q[part.rows], items, scale)
        return out

    @property
    def device_slots(self) -> Tensor:
        """int32 [num_rows, index_topk]: where the items are that the last layer attended to, -1 for none."""
        if self._device_slots is None:
            raise RuntimeError("no index group has been swapped in")
        return self._device_slots

    def attend_at(self, layer: int, q: Tensor, device_slots: Tensor, scale: float) -> Tensor:
        """``attend`` to the layer's items at ``device_slots``, int32 [rows of q, n], -1 for none."""
        items = self._memory.k_dev[self._spec.kv_layer_of_layer[layer]]
        return self._kernels.step_attention.attend(q, items, device_slots, scale)

    def _swap_in(self, layer: int, positions: Tensor) -> None:
        """Bring the layer's items of ``positions`` to ``_device_slots``."""
        filled = self._spec.kv_layers_filled_at[layer]
        group = self._spec.index_group_of_layer[layer]
        if layer != self._spec.layers_of_group[group][0]:
            self._replay_misses(filled)
            return
        memory, hot_group = self._memory, self._spec.hot_group_of_index_group[group]
        is_replayed = len(self._spec.kv_layers_of_hot_group[hot_group]) > 1
        if self._first_row:
            positions = self._of_all_new(positions)
        device_slots = swap_in(
            positions,
            self._requests,
            group=hot_group,
            layer=filled[0],
            k_host=memory.k_host,
            k_dev=memory.k_dev,
            miss_plan=self._miss_plan if is_replayed else None,
        )
        self._replay_misses(filled[1:])
        if self._first_row:
            device_slots = device_slots.view(-1, self._num_new, device_slots.shape[1])
            device_slots = device_slots[:, self._first_row :].flatten(0, 1).contiguous()
        self._device_slots = device_slots

    def _replay_misses(self, kv_layers: Sequence[int]) -> None:
        memory, state = self._memory, self._requests.state
        for kv_layer in kv_layers:
            replay_misses(self._miss_plan, kv_layer, memory.k_host, memory.k_dev, state=state)

    def _of_all_new(self, positions: Tensor) -> Tensor:
        """``positions`` with rows that select nothing where this forward has no rows of new positions."""
        num_reqs, top_k = self._requests.num_reqs, positions.shape[1]
        all_new = positions.new_full((num_reqs, self._num_new, top_k), ABSENT)
        all_new[:, self._first_row :] = positions.view(num_reqs, -1, top_k)
        return all_new.flatten(0, 1)

    def _swap_in_beside_others(self, layer: int, positions: Tensor, order: MicroBatchOrder) -> None:
        """The same in two launches, so that one that only waits for PCIe can run beside others' kernels."""
        group = self._spec.index_group_of_layer[layer]
        if layer == self._spec.layers_of_group[group][0]:
            hot_group = self._spec.hot_group_of_index_group[group]
            with order.planning.next():
                self._device_slots = plan_misses(
                    positions, self._requests, group=hot_group, miss_plan=self._miss_plan
                )
        order.copies.wait(order.copies.begin(self._miss_plan, self._spec.kv_layers_filled_at[layer]))

    def write_draft_kv(self, model: DsaModel, token_ids: Tensor, hidden: Tensor) -> None:
        """Of a step without drafts: write the draft layer's KV of its new positions, behind which
        ``token_ids`` (int64 [num_reqs]) were drawn, also to the host. ``hidden``: of the model's forward. The
        layer selects nothing; its hot buffers learn where the new positions are."""
        model.write_draft_kv(token_ids, hidden, self.positions, self)
        nothing = (len(token_ids), self._spec.index_topk)
        selected = torch.full(nothing, ABSENT, dtype=torch.int32, device=token_ids.device)
        self._swap_in(self._spec.num_layers, selected)
        self._backup(self._requests)

    def back_up(self, seq_lens: Tensor, num_newest: Tensor) -> None:
        """Copy the last ``num_newest`` (int32 [num_reqs]) of ``seq_lens`` (int64 [num_reqs]) positions to the
        host, in all layers: what was accepted (I4), once all layers have it."""
        self._backup(replace(self._requests, seq_lens=seq_lens, num_new=1), num_newest)

    def finish(self) -> None:
        """Order what follows in the current stream after the backup of the new tokens (I4)."""
        if self._backup_stream is not None:
            torch.cuda.current_stream().wait_stream(self._backup_stream)

    def _start_backup(self) -> None:
        """All layers of the new tokens are written: they can leave while the last layer still attends, and
        their checks be made."""
        if self._backup_stream is not None:
            self._backup_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._backup_stream):
            self._backup(self._requests)
            self._store_checks(self._model_layers)

    def _backup(self, requests: StepRequests, num_newest: Tensor | None = None) -> None:
        memory = self._memory
        backup_newest(requests, k_host=memory.k_host, k_dev=memory.k_dev, num_newest=num_newest)
