"""Traces of Mooncake's format: reading them, their prompts, the LRU, and replays to scripted endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Send

from tests.unit.router.cluster import FakeNode, answer, serving
from tools.bench.replay import __main__ as replay
from tools.bench.replay.lru import Found, TieredLru
from tools.bench.replay.trace import PromptMaker, Scale, TraceError, TraceRequest, read_trace
from tools.bench.streamed_load import EndpointError, Record

pytestmark = pytest.mark.anyio


def line(timestamp: float, length: int, *ids: int, output_length: int = 600) -> str:
    fields = {"timestamp": timestamp, "input_length": length, "output_length": output_length}
    return json.dumps(fields | {"hash_ids": ids})


LINES = (
    line(0, 1100, 7, 8, 9),
    line(100, 1536, 7, 8, 10),
    line(250, 1100, 7, 8, 9),
    line(300, 90, 11),
)


def write(directory: Path, *lines: str) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


# --- the trace ------------------------------------------------------------------------------------------


def test_a_trace_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = write(tmp_path, *LINES)
    requests = read_trace(path)
    assert requests[0] == TraceRequest(0, 1100, 600, (7, 8, 9))
    assert [request.timestamp for request in requests] == [0, 100, 250, 300]
    assert read_trace(path, 2) == requests[:2]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "it has no requests"),
        (["{"], "line 1: "),
        ([LINES[0], line(1, 1025, 7, 8)], "line 2: 2 hash_ids, and 1025 tokens have 3 blocks"),
        ([line(0, 0)], "line 1: .*input_length"),
        ([line(0, 5, -1)], "line 1: .*hash_ids"),
        ([LINES[0], line(1, 600, 3, 8)], "line 2: id 8 follows 3 here and 7 above"),
        ([LINES[1], LINES[0]], "line 2: its timestamp is before"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read_trace(write(tmp_path, *lines))


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("block_tokens", "num_tokens", "keys"),
    [
        (64, 138, [(7, 64), (8, 64)]),
        (128, 275, [(7, 64), (7, 128), (8, 64), (8, 128)]),
        (32, 69, [(8, 32)]),
    ],
)
def test_a_prompt_is_scaled_with_its_pages(
    block_tokens: int, num_tokens: int, keys: list[tuple[int, int]]
) -> None:
    request = TraceRequest(0, 1100, 1, (7, 8, 9))
    assert Scale(block_tokens).num_tokens(1100) == num_tokens
    assert Scale(block_tokens).page_keys(request, 64) == keys


def test_the_page_of_the_last_token_is_not_shared() -> None:
    assert Scale(64).page_keys(TraceRequest(0, 1024, 1, (7, 8)), 64) == [(7, 64)]


def test_prompts_share_as_many_tokens_as_ids() -> None:
    maker = PromptMaker(Scale(64), (3, 250), seed=0)
    first = maker.prompt(TraceRequest(0, 1100, 1, (7, 8, 9)))
    second = maker.prompt(TraceRequest(0, 1536, 1, (7, 8, 10)))
    assert (len(first), len(second)) == (138, 192)
    assert first[:128] == second[:128]
    assert first[128:] != second[128:138]
    assert first[:64] != first[64:128]
    assert all(3 <= token < 250 for token in first)
    assert maker.prompt(TraceRequest(5, 1030, 9, (7, 8, 9))) == first[:129]
    assert PromptMaker(Scale(64), (3, 250), seed=1).prompt(TraceRequest(0, 1100, 1, (7, 8, 9))) != first


# --- the LRU --------------------------------------------------------------------------------------------


def test_a_history_of_two_tiers() -> None:
    lru = TieredLru(3, 5)
    history = [
        ("abc", Found(0, 0)),
        ("abd", Found(2, 0)),  # c leaves the device
        ("abc", Found(2, 1)),  # d leaves the device
        ("xyz", Found(0, 0)),  # d and c leave main memory
        ("abc", Found(0, 2)),  # z leaves main memory
        ("wxy", Found(0, 0)),  # x and y are in main memory, and w is not
        ("pqrs", Found(0, 0)),  # s leaves the device at once
        ("pqrs", Found(3, 1)),
    ]
    assert [(pages, lru.use(pages)) for pages, _ in history] == history


def test_without_main_memory_nothing_is_found_there() -> None:
    lru = TieredLru(2, 0)
    assert [lru.use("abc"), lru.use("abc")] == [Found(0, 0), Found(2, 0)]


# --- replays ----------------------------------------------------------------------------------------------


POOLS = {"pool_total_tokens": {"kv": 640.0, "host": 6400.0}}
STATUS = {
    "nodes": [
        {"kind": "prefill", "load": {"role": "prefill", "ranks": [{"dp_rank": 0, "numbers": POOLS}]}},
        {"kind": "decode", "load": {"role": "decode", "ranks": []}},
    ]
}


@dataclass
class CachingEndpoint(FakeNode):
    """A router whose prefill node has room for everything; it finds prompts by their tokens."""

    status: Any = None
    pages: set[tuple[int, ...]] = field(default_factory=set)
    num_begun: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["path"] == "/status":
            await answer(send, json.dumps(self.status).encode())
            return
        await super().__call__(scope, receive, send)


async def cached(endpoint: FakeNode, send: Send) -> None:
    assert isinstance(endpoint, CachingEndpoint)
    prompt: list[int] = endpoint.body(endpoint.num_begun)["prompt"]
    endpoint.num_begun += 1
    pages = [tuple(prompt[:end]) for end in range(64, len(prompt), 64)]
    num_cached = 64 * sum(page in endpoint.pages for page in pages)
    endpoint.pages |= set(pages)
    details = {"cached_tokens": num_cached, "cached_tokens_details": {"device": num_cached, "host": 0}}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 2, "prompt_tokens_details": details}
    chunk = {"choices": [{"index": 0, "text": "ab", "finish_reason": "length"}], "usage": usage}
    await answer(send, b"data: " + json.dumps(chunk).encode() + b"\n\n", content_type="text/event-stream")


async def refused(_: FakeNode, send: Send) -> None:
    await answer(send, b'{"error": "full"}', 503)


async def main_beside(*words: str) -> int:
    return await asyncio.to_thread(replay.main, words)


async def replayed(
    endpoint: CachingEndpoint, directory: Path, *words: str
) -> tuple[int, dict[str, Any] | None]:
    """Replay LINES. Returns the exit status and the report, if there is one."""
    out = directory / "run"
    async with serving(endpoint) as url:
        trace = str(write(directory, *LINES))
        arguments = ["--url", f"{url}/v1", "--trace", trace, "--block-tokens", "64", "--out", str(out)]
        status = await main_beside(*arguments, *words)
    report = out.with_suffix(".json")
    return status, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.parametrize("words", [["--concurrency", "1"], ["--speed", "100000"]], ids=["closed", "open"])
async def test_a_cache_with_room_for_all_finds_what_the_lru_finds(
    tmp_path: Path, words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = CachingEndpoint(cached, status=STATUS)
    status, report = await replayed(endpoint, tmp_path, *words, "--max-output-tokens", "20")
    assert (status, report is not None) == (0, True)
    assert report is not None
    sent = [json.loads(content) for _, _, content in endpoint.requests]
    assert sorted(len(body["prompt"]) for body in sent) == [12, 138, 138, 192]
    assert [row["num_prompt_tokens"] for row in report["requests"]] == [138, 192, 138, 12]
    assert {body["max_tokens"] for body in sent} == {20}
    figures = ("prompt_tokens", "cached_tokens", "computed_tokens")
    assert [report[name] for name in figures] == [480, 256, 224]
    assert [report["lru"][name] for name in figures] == [480, 256, 224]
    assert report["cached_by_tier"] == report["lru"]["cached_by_tier"] == {"device": 256, "host": 0}
    assert report["lru"]["capacity_tokens"] == {"device": 640, "host": 6400}
    assert "LRU: 640 tokens on the device, 6,400 in main memory" in capsys.readouterr().out


async def test_answers_are_as_long_as_in_the_trace_and_scaled(tmp_path: Path) -> None:
    endpoint = CachingEndpoint(cached, status=STATUS)
    await replayed(endpoint, tmp_path, "--requests", "1", "--extra-body", '{"hisparse": true}')
    assert (endpoint.body()["max_tokens"], endpoint.body()["hisparse"]) == (75, True)


async def test_a_smaller_lru_is_told_by_options(tmp_path: Path) -> None:
    endpoint = CachingEndpoint(cached)
    words = ("--device-tokens", "64", "--host-tokens", "0", "--concurrency", "1")
    status, report = await replayed(endpoint, tmp_path, *words)
    assert status == 0
    assert report is not None
    assert report["lru"]["cached_by_tier"] == {"device": 128, "host": 0}
    rows = replay.token_rows(report)
    assert [row["computed"] for row in rows] == [224, 352, pytest.approx(-100 * 128 / 352)]


async def test_a_router_that_does_not_say_its_pools_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = CachingEndpoint(cached, status={"nodes": [{"kind": "prefill", "load": None}]})
    assert await replayed(endpoint, tmp_path) == (1, None)
    assert "give --device-tokens and --host-tokens" in capsys.readouterr().out
    assert endpoint.requests == []


async def test_requests_that_fail_are_told_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = await replayed(CachingEndpoint(refused, status=STATUS), tmp_path)
    assert status == 1
    assert report is not None
    assert (report["num_ok"], report["prompt_tokens"], report["lru"]["prompt_tokens"]) == (0, 0, 0)
    assert '4 x HTTP 503: {"error": "full"}' in capsys.readouterr().out


def test_pools_of_several_prefill_nodes_add_up() -> None:
    without_host = {"pool_total_tokens": {"kv": 100.0}}
    node = {"kind": "prefill", "load": {"ranks": [{"numbers": POOLS}, {"numbers": without_host}]}}
    assert replay.capacities_of({"nodes": [node]}) == {"device": 740, "host": 6400}
    with pytest.raises(EndpointError, match="KeyError: 'nodes'"):
        replay.capacities_of({})


def test_what_makes_a_comparison_wrong_is_noted() -> None:
    lru = {"prompt_tokens": 100}
    assert replay.notes({"prompt_tokens": 100, "cached_by_tier": {"decode": 0}, "lru": lru}) == []
    found = replay.notes({"prompt_tokens": 101, "cached_by_tier": {"decode": 64}, "lru": lru})
    assert "counts 101 prompt tokens, and 100 were sent" in found[0]
    assert "the decode node had 64 tokens" in found[1]


def test_a_request_that_failed_did_not_touch_the_lru() -> None:
    requests = [TraceRequest(0, 1100, 1, (7, 8, 9))] * 2
    records = [Record(0.0, 1.0, error_class="timeout"), Record(1.0, 2.0)]
    found = replay.of_lru(records, requests, Scale(64), 64, {"device": 640, "host": 640})
    assert (found["prompt_tokens"], found["cached_tokens"]) == (138, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--trace"),
        (["--trace", "x", "--block-tokens", "0"], "--block-tokens: 0 is below 1"),
        (["--trace", "x", "--token-range", "9", "9"], "--token-range 9 9 has no token"),
        (["--trace", "x", "--speed", "-1"], "--speed -1.0 is below 0"),
        (["--trace", "x", "--extra-body", "[1]"], "expected a JSON object"),
    ],
)
def test_wrong_options_exit_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        replay.parse(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
