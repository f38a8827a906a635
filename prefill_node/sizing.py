"""How large a prefill node's KV pool is: from settings, model and free GPU memory. Pure functions."""

from __future__ import annotations

from hisparse_pd.base.settings import PrefillSettings
from hisparse_pd.core.memory.device import DeviceMemory, PoolDemand
from hisparse_pd.core.model.spec import ModelSpec

BASE_RESERVE_BYTES = 1 << 30
"""For activations: workspaces of libraries, weights that are unpacked."""
TOKEN_RESERVE_BYTES = 512 << 10
"""For activations of one token of a chunk: queries of 128 heads of 576 numbers, twice, and what is less."""
GRAPH_TOKENS = (1024, 256, 64, 16)
"""Of the forwards that are captured, which keep the activations of the first of them."""
MAX_INDEXER_BYTES = 1 << 30
"""For the scores of the indexer, which come in blocks of queries where they would be more."""


def size_kv_pool(settings: PrefillSettings, spec: ModelSpec, memory: DeviceMemory | None) -> int:
    """Tokens of the KV pool, as of ``PoolDemand.num_tokens``. Raises StartError."""
    demand = device_demand(settings, spec)
    asked, fraction = settings.kv_pool_tokens, settings.mem_fraction_static
    return demand.num_tokens(asked, memory, fraction, settings.page_size)


def device_demand(settings: PrefillSettings, spec: ModelSpec) -> PoolDemand:
    """What the node takes of the GPU beside the weights, by the number of tokens in the KV pool."""
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
    """For what the forward of one chunk computes with: a fixed part, its tokens and those of the largest
    graph, indexer scores. Prompts' scores are computed when the layers' activations are gone."""
    num_tokens = settings.chunked_prefill_size
    return (
        BASE_RESERVE_BYTES
        + (num_tokens + min(num_tokens, GRAPH_TOKENS[0])) * TOKEN_RESERVE_BYTES
        + min(MAX_INDEXER_BYTES, 2 * 4 * num_tokens * spec.context_length)
    )
