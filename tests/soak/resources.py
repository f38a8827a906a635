"""Resident memory, descriptors and threads of every process of the soak, over time.

A process is named after its service, its part in it and a number, since most are killed and started again:
``decode-0 engine #3``. One that lived long enough must no longer grow (``growth``): its median in the last
fifth of the time that counts is compared with that in the first fifth.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.harness import Service

WARM_SECS = 300.0
"""Time in which a process warms up: caches fill, and allocators see every size."""
WATCHED_SECS = 300.0
"""Least time after WARM_SECS for which growth is asserted; a short soak only reports."""
MAX_GROWTH = {"resident_mib": 16.0, "descriptors": 8, "threads": 4}
"""Limits of ``growth``. 16 MiB of memory are 1 KiB for each of 16,000 requests. Descriptors and threads vary
with the number of clients."""

LANES_PER_DEAD_PEER = 4
"""TCP connections that Mooncake keeps in a prefill engine for each decode engine that has ended
(Mooncake#2930: they are in CLOSE_WAIT, and its interface cannot close them)."""

_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass(frozen=True)
class Usage:
    """What one process has at one moment."""

    resident_mib: float
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return f"{self.resident_mib:.0f} MiB, {self.descriptors} descriptors, {self.threads} threads"


@dataclass
class History:
    """The usages of one process, with their times."""

    name: str
    pid: int
    at_secs: list[float] = field(default_factory=list)
    """Times of ``usages``, since the recorder's start."""
    usages: list[Usage] = field(default_factory=list)

    def growth(self, until_secs: float) -> dict[str, float] | None:
        """Return how much more the process had in the end than once warm; None if it ended too early."""
        warm_at = self.at_secs[0] + WARM_SECS
        usages = [
            usage
            for at_secs, usage in zip(self.at_secs, self.usages, strict=True)
            if warm_at <= at_secs <= until_secs
        ]
        if min(until_secs, self.at_secs[-1]) - warm_at < WATCHED_SECS or len(usages) < 5:
            return None
        fifth = len(usages) // 5
        return {
            name: round(_median(usages[-fifth:], name) - _median(usages[:fifth], name), 1)
            for name in MAX_GROWTH
        }


class Recorder:
    """Records all processes of ``services`` every ``interval_secs``, in a thread of its own."""

    def __init__(self, services: Sequence[Service], interval_secs: float) -> None:
        self.histories: list[History] = []
        self.load_ended_at: float | None = None
        self._shared_inodes: set[int] = set()
        self._services = services
        self._interval_secs = interval_secs
        self._by_process: dict[tuple[int, int], History] = {}
        self._names: Counter[str] = Counter()
        self._started_at = time.monotonic()
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="resources")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def shared_memory_left(self) -> list[str]:
        """Return the segments and semaphores that a process had mapped and that are still there."""
        with os.scandir("/dev/shm") as entries:
            return sorted(entry.name for entry in entries if entry.inode() in self._shared_inodes)

    def load_ends(self) -> None:
        self.load_ended_at = time.monotonic() - self._started_at

    def too_much(self) -> list[str]:
        """Return a line for each process that grew too much under load, and by how much."""
        return [
            f"{history.name}: {name} grew by {grown[name]:g}, at most {most:g} are accepted"
            for history in self.histories
            if (grown := history.growth(self._until_secs)) is not None
            for name, most in self._max_growth(history).items()
            if grown[name] > most
        ]

    def _max_growth(self, history: History) -> dict[str, float]:
        if not history.name.startswith("prefill") or " engine " not in history.name:
            return MAX_GROWTH
        warm_at = history.at_secs[0] + WARM_SECS
        num_runs = sum(
            other.name.startswith("decode") and " engine " in other.name and other.at_secs[0] > warm_at
            for other in self.histories
        )
        return MAX_GROWTH | {"descriptors": MAX_GROWTH["descriptors"] + LANES_PER_DEAD_PEER * num_runs}

    def summary(self) -> dict[str, Any]:
        """Return for each part of a service: its processes, the most one had, growth of the longest-lived."""
        found: dict[str, Any] = {}
        for name in sorted({history.name.partition(" #")[0] for history in self.histories}):
            histories = [history for history in self.histories if history.name.partition(" #")[0] == name]
            usages = [usage for history in histories for usage in history.usages]
            longest = max(histories, key=lambda history: history.at_secs[-1] - history.at_secs[0])
            found[name] = {
                "processes": len(histories),
                "at_most": str(Usage(*(max(values) for values in zip(*map(astuple, usages), strict=True)))),
                "longest": f"{longest.name}, {longest.at_secs[-1] - longest.at_secs[0]:.0f} s, from "
                f"{longest.usages[0]} to {longest.usages[-1]}",
                "growth": longest.growth(self._until_secs),
            }
        return found

    def series(self) -> dict[str, Any]:
        """Return all samples by process: seconds, MiB, descriptors, threads."""
        return {
            history.name: {
                "at_secs": history.at_secs,
                **{kind: [getattr(usage, kind) for usage in history.usages] for kind in MAX_GROWTH},
            }
            for history in self.histories
        }

    @property
    def _until_secs(self) -> float:
        return self.load_ended_at if self.load_ended_at is not None else time.monotonic() - self._started_at

    def _run(self) -> None:
        while not self._over.wait(self._interval_secs):
            self.look()

    def look(self) -> None:
        """Record every process once."""
        names = {service.pid: service.name for service in self._services if service.process is not None}
        at_secs = round(time.monotonic() - self._started_at, 1)
        for pid, group, started_at in processes_of(names):
            try:
                usage, part = _usage(pid), _part(pid, group, names[group])
                self._shared_inodes |= _shared_inodes(pid)
            except (OSError, ValueError):  # it ended meanwhile
                continue
            history = self._by_process.get((pid, started_at))
            if history is None:
                if part is None:  # between fork and exec it looks like its parent
                    continue
                self._names[f"{names[group]} {part}"] += 1
                name = f"{names[group]} {part} #{self._names[f'{names[group]} {part}']}"
                history = self._by_process[pid, started_at] = History(name, pid)
                self.histories.append(history)
            history.at_secs.append(at_secs)
            history.usages.append(usage)


