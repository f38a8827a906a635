"""The bytes of a checkpoint's tokens, and grammars compiled for them.

The engine's compiler and the front's checker have a ``TokenTrie`` each; ``compile`` makes a ``Grammar``, and
each request with it gets a ``Matcher``. A grammar is text: llguidance's dialect of Lark, which can contain
JSON schemas and regular expressions, or its JSON of grammars. ``LIMITS`` does not bound the time, memory and
stack of compiling; ``checker.py`` does, before an engine sees the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from hisparse_pd.core.grammar.matcher import (
    NONE_AVOIDED,
    Bits,
    GrammarError,
    Matcher,
    in_a_line,
    without_ending,
)

MAX_GRAMMAR_BYTES: Final = 256 << 10
"""Size of a grammar's text in UTF-8."""
LIMITS: Final = LLParserLimits(
    max_items_in_row=500,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""llguidance's limits for a request and for each of its masks and tokens; docs/operations.md has their
effect."""


class TokenTrie:
    """The bytes of a model's tokens. Making one takes as long as loading a tokenizer; a process makes one."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``tokenizer``: the text of a tokenizer.json; ``vocab_size``: the width of the logits, which may
        exceed the number of tokens. Raises GrammarError."""
        if not eos_token_ids:
            raise GrammarError("this checkpoint names no token that ends an answer; grammars need one")
        try:
            self._inner = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise GrammarError(f"grammars cannot use this tokenizer: {in_a_line(str(error))}") from error
        self.num_words = -(-vocab_size // 32)
        self._eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def load(cls, model_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> TokenTrie:
        """Read the tokens of a local checkpoint. Raises GrammarError."""
        file = model_path / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GrammarError(f"{file}: cannot be read ({error}); grammars need it") from error
        return cls(text, vocab_size, eos_token_ids)

    def compile(self, text: str, output: Sequence[int] = ()) -> Grammar:
        """Compile a grammar, without holding the interpreter's lock. ``output``: tokens that the output has
        already.

        Raises GrammarError if it cannot be parsed, exceeds a limit, or allows no next token.
        """
        matcher = LLMatcher(self._inner, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            Matcher(matcher, NONE_AVOIDED).advance(*output)
        # In the errors below, "it" is the output so far, which is empty at first.
        mask = np.zeros(self.num_words, dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            error = in_a_line(matcher.get_error())
            if error.startswith("NoExtension"):
                error = "no text can follow it"
            raise GrammarError(error)
        if not mask.any():
            raise GrammarError("no token can begin what follows it")
        return Grammar(matcher, mask, self._eos_token_ids)


class Grammar:
    """A compiled grammar, for any number of requests."""

    def __init__(self, inner: LLMatcher, first_mask: Bits, eos_token_ids: Sequence[int]) -> None:
        self._inner = inner
        self._first_mask = first_mask
        self._eos_token_ids = tuple(eos_token_ids)

    def first_mask(self, *, ignore_eos: bool) -> Bits:
        """Return the mask of an output's first token, int32 [num_words]; the caller must not write to it."""
        if not ignore_eos:
            return self._first_mask
        return without_ending(self._first_mask.copy(), self._eos_token_ids)

    def matcher(self, *, ignore_eos: bool) -> Matcher:
        """Return the matcher of an output, which begins with the ``output`` given to ``compile``."""
        return Matcher(self._inner.deep_copy(), self._eos_token_ids if ignore_eos else NONE_AVOIDED)
