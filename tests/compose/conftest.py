"""One engine and one deployment for all compose tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.deployment import Deployment, deployed
from tests.compose.engine import Engine, docker_engine


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with docker_engine() as found:
        yield found


@pytest.fixture(scope="session")
def deployment(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory: Path = tmp_path_factory.mktemp("compose")
    with deployed(engine, directory, f"hisparse-pd-test-{os.getpid()}") as running:
        yield running
