"""Whole answers have the bytes that the events of their streams make together, whatever the engine says, and
a stream that is cut anywhere, any number of times, says in the end what it says undisturbed.

A node's front writes a stream with a journal, and the router's side of that journal decides what the client
has when the node is lost. The next node's front gets the records, and its engine goes on behind them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import FinishReason, Mode, TokenLogprob
from hisparse_pd.engine.messages import CachedTokens, Generate, PromptScores, RequestStats, Tokens
from hisparse_pd.protocol.prompt_scores import score_dtype
from hisparse_pd.router.stream_journal import JournalBudget, StreamJournal
from hisparse_pd.serving.api import prompt_scores
from hisparse_pd.serving.api.answering import streamed, whole_body
from hisparse_pd.serving.api.app import DecodeContext, Work
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.output import Delta, SampleOutput
from hisparse_pd.serving.api.prompt_scores import scored_prompts
from hisparse_pd.serving.api.request_journal import Identity
from hisparse_pd.serving.api.requests import RequestLimits, plan_samples
from hisparse_pd.serving.api.schemas import parse_request
from hisparse_pd.serving.api.timing import Timeline
from hisparse_pd.serving.http.engine_link import EngineLink
from hisparse_pd.serving.http.metrics import FrontMetrics
from tests.examples import num_examples
from tests.stream_events import answer_in, events_in, input_in, said_in, without
from tests.unit.api.recording_codec import RecordingCodec
from tests.unit.api.scored_prompts import rows_of
from tests.unit.api.support import MINIMAL

CODEC = RecordingCodec.make()
LIMITS = RequestLimits(4096, 1 << 20, 1 << 20, default_max_tokens=2048)
OPENAI = (Endpoint.COMPLETIONS, Endpoint.CHAT)
TIMES = {"completed_at", "e2e_latency"}

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
FUNCTION = {"name": "write", "parameters": PARAMETERS}
CALL = "<tool_call>write<arg_key>text</arg_key><arg_value>one\ntwo €</arg_value></tool_call>"
PATCH = "<tool_call>patch<arg_key>input</arg_key><arg_value>+ x</arg_value></tool_call>"
PIECES = (
    *("Yes €. ", "😀", "\n\n", '"a\\b"', "END", "EN", "<think>", "</think>", "<think>hm</think>"),
    *(CALL, PATCH, CALL[:60], "<tool_call>", "<tool_call>write<arg_key>text</arg_key>oops</tool_call>"),
)
TEXTS = st.lists(st.sampled_from([piece.encode() for piece in PIECES]) | st.binary(max_size=3), max_size=6)
LOGPROBS = st.floats(-20, 0) | st.just(float("-inf"))

TOOLS: dict[Endpoint, list[Any]] = {
    Endpoint.CHAT: [{"type": "function", "function": FUNCTION}],
    Endpoint.MESSAGES: [{"name": "write", "input_schema": PARAMETERS}],
    Endpoint.RESPONSES: [{"type": "function", **FUNCTION}, {"type": "custom", "name": "patch"}],
}
OPTIONS: dict[Endpoint, list[dict[str, Any]]] = {
    Endpoint.COMPLETIONS: [
        *({"prompt": ["ab", "c€"]}, {"n": 3}, {"logprobs": 2}, {"echo": True}, {"stop": ["END", "hm"]}),
        *({"return_token_ids": True}, {"return_tokens_as_token_ids": True}, {"stop_token_ids": [10]}),
        {"prompt_logprobs": 1},
    ],
    Endpoint.CHAT: [
        *({"tools": TOOLS[Endpoint.CHAT]}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}),
        *({"stop": ["END", "hm"]}, {"return_token_ids": True}, {"separate_reasoning": False}),
        {"prompt_logprobs": 2},
    ],
    Endpoint.GENERATE: [
        *({"text": ["a", "b"], "bootstrap_room": [1, 2]}, {"return_logprob": True, "top_logprobs_num": 2}),
        {"return_logprob": True, "logprob_start_len": 1, "return_text_in_logprobs": True},
        {"sampling_params": {"max_new_tokens": 2048, "stop": ["END", "hm"]}},
    ],
    Endpoint.MESSAGES: [
        *({"tools": TOOLS[Endpoint.MESSAGES]}, {"stop_sequences": ["END", "hm"]}),
        {"thinking": {"type": "adaptive", "display": "omitted"}},
    ],
    Endpoint.RESPONSES: [{"tools": TOOLS[Endpoint.RESPONSES]}, {"instructions": "be"}],
}
Said = list[tuple[int, PromptScores | Tokens]]
"""Messages of the engine, with the number of their sample."""


def work_of(context: DecodeContext, endpoint: Endpoint, body: dict[str, Any]) -> Work:
    """The same names and times whenever it is made."""
    request = parse_request(endpoint, msgspec.json.encode(body), "tiny")
    samples = asyncio.run(plan_samples(request, context.codec, LIMITS, 64))
    work = Work(request, samples, 0.0, Timeline(context.metrics, 0.0, (), None))
    vars(work)["identity"] = Identity(b"k" * 16, 1234)
    return work


def messages_of(data: st.DataObject, num_logprobs: int | None) -> Iterator[Tokens]:
    """What the engine says of one sample."""
    token_ids = b"".join(data.draw(TEXTS))
    step = data.draw(st.sampled_from([1, 3, 1000]))
    logprob, other = data.draw(LOGPROBS), data.draw(st.integers(0, 255))
    stats = RequestStats(
        Mode.DENSE, cached=CachedTokens(device=1), num_drafted=data.draw(st.sampled_from([0, 4]))
    )
    for start in range(0, len(token_ids) + 1, step):
        part = tuple(token_ids[start : start + step])
        logprobs: tuple[TokenLogprob, ...] = ()
        if num_logprobs is not None:
            top = tuple(
                ((other + start + rank) % 256, logprob - start - rank) for rank in range(num_logprobs)
            )
            logprobs = tuple(TokenLogprob(token_id, logprob - start, top) for token_id in part)
        finish = matched = None
        if start + step > len(token_ids):
            finish = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
            matched = part[-1] if part and finish is FinishReason.STOP and data.draw(st.booleans()) else None
        yield Tokens("", part, logprobs, finish, matched, stats)


def scores_of(data: st.DataObject, generate: Generate) -> Iterator[PromptScores]:
    """What the engine says of the prompt of one sample."""
    if generate.scores is not None:
        rows, num_top = rows_of(generate), generate.scores.num_top
        cut = data.draw(st.sampled_from([0, 1, 2])) * score_dtype(num_top).itemsize
        for part in (rows[:cut], rows[cut:]):
            yield PromptScores("", num_top, part)


def said_of(data: st.DataObject, work: Work) -> Said:
    """The samples' messages in any order among each other; the prompt's logprobs come before tokens."""
    left: list[list[PromptScores | Tokens]] = [
        [*scores_of(data, s.generate), *messages_of(data, s.options.sampling.num_logprobs)]
        for s in work.samples
    ]
    order = data.draw(st.randoms(use_true_random=True))
    said: Said = []
    while live := [index for index, messages in enumerate(left) if messages]:
        index = order.choice(live)
        said.append((index, left[index].pop(0)))
    return said


async def answers(context: DecodeContext, whole: Work, stream: Work, said: Said) -> tuple[bytes, str]:
    async def deltas(outputs: Sequence[SampleOutput]) -> AsyncGenerator[Delta, None]:
        prompts = scored_prompts(outputs)
        by_id = {output.sample.generate.request_id: output for output in outputs}
        for index, message in said:
            sample = outputs[index].sample
            sent = msgspec.structs.replace(message, request_id=sample.generate.request_id)
            for due in prompts[sample.prompt_index].due(sent):
                if isinstance(due, Delta):
                    yield due
                elif by_id[due.request_id].finish is None:
                    yield by_id[due.request_id].feed(due)

    body = await whole_body(context, whole, deltas)
    return body, b"".join([piece async for piece in streamed(context, stream, deltas)]).decode()


def in_order(value: dict[str, Any]) -> dict[str, Any]:
    """An object of a whole completion or chat whose fields stand as they are documented."""
    names = (
        *("id", "object", "created", "model", "choices", "usage", "index", "text"),
        *("role", "reasoning_content", "tool_calls", "content", "refusal", "message"),
        *("logprobs", "finish_reason", "matched_stop"),
        *("prompt_token_ids", "token_ids", "prompt_logprobs"),
    )
    return {name: value[name] for name in sorted(value, key=names.index)}


def folded(endpoint: Endpoint, text: str, *, is_list: bool) -> Any:
    """What a client has in the end of a stream, in the form of a whole answer."""
    answer = answer_in(endpoint, text)
    if endpoint is Endpoint.GENERATE:
        return answer if is_list else answer[0]
    if endpoint not in OPENAI:
        return answer
    first = events_in(text)[0]
    answer |= {name: first[name] for name in ("id", "created", "model")}
    answer["object"] = first["object"].removesuffix(".chunk")
    for choice in answer["choices"]:
        if "message" in choice:
            choice["message"] = in_order(choice["message"])
    answer["choices"] = [in_order(choice) for choice in answer["choices"]]
    return in_order(answer)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodeContext]:
    """Without an engine: nothing is sent to one."""
    directory = tmp_path_factory.mktemp("front")
    metrics = FrontMetrics()
    link = EngineLink([f"ipc://{directory}/engine.ipc"], 60.0, metrics.update)
    node = DecodeSettings(model_path=directory, served_model_name="tiny")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prompt_scores, "_PIECE_ENTRIES", 4)  # a character may be cut
        yield DecodeContext(role="decode", settings=node, link=link, metrics=metrics, codec=CODEC)
    link.close()


@pytest.mark.parametrize("endpoint", list(Endpoint))
@settings(max_examples=num_examples(10, 100), derandomize=True)
@given(data=st.data())
def test_a_whole_answer_is_what_its_stream_makes(
    context: DecodeContext, endpoint: Endpoint, data: st.DataObject
) -> None:
    """Calls of Anthropic's are compared as its clients read them: a stream does not say which was cut off."""
    body = dict(MINIMAL[endpoint])
    for options in data.draw(st.lists(st.sampled_from(OPTIONS[endpoint]), max_size=4)):
        body |= options
    streams: dict[str, Any] = {"stream": True}
    if endpoint in OPENAI:
        every = data.draw(st.booleans())
        streams["stream_options"] = {"include_usage": True, "continuous_usage_stats": every}
    whole, stream = work_of(context, endpoint, body), work_of(context, endpoint, body | streams)
    written, text = asyncio.run(answers(context, whole, stream, said_of(data, whole)))
    answer = json.loads(written)
    if endpoint is Endpoint.MESSAGES:
        for block in answer["content"]:
            if invalid := block.get("input", {}).get("INVALID_JSON"):
                block["input"] = input_in(invalid)
    else:
        assert msgspec.json.encode(answer) == written
    made = folded(endpoint, text, is_list=isinstance(answer, list))
    assert msgspec.json.encode(without(made, TIMES)) == msgspec.json.encode(without(answer, TIMES))


