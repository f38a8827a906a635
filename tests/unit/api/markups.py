# ruff: noqa: RUF001 -- the marks of the models are written with wide bars
"""The markups of calls in tests: marks, tokens, and the chat format of a model with them."""

from __future__ import annotations

from hisparse_pd.serving.api.chat_format import DSML, THINK_MARKS, V31, ChatFormat, ThinkMarks, ToolMarkup
from tests.unit.api.grammar_walks import token_ids

TOKENS = {
    ToolMarkup.GLM: (
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ToolMarkup.DSML: ("<think>", "</think>", "｜DSML｜"),
    ToolMarkup.DEEPSEEK_V31: (
        *("<think>", "</think>", V31.CALLS, V31.END_OF_CALLS, V31.CALL, V31.END_OF_CALL, V31.SEPARATOR),
    ),
    ToolMarkup.HERMES: ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ToolMarkup.MISTRAL: ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
}
MARKS = TOKENS | {
    ToolMarkup.DSML: (
        *("<think>", "</think>"),
        *(f"<{end}{DSML}{name}" for end in ("", "/") for name in ("function_calls>", "invoke", "parameter")),
    )
}
"""Tokens that the marks are made of; without any, the marks are spelled."""


def chat_format(markup: ToolMarkup | None, *, has_tokens: bool = False, reasons: bool = True) -> ChatFormat:
    tokens = token_ids(TOKENS[markup]) if has_tokens and markup is not None else {}
    return ChatFormat(markup, reasons, tokens, think_of(markup))


def think_of(markup: ToolMarkup | None) -> ThinkMarks:
    return THINK_MARKS[markup is ToolMarkup.MISTRAL]
