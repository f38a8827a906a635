"""Streams that resume: the router between real HTTP servers, while those that play decode nodes are lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Send

from hisparse_pd.base.vocabulary import ENGINE_LOST, MOVED, PREFILL_NODE_FAILED
from hisparse_pd.router.drain import Drain
from hisparse_pd.router.relay import DECODE_SILENCE_SECS
from hisparse_pd.serving.http.journal_lines import LEAVING, OVER, journal_line
from tests.unit.router.cluster import (
    Behaviour,
    Cluster,
    CutConnection,
    FakeNode,
    at_first,
    cluster,
    computes,
    eventually,
    in_two_steps,
    says,
    start,
    write,
)
from tests.unit.router.silence import Silence
from tests.waiting import NEVER_SECS, until

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY = {"prompt": "a", "stream": True}


def error_body(code: str) -> bytes:
    return json.dumps({"error": {"message": "bye", "code": code}}).encode()


def unit(number: int) -> bytes:
    return b'data: {"n": %d}\n\n' % number + journal_line(b"[0,[%d]]" % number)


def journaled(*pieces: bytes, cut: bool = False) -> Behaviour:
    async def behaviour(node: FakeNode, send: Send) -> None:
        await start(send, x_hisparse_pd_journal="1")
        for piece in pieces:
            await write(send, piece)
        if cut:
            raise CutConnection
        await write(send, b"", more=False)

    return behaviour


LAST = b"data: [DONE]\n\n" + journal_line(OVER)
LOST = journaled(unit(1), unit(2)[:12], cut=True)
GOES_ON = journaled(unit(2), unit(3), LAST)
SHOWN = "".join(f'data: {{"n": {number}}}\n\n' for number in (1, 2, 3)) + "data: [DONE]\n\n"


def journals_of(pair: Cluster) -> list[dict[str, Any]]:
    """Return the bodies that decode nodes got, in the order of their resumes."""
    bodies = [json.loads(request[2]) for node in pair.decode for request in node.requests]
    return sorted(bodies, key=lambda body: int(body["journal"]["num_resumes"]))


async def leaves_behind_one(node: FakeNode, send: Send) -> None:
    """Send an event and say that the node leaves; the stream would go on if it were not moved."""
    await start(send, x_hisparse_pd_journal="1")
    await write(send, unit(1) + journal_line(LEAVING))
    await node.client_left.wait()


@pytest.mark.parametrize("first", [LOST, leaves_behind_one])
async def test_a_stream_goes_on_behind_what_was_shown(first: Behaviour) -> None:
    async with cluster(decode=[first, GOES_ON], resume_timeout_secs=NEVER_SECS) as pair:
        forged = {"journal": {"id": "x"}, "journal_records": [[[0, [9]]]]}
        response = await pair.client.post(PATH, json={**BODY, **forged})
        assert response.text == SHOWN
        assert "x-hisparse-pd-journal" not in response.headers
        before, after = journals_of(pair)
        assert (before["journal_records"], after["journal_records"]) == ([], [[[0, [1]]]])
        for name in ("id", "seed", "created"):
            assert before["journal"][name] == after["journal"][name]
        assert before["journal"]["may_move"] is False
        assert (before["journal"]["num_resumes"], after["journal"]["num_resumes"]) == (0, 1)
        assert before["bootstrap_room"] != after["bootstrap_room"]
        metrics = await pair.metrics()
        reason = "lost" if first is LOST else "moved"
        assert f'router_resumes_total{{reason="{reason}"}} 1.0' in metrics
        assert "router_journal_bytes 0.0" in metrics
        assert (await pair.client.get("/status")).json()["resumes"] == 1


async def test_a_node_that_hangs_is_lost_after_its_silence(silence: Silence) -> None:
    """What it sends when it wakes up is not shown."""

    async def hangs(node: FakeNode, send: Send) -> None:
        await start(send, x_hisparse_pd_journal="1")
        await write(send, unit(1))
        await node.release.wait()
        await write(send, unit(2))

    async def wakes_the_other(node: FakeNode, send: Send) -> None:
        pair.decode[0].release.set()
        await GOES_ON(node, send)

    async with (
        cluster(decode=[hangs, wakes_the_other], resume_timeout_secs=NEVER_SECS) as pair,
        pair.client.stream("POST", PATH, json=BODY) as response,
    ):
        pieces = response.aiter_text()
        shown = await anext(pieces)
        await until(lambda: silence.is_waited_in, "the router waits for more")
        silence.advance(DECODE_SILENCE_SECS)
        assert shown + "".join([piece async for piece in pieces]) == SHOWN


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (journaled(cut=True), ""),
        (journaled(b"data: " + error_body(ENGINE_LOST) + b"\n\n"), "before its end: bye"),
    ],
)
async def test_a_request_with_which_two_nodes_are_lost_goes_to_no_third(second: Behaviour, why: str) -> None:
    """The client's error has that of the last node."""
    nodes = [LOST, second, GOES_ON]
    async with cluster(decode=nodes, resume_timeout_secs=NEVER_SECS) as pair:
        text = (await pair.client.post(PATH, json=BODY)).text
        assert text.startswith('data: {"n": 1}\n\n')
        assert "were lost with this request, one after the other" in text
        assert why in text
        assert pair.decode[2].requests == []
        assert "router_truncated_answers_total 1.0" in await pair.metrics()


