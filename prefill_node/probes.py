"""Asks, beside the engine's loop, whether decode nodes that fell silent are alive.

A decode node sends heartbeats between two steps, so one whose step takes long falls silent. Its transport
listens in threads of its own, and answers a probe within milliseconds as long as the process runs. A stopped
process leaves a probe unanswered for a minute, which nobody waits for; but a probe has its time, so that a
busy machine is not taken for a dead one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

ASK_AGAIN_SECS = 1.0
"""After a probe without an answer: a process that is gone says so at once."""
ANSWER_SECS = 5.0
"""For an answer, which takes milliseconds where machines are not starved."""


class Probes:
    """``is_reachable``: of a session; may block, without the interpreter lock. One probe for each at once.

    Times are of ``time.monotonic``.
    """

    def __init__(self, is_reachable: Callable[[str], bool]) -> None:
        self._is_reachable = is_reachable
        self._lock = threading.Lock()
        self._asked: dict[str, float] = {}
        """When the probes began that are under way."""
        self._denied: dict[str, float] = {}
        """When the last probe began that failed, by session."""
        self._answered: list[str] = []

    def ask(self, session: str, now_secs: float) -> None:
        """Start a probe, unless one is under way; returns at once."""
        with self._lock:
            if session in self._asked:
                return
            self._asked[session] = now_secs
        name = f"probe {session}"
        threading.Thread(target=self._probe, args=(session,), name=name, daemon=True).start()

    def take_answered(self) -> list[str]:
        """Sessions that answered since the last call."""
        with self._lock:
            answered, self._answered = self._answered, []
            return answered

    def is_denied(self, session: str, since_secs: float, now_secs: float) -> bool:
        """Whether a probe that began after ``since_secs`` failed, or had its time without an answer."""
        with self._lock:
            began = self._asked.get(session, now_secs)
            is_overdue = began > since_secs and now_secs - began >= ANSWER_SECS
            return is_overdue or self._denied.get(session, since_secs) > since_secs

    def forget(self, session: str) -> None:
        """Nobody asks about it any more."""
        with self._lock:
            self._denied.pop(session, None)

    def _probe(self, session: str) -> None:
        is_alive = False
        try:
            is_alive = self._is_reachable(session)
        except Exception as error:  # no answer either
            log.warning("the probe of session %s failed: %s", session, error)
        with self._lock:
            if is_alive:
                self._answered.append(session)
                self._denied.pop(session, None)
            else:
                self._denied[session] = self._asked[session]
        if not is_alive:
            time.sleep(ASK_AGAIN_SECS)
        with self._lock:
            del self._asked[session]
