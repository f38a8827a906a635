"""Moves a prefill node's requests from state to state, with the pages and messages that go with each move.

``PrefillLife`` owns the table of requests, the pools, the prefix cache with its host tier, and the counters.
The engine calls it for each message of a decode node, each step of the forward and each batch that comes back
from the sender. A request that is delivered meets ``bootstrap``, ``candidates``, ``admit``, then for each
chunk ``send_scores`` and ``note_computed``, ``start_sending`` after the last, and ``batch_returned`` for each
write.

``fail`` ends a request early, and a request fails with the first of its writes that fails. Writes read the
request's pages, so a failed request drains: ``_end``, the one release path, waits until none of its writes is
in the transport. The room is then quiet. Its decode node, which keeps the landing zone in quarantine until
then, is told so by RoomFailed with ``quiet`` or by RoomQuiet.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from msgspec.structs import replace

from hisparse_pd.base.prefill_settings import HeldReads
from hisparse_pd.core.paging.allocator import PoolIntegrityError
from hisparse_pd.core.paging.extents import extents_to_pages
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import NO_ISOLATION, PageKey, page_keys
from hisparse_pd.engine.phases import PREFILL_PHASES
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import PageRows, WrongItem
from hisparse_pd.prefill_node.bootstrap_checks import BootstrapChecks
from hisparse_pd.prefill_node.decode_tier import DecodeTier, ReadMemory, Reads
from hisparse_pd.prefill_node.host_pages import HostPages
from hisparse_pd.prefill_node.host_tier import CACHE_POOLS, HostTier
from hisparse_pd.prefill_node.pace import Pace
from hisparse_pd.prefill_node.push import Pusher
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.requests import (
    Delivery,
    EndedRequest,
    PrefillRequest,
    PrefillRequests,
    PrefillState,
)
from hisparse_pd.prefill_node.scheduler import Running, StepLimits, Waiting
from hisparse_pd.prefill_node.store_tier import Orders, StoreTier
from hisparse_pd.protocol.messages import (
    MAX_TEXT_CHARS,
    AbortRoom,
    Bootstrap,
    PrefillTimes,
    Room,
    RoomDone,
    RoomFailed,
    RoomQuiet,
    RoomScores,
    ToDecode,
    first_stepped,
)
from hisparse_pd.transfer.sender import Completion

log = logging.getLogger(__name__)

MAX_QUEUED_TOKENS = 64 << 20
"""Most prompt tokens of all waiting requests: 256 MiB of ids, and up to as much of keys with pages of 16."""

# Totals that begin at 0, so that an alert sees the first event, too.
_COUNTERS = (
    "prompt_tokens_total",
    "cached_tokens_total",
    "kv_transfer_bytes_total",
    "kv_transfer_seconds_total",
    "kv_transfer_failures_total",
    "aborted_requests_total",
    "failed_requests_total",
)


class PrefillLife:
    """The requests of one prefill engine, the slots that they own, and the prefix cache."""

    def __init__(
        self,
        *,
        pusher: Pusher,
        limits: StepLimits,
        context_length: int,
        vocab_size: int,
        num_aux_slots: int,
        max_queued: int,
        use_prefix_cache: bool,
        tell_peer: Callable[[Peer, ToDecode], bool],
        room_timeout_secs: float = 300.0,
        grace_secs: float = 10.0,
        host_pages: HostPages | None = None,
        store_orders: Orders | None = None,
        held_reads: Reads | None = None,
        read_memory: ReadMemory | None = None,
        which_held: HeldReads = "all",
        clock: Callable[[], float] = time.monotonic,
        wrong_items: Callable[[PageRows, int], list[WrongItem]] = lambda rows, page_size: [],
    ) -> None:
        """``max_queued``: most requests that wait. ``tell_peer`` sends a message without waiting and returns
        whether it is on its way. ``room_timeout_secs``: how long a decode node waits for anything about a
        room; this node keeps the request ``grace_secs`` longer, so that clients get the decode node's
        error. ``host_pages``: main memory below the prefix cache, if there is any; ``store_orders``: what
        carries out orders to the store below it, if there is one; ``wrong_items``: see ``HostTier``.
        ``held_reads``, ``read_memory``, ``which_held``: see ``DecodeTier``. ``clock``: that of
        ``now_secs``."""
        self.requests = PrefillRequests()
        self.counters: defaultdict[str, float] = defaultdict(float, dict.fromkeys(_COUNTERS, 0.0))
        """Monotone totals, by metric name."""
        self.dropped: Counter[str] = Counter()
        """Control messages without effect, by reason."""
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
        store = None
        if store_orders is not None:
            store = StoreTier(store_orders, self.pools, self.prefixes, self.set_aside, clock, self.pace)
        self.tier = HostTier(host_pages, self.pools, self.prefixes, self.set_aside, wrong_items, store)
        """The tiers below the device, main memory and the store, which keep prompts that were computed."""
        self.decode_tier = DecodeTier(
            held_reads,
            read_memory,
            which_held,
            self.pools,
            self.prefixes,
            self.set_aside,
            self.tier.pins,
            self.pace,
            clock,
        )
        """The tier of what decode nodes hold of their requests' prompts."""
        self.pusher = pusher
        self._limits = limits
        self._checks = BootstrapChecks(limits, context_length, vocab_size)
        self._max_queued = max_queued
        self._use_prefix_cache = use_prefix_cache
        self._room_timeout_secs = room_timeout_secs
        self._grace_secs = grace_secs
        self._tell_peer = tell_peer

    def __len__(self) -> int:
        return len(self.requests)

    # --- arrival -------------------------------------------------------------------------------------

    def keys_of(self, message: Bootstrap) -> Sequence[PageKey]:
        """Return the keys of all whole pages of a Bootstrap's prompt; none without a prefix cache."""
        if not self._use_prefix_cache:
            return ()
        return page_keys(message.root, message.prompt, self._limits.page_size)

    def bootstrap(
        self, peer: Peer, message: Bootstrap, now_secs: float, keys: Sequence[PageKey] | None = None
    ) -> None:
        """Open the request of a Bootstrap, or answer how it ended or why it is refused. A refused Bootstrap
        opens no request, so a correct one may follow. ``keys``: what ``keys_of`` returns, if the
        engine has computed it already, as it does while a forward runs."""
        room = Room(message.room)
        request = self.requests.get(room)
        if request is not None:
            self._answer_repeated(request, peer, message)
            return
        if (ended := self.requests.ended(room)) is not None:
            self._answer_late(ended, peer, message)
            return
        if (error := self._checks.why_refused(message, peer)) is not None:
            self._refuse(peer, room, 400, error)
            return
        if (error := self._why_full(message)) is not None:
            self._refuse(peer, room, 429, error)
            return
        keys = self.keys_of(message) if keys is None else keys
        first = first_stepped(message.num_prompt_tokens, message.num_resumed_tokens, peer.page_size)
        # KV from ``first`` on is rounded as in decode steps: such pages are never shared.
        shared = tuple(keys[: first // self._limits.page_size])
        deadline_secs = now_secs + self._room_timeout_secs + self._grace_secs
        self.requests.open(PrefillRequest(peer, message, now_secs, deadline_secs, shared))

    def _answer_repeated(self, request: PrefillRequest, peer: Peer, message: Bootstrap) -> None:
        """Answer a Bootstrap for a live request.

        If the request has failed, its own Bootstrap, sent again by the same node with a numbered attempt, is
        answered with the failure again. Every other Bootstrap is dropped. 0 is the attempt of nodes that do
        not number them.
        """
        is_its_node = request.peer.node_id == peer.node_id
        if request.is_draining and is_its_node and message.attempt > 0 and message == request.bootstrap:
            failed = _room_failed(
                room=request.room,
                status=request.end_status,
                error=request.end_error,
                quiet=False,
                batch_failed=request.batch_failed,
            )
            self._tell_peer(peer, failed)
            return
        self.dropped["duplicate"] += 1
        log.warning("room %d: dropped a second Bootstrap, from node %s", request.room, peer.node_id)

    def _answer_late(self, ended: EndedRequest, peer: Peer, message: Bootstrap) -> None:
        """Answer a Bootstrap for a room that has ended: with its RoomDone if this is the attempt that was
        delivered, else with RoomFailed."""
        delivery = ended.delivery
        if delivery is not None and delivery.answers(peer.node_id, message.attempt):
            self._tell_peer(peer, delivery.done)  # the first answer was lost with its connection
            return
        self.dropped["late"] += 1
        failed = _room_failed(
            Room(message.room), ended.status, ended.error, quiet=True, batch_failed=ended.batch_failed
        )
        self._tell_peer(peer, failed)

    def _why_full(self, message: Bootstrap) -> str | None:
        num_queued = self.requests.count(PrefillState.QUEUED)
        if num_queued >= self._max_queued:
            return (
                f"{num_queued} rooms wait on this prefill node, and {self._max_queued} may "
                "(max_running_requests + max_queued_requests); try again later or elsewhere"
            )
        num_tokens = self.requests.num_queued_tokens
        if num_tokens + message.num_prompt_tokens > MAX_QUEUED_TOKENS:
            return (
                f"prompts of {num_tokens} tokens wait on this prefill node, and {message.num_prompt_tokens} "
                f"more would exceed {MAX_QUEUED_TOKENS}; try again later or elsewhere"
            )
        return None

    def _refuse(self, peer: Peer, room: Room, status: int, error: str) -> None:
        log.info("room %d refused: %d %s", room, status, error)
        self.counters["failed_requests_total"] += 1
        self._tell_peer(
            peer, _room_failed(room, status, f"room {room}: {error}", quiet=True, batch_failed=False)
        )

    # --- computing -----------------------------------------------------------------------------------

    def running(self) -> list[Running]:
        """Return the requests in COMPUTING for the scheduler, in order of admission, with all their
        keys: a waiting prompt that begins with the same ones waits until these pages are cached."""
        return [
            Running(request.room, request.num_computed_tokens, request.num_ready_tokens, request.keys)
            for request in self.requests.in_state(PrefillState.COMPUTING)
        ]

    def waiting(self) -> list[PrefillRequest]:
        """Return the requests in QUEUED, in order of arrival."""
        return list(self.requests.in_state(PrefillState.QUEUED))

    def candidates(self) -> Iterator[Waiting]:
        """Yield the waiting requests in order of arrival, without those whose decode node has too many bytes
        pending, and those whose pages are on their way up from the store or main memory, or from their decode
        node. Cached prefixes of earlier candidates count as pending, because admission sends them."""
        num_bytes_pending: dict[str, int] = {}
        for request in self.waiting():
            session = request.peer.session
            if session not in num_bytes_pending:
                num_bytes_pending[session] = self.pusher.num_bytes_pending(request.peer)
            if not self.pusher.may_start(request, num_bytes_pending[session]):
                continue
            waiting = self.look_up(request)
            num_pages = self._limits.pages_for(waiting.num_tokens)
            token_ids = self._published_ids(request)
            if self.tier.fetch(waiting.room, waiting.keys, num_pages, token_ids):
                continue
            if self.decode_tier.fetch(request, num_pages, token_ids):
                continue
            num_cached_tokens = waiting.num_cached_pages * self._limits.page_size
            num_to_send = max(0, num_cached_tokens - request.bootstrap.num_held_tokens)
            num_bytes_pending[session] += self.pusher.num_bytes(num_to_send)
            yield waiting

    def look_up(self, request: PrefillRequest) -> Waiting:
        """Return a waiting request for the scheduler, with what the prefix cache has of its prompt."""
        # Pages that must be computed in any case, for the hint or for scores, are not looked up.
        keys = request.reusable_keys(self._limits.page_size)
        found = self.prefixes.find(keys, CACHE_POOLS)
        parts = () if found is None else tuple(found.parts())
        num_cached_pages = sum(num_pages for _, num_pages in parts)
        num_unused_pages = sum(num_pages for prefix, num_pages in parts if not prefix.num_users)
        return Waiting(request.room, request.num_computed_tokens, keys, num_cached_pages, num_unused_pages)

    @property
    def num_available_pages(self) -> int:
        return (self.pools.free + self.prefixes.unused).device // self._limits.page_size

    def admit(self, requests: Sequence[PrefillRequest], now_secs: float) -> None:
        """Move the requests of a plan from QUEUED to COMPUTING: reserve all their pages and an aux slot each.
        All cached prefixes are in use before the first page is reserved, because that may evict unused
        ones."""
        page_size = self._limits.page_size
        for request in requests:
            keys = request.reusable_keys(self._limits.page_size)
            if (found := self.prefixes.find(keys, CACHE_POOLS)) is not None:
                request.prefix = self.prefixes.use(keys[: found.num_pages], CACHE_POOLS)
                request.fetched = replace(
                    self.tier.fetched(request.room, found.num_pages),
                    decode=self.decode_tier.fetched(request.room, found.num_pages),
                )
            self._release_tiers(request.room)
        for request in requests:
            num_cached_pages = 0 if request.prefix is None else request.prefix.end_page
            num_new_pages = self._limits.pages_for(request.num_computed_tokens) - num_cached_pages
            need = SlotCounts(device=num_new_pages * page_size, aux=1)
            self.prefixes.make_room(need)
            request.holding = self.pools.reserve(request.room, need, Stage.RUNNING)
            cached = () if request.prefix is None else request.prefix.extents(PoolKind.DEVICE)
            request.page_ids = extents_to_pages(cached + request.holding[PoolKind.DEVICE], page_size)
            request.num_cached_tokens = request.num_ready_tokens = num_cached_pages * page_size
            self.requests.move(request, PrefillState.COMPUTING, now_secs)
            self.counters["prompt_tokens_total"] += request.num_computed_tokens
            self.counters["cached_tokens_total"] += request.num_cached_tokens

    def send_scores(self, request: PrefillRequest, pieces: Sequence[RoomScores], now_secs: float) -> bool:
        """Send the decode node the scores that a forward computed. Return False when not all are on their
        way; the request has then failed."""
        if all(self._tell_peer(request.peer, piece) for piece in pieces):
            return True
        error = (
            f"room {request.room}: logprobs of the prompt could not be sent to decode node "
            f"{request.peer.node_id}: its connection is gone, or its queue is full"
        )
        self.fail(request, 502, error, now_secs)
        return False

    def note_computed(self, request: PrefillRequest, stop: int) -> None:
        """Note that all layers up to position ``stop`` are in the pool."""
        request.num_ready_tokens = stop

    def start_sending(self, request: PrefillRequest, now_secs: float) -> None:
        """Move a request whose last chunk is computed from COMPUTING to SENDING, and send its staged aux
        record. Its pages go into the cache while the record is on its way."""
        self.requests.move(request, PrefillState.SENDING, now_secs)
        self.pusher.push_aux(request)
        self._cache_pages(request)

    def _cache_pages(self, request: PrefillRequest) -> None:
        """Put the request's pages into the cache. Where the cache has got an equal page from another request
        meanwhile, this one keeps its own copy, which its writes read."""
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
            self.tier.store(request.room, request.keys, token_ids)

    def _published_ids(self, request: PrefillRequest) -> bytes | None:
        """Return the packed ids of a prompt whose pages others may know of; None for one with an isolation
        key, and if nobody listens."""
        message = request.bootstrap
        is_published = self.prefixes.listener is not None and message.root == NO_ISOLATION
        return message.prompt if is_published else None

    def batch_returned(self, completion: Completion, now_secs: float) -> None:
        """Account for a batch that came back from the sender, and end its request if it was the last or
        failed."""
        request = self.requests.get(completion.room)
        if request is None:
            raise PoolIntegrityError(
                f"room {completion.room} was released before its batch {completion.tag} came back"
            )
        request.num_writes_pending -= 1
        request.num_bytes_sent += completion.num_bytes
        request.transfer_secs += completion.secs
        # ``batch_failed`` tells the decode node that bytes may still land, which not every failure means.
        request.batch_failed |= completion.may_still_land
        self.counters["kv_transfer_bytes_total"] += completion.num_bytes
        self.counters["kv_transfer_seconds_total"] += completion.secs
        if request.is_draining:
            if request.num_writes_pending == 0:
                self._tell_peer(request.peer, RoomQuiet(request.room, request.batch_failed))
                self._end(request, PrefillState.FAILED, now_secs)
        elif not completion.ok:
            self.counters["kv_transfer_failures_total"] += 1
            what = f"sending {completion.tag} to decode node {request.peer.node_id}"
            error = f"room {request.room}: {what}: {completion.error}"
            self.fail(request, 502, error, now_secs)
        elif request.state is PrefillState.SENDING and request.num_writes_pending == 0:
            self._deliver(request, now_secs)

    def _deliver(self, request: PrefillRequest, now_secs: float) -> None:
        """Tell the decode node that all bytes have landed, and end the request in DONE."""
        request.phases.end(now_secs)
        done = RoomDone(
            request.room,
            request.num_bytes_sent,
            request.num_cached_tokens,
            request.transfer_secs,
            PrefillTimes(*map(request.phases.secs, PREFILL_PHASES)),
            request.fetched,
        )
        request.delivery = Delivery(request.peer.node_id, request.bootstrap.attempt, done)
        self._tell_peer(request.peer, done)
        self._end(request, PrefillState.DONE, now_secs)

    # --- ends without delivery -----------------------------------------------------------------------

    def fail(
        self,
        request: PrefillRequest,
        status: int,
        error: str,
        now_secs: float,
        *,
        tell_peer: bool = True,
        is_abort: bool = False,
    ) -> None:
        """End a request early and tell its decode node. With writes in flight the request drains first, and
        the decode node is told again when it is quiet. One that drains already stays as it is.

        ``is_abort``: the request is no longer wanted, which counts as aborted and not as failed.
        """
        if request.is_draining:
            return
        log.info("room %d failed in %s: %d %s", request.room, request.state.name, status, error)
        request.end_status, request.end_error = status, error
        self.pusher.cancel(request)
        is_quiet = request.num_writes_pending == 0
        self.counters["aborted_requests_total" if is_abort else "failed_requests_total"] += 1
        if tell_peer:
            failed = _room_failed(
                request.room, status, error, quiet=is_quiet, batch_failed=request.batch_failed
            )
            self._tell_peer(request.peer, failed)
        if is_quiet:
            self._end(request, PrefillState.FAILED, now_secs)
        else:
            if request.holding is not None:
                self.pools.move(request.holding, Stage.ENDING)
            self.requests.move(request, PrefillState.DRAINING, now_secs)

    def abort_room(self, peer: Peer, message: AbortRoom, now_secs: float) -> None:
        """End a request that its decode node gave up. Answers RoomQuiet, at once or after the last write."""
        room = Room(message.room)
        request = self.requests.get(room)
        if request is None or request.peer.node_id != peer.node_id:
            ended = self.requests.ended(room)
            self.dropped["unknown_room" if ended is None else "late"] += 1
            self._tell_peer(peer, RoomQuiet(room, batch_failed=ended is not None and ended.batch_failed))
            return
        if request.is_draining:  # RoomQuiet follows its last write
            return
        error = f"room {room}: decode node {peer.node_id} gave it up: {message.reason}"
        self.fail(request, 503, error, now_secs, tell_peer=False, is_abort=True)
        if not request.is_draining:
            self._tell_peer(peer, RoomQuiet(room, request.batch_failed))

    def fail_requests_of(self, peer: Peer, error: str, now_secs: float) -> int:
        """Fail the requests of a decode node that is lost; writes in flight to it drain. Return their
        number."""
        requests = [request for request in self.requests if request.peer is peer]
        for request in requests:
            reason = f"room {request.room}: decode node {peer.node_id} {error}"
            self.fail(request, 502, reason, now_secs)
        return len(requests)

    def fail_overdue(self, rooms: Sequence[Room], now_secs: float) -> None:
        """Fail requests with a write that was in flight for longer than its limit."""
        for room in rooms:
            request = self.requests.get(room)
            if request is not None:
                self.counters["kv_transfer_failures_total"] += 1
                limit_secs = self.pusher.write_timeout_secs
                error = f"room {room}: a write to the decode node took longer than {limit_secs:g} s"
                self.fail(request, 504, error, now_secs)

    def fail_expired(self, now_secs: float) -> None:
        """Fail the requests that waited until their deadline; their decode node has given them up by then."""
        queued = self.requests.in_state(PrefillState.QUEUED)
        # All waits are equally long, so the first to arrive are the first to expire.
        late = takewhile(lambda request: request.deadline_secs < now_secs, queued)
        for request in list(late):
            timeout_secs = self._room_timeout_secs + self._grace_secs
            error = (
                f"room {request.room}: it was not begun within {timeout_secs:g} s (room_timeout_secs "
                f"{self._room_timeout_secs:g}, and {self._grace_secs:g} s in which the decode node would "
                "have given it up); this prefill node has too much to do"
            )
            self.fail(request, 504, error, now_secs)

    def _end(self, request: PrefillRequest, state: PrefillState, now_secs: float) -> None:
        """Release all that the request owns, of which nothing may be in flight. This is the one release
        path."""
        if request.num_writes_pending:
            raise PoolIntegrityError(
                f"room {request.room} is released with {request.num_writes_pending} writes in flight"
            )
        if request.prefix is not None:
            self.prefixes.let_go(request.prefix)
        self._release_tiers(request.room)
        if request.holding is not None:
            self.pools.release(request.holding)
        request.prefix, request.holding, request.page_ids = None, None, []
        self.requests.move(request, state, now_secs)

    def _release_tiers(self, room: Room) -> None:
        """Let go of what lower tiers have brought for a request, which begins or ends."""
        self.decode_tier.release(room)
        self.tier.release(room)

    def unpin(self) -> bool:
        """Do ``HostTier.unpin``, unless a request waits for its decode node."""
        return not self.decode_tier.is_awaited and self.tier.unpin()

    # --- accounts ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless every slot is free, cached, set aside or owned by exactly one
        request."""
        self.pools.check_integrity(
            {
                Stage.LANDING: self.tier.num_landing + self.decode_tier.num_landing,
                Stage.RUNNING: self.requests.count(PrefillState.COMPUTING, PrefillState.SENDING),
                Stage.ENDING: self.requests.count(PrefillState.DRAINING),
                Stage.QUARANTINED: self.tier.num_quarantined + self.decode_tier.num_quarantined,
                Stage.HELD: len(self.prefixes),
                Stage.SET_ASIDE: self.pools.num_set_aside,
            }
        )
        users = [request.prefix for request in self.requests if request.prefix is not None]
        self.prefixes.check_integrity((*users, *self.tier.users()))
        for request in self.waiting():
            if request.holding is not None or request.prefix is not None or request.num_writes_pending:
                raise PoolIntegrityError(
                    f"room {request.room} owns pages or writes in state {request.state.name}"
                )


def _room_failed(room: Room, status: int, error: str, *, quiet: bool, batch_failed: bool) -> RoomFailed:
    return RoomFailed(room, status, error[:MAX_TEXT_CHARS], quiet, batch_failed)
