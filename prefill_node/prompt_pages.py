"""The pages of a prefill engine's prompts: what the cache and its tiers have of them, and who owns the slots.

``PromptPages`` owns the pools, the prefix cache on the device, the tiers below it, and the copies between
them. ``PrefillLife`` calls ``look_up`` and ``fetch`` for a waiting request, ``use_cached`` and then
``reserve`` when it is admitted, ``cache`` once its prompt is computed, ``drain`` where it has failed and
writes still read its pages, and ``release`` when it ends, which also lets the tiers below have its prompt. A
request's prefix, holding and page ids change here only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from hisparse_pd.base.prefill_settings import HeldReads
from hisparse_pd.core.paging.extents import extents_to_pages
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, page_keys
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.prefill_node.copies_up import CACHE_POOLS, CopiesUp, RowChecks
from hisparse_pd.prefill_node.decode_tier import DecodeTier
from hisparse_pd.prefill_node.fresh_pages import FreshPages
from hisparse_pd.prefill_node.host_pages import HostPages
from hisparse_pd.prefill_node.host_tier import HostTier
from hisparse_pd.prefill_node.pace import Pace
from hisparse_pd.prefill_node.part_reads import ReadMemory, Reads
from hisparse_pd.prefill_node.pins import Pins
from hisparse_pd.prefill_node.requests import PrefillRequest, PrefillRequests, PrefillState
from hisparse_pd.prefill_node.scheduler import StepLimits, Waiting
from hisparse_pd.prefill_node.store_tier import Orders, StoreTier
from hisparse_pd.protocol.messages import Bootstrap, FetchedTokens


class PromptPages:
    """The slots of one prefill engine, the prefix cache, and the tiers below it."""

    def __init__(
        self,
        limits: StepLimits,
        num_aux_slots: int,
        *,
        checks: RowChecks,
        use_prefix_cache: bool,
        held_reads: Reads,
        read_memory: ReadMemory,
        which_held: HeldReads = "all",
        host_pages: HostPages | None = None,
        store_orders: Orders | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``checks``: verify rows. ``host_pages``: main memory below the prefix cache, if there is any;
        ``store_orders``: what carries out orders to the store below it, if there is one. ``held_reads``,
        ``read_memory``, ``which_held``: see ``DecodeTier``. ``clock``: that of the tiers' times."""
        self.page_size = limits.page_size
        self._limits = limits
        self._use_prefix_cache = use_prefix_cache
        self.pools = Pools(
            SlotCounts(
                host=0 if host_pages is None else host_pages.num_slots,
                device=limits.num_pages * limits.page_size,
                aux=num_aux_slots,
            ),
            limits.page_size,
        )
        self.prefixes = PrefixTree(self.pools)
        """The prefix cache: KV of prompts that were computed."""
        self.set_aside = SetAside(self.pools, self.prefixes, "prefill")
        """Pages in which a wrong row was found: nobody gets them again."""
        self.pace = Pace()
        self.fresh = FreshPages(limits.num_pages, clock)
        self.pins = Pins(self.prefixes)
        self.copies_up = CopiesUp(
            self.pools, self.prefixes, checks, self.fresh, self.pins, limits.chunk_tokens
        )
        """Pages on their way to the device that may be used meanwhile."""
        store = None
        if store_orders is not None:
            store = StoreTier(store_orders, self.pools, self.prefixes, self.set_aside, clock, self.pace)
        self.tier = HostTier(
            host_pages,
            self.pools,
            self.prefixes,
            self.set_aside,
            self.copies_up,
            self.pins,
            store,
        )
        """The tiers below the device, main memory and the store, which keep prompts that were computed."""
        self.decode_tier = DecodeTier(
            held_reads,
            read_memory,
            which_held,
            self.pools,
            self.prefixes,
            self.set_aside,
            self.copies_up,
            self.pins,
            self.pace,
            self.fresh,
            clock,
        )
        """The tier of what decode nodes hold of their requests' prompts."""

    def keys_of(self, message: Bootstrap) -> Sequence[PageKey]:
        """Return the keys of all whole pages of a Bootstrap's prompt; none without a prefix cache."""
        if not self._use_prefix_cache:
            return ()
        return page_keys(message.root, message.prompt, self.page_size)

    @property
    def num_available_pages(self) -> int:
        """Pages on the device that requests can get: free ones, and cached ones without users."""
        return (self.pools.free + self.prefixes.unused).device // self.page_size

    # --- a waiting request ---------------------------------------------------------------------------

    def look_up(self, request: PrefillRequest) -> Waiting:
        """Return a waiting request for the scheduler, with what the prefix cache has of its prompt."""
        # Pages that must be computed in any case, for the hint or for scores, are not looked up.
        keys = request.reusable_keys(self.page_size)
        found = self.prefixes.find(keys, CACHE_POOLS)
        parts = () if found is None else tuple(found.parts())
        num_cached_pages = sum(num_pages for _, num_pages in parts)
        num_unused_pages = sum(num_pages for prefix, num_pages in parts if not prefix.num_users)
        return Waiting(
            request.room,
            request.num_computed_tokens,
            keys,
            num_cached_pages,
            num_unused_pages,
            is_arriving=any(prefix.is_arriving for prefix, _ in parts),
        )

    def fetch(self, request: PrefillRequest, waiting: Waiting) -> bool:
        """Begin to bring pages of a waiting request's prompt to the device, from the store or main memory or
        else from its decode node. Returns whether the request should wait for pages on their way."""
        num_pages = self._limits.pages_for(waiting.num_tokens)
        token_ids = self._published_ids(request)
        return self.tier.fetch(waiting.room, waiting.keys, num_pages, token_ids) or self.decode_tier.fetch(
            request, num_pages, token_ids
        )

    def unpin(self) -> bool:
        """Let go of all that has arrived for waiting requests, once nothing is on its way. Returns whether
        anything was let go.

        The engine calls it when nothing can be computed: a request in front may need what is kept for one
        behind it. Nothing is fetched twice for a request, so one that finds it evicted computes it.
        """
        is_moving = self.decode_tier.parts.is_awaited or self.num_copies > 0
        return not is_moving and self.pins.let_go_all()

    # --- copies --------------------------------------------------------------------------------------

    @property
    def num_copies(self) -> int:
        """Copies to the device and to main memory under way."""
        return len(self.copies_up) + self.tier.num_copies_down

    def poll(self) -> None:
        """End the copies that are over, and take what the store has read. Called in each turn."""
        self.copies_up.end()
        self.tier.poll()
        self.decode_tier.parts.poll()

    def settle(self) -> None:
        """Wait until all copies are over, which takes some milliseconds: they use nothing any more."""
        self.copies_up.wait()
        self.tier.settle()

    # --- from admission to the end -------------------------------------------------------------------

    def use_cached(self, request: PrefillRequest) -> None:
        """Let an admitted request use the cached prefix of its prompt. All requests of a plan do so before
        ``reserve`` is called for the first one, because that may evict unused prefixes."""
        keys = request.reusable_keys(self.page_size)
        if (found := self.prefixes.find(keys, CACHE_POOLS)) is not None:
            request.prefix = self.prefixes.use(keys[: found.num_pages], CACHE_POOLS)
            request.fetched = replace(
                self.tier.fetched(request.room, found.num_pages),
                decode=self.decode_tier.fetched(request.room, found.num_pages),
            )
        self._release_tiers(request)

    def reserve(self, request: PrefillRequest) -> None:
        """Reserve all pages that an admitted request's prompt takes behind its cached prefix, and an aux
        slot. Raises PoolExhausted."""
        num_cached_pages = 0 if request.prefix is None else request.prefix.end_page
        num_new_pages = self._limits.pages_for(request.num_computed_tokens) - num_cached_pages
        need = SlotCounts(device=num_new_pages * self.page_size, aux=1)
        self.prefixes.make_room(need)
        request.holding = self.pools.reserve(request.room, need, Stage.RUNNING)
        cached = () if request.prefix is None else request.prefix.extents(PoolKind.DEVICE)
        request.page_ids = extents_to_pages(cached + request.holding[PoolKind.DEVICE], self.page_size)
        self.fresh.forget(request.page_ids[num_cached_pages:])
        request.num_cached_tokens = request.num_ready_tokens = num_cached_pages * self.page_size

    def cache(self, request: PrefillRequest) -> None:
        """Put the pages of a prompt that is computed whole into the cache. Where the cache has got an equal
        page from another request meanwhile, this one keeps its own copy, which its writes read."""
        if request.holding is not None:
            token_ids = self._published_ids(request)
            request.prefix = self.prefixes.share(
                request.holding,
                request.keys,
                CACHE_POOLS,
                request.prefix,
                keeps_copies=True,
                token_ids=token_ids,
            )

    def drain(self, request: PrefillRequest) -> None:
        """Note that a request has failed, and that writes in flight still read its pages."""
        if request.holding is not None:
            self.pools.move(request.holding, Stage.ENDING)

    def release(self, request: PrefillRequest) -> None:
        """Let go of all pages and slots of a request that ends, of which nothing may be in flight.

        Main memory gets a copy of a prompt that is computed whole now, and not before: until here the
        request's own writes need the link.
        """
        if request.prefix is not None:
            if request.is_computed:
                self.tier.store(request.room, request.keys, self._published_ids(request))
            self.prefixes.let_go(request.prefix)
        self._release_tiers(request)
        if request.holding is not None:
            self.pools.release(request.holding)
        request.prefix, request.holding, request.page_ids = None, None, []

    def take_back(self, request: PrefillRequest) -> None:
        """Undo an admission, after which nothing of the request's KV was used."""
        request.num_cached_tokens = request.num_ready_tokens = 0
        request.fetched = FetchedTokens()
        self.release(request)

    def _release_tiers(self, request: PrefillRequest) -> None:
        """Let go of what lower tiers have brought for a request that begins or ends."""
        self.decode_tier.release(request.room)
        self.tier.release(request.room)
        self.pins.release(request.room)

    def _published_ids(self, request: PrefillRequest) -> bytes | None:
        """Return the packed ids of a prompt whose pages others may know of; None for one with an isolation
        key, and if nobody listens."""
        message = request.bootstrap
        is_published = self.prefixes.listener is not None and message.root == NO_ISOLATION
        return message.prompt if is_published else None

    # --- accounts ------------------------------------------------------------------------------------

    def check_integrity(self, requests: PrefillRequests) -> None:
        """Raise PoolIntegrityError unless every slot is free, cached, set aside or owned by exactly one of
        ``requests``, which are all live ones."""
        self.pools.check_integrity(
            {
                Stage.LANDING: self.tier.num_landing + len(self.decode_tier.parts),
                Stage.RUNNING: requests.count(PrefillState.COMPUTING, PrefillState.SENDING),
                Stage.ENDING: requests.count(PrefillState.DRAINING),
                Stage.QUARANTINED: self.tier.num_quarantined + self.decode_tier.parts.num_quarantined,
                Stage.HELD: len(self.prefixes),
                Stage.SET_ASIDE: self.pools.num_set_aside,
            }
        )
        users = [request.prefix for request in requests if request.prefix is not None]
        copied = *self.tier.users(), *self.copies_up.users(), *self.pins.users()
        self.prefixes.check_integrity((*users, *copied))
