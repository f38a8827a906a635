# ruff: noqa: RUF001 -- the marks of the model are written with wide bars
"""The chat of DeepSeek-V3.2, whose checkpoint has no template: the prompts are as its authors show them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from protocol.engine_messages import unpack_token_ids
from protocol.http_errors import ApiError
from protocol.http_prompts import ChatPrompt
from protocol.text_codec import TextCodec
from tests.unit.tiny_tokenizer import make_tokenizer

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


@pytest.mark.parametrize(
    ("message", "options", "reason"),
    [
        (HELLO, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "takes none"),
        ({"role": "tool", "content": "7"}, {}, "chat_template.jinja"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, {}, "chat_template.jinja"),
    ],
)
def test_what_it_does_not_know_is_refused(
    checkpoint: Path, message: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ApiError, match=reason) as refused:
        prompt_text(checkpoint, HELLO, message, **options)
    assert refused.value.status == 400


def test_a_template_in_the_checkpoint_comes_first(tmp_path: Path) -> None:
    assert prompt_text(write_checkpoint(tmp_path, "own"), HELLO) == "own"


def test_other_families_have_none(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="chat_template"):
        prompt_text(write_checkpoint(tmp_path, model_type="glm_moe_dsa"), HELLO)
