"""The router between real HTTP servers on loopback that play the nodes' side of the contract."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.types import Send

from hisparse_pd.api.bodies import Endpoint, TokenPath
from hisparse_pd.http.http_errors import ApiError
from hisparse_pd.settings import MAX_BODY_BYTES, RouterSettings
from hisparse_pd.vocabulary import DECODE_NODE_FAILED, PREFILL_NODE_FAILED, VERSION, StartError
from protocol.access import KeyFileError
from router.body import MAX_OTHER_BYTES, MAX_PROMPTS, RequestBody
from router.nodes import Node, NodeKind, NodePool
from router.server import RELAYED, create_app
from tests.property.fuzzing import peak_bytes
from tests.unit.router.cluster import (
    EVENTS,
    WAIT_SECS,
    Behaviour,
    Cluster,
    CutConnection,
    FakeNode,
    answer,
    at_first,
    breaks_off,
    cluster,
    cuts_off,
    delivers,
    error_of,
    eventually,
    in_two_steps,
    never,
    says,
    start,
    streams,
    write,
)
from tests.waiting import until

pytestmark = pytest.mark.anyio


# --- pairing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", list(Endpoint))
async def test_both_nodes_get_the_same_body_with_the_bootstrap_fields(path: str) -> None:
    async with cluster(decode=says(b"{}")) as pair:
        await pair.client.post(path, json={"prompt": "a", "text": "a", "messages": [], "stream": False})
        (prefill,), (decode,) = pair.prefill, pair.decode
        assert prefill.requests[0][0] == decode.requests[0][0] == path
        assert prefill.requests[0][2] == decode.requests[0][2]
        body = decode.body()
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 7000)
        assert isinstance(body["bootstrap_room"], int)
        assert 0 <= body["bootstrap_room"] < 2**63
        assert body["stream"] is False


async def test_values_keep_the_bytes_of_the_client() -> None:
    values = b'"big": 123456789012345678901234567890, "f": 1.10, "e": 1E-2, '
    values += b'"nested": {"x" : [1.0,null]}, "u": "\\u00e4"'
    async with cluster(decode=says(b"{}")) as pair:
        await pair.client.post("/v1/completions", content=b'{"prompt": "a", ' + values + b"}")
        sent = pair.prefill[0].requests[0][2]
        for value in (
            b"123456789012345678901234567890",
            b"1.10",
            b"1E-2",
            b'{"x" : [1.0,null]}',
            b'"\\u00e4"',
        ):
            assert b":" + value in sent


async def test_bootstrap_fields_of_the_client_are_replaced() -> None:
    async with cluster(decode=says(b"{}")) as pair:
        forged = {"text": "a", "bootstrap_host": "10.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}
        await pair.client.post("/generate", json=forged)
        body = pair.decode[0].body()
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 7000)
        assert body["bootstrap_room"] != 7
        assert pair.decode[0].requests[0][2].count(b"bootstrap_host") == 1


@pytest.mark.parametrize(
    ("endpoint", "body", "num_prompts"),
    [
        (Endpoint.COMPLETIONS, {"prompt": "a"}, None),
        (Endpoint.COMPLETIONS, {"prompt": ["a"]}, 1),
        (Endpoint.COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2}, 3),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3]}, None),
        (Endpoint.COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        (Endpoint.COMPLETIONS, {"prompt": []}, None),
        (Endpoint.GENERATE, {"text": ["a", "b"]}, 2),
        (Endpoint.GENERATE, {"input_ids": [[1], [2], [3]]}, 3),
        (Endpoint.GENERATE, {"input_ids": [1, 2]}, None),
        (Endpoint.CHAT, {"messages": [{"role": "user"}], "n": 4}, None),
    ],
)
async def test_a_list_of_prompts_gets_lists_of_bootstrap_fields(
    endpoint: Endpoint, body: dict[str, Any], num_prompts: int | None
) -> None:
    sent = json.loads(RequestBody.parse(json.dumps(body).encode(), endpoint).with_bootstrap("h", 8998, 7))
    if num_prompts is None:
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("h", 8998)
        assert sent["bootstrap_room"] == 7
    else:
        assert sent["bootstrap_host"] == ["h"] * num_prompts
        assert sent["bootstrap_port"] == [8998] * num_prompts
        assert len(set(sent["bootstrap_room"])) == num_prompts
        assert sent["bootstrap_room"][0] == 7
    assert {name: sent[name] for name in body} == body


@pytest.mark.I8
async def test_a_body_of_nothing_but_fields_is_refused_before_it_is_taken_apart() -> None:
    large = {"prompt": "a" * MAX_OTHER_BYTES, "tools": [{"a": "b" * MAX_OTHER_BYTES}], "model": "m"}
    assert RequestBody.parse(json.dumps(large).encode(), Endpoint.COMPLETIONS).fields.keys() == large.keys()
    body = json.dumps({"prompt": "a"} | {f"field {number}": 1 for number in range(1 << 17)}).encode()
    with pytest.raises(ApiError, match=f"{MAX_OTHER_BYTES} are the most") as caught:
        RequestBody.parse(body, Endpoint.COMPLETIONS)
    assert caught.value.status == 400


@pytest.mark.I8
@pytest.mark.parametrize("prompt", ["a", [0]], ids=str)
@pytest.mark.parametrize("num_prompts", [MAX_PROMPTS + 1, 1 << 20])
async def test_too_many_prompts_are_refused(prompt: object, num_prompts: int) -> None:
    body = json.dumps({"prompt": [prompt] * num_prompts}).encode()

    def refuse() -> None:
        with pytest.raises(ApiError, match=f"at most {MAX_PROMPTS}") as caught:
            RequestBody.parse(body, Endpoint.COMPLETIONS)
        assert caught.value.status == 400

    refuse()  # makes the decoder, once
    assert peak_bytes(refuse) < len(body) + (4 << 20), "no object for each"


async def test_headers_that_matter_are_passed_and_no_others() -> None:
    passed = {"authorization": "Bearer x", "x-request-id": "7", "traceparent": "00-1", "tracestate": "a=b"}
    passed["x-correlation-id"] = "9"
    async with cluster(decode=says(b"{}")) as pair:
        await pair.client.post("/generate", json={}, headers={**passed, "cookie": "a=b", "x-other": "1"})
        for node in (*pair.prefill, *pair.decode):
            headers = node.requests[0][1]
            assert {name: headers[name] for name in passed} == passed
            assert "cookie" not in headers
            assert "x-other" not in headers


async def test_every_answer_names_its_request() -> None:
    async with cluster(decode=says(b"{}")) as pair:
        answer = await pair.client.post("/generate", json={}, headers={"x-request-id": "mine-7"})
        assert {answer.headers[name] for name in ("x-request-id", "request-id")} == {"mine-7"}
        new = [
            (await pair.client.post("/generate", json={})).headers["x-request-id"],
            (await pair.client.post("/generate", content=b"[]")).headers["x-request-id"],  # a 400 of our own
            (await pair.client.get("/nowhere")).headers["x-request-id"],
            (await pair.client.get("/nowhere", headers={"x-request-id": "x" * 200})).headers["x-request-id"],
        ]
        assert len(set(new)) == 4
        assert all(re.fullmatch(r"req_[0-9a-f]{24}", name) for name in new)
        told = [request[1]["x-request-id"] for request in pair.decode[0].requests]
        assert told == ["mine-7", new[0]]


async def test_a_path_that_is_not_served_says_which_are() -> None:
    async with cluster(decode=says(b"{}")) as pair:
        answer = await pair.client.post("/v1/embeddings", json={})
        assert answer.status_code == 404
        assert "/v1/embeddings: Not Found" in answer.json()["error"]["message"]
        assert all(path in answer.json()["error"]["message"] for path in RELAYED)


NO_TEXT = [b"caf\xe9", "ca\N{LATIN SMALL LETTER E WITH ACUTE}".encode(), b"\xff\xfe", b"a\x01b", b""]


@pytest.mark.parametrize("value", NO_TEXT)
async def test_headers_that_are_no_text_are_passed_as_they_are(value: bytes) -> None:
    names = (b"x-request-id", b"x-correlation-id", b"traceparent", b"tracestate", b"authorization")
    given = [(name, value) for name in (*names, b"origin", b"user-agent")]
    async with cluster(decode=says(b"{}"), cors_allow_origins=("https://chat.example.com",)) as pair:
        assert (await pair.client.post("/generate", json={}, headers=given)).status_code == 200
        for node in (*pair.prefill, *pair.decode):
            (request,) = node.requests
            passed = dict(request[1].raw)
            assert {name: passed[name] for name in names} == dict.fromkeys(names, value)
        unknown = await pair.client.post("/nowhere", json={}, headers=given)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


async def test_a_key_that_is_no_text_is_refused_as_any_wrong_one(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("x" * 32)
    async with cluster(decode=says(b"{}"), api_key_file=tmp_path / "keys") as pair:
        for value in filter(None, NO_TEXT):
            given = [(b"authorization", b"Bearer " + value)]
            response = await pair.client.post("/generate", json={}, headers=given)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


# --- answers -----------------------------------------------------------------------------------------


async def test_the_stream_is_the_decode_nodes_and_does_not_wait_for_the_prefill_nodes_body() -> None:
    async with cluster(prefill=never) as pair:
        response = await pair.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        assert response.content == b"".join(EVENTS)
        await asyncio.wait_for(pair.prefill[0].client_left.wait(), WAIT_SECS)


async def test_a_chunk_reaches_the_client_before_the_next_one_exists() -> None:
    async with (
        cluster(decode=in_two_steps) as pair,
        pair.client.stream("POST", "/generate", json={"text": "a"}) as response,
    ):
        chunks = response.aiter_raw()
        assert await anext(chunks) == b"data: 1\n\n"
        pair.decode[0].release.set()
        assert await anext(chunks) == b"data: 2\n\n"


async def test_hop_by_hop_headers_stay_behind() -> None:
    async def with_headers(node: FakeNode, send: Send) -> None:
        named = {
            "connection": "x-private",
            "x_private": "1",
            "x_kept": "1",
            "keep_alive": "9",
            "upgrade": "h2c",
        }
        await answer(send, b"{}", **named, content_length="2")

    async with cluster(decode=with_headers) as pair:
        headers = (await pair.client.post("/generate", json={})).headers
        assert headers["x-kept"] == "1"
        assert headers["content-length"] == "2"
        assert not {"x-private", "keep-alive", "upgrade"} & set(headers)
        assert len(headers.get_list("date")) == 1


# --- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_a_prefill_error_ends_the_request_and_the_decode_leg(status: int) -> None:
    error = json.dumps({"error": {"message": "prompt too long", "type": "x", "code": "y"}}).encode()
    async with cluster(prefill=says(error, status), decode=never) as pair:
        response = await pair.client.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == status
        assert response.content == error
        await asyncio.wait_for(pair.decode[0].client_left.wait(), WAIT_SECS)


async def test_a_prefill_error_counts_until_the_first_byte_of_the_answer() -> None:
    async def headers_only(node: FakeNode, send: Send) -> None:
        await start(send)
        await never(node, send)

    async with cluster(prefill=says(b"no", 500, "text/plain"), decode=headers_only) as pair:
        response = await pair.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == 500
        assert pair.prefill[0].url in error_of(response)
        assert "no" in error_of(response)


async def test_a_prefill_error_after_the_first_byte_changes_nothing() -> None:
    async def fails_late(node: FakeNode, send: Send) -> None:
        await node.release.wait()
        await answer(send, b"late", 500)

    async def slow(node: FakeNode, send: Send) -> None:
        await start(send)
        await write(send, b"data: 1\n\n")
        pair.prefill[0].release.set()
        await asyncio.sleep(0.1)
        await write(send, b"data: 2\n\n", more=False)

    async with cluster(prefill=fails_late, decode=slow) as pair:
        response = await pair.client.post("/generate", json={})
        assert response.status_code == 200
        assert response.content == b"data: 1\n\ndata: 2\n\n"


async def test_a_prefill_node_that_closes_early_is_a_bad_gateway() -> None:
    async with cluster(prefill=cuts_off, decode=never) as pair:
        response = await pair.client.post("/generate", json={})
        assert response.status_code == 502
        assert pair.prefill[0].url in error_of(response)


async def test_a_decode_error_reaches_the_client_and_closes_the_prefill_leg() -> None:
    error = b'{"error": {"message": "max_tokens: -1", "type": "invalid_request_error", "code": null}}'
    async with cluster(prefill=never, decode=says(error, 400)) as pair:
        response = await pair.client.post("/v1/chat/completions", json={"messages": []})
        assert (response.status_code, response.content) == (400, error)
        await asyncio.wait_for(pair.prefill[0].client_left.wait(), WAIT_SECS)


async def test_a_node_error_that_is_not_json_becomes_json() -> None:
    async with cluster(decode=says(b"Internal Server Error", 500, "text/plain")) as pair:
        response = await pair.client.post("/generate", json={})
        assert response.status_code == 500
        assert "Internal Server Error" in error_of(response)


async def test_a_stream_that_the_decode_node_breaks_off_ends_in_an_error_event() -> None:
    async with cluster(decode=breaks_off) as pair:
        response = await pair.client.post("/generate", json={"stream": True})
        first, last, rest = response.content.split(b"\n\n")
        assert (first, rest) == (b"data: 1", b"")
        assert pair.decode[0].url in json.loads(last.removeprefix(b"data: "))["error"]["message"]
        assert "router_truncated_answers_total 1.0" in await pair.metrics()


@pytest.mark.I7
async def test_a_silent_node_is_a_gateway_timeout() -> None:
    async with cluster(decode=never, request_timeout_secs=1) as pair:
        response = await pair.client.post("/generate", json={})
        assert response.status_code == 504
        assert pair.decode[0].url in error_of(response)
        assert "within 1 s" in error_of(response)


# --- faults of this machine --------------------------------------------------------------------------


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize(
    ("number", "named"),
    [
        (errno.EMFILE, "ulimit"),
        (errno.ENFILE, "fs.file-max"),
        (errno.EADDRNOTAVAIL, "ip_local_port_range"),
        (errno.ENOBUFS, "memory"),
        (errno.ENOMEM, "memory"),
    ],
    ids=errno.errorcode.get,
)
async def test_what_this_machine_lacks_is_no_nodes_fault(
    number: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster([delivers] * 2, decode=says(b"{}"), health_interval_secs=0.05) as pair:
        nodes = {httpx.URL(node.url).port for node in (*pair.prefill, *pair.decode)}
        connect, num_tries = asyncio.BaseEventLoop.create_connection, 0

        async def fails(loop: Any, factory: Any, host: Any = None, port: Any = None, **given: Any) -> Any:
            nonlocal num_tries
            if port in nodes:
                num_tries += 1
                raise OSError(number, "as the system says")
            return await connect(loop, factory, host, port, **given)

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.BaseEventLoop, "create_connection", fails)
            response = await pair.client.post("/generate", json={"text": "a"})
            assert response.status_code == 503
            assert named in error_of(response)
            await until(lambda: num_tries >= 10)
            assert (await pair.client.get("/health")).status_code == 200
        assert "router_retries_total 0.0" in await pair.metrics()
        assert (await pair.client.post("/generate", json={"text": "a"})).status_code == 200


# --- failover ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_an_unreachable_node_is_replaced_once_under_a_new_room(kind: str) -> None:
    async with cluster([delivers] * 2, [says(b"{}")] * 2) as pair:
        broken, spare = getattr(pair, kind)
        await broken.close()
        response = await pair.client.post("/generate", json={"text": "a"})
        assert response.status_code == 200
        assert len(spare.requests) == 1
        others = pair.decode if kind == "prefill" else pair.prefill
        rooms = [json.loads(body)["bootstrap_room"] for node in others for _, _, body in node.requests]
        assert spare.body()["bootstrap_room"] in rooms
        assert len(set(rooms)) == len(rooms)
        metrics = await pair.metrics()
        assert "router_retries_total 1.0" in metrics
        assert f'router_node_healthy{{kind="{kind}",node="{broken.url}"}} 0.0' in metrics
        await pair.client.post("/generate", json={"text": "a"})
        assert "router_retries_total 1.0" in await pair.metrics()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_without_a_spare_node_the_error_names_the_node(kind: str) -> None:
    async with cluster(decode=says(b"{}")) as pair:
        (broken,) = getattr(pair, kind)
        await broken.close()
        first = await pair.client.post("/generate", json={})
        assert first.status_code == 502
        assert broken.url in error_of(first)
        second = await pair.client.post("/generate", json={})
        assert second.status_code == 503
        assert broken.url in error_of(second)
        assert (await pair.client.get("/health")).status_code == 503


async def test_a_request_that_reached_a_node_is_not_sent_twice() -> None:
    async def dies(node: FakeNode, send: Send) -> None:
        await start(send, content_type="application/json", content_length="9")
        raise CutConnection

    async with cluster(decode=[dies, says(b"{}")]) as pair:
        response = await pair.client.post("/generate", json={})
        assert response.status_code == 502
        assert not pair.decode[1].requests


BROKEN_TRANSFER = b'{"error": {"message": "the write failed", "type": "server_error", "code": null}}'


@pytest.mark.I7
@pytest.mark.parametrize(
    "fails",
    [cuts_off, says(BROKEN_TRANSFER, 502), says(b"shutting down", 503), says(b"full", 429)],
    ids=["died", "502", "503", "429"],
)
async def test_a_request_goes_on_with_another_prefill_node(fails: Behaviour) -> None:
    async with cluster(prefill=[fails, delivers], decode=at_first(never, says(b"{}"))) as pair:
        broken, spare = pair.prefill
        (decode,) = pair.decode
        response = await pair.client.post("/generate", json={"text": "a"})
        assert (response.status_code, response.content) == (200, b"{}")
        assert response.headers["x-hisparse-pd-prefill"] == spare.url
        assert (len(broken.requests), len(spare.requests)) == (1, 1)
        assert spare.body() == decode.body()
        assert decode.body(0)["bootstrap_room"] == broken.body()["bootstrap_room"]
        assert decode.body(0)["bootstrap_room"] != decode.body(1)["bootstrap_room"]
        await asyncio.wait_for(decode.client_left.wait(), WAIT_SECS)
        metrics = await pair.metrics()
        assert "router_prefill_retries_total 1.0" in metrics
        assert "router_retries_total 1.0" in metrics
        assert f'router_node_healthy{{kind="prefill",node="{broken.url}"}} 1.0' in metrics, "blacklisted"


async def test_a_write_that_failed_is_tried_again_where_there_is_no_other_prefill_node() -> None:
    fails_once = at_first(says(BROKEN_TRANSFER, 502), delivers)
    async with cluster(prefill=fails_once, decode=at_first(never, says(b"{}"))) as pair:
        response = await pair.client.post("/generate", json={"text": "a"})
        assert (response.status_code, response.content) == (200, b"{}")
        assert len(pair.prefill[0].requests) == 2


async def test_a_decode_node_that_lost_the_prefill_node_gets_another_one() -> None:
    lost_at_first = at_first(says(BROKEN_TRANSFER, 502), says(b"{}"))
    async with cluster(prefill=[never, delivers], decode=lost_at_first) as pair:
        response = await pair.client.post("/generate", json={"text": "a"})
        assert response.status_code == 200
        assert pair.prefill[0].body()["bootstrap_room"] != pair.prefill[1].body()["bootstrap_room"]
        await asyncio.wait_for(pair.prefill[0].client_left.wait(), WAIT_SECS)


def about(code: str, status: int = 503) -> Behaviour:
    return says(json.dumps({"error": {"message": "no contact", "type": "x", "code": code}}).encode(), status)


async def test_a_decode_node_that_cannot_contact_the_prefill_node_is_not_to_blame() -> None:
    no_contact_at_first = at_first(about(PREFILL_NODE_FAILED), says(b"{}"))
    async with cluster(prefill=[never, delivers], decode=no_contact_at_first) as pair:
        response = await pair.client.post("/generate", json={"text": "a"})
        assert (response.status_code, response.content) == (200, b"{}")
        assert response.headers["x-hisparse-pd-prefill"] == pair.prefill[1].url
        assert "router_prefill_retries_total 1.0" in await pair.metrics()


@pytest.mark.parametrize("says_why", [True, False])
async def test_a_prefill_node_whose_decode_node_gave_up_is_not_to_blame(
    says_why: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode node's own answer counts, if it comes; the prefill node's word of it may be faster."""
    monkeypatch.setattr("router.relay.DECODE_SAYS_WHY_SECS", WAIT_SECS if says_why else 0.0)

    async def gives_up(node: FakeNode, send: Send) -> None:
        await node.release.wait()
        await about("unavailable")(node, send)

    async def hears_of_it(node: FakeNode, send: Send) -> None:
        await about(DECODE_NODE_FAILED)(node, send)
        if says_why:
            pair.decode[0].release.set()

    async with cluster(prefill=at_first(hears_of_it, delivers), decode=[gives_up, says(b"{}")]) as pair:
        response = await pair.client.post("/generate", json={"text": "a"})
        assert (response.status_code, response.content) == (200, b"{}")
        assert response.headers["x-hisparse-pd-decode"] == pair.decode[1].url
        assert "router_prefill_retries_total 0.0" in await pair.metrics()


