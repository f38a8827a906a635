"""Forwards before the first prompt: of which sizes, and that nothing is left of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hisparse_pd.base.vocabulary import SamplingParams
from hisparse_pd.core.model.loader import load_model
from hisparse_pd.core.model.spec import load_spec
from hisparse_pd.engine.messages import Generate
from hisparse_pd.prefill_node.compute import PromptRunner
from hisparse_pd.prefill_node.memory import PrefillMemory
from hisparse_pd.prefill_node.rooms import RoomRecord, RoomState
from hisparse_pd.prefill_node.scheduler import Chunk
from hisparse_pd.protocol.messages import Room
from tools.checkpoints.make_tiny import write_checkpoint

PAGE_SIZE = 16


@pytest.mark.parametrize("num_draft_layers", [0, 1])
def test_it_runs_forwards_of_all_kinds_of_sizes_and_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_draft_layers: int
) -> None:
    write_checkpoint(tmp_path, "glm", draft_gain=1.0)
    spec = load_spec(tmp_path, num_draft_layers=num_draft_layers)
    model = load_model(tmp_path, spec)

    def runner() -> PromptRunner:
        memory = PrefillMemory(spec, num_slots=8 * PAGE_SIZE, num_aux_slots=1, device="cpu")
        return PromptRunner(model, memory, PAGE_SIZE)

    def first_token(runner: PromptRunner) -> tuple[int, torch.Tensor]:
        request = Generate("r", 7, 90, SamplingParams(max_new_tokens=1, temperature=0.0), "", 0)
        record = RoomRecord(Room(7), RoomState.COMPUTING, 0.0, request)
        record.token_ids = (np.arange(90) * 31 % 90 + 32).astype(np.int32)
        record.page_ids = [3, 1, 0, 5, 4, 2]
        found = runner.run([(record, Chunk(Room(7), 0, 90, admits=True))]).first_tokens[Room(7)]
        return found.token_id, found.hint

    expected_id, expected_hint = first_token(runner())
    warm = runner()
    sizes: list[tuple[int, int]] = []
    """Of forwards, and how many of their tokens are resumed."""
    run = warm.run

    def noted(batch: Sequence[tuple[RoomRecord, Chunk]], *more: Any) -> Any:
        for record, chunk in batch:
            sizes.append((chunk.stop - chunk.start, record.num_prompt_tokens - record.first_resumed))
        computed = run(batch, *more)
        assert len(computed.scores) == (sizes[-1][0] > 1)
        return computed

    monkeypatch.setattr(warm, "run", noted)
    warm.warm_up(70)
    expected = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 70)
    assert sizes == [(size, num_resumed) for size in expected for num_resumed in (0, size - 1)]
    monkeypatch.undo()
    found_id, found_hint = first_token(warm)
    assert found_id == expected_id
    assert torch.equal(found_hint, expected_hint)
