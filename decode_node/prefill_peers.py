"""Owns the connections to prefill nodes: it finds and registers with them, and notices when they are lost.

``QueueMoves`` names the peers that requests need (``use``); ``PlanMoves`` sends to those that are registered.
The engine calls ``poll`` in each turn of its loop; it never waits, and returns what happened as events
(``peer_events.py``), oldest first.

A peer is one rank of a prefill node, named by the node's bootstrap endpoint and the rank's number. A run is
one process of it: a restarted peer is another run, perhaps on another control port. The endpoint therefore
tells where to connect, each time that a connection is made (``discovery.py``).

A peer that is wanted goes from AWAY to REGISTERING when a look-up has told where to connect (``_connect``),
and to READY when it answers Register (``_take_registered``). It goes back to REGISTERING when its connection
is lost or it has forgotten this node, and to AWAY when it is given up (``_give_up``). These moves stay in one
module, long as it is: each is right only together with the others.

A silent peer is noticed in two ways. ZMQ's own heartbeats notice a connection that is lost. The peer then
has ``REGISTER_TIMEOUT_SECS`` to answer again, while its endpoint is asked whether the run has ended.
ZMQ's thread, however, answers for an engine that hangs, too. ``Heartbeat`` messages, which the engine's loop
itself must answer, therefore notice that; since a long forward delays the loop, they allow for
``health_timeout_secs``.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from hisparse_pd.base.access import PeerList
from hisparse_pd.decode_node.discovery import LOOKUP_RETRY_SECS, Discovery, LookUps
from hisparse_pd.decode_node.peer import Peer, PeerPhase
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.peer_events import (
    InstanceGone,
    PeerEvent,
    PeerLost,
    PeerReady,
    PeerRefused,
    RanksChanged,
    RoomMessage,
    WriterGone,
)
from hisparse_pd.engine.messages import PeerLane
from hisparse_pd.protocol.bootstrap import BootstrapInfo, BootstrapLookupError
from hisparse_pd.protocol.channels import (
    ControlAddressError,
    ControlClient,
    ControlKeys,
    Heartbeats,
    NoSocketError,
)
from hisparse_pd.protocol.messages import (
    PROTOCOL_VERSION,
    Geometry,
    Heartbeat,
    HeartbeatAck,
    Region,
    Register,
    Registered,
    RegistrationRefused,
    RoomDone,
    RoomFailed,
    RoomQuiet,
    RoomScores,
    ToDecode,
    ToPrefill,
)
from hisparse_pd.protocol.polling import Poller, Wakeup
from hisparse_pd.transfer.lane_host import LaneHost

log = logging.getLogger(__name__)

REGISTER_TIMEOUT_SECS = 5.0
"""Longest time without an answer to Register before the peer counts as lost."""
REGISTER_REPEAT_SECS = 1.0
"""Time between two Registers that are not answered."""
IDLE_CLOSE_SECS = 300.0
"""Time after which the connection of a peer that nobody needs is closed."""
LATE_MESSAGE_SECS = 0.1
"""Time from the end of a run's lane until the run counts as lost: messages that it sent before, such as
RoomDone, may still arrive."""


class _EndedLane(NamedTuple):
    """A run that no longer has this node's memory open."""

    instance_id: str
    noticed_at: float


