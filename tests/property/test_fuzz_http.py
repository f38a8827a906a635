"""Hostile bodies and headers at the HTTP side: the nodes' parser, the router's splitting."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given

from hisparse_pd.engine import messages as engine_messages
from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.router.body import RequestBody
from hisparse_pd.router.errors import NodeRefused
from hisparse_pd.serving.api.bodies import Endpoint, TokenPath
from hisparse_pd.serving.api.body_parts import MAX_ROOM
from hisparse_pd.serving.api.requests import RequestLimits, engine_groups, plan_samples
from hisparse_pd.serving.api.schemas import parse_request
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.api.tokens import answer_about_tokens
from hisparse_pd.serving.http.http_errors import ApiError
from tests.property.declared_bodies import make_declared
from tests.property.fuzzing import (
    BATCH,
    batch,
    damage,
    fuzz_batches,
    outcome,
    peak_bytes,
    seeds,
)
from tests.unit.api.support import Unchecked
from tests.unit.api.tiny_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
CODEC = TextCodec(TOKENIZER, len(TOKENIZER), grammar_checks=Unchecked())
LIMITS = RequestLimits(256, 256, 128)

ROOM: dict[str, Any] = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
_TEXTS: dict[Endpoint, list[str]] = {
    Endpoint.COMPLETIONS: [
        """{"model": "tiny", "prompt": "hello", "max_tokens": 4, "n": 2, "logprobs": 2, "stop": ["x"],
        "seed": 1, "stream": true, "stream_options": {"include_usage": true}, "temperature": 0.5,
        "top_p": 0.5, "hisparse": "auto"}""",
        """{"prompt": ["a", "b"], "bootstrap_host": ["h", "h"], "bootstrap_port": [1, null],
        "bootstrap_room": [1, 2]}""",
        """{"prompt": [[1, 2], [3]], "best_of": 1, "echo": true, "max_tokens": 1, "logprobs": 1}""",
        """{"prompt": [1, 2], "prompt_logprobs": 2, "max_tokens": 0}""",
    ],
    Endpoint.CHAT: [
        """{"messages": [{"role": "user", "content": "hi"},
          {"role": "assistant", "content": [{"type": "text", "text": "ho"}]}],
        "max_completion_tokens": 1, "logprobs": true, "top_logprobs": 2, "continue_final_message": true,
        "prompt_logprobs": 0, "chat_template_kwargs": {"a": 1},
        "metadata": {"hisparse": "true"}, "response_format": {"type": "text"}}""",
    ],
    Endpoint.GENERATE: [
        """{"text": "hello", "rid": "r", "return_logprob": true, "top_logprobs_num": 2,
        "custom_labels": {"hisparse": "false"},
        "sampling_params": {"max_new_tokens": 4, "min_new_tokens": 1, "stop": "x", "stop_token_ids": [3],
          "top_k": -1, "sampling_seed": 5}}""",
        """{"input_ids": [1, 2], "return_logprob": true, "logprob_start_len": 1,
        "sampling_params": {"max_new_tokens": 0}}""",
        """{"input_ids": [[1], [2]], "sampling_params": [{"n": 2}, {}], "rid": ["a", "b"]}""",
    ],
    Endpoint.RESPONSES: [
        """{"input": "hello", "max_output_tokens": 4, "stream": true}""",
        """{"instructions": "S", "input": [
          {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
          {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
          {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
          {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
          {"type": "function_call_output", "call_id": "c", "output": "o"}],
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": false}],
        "tool_choice": "none", "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}}, "include": ["reasoning.encrypted_content"], "store": false,
        "metadata": {"hisparse": "true"}}""",
    ],
    Endpoint.MESSAGES: [
        """{"max_tokens": 4, "system": [{"type": "text", "text": "S"}], "messages": [
          {"role": "user", "content": [{"type": "text", "text": "a"}]},
          {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""},
            {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}}]},
          {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "r"}]}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"},
        "stop_sequences": ["x"], "metadata": {"hisparse": "auto"}, "stream": true}""",
    ],
}
BODIES: dict[Endpoint, list[dict[str, Any]]] = {
    endpoint: [ROOM | json.loads(text) for text in texts] for endpoint, texts in _TEXTS.items()
}
CORPUS = {endpoint: [json.dumps(body).encode() for body in bodies] for endpoint, bodies in BODIES.items()}

HOSTILE_VALUES = (
    *(b'"\\ud800"', b'"\\udc00x"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"\xff"', b'"\xed\xa0\x80"'),
    *(b"9" * 5000, b"-" + b"9" * 400, b"9" * 25, b"9223372036854775808", b"18446744073709551616"),
    *(b"1e999", b"-1e999", b"1e308", b"1e-999", b"-0", b"-0.0", b"1.5", b"NaN", b"Infinity"),
    *(b"[" * 20_000, b'{"a":' * 20_000, b"[" * 500 + b"]" * 500, b'{"a":' * 500 + b"1" + b"}" * 500),
    *(b"[]", b"{}", b"null", b"true", b'""', b"[null]", b"[[]]", b"[true]", b"[1,2]", b'[{"role":"user"}]'),
    *(b'"' + b"x" * 5000 + b'"', b"[" + b"1," * 3000 + b"1]"),
    b'{"conversation": 1, "self": 2, "tokenize": true}',
)
_FIELDS = sorted(
    {name for bodies in BODIES.values() for body in bodies for name in body}
    | {"sampling_params.n", "input_ids", "text", "messages", "rid", "lora_path", "tools", "min_p"}
)


def splice(rng: random.Random, endpoint: Endpoint) -> bytes:
    """A valid body with the values of some fields exchanged for hostile ones, or fields that come twice."""
    body = dict(rng.choice(BODIES[endpoint]))
    parts = {name: json.dumps(value).encode() for name, value in body.items()}
    doubled = b""
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(_FIELDS)
        value = rng.choice(HOSTILE_VALUES)
        if rng.randint(0, 9) == 0:
            doubled += b', "%s": %s' % (name.encode(), value)
        else:
            parts[name] = value
    text = b", ".join(b'"%s": %s' % (name.encode(), value) for name, value in parts.items())
    return b"{" + text + doubled + b"}"


def make_body(endpoint: Endpoint) -> Callable[[random.Random], bytes]:
    def make(rng: random.Random) -> bytes:
        match rng.randint(0, 3):
            case 0:
                return splice(rng, endpoint)
            case 1:
                return damage(rng, CORPUS[endpoint], HOSTILE_VALUES)
            case _:
                return make_declared(rng, endpoint, BODIES[endpoint], HOSTILE_VALUES)

    return make


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


def check_error(error: ApiError) -> None:
    """It can be sent, in OpenAI's shape, and is short whatever was in the body."""
    assert 400 <= error.status <= 499
    body = error.body()
    assert len(body) < 8192
    assert json.loads(body)["error"]["message"]


