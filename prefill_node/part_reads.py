"""Reads of what decode nodes hold, over a network or by a CPU: in parts, of which each is verified when it is
here, before anybody finds its pages.

``DecodeTier`` calls ``begin`` for a waiting request, ``still_waits`` in each plan, and ``stop`` when the
request begins or ends; the engine calls ``returned`` for each part that is over, and ``poll`` in each turn. A
read is a write whose source is the decode node's memory: the same plans, slices and turns, in a ``Sender`` of
its own. Parts come in order, so that what has come can be used when time is up.

``PartReads`` owns the slots that are read into (Stage.LANDING), and those in which bytes may still land after
an error (Stage.QUARANTINED). Nothing is taken for a request that has stopped: the decode node may have
written over what it held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

from hisparse_pd.core.model.layer_arrivals import LayerArrivals
from hisparse_pd.core.paging.extents import extents_to_page_ids, extents_to_pages, slice_extents
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix import end_of
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.kernels.row_check import PageRows, WrongItem, rows_of_pages
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS
from hisparse_pd.prefill_node.fresh_pages import FreshPages
from hisparse_pd.prefill_node.peer_pauses import PeerPauses
from hisparse_pd.prefill_node.pins import Pins
from hisparse_pd.prefill_node.push import SourceRegions
from hisparse_pd.prefill_node.read_plan import ReadPlan
from hisparse_pd.prefill_node.read_quarantine import ReadQuarantine
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.protocol.messages import Room
from hisparse_pd.transfer.lane_memory import Mapping
from hisparse_pd.transfer.plan import SlicedWrites
from hisparse_pd.transfer.sender import Completion, Ready, WriteBatch

log = logging.getLogger(__name__)


class Reads(Protocol):
    """Carries out reads, as a ``Sender`` over a ``LaneReader`` does."""

    def submit(self, session: str, batch: WriteBatch) -> None:
        """Take a batch, without waiting. Its completion comes to ``PartReads.returned``."""

    def cancel(self, room: Room) -> bool:
        """Fail the batches of a room that have not started, and end one that has early."""


class ReadMemory(NamedTuple):
    """This node's memory as reads need it. ``regions``: where it lies. ``void``: makes the checks of pages
    wrong, so that nobody takes what they have for what is to be read into them; it returns what to wait for
    before bytes may land. ``wrong_items``: see ``PrefillMemory``. ``part_bytes``: most bytes of a part, by
    session. ``pinned``: see ``Lanes``. ``arrivals``: of copies up; None without a GPU."""

    regions: SourceRegions
    void: Callable[[Sequence[int]], Ready | None]
    wrong_items: Callable[[PageRows, int], list[WrongItem]]
    part_bytes: Callable[[str], int]
    pinned: Callable[[str], Mapping | None]
    arrivals: LayerArrivals | None


@dataclass(eq=False, slots=True)
class Brought:
    """What was read for a waiting request: pages of its prompt from ``first_page`` on."""

    first_page: int
    num_here: int
    """Pages of its prompt that are on the device, or are being copied there; it grows as parts arrive."""


@dataclass(slots=True)
class ReadCounts:
    """Monotone counts of reads."""

    num_tokens: int = 0
    """Tokens that were right."""
    num_bytes: int = 0
    num_late: int = 0
    """Requests that stopped waiting for a read."""
    num_failures: int = 0
    """Reads that ended in an error."""


@dataclass(eq=False, slots=True)
class _Read:
    """Pages on their way from a decode node: those of ``keys`` from the first one of ``brought`` on."""

    peer: Peer
    keys: Sequence[PageKey]
    brought: Brought
    holding: Holding
    """The slots of the pages that have not arrived."""
    deadline_secs: float
    token_ids: bytes | None
    """See ``PrefixTree.hold``."""
    num_pending: int = 0
    """Parts that are not over."""
    may_still_land: bool = False
    """Whether bytes may land in the holding even after all parts are over."""
    is_wanted: bool = True
    """Whether the request waits for more."""


class PartReads:
    """The reads in parts of one engine. ``pauses``: learns which nodes failed. Times are those of
    ``clock``."""

    def __init__(
        self,
        reads: Reads,
        memory: ReadMemory,
        pools: Pools,
        prefixes: PrefixTree,
        pins: Pins,
        fresh: FreshPages,
        pauses: PeerPauses,
        counts: ReadCounts,
        clock: Callable[[], float],
    ) -> None:
        self._reads = reads
        self._memory = memory
        self._pools = pools
        self._prefixes = prefixes
        self._pins = pins
        self._fresh = fresh
        self._pauses = pauses
        self._counts = counts
        self._clock = clock
        self._under_way: dict[Room, _Read] = {}
        """Reads with parts that are not over, also those of requests that no longer wait."""
        self._quarantine = ReadQuarantine(pools)

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, room: Room) -> bool:
        """Whether a room has parts that are not over, wanted or not."""
        return room in self._under_way

    @property
    def num_quarantined(self) -> int:
        """Holdings in Stage.QUARANTINED."""
        return len(self._quarantine)

    @property
    def num_busy_pages(self) -> int:
        """Pages that are read into, or in quarantine."""
        holdings = chain((read.holding for read in self._under_way.values()), self._quarantine)
        return self._pools.owned_by(holdings).device // self._pools.page_size

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for a read."""
        return any(self._wanted())

    def brings(self, keys: Sequence[PageKey], number: int) -> bool:
        """Return whether page ``number`` of ``keys`` is among those that are read for somebody who waits."""
        return any(
            read.brought.first_page <= number < len(read.keys) and read.keys[number] == keys[number]
            for read in self._wanted()
        )

    def _wanted(self) -> Iterator[_Read]:
        return (read for read in self._under_way.values() if read.is_wanted)

    # --- a waiting request -----------------------------------------------------------------------------

    def begin(
        self,
        room: Room,
        peer: Peer,
        plan: ReadPlan,
        keys: Sequence[PageKey],
        brought: Brought,
        wait_secs: float,
        token_ids: bytes | None,
    ) -> None:
        """Begin to read the pages of ``keys`` from the first one of ``brought`` on, for which the device has
        room. The request is pinned, and waits for ``wait_secs`` at most. ``token_ids``: see
        ``PrefixTree.hold``."""
        num_tokens = (len(keys) - brought.first_page) * self._pools.page_size
        holding = self._pools.reserve(room, SlotCounts(device=num_tokens))
        deadline_secs = self._clock() + wait_secs
        read = self._under_way[room] = _Read(peer, keys, brought, holding, deadline_secs, token_ids)
        self._submit(room, read, plan)

    def _submit(self, room: Room, read: _Read, plan: ReadPlan) -> None:
        """Submit the parts of a read."""
        page_size, slots = self._pools.page_size, read.holding[PoolKind.DEVICE]
        ready = self._memory.void(extents_to_pages(slots, page_size))
        session, first = read.peer.session, read.brought.first_page
        part_bytes = self._memory.part_bytes(session)
        part_pages = max(1, part_bytes // plan.page_bytes)
        for start in range(first, len(read.keys), part_pages):
            stop = min(start + part_pages, len(read.keys))
            here = slice_extents(slots, (start - first) * page_size, (stop - first) * page_size)
            part = SlicedWrites(plan.pools(start * page_size, here), part_bytes)
            batch = WriteBatch(room, stop, part, part.num_bytes, read.deadline_secs, ready=ready)
            read.num_pending += 1
            self._reads.submit(session, batch)

    def still_waits(self, room: Room) -> bool:
        """Return whether a request should wait for more of its read; it does not once its time is up."""
        read = self._under_way.get(room)
        if read is None:
            return False
        if read.is_wanted and self._clock() >= read.deadline_secs:
            self._give_up_late(room, read)
        return read.is_wanted

    def stop(self, room: Room) -> None:
        """Read no further for a request, if it still waits. What still arrives for it is not taken."""
        read = self._under_way.get(room)
        if read is not None and read.is_wanted:
            read.is_wanted = False
            if read.num_pending:
                self._reads.cancel(room)

    def _give_up_late(self, room: Room, read: _Read) -> None:
        self._counts.num_late += 1
        self._pauses.pause(read.peer)
        self.stop(room)

    # --- answers ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Free the slots of failed reads whose time is over."""
        self._quarantine.free_due(self._clock())

    def returned(self, completion: Completion) -> None:
        """Take a part that is over: what is right of it, if its request still waits."""
        room, read = completion.room, self._under_way[completion.room]
        read.num_pending -= 1
        read.may_still_land |= completion.may_still_land
        if completion.ok:
            self._counts.num_bytes += completion.num_bytes
        if read.is_wanted and completion.ok:
            if not self._take(room, read, stop=completion.tag):
                self.stop(room)
        elif read.is_wanted and self._clock() >= read.deadline_secs:
            self._give_up_late(room, read)
        elif read.is_wanted:
            what = f"room {room}: reading what decode node {read.peer.node_id} holds"
            log.warning("%s: %s", what, completion.error)
            self._counts.num_failures += 1
            self._pauses.pause(read.peer)
            self.stop(room)
        if read.num_pending:
            return
        read.is_wanted = False
        del self._under_way[room]
        if read.may_still_land:
            self._quarantine.add(read.holding, self._clock())
        else:
            self._pools.release(read.holding)

    def _take(self, room: Room, read: _Read, stop: int) -> bool:
        """Put the pages of a part that has arrived into the tree, up to page ``stop`` or the first with a
        wrong row. Returns whether further parts can follow."""
        page_size, start = self._pools.page_size, read.brought.num_here
        before = self._pins.prefix(room)
        # A page before them may have been found wrong meanwhile. If a copy to the device brought it for the
        # same request, that has kept the pages before the wrong one, and no more (``copies_up.py``).
        if end_of(before) < start or (before is not None and before.is_dropped):
            return False
        end = start + self._num_right_pages(read, stop)
        if end > start:
            num_held = self._prefixes.hold(
                read.holding, read.keys[:end], CACHE_POOLS, start, token_ids=read.token_ids
            )
            if num_held < end:  # the sequence has too many runs
                return False
            read.brought.num_here = end
            self._counts.num_tokens += (end - start) * page_size
            self._pins.keep(room, self._prefixes.use(read.keys[:end], CACHE_POOLS))
        return end == stop

    def _num_right_pages(self, read: _Read, stop: int) -> int:
        """Verify the rows of a part. Returns the number of pages before the first with a wrong row."""
        page_size, start = self._pools.page_size, read.brought.num_here
        page_ids = extents_to_page_ids(read.holding[PoolKind.DEVICE], page_size)
        rows = rows_of_pages(page_ids, page_size, start * page_size, stop * page_size)
        wrong = self._memory.wrong_items(rows, page_size)
        self._pauses.note_wrong(read.peer, wrong)
        num_right = min((item.position // page_size - start for item in wrong), default=stop - start)
        self._fresh.note(page_ids[:num_right])
        return num_right
