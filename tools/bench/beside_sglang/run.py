"""Holds what a run of the benchmark has measured, and starts its processes one after the other.

``__main__.py`` makes one ``Run``; each turn starts its process by it and adds its cells to it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tools.bench.beside_sglang.comparison import beside, http_beside, prefill_beside
from tools.bench.beside_sglang.environment import (
    HOST_BYTES,
    accepting,
    guest_command,
    guest_environment,
    has_free_gpu,
    versions,
)
from tools.bench.beside_sglang.guest import GuestTurn
from tools.bench.beside_sglang.model import tokens_of_step
from tools.bench.beside_sglang.turns import Turn
from tools.bench.facts import ROOT, gpus
from tools.bench.report import write_report

FREE_MIB: Final = 2500
"""Memory in use up to which a GPU counts as free."""
FREE_SECS: Final = 20.0
"""Longest wait until the driver has taken back the last process's memory."""
KEPT_LOG_CHARS: Final = 3000


@dataclass
class Run:
    """Everything measured so far, and the time that is left."""

    options: argparse.Namespace
    console: Console
    deadline: float
    """When everything must have ended, on the monotonic clock."""
    cells: list[dict[str, Any]] = field(default_factory=list)
    """Cells of decode steps; those of prefill and of answers over HTTP follow (``comparison.py``)."""
    prefill: list[dict[str, Any]] = field(default_factory=list)
    http: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """The parts that were dropped or not reached, and why."""
    secs: dict[str, float] = field(default_factory=dict)
    """How long each part took, by its name."""

    @property
    def secs_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def vocabulary(self) -> int:
        """Tokens of the model's vocabulary."""
        config = json.loads((self.options.model / "config.json").read_text())
        return int(config["vocab_size"])

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Keep and print how long this part takes."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.secs[name] = time.monotonic() - started
            self.console.print(f"{name}: {self.secs[name]:.0f} s", highlight=False)

    @contextmanager
    def started(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """Start a process; yield it and the file of what it prints. Its group ends with the context."""
        path = self.options.logs / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=ROOT, env=dict(environment), start_new_session=True
            )
            try:
                yield process, path
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                wait_for_gpu()

    def process(self, name: str, command: Sequence[str], secs: float, environment: Mapping[str, str]) -> str:
        """Run a process to its end or its limit, and return what it printed, which stays in a file, too."""
        with self.timed(name), self.started(name, command, environment) as (process, path):
            try:
                status = f"exited with status {process.wait(max(1.0, min(secs, self.secs_left)))}"
            except subprocess.TimeoutExpired:
                status = "reached its limit"
        if status != "exited with status 0":
            self.note(f"{name} {status}; {log_end(path)}")
        return path.read_text(errors="replace")

    def guest_turn(self, turn: Turn, port: int = 0) -> list[str]:
        """Return the command of SGLang's process: a server on ``port``, or with 0 an engine that measures."""
        options = self.options
        of_guest = GuestTurn(
            model=str(options.model),
            mode=turn.mode,
            context=turn.context,
            batches=turn.batches,
            num_output_tokens=options.output_tokens,
            buffer=options.buffer,
            vocabulary=self.vocabulary,
            port=port,
            stream_interval=options.stream_interval,
            kv_cache_dtype=options.kv_cache_dtype,
            num_drafts=options.drafts,
        )
        return guest_command("guest", json.dumps(asdict(of_guest)))

    def guest_environment(self) -> dict[str, str]:
        """Return the variables of SGLang's processes, with the main memory that it may take and how many
        tokens of a request a step makes."""
        options = self.options
        own = {HOST_BYTES: str(int(options.host_gb * 1e9))}
        if options.drafts:
            own |= accepting(tokens_of_step(options.drafts, options.draft_agreement))
        return {**guest_environment(options.guest, options.cache), **own}

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
                "http": http_beside(self.http),
                "notes": self.notes,
                "secs": self.secs,
            },
        )


def log_end(path: Path) -> str:
    """Return the end of a process's output, after the file's name."""
    return f"the end of {path.name}:\n{path.read_text(errors='replace')[-KEPT_LOG_CHARS:]}"


def wait_for_gpu() -> None:
    """Wait until the driver has taken back the last process's memory, or has had its time for it."""
    deadline = time.monotonic() + FREE_SECS
    while not has_free_gpu(FREE_MIB) and time.monotonic() < deadline:
        time.sleep(0.5)
