"""A conversation that the prefill node has nowhere any more is read from the decode node, not computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.harness import Deployment, Service, deployment, generated
from tests.waiting import WAIT_SECS, wait_until

PAGE = 16
NUM_SAID, NUM_NEW_TOKENS = 300, 40
READ = "hisparse_pd:held_read_tokens_total"
COMPUTED = {"device": 0, "host": 0, "storage": 0, "decode": 0}
PATIENT = {"PATIENT_READS": "1"}
"""By its clock alone a prefill node computes what is soon computed, or is late."""


def flush(node: Service) -> None:
    httpx.post(node.url + "/flush_cache", timeout=WAIT_SECS).raise_for_status()


def ask(
    pair: Deployment, prompt: list[int], hisparse: bool, **change: Any
) -> tuple[list[int], dict[str, int]]:
    """Return the answer's tokens and the tiers of its cached tokens."""
    params = {"max_new_tokens": NUM_NEW_TOKENS}
    answer = generated(pair.url, input_ids=prompt, hisparse=hisparse, params=params, **change)
    meta = answer["meta_info"]
    assert sum(meta["cached_tokens_details"].values()) == meta["cached_tokens"]
    return answer["output_ids"], meta["cached_tokens_details"]


def check_turns(pair: Deployment, hisparse: bool, seed: int, **change: Any) -> tuple[list[int], list[int]]:
    """Have a second turn whose prompt is computed, and then read from the decode node: its tokens are the
    same.

    Returns its prompt and its tokens.
    """
    drawn = random.Random(seed)
    prompt, said = ([drawn.randint(32, 126) for _ in range(count)] for count in (NUM_SAID, NUM_SAID // 4))
    answer, _ = ask(pair, prompt, hisparse, **change)
    longer = prompt + answer + said
    pair.flush_prefix_caches()
    expected, tiers = ask(pair, longer, hisparse, **change)
    assert tiers == COMPUTED

    pair.flush_prefix_caches()
    assert ask(pair, prompt, hisparse, **change)[0] == answer
    flush(pair.prefill[0])
    num_held = (len(prompt) + len(answer) - 1) // PAGE * PAGE
    assert ask(pair, longer, hisparse, **change) == (expected, COMPUTED | {"decode": num_held})
    return longer, expected


def check_own_tiers(pair: Deployment, hisparse: bool, prompt: list[int], expected: list[int]) -> None:
    """What was read stays on the device, and goes to main memory, as what was computed."""
    (decode,) = pair.decode
    num_usable = (len(prompt) - 1) // PAGE * PAGE
    flush(decode)
    assert ask(pair, prompt, hisparse) == (expected, COMPUTED | {"device": num_usable})
    for seed in range(100, 103):  # these take its pages on the device
        ask(pair, [32 + (seed + number * number) % 90 for number in range(450)], hisparse)
    flush(decode)
    tokens, tiers = ask(pair, prompt, hisparse)
    assert tokens == expected
    assert tiers["host"] > 0
    assert tiers["device"] + tiers["host"] == num_usable


@contextmanager
def pair_of(
    checkpoint: Path,
    log_dir: Path,
    lane: str,
    *options: str,
    prefill_options: tuple[str, ...] = (),
    decode_options: tuple[str, ...] = (),
) -> Iterator[Deployment]:
    common = ["--page-size", f"{PAGE}", "--same-host-lane", lane, *options]
    with deployment(
        checkpoint,
        log_dir,
        prefill_options=[*common, *prefill_options],
        decode_options=[*common, *decode_options],
        prefill_faults=PATIENT,
    ) as nodes:
        yield nodes


@pytest.mark.slow
@pytest.mark.I5
@pytest.mark.parametrize("lane", ["auto", "off"])
def test_a_turn_behind_what_only_the_decode_node_holds(
    lane: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    tiers = ("--kv-pool-tokens", "1024", "--host-cache-tokens", "8192")
    with pair_of(tiny_checkpoint("glm"), tmp_path, lane, prefill_options=tiers) as pair:
        for hisparse in (True, False):
            prompt, expected = check_turns(pair, hisparse, seed=hisparse)
            check_own_tiers(pair, hisparse, prompt, expected)
        wait_until(lambda: pair.prefill[0].metrics()[READ] > 0, "the engine's report")
        assert pair.prefill[0].metrics()["hisparse_pd:held_read_failures_total"] == 0


@pytest.mark.I5
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", ["v32", "glm"])
def test_ranks_drafts_main_memory_and_salts(
    variant: str, drafting_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A room's number chooses the prefill node's rank, so a turn may come to one that never saw the
    prompt."""
    with pair_of(
        drafting_checkpoint(variant),
        tmp_path,
        "auto",
        "--dp-size",
        "2",
        prefill_options=("--host-cache-tokens", "4096"),
        decode_options=("--speculative-num-steps", "3", "--device-buffer-size", "260"),
    ) as pair:
        for hisparse in (True, False):
            check_turns(pair, hisparse, seed=2 + hisparse)
            check_turns(pair, hisparse, seed=4 + hisparse, cache_salt="a secret")
        accepted = "hisparse_pd:accepted_draft_tokens_total"
        wait_until(lambda: pair.decode[0].metrics()[accepted] > 0, "the engines' reports")
        wait_until(lambda: pair.prefill[0].metrics()[READ] > 0, "the engines' reports")
