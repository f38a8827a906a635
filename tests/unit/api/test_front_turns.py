"""Long bodies, prompts, backlogs and answers: a front goes on taking turns of its loop for everybody else.

Turns are counted, not timed: a busy machine changes none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import FinishReason, TokenLogprob
from hisparse_pd.decode_node.server import create_decode_app
from hisparse_pd.engine.messages import (
    FromEngine,
    Generate,
    GenerateGroup,
    RequestFailed,
    ToEngine,
    Tokens,
    pack_token_ids,
    unpack_token_ids,
)
from hisparse_pd.serving.api import answering, token_lists
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.prompts import MAX_VALUES
from hisparse_pd.serving.api.schemas import parse_request
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.http import rank_link
from hisparse_pd.serving.http.engine_link import EngineLink
from hisparse_pd.serving.http.http_errors import ApiError
from hisparse_pd.serving.http.off_loop import off_loop
from hisparse_pd.serving.http.queue_limits import QueueLimits
from hisparse_pd.serving.http.sample_group import SampleGroup
from tests.unit.api.scripted_engine import say
from tests.unit.api.support import (
    BODY,
    CODEC,
    MESSAGES,
    MINIMAL,
    NATIVE,
    ROOM,
    TOKENIZER,
    Turns,
    call_app,
    connectionless_link,
    decode_events,
    group_of,
    parse,
    serving,
    socketless_context,
)
from tests.waiting import WAIT_SECS

pytestmark = pytest.mark.anyio

TEXT = "the text"
"""Stands for texts of different lengths."""


class RecordingBackend:
    """A tokenizer that records what each call is given, and in which turn of the loop."""

    normalizer = None

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.turns_at: list[int] = []
        self.turns: Turns | None = None

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool) -> list[Any]:
        assert self.turns is not None
        self.batches.append([len(text) for text in texts])
        self.turns_at.append(self.turns.count)
        encoded: list[Any] = TOKENIZER.backend_tokenizer.encode_batch_fast(
            texts, add_special_tokens=add_special_tokens
        )
        return encoded


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize(
    ("num_prompts", "num_chars"), [pytest.param(4096, 60, marks=pytest.mark.slow), (300, 5_000), (2, 300_000)]
)
def test_many_prompts_are_tokenized_in_batches_between_which_others_have_turns(
    num_prompts: int, num_chars: int
) -> None:
    codec = TextCodec(TOKENIZER, len(TOKENIZER))
    backend = codec.backend = RecordingBackend()
    prompts = [("ab" * num_chars)[:num_chars]] * num_prompts

    async def main() -> tuple[bytes, ...]:
        backend.turns = Turns()
        packed = await codec.encode(prompts, ["prompt"] * num_prompts, 10**9)
        backend.turns.stop()
        return packed

    packed = asyncio.run(main())
    assert [len(unpack_token_ids(prompt)) for prompt in packed] == [num_chars] * num_prompts
    assert sum(map(len, backend.batches)) == num_prompts
    assert all(len(batch) <= 64 and (sum(batch) <= 1 << 18 or len(batch) == 1) for batch in backend.batches)
    assert len(set(backend.turns_at)) == len(backend.batches), "two batches in one turn of the loop"


def test_few_short_prompts_do_not_wait_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreachable(*args: object) -> None:
        raise AssertionError("a thread for a short prompt")

    monkeypatch.setattr("hisparse_pd.serving.api.text_codec.off_loop", unreachable)
    assert asyncio.run(CODEC.encode(["ab", "c"], ["x", "y"], 100)) == (b"a\0\0\0b\0\0\0", b"c\0\0\0")
    ids = pack_token_ids([1]) * (1 << 20)
    assert asyncio.run(CODEC.encode([ids, ids], ["x", "y"], 100)) == (ids, ids)  # checks take 1 ms
    with pytest.raises(AssertionError, match="a thread for"):
        asyncio.run(CODEC.encode([ids] * 4, ["x"] * 4, 100))


LONG_CALL = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"text": "a" * 5000})}}
LONG_TOOL = {"type": "function", "function": {"name": "f", "description": "a" * 5000}}


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [LONG_CALL]}]},
        {"tools": [LONG_TOOL]},
        {"messages": [{"role": "system", "content": "a", "tools": [LONG_TOOL]}]},
        {"chat_template_kwargs": {"documents_of": ["a"] * 5000}},
    ],
    ids=["calls", "tools", "tools of messages", "arguments of the template"],
)
def test_a_chat_is_written_beside_the_loop_by_all_that_the_template_gets(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = parse(Endpoint.CHAT, **fields)
    beside: list[Callable[..., Any]] = []

    async def recorded(function: Callable[..., Any], *args: Any) -> Any:
        beside.append(function)
        return [b""]

    monkeypatch.setattr("hisparse_pd.serving.api.text_codec.off_loop", recorded)
    asyncio.run(CODEC.encode(request.prompts, ["messages"], 10**6))
    assert len(beside) == 1


def calling(path: str, num_calls: int) -> dict[str, Any]:
    """Return a conversation of so many calls, each with just over a quarter of the allowed values."""
    arguments = {"list": [0] * (MAX_VALUES // 4)}
    function = {"name": "f", "arguments": json.dumps(arguments)}
    call: dict[str, Any]
    match path:
        case Endpoint.CHAT:
            call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        case Endpoint.RESPONSES:
            call = {"type": "function_call", "call_id": "c", **function}
        case _:
            block = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
            call = {"role": "assistant", "content": [block]}
    return {"input" if path is Endpoint.RESPONSES else "messages": [call, *MESSAGES] * num_calls}


@pytest.mark.I8
@pytest.mark.parametrize(
    "path",
    [
        Endpoint.CHAT,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (Endpoint.RESPONSES, Endpoint.MESSAGES)),
    ],
)
def test_the_values_of_a_conversation_are_few_enough_to_be_let_go_at_once(path: Endpoint) -> None:
    """The messages behind the call with which they are too many are not even decoded."""
    parse(path, **calling(path, 3))
    body = calling(path, 4)
    if path is Endpoint.RESPONSES:
        deep = "{" + '"a":{' * 300 + "}" * 301
        body["input"] += [{"type": "function_call", "call_id": "c", "name": "f", "arguments": deep}]
    else:
        body["messages"] += [{"role": "nobody"}]
    with pytest.raises(ApiError, match=f"more than {MAX_VALUES} JSON values") as caught:
        parse(path, **body)
    assert caught.value.status == 400


@pytest.mark.I7
@pytest.mark.I8
async def test_long_bodies_are_parsed_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed_in: list[int] = []

    async def recorded(function: Callable[..., Any], *args: Any) -> Any:
        if function is parse_request:
            parsed_in.append(len(args[1]))
        return function(*args)

    monkeypatch.setattr("hisparse_pd.serving.http.off_loop.off_loop", recorded)
    front = socketless_context(tmp_path, connectionless_link(QueueLimits(10, 10)))
    for num_chars in (10, 100_000):
        body = {**BODY, "prompt": "a" * num_chars, "n": 11}
        await call_app(create_decode_app(front), "/v1/completions", body, leaves=False)
    (num_bytes,) = parsed_in
    assert num_bytes > 100_000


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize("direction", ["receive", "send"])
def test_a_backlog_on_the_link_lets_others_have_their_turns(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ's sockets return at once while messages are waiting, so awaiting them gives others no turn."""

    class Backlog:
        num_left = 1000
        loss_fileno = None

        def __init__(self) -> None:
            self._never_readable, self._other_end = socket.socketpair()

        def fileno(self) -> int:
            return self._never_readable.fileno()

        def close(self) -> None:
            self._never_readable.close()
            self._other_end.close()

        def receive(self) -> Iterator[FromEngine]:
            for _ in range(min(64, self.num_left if direction == "receive" else 0)):
                self.num_left -= 1
                yield RequestFailed("unknown", 503, "late")

        def send(self, message: ToEngine) -> bool:
            self.num_left -= direction == "send"
            return True

        def take_loss(self) -> bool:
            return False

        def is_ready(self, *, to_send: bool) -> bool:
            return to_send or (direction == "receive" and self.num_left > 0)

    async def main() -> int:
        link = connectionless_link(QueueLimits(10**6, 10**6))
        backlog = Backlog()
        monkeypatch.setattr(rank_link, "FrontSocket", lambda *_: backlog)
        with link.open([group_of(1, 1, f"r{number}") for number in range(1000)]):
            turns = Turns()
            link.ranks[0].start()
            while backlog.num_left:
                await asyncio.sleep(0)
            turns.stop()
            link.ranks[0].close()
            return turns.count

    assert asyncio.run(main()) >= 1000 // {"receive": 64, "send": 8}[direction] - 1


