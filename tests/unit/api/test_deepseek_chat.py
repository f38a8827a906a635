# ruff: noqa: RUF001 -- the marks of the model are written with wide bars
"""The chat of DeepSeek-V3.2, whose checkpoint has no template: the prompts are as its authors show them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from hisparse_pd.api.chat_format import ToolMarkup
from hisparse_pd.api.deepseek_chat import encode_chat
from hisparse_pd.api.prompts import ChatPrompt, written_arguments
from hisparse_pd.api.text_codec import TextCodec
from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.http.http_errors import ApiError
from protocol.decoding import MAX_NESTING
from tests.unit.api.tiny_tokenizer import make_tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "Hello! I am DeepSeek.", "reasoning_content": "thinking..."}
SUM = {"role": "user", "content": "1+1=?"}
BEFORE = (
    f"{BOS}<｜User｜>hello<｜Assistant｜></think>Hello! I am DeepSeek.{EOS}<｜User｜>1+1=?<｜Assistant｜>"
)


def write_checkpoint(directory: Path, template: str | None = None, model_type: str = "deepseek_v32") -> Path:
    tokenizer = make_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = BOS, EOS
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("deepseek"))


def prompt_text(
    checkpoint: Path, *messages: dict[str, Any], continued: bool = False, **arguments: Any
) -> str:
    tools = tuple(arguments.pop("tools", ()))
    prompt = ChatPrompt(messages, arguments, continued, tools, separate_reasoning=True)
    (packed,) = asyncio.run(TextCodec.load(checkpoint).encode([prompt], ["messages"], 10_000))
    token_ids = unpack_token_ids(packed).tolist()
    text = PreTrainedTokenizerFast.from_pretrained(checkpoint).decode(token_ids)
    assert isinstance(text, str)
    return text


def test_what_was_thought_before_is_left_out(checkpoint: Path) -> None:
    assert prompt_text(checkpoint, HELLO, ANSWER, SUM) == BEFORE + "</think>"


@pytest.mark.parametrize("name", ["thinking", "enable_thinking"])
def test_thinking_opens_the_answer_with_it(checkpoint: Path, name: str) -> None:
    assert prompt_text(checkpoint, HELLO, ANSWER, SUM, **{name: True}) == BEFORE + "<think>"
    assert prompt_text(checkpoint, HELLO, ANSWER, SUM, **{name: False}) == BEFORE + "</think>"


def test_the_system_comes_first_and_has_no_mark(checkpoint: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    assert prompt_text(checkpoint, system, HELLO) == f"{BOS}Be brief.<｜User｜>hello<｜Assistant｜></think>"
    assert prompt_text(checkpoint, system) == f"{BOS}Be brief.<｜Assistant｜></think>"


def test_an_answer_that_was_begun_goes_on(checkpoint: Path) -> None:
    begun = {"role": "assistant", "content": "Two, be"}
    assert prompt_text(checkpoint, HELLO, ANSWER, SUM, begun, continued=True) == BEFORE + "</think>Two, be"
    thought = begun | {"reasoning_content": "Hm."}
    found = prompt_text(checkpoint, HELLO, ANSWER, SUM, thought, continued=True, thinking=True)
    assert found == BEFORE + "<think>Hm.</think>Two, be"


FORECAST = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "天气",
        "parameters": {"type": "object", "properties": {}},
    },
}
SHOWN_FORECAST = (
    '{"name": "forecast", "description": "天气", "parameters": {"type": "object", "properties": {}}}'
)
SPACE = {"role": "system", "content": ""}
HEAD, _, TAIL = encode_chat(ChatPrompt((SPACE,), {}, False, (FORECAST,), True), "", "").partition(
    SHOWN_FORECAST
)
TAIL = TAIL.removesuffix("<｜Assistant｜></think>")


def test_the_text_about_tools_is_word_for_word_what_the_model_was_trained_on() -> None:
    """As its authors' encoder writes it."""
    digest = hashlib.sha256((HEAD + TAIL).encode()).hexdigest()
    assert digest == "05d1fb2e79f2f92049694ff7c2840faed8fcb20fee32ad85473fdee890cdef0a"


def tools_text(*shown: str) -> str:
    return HEAD + "\n".join(shown) + TAIL


def call(call_id: str | None, name: str = "forecast", **arguments: Any) -> dict[str, Any]:
    shown = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return shown if call_id is None else shown | {"id": call_id}


