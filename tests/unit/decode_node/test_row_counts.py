"""Penalties and biases in decode steps: the tokens of transformers' ``generate`` with a processor that counts
in loops, whatever rows, modes, drafts and steps in flight a request goes through (I5).
"""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hisparse_pd.base.vocabulary import SamplingParams, pack_logit_bias
from hisparse_pd.core.paging.pools import Pools, SlotCounts
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.row_counts import RowCounts
from hisparse_pd.protocol.messages import Room
from tests import books
from tests.unit.decode_node.oracle import oracle_of
from tests.unit.decode_node.penalties_support import penalized_tokens
from tests.unit.decode_node.speculation_support import (
    PROMPTS,
    by_turns,
    drafts,
    harness,
    num_drafts,
)
from tests.unit.decode_node.support import Answer, Checkpoint, EngineHarness, Prompt

pytestmark = pytest.mark.I5

NUM_NEW = 14
VOCAB_SIZE = 11
NUM_ROWS = 3
CHECKPOINT = "drafting"

PENALTIES: list[tuple[Prompt, dict[str, Any]]] = [
    (PROMPTS[6], {"frequency_penalty": 0.1}),
    (PROMPTS[2], {"frequency_penalty": 0.6}),
    (PROMPTS[4], {"presence_penalty": 1.5, "logit_bias": ((65, 3.0), (66, -100.0), (0, 1.0))}),
    (PROMPTS[5], {"repetition_penalty": 1.9}),
    (PROMPTS[6], {"repetition_penalty": 0.5, "frequency_penalty": 1.8, "presence_penalty": -1.0}),
    (PROMPTS[7], {"logit_bias": tuple((token_id, 4.0 - token_id % 9) for token_id in range(40, 90))}),
]
PENALIZED: list[tuple[Prompt, dict[str, Any]]] = [
    (prompt, settings | {"logit_bias": pack_logit_bias(settings.get("logit_bias", ()))})
    for prompt, settings in PENALTIES
]


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> list[list[int]]:
    texts = penalized_tokens(checkpoint.path, PENALTIES, NUM_NEW)
    oracle = oracle_of(checkpoint.path)
    for text, (prompt, _) in zip(texts, PENALIZED, strict=True):
        assert not oracle.are_likeliest(prompt, text), "they are what they are without penalties"
    return texts


def generate_all(node: EngineHarness, **more: Any) -> list[Answer]:
    return [
        node.generate(prompt, NUM_NEW, by_turns(number), **settings, **more)
        for number, (prompt, settings) in enumerate(PENALIZED)
    ]


@pytest.mark.parametrize("numbers", [pytest.param((3,), marks=pytest.mark.slow), (2, 0, 1, 3, 0, 1)])
def test_tokens_equal_the_oracle_with_any_number_of_drafts_beside_plain_requests(
    checkpoint: Checkpoint, expected: list[list[int]], node: EngineHarness, numbers: tuple[int, ...]
) -> None:
    """Both runs use the same node, whose rows had other requests with other settings before."""
    with drafts(node, *numbers):
        beside = [node.generate(prompt, NUM_NEW) for prompt, _ in PENALIZED[:2]]
        answers = generate_all(node)
        node.finish([*answers, *beside])
    assert [answer.token_ids for answer in answers] == expected
    oracle = oracle_of(checkpoint.path)
    assert all(oracle.are_likeliest(answer.prompt, answer.token_ids) for answer in beside)
    drafted, accepted = num_drafts(*answers)
    assert 0 < accepted < drafted


