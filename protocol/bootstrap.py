"""Discovery: the answer of a prefill node's bootstrap endpoint, and the decode node's look-up of it.

The endpoint is HTTP and read-only: ``GET /bootstrap`` tells where the control sockets are. The prefill node's
front serves it behind a ``BootstrapGate``; the decode node calls ``look_up`` in a thread (``discovery.py``).
Registration goes over a control socket, which authenticates the peer.

With a control key both ends prove that they hold it: the caller signs a nonce, and the node signs that nonce
with its answer. A caller without the key gets status 401, and a forged or replayed answer is rejected. With a
list of allowed peers, only addresses on the list are answered or asked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from hisparse_pd.base.access import MAX_HOST_CHARS, WILDCARD_HOSTS, PeerList, in_url, is_host
from hisparse_pd.base.vocabulary import MAX_RANKS
from hisparse_pd.protocol.channels import ControlKeys
from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.protocol.messages import PROTOCOL_VERSION, Geometry, Name
from hisparse_pd.protocol.names import resolve
from hisparse_pd.protocol.zap import FOREIGN_ADDRESS, FOREIGN_KEY

BOOTSTRAP_PATH = "/bootstrap"
LOOKUP_TIMEOUT_SECS = 5.0
"""Limit for a whole look-up: resolving, connecting to each address, and the answer."""
MAX_INFO_BYTES = 64 << 10
"""Longest body of an answer that is read."""

NONCE_HEADER = "x-hisparse-pd-nonce"
CODE_HEADER = "x-hisparse-pd-code"

_NONCE_BYTES = 16
_REQUEST_PURPOSE = "bootstrap request"
_ANSWER_PURPOSE = "bootstrap answer"
_FINAL_STATUSES = (401, 403)
"""Statuses with which ``BootstrapGate`` refuses a caller, which will be refused again."""


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of a prefill node, which has a control socket of its own.

    ``control_host``: the rank's machine; empty if that is the first rank's.
    """

    instance_id: Name
    control_port: Annotated[int, Meta(ge=1, le=65535)]
    control_host: Annotated[str, Meta(max_length=MAX_HOST_CHARS)] = ""


class BootstrapInfo(msgspec.Struct, frozen=True):
    """The body of ``GET /bootstrap``. A wildcard as ``control_host`` means the host that was asked. The
    ``instance_id`` differs in every run of the node. ``curve``: whether the control sockets are encrypted.

    ``ranks``: all ranks in order, or empty for a node of one rank. Rank ``room % len(ranks)`` serves a room.
    The other fields describe the first rank.
    """

    protocol_version: Annotated[int, Meta(ge=0, lt=2**16)]
    instance_id: Name
    control_host: Annotated[str, Meta(min_length=1, max_length=MAX_HOST_CHARS)]
    control_port: Annotated[int, Meta(ge=1, le=65535)]
    geometry: Geometry
    curve: bool
    ranks: Annotated[tuple[RankInfo, ...], Meta(max_length=MAX_RANKS)] = ()

    @property
    def num_ranks(self) -> int:
        return max(len(self.ranks), 1)

    def of_rank(self, rank: int) -> BootstrapInfo | None:
        """Return this information with the fields of one rank; None if there is no such rank."""
        if rank >= self.num_ranks:
            return None
        if not self.ranks:
            return self
        own = self.ranks[rank]
        return msgspec.structs.replace(
            self,
            instance_id=own.instance_id,
            control_host=own.control_host or self.control_host,
            control_port=own.control_port,
        )

    def control_endpoint(self, bootstrap_host: str) -> str:
        return f"tcp://{in_url(self.control_host_for(bootstrap_host))}:{self.control_port}"

    def control_host_for(self, bootstrap_host: str) -> str:
        return bootstrap_host if self.control_host in WILDCARD_HOSTS else self.control_host


_info_decoder: TypedDecoder[BootstrapInfo] = TypedDecoder.json(BootstrapInfo)
_error_decoder: TypedDecoder[Any] = TypedDecoder.json(Any)


