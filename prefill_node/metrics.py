"""Joins what the parts of a prefill engine count with the present gauges into EngineStats for the front."""

from __future__ import annotations

from hisparse_pd.core.paging.pools import Stage
from hisparse_pd.engine.messages import EngineStats, PeerLane
from hisparse_pd.prefill_node.request_life import PrefillLife
from hisparse_pd.prefill_node.requests import PrefillState
from hisparse_pd.prefill_node.scheduler import StepLimits


def engine_stats(
    life: PrefillLife, limits: StepLimits, *, num_peers: int, lanes: tuple[PeerLane, ...], step: int
) -> EngineStats:
    """Return the present figures of an engine. ``step``: counts on while the engine has work."""
    pages, requests = life.pages, life.requests
    num_running = requests.count(PrefillState.COMPUTING)
    num_sending = requests.count(PrefillState.SENDING, PrefillState.DRAINING)
    num_waiting = requests.count(PrefillState.QUEUED)
    num_total_tokens = limits.num_pages * limits.page_size
    num_used_tokens = num_total_tokens - pages.num_available_pages * limits.page_size
    num_prompt_tokens = max(life.counters["prompt_tokens_total"], 1.0)
    gauges = {
        "num_running_reqs": float(num_running),
        "num_queue_reqs": float(num_waiting),
        "num_transfer_queue_reqs": float(num_sending),
        "token_usage": num_used_tokens / num_total_tokens,
        'pool_used_tokens{pool="kv"}': float(num_used_tokens),
        'pool_total_tokens{pool="kv"}': float(num_total_tokens),
        "cache_hit_rate": life.counters["cached_tokens_total"] / num_prompt_tokens,
        "num_registered_peers": float(num_peers),
    }
    counters = life.counters | pages.decode_tier.counters
    if num_host_tokens := pages.pools.totals.host:
        num_available = (pages.pools.free + pages.prefixes.unused).host
        gauges['pool_used_tokens{pool="host"}'] = float(num_host_tokens - num_available)
        gauges['pool_held_tokens{pool="host"}'] = float(pages.pools.used(Stage.HELD).host)
        gauges['pool_total_tokens{pool="host"}'] = float(num_host_tokens)
        counters["host_stored_tokens_total"] = float(pages.tier.num_stored_tokens)
        counters["host_fetched_tokens_total"] = float(pages.tier.num_fetched_tokens)
    if (store := pages.tier.store_tier) is not None:
        gauges |= store.gauges
        counters |= store.counters
    return EngineStats(
        gauges,
        counters,
        num_running=num_running + num_sending,
        num_waiting=num_waiting,
        num_used_tokens=num_used_tokens,
        step=step,
        lanes=lanes,
    )
