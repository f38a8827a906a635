"""The HTTP application of a decode node: endpoints that generate, and endpoints about its tokenizer.

``decode_node/server.py`` makes it with ``create_app``, for each front, from a ``DecodeContext`` and one
handler, which turns a checked request (``Work``) into an ``HttpAnswer``.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.traces import open_tracer
from hisparse_pd.engine.messages import num_packed_tokens
from hisparse_pd.protocol.messages import first_stepped
from hisparse_pd.serving.api.bodies import Endpoint, TokenPath
from hisparse_pd.serving.api.frame import FramedEndpoint, HttpAnswer, Reply, Respond
from hisparse_pd.serving.api.models import json_response
from hisparse_pd.serving.api.node_app import GetHandler, NodeContext, create_node_app, model_info
from hisparse_pd.serving.api.openapi import OPENAPI_PATH, show_openapi
from hisparse_pd.serving.api.request_journal import Identity
from hisparse_pd.serving.api.requests import RequestLimits, SampleRequest, plan_samples
from hisparse_pd.serving.api.sampling_defaults import SamplingDefaults
from hisparse_pd.serving.api.schemas import ApiRequest, parse_request
from hisparse_pd.serving.api.text_codec import TextCodec
from hisparse_pd.serving.api.timing import Timeline
from hisparse_pd.serving.api.tokens import answer_about_tokens
from hisparse_pd.serving.http.journal_lines import JOURNAL_HEADER
from hisparse_pd.serving.http.off_loop import parse_body
from hisparse_pd.serving.http.page_names import PAGES_HEADER, encode_names

if TYPE_CHECKING:
    from hisparse_pd.base.tracing import Tracer

LEFT_OUT_HEADER = b"x-hisparse-pd-left-out"
"""Header of an answer that names the tools which the model was not shown."""
_MAX_LEFT_OUT_SHOWN = 16
"""Tools that LEFT_OUT_HEADER names: clients and proxies bound the size of headers."""

_OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Threshold of the garbage collector's youngest generation. With Python's 700, decoding megabytes of JSON
lists, which holds the interpreter, took four times as long."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DecodeContext(NodeContext):
    """The parts that the handlers of a decode node use: a node's context with tokenizer, defaults and
    tracer."""

    settings: DecodeSettings
    codec: TextCodec
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    tracer: Tracer | None = None
    """None if traces are off."""

    @classmethod
    def of(cls, node: NodeContext) -> DecodeContext:
        """Load the tokenizer and open the tracer for ``node``. Raises StartError."""
        settings = node.settings
        assert isinstance(settings, DecodeSettings)
        codec = TextCodec.load(
            settings.model_path, clients_write_tokens=settings.chat_control_tokens == "anyone"
        )
        tracer = open_tracer(
            settings.otlp_traces_endpoint,
            f"hisparse-pd-{node.role}",
            f"{settings.reachable_host}:{settings.port}",
            node.metrics.count_spans,
        )
        defaults = SamplingDefaults.of(settings)
        if node.link.front_number == 0 and str(defaults):
            log.info("sampling defaults from generation_config.json: %s", defaults)
        gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
        gc.freeze()  # else each full collection scans transformers' objects and holds the loop for 30 ms
        return cls(**vars(node), codec=codec, sampling_defaults=defaults, tracer=tracer)

    def close(self) -> None:
        """Send the waiting spans, within the tracer's time limit."""
        if self.tracer is not None:
            self.tracer.close()


