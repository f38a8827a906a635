"""Tools and reasoning of chats: what reaches the model's template, and how its answer is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.api import scripted_engine, support
from tests.unit.api.recording_codec import RecordingCodec
from tests.unit.api.scripted_engine import stops_after
from tests.unit.api.support import MESSAGES, ROOM, Node, serving
from tests.unit.api.tiny_tokenizer import make_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("codec")]

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>7</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)
ARGUMENTS = {"city": "7", "days": 3}
THINKING = {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}}


async def answered(node: Node, **changes: Any) -> tuple[Any, str]:
    """Return the message that answers a chat with tools, and its finish reason."""
    body = {"messages": MESSAGES, "tools": TOOLS, **ROOM, **changes}
    (choice,) = (await node.answer("/v1/chat/completions", **body))["choices"]
    return choice["message"], choice["finish_reason"]


async def test_reasoning_is_shown_beside_the_content(tmp_path: Path, codec: RecordingCodec) -> None:
    async with serving(stops_after("Hm.\n</think>\n\nYes."), tmp_path) as node:
        message, _ = await answered(node, tools=None, **THINKING)
        assert codec.prompt.endswith("<think>\n")
        assert (message["reasoning_content"], message["content"]) == ("Hm.\n", "Yes.")
        message, _ = await answered(node, **THINKING, separate_reasoning=False)
        assert message["content"] == "Hm.\n</think>\n\nYes."


@pytest.mark.parametrize("options", [{"tools": None}, {"tool_choice": "none"}])
async def test_without_tools_a_call_is_text(
    tmp_path: Path, codec: RecordingCodec, options: dict[str, Any]
) -> None:
    async with serving(stops_after(CALL), tmp_path) as node:
        message, reason = await answered(node, **options)
        assert codec.prompt == "[user]hi[assistant]"
        assert (message["content"], "tool_calls" in message, reason) == (CALL, False, "stop")


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
    async with serving(stops_after("Rain."), tmp_path) as node:
        await answered(node, messages=messages)
    shown = '(hm)<c1 weather {"days": 2}>[toolc1]rain[assistant]'
    assert codec.prompt == f"[tools]weather[user]hi[assistant]{shown}"


async def test_tools_that_the_template_does_not_show_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    monkeypatch.setattr(support, "CODEC", RecordingCodec(tokenizer, len(tokenizer), "glm_moe_dsa"))
    async with serving(stops_after("x"), tmp_path) as node:
        refused = await node.post("/v1/chat/completions", messages=MESSAGES, tools=TOOLS, **ROOM)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "tools: the model's chat template takes none"
        await answered(node, tools=None)


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
    async with serving(stops_after(f"Where?</think>I look.{DSML_CALL}"), tmp_path) as node:
        message, reason = await answered(node, **THINKING)
        assert '<functions>\n{"name": "weather"' in deepseek.prompt
        assert deepseek.prompt.endswith("<think>")
        assert (message["reasoning_content"], message["content"]) == ("Where?", "I look.")
        (call,) = message["tool_calls"]
        assert (call["type"], call["function"]["name"], reason) == ("function", "weather", "tool_calls")
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
        # What was answered goes back as it is, and the model reads what it wrote.
        result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        await answered(node, messages=[*MESSAGES, message, result], **THINKING)
        results = "<function_results>\n<result>rain</result>\n</function_results>\n\n<think>"
        assert f"<think>Where?</think>I look.{DSML_CALL}" in deepseek.prompt
        assert deepseek.prompt.endswith(results)


async def test_deepseek_calls_a_developers_own_tools(tmp_path: Path, deepseek: RecordingCodec) -> None:
    developers = {"tools": None, "messages": [{"role": "developer", "content": "hi", "tools": TOOLS}]}
    async with serving(stops_after(f"Look:{DSML_CALL}"), tmp_path) as node:
        message, _ = await answered(node, **developers)
        assert '<functions>\n{"name": "weather"' in deepseek.prompt
        (call,) = message["tool_calls"]
        assert (message["content"], json.loads(call["function"]["arguments"])) == ("Look:", ARGUMENTS)
        message, _ = await answered(node, **developers, tool_choice="none")
        assert "<functions>" not in deepseek.prompt
        assert (message["content"], "tool_calls" in message) == (f"Look:{DSML_CALL}", False)
