# ruff: noqa: RUF001 -- the marks of the models are written with wide bars
"""Conversations as checkpoints' templates take them: roles, arguments of earlier calls, levels of effort."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.serving.api.bodies import ChatBody
from hisparse_pd.serving.api.declared_decoding import decode_body
from hisparse_pd.serving.api.openai_chat import parse_chat_prompt
from hisparse_pd.serving.api.prompts import ChatPrompt
from hisparse_pd.serving.api.text_codec import TextCodec
from tests.unit.api.tiny_tokenizer import make_tokenizer

V31_CALL = "{{ '<｜tool▁sep｜>' + call.function.arguments }}"
GLM_CALL = "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}={{ value }}{% endfor %}"
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls %}CALL{% endfor %}{% endfor %}"
)
GLM, V31 = CHAT.replace("CALL", GLM_CALL), CHAT.replace("CALL", V31_CALL)
OWN = None
"""Our own template of DeepSeek-V3.2."""
DEVELOPER = {"role": "developer", "content": "D."}
HELLO = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def written(template: str | None, messages: list[Any], **fields: Any) -> str:
    """Return the prompt of a chat completion."""
    tokenizer = make_tokenizer()
    tokenizer.bos_token = ""
    tokenizer.chat_template = template
    codec = TextCodec(tokenizer, len(tokenizer), "deepseek_v32")
    body = decode_body(ChatBody, msgspec.json.encode({"messages": messages, **fields}))
    prompt = parse_chat_prompt(body)
    assert isinstance(prompt, ChatPrompt)
    (packed,) = asyncio.run(codec.encode([prompt], ["messages"], 100_000))
    return str(tokenizer.decode(unpack_token_ids(packed).tolist()))


def test_a_developer_is_the_system_where_the_template_knows_no_other() -> None:
    assert written(GLM, [DEVELOPER, HELLO]) == "[system]D.[user]hi"
    assert written(GLM + "{# developer #}", [DEVELOPER, HELLO]) == "[developer]D.[user]hi"


def test_of_our_own_template_a_developer_without_tools_asks_nothing() -> None:
    """With tools, the message is a search agent's question, and is answered."""
    asked = "<｜User｜>hi<｜Assistant｜></think>"
    assert written(OWN, [DEVELOPER, HELLO]) == f"D.{asked}"
    searching = written(OWN, [DEVELOPER | {"tools": [TOOL]}, HELLO])
    assert searching.startswith("<｜User｜>\n\n## Tools")
    assert searching.endswith(f"# The user's message is: D.<｜Assistant｜></think>{asked}")


NO_OBJECT = ['{"a": "b', "[1]", "7", "so", '{"a": 1}}']


def calling(arguments: str) -> list[Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "?"}]


@pytest.mark.parametrize("arguments", NO_OBJECT)
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (GLM, "<arg_key>arguments={}"),
        (V31, "<｜tool▁sep｜>{}"),
        (OWN, '<｜DSML｜parameter name="arguments" string="true">{}</｜DSML｜parameter>'),
    ],
    ids=["glm", "v31", "own"],
)
def test_arguments_that_are_no_json_object_are_shown_as_they_are(
    template: str | None, shown: str, arguments: str
) -> None:
    """Arguments that max_tokens cut off, or that the model got wrong, come back with the next turn."""
    assert shown.format(arguments) in written(template, calling(arguments))


def test_a_json_object_of_arguments_is_text_for_v31_alone() -> None:
    arguments = '{"city": "杭州", "days": 2}'
    assert f"<｜tool▁sep｜>{arguments}" in written(V31, calling(arguments))
    assert "<arg_key>city=杭州<arg_key>days=2" in written(GLM, calling(arguments))


def test_reasoning_has_two_names() -> None:
    answer = {"role": "assistant", "content": "a"}
    assert "[assistant]hma" in written(GLM, [HELLO, answer | {"reasoning": "hm"}])
    both = answer | {"reasoning": "no", "reasoning_content": "hm"}
    assert "[assistant]hma" in written(GLM, [HELLO, both])
    assert "[user]hi" in written(GLM, [HELLO | {"reasoning": "hm"}])


def test_texts_of_a_message_are_joined_by_nothing() -> None:
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    assert written(GLM, [{"role": "user", "content": parts}]) == "[user]ab"


TWO_LEVELS = "{{ 'high' if reasoning_effort == 'high' else 'max' }}"
THREE_LEVELS = '{{ reasoning_effort if reasoning_effort in ["low", "high"] else "max" }}'
SWITCH = "{{ '' if enable_thinking is defined and not enable_thinking else 'LEVEL' }}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (SWITCH.replace("'LEVEL'", TWO_LEVELS[2:-2]), ["", "", "high", "high", "high", "max", "max"]),
        ("{{ 'half' if reasoning_effort == 'medium' else 'full' }}", [*["half"] * 4, *["full"] * 3]),
        (THREE_LEVELS, ["low", "low", "low", "high", "high", "max", "max"]),
        ("{{ reasoning_effort }}", ["none", "minimal", "low", "medium", "high", "xhigh", "max"]),
        (SWITCH, ["", "", *["LEVEL"] * 5]),
        ("{{ 'on' if thinking }}", [""] * 7),
    ],
    ids=["two levels", "a level and a default", "three levels", "any level", "a switch", "off by default"],
)
def test_an_effort_is_the_next_one_that_the_template_knows(template: str, shown: list[str]) -> None:
    efforts = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
    found = [written(f"-{template}", [HELLO], reasoning_effort=effort) for effort in efforts]
    assert found == [f"-{level}" for level in shown]


def test_what_the_client_sets_of_the_template_comes_first() -> None:
    given = {"enable_thinking": True}
    assert written(SWITCH, [HELLO], reasoning_effort="none", chat_template_kwargs=given) == "LEVEL"
