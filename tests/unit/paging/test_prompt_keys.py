"""Tests which beginnings of two prompts have keys in common."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hisparse_pd.core.paging.prompt_keys import (
    NO_ISOLATION,
    PageKey,
    PromptKeys,
    page_keys,
    root_of,
)
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.serving.http.prefixes import BLOCK_BYTES, block_keys

pytestmark = pytest.mark.I5

PAGE_SIZE = 3
ISOLATION_KEYS = st.tuples(*[st.sampled_from([None, "a", "b", "ab"])] * 2)
PROMPTS = st.lists(st.integers(0, 1), max_size=14)


@given(ISOLATION_KEYS, ISOLATION_KEYS, PROMPTS, PROMPTS)
@settings(derandomize=True, max_examples=400)
def test_keys_are_equal_for_equal_tokens_behind_equal_isolation_keys_and_never_else(
    key: tuple[str | None, str | None],
    other_key: tuple[str | None, str | None],
    tokens: list[int],
    other_tokens: list[int],
) -> None:
    roots = root_of(*key), root_of(*other_key)
    prompts = pack_token_ids(tokens), pack_token_ids(other_tokens)
    ours, theirs = (page_keys(root, prompt, PAGE_SIZE) for root, prompt in zip(roots, prompts, strict=True))
    num_common = 0
    if key == other_key:
        while (
            num_common < min(len(ours), len(theirs))
            and tokens[: (num_common + 1) * PAGE_SIZE] == other_tokens[: (num_common + 1) * PAGE_SIZE]
        ):
            num_common += 1
    assert ours[:num_common] == theirs[:num_common]
    assert set(ours[num_common:]).isdisjoint(theirs)


def test_a_partial_last_page_has_no_key_and_output_goes_on_behind_the_last_one() -> None:
    tokens = pack_token_ids(range(11))
    keys = page_keys(NO_ISOLATION, tokens, PAGE_SIZE)
    assert len(keys) == 3
    assert keys == page_keys(NO_ISOLATION, tokens[: 9 * 4], PAGE_SIZE)
    assert page_keys(keys[0], tokens[3 * 4 :], PAGE_SIZE) == keys[1:]


@pytest.mark.parametrize("root", [root_of("salt"), root_of(None, "salt"), root_of("salt", "salt")])
def test_a_router_and_a_front_tell_isolation_keys_apart(root: PageKey) -> None:
    prompt = bytes(3 * BLOCK_BYTES)
    assert set(block_keys(prompt, root)).isdisjoint(block_keys(prompt))
    assert len(block_keys(prompt, root)) == 3


def test_roots_are_pinned() -> None:
    """Both nodes must derive the same, whatever their release."""
    assert root_of() == NO_ISOLATION
    assert NO_ISOLATION.hex() == "4122f1eebdd1f812163cbe9148577e53"
    assert root_of("salt", "key").hex() == "635d310caec8eef95dc388bb793380b3"


def test_output_goes_on_where_the_prompt_ended() -> None:
    conversation = pack_token_ids(range(30))
    whole = PromptKeys.of(NO_ISOLATION, conversation, PAGE_SIZE)
    for num_bytes in (4 * num_tokens for num_tokens in (1, 2, 3, 4, 5, 8, 17)):
        prompt = PromptKeys.of(NO_ISOLATION, conversation[:num_bytes], PAGE_SIZE)
        assert prompt.with_output(conversation[num_bytes:]) == list(whole.keys)
