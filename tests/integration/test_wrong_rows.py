"""Bits that flip in the memory of a decode node while it serves: each request is right, or ends with an error
that names the row. The product has no hook for that: the test writes to the node's shared memory."""

from __future__ import annotations

import mmap
import os
import random
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from hisparse_pd.model.spec import load_spec
from hisparse_pd.vocabulary import KV_ROW_CORRUPT
from tests.integration.harness import (
    Service,
    decode_service,
    engine_pids,
    generate,
    is_idle,
    prefill_service,
    router_service,
    running,
    wait_until,
)

HOST_POOL_TOKENS = 6400
NUM_REQUESTS = 6
NUM_NEW = 100
NUM_FLIPS = 20_000
ROW = re.compile(
    r"the KV of layer \d+, position \d+, in slot \d+ of the (host|device) pool is not what was written "
    r"\((landing|page-in|newest|scrub)\): its check is 0x[0-9a-f]{8}, expected 0x[0-9a-f]{8}"
)


class HostPool:
    """The host pool of a decode node's engine, as another process of its user can reach it."""

    def __init__(self, decode: Service, num_bytes: int) -> None:
        (pid,) = engine_pids(decode)
        descriptors = Path(f"/proc/{pid}/fd")
        sizes = {
            path: path.stat().st_size
            for path in descriptors.iterdir()
            if "hisparse-pd pool" in os.readlink(path)
        }
        path = min((path for path in sizes if sizes[path] >= num_bytes), key=sizes.__getitem__)
        assert sizes[path] < num_bytes + (2 << 20), sizes
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), num_bytes)
        self._random = random.Random(7)

    def flip(self, num_bits: int) -> None:
        for _ in range(num_bits):
            self._bytes[self._random.randrange(len(self._bytes))] ^= 1 << self._random.randrange(8)


def ask(url: str, prompt: Sequence[int], hisparse: bool) -> httpx.Response:
    return generate(
        url, input_ids=prompt, hisparse=hisparse, params={"max_new_tokens": NUM_NEW, "ignore_eos": True}
    )


@pytest.mark.I9
@pytest.mark.timeout(300)
def test_bits_that_flip_in_the_host_pool(tied_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Before, during and after: six hisparse requests at a time, with what they leave held between them."""
    checkpoint = tied_checkpoint("v32")
    spec = load_spec(checkpoint)
    prefill = prefill_service(checkpoint, tmp_path, "prefill")
    options = ["--host-pool-tokens", str(HOST_POOL_TOKENS), "--device-buffer-size", "70"]
    decode = decode_service(checkpoint, tmp_path, "decode", options)
    router = router_service([prefill], [decode], tmp_path)
    numbers = random.Random(3)
    prompts = [[numbers.randrange(33, 120) for _ in range(300 + 40 * i)] for i in range(NUM_REQUESTS)]
    with running([prefill, decode, router]), ThreadPoolExecutor(NUM_REQUESTS) as threads:

        def round_of(hisparse: bool) -> list[httpx.Response]:
            return list(threads.map(lambda prompt: ask(router.url, prompt, hisparse), prompts))

        expected = [got.json()["output_ids"] for got in round_of(False)]
        pool = HostPool(decode, spec.num_kv_layers * HOST_POOL_TOKENS * spec.item_bytes)
        is_over = threading.Event()

        def flip_on() -> None:
            while not is_over.is_set():
                pool.flip(50)
                is_over.wait(0.001)

        flipping = threading.Thread(target=flip_on)
        pool.flip(NUM_FLIPS)  # of nobody's memory, and of what is to be written yet
        clean = round_of(True)
        flipping.start()
        try:
            during = [*round_of(True), *round_of(True)]
        finally:
            is_over.set()
            flipping.join()
        pool.flip(NUM_FLIPS)  # of prefixes that are held
        behind = round_of(True)
        wait_until(lambda: is_idle(decode), "the decode node is idle")
        found = sum(value for name, value in decode.metrics().items() if "kv_rows_corrupt_total" in name)
        kept = httpx.get(decode.url + "/quarantine", timeout=10).json()
        for page in kept["pages"]:
            query = f"pool={page['pool']}&slot={page['start']}"
            httpx.post(f"{decode.url}/release_quarantine?{query}", timeout=10).raise_for_status()
        for node in (prefill, decode):
            httpx.post(node.url + "/flush_cache", timeout=10).raise_for_status()
        wait_until(
            lambda: decode.metrics()["hisparse_pd:set_aside_tokens"] == 0, "all pages are given out again"
        )
        after = round_of(True)
    assert [got.json()["output_ids"] for got in clean] == expected
    num_wrong = 0
    for number, got in enumerate([*during, *behind]):
        if got.status_code == 200:
            assert got.json()["output_ids"] == expected[number % NUM_REQUESTS], "wrong tokens with a 200"
        else:
            error = got.json()["error"]
            # By the node itself, or by the router when the node it went on at found another.
            assert (got.status_code, error["code"]) in ((500, KV_ROW_CORRUPT), (502, "bad_gateway")), error
            assert ROW.search(error["message"]), error
            num_wrong += 1
    assert found >= max(NUM_REQUESTS, num_wrong), "the flips met nobody"
    assert kept["runs"] == []
    assert kept["pages"]
    assert [got.json()["output_ids"] for got in after] == expected
