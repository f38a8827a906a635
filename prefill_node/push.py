"""Submits a request's KV to the sender, layer by layer while the next layers compute.

``PromptSteps`` calls ``push_cached`` for the cached prefix of an admitted request, which no forward writes.
For each chunk it calls ``plan``, and from within the forward ``layer_written``, as layers are written.
``PrefillLife`` calls ``push_aux`` after the last chunk. A ``ChunkPush`` is the state of one chunk's push; the
``Pusher`` itself keeps none.

``plan`` turns page ids and extents into runs of token slots that are contiguous on both sides. A batch
carries whole layers of the chunk, KV, indexer keys and row checks together. Runs become addresses only when
the sender writes them, slice by slice, so a cached prefix of gigabytes is one batch. The aux record is a
batch of its own and is submitted last: the sender keeps a room's batches in order and starts none after a
failed one.

A written layer waits while all waiting layers make less than ``MIN_BATCH_BYTES``, and while the sender has
``MAX_PENDING_BATCHES`` of the room; it then leaves with a later layer, at the latest with the chunk's last.
The forward's thread therefore works in proportion to the bytes, and a slow transport gets fewer and larger
batches.

A decode node that takes its bytes more slowly than they come keeps pages here that other nodes' prompts need.
``may_start`` therefore holds further long prompts back while much is pending for that node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hisparse_pd.core.paging.extents import SlotRanges, slice_extents
from hisparse_pd.prefill_node.registrations import Peer, kv_region_of
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.protocol.messages import Extent, RegionKind
from hisparse_pd.transfer.plan import SLICE_BYTES, LayerWrites, RegionView, SlicedWrites, plan_writes
from hisparse_pd.transfer.sender import Ready, Sender, WriteBatch

MIN_BATCH_BYTES = 256 << 10
"""Fewest bytes of a batch of layers. A batch costs the forward's thread 30 us and the sender's thread more;
TCP moves about as many bytes in that time."""

WRITE_TIMEOUT_SECS = 60.0
"""Time limit of one slice, from its start: 32 MiB at half a megabyte a second, and twice Mooncake's own time
limit of 30 s."""

MAX_PENDING_BATCHES = 2
"""Batches of a room with the sender: one in the transport and one after it, so that the transport need not
wait for the next layer."""

PENDING_DIVISOR = 4
"""Long prompts wait while more than 1 / PENDING_DIVISOR of the pool's bytes are pending for their node."""


class NumWritten(NamedTuple):
    """Numbers of layers, from the first on, that are written in two of the source's regions."""

    kv_layers: int
    index_groups: int


@dataclass(frozen=True, slots=True)
class SourceRegions:
    """This node's registered memory. ``aux`` is one layer with a slot per request that owns pages.

    Layers of the model may share KV or indexer keys. ``kv_layer_of_layer`` and ``index_group_of_layer``: for
    each layer of the model, the layer of ``kv`` and of ``index`` that it reads. The first one to read a layer
    also writes it: with (0, 0, 1), the second one writes nothing. ``row_checks`` has the slots and
    layers of ``kv`` here, or is None when this node computes none.
    """

    kv: RegionView
    index: RegionView
    aux: RegionView
    kv_layer_of_layer: tuple[int, ...]
    index_group_of_layer: tuple[int, ...]
    row_checks: RegionView | None = None

    def num_written(self, num_layers: int) -> NumWritten:
        """Return how many layers of ``kv`` and ``index`` the model's first ``num_layers`` layers write."""
        kv_layers, index_groups = (
            of_layer[:num_layers] for of_layer in (self.kv_layer_of_layer, self.index_group_of_layer)
        )
        return NumWritten(max(kv_layers, default=-1) + 1, max(index_groups, default=-1) + 1)

    def num_layers_until(self, num_kv: int, num_index: int) -> int:
        """Return how many of the model's layers must have run until the first ``num_kv`` layers of ``kv`` and
        ``num_index`` of ``index`` are written."""
        return (
            max(self.kv_layer_of_layer.index(num_kv - 1), self.index_group_of_layer.index(num_index - 1)) + 1
        )


