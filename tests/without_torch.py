"""A plugin of pytest with which no test can import torch: `make test-fast`."""

import sys


def pytest_configure() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]
