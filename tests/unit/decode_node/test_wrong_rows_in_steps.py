"""Rows that change while steps verify drafts, or are split: found, and of no concern to others.

A node a step behind, with an MTP layer, whose steps without drafts are split from three requests on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from unittest.mock import patch

import pytest
import torch

from decode_node import forwards
from decode_node.memory import slots_tensor
from decode_node.request import Request, RequestState
from decode_node.scheduler import Exchange, StepPlan
from decode_node.split_choice import Split
from hisparse_pd.engine.messages import ReleasePage
from hisparse_pd.paging.pools import PoolKind, SlotCounts
from hisparse_pd.vocabulary import KV_ROW_CORRUPT, HisparseFlag
from kernels.row_check import row_checks_of
from tests.unit.decode_node.speculation_support import HOT_BUFFER, NUM_NEW, TOP_K, drafts
from tests.unit.decode_node.support import Answer, EngineHarness, Prompt, random_prompt

WITH_DRAFTS = True
PROMPTS: list[Prompt] = [random_prompt(40 + length, length) for length in (310, 333, 387, 450)]
NODE = {"device_buffer_size": TOP_K + 4}
"""Of most steps some rows are paged in."""


def request_of(node: EngineHarness, prompt: Prompt) -> Request:
    (request,) = (each for each in node.engine.requests.all() if each.num_prompt_tokens == len(prompt))
    return request


def damage(node: EngineHarness, request: Request, num_tokens: int) -> None:
    """A bit of each of its first rows in the host pool, the draft layer's too."""
    slots = slots_tensor(request.extents(PoolKind.HOST))[:num_tokens]
    node.engine.hot_buffers.memory.k_host[:, slots, 3] ^= 16


def is_under_way(answers: Sequence[Answer]) -> bool:
    return all(len(answer.token_ids) > 3 for answer in answers)


@pytest.fixture(autouse=True)
def whole(node: EngineHarness) -> None:
    """Before each test nobody is there, and all pages are as good as any."""
    node.turn_until(lambda: not node.engine.requests)
    for page in node.engine.requests.set_aside.shown():
        node.send(ReleasePage(page.pool, page.start))
    node.turn_until(lambda: not node.engine.requests.set_aside)


@pytest.mark.I9
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize(
    ("numbers", "split"),
    [
        ((3,), Split.PARTS),
        ((1, 0, 2, 0), Split.MICRO_BATCHES),
        ((0,), Split.MICRO_BATCHES),
        ((0,), Split.PARTS),
    ],
    ids=["drafts", "by turns", "micro-batches", "parts"],
)
def test_a_request_whose_rows_change_ends_and_the_others_are_right(
    node: EngineHarness,
    expected: dict[Prompt, list[int]],
    numbers: tuple[int, ...],
    split: Split,
    victim: int,
) -> None:
    """``victim``: of either part and either micro-batch, where steps without drafts are split."""
    with drafts(node, *numbers), patch.object(forwards, "UNTRIED", split):
        answers = [node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in PROMPTS]
        node.turn_until(lambda: is_under_way(answers))
        assert not any(answer.is_over for answer in answers)
        damage(node, request_of(node, PROMPTS[victim]), len(PROMPTS[victim]))
        failure = node.failure_of(answers[victim], status=500, error="(page-in)")
        node.turn_until(lambda: all(answer.is_over for answer in answers))
    assert failure.code == KV_ROW_CORRUPT
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        num_tokens = len(answer.token_ids) if number == victim else NUM_NEW
        assert answer.token_ids == expected[prompt][:num_tokens]


@pytest.mark.I9
@pytest.mark.parametrize("numbers", [(3,), (0,)], ids=["drafts", "plain"])
def test_rows_of_a_dense_request_that_was_retracted(
    node: EngineHarness, expected: dict[Prompt, list[int]], numbers: tuple[int, ...]
) -> None:
    """What was spilled is verified when its hot buffer is warmed up, and when it is paged in."""
    prompt = PROMPTS[0]
    for is_damaged in (False, True):
        with drafts(node, *numbers):
            answer = node.generate(prompt, NUM_NEW, HisparseFlag.AUTO)
            node.turn_until(lambda: is_under_way([answer]))  # noqa: B023
            node.engine.steps.settle()
            request = request_of(node, prompt)
            num_slots = request.owned.num_slots(PoolKind.INDEX)
            exchange = Exchange(request, TOP_K + 4, SlotCounts(host=num_slots, lookup=num_slots))
            node.engine.lifecycle.carry_out(StepPlan(exchanges=(exchange,)), 0.0)
            if is_damaged:
                damage(node, request, len(prompt))
                assert node.failure_of(answer, status=500).code == KV_ROW_CORRUPT
            node.turn_until(lambda: answer.is_over)  # noqa: B023
        assert answer.token_ids == expected[prompt][: len(answer.token_ids)]
        assert (len(answer.token_ids) == NUM_NEW) is not is_damaged


@pytest.mark.I9
def test_rejected_drafts_leave_no_check_and_accepted_ones_theirs(node: EngineHarness) -> None:
    """Of each position that stands, in all layers, whichever number of drafts wrote it."""
    engine, memory = node.engine, node.engine.hot_buffers.memory
    row_checks = memory.row_checks
    assert row_checks is not None
    in_turn = cycle((1, 2, 3))
    num_compared = 0
    with drafts(node, 3, 0, 2, 1, 0):
        answers = [node.generate(prompt, NUM_NEW, HisparseFlag.TRUE) for prompt in PROMPTS]
        while not all(answer.is_over for answer in answers):
            for _ in range(next(in_turn)):
                node.turn()
            engine.steps.settle()
            for request in engine.requests.select(RequestState.RUNNING):
                slots, check_slots = (
                    slots_tensor(request.extents(kind))[: request.num_kv_tokens]
                    for kind in (PoolKind.HOST, PoolKind.INDEX)
                )
                actual = row_checks_of(memory.k_host, slots, torch.arange(len(slots)))
                assert torch.equal(actual, row_checks[:, check_slots])
                num_compared += len(slots)
    assert num_compared > len(PROMPTS) * HOT_BUFFER
    assert all(answer.failure is None for answer in answers)
