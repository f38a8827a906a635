"""The rooms of the prefill node: owns which rooms exist, their states, and the memory of those that ended.

A room joins two halves that arrive in any order: the front's ``Generate`` and the decode node's
``Bootstrap``. A request that is this node's alone has no second half. From then on a room moves one way; what
it owns in a state is written at the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from hisparse_pd.base.vocabulary import SamplingParams
from hisparse_pd.core.grammar.token_trie import Grammar
from hisparse_pd.core.paging.pools import Holding, PoolKind
from hisparse_pd.core.paging.prefix_tree import Prefix
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.messages import Generate
from hisparse_pd.engine.phases import PREFILL_PHASES, PhaseLog
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.protocol.messages import Bootstrap, Room, RoomDone

MAX_ENDED_ROOMS = 65_536
"""Ended rooms that are remembered, to answer what comes late. The oldest are forgotten first."""


class RoomState(Enum):
    """Where a room stands. Only COMPUTING, SENDING and DRAINING own anything but memory of their own."""

    WAITING_BOOTSTRAP = auto()
    """Has the request; owns nothing. Ends after the room timeout."""
    WAITING_REQUEST = auto()
    """Has the landing zone; owns nothing. Ends after the room timeout."""
    QUEUED = auto()
    """Has both halves and waits for tokens, pages and an aux slot; owns nothing."""
    COMPUTING = auto()
    """Owns pages for the prompt behind its cached prefix, which it uses, and an aux slot; writes may be in
    flight."""
    SENDING = auto()
    """Computed; owns what it owned in COMPUTING until its last write, the aux record's, is complete."""
    DRAINING = auto()
    """Ended early, its clients know, but writes are in flight: owns everything until the last one returns."""
    DONE = auto()
    """Delivered, or answered by this node alone; owns nothing and is remembered."""
    FAILED = auto()
    """Ended without delivery; owns nothing and is remembered."""


MOVES: dict[RoomState, frozenset[RoomState]] = {
    RoomState.WAITING_BOOTSTRAP: frozenset({RoomState.QUEUED, RoomState.FAILED}),
    RoomState.WAITING_REQUEST: frozenset({RoomState.QUEUED, RoomState.FAILED}),
    RoomState.QUEUED: frozenset({RoomState.COMPUTING, RoomState.FAILED}),
    RoomState.COMPUTING: frozenset({RoomState.SENDING, RoomState.DONE, RoomState.DRAINING, RoomState.FAILED}),
    RoomState.SENDING: frozenset({RoomState.DONE, RoomState.DRAINING, RoomState.FAILED}),
    RoomState.DRAINING: frozenset({RoomState.FAILED}),
    RoomState.DONE: frozenset(),
    RoomState.FAILED: frozenset(),
}
ENDED = frozenset({RoomState.DONE, RoomState.FAILED})


class IllegalRoomMove(Exception):
    """A room was moved to a state that its own does not lead to: an error in the engine."""


@dataclass(eq=False, slots=True)
class RoomRecord:
    """One room. Its state changes through ``RoomTable.move`` alone."""

    room: Room
    state: RoomState
    since_secs: float
    """When it entered the state, on ``time.monotonic()``'s clock."""
    request: Generate | None = None
    peer: Peer | None = None
    """The decode node that bootstrapped it; set together with ``bootstrap``."""
    bootstrap: Bootstrap | None = None
    deadline_secs: float = float("inf")
    """From when on nothing of it is sent any more: the decode node has given it up by then."""

    # The prompt, set when the request is accepted.
    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    digest: bytes = b""
    keys: tuple[PageKey, ...] = ()
    """Of the whole pages that other prompts may share; empty when the prefix cache is off. None has resumed
    tokens: in a prompt of which they are not the output so far, the same tokens get other bits on a GPU."""
    grammar: Future[Grammar] | None = None
    """What its first token has to begin, compiled or about to be; None where that is anything, and
    until it is asked for: when the room could be admitted. At the room's end it is let go."""
    grammar_asked_secs: float = 0.0

    # What it owns from COMPUTING on.
    page_ids: list[int] = field(default_factory=list)
    """All pages of the prompt in position order, those of its cached prefix included."""
    holding: Holding | None = None
    """What is its alone: pages, and its slot in this node's aux staging memory."""
    prefix: Prefix | None = None
    """What of its prompt is cached, for it as for others."""

    # Progress.
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_chunks: int = 0
    """Forwards that computed a part of it."""
    num_writes_pending: int = 0
    """Batches submitted whose completion has not come."""
    num_bytes_sent: int = 0
    transfer_secs: float = 0.0
    """Time that the transport spent on its batches."""
    batch_failed: bool = False
    """The batch that it failed by ended in an error after which bytes may still land."""
    end_status: int = 400
    """The HTTP status, and below the error, that answer messages about the room once it has ended."""
    end_error: str = "this room was served before; choose a new one"
    was_aborted: bool = False
    """It ended because somebody did not want it any more."""
    delivery: Delivery | None = None
    phases: PhaseLog = field(init=False)
    """From the request's arrival on."""

    def __post_init__(self) -> None:
        self.phases = PhaseLog(PREFILL_PHASES, self.since_secs)

    @property
    def own_page_ids(self) -> list[int]:
        """Those behind its cached prefix."""
        return self.page_ids[0 if self.prefix is None else self.prefix.end_page :]

    @property
    def is_draining(self) -> bool:
        return self.state is RoomState.DRAINING

    @property
    def aux_slot_src(self) -> int | None:
        """Its slot in this node's aux staging memory."""
        return None if self.holding is None else self.holding.only_slot(PoolKind.AUX)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def sampling(self) -> SamplingParams:
        """Its request's. Raises ValueError while there is none: in WAITING_REQUEST."""
        if self.request is None:
            raise ValueError(f"room {self.room} has no request to sample for")
        return self.request.sampling

    @property
    def first_resumed(self) -> int:
        """The position from which on the prompt is the output so far of a request that goes on here."""
        return self.num_prompt_tokens - self.sampling.num_resumed_tokens

    @property
    def is_prefill_only(self) -> bool:
        """No decode node takes part: nothing is sent."""
        return self.request is not None and self.request.is_prefill_only


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a decode node was told, and in answer to which of its attempts."""

    node_id: str
    attempt: int
    done: RoomDone

    def answers(self, node_id: str, attempt: int) -> bool:
        """Whether a Bootstrap is that attempt's again: its landing zone still holds what was delivered."""
        return attempt > 0 and (self.node_id, self.attempt) == (node_id, attempt)


