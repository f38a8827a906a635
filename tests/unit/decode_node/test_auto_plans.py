"""Plans for requests of ``auto`` where misses cost nothing: free slots alone decide on the mode, and on who
leaves its pages for others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.decode_node.request import Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import StepPlan
from tests.books import end
from tests.unit.decode_node.plan_node import (
    AUTO,
    FALSE,
    LIMITS,
    MANY,
    TRUE,
    Node,
    filled_by_auto,
    settled,
)


def test_auto_takes_what_is_possible_at_all() -> None:
    node = Node(replace(LIMITS, totals=structs.replace(LIMITS.totals, host=100)))
    node.arrive(AUTO, 150)  # Beyond the host pool.
    node.arrive(AUTO, 20)  # It would have too small a hot buffer.
    assert node.plan().admissions[0].mode is Mode.DENSE
    blocked = node.arrive(AUTO, 20)
    blocked.dense_refusal = "page sizes differ"
    assert node.plan().admissions[0].mode is Mode.DENSE


@pytest.mark.parametrize(
    ("num_requests", "num_dense"), [(1, 1), (16, 16), (17, 15), (24, 8), (32, 1), (34, 0), (100, 0)]
)
def test_auto_is_dense_while_all_others_could_have_the_largest_hot_buffer(
    num_requests: int, num_dense: int
) -> None:
    """With n requests of which d are dense, d * 272 + (n - d) * 128 slots of 4,352 are needed. Only 40 run at
    a time, and the others do not count."""
    node = Node(MANY)
    requests = [node.arrive(AUTO, 260, max_new_tokens=10) for _ in range(num_requests)]
    node.step()
    running = [request for request in requests if request.state is RequestState.RUNNING]
    assert len(running) == min(40, num_requests)
    assert [request.mode for request in running[:num_dense]] == [Mode.DENSE] * num_dense
    assert [request.mode for request in running[num_dense:]] == [Mode.HISPARSE] * (len(running) - num_dense)


@pytest.mark.parametrize(("flag", "num_leaving"), [(AUTO, 1), (TRUE, 1), (FALSE, 2)])
def test_dense_requests_of_auto_leave_their_pages_for_who_waits(flag: HisparseFlag, num_leaving: int) -> None:
    """Those admitted last leave first, for a hot buffer of their share; who must be dense gets the pages of
    two."""
    node, requests = filled_by_auto()
    late = node.arrive(flag, 260, max_new_tokens=10)
    plan = node.step()
    assert [exchange.request for exchange in plan.exchanges] == requests[::-1][:num_leaving]
    assert {exchange.hot_capacity for exchange in plan.exchanges} == {128}
    assert late.state is RequestState.RUNNING
    assert late.mode is (Mode.DENSE if flag is FALSE else Mode.HISPARSE)
    leaving = plan.exchanges[0].request
    assert (leaving.mode, leaving.num_retractions, leaving.has_slots_for_next) == (Mode.HISPARSE, 1, True)


def test_hot_buffers_do_not_become_small_while_dense_requests_of_auto_may_leave() -> None:
    node, requests = filled_by_auto()
    late = [node.arrive(TRUE, 260, max_new_tokens=10) for _ in range(12)]
    plan = node.one_step()
    assert [each.request for each in plan.exchanges] == requests[:-4:-1]
    assert all(request.hot_capacity == 32 for request in late)
    assert all(each.hot_capacity >= 128 for each in plan.exchanges[:1])


def test_who_must_be_dense_or_lacks_host_slots_keeps_its_pages() -> None:
    node = Node(replace(MANY, totals=structs.replace(MANY.totals, device=2 * 272, host=400)))
    of_auto, must_be_dense = node.arrive(AUTO, 250, 10), node.arrive(FALSE, 250, 10)
    node.step()
    assert [r.mode for r in (must_be_dense, of_auto)] == [Mode.DENSE] * 2
    late = node.arrive(TRUE, 100, 10)
    (exchange,) = node.plan().exchanges
    assert exchange.request is of_auto
    end(node.rooms, late)
    node.arrive(TRUE, 200, 10)  # 208 of 400 host slots, of which the request of auto would take 272
    assert node.plan() == StepPlan()


def behind_a_prefix(num_sharing: int) -> tuple[Node, list[Request]]:
    """Return a node with requests of ``auto`` behind a held prefix of 240 tokens, and 16 free slots."""
    num_slots = 240 + 32 * num_sharing + 16
    node = Node(replace(MANY, totals=structs.replace(MANY.totals, device=num_slots)))
    first = node.arrive(AUTO, 250, 10, family=1)
    node.step()
    end(node.rooms, first, is_sound=True)
    sharing = []
    for _ in range(num_sharing):
        sharing.append(node.arrive(AUTO, 250, 10, family=1))
        node.step()
    assert [(each.mode, each.num_shared_pages) for each in sharing] == [(Mode.DENSE, 15)] * num_sharing
    assert node.rooms.available.device == 16
    return node, sharing


@pytest.mark.I2
def test_the_only_user_of_a_held_prefix_leaves_its_pages_for_who_waits() -> None:
    """The pages of the prefix are free then, too. The two hot buffers take 128 and 32 slots, for which the
    prefix gives some of its own up."""
    node, (sharing,) = behind_a_prefix(1)
    late = node.arrive(TRUE, 260, 10)
    plan = node.step()
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == [(sharing, 128)]
    assert (late.state, late.hot_capacity) == (RequestState.RUNNING, 32)
    assert (sharing.mode, sharing.prefix, sharing.has_slots_for_next) == (Mode.HISPARSE, None, True)
    assert node.rooms.held.unused.device == node.rooms.available.device == 288 - 128 - 32


def test_who_shares_a_prefix_with_others_keeps_its_pages() -> None:
    """The few of its own would not be enough for a hot buffer."""
    node, _ = behind_a_prefix(2)
    node.arrive(TRUE, 260, 10)
    assert node.plan() == StepPlan()


@pytest.mark.I2
def test_pages_that_one_leaves_are_not_free_for_who_shares_them_next() -> None:
    """Beside 240 slots of the prefix there are 48: too few for a hot buffer and the pages of who comes."""
    node, _ = behind_a_prefix(1)
    node.arrive(FALSE, 250, 10, family=1)
    assert node.plan() == StepPlan()


def test_a_request_of_auto_does_not_leave_its_pages_for_another_that_could_be_dense() -> None:
    """Without slots in the host pool both could only be dense."""
    node, _ = filled_by_auto(replace(MANY, totals=structs.replace(MANY.totals, host=0)))
    node.arrive(AUTO, 260, max_new_tokens=10)
    assert node.plan() == StepPlan()


@pytest.mark.parametrize("has_further_samples", [False, True])
def test_first_samples_of_auto_keep_the_pages_that_further_ones_copy(has_further_samples: bool) -> None:
    node = Node(replace(MANY, totals=structs.replace(MANY.totals, device=288)))
    first = node.arrive(AUTO, 250, 10, family=1)
    first.has_further_samples = has_further_samples
    node.step()
    assert (first.mode, first.num_shared_pages) == (Mode.DENSE, 15)
    node.arrive(TRUE, 260, 10)
    leaving = [exchange.request for exchange in node.plan().exchanges]
    assert leaving == ([] if has_further_samples else [first])


def test_auto_counts_what_others_have_once_the_plan_is_carried_out() -> None:
    """One that leaves its pages gets 128 entries, and 112 slots are left. Beside as many slots of pages, hot
    buffers of 56 entries would do, for which the first one has more than the second lacks."""
    node, requests = filled_by_auto()
    first, second = node.arrive(TRUE, 260, 10), node.arrive(AUTO, 91, 10)
    plan = node.step()
    assert [(each.request, each.hot_capacity) for each in plan.exchanges] == [(requests[-1], 128)]
    assert [(first.mode, first.hot_capacity), (second.mode, second.num_device_slots)] == [
        (Mode.HISPARSE, 32),
        (Mode.DENSE, 112),
    ]


def test_what_hot_buffers_have_beyond_their_use_is_room_for_auto() -> None:
    """A request of 64 tokens leaves its pages only for hot buffers of less than half as many entries."""
    node = Node(replace(MANY, totals=structs.replace(MANY.totals, device=320)))
    large = [node.arrive(TRUE, 200, max_new_tokens=40) for _ in range(3)]
    node.step()
    settled(node)
    assert [request.hot_capacity for request in large] == [96, 96, 96]
    short, long = node.arrive(AUTO, 60, max_new_tokens=5), node.arrive(AUTO, 200, max_new_tokens=5)
    node.step()
    assert [request.mode for request in (short, long)] == [Mode.DENSE, Mode.HISPARSE]


def test_auto_is_dense_beyond_that_rather_than_waiting_for_the_host() -> None:
    node = Node()
    hisparse = node.arrive(TRUE, 390)
    node.step()
    (admission,) = (node.arrive(AUTO, 80), node.plan().admissions)[1]
    assert (admission.mode, admission.need.device) == (Mode.DENSE, 80)
    # A request that does not get all its pages, or cannot be dense, waits for the host.
    node.step()
    long, unequal = node.arrive(AUTO, 15, max_new_tokens=40), node.arrive(AUTO, 15)
    unequal.dense_refusal = "page sizes differ"
    assert node.plan().admissions == ()
    end(node.rooms, hisparse)
    assert [admission.request for admission in node.plan().admissions] == [long, unequal]
