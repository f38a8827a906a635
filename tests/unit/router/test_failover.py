"""Nodes that cannot be reached, fail, are full or not ready: who takes the request, what the client hears."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import Any

import httpx
import pytest
from starlette.types import Send

from hisparse_pd.base.vocabulary import DECODE_NODE_FAILED, PREFILL_NODE_FAILED
from hisparse_pd.router.local_faults import local_fault
from hisparse_pd.serving.api.bodies import TokenPath
from tests.unit.router.cluster import (
    OK,
    WAIT_SECS,
    Behaviour,
    CutConnection,
    FakeNode,
    at_first,
    cluster,
    cuts_off,
    delivers,
    error_of,
    never,
    says,
    start,
    write,
)
from tests.waiting import until

pytestmark = pytest.mark.anyio

BODY = {"text": "a"}
NOTHING = {"text": "a", "sampling_params": {"max_new_tokens": 0}}
"""A prefill node answers it alone."""
BROKEN_TRANSFER = b'{"error": {"message": "the write failed", "type": "server_error", "code": null}}'


# --- errors of nodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status"),
    [*(("prefill", status) for status in (400, 404, 500, 503, 504)), ("decode", 400), ("decode", 503)],
)
async def test_a_nodes_error_is_the_clients_and_ends_the_other_leg(kind: str, status: int) -> None:
    """Where no other node of its kind may do better."""
    error = json.dumps({"error": {"message": "prompt too long", "type": "x", "code": "y"}}).encode()
    async with cluster(**{"prefill": never, "decode": never, kind: says(error, status)}) as pair:
        response = await pair.client.post("/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.content) == (status, error)
        other = pair.nodes[kind == "prefill"]
        await asyncio.wait_for(other.client_left.wait(), WAIT_SECS)


async def test_a_prefill_error_counts_until_the_first_byte_of_the_answer() -> None:
    """One that is no JSON becomes some."""

    async def headers_only(node: FakeNode, send: Send) -> None:
        await start(send)
        await never(node, send)

    async with cluster(prefill=says(b"oh no", 500, "text/plain"), decode=headers_only) as pair:
        response = await pair.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == 500
        assert f"{pair.prefill[0].url} answered 500: oh no" in error_of(response)


@pytest.mark.I7
async def test_once_the_client_has_a_byte_the_decode_node_speaks_for_the_room() -> None:
    """A prefill node that fails then changes nothing, and a stream that breaks off ends in an error event."""

    async def breaks_off(node: FakeNode, send: Send) -> None:
        await start(send)
        await write(send, b"data: 1\n\n")
        pair.prefill[0].release.set()
        await node.release.wait()
        await write(send, b"data: 2\n\n")
        raise CutConnection

    async def dies(node: FakeNode, send: Send) -> None:
        await node.release.wait()
        pair.decode[0].release.set()
        raise CutConnection

    async with cluster(prefill=[dies, delivers], decode=[breaks_off, OK]) as pair:
        response = await pair.client.post("/generate", json={"stream": True})
        assert response.status_code == 200
        first, second, error, rest = response.content.split(b"\n\n")
        assert (first, second, rest) == (b"data: 1", b"data: 2", b"")
        assert pair.decode[0].url in json.loads(error.removeprefix(b"data: "))["error"]["message"]
        assert not pair.prefill[1].requests + pair.decode[1].requests
        metrics = await pair.metrics()
        assert "router_truncated_answers_total 1.0" in metrics
        assert "router_retries_total 0.0" in metrics


async def test_a_request_that_reached_a_decode_node_is_not_sent_twice() -> None:
    async def dies(node: FakeNode, send: Send) -> None:
        await start(send, content_type="application/json", content_length="9")
        raise CutConnection

    async with cluster(decode=[dies, OK]) as pair:
        assert (await pair.client.post("/generate", json={})).status_code == 502
        assert not pair.decode[1].requests


@pytest.mark.I7
async def test_a_silent_node_is_a_gateway_timeout() -> None:
    async with cluster(decode=never, request_timeout_secs=1) as pair:
        response = await pair.client.post("/generate", json={})
        assert response.status_code == 504
        assert f"{pair.decode[0].url} did not answer within 1 s" in error_of(response)


# --- nodes that cannot be reached --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_an_unreachable_node_is_replaced_once_under_a_new_room(kind: str) -> None:
    async with cluster([delivers] * 2, [OK] * 2) as pair:
        broken, spare = getattr(pair, kind)
        await broken.close()
        assert (await pair.client.post("/generate", json=BODY)).status_code == 200
        assert len(spare.requests) == 1
        others = pair.decode if kind == "prefill" else pair.prefill
        rooms = [json.loads(body)["bootstrap_room"] for node in others for _, _, body in node.requests]
        assert spare.body()["bootstrap_room"] in rooms
        assert len(set(rooms)) == len(rooms)
        metrics = await pair.metrics()
        assert "router_retries_total 1.0" in metrics
        assert f'router_node_healthy{{kind="{kind}",node="{broken.url}"}} 0.0' in metrics
        await pair.client.post("/generate", json=BODY)
        assert "router_retries_total 1.0" in await pair.metrics()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_without_a_spare_node_the_error_names_the_node(kind: str) -> None:
    async with cluster(decode=OK) as pair:
        (broken,) = getattr(pair, kind)
        await broken.close()
        for status in (502, 503):
            response = await pair.client.post("/generate", json={})
            assert response.status_code == status
            assert broken.url in error_of(response)
        assert (await pair.client.get("/health")).status_code == 503


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
        (errno.ECONNREFUSED, None),
    ],
    ids=errno.errorcode.get,
)
def test_what_this_machine_lacks_is_named(number: int, named: str | None) -> None:
    fault = local_fault(OSError(number, "as the system says"))
    assert fault is None if named is None else named in (fault or "")


@pytest.mark.I7
@pytest.mark.I8
async def test_what_this_machine_lacks_is_no_nodes_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster([delivers] * 2, OK, health_interval_secs=0.05) as pair:
        nodes = {httpx.URL(node.url).port for node in pair.nodes}
        connect, num_tries = asyncio.BaseEventLoop.create_connection, 0

        async def fails(loop: Any, factory: Any, host: Any = None, port: Any = None, **given: Any) -> Any:
            nonlocal num_tries
            if port in nodes:
                num_tries += 1
                raise OSError(errno.EMFILE, "as the system says")
            return await connect(loop, factory, host, port, **given)

        with monkeypatch.context() as patch:
            patch.setattr(asyncio.BaseEventLoop, "create_connection", fails)
            response = await pair.client.post("/generate", json=BODY)
            assert response.status_code == 503
            assert "ulimit" in error_of(response)
            await until(lambda: num_tries >= 10)
            assert (await pair.client.get("/health")).status_code == 200
        assert "router_retries_total 0.0" in await pair.metrics()
        assert (await pair.client.post("/generate", json=BODY)).status_code == 200


# --- other pairs -------------------------------------------------------------------------------------


@pytest.mark.I7
@pytest.mark.parametrize(
    "fails",
    [cuts_off, says(BROKEN_TRANSFER, 502), says(b"shutting down", 503), says(b"full", 429)],
    ids=["died", "502", "503", "429"],
)
async def test_a_request_goes_on_with_another_prefill_node(fails: Behaviour) -> None:
    async with cluster(prefill=[fails, delivers], decode=at_first(never, OK)) as pair:
        broken, spare = pair.prefill
        (decode,) = pair.decode
        response = await pair.client.post("/generate", json=BODY)
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
    async with cluster(prefill=fails_once, decode=at_first(never, OK)) as pair:
        response = await pair.client.post("/generate", json=BODY)
        assert (response.status_code, response.content) == (200, b"{}")
        assert len(pair.prefill[0].requests) == 2


def about(code: str, status: int = 503) -> Behaviour:
    return says(json.dumps({"error": {"message": "no contact", "type": "x", "code": code}}).encode(), status)


@pytest.mark.parametrize("fails", [says(BROKEN_TRANSFER, 502), about(PREFILL_NODE_FAILED)])
async def test_a_decode_node_that_cannot_contact_the_prefill_node_is_not_to_blame(fails: Behaviour) -> None:
    async with cluster(prefill=[never, delivers], decode=at_first(fails, OK)) as pair:
        response = await pair.client.post("/generate", json=BODY)
        assert (response.status_code, response.content) == (200, b"{}")
        assert response.headers["x-hisparse-pd-prefill"] == pair.prefill[1].url
        assert pair.prefill[0].body()["bootstrap_room"] != pair.prefill[1].body()["bootstrap_room"]
        await asyncio.wait_for(pair.prefill[0].client_left.wait(), WAIT_SECS)
        assert "router_prefill_retries_total 1.0" in await pair.metrics()


@pytest.mark.parametrize("says_why", [True, False])
async def test_a_prefill_node_whose_decode_node_gave_up_is_not_to_blame(
    says_why: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode node's own answer counts, if it comes; the prefill node's word of it may be faster."""
    monkeypatch.setattr("hisparse_pd.router.relay.DECODE_SAYS_WHY_SECS", WAIT_SECS if says_why else 0.0)

    async def gives_up(node: FakeNode, send: Send) -> None:
        await node.release.wait()
        await about("unavailable")(node, send)

    async def hears_of_it(node: FakeNode, send: Send) -> None:
        await about(DECODE_NODE_FAILED)(node, send)
        if says_why:
            pair.decode[0].release.set()

    async with cluster(prefill=at_first(hears_of_it, delivers), decode=[gives_up, OK]) as pair:
        response = await pair.client.post("/generate", json=BODY)
        assert (response.status_code, response.content) == (200, b"{}")
        assert response.headers["x-hisparse-pd-decode"] == pair.decode[1].url
        assert "router_prefill_retries_total 0.0" in await pair.metrics()


