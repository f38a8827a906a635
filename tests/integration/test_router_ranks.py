"""Our router before real nodes of two ranks: it finds what a rank has cached, and sums up their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.harness import Deployment, deployment, generate, wait_until

NUM_RANKS = 2
PROMPTS = [f"{number}: " + "all that was said so far, " * 24 for number in range(4)]


@pytest.fixture(scope="module")
def ranks(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    options = ["--served-model-name", "tiny", "--dp-size", str(NUM_RANKS)]
    with deployment(
        tiny_checkpoint("v32"),
        tmp_path_factory.mktemp("ranks"),
        prefill_options=options,
        decode_options=[*options, "--device-buffer-size", "128"],
        router_options=["--policy", "cache_aware"],
    ) as started:
        yield started


def test_what_a_rank_has_cached_is_found_again(ranks: Deployment) -> None:
    for num_before in range(3):
        for prompt in PROMPTS:
            answer = generate(ranks.url, text=prompt)
            assert answer.status_code == 200, answer.text
            assert (answer.json()["meta_info"]["cached_tokens"] > 0) is (num_before > 0), (prompt, num_before)


def test_the_numbers_of_a_node_are_sums_over_its_ranks(ranks: Deployment) -> None:
    def loads() -> list[dict[str, Any]]:
        nodes = httpx.get(f"{ranks.url}/status", timeout=10).json()["nodes"]
        assert [node["load_trouble"] for node in nodes] == ["", ""]
        return [node["load"] for node in nodes]

    wait_until(lambda: all(len(load["ranks"]) == NUM_RANKS for load in loads()), 30, "every rank's numbers")
    for load, pools in zip(loads(), [{"kv"}, {"host", "device", "index"}], strict=True):
        assert [rank["rank"] for rank in load["ranks"]] == list(range(NUM_RANKS))
        assert set(load["pools"]) == pools
        for pool, use in load["pools"].items():
            assert use["total"] == sum(rank["pools"][pool]["total"] for rank in load["ranks"]) > 0
