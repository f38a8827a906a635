"""Main memory below the prefix cache: pages of KV, indexer keys and row checks. ``host_tier.py`` decides what
is copied. Copies up bring layer after layer, so that a forward may begin meanwhile."""

from __future__ import annotations

from torch import Tensor

from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.core.model.layer_arrivals import LayerArrivals
from hisparse_pd.engine.host_copies import HostCopies
from hisparse_pd.prefill_node.memory import PrefillMemory


class HostPages(HostCopies):
    """``num_slots`` token slots in main memory for what ``memory`` has of each token. ``arrivals``: the
    stream of copies up, and what they record."""

    def __init__(
        self,
        memory: PrefillMemory,
        num_slots: int,
        arrivals: LayerArrivals | None = None,
        *,
        placement: Placement = ANYWHERE,
    ) -> None:
        super().__init__(memory.sent, num_slots, name="host cache", placement=placement, arrivals=arrivals)
        self.num_slots = num_slots

    @property
    def kv(self) -> Tensor:
        """Items of KV, uint8 [num_kv_layers, num_slots, item_bytes]."""
        return self.tensors[0]

    @property
    def index(self) -> Tensor:
        """Indexer keys, uint8 [num_index_groups, num_slots, index_item_bytes]."""
        return self.tensors[1]

    @property
    def row_checks(self) -> Tensor | None:
        """The items' checks, int32 [num_kv_layers, num_slots], or None if the node computes none."""
        return self.tensors[2] if len(self.tensors) > 2 else None
