"""Measures where a decode step's time goes: the node's own steps on a GPU, without servers around them.

    python -m tools.bench.decode_step --model-path DIR [--batch 1 8 32 128] [--context 32768] [--out STEM]
        [--speculative-num-steps 0 1 2 3] [--grammar]

One prompt of ``--context`` random tokens is prefilled by the prefill node's code. Every request of a batch
gets a copy of its KV, in host slots of its own or in dense pages, and a first token of its own. (``resident``
requests are hisparse with pages for all tokens on the device and no hot buffer.) Then, after
some untimed steps, the decode node's runner takes ``--steps`` steps timed by the clock, and as many again
timed by kernel with torch's profiler. Kernels overlap, so only the time by which a kernel makes the step
longer counts for it, and a step's parts add up. "swap-in" is the kernel of that name together with the copies
of the same misses in the other layers of an index group. "tokens a step" are those of one request; a column
that names no other unit is about a step of the whole batch. ``--choose-drafts`` adds a line for each mode and
batch, whose steps choose their number of drafts as a decode node does, up to the largest of
``--speculative-num-steps``. The JSON is written after every line, so a run that is stopped keeps its lines.

``--grammar`` measures each line once more with all requests bound to endless JSON: the difference is the cost
of masks. It is realistic with a vocabulary of a real model's size (``tools/checkpoints/make_synthetic.py
--vocab 129280``).

On a GPU, lines below the table say for each of its rows how much GPU memory each part takes in GB, and in
brackets what a decode node plans for it. ``tools.bench.whole_node`` measures steps that several ranks take
together.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import MAX_DRAFTS, HisparseFlag, Mode, SamplingParams, StartError
from hisparse_pd.core.grammar.token_trie import Grammar, TokenTrie
from hisparse_pd.core.memory.device import use_device
from hisparse_pd.core.model.dsa import DsaModel
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.paged_kv import PagedKv, PagedRequest
from hisparse_pd.core.model.spec import ModelSpec, load_spec
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
from hisparse_pd.kernels.row_check import row_checks_of
from hisparse_pd.prefill_node.compute import PromptRunner
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.protocol.messages import Room
from tools.bench.facts import OUT, run_facts
from tools.bench.report import table_of, write_json
from tools.bench.step_memory import MemoryByPart, planned_pools, planned_weights, show

PAGE_SIZE = 64
STEPS_TO_CHOOSE = 64
"""Untimed steps before a line that chooses its number of drafts, in which each number is tried."""
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
KINDS = {
    "swap-in": "swap_in|copy_planned",
    "row checks": "check_rows",
    "backup": "backup_newest|newest_slots",
    "indexer logits": "_logits_kernel|paged_logits|prompt_logits",
    "top-k": "^topk$",
    "collectives": "nccl|ranks_gather|ranks_sum",
    "attention": "flash_|sparse_attn|attend_kernel|combine_kernel|get_mla_metadata",
    "experts": (
        "^_(int4_)?product_kernel|^int4_experts|^_lay_out|^_round_tokens"
        "|choose_kernel|narrow_kernel|plan_kernel"
    ),
    "linear layers": "nvjet|gemm|^linear_kernel|lift_values|latent_queries|index_queries",
}
"""Kinds of kernels, each with the pattern by which it is found in their lower-case names; the first that
matches counts."""
REST = "the rest"
"""The kind of kernels that match no pattern: norms, rounding, sampling."""


@dataclass(frozen=True)
class Prefilled:
    """What the prefill node has of one prompt of ``context`` tokens, on the device unless said otherwise."""

    kv: Tensor
    """KV: uint8 [num_kv_layers, context, item_bytes]."""
    kv_host: Tensor
    """A copy of ``kv`` in main memory."""
    index: Tensor
    """Indexer keys: uint8 [num_index_groups, context, index_item_bytes]."""
    row_checks: Tensor | None
    """Row checks: int32 [num_kv_layers, context]; None where rows are not verified."""
    hints: Tensor
    """The hint, in main memory: the positions that the last token selected, int32 [num_index_groups,
    index_topk]."""
    hints_at: Mapping[int, Tensor]
    """Hints of this prompt and of shorter ones with which it begins, by their number of tokens."""
    tokens_a_second: float
    """Rate at which the prompt was computed."""

    def up_to(self, context: int) -> Prefilled:
        """Return the prompt's first ``context`` tokens, one of the ``cuts`` of ``prefill`` or all of them."""
        return self._with_rows(lambda rows: rows[:, :context], hints=self.hints_at[context])

    def repeated(self, num_times: int) -> Prefilled:
        """Return a prompt that repeats this one's tokens, with this one's hint."""
        cuts = range(self.kv.shape[1], num_times * self.kv.shape[1] + 1, self.kv.shape[1])
        hints_at = {**self.hints_at, **dict.fromkeys(cuts, self.hints)}
        whole = self._with_rows(lambda rows: torch.cat([rows] * num_times, dim=1), hints_at=hints_at)
        if self.row_checks is None:
            return whole
        positions = torch.arange(whole.kv.shape[1], device=whole.kv.device)
        return replace(whole, row_checks=row_checks_of(whole.kv, positions, positions))

    def _with_rows(self, change: Callable[[Tensor], Tensor], **others: Any) -> Prefilled:
        rows = {name: getattr(self, name) for name in ("kv", "kv_host", "index", "row_checks")}
        changed: dict[str, Any] = {
            name: change(of_all) for name, of_all in rows.items() if of_all is not None
        }
        return replace(self, **changed, **others)


