"""What a decode node of this machine holds of a prompt, as the source of a copy to the device
(``copies_up.py``).

This node's GPU reads the decode node's memory by itself, layer after layer, on the stream of all copies up.
The decode node keeps what it holds until the room is over, and may write over it from then on: bytes that
were copied later are not taken, however right their row checks are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hisparse_pd.core.model.layer_arrivals import LayerArrivals
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.kernels.row_check import WrongItem
from hisparse_pd.prefill_node.read_plan import ReadPlan
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.protocol.messages import Extent
from hisparse_pd.transfer.lane_memory import Mapping
from hisparse_pd.transfer.plan import MOST_LONG, descriptors, join_descriptors


@dataclass(frozen=True)
class LaneSource:
    """The tokens of ``request``'s prompt from position ``first`` on that ``plan`` reads from ``memory``,
    which is pinned for it. ``on_wrong``: called with rows that came wrong. ``on_end``: called with the number
    of pages that came right. See ``copies_up.Source``."""

    request: PrefillRequest
    plan: ReadPlan
    first: int
    memory: Mapping
    arrivals: LayerArrivals
    on_wrong: Callable[[Sequence[WrongItem]], None]
    on_end: Callable[[int], None]

    @property
    def is_kept(self) -> bool:
        return not self.request.has_ended

    def copy(self, dst: Sequence[Extent], verify: Callable[[], object]) -> torch.cuda.Event | None:
        arrivals = self.arrivals
        with arrivals.stream.copying():
            pools = self.plan.pools(self.first, dst)
            most_long = MOST_LONG // arrivals.num_parts
            for part in range(arrivals.num_parts):
                moves = [
                    descriptors(pool.runs, pool.src, pool.dst, arrivals.layers(part, pool.stop))
                    for pool in pools
                ]
                self.memory.enqueue_reads(join_descriptors(moves), most_long)
                arrivals.record(part)
            verify()
        return arrivals.stream.record()

    def note_wrong(self, items: Sequence[WrongItem]) -> None:
        self.on_wrong(items)

    def users(self) -> Iterator[Prefix]:
        return iter(())

    def end(self, num_right: int) -> None:
        self.memory.unpin()
        self.on_end(num_right)
