"""Plans reads of what a decode node holds of a prompt: from slots there into pages here. Pure.

``DecodeTier`` makes a ``ReadPlan`` of each prompt that it reads for. A read is planned as a write whose
source is the decode node's memory (``transfer/plan.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hisparse_pd.core.paging.extents import SlotRanges, slice_extents, total_length
from hisparse_pd.prefill_node.push import SourceRegions
from hisparse_pd.prefill_node.registrations import Peer, kv_region_of
from hisparse_pd.protocol.messages import Bootstrap, Extent, HeldKv, RegionKind
from hisparse_pd.transfer.plan import LayerWrites, RegionView, RunPlan, plan_writes


@dataclass(frozen=True)
class ReadPlan:
    """Reads of what ``held`` says, the first tokens of a prompt, from the regions of ``peer`` into
    ``own``."""

    bootstrap: Bootstrap
    held: HeldKv
    peer: Peer
    own: SourceRegions
    page_size: int
    """Tokens of a page here."""

    @property
    def has_all(self) -> bool:
        """Whether the decode node has all that this node has of a token. A node that does not draft has
        nothing of the draft layer, and one that verifies no rows has no checks."""
        return all(
            theirs is not None and theirs.num_layers == own.num_layers for _, theirs, own in self._pools()
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all pools."""
        return self.page_size * sum(own.num_layers * own.item_bytes for _, _, own in self._pools())

    def pools(self, first: int, extents: Sequence[Extent]) -> list[LayerWrites]:
        """Return the read, pool by pool, of as many of the prompt's tokens, from position ``first`` on, as
        ``extents``, the slots here, have. Raises PlanError."""
        dst, stop = SlotRanges.of_extents(extents), first + total_length(extents)
        runs: dict[Sequence[Extent], RunPlan] = {}  # keys and their checks have the same slots
        parts = []
        for held, theirs, own in self._pools():
            if held not in runs:
                runs[held] = plan_writes(SlotRanges.of_extents(slice_extents(held, first, stop)), dst)
            assert theirs is not None, "nothing is read from a node that has not all"
            parts.append(LayerWrites(runs[held], theirs, own, 0, own.num_layers))
        return parts

    def _pools(self) -> Iterator[tuple[Sequence[Extent], RegionView | None, RegionView]]:
        """Yield for each pool here the slots of what is held, the decode node's region and this node's."""
        theirs, held, own = self.peer.regions, self.held, self.own
        yield held.kv_extents, theirs[kv_region_of(self.bootstrap)], own.kv
        yield held.index_extents, theirs[RegionKind.INDEX], own.index
        if own.row_checks is not None:
            yield held.index_extents, theirs.get(RegionKind.ROW_CHECKS), own.row_checks
