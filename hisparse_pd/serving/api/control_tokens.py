"""The control tokens of a tokenizer, and where a client's string may spell one or a part of one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_LITERAL_ENDS = ("'", '"', "{", "%")
"""Characters that may follow a literal in a template's source: its quote, or a Jinja tag."""

_CHANGES_CASE = re.compile(r"\b(?:lower|upper|title|capitalize)\b")

_MAX_NAME_CHARS = 256
"""Longest string that a template is expected to put into a mark, such as a tool's name."""


def is_control_token(token: Any, template: str) -> bool:
    """Whether an added token of a tokenizer steers the model. The others are text: runs of spaces, and words
    that the template does not write."""
    text = token.content
    if not text.strip():
        return False
    is_word = all(char.isalnum() or char.isspace() for char in text)
    return token.special or not is_word or text in template


class ControlTokens:
    """The spellings of control tokens, and the places of a client's string that may begin one."""

    def __init__(self, spellings: Iterable[str], template: str) -> None:
        """``template`` is the source of the chat template, which writes around the client's strings."""
        self.spellings = tuple(sorted(set(spellings)))
        self._max_chars = max(map(len, self.spellings), default=0)
        flags = re.IGNORECASE if _CHANGES_CASE.search(template) else re.NOFLAG
        firsts = "|".join(sorted({re.escape(text[0]) for text in self.spellings})) or "(?!)"
        self._first = re.compile(firsts, flags)
        self._is_changed = "replace" in template
        """The template may remove characters, so that the remaining ones spell a token."""
        self._spelled = self._first if self._is_changed else re.compile(_places_of(self.spellings), flags)
        parts = [(text[:at], text[at:]) for text in self.spellings for at in range(1, len(text))]
        self._beginnings = {beginning for beginning, _ in parts}
        begun = {text for text in self._beginnings if any(text + end in template for end in _LITERAL_ENDS)}
        self._rests = {rest for beginning, rest in parts if beginning in begun}
        """Ends of tokens whose beginnings are literals of the template: both together could be the token."""
        self._beginnings_of_rests = {rest[:end] for rest in self._rests for end in range(1, len(rest) + 1)}
        self._firsts_of_rests = {rest[0] for rest in self._rests}
        quoted = re.findall(r"'([^'\n]*)'|\"([^\"\n]*)\"", template)
        self._words = {*re.findall(r"\.(\w+)", template), *(word for pair in quoted for word in pair)}
        """Names and values that the template may compare strings with."""

    def places(self, text: str) -> list[int]:
        """Return the indexes of the characters with which ``text`` may begin or continue a control token."""
        stripped = text.lstrip()
        found = [len(text) - len(stripped)] if self._goes_on(stripped) else []
        if self._is_changed and len(text) <= _MAX_NAME_CHARS and text not in self._words:
            found += (index for index, char in enumerate(text) if char in self._firsts_of_rests)
        if self._first.search(text) is None:
            return found
        found += (match.start() for match in self._spelled.finditer(text))
        end = len(text.rstrip())
        for match in self._first.finditer(text, max(0, end - self._max_chars), end):
            if text[match.start() : end] in self._beginnings:
                found.append(match.start())
        return found

    def _goes_on(self, text: str) -> bool:
        """Whether ``text`` begins with the rest of a token that the template begins, or with a part of it."""
        for end in range(1, len(text) + 1):
            if text[:end] in self._rests:
                break
            if text[:end] not in self._beginnings_of_rests:
                return False
        return text != "" and text not in self._words


def _places_of(spellings: Iterable[str]) -> str:
    """Return a pattern for the first character of each spelling; spellings may overlap."""
    rests: dict[str, set[str]] = {}
    for text in spellings:
        rests.setdefault(text[0], set()).add(text[1:])
    return "|".join(f"{re.escape(first)}(?={_any_of(rests[first])})" for first in sorted(rests)) or "(?!)"


def _any_of(texts: set[str]) -> str:
    """Return a pattern for the shortest of ``texts``, which tries no character twice."""
    if "" in texts:
        return ""
    by_first: dict[str, list[str]] = {}
    for text in sorted(texts):
        by_first.setdefault(text[0], []).append(text)
    branches = []
    for group in by_first.values():
        shared = _shared_beginning(group[0], group[-1])
        branches.append(re.escape(shared) + _any_of({text[len(shared) :] for text in group}))
    return f"(?:{'|'.join(branches)})"


def _shared_beginning(one: str, other: str) -> str:
    num_shared = 0
    while num_shared < min(len(one), len(other)) and one[num_shared] == other[num_shared]:
        num_shared += 1
    return one[:num_shared]
