"""What this machine's Triton, which comes with torch for CUDA, can be asked for without a GPU."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def _version(package: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, version(package).split(".")[:2]))
    except PackageNotFoundError:
        return ()


needs_triton = pytest.mark.skipif(not _version("triton"), reason="triton is not installed")
interprets_loops = pytest.mark.skipif(
    _version("triton") < (3, 7) and _version("numpy") >= (2, 4),
    reason="triton is not installed, or its interpreter (before 3.7) reads no loop bounds with numpy 2.4",
)
