"""Planning of requests that share pages: samples of one prompt, and prompts with a held prefix."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from hisparse_pd.base.vocabulary import HisparseFlag, Mode
from hisparse_pd.core.paging.extents import extents_to_slots
from hisparse_pd.core.paging.pools import Holding, PoolKind, SlotCounts, Stage
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.decode_node.growth import exchanges_of_pages
from hisparse_pd.decode_node.held_matches import NO_MATCH, HeldMatches
from hisparse_pd.decode_node.local_kv import copy_source
from hisparse_pd.decode_node.next_plan import NextPlan
from hisparse_pd.decode_node.request import KV_POOLS, Request
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.reserve import Claim, order_ends
from hisparse_pd.decode_node.step_plan import Growth, StepPlan
from hisparse_pd.protocol.messages import Room
from hisparse_pd.protocol.prompt_scores import WantedScores
from tests.books import admission_of, carry_out, end
from tests.unit.decode_node.plan_node import AUTO, FALSE, LIMITS, STEP_BY_STEP, TRUE, Node, request_slots


def test_further_samples_wait_for_the_pages_of_the_first_and_let_others_ahead() -> None:
    node = Node()
    first, second, third = (node.arrive(TRUE, 40, 9, family=1) for _ in range(3))
    second.first_sample = third.first_sample = first
    other = node.arrive(TRUE, 20)
    plan = node.plan()
    assert [admission.request for admission in plan.admissions] == [first, other]
    carry_out(node.rooms, plan)
    assert node.plan().admissions == ()
    node.rooms.start(first)
    first.output_token_ids.append(0)
    plan = node.plan()
    assert [(each.request, each.num_shared_pages) for each in plan.admissions] == [(second, 2), (third, 2)]


@pytest.mark.parametrize(
    ("flag", "num_prompt_tokens", "family", "waits"),
    [
        (TRUE, 1, 1, False),  # nothing lands
        (TRUE, 16, 1, True),  # no page is shared, and 15 positions are copied
        (TRUE, 16, None, True),
        (TRUE, 17, None, False),  # a whole page would have to be copied
        (FALSE, 60, None, True),
    ],
)
def test_samples_wait_for_what_they_can_share_or_copy(
    flag: HisparseFlag, num_prompt_tokens: int, family: int | None, waits: bool
) -> None:
    """Without a family the node holds no prefixes."""
    node = Node()
    first, second = (node.arrive(flag, num_prompt_tokens, 9, family) for _ in range(2))
    second.first_sample = first
    assert [admission.request for admission in node.plan().admissions] == [first, second][: 2 - waits]


def test_a_sample_whose_prompt_has_to_be_scored_waits_for_nobody() -> None:
    node = Node()
    first, second = (node.arrive(FALSE, 40, 9, family=1) for _ in range(2))
    second.first_sample, second.scores = first, WantedScores(1, 0)
    assert [admission.request for admission in node.plan().admissions] == [first, second]


def test_nobody_waits_for_a_first_sample_of_which_nothing_lands() -> None:
    node = Node()
    node.arrive(TRUE, 33, 9, family=1)
    node.step()
    first, second = (node.arrive(TRUE, 33, 9, family=1) for _ in range(2))
    second.first_sample = first
    assert [admission.num_shared_pages for admission in node.plan().admissions] == [2, 2]


def test_samples_share_the_pages_of_a_dense_one_and_copy_the_rest() -> None:
    """It may have to leave its pages, and they do not notice."""
    node = Node(STEP_BY_STEP)
    first, second = (node.arrive(FALSE, 40, 60, family=1) for _ in range(2))
    second.first_sample = first
    plan = node.step()
    assert [admission.request for admission in plan.admissions] == [first]
    assert plan.admissions[0].need.device < first.life_tokens
    assert first.may_leave_pages
    (admission,) = node.plan().admissions
    assert (admission.request, admission.num_shared_pages) == (second, 2)
    assert copy_source(second, admission.mode, 32, node.limits.page_size) is first


def test_nothing_is_copied_from_a_sample_that_is_over_or_in_another_mode_or_damaged() -> None:
    node = Node()
    first, second = (node.arrive(TRUE, 40, 9, family=1) for _ in range(2))
    second.first_sample = first

    def source(mode: Mode = Mode.HISPARSE, num_held: int = 32) -> Request | None:
        return copy_source(second, mode, num_held, node.limits.page_size)

    assert source() is None, "it has not landed"
    node.step()
    assert source() is first
    assert source(Mode.DENSE) is None
    assert source(num_held=16) is None, "a page and more are missing"
    assert source(num_held=39) is None, "nothing is missing"
    assert first.prefix is not None
    node.rooms.held.drop(PoolKind.INDEX, first.prefix.extents(PoolKind.INDEX)[0].start)
    assert source() is None, "a row is wrong"
    first.prefix.is_dropped = False
    node.rooms.start_ending(first, is_sound=True)
    assert source() is None, "it is over"


def test_a_newcomer_is_admitted_beside_samples_that_wait() -> None:
    node = Node()
    first, second = (node.arrive(TRUE, 40, 9, family=1) for _ in range(2))
    second.first_sample = first
    next_plan = NextPlan(node.limits, node.rooms)
    carry_out(node.rooms, next_plan.make(0.0))
    assert next_plan.make(0.0) == StepPlan()
    other = node.arrive(TRUE, 20)
    assert [admission.request for admission in next_plan.make(0.0).admissions] == [other]


@pytest.mark.I7
def test_pages_that_a_request_will_share_are_not_its_own_hot_buffers() -> None:
    """Once it has started, others may come to use them: then it leaves too few for the smallest hot buffer.
    Nobody counts on the slots of one whose KV is on its way."""
    totals = structs.replace(LIMITS.totals, device=144)
    node = Node(replace(STEP_BY_STEP, totals=totals, index_topk=40))
    first, growing = node.arrive(FALSE, 17), node.arrive(FALSE, 81, 60, family=1)
    assert [admission.request for admission in node.plan().admissions] == [first]
    node.step()
    assert [admission.request for admission in node.step().admissions] == [growing]
    assert growing.num_shared_pages == 5
    assert node.draft().all_can_end


def test_who_counted_on_pages_that_were_wrong_is_told_though_others_still_use_them() -> None:
    """No slot changes hands: those who share the pages go on, and nobody else finds them."""
    node = Node(replace(LIMITS, totals=structs.replace(LIMITS.totals, req_row=1)))
    left = node.arrive(TRUE, 33, family=1)
    node.step()
    end(node.rooms, left, is_sound=True)
    node.arrive(TRUE, 33, 9, family=1)
    node.step()
    late = node.arrive(TRUE, 33, family=1)
    node.rooms.queue(late, RequestState.WAITING, float("inf"), is_local=True)
    next_plan = NextPlan(node.limits, node.rooms)
    assert next_plan.make(0.0) == StepPlan()
    node.rooms.held.drop_copies(late.usable_keys[0])
    assert next_plan.make(0.0).no_longer_local == (late,)


def test_a_sample_whose_first_one_failed_waits_no_more() -> None:
    node = Node()
    first, second = (node.arrive(TRUE, 40, 9, family=1) for _ in range(2))
    second.first_sample = first
    carry_out(node.rooms, node.plan())
    assert node.plan().admissions == ()
    node.rooms.release(first, 0.0)
    (admission,) = node.plan().admissions
    assert (admission.request, admission.num_shared_pages) == (second, 0)


def test_growth_evicts_other_pages_than_those_that_the_same_plan_shares() -> None:
    """What an admission shares was used longest ago, so it would be the first to go."""
    node = Node()
    for family in (1, 2):
        held = node.arrive(TRUE, 33, family=family)
        node.step()
        end(node.rooms, held, is_sound=True)
    growing = node.arrive(TRUE, 20, 9)
    node.step()
    free = node.rooms.pools.free
    node.rooms.pools.reserve(Room(99), SlotCounts(host=free.host, index=free.index), Stage.QUARANTINED)
    sharing, other = (node.arrive(TRUE, 33, family=family) for family in (1, 2))
    growth = Growth(growing, SlotCounts(host=16, index=16))
    carry_out(
        node.rooms,
        StepPlan(
            growths=(growth,), admissions=(admission_of(node.rooms, sharing, Mode.HISPARSE, num_slots=48),)
        ),
    )
    assert sharing.num_shared_pages == 2
    assert node.rooms.held.num_found(other.usable_keys, KV_POOLS[Mode.HISPARSE]) == 0


def test_those_who_share_a_prompt_need_what_is_behind_it() -> None:
    """Each request has 208 of 400 host slots: the first its own, the others 192 of the first's."""
    node = Node()
    node.arrive(TRUE, 200, family=1)
    node.step()
    sharers = [node.arrive(TRUE, 200, family=1) for _ in range(2)]
    plan = node.step()
    assert [admission.request for admission in plan.admissions] == sharers
    assert {(a.need.host, a.need.index, a.need.lookup, a.num_shared_pages) for a in plan.admissions} == {
        (16, 16, 208, 12)
    }
    assert node.rooms.pools.free.host == node.rooms.available.host == 400 - 192 - 3 * 16