# --- cut streams --------------------------------------------------------------------------------------------


class SaidOfSample:
    """What the engines of all nodes say of one sample."""

    def __init__(self, random: Random, num_logprobs: int | None) -> None:
        pieces = [random.choice(PIECES).encode() for _ in range(random.randrange(6))]
        self._token_ids = b"".join(pieces) + random.randbytes(random.randrange(3))
        self._finish = random.choice([FinishReason.STOP, FinishReason.LENGTH])
        has_stop_token = self._token_ids and self._finish is FinishReason.STOP and random.random() < 0.5
        self._matched = self._token_ids[-1] if has_stop_token else None
        self._logprobs: list[TokenLogprob] = []
        if num_logprobs is not None:
            for place, token_id in enumerate(self._token_ids):
                top = tuple((rank, -float(place + rank)) for rank in range(num_logprobs))
                self._logprobs.append(TokenLogprob(token_id, -float(place), top))

    def messages(self, random: Random, generate: Generate) -> Iterator[PromptScores | Tokens]:
        """What an engine says that goes on behind the resumed tokens."""
        if generate.scores is not None:
            rows, num_top = rows_of(generate), generate.scores.num_top
            cut = random.randrange(3) * score_dtype(num_top).itemsize
            yield PromptScores(generate.request_id, num_top, rows[:cut])
            yield PromptScores(generate.request_id, num_top, rows[cut:])
        start, step = generate.sampling.num_resumed_tokens, random.choice([1, 3, 1000])
        stats = RequestStats(Mode.DENSE, cached=CachedTokens(device=1))
        for first in range(start, max(len(self._token_ids), start + 1), step):
            is_last, part = first + step >= len(self._token_ids), slice(first, first + step)
            yield Tokens(
                generate.request_id,
                tuple(self._token_ids[part]),
                tuple(self._logprobs[part]),
                self._finish if is_last else None,
                self._matched if is_last else None,
                stats,
            )


