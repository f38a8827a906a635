"""Random answers that a grammar admits, by llguidance's own matcher over a byte-level tokenizer."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache

from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

EOS = 256
MAX_TOKENS = 4000

_JSON_PIECES = ('"', "}", "]", ",", ":", "{", "true", "null", "1", '"a"')
_WORDS = ("a", " ", "\n", "{", "[", "<", "/", '"', "null", "5", "é", "😀", "</")


class _Bytes:
    """A vocabulary of the 256 bytes, the end, and ``tokens``, special ones or just longer than a byte."""

    eos_token_id = EOS
    bos_token_id = None

    def __init__(self, tokens: Sequence[str], *, are_special: bool) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [b"<|end|>"]
        self.tokens += [token.encode() for token in tokens]
        self.special_token_ids = [EOS, *(range(257, len(self.tokens)) if are_special else ())]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def tokenizer(tokens: tuple[str, ...] = (), *, are_special: bool = False) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes(tokens, are_special=are_special)), slices=[])


def token_ids(tokens: Sequence[str]) -> Mapping[str, int]:
    return {token: number for number, token in enumerate(tokens, EOS + 1)}


def matcher(grammar: str, over: LLTokenizer | None = None) -> LLMatcher:
    made = LLMatcher(over or tokenizer(), grammar, log_level=0)
    assert not made.is_error(), f"{made.get_error()}\n{grammar}"
    return made


def error_of(grammar: str) -> str:
    return str(LLMatcher(tokenizer(), grammar, log_level=0).get_error())


def admits(grammar: str, text: str) -> bool:
    """Whether the answer may be ``text`` and end there, spelled a byte a token."""
    made = matcher(grammar)
    ids = list(text.encode())
    return bool(made.try_consume_tokens(ids) == len(ids) and made.is_accepting())


class Walk:
    """Makes random answers. ``marks`` are those of the markup, which random bytes would not hit."""

    def __init__(
        self,
        grammar: str,
        marks: Sequence[str] = (),
        tokens: Sequence[str] = (),
        *,
        are_special: bool = False,
    ) -> None:
        """``tokens`` are marks or parts of marks, which ``are_special`` or not."""
        self.grammar = grammar
        self._marks = tuple(marks)
        self._ids = token_ids(tokens)
        self._parts = re.compile("|".join((*map(re.escape, tokens), ".")), re.DOTALL)
        self.encode = cache(self._encode)
        self.over = tokenizer(tuple(tokens), are_special=are_special)
        self._start = matcher(grammar, self.over)

    def answer(self, seed: int, end_chance: float = 0.4) -> str:
        """``end_chance`` is the chance to end wherever the answer may."""
        self._random = random.Random(seed)
        made = self._start.deep_copy()
        text = b""
        for _ in range(MAX_TOKENS):
            if made.is_stopped() or (made.is_accepting() and self._random.random() < end_chance):
                return text.decode()
            piece = self._piece(made, text)
            assert made.consume_tokens(self.encode(piece))
            text += piece.encode()
        raise AssertionError(f"no end after {MAX_TOKENS} pieces: {text[-200:]!r} of\n{self.grammar}")

    def _piece(self, made: LLMatcher, text: bytes) -> str:
        forced = made.compute_ff_bytes()
        if forced:
            try:
                return str(forced.decode())
            except UnicodeDecodeError:
                pass
        words = [*_WORDS, *(chr(self._random.randrange(32, 127)) for _ in range(6))]
        if not _is_in_json_string(made):  # where a mark would be taken for one
            words += self._marks * 2
        self._random.shuffle(words)
        words += [*_JSON_PIECES, *map(chr, range(32, 127)), *self._marks, *self._ids]
        if self._random.random() < 0.5:
            words = [*self._random.sample(_JSON_PIECES[:3], 3), *words]
        for word in words:
            ids = self.encode(word)
            if made.validate_tokens(ids) == len(ids):
                return word
        raise AssertionError(f"nothing can follow {text!r}")

    def _encode(self, piece: str) -> list[int]:
        parts = self._parts.findall(piece)
        return [i for part in parts for i in ([self._ids[part]] if part in self._ids else part.encode())]


def _is_in_json_string(made: LLMatcher) -> bool:
    """Whether letters may follow, but no character that JSON has to escape; a bare text may have any."""
    return all(made.validate_tokens([ord(char)]) for char in 'q"') and not made.validate_tokens([1])
