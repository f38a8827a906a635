"""The life of rooms: owns the pages and aux slots that rooms hold, what of prompts is cached, and who is told
what at a room's end.

Every message and event about a room ends here as a method, which is safe in every state of the room. A room
that does not make it leaves by ``fail``, and what a room holds is released by ``_end``: not while one of its
writes, which read it, is in the transport. A room fails with the first of its writes that fails.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import msgspec
import numpy as np
import numpy.typing as npt

from hisparse_pd.base.vocabulary import DECODE_NODE_FAILED, KV_ROW_CORRUPT, Mode
from hisparse_pd.core.grammar.compiler import MAX_WAIT_SECS, Compiler
from hisparse_pd.core.paging.allocator import PoolIntegrityError
from hisparse_pd.core.paging.extents import SlotArray, expand_pages, extents_to_pages
from hisparse_pd.core.paging.pools import PoolKind, Pools, SlotCounts, Stage
from hisparse_pd.core.paging.prefix_tree import PrefixTree
from hisparse_pd.core.paging.prompt_keys import PageKey, page_keys
from hisparse_pd.engine.held_rows import wrong_item_error
from hisparse_pd.engine.messages import (
    FromEngine,
    Generate,
    GenerateGroup,
    PrefillFinished,
    RequestFailed,
    Tokens,
    unpack_token_ids,
)
from hisparse_pd.engine.set_aside import SetAside
from hisparse_pd.kernels.row_check import WrongItem
from hisparse_pd.prefill_node.push import ChunkPush, Pusher, landing_of
from hisparse_pd.prefill_node.registrations import Peer, why_not_landing
from hisparse_pd.prefill_node.rooms import Delivery, EndedRoom, RoomRecord, RoomState, RoomTable
from hisparse_pd.prefill_node.scheduler import Chunk, Running, StepLimits, Waiting, why_never
from hisparse_pd.protocol.messages import (
    MAX_TEXT_CHARS,
    AbortRoom,
    Bootstrap,
    PrefillTimes,
    Room,
    RoomDone,
    RoomFailed,
    RoomQuiet,
    ToDecode,
)
from hisparse_pd.transfer.aux_record import MAX_LOGPROBS
from hisparse_pd.transfer.sender import Completion

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
MAX_WAITING_GRAMMARS = 64
"""Compiled ones of rooms that wait: each may take as much memory as ``grammar.checker`` lets it have."""

_WAITING = (RoomState.WAITING_BOOTSTRAP, RoomState.WAITING_REQUEST, RoomState.QUEUED)
_OWNING = (RoomState.COMPUTING, RoomState.SENDING)

_ALONE = "the request is the prefill node's alone; no decode node may take part"

_CACHED = (PoolKind.DEVICE,)
"""Where the KV of a cached prefix is; its indexer keys are in the same pages of the index pool."""

_COUNTERS = (
    "prompt_tokens_total",
    "cached_tokens_total",
    "kv_transfer_bytes_total",
    "kv_transfer_seconds_total",
    "kv_transfer_failures_total",
    "aborted_requests_total",
    "failed_requests_total",
    'kv_rows_corrupt_total{kind="cached"}',
    'kv_rows_corrupt_total{kind="scrub"}',
)


class RoomLife:
    """Rooms and what they hold. ``tell_front`` and ``tell_peer`` send a message and never wait."""

    def __init__(
        self,
        *,
        pusher: Pusher,
        limits: StepLimits,
        context_length: int,
        vocab_size: int,
        num_aux_slots: int,
        use_prefix_cache: bool,
        tell_front: Callable[[FromEngine], None],
        tell_peer: Callable[[Peer, ToDecode], None],
        wrong_items: Callable[[SlotArray, SlotArray], list[WrongItem]] = lambda slots, positions: [],
        room_timeout_secs: float = 300.0,
        grace_secs: float = 10.0,
    ) -> None:
        """``wrong_items``: of slots with tokens of these positions those that are not what was written.
        ``room_timeout_secs``: how long a decode node waits for anything about a room; this node waits for
        ``grace_secs`` more, so that the decode node's error is what clients get."""
        self.rooms = RoomTable()
        self.counters: defaultdict[str, float] = defaultdict(float, dict.fromkeys(_COUNTERS, 0.0))
        """Monotone totals, by metric name."""
        self.dropped: Counter[str] = Counter()
        """Control messages without effect, by reason."""
        self.pools = Pools(
            SlotCounts(device=limits.num_pages * limits.page_size, aux=num_aux_slots), limits.page_size
        )
        self.prefixes = PrefixTree(self.pools)
        """What is cached of prompts that were computed."""
        self.set_aside = SetAside(self.pools, self.prefixes)
        self._pusher = pusher
        self._limits = limits
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._use_prefix_cache = use_prefix_cache
        self._room_timeout_secs = room_timeout_secs
        self._grace_secs = grace_secs
        self._tell_front = tell_front
        self._tell_peer = tell_peer
        self._wrong_items = wrong_items

    # --- the halves of a room ------------------------------------------------------------------------

    def accept(self, group: GenerateGroup, now_secs: float) -> None:
        """The front's halves of all rooms of a prompt, which share its ids and keys."""
        token_ids = unpack_token_ids(group.prompt)
        error = self._why_refused(token_ids)
        keys: tuple[PageKey, ...] = ()
        if error is None and self._use_prefix_cache:
            keys = tuple(page_keys(group.identity.root, group.prompt, self._limits.page_size))
        for request in group.samples:
            why_not = error or self._why_unsampled(request)
            self._accept(request, token_ids, group.identity.digest, keys, why_not, now_secs)

    def _accept(
        self,
        request: Generate,
        token_ids: npt.NDArray[np.int32],
        digest: bytes,
        keys: tuple[PageKey, ...],
        error: str | None,
        now_secs: float,
    ) -> None:
        """A prompt that can never be computed, which has an ``error``, or a used room is refused at once."""
        room = Room(request.room)
        record = self.rooms.get(room)
        if record is not None and record.request is not None:
            self._refuse_request(
                request, 400, f"bootstrap_room {room} is in use by another request; choose a new one"
            )
            return
        ended = self.rooms.ended(room)
        if ended is not None:
            self._refuse_request(request, ended.status, ended.error, was_aborted=ended.was_aborted)
            return
        if error is not None:
            self._refuse_request(request, 400, error)
            if record is None:
                self.rooms.remember(room, EndedRoom(400, error, batch_failed=False))
            else:
                self.fail(record, 400, error, now_secs)
            return
        if record is None:
            record = self.rooms.open(room, RoomState.WAITING_BOOTSTRAP, now_secs)
        self.rooms.set_request(record, request, now_secs)
        record.token_ids, record.digest = token_ids, digest
        record.keys = keys[: record.first_resumed // self._limits.page_size]
        self._join(record, now_secs)

    def bootstrap(self, peer: Peer, message: Bootstrap, now_secs: float) -> None:
        """The decode node's half. Its landing zone is checked before anything else happens with the room."""
        room = Room(message.room)
        record = self.rooms.get(room)
        if record is not None and record.bootstrap is not None:
            if record.is_draining and _is_repeated(peer, message, record):
                failed = _room_failed(room, record.end_status, record.end_error, False, record.batch_failed)
                self._tell_peer(peer, failed)
                return
            self.dropped["duplicate"] += 1
            log.warning("room %d: dropped a second Bootstrap, from node %s", room, peer.node_id)
            return
        ended = self.rooms.ended(room)
        delivery = None if ended is None else ended.delivery
        if delivery is not None and delivery.answers(peer.node_id, message.attempt):
            self._tell_peer(peer, delivery.done)  # the first one was lost with its connection
            return
        if ended is not None:
            self.dropped["late"] += 1
            self._tell_peer(peer, _room_failed(room, ended.status, ended.error, True, ended.batch_failed))
            return
        if record is None:
            record = self.rooms.open(room, RoomState.WAITING_REQUEST, now_secs)
        elif record.is_prefill_only:
            self.dropped["unknown_room"] += 1
            self._tell_peer(peer, _room_failed(room, 400, f"room {room}: {_ALONE}", True, False))
            return
        record.peer, record.bootstrap = peer, message
        record.deadline_secs = now_secs + self._room_timeout_secs + self._grace_secs
        error = why_not_landing(message, peer, self._limits.page_size)
        if error is not None:
            self.fail(record, 400, f"room {room}: {error}", now_secs)
        else:
            self._join(record, now_secs)

    def _join(self, record: RoomRecord, now_secs: float) -> None:
        if record.is_prefill_only:
            if record.bootstrap is None:
                self.rooms.move(record, RoomState.QUEUED, now_secs)
            else:
                self.fail(record, 400, f"room {record.room}: {_ALONE}", now_secs)
            return
        if record.request is None or record.bootstrap is None:
            return
        theirs = record.bootstrap.num_prompt_tokens, record.bootstrap.prompt_digest
        ours = record.num_prompt_tokens, record.digest
        if theirs != ours:
            error = (
                f"room {record.room}: the prompt has {_told(*theirs)} on the decode node and {_told(*ours)} "
                "on the prefill node; send the same body, cache_salt and extra_key included, to both nodes, "
                "and serve the same model and tokenizer with the same --chat-control-tokens on both"
            )
            self.fail(record, 400, error, now_secs)
        else:
            self.rooms.move(record, RoomState.QUEUED, now_secs)

    def _why_refused(self, token_ids: npt.NDArray[np.int32]) -> str | None:
        """The front checks it too; here it protects the batch neighbours."""
        num_tokens = len(token_ids)
        if num_tokens == 0:
            return "the prompt is empty; it needs at least one token"
        if num_tokens > self._context_length:
            return (
                f"prompt of {num_tokens} tokens is longer than the context of "
                f"{self._context_length} tokens; shorten it"
            )
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            outside = lowest if lowest < 0 else highest
            return f"prompt token id {outside} is not in [0, {self._vocab_size}), the model's vocabulary"
        return why_never(num_tokens, self._limits)

    def _why_unsampled(self, request: Generate) -> str | None:
        num_logprobs = request.sampling.num_logprobs or 0
        if request.scores is not None:
            num_logprobs = max(num_logprobs, request.scores.num_top)
            if request.scores.first < 1:
                return f"position {request.scores.first} has no logprob; position 1 is the first that has one"
        if num_logprobs > MAX_LOGPROBS:
            return f"{num_logprobs} logprobs a token asked for, at most {MAX_LOGPROBS}"
        return None

    def _refuse_request(
        self, request: Generate, status: int, error: str, *, was_aborted: bool = False
    ) -> None:
        self._count_end(was_aborted)
        self._tell_front(RequestFailed(request.request_id, status, error))

    def _count_end(self, was_aborted: bool) -> None:
        """Of a request that is not delivered: each is counted here, once."""
        self.counters["aborted_requests_total" if was_aborted else "failed_requests_total"] += 1

    # --- computing -----------------------------------------------------------------------------------

    def running(self) -> list[Running]:
        """The rooms that compute, in order of admission, as the scheduler wants them."""
        return [
            Running(record.room, record.num_prompt_tokens, record.num_computed_tokens, record.keys)
            for record in self.rooms.in_state(RoomState.COMPUTING)
        ]

    def waiting(self) -> list[RoomRecord]:
        """The rooms that could be admitted, in order of arrival."""
        return list(self.rooms.in_state(RoomState.QUEUED))

    def candidates(self) -> Iterator[Waiting]:
        """The waiting rooms, in order of arrival, without those whose decode node has too much pending. What
        the rooms before have in the prefix cache is sent when they are admitted, and counts as pending."""
        num_bytes_pending: dict[str, int] = {}
        for record in self.waiting():
            if record.is_prefill_only:
                if self._has_grammar(record):
                    yield self.look_up(record)
                continue
            peer, bootstrap = landing_of(record)
            session = peer.session
            if session not in num_bytes_pending:
                num_bytes_pending[session] = self._pusher.num_bytes_pending(peer)
            if not self._pusher.has_place(record, num_bytes_pending[session]):
                continue
            if not self._has_grammar(record):
                continue  # the others do not wait for it
            waiting = self.look_up(record)
            num_cached_tokens = waiting.num_cached_pages * self._limits.page_size
            num_to_send = max(0, num_cached_tokens - bootstrap.num_held_tokens)
            num_bytes_pending[session] += self._pusher.num_bytes(num_to_send)
            yield waiting

    def _has_grammar(self, record: RoomRecord) -> bool:
        """Whether its first token can be held to what is asked for."""
        if record.grammar is None:
            return not record.sampling.grammar
        # One that came to nothing after ``follow_grammars`` would end the whole batch.
        return record.grammar.done() and record.grammar.exception() is None

    def follow_grammars(self, grammars: Compiler, now_secs: float) -> None:
        """Ask for those of waiting rooms, of a few because they take memory, and end the rooms whose grammar
        cannot be followed here, or was not compiled in time."""
        held = {record.grammar for record in self.waiting() if record.grammar is not None}
        for record in self.waiting():
            grammar = record.sampling.grammar
            if grammar and record.grammar is None and len(held) < MAX_WAITING_GRAMMARS:
                begun = record.token_ids[record.first_resumed :].tolist()
                record.grammar, record.grammar_asked_secs = grammars.ask(grammar, begun), now_secs
                held.add(record.grammar)
            if record.grammar is None:
                continue
            if not record.grammar.done():
                if now_secs - record.grammar_asked_secs > MAX_WAIT_SECS:
                    reason = f"its grammar was not compiled within {MAX_WAIT_SECS:g} s; try again"
                    self.fail(record, 503, f"room {record.room}: {reason}", now_secs)
            elif (error := record.grammar.exception()) is not None:
                reason = f"room {record.room}: the output cannot follow its grammar: {error}"
                self.fail(record, 400, reason, now_secs)

    def look_up(self, record: RoomRecord) -> Waiting:
        """A waiting room with what the prefix cache has of it."""
        keys = self._reusable_keys(record)
        found = self.prefixes.find(keys, _CACHED)
        parts = () if found is None else tuple(found.parts())
        num_cached_pages = sum(num_pages for _, num_pages in parts)
        num_unused_pages = sum(num_pages for prefix, num_pages in parts if not prefix.num_users)
        return Waiting(record.room, record.num_prompt_tokens, keys, num_cached_pages, num_unused_pages)

    def _reusable_keys(self, record: RoomRecord) -> tuple[PageKey, ...]:
        """Of the pages that may come from the cache. The last prompt token is always computed, and so is
        each whose row says how likely the next one is, where that is wanted."""
        first_computed = record.num_prompt_tokens - 1
        if record.request is not None and record.request.scores is not None:
            first_computed = min(first_computed, record.request.scores.first - 1)
        return record.keys[: first_computed // self._limits.page_size]

    @property
    def num_available_pages(self) -> int:
        return (self.pools.free + self.prefixes.unused).device // self._limits.page_size

    def set_wrong_aside(self, chunks: Sequence[Chunk], now_secs: float) -> bool:
        """Whether a row that ``chunks`` would read again is wrong: of a cached prefix, or of earlier chunks.

        Then the plan is to be made anew. Who was to begin with the prefix computes it; rooms that have such a
        row among theirs have failed, and may do better at another prefill node, or here in another page.
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
            item.slot // self._limits.page_size: self.row_is_wrong("cached", PoolKind.DEVICE, item)
            for item in self._wrong_items(np.concatenate(slots), np.concatenate(positions))
        }
        for record in list(self.rooms.in_state(RoomState.COMPUTING)) if errors else ():
            error = next((errors[page_id] for page_id in record.page_ids if page_id in errors), None)
            if error is not None:
                self.fail(record, 502, f"room {record.room}: {error}", now_secs, code=KV_ROW_CORRUPT)
        return bool(errors)

    def _slots_before(self, chunk: Chunk) -> SlotArray:
        """Where the tokens are that a chunk's own attend to: int64 [chunk.start], in order."""
        record, page_size = self.rooms.live(chunk.room), self._limits.page_size
        page_ids = record.page_ids
        if chunk.admits and chunk.start:
            found = self.prefixes.find(self._reusable_keys(record), _CACHED)
            page_ids = (
                [] if found is None else extents_to_pages(found.prefix.extents(PoolKind.DEVICE), page_size)
            )
        return expand_pages(np.asarray(page_ids, np.int64), page_size, 0, chunk.start)

    def row_is_wrong(self, kind: str, pool: PoolKind, item: WrongItem) -> str:
        """A row is not what was written: nobody else uses its page, nor a prefix that has it. Returns what is
        wrong. ``kind``: where it was found, see ``_COUNTERS``."""
        error = wrong_item_error(kind, pool, item, "prefill")
        log.error("%s", error)
        self.counters[f'kv_rows_corrupt_total{{kind="{kind}"}}'] += 1
        self.set_aside.add(pool, item.slot, error)
        return error

    def release_page(self, pool: PoolKind, start: int) -> None:
        """The operator says that a page which was set aside is good."""
        found = self.set_aside.take_back(pool, start)
        log.warning("page at slot %d of the %s pool is good, says an operator (%s)", start, pool, found)

    def fail_too_long(self, now_secs: float) -> None:
        """End waiting rooms whose prompts do not fit beside the pages that are set aside."""
        num_pages = self._limits.num_pages - len(self.set_aside)
        for record in self.waiting() if self.set_aside else ():
            why = why_never(record.num_prompt_tokens, replace(self._limits, num_pages=num_pages))
            if why is not None:
                error = (
                    f"{why}; {len(self.set_aside)} pages are set aside, see /quarantine of the prefill node"
                )
                self.fail(record, 503, f"room {record.room}: {error}", now_secs)

    def admit(self, records: Sequence[RoomRecord], now_secs: float) -> None:
        """QUEUED -> COMPUTING for the rooms of a plan: all their pages, an aux slot; sends cached prefixes.
        All use their prefixes before the first takes a page, which may evict what nobody uses."""
        for record in records:
            keys = self._reusable_keys(record)
            if (found := self.prefixes.find(keys, _CACHED)) is not None:
                record.prefix = self.prefixes.use(keys[: found.num_pages], _CACHED)
        page_size = self._limits.page_size
        for record in records:
            num_cached_pages = 0 if record.prefix is None else record.prefix.end_page
            num_new_pages = self._limits.pages_for(record.num_prompt_tokens) - num_cached_pages
            need = SlotCounts(device=num_new_pages * page_size, aux=1)
            self.prefixes.make_room(need)
            record.holding = self.pools.reserve(record.room, need, Stage.RUNNING)
            cached = () if record.prefix is None else record.prefix.extents(PoolKind.DEVICE)
            record.page_ids = extents_to_pages(cached + record.holding[PoolKind.DEVICE], page_size)
            record.num_cached_tokens = record.num_computed_tokens = num_cached_pages * page_size
            self.rooms.move(record, RoomState.COMPUTING, now_secs)
            self.counters["prompt_tokens_total"] += record.num_prompt_tokens
            self.counters["cached_tokens_total"] += record.num_cached_tokens
            if not record.is_prefill_only:
                self._pusher.push_rest(self._pusher.plan(record, 0, record.num_cached_tokens))

    def computed(self, record: RoomRecord, stop: int, push: ChunkPush | None) -> None:
        """The forward is through, all layers up to position ``stop`` are in the pool: send those of ``push``
        that have not left. None: nothing of the room is sent."""
        record.num_computed_tokens = stop
        record.num_chunks += 1
        if push is not None:
            self._pusher.push_rest(push)

    def prompt_computed(self, record: RoomRecord, now_secs: float) -> None:
        """COMPUTING -> SENDING: the last chunk is computed; the aux record, which is staged, is sent."""
        self._cache_pages(record)
        self.rooms.move(record, RoomState.SENDING, now_secs)
        self._pusher.push_aux(record)

    def answer_alone(self, record: RoomRecord, answer: Tokens, now_secs: float) -> None:
        """COMPUTING -> DONE: the prompt of a room that is this node's alone is computed."""
        self._cache_pages(record)
        record.phases.end(now_secs)
        self._tell_front(msgspec.structs.replace(answer, phases=record.phases.take()))
        self._end(record, RoomState.DONE, now_secs)

    def _cache_pages(self, record: RoomRecord) -> None:
        """Pages that are cached of another room by now stay its own: writes read them."""
        if record.holding is not None:
            record.prefix = self.prefixes.share(
                record.holding, record.keys, _CACHED, record.prefix, keeps_known=True
            )

    def completed(self, completion: Completion, now_secs: float) -> None:
        """A batch of a room came back from the sender."""
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
                if record.peer is not None:
                    self._tell_peer(record.peer, RoomQuiet(record.room, record.batch_failed))
                self._end(record, RoomState.FAILED, now_secs)
        elif not completion.ok:
            self.counters["kv_transfer_failures_total"] += 1
            peer, _ = landing_of(record)
            what = f"sending {completion.tag} to decode node {peer.node_id}"
            error = f"room {record.room}: {what}: {completion.error}"
            self.fail(record, 502, error, now_secs)
        elif record.state is RoomState.SENDING and record.num_writes_pending == 0:
            self._delivered(record, now_secs)

    def _delivered(self, record: RoomRecord, now_secs: float) -> None:
        peer, bootstrap = landing_of(record)
        record.phases.end(now_secs)
        done = RoomDone(
            record.room,
            record.num_bytes_sent,
            record.num_cached_tokens,
            record.transfer_secs,
            PrefillTimes(*map(record.phases.secs, ("queue", "prefill", "transfer"))),
        )
        record.delivery = Delivery(peer.node_id, bootstrap.attempt, done)
        self._tell_peer(peer, done)
        if record.request is not None:
            self._tell_front(
                PrefillFinished(
                    record.request.request_id,
                    record.num_prompt_tokens,
                    record.num_cached_tokens,
                    record.num_bytes_sent,
                    record.transfer_secs,
                    bootstrap.num_held_tokens,
                    record.num_chunks,
                    Mode.HISPARSE if bootstrap.hisparse else Mode.DENSE,
                    record.phases.take(),
                )
            )
        self._end(record, RoomState.DONE, now_secs)

    # --- ends that are no delivery -------------------------------------------------------------------

    def fail(
        self,
        record: RoomRecord,
        status: int,
        error: str,
        now_secs: float,
        *,
        tell_front: bool = True,
        tell_peer: bool = True,
        is_abort: bool = False,
        code: str = "",
    ) -> None:
        """End a room early and say so to both sides. With writes in flight it drains, then the peer hears.

        ``is_abort``: nobody wants it any more, which is no failure. ``code``: see ``RequestFailed``. Nothing
        happens to a room that drains already.
        """
        if record.is_draining:
            return
        log.info("room %d failed in %s: %d %s", record.room, record.state.name, status, error)
        record.end_status, record.end_error, record.was_aborted = status, error, is_abort
        self._pusher.cancel(record)
        is_quiet = record.num_writes_pending == 0
        if record.request is not None:
            self._count_end(is_abort)
        if record.request is not None and tell_front:
            record.phases.end(now_secs)
            phases = record.phases.take()
            self._tell_front(RequestFailed(record.request.request_id, status, error, code, phases))
        if record.peer is not None and tell_peer:
            self._tell_peer(
                record.peer, _room_failed(record.room, status, error, is_quiet, record.batch_failed)
            )
        if is_quiet:
            self._end(record, RoomState.FAILED, now_secs)
        else:
            if record.holding is not None:
                self.pools.move(record.holding, Stage.ENDING)
            self.rooms.move(record, RoomState.DRAINING, now_secs)

    def abort_request(self, request_id: str, now_secs: float) -> None:
        """The front's client is gone. The decode node hears it, for its client may wait still."""
        record = self.rooms.of_request(request_id)
        if record is None or record.is_draining:
            return
        error = f"room {record.room}: the client of the prefill node closed the request"
        self.fail(record, CLIENT_CLOSED_REQUEST, error, now_secs, tell_front=False, is_abort=True)

    def abort_room(self, peer: Peer, message: AbortRoom, now_secs: float) -> None:
        """The decode node gave a room up: RoomQuiet is the answer, now or when the last write came back."""
        room = Room(message.room)
        record = self.rooms.get(room)
        is_his = record is not None and (record.peer is None or record.peer.node_id == peer.node_id)
        if record is None or not is_his:
            ended = self.rooms.ended(room)
            self.dropped["unknown_room" if ended is None else "late"] += 1
            self._tell_peer(peer, RoomQuiet(room, batch_failed=ended is not None and ended.batch_failed))
            return
        if record.is_draining:
            return
        error = f"room {room}: decode node {peer.node_id} gave it up: {message.reason}"
        self.fail(record, 503, error, now_secs, tell_peer=False, is_abort=True, code=DECODE_NODE_FAILED)
        if not record.is_draining:
            self._tell_peer(peer, RoomQuiet(room, record.batch_failed))

    def fail_rooms_of(self, peer: Peer, error: str, now_secs: float) -> int:
        """A decode node is lost: its rooms end, and what is in flight to it drains. Returns their number."""
        records = [record for record in self.rooms if record.peer is peer]
        for record in records:
            reason = f"room {record.room}: decode node {peer.node_id} {error}"
            self.fail(record, 502, reason, now_secs, code=DECODE_NODE_FAILED)
        return len(records)

    def fail_overdue(self, rooms: Sequence[Room], now_secs: float) -> None:
        """Writes of these rooms are in flight for longer than one may be."""
        for room in rooms:
            record = self.rooms.get(room)
            if record is not None:
                self.counters["kv_transfer_failures_total"] += 1
                limit_secs = self._pusher.write_timeout_secs
                error = f"room {room}: a write to the decode node took longer than {limit_secs:g} s"
                self.fail(record, 504, error, now_secs)

    def fail_unpaired(self, now_secs: float) -> None:
        """End the rooms whose other half did not come in time, when the decode node has given them up."""
        timeout_secs = self._room_timeout_secs + self._grace_secs
        halves = ((RoomState.WAITING_BOOTSTRAP, "decode"), (RoomState.WAITING_REQUEST, "prefill"))
        for state, missing in halves:
            waiting = self.rooms.in_state(state)
            late = takewhile(lambda record: now_secs - record.since_secs > timeout_secs, waiting)
            for record in list(late):
                error = (
                    f"room {record.room}: the request did not reach the {missing} node within "
                    f"{timeout_secs:g} s (room_timeout_secs {self._room_timeout_secs:g}, and "
                    f"{self._grace_secs:g} s in which the decode node would have said why); send it through "
                    "the router, which sends it to both"
                )
                self.fail(record, 504, error, now_secs)

    def _end(self, record: RoomRecord, state: RoomState, now_secs: float) -> None:
        """Give back whatever the room holds; nothing of it may be in flight. The one release path."""
        if record.num_writes_pending:
            raise PoolIntegrityError(
                f"room {record.room} is released with {record.num_writes_pending} writes in flight"
            )
        record.grammar = None  # nobody else may want it
        if record.prefix is not None:
            self.prefixes.let_go(record.prefix)
        if record.holding is not None:
            self.pools.release(record.holding)
        record.prefix, record.holding, record.page_ids = None, None, []
        self.rooms.move(record, state, now_secs)

    # --- accounts ------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless every slot is free, cached, or held by exactly one room here."""
        self.pools.check_integrity(
            {
                Stage.RUNNING: self.rooms.count(*_OWNING),
                Stage.ENDING: self.rooms.count(RoomState.DRAINING),
                Stage.HELD: len(self.prefixes),
                Stage.SET_ASIDE: self.pools.num_set_aside,
            }
        )
        self.prefixes.check_integrity(record.prefix for record in self.rooms if record.prefix is not None)
        for record in self.rooms.in_state(*_WAITING):
            if record.holding is not None or record.prefix is not None or record.num_writes_pending:
                raise PoolIntegrityError(
                    f"room {record.room} owns pages or writes in state {record.state.name}"
                )


def _told(num_tokens: int, digest: bytes) -> str:
    return f"{num_tokens} tokens of digest {digest.hex()}"


def _is_repeated(peer: Peer, message: Bootstrap, record: RoomRecord) -> bool:
    """Whether it is the Bootstrap that the room has, over another connection."""
    is_his = record.peer is not None and record.peer.node_id == peer.node_id
    return is_his and message.attempt > 0 and message == record.bootstrap


def _room_failed(room: Room, status: int, error: str, quiet: bool, batch_failed: bool) -> RoomFailed:
    return RoomFailed(room, status, error[:MAX_TEXT_CHARS], quiet, batch_failed)
