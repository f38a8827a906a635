"""Conversations through a pair with different page sizes, whose decode node can hold few at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.harness import (
    at_once,
    deployment,
    generate,
    generate_body,
    generated,
    pool_usage,
    wait_until,
)
from tests.oracle_beside import Oracle

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
        assert decode.metrics()["hisparse_pd:held_evicted_tokens_total"] > 0
        pair.flush_prefix_caches()
        assert [turn(number, TURN_TOKENS) for number in range(len(prompts))] == [0] * len(prompts)
        refused = generate(pair.url, hisparse=False)
        assert refused.status_code == 400
        assert "dense needs equal pages: page_size is 24 on prefill node" in refused.text


@pytest.mark.I2
@pytest.mark.I5
@pytest.mark.slow
def test_many_at_once_share_a_prompt_that_one_of_them_sent(
    tied_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """In both modes, while the one that sent it still runs, and when its client has left.

    One shares only the start, fits in its hot buffer with that, and outgrows it.
    """
    drawn = random.Random(9)
    common, *tails = ([drawn.randint(32, 126) for _ in range(length)] for length in (300, *range(3, 12)))
    prompts = [common + tail for tail in tails]
    outgrows, first_dense, others = 3, 4, (1, 2, 3, 5, 6, 7, 8)
    prompts[outgrows] = common[:64] + tails[outgrows]
    modes = [True, True, True, True, False, False, False, False, True]
    checkpoint = tied_checkpoint("v32")
    with (
        closing(Oracle(checkpoint, prompts, NUM_NEW_TOKENS)) as oracle,
        deployment(
            checkpoint,
            tmp_path,
            prefill_options=["--page-size", "16"],
            decode_options=[
                *("--page-size", "16", "--device-buffer-size", "80"),
                *("--host-pool-tokens", "4096", "--device-pool-tokens", "4096"),
            ],
        ) as pair,
    ):
        decode = pair.decode[0]

        def fields(number: int, num_new: int) -> dict[str, Any]:
            params = {"max_new_tokens": num_new}
            return {"input_ids": prompts[number], "hisparse": modes[number], "params": params}

        def num_bytes() -> float:
            return decode.metrics()["hisparse_pd:kv_transfer_bytes_total"]

        def ask(number: int) -> dict[str, int]:
            """Misses and held tokens of a request, after a look at what it said."""
            answer = generated(pair.url, **fields(number, NUM_NEW_TOKENS))
            assert answer["output_ids"] == oracle.tokens[number], f"prompt {number}"
            meta = answer["meta_info"]
            assert meta["hisparse"]["mode"] == ("hisparse" if modes[number] else "dense")
            return {"misses": meta["hisparse"]["misses"], "held": meta["held_tokens"]}

        with ThreadPoolExecutor(len(prompts)) as threads:
            endless = generate_body(**fields(0, 1500), stream=True)
            with httpx.stream("POST", f"{pair.url}/generate", json=endless, timeout=60) as first:
                events = first.iter_lines()
                assert next(events).startswith("data: {")
                wait_until(num_bytes, "the first prompt is counted")
                num_first = num_bytes()
                of_its_mode = ask(first_dense)
                answers = [threads.submit(ask, number) for number in others[:5]]
                answers[0].result()
                assert decode.metrics()["hisparse_pd:num_running_reqs"] >= 1, "the first one still runs"
            found = [answer.result() for answer in answers] + list(threads.map(ask, others[5:]))
        assert of_its_mode["held"] == 0
        assert [one["held"] for one in found] == [64 if number == outgrows else 288 for number in others]
        assert all(one["misses"] > 0 for one, number in zip(found, others, strict=True) if modes[number])
        wait_until(lambda: pool_usage(decode) == 0, "what is held is nobody's")
        num_others = num_bytes() - num_first
        assert num_others < 1.6 * num_first, "the first dense prompt, and 12 to 23 tokens of each other one"
