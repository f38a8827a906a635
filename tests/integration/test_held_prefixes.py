"""Conversations through a pair with different page sizes, whose decode node can hold few at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from hisparse_pd.protocol.messages import first_stepped
from tests.integration.harness import (
    at_once,
    deployment,
    generate,
    generated,
    pool_usage,
    wait_until,
)
from tests.oracle_beside import Oracle

PAGE = 16
NUM_NEW_TOKENS = 30
TURN_TOKENS = 10
NUM_CONCURRENT = 4
LENGTHS = (1, 15, 16, 17, 37, 64, 127, 150, 257, 300, 380, 450, 512)


@pytest.mark.I2
@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", ["v32", "glm"])
def test_turns_have_one_answer_whether_they_are_held_or_given_up(
    variant: str, tied_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    drawn = random.Random(8)
    prompts = [[drawn.randint(32, 126) for _ in range(length)] for length in LENGTHS]
    checkpoint = tied_checkpoint(variant)
    with (
        closing(Oracle(checkpoint, prompts, NUM_NEW_TOKENS)) as oracle,
        deployment(
            checkpoint,
            tmp_path,
            prefill_options=["--page-size", "24", "--chunked-prefill-size", "230"],
            decode_options=[
                *("--page-size", "16", "--device-buffer-size", "80"),
                *("--host-pool-tokens", "2048", "--device-pool-tokens", "1024"),
            ],
        ) as pair,
    ):

        def turn(number: int, said: int) -> int:
            prompt = prompts[number] + oracle.tokens[number][:said]
            params, flag = {"max_new_tokens": TURN_TOKENS}, (True, "auto")[number % 2]
            answer = generated(pair.url, input_ids=prompt, hisparse=flag, params=params)
            assert answer["output_ids"] == oracle.tokens[number][said : said + TURN_TOKENS], len(prompt)
            num_held: int = answer["meta_info"]["held_tokens"]
            assert num_held % 16 == 0
            return num_held

        def talk(number: int) -> list[int]:
            return [turn(number, said) for said in range(0, NUM_NEW_TOKENS, TURN_TOKENS)]

        num_held = at_once(talk, range(len(prompts)), NUM_CONCURRENT)
        assert sum(map(sum, num_held)) > 0
        # The latest first: in order of age each would drive out the next.
        again = [turn(number, 2 * TURN_TOKENS) for number in reversed(range(len(prompts)))]
        assert 0 < sum(num > 0 for num in again) < len(prompts), "some are held, some were given up"
        decode = pair.decode[0]
        wait_until(lambda: pool_usage(decode) == 0, "what is held is nobody's")
        evicted = "hisparse_pd:held_evicted_tokens_total"
        wait_until(lambda: decode.metrics()[evicted] > 0, "the engine's report")
        pair.flush_prefix_caches()
        assert [turn(number, TURN_TOKENS) for number in range(len(prompts))] == [0] * len(prompts)
        refused = generate(pair.url, hisparse=False)
        assert refused.status_code == 400
        assert "dense needs equal pages: --page-size is 24 on prefill node" in refused.text


@pytest.mark.slow
@pytest.mark.I2
@pytest.mark.I5
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "index_tokens"), [(1, 1024), (2, 512)])
def test_conversations_beyond_the_index_pool_are_sent_once(
    tied_checkpoint: Callable[[str], Path], tmp_path: Path, num_ranks: int, index_tokens: int
) -> None:
    """The host pools have room for all of them, and main memory for their keys. Each turn comes to the rank
    that holds the one before: of several ranks a busy one would send it to another, so turns come one by one.
    """
    drawn = random.Random(9)
    prompts = [[drawn.randint(32, 126) for _ in range(130 + length)] for length in range(0, 60, 5)]
    checkpoint = tied_checkpoint("v32")
    with (
        closing(Oracle(checkpoint, prompts, NUM_NEW_TOKENS)) as oracle,
        deployment(
            checkpoint,
            tmp_path,
            prefill_options=["--page-size", str(PAGE), "--dp-size", str(num_ranks)],
            decode_options=[
                *("--page-size", str(PAGE), "--dp-size", str(num_ranks), "--device-buffer-size", "80"),
                *("--index-pool-tokens", str(index_tokens), "--host-pool-tokens", "4096"),
                *("--device-pool-tokens", "1024", "--debug-checks"),
            ],
        ) as pair,
    ):

        def turn(number: int, said: int) -> tuple[int, int]:
            """Return how many tokens were held, and how many could be."""
            prompt = prompts[number] + oracle.tokens[number][:said]
            params = {"max_new_tokens": TURN_TOKENS}
            answer = generated(pair.url, input_ids=prompt, hisparse=True, params=params)
            assert answer["output_ids"] == oracle.tokens[number][said : said + TURN_TOKENS], len(prompt)
            return answer["meta_info"]["held_tokens"], first_stepped(len(prompt), 0, PAGE) if said else 0

        for said in range(0, NUM_NEW_TOKENS, TURN_TOKENS):
            num_concurrent = NUM_CONCURRENT if num_ranks == 1 else 1
            turns = at_once(partial(turn, said=said), range(len(prompts)), num_concurrent)
            assert all(num_held == most for num_held, most in turns), turns
        decode = pair.decode[0]
        for count in ("held_moved_down_tokens_total", "held_fetched_tokens_total"):
            wait_until(lambda of=f"hisparse_pd:{count}": decode.metrics()[of] > 1024, count)  # type: ignore[misc]
        assert decode.metrics()["hisparse_pd:held_evicted_tokens_total"] == 0
        wait_until(lambda: pool_usage(decode) == 0, "what is held is nobody's")
        pair.flush_prefix_caches()
        num_held, _ = turn(0, TURN_TOKENS)
        assert num_held == 0
