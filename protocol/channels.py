"""The control channel between nodes: ZMQ sockets with typed messages (``messages.py``).

A prefill engine has one ``ControlServer``, a decode engine a ``ControlClient`` for each prefill rank. Sockets
belong to the thread that made them. Nothing here blocks. With ``Heartbeats``, ZMQ's own threads close
a connection whose other end is silent; the client learns of it (``take_loss``) and ZMQ reconnects.

Control traffic is encrypted and authenticated with CURVE when the cluster has a key: all nodes share one
key pair, and a server admits only clients that prove that they hold it. A server with a list of allowed peers
admits no other address, with a key or without. At the bootstrap endpoint (``bootstrap.py``), which is HTTP,
both sides prove by a signature that they hold the key (``ControlKeys.sign``). ``engine/sockets.py`` protects
the links between machines of one node with the same ``Guard`` and ``prove_key``.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from hisparse_pd.base.access import KeyFileError, PeerList, in_url, parse_address
from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.protocol import messages
from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.protocol.messages import ToDecode, ToPrefill
from hisparse_pd.protocol.polling import SEND_HWM, burst
from hisparse_pd.protocol.zap import DOMAIN, ZapHandler

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_KEY_FILE_BYTES = 4096
"""Limit of the bytes read from a key file, because its path may name a device or a huge file."""
_Z85_KEY = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MAX_SOCKETS = 8192
"""Most ZMQ sockets of a process that has called ``allow_many_peers``. A ``ControlClient`` has three, so that
ZMQ's own limit of 1,023 would be 341 ranks of prefill nodes."""
_CLOSE_LINGER_MILLISECS = 1_000
"""How long a closed server still sends its last messages, which say that the node is shutting down."""


def allow_many_peers() -> None:
    """Let this process have _MAX_SOCKETS ZMQ sockets, or as many as its limit of descriptors allows. Call
    before the first socket is made; a later call has no effect."""
    zmq.Context.instance().set(zmq.MAX_SOCKETS, _MAX_SOCKETS)


class ControlKeyError(KeyFileError):
    """The control key file is missing or does not hold a Z85 CURVE secret key."""


class ControlAddressError(ValueError):
    """ZMQ cannot connect to this address."""


class NoSocketError(Exception):
    """ZMQ, or this process, has no socket left for another connection."""

    def __init__(self, error: zmq.ZMQError) -> None:
        super().__init__(f"no socket is left for another connection: {error}; other ones must end first")


@dataclass(frozen=True)
class ControlKeys:
    """The CURVE key pair that all nodes of a cluster share, in Z85."""

    secret: bytes = field(repr=False)
    public: bytes

    @classmethod
    def load(cls, path: Path) -> ControlKeys:
        """Read the secret key from ``path``. Raises ControlKeyError."""
        try:
            with path.open("rb") as file:
                secret = file.read(_MAX_KEY_FILE_BYTES).strip()
            if not _Z85_KEY.fullmatch(secret):  # ZMQ accepts any text of the right length
                raise ValueError(f"it holds {len(secret)} bytes that are not such a key")
            return cls(secret, zmq.curve_public(secret))
        except FileNotFoundError as error:
            raise ControlKeyError(
                f"--control-key-file {path}: {error.strerror}; copy the cluster's key to it, or make the "
                f"first one with `hisparse-pd keygen {path}`"
            ) from error
        except (OSError, ValueError, zmq.ZMQError) as error:
            raise ControlKeyError(
                f"--control-key-file {path}: expected one line with a 40-character Z85 CURVE secret key "
                f"({error}); copy the cluster's key to it"
            ) from error

    @classmethod
    def generate(cls) -> ControlKeys:
        public, secret = zmq.curve_keypair()
        return cls(secret, public)

    def sign(self, purpose: str, *parts: bytes) -> str:
        """Return a code over ``parts`` that only a holder of the key can make, for ``purpose`` alone."""
        digest = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()

    def has_signed(self, code: str, purpose: str, *parts: bytes) -> bool:
        """Return whether ``code`` is what ``sign`` returns for the same arguments."""
        return hmac.compare_digest(code.encode(), self.sign(purpose, *parts).encode())


@dataclass(frozen=True)
class Heartbeats:
    """ZMQ's own heartbeats. Its thread sends and answers them, however busy the socket's owner is."""

    interval_secs: float
    timeout_secs: float
    """ZMQ closes a connection on which nothing arrives for so long after a heartbeat."""

    @classmethod
    def within(cls, interval_secs: float, limit_secs: float) -> Heartbeats:
        """Return heartbeats that notice a silence of ``limit_secs``, which must exceed the interval."""
        return cls(interval_secs, limit_secs - interval_secs)

    def apply_to(self, sock: zmq.Socket[bytes]) -> None:
        """Set these heartbeats on a socket. Call before it binds or connects."""
        sock.setsockopt(zmq.HEARTBEAT_IVL, round(self.interval_secs * 1000))
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(self.timeout_secs * 1000))


def load_control_keys(path: Path | None) -> ControlKeys | None:
    """Read the keys from the file at ``path``, if it is given. Raises ControlKeyError."""
    return None if path is None else ControlKeys.load(path)


