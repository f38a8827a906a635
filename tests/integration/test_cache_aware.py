"""Two prefill nodes behind a router that knows where a conversation's beginning is cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx

from tests.integration.harness import deployment

PAGE_SIZE = 64
NUM_TALKS, NUM_TURNS = 3, 4


def test_every_turn_finds_the_ones_before_it_in_the_prefix_cache(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with deployment(
        tiny_checkpoint("v32"), tmp_path, num_prefill=2, router_options=["--policy", "cache_aware"]
    ) as nodes:
        talks: list[list[dict[str, str]]] = [[] for _ in range(NUM_TALKS)]
        seen = [0] * NUM_TALKS
        used = set()
        for turn in range(NUM_TURNS):
            for number, talk in enumerate(talks):
                talk.append(
                    {"role": "user", "content": f"Talk {number}, turn {turn}. " + "Tell me more. " * 40}
                )
                answer = httpx.post(
                    f"{nodes.url}/v1/chat/completions",
                    json={"messages": talk, "max_tokens": 8, "temperature": 0},
                    timeout=60,
                )
                assert answer.status_code == 200, answer.text
                body = answer.json()
                used.add(answer.headers["x-hisparse-pd-prefill"])
                usage = body["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] >= seen[number]
                seen[number] = usage["prompt_tokens"] // PAGE_SIZE * PAGE_SIZE
                talk.append({"role": "assistant", "content": body["choices"][0]["message"]["content"]})
        assert min(seen) > NUM_TURNS * 500
        assert len(used) == 2