@pytest.mark.I7
@pytest.mark.parametrize(("family", "is_admitted"), [(1, False), (2, True)])
def test_nobody_shares_what_another_needs_to_be_free(family: int, is_admitted: bool) -> None:
    """The long request can end once the first has.

    A newcomer that shares with the first needs as much as one that does not, but keeps the first's pages in
    use when that has ended.
    """
    node = Node(STEP_BY_STEP)
    first = node.arrive(TRUE, 160, 17, family=1)
    node.step()
    long = node.arrive(TRUE, 32, 209)
    node.step()
    assert (first.reserved_tokens, long.reserved_tokens) == (176, 48)
    assert node.rooms.available.host < long.life_tokens - 48
    newcomer = node.arrive(TRUE, 160 if family == 1 else 16, 17, family=family)
    plan = node.plan()
    assert len(plan.admissions) == is_admitted
    if is_admitted:
        assert plan.admissions[0].need.host == 32
        return
    node.run(first, 17)
    end(node.rooms, first, is_sound=True)
    end(node.rooms, long, is_sound=True)
    (admission,) = node.plan().admissions
    assert (admission.request, admission.need.host) == (newcomer, 32)


@pytest.mark.I2
@pytest.mark.I9
@pytest.mark.parametrize("is_wrong", [False, True])
def test_nobody_counts_on_a_page_that_is_set_aside_when_its_users_have_ended(is_wrong: bool) -> None:
    """The pages of the first are just enough for the long request once the newcomer has come. With one fewer
    neither of the two could end."""
    node = Node(STEP_BY_STEP)
    first = node.arrive(TRUE, 128, 17, family=1)
    node.step()
    long = node.arrive(TRUE, 96, 193)
    node.step()
    if is_wrong:
        assert first.prefix is not None
        wrong = first.prefix.extents(PoolKind.HOST)[0].start
        node.rooms.pools.set_aside(PoolKind.HOST, wrong)
        node.rooms.held.drop(PoolKind.HOST, wrong)
    newcomer = node.arrive(TRUE, 96, 193)
    assert [admission.request for admission in node.step().admissions] == [newcomer] * (not is_wrong)
    node.run(first, 16)
    end(node.rooms, first)
    assert node.rooms.pools.used(Stage.SET_ASIDE) == SlotCounts(host=16 * is_wrong)
    while long.has_next_step:
        node.run(long, 1)
        node.step()
        assert long.has_slots_for_next or not long.has_next_step
    end(node.rooms, long)
    node.step()
    assert newcomer.state is RequestState.RUNNING