@dataclass(frozen=True, slots=True)
class EndedRoom:
    """What is remembered of a room: enough to answer a late message about it."""

    status: int
    error: str
    batch_failed: bool
    was_aborted: bool = False
    delivery: Delivery | None = None
    """Of a room that is DONE."""


class RoomTable:
    """All live rooms by id, by request and by state, each state in order of entry."""

    def __init__(self, max_ended_rooms: int = MAX_ENDED_ROOMS) -> None:
        self._live: dict[Room, RoomRecord] = {}
        self._by_request: dict[str, RoomRecord] = {}
        self._by_state: dict[RoomState, dict[Room, RoomRecord]] = {state: {} for state in RoomState}
        self._ended: OrderedDict[Room, EndedRoom] = OrderedDict()
        self._max_ended_rooms = max_ended_rooms

    def open(self, room: Room, state: RoomState, now_secs: float) -> RoomRecord:
        """A new room with one half, in one of the two waiting states. It must be neither live nor ended."""
        if room in self._live or room in self._ended:
            raise IllegalRoomMove(f"room {room} is opened in {state.name} but exists already")
        if state not in (RoomState.WAITING_BOOTSTRAP, RoomState.WAITING_REQUEST):
            raise IllegalRoomMove(f"room {room} cannot start in {state.name}")
        record = RoomRecord(room, state, now_secs)
        self._live[room] = record
        self._by_state[state][room] = record
        return record

    def set_request(self, record: RoomRecord, request: Generate, now_secs: float) -> None:
        """Give the room its request, by whose id it can be found from now on."""
        record.request = request
        record.phases = PhaseLog(PREFILL_PHASES, now_secs)
        self._by_request[request.request_id] = record

    def move(self, record: RoomRecord, state: RoomState, now_secs: float) -> None:
        """Change its state, which ends a phase of the request. In DONE and FAILED the room is no longer live,
        but remembered. Raises IllegalRoomMove."""
        if state not in MOVES[record.state]:
            raise IllegalRoomMove(f"room {record.room} cannot move from {record.state.name} to {state.name}")
        del self._by_state[record.state][record.room]
        record.state, record.since_secs = state, now_secs
        if state not in ENDED:
            self._by_state[state][record.room] = record
            record.phases.end(now_secs)
            return
        del self._live[record.room]
        if record.request is not None:
            self._by_request.pop(record.request.request_id, None)
        status, error, batch_failed = record.end_status, record.end_error, record.batch_failed
        ended = EndedRoom(status, error, batch_failed, record.was_aborted, record.delivery)
        self.remember(record.room, ended)

    def remember(self, room: Room, ended: EndedRoom) -> None:
        """Keep what became of a room that is not live, also of one that was refused before it could open."""
        self._ended[room] = ended
        self._ended.move_to_end(room)
        while len(self._ended) > self._max_ended_rooms:
            self._ended.popitem(last=False)

    def get(self, room: Room) -> RoomRecord | None:
        """The live room, or None."""
        return self._live.get(room)

    def live(self, room: Room) -> RoomRecord:
        """The live room. Raises KeyError when there is none."""
        return self._live[room]

    def ended(self, room: Room) -> EndedRoom | None:
        """What is remembered of a room that ended, or None."""
        return self._ended.get(room)

    def of_request(self, request_id: str) -> RoomRecord | None:
        """The live room of a request, or None."""
        return self._by_request.get(request_id)

    def in_state(self, *states: RoomState) -> Iterator[RoomRecord]:
        """Live rooms, state by state, each in order of entry. Take a list before changing them."""
        for state in states:
            yield from self._by_state[state].values()

    def count(self, *states: RoomState) -> int:
        return sum(len(self._by_state[state]) for state in states)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RoomRecord]:
        return iter(self._live.values())
