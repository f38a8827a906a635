"""Lines of the log about what others send, of which somebody may send any number."""

from __future__ import annotations

import time
from collections.abc import Hashable

QUIET_SECS = 60.0
MAX_SUBJECTS = 64


class LogLimiter:
    """Whether a line about a subject may be logged: one in ``QUIET_SECS``, and of all subjects beyond
    ``MAX_SUBJECTS`` together one. For one thread."""

    def __init__(self) -> None:
        self._quiet_until: dict[Hashable, float] = {}

    def permits(self, subject: Hashable = None) -> bool:
        now = time.monotonic()
        if subject not in self._quiet_until and len(self._quiet_until) >= MAX_SUBJECTS:
            self._quiet_until = {of: until for of, until in self._quiet_until.items() if until > now}
            if len(self._quiet_until) >= MAX_SUBJECTS:
                subject = None
        if now < self._quiet_until.get(subject, 0.0):
            return False
        self._quiet_until[subject] = now + QUIET_SECS
        return True
