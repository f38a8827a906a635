"""Figures of prefixes and conversations, on known records and on scripted endpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.types import Send

from tests.unit.router.cluster import Behaviour, FakeNode, answer, serving
from tests.waiting import WAIT_SECS
from tools.bench.pair import Pair
from tools.bench.served import Served
from tools.bench.streamed_load import Client, EndpointError, Record
from tools.bench.tiers import __main__ as tiers
from tools.bench.tiers import conversations
from tools.bench.tiers.prefixes import Cell, Tier, Turns, is_from, rows_of
from tools.bench.tiers.prompts import Prompts

pytestmark = pytest.mark.anyio

PROMPTS = Prompts("tiny", (3, 250), 0)


def found(by_tier: Mapping[str, int], num_held: int = 640, ttft_secs: float = 0.5) -> Record:
    answer = Served(700, 4, sum(by_tier.values()), by_tier, num_held)
    phases = {"tokenize": 0.01, "queue": 0.01, "landing": 0.02, "prefill": 0.02, "first_step": 0.04}
    return Record(1.0, 2.0, [1.0 + ttft_secs], answer, phase_secs=phases)


# --- prefixes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "record", "expected"),
    [
        ("host", found({"device": 0, "host": 640}), True),
        ("host", found({"device": 64, "host": 576}), False),
        ("host", found({"host": 576}), False),
        ("host", found({"host": 640}, num_held=0), False),
        ("computed", found({"device": 0}), True),
        ("computed", found({"decode": 64}), False),
        ("computed", Record(1.0, 2.0, [1.5]), False),
    ],
)
def test_a_turn_counts_where_its_whole_prefix_was_in_the_tier(
    tier: Tier, record: Record, expected: bool
) -> None:
    assert is_from(tier, 640, record) is expected


def test_an_idle_prefix_counts_where_all_of_it_came_back() -> None:
    assert is_from("idle", 640, found({"device": 640}), 640)
    assert not is_from("idle", 640, found({"device": 640}), 576)
    assert not is_from("idle", 640, found({"device": 640}, num_held=576), 640)
    turns = turns_of(2048, 650)
    dense, hisparse = (
        turns.figures(Cell("idle", 650, mode), [found({}), found({})], [640, 0]) for mode in ("false", "true")
    )
    assert (dense["astray"], hisparse["astray"]) == (1, 1)
    with_kv, keys_alone = rows_of([dense, hisparse], token_bytes=1000, link_bytes_per_sec=6.4e6)
    assert (with_kv["on the link, ms"], keys_alone["on the link, ms"]) == (pytest.approx(100), None)


def turns_of(pool_tokens: int, *contexts: int) -> Turns:
    client = Client("http://127.0.0.1:1/v1", WAIT_SECS)
    return Turns(client, PROMPTS, Pair("", "", ""), 10, 64, pool_tokens, contexts)


def test_the_others_have_no_room_in_the_pool_beside_a_prefix() -> None:
    turns = turns_of(270_336, 65_536, 131_072)
    assert [prefix.number for prefix in turns.prefixes.values()] == [0, 1]
    others = turns.others(turns.pool_tokens)
    assert [prefix.number for prefix in others] == [2, 3, 4]
    assert sum(prefix.num_tokens for prefix in others) >= turns.pool_tokens


def test_the_bound_is_that_of_the_bytes_behind_the_ttft_on_the_device() -> None:
    turns = turns_of(2048, 650)
    records = {
        "device": [found({"device": 640}, ttft_secs=secs) for secs in (0.1, 0.3, 0.2)],
        "host": [found({"host": 640}), found({"device": 640}, ttft_secs=0.1)],
        "decode": [found({})],
    }
    cells = [turns.figures(Cell(tier, 650, "true"), each) for tier, each in records.items()]  # type: ignore[arg-type]
    device, host, decode = rows_of(cells, token_bytes=1000, link_bytes_per_sec=6.4e6)
    assert (device["TTFT, ms"], device["min"], device["max"], device["bound, ms"]) == (
        pytest.approx(200),
        pytest.approx(100),
        pytest.approx(300),
        None,
    )
    assert device["outside engines, ms"] == pytest.approx(130), (
        "a landing has the prefill node's phases in it"
    )
    phases = "tokenize 10.0 queue 10.0 landing 20.0 prefill 20.0 first_step 40.0"
    assert (device["phases, ms"], decode["phases, ms"]) == (phases, "")
    assert (host["TTFT, ms"], host["turns"], host["astray"]) == (pytest.approx(500), 1, 1)
    assert host["MB"] == pytest.approx(0.64)
    assert (host["on the link, ms"], host["bound, ms"]) == (pytest.approx(100), pytest.approx(330))
    assert (decode["TTFT, ms"], decode["turns"], decode["astray"]) == (None, 0, 1)
    unknown = rows_of(cells[1:], token_bytes=1000, link_bytes_per_sec=0.0)
    assert [row["bound, ms"] for row in unknown] == [None, None]


async def test_a_failed_turn_names_its_error(tmp_path: Path) -> None:
    async with serving(FakeNode(refused)) as url, Client(f"{url}/v1", WAIT_SECS) as client:
        turns = Turns(client, PROMPTS, Pair(url, url, url), 10, 64, 2048, (650,))
        with pytest.raises(EndpointError, match=r"HTTP 503: .*full"):
            await turns.lay(["true"], with_others=False)


# --- conversations --------------------------------------------------------------------------------------


async def refused(_: FakeNode, send: Send) -> None:
    await answer(send, b'{"error": "full"}', 503)


async def two_tokens(node: FakeNode, send: Send) -> None:
    prompt: list[int] = node.body(len(node.requests) - 1)["prompt"]
    details = {"cached_tokens": 64, "cached_tokens_details": {"host": 64}}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 2, "prompt_tokens_details": details}
    events = [
        {"choices": [{"text": "a", "token_ids": [1000]}]},
        {"choices": [{"text": "b", "token_ids": [1001], "finish_reason": "length"}], "usage": usage},
    ]
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    await answer(send, data, content_type="text/event-stream")


async def held(behaviour: Behaviour, plan: conversations.Plan) -> tuple[dict[str, Any], list[list[int]]]:
    """Hold conversations with a scripted endpoint. Returns their figures, and the prompts that it got."""
    node = FakeNode(behaviour)
    async with serving(node) as url, Client(f"{url}/v1", WAIT_SECS) as client:
        figures = await conversations.converse(client, PROMPTS, plan, time.monotonic() + WAIT_SECS)
    return figures, [json.loads(content)["prompt"] for _, _, content in node.requests]


async def test_each_turn_has_all_that_was_said_before() -> None:
    figures, (first, second, third) = await held(two_tokens, conversations.Plan(1, 3, 100, 10, 2, "true"))
    assert (len(first), len(second), len(third)) == (100, 112, 124)
    assert second[:102] == [*first, 1000, 1001]
    assert third[:114] == [*second, 1000, 1001]
    assert (figures["is_whole"], figures["num_ok"]) == (True, 3)
    assert (figures["prompt_tokens"], figures["cached_by_tier"]) == (336, {"host": 192})
    assert figures["later_ttft_secs"]["count"] == 2
    assert [each["turn"] for each in figures["requests"]] == [0, 1, 2]
    row = conversations.row("tiers", figures)
    assert (row["answered"], row["host"], row["computed"]) == (3, 192, 144)


async def test_conversations_have_nothing_in_common() -> None:
    _, prompts = await held(two_tokens, conversations.Plan(3, 1, 100, 10, 2, "true"))
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 3


async def test_a_conversation_ends_with_the_turn_that_fails() -> None:
    figures, prompts = await held(refused, conversations.Plan(2, 3, 100, 10, 2, "true"))
    assert len(prompts) == 2
    assert (figures["is_whole"], figures["num_ok"], figures["errors"]) == (False, 0, {"HTTP 503": 2})


async def test_what_was_said_by_the_deadline_is_reported() -> None:
    plan = conversations.Plan(1, 3, 100, 10, 2, "true")
    async with Client("http://127.0.0.1:1/v1", WAIT_SECS) as client:
        figures = await conversations.converse(client, PROMPTS, plan, time.monotonic())
    assert (figures["is_whole"], figures["num_ok"], figures["requests"]) == (False, 0, [])


# --- the command ----------------------------------------------------------------------------------------


def test_pairs_without_time_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    status = tiers.main(["--model-path", str(tmp_path), "--seconds", "5", "--out", str(out)])
    assert status == 1
    report = json.loads(out.with_suffix(".json").read_text())
    assert report["missing"] == [f"pair {name}: no time is left for it" for name in ("tiers", "none")]
    assert "pair none: no time is left for it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model-path"),
        (["--model-path", "x", "--context"], "nothing would be measured"),
        (["--model-path", "x", "--pairs", "store", "--context", "--conversations", "1"], "nothing would be"),
        (["--model-path", "x", "--token-range", "9", "9"], "--token-range 9 9 has no token"),
        (["--model-path", "x", "--repeats", "0"], "--repeats: 0 is below 1"),
    ],
)
def test_wrong_options_exit_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        tiers.parse(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


async def test_only_the_tiers_that_are_asked_for_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the tier "host", nothing is sent to fill the prefill node's pool."""
    monkeypatch.setattr(Turns, "figures", lambda turns, cell, *_: {"astray": 0, **cell._asdict()})
    monkeypatch.setattr(tiers.Run, "rows", [{}])
    words = ["--tiers", "device", "--context", "650", "--hisparse", "true", "--repeats", "2"]
    options = tiers.parse(["--model-path", "x", "--out", str(tmp_path / "out"), *words])
    run, node = tiers.Run(options, Console(), 0.0), FakeNode(two_tokens)
    async with serving(node) as url, Client(f"{url}/v1", WAIT_SECS) as client:
        turns = Turns(client, PROMPTS, Pair(url, url, url), 10, 64, 2048, (650,))
        await run._measure_prefixes("tiers", turns)
    assert [cell["tier"] for cell in run.cells] == ["device"]
    assert len(node.requests) == 4, "one to lay the prefix, one that is not counted, and two"


def test_options_tell_the_pairs_apart() -> None:
    options = tiers.parse(["--model-path", "x", "--pair-options=--device cuda --name 'a b'"])
    run = tiers.Run(options, Console(), 0.0)
    with ExitStack() as services:
        assert run.words("tiers", services)[:3] == ["--device", "cuda", "--name"]
        assert run.words("tiers", services)[-2:] == ["--host-cache-tokens=262144", "--read-held=all"]
        assert run.words("none", services)[-2:] == ["--host-cache-tokens=0", "--read-held=off"]
