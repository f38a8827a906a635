"""Bits that flip in the memory of a decode node while it serves.

Each request is right, or ends with an error that names the row. The product has no hook for that: the test
writes to the node's shared memory.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from hisparse_pd.core.model.spec import load_spec
from tests.integration.harness import deployment, engine_pids, generate, is_idle, wait_until
from tests.integration.wrong_rows import HostPool, assert_names_a_row, num_found, release_pages
from tests.waiting import WAIT_SECS

HOST_POOL_TOKENS = 6400
NUM_REQUESTS = 6
NUM_NEW = 16
NUM_FLIPS = 20_000
RANKS = ["--dp-size", "2"]
DRAFTS = ["--speculative-num-steps", "3", "--device-buffer-size", "260"]


def ask(url: str, prompt: Sequence[int], hisparse: bool) -> httpx.Response:
    return generate(
        url, input_ids=prompt, hisparse=hisparse, params={"max_new_tokens": NUM_NEW, "ignore_eos": True}
    )


@pytest.mark.I9
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("has_ranks", [False, True], ids=["plain", "two ranks with drafts"])
def test_bits_that_flip_in_the_host_pool(
    tied_checkpoint: Callable[[str], Path],
    drafting_checkpoint: Callable[[str], Path],
    tmp_path: Path,
    has_ranks: bool,
) -> None:
    """Rounds of six hisparse requests before, during and after the flips; prefixes are held between them."""
    checkpoint = (drafting_checkpoint if has_ranks else tied_checkpoint)("v32")
    spec = load_spec(checkpoint, num_draft_layers=int(has_ranks))
    ranks, drafts = (RANKS, DRAFTS) if has_ranks else ([], ["--device-buffer-size", "70"])
    options = ["--host-pool-tokens", str(HOST_POOL_TOKENS), *ranks, *drafts]
    numbers = random.Random(3)
    prompts = [[numbers.randrange(33, 120) for _ in range(300 + 40 * i)] for i in range(NUM_REQUESTS)]
    with (
        deployment(checkpoint, tmp_path, prefill_options=ranks, decode_options=options) as pair,
        ThreadPoolExecutor(NUM_REQUESTS) as threads,
    ):
        (decode,) = pair.decode

        def round_of(hisparse: bool) -> list[httpx.Response]:
            return list(threads.map(lambda prompt: ask(pair.url, prompt, hisparse), prompts))

        expected = [got.json()["output_ids"] for got in round_of(False)]
        num_bytes = spec.num_kv_layers * HOST_POOL_TOKENS * spec.item_bytes
        pools = [HostPool(pid, num_bytes) for pid in engine_pids(decode)]
        assert len(pools) == 1 + has_ranks
        is_over = threading.Event()

        def flip_in_all(num_bits: int) -> None:
            for pool in pools:
                pool.flip(num_bits)

        def flip_on() -> None:
            while not is_over.is_set():
                flip_in_all(50)
                is_over.wait(0.001)

        flipping = threading.Thread(target=flip_on)
        flip_in_all(NUM_FLIPS)  # in unused memory, which is written before it is read
        clean = round_of(True)
        flipping.start()
        try:
            during = [*round_of(True), *round_of(True)]
        finally:
            is_over.set()
            flipping.join()
        flip_in_all(NUM_FLIPS)  # in prefixes that are held
        behind = round_of(True)
        num_wrong = sum(got.status_code != 200 for got in (*during, *behind))
        fewest = max(NUM_REQUESTS, num_wrong)
        wait_until(lambda: num_found(decode) >= fewest, f"{fewest} wrong rows in the metrics")
        wait_until(lambda: is_idle(decode), "the decode node is idle")
        assert httpx.get(decode.url + "/quarantine", timeout=WAIT_SECS).json()["runs"] == []
        assert release_pages(decode) > 0
        pair.flush_prefix_caches()
        after = round_of(True)
    assert [got.json()["output_ids"] for got in clean] == expected
    for number, got in enumerate([*during, *behind]):
        if got.status_code == 200:
            assert got.json()["output_ids"] == expected[number % NUM_REQUESTS], "wrong tokens with a 200"
        else:
            assert_names_a_row(got)
    assert [got.json()["output_ids"] for got in after] == expected
