"""Prompts that their clients want kept apart; tests/unit/api/test_schemas.py has the fields of each API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.harness import Deployment

PROMPT = "A room has one prompt, whichever node is asked, and so has what is held of it. " * 4


def num_spared(pair: Deployment, **isolation: str) -> tuple[int, int]:
    """Ask for a completion; return how many of the prompt's tokens were cached and held."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **isolation}
    answer = httpx.post(f"{pair.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    details: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], details["held_tokens"]


@pytest.mark.I5
def test_equal_prompts_share_nothing_across_isolation_keys(pair: Deployment) -> None:
    pair.flush_prefix_caches()
    keys: list[dict[str, str]] = [
        {},
        {"cache_salt": "mine"},
        {"extra_key": "mine"},
        {"cache_salt": "mine", "extra_key": "this session"},
    ]
    assert [num_spared(pair, **key) for key in keys] == [(0, 0)] * len(keys)
    for num_cached, num_held in [num_spared(pair, **key) for key in keys]:
        assert num_cached > 0
        assert num_held > 0
