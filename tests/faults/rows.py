"""Wrong rows, as failing memory or a faulty prefill node would make them.

A file, read each time, says ``KIND SHARE``: the kind of damage and how often it is done. Each damage adds a
line to a report beside the file. All of it happens in the engine's own thread.

flipped landing  bits of what has landed for a room change before its landing is processed
neighbours       bits of free index pages, and of their checks, change when others are given out
cached           bits of unused cached rows change before the prefill node plans
other layer      a batch has the next layer's rows in each of its layers but the last
other positions  a batch has the next position's row at each position
early            rows are sent before the forward that computes them
repeated         a batch is sent twice
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse_pd.core.paging.extents import extents_to_slots, ranges_to_slots, slice_extents
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.transfer.plan import LayerWrites, RegionView
from tests.faults.canaries import free_slots
from tests.slot_plans import plan_slots
from tests.waiting import wait_until

NUM_BITS = 20
"""Bits that one damage flips."""


class RowFaults:
    """Row faults of one engine. ``order``: the file that says what to do."""

    def __init__(self, order: Path) -> None:
        self._order = order
        self._random = random.Random(5)

    def is_due(self, kind: str) -> bool:
        if not self._order.exists():
            return False
        asked, _, share = self._order.read_text().rpartition(" ")
        if asked != kind or self._random.random() >= float(share):
            return False
        with report_of(self._order).open("a") as file:
            file.write(f"{kind}\n")
        return True

    def flip(self, items: Tensor, slots: Any) -> None:
        """Flip bits of ``items``, uint8 [num_layers, num_slots, item_bytes], at some of ``slots``."""
        for _ in range(NUM_BITS if len(slots) else 0):
            slot, layer = int(self._random.choice(slots)), self._random.randrange(len(items))
            items[layer, slot, self._random.randrange(items.shape[2])] ^= 1 << self._random.randrange(8)


def report_of(order: Path) -> Path:
    return order.with_suffix(".done")


def put_in_row_faults(order: Path) -> None:
    """Put row faults into every engine that this process makes from now on."""
    faults = RowFaults(order)
    _damage_decode_nodes(faults)
    _damage_prefill_nodes(faults)


def _damage_decode_nodes(faults: RowFaults) -> None:
    import hisparse_pd.decode_node.plan_moves
    import hisparse_pd.decode_node.prefill_events

    events: Any = hisparse_pd.decode_node.prefill_events.PrefillEvents
    moves: Any = hisparse_pd.decode_node.plan_moves.PlanMoves
    take_kv, reserve = events.take_kv, moves.reserve

    def take_damaged_kv(self: Any, request: Any, message: Any, now: float) -> None:
        start, stop = request.held_prefix_tokens, request.num_prompt_tokens
        if start < stop and faults.is_due("flipped landing"):
            memory, kind = self.plans.tables.memory, request.kv_pools[0]
            pool = memory.k_host if kind is PoolKind.HOST else memory.k_dev
            faults.flip(pool, extents_to_slots(slice_extents(request.extents(kind), start, stop)))
        take_kv(self, request, message, now)

    def reserve_beside_damage(self: Any, admission: Any, now: float) -> Any:
        landing = reserve(self, admission, now)
        if faults.is_due("neighbours"):
            memory, slots = self.tables.memory, free_slots(self.requests.pools, PoolKind.INDEX)
            faults.flip(memory.index, slots)
            faults.flip(memory.row_checks[:, :, None].view(torch.uint8), slots)
        return landing

    events.take_kv, moves.reserve = take_damaged_kv, reserve_beside_damage


def _damage_prefill_nodes(faults: RowFaults) -> None:
    import hisparse_pd.prefill_node.compute
    import hisparse_pd.prefill_node.prompt_steps
    import hisparse_pd.prefill_node.push

    steps: Any = hisparse_pd.prefill_node.prompt_steps.PromptSteps
    pusher: Any = hisparse_pd.prefill_node.push.Pusher
    runner: Any = hisparse_pd.prefill_node.compute.PromptRunner
    plan, submit, run = steps.plan, pusher.submit, runner.run
    sender: Any = None  # the engine's, known from its first plan on

    def plan_behind_damage(self: Any) -> Any:
        nonlocal sender
        life, sender = self.life, self.life.pusher.sender
        unused = [
            each for each in life.pages.prefixes if not each.num_users
        ]  # the others are being sent, after a check
        if life.waiting() and unused and faults.is_due("cached"):
            cached = [extent for each in unused for extent in each.holding[PoolKind.DEVICE]]
            faults.flip(self.memory.kv, extents_to_slots(cached))
        return plan(self)

    def submit_damaged(self: Any, record: Any, tag: str, parts: Sequence[LayerWrites], ready: Any) -> None:
        if len(parts) > 1:  # else it is an aux record
            if faults.is_due("other layer"):
                parts = [*_of_next_layer(parts[0]), *parts[1:]]
            if faults.is_due("other positions"):
                parts = [_of_next_tokens(parts[0]), *parts[1:]]
            if faults.is_due("repeated"):
                submit(self, record, tag, parts, ready)
        submit(self, record, tag, parts, ready)

    def run_behind_the_writes(self: Any, batch: Any, on_written: Any, meanwhile: Any) -> Any:
        if on_written is not None and faults.is_due("early"):
            for layer in range(self._model.spec.num_kv_layers):
                on_written(layer, None)
            wait_until(lambda: not any(sender.num_pending(record.room) for record, _ in batch), "the writes")
            on_written = None
        return run(self, batch, on_written, meanwhile)

    steps.plan, pusher.submit, runner.run = plan_behind_damage, submit_damaged, run_behind_the_writes


def _of_next_layer(part: LayerWrites) -> list[LayerWrites]:
    src = part.src
    next_layers = RegionView(
        src.base_addr + src.layer_bytes,
        src.num_bytes - src.layer_bytes,
        src.num_layers - 1,
        src.num_slots,
        src.item_bytes,
    )
    last = part.stop - 1
    return [replace(part, src=next_layers, stop=last), part.of_layers(last, part.stop)]


def _of_next_tokens(part: LayerWrites) -> LayerWrites:
    src, dst = (ranges_to_slots(at, part.runs.length) for at in (part.runs.src_start, part.runs.dst_start))
    return replace(part, runs=plan_slots(np.roll(src, -1), dst))
