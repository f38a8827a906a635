"""A collector of traces for tests: an HTTP server that decodes OTLP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from hisparse_pd.base import tracing
from tests.waiting import WAIT_SECS

_ERROR = 2


@dataclass(frozen=True)
class Span:
    """One received span. Times are Unix time, in nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[str]
    error: str | None
    """Message of the span's error, or None."""


class Receiver:
    """The collector, with all that it has received so far."""

    def __init__(self) -> None:
        self.resources: dict[str, dict[str, Any]] = {}
        """Attributes of each resource, by service."""
        self.paths: set[str] = set()
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.is_asked = threading.Event()
        self._spans: list[Span] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> list[Span]:
        return list(self._spans)

    def of_trace(self, trace_id: str) -> list[Span]:
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start)

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.01)

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["content-type"] == "application/x-protobuf"
                receiver.is_asked.set()
                receiver.may_answer.wait()
                if receiver.status == 200:
                    receiver.paths.add(self.path)
                    receiver.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(receiver.status)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                pass

        return Handler

    def take(self, request: ExportTraceServiceRequest) -> None:
        for of_service in request.resource_spans:
            resource = _values(of_service.resource.attributes)
            service = resource["service.name"]
            self.resources[service] = resource
            for scope in of_service.scope_spans:
                self._spans += [
                    Span(
                        service,
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        _values(span.attributes),
                        [event.name for event in span.events],
                        span.status.message if span.status.code == _ERROR else None,
                    )
                    for span in scope.spans
                ]


def _values(attributes: Any) -> dict[str, Any]:
    found = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = (
            [each.string_value for each in value.values] if kind == "array_value" else value
        )
    return found


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver. Spans of this process, and of those that it starts, may take long to get there: what is
    late would be lost."""
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve, daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", f"{WAIT_SECS:g}")
            patch.setattr(tracing, "FLUSH_SECS", WAIT_SECS)
            yield receiver
    finally:
        receiver.close()
        thread.join()
