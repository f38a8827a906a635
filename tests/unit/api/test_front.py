"""The nodes' HTTP fronts against a scripted engine: the product's own servers, sockets and clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.settings import MAX_BODY_BYTES
from hisparse_pd.base.vocabulary import (
    PREFILL_NODE_FAILED,
    VERSION,
    FinishReason,
    HisparseFlag,
    Mode,
    RankPlace,
)
from hisparse_pd.decode_node.server import create_decode_app
from hisparse_pd.engine.messages import (
    Abort,
    EngineLoading,
    FlushCache,
    FromEngine,
    Generate,
    RequestFailed,
    RequestStats,
    Tokens,
)
from hisparse_pd.serving.api import node
from hisparse_pd.serving.api.app import Work, create_app
from hisparse_pd.serving.api.frame import HttpAnswer
from hisparse_pd.serving.api.sampling_defaults import SamplingDefaults
from hisparse_pd.serving.http import engine_reports, first_front
from hisparse_pd.serving.http.engine_link import EngineLink
from hisparse_pd.serving.http.listening import Listener
from hisparse_pd.serving.http.metrics import FrontMetrics
from tests.unit.api.scripted_engine import plays, say, stats
from tests.unit.api.support import (
    BODY,
    MESSAGES,
    NATIVE,
    ROOM,
    TOKENIZER,
    Node,
    call_app,
    decode_events,
    serving,
    socketless_context,
)
from tests.unit.api.tiny_tokenizer import EOS
from tests.waiting import WAIT_SECS, until, wait_until

pytestmark = pytest.mark.anyio

# --- decode: OpenAI ----------------------------------------------------------------------------------


async def test_completion(tmp_path: Path) -> None:
    async with serving(say("abcdefgh", mode=Mode.HISPARSE), tmp_path) as node:
        answer = await node.answer("/v1/completions", **BODY, hisparse=True)
        assert answer["object"] == "text_completion"
        assert answer["model"] == "tiny"
        assert answer["choices"] == [
            {"index": 0, "text": "abcde", "logprobs": None, "finish_reason": "length", "matched_stop": None}
        ]
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2, "held_tokens": 1},
            "hisparse": {"mode": "hisparse", "hits": 10, "misses": 4},
        }
        (generate,) = node.engine.generates
        assert (generate.bootstrap_host, generate.bootstrap_port, generate.room) == ("10.0.0.1", 8998, 7)
        assert generate.hisparse is HisparseFlag.TRUE
        assert generate.num_prompt_tokens == 5
        assert node.engine.aborts == []
        assert (
            await node.metric('hisparse_pd:num_requests_total{endpoint="/v1/completions",status="200"}') == 1
        )
        assert await node.metric("hisparse_pd:time_to_first_token_seconds_count") == 1
        assert await node.metric("hisparse_pd:inter_token_latency_seconds_count") == 4
        assert await node.metric("hisparse_pd:e2e_request_latency_seconds_count") == 1


async def test_streamed_completion(tmp_path: Path) -> None:
    async with serving(say("a€bc"), tmp_path) as node:
        answer = await node.post("/v1/completions", **BODY, stream=True)
        # Clients after the letter of HTTP take text without a charset for ISO-8859-1.
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        plain = decode_events(answer.text)
        assert [chunk["choices"][0]["text"] for chunk in plain] == ["a", "€", "b"]
        assert [chunk["choices"][0]["finish_reason"] for chunk in plain] == [None, None, "length"]
        assert all("usage" not in chunk for chunk in plain)
        counted = await node.events("/v1/completions", **BODY, stream_options={"include_usage": True})
        assert [chunk["usage"] for chunk in counted[:-1]] == [None, None, None]
        assert counted[-1]["choices"] == []
        assert counted[-1]["usage"]["completion_tokens"] == 5
        assert counted[-1]["usage"]["hisparse"] == {"mode": "dense", "hits": 10, "misses": 4}
        assert len({chunk["id"] for chunk in counted}) == 1


async def test_usage_in_every_chunk(tmp_path: Path) -> None:
    async with serving(say("abcde"), tmp_path) as node:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await node.events("/v1/completions", **BODY, n=2, stream_options=options)
        for index in (0, 1):
            mine = [chunk["usage"] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
            assert [usage["completion_tokens"] for usage in mine] == [1, 2, 3, 4, 5]
            assert [usage["total_tokens"] for usage in mine] == [6, 7, 8, 9, 10]
        assert chunks[-1]["usage"]["completion_tokens"] == 10


async def test_completion_logprobs(tmp_path: Path) -> None:
    async with serving(say("abcd", per_message=2), tmp_path) as node:
        for choice in (await node.answer("/v1/completions", **BODY, logprobs=2, n=2))["choices"]:
            whole = choice["logprobs"]
            assert whole["tokens"] == list("abcd")
            assert whole["token_logprobs"] == [-0.5] * 4
            assert whole["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
            assert whole["text_offset"] == [0, 1, 2, 3]


async def test_token_ids_of_prompts_and_answers(tmp_path: Path) -> None:
    """Ids are shown even where a token shows no text yet."""
    said = list("a€b".encode())
    async with serving(say("a€b"), tmp_path) as node:
        body: dict[str, Any] = {**BODY, "prompt": ["ab", "c"], "n": 2, "return_token_ids": True}
        choices = (await node.answer("/v1/completions", **body))["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [[97, 98], [97, 98], [99], [99]]
        assert [choice["token_ids"] for choice in choices] == [said] * 4
        streamed = [chunk["choices"][0] for chunk in await node.events("/v1/completions", **BODY)]
        assert [chunk["text"] for chunk in streamed] == ["a", "€", "b"], "what shows nothing is no event"
        streamed = [c for e in await node.events("/v1/completions", **body) for c in e["choices"]]
        assert [choice["text"] for choice in streamed if choice["index"] == 0] == ["a", "", "", "€", "b"]
        chat: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 5, "n": 2, **ROOM}
        whole = await node.answer("/v1/chat/completions", **chat, return_token_ids=True)
        assert whole["prompt_token_ids"] == TOKENIZER("[user]hi[assistant]").input_ids
        assert [choice["token_ids"] for choice in whole["choices"]] == [said] * 2
        plain = await node.answer("/v1/chat/completions", **chat, return_token_ids=False)
        assert "prompt_token_ids" not in plain
        assert "token_ids" not in plain["choices"][0]


async def test_chat(tmp_path: Path) -> None:
    async with serving(say("abcdef"), tmp_path, default_max_tokens=3) as node:
        body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, **ROOM}
        answer = await node.answer("/v1/chat/completions", **body, metadata={"hisparse": "false"})
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "abc", "refusal": None}
        assert answer["choices"][0]["finish_reason"] == "length"
        assert node.engine.generates[0].hisparse is HisparseFlag.FALSE
        answer = await node.answer("/v1/chat/completions", **body, logprobs=True, top_logprobs=1)
        token = {"token": "a", "logprob": -0.5, "bytes": [97]}
        assert answer["choices"][0]["logprobs"]["content"][0] == token | {"top_logprobs": [token]}


async def test_n_and_several_prompts(tmp_path: Path) -> None:
    modes = itertools.cycle((Mode.HISPARSE, Mode.DENSE))
    async with serving(lambda generate: say("xyz", mode=next(modes))(generate), tmp_path) as node:
        answer = await node.answer("/v1/completions", **{**BODY, "prompt": ["ab", "cd"]}, n=2, seed=1)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [generate.sampling.seed for generate in node.engine.generates] == [1, 2, 1, 2]
        assert len({generate.room for generate in node.engine.generates}) == 4
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 12)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 4
        of_samples = ["hisparse", "dense", "hisparse", "dense"]
        assert usage["hisparse"] == {"mode": "mixed", "hits": 40, "misses": 16, "modes": of_samples}


@pytest.mark.parametrize("per_message", [1, 3, 8])
async def test_stop_strings(tmp_path: Path, per_message: int) -> None:
    def script(generate: Generate) -> Iterable[FromEngine | float]:
        """Say the text slowly: an engine that ends first is not told of the stop string."""
        num_said = 0
        for event in say("abcdefgh", per_message=per_message)(generate):
            yield event
            num_said += per_message
            if 5 <= num_said < 8:
                yield 60.0

    async with serving(script, tmp_path) as node:
        body = {**BODY, "max_tokens": 8, "stop": ["never", "de"]}
        choice = (await node.answer("/v1/completions", **body))["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("abc", "stop", "de")
        chunks = await node.events("/v1/completions", **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        vllms = await node.answer("/v1/completions", **body, include_stop_str_in_output=True)
        assert vllms["choices"][0]["text"] == "abcde"
        kept = await node.answer("/v1/completions", **body, no_stop_trim=True)
        assert kept["choices"][0]["text"] == "abcde"
        assert kept["usage"]["completion_tokens"] == 5
        assert kept["usage"]["hisparse"] == {"mode": "dense", "hits": 10, "misses": 4}
        if per_message < 8:  # the engine was still at work
            aborted = [generate.request_id for generate in node.engine.generates]
            await until(lambda: node.engine.aborts == aborted, "the engine was told")
            assert all(m.has_finished for m in node.engine.received if isinstance(m, Abort))
        assert node.link.num_in_flight == 0


@pytest.mark.parametrize(("no_stop_trim", "text"), [(False, "ok"), (True, "ok!")])
async def test_a_stop_token_is_not_shown(tmp_path: Path, no_stop_trim: bool, text: str) -> None:
    stop = Tokens("", tuple(b"!"), (), FinishReason.STOP, ord("!"), RequestStats(Mode.DENSE))
    async with serving(plays(Tokens("", tuple(b"ok")), stop), tmp_path) as node:
        answer = await node.answer("/v1/completions", **BODY, no_stop_trim=no_stop_trim)
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["matched_stop"] == 33
        assert answer["usage"]["completion_tokens"] == 3


async def test_usage_says_what_became_of_drafts(tmp_path: Path) -> None:
    drafted = RequestStats(Mode.DENSE, num_drafted=7, num_accepted=3)
    said = Tokens("", tuple(b"ok"), (), FinishReason.LENGTH, None, drafted)
    async with serving(plays(said), tmp_path) as node:
        answer = await node.answer("/v1/completions", **BODY, speculative=False)
        drafts = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}
        assert answer["usage"]["completion_tokens_details"] == drafts
        meta = (await node.answer("/generate", **NATIVE))["meta_info"]
        assert (meta["spec_draft_token_num"], meta["spec_accept_token_num"]) == (7, 3)
        assert [generate.is_speculative for generate in node.engine.generates] == [False, True]


async def test_eos_is_shown_only_on_request(tmp_path: Path) -> None:
    eos_id = TOKENIZER.convert_tokens_to_ids(EOS)
    async with serving(plays(Tokens("", (111, eos_id), (), FinishReason.STOP)), tmp_path) as node:
        for options, text in (({}, "o"), ({"skip_special_tokens": False}, f"o{EOS}")):
            answer = await node.answer("/v1/completions", **BODY, **options)
            assert answer["choices"][0]["text"] == text


# --- decode: SGLang ----------------------------------------------------------------------------------


async def test_generate(tmp_path: Path) -> None:
    async with serving(say("abc"), tmp_path) as node:
        body = NATIVE | {"rid": "mine", "return_logprob": True}
        answer = await node.answer("/generate", **body)
        meta = answer["meta_info"]
        assert (answer["text"], answer["output_ids"]) == ("abc", list(b"abc"))
        assert meta.pop("e2e_latency") > 0
        assert meta == {
            "id": "mine",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "cached_tokens": 2,
            "held_tokens": 1,
            "hisparse": {"mode": "dense", "hits": 10, "misses": 4},
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5, 97, None], [-0.5, 98, None], [-0.5, 99, None]],
        }
        body |= {"top_logprobs_num": 2, "return_text_in_logprobs": True}
        meta = (await node.answer("/generate", **body))["meta_info"]
        assert meta["output_token_logprobs"] == [[-0.5, 97, "a"], [-0.5, 98, "b"], [-0.5, 99, "c"]]
        assert meta["output_top_logprobs"][0] == [[-0.5, 97, "a"], [-1.5, 98, "b"]]


async def test_generate_streams_cumulative_text(tmp_path: Path) -> None:
    async with serving(say("a€bc"), tmp_path) as node:
        events = await node.events("/generate", **NATIVE)
        counts = [len(event["output_ids"]) for event in events]  # some are left out when the front is slow
        assert counts == sorted(set(counts))
        assert counts[-1] == 5
        texts = {1: "a", 2: "a", 3: "a", 4: "a€", 5: "a€b"}
        assert [event["text"] for event in events] == [texts[count] for count in counts]
        ends = [event["meta_info"]["finish_reason"] is not None for event in events]
        assert ends == [count == 5 for count in counts]
        assert "index" not in events[0]


async def test_generate_answers_a_list_with_a_list(tmp_path: Path) -> None:
    async with serving(say("abc"), tmp_path) as node:
        lists = {"bootstrap_host": ["h"] * 2, "bootstrap_port": [None] * 2, "bootstrap_room": [1, 2]}
        answers = await node.answer("/generate", input_ids=[[1], [2, 3]], **lists)
        assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2]
        one = {"bootstrap_host": ["h"], "bootstrap_port": [None], "bootstrap_room": [1]}
        assert len(await node.answer("/generate", text=["a"], **one)) == 1
        events = await node.events("/generate", text=["a", "b"], **lists)
        last = {event["index"]: event["text"] for event in events}
        assert last == {0: "abc", 1: "abc"}


# --- keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_a_key_only_probes_and_metrics_are_answered(role: str, tmp_path: Path) -> None:
    key = "the-key-of-the-router"
    path = tmp_path / "keys"
    path.write_text(f"{key}\n")

    async with serving(say("hello"), tmp_path, role=role, api_key_file=path) as node:
        for target in ("/health", "/health_generate", "/metrics"):
            assert (await node.client.get(target)).status_code == 200, target
        closed = ["/server_info", "/model_info", "/get_load", "/v1/models", "/flush_cache", "/nowhere"]
        for target in closed:
            assert (await node.client.get(target)).status_code == 401, target
        for target in ("/v1/completions", "/v1/chat/completions", "/generate", "/flush_cache"):
            response = await node.post(target, **BODY)
            assert response.status_code == 401, target
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert node.engine.received == []
        assert await node.metric("hisparse_pd:unauthorized_requests_total") == 10
        node.client.headers["authorization"] = f"Bearer {key}"
        info = await node.client.get("/server_info")
        assert info.status_code == 200
        assert key not in info.text
        assert str(path) not in info.text
        assert (await node.post("/v1/completions", **BODY)).status_code == 200


@pytest.mark.parametrize("sent_by_browsers", [{"origin": "null"}, {"sec-fetch-site": "same-origin"}])
async def test_pages_in_browsers_may_not_do_what_operators_do(
    sent_by_browsers: dict[str, str], tmp_path: Path
) -> None:
    async with serving(say("hello"), tmp_path) as node:
        from_page = {"content-type": "application/json", **sent_by_browsers}
        for path in ("/flush_cache", "/drain", "/release_quarantine?instance_id=a"):
            refused = await node.client.post(path, headers=from_page)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden"), path
        assert node.engine.received == []
        picture = await node.client.get("/flush_cache")  # as a page asks for one
        assert picture.status_code == 405
        assert (await node.client.post("/v1/completions", json=BODY, headers=from_page)).status_code == 200


async def test_a_drain_that_is_asked_for_again_is_no_second_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    node: Node

    def kill(pid: int, number: int) -> None:
        sent.append(number)
        node.link.stop_accepting()

    monkeypatch.setattr(os, "kill", kill)
    async with serving(say("hello"), tmp_path) as node:
        for _ in range(2):
            assert (await node.client.post("/drain")).status_code == 200
    assert sent == [signal.SIGTERM]


@pytest.mark.I7
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_headers_that_are_no_text_do_no_harm(role: str, tmp_path: Path) -> None:
    names = (b"x-request-id", b"x-correlation-id", b"traceparent", b"tracestate", b"content-type")
    key = "k" * 32
    (tmp_path / "keys").write_text(key)
    async with serving(say("hello"), tmp_path, role=role, api_key_file=tmp_path / "keys") as node:
        for value in (b"caf\xe9", b"\xff\xfe", b"a\x01b"):
            given = [(name, value) for name in names]
            keyed = [*given, (b"authorization", b"Bearer " + key.encode())]
            wrong = [*given, (b"authorization", b"Bearer " + value)]
            body = json.dumps(BODY).encode()
            response = await node.client.post("/v1/completions", content=body, headers=keyed)
            assert (response.status_code, "error" in response.json()) == (200, False)
            response = await node.client.post("/v1/completions", content=body, headers=wrong)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            response = await node.client.get("/nowhere", headers=keyed)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


# --- failures ----------------------------------------------------------------------------------------


async def test_a_sample_that_fails_fails_the_request(tmp_path: Path) -> None:
    fails = plays(RequestFailed("", 503, "room 7: the prefill node is gone", PREFILL_NODE_FAILED))

    def script(generate: Generate) -> Iterable[FromEngine | float]:
        return fails(generate) if generate.room == 7 else [60.0]

    async with serving(script, tmp_path) as node:
        response = await node.post("/v1/completions", **BODY, n=2)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")
        assert response.json()["error"]["message"] == "room 7: the prefill node is gone"
        other = node.engine.generates[1].request_id
        await until(lambda: node.engine.aborts == [other], "the other sample was aborted")


async def test_a_failure_before_the_first_token_has_a_status(tmp_path: Path) -> None:
    what = "room 7: no prefill node at 10.0.0.1:8998"
    async with serving(plays(RequestFailed("", 503, what, PREFILL_NODE_FAILED)), tmp_path) as node:
        for stream in (False, True):
            response = await node.post("/v1/completions", **BODY, stream=stream)
            assert response.status_code == 503
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", PREFILL_NODE_FAILED)
            assert error["message"] == what
        counted = 'hisparse_pd:num_requests_total{endpoint="/v1/completions",status="503"}'
        assert await node.metric(counted) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_a_failure_in_a_stream_is_its_last_event(tmp_path: Path, path: str) -> None:
    breaks = plays(Tokens("", (97,)), RequestFailed("", 500, "the pool broke"))
    async with serving(breaks, tmp_path) as node:
        response = await node.post(path, **(BODY if path != "/generate" else NATIVE), stream=True)
        assert response.status_code == 200
        first, last, end = response.text.split("\n\n")
        assert end == ""
        assert "error" not in json.loads(first.removeprefix("data: "))
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the pool broke"


@pytest.mark.I7
@pytest.mark.I8
async def test_bad_input_reaches_no_engine(tmp_path: Path) -> None:
    async def without_a_length() -> AsyncIterator[bytes]:
        for _ in range(2):
            yield b" " * (MAX_BODY_BYTES // 2 + 1)

    async with serving(say("x"), tmp_path) as node:
        bad: list[tuple[Any, int]] = [
            (b"{", 400),
            (b"\xff\xfe", 400),
            (b"[" * 4000, 400),
            (json.dumps({**BODY, "max_tokens": -1}).encode(), 400),
            (json.dumps({**BODY, "prompt": "x" * 300}).encode(), 400),
            (json.dumps({**BODY, "model": "other"}).encode(), 404),
            (json.dumps({**BODY, "bootstrap_room": None}).encode(), 400),
            (without_a_length(), 413),
            (b" " * (MAX_BODY_BYTES + 1), 413),
        ]
        for content, status in bad:
            response = await node.client.post("/v1/completions", content=content)
            assert response.status_code == status, response.text
            assert response.headers["content-type"] == "application/json"
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert f"{MAX_BODY_BYTES} bytes" in response.json()["error"]["message"]
        assert node.engine.received == []
        missing = await node.client.get("/v2/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert (await node.client.get("/generate")).status_code == 405
        long = await node.client.get("/" + "x" * 60_000)
        assert (long.status_code, len(long.content) < 300) == (404, True)
        packed = await node.client.post("/generate", content=b"x", headers={"content-encoding": "gzip"})
        assert (packed.status_code, "Content-Encoding" in packed.text) == (415, True)


@pytest.mark.I8
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_samples(tmp_path: Path, stream: bool) -> None:
    script = plays(*[Tokens("", (97,))] * stream, 60.0)
    async with serving(script, tmp_path) as node:

        async def ask() -> None:
            body = {**BODY, "n": 2, "stream": stream}
            async with node.client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_bytes())

        asking = asyncio.create_task(ask())
        await until(lambda: len(node.engine.generates) == 2, "both samples are with the engine")
        if not stream:
            asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: len(node.engine.aborts) == 2, "both samples were aborted")
        assert set(node.engine.aborts) == {generate.request_id for generate in node.engine.generates}
        assert not any(m.has_finished for m in node.engine.received if isinstance(m, Abort))
        assert node.link.num_in_flight == 0
        name = 'hisparse_pd:num_requests_total{endpoint="/v1/completions",status="499"}'
        while await node.metric(name) != 1:
            await asyncio.sleep(0.01)


@pytest.mark.I8
async def test_a_backlog_is_not_worked_off_for_a_client_that_left(tmp_path: Path) -> None:
    """Nothing in such a stream ever waits: neither the tokens, nor writing to a connection that is gone."""

    async def backlog() -> AsyncGenerator[bytes, None]:
        for _ in range(10_000):
            yield b"data: {}\n\n"

    async def answer(work: Work) -> HttpAnswer:
        return HttpAnswer(b"data: {}\n\n", backlog())

    front = socketless_context(tmp_path, EngineLink([str(tmp_path / "unused.ipc")], 5.0))
    sent = await call_app(create_app(front, answer), "/v1/completions", BODY, leaves=True)
    assert sent[0]["status"] == 200
    assert len(sent) < 100


def test_a_client_that_leaves_amid_its_body_is_counted_and_not_answered(tmp_path: Path) -> None:
    messages = iter(
        ({"type": "http.request", "body": b'{"prompt"', "more_body": True}, {"type": "http.disconnect"})
    )
    sent: list[Message] = []

    async def receive() -> Message:
        return next(messages)

    async def send(message: Message) -> None:
        sent.append(message)

    front = socketless_context(tmp_path, EngineLink([str(tmp_path / "unused.ipc")], 5.0))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(create_decode_app(front)(scope, receive, send))
    assert sent == []
    counted = b'hisparse_pd:num_requests_total{endpoint="/v1/completions",status="499"} 1.0'
    assert counted in front.metrics.render()


@pytest.mark.I7
async def test_an_engine_that_dies_fails_what_is_in_flight(tmp_path: Path) -> None:
    async with serving(lambda generate: [60.0], tmp_path) as node:
        answer = asyncio.create_task(node.post("/v1/completions", **BODY))
        await until(lambda: node.link.num_in_flight == 1, "the request is in flight")
        node.link.engine_died()
        response = await answer
        assert response.status_code == 503
        assert "engine has died" in response.json()["error"]["message"]
        assert (await node.client.get("/health")).status_code == 503
        assert (await node.post("/v1/completions", **BODY)).status_code == 503


@pytest.mark.I7
async def test_an_engine_that_hangs_does_not_hang_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances with each message of statistics, so that an engine is not silent for being slow."""
    now = time.monotonic()
    monkeypatch.setattr(engine_reports, "time", SimpleNamespace(monotonic=lambda: now))
    async with serving(lambda generate: [60.0], tmp_path, health_timeout_secs=0.2) as node:
        node.engine.num_running = 1  # stats come, steps do not
        asking = asyncio.create_task(node.post("/v1/completions", **BODY))
        await until(lambda: node.link.num_in_flight == 1, "the request is in flight")
        while not asking.done():
            last = node.link.ranks[0].reports.stats
            await until(lambda last=last: node.link.ranks[0].reports.stats is not last, "stats")  # type: ignore[misc]
            now += 0.15
        response = await asking
        assert response.status_code == 503
        assert "no progress" in response.json()["error"]["message"]


