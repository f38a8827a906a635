"""``/status`` of a node: the engines' latest numbers, as a document that the router shows.

``serving/api/node_app.py`` answers with a ``NodeLoad``, and the router decodes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from hisparse_pd.engine.messages import EngineStats
from hisparse_pd.serving.http.metrics import split_labels

Number = Annotated[float, Meta(ge=0)]


class RankLoad(Struct, frozen=True):
    """Gauges and counters of one rank. Counters count from the node's start."""

    dp_rank: Annotated[int, Meta(ge=0)]
    numbers: dict[str, dict[str, Number]]
    """Values by metric's name without its prefix, and then by the value of its label, "" without one."""


class NodeLoad(Struct, frozen=True):
    """The numbers of a node."""

    role: str
    ranks: tuple[RankLoad, ...]
    """Ranks whose engines have reported."""

    @classmethod
    def of(cls, role: str, stats: Mapping[int, EngineStats]) -> NodeLoad:
        """Make the document from the latest stats by rank."""
        return cls(role, tuple(RankLoad(rank, _numbers(stats[rank])) for rank in sorted(stats)))


def _numbers(stats: EngineStats) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for labelled, value in (stats.gauges | stats.counters).items():
        name, labels = split_labels(labelled)
        found.setdefault(name, {})[",".join(labels.values())] = value
    return found
