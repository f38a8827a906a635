"""The model's view of the pools in one decode forward, which dense and hisparse requests share.

``DeviceStep`` is the ``KvAccess`` that the model calls in each layer: it writes new KV, selects positions,
swaps their items in, attends, and backs new items up on the host. To the model each new position of a
request, its newest token's and its drafts', is a row of its own.

All of it is device work that a CUDA graph can capture. Everything about the batch that changes from step to
step (rows, lengths, how many requests are real) is in tensors with fixed addresses. Padding, which comes
last, writes to the scratch slots at the ends of the pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.side_stream import SideStream
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.kernels.hot_state import ABSENT, HotBufferState
from hisparse_pd.kernels.paged_indexer import IndexerScratch, paged_index_topk
from hisparse_pd.kernels.row_check import store_row_checks
from hisparse_pd.kernels.step_requests import StepRequests
from hisparse_pd.kernels.step_rows import StepRows, place_rows
from hisparse_pd.kernels.swap_in import backup_newest, newest_slots, replay_misses, swap_in


@dataclass(frozen=True)
class NewPositions:
    """The new positions of a step's requests, and which of them a forward has rows for.

    Each request has ``num_new`` new positions, which end at its ``seq_lens``. The forward has rows for those
    from number ``first_row`` on, a request's next to each other. Earlier forwards, those of drafts, have
    written the positions before.

    Examples: a step without drafts has ``num_new`` 1 and ``first_row`` 0; one that verifies two drafts, 3 and
    0; the draft layer's forward for the second of its guesses, 2 and 1.
    """

    seq_lens: Tensor
    """int64 [num_reqs]: lengths, all new positions included. Padding has lengths, too, that may be used as
    indices."""
    req_rows: Tensor
    """int64 [num_reqs]: rows of the tables; padding has some, too."""
    num_real_reqs: Tensor
    """int32 [1]: requests from this number on are padding."""
    num_new: int = 1
    first_row: int = 0
    ends: Tensor | None = None
    """int64 [num_reqs], in steps with drafts: the end of the positions for which each request has slots, and
    its hot buffer has room. Rows at later positions write to the scratch slots, and their results are not
    used."""

    @property
    def rows_of_request(self) -> int:
        """Rows that the forward has for each request."""
        return self.num_new - self.first_row

    def requests(self, state: HotBufferState) -> StepRequests:
        """Return the requests as the kernels of hot buffers take them."""
        seq_lens = self.seq_lens
        if self.ends is not None:
            # The kernels want a slot for the first new position, ``seq_lens - num_new``, even if the forward
            # has no row for it. Lengths that begin the new positions at ``ends`` or later are moved back.
            seq_lens = torch.minimum(seq_lens, self.ends - 1 + self.num_new)
        return StepRequests(state, seq_lens, self.req_rows, self.num_real_reqs, self.num_new)

    def place_rows(self, tables: RequestTables, requests: StepRequests) -> StepRows:
        """Return where the forward's rows are, and where they write. ``requests``: as of ``requests()``."""
        return place_rows(
            self.seq_lens,
            self.req_rows,
            self.num_real_reqs,
            self.ends,
            newest_slots(requests),
            tables.state.index_pages,
            num_new=self.num_new,
            first_row=self.first_row,
            page_size=tables.page_size,
            scratch_device_slot=tables.memory.scratch_device_slot,
            scratch_index_slot=tables.memory.scratch_index_slot,
        )

    def count_real_rows(self) -> Tensor:
        """Return the number of rows before those of padding: int32 [1]."""
        if self.rows_of_request == 1:
            return self.num_real_reqs
        return self.num_real_reqs * self.rows_of_request

    def expand_to_all_new(self, selected: Tensor) -> Tensor:
        """Return ``selected`` (int32 [num_rows, n]) for all new positions of each request: those without a
        row select nothing."""
        if not self.first_row:
            return selected
        num_reqs, num_columns = self.seq_lens.shape[0], selected.shape[1]
        of_all = selected.new_full((num_reqs, self.num_new, num_columns), ABSENT)
        of_all[:, self.first_row :] = selected.view(num_reqs, -1, num_columns)
        return of_all.flatten(0, 1)

    def take_own_rows(self, of_all: Tensor) -> Tensor:
        """Return the entries of ``of_all``, which has one for each new position, that belong to the forward's
        rows."""
        if not self.first_row:
            return of_all
        by_request = of_all.view(-1, self.num_new, of_all.shape[1])
        return by_request[:, self.first_row :].flatten(0, 1).contiguous()