@pytest.mark.parametrize("status", [503, 429])
async def test_a_decode_node_that_is_not_ready_or_full_is_passed_over(status: int) -> None:
    async with cluster(delivers, [says(b"not now", status), OK]) as pair:
        response = await pair.client.post("/generate", json=BODY)
        assert (response.status_code, response.content) == (200, b"{}")
        assert response.headers["x-hisparse-pd-decode"] == pair.decode[1].url
        assert pair.decode[0].body()["bootstrap_room"] != pair.decode[1].body()["bootstrap_room"]
        metrics = await pair.metrics()
        assert "router_retries_total 1.0" in metrics
        assert "router_prefill_retries_total 0.0" in metrics


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize(("max_retries", "num_asked"), [(0, 1), (1, 2), (2, 3)])
async def test_retries_are_bounded(max_retries: int, num_asked: int) -> None:
    async with cluster([says(BROKEN_TRANSFER, 502)] * 4, never, max_retries=max_retries) as pair:
        response = await pair.client.post("/generate", json={})
        assert (response.status_code, response.content) == (502, BROKEN_TRANSFER)
        assert [len(node.requests) for node in pair.prefill] == [1] * num_asked + [0] * (4 - num_asked)


@pytest.mark.I7
@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_where_all_queues_are_full_the_client_hears_it(kind: str) -> None:
    full = json.dumps({"error": {"message": "64 requests wait"}}).encode()
    async with cluster(**{"prefill": never, "decode": never, kind: [says(full, 429)] * 2}) as pair:
        response = await pair.client.post("/generate", json=BODY)
        assert (response.status_code, response.content) == (429, full)
        assert response.headers["retry-after"] == "5"
        assert [len(node.requests) for node in getattr(pair, kind)] == [1, 1], "both were asked"
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
        await pair.until_counted(f'router_node_healthy{{kind="prefill",node="{pair.prefill[1].url}"}} 0.0')
        response = await pair.client.post("/generate", json={})
        assert response.status_code == 502
        assert pair.prefill[0].url in error_of(response)
        assert not pair.prefill[1].requests


