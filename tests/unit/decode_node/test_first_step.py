"""What a decode engine asks a prefill node to compute, and what it needs none for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED, HisparseFlag
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import RoomScores
from hisparse_pd.protocol.prompt_scores import WantedScores, score_dtype
from tests.unit.decode_node.oracle import oracle_of
from tests.unit.decode_node.support import (
    Answer,
    Checkpoint,
    EngineHarness,
    Prompt,
    landing_slots,
    random_prompt,
)

PAGE = 16
NODE: dict[str, Any] = {"page_size": PAGE, "disable_prefix_cache": False, "device_pool_tokens": 2048}
PROMPT = random_prompt(3, 5 * PAGE + 1)
"""A prompt whose tokens but the last are whole pages."""
NUM_NEW = 4
FLAGS = [HisparseFlag.TRUE, HisparseFlag.FALSE]


@pytest.fixture
def node(checkpoint: Checkpoint, tmp_path: Path) -> Iterator[EngineHarness]:
    with closing(EngineHarness(checkpoint, tmp_path, **NODE)) as node:
        yield node


@pytest.fixture
def expected(checkpoint: Checkpoint) -> list[int]:
    return oracle_of(checkpoint.path).tokens_after(PROMPT, NUM_NEW)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_bootstrap_asks_for_all_tokens_but_the_last(node: EngineHarness, flag: HisparseFlag) -> None:
    answer = node.ask(PROMPT, NUM_NEW, flag)
    (bootstrap,) = node.double.bootstraps
    assert bootstrap.prompt == pack_token_ids(PROMPT)
    assert (bootstrap.num_computed_tokens, bootstrap.num_held_tokens) == (80, 0)
    assert len(landing_slots(bootstrap)) == 80
    assert answer.stats.num_held_tokens == 0


@pytest.mark.I5
@pytest.mark.parametrize("flag", FLAGS)
def test_a_prompt_of_which_all_but_the_last_token_is_held_needs_no_prefill_node(
    node: EngineHarness, flag: HisparseFlag, expected: list[int]
) -> None:
    first = node.ask(PROMPT, NUM_NEW, flag)
    again = node.ask(PROMPT, NUM_NEW, flag)
    assert len(node.double.bootstraps) == 1
    assert first.token_ids == again.token_ids == expected
    assert again.stats.num_held_tokens == 80
    assert again.prefill == [], "nobody's times"
    assert again.phases == ["queue", "landing", "first_step"]


@pytest.mark.I6
@pytest.mark.parametrize("flag", FLAGS)
def test_a_prompt_of_one_token_needs_no_prefill_node(
    node: EngineHarness, checkpoint: Checkpoint, flag: HisparseFlag
) -> None:
    prompt = (77,)
    answer = node.ask(prompt, NUM_NEW, flag, scores=WantedScores(1, 2))
    assert answer.token_ids == oracle_of(checkpoint.path).tokens_after(prompt, NUM_NEW)
    assert node.double.bootstraps == []


@pytest.mark.parametrize("num_resumed", [4, pytest.param(7, marks=pytest.mark.slow), PAGE])
def test_resumed_tokens_and_the_one_before_them_are_computed_again(
    node: EngineHarness, checkpoint: Checkpoint, num_resumed: int
) -> None:
    """The prefill node computes them with the roundings of steps; everything before is held."""
    expected = oracle_of(checkpoint.path).tokens_after(PROMPT, PAGE + 3)
    node.ask(PROMPT, 2, HisparseFlag.TRUE)
    longer = (*PROMPT, *expected[:num_resumed])
    answer = node.ask(longer, 3, HisparseFlag.TRUE, num_resumed_tokens=num_resumed)
    bootstrap = node.double.bootstraps[-1]
    assert bootstrap.num_resumed_tokens == num_resumed
    assert bootstrap.num_held_tokens == 80
    assert bootstrap.num_computed_tokens == 80 + num_resumed
    assert answer.token_ids == expected[num_resumed : num_resumed + 3]


# --- scores of the prompt's own tokens -------------------------------------------------------------------

WANTED = WantedScores(61, 2)
"""Scores of the last twenty tokens."""


def rows(first: int, num_rows: int, num_top: int = 2) -> RoomScores:
    return RoomScores(0, first, num_top, bytes(score_dtype(num_top).itemsize * num_rows))


def scored(node: EngineHarness, *pieces: RoomScores, prompt: Prompt = PROMPT) -> Answer:
    """Send a request; its prefill node sends these scores before it says that all is there."""
    node.double.delivers = False
    answer = node.generate(prompt, NUM_NEW, HisparseFlag.TRUE, scores=WANTED)
    node.turn_until(lambda: node.double.bootstraps)
    bootstrap = node.double.bootstraps[-1]
    assert bootstrap.scores == WANTED
    for piece in pieces:
        node.double.say(RoomScores(bootstrap.room, piece.first, piece.num_top, piece.rows))
    node.double.deliver(bootstrap)
    return answer


def test_scores_reach_the_front_in_order_before_the_first_token(
    node: EngineHarness, expected: list[int]
) -> None:
    answer = scored(node, rows(61, 7), rows(68, 12), rows(80, 1))
    assert node.tokens_of(answer) == expected
    assert [(each.num_top, len(each.rows)) for each in answer.scores] == [
        (2, num_rows * score_dtype(2).itemsize) for num_rows in (7, 12, 1)
    ]


def test_scores_are_asked_for_whatever_is_held(node: EngineHarness, expected: list[int]) -> None:
    node.ask(PROMPT, 1, HisparseFlag.TRUE)
    node.double.bootstraps.clear()
    assert node.tokens_of(scored(node, rows(61, 20))) == expected
    assert landing_slots(node.double.bootstraps[-1]) == set()


@pytest.mark.I7
@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([], "the scores of 0 of 20 positions"),
        ([rows(61, 19)], "the scores of 19 of 20 positions"),
        ([rows(61, 21)], "the scores of 21 of 20 positions"),
        ([rows(61, 7), rows(69, 12)], "scores of its prompt from position 69 on"),
        ([rows(62, 19)], "scores of its prompt from position 62 on"),
        ([rows(61, 20, num_top=3)], "scores of its prompt from position 61 on"),
        ([RoomScores(0, 61, 2, bytes(23))], "scores of its prompt from position 61 on"),
    ],
)
def test_a_prefill_node_that_loses_scores_or_makes_them_up_has_failed(
    node: EngineHarness, pieces: list[RoomScores], error: str
) -> None:
    failure = node.failure_of(scored(node, *pieces), status=502, error=error)
    assert failure.code == PREFILL_NODE_FAILED
    node.double.delivers = True
    node.ask(PROMPT, 1, HisparseFlag.TRUE)


def test_scores_that_nobody_asked_for_end_their_request(node: EngineHarness) -> None:
    answer = node.entrust(PROMPT, 8)
    node.double.say(RoomScores(node.double.bootstraps[-1].room, 1, 0, bytes(8)))
    node.failure_of(answer, status=502, error="which it does not wait for")


@pytest.mark.I5
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("num_prompt_tokens", [pytest.param(81, marks=pytest.mark.slow), 90])
def test_a_prompt_lands_once_for_all_its_samples(
    checkpoint: Checkpoint, tmp_path: Path, flag: HisparseFlag, num_prompt_tokens: int
) -> None:
    prompt = random_prompt(4, num_prompt_tokens)
    # Dense requests share pages while they run when they have those of their whole life: growth_pages.
    with closing(EngineHarness(checkpoint, tmp_path, **NODE, growth_pages=16)) as node:
        answers = node.generate_samples(prompt, NUM_NEW, 3, flag)
        node.turn_until(lambda: all(answer.is_over for answer in answers))
        assert [bootstrap.num_held_tokens for bootstrap in node.double.bootstraps] == [0]
        tokens = oracle_of(checkpoint.path).tokens_after(prompt, NUM_NEW)
        assert [answer.token_ids for answer in answers] == [tokens] * 3
