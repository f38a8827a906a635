"""Masks have exactly the tokens that may follow, also after drafts, and the tokens that end an answer."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.core.grammar.matcher import (
    ALL_ALLOWED,
    GrammarError,
    OutputMasks,
    fill_masks,
    without_ending,
)
from hisparse_pd.core.grammar.token_trie import MAX_GRAMMAR_BYTES, TokenTrie
from tests.unit.grammar.tries import (
    EOS,
    OTHER_EOS,
    VOCAB_SIZE,
    allowed,
    matcher,
    next_tokens,
    schema,
    tokenizer_json,
    trie,
)

ENDS = {EOS, OTHER_EOS}


def test_a_mask_has_what_may_follow_and_the_ends_where_it_may_be_over() -> None:
    one = matcher('start: "ab" "c"?')
    assert next_tokens(one) == {ord("a")}
    one.advance(ord("a"))
    assert next_tokens(one) == {ord("b")}
    one.advance(ord("b"))
    assert next_tokens(one) == {ord("c")} | ENDS
    one.advance(ord("c"))
    assert next_tokens(one) == ENDS
    one.advance(OTHER_EOS)
    assert one.error == ""


def test_where_eos_is_ignored_it_comes_when_nothing_else_may() -> None:
    one = matcher('start: "a" "c"?', ignore_eos=True)
    assert next_tokens(one) == {ord("a")}
    one.advance(ord("a"))
    assert next_tokens(one) == {ord("c")}
    one.advance(ord("c"))
    assert next_tokens(one) == ENDS
    grammar = trie().compile('start: "x"?')
    assert allowed(grammar.first_mask(ignore_eos=False)) == {ord("x")} | ENDS
    assert allowed(grammar.first_mask(ignore_eos=True)) == {ord("x")}


@pytest.mark.parametrize("token_id", [0, 30, 31, 32, 63, VOCAB_SIZE - 1])
def test_any_bit_of_a_word_can_be_an_end(token_id: int) -> None:
    mask = np.full(10, ALL_ALLOWED, dtype=np.int32)
    assert allowed(without_ending(mask, (token_id, 5))) == set(range(320)) - {token_id, 5}
    alone = np.zeros(10, dtype=np.int32)
    alone.view(np.uint32)[token_id // 32] = 1 << token_id % 32
    assert allowed(without_ending(alone.copy(), (token_id,))) == {token_id}


def test_masks_behind_drafts_are_those_of_an_output_that_has_them() -> None:
    text = b'{"a":[true,null]}'
    grammar = trie().compile(schema({"type": "object"}))
    for start in range(len(text)):
        drafts = list(text[start : start + 3])
        one, other = grammar.matcher(ignore_eos=False), grammar.matcher(ignore_eos=False)
        for token_id in text[:start]:
            one.advance(token_id)
            other.advance(token_id)
        masks = np.zeros((6, trie().num_words), dtype=np.int32)
        fill_masks(masks, [OutputMasks(one, 1, drafts)])
        assert not masks[0].any()
        for number in range(len(drafts) + 1):
            assert allowed(masks[1 + number]) == next_tokens(other), (start, number)
            if number < len(drafts):
                other.advance(drafts[number])
        assert next_tokens(one) == allowed(masks[1]), "the drafts are not part of the output"


def test_behind_a_draft_that_is_not_allowed_anything_may_come() -> None:
    one, other = matcher('start: "abc"'), matcher('start: "x" /[0-9]+/')
    masks = np.zeros((7, trie().num_words), dtype=np.int32)
    fill_masks(
        masks, [OutputMasks(one, 0, [ord("a"), ord("z"), ord("c")]), OutputMasks(other, 4, [ord("x"), EOS])]
    )
    assert [allowed(mask) for mask in masks[:2]] == [{ord("a")}, {ord("b")}]
    assert (masks[2:4] == ALL_ALLOWED).all()
    assert [allowed(mask) for mask in masks[4:6]] == [{ord("x")}, set(range(48, 58))]
    assert (masks[6] == ALL_ALLOWED).all()
    assert next_tokens(one) == {ord("a")}


def test_drafts_go_past_the_end_of_a_grammar() -> None:
    one = matcher('start: "a"', ignore_eos=True)
    masks = np.zeros((4, trie().num_words), dtype=np.int32)
    fill_masks(masks, [OutputMasks(one, 0, [ord("a"), EOS, ord("a")])])
    assert [allowed(mask) for mask in masks[:2]] == [{ord("a")}, ENDS]
    assert one.error == ""
    assert next_tokens(one) == {ord("a")}


def test_many_outputs_at_once_have_their_own_masks() -> None:
    grammars = [f'start: "{letter}"' for letter in "abcdefgh"]
    masks = np.zeros((16, trie().num_words), dtype=np.int32)
    fill_masks(masks, [OutputMasks(matcher(text), 2 * row, ()) for row, text in enumerate(grammars)])
    assert [allowed(mask) for mask in masks[::2]] == [{ord(letter)} for letter in "abcdefgh"]
    assert not masks[1::2].any()


@pytest.mark.parametrize(("row", "drafts"), [(-1, []), (2, []), (1, [97])])
def test_rows_outside_are_an_error(row: int, drafts: list[int]) -> None:
    masks = np.zeros((2, trie().num_words), dtype=np.int32)
    with pytest.raises(ValueError, match="row"):
        fill_masks(masks, [OutputMasks(matcher('start: "a"'), row, drafts)])


def test_a_token_that_may_not_come_ends_the_output_and_masks_allow_all() -> None:
    one = matcher('start: "a"')
    with pytest.raises(GrammarError, match="doesn't satisfy"):
        one.advance(ord("b"))
    assert "doesn't satisfy" in one.error
    assert next_tokens(one) >= set(range(VOCAB_SIZE))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Empty"),
        ("start: (((", "Expected token"),
        (schema({"type": "nothing"}), "Invalid type"),
        (schema({"not": {"type": "string"}}), "Unimplemented"),
        (schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no text can follow"),
        (schema({"allOf": [{"type": "integer", "multipleOf": 3000 + n} for n in range(3)]}), "1000000"),
        ("start: /(/", r"regex parse error: \( error: unclosed group$"),
    ],
)
def test_why_a_grammar_cannot_be_had(text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        trie().compile(text)


def test_tokenizers_that_cannot_do() -> None:
    with pytest.raises(GrammarError, match="no token that ends"):
        TokenTrie(tokenizer_json(), VOCAB_SIZE, ())
    with pytest.raises(GrammarError, match="cannot use this tokenizer"):
        TokenTrie(tokenizer_json(), 200, (EOS,))


_SCALARS: list[Any] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -12, "maximum": 3000},
    {"type": "integer", "exclusiveMinimum": 7, "multipleOf": 5},
    {"type": "number", "minimum": 0.25, "maximum": 17.5},
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 3, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{2}-[0-9]+x?$"},
    {"type": "string", "format": "date"},
    {"enum": ["red", 7, None, [1, 2], {"deep": True}]},
    {"const": {"a": ['\\"\n']}},
    {"type": ["integer", "null"]},
]


def _requiring_its_own(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"required": [name for name in schema["required"] if name in schema["properties"]]}


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b", "long name", "ü", "0"])
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=4)}
        | {
            "required": st.lists(names, max_size=3, unique=True),
            "additionalProperties": st.just(False) | inner,
        }
    ).map(_requiring_its_own)
    arrays = st.builds(
        lambda first, items, least: (
            {"type": "array", "prefixItems": first, "items": items, "minItems": least}
            | {"maxItems": least + 2}
        ),
        st.lists(inner, max_size=2),
        inner,
        st.integers(0, 2),
    )
    return objects | arrays | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)})


SCHEMAS = st.recursive(st.sampled_from(_SCALARS), _nested, max_leaves=6)


@settings(max_examples=100, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_what_is_drawn_from_the_masks_is_an_instance(of: Any, seed: int) -> None:
    text = drawn(schema(of), random.Random(seed))
    jsonschema.Draft202012Validator(of).validate(json.loads(text))


def drawn(grammar: str, rng: random.Random) -> str:
    """Draw a text of the grammar at random, after a while from the bytes that bring it to its end."""
    one = matcher(grammar)
    text = b""
    closing = b'"}],:-0123456789'
    while True:
        may_come = next_tokens(one)
        if may_come & ENDS and (len(text) > 200 or may_come <= ENDS or rng.random() < 0.2):
            return text.decode()
        choices = sorted(may_come - ENDS - set(b" \t\r\n")) or sorted(may_come - ENDS)
        hurry = [byte for byte in closing if byte in choices]
        token_id = hurry[0] if hurry and len(text) > 60 else rng.choice(choices)
        one.advance(token_id)
        text += bytes([token_id])
        assert len(text) < 3000


def test_a_text_at_its_bound_compiles() -> None:
    words = MAX_GRAMMAR_BYTES // 24
    text = schema({"enum": [f"value {number:09d}" for number in range(words)]})
    assert len(text) <= MAX_GRAMMAR_BYTES
    trie().compile(text)
