"""Bodies of requests: their meaning, and the error for each that cannot be served."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.base.vocabulary import HisparseFlag, SamplingParams, pack_logit_bias
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.decoding import MAX_NESTING
from hisparse_pd.protocol.prompt_scores import WantedScores
from hisparse_pd.serving.api import wanted_scores
from hisparse_pd.serving.api.bodies import BODIES, Endpoint
from hisparse_pd.serving.api.openapi import openapi_document
from hisparse_pd.serving.api.requests import RequestLimits, SampleRequest, engine_groups, plan_samples
from hisparse_pd.serving.api.schemas import ApiRequest, derive_room, parse_request
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.http.http_errors import ApiError
from tests.unit.api.scripted_engine import CONTEXT_LENGTH
from tests.unit.api.support import MESSAGES, MINIMAL, parse
from tests.unit.api.tiny_tokenizer import make_tokenizer

LIMITS = RequestLimits(CONTEXT_LENGTH, 200, 100)


def completion(**changes: Any) -> ApiRequest:
    return parse(Endpoint.COMPLETIONS, **changes)


def chat(**changes: Any) -> ApiRequest:
    return parse(Endpoint.CHAT, **changes)


def generate(**changes: Any) -> ApiRequest:
    if "input_ids" in changes:
        changes.setdefault("text", None)
    return parse(Endpoint.GENERATE, **changes)


def plan(request: ApiRequest, limits: RequestLimits = LIMITS, **tokenizer: Any) -> tuple[SampleRequest, ...]:
    tokens = make_tokenizer(**tokenizer)
    return asyncio.run(plan_samples(request, TextCodec(tokens, len(tokens)), limits))


# --- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "prompt", "is_batch", "prompts"),
    [
        ("text", "ab", False, ("ab",)),
        ("text", ["ab"], True, ("ab",)),
        ("text", ["ab", "c"], True, ("ab", "c")),
        ("input_ids", [1, 2], False, (pack_token_ids((1, 2)),)),
        ("input_ids", [[1, 2], [3]], True, (pack_token_ids((1, 2)), pack_token_ids((3,)))),
    ],
    ids=str,
)
def test_prompt_shapes(field: str, prompt: object, is_batch: bool, prompts: tuple[object, ...]) -> None:
    for request in (completion(prompt=prompt), generate(**{field: prompt})):
        assert (request.is_batch, request.prompts) == (is_batch, prompts)


def test_a_continued_message_may_say_so_twice() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "so"}]
    chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    chat(add_generation_prompt=True, add_special_tokens=False)
    completion(add_special_tokens=True)


def test_the_template_hears_of_the_reasoning_effort() -> None:
    given = {"reasoning_effort": "high", "thinking": True}
    for kwargs, expected in ((None, {"reasoning_effort": "low"}), (given, given)):
        prompt = chat(reasoning_effort="low", chat_template_kwargs=kwargs).chat
        assert prompt is not None
        assert prompt.template_arguments == expected


# --- sampling --------------------------------------------------------------------------------------


def max_new_tokens(request: ApiRequest, default_max_tokens: int = 0) -> int:
    (sample,) = plan(request, replace(LIMITS, default_max_tokens=default_max_tokens))
    return sample.generate.sampling.max_new_tokens


def test_defaults() -> None:
    """A completion has OpenAI's default of tokens, /generate SGLang's, and a chat the node's, or all."""
    room = 201 - plan(chat())[0].generate.num_prompt_tokens
    assert max_new_tokens(completion()) == max_new_tokens(completion(), 20) == 16
    assert max_new_tokens(generate()) == 128
    assert max_new_tokens(chat()) == max_new_tokens(chat(), 1000) == room
    assert max_new_tokens(chat(), 20) == 20
    assert max_new_tokens(chat(max_tokens=30), 20) == 30
    assert max_new_tokens(completion(prompt="x" * 195)) == 6, "a default gives way where little room is left"
    sampling = plan(completion())[0].generate.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, None)
    assert sampling.num_logprobs is None


def test_openai_sampling() -> None:
    request = completion(
        max_tokens=5, min_tokens=2, temperature=0, top_p=0.5, top_k=-1, seed=-1, logprobs=0, stop="x",
        ignore_eos=True, stop_token_ids=[3],
    )  # fmt: skip
    assert plan(request)[0].generate.sampling == SamplingParams(
        5, 2, temperature=0, top_p=0.5, seed=2**63 - 1, ignore_eos=True, stop_token_ids=(3,), num_logprobs=0
    )  # fmt: skip
    assert request.options[0].stop == ("x",)