@pytest.mark.I8
def test_a_backlog_of_one_request_lets_others_have_their_turns() -> None:
    async def main() -> tuple[int, int]:
        link = connectionless_link(QueueLimits(10, 10))
        with link.open([group_of(1, 1)]) as group:
            for _ in range(500):
                group.put(Tokens("r-0", (97,)))
            turns = Turns()
            await asyncio.sleep(0)
            before = turns.count
            for _ in range(500):
                await group.next_event()
            turns.stop()
            return before, turns.count

    before, after = asyncio.run(main())
    assert after - before >= 500


class Backlogged(EngineLink):
    """A link on which all of an answer has come before its first token is read."""

    num_messages = 200

    @contextlib.contextmanager
    def open(self, prompts: Sequence[GenerateGroup], *, may_move: bool = False) -> Iterator[SampleGroup]:
        with super().open(prompts, may_move=may_move) as group:
            for number in range(self.num_messages):
                reason = FinishReason.LENGTH if number == self.num_messages - 1 else None
                top = tuple((97 + k, -float(k)) for k in range(20))
                entry = TokenLogprob(97 + number % 26, -0.5, top)
                group.put(Tokens(prompts[0].samples[0].request_id, (entry.token_id,), (entry,), reason))
            yield group


WITH_LOGPROBS: dict[str, dict[str, Any]] = {
    "/v1/completions": {**BODY, "logprobs": 20},
    "/v1/chat/completions": {**ROOM, "messages": MESSAGES, "logprobs": True, "top_logprobs": 20},
    "/generate": NATIVE | {"return_logprob": True, "top_logprobs_num": 20, "return_text_in_logprobs": True},
}


