"""Streamed text is exactly the whole text, without half characters or parts of a stop string."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from hisparse_pd.base.vocabulary import CheckpointError
from hisparse_pd.serving.api.detokenizer import Detokenizer, StopStrings, TokenBytes
from tests.unit.api.tiny_tokenizer import BOS, EOS, make_tokenizer

TOKENIZER = make_tokenizer()
TOKEN_BYTES = TokenBytes(TOKENIZER.backend_tokenizer)
EOS_ID: int = TOKENIZER.convert_tokens_to_ids(EOS)

quick = settings(derandomize=True, max_examples=80)
token_ids = st.lists(st.integers(0, len(TOKENIZER) + 3), max_size=40)
texts = st.text(alphabet=st.sampled_from("ab€é😀 \n"), max_size=40)


def stream(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*map(detokenizer.feed, tokens), detokenizer.finish()]


def test_marks_of_reasoning_are_shown_though_they_are_special_tokens() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    tokens = tokenizer("[THINK]a[/THINK]b<|end|>", add_special_tokens=False)["input_ids"]
    shown = stream(Detokenizer(TokenBytes(tokenizer.backend_tokenizer)), tokens)
    assert (len(tokens), "".join(shown)) == (5, "[THINK]a[/THINK]b")


@quick
@given(token_ids, st.booleans())
def test_pieces_join_to_the_whole_decode(tokens: list[int], skip: bool) -> None:
    pieces = stream(Detokenizer(TOKEN_BYTES, skip_special_tokens=skip), tokens)
    assert "".join(pieces) == TOKENIZER.decode(tokens, skip_special_tokens=skip)


@quick
@given(texts)
def test_valid_text_never_shows_half_a_character(text: str) -> None:
    pieces = stream(Detokenizer(TOKEN_BYTES), list(text.encode()))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


@quick
@given(
    texts,
    st.lists(st.text(alphabet="ab€😀", min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
def test_stop_strings_never_leak(text: str, stop: list[str], keep: bool) -> None:
    detokenizer = Detokenizer(TOKEN_BYTES, stop, no_stop_trim=keep)
    shown = "".join(stream(detokenizer, list(text.encode())))
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if not ends:
        assert detokenizer.matched is None
        assert shown == text
        return
    end, start, matched = min(ends)
    assert detokenizer.matched == matched
    assert shown == (text[:end] if keep else text[:start])
    assert "".join(stream(detokenizer, list(b"ab"))) == ""


@quick
@given(texts, st.lists(st.text(alphabet="ab€😀", min_size=1, max_size=4), min_size=1, max_size=4))
def test_text_is_held_back_only_while_it_may_be_a_stop_string(text: str, stop: list[str]) -> None:
    stops = StopStrings(stop)
    shown = ""
    for position, char in enumerate(text):
        shown += stops.feed(char)
        if stops.matched is not None:
            return
        held = text[: position + 1][len(shown) :]
        assert held == "" or any(s.startswith(held) and s != held for s in stop)


@pytest.mark.I8
@pytest.mark.parametrize("token_id", [0xFF, 0xF0, 0x80, ord("z")])
def test_what_is_kept_back_does_not_grow_even_for_bytes_that_are_no_text(token_id: int) -> None:
    """Each token is decoded with what is withheld, whose length bounds the time."""
    detokenizer = Detokenizer(TOKEN_BYTES, ["zyz", "zzzzzy"])
    num_shown = 0
    for num_tokens in range(1, 1001):
        num_shown += len(detokenizer.feed(token_id))
        assert num_tokens - 5 <= num_shown <= num_tokens, "each token is a character, of text or of none"


@pytest.mark.I8
@pytest.mark.parametrize("stop", ["ac" * 512, "a" * 511 + "b" * 512], ids=["restarts", "falls"])
def test_long_stop_strings_cost_no_more_a_character_than_short_ones(stop: str) -> None:
    """Counts lines of Python. One stop string withholds 1,023 characters, and others are tried on them."""
    stops = StopStrings(["a" * 1023 + "b", *(stop + str(i) for i in range(8))])
    stops.feed("a" * 1023)
    num_lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    traced = sys.gettrace()
    sys.settrace(count)
    try:
        for _ in range(100):
            stops.feed("aaaa")
    finally:
        sys.settrace(traced)
    assert num_lines < 100 * 9 * (4 * 5 + 20)


def test_max_token_bytes_bounds_every_token() -> None:
    assert TOKEN_BYTES.max_token_bytes == len(BOS)
    assert all(len(TOKEN_BYTES.of(i)) <= TOKEN_BYTES.max_token_bytes for i in range(len(TOKENIZER)))


def test_another_kind_of_tokenizer_is_refused() -> None:
    tokenizer = make_tokenizer().backend_tokenizer
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(CheckpointError, match="Metaspace"):
        TokenBytes(tokenizer)
