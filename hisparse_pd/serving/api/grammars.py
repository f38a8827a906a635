"""Writes the grammar of an answer: its ``Constraint``, in the checkpoint's markup of reasoning and calls.

``requests.py`` calls ``write_grammar`` for each prompt whose answer has a format or forced calls. Where the
prompt has begun reasoning or the model may begin it, an answer begins with free text up to the mark that ends
reasoning. Then comes the answer in its format, or calls, or text in which a call may begin. In some markups
the first call may end reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hisparse_pd.core.grammar.gbnf import convert_gbnf
from hisparse_pd.serving.api.call_grammars import CALL_WRITERS, CallWriter, callable_tools
from hisparse_pd.serving.api.call_rules import CallRule
from hisparse_pd.serving.api.chat_format import MARKUPS, ChatFormat, ReasoningStart, ThinkMarks
from hisparse_pd.serving.api.constraints import AnswerFormat, Constraint, FormatKind
from hisparse_pd.serving.api.exact_numbers import read_json
from hisparse_pd.serving.api.json_grammars import json_value
from hisparse_pd.serving.api.json_schemas import NotWritable, Steps, TooManySteps
from hisparse_pd.serving.api.lark import (
    ANY,
    NEWLINE,
    Lark,
    TooLarge,
    literal,
    one_of,
    regex,
    sequence,
    without,
)
from hisparse_pd.serving.http.http_errors import FieldRefused

_SPACE = "/[ \\n]*/"
"""White space before the mark that opens reasoning."""
_GAP = f"{NEWLINE}? {NEWLINE}?"
"""Line breaks beside reasoning, which belong neither to it nor to what follows."""

Tool = Mapping[str, object]


def write_grammar(
    constraint: Constraint,
    chat_format: ChatFormat,
    reasoning: ReasoningStart = ReasoningStart.NONE,
    tools: Sequence[Tool] = (),
    *,
    separates_reasoning: bool = True,
) -> str:
    """Return the grammar in llguidance's Lark notation, or "" where the constraint excludes nothing.

    ``separates_reasoning``: whether reasoning is separated from the answer before calls are looked for. If
    not, text within reasoning that looks like a call would be read as one, so it is excluded there. Raises
    ApiError 400.
    """
    answer, calls, markup = constraint.answer, constraint.calls, chat_format.markup
    if markup is None:
        if calls is not None and calls.is_forced:
            raise FieldRefused(
                calls.field, "a call cannot be forced: how this model writes calls is not known here"
            )
        calls = None  # calls of an unknown markup stay text
    asking = answer or calls  # errors name its field
    if asking is None:
        return ""
    lark = Lark(chat_format.token_ids)
    thoughts = _Thoughts(lark, chat_format.think, reasoning)
    try:
        if answer is not None and calls is None and reasoning is ReasoningStart.NONE:
            return _alone(answer)
        if calls is None or markup is None:
            assert answer is not None
            before = thoughts.whole()
            return lark.text(sequence(before, f"({_answer(lark, answer, thoughts.not_to_begin_with)})"))
        budget = Steps()  # for the schemas of all tools together
        writer = CALL_WRITERS[markup](MARKUPS[markup], lark, tools, budget)
        may_interrupt = MARKUPS[markup].ends_reasoning
        return lark.text(
            _with_calls(
                thoughts, answer, calls, writer, tools, may_interrupt, separates_reasoning=separates_reasoning
            )
        )
    except (TooLarge, TooManySteps) as error:
        raise FieldRefused(asking.field, str(error)) from error


def _with_calls(
    thoughts: _Thoughts,
    answer: AnswerFormat | None,
    calls: CallRule,
    writer: CallWriter,
    tools: Sequence[Tool],
    may_interrupt: bool,
    *,
    separates_reasoning: bool,
) -> str:
    """Return the first rule of an answer that must or may have calls. ``may_interrupt``: whether a call may
    end reasoning."""
    lark, excluded = thoughts.lark, thoughts.not_to_begin_with
    # Reasoning must not have the mark of calls where a call would end it, or would be read within it.
    marks = [writer.opening] if may_interrupt or not separates_reasoning else []
    before = thoughts.whole(marks)
    # Behind reasoning comes the answer in its format, or calls, or text in which a call may begin.
    parts = [] if answer is None else [_answer(lark, answer, [*excluded, literal(writer.opening)])]
    called = writer.behind_opening(list(callable_tools(tools, calls.names)), at_most_one=calls.at_most_one)
    is_text_allowed = answer is None and not calls.is_forced
    parts.append(_calls(lark, writer, called, excluded, is_text_allowed=is_text_allowed))
    alternatives = [sequence(before, f"({' | '.join(parts)})")]
    # Or a call ends reasoning.
    if may_interrupt and thoughts.start is not ReasoningStart.NONE:
        interrupted = thoughts.until(writer.opening, [thoughts.think.closing])
        alternatives.append(f"{interrupted} {called}")
    return " | ".join(f"({way})" for way in alternatives)


# --- reasoning ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Thoughts:
    """Writes the reasoning before an answer, which the prompt has begun or the model may begin."""

    lark: Lark
    think: ThinkMarks
    start: ReasoningStart

    @property
    def not_to_begin_with(self) -> list[str]:
        """The beginnings that an answer must not have: the mark of reasoning, or it would be read as
        reasoning.

        If the prompt has begun reasoning, that ends before the answer, and the mark has no meaning there.
        """
        is_begun = self.start is ReasoningStart.BEGUN
        return [] if is_begun else [f"{_SPACE} {literal(self.think.opening)}"]

    def whole(self, excluded: Sequence[str] = ()) -> str:
        """Return reasoning with its end, and without ``excluded`` marks in it; "" where there is none."""
        if self.start is ReasoningStart.NONE:
            return ""
        thoughts = f"{self.until(self.think.closing, excluded)} {_GAP}"
        return thoughts if self.start is ReasoningStart.BEGUN else f"({thoughts})?"

    def until(self, mark: str, excluded: Sequence[str]) -> str:
        """Return reasoning up to and with ``mark``, without ``excluded`` marks in it.

        Its opening mark comes first unless the prompt has it: as a rule of its own if it is a token, and
        otherwise as the beginning of the text, behind which ``excluded`` marks are excluded.
        """
        lark, opening = self.lark, self.think.opening
        if self.start is ReasoningStart.BEGUN:
            return lark.until(mark, excluded=excluded)
        if opening in lark.token_ids:
            return f"{_GAP} {lark.mark(opening)} {lark.until(mark, excluded=excluded)}"
        free = without(*excluded) if excluded else ANY
        return lark.until(mark, text=f"{_SPACE} {literal(opening)} {free}")


# --- the answer's format -----------------------------------------------------------------------------


def _alone(answer: AnswerFormat) -> str:
    """Return the whole grammar of an answer without reasoning and calls."""
    match answer.kind:
        case FormatKind.LARK | FormatKind.GBNF:
            return _in_lark(answer)
        case _:
            lark = Lark({})
            return lark.text(_answer(lark, answer, ()))


def _answer(lark: Lark, answer: AnswerFormat, excluded: Sequence[str]) -> str:
    """Return the rule of the answer's format. What a regular expression matches must not begin with any of
    ``excluded``; the other formats are written as they are."""
    match answer.kind:
        case FormatKind.JSON:
            try:
                return json_value(lark, read_json(answer.text), Steps())
            except NotWritable as error:
                raise FieldRefused(answer.field, str(error)) from error
        case FormatKind.REGEX:
            try:
                pattern = regex(answer.text)
            except ValueError as error:
                raise FieldRefused(answer.field, str(error)) from error
            return lark.terminal(" & ".join((f"({pattern})", *(f"~({begin} {ANY})" for begin in excluded))))
        case FormatKind.CHOICE:
            return lark.terminal(one_of(answer.choices))
        case FormatKind.LARK | FormatKind.GBNF:
            return f"%lark {{\n{_in_lark(answer)}\n}}"


def _in_lark(answer: AnswerFormat) -> str:
    if answer.kind is FormatKind.LARK:
        return answer.text
    try:
        return convert_gbnf(answer.text)
    except ValueError as error:
        raise FieldRefused(answer.field, str(error)) from error


# --- calls -------------------------------------------------------------------------------------------


def _calls(
    lark: Lark, writer: CallWriter, called: str, excluded: Sequence[str], *, is_text_allowed: bool
) -> str:
    """Return the rule of calls alone or, with ``is_text_allowed``, of text and calls, or text alone.

    ``called`` is the rule of what follows the opening mark of the calls.
    """
    if not is_text_allowed:
        return sequence(writer.gap, lark.mark(writer.opening), called)
    not_begun = [f"~({begin} {ANY})" for begin in excluded]
    before = f"({' & '.join((ANY, *not_begun))})"
    text = lark.terminal(" & ".join((without(writer.opening), *not_begun)))
    return f"{lark.until(writer.opening, text=before)} {called} | {text}"
