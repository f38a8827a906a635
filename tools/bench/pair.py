"""Starts a pair and its router on loopback with ``hisparse-pd pair``, for measurements over HTTP.

``running_pair`` yields the URLs once all three are healthy, and stops them at its end. ``counters_in`` reads
their metrics.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from hisparse_pd.base.ports import free_port

STOP_TIMEOUT_SECS = 90.0
METRICS_TIMEOUT_SECS = 5.0


@dataclass
class Pair:
    """The running services."""

    router_url: str
    prefill_url: str
    decode_url: str

    def counter(self, url: str, name: str) -> int:
        """Return the sum of a node's counter over its labels."""
        text = httpx.get(f"{url}/metrics", timeout=METRICS_TIMEOUT_SECS, trust_env=False).text
        return int(counters_in(text, (name,))[name])


def counters_in(text: str, names: Iterable[str]) -> dict[str, float]:
    """Return counters of a page of metrics, each the sum over its labels, 0 for a missing one."""
    totals = dict.fromkeys(names, 0.0)
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        if (name := sample.name.removeprefix("hisparse_pd:")) in totals:
            totals[name] += sample.value
    return totals


class PairError(Exception):
    """The pair did not start or did not stop."""


@contextmanager
def running_pair(
    model_path: Path, options: Sequence[str], console: Console, start_secs: float = math.inf
) -> Iterator[Pair]:
    """Start prefill node, decode node and router with these options of ``hisparse-pd pair``.

    Raises PairError, also where they are not healthy after ``start_secs``.
    """
    ports = {name: free_port() for name in ("--port", "--prefill-port", "--decode-port", "--bootstrap-port")}
    words = [*options, *(f"{name}={port}" for name, port in ports.items())]
    with tempfile.TemporaryDirectory(prefix="hisparse-pd-bench-") as directory:
        log_path = Path(directory) / "pair.log"
        with log_path.open("wb") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "hisparse_pd", "pair", "--model-path", str(model_path), *words],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                process_group=0,  # Ctrl-C reaches the caller, which stops the pair
            )
        try:
            urls = (ports[name] for name in ("--port", "--prefill-port", "--decode-port"))
            pair = Pair(*(f"http://127.0.0.1:{port}" for port in urls))
            _wait_for_pair(process, pair, console, start_secs)
            yield pair
        except PairError:
            console.print(log_path.read_text(errors="replace")[-6000:], markup=False, highlight=False)
            raise
        finally:
            status = _stop(process)
        if status != 0:
            console.print(log_path.read_text(errors="replace")[-6000:], markup=False, highlight=False)
            raise PairError(f"the pair stopped with status {status}")


def _wait_for_pair(process: subprocess.Popen[bytes], pair: Pair, console: Console, start_secs: float) -> None:
    """Wait until the pair is healthy. Raises PairError after ``start_secs``, or when ``hisparse-pd pair``
    exits, which it does by itself if a service's start makes no progress."""
    deadline = time.monotonic() + start_secs
    waiting = {"prefill node": pair.prefill_url, "decode node": pair.decode_url, "router": pair.router_url}
    with console.status("") as status:
        while waiting:
            status.update(f"waiting for {', '.join(waiting)}")
            waiting = {name: url for name, url in waiting.items() if not is_healthy(url)}
            if process.poll() is not None:
                raise PairError(f"the pair exited with status {process.returncode} while it started")
            if waiting and time.monotonic() > deadline:
                raise PairError(f"{', '.join(waiting)}: not healthy after {start_secs:.0f} s")
            time.sleep(0.1)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def wait_healthy(url: str, timeout_secs: float, has_ended: Callable[[], bool] = lambda: False) -> bool:
    """Wait for one service, for benchmarks that start services by themselves. Returns whether it got healthy
    in time, and before ``has_ended`` was true."""
    deadline = time.monotonic() + timeout_secs
    while not is_healthy(url):
        if has_ended() or time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _stop(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(STOP_TIMEOUT_SECS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
