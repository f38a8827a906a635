"""Measures one layer's kernels on one GPU, at DeepSeek-V3.2's sizes, in us a call.

    python -m tools.bench.kernels attention [--batch 1 8 32 64 128 256] [--kv-format bfloat16 fp8_e4m3]
    python -m tools.bench.kernels indexer [--batch 1 8 64 128] [--context 4096 32768 131072]
    python -m tools.bench.kernels prompts [--tokens 8192] [--first 0 8192 24576 122880]
    python -m tools.bench.kernels experts [--tokens 1 8 32 128 512 4096] [--weights fp8 bfloat16 int4]
    python -m tools.bench.kernels experts --rows 1 4 16 32 64 128 512 4096 --experts 32 64 256 \
        --weights fp8 int4
    python -m tools.bench.kernels swap-in [--batch 1 8 32 64 128] [--item 1152 656] [--miss 0 2 10] \
        [--new 1] [--capacity 4096 16384]
    python -m tools.bench.kernels row-checks [--context 4096 32768 131072] [--item 1152 656]

Calls with different inputs, so that no call finds its own in the L2 cache, are captured in one CUDA graph
that is replayed between two events: us = time / calls, the median of the replays. Some calls have the same
inputs each time: top-k, which finds its logits in the cache as after the indexer of a step, and, because each
reads and writes more than the cache holds, those of ``prompts`` and the passes over all items of
``row-checks``.

- attention: sparse attention of each backend, slots scattered over a pool of a million.
- indexer: logits and top-k, one decode query a request, keys in scattered pages. The floor is the time to
  read the keys once, at the highest rate in this run of a copy of 1 GiB or of a sum over it.
- prompts: fp8 attention, indexer logits and top-k of a prompt's tokens behind ``--first`` others. Attention
  is measured with the kernel that reads the pool and with the one that reads unpacked items, unpacking
  included; logits with Triton's kernel and with the one for prompts, which must have the same bits.
- experts: routed experts that tokens choose at random; TB/s of the chosen experts' weights. With ``--rows``
  every expert has just so many rows. int4 has groups of 128; int4-zeros has zeros, as awq, and int4-fp8
  activations in fp8.
- swap-in: see ``tools/bench/swap_in.py``.
- row-checks: the pass over a dense request's items in scattered pages, and the checks of new items.

Writes out/kernels_NAME.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.kernels.attention import BACKEND_NAMES, TORCH, AttentionBackendError
from hisparse_pd.kernels.attention_backends import choose_backend, choose_prompt_backend
from hisparse_pd.kernels.block_fp8 import DTYPE as FP8
from hisparse_pd.kernels.fp8_rows import Activations
from hisparse_pd.kernels.hot_state import HotBufferState
from hisparse_pd.kernels.int4 import Int4Form, Int4Matrices
from hisparse_pd.kernels.kv_format import BFLOAT16, FORMAT_NAMES, FP8_E4M3, IndexKeyFormat, KvFormat
from hisparse_pd.kernels.paged_indexer import IndexerScratch
from hisparse_pd.kernels.row_check import check_dense_row, row_checks_of, store_row_checks
from hisparse_pd.kernels.selection import select_topk
from tools.bench.facts import OUT
from tools.bench.gpu_timing import graph_us, timed_us
from tools.bench.report import make_console, shown, table_of, write_report
from tools.bench.swap_in import add_options, swap_ins

HOME: Final = "cuda:0"
"""The GPU that is measured."""
HEADS, RANK, ROPE, TOP_K = 128, 512, 64, 2048
INDEX_HEADS, INDEX_DIM, PAGE_SIZE = 64, 128, 64
NUM_SLOTS: Final = 1 << 20
SCALE: Final = 0.04
"""Factor of attention's scores, on which no time depends."""
NUM_CALLS: Final = 8
"""Calls in a graph, each with inputs of its own."""
COLD_BYTES: Final = 256 << 20
"""Bytes that a graph's calls read before inputs repeat: several times an L2 cache."""
COPY_BYTES: Final = 1 << 30
PROMPT_ITEMS: Final = KvFormat(FP8_E4M3, RANK, ROPE)
PROMPT_KEYS: Final = IndexKeyFormat(FP8_E4M3, INDEX_DIM)
"""Formats of the items and keys in ``prompts``."""
WEIGHTS: Final[dict[str, torch.dtype | Int4Form]] = {
    "fp8": FP8,
    "bfloat16": torch.bfloat16,
    "int4": Int4Form(128, has_zeros=False),
    "int4-zeros": Int4Form(128, has_zeros=True),
    "int4-fp8": Int4Form(128, has_zeros=False, rounds_tokens=True),
}
"""The formats of experts' weights, by the names of ``--weights``."""
MANY_ROWS: Final = 512
"""From so many rows an expert on, a graph of ``experts`` has one call: results take gigabytes."""
Cells = Iterator[dict[str, Any]]


