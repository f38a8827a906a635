"""A TCP proxy before a decode node that cuts a stream after so many lines of its journal."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from hisparse_pd.serving.http.journal_lines import MARK

_CHUNK_BYTES = 1 << 16
_REQUEST_ID = re.compile(rb"^x-request-id: *(\S+)", re.IGNORECASE | re.MULTILINE)


@dataclass
class CuttingProxy:
    """A proxy whose ``url`` stands for the node's. ``cut_after``: lines that an answer may bring; None: any.

    The cut comes in the middle of what follows the last line, so that the router gets a piece of it.
    """

    node_url: str
    cut_after: int | None = None
    cut_ids: set[str] = field(default_factory=set)
    """``x-request-id`` of the requests that were cut."""
    _sockets: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[CuttingProxy]:
        with socket.create_server(("127.0.0.1", 0)) as self._listener:
            threading.Thread(target=self._accept, daemon=True).start()
            try:
                yield self
            finally:
                self._listener.shutdown(socket.SHUT_RDWR)
                for each in self._sockets:
                    each.close()

    def _accept(self) -> None:
        parts = urlsplit(self.node_url)
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    node = socket.create_connection((parts.hostname or "", parts.port or 0))
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, node]
                ids: list[str] = []
                threading.Thread(target=_pass_on, args=(client, node, ids), daemon=True).start()
                threading.Thread(target=self._answer, args=(node, client, ids), daemon=True).start()

    def _answer(self, node: socket.socket, client: socket.socket, ids: list[str]) -> None:
        num_lines = num_requests = 0
        seen = b""
        with contextlib.suppress(OSError):
            while data := node.recv(_CHUNK_BYTES):
                if num_requests != len(ids):  # the router uses a connection again
                    num_requests, num_lines = len(ids), 0
                seen += data
                num_lines += seen.count(MARK)
                seen = seen[-len(MARK) + 1 :]
                if self.cut_after is not None and num_lines > self.cut_after:
                    client.sendall(data[: len(data) // 2])
                    self.cut_ids.update(ids[-1:])
                    break
                client.sendall(data)
        _close(node, client)


def _pass_on(client: socket.socket, node: socket.socket, ids: list[str]) -> None:
    with contextlib.suppress(OSError):
        while data := client.recv(_CHUNK_BYTES):
            ids += [found.decode() for found in _REQUEST_ID.findall(data)]
            node.sendall(data)
    _close(client, node)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
