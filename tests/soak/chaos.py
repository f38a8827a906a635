"""Disturbances of the nodes during the soak: they are killed, stopped, drained and started again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired

from tests.integration.harness import Service, engine_pids, wait_until
from tests.soak.resources import processes_of

SPARED_AFTER_SECS = 240.0
"""Time after which survivors are spared; five minutes after the start they are back and warm."""
SHORT_STOPS_SECS = (0.5, 3.0)
LONG_STOP_SECS = 15.0
"""A stop beyond every heartbeat limit, of peers and of a node's other ranks."""
END_SECS = 10.0
"""Limit for a node of several ranks to notice that one of them stood still, and to end."""


@dataclass
class Chaos:
    """One event after the other, in the thread that calls ``run``, until ``over`` is set.

    After ``SPARED_AFTER_SECS`` the ``survivors`` are only stopped and woken, so that they live long enough
    among dying peers to show leaks. A node with ``num_ranks`` above 1 ends when a rank stands still for long,
    so a survivor's stops are short then.
    """

    nodes: Sequence[Service]
    survivors: Sequence[Service]
    random: random.Random
    over: threading.Event
    num_ranks: int = 1
    events: Counter[str] = field(default_factory=Counter)
    process_groups: set[int] = field(default_factory=set)
    blackouts: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each time without a living decode node, by the monotonic clock."""

    def __post_init__(self) -> None:
        self._spared: Sequence[Service] = ()

    def run(self) -> None:
        self.process_groups |= {node.pid for node in self.nodes}
        spared_at = time.monotonic() + SPARED_AFTER_SECS
        while not self.over.wait(self.random.uniform(2.0, 8.0)):
            (event,) = self.random.choices(
                (
                    self._kill,
                    self._kill_engine,
                    self._kill_front,
                    self._kill_two,
                    self._stop_and_wake,
                    self._restart,
                ),
                (4, 1, 1, 1, 3, 1),
            )
            self._spared = self.survivors if time.monotonic() > spared_at else ()
            may_be_spared = event == self._stop_and_wake
            event(
                self.random.choice([node for node in self.nodes if may_be_spared or node not in self._spared])
            )

    def _kill(self, node: Service) -> None:
        self._note("kill -9", node)
        node.kill()
        self.over.wait(self.random.choice((0.0, 0.0, 4.0)))
        self._start(node)

    def _kill_engine(self, node: Service) -> None:
        """Kill the engine of any rank. The front must notice, end the other ranks, and exit."""
        self._note("kill -9 of an engine", node)
        os.kill(self.random.choice(engine_pids(node)), signal.SIGKILL)
        assert node.exit_status() == 1
        self._start(node)

    def _kill_front(self, node: Service) -> None:
        """Kill the front. The engines must end with it."""
        self._note("kill -9 of the front", node)
        assert node.process is not None
        node.process.kill()
        node.process.wait()
        wait_until(lambda: not living({node.pid}), f"the engines of {node.name} end")
        self._start(node)

    def _kill_two(self, node: Service) -> None:
        others = [other for other in self.nodes if other is not node and other not in self.survivors]
        other = self.random.choice(others)
        killed_at = time.monotonic()
        for victim in (node, other):
            self._note("kill -9", victim)
            victim.kill()
        self._start(node, other)
        if is_decode(node) and is_decode(other):
            self.blackouts.append((killed_at, time.monotonic()))

    def _stop_and_wake(self, node: Service) -> None:
        """Stop a node, its front or one engine, for a hiccup or beyond every heartbeat limit, and wake it."""
        what = self.random.choice(("node", "front", "engine"))
        secs = self.random.choice((*SHORT_STOPS_SECS, LONG_STOP_SECS))
        may_end = self.num_ranks > 1  # even if only the front is stopped: ranks wake each other through it
        if may_end and node in self._spared:
            secs = min(secs, max(SHORT_STOPS_SECS))
        self._note(f"stop and wake of the {what}", node)
        stopped = {
            "node": lambda: [pid for pid, _, _ in processes_of({node.pid})],
            "front": lambda: [node.pid],
            "engine": lambda: [self.random.choice(engine_pids(node))],
        }[what]()
        _signal(stopped, signal.SIGSTOP)
        self.over.wait(secs)
        _signal(stopped, signal.SIGCONT)
        if may_end:
            self._start_again_if_it_ends(node)

    def _start_again_if_it_ends(self, node: Service) -> None:
        """Start the node again as a supervisor would, if it ends within END_SECS."""
        assert node.process is not None
        try:
            status = node.process.wait(END_SECS)
        except TimeoutExpired:
            return
        self._note(f"ended with status {status} after a stop", node)
        assert status == 1
        self._start(node)

    def _restart(self, node: Service) -> None:
        """Restart the node as an operator would: by SIGTERM, which gives requests in flight some time."""
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


def is_decode(node: Service) -> bool:
    return node.arguments[0] == "decode"


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the node ended meanwhile
            os.kill(pid, number)


def living(process_groups: set[int]) -> list[str]:
    """Return the command lines of the processes in these groups, without zombies."""
    found = []
    for pid, _, _ in processes_of(process_groups):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return found
