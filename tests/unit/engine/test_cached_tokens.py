"""Cached tokens of a prompt by tier, as a prefill node and a resumed stream have them."""

from __future__ import annotations

import pytest

from hisparse_pd.engine.messages import CachedTokens
from hisparse_pd.protocol.messages import FetchedTokens, RoomDone


@pytest.mark.parametrize(
    ("num_cached", "fetched", "expected"),
    [
        (128, FetchedTokens(), CachedTokens(device=128)),
        (128, FetchedTokens(48), CachedTokens(device=80, host=48)),
        (128, FetchedTokens(32, 16), CachedTokens(device=80, host=32, storage=16)),
        (128, FetchedTokens(128), CachedTokens(host=128)),
        (128, FetchedTokens(500), CachedTokens(host=128)),
        (128, FetchedTokens(500, 100), CachedTokens(host=28, storage=100)),
        (128, FetchedTokens(1, 500), CachedTokens(storage=128)),
        (128, FetchedTokens(32, 16, 64), CachedTokens(device=16, host=32, storage=16, decode=64)),
        (128, FetchedTokens(1, 1, 500), CachedTokens(decode=128)),
    ],
)
def test_what_was_not_fetched_was_on_the_device(
    num_cached: int, fetched: FetchedTokens, expected: CachedTokens
) -> None:
    done = RoomDone(1, 0, num_cached, 0.0, fetched=fetched)
    assert CachedTokens.of_room(done) == expected


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (200, CachedTokens(80, 48, 16)),
        (128, CachedTokens(80, 48)),
        (100, CachedTokens(80, 20)),
        (70, CachedTokens(70, 0)),
    ],
)
def test_the_beginning_of_a_prompt_was_on_the_device(num_tokens: int, expected: CachedTokens) -> None:
    assert CachedTokens(80, 48, 16).first(num_tokens) == expected
