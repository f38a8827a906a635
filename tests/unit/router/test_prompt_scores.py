"""Requests that a prefill node answers alone, and those for logprobs of the prompt that none can."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Send

from hisparse_pd.api.bodies import Endpoint
from hisparse_pd.http.http_errors import ApiError
from hisparse_pd.settings import RouterSettings
from router.body import RequestBody
from router.errors import RouterError
from router.nodes import NodeKind, NodePool
from tests.unit.router.cluster import CutConnection, FakeNode, cluster, error_of, never, says, start

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT, GENERATE = Endpoint.COMPLETIONS, Endpoint.CHAT, Endpoint.GENERATE
ALONE, PLAIN = "prefill_only", ""


def scored(max_new_tokens: Any, **fields: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "stop": ["x"]}
    return {"return_logprob": True, "logprob_start_len": 0, "sampling_params": params, **fields}


@pytest.mark.parametrize(
    ("endpoint", "fields", "told"),
    [
        (COMPLETIONS, {}, PLAIN),
        (COMPLETIONS, {"max_tokens": 0}, ALONE),
        (COMPLETIONS, {"max_tokens": 1}, PLAIN),
        (COMPLETIONS, {"max_tokens": 10}, PLAIN),
        (COMPLETIONS, {"max_tokens": 1, "echo": True}, PLAIN),
        (COMPLETIONS, {"max_tokens": 1, "echo": True, "logprobs": 1}, ALONE),
        (COMPLETIONS, {"max_tokens": 1, "echo": False, "logprobs": 1}, PLAIN),
        (COMPLETIONS, {"max_tokens": 1, "prompt_logprobs": 0}, ALONE),
        (COMPLETIONS, {"max_tokens": 0, "max_completion_tokens": 5, "prompt_logprobs": None}, PLAIN),
        (COMPLETIONS, {"max_tokens": 5, "max_completion_tokens": 0}, ALONE),
        (COMPLETIONS, {"max_tokens": 0, "max_completion_tokens": None}, ALONE),
        (COMPLETIONS, {"max_tokens": "0"}, PLAIN),
        (COMPLETIONS, {"max_tokens": False}, PLAIN),
        (CHAT, {"max_tokens": 0}, ALONE),
        (CHAT, {"max_tokens": 1, "logprobs": True}, PLAIN),
        (Endpoint.MESSAGES, {"max_tokens": 0, "prompt_logprobs": 3}, PLAIN),
        (GENERATE, scored(0), ALONE),
        (GENERATE, scored(1), ALONE),
        (GENERATE, scored(1, return_logprob=False), PLAIN),
        (GENERATE, scored(1, logprob_start_len=-1), PLAIN),
        (GENERATE, {"sampling_params": [{"max_new_tokens": 0}, {"max_new_tokens": 0}]}, ALONE),
        (GENERATE, {"sampling_params": [{"max_new_tokens": 0}, {"max_new_tokens": 1}]}, PLAIN),
        (GENERATE, {"sampling_params": []}, PLAIN),
        (GENERATE, {"sampling_params": [0]}, PLAIN),
        (GENERATE, {"sampling_params": None}, PLAIN),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_nodes_are_told_whose_the_answer_is(
    endpoint: Endpoint, fields: dict[str, Any], told: str, indent: int | None
) -> None:
    client = {"prompt": "a", ALONE: "mine", **fields}
    body = RequestBody.parse(json.dumps(client, indent=indent).encode(), endpoint)
    assert body.is_prefill_only == (told == ALONE)
    sent = json.loads(body.with_bootstrap("h", 1, 7))
    assert sent.get(ALONE) == (True if told else None)
    assert {name: sent[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("endpoint", "fields", "asking", "said"),
    [
        (
            COMPLETIONS,
            {"max_tokens": 2, "echo": True, "logprobs": 0},
            "echo",
            "max_tokens is 2: set max_tokens",
        ),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, "echo", "max_tokens is not given"),
        (
            CHAT,
            {"max_tokens": 1, "max_completion_tokens": 9, "prompt_logprobs": 3},
            "prompt_logprobs",
            "max_completion_tokens is 9: set max_completion_tokens to 0 or 1",
        ),
        (GENERATE, scored(2), "logprob_start_len", "set sampling_params.max_new_tokens to 0 or 1"),
        (GENERATE, scored("0"), "logprob_start_len", '"max_new_tokens": "0"'),
    ],
)
def test_logprobs_of_the_prompt_beside_more_than_one_token_are_refused(
    endpoint: Endpoint, fields: dict[str, Any], asking: str, said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        RequestBody.parse(json.dumps({"prompt": "a", **fields}).encode(), endpoint)
    assert (caught.value.status, caught.value.param) == (400, asking)
    assert caught.value.message.startswith(f"{asking}: ")
    for part in ("1 generated token at most", said, "a second request"):
        assert part in caught.value.message


NOTHING = {"prompt": "ab", "max_tokens": 0}


async def test_a_prefill_node_answers_alone() -> None:
    async with cluster(says(b'{"done": 1.0}'), never) as pair:
        response = await pair.client.post("/v1/completions", json=NOTHING, headers={"x-request-id": "r"})
        assert response.content == b'{"done": 1.0}'
        assert response.headers["x-hisparse-pd-prefill"] == pair.prefill[0].url
        assert "x-hisparse-pd-decode" not in response.headers
        assert not pair.decode[0].requests
        (_, headers, _), body = pair.prefill[0].requests[0], pair.prefill[0].body()
        assert headers["x-request-id"] == "r"
        assert body[ALONE] is True
        assert (body["bootstrap_port"], type(body["bootstrap_room"])) == (7000, int)


async def test_another_prefill_node_takes_what_one_fails_with() -> None:
    async with cluster([says(b"{}", status=503), says(b"{}")], never) as pair:
        for _ in range(2):
            assert (await pair.client.post("/v1/completions", json=NOTHING)).status_code == 200
        await pair.prefill[0].close()
        for _ in range(2):
            assert (await pair.client.post("/v1/completions", json=NOTHING)).status_code == 200
        await pair.prefill[1].close()
        response = await pair.client.post("/v1/completions", json=NOTHING)
        assert response.status_code in (502, 503)
        assert "prefill node" in error_of(response)


async def test_its_errors_are_the_clients_and_its_break_is_a_502() -> None:
    async def cut(node: FakeNode, send: Send) -> None:
        await start(send)
        raise CutConnection

    async with cluster(says(b'{"error":{"message":"no"}}', status=400), never) as pair:
        response = await pair.client.post("/v1/completions", json=NOTHING)
        assert (response.status_code, response.json()) == (400, {"error": {"message": "no"}})
    async with cluster(cut, never) as pair:
        response = await pair.client.post("/v1/completions", json=NOTHING)
        assert response.status_code == 502


async def test_a_client_that_leaves_ends_it() -> None:
    async with cluster(never, never) as pair:
        asking = asyncio.create_task(pair.client.post("/v1/completions", json=NOTHING))
        async with asyncio.timeout(60):
            while not pair.prefill[0].requests:
                await asyncio.sleep(0.005)
            asking.cancel()
            await pair.prefill[0].client_left.wait()


def test_a_pool_without_a_decode_node_has_prefill_nodes() -> None:
    pool = NodePool.from_settings(RouterSettings(prefill=(("http://p:1", 1),), decode=("http://d:1",)))
    pool.mark_healthy(pool.of_kind(NodeKind.PREFILL)[0])
    assert pool.pick(kinds=(NodeKind.PREFILL,)).prefill.url == "http://p:1"
    assert pool.has((NodeKind.PREFILL,))
    assert not pool.has(tuple(NodeKind))
    with pytest.raises(RouterError, match="no healthy decode node"):
        pool.pick()
    with pytest.raises(RouterError, match="no healthy prefill node"):
        pool.pick(pool.nodes, kinds=(NodeKind.PREFILL,))
