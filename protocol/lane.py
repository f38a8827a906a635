"""Messages on the socket of a lane: a Unix socket between two processes of one machine.

``transfer/lane_host.py`` (the decode node's end) and ``transfer/lane_memory.py`` (the prefill node's) speak
them, in this order; one message is one packet (SOCK_SEQPACKET):

1. The decode node names the socket and a token (``LaneOffer``) in its Register, over the control channel.
2. The prefill node connects to the socket and sends the token (``LaneHello``).
3. The decode node answers with descriptors of its memory (``LaneWelcome``), or refuses (``LaneDenied``).
4. The prefill node maps the memory. It may then promise (``LaneSole``) to write to this decode node through
   that memory alone, with a CPU; a node that writes with a GPU promises nothing.

No message follows: the connection stands for as long as the prefill node may write, and the kernel closes it
when either process ends.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.msgpack import Encoder

from hisparse_pd.protocol.decoding import TypedDecoder

TOKEN_BYTES = 32
"""Length of the secret with which a caller shows that it got the decode node's Register."""
MAX_LANE_MESSAGE_BYTES = 8192
MAX_WINDOWS = 8
"""Most pieces of memory that a decode node offers, one for each of its pools."""

SOCKET_PREFIX = "hisparse-pd-lane-"
LaneSocket = Annotated[str, Meta(max_length=64, pattern=rf"^{SOCKET_PREFIX}[0-9a-f]{{16}}\Z")]
"""The socket's name without a path: the prefill node's own settings say in which directory it looks."""
Token = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class LaneOffer(Struct, frozen=True, array_like=True):
    """The part of a registration that says where processes of the same machine can open this node's memory.
    It differs in every run of a node."""

    socket: LaneSocket
    token: Token


class LaneHello(Struct, frozen=True, array_like=True, tag=1):
    """First packet of the prefill node; ``instance_id`` names its run, as in Registered."""

    token: Token
    instance_id: Annotated[str, Meta(max_length=256, pattern=r"^[ -~]+\Z")]


class LaneSole(Struct, frozen=True, array_like=True, tag=2):
    """A promise to write to this decode node through this memory alone, with a CPU, so that nothing lands
    after the connection has ended."""


class Window(Struct, frozen=True, array_like=True):
    """``num_bytes`` from ``base_addr`` in the decode node: a file from its byte 0, or memory of a GPU.

    ``descriptor``: the file's position among the descriptors that came with the packet; 0 for a GPU.
    ``cuda_handle``: opens memory of a GPU, in which the window begins at ``cuda_offset``; empty for a file.
    """

    base_addr: _Count
    num_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    descriptor: Annotated[int, Meta(ge=0, lt=MAX_WINDOWS)]
    cuda_handle: Annotated[bytes, Meta(max_length=256)] = b""
    cuda_offset: _Count = 0


class LaneWelcome(Struct, frozen=True, array_like=True, tag=1):
    """Answers LaneHello; descriptors of the files come with the packet."""

    windows: Annotated[tuple[Window, ...], Meta(min_length=1, max_length=MAX_WINDOWS)]


class LaneDenied(Struct, frozen=True, array_like=True, tag=2):
    """Answers a caller that may not open the memory; the connection is closed after it."""

    reason: Annotated[str, Meta(max_length=1024)]


LaneAnswer = LaneWelcome | LaneDenied
"""Answers of the decode node."""

FromWriter = LaneHello | LaneSole
"""Messages of the prefill node."""

encoder = Encoder()
from_writer_decoder: TypedDecoder[FromWriter] = TypedDecoder(FromWriter)
answer_decoder: TypedDecoder[LaneAnswer] = TypedDecoder(LaneAnswer)