class DeviceStep:
    """The ``KvAccess`` of one decode forward over ``new`` positions.

    Without drafts, new items are copied to the host in the stream ``backup`` while the last layer attends.
    The caller joins that stream after the forward, before it drops this object, whose tensors the copy reads.
    Without ``backup``, the current stream copies. With drafts (``new.ends``), the caller calls ``back_up``
    once it is known which are accepted.

    The draft chain calls ``attend_at`` with slots that this forward has found. ``StepInParts`` and the
    micro-batches' steps are subclasses, which select or swap in by parts or in two launches.
    """

    def __init__(
        self,
        tables: RequestTables,
        kernels: AttentionKernels,
        new: NewPositions,
        *,
        backup: SideStream | None = None,
    ) -> None:
        self._spec = tables.spec
        self._memory = tables.memory
        self._index_pages = tables.state.index_pages
        self._page_size = tables.page_size
        self._miss_plan = tables.miss_plan
        self._kernels = kernels
        self._backup_stream = backup
        self._new = new
        self._requests = new.requests(tables.state)
        self._rows = new.place_rows(tables, self._requests)
        self._num_real_rows = new.count_real_rows()
        self._device_slots: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """int64 [num_rows]: the position of each row."""
        return self._rows.positions

    @property
    def device_slots(self) -> Tensor:
        """int32 [num_rows, index_topk]: the device slots of the items that the latest ``page_in`` brought, -1
        for none."""
        if self._device_slots is None:
            raise RuntimeError("no index group has been paged in")
        return self._device_slots

    # ``hisparse_pd.core.model.attention.KvAccess`` describes ``write``, ``select`` and ``attend``.

    def write(self, layer: int, kv: Tensor | None, index_keys: Tensor | None) -> None:
        memory, rows, num_layers = self._memory, self._rows, self._spec.num_layers
        kv_layer = self._spec.kv_layer_of_layer[layer]
        if kv is not None:
            self._kernels.kv_format.store(memory.k_dev[kv_layer], rows.device_slots, kv)
        if index_keys is not None:
            group = self._spec.index_group_of_layer[layer]
            self._kernels.index_format.store(memory.index[group], rows.index_slots, index_keys)
        verifies_drafts = self._new.ends is not None
        if layer >= num_layers:  # the draft layer
            self._store_checks(range(kv_layer, kv_layer + 1))
        elif layer == num_layers - 1 and verifies_drafts:  # the caller calls ``back_up`` later
            self._store_checks(self._model_layers)
        elif layer == num_layers - 1:
            self._back_up_beside_attention()

    def select(self, group: int, q_index: Tensor, weights: Tensor) -> Tensor:
        return self._select_rows(
            group, q_index, weights, slice(None), self._num_real_rows, self._kernels.indexer_scratch
        )

    def attend(self, layer: int, q: Tensor, positions: Tensor, scale: float) -> Tensor:
        return self.attend_at(layer, q, self.page_in(layer, positions), scale)

    def attend_at(self, layer: int, q: Tensor, device_slots: Tensor, scale: float) -> Tensor:
        """``attend`` to the layer's items at ``device_slots``, int32 [rows of q, n], -1 for none."""
        return self._kernels.step_attention.attend(q, self._items(layer), device_slots, scale)

    def page_in(self, layer: int, positions: Tensor) -> Tensor:
        """Bring the layer's items of ``positions``, which its index group selected, to the device.

        Returns ``device_slots``, which are the same in all layers of an index group. The group's first layer
        finds them, and records the misses in the miss plan; every further copy of the misses replays it.

        An entry of a hot buffer has items in all KV layers of its hot group, one or several index groups
        (``layer_sharing.py``). Misses are therefore copied into all of these KV layers, but spread over the
        index group's layers: ``kv_layers_filled_at[layer]`` are those filled just before ``layer`` attends.
        """
        kv_layers = self._spec.kv_layers_filled_at[layer]
        if not self._is_first_of_group(layer):
            self._replay_misses(kv_layers)
            return self.device_slots
        memory, hot_group = self._memory, self._hot_group(layer)
        # Other KV layers of the hot group need the same misses: the plan is recorded to replay them there.
        is_replayed = len(self._spec.kv_layers_of_hot_group[hot_group]) > 1
        device_slots = swap_in(
            self._new.expand_to_all_new(positions),
            self._requests,
            group=hot_group,
            layer=kv_layers[0],
            k_host=memory.k_host,
            k_dev=memory.k_dev,
            miss_plan=self._miss_plan if is_replayed else None,
        )
        self._replay_misses(kv_layers[1:])
        self._device_slots = self._new.take_own_rows(device_slots)
        return self._device_slots

    def write_draft_kv(self, model: DsaModel, token_ids: Tensor, hidden: Tensor) -> None:
        """Write the draft layer's KV of a step without drafts, and back it up.

        ``token_ids``: int64 [num_reqs], drawn behind the new positions; ``hidden``: [num_reqs, hidden_size],
        of the model's forward over these positions.
        The layer selects nothing here. ``page_in`` is called all the same, so that its hot buffers learn
        where the new positions are.
        """
        model.write_draft_kv(token_ids, hidden, self.positions, self)
        nothing = (len(token_ids), self._spec.index_topk)
        selected = torch.full(nothing, ABSENT, dtype=torch.int32, device=token_ids.device)
        self.page_in(self._spec.num_layers, selected)
        self._copy_to_host(self._requests)

    def back_up(self, seq_lens: Tensor, num_newest: Tensor) -> None:
        """Copy accepted positions to the host, in all layers, once all have them (I4).

        The positions are the last ``num_newest`` (int32 [num_reqs]) before ``seq_lens`` (int64 [num_reqs]).
        """
        self._copy_to_host(replace(self._requests, seq_lens=seq_lens, num_new=1), num_newest)

    def _is_first_of_group(self, layer: int) -> bool:
        return layer == self._spec.layers_of_group[self._spec.index_group_of_layer[layer]][0]

    def _hot_group(self, layer: int) -> int:
        return self._spec.hot_group_of_index_group[self._spec.index_group_of_layer[layer]]

    def _items(self, layer: int) -> Tensor:
        """The device pool's items that ``layer`` attends to."""
        return self._memory.k_dev[self._spec.kv_layer_of_layer[layer]]

    def _select_rows(
        self,
        group: int,
        q_index: Tensor,
        weights: Tensor,
        rows: slice,
        num_real: Tensor,
        scratch: IndexerScratch | None,
    ) -> Tensor:
        """``select`` for some ``rows``, of which the first ``num_real`` (int32 [1]) are not padding."""
        return paged_index_topk(
            q_index[rows],
            weights[rows],
            self._memory.index[group],
            self._index_pages,
            self._rows.req_rows[rows],
            self._rows.select_at[rows],
            num_real,
            page_size=self._page_size,
            top_k=self._spec.index_topk,
            key_format=self._kernels.index_format.name,
            scratch=scratch,
        )

    def _replay_misses(self, kv_layers: Sequence[int]) -> None:
        memory, state = self._memory, self._requests.state
        for kv_layer in kv_layers:
            replay_misses(self._miss_plan, kv_layer, memory.k_host, memory.k_dev, state=state)

    @property
    def _model_layers(self) -> range:
        """The layers of the KV pools without the draft layer's."""
        return range(self._spec.num_kv_layers - self._spec.num_draft_layers)

    def _store_checks(self, layers: range) -> None:
        """Store row checks of the new rows in one launch, once all ``layers`` have written them. Nothing
        looks at them before the next step."""
        memory, rows = self._memory, self._rows
        if memory.row_checks is not None:
            store_row_checks(
                memory.row_checks,
                rows.index_slots,
                memory.k_dev,
                rows.device_slots,
                rows.positions,
                layers,
            )

    def _back_up_beside_attention(self) -> None:
        """Copy new tokens, which all layers have written, to the host, and store their checks; meanwhile the
        last layer attends."""
        with nullcontext() if self._backup_stream is None else self._backup_stream.behind_current():
            self._copy_to_host(self._requests)
            self._store_checks(self._model_layers)

    def _copy_to_host(self, requests: StepRequests, num_newest: Tensor | None = None) -> None:
        memory = self._memory
        backup_newest(requests, k_host=memory.k_host, k_dev=memory.k_dev, num_newest=num_newest)
