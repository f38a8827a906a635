"""The decode node as a tier below this node's own: what it holds of a prompt is read instead of computed.

A Bootstrap says where the decode node has the prompt's first tokens (``HeldKv``). ``PromptPages`` calls
``fetch`` for a waiting request that ``HostTier`` does not hold back, and ``release`` when the request begins
or ends; the engine calls ``returned`` for each read that is over. Whole pages that the device lacks are read
into its pages, KV, indexer keys and row checks; then the request finds them in the cache on the device, as
any others. A wrong row is counted, and the request computes from its page on.

A GPU that reaches the decode node's memory copies the pages as those of main memory, and the request begins
meanwhile (``copies_up.py``). Any other read is a write whose source is the decode node's memory: the same
plans, slices and turns, in a ``Sender`` of its own. A prompt's pages are read in parts, in order, so that
what has come can be used when time is up. Every part is verified before anybody finds its pages.

The decode node owes nothing. A request waits as long as computing the same tokens would take, at least
LEAST_WAIT_SECS, and then goes on with what has arrived. After an error, a wrong row or a late answer the node
is not read from for PAUSE_SECS.

``DecodeTier`` owns the slots that are read into (Stage.LANDING), and those in which bytes may still land
after an error (Stage.QUARANTINED). The decode node keeps the source in use until the room is delivered or
quiet; what arrives after that is not taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final, NamedTuple, Protocol

from hisparse_pd.base.prefill_settings import HeldReads
from hisparse_pd.core.model.layer_arrivals import LayerArrivals
from hisparse_pd.core.paging.extents import (
    extents_to_page_ids,
    extents_to_pages,
    slice_extents,
    total_length,
)
from hisparse_pd.core.paging.pools import Holding, PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import PageRows, WrongItem, rows_of_pages
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS, CopiesUp, Wanted
from hisparse_pd.prefill_node.fresh_pages import FreshPages
from hisparse_pd.prefill_node.lane_source import LaneSource
from hisparse_pd.prefill_node.pace import Pace
from hisparse_pd.prefill_node.pins import Pins
from hisparse_pd.prefill_node.push import SourceRegions
from hisparse_pd.prefill_node.read_plan import ReadPlan
from hisparse_pd.prefill_node.read_quarantine import ReadQuarantine
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.protocol.messages import Room
from hisparse_pd.transfer.lane_memory import Mapping
from hisparse_pd.transfer.plan import SlicedWrites
from hisparse_pd.transfer.sender import Completion, Ready, WriteBatch

log = logging.getLogger(__name__)

MAX_READS: Final = 64
"""Most requests that are read for at a time; the prompts of others are computed."""
READ_SHARE: Final = 2
"""One in so many pages of the device may be read into, or be in quarantine."""
LEAST_SECS: Final = 0.005
"""Tokens that are computed sooner than this are not read: a read takes turns of two threads and a
verification."""
LEAST_WAIT_SECS: Final = 1.0
LONGEST_WAIT_SECS: Final = 30.0
"""Bounds of the time that a request waits for a read, however long computing would take."""
PAUSE_SECS: Final = 10.0
"""Time for which a decode node is not read from after an error, a wrong row or a late answer."""


class Reads(Protocol):
    """Carries out reads, as a ``Sender`` over a ``LaneReader`` does."""

    def submit(self, session: str, batch: WriteBatch) -> None:
        """Take a batch, without waiting. Its completion comes to ``DecodeTier.returned``."""

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
class _Brought:
    """What was read for a waiting request: pages of its prompt from ``first_page`` on."""

    first_page: int
    num_here: int
    """Pages of its prompt that are on the device, or are being copied there; it grows as parts arrive."""


@dataclass(eq=False, slots=True)
class _Read:
    """Pages on their way from a decode node: those of ``keys`` from the first one of ``brought`` on."""

    peer: Peer
    keys: Sequence[PageKey]
    brought: _Brought
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


class DecodeTier:
    """The tier of pages that decode nodes hold, for the requests that they send to one prefill engine.
    ``reads``: None if nothing is ever read. Times are those of ``clock``."""

    def __init__(
        self,
        reads: Reads | None,
        memory: ReadMemory | None,
        which: HeldReads,
        pools: Pools,
        prefixes: PrefixTree,
        set_aside: SetAside,
        copies_up: CopiesUp,
        pins: Pins,
        pace: Pace,
        fresh: FreshPages,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reads = reads
        self._memory = memory
        self._which = which
        self._pools = pools
        self._prefixes = prefixes
        self._set_aside = set_aside
        self._copies_up = copies_up
        self._pins = pins
        self._pace = pace
        self._fresh = fresh
        self._clock = clock
        self._brought: dict[Room, _Brought] = {}
        """What waiting requests were read for; each is read for once."""
        self._under_way: dict[Room, _Read] = {}
        """Reads with parts that are not over, also those of requests that no longer wait."""
        self._quarantine = ReadQuarantine(pools)
        self._paused_until: dict[str, float] = {}
        """Until when sessions are not read from."""
        self.num_read_tokens = 0
        """Tokens that were read since the start, and were right."""
        self.num_read_bytes = 0
        self.num_late = 0
        """Requests that stopped waiting for a read."""
        self.num_failures = 0
        """Reads that ended in an error."""

    # --- what others need to know ----------------------------------------------------------------------

    @property
    def num_landing(self) -> int:
        """Holdings in Stage.LANDING."""
        return len(self._under_way)

    @property
    def num_quarantined(self) -> int:
        """Holdings in Stage.QUARANTINED."""
        return len(self._quarantine)

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for a read."""
        return any(self._wanted())

    @property
    def counters(self) -> dict[str, float]:
        """Monotone metrics, by name."""
        return {
            "held_read_tokens_total": float(self.num_read_tokens),
            "held_read_bytes_total": float(self.num_read_bytes),
            "held_read_late_total": float(self.num_late),
            "held_read_failures_total": float(self.num_failures),
        }

    def fetched(self, room: Room, num_pages: int) -> int:
        """Return how many tokens of the first ``num_pages`` pages of a request's prompt were read for it."""
        brought = self._brought.get(room)
        if brought is None:
            return 0
        return max(0, min(num_pages, brought.num_here) - brought.first_page) * self._pools.page_size

    def _wanted(self) -> Iterator[_Read]:
        return (read for read in self._under_way.values() if read.is_wanted)

    # --- a waiting request -----------------------------------------------------------------------------

    def fetch(self, request: PrefillRequest, num_pages: int, token_ids: bytes | None = None) -> bool:
        """Begin to read what the decode node holds of a waiting request's prompt and the device lacks, if
        that takes less time than computing it. Returns whether the request should wait: for this read, or for
        another one with its pages.

        ``num_pages``: the pages that its whole prompt needs on the device. ``token_ids``: see
        ``PrefixTree.hold``.
        """
        if request.room not in self._brought:
            return self._begin(request, num_pages, token_ids)
        read = self._under_way.get(request.room)
        if read is None:
            return False
        if read.is_wanted and self._clock() >= read.deadline_secs:
            self._give_up_late(request.room, read)
        return read.is_wanted

    def release(self, room: Room) -> None:
        """Forget a request, which begins or ends. What still arrives for it is not taken."""
        if self._brought.pop(room, None) is not None and room in self._under_way:
            self._stop(room, self._under_way[room])

    def _give_up_late(self, room: Room, read: _Read) -> None:
        self.num_late += 1
        self._pause(read.peer)
        self._stop(room, read)

    def _stop(self, room: Room, read: _Read) -> None:
        """Let the request wait no longer, and read no further for it."""
        if read.is_wanted:
            read.is_wanted = False
            if read.num_pending and self._reads is not None:
                self._reads.cancel(room)

    def _pause(self, peer: Peer) -> None:
        now = self._clock()
        self._paused_until = {session: until for session, until in self._paused_until.items() if until > now}
        self._paused_until[peer.session] = now + PAUSE_SECS

    def _begin(self, request: PrefillRequest, num_pages: int, token_ids: bytes | None) -> bool:
        held, page_size = request.bootstrap.held, self._pools.page_size
        if held is None or self._reads is None or self._memory is None:
            return False
        plan = ReadPlan(request.bootstrap, held, request.peer, self._memory.regions, page_size)
        num_tokens = held.num_prefilled_tokens if self._which == "prompts" else total_length(held.kv_extents)
        keys = request.reusable_keys(page_size)[: num_tokens // page_size if plan.has_all else 0]
        num_cached = self._prefixes.num_found(keys, CACHE_POOLS)
        num_missing = len(keys) - num_cached
        secs = self._pace.secs_for(num_missing * page_size)
        if num_missing <= 0 or (secs is not None and secs < LEAST_SECS):
            return False
        if self._clock() < self._paused_until.get(request.peer.session, 0.0):
            return False
        if any(_brings(read, keys, num_cached) for read in self._wanted()):
            return True
        num_usable = self._set_aside.num_usable_pages(PoolKind.DEVICE)
        if not self._pins.fits(request.room, num_pages, num_usable):
            return bool(self._pins)
        num_missing = min(num_missing, num_usable // READ_SHARE - self._num_busy_pages)
        if num_missing <= 0 or len(self._under_way) >= MAX_READS:
            return False
        if self._memory.arrivals is not None and self._copies_up.is_full:
            return True
        before = self._prefixes.use_if_any(keys[:num_cached], CACHE_POOLS)
        need = SlotCounts(device=num_missing * page_size)
        if not need.fits_in(self._pools.free + self._prefixes.unused):
            self._prefixes.let_go(before)
            return False
        self._prefixes.make_room(need)
        keys = keys[: num_cached + num_missing]
        wanted = Wanted(request.room, num_pages, (num_pages - len(keys)) * page_size, token_ids)
        if self._copy(request, wanted, keys, num_cached, plan, self._memory):
            self._prefixes.let_go(before)  # the copy uses it now
            return False
        self._pins.put(request.room, num_pages, before)
        wait_secs = min(max(secs or 0.0, LEAST_WAIT_SECS), LONGEST_WAIT_SECS)
        brought = self._brought[request.room] = _Brought(first_page=num_cached, num_here=num_cached)
        read = self._under_way[request.room] = _Read(
            request.peer,
            keys,
            brought,
            holding=self._pools.reserve(request.room, need),
            deadline_secs=self._clock() + wait_secs,
            token_ids=token_ids,
        )
        self._submit(request.room, read, plan, self._reads, self._memory)
        return True

    def _copy(
        self,
        request: PrefillRequest,
        wanted: Wanted,
        keys: Sequence[PageKey],
        first_page: int,
        plan: ReadPlan,
        memory: ReadMemory,
    ) -> bool:
        """Begin to copy the pages of ``keys`` from ``first_page`` on, where a GPU here reaches the decode
        node's memory, and the prefix tree takes them before they have arrived. Returns whether it did."""
        if memory.arrivals is None or not self._prefixes.fit_one_more_run(keys, CACHE_POOLS):
            return False
        pinned = memory.pinned(request.peer.session)
        if pinned is None:
            return False
        brought = self._brought[request.room] = _Brought(first_page, len(keys))

        def ended(num_right: int) -> None:
            brought.num_here = first_page + num_right
            self.num_read_tokens += num_right * self._pools.page_size

        source = LaneSource(
            request,
            plan,
            first_page * self._pools.page_size,
            pinned,
            memory.arrivals,
            partial(self._note_wrong, request.peer),
            ended,
        )
        if self._copies_up.begin(source, wanted, keys, first_page):
            self.num_read_bytes += (len(keys) - first_page) * plan.page_bytes
        else:
            self.num_failures += 1
            self._pause(request.peer)
        return True

    def _submit(self, room: Room, read: _Read, plan: ReadPlan, reads: Reads, memory: ReadMemory) -> None:
        """Submit the parts of a read."""
        page_size, slots = self._pools.page_size, read.holding[PoolKind.DEVICE]
        ready = memory.void(extents_to_pages(slots, page_size))
        session, first = read.peer.session, read.brought.first_page
        part_bytes = memory.part_bytes(session)
        part_pages = max(1, part_bytes // plan.page_bytes)
        for start in range(first, len(read.keys), part_pages):
            stop = min(start + part_pages, len(read.keys))
            here = slice_extents(slots, (start - first) * page_size, (stop - first) * page_size)
            part = SlicedWrites(plan.pools(start * page_size, here), part_bytes)
            batch = WriteBatch(room, stop, part, part.num_bytes, read.deadline_secs, ready=ready)
            read.num_pending += 1
            reads.submit(session, batch)

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
            self.num_read_bytes += completion.num_bytes
        if read.is_wanted and completion.ok:
            if not self._take(room, read, stop=completion.tag):
                self._stop(room, read)
        elif read.is_wanted and self._clock() >= read.deadline_secs:
            self._give_up_late(room, read)
        elif read.is_wanted:
            what = f"room {room}: reading what decode node {read.peer.node_id} holds"
            log.warning("%s: %s", what, completion.error)
            self.num_failures += 1
            self._pause(read.peer)
            self._stop(room, read)
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
        if start and (before is None or before.is_dropped):  # a page before them was found wrong meanwhile
            return False
        end = start + self._num_right_pages(read, stop)
        if end > start:
            num_held = self._prefixes.hold(
                read.holding, read.keys[:end], CACHE_POOLS, start, token_ids=read.token_ids
            )
            if num_held < end:  # the sequence has too many runs
                return False
            read.brought.num_here = end
            self.num_read_tokens += (end - start) * page_size
            self._pins.keep(room, self._prefixes.use(read.keys[:end], CACHE_POOLS))
        return end == stop

    def _num_right_pages(self, read: _Read, stop: int) -> int:
        """Verify the rows of a part. Returns the number of pages before the first with a wrong row."""
        assert self._memory is not None
        page_size, start = self._pools.page_size, read.brought.num_here
        page_ids = extents_to_page_ids(read.holding[PoolKind.DEVICE], page_size)
        rows = rows_of_pages(page_ids, page_size, start * page_size, stop * page_size)
        wrong = self._memory.wrong_items(rows, page_size)
        self._note_wrong(read.peer, wrong)
        num_right = min((item.position // page_size - start for item in wrong), default=stop - start)
        self._fresh.note(page_ids[:num_right])
        return num_right

    def _note_wrong(self, peer: Peer, items: Sequence[WrongItem]) -> None:
        """Count rows that came wrong from a decode node, and read nothing from it for a while."""
        for item in items:
            self._set_aside.count_wrong(
                "decode",
                f"the KV of layer {item.layer}, position {item.position}, that decode node "
                f"{peer.node_id} holds is not what was written (decode): its check is "
                f"{item.actual:#010x}, expected {item.expected:#010x}",
            )
        if items:
            self._pause(peer)

    # --- pools and tree --------------------------------------------------------------------------------

    @property
    def _num_busy_pages(self) -> int:
        """Pages that are read into, or in quarantine."""
        holdings = chain((read.holding for read in self._under_way.values()), self._quarantine)
        return self._pools.owned_by(holdings).device // self._pools.page_size


def _brings(read: _Read, keys: Sequence[PageKey], number: int) -> bool:
    """Whether page ``number`` of ``keys`` is among those that are read."""
    return read.brought.first_page <= number < len(read.keys) and read.keys[number] == keys[number]
