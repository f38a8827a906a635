"""Hashes of prompts: the one place that decides which tokens of two prompts may share KV.

A decode node's front computes the root for a request (``root_of``), and the keys of the prompt's pages. Its
engine gets both, because its steps would wait while it hashes. A prefill node's engine gets the root, and
computes the keys itself. Both engines look the keys up in their prefixes (``prefix_tree.py``).

A chain of keys begins at a root; each key is a hash of the key before it and of its own block of tokens,
which for an engine is a page, and in ``serving/http/prefixes.py`` a number of bytes. Equal keys therefore
mean equal tokens from the beginning and the same root. The root is a hash of the request's isolation key:
prompts with different isolation keys share nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import msgspec

from hisparse_pd.protocol.messages import ROOT_BYTES, TOKEN_BYTES

KEY_BYTES: Final = ROOT_BYTES
"""Length of a key; a root is the first key of its chain."""

PageKey = bytes
"""Hash of a whole page, all tokens before it and the isolation key; equal keys mean that all are equal."""


def block_hash(key: PageKey) -> int:
    """Return the hash by which KV events name a page: 63 bits of its key, which consumers read alike whether
    they take hashes for signed or for unsigned."""
    return int.from_bytes(key[:8], "big") >> 1


def root_of(cache_salt: str | None = None, extra_key: str | None = None) -> PageKey:
    """Return the root for an isolation key, which is both fields together; requests without one share a
    root."""
    fields = msgspec.msgpack.encode((cache_salt, extra_key))
    return hashlib.blake2b(fields, digest_size=KEY_BYTES, person=b"isolation key").digest()


NO_ISOLATION: Final = root_of()
"""The root of requests without an isolation key."""


def chain(last: PageKey, content: bytes | memoryview, block_bytes: int) -> list[PageKey]:
    """Return the keys of the whole blocks of ``content``, which continues the chain at ``last``."""
    content, keys = bytes(content), []
    for start in range(0, len(content) - block_bytes + 1, block_bytes):
        block = content[start : start + block_bytes]
        # SHA-256, for which servers' CPUs have instructions: BLAKE2 takes two to three times as long.
        last = hashlib.sha256(last + block).digest()[:KEY_BYTES]
        keys.append(last)
    return keys


def page_keys(root: PageKey, prompt: bytes, page_size: int) -> list[PageKey]:
    """Return the keys of a packed prompt's whole pages; a partial last page has none."""
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
        """Return the keys of ``prompt``, token ids as ``pack_token_ids`` packs them."""
        return cls.with_keys(root, tuple(page_keys(root, prompt, page_size)), prompt, page_size)

    @classmethod
    def with_keys(cls, root: PageKey, keys: tuple[PageKey, ...], prompt: bytes, page_size: int) -> PromptKeys:
        """Return what ``of`` returns, if ``keys`` are the keys of the prompt's pages."""
        num_in_pages = len(prompt) // (page_size * TOKEN_BYTES) * page_size * TOKEN_BYTES
        return cls(page_size, root, keys, prompt[num_in_pages:])

    def with_output(self, output: bytes) -> list[PageKey]:
        """Return the keys of the whole pages of the prompt and the packed ``output`` behind it."""
        last = self.keys[-1] if self.keys else self.root
        return [*self.keys, *page_keys(last, self.tail + output, self.page_size)]
