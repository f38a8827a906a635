"""The tokens at both ends of a step, on a GPU: the same as by plain loops."""

from __future__ import annotations

from tests.gpu.support import DEVICE, needs_gpu
from tests.unit.kernels.drawn_tokens import Functions, check

pytestmark = needs_gpu


def test_tokens() -> None:
    check(Functions(), [1, 4096, 4097, 129_280], DEVICE)
