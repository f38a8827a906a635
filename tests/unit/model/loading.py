"""Models as each rank loads them, and their experts put together again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hisparse_pd.core.model import loader
from hisparse_pd.core.model.experts import RoutedExperts
from hisparse_pd.core.model.spec import ModelSpec
from tests.unit.model.rank_stand_in import RankStandIn

CPU = torch.device("cpu")


def load_ours(path: Path, spec: ModelSpec, num_ranks: int, *, keeps_fp8: bool = False) -> list[Any]:
    """The modules of each rank; ``keeps_fp8``: as on a GPU."""
    ranks = [RankStandIn(rank, num_ranks) if num_ranks > 1 else None for rank in range(num_ranks)]
    return [loader.Loader(path, spec, CPU, rank, keeps_fp8=keeps_fp8).load() for rank in ranks]


def joined(shares: list[RoutedExperts]) -> RoutedExperts:
    """What one rank alone would have."""
    values = shares[0].down.values
    num_experts = sum(len(share.experts) for share in shares)
    hidden_size, inner_size = values.shape[2:]
    whole = RoutedExperts(num_experts, hidden_size, inner_size, values.dtype, CPU)
    assert [expert for share in shares for expert in share.experts] == list(whole.experts)
    for target, parts in (
        (whole.gate_up, [share.gate_up for share in shares]),
        (whole.down, [share.down for share in shares]),
    ):
        torch.cat([part.values for part in parts], out=target.values)
        assert all((part.scales is None) == (target.scales is None) for part in parts)
        if target.scales is not None:
            torch.cat([part.scales for part in parts if part.scales is not None], out=target.scales)
    return whole
