"""Planning on small numbers: what a request gets, refusals, order, growth, and which requests sit out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import SlotCounts
from hisparse_pd.decode_node.limits import Limits, refusal
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.sizing import DEFAULT_BUFFER, GROWTH_PAGES
from hisparse_pd.decode_node.step_plan import Exchange, Fill, StepPlan
from tests.books import end, make_request
from tests.unit.decode_node.plan_node import (
    AUTO,
    FALSE,
    LIMITS,
    STEP_BY_STEP,
    TRUE,
    Node,
    lose,
)


@pytest.mark.I6
@pytest.mark.parametrize(
    ("flag", "num_prompt_tokens", "mode", "need"),
    [
        # Dense takes whole pages of the device pool, and auto all of them while it is alone.
        (FALSE, 100, Mode.DENSE, SlotCounts(device=112, index=112, aux=1, req_row=1)),
        (AUTO, 160, Mode.DENSE, SlotCounts(device=160, index=160, aux=1, req_row=1)),
        # More than the device pool has.
        (AUTO, 161, Mode.HISPARSE, SlotCounts(host=176, device=64, index=176, lookup=176, aux=1, req_row=1)),
        # A hot buffer never exceeds the whole life.
        (TRUE, 30, Mode.HISPARSE, SlotCounts(host=32, device=32, index=32, lookup=32, aux=1, req_row=1)),
        # Not even when the top-k does.
        (TRUE, 5, Mode.HISPARSE, SlotCounts(host=16, device=16, index=16, lookup=16, aux=1, req_row=1)),
    ],
)
def test_what_a_request_gets(
    flag: HisparseFlag, num_prompt_tokens: int, mode: Mode, need: SlotCounts
) -> None:
    node = Node()
    request = node.arrive(flag, num_prompt_tokens)
    (admission,) = node.plan().admissions
    assert admission.mode is mode
    assert node.rooms.pools.rounded(admission.need) == need
    assert admission.hot_capacity == (0 if mode is Mode.DENSE else min(64, num_prompt_tokens))
    assert admission.request is request


@pytest.mark.parametrize(
    ("flag", "num_prompt_tokens", "dense_refusal", "parts"),
    [
        (TRUE, 401, "", ["401", "400", "host pool"]),
        (FALSE, 161, "", ["161", "160", "device pool"]),
        (FALSE, 10, "page_size 64 and 16", ["page_size 64 and 16"]),
        (AUTO, 401, "", ["400", "160"]),
        (AUTO, 161, "", []),
        (AUTO, 161, "page sizes differ", []),
        (TRUE, 400, "page sizes differ", []),
    ],
)
def test_a_refusal_names_the_bound(
    flag: HisparseFlag, num_prompt_tokens: int, dense_refusal: str, parts: list[str]
) -> None:
    request = make_request(1, num_prompt_tokens, 1, flag, dense_refusal=dense_refusal)
    error = refusal(LIMITS, request)
    assert bool(error) is bool(parts)
    assert all(part in error for part in parts)


def test_nobody_overtakes_the_first_in_the_queue() -> None:
    node = Node()
    node.arrive(TRUE, 300)
    node.step()
    first, second = node.arrive(TRUE, 200), node.arrive(TRUE, 10)
    assert node.plan().admissions == ()
    assert [first.state, second.state] == [RequestState.WAITING] * 2


@pytest.mark.I7
@pytest.mark.parametrize(("flag", "num_lost", "num_large"), [(TRUE, 150, 300), (FALSE, 100, 60)])
def test_slots_that_may_never_be_free_again_hold_up_only_who_needs_them(
    flag: HisparseFlag, num_lost: int, num_large: int
) -> None:
    node = Node()
    lost = lose(node, flag, num_lost)
    large, small = node.arrive(flag, num_large), node.arrive(TRUE, 9)
    node.step(now=0.5)
    assert small.state is RequestState.WAITING, "the prefill node may still say that the room is quiet"
    node.step(now=1.0)
    assert [large.state, small.state] == [RequestState.WAITING, RequestState.RUNNING]
    node.rooms.quarantine.quiet(lost.room, False, now=2.0)
    end(node.rooms, small, 2.0)
    late = node.arrive(TRUE, 9)
    node.step(now=2.0)
    assert large.state is RequestState.RUNNING, "it has kept its place"
    end(node.rooms, large, 2.0)
    node.step(now=2.0)
    assert late.state is RequestState.RUNNING


@pytest.mark.I8
def test_a_request_gets_slots_before_it_needs_them_and_never_more_than_its_life() -> None:
    node = Node(STEP_BY_STEP)
    request = node.arrive(TRUE, 30, max_new_tokens=48)
    node.step()
    assert (request.owned_slots.host, request.owned_slots.index) == (48, 48)
    assert node.plan() == StepPlan()
    node.run(request, 18)
    assert not request.has_slots_for_next
    (growth,) = node.step().growths
    assert growth.need == SlotCounts(host=16, index=16, lookup=16)
    node.run(request, 16)
    node.step()
    assert (request.owned_slots.host, request.owned_slots.index) == (80, 80)
    assert (request.reserved_tokens, request.life_tokens) == (80, 77)


def test_chats_without_max_tokens_share_a_node_of_the_default_size() -> None:
    """Each chat may fill DeepSeek-V3.2's context, of which the host pool holds one and a half."""
    options, context = DecodeSettings.model_fields, 163_840
    host, page_size = options["host_pool_tokens"].default, options["page_size"].default
    node = Node(
        Limits(
            totals=SlotCounts(
                host=host, device=1 << 20, index=host + (1 << 20), lookup=2 * host, aux=256, req_row=64
            ),
            page_size=page_size,
            max_context=context,
            index_topk=2048,
            device_buffer_size=DEFAULT_BUFFER,
            growth_tokens=GROWTH_PAGES * page_size,
        )
    )
    chats = [node.arrive(TRUE, 4096, max_new_tokens=context - 4095) for _ in range(64)]
    node.step()
    node.step()
    assert sum(chat.state is RequestState.RUNNING for chat in chats) == 20


