"""Measures decode steps, prefill and answers over HTTP of SGLang's engine and of ours on one GPU, by turns.

    python -m tools.bench.beside_sglang --guest FOLDER [--out STEM]
        [--dense 1 16 64] [--hisparse 16 128] [--http] [--context 32768] [--seconds 400]

In each turn one engine has the GPU alone. SGLang is the guest: ``--guest`` is the folder in which the archive
of ``carry.py`` was unpacked, from which SGLang's processes import everything, and ours only what is in
``_ours``. The JSON is written after every turn, and everything ends within ``--seconds``: a turn at its limit
keeps the cells that it has finished. ``README.md`` has what is compared and what is not stock.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tools.bench.beside_sglang.carry import CACHE
from tools.bench.beside_sglang.comparison import (
    beside,
    http_beside,
    http_table,
    our_cells,
    prefill_beside,
    prefill_cells,
    sglang_cells,
    sglang_prefill,
    steps_table,
)
from tools.bench.beside_sglang.environment import GuestMissing, check_guest, guest_command
from tools.bench.beside_sglang.guest import CHUNK
from tools.bench.beside_sglang.model import add_shape_options
from tools.bench.beside_sglang.over_http import http_turn
from tools.bench.beside_sglang.prewarm import Warming, outcomes
from tools.bench.beside_sglang.run import Run
from tools.bench.beside_sglang.scheduler_log import read_cells
from tools.bench.beside_sglang.turns import MODES, Mode, Turn, limits, plan
from tools.bench.facts import OUT, gpus
from tools.bench.report import make_console, table_of

ITEM_BYTES: Final = {"fp8_e4m3": 656, "bfloat16": 1152}
"""Bytes of one token's KV in one layer, in both engines, by its dtype."""


def take_turn(run: Run, turn: Turn, secs: float) -> None:
    """Give ``turn`` the GPU, and add its cells to ``run``."""
    if turn.over_http:
        http_turn(run, turn, secs)
    elif turn.engine == "ours":
        _our_turn(run, turn, secs)
    else:
        _sglang_turn(run, turn, secs)


def _our_turn(run: Run, turn: Turn, secs: float) -> None:
    options = run.options
    stem = options.logs / turn.name
    words = (
        *("--model-path", str(options.model), "--kv-cache-dtype", options.kv_cache_dtype, "--verify-rows"),
        *("--indexer-cache-dtype", "fp8_e4m3"),  # SGLang's, whatever its KV is
        *("--speculative-num-steps", str(options.drafts)),
        *("--chunk", str(CHUNK), "--context", str(turn.context), "--buffer", str(options.buffer)),
        *("--modes", turn.mode, "--batch", *map(str, turn.batches), "--max-dense", str(max(turn.batches))),
        *("--out", str(stem)),
    )
    stem.with_suffix(".json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.bench.decode_step", *words]
    run.process(turn.name, command, secs, os.environ)
    path = stem.with_suffix(".json")
    if not path.exists():
        run.note(f"{turn.name}: no figures")
        return
    report = json.loads(path.read_text())
    run.cells += our_cells(turn, report)
    run.prefill += prefill_cells(turn, report["prefill_tokens_a_second"])


def _sglang_turn(run: Run, turn: Turn, secs: float) -> None:
    text = run.process(turn.name, run.guest_turn(turn), secs, run.guest_environment())
    cells = read_cells(text.splitlines())  # in the order of the turn's batches
    found, dropped = sglang_cells(turn, cells, ITEM_BYTES[run.options.kv_cache_dtype])
    run.cells += found
    run.prefill += sglang_prefill(turn, cells, CHUNK)
    for line in dropped:
        run.note(line)
    for batch in turn.batches[len(cells) :]:
        run.note(f"sglang {turn.mode} {batch} at {turn.context}: not reached")


def prepare(run: Run) -> None:
    """Write the model where it is missing, and compile the guest's kernels."""
    options = run.options
    if not (options.model / "config.json").exists():
        shape = ("layers", "dense_layers", "experts", "experts_per_token", "jitter")
        words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in shape]
        if options.draft_agreement is not None:
            words.append(f"--draft-agreement={options.draft_agreement}")
        command = [sys.executable, "-m", "tools.bench.beside_sglang.model", "--out", str(options.model)]
        run.process("model", [*command, *words], options.model_secs, os.environ)
    if options.prewarm_secs:
        http_clients = options.http_clients if options.http else ()
        warming = Warming(
            model=str(options.model),
            rows=tuple(sorted({*_rows_of_steps(options), *http_clients, CHUNK})),
            item_bytes=ITEM_BYTES[options.kv_cache_dtype],
            buffer=options.buffer,
            num_processes=options.processes,
            secs=options.prewarm_secs - 2,  # so that it ends by itself before its limit
        )
        command = guest_command("prewarm", json.dumps(asdict(warming)))
        text = run.process("prewarm", command, options.prewarm_secs, run.guest_environment())
        num_compiled, failed = outcomes(text)
        run.console.print(f"compiled {num_compiled} kernels", highlight=False)
        for line in failed:
            run.note(line)


