"""A decode node with a small host pool, and helpers of tests in which its prefill node or a request fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from hisparse_pd.base.vocabulary import HisparseFlag
from hisparse_pd.core.paging.pools import PoolKind, Stage
from hisparse_pd.decode_node.quarantine import Quarantined
from tests.unit.decode_node.support import EngineHarness, random_prompt
from tests.waiting import NEVER_SECS

PROMPT = random_prompt(7, 300)
HOST_TOKENS = 576
"""Host pool with room for one request with PROMPT, not for two."""
QUARANTINE_SECS = NEVER_SECS
"""Quarantine of the node that ``failing_node`` returns; it is over when a test says so."""
NUM_NEW = 6
FAILING = {
    "host_pool_tokens": HOST_TOKENS,
    "device_pool_tokens": 1024,
    "max_running_requests": 4,
    "quarantine_secs": QUARANTINE_SECS,
    "room_timeout_secs": NEVER_SECS,
}
"""Settings of the node that ``failing_node`` returns."""


@contextmanager
def silence_is_noticed(node: EngineHarness) -> Iterator[None]:
    """Shorten the limit of silence, here only: on a busy machine an answer may be late by as much."""
    with patch.object(node.engine.peers, "health_timeout_secs", 1.0):
        yield


def end_quarantine(node: EngineHarness) -> None:
    """Let go of the slots that wait for the end of a quarantine alone, as if it were over."""
    node.engine.requests.quarantine.expire(time.monotonic() + QUARANTINE_SECS)


def num_quarantined_slots(node: EngineHarness) -> int:
    """Return the host slots of rooms in quarantine."""
    return node.engine.requests.pools.used(Stage.QUARANTINED)[PoolKind.HOST]


def aborted_room(node: EngineHarness) -> Quarantined:
    """Return a room whose client is gone and of which its prefill node says nothing any more."""
    node.double.answers_aborts = False
    node.leave(node.entrust(PROMPT, 8))
    node.turn_until(lambda: node.double.aborts)
    (entry,) = node.engine.requests.quarantine
    return entry


def check_serves(node: EngineHarness) -> None:
    """Check that the node goes on serving."""
    node.double.delivers = True
    assert len(node.tokens_of(node.generate(PROMPT, 4, HisparseFlag.TRUE))) == 4
