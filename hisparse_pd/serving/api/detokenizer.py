"""Turns token ids into text as they come: into whole characters, and without any part of a stop string.

A front has one ``TokenBytes`` for its tokenizer, and a ``Detokenizer`` for each sample (``output.py``). Every
token of a byte-level tokenizer stands for fixed bytes, so a streaming UTF-8 decoder gives exactly the text of
decoding all tokens at once, in time linear in the output. A character whose bytes are spread over tokens
comes with its last byte.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property, lru_cache

from tokenizers import Tokenizer, decoders, pre_tokenizers

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.serving.api.chat_format import THINK_MARKS


class TokenBytes:
    """The bytes that each token of a byte-level tokenizer stands for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises CheckpointError for one that is not byte-level."""
        if not _is_byte_level(tokenizer.decoder):
            raise CheckpointError(
                f"the tokenizer decodes with {type(tokenizer.decoder).__name__}; only byte-level tokenizers "
                "(as those of DeepSeek-V3.2 and GLM-5) are supported"
            )
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        # Marks of reasoning are never skipped: ``chat_message`` reads them.
        marks = {mark for think in THINK_MARKS for mark in (think.opening, think.closing)}
        self._special_ids = {i for i, t in added.items() if t.special and t.content not in marks}
        self._byte_of_char = _byte_alphabet()
        self._cache: dict[int, bytes] = {}

    def of(self, token_id: int, *, skip_special: bool = False) -> bytes:
        """Return a token's bytes; b"" if it is skipped, or unknown to the tokenizer (a padded vocabulary)."""
        if skip_special and token_id in self._special_ids:
            return b""
        found = self._cache.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = self._cache[token_id] = b"" if token is None else self._to_bytes(token)
        return found

    def text(self, token_id: int) -> str:
        """Return the text of one token, with U+FFFD for bytes that are no whole character."""
        return self.of(token_id).decode(errors="replace")

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token. A text's bytes, divided by this, are a lower bound of its tokens."""
        return max((len(self._to_bytes(token)) for token in self._tokenizer.get_vocab()), default=1)

    def _to_bytes(self, token: str) -> bytes:
        try:
            return bytes(self._byte_of_char[char] for char in token)
        except KeyError:  # an added token with characters outside the alphabet stands for itself
            return token.encode()


class Detokenizer:
    """The text of one sample. Feed tokens until ``matched`` is set or the sample ends, then ``finish``."""

    def __init__(
        self,
        token_bytes: TokenBytes,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        no_stop_trim: bool = False,
    ) -> None:
        """``no_stop_trim``: whether the stop string that ends the text is part of it."""
        self._token_bytes = token_bytes
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = StopStrings(stop, keep_match=no_stop_trim)

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.matched

    def feed(self, token_id: int) -> str:
        """Return the text that is certain now. A token after a match adds nothing."""
        new_bytes = self._token_bytes.of(token_id, skip_special=self._skip_special)
        return self._stop.feed(self._utf8.decode(new_bytes))

    def finish(self) -> str:
        """Return the withheld text. An incomplete character at the end becomes U+FFFD."""
        return self._stop.feed(self._utf8.decode(b"", final=True)) + self._stop.finish()


class StopStrings:
    """Passes text on, and withholds what may be the beginning of a stop string.

    The stop string that is complete first ends the text; of several that end at the same character, the
    longest one. The time is linear in the text, whatever the stop strings are (Knuth, Morris and Pratt).
    """

    def __init__(self, stop: Sequence[str], *, keep_match: bool = False) -> None:
        self._stop = tuple(stop)
        self._num_begun = [0] * len(stop)
        """For each stop string, the length of its longest beginning with which the text ends."""
        self._keep_match = keep_match
        self._withheld = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take in further text. Returns what of the text so far can be passed on now."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        num_withheld = len(self._withheld)
        matches = []
        for number, stop in enumerate(self._stop):
            self._num_begun[number], end = _advance(stop, self._num_begun[number], text)
            if self._num_begun[number] == len(stop):
                matches.append((num_withheld + end, num_withheld + end - len(stop), stop))
        text = self._withheld + text
        self._withheld = ""
        if matches:
            end, start, self.matched = min(matches)  # the first to end; of several, the longest
            return text[:end] if self._keep_match else text[:start]
        if num_begun := max(self._num_begun):
            text, self._withheld = text[:-num_begun], text[-num_begun:]
        return text

    def finish(self) -> str:
        """Return the withheld text: the text has ended without a stop string."""
        withheld, self._withheld = self._withheld, ""
        return withheld


def _advance(stop: str, num_begun: int, text: str) -> tuple[int, int]:
    """Advance by ``text``, before which the first ``num_begun`` characters of ``stop`` have come.

    Returns with how many characters of ``stop`` the text ends, as far as it was read, and how many characters
    of ``text`` were read: reading ends behind the first whole ``stop``.
    """
    if not num_begun and stop[0] not in text:
        return 0, len(text)
    borders = _borders(stop)
    for index, char in enumerate(text):
        while num_begun and stop[num_begun] != char:
            num_begun = borders[num_begun - 1]
        num_begun += stop[num_begun] == char
        if num_begun == len(stop):
            return num_begun, index + 1
    return num_begun, len(text)


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """Return, for each beginning of ``stop``, the length of the longest shorter one that it ends with."""
    borders = [0] * len(stop)
    for index in range(1, len(stop)):
        length = borders[index - 1]
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        borders[index] = length + (stop[length] == stop[index])
    return tuple(borders)


def _is_byte_level(decoder: object) -> bool:
    if isinstance(decoder, decoders.Sequence):
        return "ByteLevel(" in repr(decoder)
    return isinstance(decoder, decoders.ByteLevel)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of byte-level vocabularies.

    Printable Latin-1 characters stand for their own bytes, and those from U+0100 on for the other bytes in
    order.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    itself = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    return itself | {chr(0x100 + i): byte for i, byte in enumerate(others)}
