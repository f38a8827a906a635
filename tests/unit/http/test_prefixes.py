"""The index finds the node that had the longest beginning of a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse_pd.serving.http import prefixes
from hisparse_pd.serving.http.prefixes import BLOCK_BYTES, MAX_BLOCKS, PrefixIndex, block_keys

PARTS = [bytes([letter]) * BLOCK_BYTES for letter in b"abc"]

prompts = st.lists(st.sampled_from(PARTS), max_size=5).map(b"".join)


@given(st.lists(prompts, max_size=12), prompts)
def test_the_node_with_the_longest_common_beginning_is_found(noted: list[bytes], prompt: bytes) -> None:
    """If several had it, the last one is found."""
    index: PrefixIndex[int] = PrefixIndex()
    for number, earlier in enumerate(noted):
        index.note(block_keys(earlier), number)

    def num_common(other: bytes) -> int:
        pairs = zip(block_keys(prompt), block_keys(other), strict=False)
        return sum(mine == theirs for mine, theirs in pairs)

    best = max(map(num_common, noted), default=0)
    expected = max((n for n, earlier in enumerate(noted) if num_common(earlier) == best), default=None)
    assert index.find(block_keys(prompt)) == (expected if best else None)


@pytest.mark.I8
def test_only_whole_blocks_count_and_not_beyond_a_bound() -> None:
    assert block_keys(b"x" * (BLOCK_BYTES - 1)) == []
    assert block_keys(b"x" * BLOCK_BYTES) == block_keys(b"x" * BLOCK_BYTES + b"y" * 3)
    assert len(block_keys(b"x" * (BLOCK_BYTES * (MAX_BLOCKS + 7)))) == MAX_BLOCKS


def test_a_later_block_is_told_apart_by_what_is_before_it() -> None:
    first, second = block_keys(b"".join(PARTS[:2])), block_keys(PARTS[2] + PARTS[1])
    assert not set(first) & set(second)


@pytest.mark.I8
def test_what_was_used_last_is_forgotten_last_and_ends_before_beginnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefixes, "MAX_KEYS", 3)
    index: PrefixIndex[str] = PrefixIndex()
    old, new = block_keys(PARTS[0] * 2), block_keys(PARTS[1] * 2)
    index.note(old, "a")
    index.note(new, "b")
    assert index.find(old) == "a"
    assert index.find(old[1:]) is None
    assert index.find(new[1:]) == "b"


def test_a_node_is_forgotten_with_all_its_blocks() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    shared, longer = block_keys(PARTS[0]), block_keys(PARTS[0] * 3)
    index.note(longer, "a")
    index.note(shared, "b")
    index.forget(["a"])
    assert index.find(longer) == "b"
