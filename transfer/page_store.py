"""Owns a client of Mooncake Store: objects in main memory that many nodes lend, found by their keys.

A prefill node's ``StoreThreads`` and the doctor use it. The store is a program of its own,
``mooncake_master``, which knows where each object is; the bytes lie with the clients, and go from one to
another. Once connected, a client finds a master that was started again by itself.

Mooncake returns bare codes, which this module translates. Its calls block for up to 30 s when a master or a
peer has stopped, without the interpreter's lock, except for two: ``connect`` therefore makes sure that the
master answers before it calls ``setup``, and ``close`` returns the lent memory and leaves the rest to the end
of the process.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Final, NamedTuple, Protocol

from hisparse_pd.base.access import PeerList
from hisparse_pd.transfer.engine import HasMemory, mooncake_environment
from hisparse_pd.transfer.errors import TransferSetupError
from hisparse_pd.transfer.listeners import guarded_listeners
from hisparse_pd.transfer.transport import TCP, Transport

log = logging.getLogger(__name__)

ANSWER_SECS: Final = 2.0
"""Time in which a master must take a connection, and again must answer on it."""

_NO_SERVER: Final = "P2PHANDSHAKE"
"""The name for clients that ask each other, and no metadata server, where their memory is."""
_ANYWHERE: Final = "*"
"""The name for memory whose NUMA node Mooncake finds out. It must not be empty: over RDMA clients then take
the whole description of a peer's memory for broken, and nothing can be written there."""
_NO_SPACE, _ABSENT, _EXISTS = -200, -704, -705
"""Codes of Mooncake: no space for the object, no such object, the object is there."""


class StoreError(Exception):
    """The store cannot be reached, or its answer is an error."""


class Result(Enum):
    """The outcome of one object in a call."""

    DONE = auto()
    ABSENT = auto()
    """The store has no such object; nothing was moved."""
    FULL = auto()
    """The store has no space for the object; nothing was moved."""
    FAILED = auto()
    """An error after which bytes may still move."""


class Pieces(NamedTuple):
    """Memory that together is one object, in order; all of it is registered."""

    addrs: list[int]
    sizes: list[int]


class PageStore(Protocol):
    """A store of objects. Any thread may call it, and all methods may block. Each raises StoreError."""

    def connect(self) -> None:
        """Connect, if it is not connected yet."""

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Return which objects the store has."""

    def get(self, keys: Sequence[str], memory: Sequence[Pieces]) -> list[Result]:
        """Read each object into its memory. What is not DONE may be there in part."""

    def put(self, keys: Sequence[str], memory: Sequence[Pieces]) -> list[Result]:
        """Write each object from its memory. An object that is there already stays as it is."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are not there do not matter."""

    def close(self) -> None:
        """Take back the memory that was lent. No other call may be in progress, and none may follow."""


