"""Fixtures of more than one room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def on_node(tmp_path: Path) -> Callable[..., None]:
    from tests.unit.api.support import runs_on_node

    return runs_on_node(tmp_path)