async def test_a_lost_node_has_the_stream_again_once_it_is_healthy() -> None:
    """There is no other node. Meanwhile, whatever is in front of the node accepts connections and cuts
    them."""

    async def dies(node: FakeNode, send: Send) -> None:
        node.healthy = False
        await LOST(node, send)

    async def is_back(node: FakeNode, send: Send) -> None:
        if not node.healthy:
            raise CutConnection
        await GOES_ON(node, send)

    async with cluster(decode=at_first(dies, is_back), resume_timeout_secs=NEVER_SECS) as pair:
        asking = asyncio.create_task(pair.client.post(PATH, json=BODY))

        await pair.until_health(503)
        pair.decode[0].healthy = True
        assert (await asking).text == SHOWN
        assert len(pair.decode[0].requests) == 2


NOT_READY = says(b'{"error": {"message": "not yet"}}', 503)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ([], "not yet"),
        ([says(b'{"error": {"message": "no"}}', 400)], '"no"'),
        ([says(b'{"error": {"message": "full"}}', 429)], "not yet full"),
    ],
)
async def test_a_stream_that_nobody_goes_on_with_ends_in_an_error(others: list[Behaviour], told: str) -> None:
    """It ends when its time is up; until then, nodes that refuse it for now are asked again."""
    async with cluster(decode=[at_first(LOST, NOT_READY), *others], resume_timeout_secs=1.0) as pair:
        shown, error = (await pair.client.post(PATH, json=BODY)).text.removesuffix("\n\n").split("\n\n")
        assert shown == 'data: {"n": 1}'
        assert json.loads(error.removeprefix("data: "))["error"]["message"] in told


async def test_a_search_that_ends_without_another_try_counts_none() -> None:
    async def goes_away(node: FakeNode, send: Send) -> None:
        node.healthy = False
        await NOT_READY(node, send)

    async with cluster(decode=at_first(LOST, goes_away), resume_timeout_secs=1.0) as pair:
        assert "error" in (await pair.client.post(PATH, json=BODY)).text
        assert len(pair.decode[0].requests) == 2
        assert "router_retries_total 0.0" in await pair.metrics()


async def test_a_resume_behind_a_retry_is_no_other_retry() -> None:
    async with cluster(decode=[NOT_READY, LOST, GOES_ON], resume_timeout_secs=NEVER_SECS) as pair:
        assert (await pair.client.post(PATH, json=BODY)).text == SHOWN
        assert "router_retries_total 1.0" in await pair.metrics()


