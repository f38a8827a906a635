"""Runs services as child processes: starts them, waits until they are healthy, and stops them together.

``hisparse-pd pair`` (``commands/pair.py``) runs its three services by it. A node that loads reports its
progress, and is waited for as long as it makes any (``ProgressTimeout``). When a child dies, the others are
stopped. A signal to the parent stops all of them, in the reverse order of their start. If the parent itself
is killed, the kernel of Linux sends the children SIGTERM.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

import httpx

from hisparse_pd.base.process import stop_signals

log = logging.getLogger(__name__)

POLL_INTERVAL_SECS = 0.1
PROBE_TIMEOUT_SECS = 2.0
STOP_TIMEOUT_SECS = 20.0
_PR_SET_PDEATHSIG = 1


class ServiceError(Exception):
    """A service died or did not become healthy; the message names it."""


@dataclass(frozen=True)
class Child:
    """One service to run."""

    name: str
    command: list[str]
    health_url: str
    """URL that answers 2xx when the service is healthy."""
    drain_timeout_secs: float = 0.0
    """Time that the service may take to finish its requests, before STOP_TIMEOUT_SECS begins."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that it has beside the parent's."""


class ProgressTimeout:
    """A timeout that begins anew with every progress."""

    def __init__(self, timeout_secs: float) -> None:
        self._timeout_secs = timeout_secs
        self._progress: dict[str, object] = {}
        self._renewed_at = time.monotonic()

    def note(self, name: str, progress: object) -> None:
        """Note how far service ``name`` is; None, for a service that does not say, is no progress."""
        if progress is not None and progress != self._progress.get(name):
            self._progress[name] = progress
            self._renewed_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._renewed_at > self._timeout_secs


class Supervisor:
    """Starts ``children`` in their order and stops them in the reverse one."""

    def __init__(self, children: Sequence[Child], startup_timeout_secs: float) -> None:
        self._children = children
        self._startup_timeout_secs = startup_timeout_secs
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stopping = threading.Event()

    def run(self, on_healthy: Callable[[], None]) -> int:
        """Run the children until a signal or the death of one. Must be called from the main thread.

        ``on_healthy`` is called once all are healthy. Returns the exit status: 0 after a signal; 1 if a child
        died, did not become healthy, or had to be killed.
        """
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        status = 0
        try:
            for child in self._children:
                self._start(child)
            if self._wait_healthy():
                on_healthy()
            while not self.stopping.wait(POLL_INTERVAL_SECS):
                self._check_alive()
        except ServiceError as error:
            log.error("%s", error)
            status = 1
        finally:
            all_stopped = self._stop_all()
        return status if all_stopped else 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopping.is_set():  # at the second signal, services give up their requests in flight
            for process in self.processes.values():
                process.terminate()
        self.stopping.set()

    def _start(self, child: Child) -> None:
        # In a process group of its own: Ctrl-C reaches the parent alone, which stops the children in order.
        self.processes[child.name] = subprocess.Popen(
            child.command,
            env=os.environ | child.environment,
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=end_with_parent(),
        )
        log.info("started the %s service, pid %d", child.name, self.processes[child.name].pid)

    def _wait_healthy(self) -> bool:
        """Wait for all children. Returns False if a signal came first. Raises ServiceError."""
        limit = ProgressTimeout(self._startup_timeout_secs)
        waiting = list(self._children)
        # Certificates are not checked: the services are this process's own children.
        with httpx.Client(timeout=PROBE_TIMEOUT_SECS, trust_env=False, verify=False) as client:
            while waiting:
                if self.stopping.wait(POLL_INTERVAL_SECS):
                    return False
                self._check_alive()
                answers = {child.name: probe(client, child.health_url) for child in waiting}
                waiting = [child for child in waiting if not answers[child.name].is_healthy]
                for name, answer in answers.items():
                    limit.note(name, answer.loading)
                if waiting and limit.is_over:
                    names = ", ".join(child.name for child in waiting)
                    raise ServiceError(
                        f"not healthy, and no progress for {self._startup_timeout_secs:g} s: {names}; "
                        "see the log above"
                    )
        return True

    def _check_alive(self) -> None:
        for name, process in self.processes.items():
            status = process.poll()
            if status is not None:
                how = (
                    f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
                )
                raise ServiceError(f"the {name} service {how}; stopping the others")

    def _stop_all(self) -> bool:
        """Send SIGTERM, wait, then send SIGKILL. Returns False if a child had to be killed."""
        all_stopped = True
        for child in reversed(self._children):
            process = self.processes.get(child.name)
            if process is None or process.poll() is not None:
                continue
            process.terminate()
            timeout_secs = child.drain_timeout_secs + STOP_TIMEOUT_SECS
            try:
                process.wait(timeout_secs)
            except subprocess.TimeoutExpired:
                log.error("the %s service did not stop within %g s; killing it", child.name, timeout_secs)
                process.kill()
                process.wait()
                all_stopped = False
        return all_stopped


@dataclass(frozen=True)
class Health:
    """A service's answer to a probe."""

    is_healthy: bool = False
    loading: object = None
    """How far a node is that loads its model; None for any other service."""


def probe(client: httpx.Client, health_url: str) -> Health:
    """Ask ``/health`` once. A service that does not answer is not healthy."""
    try:
        answer = client.get(health_url)
        return Health(answer.is_success, None if answer.is_success else answer.json().get("loading"))
    except (httpx.HTTPError, ValueError, AttributeError):  # no answer, no JSON, no object
        return Health()


def end_with_parent() -> Callable[[], None] | None:
    """Return what a child calls before exec: on Linux, ask the kernel for SIGTERM when the parent is gone."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    return ask
