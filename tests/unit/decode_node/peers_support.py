"""The peers of a decode node that the tests of them start."""

from __future__ import annotations

from decode_node.prefill_peers import PrefillPeers
from protocol.access import PeerList
from protocol.channels import ControlKeys, Heartbeats
from protocol.polling import Poller
from tests.unit.protocol.examples import GEOMETRY


def make_peers(
    keys: ControlKeys | None = None, allowed: PeerList | None = None, health_timeout_secs: float = 60.0
) -> PrefillPeers:
    return PrefillPeers(
        node_id="decode",
        session="127.0.0.1:1",
        transfer_protocol="tcp",
        geometry=GEOMETRY,
        regions=(),
        heartbeats=Heartbeats(0.05, 60.0),
        health_timeout_secs=health_timeout_secs,
        poller=Poller(),
        keys=keys,
        allowed=allowed,
    )
