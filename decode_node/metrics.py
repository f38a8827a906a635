"""Owns a decode engine's counters, and joins them with the present gauges into EngineStats for the front.

``EndMoves``, ``PlanMoves``, ``PrefillEvents`` and ``StepLine`` count as things happen; the engine calls
``stats`` for each of its reports.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import TOKEN_POOLS, Stage
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.miss_cost import CHEAP, MissCost
from hisparse_pd.decode_node.request import RESIDENT_POOLS
from hisparse_pd.decode_node.request_states import RequestState, RunStage
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.engine.messages import CachedTokens, EngineStats, PeerLane


class Metrics:
    """Counts monotone totals since the start, by metric name; labels are part of the name. Each is there from
    the start, as 0."""

    def __init__(self) -> None:
        self.totals: defaultdict[str, float] = defaultdict(float)
        for mode in Mode:
            self.add("requests_total", 0, mode=mode)
            self.add("generation_tokens_total", 0, mode=mode)
        for tier in CachedTokens().by_tier():
            self.add("cached_tier_tokens_total", 0, tier=tier)
        for name in (
            *("retractions", "kv_transfer_bytes", "kv_transfer_seconds", "kv_transfer_failures"),
            *("prompt_tokens", "cached_tokens", "held_tokens", "held_hits"),
            *("verifying_steps", "drafted_tokens", "accepted_draft_tokens"),
            *("aborted_requests", "failed_requests"),
        ):
            self.add(f"{name}_total", 0)
        self.num_dropped: Counter[str] = Counter()
        """Control messages that had no use here, by reason; the engine's loop adds them to the counters."""
        self._last_num_verifying, self._last_num_accepted = 0.0, 0.0
        """Totals of verifying steps and of accepted drafts at the last ``stats``."""
        self._num_tokens = 0
        self._last_num_tokens = 0
        """Value of ``_num_tokens`` at the last ``stats``."""
        self._last_at: float | None = None

    def add(self, name: str, value: float = 1, **labels: str) -> None:
        self.totals[_labelled(name, labels)] += value

    def generated(self, mode: Mode, num_tokens: int) -> None:
        """Count output tokens of a request in ``mode``; they may be sent later."""
        self._num_tokens += num_tokens
        self.add("generation_tokens_total", num_tokens, mode=mode)

    def drafted(self, num_drafts: int) -> None:
        """Count a request's step that verified drafts, at least one."""
        self.add("verifying_steps_total")
        self.add("drafted_tokens_total", num_drafts)

    def drop(self, reason: str) -> None:
        """Count a control message that had no use here."""
        self.num_dropped[reason] += 1

    def stats(
        self,
        requests: LiveRequests,
        *,
        swap_ins: SwapCounts,
        bytes_per_miss: float,
        num_peers: int,
        lanes: tuple[PeerLane, ...] = (),
        step: int,
        now: float,
        host_link_rate: float = 0.0,
        miss_cost: MissCost = CHEAP,
        hot_capacity: int = 1,
    ) -> EngineStats:
        """Return the counters and the present gauges. The other arguments are gauges of parts that this class
        does not know; ``swap_ins`` counts since the start. ``hot_capacity``: entries of the hot buffer whose
        misses' seconds are shown."""
        pools = requests.pools
        used = pools.totals - requests.available
        quarantined = pools.used(Stage.QUARANTINED)

        all_running = requests.select(RequestState.RUNNING)
        running = Counter(request.mode for request in all_running)
        # SITS_OUT assumes that all drafts in flight are accepted. A request that has some may have slots
        # enough once they are read: it does not count as paused.
        num_paused = sum(
            request.run_stage is RunStage.SITS_OUT and not request.num_drafts_in_flight
            for request in all_running
        )
        queued = requests.num_queued()
        num_running, num_queued = running.total(), queued.total()
        num_landing = len(requests.select(RequestState.LANDING, RequestState.FETCHING))

        gauges = {
            "num_running_reqs": num_running,
            "num_resident_reqs": sum(request.is_resident for request in all_running),
            "resident_shared_tokens": requests.held.num_tokens_in(RESIDENT_POOLS),
            "num_paused_reqs": num_paused,
            "num_queue_reqs": num_queued,
            "num_transfer_queue_reqs": num_landing,
            "token_usage": max(used[kind] / pools.totals[kind] for kind in TOKEN_POOLS),
            "quarantined_tokens": quarantined.host + quarantined.device,
            "stuck_rooms": len(requests.quarantine.stuck(now)),
            "aux_slots_used": used.aux,
            "aux_slots_total": pools.totals.aux,
            "num_registered_peers": num_peers,
            "gen_throughput": self._throughput(now),
            "spec_accept_length": self._accept_length(),
            "host_link_bytes_per_second": host_link_rate,
            "step_seconds_per_req": miss_cost.request_secs if math.isfinite(miss_cost.request_secs) else 0,
            "miss_seconds_per_req": miss_cost.secs_of(hot_capacity),
            # A request that waits has no mode yet, only what it asked for.
            **{_labelled("running_reqs", {"mode": mode}): running[mode] for mode in Mode},
            **{_labelled("queue_reqs", {"hisparse": flag}): queued[flag] for flag in HisparseFlag},
            **_pool_gauges(requests),
        }
        return EngineStats(
            gauges={name: float(value) for name, value in gauges.items()},
            counters=self._counters(requests, swap_ins, bytes_per_miss),
            num_running=num_running,
            num_waiting=num_queued + num_landing,
            num_used_tokens=used.host + used.device,
            step=step,
            trouble=requests.trouble(now),
            quarantine=requests.quarantine.runs(requests.pools, now),
            lanes=lanes,
            num_without_grammar=sum(request.run_stage is RunStage.AWAITS_GRAMMAR for request in all_running),
        )

    def _counters(
        self, requests: LiveRequests, swap_ins: SwapCounts, bytes_per_miss: float
    ) -> dict[str, float]:
        """Return the totals that were counted here, and those that other parts count."""
        counters = dict(self.totals)
        for name, total in swap_ins._asdict().items():
            counters[f"swap_in_{name}_total"] = float(total)
        counters["held_evicted_tokens_total"] = float(requests.held.num_evicted_tokens)
        counters["held_moved_down_tokens_total"] = float(requests.held.num_moved_down_tokens)
        num_fetched = requests.held_tier.num_fetched_tokens + requests.dense_tier.num_fetched_tokens
        counters["held_fetched_tokens_total"] = float(num_fetched)
        counters["held_stored_dense_tokens_total"] = float(requests.dense_tier.num_stored_tokens)
        counters["swap_in_bytes_total"] = swap_ins.misses * bytes_per_miss
        return counters

    def _throughput(self, now: float) -> float:
        """Return output tokens a second since the last call."""
        secs = now - self._last_at if self._last_at is not None else 0.0
        num_tokens = self._num_tokens - self._last_num_tokens
        self._last_at, self._last_num_tokens = now, self._num_tokens
        return num_tokens / secs if secs > 0 else 0.0

    def _accept_length(self) -> float:
        """Return the average tokens of a request's verifying step since the last call; 0 without one."""
        verifying = self.totals["verifying_steps_total"]
        accepted = self.totals["accepted_draft_tokens_total"]
        num_steps, num_accepted = verifying - self._last_num_verifying, accepted - self._last_num_accepted
        self._last_num_verifying, self._last_num_accepted = verifying, accepted
        return 1 + num_accepted / num_steps if num_steps else 0.0


def _pool_gauges(requests: LiveRequests) -> dict[str, float]:
    gauges: dict[str, float] = {}
    totals, available, held = requests.pools.totals, requests.available, requests.held.unused
    for kind in TOKEN_POOLS:  # a slot is used, held without a user, or free; ``available`` has the last two
        gauges[_labelled("pool_used_tokens", {"pool": kind})] = totals[kind] - available[kind]
        gauges[_labelled("pool_held_tokens", {"pool": kind})] = held[kind]
        gauges[_labelled("pool_total_tokens", {"pool": kind})] = totals[kind]
    return gauges


def _labelled(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inside}}}" if inside else name
