"""The rooms of the prefill node, one for each request: owns which exist, their states, and a record of those
that ended.

A room begins with the decode node's ``Bootstrap``, which says which KV is wanted and where it is to land. Its
states follow in one direction; each state's docstring says what the room owns in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from hisparse_pd.core.paging.pools import Holding, PoolKind
from hisparse_pd.core.paging.prefix import Prefix
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.engine.messages import unpack_token_ids
from hisparse_pd.engine.phases import PREFILL_PHASES, PhaseLog
from hisparse_pd.prefill_node.registrations import Peer
from hisparse_pd.protocol.messages import Bootstrap, Room, RoomDone

MAX_ENDED_ROOMS = 65_536
"""Most ended rooms that are remembered, to answer late messages. The oldest are forgotten first."""


class RoomState(Enum):
    """The state of a room. Only in COMPUTING, SENDING and DRAINING does it own pages and an aux slot."""

    QUEUED = auto()
    """Waits for tokens, pages and an aux slot; owns nothing. Ends at its deadline."""
    COMPUTING = auto()
    """Owns an aux slot and pages for the prompt after its cached prefix, which it uses; writes may be in
    flight."""
    SENDING = auto()
    """Is computed; owns what it owned in COMPUTING until its last write, the aux record's, is complete."""
    DRAINING = auto()
    """Ended early, which its decode node knows, with writes in flight; owns what it owned before until the
    last one returns."""
    DONE = auto()
    """Is delivered; owns nothing and is remembered."""
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
    """A room was opened or moved in a way that its state does not allow: an error in the engine."""


@dataclass(eq=False, slots=True)
class RoomRecord:
    """One room: a request of a decode node. Only ``RoomTable.move`` changes its state."""

    peer: Peer
    """The decode node that sent the Bootstrap."""
    bootstrap: Bootstrap
    since_secs: float
    """When the room entered its state, on the clock of ``time.monotonic``."""
    deadline_secs: float = float("inf")
    """When the decode node has given the room up: it is not begun later, and no batch of it starts later."""
    keys: tuple[PageKey, ...] = ()
    """Keys of the whole pages that other prompts may share; empty when the prefix cache is off. Pages with a
    position from ``first_stepped`` on have none: on a GPU, a prompt that resumes nothing gets other bits for
    the same tokens there."""
    state: RoomState = RoomState.QUEUED
    token_ids: npt.NDArray[np.int32] = field(init=False)
    """All tokens of the prompt, with the last one, which is not computed here. They are the Bootstrap's
    bytes, not a copy."""

    # What the room owns from COMPUTING on.
    page_ids: list[int] = field(default_factory=list)
    """Pages of all computed positions in order, those of the cached prefix included."""
    holding: Holding | None = None
    """What only this room owns: pages, and a slot in this node's aux staging memory."""
    prefix: Prefix | None = None
    """The cached part of the prompt, which other rooms may use, too."""

    # Progress.
    num_cached_tokens: int = 0
    num_ready_tokens: int = 0
    """Leading positions whose KV is in the pool, computed or cached."""
    num_writes_pending: int = 0
    """Batches that were submitted and have not completed."""
    num_bytes_sent: int = 0
    transfer_secs: float = 0.0
    """Time that the transport spent on the room's batches."""
    batch_failed: bool = False
    """Whether a batch ended in an error after which bytes may still land."""
    end_status: int = 400
    """The HTTP status that, with ``end_error``, answers messages about the room once it has ended."""
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
        """Pages after the cached prefix."""
        return self.page_ids[0 if self.prefix is None else self.prefix.end_page :]

    @property
    def is_draining(self) -> bool:
        return self.state is RoomState.DRAINING

    @property
    def aux_slot_src(self) -> int | None:
        """The room's slot in this node's aux staging memory, or None while it has none."""
        return None if self.holding is None else self.holding.only_slot(PoolKind.AUX)

    @property
    def num_computed_tokens(self) -> int:
        """Leading positions whose KV this node computes or has cached: the room's length on this node."""
        return self.bootstrap.num_computed_tokens

    @property
    def first_stepped(self) -> int:
        """First position whose row is rounded as in decode steps; without resumed tokens it is the one after
        the last that is computed."""
        return first_stepped(self.bootstrap)

    @property
    def first_needed(self) -> int:
        """First position that is computed even if it is cached. The last position selects the hint, and the
        score of a token comes from the row of the position before it."""
        last = self.num_computed_tokens - 1
        scores = self.bootstrap.scores
        return last if scores is None else min(last, scores.first - 1)


def first_stepped(bootstrap: Bootstrap) -> int:
    return bootstrap.num_computed_tokens - bootstrap.num_resumed_tokens


@dataclass(frozen=True, slots=True)
class Delivery:
    """The answer to a decode node about a delivered room, and which of its attempts it answered."""

    node_id: str
    attempt: int
    done: RoomDone

    def answers(self, node_id: str, attempt: int) -> bool:
        """Return whether a Bootstrap repeats that attempt, whose landing zone still has what was
        delivered."""
        return attempt > 0 and (self.node_id, self.attempt) == (node_id, attempt)


@dataclass(frozen=True, slots=True)
class EndedRoom:
    """What is remembered of an ended room, to answer late messages about it."""

    status: int
    error: str
    batch_failed: bool
    delivery: Delivery | None = None
    """The delivery of a room that ended in DONE."""


class RoomTable:
    """All live rooms by id and by state, in each state in order of entry, and the remembered ended rooms."""

    def __init__(self, max_ended_rooms: int = MAX_ENDED_ROOMS) -> None:
        self._live: dict[Room, RoomRecord] = {}
        self._by_state: dict[RoomState, dict[Room, RoomRecord]] = {state: {} for state in RoomState}
        self._ended: OrderedDict[Room, EndedRoom] = OrderedDict()
        self._max_ended_rooms = max_ended_rooms
        self.num_queued_tokens = 0
        """Tokens of the prompts of all QUEUED rooms."""

    def open(self, record: RoomRecord) -> None:
        """Add a new room in QUEUED. Raises IllegalRoomMove if it is in another state, live or ended."""
        room = record.room
        if room in self._live or room in self._ended:
            raise IllegalRoomMove(f"room {room} is opened but exists already")
        if record.state is not RoomState.QUEUED:
            raise IllegalRoomMove(f"room {room} cannot start in {record.state.name}")
        self._live[room] = record
        self._by_state[RoomState.QUEUED][room] = record
        self.num_queued_tokens += len(record.token_ids)

    def move(self, record: RoomRecord, state: RoomState, now_secs: float) -> None:
        """Change a room's state, which ends a phase. A room in DONE or FAILED is no longer live, but
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
        """Return the live room, or None."""
        return self._live.get(room)

    def live(self, room: Room) -> RoomRecord:
        """Return the live room. Raises KeyError when there is none."""
        return self._live[room]

    def ended(self, room: Room) -> EndedRoom | None:
        """Return what is remembered of an ended room, or None."""
        return self._ended.get(room)

    def in_state(self, *states: RoomState) -> Iterator[RoomRecord]:
        """Yield live rooms, state by state, each in order of entry. Make a list before moving any."""
        for state in states:
            yield from self._by_state[state].values()

    def count(self, *states: RoomState) -> int:
        return sum(len(self._by_state[state]) for state in states)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[RoomRecord]:
        return iter(self._live.values())
