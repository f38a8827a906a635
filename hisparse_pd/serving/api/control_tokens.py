"""The control tokens of a tokenizer, and where a client's string may spell one or a part of one.

``client_text.py`` replaces characters at these places so that the tokenizer finds no control token there. A
part counts because the template may write the other part: a token is cut into a beginning and a rest, and
``'<|' ~ name ~ '|>'`` makes ``<|user|>`` of the name ``user``.

One rest is not counted: a whole string that the template's source has as a literal or a name, as ``user`` in
``role == 'user'``. With a replaced character the comparison would fail. Such a string can complete a token
only where the template writes it behind the token's beginning, as templates do with roles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_LITERAL_ENDS = ("'", '"', "{", "%")
"""Characters that may end a literal in a template's source: its quote, a Jinja tag, or the ``%`` of a ``%s``,
in whose place a client's string is written."""

_CHANGES_CASE = re.compile(r"\b(?:lower|upper|title|capitalize)\b")
"""A pattern for the filters and methods by which a template may change the case of strings."""

_MAX_NAME_CHARS = 256
"""Maximum length of strings that a template is expected to change and write within a token's spelling, such
as a tool's name."""


def is_control_token(token: Any, template: str) -> bool:
    """Whether ``token``, an added token of a tokenizer (``tokenizers.AddedToken``), steers the model. The
    others are text: runs of spaces, and words that the template does not write."""
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
        firsts = "|".join(sorted({re.escape(text[0]) for text in self.spellings})) or "(?!)"  # never matches
        self._first_char = re.compile(firsts, flags)
        self._may_remove = "replace" in template
        """Whether the template may remove characters, after which the remaining ones could spell a token."""
        # Where characters may be removed, any first character of a token may begin one.
        self._spelling_start = (
            self._first_char if self._may_remove else re.compile(_spelling_pattern(self.spellings), flags)
        )
        parts = [(text[:at], text[at:]) for text in self.spellings for at in range(1, len(text))]
        self._beginnings = {beginning for beginning, _ in parts}
        """All proper beginnings of tokens."""
        begun = {text for text in self._beginnings if any(text + end in template for end in _LITERAL_ENDS)}
        self._rests = {rest for beginning, rest in parts if beginning in begun}
        """Rests of tokens whose beginnings end literals of the template: a client's string in that place may
        continue the token."""
        self._rest_beginnings = {rest[:end] for rest in self._rests for end in range(1, len(rest) + 1)}
        self._rest_first_chars = {rest[0] for rest in self._rests}
        quoted = re.findall(r"'([^'\n]*)'|\"([^\"\n]*)\"", template)
        self._compared_words = {
            *re.findall(r"\.(\w+)", template),
            *(word for pair in quoted for word in pair),
        }
        """Names and literals that the template may compare strings with. A string that is one of these stays
        as it is where it could only be the rest of a token."""

    def places(self, text: str) -> list[int]:
        """Return the indexes of the characters with which ``text`` may begin or continue a control token."""
        stripped = text.lstrip()
        # The string may begin with the rest of a token that a literal of the template begins.
        is_compared = stripped in self._compared_words
        found = [] if is_compared or not self._continues_token(stripped) else [len(text) - len(stripped)]
        # Such a rest may begin anywhere if the template may remove the characters before it.
        if self._may_remove and len(text) <= _MAX_NAME_CHARS and text not in self._compared_words:
            found += (index for index, char in enumerate(text) if char in self._rest_first_chars)
        if self._first_char.search(text) is None:
            return found
        # A whole token may be anywhere.
        found += (match.start() for match in self._spelling_start.finditer(text))
        # The string may end with the beginning of a token that the template completes.
        end = len(text.rstrip())
        for match in self._first_char.finditer(text, max(0, end - self._max_chars), end):
            if text[match.start() : end] in self._beginnings:
                found.append(match.start())
        return found

    def _continues_token(self, text: str) -> bool:
        """Whether ``text`` begins with the rest of a token that the template begins, or is the beginning of
        such a rest, whose end the template may write."""
        for end in range(1, len(text) + 1):
            if text[:end] in self._rests:
                break
            if text[:end] not in self._rest_beginnings:
                return False
        return text != ""


def _spelling_pattern(spellings: Iterable[str]) -> str:
    """Return a pattern that finds each spelling by its first character, even where spellings overlap."""
    rests: dict[str, set[str]] = {}
    for text in spellings:
        rests.setdefault(text[0], set()).add(text[1:])
    return "|".join(f"{re.escape(first)}(?={_any_of(rests[first])})" for first in sorted(rests)) or "(?!)"


def _any_of(texts: set[str]) -> str:
    """Return a pattern that matches where any of ``texts`` stands, and that tries no character twice."""
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
