"""Streams with a journal at a node's front: their records, and how they go on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.core.paging.prompt_keys import page_keys
from hisparse_pd.engine.messages import FromEngine, Generate, unpack_token_ids
from hisparse_pd.protocol.prompt_scores import WantedScores
from hisparse_pd.serving.api import prompt_scores
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.http.http_errors import ApiError
from tests.stream_events import said_in
from tests.unit.api.scored_prompts import scores
from tests.unit.api.scripted_engine import say, stops_after
from tests.unit.api.support import BODY, MESSAGES, NATIVE, ROOM, Node, parse, serving
from tests.waiting import WAIT_SECS, until

pytestmark = pytest.mark.anyio

HEAD = {"id": "0" * 32, "created": 7, "seed": 5}
TEXT = "abcdefgh"
IDS = list(TEXT.encode())


def asked(**fields: Any) -> dict[str, Any]:
    body = {**BODY, "prompt": "xy", "max_tokens": 8, "stream": True, "journal": HEAD}
    return {**body, **fields}


def units(text: str) -> list[tuple[str, Any]]:
    """Return pairs of events and the line behind them."""
    parts = text.split(":journal ")
    found, events = [], parts[0]
    for part in parts[1:]:
        line, _, rest = part.partition("\n\n")
        found.append((events, line if line in ("over", "leaving") else json.loads(line)))
        events = rest
    assert events == ""
    return found


async def test_each_piece_says_which_tokens_it_has(tmp_path: Path) -> None:
    async with serving(say(TEXT, per_message=3), tmp_path) as node:
        answer = await node.post("/v1/completions", **asked())
        assert answer.headers["x-hisparse-pd-journal"] == "1"
        *said, last = units(answer.text)
        assert [record[:2] for _, record in said] == [[0, IDS[:3]], [0, IDS[3:6]], [0, IDS[6:]]]
        assert said[-1][1][3] == "length"
        assert last == ("data: [DONE]\n\n", "over")
        plain = await node.post("/v1/completions", **asked(journal=None))
        assert "x-hisparse-pd-journal" not in plain.headers
        assert ":journal" not in plain.text


@pytest.mark.parametrize("num_records", [0, 1, 2, 3])
async def test_a_stream_goes_on_behind_its_records(tmp_path: Path, num_records: int) -> None:
    """It has the same events, names and time; the engine draws behind the recorded tokens."""

    def script(generate: Any) -> Any:
        return say(TEXT[generate.sampling.num_resumed_tokens :], per_message=3)(generate)

    async with serving(script, tmp_path, page_size=4) as node:
        whole = units((await node.post("/v1/completions", **asked(min_tokens=7))).text)
        records = [record for _, record in whole if isinstance(record, list)][:num_records]
        body = asked(min_tokens=7, journal_records=[records] if records else None)
        rest = units((await node.post("/v1/completions", **body)).text)
        assert "".join(events for events, _ in rest) == "".join(events for events, _ in whole[num_records:])
        if num_records == 3:
            assert len(node.engine.groups) == 1, "a sample that is over is nobody's work"
            return
        group, num_tokens = node.engine.groups[-1], 3 * num_records
        sampling = group.samples[0].sampling
        assert unpack_token_ids(group.prompt).tolist() == [*b"xy", *IDS[:num_tokens]]
        assert group.page_keys == tuple(page_keys(group.root, group.prompt, 4))
        assert group.samples[0].num_prompt_tokens == 2 + num_tokens
        bounds = (sampling.max_new_tokens, sampling.min_new_tokens, sampling.num_resumed_tokens)
        assert bounds == (8 - num_tokens, max(0, 7 - num_tokens), num_tokens)
        assert sampling.seed == 5


MARKUP = "<think>hm</think>Yes.<tool_call>write<arg_key>text</arg_key><arg_value>one</arg_value></tool_call>"
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
FUNCTION = {"name": "write", "parameters": PARAMETERS}
WITH_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]},
    "/v1/messages": {"messages": MESSAGES, "tools": [{"name": "write", "input_schema": PARAMETERS}]},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
}


@pytest.mark.usefixtures("codec")
@pytest.mark.parametrize("path", WITH_TOOLS)
async def test_the_cut_may_lie_within_any_markup(tmp_path: Path, path: str) -> None:
    """Records have a few characters each, so that ``</think>`` and all parts of a call are cut."""

    def script(generate: Generate) -> Iterable[FromEngine | float]:
        return stops_after(MARKUP[generate.sampling.num_resumed_tokens :], per_message=4)(generate)

    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**WITH_TOOLS[path], **ROOM, limit: 160, "stream": True, "journal": HEAD}
    async with serving(script, tmp_path) as node:
        whole = units((await node.post(path, **body)).text)
        records = [record for _, record in whole if isinstance(record, list)]
        undisturbed = said_in(path, "".join(events for events, _ in whole))
        assert len(records) > 1
        assert "hm" in json.dumps(undisturbed)
        assert "think>" not in json.dumps(undisturbed)
        for number in range(1, len(records)):
            rest = units((await node.post(path, **body, journal_records=[records[:number]])).text)
            text = "".join(events for events, _ in [*whole[:number], *rest])
            assert said_in(path, text) == undisturbed, records[:number]


AT_A_CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "stop of completions": ("/v1/completions", {"prompt": "xy", "stop": ["efg"]}),
    "stop of chats": ("/v1/chat/completions", {"messages": MESSAGES, "stop": ["efg"]}),
    "stop of generate": ("/generate", {"text": "xy", "sampling_params": {"stop": ["efg"]}}),
    "stop of responses": ("/v1/responses", {"input": "xy", "stop": ["efg"]}),
    "stop of messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 8, "stop_sequences": ["efg"]}),
    "echo": ("/v1/completions", {"prompt": "xy", "echo": True, "return_token_ids": True}),
    "logprobs": ("/v1/completions", {"prompt": "xy", "logprobs": 2, "n": 2}),
}


async def in_pieces(node: Node, path: str, body: dict[str, Any], least: int) -> list[tuple[str, Any]]:
    """Return the units of a stream that has ``least`` records or more. ``/generate`` has one for all messages
    that wait when it writes, so a busy machine may need several streams for that."""
    async with asyncio.timeout(WAIT_SECS):
        while True:
            whole = units((await node.post(path, **body)).text)
            if sum(isinstance(record, list) for _, record in whole) >= least:
                return whole


@pytest.mark.parametrize("case", AT_A_CUT)
async def test_a_stream_says_the_same_wherever_it_is_cut(tmp_path: Path, case: str) -> None:
    """A stop string may lie across the cut; its possible beginning is not shown before it."""
    path, fields = AT_A_CUT[case]

    def script(generate: Generate) -> Iterable[FromEngine | float]:
        return stops_after(TEXT[generate.sampling.num_resumed_tokens :], per_message=1)(generate)

    body = {**fields, **ROOM, "stream": True, "journal": HEAD}
    async with serving(script, tmp_path) as node:
        whole = await in_pieces(node, path, body, least=3)
        records = [record for _, record in whole if isinstance(record, list)]
        undisturbed = said_in(path, "".join(events for events, _ in whole))
        said = json.dumps(undisturbed)
        assert "abcd" in said
        assert ("abcde" in said) == ("stop" not in case)
        for number in range(1, len(records)):
            rest = units((await node.post(path, **body, journal_records=[records[:number]])).text)
            text = "".join(events for events, _ in [*whole[:number], *rest])
            assert said_in(path, text) == undisturbed, records[:number]


SCORED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "h€llo", "echo": True, "logprobs": 1, "n": 2, "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "prompt_logprobs": 2, "n": 2, "max_tokens": 3},
    "/generate": NATIVE | {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 1},
}


@pytest.mark.parametrize("path", SCORED)
async def test_what_was_shown_of_the_prompts_logprobs_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The lists of all events together would be longer. Each event of /generate repeats what was shown."""
    monkeypatch.setattr(prompt_scores, "_PIECE_ENTRIES", 4)
    body = {**SCORED[path], **ROOM, "stream": True, "journal": HEAD}
    async with serving(scores, tmp_path) as node:
        whole = units((await node.post(path, **body)).text)
        records = [record for _, record in whole if isinstance(record, list)]
        undisturbed = said_in(path, "".join(events for events, _ in whole))
        begun = node.engine.generates[0]
        assert begun.scores is not None
        for number in range(1, len(records)):
            num_asked = len(node.engine.generates)
            rest = units((await node.post(path, **body, journal_records=[records[:number]])).text)
            text = "".join(events for events, _ in [*whole[:number], *rest])
            assert said_in(path, text) == undisturbed, records[:number]
            shown = [0, 0]
            for record in records[:number]:
                shown[record[0]] += record[6] if len(record) == 7 else 0
            first = max(begun.scores.first, min(shown) if path == "/v1/completions" else shown[0])
            lacks = first < begun.num_prompt_tokens
            wanted = [generate.scores for generate in node.engine.generates[num_asked:]]
            assert wanted[0] == (WantedScores(first, begun.scores.num_top) if lacks else None)
            assert not any(wanted[1:]), "one sample has them computed for all"


