"""Tools and reasoning through the API of a decode node, read by the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.unit.api import scripted_engine, support
from tests.unit.api.recording_codec import RecordingCodec
from tests.unit.api.scripted_engine import stops_after
from tests.unit.api.support import ROOM, serving
from tests.unit.api.tiny_tokenizer import make_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("codec")]

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


@asynccontextmanager
async def answering(tmp_path: Path, text: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a node whose model says ``text``."""
    async with serving(stops_after(text), tmp_path) as node:
        url = f"http://127.0.0.1:{node.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, timeout=60) as client:
            yield client


async def whole(client: openai.AsyncOpenAI, **options: Any) -> Any:
    extra = {**ROOM, **options.pop("extra_body", {})}
    return (
        await client.chat.completions.create(
            **{"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "extra_body": extra, **options}
        )
    ).choices[0]


ARGUMENTS = {"city": "7", "days": 3}
THINKING = {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}


async def test_calls(tmp_path: Path, codec: RecordingCodec) -> None:
    async with answering(tmp_path, CALL) as client:
        choice = await whole(client)
        assert codec.prompt == "[tools]weather[user]hi[assistant]"
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments) == ARGUMENTS


async def test_reasoning_is_shown_beside_the_content(tmp_path: Path, codec: RecordingCodec) -> None:
    async with answering(tmp_path, "Hm.\n</think>\n\nYes.") as client:
        options = {"tools": openai.NOT_GIVEN, "extra_body": THINKING}
        choice = await whole(client, **options)
        assert codec.prompt.endswith("<think>\n")
        assert (choice.message.reasoning_content, choice.message.content) == ("Hm.\n", "Yes.")
        assert choice.finish_reason == "stop"
        choice = await whole(client, extra_body={**THINKING, "separate_reasoning": False})
        assert choice.message.content == "Hm.\n</think>\n\nYes."


async def test_a_call_ends_the_reasoning_that_the_prompt_began(tmp_path: Path) -> None:
    async with answering(tmp_path, f"Hm.{CALL}") as client:
        choice = await whole(client, extra_body=THINKING)
        assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", None)
        assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")


@pytest.mark.parametrize("options", [{"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}])
async def test_without_tools_a_call_is_text(
    tmp_path: Path, codec: RecordingCodec, options: dict[str, Any]
) -> None:
    async with answering(tmp_path, CALL) as client:
        choice = await whole(client, **options)
        assert codec.prompt == "[user]hi[assistant]"
        assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
        assert choice.finish_reason == "stop"


async def test_earlier_calls_and_their_results_reach_the_template(
    tmp_path: Path, codec: RecordingCodec
) -> None:
    function = {"name": "weather", "arguments": '{"days": 2}'}
    called = [{"id": "c1", "type": "function", "function": function}]
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning_content": "(hm)", "tool_calls": called},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    async with answering(tmp_path, "Rain.") as client:
        await whole(client, messages=messages)
    shown = '(hm)<c1 weather {"days": 2}>[toolc1]rain[assistant]'
    assert codec.prompt == f"[tools]weather[user]hi[assistant]{shown}"


async def test_tools_that_the_template_does_not_show_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    monkeypatch.setattr(support, "CODEC", RecordingCodec(tokenizer, len(tokenizer), "glm_moe_dsa"))
    async with answering(tmp_path, "x") as client:
        with pytest.raises(openai.BadRequestError, match="tools: the model's chat template takes none"):
            await whole(client)
        await whole(client, tools=openai.NOT_GIVEN)


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
def deepseek(monkeypatch: pytest.MonkeyPatch) -> RecordingCodec:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    codec = RecordingCodec(tokenizer, len(tokenizer), "deepseek_v32")
    monkeypatch.setattr(support, "CODEC", codec)
    for limit in ("CONTEXT_LENGTH", "POOL_HISPARSE", "POOL_DENSE"):
        monkeypatch.setattr(scripted_engine, limit, 4096)
    return codec


async def test_deepseek_calls_tools_without_a_template(tmp_path: Path, deepseek: RecordingCodec) -> None:
    async with answering(tmp_path, f"Where?</think>I look.{DSML_CALL}") as client:
        choice = await whole(client, extra_body=THINKING)
        assert '<functions>\n{"name": "weather"' in deepseek.prompt
        assert deepseek.prompt.endswith("<think>")
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.reasoning_content, choice.message.content) == ("Where?", "I look.")
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", ARGUMENTS)
        # What was answered goes back as it is, and the model reads what it wrote.
        answer = choice.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        await whole(client, messages=[*MESSAGES, answer, result], extra_body=THINKING)
        assert f"<think>Where?</think>I look.{DSML_CALL}" in deepseek.prompt
        results = "<function_results>\n<result>rain</result>\n</function_results>\n\n<think>"
        assert deepseek.prompt.endswith(results)


async def test_deepseek_calls_a_developers_own_tools(tmp_path: Path, deepseek: RecordingCodec) -> None:
    messages = [{"role": "developer", "content": "hi", "tools": TOOLS}]
    options = {"tools": openai.NOT_GIVEN, "messages": messages}
    async with answering(tmp_path, f"Look:{DSML_CALL}") as client:
        choice = await whole(client, **options)
        assert '<functions>\n{"name": "weather"' in deepseek.prompt
        (call,) = choice.message.tool_calls
        assert (choice.message.content, json.loads(call.function.arguments)) == ("Look:", ARGUMENTS)
        choice = await whole(client, tool_choice="none", **options)
        assert "<functions>" not in deepseek.prompt
        assert (choice.message.content, choice.message.tool_calls) == (f"Look:{DSML_CALL}", None)
