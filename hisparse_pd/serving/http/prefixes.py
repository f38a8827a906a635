"""Which rank had a prompt with the same beginning last, and so has it in its prefix cache, or holds it.

A prompt's bytes are cut into blocks: in a router as its client sent them, in a node's front packed ids. Their
keys are a chain (``prompt_keys.py``), so the longest beginning that two prompts have in common is the last
key that they share. The index forgets what has not been asked for the longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Final, Generic, TypeVar

from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, chain

BLOCK_BYTES: Final = 512
"""Some 128 tokens of English, or 128 packed ids: two pages."""
MAX_BLOCKS: Final = 512
"""Of a prompt that are told apart: 64k tokens."""
LOAD_BOUND: Final = 1.25
"""Of the mean load, what a rank may have for the sake of the prefixes that it has: as in consistent hashing
with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016).
"""
MAX_KEYS: Final = 1 << 18
"""In an index: 32 million tokens, 50 MB."""

R = TypeVar("R", bound=Hashable)


def block_keys(prompt: bytes | memoryview, root: PageKey = NO_ISOLATION) -> list[bytes]:
    """The keys of ``prompt``'s whole blocks, from its beginning."""
    return chain(root, memoryview(prompt)[: MAX_BLOCKS * BLOCK_BYTES], BLOCK_BYTES)


class PrefixIndex(Generic[R]):
    """The rank that each block went to last."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._rank_of: OrderedDict[bytes, R] = OrderedDict()
        self._max_keys = max_keys

    def find(self, keys: Sequence[bytes]) -> R | None:
        """The rank with the longest beginning of a prompt; None when none has its first block."""
        found: R | None = None
        for key in keys:
            if (rank := self._rank_of.get(key)) is None:
                break
            found = rank
        return found

    def note(self, keys: Sequence[bytes], rank: R) -> None:
        """A prompt goes to ``rank``."""
        for key in reversed(keys):  # a beginning is used last, and so forgotten last
            self._rank_of[key] = rank
            self._rank_of.move_to_end(key)
        while len(self._rank_of) > self._max_keys:
            self._rank_of.popitem(last=False)

    def forget(self, ranks: Collection[R]) -> None:
        """``ranks`` may have lost their caches."""
        gone = frozenset(ranks)
        for key in [key for key, rank in self._rank_of.items() if rank in gone]:
            del self._rank_of[key]
