"""Requests that a prefill node answers alone, and answers that are joined from both nodes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.types import Send

from hisparse_pd.api.score_report import REPORT_TYPE, PromptLists, Report
from hisparse_pd.settings import RouterSettings
from router import relay
from router.body import Endpoint, RequestBody
from router.errors import RouterError
from router.nodes import NodeKind, NodePool
from tests.unit.router.cluster import CutConnection, FakeNode, answer, cluster, error_of, never, says, start

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT, GENERATE = Endpoint.COMPLETIONS, Endpoint.CHAT_COMPLETIONS, Endpoint.GENERATE
ALONE, JOINED, PLAIN = "prefill_only", "joins_answers", ""


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
        (COMPLETIONS, {"max_tokens": 2, "echo": True, "logprobs": 0}, JOINED),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, JOINED),
        (COMPLETIONS, {"max_tokens": 0, "max_completion_tokens": 5, "prompt_logprobs": None}, PLAIN),
        (COMPLETIONS, {"max_tokens": 5, "max_completion_tokens": 0}, ALONE),
        (COMPLETIONS, {"max_tokens": 0, "max_completion_tokens": None}, ALONE),
        (COMPLETIONS, {"max_tokens": "0"}, PLAIN),
        (COMPLETIONS, {"max_tokens": False}, PLAIN),
        (CHAT, {"max_tokens": 0}, ALONE),
        (CHAT, {"max_tokens": 1, "logprobs": True}, PLAIN),
        (CHAT, {"prompt_logprobs": 3}, JOINED),
        (Endpoint.MESSAGES, {"max_tokens": 0, "prompt_logprobs": 3}, PLAIN),
        (GENERATE, scored(0), ALONE),
        (GENERATE, scored(1), ALONE),
        (GENERATE, scored(2), JOINED),
        (GENERATE, scored(1, return_logprob=False), PLAIN),
        (GENERATE, scored(1, logprob_start_len=-1), PLAIN),
        (GENERATE, scored("0"), JOINED),
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
    client = {"prompt": "a", ALONE: "mine", JOINED: "mine", **fields}
    body = RequestBody.parse(json.dumps(client, indent=indent).encode(), endpoint)
    assert (body.is_prefill_only, body.joins_answers) == (told == ALONE, told == JOINED)
    sent = json.loads(body.with_bootstrap("h", 1, 7))
    assert {name: sent[name] for name in (ALONE, JOINED) if name in sent} == ({told: True} if told else {})
    assert {name: sent[name] for name in fields} == fields


SCORED = {"prompt": "ab", "max_tokens": 2, "echo": True, "logprobs": 0}
REPORT = Report(
    (0, 0),
    (PromptLists({}, {"tokens": memoryview(b'"a","b"'), "token_logprobs": memoryview(b"null,-1.5")}, {}),),
)
DECODED = b'{"choices":[%s],"usage":{"total_tokens": 3}}' % b",".join(
    b'{"index":%d,"text":"abc","logprobs":{"tokens":["c"],"token_logprobs":[-0.50]}}' % index
    for index in (0, 1)
)


def reports(body: bytes = REPORT.packed()) -> Any:
    return says(body, content_type=REPORT_TYPE)


@pytest.mark.parametrize("is_prefill_late", [False, True])
async def test_the_answers_of_both_nodes_are_joined(
    is_prefill_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_CHUNK_BYTES", 7)

    async def prefill(node: FakeNode, send: Send) -> None:
        if is_prefill_late:
            await start(send, content_type=REPORT_TYPE)
            await pair.decode[0].release.wait()
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": REPORT.packed()})
        else:
            await answer(send, REPORT.packed(), content_type=REPORT_TYPE)

    async def decode(node: FakeNode, send: Send) -> None:
        await answer(send, DECODED)
        node.release.set()

    async with cluster(prefill, decode) as pair:
        response = await pair.client.post("/v1/completions", json=SCORED)
        assert response.status_code == 200
        assert int(response.headers["content-length"]) == len(response.content)
        assert response.headers["content-type"] == "application/json"
        assert {f"x-hisparse-pd-{kind}" for kind in NodeKind} <= set(response.headers)
        assert b"-0.50" in response.content, "numbers of the node were written anew"
        for choice in response.json()["choices"]:
            assert choice["logprobs"] == {"tokens": ["a", "b", "c"], "token_logprobs": [None, -1.5, -0.5]}
        assert response.json()["usage"] == {"total_tokens": 3}
        assert pair.prefill[0].body()[JOINED] is pair.decode[0].body()[JOINED] is True


@pytest.mark.parametrize(
    ("report", "decoded"),
    [
        (b"\xc1", DECODED),
        (b'{"delivered": true}', DECODED),
        (REPORT.packed(), b'{"object": "error"}'),
        (REPORT.packed(), b"[1]"),
        (REPORT.packed(), b'{"choices":[{"logprobs":null}]}'),
        (Report((0,), REPORT.prompts).packed(), DECODED),
    ],
)
async def test_answers_that_do_not_fit_together_are_a_502(report: bytes, decoded: bytes) -> None:
    async with cluster(reports(report), says(decoded), max_retries=0) as pair:
        response = await pair.client.post("/v1/completions", json=SCORED)
        assert response.status_code == 502
        assert "do not fit together" in error_of(response)


async def test_what_is_joined_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_JOINED_BYTES", 1000)
    for report, decoded in ((b"x" * 1001, DECODED), (REPORT.packed(), b"x" * 1001)):
        async with cluster(reports(report), says(decoded), max_retries=0) as pair:
            response = await pair.client.post("/v1/completions", json=SCORED)
            assert response.status_code == 502
            assert "more than 1000 bytes" in error_of(response)
            assert "split the request" in error_of(response)


@pytest.mark.I8
async def test_what_is_held_to_be_joined_is_bounded_over_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = memoryview(b",".join([b'"a"'] * 500))
    report = Report((0, 0), (PromptLists({}, {"tokens": tokens, "token_logprobs": tokens}, {}),)).packed()
    monkeypatch.setattr(relay, "MAX_ALL_JOINED_BYTES", len(report) + len(DECODED))
    goes_on = asyncio.Event()

    async def waits(node: FakeNode, send: Send) -> None:
        await goes_on.wait()
        await says(DECODED)(node, send)

    async with cluster(reports(report), waits) as pair:

        async def ask() -> httpx.Response:
            return await pair.client.post("/v1/completions", json=SCORED)

        asking = {asyncio.create_task(ask()) for _ in range(2)}
        (early,), (late,) = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        refused = early.result()
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert f"of {len(report) + len(DECODED)} that a process of it may" in error_of(refused)
        assert "run more routers" in error_of(refused)
        assert len(pair.prefill[0].requests) == 2, "another pair would have had no more room"
        goes_on.set()
        assert (await late).status_code == 200
        for _ in range(3):  # what was held was given back
            assert (await ask()).status_code == 200


async def test_a_prefill_node_that_fails_with_a_joined_answer_is_replaced() -> None:
    async with cluster([says(b"{}", status=503), reports()], says(DECODED)) as pair:
        for _ in range(2):
            response = await pair.client.post("/v1/completions", json=SCORED)
            assert response.json()["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]


async def test_an_error_of_the_decode_node_is_the_clients() -> None:
    async with cluster(never, says(b'{"error":{"message":"too long"}}', status=400)) as pair:
        response = await pair.client.post("/v1/completions", json=SCORED)
        assert (response.status_code, response.json()) == (400, {"error": {"message": "too long"}})


# --- alone --------------------------------------------------------------------------------------------


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
    assert pool.pick_alone_by((), []).prefill.url == "http://p:1"
    assert pool.has((NodeKind.PREFILL,))
    assert not pool.has(tuple(NodeKind))
    with pytest.raises(RouterError, match="no healthy decode node"):
        pool.pick()
    with pytest.raises(RouterError, match="no healthy prefill node"):
        pool.pick_alone_by(pool.nodes, [])
