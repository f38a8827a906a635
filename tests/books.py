"""Requests of a decode node without an engine: their records, and plans that are carried out on the books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hisparse_pd.base.vocabulary import HisparseFlag, Mode, SamplingParams
from hisparse_pd.core.model.side_stream import CopyFailed
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.request import KV_POOLS, Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import Admission, Exchange, StepPlan
from hisparse_pd.engine.messages import pack_token_ids
from hisparse_pd.protocol.messages import Room

PEER = PeerAddress("prefill", 8998)
HOT_BUFFER = 8
"""Hot buffer entries of the admissions that are made here and not planned."""


def make_request(
    room: int = 1,
    num_prompt_tokens: int = 8,
    max_new_tokens: int = 3,
    flag: HisparseFlag = HisparseFlag.TRUE,
    peer: PeerAddress = PEER,
    arrived_at: float = 0.0,
    **more: Any,
) -> Request:
    """Make a request. ``more``: other attributes."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    prompt = pack_token_ids(range(num_prompt_tokens))
    request = Request(f"id-{room}", Room(room), num_prompt_tokens, sampling, flag, peer, arrived_at, prompt)
    for name, value in more.items():
        setattr(request, name, value)
    return request


def enqueue(
    rooms: LiveRequests, request: Request, deadline: float = 9.0, *, is_local: bool = False
) -> Request:
    """Open a request and let it wait for admission, as if its prefill node were registered with or, if it is
    local, were away."""
    rooms.open(request)
    rooms.queue(request, RequestState.WAITING, deadline, is_local=is_local)
    return request


def admission_of(rooms: LiveRequests, request: Request, mode: Mode, num_slots: int) -> Admission:
    """Make an admission with ``num_slots`` for KV, those of held pages of its prompt included."""
    num_pages = rooms.held.num_found(request.usable_keys, KV_POOLS[mode])
    num_own = num_slots - num_pages * rooms.pools.page_size
    need = SlotCounts(index=num_own, aux=1, req_row=1)
    if mode is Mode.DENSE:
        return Admission(request, mode, need + SlotCounts(device=num_own), 0, num_pages)
    need += SlotCounts(host=num_own, device=HOT_BUFFER, lookup=num_slots)
    return Admission(request, mode, need, HOT_BUFFER, num_pages)


def land(rooms: LiveRequests, request: Request, mode: Mode, num_slots: int) -> Request:
    """Open a request and admit it at once."""
    admission = admission_of(rooms, enqueue(rooms, request), mode, num_slots)
    carry_out(rooms, StepPlan(admissions=(admission,)))
    return request


def carry_out(
    rooms: LiveRequests,
    plan: StepPlan,
    deadline: float = 9.0,
    limits: Limits | None = None,
    retract: Callable[[Request], None] | None = None,
) -> None:
    """Carry out a plan as a node does, without memory. A prefill node's run is named after its address, and
    one that is needed after all is registered with at once. ``limits``: those of the node; without them,
    requests that leave their pages keep none of their slots. ``retract``: copies what dense requests have
    before they leave their pages."""

    def exchange(order: Exchange) -> None:
        request = order.request
        rooms.grow_for_exchange(order)
        if retract is not None and request.mode is Mode.DENSE:
            retract(request)
        first_kept = None
        if limits is not None and not request.hot_capacity:
            first_kept = limits.first_kept(request, order.hot_capacity)
        rooms.replace_device_slots(order, first_kept)

    plan.carry_out(
        wait_for_node=lambda request: rooms.queue(request, RequestState.WAITING, deadline),
        use_held=rooms.use_held,
        use_resident=rooms.use_resident,
        exchange_slots=exchange,
        begin_fill=rooms.begin_fill,
        grow=lambda growth: rooms.grow(growth.request, growth.need),
        admit=lambda admission: rooms.reserve(admission, f"run of {admission.request.peer}", deadline),
    )


def fail_to_land(rooms: LiveRequests, land: Callable[[], object]) -> None:
    """Do ``land`` for the only request that waits, whose copy cannot begin, and undo it as a node does."""
    with pytest.raises(CopyFailed):
        land()
    (request,) = rooms.waiting()
    rooms.give_back_held(request)
    rooms.check_integrity()


def end(rooms: LiveRequests, request: Request, now: float = 0.0, *, is_sound: bool = False) -> None:
    """End a request as a node does once no step uses what it owns."""
    if request.state is RequestState.RUNNING:
        rooms.start_ending(request, is_sound=is_sound)
    rooms.release(request, now)
