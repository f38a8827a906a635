# ruff: noqa: RUF001 -- the marks of the models are written with wide bars
"""How a checkpoint writes chats: by its template or as DeepSeek-V3.2's authors do, and with which tool calls.

The template decides, not the family: DeepSeek-V3.2-Exp has DeepSeek-V3.2's ``model_type``, and a template
that writes calls as DeepSeek-V3.1 does; DeepSeek-V3.2 itself is published without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from hisparse_pd.engine.messages import unpack_token_ids

DSML = "｜DSML｜"
"""Begins the marks of DeepSeek-V3.2's calls."""

THINK, END_OF_THINK = "<think>", "</think>"

_END_TOKENS = 16
"""Of a prompt: enough to see either of them a byte a token, and white space behind it."""


class ToolMarkup(StrEnum):
    """The ways of writing tool calls that are known here."""

    GLM = "glm"
    DSML = "dsml"
    DEEPSEEK_V31 = "deepseek_v31"


class V31:
    """The marks of DeepSeek-V3.1's calls, which DeepSeek-V3.2-Exp writes too."""

    CALLS, END_OF_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, END_OF_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    SEPARATOR = "<｜tool▁sep｜>"


class ReasoningStart(Enum):
    """What a prompt's end says of reasoning in the answer."""

    NONE = auto()
    MAY_BEGIN = auto()
    """The model may open it."""
    BEGUN = auto()


@dataclass(frozen=True)
class ChatFormat:
    """What of a checkpoint the grammar of an answer depends on.

    ``markup``: of calls; None where it is not known. ``reasons``: its template knows of reasoning.
    ``token_ids``: of the tokens beside the vocabulary proper, by what they stand for.
    """

    markup: ToolMarkup | None = None
    reasons: bool = False
    token_ids: Mapping[str, int] = field(default_factory=dict)

    def reasoning_start(
        self, prompt: bytes, of_token: Callable[[int], bytes], *, is_continued: bool
    ) -> ReasoningStart:
        """``prompt``: packed token ids that ``of_token`` spells; ``is_continued``: it ends in an answer."""
        if opens_reasoning(prompt, of_token):
            return ReasoningStart.BEGUN
        is_over = is_continued or _ends_with(END_OF_THINK, prompt, of_token)
        return ReasoningStart.NONE if is_over or not self.reasons else ReasoningStart.MAY_BEGIN


def opens_reasoning(prompt: bytes, of_token: Callable[[int], bytes]) -> bool:
    """Whether the prompt, packed token ids, ends with what opens reasoning."""
    return _ends_with(THINK, prompt, of_token)


def _ends_with(mark: str, prompt: bytes, of_token: Callable[[int], bytes]) -> bool:
    end = b"".join(map(of_token, unpack_token_ids(prompt)[-_END_TOKENS:].tolist()))
    return end.rstrip().endswith(mark.encode())


_MARKS = {ToolMarkup.DSML: DSML, ToolMarkup.DEEPSEEK_V31: V31.SEPARATOR, ToolMarkup.GLM: "<arg_key>"}
_OF_FAMILY = {"glm_moe_dsa": ToolMarkup.GLM, "deepseek_v32": ToolMarkup.DSML}


def tool_markup(template: str | None, model_type: str) -> ToolMarkup | None:
    """What the template's earlier calls look like; of one that shows none, what the family has."""
    for markup, mark in _MARKS.items():
        if template is not None and mark in template:
            return markup
    return _OF_FAMILY.get(model_type)


def writes_own_chat(template: str | None, model_type: str) -> bool:
    """Whether chats are written by ``deepseek_chat`` for want of a template."""
    return template is None and model_type == "deepseek_v32"
