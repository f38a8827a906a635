"""The events of prefill nodes, as ``PrefillPeers.poll`` reports them and ``PrefillEvents`` handles them.

A peer is one rank of a prefill node, named by its address. A run is one process of it, named by its
``instance_id``: a restarted peer is another run at the same address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.protocol.messages import RoomDone, RoomFailed, RoomQuiet, RoomScores

AboutRoom: TypeAlias = RoomDone | RoomFailed | RoomQuiet | RoomScores
"""A prefill node's messages about one room."""


@dataclass(frozen=True)
class PeerReady:
    """The peer is registered: for the first time, again, or as another run of the node."""

    address: PeerAddress
    instance_id: str


@dataclass(frozen=True)
class PeerRefused:
    """The peer refuses this node, or this node refuses the peer; trying again changes nothing."""

    address: PeerAddress
    error: str


@dataclass(frozen=True)
class PeerLost:
    """A registered peer is gone or hangs. ``last_heard_at`` is a time of ``time.monotonic``, in seconds."""

    address: PeerAddress
    instance_id: str
    last_heard_at: float
    error: str


@dataclass(frozen=True)
class InstanceGone:
    """The run ``instance_id`` of a prefill node has ended for certain. May be reported more than once."""

    instance_id: str


@dataclass(frozen=True)
class WriterGone:
    """The run ``instance_id`` wrote through shared memory only, and has let go of it: nothing more lands. A
    PeerLost came before."""

    instance_id: str


@dataclass(frozen=True)
class RoomMessage:
    """A message about a room from the registered run; the receiver checks it against its own rooms."""

    address: PeerAddress
    instance_id: str
    message: AboutRoom


@dataclass(frozen=True)
class RanksChanged:
    """The number of this prefill node's ranks has changed: a room may belong to another rank now
    (``PrefillPeers.address_for``)."""

    node: tuple[str, int]
    """Host and port of its bootstrap endpoint."""


PeerEvent: TypeAlias = (
    PeerReady | PeerRefused | PeerLost | InstanceGone | WriterGone | RanksChanged | RoomMessage
)
