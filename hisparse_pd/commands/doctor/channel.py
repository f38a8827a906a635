"""The channel between two doctors: questions and replies over a ZMQ REQ/REP pair, in msgpack.

``command.py`` opens both ends, and ``bandwidth.py`` asks and answers. The serving doctor offers a buffer for
the other doctor to write to, and tells the checksum of what has arrived in it. The channel is not encrypted,
since it carries nothing but the address of an empty buffer. Every wait has a timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Generic, TypeVar

import msgspec
import zmq
from msgspec import Meta, Struct

from hisparse_pd.base.access import in_url
from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.protocol.lane import LaneOffer
from hisparse_pd.protocol.messages import Address, Count, Name, Text

DOCTOR_VERSION = 2
"""Version of the messages below. A doctor refuses questions of another version."""
MAX_MESSAGE_BYTES = 16 << 10

M = TypeVar("M")


class DoctorError(Exception):
    """The other doctor does not answer, refuses, or received other bytes than were sent; or a buffer cannot
    be made."""


class Question(Struct, frozen=True, array_like=True, tag=1):
    """Asks for an Offer with the checksum of the buffer's first ``num_bytes``.

    The reply is QuestionRefused if versions or transports differ, or if the buffer is shorter.
    """

    version: Annotated[int, Meta(ge=0, lt=2**16)]
    transfer_protocol: Name
    num_bytes: Count = 0


class Offer(Struct, frozen=True, array_like=True, tag=1):
    """Offers memory for writes through ``session``: ``num_bytes`` from ``base_addr`` on."""

    session: Name
    base_addr: Address
    num_bytes: Count
    lane: LaneOffer | None = None
    """How processes of the same machine can map the memory; None if they cannot."""
    crc32: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """Checksum of the buffer's first bytes, as many as the question asks for."""


class QuestionRefused(Struct, frozen=True, array_like=True, tag=3):
    """The reply to a question that is malformed or cannot be answered; ``error`` says why."""

    error: Text


Reply = Offer | QuestionRefused

_encoder = msgspec.msgpack.Encoder()
_question_decoder: TypedDecoder[Question] = TypedDecoder(Question)
_reply_decoder: TypedDecoder[Reply] = TypedDecoder(Reply)


class _Socket(Generic[M]):
    """One end of the channel, with its own ZMQ context, which receives messages of type ``M``."""

    def __init__(self, kind: int, decoder: TypedDecoder[M], is_ipv6: bool) -> None:
        self._decoder = decoder
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.IPV6, is_ipv6)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _receive(self, timeout_secs: float) -> bytes | None:
        """Return one message; None if none came in time; b"", which is malformed, for one of several
        frames."""
        if not self._socket.poll(round(timeout_secs * 1000)):
            return None
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        return frames[0] if len(frames) == 1 else b""


class DoctorServer(_Socket[Question]):
    """The serving end."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on ``port``, or on any free one if it is 0. Raises DoctorError."""
        super().__init__(zmq.REP, _question_decoder, ":" in host)
        endpoint = f"tcp://{in_url(host)}:{port or '*'}"
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise DoctorError(f"cannot listen on {endpoint}: {error}") from error
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def serve_one(self, answer: Callable[[Question], Reply], timeout_secs: float) -> None:
        """Answer one question if it comes in time. A malformed one is refused without asking ``answer``."""
        frame = self._receive(timeout_secs)
        if frame is None:
            return
        reply: Reply
        try:
            reply = answer(self._decoder.decode(frame))
        except msgspec.MsgspecError as error:
            reply = QuestionRefused(f"malformed question of {len(frame)} bytes: {error}"[:1000])
        self._socket.send(_encoder.encode(reply), zmq.NOBLOCK)


class DoctorClient(_Socket[Reply]):
    """The asking end, which asks one question at a time."""

    def __init__(self, host: str, port: int, timeout_secs: float) -> None:
        super().__init__(zmq.REQ, _reply_decoder, ":" in host)
        self.endpoint = f"tcp://{in_url(host)}:{port}"
        self._timeout_secs = timeout_secs
        try:
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise DoctorError(f"cannot connect to {self.endpoint}: {error}") from error

    def ask(self, question: Question) -> Reply:
        """Ask a question. Raises DoctorError, after which no other question can be asked."""
        self._socket.send(_encoder.encode(question), zmq.NOBLOCK)
        frame = self._receive(self._timeout_secs)
        if frame is None:
            raise DoctorError(
                f"no answer from {self.endpoint} within {self._timeout_secs:g} s; "
                "is `hisparse-pd doctor --serve` running there, with a --host that this machine reaches?"
            )
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise DoctorError(f"{self.endpoint} sent a malformed answer: {error}") from error
