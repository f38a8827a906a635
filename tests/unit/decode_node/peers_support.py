"""The peers of a decode node that the tests of them start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from decode_node.prefill_peers import PeerEvent, PrefillPeers
from decode_node.request import PeerAddress
from protocol.access import PeerList
from protocol.channels import ControlKeys, Heartbeats
from protocol.polling import Poller
from tests.unit.protocol.examples import GEOMETRY

WAIT_SECS = 60.0


class BootstrapServer:
    """A bootstrap endpoint. ``answer`` makes status, body and headers of a request."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], tuple[int, bytes, dict[str, str]]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body, headers = answer(self)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """May be called again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


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


def poll_until(
    peers: PrefillPeers,
    wanted: set[PeerAddress],
    until: Callable[[list[PeerEvent]], Any],
    turn: Callable[[], None],
) -> list[PeerEvent]:
    """All events until the condition is true of them. ``turn``: what the prefill nodes do meanwhile."""
    events: list[PeerEvent] = []
    deadline = time.monotonic() + WAIT_SECS
    while not until(events):
        assert time.monotonic() < deadline, f"not within {WAIT_SECS} s: {events}"
        peers.poller.wait(0.01)
        turn()
        for address in wanted:
            peers.use(address, time.monotonic())
        events += peers.poll(time.monotonic(), wanted)
    return events
