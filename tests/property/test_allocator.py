"""The extent allocator against a model that is a plain array of owners."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hisparse_pd.core.paging.allocator import ExtentAllocator, ExtentError, PoolExhausted, PoolIntegrityError
from hisparse_pd.core.paging.extents import slice_extents, total_length
from hisparse_pd.protocol.messages import Extent
from tests.examples import num_examples

pytestmark = pytest.mark.I2

GRANULARITY = 4
NUM_SLOTS = 24 * GRANULARITY
FREE = -1


class Allocator(RuleBasedStateMachine):
    """Owners allocate, grow and free, whole or in part; the model records who owns each slot."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(NUM_SLOTS, GRANULARITY, "kv")
        self.owner_of = [FREE] * NUM_SLOTS
        self.owned: dict[int, tuple[Extent, ...]] = {}
        self.num_owners = 0

    @rule(num_slots=st.integers(0, NUM_SLOTS + 5))
    def allocate(self, num_slots: int) -> None:
        needed = -(-num_slots // GRANULARITY) * GRANULARITY
        free_lengths = self._free_lengths()
        assert self.allocator.can_allocate(num_slots) == (needed <= sum(free_lengths))
        if needed > sum(free_lengths):
            message = f"kv: {needed} token slots needed, {sum(free_lengths)} of"
            with pytest.raises(PoolExhausted, match=message):
                self.allocator.allocate(num_slots)
            return
        extents = self.allocator.allocate(num_slots)
        assert total_length(extents) == needed
        assert len(extents) == self._fewest_extents(needed, free_lengths)
        if len(extents) == 1:  # the tightest fit, so that long extents stay long
            before = next(length for start, length in self._free_runs() if start == extents[0].start)
            assert before == min(length for length in free_lengths if length >= needed)
        owner, self.num_owners = self.num_owners, self.num_owners + 1
        self._own(owner, extents)
        self.owned[owner] = extents

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), num_slots=st.integers(0, 20))
    def grow(self, data: st.DataObject, num_slots: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        extents = self.owned[owner]
        if not self.allocator.can_allocate(num_slots):
            with pytest.raises(PoolExhausted):
                self.allocator.grow(extents, num_slots)
            return
        behind = next(
            (length for start, length in self._free_runs() if extents and start == extents[-1].end), 0
        )
        grown = self.allocator.grow(extents, num_slots)
        needed = -(-num_slots // GRANULARITY) * GRANULARITY
        assert total_length(grown) == total_length(extents) + needed
        assert slice_extents(grown, 0, total_length(extents)) == extents
        if behind >= needed and extents:
            assert len(grown) == len(extents)
        self._own(owner, slice_extents(grown, total_length(extents), total_length(grown)))
        self.owned[owner] = grown

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free_all(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        self._free(owner, self.owned.pop(owner))

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def free_the_tail(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(o for o, extents in self.owned.items() if extents)))
        extents = self.owned[owner]
        num_kept = data.draw(st.integers(0, total_length(extents) // GRANULARITY)) * GRANULARITY
        self.owned[owner] = slice_extents(extents, 0, num_kept)
        self._free(owner, slice_extents(extents, num_kept, total_length(extents)))

    @rule(start=st.integers(-2, NUM_SLOTS // GRANULARITY), length=st.integers(1, 3))
    def freeing_what_is_not_allocated_changes_nothing(self, start: int, length: int) -> None:
        first, last = start * GRANULARITY, (start + length) * GRANULARITY
        if first >= 0 and last <= NUM_SLOTS and FREE not in self.owner_of[first:last]:
            return
        num_free = self.allocator.num_free
        allocated = next((extents for extents in self.owned.values() if extents), ())
        with pytest.raises(ExtentError):
            self.allocator.free((*allocated, Extent(first, last - first)))
        assert self.allocator.num_free == num_free

    @invariant()
    def free_and_used_sum_to_the_pool(self) -> None:
        assert self.allocator.num_free == self.owner_of.count(FREE)
        self.allocator.check_integrity(self.owned.values())

    @invariant()
    def extents_are_aligned(self) -> None:
        for extents in self.owned.values():
            assert all(e.start % GRANULARITY == 0 and e.length % GRANULARITY == 0 for e in extents)

    def _own(self, owner: int, extents: tuple[Extent, ...]) -> None:
        for extent in extents:
            assert self.owner_of[extent.start : extent.end] == [FREE] * extent.length
            self.owner_of[extent.start : extent.end] = [owner] * extent.length

    def _free(self, owner: int, extents: tuple[Extent, ...]) -> None:
        self.allocator.free(extents)
        for extent in extents:
            assert self.owner_of[extent.start : extent.end] == [owner] * extent.length
            self.owner_of[extent.start : extent.end] = [FREE] * extent.length

    def _free_runs(self) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for slot, owner in enumerate(self.owner_of):
            if owner != FREE:
                continue
            if runs and sum(runs[-1]) == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((slot, 1))
        return runs

    def _free_lengths(self) -> list[int]:
        return [length for _, length in self._free_runs()]

    @staticmethod
    def _fewest_extents(needed: int, free_lengths: list[int]) -> int:
        num_extents = 0
        for length in sorted(free_lengths, reverse=True):
            if needed <= 0:
                break
            needed -= length
            num_extents += 1
        return num_extents


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(
    derandomize=True, max_examples=num_examples(20, 60), stateful_step_count=40, print_blob=False
)


def test_a_pool_that_is_no_multiple_of_its_granularity_is_refused() -> None:
    for num_slots, granularity in ((-1, 1), (10, 4), (3, 4), (4, 0)):
        with pytest.raises(ValueError, match="must be a multiple of granularity"):
            ExtentAllocator(num_slots, granularity)


def test_a_negative_allocation_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot allocate -1"):
        ExtentAllocator(8).allocate(-1)


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ((Extent(0, 2),), "not aligned"),
        ((Extent(2, 4),), "not aligned"),
        ((Extent(0, 4), Extent(0, 4)), "listed twice"),
        ((Extent(8, 4),), "is not allocated"),
        ((Extent(4, 8),), "is not allocated"),
        ((Extent(16, 4),), "not within its 16 token slots"),
    ],
)
def test_freeing_foreign_extents_says_what_is_wrong(extents: tuple[Extent, ...], message: str) -> None:
    allocator = ExtentAllocator(16, 4, "host")
    assert allocator.allocate(8) == (Extent(0, 8),)
    with pytest.raises(ExtentError, match=f"host: .*{message}"):
        allocator.free(extents)
    assert allocator.num_free == 8


def test_growing_what_is_not_allocated_is_refused() -> None:
    allocator = ExtentAllocator(16)
    with pytest.raises(ExtentError, match="is not allocated"):
        allocator.grow((Extent(0, 4),), 4)
    assert allocator.num_free == 16


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ([], r"\[0, 8\) belongs to nobody, .*8 free \+ 0 owned of 16"),
        ([(Extent(0, 6),)], r"\[6, 8\) belongs to nobody"),
        ([(Extent(0, 8),), (Extent(4, 4),)], r"\[4, 8\) belongs to two"),
        ([(Extent(0, 10),)], r"\[8, 10\) belongs to two"),
    ],
)
def test_integrity_names_the_slots_that_leaked_or_are_shared(
    owned: list[tuple[Extent, ...]], message: str
) -> None:
    allocator = ExtentAllocator(16)
    allocator.allocate(8)
    with pytest.raises(PoolIntegrityError, match=message):
        allocator.check_integrity(owned)
