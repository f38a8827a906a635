"""What the router says to one node over HTTP, and what comes back; all errors of it are translated here."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

import httpx

from hisparse_pd.http.connections import TAKES_INTERIM
from router.errors import LocalFault, NodeFailed, NodeRefused, NodeUnreachable, RouterError
from router.local_faults import local_fault
from router.nodes import Node

T = TypeVar("T")

MAX_ERROR_BODY_BYTES = 1 << 20

RawHeaders = list[tuple[bytes, bytes]]

_HEADERS_TO_NODE = (
    (b"content-type", b"application/json"),
    (b"accept", b"*/*"),
    (b"accept-encoding", b"identity"),
    (TAKES_INTERIM, b"1"),  # httpcore reads over them; they end a wait for the node, as any byte does
)
_HOP_BY_HOP_HEADERS = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_OWN_HEADERS = frozenset(("date", "server"))  # uvicorn writes ours


@dataclass(frozen=True)
class Answer:
    """The decode node's answer from its first byte on. ``chunks`` raises NodeFailed when it breaks off."""

    status: int
    headers: RawHeaders
    chunks: AsyncIterator[bytes]

    @property
    def num_bytes(self) -> float:
        """Of the body, as its headers have it; infinite when they do not say."""
        lengths = [value for name, value in self.headers if name == b"content-length"]
        return int(lengths[0]) if lengths and lengths[0].isdigit() else math.inf

    @property
    def is_event_stream(self) -> bool:
        return any(
            name == b"content-type" and value.lower().startswith(b"text/event-stream")
            for name, value in self.headers
        )


class NodeCalls:
    """Requests to nodes, by one client."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def send(
        self, node: Node, path: str, content: bytes, headers: RawHeaders, stack: AsyncExitStack
    ) -> httpx.Response:
        """The answer's head; ``stack`` closes its connection. Raises RouterError."""
        request = self._client.build_request("POST", node.url + path, content=content, headers=headers)
        response = await self._translated(node, lambda: self._client.send(request, stream=True))
        stack.push_async_callback(response.aclose)
        return response

    async def answer(self, node: Node, response: httpx.Response, added: Mapping[str, str]) -> Answer:
        """The answer once its first bytes are here, with the headers that are ``added``.

        Raises RouterError: for an error status, what the node says.
        """
        if not response.is_success:
            raise await self.refusal(node, response)
        chunks = self.raw_chunks(node, response)
        first_chunk = await anext(chunks, b"")
        headers = _headers_to_client(response)
        headers += [(name.encode(), value.encode()) for name, value in added.items()]
        return Answer(response.status_code, headers, _prepend(first_chunk, chunks))

    async def raw_chunks(self, node: Node, response: httpx.Response) -> AsyncIterator[bytes]:
        chunks = response.aiter_raw()
        while chunk := await self._translated(node, lambda: anext(chunks, b"")):
            yield chunk

    async def refusal(self, node: Node, response: httpx.Response) -> RouterError:
        """The error that a node's answer with an error status amounts to."""
        if response.status_code < 400:
            return NodeFailed(502, f"{node.name} answered with status {response.status_code}, expected 2xx")
        body = b""
        async for chunk in self.raw_chunks(node, response):
            body += chunk
            if len(body) > MAX_ERROR_BODY_BYTES:
                return NodeFailed(
                    502,
                    f"{node.name} answered {response.status_code} with an error text "
                    f"longer than {MAX_ERROR_BODY_BYTES} bytes",
                )
        text = body[:500].decode(errors="replace").strip()
        return NodeRefused(response.status_code, f"{node.name} answered {response.status_code}: {text}", body)

    async def _translated(self, node: Node, call: Callable[[], Awaitable[T]]) -> T:
        """The boundary where httpx's errors become ours, with the node's name."""
        try:
            return await call()
        except (httpx.HTTPError, OSError) as error:
            raise self._error_of(node, error) from error

    def _error_of(self, node: Node, error: httpx.HTTPError | OSError) -> RouterError:
        if (fault := local_fault(error)) is not None:
            return LocalFault(fault)
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            what = "timed out" if isinstance(error, httpx.ConnectTimeout) else str(error)
            return NodeUnreachable(502, f"{node.name} cannot be reached: {what}")
        if isinstance(error, httpx.TimeoutException):
            return NodeFailed(504, f"{node.name} did not answer within {self._client.timeout.read:g} s")
        return NodeFailed(502, f"{node.name} broke off its answer: {str(error) or type(error).__name__}")


async def _prepend(first_chunk: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first_chunk:
        yield first_chunk
    async for chunk in chunks:
        yield chunk


def headers_to_node(client_headers: httpx.Headers, names: Collection[bytes]) -> RawHeaders:
    """As bytes: what clients send need not be text in any encoding."""
    passed = [(name.lower(), value) for name, value in client_headers.raw if name.lower() in names]
    return [*_HEADERS_TO_NODE, *passed]


def _headers_to_client(response: httpx.Response) -> RawHeaders:
    named_in_connection = {name.strip().lower() for name in response.headers.get("connection", "").split(",")}
    dropped = _HOP_BY_HOP_HEADERS | _OWN_HEADERS | named_in_connection
    raw_headers = ((name.lower(), value) for name, value in response.headers.raw)
    return [(name, value) for name, value in raw_headers if name.decode("latin-1") not in dropped]
