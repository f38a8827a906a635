"""Writes grammars in llguidance's Lark notation: rules, terminals, literals, and free text up to a mark.

Every writer of grammars (``grammars.py``, ``json_grammars.py``, ``call_grammars.py``) composes expressions
from these functions and adds named rules to the one ``Lark`` of its grammar. Free text ends at a mark. A mark
that the tokenizer has as a token must come as this token, and the text before it must not contain its
spelling. Any other mark is spelled, and the text ends at the first spelling. The grammar of text up to the
mark ``</think>``, which is token 7 or no token::

    start: r1                                                  start: r1
    ANY: /(?s:.*)/                                             ANY: /(?s:.*)/
    T0: (ANY & (ANY & ~(ANY ("</think>") ANY)))                T0: ANY "</think>"
    r1: T0 <[7]>                                               r1[lazy]: T0
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

ANY = "ANY"
"""The terminal of any text."""

NEWLINE = '"\\n"'

MAX_GRAMMAR_CHARS = 256 << 10


class TooLarge(ValueError):
    """A grammar has more than MAX_GRAMMAR_CHARS. The message is about the field that asks for it."""


class Lark:
    """A grammar that grows rule by rule. Equal rules are written once."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        """``token_ids``: ids of the tokens that a mark may be or contain, by their spellings."""
        self.token_ids = token_ids
        self._names: dict[tuple[str, str], str] = {}
        self._lines: list[str] = []
        self._num_chars = 0

    def text(self, start: str) -> str:
        """Return the grammar whose first rule is ``start``. Raises TooLarge."""
        self._grow(start)
        return "\n".join((f"start: {start}", f"{ANY}: /(?s:.*)/", *self._lines, ""))

    def rule(self, expansion: str) -> str:
        """Return the name of a rule with this expansion."""
        return self._named("r", "", expansion)

    def begin_rule(self) -> str:
        """Return the name of a rule that is written later, so that it may refer to itself."""
        name = f"r{len(self._names)}"
        self._names["r", name] = name  # takes the number, so that no other rule gets the name
        return name

    def end_rule(self, name: str, expansion: str) -> None:
        """Write the rule that ``begin_rule`` named."""
        self._grow(expansion)
        self._lines.append(f"{name}: {expansion}")

    def terminal(self, expression: str) -> str:
        """Return the name of a terminal, a regular expression without rules in it."""
        return self._named("T", "", expression)

    def mark(self, mark: str) -> str:
        """Return the expression of ``mark``, with its token if it is or contains one."""
        before, token, behind = self._split(mark)
        return sequence(literal(before), token, literal(behind))

    def until(self, mark: str, text: str = ANY, excluded: Sequence[str] = ()) -> str:
        """Return the name of a rule: ``text``, a regular expression, up to and with the first ``mark``, and
        without ``excluded`` in it."""
        before, token, behind = self._split(mark)
        if token:
            free = f"({text} & {without(mark, *excluded)})"
            ended = self.terminal(sequence(free, literal(before)))
            return self.rule(sequence(ended, token, literal(behind)))
        free = f"({text} & {without(*excluded)})" if excluded else text
        # A lazy rule ends with the first mark.
        return self._named("r", "[lazy]", self.terminal(sequence(free, literal(mark))))

    def _named(self, kind: str, attributes: str, expression: str) -> str:
        key = (kind + attributes, expression)
        if key not in self._names:
            self._grow(expression)
            self._names[key] = f"{kind}{len(self._names)}"
            self._lines.append(f"{self._names[key]}{attributes}: {expression}")
        return self._names[key]

    def _grow(self, text: str) -> None:
        self._num_chars += len(text)
        if self._num_chars > MAX_GRAMMAR_CHARS:
            raise TooLarge(
                f"makes a grammar of more than {MAX_GRAMMAR_CHARS} characters: "
                "use smaller schemas, or fewer tools"
            )

    def _split(self, mark: str) -> tuple[str, str, str]:
        """Return the spelling before the longest token in ``mark``, the token, and the spelling behind it.
        The token is "" where all of the mark is spelled."""
        token = max((token for token in self.token_ids if token in mark), key=len, default="")
        if not token:
            return mark, "", ""
        before, _, behind = mark.partition(token)
        return before, f"<[{self.token_ids[token]}]>", behind


def without(*marks: str) -> str:
    """Return the regular expression of texts that contain none of ``marks``."""
    return f"({ANY} & ~({ANY} {one_of(marks)} {ANY}))"


def literal(text: str) -> str:
    """Return ``text`` as a literal; "" for an empty one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def one_of(texts: Sequence[str]) -> str:
    """Return an expression of literal alternatives."""
    return "(" + " | ".join(literal(text) or '""' for text in texts) + ")"


