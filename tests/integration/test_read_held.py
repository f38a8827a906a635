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


def check_turns(pair: Deployment, hisparse: bool, seed: int, **change: Any) -> None:
    """Have a second turn whose prompt is computed, read from the decode node, taken from the device, and
    taken from main memory; the tokens are the same."""
    drawn = random.Random(seed)
    prompt, said = ([drawn.randint(32, 126) for _ in range(count)] for count in (NUM_SAID, NUM_SAID // 4))
    (prefill,), (decode,) = pair.prefill, pair.decode
    answer, _ = ask(pair, prompt, hisparse, **change)
    longer = prompt + answer + said
    pair.flush_prefix_caches()
    expected, tiers = ask(pair, longer, hisparse, **change)
    assert tiers == COMPUTED

    pair.flush_prefix_caches()
    assert ask(pair, prompt, hisparse, **change)[0] == answer
    flush(prefill)
    num_held = (len(prompt) + len(answer) - 1) // PAGE * PAGE
    assert ask(pair, longer, hisparse, **change) == (expected, COMPUTED | {"decode": num_held})

    flush(decode)
    num_usable = (len(longer) - 1) // PAGE * PAGE
    assert ask(pair, longer, hisparse, **change) == (expected, COMPUTED | {"device": num_usable})


@contextmanager
def pair_of(
    checkpoint: Path, log_dir: Path, lane: str, *options: str, decode_options: tuple[str, ...] = ()
) -> Iterator[Deployment]:
    common = ["--page-size", f"{PAGE}", "--same-host-lane", lane, *options]
    with deployment(
        checkpoint, log_dir, prefill_options=common, decode_options=[*common, *decode_options]
    ) as nodes:
        yield nodes


@pytest.mark.I5
@pytest.mark.parametrize("lane", ["auto", "off"])
def test_a_turn_behind_what_only_the_decode_node_holds(
    lane: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with pair_of(tiny_checkpoint("glm"), tmp_path, lane) as pair:
        for hisparse in (True, False):
            check_turns(pair, hisparse, seed=hisparse)
        wait_until(lambda: pair.prefill[0].metrics()[READ] > 0, "the engine's report")
        assert pair.prefill[0].metrics()["hisparse_pd:held_read_failures_total"] == 0