@pytest.mark.parametrize("status", [503, 429])
async def test_a_decode_node_that_is_not_ready_or_full_is_passed_over(status: int) -> None:
    async with cluster(delivers, [says(b"not now", status), says(b"{}")]) as pair:
        response = await pair.client.post("/generate", json={"text": "a"})
        assert (response.status_code, response.content) == (200, b"{}")
        assert response.headers["x-hisparse-pd-decode"] == pair.decode[1].url
        rooms = [body["bootstrap_room"] for body in (pair.decode[0].body(), pair.decode[1].body())]
        assert rooms[0] != rooms[1]
        metrics = await pair.metrics()
        assert "router_retries_total 1.0" in metrics
        assert "router_prefill_retries_total 0.0" in metrics


async def test_without_another_decode_node_the_one_that_is_not_ready_says_so() -> None:
    async with cluster(never, says(BROKEN_TRANSFER, 503)) as pair:
        response = await pair.client.post("/generate", json={})
        assert (response.status_code, response.content) == (503, BROKEN_TRANSFER)


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize(("max_retries", "num_asked"), [(0, 1), (1, 2), (2, 3)])
async def test_retries_are_bounded(max_retries: int, num_asked: int) -> None:
    async with cluster([says(BROKEN_TRANSFER, 502)] * 4, never, max_retries=max_retries) as pair:
        response = await pair.client.post("/generate", json={})
        assert (response.status_code, response.content) == (502, BROKEN_TRANSFER)
        assert [len(node.requests) for node in pair.prefill] == [1] * num_asked + [0] * (4 - num_asked)


