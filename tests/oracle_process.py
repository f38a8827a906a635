"""The oracle beside a test: it computes what is expected while the nodes are started and asked."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

from tools.checkpoints.oracle import greedy_tokens

ORACLE_TIMEOUT_SECS = 900


class Oracle:
    """Greedy tokens of a checkpoint, EOS ignored, computed beside the caller in a process of its own."""

    def __init__(self, checkpoint: Path, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> None:
        self._pool = get_context("spawn").Pool(1)
        self._answer = self._pool.apply_async(greedy_tokens, (checkpoint, prompts, num_new_tokens))

    @property
    def tokens(self) -> list[list[int]]:
        """The new tokens of each prompt; waits for them."""
        return self._answer.get(ORACLE_TIMEOUT_SECS)

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()