def sequence(*parts: str) -> str:
    """Return an expression of ``parts`` one after the other; empty ones are left out."""
    return " ".join(part for part in parts if part)


def regex(pattern: str) -> str:
    """Return a terminal that the whole text matches, without the pattern's anchors, which add nothing. Raises
    ValueError for a pattern that ends within an escape."""
    pattern = pattern.removeprefix("^")
    if _ends_anchored(pattern):
        pattern = pattern[:-1]
    if _num_backslashes(pattern) % 2:
        raise ValueError("ends with a backslash")
    return f"/{_ESCAPED.sub(_with_slash_escaped, pattern)}/" if pattern else '""'


def fault_of_pattern(pattern: str) -> str:
    """Return "" if grammars can have what the pattern is made of, else what they cannot have, as the end of a
    sentence that begins with the pattern."""
    found = next(filter(None, (part[1] for part in _PARTS_OF_PATTERN.finditer(pattern))), None)
    if found is None:
        return ""
    return f"has {found!r}: no grammar can look ahead or back, find bounds of words or refer to groups"


_PARTS_OF_PATTERN = re.compile(r"(\\[bB1-9k]|\(\?<?[=!])|\\.|\[\^?(?:\\.|[^\]\\])*", re.DOTALL)
"""A part that no grammar can have; or an escape, or a class of characters, in which there is no such part."""


def search_regex(pattern: str) -> str:
    """Return the expression of texts in which the pattern is found, as for JSON Schema's ``pattern``. Raises
    ValueError."""
    if fault := fault_of_pattern(pattern):
        raise ValueError(fault)
    # An anchor at the edge of an alternative is this one's alone: "^a|b$" finds a at the beginning, or b at
    # the end. llguidance ignores anchors, which are therefore said by what may stand around an alternative.
    alternatives = _alternatives(pattern)
    if not any(part.startswith("^") or _ends_anchored(part) for part in alternatives):
        alternatives = [pattern]
    return " | ".join(
        sequence("" if part.startswith("^") else ANY, regex(part), "" if _ends_anchored(part) else ANY)
        for part in alternatives
    )


_ESCAPED = re.compile(r"\\.|/", re.DOTALL)
"""An escape, which may be of a slash, or a bare slash, which would end the terminal."""


def _with_slash_escaped(found: re.Match[str]) -> str:
    return "\\/" if found[0] == "/" else found[0]


def _ends_anchored(pattern: str) -> bool:
    return pattern.endswith("$") and _num_backslashes(pattern[:-1]) % 2 == 0


def _num_backslashes(text: str) -> int:
    return len(text) - len(text.rstrip("\\"))


def _alternatives(pattern: str) -> list[str]:
    """Split the pattern at the bars outside of all brackets."""
    depth, in_class, starts = 0, False, [0]
    for found in _STRUCTURE.finditer(pattern):
        match found[0]:
            case "[":
                in_class = True
            case "]":
                in_class = False
            case "(" if not in_class:
                depth += 1
            case ")" if not in_class:
                depth -= 1
            case "|" if not in_class and depth == 0:
                starts.append(found.end())
    stops = [start - 1 for start in starts[1:]] + [len(pattern)]
    return [pattern[start:stop] for start, stop in zip(starts, stops, strict=True)]


_STRUCTURE = re.compile(r"\\.|[\[\]()|]", re.DOTALL)
"""An escape, which is skipped, a bracket or a bar."""