@pytest.mark.I7
@pytest.mark.parametrize(("prefill", "decode"), [(429, None), (None, 429)], ids=["prefill", "decode"])
async def test_where_all_queues_are_full_the_client_hears_it(prefill: int | None, decode: int | None) -> None:
    full = json.dumps({"error": {"message": "64 requests wait"}}).encode()
    behaviours = [never if status is None else says(full, status) for status in (prefill, decode)]
    async with cluster(*([behaviour] * 2 for behaviour in behaviours)) as pair:
        response = await pair.client.post("/generate", json={"text": "a"})
        assert (response.status_code, response.content) == (429, full)
        assert response.headers["retry-after"] == "5"
        for nodes, status in ((pair.prefill, prefill), (pair.decode, decode)):
            if status is not None:
                assert [len(node.requests) for node in nodes] == [1, 1], "both were asked"
        metrics = await pair.metrics()
        assert " 0.0" not in [line[-4:] for line in metrics.splitlines() if "router_node_healthy{" in line]


@pytest.mark.parametrize("status", [400, 500, 504])
async def test_what_another_prefill_node_would_do_again_is_not_retried(status: int) -> None:
    async with cluster([says(b"{}", status), delivers], never) as pair:
        assert (await pair.client.post("/generate", json={})).status_code == status
        assert not pair.prefill[1].requests


