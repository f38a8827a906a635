"""The states that a request goes through on a decode node, and what it owns in each.

``Request.move`` holds requests to the table of moves. A RUNNING request has a ``RunStage`` besides, which
follows from its other attributes and is never set.
"""

from __future__ import annotations

from enum import StrEnum


class RequestState(StrEnum):
    """The states of a request, and what it owns in each."""

    CONNECTING = "connecting"
    """Waits until its prefill node is registered with. Owns nothing."""
    WAITING = "waiting"
    """Waits in the admission queue. Owns nothing. Its prefill node is registered with, unless it is local."""
    LANDING = "landing"
    """The prefill node may write. Owns the landing zone (host slots when hisparse, device pages when dense),
    index pages, an aux slot and a req_row; a hisparse request also owns lookup slots (``request_tables.py``),
    and the device slots of its future hot buffer. It may use pages of a held prefix before these, which it
    does not own."""
    FETCHING = "fetching"
    """Its KV is here, and nobody may write any more. Part of the held prefix that it uses is on its way from
    main memory to the device (``held_tier.py``). Owns the same as LANDING."""
    RUNNING = "running"
    """Owns the same without the aux slot, and besides the slots that it has grown by. It is in the next step
    if it is ``READY``, unless its device slots change beside that (``step_line.py``). The newest token of its
    first step is the prompt's last one, or an earlier one if its steps compute a short tail of the prompt."""
    ENDING = "ending"
    """Has ended for its client. Owns the same until no step in flight, and nothing that fills its row, uses
    any of it. Other requests may have its room and its id."""
    ENDED = "ended"
    """Owns nothing: its slots are free, held as a prefix, or quarantined when a remote write may still land
    in them."""

    def may_become(self, state: RequestState) -> bool:
        return state in _MOVES[self]


_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.CONNECTING: frozenset({RequestState.CONNECTING, RequestState.WAITING, RequestState.ENDED}),
    RequestState.WAITING: frozenset(
        {RequestState.CONNECTING, RequestState.WAITING, RequestState.LANDING, RequestState.ENDED}
    ),
    RequestState.LANDING: frozenset({RequestState.FETCHING, RequestState.RUNNING, RequestState.ENDED}),
    RequestState.FETCHING: frozenset({RequestState.RUNNING, RequestState.ENDED}),
    RequestState.RUNNING: frozenset({RequestState.ENDING}),
    RequestState.ENDING: frozenset({RequestState.ENDED}),
    RequestState.ENDED: frozenset(),
}


class RunStage(StrEnum):
    """The present stage of a RUNNING request."""

    AWAITS_GRAMMAR = "awaits grammar"
    """The grammar that its output must follow is being compiled."""
    FILLING = "filling"
    """Its row of the tables, or its hot buffer, is being filled."""
    LAST = "last"
    """No token may follow those in flight."""
    SITS_OUT = "sits out"
    """Positions of its next step have no slots yet: it is in no step until it gets some."""
    READY = "ready"
    """It is in the next step, which draws a token for it unless its prompt goes on behind that step."""


class IllegalMove(Exception):
    """A request was moved between states that the transition table does not connect."""