async def test_a_stream_whose_next_prefill_node_fails_goes_on_with_another_one() -> None:
    """It resumes at the same decode node, with the same records."""
    fails = at_first(says(error_body(PREFILL_NODE_FAILED), 503), GOES_ON)
    async with cluster([computes] * 2, [LOST, fails], resume_timeout_secs=NEVER_SECS, max_retries=0) as pair:
        assert (await pair.client.post(PATH, json=BODY)).text == SHOWN
        failed, went_on = (pair.decode[1].body(number) for number in range(2))
        assert pair.prefill_of(failed) is not pair.prefill_of(went_on)
        assert failed["journal_records"] == went_on["journal_records"] == [[[0, [1]]]]
        assert "router_prefill_retries_total 1.0" in await pair.metrics()


async def test_a_stream_whose_prefill_node_fails_goes_on_with_another_one() -> None:
    """Logprobs of a prompt are shown before its KV has landed. The decode node is not to blame."""
    failed = b"data: " + error_body(PREFILL_NODE_FAILED) + b"\n\n"
    decode = at_first(journaled(unit(1), failed), GOES_ON)
    async with cluster([computes] * 2, decode, resume_timeout_secs=NEVER_SECS) as pair:
        assert (await pair.client.post(PATH, json=BODY)).text == SHOWN
        begun, went_on = (pair.decode[0].body(number) for number in range(2))
        assert pair.prefill_of(begun) is not pair.prefill_of(went_on)
        assert went_on["journal_records"] == [[[0, [1]]]]
        assert "router_prefill_retries_total 1.0" in await pair.metrics()
        assert 'router_resumes_total{reason="lost"} 0.0' in await pair.metrics()


async def test_what_is_no_nodes_fault_is_shown_and_not_asked_again() -> None:
    refused = b'data: {"error": {"message": "grammar"}}\n\n'
    async with cluster(
        decode=[journaled(unit(1), refused + journal_line(OVER)), GOES_ON], resume_timeout_secs=NEVER_SECS
    ) as pair:
        text = (await pair.client.post(PATH, json=BODY)).text
        assert text == 'data: {"n": 1}\n\n' + refused.decode()
        assert pair.decode[1].requests == []


@pytest.mark.parametrize(
    ("path", "ping"),
    [(PATH, ": ping\n\n"), ("/v1/messages", 'event: ping\ndata: {"type": "ping"}\n\n')],
)
async def test_a_client_hears_something_until_its_stream_goes_on(
    monkeypatch: pytest.MonkeyPatch, path: str, ping: str
) -> None:
    """The next node is slow to answer."""

    async def waits(node: FakeNode, send: Send) -> None:
        await node.release.wait()
        await GOES_ON(node, send)

    monkeypatch.setattr("hisparse_pd.router.resumable_stream.SEARCH_PING_SECS", 0.05)
    async with (
        cluster(decode=[LOST, waits], resume_timeout_secs=NEVER_SECS) as pair,
        pair.client.stream("POST", path, json=BODY) as response,
    ):
        text = ""
        async for piece in response.aiter_text():
            text += piece
            if text.count(ping) == 3:
                pair.decode[1].release.set()
        assert text.count(ping) >= 3
        assert text.replace(ping, "") == SHOWN


async def test_a_client_that_leaves_while_its_stream_looks_for_a_node_is_forgotten() -> None:
    async with cluster(decode=at_first(LOST, NOT_READY), resume_timeout_secs=NEVER_SECS) as pair:
        async with pair.client.stream("POST", PATH, json=BODY) as response:
            pieces = response.aiter_text()
            assert (await anext(pieces)).startswith('data: {"n": 1}')
            await until(lambda: len(pair.decode[0].requests) >= 3)
        await pair.until_counted("router_journal_bytes 0.0")
        await pair.until_counted('status="499"} 1.0')