async def test_nodes_that_load_or_are_away_are_used_again_when_they_are_back() -> None:
    async with cluster(decode=OK, health_interval_secs=0.05) as pair:
        (node,) = pair.decode
        node.trouble = b'{"status": "loading", "reason": "the engine is loading: weights, 1 of 9 GB"}'
        node.healthy = False
        await pair.until_health(503)
        body = (await pair.client.get("/health")).json()
        assert body["status"] == "loading"
        (said,) = [entry for entry in body["nodes"] if entry["url"] == node.url]
        assert said["trouble"] == "it loads its model"
        assert (await pair.client.post("/generate", json={})).status_code == 503
        node.trouble = b'{"status": "unavailable"}'
        while (await pair.client.get("/health")).json()["status"] != "unavailable":
            await asyncio.sleep(0.01)
        node.healthy = True
        await pair.until_health(200)
        assert (await pair.client.get("/readiness")).status_code == 200
        assert (await pair.client.post("/generate", json={})).status_code == 200


# --- what a prefill node answers alone ---------------------------------------------------------------


async def test_another_prefill_node_takes_what_one_fails_with_alone() -> None:
    async with cluster([says(b"{}", status=503), OK], never) as pair:
        for broken in pair.prefill:
            for _ in range(2):
                assert (await pair.client.post("/generate", json=NOTHING)).status_code == 200
            await broken.close()
        response = await pair.client.post("/generate", json=NOTHING)
        assert response.status_code in (502, 503)
        assert "prefill node" in error_of(response)


