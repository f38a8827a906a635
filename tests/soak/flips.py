"""Failing memory in the soak: bits flip in the host pools of decode nodes, and bad pages are given back."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from tests.integration.harness import Service, engine_pids
from tests.integration.wrong_rows import HostPool
from tests.waiting import WAIT_SECS

FLIP_SECS = 0.1
REPAIR_SECS = 2.0


class Flips:
    """Flips ``per_sec`` bits in the host pool of each engine of ``nodes`` while ``going_on``.

    ``num_bytes``: the size of a pool. Every REPAIR_SECS the pages that were set aside are given back, as by
    an operator: their memory is no worse than any other.
    """

    def __init__(self, nodes: Sequence[Service], per_sec: float, num_bytes: int, seed: int) -> None:
        self.num_flips = 0
        self.num_pages = 0
        """Pages that were set aside and given back."""
        self._nodes = nodes
        self._per_sec = per_sec
        self._num_bytes = num_bytes
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._pools: dict[int, HostPool] = {}

    @contextmanager
    def going_on(self) -> Iterator[None]:
        threads = [threading.Thread(target=each) for each in (self._flip, self._repair)]
        for thread in threads if self._per_sec else ():
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads if self._per_sec else ():
                thread.join()

    def _flip(self) -> None:
        while not self._over.wait(FLIP_SECS):
            for node in self._nodes:
                with contextlib.suppress(OSError):  # the node ended meanwhile
                    for pid in engine_pids(node):
                        self._flip_in(pid)

    def _flip_in(self, pid: int) -> None:
        if pid not in self._pools:
            with contextlib.suppress(ValueError):  # it has no pool yet
                self._pools[pid] = HostPool(pid, self._num_bytes, self._random.randrange(1 << 30))
        if (pool := self._pools.get(pid)) is not None:
            num_bits = int(self._per_sec * FLIP_SECS + self._random.random())
            pool.flip(num_bits)
            self.num_flips += num_bits

    def _repair(self) -> None:
        while not self._over.wait(REPAIR_SECS):
            self.give_back()

    def give_back(self) -> None:
        for node in self._nodes:
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):  # it is down, or is starting
                for page in httpx.get(node.url + "/quarantine", timeout=WAIT_SECS).json()["pages"]:
                    query = f"pool={page['pool']}&slot={page['start']}&rank={page['rank']}"
                    answer = httpx.post(f"{node.url}/release_quarantine?{query}", timeout=WAIT_SECS)
                    self.num_pages += answer.status_code == 200
