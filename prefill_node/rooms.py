"""The rooms of the prefill node: owns which rooms exist, their states, and the memory of those that ended.

A room begins with the decode node's ``Bootstrap``, which says which KV is wanted and where it is to land.
From then on it moves one way; what it owns in a state is written at the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from hisparse_pd.core.paging.pools import Holding, PoolKind
from hisparse_pd.core.paging.prefix_tree import Prefix
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.engine.phases import PREFILL_PHASES, PhaseLog
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.protocol.messages import Bootstrap, Room, RoomDone

MAX_ENDED_ROOMS = 65_536
"""Ended rooms that are remembered, to answer what comes late. The oldest are forgotten first."""


class RoomState(Enum):
    """Where a room stands. Only COMPUTING, SENDING and DRAINING own anything but memory of their own."""

    QUEUED = auto()
    """Waits for tokens, pages and an aux slot; owns nothing. Ends at its deadline."""
    COMPUTING = auto()
    """Owns pages for the prompt behind its cached prefix, which it uses, and an aux slot; writes may be in
    flight."""
    SENDING = auto()
    """Computed; owns what it owned in COMPUTING until its last write, the aux record's, is complete."""
    DRAINING = auto()
    """Ended early, its decode node knows, but writes are in flight: owns everything until the last one
    returns."""
    DONE = auto()
    """Delivered; owns nothing and is remembered."""
    FAILED = auto()
    """Ended without delivery; owns nothing and is remembered."""


MOVES: dict[RoomState, frozenset[RoomState]] = {
    RoomState.QUEUED: frozenset({RoomState.COMPUTING, RoomState.FAILED}),
    RoomState.COMPUTING: frozenset({RoomState.SENDING, RoomState.DRAINING, RoomState.FAILED}),
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

    peer: Peer
    """The decode node that bootstrapped it."""
    bootstrap: Bootstrap
    since_secs: float
    """When it entered its state, on ``time.monotonic()``'s clock."""
    deadline_secs: float = float("inf")
    """From when on it is not begun, and nothing of it is sent any more: the decode node has given it up."""
    keys: tuple[PageKey, ...] = ()
    """The keys of the whole pages that other prompts may share; empty when the prefix cache is off. No page
    with a position from ``first_stepped`` on has one: in a prompt that resumes nothing, the same tokens get
    other bits there on a GPU."""
    state: RoomState = RoomState.QUEUED
    token_ids: npt.NDArray[np.int32] = field(init=False)
    """All of the prompt, the one that is not computed here too: the bootstrap's bytes, not a copy."""

    # What it owns from COMPUTING on.
    page_ids: list[int] = field(default_factory=list)
    """All pages of the computed positions in order, those of its cached prefix included."""
    holding: Holding | None = None
    """What is its alone: pages, and its slot in this node's aux staging memory."""
    prefix: Prefix | None = None
    """What of its prompt is cached, for it as for others."""

    # Progress.
    num_cached_tokens: int = 0
    num_ready_tokens: int = 0
    """Leading positions whose KV is in the pool, computed or cached."""
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
    delivery: Delivery | None = None
    phases: PhaseLog = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = unpack_token_ids(self.bootstrap.prompt)
        self.phases = PhaseLog(PREFILL_PHASES, self.since_secs)

    @property
    def room(self) -> Room:
        return Room(self.bootstrap.room)

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
    def num_computed_tokens(self) -> int:
        """Leading positions that this node makes KV of, or has it cached: its length everywhere here."""
        return self.bootstrap.num_computed_tokens

    @property
    def first_stepped(self) -> int:
        """The position from which on rows have the roundings of decode steps; without resumed tokens it is
        behind the last one that is computed."""
        return first_stepped(self.bootstrap)

    @property
    def first_needed(self) -> int:
        """The position from which on all are computed, even where they are cached: the last one selects the
        hint, and a row from that before the first wanted score on says how likely the next token is."""
        last = self.num_computed_tokens - 1
        scores = self.bootstrap.scores
        return last if scores is None else min(last, scores.first - 1)


def first_stepped(bootstrap: Bootstrap) -> int:
    return bootstrap.num_computed_tokens - bootstrap.num_resumed_tokens


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
    delivery: Delivery | None = None
    """What was told of a room that is DONE."""


class RoomTable:
    """All live rooms by id and by state, each state in order of entry."""

    def __init__(self, max_ended_rooms: int = MAX_ENDED_ROOMS) -> None:
        self._live: dict[Room, RoomRecord] = {}
        self._by_state: dict[RoomState, dict[Room, RoomRecord]] = {state: {} for state in RoomState}
        self._ended: OrderedDict[Room, EndedRoom] = OrderedDict()
        self._max_ended_rooms = max_ended_rooms
        self.num_queued_tokens = 0
        """Tokens of the prompts of all QUEUED rooms."""

    def open(self, record: RoomRecord) -> None:
        """Take a new room in, which is QUEUED. It must be neither live nor ended."""
        room = record.room
        if room in self._live or room in self._ended:
            raise IllegalRoomMove(f"room {room} is opened but exists already")
        if record.state is not RoomState.QUEUED:
            raise IllegalRoomMove(f"room {room} cannot start in {record.state.name}")
        self._live[room] = record
        self._by_state[RoomState.QUEUED][room] = record
        self.num_queued_tokens += len(record.token_ids)

    def move(self, record: RoomRecord, state: RoomState, now_secs: float) -> None:
        """Change its state, which ends a phase. In DONE and FAILED the room is no longer live, but
        remembered. Raises IllegalRoomMove."""
        if state not in MOVES[record.state]:
            raise IllegalRoomMove(f"room {record.room} cannot move from {record.state.name} to {state.name}")
        del self._by_state[record.state][record.room]
        if record.state is RoomState.QUEUED:
            self.num_queued_tokens -= len(record.token_ids)
        record.state, record.since_secs = state, now_secs
        if state not in ENDED:
            self._by_state[state][record.room] = record
            record.phases.end(now_secs)
            return
        del self._live[record.room]
        self._ended[record.room] = EndedRoom(
            record.end_status, record.end_error, record.batch_failed, record.delivery
        )
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
