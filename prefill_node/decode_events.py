"""Hands what decode nodes send, and what happens to them, to the requests of a prefill engine.

``DecodeEvents`` owns the messages that were read during a forward. Each turn of the engine's loop calls
``answer_decided``, ``receive`` and ``fail_silent``. A message of a node that is not registered is refused, so
that its sender registers (again). A registered node's Bootstrap goes to ``Arrivals``, its AbortRoom to
``PrefillLife``. ``Registrations`` knows who is registered, and ``Lanes`` chooses the lane to each before its
Register is answered.

A peer's silence is judged after its messages were read, and counts only once ZMQ has closed its connection:
neither a long forward here nor a long step there makes a peer lost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import assert_never

from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.core.paging.prompt_keys import PageKey
from hisparse_pd.prefill_node.arrivals import Arrivals
from hisparse_pd.prefill_node.registrations import Peer, Registrations
from hisparse_pd.prefill_node.request_life import PrefillLife
from hisparse_pd.protocol.channels import ControlServer
from hisparse_pd.protocol.messages import (
    MAX_TEXT_CHARS,
    PROTOCOL_VERSION,
    AbortRoom,
    Bootstrap,
    Geometry,
    Heartbeat,
    HeartbeatAck,
    Register,
    Registered,
    RegistrationRefused,
    ToPrefill,
)
from hisparse_pd.transfer.engine import TransferEngine
from hisparse_pd.transfer.lane import Lane, Lanes

log = logging.getLogger(__name__)


class DecodeEvents:
    """Messages, registrations and losses of decode nodes."""

    def __init__(
        self,
        control: ControlServer,
        peers: Registrations,
        life: PrefillLife,
        arrivals: Arrivals,
        lanes: Lanes,
        transfer: TransferEngine,
        *,
        instance_id: str,
        geometry: Geometry,
        heartbeat_timeout_secs: float,
        heartbeat_interval_secs: float,
    ) -> None:
        self._control = control
        self._peers = peers
        self._life = life
        self._arrivals = arrivals
        self._lanes = lanes
        self._transfer = transfer
        self._instance_id = instance_id
        self._geometry = geometry
        self._heartbeat_timeout_secs = heartbeat_timeout_secs
        self._heartbeat_interval_secs = heartbeat_interval_secs
        self._logged_refusals = LogLimiter()
        self._early: list[tuple[bytes, ToPrefill, Sequence[PageKey] | None]] = []
        """Messages that were read during a forward: the sender, the message, and the keys of a Bootstrap's
        prompt."""

    def answer_decided(self) -> None:
        """Answer the Registers of the nodes to which a lane was chosen meanwhile."""
        for session in self._lanes.take_decided():
            peer, lane = self._peers.of_session(session), self._lanes.lane(session)
            if peer is not None and lane is not None:
                self._answer_registration(peer, lane)

    def receive(self, now_secs: float) -> None:
        """Handle the messages that were read during a forward, and those that have come since."""
        early, self._early = self._early, []
        for identity, message, keys in early:
            self._handle(identity, message, now_secs, keys)
        for identity, message in self._control.receive():
            self._handle(identity, message, now_secs)

    def read_ahead(self) -> None:
        """Read what decode nodes have sent, a burst at most, and compute the keys of prompts while the device
        computes others. The messages are handled after the forward, because they may end its requests."""
        for identity, message in self._control.receive():
            keys = self._life.pages.keys_of(message) if isinstance(message, Bootstrap) else None
            self._early.append((identity, message, keys))

    def fail_silent(self, now_secs: float) -> None:
        """Fail the requests of decode nodes that were silent for too long."""
        limit_secs = self._heartbeat_timeout_secs
        for peer in self._peers.silent(now_secs, limit_secs):
            if self._control.send(peer.identity, HeartbeatAck(0, self._instance_id)):
                # ZMQ took the message, so the connection stands, and the peer is only in a long step, in
                # which it sends no heartbeats. Judge it again an interval later.
                peer.last_heard_secs += self._heartbeat_interval_secs
                continue
            self._peers.lose(peer)
            error = f"was silent for more than {limit_secs:g} s"
            num_failed = self._life.fail_requests_of(peer, error, now_secs)
            # A node without rooms was most likely shut down.
            level = logging.WARNING if num_failed else logging.INFO
            log.log(level, "lost decode node %s and %d rooms of it: it %s", peer.node_id, num_failed, error)

    def _handle(
        self,
        identity: bytes,
        message: ToPrefill,
        now_secs: float,
        keys: Sequence[PageKey] | None = None,
    ) -> None:
        """Handle a message. ``keys``: those of a Bootstrap's prompt, if they have been computed."""
        peer = self._peers.heard(identity, now_secs)
        if isinstance(message, Register):
            self._register(identity, message, now_secs)
            return
        if peer is None:
            self._life.dropped["unregistered"] += 1
            error = f"{type(message).__name__} before Register; register first"
            self._control.send(identity, RegistrationRefused(error, permanent=False))
            return
        match message:
            case Heartbeat():
                self._control.send(identity, HeartbeatAck(message.seq, self._instance_id))
            case Bootstrap():
                self._arrivals.bootstrap(peer, message, now_secs, keys)
            case AbortRoom():
                self._life.abort_room(peer, message, now_secs)
            case _:
                assert_never(message)

    def _register(self, identity: bytes, message: Register, now_secs: float) -> None:
        error = self._peers.why_refused(message)
        if error is not None:
            self._refuse(identity, message.node_id, error)
            return
        known = self._peers.of_node(message.node_id)
        peer, replaced = self._peers.register(identity, message, now_secs)
        for old in replaced:
            self._life.fail_requests_of(old, "restarted", now_secs)
        if peer is not known:
            # Only now, when no request of an earlier run at this session begins another write: it would go to
            # the new run's memory.
            self._transfer.renew(peer.session, message.instance_id)
            log.info("registered decode node %s, session %s", peer.node_id, peer.session)
        regions = [(region.base_addr, region.num_bytes) for region in message.regions]
        if (lane := self._lanes.register(peer.session, message.lane, regions)) is not None:
            self._answer_registration(peer, lane)
        else:  # tells the decode node, which waits while its memory is opened, that this engine is alive
            self._control.send(identity, HeartbeatAck(0, self._instance_id))
        self._lanes.forget_all_but({peer.session for peer in self._peers})

    def _refuse(self, identity: bytes, node_id: str, error: str) -> None:
        self._life.dropped["refused"] += 1
        if self._logged_refusals.permits(node_id):
            log.warning("refused decode node %s: %s", node_id, error)
        self._control.send(identity, RegistrationRefused(error[:MAX_TEXT_CHARS], permanent=True))

    def _answer_registration(self, peer: Peer, lane: Lane) -> None:
        """Answer a Register, now that the lane to its node is chosen."""
        if lane.refusal:
            self._refuse(peer.identity, peer.node_id, lane.refusal)
            self._peers.lose(peer)
            return
        self._control.send(
            peer.identity,
            Registered(PROTOCOL_VERSION, self._instance_id, self._geometry, lane.kind, lane.reason),
        )
