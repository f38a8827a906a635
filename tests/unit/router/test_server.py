"""The router between real HTTP servers on loopback that answer as nodes do."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Send

from hisparse_pd.base.access import KeyFileError
from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.base.settings import MAX_BODY_BYTES
from hisparse_pd.base.vocabulary import VERSION
from hisparse_pd.router.server import RELAYED, create_app
from hisparse_pd.serving.api.bodies import Endpoint
from tests.unit.router.cluster import (
    EVENTS,
    OK,
    FakeNode,
    answer,
    breaks_off,
    cluster,
    error_of,
    never,
    says,
    start,
    streams,
    write,
)
from tests.waiting import WAIT_SECS, until

pytestmark = pytest.mark.anyio

# --- requests and answers ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", list(Endpoint))
async def test_the_decode_node_alone_gets_the_body_with_the_bootstrap_fields(path: str) -> None:
    async with cluster(decode=OK) as pair:
        await pair.client.post(path, json={"prompt": "a", "text": "a", "messages": [], "stream": False})
        (prefill,), (decode,) = pair.prefill, pair.decode
        assert (len(decode.requests), prefill.requests) == (1, [])
        assert decode.requests[0][0] == path
        body = decode.body()
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 7000)
        assert isinstance(body["bootstrap_room"], int)
        assert 0 <= body["bootstrap_room"] < 2**63
        assert body["stream"] is False


async def test_headers_that_matter_are_passed_and_no_others() -> None:
    """They are passed unchanged, even if they are no text."""
    names = (b"authorization", b"x-request-id", b"traceparent", b"tracestate", b"x-correlation-id")
    values = [
        b"a=b",
        b"caf\xe9",
        "ca\N{LATIN SMALL LETTER E WITH ACUTE}".encode(),
        b"\xff\xfe",
        b"a\x01b",
        b"",
    ]
    others = (b"origin", b"user-agent", b"cookie", b"x-other")
    async with cluster(decode=OK, cors_allow_origins=("https://chat.example.com",)) as pair:
        for value in values:
            given = [(name, value) for name in (*names, *others)]
            assert (await pair.client.post("/generate", json={}, headers=given)).status_code == 200
            passed = dict(pair.decode[0].requests[-1][1].raw)
            assert {name: passed[name] for name in names} == dict.fromkeys(names, value)
            assert not {*others} & {*passed}
            unknown = await pair.client.post("/nowhere", json={}, headers=given)
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


async def test_every_answer_names_its_request() -> None:
    async with cluster(decode=OK) as pair:
        named = await pair.client.post("/generate", json={}, headers={"x-request-id": "mine-7"})
        assert {named.headers[name] for name in ("x-request-id", "request-id")} == {"mine-7"}
        new = [
            (await pair.client.post("/generate", json={})).headers["x-request-id"],
            (await pair.client.post("/generate", content=b"[]")).headers[
                "x-request-id"
            ],  # a 400 of the router
            (await pair.client.get("/nowhere")).headers["x-request-id"],
            (await pair.client.get("/nowhere", headers={"x-request-id": "x" * 200})).headers["x-request-id"],
        ]
        assert len(set(new)) == 4
        assert all(re.fullmatch(r"req_[0-9a-f]{24}", name) for name in new)
        told = [request[1]["x-request-id"] for request in pair.decode[0].requests]
        assert told == ["mine-7", new[0]]


async def test_the_stream_is_the_decode_nodes() -> None:
    async with cluster() as pair:
        response = await pair.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        assert response.content == b"".join(EVENTS)


async def test_hop_by_hop_headers_stay_behind() -> None:
    async def with_headers(node: FakeNode, send: Send) -> None:
        named: dict[str, Any] = {"connection": "x-private", "x_private": "1", "x_kept": "1"}
        await answer(send, b"{}", **named, keep_alive="9", upgrade="h2c", content_length="2")

    async with cluster(decode=with_headers) as pair:
        headers = (await pair.client.post("/generate", json={})).headers
        assert headers["x-kept"] == "1"
        assert headers["content-length"] == "2"
        assert not {"x-private", "keep-alive", "upgrade"} & set(headers)
        assert len(headers.get_list("date")) == 1


async def _endless(node: FakeNode, send: Send) -> None:
    await start(send)
    while True:
        await write(send, b"data: 1\n\n")
        await asyncio.sleep(0.01)


def in_flight(node: FakeNode, kind: str, num: float) -> str:
    return f'router_inflight_requests{{kind="{kind}",node="{node.url}"}} {num}'


@pytest.mark.I8
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_leaves_closes_the_connection(has_begun: bool) -> None:
    """The client leaves before the answer, or within it."""
    async with cluster(decode=_endless if has_begun else never) as pair:
        (prefill,), (decode,) = pair.prefill, pair.decode
        if has_begun:
            async with pair.client.stream("POST", "/generate", json={}) as response:
                await anext(response.aiter_raw())
        else:
            asking = asyncio.create_task(pair.client.post("/generate", json={}))
            await until(lambda: decode.requests)
            asking.cancel()
        await asyncio.wait_for(decode.client_left.wait(), WAIT_SECS)
        await pair.until_counted(in_flight(prefill, "prefill", 0.0))
        await pair.until_counted(in_flight(decode, "decode", 0.0))
        await pair.until_counted('router_requests_total{endpoint="/generate",status="499"} 1.0')


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_node_works_on_a_request_until_the_answer_begins(stream: bool) -> None:
    """The head of a stream may be there long before its first event."""

    async def slowly(node: FakeNode, send: Send) -> None:
        await start(send)
        await node.release.wait()
        node.release.clear()
        await write(send, b"data: 1\n\n", more=stream)
        if stream:
            await node.release.wait()
            await write(send, b"data: 2\n\n", more=False)

    async with cluster(decode=slowly) as pair:
        (prefill,), (decode,) = pair.prefill, pair.decode
        asking = asyncio.create_task(pair.client.post("/generate", json={"stream": stream}))
        await until(lambda: decode.requests)
        at_prefill = await pair.metrics()
        assert in_flight(prefill, "prefill", 1.0) in at_prefill
        assert in_flight(decode, "decode", 1.0) in at_prefill
        decode.release.set()
        await pair.until_counted(in_flight(prefill, "prefill", 0.0))
        if stream:
            assert in_flight(decode, "decode", 1.0) in await pair.metrics()
            decode.release.set()
        assert (await asking).status_code == 200
        await pair.until_counted(in_flight(decode, "decode", 0.0))


# --- what never reaches a node -----------------------------------------------------------------------


async def test_what_cannot_be_relayed_is_answered_in_json() -> None:
    async with cluster() as pair:
        unknown = await pair.client.post("/v1/embeddings", json={})
        assert unknown.status_code == 404
        assert "/v1/embeddings: Not Found" in error_of(unknown)
        assert all(path in error_of(unknown) for path in RELAYED)
        wrong_method = await pair.client.get("/v1/completions")
        assert wrong_method.status_code == 405
        assert "/v1/completions" in error_of(wrong_method)
        for long in (
            await pair.client.get("/" + "x" * 60_000),
            await pair.client.get("/v1/models/" + "x" * 60_000),
            await pair.client.request("X" * 60_000, "/v1/completions"),
        ):
            assert len(error_of(long)) < 300
        no_json = await pair.client.post("/v1/completions", content=b"{")
        assert no_json.status_code == 400
        assert "body" in error_of(no_json)
        too_large = await pair.client.post("/generate", content=b" " * (MAX_BODY_BYTES + 1))
        assert too_large.status_code == 413
        assert f"{MAX_BODY_BYTES} bytes" in error_of(too_large)
        for encoding in ("gzip", "zstd, br"):
            headers = {"content-encoding": encoding}
            compressed = await pair.client.post("/v1/completions", content=b"\x1f\x8b", headers=headers)
            assert compressed.status_code == 415
            assert f'Content-Encoding: "{encoding}" is not taken' in error_of(compressed)
        assert [node.requests for node in pair.nodes] == [[], []]
        plain = await pair.client.post("/v1/completions", json={}, headers={"content-encoding": "Identity"})
        assert plain.status_code == 200


@pytest.mark.I7
async def test_errors_on_anthropics_paths_have_its_shape() -> None:
    """This holds for the router's own errors, for a node's in another shape, and for the event of a broken
    stream."""
    body = {"max_tokens": 1, "messages": [], "system": "S"}
    async with cluster(decode=breaks_off) as pair:
        refused = await pair.client.post("/v1/messages", content=b"[]")
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        stream = (await pair.client.post("/v1/messages", json=body)).text
        name, data = stream.split("\n\n")[-2].split("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
    openais = b'{"error": {"message": "no", "type": "x", "code": "y"}}'
    anthropics = b'{"type": "error", "error": {"message": "no", "type": "overloaded_error", "code": "c"}}'
    for said in (openais, anthropics):
        async with cluster(decode=says(said, 503), max_retries=0) as pair:
            refused = await pair.client.post("/v1/messages", json=body)
            assert refused.status_code == 503
            assert refused.json()["type"] == "error"
            assert refused.json()["error"]["type"] == "overloaded_error"
            assert (refused.content == said) is (said is anthropics)


# --- what nodes tell of themselves -------------------------------------------------------------------


async def test_models_of_all_decode_nodes_are_listed_once_and_can_be_asked_for_by_name() -> None:
    async with cluster(decode=[streams] * 2) as pair:
        pair.decode[1].models = ("tiny", "group/other")
        listing = (await pair.client.get("/v1/models")).json()
        assert listing["object"] == "list"
        assert [model["id"] for model in listing["data"]] == ["tiny", "group/other"]
        for model in listing["data"]:
            assert (await pair.client.get(f"/v1/models/{model['id']}")).json() == model
        missing = await pair.client.get("/v1/models/third")
        assert missing.status_code == 404
        assert "'third' does not exist here; served are 'tiny', 'group/other'" in error_of(missing)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_every_node_says_what_it_is(path: str) -> None:
    async with cluster(decode=[streams] * 2) as pair:
        await pair.decode[1].close()
        told = (await pair.client.get(path)).json()
        assert set(told) == {"version", "prefill", "decode"}
        assert told["version"] == VERSION
        for node, entry in ((pair.prefill[0], told["prefill"][0]), (pair.decode[0], told["decode"][0])):
            assert entry == {"url": node.url, "asked": "/server_info", "port": httpx.URL(node.url).port}
        assert told["decode"][1]["url"] == pair.decode[1].url
        assert "/server_info: " in told["decode"][1]["trouble"]
        assert len(told["decode"]) == 2


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/tokenizer_info", "/tokenizer_info"),
        ("/model_info", "/model_info"),
        ("/get_model_info", "/model_info"),
    ],
)
async def test_the_first_decode_node_that_is_healthy_tells_of_what_all_have(path: str, asked: str) -> None:
    async with cluster(decode=[streams] * 2) as pair:
        for node in pair.decode:
            told = (await pair.client.get(path)).json()
            assert told == {"asked": asked, "port": httpx.URL(node.url).port}
            await node.close()
        nobody = await pair.client.get(path)
        assert nobody.status_code == 503
        assert "no decode node answered" in error_of(nobody)


@pytest.mark.I7
@pytest.mark.parametrize(
    "said",
    [b"", b"\xff", b"[1]", b"[" * 100_000, b'{"a": "\xff"}', b'{"data": {}}', b'{"data": [1, {"id": [2]}]}'],
)
async def test_what_a_node_says_of_itself_may_be_anything(said: bytes) -> None:
    """It is ignored, and the health watch over the node goes on."""
    async with cluster(policy="least_loaded", health_interval_secs=0.05) as pair:
        (node,) = pair.decode
        node.says = said
        num_before = len(node.asked)
        await until(lambda: len(node.asked) >= num_before + 6)
        for path in ("/v1/models", "/server_info", "/model_info", "/tokenizer_info"):
            assert (await pair.client.get(path)).status_code in (200, 503)
        response = await pair.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.content == b"".join(EVENTS)


async def test_the_router_tells_of_itself() -> None:
    async with cluster(decode=OK) as pair:
        assert (await pair.client.get("/version")).json() == {"version": VERSION}
        assert set((await pair.client.get("/openapi.json")).json()["paths"]) == set(RELAYED)
        await pair.client.post("/generate", json={})
        await pair.client.post("/generate", content=b"no")
        metrics = await pair.metrics()
        assert 'hisparse_pd:router_requests_total{endpoint="/generate",status="200"} 1.0' in metrics
        assert 'hisparse_pd:router_requests_total{endpoint="/generate",status="400"} 1.0' in metrics
        assert 'hisparse_pd:router_time_to_first_token_seconds_count{endpoint="/generate"} 1.0' in metrics


# --- keys ----------------------------------------------------------------------------------------------

CLIENT_KEY = "the-key-of-a-client"
NODE_KEY = "the-key-of-the-nodes"


def key_files(tmp_path: Path) -> tuple[Path, Path]:
    """Write files with the clients' keys and with the nodes' keys, whose first one the router sends."""
    clients, nodes = tmp_path / "clients", tmp_path / "nodes"
    clients.write_text(f"{CLIENT_KEY}\n")
    nodes.write_text(f"{NODE_KEY}\nthe-key-of-the-day-after\n")
    return clients, nodes


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_without_a_key_only_probes_and_metrics_are_answered(tmp_path: Path) -> None:
    clients, _ = key_files(tmp_path)
    async with cluster(decode=OK, api_key_file=clients) as pair:
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
    async with cluster(decode=OK) as pair:
        for headers in (bearer(CLIENT_KEY), {"x-api-key": CLIENT_KEY}):
            await pair.client.post("/v1/messages", json={}, headers=headers)
            assert headers.items() <= dict(pair.decode[0].requests[-1][1]).items()


async def test_a_clients_key_opens_the_router_and_goes_no_further(tmp_path: Path) -> None:
    clients, _ = key_files(tmp_path)
    async with cluster(decode=OK, api_key_file=clients) as pair:
        for path, headers in (
            ("/v1/completions", bearer(CLIENT_KEY)),
            ("/v1/messages", {"x-api-key": CLIENT_KEY}),
        ):
            assert (await pair.client.post(path, json={"prompt": "a"}, headers=headers)).status_code == 200
            assert not {"authorization", "x-api-key"} & set(pair.decode[0].requests[-1][1])


@pytest.mark.parametrize("with_client_keys", [True, False])
async def test_nodes_get_the_routers_own_key_with_everything(tmp_path: Path, with_client_keys: bool) -> None:
    clients, nodes = key_files(tmp_path)
    settings: dict[str, Any] = {"node_api_key_file": nodes, "policy": "least_loaded"}
    if with_client_keys:
        settings["api_key_file"] = clients
    async with cluster(decode=OK, **settings) as pair:
        headers = bearer(CLIENT_KEY)
        assert (await pair.client.post("/generate", json={"text": "a"}, headers=headers)).status_code == 200
        assert (await pair.client.get("/v1/models", headers=headers)).status_code == 200
        assert pair.decode[0].requests[0][1]["authorization"] == f"Bearer {NODE_KEY}"
        for node in pair.nodes:
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
    async with cluster(decode=OK, **settings) as pair:
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
    async with cluster(decode=OK) as pair:
        response = await pair.client.options("/v1/chat/completions", headers={"origin": origin, **asks})
        assert "access-control-allow-origin" not in response.headers


async def test_pages_send_nothing_but_json_of_which_a_browser_asks_before() -> None:
    async with cluster(decode=OK) as pair:
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
