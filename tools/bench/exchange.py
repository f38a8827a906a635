"""Measures the exchange of one layer of experts between ranks, by number of tokens and by transport.

``tools.bench.whole_node`` calls ``measure_collectives`` on all ranks at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hisparse_pd.core.model.rank_exchange import sum_in_order
from hisparse_pd.core.model.rank_group import RankGroup
from tools.bench.facts import spread
from tools.bench.gpu_timing import graph_us

LAYERS = 20
"""Number of exchanges that are timed together."""
TOP_K = 8
"""Experts, and weights, that are sent with a token, 4 bytes each."""


def measure_collectives(
    ranks: RankGroup, device: torch.device, hidden_size: int, by_tokens: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield, for each number of tokens a rank in ``by_tokens``, the us of a layer's exchange: every rank's
    rows to all, the sums back, and both.

    Each number is measured by NCCL (gloo on a CPU) and, where there is one, by the ranks' own exchange, also
    for gathers so large that a node would leave them to NCCL.
    The last timed exchange is checked on all ranks: rows must arrive unchanged, and sums must have the bits
    of a sum in the order of ranks.
    """
    own = ranks.exchange
    # What ``ranks.exchange`` is set to, by way. None: torch.distributed exchanges.
    ways = {"nccl" if device.type == "cuda" else "gloo": None, **({} if own is None else {"memory": own})}
    max_gather_bytes = 0 if own is None else own.max_gather_bytes  # lifted here, and restored at the end
    try:
        for num_tokens in by_tokens:
            for way, exchange in ways.items():
                ranks.exchange = exchange
                if exchange is not None:
                    exchange.max_gather_bytes = 1 << 62
                found = _measured(ranks, device, hidden_size, num_tokens)
                yield {"tokens_a_rank": num_tokens, "way": way, **found}
    finally:
        ranks.exchange = own
        if own is not None:
            own.max_gather_bytes = max_gather_bytes


def _measured(ranks: RankGroup, device: torch.device, hidden_size: int, num_tokens: int) -> dict[str, Any]:
    """Time the exchange that ``ranks`` has now, and check its last results. All ranks make the same call."""
    packed_bytes = 8 * TOP_K + 2 * hidden_size  # a token's experts and weights, and its bfloat16 state

    def packed_of(rank: int) -> Tensor:
        drawn = torch.Generator(device).manual_seed(rank)
        shape = (num_tokens, packed_bytes)
        return torch.randint(0, 256, shape, generator=drawn, dtype=torch.uint8, device=device)

    def added_of(rank: int) -> Tensor:
        drawn = torch.Generator(device).manual_seed(100 + rank)
        shape = (ranks.size * num_tokens, hidden_size)
        return torch.randn(shape, generator=drawn, device=device).bfloat16()

    packed, added = packed_of(ranks.rank), added_of(ranks.rank)
    kept: dict[str, Tensor] = {}

    def gather() -> None:
        kept["gathered"] = ranks.gather(packed)

    def sum_own() -> None:
        kept["summed"] = ranks.sum_own(added)

    def both() -> None:
        gather()
        sum_own()

    us: dict[str, Any] = {}
    for name, call in (("gather_us", gather), ("sum_us", sum_own), ("gather_and_sum_us", both)):
        calls = [call] * LAYERS
        if device.type == "cuda":
            # All ranks begin behind an exchange, so that none waits for another within the measured time.
            us[name] = graph_us(calls, before=lambda: ranks.gather(packed[:1]))
        else:
            us[name] = host_us(calls)
    mine = slice(ranks.rank * num_tokens, (ranks.rank + 1) * num_tokens)
    parts = [added_of(rank)[mine] for rank in range(ranks.size)]
    of_all = torch.cat([packed_of(rank) for rank in range(ranks.size)])
    right = (torch.equal(kept["gathered"], of_all), torch.equal(kept["summed"], sum_in_order(parts)))
    on_all = ranks.agree(*map(int, right))
    return {
        **us,
        "rows_arrive": all(row for row, _ in on_all),
        "sums_in_order": all(bits for _, bits in on_all),
    }


def host_us(calls: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """Return the us of each of ``calls`` by the host's clock."""
    found = []
    for call in calls:
        started = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - started))
    return spread(found)