class _Channel(Generic[T]):
    """A socket with typed messages. ``dropped`` counts, by reason, refused connections, frames that could not
    be decoded, and messages that are too long or have no receiver."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        decoder: TypedDecoder[T],
        heartbeats: Heartbeats | None,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self._logged = LogLimiter()  # a peer that sends one malformed message sends many
        self._decoder = decoder
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.SNDHWM, SEND_HWM)
        if heartbeats is not None:
            heartbeats.apply_to(self.socket)

    def _receive(self, num_frames: int) -> Iterator[tuple[list[bytes], T]]:
        """Yield what has arrived, at most a burst: all frames, and the message that the last frame holds."""
        for frames in burst(self.socket):
            if len(frames) != num_frames:
                self.dropped["malformed"] += 1
                continue
            *address, frame = frames
            try:
                message = self._decoder.decode(frame)
            except msgspec.MsgspecError as error:
                self.dropped["malformed"] += 1
                sender = b"".join(address).hex() or self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
                if self._logged.permits():
                    log.warning(
                        "dropped a malformed message of %d bytes from %s: %s", len(frame), sender, error
                    )
                continue
            yield frames, message

    def _send(self, address: Sequence[bytes], message: ToPrefill | ToDecode) -> bool:
        frame = messages.encoder.encode(message)
        if len(frame) > messages.MAX_MESSAGE_BYTES:
            self.dropped["oversized"] += 1
            what, most = type(message).__name__, messages.MAX_MESSAGE_BYTES
            log.error("dropped a %s of %d bytes: a message may have at most %d", what, len(frame), most)
            return False
        try:
            self.socket.send_multipart([*address, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.dropped["unroutable"] += 1
            return False
        return True


class Guard:
    """Admits only holders of the key, from allowed addresses, to the server sockets of one context."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: ControlKeys | None,
        allowed: PeerList | None,
        refused: Counter[str],
    ) -> None:
        """Create the guard before a socket of the context binds. ``refused`` counts the connections that it
        refuses, by reason."""
        self._keys = keys
        self._zap: ZapHandler | None = None
        # Without a key and without a list anybody may connect. An empty PeerList allows every address.
        if keys is not None or allowed:
            public_key = keys.public if keys is not None else None
            self._zap = ZapHandler(context, allowed or PeerList(), public_key, refused)

    def protect(self, sock: zmq.Socket[bytes]) -> None:
        """Guard a socket of the context. Call before it binds."""
        if self._zap is not None:
            sock.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        if self._keys is not None:
            sock.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            sock.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            sock.setsockopt(zmq.CURVE_SERVER, 1)

    def join(self) -> None:
        """Wait for the guard's thread. Call after the context was terminated."""
        if self._zap is not None:
            self._zap.join()


def prove_key(sock: zmq.Socket[bytes], keys: ControlKeys | None) -> None:
    """Give a client's socket the keys that a ``Guard`` asks for. Call before it connects."""
    if keys is not None:
        sock.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)


class ControlServer(_Channel[ToPrefill]):
    """The prefill node's control socket (ROUTER). The identity of a connection names its peer."""

    def __init__(
        self,
        host: str,
        port: int,
        keys: ControlKeys | None = None,
        allowed: PeerList | None = None,
        heartbeats: Heartbeats | None = None,
    ) -> None:
        self._context = zmq.Context()
        super().__init__(self._context, zmq.ROUTER, messages.to_prefill_decoder, heartbeats)
        self._guard = Guard(self._context, keys, allowed, self.dropped)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.IPV6, ":" in host)
        self._guard.protect(self.socket)
        self.socket.bind(f"tcp://{in_url(host)}:{port or '*'}")
        endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rsplit(":", 1)[1])

    def receive(self) -> Iterator[tuple[bytes, ToPrefill]]:
        """Yield ``(peer identity, message)`` for what has arrived, without waiting, at most a burst."""
        for frames, message in self._receive(2):
            yield frames[0], message

    def send(self, peer: bytes, message: ToDecode) -> bool:
        """Send to a peer. Returns False, counted as ``unroutable``, when it is gone or its queue is full."""
        return self._send([peer], message)

    def close(self) -> None:
        self.socket.close(linger=_CLOSE_LINGER_MILLISECS)
        self._context.term()
        self._guard.join()


class ControlClient(_Channel[ToDecode]):
    """The decode node's control socket to one prefill node (DEALER). ZMQ reconnects by itself.

    ``endpoint``: tcp://ADDRESS:PORT. Raises ControlAddressError for an endpoint that ZMQ does not take, and
    NoSocketError.
    """

    def __init__(
        self, endpoint: str, keys: ControlKeys | None = None, heartbeats: Heartbeats | None = None
    ) -> None:
        _, _, destination = endpoint.removeprefix("tcp://").rpartition(";")  # ZMQ allows "SOURCE;" before it
        host, _, _ = destination.rpartition(":")
        if parse_address(host) is None:
            raise ControlAddressError(f"cannot connect to {endpoint!r}: give an address; a name stalls ZMQ")
        try:
            super().__init__(zmq.Context.instance(), zmq.DEALER, messages.to_decode_decoder, heartbeats)
        except zmq.ZMQError as error:
            raise NoSocketError(error) from error
        self.socket.setsockopt(zmq.IPV6, "[" in endpoint)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        prove_key(self.socket, keys)
        try:
            self._losses: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as error:
            self.socket.close()
            raise NoSocketError(error) from error
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ControlAddressError(f"cannot connect to {endpoint!r}: {error}") from error

    def take_loss(self) -> bool:
        """Return whether a connection was lost since the last call. Its messages may still be received."""
        is_lost = False
        while self._losses.poll(0):
            self._losses.recv_multipart()
            is_lost = True
        return is_lost

    def receive(self) -> Iterator[ToDecode]:
        """Yield what has arrived, without waiting, at most a burst."""
        for _, message in self._receive(1):
            yield message

    def send(self, message: ToPrefill) -> bool:
        """Send to the peer. Returns False, counted as ``unroutable``, when the queue to it is full."""
        return self._send([], message)

    def close(self) -> None:
        self.socket.disable_monitor()
        self._losses.close()
        self.socket.close()
