# ruff: noqa: RUF001 -- the marks of the models are written with wide bars
"""How a checkpoint writes chats: its markup of tool calls, and its marks of reasoning.

``TextCodec`` finds a checkpoint's ``ChatFormat`` when it loads. Writers of grammars (``call_grammars.py``,
``grammars.py``) and readers of answers (``chat_message.py``, ``call_reader.py``) take the marks of a markup
from ``MARKUPS``. The template decides, not the family: DeepSeek-V3.2-Exp has DeepSeek-V3.2's ``model_type``,
and a template that writes calls as DeepSeek-V3.1 does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Final

from hisparse_pd.engine.messages import unpack_token_ids

DSML = "｜DSML｜"
"""The beginning of all marks of DeepSeek-V3.2's calls."""


@dataclass(frozen=True)
class ThinkMarks:
    """The marks around reasoning."""

    opening: str
    closing: str


THINK = ThinkMarks("<think>", "</think>")
THINK_MARKS: Final = (THINK, ThinkMarks("[THINK]", "[/THINK]"))
"""All known marks of reasoning. The second pair is Mistral's, which are special tokens."""

_END_TOKENS = 16
"""Tokens at a prompt's end that are searched for a mark: a mark may have one token a byte, and white space
may follow it."""


class ToolMarkup(StrEnum):
    """The known ways of writing tool calls."""

    GLM = "glm"
    DSML = "dsml"
    DEEPSEEK_V31 = "deepseek_v31"
    HERMES = "hermes"
    MISTRAL = "mistral"


class V31:
    """The marks of DeepSeek-V3.1's calls, which DeepSeek-V3.2-Exp also writes."""

    CALLS, END_OF_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    CALL, END_OF_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    SEPARATOR = "<｜tool▁sep｜>"


class ReasoningStart(Enum):
    """Whether the answer to a prompt has reasoning."""

    NONE = auto()
    MAY_BEGIN = auto()
    """The model may open reasoning."""
    BEGUN = auto()
    """The prompt has opened reasoning."""


@dataclass(frozen=True)
class ChatFormat:
    """A checkpoint's way of writing answers, on which their grammars depend."""

    markup: ToolMarkup | None = None
    """Markup of calls; None if it is not known."""
    reasons: bool = False
    """Whether the template has marks of reasoning."""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids of added tokens, by the text that they stand for."""
    think: ThinkMarks = THINK
    """The template's marks of reasoning."""

    def reasoning_start(
        self, prompt: bytes, of_token: Callable[[int], bytes], *, is_continued: bool
    ) -> ReasoningStart:
        """Return whether the answer to ``prompt`` (packed token ids) begins with reasoning.

        ``of_token``: returns a token's bytes. ``is_continued``: whether the prompt ends within an answer.
        Reasoning is over if the prompt ends with its closing mark, as for an answer without reasoning.
        """
        if self.opens_reasoning(prompt, of_token):
            return ReasoningStart.BEGUN
        is_over = is_continued or self._ends_with(self.think.closing, prompt, of_token)
        return ReasoningStart.NONE if is_over or not self.reasons else ReasoningStart.MAY_BEGIN

    def opens_reasoning(self, prompt: bytes, of_token: Callable[[int], bytes]) -> bool:
        """Whether the prompt, packed token ids, ends with the mark that opens reasoning."""
        return self._ends_with(self.think.opening, prompt, of_token)

    def _ends_with(self, mark: str, prompt: bytes, of_token: Callable[[int], bytes]) -> bool:
        """Whether the prompt ends with ``mark``. If the vocabulary has a token for the mark, only this token
        is the mark, and its spelling in other tokens is text."""
        token_ids = unpack_token_ids(prompt)[-_END_TOKENS:].tolist()
        if (mark_id := self.token_ids.get(mark)) is None:
            return b"".join(map(of_token, token_ids)).rstrip().endswith(mark.encode())
        written = (token_id for token_id in reversed(token_ids) if of_token(token_id).strip())
        return next(written, None) == mark_id


_SIGNS_OF_MARKUP = {
    ToolMarkup.DSML: DSML,
    ToolMarkup.DEEPSEEK_V31: V31.SEPARATOR,
    ToolMarkup.GLM: "<arg_key>",
    ToolMarkup.HERMES: "<tool_call>",
    ToolMarkup.MISTRAL: "[ARGS]",
}
"""Text by which a template shows the markup that it writes. The order counts: the first one found decides."""
_MARKUP_OF_FAMILY = {
    "glm_moe_dsa": ToolMarkup.GLM,
    "deepseek_v32": ToolMarkup.DSML,
    "axk2": ToolMarkup.HERMES,
}


