"""What tests of wrong rows share: a host pool that can be damaged, and an operator's remedy."""

from __future__ import annotations

import mmap
import os
import random
import re
from pathlib import Path

import httpx

from hisparse_pd.base.vocabulary import KV_ROW_CORRUPT
from tests.integration.harness import Service, wait_until
from tests.waiting import WAIT_SECS

ROW = re.compile(
    r"the KV of layer \d+, position \d+, in slot \d+ of the (host|device) pool is not what was written "
    r"\((landing|page-in|newest|scrub|cached)\): its check is 0x[0-9a-f]{8}, expected 0x[0-9a-f]{8}"
)


class HostPool:
    """The host pool of a decode node's engine, as another process of its user can reach it."""

    def __init__(self, pid: int, num_bytes: int, seed: int = 7) -> None:
        """``pid``: the engine's; ``num_bytes``: the pool's size."""
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
        self._random = random.Random(seed)

    def flip(self, num_bits: int) -> None:
        for _ in range(num_bits):
            self._bytes[self._random.randrange(len(self._bytes))] ^= 1 << self._random.randrange(8)


def num_found(*nodes: Service) -> float:
    """Wrong rows that the nodes have found since their start."""
    samples = [sample for node in nodes for sample in node.metrics().items()]
    return sum(value for name, value in samples if "kv_rows_corrupt_total" in name)


def assert_names_a_row(got: httpx.Response) -> None:
    """Check that the error names a row: a node's, or the router's when the next node found another."""
    error = got.json()["error"]
    assert (got.status_code, error["code"]) in ((500, KV_ROW_CORRUPT), (502, "bad_gateway")), error
    assert ROW.search(error["message"]), error


def release_pages(node: Service) -> int:
    """Release all pages that the node has set aside. Returns how many there were.

    The list of ``/quarantine`` is some turns of the engine's loop behind, as metrics are.
    """
    released = set()

    def all_are_out() -> bool:
        for page in httpx.get(node.url + "/quarantine", timeout=WAIT_SECS).json()["pages"]:
            query = f"pool={page['pool']}&slot={page['start']}&rank={page['rank']}"
            released.add(query)
            answer = httpx.post(f"{node.url}/release_quarantine?{query}", timeout=WAIT_SECS)
            assert answer.status_code in (200, 404), answer.text  # 404: it is out by now
        return node.metrics()["hisparse_pd:set_aside_tokens"] == 0

    wait_until(all_are_out, "all pages are given out again")
    return len(released)
