"""Converts GBNF, llama.cpp's notation of grammars, to Lark's, for requests with such a grammar.

llguidance converts; what it gets wrong is changed in the text before: comments, ``\\u`` escapes, and bars at
the beginning of a line.
"""

from __future__ import annotations

import re

_QUOTED = r'(?P<quoted>"(?:\\.|[^"\\])*(?:"|\Z)|\[(?:\\.|[^\]\\])*(?:\]|\Z))'
"""Literals and character classes; an unterminated one reaches to the end of the text."""
_COMMENT = re.compile(_QUOTED + r"|#[^\n]*", re.DOTALL)
"""A comment, or a quoted part, in which ``#`` begins none."""
_BAR = re.compile(_QUOTED + r"|(?<!\s)\s+\|", re.DOTALL)
"""A bar with the space and line breaks before it, or a quoted part."""
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def convert_gbnf(text: str) -> str:
    """Return the grammar in llguidance's Lark notation.

    The time grows with the number of rules times the length: 0.3 s for 128 rules in 16 KiB. Callers bound
    both. Raises ValueError for text that is not GBNF.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark  # late: the library takes a while to load

    # Comments become nothing; quoted parts get characters in place of their escapes.
    text = _COMMENT.sub(lambda part: _ESCAPE.sub(_character, part["quoted"] or ""), text)
    # A bar moves to the end of the line before: the library gets one that begins a line wrong.
    text = _BAR.sub(lambda part: part["quoted"] or " |", text)
    try:
        return gbnf_to_lark(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    except Exception as error:  # its parser raises anything at the end of the text
        raise ValueError(f"is no grammar in GBNF: {error}") from error


def _character(escape: re.Match[str]) -> str:
    r"""Return the character of a ``\u`` escape, which the library gets wrong; other escapes stay."""
    code = escape[1] or escape[2]
    if code is None:
        return escape[0]
    try:
        char = chr(int(code, 16))
        char.encode()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"has the escape {escape[0]}, which is no character") from error
    if char < " " or char == "\x7f":
        return f"\\x{ord(char):02x}"
    return f"\\{char}" if char in '"\\[]' else char