@pytest.mark.I2
def test_nobody_counts_on_pages_of_a_quarantined_room_when_their_other_users_have_ended() -> None:
    """The prefill node may read them for as long as it gives no sign of life. The long request lacks 11 pages
    to its end: 8 are free, and of the first one's pages 2 will be, but not the 7 that it shares."""
    node = Node(STEP_BY_STEP)
    first = node.arrive(TRUE, 128, 17, family=1)
    node.step()
    lost = node.arrive(TRUE, 120, family=1)
    (admission,) = node.plan().admissions
    node.rooms.use_held(admission)
    node.rooms.reserve(admission, "lost", 9.0)
    end(node.rooms, lost)
    node.run(first, 1)
    long = node.arrive(TRUE, 96, 193)
    next_plan = NextPlan(node.limits, node.rooms)
    assert next_plan.make(0.0).admissions == ()
    node.rooms.quarantine.quiet(lost.room, batch_failed=False, now=0.0)
    assert [each.request for each in next_plan.make(0.0).admissions] == [long]


def test_what_a_plan_has_shared_nobody_counts_on() -> None:
    node = Node()
    node.arrive(TRUE, 200, family=1)
    node.step()
    matches = HeldMatches(node.rooms.held, [], 16)
    newcomer = node.arrive(AUTO, 200, family=1)
    assert matches.find(newcomer, Mode.DENSE) == NO_MATCH
    shared = matches.find(newcomer, Mode.HISPARSE)
    assert (shared.num_pages, shared.taken) == (12, SlotCounts())
    assert matches.is_counted_on(shared)
    matches.take(shared)
    assert not matches.is_counted_on(shared)


