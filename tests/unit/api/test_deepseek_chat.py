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

from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.protocol.decoding import MAX_NESTING
from hisparse_pd.serving.api import text_codec
from hisparse_pd.serving.api.chat_format import ToolMarkup
from hisparse_pd.serving.api.conversations import written_arguments
from hisparse_pd.serving.api.prompts import ChatPrompt
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.http.http_errors import ApiError
from tests.unit.api.tiny_tokenizer import BOS as TINY_BOS
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
    prompt = ChatPrompt(messages, arguments, continued, tools, True, add_generation_prompt=not continued)
    (packed,) = asyncio.run(TextCodec.load(checkpoint).encode([prompt], ["messages"], 10_000))
    token_ids = unpack_token_ids(packed).tolist()
    text = PreTrainedTokenizerFast.from_pretrained(checkpoint).decode(token_ids)
    assert isinstance(text, str)
    return text


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
TEMPLATE = Path(text_codec.__file__).with_name("deepseek_v32.jinja").read_text("utf-8")
HEAD, _, TAIL = (
    make_tokenizer()
    .apply_chat_template(
        [SPACE], [FORECAST], chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    .removeprefix(TINY_BOS)
    .removesuffix("<｜Assistant｜></think>")
    .partition(SHOWN_FORECAST)
)


def test_the_text_about_tools_is_word_for_word_what_the_model_was_trained_on() -> None:
    """It is the text of the authors' encoder."""
    digest = hashlib.sha256((HEAD + TAIL).encode()).hexdigest()
    assert digest == "05d1fb2e79f2f92049694ff7c2840faed8fcb20fee32ad85473fdee890cdef0a"


def tools_text(*shown: str) -> str:
    return f"{HEAD}{chr(10).join(shown)}{TAIL}"


def call(call_id: str | None, name: str = "forecast", **arguments: Any) -> dict[str, Any]:
    shown = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return shown if call_id is None else shown | {"id": call_id}


def calling(*calls: dict[str, Any], content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def result(content: str, call_id: str | None = None) -> dict[str, Any]:
    shown = {"role": "tool", "content": content}
    return shown if call_id is None else shown | {"tool_call_id": call_id}


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


BEGUN = {"role": "assistant", "content": "Two, be"}
SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Find it.", "tools": [FORECAST]}
LOOP = (HELLO, CALLING, result("sun", "c1"), result("noon", "c2"))
AGAIN = (*LOOP, calling(call(None, "now")), result("late"))
THINK: dict[str, Any] = {"thinking": True}
CONTINUED: dict[str, Any] = {"continued": True}
WITH_TOOLS: dict[str, Any] = {"tools": [FORECAST]}
ASKED = "<｜User｜>hello<｜Assistant｜>"
SHOWN_TOOLS = tools_text(SHOWN_FORECAST)
SOUGHT = f"{BOS}<｜User｜>{SHOWN_TOOLS}\n\n# The user's message is: Find it.<｜Assistant｜>"
ANSWERED = f"</think>Hello! I am DeepSeek.{EOS}<｜User｜>1+1=?<｜Assistant｜>"
LOOKED = f"I look.{CALLS}{EOS}{RESULTS}"
FIRST_CALL, SECOND_CALL = (CALLS.index(f'<｜DSML｜invoke name="{name}"') for name in ("forecast", "now"))
ONLY_NOW = CALLS[:FIRST_CALL] + CALLS[SECOND_CALL:]
LATE = "\n\n<function_results>\n<result>late</result>\n</function_results>\n\n"

PROMPTS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], str]]] = {
    "what was thought before is left out, and thinking opens the answer": [
        ((HELLO, ANSWER, SUM), {}, BEFORE + "</think>"),
        *(
            ((HELLO, ANSWER, SUM), {name: is_on}, BEFORE + mark)
            for name in ("thinking", "enable_thinking")
            for is_on, mark in ((True, "<think>"), (False, "</think>"))
        ),
    ],
    "a system comes first and has no mark": [
        ((SYSTEM, HELLO), {}, f"{BOS}Be brief.{ASKED}</think>"),
        ((SYSTEM,), {}, f"{BOS}Be brief.<｜Assistant｜></think>"),
    ],
    "an answer that was begun goes on": [
        ((HELLO, ANSWER, SUM, BEGUN), CONTINUED, BEFORE + "</think>Two, be"),
        (
            (HELLO, ANSWER, SUM, BEGUN | {"reasoning_content": "Hm."}),
            CONTINUED | THINK,
            BEFORE + "<think>Hm.</think>Two, be",
        ),
    ],
    "tools are told of in the first system message": [
        ((SYSTEM, HELLO), WITH_TOOLS, f"{BOS}Be brief.{SHOWN_TOOLS}{ASKED}</think>"),
        ((HELLO,), WITH_TOOLS, f"{BOS}{SHOWN_TOOLS}{ASKED}</think>"),
        (
            (SPACE | {"tools": [FORECAST]}, HELLO),
            WITH_TOOLS,
            f"{BOS}{tools_text(SHOWN_FORECAST, SHOWN_FORECAST)}{ASKED}</think>",
        ),
    ],
    "a developer asks as a user does and may bring tools": [
        ((DEVELOPER,), {}, f"{SOUGHT}</think>"),
        ((DEVELOPER,), THINK, f"{SOUGHT}<think>"),
        ((DEVELOPER, ANSWER, SUM), THINK, f"{SOUGHT}{ANSWERED}<think>"),
    ],
    "calls and results while the loop runs": [
        (LOOP, {}, f"{BOS}{ASKED}</think>{LOOKED}</think>"),
        (LOOP, THINK, f"{BOS}{ASKED}<think>Which city?</think>{LOOKED}<think>"),
        (
            AGAIN,
            THINK,
            f"{BOS}{ASKED}<think>Which city?</think>{LOOKED}<think></think>{ONLY_NOW}{EOS}{LATE}<think>",
        ),
    ],
    "once the user speaks again the reasoning of the loop is left out": [
        ((*LOOP, ANSWER, SUM), THINK, f"{BOS}{ASKED}</think>{LOOKED}{ANSWERED}<think>"),
        ((*LOOP, ANSWER, SUM), {}, f"{BOS}{ASKED}</think>{LOOKED}{ANSWERED}</think>"),
    ],
    "results stand in the order of the calls": [
        ((HELLO, CALLING, *results), {}, f"{BOS}{ASKED}</think>{LOOKED}</think>")
        for results in ((LOOP[3], LOOP[2]), (result("sun"), result("noon")))
    ],
}