@dataclass(eq=False, slots=True)
class ChunkPush:
    """Writes of all layers of a request's positions ``[start, stop)``, and how many layers were submitted."""

    request: PrefillRequest
    start: int
    stop: int
    kv: LayerWrites
    index: LayerWrites
    row_checks: LayerWrites | None
    """None when no row checks are sent: this node computes none, or the decode node takes none."""
    layer_bytes: int
    """Bytes of KV in one layer."""
    num_layers: int
    """Layers of the model that write what the decode node takes. A node that does not draft takes nothing of
    the draft layer."""
    num_layers_written: int = 0
    num_layers_submitted: int = 0


class Pusher:
    """Plans and submits writes. The request's ``num_writes_pending`` counts its batches; pages must stand
    until each has come back. ``slice_bytes(session)``: the limit of a slice, the part of a batch that is
    written at a time; small ranges count as more bytes than they have (``transfer.plan.cost``)."""

    def __init__(
        self,
        sender: Sender,
        source: SourceRegions,
        page_size: int,
        min_batch_bytes: int = MIN_BATCH_BYTES,
        slice_bytes: Callable[[str], int] = lambda session: SLICE_BYTES,
    ) -> None:
        self.sender = sender
        self._source = source
        self._page_size = page_size
        self.write_timeout_secs = WRITE_TIMEOUT_SECS
        self.min_batch_bytes = min_batch_bytes
        self._slice_bytes = slice_bytes
        self._token_bytes = sum(
            region.num_layers * region.item_bytes
            for region in (source.kv, source.index, source.row_checks)
            if region is not None
        )
        self._max_pending_bytes = source.kv.num_slots * self._token_bytes // PENDING_DIVISOR

    def plan(self, request: PrefillRequest, start: int, stop: int) -> ChunkPush:
        """Return the push of positions ``[start, stop)`` without those that the decode node holds; nothing is
        submitted yet."""
        peer, bootstrap = request.peer, request.bootstrap
        num_held = bootstrap.num_held_tokens
        # ``start`` becomes ``stop`` when the decode node holds the whole chunk.
        start = min(max(start, num_held), stop)
        src_slots = SlotRanges.of_pages(request.page_ids, self._page_size, start, stop)

        def all_layers(src: RegionView, dst: RegionView, extents: tuple[Extent, ...]) -> LayerWrites:
            # Extents begin with the first position that is not held.
            landing = slice_extents(extents, max(start - num_held, 0), max(stop - num_held, 0))
            runs = plan_writes(src_slots, SlotRanges.of_extents(landing))
            return LayerWrites(runs, src, dst, 0, dst.num_layers)

        kv = all_layers(self._source.kv, peer.regions[kv_region_of(bootstrap)], bootstrap.kv_extents)
        index = all_layers(self._source.index, peer.regions[RegionKind.INDEX], bootstrap.index_extents)
        row_checks, checks_dst = None, peer.regions.get(RegionKind.ROW_CHECKS)
        if self._source.row_checks is not None and checks_dst is not None:
            # The decode node has a position's check at the slot of its indexer key.
            row_checks = LayerWrites(
                index.runs, self._source.row_checks, checks_dst, 0, checks_dst.num_layers
            )
            row_checks.check()
        kv.check()
        index.check()
        layer_bytes = (stop - start) * self._source.kv.item_bytes
        num_layers = self._source.num_layers_until(kv.dst.num_layers, index.dst.num_layers)
        return ChunkPush(request, start, stop, kv, index, row_checks, layer_bytes, num_layers)

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of so many positions in all pools."""
        return num_tokens * self._token_bytes

    def num_bytes_pending(self, peer: Peer) -> int:
        """Return the bytes that are submitted for a decode node and not written yet."""
        return self.sender.num_bytes_pending(peer.session)

    def may_start(self, request: PrefillRequest, num_bytes_pending: int) -> bool:
        """Return whether the request may start to send to its decode node, for which so many bytes are
        pending."""
        num_tokens = request.num_computed_tokens - request.bootstrap.num_held_tokens
        is_short = self.num_bytes(num_tokens) <= SLICE_BYTES
        return is_short or num_bytes_pending <= self._max_pending_bytes

    def layer_written(self, pushes: Sequence[ChunkPush], layer: int, ready: Ready | None = None) -> None:
        """Submit the layers of these chunks that are due, now that the forward has written ``layer`` and all
        before it.

        ``ready``: see ``WriteBatch``; it must cover the earlier layers, too. Raises ValueError for a layer
        that does not come next or later.
        """
        num_layers = len(self._source.kv_layer_of_layer)
        for push in pushes:
            if not push.num_layers_written <= layer < num_layers:
                raise ValueError(
                    f"layer {layer} was written after {push.num_layers_written} of {num_layers} layers; "
                    "they must be written in order, each once"
                )
            push.num_layers_written = layer + 1
            num_taken = min(push.num_layers_written, push.num_layers)  # a decode node may take no draft layer
            if num_taken > push.num_layers_submitted and (num_taken == push.num_layers or self._is_due(push)):
                self._submit_layers(push, num_taken, ready)

    def push_cached(self, request: PrefillRequest) -> None:
        """Submit all layers of the request's cached prefix, without what the decode node holds."""
        push = self.plan(request, 0, request.num_cached_tokens)
        self._submit_layers(push, push.num_layers, None)

    def push_aux(self, request: PrefillRequest) -> None:
        """Submit the aux record, which is already in the request's slot of the aux staging memory."""
        if request.aux_slot_src is None:
            raise ValueError(f"room {request.room} has no aux slot to send its aux record from")
        peer, bootstrap = request.peer, request.bootstrap
        source, dst = self._source.aux, peer.regions[RegionKind.AUX]
        slot_addr = source.base_addr + request.aux_slot_src * source.item_bytes
        # A peer that does not draft takes records that are shorter than the slots here.
        slot = RegionView(
            slot_addr, num_bytes=source.item_bytes, num_layers=1, num_slots=1, item_bytes=dst.item_bytes
        )
        writes = LayerWrites(
            plan_writes(SlotRanges.of_slots([0]), SlotRanges.of_slots([bootstrap.aux_slot])), slot, dst, 0, 1
        )
        writes.check()
        self.submit(request, "aux record", (writes,), None)

    def submit(
        self, request: PrefillRequest, tag: str, parts: Sequence[LayerWrites], ready: Ready | None
    ) -> None:
        """Submit one batch for the request's decode node. ``tag`` names it in errors."""
        session = request.peer.session
        writes = SlicedWrites(parts, self._slice_bytes(session))
        batch = WriteBatch(
            request.room,
            tag,
            writes,
            writes.num_bytes,
            request.deadline_secs,
            self.write_timeout_secs,
            ready,
        )
        self.sender.submit(session, batch)
        request.num_writes_pending += 1

    def cancel(self, request: PrefillRequest) -> None:
        """Keep the request's waiting batches from starting; each still gets its completion."""
        self.sender.cancel(request.room)

    def _is_due(self, push: ChunkPush) -> bool:
        """Return whether the waiting layers should leave before the chunk's last layer is written."""
        written = self._source.num_written(push.num_layers_written)
        submitted = self._source.num_written(push.num_layers_submitted)
        num_waiting = written.kv_layers - submitted.kv_layers  # KV has most of the bytes
        return (
            num_waiting > 0
            and num_waiting * push.layer_bytes >= self.min_batch_bytes
            and self.sender.num_pending(push.request.room) < MAX_PENDING_BATCHES
        )

    def _submit_layers(self, push: ChunkPush, stop: int, ready: Ready | None) -> None:
        """Submit the model's layers up to ``stop`` that are not submitted yet, as one batch."""
        first = push.num_layers_submitted
        if push.start == push.stop:
            return
        firsts, stops = self._source.num_written(first), self._source.num_written(stop)
        parts = [
            push.kv.of_layers(firsts.kv_layers, stops.kv_layers),
            push.index.of_layers(firsts.index_groups, stops.index_groups),
        ]
        if push.row_checks is not None:
            parts.append(push.row_checks.of_layers(firsts.kv_layers, stops.kv_layers))
        tag = f"positions [{push.start}, {push.stop}) of layers [{first}, {stop})"
        self.submit(push.request, tag, parts, ready)
        push.num_layers_submitted = stop
