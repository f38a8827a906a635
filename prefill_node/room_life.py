"""Changes rooms' states: owns the pages and aux slots that rooms hold, the prefix cache, and the messages
that tell decode nodes how their rooms ended.

Every message and event about a room has a method here, which is safe in every state of the room. ``fail``
ends a room early. ``_end`` releases what a room holds, once none of its writes, which read it, is in the
transport. A room fails with the first of its writes that fails.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from hisparse_pd.core.paging.allocator import PoolIntegrityError
from hisparse_pd.core.paging.extents import SlotArray, expand_pages, extents_to_pages
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey, page_keys
from hisparse_pd.engine.phases import PREFILL_PHASES
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import WrongItem
from hisparse_pd.prefill_node.bootstrap_checks import BootstrapChecks
from hisparse_pd.prefill_node.push import ChunkPush, Pusher
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.prefill_node.rooms import Delivery, RoomRecord, RoomState, RoomTable, first_stepped
from hisparse_pd.prefill_node.scheduler import Chunk, Running, StepLimits, Waiting, why_never
from hisparse_pd.protocol.messages import (
    MAX_TEXT_CHARS,
    TOKEN_BYTES,
    AbortRoom,
    Bootstrap,
    PrefillTimes,
    Room,
    RoomDone,
    RoomFailed,
    RoomQuiet,
    RoomScores,
    ToDecode,
)
from hisparse_pd.transfer.sender import Completion

log = logging.getLogger(__name__)

MAX_QUEUED_TOKENS = 64 << 20
"""Most prompt tokens of all waiting rooms: 256 MiB of ids, and up to as much of keys with pages of 16."""

_OWNING = (RoomState.COMPUTING, RoomState.SENDING)

_CACHED = (PoolKind.DEVICE,)
"""The pools with the KV of a cached prefix; its indexer keys are in the same pages of the index pool."""

_COUNTERS = (
    "prompt_tokens_total",
    "cached_tokens_total",
    "kv_transfer_bytes_total",
    "kv_transfer_seconds_total",
    "kv_transfer_failures_total",
    "aborted_requests_total",
    "failed_requests_total",
)


class RoomLife:
    """Rooms and what they hold."""

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
        wrong_items: Callable[[SlotArray, SlotArray], list[WrongItem]] = lambda slots, positions: [],
        room_timeout_secs: float = 300.0,
        grace_secs: float = 10.0,
    ) -> None:
        """``max_queued``: most rooms that wait. ``tell_peer`` sends a message without waiting and returns
        whether it is on its way. ``wrong_items``: see ``PrefillMemory.wrong_items``. ``room_timeout_secs``:
        how long a decode node waits for anything about a room; this node keeps the room ``grace_secs``
        longer, so that clients get the decode node's error."""
        self.rooms = RoomTable()
        self.counters: defaultdict[str, float] = defaultdict(float, dict.fromkeys(_COUNTERS, 0.0))
        """Monotone totals, by metric name."""
        self.dropped: Counter[str] = Counter()
        """Control messages without effect, by reason."""
        self.pools = Pools(
            SlotCounts(device=limits.num_pages * limits.page_size, aux=num_aux_slots), limits.page_size
        )
        self.prefixes = PrefixTree(self.pools)
        """The prefix cache: KV of prompts that were computed."""
        self.set_aside = SetAside(self.pools, self.prefixes, "prefill")
        self._pusher = pusher
        self._limits = limits
        self._checks = BootstrapChecks(limits, context_length, vocab_size)
        self._max_queued = max_queued
        self._use_prefix_cache = use_prefix_cache
        self._room_timeout_secs = room_timeout_secs
        self._grace_secs = grace_secs
        self._tell_peer = tell_peer
        self._wrong_items = wrong_items

    def __len__(self) -> int:
        return len(self.rooms)

    # --- a room begins -------------------------------------------------------------------------------

    def bootstrap(self, peer: Peer, message: Bootstrap, now_secs: float) -> None:
        """Open the room of a Bootstrap, or answer how it ended or why it is refused. A refused Bootstrap
        opens no room, so a correct one may follow."""
        room = Room(message.room)
        record = self.rooms.get(room)
        if record is not None:
            self._bootstrapped_again(record, peer, message)
            return
        if (ended := self.rooms.ended(room)) is not None:
            delivery = ended.delivery
            if delivery is not None and delivery.answers(peer.node_id, message.attempt):
                self._tell_peer(peer, delivery.done)  # the first answer was lost with its connection
                return
            self.dropped["late"] += 1
            self._tell_peer(peer, _room_failed(room, ended.status, ended.error, True, ended.batch_failed))
            return
        if (error := self._checks.why_refused(message, peer)) is not None:
            self._refuse(peer, room, 400, error)
            return
        if (error := self._why_full(message)) is not None:
            self._refuse(peer, room, 429, error)
            return
        keys: tuple[PageKey, ...] = ()
        if self._use_prefix_cache:
            shared = message.prompt[: first_stepped(message) * TOKEN_BYTES]
            keys = tuple(page_keys(message.root, shared, self._limits.page_size))
        deadline_secs = now_secs + self._room_timeout_secs + self._grace_secs
        self.rooms.open(RoomRecord(peer, message, now_secs, deadline_secs, keys))

    def _bootstrapped_again(self, record: RoomRecord, peer: Peer, message: Bootstrap) -> None:
        is_its_node = record.peer.node_id == peer.node_id
        if record.is_draining and is_its_node and message.attempt > 0 and message == record.bootstrap:
            self._tell_peer(
                peer,
                _room_failed(record.room, record.end_status, record.end_error, False, record.batch_failed),
            )
            return
        self.dropped["duplicate"] += 1
        log.warning("room %d: dropped a second Bootstrap, from node %s", record.room, peer.node_id)

    def _why_full(self, message: Bootstrap) -> str | None:
        num_queued = self.rooms.count(RoomState.QUEUED)
        if num_queued >= self._max_queued:
            return (
                f"{num_queued} rooms wait on this prefill node, and {self._max_queued} may "
                "(max_running_requests + max_queued_requests); try again later or elsewhere"
            )
        num_tokens = self.rooms.num_queued_tokens
        if num_tokens + message.num_prompt_tokens > MAX_QUEUED_TOKENS:
            return (
                f"prompts of {num_tokens} tokens wait on this prefill node, and {message.num_prompt_tokens} "
                f"more would exceed {MAX_QUEUED_TOKENS}; try again later or elsewhere"
            )
        return None

    def _refuse(self, peer: Peer, room: Room, status: int, error: str) -> None:
        log.info("room %d refused: %d %s", room, status, error)
        self.counters["failed_requests_total"] += 1
        self._tell_peer(peer, _room_failed(room, status, f"room {room}: {error}", True, False))

    # --- computing -----------------------------------------------------------------------------------

    def running(self) -> list[Running]:
        """Return the rooms in COMPUTING for the scheduler, in order of admission."""
        return [
            Running(record.room, record.num_computed_tokens, record.num_ready_tokens, record.keys)
            for record in self.rooms.in_state(RoomState.COMPUTING)
        ]

    def waiting(self) -> list[RoomRecord]:
        """Return the rooms in QUEUED, in order of arrival."""
        return list(self.rooms.in_state(RoomState.QUEUED))

    def candidates(self) -> Iterator[Waiting]:
        """Yield the waiting rooms in order of arrival, without those whose decode node has too much pending.
        Cached prefixes of earlier candidates count as pending, because admission sends them."""
        num_bytes_pending: dict[str, int] = {}
        for record in self.waiting():
            session = record.peer.session
            if session not in num_bytes_pending:
                num_bytes_pending[session] = self._pusher.num_bytes_pending(record.peer)
            if not self._pusher.has_place(record, num_bytes_pending[session]):
                continue
            waiting = self.look_up(record)
            num_cached_tokens = waiting.num_cached_pages * self._limits.page_size
            num_to_send = max(0, num_cached_tokens - record.bootstrap.num_held_tokens)
            num_bytes_pending[session] += self._pusher.num_bytes(num_to_send)
            yield waiting

    def look_up(self, record: RoomRecord) -> Waiting:
        """Return a waiting room for the scheduler, with what the prefix cache has of its prompt."""
        keys = self._reusable_keys(record)
        found = self.prefixes.find(keys, _CACHED)
        parts = () if found is None else tuple(found.parts())
        num_cached_pages = sum(num_pages for _, num_pages in parts)
        num_unused_pages = sum(num_pages for prefix, num_pages in parts if not prefix.num_users)
        return Waiting(record.room, record.num_computed_tokens, keys, num_cached_pages, num_unused_pages)

    def _reusable_keys(self, record: RoomRecord) -> tuple[PageKey, ...]:
        """Return the keys of the pages that may come from the cache."""
        return record.keys[: record.first_needed // self._limits.page_size]

    @property
    def num_available_pages(self) -> int:
        return (self.pools.free + self.prefixes.unused).device // self._limits.page_size

    def set_wrong_aside(self, chunks: Sequence[Chunk], now_secs: float) -> bool:
        """Set aside the pages of wrong rows that ``chunks`` would read again, in cached prefixes or earlier
        chunks. Return whether there were any; the plan must then be made again.

        Rooms that have such a page fail; they may succeed at another prefill node, or here in another page.
        Waiting rooms that would have used the prefix compute its tokens instead.
        """
        again = [chunk for chunk in chunks if chunk.start]
        if not again:
            return False
        is_known = np.zeros(self.pools.totals.device, np.bool_)
        slots, positions = [], []
        for chunk in again:
            its_slots = self._slots_before(chunk)
            its_positions = np.flatnonzero(~is_known[its_slots])
            slots.append(its_slots[its_positions])
            positions.append(its_positions)
            is_known[its_slots] = True
        errors = {
            item.slot // self._limits.page_size: self.set_aside.record_wrong_row(
                "cached", PoolKind.DEVICE, item
            )
            for item in self._wrong_items(np.concatenate(slots), np.concatenate(positions))
        }
        for record in list(self.rooms.in_state(RoomState.COMPUTING)) if errors else ():
            error = next((errors[page_id] for page_id in record.page_ids if page_id in errors), None)
            if error is not None:
                self.fail(record, 502, f"room {record.room}: {error}", now_secs)
        return bool(errors)

    def _slots_before(self, chunk: Chunk) -> SlotArray:
        """Return the slots of the positions before a chunk, in order: int64 [chunk.start]."""
        record, page_size = self.rooms.live(chunk.room), self._limits.page_size
        page_ids = record.page_ids
        if chunk.admits and chunk.start:
            found = self.prefixes.find(self._reusable_keys(record), _CACHED)
            page_ids = (
                [] if found is None else extents_to_pages(found.prefix.extents(PoolKind.DEVICE), page_size)
            )
        return expand_pages(np.asarray(page_ids, np.int64), page_size, 0, chunk.start)

    def fail_too_long(self, now_secs: float) -> None:
        """Fail waiting rooms whose prompts do not fit beside the pages that are set aside."""
        num_pages = self._limits.num_pages - len(self.set_aside)
        for record in self.waiting() if self.set_aside else ():
            why = why_never(record.num_computed_tokens, replace(self._limits, num_pages=num_pages))
            if why is not None:
                error = (
                    f"{why}; {len(self.set_aside)} pages are set aside, see /quarantine of the prefill node"
                )
                self.fail(record, 503, f"room {record.room}: {error}", now_secs)

    def admit(self, records: Sequence[RoomRecord], now_secs: float) -> None:
        """Move the rooms of a plan from QUEUED to COMPUTING: reserve all their pages and an aux slot each,
        and send their cached prefixes. All prefixes are in use before the first page is reserved, because
        that may evict unused ones."""
        for record in records:
            keys = self._reusable_keys(record)
            if (found := self.prefixes.find(keys, _CACHED)) is not None:
                record.prefix = self.prefixes.use(keys[: found.num_pages], _CACHED)
        page_size = self._limits.page_size
        for record in records:
            num_cached_pages = 0 if record.prefix is None else record.prefix.end_page
            num_new_pages = self._limits.pages_for(record.num_computed_tokens) - num_cached_pages
            need = SlotCounts(device=num_new_pages * page_size, aux=1)
            self.prefixes.make_room(need)
            record.holding = self.pools.reserve(record.room, need, Stage.RUNNING)
            cached = () if record.prefix is None else record.prefix.extents(PoolKind.DEVICE)
            record.page_ids = extents_to_pages(cached + record.holding[PoolKind.DEVICE], page_size)
            record.num_cached_tokens = record.num_ready_tokens = num_cached_pages * page_size
            self.rooms.move(record, RoomState.COMPUTING, now_secs)
            self.counters["prompt_tokens_total"] += record.num_computed_tokens
            self.counters["cached_tokens_total"] += record.num_cached_tokens
            self._pusher.push_rest(self._pusher.plan(record, 0, record.num_cached_tokens))

    def scored(self, record: RoomRecord, pieces: Sequence[RoomScores], now_secs: float) -> bool:
        """Send a room's decode node the scores that a forward computed. Return False when not all are on
        their way; the room has then failed."""
        if all(self._tell_peer(record.peer, piece) for piece in pieces):
            return True
        error = (
            f"room {record.room}: logprobs of the prompt could not be sent to decode node "
            f"{record.peer.node_id}: its connection is gone, or its queue is full"
        )
        self.fail(record, 502, error, now_secs)
        return False

    def computed(self, record: RoomRecord, stop: int, push: ChunkPush) -> None:
        """Note that all layers up to position ``stop`` are in the pool, and send what is left of ``push``."""
        record.num_ready_tokens = stop
        self._pusher.push_rest(push)

    def prompt_computed(self, record: RoomRecord, now_secs: float) -> None:
        """Move a room whose last chunk is computed from COMPUTING to SENDING, and send its staged aux
        record."""
        self._cache_pages(record)
        self.rooms.move(record, RoomState.SENDING, now_secs)
        self._pusher.push_aux(record)

    def _cache_pages(self, record: RoomRecord) -> None:
        """Put the room's pages into the cache. Where the cache has a page from another room by now, the room
        keeps its own copy, which writes read."""
        if record.holding is not None:
            record.prefix = self.prefixes.share(
                record.holding, record.keys, _CACHED, record.prefix, keeps_copies=True
            )

    def completed(self, completion: Completion, now_secs: float) -> None:
        """Account for a batch that came back from the sender, and end its room if it was the last or
        failed."""
        record = self.rooms.get(completion.room)
        if record is None:
            raise PoolIntegrityError(
                f"room {completion.room} was released before its batch {completion.tag} came back"
            )
        record.num_writes_pending -= 1
        record.num_bytes_sent += completion.num_bytes
        record.transfer_secs += completion.secs
        record.batch_failed |= completion.may_still_land
        self.counters["kv_transfer_bytes_total"] += completion.num_bytes
        self.counters["kv_transfer_seconds_total"] += completion.secs
        if record.is_draining:
            if record.num_writes_pending == 0:
                self._tell_peer(record.peer, RoomQuiet(record.room, record.batch_failed))
                self._end(record, RoomState.FAILED, now_secs)
        elif not completion.ok:
            self.counters["kv_transfer_failures_total"] += 1
            what = f"sending {completion.tag} to decode node {record.peer.node_id}"
            error = f"room {record.room}: {what}: {completion.error}"
            self.fail(record, 502, error, now_secs)
        elif record.state is RoomState.SENDING and record.num_writes_pending == 0:
            self._delivered(record, now_secs)

    def _delivered(self, record: RoomRecord, now_secs: float) -> None:
        record.phases.end(now_secs)
        done = RoomDone(
            record.room,
            record.num_bytes_sent,
            record.num_cached_tokens,
            record.transfer_secs,
            PrefillTimes(*map(record.phases.secs, PREFILL_PHASES)),
        )
        record.delivery = Delivery(record.peer.node_id, record.bootstrap.attempt, done)
        self._tell_peer(record.peer, done)
        self._end(record, RoomState.DONE, now_secs)

    # --- ends without delivery -----------------------------------------------------------------------

    def fail(
        self,
        record: RoomRecord,
        status: int,
        error: str,
        now_secs: float,
        *,
        tell_peer: bool = True,
        is_abort: bool = False,
    ) -> None:
        """End a room early and tell its decode node. With writes in flight the room drains first, and the
        decode node is told when it is quiet. A room that drains already stays as it is.

        ``is_abort``: the room is no longer wanted, which counts as aborted and not as failed.
        """
        if record.is_draining:
            return
        log.info("room %d failed in %s: %d %s", record.room, record.state.name, status, error)
        record.end_status, record.end_error = status, error
        self._pusher.cancel(record)
        is_quiet = record.num_writes_pending == 0
        self.counters["aborted_requests_total" if is_abort else "failed_requests_total"] += 1
        if tell_peer:
            self._tell_peer(
                record.peer, _room_failed(record.room, status, error, is_quiet, record.batch_failed)
            )
        if is_quiet:
            self._end(record, RoomState.FAILED, now_secs)
        else:
            if record.holding is not None:
                self.pools.move(record.holding, Stage.ENDING)
            self.rooms.move(record, RoomState.DRAINING, now_secs)

    def abort_room(self, peer: Peer, message: AbortRoom, now_secs: float) -> None:
        """End a room that its decode node gave up. Answers RoomQuiet, at once or after the last write."""
        room = Room(message.room)
        record = self.rooms.get(room)
        if record is None or record.peer.node_id != peer.node_id:
            ended = self.rooms.ended(room)
            self.dropped["unknown_room" if ended is None else "late"] += 1
            self._tell_peer(peer, RoomQuiet(room, batch_failed=ended is not None and ended.batch_failed))
            return
        if record.is_draining:
            return
        error = f"room {room}: decode node {peer.node_id} gave it up: {message.reason}"
        self.fail(record, 503, error, now_secs, tell_peer=False, is_abort=True)
        if not record.is_draining:
            self._tell_peer(peer, RoomQuiet(room, record.batch_failed))

    def fail_rooms_of(self, peer: Peer, error: str, now_secs: float) -> int:
        """Fail the rooms of a decode node that is lost; writes in flight to it drain. Return their number."""
        records = [record for record in self.rooms if record.peer is peer]
        for record in records:
            reason = f"room {record.room}: decode node {peer.node_id} {error}"
            self.fail(record, 502, reason, now_secs)
        return len(records)

    def fail_overdue(self, rooms: Sequence[Room], now_secs: float) -> None:
        """Fail rooms with a write that was in flight for longer than its limit."""
        for room in rooms:
            record = self.rooms.get(room)
            if record is not None:
                self.counters["kv_transfer_failures_total"] += 1
                limit_secs = self._pusher.write_timeout_secs
                error = f"room {room}: a write to the decode node took longer than {limit_secs:g} s"
                self.fail(record, 504, error, now_secs)

    def fail_expired(self, now_secs: float) -> None:
        """Fail the rooms that waited until their deadline; their decode node has given them up by then."""
        queued = self.rooms.in_state(RoomState.QUEUED)
        late = takewhile(lambda record: record.deadline_secs < now_secs, queued)
        for record in list(late):
            timeout_secs = self._room_timeout_secs + self._grace_secs
            error = (
                f"room {record.room}: it was not begun within {timeout_secs:g} s (room_timeout_secs "
                f"{self._room_timeout_secs:g}, and {self._grace_secs:g} s in which the decode node would "
                "have given it up); this prefill node has too much to do"
            )
            self.fail(record, 504, error, now_secs)

    def _end(self, record: RoomRecord, state: RoomState, now_secs: float) -> None:
        """Release all that the room holds, of which nothing may be in flight. This is the one release
        path."""
        if record.num_writes_pending:
            raise PoolIntegrityError(
                f"room {record.room} is released with {record.num_writes_pending} writes in flight"
            )
        if record.prefix is not None:
            self.prefixes.let_go(record.prefix)
        if record.holding is not None:
            self.pools.release(record.holding)
        record.prefix, record.holding, record.page_ids = None, None, []
        self.rooms.move(record, state, now_secs)

    # --- accounts ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless every slot is free, cached, set aside or held by exactly one
        room."""
        self.pools.check_integrity(
            {
                Stage.RUNNING: self.rooms.count(*_OWNING),
                Stage.ENDING: self.rooms.count(RoomState.DRAINING),
                Stage.HELD: len(self.prefixes),
                Stage.SET_ASIDE: self.pools.num_set_aside,
            }
        )
        self.prefixes.check_integrity(record.prefix for record in self.rooms if record.prefix is not None)
        for record in self.waiting():
            if record.holding is not None or record.prefix is not None or record.num_writes_pending:
                raise PoolIntegrityError(
                    f"room {record.room} owns pages or writes in state {record.state.name}"
                )


def _room_failed(room: Room, status: int, error: str, quiet: bool, batch_failed: bool) -> RoomFailed:
    return RoomFailed(room, status, error[:MAX_TEXT_CHARS], quiet, batch_failed)