def attention(options: argparse.Namespace) -> Cells:
    for name in options.kv_format:
        kv_format = KvFormat(name, RANK, ROPE)
        pool = torch.zeros((NUM_SLOTS, kv_format.item_bytes), dtype=torch.uint8, device=HOME)
        for slots in torch.arange(NUM_SLOTS, device=HOME).split(1 << 17):
            kv_format.store(pool, slots, torch.randn((len(slots), RANK + ROPE), device=HOME))
        for batch in options.batch:
            q = torch.randn((batch, options.heads, RANK + ROPE), device=HOME).bfloat16()
            calls = torch.randint(0, NUM_SLOTS, (NUM_CALLS, batch, TOP_K), dtype=torch.int32, device=HOME)
            for backend_name in BACKEND_NAMES:
                if backend_name == TORCH:  # too slow to be of interest here
                    continue
                try:
                    backend_arguments = {"kv_format": kv_format, "num_heads": options.heads, "top_k": TOP_K}
                    backend = choose_backend(
                        backend_name, device=torch.device(HOME), split_slots=None, **backend_arguments
                    )
                except AttentionBackendError:
                    continue
                us = graph_us([partial(backend.attend, q, pool, slots, SCALE) for slots in calls])
                flops = 2 * batch * options.heads * TOP_K * (2 * RANK + ROPE)
                yield {
                    "kv_format": name,
                    "backend": backend_name,
                    "batch": batch,
                    "us": us,
                    "TFLOP/s": flops / us["median"] / 1e6,
                }


def indexer(options: argparse.Namespace) -> Cells:
    peak = memory_gb_s()
    for keys in options.keys:
        for batch in options.batch:
            for context in options.context:
                torch.manual_seed(0)
                yield {"keys": keys, "batch": batch, "context": context, **_index(keys, batch, context, peak)}


