"""What a plan keeps count of on the device equals what is counted anew from its orders."""

from __future__ import annotations

from itertools import count
from typing import Any

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.pools import Pools, SlotCounts
from hisparse_pd.decode_node.device_use import DeviceUse
from hisparse_pd.decode_node.held_matches import HeldMatches
from hisparse_pd.decode_node.limits import Limits
from hisparse_pd.decode_node.live_requests import LiveRequests
from hisparse_pd.decode_node.mode_choice import admit
from hisparse_pd.decode_node.plan_draft import PlanDraft, Queue
from hisparse_pd.decode_node.plan_slots import PlanSlots
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import Admission, Exchange, Fill, StepPlan
from tests.books import carry_out, enqueue, make_request

LIMITS = Limits(
    totals=SlotCounts(host=20000, device=8 * 272 + 160, index=40000, lookup=20000, aux=100, req_row=40),
    page_size=16,
    max_context=300,
    index_topk=20,
    device_buffer_size=32,
    growth_tokens=16,
    largest_hot_buffer=128,
)
TRUE, FALSE, AUTO = HisparseFlag.TRUE, HisparseFlag.FALSE, HisparseFlag.AUTO


def draft_of(rooms: LiveRequests) -> PlanDraft:
    matches = HeldMatches(rooms.held, (), LIMITS.page_size)
    running = rooms.select(RequestState.RUNNING)
    landing = rooms.select(RequestState.LANDING)
    return PlanDraft(LIMITS, PlanSlots.of(rooms.available), running, landing, matches, Queue((), LIMITS))


def contents(use: DeviceUse) -> dict[str, Any]:
    counts = {"hisparse": use.num_hisparse, "dense": use.num_dense, "never dense": use.num_never_dense}
    lacked = [use.num_lacked(most_slots) for most_slots in (16, 32, 64, 128, 304)]
    slots = {"slots": use.dense_slots, "hot": dict(use.hisparse), "leaving": list(use.leaving.items())}
    return counts | slots | {"lacked": lacked}


def counted_anew(draft: PlanDraft) -> dict[str, Any]:
    leaving = draft.device_use.leaving
    use = DeviceUse(
        LIMITS, draft.running, draft.landing, draft.exchanges, draft.num_left, lambda r: r in leaving
    )
    for admission in draft.admissions.values():
        use.admit(admission)
    return contents(use)


def test_counts_follow_admissions_and_exchanges_and_what_is_undone() -> None:
    rooms = LiveRequests(Pools(LIMITS.totals, LIMITS.page_size), 60.0)
    numbers = count()

    def admitted(draft: PlanDraft, flag: HisparseFlag) -> bool:
        is_admitted = admit(draft, enqueue(rooms, make_request(next(numbers), 260, 10, flag)), tuple(Mode))
        assert contents(draft.device_use) == counted_anew(draft)
        return is_admitted

    draft = draft_of(rooms)
    assert all(admitted(draft, flag) for flag in (FALSE, *[AUTO] * 7))
    carry_out(rooms, StepPlan(admissions=tuple(draft.admissions.values())))
    for admission in draft.admissions.values():
        rooms.start(admission.request)

    draft = draft_of(rooms)
    assert (draft.device_use.num_dense, len(draft.device_use.leaving)) == (8, 7)
    outcomes = [admitted(draft, flag) for flag in (TRUE, AUTO, FALSE, *[TRUE] * 5, *[FALSE] * 5, TRUE)]
    assert set(outcomes) == {True, False}
    assert {each.mode for each in draft.admissions.values()} == set(Mode)
    assert len(draft.device_use.leaving) < 7


def test_who_stays_resident_lacks_nothing_and_gives_what_is_beyond_a_hot_buffer() -> None:
    rooms = LiveRequests(Pools(LIMITS.totals, LIMITS.page_size), 60.0)
    resident, hot = (enqueue(rooms, make_request(number, 260, 10, TRUE)) for number in range(2))
    draft = draft_of(rooms)
    assert admit(draft, resident, tuple(Mode))
    assert admit(draft, hot, tuple(Mode))
    carry_out(rooms, StepPlan(admissions=tuple(draft.admissions.values())))
    for request in (resident, hot):
        rooms.start(request)
    carry_out(rooms, StepPlan(fills=(Fill(resident, 272, num_resident_pages=0),)))
    num_beside = draft_of(rooms).device_use.num_lacked(128)
    assert num_beside == (128 - 32) - (272 + 32 - 128), "others can get pages that are being filled"
    rooms.end_fill(resident)
    use = draft_of(rooms).device_use
    assert (resident.num_device_slots, hot.num_device_slots) == (272, 32)
    assert use.num_lacked(304) == 272 - 32, "the resident one needs no more"
    assert use.num_lacked(128) == (128 - 32) - (272 - 128)
    use.admit(Admission(make_request(3, 100), Mode.HISPARSE, SlotCounts(device=32), 32))
    assert use.num_lacked(128) == (128 - 32) - (272 - 128) + (112 - 32)
    use.exchange(Exchange(resident, 64))
    assert use.num_lacked(304) == (272 - 32) + (272 - 64) + (112 - 32)
