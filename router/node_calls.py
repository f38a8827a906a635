"""Requests of the router to one node, and their answers.

``NodeCalls`` has the timeouts, TLS settings and key with which the router calls its nodes. Health checks and
information endpoints get documents with it, and the relay posts requests. It turns errors of the network into
the router's own (``errors.py``).
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec

from hisparse_pd.base.router_settings import RouterSettings
from hisparse_pd.protocol.decoding import TypedDecoder
from hisparse_pd.router.connect import NO_TLS, Call, RawHeaders, tls_context
from hisparse_pd.router.errors import LocalFault, NodeFailed, NodeRefused, NodeUnreachable, RouterError
from hisparse_pd.router.local_faults import local_fault
from hisparse_pd.router.nodes import Node
from hisparse_pd.serving.api.keys import ApiKeys, load_api_keys
from hisparse_pd.serving.http.http_connection import INTERIM_HEADER
from hisparse_pd.serving.http.journal_lines import JOURNAL_HEADER
from hisparse_pd.serving.http.page_names import PAGES_HEADER, PageNames, decode_names

CONNECT_TIMEOUT_SECS = 5.0
T = TypeVar("T")

MAX_ERROR_BODY_BYTES = 1 << 20

MAX_DOCUMENT_BYTES = 4 << 20
"""Limit for a document in which a node describes itself."""

_HEADERS_TO_NODE = (
    (b"content-type", b"application/json"),
    (b"accept", b"*/*"),
    (b"accept-encoding", b"identity"),
    # This header asks the node for interim responses until its answer begins. They show that it is alive, and
    # ``Call.ask`` skips them.
    (INTERIM_HEADER, b"1"),
)
_HOP_BY_HOP_HEADERS = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
    *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
}
_OWN_HEADERS = {b"date", b"server"}  # uvicorn writes the router's


class NodeDocumentError(Exception):
    """A node did not give the document it was asked for; the message says why, without the node's name."""


@dataclass(frozen=True)
class NodeAnswer:
    """A decode node's answer: its status and headers, and a function that reads its body later."""

    status: int
    headers: RawHeaders
    read: Callable[[], Awaitable[bytes]]
    """Returns what comes next of the body, nothing at its end. When the body breaks off, it raises
    NodeFailed, or LocalFault if this machine is the cause."""

    @property
    def num_bytes(self) -> float:
        """Length of the body according to its headers; infinite if they do not say it."""
        lengths = [value for name, value in self.headers if name == b"content-length"]
        return int(lengths[0]) if lengths and lengths[0].isdigit() else math.inf

    @property
    def is_journaled(self) -> bool:
        """Whether the node writes journal lines into the stream."""
        return (JOURNAL_HEADER, b"1") in self.headers

    def without_journal(self, read: Callable[[], Awaitable[bytes]]) -> NodeAnswer:
        """Return the answer for the client. Its ``read`` must leave out the journal's lines."""
        headers = [header for header in self.headers if header[0] != JOURNAL_HEADER]
        return replace(self, headers=headers, read=read)

    @property
    def page_names(self) -> PageNames | None:
        """The node's names of the prompt's pages, if it gives any."""
        values = [value for name, value in self.headers if name == PAGES_HEADER]
        return decode_names(values[0]) if values else None

    def without_page_names(self) -> NodeAnswer:
        return replace(self, headers=[header for header in self.headers if header[0] != PAGES_HEADER])

    @property
    def is_event_stream(self) -> bool:
        return any(
            name == b"content-type" and value.lower().startswith(b"text/event-stream")
            for name, value in self.headers
        )


