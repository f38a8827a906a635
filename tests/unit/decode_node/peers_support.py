"""The peers of a decode node that the tests of them start."""

from __future__ import annotations

from decode_node.prefill_peers import PrefillPeers
from protocol.access import PeerList
from protocol.channels import ControlKeys
from protocol.polling import Poller
from tests.unit.protocol.examples import GEOMETRY


def make_peers(keys: ControlKeys | None = None, allowed: PeerList | None = None) -> PrefillPeers:
    return PrefillPeers(
        node_id="decode",
        session="127.0.0.1:1",
        transfer_protocol="tcp",
        geometry=GEOMETRY,
        regions=(),
        heartbeat_interval_secs=0.05,
        heartbeat_timeout_secs=60.0,
        poller=Poller(),
        keys=keys,
        allowed=allowed,
    )
