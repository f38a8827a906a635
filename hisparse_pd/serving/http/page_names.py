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

from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PromptKeys, block_hash
from hisparse_pd.protocol.decoding import TypedDecoder

PAGES_HEADER: Final = b"x-hisparse-pd-pages"
"""Header of a router's request, with the value 1, and of the answer, with names; clients never get it."""
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


def encode_names(keys: PromptKeys, num_tokens: int, num_shared_tokens: int) -> bytes:
    """Return the header's value, empty if no page has a name.

    ``num_tokens``: the length of the prompt, of which the first ``num_shared_tokens`` may be shared. Named
    are the last page of these and the pages whose number is a power of two.
    """
    num_pages = num_shared_tokens // keys.page_size
    if keys.root != NO_ISOLATION or not num_pages:
        return b""
    counts = sorted({*(1 << power for power in range(num_pages.bit_length())), num_pages})
    names = tuple((count, block_hash(keys.keys[count - 1])) for count in counts)
    return msgspec.json.encode(PageNames(keys.page_size, num_tokens, names))


def decode_names(value: bytes) -> PageNames | None:
    """Return what a header says, None if it is malformed."""
    try:
        return _DECODER.decode(value)
    except msgspec.MsgspecError:
        return None
