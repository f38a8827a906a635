"""``/status`` of a node: what its engines have to do and have done, as a document that a router shows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from hisparse_pd.engine.messages import EngineStats
from hisparse_pd.http.metrics import split_labels

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class PoolUse(Struct, frozen=True):
    """Token slots."""

    used: Count
    total: Count


class SwapIns(Struct, frozen=True):
    """Totals since the node's start; ``num_bytes`` were read from the host pool."""

    hits: Count
    misses: Count
    num_bytes: Count


class Drafts(Struct, frozen=True):
    """Totals since the node's start. ``steps``: of requests, each with one draft to verify at least."""

    steps: Count
    verified: Count
    accepted: Count


class Transfers(Struct, frozen=True):
    """KV transfers since the node's start."""

    num_bytes: Count
    secs: float
    failures: Count


class RankLoad(Struct, frozen=True):
    """One rank of a node that has several."""

    rank: Count
    running: Count
    queued: Count
    pools: dict[str, PoolUse]


class NodeLoad(Struct, frozen=True):
    """Sums over the node's ranks, which are listed when there are several.

    Totals are since its start; ``swap_ins`` and ``drafts`` are None for a prefill node.
    """

    running: Count
    queued: Count
    transferring: Count
    running_by_mode: dict[str, Count]
    requests_by_mode: dict[str, Count]
    pools: dict[str, PoolUse]
    prompt_tokens: Count
    cached_tokens: Count
    generated_tokens: Count
    transfers: Transfers
    swap_ins: SwapIns | None
    drafts: Drafts | None
    ranks: tuple[RankLoad, ...] = ()
    wrong_rows: Count = 0
    """Of KV, that were not what was written, since its start."""

    @classmethod
    def of(cls, role: str, num_ranks: int, stats: Mapping[int, EngineStats]) -> NodeLoad:
        """``stats``: what each rank of ``num_ranks`` has said last, of those that have said something."""
        node = _Sums(stats.values())
        ranks = {rank: _Sums([stats[rank]]) for rank in sorted(stats)} if num_ranks > 1 else {}
        swap_ins, drafts = None, None
        if role == "decode":
            swap_ins = SwapIns(*(node[f"swap_in_{what}_total"] for what in ("hits", "misses", "bytes")))
            drafts = Drafts(
                node["verifying_steps_total"],
                node["drafted_tokens_total"],
                node["accepted_draft_tokens_total"],
            )
        return cls(
            running=node["num_running_reqs"],
            queued=node["num_queue_reqs"],
            transferring=node["num_transfer_queue_reqs"],
            running_by_mode=node.by_label("running_reqs"),
            requests_by_mode=node.by_label("requests_total"),
            pools=node.pools(),
            prompt_tokens=node["prompt_tokens_total"],
            cached_tokens=node["cached_tokens_total"],
            generated_tokens=sum(node.by_label("generation_tokens_total").values()),
            transfers=Transfers(
                node["kv_transfer_bytes_total"],
                node.exact("kv_transfer_seconds_total"),
                node["kv_transfer_failures_total"],
            ),
            swap_ins=swap_ins,
            drafts=drafts,
            wrong_rows=sum(node.by_label("kv_rows_corrupt_total").values()),
            ranks=tuple(
                RankLoad(number, rank["num_running_reqs"], rank["num_queue_reqs"], rank.pools())
                for number, rank in ranks.items()
            ),
        )


class _Sums:
    """Engines' gauges and counters, added up: by name, then by the value of their label."""

    def __init__(self, stats: Iterable[EngineStats]) -> None:
        self._by_name: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for of_rank in stats:
            for labelled, value in (*of_rank.gauges.items(), *of_rank.counters.items()):
                name, labels = split_labels(labelled)
                self._by_name[name][",".join(labels.values())] += value

    def __getitem__(self, name: str) -> int:
        return round(self.exact(name))

    def exact(self, name: str) -> float:
        return self._by_name[name][""]

    def by_label(self, name: str) -> dict[str, int]:
        return {value: round(number) for value, number in self._by_name[name].items()}

    def pools(self) -> dict[str, PoolUse]:
        used, totals = self.by_label("pool_used_tokens"), self.by_label("pool_total_tokens")
        return {pool: PoolUse(used.get(pool, 0), total) for pool, total in totals.items()}
