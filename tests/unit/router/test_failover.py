"""Nodes that cannot be reached, fail, are full or not ready: where the request goes, and what its client
gets."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import Any

import httpx
import pytest
from starlette.types import Send

from hisparse_pd.base.vocabulary import PREFILL_NODE_FAILED
from hisparse_pd.router.local_faults import local_fault
from hisparse_pd.serving.api.bodies import TokenPath
from tests.unit.router.cluster import (
    EVENTS,
    OK,
    Behaviour,
    CutConnection,
    FakeNode,
    at_first,
    breaks_off,
    cluster,
    computes,
    error_of,
    never,
    says,
    start,
    streams,
)
from tests.unit.router.silence import Silence
from tests.waiting import until

pytestmark = pytest.mark.anyio

BODY = {"text": "a"}
BROKEN_TRANSFER = b'{"error": {"message": "the write failed", "type": "server_error", "code": null}}'


def about(code: str, status: int = 503) -> Behaviour:
    return says(json.dumps({"error": {"message": "no contact", "type": "x", "code": code}}).encode(), status)


PREFILL_FAILED = about(PREFILL_NODE_FAILED)


# --- errors of nodes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 500, 503, 504])
async def test_a_decode_nodes_error_is_the_clients(status: int) -> None:
    """It is passed on if another node would give it, too."""
    error = json.dumps({"error": {"message": "prompt too long", "type": "x", "code": "y"}}).encode()
    async with cluster(decode=says(error, status)) as pair:
        response = await pair.client.post("/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.content) == (status, error)


async def test_an_error_that_is_no_json_becomes_some() -> None:
    async with cluster(decode=says(b"oh no", 500, "text/plain")) as pair:
        response = await pair.client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert response.status_code == 500
        assert f"{pair.decode[0].url} answered 500: oh no" in error_of(response)


@pytest.mark.I7
async def test_a_stream_that_breaks_off_ends_in_an_error_event() -> None:
    """The client has a byte, so the request goes to no other pair."""
    async with cluster([computes] * 2, [breaks_off, OK]) as pair:
        response = await pair.client.post("/generate", json={"stream": True})
        assert response.status_code == 200
        first, error, rest = response.content.split(b"\n\n")
        assert (first, rest) == (b"data: 1", b"")
        assert pair.decode[0].url in json.loads(error.removeprefix(b"data: "))["error"]["message"]
        assert not pair.decode[1].requests
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
async def test_a_silent_node_is_a_gateway_timeout(silence: Silence) -> None:
    silence.limit_secs = 30.0
    async with cluster(decode=never, request_timeout_secs=30) as pair:
        asking = asyncio.create_task(pair.client.post("/generate", json={}))
        await until(lambda: pair.decode[0].requests and silence.is_waited_in, "the router waits for the node")
        silence.advance(30.0)
        response = await asking
        assert response.status_code == 504
        assert f"{pair.decode[0].url} did not answer within 30 s" in error_of(response)


# --- nodes that cannot be reached --------------------------------------------------------------------


async def test_an_unreachable_decode_node_is_replaced_once_under_a_new_room() -> None:
    async with cluster([computes] * 2, [OK] * 2) as pair:
        broken, spare = pair.decode
        await broken.close()
        assert (await pair.client.post("/generate", json=BODY)).status_code == 200
        assert len(spare.requests) == 1
        metrics = await pair.metrics()
        assert "router_retries_total 1.0" in metrics
        assert f'router_node_healthy{{kind="decode",node="{broken.url}"}} 0.0' in metrics
        await pair.client.post("/generate", json=BODY)
        assert "router_retries_total 1.0" in await pair.metrics()


async def test_without_a_spare_node_the_error_names_the_node() -> None:
    async with cluster(decode=OK) as pair:
        (broken,) = pair.decode
        await broken.close()
        for status in (502, 503):
            response = await pair.client.post("/generate", json={})
            assert response.status_code == status
            assert broken.url in error_of(response)
        assert (await pair.client.get("/health")).status_code == 503


async def test_a_prefill_node_that_cannot_be_reached_is_found_by_its_health_check() -> None:
    """The router sends it nothing else."""
    async with cluster([computes] * 2, OK, health_interval_secs=0.05) as pair:
        gone, spare = pair.prefill
        await gone.close()
        await pair.until_counted(f'router_node_healthy{{kind="prefill",node="{gone.url}"}} 0.0')
        for _ in range(3):
            response = await pair.client.post("/generate", json=BODY)
            assert (response.status_code, response.headers["x-hisparse-pd-prefill"]) == (200, spare.url)
        await spare.close()
        await pair.until_health(503)
        response = await pair.client.post("/generate", json=BODY)
        assert response.status_code == 503
        assert "no healthy prefill node" in error_of(response)
        assert len(pair.decode[0].requests) == 3


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
    async with cluster([computes] * 2, OK, health_interval_secs=0.05) as pair:
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
    [
        *(about(PREFILL_NODE_FAILED, status) for status in (502, 503, 429)),
        about(PREFILL_NODE_FAILED, 500),
        says(BROKEN_TRANSFER, 502),
    ],
    ids=["502", "503", "429", "500", "no code"],
)
@pytest.mark.parametrize(("stream", "answers"), [(False, OK), (True, streams)], ids=["whole", "stream"])
async def test_a_request_whose_prefill_node_failed_goes_on_with_another_one(
    fails: Behaviour, stream: bool, answers: Behaviour
) -> None:
    """Its decode node says so, and is not blamed itself."""
    async with cluster([computes] * 2, at_first(fails, answers)) as pair:
        broken, spare = pair.prefill
        (decode,) = pair.decode
        response = await pair.client.post("/generate", json={**BODY, "stream": stream})
        assert (response.status_code, response.content) == (200, b"".join(EVENTS) if stream else b"{}")
        assert response.headers["x-hisparse-pd-prefill"] == spare.url
        assert response.headers["x-hisparse-pd-decode"] == decode.url
        first, second = decode.body(0), decode.body(1)
        assert (pair.prefill_of(first), pair.prefill_of(second)) == (broken, spare)
        assert first["bootstrap_room"] != second["bootstrap_room"]
        assert first["text"] == second["text"] == "a"
        metrics = await pair.metrics()
        assert "router_prefill_retries_total 1.0" in metrics
        assert "router_retries_total 1.0" in metrics
        for node, kind in ((broken, "prefill"), (decode, "decode")):
            assert f'router_node_healthy{{kind="{kind}",node="{node.url}"}} 1.0' in metrics, "blacklisted"


@pytest.mark.parametrize("stream", [False, True])
async def test_where_there_is_one_prefill_node_the_client_hears_that_it_failed(stream: bool) -> None:
    async with cluster(decode=PREFILL_FAILED) as pair:
        response = await pair.client.post("/generate", json={**BODY, "stream": stream})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == PREFILL_NODE_FAILED
        assert len(pair.decode[0].requests) == 1
        assert "router_retries_total 0.0" in await pair.metrics()


async def test_a_write_that_failed_is_tried_again_where_there_is_no_other_prefill_node() -> None:
    async with cluster(decode=at_first(says(BROKEN_TRANSFER, 502), OK)) as pair:
        response = await pair.client.post("/generate", json=BODY)
        assert (response.status_code, response.content) == (200, b"{}")
        assert len(pair.decode[0].requests) == 2


@pytest.mark.parametrize("status", [503, 429])
async def test_a_decode_node_that_is_not_ready_or_full_is_passed_over(status: int) -> None:
    async with cluster(decode=[says(b"not now", status), OK]) as pair:
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
    """A request with which every prefill node fails goes to none of them twice."""
    async with cluster([computes] * 4, says(BROKEN_TRANSFER, 502), max_retries=max_retries) as pair:
        response = await pair.client.post("/generate", json={})
        assert (response.status_code, response.content) == (502, BROKEN_TRANSFER)
        (decode,) = pair.decode
        asked = [pair.prefill_of(decode.body(number)) for number in range(len(decode.requests))]
        assert [node.url for node in asked] == [node.url for node in pair.prefill[:num_asked]]


@pytest.mark.I7
async def test_where_all_queues_are_full_the_client_hears_it() -> None:
    full = json.dumps({"error": {"message": "64 requests wait"}}).encode()
    async with cluster(decode=[says(full, 429)] * 2) as pair:
        response = await pair.client.post("/generate", json=BODY)
        assert (response.status_code, response.content) == (429, full)
        assert response.headers["retry-after"] == "5"
        assert [len(node.requests) for node in pair.decode] == [1, 1], "both were asked"
        metrics = await pair.metrics()
        assert " 0.0" not in [line[-4:] for line in metrics.splitlines() if "router_node_healthy{" in line]


@pytest.mark.parametrize("status", [400, 500, 504])
async def test_what_another_pair_would_do_again_is_not_retried(status: int) -> None:
    async with cluster([computes] * 2, [says(b"{}", status), OK]) as pair:
        assert (await pair.client.post("/generate", json={})).status_code == status
        assert not pair.decode[1].requests


async def test_a_retry_needs_another_healthy_prefill_node() -> None:
    async with cluster([computes] * 2, PREFILL_FAILED, health_interval_secs=0.05) as pair:
        pair.prefill[1].healthy = False
        await pair.until_counted(f'router_node_healthy{{kind="prefill",node="{pair.prefill[1].url}"}} 0.0')
        response = await pair.client.post("/generate", json={})
        assert response.status_code == 503
        assert response.headers["x-hisparse-pd-prefill"] == pair.prefill[0].url
        assert len(pair.decode[0].requests) == 1


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


# --- what any decode node answers --------------------------------------------------------------------


@pytest.mark.parametrize("path", TokenPath)
async def test_what_needs_no_pair_goes_to_one_decode_node_that_serves(path: str) -> None:
    content = b'{"prompt": "a",  "x": 1.10}'
    loading = says(b'{"error": {"message": "loading"}}', 503)
    async with cluster(decode=[loading, loading, says(b'{"count": 1}')], max_retries=2) as pair:
        await pair.decode[0].close()
        await pair.prefill[0].close()
        response = await pair.client.post(path, content=content)
        assert response.json() == {"count": 1}
        assert response.headers["x-hisparse-pd-decode"] == pair.decode[2].url
        assert [node.requests[0][0] for node in pair.decode[1:]] == [path, path]
        assert pair.decode[2].requests[0][2] == content
        assert f'hisparse_pd:router_requests_total{{endpoint="{path}",status="200"}}' in await pair.metrics()
        assert f'token_seconds_count{{endpoint="{path}"}}' not in await pair.metrics()


@pytest.mark.I7
async def test_a_node_that_refuses_what_needs_no_pair_has_the_word() -> None:
    refusal = b'{"error": {"message": "prompt: no", "type": "x", "code": "y"}}'
    async with cluster(decode=[says(refusal, 400)] * 2) as pair:
        response = await pair.client.post("/tokenize", json={})
        assert (response.status_code, response.content) == (400, refusal)
        assert len(pair.decode[0].requests + pair.decode[1].requests) == 1
        for node in pair.decode:
            await node.close()
        response = await pair.client.post("/tokenize", json={})
        assert response.status_code == 502
        assert "cannot be reached" in error_of(response)
        response = await pair.client.post("/tokenize", json={})
        assert response.status_code == 503
        assert "no healthy decode node" in error_of(response)


async def test_a_node_of_the_other_kind_gets_no_requests() -> None:
    """Its answers would look like those of the right kind."""
    async with cluster(decode=says(b"{}"), health_interval_secs=0.05) as pair:
        for node, kind in ((pair.prefill[0], b"prefill"), (pair.decode[0], b"decode")):
            node.health = b'{"status": "ok", "role": "%s"}' % kind
        assert (await pair.client.post("/generate", json={})).status_code == 200
        pair.decode[0].health = pair.prefill[0].health
        await pair.until_health(503)
        refused = await pair.client.post("/generate", json={})
        assert "it is a prefill node: name it with --prefill" in error_of(refused)
        assert len(pair.decode[0].requests) == 1