class NodeCalls:
    """Makes calls to nodes, with the router's TLS settings and its key for them."""

    def __init__(
        self,
        timeout_secs: float,
        tls: ssl.SSLContext = NO_TLS,
        keys: ApiKeys | None = None,
    ) -> None:
        """``timeout_secs``: how long a node may be silent. ``keys``: the router shows the first one to
        nodes."""
        self._timeout_secs = timeout_secs
        self._tls = tls
        self._keys = keys

    @classmethod
    def of(cls, settings: RouterSettings) -> NodeCalls:
        """Make calls as the settings say. Raises StartError."""
        return cls(
            settings.request_timeout_secs,
            tls_context(settings),
            load_api_keys(settings.node_api_key_file),
        )

    async def get(self, node: Node, path: str, timeout_secs: float) -> tuple[int, bytes]:
        """Return status and body of a node's document. Raises OSError, of which TimeoutError is one."""
        async with asyncio.timeout(timeout_secs):
            with closing(Call(node.url, timeout_secs)) as call:
                await call.connect(self._tls, timeout_secs)
                await call.ask("GET", path, self._with_key(_HEADERS_TO_NODE))
                body = bytearray()
                while chunk := await call.read():
                    body += chunk
                    if len(body) > MAX_DOCUMENT_BYTES:
                        raise ConnectionError(f"more than {MAX_DOCUMENT_BYTES} bytes")
                return call.status, bytes(body)

    async def get_document(self, node: Node, path: str, timeout_secs: float, decoder: TypedDecoder[T]) -> T:
        """Return a document in which a node describes itself. Raises NodeDocumentError."""
        try:
            status, body = await self.get(node, path, timeout_secs)
            if not 200 <= status < 300:
                raise NodeDocumentError(f"{path} answered {status}")
            return decoder.decode(body)
        except TimeoutError as error:
            raise NodeDocumentError(f"no answer to {path} in {timeout_secs:g} s") from error
        except (OSError, msgspec.MsgspecError) as error:
            raise NodeDocumentError(f"{path}: {error or type(error).__name__}") from error

    def call(self, node: Node, silence_secs: float = math.inf) -> Call:
        """Make a call for ``post``, not connected yet. The caller closes it, which ends the node's request.

        ``silence_secs``: how long the node may be silent, if that is less than for other calls.
        """
        return Call(node.url, min(silence_secs, self._timeout_secs))

    async def post(
        self,
        node: Node,
        call: Call,
        path: str,
        content: bytes,
        headers: RawHeaders,
        added: Mapping[str, str],
    ) -> NodeAnswer:
        """Send a request. Returns the answer, with ``added`` headers, once the first bytes of its body are
        here.

        Raises RouterError, which for an error status has the node's own error.
        """
        try:
            await call.connect(self._tls, CONNECT_TIMEOUT_SECS)
            await call.ask("POST", path, self._with_key(headers), content)
            if not call.is_success:
                raise await _refusal(node, call)
            await call.begin()
        except OSError as error:
            raise _error_of(node, error, call) from error
        given = _headers_to_client(call)
        given += [(name.encode(), value.encode()) for name, value in added.items()]
        return NodeAnswer(call.status, given, partial(_read, node, call))

    def _with_key(self, headers: Iterable[tuple[bytes, bytes]]) -> RawHeaders:
        """Return the headers with the router's own key in ``authorization``, if it has one. A node looks at
        no other key header then."""
        if self._keys is None:
            return list(headers)
        others = [header for header in headers if header[0] != b"authorization"]
        return [*others, (b"authorization", b"Bearer " + self._keys.first.encode())]


async def _read(node: Node, call: Call) -> bytes:
    """Return what comes next of the body, nothing at its end. Raises RouterError."""
    try:
        return await call.read()
    except OSError as error:
        raise _error_of(node, error, call) from error


async def _refusal(node: Node, call: Call) -> RouterError:
    """Return the error for an answer whose status is not 2xx."""
    if call.status < 400:
        return NodeFailed(502, f"{node.name} answered with status {call.status}, expected 2xx")
    body = b""
    while chunk := await _read(node, call):
        body += chunk
        if len(body) > MAX_ERROR_BODY_BYTES:
            return NodeFailed(
                502,
                f"{node.name} answered {call.status} with an error text "
                f"longer than {MAX_ERROR_BODY_BYTES} bytes",
            )
    text = body[:500].decode(errors="replace").strip()
    return NodeRefused(call.status, f"{node.name} answered {call.status}: {text}", body)


def _error_of(node: Node, error: OSError, call: Call) -> RouterError:
    """Return the router's error for one of the network, with the node's name."""
    if (fault := local_fault(error)) is not None:  # this machine lacks something: no fault of the node's
        return LocalFault(fault)
    if not call.is_connected:
        what = "timed out" if isinstance(error, TimeoutError) else str(error)
        return NodeUnreachable(502, f"{node.name} cannot be reached: {what}")
    if isinstance(error, TimeoutError):
        return NodeFailed(504, f"{node.name} did not answer within {call.silence_secs:g} s")
    return NodeFailed(502, f"{node.name} broke off its answer: {str(error) or type(error).__name__}")


def headers_to_node(client_headers: RawHeaders, names: Collection[bytes]) -> RawHeaders:
    """Return the headers for a node: the router's, and the client's with these ``names``.

    They are bytes, since what clients send need not be text in any encoding.
    """
    passed = [(name.lower(), value) for name, value in client_headers if name.lower() in names]
    return [*_HEADERS_TO_NODE, *passed]


def _headers_to_client(call: Call) -> RawHeaders:
    """Return the node's headers without those about its connection or its server."""
    named = b",".join(value for name, value in call.headers if name == b"connection").split(b",")
    dropped = _HOP_BY_HOP_HEADERS | _OWN_HEADERS | {name.strip().lower() for name in named}
    return [header for header in call.headers if header[0] not in dropped]