async def test_a_sample_goes_on_behind_its_prompt_and_its_output_so_far(tmp_path: Path) -> None:
    records = [[[0, [97]], [1, [98, 99]], [2, [100], [], "stop", 100, None]]]
    async with serving(say("zz"), tmp_path) as node:
        await node.post("/v1/completions", **asked(n=4, journal_records=records, seed=40))
        groups = node.engine.groups
    prompts = [unpack_token_ids(group.prompt).tolist() for group in groups]
    assert prompts == [[*b"xy", 97], [*b"xy", 98, 99], [*b"xy"]]
    samples = [sample for group in groups for sample in group.samples]
    assert [sample.sampling.seed for sample in samples] == [40, 41, 43]
    assert [sample.sampling.num_resumed_tokens for sample in samples] == [1, 2, 0]
    assert [sample.num_prompt_tokens for sample in samples] == [3, 4, 2]


async def test_a_node_that_leaves_says_so_in_streams_and_ends_what_may_begin_anew(tmp_path: Path) -> None:
    may_go_on, has_begun = threading.Event(), asyncio.Event()

    def pauses(generate: Generate) -> Iterator[FromEngine | float]:
        for message in say("abcde")(generate):
            yield message
            while not may_go_on.is_set():
                yield 0.005

    async def ask(node: Node) -> str:
        body = {**NATIVE, "stream": True, "journal": HEAD}
        async with node.client.stream("POST", "/generate", json=body) as answer:
            chunks = answer.aiter_text()
            text = await anext(chunks)
            has_begun.set()
            return text + "".join([chunk async for chunk in chunks])

    whole = {**NATIVE, "journal": HEAD | {"may_move": True}, "journal_records": []}
    async with serving(pauses, tmp_path) as node:
        streaming = asyncio.create_task(ask(node))
        begins_anew = asyncio.create_task(node.post("/generate", **whole))
        await has_begun.wait()
        await until(lambda: len(node.engine.generates) == 2, "both have begun")
        node.link.stop_accepting()
        assert (await node.client.get("/health")).json()["status"] == "leaving"
        answer = await begins_anew
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "moved")
        may_go_on.set()
        text = await streaming
        assert text.count(":journal leaving\n\n") == 1
        lines = units(text)
        assert ("", "leaving") in lines[1:]
        assert lines[-1] == ("data: [DONE]\n\n", "over")
        refused = await node.post("/generate", **NATIVE)
        assert refused.status_code == 503


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([[[1, [97]]]], "must be one of 1 samples"),
        ([[[-1, [97]]]], "must be one of 1 samples"),
        ([[[0, [97], [], "stop"], [0, [97]]]], "one that has not ended"),
        ([[[0, [-1]]]], "journal_records"),
        ([[["a"]]], "journal_records"),
        ([[[0, [], [], None, None, None, -1]]], "journal_records"),
        ([{}], "journal_records"),
        ({}, "must be a list"),
        ([[]] * 257, "at most 256"),
    ],
)
def test_records_that_are_none(records: Any, told: str) -> None:
    with pytest.raises(ApiError, match=told):
        parse(Endpoint.COMPLETIONS, stream=True, journal=HEAD, journal_records=records)
    with pytest.raises(ApiError, match="not streamed has none"):
        parse(Endpoint.COMPLETIONS, journal=HEAD, journal_records=[[[0, [97]]]])