async def test_a_retry_needs_another_healthy_prefill_node() -> None:
    async with cluster([cuts_off, delivers], never, health_interval_secs=0.05) as pair:
        pair.prefill[1].healthy = False
        line = f'router_node_healthy{{kind="prefill",node="{pair.prefill[1].url}"}} 0.0'
        await eventually(functools.partial(_counts, pair, line))
        response = await pair.client.post("/generate", json={})
        assert response.status_code == 502
        assert pair.prefill[0].url in error_of(response)
        assert not pair.prefill[1].requests


@pytest.mark.I7
async def test_nothing_is_retried_once_the_client_has_a_byte() -> None:
    async def breaks_off(node: FakeNode, send: Send) -> None:
        await start(send)
        await write(send, b"data: 1\n\n")
        pair.prefill[0].release.set()
        await node.release.wait()
        raise CutConnection

    async def dies(node: FakeNode, send: Send) -> None:
        await node.release.wait()
        pair.decode[0].release.set()
        raise CutConnection

    async with cluster(prefill=[dies, delivers], decode=breaks_off) as pair:
        response = await pair.client.post("/generate", json={"stream": True})
        assert response.status_code == 200
        assert response.content.startswith(b"data: 1\n\ndata: ")
        assert not pair.prefill[1].requests
        assert "router_retries_total 0.0" in await pair.metrics()


async def test_nodes_that_come_back_are_used_again() -> None:
    async with cluster(decode=says(b"{}"), health_interval_secs=0.05) as pair:
        pair.decode[0].healthy = False
        await eventually(lambda: _status_is(pair.client, "/health", 503))
        assert (await pair.client.post("/generate", json={})).status_code == 503
        pair.decode[0].healthy = True
        await eventually(lambda: _status_is(pair.client, "/readiness", 200))
        assert (await pair.client.post("/generate", json={})).status_code == 200


