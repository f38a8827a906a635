"""One small pair for all tests that do not break it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.harness import Deployment, deployment


@pytest.fixture(scope="package")  # it would take time from the tests that come after these, and memory
def pair(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A prefill node, a decode node and our router. Tests leave it as they found it."""
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path_factory.mktemp("pair"),
        prefill_options=["--served-model-name", "tiny"],
        decode_options=["--served-model-name", "tiny", "--device-buffer-size", "128"],
    ) as started:
        yield started
