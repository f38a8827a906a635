"""The official ``openai`` client against the router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.integration.harness import Deployment, generate_body, openai_client, streamed

PROMPT = "The pages of the pool are sixty-four tokens long, and the last one is rarely full. " * 4


@pytest.fixture(scope="module")
def client(pair: Deployment) -> Iterator[openai.OpenAI]:
    with openai_client(pair.url) as made:
        yield made


ASKED: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}


def complete(client: openai.OpenAI, **options: Any) -> openai.types.Completion:
    completion = client.completions.create(**ASKED | options)
    assert isinstance(completion, openai.types.Completion)
    return completion


def test_completion_usage_says_what_happened(client: openai.OpenAI) -> None:
    completion = complete(client, extra_body={"hisparse": True, "ignore_eos": True})
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(PROMPT.encode())
    assert completion.usage.completion_tokens == 12
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 12
    usage = completion.usage.model_dump()
    assert usage["hisparse"]["mode"] == "hisparse"
    assert usage["hisparse"]["hits"] > 0
    assert usage["hisparse"]["misses"] > 0
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert completion.choices[0].finish_reason == "length"


def test_the_second_run_of_a_prompt_hits_the_prefix_cache(client: openai.OpenAI, pair: Deployment) -> None:
    pair.flush_prefix_caches()
    first, second = complete(client).usage, complete(client).usage
    assert first is not None
    assert second is not None
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == (len(PROMPT.encode()) - 1) // 64 * 64


@pytest.mark.parametrize(
    "hisparse", [True, *(pytest.param(flag, marks=pytest.mark.slow) for flag in (False, "auto"))]
)
def test_streaming_gives_the_same_text(client: openai.OpenAI, hisparse: bool | str) -> None:
    extra = {"hisparse": hisparse, "ignore_eos": True}
    whole = complete(client, extra_body=extra)
    pieces = []
    usage = None
    stream = client.completions.create(
        **ASKED, stream=True, stream_options={"include_usage": True}, extra_body=extra
    )
    for chunk in stream:
        usage = chunk.usage or usage
        pieces += [choice.text for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].text
    assert len([piece for piece in pieces if piece]) > 1
    assert usage is not None
    assert usage.completion_tokens == 12
    assert usage.model_dump()["hisparse"]["mode"] in ("hisparse", "dense")


def test_a_bias_forces_a_token_and_a_penalty_ends_its_repetition(client: openai.OpenAI) -> None:
    forced = complete(client, logit_bias={"77": 100})
    assert forced.choices[0].text == "M" * 12
    varied = complete(client, logit_bias={"77": 3, "78": 3}, frequency_penalty=2, presence_penalty=2)
    assert varied.choices[0].text.count("M") < 12


def test_logprobs(client: openai.OpenAI) -> None:
    completion = complete(client, logprobs=3, extra_body={"ignore_eos": True})
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == 12
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen is not None
        assert chosen <= 0
        assert max(top.values()) == pytest.approx(chosen, abs=1e-5)  # greedy picks the likeliest


def test_a_stream_echoes_its_prompt_with_logprobs(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 2, "extra_body": {"prompt_logprobs": 20}}
    (whole,) = complete(client, **asked).choices
    text = ""
    logprobs: list[Any] = []
    prompt_logprobs: list[Any] = []
    stream = client.completions.create(**ASKED, **asked, stream=True)
    for choice in [choice for chunk in stream for choice in chunk.choices]:
        text += choice.text
        logprobs.append(choice.logprobs)
        prompt_logprobs += choice.model_dump().get("prompt_logprobs") or []
    assert text == whole.text
    assert text.startswith(PROMPT)
    assert whole.logprobs is not None
    for name, entries in whole.logprobs.model_dump().items():
        assert [entry for each in logprobs for entry in getattr(each, name)] == entries
    assert prompt_logprobs == whole.model_dump()["prompt_logprobs"]
    assert len(prompt_logprobs) == len(PROMPT.encode())


def test_generate_speaks_sglangs_native_api(pair: Deployment) -> None:
    body = generate_body(text=PROMPT, params={"max_new_tokens": 9}, hisparse=True)
    whole = httpx.post(f"{pair.url}/generate", json=body, timeout=60).json()
    assert len(whole["output_ids"]) == 9
    assert whole["meta_info"]["prompt_tokens"] == len(PROMPT.encode())
    assert whole["meta_info"]["completion_tokens"] == 9
    assert whole["meta_info"]["finish_reason"]["type"] == "length"
    assert whole["meta_info"]["hisparse"]["mode"] == "hisparse"
    assert streamed(f"{pair.url}/generate", body)[-1]["text"] == whole["text"]
