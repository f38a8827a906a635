"""Samples of one prompt through router and nodes: their KV is computed and sent once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.integration.harness import Deployment, generated

NUM_SAMPLES, SEED = 4, 31
PROMPT = [random.Random(3).randint(32, 126) for _ in range(3 * 64 + 29)]
"""No whole number of pages."""


def ask(pair: Deployment, hisparse: bool, seed: int, n: int = 1) -> tuple[Any, int]:
    """Return the answer to a request, or of each sample, and how many rooms it had at the prefill node."""
    before = pair.num_rooms()
    params = {"temperature": 1.0, "sampling_seed": seed, "n": n, "max_new_tokens": 8}
    answer = generated(pair.url, input_ids=PROMPT, hisparse=hisparse, params=params)
    return answer, pair.num_rooms() - before


@pytest.mark.I5
@pytest.mark.parametrize("hisparse", [True, False])
def test_one_room_serves_all_samples_with_the_tokens_of_separate_requests(
    pair: Deployment, hisparse: bool
) -> None:
    pair.flush_prefix_caches()
    samples, num_rooms = ask(pair, hisparse, SEED, NUM_SAMPLES)
    assert num_rooms == 1
    assert [sample["meta_info"]["held_tokens"] for sample in samples] == [0] + [len(PROMPT) - 1] * 3
    separate = []
    for number in range(NUM_SAMPLES):
        pair.flush_prefix_caches()
        answer, num_rooms = ask(pair, hisparse, SEED + number)
        assert num_rooms == 1
        separate.append(answer["output_ids"])
    assert [sample["output_ids"] for sample in samples] == separate
    assert len({tuple(tokens) for tokens in separate}) == NUM_SAMPLES