async def test_a_router_says_that_its_nodes_are_loading() -> None:
    async with cluster(decode=says(b"{}"), health_interval_secs=0.05) as pair:
        node = pair.decode[0]
        node.trouble = b'{"status": "loading", "reason": "the engine is loading: weights, 1 of 9 GB"}'
        node.healthy = False
        await eventually(lambda: _status_is(pair.client, "/health", 503))
        body = (await pair.client.get("/health")).json()
        assert body["status"] == "loading"
        (said,) = [entry for entry in body["nodes"] if entry["url"] == node.url]
        assert said["trouble"] == "it loads its model"
        node.trouble = b'{"status": "unavailable"}'
        while (await pair.client.get("/health")).json()["status"] != "unavailable":
            await asyncio.sleep(0.01)


async def _status_is(client: httpx.AsyncClient, path: str, status: int) -> bool:
    return (await client.get(path)).status_code == status


# --- clients that leave ------------------------------------------------------------------------------


@pytest.mark.I8
async def test_a_client_that_leaves_before_the_answer_closes_both_legs() -> None:
    async with cluster(prefill=never, decode=never) as pair:
        nodes = (*pair.prefill, *pair.decode)
        asking = asyncio.create_task(pair.client.post("/generate", json={}))
        await until(lambda: all(node.requests for node in nodes))
        asking.cancel()
        for node in nodes:
            await asyncio.wait_for(node.client_left.wait(), WAIT_SECS)
        await eventually(
            lambda: _counts(pair, 'router_requests_total{endpoint="/generate",status="499"} 1.0')
        )


@pytest.mark.I8
async def test_a_client_that_leaves_the_stream_closes_both_legs() -> None:
    async def endless(node: FakeNode, send: Send) -> None:
        await start(send)
        while True:
            await write(send, b"data: 1\n\n")
            await asyncio.sleep(0.01)

    async with cluster(prefill=never, decode=endless) as pair:
        async with pair.client.stream("POST", "/generate", json={}) as response:
            await anext(response.aiter_raw())
        for node in (*pair.prefill, *pair.decode):
            await asyncio.wait_for(node.client_left.wait(), WAIT_SECS)
            kind = "prefill" if node in pair.prefill else "decode"
            line = f'router_inflight_requests{{kind="{kind}",node="{node.url}"}} 0.0'
            await eventually(functools.partial(_counts, pair, line))


async def _counts(pair: Cluster, line: str) -> bool:
    return line in await pair.metrics()


# --- what never reaches a node -----------------------------------------------------------------------


@pytest.mark.I7
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"text"', b"null", b'{"a": NaN}', b'{"a": "\xff"}', b"[" * 100_000]
)
async def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    async with cluster() as pair:
        response = await pair.client.post("/v1/completions", content=body)
        assert response.status_code == 400
        assert "body" in error_of(response)
        assert not pair.prefill[0].requests
        assert not pair.decode[0].requests


