"""Owns a Mooncake transfer engine: its session, its registered memory, and one-sided writes and reads by it.

Both nodes' engines make one ``TransferEngine`` and register their pools with it; a prefill node's ``Lanes``
write and read with it. Mooncake returns bare codes and does not check its caller. This module refuses own
memory that is not registered (Mooncake reports success for it and moves nothing), enforces the chosen
transport (Mooncake takes what it finds), keeps batches below the size at which Mooncake's queues overflow,
and raises an exception for every code."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from hisparse_pd.base.access import WILDCARD_HOSTS, in_url, is_loopback
from hisparse_pd.core.memory.machine import Machine
from hisparse_pd.core.paging.extents import SlotArray, ranges_around
from hisparse_pd.transfer.errors import TransferError as TransferError
from hisparse_pd.transfer.errors import TransferSetupError as TransferSetupError
from hisparse_pd.transfer.plan import (
    MAX_DESCRIPTOR_BYTES,
    Descriptors,
    Reads,
    Writes,
    as_descriptors,
    cut_long,
)
from hisparse_pd.transfer.session_names import SessionNames
from hisparse_pd.transfer.transport import TCP, Transport, address_fault, environment_fault

log = logging.getLogger(__name__)

MAX_BATCH_DESCRIPTORS = 512
"""Most descriptors in one call of Mooncake that writes. Over TCP it queues 1024 for each peer. Beyond that it
fails the batch and, as seen with 0.3.13, the connections to the peer for good. Half leaves room for reads,
and for descriptors that a failed batch left queued."""
MAX_READ_DESCRIPTORS = 128
"""Most descriptors in one call of Mooncake that reads."""


class HasMemory(Protocol):
    """Memory on any device; a torch tensor is one."""

    @property
    def nbytes(self) -> int: ...

    def data_ptr(self) -> int: ...

    def is_contiguous(self) -> bool: ...


class _Registered(NamedTuple):
    """Registered memory, up to the address ``end``; ``memory`` is kept alive by it."""

    end: int
    memory: HasMemory


def quiet_mooncake_logs() -> None:
    """Limit Mooncake's log to errors, unless the environment sets a level. Call before Mooncake is imported,
    which is when it reads the level."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")


