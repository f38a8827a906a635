"""Owns the books: which requests are live, the state of each, and the slots that it owns.

``request_index.py`` finds them. The books are pure, so that every order of moves is tested without memory,
tables or sockets. Only ``queue_moves.py``, ``plan_moves.py`` and ``end_moves.py`` make moves, and do the rest
of each around the call. Every way out ends in ``release``, which decides whether slots are free at once or
quarantined. All moves of slots are in this one module, long as it is, because each relies on what the others
leave.
"""

from __future__ import annotations

from itertools import chain

from hisparse_pd.base.vocabulary import Mode
from hisparse_pd.core.model.side_stream import CopyFailed
from hisparse_pd.core.paging.pools import (
    TOKEN_POOLS,
    Holding,
    PoolKind,
    Pools,
    SlotCounts,
    Stage,
    round_up,
)
from hisparse_pd.core.paging.prefix import end_of, is_on_its_way
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION
from hisparse_pd.decode_node.dense_tier import DenseTier
from hisparse_pd.decode_node.held_tier import HeldTier, PageCopies
from hisparse_pd.decode_node.quarantine import Quarantine, Quarantined
from hisparse_pd.decode_node.request import KV_POOLS, RESIDENT_POOLS, Request
from hisparse_pd.decode_node.request_index import DuplicateRoom, RequestIndex
from hisparse_pd.decode_node.request_states import RequestState
from hisparse_pd.decode_node.step_plan import Admission, Exchange, Fill
from hisparse_pd.engine.set_aside import SetAside