@pytest.mark.I8
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused(chunked: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield b" " * (MAX_BODY_BYTES // 2 + 1)

    async with cluster() as pair:
        content = chunks() if chunked else b" " * (MAX_BODY_BYTES + 1)
        response = await pair.client.post("/generate", content=content)
        assert response.status_code == 413
        assert f"{MAX_BODY_BYTES} bytes" in error_of(response)
        assert not pair.decode[0].requests


async def test_unknown_paths_and_methods_answer_json_errors() -> None:
    async with cluster() as pair:
        assert "/v1/nothing" in error_of(await pair.client.get("/v1/nothing"))
        wrong_method = await pair.client.get("/v1/completions")
        assert wrong_method.status_code == 405
        assert error_of(wrong_method)
        for answer in (
            await pair.client.get("/" + "x" * 60_000),
            await pair.client.request("X" * 60_000, "/v1/completions"),
        ):
            assert len(error_of(answer)) < 300


async def test_half_of_a_surrogate_pair_is_named() -> None:
    async with cluster(decode=says(b"{}")) as pair:
        for body in (b'{"prompt": "\\ud83d"}', b'{"prompt": "\\ude00"}'):
            assert "surrogate pair" in error_of(await pair.client.post("/v1/completions", content=body))


async def test_a_compressed_body_is_refused_and_named() -> None:
    async with cluster(decode=says(b"{}")) as pair:
        for encoding in ("gzip", "zstd, br"):
            headers = {"content-encoding": encoding}
            answer = await pair.client.post("/v1/completions", content=b"\x1f\x8b", headers=headers)
            assert answer.status_code == 415
            assert f'Content-Encoding: "{encoding}" is not taken' in error_of(answer)
        plain = await pair.client.post("/v1/completions", json={}, headers={"content-encoding": "Identity"})
        assert plain.status_code == 200


# --- choice of nodes, models, metrics ----------------------------------------------------------------


async def test_round_robin_takes_turns() -> None:
    async with cluster([delivers] * 2, [says(b"{}")] * 3) as pair:
        for _ in range(6):
            await pair.client.post("/generate", json={})
        assert [len(node.requests) for node in pair.prefill] == [3, 3]
        assert [len(node.requests) for node in pair.decode] == [2, 2, 2]


async def test_least_loaded_looks_at_own_requests_and_at_what_nodes_tell() -> None:
    async with cluster(
        [delivers] * 2, [says(b"{}")] * 2, policy="least_loaded", health_interval_secs=0.05
    ) as pair:
        node = pair.decode[0]
        node.loads = [3]
        node.asked.clear()
        await until(lambda: len(node.asked) > 4)  # /health and /get_load, twice
        for _ in range(4):
            await pair.client.post("/generate", json={})
        assert [len(node.requests) for node in pair.decode] == [0, 4]


async def test_cache_aware_keeps_a_conversation_at_its_nodes() -> None:
    """Each turn has the ones before it; two conversations share a system prompt of less than a block."""
    async with cluster([delivers] * 2, [says(b"{}")] * 2, policy="cache_aware") as pair:
        talks = [[{"role": "system", "content": "Be kind."}] for _ in range(2)]
        for turn in range(4):
            for number, talk in enumerate(talks):
                talk.append({"role": "user", "content": f"{number} asks {turn}: " + "please " * 100})
                body = {"messages": talk, "model": "tiny"}
                answer = await pair.client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200
        for nodes in (pair.prefill, pair.decode):
            heard = [
                {json.loads(body)["messages"][1]["content"] for _, _, body in node.requests} for node in nodes
            ]
            assert [len(first_questions) for first_questions in heard] == [1, 1]
            assert [len(node.requests) for node in nodes] == [4, 4]


async def test_cache_aware_keeps_prompts_with_different_isolation_keys_apart() -> None:
    """A prompt with a key is nothing that the node of those without is known to have."""
    async with cluster([delivers] * 2, [says(b"{}")] * 2, policy="cache_aware") as pair:
        said: list[dict[str, object]] = [{}, {"cache_salt": "a"}, {"extra_key": None}, {"cache_salt": "a"}]
        for fields in said:
            body = {"prompt": "the same beginning " * 100, "model": "tiny", **fields}
            assert (await pair.client.post("/v1/completions", json=body)).status_code == 200
        for nodes in (pair.prefill, pair.decode):
            salts = [[json.loads(body).get("cache_salt") for _, _, body in node.requests] for node in nodes]
            assert sorted(salts, key=str) == [["a", "a"], [None, None]]


def _pool(policy: Any, num_decode: int, num_prefill: int = 1) -> NodePool:
    prefill = [Node.from_url(NodeKind.PREFILL, f"http://p:{i}") for i in range(1, num_prefill + 1)]
    decode = [Node.from_url(NodeKind.DECODE, f"http://d:{i}") for i in range(1, num_decode + 1)]
    pool = NodePool(prefill, decode, policy)
    for node in pool.nodes:
        pool.mark_healthy(node)
    return pool


def test_least_loaded_counts_requests_in_flight_once() -> None:
    pool = _pool("least_loaded", 2)
    first = pool.pick().decode
    with pool.working(first, 0):
        pool.report_load(first, [1])  # the node's own count includes ours
        assert first.ranks[0].num_foreign == 0
        assert pool.pick().decode is not first
    assert first.num_in_flight == 0


def test_an_unhealthy_node_does_not_disturb_the_turns_of_the_others() -> None:
    pool = _pool("round_robin", 3)
    pool.mark_unhealthy(pool.nodes[2], "gone")
    assert [pool.pick().decode.url for _ in range(4)] == ["http://d:1", "http://d:3"] * 2


def test_a_field_that_is_null_is_no_prompt() -> None:
    body = RequestBody.parse(b'{"text": null, "input_ids": [1, 2, 3]}', Endpoint.GENERATE)
    assert bytes(body.prompt) == b"[1, 2, 3]"
    assert bytes(RequestBody.parse(b'{"model": "tiny"}', Endpoint.COMPLETIONS).prompt) == b""


PROMPT = bytes(range(256)) * 8


@pytest.mark.parametrize("kind", list(NodeKind))
def test_a_busy_node_gives_up_what_it_has_cached(kind: NodeKind) -> None:
    pool = _pool("cache_aware", 3, num_prefill=3)
    first = getattr(pool.pick(prompt=PROMPT), kind)
    with ExitStack() as stack:
        for _ in range(5):
            assert getattr(pool.pick(prompt=PROMPT), kind) is first
            stack.enter_context(pool.working(first, 0))
        # 5 are 2.5 more than 1.25 times the mean of 6 on 3 nodes
        other = getattr(pool.pick(prompt=PROMPT), kind)
        assert other is not first
    assert getattr(pool.pick(prompt=PROMPT), kind) is other


@pytest.mark.parametrize("kind", list(NodeKind))
def test_what_no_node_has_goes_by_load(kind: NodeKind) -> None:
    pool = _pool("cache_aware", 2, num_prefill=2)
    first = getattr(pool.pick(prompt=PROMPT), kind)
    with pool.working(first, 0):
        assert getattr(pool.pick(prompt=PROMPT[::-1]), kind) is not first
        assert getattr(pool.pick(prompt=b"short"), kind) is not first
        assert getattr(pool.pick(), kind) is not first


@pytest.mark.parametrize("kind", list(NodeKind))
def test_a_node_that_failed_is_not_preferred(kind: NodeKind) -> None:
    pool = _pool("cache_aware", 2, num_prefill=2)
    first = getattr(pool.pick(prompt=PROMPT), kind)
    assert getattr(pool.pick(excluded={first}, prompt=PROMPT), kind) is not first
    second = getattr(pool.pick(prompt=PROMPT), kind)
    assert second is not first, "it was tried there last"
    pool.mark_unhealthy(second, "gone")
    assert getattr(pool.pick(prompt=PROMPT), kind) is first


@pytest.mark.parametrize("kind", list(NodeKind))
def test_a_node_that_was_gone_has_nothing_cached(kind: NodeKind) -> None:
    pool = _pool("cache_aware", 2, num_prefill=2)
    first = getattr(pool.pick(prompt=PROMPT), kind)
    pool.mark_unhealthy(first, "gone")
    pool.mark_healthy(first)
    with pool.working(first, 0):
        assert getattr(pool.pick(prompt=PROMPT), kind) is not first


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:1", "ftp://a:1", "http://", "http://a:1/v1", "http://a:x", "http://a:1?q"),
        *("http://user:secret@a:1", "http://a b:1"),
    ],
)
def test_a_bad_node_url_is_named(url: str) -> None:
    with pytest.raises(StartError, match="decode node"):
        Node.from_url(NodeKind.DECODE, url)


async def test_models_of_all_decode_nodes_are_listed_once() -> None:
    async with cluster(decode=[streams, streams]) as pair:
        pair.decode[1].models = ("tiny", "other")
        listing = (await pair.client.get("/v1/models")).json()
        assert listing["object"] == "list"
        assert [model["id"] for model in listing["data"]] == ["tiny", "other"]


async def test_a_model_can_be_asked_for_by_name() -> None:
    async with cluster(decode=[streams, streams]) as pair:
        pair.decode[1].models = ("tiny", "group/other")
        listing = (await pair.client.get("/v1/models")).json()
        for name in ("tiny", "group/other"):
            answer = await pair.client.get(f"/v1/models/{name}")
            assert answer.json() in listing["data"]
            assert answer.json()["id"] == name
        missing = await pair.client.get("/v1/models/third")
        assert missing.status_code == 404
        assert (
            "'third' does not exist here; served are 'tiny', 'group/other'"
            in missing.json()["error"]["message"]
        )


