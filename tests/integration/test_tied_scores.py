"""Checkpoints full of equal scores through the real pair: one answer a prompt, in all modes, under load."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.harness import FLAGS, at_once, deployment, output_ids
from tools.checkpoints.oracle import Oracle

NUM_NEW_TOKENS = 24
NUM_CONCURRENT = 12
LENGTHS = (1, 36, 37, 38, 64, 127, 129, 150, 200, 257, 300, 380, 450, 512)


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", ["v32", "glm"])
def test_every_prompt_has_one_answer_under_load(
    variant: str, tied_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    drawn = random.Random(5)
    prompts = [[drawn.randint(32, 126) for _ in range(length)] for length in LENGTHS]
    prompts += [prompt[:100] + prompts[2] for prompt in prompts[8:]]  # a cache has their beginning
    checkpoint = tied_checkpoint(variant)
    with (
        closing(Oracle(checkpoint, prompts, NUM_NEW_TOKENS)) as oracle,
        deployment(
            checkpoint,
            tmp_path,
            prefill_options=["--page-size", "16", "--chunked-prefill-size", "230"],
            decode_options=[
                *("--page-size", "16", "--device-buffer-size", "80", "--device-pool-tokens", "3072"),
            ],
        ) as pair,
    ):

        def answer(job: tuple[int, bool | str]) -> list[int]:
            number, flag = job
            params = {"max_new_tokens": NUM_NEW_TOKENS}
            return output_ids(pair.url, input_ids=prompts[number], hisparse=flag, params=params)

        alone = [answer((number, False)) for number in range(len(prompts))]
        assert alone == oracle.tokens
        for _ in range(2):
            pair.flush_prefix_caches()
            jobs = [(number, flag) for flag in FLAGS for number in range(len(prompts))]
            drawn.shuffle(jobs)
            answers = at_once(answer, jobs, NUM_CONCURRENT)
            wrong = [(job, got) for job, got in zip(jobs, answers, strict=True) if got != alone[job[0]]]
            assert not wrong, f"{len(wrong)} of {len(jobs)} differ; first {wrong[0]}"
