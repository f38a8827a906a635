"""Order of look-ups, in which slow endpoints do not keep others waiting.

``LookUpTimes`` owns how long the look-ups of endpoints took. A host that drops packets blocks a thread for
seconds, again and again, and clients choose the hosts. A free thread of ``Discovery`` therefore takes the
look-up whose endpoint took least time when it was looked up last: first those that answered or refused, then
those that were never tried, and last those of which nothing was heard.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TypeVar

T = TypeVar("T")

UNTRIED_SECS = 1.0
"""The time that counts for an endpoint that was never looked up: longer than an answer takes, and less than
the limit of a look-up."""
MAX_REMEMBERED = 4096
"""Most endpoints whose time is remembered; those looked up longest ago are forgotten."""

Endpoint = tuple[str, int]
"""Host and port."""


class LookUpTimes:
    """Times of endpoints' last look-ups. Its methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._secs: OrderedDict[Endpoint, float] = OrderedDict()
        """How long the last look-up of an endpoint took; those looked up longest ago come first."""

    def fastest(self, endpoints: Sequence[Endpoint]) -> Endpoint:
        """Return the endpoint whose look-up is expected to be over first; of equal ones the first."""
        with self._lock:
            return min(endpoints, key=lambda endpoint: self._secs.get(endpoint, UNTRIED_SECS))

    def measured(self, endpoint: Endpoint, look_up: Callable[[], T]) -> T:
        """Make a look-up, and remember how long it took, whatever came of it."""
        started_at = time.monotonic()
        try:
            return look_up()
        finally:
            with self._lock:
                self._secs[endpoint] = time.monotonic() - started_at
                self._secs.move_to_end(endpoint)
                if len(self._secs) > MAX_REMEMBERED:
                    self._secs.popitem(last=False)