def test_chat_sampling() -> None:
    assert max_new_tokens(chat(max_tokens=3)) == 3
    assert max_new_tokens(chat(max_completion_tokens=4, max_tokens=3)) == 4
    for said, num_logprobs in (
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({}, None),
    ):
        assert plan(chat(**said))[0].generate.sampling.num_logprobs == num_logprobs


def test_sglang_sampling() -> None:
    params = {
        "max_new_tokens": 9, "min_new_tokens": 1, "temperature": 0.25, "top_k": 5, "top_p": 0.75, "n": 2,
        "stop": ["a", "b"], "sampling_seed": 4, "no_stop_trim": True, "skip_special_tokens": False,
    }  # fmt: skip
    request = generate(sampling_params=params, return_logprob=True, top_logprobs_num=3)
    first, second = plan(request)
    expected = SamplingParams(9, 1, temperature=0.25, top_p=0.75, top_k=5, seed=4, num_logprobs=3)
    assert first.generate.sampling == expected
    assert second.generate.sampling.seed == 5
    options = first.options
    assert (options.stop, options.no_stop_trim, options.skip_special_tokens) == (("a", "b"), True, False)


def test_sampling_params_of_each_prompt() -> None:
    request = generate(
        text=["a", "b"], sampling_params=[{"n": 2, "max_new_tokens": 1}, {"max_new_tokens": 2}],
        bootstrap_room=[5, 6], bootstrap_host=["h", "h"], bootstrap_port=[1, 2],
    )  # fmt: skip
    samples = plan(request)
    assert [sample.prompt_index for sample in samples] == [0, 0, 1]
    assert [sample.generate.sampling.max_new_tokens for sample in samples] == [1, 1, 2]
    assert [sample.generate.room for sample in samples] == [5, derive_room(5, 1), 6]
    assert [sample.generate.bootstrap_port for sample in samples] == [1, 1, 2]


def test_penalties_and_biases_of_all_dialects() -> None:
    penalties = {"presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_p": 0.1}
    said = penalties | {"logit_bias": {"5": -100, "7": 0.5, "6": 0}}
    for request in (completion(**said), chat(**said), generate(sampling_params=said)):
        (sample,) = plan(request)
        sampling = sample.generate.sampling
        assert {name: getattr(sampling, name) for name in penalties} == penalties
        assert sampling.logit_bias == pack_logit_bias([(5, -100.0), (7, 0.5)])
        assert sampling.changes_logits
    (sample,) = plan(completion(min_p=0.1, repetition_penalty=1.0, logit_bias={"6": 0}))
    assert not sample.generate.sampling.changes_logits


# --- rooms -----------------------------------------------------------------------------------------


def rooms(request: ApiRequest) -> list[int]:
    return [meeting.room for meeting in request.rendezvous]


@pytest.mark.I5
def test_derived_rooms_are_pinned() -> None:
    """Both nodes must derive the same, whatever their release."""
    assert derive_room(7, 0) == 7
    assert derive_room(7, 1) == 4211983861799653044
    assert derive_room(2**63 - 1, 127) == 6930189573723372579


@given(st.integers(0, 2**63 - 1), st.integers(0, 5000))
@settings(derandomize=True)
def test_derived_rooms_are_rooms(room: int, sample_index: int) -> None:
    assert 0 <= derive_room(room, sample_index) < 2**63


def test_one_room_serves_all_samples() -> None:
    expected = [7, *(derive_room(7, index) for index in (1, 2, 3))]
    assert rooms(completion(n=4)) == rooms(completion(prompt=["a", "b"], n=2)) == expected


def test_a_list_of_rooms_has_one_a_prompt_or_one_a_sample() -> None:
    lists = {"bootstrap_host": ["a", "[::1]"], "bootstrap_port": [1, None], "bootstrap_room": [3, 4]}
    request = completion(prompt=["x", "y"], n=2, **lists)
    assert rooms(request) == [3, derive_room(3, 1), 4, derive_room(4, 1)]
    assert [meeting.bootstrap_host for meeting in request.rendezvous] == ["a", "a", "::1", "::1"]
    assert [meeting.bootstrap_port for meeting in request.rendezvous] == [1, 1, 8998, 8998]
    assert rooms(completion(prompt=["x"], bootstrap_room=[3])) == [3]
    assert rooms(chat(n=2, **lists)) == [3, 4]


