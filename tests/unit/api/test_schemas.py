"""Bodies of requests: what each field means, and which lengths fit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.base.vocabulary import HisparseFlag, SamplingParams, pack_logit_bias
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, page_keys, root_of
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.prompt_scores import WantedScores
from hisparse_pd.serving.api import wanted_scores
from hisparse_pd.serving.api.bodies import Endpoint
from hisparse_pd.serving.api.requests import RequestLimits, SampleRequest, engine_groups, plan_samples
from hisparse_pd.serving.api.schemas import ApiRequest, derive_room
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.http.http_errors import ApiError
from tests.unit.api.scripted_engine import CONTEXT_LENGTH
from tests.unit.api.support import MESSAGES, parse
from tests.unit.api.tiny_tokenizer import make_tokenizer

LIMITS = RequestLimits(CONTEXT_LENGTH, 200, 100)
PAGE = 4


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
    return asyncio.run(plan_samples(request, TextCodec(tokens, len(tokens)), limits, PAGE))


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
    request = completion(prompt=["x" * 9, "y"], n=2, cache_salt="s", extra_key=["a", None])
    assert request.roots == (root_of("s", "a"), root_of("s"))
    samples = plan(request)
    expected = list(zip(request.roots, (samples[0].prompt, samples[2].prompt), strict=True))
    groups = engine_groups(samples)
    assert [(group.root, group.prompt) for group in groups] == expected
    keys = [tuple(page_keys(root, prompt, PAGE)) for root, prompt in expected]
    assert [group.page_keys for group in groups] == keys
    assert keys[0]
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


LONG_CONTEXT = RequestLimits(1 << 20, 1 << 20, 1 << 20)


@pytest.mark.I8
def test_an_answer_has_a_bounded_number_of_output_logprobs() -> None:
    """Those of all samples count, as if each of them had as many tokens as it may."""
    asked = {"logprobs": True, "top_logprobs": 7, "n": 4}  # 32 logprobs for a token of each sample
    fits = plan(chat(**asked, max_tokens=1 << 17), LONG_CONTEXT)
    assert [sample.generate.sampling.max_new_tokens for sample in fits] == [1 << 17] * 4
    said = (
        "max_tokens: at least 4194336 logprobs of output tokens are asked for, those of the likeliest tokens "
        "and of all samples included; 4194304 fit in one answer: lower it, n or the number of logprobs, or "
        "split the request"
    )
    with pytest.raises(ApiError, match=f"^{said}$"):
        plan(chat(**asked, max_tokens=(1 << 17) + 1), LONG_CONTEXT)
    with pytest.raises(ApiError, match="; 4194304 fit in one stream: "):
        plan(chat(**asked, max_tokens=(1 << 17) + 1, stream=True), LONG_CONTEXT)


@pytest.mark.I8
def test_a_default_length_is_cut_to_the_logprobs_that_fit() -> None:
    (cut, *_) = plan(chat(logprobs=True, top_logprobs=7, n=4), LONG_CONTEXT)
    assert cut.generate.sampling.max_new_tokens == 1 << 17
    (whole,) = plan(chat(), LONG_CONTEXT)
    assert whole.generate.sampling.max_new_tokens > 1 << 19


@pytest.mark.I8
def test_a_stream_that_repeats_its_logprobs_has_fewer() -> None:
    asked: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 7}
    asked["sampling_params"] = {"max_new_tokens": (1 << 16) + 1}
    assert plan(generate(**asked), LONG_CONTEXT)
    with pytest.raises(ApiError, match="at least 524296 logprobs of output tokens"):
        plan(generate(**asked, stream=True), LONG_CONTEXT)


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
        asyncio.run(plan_samples(completion(prompt="ab c" * 20_000), codec, LIMITS, PAGE))
