"""Names of tokens in the logprobs of completions, and the offsets of their texts.

A token's name is its text. A token whose bytes are no whole characters has a name such as
``bytes:\\xe2\\x80``, as in OpenAI's API. In a list of likeliest tokens, one with the same name as another is
called ``token_id:N``, as in vLLM's. ``openai_answers.py`` and ``completion_logprobs.py`` write logprobs with
this module.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hisparse_pd.serving.api.detokenizer import TokenBytes

_MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    """Return a logprob that JSON can have."""
    return max(logprob, _MIN_LOGPROB)


def by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


class TokenNames:
    """The names of a request's tokens."""

    def __init__(self, token_bytes: TokenBytes, *, are_ids: bool) -> None:
        """``are_ids``: whether all names are ``token_id:N``."""
        self.token_bytes = token_bytes
        self._are_ids = are_ids

    def of(self, token_id: int) -> str:
        """Return the name of a token."""
        if self._are_ids:
            return by_id(token_id)
        spelled = self.token_bytes.of(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def likeliest(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the logprobs of the likeliest tokens and of the token itself, which keeps its own name."""
        own = self.of(token_id)
        shown: dict[str, float] = {}
        for top_id, top_logprob in top:
            name = self.of(top_id)
            if top_id != token_id and (name == own or name in shown):
                name = by_id(top_id)
            shown[name] = finite(top_logprob)
        shown.setdefault(own, finite(logprob))
        return shown


class TextOffsets:
    """Computes where each token's text begins: at the character that contains the token's first byte."""

    def __init__(self, token_bytes: TokenBytes, start: int = 0, *, skip_special_tokens: bool = False) -> None:
        """``start`` is the first token's offset. ``skip_special_tokens``: they are not in the text."""
        self._token_bytes = token_bytes
        self._skips_special = skip_special_tokens
        self._num_chars = start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def end(self) -> int:
        """Offset of the end of the last whole character so far."""
        return self._num_chars

    def next(self, token_id: int) -> int:
        """Return the offset of the next token. Where "é" is two tokens, C3 and A9, both have its offset."""
        spelled = self._token_bytes.of(token_id, skip_special=self._skips_special)
        if not spelled:
            return self._num_chars
        num_ended = len(self._utf8.decode(spelled[:1]))  # characters that end with the first byte
        # Bytes that wait after the first one: several if it continues a character, which begins where the
        # text so far ends; one if it begins a character; none if it ends one.
        num_pending_bytes = len(self._utf8.getstate()[0])
        if num_pending_bytes > 1:
            offset = self._num_chars
        elif num_pending_bytes:
            offset = self._num_chars + num_ended
        else:
            offset = self._num_chars + num_ended - 1
        self._num_chars += num_ended + len(self._utf8.decode(spelled[1:]))
        return offset


class EchoOffsets:
    """Computes where each token of a prompt begins in the echoed text.

    Tokens that the tokenizer puts before the client's text are not in the echo. Their offset is 0. The
    first token with whose text the echo begins is the client's first one.
    """

    def __init__(self, token_bytes: TokenBytes, echo: str) -> None:
        self._token_bytes = token_bytes
        self._echo = echo
        self._offsets = TextOffsets(token_bytes)
        self._has_begun = False

    @property
    def end(self) -> int:
        """Offset of the end of the last whole character so far."""
        return min(self._offsets.end, len(self._echo)) if self._has_begun else 0

    def next(self, token_id: int) -> int:
        """Return the offset of the next token."""
        if not self._has_begun:
            alone = codecs.getincrementaldecoder("utf-8")("replace").decode(self._token_bytes.of(token_id))
            self._has_begun = self._echo.startswith(alone)
        return min(self._offsets.next(token_id), len(self._echo)) if self._has_begun else 0
