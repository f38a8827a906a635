"""A decode node without processes, sockets and weights, whose model says whether what it read was right.

Books, plans, tables, swap-in, checks, drafts and the line of steps are the product's. In place of the model
stands ``RowReader``: its KV is a table by layer, position and token, and its next token is WRONG wherever a
row that it attended to is another one. Prefill nodes are the test's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from hisparse_pd.base.decode_settings import HisparsePolicy
from hisparse_pd.base.vocabulary import HisparseFlag, Mode, SamplingParams
from hisparse_pd.core.model.attention_kernels import AttentionKernels
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PromptKeys
from hisparse_pd.decode_node import scrub
from hisparse_pd.decode_node.device_step import DeviceStep
from hisparse_pd.decode_node.drafting import full_buffer
from hisparse_pd.decode_node.end_moves import EndMoves
from hisparse_pd.decode_node.key_pages import KeyPages
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.memory import DecodeMemory, slots_tensor
from hisparse_pd.decode_node.metrics import Metrics
from hisparse_pd.decode_node.miss_cost import MissCosts
from hisparse_pd.decode_node.peer_events import RoomMessage
from hisparse_pd.decode_node.plan_moves import PlanMoves
from hisparse_pd.decode_node.prefill_events import PrefillEvents
from hisparse_pd.decode_node.prefill_peers import PrefillPeers
from hisparse_pd.decode_node.queue_moves import QueueMoves
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_tables import RequestTables
from hisparse_pd.decode_node.runner import DeviceRunner
from hisparse_pd.decode_node.scrub import Scrubber
from hisparse_pd.decode_node.step_line import StepLine
from hisparse_pd.engine.lockstep import Lockstep
from hisparse_pd.engine.messages import FromEngine, Generate, pack_token_ids
from hisparse_pd.engine.prefix_scrub import PrefixScrub
from hisparse_pd.kernels.kv_format import KvFormat
from hisparse_pd.kernels.row_check import store_row_checks
from hisparse_pd.protocol.messages import Bootstrap, RoomDone, RoomQuiet
from tests.books import PEER
from tests.unit.decode_node.peers_support import FakePeers
from tests.unit.model.model_specs import make_spec

PAGE_SIZE = 4
CONTEXT = 48
TOP_K = 4
MAX_DRAFTS = 2
VOCAB_SIZE = 16
WRONG = VOCAB_SIZE - 1
"""The token that is drawn where a row was wrong."""
TOTALS = SlotCounts(host=96, device=64, index=160, lookup=192, aux=8, req_row=5)


def spec_of(num_draft_layers: int, *, has_row_checks: bool = True) -> ModelSpec:
    """Three layers, of which two share an indexer, and the draft layer if there is one."""
    return make_spec(
        num_layers=3,
        index_group_of_layer=(0, 0, 1) + (2,) * num_draft_layers,
        num_draft_layers=num_draft_layers,
        kv_lora_rank=3,
        qk_rope_head_dim=2,
        index_head_dim=4,
        index_topk=TOP_K,
        context_length=CONTEXT,
        hidden_size=1,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        dtype=torch.float32,
        kv_format="float32",
        index_format="float32",
        has_row_checks=has_row_checks,
    )


def right_token(token_id: Any, position: Any) -> Any:
    """What follows a token at a position."""
    return (3 * token_id + position + 1) % WRONG


def right_tokens(token_ids: Sequence[int], num_new: int) -> list[int]:
    """Return what follows a prompt."""
    given = [right_token(token_ids[-1], len(token_ids) - 1)]
    while len(given) < num_new:
        given.append(right_token(given[-1], len(token_ids) + len(given) - 1))
    return given


def need_of_exchange(request: Request, capacity: int, page_size: int) -> tuple[SlotCounts, SlotCounts]:
    """Return what a request needs beside a hot buffer of ``capacity`` entries, and with it."""
    need = SlotCounts()
    if request.mode is Mode.DENSE:
        num_shared = request.num_shared_pages * page_size
        num_slots = num_shared + request.owned.num_slots(PoolKind.INDEX)
        need = SlotCounts(host=num_slots, index=num_shared, lookup=num_slots)
    return need, need + SlotCounts(device=capacity)


class RowReader:
    """Stands for ``DsaModel``, its indexers and its attention. Selections are drawn with ``seed``."""

    ranks = None
    device = torch.device("cpu")
    hidden_size = 1

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.spec = spec
        self.random = torch.Generator().manual_seed(seed)
        shape = (spec.num_kv_layers, CONTEXT, VOCAB_SIZE, spec.item_dim)
        self.truth = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        if spec.num_draft_layers:  # whose rows are of two tokens, as they are known when they are made
            self.truth[-1] = self.truth[-1, :, :1]
        self.tokens = torch.zeros((TOTALS.req_row, CONTEXT), dtype=torch.int64)
        """The tokens of each row of the tables by position, with those of drafts."""
        self._new: tuple[Tensor, Tensor] | None = None
        self._req_rows = torch.empty(0, dtype=torch.int64)

    def items(self, layer: int, positions: Tensor, token_ids: Tensor) -> Tensor:
        return self.truth[layer, positions.clamp(0, CONTEXT - 1), token_ids]

    def forward(self, token_ids: Tensor, positions: Tensor, kv: DeviceStep, logit_rows: None) -> Tensor:
        return self.forward_with_hidden(token_ids, positions, kv, logit_rows)[0]

    def forward_with_hidden(
        self, token_ids: Tensor, positions: Tensor, kv: DeviceStep, logit_rows: None
    ) -> tuple[Tensor, Tensor]:
        self._new = token_ids, positions
        is_right = torch.ones_like(positions, dtype=torch.bool)
        selected = torch.empty(0)
        for layer in range(self.spec.num_layers):
            kv.write(layer, self.items(layer, positions, token_ids), None)
            selected = self._select(layer, positions, kv, selected)
            is_right &= self._attend(layer, selected, kv)
        self._new = None
        drawn = torch.where(is_right, right_token(token_ids, positions), WRONG)
        return _one_hot(drawn), positions[:, None].float()

    def draft(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        kv: DeviceStep,
        logit_rows: Tensor,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Right three times of four."""
        layer = self.spec.num_layers
        self.write_draft_kv(token_ids, hidden, positions, kv)
        self._attend(layer, self._select(layer, positions, kv, torch.empty(0)), kv)
        is_lucky = torch.rand(len(positions), generator=self.random) < 0.75
        drawn = torch.where(is_lucky, right_token(token_ids, positions + 1), 0)
        return _one_hot(drawn[logit_rows]), hidden

    def write_draft_kv(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, kv: DeviceStep) -> None:
        layer = self.spec.num_layers
        kv.write(layer, self.items(layer, positions, token_ids), None)

    def _select(self, layer: int, positions: Tensor, kv: DeviceStep, selected: Tensor) -> Tensor:
        group = self.spec.index_group_of_layer[layer]
        is_first = self.spec.layers_of_group[group][0] == layer
        return kv.select(group, positions, positions) if is_first else selected

    def _attend(self, layer: int, selected: Tensor, kv: DeviceStep) -> Tensor:
        token_ids = self.tokens[self._req_rows[:, None], selected.clamp(min=0)]
        wanted = self.items(layer, selected, token_ids)
        wanted[selected < 0] = torch.nan
        return kv.attend(layer, wanted, selected, 1.0)

    def index_topk(
        self, q_index: Tensor, weights: Tensor, keys: Tensor, page_table: Tensor, req_rows: Tensor,
        select_at: Tensor, num_real: Tensor, *, top_k: int, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Any positions up to each row's own, in place of ``paged_index_topk``."""
        is_there = select_at >= 0
        if self._new is not None:
            self.tokens[req_rows[is_there], select_at[is_there]] = self._new[0][is_there]
        self._req_rows = req_rows
        drawn = torch.rand((len(select_at), top_k), dtype=torch.float64, generator=self.random)
        drawn *= (select_at + 1)[:, None]
        return torch.where(is_there[:, None], drawn.int(), -1)

    name = reason = "reader"

    @property
    def kv_format(self) -> KvFormat:
        return self.spec.item_format

    def attend(
        self,
        q: Tensor,
        layer_pool: Tensor,
        device_slots: Tensor,
        scale: float,
        num_columns: Tensor | None = None,
    ) -> Tensor:
        """Whether all items of a row are what it wanted, nan for none: bool [num_rows]."""
        items = layer_pool[device_slots.clamp(min=0).long()]
        is_right = (items == q.view(torch.uint8)).all(dim=-1) & (device_slots >= 0)
        return (is_right | (q.isnan().all(dim=-1) & (device_slots < 0))).all(dim=-1)


def _one_hot(token_ids: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(token_ids, VOCAB_SIZE).float()


class Node:
    """``turn`` is what the engine's loop does, without its sockets. ``sent`` is for the front."""

    def __init__(
        self,
        spec: ModelSpec,
        seed: int,
        *,
        is_behind: bool,
        num_index_slots: int | None = None,
        num_device_slots: int = TOTALS.device,
        more_entries: int = 0,
    ) -> None:
        """``num_index_slots``: of an index pool that is short, with main memory below it. ``more_entries``:
        those of a hot buffer of the full size beside what a step needs."""
        totals = structs.replace(TOTALS, device=num_device_slots)
        if num_index_slots is not None:
            totals = structs.replace(totals, index=num_index_slots)
        max_drafts = MAX_DRAFTS * spec.num_draft_layers
        self.spec, self.model, self.peers = spec, RowReader(spec, seed), FakePeers(PAGE_SIZE)
        self.sent: list[FromEngine] = []
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.set_aside: Callable[[PoolKind, int], None] | None = None
        """Called with each page that is set aside, when it is."""
        self._patches: list[Any] = [
            patch("hisparse_pd.decode_node.device_step.paged_index_topk", self.model.index_topk),
            patch.object(scrub, "STEPS_BETWEEN", 4),
        ]
        buffer = full_buffer(max_drafts, TOP_K) + 1 + more_entries
        self.limits = Limits(totals, PAGE_SIZE, CONTEXT, TOP_K, buffer, 2 * PAGE_SIZE, max_drafts)
        self.memory = DecodeMemory(spec, totals, PAGE_SIZE, torch.device("cpu"))
        self.key_pages = None if num_index_slots is None else KeyPages(self.memory)
        self.requests = LiveRequests(Pools(totals, PAGE_SIZE), 1e9, self.key_pages)
        set_aside = self.requests.pools.set_aside

        def watched(kind: PoolKind, slot: int) -> int:
            start = set_aside(kind, slot)
            if self.set_aside is not None:
                self.set_aside(kind, start)
            return start

        start = self.requests.start

        def started(request: Request) -> None:
            tokens = torch.tensor(self.prompts[request.room])
            self.model.tokens[request.req_row, : len(tokens)] = tokens
            start(request)

        self._patches.append(patch.object(self.requests.pools, "set_aside", watched))
        self._patches.append(patch.object(self.requests, "start", started))
        self.tables = RequestTables(
            spec,
            self.memory,
            num_rows=TOTALS.req_row,
            num_lookup_slots=TOTALS.lookup,
            max_capacity=buffer,
            page_size=PAGE_SIZE,
            max_new=1 + max_drafts,
        )
        self.tables.fills.slice_bytes = 2 * spec.item_bytes  # so that rows are filled in several turns
        self.metrics, peers = Metrics(), cast(PrefillPeers, self.peers)
        self.end_moves = EndMoves(self.requests, self.tables, peers, self.metrics, self.sent.append)
        self.queue_moves = QueueMoves(
            self.limits, HisparsePolicy.AUTO, 1e9, self.requests, peers, self.end_moves, 1e9
        )
        self.plan_moves = PlanMoves(
            self.limits, self.requests, self.tables, peers, self.metrics, self.queue_moves, self.end_moves
        )
        self.prefill_events = PrefillEvents(self.queue_moves, self.plan_moves)
        kernels = AttentionKernels(spec.item_format, spec.index_key_format, self.model, self.model)
        runner = DeviceRunner(
            self.model,  # type: ignore[arg-type]
            self.tables,
            kernels,
            max_reqs=TOTALS.req_row,
            graph_batches=(),
            min_split_reqs=0,
            is_behind=is_behind,
        )
        kv = {PoolKind.HOST: self.memory.k_host, PoolKind.DEVICE: self.memory.k_dev}
        self.prefix_scrub = PrefixScrub(
            self.requests.held,
            self.requests.set_aside,
            PAGE_SIZE,
            kv,
            {} if self.memory.row_checks is None else {PoolKind.INDEX: self.memory.row_checks},
            None if self.key_pages is None else self.key_pages.row_checks,
        )
        self.steps = StepLine(
            runner,
            Lockstep(None),
            self.requests,
            self.tables,
            self.plan_moves,
            most_drafts=max_drafts,
            scrubber=Scrubber(self.tables),
            miss_costs=MissCosts(spec.index_topk, 0.0),
        )
        by_turns = count()
        self.steps.draft_choice.choose = lambda num_reqs, most: min(next(by_turns) % 3, most)  # type: ignore[method-assign]
        for each in self._patches:
            each.start()

    def close(self) -> None:
        for each in self._patches:
            each.stop()
        if self.key_pages is not None:
            self.key_pages.close()
        self.memory.close()

    def generate(self, prompt: Sequence[int], num_new: int, flag: HisparseFlag) -> int:
        """Returns the room."""
        room = len(self.prompts)
        self.prompts[room] = tuple(prompt)
        sampling = SamplingParams(max_new_tokens=num_new, temperature=0.0)
        message = Generate(str(room), room, len(prompt), sampling, PEER.host, PEER.port, flag)
        keys = PromptKeys.of(NO_ISOLATION, pack_token_ids(prompt), PAGE_SIZE)
        self.queue_moves.generate(message, NO_ISOLATION, pack_token_ids(prompt), time.monotonic(), keys)
        return room

    def turn(self) -> None:
        now = time.monotonic()
        self.end_moves.release_ended(now)
        self.prefill_events.expire_quarantine(now)
        self.plan_moves.go_on_with_fetched(now)
        self.queue_moves.expire(now)
        self.queue_moves.refresh(now)
        self.steps.carry_out_plan(now)
        self.steps.advance(is_stopping=False)
        if not self.requests:
            self.prefix_scrub.verify_next()
        self.requests.check_integrity()

    def tokens_of(self, request: Request) -> list[int]:
        return [*self.prompts[request.room], *request.output_token_ids]

    # --- a prefill node ---------------------------------------------------------------------------

    def write(self, request: Request) -> Bootstrap:
        """The KV of a prompt's tokens but the last, its checks, and the aux record."""
        memory, bootstrap = self.memory, self.peers.bootstraps[request.room]
        positions = torch.arange(bootstrap.num_held_tokens, bootstrap.num_computed_tokens)
        token_ids = torch.tensor(self.prompts[request.room])[positions]
        slots, check_slots = slots_tensor(bootstrap.kv_extents), slots_tensor(bootstrap.index_extents)
        pool = memory.k_host if bootstrap.hisparse else memory.k_dev
        for layer in range(self.spec.num_kv_layers):
            pool[layer, slots] = self.model.items(layer, positions, token_ids).view(torch.uint8)
        if memory.row_checks is not None:
            layers = range(self.spec.num_kv_layers)
            store_row_checks(memory.row_checks, check_slots, pool, slots, positions, layers)
        hint = np.full((self.spec.num_index_groups, TOP_K), -1, np.int32)
        hint[:, 0] = positions[-1]
        record = memory.aux[bootstrap.aux_slot].numpy()
        memory.aux_layout.pack_into(record, request.room, hint)
        return bootstrap

    def say_done(self, request: Request) -> None:
        self._say(RoomDone(request.room, 1000, 0, 0.001))

    def leave(self, request: Request) -> None:
        """Its client is gone, and its prefill node writes no more."""
        self.end_moves.abort(request.request_id, time.monotonic())
        self._say(RoomQuiet(request.room, False))

    def _say(self, message: RoomDone | RoomQuiet) -> None:
        self.prefill_events.handle(RoomMessage(PEER, self.peers.instance, message), time.monotonic())

    def is_right(self, pool: Tensor, slots: Tensor, token_ids: Sequence[int]) -> Tensor:
        """Return for each layer and position whether its row is right: bool [num_layers, num_tokens]."""
        positions, tokens = torch.arange(len(token_ids)), torch.tensor(token_ids)
        wanted = torch.stack(
            [self.model.items(layer, positions, tokens) for layer in range(self.spec.num_kv_layers)]
        )
        return (pool[:, slots] == wanted.view(torch.uint8)).all(dim=-1)
