"""Computes how large a prefill node's host cache and KV pool are, from settings, model and free memory.

The engine calls ``size_host_cache`` before the model is loaded, and ``size_kv_pool`` afterwards. The KV pool
gets what the weights and the reserve for a forward leave of the GPU's memory. The sizes of the CUDA graphs of
short forwards, which ``short_forwards.py`` captures, are here because the reserve has room for the largest.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from hisparse_pd.base.prefill_settings import PrefillSettings
from hisparse_pd.base.vocabulary import StartError
from hisparse_pd.core.memory.device import DeviceMemory, PoolDemand
from hisparse_pd.core.memory.free import free_memory
from hisparse_pd.core.memory.machine import Machine, show_bytes
from hisparse_pd.core.memory.numa import Placement, read_nodes
from hisparse_pd.core.model.spec import ModelSpec
from hisparse_pd.core.model.unpacked import unpacked_bytes

log = logging.getLogger(__name__)

HOST_RESERVE_SHARE: Final = 0.1
"""Share of free main memory that an automatic host cache leaves to everything that is not a pool: the
processes of the nodes, page tables, and file pages of the checkpoint."""

BASE_RESERVE_BYTES = 1 << 30
"""Bytes reserved for libraries' workspaces and for unpacked weights."""
TOKEN_RESERVE_BYTES = 512 << 10
"""Bytes reserved for one token's activations: the queries (128 heads of 576 numbers of 2 bytes) twice, and
smaller ones."""


class GraphSize(NamedTuple):
    """The room of a forward that is captured as a CUDA graph."""

    num_tokens: int
    num_stepped: int
    """Stepped tokens among them: those from a prompt's ``first_stepped`` on, whose KV is rounded as in decode
    steps, because the decode node may compute it as well (``protocol.messages.first_stepped``)."""

    @property
    def is_all_stepped(self) -> bool:
        """Whether it takes nothing but stepped tokens."""
        return self.num_stepped == self.num_tokens

    def takes(self, num_tokens: int, num_stepped: int) -> bool:
        """Return whether the graph has room for so many tokens. A graph for tokens of both kinds computes at
        least one stepped token: if there is none, one of padding."""
        if self.is_all_stepped:
            return num_stepped == num_tokens <= self.num_tokens
        return num_stepped <= self.num_stepped and num_tokens + (num_stepped == 0) <= self.num_tokens


GRAPH_SIZES: Final = (
    GraphSize(1024, 240),
    GraphSize(1024, 15),
    GraphSize(768, 15),
    GraphSize(512, 120),
    GraphSize(384, 15),
    GraphSize(256, 60),
    GraphSize(256, 15),
    GraphSize(128, 30),
    GraphSize(64, 15),
    GraphSize(16, 15),
    GraphSize(16, 16),
)
"""The graphs, largest first. Behind cached pages of 64 tokens, a prompt's tail has up to 63 tokens, of which
up to 15 are stepped: 240 stepped tokens are those of 16 such tails, 120 those of 8, and 15 those of one. A
graph takes as long for padding as for tokens. So there is one for each power of two but 32, two between these
for the turns of conversations, and for some a second one with room for fewer stepped tokens. Graphs share
memory: together they take what the activations of the largest take."""
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
        bytes_per_token=bytes_per_token(spec),
        page_size=settings.page_size,
        remedy="lower --chunked-prefill-size (reserve), or free GPU memory",
    )


def bytes_per_token(spec: ModelSpec) -> int:
    """Return the bytes of one token's KV, indexer keys and row checks, in all layers."""
    kv_bytes = spec.num_kv_layers * spec.item_bytes
    return kv_bytes + spec.num_index_groups * spec.index_item_bytes + spec.row_check_bytes


def host_cache_bytes(settings: PrefillSettings, spec: ModelSpec) -> int:
    """Return the bytes of a rank's host cache."""
    return settings.num_host_cache_tokens // settings.page_size * settings.page_size * bytes_per_token(spec)


def size_host_cache(
    settings: PrefillSettings, spec: ModelSpec, num_other_bytes: int, placement: Placement, machine: Machine
) -> int:
    """Return the tokens of a rank's host cache that ``--host-cache-tokens auto`` stands for, in whole pages.

    The ranks of this machine share what is free in it and in its control groups, and the ranks of a NUMA node
    what is free there. The pools of neighbours (other nodes on this machine) get room in both, because all of
    them may come to lie on one NUMA node. ``num_other_bytes``: what each rank registers beside its host
    cache. Raises StartError where not even a page has room.
    """
    shares: dict[str, tuple[int, int]] = {}  # free bytes, and the ranks that share them, by their place
    if (free := free_memory(machine)) is not None:
        shares[free.where] = free.num_bytes, len(settings.ranks_here)
    node = read_nodes(machine).get(placement.node) if placement.node is not None else None
    if node is not None and node.total_bytes:
        shares[f"NUMA node {node.number}"] = node.free_bytes, placement.num_ranks
    if not shares:
        raise StartError(
            f"--host-cache-tokens auto: {machine.proc / 'meminfo'} does not tell how much main memory is "
            "free; give a number of tokens"
        )
    neighbour_bytes = settings.neighbour_host_tokens * bytes_per_token(spec)
    budget, where = min(
        ((int(num_bytes * (1 - HOST_RESERVE_SHARE)) - neighbour_bytes) // num_ranks - num_other_bytes, place)
        for place, (num_bytes, num_ranks) in shares.items()
    )
    num_free_bytes, num_ranks = shares[where]
    arithmetic = (
        f"{show_bytes(num_free_bytes)} free in {where} (ranks that share it: {num_ranks}), less "
        f"{HOST_RESERVE_SHARE:.0%} for processes, {show_bytes(neighbour_bytes)} of decode nodes here, and "
        f"{show_bytes(num_other_bytes)} of each rank's other pools"
    )
    num_tokens = budget // (bytes_per_token(spec) * settings.page_size) * settings.page_size
    if num_tokens <= 0:
        raise StartError(
            f"--host-cache-tokens auto: no page has room: {arithmetic}; lower --host-pool-tokens of the "
            "decode node, or give --host-cache-tokens 0"
        )
    log.info("--host-cache-tokens auto: %d tokens: %s", num_tokens, arithmetic)
    return num_tokens


def reserve_bytes(settings: PrefillSettings, spec: ModelSpec) -> int:
    """Return the bytes reserved for one chunk's forward: a fixed part, activations of its tokens and of the
    largest graph, the indexer's scores twice, and unpacked KV where the pool has fp8. Prompt scores need no
    more, because they are computed after the layers' activations are freed."""
    num_tokens = settings.chunked_prefill_size
    score_bytes = 4 * num_tokens * spec.context_length
    return (
        BASE_RESERVE_BYTES
        + (num_tokens + min(num_tokens, MOST_GRAPH_TOKENS)) * TOKEN_RESERVE_BYTES
        + min(MAX_INDEXER_BYTES, 2 * score_bytes)
        + unpacked_bytes(spec, settings.page_size)
    )
