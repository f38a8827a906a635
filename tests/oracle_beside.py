"""An oracle that computes the expected tokens while a test starts its nodes and sends requests."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.checkpoints.oracle import greedy_tokens

ORACLE_TIMEOUT_SECS = 900


class Oracle:
    """Greedy tokens of a checkpoint, EOS ignored, computed in a thread while the caller waits for nodes."""

    def __init__(self, checkpoint: Path, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._answer = self._thread.submit(greedy_tokens, checkpoint, prompts, num_new_tokens)

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each prompt; waits for them."""
        return self._answer.result(ORACLE_TIMEOUT_SECS)

    def close(self) -> None:
        self._thread.shutdown()
