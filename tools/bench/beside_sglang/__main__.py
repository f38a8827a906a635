"""Measures decode steps and prefill of SGLang's whole engine and of ours on one GPU, by turns.

    python -m tools.bench.beside_sglang --guest FOLDER [--out STEM]
        [--dense 1 16 64] [--hisparse 16 128] [--context 32768] [--seconds 400]

Each turn is one process that has the GPU alone. ``--guest`` is the folder in which the archive of
``carry.py`` was unpacked. The JSON is written after every turn, and everything ends within ``--seconds``: a
turn at its limit keeps the cells that it has finished. ``README.md`` has what is compared and what is not
stock.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tools.bench.beside_sglang.carry import CACHE
from tools.bench.beside_sglang.comparison import (
    beside,
    our_cells,
    prefill_beside,
    prefill_cells,
    sglang_cells,
    sglang_prefill,
    steps_table,
)
from tools.bench.beside_sglang.environment import (
    HOST_BYTES,
    GuestMissing,
    check_guest,
    guest_command,
    guest_environment,
    has_free_gpu,
    versions,
)
from tools.bench.beside_sglang.guest import CHUNK, GuestTurn
from tools.bench.beside_sglang.model import add_shape_options
from tools.bench.beside_sglang.prewarm import Warming, outcomes
from tools.bench.beside_sglang.scheduler_log import read_cells
from tools.bench.beside_sglang.turns import Engine, Turn, limits, plan
from tools.bench.facts import OUT, ROOT, gpus
from tools.bench.report import make_console, table_of, write_report

ITEM_BYTES: Final = 656
"""Bytes of one token's fp8 KV in one layer, in both engines."""
FREE_MIB: Final = 2500
FREE_SECS: Final = 20.0
"""Limits of waiting until the driver has taken back the last process's memory."""
KEPT_LOG_CHARS: Final = 3000


@dataclass
class Run:
    """Everything measured so far, and the time that is left."""

    options: argparse.Namespace
    console: Console
    deadline: float
    cells: list[dict[str, Any]] = field(default_factory=list)
    prefill: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    secs: dict[str, float] = field(default_factory=dict)

    @property
    def secs_left(self) -> float:
        return self.deadline - time.monotonic()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def process(self, name: str, command: Sequence[str], secs: float, environment: Mapping[str, str]) -> str:
        """Run a process to its end or its limit, and return what it printed, which stays in a file, too."""
        path = self.options.logs / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with path.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=ROOT, env=dict(environment), start_new_session=True
            )
            try:
                status = f"exited with status {process.wait(max(1.0, min(secs, self.secs_left)))}"
            except subprocess.TimeoutExpired:
                status = "reached its limit"
            finally:
                self._end_group(process)
        self.secs[name] = time.monotonic() - started
        self.console.print(f"{name}: {self.secs[name]:.0f} s", highlight=False)
        text: str = path.read_text(errors="replace")
        if status != "exited with status 0":
            self.note(f"{name} {status}; the end of {path.name}:\n{text[-KEPT_LOG_CHARS:]}")
        return text

    def _end_group(self, process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + FREE_SECS
        while not has_free_gpu(FREE_MIB) and time.monotonic() < deadline:
            time.sleep(0.5)

    def write(self) -> None:
        """Write all figures, with the facts that they depend on."""
        write_report(
            self.options.out,
            {
                "gpus": gpus(),
                "sglang_versions": versions(self.options.guest),
                "options": {name: str(value) for name, value in vars(self.options).items()},
                "steps": beside(self.cells),
                "prefill": prefill_beside(self.prefill),
                "notes": self.notes,
                "secs": self.secs,
            },
        )


def take_turn(run: Run, turn: Turn, secs: float) -> None:
    """Give ``turn`` the GPU, and add its cells to ``run``."""
    if turn.engine == "ours":
        _our_turn(run, turn, secs)
    else:
        _sglang_turn(run, turn, secs)


def _our_turn(run: Run, turn: Turn, secs: float) -> None:
    options = run.options
    stem = options.logs / turn.name
    words = (
        *("--model-path", str(options.model), "--kv-cache-dtype", "fp8_e4m3", "--verify-rows"),
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
    options = run.options
    config = json.loads((options.model / "config.json").read_text())
    of_guest = GuestTurn(
        model=str(options.model),
        mode=turn.mode,
        context=turn.context,
        batches=turn.batches,
        num_output_tokens=options.output_tokens,
        buffer=options.buffer,
        vocabulary=config["vocab_size"],
    )
    command = guest_command("guest", json.dumps(asdict(of_guest)))
    text = run.process(turn.name, command, secs, _guest_environment(options))
    cells = read_cells(text.splitlines())
    found, dropped = sglang_cells(turn, cells, ITEM_BYTES)
    run.cells += found
    run.prefill += sglang_prefill(turn, cells, CHUNK)
    for line in dropped:
        run.note(line)
    for batch in turn.batches[len(cells) :]:
        run.note(f"sglang {turn.mode} {batch} at {turn.context}: not reached")


def _guest_environment(options: argparse.Namespace) -> dict[str, str]:
    host_bytes = str(int(options.host_gb * 1e9))
    return {**guest_environment(options.guest, options.cache), HOST_BYTES: host_bytes}


def prepare(run: Run) -> None:
    """Write the model where it is missing, and compile the guest's kernels."""
    options = run.options
    if not (options.model / "config.json").exists():
        shape = ("layers", "experts", "experts_per_token", "jitter")
        words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in shape]
        command = [sys.executable, "-m", "tools.bench.beside_sglang.model", "--out", str(options.model)]
        run.process("model", [*command, *words], options.model_secs, os.environ)
    if options.prewarm_secs:
        warming = Warming(
            model=str(options.model),
            rows=tuple(sorted({*options.dense, *options.hisparse, CHUNK})),
            item_bytes=ITEM_BYTES,
            buffer=options.buffer,
            num_processes=options.processes,
            secs=options.prewarm_secs - 2,
        )
        command = guest_command("prewarm", json.dumps(asdict(warming)))
        text = run.process("prewarm", command, options.prewarm_secs, _guest_environment(options))
        num_compiled, failed = outcomes(text)
        run.console.print(f"compiled {num_compiled} kernels", highlight=False)
        for line in failed:
            run.note(line)


def show(run: Run) -> None:
    rows, prefilled = beside(run.cells), prefill_beside(run.prefill)
    gpu = ", ".join(gpus()) or "no GPU"
    run.console.print(steps_table(f"{gpu}; step times, ratio: SGLang's by ours", rows))
    run.console.print(table_of("prefill; ratio: our rate by SGLang's", prefilled))


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
    add("--output-tokens", type=int, default=160, help="tokens of each of SGLang's answers")
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
    most: dict[Engine, float] = {"sglang": options.sglang_secs, "ours": options.our_secs}
    turns = plan(options.context, {"dense": options.dense, "hisparse": options.hisparse})
    for turn, planned in limits(turns, most, run.secs_left):
        console.print(f"{turn.name}: at most {planned:.0f} s planned", highlight=False)
    for number in range(len(turns)):
        turn, secs = next(limits(turns[number:], most, run.secs_left))
        if not secs:
            run.note(f"{turn.name}: no time left")
            continue
        take_turn(run, turn, secs)
        run.write()
    show(run)
    return 0 if run.cells else 1


if __name__ == "__main__":
    sys.exit(main())
