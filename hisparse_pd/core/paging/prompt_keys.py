"""Hashes of prompts: the one place that says which tokens of two prompts may share KV.

A chain of keys begins at a root; each key is a hash of the one before and of the block that it is of. So
equal keys mean equal tokens from the beginning, behind the same root. The root is of the request's isolation
key: prompts with different ones have no key in common, and so nothing that is found by keys is shared between
them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import msgspec

from hisparse_pd.protocol.messages import ROOT_BYTES, TOKEN_BYTES

KEY_BYTES: Final = ROOT_BYTES
"""Length of every key of the chain, which begins at a root."""

PageKey = bytes
"""Of one whole page: equal keys mean equal tokens up to its end, and the same isolation key."""


def root_of(cache_salt: str | None = None, extra_key: str | None = None) -> PageKey:
    """Of the isolation key of a request, which is both fields together; without one, everybody's."""
    fields = msgspec.msgpack.encode((cache_salt, extra_key))
    return hashlib.blake2b(fields, digest_size=KEY_BYTES, person=b"isolation key").digest()


NO_ISOLATION: Final = root_of()


def chain(last: PageKey, content: bytes | memoryview, block_bytes: int) -> list[PageKey]:
    """The keys of ``content``'s whole blocks, which come behind what ``last`` is the key of."""
    view, keys = memoryview(content), []
    for start in range(0, len(view) - block_bytes + 1, block_bytes):
        last = _key(last, view[start : start + block_bytes])
        keys.append(last)
    return keys


def page_keys(root: PageKey, prompt: bytes, page_size: int) -> list[PageKey]:
    """Of a packed prompt's whole pages; a partial last page has none."""
    return chain(root, prompt, page_size * TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The keys of a prompt's whole pages, and the packed tokens behind the last of them."""

    page_size: int
    root: PageKey
    keys: tuple[PageKey, ...]
    tail: bytes

    @classmethod
    def of(cls, root: PageKey, prompt: bytes, page_size: int) -> PromptKeys:
        """``prompt``: as of ``pack_token_ids``."""
        keys = page_keys(root, prompt, page_size)
        return cls(page_size, root, tuple(keys), prompt[len(keys) * page_size * TOKEN_BYTES :])

    def with_output(self, output: bytes) -> list[PageKey]:
        """The keys of the whole pages of the prompt and of ``output``, which is packed, too."""
        last = self.keys[-1] if self.keys else self.root
        return [*self.keys, *page_keys(last, self.tail + output, self.page_size)]


def _key(last: PageKey, block: bytes | memoryview) -> PageKey:
    hashed = hashlib.blake2b(last, digest_size=KEY_BYTES)
    hashed.update(block)
    return hashed.digest()
