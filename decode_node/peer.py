"""One peer of ``PrefillPeers``, a rank of a prefill node: its connection, its run and its heartbeats.

A run is one life of the peer's process: a rank that is started again has another instance id.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hisparse_pd.decode_node.discovery import LookUps
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.protocol.channels import ControlClient


class PeerPhase(StrEnum):
    """The state of the connection to a peer."""

    AWAY = "away"
    """No connection. A look-up may be under way."""
    REGISTERING = "registering"
    """Connected, Register sent."""
    READY = "ready"
    """Registered; heartbeats are exchanged."""


@dataclass(eq=False)
class Peer:
    """The state of one peer. Times are those of ``time.monotonic``."""

    address: PeerAddress
    node_id: str
    """The name under which this node registers with it; every peer gets another one."""
    lookups: LookUps
    phase: PeerPhase = PeerPhase.AWAY
    client: ControlClient | None = None
    instance_id: str = ""
    """The run with which this node last registered; empty once that run is known to have ended."""
    found_instance_id: str = ""
    """The run that a look-up found before ``client`` was connected."""
    instance_heard_at: float = 0.0
    """When the run ``instance_id`` itself, not a later one, was last heard."""
    page_size: int = 0
    lane: str = ""
    """The lane that the run writes over; empty if it does not say."""
    lane_reason: str = ""
    """Why the run chose ``lane``."""
    last_error: str = ""
    last_used_at: float = 0.0
    silent_since: float = 0.0
    """When its time to register this node began: when it was connected, was last heard, or lost the
    connection, whichever is latest. A peer that lets this time pass is given up."""
    register_sent_at: float = 0.0
    heard_at: float = float("-inf")
    """When its last message came; before the first, longer ago than any time."""
    beat_at: float = 0.0
    """When the last heartbeat was sent to it."""
    num_unanswered: int = 0
    """Heartbeats sent since ``heard_at``. Counting them, and not time, leaves out this node's own pauses."""