def tool_markup(template: str | None, model_type: str) -> ToolMarkup | None:
    """Return the markup in which the template writes earlier calls, else the family's; None if unknown."""
    for markup, mark in _SIGNS_OF_MARKUP.items():
        if template is not None and mark in template:
            return markup
    return _MARKUP_OF_FAMILY.get(model_type)


def think_marks(template: str | None) -> ThinkMarks | None:
    """Return the first marks of reasoning that the template has; None if it has none."""
    return next((marks for marks in THINK_MARKS if template is not None and marks.opening in template), None)


# --- marks of calls ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Markup:
    """The marks between which an answer has calls.

    Calls stand between one of ``openings`` and ``closing``. Each call begins with ``call`` and ends with
    ``call_end``. It is a name, ``end_of_name``, and its arguments: either keys and values between marks of
    their own, or one JSON object. Where it ``is_json``, the whole call is an object of ``name`` and
    ``arguments``. A mark is "" where the markup has none.
    """

    openings: tuple[str, ...]
    closing: str
    call_end: str
    sign: str
    """The part of an opening that occurs only in markup."""
    call: str = ""
    end_of_name: str = ""
    key: str = ""
    """Mark before an argument's name; empty if the arguments are JSON."""
    end_of_key: str = ""
    value: str = ""
    end_of_value: str = ""
    values_hide_marks: bool = False
    """Whether only a value's end is a mark within it; otherwise a call can end there, too."""
    says_type: bool = False
    """Whether a mark behind the key says if the value is a string; otherwise the tool's schema decides."""
    is_json: bool = False
    takes_repeated_keys: bool = False
    """Whether a key may come twice; otherwise that is a fault."""
    ends_reasoning: bool = False
    """Whether the model may call without closing its reasoning."""

    @property
    def ends(self) -> tuple[str, ...]:
        """The marks that end a call, complete or not."""
        return tuple(dict.fromkeys((self.call_end, self.closing)))

    @property
    def ends_with_answer(self) -> bool:
        """Whether a call has no closing mark of its own: the next call or the answer's end ends it."""
        return self.call_end in self.openings


STRING_ATTRIBUTE = '" string="'
"""Text behind a key of DeepSeek-V3.2's calls; ``true`` or ``false`` follows it."""

MARKUPS: Final[Mapping[ToolMarkup, Markup]] = {
    # name<arg_key>key</arg_key><arg_value>value</arg_value>..., with line breaks between or without.
    ToolMarkup.GLM: Markup(
        openings=("<tool_call>",),
        closing="</tool_call>",
        call_end="</tool_call>",
        sign="<tool_call>",
        key="<arg_key>",
        end_of_key="</arg_key>",
        value="<arg_value>",
        end_of_value="</arg_value>",
        takes_repeated_keys=True,
        ends_reasoning=True,
    ),
    # <invoke name="..."><parameter name="..." string="true|false">value</parameter>..., with prefixes.
    ToolMarkup.DSML: Markup(
        openings=(f"\n\n<{DSML}function_calls>", f"<{DSML}function_calls>"),  # the empty line belongs to it
        closing=f"</{DSML}function_calls>",
        call=f'<{DSML}invoke name="',
        end_of_name='">',
        call_end=f"</{DSML}invoke>",
        sign=DSML,
        key=f'<{DSML}parameter name="',
        end_of_key='">',
        end_of_value=f"</{DSML}parameter>",
        values_hide_marks=True,
        says_type=True,
    ),
    # <begin>name<sep>{...}<end>: the arguments are a JSON object as it stands.
    ToolMarkup.DEEPSEEK_V31: Markup(
        openings=(V31.CALLS,),
        closing=V31.END_OF_CALLS,
        call=V31.CALL,
        end_of_name=V31.SEPARATOR,
        call_end=V31.END_OF_CALL,
        sign=V31.CALLS,
    ),
    # {"name": "...", "arguments": {...}}
    ToolMarkup.HERMES: Markup(
        openings=("<tool_call>",),
        closing="</tool_call>",
        call_end="</tool_call>",
        sign="<tool_call>",
        is_json=True,
    ),
    # [TOOL_CALLS]name[ARGS]{...}, up to the next call or the end of the answer.
    ToolMarkup.MISTRAL: Markup(
        openings=("[TOOL_CALLS]",),
        closing="[TOOL_CALLS]",
        end_of_name="[ARGS]",
        call_end="[TOOL_CALLS]",
        sign="[TOOL_CALLS]",
    ),
}
