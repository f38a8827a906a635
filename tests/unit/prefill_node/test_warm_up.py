"""Forwards before the first prompt: which sizes they have, and that they change no answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.prefill_node.compute import PromptRunner
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.prefill_node.scheduler import Chunk
from hisparse_pd.protocol.messages import Room
from tests.unit.prefill_node.support import bootstrap_of
from tools.checkpoints.make_tiny import write_checkpoint

PAGE_SIZE = 16


@pytest.mark.parametrize("num_draft_layers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_it_runs_forwards_of_all_kinds_of_sizes_and_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_draft_layers: int
) -> None:
    write_checkpoint(tmp_path, "glm", draft_gain=1.0)
    spec = load_spec(tmp_path, num_draft_layers=num_draft_layers)
    model = load_model(tmp_path, spec)

    def runner() -> PromptRunner:
        memory = PrefillMemory(spec, num_slots=8 * PAGE_SIZE, num_aux_slots=1, device="cpu")
        return PromptRunner(model, memory, PAGE_SIZE)

    def hint(runner: PromptRunner) -> torch.Tensor:
        tokens = np.arange(91) * 31 % 90 + 32
        nobody = Peer("", "", b"", PAGE_SIZE, {}, 0.0)
        request = PrefillRequest(nobody, bootstrap_of(7, tokens.tolist()), 0.0, page_ids=[3, 1, 0, 5, 4, 2])
        return runner.run([(request, Chunk(Room(7), 0, 90, admits=True))]).hints[Room(7)]

    expected = hint(runner())
    warm = runner()
    sizes: list[tuple[int, int]] = []
    """Tokens of each forward, and how many of them are computed as in steps."""
    run = warm.run

    def noted(batch: Sequence[tuple[PrefillRequest, Chunk]], *more: Any) -> Any:
        for request, chunk in batch:
            sizes.append((chunk.stop - chunk.start, chunk.stop - request.first_stepped))
        computed = run(batch, *more)
        assert [len(piece.rows) for piece in computed.scores[Room(0)]] == [16 * sizes[-1][0]]
        return computed

    monkeypatch.setattr(warm, "run", noted)
    warm.warm_up(70)
    all_sizes = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 70)
    assert sizes == [(size, num_resumed) for size in all_sizes for num_resumed in (0, size - 1)]
    monkeypatch.undo()
    assert torch.equal(hint(warm), expected)
