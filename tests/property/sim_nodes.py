"""What both nodes have beside their engines: fronts, and forwards that leave a tag where KV would be.

A tag says of which tokens, behind which root, and of which layer it is. So a request that reads bytes which
are not its own, or were computed for one with another isolation, is found at its next step.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.decode_node.drafting import max_verifiable
from hisparse_pd.decode_node.memory import DecodeMemory
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_tables import copy_prompt
from hisparse_pd.decode_node.step_results import StepResult
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.engine.lockstep import NodeStep
from hisparse_pd.engine.messages import (
    EngineReady,
    EngineStats,
    FromEngine,
    RequestFailed,
    ToEngine,
    Tokens,
)
from hisparse_pd.prefill_node.compute import Computed, LayerWritten
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.prefill_node.scheduler import Chunk
from tests.property.sim_transport import SafetyViolation
from tests.slot_plans import expand_pages
from tests.unit.model.model_specs import make_spec

PAGE_SIZE = 4
TAG_BYTES = 16
NEXT_TOKEN = 6
MAX_CONTEXT = 40
MAX_NEW = 3

SPEC: ModelSpec = make_spec(
    num_layers=3,
    index_group_of_layer=(0, 1, 1),
    kv_lora_rank=4,
    qk_rope_head_dim=4,
    index_head_dim=8,
    index_topk=4,
    context_length=MAX_CONTEXT,
    vocab_size=16,
)
assert SPEC.item_bytes == SPEC.index_item_bytes == TAG_BYTES


@lru_cache(maxsize=1 << 16)
def tag(content: tuple[Any, ...], layer: int) -> bytes:
    """The bytes of a position: of the tokens up to it, as KV is, so that equal prefixes have equal bytes."""
    return hashlib.blake2b(repr((content, layer)).encode(), digest_size=TAG_BYTES).digest()


def _tags(contents: Sequence[tuple[Any, ...]], layer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    joined = b"".join(tag(content, layer) for content in contents)
    return np.frombuffer(joined, np.uint8).reshape(-1, TAG_BYTES)


class SimFront:
    """The front's end and the engine's end of the ipc channel in one."""

    channels = ()

    def __init__(self) -> None:
        self.inbox: deque[ToEngine] = deque()
        self.num_ends: Counter[str] = Counter()
        self.errors: dict[str, RequestFailed] = {}
        self.tokens: dict[str, list[int]] = {}
        self.aborted: set[str] = set()

    def receive(self) -> Iterator[ToEngine]:
        while self.inbox:
            yield self.inbox.popleft()

    def send(self, message: FromEngine) -> None:
        match message:
            case Tokens():
                self.tokens.setdefault(message.request_id, []).extend(message.token_ids)
                if message.finish_reason is not None:
                    self._end(message.request_id)
            case RequestFailed():
                assert message.error
                assert 400 <= message.status <= 599
                self.errors[message.request_id] = message
                self._end(message.request_id)
            case EngineReady() | EngineStats():
                pass

    def _end(self, request_id: str) -> None:
        self.num_ends[request_id] += 1
        if self.num_ends[request_id] > 1:
            raise SafetyViolation(f"{request_id} ended twice")

    def close(self) -> None:
        pass


class SimPromptRunner:
    """In place of the model: leaves tags in the KV pool, layer after layer."""

    def __init__(self, memory: PrefillMemory, fails_at: Callable[[], int | None]) -> None:
        """``fails_at``: the layer before which the next forward raises."""
        self._fails_at = fails_at
        self._memory = memory

    def run(
        self,
        batch: Sequence[tuple[PrefillRequest, Chunk]],
        on_written: LayerWritten,
        meanwhile: Callable[[], None],
    ) -> Computed:
        rows = []
        for record, chunk in batch:
            said = (record.bootstrap.root, *record.token_ids.tolist())
            contents = [said[: position + 2] for position in range(chunk.start, chunk.stop)]
            rows.append((expand_pages(record.page_ids, PAGE_SIZE, chunk.start, chunk.stop), contents))
        for layer, group in enumerate(SPEC.index_group_of_layer):
            if layer == self._fails_at():
                raise RuntimeError("out of memory")
            for slots, contents in rows:
                self._memory.kv.numpy()[layer, slots] = _tags(contents, layer)
                if SPEC.layers_of_group[group][0] == layer:
                    self._memory.index.numpy()[group, slots] = _tags(contents, 100 + group)
            on_written(layer, None)
        meanwhile()
        hint = torch.full((SPEC.num_index_layers, SPEC.index_topk), -1, dtype=torch.int32)
        hints = {record.room: hint for record, chunk in batch if chunk.stop == record.num_computed_tokens}
        return Computed(hints, {})


class SimRequestTables:
    """In place of the tables of the kernels: a running request reads its slots where the pools are."""

    def __init__(
        self,
        spec: ModelSpec,
        memory: DecodeMemory,
        prompts: Mapping[str, tuple[int, ...]],
        roots: Mapping[str, PageKey],
    ) -> None:
        """``prompts`` and ``roots``: by request id."""
        self._prompts = prompts
        self._roots = roots
        self.spec = spec
        self.memory = memory
        self.bytes_per_miss = 0.0

    def prepare_landing(self, *requests: Request) -> None:
        """Rows have no checks here."""

    def copy_prompt(self, source: Request, request: Request, start: int) -> None:
        copy_prompt(self.memory, source, request, start)

    def start(self, request: Request) -> None:
        self.check(request)

    def by_hot_group(self, hint: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        return list(hint)

    def go_on(self, link_share: float) -> dict[int, Exception]:
        """Rows are filled when they start."""
        return {}

    def note_launch(self) -> None:
        """Nothing runs beside anything else here."""

    def stop_filling(self, request: Request) -> None:
        pass

    def grow(self, request: Request) -> None:
        pass

    def retract(self, request: Request) -> None:
        self.check(request)
        if request.mode is Mode.DENSE:
            holding = request.owned
            self.memory.spill(holding[PoolKind.DEVICE], holding[PoolKind.HOST], request.num_kv_tokens)

    def enter_hot_buffer(self, request: Request, first_position: int) -> None:
        """Its last positions are where its hot buffer begins."""
        self.check(request)
        root, prompt = self._roots[request.request_id], self._prompts[request.request_id]
        said = (root, *prompt, *request.output_token_ids)
        contents = [said[: position + 2] for position in range(first_position, request.num_kv_tokens)]
        slots = extents_to_slots(request.owned[PoolKind.DEVICE])[: len(contents)]
        for layer, items in enumerate(self.memory.k_dev.numpy()):
            if contents and not np.array_equal(items[slots], _tags(contents, layer)):
                raise SafetyViolation(f"room {request.room}: other items than its last are in its hot buffer")

    def resize(self, request: Request, num_before: int, capacity: int) -> None:
        self.check(request)

    def release(self, *requests: Request) -> None:
        pass

    def is_ready(self, request: Request) -> bool:
        return True

    def totals(self, running: Sequence[Request]) -> SwapCounts:
        return SwapCounts()

    def max_verifiable(self, request: Request, num_drafts: int) -> int:
        return max_verifiable(
            request, num_drafts, top_k=SPEC.index_topk, max_new=MAX_NEW, max_context=MAX_CONTEXT
        )

    def write_new(self, request: Request, num_accepted: int, num_rejected: int) -> None:
        """The newest token and drafts behind it. On the device rejected ones are written like any other."""
        root = self._roots[request.request_id]
        tokens = [*self._prompts[request.request_id], *request.output_token_ids, *[NEXT_TOKEN] * num_accepted]
        del tokens[request.num_kv_tokens + 1 + num_accepted :]  # while the prompt goes on
        for pool, slots, first_layer in self._pools(request):
            is_host = first_layer == 0 and request.mode is Mode.HISPARSE
            for layer, items in enumerate(pool):
                for position in range(request.num_kv_tokens, len(tokens)):
                    content = (root, *tokens[: position + 1])
                    items[slots[position]] = np.frombuffer(tag(content, first_layer + layer), np.uint8)
                for position in range(len(tokens), len(tokens) + num_rejected):
                    if not is_host:
                        items[slots[position]] = 0xDD

    def check(self, request: Request) -> None:
        """Every position that the request has read from its slots is the one that was written there."""
        root, prompt = self._roots[request.request_id], self._prompts[request.request_id]
        said = (root, *prompt, *request.output_token_ids)
        contents = [said[: position + 2] for position in range(request.num_kv_tokens)]
        for pool, slots, first_layer in self._pools(request):
            for layer, items in enumerate(pool):
                expected = _tags(contents, first_layer + layer)
                wrong = np.flatnonzero((items[slots[: len(contents)]] != expected).any(axis=1))
                if wrong.size:
                    raise SafetyViolation(
                        f"room {request.room} ({request.mode}) reads bytes that are not its own at "
                        f"positions {wrong.tolist()} of layer {layer} + {first_layer}"
                    )

    def _pools(self, request: Request) -> list[tuple[Any, Any, int]]:
        memory = self.memory
        is_dense = request.mode is Mode.DENSE
        kv, kind = (memory.k_dev, PoolKind.DEVICE) if is_dense else (memory.k_host, PoolKind.HOST)
        return [
            (kv.numpy(), extents_to_slots(request.extents(kind)), 0),
            (memory.index.numpy(), extents_to_slots(request.extents(PoolKind.INDEX)), 100),
        ]


@dataclass(frozen=True)
class SimStep:
    """``num_drafted``, ``num_accepted`` and ``num_known``: of each request, the last one as in StepEntry;
    ``num_drafts``: made for the next step."""

    batch: Sequence[Request]
    num_drafted: list[int]
    num_accepted: list[int]
    num_known: list[int]
    num_drafts: int
    feeds_next: bool = False

    @property
    def num_new(self) -> int:
        return self.num_drafts + 1

    def take_requests_out(self) -> None:
        for request, num_drafts, num_known in zip(self.batch, self.num_drafted, self.num_known, strict=True):
            request.leave_step(*_positions(num_drafts, num_known))

    def draw(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def result(self) -> list[StepResult]:
        results = []
        for drafted, accepted, known in zip(self.num_drafted, self.num_accepted, self.num_known, strict=True):
            num_tokens = 1 + accepted - known
            results.append(
                StepResult(
                    [NEXT_TOKEN] * num_tokens,
                    [None] * num_tokens,
                    "",
                    False,
                    SwapCounts(),
                    0 if known else drafted,
                    [NEXT_TOKEN] * (self.num_drafts if num_tokens else 0),
                    known,
                )
            )
        return results


def _positions(num_drafts: int, num_known: int) -> tuple[int, int]:
    """Return how many positions a step is sure to compute, and how many more at most."""
    return (1 + num_drafts, 0) if num_known else (1, num_drafts)


class SimDecodeRunner:
    """In place of the model: checks all that a request has, and writes the new tokens."""

    def __init__(self, tables: SimRequestTables) -> None:
        self._tables = tables
        self.step_secs: dict[int, float] = {}

    def would_split(self, batch: Sequence[Request]) -> bool:
        return False

    def wait(self) -> None:
        pass

    def launch(self, batch: Sequence[Request], step: NodeStep) -> SimStep:
        num_drafted, num_accepted, num_known = [], [], []
        for request in batch:
            self._tables.check(request)
            num_drafts = self._tables.max_verifiable(request, step.num_new - 1)
            known = request.known_next(num_drafts)
            drafts = known[:num_drafts] or request.take_drafts(num_drafts)
            num_drafted.append(len(drafts))
            num_known.append(len(known))
            num_right = len(drafts) if known else request.room + len(request.output_token_ids)
            num_accepted.append(num_right % (len(drafts) + 1))
            self._tables.write_new(request, num_accepted[-1], len(drafts) - num_accepted[-1])
            request.enter_step(*_positions(len(drafts), len(known)))
        return SimStep(batch, num_drafted, num_accepted, num_known, step.num_new - 1)


class NoPoller:
    def register(self, channel: object) -> None:
        pass

    unregister = register

    def wait(self, timeout_secs: float) -> bool:
        return True


class NoWakeup:
    def set(self) -> None:
        pass

    clear = close = set
