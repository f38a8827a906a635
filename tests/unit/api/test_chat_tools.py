"""Tools and reasoning through the API of a decode node, read by the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from hisparse_pd.api.prompts import Prompt
from hisparse_pd.api.text_codec import TextCodec
from hisparse_pd.engine.messages import unpack_token_ids
from tests.unit.api import scripted_engine, support
from tests.unit.api.scripted_engine import stops_after
from tests.unit.api.support import ROOM, serving
from tests.unit.api.tiny_tokenizer import make_tokenizer

TEMPLATE = (
    "{% if tools %}[tools]{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls %}"
    "<{{ call.function.name }} {% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}"
    "{% endfor %}>{% endfor %}{% endfor %}[assistant]{% if thinking %}<think>\n{% endif %}"
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>7</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)


class RecordingCodec(TextCodec):
    """Keeps the prompts of the last request: the engine of a decode node is not sent them."""

    encoded: tuple[bytes, ...] = ()

    async def encode(
        self, prompts: Sequence[Prompt], names: Sequence[str], max_tokens: int
    ) -> tuple[bytes, ...]:
        self.encoded = await super().encode(prompts, names, max_tokens)
        return self.encoded


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Answer a request with the scripted text; returns what the check returns, and the prompt as text."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr(support, "CODEC", RecordingCodec(tokenizer, len(tokenizer), "glm_moe_dsa"))

    def run(text: str, check: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> tuple[Any, str]:
        async def main() -> tuple[Any, str]:
            async with serving(stops_after(text), tmp_path) as node:
                url = f"http://127.0.0.1:{node.port}/v1"
                async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=60) as client:
                    result = await check(client)
                encoded = support.CODEC.encoded  # type: ignore[attr-defined]
                token_ids = [i for prompt in encoded for i in unpack_token_ids(prompt).tolist()]
                return result, str(tokenizer.decode(token_ids))

        return asyncio.run(main())

    return run


async def whole(client: openai.AsyncOpenAI, **options: Any) -> Any:
    extra = {**ROOM, **options.pop("extra_body", {})}
    return (
        await client.chat.completions.create(
            **{"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "extra_body": extra, **options}
        )
    ).choices[0]


async def streamed(client: openai.AsyncOpenAI, **options: Any) -> list[Any]:
    extra = {**ROOM, **options.pop("extra_body", {})}
    stream = await client.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "extra_body": extra, **options}, stream=True
    )
    return [chunk.choices[0] async for chunk in stream]


def calls_of(choices: list[Any]) -> list[tuple[str, str]]:
    """Names and arguments of a stream's calls: each begins with id and name, and then its arguments grow."""
    calls: list[tuple[str, str]] = []
    ids = set()
    for choice in choices:
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert (call.index, call.type, call.function.arguments) == (len(calls), "function", "")
                ids.add(call.id)
                calls.append((call.function.name, ""))
            else:
                assert (call.index, call.type, call.function.name) == (len(calls) - 1, None, None)
                calls[-1] = (calls[-1][0], calls[-1][1] + call.function.arguments)
    assert len(ids) == len(calls)
    return calls


def test_a_call_in_a_whole_answer(ask: Callable[..., Any]) -> None:
    choice, prompt = ask(CALL, whole)
    assert prompt == "[tools]weather[user]hi[assistant]"
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "7", "days": 3}


def test_calls_in_a_stream(ask: Callable[..., Any]) -> None:
    choices, _ = ask(f"Look:\n{CALL}\n{CALL}", streamed)
    assert "".join(choice.delta.content or "" for choice in choices) == "Look:\n"
    assert [json.loads(arguments) for _, arguments in calls_of(choices)] == [{"city": "7", "days": 3}] * 2
    assert {name for name, _ in calls_of(choices)} == {"weather"}
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    assert choices[-1].finish_reason


def test_reasoning_is_shown_beside_the_content(ask: Callable[..., Any]) -> None:
    text = "Hm.\n</think>\n\nYes."
    options = {"tools": openai.NOT_GIVEN, "extra_body": {"chat_template_kwargs": {"thinking": True}}}
    choice, prompt = ask(text, lambda client: whole(client, **options))
    assert prompt.endswith("<think>\n")
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.\n", "Yes.")
    assert choice.finish_reason == "stop"
    choices, _ = ask(text, lambda client: streamed(client, **options))
    assert "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices) == "Hm.\n"
    assert "".join(choice.delta.content or "" for choice in choices) == "Yes."


def test_a_call_ends_the_reasoning_that_the_prompt_began(ask: Callable[..., Any]) -> None:
    options = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
    choice, _ = ask(f"Hm.{CALL}", lambda client: whole(client, **options))
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", None)
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")
    choices, _ = ask(f"Hm.{CALL}", lambda client: streamed(client, **options))
    assert "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices) == "Hm."
    assert [name for name, _ in calls_of(choices)] == ["weather"]