def check_body(endpoint: Endpoint, loop: asyncio.AbstractEventLoop, body: bytes) -> None:
    try:
        request = parse_request(endpoint, body, "tiny")
        samples = loop.run_until_complete(plan_samples(request, CODEC, LIMITS, 16))
    except ApiError as error:
        check_error(error)
        return
    assert samples
    for sample in samples:
        generate = sample.generate
        assert 0 <= generate.room <= MAX_ROOM
        token_ids = unpack_token_ids(sample.prompt)
        assert len(token_ids) == generate.num_prompt_tokens > 0
        assert all(0 <= token < CODEC.vocab_size for token in token_ids)
        num_tokens = generate.num_prompt_tokens + generate.sampling.max_new_tokens - 1
        assert num_tokens <= LIMITS.context_length
    for group in engine_groups(samples):
        frame = engine_messages.encoder.encode(group)
        assert engine_messages.to_engine_decoder.decode(frame) == group


@pytest.mark.I7
@pytest.mark.parametrize("endpoint", Endpoint)
@given(seed=seeds)
@fuzz_batches
def test_bodies_are_planned_or_refused_with_client_errors(
    endpoint: Endpoint, loop: asyncio.AbstractEventLoop, seed: int
) -> None:
    batch(seed, make_body(endpoint), lambda body: check_body(endpoint, loop, body))


TOKEN_CORPUS = {
    TokenPath.TOKENIZE: [
        b'{"prompt": "hello", "add_special_tokens": false, "return_token_strs": true}',
        b'{"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": false}',
    ],
    TokenPath.DETOKENIZE: [b'{"tokens": [1, 2, 3]}'],
    TokenPath.COUNT_TOKENS: CORPUS[Endpoint.MESSAGES],
}


