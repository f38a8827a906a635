"""Prompts that their clients want kept apart."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.integration.harness import Deployment, Service

pytestmark = pytest.mark.I5

PROMPT = "A room has one prompt, whichever node is asked, and so has what is held of it. " * 4

CHAT = [{"role": "user", "content": PROMPT}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 4},
    "/generate": {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}},
}


def num_spared(answer: dict[str, Any]) -> tuple[int, int]:
    """Return the prompt's tokens that were cached and that were held, from the endpoint's own fields."""
    if (meta := answer.get("meta_info")) is not None:
        return meta["cached_tokens"], meta["held_tokens"]
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if details is None:
        return usage["cache_read_input_tokens"], usage.get("held_tokens", usage["cache_read_input_tokens"])
    return details["cached_tokens"], details["held_tokens"]


def ask(node: Service, path: str, **more: Any) -> tuple[int, int]:
    answer = httpx.post(node.url + path, json={"model": "tiny", **ENDPOINTS[path], **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return num_spared(answer.json())


@pytest.mark.parametrize("path", ENDPOINTS)
def test_equal_prompts_share_nothing_across_isolation_keys(pair: Deployment, path: str) -> None:
    pair.flush_prefix_caches()
    keys: list[dict[str, Any]] = [
        {},
        {"cache_salt": "mine"},
        {"extra_key": "mine"},
        {"cache_salt": "mine", "extra_key": "this session"},
    ]
    assert [ask(pair.router, path, **key) for key in keys] == [(0, 0)] * len(keys)
    for num_cached, num_held in [ask(pair.router, path, **key) for key in keys]:
        assert num_cached > 0
        assert num_held > 0


def test_an_isolation_key_that_is_none_is_refused(pair: Deployment) -> None:
    for path in ENDPOINTS:
        answer = httpx.post(
            pair.url + path, json={"model": "tiny", **ENDPOINTS[path], "cache_salt": ""}, timeout=60
        )
        assert answer.status_code == 400
        assert "cache_salt" in answer.text
