"""Limits log lines about what other machines send or what goes wrong again and again.

Control channels, same-host lanes, the check of API keys, both nodes, the router's health checks and the
export of traces ask a ``LogLimiter`` before such a line.
"""

from __future__ import annotations

import time
from collections.abc import Hashable

QUIET_SECS = 60.0
"""Time after a line in which no other line about the same subject is logged."""
MAX_SUBJECTS = 64
"""Number of subjects that are told apart."""


class LogLimiter:
    """Permits one log line in ``QUIET_SECS`` for each subject, and for all beyond ``MAX_SUBJECTS`` together.

    Only one thread may use it.
    """

    def __init__(self) -> None:
        self._quiet_until: dict[Hashable, float] = {}

    def permits(self, subject: Hashable = None) -> bool:
        """Whether a line about ``subject`` may be logged now. If so, it counts as logged. None is a subject,
        too: the only one of some callers, and the one that subjects beyond MAX_SUBJECTS share."""
        now = time.monotonic()
        if subject not in self._quiet_until and len(self._quiet_until) >= MAX_SUBJECTS:
            self._quiet_until = {other: until for other, until in self._quiet_until.items() if until > now}
            if len(self._quiet_until) >= MAX_SUBJECTS:
                subject = None
        if now < self._quiet_until.get(subject, 0.0):
            return False
        self._quiet_until[subject] = now + QUIET_SECS
        return True