async def test_its_errors_are_the_clients_and_its_break_is_a_502() -> None:
    async def cut(node: FakeNode, send: Send) -> None:
        await start(send)
        raise CutConnection

    error = b'{"error":{"message":"no"}}'
    for behaviour, status in ((says(error, 400), 400), (cut, 502)):
        async with cluster(behaviour, never) as pair:
            response = await pair.client.post("/generate", json=NOTHING)
            assert response.status_code == status
            assert status != 400 or response.content == error


# --- what any node answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", TokenPath)
async def test_what_needs_no_pair_goes_to_one_node_that_serves(path: str) -> None:
    content = b'{"prompt": "a",  "x": 1.10}'
    loading = says(b'{"error": {"message": "loading"}}', 503)
    async with cluster(prefill=loading, decode=[loading, says(b'{"count": 1}')], max_retries=2) as pair:
        await pair.prefill[0].close()
        response = await pair.client.post(path, content=content)
        assert response.json() == {"count": 1}
        assert response.headers["x-hisparse-pd-decode"] == pair.decode[1].url
        assert [node.requests[0][0] for node in pair.decode] == [path, path]
        assert pair.decode[1].requests[0][2] == content
        assert f'hisparse_pd:router_requests_total{{endpoint="{path}",status="200"}}' in await pair.metrics()
        assert f'token_seconds_count{{endpoint="{path}"}}' not in await pair.metrics()


@pytest.mark.I7
async def test_a_node_that_refuses_what_needs_no_pair_has_the_word() -> None:
    refusal = b'{"error": {"message": "prompt: no", "type": "x", "code": "y"}}'
    async with cluster(prefill=says(refusal, 400), decode=says(refusal, 400)) as pair:
        response = await pair.client.post("/tokenize", json={})
        assert (response.status_code, response.content) == (400, refusal)
        assert len(pair.prefill[0].requests + pair.decode[0].requests) == 1
        for node in pair.nodes:
            await node.close()
        response = await pair.client.post("/tokenize", json={})
        assert response.status_code == 502
        assert "cannot be reached" in error_of(response)
        response = await pair.client.post("/tokenize", json={})
        assert response.status_code == 503
        assert "no healthy node" in error_of(response)


async def test_a_node_of_the_other_kind_gets_no_requests() -> None:
    """Its answers would look like answers."""
    async with cluster(decode=says(b"{}"), health_interval_secs=0.05) as pair:
        for node, kind in ((pair.prefill[0], b"prefill"), (pair.decode[0], b"decode")):
            node.health = b'{"status": "ok", "role": "%s"}' % kind
        assert (await pair.client.post("/generate", json={})).status_code == 200
        pair.decode[0].health = pair.prefill[0].health
        await pair.until_health(503)
        refused = await pair.client.post("/generate", json={})
        assert "it is a prefill node: name it with --prefill" in error_of(refused)
        assert len(pair.decode[0].requests) == 1
