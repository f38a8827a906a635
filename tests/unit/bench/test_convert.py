"""Sessions of coding agents become traces of Mooncake's format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench.replay.convert import Sessions, main, merged, read_agentx, read_tracelab
from tools.bench.replay.trace import TraceError, TraceRequest, read_trace


def write(path: Path, *objects: Any) -> Path:
    text = "".join(f"{json.dumps(each)}\n" for each in objects).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def ids_of(sessions: Sessions) -> list[list[tuple[int, ...]]]:
    return [[request.hash_ids for request in requests] for requests in sessions.requests]


# --- AgentX ---------------------------------------------------------------------------------------------


def call(at: float, length: int, *ids: int, kind: str = "s", new: int = 7) -> dict[str, Any]:
    fields: dict[str, Any] = {"t": at, "type": kind, "model": "m", "in": length, "out": new}
    return {**fields, "hash_ids": ids, "stop": "tool_use", "api_time": 1.5, "think_time": None}


def agent(at: float, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"t": at, "type": "subagent", "agent_id": "a", "status": "completed", "requests": calls}


def session(*parts: dict[str, Any], scope: str = "local", block: int = 64) -> dict[str, Any]:
    return {"id": "i", "models": ["m"], "block_size": block, "hash_id_scope": scope, "requests": parts}


def test_calls_of_agentx_share_their_leading_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path / "traces.jsonl",
        session(
            call(0.0, 150, 1, 2),
            call(5.5, 150, 1, 2, kind="n"),
            call(9.0, 260, 1, 2, 3, 4, new=90),
            call(12.0, 200, 1, 9, 3),
        ),
    )
    found = read_agentx([path])
    (requests,) = found.requests
    assert [(each.timestamp, each.input_length, each.output_length) for each in requests] == [
        *((0, 150, 7), (5500, 150, 7)),
        *((9000, 260, 90), (12000, 200, 7)),
    ]
    first, same, longer, other = (each.hash_ids for each in requests)
    assert list(map(len, (first, same, longer, other))) == [3, 3, 5, 4]
    assert first == same, "one prompt was sent twice"
    assert longer[:2] == first[:2]
    assert first[2] not in longer, "the last block of the shorter prompt is not whole"
    assert other[0] == first[0]
    assert not {*other[1:]} & {*first, *longer}, "a block behind another one is another block"
    assert (found.block_tokens, found.num_left_out) == (64, 0)


def test_subagents_lie_in_their_sessions_at_times_of_the_same_clock(tmp_path: Path) -> None:
    parts = (call(0, 64, 1), agent(2, call(2, 64, 5), call(4, 128, 5, 6)), call(3, 128, 1, 2))
    (requests,) = read_agentx([write(tmp_path / "one.json", session(*parts))]).requests
    assert [each.timestamp for each in requests] == [0, 2000, 3000, 4000]
    ids = [each.hash_ids for each in requests]
    assert ids[2][:1] == ids[0]
    assert ids[3][:1] == ids[1]


@pytest.mark.parametrize(("scope", "num_ids"), [("local", 4), ("global", 2)])
def test_ids_are_those_of_a_session_or_of_all(tmp_path: Path, scope: str, num_ids: int) -> None:
    """A folder has a session a file."""
    for name in ("a.json", "b.json"):
        write(tmp_path / name, session(call(0, 128, 1, 2), scope=scope))
    found = read_agentx([tmp_path])
    assert len({number for requests in ids_of(found) for ids in requests for number in ids}) == num_ids


def test_calls_that_read_nothing_are_left_out(tmp_path: Path) -> None:
    found = read_agentx([write(tmp_path / "a.json", session(call(0, 0), call(1, 130)))])
    assert found.num_left_out == 1
    assert list(map(len, ids_of(found)[0])) == [3], "a prompt without ids has blocks, too"


def test_sessions_with_other_blocks_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", session(call(0, 1)), session(call(0, 1), block=16))
    with pytest.raises(TraceError, match=r"a\.jsonl: blocks of 16 tokens behind ones of 64"):
        read_agentx([path])
    assert len(read_agentx([path], 1).requests) == 1


# --- TraceLab -------------------------------------------------------------------------------------------


def at(secs: int) -> str:
    return f"2026-06-01T05:40:{secs:02d}.250Z"


def tracelab_round(
    name: str, number: int, secs: int | None, total: int, prefix: int, new: int | None = 5
) -> dict[str, Any]:
    """The last of a round's inputs is at ``secs``."""
    events: list[dict[str, Any]] = []
    if secs is not None:
        events = [
            {"event_type": "tool_result", "timestamp": at(max(0, secs - 1)), "result_chars": 3},
            {"event_type": "tool_result", "timestamp": at(secs), "result_chars": 3},
            {"event_type": "text", "timestamp": at(secs + 1)},
        ]
    tokens = {"input_tokens_total": total, "prefix_tokens": prefix, "newly_append_tokens": total - prefix}
    fields = {"provider": "claude", "session_id": name, "round_index": number, "output_tokens": new}
    return {**fields, **tokens, "reasoning_output_tokens": None, "timing_events": events}