@pytest.mark.I7
def test_what_is_shared_is_free_when_the_last_has_ended() -> None:
    """Slots are counted in an order in which all can end. What a landing request shares stays in use."""
    node = Node()
    requests = [node.arrive(TRUE, 16) for _ in range(3)]
    prefix = Prefix(KV_POOLS[Mode.HISPARSE], None, 10, [b""] * 10, Holding(Room(1), Stage.HELD))
    own = (16, 0, 16, 16)
    sharing = Claim(own, ((0, 0, 0, 0),), (prefix,))
    claims = [sharing, sharing, Claim(own, ((100, 0, 100, 0),))]
    for pinned, num_host in (({}, 16 + 16 + 160), ({prefix: 4}, 16 + 16 + 96)):
        order = order_ends(SlotCounts(), zip(requests, claims, strict=True), pinned, 16)
        assert order.is_safe
        assert [place.available[0] for place in order.places] == [0, 16, num_host]
    pinned = {prefix: 10}
    assert not order_ends(SlotCounts(), zip(requests, claims, strict=True), pinned, 16).is_safe


def test_a_dense_request_can_end_in_a_hot_buffer_with_copies_of_the_pages_that_it_shares() -> None:
    node = Node(replace(STEP_BY_STEP, growth_tokens=1))
    first = node.arrive(FALSE, 64, 1, family=1)
    node.step()
    end(node.rooms, first, is_sound=True)
    sharer = node.arrive(FALSE, 66, 70, family=1)
    node.step()
    assert (sharer.mode, sharer.held_prefix_tokens) == (Mode.DENSE, 64)
    owned = sharer.owned_slots
    assert owned.device == owned.index < 32 == node.limits.in_pages(node.limits.min_capacity(sharer))
    claim = node.limits.claim(sharer, Mode.DENSE, owned, sharer.num_shared_pages)
    assert claim.ways == (
        (0, 144 - 64 - owned.device, 144 - 64 - owned.index, 0),
        (144, 32 - owned.device, 144 - owned.index, 144),
    )
    assert claim.prefixes == (sharer.prefix,)


@pytest.mark.I1
@pytest.mark.I2
def test_a_dense_request_that_shares_pages_leaves_them_when_it_cannot_grow() -> None:
    """It gets host slots for all of its tokens, and keeps its index slots behind those for the copies."""
    node = Node(replace(STEP_BY_STEP, totals=structs.replace(STEP_BY_STEP.totals, device=128)))
    first = node.arrive(FALSE, 64, 1, family=1)
    node.step()
    end(node.rooms, first, is_sound=True)
    sharer = node.arrive(FALSE, 66, 60, family=1)
    node.step()
    shared, other = sharer.prefix, node.arrive(FALSE, 15, 1)
    node.step()
    node.run(sharer, 31)  # a page is left for it
    node.step()
    assert (shared, other.mode, node.rooms.available.device) == (sharer.prefix, Mode.DENSE, 0)
    own_index = extents_to_slots(sharer.owned[PoolKind.INDEX]).tolist()
    node.run(sharer, 15)
    plan = node.step()
    assert [exchange.request for exchange in plan.exchanges] == [sharer]
    assert (sharer.mode, sharer.prefix, sharer.num_retractions) == (Mode.HISPARSE, None, 1)
    assert sharer.has_slots_for_next
    index = extents_to_slots(sharer.owned[PoolKind.INDEX]).tolist()
    assert index[64 : 64 + len(own_index)] == own_index
    assert sharer.owned_slots.host == sharer.owned_slots.lookup == len(index) == 128
    assert shared is not None
    assert shared.num_users == 0
    assert node.rooms.held.num_tokens_in(KV_POOLS[Mode.DENSE]) == 64
    end(node.rooms, sharer, is_sound=True)
    assert node.rooms.held.num_tokens_in(KV_POOLS[Mode.HISPARSE]) == 112
    assert node.rooms.available.host == node.limits.totals.host