def processes_of(groups: Collection[int]) -> Iterator[tuple[int, int, int]]:
    """Yield process id, process group and start time of each living process in these groups."""
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) in groups and fields[0] != "Z":
            yield int(directory.name), int(fields[2]), int(fields[19])


def _usage(pid: int) -> Usage:
    directory = Path(f"/proc/{pid}")
    resident = int((directory / "statm").read_text().split()[1])
    threads = int((directory / "stat").read_text().rpartition(")")[2].split()[17])
    return Usage(round(resident * _PAGE_MIB, 1), len(os.listdir(directory / "fd")), threads)


def _part(pid: int, group: int, service: str) -> str | None:
    """The part that the process has in its service, or None if it cannot be told yet."""
    if pid == group:
        return "process" if service == "router" else "front"
    words = Path(f"/proc/{pid}/cmdline").read_text()
    if "resource_tracker" in words:
        return "tracker"
    return "engine" if "spawn_main" in words else None


def _shared_inodes(pid: int) -> set[int]:
    """Inodes of mapped files of /dev/shm. Names would not do: a semaphore is renamed after it was mapped."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {int(words[4]) for words in lines if len(words) > 5 and words[5].startswith("/dev/shm/")}


def _median(usages: Sequence[Usage], name: str) -> float:
    return float(statistics.median(getattr(usage, name) for usage in usages))


# --- what is left at the end -----------------------------------------------------------------------------


def listening(ports: Collection[int]) -> list[int]:
    """Return those of ``ports`` on which something still listens."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(found & set(ports))