class TransferEngine:
    """One Mooncake engine. Any thread may call it, but two must not write to one session at once, nor read
    from it, because they would overflow Mooncake's queue. A ``Sender`` has one thread for each session.

    ``host``: the address at which peers reach this engine, not a wildcard. ``transport``: the result of
    ``choose_transport``. Raises TransferSetupError.
    """

    def __init__(self, host: str, transport: Transport = TCP, *, needs_network: bool = True) -> None:
        """Start the engine. ``needs_network``: false if nodes of this machine share memory. A node on
        loopback then starts even if Mooncake cannot be imported."""
        host = _checked_host(host)
        fault = environment_fault(Machine())
        if fault is not None:
            raise TransferSetupError(str(fault))
        self.transport = transport
        self._lock = threading.Lock()
        self.names = SessionNames()
        """The names under which Mooncake knows sessions over TCP."""
        self.registered: dict[int, _Registered] = {}
        """Registered memory by its first address."""
        self.fault = ""
        """Why nothing can be written over a network; empty if it can."""
        self.mooncake: Any = self._start_mooncake(host, needs_network=needs_network)
        self.session = f"{in_url(host)}:{self.mooncake.get_rpc_port()}"
        self._check_session(host)

    def _start_mooncake(self, host: str, *, needs_network: bool) -> Any:
        """Return a started engine of Mooncake, or what replaces it. Raises TransferSetupError."""
        transport = self.transport
        with mooncake_environment(transport, host):
            try:
                mooncake = new_mooncake_engine()
            except TransferSetupError as error:
                if needs_network or transport.protocol != "tcp" or not is_loopback(host):
                    raise
                self.fault = f"KV can only go to nodes of this machine, through shared memory: {error}"
                log.warning("%s", self.fault)
                mooncake = _NoMooncake()
            code = mooncake.initialize(host, "P2PHANDSHAKE", transport.protocol, ",".join(transport.devices))
        if code != 0:
            raise TransferSetupError(
                f"Mooncake cannot start on host {host!r} with protocol {transport.protocol}"
                f"{' on ' + ', '.join(transport.devices) if transport.devices else ''}: code {code}; "
                f"`hisparse-pd doctor --transfer-protocol {transport.protocol}` says what is missing, and "
                "Mooncake's log with MC_LOG_LEVEL=INFO in the environment why"
            )
        return mooncake

    def register(self, memory: HasMemory) -> int:
        """Open memory to the transport, for reading and for peers' writes; returns its address.

        The memory is kept alive until it is unregistered. Raises TransferError if it is empty, not contiguous
        or overlaps registered memory, or if Mooncake refuses it (RDMA: the process's locked-memory limit).
        """
        addr, num_bytes = memory.data_ptr(), memory.nbytes
        if not memory.is_contiguous() or not num_bytes:
            raise TransferError(
                f"memory of {num_bytes} bytes at {addr:#x} is empty or not contiguous; register a copy"
            )
        with self._lock:
            for start, other in self.registered.items():
                if start < addr + num_bytes and addr < other.end:
                    raise TransferError(
                        f"memory [{addr:#x}, {addr + num_bytes:#x}) overlaps the registered "
                        f"[{start:#x}, {other.end:#x}); unregister that first"
                    )
            code = self.mooncake.register_memory(addr, num_bytes)
            if code != 0:
                raise TransferError(
                    f"Mooncake cannot register {num_bytes} bytes at {addr:#x}: code {code}; "
                    "for RDMA raise the locked-memory limit (ulimit -l)"
                )
            self.registered[addr] = _Registered(addr + num_bytes, memory)
        return addr

    def unregister(self, addr: int) -> None:
        """Undo ``register``, given the address that it returned. Raises TransferError for any other."""
        with self._lock:
            if addr not in self.registered:
                raise TransferError(f"memory at {addr:#x} is not registered")
            code = self.mooncake.unregister_memory(addr)
            del self.registered[addr]
        if code != 0:
            raise TransferError(f"Mooncake cannot unregister the memory at {addr:#x}: code {code}")

    def write(self, session: str, writes: Writes, stop: Callable[[], str] | None = None) -> None:
        """Write from addresses in this process to addresses in the peer's memory.

        Blocks, without the interpreter lock, until every byte has landed, or until Mooncake's own timeout
        (30 s over TCP) when the peer does not answer. ``stop`` is called between parts of a long write; if it
        returns a reason, the write ends with it. Raises TransferError, with ``may_still_land`` False when the
        arguments were refused and when ``stop`` ended the write.
        """
        self.check_sources(columns := as_descriptors(writes))
        self._move(session, columns, "write", stop)

    def read(self, session: str, reads: Reads, stop: Callable[[], str] | None = None) -> None:
        """Read from addresses in the peer's memory to addresses in this process, as ``write`` does the other
        way round."""
        self.check_destinations(columns := as_descriptors(reads))
        self._move(session, columns, "read", stop)

    def _move(self, session: str, columns: Descriptors, verb: str, stop: Callable[[], str] | None) -> None:
        """Write or read, as ``verb`` says."""
        if not columns.lengths.size:
            return
        preposition = "to" if verb == "write" else "from"
        if self.fault:
            raise TransferError(f"{verb} {preposition} session {session}: {self.fault}; nothing was sent")
        columns = cut_long(columns, MAX_DESCRIPTOR_BYTES)
        name = self.names.of(session) if self.transport.protocol == "tcp" else session
        most = MAX_BATCH_DESCRIPTORS if verb == "write" else MAX_READ_DESCRIPTORS
        num_moved = 0
        for first in range(0, columns.lengths.size, most):
            if stop is not None and (reason := stop()):
                raise TransferError(f"stopped after {num_moved} bytes: {reason}")
            part = columns.at(slice(first, first + most))
            src, dst, lengths = (column.tolist() for column in part)
            started_secs = time.monotonic()
            # Mooncake takes this process's addresses first, whichever way the bytes go.
            if verb == "write":
                code = self.mooncake.batch_transfer_sync_write(name, src, dst, lengths)
            else:
                code = self.mooncake.batch_transfer_sync_read(name, dst, src, lengths)
            if code != 0:
                took_secs = time.monotonic() - started_secs
                theirs = "destination" if verb == "write" else "source"
                raise TransferError(
                    f"{verb} of {columns.num_bytes} bytes {preposition} session {session} failed with code "
                    f"{code} after {num_moved} bytes, {took_secs:.1f} s into the next {part.num_bytes}; "
                    f"the peer is gone, does not answer, or has not registered the {theirs}",
                    may_still_land=True,
                )
            num_moved += part.num_bytes

    def check_sources(self, writes: Descriptors) -> None:
        """Raise TransferError unless all sources lie in registered memory."""
        self._check_registered("source", writes.src_addrs, writes.lengths)

    def check_destinations(self, reads: Descriptors) -> None:
        """Raise TransferError unless all destinations lie in registered memory."""
        self._check_registered("destination", reads.dst_addrs, reads.lengths)

    def _check_registered(self, what: str, addrs: SlotArray, num_bytes: SlotArray) -> None:
        with self._lock:
            pieces = sorted((start, memory.end) for start, memory in self.registered.items())
        starts, ends = np.array(pieces, np.int64).reshape(-1, 2).T
        bad = ranges_around(starts, ends, addrs, num_bytes) < 0
        if bad.any():
            worst = int(np.argmax(bad))
            raise TransferError(
                f"{what} of {num_bytes[worst]} bytes at {addrs[worst]:#x} (descriptor {worst} of "
                f"{addrs.size}) is not in registered memory; nothing was sent"
            )

    def renew(self, session: str, instance_id: str) -> None:
        """Note which run of a node has ``session``, so that the next write looks up that run's memory; empty
        if the node does not say. Over RDMA Mooncake looks again by itself when a write fails."""
        self.names.renew(session, instance_id)

    def is_reachable(self, session: str) -> bool:
        """Return whether a peer answers at ``session`` now."""
        return bool(self.mooncake.send_probe(session) == 0)

    def close(self) -> None:
        """Unregister all memory and leave the network. No write may be in progress, and none may follow."""
        with self._lock:
            for addr in self.registered:
                self.mooncake.unregister_memory(addr)
            self.registered.clear()
            if isinstance(self.mooncake, _NoMooncake):
                self.mooncake.close()
            self.mooncake = None

    def _check_session(self, host: str) -> None:
        """Raise TransferSetupError unless this engine answers at its own session, its only name for peers."""
        fault = address_fault(host)
        if fault is not None:  # not tried: a NAT may lead back to this machine for peers only
            log.warning("%s", fault)
        elif not self.is_reachable(self.session):
            raise TransferSetupError(
                f"Mooncake does not answer at {self.session}, the session that peers are told; "
                "set --advertise-host to an address at which this machine accepts connections"
            )