@pytest.mark.I2
def test_a_hot_buffer_may_take_the_shared_pages_that_its_request_leaves() -> None:
    """Its own page has 16 of the 32 slots, and none is free."""
    node = Node(
        replace(STEP_BY_STEP, growth_tokens=1, totals=structs.replace(STEP_BY_STEP.totals, device=96))
    )
    first = node.arrive(FALSE, 64, 1, family=1)
    node.step()
    end(node.rooms, first, is_sound=True)
    node.arrive(FALSE, 15, 2)
    node.step()
    sharer = node.arrive(FALSE, 66, 30, family=1)
    node.step()
    assert (sharer.num_shared_pages, sharer.num_device_slots, node.rooms.available.device) == (4, 16, 0)
    kept = request_slots(sharer)
    node.run(sharer, 14)
    (exchange,) = node.step().exchanges
    assert (exchange.request, exchange.hot_capacity, sharer.num_device_slots) == (sharer, 21, 32)
    assert request_slots(sharer)[:16] == kept
    assert node.rooms.available.device == 48


def _leaver_and_late(num_index_slots: int) -> tuple[Node, Request, Request]:
    """Return a node whose device pool has one page free, a dense request of ``auto`` that alone uses the 4
    pages that it shares, and a hisparse one that waits, and shares 4 pages that nobody uses."""
    totals = structs.replace(STEP_BY_STEP.totals, device=96, index=num_index_slots)
    node = Node(replace(STEP_BY_STEP, totals=totals))
    for flag, family in ((FALSE, 1), (TRUE, 2)):
        held = node.arrive(flag, 64, 1, family=family)
        node.step()
        end(node.rooms, held, is_sound=True)
    leaver = node.arrive(AUTO, 66, 14, family=1)
    node.step()
    assert (leaver.mode, leaver.num_shared_pages, leaver.owned_slots.index) == (Mode.DENSE, 4, 16)
    late = node.arrive(TRUE, 66, 14, family=2)
    assert node.rooms.available == totals - SlotCounts(device=80, index=80, req_row=1)
    return node, leaver, late


@pytest.mark.I2
@pytest.mark.I7
@pytest.mark.parametrize("num_index_slots", [160, 176, 192])
def test_index_slots_of_pages_that_are_left_serve_no_admission_that_shares_held_ones(
    num_index_slots: int,
) -> None:
    """The one that leaves takes 64 for copies before it gives 64 back. Those that the other shares are gone
    by then, and with them too few are free, though the plan would end with as many as all have."""
    node, leaver, late = _leaver_and_late(num_index_slots)
    assert node.step() == StepPlan()
    assert (leaver.mode, late.state) == (Mode.DENSE, RequestState.WAITING)
    end(node.rooms, leaver, is_sound=True)
    (admission,) = node.step().admissions
    assert (admission.request, admission.num_shared_pages) == (late, 4)


@pytest.mark.I2
def test_a_request_leaves_its_pages_for_one_that_shares_others_if_both_find_index_slots() -> None:
    node, leaver, late = _leaver_and_late(208)
    plan = node.step()
    assert [exchange.request for exchange in plan.exchanges] == [leaver]
    assert [admission.request for admission in plan.admissions] == [late]
    assert node.rooms.available.index == 208 - 80 - 64 - 16


@pytest.mark.I2
@pytest.mark.I9
def test_pages_that_were_found_wrong_are_not_planned_with_when_they_are_left() -> None:
    """The page with the wrong row is set aside once nobody uses it."""
    node, leaver, late = _leaver_and_late(208)
    assert leaver.prefix is not None
    wrong = leaver.prefix.extents(PoolKind.DEVICE)[0].start
    node.rooms.pools.set_aside(PoolKind.DEVICE, wrong)
    node.rooms.held.drop(PoolKind.DEVICE, wrong)
    assert HeldMatches(node.rooms.held, (), 16).freed_without(leaver) == SlotCounts()
    node.step()
    end(node.rooms, leaver)
    node.step()
    assert late.state is RequestState.RUNNING
    assert node.rooms.pools.used(Stage.SET_ASIDE) == SlotCounts(device=16)