@pytest.mark.parametrize("journal_bytes", [6, 1100])
async def test_a_stream_for_whose_journal_there_is_no_room_ends_with_its_node(journal_bytes: int) -> None:
    """There is no room from the beginning, or none once the journal is too long."""
    lost = journaled(*map(unit, range(400)), cut=True)
    async with cluster(
        decode=[lost, GOES_ON], resume_timeout_secs=NEVER_SECS, journal_bytes=journal_bytes
    ) as pair:
        text = (await pair.client.post(PATH, json=BODY)).text
        assert text.startswith("".join(f'data: {{"n": {number}}}\n\n' for number in range(400)))
        assert "broke off its answer" in text
        assert pair.decode[1].requests == []
        metrics = await pair.metrics()
        assert "router_dropped_journals_total 1.0" in metrics
        assert "router_journal_bytes 0.0" in metrics


WHOLE = {"prompt": "a"}
WHOLE_ANSWER = says(b'{"ok": true}')


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (journaled(cut=True), "lost"),
        (says(b"{}", 500), "lost"),
        (says(error_body(ENGINE_LOST), 503), "lost"),
        (says(error_body(MOVED), 503), "moved"),
    ],
)
async def test_a_whole_answer_begins_anew(first: Behaviour, reason: str) -> None:
    async with cluster(decode=[first, WHOLE_ANSWER], resume_timeout_secs=NEVER_SECS, max_retries=0) as pair:
        response = await pair.client.post(PATH, json=WHOLE)
        assert (response.status_code, response.json()) == (200, {"ok": True})
        body = pair.decode[1].body()
        assert (body["journal"]["may_move"], body["journal_records"]) == (reason == "lost", [])
        assert f'router_resumes_total{{reason="{reason}"}} 1.0' in await pair.metrics()


async def waits(node: FakeNode, send: Send) -> None:
    """Give a whole answer, unless the client leaves before."""
    await node.release.wait()
    await WHOLE_ANSWER(node, send)


async def waits_in_the_middle(node: FakeNode, send: Send) -> None:
    await start(send, x_hisparse_pd_journal="1")
    await write(send, unit(1) + unit(2)[:12])
    await node.release.wait()
    await write(send, unit(2)[12:] + unit(3) + LAST, more=False)


async def until_healthy(pair: Cluster, *, num: int) -> None:
    """Wait until the router knows so many healthy decode nodes."""

    async def are_known() -> bool:
        told: list[dict[str, Any]] = (await pair.client.get("/health")).json()["nodes"]
        return len([node for node in told if node["kind"] == "decode" and node["healthy"]]) == num

    await eventually(are_known)


@pytest.mark.parametrize(
    ("first", "then", "body", "shown"),
    [(waits_in_the_middle, GOES_ON, BODY, SHOWN), (waits, WHOLE_ANSWER, WHOLE, '{"ok": true}')],
)
async def test_a_node_that_is_there_later_has_the_requests_of_one_that_leaves(
    first: Behaviour, then: Behaviour, body: dict[str, Any], shown: str
) -> None:
    """They stay at the leaving node until then."""
    async with cluster(
        decode=[first, then], resume_timeout_secs=NEVER_SECS, health_interval_secs=0.05
    ) as pair:
        old, new = pair.decode
        new.healthy = False
        await until_healthy(pair, num=1)
        asking = asyncio.create_task(pair.client.post(PATH, json=body))
        await until(lambda: old.requests)
        old.healthy, old.trouble = False, b'{"status": "leaving"}'
        await until_healthy(pair, num=0)
        assert (asking.done(), old.client_left.is_set()) == (False, False)
        new.healthy = True
        assert (await asking).text == shown
        await old.client_left.wait()
        assert old.body()["journal"]["may_move"] is False
        assert 'router_resumes_total{reason="moved"} 1.0' in await pair.metrics()


