"""Drafts after a step's first ones: up to seven of them, by selections of their own or by the first one's.

Expected tokens come from transformers, expected drafts from the plain MTP layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse_pd.base.vocabulary import MAX_DRAFTS, HisparseFlag
from hisparse_pd.decode_node.device_step import DeviceStep
from hisparse_pd.decode_node.drafting import full_buffer
from hisparse_pd.decode_node.request_states import RequestState
from tests.unit.decode_node.speculation_support import NUM_NEW, TOP_K, by_turns, drafts, num_drafts
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    Prompt,
    load_checkpoint,
    random_prompt,
)
from tests.unit.model.plain_mtp import PlainMtp
from tools.checkpoints.oracle import load as load_oracle

HOT_BUFFER = full_buffer(MAX_DRAFTS, TOP_K)
NODE = {"device_buffer_size": HOT_BUFFER, "speculative_num_steps": MAX_DRAFTS}
LENGTHS = [1, 65, 300, HOT_BUFFER - 12, HOT_BUFFER, 700]
PROMPTS: list[Prompt] = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
SHARED, OWN = "glm, shared", "v32, own"
"""Checkpoints whose later drafts share the first one's selection, or have selections of their own."""


@pytest.fixture(scope="module")
def checkpoint(
    request: pytest.FixtureRequest,
    drafting_checkpoint: Callable[[str], Path],
    sharing_checkpoint: Callable[[str], Path],
) -> Checkpoint:
    path = sharing_checkpoint("glm") if request.param == SHARED else drafting_checkpoint("v32")
    checkpoint = load_checkpoint(path, num_draft_layers=1)
    assert checkpoint.spec.shares_draft_selection == (request.param == SHARED)
    return checkpoint


EACH = pytest.mark.parametrize(
    "checkpoint", [SHARED, pytest.param(OWN, marks=pytest.mark.slow)], indirect=True
)


@pytest.mark.I3
@pytest.mark.I5
@pytest.mark.I6
@pytest.mark.parametrize(
    "numbers",
    [
        (5, 0, MAX_DRAFTS, 2, 6, 1),
        *[pytest.param((number,), marks=pytest.mark.slow) for number in (4, MAX_DRAFTS)],
    ],
)
@EACH
def test_tokens_equal_the_oracle_with_up_to_seven_drafts(
    expected: dict[Prompt, list[int]], node: EngineHarness, numbers: tuple[int, ...]
) -> None:
    with drafts(node, *numbers):
        answers = [node.generate(prompt, NUM_NEW, by_turns(number)) for number, prompt in enumerate(PROMPTS)]
        node.finish(answers, expected)
    drafted, accepted = num_drafts(*answers)
    assert 0 < accepted < drafted


class Passes:
    """Counts what the draft layer's passes do with the pools, by name."""

    def __init__(self, node: EngineHarness, patch: pytest.MonkeyPatch) -> None:
        spec = node.engine.tables.spec
        self.counts: Counter[str] = Counter()
        for name in ("write", "select", "page_in"):
            of_drafts = spec.num_layers if name != "select" else spec.num_index_layers
            patch.setattr(DeviceStep, name, self._counting(getattr(DeviceStep, name), name, of_drafts))

    def _counting(self, method: Callable[..., Any], name: str, of_drafts: int) -> Callable[..., Any]:
        def counted(step: DeviceStep, layer_or_group: int, *arguments: Any) -> Any:
            self.counts[name] += layer_or_group == of_drafts
            return method(step, layer_or_group, *arguments)

        return counted


@EACH
def test_later_drafts_that_share_run_no_indexer_and_leave_no_trace(
    checkpoint: Checkpoint, node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [node.generate(PROMPTS[-1], NUM_NEW, flag) for flag in list(HisparseFlag)[:2]]
    node.turn_until(lambda: all(answer.token_ids for answer in answers))
    node.engine.steps.settle()
    passes = Passes(node, monkeypatch)
    num_launched = node.engine.steps.num_launched
    with drafts(node, MAX_DRAFTS):
        node.finish(answers)
    num_steps = node.engine.steps.num_launched - num_launched
    num_passes = num_steps if checkpoint.spec.shares_draft_selection else MAX_DRAFTS * num_steps
    assert passes.counts == {"write": num_passes, "select": num_passes, "page_in": num_passes}


@pytest.mark.parametrize(
    "flag", [HisparseFlag.TRUE, pytest.param(HisparseFlag.FALSE, marks=pytest.mark.slow)]
)
@EACH
def test_drafts_are_those_of_the_plain_layer(
    checkpoint: Checkpoint, node: EngineHarness, flag: HisparseFlag
) -> None:
    """A request larger than its hot buffer is checked at each length that it has between two steps.

    Drafts after its last token have no slots, and nothing uses them.
    """
    prompt = PROMPTS[-1]
    made: dict[tuple[int, ...], list[int]] = {}
    with drafts(node, MAX_DRAFTS):
        answer: Answer = node.generate(prompt, NUM_NEW, flag)
        while not answer.is_over:
            node.turn()
            node.engine.steps.settle()
            for request in node.engine.requests.select(RequestState.RUNNING):
                if request.draft_token_ids:
                    made[*prompt, *request.output_token_ids] = list(request.draft_token_ids)
        node.finish([answer])
    assert len(made) > 2
    shares = checkpoint.spec.shares_draft_selection
    tokens = max(map(list, made), key=len)
    with torch.no_grad():
        hidden = load_oracle(checkpoint.path).model(torch.tensor([tokens])).last_hidden_state[0]
    plain, num_others = PlainMtp(checkpoint.path), 0
    for sequence, found in made.items():
        assert len(found) == MAX_DRAFTS
        num_used = min(MAX_DRAFTS, len(prompt) + NUM_NEW - len(sequence))
        ours, other = (chain(plain, sequence, hidden, num_used, shares=each) for each in (shares, not shares))
        assert found[:num_used] == ours
        num_others += ours != other
    assert num_others, "the test tells no selection from another"


def chain(
    plain: PlainMtp, sequence: tuple[int, ...], hidden: Tensor, num_drafts: int, *, shares: bool
) -> list[int]:
    """Return the likeliest drafts after ``sequence``; ``hidden`` [>= tokens] begins with its states."""
    num_rows = len(sequence) - 1
    next_ids, hidden = list(sequence[1:]), hidden[:num_rows]
    selecting = num_rows - 1 if shares else None
    for _ in range(num_drafts):
        logits, states = plain.run(torch.tensor(next_ids), hidden, last_only=True, selecting=selecting)
        next_ids.append(int(logits.argmax()))
        hidden = torch.cat((hidden, states.float()))
    return next_ids[num_rows:]
