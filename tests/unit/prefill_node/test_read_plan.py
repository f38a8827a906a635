"""Plans of reads: what a decode node must have, and which bytes go where."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hisparse_pd.prefill_node.push import SourceRegions
from hisparse_pd.prefill_node.read_plan import ReadPlan
from hisparse_pd.protocol.messages import Extent, HeldKv, RegionKind
from hisparse_pd.transfer.plan import RegionView, descriptors

PAGE = 4
NUM_SLOTS = 64
KV, INDEX, CHECKS = (
    RegionView(base, layers * NUM_SLOTS * item_bytes, layers, NUM_SLOTS, item_bytes)
    for base, layers, item_bytes in ((1 << 20, 3, 8), (1 << 21, 2, 2), (1 << 22, 3, 4))
)
OWN = SourceRegions(KV, INDEX, INDEX, (0, 1, 2), (0, 1), CHECKS)
THEIRS = {
    kind: replace(own, base_addr=own.base_addr << 8)
    for kind, own in ((RegionKind.KV_HOST, KV), (RegionKind.INDEX, INDEX), (RegionKind.ROW_CHECKS, CHECKS))
}
HELD = HeldKv((Extent(8, 6), Extent(0, 6)), (Extent(20, 12),), 12)


def plan(theirs: dict[RegionKind, RegionView], own: SourceRegions = OWN) -> ReadPlan:
    bootstrap: Any = SimpleNamespace(hisparse=True)
    peer: Any = SimpleNamespace(regions=theirs)
    return ReadPlan(bootstrap, HELD, peer, own, PAGE)


def fewer_layers(region: RegionView) -> RegionView:
    return replace(region, num_layers=region.num_layers - 1)


def test_a_node_that_has_not_all_of_a_token_is_not_read_from() -> None:
    assert plan(THEIRS).has_all
    for kind, region in THEIRS.items():
        assert not plan({**THEIRS, kind: fewer_layers(region)}).has_all, kind
    without_checks = dict(THEIRS)
    del without_checks[RegionKind.ROW_CHECKS]
    assert not plan(without_checks).has_all
    assert plan(without_checks, replace(OWN, row_checks=None)).has_all


@pytest.mark.parametrize("first", [0, 4, 8])
def test_each_token_comes_from_where_it_is_held(first: int) -> None:
    """The first six positions are in the slots 8 to 13 of the host pool, the others in 0 to 5."""
    here = (Extent(40, 4),)
    read = plan(THEIRS)
    host = [*range(8, 14), *range(6)][first : first + 4]
    places = (
        (KV, THEIRS[RegionKind.KV_HOST], host),
        (INDEX, THEIRS[RegionKind.INDEX], range(20 + first, 24 + first)),
        (CHECKS, THEIRS[RegionKind.ROW_CHECKS], range(20 + first, 24 + first)),
    )
    for pool, (own, theirs, slots) in zip(read.pools(first, here), places, strict=True):
        moved: dict[int, int] = {}
        moves = descriptors(pool.runs, pool.src, pool.dst, range(pool.first, pool.stop))
        for src, dst, length in zip(*(column.tolist() for column in moves), strict=True):
            moved.update({dst + byte: src + byte for byte in range(length)})
        for layer in range(own.num_layers):
            for number, slot in enumerate(slots):
                dst, src = (
                    region.base_addr + layer * region.layer_bytes + at * region.item_bytes
                    for region, at in ((own, 40 + number), (theirs, slot))
                )
                assert [moved.pop(dst + byte) for byte in range(own.item_bytes)] == [
                    *range(src, src + own.item_bytes)
                ]
        assert not moved
    assert read.page_bytes == PAGE * (3 * 8 + 2 * 2 + 3 * 4)