@pytest.mark.I7
@pytest.mark.parametrize("path", TokenPath)
@given(seed=seeds)
@fuzz_batches
def test_what_is_asked_about_tokens_is_answered_or_refused_with_client_errors(
    path: TokenPath, loop: asyncio.AbstractEventLoop, seed: int
) -> None:
    def check(body: bytes) -> None:
        try:
            answer = loop.run_until_complete(
                answer_about_tokens(path, body, "tiny", CODEC, LIMITS.context_length)
            )
        except ApiError as error:
            check_error(error)
            return
        assert set(json.loads(answer.body)) <= {
            *("count", "max_model_len", "tokens", "token_strs"),
            *("prompt", "input_tokens"),
        }

    def make(rng: random.Random) -> bytes:
        if rng.randint(0, 1):
            return damage(rng, TOKEN_CORPUS[path], HOSTILE_VALUES)
        return make_declared(rng, path, [json.loads(body) for body in TOKEN_CORPUS[path]], HOSTILE_VALUES)

    batch(seed, make, check, count=BATCH // 4)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_the_corpus_is_valid(endpoint: Endpoint) -> None:
    for body in CORPUS[endpoint]:
        assert asyncio.run(plan_samples(parse_request(endpoint, body, "tiny"), CODEC, LIMITS, 16))


@pytest.mark.I8
@pytest.mark.parametrize("endpoint", Endpoint)
@given(seed=seeds)
@fuzz_batches
def test_a_body_costs_no_more_memory_than_its_size_explains(endpoint: Endpoint, seed: int) -> None:
    def parse(body: bytes) -> object:
        return outcome(lambda: parse_request(endpoint, body, "tiny"), ApiError)

    def check(body: bytes) -> None:
        bound = 500_000 + 100 * len(body)
        # What another thread of this process allocates meanwhile counts as well; it does not do so each time.
        assert any(peak_bytes(lambda: parse(body)) < bound for _ in range(3)), bound

    batch(seed, make_body(endpoint), check, count=BATCH // 10)


@pytest.mark.parametrize("endpoint", Endpoint)
@given(seed=seeds)
@fuzz_batches
def test_the_router_sends_what_it_was_sent_with_its_own_bootstrap_fields(
    endpoint: Endpoint, seed: int
) -> None:
    make = make_body(endpoint)
    batch(seed, make, lambda content: check_relayed(endpoint, content))


def check_relayed(endpoint: Endpoint, content: bytes) -> None:
    try:
        body = RequestBody.parse(content, endpoint)
    except ApiError as error:
        check_error(error)
        return
    sent = body.with_bootstrap("host", 8998, 7)
    fields = dict(msgspec.json.decode(sent, type=dict[str, msgspec.Raw]))
    rooms = msgspec.json.decode(fields.pop("bootstrap_room"), type=int | list[int])
    assert len(rooms if isinstance(rooms, list) else [rooms]) == (body.num_prompts or 1)
    names = [name for name, _ in json.loads(sent, object_pairs_hook=list, parse_int=str)]
    assert len(set(names)) == len(names), "parsers disagree on which of two equal keys counts"
    given_fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    for name in (*ROOM, "journal", "journal_records"):
        fields.pop(name, None)
        given_fields.pop(name, None)
    assert {name: bytes(value) for name, value in fields.items()} == {
        name: bytes(value) for name, value in given_fields.items()
    }
    # A node takes or refuses what it is sent; no other error comes of it.
    outcome(lambda: parse_request(Endpoint(endpoint.value), sent, "tiny"), ApiError)


_ERROR = json.dumps({"error": {"message": "no", "type": "x", "code": "y"}}).encode()


@pytest.mark.I7
@given(seeds)
@fuzz_batches
def test_what_a_node_says_of_an_error_never_breaks_the_answer(seed: int) -> None:
    def check(said: bytes) -> None:
        body = NodeRefused(503, "node http://n:1 answered 503", said).body()
        assert isinstance(json.loads(body)["error"], dict)

    batch(seed, lambda rng: damage(rng, [_ERROR], HOSTILE_VALUES), check)
