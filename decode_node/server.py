"""The decode node's front: it answers clients in text, whole or streamed, with the prompt's logprobs.

``hisparse-pd decode`` calls ``run``. ``serving/api/app.py`` turns a body into ``Work``; here its samples go
to the engine, and what comes back becomes deltas, until all have finished or one fails.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hisparse_pd.base.decode_settings import DecodeSettings
from hisparse_pd.base.vocabulary import FinishReason, RankPlace
from hisparse_pd.engine.messages import RequestFailed, Tokens
from hisparse_pd.serving.api.answering import streamed, whole_body
from hisparse_pd.serving.api.app import DecodeContext, Work, create_app
from hisparse_pd.serving.api.frame import HttpAnswer
from hisparse_pd.serving.api.models import json_response
from hisparse_pd.serving.api.node import run_front
from hisparse_pd.serving.api.node_app import NodeContext
from hisparse_pd.serving.api.output import Delta, SampleOutput
from hisparse_pd.serving.api.prompt_scores import scored_prompts
from hisparse_pd.serving.api.requests import engine_groups
from hisparse_pd.serving.api.sampling_defaults import SamplingDefaults
from hisparse_pd.serving.http.http_errors import RequestFailedError
from hisparse_pd.serving.http.rank_choice import ByPrefix


def run(settings: DecodeSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status of the process."""
    return run_front(
        settings,
        role="decode",
        engine=_run_engine,
        choose_rank=ByPrefix(),
        check=SamplingDefaults.of,  # raises for a bad generation_config.json before the engine starts
        ports=(settings.port,),
        apps=apps,
    )


@contextmanager
def apps(node: NodeContext) -> Iterator[tuple[Starlette, ...]]:
    """Yield the front's application. Further fronts, which are processes of their own, find this by name."""
    with closing(DecodeContext.of(node)) as context:
        yield (create_decode_app(context),)


def _run_engine(settings: DecodeSettings, endpoints: Sequence[str], place: RankPlace) -> None:
    # Only the engine's process imports these: the front needs no torch, and starts in half the time without.
    from hisparse_pd.decode_node.engine import DecodeEngine
    from hisparse_pd.engine.start import run_engine_process

    run_engine_process(DecodeEngine, settings, endpoints, place)


def create_decode_app(context: DecodeContext) -> Starlette:
    async def decode(work: Work) -> HttpAnswer:
        deltas = partial(_deltas, context, work)
        if work.request.stream:
            return await HttpAnswer.stream(streamed(context, work, deltas))
        return HttpAnswer(await whole_body(context, work, deltas))

    app = create_app(context, decode)
    app.router.routes.append(Route("/drain", partial(_drain, context), methods=["POST"]))
    return app


async def _drain(context: DecodeContext, request: Request) -> Response:
    """Drain the node, as SIGTERM does: its first front, the parent of the others, gets that signal.

    A repeated call sends no second signal, which would end the wait for requests in flight.
    """
    if not context.link.is_leaving:
        os.kill(os.getpid() if context.link.front_number == 0 else os.getppid(), signal.SIGTERM)
    return json_response({"status": "the node takes nothing new, and ends"})


async def _deltas(
    context: DecodeContext, work: Work, outputs: Sequence[SampleOutput]
) -> AsyncGenerator[Delta, None]:
    """Run the samples, and yield their deltas until all have finished.

    Raises RequestFailedError as soon as one fails; the others are then aborted.
    """
    clock = _TokenClock(context, work)
    by_request_id = {_request_id(output): output for output in outputs}
    prompts = scored_prompts(outputs)
    num_live = sum(output.finish is None for output in outputs)

    journal = work.request.journal
    may_move = journal is not None and journal.may_move  # the router can resume it on another node
    with context.link.open(engine_groups(work.samples), may_move=may_move) as group:
        work.timeline.note_sent(group.ranks)
        while num_live:
            event = await group.next_event()
            output = by_request_id[event.request_id]
            if output.finish is not None:
                continue  # sent before the engine knew of the stop string
            if isinstance(event, RequestFailed):
                work.timeline.note_failed(output.index, event.phases, event.error)
                raise RequestFailedError(event.status, event.error, code=event.code or None)

            # Tokens wait until the logprobs of their prompt, if wanted, have been shown.
            for due in prompts[output.sample.prompt_index].due(event):
                if isinstance(due, Delta):  # of logprobs of the prompt
                    yield due
                    continue
                output = by_request_id[due.request_id]
                if output.finish is not None:
                    continue
                work.timeline.note_phases(output.index, due.phases, due.stats, due.prefill)
                delta = output.feed(_shown(output, due))
                output.is_behind = group.has_more_tokens(due.request_id)  # ``/generate`` then skips the event
                clock.note(output.index, delta.last_token - delta.first_token)
                if delta.finish is not None:
                    work.timeline.note_finished(output.index, len(output.token_ids), delta.finish.reason)
                    num_live -= 1
                    group.finish(due.request_id)  # the engine does not know of stop strings
                yield delta


def _request_id(output: SampleOutput) -> str:
    return output.sample.generate.request_id


def _shown(output: SampleOutput, tokens: Tokens) -> Tokens:
    """Return ``tokens`` as the client sees them: without ids if the sample wants no output."""
    if not output.sample.is_empty:
        return tokens
    return Tokens(tokens.request_id, (), finish_reason=FinishReason.LENGTH, stats=tokens.stats)


class _TokenClock:
    """Measures the time to the first token, and between tokens, of one request's samples. Tokens that come
    together share the time since the last ones."""

    def __init__(self, context: DecodeContext, work: Work) -> None:
        self._metrics = context.metrics
        self._timeline = work.timeline
        self._last_at: dict[int, float] = {}
        """By the sample's index, when its last tokens came."""

    def note(self, index: int, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now = time.monotonic()
        last = self._last_at.get(index)
        self._last_at[index] = now
        if last is None:
            self._metrics.time_to_first_token.observe(self._timeline.note_first_token())
            return
        for _ in range(num_tokens):
            self._metrics.inter_token_latency.observe((now - last) / num_tokens)
