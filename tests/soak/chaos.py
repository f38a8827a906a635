"""What happens to the nodes during the soak: they are killed, stopped, told to leave, and started again."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.harness import Service

SPARED_AFTER_SECS = 240.0
"""The survivors are back, and warm, five minutes after the start."""


@dataclass
class Chaos:
    """One event after the other, in the thread that calls ``run``, until ``over`` is set.

    After ``SPARED_AFTER_SECS`` the ``survivors`` among the nodes are only stopped and woken: whoever lives on
    among dying peers is watched for what it does not give back.
    """

    nodes: Sequence[Service]
    survivors: Sequence[Service]
    random: random.Random
    over: threading.Event
    events: Counter[str] = field(default_factory=Counter)
    process_groups: set[int] = field(default_factory=set)

    def run(self) -> None:
        self.process_groups |= {node.pid for node in self.nodes}
        spared_at = time.monotonic() + SPARED_AFTER_SECS
        while not self.over.wait(self.random.uniform(2.0, 8.0)):
            (event,) = self.random.choices(
                (self._kill, self._kill_engine, self._kill_two, self._stop_and_wake, self._restart),
                (4, 1, 1, 2, 1),
            )
            spared = self.survivors if time.monotonic() > spared_at and event != self._stop_and_wake else ()
            event(self.random.choice([node for node in self.nodes if node not in spared]))

    def _kill(self, node: Service) -> None:
        self._note("kill -9", node)
        node.kill()
        self.over.wait(self.random.choice((0.0, 0.0, 4.0)))
        self._start(node)

    def _kill_engine(self, node: Service) -> None:
        """The front is to notice and to leave."""
        self._note("kill -9 of the engine", node)
        os.kill(engine_pid(node), signal.SIGKILL)
        assert node.process is not None
        node.process.wait(60)
        self._start(node)

    def _kill_two(self, node: Service) -> None:
        others = [other for other in self.nodes if other is not node and other not in self.survivors]
        other = self.random.choice(others)
        for victim in (node, other):
            self._note("kill -9", victim)
            victim.kill()
        self._start(node, other)

    def _stop_and_wake(self, node: Service) -> None:
        """As long as a short hiccup, or past all patience of the peers."""
        self._note("stop and wake", node)
        node.signal_group(signal.SIGSTOP)
        self.over.wait(self.random.choice((0.5, 3.0, 15.0)))
        node.signal_group(signal.SIGCONT)

    def _restart(self, node: Service) -> None:
        """As an operator does it: SIGTERM, and requests in flight have some time."""
        self._note("restart", node)
        assert node.stop() == 0
        self._start(node)

    def _start(self, *nodes: Service) -> None:
        for node in nodes:
            node.start()
            self.process_groups.add(node.pid)
        for node in nodes:
            node.wait_healthy()

    def _note(self, event: str, node: Service) -> None:
        self.events[f"{event}: {node.name}"] += 1


def engine_pid(node: Service) -> int:
    """The child of the front that has the most memory."""
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()

    def resident_pages(pid: str) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])

    return int(max(children, key=resident_pages))


def living(process_groups: set[int]) -> list[str]:
    """Command lines of the processes in these groups, zombies aside."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group = (directory / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) in process_groups and state != "Z":
                found.append((directory / "cmdline").read_text().replace("\0", " "))
        except (OSError, ValueError):  # it ended meanwhile
            continue
    return found
