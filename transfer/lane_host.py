"""Offers a decode node's memory to prefill nodes on the same machine: owns the socket and its connections.

The decode engine makes one ``LaneHost``. Its ``offer`` goes into each Register, its thread hands descriptors
of the memory to callers that show the offer's token, and ``take_ended`` tells ``PrefillPeers`` which writers
have left. The other end is ``lane_memory.py``; the messages are in ``protocol/lane.py``.

A Unix socket reaches processes of this machine only, and carries descriptors of memory across containers. By
default it has an abstract name, which is visible within one network namespace and vanishes with its process.
With a directory, such as a volume that two containers share, the socket is a file in that directory.

A caller must show the token of this node's registrations and run as this node's user. A connection stands for
as long as its writer may write. The kernel closes the connection when the writer's process has ended and none
of its threads can run any more; a process that is only stopped (SIGSTOP) keeps it open. A CPU's writes are
over by then. A GPU's writes may not be: what it had begun may go on until the driver has torn the process
down. Only a run that writes with a CPU alone therefore sends LaneSole, and ``take_ended`` names no others.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.protocol.lane import (
    MAX_LANE_MESSAGE_BYTES,
    SOCKET_PREFIX,
    TOKEN_BYTES,
    LaneDenied,
    LaneHello,
    LaneOffer,
    LaneSole,
    LaneWelcome,
    Window,
    encoder,
    from_writer_decoder,
)
from hisparse_pd.transfer.errors import TransferSetupError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
"""Most open connections, and most that wait to be accepted."""
HELLO_SECS = 5.0
"""Limit from a connection to its first packet."""
DENIED_PAUSE_SECS = 0.002
"""Pause after a denied caller, because any user of this machine may connect without end."""
_CREDENTIALS = struct.Struct("iII")
"""struct ucred: pid, uid, gid."""


@dataclass(frozen=True)
class SharedMemory:
    """Memory of ``num_bytes`` at ``addr``: the file ``fd`` from its byte 0, or memory of a GPU.

    ``cuda_handle`` and ``cuda_offset``: the handle that opens memory of a GPU, and where this memory begins
    in it; see ``protocol.lane``.
    """

    addr: int
    num_bytes: int
    fd: int | None
    cuda_handle: bytes = b""
    cuda_offset: int = 0


@dataclass(eq=False)
class _Connection:
    """A caller of this node's user: first one that has yet to say hello, then one run of a prefill node."""

    sock: socket.socket
    user: int
    deadline: float
    """When it must have said hello, a time of ``time.monotonic``."""
    instance_id: str = ""
    """Names one run, from start to end, of the prefill node that has the memory open; empty before its
    hello."""
    is_sole: bool = False
    """Whether the prefill node promised (LaneSole) to write to this node through this memory alone, with a
    CPU."""


