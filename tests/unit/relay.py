"""A network between two sockets of one machine, which counts what passes and can be cut."""

from __future__ import annotations

import select
import socket
import threading

from tests.waiting import wait_until


class Relay:
    """A network between a client and a server. Once it ``is_cut`` nothing passes, and no connection ends."""

    def __init__(self, port: int) -> None:
        self.is_cut, self._is_over = threading.Event(), threading.Event()
        self._num_pieces = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = socket.create_connection(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def wait_for_pieces(self, num: int) -> None:
        """Wait until so many more pieces have passed. An idle connection passes up to four for each interval
        of its heartbeats: a question and an answer in each direction."""
        last = self._num_pieces + num
        wait_until(lambda: self._num_pieces >= last, f"{num} pieces")

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client:
            others = {client: self._server, self._server: client}
            while not self.is_cut.is_set():
                for end in select.select(list(others), [], [], 0.05)[0]:
                    others[end].sendall(end.recv(1 << 16))
                    self._num_pieces += 1
            self._is_over.wait()

    def close(self) -> None:
        self.is_cut.set()
        self._is_over.set()
        self._thread.join()
        self._server.close()
        self._listener.close()
