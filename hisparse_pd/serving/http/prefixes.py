"""An index that tells which rank had a prompt with the same beginning last, and so may still have its KV.

A node's front has an index of its ranks (``rank_choice.py``). The router has one of the ranks of all nodes of
a kind (``router/nodes.py``). A prompt is cut into blocks of bytes: those that the client sent in a router,
packed token ids in a node's front. The blocks' keys are a chain (``prompt_keys.py``), so two prompts have the
same beginning up to the last key that they share. The index forgets the least recently used keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Final, Generic, TypeVar

from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, chain

BLOCK_BYTES: Final = 512
"""Size of a block: some 128 tokens of English, or 128 packed ids, which are two pages."""
MAX_BLOCKS: Final = 512
"""Blocks of a prompt that get keys, from its beginning: 64k tokens."""
LOAD_BOUND: Final = 1.25
"""The most load, as a multiple of the mean, with which a rank is still preferred for its prefixes. This is
consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016). Both users of an index apply
it."""
MAX_KEYS: Final = 1 << 18
"""Limit for the keys in an index: 32 million tokens, 50 MB."""

R = TypeVar("R", bound=Hashable)


def block_keys(prompt: bytes | memoryview, root: PageKey = NO_ISOLATION) -> list[bytes]:
    """Return the keys of a prompt's whole blocks, from its beginning."""
    return chain(root, memoryview(prompt)[: MAX_BLOCKS * BLOCK_BYTES], BLOCK_BYTES)


class PrefixIndex(Generic[R]):
    """Knows to which rank each block went last. ``R`` is what names a rank."""

    def __init__(self) -> None:
        self._rank_of: OrderedDict[bytes, R] = OrderedDict()

    def find(self, keys: Sequence[bytes]) -> R | None:
        """Return the rank that had the longest beginning of a prompt, None if no rank had its first block."""
        found: R | None = None
        for key in keys:
            if (rank := self._rank_of.get(key)) is None:
                break
            found = rank
        return found

    def rank_of(self, key: bytes) -> R | None:
        """Return the rank that had the block of this key last."""
        return self._rank_of.get(key)

    def note(self, keys: Sequence[bytes], rank: R) -> None:
        """Note that a prompt goes to ``rank``."""
        for key in reversed(keys):  # the beginning counts as used last, and is forgotten last
            self._rank_of[key] = rank
            self._rank_of.move_to_end(key)
        while len(self._rank_of) > MAX_KEYS:
            self._rank_of.popitem(last=False)

    def forget(self, ranks: Collection[R]) -> None:
        """Forget what ``ranks`` had, since they may have lost their caches."""
        gone = frozenset(ranks)
        for key in [key for key, rank in self._rank_of.items() if rank in gone]:
            del self._rank_of[key]