@dataclass
class PrefillPeers:
    """All prefill nodes that this engine knows; each rank is a peer of its own. Not thread-safe. Times are
    those of ``time.monotonic``."""

    node_id: str
    session: str
    """The address of this node's transfer engine."""
    transfer_protocol: str
    geometry: Geometry
    regions: tuple[Region, ...]
    """This node's registered pools, into which peers write."""
    heartbeats: Heartbeats
    """ZMQ's own; ``Heartbeat`` messages to the engines have the same interval."""
    health_timeout_secs: float
    """Time without an answer after which a peer counts as hung."""
    poller: Poller
    keys: ControlKeys | None = None
    allowed: PeerList | None = None
    """Addresses that prefill nodes may have; None allows any."""
    lane_host: LaneHost | None = None
    """Hands this node's memory to prefill nodes of this machine; None: it stays private."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Messages that closed connections have dropped; ``num_dropped`` adds those of open ones."""

    def __post_init__(self) -> None:
        self._peers: dict[PeerAddress, Peer] = {}
        self._events: list[PeerEvent] = []
        """Events that the ``poll`` under way will return."""
        self._num_peers_ever = 0
        """Number of peers so far, which makes their ``node_id`` unique."""
        self._num_ranks: dict[tuple[str, int], int] = {}
        """Number of ranks, by ``PeerAddress.node``, of those nodes in ``_peers`` that have more than one."""
        self._ended_lanes: deque[_EndedLane] = deque()
        """Ended lanes, the first noticed first, whose runs do not count as lost yet."""
        self._wakeup = Wakeup()
        self._discovery = Discovery(self.keys, self.allowed, self._wakeup.set)
        self.poller.register(self._wakeup)

    # --- for requests -----------------------------------------------------------------------------

    def address_for(self, host: str, port: int, room: int) -> PeerAddress:
        """Return the rank of a prefill node that serves the room. Until the node is found, it counts as one
        of a single rank."""
        return PeerAddress(host, port, room % self._num_ranks.get((host, port), 1))

    def use(self, address: PeerAddress, now: float) -> None:
        """Connect to the peer, from the next ``poll`` on, and keep the connection open for a while."""
        peer = self._peers.get(address)
        if peer is None:
            self._num_peers_ever += 1
            peer = self._peers[address] = Peer(
                address,
                f"{self.node_id}-{self._num_peers_ever}",
                LookUps(self._discovery, address),
            )
        peer.last_used_at = now

    def is_registered(self, address: PeerAddress) -> bool:
        """Return whether the peer is connected and registered with, so that it may be given rooms."""
        peer = self._peers.get(address)
        return peer is not None and peer.phase is PeerPhase.READY

    def is_opening(self, address: PeerAddress, now: float) -> bool:
        """Return whether the peer is alive and registering this node, which includes opening its memory."""
        peer = self._peers.get(address)
        if peer is None or peer.phase is not PeerPhase.REGISTERING:
            return False
        return now - peer.heard_at < REGISTER_TIMEOUT_SECS

    def instance_id(self, address: PeerAddress) -> str:
        """Return the run of a peer that was registered with."""
        return self._peers[address].instance_id

    def page_size(self, address: PeerAddress) -> int:
        """Return the page size of a peer that was registered with."""
        return self._peers[address].page_size

    def last_error(self, address: PeerAddress) -> str:
        """Return why the peer is not registered with, for the error that a client gets."""
        peer = self._peers.get(address)
        return peer.last_error if peer is not None and peer.last_error else "no answer yet"

    def send(self, address: PeerAddress, message: ToPrefill) -> bool:
        """Send a message. Returns False if it cannot leave: there is no connection, or its queue is full."""
        peer = self._peers.get(address)
        return peer is not None and peer.client is not None and peer.client.send(message)

    @property
    def num_registered(self) -> int:
        return sum(peer.phase is PeerPhase.READY for peer in self._peers.values())

    @property
    def lanes(self) -> tuple[PeerLane, ...]:
        """Lanes that the registered peers write over; peers that do not say are left out."""
        ready = (peer for peer in self._peers.values() if peer.phase is PeerPhase.READY)
        return tuple(PeerLane(str(peer.address), peer.lane, peer.lane_reason) for peer in ready if peer.lane)

    @property
    def num_dropped(self) -> Counter[str]:
        """Control messages that could not be decoded or sent, by reason."""
        clients = [peer.client for peer in self._peers.values() if peer.client is not None]
        return sum((client.dropped for client in clients), Counter(self.dropped))

    def close(self) -> None:
        for peer in self._peers.values():
            self._disconnect(peer)
        self._peers.clear()
        self._discovery.close()
        self._wakeup.close()

    # --- for the engine's loop --------------------------------------------------------------------

    def poll(self, now: float, wanted: Container[PeerAddress]) -> list[PeerEvent]:
        """Receive messages, do what is due, and return what happened. ``wanted``: peers that are needed."""
        self._wakeup.clear()
        for peer in tuple(self._peers.values()):
            self._receive(peer, now)
            if peer.client is not None and peer.client.take_loss() and peer.phase is PeerPhase.READY:
                peer.last_error = f"prefill node {peer.address} is silent: the connection to it was lost"
                peer.silent_since = now
                self._register(peer, now)
            self._take_lookup(peer, now)
            self._do_what_is_due(peer, now, is_wanted=peer.address in wanted)
            self._close_if_idle(peer, now, is_wanted=peer.address in wanted)
        if self.lane_host is not None:
            self._take_ended_lanes(self.lane_host, now)
        events, self._events = self._events, []
        return events

    def _take_ended_lanes(self, lane_host: LaneHost, now: float) -> None:
        """Give up the peers whose runs have closed this node's memory, once their last messages have come."""
        self._ended_lanes += [_EndedLane(instance_id, now) for instance_id in lane_host.take_ended()]
        while self._ended_lanes and now - self._ended_lanes[0].noticed_at >= LATE_MESSAGE_SECS:
            instance_id = self._ended_lanes.popleft().instance_id
            for peer in self._peers.values():
                if peer.instance_id == instance_id:  # the run has died, or has given this node up
                    error = f"prefill node {peer.address} has let go of this node's memory"
                    self._give_up(peer, error)
            self._events.append(WriterGone(instance_id))

    def _receive(self, peer: Peer, now: float) -> None:
        messages = peer.client.receive() if peer.client is not None else ()
        for message in messages:
            peer.heard_at, peer.num_unanswered = now, 0
            self._handle(peer, message, now)
            if peer.client is None:  # the message made this node give the peer up
                return

    def _handle(self, peer: Peer, message: ToDecode, now: float) -> None:
        match message:
            case Registered():
                self._take_registered(peer, message, now)
            case RegistrationRefused():
                self._take_refusal(peer, message, now)
            case HeartbeatAck():
                if message.instance_id == peer.instance_id:
                    peer.instance_heard_at = now
                elif peer.phase is PeerPhase.READY:  # another run answers there by now
                    self._register(peer, now)
            case RoomDone() | RoomFailed() | RoomQuiet() | RoomScores():
                peer.last_used_at = peer.instance_heard_at = now
                self._events.append(RoomMessage(peer.address, peer.instance_id, message))
            case _:
                assert_never(message)

    def _take_registered(self, peer: Peer, message: Registered, now: float) -> None:
        """Note that the peer has registered this node, unless it is another run than was looked up."""
        if error := self._why_incompatible(peer, message):
            self._reject(peer, error)
            return
        if message.instance_id != peer.found_instance_id:
            # The socket has reconnected by itself, to a later run. That is registered with after a look-up,
            # because the number of ranks may have changed, too.
            self._end_run(peer, f"prefill node {peer.address} was restarted")
            return
        if peer.phase is not PeerPhase.READY or message.instance_id != peer.instance_id:
            log.info("registered with prefill node %s (instance %s)", peer.address, message.instance_id)
        peer.phase = PeerPhase.READY
        peer.instance_id = message.instance_id
        peer.instance_heard_at = now
        peer.page_size = message.geometry.page_size
        peer.lane, peer.lane_reason = message.lane, message.lane_reason
        peer.last_error = ""
        self._events.append(PeerReady(peer.address, message.instance_id))

    def _why_incompatible(self, peer: Peer, message: Registered) -> str:
        if message.protocol_version != PROTOCOL_VERSION:
            return (
                f"prefill node {peer.address} speaks protocol {message.protocol_version}, this node "
                f"{PROTOCOL_VERSION}; run the same release on both"
            )
        theirs, ours = message.geometry.index_rotation, self.geometry.index_rotation
        if theirs != ours:  # the peer has checked the rest of the geometry; older releases leave this out
            return (
                f"index_rotation: prefill node {peer.address} has {theirs!r}, this node {ours!r}; run the "
                "same release on both"
            )
        return ""

    def _take_refusal(self, peer: Peer, message: RegistrationRefused, now: float) -> None:
        """Give up a peer that refuses this node for good; register again with one that has forgotten it."""
        error = f"prefill node {peer.address} refused this node: {message.error}"
        if message.permanent:
            log.error("%s", error)
            self._reject(peer, error)
        elif peer.phase is PeerPhase.READY or now - peer.register_sent_at >= REGISTER_REPEAT_SECS:
            # The peer has forgotten this node: it gave the node up, or was restarted behind the same port.
            # A refusal that comes sooner after a Register is not answered with another one at once.
            self._register(peer, now)

    def _take_lookup(self, peer: Peer, now: float) -> None:
        """Take the result of a look-up: connect to the peer, or learn that its run is over."""
        found = peer.lookups.take(now)
        if found is None or (peer.instance_id and peer.instance_id != found.instance_id):
            return  # the look-up began before this run was registered with, and says nothing about it
        info = found.info
        if isinstance(info, BootstrapLookupError):
            peer.last_error = str(info)
            if info.nobody_listens and peer.instance_id:
                self._end_run(peer, f"prefill node {peer.address} is gone: {info}")
            elif info.is_final and peer.phase is PeerPhase.AWAY:
                self._events.append(PeerRefused(peer.address, peer.last_error))
            return
        self._note_num_ranks(peer.address.node, info.num_ranks)
        rank_info = info.of_rank(peer.address.rank)
        if rank_info is None:
            error = f"prefill node {peer.address} is gone: the node has {info.num_ranks} ranks now"
            self._end_run(peer, error)
            return
        if peer.instance_id and rank_info.instance_id != peer.instance_id:
            self._end_run(peer, f"prefill node {peer.address} was restarted")
        if peer.phase is PeerPhase.AWAY:
            self._connect(peer, rank_info, now)

    def _note_num_ranks(self, node: tuple[str, int], num_ranks: int) -> None:
        if num_ranks == self._num_ranks.get(node, 1):
            return
        if num_ranks > 1:
            self._num_ranks[node] = num_ranks
        else:
            del self._num_ranks[node]
        self._events.append(RanksChanged(node))

    def _connect(self, peer: Peer, info: BootstrapInfo, now: float) -> None:
        if info.curve != (self.keys is not None):
            theirs, ours = ("encrypted", "plain") if info.curve else ("plain", "encrypted")
            error = (
                f"prefill node {peer.address}: its control channel is {theirs}, this node's {ours}; "
                "set the same --control-key-file on both"
            )
            self._reject(peer, error)
            return
        endpoint = info.control_endpoint(peer.address.host)
        try:
            peer.client = ControlClient(endpoint, self.keys, self.heartbeats)
        except ControlAddressError as error:
            self._reject(peer, f"prefill node {peer.address}: {error}")
            return
        except NoSocketError as error:  # there may be one at the next look-up
            self._give_up(peer, f"prefill node {peer.address}: {error}")
            return
        self.poller.register(peer.client)
        peer.found_instance_id = info.instance_id
        peer.silent_since = now
        peer.last_error = f"no answer to the registration at {endpoint}"
        self._register(peer, now)

    def _register(self, peer: Peer, now: float) -> None:
        """Send Register, for the first time or again; ``_do_what_is_due`` repeats it."""
        peer.phase = PeerPhase.REGISTERING
        peer.register_sent_at = now
        peer.silent_since = max(peer.silent_since, peer.heard_at)
        register = Register(
            PROTOCOL_VERSION,
            peer.node_id,
            self.session,
            self.geometry,
            self.regions,
            self.transfer_protocol,
            self.lane_host.offer if self.lane_host is not None else None,
            self.node_id,
        )
        self.send(peer.address, register)

    def _do_what_is_due(self, peer: Peer, now: float, *, is_wanted: bool) -> None:
        """Look the peer up, register with it again, or send it a heartbeat, as its phase requires."""
        match peer.phase:
            case PeerPhase.AWAY:
                if is_wanted:
                    peer.lookups.ask(now, peer.instance_id)
            case PeerPhase.REGISTERING:
                if peer.instance_id:
                    peer.lookups.ask(now, peer.instance_id)
                if now - peer.silent_since >= REGISTER_TIMEOUT_SECS:
                    error = peer.last_error or f"prefill node {peer.address} does not register this node"
                    self._give_up(peer, error)
                elif now - peer.register_sent_at >= REGISTER_REPEAT_SECS:
                    self._register(peer, now)
            case PeerPhase.READY:
                self._beat(peer, now)
            case _:
                assert_never(peer.phase)

    def _close_if_idle(self, peer: Peer, now: float, *, is_wanted: bool) -> None:
        """Close and forget a peer that nobody has needed for a while: soon if it was never found."""
        was_found = peer.client is not None or peer.instance_id != ""
        keep_secs = IDLE_CLOSE_SECS if was_found else LOOKUP_RETRY_SECS
        # Look-ups that wait for a thread are dropped: slow ones that nobody needs would keep others waiting.
        if not is_wanted and now - peer.last_used_at >= keep_secs and peer.lookups.give_up():
            if was_found:
                log.info("closing the connection to prefill node %s: not used lately", peer.address)
            self._disconnect(peer)
            del self._peers[peer.address]
            if not any(other.address.node == peer.address.node for other in self._peers.values()):
                self._num_ranks.pop(peer.address.node, None)

    def _beat(self, peer: Peer, now: float) -> None:
        """Send a heartbeat when it is due, or give up a peer that has left too many unanswered."""
        interval_secs = self.heartbeats.interval_secs
        if now - peer.beat_at < interval_secs:
            return
        silence_secs = peer.num_unanswered * interval_secs
        if silence_secs >= self.health_timeout_secs:
            error = f"the engine of prefill node {peer.address} has been silent for {silence_secs:g} s"
            self._give_up(peer, error)
            return
        peer.beat_at = now
        peer.num_unanswered += 1
        self.send(peer.address, Heartbeat(peer.num_unanswered))

    def _give_up(self, peer: Peer, error: str) -> None:
        """Disconnect, and report the peer lost if its run was registered with."""
        if peer.phase is not PeerPhase.AWAY and peer.instance_id:
            log.warning("%s", error)
            self._events.append(PeerLost(peer.address, peer.instance_id, peer.instance_heard_at, error))
        self._disconnect(peer)
        peer.last_error = error

    def _reject(self, peer: Peer, error: str) -> None:
        """Give the peer up, and report that trying again changes nothing."""
        self._give_up(peer, error)
        self._events.append(PeerRefused(peer.address, error))

    def _end_run(self, peer: Peer, error: str) -> None:
        """Give the peer up, and report that the run that was registered with has ended."""
        self._give_up(peer, error)
        if peer.instance_id:
            self._events.append(InstanceGone(peer.instance_id))
        peer.instance_id = ""

    def _disconnect(self, peer: Peer) -> None:
        peer.phase = PeerPhase.AWAY
        client, peer.client = peer.client, None
        if client is not None:
            self.dropped.update(client.dropped)
            self.poller.unregister(client)
            client.close()