class MooncakeStore:
    """A ``PageStore`` at the master ``address`` (HOST:PORT).

    ``host``: the address at which other clients reach this one. ``memory``: what objects are read from and
    written to. ``lent_bytes``: main memory that this client lends to the store; 0: none. Raises
    TransferSetupError if Mooncake cannot be imported.
    """

    def __init__(
        self,
        address: str,
        host: str,
        *,
        memory: Sequence[HasMemory] = (),
        lent_bytes: int = 0,
        transport: Transport = TCP,
        allowed: PeerList | None = None,
    ) -> None:
        # Imported here because the extension starts to log and reads its environment at its import.
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise TransferSetupError(
                f"the store of Mooncake cannot be imported ({error}); install one of the packages "
                "mooncake-transfer-engine*, or leave out --kv-store"
            ) from error
        self._client: Any = MooncakeDistributedStore()
        self._address = address
        self._host = host
        self._transport = transport
        self._allowed = allowed or PeerList()
        self._lent_bytes = lent_bytes
        self._lock = threading.Lock()
        # The steps of ``connect``, each of which is made once.
        self._is_set_up = False
        self._to_register = list(memory)
        self._lent_segments: list[str] = []
        """Mooncake's names of the lent memory."""
        self._is_connected = False

    def connect(self) -> None:
        with self._lock:
            if self._is_connected:
                return
            if not self._is_set_up:
                self._set_up()
                self._is_set_up = True
            while self._to_register:
                memory = self._to_register[-1]
                code = self._client.register_buffer(memory.data_ptr(), memory.nbytes)
                if code != 0:
                    raise StoreError(
                        f"the store's client cannot register {memory.nbytes} bytes: code {code}; for RDMA "
                        "raise the locked-memory limit (ulimit -l)"
                    )
                self._to_register.pop()
            if self._lent_bytes and not self._lent_segments:
                protocol = self._transport.protocol
                lent = self._client.allocate_and_mount_segment(self._lent_bytes, protocol, _ANYWHERE)
                if lent["ret"] != 0:
                    raise StoreError(
                        f"the store at {self._address} cannot use {self._lent_bytes} lent bytes: code "
                        f"{lent['ret']}; free as much main memory, or lend fewer bytes"
                    )
                self._lent_segments = lent["segment_ids"]
            self._is_connected = True
        log.info("connected to the store at %s, %d bytes lent to it", self._address, self._lent_bytes)

    def _set_up(self) -> None:
        """Join the store, without memory yet. It holds the interpreter's lock, for some 0.1 s."""
        self._check_master()
        transport = self._transport
        devices = ",".join(transport.devices)
        settings = (self._host, _NO_SERVER, 0, 0, transport.protocol, devices, self._address)
        try:
            with (
                guarded_listeners(self._host, self._allowed),
                mooncake_environment(transport, self._host),
            ):
                code = self._client.setup(*settings)
        except TransferSetupError as error:
            raise StoreError(str(error)) from error
        if code != 0:
            raise StoreError(f"no connection to the store at {self._address}: code {code}")

    def _check_master(self) -> None:
        """Raise StoreError unless the master answers: it closes a connection on which it gets bytes that are
        no call. A stopped master accepts connections, but does not answer."""
        host, _, port = self._address.rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECS) as connection:
                connection.sendall(bytes(64))
                connection.recv(1)
        except ConnectionResetError:
            return
        except OSError as error:
            raise StoreError(f"no answer from the store at {self._address}: {error}") from error

    def exist(self, keys: Sequence[str]) -> list[bool]:
        codes = self._connected().batch_is_exist(list(keys))
        if any(code < 0 for code in codes):
            raise StoreError(f"the store at {self._address} cannot look objects up: code {min(codes)}")
        return [code == 1 for code in codes]

    def get(self, keys: Sequence[str], memory: Sequence[Pieces]) -> list[Result]:
        addrs, sizes = [pieces.addrs for pieces in memory], [pieces.sizes for pieces in memory]
        codes = self._connected().batch_get_into_multi_buffers(list(keys), addrs, sizes)
        return [
            Result.DONE if code == sum(pieces.sizes) else _result_of(code)
            for code, pieces in zip(codes, memory, strict=True)
        ]

    def put(self, keys: Sequence[str], memory: Sequence[Pieces]) -> list[Result]:
        addrs, sizes = [pieces.addrs for pieces in memory], [pieces.sizes for pieces in memory]
        codes = self._connected().batch_put_from_multi_buffers(list(keys), addrs, sizes)
        return [Result.DONE if code in (0, _EXISTS) else _result_of(code) for code in codes]

    def remove(self, keys: Sequence[str]) -> None:
        # Without force Mooncake keeps an object for some seconds after somebody has looked for it.
        codes = self._connected().batch_remove(list(keys), True)
        if wrong := [code for code in codes if code not in (0, _ABSENT)]:
            raise StoreError(f"the store at {self._address} cannot remove an object: code {wrong[0]}")

    def close(self) -> None:
        with self._lock:
            if self._lent_segments:
                self._client.unmount_and_free_segment(self._lent_segments)
                self._lent_segments = []

    def _connected(self) -> Any:
        if not self._is_connected:
            raise StoreError(f"not connected to the store at {self._address}")
        return self._client


def _result_of(code: int) -> Result:
    return {_ABSENT: Result.ABSENT, _NO_SPACE: Result.FULL}.get(code, Result.FAILED)