@pytest.mark.parametrize(
    ("first", "settings"),
    [
        (waits_in_the_middle, {"journal_bytes": 6}),
        (waits_in_the_middle, {"resume_timeout_secs": 0}),
        (in_two_steps, {}),
    ],
)
async def test_what_cannot_go_on_stays_at_a_node_that_leaves(
    first: Behaviour, settings: dict[str, Any]
) -> None:
    """These are streams without room for a journal, of routers that resume nothing, and of nodes without
    journals."""
    options = {"resume_timeout_secs": NEVER_SECS, "health_interval_secs": 0.05} | settings
    async with (
        cluster(decode=[first, GOES_ON], **options) as pair,
        pair.client.stream("POST", PATH, json=BODY) as response,
    ):
        pieces = response.aiter_text()
        text = await anext(pieces)
        old, new = pair.decode
        old.healthy, old.trouble = False, b'{"status": "leaving"}'
        await until_healthy(pair, num=1)
        old.release.set()
        text += "".join([piece async for piece in pieces])
        assert text == (SHOWN if first is waits_in_the_middle else "data: 1\n\ndata: 2\n\n")
        assert new.requests == []


async def test_a_node_that_is_back_stays_in_service_while_the_last_of_its_run_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The reader is a slow client, whose stream cannot resume elsewhere."""

    async def leaves(node: FakeNode, send: Send) -> None:
        await start(send, x_hisparse_pd_journal="1")
        await write(send, unit(1) + journal_line(LEAVING))
        await node.release.wait()
        await write(send, unit(2) + unit(3) + LAST, more=False)

    async with (
        cluster(decode=[leaves], health_interval_secs=0.05) as pair,
        pair.client.stream("POST", PATH, json=BODY) as response,
    ):
        pieces = response.aiter_text()
        text = await anext(pieces)
        await until_healthy(pair, num=1)
        pair.decode[0].release.set()
        assert text + "".join([piece async for piece in pieces]) == SHOWN
    assert caplog.text.count("is unhealthy: it is shutting down") == 1


async def test_a_stream_that_outgrew_its_journal_stays_at_a_node_that_leaves() -> None:
    """When the node was asked, the journal still had room."""

    async def leaves(node: FakeNode, send: Send) -> None:
        await start(send, x_hisparse_pd_journal="1")
        await write(send, b"".join(map(unit, range(400))))
        await node.release.wait()
        assert node.body()["journal"]["may_move"] is False
        await write(send, journal_line(LEAVING) + unit(400) + LAST, more=False)

    async with cluster(decode=[leaves, GOES_ON], resume_timeout_secs=NEVER_SECS, journal_bytes=1100) as pair:
        asking = asyncio.create_task(pair.client.post(PATH, json=BODY))
        await pair.until_counted("router_dropped_journals_total 1.0")
        pair.decode[0].release.set()
        text = "".join(f'data: {{"n": {number}}}\n\n' for number in range(401))
        assert (await asking).text == text + "data: [DONE]\n\n"
        assert pair.decode[1].requests == []


@pytest.mark.parametrize("lost", [journaled(cut=True), says(error_body(ENGINE_LOST), 503)])
async def test_a_whole_answer_with_which_two_nodes_are_lost_goes_to_no_third(lost: Behaviour) -> None:
    """It counts as a stream of which nothing was shown between the losses."""
    async with cluster(decode=[lost, lost, WHOLE_ANSWER], resume_timeout_secs=NEVER_SECS) as pair:
        response = await pair.client.post(PATH, json=WHOLE)
        assert response.status_code == 502
        assert "were lost with this request, one after the other" in response.text
        assert pair.decode[2].requests == []


async def test_a_router_that_shuts_down_looks_no_further() -> None:
    drain = Drain()
    async with cluster(decode=at_first(LOST, NOT_READY), drain=drain, resume_timeout_secs=NEVER_SECS) as pair:
        asking = asyncio.create_task(pair.client.post(PATH, json=BODY))
        await until(lambda: pair.decode[0].requests)
        await drain.finish(0.5, lambda: False)
        assert "the router is shutting down" in (await asking).text
