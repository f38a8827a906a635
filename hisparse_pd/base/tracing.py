"""Traces: the spans of this process and their way to a collector, over OTLP (HTTP, protobuf).

Imported only where traces are on, for it alone imports opentelemetry. One thread, the SDK's, sends. What
waits for it is bounded, and what finds no place is dropped and counted: no request waits for a collector. The
SDK's variables hold: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*,
OTEL_EXPORTER_OTLP_HEADERS and so on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hisparse_pd.base.log_limit import LogLimiter
from hisparse_pd.base.vocabulary import VERSION, StartError

log = logging.getLogger(__name__)

FLUSH_SECS = 2.0
"""What the spans that wait have to leave when the process ends."""

MAX_WAITING_SPANS = 2048
"""Unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise; some kilobytes each."""

_MAX_TEXT_CHARS = 1024
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
Count = Callable[[str, int], None]
"""Told what became of how many spans: exported, failed (not taken by the collector), dropped (no place)."""

_propagator = TraceContextTextMapPropagator()


class Tracer:
    """Makes the spans of one process."""

    def __init__(
        self, endpoint: str, service_name: str, instance: str, count: Count, *, follows: bool = True
    ) -> None:
        """``endpoint``: a collector's URL; without a path it is that of ``/v1/traces``.

        ``instance``: which of the services of that name. ``follows``: the sampler hears whether the caller
        records the request, in which clients have no say. Raises StartError for variables that cannot be.
        """
        for name in ("opentelemetry", "urllib3"):  # of clients' headers, of each attempt
            logging.getLogger(name).setLevel(logging.ERROR)
        complaints = LogLimiter()  # a collector that is away fails every batch
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(lambda record: complaints.permits())
        url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        given = Resource.create(
            {"service.name": service_name, "service.version": VERSION, "service.instance.id": instance}
        )
        try:
            self._exporter = _CountingExporter(OTLPSpanExporter(endpoint=url), count)
            self._waiting = _BoundedProcessor(self._exporter, count)
        except ValueError as error:
            raise StartError(f"traces: {error}; look at the OTEL_ variables") from error
        self._provider = TracerProvider(
            resource=given.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        if not follows:
            self._provider.sampler = _OwnSampler(self._provider.sampler)
        self._provider.add_span_processor(self._waiting)
        self._tracer = self._provider.get_tracer("hisparse_pd", VERSION)

    def request(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpan:
        """A span that begins now, of a POST to ``path``, in the trace that its ``headers`` name, if any."""
        return RequestSpan(self._tracer, path, headers)

    def close(self) -> None:
        """Send what waits, for ``FLUSH_SECS`` at most; the rest is lost."""
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECS)
        if flushing.is_alive():
            log.warning("the collector of traces is slow or away: %d spans are lost", self._exporter.num_held)
            self._exporter.shutdown()


class RequestSpan:
    """The span of one HTTP request, and of its parts, which are told of when they are over."""

    def __init__(self, tracer: trace.Tracer, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._tracer = tracer
        self._span = tracer.start_span(
            f"POST {path}",
            context=_propagator.extract(_carrier(headers)),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": "POST", "http.route": path, "url.path": path},
        )
        self._context = trace.set_span_in_context(self._span)
        self.error = ""
        """Why there is no answer, or why it broke off, as far as anybody said."""
        self.is_recording = self._span.is_recording()
        """False: it was not drawn for the sample; all that is said of it is ignored."""

    def passed_on(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """A request's headers for another service, which is to have this span for its parent."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, self._context)
        kept = [(name, value) for name, value in headers if name.lower() not in _CONTEXT_HEADERS]
        return kept + [(name.encode(), value.encode()) for name, value in carrier.items()]

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, attributes)

    def part(
        self, name: str, started_at: float, ended_at: float, attributes: Attributes, error: str = ""
    ) -> None:
        """A span of its own below this one; times are Unix time, in seconds. ``error``: it ended in that."""
        span = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=int(started_at * 1e9)
        )
        if error:
            span.set_status(trace.StatusCode.ERROR, error[:_MAX_TEXT_CHARS])
        span.end(int(ended_at * 1e9))

    def end(self, status: int) -> None:
        """``status``: of the answer. A refused request (4xx) is no error of the service; that its client left
        (499) is one of the request, for what was done for it is lost.
        """
        self._span.set_attribute("http.response.status_code", status)
        if status >= 400 or self.error:
            self._span.set_attribute("error.type", str(status))
        if status >= 499 or (self.error and status < 400):
            error = self.error or ("the client is gone" if status == 499 else "")
            self._span.set_status(trace.StatusCode.ERROR, error[:_MAX_TEXT_CHARS])
        self._span.end()


def _carrier(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, list[str]]:
    """Of two traceparents neither holds, as W3C has it."""
    carrier: dict[str, list[str]] = {}
    for name, value in headers:
        if name.lower() in _CONTEXT_HEADERS:
            carrier.setdefault(name.lower().decode(), []).append(value.decode("latin-1"))
    return carrier if len(carrier.get("traceparent", ())) == 1 else {}


class _OwnSampler(Sampler):
    """Asks another sampler as if the request had no caller, by a trace id that its client did not choose."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._ids = RandomIdGenerator()

    def should_sample(
        self, parent_context: Context | None, trace_id: int, name: str, *given: Any, **more: Any
    ) -> SamplingResult:
        caller = trace.get_current_span(parent_context).get_span_context()
        if not caller.is_remote:
            return self._sampler.should_sample(parent_context, trace_id, name, *given, **more)
        drawn = self._sampler.should_sample(None, self._ids.generate_trace_id(), name, *given, **more)
        return SamplingResult(drawn.decision, drawn.attributes, caller.trace_state)

    def get_description(self) -> str:
        return self._sampler.get_description()


class _CountingExporter(SpanExporter):
    """Sends, in the SDK's thread, and knows how many spans wait for it."""

    def __init__(self, exporter: SpanExporter, count: Count) -> None:
        self._exporter = exporter
        self._count = count
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._num_sending = 0

    @property
    def num_held(self) -> int:
        """Spans of which nobody knows yet what becomes of them."""
        return self._num_waiting + self._num_sending

    def add(self, most: int) -> bool:
        """One more waits, unless there are as many as may."""
        with self._lock:
            if self._num_waiting >= most:
                return False
            self._num_waiting += 1
            return True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            self._num_waiting -= len(spans)
            self._num_sending = len(spans)
        result = self._exporter.export(spans)
        self._num_sending = 0
        self._count("exported" if result is SpanExportResult.SUCCESS else "failed", len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _BoundedProcessor(BatchSpanProcessor):
    """The SDK's queue drops as well, its oldest, and tells nobody how many."""

    def __init__(self, exporter: _CountingExporter, count: Count) -> None:
        most = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) or MAX_WAITING_SPANS)
        super().__init__(exporter, max_queue_size=most)
        self._exporter = exporter
        self._count = count
        self._most = most

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._exporter.add(self._most):
            super().on_end(span)
        else:
            self._count("dropped", 1)