def memory_gb_s() -> float:
    """Return the highest rate of the GPU's memory, by a copy (read and written bytes counted) or by a sum."""
    src = torch.zeros(COPY_BYTES // 4, device=HOME)
    dst = torch.empty_like(src)
    copies = [timed_us(lambda: dst.copy_(src)) for _ in range(6)][1:]
    readings = [timed_us(src.sum) for _ in range(6)][1:]
    return max(2 * COPY_BYTES / min(copies), COPY_BYTES / min(readings)) / 1e3


def _index(format_name: str, batch: int, context: int, peak_gb_s: float) -> dict[str, Any]:
    """Measure one cell. Raises RuntimeError where the selection differs from torch's."""
    from hisparse_pd.kernels.paged_indexer import logits_writer
    from hisparse_pd.kernels.topk import select

    key_format = IndexKeyFormat(format_name, INDEX_DIM)
    key_bytes = batch * context * key_format.item_bytes
    num_calls, num_pages = max(2, -(-COLD_BYTES // key_bytes)), context // PAGE_SIZE
    # 4,096 different keys, repeated over the pool. Each call has pages of its own, and there are so many
    # calls that together they read COLD_BYTES at least.
    items = torch.zeros((4096, key_format.item_bytes), dtype=torch.uint8, device=HOME)
    key_format.store(items, torch.arange(4096, device=HOME), torch.randn(4096, INDEX_DIM, device=HOME))
    pool = items.repeat(-(-num_calls * batch * context // 4096), 1)
    pages = torch.randperm(num_calls * batch * num_pages, device=HOME).int().view(num_calls, batch, num_pages)
    q_index = torch.randn(batch, INDEX_HEADS, INDEX_DIM, device=HOME).bfloat16()
    weights = torch.randn(batch, INDEX_HEADS, device=HOME)
    rows = torch.arange(batch, device=HOME)
    positions = torch.full((batch,), context - 1, device=HOME)
    num_real = torch.tensor([batch], dtype=torch.int32, device=HOME)
    scratch = IndexerScratch.create(batch, context, HOME)
    out = torch.empty((batch, TOP_K), dtype=torch.int32, device=HOME)  # the positions that top_k selects

    write_logits = logits_writer(q_index, pool, page_size=PAGE_SIZE, key_format=format_name)

    def logits(call: int) -> None:
        write_logits(
            q_index, weights, pool, pages[call], rows, positions, num_real, scratch.logits, first_token=0,
            block_tokens=batch, top_k=TOP_K, max_len=context,
        )  # fmt: skip

    def top_k() -> None:
        select(
            scratch.logits, rows, positions, num_real, out,
            first_token=0, block_tokens=batch, num_rows=batch, max_len=context,
        )  # fmt: skip

    logits_us = graph_us([partial(logits, call) for call in range(num_calls)])
    top_k_us = graph_us([top_k] * num_calls)
    seen = torch.full((batch,), context, device=HOME)
    for first in range(0, batch, 8):  # few rows at a time: the check needs little memory beside the pool
        rows_now = slice(first, first + 8)
        expected = select_topk(scratch.logits[rows_now, :context], seen[rows_now], TOP_K)
        if not torch.equal(out[rows_now], expected):
            raise RuntimeError(f"{format_name}, batch {batch}, context {context}: another top-k than torch's")
    floor_us = key_bytes / peak_gb_s / 1e3
    return {
        "floor_us": floor_us,
        "logits_us": logits_us,
        "of_floor": logits_us["median"] / floor_us,
        "top_k_us": top_k_us,
        "both_us": logits_us["median"] + top_k_us["median"],
    }


def prompts(options: argparse.Namespace) -> Cells:
    """Raises RuntimeError where logits of the kernel for prompts have other bits."""
    for first in options.first:
        torch.manual_seed(0)
        yield {"tokens": options.tokens, "first": first, **_prompt(options.tokens, first)}


class _PromptRequest(NamedTuple):
    """One request in scattered pages of pools that have only its rows, and the positions of its queries."""

    context: int
    pages: Tensor
    items: Tensor
    """fp8 items, uint8 [num_slots, item_bytes], as are the ``keys``."""
    keys: Tensor
    positions: Tensor
    """int64 [num_tokens], the last ones of the context."""

    @property
    def num_slots(self) -> int:
        return len(self.items)

    @property
    def queries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each query's request and position, and the number of queries, for the indexer's kernels."""
        num_real = torch.tensor([len(self.positions)], dtype=torch.int32, device=HOME)
        return torch.zeros_like(self.positions), self.positions, num_real


def _prompt(num_tokens: int, first: int) -> dict[str, Any]:
    """Measure one cell: ``num_tokens`` queries behind ``first`` positions, all in one request."""
    context = first + num_tokens
    num_pages = -(-context // PAGE_SIZE)
    pages = torch.randperm(num_pages, device=HOME).int()
    slots = torch.arange(num_pages * PAGE_SIZE, device=HOME)
    items, keys = (
        torch.zeros((len(slots), each.item_bytes), dtype=torch.uint8, device=HOME)
        for each in (PROMPT_ITEMS, PROMPT_KEYS)
    )
    PROMPT_ITEMS.store(items, slots, torch.randn((len(slots), RANK + ROPE), device=HOME))
    PROMPT_KEYS.store(keys, slots, torch.randn((len(slots), INDEX_DIM), device=HOME))
    request = _PromptRequest(context, pages, items, keys, torch.arange(first, context, device=HOME))
    selected = torch.empty((num_tokens, TOP_K), dtype=torch.int32, device=HOME)
    return _prompt_selection_us(request, selected) | _prompt_attention_us(request, selected)


def _prompt_selection_us(request: _PromptRequest, selected: Tensor) -> dict[str, Any]:
    """Return the us of the indexer's logits and of the top-k, which is written to ``selected``.

    Triton's kernel reads keys for each query ``alone``, or for several queries that share what is read.
    """
    from hisparse_pd.kernels import index_logits, prompt_logits, triton_indexer
    from hisparse_pd.kernels.topk import select

    num_tokens, keys, queries = len(request.positions), request.keys, request.queries
    q_index = torch.randn((num_tokens, INDEX_HEADS, INDEX_DIM), device=HOME).bfloat16()
    weights = torch.randn((num_tokens, INDEX_HEADS), device=HOME)
    shape = (num_tokens, -(-request.context // 64) * 64)
    in_triton, in_cuda = (torch.zeros(shape, device=HOME) for _ in range(2))
    arguments = q_index, weights, keys, request.pages[None], *queries
    block: dict[str, Any] = {"first_token": 0, "block_tokens": num_tokens, "max_len": request.context}

    def triton_logits(is_prompt: bool) -> None:
        triton_indexer.write_logits(
            *arguments, in_triton, page_size=PAGE_SIZE, top_k=0, key_format=FP8_E4M3, is_prompt=is_prompt,
            **block,
        )  # fmt: skip

    us = {
        "logits_alone_us": graph_us([partial(triton_logits, False)]),
        "logits_shared_us": graph_us([partial(triton_logits, True)]),
    }
    if index_logits.takes(q_index, keys, PAGE_SIZE, FP8_E4M3):
        us["logits_us"] = graph_us(
            [partial(prompt_logits.write_logits, *arguments, in_cuda, page_size=PAGE_SIZE, top_k=0, **block)]
        )
        num_products = INDEX_HEADS * INDEX_DIM * int((request.positions + 1).sum())
        us["logits_tflops"] = 2 * num_products / us["logits_us"]["median"] / 1e6
        if not torch.equal(in_triton, in_cuda):
            first = request.context - num_tokens
            raise RuntimeError(f"logits behind {first} tokens have other bits in the kernel for prompts")
    us["top_k_us"] = graph_us([partial(select, in_triton, *queries, selected, num_rows=1, **block)])
    return us


def _prompt_attention_us(request: _PromptRequest, selected: Tensor) -> dict[str, Any]:
    """Return the us of attention to what was ``selected``, by items in the pool and by unpacked ones."""
    q = torch.randn((len(request.positions), HEADS, RANK + ROPE), device=HOME).bfloat16()
    backend_arguments: dict[str, Any] = {
        **{"device": torch.device(HOME), "kv_format": PROMPT_ITEMS},
        **{"num_heads": HEADS, "top_k": TOP_K},
    }
    unpacked_items = torch.empty((request.num_slots, RANK + ROPE), dtype=torch.bfloat16, device=HOME)
    num_columns = (request.positions + 1).clamp(max=TOP_K).int()  # columns of ``selected`` that are not -1
    pool_backend = choose_backend("auto", **backend_arguments)
    prompt_backend = choose_prompt_backend("auto", **backend_arguments)

    def attend_unpacked() -> None:
        PROMPT_ITEMS.unpack(request.items, request.pages, PAGE_SIZE, unpacked_items)
        prompt_backend.attend(q, unpacked_items.view(torch.uint8), selected, SCALE, num_columns)

    us = {"attention_us": graph_us([partial(pool_backend.attend, q, request.items, selected, SCALE)])}
    needs_unpacked = prompt_backend.kv_format != PROMPT_ITEMS  # else it reads the pool's items itself
    if needs_unpacked:
        us["attention_unpacked_us"] = graph_us([attend_unpacked])
    return us


@torch.inference_mode()
def experts(options: argparse.Namespace) -> Cells:
    num_weights = 3 * options.hidden * options.inner  # numbers of one expert's matrices
    for weights, num_experts in product(options.weights, options.experts):
        routed, num_bytes = _drawn_experts(options, weights, num_experts)
        for rows in options.rows:
            call = _even(options, num_experts, rows)
            num_calls = 1 if rows >= MANY_ROWS else NUM_CALLS // 2
            us = graph_us([partial(_all_parts, routed, *call)] * num_calls)
            num_products = rows * num_experts * num_weights
            yield {
                "weights": weights,
                "experts": num_experts,
                "rows": rows,
                "us": us,
                "TB/s": num_bytes / us["median"] / 1e6,
                "TFLOP/s": 2 * num_products / us["median"] / 1e6,
            }
        for num_tokens in [] if options.rows else options.tokens:
            # Half the calls are enough: each reads more weights than an L2 cache holds.
            inputs = [_routed(options, num_experts, num_tokens, seed) for seed in range(NUM_CALLS // 2)]
            num_read = sum(expert_ids.unique().numel() for _, expert_ids, _ in inputs) / len(inputs)
            us = graph_us([partial(routed, *call) for call in inputs])
            yield {
                "weights": weights,
                "experts": num_experts,
                "tokens": num_tokens,
                "us": us,
                "TB/s": num_bytes * num_read / num_experts / us["median"] / 1e6,
                "TFLOP/s": 2 * num_tokens * options.top_k * num_weights / us["median"] / 1e6,
            }
        del routed
        torch.cuda.empty_cache()


def _drawn_experts(options: argparse.Namespace, weights: str, num_experts: int) -> tuple[RoutedExperts, int]:
    """Return experts with random weights, on whose values no time depends, and the weights' bytes."""
    home = torch.device(HOME)
    routed = RoutedExperts(num_experts, options.hidden, options.inner, WEIGHTS[weights], home)
    num_bytes = 0
    for matrices in (routed.gate_up, routed.down):
        if isinstance(matrices, Int4Matrices):
            matrices.values.view(torch.uint8).random_(0, 256)
            matrices.scales.fill_(1 / 64)
            if matrices.zeros is not None:
                matrices.zeros.random_(0, 16)
                num_bytes += matrices.zeros.nbytes
        else:
            for values in matrices.values:
                values.copy_(torch.randn(values.shape, device=HOME) / 64)
            if matrices.scales is not None:
                matrices.scales.fill_(1.0)
        num_bytes += matrices.values.nbytes + (0 if matrices.scales is None else matrices.scales.nbytes)
    return routed, num_bytes


def _all_parts(routed: RoutedExperts, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    return routed.parts(Activations(hidden), expert_ids, weights)


def _even(options: argparse.Namespace, num_experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, their experts and the experts' weights, with ``rows`` tokens for each expert."""
    num_tokens = num_experts * rows // options.top_k
    hidden = torch.randn((num_tokens, options.hidden), device=HOME).bfloat16()
    expert_ids = torch.arange(num_tokens * options.top_k, device=HOME).view(num_tokens, -1) % num_experts
    return hidden, expert_ids, torch.rand((num_tokens, options.top_k), device=HOME)


def _routed(
    options: argparse.Namespace, num_experts: int, num_tokens: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, their experts and the experts' weights."""
    generator = torch.Generator(HOME).manual_seed(seed)
    hidden = torch.randn((num_tokens, options.hidden), device=HOME, generator=generator).bfloat16()
    scores = torch.rand((num_tokens, num_experts), device=HOME, generator=generator)
    weights, expert_ids = scores.topk(options.top_k)
    return hidden, expert_ids, weights


def row_checks(options: argparse.Namespace) -> Cells:
    """Measure checks of a dense request's items.

    ``landed``: compute the checks of all items in all layers and compare them with the stored ones.
    ``checked``: only compute them. ``stored``: compute and store the checks of all items in one layer.
    ``one_stored``: compute and store the checks of one item in all layers. Raises RuntimeError where the
    comparison finds a wrong row.
    """
    layers = range(options.layers)
    for item_bytes in options.item:
        for context in options.context:
            num_pages = -(-context // PAGE_SIZE)
            shape = (options.layers, num_pages * PAGE_SIZE, item_bytes)
            pool = torch.randint(0, 256, shape, dtype=torch.uint8, device=HOME)
            checks = torch.zeros(shape[:2], dtype=torch.int32, device=HOME)
            state = HotBufferState.create(  # of which only one row's pages and the checks are used
                num_groups=1,
                num_rows=1,
                max_context=context,
                max_capacity=1,
                page_size=PAGE_SIZE,
                num_lookup_slots=PAGE_SIZE,
                num_device_slots=0,
                device=HOME,
                row_checks=checks,
            )
            positions = torch.arange(context, device=HOME)
            pages = torch.randperm(num_pages, device=HOME)
            state.set_pages(0, 0, pages)
            state.set_index_pages(0, 0, pages)
            slots = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
            store_row_checks(checks, slots, pool, slots, positions, layers)
            new_items = [(slots[i : i + 1], positions[i : i + 1]) for i in range(NUM_CALLS)]
            checked_us = graph_us([partial(row_checks_of, pool, slots, positions)])
            landed_us = graph_us([partial(check_dense_row, state, 0, pool, context)])
            if int(state.error_flags[0]):
                raise RuntimeError("a row that is right was found to be wrong")
            yield {
                "item_bytes": item_bytes,
                "context": context,
                "landed_us": landed_us,
                "landed_gb_s": item_bytes * context * options.layers / landed_us["median"] / 1e3,
                "checked_us": checked_us,
                "checked_gb_s": item_bytes * context * options.layers / checked_us["median"] / 1e3,
                "stored_us": graph_us(
                    [
                        partial(store_row_checks, checks, slots, pool, slots, positions, layers[n : n + 1])
                        for n in layers
                    ]
                ),
                "one_stored_us": graph_us(
                    [
                        partial(store_row_checks, checks, slot, pool, slot, at, layers)
                        for slot, at in new_items
                    ]
                ),
            }


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command, in whose options ``measure`` is the function of the chosen name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = parser.add_subparsers(dest="name", required=True)
    own = names.add_parser("attention")
    own.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    own.add_argument("--heads", type=int, default=HEADS)
    own.add_argument("--kv-format", nargs="+", default=[BFLOAT16, FP8_E4M3], choices=FORMAT_NAMES)
    own.set_defaults(measure=attention)
    own = names.add_parser("indexer")
    own.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 128])
    own.add_argument("--context", type=int, nargs="+", default=[4096, 32768, 131072])
    own.add_argument("--keys", nargs="+", default=[BFLOAT16, FP8_E4M3], choices=(BFLOAT16, FP8_E4M3))
    own.set_defaults(measure=indexer)
    own = names.add_parser("prompts")
    own.add_argument("--tokens", type=int, default=8192)
    own.add_argument("--first", type=int, nargs="+", default=[0, 8192, 24576, 122880])
    own.set_defaults(measure=prompts)
    own = names.add_parser("experts")
    own.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512, 4096])
    own.add_argument(
        "--rows", type=int, nargs="+", default=[], help="rows of every expert, instead of --tokens"
    )
    own.add_argument("--weights", nargs="+", default=["fp8"], choices=tuple(WEIGHTS))
    own.add_argument("--experts", type=int, nargs="+", default=[256])
    for name, default in (("hidden", 7168), ("inner", 2048), ("top-k", 8)):
        own.add_argument(f"--{name}", type=int, default=default)
    own.set_defaults(measure=experts)
    own = names.add_parser("swap-in")
    add_options(own)
    own.set_defaults(measure=swap_ins)
    own = names.add_parser("row-checks")
    own.add_argument("--context", type=int, nargs="+", default=[4096, 32768, 131072])
    own.add_argument("--item", type=int, nargs="+", default=[1152, 656], help="bytes of an item")
    own.add_argument("--layers", type=int, default=61)
    own.set_defaults(measure=row_checks)
    for own in names.choices.values():
        own.add_argument("--out", type=Path, help="JSON file; default: out/kernels_NAME.json")
    return parser


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: these kernels run on NVIDIA GPUs only")
    gpu, console, cells = torch.cuda.get_device_name(), make_console(), []
    for cell in options.measure(options):
        cells.append(cell)
        console.print(", ".join(f"{key} {shown(value)}" for key, value in cell.items()), highlight=False)
    console.print(table_of(f"{options.name} on {gpu}", cells))
    path = options.out or OUT / f"kernels_{options.name}.json"
    write_report(path, {"gpu": gpu, "cells": cells})
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