def prefill(
    spec: ModelSpec,
    model: DsaModel,
    settings: DecodeSettings,
    chunk: int,
    context: int,
    cuts: Collection[int] = (),
) -> Prefilled:
    """Prefill a random prompt chunk by chunk, as the prefill node does.

    It is computed twice, because kernels are compiled in the first pass; the rate is that of the second.
    ``cuts``: further lengths at which the prompt can end (``Prefilled.up_to``), multiples of ``chunk``.
    """
    device = model.device
    memory = PrefillMemory(spec, num_slots=round_up(context, PAGE_SIZE), num_aux_slots=1, device=device)
    kernels = PromptRunner(
        model, memory, PAGE_SIZE, settings.attention_backend, chunk, settings.attention_split_tile_size
    ).kernels
    tokens = random_tokens(spec, context)
    pages = torch.arange(round_up(context, PAGE_SIZE) // PAGE_SIZE, device=device)
    hints: dict[int, Tensor] = {}
    secs = 0.0
    for _ in range(2):  # the first pass compiles
        synchronize(device)
        started = time.perf_counter()
        for start in range(0, context, chunk):
            stop = min(start + chunk, context)
            request = PagedRequest(pages, start, stop - start)
            kv = PagedKv(
                spec,
                memory.kv,
                memory.index,
                PAGE_SIZE,
                [request],
                kernels=kernels,
                row_checks=memory.row_checks,
            )
            inputs = tokens[start:stop].to(device), kv.positions, kv, kv.last_rows
            if spec.num_draft_layers:
                _, hidden = model.forward_with_hidden(*inputs)
                following = tokens.roll(-1)[start:stop].to(device)
                model.draft(following, hidden, kv.positions, kv, kv.last_rows)
            else:
                model.forward(*inputs)
            if stop in (*cuts, context):
                hints[stop] = kv.hints[0].cpu()
        synchronize(device)
        secs = time.perf_counter() - started
    kv_all = memory.kv[:, :context]
    return Prefilled(
        kv=kv_all,
        kv_host=kv_all.cpu(),
        index=memory.index[:, :context],
        row_checks=None if memory.row_checks is None else memory.row_checks[:, :context],
        hints=hints[context],
        hints_at=hints,
        tokens_a_second=context / secs,
    )


def random_tokens(spec: ModelSpec, num_tokens: int) -> Tensor:
    """Return random tokens, int64 [num_tokens], from the middle of the vocabulary, without special tokens."""
    quarter = spec.vocab_size // 4
    return torch.randint(quarter, 3 * quarter, (num_tokens,), generator=torch.Generator().manual_seed(1))


RESIDENT: Final = "resident"
"""Name of hisparse requests that have pages on the device and no hot buffer, among MODES."""
MODES: Final = (*Mode, RESIDENT)


class _Settings(DecodeSettings):
    """Settings of a decode node that captures only the graph of the measured batch."""

    @property
    def graph_batches(self) -> list[int]:
        return [] if self.cuda_graph_max_bs == 0 else [self.max_running_requests]


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
        """``num_steps``: most steps of one ``run``; there are slots for four such runs. ``is_resident``: of
        hisparse requests."""
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
                self._commit(previous)  # while the device computes the step just launched
            launched.draw()
            previous = launched
            if not launched.feeds_next:  # the next launch needs this step's results
                self._commit(launched)
                previous = None
            if self._choice is not None:
                self._choice.note_turn(len(self.requests), num_new - 1, time.monotonic())
        if self._choice is not None:  # so that the time until the next call counts for no step
            self._choice.note_turn(0, 0, time.monotonic())
        if previous is not None:
            self._commit(previous)
        synchronize(self.tables.device)
        return time.perf_counter() - started

    def _next_num_new(self) -> int:
        """Return the positions of a request in the next step: its newest token and the chosen drafts."""
        if self._choice is None:
            return self._num_new
        allowed = self._num_new - 1
        most = max(self.tables.max_verifiable(request, allowed) for request in self.requests)
        return 1 + self._choice.choose(len(self.requests), most)

    def _commit(self, launched: Any) -> None:
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
        self.tables.fill_at_once(request)
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


def measure(
    model: DsaModel,
    arguments: argparse.Namespace,
    prompt: Prefilled,
    mode: Mode,
    batch: int,
    num_drafts: int,
    grammar: Grammar | None,
    *,
    chooses_drafts: bool = False,
    is_resident: bool = False,
) -> dict[str, Any]:
    """Measure one line of the report: untimed steps, timed ones, and on a GPU as many for the profiler."""
    settings = make_settings(arguments, batch, num_drafts)
    num_warm = max(2, arguments.steps // 4, STEPS_TO_CHOOSE if chooses_drafts else 0)
    most = max(arguments.steps, num_warm)
    bench = Bench(
        model.spec,
        model,
        settings,
        prompt,
        mode,
        most,
        grammar,
        chooses_drafts=chooses_drafts,
        is_resident=is_resident,
    )
    try:
        bench.run(num_warm)
        before, tokens_before = bench.totals, bench.num_tokens
        secs = bench.run(arguments.steps)
        num_tokens = bench.num_tokens - tokens_before
        hits, misses, _ = (after - old for after, old in zip(bench.totals, before, strict=True))
        num_distinct = len({request.output_token_ids[-1] for request in bench.requests})
        bench.used.mark("steps")
        kernels = kernels_of(bench, arguments.steps) if model.device.type == "cuda" else []
    finally:
        bench.memory.close()

    num_ranks = 1 if model.ranks is None else model.ranks.size
    step_ms = 1e3 * secs / arguments.steps
    miss_bytes = misses / arguments.steps * bench.tables.bytes_per_miss
    swap_in_ms = sum(kernel.ms for kernel in kernels if kernel.kind == "swap-in")
    added_ms: defaultdict[str, float] = defaultdict(float)
    for kernel in kernels:
        added_ms[kernel.kind] += kernel.added_ms
    return {
        "mode": RESIDENT if is_resident else str(mode),
        "batch": batch,
        "num_drafts": num_drafts,
        "chooses_drafts": chooses_drafts,
        "has_grammar": grammar is not None,
        "step_ms": step_ms,
        "tokens_a_step": num_tokens / arguments.steps / batch,
        "tokens_a_second": num_ranks * num_tokens / secs,
        "distinct_tokens": num_distinct,
        "misses_a_token": misses / num_tokens,
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "mb_a_step": miss_bytes / 1e6,
        "gpu_ms": dict(added_ms),
        "kernels": [asdict(kernel) for kernel in kernels],
        "num_kernels": sum(kernel.number for kernel in kernels),
        "swap_in_gb_s": miss_bytes / swap_in_ms / 1e6 if swap_in_ms and misses else None,
        "memory_gb": bench.used.gb,
        "planned_gb": bench.planned,
    }


@dataclass
class Kernel:
    """One kernel's launches in a step, on average over the profiled steps."""

    name: str
    kind: str
    """One of ``KINDS``, or ``REST``."""
    number: float = 0.0
    """Launches."""
    ms: float = 0.0
    """Time from the beginnings of launches to their ends."""
    added_ms: float = 0.0
    """Time by which the launches made the step longer: from the latest end of earlier launches to each one's
    own end. Overlaps are not counted twice, and a gap counts for the kernel behind it."""


def kernels_of(bench: Bench, num_steps: int) -> list[Kernel]:
    """Profile ``num_steps`` further steps and return their kernels, those that add most time first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        bench.run(num_steps)
    return kernels_from(
        [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type.name == "CUDA"
        ],
        num_steps,
    )


def kernels_from(launches: Sequence[tuple[str, float, float]], num_steps: int) -> list[Kernel]:
    """Return the kernels of ``launches`` in ``num_steps`` steps, those that add most time first. A launch is
    a kernel's name and the times of its beginning and its end, in microseconds."""
    found: dict[str, Kernel] = {}
    in_order = sorted(launches, key=lambda launch: launch[1])
    latest_end = in_order[0][1] if in_order else 0.0
    for name, start, end in in_order:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), REST)
        kernel = found.setdefault(name, Kernel(name[:90], kind))
        kernel.number += 1 / num_steps
        kernel.ms += (end - start) / 1e3 / num_steps
        kernel.added_ms += max(0.0, end - latest_end) / 1e3 / num_steps
        latest_end = max(latest_end, end)
    return sorted(found.values(), key=lambda kernel: -kernel.added_ms)


