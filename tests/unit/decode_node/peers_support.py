"""Peers of a decode node, for tests of what it does with them."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from hisparse_pd.base.access import PeerList
from hisparse_pd.decode_node.peer_address import PeerAddress
from hisparse_pd.decode_node.peer_events import PeerEvent
from hisparse_pd.decode_node.prefill_peers import PrefillPeers
from hisparse_pd.protocol.bootstrap import (
    CODE_HEADER,
    NONCE_HEADER,
    BootstrapGate,
    BootstrapInfo,
    BootstrapRefused,
    RankInfo,
)
from hisparse_pd.protocol.channels import ControlKeys, ControlServer, Heartbeats
from hisparse_pd.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRoom,
    Bootstrap,
    Geometry,
    Heartbeat,
    HeartbeatAck,
    Register,
    Registered,
    RegistrationRefused,
)
from hisparse_pd.protocol.polling import Poller
from tests.unit.protocol.examples import GEOMETRY
from tests.unit.servers import held_port
from tests.waiting import WAIT_SECS


class BootstrapServer:
    """A bootstrap endpoint. ``answer`` makes status, body and headers of the answer to a request."""

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

        holding = ExitStack()  # nobody else answers there once this is closed
        weakref.finalize(self, holding.close)
        self.port = holding.enter_context(held_port())
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the server; safe to call again."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class PrefillNode:
    """A bootstrap endpoint, and the control sockets of its ranks."""

    def __init__(
        self,
        keys: ControlKeys | None = None,
        num_ranks: int = 1,
        *,
        run: str = "first",
        geometry: Geometry = GEOMETRY,
    ) -> None:
        self.keys = keys
        self.geometry = geometry
        self.forges = False
        """Whether its answers are not signed."""
        self.is_hung = False
        """Whether the bootstrap endpoint does not say that the engine is alive."""
        self.is_stopped = False
        """Whether nobody reads its control sockets."""
        self.refusal: RegistrationRefused | HeartbeatAck | None = None
        """Answer to a registration, instead of Registered."""
        self.num_asked = self.num_registrations = 0
        self.controls: list[ControlServer] = []
        self.start(run, num_ranks)
        self._http = BootstrapServer(self._tell)
        self.port = self._http.port
        self.ranks = [PeerAddress("127.0.0.1", self.port, rank) for rank in range(3)]
        self.address = self.ranks[0]

    def start(self, run: str, num_ranks: int = 1, first_port: int = 0) -> None:
        """Start a run in place of the one before, with control sockets of its own."""
        self._close_controls()
        self.run = self.told_run = run
        """Run of the sockets, and the one that the endpoint names (``told_run``)."""
        self.registered: dict[bytes, Register] = {}
        self.controls = [
            ControlServer("127.0.0.1", 0 if rank else first_port, self.keys) for rank in range(num_ranks)
        ]

    def _tell(self, request: BaseHTTPRequestHandler) -> tuple[int, bytes, dict[str, str]]:
        self.num_asked += 1
        if self.is_hung:
            return 503, b"", {}
        gate = BootstrapGate(None if self.forges else self.keys, PeerList())
        nonce = request.headers.get(NONCE_HEADER, "")
        ranks = tuple(
            RankInfo(f"{self.told_run}-{rank}", each.port) for rank, each in enumerate(self.controls)
        )
        info = BootstrapInfo(
            PROTOCOL_VERSION,
            ranks[0].instance_id,
            "127.0.0.1",
            ranks[0].control_port,
            self.geometry,
            self.keys is not None,
            ranks=ranks if len(ranks) > 1 else (),
        )
        status, body = 200, msgspec.json.encode(info)
        try:
            gate.check(request.client_address[0], nonce, request.headers.get(CODE_HEADER, ""))
        except BootstrapRefused as error:
            refusal = {"error": {"message": str(error), "code": error.code}}
            status, body = error.status, msgspec.json.encode(refusal)
        return status, body, gate.proof(nonce, body)

    def answer(self, *, heartbeats: bool = True) -> None:
        """Answer what has arrived."""
        for rank, control in enumerate(() if self.is_stopped else self.controls):
            instance_id = f"{self.run}-{rank}"
            for identity, message in control.receive():
                match message:
                    case Register():
                        self.num_registrations += 1
                        if self.refusal is not None:
                            control.send(identity, self.refusal)
                            continue
                        self.note_registration(message)
                        self.registered[identity] = message
                        control.send(identity, Registered(PROTOCOL_VERSION, instance_id, self.geometry))
                    case Heartbeat() if identity not in self.registered:
                        control.send(identity, RegistrationRefused("register first", permanent=False))
                    case Heartbeat(seq):
                        if heartbeats:
                            control.send(identity, HeartbeatAck(seq, instance_id))
                    case Bootstrap() | AbortRoom():
                        self.take(identity, message)

    def note_registration(self, register: Register) -> None:
        """Hook for a registration, before it is answered."""

    def take(self, identity: bytes, message: Bootstrap | AbortRoom) -> None:
        """Hook for a message about a room."""

    def break_connections(self) -> None:
        """Break all connections of the first socket, which listens again where it was."""
        port = self.controls[0].port
        self.controls[0].close()
        self.controls[0] = ControlServer("127.0.0.1", port, self.keys)

    def close_http(self) -> None:
        self._http.close()

    def close(self) -> None:
        self.is_stopped = True
        self._http.close()
        self._close_controls()

    def _close_controls(self) -> None:
        for control in self.controls:
            control.close()


class FakePeers:
    """Stands in for PrefillPeers: prefill nodes that take every message and do nothing.

    They may be entrusted with rooms unless they are ``away``.
    """

    instance = "its run"

    def __init__(self, page_size: int) -> None:
        self.tokens_per_page = page_size
        self.away: set[PeerAddress] = set()
        self.rank = 0
        """The rank that serves all rooms of each node."""
        self.bootstraps: dict[int, Bootstrap] = {}
        """Bootstraps by room."""

    def address_for(self, host: str, port: int, room: int) -> PeerAddress:
        return PeerAddress(host, port, self.rank)

    def is_registered(self, address: PeerAddress) -> bool:
        return address not in self.away

    def is_opening(self, address: PeerAddress, now: float) -> bool:
        return False

    def page_size(self, address: PeerAddress) -> int:
        return self.tokens_per_page

    def use(self, address: PeerAddress, now: float) -> None: ...

    def send(self, address: PeerAddress, message: object) -> bool:
        if isinstance(message, Bootstrap):
            self.bootstraps[message.room] = message
        return True

    def last_error(self, address: PeerAddress) -> str:
        return "no answer yet"

    def instance_id(self, address: PeerAddress) -> str:
        return self.instance


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
    """Return all events up to when ``until`` is true of them. ``turn``: what prefill nodes do meanwhile."""
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
