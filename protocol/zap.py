"""Decides who may connect to the control socket: the ZAP handler (ZeroMQ RFC 27) of one ZMQ context.

``channels.Guard`` makes one for each guarded context. ZMQ asks it about every connection, before it delivers
the first frame. The handler checks the address that the connection comes from and, with a control key, the
key that the peer has proven to hold.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import Counter

import zmq
from zmq.utils import z85

from hisparse_pd.base.access import PeerList
from hisparse_pd.base.log_limit import LogLimiter

log = logging.getLogger(__name__)

DOMAIN = b"hisparse-pd"
"""ZMQ asks the handler about unencrypted connections only if the socket has a domain."""

FOREIGN_ADDRESS = "address_not_allowed"
FOREIGN_KEY = "wrong_key"
"""Refused connections are counted under one of these two reasons."""

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class ZapHandler:
    """A thread that answers until the context is terminated. Create it before the guarded socket binds.

    ``public_key``: the only CURVE key that is admitted, in Z85; None when connections are not encrypted.
    ``refused`` counts refused connections, by reason.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        allowed: PeerList,
        public_key: bytes | None,
        refused: Counter[str],
    ) -> None:
        self._allowed = allowed
        self._public_key = None if public_key is None else z85.decode(public_key)
        self._refused = refused
        # The counter's owner iterates over it while this thread counts, so all keys must exist before.
        self._refused.update({FOREIGN_ADDRESS: 0, FOREIGN_KEY: 0})
        self._logged = LogLimiter()  # peers that are refused try again several times a second
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="zap", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread. Call after the context was terminated."""
        self._thread.join()

    def _serve(self) -> None:
        with self._socket:
            while True:
                try:
                    frames = self._socket.recv_multipart()
                    self._socket.send_multipart(self._answer(frames))
                except zmq.ContextTerminated:
                    return

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        _version, request_id, _domain, address, _identity, mechanism, *credentials = frames
        is_admitted = self._admits(address.decode(errors="replace"), mechanism, credentials)
        code, text = (b"200", b"OK") if is_admitted else (b"400", b"refused")
        return [_VERSION, request_id, code, text, b"", b""]

    def _admits(self, address: str, mechanism: bytes, credentials: list[bytes]) -> bool:
        """Return whether a connection is admitted; count and log it if not."""
        why = self._allowed.why_refused(address)
        if why is not None:
            self._note_refusal(FOREIGN_ADDRESS, address, why)
            return False
        if self._public_key is None:
            return True
        is_curve = mechanism == b"CURVE" and len(credentials) == 1
        if is_curve and hmac.compare_digest(credentials[0], self._public_key):
            return True
        self._note_refusal(FOREIGN_KEY, address, "it has another key; give all nodes one --control-key-file")
        return False

    def _note_refusal(self, reason: str, address: str, why: str) -> None:
        self._refused[reason] += 1
        if self._logged.permits(address):
            log.warning("refused a control connection from %s: %s", address, why)