class LiveRequests(RequestIndex):
    """All requests between their arrival and their end, and their slots. Times are those of
    ``time.monotonic``.

    ``copies``: see ``HeldTier`` and ``DenseTier``.
    """

    def __init__(self, pools: Pools, quarantine_secs: float, copies: PageCopies | None = None) -> None:
        super().__init__()
        self.pools = pools
        self.held = PrefixTree(pools)
        self.held_tier = HeldTier(self.held, pools.page_size, copies)
        self.dense_tier = DenseTier(self.held, pools, copies)
        self.set_aside = SetAside(pools, self.held, "decode")
        self.quarantine = Quarantine(quarantine_secs, self._release_quarantined)
        self._num_admitted = 0
        """The next ``Request.admitted_seq``."""

    @property
    def available(self) -> SlotCounts:
        """Slots that requests can get: free ones, and held ones without users."""
        return self.pools.free + self.held.unused

    # --- until a request runs -------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """Take a new request in. Raises DuplicateRoom, and then the request that has the room stays."""
        if request.room in self.quarantine:
            raise DuplicateRoom(
                f"bootstrap_room {request.room} is quarantined after a failed transfer on this node; send "
                "another room"
            )
        self._add(request)

    def use_held(self, admission: Admission) -> None:
        """Let a request use the held pages of its prompt, so that they are not evicted."""
        request, keys = admission.request, admission.request.usable_keys[: admission.num_shared_pages]
        if keys:
            kinds = KV_POOLS[admission.mode]
            num_here = self.held.num_found(keys, kinds)
            if num_here:
                request.prefix = self.held.use(keys[:num_here], kinds)
            if num_here < len(keys):  # ``reserve`` brings the others to the device
                request.source_prefix = self.held.use_stored(keys, KV_POOLS[Mode.HISPARSE])
        request.held_prefix_tokens = len(keys) * self.pools.page_size

    def give_back_held(self, request: Request) -> None:
        """Undo ``use_held`` for a request that is not admitted after all."""
        for prefix in request.prefixes:
            self.held.let_go(prefix)
        request.prefix = request.source_prefix = None
        request.held_prefix_tokens = 0

    def reserve(self, admission: Admission, instance_id: str, deadline: float) -> None:
        """Move a request from WAITING to LANDING, after ``use_held``, with all slots reserved, and begin to
        fetch what main memory has of its prefix.

        Raises PoolExhausted, and CopyFailed, after which the request owns nothing.
        """
        request = admission.request
        self.held.make_room(self.pools.rounded(admission.need))
        holding = self.pools.reserve(request.room, admission.need)
        try:
            self._fetch(request)
        except CopyFailed:
            self.pools.release(holding)
            raise
        keys, kinds = request.usable_keys[: request.num_shared_pages], KV_POOLS[admission.mode]
        request.num_prefilled_tokens = self.held.num_prefilled(keys, kinds) * self.pools.page_size
        self._move(request, RequestState.LANDING, deadline)
        request.holding = holding
        request.mode = admission.mode
        request.hot_capacity = admission.hot_capacity
        request.instance_id = instance_id
        self._note_reserved(request)
        request.admitted_seq = self._num_admitted
        self._num_admitted += 1

    def _fetch(self, request: Request) -> None:
        """Begin to bring to the device what main memory has of a request's prefix. Raises PoolExhausted and
        CopyFailed."""
        self.held_tier.fetch(request.prefix)
        if (source := request.source_prefix) is not None:
            keys = request.usable_keys[: source.end_page]
            token_ids = request.prompt if self.publishes(request) else None
            request.prefix = self.dense_tier.fetch(request.room, keys, request.prefix, source, token_ids)
            request.source_prefix = None

    def await_fetch(self, request: Request, deadline: float) -> bool:
        """Move a request from LANDING to FETCHING if part of its prefix is still on its way up. Returns
        whether it is. Its own KV is here, and the aux record is read."""
        if not is_on_its_way(request.prefix):
            return False
        self._move(request, RequestState.FETCHING, deadline)
        return True

    def fetched(self) -> list[Request]:
        """Note which copies of held pages are over. Returns the FETCHING requests that may start."""
        self.held_tier.poll()
        self.dense_tier.poll()
        waiting = self.select(RequestState.FETCHING)
        return [request for request in waiting if not is_on_its_way(request.prefix)]

    @property
    def num_copies(self) -> int:
        """Copies of held pages that are under way or wait to begin."""
        return self.held_tier.num_copies + self.dense_tier.num_copies

    def settle_copies(self) -> None:
        """Wait until all copies of held pages are over, and note it: what they use counts as used. Those that
        wait do not begin."""
        self.held_tier.settle()
        self.dense_tier.settle()

    def start(self, request: Request) -> None:
        """Move a request from LANDING or FETCHING to RUNNING: all bytes are here, and the aux record is read.

        The whole pages of its prompt that no step writes to are held from now on. Where equal pages are held
        already, the request uses those, and its own are free.
        """
        self._move(request, RequestState.RUNNING)
        self.pools.give_up(request.owned, [PoolKind.AUX])
        self.pools.move(request.owned, Stage.RUNNING)
        # A prefix is dropped when one of its rows is wrong: nothing behind it may be found.
        if request.prefix is not None and request.prefix.is_dropped:
            return
        # This comes before the tables are filled, since it may change which pages the request uses. Pages
        # that others left meanwhile are of no use to it if they are not on the device.
        keys = request.kept_keys(request.first_stepped(self.pools.page_size))
        if self.held.is_up(keys, request.kv_pools):
            token_ids = request.prompt if self.publishes(request) else None
            request.prefix = self.held.share(
                request.owned, keys, request.kv_pools, request.prefix, token_ids=token_ids
            )
            self.held_tier.store(request.prefix)
            self._note_reserved(request)
        if request.is_resident:
            self._let_share(request)

    # --- while it runs --------------------------------------------------------------------------------------

    def grow(self, request: Request, need: SlotCounts) -> None:
        """Give a running request more slots. Raises PoolExhausted."""
        self.held.make_room(need)
        for kind in PoolKind:
            if need[kind]:
                self.pools.grow(request.owned, kind, need[kind])
        if request.num_page_slots:
            request.num_page_slots += need.device
        self._note_reserved(request)

    def grow_for_exchange(self, exchange: Exchange) -> None:
        """Give a running request the slots that it needs beside its hot buffer. A dense one gets index slots
        in front of its own for the pages that it shares. Of those that the host pool has already it uses the
        copy (``Request.host_prefix``), and gets no slots for them. Raises PoolExhausted."""
        request, page_size = exchange.request, self.pools.page_size
        copies = request.copies_of_shared(page_size)
        behind = exchange.need - copies
        if request.mode is Mode.DENSE and (shared := request.prefix) is not None:
            keys = request.usable_keys[: shared.end_page]
            request.host_prefix = self.dense_tier.use_host_copy(keys, shared)
            copies -= SlotCounts.of(KV_POOLS[Mode.HISPARSE], end_of(request.host_prefix) * page_size)
        self.grow(request, behind + SlotCounts(host=copies.host))
        if copies.index:
            in_front = SlotCounts(index=copies.index)
            self.held.make_room(in_front)
            self.pools.join(self.pools.reserve(request.room, in_front, request.owned.stage), request.owned)
            self._note_reserved(request)

    def replace_device_slots(self, exchange: Exchange, first_kept: int | None = None) -> None:
        """Give a request a hot buffer for its device slots, after ``grow_for_exchange``. A dense request
        becomes hisparse, and lets go of the pages that it shares: it has copies of its own, or uses those in
        the host pool.

        A hot buffer that it has already keeps its first slots, as many as both sizes have, and pages that are
        being filled are given up. If it leaves pages, its own pages from the position ``first_kept`` on
        become the first slots of the hot buffer; None: none do. Every item must be on the host by now. Raises
        PoolExhausted.
        """
        request, page_size = exchange.request, self.pools.page_size
        num_shared = request.num_shared_device_pages * page_size
        was_dense, request.mode = request.mode is Mode.DENSE, Mode.HISPARSE
        num_before = request.num_device_slots - request.num_page_slots
        num_after = round_up(exchange.hot_capacity, page_size)
        num_first = 0 if request.hot_capacity else num_before
        if not request.hot_capacity and first_kept is not None:
            num_first = first_kept - num_shared
        if num_first:
            self.pools.release(self.pools.split(request.owned, [PoolKind.DEVICE], num_first))
        num_kept = min(num_before - num_first, num_after)
        kept = self.pools.split(request.owned, [PoolKind.DEVICE], num_kept) if num_kept else None
        self.pools.give_up(request.owned, [PoolKind.DEVICE])
        if kept is not None:
            self.pools.join(kept, request.owned)
        self._leave_residents(request)
        if was_dense:
            self._leave_prefix(request)
        if num_after > num_kept:
            self.held.make_room(SlotCounts(device=num_after - num_kept))
            self.pools.grow(request.owned, PoolKind.DEVICE, num_after - num_kept)
        request.hot_capacity = exchange.hot_capacity
        request.num_retractions += was_dense or num_after < num_before
        self._note_reserved(request)

    def use_resident(self, fill: Fill) -> None:
        """Let a request use the device pages of its prompt that other residents have, so that they stay when
        these end."""
        request = fill.request
        if keys := request.usable_keys[: fill.num_resident_pages]:
            request.resident_prefix = self.held.use(keys, RESIDENT_POOLS)

    def give_back_resident(self, request: Request) -> None:
        """Undo ``use_resident`` for a request whose pages are not filled after all."""
        self._leave_residents(request)

    def begin_fill(self, fill: Fill) -> None:
        """Give a request with a hot buffer, after ``use_resident``, device pages for all of its tokens, which
        are filled beside its steps. Raises PoolExhausted."""
        request = fill.request
        self.grow(request, SlotCounts(device=fill.num_page_slots))
        request.num_page_slots = fill.num_page_slots
        request.num_filled_tokens = request.num_kv_tokens

    def end_fill(self, request: Request) -> None:
        """Make a request resident whose pages have all of its items: it gives its hot buffer up. Its next
        step tells whether what filled them was right, and then it shares them."""
        self.pools.release(self._split_hot_buffer(request))
        request.hot_capacity = request.num_page_slots = 0
        self._let_share(request)
        self._note_reserved(request)

    def _let_share(self, request: Request) -> None:
        """Let a request that is resident now share its pages, if it may, once its next step is read."""
        if request.usable_keys:
            request.shares_from = max(0, request.next_index) + 1

    def share_resident(self, request: Request, min_own_slots: int) -> None:
        """Let other residents use a resident request's device pages of its prompt, which are filled and
        right, for as long as any of them does. It keeps ``min_own_slots`` of its own."""
        request.shares_from = None
        page_size, num_before = self.pools.page_size, request.num_resident_pages
        num_pages = num_before + max(0, request.num_device_slots - min_own_slots) // page_size
        keys = request.usable_keys[:num_pages]
        # Pages that others have added since it began would take the place of its own, which steps read.
        num_found = self.held.num_found(keys, RESIDENT_POOLS)
        if len(keys) > num_before == num_found and not request.num_tail_tokens:
            prefix = self.held.share(request.owned, keys, RESIDENT_POOLS, request.resident_prefix)
            request.resident_prefix = prefix
            self._note_reserved(request)

    # --- its end --------------------------------------------------------------------------------------------

    def start_ending(self, request: Request, *, is_sound: bool) -> None:
        """Move a request from RUNNING to ENDING: it keeps its slots until nothing on the device uses them.

        ``is_sound``: its KV is right, and may be held.
        """
        self._move(request, RequestState.ENDING)
        self.pools.move(request.owned, Stage.ENDING)
        self._forget(request)
        request.is_sound = is_sound

    def release(self, request: Request, now: float) -> None:
        """Move a request from any state but RUNNING to ENDED: the one release path.

        Slots of a LANDING request, to which its prefill node may still write, go to quarantine, with the
        pages that it shares, which the prefill node may still read. The whole pages of a sound request are
        held. Everything else is free at once. Pages that it shares stay held.
        """
        was_landing = request.state is RequestState.LANDING
        if request.state is not RequestState.ENDING:
            self._forget(request)
        self._move(request, RequestState.ENDED)
        if request.holding is None:
            return
        holding, request.holding = request.owned, None

        self._leave_residents(request)
        self._give_back_host_copy(request)
        num_shared_pages = request.num_shared_pages
        prefix, request.prefix = request.prefix, None
        request.is_sound &= prefix is None or not prefix.is_dropped
        if was_landing:  # slots that no remote write can land in are free at once
            self.pools.give_up(holding, set(PoolKind) - {*request.kv_pools, PoolKind.AUX})
            self.pools.move(holding, Stage.QUARANTINED)
            self.quarantine.add(
                Quarantined(
                    request.room, holding, request.peer, request.instance_id, now, prefix, request.attempt
                )
            )
            return
        self.held.let_go(prefix)  # first, so that the pages held below can be merged with it
        if request.is_sound:
            keys = request.kept_keys(request.num_kv_tokens)
            page_size = self.pools.page_size
            token_ids = request.all_token_ids if self.publishes(request) else None
            self.held.hold(
                holding,
                keys,
                request.kv_pools,
                num_shared_pages,
                token_ids=token_ids,
                num_prefilled=request.first_stepped(page_size) // page_size,
            )
            if request.mode is Mode.DENSE:
                self.dense_tier.store(request.room, keys, token_ids)
            elif (found := self.held.find(keys, request.kv_pools)) is not None:
                self.held_tier.store(found.prefix)
        self.pools.release(holding)

    def _release_quarantined(self, entry: Quarantined) -> None:
        self.pools.release(entry.holding)
        self.held.let_go(entry.prefix)

    # --- what the node has ----------------------------------------------------------------------------------

    def publishes(self, request: Request) -> bool:
        """Whether others may know of the pages that the request leaves: if anybody listens, and it has no
        isolation key."""
        return self.held.listener is not None and request.root == NO_ISOLATION

    def stuck(self, now: float) -> SlotCounts:
        """Return the slots that may never be free again: those in quarantine whose prefill node gives no sign
        of life, and pages that are set aside. Pages that such rooms share are not counted: a request that
        begins alike can have them."""
        in_quarantine = self.pools.owned_by(entry.holding for entry in self.quarantine.stuck(now))
        return in_quarantine + self.pools.set_aside_slots

    def trouble(self, now: float) -> str:
        """Return why nothing can be admitted until stuck slots are freed; empty otherwise."""
        usable = self.pools.totals - self.stuck(now)
        used_up = [kind for kind in (PoolKind.DEVICE, PoolKind.INDEX, PoolKind.AUX) if not usable[kind]]
        if not used_up:
            return ""
        return (
            f"all slots of the {used_up[0]} pool are kept for prefill nodes that do not answer, or set aside "
            "for wrong rows; see /quarantine for which, and POST /release_quarantine for nodes that are gone "
            "and pages that are good"
        )

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless every slot is free or has exactly one owner that is known here."""
        admitted = self._admitted
        coming = self.select(RequestState.LANDING, RequestState.FETCHING)
        self.pools.check_integrity(
            {
                Stage.LANDING: len(coming) + len(self.dense_tier.landing),
                Stage.RUNNING: len(admitted[RequestState.RUNNING]),
                Stage.ENDING: len(admitted[RequestState.ENDING]),
                Stage.QUARANTINED: len(self.quarantine),
                Stage.HELD: len(self.held),
                Stage.SET_ASIDE: self.pools.num_set_aside,
            }
        )
        using = [prefix for request in self.select(*admitted) for prefix in request.prefixes]
        using += [entry.prefix for entry in self.quarantine if entry.prefix is not None]
        self.held.check_integrity(chain(using, self.held_tier.users(), self.dense_tier.users()))

    # --- what the moves share -------------------------------------------------------------------------------

    def _split_hot_buffer(self, request: Request) -> Holding:
        """Take the slots of the hot buffer, which come first, from a request whose pages are being filled.
        Returns a holding of them alone."""
        num_slots = request.num_device_slots - request.num_page_slots
        return self.pools.split(request.owned, [PoolKind.DEVICE], num_slots)

    def _leave_residents(self, request: Request) -> None:
        """Let go of the device pages that a request shares with other residents. Nobody keeps them when the
        last one has gone, because their items are in the host pool."""
        prefix, request.resident_prefix = request.resident_prefix, None
        request.shares_from, request.num_page_slots = None, 0
        self.held.let_go(prefix, keeps=False)

    def _leave_prefix(self, request: Request) -> None:
        """Let go of the device pages that a dense request shares and has copies of. From now on it shares
        those pages of the host pool that it uses as copies. If a device page is wrong, so is its copy, and
        nobody is to find that."""
        prefix, request.prefix = request.prefix, request.host_prefix
        request.host_prefix = None
        if request.prefix is not None:
            self.held.mark_arrived(request.prefix)
        if prefix is not None and prefix.is_dropped:
            request.prompt_keys = None
        self.held.let_go(prefix)

    def _give_back_host_copy(self, request: Request) -> None:
        """Let go of the pages in the host pool for which a request was to leave its own, but could not."""
        prefix, request.host_prefix = request.host_prefix, None
        if prefix is not None:
            self.held.take_down([run for run in prefix.chain() if run.is_arriving])
            self.held.let_go(prefix)

    def _note_reserved(self, request: Request) -> None:
        """Update what the request says of its slots, after these have changed.

        Each position needs a slot in the mode's KV pool (host or device) and one in the index pool, and in a
        hisparse request also a lookup slot, and in a resident one a device slot. Shared pages bring the first
        two, but none of the others.
        """
        owned = SlotCounts(*(request.owned.num_slots(kind) for kind in TOKEN_POOLS))
        request.owned_slots = owned
        num_shared = request.num_shared_pages * self.pools.page_size
        if request.mode is Mode.DENSE:
            request.reserved_tokens = num_shared + min(owned.device, owned.index)
        else:
            request.reserved_tokens = min(num_shared + min(owned.host, owned.index), owned.lookup)
            if request.is_resident:
                num_on_device = request.num_resident_pages * self.pools.page_size + owned.device
                request.reserved_tokens = min(request.reserved_tokens, num_on_device)
