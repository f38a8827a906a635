"""Waiting for what another thread, task or process does, for as long as a busy machine may take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

WAIT_SECS: Final = 60.0
"""Limit of a test's wait; one that waits longer has failed."""
WAIT_MS: Final = int(WAIT_SECS * 1000)
"""``WAIT_SECS`` for polls of sockets."""
NEVER_SECS: Final = 3600.0
"""A value for the product's limits that must not expire in a test, however long its waits take."""


def wait_until(
    condition: Callable[[], T],
    what: str = "the condition",
    timeout_secs: float = WAIT_SECS,
    poll_secs: float = 0.005,
) -> T:
    """Poll until ``condition`` is true, and return its value. Raises TimeoutError, which names ``what``."""
    deadline = time.monotonic() + timeout_secs
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_secs:g} s")
        time.sleep(poll_secs)
    return value


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    deadline = time.monotonic() + WAIT_SECS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_SECS} s"
        await asyncio.sleep(0.005)
