"""Bookkeeping of a node's pools: which slots are free, and what the others are used for.

Each engine has one ``Pools``. The memory of the slots is in the node's ``memory.py``; no function here runs a
kernel or waits. A request's slots in all pools are one Holding, reserved all or nothing, which passes through
the stages of ``Stage`` until it is released or becomes a prefix (``prefix_tree.py``). At any time, for every
pool,

    free + landing + running + ending + quarantined + held + set aside = total

and ``check_integrity`` verifies it slot by slot, printing every term when it does not hold.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Final

from msgspec import Struct

from hisparse_pd.core.paging.allocator import ExtentAllocator, PoolExhausted, PoolIntegrityError
from hisparse_pd.core.paging.extents import has_slot, joined, slice_extents, total_length
from hisparse_pd.protocol.messages import Extent, Room


class PoolKind(StrEnum):
    """The pools of a node.

    HOST and DEVICE have token slots for KV, INDEX for indexer keys, and LOOKUP for entries of the tables that
    find tokens in hot buffers. AUX has aux records, and REQ_ROW rows of the per-request tables. A prefill
    node has AUX and DEVICE, whose pages are those of its KV pool and of its index pool alike, and HOST if its
    prefix cache goes on in main memory.
    """

    HOST = "host"
    DEVICE = "device"
    INDEX = "index"
    LOOKUP = "lookup"
    AUX = "aux"
    REQ_ROW = "req_row"


TOKEN_POOLS: Final = (PoolKind.HOST, PoolKind.DEVICE, PoolKind.INDEX, PoolKind.LOOKUP)
"""The pools of token slots, which are handed out in pages."""
_ALL_POOLS: Final = tuple(PoolKind)
_NO_ROOM: Final = Room(0)
"""The room of a page that was free when it was set aside."""


class Stage(StrEnum):
    """The use of a Holding: the terms of the conservation law."""

    LANDING = "landing"
    """KV is on its way to the slots, or is being computed."""
    RUNNING = "running"
    """Steps read and write the slots."""
    ENDING = "ending"
    """The request is over, and a step in flight uses the slots or a write in flight reads them."""
    QUARANTINED = "quarantined"
    """The request is over, and a remote write may still land in the slots."""
    HELD = "held"
    """The slots are a prefix that requests share, or that one left for others (``prefix_tree.py``)."""
    SET_ASIDE = "set aside"
    """The slots are a page in which a row did not match its row check; it is not reused."""


class SlotCounts(Struct, frozen=True):
    """A number of slots for each pool, in the order of PoolKind. Arithmetic is element by element. Plans make
    thousands of these: a Struct takes a tenth of a dataclass's time.
    """

    host: int = 0
    device: int = 0
    index: int = 0
    lookup: int = 0
    aux: int = 0
    req_row: int = 0

    @classmethod
    def of(cls, kinds: Container[PoolKind], num_slots: int) -> SlotCounts:
        """Return ``num_slots`` of each of ``kinds``."""
        return cls(*[num_slots if kind in kinds else 0 for kind in _ALL_POOLS])

    def __getitem__(self, kind: PoolKind) -> int:
        return int(getattr(self, kind))

    def __add__(self, other: SlotCounts) -> SlotCounts:
        return SlotCounts(
            self.host + other.host,
            self.device + other.device,
            self.index + other.index,
            self.lookup + other.lookup,
            self.aux + other.aux,
            self.req_row + other.req_row,
        )

    def __sub__(self, other: SlotCounts) -> SlotCounts:
        return SlotCounts(
            self.host - other.host,
            self.device - other.device,
            self.index - other.index,
            self.lookup - other.lookup,
            self.aux - other.aux,
            self.req_row - other.req_row,
        )

    def least(self, other: SlotCounts) -> SlotCounts:
        """Return the lesser number of each pool."""
        return SlotCounts(*map(min, _in_order(self), _in_order(other)))

    def fits_in(self, available: SlotCounts) -> bool:
        return (
            self.host <= available.host
            and self.device <= available.device
            and self.index <= available.index
            and self.lookup <= available.lookup
            and self.aux <= available.aux
            and self.req_row <= available.req_row
        )


_in_order = attrgetter(*(kind.value for kind in PoolKind))


@dataclass(eq=False)
class Holding:
    """The slots of one request, one quarantined room or one held prefix; only ``Pools`` changes them.

    ``room``: of a held prefix, the room that its pages came from.
    """

    room: Room
    stage: Stage
    extents: dict[PoolKind, tuple[Extent, ...]] = field(default_factory=dict)

    def __getitem__(self, kind: PoolKind) -> tuple[Extent, ...]:
        return self.extents.get(kind, ())

    def num_slots(self, kind: PoolKind) -> int:
        return total_length(self[kind])

    def only_slot(self, kind: PoolKind) -> int:
        """Return the only slot that the holding has in a pool. Raises ValueError if it has not exactly
        one."""
        extents = self[kind]
        if len(extents) != 1 or extents[0].length != 1:
            raise ValueError(f"room {self.room} holds {self.num_slots(kind)} {kind} slots, expected one")
        return extents[0].start


class Pools:
    """The allocators of all pools and every Holding that was reserved from them.

    Pools of token slots are handed out in pages; part of a page at their end stays unused.
    """

    def __init__(self, totals: SlotCounts, page_size: int) -> None:
        """Raises ValueError for a pool that has slots, but not a whole page."""
        self.page_size = page_size
        self._allocators: dict[PoolKind, ExtentAllocator] = {}
        for kind in PoolKind:
            granularity = _granularity(kind, page_size)
            if 0 < totals[kind] < granularity:
                raise ValueError(
                    f"{kind} pool: {totals[kind]} token slots are less than a page of {page_size}"
                )
            num_slots = totals[kind] // granularity * granularity
            self._allocators[kind] = ExtentAllocator(num_slots, granularity, f"{kind} pool")
        self.holdings: set[Holding] = set()
        self._set_aside: dict[tuple[PoolKind, int], Holding] = {}
        """Free pages that are withdrawn, by pool and first slot."""
        self._condemned: set[tuple[PoolKind, int]] = set()
        self.num_changes = 0
        """Number of changes of stages and of slots taken or freed. While it stays the same, a reservation
        that failed would fail again."""

    @property
    def totals(self) -> SlotCounts:
        return SlotCounts(*[allocator.num_slots for allocator in self._allocators.values()])

    @property
    def free(self) -> SlotCounts:
        return SlotCounts(*[allocator.num_free for allocator in self._allocators.values()])

    def used(self, stage: Stage) -> SlotCounts:
        """Return the slots that all holdings of ``stage`` have together."""
        return self.owned_by(holding for holding in self.holdings if holding.stage is stage)

    def owned_by(self, holdings: Iterable[Holding]) -> SlotCounts:
        """Return the slots that ``holdings`` have together."""
        counts = dict.fromkeys(PoolKind, 0)
        for holding in holdings:
            for kind, extents in holding.extents.items():
                counts[kind] += total_length(extents)
        return SlotCounts(*counts.values())

    def rounded(self, need: SlotCounts) -> SlotCounts:
        """Return ``need`` in whole pages where the pool is paged: what a reservation takes."""
        return SlotCounts(*(round_up(need[kind], _granularity(kind, self.page_size)) for kind in PoolKind))

    def reserve(self, room: Room, need: SlotCounts, stage: Stage = Stage.LANDING) -> Holding:
        """Take ``need`` from all pools. Raises PoolExhausted, having taken nothing."""
        wanted = [(kind, allocator, need[kind]) for kind, allocator in self._allocators.items() if need[kind]]
        for kind, allocator, num_slots in wanted:
            if not allocator.can_allocate(num_slots):
                num_free, total = allocator.num_free, allocator.num_slots
                raise PoolExhausted(f"room {room}, {kind} pool", num_slots, num_free, total)
        self.num_changes += 1
        holding = Holding(room, stage)
        for kind, allocator, num_slots in wanted:
            holding.extents[kind] = allocator.allocate(num_slots)
        self.holdings.add(holding)
        return holding

    def move(self, holding: Holding, stage: Stage) -> None:
        """Change the stage of ``holding``."""
        self._check_known(holding)
        self.num_changes += 1
        holding.stage = stage

    def grow(self, holding: Holding, kind: PoolKind, num_slots: int) -> None:
        """Add slots behind those that ``holding`` has. Raises PoolExhausted, having changed nothing."""
        self._check_known(holding)
        self.num_changes += 1
        holding.extents[kind] = self._allocators[kind].grow(holding[kind], num_slots)

    def give_up(self, holding: Holding, kinds: Iterable[PoolKind]) -> None:
        """Free the slots that ``holding`` has of ``kinds``; it keeps the others."""
        self._check_known(holding)
        self.num_changes += 1
        for kind in kinds:
            extents = holding.extents.pop(kind, ())
            self._free(holding.room, kind, extents)

    def set_aside(self, kind: PoolKind, slot: int) -> int:
        """Withdraw the page of ``slot`` until ``take_back``: at once if it is free, else once its holder
        frees it.

        Returns the page's first slot.
        """
        start = slot // self.page_size * self.page_size
        page = Extent(start, self.page_size)
        if self._allocators[kind].take(page):
            self._add_set_aside(_NO_ROOM, kind, page)
        elif (kind, start) not in self._set_aside:
            self._condemned.add((kind, start))
        return start

    def take_back(self, kind: PoolKind, start: int) -> bool:
        """Undo ``set_aside`` for the page that begins at slot ``start``. Returns whether it was set aside."""
        if (kind, start) in self._condemned:
            self._condemned.remove((kind, start))
            return True
        holding = self._set_aside.pop((kind, start), None)
        if holding is not None:
            self.release(holding)
        return holding is not None

    @property
    def condemned(self) -> AbstractSet[tuple[PoolKind, int]]:
        """Pages in use, by pool and first slot, that are set aside once they are freed."""
        return self._condemned

    @property
    def set_aside_slots(self) -> SlotCounts:
        """The slots of free pages that are withdrawn. Each plan asks, so this looks at these pages alone."""
        return self.owned_by(self._set_aside.values())

    @property
    def num_set_aside(self) -> int:
        """The number of free pages that are withdrawn."""
        return len(self._set_aside)

    def _free(self, room: Room, kind: PoolKind, extents: tuple[Extent, ...]) -> None:
        """Free ``extents``, which ``room`` had, except for condemned pages, which are set aside now."""
        for condemned_kind, start in tuple(self._condemned):
            if condemned_kind is kind and has_slot(extents, start):
                page = Extent(start, self.page_size)
                extents = _without(extents, page)
                self._condemned.remove((kind, start))
                self._add_set_aside(room, kind, page)
        self._allocators[kind].free(extents)

    def _add_set_aside(self, room: Room, kind: PoolKind, page: Extent) -> None:
        self.num_changes += 1
        self._set_aside[kind, page.start] = Holding(room, Stage.SET_ASIDE, {kind: (page,)})
        self.holdings.add(self._set_aside[kind, page.start])

    def split(self, holding: Holding, kinds: Iterable[PoolKind], num_slots: int) -> Holding:
        """Move the first ``num_slots`` slots that ``holding`` has of each of ``kinds`` to a new holding,
        HELD.

        Raises ValueError for part of a page, or for more slots than there are.
        """
        self._check_known(holding)
        if num_slots % self.page_size:
            raise ValueError(f"room {holding.room}: {num_slots} slots are no whole pages of {self.page_size}")
        first = {kind: slice_extents(holding[kind], 0, num_slots) for kind in kinds}
        self.num_changes += 1
        for kind in first:
            rest = slice_extents(holding[kind], num_slots, holding.num_slots(kind))
            del holding.extents[kind]
            if rest:
                holding.extents[kind] = rest
        split = Holding(holding.room, Stage.HELD, first)
        self.holdings.add(split)
        return split

    def join(self, first: Holding, second: Holding) -> None:
        """Put the slots of ``first`` before those of ``second``; ``first`` must not be used afterwards."""
        self._check_known(first)
        self._check_known(second)
        self.holdings.remove(first)
        for kind, extents in first.extents.items():
            seam = joined((*extents[-1:], *second[kind][:1]))
            second.extents[kind] = (*extents[:-1], *seam, *second[kind][1:])

    def trim(self, holding: Holding, num_slots: int) -> None:
        """Free the slots of ``holding`` beyond the first ``num_slots`` in each of its pools."""
        self._check_known(holding)
        self.num_changes += 1
        for kind, extents in holding.extents.items():
            rest = slice_extents(extents, num_slots, total_length(extents))
            holding.extents[kind] = slice_extents(extents, 0, num_slots)
            self._free(holding.room, kind, rest)

    def release(self, holding: Holding) -> None:
        """Free everything; ``holding`` must not be used afterwards."""
        self.give_up(holding, tuple(holding.extents))
        self.holdings.discard(holding)

    def check_integrity(self, expected: Mapping[Stage, int] | None = None) -> None:
        """Raise PoolIntegrityError unless the conservation law holds for every pool, slot by slot.

        ``expected``: the number of holdings that must be in each stage.
        """
        used = {stage: self.used(stage) for stage in Stage}
        for kind, allocator in self._allocators.items():
            terms = {stage: used[stage][kind] for stage in Stage}
            law = " + ".join([f"free {allocator.num_free}", *(f"{stage} {n}" for stage, n in terms.items())])
            if allocator.num_free + sum(terms.values()) != allocator.num_slots:
                raise PoolIntegrityError(f"{kind} pool: {law} is not total {allocator.num_slots}")
            try:
                allocator.check_integrity(holding[kind] for holding in self.holdings)
            except PoolIntegrityError as error:
                raise PoolIntegrityError(f"{error} [{law} = total {allocator.num_slots}]") from error
        if expected is not None:
            found = {stage: sum(holding.stage is stage for holding in self.holdings) for stage in Stage}
            if wrong := {stage for stage in Stage if found[stage] != expected.get(stage, 0)}:
                detail = ", ".join(
                    f"{s}: {found[s]} found, {expected.get(s, 0)} known" for s in sorted(wrong)
                )
                raise PoolIntegrityError(f"holdings and requests disagree: {detail}")

    def _check_known(self, holding: Holding) -> None:
        if holding not in self.holdings:
            raise PoolIntegrityError(f"room {holding.room}: its holding was released already")


def _without(extents: Iterable[Extent], page: Extent) -> tuple[Extent, ...]:
    """Return ``extents`` without ``page``, which lies in one of them or in none."""
    remaining = []
    for extent in extents:
        if extent.start <= page.start < extent.end:
            parts = ((extent.start, page.start), (page.end, extent.end))
            remaining += [Extent(start, stop - start) for start, stop in parts if start < stop]
        else:
            remaining.append(extent)
    return tuple(remaining)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _granularity(kind: PoolKind, page_size: int) -> int:
    return page_size if kind in TOKEN_POOLS else 1
