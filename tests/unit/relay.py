"""A network between a ZMQ client and a ZMQ server of one machine, which counts what passes and can be cut."""

from __future__ import annotations

import select
import socket
import threading

from tests.waiting import wait_until


class Relay:
    """A network between a client and a server. Once it ``is_cut`` nothing passes, and no connection ends.

    Until then a connection that one end closes ends at the other, too, and a client may connect again.
    """

    def __init__(self, port: int) -> None:
        """``port``: the server's, which listens."""
        self.is_cut, self._is_over = threading.Event(), threading.Event()
        self._port = port
        self._num_from_client = self._num_from_server = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._others: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for_pieces(self, num: int, *, from_client: bool) -> None:
        """Wait until so many more pieces have passed in one direction. If only one end sends heartbeats, an
        idle connection has nothing from the other end but its answers."""

        def count() -> int:
            return self._num_from_client if from_client else self._num_from_server

        last = count() + num
        wait_until(lambda: count() >= last, f"{num} pieces from the {'client' if from_client else 'server'}")

    def _run(self) -> None:
        while not self.is_cut.is_set():
            for end in select.select([self._listener, *self._others], [], [], 0.05)[0]:
                if end is self._listener:
                    self._connect()
                elif end in self._others:  # its other end may have closed just now
                    self._pass_on(end)
        self._is_over.wait()

    def _connect(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._port))
        self._others |= {client: server, server: client}
        self._clients.add(client)

    def _pass_on(self, end: socket.socket) -> None:
        other = self._others[end]
        try:
            piece = end.recv(1 << 16)
            other.sendall(piece)
        except OSError:
            piece = b""
        if not piece:
            for each in (end, other):
                del self._others[each]
                self._clients.discard(each)
                each.close()
        elif end in self._clients:
            self._num_from_client += 1
        else:
            self._num_from_server += 1

    def close(self) -> None:
        self.is_cut.set()
        self._is_over.set()
        self._thread.join()
        for each in (*self._others, self._listener):
            each.close()