async def test_anthropics_client_gets_its_own_listing_of_models() -> None:
    async with cluster(decode=[streams, streams]) as pair:
        pair.decode[1].models = ("tiny", "other")
        headers = {"anthropic-version": "2023-06-01"}
        listing = (await pair.client.get("/v1/models", headers=headers)).json()
        assert [(model["type"], model["id"]) for model in listing["data"]] == [
            ("model", "tiny"),
            ("model", "other"),
        ]
        assert (listing["first_id"], listing["last_id"], listing["has_more"]) == ("tiny", "other", False)
        assert (await pair.client.get("/v1/models/other", headers=headers)).json() == listing["data"][1]
        missing = await pair.client.get("/v1/models/third", headers=headers)
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.I7
async def test_errors_on_anthropics_paths_have_its_shape() -> None:
    """The router's own, and a node's in another shape; of a node that breaks off, in an event with a name."""

    body = {"max_tokens": 1, "messages": [], "system": "S"}
    async with cluster(decode=[breaks_off]) as pair:
        answer = await pair.client.post("/v1/messages", content=b"[]")
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        stream = (await pair.client.post("/v1/messages", json=body)).text
        name, data = stream.split("\n\n")[-2].split("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
    openais = b'{"error": {"message": "no", "type": "x", "code": "y"}}'
    anthropics = b'{"type": "error", "error": {"message": "no", "type": "overloaded_error", "code": "c"}}'
    for said in (openais, anthropics):
        async with cluster(decode=says(said, 503), max_retries=0) as pair:
            answer = await pair.client.post("/v1/messages", json=body)
            assert answer.status_code == 503
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == "overloaded_error"
            assert (answer.content == said) is (said is anthropics)


async def test_prompts_are_told_apart_by_all_that_is_in_them() -> None:
    body = RequestBody.parse(b'{"messages": [1], "system": "S", "tools": []}', Endpoint.MESSAGES)
    assert bytes(body.prompt) == b'"S"[1]'
    assert body.num_prompts is None


@pytest.mark.parametrize("path", TokenPath)
async def test_what_needs_no_pair_goes_to_one_node_that_serves(path: str) -> None:
    content = b'{"prompt": "a",  "x": 1.10}'
    loading = says(b'{"error": {"message": "loading"}}', 503)
    async with cluster(prefill=loading, decode=[loading, says(b'{"count": 1}')], max_retries=2) as pair:
        await pair.prefill[0].close()
        answer = await pair.client.post(path, content=content)
        assert answer.json() == {"count": 1}
        assert answer.headers["x-hisparse-pd-decode"] == pair.decode[1].url
        assert [node.requests[0][0] for node in pair.decode] == [path, path]
        assert pair.decode[1].requests[0][2] == content
        assert f'hisparse_pd:router_requests_total{{endpoint="{path}",status="200"}}' in await pair.metrics()
        assert f'token_seconds_count{{endpoint="{path}"}}' not in await pair.metrics()


@pytest.mark.I7
async def test_a_node_that_refuses_what_needs_no_pair_has_the_word() -> None:
    refusal = b'{"error": {"message": "prompt: no", "type": "x", "code": "y"}}'
    async with cluster(prefill=says(refusal, 400), decode=says(refusal, 400)) as pair:
        answer = await pair.client.post("/tokenize", json={})
        assert (answer.status_code, answer.content) == (400, refusal)
        assert len(pair.prefill[0].requests + pair.decode[0].requests) == 1
        for node in (*pair.prefill, *pair.decode):
            await node.close()
        answer = await pair.client.post("/tokenize", json={})
        assert answer.status_code == 502
        assert "cannot be reached" in error_of(answer)
        answer = await pair.client.post("/tokenize", json={})
        assert answer.status_code == 503
        assert "no healthy node" in error_of(answer)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_every_node_says_what_it_is(path: str) -> None:
    async with cluster(decode=[streams, streams]) as pair:
        await pair.decode[1].close()
        told = (await pair.client.get(path)).json()
        assert set(told) == {"version", "prefill", "decode"}
        assert told["version"] == VERSION
        for node, entry in ((pair.prefill[0], told["prefill"][0]), (pair.decode[0], told["decode"][0])):
            assert entry == {"url": node.url, "asked": "/server_info", "port": httpx.URL(node.url).port}
        assert told["decode"][1]["url"] == pair.decode[1].url
        assert "/server_info: " in told["decode"][1]["trouble"]
        assert len(told["decode"]) == 2


async def test_any_node_tells_of_the_tokenizer() -> None:
    async with cluster() as pair:
        for node in (*pair.prefill, *pair.decode):
            told = (await pair.client.get("/tokenizer_info")).json()
            assert told == {"asked": "/tokenizer_info", "port": httpx.URL(node.url).port}
            await node.close()
        answer = await pair.client.get("/tokenizer_info")
        assert answer.status_code == 503
        assert "no node answered" in error_of(answer)


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_a_healthy_decode_node_says_what_the_model_is(path: str) -> None:
    async with cluster(decode=[streams, streams]) as pair:
        await pair.decode[0].close()
        port = httpx.URL(pair.decode[1].url).port
        assert (await pair.client.get(path)).json() == {"asked": "/model_info", "port": port}
        await pair.decode[1].close()
        answer = await pair.client.get(path)
        assert answer.status_code == 503
        assert "no node answered" in error_of(answer)


async def test_the_router_tells_its_version() -> None:
    async with cluster() as pair:
        assert (await pair.client.get("/version")).json() == {"version": VERSION}
        assert set((await pair.client.get("/openapi.json")).json()["paths"]) == set(RELAYED)


async def test_metrics_count_requests_and_the_time_to_the_first_byte() -> None:
    async with cluster(decode=says(b"{}")) as pair:
        await pair.client.post("/generate", json={})
        await pair.client.post("/generate", content=b"no")
        metrics = await pair.metrics()
        assert 'hisparse_pd:router_requests_total{endpoint="/generate",status="200"} 1.0' in metrics
        assert 'hisparse_pd:router_requests_total{endpoint="/generate",status="400"} 1.0' in metrics
        assert 'hisparse_pd:router_time_to_first_token_seconds_count{endpoint="/generate"} 1.0' in metrics


def test_the_application_is_made_without_io() -> None:
    settings = RouterSettings(prefill=(("http://127.0.0.1:1", None),), decode=("http://127.0.0.1:2",))
    assert isinstance(create_app(settings), Starlette)


@pytest.mark.I7
@pytest.mark.parametrize(
    "said",
    [b"", b"\xff", b"[1]", b"[" * 100_000, b'{"a": "\xff"}', b'{"data": {}}', b'{"data": [1, {"id": [2]}]}'],
)
async def test_what_a_node_says_of_itself_may_be_anything(said: bytes) -> None:
    """It counts as nothing said; above all, the watch over the node goes on."""
    async with cluster(policy="least_loaded", health_interval_secs=0.05) as pair:
        (node,) = pair.decode
        node.says = said
        num_before = len(node.asked)
        await until(lambda: len(node.asked) >= num_before + 6)
        for path in ("/v1/models", "/server_info", "/model_info", "/tokenizer_info"):
            assert (await pair.client.get(path)).status_code in (200, 503)
        response = await pair.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.content == b"".join(EVENTS)


# --- keys ----------------------------------------------------------------------------------------------

CLIENT_KEY = "the-key-of-a-client"
NODE_KEY = "the-key-of-the-nodes"


def key_files(tmp_path: Path) -> tuple[Path, Path]:
    """The clients' keys and the nodes', of which the first is the router's."""
    clients, nodes = tmp_path / "clients", tmp_path / "nodes"
    clients.write_text(f"{CLIENT_KEY}\n")
    nodes.write_text(f"{NODE_KEY}\nthe-key-of-the-day-after\n")
    return clients, nodes


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_without_a_key_only_probes_and_metrics_are_answered(tmp_path: Path) -> None:
    clients, _ = key_files(tmp_path)
    async with cluster(decode=says(b"{}"), api_key_file=clients) as pair:
        for path in ("/health", "/readiness", "/liveness", "/metrics"):
            assert (await pair.client.get(path)).status_code == 200, path
        for path in (*Endpoint, "/nowhere"):
            for headers in ({}, bearer("another-key-of-someone")):
                response = await pair.client.post(path, json={"prompt": "a"}, headers=headers)
                assert response.status_code == 401
                assert "API key" in error_of(response)
        assert (await pair.client.get("/v1/models")).status_code == 401
        assert (await pair.client.get("/status")).status_code == 401
        assert pair.prefill[0].requests == pair.decode[0].requests == []
        num_asked = float(2 * len([*Endpoint, "/nowhere"]) + 2)
        assert f"hisparse_pd:router_unauthorized_requests_total {num_asked}" in await pair.metrics()


async def test_without_keys_of_its_own_the_router_passes_the_clients_on() -> None:
    async with cluster(decode=says(b"{}")) as pair:
        for headers in (bearer(CLIENT_KEY), {"x-api-key": CLIENT_KEY}):
            await pair.client.post("/v1/messages", json={}, headers=headers)
            for node in (*pair.prefill, *pair.decode):
                assert headers.items() <= dict(node.requests[-1][1]).items()


async def test_a_clients_key_opens_the_router_and_goes_no_further(tmp_path: Path) -> None:
    clients, _ = key_files(tmp_path)
    async with cluster(decode=says(b"{}"), api_key_file=clients) as pair:
        response = await pair.client.post("/v1/completions", json={"prompt": "a"}, headers=bearer(CLIENT_KEY))
        assert response.status_code == 200
        for node in (*pair.prefill, *pair.decode):
            assert "authorization" not in node.requests[0][1]
        await pair.client.post("/v1/messages", json={}, headers={"x-api-key": CLIENT_KEY})
        assert "x-api-key" not in pair.decode[0].requests[1][1]


@pytest.mark.parametrize("with_client_keys", [True, False])
async def test_nodes_get_the_routers_own_key_with_everything(tmp_path: Path, with_client_keys: bool) -> None:
    clients, nodes = key_files(tmp_path)
    settings: dict[str, Any] = {"node_api_key_file": nodes, "policy": "least_loaded"}
    if with_client_keys:
        settings["api_key_file"] = clients
    async with cluster(decode=says(b"{}"), **settings) as pair:
        headers = bearer(CLIENT_KEY)
        assert (await pair.client.post("/generate", json={"text": "a"}, headers=headers)).status_code == 200
        assert (await pair.client.get("/v1/models", headers=headers)).status_code == 200
        for node in (*pair.prefill, *pair.decode):
            assert node.requests[0][1]["authorization"] == f"Bearer {NODE_KEY}"
            assert {path for path, _ in node.asked} >= {"/health", "/get_load"}
            for path, asked_with in node.asked:
                assert asked_with == f"Bearer {NODE_KEY}", path
        nodes.write_text("the-key-of-the-day-after\n")
        await pair.client.post("/generate", json={"text": "a"}, headers=headers)
        assert pair.decode[0].requests[1][1]["authorization"] == "Bearer the-key-of-the-day-after"


async def test_pages_of_named_origins_may_call_it_and_others_may_not(tmp_path: Path) -> None:
    clients, _ = key_files(tmp_path)
    origin = "https://chat.example.com"
    settings: dict[str, Any] = {"cors_allow_origins": (origin,), "api_key_file": clients}
    async with cluster(decode=says(b"{}"), **settings) as pair:
        asks = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        for url, status in ((origin, 200), ("https://elsewhere.example.com", 400)):
            response = await pair.client.options("/v1/chat/completions", headers={"origin": url, **asks})
            assert response.status_code == status
            assert response.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
        headers = {"origin": origin, **bearer(CLIENT_KEY)}
        response = await pair.client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert response.headers["access-control-allow-origin"] == origin
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {"x-hisparse-pd-prefill", "x-request-id", "request-id", "server-timing"} <= set(exposed)
        assert "access-control-allow-credentials" not in response.headers
        refused = await pair.client.post("/v1/completions", json={"prompt": "a"}, headers={"origin": origin})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
    async with cluster(decode=says(b"{}")) as pair:
        response = await pair.client.options("/v1/chat/completions", headers={"origin": origin, **asks})
        assert "access-control-allow-origin" not in response.headers


async def test_pages_send_nothing_but_json_of_which_a_browser_asks_before() -> None:
    async with cluster(decode=says(b"{}")) as pair:
        kinds: list[dict[str, str]] = [
            {"content-type": kind} for kind in ("text/plain; application/json", "a/b")
        ]
        kinds += [{"content-type": "application/x-www-form-urlencoded"}, {}]
        for kind in kinds:
            post = functools.partial(pair.client.post, "/v1/completions", content=b'{"prompt": "a"}')
            for given in (
                {"origin": "http://elsewhere"},
                {"origin": "null"},
                {"sec-fetch-site": "cross-site"},
            ):
                refused = await post(headers=kind | given)
                assert (refused.status_code, refused.json()["error"]["code"]) == (
                    415,
                    "unsupported_media_type",
                )
            assert (await post(headers=kind)).status_code == 200  # a program's, such as curl -d
        of_json = {"content-type": "Application/JSON; charset=utf-8", "origin": "http://localhost:8000"}
        assert (await post(headers=of_json)).status_code == 200
        assert len(pair.decode[0].requests) == len(kinds) + 1


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a.example.com/", "ftp://a", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="cors_allow_origins"):
        RouterSettings(prefill=(("http://a:1", None),), decode=("http://b:1",), cors_allow_origins=(origin,))


@pytest.mark.parametrize("name", ["api_key_file", "node_api_key_file"])
def test_a_router_without_its_keys_does_not_start(tmp_path: Path, name: str) -> None:
    path = tmp_path / "keys"
    path.write_text("short\n")
    given: dict[str, Any] = {"prefill": (("http://a:1", None),), "decode": ("http://b:1",), name: path}
    with pytest.raises(KeyFileError, match="line 1"):
        create_app(RouterSettings(**given))
