"""Metrics of the decode engine's requests and of its swap-ins."""

from __future__ import annotations

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import Pools, SlotCounts
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.metrics import Metrics
from hisparse_pd.decode_node.swap_counts import SwapCounts
from hisparse_pd.engine.messages import EngineStats
from tests.books import land, make_request

BYTES_PER_MISS = 1152 * 3


def _run(rooms: LiveRequests, room: int, mode: Mode) -> None:
    rooms.start(land(rooms, make_request(room, flag=HisparseFlag.AUTO), mode, 10))


def _stats(rooms: LiveRequests, swap_ins: SwapCounts | None = None) -> EngineStats:
    return Metrics().stats(
        rooms,
        swap_ins=swap_ins or SwapCounts(),
        bytes_per_miss=BYTES_PER_MISS,
        num_peers=1,
        step=3,
        now=1.0,
    )


def _rooms() -> LiveRequests:
    return LiveRequests(
        Pools(SlotCounts(host=100, device=64, index=128, lookup=200, aux=4, req_row=4), 16), 1.0
    )


def test_requests_are_told_apart_by_mode_and_by_what_they_asked_for() -> None:
    rooms = _rooms()
    gauges = _stats(rooms).gauges
    assert [gauges[f'running_reqs{{mode="{mode}"}}'] for mode in Mode] == [0, 0], "modes without any, too"
    _run(rooms, 1, Mode.HISPARSE)
    _run(rooms, 2, Mode.HISPARSE)
    _run(rooms, 3, Mode.DENSE)
    for room, flag in enumerate((HisparseFlag.FALSE, HisparseFlag.AUTO, HisparseFlag.AUTO), start=4):
        rooms.open(make_request(room, flag=flag))
    gauges = _stats(rooms).gauges
    assert {mode: gauges[f'running_reqs{{mode="{mode}"}}'] for mode in Mode} == {"hisparse": 2, "dense": 1}
    asked_for = {flag: gauges[f'queue_reqs{{hisparse="{flag}"}}'] for flag in HisparseFlag}
    assert asked_for == {"true": 0, "false": 1, "auto": 2}
    assert (gauges["num_running_reqs"], gauges["num_queue_reqs"]) == (3, 3)


def test_swapped_in_bytes_follow_the_misses() -> None:
    counters = _stats(_rooms(), swap_ins=SwapCounts(hits=50, misses=7, evictions=2)).counters
    assert counters["swap_in_misses_total"] == 7
    assert counters["swap_in_bytes_total"] == 7 * BYTES_PER_MISS
