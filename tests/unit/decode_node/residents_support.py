"""A decode node that gives hisparse requests pages and large hot buffers by itself, with short answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.decode_node import free_slots, next_plan, sizing
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from tests.unit.decode_node.speculation_support import HOT_BUFFER, harness
from tests.unit.decode_node.support import Checkpoint, EngineHarness


def automatic(
    checkpoint: Checkpoint,
    ipc_dir: Path,
    patch: pytest.MonkeyPatch,
    largest: int = HOT_BUFFER,
    **settings: Any,
) -> EngineHarness:
    """Return a node that decides by itself how many device slots a hisparse request has. ``largest``: the
    most entries of a hot buffer; HOT_BUFFER is the full size."""
    patch.setattr(sizing, "DEFAULT_BUFFER", HOT_BUFFER)
    patch.setattr(sizing, "MOST_ENTRIES", largest)
    # Answers are short here.
    patch.setattr(free_slots, "MIN_SAVED", 0.0)
    patch.setattr(next_plan, "PLANS_BETWEEN", 0)
    settings = {"page_size": 16, "device_buffer_size": 0, **settings}
    return harness(checkpoint, ipc_dir, **settings)


def residents(node: EngineHarness) -> list[Request]:
    running = node.engine.requests.select(RequestState.RUNNING)
    return [request for request in running if request.is_resident and not request.is_filling]
