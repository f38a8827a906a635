"""Computes how many tokens a prefill node's KV pool has, from settings, model and free GPU memory.

The engine calls ``size_kv_pool`` at its start, once the weights are loaded. What they and the reserve for a
forward leave of the GPU becomes the pool. Here are also the sizes of the CUDA graphs of short forwards, which
``short_forwards.py`` captures: the reserve has room for the largest.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.core.memory.device import DeviceMemory, PoolDemand
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.model.unpacked import unpacked_bytes

BASE_RESERVE_BYTES = 1 << 30
"""Bytes reserved for libraries' workspaces and for unpacked weights."""
TOKEN_RESERVE_BYTES = 512 << 10
"""Bytes reserved for one token's activations: the queries (128 heads of 576 numbers of 2 bytes) twice, and
smaller ones."""


class GraphSize(NamedTuple):
    """What a forward that is captured as a CUDA graph has room for."""

    num_tokens: int
    num_stepped: int
    """Stepped tokens among them: those from a prompt's ``first_stepped`` on, whose KV is rounded as in decode
    steps, because the decode node may compute it as well (``protocol.messages.first_stepped``)."""

    @property
    def is_all_stepped(self) -> bool:
        """Whether it takes nothing but stepped tokens."""
        return self.num_stepped == self.num_tokens

    def takes(self, num_tokens: int, num_stepped: int) -> bool:
        """Return whether it has room for so many tokens. A graph with tokens of both kinds attends to at
        least one as in steps: if none is stepped, to one of padding."""
        if self.is_all_stepped:
            return num_stepped == num_tokens <= self.num_tokens
        return num_stepped <= self.num_stepped and num_tokens + (num_stepped == 0) <= self.num_tokens


GRAPH_SIZES: Final = (
    GraphSize(1024, 240),
    GraphSize(1024, 15),
    GraphSize(512, 120),
    GraphSize(256, 60),
    GraphSize(256, 15),
    GraphSize(128, 30),
    GraphSize(64, 15),
    GraphSize(16, 15),
    GraphSize(16, 16),
)
"""The graphs, largest first. A prompt's tail behind cached pages of 64 tokens has up to 63 tokens, of which
up to 15 are stepped: 240 stepped tokens are those of 16 such tails, 120 those of 8, and 15 those of one. A
graph takes as long for padding as for tokens, so there is one for each power of two but 32, and for some a
second one with room for fewer stepped tokens. Graphs share memory, so that together they keep the activations
of the largest."""
ONE_CONTEXT_TOKENS: Final = 64
"""Graphs of up to this many tokens have room for the pages of one context only, because a graph looks at all
pages that it may unpack, even at padding. Most forwards of this size are one prompt's tail."""
MOST_GRAPH_TOKENS: Final = GRAPH_SIZES[0].num_tokens
"""Most tokens in a graph's forward."""
MOST_GRAPH_REQUESTS: Final = 16
"""Most requests in a graph's forward."""

MAX_INDEXER_BYTES = 1 << 30
"""Most bytes of indexer scores; scores that would take more are computed in blocks of queries."""


def size_kv_pool(settings: PrefillSettings, spec: ModelSpec, memory: DeviceMemory | None) -> int:
    """Return the tokens of the KV pool; see ``PoolDemand.num_tokens``. Raises StartError."""
    demand = device_demand(settings, spec)
    return demand.num_tokens(
        settings.kv_pool_tokens, memory, settings.mem_fraction_static, settings.page_size
    )


def device_demand(settings: PrefillSettings, spec: ModelSpec) -> PoolDemand:
    """Return the GPU memory that the node needs beside the weights, by the tokens of the KV pool."""
    return PoolDemand(
        option="--kv-pool-tokens",
        fixed={"reserve for activations": reserve_bytes(settings, spec)},
        bytes_per_token=spec.num_kv_layers * spec.item_bytes
        + spec.num_index_groups * spec.index_item_bytes
        + spec.row_check_bytes,
        page_size=settings.page_size,
        remedy="lower --chunked-prefill-size (reserve), or free GPU memory",
    )


def reserve_bytes(settings: PrefillSettings, spec: ModelSpec) -> int:
    """Return the bytes reserved for one chunk's forward: a fixed part, activations of its tokens and of the
    largest graph, twice the indexer's scores, and the memory for unpacked KV where it is fp8. Prompt scores
    need no more: they come after the layers' activations are freed."""
    num_tokens = settings.chunked_prefill_size
    score_bytes = 4 * num_tokens * spec.context_length
    return (
        BASE_RESERVE_BYTES
        + (num_tokens + min(num_tokens, MOST_GRAPH_TOKENS)) * TOKEN_RESERVE_BYTES
        + min(MAX_INDEXER_BYTES, 2 * score_bytes)
        + unpacked_bytes(spec, settings.page_size)
    )