class LaneHost:
    """Offers ``memory``. ``directory``: where the socket is; empty for an abstract name. ``wakeup``: called
    from the host's thread when ``take_ended`` has something. Raises TransferSetupError."""

    def __init__(
        self,
        memory: Sequence[SharedMemory],
        *,
        directory: str = "",
        wakeup: Callable[[], None] = lambda: None,
    ) -> None:
        self.memory = tuple(memory)
        self._wakeup = wakeup
        self.offer = LaneOffer(SOCKET_PREFIX + secrets.token_hex(8), secrets.token_bytes(TOKEN_BYTES))
        self._lock = threading.Lock()
        self._ended: list[str] = []
        self.connections: set[_Connection] = set()
        self._logged = LogLimiter()  # denied callers, by user
        self._listener, self._path = _listen(self.offer.socket, directory)
        self._stop_heard, self._stop_sent = socket.socketpair()  # a byte, by ``close``, ends the thread
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stop_heard, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="lane host", daemon=True)
        self._thread.start()

    def take_ended(self) -> list[str]:
        """Return the instance ids of runs that closed the memory since the last call and had promised
        (LaneSole) to write through it alone, with a CPU: none of their writes can land any more."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def close(self) -> None:
        """Accept no further connections, and close the open ones."""
        with contextlib.suppress(OSError):
            self._stop_sent.send(b"\0")
        self._thread.join()
        self._stop_sent.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    # --- in the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            waiting = [connection.deadline for connection in self.connections if not connection.instance_id]
            timeout_secs = max(0.0, min(waiting) - time.monotonic()) if waiting else None
            for key, _ in self._selector.select(timeout_secs):
                if key.fileobj is self._stop_heard:
                    self._close_all()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.data)
            now = time.monotonic()
            for connection in tuple(self.connections):
                if not connection.instance_id and connection.deadline <= now:
                    self._drop(connection)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # it has left, or this process is out of descriptors
            log.warning("a connection of a prefill node on this machine could not be accepted: %s", error)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.1)
            return
        sock.setblocking(False)
        user = _user_of(sock)
        reason = _why_foreign(user)
        if not reason and len(self.connections) >= MAX_CONNECTIONS:
            reason = f"{MAX_CONNECTIONS} connections are open, the most allowed"
        if reason:
            self._deny(sock, user, reason)
            return
        connection = _Connection(sock, user, time.monotonic() + HELLO_SECS)
        self.connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            packet = connection.sock.recv(MAX_LANE_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        try:
            message = from_writer_decoder.decode(packet) if packet else None
        except msgspec.MsgspecError as error:
            self._remove(connection)
            self._deny(connection.sock, connection.user, f"malformed: {error}")
            return
        match message:
            case LaneHello() if not connection.instance_id:
                self.welcome(connection, message)
            case LaneSole() if connection.instance_id:
                connection.is_sole = True
            case _:  # the connection has ended, or the message comes out of order
                self._drop(connection)

    def welcome(self, connection: _Connection, hello: LaneHello) -> None:
        """Send windows, which say where the memory lies, and descriptors of its files to a caller that has
        the token; deny any other."""
        if not secrets.compare_digest(hello.token, self.offer.token):
            self._remove(connection)
            reason = "the token is not that of this decode node's registrations"
            self._deny(connection.sock, connection.user, reason)
            return
        connection.instance_id = hello.instance_id
        descriptors = [memory.fd for memory in self.memory if memory.fd is not None]
        windows = tuple(
            Window(
                base_addr=memory.addr,
                num_bytes=memory.num_bytes,
                descriptor=0 if memory.fd is None else descriptors.index(memory.fd),
                cuda_handle=memory.cuda_handle,
                cuda_offset=memory.cuda_offset,
            )
            for memory in self.memory
        )
        try:
            socket.send_fds(connection.sock, [encoder.encode(LaneWelcome(windows))], descriptors)
        except OSError:  # it has left meanwhile
            self._drop(connection)
            return
        log.info("run %s of a prefill node writes straight to this node's memory", hello.instance_id)

    def _deny(self, sock: socket.socket, user: int, reason: str) -> None:
        if self._logged.permits(user):
            log.warning("denied processes of user %d the lane: %s", user, reason)
        with contextlib.suppress(OSError):
            sock.send(encoder.encode(LaneDenied(reason[:1024])))
        sock.close()
        time.sleep(DENIED_PAUSE_SECS)

    def _remove(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        self._selector.unregister(connection.sock)

    def _drop(self, connection: _Connection) -> None:
        """Close a connection. If it was its run's last one, and the run has sent LaneSole, ``take_ended``
        will report the run."""
        self._remove(connection)
        connection.sock.close()
        if not connection.instance_id:
            return
        log.info("run %s of a prefill node closed this node's memory", connection.instance_id)
        others = (other.instance_id for other in self.connections)
        if connection.is_sole and connection.instance_id not in others:
            with self._lock:
                self._ended.append(connection.instance_id)
            self._wakeup()

    def _close_all(self) -> None:
        for connection in self.connections:
            connection.sock.close()
        self._listener.close()
        self._stop_heard.close()
        self._selector.close()


def _listen(name: str, directory: str) -> tuple[socket.socket, Path | None]:
    """Return a listening socket, and its file if it has one. Raises TransferSetupError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = Path(directory) / name if directory else None
    try:
        if path is None:
            listener.bind(f"\0{name}")
            listener.listen(MAX_CONNECTIONS)
        else:
            remove_stale(path.parent)
            os.fchmod(listener.fileno(), 0o600)  # bind creates the file with this mode
            hidden = path.with_name(f".{name}")  # remove_stale must not see it before it listens
            listener.bind(str(hidden))
            listener.listen(MAX_CONNECTIONS)
            hidden.rename(path)
    except OSError as error:
        listener.close()
        where = f"in {directory}" if directory else "with an abstract name"
        raise TransferSetupError(
            f"no socket can be made {where} for prefill nodes of this machine: {error}; name a directory "
            "that this process can write to with --same-host-dir, or set --same-host-lane off"
        ) from error
    listener.setblocking(False)
    return listener, path


def _user_of(sock: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return int(user)


def _why_foreign(user: int) -> str:
    if user == os.geteuid():
        return ""
    return f"the prefill node runs as user {user}, the decode node as {os.geteuid()}; run both as one"


def remove_stale(directory: Path) -> None:
    """Remove the sockets of killed nodes, on which nobody listens. Raises OSError."""
    for path in directory.glob(f"{SOCKET_PREFIX}*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                log.info("removed %s, the socket of a killed node", path)
                path.unlink(missing_ok=True)
            except OSError:
                continue
