"""Main memory for the indexer keys and row checks of held prefixes, and the copies of held pages.

``KeyPages`` has a place for each page of the host pool. ``held_tier.py``, where ``PageCopies`` says what each
copy does, and ``dense_tier.py`` decide what is copied. The KV of held pages has its home in the host pool;
that of dense requests goes there and back with their keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse_pd.core.memory.numa import ANYWHERE, Placement
from hisparse_pd.decode_node.memory import DecodeMemory
from hisparse_pd.engine.host_copies import HostCopies, SlotCopy
from hisparse_pd.protocol.messages import Extent


class KeyPages:
    """A place in main memory for what ``memory`` has of each page in its index pool: as many places as the
    host pool has pages.

    ``placement``: the NUMA node of the memory. Raises HostMemoryError.
    """

    def __init__(self, memory: DecodeMemory, *, placement: Placement = ANYWHERE) -> None:
        pools = [memory.index] if memory.row_checks is None else [memory.index, memory.row_checks]
        num_slots = memory.k_host.shape[1]
        self._keys = HostCopies(pools, num_slots, name="keys of held prefixes", placement=placement)
        self._k_host, self._k_dev = memory.k_host, memory.k_dev

    def copy_down(
        self, index: Sequence[Extent], host: Sequence[Extent], device: Sequence[Extent] = ()
    ) -> torch.cuda.Event | None:
        """See ``PageCopies.copy_down``."""
        kv = [SlotCopy([(self._k_dev, self._k_host)], device, host)] if device else []
        return self._keys.copy_down(index, host, *kv)

    def copy_up(
        self, host: Sequence[Extent], index: Sequence[Extent], device: Sequence[Extent] = ()
    ) -> torch.cuda.Event | None:
        """See ``PageCopies.copy_up``."""
        kv = [SlotCopy([(self._k_host, self._k_dev)], host, device)] if device else []
        return self._keys.copy_up(host, index, *kv)

    def num_same(self, index: Sequence[Extent], host: Sequence[Extent]) -> int:
        """See ``PageCopies.num_same``."""
        return self._keys.num_same(1, index, host) if len(self._keys.tensors) > 1 else 0

    def row_checks(self, slots: Tensor) -> Tensor:
        """Return the row checks that lie at the places of token slots of the host pool: int32 [layers,
        num_slots]. ``slots``: int64 [num_slots], on the CPU."""
        return self._keys.tensors[1][:, slots]

    def settle(self) -> None:
        """Wait until all copies are over."""
        self._keys.settle()

    def close(self) -> None:
        """Unpin the memory once all copies are over."""
        self._keys.close()
        self._k_host = self._k_host[:, :0].clone()  # the memory is not this object's to keep mapped