def calling(*calls: dict[str, Any], content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def result(content: str, call_id: str | None = None) -> dict[str, Any]:
    shown = {"role": "tool", "content": content}
    return shown if call_id is None else shown | {"tool_call_id": call_id}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            ({"role": "system", "content": "Be brief."}, HELLO),
            f"{BOS}Be brief.{tools_text(SHOWN_FORECAST)}<｜User｜>hello<｜Assistant｜></think>",
        ),
        ((HELLO,), f"{BOS}{tools_text(SHOWN_FORECAST)}<｜User｜>hello<｜Assistant｜></think>"),
        (
            ({"role": "system", "content": "", "tools": [FORECAST]}, HELLO),
            f"{BOS}{tools_text(SHOWN_FORECAST, SHOWN_FORECAST)}<｜User｜>hello<｜Assistant｜></think>",
        ),
    ],
)
def test_tools_are_told_of_in_the_first_system_message(
    checkpoint: Path, messages: tuple[dict[str, Any], ...], expected: str
) -> None:
    assert prompt_text(checkpoint, *messages, tools=[FORECAST]) == expected


def test_a_developer_asks_as_a_user_does_and_may_bring_tools(checkpoint: Path) -> None:
    developer = {"role": "developer", "content": "Find it.", "tools": [FORECAST]}
    asked = f"<｜User｜>{tools_text(SHOWN_FORECAST)}\n\n# The user's message is: Find it.<｜Assistant｜>"
    assert prompt_text(checkpoint, developer) == f"{BOS}{asked}</think>"
    assert prompt_text(checkpoint, developer, thinking=True) == f"{BOS}{asked}<think>"
    answered = prompt_text(checkpoint, developer, ANSWER, SUM, thinking=True)
    assert answered == (
        f"{BOS}{asked}</think>Hello! I am DeepSeek.{EOS}<｜User｜>1+1=?<｜Assistant｜><think>"
    )


CALLS = """

<｜DSML｜function_calls>
<｜DSML｜invoke name="forecast">
<｜DSML｜parameter name="city" string="true">杭州 "x"</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">[1, {"a": null}]</｜DSML｜parameter>
<｜DSML｜parameter name="hot" string="false">true</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">

</｜DSML｜invoke>
</｜DSML｜function_calls>"""
CALLING = calling(
    call("c1", city='杭州 "x"', days=[1, {"a": None}], hot=True),
    call("c2", "now"),
    content="I look.",
    reasoning_content="Which city?",
)
RESULTS = """

<function_results>
<result>sun</result>
<result>noon</result>
</function_results>

"""


def test_calls_and_results_while_the_loop_runs(checkpoint: Path) -> None:
    loop = (HELLO, CALLING, result("sun", "c1"), result("noon", "c2"))
    asked = f"{BOS}<｜User｜>hello<｜Assistant｜>"
    assert prompt_text(checkpoint, *loop) == f"{asked}</think>I look.{CALLS}{EOS}{RESULTS}</think>"
    shown = f"{asked}<think>Which city?</think>I look.{CALLS}{EOS}{RESULTS}<think>"
    assert prompt_text(checkpoint, *loop, thinking=True) == shown
    again = calling(call(None, "now"))
    empty_call = CALLS[: CALLS.index("<｜DSML｜invoke")] + CALLS[CALLS.index('<｜DSML｜invoke name="now">') :]
    assert prompt_text(checkpoint, *loop, again, result("late"), thinking=True) == (
        f"{shown}</think>{empty_call}{EOS}\n\n<function_results>\n<result>late</result>\n"
        "</function_results>\n\n<think>"
    )


def test_once_the_user_speaks_again_the_reasoning_of_the_loop_is_left_out(checkpoint: Path) -> None:
    loop = (HELLO, CALLING, result("sun", "c1"), result("noon", "c2"), ANSWER, SUM)
    before = (
        f"{BOS}<｜User｜>hello<｜Assistant｜></think>I look.{CALLS}{EOS}{RESULTS}</think>"
        f"Hello! I am DeepSeek.{EOS}<｜User｜>1+1=?<｜Assistant｜>"
    )
    assert prompt_text(checkpoint, *loop, thinking=True) == before + "<think>"
    assert prompt_text(checkpoint, *loop) == before + "</think>"


def test_results_stand_in_the_order_of_the_calls(checkpoint: Path) -> None:
    swapped = prompt_text(checkpoint, HELLO, CALLING, result("noon", "c2"), result("sun", "c1"))
    assert swapped == prompt_text(checkpoint, HELLO, CALLING, result("sun", "c1"), result("noon", "c2"))
    assert swapped == prompt_text(checkpoint, HELLO, CALLING, result("sun"), result("noon"))