def _rows_of_steps(options: argparse.Namespace) -> set[int]:
    """Return how many tokens the forwards of the cells' steps have: the MTP layer's, and the model's."""
    batches = {*options.dense, *options.hisparse}
    return batches | {batch * (options.drafts + 1) for batch in batches}


def show(run: Run) -> None:
    gpu = ", ".join(gpus()) or "no GPU"
    steps, prefilled, over_http = beside(run.cells), prefill_beside(run.prefill), http_beside(run.http)
    if steps or prefilled:
        run.console.print(steps_table(f"{gpu}; steps, ratio: our tokens a second by SGLang's", steps))
        run.console.print(table_of("prefill; ratio: our rate by SGLang's", prefilled))
    if over_http:
        title = f"{gpu}; over HTTP, ratios: SGLang's TTFT by ours, our tokens a second by SGLang's"
        run.console.print(http_table(title, over_http))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.beside_sglang",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add("--guest", type=Path, required=True, help="folder with SGLang and what it needs")
    add("--model", type=Path, default=Path("/dev/shm/beside-sglang"), help="model folder, made when missing")
    add("--cache", type=Path, help="compiled kernels; default: the folder of them in --guest")
    add("--dense", type=int, nargs="*", default=[1, 16, 64], help="batches of dense requests")
    add("--hisparse", type=int, nargs="*", default=[16, 128], help="batches of hisparse requests")
    add("--context", type=int, nargs="+", default=[32768], help="tokens of each prompt")
    add("--output-tokens", type=int, default=160, help="tokens of SGLang's answers, over HTTP of all answers")
    add("--http", action="store_true", help="measure answers over HTTP, too")
    add("--http-clients", type=int, nargs="+", default=[1, 16, 64], help="numbers of clients over HTTP")
    add("--http-modes", nargs="+", default=["dense"], choices=MODES, help="modes of requests over HTTP")
    add("--stream-interval", type=int, default=1, help="tokens of a chunk of an answer over HTTP")
    add("--kv-cache-dtype", choices=ITEM_BYTES, default="fp8_e4m3", help="dtype of KV in steps and prefill")
    add("--drafts", type=int, default=0, help="drafts of a step, with --draft-agreement; not over HTTP")
    add("--buffer", type=int, default=4096, help="entries of a hot buffer")
    add("--host-gb", type=float, default=100, help="main memory that SGLang may take, in GB")
    add("--processes", type=int, default=os.cpu_count() or 1, help="processes that compile kernels")
    add("--seconds", type=float, default=400, help="limit of everything")
    add("--model-secs", type=float, default=35, help="limit of writing the model")
    add("--prewarm-secs", type=float, default=60, help="limit of compiling kernels; 0: compile none before")
    add("--sglang-secs", type=float, default=130, help="limit of one turn of SGLang")
    add("--our-secs", type=float, default=75, help="limit of one turn of ours")
    add("--out", type=Path, default=OUT / "beside_sglang", help="JSON file, without its suffix")
    add("--logs", type=Path, default=OUT / "beside_sglang_logs", help="folder of the processes' output")
    add_shape_options(parser)
    options = parser.parse_args(words)
    if options.drafts and options.draft_agreement is None:
        parser.error(f"--drafts {options.drafts}: the model needs an MTP layer; give --draft-agreement, too")
    options.cache = options.cache or options.guest / CACHE
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write. Returns 1 where the guest is missing or nothing was measured."""
    options = parse(words)
    for name in ("guest", "model", "cache", "out", "logs"):
        setattr(options, name, getattr(options, name).absolute())
    console = make_console()
    try:
        check_guest(options.guest)
    except GuestMissing as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    run = Run(options, console, time.monotonic() + options.seconds)
    prepare(run)
    turns = plan(options.context, {"dense": options.dense, "hisparse": options.hisparse})
    if options.http:
        clients: dict[Mode, list[int]] = dict.fromkeys(options.http_modes, options.http_clients)
        turns += plan(options.context, clients, over_http=True)

    def most_secs(turn: Turn) -> float:
        most: float = options.our_secs if turn.engine == "ours" else options.sglang_secs
        return most

    for turn, planned in limits(turns, most_secs, run.secs_left):  # a plan, for the reader of the output
        console.print(f"{turn.name}: at most {planned:.0f} s planned", highlight=False)
    for number in range(len(turns)):
        # Planned anew before each turn: what earlier turns did not use is for the later ones.
        turn, secs = next(limits(turns[number:], most_secs, run.secs_left))
        if not secs:
            run.note(f"{turn.name}: no time left")
            continue
        take_turn(run, turn, secs)
        run.write()
    show(run)
    return 0 if run.cells or run.http else 1


if __name__ == "__main__":
    sys.exit(main())