def stream_of(
    context: DecodeContext, work: Work, said: Sequence[SaidOfSample], random: Random
) -> AsyncGenerator[bytes, None]:
    """The stream of one node, to which the engines' messages come in any order among the samples."""

    async def deltas(outputs: Sequence[SampleOutput]) -> AsyncGenerator[Delta, None]:
        prompts = scored_prompts(outputs)
        by_id = {output.sample.generate.request_id: output for output in outputs}
        left = {
            output.index: list(said[output.index].messages(random, output.sample.generate))
            for output in outputs
            if not output.sample.resumed.is_over
        }
        while live := [index for index in left if left[index] and outputs[index].finish is None]:
            index = random.choice(live)
            for due in prompts[outputs[index].sample.prompt_index].due(left[index].pop(0)):
                if isinstance(due, Delta):
                    yield due
                elif (output := by_id[due.request_id]).finish is None:
                    delta = output.feed(due)
                    output.is_behind = random.random() < 0.3
                    yield delta

    return streamed(context, work, deltas)


async def shown_of(
    context: DecodeContext,
    endpoint: Endpoint,
    body: dict[str, Any],
    said: Sequence[SaidOfSample],
    random: Random,
    num_cuts: int,
) -> str:
    """What a client has in the end whose stream loses so many nodes."""
    journal = StreamJournal(0, JournalBudget(1 << 20))
    shown = b""
    for number in range(num_cuts + 1):
        fields = journal.fields(may_move=False, num_resumes=number)
        request = parse_request(endpoint, msgspec.json.encode({**body, **fields}), "tiny")
        samples = await plan_samples(request, context.codec, LIMITS, 64)
        work = Work(request, samples, 0.0, Timeline(context.metrics, 0.0, (), None))
        num_left = random.randrange(3000) if number < num_cuts else 1 << 30
        async for chunk in stream_of(context, work, said, random):
            shown += journal.feed(chunk[:num_left])
            num_left -= len(chunk)
            if num_left <= 0:
                break
        if journal.is_over:
            break
        journal.next_node()
    assert journal.is_over
    return shown.decode()


@pytest.mark.I5
@pytest.mark.parametrize("endpoint", list(Endpoint))
@settings(max_examples=num_examples(6, 100), derandomize=True)
@given(data=st.data())
def test_a_stream_says_the_same_wherever_it_is_cut(
    context: DecodeContext, endpoint: Endpoint, data: st.DataObject
) -> None:
    body = {**MINIMAL[endpoint], "stream": True}
    if endpoint in (Endpoint.COMPLETIONS, Endpoint.MESSAGES):
        body["max_tokens"] = 2048
    for options in data.draw(st.lists(st.sampled_from(OPTIONS[endpoint]), max_size=4)):
        body |= options
    random = Random(data.draw(st.integers(0, 1 << 30)))
    samples = work_of(context, endpoint, body).samples
    said = [SaidOfSample(random, sample.options.sampling.num_logprobs) for sample in samples]
    texts = [asyncio.run(shown_of(context, endpoint, body, said, random, num)) for num in (0, 1, 4)]
    whole, *others = (said_in(endpoint, text) for text in texts)
    assert others == [whole, whole]
