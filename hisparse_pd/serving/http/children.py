"""Processes of a node that its first one on a machine starts, and that end with it."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess

log = logging.getLogger(__name__)

EXIT_SECS = 5.0
"""For one that was told to leave: its last answers, and the interpreter's end."""


class Children:
    """Engines, or fronts."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self._told: list[BaseProcess] = []
        """Those of whose exit ``exits`` has told."""

    def spawn(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """From the main thread: the kernel ends the children when the thread that started them ends."""
        process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, name=name)
        process.start()
        self.processes.append(process)

    @property
    def sentinels(self) -> list[int]:
        """File descriptors each of which becomes readable when a child has exited."""
        return [process.sentinel for process in self.processes]

    def exits(self) -> str:
        """Which have exited, and how; a sentinel says so a moment before the status can be read."""
        ready = multiprocessing.connection.wait(self.sentinels, timeout=0)
        exited = [process for process in self.processes if process.sentinel in ready]
        _join(exited)
        self._told += exited
        return _statuses(exited)

    def wait(self) -> None:
        """Until all have ended, or are overdue, when one has or they were told to.

        The log names those that fail meanwhile: a killed rank ends later than one that notices its loss.
        """
        _join(self.processes)
        if failed := [
            process for process in self.processes if process.exitcode and process not in self._told
        ]:
            log.error("%s, too", _statuses(failed))

    def kill(self) -> None:
        """Whoever is left: they ignore the signals that are for the first process."""
        for process in (alive := [process for process in self.processes if process.is_alive()]):
            log.info("%s still runs: kill", process.name)
            process.kill()
        _join(alive)


def _statuses(processes: Iterable[BaseProcess]) -> str:
    return ", ".join(f"{process.name} exited with status {process.exitcode}" for process in processes)


def _join(processes: Iterable[BaseProcess]) -> None:
    deadline = time.monotonic() + EXIT_SECS
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