def test_reasoning_stays_where_it_is_for_who_wants_that(ask: Callable[..., Any]) -> None:
    text = "Hm.</think>Yes."
    extra = {"chat_template_kwargs": {"thinking": True}, "separate_reasoning": False}
    choice, _ = ask(text, lambda client: whole(client, extra_body=extra))
    assert choice.message.content == text


@pytest.mark.parametrize("options", [{"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}])
def test_without_tools_a_call_is_text(ask: Callable[..., Any], options: dict[str, Any]) -> None:
    choice, prompt = ask(CALL, lambda client: whole(client, **options))
    assert prompt == "[user]hi[assistant]"
    assert choice.message.content == CALL
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_earlier_calls_and_their_results_reach_the_template(ask: Callable[..., Any]) -> None:
    messages = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "(hm)",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"days": 2}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    _, prompt = ask("Rain.", lambda client: whole(client, messages=messages))
    assert prompt == "[tools]weather[user]hi[assistant](hm)<weather days=2>[tool]rain[assistant]"


def test_tools_that_the_template_does_not_show_are_refused(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    monkeypatch.setattr(support, "CODEC", RecordingCodec(tokenizer, len(tokenizer), "glm_moe_dsa"))

    async def refused(client: openai.AsyncOpenAI) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            await whole(client)
        await whole(client, tools=openai.NOT_GIVEN)
        return str(caught.value)

    said, _ = ask("x", refused)
    assert "tools: the model's chat template takes none" in said


# --- DeepSeek-V3.2, which has no template -----------------------------------------------------------

DSML_CALL = (
    "\n\n<|DSML|function_calls>\n"
    '<|DSML|invoke name="weather">\n'
    '<|DSML|parameter name="city" string="true">7</|DSML|parameter>\n'
    '<|DSML|parameter name="days" string="false">3</|DSML|parameter>\n'
    "</|DSML|invoke>\n"
    "</|DSML|function_calls>"
).replace("|", "\N{FULLWIDTH VERTICAL LINE}")


@pytest.fixture
def ask_deepseek(ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    monkeypatch.setattr(support, "CODEC", RecordingCodec(tokenizer, len(tokenizer), "deepseek_v32"))
    for limit in ("CONTEXT_LENGTH", "POOL_HISPARSE", "POOL_DENSE"):
        monkeypatch.setattr(scripted_engine, limit, 4096)
    return ask


def test_deepseek_calls_tools_without_a_template(ask_deepseek: Callable[..., Any]) -> None:
    thinking = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
    choice, prompt = ask_deepseek(
        f"Where?</think>I look.{DSML_CALL}", lambda client: whole(client, **thinking)
    )
    assert '<functions>\n{"name": "weather"' in prompt
    assert prompt.endswith("<think>")
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.reasoning_content, choice.message.content) == ("Where?", "I look.")
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "7", "days": 3})
    # What was answered goes back as it is, and the model reads what it wrote.
    answer = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    _, prompt = ask_deepseek(
        "Rain.", lambda client: whole(client, messages=[*MESSAGES, answer, result], **thinking)
    )
    assert f"<think>Where?</think>I look.{DSML_CALL}" in prompt
    assert prompt.endswith("<function_results>\n<result>rain</result>\n</function_results>\n\n<think>")


def test_a_deepseek_stream_shows_calls_of_a_developers_own_tools(ask_deepseek: Callable[..., Any]) -> None:
    messages = [{"role": "developer", "content": "hi", "tools": TOOLS}]
    options = {"tools": openai.NOT_GIVEN, "messages": messages}
    choices, prompt = ask_deepseek(f"Look:{DSML_CALL}", lambda client: streamed(client, **options))
    assert '<functions>\n{"name": "weather"' in prompt
    assert "".join(choice.delta.content or "" for choice in choices) == "Look:"
    ((_, arguments),) = calls_of(choices)
    assert json.loads(arguments) == {"city": "7", "days": 3}
    choice, prompt = ask_deepseek(DSML_CALL, lambda client: whole(client, tool_choice="none", **options))
    assert "<functions>" not in prompt
    assert choice.message.content == DSML_CALL
    assert choice.message.tool_calls is None


def test_a_format_for_the_answer_is_refused_in_messages_too(ask_deepseek: Callable[..., Any]) -> None:
    message = {"role": "system", "content": "hi", "response_format": {"type": "json_object"}}

    async def refused(client: openai.AsyncOpenAI) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            await whole(client, messages=[message])
        await whole(client)
        return str(caught.value)

    said, _ = ask_deepseek("x", refused)
    assert "messages[0].response_format" in said
