"""Names of a prompt's pages: what a decode node tells a router, which has no tokens, about the prompt's KV.

A name is the hash by which KV events name a page (``protocol/kv_events.py``). The decode node's front puts
some of them into a header of its answer, if the router has asked for them by the same header; the router
looks up which nodes have these pages (``router/known_pages.py``). Prompts with an isolation key have no
names, because their pages are not in the events.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, block_hash, page_keys
from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.protocol.messages import TOKEN_BYTES

PAGES_HEADER: Final = b"x-hisparse-pd-pages"
"""Header of a router's request, with the value 1, and of the answer, with names; clients never get it."""
MAX_NAMED_TOKENS: Final = 65_536
"""Tokens from a prompt's beginning whose pages are hashed for names: 1.2 ms."""

_Count = Annotated[int, Meta(ge=1, lt=1 << 32)]


class PageNames(Struct, frozen=True, array_like=True):
    """Names of the pages of one prompt."""

    page_size: _Count
    num_tokens: _Count
    """Length of the prompt."""
    names: Annotated[tuple[tuple[_Count, int], ...], Meta(max_length=64)]
    """A number of pages from the prompt's beginning, and the hash of the last of them; in rising order."""

    def after(self, num_tokens: float) -> int | None:
        """Return the last name within the first ``num_tokens`` tokens; None if there is none."""
        within = [name for num_pages, name in self.names if num_pages * self.page_size <= num_tokens]
        return within[-1] if within else None


_DECODER: TypedDecoder[PageNames] = TypedDecoder.json(PageNames)


def encode_names(prompt: bytes, root: PageKey, num_shared_tokens: int, page_size: int) -> bytes:
    """Return the header's value, empty if no page has a name.

    ``prompt``: packed token ids, of which the first ``num_shared_tokens`` may be shared. Named are the last
    page of these and the pages whose number is a power of two.
    """
    if root != NO_ISOLATION:
        return b""
    num_bytes = min(num_shared_tokens, MAX_NAMED_TOKENS) // page_size * page_size * TOKEN_BYTES
    keys = page_keys(root, prompt[:num_bytes], page_size)
    counts = sorted({*(1 << power for power in range(len(keys).bit_length())), len(keys)} - {0})
    if not keys:
        return b""
    names = tuple((count, block_hash(keys[count - 1])) for count in counts)
    return msgspec.json.encode(PageNames(page_size, len(prompt) // TOKEN_BYTES, names))


def decode_names(value: bytes) -> PageNames | None:
    """Return what a header says, None if it is malformed."""
    try:
        return _DECODER.decode(value)
    except msgspec.MsgspecError:
        return None