@pytest.mark.I2
def test_pages_are_free_when_the_last_of_their_users_leaves_them_in_the_same_plan() -> None:
    node = Node(STEP_BY_STEP)
    first = node.arrive(FALSE, 64, 1, family=1)
    node.step()
    end(node.rooms, first, is_sound=True)
    sharers = [node.arrive(FALSE, 66, 30, family=1) for _ in range(2)]
    node.step()
    matches = HeldMatches(node.rooms.held, (), 16)
    assert [matches.freed_without(sharer) for sharer in sharers] == [SlotCounts()] * 2
    matches.leave(sharers[0])
    assert matches.freed_without(sharers[1]) == SlotCounts(device=64, index=64)
    matches.leave(sharers[1])
    assert matches.unused == SlotCounts(device=64, index=64)
    assert matches.find(node.arrive(FALSE, 66, family=1), Mode.DENSE).idle == matches.unused
    exchanges = tuple(next(exchanges_of_pages(node.limits, sharer, 32))[0] for sharer in sharers)
    carry_out(node.rooms, StepPlan(exchanges=exchanges), limits=node.limits)
    assert node.rooms.held.unused == matches.unused


@pytest.mark.I2
def test_pages_that_an_admission_shares_are_not_free_when_their_user_leaves_them() -> None:
    node, leaver, _ = _leaver_and_late(208)
    shorter = node.arrive(FALSE, 40, family=1)
    matches = HeldMatches(node.rooms.held, (), 16)
    match = matches.find(shorter, Mode.DENSE)
    assert (match.num_pages, match.idle) == (2, SlotCounts())
    matches.take(match)
    assert matches.freed_without(leaver) == SlotCounts(device=32, index=32)


@pytest.mark.I2
def test_who_does_not_leave_after_all_has_left_nothing() -> None:
    node, leaver, _ = _leaver_and_late(208)
    draft = node.draft()
    mark = draft.mark()
    assert draft.leave_pages(*next(exchanges_of_pages(node.limits, leaver, 32)))
    assert draft.matches.unused == SlotCounts(host=64, device=64, index=128)
    draft.undo(mark)
    assert draft.available == node.rooms.available
    assert draft.matches.unused == SlotCounts(host=64, index=64)


@pytest.mark.I2
def test_who_has_grown_for_drafts_that_were_wrong_takes_copies_of_all_shared_pages() -> None:
    """It has an index page more than it would get now, which does not count for those in front."""
    limits = replace(STEP_BY_STEP, max_drafts=3, growth_tokens=16)
    node = Node(limits)
    first = node.arrive(FALSE, 64, 1, family=1)
    node.step()
    end(node.rooms, first, is_sound=True)
    sharer = node.arrive(FALSE, 66, 60, family=1)
    node.step()
    assert sharer.reserved_tokens == 96
    node.run(sharer, 29)
    sharer.num_drafts_in_flight = 3
    node.step()
    assert sharer.reserved_tokens == 128
    sharer.num_drafts_in_flight = 0
    exchange, given = next(exchanges_of_pages(limits, sharer, 32))
    assert sharer.owned_slots.index == 64 > limits.in_pages(sharer.next_seq_len + 15) - 64
    assert exchange.need == SlotCounts(host=112, index=64, lookup=112)
    assert given == exchange.need + SlotCounts(device=32 - 64)
    carry_out(node.rooms, StepPlan(exchanges=(exchange,)), limits=limits)
    node.rooms.check_integrity()
    assert sharer.owned_slots == SlotCounts(host=112, device=32, index=128, lookup=112)
    assert sharer.has_slots_for_next


@pytest.mark.I2
def test_who_leaves_pages_that_were_found_wrong_leaves_none_behind() -> None:
    node = Node(STEP_BY_STEP)
    first = node.arrive(FALSE, 64, 1, family=1)
    node.step()
    end(node.rooms, first, is_sound=True)
    sharer = node.arrive(FALSE, 66, 70, family=1)
    node.step()
    assert sharer.prefix is not None
    node.rooms.held.drop(PoolKind.DEVICE, extents_to_slots(sharer.prefix.holding[PoolKind.DEVICE])[0])
    exchange, _ = next(exchanges_of_pages(node.limits, sharer, 32))
    carry_out(node.rooms, StepPlan(exchanges=(exchange,)), limits=node.limits)
    node.rooms.check_integrity()
    end(node.rooms, sharer, is_sound=True)
    assert len(node.rooms.held) == 0
    assert node.rooms.pools.free == node.limits.totals