@pytest.mark.I7
@pytest.mark.I8
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", WITH_LOGPROBS)
def test_logprobs_of_a_long_answer_are_encoded_message_by_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    looked_up_in: Counter[int] = Counter()

    async def main() -> bytes:
        front = socketless_context(tmp_path, Backlogged([str(tmp_path / "unused.ipc")], 5.0))
        turns = Turns()
        look_up = type(CODEC.token_bytes).of

        def counted(self: Any, token_id: int, **options: bool) -> bytes:
            looked_up_in[turns.count] += 1
            return look_up(self, token_id, **options)

        monkeypatch.setattr(type(CODEC.token_bytes), "of", counted)
        body = WITH_LOGPROBS[path] | {"stream": stream}
        sent = await call_app(create_decode_app(front), path, body, leaves=False)
        turns.stop()
        return b"".join(message.get("body", b"") for message in sent)

    answer = asyncio.run(main())
    assert answer.count(b"-19.0") == Backlogged.num_messages or path == "/generate"
    assert sum(looked_up_in.values()) >= 21 * Backlogged.num_messages, "each token was shown"
    assert sum(looked_up_in.values()) <= 30 * Backlogged.num_messages, "and no more than once"
    assert max(looked_up_in.values()) <= 60, "the work of one or two messages in a turn"


@pytest.mark.I8
@pytest.mark.parametrize("path", WITH_LOGPROBS)
async def test_a_long_answer_is_joined_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A sample's choice, and the body of all choices. Without logprobs the answer is short enough."""
    monkeypatch.setattr(answering, "_INLINE_VALUES", 20 * Backlogged.num_messages)
    sizes: list[int] = []

    async def recorded(join: Callable[..., Any], *args: Any) -> Any:
        joined = await off_loop(join, *args)
        sizes.append(len(memoryview(joined)))
        return joined

    monkeypatch.setattr(answering, "off_loop", recorded)
    front = socketless_context(tmp_path, Backlogged([str(tmp_path / "unused.ipc")], 5.0))
    await call_app(create_decode_app(front), path, MINIMAL[Endpoint(path)], leaves=False)
    assert not sizes
    sent = await call_app(create_decode_app(front), path, WITH_LOGPROBS[path], leaves=False)
    choice_bytes, whole_bytes = sizes
    assert whole_bytes >= choice_bytes > 20 * Backlogged.num_messages
    assert whole_bytes == len(b"".join(message.get("body", b"") for message in sent))


@pytest.mark.I8
@pytest.mark.parametrize("path", WITH_LOGPROBS)
async def test_only_events_that_repeat_a_long_output_are_written_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(answering, "_INLINE_VALUES", 20 * Backlogged.num_messages)
    events: list[bytes] = []

    async def recorded(write: Callable[..., bytes], *args: Any) -> bytes:
        events.append(await off_loop(write, *args))
        return events[-1]

    monkeypatch.setattr(answering, "off_loop", recorded)
    front = socketless_context(tmp_path, Backlogged([str(tmp_path / "unused.ipc")], 5.0))
    body = WITH_LOGPROBS[path] | {"stream": True}
    sent = await call_app(create_decode_app(front), path, body, leaves=False)
    assert len(events) == (path == "/generate")
    assert b"".join(events) in b"".join(message.get("body", b"") for message in sent)


