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
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hisparse_pd.base.vocabulary import MAX_DRAFTS, Mode
from hisparse_pd.core.grammar.token_trie import Grammar, TokenTrie
from hisparse_pd.core.memory.device import use_device
from hisparse_pd.core.model.loader import load_model
from tools.bench.facts import OUT
from tools.bench.report import write_json
from tools.bench.step_bench import GRAMMAR, RESIDENT
from tools.bench.step_memory import MemoryByPart, planned_weights
from tools.bench.step_options import add_node_options, load_shared_spec, make_settings
from tools.bench.step_prompt import prefill
from tools.bench.step_report import measure, print_steps, shared_report


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
    """One line of the report: its requests, and how they step."""

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
