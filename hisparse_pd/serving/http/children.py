"""Child processes of a node: engines and further fronts, which end with the process that spawned them.

That process is the first one of the node on its machine. ``EngineProcesses`` (``first_front.py``) and
``Fronts`` (``fronts.py``) are ``Children`` of one kind each.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess

log = logging.getLogger(__name__)

EXIT_SECS = 5.0
"""Time that children have to exit: they send their last answers, and the interpreter shuts down."""


class Children:
    """The child processes of one kind: engines or fronts."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self._reported: list[BaseProcess] = []
        """Processes that ``exits`` has reported."""

    def spawn(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        """Start a child. Must be called from the main thread: the kernel ends a child with its starting
        thread."""
        process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, name=name)
        process.start()
        self.processes.append(process)

    @property
    def sentinels(self) -> list[int]:
        """File descriptors each of which becomes readable when a child has exited."""
        return [process.sentinel for process in self.processes]

    def exits(self) -> str:
        """Report, in words, the children that have exited. Returns an empty string if there are none.

        A sentinel becomes readable a moment before the status does, so this waits for the status.
        """
        ready = multiprocessing.connection.wait(self.sentinels, timeout=0)
        exited = [process for process in self.processes if process.sentinel in ready]
        _join(exited)
        self._reported += exited
        return _statuses(exited)

    def wait(self) -> None:
        """Wait until all have ended, for ``EXIT_SECS`` at most. It is called when they were told to end, or
        when one of them has ended.

        Children that fail meanwhile are logged: a killed rank may end later than one that notices its loss.
        """
        _join(self.processes)
        if failed := [
            process for process in self.processes if process.exitcode and process not in self._reported
        ]:
            log.error("%s, too", _statuses(failed))

    def kill(self) -> None:
        """Kill children that still run. They ignore gentler signals, to which their parent reacts."""
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