# --- the flag --------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", Endpoint)
@pytest.mark.parametrize(
    ("value", "flag"),
    [(True, HisparseFlag.TRUE), (False, HisparseFlag.FALSE), ("auto", HisparseFlag.AUTO), (None, None)],
)
def test_the_flag_at_the_top_level(endpoint: Endpoint, value: object, flag: HisparseFlag | None) -> None:
    assert parse(endpoint, hisparse=value).hisparse is flag


CARRIERS = [
    (Endpoint.CHAT, "metadata"),
    (Endpoint.MESSAGES, "metadata"),
    (Endpoint.RESPONSES, "metadata"),
    (Endpoint.GENERATE, "custom_labels"),
]


@pytest.mark.parametrize(("endpoint", "carrier"), CARRIERS)
@pytest.mark.parametrize("value", [True, "true", False, "false", "auto"])
def test_the_flag_where_public_routers_leave_it(endpoint: Endpoint, carrier: str, value: object) -> None:
    request = parse(endpoint, **{carrier: {"hisparse": value}})
    assert request.hisparse is HisparseFlag(str(value).lower())
    assert parse(endpoint, hisparse="auto", **{carrier: {"hisparse": value}}).hisparse is HisparseFlag.AUTO


# --- isolation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", Endpoint)
def test_both_isolation_fields_count_everywhere(endpoint: Endpoint) -> None:
    """Both count together: neither replaces the other."""
    said: list[dict[str, str | None]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"extra_key": "a"},
        {"cache_salt": "a", "extra_key": "b"},
        {"cache_salt": "ab"},
    ]
    roots = [parse(endpoint, **fields).roots for fields in said]
    assert roots == [(root_of(**fields),) for fields in said]
    assert len(set(roots)) == len(said)
    assert parse(endpoint, cache_salt=None, extra_key=None).roots == (NO_ISOLATION,)
    assert parse(endpoint, cache_salt=["a"]).roots == (root_of("a"),)


def test_isolation_fields_may_be_lists_of_one_a_prompt() -> None:
    request = completion(prompt=["x", "y"], n=2, cache_salt="s", extra_key=["a", None])
    assert request.roots == (root_of("s", "a"), root_of("s"))
    samples = plan(request)
    expected = list(zip(request.roots, (samples[0].prompt, samples[2].prompt), strict=True))
    assert [(group.root, group.prompt) for group in engine_groups(samples)] == expected
    assert generate(text=["x", "y"], extra_key=["a", "b"]).roots == (root_of(None, "a"), root_of(None, "b"))


@pytest.mark.parametrize(("endpoint", "carrier"), CARRIERS)
def test_isolation_fields_where_public_routers_leave_them(endpoint: Endpoint, carrier: str) -> None:
    labels = {carrier: {"cache_salt": "a", "extra_key": "b"}}
    assert parse(endpoint, **labels).roots == (root_of("a", "b"),)
    assert parse(endpoint, cache_salt="c", **labels).roots == (root_of("c", "b"),)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_drafts_can_be_declined(endpoint: Endpoint) -> None:
    said = [parse(endpoint, speculative=value).is_speculative for value in (True, False, None)]
    assert said == [True, False, True]


# --- errors ----------------------------------------------------------------------------------------

Case = tuple[dict[str, Any], str, str]
"""Fields, the one at fault, and a part of its error."""

BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), (0, 2**31 - 1)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2, 2)),
    **{"temperature": (0, 2), "top_k": (-1, 2**31 - 1), "min_p": (0, 1), "prompt_logprobs": (0, 20)},
    **{"n": (1, 128), "seed": (-(2**63), 2**63 - 1)},
    **{"bootstrap_room": (0, 2**63 - 1), "bootstrap_port": (1, 65535)},
}
"""Fields of completions and chats with their bounds, both ends included."""
NOT_SUPPORTED: dict[str, Any] = {
    **{"lora_path": "x", "allowed_token_ids": [5], "bad_words": ["x"], "custom_logit_processor": "x"},
    **{"structural_tag": "{}", "logits_processors": ["x"]},
    **{"thinking_token_budget": 5, "truncate_prompt_tokens": -1, "use_beam_search": True},
    **{"return_hidden_states": True, "modalities": ["audio"], "chat_template": "{{ 1 }}", "suffix": "x"},
    **{"documents": [{"text": "x"}], "prompt_embeds": "AAAA", "guided_json": {}, "guided_choice": ["a"]},
}
"""Fields of all endpoints with their bounds."""
TYPED: list[Case] = [
    ({"hisparse": "sometimes"}, "hisparse", '"sometimes" must be true, false or "auto"'),
    ({"hisparse": 1}, "hisparse", 'true, false or "auto"'),
    ({"stream": "yes"}, "stream", '"yes" must be `bool | null`'),
    ({"speculative": "no"}, "speculative", '"no" must be `bool | null`'),
    ({"cache_salt": ""}, "cache_salt", "length >= 1"),
    ({"cache_salt": "x" * 1025}, "cache_salt", "length <= 1024"),
    ({"extra_key": {"a": 1}}, "extra_key", "an object with 1 fields must be `str | array | null`"),
    ({"bootstrap_room": "7"}, "bootstrap_room", "must be `int | array | null`"),
    ({"bootstrap_host": 5}, "bootstrap_host", "must be a host name"),
    ({"model": 5}, "model", "5 must be `str | null`"),
    ({"logit_bias": [1]}, "logit_bias", "a list with 1 entries must be `object | null`"),
    ({"logit_bias": {"5": 1, "x": 1}}, "logit_bias", 'has the key "x", which must be `int`'),
    ({"logit_bias": {"-1": 1}}, "logit_bias", 'has the key "-1", which must be `int` >= 0'),
    ({"logit_bias": {"05": 1}}, "logit_bias", 'has the key "05", which must be `int`'),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "integer value out of range"),
    ({"logit_bias": {"5": 100, "7": 101}}, "logit_bias", 'has 101 for "7", which must be `float` <= 100'),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "of length <= 1024"),
    ({"top_p": 0}, "top_p", "0 must be `float` > 0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0 must be `float` > 0"),
    ({"repetition_penalty": 2.1}, "repetition_penalty", "2.1 must be `float` <= 2"),
    ({"stop": ["x"] * 17}, "stop", "a list with 17 entries must be `array` of length <= 16"),
    ({"stop": ["ok", ""]}, "stop[1]", "length >= 1"),
    ({"stop": ["x" * 1025]}, "stop[0]", "length <= 1024"),
    ({"stop": 5}, "stop", "5 must be `str | array | null`"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "-1 must be `int` >= 0"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5 must be `int | null`"),
    ({"max_tokens": 10**30}, "max_tokens", "must be `int` <= 2147483647"),
    ({"response_format": {"type": "grammar"}}, "response_format.type", '"grammar" must be "json_object", '),
    ({"response_format": "text"}, "response_format", "must be `object | null`"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "must be `bool | null`"),
]
TYPED_COMPLETIONS: list[Case] = [
    ({"prompt": ""}, "prompt", '"" must not be empty'),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "must not be empty"),
    ({"prompt": [[1], []]}, "prompt[1]", "must not be empty"),
    ({"prompt": {"a": 1}}, "prompt", "an object with 1 fields must be a string"),
    ({"prompt": [1, "a"]}, "prompt[1]", '"a" must be a token id'),
    ({"prompt": ["a", 1]}, "prompt[1]", "1 must be a string"),
    ({"prompt": [[1], "a"]}, "prompt[1]", "must be a list of token ids"),
    ({"prompt": [True]}, "prompt[0]", "true must be a token id"),
    ({"prompt": [1, -2]}, "prompt[1]", "-2 must be a token id, an integer from 0 to 2147483647"),
    ({"prompt": ["a"] * 4097}, "prompt", "at most 4096 entries"),
    ({"add_special_tokens": False}, "add_special_tokens", "not supported"),
    ({"logprobs": 21}, "logprobs", "21 must be `int` <= 20"),
    ({"tools": [{}]}, "tools", "not supported"),
]
TYPED_CHAT: list[Case] = [
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", '"hi" must be a list'),
    *(
        ({"messages": [message]}, f"messages[0]{place}", said)
        for message, place, said in (
            ("hi", "", "must be an object"),
            ({"role": "robot"}, ".role", '"robot" must be "assistant", "developer"'),
            (
                {"role": "user", "content": [{"type": "image_url"}]},
                ".content[0].type",
                '"image_url" must be "text" or "refusal"',
            ),
            (
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                ".tool_calls[0].function.arguments",
                "an object with 0 fields must be `str | null`",
            ),
            ({"role": "system", "content": "a", "response_format": {}}, ".response_format", "not supported"),
            ({"role": "assistant", "function_call": {}}, ".function_call", "not supported"),
        )
    ),
    ({"logprobs": 3}, "logprobs", "3 must be `bool | null`"),
    ({"top_logprobs": 21}, "top_logprobs", "21 must be `int` <= 20"),
    ({"metadata": {"hisparse": "maybe"}}, "metadata.hisparse", '"maybe" must be true'),
    ({"metadata": "x"}, "metadata", "must be `object | null`"),
    ({"add_special_tokens": True}, "add_special_tokens", "not supported"),
    ({"echo": True}, "echo", "true is not supported"),
    ({"tools": {}}, "tools", "must be a list"),
    *(
        ({"tools": [tool]}, f"tools[0]{place}", said)
        for tool, place, said in (
            ("x", "", "must be an object"),
            ({"type": "web_search"}, ".type", 'must be "function"; other tools are'),
            ({"type": "function"}, ".function", "the field is needed"),
            ({"type": "function", "function": {}}, ".function.name", "the field is needed"),
            (
                {"type": "function", "function": {"name": "f", "parameters": []}},
                ".function.parameters",
                "a list with 0 entries must be a JSON schema",
            ),
        )
    ),
]
TYPED_GENERATE: list[Case] = [
    ({"prompt_logprobs": 0}, "prompt_logprobs", "0 is not supported"),
    ({"text": ["a", 1]}, "text[1]", "must be a string"),
    ({"text": [1]}, "text", "must be a string or a list of strings"),
    ({"input_ids": "ab", "text": None}, "input_ids", "must be a list of token ids"),
    ({"sampling_params": 5}, "sampling_params", "must be an object"),
    ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens", "-1 must be `int` >= 0"),
    ({"sampling_params": [{"temperature": -1}]}, "sampling_params[0].temperature", "-1 must be `float` >= 0"),
    ({"sampling_params": {"regex": 5}}, "sampling_params.regex", "5 must be `str | null`"),
    ({"top_logprobs_num": 21}, "top_logprobs_num", "21 must be `int` <= 20"),
    ({"logprob_start_len": -2}, "logprob_start_len", "-2 must be `int` >= -1"),
    ({"custom_labels": {"hisparse": "maybe"}}, "custom_labels.hisparse", '"maybe" must be true'),
    ({"tools": [{}]}, "tools", "not supported"),
]
OPENAIS = (Endpoint.COMPLETIONS, Endpoint.CHAT)
TYPED_CASES = [
    *(
        (endpoint, {field: value}, field, "not supported")
        for endpoint in Endpoint
        for field, value in NOT_SUPPORTED.items()
    ),
    *(
        (endpoint, {field: beyond}, field, f"{beyond} must be")
        for endpoint in OPENAIS
        for field, (low, high) in BOUNDS.items()
        for beyond in (low - 1, high + 1)
    ),
    *((endpoint, *case) for endpoint in OPENAIS for case in TYPED),
    *((Endpoint.COMPLETIONS, *case) for case in TYPED_COMPLETIONS),
    *((Endpoint.CHAT, *case) for case in TYPED_CHAT),
    *((Endpoint.GENERATE, *case) for case in TYPED_GENERATE),
]
EVERYWHERE: list[Case] = [
    ({"extra_key": ["a", "b"]}, "extra_key", "one string a prompt, 1"),
    ({"bootstrap_room": [1, 2, 3]}, "bootstrap_room", "one entry a prompt"),
    ({"bootstrap_room": None}, "bootstrap_room", "send the request through the router"),
    ({"bootstrap_host": None}, "bootstrap_host", "send the request through the router"),
    ({"bootstrap_host": "127.0.0.1:80/admin?"}, "bootstrap_host", "must be a host name"),
    ({"bootstrap_host": "user@127.0.0.1"}, "bootstrap_host", "must be a host name"),
    ({"bootstrap_host": "a\nb"}, "bootstrap_host", "must be a host name"),
]
OPENAI: list[Case] = [
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens", "1 must be at most max_tokens, which is 0"),
    ({"best_of": 3}, "best_of", "3 must equal n"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options: needs stream: true"),
]
COMPLETIONS: list[Case] = [
    ({"prompt": None}, "prompt", "is needed"),
    ({"prompt": ["a"] * 100, "n": 128}, "prompt", "12800 samples"),
    ({"prompt": ["a", "b"], "bootstrap_room": [1, 1]}, "bootstrap_room", "different room"),
]
USERS_CALL = {"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}
CHAT: list[Case] = [
    ({"messages": None}, "messages", "at least one message"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a string"),
    ({"messages": [{"role": "system"}]}, "messages[0].content", "must be a string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
        "messages[0].content[0].type",
        '"refusal" must be "text"',
    ),
    ({"messages": [USERS_CALL]}, "messages[0].tool_calls", "belong to a message of the assistant"),
    ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "must not set"),
    ({"continue_final_message": True}, "continue_final_message", "last message of the assistant"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
]
GENERATE: list[Case] = [
    ({"text": None}, "text", "exactly one of text and input_ids"),
    ({"input_ids": [1], "text": "a"}, "text", "exactly one of text and input_ids"),
    ({"sampling_params": [{}, {}]}, "sampling_params", "one entry a prompt, 1"),
    ({"rid": ["a", "b"]}, "rid", "one string a prompt, 1"),
]
CASES = [
    *TYPED_CASES,
    *((endpoint, *case) for endpoint in Endpoint for case in EVERYWHERE),
    *((endpoint, *case) for endpoint in OPENAIS for case in OPENAI),
    *((Endpoint.COMPLETIONS, *case) for case in COMPLETIONS),
    *((Endpoint.CHAT, *case) for case in CHAT),
    *((Endpoint.GENERATE, *case) for case in GENERATE),
]
"""Bodies that break a declaration, or a rule of several fields."""


@pytest.mark.parametrize(("endpoint", "changes", "param", "said"), CASES)
def test_errors_name_field_value_and_bound(
    endpoint: Endpoint, changes: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        parse(endpoint, **changes)
    error = caught.value
    assert error.status == 400
    assert error.param == param
    assert said in error.message
    assert param in error.message or param == "text"
    shape = json.loads(error.body())["error"]
    assert set(shape) == {"message", "type", "param", "code"}
    assert shape["type"] == "invalid_request_error"
    assert len(error.message) < 400


@pytest.mark.parametrize("endpoint", Endpoint)
def test_another_model_is_404_and_none_is_fine(endpoint: Endpoint) -> None:
    with pytest.raises(ApiError, match=r"other.*tiny") as caught:
        parse(endpoint, model="other")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    for model in (None, "tiny", "", "unknown", "default"):
        parse(endpoint, model=model)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object: Expected `object`, got `array`"),
        (b"null", "must be a JSON object"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b'{"unknown": "\xc3\x28"}', "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"stream": 1e999}', "not valid JSON"),
        (b'{"stop":' + b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a":' + b"[" * MAX_NESTING + b"]" * MAX_NESTING + b"}", f"{MAX_NESTING} levels .* are the most"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_bodies_that_are_no_json_object(body: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        parse_request(Endpoint.COMPLETIONS, body, "tiny")
    assert caught.value.status == 400


def test_unknown_and_harmless_fields_are_ignored() -> None:
    extras = {
        "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False, "tools": None,
        "tool_choice": "auto", "log_metrics": True, "user": "me", "echo": False, "logit_bias": {},
        "session_params": {"id": 1}, "something": [{"new": 1}], "repetition_penalty": 1.0, "min_p": 0.0,
        "response_format": {"type": "text"}, "best_of": 1, "bad_words": [], "use_beam_search": False,
        "return_token_ids": False, "spaces_between_special_tokens": True, "priority": 0,
    }  # fmt: skip
    for endpoint in Endpoint:
        parse(endpoint, **extras | ({"tool_choice": None} if endpoint is Endpoint.MESSAGES else {}))


def test_large_fields_are_refused_and_large_unknown_ones_are_not_decoded() -> None:
    """This holds for fields of every declared type."""
    many = json.dumps([1] * (1 << 20))

    def parse_with(field: str) -> None:
        body = json.dumps(MINIMAL[Endpoint.CHAT])[:-1] + f', "{field}": {many}}}'
        parse_request(Endpoint.CHAT, body.encode(), "tiny")

    parse_with("unknown")
    for field in ("stop", "metadata"):
        said = f"^{field}: has 3145728 bytes of JSON; 2097152 are the most for a field"
        with pytest.raises(ApiError, match=said):
            parse_with(field)


def test_fields_beside_large_ones_are_read_and_checked_as_ever() -> None:
    content = "w" * (3 << 20)
    message = {"role": "user", "content": content}
    request = chat(messages=[message], temperature=0.5, unknown=content)
    assert request.chat is not None
    assert request.chat.messages == (message,)
    assert request.options[0].sampling.temperature == 0.5
    for changes, said in (
        ({"temperature": 5}, "temperature: 5 must be"),
        ({"audio": {}}, "audio: an object"),
    ):
        with pytest.raises(ApiError, match=said):
            chat(unknown=content, **changes)
    parts = [{"type": "text", "text": "a"}, {"type": "image"}]
    with pytest.raises(ApiError, match=r'messages\[0\].content\[1\].type: "image" must be "text"'):
        parse(Endpoint.MESSAGES, messages=[{"role": "assistant", "content": parts, "x": content}])


def test_null_is_the_same_as_absent() -> None:
    """This holds for every declared field, of bodies and of messages."""
    for endpoint in Endpoint:
        body: dict[str, Any] = dict.fromkeys(BODIES[endpoint].__struct_fields__) | MINIMAL[endpoint]
        bare = parse_request(endpoint, json.dumps(MINIMAL[endpoint]).encode(), "tiny")
        assert parse_request(endpoint, json.dumps(body).encode(), "tiny") == bare


# --- the OpenAPI document ---------------------------------------------------------------------------

SCHEMAS = json.loads(openapi_document())["components"]["schemas"]


def errors(schema: str, value: object) -> list[str]:
    root = {"$ref": f"#/components/schemas/{schema}", "components": {"schemas": SCHEMAS}}
    found: list[str] = [e.message for e in jsonschema.Draft202012Validator(root).iter_errors(value)]
    return found


@pytest.mark.parametrize("endpoint", Endpoint)
def test_what_is_served_is_as_the_document_says(endpoint: Endpoint) -> None:
    assert errors(BODIES[endpoint].__name__, MINIMAL[endpoint]) == []


@pytest.mark.parametrize(("endpoint", "changes"), [case[:2] for case in TYPED_CASES])
def test_what_is_refused_for_a_type_or_bound_is_not_as_the_document_says(
    endpoint: Endpoint, changes: dict[str, Any]
) -> None:
    assert errors(BODIES[endpoint].__name__, MINIMAL[endpoint] | changes)


# --- lengths ---------------------------------------------------------------------------------------


LONG = "x" * 250
JOURNAL_HEAD = {"id": "0" * 32, "created": 7, "seed": 5}
FULL = "this model's maximum context length is 256 tokens, and one token more"
TOO_LONG = [
    (
        {"prompt": LONG, "max_tokens": 8},
        f"prompt: the prompt has 250 tokens and max_tokens is 8: 258 together; {FULL}",
    ),
    ({"prompt": "x" * 257}, f"is generated; {FULL}"),
    ({"prompt": "x" * 257, "max_tokens": 0}, f"the prompt has 257 tokens, and none is generated; {FULL}"),
    ({"prompt": "x" * 9000}, "200"),
    ({"prompt": "x" * 190, "max_tokens": 12}, "202 together; the pools of this node can hold 200"),
    ({"prompt": "x" * 90, "max_tokens": 12, "hisparse": False}, "can hold 100"),
    ({"prompt": ["a", "x" * 300]}, "prompt[1]: the prompt has 300 tokens"),
    ({"prompt": [1, 2, 100000]}, "prompt[2]: 100000 is no token id: the vocabulary has"),
    ({"stop_token_ids": [100000]}, "stop_token_ids: 100000 is no token id"),
    ({"logit_bias": {"1": 1, "100000": 1}}, "logit_bias: 100000 is no token id: the vocabulary has"),
    ({"prompt": "x" * 200, "min_tokens": 5}, "min_tokens: 5 is above 1"),
    ({"messages": [{"role": "user", "content": LONG}]}, "messages: the prompt has"),
    ({"messages": [*MESSAGES, {"role": "system", "content": "x"}]}, "system must come first"),
    ({"text": "a", "sampling_params": {"max_new_tokens": 300}}, "sampling_params.max_new_tokens is 300"),
    (
        {"text": "abc", "return_logprob": True, "logprob_start_len": 4},
        "logprob_start_len: 4 is behind the end of text, which has 3 tokens",
    ),
    (
        {"prompt": ["x" * 100] * 256, "max_tokens": 1, "prompt_logprobs": 20},
        "prompt: at least 525987 logprobs of prompt tokens are asked for, those of the likeliest tokens "
        "included; 524288 fit in one answer: split the request, or ask for fewer a token",
    ),
    (
        {"text": ["x" * 100] * 256, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
        | {"stream": True, "bootstrap_room": list(range(256))},
        "; 524288 fit in one answer",
    ),
    (
        {"prompt": "abc", "echo": True, "logprobs": 1, "stream": True, "journal": JOURNAL_HEAD}
        | {"journal_records": [[[0, [], [], None, None, None, 2], [0, [97]]]]},
        "journal_records: 2 must count all of the prompt's logprobs, which come before tokens",
    ),
]


@pytest.mark.parametrize(("changes", "said"), TOO_LONG)
def test_what_does_not_fit_is_400(changes: dict[str, Any], said: str) -> None:
    endpoints = {"messages": Endpoint.CHAT, "text": Endpoint.GENERATE}
    request = parse(endpoints.get(next(iter(changes)), Endpoint.COMPLETIONS), **changes)
    with pytest.raises(ApiError) as caught:
        plan(request)
    assert caught.value.status == 400
    assert said in caught.value.message


def test_logprobs_of_a_prompt_are_computed_once_for_all_samples() -> None:
    asked = {"echo": True, "logprobs": 1, "prompt_logprobs": 3}
    samples = plan(completion(prompt=["abc", "d", "ef"], n=2, max_tokens=9, **asked))
    abc, ef = WantedScores(1, 3), WantedScores(1, 3)
    assert [sample.generate.scores for sample in samples] == [abc, None, None, None, ef, None]
    assert [sample.wanted_scores for sample in samples] == [abc] * 6, (
        "also of a prompt that has none to compute"
    )
    assert [sample.echo for sample in samples] == ["abc", "abc", "d", "d", "ef", "ef"]
    (native,) = plan(generate(return_logprob=True, logprob_start_len=2))
    assert native.generate.scores == WantedScores(3, 0)


def test_a_stream_may_have_more_logprobs_of_prompts_than_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"prompt": ["x" * 100] * 256, "max_tokens": 1, "prompt_logprobs": 20, "stream": True}
    assert plan(completion(**asked))
    monkeypatch.setattr(wanted_scores, "MAX_STREAMED_SCORES", 1 << 19)
    with pytest.raises(ApiError, match="; 524288 fit in one stream: split the request, or ask for fewer a"):
        plan(completion(**asked))


def test_an_engine_scores_a_prompt_of_which_no_token_is_wanted() -> None:
    """The engine draws one token, as cheaply as possible."""
    drawing = {"temperature": 0.7, "repetition_penalty": 1.2, "logprobs": 2, "max_tokens": 0}
    samples = plan(completion(prompt=["abc", "d"], n=2, echo=True, **drawing))
    sent = [sample for group in engine_groups(samples) for sample in group.samples]
    assert [sample.scores for sample in sent] == [WantedScores(1, 2), None, None, None]
    assert {sample.sampling for sample in sent} == {SamplingParams(1, temperature=0.0)}


@pytest.mark.I6
def test_what_just_fits() -> None:
    assert plan(completion(prompt="x" * 190, max_tokens=10))[0].generate.sampling.max_new_tokens == 10
    assert plan(completion(prompt="x" * 90, max_tokens=10, hisparse=False))


@pytest.mark.I8
def test_a_hopeless_text_is_refused_without_encoding_it() -> None:
    tokenizer = make_tokenizer()
    codec = TextCodec(tokenizer, len(tokenizer))
    codec.backend = SimpleNamespace(normalizer=None)  # cannot encode
    with pytest.raises(ApiError, match=r"at least .* tokens; .* maximum context length is 200 tokens"):
        asyncio.run(plan_samples(completion(prompt="ab c" * 20_000), codec, LIMITS))
