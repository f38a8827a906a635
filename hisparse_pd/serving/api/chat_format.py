# ruff: noqa: RUF001 -- the marks of the models are written with wide bars
"""How a checkpoint writes chats: with which tool calls, and with which marks of reasoning.

The template decides, not the family: DeepSeek-V3.2-Exp has DeepSeek-V3.2's ``model_type``, and a template
that writes calls as DeepSeek-V3.1 does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Final

from hisparse_pd.engine.messages import unpack_token_ids

DSML = "｜DSML｜"
"""Begins the marks of DeepSeek-V3.2's calls."""


@dataclass(frozen=True)
class ThinkMarks:
    """What reasoning stands between."""

    opening: str
    closing: str


THINK = ThinkMarks("<think>", "</think>")
THINK_MARKS: Final = (THINK, ThinkMarks("[THINK]", "[/THINK]"))
"""Mistral's are the second, which it has as special tokens."""

_END_TOKENS = 16
"""Of a prompt: enough to see either of them a byte a token, and white space behind it."""


class ToolMarkup(StrEnum):
    """The ways of writing tool calls that are known here."""

    GLM = "glm"
    DSML = "dsml"
    DEEPSEEK_V31 = "deepseek_v31"
    HERMES = "hermes"
    MISTRAL = "mistral"


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
    ``token_ids``: of the tokens beside the vocabulary proper, by what they stand for. ``think``: the marks of
    reasoning.
    """

    markup: ToolMarkup | None = None
    reasons: bool = False
    token_ids: Mapping[str, int] = field(default_factory=dict)
    think: ThinkMarks = THINK

    def reasoning_start(
        self, prompt: bytes, of_token: Callable[[int], bytes], *, is_continued: bool
    ) -> ReasoningStart:
        """``prompt``: packed token ids that ``of_token`` spells; ``is_continued``: it ends in an answer."""
        if self.opens_reasoning(prompt, of_token):
            return ReasoningStart.BEGUN
        is_over = is_continued or self._ends_with(self.think.closing, prompt, of_token)
        return ReasoningStart.NONE if is_over or not self.reasons else ReasoningStart.MAY_BEGIN

    def opens_reasoning(self, prompt: bytes, of_token: Callable[[int], bytes]) -> bool:
        """Whether the prompt, packed token ids, ends with what opens reasoning."""
        return self._ends_with(self.think.opening, prompt, of_token)

    def _ends_with(self, mark: str, prompt: bytes, of_token: Callable[[int], bytes]) -> bool:
        """``mark``: where the vocabulary has it as a token, its spelling alone is text."""
        token_ids = unpack_token_ids(prompt)[-_END_TOKENS:].tolist()
        if (mark_id := self.token_ids.get(mark)) is None:
            return b"".join(map(of_token, token_ids)).rstrip().endswith(mark.encode())
        written = (token_id for token_id in reversed(token_ids) if of_token(token_id).strip())
        return next(written, None) == mark_id


_MARKS = {
    ToolMarkup.DSML: DSML,
    ToolMarkup.DEEPSEEK_V31: V31.SEPARATOR,
    ToolMarkup.GLM: "<arg_key>",
    ToolMarkup.HERMES: "<tool_call>",
    ToolMarkup.MISTRAL: "[ARGS]",
}
"""What a template has that writes such calls, and those before it here have not."""
_OF_FAMILY = {
    "glm_moe_dsa": ToolMarkup.GLM,
    "deepseek_v32": ToolMarkup.DSML,
    "axk2": ToolMarkup.HERMES,
}


def tool_markup(template: str | None, model_type: str) -> ToolMarkup | None:
    """What the template's earlier calls look like; of one that shows none, what the family has."""
    for markup, mark in _MARKS.items():
        if template is not None and mark in template:
            return markup
    return _OF_FAMILY.get(model_type)


def think_marks(template: str | None) -> ThinkMarks | None:
    """The first marks of reasoning that the template has; None where it knows of none."""
    return next((marks for marks in THINK_MARKS if template is not None and marks.opening in template), None)


# --- marks of calls, by which ``call_reader`` reads them -----------------------------------------------


@dataclass(frozen=True)
class Markup:
    """Calls stand between one of ``openings`` and ``closing``; each begins with ``call`` and ends with
    ``call_end``. A call is a name and, behind ``end_of_name``, its arguments: keys and values, each with
    marks of its own, or one JSON object. Or it ``is_json`` as a whole: an object of ``name`` and
    ``arguments``.

    ``call``, ``end_of_name``, ``value``: "" where no mark stands there. ``key``: "" where arguments are JSON.
    ``values_hide_marks``: within a value nothing but its end is a mark; otherwise a call can end there.
    ``says_type``: behind the key stands whether the value is a string; otherwise the tool's schema says so.
    ``takes_repeated_keys``: otherwise a key that comes twice is a fault.
    ``ends_reasoning``: a model may call without having closed its reasoning.
    ``sign``: what of an opening can be nothing but markup.
    """

    openings: tuple[str, ...]
    closing: str
    call_end: str
    sign: str
    call: str = ""
    end_of_name: str = ""
    key: str = ""
    end_of_key: str = ""
    value: str = ""
    end_of_value: str = ""
    values_hide_marks: bool = False
    says_type: bool = False
    is_json: bool = False
    takes_repeated_keys: bool = False
    ends_reasoning: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        """What a call ends with, whether it is complete or not."""
        return tuple(dict.fromkeys((self.call_end, self.closing)))

    @property
    def ends_with_answer(self) -> bool:
        """Calls have no end of their own: the next one or the end of the answer is theirs."""
        return self.call_end in self.openings


STRING_ATTRIBUTE = '" string="'
"""Between a key and whether its value is a string, in DeepSeek-V3.2's calls."""

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