class BootstrapRefused(Exception):
    """The caller gets no bootstrap information. ``status``: the HTTP status of the answer; ``code``: the
    reason, one of ``BootstrapGate.REASONS``."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class BootstrapLookupError(Exception):
    """The bootstrap endpoint could not be used.

    ``nobody_listens``: all addresses refused the connection, so the node is gone. ``is_final``: the settings
    of the two nodes do not allow a connection, so asking again changes nothing.
    """

    def __init__(self, message: str, *, nobody_listens: bool = False, is_final: bool = False) -> None:
        super().__init__(message)
        self.nobody_listens = nobody_listens
        self.is_final = is_final


# --- the prefill node's side -----------------------------------------------------------------------


@dataclass(frozen=True)
class BootstrapGate:
    """Checks callers of the bootstrap endpoint and signs the answers to them."""

    REASONS: ClassVar = (FOREIGN_ADDRESS, FOREIGN_KEY)
    """The codes with which ``check`` refuses."""

    keys: ControlKeys | None
    allowed: PeerList

    def check(self, address: str, nonce: str, signature: str) -> None:
        """Raise BootstrapRefused: 403 for a caller's address, 401 for a caller without the key.

        ``nonce`` and ``signature`` are the request's headers; they are ignored when the node has no key.
        """
        why = self.allowed.why_refused(address)
        if why is not None:
            raise BootstrapRefused(403, f"the caller's {why} of this prefill node", FOREIGN_ADDRESS)
        if self.keys is None:
            return
        if not self.keys.has_signed(signature, _REQUEST_PURPOSE, nonce.encode()):
            raise BootstrapRefused(
                401,
                "this prefill node answers holders of its control key only; set the same --control-key-file "
                "on both nodes",
                FOREIGN_KEY,
            )

    def proof(self, nonce: str, body: bytes) -> dict[str, str]:
        """Return the headers that prove who sends the answer ``body``."""
        if self.keys is None:
            return {}
        return {CODE_HEADER: self.keys.sign(_ANSWER_PURPOSE, nonce.encode(), body)}


# --- the decode node's side ------------------------------------------------------------------------


def look_up(
    bootstrap_host: str,
    bootstrap_port: int,
    keys: ControlKeys | None = None,
    allowed: PeerList | None = None,
) -> BootstrapInfo:
    """Ask a prefill node for its control address. Blocks for at most LOOKUP_TIMEOUT_SECS.

    The returned control hosts are addresses, so that connecting to them needs no resolver. With ``allowed``,
    only addresses on that list are asked or returned. Raises BootstrapLookupError.
    """
    if not is_host(bootstrap_host):
        raise BootstrapLookupError(
            f"bootstrap host {bootstrap_host[:MAX_HOST_CHARS]!r} is no name and no address",
            is_final=True,
        )
    allowed = allowed or PeerList()
    url = f"http://{in_url(bootstrap_host)}:{bootstrap_port}{BOOTSTRAP_PATH}"
    deadline = time.monotonic() + LOOKUP_TIMEOUT_SECS
    addresses = _addresses(url, bootstrap_host, allowed, deadline)
    address, info = _ask(addresses, bootstrap_port, keys, url, deadline)

    if info.control_host_for(bootstrap_host) == bootstrap_host:
        control_host = address  # it answers there; the name's other addresses may be other machines
    else:
        control_host = _addresses(url, info.control_host, allowed, deadline)[0]
    hosts = {rank.control_host for rank in info.ranks if rank.control_host}
    address_of = {host: _addresses(url, host, allowed, deadline)[0] for host in hosts}
    ranks = tuple(
        msgspec.structs.replace(rank, control_host=address_of.get(rank.control_host, ""))
        for rank in info.ranks
    )
    return msgspec.structs.replace(info, control_host=control_host, ranks=ranks)


def _ask(
    addresses: list[str], port: int, keys: ControlKeys | None, url: str, deadline: float
) -> tuple[str, BootstrapInfo]:
    """Return the first address that answers, and its information. With ``keys``, only a holder of the same
    key is believed. Raises BootstrapLookupError."""
    nonce = secrets.token_hex(_NONCE_BYTES)
    headers = {}
    if keys is not None:
        headers = {NONCE_HEADER: nonce, CODE_HEADER: keys.sign(_REQUEST_PURPOSE, nonce.encode())}
    address, answer = _get_first(addresses, port, headers, url, deadline)
    if answer.status != 200:
        raise BootstrapLookupError(
            f"{url}: status {answer.status}{_error_text(answer.body)}",
            is_final=answer.status in _FINAL_STATUSES,
        )
    if keys is not None and not keys.has_signed(
        answer.signature, _ANSWER_PURPOSE, nonce.encode(), answer.body
    ):
        raise BootstrapLookupError(
            f"{url}: the answer is not by a holder of this node's control key; set the same "
            "--control-key-file on both nodes",
            is_final=True,
        )
    return address, parse_info(answer.body, url)


def parse_info(body: bytes, url: str) -> BootstrapInfo:
    """Decode the body of an answer. ``url``: where it is from, for error texts. Raises
    BootstrapLookupError."""
    try:
        info = _info_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise BootstrapLookupError(
            f"{url}: no bootstrap information: {type(error).__name__}: {error}"
        ) from error
    # ``control_host`` may be a wildcard, which means the host that was asked. Hosts in ``ranks`` may not.
    rank_hosts = {rank.control_host for rank in info.ranks if rank.control_host}
    for host in rank_hosts | {info.control_host}.difference(WILDCARD_HOSTS):
        if not is_host(host) or host in WILDCARD_HOSTS:
            raise BootstrapLookupError(f"{url}: control host {host!r} is no name and no address")
    if info.protocol_version != PROTOCOL_VERSION:
        raise BootstrapLookupError(
            f"{url}: protocol version {info.protocol_version}, this node speaks {PROTOCOL_VERSION}; "
            "run the same release on both nodes"
        )
    return info


class _Answer(NamedTuple):
    """An answer of the endpoint. ``signature``: empty when the node has no key."""

    status: int
    signature: str
    body: bytes


def _get_first(
    addresses: list[str], port: int, headers: dict[str, str], url: str, deadline: float
) -> tuple[str, _Answer]:
    """Return the first address that answers, and its answer. Each address gets an equal share of the time
    left. Raises BootstrapLookupError, with ``nobody_listens`` only if all addresses refused."""
    errors: list[BootstrapLookupError] = []
    for number, address in enumerate(addresses):
        now = time.monotonic()
        until = now + (deadline - now) / (len(addresses) - number)
        try:
            return address, _get(address, port, headers, url, until)
        except BootstrapLookupError as error:
            errors.append(error)
    nobody_listens = all(error.nobody_listens for error in errors)
    raise BootstrapLookupError(str(errors[-1]), nobody_listens=nobody_listens) from errors[-1]


def _get(address: str, port: int, headers: dict[str, str], url: str, deadline: float) -> _Answer:
    """Ask one address. A timer ends the exchange even while bytes trickle in. Raises BootstrapLookupError."""
    timeout_secs = max(0.0, deadline - time.monotonic())
    late = BootstrapLookupError(f"{url}: no whole answer in {timeout_secs:.3f} s")
    if not timeout_secs:  # resolving the name, or the addresses before this one, took all of the time
        raise late
    with contextlib.closing(HTTPConnection(address, port, timeout=timeout_secs)) as connection:
        try:
            connection.connect()
        except TimeoutError as error:
            raise late from error
        except OSError as error:
            what = os.strerror(error.errno) if error.errno else str(error)
            raise BootstrapLookupError(
                f"{url}: cannot connect ({what})", nobody_listens=error.errno == errno.ECONNREFUSED
            ) from error
        end = threading.Timer(deadline - time.monotonic(), _shut_down, (connection.sock,))
        end.start()
        try:
            connection.request("GET", BOOTSTRAP_PATH, headers=headers)
            with connection.getresponse() as answer:
                body, num_missing = _read_body(answer)
        except (OSError, HTTPException) as error:
            if time.monotonic() >= deadline:
                raise late from error
            raise BootstrapLookupError(f"{url}: {type(error).__name__}: {error}") from error
        finally:
            end.cancel()
        if len(body) > MAX_INFO_BYTES:
            raise BootstrapLookupError(f"{url}: the answer has more than {MAX_INFO_BYTES} bytes")
        if time.monotonic() >= deadline:
            raise late
        if num_missing:
            raise BootstrapLookupError(f"{url}: the answer ended {num_missing} bytes before its end")
        return _Answer(answer.status, answer.headers.get(CODE_HEADER, ""), body)


def _read_body(answer: HTTPResponse) -> tuple[bytes, int]:
    """Return the answer's body, with a body of more than MAX_INFO_BYTES cut somewhere behind these, and how
    many bytes of the declared length have not come. Raises OSError and HTTPException."""
    declared = answer.length
    most = MAX_INFO_BYTES + 1 if declared is None else min(declared, MAX_INFO_BYTES + 1)
    body = bytearray()
    # ``read`` takes a negative length of a chunk for all that ever comes, or raises ValueError. ``read1``
    # returns no more than is buffered, whatever a chunk says.
    while len(body) < most and (part := answer.read1(most - len(body))):
        body += part
    return bytes(body), 0 if declared is None else declared - len(body)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        sock.shutdown(socket.SHUT_RDWR)


def _addresses(url: str, host: str, allowed: PeerList, deadline: float) -> list[str]:
    """Return the addresses of ``host`` that the list allows. Raises BootstrapLookupError if it has none."""
    try:
        addresses = resolve(host, deadline)
    except OSError as error:
        raise BootstrapLookupError(f"{url}: {host}: {error}") from error
    if allowed_addresses := [address for address in addresses if allowed.allows(address)]:
        return allowed_addresses
    why = allowed.why_refused(addresses[0]) if addresses else f"{host} has no address"
    raise BootstrapLookupError(f"{url}: {why} of this decode node", is_final=True)


def _error_text(body: bytes) -> str:
    """Return the message of an error answer, cut to 500 characters."""
    try:
        message = _error_decoder.decode(body)["error"]["message"]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return ""
    return f": {str(message)[:500]}"