@pytest.mark.I8
@pytest.mark.parametrize(("path", "num_events"), [("/generate", 1), ("/v1/completions", 200)])
async def test_generate_leaves_out_what_the_next_event_repeats(
    tmp_path: Path, path: str, num_events: int
) -> None:
    """Each event has all the text so far: a slow reader would cost the square of its length."""
    front = socketless_context(tmp_path, Backlogged([str(tmp_path / "unused.ipc")], 5.0))
    body = {**(NATIVE if path == "/generate" else BODY), "stream": True}
    sent = await call_app(create_decode_app(front), path, body, leaves=False)
    events = decode_events(b"".join(message.get("body", b"") for message in sent).decode())
    assert len(events) == num_events
    if path == "/generate":
        assert len(events[0]["text"]) == Backlogged.num_messages


# --- long prompts ----------------------------------------------------------------------------------------


@pytest.mark.I8
@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        (Endpoint.COMPLETIONS, {"prompt": TEXT}),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": TEXT}]}),
        (Endpoint.CHAT, {"messages": [{"role": "system", "content": TEXT}, *MESSAGES]}),
        (Endpoint.CHAT, {"messages": [*MESSAGES, {"role": "assistant", "content": TEXT}, *MESSAGES]}),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}),
        (Endpoint.GENERATE, {"text": TEXT}),
        (Endpoint.MESSAGES, {"messages": [{"role": "user", "content": TEXT}], "system": TEXT}),
        (Endpoint.RESPONSES, {"input": TEXT, "instructions": TEXT}),
        (Endpoint.RESPONSES, {"input": [{"role": "user", "content": TEXT}]}),
    ],
)
def test_a_text_is_not_read_character_by_character(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    """Parsing makes as many calls for a text as for one a hundred times as long."""
    calls: list[int] = []
    for text in ("x" * 100, "x" * 10_000):
        body = json.dumps(MINIMAL[endpoint] | json.loads(json.dumps(fields).replace(TEXT, text))).encode()
        parse_request(endpoint, body, "tiny")  # makes the decoders of this endpoint
        num_calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            parse_request(endpoint, body, "tiny")
        finally:
            sys.setprofile(None)
        calls.append(num_calls)
    assert calls[0] == calls[1]


@pytest.mark.I8
async def test_ids_of_prompts_are_written_beside_the_loop_while_the_engine_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's first token comes when all pieces are written."""
    monkeypatch.setattr(token_lists, "TOKENS_A_PIECE", 32)
    monkeypatch.setattr(token_lists, "_MAX_INLINE_TOKENS", 2)
    pieces: list[bytes] = []
    are_written = threading.Event()

    async def recorded(function: Callable[[int], bytes], start: int) -> bytes:
        pieces.append(await off_loop(function, start))
        if len(pieces) == 4:
            are_written.set()
        return pieces[-1]

    def waits(generate: Generate) -> Iterator[FromEngine | float]:
        assert are_written.wait(WAIT_SECS), "the prompt's ids wait for the first token"
        yield from say("ab")(generate)

    monkeypatch.setattr(token_lists, "off_loop", recorded)
    prompt = list(range(97, 197))
    async with serving(waits, tmp_path) as node:
        body = BODY | {"prompt": prompt, "return_token_ids": True}
        choices = [event["choices"][0] for event in await node.events("/v1/completions", **body)]
        assert [choice.get("prompt_token_ids") for choice in choices] == [prompt, None]
        assert [piece.count(b",") for piece in pieces] == [31, 31, 31, 3]
        pieces.clear()
        are_written.clear()
        (choice,) = (await node.answer("/v1/completions", **body))["choices"]
        assert choice["prompt_token_ids"] == prompt
        assert len(pieces) == 4


async def test_a_request_that_fails_does_not_wait_for_the_ids_of_its_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_lists, "_MAX_INLINE_TOKENS", 2)
    begun, ended = threading.Event(), list[str]()

    async def endless(function: Callable[[int], bytes], start: int) -> bytes:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
            return b""
        finally:
            ended.append("cancelled")

    def fails(generate: Generate) -> Iterator[FromEngine | float]:
        assert begun.wait(WAIT_SECS)
        yield RequestFailed(generate.request_id, 503, "lost")

    monkeypatch.setattr(token_lists, "off_loop", endless)
    async with serving(fails, tmp_path) as node:
        body = BODY | {"prompt": [97, 98, 99], "return_token_ids": True}
        for stream in (False, True):
            answer = await node.client.post("/v1/completions", json=body | {"stream": stream})
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "lost")
    assert ended == ["cancelled"] * 2
