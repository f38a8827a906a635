"""Rows that change while steps verify drafts or are split: they are found, and disturb no other request.

The node's host is a step behind; it has an MTP layer, and splits steps without drafts from three requests on.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest

from hisparse_pd.base.vocabulary import KV_ROW_CORRUPT, HisparseFlag
from hisparse_pd.core.paging.pools import PoolKind
from hisparse_pd.decode_node import forwards
from hisparse_pd.decode_node.memory import slots_tensor
from hisparse_pd.decode_node.split_choice import Split
from hisparse_pd.engine.messages import ReleasePage
from tests.unit.decode_node.oracle import oracle_of
from tests.unit.decode_node.speculation_support import NUM_NEW, TOP_K, drafts
from tests.unit.decode_node.support import Checkpoint, EngineHarness, Prompt, random_prompt

CHECKPOINT = "drafting"
PROMPTS: list[Prompt] = [random_prompt(40 + length, length) for length in (310, 333, 387, 450)]
NODE = {"device_buffer_size": TOP_K + 4}
"""Settings with which most steps page in some rows."""


@pytest.mark.I9
@pytest.mark.parametrize(
    ("numbers", "split", "victim"),
    [
        pytest.param((3,), Split.PARTS, 0, id="drafts"),
        pytest.param((1, 0, 2, 0), Split.MICRO_BATCHES, 3, id="by turns", marks=pytest.mark.slow),
        pytest.param((0,), Split.PARTS, 3, id=f"{Split.PARTS.value}-3"),
        *(
            pytest.param((0,), split, victim, id=f"{split.value}-{victim}", marks=pytest.mark.slow)
            for split, victim in ((Split.MICRO_BATCHES, 0), (Split.MICRO_BATCHES, 3), (Split.PARTS, 0))
        ),
    ],
)
def test_a_request_whose_rows_change_ends_and_the_others_are_right(
    checkpoint: Checkpoint,
    node: EngineHarness,
    numbers: tuple[int, ...],
    split: Split,
    victim: int,
) -> None:
    """Victims are in either part and either micro-batch of split steps."""
    with drafts(node, *numbers), patch.object(forwards, "UNMEASURED_SPLIT", split):
        answers = [node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in PROMPTS]
        node.begin_together(answers)
        node.turn_until(lambda: all(len(answer.token_ids) > 3 for answer in answers))
        assert not any(answer.is_over for answer in answers)
        num_tokens = len(PROMPTS[victim])
        (request,) = (each for each in node.engine.requests.all() if each.num_prompt_tokens == num_tokens)
        slots = slots_tensor(request.extents(PoolKind.HOST))[:num_tokens]
        node.engine.tables.memory.k_host[:, slots, 3] ^= 16  # in all layers, the draft layer's too
        failure = node.failure_of(answers[victim], status=500, error="(page-in)")
        node.turn_until(lambda: all(answer.is_over for answer in answers))
    assert failure.code == KV_ROW_CORRUPT
    oracle = oracle_of(checkpoint.path)
    for number, answer in enumerate(answers):
        assert oracle.are_likeliest(answer.prompt, answer.token_ids)
        assert len(answer.token_ids) == NUM_NEW or number == victim
    for page in node.engine.requests.set_aside.shown():
        node.send(ReleasePage(page.pool, page.start))
    node.turn_until(lambda: not node.engine.requests.set_aside and not node.engine.requests)