@pytest.mark.parametrize("rule", PROMPTS)
def test_the_prompt(checkpoint: Path, rule: str) -> None:
    for messages, options, expected in PROMPTS[rule]:
        assert prompt_text(checkpoint, *messages, **options) == expected


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
    """One level more is refused. In every version of Python, what is read can be written."""
    inner = "[" * (MAX_NESTING - 1) + "]" * (MAX_NESTING - 1)
    arguments: Any = written_arguments("arguments", f'{{"a":{inner}}}')
    assert isinstance(arguments, dict)
    shown = prompt_text(checkpoint, HELLO, calling(call("c1", **arguments)), result("7", "c1"))
    assert inner in shown
    with pytest.raises(ApiError, match=f"nested too deeply: {MAX_NESTING} levels") as refused:
        written_arguments("arguments", f'{{"a":[{inner}]}}')
    assert refused.value.status == 400


# --- whose markup answers are read in ---------------------------------------------------------------


V31_TEMPLATE = "{{ '<｜tool▁sep｜>' + call.function.arguments }}"


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


def test_a_template_in_the_checkpoint_comes_first(tmp_path: Path) -> None:
    assert prompt_text(write_checkpoint(tmp_path, "own"), HELLO) == "own"


def test_other_families_have_none(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="chat_template"):
        prompt_text(write_checkpoint(tmp_path, model_type="glm_moe_dsa"), HELLO)
