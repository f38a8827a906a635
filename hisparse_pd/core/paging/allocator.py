"""The free list of one pool: its free token slots, as a sorted and coalesced list of extents.

``Pools`` has an ``ExtentAllocator`` for each pool. An allocation consists of as few extents as the free list
allows, because the cost of a transfer grows with the number of extents and not with their size. An allocator
is not thread-safe: the loop of one engine owns it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable

from hisparse_pd.core.paging.extents import total_length
from hisparse_pd.protocol.messages import Extent


class PoolExhausted(Exception):
    """A pool has fewer free token slots than an allocation needs; nothing was taken."""

    def __init__(self, pool: str, num_needed: int, num_free: int, num_slots: int) -> None:
        super().__init__(
            f"{pool}: {num_needed} token slots needed, {num_free} of {num_slots} free; "
            "wait for requests to finish or enlarge the pool"
        )


class ExtentError(ValueError):
    """Extents that are not an allocation of this pool: freed twice, never handed out, or out of bounds."""


class PoolIntegrityError(Exception):
    """Free and owned token slots overlap or do not sum to the pool."""


class ExtentAllocator:
    """Hands out the token slots ``[0, num_slots)`` in extents aligned to ``granularity`` at both ends.

    A request for a number of slots that is no multiple of ``granularity`` (``page_size`` for a paged pool) is
    rounded up. ``name`` is the pool's name in error messages.
    """

    def __init__(self, num_slots: int, granularity: int = 1, name: str = "pool") -> None:
        if granularity < 1 or num_slots < 0 or num_slots % granularity:
            raise ValueError(
                f"{name}: {num_slots} token slots must be a multiple of granularity {granularity}"
            )
        self.num_slots = num_slots
        self.granularity = granularity
        self.name = name
        self._starts: list[int] = []  # sorted starts of the free extents, none adjacent to the next
        self._length_at: dict[int, int] = {}  # start of a free extent -> its length
        self._by_length: list[tuple[int, int]] = []  # the same extents, sorted by length, then start
        self._num_free = 0
        if num_slots:
            self._put(Extent(0, num_slots))

    @property
    def num_free(self) -> int:
        return self._num_free

    def can_allocate(self, num_slots: int) -> bool:
        return self._rounded(num_slots) <= self._num_free

    def allocate(self, num_slots: int) -> tuple[Extent, ...]:
        """Take ``num_slots`` slots, rounded up to the granularity, in the fewest extents possible.

        They come from the smallest free extent that is large enough. If there is none, the largest free
        extents are used up one after the other, and the rest comes from the smallest that fits. For zero
        slots there are no extents. Raises PoolExhausted.
        """
        num_needed = self._rounded_if_free(num_slots)
        extents = []
        while num_needed:
            best_fit = bisect_left(self._by_length, (num_needed, 0))
            length, start = self._by_length[best_fit if best_fit < len(self._by_length) else -1]
            num_taken = min(length, num_needed)
            self._take_front(start, num_taken)
            extents.append(Extent(start, num_taken))
            num_needed -= num_taken
        return tuple(extents)

    def take(self, extent: Extent) -> bool:
        """Take exactly this extent if all of it is free. Returns whether it was."""
        nearest = bisect_right(self._starts, extent.start) - 1  # the free extent that may contain it
        if nearest < 0:
            return False
        start = self._starts[nearest]
        end = start + self._length_at[start]
        if extent.end > end:
            return False
        self._take_front(start, end - start)  # all of the free extent; what is not asked for goes back
        for rest_start, rest_end in ((start, extent.start), (extent.end, end)):
            if rest_start < rest_end:
                self._put(Extent(rest_start, rest_end - rest_start))
        return True

    def grow(self, extents: tuple[Extent, ...], num_slots: int) -> tuple[Extent, ...]:
        """Return ``extents`` with at least ``num_slots`` more slots; as many of these as possible are right
        behind the last extent.

        The result replaces ``extents``. Raises PoolExhausted, or ExtentError for extents that are not
        allocated, having changed nothing.
        """
        self._check_allocated(extents)
        num_needed = self._rounded_if_free(num_slots)
        if not extents or not num_needed:
            return extents + self.allocate(num_needed)
        last = extents[-1]
        in_place = min(self._length_at.get(last.end, 0), num_needed)
        if in_place:
            self._take_front(last.end, in_place)
        grown = (*extents[:-1], Extent(last.start, last.length + in_place))
        return grown + self.allocate(num_needed - in_place)

    def free(self, extents: Iterable[Extent]) -> None:
        """Free allocated extents or aligned parts of them. Raises ExtentError, having freed nothing."""
        extents = tuple(extents)
        self._check_allocated(extents)
        for extent in extents:
            self._put(extent)

    def check_integrity(self, owned: Iterable[Iterable[Extent]]) -> None:
        """Raise PoolIntegrityError unless free slots and those of all owners are disjoint and fill the pool.
        ``owned``: the extents of every owner."""
        free = [Extent(start, self._length_at[start]) for start in self._starts]
        by_length = sorted((extent.length, extent.start) for extent in free)
        if total_length(free) != self._num_free or by_length != self._by_length:
            raise PoolIntegrityError(
                f"{self.name}: free list {free} disagrees with num_free {self._num_free}"
            )

        labelled = [(extent, "free") for extent in free]
        num_owned = 0
        for owner, extents in enumerate(owned):
            for extent in extents:
                labelled.append((extent, f"owner {owner}"))
                num_owned += extent.length
        labelled.sort(key=lambda pair: pair[0].start)
        expected_start = 0
        for extent, label in [*labelled, (Extent(self.num_slots, 1), "the end of the pool")]:
            if extent.start != expected_start:
                verb = "belongs to nobody" if extent.start > expected_start else "belongs to two"
                low, high = sorted((extent.start, expected_start))
                raise PoolIntegrityError(
                    f"{self.name}: [{low}, {high}) {verb}, found at {extent} ({label}); "
                    f"{self._num_free} free + {num_owned} owned of {self.num_slots} token slots"
                )
            expected_start = extent.end

    def _rounded(self, num_slots: int) -> int:
        if num_slots < 0:
            raise ValueError(f"{self.name}: cannot allocate {num_slots} token slots")
        return -(-num_slots // self.granularity) * self.granularity

    def _rounded_if_free(self, num_slots: int) -> int:
        """Return ``num_slots`` rounded up to the granularity. Raises PoolExhausted if fewer are free."""
        num_needed = self._rounded(num_slots)
        if num_needed > self._num_free:
            raise PoolExhausted(self.name, num_needed, self._num_free, self.num_slots)
        return num_needed

    def _check_allocated(self, extents: tuple[Extent, ...]) -> None:
        """Raise ExtentError unless ``extents`` are disjoint and aligned, in the pool, and no slot is free."""
        previous_end = 0
        for extent in sorted(extents, key=lambda extent: extent.start):
            if extent.start < 0 or extent.length < 1 or extent.end > self.num_slots:
                raise ExtentError(f"{self.name}: {extent} is not within its {self.num_slots} token slots")
            if extent.start % self.granularity or extent.length % self.granularity:
                raise ExtentError(f"{self.name}: {extent} is not aligned to granularity {self.granularity}")
            if extent.start < previous_end:
                raise ExtentError(f"{self.name}: {extent} is listed twice")
            previous_end = extent.end
            num_before = bisect_left(self._starts, extent.end)
            if not num_before:
                continue
            start = self._starts[num_before - 1]
            free = Extent(start, self._length_at[start])
            if free.end > extent.start:
                raise ExtentError(f"{self.name}: {extent} is not allocated, {free} is free already")

    def _take_front(self, start: int, length: int) -> None:
        """Cut ``length`` slots off the front of the free extent at ``start``."""
        free_length = self._length_at[start]
        self._remove(start)
        if free_length > length:
            self._insert(start + length, free_length - length)
        self._num_free -= length

    def _put(self, extent: Extent) -> None:
        """Add a free extent and merge it with its neighbours."""
        start, end = extent.start, extent.end
        self._num_free += extent.length
        before = bisect_right(self._starts, start) - 1
        if before >= 0:
            previous = self._starts[before]
            if previous + self._length_at[previous] == start:
                self._remove(previous)
                start = previous
        if end in self._length_at:
            next_end = end + self._length_at[end]
            self._remove(end)
            end = next_end
        self._insert(start, end - start)

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        insort(self._by_length, (length, start))
        self._length_at[start] = length

    def _remove(self, start: int) -> None:
        length = self._length_at.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