@pytest.mark.I7
def test_nobody_counts_on_slots_of_kv_that_is_on_its_way() -> None:
    """100 host slots belong to a landing room whose prefill node may vanish for good."""
    node = Node(STEP_BY_STEP)
    landing = node.arrive(TRUE, 84)
    (admission,) = node.plan().admissions
    node.rooms.reserve(admission, "first", 9.0)
    needs_them = node.arrive(TRUE, 20, max_new_tokens=320)
    node.step()
    has_waited = needs_them.state is RequestState.WAITING
    node.rooms.start(landing)
    node.step()
    assert has_waited
    assert needs_them.state is RequestState.RUNNING, "whoever runs ends"


def test_a_dense_request_without_a_page_goes_on_as_hisparse() -> None:
    node = Node(replace(STEP_BY_STEP, totals=structs.replace(LIMITS.totals, device=112)))
    other = node.arrive(FALSE, 47, max_new_tokens=2)
    grower = node.arrive(FALSE, 30, max_new_tokens=70)
    node.step()
    assert [other.mode, grower.mode] == [Mode.DENSE] * 2
    late = node.arrive(TRUE, 40)
    assert node.plan().admissions == (), "the page that the growing request may need is not given away"
    node.run(grower, 18)
    assert [growth.request for growth in node.step().growths] == [grower]
    node.run(grower, 16)
    (exchange,) = node.step().exchanges
    assert exchange == Exchange(grower, 64, SlotCounts(host=80, index=16, lookup=80))
    assert (grower.mode, grower.num_retractions, grower.has_slots_for_next) == (Mode.HISPARSE, 1, True)
    end(node.rooms, other)
    node.step()
    assert late.state is RequestState.RUNNING


def test_a_page_for_everybody_who_will_grow_is_kept_from_those_behind_it() -> None:
    node = Node(STEP_BY_STEP)
    node.arrive(FALSE, 64)
    growing = [node.arrive(FALSE, 14, max_new_tokens=90) for _ in range(2)]
    node.arrive(TRUE, 9)
    plan = node.step()
    assert [admission.request for admission in plan.admissions[1:]] == growing
    assert node.rooms.pools.free.device == 2 * node.limits.page_size


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize("shares_pages", [False, True])
def test_what_is_cache_gives_way_to_a_dense_request_that_grows(is_resident: bool, shares_pages: bool) -> None:
    """It would leave its pages otherwise or, since it cannot where it shares some, sit out until the other
    request ends."""
    limits = replace(STEP_BY_STEP, device_buffer_size=32, largest_hot_buffer=96, keeps_residents=is_resident)
    node = Node(limits)
    if shares_pages:
        first = node.arrive(FALSE, 33, family=1)
        node.step()
        end(node.rooms, first, is_sound=True)
    dense = node.arrive(FALSE, 33, max_new_tokens=80, family=1 if shares_pages else None)
    other = node.arrive(TRUE, 50, max_new_tokens=10)
    node.step()
    assert (dense.num_shared_pages, other.hot_capacity) == (2 * shares_pages, 32)
    if is_resident:
        node.rooms.begin_fill(Fill(other, num_page_slots=64, num_resident_pages=0))
        node.rooms.end_fill(other)
    else:
        node.rooms.replace_device_slots(Exchange(other, 64))
    exchanges: list[Exchange] = []
    while dense.has_next_step:
        plan = node.one_step()
        exchanges += plan.exchanges
        if plan.is_cut:
            node.step()
        assert dense.has_slots_for_next, "it never sits out"
        node.run(dense, 1)
    assert [(each.request, each.hot_capacity) for each in exchanges] == [(other, 32)]
    assert dense.mode is Mode.DENSE