def test_each_position_of_a_step_has_the_drafts_before_it(
    expected: list[list[int]], node: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All drafts are right, so whole steps count; texts repeat tokens as long as they may."""
    take_drafts = Request.take_drafts
    texts = {
        (len(prompt), SamplingParams(NUM_NEW, temperature=0.0, ignore_eos=True, **settings)): text
        for (prompt, settings), text in zip(PENALIZED, expected, strict=True)
    }

    def take_right_drafts(request: Request, max_drafts: int) -> list[int]:
        text = texts[request.num_prompt_tokens, request.sampling]
        request.draft_token_ids = text[len(request.output_token_ids) + request.num_in_flight :]
        return take_drafts(request, max_drafts)

    monkeypatch.setattr(Request, "take_drafts", take_right_drafts)
    with drafts(node, 2, 0, 3):
        answers = generate_all(node)
        node.finish(answers)
    assert [answer.token_ids for answer in answers] == expected
    drafted, accepted = num_drafts(*answers)
    assert accepted == drafted > NUM_NEW


def test_steps_without_drafts_overlap_and_count_what_nobody_has_read(
    checkpoint: Checkpoint, expected: list[list[int]], tmp_path: Path
) -> None:
    in_flight = 0
    with closing(harness(checkpoint, tmp_path, speculative_num_steps=0)) as node:
        answers = generate_all(node)
        while not all(answer.is_over for answer in answers):
            node.turn()
            in_flight += node.engine.steps.in_flight is not None
        node.finish(answers)
    assert in_flight > NUM_NEW // 2
    assert [answer.token_ids for answer in answers] == expected


# --- without an engine ---------------------------------------------------------------------------------


def make_request(number: int, pools: Pools, generator: random.Random) -> Request:
    prompt = [generator.randrange(VOCAB_SIZE) for _ in range(generator.randrange(1, 5))]
    penalties: list[dict[str, Any]] = [{}, {"frequency_penalty": 0.5}, {"repetition_penalty": 0.5}]
    request = books.make_request(
        number,
        len(prompt),
        sampling=SamplingParams(max_new_tokens=99, **generator.choice(penalties)),
        prompt_token_ids=np.unique(np.array(prompt, np.int32)),
        holding=pools.reserve(Room(number), SlotCounts(req_row=1)),
    )
    request.output_token_ids.append(generator.randrange(VOCAB_SIZE))
    return request


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_of_the_row_s_present_request_up_to_its_newest_token(seed: int) -> None:
    """Requests come, go, change rows, sit steps out, and have a token in flight, or none, or drafts."""
    generator = random.Random(seed)
    counts = RowCounts(NUM_ROWS, VOCAB_SIZE, torch.device("cpu"))
    pools = Pools(SlotCounts(host=64, device=64, index=64, lookup=64, aux=1, req_row=NUM_ROWS), 64)
    live: list[Request] = []
    in_flight = torch.zeros(NUM_ROWS + 1, dtype=torch.int64)
    num_checked = 0

    def read(request: Request) -> None:
        if request.num_in_flight:
            request.num_in_flight = 0
            request.output_token_ids.append(int(in_flight[request.req_row]))

    for number in range(400):
        for request in live:
            if generator.random() < 0.3:
                read(request)
        if generator.random() < 0.1 and live:
            pools.release(live.pop(generator.randrange(len(live))).owned)
        if generator.random() < 0.1 and 0 < len(live) < NUM_ROWS:
            moving = generator.choice(live)
            read(moving)
            given_up, moving.holding = moving.owned, pools.reserve(moving.room, SlotCounts(req_row=1))
            pools.release(given_up)
        if len(live) < NUM_ROWS:
            live.append(make_request(number, pools, generator))
        batch = [request for request in live if generator.random() < 0.8]
        counts.count(batch, in_flight)
        for request in batch:
            text = list(request.output_token_ids)
            text += [int(in_flight[request.req_row])] * request.num_in_flight
            counted = counts.of([request])
            assert (counted is not None) == request.changes_logits
            if counted is not None:
                row = counted.table.counts[counted.rows[0]]
                assert request.prompt_token_ids is not None
                prompt = request.prompt_token_ids.tolist() if request.sampling.needs_prompt else []
                wanted = [text.count(each) + (each in prompt) * (1 << 30) for each in range(VOCAB_SIZE)]
                assert row.tolist() == wanted
                num_checked += 1
            read(request)
            in_flight[request.req_row] = generator.randrange(VOCAB_SIZE)
            request.num_in_flight = 1
            if generator.random() < 0.2:  # a step that verified drafts, and was read
                read(request)
                drafted = generator.randrange(4)
                request.output_token_ids += [generator.randrange(VOCAB_SIZE) for _ in range(drafted)]
    assert num_checked > 200
