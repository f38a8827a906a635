"""The decode node as a tier below this node's own: what it holds of a prompt is read instead of computed.

A Bootstrap says where the decode node has the prompt's first tokens (``HeldKv``). ``PromptPages`` calls
``fetch`` for a waiting request that ``HostTier`` does not hold back, and ``release`` when the request begins
or ends. Whole pages that the device lacks are read into its pages, KV, indexer keys and row checks; then the
request finds them in the cache on the device, as any others. A wrong row is counted, and the request computes
from its page on.

A GPU that reaches the decode node's memory copies the pages as those of main memory, and the request begins
meanwhile (``copies_up.py``, ``lane_source.py``). Any other read comes in parts (``part_reads.py``).

The decode node owes nothing. A request waits as long as computing the same tokens would take, at least
LEAST_WAIT_SECS, and then goes on with what has arrived. After an error, a wrong row or a late answer the node
is not read from for a while (``peer_pauses.py``). The decode node keeps the source in use until the room is
delivered or quiet; what arrives after that is not taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from hisparse_pd.base.prefill_settings import HeldReads
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS, CopiesUp, Wanted
from hisparse_pd.prefill_node.fresh_pages import FreshPages
from hisparse_pd.prefill_node.lane_source import LaneSource
from hisparse_pd.prefill_node.pace import Pace
from hisparse_pd.prefill_node.part_reads import Brought, PartReads, ReadCounts, ReadMemory, Reads
from hisparse_pd.prefill_node.peer_pauses import PeerPauses
from hisparse_pd.prefill_node.pins import Pins
from hisparse_pd.prefill_node.read_plan import ReadPlan
from hisparse_pd.prefill_node.requests import PrefillRequest
from hisparse_pd.protocol.messages import Room

MAX_READS: Final = 64
"""Most requests that are read for in parts at a time; the prompts of others are computed."""
READ_SHARE: Final = 2
"""One in so many pages of the device may be read into, or be in quarantine."""
LEAST_SECS: Final = 0.005
"""Tokens that are computed sooner than this are not read: a read takes turns of two threads and a
verification."""
LEAST_WAIT_SECS: Final = 1.0
LONGEST_WAIT_SECS: Final = 30.0
"""Bounds of the time that a request waits for a read, however long computing would take."""


class DecodeTier:
    """The tier of pages that decode nodes hold, for the requests that they send to one prefill engine.
    ``reads``: carries out reads in parts. Times are those of ``clock``."""

    def __init__(
        self,
        reads: Reads,
        memory: ReadMemory,
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
        self._memory = memory
        self._which = which
        self._pools = pools
        self._prefixes = prefixes
        self._set_aside = set_aside
        self._copies_up = copies_up
        self._pins = pins
        self._pace = pace
        self.pauses = PeerPauses(set_aside, clock)
        self.counts = ReadCounts()
        self.parts = PartReads(reads, memory, pools, prefixes, pins, fresh, self.pauses, self.counts, clock)
        """The reads that come in parts."""
        self._brought: dict[Room, Brought] = {}
        """What waiting requests were read for; each is read for once."""

    @property
    def counters(self) -> dict[str, float]:
        """Monotone metrics, by name."""
        return {
            "held_read_tokens_total": float(self.counts.num_tokens),
            "held_read_bytes_total": float(self.counts.num_bytes),
            "held_read_late_total": float(self.counts.num_late),
            "held_read_failures_total": float(self.counts.num_failures),
        }

    def fetched(self, room: Room, num_pages: int) -> int:
        """Return how many tokens of the first ``num_pages`` pages of a request's prompt were read for it."""
        brought = self._brought.get(room)
        if brought is None:
            return 0
        return max(0, min(num_pages, brought.num_here) - brought.first_page) * self._pools.page_size

    def fetch(self, request: PrefillRequest, num_pages: int, token_ids: bytes | None = None) -> bool:
        """Begin to read what the decode node holds of a waiting request's prompt and the device lacks, if
        that takes less time than computing it. Returns whether the request should wait: for this read, for
        another one with its pages, or for the copies of as many others as a forward takes.

        ``num_pages``: the pages that its whole prompt needs on the device. ``token_ids``: see
        ``PrefixTree.hold``.
        """
        if request.room in self._brought:
            return self.parts.still_waits(request.room)
        return self._begin(request, num_pages, token_ids)

    def release(self, room: Room) -> None:
        """Forget a request, which begins or ends. What still arrives for it in parts is not taken."""
        if self._brought.pop(room, None) is not None:
            self.parts.stop(room)

    def _begin(self, request: PrefillRequest, num_pages: int, token_ids: bytes | None) -> bool:
        held, page_size = request.bootstrap.held, self._pools.page_size
        if held is None or self._which == "off":
            return False
        if request.room in self.parts:  # it has begun anew, and its last read is not over
            return False
        plan = ReadPlan(request.bootstrap, held, request.peer, self._memory.regions, page_size)
        num_tokens = held.num_prefilled_tokens if self._which == "prompts" else request.num_readable_tokens
        keys = request.reusable_keys(page_size)[: num_tokens // page_size if plan.has_all else 0]
        num_cached = self._prefixes.num_found(keys, CACHE_POOLS)
        num_missing = len(keys) - num_cached
        secs = self._pace.secs_for(num_missing * page_size)
        if num_missing <= 0 or (secs is not None and secs < LEAST_SECS):
            return False
        if self.pauses.is_paused(request.peer):
            return False
        if self.parts.brings(keys, num_cached):
            return True
        num_usable = self._set_aside.num_usable_pages(PoolKind.DEVICE)
        if not self._pins.fits(request.room, num_pages, num_usable):
            return self._pins.hold_others_back
        num_missing = min(num_missing, num_usable // READ_SHARE - self.parts.num_busy_pages)
        if num_missing <= 0 or len(self.parts) >= MAX_READS:
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
        if self._copy(request, wanted, keys, num_cached, plan):
            self._prefixes.let_go(before)  # the copy uses it now
            return False
        self._pins.put(request.room, num_pages, before)
        wait_secs = min(max(secs or 0.0, LEAST_WAIT_SECS), LONGEST_WAIT_SECS)
        brought = self._brought[request.room] = Brought(first_page=num_cached, num_here=num_cached)
        self.parts.begin(request.room, request.peer, plan, keys, brought, wait_secs, token_ids)
        return True

    def _copy(
        self,
        request: PrefillRequest,
        wanted: Wanted,
        keys: Sequence[PageKey],
        first_page: int,
        plan: ReadPlan,
    ) -> bool:
        """Begin to copy the pages of ``keys`` from ``first_page`` on, where a GPU here reaches the decode
        node's memory, and the prefix tree takes them before they have arrived. Returns whether a copy was
        tried: after one that failed at once, the request is computed instead."""
        arrivals = self._memory.arrivals
        if arrivals is None or not self._prefixes.fit_one_more_run(keys, CACHE_POOLS):
            return False
        memory = self._memory.pinned(request.peer.session)
        if memory is None:
            return False
        brought = self._brought[request.room] = Brought(first_page, len(keys))

        def ended(num_right: int) -> None:
            brought.num_here = first_page + num_right
            self.counts.num_tokens += num_right * self._pools.page_size

        source = LaneSource(
            request,
            plan,
            first_page * self._pools.page_size,
            memory,
            arrivals,
            partial(self.pauses.note_wrong, request.peer),
            ended,
        )
        if self._copies_up.begin(source, wanted, keys, first_page):
            self.counts.num_bytes += (len(keys) - first_page) * plan.page_bytes
        else:
            self.counts.num_failures += 1
            self.pauses.pause(request.peer)
        return True
