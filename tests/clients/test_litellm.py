"""LiteLLM, which treats the pair as OpenAI, as vLLM and as Anthropic."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest

from tests.clients.conftest import Served
from tests.clients.notes import NUMBERS, answer, question, said, sentences
from tests.clients.shapes import MAX_TOKENS, QUESTION, SAMPLING, Ticket, Weather

pytestmark = pytest.mark.clients

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": Weather.__doc__,
        "parameters": Weather.model_json_schema(),
    },
}


def options(served: Served, provider: str = "openai") -> dict[str, Any]:
    """Options of ``litellm.completion``. For Anthropic it needs the service's address without /v1."""
    base = served.url if provider == "anthropic" else served.v1
    return {
        "model": f"{provider}/{served.model}",
        "api_base": base,
        "api_key": "none",
        "max_retries": 0,
        "timeout": 300,
    }


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_completion(demo: Served, provider: str) -> None:
    whole = litellm.completion(
        messages=said("calm otter"), temperature=0, max_tokens=64, **options(demo, provider)
    )
    assert whole.choices[0].message.content == answer("calm otter")
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens > 50


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_a_stream_of_acompletion(demo: Served, provider: str) -> None:
    async def ask(key: str) -> str:
        stream = await litellm.acompletion(
            messages=said(key), temperature=0, max_tokens=64, stream=True, **options(demo, provider)
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*map(ask, NUMBERS))

    assert asyncio.run(ask_all()) == [answer(key) for key in NUMBERS]


def test_text_completion(demo: Served) -> None:
    asked = {**options(demo), "model": f"text-completion-openai/{demo.model}"}
    whole = litellm.text_completion(
        prompt=f"{question('quiet raven')}\nAnswer:", temperature=0, max_tokens=32, **asked
    )
    assert whole.choices[0].text == sentences("quiet raven")


def test_responses(demo: Served) -> None:
    whole = litellm.responses(input=question("brave lynx"), temperature=0, **options(demo))
    assert whole.output_text == answer("brave lynx")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_response_format(tiny: Served, provider: str) -> None:
    whole = litellm.completion(
        messages=[{"role": "user", "content": "Write a ticket."}],
        response_format=Ticket,
        max_tokens=MAX_TOKENS,
        **SAMPLING,
        **options(tiny, provider),
    )
    Ticket.model_validate_json(whole.choices[0].message.content)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize(
    "tool_choice",
    ["required", {"type": "function", "function": {"name": "weather"}}],
    ids=["required", "named"],
)
def test_tools(tiny: Served, provider: str, tool_choice: Any) -> None:
    whole = litellm.completion(
        messages=[{"role": "user", "content": QUESTION}],
        tools=[WEATHER],
        tool_choice=tool_choice,
        parallel_tool_calls=False,
        max_tokens=MAX_TOKENS,
        **SAMPLING,
        **options(tiny, provider),
    )
    calls = whole.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert call.function.name == "weather"
        Weather.model_validate(json.loads(call.function.arguments))


def test_errors_are_of_litellms_own_classes(demo: Served) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=said("calm otter"), temperature=9, **options(demo))
    with pytest.raises(litellm.NotFoundError, match="another"):
        litellm.completion(messages=said("calm otter"), **{**options(demo), "model": "openai/another"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "a" * 9000}], **options(demo))
