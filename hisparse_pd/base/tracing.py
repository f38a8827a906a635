"""Traces: the spans of this process and their way to a collector, over OTLP (HTTP, protobuf).

``open_tracer`` (``traces.py``) makes the one ``Tracer`` of a process; a ``RequestSpan`` is one request's span
with its parts. This module is imported only if traces are on, since it alone imports opentelemetry. One
thread, the SDK's, sends spans. The number of spans that wait for it is limited, and further ones are dropped
and counted, so that no request waits for a collector. The SDK's variables apply: OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_EXPORTER_OTLP_HEADERS and so on.
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
"""Time for waiting spans to be sent when the process ends."""

MAX_WAITING_SPANS = 2048
"""Limit of waiting spans, unless OTEL_BSP_MAX_QUEUE_SIZE sets another; each takes some kilobytes."""

_MAX_TEXT_CHARS = 1024
_CONTEXT_HEADERS = (b"traceparent", b"tracestate")

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
Count = Callable[[str, int], None]
"""Called with an outcome and a number of spans: exported, failed (refused by the collector), or dropped (too
many waited)."""

_propagator = TraceContextTextMapPropagator()


class Tracer:
    """Makes the spans of one process."""

    def __init__(
        self, endpoint: str, service_name: str, instance: str, count: Count, *, follows: bool = True
    ) -> None:
        """``endpoint``: a collector's URL; without a path, ``/v1/traces`` is added.

        ``instance``: names this process among services of the same name. ``follows``: whether the sampler
        sees the caller's decision to record a trace; false where callers are clients, who must not have
        traces recorded at will. Raises StartError for invalid OTEL_ variables.
        """
        # Warnings are silenced: opentelemetry has them for clients' headers, urllib3 for each failed attempt.
        for name in ("opentelemetry", "urllib3"):
            logging.getLogger(name).setLevel(logging.ERROR)
        complaints = LogLimiter()  # a collector that is away fails every batch
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(lambda record: complaints.permits())
        url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        given = Resource.create(
            {"service.name": service_name, "service.version": VERSION, "service.instance.id": instance}
        )
        try:
            self._exporter = _CountingExporter(OTLPSpanExporter(endpoint=url), count)
            self._processor = _BoundedProcessor(self._exporter, count)
        except ValueError as error:
            raise StartError(f"traces: {error}; look at the OTEL_ variables") from error
        resource = given.merge(OTELResourceDetector().detect())  # attributes of the environment win
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        if not follows:
            self._provider.sampler = _OwnSampler(self._provider.sampler)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("hisparse_pd", VERSION)

    def request(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpan:
        """Begin the span of a POST to ``path``. It joins the trace that ``headers`` name, if any."""
        return RequestSpan(self._tracer, path, headers)

    def close(self) -> None:
        """Send waiting spans for ``FLUSH_SECS`` at most. The rest is lost."""
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECS)
        if flushing.is_alive():
            log.warning("the collector of traces is slow or away: %d spans are lost", self._exporter.num_held)
            self._exporter.shutdown()


class RequestSpan:
    """The span of one HTTP request, and those of its parts, which are reported when they are over."""

    def __init__(self, tracer: trace.Tracer, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._tracer = tracer
        self._span = tracer.start_span(
            f"POST {path}",
            context=_propagator.extract(_trace_context_headers(headers)),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": "POST", "http.route": path, "url.path": path},
        )
        self._context = trace.set_span_in_context(self._span)
        self.error = ""
        """Why there is no answer, or why it broke off; empty if nothing was reported."""
        self.is_recording = self._span.is_recording()
        """False for a request that was not sampled; what is reported of it goes nowhere."""

    def passed_on(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return a request's headers for another service, with this span as the parent."""
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
        """Report a part of the request as a span below this one. Times are Unix times in seconds."""
        span = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=int(started_at * 1e9)
        )
        if error:
            span.set_status(trace.StatusCode.ERROR, error[:_MAX_TEXT_CHARS])
        span.end(int(ended_at * 1e9))

    def end(self, status: int) -> None:
        """End the span with the answer's ``status``.

        The span is an error if the service failed (5xx), if the client left (499), since its work is lost,
        or if an answer with a good status broke off. A refused request (other 4xx) is none of these.
        The attribute error.type is the status, also of a refused request and of an answer that broke off.
        """
        self._span.set_attribute("http.response.status_code", status)
        if status >= 400 or self.error:
            self._span.set_attribute("error.type", str(status))
        if status >= 499 or (self.error and status < 400):
            error = self.error or ("the client is gone" if status == 499 else "")
            self._span.set_status(trace.StatusCode.ERROR, error[:_MAX_TEXT_CHARS])
        self._span.end()


def _trace_context_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, list[str]]:
    """Return the headers of the trace context; with two traceparents none, as W3C has it."""
    carrier: dict[str, list[str]] = {}
    for name, value in headers:
        if name.lower() in _CONTEXT_HEADERS:
            carrier.setdefault(name.lower().decode(), []).append(value.decode("latin-1"))
    return carrier if len(carrier.get("traceparent", ())) == 1 else {}


class _OwnSampler(Sampler):
    """Samples a request as if it had no caller: by another sampler, with a trace id drawn here.

    Otherwise clients could have all their requests recorded, by a flag or by their choice of the trace id.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._ids = RandomIdGenerator()

    def should_sample(
        self, parent_context: Context | None, trace_id: int, name: str, *given: Any, **more: Any
    ) -> SamplingResult:
        caller = trace.get_current_span(parent_context).get_span_context()
        # A caller of this process is a span whose decision the usual samplers (parentbased_*) repeat.
        if not caller.is_remote:
            return self._sampler.should_sample(parent_context, trace_id, name, *given, **more)
        drawn = self._sampler.should_sample(None, self._ids.generate_trace_id(), name, *given, **more)
        return SamplingResult(drawn.decision, drawn.attributes, caller.trace_state)

    def get_description(self) -> str:
        return self._sampler.get_description()


class _CountingExporter(SpanExporter):
    """Sends spans, in the SDK's thread, and counts those that wait."""

    def __init__(self, exporter: SpanExporter, count: Count) -> None:
        self._exporter = exporter
        self._count = count
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._num_sending = 0

    @property
    def num_held(self) -> int:
        """Spans that wait or are being sent."""
        return self._num_waiting + self._num_sending

    def add(self, max_waiting: int) -> bool:
        """Count one more waiting span. Returns False if there are ``max_waiting`` already."""
        with self._lock:
            if self._num_waiting >= max_waiting:
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
    """Bounds the SDK's queue. The queue itself would drop its oldest spans, and count nothing."""

    def __init__(self, exporter: _CountingExporter, count: Count) -> None:
        max_waiting = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) or MAX_WAITING_SPANS)
        super().__init__(exporter, max_queue_size=max_waiting)
        self._exporter = exporter
        self._count = count
        self._max_waiting = max_waiting

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a sampled span unless too many wait."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._exporter.add(self._max_waiting):
            super().on_end(span)
        else:
            self._count("dropped", 1)
