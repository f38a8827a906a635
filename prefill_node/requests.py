"""The requests of a prefill node: ``PrefillRequest``, its states, and the table of all of them.

A request begins with a decode node's ``Bootstrap``, which says which KV is wanted and where it is to land,
and is named by its room. ``PrefillRequests`` owns the states of live requests and what is remembered of ended
ones. Only ``request_life.py`` moves a request that ``arrivals.py`` has opened, and only ``prompt_pages.py``
changes what pages it has; the scheduler, ``compute.py`` and ``push.py`` read it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from hisparse_pd.core.paging.extents import total_length
from hisparse_pd.core.paging.pools import Holding, PoolKind
from hisparse_pd.core.paging.prefix import Prefix, is_on_its_way
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.engine.phases import PREFILL_PHASES, PhaseLog
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.protocol.messages import Bootstrap, FetchedTokens, Room, RoomDone, first_stepped

MAX_ENDED_REQUESTS = 65_536
"""Most ended requests that are remembered, to answer late messages. The oldest are forgotten first."""


class PrefillState(Enum):
    """The states of a request, and what it owns in each: pages and an aux slot in COMPUTING, SENDING and
    DRAINING, nothing in the others."""

    QUEUED = auto()
    """It waits for a step with tokens, pages and an aux slot to spare. It fails at its deadline."""
    COMPUTING = auto()
    """It owns an aux slot and pages for the prompt after its cached prefix, which it uses. Writes of finished
    layers may be in flight. If a prefix that was arriving turns out wrong, nothing has been sent, and the
    request is QUEUED again."""
    SENDING = auto()
    """All of its KV is computed. It owns the same until its last write, the aux record, is complete."""
    DRAINING = auto()
    """It has failed with writes in flight, and owns the same until the last of them returns. Without any, a
    request that fails is FAILED at once."""
    DONE = auto()
    """It is delivered. It is remembered as an EndedRequest."""
    FAILED = auto()
    """It ended without delivery. It is remembered as an EndedRequest."""


MOVES: dict[PrefillState, frozenset[PrefillState]] = {
    PrefillState.QUEUED: frozenset({PrefillState.COMPUTING, PrefillState.FAILED}),
    PrefillState.COMPUTING: frozenset(
        {PrefillState.QUEUED, PrefillState.SENDING, PrefillState.DRAINING, PrefillState.FAILED}
    ),
    PrefillState.SENDING: frozenset({PrefillState.DONE, PrefillState.DRAINING, PrefillState.FAILED}),
    PrefillState.DRAINING: frozenset({PrefillState.FAILED}),
    PrefillState.DONE: frozenset(),
    PrefillState.FAILED: frozenset(),
}
ENDED = frozenset({PrefillState.DONE, PrefillState.FAILED})


class IllegalPrefillMove(Exception):
    """A request was opened or moved in a way that its state does not allow: an error in the engine."""


@dataclass(eq=False, slots=True)
class PrefillRequest:
    """One request of a decode node. Times are those of ``time.monotonic``, in seconds."""

    peer: Peer
    """The decode node that sent the Bootstrap."""
    bootstrap: Bootstrap
    since_secs: float
    """When it entered its present state."""
    deadline_secs: float = float("inf")
    """When the decode node has given it up: no computing and no batch starts later."""
    keys: tuple[PageKey, ...] = ()
    """Keys of its whole pages before ``first_stepped``, the only ones that other prompts may share; empty
    when the prefix cache is off."""
    state: PrefillState = PrefillState.QUEUED
    token_ids: npt.NDArray[np.int32] = field(init=False)
    """All tokens of the prompt, even the last one, which is not computed here: a view of the Bootstrap's
    bytes."""
    num_readable_tokens: int = field(init=False)
    """Leading tokens that its decode node lets this node read (``HeldKv``), which each plan asks for."""

    # What it owns from COMPUTING on.
    page_ids: list[int] = field(default_factory=list)
    """Pages of all computed positions in order, those of the cached prefix included."""
    holding: Holding | None = None
    """The slots that it alone owns: pages, and a slot in this node's aux staging memory."""
    prefix: Prefix | None = None
    """The cached beginning of its prompt, which other requests may use too."""

    # Progress.
    num_cached_tokens: int = 0
    """Leading positions whose KV came from the cache."""
    fetched: FetchedTokens = field(default_factory=FetchedTokens)
    """Those of them that lower tiers had, by tier."""
    num_ready_tokens: int = 0
    """Leading positions whose KV is in the pool, computed or cached."""
    num_writes_pending: int = 0
    """Batches of writes that were submitted to the send queue and have not completed."""
    num_bytes_sent: int = 0
    transfer_secs: float = 0.0
    """Time that the transport spent on its batches."""
    batch_failed: bool = False
    """Whether a batch ended in an error after which bytes may still land."""
    end_status: int = 400
    """The HTTP status that, with ``end_error``, answers messages about its room once it has ended. The
    defaults are for a request that was delivered; a failure sets both."""
    end_error: str = "this room was served before; choose a new one"
    delivery: Delivery | None = None
    """The answer to the decode node, once everything is delivered."""
    phases: PhaseLog = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = unpack_token_ids(self.bootstrap.prompt)
        held = self.bootstrap.held
        self.num_readable_tokens = 0 if held is None else total_length(held.kv_extents)
        self.phases = PhaseLog(PREFILL_PHASES, self.since_secs)

    @property
    def room(self) -> Room:
        return Room(self.bootstrap.room)

    @property
    def own_page_ids(self) -> list[int]:
        """Its pages after the cached prefix."""
        return self.page_ids[0 if self.prefix is None else self.prefix.end_page :]

    @property
    def is_arriving(self) -> bool:
        """Whether some of its cached prefix is on its way to the device, and not verified yet."""
        return is_on_its_way(self.prefix)

    @property
    def has_lost_prefix(self) -> bool:
        """Whether a row of its cached prefix was found wrong."""
        return self.prefix is not None and self.prefix.is_dropped

    @property
    def has_ended(self) -> bool:
        """Whether it is DONE or FAILED: the decode node may write over what it has of the prompt."""
        return self.state in ENDED

    @property
    def is_draining(self) -> bool:
        return self.state is PrefillState.DRAINING

    @property
    def aux_slot_src(self) -> int | None:
        """Its slot in this node's aux staging memory; None while it has none."""
        return None if self.holding is None else self.holding.only_slot(PoolKind.AUX)

    @property
    def num_computed_tokens(self) -> int:
        """Leading positions whose KV this node computes or has cached: all but the prompt's last."""
        return self.bootstrap.num_computed_tokens

    @property
    def is_computed(self) -> bool:
        """Whether the KV of its whole prompt is in the pool."""
        return self.num_ready_tokens == self.num_computed_tokens

    @property
    def first_stepped(self) -> int:
        """First position of the prompt whose KV is rounded as in decode steps, and which therefore no other
        prompt shares (``messages.first_stepped``)."""
        message = self.bootstrap
        return first_stepped(message.num_prompt_tokens, message.num_resumed_tokens, self.peer.page_size)

    @property
    def first_needed(self) -> int:
        """First position that is computed even if it is cached.

        The last computed position, one before the prompt's last, selects the hint. Logprobs of the prompt's
        tokens are wanted from position ``scores.first`` on, and a token's come from the forward's row of the
        position before it.
        """
        last = self.num_computed_tokens - 1
        scores = self.bootstrap.scores
        return last if scores is None else min(last, scores.first - 1)

    def reusable_keys(self, page_size: int) -> tuple[PageKey, ...]:
        """Return the keys of the pages that may come from the cache: those before ``first_needed``."""
        return self.keys[: self.first_needed // page_size]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The RoomDone that was sent for a request, and the attempt of the decode node that it answered."""

    node_id: str
    attempt: int
    done: RoomDone

    def answers(self, node_id: str, attempt: int) -> bool:
        """Return whether a Bootstrap with this ``attempt`` of decode node ``node_id`` repeats the one that
        was answered, so that what was delivered is still in its landing zone.

        Attempt 0 is never a repetition: the decode node does not number its attempts.
        """
        return attempt > 0 and (self.node_id, self.attempt) == (node_id, attempt)


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """The record of an ended request, for answers to late messages about its room."""

    status: int
    error: str
    batch_failed: bool
    delivery: Delivery | None = None
    """The delivery of a request that ended in DONE."""


class PrefillRequests:
    """All live requests by room and by state, in QUEUED in order of arrival and in other states in order of
    entry, and the ended ones by room."""

    def __init__(self, max_ended: int = MAX_ENDED_REQUESTS) -> None:
        self._live: dict[Room, PrefillRequest] = {}
        """In order of arrival."""
        self._by_state: dict[PrefillState, dict[Room, PrefillRequest]] = {state: {} for state in PrefillState}
        self._ended: OrderedDict[Room, EndedRequest] = OrderedDict()
        self._never_came: OrderedDict[tuple[Room, str, int], None] = OrderedDict()
        """Room, session and attempt of what was given up before its Bootstrap came."""
        self._max_ended = max_ended
        self.num_queued_tokens = 0
        """Prompt tokens of all QUEUED requests."""

    def open(self, request: PrefillRequest) -> None:
        """Add a new request in QUEUED. Raises IllegalPrefillMove if it is in another state, or if its room is
        live or ended."""
        room = request.room
        if room in self._live or room in self._ended:
            raise IllegalPrefillMove(f"room {room} is opened but exists already")
        if request.state is not PrefillState.QUEUED:
            raise IllegalPrefillMove(f"room {room} cannot start in {request.state.name}")
        self._live[room] = request
        self._by_state[PrefillState.QUEUED][room] = request
        self.num_queued_tokens += len(request.token_ids)

    def move(self, request: PrefillRequest, state: PrefillState, now_secs: float) -> None:
        """Change a request's state. In DONE and FAILED it is no longer live, but remembered.

        A move to a live state ends a phase of its log. ``request_life.py`` ends the last one before DONE,
        since RoomDone has its length. A request that is QUEUED again goes on with that phase, in its place by
        order of arrival. Raises IllegalPrefillMove.
        """
        if state not in MOVES[request.state]:
            raise IllegalPrefillMove(
                f"room {request.room} cannot move from {request.state.name} to {state.name}"
            )
        del self._by_state[request.state][request.room]
        if request.state is PrefillState.QUEUED:
            self.num_queued_tokens -= len(request.token_ids)
        request.state, request.since_secs = state, now_secs
        if state is PrefillState.QUEUED:
            self._by_state[state] = {room: each for room, each in self._live.items() if each.state is state}
            self.num_queued_tokens += len(request.token_ids)
            request.phases.reopen()
            return
        if state not in ENDED:
            self._by_state[state][request.room] = request
            request.phases.end(now_secs)
            return
        del self._live[request.room]
        self._ended[request.room] = EndedRequest(
            request.end_status, request.end_error, request.batch_failed, request.delivery
        )
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def get(self, room: Room) -> PrefillRequest | None:
        """Return the live request with this room; None if there is none."""
        return self._live.get(room)

    def live(self, room: Room) -> PrefillRequest:
        """Return the live request with this room. Raises KeyError if there is none."""
        return self._live[room]

    def ended(self, room: Room) -> EndedRequest | None:
        """Return what is remembered of the ended request with this room, or None."""
        return self._ended.get(room)

    def note_given_up(self, room: Room, session: str, attempt: int) -> None:
        """Note that the decode node at a session gave up an attempt that never came. Its slots are free soon,
        so a Bootstrap of it that a lost connection has kept must not be served. Attempt 0 is not noted: its
        decode node does not number them."""
        if attempt:
            self._never_came[room, session, attempt] = None
            while len(self._never_came) > self._max_ended:
                self._never_came.popitem(last=False)

    def was_given_up(self, room: Room, session: str, attempt: int) -> bool:
        """Return whether ``note_given_up`` was told so."""
        return (room, session, attempt) in self._never_came

    def in_state(self, *states: PrefillState) -> Iterator[PrefillRequest]:
        """Yield live requests, state by state, in the order of each. Make a list before moving any."""
        for state in states:
            yield from self._by_state[state].values()

    def count(self, *states: PrefillState) -> int:
        return sum(len(self._by_state[state]) for state in states)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return iter(self._live.values())