def _checked_host(host: str) -> str:
    """Return ``host`` without the brackets of an IPv6 address. Raises TransferSetupError."""
    if host in WILDCARD_HOSTS:
        raise TransferSetupError(f"host {host!r}: peers need an address to reach; set --advertise-host")
    bare = host.removeprefix("[").removesuffix("]")
    if bare.count(":") == 1 or "]" in bare:
        raise TransferSetupError(
            f"host {host!r}: expected an address without a port; Mooncake chooses the port"
        )
    return bare


_environment_lock = threading.Lock()


def _mooncake_settings(transport: Transport, host: str) -> dict[str, str | None]:
    """Return the environment for Mooncake's start, which alone decides the protocol: Mooncake ignores the one
    that ``initialize`` gets.

    With MC_FORCE_HCA Mooncake fails, instead of taking TCP, when it can open no device.
    """
    is_rdma = transport.protocol == "rdma"
    settings = {"MC_FORCE_TCP": None if is_rdma else "1", "MC_FORCE_HCA": "1" if is_rdma else None}
    if ":" in host:
        settings["MC_USE_IPV6"] = "1"
    return settings


@contextmanager
def mooncake_environment(transport: Transport, host: str) -> Iterator[None]:
    """Set the environment in which Mooncake starts on ``transport``, and restore it at the end."""
    values = _mooncake_settings(transport, host)
    with _environment_lock:
        before = {name: os.environ.get(name) for name in values}
        _set_environment(values)
        try:
            yield
        finally:
            _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class _NoMooncake:
    """Replaces Mooncake where it cannot be imported, and behaves like a Mooncake engine without peers. Nobody
    writes with it: ``TransferEngine.fault`` is set.

    It holds a port of loopback, so that no other process has the same session.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))

    def close(self) -> None:
        self._socket.close()

    def initialize(self, *arguments: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    def register_memory(self, addr: int, num_bytes: int) -> int:
        return 0

    def unregister_memory(self, addr: int) -> int:
        return 0

    def send_probe(self, session: str) -> int:
        return 0


def new_mooncake_engine() -> Any:
    """Returns a Mooncake engine that is not initialized yet, or raises ``TransferSetupError``."""
    # Imported here because the extension starts to log and reads its environment at its import.
    try:
        from mooncake.engine import TransferEngine as MooncakeEngine
    except ImportError as error:
        raise TransferSetupError(
            f"Mooncake cannot be imported ({error}); install one of the packages mooncake-transfer-engine* "
            "and the system libraries libibverbs1 and libnuma1"
        ) from error
    return MooncakeEngine()