@pytest.mark.parametrize(
    ("messages", "options", "reason"),
    [
        ((result("7"),), {}, r"messages\[1\]: is a tool's result, and no message"),
        ((ANSWER, result("7")), {}, r"messages\[2\]: is a tool's result, and no message"),
        ((CALLING,), {}, r"messages\[1\]: calls 2 tools, and 0 results follow"),
        ((CALLING, result("sun", "c1")), {}, r"messages\[1\]: calls 2 tools, and 1 results follow"),
        ((CALLING, *[result("7", "c1")] * 3), {}, r"messages\[1\]: calls 2 tools, and 3 results follow"),
        ((CALLING, result("7", "c1"), result("7", "c3")), {}, "tool_call_id are not those of its calls"),
        ((CALLING, result("7", "c1"), result("7", "c1")), {}, "tool_call_id are not those of its calls"),
        (
            ({"role": "developer", "content": "", "tools": [FORECAST]},),
            {},
            r"messages\[1\]: is a developer's and empty",
        ),
        (
            ({"role": "assistant", "content": "Yes."},),
            {"thinking": True},
            r"messages\[1\]: answers the last question, thinking is on",
        ),
        ((CALLING,), {"continued": True}, r"messages\[1\]: cannot be continued"),
    ],
)
def test_what_it_has_no_form_for_is_refused(
    checkpoint: Path, messages: tuple[dict[str, Any], ...], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ApiError, match=reason) as refused:
        prompt_text(checkpoint, HELLO, *messages, **options)
    assert refused.value.status == 400


@pytest.mark.I8
def test_arguments_may_be_nested_as_deeply_as_json_from_outside(checkpoint: Path) -> None:
    """And not one level more: whichever the Python, what is read can be written."""
    inner = "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1)
    arguments = written_arguments("arguments", f'{{"a":{inner}}}')
    assert isinstance(arguments, dict)
    shown = prompt_text(checkpoint, HELLO, calling(call("c1", **arguments)), result("7", "c1"))
    assert inner in shown
    with pytest.raises(ApiError, match=f"nested too deeply: {MAX_NESTING} levels") as refused:
        written_arguments("arguments", f'{{"a":[{inner}]}}')
    assert refused.value.status == 400


# --- whose markup answers are read in ---------------------------------------------------------------


V31_TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "model_type", "markup"),
    [
        (None, "deepseek_v32", ToolMarkup.DSML),
        ("<｜DSML｜invoke", "deepseek_v32", ToolMarkup.DSML),
        (V31_TEMPLATE, "deepseek_v32", ToolMarkup.DEEPSEEK_V31),
        ({"default": "x", "tool_use": V31_TEMPLATE}, "deepseek_v32", ToolMarkup.DEEPSEEK_V31),
        ("<arg_key>", "deepseek_v32", ToolMarkup.GLM),
        ("<tool_call><arg_key>", "axk2", ToolMarkup.GLM),
        ("<tool_call>", "axk2", ToolMarkup.HERMES),
        ("plain", "axk2", ToolMarkup.HERMES),
        ("[TOOL_CALLS]f[ARGS]", "mistral_large4", ToolMarkup.MISTRAL),
        ("plain", "mistral_large4", None),
        ("plain", "deepseek_v32", ToolMarkup.DSML),
        ("plain", "glm_moe_dsa", ToolMarkup.GLM),
        (None, "glm_moe_dsa", ToolMarkup.GLM),
        (None, "other", None),
    ],
)
def test_the_template_decides_how_calls_are_read(
    template: str | dict[str, str] | None, model_type: str, markup: ToolMarkup | None
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert TextCodec(tokenizer, len(tokenizer), model_type).chat_format.markup is markup


def test_a_template_of_v31_gets_arguments_as_text(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, V31_TEMPLATE)
    messages = (HELLO, calling(call("c1", city="杭州", days=2)), result("sun", "c1"))
    assert prompt_text(directory, *messages) == (
        'hello<｜tool▁call▁begin｜>forecast<｜tool▁sep｜>{"city": "杭州", "days": 2}sun'
    )


def test_a_template_in_the_checkpoint_comes_first(tmp_path: Path) -> None:
    assert prompt_text(write_checkpoint(tmp_path, "own"), HELLO) == "own"


def test_other_families_have_none(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="chat_template"):
        prompt_text(write_checkpoint(tmp_path, model_type="glm_moe_dsa"), HELLO)
