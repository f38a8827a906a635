"""Measures how long the ranks of a machine take to agree, through shared memory and by gloo over loopback.

    python -m tools.bench.rank_agreement [--ranks 1 2 4 8] [--calls 1000] [--rest-ms 0 5] [--out STEM]

Every rank is a process, as in a node; no GPU is needed. Without rest, agreements follow each other. With
rest, all ranks begin an agreement together every so many milliseconds, as in steps, and sleep in between.
``tools.bench.whole_node`` calls ``agreement_us`` on its own ranks. Times are the first rank's, by its clock,
from giving its four numbers to having those of all. Where there are more ranks than cores, they mostly wait
for cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hisparse_pd.base.vocabulary import RankPlace
from hisparse_pd.core.model.rank_group import RankGroup
from tools.bench.facts import OUT
from tools.bench.report import make_console, table_of, write_report

NUM_WARM_CALLS = 50
SAID = (1, 0, 0, 1)
"""The numbers that a rank says in an agreement: as many as before a step."""
AWAKE_SECS = 0.0005
"""How long a rank is awake before an agreement, because a sleep may end late."""
LIMIT_SECS = 300.0
"""Time limit for the measurement of one number of ranks, their start included."""
GRACE_SECS = 5.0
"""How long ranks have to end by themselves before they are killed."""


def agreement_us(ranks: RankGroup, num_calls: int, *, by_network: bool = False, rest_secs: float = 0) -> Any:
    """Return median, p99 and maximum of this rank's agreements, in us. All ranks make the same call.

    ``by_network``: agree by gloo, even where ranks share memory. ``rest_secs``: from one beginning to
    the next; 0: without rest.
    """
    agree = ranks.agree_over_network if by_network else ranks.agree
    for _ in range(NUM_WARM_CALLS):
        agree(*SAID)
    # All ranks of a machine have the same clock, so they can begin together.
    begin_at = max(microseconds for (microseconds,) in agree(time.monotonic_ns() // 1000)) / 1e6
    secs = []
    for number in range(num_calls):
        if rest_secs:
            _sleep_until(begin_at + (number + 1) * rest_secs)
        started = time.perf_counter()
        agree(*SAID)
        secs.append(time.perf_counter() - started)
    us = 1e6 * np.array(secs)
    return {
        "median_us": np.median(us).item(),
        "p99_us": np.percentile(us, 99).item(),
        "max_us": us.max().item(),
    }


def _sleep_until(tick: float) -> None:
    time.sleep(max(0.0, tick - AWAKE_SECS - time.monotonic()))
    while time.monotonic() < tick:
        os.sched_yield()


def run(place: RankPlace, arguments: argparse.Namespace, sender: Connection) -> None:
    """Run one rank; the first one sends the rows."""
    torch.set_num_threads(1)
    ranks = RankGroup(place, torch.device("cpu"), agree_secs=60.0, forward_secs=60.0)
    rows = []
    for rest_ms in arguments.rest_ms:
        row: dict[str, Any] = {"ranks": place.size, "cores": len(os.sched_getaffinity(0)), "rest_ms": rest_ms}
        for name, by_network in (("memory", False), ("network", True)):
            if by_network or ranks.shares_memory:
                found = agreement_us(ranks, arguments.calls, by_network=by_network, rest_secs=rest_ms / 1e3)
                row |= {f"{name}_{figure}": value for figure, value in found.items()}
        rows.append(row)
    if place.rank == 0:
        sender.send(rows)
    ranks.leave()


def rows_of(size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each rest, measured by ``size`` ranks that are started here."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        places = [RankPlace(rank, size, f"{directory}/ranks") for rank in range(size)]
        processes = [
            context.Process(target=run, args=(place, arguments, sender), daemon=True) for place in places
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            if not receiver.poll(LIMIT_SECS):
                raise TimeoutError(
                    f"{size} ranks have not agreed {arguments.calls} times in {LIMIT_SECS:g} s"
                )
            rows: list[dict[str, Any]] = receiver.recv()
        finally:
            for process in processes:
                process.join(GRACE_SECS)
                process.kill()
                process.join()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of ranks, with a row for each"
    )
    parser.add_argument("--calls", type=int, default=1000, help="number of timed agreements")
    parser.add_argument(
        "--rest-ms", type=float, nargs="+", default=[0, 5], help="milliseconds from one agreement to the next"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT / "rank_agreement", help="JSON file, without its suffix"
    )
    arguments = parser.parse_args(argv)
    rows = [row for size in arguments.ranks for row in rows_of(size, arguments)]
    write_report(arguments.out, {"calls": arguments.calls, "rows": rows})
    make_console().print(table_of("agreements of ranks, us", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
