"""Asks, beside the engine's loop, whether decode nodes that fell silent are alive.

A decode node sends heartbeats between two steps, so one whose step takes long falls silent. Its transport
listens in threads of its own, and answers a probe within milliseconds as long as the process runs. A stopped
process leaves a probe unanswered for a minute; nobody waits for that: only an answer counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

ASK_AGAIN_SECS = 1.0
"""After a probe without an answer: a process that is gone says so at once."""


class Probes:
    """``is_reachable``: of a session; may block, without the interpreter lock. One probe for each at once."""

    def __init__(self, is_reachable: Callable[[str], bool]) -> None:
        self._is_reachable = is_reachable
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._answered: list[str] = []

    def ask(self, session: str) -> None:
        """Start a probe, unless one is under way; returns at once."""
        with self._lock:
            if session in self._asked:
                return
            self._asked.add(session)
        name = f"probe {session}"
        threading.Thread(target=self._probe, args=(session,), name=name, daemon=True).start()

    def take_answered(self) -> list[str]:
        """Sessions that answered since the last call."""
        with self._lock:
            answered, self._answered = self._answered, []
            return answered

    def _probe(self, session: str) -> None:
        is_alive = False
        try:
            is_alive = self._is_reachable(session)
        except Exception as error:  # no answer either
            log.warning("the probe of session %s failed: %s", session, error)
        if is_alive:
            with self._lock:
                self._answered.append(session)
        else:
            time.sleep(ASK_AGAIN_SECS)
        with self._lock:
            self._asked.discard(session)