@dataclass(frozen=True)
class Work:
    """One checked request, about to be handed to the engine."""

    request: ApiRequest
    samples: tuple[SampleRequest, ...]
    arrived_at: float
    """Time on the monotonic clock, in seconds."""
    timeline: Timeline

    @cached_property
    def identity(self) -> Identity:
        """Id and time of the answer: those in the journal that a router sends with each stream which it may
        resume, else new ones, drawn once."""
        journal = self.request.journal
        return Identity() if journal is None else journal.identity

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the answer besides those that describe its body."""
        # Whether a router keeps a journal of this stream, be it new or resumed.
        is_journaled = self.request.stream and self.request.journal is not None
        journal = [(JOURNAL_HEADER, b"1")] if is_journaled else []
        return [*self.timeline.headers, *_left_out(self.request), *journal]


Handler = Callable[[Work], Awaitable[HttpAnswer]]
"""Answers a checked request. It raises ApiError for a failure before the answer has begun; the stream of the
answer reports later ones."""


def create_app(context: DecodeContext, handler: Handler) -> Starlette:
    """Return the application with all endpoints of a decode node."""
    post_handlers: dict[str, Respond] = {
        **{endpoint: partial(_generate, context, endpoint, handler) for endpoint in Endpoint},
        **{path: partial(_answer_about_tokens, context, path) for path in TokenPath},
    }
    count = context.metrics.count_request
    get_handlers: dict[str, GetHandler] = {
        OPENAPI_PATH: show_openapi,
        "/model_info": partial(_model_info, context),
        "/get_model_info": partial(_model_info, context),
        "/tokenizer_info": partial(_tokenizer_info, context),
    }
    framed = {
        path: FramedEndpoint(path, respond, count, context.tracer) for path, respond in post_handlers.items()
    }
    return create_node_app(context, framed, get_handlers)


# --- endpoints that generate --------------------------------------------------------------------------


async def _generate(
    context: DecodeContext, endpoint: Endpoint, handler: Handler, body: bytes, arrived_at: float, reply: Reply
) -> None:
    """Check a request, answer it with ``handler``, and record how long that took if it was answered."""
    timeline = Timeline(context.metrics, arrived_at, reply.request_headers, reply.span)
    try:
        work = await _check(context, endpoint, body, arrived_at, timeline)
        answer = await handler(work)
        await reply.send_answer(answer, [*work.headers, *_page_names(context, work, reply)])
    finally:
        timeline.close()
    context.metrics.e2e_request_latency.observe(time.monotonic() - arrived_at)


async def _check(
    context: DecodeContext, endpoint: Endpoint, body: bytes, arrived_at: float, timeline: Timeline
) -> Work:
    """Parse a request and plan its samples. Raises ApiError, also where the node takes no requests now."""
    settings, defaults = context.settings, context.sampling_defaults
    # The body is given twice: its size decides whether a thread parses it.
    request = await parse_body(body, parse_request, endpoint, body, settings.model_name, defaults)
    context.link.require_place(sum(options.n for options in request.options))
    ready = context.link.require_serving()
    limits = RequestLimits(
        ready.context_length,
        ready.max_total_tokens_hisparse,
        ready.max_total_tokens_dense,
        settings.default_max_tokens,
    )
    samples = await plan_samples(
        request, context.codec, limits, settings.page_size, context.link.front_number
    )
    timeline.note_checked(request, samples, settings.model_name)
    return Work(request, samples, arrived_at, timeline)


def _left_out(request: ApiRequest) -> list[tuple[bytes, bytes]]:
    """Return the header that names the tools which the model was not shown."""
    chat = request.chat
    if chat is None or not chat.left_out:
        return []
    named = (f"{tool.place} ({tool.kind})" for tool in chat.left_out[:_MAX_LEFT_OUT_SHOWN])
    return [(LEFT_OUT_HEADER, ", ".join(named).encode())]


def _page_names(context: DecodeContext, work: Work, reply: Reply) -> list[tuple[bytes, bytes]]:
    """Return the header that names pages of the first prompt, if a router asks for it."""
    if (PAGES_HEADER, b"1") not in reply.request_headers:
        return []
    sample = work.samples[0]
    num_tokens = num_packed_tokens(sample.prompt)
    # Further pages are shared only when the request has ended.
    names = encode_names(sample.keys, num_tokens, first_stepped(num_tokens, 0, sample.keys.page_size))
    return [(PAGES_HEADER, names)] if names else []


async def _answer_about_tokens(
    context: DecodeContext, path: TokenPath, body: bytes, arrived_at: float, reply: Reply
) -> None:
    context_length = context.link.require_serving().context_length
    model_name = context.settings.model_name
    await reply.send_answer(await answer_about_tokens(path, body, model_name, context.codec, context_length))


# --- information -------------------------------------------------------------------------------------


async def _model_info(context: DecodeContext, request: Request) -> Response:
    defaults = asdict(context.sampling_defaults)
    added = {"vocab_size": context.codec.vocab_size, "default_sampling_params": defaults}
    return json_response(model_info(context) | added)


async def _tokenizer_info(context: DecodeContext, request: Request) -> Response:
    """Answer vLLM's /tokenizer_info, which clients without a tokenizer read, such as lm-eval."""
    return json_response(context.codec.description)
