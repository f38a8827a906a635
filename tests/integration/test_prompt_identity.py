"""Rooms of two prompts, and prompts that their clients want kept apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hisparse_pd.core.paging.prompt_keys import PromptIdentity, root_of
from hisparse_pd.engine.messages import pack_token_ids
from tests.integration.harness import (
    Deployment,
    Service,
    generate,
    generated,
    is_idle,
    pool_usage,
    wait_until,
)

pytestmark = pytest.mark.I5

PROMPT = "A room has one prompt, whichever node is asked, and so has what is held of it. " * 4
OURS = [*range(40, 100), 120] * 5


def served(url: str, **body: Any) -> tuple[list[int], int, int]:
    """Tokens, and how many of the prompt's were cached and held."""
    answer = generated(url, **body)
    meta = answer["meta_info"]
    return answer["output_ids"], meta["cached_tokens"], meta["held_tokens"]


@pytest.mark.parametrize("hisparse", [True, False])
@pytest.mark.parametrize(
    ("theirs", "key"), [([101] * len(OURS), None), (OURS, "a salt")], ids=["other tokens", "another salt"]
)
def test_a_room_with_another_prompt_on_each_node_ends_on_both_and_leaves_nothing(
    pair: Deployment, theirs: list[int], key: str | None, hisparse: bool
) -> None:
    """Prompt and room go to the nodes themselves, as whoever reaches both can have it."""
    prefill, decode = pair.prefill[0], pair.decode[0]
    pair.flush_prefix_caches()
    expected, _, _ = served(pair.url, input_ids=OURS, hisparse=hisparse)
    pair.flush_prefix_caches()
    room = {
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": 77_000 + 2 * hisparse + (key is None),
        "hisparse": hisparse,
    }
    with ThreadPoolExecutor(2) as threads:
        legs = [
            threads.submit(generate, prefill.url, input_ids=theirs, extra_key=key, **room),
            threads.submit(generate, decode.url, input_ids=OURS, **room),
        ]
        answers = [leg.result() for leg in legs]
    digests = (
        PromptIdentity.of(root_of(), pack_token_ids(OURS)).digest.hex(),
        PromptIdentity.of(root_of(None, key), pack_token_ids(theirs)).digest.hex(),
    )
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert f"{len(OURS)} tokens of digest {digests[0]} on the decode node" in answer.text
        assert f"{len(OURS)} tokens of digest {digests[1]} on the prefill node" in answer.text
    wait_until(lambda: is_idle(decode) and pool_usage(decode) == 0, "pools whole")
    assert served(pair.url, input_ids=OURS, hisparse=hisparse) == (expected, 0, 0)
    tokens, num_cached, num_held = served(pair.url, input_ids=OURS, hisparse=hisparse)
    assert tokens == expected
    assert num_cached > 0
    assert num_held > 0


CHAT = [{"role": "user", "content": PROMPT}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 4},
    "/generate": {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}},
}


def num_spared(answer: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt that were cached, and held, in the endpoint's own words."""
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
