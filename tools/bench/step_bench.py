"""Running requests of a decode node without its engine, their pools, and their steps.

Every request has slots of its own with a copy of one prompt's KV (``step_prompt.py``), and a first token of
its own. ``Bench.run`` takes steps as a decode node's loop does.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import HisparseFlag, Mode, SamplingParams, StartError
from hisparse_pd.core.grammar.token_trie import Grammar
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts, round_up
from hisparse_pd.decode_node.draft_choice import DraftChoice
from hisparse_pd.decode_node.drafting import full_buffer
from hisparse_pd.decode_node.memory import DecodeMemory, slots_tensor
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.runner import DeviceRunner, make_runner
from hisparse_pd.decode_node.sizing import LOOKUPS_PER_HOST_TOKEN
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.engine.lockstep import NodeStep
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import Room
from tools.bench.step_memory import MemoryByPart, planned_pools
from tools.bench.step_prompt import PAGE_SIZE, Prefilled, random_tokens, synchronize

RESIDENT: Final = "resident"
"""Name of hisparse requests that have pages on the device and no hot buffer, among MODES."""
MODES: Final = (*Mode, RESIDENT)
GRAMMAR = "start: %json " + json.dumps(
    {
        "type": "array",
        "minItems": 1_000_000,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "kind": {"enum": ["read", "write", "call"]},
                "count": {"type": "integer"},
                "share": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
            },
            "required": ["name", "kind", "count", "share", "tags"],
            "additionalProperties": False,
        },
    }
)
"""Endless JSON: an array that may not end within any number of steps that is measured."""


def slots_of_one(
    spec: ModelSpec,
    settings: DecodeSettings,
    mode: Mode,
    context: int,
    num_steps: int,
    *,
    is_resident: bool = False,
) -> SlotCounts:
    """Return the slots of a request for its prompt and four times ``num_steps`` steps: those untimed, timed
    and profiled, and as many to spare. ``is_resident``: whether one that is hisparse has pages on the device
    and no hot buffer. Raises StartError."""
    num_new = settings.speculative_num_steps + 1
    # Behind the prompt: all tokens of the steps, the first token that ``Bench`` gives, and a step in flight.
    most_tokens = context + 4 * num_steps * num_new + 1 + num_new
    is_hisparse = mode is Mode.HISPARSE
    has_buffer = is_hisparse and not is_resident
    hot_capacity = min(settings.device_buffer_size, most_tokens) if has_buffer else 0
    if 0 < hot_capacity < min(full_buffer(num_new - 1, spec.index_topk), most_tokens):
        raise StartError(
            f"--buffer {hot_capacity}: a step with {num_new - 1} drafts may select more positions; "
            f"give at least {full_buffer(num_new - 1, spec.index_topk)}"
        )
    return SlotCounts(
        host=most_tokens if is_hisparse else 0,
        device=hot_capacity or most_tokens,
        index=most_tokens,
        lookup=most_tokens if is_hisparse else 0,
        aux=0,
        req_row=1,
    )


def slots_of_all(need: SlotCounts, batch: int) -> SlotCounts:
    """Return the slots of pools for ``batch`` requests that take ``need`` each, in whole pages."""
    host = max(PAGE_SIZE, round_up(need.host, PAGE_SIZE) * batch)
    return SlotCounts(
        host=host,
        device=round_up(need.device, PAGE_SIZE) * batch,
        index=round_up(need.index, PAGE_SIZE) * batch,
        lookup=LOOKUPS_PER_HOST_TOKEN * host,
        aux=1,
        req_row=batch,
    )


class Bench:
    """``max_running_requests`` running requests that all have the same prompt, their pools, and steps."""

    def __init__(
        self,
        spec: ModelSpec,
        model: DsaModel,
        settings: DecodeSettings,
        prompt: Prefilled,
        mode: Mode,
        num_steps: int,
        grammar: Grammar | None,
        *,
        chooses_drafts: bool = False,
        is_resident: bool = False,
    ) -> None:
        """``num_steps``: the most steps of one ``run``; there are slots for four such runs. ``grammar``:
        binds all answers to endless JSON. ``chooses_drafts``: whether steps choose their number of drafts as
        a decode node does. ``is_resident``: whether hisparse requests have pages on the device and no hot
        buffer."""
        used = MemoryByPart(model.device)
        used.mark("before")
        batch = settings.max_running_requests
        self._num_new = settings.speculative_num_steps + 1
        self._choice = DraftChoice(settings.speculative_num_steps) if chooses_drafts else None
        self._spec, self._prompt, self._grammar = spec, prompt, grammar
        # Number of this rank's first request among those of all ranks.
        self._first_number = batch * (0 if model.ranks is None else model.ranks.rank)
        need = slots_of_one(spec, settings, mode, prompt.kv.shape[1], num_steps, is_resident=is_resident)
        hot_capacity = need.device if mode is Mode.HISPARSE and not is_resident else 0
        pools = Pools(slots_of_all(need, batch), PAGE_SIZE)
        self.memory = DecodeMemory(spec, pools.totals, PAGE_SIZE, model.device)
        used.mark("pools")
        self.tables = RequestTables(
            spec,
            self.memory,
            num_rows=batch,
            num_lookup_slots=pools.totals.lookup,
            max_capacity=max(self._num_new, hot_capacity),
            page_size=PAGE_SIZE,
            max_new=self._num_new,
        )
        used.mark("tables")
        self.runner: DeviceRunner = make_runner(settings, model, self.tables)
        used.mark("graphs and workspaces")
        self.requests = [self._admit(pools, need, number, mode, hot_capacity) for number in range(batch)]
        self.used, self.planned = used, planned_pools(settings, spec, pools.totals)
        self.totals = SwapCounts()
        """Hits, misses and evictions of all requests so far."""
        self.num_tokens = 0
        """Tokens that all steps so far have given the requests."""

    def run(self, num_steps: int) -> float:
        """Take ``num_steps`` steps and return their seconds. As in a decode node, a step is launched before
        the previous one's tokens are read, and draws its own tokens afterwards."""
        synchronize(self.tables.device)
        started = time.perf_counter()
        previous = None
        for _ in range(num_steps):
            is_split, num_new = self.runner.would_split(self.requests), self._next_num_new()
            launched = self.runner.launch(
                self.requests, NodeStep(len(self.requests), is_split, num_new=num_new)
            )
            if previous is not None:
                self.commit(previous)  # while the device computes the step just launched
            launched.draw()
            previous = launched
            if not launched.feeds_next:  # the next launch needs this step's results
                self.commit(launched)
                previous = None
            if self._choice is not None:
                self._choice.note_turn(len(self.requests), num_new - 1, time.monotonic())
        if self._choice is not None:  # so that the time until the next call counts for no step
            self._choice.note_turn(0, 0, time.monotonic())
        if previous is not None:
            self.commit(previous)
        synchronize(self.tables.device)
        return time.perf_counter() - started

    def _next_num_new(self) -> int:
        """Return the positions of a request in the next step: its newest token and the chosen drafts."""
        if self._choice is None:
            return self._num_new
        allowed = self._num_new - 1
        most = max(self.tables.max_verifiable(request, allowed) for request in self.requests)
        return 1 + self._choice.choose(len(self.requests), most)

    def commit(self, launched: Any) -> None:
        """Wait for a step's results and enter them into the requests."""
        launched.take_requests_out()  # a request must have left the step before its tokens are entered
        for request, result in zip(launched.batch, launched.result(), strict=True):
            if result.error:
                raise RuntimeError(f"a step reported {result.error}")
            request.output_token_ids += result.token_ids
            if request.matcher is not None:
                for token_id in result.token_ids:
                    request.matcher.advance(token_id)
            # If the next step is launched already, it has taken these drafts on the device.
            request.draft_token_ids = [] if request.num_in_flight else result.drafts
            request.row_counters = result.counters
            if self._choice is not None and result.num_drafted:
                self._choice.note_verified(result.num_drafted, len(result.token_ids) - 1)
            self.num_tokens += len(result.token_ids)
        self.totals = self.tables.totals(self.requests)

    def _admit(self, pools: Pools, need: SlotCounts, number: int, mode: Mode, hot_capacity: int) -> Request:
        """Return a request with a first token and slots of its own, in which the prompt's KV lies."""
        room, context, most_tokens = Room(number + 1), self._prompt.kv.shape[1], need.index
        request = Request(
            request_id=str(number),
            room=room,
            num_prompt_tokens=context,
            sampling=SamplingParams(
                max_new_tokens=most_tokens - context + 1,
                temperature=0.0,
                ignore_eos=True,
                grammar=GRAMMAR if self._grammar else "",
            ),
            flag=HisparseFlag.TRUE,
            peer=PeerAddress("", 0),
            arrived_at=0.0,
            prompt=pack_token_ids([0]),
            state=RequestState.RUNNING,
            mode=mode,
            holding=pools.reserve(room, need),
            reserved_tokens=most_tokens,
            hot_capacity=hot_capacity,
            admitted_seq=number,
        )
        if self._grammar is not None:
            request.matcher = self._grammar.matcher(ignore_eos=True)
        # First tokens differ between ranks too, so that not all ranks choose the same experts.
        newest = random_tokens(self._spec, self._first_number + number + 1)[-1]
        request.output_token_ids.append(int(newest))
        self._land(request)
        self.tables.start(request)
        self.tables.fills.launch_all(request.req_row)
        return request

    def _land(self, request: Request) -> None:
        """Copy the prompt's KV, indexer keys and row checks to the request's slots, and give a hisparse
        request the hint."""
        holding, prompt = request.owned, self._prompt
        context = prompt.kv.shape[1]
        if request.mode is Mode.HISPARSE:
            first = holding[PoolKind.HOST][0].start  # one extent, since nothing was ever freed
            self.memory.k_host[:, first : first + context] = prompt.kv_host
            request.hot_positions = self.tables.by_hot_group(prompt.hints.numpy())
        else:
            slots = slots_tensor(holding[PoolKind.DEVICE])[:context].to(self.memory.k_dev.device)
            self.memory.k_dev[:, slots] = prompt.kv
        index_slots = slots_tensor(holding[PoolKind.INDEX])[:context].to(self.memory.index.device)
        self.memory.index[:, index_slots] = prompt.index
        if self.memory.row_checks is not None and prompt.row_checks is not None:
            self.memory.row_checks[:, index_slots] = prompt.row_checks