async def test_an_h2c_preface_is_turned_away_quietly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def talk(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECS) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            return connection.recv(4096)

    async with serving(say("x"), tmp_path) as node:
        with caplog.at_level(logging.INFO):
            answer = await asyncio.to_thread(talk, node.port)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
        assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []
        assert (await node.client.get("/health")).status_code == 200


# --- information -------------------------------------------------------------------------------------


async def test_health_follows_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still between two requests."""
    now = time.monotonic()
    monkeypatch.setattr(engine_reports, "time", SimpleNamespace(monotonic=lambda: now))

    async def status(node: Node) -> tuple[int, str]:
        response = await node.client.get("/health")
        return response.status_code, response.json().get("reason", "")

    async def becomes(node: Node, status_code: int, reason: str) -> None:
        while (shown := await status(node))[0] != status_code or reason not in shown[1]:
            await asyncio.sleep(0.01)

    async with serving(say("x"), tmp_path, is_ready=False, health_timeout_secs=30.0) as node:
        assert await status(node) == (503, "the engine is loading")
        assert (await node.post("/v1/completions", **BODY)).status_code == 503
        assert (await node.client.get("/server_info")).status_code == 200
        assert (await node.client.get("/liveness")).status_code == 200
        node.engine.is_ready = True
        await until(lambda: node.link.ready is not None, "the engine is ready")
        rank = node.link.ranks[0].reports
        await becomes(node, 200, "")
        now += 31.0
        await becomes(node, 200, "")  # idle is healthy
        node.engine.num_running = 1
        await until(lambda: (stats := rank.stats) is not None and stats.num_running == 1, "it has work")
        now += 31.0
        await becomes(node, 503, "no progress")
        node.engine.step += 1
        await becomes(node, 200, "")
        node.engine.is_silent = True
        while (await status(node))[0] == 200:  # what it has said already may yet come
            now += 31.0
        assert "silent" in (await status(node))[1]
        assert (await node.client.get("/liveness")).status_code == 503
        node.engine.is_silent = False
        node.engine.num_running = 0
        await becomes(node, 200, "")


async def test_loading_shows_how_far_it_is_and_that_it_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(say("x"), tmp_path, is_ready=False) as node:
        now = time.monotonic()
        monkeypatch.setattr(engine_reports, "time", SimpleNamespace(monotonic=lambda: now))

        def tell(stage: str, num_done: int = 0, num_bytes: int = 0) -> None:
            node.link.handle(node.link.ranks[0], EngineLoading(stage, num_done, num_bytes))

        async def told(path: str) -> tuple[int, Any]:
            answer = await node.client.get(path)
            return answer.status_code, answer.json()

        tell("weights", 250_000_000, 1_000_000_000)
        loading = {"stage": "weights", "num_done": 250_000_000, "num_bytes": 1_000_000_000}
        reason = "the engine is loading: weights, 0.2 of 1.0 GB"
        assert await told("/health") == (503, {"status": "loading", "reason": reason, "loading": loading})
        now += 899
        tell("weights", 250_000_001, 1_000_000_000)
        now += 899  # 1,798 since the first, 899 since the last progress
        assert (await told("/liveness"))[0] == 200
        assert (await told("/health"))[1]["status"] == "loading"
        tell("weights", 250_000_001, 1_000_000_000)  # the same again
        now += 2
        reason = "loading has stood still for 901 s, at: weights, 0.3 of 1.0 GB"
        stands_still = {"status": "unavailable", "reason": reason}
        assert await told("/liveness") == await told("/health") == (503, stands_still)
        tell("pools")
        assert (await told("/liveness"))[0] == 200
        assert (await told("/health"))[1]["reason"] == "the engine is loading: pools"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_information(role: str, tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path, role=role) as node:
        for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            response = await node.client.get(path)
            assert response.status_code == 200
            assert "model_path" not in response.text  # a router would load a tokenizer from it
            assert str(tmp_path) not in response.text
            assert response.json()["served_model_name"] == "tiny"
            assert response.json()["context_length"] == 256
        assert (await node.client.get("/version")).json() == {"version": VERSION}
        info = (await node.client.get("/server_info")).json()
        assert info["disaggregation_mode"] == role
        assert (info["transfer_protocol"], info["transfer_devices"]) == ("rdma", ["mlx5_0", "mlx5_1"])
        assert info["transfer_reason"] == "RDMA devices usable"
        (rank,) = info["ranks"]
        assert (rank["numa_node"], rank["numa_placement"]) == (1, "node 1, that of cuda:5")
        await until(lambda: node.link.ranks[0].reports.stats is not None, "stats")
        metrics = await node.client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert 'hisparse_pd:requests_total{mode="dense"} 3.0' in metrics.text.splitlines()
        load = (await node.client.get("/get_load")).json()
        assert load == [{"dp_rank": 0, "num_reqs": 1, "num_waiting_reqs": 1, "num_tokens": 17}]
        status = (await node.client.get("/status")).json()
        assert (status["role"], [rank["dp_rank"] for rank in status["ranks"]]) == (role, [0])
        assert status["ranks"][0]["numbers"]["requests_total"] == {"dense": 3}
        models = (await node.client.get("/v1/models")).json()
        assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("tiny", 256)]
        assert (await node.client.get("/v1/models/tiny")).json() == models["data"][0]
        missing = await node.client.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await node.client.post("/flush_cache")).status_code == 200
        await until(lambda: FlushCache() in node.engine.received, "the engine was told")


async def test_information_about_the_tokenizer(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path) as node:
        tokenizer = await node.client.get("/tokenizer_info")
        assert str(tmp_path) not in tokenizer.text
        assert tokenizer.json()["eos_token"] == TOKENIZER.eos_token
        assert tokenizer.json()["chat_template"] == TOKENIZER.chat_template
        assert (await node.client.get("/model_info")).json()["vocab_size"] == len(TOKENIZER)


async def test_models_as_anthropics_client_reads_them(tmp_path: Path) -> None:
    async with serving(say("x"), tmp_path) as node:
        node.client.headers["anthropic-version"] = "2023-06-01"
        listing = (await node.client.get("/v1/models")).json()
        (model,) = listing["data"]
        assert listing == {"data": [model], "has_more": False, "first_id": "tiny", "last_id": "tiny"}
        assert (await node.client.get("/v1/models/tiny")).json() == model
        assert datetime.fromisoformat(model.pop("created_at")) <= datetime.now(UTC)
        assert model == {"type": "model", "id": "tiny", "display_name": "tiny"}
        missing = await node.client.get("/v1/models/other")
        assert missing.status_code == 404
        assert (missing.json()["type"], missing.json()["error"]["type"]) == ("error", "not_found_error")


def test_metrics_of_the_engine() -> None:
    metrics = FrontMetrics()
    assert "engine_steps" not in metrics.render().decode()
    labelled: dict[str, Any] = {
        'requests_total{mode="hisparse"}': 5.0,
        'dropped_total{reason="late",peer="a"}': 1.0,
    }
    metrics.update(0, stats(41, **labelled))
    lines = metrics.render().decode().splitlines()
    for line in (
        *('requests_total{mode="dense"} 3.0', 'requests_total{mode="hisparse"} 5.0'),
        *("kv_transfer_bytes_total 7.0", 'pool_used_tokens{pool="host"} 42.0', "engine_steps_total 41.0"),
        'dropped_total{peer="a",reason="late"} 1.0',
    ):
        assert f"hisparse_pd:{line}" in lines
    kinds = {"requests_total": "counter", "pool_used_tokens": "gauge"}
    for name, kind in (kinds | {"time_to_first_token_seconds": "histogram"}).items():
        assert lines.count(f"# TYPE hisparse_pd:{name} {kind}") == 1


# --- the front process -------------------------------------------------------------------------------


TROUBLES = {
    "port in use": "127.0.0.1:{port}",
    "no checkpoint": "missing: no such directory",
    "bad defaults": "generation_config.json: top_p: 7 must be `float` <= 1.0; correct it, or start all",
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_front_that_cannot_start_says_why(
    tmp_path: Path, trouble: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "setup_logging", lambda level, name: None)
    if trouble == "bad defaults":
        (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with Listener("127.0.0.1", 0).socket as taken:
        port = taken.getsockname()[1]
        model_path = tmp_path / "missing" if trouble == "no checkpoint" else tmp_path
        status = node.run_front(
            DecodeSettings(model_path=model_path, port=port),
            role="decode",
            engine=_never,
            check=SamplingDefaults.of,
            ports=(port,),
            apps=lambda _: contextlib.nullcontext(()),
        )
    assert status == 1
    (line,) = caplog.messages
    assert TROUBLES[trouble].format(port=port) in line


def test_nobody_else_reaches_the_socket_of_an_engine(tmp_path: Path) -> None:
    process = first_front.EngineProcesses(_never, DecodeSettings(model_path=tmp_path), "engine")
    directory = Path(process.endpoints_of(0)[0].removeprefix("ipc://")).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    process.stop(graceful=False)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("device", "operators", "expected"),
    [
        ("cpu", {}, "1000"),
        ("cpu", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("cpu", {"OMP_WAIT_POLICY": "active"}, None),
        ("cuda", {}, None),
    ],
)
def test_engines_on_a_cpu_spin_briefly_unless_the_operator_says_how_they_wait(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    operators: dict[str, str],
    expected: str | None,
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in operators.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    settings = DecodeSettings(model_path=tmp_path, device=device)
    processes = first_front.EngineProcesses(_never, settings, "engine")
    others = multiprocessing.active_children()
    try:
        processes.start()
        assert dict(os.environ) == before, "other processes are none of its business"
        (engine,) = set(multiprocessing.active_children()) - set(others)
        process = Path(f"/proc/{engine.pid}")
        wait_until(lambda: "spawn_main" in (process / "cmdline").read_text(), "the interpreter of the engine")
        given = (process / "environ").read_text().split("\0")
        assert [entry for entry in given if entry.startswith("GOMP_SPINCOUNT=")] == (
            [] if expected is None else [f"GOMP_SPINCOUNT={expected}"]
        )
    finally:
        processes.stop(graceful=False)


def _never(settings: DecodeSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    raise AssertionError("no engine is started")
