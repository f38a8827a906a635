"""Turns that add a few tokens to a conversation are computed by the decode node alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Deployment, deployment, generated, wait_until

NUM_NEW_TOKENS = 8


def ask(pair: Deployment, prompt: list[int], hisparse: bool) -> tuple[Any, int]:
    """Return an answer, and how many rooms it had at the prefill node."""
    before = pair.num_rooms()
    params = {"max_new_tokens": NUM_NEW_TOKENS}
    answer = generated(pair.url, input_ids=prompt, hisparse=hisparse, params=params)
    return answer, pair.num_rooms() - before


def check_turns(pair: Deployment, num_prompt: int, num_said: int, num_held: int) -> None:
    """Have two turns in each mode, of which the second adds ``num_said`` tokens."""
    drawn = random.Random(num_prompt)
    prompt, said = ([drawn.randint(32, 126) for _ in range(count)] for count in (num_prompt, num_said))
    for hisparse in (True, False):
        pair.flush_prefix_caches()
        first, num_rooms = ask(pair, prompt, hisparse)
        assert num_rooms == 1
        longer = prompt + first["output_ids"] + said
        second, num_rooms = ask(pair, longer, hisparse)
        assert num_rooms == 0, "the prefill node has no part in it"
        meta = second["meta_info"]
        assert (meta["held_tokens"], meta["cached_tokens"]) == (num_held, num_held)
        assert meta["prompt_tokens"] == len(longer)
        pair.flush_prefix_caches()
        again, num_rooms = ask(pair, longer, hisparse)
        assert num_rooms == 1
        assert again["output_ids"] == second["output_ids"]


@pytest.mark.I5
def test_a_turn_of_a_few_tokens_makes_no_room_at_the_prefill_node(pair: Deployment) -> None:
    """Steps without drafts take one of them each."""
    check_turns(pair, num_prompt=186, num_said=2, num_held=192)


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_with_drafts_of_several_ranks_take_more(
    drafting_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    options = ("--dp-size", "2", "--page-size", "16")
    drafting = ("--speculative-num-steps", "3", "--device-buffer-size", "260")
    with deployment(
        drafting_checkpoint("v32"),
        tmp_path,
        prefill_options=options,
        decode_options=[*options, *drafting],
    ) as nodes:
        check_turns(nodes, num_prompt=336, num_said=6, num_held=336)
        accepted = "hisparse_pd:accepted_draft_tokens_total"
        wait_until(lambda: nodes.decode[0].metrics()[accepted] > 0, "drafts that were right")