def make_settings(arguments: argparse.Namespace, batch: int, num_drafts: int = 0) -> DecodeSettings:
    names = ("model_path", "device", "dtype", "kv_cache_dtype", "indexer_cache_dtype", "attention_backend")
    more = ("attention_split_tile_size", "micro_batch_min_bs", "load_format")
    return _Settings(
        **{name: getattr(arguments, name) for name in (*names, *more)},
        device_buffer_size=arguments.buffer,
        page_size=PAGE_SIZE,
        max_running_requests=batch,
        cuda_graph_max_bs=0 if arguments.no_graphs else None,
        speculative_num_steps=num_drafts,
    )


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of how a node runs, whatever its model and prompts."""
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["dense", "hisparse"])
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a prefill forward")
    parser.add_argument("--buffer", type=int, default=4096, help="entries of a hot buffer")
    parser.add_argument(
        "--micro-batch-min-bs", type=int, help="the decode node's option; 0: never split steps"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--indexer-cache-dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--attention-split-tile-size", type=int, help="the decode node's option")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument("--verify-rows", action="store_true", help="verify rows, as nodes do by default")


def load_shared_spec(arguments: argparse.Namespace, num_drafts: int) -> ModelSpec:
    """Load the spec by the options that this benchmark and ``whole_node`` share (``add_node_options``)."""
    return load_spec(
        arguments.model_path,
        arguments.dtype,
        arguments.kv_cache_dtype,
        device=arguments.device,
        indexer_cache_dtype=arguments.indexer_cache_dtype,
        num_draft_layers=int(num_drafts > 0),
        load_format=arguments.load_format,
        has_row_checks=arguments.verify_rows,
    )


def shared_report(arguments: argparse.Namespace, spec: ModelSpec) -> dict[str, Any]:
    """Return what the reports of this benchmark and of ``whole_node`` begin with."""
    return {
        "facts": run_facts(),
        "model": arguments.model_path.name,
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu",
        "num_layers": spec.num_layers,
        "context": arguments.context,
        "buffer": arguments.buffer,
        "verifies_rows": spec.has_row_checks,
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def print_steps(
    title: str, rows: Sequence[Mapping[str, Any]], console: Console, names: Sequence[str]
) -> None:
    """Print a table with a line for each row: the columns ``names``, and a step's parts. Below it, print a
    line of GPU memory for each row that has one."""
    kinds = (*KINDS, REST) if any(row["gpu_ms"] for row in rows) else ()
    lines = [
        {name: row[name] for name in names} | {kind: row["gpu_ms"].get(kind) for kind in kinds}
        for row in rows
    ]
    console.print(table_of(f"{title}; ms a step", lines))
    for row in rows:
        if row["memory_gb"]:
            console.print(
                f"{row['mode']} {row['batch']}: GB {show(row['memory_gb'], row['planned_gb'])}",
                highlight=False,
            )


def print_report(report: dict[str, Any], console: Console) -> None:
    title = (
        f"{report['model']}, {report['kv_format']} items, {report['context']} tokens, hot buffer "
        f"{report['buffer']}; {report['device']}, commit {report['facts']['commit'][:12]}"
    )
    names = ("mode", "batch", "num_drafts", "chooses_drafts", "has_grammar", "step_ms", "tokens_a_step")
    more = ("tokens_a_second", "distinct_tokens", "hit_rate", "misses_a_token", "mb_a_step")
    print_steps(title, report["rows"], console, (*names, *more, "num_kernels", "swap_in_gb_s"))
    console.print(f"prefill: {report['prefill_tokens_a_second']:,.0f} tokens a second")
    if report["memory_gb"]:
        first = ", ".join(f"{part} {gb:.2f}" for part, gb in report["memory_gb"].items())
        console.print(
            f"loaded in {report['load_secs']:.1f} s; GB on the GPU: {first} "
            f"({report['planned_weights_gb'] or 0:.2f} of the checkpoint)",
            highlight=False,
        )


@dataclass(frozen=True)
class _Line:
    """What one line of the report measures."""

    mode: Mode
    batch: int
    num_drafts: int
    chooses_drafts: bool
    """Whether the number of drafts is chosen as a node does, up to ``num_drafts``."""
    grammar: Grammar | None
    is_resident: bool
    """Whether its requests are resident, which are hisparse, too."""

    def __str__(self) -> str:
        drafts = f"{'up to ' if self.chooses_drafts else ''}{self.num_drafts} drafts"
        mode = RESIDENT if self.is_resident else self.mode
        return f"{mode} {self.batch}, {drafts}{', grammar' if self.grammar else ''}"


def _lines(arguments: argparse.Namespace, grammar: Grammar | None) -> Iterator[_Line]:
    """Yield the lines in the order of the report. With ``grammar``, each comes once without and once with
    it."""
    numbers = [(num_drafts, False) for num_drafts in arguments.speculative_num_steps]
    if arguments.choose_drafts:
        numbers.append((max(arguments.speculative_num_steps), True))
    grammars = [None] if grammar is None else [None, grammar]
    for batch, mode in product(arguments.batch, arguments.modes):
        if mode != "dense" or batch <= arguments.max_dense:
            for (num_drafts, chooses), of_line in product(numbers, grammars):
                is_resident = mode == RESIDENT
                mode_of_line = Mode.HISPARSE if is_resident else Mode(mode)
                yield _Line(mode_of_line, batch, num_drafts, chooses, of_line, is_resident)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--context", type=int, default=32768, help="tokens of each prompt")
    add_node_options(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--max-dense", type=int, default=16, help="largest batch that is measured dense")
    parser.add_argument("--steps", type=int, default=48, help="timed steps of a line")
    parser.add_argument(
        "--speculative-num-steps", type=int, nargs="+", default=[0], choices=range(MAX_DRAFTS + 1)
    )
    parser.add_argument(
        "--choose-drafts",
        action="store_true",
        help="measure each mode and batch once more with the drafts that a node chooses",
    )
    parser.add_argument("--grammar", action="store_true", help="measure each line once more under a grammar")
    parser.add_argument("--no-graphs", action="store_true", help="launch steps without CUDA graphs")
    parser.add_argument("--out", type=Path, default=OUT / "decode_step", help="JSON file, without its suffix")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    console = Console(width=190)
    use_device(arguments.device)
    spec = load_shared_spec(arguments, max(arguments.speculative_num_steps))
    used = MemoryByPart(torch.device(arguments.device))
    used.mark("CUDA")
    started = time.perf_counter()
    model = load_model(arguments.model_path, spec, arguments.device)
    load_secs = time.perf_counter() - started
    used.mark("weights")
    grammar = None
    if arguments.grammar:
        trie = TokenTrie.load(arguments.model_path, spec.vocab_size, spec.eos_token_ids)
        grammar = trie.compile(GRAMMAR)
    prompt = prefill(spec, model, make_settings(arguments, 1), arguments.chunk, arguments.context)
    report: dict[str, Any] = {
        **shared_report(arguments, spec),
        "kv_format": spec.kv_format,
        "item_bytes": spec.item_bytes,
        "index_format": spec.index_format,
        "weights_are_fp8": spec.weights_are_fp8,
        "experts_are_int4": spec.int4 is not None,
        "load_secs": load_secs,
        "memory_gb": used.gb,
        "planned_weights_gb": None if spec.weights_are_dummy else planned_weights(arguments.model_path),
        "prefill_tokens_a_second": prompt.tokens_a_second,
        "rows": [],
    }
    for line in _lines(arguments, grammar):
        row = measure(
            model,
            arguments,
            prompt,
            line.mode,
            line.batch,
            line.num_drafts,
            line.grammar,
            chooses_drafts=line.chooses_drafts,
            is_resident=line.is_resident,
        )
        report["rows"].append(row)
        write_json(arguments.out.with_suffix(".json"), report)
        console.print(f"{line}: {row['step_ms']:.3f} ms, {row['tokens_a_step']:.2f} tokens", highlight=False)
    print_report(report, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
