"""``/status`` of a node: what its engines said last, as a document that a router shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from hisparse_pd.engine.messages import EngineStats
from hisparse_pd.serving.http.metrics import split_labels

Number = Annotated[float, Meta(ge=0)]


class RankLoad(Struct, frozen=True):
    """``numbers``: gauges and counters by their names in ``/metrics``, each by the value of its label, or "".

    Counters count from the node's start.
    """

    dp_rank: Annotated[int, Meta(ge=0)]
    numbers: dict[str, dict[str, Number]]


class NodeLoad(Struct, frozen=True):
    """``ranks``: those that have said something."""

    role: str
    ranks: tuple[RankLoad, ...]

    @classmethod
    def of(cls, role: str, stats: Mapping[int, EngineStats]) -> NodeLoad:
        """``stats``: by rank."""
        return cls(role, tuple(RankLoad(rank, _numbers(stats[rank])) for rank in sorted(stats)))


def _numbers(stats: EngineStats) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for labelled, value in (stats.gauges | stats.counters).items():
        name, labels = split_labels(labelled)
        found.setdefault(name, {})[",".join(labels.values())] = value
    return found