def test_rounds_of_tracelab_go_on_from_the_ones_before(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl.gz",
        tracelab_round("a", 1, 20, 500, 64),  # the provider had lost most of it
        tracelab_round("a", 0, 10, 300, 200),
        tracelab_round("a", 2, 30, 400, 130, new=None),  # compacted
    )
    found = read_tracelab([path])
    (requests,) = found.requests
    assert [(each.input_length, each.output_length) for each in requests] == [(300, 5), (500, 5), (400, 0)]
    assert [each.timestamp - requests[0].timestamp for each in requests] == [0, 10_000, 20_000]
    first, second, third = (each.hash_ids for each in requests)
    assert list(map(len, (first, second, third))) == [5, 8, 7]
    assert second[:4] == first[:4]
    assert not {*second[4:]} & {*first}
    assert third[:2] == second[:2]
    assert not {*third[2:]} & {*first, *second}


def test_sessions_of_tracelab_share_nothing_and_come_by_their_beginnings(tmp_path: Path) -> None:
    rounds = [
        tracelab_round("late", 0, 40, 128, 128),
        tracelab_round("early", 0, 5, 128, 128),
        tracelab_round("early", 1, None, 256, 128),
        tracelab_round("early", 2, 50, 0, 0),
    ]
    path = write(tmp_path / "trace.jsonl", *rounds)
    found = read_tracelab([path], block_tokens=32)
    (early,), (late,) = ids_of(found)
    assert len({*early, *late}) == 8
    assert found.num_left_out == 2, "one has no time, one no prompt"
    assert found.requests[0][0].timestamp < found.requests[1][0].timestamp
    assert read_tracelab([path], 1, 32).requests == found.requests[:1]


# --- the command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start_every", "times"), [(None, [0, 4, 10, 12]), (3.0, [0, 3, 10, 11])])
def test_sessions_are_merged_by_time(start_every: float | None, times: list[float]) -> None:
    first = [TraceRequest(1000, 1, 1, (0,)), TraceRequest(11000, 1, 1, (1,))]
    second = [TraceRequest(5000, 1, 1, (2,)), TraceRequest(13000, 1, 1, (3,))]
    found = merged([first, [], second], start_every)
    assert [each.timestamp / 1e3 for each in found] == times
    assert [each.hash_ids for each in found] == [(0,), (2,), (1,), (3,)]


def test_a_converted_trace_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(
        tmp_path / "traces.jsonl",
        session(call(0, 150, 1, 2), call(4, 260, 1, 2, 3, 4)),
        session(call(2, 70, 1)),
    )
    out = tmp_path / "trace.jsonl"
    assert main(["--format", "agentx", "--out", str(out), str(source)]) == 0
    assert "3 requests of 2 sessions, 0 left out; replay it with --trace-block 64" in capsys.readouterr().out
    requests = read_trace(out, trace_block=64)
    assert [each.timestamp for each in requests] == [0, 2000, 4000]
    assert [each.input_length for each in requests] == [150, 70, 260]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n", "no requests"),
        ('{"block_size": 64}', "line 1: Object missing required field `requests`"),
        ('{"block_size": 64, "requests": [{"type": "x"}]}', "Invalid value 'x'"),
        (None, "No such file"),
    ],
)
def test_what_is_no_session_is_refused(
    tmp_path: Path, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "source.jsonl"
    if text is not None:
        path.write_text(text)
    out = tmp_path / "out.jsonl"
    assert main(["--format", "agentx", "--out", str(out), str(path)]) == 1
    assert words in capsys.readouterr().out
    assert not out.exists()


def test_a_file_that_is_not_packed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_text("{}")
    assert main(["--format", "tracelab", "--out", str(tmp_path / "out"), str(path)]) == 1
    assert "trace.jsonl.gz: Not a gzipped file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--format", "tracelab", "--out", "o"], "PATH"),
        (["--format", "mooncake", "--out", "o", "x"], "invalid choice"),
        (["--format", "agentx", "--out", "o", "--start-every", "-1", "x"], "--start-every -1.0 is below 0"),
    ],
)
def test_wrong_options_exit_with_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
