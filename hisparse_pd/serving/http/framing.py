"""HTTP/1.1 as a server reads and writes it: h11, with bounds that it lacks and a short cut for streams.

Each ``HttpConnection`` (``http_connection.py``) has a ``Framing`` in place of h11's connection.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import h11

MAX_HEAD_BYTES = 1 << 16

MAX_SMALL_CHUNKS = 1024
SMALL_CHUNK_BYTES = 256
"""A request's body may come in MAX_SMALL_CHUNKS chunks, and in one more for every SMALL_CHUNK_BYTES."""

_CHUNKED = b"\r\nTransfer-Encoding: chunked\r\n"
"""The header that h11 adds to a response whose length is not known, if its client knows chunks."""


class Framing(h11.Connection):
    """h11's connection of a server.

    The chunks of an answer are written without h11's checks, which take too long for a stream: it has a chunk
    for each token. The chunks of a request are limited in number, since h11 takes as long for a byte as for a
    kilobyte.
    """

    _writes_chunks = False
    """Whether the present answer is sent in chunks."""
    _num_chunks = 0
    """Chunks of the present request's body that have begun."""
    _num_chunk_bytes = 0

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)

    def next_event(self) -> Any:
        event = super().next_event()
        if type(event) is h11.Request:
            self._num_chunks = self._num_chunk_bytes = 0
            self._check_head(event)
        elif type(event) is h11.Data:
            self._check_chunk(event)
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if self._writes_chunks and type(event) is h11.Data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        output = super().send(event)
        self._writes_chunks = type(event) is h11.Response and _CHUNKED in (output or b"")
        return output

    def _check_head(self, request: h11.Request) -> None:
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
            raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding: send one of them")
        # h11 bounds a head that is not complete; one that came in a single read may be longer.
        num_bytes = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        if num_bytes > MAX_HEAD_BYTES:
            # ``HttpConnection.send_400_response`` has the text for this status.
            raise h11.RemoteProtocolError("", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _check_chunk(self, data: h11.Data) -> None:
        self._num_chunks += data.chunk_start
        self._num_chunk_bytes += len(data.data)
        if self._num_chunks > MAX_SMALL_CHUNKS + self._num_chunk_bytes // SMALL_CHUNK_BYTES:
            raise h11.RemoteProtocolError(
                f"{self._num_chunks} chunks for {self._num_chunk_bytes} bytes of the body: after "
                f"{MAX_SMALL_CHUNKS} chunks, {SMALL_CHUNK_BYTES} bytes each are the least, on average"
            )
